"""The executor that computes items on a Ray cluster: many machines and GPUs (extra `ray`)."""

import math
import os
import re
import socket
import sys
import tempfile
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from halfmoon.core.errors import UserError, install_command
from halfmoon.engine.executors.base import MAX_ATTEMPTS, AnyTask, Result, WorkerDied
from halfmoon.engine.executors.pools import PoolExecutor, call_packed, configure_process, pack

RAY_RESOURCE_STEPS = 10_000
"""Steps a unit in which Ray counts fractions of a resource."""

CONNECT_SECONDS = 5.0
"""Seconds that a machine of a cluster may take to accept a connection; Ray itself retries for many minutes."""

RayNodes = Sequence[dict[str, Any]]
"""The machines of a cluster, as `ray.nodes` describes them."""


class WorkerResources(NamedTuple):
    """The resources of the processes of a cluster.

    Attributes:
        number: the largest number of processes that compute at the same time; None for as many as fit.
        cpus: processors of one process, all of one machine.
        gpus: GPUs of one process, a fraction if several share one.
    """

    number: int | None
    cpus: int
    gpus: float = 0.0


class RayExecutor(PoolExecutor):
    """Computes items in processes of a Ray cluster.

    All machines need the run folders, and the data, under the same path. A task whose worker died may run on another
    machine the next time, where it continues from the checkpoints in its folder.
    """

    failure_message = (
        "a process of the Ray cluster that trained clients died: killed, out of memory, or its machine is gone; go on "
        "with the run folder."
    )

    def __init__(self, choose_resources: Callable[[RayNodes], WorkerResources], address: str | None = None) -> None:
        """Connect to a Ray cluster, or start one that ends with `close`.

        Args:
            choose_resources: chooses the processes, given the machines: `client_resources` or `run_resources`.
            address: the cluster's address. None means the cluster of an earlier `ray.init`, else the one at
                RAY_ADDRESS, else the one on this machine, else a new one.

        Raises:
            UserError: Ray is not installed, no cluster responds, or it lacks the resources.
        """
        self._ray = ray = import_ray()
        self._owns_connection = connect_ray(ray, address)
        try:
            self._resources = resources = choose_resources(ray.nodes())
        except UserError:
            self.close()
            raise
        super().__init__(resources.number or 1, resources.cpus)
        self.broken_error = getattr(ray.exceptions, "RayError", RuntimeError)

    def bind(self, function: Callable[[Any], Any]) -> Callable[[bytes], Future[bytes]]:
        remote_call = self._ray.remote(num_cpus=self.threads, max_retries=0)(_call_in_ray)
        # The function is large (it contains the data), so the cluster stores it once for all items.
        stored_function = self._ray.put(pack(function))
        return lambda item: remote_call.remote(self.threads, sys.path, stored_function, item).future()

    def run_tasks(
        self, function: Callable[[AnyTask], Result], tasks: Sequence[AnyTask]
    ) -> Generator[tuple[AnyTask, Result | WorkerDied]]:
        ray = self._ray
        running: dict[Any, AnyTask] = {}
        remote = ray.remote(_call_task)
        try:
            for task in tasks:
                options = {
                    "name": task.name,
                    "num_cpus": self._resources.cpus,
                    "num_gpus": self._resources.gpus if task.uses_gpu else 0,
                    "max_retries": MAX_ATTEMPTS - 1,
                }
                running[remote.options(**options).remote(function, task)] = task
            while running:
                finished, _ = ray.wait(list(running), num_returns=1)
                reference = finished[0]
                yield running.pop(reference), self._result(reference)
        except BaseException:  # also if the caller stops the iteration
            for reference in running:
                ray.cancel(reference, force=True)
            raise

    def _result(self, reference: Any) -> Any:
        """Fetch the result of a finished Ray task; `WorkerDied` if its worker died."""
        errors = self._ray.exceptions
        try:
            return self._ray.get(reference)
        except errors.RayTaskError:  # an exception inside the task: raise it, as the other executors do
            raise
        except errors.RayError as error:
            return WorkerDied(
                f"{type(error).__name__}: its worker died {MAX_ATTEMPTS} times: killed, or out of memory."
            )

    def close(self) -> None:
        """Disconnect from the cluster if this executor connected to it; end it if this executor started it."""
        if self._owns_connection:
            self._ray.shutdown()
            self._owns_connection = False


