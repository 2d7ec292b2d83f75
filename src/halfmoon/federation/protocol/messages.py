"""What travels between a server and a site: trees as safetensors, numbers as JSON in their header; never code.

A server sends an Offer (what all have to agree on) and Requests, which name the round, the query and the work, and
carry what goes down. A site sends Joined, Replies, which carry what goes up, what the method reports of its steps, and
counts, or a Refusal. Nothing else leaves a site.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields, replace
from typing import Any, Generic, TypeVar

from safetensors import SafetensorError

from halfmoon.api.types import WeightedMetric
from halfmoon.api.uploads import Upload
from halfmoon.core.errors import UserError
from halfmoon.core.tree import Tree
from halfmoon.engine.driver import ClientResult
from halfmoon.engine.sampling import Amount
from halfmoon.federation.protocol import header
from halfmoon.federation.protocol.header import Cut, Header, UnreadableMessage
from halfmoon.federation.protocol.log import size
from halfmoon.federation.protocol.tree_spec import TreeSpec
from halfmoon.storage.serialization import pack, unpack, with_metadata

HEAD, SHAPE = "halfmoon", "shape"

SMALL, LARGEST = 2**22, 2**34
"""Bytes of a message at most: of a kind that has no tensors, and of one that has some. Who reads knows better."""

LONGEST, NUMBERS, HIGHEST = 10_000, 8, 2**63 - 1
"""Characters of a text, numbers in a list, and the highest of them, at most."""

UNKNOWN, OTHER_VERSION, UNFIT, FAILED = "unknown", "version", "unfit", "failed"
"""Why a site refuses: it did not join that federation, runs another halfmoon, cannot take part, or could not do it."""


class Malformed(UserError):
    """Bytes that are no message of a halfmoon."""


@dataclass(frozen=True)
class Offer:
    """What a server asks a site to join: `terms` is the JSON of `halfmoon.federation.protocol.terms.Terms`."""

    version: str  # of the server's halfmoon
    terms: str


@dataclass(frozen=True)
class Request:
    """One question to one site: do `client_update` in this round; `down` is what the server sends.

    `run` is the hexadecimal number of the server's run, of which there may be several of one federation. `attempt`
    counts how often the round is played, from 0. `known` is the client update (round, attempt, query) whose memory the
    site goes on from, `safe` the oldest one that it may ever have to; both are empty where there is none. `evaluation`
    is a model {"params", "stats"} to test on the site's own test and validation images, beside the work; without a work
    that is all.
    `masks` is what a masked sum needs (`halfmoon.federation.site.secure_sum`); without a work it asks for the site's
    part in that.
    """

    federation: str  # a hash of what all have to agree on
    version: str  # of the server's halfmoon
    run: str
    round: int
    attempt: int
    query: int
    client_update: str
    known: list[int] = field(default_factory=list)
    safe: list[int] = field(default_factory=list)
    down: Tree = field(default_factory=dict)
    evaluation: Tree = field(default_factory=dict)
    masks: Tree = field(default_factory=dict)


@dataclass(frozen=True)
class Joined:
    """A site takes part: under its name, with so many images that have a label, that have none, and to test on.

    `validations` are images that choose the round whose model is kept. `key` is the public half of the site's lasting
    key, in hexadecimal (`halfmoon.aggregation.secure.signing`); nothing where no sums are masked.
    """

    federation: str
    version: str
    name: str
    labeled: int
    unlabeled: int
    tests: int = 0
    validations: int = 0
    key: str = ""


@dataclass(frozen=True)
class Refusal:
    """A site does not do what it was asked: `kind` is one of this module's words, `reason` says it to a person."""

    version: str
    kind: str
    reason: str


@dataclass(frozen=True)
class Reply:
    """What a site answers: `up` (the tree of a `halfmoon.api.uploads.Upload`), its samples as a tree, and
    counts of what the client update took (see `ClientResult`).

    `evaluation` is what the model that came for a test said of the site's own test images: "confusion" (classes,
    classes) int64, rows the true classes, and "loss" (), the mean cross-entropy, float64; "validation" holds the same
    of its validation images. What a site has none of is not there.
    """

    federation: str
    version: str
    run: str
    round: int
    attempt: int
    query: int
    client_update: str
    amount: list[int]
    traffic: list[int]
    swept: int
    kept: int
    up: Tree = field(default_factory=dict)
    samples: Tree = field(default_factory=dict)
    evaluation: Tree = field(default_factory=dict)

    def __post_init__(self) -> None:
        sizes = [len(self.amount) == len(Amount._fields), len(self.traffic) == 2]
        counts = [*self.amount, *self.traffic, self.swept, self.kept]
        if not all(sizes) or not all(type(count) is int and count >= 0 for count in counts):
            raise Malformed("a reply's counts are not whole numbers from 0.")
        if not all(
            isinstance(each, dict) and set(each) == set(WeightedMetric._fields) for each in self.samples.values()
        ):
            raise Malformed("a reply's samples are not totals, squares and counts.")

    @classmethod
    def of(cls, request: Request, version: str, outcome: ClientResult) -> Reply:
        """Return the reply that says what came of a client update."""
        return cls(
            federation=request.federation,
            version=version,
            run=request.run,
            round=request.round,
            attempt=request.attempt,
            query=request.query,
            client_update=request.client_update,
            amount=list(outcome.amount),
            traffic=list(outcome.traffic),
            swept=outcome.swept,
            kept=outcome.kept,
            up=outcome.up.tree,
            samples={name: each._asdict() for name, each in outcome.samples.items()},
        )

    def outcome(self) -> ClientResult:
        """Return what came of the client update; the memory stays at the site."""
        down, up = self.traffic
        samples = {name: WeightedMetric(**each) for name, each in self.samples.items()}
        return ClientResult(Upload.of(self.up), {}, samples, Amount(*self.amount), (down, up), self.swept, self.kept)


