"""`preset = "paper"`: what a method's paper fixes, under everything that is reported."""

import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from halfmoon.config.schema import Config, identity, method_options, resolve, to_toml
from halfmoon.core.errors import UserError
from halfmoon.runs.runner import resume, start


def test_given_options_override_the_preset_of_a_paper():
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
    repeated = resolve(tomllib.loads(to_toml(few)), {})
    assert repeated == few


def test_preset_of_a_method_without_one_is_refused():
    with pytest.raises(UserError, match=r"method fedavg has no preset 'paper'.*: feddure, feddure-without-creg"):
        resolve({}, {"preset": "paper", "method": "fedavg"})


def test_preset_has_the_identity_of_its_options():
    preset = resolve({}, {"preset": "paper"})
    text = {name: value for name, value in method_options(preset, "feddure").items() if value is not None}
    plain = replace(preset, preset="none", options={**text, "regulator_lr": preset.lr})
    assert identity(preset, "feddure") != identity(replace(preset, preset="none"), "feddure")
    assert identity(replace(preset, options={"regulator_lr": preset.lr}), "feddure") == identity(plain, "feddure")


def test_methods_without_the_preset_run_next_to_one_with_it(tmp_path):
    """A comparison's file can be resumed: what the preset said of the run is written out, and FedAvg has no preset."""
    values = {"preset": "paper", "clients": 4, "cohort": 2, "labels_per_class": 2, "network": "small", "width": 4}
    config = resolve({**values, "baselines": ["fedavg"], "rounds": 1, "steps": 1, "unlabeled_batch": 4}, {})
    outcome = start(replace(config, run_dir=tmp_path / "run"))
    one, other = (resolve(tomllib.loads((path / "config.toml").read_text()), {}) for path in outcome.runs)
    assert (one.preset, other.preset) == ("paper", "none")
    assert one.lr == other.lr == 5e-4
    assert resume(tmp_path / "run").summaries == outcome.summaries


def test_given_options_override_a_protocol():
    """SAGE's experiment by name: given options win; labels and steps under other option names replace its values."""
    sage = Config.of(protocol="sage", method="proxyfl", cohort=4)
    assert (sage.clients, sage.cohort, sage.rounds, sage.steps, sage.setting) == (20, 4, 300, 95, "pair-dir")
    assert (sage.label_ratio, sage.labels_per_class, sage.network, sage.width) == (0.1, None, "resnet8", 64)
    assert resolve(tomllib.loads(to_toml(sage)), {}) == sage
    loke = Config.of(protocol="fedloke", labels=100, epochs=2)
    assert (loke.clients, loke.cohort, loke.labels, loke.label_ratio, loke.epochs) == (50, 20, 100, None, 2)
    assert Config.of(protocol="sage", epochs=3).steps is None
    match = Config.of(protocol="fedmatch", preset="paper")  # what FedDure's paper fixes lies over FedMatch's experiment
    assert (match.clients, match.setting, match.labels_per_class, match.lr, match.norm) == (
        *(100, "fedmatch-iid", 5.0),
        *(5e-4, "none"),
    )


def test_given_options_override_the_recipe_for_few_labels():
    """Options of methods join one by one; another network has its width, and a short run no average of rounds."""
    recipe = Config.of(
        protocol="few-labels", data="xrays", options={"feddure": {"hidden": 8}, "sage": {"threshold": 0.9}}
    )
    assert (recipe.network, recipe.width, recipe.rounds, recipe.steps, recipe.server_ema) == ("resnet9", 8, 500, 5, 0.9)
    assert recipe.options["feddure"] == {"regulator_bias": 0.0, "hidden": 8}
    assert (recipe.options["fedavg-fixmatch"], recipe.options["sage"]) == ({"threshold": 0.8}, {"threshold": 0.9})
    other = Config.of(protocol="few-labels", network="small", rounds=4)
    assert (other.network, other.width, other.rounds, other.server_ema, other.lr) == ("small", None, 4, 0.0, 2e-3)
    assert resolve(tomllib.loads(to_toml(recipe)), {}) == recipe


@pytest.mark.parametrize("protocol", ["sage", "fedloke", "fedmatch", "few-labels"])
def test_width_applies_to_the_network_it_was_given_with(protocol):
    """Another network takes its width, not that of the protocol's; a width that is reported remains."""
    assert Config.of(protocol=protocol).width is not None
    assert Config.of(protocol=protocol, network="small").width is None
    assert Config.of(protocol=protocol, network="small", width=4).width == 4


def test_protocol_is_applied_before_a_configuration_is_created():
    assert Config.of(protocol="sage").protocol == "none"
    with pytest.raises(UserError, match=r"use Config\.of\(protocol="):
        Config(protocol="sage")


def test_what_is_recommended_is_known_to_python_too():
    assert Config(method="recommended", labels_at="server", labels=10).method == "fl2"
    assert Config.of(method="recommended").method == "fedavg-soft-labels"
