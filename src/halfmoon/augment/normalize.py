"""From pixels to the floats that a network reads."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from halfmoon.errors import UserError


@dataclass(frozen=True)
class Normalize:
    """Map uint8 pixels to (x / 255 - mean) / std, one mean and one std a channel, in `dtype`.

    A mean or std that is no plain number, or a std that is not positive, raises UserError.
    """

    mean: tuple[float, ...] = (0.5,)
    std: tuple[float, ...] = (0.5,)
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        if len(self.mean) != len(self.std):
            raise UserError(
                f"Normalize has {len(self.mean)} means and {len(self.std)} standard deviations: "
                "give one of each for every channel."
            )
        if not all(value > 0 for value in self.std):
            raise UserError(f"Normalize has the standard deviations {self.std}: all must be positive.")

    def __call__(self, images: Tensor) -> Tensor:
        """Return float images (n, C, H, W) from uint8 images (n, C, H, W) on the same device.

        Raises UserError when the images have another number of channels than `mean`.
        """
        channels = images.shape[1]
        if channels != len(self.mean):
            raise UserError(
                f"Normalize holds {len(self.mean)} channel(s), the images have {channels}: "
                "take the mean and std of this source."
            )
        # One multiply-add a pixel; its two constants are rounded once, from double precision.
        scale = [1 / (255 * std) for std in self.std]
        shift = [-mean / std for mean, std in zip(self.mean, self.std, strict=True)]
        constants = torch.tensor([scale, shift], dtype=self.dtype).to(images.device)
        scale_, shift_ = constants.view(2, channels, 1, 1)
        return images.to(self.dtype).mul_(scale_).add_(shift_)
