"""Options that have no effect beside other options are listed by their method and refused for new runs."""

from dataclasses import replace
from typing import Any

import pytest

from halfmoon.cli.main import main
from halfmoon.config.schema import Config, check_effects, resolve
from halfmoon.core.errors import UserError
from halfmoon.core.tree import leaves
from halfmoon.federation.contract.checks import run_experiment
from halfmoon.methods import registry
from halfmoon.runs import runner

WITH_FREG: dict[str, Any] = {"threshold": 0.1, "thresholding": "freematch", "threshold_decay": 0.5}
WITHOUT_FREG: dict[str, Any] = {"hidden": 4, "regulator_bias": 1.0, "regulator_input": "logits", "virtual_lr": 0.3,
                                "regulator_start": "client", "regulator_lr": 0.1, "keep_regulator": False,
                                "keep_regulator_optimizer": False, "through_weights": "product"}  # fmt: skip
WITHOUT_CREG: dict[str, Any] = {"coarse_lr": 0.3, "coarse_step": "plain", "sign": "new-old", "reward_baseline": 0.5,
                                "reward_bound": 0.1}  # fmt: skip
CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("feddure", {}, WITH_FREG),
    ("feddure-without-freg", {"threshold": 0.1}, {**WITHOUT_FREG, "threshold_decay": 0.5}),
    ("feddure-without-creg", {}, WITHOUT_CREG),
    ("feddure", {"fine": False, "coarse": False, "threshold": 0.1}, {"judging": "running", "judge_prior": True}),
    ("feddure", {"keep_regulator": False}, {"keep_regulator_optimizer": False}),
    ("fedavg-fixmatch", {"threshold": 0.1}, {"teacher_decay": 0.5, "debias_over": "step", "threshold_decay": 0.5,
                                             "ramp_shape": "sigmoid"}),
    ("fedavg-fixmatch", {"thresholding": "freematch"}, {"threshold": 0.1}),
    ("fedavg-fixmatch", {"thresholding": "fl2"}, {"threshold": 0.1, "threshold_decay": 0.5}),
    ("fedavg-fixmatch", {"thresholding": "flexmatch", "threshold": 0.1}, {"threshold_decay": 0.5}),
    ("fedmatch", {"threshold": 0.1}, {"threshold_decay": 0.5}),
    ("feddb", {"threshold": 0.1}, {"threshold_decay": 0.5}),
    ("fedloke", {"local": False}, {"ema": 0.5, "private": "fresh"}),
]  # fmt: skip


def train(method: str, options: dict[str, Any]) -> list[Any]:
    """Train in the small federation of `check-method`, and return the leaves of the server's last state."""
    entry = replace(registry.entry(method), method=registry.make(method, options))
    return list(leaves(run_experiment(entry, "both")[-1].server))


@pytest.mark.parametrize(("method", "options", "unused"), CASES, ids=[f"{case[0]}-{n}" for n, case in enumerate(CASES)])
def test_listed_options_have_no_effect(method, options, unused):
    """With all of them changed at once training ends in the same bits, so none of them has an effect."""
    listed = registry.unused_options(registry.make(method, options))
    assert unused.keys() <= listed.keys()
    before, after = train(method, options), train(method, {**options, **unused})
    assert len(before) == len(after)
    assert all(one.equal(two) for one, two in zip(before, after, strict=True))


@pytest.mark.parametrize(
    ("method", "options", "used"),
    [
        ("feddure-without-freg", {}, {"threshold": 0.1}),
        ("feddure", {}, {"regulator_bias": 1.0}),
        ("feddure", {}, {"reward_bound": 1e-6}),
        ("feddure-without-creg", {}, {"judging": "running"}),
        ("fedavg-fixmatch", {"thresholding": "freematch"}, {"threshold_decay": 0.1}),
        ("fedavg-fixmatch", {"threshold": 0.1, "debias": True}, {"debias_over": "step"}),
    ],
)
def test_options_with_an_effect_are_not_listed(method, options, used):
    listed = registry.unused_options(registry.make(method, options))
    assert not used.keys() & listed.keys()
    before, after = train(method, options), train(method, {**options, **used})
    assert not all(one.equal(two) for one, two in zip(before, after, strict=True))


@pytest.mark.parametrize("method", registry.names())
def test_lists_name_options_of_the_method(method):
    assert registry.unused_options(registry.entry(method).method).keys() <= registry.options(method).keys()


TINY: dict[str, Any] = {"clients": 3, "cohort": 2, "rounds": 1, "steps": 1, "labels_per_class": 1, "width": 4}


def test_new_runs_refuse_an_option_without_effect(tmp_path):
    threshold = Config(**TINY, method="feddure", options={"threshold": 0.5}, run_dir=tmp_path / "run")
    message = r"option threshold of feddure has no effect with F-reg \(fine is true\), .*: leave it out"
    with pytest.raises(UserError, match=message):
        runner.start(threshold)
    with pytest.raises(UserError, match=message):
        runner.run_in_folder(threshold, tmp_path / "run")
    both = replace(threshold, method="fedavg", options={"feddure": {"threshold": 0.5}})
    with pytest.raises(UserError, match=message):
        runner.start(replace(both, baselines=("feddure",)))
    with pytest.raises(UserError, match=message):
        runner.compare(both, ["fedavg", "feddure"])
    assert not (tmp_path / "run").exists()


def test_the_default_and_the_values_of_a_paper_are_not_refused():
    """A shared file may give a default, and FedDure's preset has values of F-reg also for its ablation without F-reg."""
    check_effects(Config(method="feddure", options={"threshold": 0.95}), "feddure")
    paper = resolve({"preset": "paper", "method": "feddure-without-freg", "options": {"threshold": 0.6}}, {})
    check_effects(paper, "feddure-without-freg")
    # The protocol has regulator_bias = 0, an option of F-reg.
    protocol = resolve({}, {"protocol": "few-labels", "method": "feddure", "options": {"fine": False}})
    check_effects(protocol, "feddure")


def test_stored_runs_of_earlier_versions_are_read():
    """A finished run may have had such an option: its configuration is still valid."""
    assert resolve({"method": "feddure", "options": {"threshold": 0.5}}, {}).options == {"threshold": 0.5}


@pytest.mark.parametrize("command", [["run", "--method", "fedavg"], ["compare", "--methods", "fedavg", "fedmatch"]])
def test_a_flag_for_a_method_that_is_not_trained_is_refused(command, tmp_path, capsys):
    flags = ["--option", "fedavg-fixmatch.threshold=0.5", "--rounds", "1", "--run-dir", str(tmp_path / "run")]
    assert main([*command, *flags]) == 2
    message = capsys.readouterr().err
    assert "--option fedavg-fixmatch.threshold has no effect: fedavg-fixmatch is not among the methods" in message
    assert not (tmp_path / "run").exists()
