"""Processes of a server or a site: started in a folder, watched by locks, ended without a remainder.

`python -m halfmoon.federation.transport.processes SCRIPT ...` runs a command of Flower, or a site's node or worker. Flower
starts its own children by name; scripts of these names stand first on the path and lead here. Each process holds a lock
in its `HALFMOON_FLOWER` folder, with its number in it, until it is dead, and dies with its parent.
"""

import ctypes
import os
import shlex
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from halfmoon.core.errors import UserError, install_command
from halfmoon.storage import atomic_io, locks

SUPERLINK, SUPEREXEC = "flower-superlink", "flower-superexec"
SERVER_APP, FLWR = "flwr-serverapp", "flwr"
SCRIPTS = (SUPERLINK, SUPEREXEC, SERVER_APP, FLWR)  # commands of Flower at a server

SUPERNODE, WORKER = "flower-supernode", "worker"
"""Processes of a site, both of `halfmoon.federation.transport.node`."""

FOLDER_VARIABLE = "HALFMOON_FLOWER"  # the variable of the environment that names the folder of the locks

ENVIRONMENT = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "RAY_USAGE_STATS_ENABLED": "0"}
"""The environment of every process of Flower: they report nothing to anybody."""

COLORS = ("FORCE_COLOR", "CLICOLOR_FORCE", "TTY_COMPATIBLE")
"""Variables, set in notebooks among others, that make Flower color its JSON, which could not be read then."""

GRACE = 5.0  # seconds that a process has to end by itself once it is asked to
PATIENCE = 60.0  # seconds until a process gives up on a predecessor that does not end

_PR_SET_PDEATHSIG = 1


def require_flower() -> None:
    """Raise UserError where Flower is not installed."""
    try:
        metadata.version("flwr")
    except metadata.PackageNotFoundError as error:
        raise UserError(f"a federation needs Flower, which is not installed: {install_command('flower')}.") from error


