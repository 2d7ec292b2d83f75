"""The round loop and what it leaves: when a model is tested, what it leans to, and the confusion at the end."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch_models import TorchSmall, load_weights

from halfmoon.api.types import Method, WeightedMetric, weighted_metric
from halfmoon.config.schema import Config
from halfmoon.core import tree
from halfmoon.core.optim import SGD
from halfmoon.core.tree import Tree
from halfmoon.data import Split, summarize
from halfmoon.engine import loop
from halfmoon.engine.evaluation import evaluate_model
from halfmoon.engine.loop import Experiment, run_rounds
from halfmoon.engine.runtime import RoundReport
from halfmoon.federation.contract.small_federation import (
    CLASSES,
    make_examples,
    make_simulation,
    make_task,
    trees_equal,
)
from halfmoon.methods.fedavg import FedAvg
from halfmoon.methods.objectives import FixMatch
from halfmoon.runs import runner
from halfmoon.runs.factory import load_source_for_network
from halfmoon.storage.run_folder import RunFolder

TEST = make_examples(40, seed=9)

OPTIMIZER = SGD(lr=0.01)
"""Learns so slowly that the models of two rounds predict other classes: otherwise the confusion of any model would do."""


def run(path: Path, method: Method, rounds: int, watch: Any = lambda row: None, **options: Any) -> tuple[Any, list]:
    """Run an experiment in a new folder, or continue there, and return what came out and the rows of metrics.jsonl."""
    shared = make_task(dtype=torch.float32, rounds=rounds, optimizer=OPTIMIZER)
    made = Experiment(method, shared, make_simulation(method, shared), TEST, 3, **options)
    with RunFolder.open(path) if path.exists() else RunFolder.create(path, "", "0" * 64) as folder:
        loaded = folder.load() if RunFolder.exists(path) else None
        return run_rounds(made, folder, loaded, watch), folder.rows()


def confusion(model: Tree) -> list[list[int]]:
    module = load_weights(TorchSmall(1, CLASSES, 4), model).double().eval()
    with torch.no_grad():
        text = module(TEST.images.double() / 127.5 - 1).argmax(-1)
    return [[int(((TEST.labels == i) & (text == j)).sum()) for j in range(CLASSES)] for i in range(CLASSES)]


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that grows with every pass over the test set."""
    seen: list[int] = []

    def count(network, model, normalize, test, **how):
        seen.append(len(test.labels))
        return evaluate_model(network, model, normalize, test, **how)

    monkeypatch.setattr(loop, "evaluate_model", count)
    return seen


def test_evaluated_rounds_report_the_prediction_bias(tmp_path: Path, passes: list[int]) -> None:
    """Every second round, and the last: one pass over the test set each, and none more for the confusion."""
    made, rows = run(tmp_path / "run", FedAvg(FixMatch()), 5, evaluate_every=2)
    assert ["prior" in row for row in rows] == ["test" in row for row in rows] == [False, True, False, True, True]
    assert len(passes) == 3
    for row in rows[1::2]:
        accuracy = np.array(row["test"]["per_class"])
        assert row["prior"]["accuracy"] == pytest.approx(accuracy / accuracy.sum(), abs=1e-6)
        assert sum(row["prior"]["app_u"]) == pytest.approx(1, abs=1e-5)
    assert made["confusion"] == confusion(made["model"])
    assert np.trace(made["confusion"]) / 40 == made["accuracy"]["last"] == rows[-1]["test"]["accuracy"]


def test_evaluation_does_not_change_training(tmp_path: Path) -> None:
    """A run that is tested in every round has the model and the cost of one that is tested at its end."""
    often, _ = run(tmp_path / "often", FedAvg(FixMatch()), 3)
    once, rows = run(tmp_path / "once", FedAvg(FixMatch()), 3, evaluate_every=3)
    assert trees_equal(often["model"], once["model"])
    assert trees_equal(often["model"], models(3)[-1])
    assert often["cost"] == once["cost"]
    assert ["prior" in row for row in rows] == [False, False, True]


