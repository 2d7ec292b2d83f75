"""Batch, group or no normalization in every network: lifted, laid out channels-last, cut in half, with features."""

from dataclasses import replace
from math import ceil

import pytest
import torch
import torch.nn.functional as F
from torch.func import grad_and_value, vjp, vmap
from torch_models import build_module, load_weights, make_example

from halfmoon.core import tree
from halfmoon.core.errors import UserError
from halfmoon.models import ResNet9, SmallCNN, WideResNet, forward, track
from halfmoon.models.passes import group_count

NETWORKS = {
    "resnet9": (ResNet9(2, 4, 5), 16),
    "small": (SmallCNN(2, 4, 20), 8),
    "wrn": (WideResNet(2, 4, 1, depth=10), 8),
}
CASES = [
    (replace(network, norm=norm), side) for network, side in NETWORKS.values() for norm in ("batch", "group", "none")
]
EVERY = pytest.mark.parametrize(("network", "side"), CASES, ids=str)


def equal(one, two, tolerance=1e-9) -> None:
    """Assert that two trees have the same leaves, equal to `tolerance`."""
    one = tree.flatten(one)
    two = tree.flatten(two)
    assert one.keys() == two.keys()
    for path, leaf in one.items():
        torch.testing.assert_close(leaf, two[path], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("channels", "groups"),
    [(1, 1), (3, 3), (16, 16), (32, 32), (33, 11), (37, 1), (40, 20), (48, 24), (64, 32), (100, 25), (512, 32)],
)
def test_groups_are_fedrgds_or_the_next_divisor(channels, groups):
    """32 where they divide the channels, else the largest divisor below: 40 = 20 * 2, 48 = 24 * 2, 37 is prime."""
    assert group_count(channels) == groups


@EVERY
def test_clients_lift(network, side):
    """Three stacked clients under vmap: loss, gradients, moments, features and predictions are those of a loop."""
    scenes = [make_example(network, side, seed) for seed in range(3)]

    def one(model, x, y):
        def loss(params):
            logits, features, moments = network.embed(params, x)
            return F.cross_entropy(logits, y), (features, moments)

        gradient, (value, (features, moments)) = grad_and_value(loss, has_aux=True)(model["params"])
        predicted = network.predict(model["params"], model["stats"], x)
        tracked = track(model["stats"], moments)
        return {"g": gradient, "l": value, "f": features, "m": moments, "p": predicted, "t": tracked}

    models, x, y = zip(*scenes, strict=True)
    lifted = vmap(one)(tree.stack(models), torch.stack(x), torch.stack(y))
    for k in range(3):
        equal(tree.index(lifted, k), one(*scenes[k]))


@EVERY
def test_layouts_agree(network, side):
    """Channels-last gives the logits and gradients of the plain layout, under `grad` and under `vjp`."""
    model, x, y = make_example(network, side)
    loss = lambda params, x: F.cross_entropy(network.train(params, x)[0], y)  # noqa: E731
    plain, value = grad_and_value(loss)(model["params"], x)
    params = tree.channels_last(model["params"])
    x = x.contiguous(memory_format=torch.channels_last)
    last, same = grad_and_value(loss)(params, x)
    torch.testing.assert_close(value, same, rtol=1e-12, atol=1e-12)
    equal(plain, last, 1e-10)
    with torch.no_grad():
        (pulled,) = vjp(lambda params: loss(params, x), params)[1](torch.ones_like(value))
    equal(plain, pulled, 1e-10)


@EVERY
def test_features_are_the_heads_input(network, side):
    """`embed` is `train` bit by bit; its features and their gradients are the module's."""
    model, x, _ = make_example(network, side)
    oracle = load_weights(build_module(network), model)
    logits, features, moments = network.embed(model["params"], x)
    plain, single = network.train(model["params"], x)
    assert torch.equal(logits, plain)
    equal(moments, single, 0)
    expected_value = oracle.features(x)
    torch.testing.assert_close(features, expected_value, rtol=1e-10, atol=1e-10)
    cotangent = torch.randn(
        expected_value.shape, dtype=expected_value.dtype, generator=torch.Generator().manual_seed(0)
    )
    expected_value.backward(cotangent)
    (actual,) = vjp(lambda params: network.embed(params, x)[1], model["params"])[1](cotangent)
    for name, p in oracle.named_parameters():
        expected = torch.zeros_like(p) if p.grad is None else p.grad
        torch.testing.assert_close(tree.flatten(actual)[name.replace(".", "/")], expected, rtol=1e-9, atol=1e-9)


@EVERY
def test_only_batches_leave_statistics(network, side):
    """Under "group" and "none" an image's logits are its in training too, and equal those of evaluation."""
    model, x, _ = make_example(network, side)
    logits, moments = network.train(model["params"], x)
    single = network.train(model["params"], x[1:2])[0]
    if network.norm == "batch":
        assert moments.keys() == model["stats"].keys()
        assert float((single - logits[1:2]).abs().max()) > 1e-3
        return
    assert model["stats"] == moments == {}
    torch.testing.assert_close(single, logits[1:2], rtol=1e-10, atol=1e-10)
    assert torch.equal(network.predict(model["params"], {}, x), logits)


