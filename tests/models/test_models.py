"""The pure networks against their `nn.Module` twins, their sizes, their initialization, their limits."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import grad
from torch_models import build_module, load_weights, make_example

from halfmoon.core import rng, tree
from halfmoon.core.errors import UserError
from halfmoon.federation.contract.small_federation import max_difference
from halfmoon.models import (
    NETWORKS,
    ResNet8,
    ResNet9,
    ResNet18,
    ResNet18ImageNet,
    SmallCNN,
    WideResNet,
    forward,
    registry,
    track,
)
from halfmoon.models.vectors import Standardize

CASES = [  # 40 channels are 20 groups of 2, 80 are 20 groups of 4, 64 are 32 groups of 2
    (ResNet9(3, 10, 4), 16),
    (ResNet9(1, 5, 3), 32),
    (ResNet9(1, 5, 10, "group"), 16),
    (ResNet9(3, 10, 3, "none"), 16),
    (SmallCNN(1, 10, 5), 8),
    (SmallCNN(3, 4, 4), 13),
    (SmallCNN(1, 4, 20, "group"), 9),
    (SmallCNN(3, 4, 4, "none"), 8),
    (WideResNet(3, 10, 2, depth=10), 8),
    (WideResNet(1, 4, 1, depth=16), 12),
    (WideResNet(1, 4, 2, "group", 10), 8),
    (WideResNet(3, 5, 1, "none", 10), 8),
    (ResNet8(3, 10, 4), 12),
    (ResNet8(1, 4, 4, "group"), 8),
    (ResNet8(3, 5, 4, "none"), 8),
]
EVERY = pytest.mark.parametrize(("network", "side"), CASES, ids=lambda value: str(value))


def close(computed, expected, tolerance=1e-10) -> None:
    torch.testing.assert_close(computed, expected, rtol=tolerance, atol=tolerance)


@EVERY
def test_training_equals_the_module(network, side):
    model, x, y = make_example(network, side)
    oracle = load_weights(build_module(network), model)
    logits, _ = network.train(model["params"], x)
    close(logits, oracle(x))
    F.cross_entropy(oracle(x), y).backward()
    actual = tree.flatten(grad(lambda params: F.cross_entropy(network.train(params, x)[0], y))(model["params"]))
    expected = {name.replace(".", "/"): p.grad for name, p in oracle.named_parameters()}
    assert actual.keys() == expected.keys()
    for name, gradient in actual.items():
        close(gradient, expected[name])


@EVERY
def test_tracking_equals_the_module(network, side):
    """Running means and unbiased variances after three passes over different images, then the logits in eval mode.
    Where nothing is tracked, statistics and moments are {} and stay so."""
    model, x, _ = make_example(network, side)
    oracle = load_weights(build_module(network), model)
    stats = model["stats"]
    for factor in (1.0, 0.5, 2.0):
        _, moments = network.train(model["params"], x * factor + factor)
        stats = track(stats, moments)
        oracle(x * factor + factor)
    buffers = dict(oracle.named_buffers())
    assert len(stats) == sum(name.endswith("running_var") for name in buffers)
    assert bool(stats) == (network.norm == "batch")
    for layer, each in stats.items():
        close(each["mean"], buffers[f"{layer}.norm.running_mean"])
        close(each["var"], buffers[f"{layer}.norm.running_var"])
    close(network.predict(model["params"], stats, x), oracle.eval()(x))


@EVERY
def test_prediction_equals_the_module_for_each_image(network, side):
    """Under tracked statistics an image's logits do not depend on its neighbors; the gradient is the module's."""
    model, x, y = make_example(network, side)
    oracle = load_weights(build_module(network), model)
    oracle.eval()
    logits = network.predict(model["params"], model["stats"], x)
    close(logits, oracle(x))
    close(network.predict(model["params"], model["stats"], x[2:3]), logits[2:3])
    F.cross_entropy(oracle(x), y).backward()
    made = grad(lambda p: F.cross_entropy(network.predict(p, model["stats"], x), y))(model["params"])
    for name, p in oracle.named_parameters():
        close(tree.flatten(made)[name.replace(".", "/")], p.grad)


@EVERY
def test_networks_have_no_side_effect(network, side):
    model, x, _ = make_example(network, side)
    copy = tree.map(torch.clone, model)
    _, moments = network.train(model["params"], x)
    network.predict(model["params"], model["stats"], x)
    track(model["stats"], moments)
    assert max_difference(model, copy) == 0


@pytest.mark.parametrize(
    ("network", "parameters", "tracked"),
    [
        (WideResNet(3, 10), 1_467_610, 3_616),
        (WideResNet(3, 100), 1_467_610 + 90 * 129, 3_616),
        (WideResNet(3, 100, 8), 23_401_012, 14_368),
        (ResNet9(3, 10), 6_575_370, 2 * 2_240),
        (ResNet9(1, 10), 6_574_218, 2 * 2_240),
        (ResNet9(norm="none"), 9 * 729_280 + 5_120, 0),
        (ResNet9(norm="group"), 6_575_370, 0),
        (ResNet8(3, 10), 1_227_594, 2 * (3 * 64 + 3 * 128 + 3 * 256)),
        (ResNet18(3, 10), 11_173_962, 9_600),
        (ResNet18ImageNet(3, 1000), 11_689_512, 9_600),
    ],
    ids=str,
)
def test_networks_have_the_sizes_of_their_papers(network, parameters: int, tracked: int) -> None:
    """ResNet-8 has ProxyFL's 1.23 million, with ImageNet's stem ResNet-18 has torchvision's 11,689,512.
    ResNet-9 without normalization has FedMatch's 6,568,640. In the convolutions are 9 * (3 * 64 + 64 * 128 + 2 * 128^2
    + 128 * 256 + 256 * 512 + 2 * 512^2) = 9 * 729,280, in the head 512 * 10, and there is no bias. Its normalized
    channels are 64 + 3 * 128 + 256 + 3 * 512 = 2,240. GroupNorm (FedRGD) has the parameters of batch normalization."""
    with torch.device("meta"):
        model = network.init(torch.Generator())
    assert (tree.numel(model["params"]), tree.numel(model["stats"])) == (parameters, tracked)


@pytest.mark.parametrize("network", [network for network, _ in CASES], ids=str)
def test_parameters_have_the_modules_names_and_shapes(network):
    actual = {
        path.replace("/", "."): leaf.shape
        for path, leaf in tree.flatten(network.init(torch.Generator())["params"]).items()
    }
    assert list(actual.items()) == [(name, p.shape) for name, p in build_module(network).named_parameters()]


@pytest.mark.parametrize("norm", ["batch", "group"])
@pytest.mark.parametrize("kind", [ResNet9, SmallCNN])
def test_initialization_draws_what_pytorch_draws(kind, norm):
    """Layer by layer what `nn.Conv2d` and `nn.Linear` draw for weight and bias: U(-b, b) with b = 1 / sqrt(fan in).
    The weight comes from PyTorch's own initializer. Normalizations start at weight 1, bias 0, mean 0, variance 1."""
    model = kind(3, 10, 4, norm).init(torch.Generator().manual_seed(5))
    g = torch.Generator().manual_seed(5)
    for module_params in model["params"].values():
        weight, bias = module_params.get("conv", module_params).values()
        close(weight, nn.init.kaiming_uniform_(torch.empty_like(weight), a=5**0.5, generator=g), 1e-6)
        bound = weight[0].numel() ** -0.5
        close(bias, torch.empty_like(bias).uniform_(-bound, bound, generator=g), 1e-6)
        if "norm" in module_params:
            assert (module_params["norm"]["weight"] == 1).all()
            assert not module_params["norm"]["bias"].any()
    for stats in model["stats"].values():
        assert not stats["mean"].any()
        assert (stats["var"] == 1).all()


