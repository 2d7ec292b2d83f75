"""What a recipe costs on this machine: a round of a cell of each row is played and timed, and multiplied."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from halfmoon.config.schema import Config, count_rounds, identity
from halfmoon.runs import runner
from halfmoon.runs.factory import Problem
from halfmoon.storage import atomic_io
from halfmoon.storage.checkpoints import TIMINGS
from halfmoon.studies.grid import Cell
from halfmoon.studies.recipe import Recipe


@dataclass(frozen=True)
class Price:
    """What the runs of a row cost: `cell` says in words which of them was timed, `rounds` are those of all runs."""

    cell: str
    seconds_per_round: float
    rounds: int
    runs: int

    @property
    def seconds(self) -> float:
        return self.seconds_per_round * self.rounds


def price(recipe: Recipe, cells: Sequence[Cell]) -> dict[str, Price]:
    """Return what the runs of cells cost by row, each row by the first of its cells; equal runs count once.

    Nothing is trained for a recipe of splits. Raise what `halfmoon.runs.runner.cell` raises.
    """
    prices: dict[str, Price] = {}
    earlier: set[str] = set()
    for row in dict.fromkeys(cell.at[recipe.rows] for cell in cells):
        own = [cell for cell in cells if cell.at[recipe.rows] == row]
        runs = [config for cell in own for config in cell.configs.values()]
        new = {identity(config, config.method): count_rounds(config) for config in runs}
        new = {mark: rounds for mark, rounds in new.items() if mark not in earlier}
        earlier |= set(new)
        one = 0.0 if recipe.kind == "splits" else round_seconds(next(iter(own[0].configs.values())))
        prices[row] = Price(own[0].words, one, sum(new.values()), len(new))
    return prices


def round_seconds(config: Config) -> float:
    """Return the seconds of a round of a run, its evaluation included: the second of two, as the first warms up."""
    return seconds_of(replace(config, start="none", rounds=2, checkpoint_every=2, evaluate_every=2))[-1]


def seconds_of(config: Config, shared: Problem | None = None) -> list[float]:
    """Play a run in a folder that is thrown away, and return the seconds of each of its rounds."""
    with TemporaryDirectory() as folder:
        runner.cell(config, Path(folder) / "run", shared=shared)
        return [float(row["seconds"]) for row in atomic_io.read_rows(Path(folder) / "run" / TIMINGS)]


def words_of(machine: Mapping[str, Any]) -> str:
    if machine["gpu"] is not None:
        return f"GPU {machine['gpu']}"
    return f"{machine['cores']} core{'s' * (machine['cores'] > 1)} ({machine['cpu']})"
