"""The number of processes that train the clients of a cohort, on this machine or in a Ray cluster."""

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch

from halfmoon.config.schema import Config
from halfmoon.core.errors import UserError, install_command
from halfmoon.engine.evaluation import ParallelMap
from halfmoon.methods import registry
from halfmoon.runs import factory
from halfmoon.runs.pools import Pool, Workers, available_processors, call_packed, configure_process, pack


def import_ray() -> Any:
    """Import Ray; raise `UserError` if it is not installed."""
    try:
        # By name, because a type checker may run without this optional package.
        return import_module("ray")
    except ImportError as error:
        raise UserError(f"Ray is not installed; {install_command('ray')} to use it.") from error


def connect_ray(ray: Any, address: str | None) -> bool:
    """Connect to a Ray cluster, or start one on this machine.

    Args:
        ray: the module, an optional dependency.
        address: the address of the cluster; None: RAY_ADDRESS, or a cluster on this machine.

    Returns:
        True if this call connected; False if `ray.init` was called before, whose connection remains.

    Raises:
        UserError: no cluster replies.
    """
    if ray.is_initialized():
        return False
    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except (OSError, RuntimeError, ValueError) as error:
        location = f" at {address}" if address else ""
        reason = " ".join(str(error).split())
        raise UserError(
            f"no Ray cluster responds{location} ({reason}); start one with ray start --head, or check {{ray_address}} and "
            "RAY_ADDRESS.",
            option="ray_address",
        ) from error
    return True


class RayWorkers(Pool):
    """Processes of a Ray cluster, each with `threads` processors of one machine.

    Args:
        number: the largest number of processes; fewer if the cluster has fewer processors.
        threads: the number of threads of each process.

    Raises:
        UserError: Ray is not installed, no cluster replies, or no machine has enough processors.
    """

    failure_message = (
        "a process of the Ray cluster that trained clients died: killed, out of memory, or its machine is gone; go on "
        "with the run folder."
    )

    def __init__(self, number: int = 1, threads: int = 1) -> None:
        """Connect to the cluster, and limit the processes (`number`) to those for which it has enough processors."""
        self._ray = ray = import_ray()
        self._owns_connection = connect_ray(ray, address=None)
        self.broken_error = ray.exceptions.RayError
        processor_counts = [node["Resources"].get("CPU", 0) for node in ray.nodes() if node["Alive"]]
        # The threads of a process share memory, so it cannot use processors of two machines.
        available = sum(int(count) // threads for count in processor_counts)
        if not available:
            self.close()
            raise UserError(
                f"no machine of the Ray cluster has {threads} processors; choose fewer {{threads}}, or start one "
                "with: ray start --address=...",
                option="threads",
            )
        super().__init__(min(number, available), threads)
        # Without retries: a process that died ends the run with a message, as on this machine.
        self._remote_call = ray.remote(num_cpus=threads, max_retries=0)(_call_in_ray)

    def bind(self, function: Callable[[Any], Any]) -> Callable[[bytes], Future[bytes]]:
        # The function is large (it contains the data), so the cluster stores it once for all items.
        stored_function = self._ray.put(pack(function))
        return lambda item: self._remote_call.remote(self.threads, sys.path, stored_function, item).future()

    def close(self) -> None:
        if self._owns_connection:
            self._ray.shutdown()
            self._owns_connection = False


def _call_in_ray(threads: int, path: list[str], function: bytes, item: bytes) -> bytes:
    """Call a packed function in a process of the cluster, with the import path of the main process."""
    sys.path += [folder for folder in path if folder not in sys.path]
    configure_process(threads)
    return call_packed(function, item)


_CONCURRENT_RUNS = {"runs": 1}
"""The number of runs that share this machine's processors."""


def share_processors(runs: int) -> None:
    """Set the number of runs that train at the same time on this machine; each uses its share of the processors."""
    _CONCURRENT_RUNS["runs"] = runs


def count_workers(config: Config) -> int:
    """Choose the number of processes that train the clients of a cohort at the same time.

    "auto" is one for each processor that PyTorch would use (OMP_NUM_THREADS), if the option `threads` is not set,
    clients train one by one on the CPU, and the network is so large that training a client takes longer than sending
    it. Several runs on this machine divide the processors among them (`share_processors`).

    Raises:
        UserError: several workers on a GPU.
    """
    on_cpu = factory.select_device(config).type == "cpu"
    if config.workers != "auto":
        if config.workers != 1 and not on_cpu:
            raise UserError(
                f"workers is {config.workers!r}, but clients on a GPU train in one process: leave workers out, or "
                "choose device 'cpu'."
            )
        # A Ray cluster may have processors for all clients of the cohort, and lowers the number if it has not.
        return config.cohort if config.workers == "ray" else min(config.workers, config.cohort)
    is_small = factory.network_name(config) == "small"
    is_centralized = registry.entry(config.method).pooled
    # A method "module:Class" may have been passed as an object, which only this process knows.
    is_custom = ":" in config.method
    one_by_one = on_cpu and factory.select_executor(config) == "loop"
    if not one_by_one or is_small or is_centralized or is_custom or config.threads is not None:
        return 1
    available = min(len(available_processors()), torch.get_num_threads()) // _CONCURRENT_RUNS["runs"]
    return max(1, min(available, config.cohort))


@contextmanager
def open_workers(config: Config) -> Iterator[ParallelMap]:
    """Create the parallel map that trains the clients of a run, and close its processes at the end.

    Args:
        config: the configuration.

    Yields:
        The built-in `map`, or a pool of processes on this machine or in a Ray cluster.

    Raises:
        UserError: the processes cannot start.
    """
    if config.workers == "ray":
        pool: Pool = RayWorkers(config.cohort, factory.count_threads(config))
    elif (number := count_workers(config)) > 1:
        pool = Workers(number, factory.count_threads(config))
    else:
        yield map
        return
    try:
        yield pool
    finally:
        pool.close()
