"""Estimate costs: of a recipe on this machine, by the time of a round; of a plan, by a table of a reference computer.

What a plan trains on comes from the table, so that the same command gives the same model however busy a computer is. The
speed of this computer is measured only to predict minutes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from halfmoon.config.schema import Config, count_rounds, identity
from halfmoon.runs import runner
from halfmoon.runs.factory import Problem
from halfmoon.storage import atomic_io
from halfmoon.storage.checkpoints import METRICS, TIMINGS
from halfmoon.studies.grid import RecipeCell
from halfmoon.studies.recipe import Recipe

UNKNOWN_PRODUCTS = 10**8
"""Multiplications of a forward pass that are assumed for a network that does not count them."""

SECONDS_PER_FILE = 5e-4
"""Time to open an image file on the reference computer: one core of an AMD EPYC, with the versions of results/own_images.md."""

SECONDS_PER_PIXEL = 1.5e-8
"""Time to decode a pixel of a JPEG there."""

SECONDS_PER_PRODUCT = 5e-11
"""Time of one multiplication and addition there, in a convolutional network in float32. Measured: 5.1 ms for the features
of EfficientNet-Lite0 at 112 pixels, and 0.28 s for 960 passes of ResNet-9 of width 8 at 32 pixels."""

HEAD_SECONDS = 0.5
"""Time to solve a ridge head and a mixture head on 1,280 features there, without the time for each image."""

HEAD_SECONDS_PER_IMAGE = 3e-4
"""Time of both heads there for each image."""

FOLD_SECONDS = 0.04
"""Time of both heads on one fold there, in a basis of `FOLD_BASIS` vectors (`halfmoon.studies.fold_solver`)."""

FOLD_SECONDS_PER_IMAGE = 2e-5
"""Time of both heads on one fold there for each image."""

FOLD_BASIS = 128
"""Size of the basis for which the times of a fold were measured."""


DRAW_SECONDS = 0.06
"""Time of both heads on one draw of the labels there (`halfmoon.studies.fold_solver.DrawSolver`), with `DRAW_FEATURES`."""

DRAW_SECONDS_PER_IMAGE = 1.3e-4
"""Time of both heads on one draw there for each image."""

DRAW_FEATURES = 2048
"""Number of features for which the times of a draw were measured."""


class SolvingCost(NamedTuple):
    """Seconds to solve both heads once: a constant, and for each image."""

    fixed: float
    per_image: float

    def seconds(self, images: float) -> float:
        """Return the seconds for so many images."""
        return self.fixed + self.per_image * images

    def times(self, factor: float) -> "SolvingCost":
        """Return the cost on a computer that takes `factor` times as long."""
        return SolvingCost(factor * self.fixed, factor * self.per_image)


SOLVING_COST = SolvingCost(HEAD_SECONDS, HEAD_SECONDS_PER_IMAGE)
"""The cost of both heads on all features, on the reference computer."""


def reference_fold_cost(basis: int) -> SolvingCost:
    """Estimate the cost of both heads on one fold on the reference computer.

    Args:
        basis: the number of vectors of the basis.
    """
    # Between the square and the cube, with which products and eigenvectors of small matrices grow.
    factor = max(1.0, basis / FOLD_BASIS) ** 1.5
    return SolvingCost(FOLD_SECONDS * factor, FOLD_SECONDS_PER_IMAGE * factor)


def reference_draw_cost(features: int) -> SolvingCost:
    """Estimate the cost of both heads on one draw of the labels on the reference computer: it is linear in the features."""
    return SolvingCost(DRAW_SECONDS, DRAW_SECONDS_PER_IMAGE).times(features / DRAW_FEATURES)


def reference_decoding_seconds(sizes: Mapping[tuple[int, int], int]) -> float:
    """Estimate the seconds to decode an image on the reference computer.

    Args:
        sizes: how many images have each (height, width).
    """
    pixels = sum(height * width * count for (height, width), count in sizes.items()) / sum(sizes.values())
    return SECONDS_PER_FILE + SECONDS_PER_PIXEL * pixels


def reference_network_seconds(products: int | None, images: float) -> float:
    """Estimate the seconds of a network's forward passes on the reference computer.

    Args:
        products: the multiplications of one forward pass; None if they are not known (`UNKNOWN_PRODUCTS`).
        images: the number of forward passes; a backward pass counts as two.
    """
    return SECONDS_PER_PRODUCT * (UNKNOWN_PRODUCTS if products is None else products) * images


class RoundCost(NamedTuple):
    """The cost of a round and of an evaluation.

    Attributes:
        reference_seconds: seconds of a round on the reference computer, by its forward and backward passes.
        round_seconds: seconds of a round on this computer.
        evaluation_seconds: seconds of an evaluation on this computer.
    """

    reference_seconds: float
    round_seconds: float
    evaluation_seconds: float

    def run_seconds(self, rounds: int, evaluate_every: int) -> float:
        """Return the seconds of a run on this computer."""
        return rounds * self.round_seconds + rounds // evaluate_every * self.evaluation_seconds


def measure_round_cost(config: Config, problem: Problem) -> RoundCost:
    """Run three rounds in a temporary folder, to predict the time of a run: count a round's passes, and time them.

    The first round warms up, the second trains, the third trains and is evaluated.

    Args:
        config: the configuration of the run.
        problem: the data, split and task of the run, which are built once for several methods.
    """
    # Only the last round is evaluated and saved, so that the second one times the training by itself. A moving average
    # of models (`server_ema`), which only evaluation uses, is left out.
    short = replace(config, rounds=3, evaluate_every=3, checkpoint_every=3, server_ema=0.0)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "run"
        runner.run_in_folder(short, path, problem=problem)
        seconds = [float(row["seconds"]) for row in atomic_io.read_rows(path / TIMINGS)]
        # The forward and backward passes of single images in all rounds so far.
        cost = atomic_io.read_rows(path / METRICS)[-1]["cost"]
    channels, height, width = problem.train.images.shape[1:]
    products = problem.task.network.count_products((channels, height, width))
    # A backward pass has about twice the multiplications of a forward pass.
    passes = (cost["forward"] + 2 * cost["backward"]) / short.rounds
    return RoundCost(
        reference_seconds=reference_network_seconds(products, passes),
        round_seconds=seconds[1],
        evaluation_seconds=max(0.0, seconds[2] - seconds[1]),
    )


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
    """Estimate the time of each row of a paper's table, from one timed round of its first cell.

    A run that several cells share, because their configurations are equal, counts once: in the first row that has it.

    Args:
        recipe: describes the table and its runs. One of the kind "splits" trains nothing and costs nothing.
        cells: the selected cells, each with one configuration for every seed.

    Returns:
        The cost by the name of the row.

    Raises:
        UserError: as `halfmoon.runs.runner.run_in_folder`.
    """
    row_axis = recipe.rows  # the axis whose values are the rows of the table, such as "method"
    cells_by_row: dict[str, list[RecipeCell]] = {}
    for cell in cells:
        cells_by_row.setdefault(cell.at[row_axis], []).append(cell)
    costs: dict[str, RowCost] = {}
    counted_runs: set[str] = set()
    for row, row_cells in cells_by_row.items():
        configs = [config for cell in row_cells for config in cell.configs.values()]
        rounds_by_run = {identity(config, config.method): count_rounds(config) for config in configs}
        new_runs = {run_id: rounds for run_id, rounds in rounds_by_run.items() if run_id not in counted_runs}
        counted_runs |= set(new_runs)
        costs[row] = RowCost(
            cell=row_cells[0].label,
            seconds_per_round=0.0 if recipe.kind == "splits" else measure_round_seconds(configs[0]),
            rounds=sum(new_runs.values()),
            runs=len(new_runs),
        )
    return costs


def measure_round_seconds(config: Config) -> float:
    """Measure the seconds of a round and its evaluation: the second round of two, as the first one warms up."""
    return measure_seconds(replace(config, rounds=2, checkpoint_every=2, evaluate_every=2))[-1]


def measure_seconds(config: Config, problem: Problem | None = None) -> list[float]:
    """Run a configuration in a temporary folder and return the seconds of each round."""
    with TemporaryDirectory() as folder:
        runner.run_in_folder(config, Path(folder) / "run", problem=problem)
        return [float(row["seconds"]) for row in atomic_io.read_rows(Path(folder) / "run" / TIMINGS)]


def describe_machine(machine: Mapping[str, Any]) -> str:
    """Describe the processor or the GPU of a machine (`halfmoon.studies.sweep_folder.detect_machine`)."""
    if machine["gpu"] is not None:
        return f"GPU {machine['gpu']}"
    plural = "s" if machine["cores"] > 1 else ""
    return f"{machine['cores']} core{plural} ({machine['cpu']})"
