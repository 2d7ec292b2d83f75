"""A sweep on a real Ray cluster of two workers on this machine, one of which is killed in the middle of a run."""

import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from small_recipe import RECIPE, train_cells
from test_executor import left
from test_workers import TINY

import halfmoon
from halfmoon.cli import main as cli
from halfmoon.config.schema import Config
from halfmoon.core.errors import UserError, install_command
from halfmoon.engine.executors import ray_cluster
from halfmoon.engine.executors.base import MAX_ATTEMPTS, WorkerDied
from halfmoon.engine.executors.ray_cluster import RayExecutor, WorkerResources, run_resources
from halfmoon.engine.loop import Row
from halfmoon.runs.callbacks import NullCallback, RunInfo
from halfmoon.studies.sweep_folder import SweepFolder
from halfmoon.studies.sweep_tasks import SweepTask, TaskResult, run_task

FEW = "amount=few"
DOOMED = "fedavg-fixmatch"
LAST = 3
"""The method one of whose runs is killed, and the round after which it is."""


class Witness(NullCallback):
    """Write down, in one file, who run which round; the first doomed run stops after round 3, until it is killed."""

    def __init__(self, notes: Path) -> None:
        self.notes = notes

    def begin(self, run: RunInfo) -> None:
        self._note("begin", run, run.first)

    def round(self, run: RunInfo, row: Row) -> None:
        self._note("round", run, row["round"])
        if run.config.method == DOOMED and row["round"] == LAST:
            try:
                mark = os.open(self.notes.with_name("doomed"), os.O_CREAT | os.O_EXCL | os.O_WRONLY)
            except FileExistsError:
                return
            os.write(mark, f"{os.getpid()} {run.folder}\n".encode())
            time.sleep(300)

    def _note(self, what: str, run: RunInfo, number: int) -> None:
        text = json.dumps({"what": what, "run": run.folder.name, "round": number, "pid": os.getpid()}) + "\n"
        handle = os.open(self.notes, os.O_CREAT | os.O_APPEND | os.O_WRONLY)
        os.write(handle, text.encode())
        os.close(handle)


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    """Give a cluster of two workers."""
    module = pytest.importorskip("ray", reason="Ray is not installed: pip install 'halfmoon[ray]' to test its engine")
    before = os.environ.get("RAY_USAGE_STATS_ENABLED")
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    # "local": not a cluster that somebody else has on this machine.
    options = {"address": "local", "num_cpus": 2, "num_gpus": 0, "include_dashboard": False}
    options["object_store_memory"] = 100_000_000
    # Workers unpickle the witness of this file, and so have to find it.
    environment = {"env_vars": {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}}
    # Ray makes its workers nice: beside other tests on few cores they would hardly get to compute.
    system = {"worker_niceness": 0}
    module.init(**options, runtime_env=environment, log_to_driver=False, logging_level="ERROR", _system_config=system)
    yield module
    module.shutdown()
    if before is None:
        del os.environ["RAY_USAGE_STATS_ENABLED"]


@pytest.fixture
def recipe_file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.toml"
    path.write_text(RECIPE)
    return path


def runs(folder: SweepFolder) -> dict[str, Path]:
    return {
        run["identity"]: folder.run_path(run["identity"]) for cell in folder.read()["cells"] for run in cell["runs"]
    }


def kill_the_doomed(notes: Path, killed: list[tuple[int, Path, int]]) -> None:
    """Wait for the run that stops, see that it has a checkpoint, and kill its process."""
    mark = notes.with_name("doomed")
    until = time.monotonic() + 300
    while time.monotonic() < until:
        if mark.exists() and mark.read_text().endswith("\n"):
            pid, folder = mark.read_text().split()
            newest = max(int(path.stem.split("-")[1]) for path in Path(folder).glob("checkpoint-*.json"))
            os.kill(int(pid), signal.SIGKILL)
            killed.append((int(pid), Path(folder), newest))
            return
        time.sleep(0.05)


