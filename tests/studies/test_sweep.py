"""Sweeps: nothing is run twice, kills and busy folders end in the bytes of a straight sweep, sweep.json says it."""

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from small_recipe import RECIPE, train_cells
from test_resume import Shell

from halfmoon.cli import main as cli
from halfmoon.config.schema import Config
from halfmoon.core.errors import UserError
from halfmoon.engine.executors.processes import ProcessExecutor
from halfmoon.engine.executors.serial import SerialExecutor
from halfmoon.engine.loop import Row
from halfmoon.report.study import SWEEP_FORMAT
from halfmoon.runs import runner
from halfmoon.runs.callbacks import Callback, NullCallback, RunInfo
from halfmoon.studies import recipe
from halfmoon.studies import run_sweep as sweep_module
from halfmoon.studies.run_sweep import RunReport
from halfmoon.studies.sweep_folder import SweepFolder

ARGUMENTS = ["amount=few"]


@pytest.fixture
def recipe_file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.toml"
    path.write_text(RECIPE)
    return path


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    made = Shell(tmp_path_factory.mktemp("shell"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Return the metrics of two cells that nothing disturbed, by the names of their folders."""
    path = tmp_path_factory.mktemp("straight") / "mine.toml"
    path.write_text(RECIPE)
    folder, _, failed = train_cells(path, *ARGUMENTS, scale=None)
    assert failed == []
    return metrics(folder.out)


def state(root: Path) -> dict[str, tuple[int, bytes]]:
    files = [path for path in sorted(root.rglob("*")) if path.is_file()]
    return {path.relative_to(root).as_posix(): (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


def metrics(out: Path) -> dict[str, bytes]:
    return {path.parent.name: path.read_bytes() for path in sorted(out.glob("cells/*/metrics.jsonl"))}


class Witness(NullCallback):
    """Do something at a round of a method."""

    def __init__(self, method: str, number: int, then: Callable[[RunInfo], None]) -> None:
        self.method = method
        self.number = number
        self.then = then

    def round(self, run: RunInfo, row: Row) -> None:
        if (run.config.method, row["round"]) == (self.method, self.number):
            self.then(run)


class Suicide(NullCallback):
    """Kill the process that runs, once: after round 2 of the first run of FixMatch."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def begin(self, run: RunInfo) -> None:
        with self.mark.with_name("begun").open("a") as file:
            file.write(f"{run.folder.name} {run.first}\n")

    def round(self, run: RunInfo, row: Row) -> None:
        if run.config.method == "fedavg-fixmatch" and row["round"] == 2 and not self.mark.exists():
            self.mark.write_text(run.folder.name)
            os.kill(os.getpid(), signal.SIGKILL)


# sweep.json


def test_sweep_json_is_as_it_is_described(recipe_file: Path) -> None:
    """Every key of it; `published` is FedDure's Table 1 where the recipe says that its numbers stand there."""
    where = 'published = { table = "1", dataset = "CIFAR-10", setting = "(DIR, DIR)" }\n'
    recipe_file.write_text(where + RECIPE)
    folder, steps, failed = train_cells(recipe_file, *ARGUMENTS)
    assert failed == []
    stored = json.loads((folder.path / "sweep.json").read_text())
    assert len(stored.pop("sha256")) == 64  # of all the rest
    assert folder.path == recipe_file.parent / "out" / "mine-short"
    machine = stored.pop("machine")
    versions = stored.pop("versions")
    rows = stored.pop("cells")
    assert stored == {
        "format": 1,
        "recipe": "mine",
        "measure": "test accuracy",
        "title": "Mine, Table 1",
        "paper": "FedDure",
        "item": "Table 1",
        "about": "two methods",
        "reading": "as it is",
        "scale": {"name": "short", "about": "2 of 5 rounds"},
        "kind": "table",
        "rows": "method",
        "columns": ["amount"],
        "x": None,
        "axes": [
            {"name": "amount", "values": [{"name": "few", "title": "few"}]},
            {
                "name": "method",
                "values": [
                    {"name": "fedavg", "title": "FedAvg (labeled only)"},
                    {"name": "fedavg-fixmatch", "title": "FedAvg+FixMatch"},
                ],
            },
        ],
        "command": "halfmoon sweep",
    }
    assert set(machine) == {"cpu", "cores", "gpu"}
    assert machine["cores"] >= 1
    assert set(versions) == {"halfmoon", "torch", "python"}
    assert versions["halfmoon"] == metadata.version("halfmoon")
    assert [row["at"] for row in rows] == [
        {"amount": "few", "method": "fedavg"},
        {"amount": "few", "method": "fedavg-fixmatch"},
    ]
    assert rows[0]["published"] == {"mean": 40.34, "deviation": 0.46, "note": ""}
    for row, step in zip(rows, steps, strict=True):
        (run,) = row["runs"]
        summary = json.loads((folder.path / run["folder"] / "summary.json").read_text())
        assert run == {
            "seed": 0,
            "identity": run["identity"],
            "folder": f"../cells/{run['identity'][:16]}",
            "finished": True,
            "failed": None,
            **{name: summary[name] for name in ("accuracy", "cost", "seconds")},
        }
        assert len(run["identity"]) == 64
        assert step.summary == summary
        assert (folder.path / run["folder"] / "split.json").exists()
        assert len((folder.path / run["folder"] / "metrics.jsonl").read_text().splitlines()) == 2
    assert [(step.number, step.runs, step.finished_before) for step in steps] == [(1, 2, False), (2, 2, False)]
    assert steps[0].label == "amount=few, method=fedavg, seed 0"


def test_what_is_finished_is_not_played_again(recipe_file: Path) -> None:
    folder, _, _ = train_cells(recipe_file, *ARGUMENTS)
    cells_before = state(folder.out / "cells")
    stored = folder.read()
    witness = Witness("fedavg", 1, lambda run: pytest.fail("run twice"))
    _, steps, failed = train_cells(recipe_file, *ARGUMENTS, callback=witness)
    assert failed == []
    assert [step.finished_before for step in steps] == [True, True]
    assert state(folder.out / "cells") == cells_before
    assert folder.read() == stored


def test_only_and_seeds_add_up(recipe_file: Path) -> None:
    """Cells and seeds of two calls stand in one sweep.json, in the order of the axes; those of a scale stay apart."""
    train_cells(recipe_file, "amount=more,method=fedavg-fixmatch", seeds=(1,))
    folder, steps, _ = train_cells(recipe_file, "amount=few,amount=more,method=fedavg", seeds=(0, 1))
    assert len(steps) == 4
    shown = [
        (cell["at"]["amount"], cell["at"]["method"], [run["seed"] for run in cell["runs"]])
        for cell in folder.read()["cells"]
    ]
    assert shown == [("few", "fedavg", [0, 1]), ("more", "fedavg", [0, 1]), ("more", "fedavg-fixmatch", [1])]
    assert all(run["finished"] for cell in folder.read()["cells"] for run in cell["runs"])
    whole, _, _ = train_cells(recipe_file, "amount=few,method=fedavg", scale=None)
    assert whole.path.name == "mine"
    assert len(whole.read()["cells"]) == 1
    assert len(folder.read()["cells"]) == 3


def test_a_sweep_that_ends_meanwhile_is_not_forgotten(recipe_file: Path) -> None:
    """While one sweep runs, another one, of other cells, writes the same sweep.json: both stand there at the end."""
    inner: list[str] = []

    def other(run: RunInfo) -> None:
        inner.extend(train_cells(recipe_file, "amount=more,method=fedavg")[2])

    folder, _, failed = train_cells(recipe_file, *ARGUMENTS, callback=Witness("fedavg-fixmatch", 1, other))
    assert (failed, inner) == ([], [])
    at = [(cell["at"]["amount"], cell["at"]["method"]) for cell in folder.read()["cells"]]
    assert at == [("few", "fedavg"), ("few", "fedavg-fixmatch"), ("more", "fedavg")]


def test_cells_of_an_older_recipe_are_dropped_but_their_runs_stay(recipe_file: Path) -> None:
    folder, _, _ = train_cells(recipe_file, "amount=few,amount=more,method=fedavg")
    before = state(folder.out / "cells")
    changed = RECIPE.replace("labels_per_class = 2", "labels_per_class = 3")
    recipe_file.write_text(changed.replace("[axes.method.fedavg]", "[axes.method.plain]"))
    train_cells(recipe_file, "amount=more,method=plain")
    at = [cell["at"] for cell in folder.read()["cells"]]
    assert at == [{"amount": "more", "method": "plain"}]
    after = state(folder.out / "cells")
    assert {name: after[name] for name in before} == before
    recipe_file.write_text(changed)
    _, steps, _ = train_cells(recipe_file, "amount=few,method=fedavg")
    assert [step.finished_before for step in steps] == [True]  # its run was there all the time


def test_cells_of_equal_configuration_are_one_run(recipe_file: Path) -> None:
    recipe_file.write_text(RECIPE.replace("labels_per_class = 2", "labels_per_class = 1"))
    folder, steps, _ = train_cells(recipe_file, "amount=few,amount=more,method=fedavg")
    assert len(steps) == 1
    assert len(list((folder.out / "cells").iterdir())) == 1
    one, two = folder.read()["cells"]
    assert one["runs"] == two["runs"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "sweep.json is damaged (it is unreadable); remove it and run the sweep again: finished runs are reused."),
        ("[]", "is damaged"),
        ("", "is damaged"),
        ('{"format": 99, "cells": []}', f"has format 99, but this halfmoon reads {SWEEP_FORMAT}; remove it"),
    ],
)
def test_a_sweep_json_that_cannot_be_read(recipe_file: Path, text: str, message: str) -> None:
    folder = SweepFolder(recipe_file.parent / "out", recipe.load(str(recipe_file)), None)
    folder.path.mkdir(parents=True)
    (folder.path / "sweep.json").write_text(text)
    with pytest.raises(UserError, match=r"sweep\.json") as caught:
        train_cells(recipe_file, *ARGUMENTS, scale=None)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert (folder.path / "sweep.json").read_text() == text
    assert not (folder.out / "cells").exists()