def test_a_run_that_was_stopped_after_its_last_round_has_its_confusion(tmp_path: Path, passes: list[int]) -> None:
    """All that is left to do is the end: one pass over the test set, and the same comes out."""
    straight, _ = run(tmp_path / "run", FedAvg(FixMatch()), 3)
    assert not (tmp_path / "run" / "summary.json").exists()
    passes.clear()
    made, rows = run(tmp_path / "run", FedAvg(FixMatch()), 3)
    assert len(passes) == 1
    assert len(rows) == 3
    assert trees_equal(made.pop("model"), straight.pop("model"))
    assert made == straight


def test_a_run_folder_has_the_counts_of_its_split_and_the_confusion(tmp_path: Path) -> None:
    """split.json is the summary of split.parquet; summary.json names the classes of its confusion."""
    small = {"rounds": 2, "clients": 4, "cohort": 2, "steps": 1, "width": 4, "device": "cpu"}
    config = Config(**small, method="fedavg", run_dir=tmp_path / "run")
    outcome = runner.start(config)
    data = load_source_for_network(config)
    split = Split.load(outcome.folder / "split.parquet")
    metadata = json.loads((outcome.folder / "split.json").read_text())
    assert metadata == summarize(split, data.train.labels, data.classes)
    assert len(metadata["each"]) == 4
    done = json.loads((outcome.folder / "summary.json").read_text())
    assert done["classes"] == list(data.classes)
    text = np.array(done["confusion"])
    assert text.sum(1).tolist() == np.bincount(data.test.labels).tolist()
    assert np.trace(text) / text.sum() == done["accuracy"]["last"]
    rows = [json.loads(line) for line in (outcome.folder / "metrics.jsonl").read_text().splitlines()]
    per_class = [round(share, 6) for share in (text.diagonal() / text.sum(1)).tolist()]
    assert rows[-1]["test"]["per_class"] == pytest.approx(per_class, abs=2e-6)


@pytest.mark.parametrize(("message", "best"), [((0.5, 0.7, 0.6, 0.6), 2), ((0.5, 0.7, 0.6, 0.8), 4), ((0.7, 0.7), 2)])
def test_validation_by_clients_selects_the_round(tmp_path, message, best):
    """A round's replies are about the model that it started from, and those after the end about the last one."""
    method = FedAvg(FixMatch())
    shared = make_task(dtype=torch.float32, rounds=len(message), optimizer=OPTIMIZER)
    runtime = make_simulation(method, shared)
    close = runtime.close
    verdicts = list(message)
    brought = list[Tree]()

    def make_report(round: int) -> Any:
        return {"round": round, "sites": 1, "accuracy": verdicts.pop(0), "loss": 1.0, "per_class": []}

    def closed() -> Any:
        report = close()
        return report._replace(validation=make_report(len(brought))) if brought else report

    runtime.close = closed
    runtime.evaluate_next_round = brought.append
    runtime.final_evaluation = lambda model, rounds: (None, make_report(rounds))
    with RunFolder.create(tmp_path / "run", "", "0" * 64) as folder:
        made = run_rounds(Experiment(method, shared, runtime, TEST, 3), folder, None, lambda row: None)
    expected = models(len(message))
    assert all(trees_equal(*pair) for pair in zip(brought, expected, strict=False))
    assert trees_equal(made["model"], expected[best - 1])
    assert made["chosen"] == {"round": best, "accuracy": max(message)}
    assert made["accuracy"]["chosen_round"] == best
    assert made["confusion"] == confusion(made["model"])


def models(rounds: int) -> list[Tree]:
    """Return the server's model after every round of `run`."""
    method = FedAvg(FixMatch())
    shared = make_task(dtype=torch.float32, rounds=rounds, optimizer=OPTIMIZER)
    runtime = make_simulation(method, shared)
    found = []
    server = method.start(shared, loop.initial_model(shared, 3, torch.device("cpu")))
    for number in range(rounds):
        runtime.open(number)
        server = method.round(shared.at(number), server, runtime)
        runtime.close()
        found.append(method.solution(shared, server))
    return found


