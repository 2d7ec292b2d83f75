"""Run folders as a reader sees them; the files are described in `halfmoon.record`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halfmoon import toml
from halfmoon.disk import read_json, read_rows
from halfmoon.errors import UserError


@dataclass(frozen=True)
class Run:
    """One run, finished or not."""

    path: Path
    config: str  # the text of config.toml
    rows: list[dict[str, Any]]  # metrics.jsonl, one a round
    summary: dict[str, Any] | None  # summary.json; None while the run is not finished

    @classmethod
    def read(cls, path: Path) -> Run:
        """Read the folder of a run; raise UserError if it is none or a row cannot be read."""
        try:
            config = (path / "config.toml").read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{path} is not a run folder: its config.toml cannot be read ({error}).") from error
        return cls(path, config, read_rows(path / "metrics.jsonl"), _summary(path / "summary.json"))

    @property
    def title(self) -> str:
        """The method's title, or its name while the run is not finished."""
        if self.summary is not None:
            return str(self.summary["title"])
        return str(self.options.get("method", self.path.name))

    def series(self, part: str, name: str) -> dict[int, float]:
        """Return {round: value} of `row[part][name]`, without the rounds that have none."""
        found = ((row["round"], (row.get(part) or {}).get(name)) for row in self.rows)
        return {round: float(value) for round, value in found if value is not None}

    @property
    def options(self) -> dict[str, Any]:
        """What config.toml says, {} where it is no TOML."""
        return toml.table(self.config)

    @property
    def head(self) -> dict[str, Any]:
        """What run.json says: identity, and the versions of halfmoon and torch; {} where there is none."""
        return read_json(self.path / "run.json") or {}

    @property
    def split(self) -> dict[str, Any] | None:
        """The dict of `halfmoon.data.measure.summary` in split.json; None for a run of a version without it."""
        return read_json(self.path / "split.json")

    def seconds(self) -> dict[int, float]:
        """Return {round: seconds} of timings.jsonl; a round that was played twice counts as it was the last time."""
        return {row["round"]: float(row["seconds"]) for row in read_rows(self.path / "timings.jsonl")}


def find(root: Path) -> list[Run]:
    """Read all runs in a folder and below it, the folder's own first; raise UserError if there is none."""
    paths = sorted({mark.parent for mark in root.rglob("run.json")}, key=lambda path: (len(path.parts), path))
    if not paths:
        raise UserError(f"{root} holds no run; give the folder of a run or of a comparison.")
    return [Run.read(path) for path in paths]


def _summary(path: Path) -> dict[str, Any] | None:
    if not path.exists():
        return None
    try:
        return json.loads(path.read_bytes())
    except ValueError as error:
        raise UserError(f"{path}: not a summary ({error}); restore it, or resume the run.") from error
