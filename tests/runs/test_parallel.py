"""Runs side by side: the same bytes as one after another, told of in one place, and not lost if one of them fails."""

import os
from pathlib import Path
from typing import Any

import pytest

from halfmoon.config.schema import Config
from halfmoon.core.errors import Diverged
from halfmoon.engine.loop import Row
from halfmoon.methods import registry
from halfmoon.runs import assembly, parallel, runner
from halfmoon.runs.callbacks import NullCallback, RunInfo
from halfmoon.storage.checkpoints import METRICS

SMALL: dict[str, Any] = {"clients": 4, "cohort": 2, "rounds": 2, "steps": 2, "width": 4, "labels_per_class": 1}


class Told(NullCallback):
    """Record the events of each run by its folder, and the process."""

    def __init__(self) -> None:
        self.events: dict[str, list[object]] = {}

    def begin(self, run: RunInfo) -> None:
        assert not (run.folder / METRICS).exists()
        self.events[run.folder.name] = ["begin"]

    def round(self, run: RunInfo, row: Row) -> None:
        self.events[run.folder.name].append((row["round"], os.getpid()))

    def end(self, run: RunInfo, summary: Row) -> None:
        self.events[run.folder.name].append(summary["method"])


def test_parallel_runs_equal_sequential_ones(tmp_path: Path) -> None:
    options: dict[str, Any] = {**SMALL, "method": "fedavg-fixmatch", "baselines": ("fedavg", "fedavg-sl")}
    watch = Told()
    made = runner.start(Config(**options, processes=2, run_dir=tmp_path / "two"), watch)
    one = runner.start(Config(**options, processes=1, run_dir=tmp_path / "one"))
    for left, right in zip(made.runs, one.runs, strict=True):
        assert (left / METRICS).read_bytes() == (right / METRICS).read_bytes()
    assert [each["accuracy"] for each in made.summaries] == [each["accuracy"] for each in one.summaries]
    here = os.getpid()
    names = {"two": "fedavg-fixmatch", "fedavg": "fedavg", "fedavg-sl": "fedavg-sl"}
    assert watch.events == {folder: ["begin", (1, here), (2, here), name] for folder, name in names.items()}


@pytest.mark.nightly  # by default one of three runs fails, in the next test
def test_an_error_of_all_runs_is_raised(tmp_path: Path) -> None:
    config = Config(**SMALL | {"rounds": 40}, lr=1e30, method="fedavg", baselines=("fedavg-sl",), processes=2,
                    run_dir=tmp_path / "run")  # fmt: skip
    with pytest.raises(Diverged, match="training stopped"):
        runner.start(config)
    assert not (tmp_path / "run" / assembly.MARKDOWN).exists()


@pytest.mark.parametrize("processes", [1, 2])
def test_failed_method_does_not_lose_results_of_the_rest(processes: int, tmp_path: Path) -> None:
    config = Config(**SMALL | {"rounds": 10}, method="fedavg-fixmatch", baselines=("fedavg", "fedavg-sl"), lr=0.01,
                    options={"fedavg-fixmatch": {"unlabeled_weight": 1e30, "threshold": 0.0}},
                    processes=processes, run_dir=tmp_path / "run")  # fmt: skip
    with pytest.raises(Diverged):
        runner.start(config)
    table = (tmp_path / "run" / assembly.MARKDOWN).read_text()
    titles = {name: registry.entry(name).title for name in (config.method, *config.baselines)}
    assert {name for name, title in titles.items() if f"| {title} " in table} == {"fedavg", "fedavg-sl"}


@pytest.mark.parametrize(
    ("options", "runs", "wanted"),
    [
        ({"rounds": 40}, 4, 3),  # clients compute with one thread
        ({"rounds": 40}, 2, 1),  # not worth it
        ({"rounds": 400}, 2, 2),
        ({"rounds": 40, "network": "resnet9", "threads": 2}, 4, 1),
        ({"rounds": 40, "network": "resnet9", "threads": 1}, 4, 3),
        ({"rounds": 1, "processes": 2}, 4, 2),
        ({"rounds": 400, "processes": 1}, 4, 1),
    ],
)
def test_how_many_processes(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], runs: int, wanted: int) -> None:
    monkeypatch.setattr(parallel, "available_processors", lambda: [0, 1, 2])
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    assert parallel.count_processes(Config(**{"processes": "auto", **options}), runs) == wanted
    assert (
        parallel.count_processes(Config(rounds=400), 4) == 1
    )  # a program that calls halfmoon is not imported again unasked
