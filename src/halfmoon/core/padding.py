"""Rows that are padding: clients of unequal sizes are one batch, and only their real rows count.

A mask `real` (n,) is True where a row is no padding. Where it is None no row is, and nothing is computed but what would
be without masks.
"""

import torch
from torch import Tensor


def mean(values: Tensor, real: Tensor | None) -> Tensor:
    """Return the mean () of values (n, ...) over the real rows; NaN where there is none, as of no row."""
    if real is None:
        return values.mean()
    each = values.flatten(1).mean(1) if values.dim() > 1 else values
    return (each * real).sum() / real.sum()


def mean_or_zero(values: Tensor, real: Tensor | None) -> Tensor:
    """Return the mean () of values (n,) over the real rows, 0 where there is none."""
    if real is None:
        return values.mean() if len(values) else values.sum()
    return row_weights(real, values) @ values


def mask(values: Tensor, real: Tensor | None) -> Tensor:
    """Return values (n,) with 0 in the rows that are padding."""
    return values if real is None else values * real


def count(rows: Tensor, real: Tensor | None) -> Tensor | int:
    """Return how many of `rows` (n, ...) are real; a number where all are."""
    return len(rows) if real is None else real.sum()


def row_mean(values: Tensor, real: Tensor | None) -> Tensor:
    """Return the mean (m,) of values (n, m) over the real rows."""
    return values.mean(0) if real is None else row_weights(real, values) @ values


def row_weights(real: Tensor, like: Tensor) -> Tensor:
    """Return what each row (n,) counts in a mean over the real ones, in the type of `like`; 0 where none is real."""
    return real.to(like.dtype) / real.sum().clamp_min(1)


def concat(real: tuple[Tensor, ...]) -> Tensor | None:
    """Return the mask of groups of rows that are concatenated, None where no group has one."""
    return torch.cat(real) if real else None