@pytest.mark.parametrize("cell", ["3", '{"at": 3, "runs": []}', '{"at": {"amount": "few"}}', '{"at": {}, "runs": [1]}'])
def test_a_cell_in_it_that_means_nothing_is_dropped(recipe_file: Path, cell: str) -> None:
    folder = SweepFolder(recipe_file.parent / "out", recipe.load(str(recipe_file)), None)
    folder.path.mkdir(parents=True)
    (folder.path / "sweep.json").write_text(f'{{"format": {SWEEP_FORMAT}, "cells": [{cell}]}}')
    folder, _, failed = train_cells(recipe_file, "amount=few,method=fedavg", scale=None)
    assert failed == []
    assert [cell["at"] for cell in folder.read()["cells"]] == [{"amount": "few", "method": "fedavg"}]


def test_splits_are_made_and_nothing_is_trained(recipe_file: Path) -> None:
    """A recipe of splits leaves split.json and no metrics; a table of equal configuration trains all the same."""
    table = recipe_file.read_text()
    recipe_file.write_text('kind = "splits"\n' + table)
    folder, steps, failed = train_cells(recipe_file, "amount=few,method=fedavg")
    assert failed == []
    (cell,) = folder.read()["cells"]
    (run,) = cell["runs"]
    assert run == {
        "seed": 0,
        "identity": run["identity"],
        "folder": f"../splits/{run['identity'][:16]}",
        "finished": True,
        "failed": None,
    }
    made = folder.path / run["folder"]
    assert sorted(path.name for path in made.iterdir() if path.name[0] != ".") == [
        "checksums.json",
        "config.toml",
        "run.json",
        "split.json",
        "split.parquet",
        "summary.json",
    ]
    before = state(made)
    _, steps, _ = train_cells(recipe_file, "amount=few,method=fedavg")
    assert [step.finished_before for step in steps] == [True]
    assert state(made) == before
    recipe_file.write_text(table)
    trained, steps, _ = train_cells(recipe_file, "amount=few,method=fedavg")
    assert [step.finished_before for step in steps] == [False]
    assert "accuracy" in trained.read()["cells"][0]["runs"][0]


