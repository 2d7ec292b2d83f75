"""Executors: one interface, the same results in the same order, and what happens when an item fails or a worker dies."""

import math
import operator
import os
import pickle
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import pytest
import torch

from halfmoon.core import tree
from halfmoon.engine.executors.base import MAX_ATTEMPTS, Executor, WorkerDied
from halfmoon.engine.executors.processes import ProcessExecutor
from halfmoon.engine.executors.serial import SerialExecutor
from halfmoon.engine.executors.vmap import VmapExecutor
from halfmoon.federation.contract.small_federation import make_dataset, make_simulation, make_task, start_server
from halfmoon.methods.fedavg import FedAvg


@dataclass(frozen=True)
class CountedTask:
    """A task that counts its attempts in a file; one with the name "deadly" ends its process."""

    folder: Path
    name: str
    uses_gpu: bool = False


def run(task: CountedTask) -> str:
    with (task.folder / task.name).open("a") as file:
        file.write("x")
    if task.name == "deadly":
        os._exit(1)
    return task.name.upper()


@pytest.fixture(scope="module", params=["serial", "vmap", "processes", "vmap in processes"])
def executor(request: pytest.FixtureRequest) -> Iterator[Executor]:
    inner = ProcessExecutor(2) if "processes" in request.param else SerialExecutor()
    made = VmapExecutor(inner, max_padding=Fraction(1)) if "vmap" in request.param else inner
    yield made
    made.close()


def test_map_yields_results_in_the_order_of_the_items(executor: Executor) -> None:
    assert list(executor.map(operator.neg, range(7))) == [-k for k in range(7)]
    assert list(executor.map(operator.neg, [])) == []


def test_an_exception_is_raised_at_its_item(executor: Executor) -> None:
    results = executor.map(math.sqrt, [4.0, 9.0, -1.0])
    assert [next(results), next(results)] == [2.0, 3.0]
    with pytest.raises(ValueError, match="math domain error"):
        next(results)


def test_a_result_is_freed_before_the_next_one_is_taken(executor: Executor) -> None:
    """An upload may be as large as the model: no executor keeps a reference to one that it has yielded."""
    results = executor.map(torch.zeros, [2, 3, 4])
    for _ in range(3):
        result = weakref.ref(next(results))
        assert result() is None


def test_tasks_yield_themselves_with_their_results(executor: Executor, tmp_path: Path) -> None:
    tasks = [CountedTask(tmp_path, name) for name in ("a", "b", "c")]
    assert dict(executor.run_tasks(run, tasks)) == {task: task.name.upper() for task in tasks}


def test_clients_have_the_same_uploads_everywhere(executor: Executor) -> None:
    """To the last bit without vmap, and by rounding with it; in the order of the cohort, though clients differ in size."""
    uploads = []
    for each in (SerialExecutor(), executor):
        method, task = FedAvg(), make_task()
        simulation = make_simulation(method, task, make_dataset(), executor=each, cohort=4)
        simulation.open(0)
        upload = simulation.query("train", start_server(method, task))
        assert simulation.responders.tolist() == [0, 1, 2, 3]
        uploads.append(tree.flatten(upload.tree))
    expected, actual = uploads
    assert expected.keys() == actual.keys()
    for path, leaf in expected.items():
        if isinstance(executor, VmapExecutor):
            torch.testing.assert_close(actual[path], leaf, rtol=1e-9, atol=1e-9)
        else:
            assert torch.equal(actual[path], leaf), path


def test_task_that_always_kills_its_worker_is_abandoned_and_the_rest_finish(tmp_path: Path) -> None:
    tasks = [CountedTask(tmp_path, name) for name in ("deadly", "a")]
    results = {task.name: result for task, result in ProcessExecutor(1).run_tasks(run, tasks)}
    assert results["a"] == "A"
    assert isinstance(results["deadly"], WorkerDied)
    assert (tmp_path / "deadly").read_text() == "x" * MAX_ATTEMPTS
    assert (tmp_path / "a").read_text() == "x"


def test_an_iteration_that_is_stopped_starts_no_more_tasks(tmp_path: Path) -> None:
    tasks = [CountedTask(tmp_path, name) for name in ("a", "b", "c", "d")]
    results = ProcessExecutor(1).run_tasks(run, tasks)
    assert next(results)[0].name == "a"
    results.close()
    assert not (tmp_path / "d").exists()


def test_tasks_of_a_sweep_are_plain_data() -> None:
    from halfmoon.studies.sweep_tasks import SweepTask

    task = SweepTask(Path("cells/abc"), 'device = "cpu"\n')
    assert pickle.loads(pickle.dumps(task)) == task
    assert (task.name, task.uses_gpu) == ("abc", False)
    assert SweepTask(Path("x"), "").uses_gpu
    assert not SweepTask(Path("x"), "", split_only=True).uses_gpu
