"""Products in bfloat16: trees, statistics, losses, tests and what is saved stay float32, in a loop and under vmap."""

from dataclasses import replace
from typing import Any

import custom_models
import pytest
import torch

from halfmoon import Config
from halfmoon.core import tree
from halfmoon.core.optim import SGD
from halfmoon.engine.evaluation import compute_mean_prediction, evaluate_model
from halfmoon.engine.sampling import Batching
from halfmoon.federation.contract.small_federation import (
    CLASSES,
    make_dataset,
    make_examples,
    make_simulation,
    make_task,
    max_difference,
    run_rounds,
    start_server,
)
from halfmoon.federation.protocol.terms import shared_options
from halfmoon.methods.fedavg import FedAvg
from halfmoon.methods.feddure import FedDure
from halfmoon.methods.objectives import FixMatch
from halfmoon.models import Network, ResNet9, SmallCNN, WideResNet
from halfmoon.models import registry as networks
from halfmoon.models.modules import from_factory
from halfmoon.runs import factory
from halfmoon.runs.factory import ImageSpec

assert custom_models
NETWORKS = {
    "small": (SmallCNN(1, CLASSES, 8), 8),
    "group": (SmallCNN(1, CLASSES, 8, "group"), 8),
    "none": (SmallCNN(1, CLASSES, 8, "none"), 8),
    "resnet9": (ResNet9(1, CLASSES, 4), 16),
    "wrn": (WideResNet(1, CLASSES, 1, depth=10), 8),
    "module": (from_factory("custom_models:build_small", 1, CLASSES, (8, 8)), 8),
}


def rounded(network: Network) -> Network:
    """Return the network with products in bfloat16."""
    return replace(network, precision="bf16")


def seen(network: Network, side: int, real: Any = None) -> dict[str, Any]:
    """Return what the passes of six images say."""
    g = torch.Generator().manual_seed(0)
    model = network.init(g)
    x = torch.randn((6, 1, side, side), generator=g)
    along = tree.map(lambda leaf: torch.randn(leaf.shape, generator=g), model["params"])
    logits, moments = network.train(model["params"], x, real=real)
    tape = network.linearize(model["params"], x, real)[1]
    tangent = network.tangent(model["params"], x, tape, along, real)
    predicted = network.predict(model["params"], model["stats"], x)
    return {"logits": logits, "moments": moments, "tangent": tangent, "predicted": predicted}


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", NETWORKS)
def test_every_pass_is_rounded_and_its_results_are_float32(name, masked):
    """Logits, moments and tangents are float32, near those of float32 (2^-8 is the rounding), and not the same.
    A tangent is off by more than its rounding: where an activation near 0 rounds to the other side, it jumps."""
    network, side = NETWORKS[name]
    real = torch.arange(6) < 4 if masked else None
    exact = seen(network, side, real)
    near = seen(rounded(network), side, real)
    for path, leaf in tree.flatten(near).items():
        message = tree.flatten(exact)[path]
        assert leaf.dtype == torch.float32
        assert float((leaf - message).norm() / message.norm()) < (0.4 if path == "tangent" else 0.02)
    assert not torch.equal(near["logits"], exact["logits"])


@pytest.mark.parametrize(
    ("method", "batching"),
    [
        (FedAvg(), Batching(4, 4)),
        (FedAvg(FixMatch(threshold=0.3)), Batching("all", "rest")),
        (FedDure(), Batching("all", "rest")),
    ],
    ids=["fedavg", "fixmatch", "feddure"],
)
def test_a_round_trains_in_both_executors(method, batching):
    """One round of SGD moves the model as float32 does, to the rounding of products; all that is sent is float32."""
    moved: dict[tuple[str, str], Any] = {}
    for network in (SmallCNN(1, CLASSES, 4), rounded(SmallCNN(1, CLASSES, 4))):
        for executor in ("loop", "vmap"):
            made = make_task(network, torch.float32, optimizer=SGD(0.05))
            first = start_server(method, made)
            (result,) = run_rounds(
                method,
                make_simulation(method, made, make_dataset(), batching=batching, executor=executor),
                first,
                range(1),
            )
            assert {leaf.dtype for leaf in tree.leaves(result.server["params"])} == {torch.float32}
            step = tree.map(torch.sub, result.server["params"], first["params"])
            moved[network.precision, executor] = torch.cat([leaf.flatten() for leaf in tree.leaves(step)])
    exact = moved["float32", "loop"]
    for executor in ("loop", "vmap"):
        gap = (moved["bf16", executor] - exact).norm() / exact.norm()
        assert 0 < float(gap) < 0.2


def test_tests_and_what_is_saved_are_float32():
    """Accuracy, mean predictions and the saved network are those of the float32 network, bit by bit."""
    network = rounded(SmallCNN(1, CLASSES, 8))
    model = SmallCNN(1, CLASSES, 8).init(torch.Generator().manual_seed(0))
    images = make_examples(20)
    normalize = make_task(dtype=torch.float32).normalize
    actual, expected = (evaluate_model(each, model, normalize, images).row() for each in (network, network.in_float32))
    assert actual == expected
    actual, expected = (
        compute_mean_prediction(each, model, normalize, images.images) for each in (network, network.in_float32)
    )
    assert (actual == expected).all()
    assert network.full_model(model)[0] == SmallCNN(1, CLASSES, 8)
    assert networks.from_description(networks.describe(network)) == network.in_float32


def test_the_option_is_the_networks_and_one_of_the_terms():
    """`precision` reaches the task's network, is written into config.toml, and sites of a federation agree on it."""
    config = Config(precision="bf16")
    form = ImageSpec((1, 8, 8), tuple("0123456789"), False, (0.5,), (0.25,))
    assert factory.build_task(config, form).network.precision == "bf16"
    assert factory.build_task(Config(), form).network.precision == "float32"
    assert "precision" in shared_options()


def test_float32_is_what_it_was():
    """Without the option nothing is rounded: a pass over doubles is double, and one over floats is no other."""
    network, side = NETWORKS["small"]
    model = tree.to(network.init(torch.Generator().manual_seed(0)), dtype=torch.float64)
    x = torch.randn((3, 1, side, side), dtype=torch.float64)
    assert network.train(model["params"], x)[0].dtype == torch.float64
    assert network.in_float32 is network
    assert max_difference(seen(network, side), seen(replace(network), side)) == 0
