"""Fixed point: updates as whole numbers, whose sum modulo 2^64 is exact in any order, and hides under uniform masks.

A client's contribution is its weight times its update, and its weight, in units of 2^-24. The sum of all contributions
divided by the sum of the weights is what a weighted mean of the uploads would be, to rounding: of k clients whose
weights sum to W, it is off by at most k 2^-25 / W in any coordinate, before it is rounded to the type of the leaf.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from halfmoon.aggregation.base import AggregationContext, Aggregator, changed, update
from halfmoon.api.uploads import Upload
from halfmoon.core import tree
from halfmoon.core.errors import UserError

SCALE = 2.0**24
"""Units of 1."""

ROOM = 2.0**62
"""No sum of contributions reaches this: half of what a signed number of 64 bits has, so that a wrong sum shows."""


class TooLarge(UserError):
    """An update that has no place in a sum of whole numbers."""


def contribution(change: Mapping[str, Tensor], weight: float, clients: int) -> Tensor:
    """Return weight * change of every leaf, one behind the other, and the weight, in units of 2^-24: (n + 1,) int64.

    Raise `TooLarge` where a sum over `clients` such contributions might reach 2^62, or a value is not finite.
    """
    device = next(iter(change.values())).device
    one = torch.ones(1, dtype=torch.float64, device=device)
    values = torch.cat([*(leaf.double().reshape(-1) for leaf in change.values()), one])
    # The product of a number of 24 bits and a count of rows is exact in float64, and so is the shift: one rounding.
    scaled = (values * weight * SCALE).round()
    if not bool((scaled.abs() * clients < ROOM).all()):
        worst = float((values[:-1] * weight).abs().max())
        raise TooLarge(
            f"an update has values up to {worst:.3g} (times its weight), too large for a sum of {clients} in whole "
            "numbers; a smaller learning rate is the usual remedy."
        )
    return scaled.to(torch.int64)


def sound(total: Tensor) -> bool:
    """Say whether a sum (n + 1,) may be one of contributions: masks that were not taken off leave it anywhere."""
    return bool((total.double().abs() < ROOM).all()) and bool(total[-1] >= 0)


def mean(total: Tensor, like: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], float]:
    """Return the weighted mean of the updates whose contributions sum to `total`, and the sum of their weights.

    `like` has a leaf (...) for each path, in the order of the contributions. Where all weights are 0, so is the mean.
    """
    weight = float(total[-1].double() / SCALE)
    share = total[:-1].double() / total[-1].double() if weight else torch.zeros_like(total[:-1], dtype=torch.float64)
    parts = share.split([prod(leaf.shape) for leaf in like.values()])
    shaped = {
        path: part.reshape(leaf.shape).to(leaf.dtype) for (path, leaf), part in zip(like.items(), parts, strict=True)
    }
    return shaped, weight


def spread(upload: Upload, context: AggregationContext, change: Mapping[str, Tensor], weight: float) -> Upload:
    """Return the uploads (leaves (k, ...)) as if each client had changed what it was sent by `change`, leaves (...).

    All weigh the same: 1, or 0 where the sum of their weights is 0.
    """
    return changed(upload, context, dict(change))._replace(
        weight=torch.full_like(upload.weight, 1.0 if weight else 0.0)
    )


def check_upload(upload: Upload, changes: Mapping[str, Any]) -> None:
    """Raise `UserError` where an upload has more than an update and a weight: a sum would lose it."""
    more = [*upload.aux, *(path for path in tree.flatten(upload.update) if path not in changes)]
    if more:
        raise UserError(
            f"secure_aggregation cannot be used with this method: {more[0]!r} goes up beside the update, which a sum "
            "cannot carry."
        )


@dataclass
class Sums(Aggregator):
    """An aggregator that puts the mean of a sum in fixed point in the place of every upload, as masked sums give it.

    In a simulation nothing is masked, and the numbers are the same. With `even` every client weighs 1, whatever it has.
    With `means` the uploads are means of sums already: a real server gets nothing else.
    """

    even: bool
    means: bool = False
    summed: int = 0

    def uploads(self, context: AggregationContext, upload: Upload) -> tuple[Sequence[int], Upload]:
        """Return the places of the clients whose update fits into the sum, and the mean for each of them."""
        places = list(range(len(context.clients)))
        if not self.means:
            places, upload = self._summed(context, upload)
        self.summed = len(places)
        return places, upload

    def _summed(self, context: AggregationContext, upload: Upload) -> tuple[list[int], Upload]:
        changes = update(upload, context)
        check_upload(upload, changes)
        weights = [1.0] * len(context.clients) if self.even else upload.weight.double().tolist()
        total: Tensor | None = None
        places: list[int] = []
        for place, weight in enumerate(weights):
            try:
                mine = contribution({path: leaf[place] for path, leaf in changes.items()}, weight, context.cohort)
            except TooLarge:  # a site would refuse
                continue
            places.append(place)
            total = mine if total is None else total + mine
        if total is None:
            return [], upload
        change, weight = mean(total, {path: leaf[0] for path, leaf in changes.items()})
        if len(places) < len(weights):
            indices = torch.tensor(places, device=total.device)
            upload, context = upload.map(lambda leaf: leaf[indices]), context.only(places)
        return places, spread(upload, context, change, weight)

    def row(self) -> dict[str, Any]:
        return {"summed": self.summed}
