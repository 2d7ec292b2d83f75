"""The messages of a server and a site: trees as safetensors, numbers as JSON in their header; never code.

A server sends an Offer (the terms) and Requests, which name the round, the query and the client update, and carry its
downlink. A site answers with an Acceptance, with Replies (its upload, the method's samples, counts), or a Refusal. At
the end the server sends Final, and a site a Receipt. Nothing else leaves a site.
"""

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
from halfmoon.federation.protocol.header import Header, Truncated, UnreadableMessage
from halfmoon.federation.protocol.log import size
from halfmoon.federation.protocol.tree_spec import TreeSpec
from halfmoon.storage.serialization import pack, unpack, with_metadata

HEAD, SHAPE = "halfmoon", "shape"

SMALL, LARGEST = 2**22, 2**34
"""Bytes of a message at most: of a kind without tensors, and of one with some. Readers set tighter limits."""

LONGEST, NUMBERS, HIGHEST = 10_000, 8, 2**63 - 1
"""Characters of a text, numbers in a list, and the highest of them, at most."""

UNKNOWN, OTHER_VERSION, UNFIT, FAILED = "unknown", "version", "unfit", "failed"
"""Why a site refuses: it did not join that federation, runs another halfmoon, cannot take part, or could not do it."""

RoundKey = tuple[int, int, int]
"""A round, the attempt at it, and a query, all from 0."""


class Malformed(UserError):
    """Bytes that are no message of a halfmoon."""


class RefusalError(UserError):
    """A site refuses; the message goes to the server, so it names nothing that only the site knows.

    `kind` is one of this module's words.
    """

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind


class Impossible(RefusalError):
    """A site can never join as it is: whoever waits for it is told at once."""


@dataclass(frozen=True)
class Offer:
    """A server asks a site to join: `terms` is the JSON of `halfmoon.federation.protocol.terms.Terms`."""

    version: str  # of the server's halfmoon
    terms: str


@dataclass(frozen=True)
class Request:
    """Ask one site for `client_update` in this round; `down` is its downlink.

    `federation` is the hash of the terms, `version` that of the server's halfmoon. `run` is the hexadecimal number of
    the server's run, of which there may be several of one federation. `attempt` counts how often the round is played,
    from 0. `latest` is the client update (a `RoundKey`) whose memory the site goes on from, `oldest` the oldest one
    that may be asked for again; both are empty where there is none. `evaluation` is a model {"params", "stats"} to test
    on the site's own test and validation images; without a client update that is all. `masks` is for a masked sum
    (`halfmoon.federation.protocol.sums`); without a client update it asks for the site's part in that.
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
    """A site takes part: under its name, with so many labeled, unlabeled, test and validation images.

    `key` is the public half of the site's lasting key, in hexadecimal (`halfmoon.aggregation.secure.signing`); nothing
    where no sums are masked.
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
    """A site does not do what it was asked: `kind` is one of this module's words, `reason` a sentence."""

    version: str
    kind: str
    reason: str


