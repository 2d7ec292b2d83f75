"""A split: which client holds each row, and which rows are labeled; and the file it is kept in."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Origin:
    """Say where a split comes from: the scenario's fields, the data set's name, and a hash of its labels."""

    scenario: dict[str, Any] = field(default_factory=dict)
    source: str = ""
    labels_sha256: str = ""


@dataclass(frozen=True, eq=False)
class Split:
    """Hold the `client` of each row, int64 (N,), -1 for nobody, and whether it is `labeled`, bool (N,)."""

    client: np.ndarray
    labeled: np.ndarray
    clients: int
    origin: Origin = field(default_factory=Origin)

    def rows(self, k: int, labeled: bool) -> np.ndarray:
        """Return the rows of client `k` that are labeled (or not), int64, sorted."""
        return np.flatnonzero((self.client == k) & (self.labeled == labeled))


def hash_labels(labels: np.ndarray) -> str:
    """Return the SHA-256 of the labels as little-endian 64-bit numbers."""
    return hashlib.sha256(np.ascontiguousarray(labels, "<i8").tobytes()).hexdigest()
