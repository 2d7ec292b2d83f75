"""The messages between the server and a site: trees as safetensors, other fields as JSON in their header; never code.

The server sends an `Offer` (the terms) and `Request`s, which name the round, the query and the client update, and
contain its download. A site replies with an `Acceptance`, `Reply`s (its upload, the method's samples, counts), or a
`Refusal`. At the end the server sends the `FinalModel`, and a site a `Receipt`. A site sends no other messages.
"""

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor

from halfmoon.aggregation.secure.masking import PUBLIC_KEYS_BYTES, SHARES_BYTES, SumId
from halfmoon.aggregation.secure.signing import POINT_BYTES, SIGNATURE_BYTES
from halfmoon.api.types import WeightedMetric
from halfmoon.api.uploads import Upload
from halfmoon.core import tree
from halfmoon.core.errors import UserError
from halfmoon.core.tree import Tree
from halfmoon.engine.driver import ClientResult
from halfmoon.engine.sampling import Amount
from halfmoon.federation.protocol import header
from halfmoon.federation.protocol.header import Header, TruncatedMessage, UnreadableMessage
from halfmoon.federation.protocol.log import format_bytes
from halfmoon.federation.protocol.tree_spec import TreeSpec
from halfmoon.storage.serialization import pack, unpack, with_metadata

FIELDS_KEY = "halfmoon"
LAYOUT_KEY = "shape"
"""The two texts in a message's header: its fields without the trees, and the layout of the trees, both as JSON."""

MAX_TREELESS_BYTES = 2**22
MAX_MESSAGE_BYTES = 2**34
"""Largest message of a kind without trees, and of any kind. Readers that know the shapes set tighter limits."""

MAX_TEXT_LENGTH = 10_000  # characters of a text field
MAX_LIST_LENGTH = 8  # integers in a list field
MAX_INTEGER = 2**63 - 1

NOT_JOINED = "unknown"
OTHER_VERSION = "version"
UNFIT = "unfit"
FAILED = "failed"
"""The kinds of refusals: a site has not joined that federation, runs another halfmoon, cannot take part, or failed."""

RoundKey = tuple[int, int, int]
"""A round, the attempt at it, and a query, all from 0."""


class MalformedMessage(UserError):
    """Bytes that are not a valid message of halfmoon."""


class RefusalError(UserError):
    """A site refuses a message. The text is sent to the server, so it contains nothing private.

    Attributes:
        kind: one of `NOT_JOINED`, `OTHER_VERSION`, `UNFIT` and `FAILED`.
    """

    def __init__(self, reason: str, kind: str = UNFIT) -> None:
        super().__init__(reason)
        self.kind = kind


class PermanentRefusal(RefusalError):
    """A site that can never join as it is. The people who wait for it are informed at once."""


@dataclass(frozen=True)
class Offer:
    """The server asks a site to join a federation.

    Attributes:
        version: version of the server's halfmoon.
        terms: JSON text of `halfmoon.federation.protocol.terms.Terms`.
    """

    version: str
    terms: str


@dataclass(frozen=True)
class Request:
    """The server requests a local update, an evaluation, or a step of a secure sum from one site.

    Attributes:
        federation: hash of the terms.
        version: version of the server's halfmoon.
        run: id of the run, 32 hexadecimal digits.
        round: round, from 0.
        attempt: number of earlier attempts at this round.
        query: number of earlier queries in this round.
        client_update: name of the client update; "" if only an evaluation or a secure sum is requested.
        latest: the `RoundKey` whose client memory the site continues from; empty for none.
        oldest: the oldest `RoundKey` that the server may still continue from; empty for none.
        download: the broadcast, and what is sent to this site only.
        evaluation: a model to evaluate on the site's images; empty for none.
        masks: tensors of a stage of a secure sum, below the stage's name; empty for none.
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
    download: Tree = field(default_factory=dict, metadata={"name": "down"})
    evaluation: Tree = field(default_factory=dict)
    masks: Tree = field(default_factory=dict)


@dataclass(frozen=True)
class Acceptance:
    """A site joins the federation.

    Attributes:
        federation: hash of the terms.
        version: version of the site's halfmoon.
        name: name of the site.
        labeled: labeled training images.
        unlabeled: unlabeled training images.
        tests: test images.
        validations: validation images.
        key: long-term public key in hexadecimal; "" without secure aggregation.
        shared: 1 if the site's people allow its own accuracy to be shown, else 0.
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
    """A site does not do what was requested.

    Attributes:
        version: version of the site's halfmoon.
        kind: one of `NOT_JOINED`, `OTHER_VERSION`, `UNFIT` and `FAILED`.
        reason: a sentence for the server's log.
    """

    version: str
    kind: str
    reason: str


