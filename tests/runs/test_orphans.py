"""No process outlives the command that started it, however that ended: kill -9 of run, compare and sweep."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from halfmoon.storage.run_folder import RunFolder

pytestmark = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="lists processes in /proc")

SECONDS = 6.0
"""Time within which all processes end after the kill: 0.3 s on a free machine, more while other tests run."""

LONG = "--clients 4 --cohort 2 --steps 100000 --width 4 --threads 1 --executor loop"
"""Training whose first round takes minutes, so that no process ends by itself, or notices anything between rounds."""

COMMANDS = {
    "run": f"run --method fedavg {LONG} --rounds 2 --workers 2 --run-dir runs",
    "compare": f"compare --methods fedavg fedavg-fixmatch {LONG} --rounds 2 --processes 2 --run-dir runs",
    "sweep": "sweep sweep.toml --jobs 2 --out runs",
}

SWEEP = """
title = "Two"
paper = "none"
item = "Table 1"
about = "two methods"
rows = "method"
[protocol]
rounds = 2
clients = 4
cohort = 2
steps = 100000
width = 4
threads = 1
executor = "loop"
[axes.method]
a = { title = "a", set = { method = "fedavg" } }
b = { title = "b", set = { method = "fedavg-fixmatch" } }
"""


def processes_of(token: str) -> dict[int, float]:
    """Find the processes with a token in their environment, which children inherit, and their CPU seconds."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                environment = (entry / "environ").read_bytes()
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if f"HALFMOON_TEST_TOKEN={token}".encode() in environment.split(b"\0") and fields[0] != "Z":
                found[int(entry.name)] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return found


def until(condition: Callable[[], bool], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.05)
    return condition()


def kill_when(text: str, folder: Path, enough: Callable[[dict[int, float]], bool]) -> None:
    """Start a command, kill it when its processes are `enough`, and check that all of them end."""
    token = f"{folder.name}-{os.getpid()}"
    environment = {**os.environ, "HALFMOON_TEST_TOKEN": token}
    command = [sys.executable, "-m", "halfmoon", *text.split()]
    with (folder / "output").open("wb") as output:
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT)
    try:
        assert until(lambda: enough(processes_of(token)), 90), (folder / "output").read_text()
    finally:
        process.kill()
        process.wait()
    assert until(lambda: not processes_of(token), SECONDS), processes_of(token)


@pytest.mark.parametrize(
    "command", ["run", *(pytest.param(name, marks=pytest.mark.nightly) for name in COMMANDS if name != "run")]
)
def test_a_killed_command_leaves_no_process(command: str, tmp_path: Path):
    """It is killed while it trains in two processes, of the command, a resource tracker, a fork server and these.
    The folders of the runs are then free: a process that trains in one would have locked it."""
    (tmp_path / "sweep.toml").write_text(SWEEP)
    kill_when(COMMANDS[command], tmp_path, lambda processes: len(processes) >= 5 and started(tmp_path, command))
    for file in tmp_path.rglob("run.json"):
        with RunFolder.open(file.parent):
            pass


def started(folder: Path, command: str) -> bool:
    return len([*folder.rglob("checkpoint-*.json")]) >= (1 if command == "run" else 2)


def test_a_command_that_is_killed_while_its_processes_start_leaves_none(tmp_path: Path):
    """The fork server imports PyTorch for seconds before it looks for its parent."""
    kill_when(COMMANDS["compare"], tmp_path, lambda processes: len(processes) >= 3)
