"""The plan of a comparison: what it must not name is refused, whoever has written it."""

from pathlib import Path
from typing import Any

import pytest

from halfmoon.core.errors import UserError
from halfmoon.runs.jobs import parse
from halfmoon.storage import integrity


@pytest.mark.parametrize(
    ("jobs", "said"),
    [
        ([{"folder": "../..", "config": ""}], "no folder in it"),
        ([{"folder": "/tmp", "config": ""}], "no folder in it"),
        ([{"folder": "one"}], "config"),
        ([], "it names no run"),
    ],
)
def test_a_plan_names_folders_below_it(tmp_path: Path, jobs: list[dict[str, Any]], said: str):
    """A seal finds damage, not malice: one that is right says nothing of what stands in the file."""
    with pytest.raises(UserError, match=said):
        parse(integrity.seal({"jobs": jobs}), tmp_path)