@dataclass(frozen=True)
class Reply:
    """The result of a request.

    Attributes:
        federation, version, run, round, attempt, query, client_update: those of the request.
        amount: steps, images a step and epochs, in the order of `Amount`.
        traffic: bytes received and sent.
        images_outside_steps: images that passed through the network outside of steps.
        memory_bytes: bytes of the client memory after the update.
        upload: the tree of the `Upload`, or that of a secure sum.
        samples: for each metric its total, squares and count, as in `WeightedMetric`.
        evaluation: evaluation of the request's model on test images: "confusion" int64 (rows are true classes) and
            "loss", a mean. "validation" is the same on validation images.

    Raises:
        MalformedMessage: counts are negative or too many, or samples have other fields.
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
    images_outside_steps: int = field(metadata={"name": "swept"})
    memory_bytes: int = field(metadata={"name": "kept"})
    upload: Tree = field(default_factory=dict, metadata={"name": "up"})
    samples: Tree = field(default_factory=dict)
    evaluation: Tree = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check the counts and the fields of the metrics in a reply of a site, which may be hostile.

        `amount` counts the steps and the images of a step, `traffic` bytes received and sent, and
        `images_outside_steps` images that pass through the network before or after the steps. `samples` has for each
        metric its sum, sum of squares and count.
        """
        right_lengths = len(self.amount) == len(Amount._fields) and len(self.traffic) == 2
        counts = [*self.amount, *self.traffic, self.images_outside_steps, self.memory_bytes]
        # `type(...) is`, not isinstance: bool is a subclass of int.
        if not right_lengths or not all(type(count) is int and count >= 0 for count in counts):
            raise MalformedMessage("a reply's counts are not non-negative integers.")
        for sample in self.samples.values():
            if not isinstance(sample, dict) or set(sample) != set(WeightedMetric._fields):
                raise MalformedMessage("a reply's samples are not totals, squares and counts.")

    @classmethod
    def from_result(cls, request: Request, version: str, result: ClientResult) -> "Reply":
        """Make the reply of a site to a request of the server from the result of its local update.

        Args:
            request: the request, of which the reply repeats the round, the query and so on.
            version: the version of halfmoon at the site.
            result: the upload, the metrics and the counts of the update.
        """
        # The version is that of the site's own program. The server compares it with the version in its request.
        echoed = {name: getattr(request, name) for name in ECHOED_FIELDS if name != "version"}
        return cls(
            **echoed,
            version=version,
            amount=list(result.amount),
            traffic=list(result.traffic),
            images_outside_steps=result.images_outside_steps,
            memory_bytes=result.memory_bytes,
            upload=result.upload.tree,
            samples={name: sample._asdict() for name, sample in result.samples.items()},
        )

    def to_result(self, device: torch.device) -> ClientResult:
        """Convert a site's reply to the result of a local update that a simulated client returns.

        The client's state remains at the site, so it is empty here.

        Args:
            device: where the upload and the metrics are aggregated.
        """
        received_bytes, sent_bytes = self.traffic
        samples = {name: WeightedMetric(**sample) for name, sample in tree.to(self.samples, device).items()}
        return ClientResult(
            upload=Upload.from_tree(tree.to(self.upload, device)),
            memory={},
            samples=samples,
            amount=Amount(*self.amount),
            traffic=(received_bytes, sent_bytes),
            images_outside_steps=self.images_outside_steps,
            memory_bytes=self.memory_bytes,
        )