def node(alive: bool = True, **resources: float) -> dict[str, Any]:
    return {"Alive": alive, "Resources": resources}


def test_a_run_gets_its_share_of_the_smallest_machine() -> None:
    """16 and 8 processors, 4 runs on each: 2 a run. Four runs share two GPUs: half of one each; one gets one whole."""
    nodes = [node(CPU=16.0, GPU=4.0), node(CPU=8.0, GPU=2.0), node(False, CPU=1.0), node(memory=1.0)]
    assert run_resources(nodes, 4) == WorkerResources(None, 2, 0.5)
    assert run_resources(nodes, 1) == WorkerResources(None, 8, 1.0)
    assert run_resources(nodes, 6) == WorkerResources(None, 1, 0.3333)  # rounded down: six of them fit into two
    assert run_resources([node(CPU=2.0)], 4) == WorkerResources(None, 1, 0.0)
    with pytest.raises(UserError, match="no machine with processors"):
        run_resources([node(False, CPU=4.0), node(memory=1.0)], 1)


def ray_options(monkeypatch: pytest.MonkeyPatch, text: str, split_only: bool = False) -> dict[str, Any]:
    """Return what is queried of a Ray with 4 processors and 1 GPU for a task."""
    found: dict[str, Any] = {}

    def options(**given: Any) -> Any:
        found.update(given)
        return SimpleNamespace(remote=lambda function, task: "ref")

    fake = SimpleNamespace(
        is_initialized=lambda: True, nodes=lambda: [node(CPU=4.0, GPU=1.0)], cancel=lambda ref, force: None,
        remote=lambda function: SimpleNamespace(options=options), wait=lambda refs, num_returns: (refs, []),
        get=lambda ref: TaskResult({}), exceptions=SimpleNamespace(RayTaskError=OSError),
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "ray", fake)
    task = SweepTask(Path("cells/abc"), text, split_only)
    executor = RayExecutor(partial(run_resources, jobs=2))
    assert list(executor.run_tasks(run_task, [task])) == [(task, TaskResult({}))]
    return found


def test_a_task_asks_for_processors_and_a_gpu_by_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    common = {"name": "abc", "num_cpus": 2, "max_retries": MAX_ATTEMPTS - 1}
    assert ray_options(monkeypatch, "") == {**common, "num_gpus": 0.5}
    assert ray_options(monkeypatch, 'device = "cuda"') == {**common, "num_gpus": 0.5}
    assert ray_options(monkeypatch, 'device = "cpu"') == {**common, "num_gpus": 0}
    assert ray_options(monkeypatch, "", split_only=True) == {**common, "num_gpus": 0}


def test_what_is_printed_while_runs_are_played_is_no_result(recipe_file, monkeypatch, capsys):
    """Ray prints to stdout that a worker died, from a thread that lives until the cluster is left."""
    monkeypatch.chdir(recipe_file.parent)
    monkeypatch.setenv("RAY_TMPDIR", str(recipe_file.parent))  # where no cluster was started before
    joined: list[dict[str, Any]] = []

    def ended(*_: Any, **__: Any) -> Any:
        print("(raylet) a worker died")
        raise KeyboardInterrupt

    fake = SimpleNamespace(
        is_initialized=lambda: False, init=lambda **given: joined.append(given), nodes=lambda: [node(CPU=1.0)],
        remote=ended, exceptions=SimpleNamespace(), shutdown=lambda: print("(raylet) one more"),
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "ray", fake)
    assert cli.main(["sweep", "mine.toml", "--engine", "ray", "--json"]) == 130
    printed = capsys.readouterr()
    assert json.loads(printed.out)["recipe"] == "mine"
    assert printed.err.splitlines()[:2] == ["(raylet) a worker died", "(raylet) one more"]
    assert [given["address"] for given in joined] == [None]


