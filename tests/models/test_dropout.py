"""Dropout by keys: its shares, and equal masks one by one, under vmap, at sites, and after a kill."""

from pathlib import Path
from typing import Any

import pytest
import torch
from interrupted_runs import run_with_interruption
from torch import Tensor, nn

from halfmoon.config.schema import Config
from halfmoon.core import plugins, rng, tree
from halfmoon.federation.contract.small_federation import (
    make_dataset,
    make_simulation,
    make_task,
    max_difference,
    run_rounds,
    start_server,
)
from halfmoon.methods import registry
from halfmoon.models.dropout import drop, dropout_key
from halfmoon.models.modules import from_factory


def make(channels: int, classes: int, size: tuple[int, int]) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(channels, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout2d(0.2), nn.AvgPool2d(2),
        nn.Flatten(), nn.Dropout(0.3), nn.Linear(4 * size[0] * size[1] // 4, classes),
    )  # fmt: skip


class Attending(nn.Module):
    """Attention between the rows of an image, with a dropout behind it."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.dropout = nn.Dropout(0.3)
        self.head = nn.Linear(8, classes)

    def forward(self, x: Tensor) -> Tensor:
        z = x[:, 0]
        return self.head(self.dropout(z + self.attention(z, z, z, need_weights=False)[0]).mean(1))


plugins.register("network", "dropping", make)
plugins.register("network", "attending", lambda channels, classes, size: Attending(classes))
NETWORK = from_factory("dropping", 1, 4, (8, 8))
CONFIG = Config(
    data="digits", method="fedavg-fixmatch", clients=4, cohort=2, steps=2, labels_per_class=4.0, rounds=3, threads=1,
    network="dropping",
)  # fmt: skip


def key(number: int = 1) -> Tensor:
    return torch.tensor(number)


def test_shares_of_dropped_entries_and_their_mean():
    """Of 100,000 entries a share of 0.3 is 0, with a standard error of 0.0015; the mean remains 1, as 1 / 0.7 remains."""
    out = drop(torch.ones(1000, 100), 0.3, False, key(), 0, None, 1000)
    assert float((out == 0).double().mean()) == pytest.approx(0.3, abs=0.006)
    assert out.unique().tolist() == pytest.approx([0.0, 1 / 0.7])
    # Neighbors, images, calls and keys are independent: two masks agree in 0.7^2 + 0.3^2 of the entries.
    stored = out > 0
    others = (
        stored.roll(1, 0),
        stored.roll(1, 1),
        drop(torch.ones(1000, 100), 0.3, False, key(), 1, None, 1000) > 0,
        drop(torch.ones(1000, 100), 0.3, False, key(2), 0, None, 1000) > 0,
    )
    for other in others:
        assert float((stored == other).double().mean()) == pytest.approx(0.58, abs=0.008)


def scramble(z: int) -> int:
    """The finalizer of SplitMix64 in Python's integers."""
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return z ^ (z >> 31)


@pytest.mark.parametrize("call", [0, 1, 5])
def test_the_masks_are_those_of_splitmix64(call: int):
    """The stream of a dropout starts at the scrambled key of the step, moved by the number of the dropout."""
    golden = 0x9E3779B97F4A7C15
    start = scramble((12345 + golden * (call + 1)) % 2**64)
    numbers = [(scramble((start + golden * position) % 2**64) >> 11) / 2**53 for position in range(60)]
    masked = drop(torch.ones(6, 10), 0.5, False, key(12345), call, None, 6)
    assert masked.flatten().tolist() == [2.0 if number >= 0.5 else 0.0 for number in numbers]


def test_channels_are_dropped_as_a_whole():
    out = drop(torch.ones(200, 50, 3, 3), 0.5, True, key(), 0, None, 200)
    assert ((out == 0).flatten(2).all(-1) | (out == 2).flatten(2).all(-1)).all()
    assert float((out == 0).double().mean()) == pytest.approx(0.5, abs=0.02)
    assert not drop(torch.ones(2, 2), 1.0, False, key(), 0, None, 2).any()


def test_padding_between_groups_does_not_change_the_masks():
    """Three labeled and two unlabeled images, the labeled ones padded to four."""
    z = torch.ones(5, 40)
    real = torch.tensor([True, True, True, False, True, True])
    padded = drop(torch.ones(6, 40), 0.5, False, key(), 0, real, 6)
    assert torch.equal(padded[real], drop(z, 0.5, False, key(), 0, None, 5))


def test_training_drops_by_the_key_and_evaluation_does_not():
    params = NETWORK.init(rng.generator(0, "model"))
    x = torch.randn(6, 1, 8, 8, generator=rng.generator(0, "x"))
    without = NETWORK.train(params["params"], x)[0]
    with dropout_key(key(1)):
        first = NETWORK.train(params["params"], x)[0]
        repeated = NETWORK.train(params["params"], x)[0]
        predicted = NETWORK.predict(params["params"], params["stats"], x)
    with dropout_key(key(2)):
        second = NETWORK.train(params["params"], x)[0]
    assert torch.equal(first, repeated)
    assert not torch.allclose(first, second)
    assert not torch.allclose(first, without)
    assert torch.equal(predicted, NETWORK.predict(params["params"], params["stats"], x))


def test_the_forward_derivative_uses_the_masks_of_the_pass():
    """FedDure's tangent equals a central difference of passes with the same key."""
    params = tree.to(NETWORK.init(rng.generator(0, "model")), dtype=torch.float64)["params"]
    x = torch.randn(6, 1, 8, 8, generator=rng.generator(0, "x")).double()
    direction = tree.map(lambda leaf: torch.randn(leaf.shape, generator=rng.generator(1, "d")).double(), params)
    with dropout_key(key(5)):
        _, tape = NETWORK.linearize(params, x)
        tangent = NETWORK.tangent(params, x, tape, direction)
        ahead, behind = (
            NETWORK.train(tree.map(lambda p, d, s=step: p + s * d, params, direction), x)[0] for step in (1e-6, -1e-6)
        )
    assert torch.allclose(tangent, (ahead - behind) / 2e-6, atol=1e-6)


METHODS = ("fedavg", "fedavg-fixmatch", "feddure", "semifl", "fedmatch", "mean-teacher", "mixmatch", "fedloke")


@pytest.mark.parametrize(
    ("name", "statistics"),
    [
        pytest.param(name, statistics, marks=[pytest.mark.nightly] if (number + turn) % 2 else [])
        for number, name in enumerate(METHODS)
        for turn, statistics in enumerate(("joint", "separate"))
    ],
)
def test_loop_and_vmap_drop_the_same(name: str, statistics: Any):
    """Clients of unequal sizes are padded; two rounds agree to rounding, and a mask is drawn in each of the steps."""
    entry = registry.entry(name)
    servers = []
    for executor in ("loop", "vmap"):
        shared = make_task(NETWORK, statistics=statistics, rounds=2)
        federation = make_dataset(all_labels=entry.all_labels, labels_at=entry.label_locations[0], pooled=entry.pooled)
        runtime = make_simulation(entry.method, shared, federation, executor=executor)
        servers.append(run_rounds(entry.method, runtime, start_server(entry.method, shared), range(2))[-1].server)
    assert max_difference(*servers) < 1e-6


def test_attention_works_with_a_dropout_behind_it():
    method = registry.entry("fedavg-fixmatch").method
    servers = []
    for executor in ("loop", "vmap"):
        shared = make_task(from_factory("attending", 1, 4, (8, 8)), rounds=2)
        runtime = make_simulation(method, shared, executor=executor)
        servers.append(run_rounds(method, runtime, start_server(method, shared), range(2))[-1].server)
    assert max_difference(*servers) < 1e-6


def test_a_run_that_was_stopped_ends_in_the_bytes_of_a_straight_one(tmp_path: Path):
    run_with_interruption(CONFIG, tmp_path)