ECHOED_FIELDS = ("federation", "version", "run", "round", "attempt", "query", "client_update")
"""Fields of a request that its reply repeats."""


@dataclass(frozen=True)
class FinalModel:
    """The federation is finished.

    Attributes:
        federation: hash of the terms.
        version: version of the server's halfmoon.
        card: the model card as JSON.
        model: {"params", "stats"}, the resulting model.
    """

    federation: str
    version: str
    card: str
    model: Tree = field(default_factory=dict)


@dataclass(frozen=True)
class Receipt:
    """A site has stored the final model."""

    federation: str
    version: str
    name: str


Message = Offer | Request | Acceptance | Refusal | Reply | FinalModel | Receipt
_CLASSES: dict[str, type[Message]] = {
    "offer": Offer,
    "request": Request,
    "acceptance": Acceptance,
    "refusal": Refusal,
    "reply": Reply,
    "final": FinalModel,
    "receipt": Receipt,
}
_CLASS_NAMES = {kind: name for name, kind in _CLASSES.items()}
_TREES = ("down", "up", "samples", "evaluation", "masks", "model")  # names in a message, in the order of its bytes
_FIELD_TYPES: dict[Any, type] = {str: str, int: int, list[int]: list}
M = TypeVar("M", bound=Message)


@dataclass(frozen=True)
class UnparsedMessage(Generic[M]):
    """A message whose header was validated and whose trees are not parsed yet.

    Attributes:
        message: the message without its trees.
        data: the complete message.
        layout: the layout of its trees (see `halfmoon.storage.serialization`).
        header: its header.
    """

    message: M
    data: bytes = field(repr=False)
    layout: dict[str, Any] = field(repr=False)
    header: Header = field(repr=False)

    def tree_spec(self, name: str) -> TreeSpec:
        """Return names, shapes and dtypes of the tensors in the field `name`, read from the header only."""
        sent_names = {item.name: _sent_name(item) for item in dataclasses.fields(self.message)}
        sent_name = sent_names[name]
        return header.select_tree_spec(self.layout, self.header.tensors, sent_name)

    def parse_trees(self) -> M:
        """Parse the tensors of this message, whose header was validated, and add them to its other fields.

        Returns:
            The complete message, such as a `Request`, whose fields with tensors are nested dicts of tensors.

        Raises:
            MalformedMessage: the tensors cannot be read, or the complete message is invalid.
        """
        try:
            trees = unpack(self.data, self.layout)
        except (ValueError, LookupError, TypeError, RuntimeError, SafetensorError) as error:
            raise MalformedMessage(f"a message cannot be read ({type(error).__name__}).") from error
        tree_fields = _tree_fields(type(self.message))  # name in Python by the name in the bytes, such as "down"
        values = {name: trees[sent_name] for sent_name, name in tree_fields.items() if sent_name in trees}
        # `replace` also runs the checks in `__post_init__`.
        return replace(self.message, **values)


def write_message(message: Message) -> bytes:
    """Serialize a message: tensors as safetensors, and all other fields as JSON in its header."""
    values: dict[str, Any] = {}
    for message_field in dataclasses.fields(message):
        values[_sent_name(message_field)] = getattr(message, message_field.name)
    trees = {name: values.pop(name) for name in _TREES if name in values}
    data, layout = pack(trees)
    values = {"message": _CLASS_NAMES[type(message)], **values}
    # Metadata of a safetensors file are texts, so this JSON becomes a text in the JSON of the header.
    return with_metadata(data, {FIELDS_KEY: json.dumps(values), LAYOUT_KEY: json.dumps(layout)})


