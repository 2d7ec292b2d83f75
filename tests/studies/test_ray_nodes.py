"""A sweep on a Ray cluster of two nodes, one of which is killed in the middle of a run."""

import os
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from small_recipe import RECIPE, train_cells

from halfmoon.engine.executors.ray_cluster import RayExecutor, run_resources
from halfmoon.engine.loop import Row
from halfmoon.runs.callbacks import NullCallback, RunInfo

LAST_ROUND = 3
"""The round after which the node of the first run is killed."""


class NodeRecorder(NullCallback):
    """Record which node begins which run; the first run that reaches `LAST_ROUND` waits there until its node is killed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def begin(self, run: RunInfo) -> None:
        import ray

        with (self.folder / "begun").open("a") as file:
            file.write(f"{run.folder.name} {run.first} {ray.get_runtime_context().get_node_id()}\n")

    def round(self, run: RunInfo, row: Row) -> None:
        import ray

        if row["round"] == LAST_ROUND:
            try:
                mark = (self.folder / "waiting").open("x")
            except FileExistsError:
                return
            with mark:
                mark.write(f"{ray.get_runtime_context().get_node_id()}\n")
            time.sleep(300)


def kill_waiting_node(cluster: Any, mark: Path, killed: list[str]) -> None:
    """Wait for the run that waits, and kill its node."""
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        text = mark.read_text() if mark.exists() else ""
        if text.endswith("\n"):
            (node,) = [each for each in cluster.list_all_nodes() if each.node_id == text.strip()]
            cluster.remove_node(node, allow_graceful=False)
            killed.append(text.strip())
            return
        time.sleep(0.05)


@pytest.mark.nightly  # test_ray.py runs a sweep on one node by default
def test_a_sweep_on_two_nodes_one_of_which_is_killed_has_the_bytes_of_one_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run of the killed node continues on the other one, from its checkpoint."""
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'halfmoon[ray]'")
    from ray.cluster_utils import Cluster

    recipe_file = tmp_path / "mine.toml"
    recipe_file.write_text(RECIPE)
    straight, _, failed = train_cells(recipe_file, scale=None, seeds=(0, 1), out="straight")
    assert failed == []

    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("RAY_raylet_start_wait_time_s", "120")  # a busy machine
    # Workers unpickle the recorder of this file, and so have to find it.
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    # Ray makes its workers nice: beside other tests on few cores they would hardly get to compute.
    head = {"num_cpus": 0, "num_gpus": 0, "include_dashboard": False, "_system_config": {"worker_niceness": 0}}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    killed: list[str] = []
    killer = threading.Thread(target=kill_waiting_node, args=(cluster, tmp_path / "waiting", killed))
    try:
        for _ in range(2):
            cluster.add_node(num_cpus=1, num_gpus=0)
        killer.start()
        executor = RayExecutor(partial(run_resources, jobs=1), str(cluster.address))
        folder, reports, failed = train_cells(
            recipe_file, scale=None, seeds=(0, 1), executor=executor, callback=NodeRecorder(tmp_path)
        )
        executor.close()
        killer.join()
    finally:
        cluster.shutdown()

    assert failed == []
    assert [report.failed for report in reports] == [None] * 8
    runs, expected = (
        {run["identity"]: each.run_path(run["identity"]) for cell in each.read()["cells"] for run in cell["runs"]}
        for each in (folder, straight)
    )
    assert runs.keys() == expected.keys()
    for identity, path in runs.items():
        for name in ("metrics.jsonl", "model.safetensors", "split.parquet"):
            assert (path / name).read_bytes() == (expected[identity] / name).read_bytes(), name
    begun = [line.split() for line in (tmp_path / "begun").read_text().splitlines()]
    continued = [(first, node) for _, first, node in begun if first != "0"]
    assert [first for first, _ in continued] == [str(LAST_ROUND)]
    assert continued[0][1] not in killed
    assert len({node for _, _, node in begun}) == 2
