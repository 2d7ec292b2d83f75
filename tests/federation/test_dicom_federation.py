"""A federation of a site with DICOM files: kills leave no process, it continues, and no identifier leaves the header."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_transport import free_port
from support.dicom_files import MARK, write_marked_dicom

from halfmoon.cli.main import main

pytest.importorskip("flwr")
pytest.importorskip("pydicom")

TOKEN = "HALFMOON_TEST_TOKEN"
SECONDS_UNTIL_GONE = 6.0
"""Time within which all processes end after a kill: below 1 s on a free machine, more while other tests run."""

TERMS = """
data = "digits"
method = "fedavg"
network = "small"
width = 4
steps = 2
rounds = {rounds}
cohort = 1
clients = 1
[federation]
name = "marked"
sites = ["ward"]
classes = ["a", "b"]
image = [1, 8, 8]
mirror = false
mean = [0.3]
std = [0.4]
"""


def processes_of(token: str) -> dict[int, str]:
    """Find the processes with a token in their environment, which children inherit."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            environment = (entry / "environ").read_bytes()
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            if f"{TOKEN}={token}".encode() in environment.split(b"\0") and state != "Z":
                found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
    return found


def wait_for(condition: Callable[[], bool], seconds: float, what: Callable[[], object]) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, what()
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="federations are made for Linux")
@pytest.mark.parametrize("killed", [("join",), pytest.param(("join", "serve"), marks=pytest.mark.nightly)])
def test_kills_and_no_identifier(tmp_path: Path, killed: tuple[str, ...]) -> None:
    """`site join` is killed after round 1 and `serve` after round 2. Both restart, and all rounds are there."""
    last = len(killed) + 1
    ward = tmp_path / "ward"
    for number in range(12):
        write_marked_dicom(ward / f"{number}.dcm", number)
    (ward / "labels.csv").write_text("path,label\n" + "".join(f"{n}.dcm,{'ab'[n % 2]}\n" for n in range(8)))
    (ward / "classes.txt").write_text("a\nb\n")
    (tmp_path / "f.toml").write_text(TERMS.format(rounds=last))
    run = tmp_path / "run"
    port = free_port()
    started: list[subprocess.Popen[bytes]] = []
    commands = {
        "serve": ["serve", str(tmp_path / "f.toml"), "--run-dir", str(run), "--port", str(port)],
        "join": [
            *("site", "join", "--server", f"127.0.0.1:{port}", "--site", str(ward), "--name", "ward"),
            *("--terms", "any", "--home", str(tmp_path / "home")),
        ],
    }

    def token(name: str) -> str:
        return f"{name}-{tmp_path.name}-{os.getpid()}"

    def start(name: str) -> subprocess.Popen[bytes]:
        environment = {**os.environ, TOKEN: token(name), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "always"}
        with (tmp_path / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "halfmoon", *commands[name]], stdout=log, stderr=log, env=environment
            )
        started.append(process)
        return process

    def logs() -> str:
        return "".join(f"{name}:\n{(tmp_path / f'{name}.log').read_text()}" for name in commands)

    def rounds() -> int:
        metrics = run / "metrics.jsonl"
        return len(metrics.read_text().splitlines()) if metrics.exists() else 0

    def kill(name: str, process: subprocess.Popen[bytes]) -> None:
        assert len(processes_of(token(name))) >= 2  # the command and Flower's programs
        process.kill()
        process.wait()
        wait_for(lambda: not processes_of(token(name)), SECONDS_UNTIL_GONE, lambda: processes_of(token(name)))

    try:
        serving = start("serve")
        joined = start("join")
        wait_for(lambda: rounds() >= 1, 240, logs)
        kill("join", joined)
        joined = start("join")
        if "serve" in killed:
            wait_for(lambda: rounds() >= 2, 240, logs)
            kill("serve", serving)
            serving = start("serve")
        wait_for(lambda: serving.poll() is not None, 240, logs)
        assert serving.returncode == 0, logs()
        joined.send_signal(signal.SIGTERM)
        joined.wait(60)
    finally:
        for process in started:
            if process.poll() is None:
                process.kill()
                process.wait()
    for name in commands:
        wait_for(lambda: not processes_of(token(name)), SECONDS_UNTIL_GONE, lambda: processes_of(token(name)))  # noqa: B023
    assert [json.loads(line)["round"] for line in (run / "metrics.jsonl").read_text().splitlines()] == list(
        range(1, last + 1)
    )
    assert main(["predict", str(run), str(ward), "--out", str(tmp_path / "predictions.csv")]) == 0
    files = [path for path in tmp_path.rglob("*") if path.is_file() and path.suffix != ".dcm"]
    assert len(files) > 10
    for path in files:
        assert MARK.encode() not in path.read_bytes(), path
