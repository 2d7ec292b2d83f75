"""End a process when its parent is gone, however the parent ended: also by SIGKILL, which no handler sees."""

import ctypes
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from multiprocessing import connection, parent_process
from typing import Any

POLL_SECONDS = 0.5
"""Seconds between two checks for the parent, on systems that do not report its end."""

_PR_SET_PDEATHSIG = 1


def exit_with_parent() -> None:
    """End this process of `multiprocessing` as soon as the process that started it is gone.

    A thread waits for the end of a pipe that only the parent holds open. If a fork server is between the two, Linux
    also kills this process with the server, which ends with the parent: this works while a thread cannot run.
    """
    parent: Any = parent_process()
    # A fork server has one thread. Linux sends the signal when the THREAD that forked ends, so that a process which a
    # thread of the parent has spawned must not ask for it.
    if os.getppid() != parent.pid:
        _request_kill()

    def wait() -> None:
        connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def exit_with_starter(number: int) -> None:
    """End this program as soon as the process that started it is gone.

    On Linux the main thread, or one that lives as long, must have started the program.

    Args:
        number: the process number of the starter, which may be gone already.
    """
    _request_kill()
    if os.getppid() != number:
        os._exit(1)
    if sys.platform == "linux":
        return

    def poll() -> None:
        while os.getppid() == number:
            time.sleep(POLL_SECONDS)
        os._exit(1)

    threading.Thread(target=poll, daemon=True).start()


def _request_kill() -> None:
    """On Linux, request SIGKILL for this process when the thread that created it ends."""
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