@pytest.mark.parametrize("norm", ["group", "none"])
@pytest.mark.parametrize("joint", [True, False])
def test_groups_of_images_pass_without_moments(norm, joint):
    """`forward` gives {} for every pass, and the same logits together and apart."""
    network = SmallCNN(1, 4, 4, norm)
    model, x, _ = make_example(network, 8, rows=6)
    (one, two), (three,), passes = forward(network, model["params"], joint, (x[:1], x[1:3]), (x[3:],))
    assert passes == [{}] * (1 if joint else 3)
    torch.testing.assert_close(torch.cat([one, two, three]), network.train(model["params"], x)[0])


def test_a_model_without_statistics_is_a_tree():
    model = SmallCNN(1, 4, 4, "group").init(torch.Generator().manual_seed(0))
    stacked = tree.stack([model, tree.zeros_like(model)])
    mean = tree.weighted_mean(stacked, torch.tensor([1.0, 3.0]))
    chosen = tree.select(torch.tensor(True), mean, tree.index(stacked, 1))
    for each in (stacked, mean, chosen, tree.to(mean, dtype=torch.float64), tree.channels_last(mean)):
        assert each["stats"] == {}
    equal(chosen["params"], tree.map(lambda leaf: leaf / 4, model["params"]), 1e-6)


def leading(params):
    """Return HeteroFL's sub-network of rate 1/2: ceil(n / 2) of outputs and inputs, all images and all classes."""
    first = next(iter(params))

    def cut(path, leaf):
        layer = path.split("/")[0]
        if layer != "head":
            leaf = leaf[: ceil(len(leaf) / 2)]
        if leaf.dim() > 1 and layer != first:
            leaf = leaf[:, : ceil(leaf.shape[1] / 2)]
        return leaf.clone()

    return tree.unflatten({path: cut(path, leaf) for path, leaf in tree.flatten(params).items()})


def masked(masked_values, whole):
    def pad(small, like):
        return F.pad(small, [k for a, b in zip(small.shape[::-1], like.shape[::-1], strict=True) for k in (0, b - a)])

    return tree.map(pad, masked_values, whole)


CUTS = [
    *[(network, side) for network, side in CASES if network.norm != "group"],
    (WideResNet(1, 4, 2, depth=10), 8),
    (WideResNet(1, 4, 2, "none", 16), 8),
    (ResNet9(2, 4, 4, "group"), 16),  # up to 32 channels: a group is a channel, in the whole and in the part
    (SmallCNN(2, 4, 15, "group"), 8),
]


@pytest.mark.parametrize(("network", "side"), CUTS, ids=str)
def test_leading_channels_equal_the_network_with_zeros_in_the_rest(network, side):
    """Zeros stay zeros behind their normalization and add nothing: same logits, moments and gradients of the part."""
    model, x, y = make_example(network, side)
    masked_values = leading(model["params"])
    whole = masked(masked_values, model["params"])
    stats = {name: {k: leaf[: ceil(len(leaf) / 2)] for k, leaf in s.items()} for name, s in model["stats"].items()}
    assert tree.numel(masked_values) < 0.35 * tree.numel(whole)
    torch.testing.assert_close(
        network.predict(masked_values, stats, x), network.predict(whole, model["stats"], x), rtol=1e-10, atol=1e-10
    )
    loss = lambda params: (lambda out: (F.cross_entropy(out[0], y), out))(network.train(params, x))  # noqa: E731
    actual, (_, (logits, moments)) = grad_and_value(loss, has_aux=True)(masked_values)
    expected_value, (_, (expected, wide)) = grad_and_value(loss, has_aux=True)(whole)
    torch.testing.assert_close(logits, expected, rtol=1e-10, atol=1e-10)
    equal(actual, leading(expected_value))
    equal(moments, {n: {k: leaf[: ceil(len(leaf) / 2)] for k, leaf in s.items()} for n, s in wide.items()})


@EVERY
def test_width_attribute_does_not_determine_the_parameters(network, side):
    """A network of twice the width runs on the parameters as this one does, bit by bit; groups follow the channels."""
    network = replace(network, width=2 * network.width)
    wider = replace(network, width=2 * network.width)
    model, x, _ = make_example(network, side)
    for actual, expected_value in zip(
        wider.embed(model["params"], x)[:2], network.embed(model["params"], x)[:2], strict=True
    ):
        assert torch.equal(actual, expected_value)
    assert torch.equal(wider.predict(**model, x=x), network.predict(**model, x=x))
    direction = tree.map(torch.cos, model["params"])
    actual, expected_value = (
        each.tangent(model["params"], x, each.linearize(model["params"], x)[1], direction) for each in (wider, network)
    )
    assert torch.equal(actual, expected_value)


@pytest.mark.parametrize("make", [ResNet9, SmallCNN, WideResNet])
def test_an_unknown_normalization_is_refused(make):
    with pytest.raises(UserError, match="norm is 'layer': choose one of: batch, group, none"):
        make(norm="layer")
