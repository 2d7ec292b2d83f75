"""Requests to sites, and the checks that decide which replies may change the model."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from halfmoon.aggregation.precision import decompress_upload
from halfmoon.aggregation.weights import WeightCap, compute_caps
from halfmoon.api.types import ClientUpdate
from halfmoon.api.uploads import Upload, UploadSpec
from halfmoon.core.errors import UserError
from halfmoon.core.tree import Tree, flatten
from halfmoon.engine.budget import ClientSize
from halfmoon.engine.driver import ClientContext
from halfmoon.engine.evaluation import ModelEvaluation, summarize_clients
from halfmoon.engine.sampling import Amount
from halfmoon.federation.protocol import limits, messages
from halfmoon.federation.protocol.messages import ECHOED_FIELDS, MalformedMessage, Refusal, Reply, Request
from halfmoon.federation.protocol.tree_spec import TreeSpec, UploadProbe
from halfmoon.federation.server.cohorts import Quarantine
from halfmoon.federation.server.connection import SiteReply
from halfmoon.federation.server.plan import Rules
from halfmoon.federation.server.secure_sum import sum_layout, sum_spec
from halfmoon.federation.server.sessions import NOT_CONNECTED
from halfmoon.federation.server.validation import check_counts, check_norm, check_schema, update_norm
from halfmoon.models import Network
from halfmoon.storage.events import EventList, EventRecorder
from halfmoon.storage.serialization import map_tree, unpack

MAX_REASON_LENGTH = 500
"""Characters of a site's refusal that are logged."""


@dataclass
class FederatedEvaluation:
    """The evaluation of one model on the images of several sites.

    Attributes:
        cap: largest number of images of a site, in multiples of the median; 0 for no cap.
        results: for each site the confusion matrix (rows are true classes) and the mean loss.
        by_site: accuracy of those sites whose people agreed to show it.
    """

    cap: float = 0.0
    results: list[tuple[Tensor, float]] = field(default_factory=list)
    by_site: dict[str, float] = field(default_factory=dict)

    def add(self, result: object, class_count: int, image_count: int) -> bool:
        """Add a site's evaluation of the model to the others, if it is plausible.

        Sites are not trusted: a site could otherwise report any accuracy, for any number of images.

        Args:
            result: what the site sent: {"confusion": int64 (classes, classes), "loss": float scalar}.
            class_count: the number of classes.
            image_count: the number of images that the site declared when it joined.

        Returns:
            True if the result was added. False if it has another format, counts other images than declared, or its
            loss is not finite.
        """
        if not isinstance(result, dict):
            return False
        confusion = result.get("confusion")
        loss = result.get("loss")
        if not isinstance(confusion, Tensor) or not isinstance(loss, Tensor):
            return False
        if confusion.shape != (class_count, class_count) or confusion.dtype != torch.int64 or loss.shape != ():
            return False
        if image_count == 0 or int(confusion.sum()) != image_count or int(confusion.min()) < 0:
            return False
        if not bool(loss.isfinite()):
            return False
        self.results.append((confusion.clone(), float(loss)))
        return True

    def total(self) -> ModelEvaluation | None:
        """Sum the confusion matrices of the sites, and average their losses, weighted by images.

        The confusion matrix of a site with more images than the cap (a multiple of the median) is scaled down, so that
        a site that claims a million images does not decide the accuracy.

        Returns:
            The evaluation over all sites; None if no site has sent a result.
        """
        if not self.results:
            return None
        image_counts = [int(confusion.sum()) for confusion, _ in self.results]
        max_counts = compute_caps([float(count) for count in image_counts], self.cap)
        total_confusion = torch.zeros_like(self.results[0][0])
        loss_sum = 0.0
        for (confusion, mean_loss), count, max_count in zip(self.results, image_counts, max_counts, strict=True):
            if count > max_count:
                confusion = (confusion.double() * (max_count / count)).floor().to(torch.int64)
            total_confusion = total_confusion + confusion
            loss_sum += mean_loss * int(confusion.sum())
        # Scaling may round every element down to 0.
        total_count = max(1, int(total_confusion.sum()))
        return ModelEvaluation(total_confusion, loss_sum / total_count)

    def row(self, round: int) -> dict[str, Any] | None:
        """Build the metrics of a model over all sites, for the line of a round in metrics.jsonl.

        Args:
            round: the number of rounds after which the model was sent.

        Returns:
            {"round", "sites", "accuracy", "loss", "per_class", "balanced_accuracy"}. With "by_site" if a site allows
            its accuracy to be shown, and "clients", their mean and spread, if two sites or more do. None without
            results.
        """
        total = self.total()
        if total is None:
            return None
        row = {"round": round, "sites": len(self.results), **total.row()}
        if self.by_site:
            row["by_site"] = dict(self.by_site)
        if len(self.by_site) > 1:
            row["clients"] = summarize_clients([*self.by_site.values()])
        return row


