"""Processes of a server or a site: start them in a folder, watch them by locks, and end all of them.

`python -m halfmoon.federation.transport.processes SCRIPT ...` runs a command of Flower, or a site's node or worker.
Flower starts its children by name, so scripts of these names, which call this module, are first on the path. Each process
locks a file in its `HALFMOON_FLOWER` folder, with its number in it, until it is dead, and dies with its parent.
"""

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
from halfmoon.core.parents import exit_with_starter
from halfmoon.storage import atomic_io, locks

SUPERLINK = "flower-superlink"
SUPEREXEC = "flower-superexec"
SERVER_APP = "flwr-serverapp"
FLWR = "flwr"
SCRIPTS = (SUPERLINK, SUPEREXEC, SERVER_APP, FLWR)
"""Commands of Flower that a server runs."""

SUPERNODE = "flower-supernode"
WORKER = "worker"
"""Processes of a site, both of `halfmoon.federation.transport.node`."""

FOLDER_VARIABLE = "HALFMOON_FLOWER"
"""Environment variable with the folder of the locks."""

ENVIRONMENT = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "RAY_USAGE_STATS_ENABLED": "0"}
"""Environment of every process of Flower, which switches its telemetry off."""

COLORS = ("FORCE_COLOR", "CLICOLOR_FORCE", "TTY_COMPATIBLE")
"""Variables, set in notebooks among others, that make Flower color its JSON, which could not be read then."""

TERMINATE_SECONDS = 5.0
"""Time that a process has to end after a request, before it is killed."""

LOCK_SECONDS = 60.0
"""Time until a process stops waiting for the lock of its predecessor."""


def require_flower() -> None:
    """Check that Flower is installed; raises `UserError`."""
    try:
        metadata.version("flwr")
    except metadata.PackageNotFoundError as error:
        raise UserError(f"a federation needs Flower, which is not installed: {install_command('flower')}.") from error


@dataclass(frozen=True)
class ProcessFolder:
    """A folder with the locks, logs and configuration of processes. A locked file contains the number of a living one."""

    folder: Path

    def prepare(self) -> None:
        """Make the folder and the scripts by which Flower's processes find each other; raises OSError."""
        scripts = self.folder / "bin"
        scripts.mkdir(parents=True, exist_ok=True)
        for name in SCRIPTS:
            # Flower discards the output of a ServerApp, and with it the reason of one that cannot start.
            log = f" >>{shlex.quote(str(self.log(name)))} 2>&1" if name == SERVER_APP else ""
            text = f'#!/bin/sh\nexec {shlex.join(command(name))} "$@"{log}\n'
            path = scripts / name
            if atomic_io.read(path) != text.encode():
                atomic_io.write_atomically(path, text.encode())
                path.chmod(0o755)

    def log(self, script: str) -> Path:
        """Path of the log of a script."""
        return self.folder / f"{script.removeprefix('flower-').removeprefix('flwr-')}.log"

    def environment(self) -> dict[str, str]:
        """Build the environment of the processes: that of this process, with Flower's folder, no telemetry, and our scripts."""
        paths = [str(self.folder / "bin"), sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)]
        added = {FOLDER_VARIABLE: str(self.folder), "FLWR_HOME": str(self.folder), "PATH": os.pathsep.join(paths)}
        inherited = {name: value for name, value in os.environ.items() if name not in COLORS}
        return {**inherited, **ENVIRONMENT, **added}

    def start(self, script: str, arguments: Sequence[str]) -> subprocess.Popen[bytes]:
        """Start a process in a new session. Ctrl-C in the terminal does not reach it; its parent ends it."""
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
        """Run `flwr ARGUMENTS`; raises subprocess.TimeoutExpired."""
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
        """Check whether a script has started since `clear_lock`."""
        return bool(atomic_io.read(lock_path(self.folder, script)))

    def clear_lock(self, script: str) -> None:
        """Forget the last process of a script."""
        atomic_io.truncate(lock_path(self.folder, script), 0)

    def is_running(self, script: str) -> bool:
        """Check whether a living process has the lock of a script."""
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
        """Kill every process of this folder, also those of earlier parents; raise `UserError` if one does not end."""
        end = time.monotonic() + TERMINATE_SECONDS
        for script in (*SCRIPTS, SUPERNODE, WORKER):
            while self.is_running(script):
                number = atomic_io.read(lock_path(self.folder, script)) or b""
                if number.isdigit():
                    _kill_group(int(number))
                if time.monotonic() > end:
                    text = number.decode(errors="replace")
                    raise UserError(f"{self.folder}: process {text} ({script}) does not end; end it, and try again.")
                time.sleep(0.02)


def command(script: str) -> list[str]:
    """Build the command that runs a script. With -P no file in the user's folder is imported as a module."""
    module = "node" if script in (SUPERNODE, WORKER) else "processes"
    return [sys.executable, "-P", "-m", f"halfmoon.federation.transport.{module}", script]


def lock_path(folder: Path, script: str) -> Path:
    """Path of the lock of a script."""
    return folder / f"{script}.lock"


def claim_lock(script: str) -> Path:
    """Lock the file of a script for this process, let it die with its parent, and return the folder."""
    folder = Path(os.environ[FOLDER_VARIABLE])
    # Flower's server starts further programs, so the starter is not always the process that made the environment.
    exit_with_starter(os.getppid())
    lock_until_exit(lock_path(folder, script))
    return folder


def main(arguments: Sequence[str]) -> None:
    """Run a command of Flower: its name, and its arguments."""
    script = arguments[0]
    claim_lock(script)
    entry_points = metadata.distribution("flwr").entry_points.select(group="console_scripts", name=script)
    run = next(iter(entry_points)).load()
    sys.argv = list(arguments)
    sys.exit(run())


def lock_until_exit(path: Path) -> None:
    """Lock a file until this process ends, and write the number of the process into it."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    end = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            atomic_io.flock(handle)
            break
        except OSError:
            if time.monotonic() > end:
                sys.exit(f"{path} is still locked by another process")
            time.sleep(0.02)
    # The number has a fixed length and overwrites the previous one: a full disk has no block for a truncated file.
    number = f"{os.getpid():010d}".encode()
    os.write(handle, number)
    os.ftruncate(handle, len(number))


def stop_process(process: subprocess.Popen[bytes] | None) -> None:
    """Terminate a process, and kill it with its group if it does not end in time."""
    if process is None or process.poll() is not None:
        return
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(TERMINATE_SECONDS)
    if process.poll() is None:
        _kill_group(process.pid)
        process.wait()


@contextmanager
def exclusive(path: Path, message: str) -> Iterator[None]:
    """Lock a file; raise `UserError` with this message if another process has the lock."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        lock = locks.acquire(path)
    except locks.LockConflict as error:
        raise UserError(message) from error
    try:
        yield
    finally:
        lock.free()


@contextmanager
def interruptible() -> Iterator[None]:
    """Raise KeyboardInterrupt at SIGTERM, and at SIGINT, which a shell ignores for background processes."""
    before = {number: signal.signal(number, signal.default_int_handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _kill_group(number: int) -> None:
    """Kill a process with its group, but never the group of this process."""
    with suppress(ProcessLookupError, PermissionError):
        group = os.getpgid(number)
        if group != os.getpgid(0):
            os.killpg(group, signal.SIGKILL)
        else:
            os.kill(number, signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1:])
