"""What travels between a server and a site: trees as safetensors, numbers as JSON in their header; never code.

A server sends an Offer (what all have to agree on) and Requests, which name the round, the trip and the work, and
carry what goes down. A site sends Joined, Replies, which carry what goes up, what the method reports of its steps, and
counts, or a Refusal. Nothing else leaves a site.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from safetensors import SafetensorError

from halfmoon.client import Outcome
from halfmoon.data.draw import Amount
from halfmoon.errors import UserError
from halfmoon.packing import pack, unpack, with_metadata
from halfmoon.tree import Tree
from halfmoon.types import Sample

HEAD, SHAPE = "halfmoon", "shape"
LONGEST_HEAD = 2**24
"""Bytes of a header at most: 16 MiB name a hundred thousand tensors."""

UNKNOWN, OTHER_VERSION, UNFIT, FAILED = "unknown", "version", "unfit", "failed"
"""Why a site refuses: it did not join that federation, runs another halfmoon, cannot take part, or could not do it."""


class Malformed(UserError):
    """Bytes that are no message of a halfmoon."""


@dataclass(frozen=True)
class Offer:
    """What a server asks a site to join: `terms` is the JSON of `halfmoon.net.terms.Terms`."""

    version: str  # of the server's halfmoon
    terms: str


@dataclass(frozen=True)
class Request:
    """One question to one site: do `work` in this round; `down` is what the server sends.

    `run` is the hexadecimal number of the server's run, of which there may be several of one federation. `attempt`
    counts how often the round is played, from 0. `known` is the visit (round, attempt, trip) whose memory the site goes
    on from, `safe` the oldest one that it may ever have to; both are empty where there is none. `exam` is a model
    {"params", "stats"} to test on the site's own test images, beside the work; without a work that is all.
    """

    federation: str  # a hash of what all have to agree on
    version: str  # of the server's halfmoon
    run: str
    round: int
    attempt: int
    trip: int
    work: str
    known: list[int] = field(default_factory=list)
    safe: list[int] = field(default_factory=list)
    down: Tree = field(default_factory=dict)
    exam: Tree = field(default_factory=dict)


@dataclass(frozen=True)
class Joined:
    """A site takes part: under its name, with so many images that have a label, that have none, and to test on."""

    federation: str
    version: str
    name: str
    labeled: int
    unlabeled: int
    tests: int = 0


@dataclass(frozen=True)
class Refusal:
    """A site does not do what it was asked: `kind` is one of this module's words, `reason` says it to a person."""

    version: str
    kind: str
    reason: str


@dataclass(frozen=True)
class Reply:
    """What a site answers: `up`, its samples as a tree, and counts of what the visit took (see `Outcome`).

    `exam` is what the model that came for a test said of the site's own test images: "confusion" (classes, classes)
    int64, rows the true classes, and "loss" (), the mean cross-entropy, float64.
    """

    federation: str
    version: str
    run: str
    round: int
    attempt: int
    trip: int
    work: str
    amount: list[int]
    traffic: list[int]
    swept: int
    kept: int
    up: Tree = field(default_factory=dict)
    samples: Tree = field(default_factory=dict)
    exam: Tree = field(default_factory=dict)

    def __post_init__(self) -> None:
        sizes = [len(self.amount) == len(Amount._fields), len(self.traffic) == 2]
        counts = [*self.amount, *self.traffic, self.swept, self.kept]
        if not all(sizes) or not all(type(count) is int and count >= 0 for count in counts):
            raise Malformed("a reply's counts are not whole numbers from 0.")
        if not all(isinstance(each, dict) and set(each) == set(Sample._fields) for each in self.samples.values()):
            raise Malformed("a reply's samples are not totals, squares and counts.")

    @classmethod
    def of(cls, request: Request, version: str, outcome: Outcome) -> Reply:
        """Return the reply that says what came of a visit."""
        return cls(
            federation=request.federation,
            version=version,
            run=request.run,
            round=request.round,
            attempt=request.attempt,
            trip=request.trip,
            work=request.work,
            amount=list(outcome.amount),
            traffic=list(outcome.traffic),
            swept=outcome.swept,
            kept=outcome.kept,
            up=outcome.up,
            samples={name: each._asdict() for name, each in outcome.samples.items()},
        )

    def outcome(self) -> Outcome:
        """Return what came of the visit; the memory stays at the site."""
        down, up = self.traffic
        samples = {name: Sample(**each) for name, each in self.samples.items()}
        return Outcome(self.up, {}, samples, Amount(*self.amount), (down, up), self.swept, self.kept)


Message = Offer | Request | Joined | Refusal | Reply
_KINDS: dict[str, type[Message]] = {
    "offer": Offer, "request": Request, "joined": Joined, "refusal": Refusal, "reply": Reply,
}  # fmt: skip
_TREES = ("down", "up", "samples", "exam")
_TYPES: dict[str, type] = {"str": str, "int": int, "list[int]": list}
M = TypeVar("M", bound=Message)


def write(message: Message) -> bytes:
    """Return a message as bytes."""
    (kind,) = (kind for kind, made in _KINDS.items() if made is type(message))
    held = {each.name: getattr(message, each.name) for each in fields(message)}
    body = {name: held.pop(name) for name in _TREES if name in held}
    data, shape = pack(body)
    return with_metadata(data, {HEAD: json.dumps({"message": kind, **held}), SHAPE: json.dumps(shape)})


def read(data: bytes, *wanted: type[M]) -> M:
    """Return the message in `data`, which must be of a `wanted` kind; raise Malformed where there is none.

    The header's length is judged before anything of it is read.
    """
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or length > min(LONGEST_HEAD, len(data) - 8):
        raise Malformed("a message is cut off, or none of halfmoon's.")
    try:
        meta = json.loads(data[8 : 8 + length])["__metadata__"]
        head, shape = json.loads(meta[HEAD]), json.loads(meta[SHAPE])
        body = unpack(data, shape)
        kind = _KINDS[head.pop("message")]
    except (ValueError, LookupError, TypeError, AttributeError, RuntimeError, SafetensorError) as error:
        raise Malformed(f"a message cannot be read ({type(error).__name__}).") from error
    for choice in wanted:
        if kind is choice:
            return _made(choice, head, body)
    words = {made: word for word, made in _KINDS.items()}
    raise Malformed(f"a {' or '.join(words[each] for each in wanted)} was expected, not a {words[kind]}.")


def _made(kind: type[M], head: dict[str, Any], body: Tree) -> M:
    values: dict[str, Any] = {}
    for each in fields(kind):
        value = body.get(each.name, {}) if each.name in _TREES else head.get(each.name)
        wanted = dict if each.name in _TREES else _TYPES[str(each.type)]
        if type(value) is not wanted:
            raise Malformed(f"a message's {each.name} is not of type {each.type}.")
        values[each.name] = value
    return kind(**values)
