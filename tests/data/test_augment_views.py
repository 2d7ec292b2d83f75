"""Views: what is drawn, what is done with it, and that rows stand alone."""

import math
import re

import numpy as np
import pillow_reference as reference
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from halfmoon.core.errors import UserError
from halfmoon.core.normalize import Normalize
from halfmoon.data.views import Labeled, Plain, Shared, Strong, StrongFedLoKe, StrongSemiFL, View, Weak
from halfmoon.data.views.pools import CUTOUT, FEDDURE_POOL, IDENTITY, OPERATION_NAMES, SOLARIZE

MEAN = (0.4914, 0.4822, 0.4465)
STD = (0.2470, 0.2435, 0.2616)
EXACT = Normalize(MEAN, STD, torch.float64)
UNIT = Normalize((0.0,), (1.0,), torch.float64)
VIEWS = (
    *(Plain(), Labeled(), Weak(), Strong(), Strong(operations=3, magnitude=5, cutout=0, pad=1)),
    *(StrongSemiFL(), StrongFedLoKe(), Shared(StrongSemiFL(operations=3), 5)),
)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def noise(n: int, channels: int = 3, side: int = 32, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (n, channels, side, side), dtype=torch.uint8, generator=seeded(seed))


def normalized(pixels: np.ndarray) -> np.ndarray:
    mean, std = (np.array(value).reshape(-1, 1, 1) for value in (MEAN, STD))
    return (pixels / 255 - mean) / std


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_normalize_equals_numpy(dtype: torch.dtype) -> None:
    images = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).repeat(2, 3, 1, 1)
    floats = Normalize(MEAN, STD, dtype)(images)
    assert floats.dtype is dtype
    tolerance = 1e-6 if dtype is torch.float32 else 1e-14
    np.testing.assert_allclose(floats.numpy(), normalized(images.numpy()), atol=tolerance)


def test_plain_is_the_normalized_image() -> None:
    images = noise(3)
    assert Plain().draw(3, (3, 32, 32), seeded()) == {}
    np.testing.assert_allclose(Plain().apply(images, {}, EXACT), normalized(images.numpy()), atol=1e-14)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**31 - 1), side=st.sampled_from([8, 16, 28, 32]), channels=st.sampled_from([1, 3]))
def test_weak_mirrors_then_crops_the_reflection(seed: int, side: int, channels: int) -> None:
    images = noise(6, channels, side, seed)
    weak = Weak()
    drawn = weak.draw(6, (channels, side, side), seeded(seed))
    views = weak.apply(images, drawn, Normalize((0.0,) * channels, (1.0,) * channels, torch.float64))
    for view, image, row in zip(views, images, reference.split_draws(drawn), strict=True):
        expected = reference.crop(image.numpy(), row["flip"], row["top"], row["left"], side // 8)
        np.testing.assert_allclose(view.numpy() * 255, expected, atol=1e-9)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**31 - 1), side=st.sampled_from([8, 16, 28, 32]))
def test_labeled_crops_from_black_mirrors_and_cuts_after_normalization(seed: int, side: int) -> None:
    """Outside the image is black before normalization (-mean / std after it); in the box is 0 after it."""
    images = noise(6, 3, side, seed)
    labeled = Labeled()
    pad = side // 8
    half = side // 4
    drawn = labeled.draw(6, (3, side, side), seeded(seed))
    views = labeled.apply(images, drawn, EXACT)
    padded = np.pad(images.numpy(), ((0, 0), (0, 0), (pad, pad), (pad, pad)))
    for view, image, row in zip(views, padded, reference.split_draws(drawn), strict=True):
        crop = image[:, row["top"] : row["top"] + side, row["left"] : row["left"] + side]
        expected = normalized(crop[:, :, ::-1] if row["flip"] else crop)
        (top, left), zero = (max(0, centre - half) for centre in row["centre"]), 0.0
        bottom, right = (min(side, centre + half) for centre in row["centre"])
        expected[:, top:bottom, left:right] = zero
        np.testing.assert_allclose(view.numpy(), expected, atol=1e-12)


