"""Clients that train side by side: the same bytes as one by one, whatever ends, and a sentence where a process dies."""

import math
import operator
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from interrupted_runs import InterruptAfterRound
from test_executor import left

import halfmoon
from halfmoon.config.schema import Config
from halfmoon.core.errors import Diverged, UserError
from halfmoon.engine.executors.pools import pack, unpack
from halfmoon.engine.executors.processes import ProcessExecutor
from halfmoon.engine.executors.ray_cluster import RayExecutor, client_resources
from halfmoon.runs import factory, workers

TINY: dict[str, Any] = {
    "method": "feddure", "clients": 5, "cohort": 3, "rounds": 3, "steps": 2, "width": 4, "labels_per_class": 2.0,
    "device": "cpu",
}  # fmt: skip


@pytest.fixture(scope="module")
def pool() -> Iterator[ProcessExecutor]:
    made = ProcessExecutor(2)
    yield made
    made.close()


@pytest.mark.parametrize("executor", ["loop", "vmap"])
def test_a_run_does_not_depend_on_how_many_processes_train_its_clients(tmp_path, monkeypatch, executor):
    """FedDure's clients remember F-reg, and are evaluated by labels that they do not see; under vmap stopped and
    resumed as well, with programs of two: the third of the cohort is alone."""
    monkeypatch.setattr(factory, "MAX_VMAPPED_CLIENTS_ON_CPU", 2)
    options = {**TINY, "executor": executor}
    straight = tmp_path / "straight"
    spread = tmp_path / "spread"
    halfmoon.run(Config(**options, workers=1, run_dir=straight))
    if executor == "loop":
        halfmoon.run(Config(**options, workers=2, run_dir=spread))
    else:
        with pytest.raises(KeyboardInterrupt):
            halfmoon.run(Config(**options, workers=2, run_dir=spread), InterruptAfterRound())
        assert not (spread / "model.safetensors").exists()
        halfmoon.resume(spread)
    assert left(straight) == left(spread)


def test_results_come_in_the_order_of_the_items(pool: ProcessExecutor) -> None:
    start_time = time.perf_counter()
    assert list(pool.map(time.sleep, [0.4, 0.0, 0.0])) == [None] * 3
    assert time.perf_counter() - start_time < 30
    items = [
        torch.arange(6).reshape(2, 3).T, torch.zeros(()), torch.zeros(0, 3, dtype=torch.uint8), torch.ones(2) > 0,
        torch.ones(3, dtype=torch.bfloat16), torch.randn(2, 4, 3, 3).contiguous(memory_format=torch.channels_last),
    ]  # fmt: skip
    for item, found in zip(items, pool.map(torch.clone, iter(items)), strict=True):
        assert found.dtype == item.dtype
        assert torch.equal(found, item)
    assert list(pool.map(operator.neg, [3])) == [-3]  # one alone is computed here
    assert list(pool.map(operator.neg, [])) == []


def test_what_a_client_raises_is_raised_here(pool: ProcessExecutor) -> None:
    """The first in the order of the items, as one by one; the processes stay."""
    with pytest.raises(ValueError, match="math domain error"):
        list(pool.map(math.sqrt, [4.0, -1.0, 9.0]))
    error = Diverged(2, 3, 4, math.inf)
    assert str(unpack(pack(error))) == str(error)
    assert list(pool.map(math.sqrt, [4.0, 9.0])) == [2.0, 3.0]


def test_a_killed_process_ends_the_run_with_a_sentence(pool: ProcessExecutor) -> None:
    """And its pool, which would begin anew."""
    with pytest.raises(UserError, match="was killed, or the memory is full: go on with the run folder"):
        list(pool.map(os._exit, [1, 1, 1]))
    pool.close()
    assert pool._pool is None


def test_a_program_that_starts_processes_runs_once(tmp_path: Path) -> None:
    """It needs no guard around its main part; the processes end with it, even where it is killed."""
    file = tmp_path / "program.py"
    lines = [
        "import os, time",
        "from halfmoon.engine.executors.processes import ProcessExecutor",
        "print('once')",
        "pool = ProcessExecutor(2)",
    ]
    lines += ["next(iter(pool.map(time.sleep, [0.0, 60.0, 60.0])))", "print(*pool._pool._processes, flush=True)"]
    file.write_text("\n".join([*lines, "os.kill(os.getpid(), 9)"]))
    out = tmp_path / "out.txt"
    with out.open("w") as stream:  # no pipe, which the processes would hold open
        subprocess.run([sys.executable, file], stdout=stream, check=False, timeout=120)
    first, numbers = out.read_text().splitlines()
    assert first == "once"
    for number in numbers.split():
        end = time.monotonic() + 30
        while Path(f"/proc/{number}").exists() and time.monotonic() < end:
            time.sleep(0.05)
        assert not Path(f"/proc/{number}").exists()


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"data": "cifar10"}, 3),
        ({"data": "cifar10", "cohort": 2}, 2),
        ({}, 1),  # the digits' small network trains in less time than a client takes to be sent
        ({"data": "cifar10", "threads": 1}, 1),  # who says how many threads says how many processors
        ({"data": "cifar10", "method": "fixmatch"}, 1),  # one client
        ({"data": "cifar10", "executor": "vmap"}, 1),
        ({"workers": 2}, 2),
        ({"workers": 20, "cohort": 4}, 4),
        ({"workers": 2, "executor": "vmap"}, 2),
    ],
)
def test_how_many_workers(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], wanted: int) -> None:
    monkeypatch.setattr(workers, "available_processors", lambda: [0, 1, 5])
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert workers.count_workers(Config(device="cpu", **options)) == wanted


def test_workers_are_refused_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(factory, "select_device", lambda config: torch.device("cuda"))
    with pytest.raises(UserError, match="workers is 2, but clients on a GPU"):
        workers.count_workers(Config(workers=2))


def test_a_client_trains_with_one_thread_wherever_it_trains() -> None:
    """Convolutions add in another order with each number of threads."""
    assert factory.count_threads(Config(data="cifar10", device="cpu")) == 1
    assert factory.count_threads(Config(data="cifar10", device="cpu", threads=2)) == min(2, os.cpu_count() or 1)
    assert factory.count_threads(Config(data="cifar10", device="cpu", method="fixmatch")) == torch.get_num_threads()


@pytest.mark.nightly  # one machine of a cluster trains a run's clients in test_ray.py
def test_two_machines_of_a_ray_cluster_train_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two nodes of one processor each; the run joins their cluster, and leaves it. A killed process ends one."""
    ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'halfmoon[ray]'")
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("RAY_raylet_start_wait_time_s", "120")  # a busy machine
    # Ray makes its workers nice: beside other tests on few cores they would hardly get to compute.
    head = {"num_cpus": 1, "num_gpus": 0, "include_dashboard": False, "_system_config": {"worker_niceness": 0}}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        cluster.add_node(num_cpus=1, num_gpus=0)
        monkeypatch.setenv("RAY_ADDRESS", str(cluster.address))
        halfmoon.run(Config(**TINY, workers=1, run_dir=tmp_path / "here"))
        halfmoon.run(Config(**TINY, workers="ray", run_dir=tmp_path / "there"))
        assert not ray.is_initialized()
        pool = RayExecutor(partial(client_resources, number=2, threads=1))
        with pytest.raises(UserError, match="process of the Ray cluster that trained clients died"):
            list(pool.map(os._exit, [1, 1, 1]))
        pool.close()
    finally:
        cluster.shutdown()
    assert left(tmp_path / "here") == left(tmp_path / "there")
