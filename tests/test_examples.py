"""The scripts of examples/ are short and say what one learns; building the documentation runs them all."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = sorted((ROOT / "examples").glob("*.py"))
sys.path.append(str(ROOT / "tools"))


def test_the_gallery_has_every_script() -> None:
    import gallery

    assert sorted(gallery.ORDER) == [script.stem for script in SCRIPTS]
    text = "# Learn x.\n# %% [markdown]\n# # Title\n# words\n# %%\na = 1\n\nb = 2\n"
    assert gallery.cells(text) == [("markdown", "# Title\nwords"), ("code", "a = 1\n\nb = 2")]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_is_short_and_says_what_one_learns(script: Path) -> None:
    lines = script.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 60
    assert lines[0].startswith("# Learn ")
    assert lines[1:3] == ["# %% [markdown]", lines[2]]
    assert lines[2].startswith("# # ")