class Evaluations(NamedTuple):
    """Evaluations on test images, and on the validation images that choose the round."""

    tests: FederatedEvaluation
    validations: FederatedEvaluation

    @classmethod
    def with_cap(cls, cap: float) -> "Evaluations":
        """Create empty evaluations with this cap on the weight of a site."""
        return cls(FederatedEvaluation(cap), FederatedEvaluation(cap))


class RunIdentity(NamedTuple):
    """The fields of every message that identify the run.

    Attributes:
        federation: the hash of the terms.
        version: halfmoon's version.
        run: the id of the run.
    """

    federation: str
    version: str
    run: str


class Link(Protocol):
    """Carries messages to sites and back, without reading them."""

    def exchange(self, requests: Mapping[str, bytes], description: str) -> Mapping[str, SiteReply]:
        """Send each site its request and return the responses by site; `description` names the exchange in the log."""
        ...


@dataclass(frozen=True)
class Inspection:
    """Facts about the sites that replies are checked with, known before a reply arrives. Functions get a site's name.

    Attributes:
        upload_probe: finds the spec of an upload; None to skip the checks.
        max_amount: maps a client update and a site to the longest valid update, and to the site's image count.
        test_count: number of test images of a site; 0 if the server does not need them.
        validation_count: number of validation images of a site; 0 if the server does not need them.
        keys: long-term keys of the sites. With keys, uploads are masked, and only their sum can be read.
        cap: cap on the weights; None if the server cannot see the weight of a single site.
        shows_accuracy: whether a site allows its accuracy to be shown.
        declared_size: numbers of labeled and of unlabeled images that a site has declared.
    """

    upload_probe: UploadProbe | None = None
    max_amount: Callable[[ClientUpdate, str], tuple[Amount, int]] = lambda client_update, site: (Amount(0, 0, 0), 0)
    test_count: Callable[[str], int] = lambda _: 0
    validation_count: Callable[[str], int] = lambda _: 0
    keys: Callable[[], Mapping[str, bytes]] | None = None
    cap: WeightCap | None = None
    shows_accuracy: Callable[[str], bool] = lambda _: False
    declared_size: Callable[[str], ClientSize] = lambda _: ClientSize(0, 0)


@dataclass(frozen=True)
class CheckedReply:
    """A well-formed reply to a request. Once all checks are passed, its upload is only in the spool until aggregation.

    Attributes:
        reply: the reply; without its upload once all checks are passed.
        received: the bytes of the whole reply, perhaps in a file.
        layout: for each tree in the bytes the nested names of its tensors.
        weight: the weight of the upload; 0 for masked uploads, and before it is measured.
        norm: the Euclidean norm of the update; 0 for masked uploads, and before it is measured.
    """

    reply: Reply
    received: SiteReply
    layout: dict[str, Any]
    weight: float = 0.0
    norm: float = 0.0

    def load_upload(self) -> Reply:
        """Load the upload from the bytes of the reply, without its other trees, and return the reply with it."""
        layout = {"up": self.layout.get("up", {})}  # an empty tree has none
        path = self.received.path
        # A file is mapped into memory, so that only this tree is read from the disk.
        trees = unpack(self.received.read(), layout) if path is None else map_tree(path, layout)
        return replace(self.reply, upload=trees["up"])


