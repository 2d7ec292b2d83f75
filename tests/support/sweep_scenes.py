"""A recipe of one's own with two methods, and its cells played in this process, for the tests of sweeps."""

from pathlib import Path

from halfmoon.studies import recipe
from halfmoon.studies.executors import Engine, SerialExecutor
from halfmoon.studies.grid import cells, selection
from halfmoon.studies.run_sweep import Step, sweep
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


def played(
    path: Path,
    *only: str,
    scale: str | None = "short",
    seeds: tuple[int, ...] = (0,),
    engine: Engine | None = None,
    out: str = "out",
) -> tuple[SweepFolder, list[Step], list[str]]:
    """Play cells of a recipe's file in this process; return its folder, what was told, and what failed."""
    found = recipe.load(str(path))
    scaled = found.scale(scale) if scale else None
    folder, steps = SweepFolder(path.parent / out, found, scaled, "halfmoon sweep"), list[Step]()
    asked = cells(found, selection(found, only), seeds, scaled)
    return folder, steps, sweep(folder, asked, engine or SerialExecutor(), steps.append)
