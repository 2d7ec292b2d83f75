"""How the clients of a run are played where nobody says: by the network's size alone, and to the end as it began."""

import tomllib
from pathlib import Path
from typing import Any

import pytest
from interrupted_runs import InterruptAfterRound
from safetensors.torch import load_file

import halfmoon
from halfmoon.config import schema as settings
from halfmoon.config.schema import Config
from halfmoon.core.errors import Diverged
from halfmoon.runs import factory, runner

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
        ({"network": "custom_models:build_small"}, "auto"),  # a module: nobody knows what it computes
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


def test_a_run_goes_on_as_it_began(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder made before tiny networks took vmap says "auto", and goes on one by one; a cell of a sweep as well."""
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


def test_a_comparison_says_how_all_its_runs_are_played(tmp_path: Path) -> None:
    """Also those that have not begun."""
    with pytest.raises(KeyboardInterrupt):
        halfmoon.compare(["fedavg", "fedavg-fixmatch"], Config(**RUN, run_dir=tmp_path), watch=InterruptAfterRound())
    assert 'executor = \\"vmap\\"' in (tmp_path / "comparison.json").read_text()


def test_a_last_round_that_diverges_is_no_result(tmp_path: Path) -> None:
    """No client trains after it: the test images find that the model's predictions are no numbers."""
    config = Config(method="fedavg", rounds=1, lr=1e9, clients=4, cohort=2, run_dir=tmp_path / "run", device="cpu")
    with pytest.raises(Diverged, match=r"^The test loss became \w+ in round 1: training stopped\."):
        halfmoon.run(config)
    assert not (tmp_path / "run" / "summary.json").exists()
