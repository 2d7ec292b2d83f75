"""A federation of real processes on this machine whose processes can be killed or made to misbehave."""

import os
import signal
import subprocess
import sysconfig
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from federation_parity import free_port

from halfmoon.federation.transport.processes import SCRIPTS, SUPERNODE, WORKER, ProcessFolder, lock_path
from halfmoon.storage import atomic_io

HALFMOON = str(Path(sysconfig.get_path("scripts"), "halfmoon"))
SITES = ("site-00", "site-01", "site-02")
VICTIM = "site-01"
LATE = 28.0
TIMEOUT = 25.0
"""Seconds that a late site sleeps before its reply, and the timeout of a round."""
COMPUTED = 0.35
"""CPU seconds after which a site is in the middle of a local update, which takes about 1."""
PATIENCE = 400.0
"""Seconds until a run counts as stuck."""


class EventTimeout(RuntimeError):
    """An expected event did not happen in time."""


@dataclass
class Federation:
    """A running federation.

    Attributes:
        folder: its files.
        spoil: the value of `MISBEHAVE` for the victim (see misbehaving/sitecustomize.py), or "".
        home: the state folder of the victim if it is not in its site folder.
        port: of the server.
        running: the process of the server ("serve") and of each site.
        sites: names of the sites.
    """

    folder: Path
    spoil: str = ""
    home: Path | None = None
    port: int = field(default_factory=free_port)
    running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    sites: Sequence[str] = SITES

    @property
    def run(self) -> Path:
        """Return the run folder."""
        return self.folder / "run"

    def of(self, who: str) -> Path:
        """Return the folder with the files of Flower's processes, of the server or of a site."""
        if who == "serve":
            return self.run / "flower"
        return (self.home if self.home and who == VICTIM else self.folder / "sites" / who / ".halfmoon") / "flower"

    def start(self, who: str) -> None:
        """Start the command of the server or of a site."""
        sites = self.folder / "sites"
        arguments = ["serve", str(sites / "federation.toml"), "--run-dir", str(self.run), "--port", str(self.port)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        if who != "serve":
            arguments = [
                "site",
                "join",
                "--server",
                f"127.0.0.1:{self.port}",
                "--site",
                str(sites / who),
                "--name",
                who,
            ]
            arguments += ["--terms", "any"]
        if who == VICTIM:
            arguments += ["--home", str(self.home)] if self.home else []
            if self.spoil:
                paths = [str(Path(__file__).parent / "misbehaving"), os.environ.get("PYTHONPATH", "")]
                environment |= {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "MISBEHAVE": self.spoil}
                environment["MISBEHAVE_SECONDS"] = str(LATE)
        with (self.folder / f"{who}.out").open("ab") as out:
            command = [HALFMOON, *arguments]
            self.running[who] = subprocess.Popen(command, stdout=out, stderr=out, env=environment)

    def log(self, who: str = "serve") -> str:
        """Read the log of the server or of a site."""
        path = self.run / "serve.log" if who == "serve" else self.of(who).parent / "join.log"
        return (atomic_io.read(path) or b"").decode()

    def until(self, condition: Callable[[], Any], what: str) -> None:
        """Wait until a condition is true; raise EventTimeout if it takes too long, or the server ends."""
        end = time.monotonic() + PATIENCE
        while not condition():
            server = self.running["serve"].poll()
            if time.monotonic() > end or server not in (None, 0, -signal.SIGKILL):
                raise EventTimeout(f"waited in vain for {what}; the server's log ends: {self.log()[-600:]}")
            time.sleep(0.02)

    def number(self, who: str, script: str) -> int:
        """Return the id of a running process, 0 if there is none."""
        content = atomic_io.read(lock_path(self.of(who), script)) or b""
        return int(content) if content.strip().isdigit() and ProcessFolder(self.of(who)).is_running(script) else 0

    def training(self) -> int:
        """Wait until a local update of the victim is half finished, and return the id of its process.

        It is that of the second round, or of a later one if the site finished it between two checks.
        """
        for number in (2, 3, 4):
            found = self.number(VICTIM, WORKER)
            before = computed(found) if found else 0.0
            over = f"round {number}, "

            def half(before: float = before, over: str = over) -> bool:
                nonlocal found
                found = self.number(VICTIM, WORKER)
                return over in self.log(VICTIM) or (found != 0 and computed(found) - before > COMPUTED)

            self.until(half, f"{VICTIM} to train")
            if over not in self.log(VICTIM):
                return found
        raise EventTimeout(f"{VICTIM} finished every local update before it could be disturbed")

    def kill(self, who: str, *scripts: str) -> None:
        """Kill processes with SIGKILL: those of these scripts, or else the command."""
        numbers = [self.number(who, script) for script in scripts] or [self.running[who].pid]
        if 0 in numbers:
            raise EventTimeout(f"{scripts} of {who} does not run")
        for number in numbers:
            os.kill(number, signal.SIGKILL)
        if not scripts:
            self.running[who].wait()

    def cut(self) -> None:
        """Kill all processes at once, as in a power cut (written data is not lost)."""
        scripts = [(who, script) for who in self.running for script in (*SCRIPTS, SUPERNODE, WORKER)]
        numbers = [process.pid for process in self.running.values()] + [self.number(*each) for each in scripts]
        for number in filter(None, numbers):
            with suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
        for process in self.running.values():
            process.wait()

    def begin(self) -> None:
        """Start all commands, and wait for the end of the first round."""
        for who in ("serve", *self.sites):
            self.start(who)
        self.until(lambda: "round 1 of 4" in self.log(), "the first round")

    def end(self) -> None:
        """End all commands, and the processes that a killed command has left."""
        for process in self.running.values():
            process.terminate()
        for process in self.running.values():
            with suppress(subprocess.TimeoutExpired):
                process.wait(20)
            process.kill()
            process.wait()
        for who in self.running:
            ProcessFolder(self.of(who)).kill_all()


def computed(number: int) -> float:
    """Return the CPU seconds of a process."""
    with suppress(OSError, IndexError):
        fields = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return 0.0
