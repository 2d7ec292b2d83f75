"""`python -m halfmoon.federation.flower.child_main SCRIPT ...`: one of Flower's commands, as a process that never
outlives its parent.

Flower starts its own children by name; `halfmoon.federation.flower.processes` puts scripts of these names first on the
path, which come here. Each process holds a lock in its `HALFMOON_FLOWER` folder, with its number in it, until it is
dead: whoever starts next sees by the lock whether it still lives, and by the number whom to end.
"""

from __future__ import annotations

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

from halfmoon.federation.flower import internals, pinned, polling, prefork
from halfmoon.storage import atomic_io

FOLDER = "HALFMOON_FLOWER"
"""The variable of the environment that names the folder of the locks."""

CLIENT_APP, SUPERNODE, WARM = "flwr-clientapp", "flower-supernode", "warm"

PATIENCE = 60.0
"""Seconds until a process gives up whose predecessor does not end, or a message goes the long way whose warm process
does not get ready."""

SPARE, LAST = 3.0, 10.0
"""Seconds until a program of a site asks its predecessor to end, and until it kills it.

A SuperNode has one message at a time. Where it hears in the midst of one that the run is over, it goes on to the next,
while the program that it began waits for the rest of the first: for minutes, as Flower has it.
"""

_PR_SET_PDEATHSIG = 1


def lock_of(folder: Path, script: str) -> Path:
    """Return the file that a process of `script` locks."""
    return folder / f"{script}.lock"


def main(words: Sequence[str]) -> None:
    """Become the console script `words[0]` of Flower with the arguments that follow, or `WARM` for the app named."""
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
        pinned.aggregator(loop, folder)
        internals.sleep_by(loop, polling.Pace())
    sys.argv = [script, *arguments]
    sys.exit(run())


def _forked(folder: Path, arguments: Sequence[str]) -> int | None:
    """Return the exit code of a fork of the warm process, which is waited for while it imports; None without one."""
    end = time.monotonic() + PATIENCE
    while (code := prefork.relay(folder, arguments)) is None:
        if time.monotonic() > end or not held(lock_of(folder, WARM)):
            return None
        time.sleep(0.05)
    return code


def _script(name: str) -> Callable[[], int | None]:
    """Return the function of one of Flower's console scripts."""
    found = metadata.distribution("flwr").entry_points.select(group="console_scripts", name=name)
    return next(iter(found)).load()


def _answering(folder: Path) -> Callable[[], int | None]:
    """Return the function that answers a message, by the app that is installed here alone."""
    run = _script(CLIENT_APP)
    pinned.only_installed(importlib.import_module(internals.ANSWERING), folder)
    return run


def _begin(folder: Path) -> None:
    """Do in a fork what every process does first."""
    _die_with_parent()
    _hold(lock_of(folder, CLIENT_APP), sole=True)


def _die_with_parent() -> None:
    """Ask the system for a kill where the parent dies, however it dies; only Linux can."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def held(path: Path) -> bool:
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
