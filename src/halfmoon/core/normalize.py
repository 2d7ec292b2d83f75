"""Normalization of pixels by the mean and standard deviation of each channel."""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from halfmoon.core.errors import UserError


@dataclass(frozen=True)
class Normalize:
    """Map uint8 pixels to (x / 255 - mean) / std, with one mean and one std for each channel, in `dtype`.

    Raises:
        UserError: the numbers of means and stds differ, or a std is not positive.
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
        """Normalize uint8 images (n, C, H, W) to float images on the same device.

        Raises:
            UserError: images have another type, or another number of channels than `mean`.
        """
        if images.dtype is not torch.uint8:
            raise UserError(f"Normalize got images of {images.dtype}: give uint8 pixels, 0 to 255.")
        channels = images.shape[1]
        if channels != len(self.mean):
            raise UserError(
                f"Normalize has {len(self.mean)} channel(s), the images have {channels}: "
                "take the mean and std of this source."
            )
        scale, shift = _constants(self.mean, self.std, self.dtype, images.device)
        # In place on the converted copy: one tensor of the size of the images instead of three.
        return images.to(self.dtype).mul_(scale).add_(shift)


@lru_cache(maxsize=16)
def _constants(
    mean: tuple[float, ...], std: tuple[float, ...], dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Compute scale and shift (C, 1, 1), rounded once from doubles: one multiplication and one addition a pixel."""
    scale = torch.tensor([1 / (255 * spread) for spread in std], dtype=dtype, device=device)
    shift = torch.tensor([-centre / spread for centre, spread in zip(mean, std, strict=True)], dtype=dtype)
    # (C, 1, 1), to broadcast over height and width.
    return scale.view(-1, 1, 1), shift.to(device).view(-1, 1, 1)
