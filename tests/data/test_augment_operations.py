"""RandAugment's operations against Pillow: every pixel, level and direction, in the pools of three released codes."""

import itertools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pillow_reference as reference
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps
from pyarrow import parquet

from halfmoon.core.errors import UserError
from halfmoon.data.readers.decode import decode_image
from halfmoon.data.views.operations import apply_operations
from halfmoon.data.views.pools import (
    CUTOUT,
    EQUALIZE,
    FEDDURE_POOL,
    IDENTITY,
    OPERATION_NAMES,
    SEMIFL_POOL,
    OperationPool,
    fedloke_pool,
)
from halfmoon.data.views.tables import blend

LEVELS = FEDDURE_POOL.levels
SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"
SEMIFL_NAMES = (
    *("AutoContrast", "Brightness", "Color", "Contrast", "Cutout", "Equalize", "Invert", "Posterize", "Rotate"),
    *("Sharpness", "ShearX", "ShearY", "Solarize", "TranslateX", "TranslateY"),
)


def pillow(
    images: torch.Tensor,
    operation: Callable[..., Image.Image],
    rows: Iterable[dict[str, Any]] = itertools.repeat({}),
    **values: Any,
) -> np.ndarray:
    """Return what an operation of the reference makes of each image; `rows` has values for each of them."""
    pairs = zip(images.numpy(), rows, strict=False)
    return np.stack([reference.to_array(operation(reference.to_image(x), **values, **row)) for x, row in pairs])


def apply_operation(
    images: torch.Tensor,
    name: str,
    level: int = 0,
    negative: bool = False,
    pool: OperationPool = FEDDURE_POOL,
    corner: torch.Tensor | None = None,
) -> np.ndarray:
    rows = (len(images), 1)
    draws = torch.full(rows, OPERATION_NAMES.index(name)), torch.full(rows, level), torch.full(rows, negative)
    return apply_operations(images, *draws, pool, corner).numpy()


@pytest.mark.parametrize("name", FEDDURE_POOL.operations)
def test_every_level_and_direction_equals_pillow(name: str) -> None:
    for channels, size in itertools.product((1, 3), [(8, 8), (28, 28), (33, 20)]):
        images = reference.make_test_images(channels, size)
        before = images.clone()
        for level, negative in itertools.product(range(LEVELS), (False, True)):
            expected = pillow(images, reference.apply_feddure_operation, name=name, level=level, negative=negative)
            np.testing.assert_array_equal(apply_operation(images, name, level, negative), expected, f"{name} {level}")
            if name == "Color" and channels == 1:
                np.testing.assert_array_equal(expected, images)
        assert torch.equal(images, before)  # the caller's images are not written to


