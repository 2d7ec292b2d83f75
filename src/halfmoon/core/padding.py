"""Rows that are padding: clients of unequal sizes are one batch, and only their real rows count.

A mask `real` (n,) is True where a row is no padding. Where it is None no row is, and nothing is computed but what would
be without masks.
"""

from __future__ import annotations

import torch
from torch import Tensor


def mean(values: Tensor, real: Tensor | None) -> Tensor:
    """Return the mean () of values (n,) over the real rows; NaN where there is none, as of no row."""
    return values.mean() if real is None else (values * real).sum() / real.sum()


def row_mean(values: Tensor, real: Tensor | None) -> Tensor:
    """Return the mean (m,) of values (n, m) over the real rows."""
    return values.mean(0) if real is None else share(real, values) @ values


def share(real: Tensor, like: Tensor) -> Tensor:
    """Return what each row (n,) counts in a mean over the real ones, in the type of `like`; 0 where none is real."""
    return real.to(like.dtype) / real.sum().clamp_min(1)


def joined(real: tuple[Tensor, ...]) -> Tensor | None:
    """Return the mask of groups of rows that are concatenated, None where no group has one."""
    return torch.cat(real) if real else None
