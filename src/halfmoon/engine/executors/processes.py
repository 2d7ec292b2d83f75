"""The executor that computes items in several processes on this machine."""

import os
import signal
import sys
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from types import ModuleType
from typing import Any

from halfmoon.core.parents import exit_with_parent
from halfmoon.engine.executors.base import MAX_ATTEMPTS, AnyTask, Result, WorkerDied
from halfmoon.engine.executors.pools import (
    PoolExecutor,
    available_processors,
    call_packed,
    configure_process,
    make_process_context,
    pack,
    terminate_pool,
)

PRELOADED = "halfmoon.runs.runner"
"""The module that processes start with: it imports all that a training needs."""


class ProcessExecutor(PoolExecutor):
    """Computes items in `number` processes on this machine, each with `threads` threads."""

    _pool: ProcessPoolExecutor | None = None

    def run_tasks(
        self, function: Callable[[AnyTask], Result], tasks: Sequence[AnyTask]
    ) -> Generator[tuple[AnyTask, Result | WorkerDied]]:
        remaining = list(tasks)
        deaths = dict.fromkeys(remaining, 0)
        while remaining:
            remaining = yield from self._run_until_broken(function, remaining, deaths)
            given_up = [task for task in remaining if deaths[task] >= MAX_ATTEMPTS]
            for task in given_up:
                remaining.remove(task)
                yield task, WorkerDied(f"its process died {MAX_ATTEMPTS} times: killed, or out of memory.")

    def _run_until_broken(
        self, function: Callable[[AnyTask], Result], tasks: Sequence[AnyTask], deaths: dict[AnyTask, int]
    ) -> Generator[tuple[AnyTask, Result], None, list[AnyTask]]:
        """Run tasks in one pool until all are done or a process dies; return the tasks that are not done.

        The pool is another one than that of `map`: a task sets its threads itself, and may start processes.

        Args:
            function: runs a task.
            tasks: the tasks, in the order in which they start.
            deaths: the number of pool failures during each task; updated here.

        Yields:
            Finished tasks with their results.
        """
        waiting = list(tasks)
        running: dict[Future[Result], AnyTask] = {}
        with ProcessPoolExecutor(self.number, make_process_context(PRELOADED), exit_with_parent) as pool:
            try:
                while waiting or running:
                    # Submit only as many tasks as there are processes: when the pool breaks, all submitted tasks fail,
                    # and those that had not started must not be counted as suspects.
                    while waiting and len(running) < self.number:
                        task = waiting.pop(0)
                        running[pool.submit(function, task)] = task
                    for future in wait(running, return_when=FIRST_COMPLETED).done:
                        result = future.result()
                        yield running.pop(future), result
            except BrokenProcessPool:
                # The pool does not report which process died, so all running tasks are suspects.
                for task in running.values():
                    deaths[task] += 1
                return [*running.values(), *waiting]
            except BaseException:  # also if the caller stops the iteration
                terminate_pool(pool)
                raise
        return []

    def bind(self, function: Callable[[Any], Any]) -> Callable[[bytes], Future[bytes]]:
        pool = self._pool or self._start()
        packed_function = pack(function)
        return lambda item: pool.submit(call_packed, packed_function, item)

    def close(self) -> None:
        if self._pool is not None:
            terminate_pool(self._pool)
            self._pool.shutdown(cancel_futures=True)
            self._pool = None

    def _start(self) -> ProcessPoolExecutor:
        """Start all processes of the pool, each on a separate group of processors if these are exactly enough.

        With own processors the threads of one process do not displace those of another.
        """
        context = make_process_context(PRELOADED)
        available = available_processors()
        processor_groups = context.SimpleQueue()
        # With more or fewer processors, fixed groups would leave some idle or overload others.
        fits = self.number * self.threads == len(available)
        for first in range(0, self.number * self.threads, self.threads):
            group = available[first : first + self.threads]
            processor_groups.put(tuple(group) if fits else ())
        initial_arguments = (self.threads, processor_groups, sys.path)
        pool = ProcessPoolExecutor(self.number, context, _initialize_process, initial_arguments)
        # Each process would import the main program again, and so run a script without an `if __name__` guard twice:
        # an empty module stands in for it while the processes start.
        main = sys.modules["__main__"]
        sys.modules["__main__"] = ModuleType("__main__")
        try:
            # The executor starts a process only when a task is submitted.
            while len(pool._processes or {}) < self.number:
                pool.submit(os.getpid)
        finally:
            sys.modules["__main__"] = main
        self._pool = pool
        return pool


def _initialize_process(threads: int, processor_groups: Any, path: list[str]) -> None:
    """Prepare a process: it ends with its parent, and prints to stderr, because results are printed to stdout."""
    # Ctrl-C reaches the whole process group; the main process handles it and ends the others.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.path += [folder for folder in path if folder not in sys.path]
    os.dup2(2, 1)
    exit_with_parent()
    configure_process(threads, processor_groups.get())