PIPELINES = (
    (Strong(), lambda image, row, side: reference.make_strong_view(image, row, side // 8, side // 2)),
    (StrongSemiFL(operations=3), lambda image, row, side: reference.make_semifl_view(image, row, side // 8)),
    (StrongFedLoKe(operations=3), lambda image, row, side: reference.make_fedloke_view(image, row, side // 8, 9)),
)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**31 - 1), side=st.sampled_from([8, 16, 28, 32]), channels=st.sampled_from([1, 3]))
def test_strong_views_equal_the_same_pipelines_in_pillow(seed: int, side: int, channels: int) -> None:
    images = noise(8, channels, side, seed)
    images[:4] = images[:4] // 5 + 40
    for view, pipeline in PIPELINES:
        drawn = view.draw(8, (channels, side, side), seeded(seed))
        pixels = view.pixels(images, drawn).numpy()
        for made, image, row in zip(pixels, images.numpy(), reference.split_draws(drawn), strict=True):
            np.testing.assert_array_equal(made, pipeline(image, row, side))


@pytest.mark.parametrize("view", [Strong(), StrongSemiFL(), StrongFedLoKe()], ids=repr)
def test_strong_views_normalize_their_pixels(view: Strong | StrongSemiFL | StrongFedLoKe) -> None:
    images = noise(4)
    drawn = view.draw(4, (3, 32, 32), seeded())
    expected = normalized(view.pixels(images, drawn).numpy())
    np.testing.assert_allclose(view.apply(images, drawn, EXACT).numpy(), expected, atol=1e-12)


@pytest.mark.parametrize("view", VIEWS, ids=repr)
@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 28, 28), (1, 8, 8)], ids=str)
def test_a_slice_of_the_rows_gives_the_slice_of_the_view(view: View, shape: tuple[int, int, int]) -> None:
    images = noise(23, shape[0], shape[1])
    normalize = Normalize((0.4,) * shape[0], (0.3,) * shape[0])
    before = images.clone()
    drawn = view.draw(23, shape, seeded(1))
    whole = view.apply(images, drawn, normalize)
    assert whole.shape == images.shape
    assert whole.dtype is torch.float32
    assert all(len(leaf) == 23 and leaf.device.type == "cpu" for leaf in drawn.values())
    for start, stop in ((0, 1), (3, 10), (10, 23), (5, 5)):
        chunk = {name: leaf[start:stop] for name, leaf in drawn.items()}
        assert torch.equal(view.apply(images[start:stop], chunk, normalize), whole[start:stop])
    scrambled = torch.randperm(23, generator=seeded(2))
    chunk = {name: leaf[scrambled] for name, leaf in drawn.items()}
    assert torch.equal(view.apply(images[scrambled], chunk, normalize), whole[scrambled])
    assert torch.equal(images, before)


def test_channels_last_images_give_the_same_view() -> None:
    images = noise(9)
    for view in VIEWS:
        drawn = view.draw(9, (3, 32, 32), seeded())
        other = images.contiguous(memory_format=torch.channels_last)
        assert torch.equal(view.apply(images, drawn, EXACT), view.apply(other, drawn, EXACT))


@pytest.mark.parametrize("view", [Labeled(), Weak(), Strong(), StrongSemiFL(), StrongFedLoKe()], ids=repr)
def test_each_row_has_an_independent_draw(view: View) -> None:
    """64 copies of one image: the views that coincide are few (the weak view has 162 different ones)."""
    images = noise(1).expand(64, -1, -1, -1)
    views = view.apply(images, view.draw(64, (3, 32, 32), seeded(3)), EXACT).flatten(1)
    assert len(views.unique(dim=0)) > 40


@pytest.mark.parametrize("view", [Labeled(), Weak(), Strong(), StrongSemiFL(), StrongFedLoKe()], ids=repr)
def test_draws_depend_only_on_the_generator(view: View) -> None:
    first, repeated, other = (view.draw(50, (3, 32, 32), seeded(seed)) for seed in (7, 7, 8))
    torch.manual_seed(0)  # the global generator has no part in it
    assert all(torch.equal(first[name], repeated[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)


@pytest.mark.parametrize("kind", [Labeled, Weak, Strong, StrongSemiFL, StrongFedLoKe])
def test_without_flip_no_image_is_mirrored_and_different_draws_are_equal(kind: type) -> None:
    plain, mirrored = (kind(flip=flip).draw(500, (1, 8, 8), seeded()) for flip in (False, True))
    assert not plain.pop("flip").any()
    assert mirrored.pop("flip").any()
    assert all(torch.equal(plain[name], mirrored[name]) for name in plain)


def test_weak_view_of_a_constant_image_is_the_image() -> None:
    images = torch.full((20, 3, 32, 32), 93, dtype=torch.uint8)
    drawn = Weak().draw(20, (3, 32, 32), seeded())
    assert torch.equal(Weak().apply(images, drawn, EXACT), EXACT(images))


def test_strong_box_by_hand() -> None:
    """White 32x32 images, no operation: corner c covers pixels c to min(31, c + 16), both included.
    (0, 0): 17 x 17 = 289 gray pixels; (23, 5): rows 23 to 31 and columns 5 to 21, 9 x 17 = 153."""
    images = torch.full((2, 1, 32, 32), 255, dtype=torch.uint8)
    strong = Strong(operations=0, pad=0)
    drawn = strong.draw(2, (1, 32, 32), seeded())
    drawn["corner"] = torch.tensor([[0, 0], [23, 5]])
    gray = strong.pixels(images, drawn) == 127
    assert gray.flatten(1).sum(1).tolist() == [289, 153]
    assert gray[1, 0, 23:, 5:22].all()


def uniform(values: torch.Tensor, choices: int) -> bool:
    """Return whether a chi-square statistic is below its mean plus five standard deviations."""
    counts = torch.bincount(values.flatten(), minlength=choices).double()
    assert len(counts) == choices
    expected = values.numel() / choices
    statistic = ((counts - expected) ** 2 / expected).sum().item()
    return statistic < choices - 1 + 5 * math.sqrt(2 * (choices - 1))


def test_draws_have_the_distributions_of_the_recipe() -> None:
    n = 20_000
    drawn = Strong().draw(n, (3, 32, 32), seeded(5))
    assert uniform(drawn["flip"].long(), 2)
    assert uniform(drawn["top"], 9)
    assert uniform(drawn["left"], 9)
    assert uniform(drawn["top"] * 9 + drawn["left"], 81)
    assert uniform(drawn["negative"].long(), 2)
    assert uniform(drawn["level"] - 1, 9)
    # A slot does something with probability 1/2 * 13/14, each of the 13 equally; identity takes the other 15/28.
    active = drawn["operation"] != IDENTITY
    assert abs(active.double().mean().item() - 13 / 28) < 5 * math.sqrt(13 / 28 * 15 / 28 / (2 * n))
    assert len(FEDDURE_POOL.operations) - 1 == IDENTITY
    assert uniform(drawn["operation"][active], 13)
    both = active.all(1)
    assert uniform(drawn["operation"][both] @ torch.tensor([13, 1]), 169)
    # The corner is max(0, u - 8) for a centre u in [0, 32): 9/32 at 0, then 1 to 23 alike.
    corner = drawn["corner"]
    at_border = (corner == 0).double().mean().item()
    assert abs(at_border - 9 / 32) < 5 * math.sqrt(9 / 32 * 23 / 32 / (2 * n))
    assert uniform(corner[corner > 0] - 1, 23)
    centre = Labeled().draw(n, (3, 32, 32), seeded(6))["centre"]
    assert uniform(centre[:, 0] * 32 + centre[:, 1], 1024)


def is_close(values: torch.Tensor, probability: float) -> bool:
    """Return whether the share of True is within five standard deviations of its probability."""
    error = abs(values.double().mean().item() - probability)
    return error < 5 * math.sqrt(probability * (1 - probability) / values.numel())


def test_semifl_draws_have_the_distributions_of_the_recipe() -> None:
    """A slot is one of 15 with probability 1/30 each, 2/30 for Solarize with Invert, and skipped otherwise. A box's
    corner is max(0, u - 20) for a centre u in [0, 32), cut to whole pixels: 0 for u < 21, then 1 to 11 alike."""
    drawn = StrongSemiFL().draw(30_000, (3, 32, 32), seeded(1))
    assert set(drawn) == {"flip", "top", "left", "operation", "negative", "corner"}
    for kind in range(len(OPERATION_NAMES)):
        share = {IDENTITY: 1 / 2, SOLARIZE: 2 / 30}.get(kind, 1 / 30)
        assert is_close(drawn["operation"] == kind, share), OPERATION_NAMES[kind]
    assert is_close((drawn["operation"] == IDENTITY).all(1), 1 / 4)  # nothing but the mirror and the crop
    assert is_close(drawn["negative"], 1 / 2)
    assert drawn["corner"].shape == (30_000, 2, 2)
    for corner_index in range(12):
        assert is_close(drawn["corner"] == corner_index, 21 / 32 if corner_index == 0 else 1 / 32)
    assert is_close((drawn["corner"] == 0).all(2), (21 / 32) ** 2)


def test_fedloke_draws_have_the_distributions_of_the_recipe() -> None:
    """14 operations alike, the Identity among them, and either direction."""
    drawn = StrongFedLoKe().draw(30_000, (3, 32, 32), seeded(2))
    assert set(drawn) == {"flip", "top", "left", "operation", "negative"}
    for kind in range(CUTOUT):
        assert is_close(drawn["operation"] == kind, 1 / 14), OPERATION_NAMES[kind]
    both = drawn["operation"] == IDENTITY
    assert is_close(both.all(1), 1 / 196)
    assert is_close(drawn["negative"], 1 / 2)


def test_the_share_of_semifl_views_that_carry_no_image() -> None:
    """15.5 % of the views of two different images are the same image: nothing of either is left.
    A slot translates everything away with probability t = 2/30 and covers everything with g = 1/30 (21/32)^2 = 0.01436
    (both corners at 0). Nothing is left with 1 - (1 - t - g)^2 = 15.55 %, after a translation with 1 - (1 - t)^2 =
    12.89 %, the rest under gray. The view ends black where the last slot translates, or the first does and the last
    neither inverts (2/30) nor cuts (1/30) nor translates: t + t (1 - t - 3/30) = 12.22 %. It ends as gray 127 where
    the last slot covers everything, or the first does and the last leaves it so (1/2 skipped, AutoContrast, Color,
    Contrast, Equalize, Sharpness 5/30, Cutout 1/30, less what is counted already): g + g (0.7 - g) = 2.42 %."""
    n = 10_000
    strong = StrongSemiFL()
    one = noise(1, seed=3)
    other = noise(1, seed=4)
    drawn = strong.draw(n, (3, 32, 32), seeded(5))
    equal = []
    black = []
    gray = []
    for start in range(0, n, 500):
        chunk = {name: leaf[start : start + 500] for name, leaf in drawn.items()}
        pixels = [strong.pixels(image.expand(500, -1, -1, -1), chunk).flatten(1) for image in (one, other)]
        equal.append((pixels[0] == pixels[1]).all(1))
        black.append((pixels[0] == 0).all(1))
        gray.append((pixels[0] == 127).all(1))
    shift = 2 / 30
    cover = (21 / 32) ** 2 / 30
    assert is_close(torch.cat(equal), 1 - (1 - shift - cover) ** 2)
    assert is_close(torch.cat(black), shift + shift * (1 - shift - 3 / 30))
    assert is_close(torch.cat(gray), cover + cover * (0.7 - cover))


def test_shared_draws_once_for_the_rows_of_a_step() -> None:
    """Row i has draw i // 4 of the view itself, the last group cut short."""
    view = StrongSemiFL()
    shared = Shared(view, 4).draw(10, (3, 32, 32), seeded(6))
    single = view.draw(3, (3, 32, 32), seeded(6))
    assert set(shared) == set(single)
    for name, leaf in shared.items():
        assert leaf.shape[0] == 10
        for row in range(10):
            assert torch.equal(leaf[row], single[name][row // 4])
    assert Shared(view, 4).draw(0, (3, 32, 32), seeded())["corner"].shape == (0, 2, 2)


def test_shared_draw_is_equal_within_a_step_and_differs_between_steps() -> None:
    """Copies of one image: as many different weak views as steps with different draws, each filling its step."""
    shared = Shared(Weak(), 32)
    normalize = Normalize((0.0,), (1.0,))
    images = noise(1, 1, seed=7).expand(320, -1, -1, -1)
    views = shared.apply(images, shared.draw(320, (1, 32, 32), seeded(8)), normalize).flatten(1)
    steps = views.view(10, 32, -1)
    assert (steps == steps[:, :1]).all()
    assert len(steps[:, 0].unique(dim=0)) > 5
    every = Shared(Weak(), 1).draw(50, (1, 32, 32), seeded(9))
    assert all(torch.equal(leaf, every[name]) for name, leaf in Weak().draw(50, (1, 32, 32), seeded(9)).items())


def test_magnitude_bounds_the_levels() -> None:
    drawn = Strong(magnitude=3).draw(500, (3, 32, 32), seeded())
    assert drawn["level"].unique().tolist() == [1, 2]


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        (lambda: Strong(magnitude=1), "magnitude is 1"),
        (lambda: Strong(magnitude=12), "magnitude is 12"),
        (lambda: Strong(operations=-1), "operations is -1"),
        (lambda: Weak(pad=8).draw(1, (1, 8, 8), seeded()), "pad is 8 on images of 8x8"),
        (lambda: Labeled(pad=-1).draw(1, (1, 8, 8), seeded()), "pad is -1"),
        (lambda: Labeled(cutout=-2), "cutout is -2"),
        (lambda: Strong(cutout=-2), "cutout is -2"),
        (lambda: Strong().draw(1, (2, 8, 8), seeded()), "2 channels"),
        (lambda: StrongSemiFL().draw(1, (2, 8, 8), seeded()), "StrongSemiFL got images of 2 channels"),
        (lambda: StrongFedLoKe().draw(1, (4, 8, 8), seeded()), "StrongFedLoKe got images of 4 channels"),
        (lambda: StrongSemiFL(operations=-1), "StrongSemiFL.operations is -1"),
        (lambda: StrongFedLoKe(operations=-1), "StrongFedLoKe.operations is -1"),
        (lambda: StrongFedLoKe(magnitude=31), "magnitude is 31: choose 0 to 30"),
        (lambda: Shared(Weak(), 0), "Shared.rows is 0"),
        (lambda: Normalize((0.5,), (0.0,)), "must be positive"),
        (lambda: Normalize((0.5,), (0.5, 0.5)), "1 means and 2 standard deviations"),
        (lambda: UNIT(noise(1)), "has 1 channel(s), the images have 3"),
        (lambda: EXACT(noise(1).float()), "uint8"),
        (lambda: Weak().apply(noise(1).float(), Weak().draw(1, (3, 32, 32), seeded()), EXACT), "uint8"),
    ],
)
def test_mistakes_are_named(mistake, message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        mistake()
