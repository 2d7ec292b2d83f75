"""In how many processes the clients of a run's cohorts train."""

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
from halfmoon.runs.pools import Pool, Workers, answer, packed, processors, settle


def import_ray() -> Any:
    """Return Ray; raise UserError where it is not installed."""
    try:
        return import_module("ray")  # an extra, needed here only; by name, as a type checker may lack it
    except ImportError as error:
        raise UserError(f"Ray is not installed; {install_command('ray')} to use it.") from error


def connect_ray(ray: Any, address: str | None) -> bool:
    """Reach the cluster at `address`, at RAY_ADDRESS, or on this machine, else start one; return whether this did so.

    A cluster that `ray.init` has reached before stays. Raise UserError if none answers.
    """
    if ray.is_initialized():
        return False
    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except (OSError, RuntimeError, ValueError) as error:
        place, why = f" at {address}" if address else "", " ".join(str(error).split())
        raise UserError(
            f"no Ray cluster answers{place} ({why}); start one with ray start --head, or check --ray-address and "
            "RAY_ADDRESS."
        ) from error
    return True


class RayWorkers(Pool):
    """Processes of a Ray cluster, each with `threads` processors of one machine."""

    problem = (
        "a process of the Ray cluster that trained clients died: killed, out of memory, or its machine is gone; go on "
        "with the run folder."
    )

    def __init__(self, number: int = 1, threads: int = 1) -> None:
        """Reach the cluster that is there (`ray.init`, RAY_ADDRESS, this machine), or start one until `close`.

        Raise UserError where Ray is not installed, no cluster answers, or no machine has enough processors.
        """
        self._ray = ray = import_ray()
        self._owns_cluster = connect_ray(ray, None)
        self.broken = ray.exceptions.RayError
        alive = [node["Resources"].get("CPU", 0) for node in ray.nodes() if node["Alive"]]
        free = sum(int(cpus) // threads for cpus in alive)
        if not free:
            self.close()
            raise UserError(
                f"no machine of the Ray cluster has {threads} processors; choose fewer --threads, or start one "
                "with: ray start --address=..."
            )
        super().__init__(min(number, free), threads)
        self._answer = ray.remote(num_cpus=threads, max_retries=0)(_answer)

    def call(self, function: Callable[[Any], Any]) -> Callable[[bytes], Future[bytes]]:
        shared = self._ray.put(packed(function))
        return lambda item: self._answer.remote(self.threads, sys.path, shared, item).future()

    def close(self) -> None:
        if self._owns_cluster:
            self._ray.shutdown()
            self._owns_cluster = False


def _answer(threads: int, path: list[str], function: bytes, item: bytes) -> bytes:
    sys.path += [folder for folder in path if folder not in sys.path]
    settle(threads)
    return answer(function, item)


_SHARE = {"runs": 1}
"""How many runs are played at once on this machine's processors."""


def share_processors(runs: int) -> None:
    """Take note that so many runs are played at once: each has its part of the processors."""
    _SHARE["runs"] = runs


def count_workers(config: Config) -> int:
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
    local = ":" in config.method  # given as an object, perhaps: known to this process alone
    alone = here and factory.executor(config) == "loop"
    if not alone or small or local or config.threads is not None:
        return 1
    free = min(len(processors()), torch.get_num_threads()) // _SHARE["runs"]
    return max(1, min(free, config.cohort))


@contextmanager
def working(config: Config) -> Iterator[ParallelMap]:
    """Give what trains the clients of a run: `map`, or processes, on this machine or in a Ray cluster, until the end.

    Raise UserError where that is impossible.
    """
    if config.workers == "ray":
        pool: Pool = RayWorkers(config.cohort, factory.threads(config))
    elif (number := count_workers(config)) > 1:
        pool = Workers(number, factory.threads(config))
    else:
        yield map
        return
    try:
        yield pool
    finally:
        pool.close()