@dataclass(frozen=True)
class Reply:
    """The result of a request: `up` (the tree of a `halfmoon.api.uploads.Upload`), samples as a tree, and counts.

    The counts are those of `ClientResult`. `evaluation` is the test of the model that came with the request:
    "confusion" (classes, classes) int64, rows the true classes, and "loss" (), the mean cross-entropy, float64;
    "validation" holds the same of the validation images. Parts without images are absent.
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
            isinstance(sample, dict) and set(sample) == set(WeightedMetric._fields) for sample in self.samples.values()
        ):
            raise Malformed("a reply's samples are not totals, squares and counts.")

    @classmethod
    def of(cls, request: Request, version: str, result: ClientResult) -> "Reply":
        """Return the reply with the result of a client update."""
        return cls(
            **{name: getattr(request, name) for name in ECHO if name != "version"},
            version=version,
            amount=list(result.amount),
            traffic=list(result.traffic),
            swept=result.swept,
            kept=result.kept,
            up=result.up.tree,
            samples={name: sample._asdict() for name, sample in result.samples.items()},
        )

    def result(self) -> ClientResult:
        """Return the result of the client update; the memory stays at the site."""
        down, up = self.traffic
        samples = {name: WeightedMetric(**sample) for name, sample in self.samples.items()}
        return ClientResult(Upload.of(self.up), {}, samples, Amount(*self.amount), (down, up), self.swept, self.kept)


ECHO = ("federation", "version", "run", "round", "attempt", "query", "client_update")
"""Fields of a request that its reply repeats."""


@dataclass(frozen=True)
class Final:
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


Message = Offer | Request | Acceptance | Refusal | Reply | Final | Receipt
_KINDS: dict[str, type[Message]] = {
    "offer": Offer, "request": Request, "acceptance": Acceptance, "refusal": Refusal, "reply": Reply,
    "final": Final, "receipt": Receipt,
}  # fmt: skip
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

    def pattern(self, name: str) -> TreeSpec:
        return header.pattern(self.shape, self.header.tensors, name)

    def open(self) -> M:
        """Return the message with its trees; raise `Malformed` where those are none."""
        try:
            body = unpack(self.data, self.shape)
        except (ValueError, LookupError, TypeError, RuntimeError, SafetensorError) as error:
            raise Malformed(f"a message cannot be read ({type(error).__name__}).") from error
        # `replace` runs the checks of the dataclass again.
        return replace(self.message, **{name: body[name] for name in _trees(type(self.message)) if name in body})


def write(message: Message) -> bytes:
    """Return a message as bytes."""
    head = {each.name: getattr(message, each.name) for each in fields(message)}
    body = {name: head.pop(name) for name in _TREES if name in head}
    data, shape = pack(body)
    head = {"message": _WORDS[type(message)], **head}
    return with_metadata(data, {HEAD: json.dumps(head), SHAPE: json.dumps(shape)})


def read(data: bytes, *kinds: type[M], limit: int = LARGEST) -> M:
    """Return the message in `data`, which must be of one of these kinds; raise `Malformed` where there is none.

    Nothing of it is read where it has more than `limit` bytes, or more than its kind can have.
    """
    return scan(data, *kinds, limit=limit).open()


def scan(data: bytes, *kinds: type[M], limit: int = LARGEST) -> UnparsedMessage[M]:
    """Do as `read`, but check the trees' shapes alone and leave their values unread."""
    most = min(limit, max(LARGEST if _trees(kind) else SMALL for kind in kinds))
    if len(data) > most:
        raise Malformed(f"a message has {size(len(data))}, of {size(most)} at most.")
    try:
        parts = header.parse(data)
        head, shape = (header.parse_json(parts.texts.get(name, "")) for name in (HEAD, SHAPE))
        header.check_shape(shape, parts.tensors)
    except Truncated as error:
        raise Malformed(f"a message {error}.") from error
    except UnreadableMessage as error:
        raise Malformed(f"a message cannot be read: {error}.") from error
    kind = _KINDS.get(str(head.pop("message", None)))
    if kind is None:
        raise Malformed("a message cannot be read: nobody knows what it is.")
    for choice in kinds:
        if kind is choice:
            return UnparsedMessage(_without_trees(choice, head, shape), data, shape, parts)
    expected, actual = (_article(word) for word in (" or ".join(_WORDS[choice] for choice in kinds), _WORDS[kind]))
    raise Malformed(f"{expected} was expected, not {actual}.")


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
            raise Malformed(f"a message's {each.name} is not of type {expected.__name__}.")
        if not tree:
            _check(each.name, value)
            values[each.name] = value
    strange = sorted(set(shape) - set(_trees(kind)))
    if strange:
        raise Malformed(f"a message has tensors that belong to nothing: {strange[0][:40]!r}.")
    return kind(**values)


def _check(name: str, value: Any) -> None:
    """Raise Malformed for a text that is too long or cannot be shown, a number out of its range, a long list."""
    if isinstance(value, str):
        # Terms and cards are checked by whoever reads them.
        if name not in ("terms", "card") and not header.printable(value, LONGEST):
            raise Malformed(f"a message's {name} has over {LONGEST:,} characters, or some that cannot be printed.")
        return
    numbers = value if isinstance(value, list) else [value]
    if len(numbers) > NUMBERS:
        raise Malformed(f"a message's {name} has {len(numbers):,} numbers, of {NUMBERS} at most.")
    if not all(type(number) is int and 0 <= number <= HIGHEST for number in numbers):
        raise Malformed(f"a message's {name} is not made of whole numbers from 0 below 2^63.")
