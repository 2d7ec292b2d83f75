"""Residual networks: sizes, initialization, depths, torchvision's names; what they compute is in test_models."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from halfmoon.core import rng, tree
from halfmoon.core.errors import UserError
from halfmoon.models import NETWORKS, ResNet8, ResNet18, ResNet18ImageNet, WideResNet
from halfmoon.models.finetuned import fine_tune
from halfmoon.models.weights import read_weights_file


def parts(model) -> tuple[int, int, int]:
    """Return the parameters of the convolutions, of the normalizations and of the head."""
    flat = tree.flatten(model["params"])
    kinds = ("/conv/", "/norm/", "head/")
    return tuple(sum(leaf.numel() for path, leaf in flat.items() if kind in path) for kind in kinds)


def test_wrn_28_2_is_counted_by_hand():
    """WRN-28-2 with 3 channels and 10 classes: 1,462,704 + 3,616 + 1,290 = 1,467,610.
    Convolutions: stem 9*3*16 = 432. Group 1: 9*(16*32 + 7*32^2) + 16*32 = 69,632. Group 2: 9*(32*64 + 7*64^2) + 32*64
    = 278,528. Group 3: 9*(64*128 + 7*128^2) + 64*128 = 1,114,112. Normalized channels: 16 + 7*32, 32 + 7*64, 64 + 7*128
    and at the end 128, together 1,808, each with a weight, a bias, a mean and a variance."""
    model = WideResNet(3, 10).init(torch.Generator())
    assert parts(model) == (432 + 69_632 + 278_528 + 1_114_112, 2 * 1_808, 1_290) == (1_462_704, 3_616, 1_290)


def test_without_normalization_there_are_convolutions_and_the_heads_weight():
    """1,462,704 in the convolutions and 128 * 10 in the head; group normalization has the 1,808 weights and biases."""
    bare = WideResNet(norm="none").init(torch.Generator())
    assert parts(bare) == (1_462_704, 0, 1_280)
    assert bare["stats"] == {}
    assert all(unit for unit in bare["params"].values())
    for network in (ResNet8(norm="none"), ResNet18(width=2, norm="none")):
        assert "bias" not in network.init(torch.Generator())["params"]["head"]
    grouped = WideResNet(norm="group").init(torch.Generator())
    assert parts(grouped) == (1_462_704, 3_616, 1_290)
    assert grouped["stats"] == {}


@pytest.mark.parametrize("norm", ["batch", "group", "none"])
def test_initialization_is_semifls(norm):
    """Convolutions N(0, 2 / (outputs * kernel^2)): fan out; the head U(-b, b), b = 1 / sqrt(128), with bias 0.
    A 3x3 from 64 to 128 channels has the deviation sqrt(2 / 1152) = 1/24 by fan out, and sqrt(2 / 576) = 0.0589 by fan
    in: the mean of 73,728 squares tells them apart."""
    params = WideResNet(3, 10, norm=norm).init(rng.generator(0, "init"))["params"]
    assert float(params["block9a"]["conv"]["weight"].std()) == pytest.approx(1 / 24, rel=0.02)
    for path, leaf in tree.flatten(params).items():
        if "/conv/" in path and leaf.numel() > 1000:
            std = (2 / (leaf.shape[0] * leaf.shape[2] * leaf.shape[3])) ** 0.5
            assert float(leaf.std()) == pytest.approx(std, rel=0.06), path
            assert float(leaf.abs().max()) > 2.5 * std  # no uniform, no cut
        if "/norm/" in path:
            assert (leaf == float(path.endswith("weight"))).all()
    weight = params["head"]["weight"]
    assert 0.98 * 128**-0.5 < float(weight.abs().max()) <= 128**-0.5
    assert not params["head"].get("bias", torch.zeros(1)).any()


def test_shortcuts_stand_where_channels_change():
    """Blocks 1, 5 and 9 of WRN-28-2 have one; of WRN-28-1, whose first group has the stem's 16 channels, 5 and 9."""
    for k, expected in ((2, [1, 5, 9]), (1, [5, 9])):
        params = WideResNet(3, 10, k).init(torch.Generator())["params"]
        assert [n for n in range(1, 13) if f"block{n}shortcut" in params] == expected
        assert params["block5shortcut"]["conv"]["weight"].shape == (32 * k, 16 * k, 1, 1)


