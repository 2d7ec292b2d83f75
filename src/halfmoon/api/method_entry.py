"""Catalog entry of a method: its name, its descriptions for tables, and its default options."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from halfmoon.api.requirements import requirements_of
from halfmoon.api.types import Method
from halfmoon.core.label_locations import ALL_LABEL_LOCATIONS, LABEL_LOCATIONS, LabelLocation


@dataclass(frozen=True)
class MethodEntry:
    """One method of the catalog.

    Attributes:
        name: name in configurations.
        title: name in tables.
        paper: reference.
        about: one-line description.
        method: the method with its default options.
        all_labels: whether it is a supervised upper bound ("ceiling"), which trains on all images of the clients with their labels.
        pooled: whether it is a centralized baseline: one client has all images.
        paper_options: options that the method's paper fixes; preset "paper" sets them.
        paper_run: settings of a run that the paper fixes; preset "paper" sets them, too.
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
    def individual_uploads(self) -> str:
        """Reason why the server needs every single upload, with batch normalization; empty if their sum is enough."""
        return self.individual_upload_reason("batch")

    def individual_upload_reason(self, norm: str) -> str:
        """Explain why the server needs every single upload of this catalog entry's method.

        Such a method cannot be combined with secure aggregation or differential privacy, which give the server only the
        (weighted) sum of the uploads.

        Args:
            norm: normalization of the network: "batch", "group" or "none".

        Returns:
            The reason, as the end of a sentence; "" if the sum is enough.
        """
        if self.pooled:
            return "one client has all images"
        needed = requirements_of(self.method, norm)
        return needed.reason if needed.aggregation == "individual" else ""

    def robust_rule_conflict(self, aggregation: str, norm: str) -> str:
        """Explain why a robust aggregation rule cannot be used with this catalog entry's method.

        A robust rule limits the influence of hostile clients. All but two rules mix the uploads or replace them by one
        aggregate, which makes a method meaningless that sends clients something it computes from single uploads.

        Args:
            aggregation: name of the rule.
            norm: normalization of the network: "batch", "group" or "none".

        Returns:
            The reason, as the end of a sentence; "" if the rule can be used.
        """
        needed = requirements_of(self.method, norm)
        # The name of the options that avoid such a query; "" for a method that has none.
        if needed.counts_statistics:
            return (
                "its clients count statistics in a separate query, which no robust rule checks; "
                f"use {needed.counts_statistics}"
            )
        # `personal`: the server sends clients something that it computes from single uploads. The rules "clip" and
        # "cosine" only scale or remove these.
        return needed.reason if needed.personal and aggregation not in ("clip", "cosine") else ""

    @property
    def label_locations(self) -> tuple[LabelLocation, ...]:
        """Supported holders of labels, the preferred one first."""
        if self.all_labels or self.pooled:
            return ALL_LABEL_LOCATIONS
        return requirements_of(self.method).label_locations

    @property
    def labels(self) -> str:
        """Description of the supported holders of labels."""
        if self.all_labels:
            return "all rows (upper bound)"
        if self.pooled:
            return "some of all rows, in one place"
        *others, last = (LABEL_LOCATIONS[location] for location in self.label_locations)
        return f"{', '.join(others)} or {last}" if others else last
