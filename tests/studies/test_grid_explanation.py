"""`halfmoon sweep --explain`: the options of a sweep's runs that are not at their defaults, and their layers."""

import json
from pathlib import Path

import pytest

from halfmoon.cli.main import main
from halfmoon.config.schema import Config
from halfmoon.studies import grid, recipe

RECIPE = """
title = "mine"
paper = "mine"
item = "all"
about = "a recipe"
rows = "method"
seeds = [0, 3]

[protocol]
rounds = 7
clients = 9
optimizer = "sgd"
momentum = 0.5
labels_per_class = 3
options = { feddure = { hidden = 64 } }

[axes.method.fedavg]
set = { method = "fedavg", unset = ["momentum"] }

[axes.method.feddure]
set = { label_ratio = 0.5 }

[[when]]
at = { method = ["feddure"] }
set = { lr = 0.25 }

[scales.half]
about = "fewer rounds"
set = { rounds = 4 }
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "mine.toml"
    file.write_text(RECIPE)
    return file


def explain(capsys: pytest.CaptureFixture[str], path: Path, *text: str) -> tuple[dict, dict[str, dict]]:
    """Return {option: (value, layer)} of all runs, and by cell."""
    assert main(["sweep", str(path), "--explain", "--json", *text]) == 0
    printed = json.loads(capsys.readouterr().out)

    def table(rows: list[dict]) -> dict:
        return {row["option"]: (row["value"], row["layer"]) for row in rows}

    return table(printed["common"]), {cell["cell"]: table(cell["options"]) for cell in printed["cells"]}


def test_layers_of_a_recipe_are_named(path: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    common, cells = explain(capsys, path, "--out", str(tmp_path / "out"))
    assert common == {
        "rounds": (7, "recipe mine"),
        "clients": (9, "recipe mine"),
        "optimizer": ("sgd", "recipe mine"),
        "evaluate_every": (1, "halfmoon sweep"),
        "seed": ([0, 3], "recipe mine"),
        "split_seed": ([0, 3], "recipe mine"),
    }
    assert cells["method=fedavg"]["method"] == ("fedavg", "axis method=fedavg")
    assert cells["method=fedavg"]["labels_per_class"] == (3, "recipe mine")
    assert cells["method=feddure"]["label_ratio"] == (0.5, "axis method=feddure")
    assert cells["method=feddure"]["lr"] == (0.25, "recipe mine, when method=feddure")
    assert cells["method=feddure"]["options.feddure.hidden"] == (64, "recipe mine")
    assert not (tmp_path / "out").exists()


def test_what_a_higher_layer_removes_is_not_listed(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`unset` returns an option to its default, and another amount of labels replaces the protocol's."""
    _, cells = explain(capsys, path)
    assert cells["method=feddure"]["momentum"] == (0.5, "recipe mine")
    assert "momentum" not in cells["method=fedavg"]
    assert "labels_per_class" not in cells["method=feddure"]


def test_flags_scale_and_computed_threads(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--scale", "half", "--seeds", "5", "--checkpoint-every", "7", "--jobs", "2")
    common, _ = explain(capsys, path, *arguments)
    assert common["rounds"] == (4, "scale half")
    assert common["seed"] == ([5], "flag")
    assert common["checkpoint_every"] == (7, "flag")
    assert common["threads"][1] == "halfmoon sweep"


def test_every_cell_of_a_shipped_recipe_is_explained_completely() -> None:
    """Rows have the values of the configuration, and each other option is at its default."""
    loaded = recipe.load("feddure-table1")
    cells = grid.build_cells(loaded, {}, None, loaded.scale("small"))
    explanation = grid.explain_cells(cells, "recipe")
    assert len(explanation.cells) == len(cells)
    for cell, rows in explanation.cells:
        values = {row.name: row.value for row in (*explanation.common, *rows)}
        config = cell.configs[0]
        for name in ("rounds", "steps", "lr", "data", "setting", "method", "network", "schedule", "unlabeled_batch"):
            assert values.get(name, getattr(Config, name)) == getattr(config, name)
        assert (values["seed"], values["split_seed"]) == (loaded.seeds, loaded.seeds)


def test_tables_name_the_cells(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep", str(path), "--explain"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "options of all 4 runs"
    assert "method=feddure" in lines
    assert ["rounds", "7", "recipe", "mine"] in [line.split() for line in lines]


def test_explain_and_dry_run_exclude_each_other(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep", str(path), "--explain", "--dry-run"]) == 2
    assert "--explain and --dry-run print different lists" in capsys.readouterr().err
