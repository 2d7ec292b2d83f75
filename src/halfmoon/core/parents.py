"""End a process when its parent has exited, however it exited: also by SIGKILL, which no handler sees."""

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
    """End this process of `multiprocessing` as soon as the process that started it has exited, even by SIGKILL.

    On all systems a thread waits for the end of a pipe that only the parent holds open. If a fork server is between the
    two, Linux is also asked to kill this process when the server ends, which ends with the parent: this works even
    while the thread cannot run, for example during a long call that holds Python's global lock.
    """
    parent: Any = parent_process()
    # Another process than the parent forked this one: a fork server, which has a single thread. Without a server, the
    # signal is not requested, because Linux sends it when the forking THREAD ends, and the parent's may end early.
    has_fork_server = os.getppid() != parent.pid
    if has_fork_server:
        _request_kill()

    def wait() -> None:
        connection.wait([parent.sentinel])  # the end of the pipe, which becomes readable when the parent has exited
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def exit_with_starter(number: int) -> None:
    """End this program as soon as the process that started it has exited.

    Linux sends a signal when the starting THREAD ends, so that the starter's main thread, or one that lives as long,
    must have started this program. Other systems have no such signal: there a thread checks for the parent regularly.

    Args:
        number: the process number (PID) of the starter, which may have exited already.
    """
    _request_kill()  # nothing except on Linux
    # A process whose parent has exited gets another parent. This check is after the request, which does not report an
    # earlier end.
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
