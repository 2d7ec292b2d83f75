"""What travels between a server and a site: trees as safetensors, numbers as JSON in their header; never code.

A request names the round, the trip and the work, and carries what goes down. A reply carries what goes up, what the
method reports of its steps, and counts; nothing else leaves a site.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields
from typing import Any

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


class Malformed(UserError):
    """Bytes that are no message of a halfmoon."""


@dataclass(frozen=True)
class Request:
    """One question to one site: do `work` in this round; `down` is what the server sends."""

    federation: str  # a hash of what all have to agree on
    version: str  # of the server's halfmoon
    round: int
    trip: int
    work: str
    down: Tree

    def to_bytes(self) -> bytes:
        """Return the message as bytes."""
        return _seal({"kind": "request", **_numbers(self, "down")}, self.down)

    @classmethod
    def from_bytes(cls, data: bytes) -> Request:
        """Return the request in `data`; raise Malformed where there is none."""
        head, down = _open(data, "request")
        return _made(cls, head, down=down)


@dataclass(frozen=True)
class Reply:
    """What a site answers: `up`, its samples as a tree, and counts of what the visit took (see `Outcome`)."""

    federation: str
    version: str
    round: int
    trip: int
    work: str
    amount: list[int]
    traffic: list[int]
    swept: int
    kept: int
    up: Tree = field(default_factory=dict)
    samples: Tree = field(default_factory=dict)

    @classmethod
    def of(cls, request: Request, version: str, outcome: Outcome) -> Reply:
        """Return the reply that says what came of a visit."""
        samples = {name: each._asdict() for name, each in outcome.samples.items()}
        return cls(
            request.federation,
            version,
            request.round,
            request.trip,
            request.work,
            list(outcome.amount),
            list(outcome.traffic),
            outcome.swept,
            outcome.kept,
            outcome.up,
            samples,
        )

    def outcome(self) -> Outcome:
        """Return what came of the visit; the memory stays at the site."""
        down, up = self.traffic
        samples = {name: Sample(**each) for name, each in self.samples.items()}
        return Outcome(self.up, {}, samples, Amount(*self.amount), (down, up), self.swept, self.kept)

    def to_bytes(self) -> bytes:
        """Return the message as bytes."""
        head = {"kind": "reply", **_numbers(self, "up", "samples")}
        return _seal(head, {"up": self.up, "samples": self.samples})

    @classmethod
    def from_bytes(cls, data: bytes) -> Reply:
        """Return the reply in `data`; raise Malformed where there is none."""
        head, body = _open(data, "reply")
        reply = _made(cls, head, up=body.get("up", {}), samples=body.get("samples", {}))
        sizes = [len(reply.amount) == len(Amount._fields), len(reply.traffic) == 2]
        counts = [*reply.amount, *reply.traffic, reply.swept, reply.kept]
        if not all(sizes) or not all(type(count) is int and count >= 0 for count in counts):
            raise Malformed("a reply's counts are not whole numbers from 0.")
        if not all(set(each) == set(Sample._fields) for each in reply.samples.values()):
            raise Malformed("a reply's samples are not totals, squares and counts.")
        return reply


def _numbers(message: Any, *trees: str) -> dict[str, Any]:
    return {each.name: getattr(message, each.name) for each in fields(message) if each.name not in trees}


def _made(kind: Any, head: dict[str, Any], **trees: Tree) -> Any:
    wanted = {each.name: str(each.type) for each in fields(kind) if each.name not in trees}
    types = {"str": str, "int": int, "list[int]": list}
    for name, type_ in wanted.items():
        if type(head.get(name)) is not types[type_]:
            raise Malformed(f"a message's {name} is not of type {type_}.")
    return kind(**{name: head[name] for name in wanted}, **trees)


def _seal(head: dict[str, Any], tree: Tree) -> bytes:
    data, shape = pack(tree)
    return with_metadata(data, {HEAD: json.dumps(head), SHAPE: json.dumps(shape)})


def _open(data: bytes, kind: str) -> tuple[dict[str, Any], Tree]:
    """Return head and tree of a message; the header's length is judged before anything of it is read."""
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or length > min(LONGEST_HEAD, len(data) - 8):
        raise Malformed("a message is cut off, or none of halfmoon's.")
    try:
        meta = json.loads(data[8 : 8 + length])["__metadata__"]
        head, shape = json.loads(meta[HEAD]), json.loads(meta[SHAPE])
        tree = unpack(data, shape)
        found = head["kind"]
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, SafetensorError) as error:
        raise Malformed(f"a message cannot be read ({type(error).__name__}).") from error
    if found != kind:
        raise Malformed(f"a {kind} was expected, not a {found!r}.")
    return head, tree
