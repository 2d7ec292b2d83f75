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

PATCH = 4
"""The side of a patch in pixels."""

HEADS = 3
"""Attention heads of a block."""

LONGEST_PERIOD = 10_000
"""The longest period of the position embedding, in patches, divided by 2 pi."""


@dataclass(frozen=True)
class VisionTransformer(Network):
    """`depth` blocks, each of attention with three heads and of two linear layers, over patches of 4x4 pixels.

    ViT-Tiny by default: 5,350,090 parameters with 3 channels and 10 classes. Positions are fixed sines, and the head is
    given the mean over patches: parameters do not depend on the size of images, and there is no class token. Its layers
    normalize each patch separately, so `norm` is "none" and there are no running statistics.

    Raises:
        UserError: `norm` is not "none", or heads and sines do not divide the width.
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
        """Draw the initial weights of a vision transformer like PyTorch's linear layers.

        Args:
            generator: draws the weights layer by layer, in the order of the forward pass.

        Returns:
            "params", and "stats" {}, as there is no batch normalization.
        """
        width = self.width
        params: Tree = {"patch": linear(generator, self.channels * PATCH**2, width)}
        for name in self._blocks():
            params[f"{name}norm1"] = affine(width)
            params[f"{name}qkv"] = linear(generator, width, 3 * width)
            params[f"{name}out"] = linear(generator, width, width)
            params[f"{name}norm2"] = affine(width)
            params[f"{name}up"] = linear(generator, width, 4 * width)
            params[f"{name}down"] = linear(generator, 4 * width, width)
        params["norm"] = affine(width)
        params["head"] = linear(generator, width, self.classes)
        return {"params": params, "stats": {}}

    def layers(self, x: Tensor, run: ForwardPass) -> Tensor:
        """Apply the layers of a vision transformer to images x (B, C, H, W); `run` computes those with parameters.

        Returns:
            Logits (B, classes).
        """
        z = run.linear("patch", patches(x))
        z = z + positions(x.shape[-2] // PATCH, x.shape[-1] // PATCH, self.width, z)
        for name in self._blocks():
            # Pre-norm: each residual branch normalizes its input.
            qkv = run.linear(f"{name}qkv", run.layer_norm(f"{name}norm1", z))
            z = z + run.linear(f"{name}out", multi_head_attention(qkv))
            hidden = F.gelu(run.linear(f"{name}up", run.layer_norm(f"{name}norm2", z)))
            z = z + run.linear(f"{name}down", hidden)
        return run.linear("head", run.layer_norm("norm", z).mean(-2))

    def linearize(self, params: Tree, x: Tensor, real: Tensor | None = None) -> tuple[Tensor, list[Tensor]]:
        return self.train(params, x, real=real)[0], []

    def tangent(
        self, params: Tree, x: Tensor, tape: list[Tensor], direction: Tree, real: Tensor | None = None
    ) -> Tensor:
        # A gradient may be an expanded tensor, whose elements share memory: forward mode needs separate ones.
        params = tree.contiguous(params)
        direction = tree.contiguous(direction)
        return jvp(lambda p: self.train(p, x)[0], (params,), (direction,))[1]

    def count_products(self, shape: tuple[int, int, int]) -> int | None:
        tokens = (shape[1] // PATCH) * (shape[2] // PATCH)
        # Attention has two products without parameters: q k^T, and its softmax times v.
        attention = 2 * self.depth * tokens**2 * self.width
        return (super().count_products(shape) or 0) + attention

    def check(self, shape: tuple[int, int, int]) -> None:
        if shape[1] % PATCH or shape[2] % PATCH:
            raise UserError(
                f"The vision transformer cuts images into patches of {PATCH}x{PATCH} pixels, which do not tile "
                f"{shape[1]}x{shape[2]}; set image_size to multiples of {PATCH}, or use another network."
            )

    def _blocks(self) -> list[str]:
        return [f"block{number + 1}" for number in range(self.depth)]


def patches(x: Tensor) -> Tensor:
    """Cut images (B, C, H, W) into patches of 4x4 pixels: (B, N, C * 16), row by row."""
    grid = x.unflatten(-1, (-1, PATCH)).unflatten(-3, (-1, PATCH))  # B, C, rows, 4, columns, 4
    return grid.permute(0, 2, 4, 1, 3, 5).flatten(-3).flatten(-3, -2)


def positions(rows: int, columns: int, width: int, like: Tensor) -> Tensor:
    """Compute the sine-cosine position embedding of a grid of patches, by which attention knows where a patch is.

    Args:
        rows: rows of the grid.
        columns: columns of the grid.
        width: length of an embedding; sines and cosines of column and row have a quarter of it each.
        like: a tensor that gives the dtype and device.

    Returns:
        (rows * columns, width), row by row.
    """
    frequencies = LONGEST_PERIOD ** -torch.linspace(0, 1, width // 4, dtype=like.dtype, device=like.device)
    row_angles = torch.arange(rows, device=like.device).repeat_interleave(columns)[:, None] * frequencies
    column_angles = torch.arange(columns, device=like.device).repeat(rows)[:, None] * frequencies
    return torch.cat([column_angles.sin(), column_angles.cos(), row_angles.sin(), row_angles.cos()], -1)


def multi_head_attention(qkv: Tensor) -> Tensor:
    """Compute softmax(q k^T / sqrt(d)) v for each of `HEADS` heads of width d.

    Args:
        qkv: queries, keys and values in one tensor, (B, N, 3 * width).

    Returns:
        (B, N, width), the heads one after another.
    """
    # The width is 3 x HEADS x d; every head needs its queries, keys and values as (B, HEADS, N, d).
    separated = qkv.unflatten(-1, (3, HEADS, -1))  # (B, N, 3, HEADS, d)
    q, k, v = separated.permute(2, 0, 3, 1, 4).unbind(0)
    # Written out, because forward-mode differentiation (`tangent`) does not support `scaled_dot_product_attention`.
    # Autocast computes the softmax in float32; `to` rounds it to the type of v for the second product.
    attention = (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1).to(v.dtype)
    return (attention @ v).transpose(-3, -2).flatten(-2)
