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

NODE_FILE = "node.json"
"""File in the folder of a site's processes with their options. The site's log is in the folder above."""

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

LOCK_POLL_SECONDS = 0.02
"""Time between two attempts to lock a file."""


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
        """Make this folder, with a shell script for each command of Flower, by which its processes start each other.

        Each script runs the command through this module, which locks a file, so that the process can be watched.
        Raises OSError.
        """
        scripts_folder = self.folder / "bin"
        scripts_folder.mkdir(parents=True, exist_ok=True)
        for name in SCRIPTS:
            redirection = ""
            if name == SERVER_APP:
                # Flower discards the output of a ServerApp, and with it the reason of one that cannot start.
                redirection = f" >>{shlex.quote(str(self.log(name)))} 2>&1"
            text = f'#!/bin/sh\nexec {shlex.join(command(name))} "$@"{redirection}\n'
            path = scripts_folder / name
            if atomic_io.read(path) != text.encode():
                atomic_io.write_atomically(path, text.encode())
                path.chmod(0o755)

    def log(self, script: str) -> Path:
        """Path of the log of a script."""
        return self.folder / f"{script.removeprefix('flower-').removeprefix('flwr-')}.log"

    def environment(self) -> dict[str, str]:
        """Build the environment of Flower's processes: its folder, no telemetry, and the scripts first on the path."""
        paths = [str(self.folder / "bin"), sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)]
        added = {FOLDER_VARIABLE: str(self.folder), "FLWR_HOME": str(self.folder), "PATH": os.pathsep.join(paths)}
        inherited = {name: value for name, value in os.environ.items() if name not in COLORS}
        return {**inherited, **ENVIRONMENT, **added}

    def start(self, script: str, arguments: Sequence[str]) -> subprocess.Popen[bytes]:
        """Start a command of Flower or a site's process, with its output appended to its log.

        Args:
            script: its name, such as "flower-superlink".
            arguments: its command-line arguments.
        """
        with self.log(script).open("ab") as log:
            # In a new session Ctrl-C in the terminal does not reach the process. Its parent ends it, in order.
            return subprocess.Popen(
                [*command(script), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self.environment(),
                start_new_session=True,
            )

    def flwr(self, arguments: Sequence[str], seconds: float = 60.0) -> subprocess.CompletedProcess[bytes]:
        """Run Flower's command `flwr` (to start or to stop a run) to its end, and capture its output.

        Args:
            arguments: its command-line arguments.
            seconds: time limit.

        Raises:
            subprocess.TimeoutExpired: it has not ended in time.
        """
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
        """Check whether a process of this script is alive, by trying to lock its file.

        The operating system frees the lock when the process ends, however it ends. A process id alone would not do,
        because it may have been reused.
        """
        try:
            handle = os.open(lock_path(self.folder, script), os.O_RDWR)
        except FileNotFoundError:
            return False
        try:
            atomic_io.flock(handle)
        except OSError:  # another process has the lock
            return True
        finally:
            os.close(handle)
        return False

    def kill_all(self) -> None:
        """Kill every process of this folder, also those whose parent was killed before it could end them.

        Raises:
            UserError: a process does not end.
        """
        deadline = time.monotonic() + TERMINATE_SECONDS
        for script in (*SCRIPTS, SUPERNODE, WORKER):
            while self.is_running(script):
                process_id = atomic_io.read(lock_path(self.folder, script)) or b""
                if process_id.isdigit():  # a process that has just got the lock has not written its id yet
                    _kill_group(int(process_id))
                if time.monotonic() > deadline:
                    text = process_id.decode(errors="replace")
                    raise UserError(f"{self.folder}: process {text} ({script}) does not end; end it, and try again.")
                time.sleep(LOCK_POLL_SECONDS)


def command(script: str) -> list[str]:
    """Build the command that runs a script. With -P no file in the user's folder is imported as a module."""
    module = "node" if script in (SUPERNODE, WORKER) else "processes"
    return [sys.executable, "-P", "-m", f"halfmoon.federation.transport.{module}", script]


def lock_path(folder: Path, script: str) -> Path:
    """Path of the lock of a script."""
    return folder / f"{script}.lock"


def claim_lock(script: str) -> Path:
    """Lock the file of a script for this process, and end this process when its parent ends.

    The lock shows a later start of the federation that a process of an earlier one still runs.

    Args:
        script: the name of the script that this process runs.

    Returns:
        The folder with the lock files of all processes of this federation; its path is in an environment variable.
    """
    folder = Path(os.environ[FOLDER_VARIABLE])
    # The parent's id is asked of the system, not passed in an environment variable: programs that Flower's server starts
    # inherit the environment of that server, whose parent is another process than theirs.
    exit_with_starter(os.getppid())
    lock_until_exit(lock_path(folder, script))
    return folder


def main(arguments: Sequence[str]) -> None:
    """Run a command of Flower in this process, given its name and its arguments."""
    script = arguments[0]
    claim_lock(script)
    entry_points = metadata.distribution("flwr").entry_points.select(group="console_scripts", name=script)
    run = next(iter(entry_points)).load()
    sys.argv = list(arguments)
    sys.exit(run())


def lock_until_exit(path: Path) -> None:
    """Lock a file until this process ends, and write the id of the process into it.

    If another process has the lock, wait for `LOCK_SECONDS`, then end this process with an error.
    """
    # The handle is never closed, so the lock lasts until the process ends; child processes do not inherit it.
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    deadline = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            atomic_io.flock(handle)
            break
        except OSError:
            if time.monotonic() > deadline:
                sys.exit(f"{path} is still locked by another process")
            time.sleep(LOCK_POLL_SECONDS)
    # The id has a fixed length and overwrites the previous one: a full disk has no block for a truncated file.
    process_id = f"{os.getpid():010d}".encode()
    os.write(handle, process_id)
    os.ftruncate(handle, len(process_id))


def stop_process(process: subprocess.Popen[bytes] | None) -> None:
    """Ask a process to end (SIGTERM), and kill it with its process group if it does not end in time."""
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
    """Lock a file during the `with` block, so that only one process at a time works in a folder.

    Args:
        path: the file.
        message: the text of the UserError that is raised if another process has the lock.
    """
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
    """Raise KeyboardInterrupt at SIGTERM and SIGINT, so that a process which is told to end runs its `finally` blocks.

    Python does so for SIGINT, but not in the background processes of a shell, which ignore it.
    """
    earlier_handlers = {}
    for signal_number in (signal.SIGINT, signal.SIGTERM):
        earlier_handlers[signal_number] = signal.signal(signal_number, signal.default_int_handler)
    try:
        yield
    finally:
        for signal_number, handler in earlier_handlers.items():
            signal.signal(signal_number, handler)


def _kill_group(process_id: int) -> None:
    """Kill a process with its process group, but never the group of this process."""
    with suppress(ProcessLookupError, PermissionError):
        group = os.getpgid(process_id)
        if group != os.getpgid(0):
            os.killpg(group, signal.SIGKILL)
        else:
            os.kill(process_id, signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1:])
