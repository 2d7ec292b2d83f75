"""The messages of a server and a site: trees as safetensors, numbers as JSON in their header; never code.

A server sends an Offer (the terms) and Requests, which name the round, the query and the client update, and carry its
downlink. A site answers with an Acceptance, with Replies (its upload, the method's samples, counts), or a Refusal. At
the end the server sends Final, and a site a Receipt. Nothing else leaves a site.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor

from halfmoon.aggregation.secure.masking import PUBLIC, SEALED, SumId
from halfmoon.aggregation.secure.signing import POINT, SIGNATURE
from halfmoon.api.types import WeightedMetric
from halfmoon.api.uploads import Upload
from halfmoon.core.errors import UserError
from halfmoon.core.tree import Tree
from halfmoon.engine.driver import ClientResult
from halfmoon.engine.sampling import Amount
from halfmoon.federation.protocol import header
from halfmoon.federation.protocol.header import Header, TruncatedMessage, UnreadableMessage
from halfmoon.federation.protocol.log import format_bytes
from halfmoon.federation.protocol.tree_spec import TreeSpec
from halfmoon.storage.serialization import pack, unpack, with_metadata

FIELDS_KEY, LAYOUT_KEY = "halfmoon", "shape"

MAX_TREELESS_BYTES, MAX_MESSAGE_BYTES = 2**22, 2**34
"""Bytes of a message at most: of a kind without tensors, and of one with some. Readers set tighter limits."""

MAX_TEXT_LENGTH, MAX_LIST_LENGTH, MAX_INTEGER = 10_000, 8, 2**63 - 1
"""Characters of a text, numbers in a list, and the highest of them, at most."""

NOT_JOINED, OTHER_VERSION, UNFIT, FAILED = "unknown", "version", "unfit", "failed"
"""Why a site refuses: it did not join that federation, runs another halfmoon, cannot take part, or could not do it."""

RoundKey = tuple[int, int, int]
"""A round, the attempt at it, and a query, all from 0."""


class MalformedMessage(UserError):
    """Bytes that are no message of a halfmoon."""


class RefusalError(UserError):
    """A site refuses, for a reason of this module; the sentence goes to the server and names nothing private."""

    def __init__(self, reason: str, kind: str = UNFIT) -> None:
        super().__init__(reason)
        self.kind = kind


class PermanentRefusal(RefusalError):
    """A site can never join as it is: whoever waits for it is told at once."""


@dataclass(frozen=True)
class Offer:
    """A server asks a site to join: `terms` is the JSON of `halfmoon.federation.protocol.terms.Terms`."""

    version: str  # of the server's halfmoon
    terms: str


@dataclass(frozen=True)
class Request:
    """Ask one site for `client_update` in a round; `down` is its downlink.

    `attempt` counts how often the round was played. `latest` is the `RoundKey` whose memory the site goes on from,
    `oldest` the oldest one that may come again. `evaluation` is a model to test on the site's images. `masks` is for a
    masked sum. Without a client update these are all.
    """

    federation: str
    version: str
    run: str
    round: int
    attempt: int
    query: int
    client_update: str
    latest: list[int] = field(default_factory=list)
    oldest: list[int] = field(default_factory=list)
    down: Tree = field(default_factory=dict)
    evaluation: Tree = field(default_factory=dict)
    masks: Tree = field(default_factory=dict)


@dataclass(frozen=True)
class Acceptance:
    """A site takes part with so many images of each kind; `key` is its public lasting key, in hexadecimal.

    `shared` is 1 where its people let its own accuracy be shown.
    """

    federation: str
    version: str
    name: str
    labeled: int
    unlabeled: int
    tests: int = 0
    validations: int = 0
    key: str = ""
    shared: int = 0


@dataclass(frozen=True)
class Refusal:
    """A site does not do what it was asked: `kind` is one of this module's words, `reason` a sentence."""

    version: str
    kind: str
    reason: str


