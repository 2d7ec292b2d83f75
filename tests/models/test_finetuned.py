"""Weights to start from: only the trained part is a model, wherever it runs; a mistake is one sentence."""

import json
import sys
from pathlib import Path
from types import ModuleType

import custom_models
import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch_models import TorchSmall

from halfmoon.api.uploads import Upload
from halfmoon.core import hubs, rng, tree, weight_files
from halfmoon.core.errors import UserError
from halfmoon.core.tree import Tree
from halfmoon.federation.contract.checks import check_sites, run_experiment
from halfmoon.federation.contract.small_federation import (
    make_simulation,
    make_task,
    max_difference,
    run_rounds,
    trees_equal,
)
from halfmoon.methods import registry
from halfmoon.models import Network, ResNet8, SmallCNN
from halfmoon.models import hubs as model_hubs
from halfmoon.models import registry as networks
from halfmoon.models.finetuned import FineTunedNetwork, fine_tune
from halfmoon.models.modules import from_factory
from halfmoon.models.weights import read_weights_file

NAMES = ("a", "b", "c", "d")
NETWORK = SmallCNN(1, 4, 4)


def given(network: Network = NETWORK, seed: int = 7) -> Tree:
    """Return a model whose statistics are not at their start."""
    model = network.init(rng.generator(seed, "model"))
    g = rng.generator(seed, "noise")
    stats = tree.map(lambda leaf: leaf + 0.3 * torch.rand(leaf.shape, generator=g), model["stats"])
    return {"params": model["params"], "stats": stats}


def saved(path: Path, tensors: Tree, classes: tuple[str, ...] | None = None) -> str:
    text = {} if classes is None else {"classes": json.dumps(classes)}
    save_file({name: leaf.contiguous() for name, leaf in tree.flatten(tensors).items()}, path, text)
    return str(path)


def partly(tmp_path: Path, *patterns: str, network: Network = NETWORK, model: Tree | None = None) -> FineTunedNetwork:
    path = saved(tmp_path / "w.safetensors", given() if model is None else model)
    return fine_tune(network, read_weights_file(path), patterns, NAMES[: network.classes])


def test_model_has_trained_layers_and_the_complete_network_is_reassembled(tmp_path: Path) -> None:
    """A frozen backbone leaves 36 numbers; the whole has all tensors, and every pass says what the whole one says.
    To rounding: where in memory a weight lies decides how some processors add up (seen with AVX2 alone)."""
    model = given()
    which = partly(tmp_path, "backbone")
    initial_model = which.init(rng.generator(0, "model"))
    assert {path: leaf.shape for path, leaf in tree.flatten(initial_model).items()} == {
        "params/head/weight": (4, 8), "params/head/bias": (4,),
    }  # fmt: skip
    assert (which.norm, which.head, initial_model["stats"], which.zero_moments(initial_model["params"])) == (
        "none",
        "head",
        {},
        {},
    )
    network, whole = which.full_model(initial_model)
    assert network == NETWORK
    assert trees_equal(whole, model)
    x = torch.randn(6, 1, 8, 8)
    logits, features = NETWORK.represent(model["params"], model["stats"], x)
    torch.testing.assert_close(which.predict(initial_model["params"], {}, x), logits)
    torch.testing.assert_close(which.embed(initial_model["params"], x), (logits, features, {}))
    with torch.device("meta"):
        assert tree.numel(which.init(torch.Generator())) == 36


def test_gradient_and_tangent_of_a_head_by_hand(tmp_path: Path) -> None:
    """With features F of the frozen layers, d CE / dW = (softmax - onehot)^T F / B, and moving W by D moves F D^T."""
    model = given()
    which = partly(tmp_path, "backbone")
    params = which.init(rng.generator(0, "m"))["params"]
    x = torch.randn(5, 1, 8, 8)
    y = torch.tensor([0, 1, 2, 3, 1])
    _, features = NETWORK.represent(model["params"], model["stats"], x)

    def loss(params: Tree) -> torch.Tensor:
        return nn.functional.cross_entropy(which.train(params, x)[0], y)

    gradient = torch.func.grad(loss)(params)
    gap = which.train(params, x)[0].softmax(-1) - nn.functional.one_hot(y, 4)
    torch.testing.assert_close(gradient["head"]["weight"], gap.T @ features / 5)
    torch.testing.assert_close(gradient["head"]["bias"], gap.mean(0))
    along = {"head": {"weight": torch.randn(4, 8), "bias": torch.randn(4)}}
    moved = which.tangent(params, x, which.linearize(params, x)[1], along)
    torch.testing.assert_close(moved, features @ along["head"]["weight"].T + along["head"]["bias"])


