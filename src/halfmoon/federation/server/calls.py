"""Requests to sites and their replies: which replies may touch the model."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from halfmoon.aggregation.precision import decoded
from halfmoon.aggregation.weights import WeightCap, caps
from halfmoon.api.types import ClientUpdate
from halfmoon.api.uploads import Upload
from halfmoon.core.errors import UserError
from halfmoon.core.tree import Tree, flatten
from halfmoon.engine.driver import ClientContext
from halfmoon.engine.evaluation import ModelEvaluation
from halfmoon.engine.sampling import Amount
from halfmoon.federation.protocol import limits, messages
from halfmoon.federation.protocol.messages import ECHOED_FIELDS, MalformedMessage, Refusal, Reply, Request
from halfmoon.federation.protocol.tree_spec import TreeSpec, UploadProbe
from halfmoon.federation.server.cohorts import Quarantine
from halfmoon.federation.server.connection import SpooledFile, load_tree, read_content
from halfmoon.federation.server.plan import Rules
from halfmoon.federation.server.secure_sum import sum_layout, sum_spec
from halfmoon.federation.server.sessions import SiteResponse
from halfmoon.federation.server.validation import check_counts, check_norm, check_schema, update_norm
from halfmoon.models import Network


@dataclass
class FederatedEvaluation:
    """The sum of the sites' results; a site counts at most `cap` times the median number of images, 0 for no cap."""

    cap: float = 0.0
    results: list[tuple[Tensor, float]] = field(default_factory=list)
    by_site: dict[str, float] = field(default_factory=dict)  # of those sites alone whose people agreed

    def add(self, result: object, classes: int, tests: int) -> bool:
        """Add the results of a site, where it has some; one that cannot be is left out."""
        if not isinstance(result, dict):
            return False
        cells, loss = result.get("confusion"), result.get("loss")
        if not isinstance(cells, Tensor) or not isinstance(loss, Tensor):
            return False
        if cells.shape != (classes, classes) or cells.dtype != torch.int64 or loss.shape != ():
            return False
        if int(cells.min()) < 0 or int(cells.sum()) != tests or not tests or not bool(loss.isfinite()):
            return False
        self.results.append((cells.clone(), float(loss)))
        return True

    def tally(self) -> ModelEvaluation | None:
        """Return the sum, None where nothing was added; a site over the cap has each cell scaled down."""
        if not self.results:
            return None
        counts = [int(cells.sum()) for cells, _ in self.results]
        limits = caps([float(count) for count in counts], self.cap)
        total, loss = torch.zeros_like(self.results[0][0]), 0.0
        for (cells, mean), count, limit in zip(self.results, counts, limits, strict=True):
            if count > limit:
                cells = (cells.double() * (limit / count)).floor().to(torch.int64)
            total = total + cells
            loss += mean * int(cells.sum())
        return ModelEvaluation(total, loss / max(1, int(total.sum())))

    def row(self, round: int) -> dict[str, Any] | None:
        """Return {"round", "sites", "accuracy", "loss", "per_class"} of the model of a round, None for nothing.

        `by_site` has the accuracy of each site that shares it.
        """
        if (tally := self.tally()) is None:
            return None
        shared = {"by_site": dict(self.by_site)} if self.by_site else {}
        return {"round": round, "sites": len(self.results), **tally.row(), **shared}


class Evaluations(NamedTuple):
    """The results on test images, and on the validation images that choose the round."""

    tests: FederatedEvaluation
    validations: FederatedEvaluation

    @classmethod
    def capped(cls, cap: float) -> "Evaluations":
        return cls(FederatedEvaluation(cap), FederatedEvaluation(cap))


class RunIdentity(NamedTuple):
    """A part of every message: the hash of the terms, halfmoon's version, and which run of the federation it is."""

    federation: str
    version: str
    run: str


class Link(Protocol):
    """Carries messages to sites and back; it does not read them."""

    def exchange(self, requests: Mapping[str, bytes], what: str) -> Mapping[str, SiteResponse]:
        """Send each named site a request, and return the answers; `what` names the exchange in words."""
        ...


@dataclass(frozen=True)
class Inspection:
    """The server's knowledge of sites before they answer, by which it checks their answers; none without `patterns`.

    most: the most that a client update at a site may train on, and how many images the site has.
    tests, validations: how many test and validation images of its own a site has; 0 where nobody asks.
    keys: the lasting keys of sites, if uploads come under masks: then their sum is all that can be read.
    cap: the cap of weights, where single ones are seen.
    shared: whether a site lets its own accuracy be shown.
    """

    patterns: UploadProbe | None = None
    most: Callable[[ClientUpdate, str], tuple[Amount, int]] = lambda client_update, site: (Amount(0, 0, 0), 0)
    tests: Callable[[str], int] = lambda _: 0
    validations: Callable[[str], int] = lambda _: 0
    keys: Callable[[], Mapping[str, bytes]] | None = None
    cap: WeightCap | None = None
    shared: Callable[[str], bool] = lambda _: False


