"""Any `torch.nn.Module` as a network: the same numbers as a network of ours, in every executor, or a reason why not."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import custom_models
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from halfmoon.core import plugins, rng, tree
from halfmoon.core.errors import UserError
from halfmoon.core.tree import Tree
from halfmoon.federation.contract.small_federation import (
    Snapshot,
    make_dataset,
    make_simulation,
    make_task,
    max_difference,
    run_rounds,
    start_server,
)
from halfmoon.methods import registry
from halfmoon.models import SmallCNN
from halfmoon.models import registry as networks
from halfmoon.models.modules import ModuleNetwork, feature_function, from_factory

NETWORK = SmallCNN(1, 4, 4)
SIZES = ((5, 4), (3, 8), (6, 7), (4, 6))


def network(factory: str, channels: int = 1) -> ModuleNetwork:
    """Return a network of `custom_models` for images of 8x8 pixels and four classes."""
    return from_factory(f"custom_models:{factory}", channels, 4, (8, 8))


def as_theirs(model: Tree) -> Tree:
    """Name the statistics of our small network as the module's layers are called."""
    return {"params": model["params"], "stats": {name: {"norm": each} for name, each in model["stats"].items()}}


def simulate(which, name: str, executor: str, model: Tree, separate: bool = False) -> Snapshot:
    rules = {"statistics": "separate", "labeling": "running"} if separate else {}
    shared = make_task(which, rounds=3, **rules)
    method = registry.make(name)
    simulation = make_simulation(method, shared, make_dataset(SIZES), executor=executor)
    return run_rounds(method, simulation, method.start(shared, tree.to(model, dtype=torch.float64)), range(2))[-1]


@pytest.mark.parametrize("name", ["feddure", "semifl", "fedloke"])
@pytest.mark.parametrize(("executor", "separate"), [("loop", False), ("vmap", True)])
def test_a_module_trains_as_our_network_does(name: str, executor: str, separate: bool) -> None:
    """The small network as an nn.Module, from the same weights: two rounds, every parameter and statistic.
    To the bit where nothing is differentiated forward; FedDure's tangents come from the tape there, from jvp here."""
    model = NETWORK.init(rng.generator(0, "model"))
    actual = simulate(NETWORK, name, executor, model, separate).server
    expected = simulate(network("build_small"), name, executor, as_theirs(model), separate).server
    parts = [key for key in ("params", "stats") if actual.get(key)]
    assert parts == ["params", "stats"]
    gap = max_difference({key: expected[key] for key in parts}, {**as_theirs(actual)})
    assert gap < 1e-12 if name == "feddure" else gap == 0


@pytest.mark.parametrize(
    ("factory", "name"),
    [
        ("build_small_group_norm", "feddure"),
        ("build_small_group_norm", "fedloke"),
        ("PatchAttention", "feddure"),
        ("PatchAttention", "semifl"),
    ],
)
def test_other_normalizations_stay_as_they_are(factory: str, name: str) -> None:
    """Group and layer normalization, attention: nothing is tracked, and the loop equals vmap."""
    which = network(factory)
    model = which.init(rng.generator(0, "model"))
    assert model["stats"] == {}
    loop, vmap = (simulate(which, name, executor, model).server for executor in ("loop", "vmap"))
    assert max_difference(vmap, loop) < 1e-9
    assert max_difference(loop["params"], tree.to(model["params"], dtype=torch.float64)) > 1e-4


def test_passes_equal_those_of_built_in_networks() -> None:
    which = network("build_small")
    x = torch.randn(6, 1, 8, 8)
    model = NETWORK.init(rng.generator(3, "model"))
    expected = as_theirs(model)
    logits, moments = NETWORK.train(model["params"], x)
    their_logits, their_moments = which.train(expected["params"], x)
    assert torch.equal(logits, their_logits)
    assert max_difference(their_moments, as_theirs({"params": {}, "stats": moments})["stats"]) == 0
    assert torch.equal(NETWORK.embed(model["params"], x)[1], which.embed(expected["params"], x)[1])
    assert torch.equal(NETWORK.predict(model["params"], model["stats"], x), which.predict(**expected, x=x))


def test_features_are_those_of_the_module() -> None:
    """Of a model whose statistics are those of trained networks, not the first ones; several threads may ask."""
    which = network("ConvRows", 3)
    x = torch.randn(6, 3, 8, 8)
    model = which.init(rng.generator(4, "model"))
    model["stats"] = tree.map(lambda leaf: torch.rand_like(leaf) + 0.5, model["stats"])
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(feature_function(which, model), x.split(3)))
    torch.testing.assert_close(torch.cat(found), which.represent(model["params"], model["stats"], x)[1])


def test_a_module_is_drawn_from_the_generator() -> None:
    """Equal seeds give equal weights, others give others, and PyTorch's generator is left alone."""
    which = network("build_small")
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    one, two, other = (which.init(rng.generator(seed, "model")) for seed in (0, 0, 1))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert max_difference(one, two) == 0
    assert max_difference(one["params"], other["params"]) > 0.01
    with torch.device("meta"):
        assert {leaf.device.type for leaf in tree.leaves(which.init(torch.Generator()))} == {"meta"}


def flat(inputs: int = 64, outputs: int = 4) -> tuple[nn.Module, nn.Module]:
    """Return the last layers of a network for one channel of 8x8 pixels."""
    return nn.Flatten(), nn.Linear(inputs, outputs)


