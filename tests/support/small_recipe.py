"""A small custom recipe with two methods, and a function that trains its cells, for the tests of sweeps."""

from pathlib import Path

from halfmoon.engine.executors.base import Executor
from halfmoon.engine.executors.serial import SerialExecutor
from halfmoon.runs.callbacks import NULL_CALLBACK, Callback
from halfmoon.studies import recipe
from halfmoon.studies.grid import build_cells, parse_selection
from halfmoon.studies.run_sweep import RunReport, run_sweep
from halfmoon.studies.sweep_folder import SweepFolder

RECIPE = """
title = "Mine, Table 1"
paper = "FedDure"
item = "Table 1"
about = "two methods"
reading = "as it is"
columns = ["amount"]
rows = "method"

[protocol]
data = "digits"
rounds = 5
clients = 4
cohort = 2
steps = 2
width = 4
device = "cpu"
threads = 1

[axes.amount.few]
title = "few"
set = { labels_per_class = 1 }

[axes.amount.more]
title = "more"
set = { labels_per_class = 2 }

[axes.method.fedavg]
title = "FedAvg (labeled only)"
set = { method = "fedavg" }

[axes.method.fedavg-fixmatch]
title = "FedAvg+FixMatch"
set = { method = "fedavg-fixmatch" }

[scales.short]
about = "2 of 5 rounds"
set = { rounds = 2 }
"""


def train_cells(
    path: Path,
    *selection: str,
    scale: str | None = "short",
    seeds: tuple[int, ...] = (0,),
    executor: Executor | None = None,
    out: str = "out",
    callback: Callback = NULL_CALLBACK,
) -> tuple[SweepFolder, list[RunReport], list[str]]:
    """Train the selected cells of a recipe's file.

    Returns:
        The sweep folder, the reports of all runs, and the failures.
    """
    loaded = recipe.load(str(path))
    scale_of_recipe = loaded.scale(scale) if scale else None
    folder = SweepFolder(path.parent / out, loaded, scale_of_recipe, "halfmoon sweep")
    reports = list[RunReport]()
    cells = build_cells(loaded, parse_selection(loaded, selection), seeds, scale_of_recipe)
    return folder, reports, run_sweep(folder, cells, executor or SerialExecutor(), reports.append, callback)