def client_resources(nodes: RayNodes, number: int, threads: int) -> WorkerResources:
    """Choose processes that train the clients of a cohort.

    Args:
        nodes: the machines.
        number: the largest number of processes; fewer if the cluster has fewer processors.
        threads: the number of threads of each process.

    Raises:
        UserError: no machine has enough processors.
    """
    processor_counts = [node["Resources"].get("CPU", 0) for node in nodes if node["Alive"]]
    # The threads of a process share memory, so it cannot use processors of two machines.
    available = sum(int(count) // threads for count in processor_counts)
    if not available:
        raise UserError(
            f"no machine of the Ray cluster has {threads} processors; choose fewer {{threads}}, or start one "
            "with: ray start --address=...",
            option="threads",
        )
    return WorkerResources(min(number, available), threads)


def run_resources(nodes: RayNodes, jobs: int) -> WorkerResources:
    """Divide the smallest machine of a cluster between `jobs` runs.

    Args:
        nodes: the machines.
        jobs: the number of runs at the same time on each machine.

    Returns:
        The resources of one run: its share of the processors, at least one, and, if machines have GPUs, the same share
        of these, at most one.

    Raises:
        UserError: If no machine has processors.
    """
    resources = [node["Resources"] for node in nodes if node["Alive"]]
    cpus = [machine["CPU"] for machine in resources if machine.get("CPU")]
    gpus = [machine["GPU"] for machine in resources if machine.get("GPU")]
    if not cpus:
        raise UserError("the Ray cluster has no machine with processors; start one with: ray start --address=...")
    # Round down to a whole step: if every share were rounded up, the last run would not fit on the machine.
    gpu_share = math.floor(min(gpus) / jobs * RAY_RESOURCE_STEPS) / RAY_RESOURCE_STEPS if gpus else 0
    return WorkerResources(number=None, cpus=max(1, int(min(cpus)) // jobs), gpus=min(1.0, gpu_share))


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
        ray: the module.
        address: the address of the cluster; None: RAY_ADDRESS, or a cluster on this machine.

    Returns:
        True if this call connected; False if `ray.init` was called before, whose connection remains.

    Raises:
        UserError: no cluster replies.
    """
    if ray.is_initialized():
        return False
    requested = address or os.environ.get("RAY_ADDRESS") or None
    if requested is not None and not _accepts_connections(requested):
        raise _no_cluster_error(requested, f"no connection within {CONNECT_SECONDS:g} s")
    if requested is None and (last := _last_cluster()) is not None and not _accepts_connections(last):
        # Ray would wait for the cluster that was started here last, although it has ended.
        address = "local"
    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except (OSError, RuntimeError, ValueError) as error:
        raise _no_cluster_error(address, " ".join(str(error).split())) from error
    return True


def _no_cluster_error(address: str | None, reason: str) -> UserError:
    """Make the error that no cluster replies at an address; None for the cluster of this machine."""
    location = f" at {address}" if address else ""
    return UserError(
        f"no Ray cluster responds{location} ({reason}); start one with ray start --head, or check {{ray_address}} and "
        "RAY_ADDRESS.",
        option="ray_address",
    )


def _accepts_connections(address: str) -> bool:
    """Check whether a machine accepts connections at HOST:PORT; True for other kinds of addresses, such as "local"."""
    matched = re.fullmatch(r"\[?([^/\[\]]+)\]?:(\d+)", address)
    if matched is None:
        return True
    host, port = matched.groups()
    try:
        socket.create_connection((host, int(port)), CONNECT_SECONDS).close()
    except (OSError, OverflowError):  # OverflowError: the port is too large
        return False
    return True


def _last_cluster() -> str | None:
    """Return the address of the cluster that `ray start` made on this machine last; None if there was none.

    Ray's file with this address remains when the cluster is killed.
    """
    folder = os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()
    try:
        return (Path(folder) / "ray" / "ray_current_cluster").read_text().strip() or None
    except OSError:
        return None


def _call_in_ray(threads: int, path: list[str], function: bytes, item: bytes) -> bytes:
    """Call a packed function in a process of the cluster, with the import path of the main process."""
    sys.path += [folder for folder in path if folder not in sys.path]
    configure_process(threads)
    return call_packed(function, item)


def _call_task(function: Callable[[AnyTask], Result], task: AnyTask) -> Result:
    """Run a task in a process of the cluster: Ray accepts functions only, and `function` may be a `partial`."""
    return function(task)