@dataclass(frozen=True)
class Reply:
    """The result of a request: the tree of an upload, samples, and the counts of `ClientResult`.

    `evaluation` is the test of the request's model: "confusion" int64 (rows are true classes) and "loss", a mean;
    "validation" holds the same.
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
            raise MalformedMessage("a reply's counts are not whole numbers from 0.")
        if not all(
            isinstance(sample, dict) and set(sample) == set(WeightedMetric._fields) for sample in self.samples.values()
        ):
            raise MalformedMessage("a reply's samples are not totals, squares and counts.")

    @classmethod
    def from_result(cls, request: Request, version: str, result: ClientResult) -> "Reply":
        """Return the reply with the result of a client update."""
        return cls(
            **{name: getattr(request, name) for name in ECHOED_FIELDS if name != "version"},
            version=version,
            amount=list(result.amount),
            traffic=list(result.traffic),
            swept=result.swept,
            kept=result.memory_bytes,
            up=result.up.tree,
            samples={name: sample._asdict() for name, sample in result.samples.items()},
        )

    def result(self) -> ClientResult:
        down, up = self.traffic
        samples = {name: WeightedMetric(**sample) for name, sample in self.samples.items()}
        return ClientResult(Upload.of(self.up), {}, samples, Amount(*self.amount), (down, up), self.swept, self.kept)


ECHOED_FIELDS = ("federation", "version", "run", "round", "attempt", "query", "client_update")
"""Fields of a request that its reply repeats."""


@dataclass(frozen=True)
class FinalModel:
    """The federation is over: `model` {"params", "stats"} is its result, `card` the model's metadata as JSON."""

    federation: str
    version: str
    card: str
    model: Tree = field(default_factory=dict)


@dataclass(frozen=True)
class Receipt:
    """A site has the final model."""

    federation: str
    version: str
    name: str


Message = Offer | Request | Acceptance | Refusal | Reply | FinalModel | Receipt
_KINDS: dict[str, type[Message]] = {
    "offer": Offer,
    "request": Request,
    "acceptance": Acceptance,
    "refusal": Refusal,
    "reply": Reply,
    "final": FinalModel,
    "receipt": Receipt,
}
_WORDS = {kind: word for word, kind in _KINDS.items()}
_TREES = ("down", "up", "samples", "evaluation", "masks", "model")
_TYPES: dict[Any, type] = {str: str, int: int, list[int]: list}
M = TypeVar("M", bound=Message)


@dataclass(frozen=True)
class UnparsedMessage(Generic[M]):
    """A message whose header was checked and whose trees were not read; `message` is without the trees."""

    message: M
    data: bytes = field(repr=False)
    shape: dict[str, Any] = field(repr=False)
    header: Header = field(repr=False)

    def tree_spec(self, name: str) -> TreeSpec:
        return header.select_tree_spec(self.shape, self.header.tensors, name)

    def open(self) -> M:
        """Return the message with its trees; raise `MalformedMessage` where those are none."""
        try:
            body = unpack(self.data, self.shape)
        except (ValueError, LookupError, TypeError, RuntimeError, SafetensorError) as error:
            raise MalformedMessage(f"a message cannot be read ({type(error).__name__}).") from error
        # `replace` runs the checks of the dataclass again.
        return replace(self.message, **{name: body[name] for name in _trees(type(self.message)) if name in body})


def write_message(message: Message) -> bytes:
    """Return a message as bytes."""
    head = {each.name: getattr(message, each.name) for each in fields(message)}
    body = {name: head.pop(name) for name in _TREES if name in head}
    data, shape = pack(body)
    head = {"message": _WORDS[type(message)], **head}
    return with_metadata(data, {FIELDS_KEY: json.dumps(head), LAYOUT_KEY: json.dumps(shape)})


def read_message(data: bytes, *kinds: type[M], limit: int = MAX_MESSAGE_BYTES) -> M:
    """Return the message of one of these kinds; raise `MalformedMessage` for another, or one of more than `limit` bytes."""
    return scan_message(data, *kinds, limit=limit).open()