def read_message(data: bytes, *kinds: type[M], limit: int = MAX_MESSAGE_BYTES) -> M:
    """Parse a serialized message with its tensors.

    Args:
        data: the serialized message. It may be hostile.
        kinds: the classes of messages that are expected, such as `Reply` and `Refusal`.
        limit: the most bytes that the message may have.

    Returns:
        The message, of one of these classes.

    Raises:
        MalformedMessage: it is invalid, too large, or of another kind.
    """
    return scan_message(data, *kinds, limit=limit).parse_trees()


def scan_message(data: bytes, *kinds: type[M], limit: int = MAX_MESSAGE_BYTES) -> UnparsedMessage[M]:
    """Validate the header of a message and parse its fields, but not its tensors.

    So the receiver can check the fields and the shapes of the tensors before any tensor is allocated.

    Args:
        data: the serialized message. It may be hostile.
        kinds: the classes of messages that are expected.
        limit: the most bytes that the message may have.

    Returns:
        The message without its tensors, which `parse_trees` adds.

    Raises:
        MalformedMessage: it is invalid, too large, or of another kind.
    """
    # The kind is not known before the header is parsed, so the limit is that of the largest expected kind.
    kind_limits = [MAX_MESSAGE_BYTES if _tree_fields(kind) else MAX_TREELESS_BYTES for kind in kinds]
    limit = min(limit, max(kind_limits))
    if len(data) > limit:
        raise MalformedMessage(f"a message has {format_bytes(len(data))}; the limit is {format_bytes(limit)}.")
    try:
        parsed = header.parse_header(data)
        values = header.parse_json(parsed.texts.get(FIELDS_KEY, ""))
        layout = header.parse_json(parsed.texts.get(LAYOUT_KEY, ""))
        header.check_layout(layout, parsed.tensors)
    except TruncatedMessage as error:
        raise MalformedMessage(f"a message {error}.") from error
    except UnreadableMessage as error:
        raise MalformedMessage(f"a message cannot be read: {error}.") from error
    actual = _CLASSES.get(str(values.pop("message", None)))
    if actual is None:
        raise MalformedMessage("a message cannot be read: its kind is unknown.")
    for kind in kinds:
        if actual is kind:
            return UnparsedMessage(_parse_fields(kind, values, layout), data, layout, parsed)
    expected = " or ".join(_CLASS_NAMES[kind] for kind in kinds)
    raise MalformedMessage(f"{_with_article(expected)} was expected, not {_with_article(_CLASS_NAMES[actual])}.")


def _with_article(word: str) -> str:
    return f"{'an' if word[0] in 'aeiou' else 'a'} {word}"


def _sent_name(message_field: "dataclasses.Field[Any]") -> str:
    """Return the name of a dataclass field in a serialized message, which may differ from its name in Python."""
    return message_field.metadata.get("name", message_field.name)


def _tree_fields(kind: type[Message]) -> dict[str, str]:
    """Return the Python names of a message's fields with tensors, by their names in the serialized message."""
    names = {_sent_name(message_field): message_field.name for message_field in dataclasses.fields(kind)}
    return {sent_name: name for sent_name, name in names.items() if sent_name in _TREES}


