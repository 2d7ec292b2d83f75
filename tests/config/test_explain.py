"""Explanations of a configuration: which layer sets each option."""

import json

from halfmoon.cli.main import main
from halfmoon.config.explain import ExplainedOption, Layer, explain_options
from halfmoon.config.schema import resolve


def explain(file_options=None, flags=None):
    file_options = file_options or {}
    flags = flags or {}
    config = resolve(file_options, flags)
    rows = explain_options(config, [Layer("flag", flags), Layer("file", file_options)])
    return {row.name: (row.value, row.layer) for row in rows}


def test_defaults_are_not_listed():
    assert explain() == {}


def test_flag_overrides_file():
    assert explain({"rounds": 3, "clients": 7}, {"rounds": 4}) == {"rounds": (4, "flag"), "clients": (7, "file")}


def test_value_of_a_flag_that_equals_the_default_is_not_listed():
    assert "rounds" not in explain({"rounds": 3}, {"rounds": 40})


def test_protocol_is_below_flags():
    rows = explain(flags={"protocol": "sage", "rounds": 5, "method": "fedavg"})
    assert rows["protocol"] == ("sage", "flag")
    assert rows["rounds"] == (5, "flag")
    assert rows["setting"] == ("pair-dir", "protocol sage")


def test_preset_sets_options_of_run_and_method():
    rows = explain(flags={"preset": "paper", "options": {"hidden": 64, "regulator_bias": -1.0}})
    assert rows["lr"] == (5e-4, "preset paper")
    assert rows["options.hidden"] == (64, "flag")
    assert rows["options.regulator_input"] == ("logits", "preset paper")
    assert rows.get("options.regulator_bias", (None, "flag"))[1] == "flag"


def test_cohort_of_few_clients_is_computed():
    assert explain(flags={"clients": 3}) == {"clients": (3, "flag"), "cohort": (3, "computed")}


def test_rows_of_other_methods_are_named_by_method():
    config = resolve({}, {"options": {"fedavg-fixmatch": {"threshold": 0.5}}})
    rows = explain_options(config, [Layer("file", {"options": {"fedavg-fixmatch": {"threshold": 0.5}}})])
    assert rows == [ExplainedOption("options.fedavg-fixmatch.threshold", 0.5, "file")]


def test_command_prints_layers_without_training(capsys, tmp_path):
    file = tmp_path / "study.toml"
    file.write_text("rounds = 3\n")
    folder = tmp_path / "run"
    arguments = ["--config", str(file), "--clients", "4", "--run-dir", str(folder), "--explain", "--json"]
    assert main(["run", *arguments]) == 0
    layers = {row["option"]: row["layer"] for row in json.loads(capsys.readouterr().out)["options"]}
    assert (layers["rounds"], layers["clients"], layers["cohort"]) == (f"file {file}", "flag", "computed")
    assert not folder.exists()


def test_command_names_the_recipe(capsys):
    assert main(["run", "--lr", "0.1", "--explain"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    set_by = {line[0]: line[2:] for line in lines}
    assert set_by["lr"] == ["flag"]
    assert set_by["steps"] == ["recipe", "of", "halfmoon", "run"]
    assert main(["compare", "--methods", "fedavg", "fedavg-sl", "--rounds", "3", "--explain"]) == 0
    assert "rounds" in capsys.readouterr().out
