"""`halfmoon tune`: knobs, a search that continues where it was stopped, and test images that nobody looks at."""

import csv
import errno
import json
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from halfmoon.cli import main as cli
from halfmoon.config.schema import Config, resolve
from halfmoon.core.errors import UserError
from halfmoon.data import Images
from halfmoon.runs import factory, runner
from halfmoon.studies import tuning
from halfmoon.studies.tuning import Knob, apply_values, tune

pytest.importorskip("optuna")
TINY: dict[str, Any] = {
    "method": "fedavg", "clients": 3, "cohort": 2, "rounds": 2, "steps": 2, "network": "small", "width": 4,
    "data_share": 0.2, "validation_share": 0.3, "threads": 1,
}  # fmt: skip
KNOBS = [Knob.parse("lr=1e-4..1e-1"), Knob.parse("labeled_view=weak,plain")]


def test_knobs_are_read_from_words():
    assert Knob.parse("lr=1e-4..1e-2") == Knob("lr", (), 1e-4, 1e-2)
    assert Knob.parse("labeled-batch=5..20") == Knob("labeled_batch", (), 5.0, 20.0, whole=True)
    assert Knob.parse("norm=batch,group") == Knob("norm", ("batch", "group"))
    assert Knob.parse("fedavg-fixmatch.teacher-decay=0,1").name == "fedavg-fixmatch.teacher_decay"
    assert Knob.parse("feddure.hidden=32,64") == Knob("feddure.hidden", ("32", "64"))


@pytest.mark.parametrize(
    ("message", "sentence"),
    [
        ("lr", "is not NAME=LOW"),
        ("lr=1..x", "no range of numbers"),
        ("lr=1..0.1", "from a smaller to a larger"),
        ("norm=1..2", "norm is no number"),
        ("norm=bach", "did you mean 'batch'"),
        ("lrr=1..2", "unknown option"),
        ("seed=1..2", "cannot be searched"),
    ],
)
def test_wrong_knobs_are_refused(message, sentence):
    with pytest.raises(UserError, match=sentence):
        Knob.parse(message)


def test_values_reach_the_configuration():
    config = apply_values(Config(method="feddure"), {"lr": 0.02, "norm": "group", "feddure.hidden": "32"})
    assert (config.lr, config.norm, config.options["feddure"]) == (0.02, "group", {"hidden": 32})


def test_a_stopped_search_goes_on_with_the_trial_that_was_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The third trial is stopped: its values are tried next, and finished trials do not run again."""
    results: list[tuple[float, str]] = []
    real = runner.run_in_folder

    def cell(config: Config, path: Path, **how: Any) -> Any:
        results.append((config.lr, config.labeled_view))
        if len(results) == 3:
            raise KeyboardInterrupt
        return real(config, path, **how)

    monkeypatch.setattr(runner, "run_in_folder", cell)
    with pytest.raises(KeyboardInterrupt):
        tune(Config(**TINY), KNOBS, 4, [100], tmp_path / "t")
    found = tune(Config(**TINY), KNOBS, 4, [100], tmp_path / "t")
    assert len(found) == 4
    assert results[3] == results[2]
    assert len(results) == 5
    rows = list(csv.DictReader((tmp_path / "t" / "trials.csv").open()))
    assert [float(row["lr"]) for row in rows] == [lr for lr, _ in (*results[:2], *results[3:])]
    best = resolve(tomllib.loads((tmp_path / "t" / "best.toml").read_text()), {})
    assert best.lr == found[0].values["lr"]
    assert found[0].accuracy == max(float(row["validation_accuracy"]) for row in rows)
    repeated = tune(Config(**TINY), KNOBS, 4, [100], tmp_path / "t")
    assert repeated == found
    assert len(results) == 5
    with pytest.raises(UserError, match="another search"):
        tune(Config(**TINY), KNOBS[:1], 4, [100], tmp_path / "t")


def test_refused_data_leave_no_search(tmp_path: Path) -> None:
    """The journal of the refused search refused the same search with corrected options."""
    with pytest.raises(UserError, match="no data set or folder"):
        tune(Config(**{**TINY, "data": "digit"}), KNOBS, 1, [100], tmp_path / "t")
    assert not (tmp_path / "t").exists()


@pytest.mark.parametrize(
    ("method", "knobs", "expected"),
    [
        (
            "fedavg-fixmatch",
            ["fedavg-fixmatch.threshold=0.5,7"],
            "with fedavg-fixmatch.threshold 7: option threshold of",
        ),
        (
            "fedavg-fixmatch",
            ["fedavg-fixmatch.threshold=0.5..7"],
            "with fedavg-fixmatch.threshold 7: option threshold of",
        ),
        ("fedavg-fixmatch", ["feddure.hidden=4,8"], "no effect, because the search trains fedavg-fixmatch"),
        (
            "fedavg",
            ["lr=0.01,0.1", "labels_per_class=1,1000"],
            "with lr 0.01, labels_per_class 1000: .* needs .* labeled",
        ),
        ("fedavg", ["cohort=1..99"], "with cohort 99: cohort is 99"),
        ("fedavg", ["network=small,nope"], "with network nope: network is 'nope'"),
    ],
)
def test_values_that_cannot_run_are_refused_before_the_first_trial(
    tmp_path: Path, method: str, knobs: list[str], expected: str
) -> None:
    """They were refused when their trial came, and the journal refused the corrected search."""
    with pytest.raises(UserError, match=expected):
        tune(Config(**{**TINY, "method": method}), [Knob.parse(text) for text in knobs], 2, [100], tmp_path / "t")
    assert not (tmp_path / "t").exists()


def test_a_full_disk_is_a_sentence_of_the_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Optuna's journal could not be written: the message was "a file: No space left on device."."""

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tuning, "_open_study", fail)
    with pytest.raises(
        UserError, match=r"it cannot be written .No space left on device.; when it can, run the search again"
    ):
        tune(Config(**TINY), KNOBS, 1, [100], tmp_path / "t")


