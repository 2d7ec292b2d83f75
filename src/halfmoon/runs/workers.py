"""The clients of one cohort side by side: processes that each train the next client, with the same bits as one by one.

A client is drawn, and trained, from (seed, round, query, client) alone, and every process computes with as many threads
as the run would alone; what comes back is taken in the order of the cohort. So a run does not depend on how many
processes there are. They hold no state of it: what clients remember travels with each of them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from queue import SimpleQueue
from typing import Any, cast

import torch

from halfmoon.config.schema import Config
from halfmoon.core.errors import UserError
from halfmoon.engine.spread import Item, Result, Spread
from halfmoon.methods import registry
from halfmoon.runs import factory
from halfmoon.runs.worker_main import Answer, packed, receive, send, unpacked

START = "from halfmoon.runs.worker_main import main; main()"


_SHARE = {"runs": 1}
"""How many runs are played at once on this machine's processors."""


def share(runs: int) -> None:
    """Take note that so many runs are played at once: each has its part of the processors."""
    _SHARE["runs"] = runs


def processors() -> list[int]:
    """Return the processors on which this process may run."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def count(config: Config) -> int:
    """Return in how many processes the clients of a cohort train.

    "auto" is one for each processor that PyTorch would use (OMP_NUM_THREADS), where nobody has said with how many
    threads, clients train one by one, and the network is large enough for a client to be worth sending.
    """
    here = factory.device(config).type == "cpu"
    if config.workers != "auto":
        if config.workers != 1 and not here:
            raise UserError(
                f"workers is {config.workers!r}, but clients on a GPU train in one process: leave workers out, or "
                "choose device 'cpu'."
            )
        return config.cohort if config.workers == "ray" else min(config.workers, config.cohort)
    small = factory.network_name(config) == "small" or registry.entry(config.method).pooled
    given = ":" in config.method  # as an object, perhaps: known to this process alone
    alone = here and factory.executor(config) == "loop"
    if not alone or small or given or config.threads is not None:
        return 1
    free = min(len(processors()), torch.get_num_threads()) // _SHARE["runs"]
    return max(1, min(free, config.cohort))


@contextmanager
def working(config: Config) -> Iterator[Spread]:
    """Give what trains the clients of a run: `map`, or processes, on this machine or in a Ray cluster, until the end.

    Raise UserError where that is impossible.
    """
    if config.workers == "ray":
        from halfmoon.runs.ray_workers import RayWorkers  # an extra

        pool: Workers | RayWorkers = RayWorkers(factory.threads(config), config.cohort)
    elif (number := count(config)) > 1:
        pool = Workers(number, factory.threads(config))
    else:
        yield map
        return
    try:
        yield pool
    finally:
        pool.close()


class Workers:
    """Processes that compute side by side; a `halfmoon.engine.spread.Spread`.

    They are started with the first items that are more than one: one alone is computed here.
    """

    def __init__(self, number: int, threads: int = 1) -> None:
        """Take note of how many processes there shall be, and with how many threads each computes."""
        self.number, self.threads = number, threads
        self._processes: list[subprocess.Popen[bytes]] = []
        self._free: SimpleQueue[subprocess.Popen[bytes]] = SimpleQueue()
        self._told: dict[int, bytes] = {}  # by process id, the function that it knows
        self._pool: ThreadPoolExecutor | None = None

    def __call__(self, function: Callable[[Item], Result], items: Iterable[Item], /) -> Iterator[Result]:
        """Yield function(item) in the order of the items; what it raises is raised in its place.

        Raise UserError where a process ends: killed, or out of memory.
        """
        waiting: deque[Item] = deque()
        source = iter(items)
        for item in source:
            waiting.append(item)
            if len(waiting) > 1:
                break
        if len(waiting) < 2:
            yield from map(function, waiting)
            return
        pool, shared = self._started(), packed(function)
        running: deque[Future[bytes]] = deque()

        def fill() -> None:
            """Let one more item wait than there are processes: none stands still."""
            while sum(not each.done() for each in running) <= self.number:
                item = waiting.popleft() if waiting else next(source, None)
                if item is None:
                    return
                running.append(pool.submit(self._asked, shared, packed(item)))

        fill()
        while running:
            wait([each for each in running if not each.done()] or running, return_when=FIRST_COMPLETED)
            fill()
            while running and running[0].done():
                answer = cast(Answer, unpacked(running.popleft().result()))
                if answer.error is not None:
                    raise answer.error
                yield answer.value

    def close(self) -> None:
        """End the processes, whatever they do."""
        for each in self._processes:
            each.kill()
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
        for each in self._processes:
            each.wait()
            for stream in (each.stdin, each.stdout):
                with suppress(OSError):
                    cast(Any, stream).close()
        self._processes, self._pool = [], None

    def _started(self) -> ThreadPoolExecutor:
        if self._pool is not None:
            return self._pool
        there = processors()
        own = self.number * self.threads == len(there)  # else they would crowd on some
        environment = {**os.environ, "OMP_NUM_THREADS": str(self.threads), "PYTHONPATH": os.pathsep.join(sys.path)}
        for k in range(self.number):
            # A session of its own: Ctrl-C is for the process that asked, which then ends the others.
            made = subprocess.Popen(
                [sys.executable, "-P", "-c", START],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=environment,
                start_new_session=True,
            )
            self._processes.append(made)
            pinned = tuple(there[k * self.threads : (k + 1) * self.threads]) if own else ()
            send(cast(Any, made.stdin), packed((self.threads, pinned)))
            self._free.put(made)
        self._pool = ThreadPoolExecutor(self.number)
        return self._pool

    def _asked(self, function: bytes, item: bytes) -> bytes:
        """Have the next free process compute, and return its packed answer."""
        process = self._free.get()
        try:
            stdin, stdout = cast(Any, process.stdin), cast(Any, process.stdout)
            with suppress(BrokenPipeError):
                if self._told.get(process.pid) is not function:
                    send(stdin, b"", function)
                    self._told[process.pid] = function
                send(stdin, item)
            answer = receive(stdout)
        finally:
            self._free.put(process)
        if answer is None:
            raise UserError(
                "a process that trained clients was killed, or the memory is full: go on with the run folder, or "
                "choose fewer --workers."
            )
        return answer
