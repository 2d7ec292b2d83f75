"""Views (augmentations) of images: plain, labeled, weak and strong, as in the released code of FedDure and others.

A view has two steps. `draw` takes all random numbers of n images from one CPU generator, so that a loop over clients, a
batched cohort and a federation of sites get the same views. `apply` is deterministic, runs on the device of the images,
and processes every image independently: a slice of the images with the same slice of the draws gives the same slice of
the view. Large batches are faster per image.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from halfmoon.core.errors import UserError
from halfmoon.core.normalize import Normalize
from halfmoon.data.views.operations import apply_operations
from halfmoon.data.views.pools import FEDDURE_POOL, IDENTITY, OPERATION_NAMES, SEMIFL_POOL, OperationPool, fedloke_pool
from halfmoon.data.views.tables import box_masks, crop_maps, gather_pixels, paint_gray_boxes_

Draws = dict[str, Tensor]
Shape = tuple[int, int, int]


class View(Protocol):
    """An augmentation: it has hyper-parameters only; the random numbers are an argument."""

    def draw(self, n: int, shape: Shape, generator: torch.Generator) -> Draws:
        """Draw the random numbers for n images of shape (C, H, W): CPU tensors by name, every leaf (n, ...)."""
        ...

    def apply(self, images: Tensor, draws: Draws, normalize: Normalize) -> Tensor:
        """Compute the view (the augmented version) of images. It is deterministic: all random numbers are in `draws`.

        Args:
            images: uint8 (n, C, H, W).
            draws: The random numbers of each image, from `draw`; they may be on the CPU, where sorting by operation is
                fastest.
            normalize: Converts uint8 to normalized floats, as the network expects them; applied last.

        Returns:
            Floats (n, C, H, W) on the images' device.
        """
        ...


@dataclass(frozen=True)
class Plain:
    """The image without augmentation, normalized."""

    def draw(self, n: int, shape: Shape, generator: torch.Generator) -> Draws:
        return {}

    def apply(self, images: Tensor, draws: Draws, normalize: Normalize) -> Tensor:
        return normalize(images)


@dataclass(frozen=True)
class Labeled:
    """FedDure's labeled view: crop with black padding, mirror, normalize, then set one box to zero.

    Attributes:
        flip: True to mirror horizontally with probability 1/2.
        pad: The padding in pixels; None: an eighth of the shorter side.
        cutout: The side of the box in pixels; None: half of the shorter side; 0: no box. Its center is uniform, and it is
            clipped at the border.
    """

    flip: bool = True
    pad: int | None = None
    cutout: int | None = None

    def __post_init__(self) -> None:
        _check_cutout("Labeled", self.cutout)

    def draw(self, n: int, shape: Shape, generator: torch.Generator) -> Draws:
        """Draw the random numbers of n labeled views of images of shape (C, H, W).

        Returns:
            "flip" (n,): True to mirror the image; "top", "left" (n,): the corner of the crop in the padded image;
            "centre" (n, 2): row and column of the center of the box that is set to zero. All in pixels.

        Raises:
            UserError: If `pad` does not fit the shape.
        """
        draws = _draw_crop(n, shape, self.flip, self.pad, generator)
        draws["centre"] = torch.stack([torch.randint(side, (n,), generator=generator) for side in shape[1:]], dim=1)
        return draws

    def apply(self, images: Tensor, draws: Draws, normalize: Normalize) -> Tensor:
        """Mirror, crop and normalize images, uint8 (n, C, H, W), then set a box of each to zero (Cutout)."""
        draws = _move_draws(draws, images.device)
        floats = normalize(_crop(images, draws, self.pad, reflect=False))
        half = _cutout_side(self.cutout, images.shape) // 2  # an odd side loses a pixel, as in the released code
        if half == 0:
            return floats
        keep = box_masks(draws["centre"] - half, 2 * half, (images.shape[2], images.shape[3])) == 0
        return floats.mul_(keep)


@dataclass(frozen=True)
class Weak:
    """FedDure's weak view T_w: mirror with probability 1/2, crop with reflection padding, normalize.

    Attributes:
        flip: True to mirror horizontally; False for images such as digits, whose mirror image may be another class.
        pad: The padding in pixels; None: an eighth of the shorter side.
    """

    flip: bool = True
    pad: int | None = None

    def draw(self, n: int, shape: Shape, generator: torch.Generator) -> Draws:
        """Draw flip, top, left (n,); raise UserError for an invalid pad."""
        return _draw_crop(n, shape, self.flip, self.pad, generator)

    def apply(self, images: Tensor, draws: Draws, normalize: Normalize) -> Tensor:
        return normalize(_crop(images, _move_draws(draws, images.device), self.pad, reflect=True))


@dataclass(frozen=True)
class RandomOperations(ABC):
    """Base class of strong views: mirror and crop as in the weak view, apply random operations, normalize.

    On gray images Color is the identity. The uint8 pixels equal Pillow's.

    Attributes:
        flip: As in `Weak`.
        pad: As in `Weak`.
        operations: The number of operations per image.
    """

    flip: bool = True
    pad: int | None = None
    operations: int = 2

    def __post_init__(self) -> None:
        if self.operations < 0:
            raise UserError(f"{type(self).__name__}.operations is {self.operations}: choose 0 or more.")

    def draw(self, n: int, shape: Shape, generator: torch.Generator) -> Draws:
        """Draw the random numbers of n strong views of images of shape (C, H, W).

        Returns:
            "flip" (n,): True to mirror the image; "top", "left" (n,): the corner of the crop in the padded image; and
            the operations from `draw_operations`.

        Raises:
            UserError: If the pad is invalid, or images are neither gray (1 channel) nor RGB (3).
        """
        if shape[0] not in (1, 3):
            raise UserError(
                f"{type(self).__name__} got images of {shape[0]} channels: give gray (1) or RGB (3) images."
            )
        crop = _draw_crop(n, shape, self.flip, self.pad, generator)
        return crop | self.draw_operations((n, self.operations), shape, generator)

    @abstractmethod
    def draw_operations(self, slots: tuple[int, int], shape: Shape, generator: torch.Generator) -> Draws:
        """Draw the operations of a RandAugment variant, and their parameters, for n images.

        Args:
            slots: (n, operations per image), the shape of the draws.
            shape: (C, H, W) of an image.
            generator: The generator.

        Returns:
            A dictionary with "operation", numbers in `pools.OPERATION_NAMES`, of shape `slots`, Identity for one that
            is skipped; "negative", True for the other direction of geometric operations (left instead of right) and
            blends (such as darker instead of brighter), of shape `slots`; and further draws of the view, such as the
            corners of gray boxes, each with the first axis n.
        """

    @abstractmethod
    def transform_pixels(self, views: Tensor, draws: Draws) -> Tensor:
        """Apply the operations to mirrored and cropped images, uint8 (n, C, H, W)."""

    def apply(self, images: Tensor, draws: Draws, normalize: Normalize) -> Tensor:
        return normalize(self.pixels(images, draws))

    def pixels(self, images: Tensor, draws: Draws) -> Tensor:
        """Compute the view before normalization, uint8 (n, C, H, W)."""
        return self.transform_pixels(_crop(images, _move_draws(draws, images.device), self.pad, reflect=True), draws)


@dataclass(frozen=True)
class Strong(RandomOperations):
    """FedDure's strong view T_s: RandAugmentMC of the released code, followed by a gray box.

    Each operation is one of 14, drawn with replacement and skipped with probability 1/2.

    Attributes:
        magnitude: Levels are uniform integers from 1 to `magnitude` - 1, in tenths of the largest magnitude; 2 to 11.
        cutout: The side of the box of gray 127, minus 1, in pixels; None: half of the shorter side; 0: no box.
    """

    magnitude: int = 10
    cutout: int | None = None

    def __post_init__(self) -> None:
        if not 2 <= self.magnitude <= FEDDURE_POOL.levels:
            raise UserError(f"Strong.magnitude is {self.magnitude}: choose 2 to {FEDDURE_POOL.levels}.")
        super().__post_init__()
        _check_cutout("Strong", self.cutout)

    def draw_operations(self, slots: tuple[int, int], shape: Shape, generator: torch.Generator) -> Draws:
        """Draw FedDure's RandAugment operations and one gray box for each of n images.

        Args:
            slots: (n, operations per image).
            shape: (C, H, W) of an image.
            generator: The generator.

        Returns:
            "operation", "level", "negative", all (n, operations): the number of each operation, its magnitude level,
            and True for its opposite direction; "corner" (n, 2): first row and column of the gray box.
        """
        operation = _draw_operation_numbers(FEDDURE_POOL, slots, generator)
        operation = _replace_half_by_identity(operation, generator)
        # As in the released code, the levels end at magnitude - 1.
        level = torch.randint(low=1, high=self.magnitude, size=slots, generator=generator)
        negative = torch.rand(slots, generator=generator) < 0.5
        n = slots[0]
        box_side = _cutout_side(self.cutout, (n, *shape))
        corner = _draw_corner((n,), shape, box_side, generator)
        return {"operation": operation, "level": level, "negative": negative, "corner": corner}

    def transform_pixels(self, views: Tensor, draws: Draws) -> Tensor:
        views = apply_operations(views, draws["operation"], draws["level"], draws["negative"])
        side = _cutout_side(self.cutout, views.shape)
        return views if side == 0 else paint_gray_boxes_(views, draws["corner"].to(views.device), side + 1)


@dataclass(frozen=True)
class StrongSemiFL(RandomOperations):
    """The strong view of SemiFL and FedDB: RandAugment(n=2, m=10) of the released code.

    Each operation is one of 15, drawn with replacement, skipped with probability 1/2, and always at its maximum
    (`pools.SEMIFL_POOL`). Invert is implemented as Solarize, and no box follows. Because of translations by 100 pixels
    and a box of 41, 15.5 % of the views of 32x32 images contain no pixel of the image; 25 % have no operation. Use
    `flip=False` for SVHN.
    """

    def draw_operations(self, slots: tuple[int, int], shape: Shape, generator: torch.Generator) -> Draws:
        """Draw SemiFL's RandAugment operations for n images.

        There is no magnitude to draw, because SemiFL's pool has a single level. A corner is drawn for every operation,
        so that the random numbers do not depend on which operations are Cutout.

        Args:
            slots: (n, operations per image).
            shape: (C, H, W) of an image.
            generator: The generator.

        Returns:
            "operation", "negative" (n, operations): the number of each operation, and True for its opposite direction;
            "corner" (n, operations, 2): first row and column of the gray box of an operation Cutout.
        """
        operation = _draw_operation_numbers(SEMIFL_POOL, slots, generator)
        operation = _replace_half_by_identity(operation, generator)
        negative = torch.rand(slots, generator=generator) < 0.5
        corner = _draw_corner(slots, shape, SEMIFL_POOL.box, generator)
        return {"operation": operation, "negative": negative, "corner": corner}

    def transform_pixels(self, views: Tensor, draws: Draws) -> Tensor:
        level = torch.zeros_like(draws["operation"])
        return apply_operations(views, draws["operation"], level, draws["negative"], SEMIFL_POOL, draws["corner"])


@dataclass(frozen=True)
class StrongFedLoKe(RandomOperations):
    """FedLoKe's strong view: torchvision's RandAugment() as the released code calls it.

    Each operation is one of 14, including the Identity, drawn with replacement, in a random direction if it has two;
    nearest pixels, black outside, no box (`pools.fedloke_pool`). The pixels equal torchvision's on Pillow images. The
    authors apply it to tensors, for which Color, Contrast, Sharpness and AutoContrast round differently: 0.4 to 18 % of
    the values of CIFAR-10 differ, all by one; the other ten operations are equal (torchvision 0.13.1). They also use the
    same draw for all images of a batch: wrap the view in `Shared` for this.

    Attributes:
        magnitude: 0 to 30.
    """

    magnitude: int = 9

    def __post_init__(self) -> None:
        super().__post_init__()
        fedloke_pool(self.magnitude)

    def draw_operations(self, slots: tuple[int, int], shape: Shape, generator: torch.Generator) -> Draws:
        operation = _draw_operation_numbers(fedloke_pool(self.magnitude), slots, generator)
        return {"operation": operation, "negative": torch.rand(slots, generator=generator) < 0.5}

    def transform_pixels(self, views: Tensor, draws: Draws) -> Tensor:
        level = torch.zeros_like(draws["operation"])
        return apply_operations(views, draws["operation"], level, draws["negative"], fedloke_pool(self.magnitude))


@dataclass(frozen=True)
class Shared:
    """A view with one draw for all images of a step, as in FedLoKe's released code.

    The authors' transforms receive a batch as one tensor, so that all of its images have the same augmentation.

    Attributes:
        view: The view.
        rows: The number of consecutive images that have the same draw, at least 1.
    """

    view: View
    rows: int

    def __post_init__(self) -> None:
        if self.rows < 1:
            raise UserError(f"Shared.rows is {self.rows}: give the images of a step, at least 1.")

    def draw(self, n: int, shape: Shape, generator: torch.Generator) -> Draws:
        """Draw for ceil(n / rows) images and repeat each draw `rows` times: every leaf (n, ...)."""
        groups = math.ceil(n / self.rows)
        draws = self.view.draw(groups, shape, generator)
        return {name: leaf.repeat_interleave(self.rows, 0)[:n] for name, leaf in draws.items()}

    def apply(self, images: Tensor, draws: Draws, normalize: Normalize) -> Tensor:
        return self.view.apply(images, draws, normalize)


def _draw_operation_numbers(pool: OperationPool, slots: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Draw operations of a pool uniformly: numbers in `OPERATION_NAMES`, of shape `slots`."""
    numbers = torch.tensor([OPERATION_NAMES.index(name) for name in pool.operations])
    return numbers[torch.randint(len(numbers), slots, generator=generator)]


