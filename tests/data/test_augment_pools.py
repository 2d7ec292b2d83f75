"""SemiFL's and FedLoKe's pools: their pixels against Pillow, what they draw, and how much of an image they leave."""

import itertools
import math

import numpy as np
import pillow_reference as reference
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from halfmoon.core.errors import UserError
from halfmoon.data.views import Shared, StrongFedLoKe, StrongSemiFL, Weak
from halfmoon.data.views.operations import operate
from halfmoon.data.views.pools import CUTOUT, IDENTITY, NAMES, SEMIFL, SOLARIZE, fedloke
from halfmoon.data.views.tables import blend
from halfmoon.models.network import Normalize

SIZES = [(8, 8), (28, 28), (32, 32), (33, 20), (110, 104)]  # the last one is wider than 100 pixels
SEMIFL_NAMES = (
    *("AutoContrast", "Brightness", "Color", "Contrast", "Cutout", "Equalize", "Invert", "Posterize", "Rotate"),
    *("Sharpness", "ShearX", "ShearY", "Solarize", "TranslateX", "TranslateY"),
)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def noise(n: int, channels: int, side: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 256, (n, channels, side, side), dtype=torch.uint8, generator=seeded(seed))


@pytest.mark.parametrize("name", SEMIFL_NAMES)
def test_semifl_operations_equal_pillow(name: str) -> None:
    """Cutout's corners lie in the upper left quarter, at the border and in between; Invert is our Solarize."""
    for channels, size in itertools.product((1, 3), SIZES):
        images = reference.specimens(channels, size)
        before, rows = images.clone(), (len(images), 1)
        kind = torch.full(rows, NAMES.index("Solarize" if name == "Invert" else name))
        corners = torch.stack([torch.arange(15) * side // 16 for side in size], dim=1)
        corners[:5, 0], corners[3:8, 1] = 0, 0
        for negative in (False, True):
            draws = kind, torch.zeros_like(kind), torch.full(rows, negative)
            done = operate(images, *draws, SEMIFL, corners[:, None])
            for image, corner, result in zip(images, corners.tolist(), done, strict=True):
                expected = reference.semifl_operation(reference.to_image(image.numpy()), name, negative, corner)
                np.testing.assert_array_equal(result.numpy(), reference.to_array(expected))
        assert torch.equal(images, before)


@pytest.mark.parametrize("name", NAMES[:CUTOUT])
def test_fedloke_operations_equal_pillow(name: str) -> None:
    """9 is RandAugment's default; the others show that nothing is tied to it."""
    for magnitude, size in itertools.product((0, 9, 17, 30), ((8, 8), (32, 32), (33, 20))):
        for channels in (1, 3):
            images = reference.specimens(channels, size)
            kind = torch.full((len(images), 1), NAMES.index(name))
            for negative in (False, True):
                draws = kind, torch.zeros_like(kind), torch.full_like(kind, negative, dtype=torch.bool)
                done = operate(images, *draws, fedloke(magnitude))
                for image, result in zip(images, done, strict=True):
                    expected = reference.fedloke_operation(reference.to_image(image.numpy()), name, negative, magnitude)
                    np.testing.assert_array_equal(result.numpy(), reference.to_array(expected))


def test_the_pools_have_the_magnitudes_of_the_released_codes() -> None:
    """SemiFL's maxima, and torchvision's bin 9 of 31 by hand.
    Bin 9 of linspace(0, top, 31) is 0.3 top: shear 0.09, 150 / 331 * 0.3 = 0.13595 sides (4.35 of 32 pixels, cut to
    4), 9 degrees, blends 1 +- 0.27; Posterize 8 - round(9 / 7.5) = 7 bits; Solarize 255 - 76.5 = 178.5."""
    pool = fedloke(9)
    assert pool.shear == pytest.approx((0.09,))
    assert pool.shift == pytest.approx((0.1359516,))
    assert (int(pool.shift[0] * 32), pool.bits, pool.pixels, pool.bilinear, pool.box) == (4, (7,), False, False, 0)
    assert (pool.degrees, pool.threshold) == ((9.0,), (178.5,))
    assert (*pool.factor, *pool.opposite) == pytest.approx((1.27, 0.73))
    assert set(pool.operations) == set(NAMES) - {"Cutout"}
    assert len(pool.operations) == 14
    assert (SEMIFL.degrees, SEMIFL.shear, SEMIFL.shift, SEMIFL.bits) == ((30.0,), (0.3,), (100.0,), (4,))
    assert (SEMIFL.threshold, SEMIFL.factor, SEMIFL.opposite, SEMIFL.box) == ((0,), (1.9,), (1.9,), 40)
    assert sorted(SEMIFL.operations) == sorted(name if name != "Invert" else "Solarize" for name in SEMIFL_NAMES)


@pytest.mark.parametrize("factor", [0.73, 1.27, 1.9, *SEMIFL.factor, *fedloke(9).factor, *fedloke(9).opposite])
def test_blends_beyond_the_image_are_clipped_as_in_pillow(factor: float) -> None:
    """All 256 x 256 pairs. By hand: 100 + 1.9 (200 - 100) = 290 is 255, and 200 + 1.9 (100 - 200) = 10."""
    first, second = np.meshgrid(np.arange(256, dtype=np.uint8), np.arange(256, dtype=np.uint8))
    expected = np.asarray(Image.blend(Image.fromarray(first), Image.fromarray(second), factor))
    weight = torch.tensor(factor, dtype=torch.float32)
    done = blend(torch.from_numpy(first), torch.from_numpy(second), weight)
    np.testing.assert_array_equal(done, expected)
    if factor == 1.9:
        assert (int(done[200, 100]), int(done[100, 200])) == (255, 10)


def test_bilinear_shear_by_hand() -> None:
    """Two rows 0, 102, 204 under ShearX 0.3 and -0.3; results are cut off, not rounded.
    In the upper row the source of the centre x + 0.5 is x + 0.5 + 0.3 * 0.5 = x + 0.65, 0.15 beyond the centre of
    pixel x: 0.85 of x and 0.15 of its right neighbor give 15.3 and 117.3, and at the border the pixel itself, 204. The
    other way it is 0.15 before it: the border's 0, then 102 - 15.3 = 86.7 and 188.7. The lower row moves by 0.45 and
    stays inside too: 45.9, 147.9, 204, and 0, 56.1, 158.1."""
    images = torch.tensor([0, 102, 204], dtype=torch.uint8).expand(2, 1, 2, 3).contiguous()
    kind = torch.full((2, 1), NAMES.index("ShearX"))
    corner = torch.zeros((2, 1, 2), dtype=torch.long)
    done = operate(images, kind, torch.zeros_like(kind), torch.tensor([[False], [True]]), SEMIFL, corner)
    assert done[0, 0].tolist() == [[15, 117, 204], [45, 147, 204]]
    assert done[1, 0].tolist() == [[0, 86, 188], [0, 56, 158]]


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**31 - 1), side=st.sampled_from([8, 16, 28, 32]), channels=st.sampled_from([1, 3]))
def test_the_views_equal_the_same_pipelines_in_pillow(seed: int, side: int, channels: int) -> None:
    images = noise(8, channels, side, seed)
    images[:4] = images[:4] // 5 + 40
    semifl, loke = StrongSemiFL(operations=3), StrongFedLoKe(operations=3)
    drawn = semifl.draw(8, (channels, side, side), seeded(seed))
    for view, image, row in zip(semifl.pixels(images, drawn), images.numpy(), reference.rows_of(drawn), strict=True):
        np.testing.assert_array_equal(view, reference.semifl_pixels(image, row, side // 8))
    drawn = loke.draw(8, (channels, side, side), seeded(seed))
    for view, image, row in zip(loke.pixels(images, drawn), images.numpy(), reference.rows_of(drawn), strict=True):
        np.testing.assert_array_equal(view, reference.fedloke_pixels(image, row, side // 8, 9))


@pytest.mark.parametrize("view", [StrongSemiFL(), StrongFedLoKe()], ids=repr)
def test_the_views_normalize_their_pixels(view: StrongSemiFL | StrongFedLoKe) -> None:
    images, normalize = noise(4, 3, 32, 0), Normalize((0.4, 0.5, 0.6), (0.2, 0.25, 0.3), torch.float64)
    drawn = view.draw(4, (3, 32, 32), seeded())
    assert torch.equal(view.apply(images, drawn, normalize), normalize(view.pixels(images, drawn)))


def near(values: torch.Tensor, probability: float) -> bool:
    """Return whether the share of True is within five standard deviations of its probability."""
    error = abs(values.double().mean().item() - probability)
    return error < 5 * math.sqrt(probability * (1 - probability) / values.numel())


def test_semifl_draws_have_the_distributions_of_the_recipe() -> None:
    """A slot is one of 15 with probability 1/30 each, 2/30 for Solarize with Invert, and skipped otherwise. A box's
    corner is max(0, u - 20) for a centre u in [0, 32), cut to whole pixels: 0 for u < 21, then 1 to 11 alike."""
    drawn = StrongSemiFL().draw(30_000, (3, 32, 32), seeded(1))
    assert set(drawn) == {"flip", "top", "left", "operation", "negative", "corner"}
    for kind in range(len(NAMES)):
        share = {IDENTITY: 1 / 2, SOLARIZE: 2 / 30}.get(kind, 1 / 30)
        assert near(drawn["operation"] == kind, share), NAMES[kind]
    assert near((drawn["operation"] == IDENTITY).all(1), 1 / 4)  # nothing but the mirror and the crop
    assert near(drawn["negative"], 1 / 2)
    assert drawn["corner"].shape == (30_000, 2, 2)
    for place in range(12):
        assert near(drawn["corner"] == place, 21 / 32 if place == 0 else 1 / 32)
    assert near((drawn["corner"] == 0).all(2), (21 / 32) ** 2)


def test_fedloke_draws_have_the_distributions_of_the_recipe() -> None:
    """14 operations alike, the Identity among them, and either direction."""
    drawn = StrongFedLoKe().draw(30_000, (3, 32, 32), seeded(2))
    assert set(drawn) == {"flip", "top", "left", "operation", "negative"}
    for kind in range(CUTOUT):
        assert near(drawn["operation"] == kind, 1 / 14), NAMES[kind]
    both = drawn["operation"] == IDENTITY
    assert near(both.all(1), 1 / 196)
    assert near(drawn["negative"], 1 / 2)


def test_the_share_of_semifl_views_that_carry_no_image() -> None:
    """15.5 % of the views of two different images are the same image: nothing of either is left.
    A slot translates everything away with probability t = 2/30 and covers everything with g = 1/30 (21/32)^2 = 0.01436
    (both corners at 0). Nothing is left with 1 - (1 - t - g)^2 = 15.55 %, after a translation with 1 - (1 - t)^2 =
    12.89 %, the rest under gray. The view ends black where the last slot translates, or the first does and the last
    neither inverts (2/30) nor cuts (1/30) nor translates: t + t (1 - t - 3/30) = 12.22 %. It ends as gray 127 where
    the last slot covers everything, or the first does and the last leaves it so (1/2 skipped, AutoContrast, Color,
    Contrast, Equalize, Sharpness 5/30, Cutout 1/30, less what is counted already): g + g (0.7 - g) = 2.42 %."""
    n, strong = 20_000, StrongSemiFL()
    one, other = noise(1, 3, 32, 3), noise(1, 3, 32, 4)
    drawn = strong.draw(n, (3, 32, 32), seeded(5))
    equal, black, gray = [], [], []
    for start in range(0, n, 500):
        part = {name: leaf[start : start + 500] for name, leaf in drawn.items()}
        views = [strong.pixels(image.expand(500, -1, -1, -1), part).flatten(1) for image in (one, other)]
        equal.append((views[0] == views[1]).all(1))
        black.append((views[0] == 0).all(1))
        gray.append((views[0] == 127).all(1))
    shift, cover = 2 / 30, (21 / 32) ** 2 / 30
    assert near(torch.cat(equal), 1 - (1 - shift - cover) ** 2)
    assert near(torch.cat(black), shift + shift * (1 - shift - 3 / 30))
    assert near(torch.cat(gray), cover + cover * (0.7 - cover))


def test_shared_draws_once_for_the_rows_of_a_step() -> None:
    """Row i has draw i // 4 of the view itself, the last group cut short."""
    view = StrongSemiFL()
    shared, alone = Shared(view, 4).draw(10, (3, 32, 32), seeded(6)), view.draw(3, (3, 32, 32), seeded(6))
    assert set(shared) == set(alone)
    for name, leaf in shared.items():
        assert leaf.shape[0] == 10
        for row in range(10):
            assert torch.equal(leaf[row], alone[name][row // 4])
    assert Shared(view, 4).draw(0, (3, 32, 32), seeded())["corner"].shape == (0, 2, 2)


def test_shared_treats_a_step_alike_and_steps_differently() -> None:
    """Copies of one image: as many different weak views as steps with different draws, each filling its step."""
    shared, normalize = Shared(Weak(), 32), Normalize((0.0,), (1.0,))
    images = noise(1, 1, 32, 7).expand(320, -1, -1, -1)
    views = shared.apply(images, shared.draw(320, (1, 32, 32), seeded(8)), normalize).flatten(1)
    steps = views.view(10, 32, -1)
    assert (steps == steps[:, :1]).all()
    assert len(steps[:, 0].unique(dim=0)) > 5
    every = Shared(Weak(), 1).draw(50, (1, 32, 32), seeded(9))
    assert all(torch.equal(leaf, every[name]) for name, leaf in Weak().draw(50, (1, 32, 32), seeded(9)).items())


def test_cutout_without_corners_is_named() -> None:
    one = torch.full((1, 1), CUTOUT)
    with pytest.raises(UserError, match="no corners"):
        operate(noise(1, 1, 8, 0), one, one * 0, one == 0, SEMIFL)
