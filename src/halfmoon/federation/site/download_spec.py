"""The downloads that the server of a federation may send, found by rounds with simulated clients.

The counterpart of `halfmoon.federation.protocol.tree_spec`, for a site that does not trust the server. A site trains
what it downloads, and networks take their sizes from the tensors, so without this check a server could make a site
train a much larger network.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from halfmoon.api.types import Method, Task
from halfmoon.engine.sampling import Views
from halfmoon.federation.protocol.header import DTYPES
from halfmoon.federation.protocol.tree_spec import TreeSpec, UploadProbe
from halfmoon.federation.protocol.trial import TrialFailed, TrialFederation

TRIAL_COHORTS = (1, 5)
"""Numbers of simulated clients. A first dimension that differs between them counts clients."""

ANY_COUNT = -1
"""Stands for a first dimension that counts something, such as the clients that have sent a model."""

MAX_PATH_LENGTH = 80
"""Characters of a tensor's path in a message about it."""

DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

LeafSpec = tuple[tuple[int, ...], torch.dtype]


@dataclass(frozen=True)
class DownloadSpecs:
    """The specs of the downloads of a federation.

    Attributes:
        specs: for each client update the specs that its downloads may have.
        sites: the number of sites, which bounds dimensions that are `ANY_COUNT`.
    """

    specs: Mapping[str, list[TreeSpec]]
    sites: int

    @classmethod
    def from_trial(
        cls, method: Method, task: Task, views: Views, image: tuple[int, int, int], seed: int, sites: int
    ) -> "DownloadSpecs":
        """Find which tensors a server sends for this method, by running rounds with simulated clients.

        Rounds are run with one and with five clients: a dimension that differs between them counts clients.

        Args:
            method: the method of the federation.
            task: its task.
            views: its views of images.
            image: channels, height and width.
            seed: seed of the federation.
            sites: the number of sites.

        Returns:
            The specs; none at all if the rounds cannot be run.
        """
        # The server computes in float32, whatever the precision of uploads.
        task = replace(task, upload_precision="float32")
        probe = UploadProbe(task, views, image, seed)
        specs: dict[str, list[TreeSpec]] = {}
        for clients in TRIAL_COHORTS:
            trial = TrialFederation(probe, views, seed, clients)
            try:
                trial.run_rounds(method, task)
            except TrialFailed:
                return cls({}, sites)
            for client_update, download_specs in trial.download_specs.items():
                for spec in download_specs:
                    _add_spec(specs.setdefault(client_update, []), spec)
        return cls(specs, sites)

    @classmethod
    def from_json(cls, record: Any, sites: int) -> "DownloadSpecs":
        """Restore specs from the output of `to_json`."""
        return cls(_map_leaves(dict(record), lambda leaf: (tuple(leaf[0]), DTYPES[leaf[1]])), sites)

    def to_json(self) -> dict[str, Any]:
        """Convert the specs to lists and texts."""
        return _map_leaves(self.specs, lambda leaf: [list(leaf[0]), DTYPE_NAMES[leaf[1]]])

    def find_mismatch(self, client_update: str, spec: TreeSpec) -> str | None:
        """Check that the tensors of a download are some that the method sends for this client update.

        Args:
            client_update: name of the client update.
            spec: names, shapes and dtypes of the tensors that the server sends.

        Returns:
            The first difference, as text; None if there is none, or if the client update has no known specs.
        """
        candidates = self.specs.get(client_update, [])
        differences = [self._find_difference(spec, expected) for expected in candidates]
        if not candidates or None in differences:
            return None
        # Describe the difference from the candidate that has the most names in common with the download.
        different_names = [len(expected.keys() ^ spec.keys()) for expected in candidates]
        # Of several such candidates the last one counts, so the index is negated.
        closest = min(range(len(candidates)), key=lambda index: (different_names[index], -index))
        return differences[closest]

    def _find_difference(self, spec: TreeSpec, expected: TreeSpec) -> str | None:
        """Describe the first tensor that is missing, unexpected, or has another shape or dtype; None if there is none.

        Args:
            spec: (shape, dtype) by path of the tensors that a server sends.
            expected: the same of the tensors that the method sends.
        """
        for path in (*expected, *spec):
            quoted_path = repr(path[:MAX_PATH_LENGTH])
            if path not in spec:
                return f"{quoted_path} is missing"
            if path not in expected:
                return f"{quoted_path} is not part of the terms"
            if not self._matches(spec[path], expected[path]):
                return f"{quoted_path} does not have the size or the type that the terms imply"
        return None

    def _matches(self, leaf: LeafSpec | None, expected: LeafSpec | None) -> bool:
        """Check a tensor's shape and dtype. A first dimension that counts clients may be from 1 to the number of sites.

        Args:
            leaf: (shape, dtype) of the tensor; None for an empty branch of the tree.
            expected: the same, as the method sends it.
        """
        if leaf is None or expected is None:
            return leaf is expected
        shape, dtype = leaf
        expected_shape, expected_dtype = expected
        if len(shape) != len(expected_shape) or dtype != expected_dtype:
            return False
        # Tensors of several clients, such as their models, are stacked along the first dimension.
        if expected_shape and expected_shape[0] == ANY_COUNT:
            return 1 <= shape[0] <= self.sites and shape[1:] == expected_shape[1:]
        return shape == expected_shape


def _map_leaves(specs: Mapping[str, Any], convert: Callable[[Any], Any]) -> dict[str, Any]:
    """Convert the leaf specs of all client updates; None, an empty branch, remains None."""
    return {
        client_update: [{path: leaf and convert(leaf) for path, leaf in spec.items()} for spec in candidates]
        for client_update, candidates in specs.items()
    }


def _add_spec(specs: list[TreeSpec], spec: TreeSpec) -> None:
    """Add a spec to a list in place, or merge it with one that differs in first dimensions only.

    A first dimension that differs counts clients, so it becomes `ANY_COUNT`.
    """
    for index, other in enumerate(specs):
        if other.keys() == spec.keys():
            merged = {path: _merge_leaves(other[path], spec[path]) for path in spec}
            if _CONFLICT not in merged.values():
                specs[index] = merged
                return
    specs.append(spec)


_CONFLICT: Any = ()
"""The result of merging leaves that differ in more than their first dimension."""


def _merge_leaves(first: LeafSpec | None, second: LeafSpec | None) -> LeafSpec | None:
    """Merge two (shape, dtype) that may differ in their first dimension; None is an empty branch of the tree.

    Returns:
        The merged one, whose first dimension is `ANY_COUNT` if it differs; `_CONFLICT` if they cannot be merged.
    """
    if first == second:
        return first
    if first is None or second is None:
        return _CONFLICT
    first_shape, first_dtype = first
    second_shape, second_dtype = second
    if first_dtype != second_dtype or len(first_shape) != len(second_shape) or first_shape[1:] != second_shape[1:]:
        return _CONFLICT
    return (ANY_COUNT, *first_shape[1:]), first_dtype