@dataclass
class SiteCalls:
    """Sends requests to sites and checks their replies.

    Attributes:
        link: carries the messages.
        names: the sites, in the order of their client numbers.
        run: identifies the run in each request.
        rules: the server's rules for sites.
        quarantine: counts unusable replies; made from `rules` by default.
        inspection: what the server knows about the sites.
        log: receives events.
        wait_for_sites: blocks until this many sites are connected.
    """

    link: Link
    names: Sequence[str]
    run: RunIdentity
    rules: Rules = field(default_factory=Rules)
    quarantine: Quarantine = None  # type: ignore[assignment] (made of the rules by default)
    inspection: Inspection = Inspection()
    log: EventRecorder = field(default_factory=EventList)
    wait_for_sites: Callable[[int], None] = lambda _: None

    def __post_init__(self) -> None:
        if self.quarantine is None:
            self.quarantine = Quarantine(self.names, self.rules.strikes, None)

    def collect_masked(self, requests: Mapping[str, Request], spec: TreeSpec, description: str) -> dict[str, Reply]:
        """Send the requests of one step of a secure sum (keys, shares, unmasking) and return the usable replies.

        A site whose reply is missing or has other shapes than `spec` is logged and left out.

        Args:
            requests: the request of each site.
            spec: names, shapes and dtypes that the tensors of a reply must have.
            description: description of the exchange for the log.
        """
        usable_replies: dict[str, Reply] = {}
        max_bytes = limits.max_message_bytes([spec])
        for site, response in self.link.exchange(_serialize(requests), description).items():
            checked = self._read_reply(site, response, requests[site], max_bytes)
            if checked is None:
                continue
            fault = check_schema(checked.reply.upload, checked.reply.samples, spec)
            if fault is not None:
                self.reject(site, fault, requests[site].round)
            else:
                usable_replies[site] = checked.reply
        return usable_replies

    def plain_spec(self, context: ClientContext, received: Tree) -> TreeSpec:
        """Find names, shapes and dtypes of a site's upload before it is masked for a secure sum.

        The site sends it as one masked vector, which has no shapes. So they are computed, by running the client update
        on random images (`inspection.upload_probe`).

        Args:
            context: the client update.
            received: the tree that a site receives. Its structure determines that of the upload.

        Raises:
            UserError: there is no probe, or its loss is not finite.
        """
        upload_probe = self.inspection.upload_probe
        spec = None if upload_probe is None else upload_probe.find_spec(context, received)
        if not spec:
            raise UserError("the shape of the sites' uploads cannot be computed, so their masked sum cannot be read.")
        return spec

    def evaluators(self) -> list[str]:
        """List the sites that evaluate models: those with test or validation images, except quarantined ones."""
        inspection = self.inspection
        with_images = [name for name in self.names if inspection.test_count(name) or inspection.validation_count(name)]
        return [name for name in with_images if name not in self.quarantine.sites]

    def evaluate(self, requests: Mapping[str, Request], network: Network) -> Evaluations:
        """Have sites evaluate a model after the last round, and sum their results.

        Models of earlier rounds are evaluated together with the next local update (`add_evaluation`).

        Args:
            requests: the request of each site, with the model to evaluate.
            network: the network that the federation trains.

        Returns:
            The sums over the sites that replied with a plausible result.
        """
        evaluations = Evaluations.with_cap(self.rules.weight_cap)
        if not requests:
            return evaluations
        for site, response in self.link.exchange(_serialize(requests), "the final evaluation").items():
            # No context: without a local update the reply has no upload, only the evaluation.
            max_bytes = self.max_reply_bytes(context=None, request=requests[site], received={}, network=network)
            checked = self._read_reply(site, response, requests[site], max_bytes)
            if checked is not None:
                self.add_evaluation(evaluations, site, checked.reply, network)
        return evaluations

    def add_evaluation(self, evaluations: Evaluations, site: str, reply: Reply, network: Network) -> None:
        """Add a site's results on its test and validation images; impossible results are left out and logged.

        Args:
            evaluations: the sums to add to.
            site: the site.
            reply: its reply. `reply.evaluation` has "confusion" and "loss" on the test images, and below "validation"
                the same on the validation images; it is empty if no evaluation was requested.
            network: the network that the federation trains.
        """
        if not reply.evaluation:
            return
        test_count = self.inspection.test_count(site)
        validation_count = self.inspection.validation_count(site)
        plausible = True
        if test_count:
            plausible &= evaluations.tests.add(reply.evaluation, network.classes, test_count)
        if validation_count:
            validation = reply.evaluation.get("validation")
            plausible &= evaluations.validations.add(validation, network.classes, validation_count)
        if plausible and test_count and self.inspection.shows_accuracy(site):
            confusion, _ = evaluations.tests.results[-1]
            evaluations.tests.by_site[site] = int(confusion.trace()) / int(confusion.sum())
        if not plausible:
            text = f"{site} sent an impossible evaluation of a model: it is left out"
            self.log.record("evaluation_rejected", text, site=site)

    def max_reply_bytes(self, context: ClientContext | None, request: Request, received: Tree, network: Network) -> int:
        """Compute the size of the largest reply that an honest site can send, so that larger ones are not read.

        Args:
            context: the client update; None if the upload is masked, so that its spec is not that of the client update,
                or if only an evaluation is requested.
            request: the request.
            received: the tree that the site receives.
            network: the network that the federation trains.
        """
        upload_probe = self.inspection.upload_probe  # runs the update on random images; None: uploads are not checked
        if upload_probe is None:
            return messages.MAX_MESSAGE_BYTES
        upload_spec = None if context is None else upload_probe.find_spec(context, received)
        if upload_spec is None and request.client_update:  # masked, or the probe could not run the update
            return limits.max_unknown_message_bytes(network)
        evaluation_spec = limits.evaluation_spec(network.classes) if request.evaluation else {}
        return limits.max_message_bytes([upload_spec or {}, evaluation_spec])

    def _read_reply(self, site: str, response: SiteReply, request: Request, max_bytes: int) -> CheckedReply | None:
        """Parse a site's response and check that it replies to this request.

        What cannot be used is logged. A missing reply and a refusal have no further effect, since an honest site may
        have a reason; other faults (too large, malformed, to another request) count towards the site's quarantine.

        Args:
            site: the site.
            response: the serialized reply, or none, for a `problem`. With both, the transport received a reply that
                cannot be used, for example because it is too large.
            request: the request.
            max_bytes: size above which a reply is not parsed.

        Returns:
            The reply, whose upload is not checked or measured yet; None if it cannot be used.
        """
        round_number = request.round + 1
        if not response.has_arrived:
            reason = response.problem
            event = "site_absent" if reason.startswith(NOT_CONNECTED) else "site_skipped"
            text = f"{site} has no part in round {round_number}: {reason}"
            self.log.record(event, text, site=site, round=round_number, reason=reason)
            return None
        if response.problem:  # the site has replied, so this counts
            return self.reject(site, response.problem, request.round)
        try:
            unparsed = messages.scan_message(response.read(), Reply, Refusal, limit=max_bytes)
            message = unparsed.parse_trees()
        except MalformedMessage as error:
            return self.reject(site, str(error), request.round)
        if isinstance(message, Refusal):
            reason = message.reason[:MAX_REASON_LENGTH]
            text = f"{site} has no part in round {round_number}: {reason}"
            self.log.record("site_skipped", text, site=site, round=round_number, reason=reason)
            return None
        # A reply repeats the round, query and so on of its request. A late reply to an earlier request has others.
        if any(getattr(request, name) != getattr(message, name) for name in ECHOED_FIELDS):
            answered = f"round {message.round + 1}, query {message.query + 1} ({message.client_update[:40]})"
            return self.reject(site, f"it answers {answered}", request.round)
        return CheckedReply(message, response, unparsed.layout)

    def request_updates(
        self,
        requests: Mapping[str, Request],
        context: ClientContext,
        downloads: Mapping[str, Tree],
        network: Network,
        description: str,
    ) -> dict[str, CheckedReply]:
        """Have sites run a local update, and select the replies that may change the model.

        These are valid, plausible, and without a norm far above the others'. Only one upload at a time is in memory: it
        is freed after its checks, and aggregation loads it a second time from the spool on the disk.

        Args:
            requests: the request of each site.
            context: the client update.
            downloads: the tree that each site receives.
            network: the network that the federation trains.
            description: description of the exchange for the log.

        Returns:
            The accepted replies, by site. The others have been logged.
        """
        replies: dict[str, CheckedReply] = {}
        for site, response in self.link.exchange(_serialize(requests), description).items():
            reply = self._check_reply(site, response, requests[site], context, downloads[site], network)
            if reply is not None:
                replies[site] = reply
        # The norm of a masked upload is set to 0, so this check does not reject any of them.
        norms = {site: reply.norm for site, reply in replies.items()}
        # In multiples of the cohort's median. The operator's bound of 0 means no check; then the method's is not used.
        bound = min(self.rules.norm_bound, context.client_update.max_norm_ratio)
        too_large = check_norm(norms, bound)
        for site, fault in too_large.items():
            self.reject(site, fault, context.round)
        return {site: reply for site, reply in replies.items() if site not in too_large}

    def _check_reply(
        self,
        site: str,
        response: SiteReply,
        request: Request,
        context: ClientContext,
        received: Tree,
        network: Network,
    ) -> CheckedReply | None:
        """Read a site's reply, reject it if it breaks a rule, and measure its upload.

        Without an upload probe, which knows the shapes of valid uploads, only the size and the encoding are checked, and
        that it replies to the request. Of a masked upload only the layout and the counts are checked, because its
        numbers are random before they are summed.

        Args:
            site: the site.
            response: what it sent.
            request: the request that it answers.
            context: the client update.
            received: the tree that the site received.
            network: the network that the federation trains.

        Returns:
            The reply without its upload; None if there is no usable reply, which has been logged.
        """
        masked = self.inspection.keys is not None
        max_bytes = self.max_reply_bytes(None if masked else context, request, received, network)
        checked = self._read_reply(site, response, request, max_bytes)
        if checked is None:
            return None
        reply = checked.reply
        weight = 0.0
        norm = 0.0
        if self.inspection.upload_probe is not None:
            fault = self._find_layout_fault(self.inspection.upload_probe, site, reply, context, received)
            if fault is not None:
                return self.reject(site, fault, context.round)
            if not masked:
                precision = context.client_update.task.upload_precision
                upload = decompress_upload(Upload.from_tree(reply.upload), received, precision)
                fault = self._find_value_fault(site, upload, context)
                if fault is not None:
                    return self.reject(site, fault, context.round)
                weight, norm = _measure_upload(upload, received, context)
        # The upload, of which the weight and the norm remain, is freed with this function's variables.
        return replace(checked, reply=replace(reply, upload={}), weight=weight, norm=norm)

    def _find_layout_fault(
        self, upload_probe: UploadProbe, site: str, reply: Reply, context: ClientContext, received: Tree
    ) -> str | None:
        """Describe a fault in the names, shapes, dtypes or counts of a reply; None if it has none.

        Args:
            upload_probe: computes the layout of a valid upload.
            site: the site.
            reply: its reply. With secure aggregation the upload is one masked vector instead of parameters.
            context: the client update.
            received: the tree that the site received.
        """
        has_secure_sums = self.inspection.keys is not None
        if not has_secure_sums:
            # What the method declares about the sections of an upload, and the exact shapes and dtypes of its tensors.
            upload_spec = context.client_update.requirements.upload_spec
            tree_spec = upload_probe.find_spec(context, received)
        else:
            # A masked vector has no sections; only its length can be checked.
            upload_spec = None
            plain_spec = self.plain_spec(context, received)
            tree_spec = sum_spec(sum_layout(plain_spec))
        fault = check_schema(reply.upload, reply.samples, tree_spec, upload_spec)
        if fault is not None:
            return fault
        max_amount, image_count = self.inspection.max_amount(context.client_update, site)
        return check_counts(reply, max_amount, image_count, upload_spec)

    def _find_value_fault(self, site: str, upload: Upload, context: ClientContext) -> str | None:
        """Describe a fault in the values of an upload that is decompressed and not masked; None if it has none."""
        if context.client_update.task.upload_precision != "float32":
            # Finite values of a small type may overflow when they are decompressed.
            fault = check_schema(upload.tree, samples={}, pattern=None)
            if fault is not None:
                return fault
        declared = self.inspection.declared_size(site)
        return context.client_update.find_fault(upload, declared.labeled, declared.unlabeled)

    def weight_scale(self, replies: Mapping[int, CheckedReply], upload_spec: UploadSpec) -> dict[int, float]:
        """Compute the factor by which each client's weight is multiplied so that it does not exceed the cap.

        The cap is a multiple of the cohort's median (`Rules.weight_cap`). An upload that is a mean is capped by the
        weight that it reports. An upload that is a sum over images has no weight, so it is capped by the number of
        images that its site declared, and also by that of labeled images: a client with far more labels than the others
        would determine a classifier head that the server computes from these sums (least squares).

        Args:
            replies: the accepted replies by client number.
            upload_spec: declares which sections of an upload are sums.

        Returns:
            Factors between 0 and 1 by client number.
        """
        clients = list(replies)
        cap = self.inspection.cap
        if cap is None:
            return dict.fromkeys(clients, 1.0)
        if not upload_spec.sums:
            reported_weights = [replies[client].weight for client in clients]
            scale = cap.scale(clients, reported_weights)
            return dict(zip(clients, scale, strict=True))

        sizes = [self.inspection.declared_size(self.names[client]) for client in clients]
        image_counts = [float(size.labeled + size.unlabeled) for size in sizes]
        label_counts = [float(size.labeled) for size in sizes]
        scale = cap.scale(clients, image_counts)
        # `cap.scale` would also report the clients as capped in the metrics. `compute_caps` only computes.
        label_limits = compute_caps(label_counts, cap.factor)
        for index, (label_count, limit) in enumerate(zip(label_counts, label_limits, strict=True)):
            if label_count > limit:
                scale[index] = min(scale[index], limit / label_count)
        return dict(zip(clients, scale, strict=True))

    def reject(self, site: str, reason: str, round: int) -> None:
        """Log an unusable reply and count it. A site with too many of them is put into quarantine.

        The caller returns the None that this returns as its own result, no reply.

        Args:
            site: the site.
            reason: why its reply cannot be used.
            round: the round, from 0.
        """
        limit_reached = self.quarantine.count_refusal(site, round, reason)
        text = f"refused in round {round + 1}: the answer of {site}: {reason}"
        self.log.record("reply_rejected", text, site=site, round=round + 1, reason=reason)
        if limit_reached:
            limit = self.quarantine.limit
            text = f"{site} is set aside after {limit} unusable answers; --readmit {site} lets it back"
            self.log.record("site_quarantined", text, site=site)