def test_initialization_without_normalization_is_fedmatchs():
    """Variance 1 / fan in, normal, cut at two deviations of the uncut normal: std / 0.8796 * 2 = 2.2737 std.
    0.8796 is the deviation of the standard normal cut at 2: sqrt(1 - 4 phi(2) / (2 Phi(2) - 1)) with phi(2) =
    0.0539910 and 2 Phi(2) - 1 = 0.9544997, so sqrt(1 - 0.2262588) = 0.8796257."""
    params = ResNet9(3, 10, 32, "none").init(rng.generator(0, "init"))["params"]
    for leaf in tree.leaves(params):
        std = leaf[0].numel() ** -0.5
        assert float(leaf.abs().max()) <= std * 2 / 0.8796256
        if leaf.numel() > 5000:
            assert float(leaf.abs().max()) > std * 2.26
            assert float(leaf.std()) == pytest.approx(std, rel=0.02)
            assert abs(float(leaf.mean())) < 0.02 * std


def test_initialization_follows_the_generator():
    """One seed gives the same bits, another one other weights in every drawn leaf; layers of one shape differ."""
    for network in (WideResNet(1, 4, 1, depth=10), ResNet9(1, 4, 4)):
        one, two, other = (tree.flatten(network.init(rng.generator(seed, "x"))["params"]) for seed in (0, 0, 1))
        drawn = [path for path in one if "/norm/" not in path and path != "head/bias"]
        assert all(torch.equal(one[path], two[path]) for path in one)
        assert len(drawn) > 8
        assert not any(torch.equal(one[path], other[path]) for path in drawn)
    assert not torch.equal(one["res1a/conv/weight"], one["res1b/conv/weight"])


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("resnet9", [(16, 16), (32, 32), (24, 40)], [(8, 8), (28, 28), (32, 30), (0, 16)]),
        ("small", [(4, 4), (8, 8), (28, 31)], [(3, 8), (8, 3)]),
        ("wrn", [(8, 8), (12, 28), (32, 32)], [(4, 4), (8, 4), (30, 32), (32, 31), (0, 8)]),
        ("resnet8", [(8, 8), (12, 28)], [(4, 4), (30, 32)]),
        ("resnet18", [(8, 8), (28, 28)], [(7, 8)]),
        ("resnet18-imagenet", [(32, 33)], [(28, 28)]),
    ],
)
def test_check_refuses_images_that_do_not_fit(name, good, bad):
    network = NETWORKS[name](1, 3, 2)
    params = network.init(torch.Generator())["params"]
    for sides in good:
        network.check((1, *sides))
        assert network.train(params, torch.randn(2, 1, *sides))[0].shape == (2, 3)
    for sides in bad:
        with pytest.raises(UserError, match=f"{sides[0]}x{sides[1]}"):
            network.check((1, *sides))


