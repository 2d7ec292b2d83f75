"""ResNet-8: its size, and what it computes beside a torch module."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_models import normalization

from halfmoon.core import rng, tree
from halfmoon.core.errors import UserError
from halfmoon.models import NETWORKS, ResNet8


class Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, norm: str) -> None:
        super().__init__()
        stride = 1 if inputs == outputs else 2
        self.a = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.b = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.na, self.nb, self.ns = (normalization(outputs, norm) for _ in range(3))
        self.s = nn.Conv2d(inputs, outputs, 1, stride, bias=False) if stride == 2 else None

    def forward(self, z: Tensor) -> Tensor:
        short = z if self.s is None else self.ns(self.s(z))
        return F.relu(short + self.nb(self.b(F.relu(self.na(self.a(z))))))


class Textbook(nn.Module):
    def __init__(self, w: int, norm: str) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, w, 3, 1, 1, bias=False), normalization(w, norm)
        self.blocks = nn.ModuleList([Block(w, w, norm), Block(w, 2 * w, norm), Block(2 * w, 4 * w, norm)])
        self.head = nn.Linear(4 * w, 10, bias=norm != "none")

    def forward(self, x: Tensor) -> Tensor:
        z = F.relu(self.norm(self.stem(x)))
        for block in self.blocks:
            z = block(z)
        return self.head(z.mean((2, 3)))


def twin(params: dict, w: int, norm: str) -> Textbook:
    """Return the module with these parameters."""
    model = Textbook(w, norm).double()

    def take(conv: nn.Module | None, normalized: nn.Module, unit: str) -> None:
        if conv is not None:
            conv.weight.data = params[unit]["conv"]["weight"]
            if norm != "none":
                normalized.weight.data, normalized.bias.data = params[unit]["norm"].values()

    take(model.stem, model.norm, "stem")
    for number, block in enumerate(model.blocks, 1):
        take(block.a, block.na, f"block{number}a")
        take(block.b, block.nb, f"block{number}b")
        take(block.s, block.ns, f"block{number}shortcut")
    model.head.weight.data = params["head"]["weight"]
    if "bias" in params["head"]:
        model.head.bias.data = params["head"]["bias"]
    return model


@pytest.mark.parametrize("norm", ["batch", "group", "none"])
def test_it_computes_what_the_module_does(norm):
    """In training and under tracked statistics, with normalizations that are not at their start."""
    network = ResNet8(3, 10, 4, norm)
    model = tree.to(network.init(rng.generator(0, "x")), dtype=torch.float64)
    g = rng.generator(1, "y")
    params = tree.map(lambda leaf: leaf + 0.1 * torch.randn(leaf.shape, generator=g).double(), model["params"])
    x = torch.randn(5, 3, 12, 8, generator=g).double()
    module = twin(params, 4, norm)
    torch.testing.assert_close(network.train(params, x)[0], module.train()(x).detach(), rtol=1e-9, atol=1e-10)
    if norm != "batch":
        torch.testing.assert_close(network.predict(params, {}, x), module(x).detach(), rtol=1e-9, atol=1e-10)
    else:
        fresh = twin(params, 4, norm).eval()
        torch.testing.assert_close(network.predict(params, model["stats"], x), fresh(x).detach(), rtol=1e-9, atol=1e-9)


def test_it_has_the_papers_size():
    """1,227,594 parameters at width 64: the 1.23 million of ProxyFL; statistics of nine normalizations."""
    model = ResNet8(3, 10).init(torch.Generator())
    assert tree.size(model["params"]) == sum(p.numel() for p in Textbook(64, "batch").parameters()) - 2 * 64
    assert tree.size(model["params"]) == 1_227_594  # the module's first block has a normalization that it does not use
    assert tree.size(model["stats"]) == 2 * (3 * 64 + 3 * 128 + 3 * 256)
    assert "bias" not in ResNet8(norm="none").init(torch.Generator())["params"]["head"]


def test_sides_that_do_not_halve_are_refused():
    NETWORKS["resnet8"]().check((3, 32, 32))
    with pytest.raises(UserError, match="multiples of 4 and at least 8, not 30x32"):
        NETWORKS["resnet8"]().check((3, 30, 32))
