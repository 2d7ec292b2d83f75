"""Requests to sites and their replies: what is sent, what is read, and which replies may touch the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

from halfmoon.aggregation.weights import WeightCap
from halfmoon.api.types import ClientUpdate
from halfmoon.api.uploads import Upload
from halfmoon.core.errors import UserError
from halfmoon.core.tree import Tree, flatten
from halfmoon.engine.driver import ClientContext
from halfmoon.engine.sampling import Amount
from halfmoon.federation.protocol import limits
from halfmoon.federation.protocol.evaluation import Evaluations, FederatedEvaluation
from halfmoon.federation.protocol.messages import (
    LARGEST,
    Malformed,
    Refusal,
    Reply,
    Request,
    look,
    write,
)
from halfmoon.federation.protocol.tree_spec import TreeSpec, UplinkSpec
from halfmoon.federation.server.plan import Rules
from halfmoon.federation.server.quarantine import Quarantine
from halfmoon.federation.server.secure_sum import layout, summed
from halfmoon.federation.server.sessions import Answer
from halfmoon.federation.server.spool import Spooled, held, part
from halfmoon.federation.server.validation import check_counts, check_norm, check_schema, norms
from halfmoon.models import Network


class RunIdentity(NamedTuple):
    """What every message carries: the hash of the terms, halfmoon's version, and which run of the federation it is."""

    federation: str
    version: str
    run: str


class Link(Protocol):
    """What carries messages to sites and back; it knows nothing of what they say."""

    def exchange(self, requests: Mapping[str, bytes], what: str) -> Mapping[str, Answer]:
        """Send each named site a request, and return what each answered; `what` says in words what it is."""
        ...


@dataclass(frozen=True)
class Inspection:
    """What is known of sites before they answer, to judge their answers by.

    most: how much a client update at a site may look at, and of how many images the site told.
    tests, validations: of how many test and validation images of its own a site told; 0 where nobody asks.
    keys: what sites showed when they joined, if uploads come under masks: then their sum is all that can be read.
    cap: what weights are capped by, where single ones are seen.
    """

    patterns: UplinkSpec
    most: Callable[[ClientUpdate, str], tuple[Amount, int]]
    tests: Callable[[str], int]
    validations: Callable[[str], int] = lambda _: 0
    keys: Callable[[], Mapping[str, bytes]] | None = None
    cap: WeightCap | None = None


@dataclass(frozen=True)
class JudgedReply:
    """A reply that may touch the model; its upload lies where the answer does, and is read when it is its turn."""

    reply: Reply  # without its upload
    data: bytes | Spooled
    shape: dict[str, Any]  # of the trees in there
    weight: float
    norm: float

    def upload(self) -> Tree:
        """Return the tree of the upload."""
        return part(self.data, self.shape, "up")

    def whole(self) -> Reply:
        """Return the reply with its upload."""
        return replace(self.reply, up=self.upload())


