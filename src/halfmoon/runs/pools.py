"""Pools of processes that train the clients of one cohort side by side, with the same bits as one by one.

A client is drawn, and trained, from (seed, round, query, client) alone, and every process computes with as many threads
as the run would alone; results come in the order of the cohort. So a run does not depend on how many processes there
are. They hold no state of it: the memory of a client travels with it.
"""

import io
import os
import pickle
import signal
import sys
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from itertools import chain, islice
from multiprocessing import connection, get_all_start_methods, get_context, parent_process
from multiprocessing.context import BaseContext
from threading import Thread
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from halfmoon.core.errors import UserError
from halfmoon.core.memory import retain_freed_memory
from halfmoon.engine.evaluation import Item, Result


class Answer(NamedTuple):
    """The value of a function, or the error that it raised."""

    value: Any = None
    error: BaseException | None = None


class _Pickler(pickle.Pickler):
    """A pickler that writes tensors of the CPU as arrays: PyTorch's own pickles cost more than a small step."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is not Tensor or obj.device.type != "cpu" or obj.dtype == torch.bfloat16 or obj.requires_grad:
            return NotImplemented
        return torch.from_numpy, (np.ascontiguousarray(obj.numpy()).reshape(obj.shape),)


def packed(value: Any) -> bytes:
    """Return a value as bytes, for `unpacked` in a process of the same program."""
    file = io.BytesIO()
    _Pickler(file, protocol=5).dump(value)
    return file.getvalue()


def unpacked(data: bytes) -> Any:
    """Return the value of `packed`; tensors are laid out plainly."""
    return pickle.loads(data)


def answer(function: bytes, item: bytes) -> bytes:
    """Return the packed `Answer` of a packed function of a packed item; the process that asks raises its error."""
    try:
        call = unpacked(function)
    except Exception as error:  # whatever a module does that is imported
        why = f"{type(error).__name__}: {error}"
        problem = UserError(
            f"clients cannot train in processes of their own, where the method is not known ({why}): put it into a "
            "module that can be imported, or choose --workers 1."
        )
        return packed(Answer(error=problem))
    try:
        return packed(Answer(call(unpacked(item))))
    except Exception as error:
        with suppress(Exception):
            unpacked(data := packed(Answer(error=error)))
            return data
        return packed(Answer(error=RuntimeError(f"{type(error).__name__}: {error}")))


def settle(threads: int, processors: tuple[int, ...] = ()) -> None:
    """Compute with so many threads, on these processors alone if any are named and the system can do it."""
    torch.set_num_threads(threads)
    retain_freed_memory()
    if processors and hasattr(os, "sched_setaffinity"):
        with suppress(OSError):
            os.sched_setaffinity(0, processors)


def processors() -> list[int]:
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def ready_context(*modules: str) -> BaseContext:
    """Return how processes start that have imported these modules, without importing them once more.

    They are not forked from this process: a copy of PyTorch's threads may hang. Where the system can, they are forked
    from one that has imported the modules and computes nothing.
    """
    if "forkserver" not in get_all_start_methods():
        return get_context("spawn")
    context = get_context("forkserver")
    context.set_forkserver_preload(list(modules))
    return context


def terminate(pool: ProcessPoolExecutor) -> None:
    for process in (pool._processes or {}).values():
        process.terminate()


class Pool(ABC):
    """A `halfmoon.engine.evaluation.ParallelMap` of at most `number` processes, which are started with the first items."""

    broken: type[BaseException] = BrokenProcessPool
    """Raised by a future whose process has ended."""

    problem = (
        "a process that trained clients was killed, or the memory is full: go on with the run folder, or choose fewer "
        "--workers."
    )

    def __init__(self, number: int, threads: int = 1) -> None:
        self.number, self.threads = number, threads

    def __call__(self, function: Callable[[Item], Result], items: Iterable[Item], /) -> Iterator[Result]:
        """Yield function(item) in the order of the items; what it raises is raised in its place.

        A single item is computed here. Raise UserError where a process ends: killed, or out of memory.
        """
        source = iter(items)
        first = list(islice(source, 2))
        if len(first) < 2:
            yield from map(function, first)
            return
        source = chain(iter(first), source)
        first = []  # or they would be held while others train
        call, futures = self.call(function), deque[Future[bytes]]()
        while True:
            # One more item waits than there are processes: none stands still.
            for item in islice(source, max(0, self.number + 1 - sum(not future.done() for future in futures))):
                futures.append(call(packed(item)))
            if not futures:
                return
            wait([future for future in futures if not future.done()] or futures, return_when=FIRST_COMPLETED)
            while futures and futures[0].done():
                try:
                    result: Answer = unpacked(futures.popleft().result())
                except self.broken as error:
                    raise UserError(self.problem) from error
                if result.error is not None:
                    raise result.error
                yield result.value

    @abstractmethod
    def call(self, function: Callable[[Any], Any]) -> Callable[[bytes], Future[bytes]]:
        """Return what has a process compute the `answer` of the function for a packed item."""

    @abstractmethod
    def close(self) -> None:
        """End the processes, whatever they do."""


class Workers(Pool):
    """Processes on this machine."""

    _pool: ProcessPoolExecutor | None = None

    def call(self, function: Callable[[Any], Any]) -> Callable[[bytes], Future[bytes]]:
        pool, data = self._pool or self._started(), packed(function)
        return lambda item: pool.submit(answer, data, item)

    def close(self) -> None:
        if self._pool is not None:
            terminate(self._pool)
            self._pool.shutdown(cancel_futures=True)
            self._pool = None

    def _started(self) -> ProcessPoolExecutor:
        context, here = ready_context("halfmoon.runs.runner"), processors()
        places = context.SimpleQueue()
        own = self.number * self.threads == len(here)  # else they would crowd on some
        for k in range(self.number):
            places.put(tuple(here[k * self.threads : (k + 1) * self.threads]) if own else ())
        pool = ProcessPoolExecutor(self.number, context, _begin, (self.threads, places, sys.path))
        # The program that started the run is not a module to be imported once more by each process.
        main, sys.modules["__main__"] = sys.modules["__main__"], ModuleType("__main__")
        try:
            while len(pool._processes or {}) < self.number:  # each is started with something to do
                pool.submit(os.getpid)
        finally:
            sys.modules["__main__"] = main
        self._pool = pool
        return pool


def _begin(threads: int, places: Any, path: list[str]) -> None:
    """Make a process ready: it ends with the one that started it, and prints nothing where results are printed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that asks, which then ends the others
    sys.path += [folder for folder in path if folder not in sys.path]
    os.dup2(2, 1)
    parent: Any = parent_process()

    def follow() -> None:
        connection.wait([parent.sentinel])
        os._exit(1)

    Thread(target=follow, daemon=True).start()
    settle(threads, places.get())
