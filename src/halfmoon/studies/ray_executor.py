"""Executor for the runs of a sweep on a Ray cluster: many machines and GPUs that share folders (extra `ray`).

Each run is one Ray task. If its worker dies, Ray retries the task on any machine, and the run resumes from the
checkpoints in its folder. All machines therefore need the run folders, and the data, under the same path.
"""

import math
import tomllib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from halfmoon.core.errors import UserError
from halfmoon.runs.callbacks import NULL_CALLBACK, Callback
from halfmoon.runs.workers import connect_ray, import_ray
from halfmoon.studies.executors import MAX_ATTEMPTS, ResultCallback, SweepTask, TaskResult, run_task

RAY_RESOURCE_STEPS = 10_000
"""Steps a unit in which Ray counts fractions of a resource."""


class RunResources(NamedTuple):
    """The resources of one run: whole processors, and GPUs, a fraction if several runs share one."""

    cpus: int
    gpus: float


class RayExecutor:
    """Executor that runs tasks on a Ray cluster, `jobs` at a time on each machine.

    A run gets a share of the smallest machine: its processors divided by `jobs`, and, if the cluster has GPUs and the
    run's device is not "cpu", the same share of the machine's GPUs, at most one GPU.
    """

    def __init__(self, jobs: int = 1, address: str | None = None, callback: Callback = NULL_CALLBACK) -> None:
        """Connect to a Ray cluster, or start one that ends with `close`.

        Args:
            jobs: The number of runs at the same time on each machine.
            address: The cluster's address. None means the cluster of an earlier `ray.init`, else the one at
                RAY_ADDRESS, else the one on this machine, else a new one.
            callback: Receives the progress of every run, on the machine of the run, so it must be picklable.

        Raises:
            UserError: If Ray is not installed or no cluster responds.
        """
        self._ray = import_ray()
        self._owns_connection = connect_ray(self._ray, address)
        self._resources = divide_resources(self._ray.nodes(), jobs)
        self._callback = callback

    def close(self) -> None:
        """Disconnect from the cluster if this executor connected to it; end it if this executor started it."""
        if self._owns_connection:
            self._ray.shutdown()
            self._owns_connection = False

    def run_tasks(self, tasks: Sequence[SweepTask], on_result: ResultCallback) -> None:
        """Run all tasks; retry one whose worker dies (killed, out of memory), up to `MAX_ATTEMPTS` attempts."""
        ray = self._ray
        running: dict[Any, SweepTask] = {}
        remote = ray.remote(run_task)
        try:
            for task in tasks:
                # On the worker's machine a relative path would mean another folder.
                absolute_task = replace(task, folder=task.folder.absolute())
                reference = remote.options(**self._ray_options(task)).remote(absolute_task, self._callback)
                running[reference] = task
            while running:
                (reference, *_), _ = ray.wait(list(running), num_returns=1)
                on_result(self._result(reference, running.pop(reference)))
        except BaseException:
            for reference in running:
                ray.cancel(reference, force=True)
            raise

    def _ray_options(self, task: SweepTask) -> dict[str, Any]:
        """Return the options of a Ray task: its name, resources and retries."""
        device = tomllib.loads(task.config_toml).get("device", "auto")
        gpus = 0 if task.split_only or device == "cpu" else self._resources.gpus
        return {
            "name": task.folder.name,
            "num_cpus": self._resources.cpus,
            "num_gpus": gpus,
            "max_retries": MAX_ATTEMPTS - 1,
        }

    def _result(self, reference: Any, task: SweepTask) -> TaskResult:
        """Fetch the result of a finished Ray task; a worker that died becomes a failed result."""
        errors = self._ray.exceptions
        try:
            # The caller knows the task by its original folder, not by the absolute one that the worker received.
            return self._ray.get(reference)._replace(task=task)
        except errors.RayTaskError:  # an exception inside the task: raise it, as the other executors do
            raise
        except errors.RayError as error:
            reason = f"{type(error).__name__}: its worker died {MAX_ATTEMPTS} times: killed, or out of memory."
            return TaskResult(task, summary=None, failed=reason)


def divide_resources(nodes: Sequence[dict[str, Any]], jobs: int) -> RunResources:
    """Divide the smallest machine of a Ray cluster between `jobs` runs.

    Args:
        nodes: The machines, as `ray.nodes` describes them.
        jobs: The number of runs at the same time on each machine.

    Returns:
        The resources of one run: at least one processor, and at most one GPU.

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
    return RunResources(cpus=max(1, int(min(cpus)) // jobs), gpus=min(1.0, gpu_share))