class Counting(nn.Sequential):
    """Keeps something between passes."""

    def forward(self, input: Tensor) -> Tensor:
        self.seen.add_(1)
        return super().forward(input)


def counting(**_: Any) -> nn.Module:
    module = Counting(*flat())
    module.register_buffer("seen", torch.zeros(()))
    return module


class Looking(nn.Sequential):
    """Decides by the values of its images."""

    def forward(self, input: Tensor) -> Tensor:
        z = super().forward(input)
        return z if z.sum() > 0 else -z


class Reusing(nn.Sequential):
    """Normalizes twice by one layer."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(self[0](input))


class Turned(nn.Sequential):
    """Passes images (B, C, H, W) as (H, C, W, B)."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.permute(2, 1, 3, 0)).permute(3, 1, 0, 2)


class Attending(nn.Module):
    """Attention between the eight rows of an image."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, dropout=p, batch_first=True)
        self.dropout = nn.Dropout(0.3)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        z = x[:, 0]
        return self.head(self.dropout(z + self.attention(z, z, z, need_weights=False)[0]).mean(1))


@pytest.mark.parametrize(
    ("factory", "why"),
    [
        (
            lambda **_: nn.Sequential(nn.AlphaDropout(0.1), *flat()),
            "layer 0 .AlphaDropout. draws random numbers; of such",
        ),
        (lambda **_: nn.Sequential(nn.RReLU(), *flat()), "layer 0 .RReLU. draws random numbers; of such"),
        (
            lambda **_: nn.Sequential(Turned(nn.Dropout(0.1)), *flat()),
            "layer 0.0 .Dropout. gets .8, 1, 8, 11. for 11 images",
        ),
        (lambda **_: Attending(0.1), "layer attention .MultiheadAttention. drops attention weights"),
        (lambda **_: nn.Sequential(nn.Flatten(2), nn.LSTM(64, 4)), "layer 1 .LSTM. is no layer that vmap can lift"),
        (counting, "a pass changes its buffer seen"),
        (lambda **_: Looking(*flat()), "two images at two clients raised"),
        (lambda **_: Reusing(nn.BatchNorm2d(1), *flat()), "layer 0 normalizes batches in two places"),
        (
            lambda **_: nn.Sequential(nn.BatchNorm2d(1, track_running_stats=False), *flat()),
            "layer 0 .BatchNorm2d. tracks no statistics",
        ),
        (lambda **_: nn.Sequential(*flat(outputs=3)), "for 2 images and 4 classes it returns .2, 3., not .2, 4."),
        (lambda **_: nn.Sequential(*flat(inputs=1024)), "two images at two clients raised RuntimeError"),
        (lambda **_: 3, "its factory has to return an nn.Module"),
        (lambda channels: nn.Flatten(), "unexpected keyword argument 'classes'"),
    ],
)
def test_network_that_cannot_be_converted_is_refused_with_a_reason(factory, why: str) -> None:
    name = f"bad_{getattr(factory, '__name__', 'x').strip('<>')}_{why[:9].replace(' ', '_')}"
    plugins.register("network", name, factory)
    with pytest.raises(UserError, match=why) as caught:
        from_factory(name, 1, 4, (8, 8)).check((1, 8, 8))
    assert str(caught.value).count("\n") == 0


def test_network_is_rebuilt_from_its_description() -> None:
    for which in (network("build_small"), NETWORK, SmallCNN(3, 2, 5, "group")):
        assert networks.from_description(networks.describe(which)) == which
    for text in (
        {"name": "smal"},
        {"name": "custom_models:build_small"},
        {"name": "small", "width": 0},
        {"name": "small", "a": 1},
    ):
        with pytest.raises(UserError):
            networks.from_description(text)


def test_heterofl_explains_why_a_module_cannot_be_sliced() -> None:
    """Its leading channels are known of our networks alone."""
    which = network("build_small_group_norm")
    with pytest.raises(UserError, match="leading channels"):
        registry.make("heterofl").client_updates(make_task(which))
    assert custom_models.__doc__
    assert start_server(registry.make("fedavg"), make_task(which))


class Held(nn.Sequential):
    """Replies as the models of transformers do: with an object that has logits."""

    def forward(self, input: Tensor) -> Any:
        return SimpleNamespace(logits=super().forward(input))


def test_factory_can_provide_weights(tmp_path: Path) -> None:
    """Read from a file in make: every seed starts from them, and the head, which make draws anew, follows the seed."""
    body = nn.Linear(64, 8)
    save_file({name: leaf.detach().clone() for name, leaf in body.named_parameters()}, tmp_path / "body.safetensors")

    def make(channels: int, classes: int, size: tuple[int, int]) -> nn.Module:
        first = nn.Linear(channels * 64, 8)
        first.load_state_dict(load_file(tmp_path / "body.safetensors"))
        return Held(nn.Flatten(), first, nn.ReLU(), nn.Linear(8, classes))

    plugins.register("network", "brings", make)
    which = from_factory("brings", 1, 4, (8, 8))
    which.check((1, 8, 8))
    one, two = (which.init(rng.generator(seed, "model"))["params"] for seed in (0, 1))
    assert torch.equal(one["1"]["weight"], body.weight)
    assert torch.equal(two["1"]["weight"], body.weight)
    assert not torch.equal(one["3"]["weight"], two["3"]["weight"])
    assert which.head == "3"
