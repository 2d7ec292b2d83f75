"""A process of a site that has imported everything and forks for each message: Flower begins each one in a new process.

Flower starts `flwr-clientapp` by name, and to import torch and Flower takes longer than a small site trains. The script
of that name (`halfmoon.federation.flower.child_main`) asks here for a fork instead, by a socket in the folder of the
locks, and ends when the fork does; where nobody listens it goes the long way.
"""

import importlib
import json
import mmap
import os
import random
import selectors
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

SOCKET = "warm.socket"
EVERY = 0.02
"""Seconds between two looks at the forks."""
LONGEST = 2**16
"""Bytes of a request at most."""
SLOW = "torch._dynamo"
"""What few methods need at a site: 800 modules in a second or two, for each message anew where a fork imports them."""


def relay(folder: Path, arguments: Sequence[str]) -> int | None:
    """Have a fork run with these arguments and our output, and return its exit code; None where nobody forks."""
    link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with _inside(folder):
            link.connect(SOCKET)
    except OSError:
        return None
    with link:
        socket.send_fds(link, [json.dumps(arguments).encode()], [1, 2])
        code = link.recv(4)
    # Nothing comes from one that was killed.
    return int.from_bytes(code, "big") if code else 1


def attend(folder: Path, app: str, load: Callable[[], Callable[[], object]], begin: Callable[[], None]) -> None:
    """Import what `load` does and the module of `app`, then fork for whoever asks; each fork calls `begin` first.

    Once a fork has imported the `SLOW` one, later ones have it from here. Ends with its parent alone.
    """
    run = load()
    importlib.import_module(app.partition(":")[0])
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with _inside(folder):
        with suppress(FileNotFoundError):
            os.unlink(SOCKET)
        listener.bind(SOCKET)
    os.chmod(folder / SOCKET, 0o600)
    listener.listen()
    waiting: list[_Fork] = []
    wanted = mmap.mmap(-1, 1)  # shared with the forks
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        while True:
            if selector.select(EVERY if waiting else None):
                waiting.append(_fork(listener, run, begin, wanted))
            waiting = [each for each in waiting if not each.over()]
            if wanted[0] and not waiting:
                importlib.import_module(SLOW)
                wanted[0] = 0


@dataclass
class _Fork:
    """A forked process, and the link to the one that asked for it."""

    number: int
    link: socket.socket

    def over(self) -> bool:
        """Say whether the fork has ended, and tell who asked; end it where that one is gone."""
        if self._left():
            with suppress(ProcessLookupError):
                os.kill(self.number, signal.SIGKILL)
        done, status = os.waitpid(self.number, os.WNOHANG)
        if not done:
            return False
        code = os.waitstatus_to_exitcode(status)
        with self.link, suppress(OSError):
            self.link.send((code if code >= 0 else 1).to_bytes(4, "big"))
        return True

    def _left(self) -> bool:
        try:
            return not self.link.recv(1, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True


def _fork(listener: socket.socket, run: Callable[[], object], begin: Callable[[], None], wanted: mmap.mmap) -> _Fork:
    link, _ = listener.accept()
    request, handles, _, _ = socket.recv_fds(link, LONGEST, 2)
    known = SLOW in sys.modules
    number = os.fork()
    if number == 0:
        code = 1
        try:
            listener.close()
            link.close()
            for place, handle in enumerate(handles, start=1):
                os.dup2(handle, place)
            random.seed()  # forks of one process would all draw the same
            begin()
            sys.argv = ["flwr-clientapp", *json.loads(request)]
            code = _code(run)
            wanted[0] = SLOW in sys.modules and not known
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    for handle in handles:
        os.close(handle)
    return _Fork(number, link)


def _code(run: Callable[[], object]) -> int:
    """Run something that ends by SystemExit, and return its exit code."""
    try:
        run()
    except SystemExit as done:
        return done.code if isinstance(done.code, int) else int(done.code is not None)
    return 0


@contextmanager
def _inside(folder: Path) -> Iterator[None]:
    """Be in a folder: the path of a socket may have a hundred characters, and folders of sites are deep."""
    here = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(here)
