"""The seeds of a comparison as one batch: every run has its own folder, and the numbers of one played apart."""

import json
import os
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from callbacks import Stop
from safetensors.torch import load_file
from test_parallel import Told

import halfmoon
from halfmoon.config.schema import Config
from halfmoon.core import tree
from halfmoon.core.errors import UserError
from halfmoon.engine import driver, loop
from halfmoon.engine.driver import Diverged
from halfmoon.engine.loop import Row
from halfmoon.runs import factory, runner

SMALL: dict[str, Any] = {
    "clients": 5, "cohort": 3, "rounds": 2, "steps": 2, "width": 4, "labels_per_class": 2.0, "device": "cpu",
    "shrink": 2, "optimizer": "sgd", "lr": 0.1,
}  # fmt: skip
"""Adam makes something of the rounding of gradients that are zero (`halfmoon.contract.scene.ADAM`)."""


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return of how many seeds each program of the test had clients."""
    seen, update_many = list[int](), driver.update_many

    def many(contexts: Any, *rest: Any) -> Any:
        seen.append(len({context.seed for context in contexts}))
        return update_many(contexts, *rest)

    monkeypatch.setattr(driver, "update_many", many)
    return seen


@pytest.fixture
def doubles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have runs computed in double precision."""
    problem, initial = factory.problem, loop.initial_model

    def exact(*given: Any, **options: Any) -> factory.Problem:
        made = problem(*given, **options)
        return replace(made, task=replace(made.task, normalize=replace(made.task.normalize, dtype=torch.float64)))

    monkeypatch.setattr(factory, "problem", exact)
    monkeypatch.setattr(loop, "initial_model", lambda *given: tree.to(initial(*given), dtype=torch.float64))


def config(folder: Path, **options: Any) -> Config:
    return Config(**{**SMALL, "run_dir": folder, **options})


def rows(run: Path) -> list[Row]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def agree(together: Path, apart: Path) -> None:
    """Compare models and metrics to rounding."""
    ours, theirs = load_file(together / "model.safetensors"), load_file(apart / "model.safetensors")
    for name, leaf in theirs.items():
        torch.testing.assert_close(ours[name], leaf, rtol=1e-12, atol=1e-12)
    for one, two in zip(rows(together), rows(apart), strict=True):
        assert one["cohort"] == two["cohort"]
        assert one["cost"] == two["cost"]
        assert one["test"]["accuracy"] == two["test"]["accuracy"]
        assert one["train"] == pytest.approx(two["train"], rel=1e-9)


@pytest.mark.usefixtures("doubles")
def test_seeds_together_are_those_played_apart(tmp_path: Path, programs: list[int]) -> None:
    """A method with memory and one without; interrupted when one seed is a round ahead, and gone on with."""
    methods = ["feddure", "fedavg"]
    apart = runner.compare(config(tmp_path / "apart"), methods, (0, 1, 2))
    assert set(programs) == {1}
    programs.clear()
    with pytest.raises(KeyboardInterrupt):
        runner.compare(config(tmp_path / "together", seeds_together=True), methods, (0, 1, 2), Stop(seed=1))
    first = tmp_path / "together" / "feddure-seed0"
    assert len(rows(first)) == 1
    assert not first.with_name("feddure-seed2").joinpath("metrics.jsonl").exists()
    assert programs == [3]
    together = runner.resume(tmp_path / "together")
    assert programs == [3, *(1, 3), *(3, 3)]  # the last seed catches up alone
    for ours, theirs in zip(together.runs, apart.runs, strict=True):
        agree(ours, theirs)
        assert tomllib.loads((ours / "config.toml").read_text())["seeds_together"] is True
        assert tomllib.loads((ours / "config.toml").read_text())["executor"] == "vmap"


def test_one_that_diverges_leaves_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check = driver._check_upload

    def spoiled(context: Any, client: int, upload: Any, *rest: Any) -> None:
        if context.seed == 1 and context.round == 1:
            raise Diverged(1, client, 0, float("nan"))
        check(context, client, upload, *rest)

    monkeypatch.setattr(driver, "_check_upload", spoiled)
    with pytest.raises(Diverged, match="round 2"):
        runner.compare(config(tmp_path, seeds_together=True), ["fedavg"], (0, 1, 2))
    assert [len(rows(tmp_path / f"fedavg-seed{seed}")) for seed in (0, 1, 2)] == [2, 1, 2]
    assert [(tmp_path / f"fedavg-seed{seed}" / "summary.json").exists() for seed in (0, 1, 2)] == [True, False, True]


def test_processes_play_the_seeds_of_one_method_each(tmp_path: Path) -> None:
    watch, options = Told(), {"seeds_together": True, "rounds": 2}
    one = runner.compare(config(tmp_path / "one", **options), ["fedavg", "fedavg-sl"], (0, 1))
    two = runner.compare(config(tmp_path / "two", **options, processes=2), ["fedavg", "fedavg-sl"], (0, 1), watch)
    here = os.getpid()
    assert watch.said == {
        f"{method}-seed{seed}": ["begin", (1, here), (2, here), method]
        for method in ("fedavg", "fedavg-sl")
        for seed in (0, 1)
    }
    for ours, theirs in zip(two.runs, one.runs, strict=True):
        assert (ours / "metrics.jsonl").read_bytes() == (theirs / "metrics.jsonl").read_bytes()


@pytest.mark.parametrize(
    ("options", "seeds", "words"),
    [
        ({}, (0,), "needs two seeds or more"),
        ({"executor": "loop"}, (0, 1), "train one by one"),
        ({"network": "resnet9", "width": 64}, (0, 1), "train one by one"),
        ({"workers": 2}, (0, 1), "workers is 2"),
    ],
)
def test_what_cannot_be_one_batch_is_said(tmp_path, options, seeds, words):
    with pytest.raises(UserError, match=words):
        runner.compare(config(tmp_path, seeds_together=True, **options), ["fedavg"], seeds)
    assert list(tmp_path.iterdir()) == []


def test_a_single_run_has_no_other_seeds(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="halfmoon compare takes them"):
        halfmoon.run(config(tmp_path, method="fedavg", seeds_together=True))