def _parse_fields(kind: type[M], values: dict[str, Any], layout: dict[str, Any]) -> M:
    """Make a message without its tensors from the JSON in its header, and check the types of its fields.

    Args:
        kind: the class of the message, a dataclass.
        values: the values of its fields, by their names in the serialized message; other values are ignored.
        layout: for each field with tensors the nested names of the tensors.

    Raises:
        MalformedMessage: a field is missing, or has an invalid type or value.
    """
    tree_fields = _tree_fields(kind)
    arguments: dict[str, Any] = {}
    for message_field in dataclasses.fields(kind):
        name = _sent_name(message_field)
        if name in tree_fields:  # it remains empty here, as is its default
            if not isinstance(layout.get(name, {}), dict):
                raise MalformedMessage(f"a message's {name} is not of type dict.")
            continue
        value = values.get(name)
        expected_type = _FIELD_TYPES[message_field.type]
        # `type(...) is`, not isinstance: bool is a subclass of int.
        if type(value) is not expected_type:
            raise MalformedMessage(f"a message's {name} is not of type {expected_type.__name__}.")
        _check_field(name, value)
        arguments[message_field.name] = value
    unexpected = sorted(set(layout) - set(tree_fields))
    if unexpected:
        raise MalformedMessage(f"a message has tensors in an unknown field: {unexpected[0][:40]!r}.")
    return kind(**arguments)


def _check_field(name: str, value: Any) -> None:
    """Check the value of a field, a string, an integer or a list of integers; raise `MalformedMessage` if invalid.

    Strings are written to logs and integers are used as counts, so both are limited.
    """
    if isinstance(value, str):
        # Terms and model cards are longer; the code that parses them checks them.
        if name not in ("terms", "card") and not header.is_printable(value, MAX_TEXT_LENGTH):
            raise MalformedMessage(
                f"a message's {name} has over {MAX_TEXT_LENGTH:,} characters, or some that cannot be printed."
            )
        return
    numbers = value if isinstance(value, list) else [value]
    if len(numbers) > MAX_LIST_LENGTH:
        raise MalformedMessage(f"a message's {name} has {len(numbers):,} numbers; the limit is {MAX_LIST_LENGTH}.")
    if not all(type(number) is int and 0 <= number <= MAX_INTEGER for number in numbers):
        raise MalformedMessage(f"a message's {name} is not made of non-negative integers below 2^63.")


ANNOUNCE_KEYS = "keys"
DEAL_SHARES = "deal"
MASK_UPDATE = "mask"
REVEAL_SHARES = "reveal"
"""The stages of a secure sum, in this order. A request's `masks` has one of them as its only name at the top."""

SESSION_BYTES = 32
"""Length of the random id by which a server distinguishes a sum from an earlier attempt at the same query."""

SITE_TENSORS = {
    "sites": ((), torch.int64),
    "keys": ((PUBLIC_KEYS_BYTES,), torch.uint8),
    "signatures": ((SIGNATURE_BYTES,), torch.uint8),
    "lasting": ((POINT_BYTES,), torch.uint8),
}
"""Tensors that have one row for each site: its number, the keys of this sum, their signature, its long-term key."""

STAGE_TENSORS: dict[str, dict[str, tuple[tuple[int, ...], torch.dtype]]] = {
    ANNOUNCE_KEYS: {"session": ((), torch.uint8)},
    DEAL_SHARES: {"asked": ((), torch.int64), **SITE_TENSORS},
    MASK_UPDATE: {"sites": ((), torch.int64)},
    REVEAL_SHARES: {"survived": ((), torch.int64), "shares": ((SHARES_BYTES,), torch.uint8)},
}
"""The tensors of each stage by name: their shape without the first dimension (the sites), and their dtype."""


def make_sum_id(request: Request, session: str) -> SumId:
    """Make the id of the secure sum that a request belongs to; `session` is in hexadecimal."""
    return SumId(request.federation, request.run, request.round, request.attempt, request.query, session)


def stack_rows(rows: Sequence[bytes]) -> Tensor:
    """Stack byte strings of equal length into a uint8 tensor (rows, bytes)."""
    return torch.from_numpy(np.frombuffer(b"".join(rows), np.uint8).reshape(len(rows), -1).copy())


def split_rows(matrix: Tensor) -> list[bytes]:
    """Split a uint8 tensor (rows, bytes) into byte strings."""
    return [row.numpy().tobytes() for row in matrix]