@pytest.mark.parametrize("name", SEMIFL_NAMES)
def test_semifl_operations_equal_pillow(name: str) -> None:
    """Cutout's corners are in the upper left quarter, at the border and in between; Invert is our Solarize.
    The last size is wider than the 100 pixels of a translation."""
    for channels, size in itertools.product((1, 3), [(8, 8), (32, 32), (33, 20), (110, 104)]):
        images = reference.make_test_images(channels, size)
        corners = torch.stack([torch.arange(15) * side // 16 for side in size], dim=1)
        corners[:5, 0], corners[3:8, 1] = 0, 0
        rows = [{"corner": corner} for corner in corners.tolist()]
        for negative in (False, True):
            done = apply_operation(
                images, "Solarize" if name == "Invert" else name, 0, negative, SEMIFL_POOL, corners[:, None]
            )
            expected = pillow(images, reference.apply_semifl_operation, rows, name=name, negative=negative)
            np.testing.assert_array_equal(done, expected)


@pytest.mark.parametrize("name", OPERATION_NAMES[:CUTOUT])
def test_fedloke_operations_equal_pillow(name: str) -> None:
    """9 is RandAugment's default; the others show that nothing is tied to it."""
    for magnitude, size, channels in itertools.product((0, 9, 17, 30), ((8, 8), (33, 20)), (1, 3)):
        images = reference.make_test_images(channels, size)
        for negative in (False, True):
            how = {"name": name, "negative": negative, "magnitude": magnitude}
            expected = pillow(images, reference.apply_fedloke_operation, **how)
            np.testing.assert_array_equal(apply_operation(images, name, 0, negative, fedloke_pool(magnitude)), expected)


def test_autocontrast_equals_pillow_for_every_spread_of_values() -> None:
    """All pairs with 0 or 255, so every spread, and a quarter of the others; an image has what is between."""
    low, high = np.triu_indices(256)
    some = (low == 0) | (high == 255) | (np.random.default_rng(0).random(len(low)) < 0.25)
    low = low[some][:, None]
    high = high[some][:, None]
    images = np.clip(np.arange(256), low, high).astype(np.uint8).reshape(-1, 1, 16, 16)
    done = apply_operation(torch.from_numpy(images), "AutoContrast", 5)
    # Three pairs share an RGB image, to save calls; more fill the last one.
    strips = np.concatenate([images, images[: -len(images) % 3]])
    expected = [
        np.asarray(ImageOps.autocontrast(Image.merge("RGB", [Image.fromarray(band[0]) for band in three])))
        for three in strips.reshape(-1, 3, 1, 16, 16)
    ]
    stacked = np.stack(expected).transpose(0, 3, 1, 2).reshape(-1, 1, 16, 16)[: len(images)]
    np.testing.assert_array_equal(done, stacked)


FACTORS = sorted({*FEDDURE_POOL.factor, *SEMIFL_POOL.factor, *fedloke_pool(9).factor, *fedloke_pool(9).opposite})


@pytest.mark.parametrize("factor", FACTORS)
def test_every_blend_of_two_values_equals_pillow(factor: float) -> None:
    """All 256 x 256 pairs: the rounding of Brightness, Contrast, Color and Sharpness is this one.
    Beyond the image it is clipped. By hand: 100 + 1.9 (200 - 100) = 290 is 255, and 200 + 1.9 (100 - 200) = 10."""
    first, second = np.meshgrid(np.arange(256, dtype=np.uint8), np.arange(256, dtype=np.uint8))
    expected = np.asarray(Image.blend(Image.fromarray(first), Image.fromarray(second), factor))
    weight = torch.tensor(factor, dtype=torch.float32)
    done = blend(torch.from_numpy(first), torch.from_numpy(second), weight)
    np.testing.assert_array_equal(done, expected)
    if factor == 1.9:
        assert (int(done[200, 100]), int(done[100, 200])) == (255, 10)


def check_mixture(images: torch.Tensor, generator: torch.Generator) -> None:
    """Assert that rows with operations of their own, two in a row, are Pillow's."""
    slots = (len(images), 2)
    operation = torch.randint(CUTOUT, slots, generator=generator)
    level = torch.randint(LEVELS, slots, generator=generator)
    negative = torch.rand(slots, generator=generator) < 0.5
    done = apply_operations(images, operation, level, negative).numpy()
    for row in range(len(images)):
        image = reference.to_image(images[row].numpy())
        for slot in range(2):
            name = OPERATION_NAMES[int(operation[row, slot])]
            image = reference.apply_feddure_operation(image, name, int(level[row, slot]), bool(negative[row, slot]))
        np.testing.assert_array_equal(done[row], reference.to_array(image))


@settings(deadline=None)
@given(
    seed=st.integers(0, 2**31 - 1),
    height=st.integers(3, 40),
    width=st.integers(3, 40),
    channels=st.sampled_from([1, 3]),
    spread=st.sampled_from([1, 2, 16, 256]),
)
def test_any_mixture_of_operations_equals_pillow(
    seed: int, height: int, width: int, channels: int, spread: int
) -> None:
    """Rows with different operations in one batch, on images of any size and any range of values."""
    generator = torch.Generator().manual_seed(seed)
    low = int(torch.randint(0, 257 - spread, (), generator=generator))
    images = torch.randint(low, low + spread, (9, channels, height, width), generator=generator).to(torch.uint8)
    check_mixture(images, generator)


def test_operations_on_real_images_equal_pillow() -> None:
    """500 CIFAR-10 images, each with its two operations."""
    files = sorted((SHARED / "cifar10").rglob("*test*.parquet"))
    if not files:
        pytest.skip("no CIFAR-10 in ../shared/data")
    cells = next(parquet.ParquetFile(files[0]).iter_batches(batch_size=500, columns=["image"])).to_pylist()
    arrays = [decode_image(cell["image"]["bytes"], "cifar10") for cell in cells]
    check_mixture(torch.from_numpy(np.stack(arrays)).permute(0, 3, 1, 2).contiguous(), torch.Generator().manual_seed(0))


def test_equalize_by_hand() -> None:
    """A 16x16 image with 64 pixels each of 10, 20, 30, 40. Of 256 pixels 64 have the brightest value: step = (256 - 64)
    // 255 = 0, so Pillow leaves the image. With 32x32 and 256 pixels each, step = 768 // 255 = 3: 10 becomes (1 + 0) //
    3 = 0, 20 becomes 257 // 3 = 85, 30 becomes 513 // 3 = 171 and 40 becomes 769 // 3 = 256, cut to 255."""
    values = torch.tensor([10, 20, 30, 40], dtype=torch.uint8)
    small, large = (values.repeat_interleave(side * side // 4).view(1, 1, side, side) for side in (16, 32))
    one = torch.ones((1, 1), dtype=torch.long)
    draws = one * EQUALIZE, one, one == 1
    assert torch.equal(apply_operations(small, *draws), small)
    assert apply_operations(large, *draws).flatten()[::256].tolist() == [0, 85, 171, 255]


def test_no_operation_leaves_every_row() -> None:
    images = reference.make_test_images(3, (8, 8))
    level = torch.ones((len(images), 2), dtype=torch.long)
    none = torch.zeros((len(images), 0), dtype=torch.long)
    assert torch.equal(apply_operations(images, level * IDENTITY, level, level == 1), images)
    assert torch.equal(apply_operations(images, none, none, none == 1), images)


def test_bilinear_shear_by_hand() -> None:
    """Two rows 0, 102, 204 under ShearX 0.3 and -0.3; results are cut off, not rounded.
    In the upper row the source of the centre x + 0.5 is x + 0.5 + 0.3 * 0.5 = x + 0.65, 0.15 beyond the centre of
    pixel x: 0.85 of x and 0.15 of its right neighbor give 15.3 and 117.3, and at the border the pixel itself, 204. The
    other way it is 0.15 before it: the border's 0, then 102 - 15.3 = 86.7 and 188.7. The lower row moves by 0.45 and
    stays inside too: 45.9, 147.9, 204, and 0, 56.1, 158.1."""
    images = torch.tensor([0, 102, 204], dtype=torch.uint8).expand(2, 1, 2, 3).contiguous()
    kind = torch.full((2, 1), OPERATION_NAMES.index("ShearX"))
    corner = torch.zeros((2, 1, 2), dtype=torch.long)
    done = apply_operations(images, kind, torch.zeros_like(kind), torch.tensor([[False], [True]]), SEMIFL_POOL, corner)
    assert done[0, 0].tolist() == [[15, 117, 204], [45, 147, 204]]
    assert done[1, 0].tolist() == [[0, 86, 188], [0, 56, 158]]


def test_the_pools_have_the_magnitudes_of_the_released_codes() -> None:
    """SemiFL's maxima, and torchvision's bin 9 of 31 by hand.
    Bin 9 of linspace(0, top, 31) is 0.3 top: shear 0.09, 150 / 331 * 0.3 = 0.13595 sides (4.35 of 32 pixels, cut to
    4), 9 degrees, blends 1 +- 0.27; Posterize 8 - round(9 / 7.5) = 7 bits; Solarize 255 - 76.5 = 178.5."""
    pool = fedloke_pool(9)
    assert pool.shear == pytest.approx((0.09,))
    assert pool.shift == pytest.approx((0.1359516,))
    assert (int(pool.shift[0] * 32), pool.bits, pool.pixels, pool.bilinear, pool.box) == (4, (7,), False, False, 0)
    assert (pool.degrees, pool.threshold) == ((9.0,), (178.5,))
    assert (*pool.factor, *pool.opposite) == pytest.approx((1.27, 0.73))
    assert set(pool.operations) == set(OPERATION_NAMES) - {"Cutout"}
    assert len(pool.operations) == 14
    assert (SEMIFL_POOL.degrees, SEMIFL_POOL.shear, SEMIFL_POOL.shift, SEMIFL_POOL.bits) == (
        (30.0,),
        (0.3,),
        (100.0,),
        (4,),
    )
    assert (SEMIFL_POOL.threshold, SEMIFL_POOL.factor, SEMIFL_POOL.opposite, SEMIFL_POOL.box) == (
        (0,),
        (1.9,),
        (1.9,),
        40,
    )
    assert sorted(SEMIFL_POOL.operations) == sorted(name if name != "Invert" else "Solarize" for name in SEMIFL_NAMES)


def test_cutout_without_corners_is_named() -> None:
    with pytest.raises(UserError, match="no corners"):
        apply_operation(torch.zeros(1, 1, 8, 8, dtype=torch.uint8), "Cutout", pool=SEMIFL_POOL)
