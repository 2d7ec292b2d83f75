"""A split: which client holds each row, and which rows are labeled; and the file it is kept in."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from halfmoon.data.files import replacing
from halfmoon.data.images import Source
from halfmoon.errors import UserError

SCHEMA = pa.schema([("row", pa.int64()), ("client", pa.int64()), ("labeled", pa.bool_())])


@dataclass(frozen=True)
class Origin:
    """Say where a split comes from: the scenario's fields, the data set's name, a hash of its labels."""

    scenario: dict[str, Any] = field(default_factory=dict)
    source: str = ""
    labels_sha256: str = ""


@dataclass(frozen=True, eq=False)
class Split:
    """Hold the `client` of each row, int64 (N,), -1 for nobody, and whether it is `labeled`, bool (N,).

    Raise UserError where the two disagree in length or type, or a client is not in -1..clients-1.
    """

    client: np.ndarray
    labeled: np.ndarray
    clients: int
    origin: Origin = field(default_factory=Origin)

    def __post_init__(self) -> None:
        if self.client.dtype != np.int64 or self.labeled.dtype != np.bool_ or self.client.ndim != 1:
            raise UserError("a split needs client as int64 (N,) and labeled as bool (N,); convert them first.")
        if self.client.shape != self.labeled.shape:
            sizes = f"{self.client.size} and {self.labeled.size}"
            raise UserError(f"a split needs one client and one mark per row, but has {sizes}.")
        wrong = np.flatnonzero((self.client < -1) | (self.client >= self.clients))
        if wrong.size:
            raise UserError(
                f"row {wrong[0]} of the split belongs to client {self.client[wrong[0]]}, but there are "
                f"{self.clients} clients, numbered from 0 (-1 is nobody)."
            )

    def __len__(self) -> int:
        return len(self.client)

    def rows(self, k: int, labeled: bool) -> np.ndarray:
        """Return the rows of client `k` that are labeled (or not), int64, sorted."""
        return np.flatnonzero((self.client == k) & (self.labeled == labeled))

    def check(self, source: Source) -> None:
        """Raise UserError where this split was made for other training rows than those of `source`."""
        count = len(source.train)
        made = f"the split was made for {self.origin.source or 'another data set'} ({len(self)} images)"
        if len(self) != count:
            raise UserError(f"{made}, but {source.name} has {count}; load that data set or make a new split.")
        if self.origin.labels_sha256 not in ("", hash_labels(source.train.labels)):
            raise UserError(
                f"{made}, but the labels of {source.name} differ from its labels or stand in another order; "
                "load that data set or make a new split."
            )

    def save(self, path: Path) -> None:
        """Write the split as parquet: row, client, labeled, with its origin in the schema's metadata.

        Raise UserError where the file cannot be written.
        """
        facts = asdict(self.origin) | {"images": len(self), "clients": self.clients}
        facts["seed"] = self.origin.scenario.get("seed")
        table = pa.table(
            [np.arange(len(self)), self.client, self.labeled],
            schema=SCHEMA.with_metadata({"halfmoon": json.dumps(facts, sort_keys=True)}),
        )
        try:
            with replacing(path) as file:
                pq.write_table(table, file)
        except OSError as error:
            raise UserError(f"{path}: the split cannot be written ({error}).") from error

    @classmethod
    def load(cls, path: Path) -> Split:
        """Return the split that `save` wrote; raise UserError for a missing, damaged or foreign file."""
        try:
            table = pq.read_table(path)
        except (pa.ArrowException, OSError) as error:
            raise UserError(f"{path}: not a readable split ({error}); make a new one.") from error
        try:
            facts = json.loads((table.schema.metadata or {})[b"halfmoon"])
            origin = Origin(facts["scenario"], facts["source"], facts["labels_sha256"])
            clients, images = int(facts["clients"]), int(facts["images"])
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(f"{path}: it does not say what it splits; only files saved by halfmoon do.") from error
        if not table.schema.equals(SCHEMA):
            held = ", ".join(f"{part.name} {part.type}" for part in table.schema)
            raise UserError(f"{path}: columns must be row int64, client int64, labeled bool, but are {held}.")
        columns = [table.column(name) for name in SCHEMA.names]
        if any(part.null_count for part in columns):
            raise UserError(f"{path}: a value is missing; make a new split.")
        row, client, labeled = (part.to_numpy() for part in columns)
        if not np.array_equal(row, np.arange(images)):
            raise UserError(f"{path}: its rows are not 0 to {images - 1} in order; make a new split.")
        return cls(client, labeled, clients, origin)


def hash_labels(labels: np.ndarray) -> str:
    """Return the SHA-256 of the labels as little-endian 64-bit numbers."""
    return hashlib.sha256(np.ascontiguousarray(labels, "<i8").tobytes()).hexdigest()
