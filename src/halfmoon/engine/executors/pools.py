"""Pools of processes that compute items in parallel, bit for bit as one by one; the base of two executors.

A client depends on (seed, round, query, client) only, and every process computes with as many threads as a single
process would; results are in the order of the cohort. So a run does not depend on the number of processes. Processes
store no state of the run: the memory of a client is sent with its task.
"""

import io
import os
import pickle
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from itertools import chain, islice
from multiprocessing import get_all_start_methods, get_context
from multiprocessing.context import BaseContext
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from halfmoon.core.errors import UserError
from halfmoon.core.fork_server import STARTER_VARIABLE
from halfmoon.core.memory import retain_freed_memory
from halfmoon.engine.executors.base import Executor, Item, Result


class CallResult(NamedTuple):
    """The value of a function call, or the error that it raised."""

    value: Any = None
    error: BaseException | None = None


class _TensorPickler(pickle.Pickler):
    """A pickler that writes tensors of the CPU as NumPy arrays: PyTorch's pickling takes longer than a small step."""

    def reducer_override(self, obj: Any) -> Any:
        # NumPy has no bfloat16, and tensors with gradients or of subclasses lose their properties.
        if type(obj) is not Tensor or obj.device.type != "cpu" or obj.dtype == torch.bfloat16 or obj.requires_grad:
            return NotImplemented
        array = np.ascontiguousarray(obj.numpy()).reshape(obj.shape)
        return torch.from_numpy, (array,)  # pyright: ignore[reportUnknownMemberType]


def pack(value: Any) -> bytes:
    """Pickle a value for `unpack` in another process of this program."""
    file = io.BytesIO()
    _TensorPickler(file, protocol=5).dump(value)
    return file.getvalue()


def unpack(data: bytes) -> Any:
    """Load a value of `pack`; tensors of the CPU are contiguous."""
    return pickle.loads(data)


def call_packed(function: bytes, item: bytes) -> bytes:
    """Call a function in a worker process, with its argument and result pickled by this module's `pack`.

    Args:
        function: the serialized function of one argument.
        item: the serialized argument.

    Returns:
        The serialized `CallResult`, with the function's result or its exception, which the main process raises.
    """
    try:
        call = unpack(function)
    except Exception as error:  # unpickling imports modules, which may raise anything
        reason = f"{type(error).__name__}: {error}"
        import_error = UserError(
            f"clients cannot train in separate processes, where the method is not known ({reason}): put it into a "
            "module that can be imported, or choose {workers=1}.",
            option="workers",
        )
        return pack(CallResult(error=import_error))
    try:
        return pack(CallResult(call(unpack(item))))
    except Exception as error:
        # Not every exception can be pickled, and not every pickled one can be loaded.
        with suppress(Exception):
            data = pack(CallResult(error=error))
            unpack(data)
            return data
        return pack(CallResult(error=RuntimeError(f"{type(error).__name__}: {error}")))


def configure_process(threads: int, processors: tuple[int, ...] = ()) -> None:
    """Set the number of threads of this process, and the processors that it may use.

    Args:
        threads: the number of PyTorch's threads.
        processors: numbers of the processors; (): all. Systems without processor affinity ignore them.
    """
    torch.set_num_threads(threads)
    # Otherwise the memory of each batch is returned to the system, and clearing new pages takes time.
    retain_freed_memory()
    if processors and hasattr(os, "sched_setaffinity"):
        with suppress(OSError):
            os.sched_setaffinity(0, processors)


def available_processors() -> list[int]:
    """Return the numbers of the processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def make_process_context(*modules: str) -> BaseContext:
    """Return a multiprocessing context whose processes start quickly, with these modules imported.

    Processes are not forked from this one: a copy of PyTorch's threads may hang. If the system supports it, they are
    forked from a server process that has imported the modules and computes nothing.
    """
    if "forkserver" not in get_all_start_methods():
        return get_context("spawn")
    context = get_context("forkserver")
    os.environ[STARTER_VARIABLE] = str(os.getpid())
    # The first module makes the server process end with this process, whose id it reads from the variable.
    context.set_forkserver_preload(["halfmoon.core.fork_server_start", *modules])
    return context


def terminate_pool(pool: ProcessPoolExecutor) -> None:
    """Terminate the processes of a pool without waiting for their tasks."""
    for process in (pool._processes or {}).values():
        process.terminate()


class PoolExecutor(Executor):
    """An executor with several processes, which start with the first items of `map`.

    Attributes:
        number: the number of processes.
        threads: the number of threads of each process.
        broken_error: the exception of a future whose process has ended.
        failure_message: the error message if a process has ended, with `{workers}` for the option.
    """

    broken_error: type[BaseException] = BrokenProcessPool

    failure_message = (
        "a process that trained clients was killed, or the memory is full: go on with the run folder, or choose fewer "
        "{workers}."
    )

    def __init__(self, number: int, threads: int = 1) -> None:
        self.number = number
        self.threads = threads

    def map(self, function: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
        """Yield function(item) in the order of the items; a single item is computed in this process."""
        remaining = iter(items)
        first_two = list(islice(remaining, 2))
        if len(first_two) < 2:
            yield from map(function, first_two)
            return
        remaining = chain(iter(first_two), remaining)
        first_two = []  # frees the items while later ones train
        submit = self.bind(function)  # sends the function once, for all items
        futures = deque[Future[bytes]]()
        while True:
            # One more item is submitted than there are processes, so that no process waits for its next item. Items
            # are read as late as possible, because each contains the images of a client.
            unfinished = [future for future in futures if not future.done()]
            missing = max(0, self.number + 1 - len(unfinished))
            for item in islice(remaining, missing):
                futures.append(submit(pack(item)))
            if not futures:
                return
            # If all are done, this returns at once.
            unfinished = [future for future in futures if not future.done()]
            wait(unfinished or futures, return_when=FIRST_COMPLETED)
            # Results are yielded in the order of the items, so a finished item waits for those before it.
            while futures and futures[0].done():
                # Without a variable, which would keep an upload in memory until the next one is finished.
                yield self._unpack_result(futures.popleft())

    def _unpack_result(self, future: Future[bytes]) -> Any:
        """Return the value that a process has computed, or raise the exception that it has met."""
        try:
            result: CallResult = unpack(future.result())
        except self.broken_error as error:
            raise UserError(self.failure_message, option="workers") from error
        if result.error is not None:
            raise result.error
        return result.value

    @abstractmethod
    def bind(self, function: Callable[[Any], Any]) -> Callable[[bytes], Future[bytes]]:
        """Send a function to the processes, and return a function that submits a packed item to `call_packed`."""
