"""End a fork server of `multiprocessing` as soon as the process that started it is gone.

The server notices the end of its parent by itself, but only when it has imported all modules, which takes seconds. A
timer checks until then. It is no thread, because a server must not fork while a thread runs, and no death signal of
Linux, which would end the server of all threads with the one that started it.
"""

import os
import signal
import sys
from types import FrameType

POLL_SECONDS = 0.25
"""Seconds between two checks."""

STARTER_VARIABLE = "HALFMOON_FORK_SERVER_STARTER"
"""Environment variable with the number of the process that starts the server, which may be gone before this import."""


def _check(number: int = 0, frame: FrameType | None = None) -> None:
    """End this process if its parent is not the starter any more."""
    if os.getppid() != int(os.environ[STARTER_VARIABLE]):
        os._exit(1)


def watch() -> None:
    """In a fork server, check now, and then again and again."""
    # Another process may import the module that calls this, such as a tool that imports all modules.
    if not any("multiprocessing.forkserver" in argument for argument in sys.orig_argv):
        return
    _check()
    signal.signal(signal.SIGALRM, _check)
    signal.setitimer(signal.ITIMER_REAL, POLL_SECONDS, POLL_SECONDS)