def test_no_model_is_shown_a_test_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """With other test images the search is the same, bit by bit; no row of any run speaks of them."""
    one = tune(Config(**TINY), KNOBS, 2, [100], tmp_path / "a")
    real = factory.load_source

    def spoiled(*args: Any, **how: Any):
        source = real(*args, **how)
        nothing = Images(np.zeros_like(source.test.images), np.zeros_like(source.test.labels))
        return replace(source, test=nothing)

    monkeypatch.setattr(factory, "load_source", spoiled)
    two = tune(Config(**TINY), KNOBS, 2, [100], tmp_path / "b")
    assert one == two
    for path in sorted(tmp_path.glob("a/trial-*/seed-100")):
        rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
        assert all("validation" in row and "test" not in row for row in rows)
        assert json.loads((path / "summary.json").read_text())["accuracy"] is None


def test_a_rate_that_diverges_is_a_trial_without_accuracy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from halfmoon.core.errors import Diverged

    def cell(*args: Any, **how: Any) -> Any:
        raise Diverged(0, 0, 0, float("nan"))

    monkeypatch.setattr(tuning.runner, "run_in_folder", cell)
    assert [each.accuracy for each in tune(Config(**TINY), KNOBS, 1, [100], tmp_path)] == [None]


def test_the_command_prints_the_best_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    message = (
        "tune --method fedavg --clients 3 --cohort 2 --rounds 1 --steps 1 --network small --width 4 --data-share 0.2"
    )
    code = cli.main([*message.split(), "--knob", "lr=1e-3,1e-2", "--trials", "2", "--run-dir", str(tmp_path / "t")])
    text = capsys.readouterr()
    assert code == 0, text.err
    assert "trial 2 of 2" in text.err
    assert f"halfmoon run --config {tmp_path / 't' / 'best.toml'}" in text.out
    best = resolve(tomllib.loads((tmp_path / "t" / "best.toml").read_text()), {})
    assert (best.seed, best.validation_share) == (0, 0.2)


@pytest.mark.parametrize(("more", "message"), [("", True), ("--reference feddure", False), ("--steps 1", False)])
def test_whose_budget_was_searched_with(tmp_path: Path, capsys: pytest.CaptureFixture[str], more: str, message: bool):
    """By its rule labels only takes one step for five labels, where a comparison gives it FedDure's."""
    text = "tune --method fedavg --clients 3 --cohort 2 --rounds 1 --network small --width 4 --data-share 0.2"
    where = ["--knob", "lr=1e-3,1e-2", "--trials", "1", "--run-dir", str(tmp_path / "t")]
    assert cli.main([*text.split(), *more.split(), *where]) == 0
    assert ("Budget: the default steps of fedavg." in capsys.readouterr().out) == message
    best = resolve(tomllib.loads((tmp_path / "t" / "best.toml").read_text()), {})
    assert best.reference == ("feddure" if "feddure" in more else None)


def test_a_short_list_of_values_is_tried_once_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two values were "20 trials", most of which repeated a known result."""
    monkeypatch.setattr(tuning, "_train_trial", lambda config, values, seeds, folder: float(values["lr"] == "0.2"))
    knobs = [Knob.parse("lr=0.1,0.2"), Knob.parse("labeled_view=weak,plain")]
    found = tune(Config(**TINY), knobs, 20, [0], tmp_path)
    assert len(found) == 4
    assert len({tuple(each.values.values()) for each in found}) == 4
    assert found[0].values["lr"] == "0.2"
