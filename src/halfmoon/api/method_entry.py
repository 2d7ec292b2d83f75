"""A method's row in the catalog: its name, its words for tables, and its default options."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from halfmoon.api.requirements import ANYWHERE, PLACES, Place, requirements_of
from halfmoon.api.types import Method


@dataclass(frozen=True)
class MethodEntry:
    """One method of the catalog: `method` carries the default options.

    `all_labels` marks a supervised upper bound, which trains on every row of the clients as a labeled one; `pooled` a
    centralized row: all rows in the hands of one client. `paper_options` are the options that the method's paper fixes,
    `paper_run` what it fixes of a run: `preset` "paper" sets both.
    """

    name: str
    title: str
    paper: str
    about: str
    method: Method
    all_labels: bool = False
    pooled: bool = False
    paper_options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    paper_run: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def singles(self) -> str:
        """Return for what the server needs every single upload, nothing where their weighted sum is enough."""
        return self.unsummed("batch")

    def unsummed(self, norm: str) -> str:
        """Return `singles` with a network of this norm."""
        if self.pooled:
            return "all rows lie in one place"
        needed = requirements_of(self.method, norm)
        return needed.reason if needed.aggregation == "individual" else ""

    def unrobust(self, aggregation: str, norm: str) -> str:
        """Return why a robust aggregation cannot stand before the method with such a network, nothing where it can."""
        needed = requirements_of(self.method, norm)
        if needed.counts_statistics:
            return f"it counts statistics in a query of their own, where no rule looks; use {needed.counts_statistics}"
        return needed.reason if needed.personal and aggregation not in ("clip", "cosine") else ""

    @property
    def places(self) -> tuple[Place, ...]:
        """Return where labels may lie, the expected place first."""
        return ANYWHERE if self.all_labels or self.pooled else requirements_of(self.method).places

    @property
    def labels(self) -> str:
        """Return in words where the method expects labels."""
        if self.all_labels:
            return "all rows (upper bound)"
        if self.pooled:
            return "some of all rows, in one place"
        *others, last = (PLACES[place] for place in self.places)
        return f"{', '.join(others)} or {last}" if others else last