@pytest.mark.parametrize("actual", [True, False])
def test_frozen_layer_has_fixed_statistics_and_a_trained_one_does_not(tmp_path: Path, actual: bool) -> None:
    """Frozen first layer: a torch module whose first normalization is in eval mode, ours and one from outside."""
    network = NETWORK if actual else from_factory("custom_models:build_small", 1, 4, (8, 8))
    model = given(network)
    which = partly(tmp_path, "conv1", network=network, model=model)
    initial_model = which.init(rng.generator(0, "m"))
    module = TorchSmall(1, 4, 4)
    x = torch.randn(6, 1, 8, 8)
    flat = {path.replace("/", "."): leaf for path, leaf in tree.flatten(model["params"]).items()}
    flat |= {
        (f"{path}." if "norm" in path else f"{path}.norm.").replace("/", ".") + f"running_{kind}": leaf
        for place, leaf in tree.flatten(model["stats"]).items()
        for path, _, kind in [place.rpartition("/")]
    }
    module.load_state_dict(flat, strict=False)
    module.train().conv1.eval()
    logits, moments = which.train(initial_model["params"], x)
    torch.testing.assert_close(logits, module(x).detach())
    layers = {path.rpartition("/")[0].partition("/")[0] for path in tree.flatten(moments)}
    assert layers == {path.partition("/")[0] for path in tree.flatten(initial_model["stats"])} == {"conv2", "conv3"}
    assert which.norm == "batch"


@pytest.mark.parametrize(
    ("name", "patterns"),
    [
        ("feddure", ("backbone",)),
        ("fedavg-fixmatch", ("backbone",)),
        ("feddure", ("conv1", "conv2.conv")),
        ("semifl", ("conv1", "conv2.conv")),
    ],
)
def test_loop_vmap_and_messages_compute_the_same(tmp_path: Path, name: str, patterns: tuple[str, ...]) -> None:
    """Two executors to rounding, sites behind messages to the bit; what is frozen is in no message."""
    which = partly(tmp_path, *patterns)
    entry = registry.entry(name)
    loop = run_experiment(entry, "both", network=which)
    assert max_difference(run_experiment(entry, "both", "vmap", which)[-1].server, loop[-1].server) < 1e-9
    messages, _ = check_sites(entry, "both", loop, which)
    text = b"".join(messages)
    assert b"head" in text
    assert b"conv1" not in text


def test_secure_sums_noise_and_robust_rules_apply_to_trained_layers(tmp_path: Path) -> None:
    """What a cohort sends has the leaves of the head alone, and 4 bytes for each of its 36 numbers."""
    which = partly(tmp_path, "backbone")
    method = registry.make("fedavg")
    shared = make_task(which, torch.float32)
    seen: list[Upload] = []

    class Spy:
        def process_uploads(self, question, upload):
            seen.append(upload)
            return list(range(len(upload.weight))), upload

        def row(self):
            return {}

        def stop_reason(self, round):
            return None

    simulation = make_simulation(method, shared, aggregators=[Spy()])
    server = method.start(shared, which.init(rng.generator(0, "m")))
    result = run_rounds(method, simulation, server, range(1))[0]
    assert {path for path in tree.flatten(seen[0].update) if "params" in path} == {
        "params/head/weight",
        "params/head/bias",
    }
    assert tree.nbytes(result.server["params"]) == 4 * 36
    assert result.report.cost["bytes_down"] == 3 * 4 * 36