def _measure_upload(upload: Upload, received: Tree, context: ClientContext) -> tuple[float, float]:
    """Compute the weight of a decompressed upload and the norm of its update.

    A method may define the norm (`ClientUpdate.upload_norm`); otherwise it is the Euclidean norm of the difference
    between the upload and the tree that the site received.
    """
    norm = context.client_update.upload_norm(upload)
    if norm is None:
        norm = update_norm(upload, received, context.client_update.requirements.upload_spec)
    return float(upload.weight), norm


def _serialize(requests: Mapping[str, Request]) -> dict[str, bytes]:
    """Serialize the request of each site. Equal requests share one copy of the bytes, since a model may be large.

    Two requests are equal if their fields are equal and their trees consist of the same tensor objects, which is the
    case for a broadcast. Comparing identities avoids comparing values.
    """
    serialized: dict[tuple[object, ...], bytes] = {}
    messages_by_site: dict[str, bytes] = {}
    for site, request in requests.items():
        trees = {"down": request.download, "evaluation": request.evaluation, "masks": request.masks}
        header = repr(replace(request, download={}, evaluation={}, masks={}))
        # Empty branches have no leaves, so the names at the top of each tree belong to the key as well.
        top_names = [repr(list(tree)) for tree in trees.values()]
        tensor_ids = [(path, id(leaf)) for path, leaf in flatten(trees).items()]
        key = (header, *top_names, *tensor_ids)
        if key not in serialized:
            serialized[key] = messages.write_message(request)
        messages_by_site[site] = serialized[key]
    return messages_by_site
