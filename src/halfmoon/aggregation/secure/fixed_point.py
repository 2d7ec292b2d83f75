"""Fixed-point updates: integers, whose sum modulo 2^64 is exact in any order and can be hidden by uniform masks.

A client contributes its update, multiplied by its weight, and the weight itself, all in units of 2^-24. The sum of all
contributions divided by the sum of the weights is the weighted mean of the uploads, up to rounding: for k clients whose
weights sum to W the error is at most k 2^-25 / W in each coordinate, before conversion to the leaf's dtype.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from halfmoon.aggregation.base import AggregationContext, Aggregator, compute_update, replace_update
from halfmoon.api.uploads import Upload
from halfmoon.core import tree
from halfmoon.core.errors import UserError

SCALE = 2.0**24
"""Fixed-point units of the number 1."""

SUM_LIMIT = 2.0**62
"""Upper bound of a sum's absolute value: half the range of int64, so that a wrong sum exceeds it with probability 1/2
in each coordinate."""


class TooLarge(UserError):
    """An update whose values are too large for a fixed-point sum, or not finite."""


def encode_contribution(change: Mapping[str, Tensor], weight: float, clients: int) -> Tensor:
    """Encode a client's weighted update in fixed point, as its term of a sum of integers (secure aggregation).

    Args:
        change: The update, one leaf for each path; n values altogether.
        weight: The client's weight.
        clients: The largest number of terms of the sum.

    Returns:
        All leaves times `weight`, concatenated, and then the weight, in units of 2^-24: int64 (n + 1,).

    Raises:
        TooLarge: If a sum of `clients` such terms might reach 2^62, or a value is not finite.
    """
    device = next(iter(change.values())).device
    one = torch.ones(1, dtype=torch.float64, device=device)
    values = torch.cat([*(leaf.double().reshape(-1) for leaf in change.values()), one])
    # float64 represents the product of a float32 value (24 bits) and an image count exactly, and scaling by a power of
    # two is exact too, so that `round` is the only rounding.
    scaled = (values * weight * SCALE).round()
    # Negated, so that NaN, which compares false with everything, is refused too.
    if not bool((scaled.abs() * clients < SUM_LIMIT).all()):
        largest = float((values[:-1] * weight).abs().max())
        raise TooLarge(
            f"an update has values up to {largest:.3g} (times its weight), too large for a sum of {clients} in whole "
            "numbers; a smaller learning rate is the usual remedy."
        )
    return scaled.to(torch.int64)


def is_plausible_sum(total: Tensor) -> bool:
    """Check that a sum (n + 1,) is within the range of valid sums; one with masks left on it is uniform and fails."""
    return bool((total.double().abs() < SUM_LIMIT).all()) and bool(total[-1] >= 0)


def decode_mean(scaled_sum: Tensor, templates: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], float]:
    """Decode the sum of encoded updates to their weighted mean.

    Args:
        scaled_sum: The sum of the clients' `encode_contribution`, in fixed-point units, int64 (n + 1,): n sums of
            weight times value, and last the sum of the weights.
        templates: A leaf with the shape and dtype of the result for each path, in the order of the contributions.

    Returns:
        The mean by path, and the sum of the weights. If all weights are 0, so is the mean.
    """
    scaled_weight = scaled_sum[-1].double()
    weight = float(scaled_weight / SCALE)
    weighted_values = scaled_sum[:-1].double()
    # Values and weight have the same unit, which cancels in the quotient.
    flat_mean = weighted_values / scaled_weight if weight else torch.zeros_like(weighted_values)
    sections = flat_mean.split([prod(leaf.shape) for leaf in templates.values()])
    shaped = {
        path: section.reshape(leaf.shape).to(leaf.dtype)
        for (path, leaf), section in zip(templates.items(), sections, strict=True)
    }
    return shaped, weight


def replace_by_mean(upload: Upload, context: AggregationContext, change: Mapping[str, Tensor], weight: float) -> Upload:
    """Replace the update of every client by the same mean update.

    Args:
        upload: The uploads, leaves (k, ...).
        context: The query, with the values that the clients downloaded.
        change: The mean update, leaves (...).
        weight: The sum of the clients' weights.

    Returns:
        Uploads with equal weights: 1, or 0 if `weight` is 0.
    """
    return replace_update(upload, context, dict(change))._replace(
        weight=torch.full_like(upload.weight, 1.0 if weight else 0.0)
    )


def check_summable(upload: Upload, changes: Mapping[str, Any]) -> None:
    """Check that an upload has no values except an update and a weight, because a sum would lose them.

    Args:
        upload: The upload.
        changes: The update by path, as `halfmoon.aggregation.base.compute_update` computes it.

    Raises:
        UserError: If the upload has other values.
    """
    extra = [*upload.aux, *(path for path in tree.flatten(upload.update) if path not in changes)]
    if extra:
        raise UserError(
            f"secure_aggregation cannot be used with this method: clients upload {extra[0]!r} in addition to their "
            "update, and a masked sum cannot contain it."
        )


@dataclass
class FixedPointMean(Aggregator):
    """An aggregator that replaces every upload by the fixed-point mean, with the same numbers as a masked sum.

    A simulation computes the mean without masks, which cancel anyway.

    Attributes:
        even: True if every client has weight 1, regardless of its number of images.
        means: True if the uploads are means of masked sums already, as on a real server, which receives nothing else.
        summed: The number of clients in the last sum.
    """

    even: bool
    means: bool = False
    summed: int = 0

    def process_uploads(self, context: AggregationContext, upload: Upload) -> tuple[Sequence[int], Upload]:
        """Return the indices of the clients whose update fits into the sum, and the mean for each of them."""
        indices = list(range(len(context.clients)))
        if not self.means:
            indices, upload = self._sum_uploads(context, upload)
        self.summed = len(indices)
        return indices, upload

    def _sum_uploads(self, context: AggregationContext, upload: Upload) -> tuple[list[int], Upload]:
        """Compute the weighted mean in fixed point, and give it to each client whose update fits into the sum.

        It replaces the uploads because a method averages the uploads itself: the mean of k equal ones is the same mean,
        and no method needs to know that only a sum is available.

        Args:
            context: The query and the k clients that responded.
            upload: Their uploads, leaves (k, ...).

        Returns:
            The indices of the clients whose update is not too large, and the mean for each of them.

        Raises:
            UserError: If uploads have values other than an update and a weight.
        """
        changes = compute_update(upload, context)
        check_summable(upload, changes)
        # `self.even`: each client counts once, regardless of its number of images.
        weights = [1.0] * len(context.clients) if self.even else upload.weight.double().tolist()
        total: Tensor | None = None
        indices: list[int] = []
        for index, weight in enumerate(weights):
            client_change = {path: leaf[index] for path, leaf in changes.items()}
            try:
                term = encode_contribution(client_change, weight, clients=context.cohort)
            except TooLarge:  # a site of a federation refuses to upload it
                continue
            indices.append(index)
            total = term if total is None else total + term
        if total is None:
            return [], upload
        # The first client's leaves give shapes and dtypes.
        mean_change, weight_sum = decode_mean(total, templates={path: leaf[0] for path, leaf in changes.items()})
        if len(indices) < len(weights):
            index_tensor = torch.tensor(indices, device=total.device)
            upload = upload.map(lambda leaf: leaf[index_tensor])
            context = context.only(indices)
        return indices, replace_by_mean(upload, context, mean_change, weight=weight_sum)

    def row(self) -> dict[str, Any]:
        return {"summed": self.summed}
