"""A split: which client holds each row, and which rows are labeled; and the file it is kept in."""

import hashlib
import json
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from halfmoon.core.errors import UserError, one_line
from halfmoon.data.images import UNKNOWN, Source
from halfmoon.storage import atomic_io, toml

SERVER = -2
"""The holder of rows that the server itself has; they are labeled. (-1 is nobody.)"""

MAX_CLIENTS = 2**24
"""Clients that a saved split may say it has: what is counted for each of them stays within the memory of a laptop."""

MAX_PRINTED_HOLDERS = 12
"""Holders that a split names when it is printed."""

SCHEMA = pa.schema([("row", pa.int64()), ("client", pa.int64()), ("labeled", pa.bool_())])
SCHEMA_WITH_STAGES = SCHEMA.append(pa.field("stage", pa.int64()))


@dataclass(frozen=True)
class SplitOrigin:
    """Say where a split comes from: the scenario's fields, the data set's name, a hash of its labels."""

    scenario: dict[str, Any] = field(default_factory=dict)
    source: str = ""
    labels_sha256: str = ""


@dataclass(frozen=True, eq=False)
class Split:
    """Hold the `client` of each row, int64 (N,), and whether it is `labeled`, bool (N,).

    A client is 0..clients-1, SERVER for a labeled row of the server, -1 for nobody. `stage`, int64 (N,), says when a
    row can be seen where data arrive as a stream (FedMatch, ICLR 2021): an unlabeled row in its stage only, a labeled
    one, which is of stage 0, always. Without it nothing streams.

    Raise UserError where the arrays disagree in length or type, or a row has a holder or a stage it cannot have.
    """

    client: np.ndarray
    labeled: np.ndarray
    clients: int  # how many there are
    origin: SplitOrigin = field(default_factory=SplitOrigin)  # what it was drawn from
    stage: np.ndarray | None = None

    def __post_init__(self) -> None:
        if self.client.dtype != np.int64 or self.labeled.dtype != np.bool_ or self.client.ndim != 1:
            raise UserError("a split needs client as int64 (N,) and labeled as bool (N,); convert them first.")
        if self.client.shape != self.labeled.shape:
            sizes = f"{self.client.size} and {self.labeled.size}"
            raise UserError(f"a split needs one client and one mark per row, but has {sizes}.")
        wrong = np.flatnonzero((self.client < SERVER) | (self.client >= self.clients))
        if wrong.size:
            raise UserError(
                f"row {wrong[0]} of the split belongs to client {self.client[wrong[0]]}, but there are "
                f"{self.clients} clients, numbered from 0 (-1 is nobody, {SERVER} the server)."
            )
        wrong = np.flatnonzero((self.client == SERVER) & ~self.labeled)
        if wrong.size:
            raise UserError(
                f"row {wrong[0]} of the split is the server's and unlabeled, but a server holds labeled rows only; "
                "give the row to a client or to nobody (-1)."
            )
        if self.stage is None:
            return
        if self.stage.dtype != np.int64 or self.stage.shape != self.labeled.shape:
            size = self.labeled.size
            raise UserError(f"a split of {size} rows needs stage as int64 ({size},); convert it first.")
        wrong = np.flatnonzero((self.stage < 0) | (self.labeled & (self.stage != 0)))
        if wrong.size:
            raise UserError(
                f"row {wrong[0]} of the split has stage {self.stage[wrong[0]]}; number the stages of unlabeled rows "
                "from 0 and give labeled rows stage 0, as they stay."
            )

    def __len__(self) -> int:
        return len(self.client)

    def counts(self) -> list[tuple[str, int, int]]:
        """Return (holder, labeled, unlabeled) of every client, and of the server and nobody where these hold rows."""
        holders = range(-2, self.clients)
        labeled, every = (np.bincount(self.client[rows] - SERVER, minlength=self.clients - SERVER).tolist()
                          for rows in (self.labeled, slice(None)))  # fmt: skip
        names = {SERVER: "server", -1: "nobody"}
        each = zip(holders, labeled, every, strict=True)
        return [(names.get(k, f"client {k}"), n, of - n) for k, n, of in each if k >= 0 or of]

    def __repr__(self) -> str:
        lines = [f"{name}: {labeled:,} labeled, {rest:,} unlabeled" for name, labeled, rest in self.counts()]
        more = [f"... {len(lines) - MAX_PRINTED_HOLDERS} more"] if len(lines) > MAX_PRINTED_HOLDERS else []
        head = f"<Split of {len(self):,} images over {self.clients:,} clients, {int(self.labeled.sum()):,} labeled>"
        return "\n  ".join([head, *lines[:MAX_PRINTED_HOLDERS], *more])

    @property
    def stages(self) -> int:
        """Return how many stages there are; 1 where nothing streams."""
        return 1 if self.stage is None else int(self.stage.max(initial=0)) + 1

    def rows(self, k: int, labeled: bool, stage: int | None = None) -> np.ndarray:
        """Return the rows of client `k`, or of SERVER, that are `labeled` (or not), int64, sorted.

        With a `stage`, unlabeled rows are those to be seen in it: in a split without stages, all of them.
        """
        order, starts = self._holders
        mine = order[starts[k - SERVER] : starts[k - SERVER + 1]].astype(np.int64)
        mine = mine[self.labeled[mine] == labeled]
        if stage is not None and self.stage is not None and not labeled:
            mine = mine[self.stage[mine] == stage]
        return mine

    @cached_property
    def _holders(self) -> tuple[np.ndarray, np.ndarray]:
        """The rows by holder, and where each holder's begin: looking one up costs the same among any number."""
        small = len(self.client) < 2**31 and self.clients < 2**31
        order = np.argsort(self.client.astype(np.int32) if small else self.client, kind="stable")
        starts = np.zeros(self.clients - SERVER + 1, np.int64)
        np.cumsum(np.bincount(self.client - SERVER, minlength=self.clients - SERVER), out=starts[1:])
        return order.astype(np.int32) if small else order, starts

    def check(self, source: Source) -> None:
        """Raise UserError where this split was made for other training rows than those of `source`."""
        count = len(source.train)
        words = f"the split was made for {self.origin.source or 'another data set'} ({len(self)} images)"
        if len(self) != count:
            raise UserError(f"{words}, but {source.name} has {count}; load that data set or make a new split.")
        if self.origin.labels_sha256 not in ("", hash_labels(source.train.labels)):
            raise UserError(
                f"{words}, but the labels of {source.name} differ from its labels or stand in another order; "
                "load that data set or make a new split."
            )
        bare = np.flatnonzero(self.labeled & (source.train.labels == UNKNOWN))
        if len(bare):
            raise UserError(f"the split has row {bare[0]} of {source.name} as a labeled one, but it has no label.")

    def save(self, path: Path) -> None:
        """Write the split as parquet: row, client, labeled, and stage where it has stages; its origin is metadata.

        Raise UserError where `path` cannot be written.
        """
        facts = asdict(self.origin) | {"images": len(self), "clients": self.clients}
        facts["seed"] = self.origin.scenario.get("seed")
        columns = [np.arange(len(self)), self.client.astype(np.int64), np.packbits(self.labeled, bitorder="little")]
        schema = SCHEMA
        if self.stage is not None:
            columns, schema = [*columns, self.stage.astype(np.int64)], SCHEMA_WITH_STAGES
        # From buffers: to see whether NumPy's arrays are pandas', PyArrow would import it, for a third of a second.
        typed = zip(schema.types, columns, strict=True)
        arrays = [pa.Array.from_buffers(kind, len(self), [None, pa.py_buffer(column)]) for kind, column in typed]
        schema = schema.with_metadata({"halfmoon": json.dumps(facts, sort_keys=True)})
        table = pa.Table.from_arrays(arrays, schema=schema)
        parquet = pa.BufferOutputStream()
        pq.write_table(table, parquet)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # Under one name until it is whole: what a kill leaves there, the next attempt takes.
            atomic_io.write_atomically(path, parquet.getvalue().to_pybytes())
        except OSError as error:
            raise UserError(f"{path}: the split cannot be written ({error}).") from error

    @classmethod
    def load(cls, path: Path) -> "Split":
        """Return the split that `save` wrote to `path`; raise UserError for a missing, damaged or foreign file."""
        try:
            table = pq.read_table(path)
            _ = table.schema.names  # which may be no text
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            raise UserError(f"{path}: not a readable split ({one_line(error)}); make a new one.") from error
        try:
            facts = atomic_io.parse_json((table.schema.metadata or {})[b"halfmoon"])
            origin = SplitOrigin(facts["scenario"], facts["source"], facts["labels_sha256"])
            clients, images = facts["clients"], facts["images"]
            kinds = {dict: origin.scenario, str: origin.source, int: clients}
            if any(type(value) is not kind for kind, value in kinds.items()) or type(origin.labels_sha256) is not str:
                raise ValueError("a fact is of another type")
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(f"{path}: it does not say what it splits; only files saved by halfmoon do.") from error
        if not (table.schema.equals(SCHEMA) or table.schema.equals(SCHEMA_WITH_STAGES)):
            columns = ", ".join(f"{part.name} {part.type}" for part in table.schema)
            raise UserError(
                f"{path}: columns must be row int64, client int64, labeled bool (and stage int64 where rows come in "
                f"stages), but are {columns}."
            )
        if any(part.null_count for part in table.columns):
            raise UserError(f"{path}: a value is missing; make a new split.")
        row, client, labeled, *stage = (part.to_numpy() for part in table.columns)
        if images != len(row) or not np.array_equal(row, np.arange(len(row))):
            last = (images if type(images) is int else len(row)) - 1
            raise UserError(f"{path}: its rows are not 0 to {last} in order; make a new split.")
        if not 0 < clients <= MAX_CLIENTS:
            raise UserError(f"{path}: it says that there are {toml.format_text(clients)} clients; make a new split.")
        return cls(client, labeled, clients, origin, stage[0] if stage else None)


def hash_labels(labels: np.ndarray) -> str:
    """Return the SHA-256 of the labels as little-endian 64-bit numbers."""
    return hashlib.sha256(np.ascontiguousarray(labels, "<i8").tobytes()).hexdigest()
