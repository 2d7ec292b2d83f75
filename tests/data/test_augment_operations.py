"""RandAugment's operations against Pillow: every pixel, every level, both directions."""

import itertools
from pathlib import Path

import numpy as np
import pillow_reference as reference
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps

from halfmoon.data.views.operations import operate
from halfmoon.data.views.pools import EQUALIZE, FEDDURE, IDENTITY
from halfmoon.data.views.tables import blend

NAMES, LEVELS = FEDDURE.operations, FEDDURE.levels
SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"
SIZES = [(8, 8), (16, 16), (28, 28), (32, 32), (12, 20), (33, 32)]


def pillow(images: torch.Tensor, name: str, level: int, negative: bool) -> np.ndarray:
    done = [reference.operation(reference.to_image(array), name, level, negative) for array in images.numpy()]
    return np.stack([reference.to_array(image) for image in done])


def ours(images: torch.Tensor, name: str, level: int, negative: bool) -> np.ndarray:
    rows = (len(images), 1)
    draws = torch.full(rows, NAMES.index(name)), torch.full(rows, level), torch.full(rows, negative)
    return operate(images, *draws).numpy()


@pytest.mark.parametrize("name", NAMES)
def test_every_level_and_direction_equals_pillow(name: str) -> None:
    for channels, size in itertools.product((1, 3), SIZES):
        images = reference.specimens(channels, size)
        before = images.clone()
        if name == "Color" and channels == 1:  # Pillow's Color on mode L blends the image with itself
            assert all(np.array_equal(pillow(images, name, level, False), images) for level in range(LEVELS))
        for level in range(LEVELS):
            for negative in (False, True):
                np.testing.assert_array_equal(
                    ours(images, name, level, negative), pillow(images, name, level, negative), f"{name} {level}"
                )
        assert torch.equal(images, before)  # the caller's images are not written to


def test_autocontrast_equals_pillow_for_every_darkest_and_brightest_value() -> None:
    """All 32,896 pairs low <= high; each image holds every value between its two."""
    low, high = np.triu_indices(256)
    ramp = np.arange(256)
    images = np.clip(ramp, low[:, None], high[:, None]).astype(np.uint8).reshape(-1, 1, 16, 16)
    done = ours(torch.from_numpy(images), "AutoContrast", 5, False)
    # Three pairs share an RGB image, to save calls; two more fill the last one.
    strips = np.concatenate([images, images[:2]])
    expected = [
        np.asarray(ImageOps.autocontrast(Image.merge("RGB", [Image.fromarray(band[0]) for band in three])))
        for three in strips.reshape(-1, 3, 1, 16, 16)
    ]
    stacked = np.stack(expected).transpose(0, 3, 1, 2).reshape(-1, 1, 16, 16)[: len(images)]
    np.testing.assert_array_equal(done, stacked)


def test_every_blend_of_two_values_equals_pillow() -> None:
    """All 256 x 256 pairs at every level: the rounding of Brightness, Contrast, Color and Sharpness is this one."""
    first, second = np.meshgrid(np.arange(256, dtype=np.uint8), np.arange(256, dtype=np.uint8))
    for level in range(LEVELS):
        expected = np.asarray(Image.blend(Image.fromarray(first), Image.fromarray(second), FEDDURE.factor[level]))
        weight = torch.tensor(FEDDURE.factor[level], dtype=torch.float32)
        np.testing.assert_array_equal(blend(torch.from_numpy(first), torch.from_numpy(second), weight), expected)


@settings(max_examples=60, deadline=None)
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
    """Rows with different operations in one batch, two in a row, on images of any size and any range of values."""
    generator = torch.Generator().manual_seed(seed)
    low = int(torch.randint(0, 257 - spread, (), generator=generator))
    images = torch.randint(low, low + spread, (9, channels, height, width), generator=generator).to(torch.uint8)
    slots = (9, 2)
    operation = torch.randint(len(NAMES), slots, generator=generator)
    level = torch.randint(LEVELS, slots, generator=generator)
    negative = torch.rand(slots, generator=generator) < 0.5
    done = operate(images, operation, level, negative)
    for row in range(9):
        image = reference.to_image(images[row].numpy())
        for slot in range(2):
            name = NAMES[int(operation[row, slot])]
            image = reference.operation(image, name, int(level[row, slot]), bool(negative[row, slot]))
        np.testing.assert_array_equal(done[row].numpy(), reference.to_array(image))


def test_equalize_by_hand() -> None:
    """A 16x16 image with 64 pixels each of 10, 20, 30, 40. Of 256 pixels 64 have the brightest value: step = (256 - 64)
    // 255 = 0, so Pillow leaves the image. With 32x32 and 256 pixels each, step = 768 // 255 = 3: 10 becomes (1 + 0) //
    3 = 0, 20 becomes 257 // 3 = 85, 30 becomes 513 // 3 = 171 and 40 becomes 769 // 3 = 256, cut to 255."""
    values = torch.tensor([10, 20, 30, 40], dtype=torch.uint8)
    small, large = (values.repeat_interleave(side * side // 4).view(1, 1, side, side) for side in (16, 32))
    one = torch.ones((1, 1), dtype=torch.long)
    draws = one * EQUALIZE, one, one == 1
    assert torch.equal(operate(small, *draws), small)
    assert operate(large, *draws).flatten()[::256].tolist() == [0, 85, 171, 255]


def test_no_operation_leaves_every_row() -> None:
    images = reference.specimens(3, (8, 8))
    level, none = (torch.ones((len(images), 2), dtype=torch.long), torch.zeros((len(images), 0), dtype=torch.long))
    assert torch.equal(operate(images, level * IDENTITY, level, level == 1), images)
    assert torch.equal(operate(images, none, none, none == 1), images)


def test_operations_on_real_images_equal_pillow() -> None:
    """500 CIFAR-10 images, each with its own two operations."""
    files = sorted((SHARED / "cifar10").rglob("*test*.parquet"))
    if not files:
        pytest.skip("no CIFAR-10 in ../shared/data")
    import io

    from pyarrow import parquet

    cells = next(parquet.ParquetFile(files[0]).iter_batches(batch_size=500, columns=["image"])).to_pylist()
    arrays = [np.asarray(Image.open(io.BytesIO(cell["image"]["bytes"])).convert("RGB")) for cell in cells]
    images = torch.from_numpy(np.stack(arrays)).permute(0, 3, 1, 2).contiguous()
    generator = torch.Generator().manual_seed(0)
    slots = (len(images), 2)
    operation = torch.randint(len(NAMES), slots, generator=generator)
    level = torch.randint(1, 10, slots, generator=generator)
    negative = torch.rand(slots, generator=generator) < 0.5
    done = operate(images, operation, level, negative).numpy()
    for row in range(len(images)):
        image = reference.to_image(images[row].numpy())
        for slot in range(2):
            name = NAMES[int(operation[row, slot])]
            image = reference.operation(image, name, int(level[row, slot]), bool(negative[row, slot]))
        np.testing.assert_array_equal(done[row], reference.to_array(image))