def scan_message(data: bytes, *kinds: type[M], limit: int = MAX_MESSAGE_BYTES) -> UnparsedMessage[M]:
    """Do as `read`, but check the trees' shapes alone and leave their values unread."""
    most = min(limit, max(MAX_MESSAGE_BYTES if _trees(kind) else MAX_TREELESS_BYTES for kind in kinds))
    if len(data) > most:
        raise MalformedMessage(f"a message has {format_bytes(len(data))}, of {format_bytes(most)} at most.")
    try:
        parts = header.parse_header(data)
        head, shape = (header.parse_json(parts.texts.get(name, "")) for name in (FIELDS_KEY, LAYOUT_KEY))
        header.check_layout(shape, parts.tensors)
    except TruncatedMessage as error:
        raise MalformedMessage(f"a message {error}.") from error
    except UnreadableMessage as error:
        raise MalformedMessage(f"a message cannot be read: {error}.") from error
    kind = _KINDS.get(str(head.pop("message", None)))
    if kind is None:
        raise MalformedMessage("a message cannot be read: nobody knows what it is.")
    for choice in kinds:
        if kind is choice:
            return UnparsedMessage(_without_trees(choice, head, shape), data, shape, parts)
    expected, actual = (_article(word) for word in (" or ".join(_WORDS[choice] for choice in kinds), _WORDS[kind]))
    raise MalformedMessage(f"{expected} was expected, not {actual}.")


def _article(word: str) -> str:
    return f"{'an' if word[0] in 'aeiou' else 'a'} {word}"


def _trees(kind: type[Message]) -> list[str]:
    return [each.name for each in fields(kind) if each.name in _TREES]


def _without_trees(kind: type[M], head: dict[str, Any], shape: dict[str, Any]) -> M:
    values: dict[str, Any] = {}
    for each in fields(kind):
        tree = each.name in _TREES
        value = shape.get(each.name, {}) if tree else head.get(each.name)
        expected = dict if tree else _TYPES[each.type]
        if type(value) is not expected:
            raise MalformedMessage(f"a message's {each.name} is not of type {expected.__name__}.")
        if not tree:
            _check(each.name, value)
            values[each.name] = value
    strange = sorted(set(shape) - set(_trees(kind)))
    if strange:
        raise MalformedMessage(f"a message has tensors that belong to nothing: {strange[0][:40]!r}.")
    return kind(**values)


def _check(name: str, value: Any) -> None:
    if isinstance(value, str):
        # Terms and cards are checked by whoever reads them.
        if name not in ("terms", "card") and not header.is_printable(value, MAX_TEXT_LENGTH):
            raise MalformedMessage(
                f"a message's {name} has over {MAX_TEXT_LENGTH:,} characters, or some that cannot be printed."
            )
        return
    numbers = value if isinstance(value, list) else [value]
    if len(numbers) > MAX_LIST_LENGTH:
        raise MalformedMessage(f"a message's {name} has {len(numbers):,} numbers, of {MAX_LIST_LENGTH} at most.")
    if not all(type(number) is int and 0 <= number <= MAX_INTEGER for number in numbers):
        raise MalformedMessage(f"a message's {name} is not made of whole numbers from 0 below 2^63.")


ANNOUNCE_KEYS, DEAL_SHARES, MASK_UPDATE, REVEAL_SHARES = "keys", "deal", "mask", "reveal"
"""The stages of a sum: a request's masks have one of them as their only name at the top."""

SESSION_BYTES = 32
"""Bytes by which a server tells a sum from one of the same query that it had to begin anew."""

SITE_TENSORS = {
    "sites": ((), torch.int64),
    "keys": ((PUBLIC,), torch.uint8),
    "signatures": ((SIGNATURE,), torch.uint8),
    "lasting": ((POINT,), torch.uint8),
}
STAGE_TENSORS: dict[str, dict[str, tuple[tuple[int, ...], torch.dtype]]] = {
    ANNOUNCE_KEYS: {"session": ((), torch.uint8)},
    DEAL_SHARES: {"asked": ((), torch.int64), **SITE_TENSORS},
    MASK_UPDATE: {"sites": ((), torch.int64)},
    REVEAL_SHARES: {"survived": ((), torch.int64), "shares": ((SEALED,), torch.uint8)},
}
"""The tensors of each stage by name: their shape without the first dimension (the sites), and their type."""


def make_sum_id(request: Request, session: str) -> SumId:
    return SumId(request.federation, request.run, request.round, request.attempt, request.query, session)


def stack_rows(rows: Sequence[bytes]) -> Tensor:
    return torch.from_numpy(np.frombuffer(b"".join(rows), np.uint8).reshape(len(rows), -1).copy())


def split_rows(leaf: Tensor) -> list[bytes]:
    return [row.numpy().tobytes() for row in leaf]