def test_head_is_reinitialized_if_its_classes_differ(tmp_path: Path) -> None:
    """Another number of classes, other names of classes in a file of ours, or no head in the file."""
    model = given()
    path = saved(tmp_path / "five.safetensors", model)
    five = fine_tune(SmallCNN(1, 5, 4), read_weights_file(path), ("backbone",), (*NAMES, "e"))
    assert five.fresh
    assert five.init(rng.generator(0, "m"))["params"]["head"]["weight"].shape == (5, 8)
    named = saved(tmp_path / "named.safetensors", model, NAMES)
    assert not fine_tune(NETWORK, read_weights_file(named), (), NAMES).fresh
    others = fine_tune(NETWORK, read_weights_file(named), (), ("w", "x", "y", "z"))
    one, two = (others.init(rng.generator(seed, "m"))["params"] for seed in (0, 1))
    assert others.fresh
    assert not torch.equal(one["head"]["weight"], two["head"]["weight"])
    assert torch.equal(one["conv1"]["conv"]["weight"], model["params"]["conv1"]["conv"]["weight"])
    headless = {"params": {k: v for k, v in model["params"].items() if k != "head"}, "stats": model["stats"]}
    assert fine_tune(
        NETWORK, read_weights_file(saved(tmp_path / "no.safetensors", headless)), ("backbone",), NAMES
    ).fresh


def test_weights_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    good = saved(tmp_path / "good.safetensors", given())
    without = {"params": {k: v for k, v in given()["params"].items() if k != "conv2"}, "stats": given()["stats"]}
    wrong = given()
    wrong["params"]["conv2"]["conv"]["weight"][0, 0, 0, 0] = float("nan")
    (tmp_path / "text.safetensors").write_text("no")
    for network, path, patterns, why in (
        (NETWORK, saved(tmp_path / "a.safetensors", without), (), "lack the tensor conv2.conv.bias of the network"),
        (SmallCNN(1, 4, 8), good, (), r"conv1.conv.bias is \(4,\), but the network's is \(8,\); give a file of this"),
        (SmallCNN(3, 4, 4), good, (), "they are for images of 1 channels, these have 3: set channels to 1"),
        (ResNet8(1, 4, 4), good, (), "lack the tensor block1a.conv.weight"),
        (NETWORK, saved(tmp_path / "b.safetensors", {**given(), "x": {"y": torch.zeros(1)}}), (), "no place"),
        (NETWORK, saved(tmp_path / "c.safetensors", wrong), (), "'params/conv2/conv/weight' holds values that are not"),
        (NETWORK, str(tmp_path / "text.safetensors"), (), "it is no safetensors file"),
        (NETWORK, str(tmp_path / "model.pth"), (), "is a pickle, which can run code"),
        (NETWORK, str(tmp_path / "none.safetensors"), (), "cannot be read .No such file"),
        (NETWORK, good, ("conv7",), "no such layer: did you mean 'conv[123]'"),
        (NETWORK, good, ("*",), "leaves nothing to train"),
        (SmallCNN(1, 3, 4), good, ("head", "conv1"), "but the head starts at random"),
    ):
        with pytest.raises(UserError, match=why):
            fine_tune(network, read_weights_file(path), patterns, NAMES[: network.classes])
    with pytest.raises(UserError, match=r"a file of weights with SHA-256 0{64}, which is not here"):
        read_weights_file(f"sha256:{'0' * 64}")
    assert read_weights_file(weight_files.register(Path(good))).tensors.keys() == read_weights_file(good).tensors.keys()


class Ending(nn.Module):
    """A convolution whose means are the logits: no head."""

    def __init__(self, channels: int, classes: int, size: tuple[int, int]) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, classes, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x).mean((2, 3))


