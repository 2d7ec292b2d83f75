"""How the clients of a run are run where nobody says: by the network's size alone, and to the end as it started."""

import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from interrupted_runs import InterruptAfterRound
from safetensors.torch import load_file

import halfmoon
from halfmoon.config import schema as settings
from halfmoon.config.schema import Config
from halfmoon.core.errors import Diverged, UserError
from halfmoon.runs import factory, runner
from halfmoon.runs.callbacks import Callback
from halfmoon.runs.jobs import Job

RUN: dict[str, Any] = {
    "method": "fedavg", "clients": 4, "cohort": 3, "rounds": 2, "steps": 2, "width": 4, "labels_per_class": 2.0,
    "device": "cpu",
}  # fmt: skip


def recorded(run: Path) -> str:
    """Return the executor that a run's file names."""
    return tomllib.loads((run / "config.toml").read_text())["executor"]


def left(run: Path) -> tuple[bytes, bytes]:
    """Return what a run has measured, and its model."""
    model = load_file(run / "model.safetensors")
    return (run / "metrics.jsonl").read_bytes(), b"".join(model[name].numpy().tobytes() for name in sorted(model))


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({}, "vmap"),
        ({"width": 64}, "auto"),  # 1.8 million products an image
        ({"executor": "loop"}, "loop"),
        ({"network": "resnet9", "width": 4}, "vmap"),
        ({"network": "custom_models:build_small"}, "auto"),  # a module: no one knows what it computes
    ],
)
def test_tiny_networks_train_as_one_program(options: dict[str, Any], wanted: str) -> None:
    """By products an image alone: 9 * 64 * 16 + 9 * 16 * 16 * 32 + 9 * 4 * 32 * 32 + 320 of the digits' network."""
    config = Config(**{"device": "cpu", **options})
    shared = factory.build_problem(config)
    image = factory.ImageSpec.of(shared.source).image
    assert factory.choose_executor(config, shared.task.network, image).executor == wanted
    if not options:
        assert shared.task.network.count_products((1, 8, 8)) == 120_128


def test_a_simulation_of_a_federation_trains_as_its_sites_do(tmp_path: Path) -> None:
    """One by one, unless somebody says otherwise."""
    (tmp_path / "federation.toml").write_text("[federation]\nsites = ['a']\n")
    values = settings.load_file(tmp_path / "federation.toml")
    assert settings.resolve(values, {}).executor == "loop"
    assert settings.resolve(values, {"executor": "vmap"}).executor == "vmap"


def test_resumed_run_uses_its_original_executor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder made before tiny networks took vmap says "auto", and continues one by one; a cell of a sweep as well."""
    for executor in ("loop", "vmap"):
        halfmoon.run(Config(**RUN, executor=executor, run_dir=tmp_path / executor))
    assert left(tmp_path / "loop") != left(tmp_path / "vmap")  # or the rest would prove nothing

    new = tmp_path / "new"
    old = tmp_path / "old"
    with pytest.raises(KeyboardInterrupt):
        halfmoon.run(Config(**RUN, run_dir=new), InterruptAfterRound())
    assert recorded(new) == "vmap"
    with monkeypatch.context() as before:
        before.setattr(factory, "MAX_VMAP_PRODUCTS", 0)
        with pytest.raises(KeyboardInterrupt):
            halfmoon.run(Config(**RUN, run_dir=old), InterruptAfterRound())
        with pytest.raises(KeyboardInterrupt):
            runner.run_in_folder(Config(**RUN), tmp_path / "cell", InterruptAfterRound())
        halfmoon.resume(new)
    assert recorded(old) == recorded(tmp_path / "cell") == "auto"
    halfmoon.resume(old)
    runner.run_in_folder(Config(**RUN), tmp_path / "cell")
    assert left(new) == left(tmp_path / "vmap")
    assert left(old) == left(tmp_path / "cell") == left(tmp_path / "loop")


def test_comparison_reports_the_executor_of_its_runs(tmp_path: Path) -> None:
    """Also those that have not started."""
    with pytest.raises(KeyboardInterrupt):
        halfmoon.compare(["fedavg", "fedavg-fixmatch"], Config(**RUN, run_dir=tmp_path), watch=InterruptAfterRound())
    assert 'executor = \\"vmap\\"' in (tmp_path / "comparison.json").read_text()


@pytest.mark.parametrize("images", ["test", "validation"])
def test_a_last_round_that_diverges_is_no_result(images: str, tmp_path: Path) -> None:
    """No client trains after it: the test or validation images find that the model's predictions are no numbers."""
    config = Config(method="fedavg", rounds=1, lr=1e9, clients=4, cohort=2, device="cpu", validation_share=0.1)
    with pytest.raises(Diverged, match=rf"^The {images} loss became \w+ in round 1: training stopped\."):
        runner.run_in_folder(config, tmp_path / "run", tests=images == "test")
    assert not (tmp_path / "run" / "summary.json").exists()


