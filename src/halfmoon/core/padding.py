"""Statistics of padded rows: clients of unequal sizes are padded to one batch, and only their real rows count.

A mask `real` (n,) bool is True for real rows. If it is None no row is padding, and the computation is that without masks.
"""

import torch
from torch import Tensor


def mean(values: Tensor, real: Tensor | None) -> Tensor:
    """Compute the mean () of values (n, ...) over the real rows; NaN if there is none."""
    if real is None:
        return values.mean()
    row_values = values.flatten(1).mean(1) if values.dim() > 1 else values
    return (row_values * real).sum() / real.sum()


def mean_or_zero(values: Tensor, real: Tensor | None) -> Tensor:
    """Compute the mean () of values (n,) over the real rows; 0 if there is none."""
    if real is None:
        return values.mean() if len(values) else values.sum()
    return row_weights(real, values) @ values


def mask(values: Tensor, real: Tensor | None) -> Tensor:
    """Set the values (n,) of padding rows to 0."""
    return values if real is None else values * real


def count(rows: Tensor, real: Tensor | None) -> Tensor | int:
    """Count the real rows of (n, ...): a tensor (), or an int if no row is padding."""
    return len(rows) if real is None else real.sum()


def row_mean(values: Tensor, real: Tensor | None) -> Tensor:
    """Compute the mean (m,) of values (n, m) over the real rows."""
    return values.mean(0) if real is None else row_weights(real, values) @ values


def row_weights(real: Tensor, values: Tensor) -> Tensor:
    """Compute the weight of each row (n,) in a mean over the real rows, with the dtype of `values`; 0 if none is real."""
    return real.to(values.dtype) / real.sum().clamp_min(1)


def concat(real: tuple[Tensor, ...]) -> Tensor | None:
    """Concatenate the masks of groups of rows; None if there is no mask."""
    return torch.cat(real) if real else None
