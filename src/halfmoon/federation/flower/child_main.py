"""`python -m halfmoon.federation.flower.child_main SCRIPT ...` runs a command of Flower that never outlives its parent.

Flower starts its own children by name; `halfmoon.federation.flower.processes` puts scripts of these names first on the
path, which come here. Each process holds a lock in its `HALFMOON_FLOWER` folder, with its number in it, until it is
dead: the lock says whether it still lives, and the number which process to end.

A site executes its own program and nothing that a server sends. Flower downloads an app bundle with each run, unpacks
it at the site, puts its folder first on Python's path and loads what it names, whoever sent it. Two places are closed
here, each of which is enough: the SuperNode refuses a run with another bundle than the agreed one
(`halfmoon.federation.protocol.bundle`) before it stores it, and the process that answers messages unpacks no bundle at
all and loads the installed app, whatever a bundle says. A Flower without one of these places is not used.
"""

import ctypes
import importlib
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path

from halfmoon.federation.flower import internals, prefork
from halfmoon.federation.protocol.bundle import APPS
from halfmoon.federation.protocol.log import EventLog
from halfmoon.storage import atomic_io

FOLDER = "HALFMOON_FLOWER"
"""The variable of the environment that names the folder of the locks."""

APPS_FILE, LOG = "apps.json", "join.log"
"""In the folder of a site's processes: the apps that are installed for it. Above it: the site's log."""

CLIENT_APP, SUPERNODE, WARM = "flwr-clientapp", "flower-supernode", "warm"

PATIENCE = 60.0
"""Seconds until a process gives up on a predecessor that does not end, or on a warm process that does not import."""

SPARE, LAST = 3.0, 10.0
"""Seconds until a site's program asks its predecessor to end, and until it kills it.

A SuperNode has one message at a time. If it learns in the midst of one that the run is over, it goes on to the next,
while the program that it began waits for minutes for the rest of the first.
"""

_PR_SET_PDEATHSIG = 1


def lock_of(folder: Path, script: str) -> Path:
    return folder / f"{script}.lock"


def main(words: Sequence[str]) -> None:
    """Run Flower's console script `words[0]` with the arguments that follow, or `WARM` for the app of that name."""
    script, *arguments = words
    folder = Path(os.environ[FOLDER])
    _die_with_parent()
    if script == CLIENT_APP and (code := _forked(folder, arguments)) is not None:
        sys.exit(code)
    _hold(lock_of(folder, script), sole=script == CLIENT_APP)
    if script == WARM:
        prefork.attend(folder, arguments[0], lambda: _answering(folder), lambda: _begin(folder))
    run = _answering(folder) if script == CLIENT_APP else _script(script)
    if script == SUPERNODE:
        loop = importlib.import_module(internals.LOOP)
        internals.refuse_foreign(loop, apps_of(folder), log_of(folder))
        internals.sleep_by(loop, internals.Pace())
    sys.argv = [script, *arguments]
    sys.exit(run())


def _forked(folder: Path, arguments: Sequence[str]) -> int | None:
    """Return the exit code of a fork of the warm process, which is waited for while it imports; None without one."""
    end = time.monotonic() + PATIENCE
    while (code := prefork.relay(folder, arguments)) is None:
        if time.monotonic() > end or not locked(lock_of(folder, WARM)):
            return None
        time.sleep(0.05)
    return code


def _script(name: str) -> Callable[[], int | None]:
    scripts = metadata.distribution("flwr").entry_points.select(group="console_scripts", name=name)
    return next(iter(scripts)).load()


def _answering(folder: Path) -> Callable[[], int | None]:
    """Return the function that answers a message, by the app that is installed here alone."""
    run = _script(CLIENT_APP)
    internals.load_installed(importlib.import_module(internals.CLIENT_APP), apps_of(folder), log_of(folder))
    return run


def write_apps(folder: Path, apps: Sequence[str]) -> None:
    atomic_io.replace(folder / APPS_FILE, atomic_io.render({"apps": list(apps)}))


def apps_of(folder: Path) -> tuple[str, ...]:
    """Return the apps that were written down, else those of every federation."""
    return tuple((atomic_io.read_json(folder / APPS_FILE) or {}).get("apps", APPS))


def log_of(folder: Path) -> Callable[[str], None]:
    """Return the writer into the log of the site whose processes live in `folder`."""

    def say(words: str) -> None:
        with suppress(OSError):  # a full disk: it is refused all the same
            EventLog(folder.parent / LOG).say(words)

    return say


def _begin(folder: Path) -> None:
    _die_with_parent()
    _hold(lock_of(folder, CLIENT_APP), sole=True)


def _die_with_parent() -> None:
    """Ask the system for a kill where the parent dies, however it dies; only Linux can."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def locked(path: Path) -> bool:
    """Say whether a living process holds the lock of a file."""
    try:
        handle = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        return False
    try:
        atomic_io.flock(handle)
    except OSError:
        return True
    finally:
        os.close(handle)
    return False


def _hold(path: Path, sole: bool = False) -> None:
    """Lock a file for the rest of this process' life and write its number into it; `sole` ends who does not let go."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    begin = time.monotonic()
    orders = [(SPARE, signal.SIGTERM), (LAST, signal.SIGKILL)] if sole else []
    while True:
        try:
            atomic_io.flock(handle)
            break
        except OSError:
            waited = time.monotonic() - begin
            if waited > PATIENCE:
                sys.exit(f"{path} is still locked by another process")
            if orders and waited > orders[0][0]:
                _order(path, orders.pop(0)[1])
            time.sleep(0.02)
    # Always as long, and over the one before: a full disk has no block for a file that was emptied.
    number = f"{os.getpid():010d}".encode()
    os.write(handle, number)
    os.ftruncate(handle, len(number))


def _order(path: Path, order: signal.Signals) -> None:
    """Give an order to the process that holds a lock."""
    words = atomic_io.read(path) or b""
    if words.isdigit() and int(words) != os.getpid():
        with suppress(ProcessLookupError, PermissionError):
            os.kill(int(words), order)


if __name__ == "__main__":
    main(sys.argv[1:])
