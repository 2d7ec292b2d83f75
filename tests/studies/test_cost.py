"""What a recipe costs: a round of a cell of each row is timed and multiplied; the list itself takes no time."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from halfmoon.cli import main as cli
from halfmoon.cli.commands.sweep import duration
from halfmoon.studies import cost, recipe
from halfmoon.studies.cost import describe_machine
from halfmoon.studies.grid import build_cells

RECIPE = """
title = "Toy"
paper = "none"
item = "Table 1"
about = "two methods"
rows = "method"
seeds = [0, 1]
panels = { a = { share = "few" } }
[protocol]
clients = 4
cohort = 2
labels_per_class = 1
network = "small"
width = 4
threads = 1
steps = 1
budget = "none"
[axes.share.few]
set = { rounds = 3 }
[axes.share.more]
set = { rounds = 10 }
[axes.method.fedavg]
set = { method = "fedavg" }
[axes.method.same]
set = { method = "fedavg" }
[axes.method.uda]
set = { method = "fedavg-uda" }
[axes.method.folder]
set = { method = "fedavg", data = "./nowhere" }
extra = true
[scales.more]
about = "ten times the rounds"
set = { rounds = 100 }
"""


@pytest.fixture
def toy(tmp_path: Path) -> str:
    (tmp_path / "toy.toml").write_text(RECIPE)
    return str(tmp_path / "toy.toml")


def test_a_round_is_timed_and_multiplied(toy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """2 s a round: (3 + 10) rounds of two seeds are 26 rounds, 52 s; runs that another row has are counted there."""
    timed = []
    monkeypatch.setattr(cost, "measure_round_seconds", lambda config: timed.append(config) or 2.0)
    found = recipe.load(toy)
    rows = cost.estimate_costs(found, build_cells(found, {}))
    assert {name: (row.runs, row.rounds, row.seconds) for name, row in rows.items()} == {
        "fedavg": (4, 26, 52.0),
        "same": (0, 0, 0.0),
        "uda": (4, 26, 52.0),
    }
    assert rows["uda"].cell == "share=few, method=uda"
    assert [(config.method, config.rounds) for config in timed] == [("fedavg", 3), ("fedavg", 3), ("fedavg-uda", 3)]


def test_the_seconds_of_a_round_are_those_of_the_second(toy: str) -> None:
    found = recipe.load(toy)
    (cell, *_) = build_cells(found, {"method": ("fedavg",)}, [0])
    assert 0 < cost.measure_round_seconds(cell.configs[0]) < 60


def test_nothing_is_trained_for_splits() -> None:
    found = recipe.load("feddure-figure3")
    rows = cost.estimate_costs(found, build_cells(found, {"dataset": ("digits",)}, [0]))
    assert {row.seconds for row in rows.values()} == {0.0}


def test_a_recipe_says_what_it_costs(toy: str, capsys: pytest.CaptureFixture[str]) -> None:
    only = ["--time", "--only", "method=uda,share=few", "--device", "cpu"]
    assert cli.main(["recipes", toy, "--json", *only]) == 0
    (metadata,) = json.loads(capsys.readouterr().out)["recipes"]
    (row,) = metadata["cost"]["rows"].values()
    assert (row["runs"], metadata["cost"]["runs"], row["cell"]) == (2, 2, "share=few, method=uda")
    assert row["seconds"] == pytest.approx(6 * row["seconds_per_round"], abs=0.01)
    assert cli.main(["recipes", toy, *only, "--scale", "more"]) == 0
    text = capsys.readouterr().out
    assert "SCALED DOWN, not the paper's experiment: ten times the rounds" in text
    assert "one round of one cell of each row was timed" in text


def test_a_recipe_in_detail(toy: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["recipes", toy]) == 0
    text = capsys.readouterr().out
    for part in ("toy: Toy", "folder (with --only)", "panel a: share few", "width = 4", "scale more: ten", "--time"):
        assert part in text


def test_the_list_is_there_at_once() -> None:
    """Nothing is timed, and PyTorch, which takes seconds to import, is not needed."""
    code = "import sys; from halfmoon.cli.main import main; main(['recipes']); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("False\n")
    assert done.stderr == ""
    assert all(name in done.stdout for name in recipe.list_names())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["feddure-tabel1"], "unknown recipe"),
        (["feddure-table1", "--time", "--scale", "smal"], "small"),
        (["--time"], "--time needs one recipe"),
        (["feddure-table1", "--scale", "small"], "--scale and --only need --time"),
    ],
)
def test_mistakes_are_one_sentence(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["recipes", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_durations_have_the_unit_that_fits() -> None:
    arguments = [duration(value) for value in (None, 0.4, 89, 600, 7200, 172_800, 1.6 * 31_557_600)]
    assert arguments == ["-", "0 s", "89 s", "10 min", "2.0 hours", "2.0 days", "1.6 years"]


def test_what_computes_is_named() -> None:
    assert describe_machine({"cpu": "X", "cores": 2, "gpu": None}) == "2 cores (X)"
    assert describe_machine({"cpu": "X", "cores": 1, "gpu": None}) == "1 core (X)"
    assert describe_machine({"cpu": "X", "cores": 2, "gpu": "Y"}) == "GPU Y"
