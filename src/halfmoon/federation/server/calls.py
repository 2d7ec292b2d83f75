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
from halfmoon.federation.server.connection import SpooledFile, load_tree, read_content
from halfmoon.federation.server.plan import Rules
from halfmoon.federation.server.secure_sum import sum_layout, sum_spec
from halfmoon.federation.server.sessions import NOT_CONNECTED, SiteResponse
from halfmoon.federation.server.validation import check_counts, check_norm, check_schema, update_norm
from halfmoon.models import Network
from halfmoon.storage.events import EventList, EventRecorder


@dataclass
class FederatedEvaluation:
    """The evaluation of one model on the images of several sites.

    Attributes:
        cap: a site counts at most this many times the median number of images; 0 for no cap.
        results: for each site the confusion matrix (rows are true classes) and the mean loss.
        by_site: accuracy of those sites whose people agreed to show it.
    """

    cap: float = 0.0
    results: list[tuple[Tensor, float]] = field(default_factory=list)
    by_site: dict[str, float] = field(default_factory=dict)

    def add(self, result: object, classes: int, tests: int) -> bool:
        """Add the result of a site.

        Args:
            result: what the site sent: {"confusion": int64 (classes, classes), "loss": float scalar}.
            classes: the number of classes.
            tests: the number of images that the site declared.

        Returns:
            Whether the result is plausible; if not, it is not added.
        """
        if not isinstance(result, dict):
            return False
        confusion = result.get("confusion")
        loss = result.get("loss")
        if not isinstance(confusion, Tensor) or not isinstance(loss, Tensor):
            return False
        if confusion.shape != (classes, classes) or confusion.dtype != torch.int64 or loss.shape != ():
            return False
        if int(confusion.min()) < 0 or int(confusion.sum()) != tests or not tests or not bool(loss.isfinite()):
            return False
        self.results.append((confusion.clone(), float(loss)))
        return True

    def tally(self) -> ModelEvaluation | None:
        """Sum the results; a site above the cap has each cell of its matrix scaled down. None without results."""
        if not self.results:
            return None
        counts = [int(confusion.sum()) for confusion, _ in self.results]
        max_counts = compute_caps([float(count) for count in counts], self.cap)
        total = torch.zeros_like(self.results[0][0])
        loss = 0.0
        for (confusion, mean_loss), count, max_count in zip(self.results, counts, max_counts, strict=True):
            if count > max_count:
                confusion = (confusion.double() * (max_count / count)).floor().to(torch.int64)
            total = total + confusion
            loss += mean_loss * int(confusion.sum())
        return ModelEvaluation(total, loss / max(1, int(total.sum())))

    def row(self, round: int) -> dict[str, Any] | None:
        """Build the metrics row of the model of a round.

        Returns:
            {"round", "sites", "accuracy", "loss", "per_class", "balanced_accuracy"}, with "by_site" if a site shows
            its accuracy, and "clients", their mean and spread, if two sites or more do. None without results.
        """
        tally = self.tally()
        if tally is None:
            return None
        row = {"round": round, "sites": len(self.results), **tally.row()}
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
    """The part of every message that identifies the run.

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

    def exchange(self, requests: Mapping[str, bytes], description: str) -> Mapping[str, SiteResponse]:
        """Send each site its request and return the responses by site; `description` names the exchange in the log."""
        ...


@dataclass(frozen=True)
class Inspection:
    """What the server knows about its sites in advance; replies are checked against it.

    Attributes:
        patterns: finds the spec of an upload; None to skip the checks.
        max_amount: maps a client update and a site to the most that it may train on, and to the site's image count.
        tests: number of test images of a site; 0 if the server does not need them.
        validations: number of validation images of a site; 0 if the server does not need them.
        keys: long-term keys of the sites. With keys, uploads are masked, and only their sum can be read.
        cap: cap on the weights; None if the server cannot see the weight of a single site.
        shared: whether a site allows its own accuracy to be shown.
        declared: numbers of labeled and of unlabeled images that a site has declared.
    """

    patterns: UploadProbe | None = None
    max_amount: Callable[[ClientUpdate, str], tuple[Amount, int]] = lambda client_update, site: (Amount(0, 0, 0), 0)
    tests: Callable[[str], int] = lambda _: 0
    validations: Callable[[str], int] = lambda _: 0
    keys: Callable[[], Mapping[str, bytes]] | None = None
    cap: WeightCap | None = None
    shared: Callable[[str], bool] = lambda _: False
    declared: Callable[[str], ClientSize] = lambda _: ClientSize(0, 0)


@dataclass(frozen=True)
class CheckedReply:
    """A reply that may change the model. Its upload stays in the spool until it is aggregated.

    Attributes:
        reply: the reply without its upload.
        data: the bytes of the whole message.
        shape: the layout of the trees in `data`.
        weight: the weight of the upload; 0 for masked uploads.
        norm: the Euclidean norm of the update; 0 for masked uploads.
    """

    reply: Reply
    data: bytes | SpooledFile
    shape: dict[str, Any]
    weight: float
    norm: float

    def load_upload(self) -> Reply:
        """Return the reply with its upload."""
        return replace(self.reply, upload=load_tree(self.data, self.shape, "up"))


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

    def exchange(self, requests: Mapping[str, Request], description: str) -> Mapping[str, SiteResponse]:
        """Send each site its request and return the unchecked responses; `description` names the exchange in the log."""
        return self.link.exchange(_serialize(requests), description)

    def collect_masked(self, requests: Mapping[str, Request], spec: TreeSpec, description: str) -> dict[str, Reply]:
        """Send requests that belong to a masked sum and return the usable replies.

        Args:
            requests: one for each site.
            spec: the spec that `Reply.upload` must have.
            description: the exchange, in the words of the log.
        """
        replies: dict[str, Reply] = {}
        max_bytes = limits.max_message_bytes([spec])
        for site, response in self.exchange(requests, description).items():
            reply = self.read_reply(site, response, requests[site], max_bytes)
            if reply is None:
                continue
            fault = check_schema(reply.upload, reply.samples, spec)
            if fault is not None:
                self.reject(site, fault, requests[site].round)
            else:
                replies[site] = reply
        return replies

    def plain_spec(self, context: ClientContext, received: Tree) -> TreeSpec:
        """Find the spec of the uploads that a masked sum hides; raise UserError if it cannot be found."""
        patterns = self.inspection.patterns
        spec = None if patterns is None else patterns.find_spec(context, received)
        if not spec:
            raise UserError("the shape of the sites' uploads cannot be computed, so their masked sum cannot be read.")
        return spec

    def evaluators(self) -> list[str]:
        """List the sites that evaluate models: those with test or validation images, except quarantined ones."""
        active = [name for name in self.names if name not in self.quarantine.sites]
        return [name for name in active if self.inspection.tests(name) or self.inspection.validations(name)]

    def evaluate(self, requests: Mapping[str, Request], network: Network) -> Evaluations:
        """Request evaluations of a model without a client update, and sum the results."""
        evaluations = Evaluations.with_cap(self.rules.weight_cap)
        responses = self.exchange(requests, "the final evaluation") if requests else {}
        for name, response in responses.items():
            max_bytes = self.max_reply_bytes(None, requests[name], {}, network)
            reply = self.read_reply(name, response, requests[name], max_bytes)
            if reply is not None:
                self.add_evaluation(evaluations, name, reply, network)
        return evaluations

    def add_evaluation(self, evaluations: Evaluations, site: str, reply: Reply, network: Network) -> None:
        """Add the results of a site, if it sent some. Implausible results are left out and logged."""
        if not reply.evaluation:
            return
        tests = self.inspection.tests(site)
        validations = self.inspection.validations(site)
        plausible = True
        if tests:
            plausible &= evaluations.tests.add(reply.evaluation, network.classes, tests)
        if validations:
            plausible &= evaluations.validations.add(reply.evaluation.get("validation"), network.classes, validations)
        if plausible and tests and self.inspection.shared(site):
            confusion = evaluations.tests.results[-1][0]
            evaluations.tests.by_site[site] = int(confusion.trace()) / int(confusion.sum())
        if not plausible:
            self.log.record(
                "evaluation_rejected", f"{site} sent an impossible evaluation of a model: it is left out", site=site
            )

    def max_reply_bytes(self, context: ClientContext | None, request: Request, received: Tree, network: Network) -> int:
        """Compute the size of the largest reply that an honest site can send.

        Args:
            context: the client update; None if the spec of its upload is not known.
            request: the request.
            received: the tree that the site receives.
            network: the network that the federation trains.
        """
        patterns = self.inspection.patterns
        if patterns is None:
            return messages.MAX_MESSAGE_BYTES
        spec = None if context is None else patterns.find_spec(context, received)
        if spec is None and request.client_update:
            return limits.max_unknown_message_bytes(network)
        evaluation = limits.evaluation_spec(network.classes) if request.evaluation else {}
        return limits.max_message_bytes([spec or {}, evaluation])

    def read_reply(self, site: str, response: SiteResponse, request: Request, max_bytes: int) -> Reply | None:
        """Read a response; one that is missing, refuses or is malformed is logged and gives None."""
        result = self._read(site, response, request, max_bytes)
        return None if result is None else result[0]

    def _read(
        self, site: str, response: SiteResponse, request: Request, max_bytes: int
    ) -> tuple[Reply, dict[str, Any]] | None:
        """Read a response; return the reply and the layout of its trees."""
        number = request.round + 1
        if response.data is None:
            event = "site_absent" if response.reason.startswith(NOT_CONNECTED) else "site_skipped"
            text = f"{site} has no part in round {number}: {response.reason}"
            self.log.record(event, text, site=site, round=number, reason=response.reason)
            return None
        if response.reason:
            return self.reject(site, response.reason, request.round)
        try:
            unparsed = messages.scan_message(read_content(response.data), Reply, Refusal, limit=max_bytes)
            message = unparsed.parse_trees()
        except MalformedMessage as error:
            return self.reject(site, str(error), request.round)
        if isinstance(message, Refusal):
            reason = message.reason[:500]
            text = f"{site} has no part in round {number}: {reason}"
            self.log.record("site_skipped", text, site=site, round=number, reason=reason)
            return None
        if any(getattr(request, name) != getattr(message, name) for name in ECHOED_FIELDS):
            answered = f"round {message.round + 1}, query {message.query + 1} ({message.client_update[:40]})"
            return self.reject(site, f"it answers {answered}", request.round)
        return message, unparsed.layout

    def check_replies(
        self,
        responses: Mapping[str, SiteResponse],
        requests: Mapping[str, Request],
        context: ClientContext,
        downlinks: Mapping[str, Tree],
        network: Network,
    ) -> dict[str, CheckedReply]:
        """Find the replies that may change the model.

        One reply at a time is in memory: its upload is dropped after the checks, and loaded again from the spool.
        """
        replies: dict[str, CheckedReply] = {}
        for site, response in responses.items():
            reply = self._read_and_check(site, response, requests[site], context, downlinks[site], network)
            if reply is not None:
                replies[site] = reply
        # Masked uploads have no norm of their own (0), so this check does not reject any of them.
        norms = {site: reply.norm for site, reply in replies.items()}
        bound = min(self.rules.norm_bound, context.client_update.max_norm_ratio)
        too_large = check_norm(norms, bound)
        for site, fault in too_large.items():
            self.reject(site, fault, context.round)
        return {site: reply for site, reply in replies.items() if site not in too_large}

    def _read_and_check(
        self,
        site: str,
        response: SiteResponse,
        request: Request,
        context: ClientContext,
        received: Tree,
        network: Network,
    ) -> CheckedReply | None:
        """Read a site's reply, reject it if it breaks a rule, and measure its upload.

        Without `Inspection.patterns` only the size and the encoding are checked, and that it answers the request. Of a
        masked upload only the layout and the counts are checked, as its numbers mean nothing before they are summed.

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
        result = self._read(site, response, request, max_bytes)
        if result is None or response.data is None:
            return None
        reply, layout = result
        weight = 0.0
        norm = 0.0
        if self.inspection.patterns is not None:
            fault = self._find_fault(self.inspection.patterns, site, reply, context, received)
            if fault is not None:
                return self.reject(site, fault, context.round)
            if not masked:
                precision = context.client_update.task.upload_precision
                upload = decompress_upload(Upload.from_tree(reply.upload), received, precision)
                fault = self._find_value_fault(site, upload, context)
                if fault is not None:
                    return self.reject(site, fault, context.round)
                weight, norm = _measure_upload(upload, received, context)
        return CheckedReply(replace(reply, upload={}), response.data, layout, weight, norm)

    def _find_fault(
        self, patterns: UploadProbe, site: str, reply: Reply, context: ClientContext, received: Tree
    ) -> str | None:
        """Describe what is wrong with the layout of a reply's trees or with its counts; None if nothing is.

        The layout of a masked upload is that of a masked sum.
        """
        if self.inspection.keys is None:
            upload_spec = context.client_update.requirements.upload_spec
            tree_spec = patterns.find_spec(context, received)
        else:
            upload_spec = None
            tree_spec = sum_spec(sum_layout(self.plain_spec(context, received)))
        fault = check_schema(reply.upload, reply.samples, tree_spec, upload_spec)
        if fault is not None:
            return fault
        max_amount, images = self.inspection.max_amount(context.client_update, site)
        return check_counts(reply, max_amount, images, upload_spec)

    def _find_value_fault(self, site: str, upload: Upload, context: ClientContext) -> str | None:
        """Describe what is wrong with the numbers of a decoded upload, which is not masked; None if nothing is."""
        if context.client_update.task.upload_precision != "float32":
            # Finite values of a small type may overflow when they are decoded.
            fault = check_schema(upload.tree, {}, None)
            if fault is not None:
                return fault
        declared = self.inspection.declared(site)
        return context.client_update.find_fault(upload, declared.labeled, declared.unlabeled)

    def weight_scale(self, replies: Mapping[int, CheckedReply], upload_spec: UploadSpec) -> dict[int, float]:
        """Compute the factor that brings each client's weight below the cap, by client number.

        The weight in a sum over images is the number of images, and apart from it that of labeled images: a client with
        far more labels than the others would determine a head, however many images they have.
        """
        clients = list(replies)
        cap = self.inspection.cap
        if cap is None:
            return dict.fromkeys(clients, 1.0)
        if not upload_spec.sums:
            scale = cap.scale(clients, [replies[client].weight for client in clients])
            return dict(zip(clients, scale, strict=True))
        sizes = [self.inspection.declared(self.names[client]) for client in clients]
        scale = cap.scale(clients, [float(size.labeled + size.unlabeled) for size in sizes])
        labeled = [float(size.labeled) for size in sizes]
        for row, limit in enumerate(compute_caps(labeled, cap.factor)):
            if labeled[row] > limit:
                scale[row] = min(scale[row], limit / labeled[row])
        return dict(zip(clients, scale, strict=True))

    def reject(self, site: str, reason: str, round: int) -> None:
        """Count and log an unusable reply of `round` (from 0)."""
        limit_reached = self.quarantine.count_refusal(site, round, reason)
        text = f"refused in round {round + 1}: the answer of {site}: {reason}"
        self.log.record("reply_rejected", text, site=site, round=round + 1, reason=reason)
        if limit_reached:
            limit = self.quarantine.limit
            text = f"{site} is set aside after {limit} unusable answers; --readmit {site} lets it back"
            self.log.record("site_quarantined", text, site=site)


def _measure_upload(upload: Upload, received: Tree, context: ClientContext) -> tuple[float, float]:
    """Compute the weight of a decoded upload and the norm of its update, by the method's rule if it has one."""
    norm = context.client_update.upload_norm(upload)
    if norm is None:
        norm = update_norm(upload, received, context.client_update.requirements.upload_spec)
    return float(upload.weight), norm


def _serialize(requests: Mapping[str, Request]) -> dict[str, bytes]:
    """Serialize requests; equal requests, which share their tensors, are serialized once."""
    cache: dict[tuple[object, ...], bytes] = {}
    mail: dict[str, bytes] = {}
    for site, request in requests.items():
        trees = {"down": request.download, "evaluation": request.evaluation, "masks": request.masks}
        header = repr(replace(request, download={}, evaluation={}, masks={}))
        # Empty branches have no leaves, so the names at the top of each tree are part of the key as well.
        top_names = [repr(list(tree)) for tree in trees.values()]
        tensors = [(path, id(leaf)) for path, leaf in flatten(trees).items()]
        key = (header, *top_names, *tensors)
        if key not in cache:
            cache[key] = messages.write_message(request)
        mail[site] = cache[key]
    return mail