@dataclass(frozen=True)
class Final:
    """The federation is over: `model` {"params", "stats"} is what it ended with, `card` its metadata, as JSON."""

    federation: str
    version: str
    card: str
    model: Tree = field(default_factory=dict)


@dataclass(frozen=True)
class Delivered:
    """A site has the final model."""

    federation: str
    version: str
    name: str


Message = Offer | Request | Joined | Refusal | Reply | Final | Delivered
_KINDS: dict[str, type[Message]] = {
    "offer": Offer, "request": Request, "joined": Joined, "refusal": Refusal, "reply": Reply,
    "final": Final, "delivered": Delivered,
}  # fmt: skip
_TREES = ("down", "up", "samples", "evaluation", "masks", "model")
_TYPES: dict[str, type] = {"str": str, "int": int, "list[int]": list}
M = TypeVar("M", bound=Message)


@dataclass(frozen=True)
class UnparsedMessage(Generic[M]):
    """A message of which all was judged, and nothing read, that lies in its trees; `message` is without those."""

    message: M
    data: bytes = field(repr=False)
    shape: dict[str, Any] = field(repr=False)
    header: Header = field(repr=False)

    def pattern(self, name: str) -> TreeSpec:
        """Return what one of its trees is like."""
        return header.pattern(self.shape, self.header.tensors, name)

    def open(self) -> M:
        """Return the message with its trees; raise `Malformed` where those are none."""
        try:
            body = unpack(self.data, self.shape)
        except (ValueError, LookupError, TypeError, RuntimeError, SafetensorError) as error:
            raise Malformed(f"a message cannot be read ({type(error).__name__}).") from error
        # A dataclass that is made anew looks at its fields again.
        return replace(self.message, **{name: body[name] for name in _trees(type(self.message)) if name in body})


def write(message: Message) -> bytes:
    """Return a message as bytes."""
    (kind,) = (kind for kind, made in _KINDS.items() if made is type(message))
    held = {each.name: getattr(message, each.name) for each in fields(message)}
    body = {name: held.pop(name) for name in _TREES if name in held}
    data, shape = pack(body)
    return with_metadata(data, {HEAD: json.dumps({"message": kind, **held}), SHAPE: json.dumps(shape)})


def read(data: bytes, *wanted: type[M], limit: int = LARGEST) -> M:
    """Return the message in `data`, which must be of a `wanted` kind; raise Malformed where there is none.

    Nothing of it is read where it has more than `limit` bytes, or more than its kind can have.
    """
    return look(data, *wanted, limit=limit).open()


def look(data: bytes, *wanted: type[M], limit: int = LARGEST) -> UnparsedMessage[M]:
    """Do what `read` does, but leave the trees where they lie: what they are like is known, and was judged."""
    most = min(limit, max(LARGEST if _trees(kind) else SMALL for kind in wanted))
    if len(data) > most:
        raise Malformed(f"a message has {size(len(data))}, of {size(most)} at most.")
    try:
        found = header.judged(data)
        head, shape = (header.parsed(found.texts.get(name, "")) for name in (HEAD, SHAPE))
        header.check_shape(shape, found.tensors)
    except Cut as error:
        raise Malformed(f"a message {error}.") from error
    except UnreadableMessage as error:
        raise Malformed(f"a message cannot be read: {error}.") from error
    kind = _KINDS.get(str(head.pop("message", None)))
    if kind is None:
        raise Malformed("a message cannot be read: nobody knows what it is.")
    for choice in wanted:
        if kind is choice:
            return UnparsedMessage(_made(choice, head, shape), data, shape, found)
    words = {made: word for word, made in _KINDS.items()}
    raise Malformed(f"a {' or '.join(words[each] for each in wanted)} was expected, not a {words[kind]}.")


def _trees(kind: type[Message]) -> list[str]:
    return [each.name for each in fields(kind) if each.name in _TREES]


def _made(kind: type[M], head: dict[str, Any], shape: dict[str, Any]) -> M:
    """Return a message without its trees."""
    values: dict[str, Any] = {}
    for each in fields(kind):
        if each.name in _TREES:
            if not isinstance(shape.get(each.name, {}), dict):
                raise Malformed(f"a message's {each.name} is not of type {each.type}.")
            continue
        value = head.get(each.name)
        if type(value) is not _TYPES[str(each.type)]:
            raise Malformed(f"a message's {each.name} is not of type {each.type}.")
        _check(each.name, value)
        values[each.name] = value
    strange = sorted(set(shape) - set(_trees(kind)))
    if strange:
        raise Malformed(f"a message has tensors that belong to nothing: {strange[0][:40]!r}.")
    return kind(**values)


def _check(name: str, value: Any) -> None:
    """Raise Malformed for a text that is too long or cannot be shown, a number out of its range, a long list."""
    if isinstance(value, str):
        # Terms and cards are judged by whoever reads them.
        if name not in ("terms", "card") and not header.fine(value, LONGEST):
            raise Malformed(f"a message's {name} has over {LONGEST:,} characters, or some that cannot be printed.")
        return
    numbers = value if isinstance(value, list) else [value]
    if len(numbers) > NUMBERS:
        raise Malformed(f"a message's {name} has {len(numbers):,} numbers, of {NUMBERS} at most.")
    if not all(type(each) is int and 0 <= each <= HIGHEST for each in numbers):
        raise Malformed(f"a message's {name} is not made of whole numbers from 0 below 2^63.")
