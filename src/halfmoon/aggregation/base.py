"""Aggregators: steps between the uploads of a query and the method that receives them.

A method sends a query and receives the uploads of its k clients, every leaf (k, ...). An aggregator processes the
uploads before the method: it may drop some, change them, or replace every upload by one aggregate. In the last case any
weighted mean that the method computes equals that aggregate. Methods and aggregators do not depend on each other.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from halfmoon.api.types import StateStore
from halfmoon.api.uploads import UPDATE_ONLY, Upload, UploadSpec
from halfmoon.core import tree
from halfmoon.core.tree import Tree


class AggregationContext(NamedTuple):
    """A query of a round and the clients that responded to it.

    Attributes:
        round: The round, from 0.
        attempt: The number of earlier attempts at this round, which too few clients responded to.
        query: The number of earlier queries in this round.
        client_update: The name of the client update that the clients ran.
        broadcast: The values sent to the cohort.
        per_client: The values sent to one client each, leaves (k, ...) in the order of `clients`.
        clients: The numbers of the clients that responded, in the order of the uploads.
        cohort: The number of clients that received the query.
        random_cohort: True if they are the round's cohort, drawn at random from all clients.
        upload_spec: The declared content of the uploads.
        memory: State that is retained between rounds and stored in every checkpoint.
    """

    round: int
    attempt: int
    query: int
    client_update: str
    broadcast: Tree
    per_client: Tree
    clients: tuple[int, ...]
    cohort: int
    random_cohort: bool
    upload_spec: UploadSpec = UPDATE_ONLY
    memory: StateStore | None = None

    def only(self, indices: Sequence[int]) -> "AggregationContext":
        """Restrict the context to the clients at these indices of `clients`."""
        index_tensor = torch.tensor(list(indices), dtype=torch.int64)
        per_client = tree.map(lambda leaf: leaf[index_tensor.to(leaf.device)], self.per_client)
        return self._replace(clients=tuple(self.clients[index] for index in indices), per_client=per_client)


class Aggregator(Protocol):
    """A step between the uploads of a query and the method: it may drop, change or replace uploads."""

    def process_uploads(self, context: AggregationContext, upload: Upload) -> tuple[Sequence[int], Upload]:
        """Filter or change the uploads of one query before the method averages them, for example to limit outliers.

        Each aggregator implements this. Several may follow one another.

        Args:
            context: The query and the k clients that responded.
            upload: Their uploads, leaves (k, ...).

        Returns:
            The indices of the k' clients that remain, and the uploads that the method receives, leaves (k', ...).
        """
        ...

    def row(self) -> dict[str, Any]:
        """Return this aggregator's metrics of the finished round, for its line in metrics.jsonl."""
        return {}

    def stop_reason(self, round: int) -> str | None:
        """Return the reason, a sentence, to stop before `round` (from 0), or None to continue."""
        return None


def downloaded_values(context: AggregationContext) -> dict[str, Tensor]:
    """Return the values sent to the clients, by path: leaves (k, ...), or (1, ...) for those broadcast to all."""
    shared = {path: leaf.unsqueeze(0) for path, leaf in tree.flatten(context.broadcast).items()}
    return {**shared, **tree.flatten(context.per_client)}


def align_with_leaf(values: Tensor, leaf: Tensor) -> Tensor:
    """Reshape values (k,) to (k, 1, ...), so that they broadcast against a leaf (k, ...).

    The result is on the leaf's device. A Boolean mask remains Boolean; numbers are converted to the leaf's dtype.
    """
    values = values.to(leaf.device) if values.dtype == torch.bool else values.to(leaf)
    return values.reshape(-1, *[1] * (leaf.dim() - 1))


def select_uploads(mask: Tensor, new: Upload, old: Upload) -> Upload:
    """Select the upload `new` for clients where `mask` (k,) is true, and `old`, bit by bit, for all other clients."""

    def select_leaf(new_leaf: Tensor, old_leaf: Tensor) -> Tensor:
        if new_leaf is old_leaf:
            return old_leaf
        return torch.where(align_with_leaf(mask, old_leaf), new_leaf, old_leaf)

    return Upload.from_tree(tree.map(select_leaf, new.tree, old.tree))


def compute_update(upload: Upload, context: AggregationContext) -> dict[str, Tensor]:
    """Compute each client's update: the uploaded minus the downloaded values.

    Args:
        upload: The uploads of k clients, leaves (k, ...).
        context: The query, with the values that the clients downloaded.

    Returns:
        {path: (k, ...)}, only floating-point leaves.
    """
    received = downloaded_values(context)
    return {
        path: leaf - received[path] for path, leaf in tree.flatten(upload.update).items() if leaf.is_floating_point()
    }


def replace_update(upload: Upload, context: AggregationContext, change: Mapping[str, Tensor]) -> Upload:
    """Replace the model that each client uploads by the downloaded one plus a new update.

    Args:
        upload: The uploads, leaves (k, ...). Weights, auxiliary values, and paths that `change` lacks, such as integer
            counts, remain unchanged.
        context: The query, with the values that the k clients downloaded.
        change: The new updates by path, relative to the downloaded values: leaves (k, ...), or (...) for one aggregate
            that all clients receive.

    Returns:
        The uploads, leaves (k, ...).
    """
    received = downloaded_values(context)
    count = len(context.clients)
    new_leaves: dict[str, Tensor] = {}
    for path in tree.flatten(upload.update):
        if path in change:
            # (1, ...) if all clients received the same value and get the same update; the method expects (k, ...).
            values = received[path] + change[path]
            new_leaves[path] = values.expand(count, *values.shape[1:])
    return upload._replace(update=tree.replace_leaves(upload.update, new_leaves))
