"""What PyTorch's own types leave unknown, with types: numbers, arrays, norms, the normal distribution."""

from typing import Any, cast

import numpy as np
import torch
from torch import Tensor


def to_ints(values: Tensor) -> list[int]:
    return cast("list[int]", values.tolist())  # pyright: ignore[reportUnknownMemberType]


def to_floats(values: Tensor) -> list[float]:
    return cast("list[float]", values.tolist())  # pyright: ignore[reportUnknownMemberType]


def tensor_from_numpy(array: np.ndarray[Any, Any]) -> Tensor:
    return torch.from_numpy(array)  # pyright: ignore[reportUnknownMemberType]


def euclidean_norm(values: Tensor, dim: int | None = None) -> Tensor:
    return cast(Tensor, torch.linalg.vector_norm(values, dim=dim))  # pyright: ignore[reportUnknownMemberType]


def normal_cdf(values: Tensor) -> Tensor:
    return cast(Tensor, torch.special.ndtr(values))  # pyright: ignore[reportUnknownMemberType]


def normal_quantile(shares: Tensor) -> Tensor:
    return cast(Tensor, torch.special.ndtri(shares))  # pyright: ignore[reportUnknownMemberType]
