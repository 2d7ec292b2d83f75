"""In how many processes the clients of a run's cohorts train."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from halfmoon.config.schema import Config
from halfmoon.core.errors import UserError
from halfmoon.engine.spread import Spread
from halfmoon.methods import registry
from halfmoon.runs import factory
from halfmoon.runs.pools import Pool, Workers, processors

_SHARE = {"runs": 1}
"""How many runs are played at once on this machine's processors."""


def share(runs: int) -> None:
    """Take note that so many runs are played at once: each has its part of the processors."""
    _SHARE["runs"] = runs


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

        pool: Pool = RayWorkers(config.cohort, factory.threads(config))
    elif (number := count(config)) > 1:
        pool = Workers(number, factory.threads(config))
    else:
        yield map
        return
    try:
        yield pool
    finally:
        pool.close()