def test_joint_pass_shares_statistics_and_separate_passes_do_not():
    network = SmallCNN(1, 4, 4)
    params = tree.to(network.init(torch.Generator().manual_seed(0)), dtype=torch.float64)["params"]
    a, b, c = (torch.randn(n, 1, 8, 8, dtype=torch.float64) + n for n in (2, 3, 4))
    whole, moments = network.train(params, torch.cat([a, b, c]))
    (one, two), (three,), passes = forward(network, params, True, (a, b), (c,))
    assert torch.equal(torch.cat([one, two, three]), whole)
    assert len(passes) == 1
    assert max_difference(passes[0], moments) == 0
    (one, two), (three,), passes = forward(network, params, False, (a, b), (c,))
    for made, group, moments in zip((three, one, two), (c, a, b), passes, strict=True):
        logits, single = network.train(params, group)
        assert torch.equal(made, logits)
        assert max_difference(moments, single) == 0


@pytest.mark.parametrize("joint", [True, False])
def test_frozen_groups_pass_no_gradient(joint):
    """Pseudo-labels' logits and all moments are constants; in a joint pass they still shift the batch statistics."""
    network = SmallCNN(1, 4, 4)
    params = tree.map(lambda leaf: leaf.requires_grad_(), network.init(torch.Generator().manual_seed(0))["params"])
    a = torch.randn(3, 1, 8, 8)
    c = torch.randn(4, 1, 8, 8)
    (one,), (three,), passes = forward(network, params, joint, (a,), (c,))
    assert one.requires_grad
    assert not three.requires_grad
    assert not any(leaf.requires_grad for moments in passes for leaf in tree.leaves(moments))
    single, _ = network.train(params, a)
    assert torch.equal(single, one) is not joint


def test_mean_of_one_pixel_is_that_pixel():
    """A batch of one whose last map is a single pixel: the normalized value is 0, so only the biases speak.
    With weights 1 and biases 0 the last block is then relu(0) = 0, and the logits are the head's bias."""
    network = SmallCNN(1, 3, 2)
    params = network.init(torch.Generator().manual_seed(0))["params"]
    logits, moments = network.train(params, torch.randn(1, 1, 4, 4))
    torch.testing.assert_close(logits[0], params["head"]["bias"])
    assert all(leaf.isfinite().all() for leaf in tree.leaves(moments))
    assert float(moments["conv3"]["var"].abs().max()) < 1e-9


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("width", [48, 60, 240])
def test_the_number_of_parameters_is_known_without_building(name: str, width: int) -> None:
    kind = NETWORKS[name]
    network = kind(channels=3, classes=7, norm="none" if kind.fixed_norm else "batch", width=width)
    with torch.device("meta"):
        assert registry.count_parameters(network) == tree.numel(network.init(torch.Generator())["params"])


def test_vectors_are_standardized() -> None:
    normalize = Standardize(center=torch.tensor([1.0, 1.0, 2.0]), scale=torch.tensor([2.0, 0.5, 1.0]))
    vectors = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]).reshape(2, 1, 1, 3)
    assert normalize(vectors).tolist() == [[0.0, 0.5, 1.0], [6.0, 2.0, 4.0]]
