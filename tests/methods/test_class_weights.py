"""Class weights multiply the cross-entropy of labeled images, in every method that has one."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from test_contract import DISTINCT

from halfmoon.config.schema import Config
from halfmoon.core import rng
from halfmoon.core.errors import UserError
from halfmoon.federation.contract.small_federation import (
    make_dataset,
    make_simulation,
    make_task,
    max_difference,
    run_rounds,
    start_server,
)
from halfmoon.federation.server.plan import load_plan
from halfmoon.methods import registry
from halfmoon.methods.objectives.base import labeled_cross_entropy, soft_cross_entropy
from halfmoon.runs import factory, runner

WEIGHTS = (0.2, 3.0, 1.0, 0.5)
CONFIG = Config(
    data="digits", method="fedavg", clients=3, cohort=2, steps=1, labels_per_class=4.0, rounds=1, threads=1, width=4,
    class_weights="balanced",
)  # fmt: skip


def refused(name: str) -> bool:
    try:
        factory.build_method(replace(CONFIG, method=name))
    except UserError as error:
        return "class_weights has no effect" in str(error)
    return False


def test_balanced_loss_is_the_mean_over_classes():
    """With 5, 1 and 2 labels: 8 / (3 * 5), 8 / (3 * 1), 8 / (3 * 2). A class without labels has the weight 1."""
    y = torch.tensor([0, 0, 0, 0, 0, 1, 2, 2])
    weights = factory.balanced_weights(y.numpy(), 3)
    assert weights == pytest.approx((8 / 15, 8 / 3, 8 / 6))
    assert factory.balanced_weights(np.array([0, 0, 2]), 3) == pytest.approx((0.5, 1.0, 1.0))
    logits = torch.randn(8, 3, generator=rng.generator(0, "logits"), dtype=torch.float64)
    by_class = [labeled_cross_entropy(logits[y == label], y[y == label]) for label in range(3)]
    expected = torch.stack(by_class).mean()
    assert torch.allclose(labeled_cross_entropy(logits, y, None, weights), expected)
    one_hot = torch.eye(3, dtype=torch.float64)[y]
    assert torch.allclose(soft_cross_entropy(logits, one_hot, None, weights), expected)
    # Two rows of padding change nothing.
    real = torch.tensor([True] * 8 + [False] * 2)
    padded = torch.cat([logits, logits[:2]])
    labels = torch.cat([y, y[:2]])
    assert torch.allclose(labeled_cross_entropy(padded, labels, real, weights), expected)
    assert torch.allclose(soft_cross_entropy(padded, torch.eye(3).double()[labels], real, weights), expected)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in DISTINCT else [pytest.mark.nightly]) for name in registry.names()]
)
def test_weights_change_a_method_or_are_refused(name: str):
    """Loop and vmap agree, weights of 1 change nothing but rounding, and other weights change the model."""
    entry = registry.entry(name)
    if refused(name):
        return
    labels_at = entry.label_locations[0]
    servers = []
    for weights, executor in (((), "loop"), ((1.0,) * 4, "loop"), (WEIGHTS, "loop"), (WEIGHTS, "vmap")):
        shared = make_task(class_weights=weights, rounds=2)
        federation = make_dataset(all_labels=entry.all_labels, labels_at=labels_at, pooled=entry.pooled)
        runtime = make_simulation(entry.method, shared, federation, executor=executor)
        servers.append(run_rounds(entry.method, runtime, start_server(entry.method, shared), range(1))[-1].server)
    without, ones, weighted, batched = servers
    assert max_difference(ones, without) < 1e-6
    assert max_difference(weighted, without) > 1e-5
    assert max_difference(batched, weighted) < 1e-6


def test_methods_support_class_weights():
    assert [name for name in registry.names() if refused(name)] == ["protofssl"]


def test_a_run_counts_the_labels_of_all_clients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    found = []
    monkeypatch.setattr(runner, "Simulation", lambda method, task, *rest, **options: found.append(task) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        runner.start(replace(CONFIG, run_dir=tmp_path / "run"))
    problem = factory.build_problem(CONFIG)
    counts = np.bincount(problem.train.labels.numpy()[problem.split.labeled], minlength=10)
    assert found[0].class_weights == pytest.approx(counts.sum() / (10 * counts))


def test_a_federation_refuses_them(tmp_path: Path):
    file = tmp_path / "federation.toml"
    file.write_text(
        'class_weights = "balanced"\n[federation]\nsites = ["a", "b"]\nclasses = ["x", "y"]\nimage = [1, 8, 8]\n'
    )
    with pytest.raises(UserError, match="labels of each class over all sites, which sites do not send"):
        load_plan(file)
