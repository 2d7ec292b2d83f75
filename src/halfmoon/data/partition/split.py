"""Splits: the client of each row and the labeled rows, and the parquet file that stores them."""

import hashlib
import json
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from halfmoon.core import toml
from halfmoon.core.errors import UserError, one_line
from halfmoon.data.images import UNKNOWN, Source
from halfmoon.storage import atomic_io

SERVER = -2
"""The client number of the server's rows, which are all labeled. (-1 is no client.)"""

MAX_CLIENTS = 2**24
"""Largest number of clients in a file: arrays with an entry for each client then fit into a laptop's memory."""

MAX_PRINTED_HOLDERS = 12
"""Largest number of clients in the printed representation of a split."""

SCHEMA = pa.schema([("row", pa.int64()), ("client", pa.int64()), ("labeled", pa.bool_())])
SCHEMA_WITH_STAGES = SCHEMA.append(pa.field("stage", pa.int64()))


@dataclass(frozen=True)
class SplitOrigin:
    """The origin of a split: the scenario's fields, the data set's name, and a hash of its labels."""

    scenario: dict[str, Any] = field(default_factory=dict)
    source: str = ""
    labels_sha256: str = ""


@dataclass(frozen=True, eq=False)
class Split:
    """A partition of N rows among clients, and the labeled rows.

    Attributes:
        client: The client of each row, int64 (N,): 0 to clients - 1, SERVER for a labeled row of the server, -1 for none.
        labeled: The labeled rows, bool (N,).
        clients: The number of clients.
        origin: The scenario and data set that the split was drawn from.
        stage: The stage of each row, int64 (N,), for data that arrive as a stream (FedMatch, ICLR 2021): an unlabeled row
            is available in its stage only, a labeled one (stage 0) always. None if all rows are available always.

    Raises:
        UserError: If the arrays disagree in length or type, or a row has an invalid client or stage.

    Examples:
        >>> split = halfmoon.Split(client=y // 2, labeled=np.arange(len(y)) % 10 == 0, clients=5)
    """

    client: np.ndarray
    labeled: np.ndarray
    clients: int
    origin: SplitOrigin = field(default_factory=SplitOrigin)
    stage: np.ndarray | None = None

    def __post_init__(self) -> None:
        """Check types, lengths, client numbers and stages of the split's arrays."""
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
                f"row {wrong[0]} of the split is the server's and unlabeled, but a server has labeled rows only; "
                "give the row to a client or to no client (-1)."
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
                "from 0 and give labeled rows stage 0, as they are always available."
            )

    def __len__(self) -> int:
        return len(self.client)

    def counts(self) -> list[tuple[str, int, int]]:
        """Count the labeled and the unlabeled rows of each client.

        Returns:
            (name, labeled rows, unlabeled rows) of each client, after those of the server and of no client ("nobody"), if
            these have rows.
        """
        # Client numbers start at SERVER = -2, indices of the counts at 0.
        numbers = range(SERVER, self.clients)
        labeled_counts = np.bincount(self.client[self.labeled] - SERVER, minlength=len(numbers)).tolist()
        all_counts = np.bincount(self.client - SERVER, minlength=len(numbers)).tolist()
        special_names = {SERVER: "server", -1: "nobody"}
        table = []
        for number, labeled, total in zip(numbers, labeled_counts, all_counts, strict=True):
            if number >= 0 or total:
                name = special_names.get(number, f"client {number}")
                table.append((name, labeled, total - labeled))
        return table

    def __repr__(self) -> str:
        lines = [f"{name}: {labeled:,} labeled, {rest:,} unlabeled" for name, labeled, rest in self.counts()]
        more = [f"... {len(lines) - MAX_PRINTED_HOLDERS} more"] if len(lines) > MAX_PRINTED_HOLDERS else []
        head = f"<Split of {len(self):,} images over {self.clients:,} clients, {int(self.labeled.sum()):,} labeled>"
        return "\n  ".join([head, *lines[:MAX_PRINTED_HOLDERS], *more])

    @property
    def stages(self) -> int:
        """The number of stages; 1 if all rows are available always."""
        return 1 if self.stage is None else int(self.stage.max(initial=0)) + 1

    def rows(self, client: int, labeled: bool, stage: int | None = None) -> np.ndarray:
        """Select the labeled or unlabeled rows (images of the data set) that the split gives to a client.

        Args:
            client: The client's number, or SERVER.
            labeled: True for labeled, False for unlabeled rows.
            stage: For unlabeled rows, the stage; None for all stages. A split without stages ignores it.

        Returns:
            Row numbers, int64, ascending.
        """
        order, starts = self._rows_by_client
        index = client - SERVER  # the server's number is the lowest, and has index 0
        rows = order[starts[index] : starts[index + 1]].astype(np.int64)
        rows = rows[self.labeled[rows] == labeled]
        if stage is not None and self.stage is not None and not labeled:
            rows = rows[self.stage[rows] == stage]
        return rows

    @cached_property
    def _rows_by_client(self) -> tuple[np.ndarray, np.ndarray]:
        """An index to find the rows of a client in constant time.

        Returns:
            The row numbers sorted by client, in the order of the clients' numbers from SERVER on; and the position in
            them of each client's first row, followed by the number of all rows.
        """
        # 32-bit numbers halve the memory of large splits, and sort faster.
        fits_int32 = len(self.client) < 2**31 and self.clients < 2**31
        order = np.argsort(self.client.astype(np.int32) if fits_int32 else self.client, kind="stable")
        row_counts = np.bincount(self.client - SERVER, minlength=self.clients - SERVER)
        starts = np.concatenate([[0], np.cumsum(row_counts)]).astype(np.int64)
        return order.astype(np.int32) if fits_int32 else order, starts

    def check(self, source: Source) -> None:
        """Check that this split belongs to the training rows of a data set.

        Args:
            source: the data set.

        Raises:
            UserError: If it was drawn for other rows, or labels a row that has no label.
        """
        count = len(source.train)
        subject = f"the split was made for {self.origin.source or 'another data set'} ({len(self)} images)"
        if len(self) != count:
            raise UserError(f"{subject}, but {source.name} has {count}; load that data set or make a new split.")
        if self.origin.labels_sha256 not in ("", hash_labels(source.train.labels)):
            raise UserError(
                f"{subject}, but the labels of {source.name} differ from its labels or are in another order; "
                "load that data set or make a new split."
            )
        without_label = np.flatnonzero(self.labeled & (source.train.labels == UNKNOWN))
        if len(without_label):
            raise UserError(
                f"the split has row {without_label[0]} of {source.name} as a labeled one, but it has no label."
            )

    def save(self, path: Path) -> None:
        """Write the split to a parquet file: columns row, client, labeled, and stage if any; its origin is metadata.

        Args:
            path: The file, which is replaced if it exists.

        Raises:
            UserError: If `path` cannot be written.
        """
        metadata = asdict(self.origin) | {"images": len(self), "clients": self.clients}
        metadata["seed"] = self.origin.scenario.get("seed")
        # Arrow stores booleans as bits, the lowest first.
        columns = [np.arange(len(self)), self.client.astype(np.int64), np.packbits(self.labeled, bitorder="little")]
        schema = SCHEMA
        if self.stage is not None:
            columns.append(self.stage.astype(np.int64))
            schema = SCHEMA_WITH_STAGES
        # Arrays from buffers: `pa.array` would import pandas, to check for its types, which takes a third of a second.
        arrays = [
            pa.Array.from_buffers(column_type, len(self), [None, pa.py_buffer(column)])
            for column_type, column in zip(schema.types, columns, strict=True)
        ]
        schema = schema.with_metadata({"halfmoon": json.dumps(metadata, sort_keys=True)})
        table = pa.Table.from_arrays(arrays, schema=schema)
        parquet = pa.BufferOutputStream()
        pq.write_table(table, parquet)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # Atomically: a process that is killed leaves no incomplete split.
            atomic_io.write_atomically(path, parquet.getvalue().to_pybytes())
        except OSError as error:
            raise UserError(
                f"{path}: the split cannot be written ({atomic_io.error_reason(error)}); {atomic_io.write_remedy(error)}, "
                "or choose another file."
            ) from error

    @classmethod
    def load(cls, path: Path) -> "Split":
        """Load a split that `save` wrote: a Parquet file with a line for each image, in the order of the data set.

        Its columns are the image's row, its client, whether it is labeled and, if images arrive in stages, its stage.
        Its metadata identify the data set and the options of the split.

        Args:
            path: the file.

        Raises:
            UserError: If the file is missing, damaged, or no split.
        """
        try:
            table = pq.read_table(path)
            _ = table.schema.names  # raises UnicodeDecodeError if a name is not UTF-8
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            raise UserError(f"{path}: not a readable split ({one_line(error)}); make a new one.") from error
        origin, clients, images = _read_metadata(table, path)
        if not (table.schema.equals(SCHEMA) or table.schema.equals(SCHEMA_WITH_STAGES)):
            columns = ", ".join(f"{column.name} {column.type}" for column in table.schema)
            raise UserError(
                f"{path}: columns must be row int64, client int64, labeled bool (and stage int64 if rows arrive in "
                f"stages), but are {columns}."
            )
        if any(column.null_count for column in table.columns):
            raise UserError(f"{path}: a value is missing; make a new split.")
        row, client, labeled, *stage = (column.to_numpy() for column in table.columns)
        if images != len(row) or not np.array_equal(row, np.arange(len(row))):
            last = (images if type(images) is int else len(row)) - 1
            raise UserError(f"{path}: its rows are not 0 to {last} in order; make a new split.")
        if not 0 < clients <= MAX_CLIENTS:
            raise UserError(
                f"{path}: its number of clients is {toml.format_text(clients)}, which is invalid; make a new split."
            )
        return cls(client, labeled, clients, origin, stage[0] if stage else None)


def hash_labels(labels: np.ndarray) -> str:
    """Compute the SHA-256 of the labels as little-endian 64-bit integers."""
    return hashlib.sha256(np.ascontiguousarray(labels, "<i8").tobytes()).hexdigest()


def _read_metadata(table: pa.Table, path: Path) -> tuple[SplitOrigin, int, Any]:
    """Read the metadata in the file of a split: its origin, and the numbers of clients and of images (unchecked).

    Raises:
        UserError: If a value is missing or has another type.
    """
    try:
        metadata = atomic_io.parse_json((table.schema.metadata or {})[b"halfmoon"])
        for name, kind in {"scenario": dict, "source": str, "labels_sha256": str, "clients": int}.items():
            if type(metadata[name]) is not kind:
                raise ValueError(f"{name} has another type")
        origin = SplitOrigin(metadata["scenario"], metadata["source"], metadata["labels_sha256"])
        return origin, metadata["clients"], metadata["images"]
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"{path}: it has no metadata about the data set that it splits; make a new split with halfmoon."
        ) from error
