"""Functions of PyTorch whose types its stubs leave unknown, with types."""

from typing import Any, cast

import numpy as np
import torch
from torch import Tensor


def to_ints(values: Tensor) -> list[int]:
    """Convert a tensor (n,) into a list of integers."""
    return cast("list[int]", values.tolist())  # pyright: ignore[reportUnknownMemberType]


def to_floats(values: Tensor) -> list[float]:
    """Convert a tensor (n,) into a list of floats."""
    return cast("list[float]", values.tolist())  # pyright: ignore[reportUnknownMemberType]


def tensor_from_numpy(array: np.ndarray[Any, Any]) -> Tensor:
    """Make a tensor that shares the memory of an array."""
    return torch.from_numpy(array)  # pyright: ignore[reportUnknownMemberType]


def euclidean_norm(values: Tensor, dim: int | None = None) -> Tensor:
    """Compute the Euclidean norm along a dimension; of all values if it is None."""
    return cast(Tensor, torch.linalg.vector_norm(values, dim=dim))  # pyright: ignore[reportUnknownMemberType]


def normal_cdf(values: Tensor) -> Tensor:
    """Compute the distribution function of the standard normal distribution."""
    return cast(Tensor, torch.special.ndtr(values))  # pyright: ignore[reportUnknownMemberType]


def normal_quantile(shares: Tensor) -> Tensor:
    """Compute quantiles of the standard normal distribution, for shares from 0 to 1."""
    return cast(Tensor, torch.special.ndtri(shares))  # pyright: ignore[reportUnknownMemberType]