class Messages(Callback):
    """Collects the messages of a run."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def record(self, name: str, text: str, /, **fields: Any) -> None:
        self.texts.append(text)


@pytest.fixture(scope="module")
def problem() -> factory.Problem:
    return factory.build_problem(Config(**RUN))


@pytest.mark.parametrize(
    ("seconds", "executor", "message"),
    [
        ({"loop": 0.5, "vmap": 0.25}, "vmap", "batched by vmap: 5 steps of a cohort took 0.50 s one by one and 0.25 s"),
        ({"loop": 0.5, "vmap": 0.75}, "loop", "one by one: 5 steps of a cohort took 0.50 s one by one and 0.75 s"),
        ({"loop": 0.5, "vmap": torch.OutOfMemoryError("out of memory.\nDetails")}, "loop", "by vmap: out of memory."),
        ({"loop": 0.5, "vmap": UserError("an LSTM cannot be batched")}, "loop", "by vmap: an LSTM cannot be batched."),
    ],
)
def test_a_gpu_takes_the_executor_that_was_faster_in_a_trial(problem, seconds, executor, message, monkeypatch) -> None:
    trials: list[str] = []

    def time_cohort(config: Config, shared: factory.Problem) -> float:
        trials.append(config.executor)
        result = seconds[config.executor]
        if isinstance(result, Exception):
            raise result
        return result

    monkeypatch.setattr(runner, "_time_cohort", time_cohort)
    monkeypatch.setattr(factory, "select_device", lambda config: torch.device("cuda"))
    watch = Messages()
    jobs = [Job(f"seed{seed}", Config(**{**RUN, "device": "cuda", "seed": seed})) for seed in (0, 1)]
    chosen = runner._choose_executors(jobs, problem, watch)
    assert [job.config.executor for job in chosen] == [executor, executor]
    assert trials == ["loop", "vmap"]  # once for both seeds
    assert len(watch.texts) == 1
    assert message in watch.texts[0]


@pytest.mark.parametrize("options", [{"deterministic": True}, {"method": "supervised"}])
def test_a_gpu_makes_no_trial_for_runs_with_equal_bits_and_for_one_client(problem, options, monkeypatch) -> None:
    monkeypatch.setattr(runner, "_time_cohort", None)
    monkeypatch.setattr(factory, "select_device", lambda config: torch.device("cuda"))
    (job,) = runner._choose_executors([Job(".", Config(**{**RUN, "device": "cuda", **options}))], problem, Messages())
    assert job.config.executor == "loop"


def test_a_trial_trains_two_rounds_and_changes_no_run(problem, tmp_path: Path, monkeypatch) -> None:
    rounds: list[tuple[int, int]] = []
    open_round = runner.Simulation.open

    def record_round(self: Any, number: int) -> Any:
        rounds.append((number, self.local_clients.training.batching.steps))
        return open_round(self, number)

    config = Config(**RUN, executor="loop")
    with monkeypatch.context() as patch:
        patch.setattr(runner.Simulation, "open", record_round)
        assert runner._time_cohort(config, problem) > 0
    assert rounds == [(0, runner.TIMED_STEPS), (1, runner.TIMED_STEPS)]

    halfmoon.run(Config(**RUN, executor="loop", run_dir=tmp_path / "untimed"))
    choose_by_time = runner._choose_by_time
    monkeypatch.setattr(
        runner,
        "_choose_executors",
        lambda jobs, shared, watch: [
            Job(job.folder, replace(job.config, executor=choose_by_time(job.config, shared, watch) and "loop"))
            for job in jobs
        ],
    )
    halfmoon.run(Config(**RUN, run_dir=tmp_path / "timed"))
    assert left(tmp_path / "timed") == left(tmp_path / "untimed")