def _replace_half_by_identity(operation: Tensor, generator: torch.Generator) -> Tensor:
    """Replace each operation by Identity with probability 1/2, in place: RandAugment's chance to skip an operation."""
    return operation.masked_fill_(torch.rand(operation.shape, generator=generator) < 0.5, IDENTITY)


def _draw_corner(slots: tuple[int, ...], shape: Shape, side: int, generator: torch.Generator) -> Tensor:
    """Draw the first row and column of gray boxes, (*slots, 2), whose centers are uniform."""
    # The released codes clip the corner before they add the side, so that no box is cut at the top or left.
    centre = torch.rand((*slots, 2), generator=generator) * torch.tensor(shape[1:])
    return (centre - side / 2).clamp_min_(0).long()


def _draw_crop(n: int, shape: Shape, flip: bool, pad: int | None, generator: torch.Generator) -> Draws:
    """Draw random mirrored crops of n padded images.

    Args:
        n: The number of images.
        shape: (C, H, W) of an image.
        flip: False to mirror no image.
        pad: The padding of each side in pixels; None: an eighth of the shorter side.
        generator: The generator.

    Returns:
        "flip", bool (n,): True to mirror; "top", "left", int64 (n,): first row and column of the crop, 0 to 2 * pad.
    """
    pad = _pad_size(pad, (n, *shape))
    return {
        # Drawn even where it is not used, so that `flip` changes no other draw.
        "flip": (torch.rand(n, generator=generator) < 0.5) & flip,
        "top": torch.randint(2 * pad + 1, (n,), generator=generator),
        "left": torch.randint(2 * pad + 1, (n,), generator=generator),
    }