@dataclass(frozen=True)
class ProcessFolder:
    """A folder with the locks, logs and configuration of processes; a lock that is held names a living one."""

    folder: Path

    def prepare(self) -> None:
        """Make the folder and the scripts by which Flower's processes find one another; raise OSError if it cannot."""
        scripts = self.folder / "bin"
        scripts.mkdir(parents=True, exist_ok=True)
        for name in SCRIPTS:
            # Flower throws away what a ServerApp prints, and with it the reason of one that cannot start.
            log = f" >>{shlex.quote(str(self.log(name)))} 2>&1" if name == SERVER_APP else ""
            text = f'#!/bin/sh\nexec {shlex.join(command(name))} "$@"{log}\n'
            path = scripts / name
            if atomic_io.read(path) != text.encode():
                atomic_io.write_atomically(path, text.encode())
                path.chmod(0o755)

    def log(self, script: str) -> Path:
        return self.folder / f"{script.removeprefix('flower-').removeprefix('flwr-')}.log"

    def environment(self) -> dict[str, str]:
        """Return the environment of the processes: this one's, with Flower's own folder, silence, and our scripts."""
        paths = [str(self.folder / "bin"), sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)]
        own = {FOLDER_VARIABLE: str(self.folder), "FLWR_HOME": str(self.folder), "PATH": os.pathsep.join(paths)}
        inherited = {name: value for name, value in os.environ.items() if name not in COLORS}
        return {**inherited, **ENVIRONMENT, **own}

    def start(self, script: str, arguments: Sequence[str]) -> subprocess.Popen[bytes]:
        """Start a process in a session of its own: the keys that stop us do not reach it, we end it ourselves."""
        with self.log(script).open("ab") as log:
            return subprocess.Popen(
                [*command(script), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self.environment(),
                start_new_session=True,
            )

    def flwr(self, arguments: Sequence[str], seconds: float = 60.0) -> subprocess.CompletedProcess[bytes]:
        """Run `flwr ARGUMENTS`; raise subprocess.TimeoutExpired where it takes too long."""
        return subprocess.run(
            [*command(FLWR), *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            env=self.environment(),
            timeout=seconds,
            start_new_session=True,
            check=False,
        )

    def has_started(self, script: str) -> bool:
        return bool(atomic_io.read(lock_path(self.folder, script)))

    def clear_lock(self, script: str) -> None:
        atomic_io.truncate(lock_path(self.folder, script), 0)

    def is_running(self, script: str) -> bool:
        """Say whether a living process holds the lock of a script."""
        try:
            handle = os.open(lock_path(self.folder, script), os.O_RDWR)
        except FileNotFoundError:
            return False
        try:
            atomic_io.flock(handle)
        except OSError:
            return True
        finally:
            os.close(handle)
        return False

    def kill_all(self) -> None:
        """End every process of this folder, whoever started it; raise UserError for one that does not end."""
        end = time.monotonic() + GRACE
        for script in (*SCRIPTS, SUPERNODE, WORKER):
            while self.is_running(script):
                words = atomic_io.read(lock_path(self.folder, script)) or b""
                if words.isdigit():
                    _kill_group(int(words))
                if time.monotonic() > end:
                    number = words.decode(errors="replace")
                    raise UserError(f"{self.folder}: process {number} ({script}) does not end; end it, and try again.")
                time.sleep(0.02)


def command(script: str) -> list[str]:
    """Return the command that runs a script here; -P: what lies in the user's folder is no module of ours."""
    module = "node" if script in (SUPERNODE, WORKER) else "processes"
    return [sys.executable, "-P", "-m", f"halfmoon.federation.transport.{module}", script]


def lock_path(folder: Path, script: str) -> Path:
    return folder / f"{script}.lock"


def claim_lock(script: str) -> Path:
    """Take the lock of a script for this process, which dies with its parent, and return the folder."""
    folder = Path(os.environ[FOLDER_VARIABLE])
    if sys.platform == "linux":  # only Linux kills a process whose parent dies, however it dies
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    lock_until_exit(lock_path(folder, script))
    return folder


def main(words: Sequence[str]) -> None:
    """Run the command `words[0]` of Flower with the arguments that follow."""
    claim_lock(words[0])
    scripts = metadata.distribution("flwr").entry_points.select(group="console_scripts", name=words[0])
    run = next(iter(scripts)).load()
    sys.argv = list(words)
    sys.exit(run())


def lock_until_exit(path: Path) -> None:
    """Lock a file for the rest of this process' life, and write its number into it."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    end = time.monotonic() + PATIENCE
    while True:
        try:
            atomic_io.flock(handle)
            break
        except OSError:
            if time.monotonic() > end:
                sys.exit(f"{path} is still locked by another process")
            time.sleep(0.02)
    # Always as long, and over the one before: a full disk has no block for a file that was emptied.
    number = f"{os.getpid():010d}".encode()
    os.write(handle, number)
    os.ftruncate(handle, len(number))


def stop_process(process: subprocess.Popen[bytes] | None) -> None:
    """Ask a process to end, and kill it with its group where it does not."""
    if process is None or process.poll() is not None:
        return
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(GRACE)
    if process.poll() is None:
        _kill_group(process.pid)
        process.wait()


@contextmanager
def exclusive(path: Path, words: str) -> Iterator[None]:
    """Hold a lock; raise UserError with `words` where another process has it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        lock = locks.acquire(path)
    except locks.LockConflict as error:
        raise UserError(words) from error
    try:
        yield
    finally:
        lock.free()


@contextmanager
def interruptible() -> Iterator[None]:
    """Let an order to end (SIGTERM, and SIGINT even where a shell switched it off) raise KeyboardInterrupt."""
    before = {each: signal.signal(each, signal.default_int_handler) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def _kill_group(number: int) -> None:
    """Kill a process with those of its group, never our own group."""
    with suppress(ProcessLookupError, PermissionError):
        group = os.getpgid(number)
        if group != os.getpgid(0):
            os.killpg(group, signal.SIGKILL)
        else:
            os.kill(number, signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1:])
