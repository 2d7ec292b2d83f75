"""The executor that trains the clients of a cohort or the runs of a sweep, and the number of its processes."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch

from halfmoon.config.schema import Config
from halfmoon.core.errors import UserError
from halfmoon.engine.executors.base import Executor
from halfmoon.engine.executors.pools import available_processors
from halfmoon.engine.executors.processes import ProcessExecutor
from halfmoon.engine.executors.ray_cluster import RayExecutor, client_resources, run_resources
from halfmoon.engine.executors.serial import SerialExecutor
from halfmoon.engine.executors.vmap import VmapExecutor
from halfmoon.methods import registry
from halfmoon.runs import factory

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
    # PyTorch's threads follow from OMP_NUM_THREADS.
    usable_processors = min(len(available_processors()), torch.get_num_threads())
    available = usable_processors // _CONCURRENT_RUNS["runs"]
    return max(1, min(available, config.cohort))


@contextmanager
def open_executor(config: Config) -> Iterator[Executor]:
    """Create the executor that trains the clients of a run, and close its processes at the end.

    The option `workers` chooses where they train, and `executor` whether several are batched by vmap there.

    Args:
        config: the configuration.

    Raises:
        UserError: the processes cannot start.
    """
    executor: Executor
    if config.workers == "ray":
        executor = RayExecutor(
            partial(client_resources, number=config.cohort, threads=factory.count_threads(config)),
        )
    elif (number := count_workers(config)) > 1:
        executor = ProcessExecutor(number, factory.count_threads(config))
    else:
        executor = SerialExecutor()
    if factory.select_executor(config) == "vmap":
        executor = VmapExecutor(executor, factory.max_vmapped_clients(config))
    try:
        yield executor
    finally:
        executor.close()


def make_sweep_executor(engine: str, jobs: int, ray_address: str | None = None) -> Executor:
    """Create the executor that trains the runs of a sweep; the caller closes it.

    Args:
        engine: the option `engine`: "ray" for a Ray cluster, otherwise processes of this machine.
        jobs: the number of runs at the same time; with 1 they train in this process.
        ray_address: the address of the cluster; None for one that Ray starts here.

    Raises:
        UserError: an address is given without Ray, or Ray cannot be used.
    """
    if engine == "ray":
        return RayExecutor(partial(run_resources, jobs=jobs), ray_address)
    if ray_address is not None:
        raise UserError("{ray_address} needs {engine=ray}.", option=("ray_address", "engine"))
    return ProcessExecutor(jobs) if jobs > 1 else SerialExecutor()
