"""A vision transformer (Dosovitskiy et al., ICLR 2021) in the plain form of Beyer, Zhai and Kolesnikov (2022)."""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import jvp

from halfmoon.core import tree
from halfmoon.core.errors import UserError
from halfmoon.core.tree import Tree
from halfmoon.models.network import Network, affine, linear
from halfmoon.models.passes import ForwardPass, Norm

PATCH, HEADS = 4, 3
"""The side of a patch in pixels, and how often a block attends side by side."""


@dataclass(frozen=True)
class VisionTransformer(Network):
    """`depth` blocks, each of attention with three heads and of two linear layers, over patches of 4x4 pixels.

    ViT-Tiny by default: 5,350,090 parameters with 3 channels and 10 classes. Positions are fixed sines, and the head is
    given the mean over patches: nothing depends on the size of images, and there is no class token. Its layers
    normalize each patch by itself, so `norm` is "none" and nothing is tracked. Raises `UserError` for another `norm`,
    and for a width that heads and sines do not divide.
    """

    width: int = 192
    norm: Norm = "none"
    depth: int = 12
    fixed_norm: ClassVar[bool] = True
    sliceable: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.norm != "none":
            raise UserError(f"norm is {self.norm!r}, but a vision transformer normalizes each patch by itself.")
        if self.width % (4 * HEADS):
            raise UserError(f"width is {self.width}: that of a vision transformer is a multiple of {4 * HEADS}.")

    def init(self, generator: torch.Generator) -> Tree:
        w = self.width
        params: Tree = {"patch": linear(generator, self.channels * PATCH**2, w)}
        for name in self._blocks():
            params[f"{name}norm1"], params[f"{name}qkv"] = affine(w), linear(generator, w, 3 * w)
            params[f"{name}out"] = linear(generator, w, w)
            params[f"{name}norm2"], params[f"{name}up"] = affine(w), linear(generator, w, 4 * w)
            params[f"{name}down"] = linear(generator, 4 * w, w)
        params["norm"], params["head"] = affine(w), linear(generator, w, self.classes)
        return {"params": params, "stats": {}}

    def layers(self, x: Tensor, run: ForwardPass) -> Tensor:
        z = run.linear("patch", patches(x))
        z = z + positions(x.shape[-2] // PATCH, x.shape[-1] // PATCH, self.width, z)
        for name in self._blocks():
            z = z + run.linear(f"{name}out", attended(run.linear(f"{name}qkv", run.layer_norm(f"{name}norm1", z))))
            z = z + run.linear(f"{name}down", F.gelu(run.linear(f"{name}up", run.layer_norm(f"{name}norm2", z))))
        return run.linear("head", run.layer_norm("norm", z).mean(-2))

    def linearize(self, params: Tree, x: Tensor, real: Tensor | None = None) -> tuple[Tensor, list[Tensor]]:
        return self.train(params, x, real=real)[0], []

    def tangent(
        self, params: Tree, x: Tensor, tape: list[Tensor], direction: Tree, real: Tensor | None = None
    ) -> Tensor:
        params, direction = tree.contiguous(params), tree.contiguous(direction)
        return jvp(lambda p: self.train(p, x)[0], (params,), (direction,))[1]

    def count_products(self, shape: tuple[int, int, int]) -> int | None:
        tokens = (shape[1] // PATCH) * (shape[2] // PATCH)
        return (super().count_products(shape) or 0) + 2 * self.depth * tokens**2 * self.width

    def check(self, shape: tuple[int, int, int]) -> None:
        if shape[1] % PATCH or shape[2] % PATCH:
            raise UserError(
                f"The vision transformer cuts images into patches of {PATCH}x{PATCH} pixels, which do not tile "
                f"{shape[1]}x{shape[2]}; set image_size to multiples of {PATCH}, or use another network."
            )

    def _blocks(self) -> list[str]:
        return [f"block{number + 1}" for number in range(self.depth)]


def patches(x: Tensor) -> Tensor:
    cut = x.unflatten(-1, (-1, PATCH)).unflatten(-3, (-1, PATCH))  # B, C, rows, 4, columns, 4
    return cut.permute(0, 2, 4, 1, 3, 5).flatten(-3).flatten(-3, -2)


def positions(rows: int, columns: int, width: int, like: Tensor) -> Tensor:
    """Return the sines and cosines (rows * columns, width) of each place, a quarter of the width each."""
    speed = 10_000 ** -torch.linspace(0, 1, width // 4, dtype=like.dtype, device=like.device)
    broadcast = torch.arange(rows, device=like.device).repeat_interleave(columns)[:, None] * speed
    right = torch.arange(columns, device=like.device).repeat(rows)[:, None] * speed
    return torch.cat([right.sin(), right.cos(), broadcast.sin(), broadcast.cos()], -1)


def attended(qkv: Tensor) -> Tensor:
    """Return softmax(q k^T / sqrt(d)) v (B, N, width) of each head, of q, k and v in one tensor (B, N, 3 * width)."""
    q, k, v = qkv.unflatten(-1, (3, HEADS, -1)).movedim(-3, 0).transpose(-3, -2).unbind(0)
    share = (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1).to(v.dtype)
    return (share @ v).transpose(-3, -2).flatten(-2)