def test_an_average_of_the_servers_models_is_what_is_evaluated(tmp_path: Path) -> None:
    """Of four rounds with a share of 0.6: the plain mean of two, then 0.6 average + 0.4 model; statistics alike."""
    made, rows = run(tmp_path / "run", FedAvg(FixMatch()), 4, ema=0.6)
    weights = [0.5 * 0.6 * 0.6, 0.5 * 0.6 * 0.6, 0.4 * 0.6, 0.4]
    wanted = tree.map(lambda *leaves: sum(w * leaf for w, leaf in zip(weights, leaves, strict=True)), *models(4))
    for name, leaf in tree.flatten(wanted).items():
        assert torch.allclose(tree.flatten(made["model"])[name], leaf, atol=1e-6)
    assert made["confusion"] == confusion(made["model"])
    assert np.trace(made["confusion"]) / 40 == rows[-1]["test"]["accuracy"]


def test_the_model_of_the_round_that_validation_images_choose_is_the_runs(tmp_path: Path) -> None:
    held = make_examples(30, seed=4)
    made, rows = run(tmp_path / "run", FedAvg(FixMatch()), 5, validation=held)
    assert [set(row) >= {"test", "validation"} for row in rows] == [True] * 5
    shared = make_task(dtype=torch.float32)
    messages = [evaluate_model(shared.network, model, shared.normalize, held).row() for model in models(5)]
    assert [row["validation"] for row in rows] == messages
    best_round = max(range(5), key=lambda k: (messages[k]["accuracy"], -messages[k]["loss"]))
    assert trees_equal(made["model"], models(5)[best_round])
    assert made["accuracy"]["last"] == rows[-1]["test"]["accuracy"]
    assert made["accuracy"]["chosen"] == rows[best_round]["test"]["accuracy"]
    assert made["accuracy"]["chosen_round"] == best_round + 1
    assert made["confusion"] == confusion(made["model"])


def test_average_and_choice_survive_a_kill(tmp_path: Path) -> None:
    options: dict[str, Any] = {"validation": make_examples(30, seed=4), "ema": 0.5}
    whole, _ = run(tmp_path / "whole", FedAvg(FixMatch()), 5, **options)

    def stop(row: Any) -> None:
        if row["round"] == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "cut", FedAvg(FixMatch()), 5, stop, **options)
    repeated, rows = run(tmp_path / "cut", FedAvg(FixMatch()), 5, **options)
    assert len(rows) == 5
    assert trees_equal(repeated["model"], whole["model"])
    assert repeated["accuracy"] == whole["accuracy"]


def test_checkpoints_are_written_at_multiples_and_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved: list[int] = []
    save = RunFolder.save

    def note(folder: RunFolder, number: int, *parts: Any) -> None:
        saved.append(number)
        save(folder, number, *parts)

    monkeypatch.setattr(RunFolder, "save", note)
    run(tmp_path / "run", FedAvg(FixMatch()), 5, evaluate_every=5, checkpoint_every=2)
    assert [number for number in saved if number] == [2, 4, 5]


@pytest.mark.parametrize(
    ("values", "mean", "spread"),
    [([[1.0, 2.0], [3.0, 4.0]], 2.5, 1.25**0.5), ([[0.0, 0.0], [2.0, 6.0]], 2.0, 6**0.5), ([[0.6], [0.6]], 0.6, 0.0)],
)
def test_a_row_has_the_standard_deviation_of_a_metric(values: list, mean: float, spread: float) -> None:
    """Over all values of all clients: 1 to 4 deviate from 2.5 by 1.5, 0.5, 0.5 and 1.5, a mean square of 1.25.

    In single precision the mean of the squares of 0.6 is below the square of the mean: the variance is cut at 0.
    """
    sums = [weighted_metric(torch.tensor(each)) for each in values]
    total = WeightedMetric(*(torch.stack(parts).sum() for parts in zip(*sums, strict=True)))
    row = loop._metrics_row(0, RoundReport([0, 1], {"loss": total}, None, {}))
    assert row["train"] == {"loss": pytest.approx(mean), "loss_spread": pytest.approx(spread, abs=1e-6)}
