"""Cap client weights: clients report their own sample counts, which may be wrong.

A client that claims 10^9 images is the average, whatever the norm of its update: no bound on norms helps against a
weight. So weights are capped at `factor` times the cohort's median weight (the lower one of the middle two: half of a
cohort that lies raises it no further than an honest weight), or, where the server's people know how many images a
client has, at that number. Sums that were multiplied by a weight at the client (`halfmoon.api.uploads.Aux`: "sum") are
scaled down with it. A weight of one half and more of the sum is legal after that (a cohort of two has no other), and is
told.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from halfmoon.aggregation.base import AggregationContext, Aggregator
from halfmoon.api.uploads import Upload, UploadSpec
from halfmoon.core import tree
from halfmoon.core.tree import Tree

FACTOR = 2.0
"""Default of the largest weight in a federation, in multiples of the cohort's median weight."""

OWNER = 0.5
"""A share of all weights above which one client decides alone."""


class WeightCap(Aggregator):
    """An aggregator that caps weights (k,); its row says whose were, and which share of the sum the heaviest client
    has.

    `factor` is the cap in medians, 0 for none; `declared` has the images of clients of whom they are known, by number,
    which then are the cap. `warn` hears once of a client, by number, that its share (a fraction) is over `OWNER`.
    """

    def __init__(
        self,
        factor: float = FACTOR,
        declared: Mapping[int, int] | None = None,
        warn: Callable[[int, float], None] = lambda client, share: None,
    ) -> None:
        self.factor, self.declared, self.warn = factor, dict(declared or {}), warn
        self._row: dict[str, Any] = {}
        self._warned: set[int] = set()

    def uploads(self, context: AggregationContext, upload: Upload) -> tuple[Sequence[int], Upload]:
        """Return all places, and the uploads with their weights capped; others stay as they are, bit by bit."""
        scale = self.scale(context.clients, upload.weight.double().tolist())
        return range(len(context.clients)), capped(upload, context.upload_spec, scale)

    def scale(self, clients: Sequence[int], weights: Sequence[float]) -> list[float]:
        """Return what the weight of each of these clients is multiplied by: 1 where it is not too large."""
        limits = caps(weights, self.factor, [self.declared.get(client) for client in clients])
        scale = [limit / weight if weight > limit else 1.0 for weight, limit in zip(weights, limits, strict=True)]
        over = [client for client, each in zip(clients, scale, strict=True) if each < 1]
        if over:
            self._row["capped"] = sorted({*self._row.get("capped", ()), *over})
        self._tell(clients, [weight * each for weight, each in zip(weights, scale, strict=True)])
        return scale

    def _tell(self, clients: Sequence[int], weights: Sequence[float]) -> None:
        total = sum(weights)
        if len(weights) < 2 or not total > 0:
            return
        heaviest = max(range(len(weights)), key=weights.__getitem__)
        share = weights[heaviest] / total
        if share > OWNER or "capped" in self._row:
            self._row["largest_share"] = round(max(share, self._row.get("largest_share", 0.0)), 4)
        if share > OWNER and clients[heaviest] not in self._warned:
            self._warned.add(clients[heaviest])
            self.warn(clients[heaviest], share)

    def row(self) -> dict[str, Any]:
        row, self._row = self._row, {}
        return row


def capped(upload: Upload, upload_spec: UploadSpec, scale: Sequence[float]) -> Upload:
    """Return uploads (k, ...) with their weights, and what was multiplied by them, scaled; 1 changes no bit."""
    if all(each == 1 for each in scale):
        return upload
    sums = {name: scaled(upload.aux[name], scale) for name in upload_spec.names(reduce="sum")}
    return Upload(upload.update, scaled(upload.weight, scale), {**upload.aux, **sums})


def caps(weights: Sequence[float], factor: float, declared: Sequence[float | None] = ()) -> list[float]:
    """Return the most that each may weigh: what is declared of it, else `factor` times the lower median above 0."""
    positive = [weight for weight in weights if weight > 0]
    limit = factor * statistics.median_low(positive) if factor and positive else float("inf")
    return [limit if each is None else float(each) for each in declared or [None] * len(weights)]


def scaled(part: Tree | Tensor, scale: Sequence[float]) -> Any:
    """Return leaves (k, ...) with each client's slice multiplied by its number; a factor of 1 changes no bit."""

    def one(leaf: Tensor) -> Tensor:
        if not leaf.is_floating_point():
            return leaf
        factor = torch.tensor(scale, dtype=torch.float64, device=leaf.device).reshape(-1, *[1] * (leaf.dim() - 1))
        return torch.where(factor < 1, (leaf.double() * factor).to(leaf.dtype), leaf)

    return one(part) if isinstance(part, Tensor) else tree.map(one, part)