def test_no_ray_and_no_cluster_are_sentences(recipe_file, monkeypatch, capsys):
    monkeypatch.chdir(recipe_file.parent)
    arguments = ["sweep", "mine.toml", "--engine", "ray", "--ray-address", "10.0.0.1:6379"]
    monkeypatch.setitem(sys.modules, "ray", None)
    assert cli.main(arguments) == 2
    assert capsys.readouterr().err == f"halfmoon: Ray is not installed; {install_command('ray')} to use it.\n"

    def init(**given: Any) -> None:
        raise ConnectionError(f"Could not find {given['address']}.\n  Check it")

    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: False, init=init))
    monkeypatch.setattr(ray_cluster, "_accepts_connections", lambda address: True)
    assert cli.main(arguments) == 2
    assert capsys.readouterr().err == (
        "halfmoon: no Ray cluster responds at 10.0.0.1:6379 (Could not find 10.0.0.1:6379. Check it); start one with "
        "ray start --head, or check --ray-address and RAY_ADDRESS.\n"
    )
    assert cli.main(["sweep", "mine.toml", "--ray-address", "10.0.0.1:6379"]) == 2
    assert capsys.readouterr().err == "halfmoon: --ray-address needs --engine ray.\n"


def test_an_address_without_a_cluster_is_an_error_at_once(monkeypatch, recipe_file, capsys):
    """Ray itself would retry for minutes."""
    monkeypatch.chdir(recipe_file.parent)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: False, init=None))
    for arguments, environment in ((["--ray-address", address], ""), ([], address)):
        monkeypatch.setenv("RAY_ADDRESS", environment)
        assert cli.main(["sweep", "mine.toml", "--engine", "ray", *arguments]) == 2
        assert capsys.readouterr().err.startswith(
            f"halfmoon: no Ray cluster responds at {address} (no connection within"
        )


