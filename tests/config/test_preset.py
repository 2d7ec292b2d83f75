"""`preset = "paper"`: what a method's paper fixes, under everything that is said."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from halfmoon.config.schema import identity, method_options, resolve, text
from halfmoon.core.errors import UserError
from halfmoon.runs.runner import resume, start


def test_preset_of_a_paper_gives_way_to_what_is_said():
    """FedDure's paper: Adam at 5e-4 for all three rates, 100 clients, raw logits; a flag or a file's word wins."""
    config = resolve({"preset": "paper", "clients": 20, "options": {"hidden": 64}}, {"lr": 1e-3}, Path("run.toml"))
    assert (config.clients, config.lr, config.cohort, config.network, config.schedule) == (
        20,
        1e-3,
        5,
        "resnet9",
        "constant",
    )
    assert config.labels_per_class == 5
    options = method_options(config, "feddure")
    assert (options["regulator_lr"], options["regulator_bias"], options["hidden"]) == (None, 0.0, 64)
    assert (options["regulator_input"], options["through_weights"]) == ("logits", "product")
    assert method_options(config, "fedavg") == {}
    few = resolve({}, {"preset": "paper", "labels": 30})
    assert (few.labels, few.labels_per_class) == (30, None)
    again = resolve(tomllib.loads(text(few)), {})
    assert again == few


def test_preset_of_a_method_without_one_is_refused():
    with pytest.raises(UserError, match=r"method fedavg has no preset 'paper'.*: feddure, feddure-without-creg"):
        resolve({}, {"preset": "paper", "method": "fedavg"})


def test_preset_marks_a_run_as_its_options_do():
    """A run is the same run whether the preset or the words set its options."""
    preset = resolve({}, {"preset": "paper"})
    said = {name: value for name, value in method_options(preset, "feddure").items() if value is not None}
    plain = replace(preset, preset="none", options={**said, "regulator_lr": preset.lr})
    assert identity(preset, "feddure") != identity(replace(preset, preset="none"), "feddure")
    assert identity(replace(preset, options={"regulator_lr": preset.lr}), "feddure") == identity(plain, "feddure")


def test_methods_without_the_preset_play_beside_one_with_it(tmp_path):
    """A comparison's file can be resumed: what the preset said of the run is written out, and FedAvg has no preset."""
    values = {"preset": "paper", "clients": 4, "cohort": 2, "labels_per_class": 2, "network": "small", "width": 4}
    config = resolve({**values, "baselines": ["fedavg"], "rounds": 1, "steps": 1, "unlabeled_batch": 4}, {})
    outcome = start(replace(config, run_dir=tmp_path / "run"))
    one, other = (resolve(tomllib.loads((path / "config.toml").read_text()), {}) for path in outcome.runs)
    assert (one.preset, other.preset) == ("paper", "none")
    assert one.lr == other.lr == 5e-4
    assert resume(tmp_path / "run").summaries == outcome.summaries