@dataclass
class SiteCalls:
    """Asks the sites `names`, client k being `names[k]`, and judges what they answer.

    `quarantine` counts unusable answers. Without an `inspection` replies are only read, not judged. `ready` returns
    when so many sites can be asked.
    """

    link: Link
    names: Sequence[str]
    run: RunIdentity
    rules: Rules = field(default_factory=Rules)
    quarantine: Quarantine = None  # type: ignore[assignment] (made of the rules where none is given)
    inspection: Inspection | None = None
    say: Callable[[str], None] = lambda _: None
    ready: Callable[[int], None] = lambda _: None

    def __post_init__(self) -> None:
        if self.quarantine is None:
            self.quarantine = Quarantine(self.names, self.rules.strikes, None)

    @property
    def keys(self) -> Callable[[], Mapping[str, bytes]] | None:
        """Return the keys of sites whose uploads come under masks, None where uploads are sent plainly."""
        return None if self.inspection is None else self.inspection.keys

    @property
    def cap(self) -> WeightCap | None:
        """Return what weights are capped by, None where they are taken as they are."""
        return None if self.inspection is None else self.inspection.cap

    def exchange(self, requests: Mapping[str, Request], what: str) -> Mapping[str, Answer]:
        """Send each named site its request, and return what each answered."""
        return self.link.exchange(_written(requests), what)

    def tests(self, site: str) -> int:
        """Return how many test images of its own a site told of."""
        return 0 if self.inspection is None else self.inspection.tests(site)

    def validations(self, site: str) -> int:
        """Return how many validation images of its own a site told of."""
        return 0 if self.inspection is None else self.inspection.validations(site)

    def asked(self, requests: Mapping[str, Request], pattern: TreeSpec, what: str) -> dict[str, Reply]:
        """Return the usable replies to requests about a masked sum alone."""
        good: dict[str, Reply] = {}
        for site, answer in self.exchange(requests, what).items():
            reply = self.read(site, answer, requests[site], limits.weight([pattern]))
            fault = None if reply is None else check_schema(reply.up, reply.samples, pattern)
            if fault is not None:
                self.refuse(site, fault, requests[site].round)
            elif reply is not None:
                good[site] = reply
        return good

    def plain(self, context: ClientContext, down: Tree) -> TreeSpec:
        """Return the pattern of the uploads that a masked query hides."""
        pattern = self.inspection and self.inspection.patterns.of(context, down)
        if not pattern:
            raise UserError("what sites would send cannot be found out, so that no masked sum of it can be read.")
        return pattern

    def examining(self) -> list[str]:
        """Return the sites, but those that are set aside, which have images that models are tested on."""
        names = [name for name in self.names if name not in self.quarantine.aside]
        return [name for name in names if self.tests(name) or self.validations(name)]

    def examined(self, requests: Mapping[str, Request], network: Network) -> Evaluations:
        """Return what sites say of a model that comes without any work."""
        evaluations = Evaluations.capped(self.rules.weight_cap)
        answers = self.exchange(requests, "the last test") if requests else {}
        for name, answer in answers.items():
            reply = self.read(name, answer, requests[name], self.most(None, requests[name], {}, network))
            if reply is not None:
                self.add(evaluations, name, reply, network)
        return evaluations

    def add(self, evaluations: Evaluations, site: str, reply: Reply, network: Network) -> None:
        """Count what a site says of a model, if it says something."""
        said = reply.evaluation
        if not said:
            return
        parts: list[tuple[FederatedEvaluation, object, int]] = [
            (evaluations.tests, said, self.tests(site)),
            (evaluations.validations, said.get("validation"), self.validations(site)),
        ]
        added = [each.add(told, network.classes, count) for each, told, count in parts if count]
        if not all(added):
            self.say(f"{site} tested a model in a way that cannot be: that is left out")

    def most(self, context: ClientContext | None, request: Request, down: Tree, network: Network) -> int:
        """Return the most bytes of an honest site's reply; `context` is None where none says what it looks like."""
        if self.inspection is None:
            return LARGEST
        pattern = None if context is None else self.inspection.patterns.of(context, down)
        if pattern is None and request.client_update:
            return limits.unsure(network)
        return limits.weight([pattern or {}, limits.examined(network.classes) if request.evaluation else {}])

    def read(self, site: str, answer: Answer, request: Request, most: int) -> Reply | None:
        """Return the reply to a request, None where there is none that could be used; no more than `most` is read."""
        found = self._read(site, answer, request, most)
        return None if found is None else found[0]

    def _read(self, site: str, answer: Answer, request: Request, most: int) -> tuple[Reply, dict[str, Any]] | None:
        if answer.data is None:
            self.say(f"{site} has no part in round {request.round + 1}: {answer.reason}")
            return None
        if answer.reason:
            return self.refuse(site, answer.reason, request.round)
        try:
            message = look(held(answer.data), Reply, Refusal, limit=most)
            said = message.open()
        except Malformed as error:
            return self.refuse(site, str(error), request.round)
        if isinstance(said, Refusal):
            self.say(f"{site} has no part in round {request.round + 1}: {said.reason[:500]}")
            return None
        asked, told = (
            (each.federation, each.version, each.run, each.round, each.attempt, each.query, each.client_update)
            for each in (request, said)
        )
        if asked != told:
            what = f"it answers round {said.round + 1}, query {said.query + 1} ({said.client_update[:40]})"
            return self.refuse(site, what, request.round)
        return said, message.shape

    def judged(
        self,
        answers: Mapping[str, Answer],
        requests: Mapping[str, Request],
        context: ClientContext,
        downlinks: Mapping[str, Tree],
        network: Network,
    ) -> dict[str, JudgedReply]:
        """Return the replies that may touch the model: one after the other is read, judged, and let go again."""
        good: dict[str, JudgedReply] = {}
        for site, answer in answers.items():
            reply = self._judged(site, answer, requests[site], context, downlinks[site], network)
            if reply is not None:
                good[site] = reply
        # Where sums are masked no single norm means anything: all are 0.
        large = check_norm({site: each.norm for site, each in good.items()}, self.rules.norm_bound)
        for site, fault in large.items():
            self.refuse(site, fault, context.round)
        return {site: reply for site, reply in good.items() if site not in large}

    def _judged(
        self, site: str, answer: Answer, request: Request, context: ClientContext, down: Tree, network: Network
    ) -> JudgedReply | None:
        hidden = self.keys is not None
        found = self._read(site, answer, request, self.most(None if hidden else context, request, down, network))
        if found is None or answer.data is None:
            return None
        reply, shape = found
        fault = None if self.inspection is None else self._fault(self.inspection, reply, site, context, down)
        if fault is not None:
            return self.refuse(site, fault, context.round)
        weight, norm = 0.0, 0.0
        if self.inspection is not None and not hidden:
            upload = Upload.of(reply.up)
            weight = float(upload.weight)
            norm = norms({site: upload}, {site: down}, context.client_update.needs.uplink)[site]
        return JudgedReply(replace(reply, up={}), answer.data, shape, weight, norm)

    def _fault(self, inspection: Inspection, reply: Reply, site: str, context: ClientContext, down: Tree) -> str | None:
        """Return why a reply, looked at alone, may not touch the model."""
        hidden = self.keys is not None
        pattern = summed(layout(self.plain(context, down))) if hidden else inspection.patterns.of(context, down)
        uplink = None if hidden else context.client_update.needs.uplink
        fault = check_schema(reply.up, reply.samples, pattern, uplink)
        return fault or check_counts(reply, *inspection.most(context.client_update, site), uplink)

    def capped(self, replies: Mapping[int, JudgedReply]) -> dict[int, float]:
        """Return what the weight of each client, by number, is multiplied by, so that none is too large."""
        clients = list(replies)
        if self.cap is None:
            return dict.fromkeys(clients, 1.0)
        scale = self.cap.scale(clients, [replies[client].weight for client in clients])
        return dict(zip(clients, scale, strict=True))

    def refuse(self, site: str, reason: str, round: int) -> None:
        """Count an answer that cannot be used, with its reason."""
        aside = self.quarantine.refuse(site, round, reason)
        self.say(f"refused in round {round + 1}: the answer of {site}: {reason}")
        if aside:
            self.say(
                f"{site} is set aside after {self.quarantine.limit} unusable answers; --readmit {site} lets it back"
            )


def _written(requests: Mapping[str, Request]) -> dict[str, bytes]:
    """Return requests as bytes; those that say the same, as most of a cohort do, are one object in memory."""
    made: dict[tuple[object, ...], bytes] = {}
    found: dict[str, bytes] = {}
    for site, request in requests.items():
        trees = {"down": request.down, "evaluation": request.evaluation, "masks": request.masks}
        alike = repr(replace(request, down={}, evaluation={}, masks={})), *map(repr, map(list, trees.values()))
        key = (*alike, *((path, id(leaf)) for path, leaf in flatten(trees).items()))
        found[site] = made[key] if key in made else made.setdefault(key, write(request))
    return found
