"""A start without labels: what it trains, what goes on from it, and that a killed one goes on."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from callbacks import Stop

from halfmoon import Config
from halfmoon.core.errors import UserError
from halfmoon.core.weight_files import digest
from halfmoon.models.weights import read
from halfmoon.report.run_reader import find
from halfmoon.runs import runner
from halfmoon.runs.assembly import RunResult


def config(folder: Path, **options: Any) -> Config:
    small = {"rounds": 2, "start_rounds": 2, "clients": 4, "cohort": 2, "steps": 2, "width": 4, "data_share": 0.3}
    return Config(run_dir=folder, **{"method": "fedavg", "device": "cpu", "start": "byol", **small, **options})


def model(folder: Path) -> dict[str, torch.Tensor]:
    return dict(read(str(folder / "model.safetensors")).tensors)


def same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    return runner.start(config(tmp_path_factory.mktemp("straight") / "run", baselines=("fedavg-fixmatch",)))


@pytest.mark.parametrize("method", ["byol", "fedavg"])
def test_a_stopped_run_goes_on_bit_by_bit(tmp_path: Path, straight: RunResult, method: str) -> None:
    """Stopped in the start, whose clients have memories, or behind it; the baseline goes on from the same start."""
    with pytest.raises(KeyboardInterrupt):
        runner.start(config(tmp_path / "stopped", baselines=("fedavg-fixmatch",)), Stop(method=method))
    resumed = runner.resume(tmp_path / "stopped")
    for ours, theirs in zip(resumed.runs, straight.runs, strict=True):
        assert same(model(ours), model(theirs))
    assert [each["start"] for each in resumed.summaries] == [each["start"] for each in straight.summaries]
    assert [run.path for run in find(straight.folder)] == straight.runs


def test_it_is_the_method_s_run_and_then_one_from_its_weights(tmp_path: Path) -> None:
    """So a federation can play it too: the start's method first, then another one with its model as weights."""
    made = config(tmp_path / "both", start_lr=1e-2, start_rounds=3)
    both = runner.start(made).summaries[0]
    first = replace(made, method="byol", start="none", lr=1e-2, rounds=3, run_dir=tmp_path / "first")
    alone = runner.start(first).summaries[0]
    assert same(model(tmp_path / "both" / "start-seed0"), model(tmp_path / "first"))
    assert both["start"] == {"method": "byol", "rounds": 3, "cost": alone["cost"]}
    weights = tmp_path / "first" / "model.safetensors"
    then = replace(made, start="none", weights=str(weights), run_dir=tmp_path / "then")
    runner.start(then)
    assert same(model(tmp_path / "both"), model(tmp_path / "then"))
    assert not same(model(tmp_path / "both"), model(tmp_path / "first"))


def test_methods_of_a_seed_share_it_and_seeds_do_not(tmp_path: Path) -> None:
    """No test image is looked at in a start."""
    runner.compare(config(tmp_path / "c", rounds=1, start="simclr"), ["fedavg", "fedavg-fixmatch"], (0, 1))
    starts = sorted(tmp_path.glob("c/start-seed*"))
    assert [path.name for path in starts] == ["start-seed0", "start-seed1"]
    assert len({digest(path / "model.safetensors") for path in starts}) == 2
    for path in starts:
        rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
        assert len(rows) == 2
        assert not any("test" in row for row in rows)


def test_a_frozen_backbone_cannot_be_trained_first(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="backbone, which is frozen"):
        config(tmp_path, weights="weights.safetensors", freeze=("backbone",))


def test_validation_images_choose_no_round_of_it(tmp_path: Path) -> None:
    """Alone it ends with the model of its last round: its head is what it was, and says nothing of a round."""
    made = config(tmp_path / "alone", method="simsiam", start="none", rounds=3, validation_share=0.3)
    assert "chosen" not in runner.start(made).summaries[0]["accuracy"]
