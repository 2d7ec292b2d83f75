"""Tangents from recorded activations against `torch.func.jvp` and compared with differences."""

import pytest
import torch
from torch.func import jvp, vjp, vmap
from torch.utils._python_dispatch import TorchDispatchMode
from torch_models import make_example

from halfmoon.core import rng, tree
from halfmoon.models import ResNet8, ResNet9, SmallCNN, WideResNet

CASES = [  # 40 channels are 20 groups of 2, 64 are 32 groups of 2
    (ResNet9(3, 10, 4), 16),
    (ResNet9(1, 5, 3), 32),
    (ResNet9(1, 5, 5, "group"), 16),
    (ResNet9(3, 10, 3, "none"), 16),
    (SmallCNN(1, 10, 5), 8),
    (SmallCNN(3, 4, 4), 13),
    (SmallCNN(1, 4, 20, "group"), 8),
    (SmallCNN(3, 4, 4, "none"), 8),
    (WideResNet(3, 4, 2, depth=10), 8),
    (WideResNet(1, 4, 1, "group", 10), 8),
    (WideResNet(1, 4, 1, "none", 10), 12),
    (ResNet8(3, 4, 4), 8),
]
EVERY = pytest.mark.parametrize(("network", "side"), CASES, ids=lambda value: str(value))


def moving(network, side, seed=1):
    """Return parameters, images and a direction."""
    model, x, _ = make_example(network, side, seed)
    g = rng.generator(seed, "direction")
    direction = tree.map(lambda leaf: torch.randn(leaf.shape, generator=g, dtype=leaf.dtype), model["params"])
    return model["params"], x, direction


@EVERY
def test_recording_does_not_change_the_result(network, side):
    """The logits, and what is pulled back from them, are those of a plain training pass, bit by bit."""
    params, x, _ = moving(network, side)
    z, pull = vjp(lambda p: network.train(p, x)[0], params)
    recorded, pull_recorded, _ = vjp(lambda p: network.linearize(p, x), params, has_aux=True)
    assert torch.equal(z, recorded)
    for a, b in zip(tree.leaves(pull(z)[0]), tree.leaves(pull_recorded(z)[0]), strict=True):
        assert torch.equal(a, b)


@EVERY
@pytest.mark.parametrize("laid", [tree.contiguous, tree.channels_last], ids=["plain", "channels_last"])
def test_tangent_equals_jvp(network, side, laid):
    """1e-12 relative, whether the tape comes from a plain pass or out of `vjp`, in both layouts.
    The oracle stays in the plain layout: PyTorch's own `jvp` of a group normalization refuses channels-last."""
    params, x, direction = moving(network, side)
    _, expected = jvp(lambda p: network.train(p, x)[0], (params,), (direction,))
    params = laid(params)
    x = laid({"x": x})["x"]
    direction = laid(direction)
    _, _, tape = vjp(lambda p: network.linearize(p, x), params, has_aux=True)
    for stored in (tape, network.linearize(params, x)[1]):
        actual = network.tangent(params, x, stored, direction)
        assert float((actual - expected).norm() / expected.norm()) < 1e-12


@pytest.mark.parametrize(
    ("network", "side"),
    [
        (SmallCNN(3, 4, 4), 13),
        (ResNet9(1, 5, 5, "group"), 16),
        (WideResNet(1, 4, 1, "none", 10), 8),
        (ResNet8(3, 4, 4), 8),
    ],
    ids=str,
)
def test_each_leaf_moves_the_logits_as_a_difference_does(network, side):
    """Central differences along one leaf's direction at a time, step 1e-6: 1e-6 of the whole tangent."""
    params, x, direction = moving(network, side)
    tape = network.linearize(params, x)[1]
    whole = network.tangent(params, x, tape, direction).norm()
    zeros = tree.flatten(tree.zeros_like(direction))
    total = torch.zeros(len(x), network.classes, dtype=torch.float64)
    for path, leaf in tree.flatten(direction).items():
        single = tree.unflatten({**zeros, path: leaf})
        actual = network.tangent(params, x, tape, single)
        total += actual
        ahead, behind = (
            network.train(tree.map(lambda p, d, h=h: p + h * d, params, single), x)[0] for h in (1e-6, -1e-6)
        )
        assert float((actual - (ahead - behind) / 2e-6).norm() / whole) < 1e-6, path
    assert float((total - network.tangent(params, x, tape, direction)).norm() / whole) < 1e-12


@pytest.mark.parametrize("norm", ["batch", "group", "none"])
def test_tangent_lifts(norm):
    """Three clients under vmap, with their parameters, images and directions, get the tangents they get alone."""
    network = SmallCNN(2, 4, 20, norm)
    scenes = [moving(network, 8, seed) for seed in range(3)]

    def one(params, x, direction):
        _, _, tape = vjp(lambda p: network.linearize(p, x), params, has_aux=True)
        return network.tangent(params, x, tape, direction)

    params, x, direction = zip(*scenes, strict=True)
    lifted = vmap(one)(tree.stack(params), torch.stack(x), tree.stack(direction))
    for k in range(3):
        torch.testing.assert_close(lifted[k], one(*scenes[k]), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("norm", ["batch", "group", "none"])
def test_tangent_does_not_modify_its_inputs(norm):
    network = SmallCNN(1, 4, 4, norm)
    params, x, direction = moving(network, 8)
    tape = network.linearize(params, x)[1]
    given = [*tree.leaves(params), *tree.leaves(direction), *tape, x]
    copies = [leaf.clone() for leaf in given]
    first = network.tangent(params, x, tape, direction)
    assert all(torch.equal(a, b) for a, b in zip(given, copies, strict=True))
    assert torch.equal(first, network.tangent(params, x, tape, direction))


class Convolutions(TorchDispatchMode):
    """Count convolutions."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten.convolution.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("norm", ["batch", "group", "none"])
def test_tangent_takes_two_convolutions_a_layer(norm):
    """One in the first layer, whose images do not move, and two in each of the seven others: 15."""
    network = ResNet9(1, 5, 3, norm)
    params, x, direction = moving(network, 16)
    tape = network.linearize(params, x)[1]
    with Convolutions() as counted:
        network.tangent(params, x, tape, direction)
    assert counted.count == 15
