"""How a GPU computes: TensorFloat-32 or not, and algorithms whose results do not vary. Both are settings of PyTorch."""

import os
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from typing import Any, Literal, cast

import torch

Precision = Literal["float32", "float32-ieee", "tf32", "bf16"]
"""Precision of the products in convolutions and linear layers; parameters, statistics and all else are float32.

"float32" is PyTorch's default: on an NVIDIA GPU convolutions round their factors to TensorFloat-32 (10 bits of mantissa
instead of 23), matrix products do not. "float32-ieee" never does, "tf32" always. "bf16" rounds them to bfloat16.
"""

GPU_PRECISIONS: dict[Precision, Literal["ieee", "tf32"]] = {"float32-ieee": "ieee", "tf32": "tf32"}
"""Precisions that only change how a GPU computes, and PyTorch's name of the arithmetic."""

CUBLAS_WORKSPACE = ":4096:8"
"""The workspace (8 buffers of 4,096 KiB) with which NVIDIA documents that cuBLAS gives the same sums every time."""


@contextmanager
def gpu_arithmetic(precision: Precision, deterministic: bool) -> Generator[None]:
    """Set how this process computes on a GPU, and restore the settings at the end.

    Args:
        precision: "float32" and "bf16" leave PyTorch's settings as they are.
        deterministic: whether to use only algorithms that give the same bits every time. An operation that has none
            raises RuntimeError with its name.
    """
    with ExitStack() as restore:
        if precision in GPU_PRECISIONS:
            # By default they are not touched, as they belong to the program. PyTorch's stubs have no types for them.
            backends = cast(Any, torch.backends)
            for holder in (backends.cuda.matmul, backends.cudnn.conv):
                restore.callback(setattr, holder, "fp32_precision", holder.fp32_precision)
                holder.fp32_precision = GPU_PRECISIONS[precision]
        if deterministic:
            # Only then: the call imports PyTorch's compiler, a second and more of a short run.
            was_deterministic = torch.are_deterministic_algorithms_enabled()
            only_warned = torch.is_deterministic_algorithms_warn_only_enabled()
            restore.callback(torch.use_deterministic_algorithms, was_deterministic, warn_only=only_warned)
            # cuBLAS reads this variable when it multiplies for the first time in a process.
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", CUBLAS_WORKSPACE)
            torch.use_deterministic_algorithms(True)
        yield