@pytest.mark.parametrize("runs", [True, False])
def test_a_new_cluster_starts_if_the_last_one_of_this_machine_was_killed(runs, monkeypatch, tmp_path):
    """Ray's file with its address remains, and Ray would wait for it."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    joined: list[str | None] = []
    fake = SimpleNamespace(is_initialized=lambda: False, init=lambda address, **_: joined.append(address))
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        (tmp_path / "ray").mkdir()
        (tmp_path / "ray/ray_current_cluster").write_text(address)
        if not runs:
            server.close()
        assert ray_cluster.connect_ray(fake, None)
    assert joined == [None if runs else "local"]


# On a cluster; these come last, as Ray prints to the stdout of whoever is connected


@pytest.mark.nightly  # the next but one kills workers by default, and test_sweep.py the process of a run
def test_a_killed_worker_loses_nothing(ray: Any, recipe_file: Path, tmp_path: Path) -> None:
    """Four runs on two workers; one dies by SIGKILL after its third round. The bytes are those of a straight sweep.
    Nothing is run twice: every round of every run is run once, the killed run's by two processes, the second of
    which begins after the third round. What is finished is not begun again by a second sweep."""
    straight, _, failed = train_cells(recipe_file, FEW, scale=None, seeds=(0, 1), out="straight")
    assert failed == []
    notes = tmp_path / "notes"
    killed = list[tuple[int, Path, int]]()
    killer = threading.Thread(target=kill_the_doomed, args=(notes, killed))
    killer.start()
    rays = RayExecutor(partial(run_resources, jobs=2))
    witness = Witness(notes)
    folder, steps, _ = train_cells(recipe_file, FEW, scale=None, seeds=(0, 1), executor=rays, callback=witness)
    killer.join()
    ((pid, victim, newest),) = killed
    assert newest == LAST
    assert [step.failed for step in steps] == [None] * 4
    assert sorted(step.number for step in steps) == [1, 2, 3, 4]
    expected = runs(straight)
    assert runs(folder).keys() == expected.keys()
    for mark, path in runs(folder).items():
        for name in ("metrics.jsonl", "model.safetensors", "split.parquet"):
            assert (path / name).read_bytes() == (expected[mark] / name).read_bytes(), name
    messages = [json.loads(line) for line in notes.read_text().splitlines()]
    rounds = sorted((each["run"], each["round"]) for each in messages if each["what"] == "round")
    assert rounds == sorted((path.name, number) for path in expected.values() for number in range(1, 6))
    of_victim = [(each["round"], each["pid"] == pid) for each in messages if each["run"] == victim.name]
    assert of_victim == [(0, True), (1, True), (2, True), (3, True), (3, False), (4, False), (5, False)]
    started = [each["round"] for each in messages if each["what"] == "begin"]
    assert sorted(started) == [0, 0, 0, 0, LAST]
    workers = {each["pid"] for each in messages}
    assert len(workers) >= 2
    assert os.getpid() not in workers
    _, steps, _ = train_cells(recipe_file, FEW, scale=None, seeds=(0, 1), executor=rays, callback=witness)
    assert [step.finished_before for step in steps] == [True] * 4
    assert len(notes.read_text().splitlines()) == len(messages)


def test_the_command_plays_on_ray(ray, recipe_file, tmp_path, monkeypatch, capsys):
    """With a relative --out, which workers see where the command sees it, and a tracker, which looks on there."""
    monkeypatch.chdir(tmp_path)
    text = (
        "sweep mine.toml --engine ray --jobs 2 --only amount=few,method=fedavg --scale short --seeds 0 --out here "
        "--tracker tensorboard --json"
    )
    assert cli.main(text.split()) == 0
    printed = json.loads(capsys.readouterr().out)
    (run,) = [run for cell in printed["cells"] for run in cell["runs"]]
    assert run["finished"]
    path = tmp_path / "here" / "mine-short" / run["folder"]
    assert len((path / "metrics.jsonl").read_text().splitlines()) == 2
    assert list((path / "tensorboard").iterdir())
    assert ray.is_initialized()  # a cluster that was there before is left as it was


def test_clients_that_train_on_ray_train_as_here(ray: Any, tmp_path: Path) -> None:
    """The run uses the cluster that is there, and leaves it as it was; two machines do so at night, in test_workers.py."""
    halfmoon.run(Config(**TINY, workers=1, run_dir=tmp_path / "here"))
    halfmoon.run(Config(**TINY, workers="ray", run_dir=tmp_path / "there"))
    assert ray.is_initialized()
    assert left(tmp_path / "here") == left(tmp_path / "there")


@pytest.mark.slow
def test_a_mistake_and_a_worker_that_always_dies_are_sentences(
    ray: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_cluster, "MAX_ATTEMPTS", 2)
    rays = RayExecutor(partial(run_resources, jobs=2))
    tasks = [
        SweepTask(tmp_path / "wrong", 'method = "fedure"\n'),
        SweepTask(tmp_path / "dead", 'method = "fedavg"\nrounds = 1\nsteps = 1\nwidth = 4\nseed = 1\ndevice = "cpu"\n'),
        SweepTask(tmp_path / "sound", 'method = "fedavg"\nrounds = 1\nsteps = 1\nwidth = 4\ndevice = "cpu"\n'),
    ]

    results = dict(rays.run_tasks(partial(run_task, callback=Deadly()), tasks))
    done = {task.name: result for task, result in results.items()}
    assert done["wrong"].failed == "unknown method 'fedure': did you mean 'feddure'?"
    assert isinstance(done["dead"], WorkerDied)
    assert done["dead"].reason.endswith("its worker died 2 times: killed, or out of memory.")
    assert done["sound"].failed is None
    assert set(results) == set(tasks)
    assert (tmp_path / "tries").read_text() == "xx"


class Deadly(NullCallback):
    """Kill the worker of a run with seed 1."""

    def begin(self, run: RunInfo) -> None:
        if run.config.seed == 1:
            with (run.folder.parent / "tries").open("a") as file:
                file.write("x")
            os.kill(os.getpid(), signal.SIGKILL)