def _crop(images: Tensor, draws: Draws, pad: int | None, reflect: bool) -> Tensor:
    """Pad, crop and mirror images.

    Args:
        images: uint8 (n, C, H, W).
        draws: The result of `_draw_crop`, on the device of the images.
        pad: The padding of each side in pixels; None: an eighth of the shorter side.
        reflect: True to pad by reflection, False to pad with black.

    Returns:
        uint8 (n, C, H, W).
    """
    if images.dtype is not torch.uint8:
        raise UserError(f"a view got images of {images.dtype}: give uint8 pixels, 0 to 255.")
    size = (images.shape[2], images.shape[3])
    pixels = _pad_size(pad, images.shape)
    maps = crop_maps(draws["top"], draws["left"], draws["flip"], pixels, size, reflect)
    return gather_pixels(images, maps, inside=reflect)


def _move_draws(draws: Draws, device: torch.device) -> Draws:
    return {name: leaf.to(device) for name, leaf in draws.items()}


def _pad_size(pad: int | None, shape: tuple[int, ...]) -> int:
    """Compute the padding of images of shape (n, C, H, W) in pixels; a `pad` of None is an eighth of the shorter side.

    Raises:
        UserError: If `pad` is negative, or as large as the shorter side.
    """
    side = min(shape[2:])
    if pad is None:
        return side // 8
    if not 0 <= pad < side:
        raise UserError(f"a view's pad is {pad} on images of {shape[2]}x{shape[3]}: choose 0 to {side - 1}.")
    return pad


def _check_cutout(view: str, cutout: int | None) -> None:
    if cutout is not None and cutout < 0:
        raise UserError(f"{view}.cutout is {cutout}: choose the side of the box in pixels, or 0 for no box.")


def _cutout_side(cutout: int | None, shape: tuple[int, ...]) -> int:
    """Compute the side of the box on images of shape (n, C, H, W) in pixels; None: half of the shorter side."""
    return min(shape[2:]) // 2 if cutout is None else cutout