def test_runs_that_cannot_start_are_reported_before_the_others_train(recipe_file: Path) -> None:
    recipe_file.write_text(RECIPE.replace("set = { labels_per_class = 1 }", "set = { labels_per_class = 1000 }"))
    _, steps, _ = train_cells(recipe_file, "method=fedavg")
    assert [step.label for step in steps] == ["amount=few, method=fedavg, seed 0", "amount=more, method=fedavg, seed 0"]
    _, steps, _ = train_cells(recipe_file)
    assert [bool(step.failed) for step in steps if not step.finished_before] == [True, True, False]


def test_a_cell_that_fails_does_not_stop_the_others(recipe_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of three cells one finds no data: the exit code is 1, and sweep.json has the sentence."""
    lost = recipe_file.parent / "lost"
    text = f'[axes.method.lost]\ntitle = "Lost"\nset = {{ method = "fedavg", data = "{lost}" }}\n'
    recipe_file.write_text(RECIPE.replace("[axes.method.fedavg]", f"{text}\n[axes.method.fedavg]"))
    arguments = [
        "sweep",
        str(recipe_file),
        "--out",
        str(recipe_file.parent / "out"),
        "--scale",
        "short",
        "--only",
        "amount=few",
    ]
    assert cli.main(arguments) == 1
    output = capsys.readouterr()
    assert "failed" in output.err
    assert "SCALED DOWN, not the paper's experiment: 2 of 5 rounds" in " ".join(output.out.split())
    stored = json.loads((recipe_file.parent / "out" / "mine-short" / "sweep.json").read_text())
    runs = {cell["at"]["method"]: cell["runs"][0] for cell in stored["cells"]}
    assert list(runs) == ["lost", "fedavg", "fedavg-fixmatch"]
    assert [run["finished"] for run in runs.values()] == [False, True, True]
    assert runs["lost"].keys() == {"seed", "identity", "folder", "finished", "failed"}
    assert "lost" in runs["lost"]["failed"]
    assert "\n" not in runs["lost"]["failed"]
    assert cli.main([*arguments, "--only", "method=fedavg"]) == 0
    assert "finished before" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (RuntimeError("a shape.\nand more"), "RuntimeError: a shape; the traceback is in "),
        (torch.OutOfMemoryError("no room"), "out of memory (no room); use fewer --jobs, or a smaller scale."),
    ],
)
def test_a_defect_costs_one_cell(
    recipe_file: Path, monkeypatch: pytest.MonkeyPatch, error: RuntimeError, message: str
) -> None:
    cell = runner.run_in_folder

    def broken(config: Config, path: Path, watch: Callback, **rest: Any) -> Row:
        if config.method == "fedavg":
            raise error
        return cell(config, path, watch, **rest)

    monkeypatch.setattr(runner, "run_in_folder", broken)
    folder, steps, failed = train_cells(recipe_file, *ARGUMENTS, scale="short")
    assert [step.failed is None for step in steps] == [False, True]
    assert len(failed) == 1
    assert message in failed[0]
    traces = [path.read_text() for path in folder.out.glob("cells/*-defect.txt")]
    assert [trace.strip().splitlines()[-1] for trace in traces] == (["and more"] if "traceback" in message else [])
    monkeypatch.undo()
    assert train_cells(recipe_file, *ARGUMENTS, scale="short")[2] == [], "mended, the same command plays what is left"


def test_dry_run_lists_and_plays_nothing(recipe_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        cli.main(
            [
                "sweep",
                str(recipe_file),
                "--out",
                str(recipe_file.parent / "out"),
                "--seeds",
                "0",
                "2",
                "--dry-run",
                "--json",
            ]
        )
        == 0
    )
    listed = json.loads(capsys.readouterr().out)
    assert [(row["cell"], row["seed"]) for row in listed][:3] == [
        ("amount=few, method=fedavg", "0"),
        ("amount=few, method=fedavg", "2"),
        ("amount=few, method=fedavg-fixmatch", "0"),
    ]
    assert len({row["identity"] for row in listed}) == len(listed) == 8
    assert not (recipe_file.parent / "out").exists()


def test_a_killed_sweep_goes_on(recipe_file: Path, shell: Shell, straight: dict[str, bytes]) -> None:
    """SIGKILL in the middle of the second run; the same command ends in the metrics of a straight sweep."""
    out = recipe_file.parent / "killed"
    message = f"sweep {recipe_file} --out {out} --only amount=few"

    def kill(pid: int) -> None:
        until = time.monotonic() + 300
        while time.monotonic() < until:
            started = [path for path in out.glob("cells/*/metrics.jsonl") if path.read_bytes().count(b"\n") >= 2]
            if len(started) == 2:
                break
            time.sleep(0.005)
        os.kill(pid, signal.SIGKILL)

    assert shell(message, kill).code == -signal.SIGKILL
    left = json.loads((out / "mine" / "sweep.json").read_text())
    finished = [run["finished"] for cell in left["cells"] for run in cell["runs"]]
    assert finished == [True, False]
    first = out / "mine" / left["cells"][0]["runs"][0]["folder"]
    before = state(first)
    done = shell(message)
    assert done.code == 0, done.output
    assert "finished before" in done.output
    assert state(first) == before
    assert metrics(out) == straight
    assert len(straight) == 2


def test_two_sweeps_at_once_play_each_run_once(
    recipe_file: Path, shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both finish with all cells; a run of the other process is waited for, not repeated."""
    recipe_file.write_text(RECIPE.replace("rounds = 5", "rounds = 60"))
    monkeypatch.setattr(sweep_module, "POLL_SECONDS", 0.05)
    started: list[int] = []
    busy: list[bool] = []
    here: list[tuple[list[RunReport], list[str]]] = []

    class Looking(NullCallback):
        def begin(self, run: RunInfo) -> None:
            started.append(run.first)

    class Asking(SerialExecutor):
        def run_tasks(self, function: Any, tasks: Any) -> Any:
            for task, result in super().run_tasks(function, tasks):
                busy.append(result.busy)
                yield task, result

    def baselines(pid: int) -> None:
        until = time.monotonic() + 300
        while time.monotonic() < until and not list((recipe_file.parent / "out").glob("cells/*/metrics.jsonl")):
            time.sleep(0.005)
        here.append(train_cells(recipe_file, *ARGUMENTS, scale=None, executor=Asking(), callback=Looking())[1:])

    done = shell(f"sweep {recipe_file} --out {recipe_file.parent / 'out'} --only amount=few", baselines)
    assert done.code == 0, done.output
    ((steps, failed),) = here
    assert failed == []
    assert len(steps) == 2
    assert busy[0]  # the other process was in the middle of the first run
    assert started in ([], [0])  # which this one did not touch; the second it run from its start, or not at all
    for data in metrics(recipe_file.parent / "out").values():
        assert [json.loads(line)["round"] for line in data.splitlines()] == list(range(1, 61))
    stored = json.loads((recipe_file.parent / "out" / "mine" / "sweep.json").read_text())
    assert [run["finished"] for cell in stored["cells"] for run in cell["runs"]] == [True, True]


def test_processes_play_several_at_once_and_one_that_is_killed_is_replaced(
    recipe_file: Path, straight: dict[str, bytes]
) -> None:
    """Its run continues from its checkpoint in a new process, and all end in the metrics of a straight sweep."""
    mark = recipe_file.parent / "killed"
    folder, steps, failed = train_cells(
        recipe_file, *ARGUMENTS, scale=None, executor=ProcessExecutor(2), callback=Suicide(mark)
    )
    assert failed == []
    assert sorted(step.summary["method"] for step in steps if step.summary) == ["fedavg", "fedavg-fixmatch"]
    for step in steps:
        assert f"method={step.summary['method']}," in step.label
    assert metrics(folder.out) == straight
    started = mark.with_name("begun").read_text().splitlines()
    name = mark.read_text()
    assert [line for line in started if line.startswith(name)] == [f"{name} 0", f"{name} 2"]
