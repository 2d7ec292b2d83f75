"""Maxima of clients that train as one program are those of each alone, where several pixels are the largest as well."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import max_pool2d

from halfmoon.core.autodiff import grad_and_value, vmap_clients
from halfmoon.core.tree import Tree
from halfmoon.models.passes import TrainPass

CLIENTS = 3
IMAGES = 4
CHANNELS = 5


def images() -> Tensor:
    """Return images (K, B, C, 6, 6) of four levels of gray: most windows have their largest pixel more than once."""
    return torch.randint(4, (CLIENTS, IMAGES, CHANNELS, 6, 6), generator=torch.Generator().manual_seed(0)).float()


@pytest.mark.parametrize("window", [(2,), (3, 2, 1), (2, 1)])
def test_maxima_and_their_gradient_are_pytorchs(window: tuple[int, ...]):
    """To the bit: of equal pixels the first one gets the gradient, as in `max_pool2d`."""
    x = images()
    seen = max_pool2d(images()[0], *window).shape
    weight = torch.randint(-8, 8, (CLIENTS, *seen), generator=torch.Generator().manual_seed(1)).float()

    def loss(params: Tree, weight: Tensor) -> tuple[Tensor, Tensor]:
        out = TrainPass({}, "none").pool(params["x"], *window)
        return (out * weight).sum(), out

    gradient, _, out = vmap_clients(lambda x, weight: grad_and_value(loss, {"x": x}, weight))(x, weight)
    for k in range(CLIENTS):
        single = x[k].clone().requires_grad_()
        expected = max_pool2d(single, *window)
        assert torch.equal(out[k], expected)
        (expected * weight[k]).sum().backward()
        assert torch.equal(gradient["x"][k], single.grad)


def test_one_clients_are_as_well():
    """With channels first, as images of one channel have them: values, gradient and layout are `max_pool2d`'s."""
    x = images()[0]
    weight = torch.randn(IMAGES, CHANNELS, 3, 3, generator=torch.Generator().manual_seed(1))
    actual = x.clone().requires_grad_()
    expected_value = x.clone().requires_grad_()
    out = TrainPass({}, "none").pool(actual, 2)
    expected = max_pool2d(expected_value, 2)
    (out * weight).sum().backward()
    (expected * weight).sum().backward()
    for mine, other in ((out, expected), (actual.grad, expected_value.grad)):
        assert torch.equal(mine, other)
        assert mine.stride() == other.stride()


def test_nan_is_preserved():
    x = images()
    x[1, 0, 0, 3, 2] = torch.nan
    pooled = vmap_clients(lambda x: {"out": TrainPass({}, "none").pool(x, 2)})(x)["out"]
    assert torch.equal(pooled.isnan(), max_pool2d(x.flatten(0, 1), 2).unflatten(0, (CLIENTS, -1)).isnan())
    assert pooled.isnan().sum() == 1


def test_images_that_all_clients_share_are_pooled_once_for_all():
    x = images()[0]
    pooled = vmap_clients(lambda k: {"out": TrainPass({}, "none").pool(x, 2)})(torch.arange(CLIENTS))["out"]
    assert torch.equal(pooled, max_pool2d(x, 2).expand(CLIENTS, -1, -1, -1, -1))
