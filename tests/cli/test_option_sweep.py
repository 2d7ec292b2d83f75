"""Commands that need no training, called with and without each option: the output or the files change.

`test_options.py` checks that each flag is read, and what the options of a run change in what the run builds.
"""

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import pytest
from test_options import CHANGES, COMMANDS

from halfmoon.cli import main as cli

PRIVACY = "privacy --clients 10 --cohort 5 --rounds 3"

BASES = {
    "methods": "methods",
    "data": "data digits --clients 4",
    "recipes": "recipes",
    "privacy": f"{PRIVACY} --noise 1",
    "federation init": "federation init FOLDER --sites a b",
}
"""The smallest call of each command; FOLDER is an empty folder."""

CALLS: dict[tuple[str, str], tuple[str, str]] = {
    ("methods", "json"): ("methods", "methods --json"),
    ("methods", "names"): ("methods", "methods fedavg"),
    ("data", "json"): ("data digits", "data digits --json"),
    ("data", "png"): (BASES["data"], f"{BASES['data']} --png FOLDER/split.png"),
    ("data", "save"): (BASES["data"], f"{BASES['data']} --save FOLDER/split.parquet"),
    ("recipes", "json"): ("recipes", "recipes --json"),
    ("recipes", "names"): ("recipes", "recipes cbafed-table1"),
    ("recipes", "only"): ("recipes cbafed-table1", "recipes cbafed-table1 --only nothing"),
    ("recipes", "scale"): ("recipes cbafed-table1", "recipes cbafed-table1 --scale tiny"),
    ("privacy", "json"): (BASES["privacy"], f"{BASES['privacy']} --json"),
    ("privacy", "clients"): (BASES["privacy"], BASES["privacy"].replace("--clients 10", "--clients 20")),
    ("privacy", "cohort"): (BASES["privacy"], BASES["privacy"].replace("--cohort 5", "--cohort 4")),
    ("privacy", "rounds"): (BASES["privacy"], BASES["privacy"].replace("--rounds 3", "--rounds 4")),
    ("privacy", "noise"): (BASES["privacy"], f"{PRIVACY} --noise 2"),
    ("privacy", "delta"): (BASES["privacy"], f"{BASES['privacy']} --delta 0.001"),
    ("privacy", "epsilon"): (f"{PRIVACY} --epsilon 5", f"{PRIVACY} --epsilon 6"),
    ("federation init", "json"): (BASES["federation init"], f"{BASES['federation init']} --json"),
    ("federation init", "sites"): (BASES["federation init"], f"{BASES['federation init']} c"),
    ("federation init", "host"): (BASES["federation init"], f"{BASES['federation init']} --host example.org"),
    ("federation init", "images"): (BASES["federation init"], f"{BASES['federation init']} --images a=5"),
    ("federation init", "days"): (BASES["federation init"], f"{BASES['federation init']} --days 40"),
    ("federation init", "listen"): (BASES["federation init"], f"{BASES['federation init']} --listen 9100"),
    ("federation init", "port"): (BASES["federation init"], f"{BASES['federation init']} --port 9000"),
}
"""By command and option: a call without the option or with another value, and one with it."""


TEXT_SUFFIXES = (".toml", ".json", ".conf", ".txt")


def mask(text: str) -> str:
    """Replace fingerprints and times, which differ in each call."""
    return re.sub(r"SHA256:[^\s\"]+|(?:[0-9A-F]{2}:){9,}[0-9A-F]{2}|\d{4}-\d\d-\d\dT[\d:]+Z", "...", text)


def call(arguments: str | list[str], folder: Path) -> tuple[int, str, str, list[tuple[str, str]]]:
    """Run a command in this process; return its exit code, its output, its errors and its files.

    Files have their text if they are tables of options; keys and certificates are drawn anew in each call.
    """
    folder.mkdir()
    if isinstance(arguments, str):
        arguments = arguments.split()
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = cli.main([word.replace("FOLDER", str(folder)) for word in arguments])
    files = []
    for path in sorted(folder.rglob("*")):
        text = mask(path.read_text().replace(str(folder), "FOLDER")) if path.suffix in TEXT_SUFFIXES else ""
        files.append((str(path.relative_to(folder)), text))
    return code, out.getvalue().replace(str(folder), "FOLDER"), err.getvalue().replace(str(folder), "FOLDER"), files


def is_refused(result: tuple[int, str, str, Any]) -> bool:
    code, out, err, _ = result
    return code == 2 and out == "" and err.startswith("halfmoon: ") and err.count("\n") == 1


@pytest.mark.parametrize("command", BASES)
def test_equal_calls_are_equal(command: str, tmp_path: Path) -> None:
    """Otherwise the test below could not fail."""
    assert call(BASES[command], tmp_path / "one") == call(BASES[command], tmp_path / "two")


@pytest.mark.parametrize(("command", "option"), CALLS)
def test_an_option_changes_the_output_or_is_refused(command: str, option: str, tmp_path: Path) -> None:
    assert option in {action.dest for action in COMMANDS[command]._actions}
    without, given = CALLS[command, option]
    before = call(without, tmp_path / "without")
    assert before[0] == 0
    after = call(given, tmp_path / "given")
    assert after[0] == 0 or is_refused(after)
    assert before != after


def as_flags(values: dict[str, Any]) -> list[str]:
    """Write options of a run as flags; None and tables of method options have no flag."""
    arguments = []
    for name, value in values.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            arguments.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, dict):
            arguments += [
                argument for key, item in value.items() for argument in ("--option", f"fedavg-fixmatch.{key}={item}")
            ]
        elif value is not None:
            arguments += [f"--{flag}", *map(str, value if isinstance(value, tuple) else (value,))]
    return arguments


@pytest.mark.parametrize("name", CHANGES)
def test_a_flag_of_a_run_is_stored_or_refused(name: str, tmp_path: Path) -> None:
    row = {"method": "fedavg-fixmatch", **CHANGES[name]}
    arguments = ["run", "--explain", "--json"]
    after = call(arguments + as_flags(row), tmp_path / "given")
    assert after[0] == 0 or is_refused(after), after
    row = {**row, name: "fedavg-sl"} if name == "method" else {key: row[key] for key in row if key != name}
    assert call(arguments + as_flags(row), tmp_path / "without")[:3] != after[:3]


@pytest.mark.parametrize("name", ["clients", "cohort", "rounds"])
def test_privacy_names_the_number_that_is_missing(name: str, tmp_path: Path) -> None:
    """It asked for "the number of number of clients"."""
    arguments = re.sub(rf" --{name} \d+", "", BASES["privacy"])
    code, _, err, _ = call(arguments, tmp_path / "folder")
    assert (code, err.count("number of")) == (2, 1)
    assert err.startswith(f"halfmoon: --{name} is missing: give the number of ")
