"""The runs of a sweep on a Ray cluster: many machines and GPUs that see the same folders (extra `ray`).

Each run is one Ray task. One whose worker dies is begun again by Ray, on
any machine, and goes on from the checkpoints in its folders, which therefore have to lie where all machines see them
under the same path, as the data has.
"""

import math
import tomllib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from halfmoon.core.errors import UserError
from halfmoon.runs.callbacks import NULL_CALLBACK, Callback
from halfmoon.runs.workers import connect_ray, import_ray
from halfmoon.studies.executors import TRIES, Note, SweepTask, TaskResult, play


class Share(NamedTuple):
    """What one run is given of a machine: whole processors, and GPUs, a fraction where runs share one."""

    cpus: int
    gpus: float


class RayExecutor:
    """Play on a Ray cluster, `jobs` runs at a time on each machine.

    A run is given a share of the smallest machine: its processors divided by `jobs`, and, where the cluster has GPUs
    and the run's device is not "cpu", as much of one GPU as is left for it when `jobs` runs share a machine's.
    `watch` looks on where a run is played, so it must be possible to send it there.
    """

    def __init__(self, jobs: int = 1, address: str | None = None, watch: Callback = NULL_CALLBACK) -> None:
        """Reach the cluster at `address`, at RAY_ADDRESS, or on this machine; else start one, until `close`.

        Where `ray.init` was called before, that cluster is used. Raise UserError where Ray is not installed or no
        cluster answers.
        """
        self._ray = import_ray()
        self._own_connection = connect_ray(self._ray, address)
        self._share = share(self._ray.nodes(), jobs)
        self._watch = watch

    def close(self) -> None:
        """Leave the cluster that this has joined, and end it where it was started for this."""
        if self._own_connection:
            self._ray.shutdown()
            self._own_connection = False

    def play(self, tasks: Sequence[SweepTask], note: Note) -> None:
        """Play all tasks; one whose worker dies (killed, out of memory) is begun again, `TRIES` times at most."""
        ray, running = self._ray, {}
        remote = ray.remote(play)
        try:
            for task in tasks:
                # A relative path would name another folder where the worker runs.
                copy = replace(task, folder=task.folder.absolute())
                running[remote.options(**self._options(task)).remote(copy, self._watch)] = task
            while running:
                (reference, *_), _ = ray.wait(list(running), num_returns=1)
                note(self._outcome(reference, running.pop(reference)))
        except BaseException:
            for each in running:
                ray.cancel(each, force=True)
            raise

    def _options(self, task: SweepTask) -> dict[str, Any]:
        device = tomllib.loads(task.words).get("device", "auto")
        gpus = 0 if task.split_only or device == "cpu" else self._share.gpus
        return {"name": task.folder.name, "num_cpus": self._share.cpus, "num_gpus": gpus, "max_retries": TRIES - 1}

    def _outcome(self, reference: Any, task: SweepTask) -> TaskResult:
        errors = self._ray.exceptions
        try:
            return self._ray.get(reference)._replace(task=task)
        except errors.RayTaskError:  # a defect of the program, as it would be here
            raise
        except errors.RayError as error:
            why = f"{type(error).__name__}: its worker died {TRIES} times: killed, or out of memory."
            return TaskResult(task, None, why)


def share(nodes: Sequence[dict[str, Any]], jobs: int) -> Share:
    """Return what a run is given where `jobs` run at a time on each of Ray's `nodes`; raise UserError without any."""
    alive = [node["Resources"] for node in nodes if node["Alive"]]
    cpus = [each["CPU"] for each in alive if each.get("CPU")]
    gpus = [each["GPU"] for each in alive if each.get("GPU")]
    if not cpus:
        raise UserError("the Ray cluster has no machine with processors; start one with: ray start --address=...")
    # Ray counts in steps of 1/10,000; a share that is rounded up would leave the last run out.
    part = math.floor(min(gpus) / jobs * 10_000) / 10_000 if gpus else 0
    return Share(max(1, int(min(cpus)) // jobs), min(1.0, part))