@dataclass(frozen=True)
class CheckedReply:
    """A reply that may touch the model; its upload stays where the answer lies until its turn."""

    reply: Reply  # without its upload
    data: bytes | SpooledFile
    shape: dict[str, Any]  # of the trees in there
    weight: float
    norm: float

    def whole(self) -> Reply:
        return replace(self.reply, upload=load_tree(self.data, self.shape, "up"))


@dataclass
class SiteCalls:
    """Sends requests to the sites `names` and checks their answers by the `inspection`.

    `quarantine` counts unusable answers; `gather` returns when so many sites are connected.
    """

    link: Link
    names: Sequence[str]
    run: RunIdentity
    rules: Rules = field(default_factory=Rules)
    quarantine: Quarantine = None  # type: ignore[assignment] (made of the rules by default)
    inspection: Inspection = Inspection()
    say: Callable[[str], None] = lambda _: None
    wait_for_sites: Callable[[int], None] = lambda _: None

    def __post_init__(self) -> None:
        if self.quarantine is None:
            self.quarantine = Quarantine(self.names, self.rules.strikes, None)

    def exchange(self, requests: Mapping[str, Request], what: str) -> Mapping[str, SiteResponse]:
        return self.link.exchange(_serialize(requests), what)

    def masked(self, requests: Mapping[str, Request], spec: TreeSpec, what: str) -> dict[str, Reply]:
        """Return the usable replies to requests about a masked sum alone."""
        replies: dict[str, Reply] = {}
        for site, answer in self.exchange(requests, what).items():
            reply = self.read(site, answer, requests[site], limits.max_message_bytes([spec]))
            if reply is None:
                continue
            if fault := check_schema(reply.upload, reply.samples, spec):
                self.refuse(site, fault, requests[site].round)
            else:
                replies[site] = reply
        return replies

    def plain_spec(self, context: ClientContext, broadcast: Tree) -> TreeSpec:
        """Return the shape of the uploads that a masked query hides."""
        spec = self.inspection.patterns and self.inspection.patterns.find_spec(context, broadcast)
        if not spec:
            raise UserError("what sites would send cannot be found out, so that no masked sum of it can be read.")
        return spec

    def evaluators(self) -> list[str]:
        names = [name for name in self.names if name not in self.quarantine.sites]
        return [name for name in names if self.inspection.tests(name) or self.inspection.validations(name)]

    def evaluate(self, requests: Mapping[str, Request], network: Network) -> Evaluations:
        """Return the sites' results on a model that comes without a client update."""
        evaluations = Evaluations.capped(self.rules.weight_cap)
        answers = self.exchange(requests, "the last test") if requests else {}
        for name, answer in answers.items():
            reply = self.read(name, answer, requests[name], self.most(None, requests[name], {}, network))
            if reply is not None:
                self.add(evaluations, name, reply, network)
        return evaluations

    def add(self, evaluations: Evaluations, site: str, reply: Reply, network: Network) -> None:
        """Add the results of a site, where it has some; one that cannot be is left out."""
        if not reply.evaluation:
            return
        tests, validations = self.inspection.tests(site), self.inspection.validations(site)
        parts = (
            (evaluations.tests, reply.evaluation, tests),
            (evaluations.validations, reply.evaluation.get("validation"), validations),
        )
        valid = [total.add(result, network.classes, count) for total, result, count in parts if count]
        if all(valid) and tests and self.inspection.shared(site):
            cells = evaluations.tests.results[-1][0]
            evaluations.tests.by_site[site] = int(cells.trace()) / int(cells.sum())
        if not all(valid):
            self.say(f"{site} tested a model in a way that cannot be: that is left out")

    def most(self, context: ClientContext | None, request: Request, broadcast: Tree, network: Network) -> int:
        """Return the most bytes of an honest site's reply; `context` is None where its shape is not known."""
        patterns = self.inspection.patterns
        if patterns is None:
            return messages.MAX_MESSAGE_BYTES
        spec = None if context is None else patterns.find_spec(context, broadcast)
        if spec is None and request.client_update:
            return limits.max_unknown_message_bytes(network)
        return limits.max_message_bytes(
            [spec or {}, limits.evaluation_spec(network.classes) if request.evaluation else {}]
        )

    def read(self, site: str, answer: SiteResponse, request: Request, most: int) -> Reply | None:
        result = self._read(site, answer, request, most)
        return None if result is None else result[0]

    def _read(
        self, site: str, answer: SiteResponse, request: Request, most: int
    ) -> tuple[Reply, dict[str, Any]] | None:
        if answer.data is None:
            self.say(f"{site} has no part in round {request.round + 1}: {answer.reason}")
            return None
        if answer.reason:
            return self.refuse(site, answer.reason, request.round)
        try:
            unparsed = messages.scan_message(read_content(answer.data), Reply, Refusal, limit=most)
            message = unparsed.parse_trees()
        except MalformedMessage as error:
            return self.refuse(site, str(error), request.round)
        if isinstance(message, Refusal):
            self.say(f"{site} has no part in round {request.round + 1}: {message.reason[:500]}")
            return None
        if any(getattr(request, name) != getattr(message, name) for name in ECHOED_FIELDS):
            which = f"round {message.round + 1}, query {message.query + 1} ({message.client_update[:40]})"
            return self.refuse(site, f"it answers {which}", request.round)
        return message, unparsed.layout

    def checked(
        self,
        answers: Mapping[str, SiteResponse],
        requests: Mapping[str, Request],
        context: ClientContext,
        downlinks: Mapping[str, Tree],
        network: Network,
    ) -> dict[str, CheckedReply]:
        """Return the replies that may touch the model; each is read, checked, and let go before the next."""
        replies: dict[str, CheckedReply] = {}
        for site, answer in answers.items():
            reply = self._check(site, answer, requests[site], context, downlinks[site], network)
            if reply is not None:
                replies[site] = reply
        # Where sums are masked no single norm means anything: all are 0.
        large = check_norm({site: reply.norm for site, reply in replies.items()}, self.rules.norm_bound)
        for site, fault in large.items():
            self.refuse(site, fault, context.round)
        return {site: reply for site, reply in replies.items() if site not in large}

    def _check(
        self,
        site: str,
        answer: SiteResponse,
        request: Request,
        context: ClientContext,
        broadcast: Tree,
        network: Network,
    ) -> CheckedReply | None:
        hidden = self.inspection.keys is not None
        result = self._read(site, answer, request, self.most(None if hidden else context, request, broadcast, network))
        if result is None or answer.data is None:
            return None
        reply, shape = result
        weight, norm = 0.0, 0.0
        patterns = self.inspection.patterns
        if patterns is not None:
            upload_spec = None if hidden else context.client_update.requirements.upload_spec
            spec = (
                sum_spec(sum_layout(self.plain_spec(context, broadcast)))
                if hidden
                else patterns.find_spec(context, broadcast)
            )
            fault = check_schema(reply.upload, reply.samples, spec, upload_spec)
            fault = fault or check_counts(reply, *self.inspection.most(context.client_update, site), upload_spec)
            if fault is not None:
                return self.refuse(site, fault, context.round)
            if upload_spec is not None:
                precision = context.client_update.task.upload_precision
                upload = decoded(Upload.from_tree(reply.upload), broadcast, precision)
                if precision != "float32" and (fault := check_schema(upload.tree, {}, None)) is not None:
                    return self.refuse(site, fault, context.round)
                weight = float(upload.weight)
                norm = update_norm(upload, broadcast, upload_spec)
        return CheckedReply(replace(reply, upload={}), answer.data, shape, weight, norm)

    def weight_scale(self, replies: Mapping[int, CheckedReply]) -> dict[int, float]:
        """Return the factor of the weight of each client, by number, so that none is too large."""
        clients = list(replies)
        if self.inspection.cap is None:
            return dict.fromkeys(clients, 1.0)
        scale = self.inspection.cap.scale(clients, [replies[client].weight for client in clients])
        return dict(zip(clients, scale, strict=True))

    def refuse(self, site: str, reason: str, round: int) -> None:
        """Count an unusable answer, with its reason."""
        limit_reached = self.quarantine.count_refusal(site, round, reason)
        self.say(f"refused in round {round + 1}: the answer of {site}: {reason}")
        if limit_reached:
            self.say(
                f"{site} is set aside after {self.quarantine.limit} unusable answers; --readmit {site} lets it back"
            )


def _serialize(requests: Mapping[str, Request]) -> dict[str, bytes]:
    cache: dict[tuple[object, ...], bytes] = {}
    mail: dict[str, bytes] = {}
    for site, request in requests.items():
        trees = {"down": request.download, "evaluation": request.evaluation, "masks": request.masks}
        facts = repr(replace(request, download={}, evaluation={}, masks={})), *map(repr, map(list, trees.values()))
        key = (*facts, *((path, id(leaf)) for path, leaf in flatten(trees).items()))
        if key not in cache:
            cache[key] = messages.write_message(request)
        mail[site] = cache[key]
    return mail
