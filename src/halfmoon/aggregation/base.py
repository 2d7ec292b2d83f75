"""What stands between the uploads of one query and the method that asked it.

A method asks, and gets uploads, every leaf (k, ...). An aggregator sees them first: it may leave some out, change them,
or put one aggregate in the place of every single one, so that whatever weighted mean the method's server takes of equal
uploads is that aggregate. No method knows of aggregators, and no aggregator knows a method.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from halfmoon.api.types import StateStore
from halfmoon.api.uploads import UPDATE_ONLY, Upload, UploadSpec
from halfmoon.core import tree
from halfmoon.core.tree import Tree


class AggregationContext(NamedTuple):
    """One question of a round, and who answered it."""

    round: int  # from 0
    attempt: int  # how often the round was begun again before, because too few had answered
    query: int  # questions of this round before this one
    client_update: str
    broadcast: Tree  # what went down to all
    per_client: Tree  # what went to each beside (leaves (k, ...)), in the order of `clients`
    clients: tuple[int, ...]  # who answered, in the order of the uploads
    cohort: int  # how many were asked
    random_cohort: bool  # whether those asked are the round's cohort, drawn at random from all clients
    upload_spec: UploadSpec = UPDATE_ONLY  # what the work declares of its uploads
    memory: StateStore | None = None  # what is remembered from round to round, a part of every checkpoint

    def only(self, places: Sequence[int]) -> "AggregationContext":
        """Return the question as if those at `places` alone had answered."""
        indices = torch.tensor(list(places), dtype=torch.int64)
        per_client = tree.map(lambda leaf: leaf[indices.to(leaf.device)], self.per_client)
        return self._replace(clients=tuple(self.clients[place] for place in places), per_client=per_client)


class Aggregator(Protocol):
    """A step between the uploads of a query and the method: it may drop, change or replace uploads."""

    def uploads(self, context: AggregationContext, upload: Upload) -> tuple[Sequence[int], Upload]:
        """Return the places of the answers that count, and their uploads as the method gets them, leaves (k', ...)."""
        ...

    def row(self) -> dict[str, Any]:
        """Return what there is to say of the round that is over, for its line in metrics.jsonl."""
        return {}

    def ended(self, round: int) -> str | None:
        """Return in a sentence why `round` (from 0) may not be played, None where it may."""
        return None


def downlinks(context: AggregationContext) -> dict[str, Tensor]:
    """Return what each client was sent, by path: leaves (k, ...), or (1, ...) where it was the same for all."""
    shared = {path: leaf.unsqueeze(0) for path, leaf in tree.flatten(context.broadcast).items()}
    return {**shared, **tree.flatten(context.per_client)}


def along(values: Tensor, leaf: Tensor) -> Tensor:
    """Return (k,) in a shape that meets a leaf (k, ...), on its device; numbers in its dtype."""
    there = values.to(leaf.device) if values.dtype == torch.bool else values.to(leaf)
    return there.reshape(-1, *[1] * (leaf.dim() - 1))


def mixed(mask: Tensor, new: Upload, old: Upload) -> Upload:
    """Return the uploads `new` at the places where `mask` (k,) holds, and `old`, bit by bit, at the others."""

    def one(a: Tensor, b: Tensor) -> Tensor:
        return b if a is b else torch.where(along(mask, b), a, b)

    return Upload.from_tree(tree.map(one, new.tree, old.tree))


def update(upload: Upload, context: AggregationContext) -> dict[str, Tensor]:
    """Return by how much each client changed what it was sent: {path: (k, ...)}, floating leaves alone."""
    broadcast = downlinks(context)
    return {
        path: leaf - broadcast[path] for path, leaf in tree.flatten(upload.update).items() if leaf.is_floating_point()
    }


def changed(upload: Upload, context: AggregationContext, change: dict[str, Tensor]) -> Upload:
    """Return the uploads as if each client had changed what it was sent by `change`, leaves (k, ...) or (...).

    A leaf (...) is one aggregate in the place of every client's. What is no update (weights, counts) stays as it is.
    """
    broadcast, count = downlinks(context), len(context.clients)

    def moved(branch: Tree, above: str) -> Tree:
        new: Tree = {}
        for name, leaf in branch.items():
            path = f"{above}{name}"
            if isinstance(leaf, dict):  # also an empty one: a network without statistics has {"stats": {}}
                new[name] = moved(leaf, f"{path}/")
            elif path in change:
                each = broadcast[path] + change[path]
                new[name] = each.expand(count, *each.shape[1:])
            else:
                new[name] = leaf
        return new

    return upload._replace(update=moved(upload.update, ""))
