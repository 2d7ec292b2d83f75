"""Callbacks know their run and cannot lose it; event files, read by TensorBoard itself, say what metrics.jsonl says."""

import json
import os
import pickle
import re
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_recipe import RECIPE, train_cells
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_multiplexer import EventMultiplexer

import halfmoon
from halfmoon.cli import main as cli
from halfmoon.core.errors import install_command
from halfmoon.engine.loop import Row
from halfmoon.runs import runner
from halfmoon.runs.callbacks import RunInfo
from halfmoon.runs.trackers import EVENTS, TensorBoard, replay, scalars, tracker


def config(path: Path, **options: Any) -> halfmoon.Config:
    """Return a run of four rounds, of which the second and the last are evaluated."""
    shared: dict[str, Any] = {"rounds": 4, "evaluate_every": 2, "clients": 4, "cohort": 2, "steps": 2, "width": 4}
    shared |= {"method": "fedavg-fixmatch", "threads": 1, "run_dir": path}
    return halfmoon.Config(**{**shared, **options})


def rows(folder: Path) -> list[Row]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def read(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Return what TensorBoard reads in a run's event files: (step, value) of every scalar."""
    events = EventAccumulator(str(folder / EVENTS), size_guidance={"scalars": 0}).Reload()
    return {tag: [(each.step, each.value) for each in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def expected(folder: Path) -> dict[str, Any]:
    """Return the scalars that a run's metrics.jsonl asks for: the numbers in the parts of its rows, in 4 bytes."""
    found: dict[str, list[tuple[int, float]]] = {}
    for row in rows(folder):
        for section, values in row.items():
            numbers = dict(values) if isinstance(values, dict) else {}
            clients = numbers.pop("clients", {}) if section == "test" else {}
            numbers |= {f"clients/{name}": value for name, value in clients.items()}
            for name, value in numbers.items():
                if isinstance(value, int | float):
                    found.setdefault(f"{section}/{name}", []).append((row["round"], float(np.float32(value))))
    return found


class Notes(halfmoon.NullCallback):
    """Record the calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def begin(self, run: RunInfo) -> None:
        assert (run.folder / "config.toml").exists()
        self.calls.append(("begin", run))

    def round(self, run: RunInfo, row: Row) -> None:
        assert rows(run.folder)[-1] == row
        self.calls.append(("round", run, row["round"]))

    def end(self, run: RunInfo, summary: Row) -> None:
        assert json.loads((run.folder / "summary.json").read_text()) == summary
        self.calls.append(("end", run, summary["method"]))


class Raising(halfmoon.NullCallback):
    """Raise in a round, and count how often it is queried."""

    def __init__(self, at: int, error: BaseException) -> None:
        self.at = at
        self.error = error
        self.asked = 0

    def round(self, run: RunInfo, row: Row) -> None:
        self.asked += 1
        if row["round"] == self.at:
            raise self.error


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run that nobody tracked."""
    return halfmoon.run(config(tmp_path_factory.mktemp("plain") / "run")).folder


@pytest.fixture(scope="module")
def tracked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the same run, tracked."""
    return halfmoon.run(config(tmp_path_factory.mktemp("tracked") / "run"), TensorBoard()).folder


# Callbacks


def test_callback_gets_its_run(tmp_path: Path) -> None:
    """Two methods in turn: the callback gets the folder and configuration of each."""
    notes = Notes()
    chosen = config(tmp_path / "run", rounds=2, baselines=("fedavg",), seed=3)
    halfmoon.run(chosen, notes)
    first, second = (message[1] for message in notes.calls if message[0] == "begin")
    assert (first.folder, second.folder) == (tmp_path / "run", tmp_path / "run" / "baselines" / "fedavg")
    assert [run.config.method for run in (first, second)] == ["fedavg-fixmatch", "fedavg"]
    assert (first.rounds, first.first, first.config.seed, second.title) == (2, 0, 3, "FedAvg (labeled only)")
    assert notes.calls == [
        each
        for run in (first, second)
        for each in (("begin", run), ("round", run, 1), ("round", run, 2), ("end", run, run.config.method))
    ]


def test_several_look_on_and_one_that_raises_does_not_lose_the_run(tmp_path: Path, plain: Path) -> None:
    notes = Notes()
    broken = Raising(2, OSError("no answer"))
    with pytest.warns(RuntimeWarning) as output:
        outcome = halfmoon.run(config(tmp_path / "run"), halfmoon.Callbacks(broken, notes))
    warning = "The callback Raising failed (OSError: no answer); the run continues without it."
    assert [str(each.message) for each in output if "The callback" in str(each.message)] == [warning]
    assert broken.asked == 2
    assert [message[2] for message in notes.calls if message[0] == "round"] == [1, 2, 3, 4]
    assert outcome.summaries[0]["finished"]
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == (plain / "metrics.jsonl").read_bytes()


def test_failing_callback_does_not_stop_a_run_or_comparison(tmp_path: Path) -> None:
    """Run, compare, and resume after KeyboardInterrupt, which passes."""
    short = {"rounds": 2, "method": "fedavg"}
    with pytest.raises(KeyboardInterrupt):
        halfmoon.run(config(tmp_path / "run", **short), Raising(1, KeyboardInterrupt()))
    with pytest.warns(RuntimeWarning, match="continues without it"):
        assert halfmoon.resume(tmp_path / "run", Raising(2, ValueError())).summaries[0]["finished"]
    broken = Raising(1, ValueError())
    with pytest.warns(RuntimeWarning, match="continues without it"):
        halfmoon.compare(["fedavg"], config(tmp_path / "both", **short), 2, broken)
    assert broken.asked == 1


def test_callback_with_the_old_function_for_messages_is_refused(tmp_path: Path) -> None:
    class Old(halfmoon.NullCallback):
        def say(self, text: str) -> None: ...

    with pytest.raises(
        halfmoon.UserError, match=r"Old has a method say\(text\), which is record\(name, text, \*\*fields\)"
    ):
        halfmoon.run(config(tmp_path / "run"), Old())
    assert not (tmp_path / "run").exists()


def test_command_line_reports_a_failed_tracker(monkeypatch, capsys):
    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(TensorBoard, "begin", fail)
    message = "run --method fedavg --rounds 2 --steps 2 --width 4 --threads 1 --tracker tensorboard --run-dir r"
    assert cli.main(message.split()) == 0
    output = capsys.readouterr().err
    failed = "The callback TensorBoard failed (OSError: [Errno 28] No space left on device)"
    assert f"\nhalfmoon: {failed}; the run continues without it.\n" in output
    assert "Warning" not in output


# TensorBoard


def test_tensorboard_values_equal_the_metrics(tracked: Path) -> None:
    found = read(tracked)
    assert found == expected(tracked)
    assert [step for step, _ in found["test/accuracy"]] == [2, 4]
    assert [step for step, _ in found["train/loss"]] == [1, 2, 3, 4]
    assert {name.split("/")[0] for name in found} >= {"train", "pseudo", "cost", "test"}


def test_the_configuration_is_a_text(tracked: Path) -> None:
    events = EventAccumulator(str(tracked / EVENTS)).Reload()
    (text,) = events.Tensors("config/text_summary")
    shown = text.tensor_proto.string_val[0].decode()
    assert shown == f"```toml\n{(tracked / 'config.toml').read_text()}```"


def test_a_tracker_changes_no_byte_of_a_run(tracked: Path, plain: Path) -> None:
    for name in ("metrics.jsonl", "model.safetensors", "config.toml", "split.parquet"):
        assert (tracked / name).read_bytes() == (plain / name).read_bytes()


def test_tracker_can_be_pickled_to_a_worker_process(tmp_path: Path, plain: Path) -> None:
    """As sweeps do: what arrives there tracks as well."""
    halfmoon.run(config(tmp_path / "run"), pickle.loads(pickle.dumps(TensorBoard())))
    assert read(tmp_path / "run") == expected(plain)


@pytest.mark.parametrize("before", [True, False], ids=["tracked before", "not tracked before"])
def test_a_resumed_run_doubles_and_misses_no_step(tmp_path: Path, plain: Path, before: bool) -> None:
    """Stopped after round 3, when the newest checkpoint is of round 2, it runs round 3 again.

    A TensorBoard that has read the first files drops their steps: it is the same reader, before and after.
    """
    board = TensorBoard()
    watches = halfmoon.Callbacks(*([board] if before else []), Raising(3, KeyboardInterrupt()))
    chosen = config(tmp_path / "run", checkpoint_every=2)
    with pytest.raises(KeyboardInterrupt):
        halfmoon.run(chosen, watches)
    assert len(rows(tmp_path / "run")) == 3
    reader = None
    for file in (tmp_path / "run" / EVENTS).glob("*") if before else ():
        # A reader follows the names of event files, in which time goes by seconds.
        file.rename(file.with_name("events.out.tfevents.1000000000.before"))
        reader = EventAccumulator(str(tmp_path / "run" / EVENTS)).Reload()
    notes = Notes()
    halfmoon.resume(tmp_path / "run", halfmoon.Callbacks(board, notes))
    assert notes.calls[0][1].first == 2
    assert read(tmp_path / "run") == expected(plain)
    if reader is not None:
        assert [each.step for each in reader.Reload().Scalars("train/loss")] == [1, 2, 3, 4]


def test_a_replay_is_what_a_tracker_would_have_written(tmp_path: Path, plain: Path) -> None:
    """Twice is as good as once; the times are those of timings.jsonl, back from the last write of metrics.jsonl."""
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in ("config.toml", "metrics.jsonl"):
        (copy / name).write_bytes((plain / name).read_bytes())
    repeated = {"round": 4, "seconds": 10.0}  # run once more after a kill: the later row counts
    seconds = [5.0, 7.0, 2.0, 99.0]
    lines = [{"round": k + 1, "seconds": value} for k, value in enumerate(seconds)] + [repeated]
    (copy / "timings.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    os.utime(copy / "metrics.jsonl", (1000.0, 1000.0))
    for _ in range(2):
        assert replay(copy) == copy / EVENTS
    assert read(copy) == expected(plain)
    events = EventAccumulator(str(copy / EVENTS)).Reload()
    # 1000 s is the end of round 4, which took 10 s; round 3 took 2 s, round 2 took 7 s.
    assert [each.wall_time for each in events.Scalars("cost/forward")] == [981.0, 988.0, 990.0, 1000.0]


def test_scalars_are_the_numbers_of_a_row() -> None:
    row = {"round": 3, "cohort": [1, 2], "pseudo": None, "test": {"accuracy": 1, "per_class": [0.5], "loss": None}}
    assert scalars(row) == {"test/accuracy": 1.0}
    assert scalars({"round": 1, "prior": {"js": {"app_u": 0.5}, "app_u": [0.1]}, "over": True}) == {
        "prior/js/app_u": 0.5
    }


def test_numbers_that_are_not_finite_are_skipped(tmp_path: Path) -> None:
    """As in metrics.jsonl, where it is null: what is tracked and what is replayed agree."""
    (tmp_path / "config.toml").write_text('method = "fedavg"\n')
    board = TensorBoard()
    run = RunInfo(tmp_path, config(tmp_path), "FedAvg")
    board.begin(run)
    board.round(run, {"round": 1, "train": {"loss": float("nan"), "m": 0.25}})
    board.end(run, {})
    assert read(tmp_path) == {"train/m": [(1, 0.25)]}


# What goes wrong


def test_without_the_extra_the_error_names_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    assert cli.main(["run", "--tracker", "tensorboard"]) == 2
    output = capsys.readouterr().err
    assert output == f"halfmoon: TensorBoard is not installed; {install_command('tensorboard')} to use it.\n"
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_tracker_is_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["compare", "--methods", "fedavg", "--tracker", "tensorbord"]) == 2
    assert capsys.readouterr().err == "halfmoon: unknown tracker 'tensorbord': did you mean 'tensorboard'?\n"
    assert list(tmp_path.iterdir()) == []


def test_a_replay_of_no_run_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(halfmoon.UserError, match="is not a run folder"):
        replay(tmp_path)
    (tmp_path / "config.toml").write_text("")
    (tmp_path / EVENTS).write_text("a file is in the way")
    with pytest.raises(halfmoon.UserError, match="the event files cannot be written"):
        replay(tmp_path)


def test_every_run_of_a_comparison_is_tracked(tmp_path: Path) -> None:
    message = "compare --methods fedavg fedavg-fixmatch --rounds 2 --steps 2 --width 4 --threads 1 --run-dir r --json"
    assert cli.main([*message.split(), "--tracker", "tensorboard"]) == 0
    for name in ("fedavg-seed0", "fedavg-fixmatch-seed0"):
        assert read(tmp_path / "r" / name) == expected(tmp_path / "r" / name)
    # A finished comparison causes no call: no run starts.
    files = {path: path.stat().st_mtime_ns for path in (tmp_path / "r").rglob("events.*")}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        runner.resume(tmp_path / "r", tracker("tensorboard"))
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "r").rglob("events.*")} == files
    assert len(files) == 2


def test_wandb_gets_every_row_offline(tmp_path: Path, plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run is one of wandb's offline folders, and its steps are the rounds."""
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    logged = []
    log = wandb.Run.log
    monkeypatch.setattr(wandb.Run, "log", lambda run, data, step: (logged.append((step, data)), log(run, data, step)))
    halfmoon.run(config(tmp_path / "run"), tracker("wandb"))
    assert logged == [(row["round"], scalars(row)) for row in rows(plain)]
    assert list((tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb"))


def test_mlflow_gets_every_row_once(tmp_path: Path, plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a run was stopped and continues."""
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "store").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # newer versions prefer a data base
    with pytest.raises(KeyboardInterrupt):
        halfmoon.run(config(tmp_path / "run"), halfmoon.Callbacks(tracker("mlflow"), Raising(2, KeyboardInterrupt())))
    halfmoon.resume(tmp_path / "run", tracker("mlflow"))
    client = mlflow.MlflowClient()
    (run,) = client.search_runs([client.get_experiment_by_name("halfmoon").experiment_id])
    history = client.get_metric_history(run.info.run_id, "test/accuracy")
    expected = {row["round"]: row["test"]["accuracy"] for row in rows(plain) if "test" in row}
    assert {each.step: each.value for each in history} == expected
    assert run.data.params["method"] == "fedavg-fixmatch"


# Groups


COMPARISON = {"rounds": 1, "evaluate_every": 1, "processes": 1}


def compare_tracked(folder: Path, callback: Any, **options: Any) -> None:
    """Compare two methods with two seeds each."""
    halfmoon.compare(["fedavg", "fedavg-fixmatch"], config(folder, **COMPARISON, **options), [0, 1], callback)


class Groups(halfmoon.NullCallback):
    """Note the group of each event."""

    def __init__(self) -> None:
        self.groups: list[Path | None] = []

    def begin(self, run: RunInfo) -> None:
        self.groups.append(run.group)

    def round(self, run: RunInfo, row: Row) -> None:
        self.groups.append(run.group)

    def end(self, run: RunInfo, summary: Row) -> None:
        self.groups.append(run.group)


def test_runs_of_a_comparison_are_a_group_and_a_single_run_is_none(tmp_path: Path) -> None:
    single, several, compared, processes = Groups(), Groups(), Groups(), Groups()
    halfmoon.run(config(tmp_path / "single", **COMPARISON), single)
    halfmoon.run(config(tmp_path / "several", baselines=("fedavg",), **COMPARISON), several)
    compare_tracked(tmp_path / "compared", compared)
    halfmoon.run(config(tmp_path / "both", baselines=("fedavg",), **{**COMPARISON, "processes": 2}), processes)
    assert single.groups == [None] * 3
    assert several.groups == [tmp_path / "several"] * 6
    assert compared.groups == [tmp_path / "compared"] * 12
    assert processes.groups == [tmp_path / "both"] * 6


@pytest.mark.parametrize(("group", "expected"), [(None, "compared"), ("lr search", "lr search")])
def test_wandb_groups_the_runs_of_a_comparison(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group: str | None, expected: str
) -> None:
    """As wandb itself has stored them: the group, and the method as the job type."""
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    started = []
    init = wandb.init
    monkeypatch.setattr(wandb, "init", lambda **options: (started.append(init(**options)), started[-1])[1])
    compare_tracked(tmp_path / "compared", tracker("wandb", group))
    halfmoon.run(config(tmp_path / "single", **COMPARISON), tracker("wandb"))
    found = [(run.group, run.job_type, run.name) for run in started]
    assert found == [
        *((expected, method, f"{method}-seed{seed}") for method in ("fedavg", "fedavg-fixmatch") for seed in (0, 1)),
        ("", "", "single"),
    ]


def test_mlflow_has_a_parent_run_for_each_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two comparisons with folders of one name stay apart; a given name joins them; a resumed run keeps its parent."""
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "store").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    for parent in ("one", "two"):
        stopping = Raising(1, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            compare_tracked(tmp_path / parent / "seeds", halfmoon.Callbacks(tracker("mlflow"), stopping))
        halfmoon.resume(tmp_path / parent / "seeds", tracker("mlflow"))
    halfmoon.run(config(tmp_path / "single", **COMPARISON), tracker("mlflow"))
    for name in ("three", "four"):
        halfmoon.run(config(tmp_path / name, **COMPARISON), tracker("mlflow", "together"))
    client = mlflow.MlflowClient()
    runs = client.search_runs([client.get_experiment_by_name("halfmoon").experiment_id])
    parents = {run.info.run_id: run.info.run_name for run in runs if "halfmoon.parent" in run.data.tags}
    assert sorted(parents.values()) == ["seeds", "seeds", "together"]
    children: dict[str | None, list[str]] = {}
    for run in runs:
        assert run.info.status == "FINISHED"
        if run.info.run_id not in parents:
            parent = run.data.tags.get("mlflow.parentRunId")
            assert run.data.tags.get("halfmoon.group") == (None if parent is None else parents[parent])
            children.setdefault(parent, []).append(run.info.run_name)
    assert children.pop(None) == ["single"]
    four = ["fedavg-fixmatch-seed0", "fedavg-fixmatch-seed1", "fedavg-seed0", "fedavg-seed1"]
    assert sorted(map(sorted, children.values())) == [four, four, ["four", "three"]]


def test_tensorboard_shows_a_sweep_by_its_folder(tmp_path: Path) -> None:
    """The runs are in cells/HASH; their event files are linked below the sweep, by method and seed."""
    file = tmp_path / "mine.toml"
    file.write_text(RECIPE)
    train_cells(file, "amount=few", seeds=(0, 1), callback=TensorBoard())
    links = sorted((tmp_path / "out" / "mine-short" / EVENTS).iterdir())
    assert [re.sub(r"-[0-9a-f]{8}$", "", link.name) for link in links] == [
        "fedavg-fixmatch-seed0", "fedavg-fixmatch-seed1", "fedavg-seed0", "fedavg-seed1",
    ]  # fmt: skip
    multiplexer = EventMultiplexer().AddRunsFromDirectory(str(tmp_path / "out" / "mine-short")).Reload()
    assert sorted(multiplexer.Runs()) == [f"{EVENTS}/{link.name}" for link in links]
    for link in links:
        assert read(link.resolve().parent) == expected(link.resolve().parent)
    # A comparison's runs are below its folder, so that nothing is linked there.
    compare_tracked(tmp_path / "compared", TensorBoard())
    assert not (tmp_path / "compared" / EVENTS).exists()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("run --tracker-group mine", "--tracker-group needs --tracker wandb or --tracker mlflow; TensorBoard groups"),
        ("run --tracker tensorboard --tracker-group mine", "--tracker-group needs --tracker wandb or --tracker mlflow"),
        ("run --tracker wandb --tracker-group=", "the group '' is no name: it must be one line of 1 to 128 characters"),
    ],
)
def test_a_group_without_effect_is_refused(words: str, sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*words.split(), "--method", "fedavg"]) == 2
    assert capsys.readouterr().err.startswith(f"halfmoon: {sentence}")


def test_a_group_of_tensorboard_has_no_name() -> None:
    with pytest.raises(halfmoon.UserError, match="tensorboard groups runs by their folders"):
        tracker("tensorboard", "mine")
