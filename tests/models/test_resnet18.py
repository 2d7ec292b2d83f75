"""ResNet-18: torchvision's sizes and names, and what it computes beside a torch module with these names."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from halfmoon.core import rng, tree
from halfmoon.core.errors import UserError
from halfmoon.models import NETWORKS, ResNet18, ResNet18ImageNet
from halfmoon.models.finetuned import finetuned
from halfmoon.models.weights import read


class BasicBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs)
        self.conv2, self.bn2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs)
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
        self.bn1, inputs = nn.BatchNorm2d(w), w
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
    which = finetuned(network, read(str(tmp_path / "w.safetensors")), (), tuple("abcde"))
    model = tree.to(which.init(rng.generator(0, "x")), dtype=torch.float64)
    module, x = module.double(), x.double()
    torch.testing.assert_close(which.predict(model["params"], model["stats"], x), module.eval()(x).detach())
    torch.testing.assert_close(which.train(model["params"], x)[0], module.train()(x).detach())
    along = tree.map(torch.randn_like, model["params"])
    tape = network.linearize(model["params"], x)[1]
    moved = network.tangent(model["params"], x, tape, along)
    expected = torch.func.jvp(lambda p: network.train(p, x)[0], (model["params"],), (along,))[1]
    torch.testing.assert_close(moved, expected)


def test_it_has_the_known_sizes():
    """11,173,962 parameters with the small stem and 10 classes, 11,689,512 with ImageNet's and 1,000."""
    with torch.device("meta"):
        sizes = [
            tree.size(network.init(torch.Generator())["params"])
            for network in (NETWORKS["resnet18"](3, 10), NETWORKS["resnet18-imagenet"](3, 1000))
        ]
    assert sizes == [11_173_962, 11_689_512]
    assert "bias" not in ResNet18(width=2, norm="none").init(torch.Generator())["params"]["head"]


def test_images_that_are_too_small_are_refused():
    NETWORKS["resnet18"]().check((3, 28, 28))
    with pytest.raises(UserError, match="at least 32x32 pixels, not 28x28"):
        NETWORKS["resnet18-imagenet"]().check((3, 28, 28))
