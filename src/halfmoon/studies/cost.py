"""Estimate the cost of a recipe on this machine: time one round of each row, and multiply by the rounds of its runs."""

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
from halfmoon.studies.grid import RecipeCell
from halfmoon.studies.recipe import Recipe


@dataclass(frozen=True)
class RowCost:
    """The cost of the runs of a row.

    Attributes:
        cell: the cell that was timed, as text.
        seconds_per_round: of that cell.
        rounds: the rounds of all runs of the row.
        runs: the number of its runs.
    """

    cell: str
    seconds_per_round: float
    rounds: int
    runs: int

    @property
    def seconds(self) -> float:
        """The time of all runs."""
        return self.seconds_per_round * self.rounds


def estimate_costs(recipe: Recipe, cells: Sequence[RecipeCell]) -> dict[str, RowCost]:
    """Estimate the cost of each row of a recipe by its first cell. A run that several cells share counts once.

    Args:
        recipe: the recipe; one of splits trains nothing and costs nothing.
        cells: the selected cells.

    Raises:
        UserError: as `halfmoon.runs.runner.run_in_folder`.
    """
    costs: dict[str, RowCost] = {}
    counted_runs: set[str] = set()
    for row in dict.fromkeys(cell.at[recipe.rows] for cell in cells):
        row_cells = [cell for cell in cells if cell.at[recipe.rows] == row]
        rounds_by_run = {
            identity(config, config.method): count_rounds(config)
            for cell in row_cells
            for config in cell.configs.values()
        }
        new_runs = {run_id: rounds for run_id, rounds in rounds_by_run.items() if run_id not in counted_runs}
        counted_runs |= set(new_runs)
        seconds = 0.0
        if recipe.kind != "splits":
            seconds = measure_round_seconds(next(iter(row_cells[0].configs.values())))
        costs[row] = RowCost(
            cell=row_cells[0].label, seconds_per_round=seconds, rounds=sum(new_runs.values()), runs=len(new_runs)
        )
    return costs


def measure_round_seconds(config: Config) -> float:
    """Measure the seconds of a round and its evaluation: the second round of two, as the first one warms up."""
    return measure_seconds(replace(config, rounds=2, checkpoint_every=2, evaluate_every=2))[-1]


def measure_seconds(config: Config, shared: Problem | None = None) -> list[float]:
    """Run a configuration in a temporary folder and return the seconds of each round."""
    with TemporaryDirectory() as folder:
        runner.run_in_folder(config, Path(folder) / "run", shared=shared)
        return [float(row["seconds"]) for row in atomic_io.read_rows(Path(folder) / "run" / TIMINGS)]


def describe_machine(machine: Mapping[str, Any]) -> str:
    """Describe the processor or the GPU of a machine (`halfmoon.studies.sweep_folder.detect_machine`)."""
    if machine["gpu"] is not None:
        return f"GPU {machine['gpu']}"
    plural = "s" if machine["cores"] > 1 else ""
    return f"{machine['cores']} core{plural} ({machine['cpu']})"
