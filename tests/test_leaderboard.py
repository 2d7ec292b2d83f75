"""tools/leaderboard.py: hand-computed numbers, the committed page equals the committed data, and error messages."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from report_folders import make_run_entry, make_sweep
from scripts import load_script

from halfmoon.core.errors import UserError

ROOT = Path(__file__).parents[1]
leaderboard = load_script("tools/leaderboard.py")


def run(seed: int, last: float, best: float) -> dict[str, Any]:
    accuracy = {"last": last, "best": best, "best_round": 3}
    return make_run_entry({"seed": seed, "accuracy": accuracy, "cost": {"labeled_steps": 100}, "seconds": 30.0})


def summary(**changes: Any) -> dict[str, Any]:
    """One column, three methods: two with published numbers, one unfinished."""
    published = {"mean": 50.0, "deviation": 1.0, "note": ""}
    runs = {"x": [run(0, 0.50, 0.6), run(1, 0.54, 0.6)], "y": [run(0, 0.4, 0.4)], "z": [{"seed": 0}]}
    numbers = {"x": published, "y": {**published, "mean": 60.0}, "z": None}
    cells = [{"at": {"data": "a", "method": m}, "published": numbers[m], "runs": each} for m, each in runs.items()]
    axes = {"data": ["a"], "method": ["x", "y", "z"]}
    made = {
        "title": "Paper, Table 9",
        "about": "what it is",
        "scale": None,
        "columns": ["data"],
        "axes": [{"name": n, "values": [{"name": v, "title": v.upper()} for v in vs]} for n, vs in axes.items()],
        "command": "halfmoon sweep r\nhalfmoon sweep r --seeds 1",
        "cells": cells,
    }
    return make_sweep(**(made | changes))


def put(results: Path, summary: dict[str, Any], name: str = "r") -> None:
    (results / "sweeps").mkdir(parents=True, exist_ok=True)
    (results / "sweeps" / f"{name}.json.gz").write_bytes(gzip.compress(json.dumps(summary).encode()))


def test_the_page_has_the_numbers_of_the_data(tmp_path: Path) -> None:
    """x: 50 and 54 are 52 +- 2.83, 2 above 50 +- 1, and 2 sqrt(8 + 1) = 6 allows it; y: 20 below 60, 2 * 1 does not."""
    put(tmp_path, summary())
    page = leaderboard.format_page(tmp_path)
    assert "| X | 52.00 ± 2.83 | 60.00 ± 0.00 | 50.00 ± 1.00 | +2.00 | yes | 2 of 2 |" in page
    assert "| Y | 40.00 | 40.00 | 60.00 ± 1.00 | -20.00 | no | 1 of 1 |" in page
    assert "| Z |  |  |  |  |  | 0 of 1 |" in page
    assert "Published order: Y > X." in page
    assert "Measured order (Kendall's tau -1.00): X > Y." in page
    assert "$ halfmoon sweep r\n$ halfmoon sweep r --seeds 1\n" in page
    assert "3 runs, 2 minutes in all" in page  # 90 s


def test_a_scaled_sweep_is_named_and_not_compared(tmp_path: Path) -> None:
    put(tmp_path, summary(scale={"name": "small", "about": "half of it"}))
    page = leaderboard.format_page(tmp_path)
    assert "## Paper, Table 9 (small)" in page
    assert "**Scale “small”: not the paper's experiment: half of it.**" in page
    assert "| X | 52.00 ± 2.83 | 60.00 ± 0.00 | 50.00 ± 1.00 | 2 of 2 |" in page


def test_a_note_next_to_the_data_is_on_the_page(tmp_path: Path) -> None:
    put(tmp_path, summary())
    (tmp_path / "sweeps" / "r.md").write_text("An honest sentence.\n")
    assert "\n\nAn honest sentence.\n\n" in leaderboard.format_page(tmp_path)
    put(tmp_path, summary(reading="x is y"))
    assert "Interpretation of the paper: x is y\n\n" in leaderboard.format_page(tmp_path)
    (tmp_path / "sweeps" / "r.md").write_text("Interpretation of the paper: x is z\n\nAn honest sentence.\n")
    page = leaderboard.format_page(tmp_path)
    assert page.index("x is z") < page.index("| X |") < page.index("An honest sentence.")
    assert "x is y" not in page
    (tmp_path / "sweeps" / "r.md").write_bytes("Über".encode("latin-1"))
    with pytest.raises(UserError, match=r"r\.md cannot be read .*UTF-8"):
        leaderboard.format_page(tmp_path)


def test_add_then_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sweep = tmp_path / "runs" / "r-small"
    sweep.mkdir(parents=True)
    (sweep / "sweep.json").write_text(json.dumps(summary()))
    results, page = tmp_path / "results", tmp_path / "page.md"
    flags = ["--results", str(results), "--out", str(page)]
    assert leaderboard.main(["--add", str(sweep), *flags]) == 0
    stored = (results / "sweeps" / "r-small.json.gz").read_bytes()
    assert gzip.decompress(stored) == (sweep / "sweep.json").read_bytes()
    assert page.read_text() == leaderboard.format_page(results)
    assert leaderboard.main(["--check", *flags]) == 0
    page.write_text(page.read_text().replace("52.00", "92.00"))
    assert leaderboard.main(["--check", *flags]) == 1
    assert "differs from" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, "is not the folder of a sweep"),
        (lambda path: (path / "sweep.json").write_text("{"), "cannot be read"),
        (lambda path: (path / "sweep.json").write_text(json.dumps(summary(format=7))), "has format 7"),
        (lambda path: (path / "sweep.json").write_text(json.dumps(summary(cells=[]))), "none of its runs is finished"),
    ],
)
def test_a_folder_that_cannot_be_added_changes_nothing(tmp_path: Path, make: Any, message: str) -> None:
    make(tmp_path)
    with pytest.raises(UserError, match=message):
        leaderboard.add(tmp_path, tmp_path / "results")
    assert not (tmp_path / "results").exists()


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="contains no sweep"):
        leaderboard.format_page(tmp_path)


def test_the_committed_page_equals_the_committed_results() -> None:
    assert (ROOT / "results" / "published.md").read_text(encoding="utf-8") == leaderboard.format_page(ROOT / "results")
