"""Views of images: FedDure's plain, labeled, weak and strong, and other methods' strong ones, as released.

Drawing and applying are apart. `draw` takes all random numbers of n rows from one CPU generator, so that a loop,
a batched cohort and a real network see the same views; `apply` is deterministic, runs on the device of the images,
and treats every row alone: a slice of the rows with the same slice of the draws gives the same slice of the view.
A large batch costs less a row than a small one.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from halfmoon.core.errors import UserError
from halfmoon.data.views.operations import apply_operations
from halfmoon.data.views.pools import FEDDURE_POOL, IDENTITY, OPERATION_NAMES, SEMIFL_POOL, OperationPool, fedloke_pool
from halfmoon.data.views.tables import box_masks, crop_maps, gather_pixels, paint_gray_boxes_
from halfmoon.models.network import Normalize

Draws = dict[str, Tensor]
Shape = tuple[int, int, int]


class View(Protocol):
    """A recipe of views: hyper-parameters only, the random numbers are an argument."""

    def draw(self, n: int, shape: Shape, generator: torch.Generator) -> Draws:
        """Draw for n rows of images (C, H, W): a dict of CPU tensors, every leaf (n, ...)."""
        ...

    def apply(self, images: Tensor, draws: Draws, normalize: Normalize) -> Tensor:
        """Return the normalized view (n, C, H, W) of uint8 images (n, C, H, W), on their device.

        The draws may stay on the CPU, which is where sorting them is cheapest.
        """
        ...


@dataclass(frozen=True)
class Plain:
    """The image as it is, normalized: nothing is drawn."""

    def draw(self, n: int, shape: Shape, generator: torch.Generator) -> Draws:
        return {}

    def apply(self, images: Tensor, draws: Draws, normalize: Normalize) -> Tensor:
        return normalize(images)


@dataclass(frozen=True)
class Labeled:
    """Crop from black surroundings, mirror, normalize, then one box of zeros (FedDure's labeled view).

    `pad` is in pixels (None: an eighth of the shorter side), `cutout` the side of the box (None: half of it;
    0: no box). The box's centre is uniform, the box is clipped at the border. `flip=False` never mirrors.
    """

    flip: bool = True
    pad: int | None = None
    cutout: int | None = None

    def __post_init__(self) -> None:
        _check_cutout("Labeled", self.cutout)

    def draw(self, n: int, shape: Shape, generator: torch.Generator) -> Draws:
        """Draw flip, top, left (n,) and the box's centre (n, 2) in pixels; raises UserError for a bad pad."""
        draws = _draw_crop(n, shape, self.flip, self.pad, generator)
        draws["centre"] = torch.stack([torch.randint(side, (n,), generator=generator) for side in shape[1:]], dim=1)
        return draws

    def apply(self, images: Tensor, draws: Draws, normalize: Normalize) -> Tensor:
        draws = _move_draws(draws, images.device)
        floats = normalize(_crop(images, draws, self.pad, reflect=False))
        half = _cutout_side(self.cutout, images.shape) // 2  # an odd side loses a pixel, as in the released code
        if half == 0:
            return floats
        keep = box_masks(draws["centre"] - half, 2 * half, (images.shape[2], images.shape[3])) == 0
        return floats.mul_(keep)


@dataclass(frozen=True)
class Weak:
    """Mirror with probability one half, crop from the reflected image, normalize (FedDure's T_w).

    `pad` is in pixels (None: an eighth of the shorter side); `flip=False` never mirrors, for images such as
    digits whose mirror image is another class.
    """

    flip: bool = True
    pad: int | None = None

    def draw(self, n: int, shape: Shape, generator: torch.Generator) -> Draws:
        """Draw flip, top, left (n,); raises UserError for a bad pad."""
        return _draw_crop(n, shape, self.flip, self.pad, generator)

    def apply(self, images: Tensor, draws: Draws, normalize: Normalize) -> Tensor:
        return normalize(_crop(images, _move_draws(draws, images.device), self.pad, reflect=True))


@dataclass(frozen=True)
class RandomOperations(ABC):
    """The weak view's mirror and crop, `operations` random operations, normalize: what strong views have in common.

    On gray images Color is the identity. The uint8 pixels equal Pillow's. `flip=False` as in `Weak`.
    """

    flip: bool = True
    pad: int | None = None
    operations: int = 2

    def __post_init__(self) -> None:
        if self.operations < 0:
            raise UserError(f"{type(self).__name__}.operations is {self.operations}: choose 0 or more.")

    def draw(self, n: int, shape: Shape, generator: torch.Generator) -> Draws:
        """Draw flip, top, left (n,), and for each operation what `drawn_operations` does.

        `operation` numbers `pools.NAMES`, a skipped one is the Identity; `negative` takes the other direction of the
        geometric operations and of the blends; corners are those of gray boxes. Raises UserError for a bad pad and for
        images neither gray (1) nor RGB (3).
        """
        if shape[0] not in (1, 3):
            raise UserError(
                f"{type(self).__name__} got images of {shape[0]} channels: give gray (1) or RGB (3) images."
            )
        crop = _draw_crop(n, shape, self.flip, self.pad, generator)
        return crop | self.drawn_operations((n, self.operations), shape, generator)

    @abstractmethod
    def drawn_operations(self, slots: tuple[int, int], shape: Shape, generator: torch.Generator) -> Draws:
        """Draw operation and negative (n, operations), and what else the view needs of each row."""

    @abstractmethod
    def operated(self, views: Tensor, draws: Draws) -> Tensor:
        """Return mirrored and cropped images, uint8 (n, C, H, W), after their operations."""

    def apply(self, images: Tensor, draws: Draws, normalize: Normalize) -> Tensor:
        return normalize(self.pixels(images, draws))

    def pixels(self, images: Tensor, draws: Draws) -> Tensor:
        """Return the view before normalization, uint8 (n, C, H, W)."""
        return self.operated(_crop(images, _move_draws(draws, images.device), self.pad, reflect=True), draws)


@dataclass(frozen=True)
class Strong(RandomOperations):
    """FedDure's T_s, RandAugmentMC of the released code: after its operations always a gray box.

    Each operation is one of 14, drawn with replacement and skipped with probability one half, its level a uniform
    integer from 1 to `magnitude` - 1 (tenths of the largest). The box is of gray 127, `cutout` + 1 pixels a side (None:
    half the shorter side, plus 1; 0: no box). Raises UserError for a magnitude outside 2 to 11.
    """

    magnitude: int = 10
    cutout: int | None = None

    def __post_init__(self) -> None:
        if not 2 <= self.magnitude <= FEDDURE_POOL.levels:
            raise UserError(f"Strong.magnitude is {self.magnitude}: choose 2 to {FEDDURE_POOL.levels}.")
        super().__post_init__()
        _check_cutout("Strong", self.cutout)

    def drawn_operations(self, slots: tuple[int, int], shape: Shape, generator: torch.Generator) -> Draws:
        """Draw operation, level, negative (n, operations); corner (n, 2) of the box."""
        operation = _skip_half(_draw_operation(FEDDURE_POOL, slots, generator), generator)
        level = torch.randint(1, self.magnitude, slots, generator=generator)
        negative = torch.rand(slots, generator=generator) < 0.5
        corner = _draw_corner(slots[:1], shape, _cutout_side(self.cutout, (0, *shape)), generator)
        return {"operation": operation, "level": level, "negative": negative, "corner": corner}

    def operated(self, views: Tensor, draws: Draws) -> Tensor:
        views = apply_operations(views, draws["operation"], draws["level"], draws["negative"])
        side = _cutout_side(self.cutout, views.shape)
        return views if side == 0 else paint_gray_boxes_(views, draws["corner"].to(views.device), side + 1)


@dataclass(frozen=True)
class StrongSemiFL(RandomOperations):
    """SemiFL's strong view, and FedDB's too: RandAugment(n=2, m=10) of the released code.

    Each operation is one of 15, drawn with replacement, skipped with probability one half, and always at its maximum
    (`pools.SEMIFL`); Invert is Solarize, and no box comes afterwards. Translations by 100 pixels and a box of 41 leave
    15.5 % of the views of 32x32 images without anything of the image, and 25 % get no operation. `flip=False` for SVHN.
    """

    def drawn_operations(self, slots: tuple[int, int], shape: Shape, generator: torch.Generator) -> Draws:
        """Draw operation, negative (n, operations); corner (n, operations, 2) of Cutout's box."""
        operation = _skip_half(_draw_operation(SEMIFL_POOL, slots, generator), generator)
        negative = torch.rand(slots, generator=generator) < 0.5
        corner = _draw_corner(slots, shape, SEMIFL_POOL.box, generator)
        return {"operation": operation, "negative": negative, "corner": corner}

    def operated(self, views: Tensor, draws: Draws) -> Tensor:
        level = torch.zeros_like(draws["operation"])
        return apply_operations(views, draws["operation"], level, draws["negative"], SEMIFL_POOL, draws["corner"])


@dataclass(frozen=True)
class StrongFedLoKe(RandomOperations):
    """FedLoKe's strong view: torchvision's RandAugment() as the released code calls it.

    Each operation is one of 14, drawn with replacement, never skipped (the Identity is one of them), at `magnitude` of
    0 to 30, in a random direction where it has two; nearest pixels, black outside, no box (`pools.fedloke`). The pixels
    are torchvision's on Pillow images. The authors apply it to tensors, where Color, Contrast, Sharpness and
    AutoContrast round otherwise: 0.4 to 18 % of the values of CIFAR-10 differ by one, none by more; the other ten are
    equal (torchvision 0.13.1). They also share one draw among the images of a batch: wrap the view in `Shared`.
    """

    magnitude: int = 9

    def __post_init__(self) -> None:
        super().__post_init__()
        fedloke_pool(self.magnitude)

    def drawn_operations(self, slots: tuple[int, int], shape: Shape, generator: torch.Generator) -> Draws:
        operation = _draw_operation(fedloke_pool(self.magnitude), slots, generator)
        return {"operation": operation, "negative": torch.rand(slots, generator=generator) < 0.5}

    def operated(self, views: Tensor, draws: Draws) -> Tensor:
        level = torch.zeros_like(draws["operation"])
        return apply_operations(views, draws["operation"], level, draws["negative"], fedloke_pool(self.magnitude))


@dataclass(frozen=True)
class Shared:
    """Another view with one draw for every `rows` consecutive rows, the images of one step (FedLoKe's released code).

    The authors' transforms get a batch as one tensor, so all of its images are mirrored, cropped and changed alike.
    Raises UserError for fewer than one row.
    """

    view: View
    rows: int

    def __post_init__(self) -> None:
        if self.rows < 1:
            raise UserError(f"Shared.rows is {self.rows}: give the images of a step, at least 1.")

    def draw(self, n: int, shape: Shape, generator: torch.Generator) -> Draws:
        """Draw as the view does for ceil(n / rows) rows and repeat each draw: every leaf (n, ...).

        Raises what the view raises.
        """
        draws = self.view.draw(-(-n // self.rows), shape, generator)
        return {name: leaf.repeat_interleave(self.rows, 0)[:n] for name, leaf in draws.items()}

    def apply(self, images: Tensor, draws: Draws, normalize: Normalize) -> Tensor:
        return self.view.apply(images, draws, normalize)


def _draw_operation(pool: OperationPool, slots: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Draw operations of a pool, uniformly by name: numbers of `OPERATION_NAMES`, of shape `slots`."""
    numbers = torch.tensor([OPERATION_NAMES.index(name) for name in pool.operations])
    return numbers[torch.randint(len(numbers), slots, generator=generator)]


def _skip_half(operation: Tensor, generator: torch.Generator) -> Tensor:
    return operation.masked_fill_(torch.rand(operation.shape, generator=generator) < 0.5, IDENTITY)


def _draw_corner(slots: tuple[int, ...], shape: Shape, side: int, generator: torch.Generator) -> Tensor:
    """Draw where gray boxes begin, (*slots, 2): half a side before a uniform centre."""
    # The released codes clip the corner before they add the side: no box loses pixels at the top or left.
    centre = torch.rand((*slots, 2), generator=generator) * torch.tensor(shape[1:])
    return (centre - side / 2).clamp_min_(0).long()


def _draw_crop(n: int, shape: Shape, flip: bool, pad: int | None, generator: torch.Generator) -> Draws:
    pad = _pad_size(pad, (n, *shape))
    return {
        # Drawn even where it is not used, so that `flip` changes no other draw.
        "flip": (torch.rand(n, generator=generator) < 0.5) & flip,
        "top": torch.randint(2 * pad + 1, (n,), generator=generator),
        "left": torch.randint(2 * pad + 1, (n,), generator=generator),
    }


def _crop(images: Tensor, draws: Draws, pad: int | None, reflect: bool) -> Tensor:
    if images.dtype is not torch.uint8:
        raise UserError(f"a view got images of {images.dtype}: give uint8 pixels, 0 to 255.")
    size = (images.shape[2], images.shape[3])
    pixels = _pad_size(pad, images.shape)
    maps = crop_maps(draws["top"], draws["left"], draws["flip"], pixels, size, reflect)
    return gather_pixels(images, maps, inside=reflect)


def _move_draws(draws: Draws, device: torch.device) -> Draws:
    return {name: leaf.to(device) for name, leaf in draws.items()}


def _pad_size(pad: int | None, shape: tuple[int, ...]) -> int:
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
    return min(shape[2:]) // 2 if cutout is None else cutout