@pytest.mark.parametrize("depth", [4, 9, 12, 27, 29])
def test_other_depths_are_refused(depth):
    """6 n + 4 with n of at least 1: 4 has no block, 12, 27 and 29 are between."""
    with pytest.raises(UserError, match=f"not {depth};"):
        NETWORKS["wrn"](depth=depth)


@pytest.mark.parametrize("depth", [10, 16, 40])
def test_depth_counts_the_layers(depth):
    """6 n + 4 convolutions: 6 n in the blocks, the stem and, where k is at least 2, three shortcuts (n = 1, 2, 6)."""
    params = WideResNet(3, 10, 2, depth=depth).init(torch.Generator())["params"]
    assert sum("conv" in unit for unit in params.values()) == depth


class BasicBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        short = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))
        self.downsample = short if inputs != outputs else None

    def forward(self, z: Tensor) -> Tensor:
        short = z if self.downsample is None else self.downsample(z)
        return F.relu(short + self.bn2(self.conv2(F.relu(self.bn1(self.conv1(z))))))


class Textbook(nn.Module):
    """The layers under the names that torchvision's and timm's state dicts have."""

    def __init__(self, w: int, classes: int, imagenet: bool) -> None:
        super().__init__()
        self.imagenet = imagenet
        self.conv1 = nn.Conv2d(3, w, 7, 2, 3, bias=False) if imagenet else nn.Conv2d(3, w, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(w)
        inputs = w
        for number in range(4):
            outputs = w * 2**number
            first = BasicBlock(inputs, outputs, 1 if number == 0 else 2)
            setattr(self, f"layer{number + 1}", nn.Sequential(first, BasicBlock(outputs, outputs, 1)))
            inputs = outputs
        self.fc = nn.Linear(inputs, classes)

    def forward(self, x: Tensor) -> Tensor:
        z = F.relu(self.bn1(self.conv1(x)))
        z = F.max_pool2d(z, 3, 2, 1) if self.imagenet else z
        for number in range(4):
            z = getattr(self, f"layer{number + 1}")(z)
        return self.fc(z.mean((2, 3)))


@pytest.mark.parametrize("imagenet", [False, True])
def test_it_is_the_module_whose_state_dict_it_takes(tmp_path: Path, imagenet: bool) -> None:
    """In training and under tracked statistics; tangents from the tape are those of forward mode."""
    torch.manual_seed(0)
    module = Textbook(4, 5, imagenet)
    x = torch.randn(4, 3, 36, 32)
    module.train()(x)  # statistics that are not at their start
    save_file(module.state_dict(), tmp_path / "w.safetensors")
    network = (ResNet18ImageNet if imagenet else ResNet18)(3, 5, 4)
    which = fine_tune(network, read_weights_file(str(tmp_path / "w.safetensors")), (), tuple("abcde"))
    model = tree.to(which.init(rng.generator(0, "x")), dtype=torch.float64)
    module = module.double()
    x = x.double()
    torch.testing.assert_close(which.predict(model["params"], model["stats"], x), module.eval()(x).detach())
    torch.testing.assert_close(which.train(model["params"], x)[0], module.train()(x).detach())
    along = tree.map(torch.randn_like, model["params"])
    tape = network.linearize(model["params"], x)[1]
    moved = network.tangent(model["params"], x, tape, along)
    expected = torch.func.jvp(lambda p: network.train(p, x)[0], (model["params"],), (along,))[1]
    torch.testing.assert_close(moved, expected)
