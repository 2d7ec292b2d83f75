"""Training stops after `patience` evaluations without a better validation score, and retains the best round's model."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from interrupted_runs import run_with_interruption

from halfmoon.config.schema import Config, identity
from halfmoon.core.errors import UserError
from halfmoon.core.tree import Tree
from halfmoon.engine import loop
from halfmoon.engine.loop import Experiment, run_rounds
from halfmoon.federation.contract.small_federation import make_examples, make_simulation, make_task, trees_equal
from halfmoon.federation.server.server import FederationServer
from halfmoon.methods.fedavg import FedAvg
from halfmoon.methods.objectives import FixMatch
from halfmoon.runs import runner
from halfmoon.storage.run_folder import RunFolder

CONFIG = Config(
    data="digits", method="fedavg", clients=4, cohort=2, steps=2, labels_per_class=4.0, rounds=30, threads=1, width=4,
    lr=3e-3, schedule="constant", validation_share=0.1, patience=2,
)  # fmt: skip


class Score(NamedTuple):
    """A result of `evaluate_model` with a given accuracy and loss."""

    accuracy: float
    loss: float

    def row(self) -> dict[str, float]:
        return {"accuracy": self.accuracy, "loss": self.loss}


def run(path: Path, scores: list[Score], patience: int, evaluate_every: int = 1) -> tuple[dict[str, Any], list[Tree]]:
    """Run ten rounds whose validation scores are given; return the result and the validated models."""
    method = FedAvg(FixMatch())
    settings = make_task(dtype=torch.float32, rounds=10)
    models: list[Tree] = []

    def evaluate(network: Any, model: Tree, *rest: Any, **options: Any) -> Score:
        models.append(model)
        return scores[len(models) - 1]

    experiment = Experiment(
        method, settings, make_simulation(method, settings), None, 3, evaluate_every=evaluate_every,
        validation=make_examples(3, seed=1), patience=patience,
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch, RunFolder.create(path, "", "0" * 64) as folder:
        patch.setattr(loop, "evaluate_model", evaluate)
        return run_rounds(experiment, folder, None, lambda row: None), models


def test_run_stops_after_patience_and_stores_the_best_model(tmp_path: Path):
    """An equal accuracy counts as better only with a smaller loss: the third evaluation is
    the last improvement. Of equally good rounds the latest is kept, as without patience."""
    scores = [Score(0.7, 1.0), Score(0.7, 1.0), Score(0.7, 0.9), Score(0.6, 0.1), Score(0.7, 0.9)]
    result, models = run(tmp_path / "run", scores, patience=2, evaluate_every=1)
    assert (
        result["ended"] == "stopped after round 5 of 10: no better validation accuracy in 2 evaluations; best round 5"
    )
    assert trees_equal(result["model"], models[4])


def test_it_does_not_stop_while_scores_improve(tmp_path: Path):
    result, models = run(tmp_path / "run", [Score(step / 10, 1.0) for step in range(10)], patience=1)
    assert result["ended"] is None
    assert len(models) == 10


def test_a_stopped_run_that_was_killed_equals_a_straight_one(tmp_path: Path):
    """The count of evaluations without improvement continues after a kill."""
    folder = run_with_interruption(CONFIG, tmp_path, after=4)
    summary = json.loads((folder / "summary.json").read_text())
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert 4 < len(rows) < 30
    scores = [(row["validation"]["accuracy"], -row["validation"]["loss"]) for row in rows]
    best = scores.index(max(scores)) + 1
    assert len(rows) == best + 2
    assert summary["ended"].startswith(f"stopped after round {len(rows)} of 30: ")
    assert summary["ended"].endswith(f"best round {best}")
    assert summary["accuracy"]["chosen_round"] == best
    other = json.loads((tmp_path / "stopped/summary.json").read_text())
    assert other["ended"] == summary["ended"]


def test_patience_needs_validation_images(tmp_path: Path):
    with pytest.raises(UserError, match="no validation images to stop by: set validation_share"):
        runner.start(replace(CONFIG, validation_share=0.0, run_dir=tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_patience_affects_the_identity_only_if_set():
    """Runs of earlier versions, which did not have the option, keep their identity."""
    without = identity(replace(CONFIG, patience=None), "fedavg")
    assert identity(CONFIG, "fedavg") != without


def test_patience_counts_evaluations_and_not_rounds(tmp_path: Path):
    scores = [Score(0.5, 1.0), Score(0.7, 1.0), Score(0.6, 0.1)]
    result, models = run(tmp_path / "run", scores, patience=1, evaluate_every=2)
    assert result["ended"] == "stopped after round 6 of 10: no better validation accuracy in 1 evaluation; best round 4"
    assert trees_equal(result["model"], models[1])


@pytest.mark.parametrize("at", ["server", "site"])
def test_patience_of_a_federation_needs_validation_images_at_server_or_sites(at: str):
    """One site with validation images is enough, or a folder of the server."""
    server = SimpleNamespace(plan=SimpleNamespace(validation=None, config=CONFIG))
    manager = SimpleNamespace(acceptances={"a": SimpleNamespace(validations=0), "b": SimpleNamespace(validations=0)})
    with pytest.raises(UserError, match="neither the server nor a site that joined has validation images"):
        FederationServer._check_patience(server, manager)
    if at == "server":
        server.plan.validation = Path("images")
    else:
        manager.acceptances["b"].validations = 3
    FederationServer._check_patience(server, manager)
