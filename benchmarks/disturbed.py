"""One federation of real processes on this machine, that can be disturbed: what `federation_faults.py` plays with."""

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
LATE, TIMEOUT = 28.0, 25.0
"""Seconds that a late site sleeps over its answer, and that it may take."""
COMPUTED = 0.35
"""Seconds of CPU after which a site is in the middle of a visit, which takes about 1."""
PATIENCE = 400.0
"""Seconds until a run counts as stuck."""


class Stuck(RuntimeError):
    """Something that has to happen does not."""


@dataclass
class Federation:
    """One federation under way: its folder, and the commands that run."""

    folder: Path
    spoil: str = ""
    home: Path | None = None  # of the victim, where it is not in its folder
    port: int = field(default_factory=free_port)
    running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    sites: Sequence[str] = SITES

    @property
    def run(self) -> Path:
        """Return the run folder."""
        return self.folder / "run"

    def of(self, who: str) -> Path:
        """Return the folder in which the server or a site keeps Flower's processes."""
        if who == "serve":
            return self.run / "flower"
        return (self.home if self.home and who == VICTIM else self.folder / "sites" / who / ".halfmoon") / "flower"

    def start(self, who: str) -> None:
        """Start the command of the server or of a site."""
        sites = self.folder / "sites"
        words = ["serve", str(sites / "federation.toml"), "--run-dir", str(self.run), "--port", str(self.port)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        if who != "serve":
            words = ["site", "join", "--server", f"127.0.0.1:{self.port}", "--site", str(sites / who), "--name", who]
            words += ["--terms", "any"]
        if who == VICTIM:
            words += ["--home", str(self.home)] if self.home else []
            if self.spoil:
                paths = [str(Path(__file__).parent / "misbehaving"), os.environ.get("PYTHONPATH", "")]
                environment |= {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "MISBEHAVE": self.spoil}
                environment["MISBEHAVE_SECONDS"] = str(LATE)
        with (self.folder / f"{who}.out").open("ab") as out:
            command = [HALFMOON, *words]
            self.running[who] = subprocess.Popen(command, stdout=out, stderr=out, env=environment)

    def log(self, who: str = "serve") -> str:
        """Return what the server's log says, or a site's."""
        path = self.run / "serve.log" if who == "serve" else self.of(who).parent / "join.log"
        return (atomic_io.read(path) or b"").decode()

    def until(self, condition: Callable[[], Any], what: str) -> None:
        """Wait until something is so; raise Stuck where it takes too long, or the server ends."""
        end = time.monotonic() + PATIENCE
        while not condition():
            server = self.running["serve"].poll()
            if time.monotonic() > end or server not in (None, 0, -signal.SIGKILL):
                raise Stuck(f"waited in vain for {what}; the server's log ends: {self.log()[-600:]}")
            time.sleep(0.02)

    def number(self, who: str, script: str) -> int:
        """Return the number of a living process, 0 where there is none."""
        words = atomic_io.read(lock_path(self.of(who), script)) or b""
        return int(words) if words.strip().isdigit() and ProcessFolder(self.of(who)).is_running(script) else 0

    def training(self) -> int:
        """Wait until a visit to the victim is half over, and return the number of its process.

        It is that of the second round, or of a later one where the site was over with it between two looks.
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
        raise Stuck(f"{VICTIM} was over with every visit before it could be disturbed")

    def kill(self, who: str, *scripts: str) -> None:
        """Kill processes with -9: of these scripts, or the command itself."""
        numbers = [self.number(who, script) for script in scripts] or [self.running[who].pid]
        if 0 in numbers:
            raise Stuck(f"{scripts} of {who} does not run")
        for number in numbers:
            os.kill(number, signal.SIGKILL)
        if not scripts:
            self.running[who].wait()

    def cut(self) -> None:
        """Kill everything at once, as a power cut does (the system keeps what was written)."""
        homes = [(who, script) for who in self.running for script in (*SCRIPTS, SUPERNODE, WORKER)]
        numbers = [process.pid for process in self.running.values()] + [self.number(*each) for each in homes]
        for number in filter(None, numbers):
            with suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
        for process in self.running.values():
            process.wait()

    def begin(self) -> None:
        """Start all, and wait for the end of the first round."""
        for who in ("serve", *self.sites):
            self.start(who)
        self.until(lambda: "round 1 of 4" in self.log(), "the first round")

    def end(self) -> None:
        """End all, and what a killed command has left behind."""
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
    """Return the seconds of CPU that a process has used."""
    with suppress(OSError, IndexError):
        words = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
        return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")
    return 0.0