def test_a_state_dict_of_a_module_from_outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = custom_models.build_small(1, 4, (8, 8)).eval()
    module(torch.zeros(1, 1, 8, 8))
    save_file(module.state_dict(), tmp_path / "s.safetensors")
    network = from_factory("custom_models:build_small", 1, 4, (8, 8))
    which = fine_tune(network, read_weights_file(str(tmp_path / "s.safetensors")), ("conv?",), NAMES)
    x = torch.randn(3, 1, 8, 8)
    torch.testing.assert_close(which.predict(which.init(rng.generator(0, "m"))["params"], {}, x), module(x).detach())
    monkeypatch.setattr(custom_models, "ending", Ending, raising=False)
    headless = from_factory("custom_models:ending", 1, 4, (8, 8))
    save_file(Ending(1, 4, (8, 8)).state_dict(), tmp_path / "e.safetensors")
    with pytest.raises(UserError, match="freeze backbone means every layer but the head, and this network does not"):
        fine_tune(headless, read_weights_file(str(tmp_path / "e.safetensors")), ("backbone",), NAMES)


def test_network_of_torchvision_is_loaded_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """The door alone, with a stand-in for the package: asked for the name, without weights, its drop-out switched off.
    Where the package is missing, the sentence says how it is installed."""
    with pytest.raises(UserError, match="network timm:vit needs the package timm, which is not installed: pip install"):
        networks.make("timm:vit", 3, 4, (8, 8), "batch", None)
    requests = []

    def get_model(name: str, weights: None, num_classes: int) -> nn.Module:
        requests.append((name, weights, num_classes))
        if name != "tiny":
            raise ValueError(f"Unknown model {name}")
        return nn.Sequential(TorchSmall(3, 8, 4), nn.Dropout(0.5), nn.Linear(8, num_classes))

    package = ModuleType("torchvision")
    models = ModuleType("torchvision.models")
    models.get_model = get_model
    monkeypatch.setitem(sys.modules, "torchvision", package)
    monkeypatch.setitem(sys.modules, "torchvision.models", models)
    monkeypatch.setattr(hubs.metadata, "version", lambda name: "0.99")
    made = networks.make("torchvision:tiny", 3, 4, (8, 8), "batch", None)
    made.check((3, 8, 8))
    assert (made.head, requests[0]) == ("2", ("tiny", None, 4))
    assert networks.from_description(networks.describe(made)) == made
    with pytest.raises(UserError, match=r"network torchvision:huge cannot be made \(ValueError: Unknown model huge\)"):
        networks.make("torchvision:huge", 3, 4, (8, 8), "batch", None)
    with pytest.raises(UserError, match="torchvision:tiny takes RGB images: set channels to 3"):
        networks.make("torchvision:tiny", 1, 4, (8, 8), "batch", None)
    with pytest.raises(UserError, match="no name of a network that another machine could make"):
        networks.from_description({"name": "transformers:some/where", "channels": 3, "classes": 4, "size": [8, 8]})


def test_a_network_of_transformers_is_counted_before_it_takes_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is made on the device "meta" first, where its layers and parameters are counted without memory for them."""
    devices: list[str] = []

    class Auto:
        @staticmethod
        def from_config(config: object, attn_implementation: str) -> nn.Module:
            devices.append(torch.get_default_device().type)
            return nn.Linear(1, 1)

    transformers = ModuleType("transformers")
    transformers.AutoModelForImageClassification = Auto  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "transformers", transformers)
    monkeypatch.setattr(model_hubs, "_transformer_config", lambda *arguments: None)
    model_hubs._transformer("transformers:{}", 3, 4, (8, 8))
    assert devices == ["meta", "cpu"]
    with torch.device("meta"):
        model_hubs._transformer("transformers:{}", 3, 4, (8, 8))
    assert devices == ["meta", "cpu", "meta"]


def test_weights_that_were_read_do_not_change_with_their_file(tmp_path: Path) -> None:
    """A run that trains from a file continues with what it read when somebody writes another one in its place."""
    path = tmp_path / "w.safetensors"
    before = {"head.weight": torch.ones(1000, 1000)}
    save_file(before, path)
    held = read_weights_file(str(path))
    with path.open("r+b") as file:  # in place: what is mapped would change with it
        file.seek(-4_000_000, 2)
        file.write(bytes(4_000_000))
    assert torch.equal(held.tensors["head.weight"], before["head.weight"])
