"""`halfmoon sweep RECIPE`: play a table or a figure of a paper, or of one's own."""

from __future__ import annotations

import argparse
import shlex
import sys
from contextlib import ExitStack, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halfmoon.cli.commands.base import command, complain, option, print_json, requested, tracked, trackers
from halfmoon.config import schema as settings
from halfmoon.core.errors import UserError

if TYPE_CHECKING:
    from halfmoon.sweeps.engines import Engine
    from halfmoon.sweeps.play import Step
    from halfmoon.sweeps.sweep_folder import SweepFolder

PLACE = (
    *("data_dir", "cache", "device", "executor", "compile", "threads", "workers", "seeds_together", "memory_cap"),
    "checkpoint_every",
)
"""The options of a run that change none of its numbers, and so can be said for a whole sweep."""


def add(commands: Any) -> None:
    """Add the command's parser."""
    parser = command(commands, "sweep", "play a table or figure of a paper (see halfmoon recipes)", "RECIPE ", run)
    parser.add_argument("recipe", metavar="RECIPE", help="a recipe's name, or a TOML file of one's own")
    about = "only these cells: AXIS=VALUE,AXIS=VALUE; a further value of one axis is one more; may be repeated"
    parser.add_argument("--only", metavar="CELLS", action="append", default=[], help=about)
    parser.add_argument("--seeds", metavar="N", nargs="+", help="seeds of training and split (default: the recipe's)")
    parser.add_argument("--scale", metavar="NAME", help="a scaled-down version of the recipe, such as small")
    parser.add_argument("--out", metavar="DIR", type=Path, default=Path("runs"), help="where to put it (default: runs)")
    parser.add_argument("--jobs", metavar="N", default="1", help="runs at a time on a machine (default: 1)")
    about = "what plays the runs: processes here, or a Ray cluster (needs halfmoon[ray]) (default: local)"
    parser.add_argument("--engine", choices=("local", "ray"), default="local", help=about)
    about = "the Ray cluster (default: RAY_ADDRESS, or that of this machine, or one that is started for the sweep)"
    parser.add_argument("--ray-address", metavar="HOST:PORT", help=about)
    tracked(parser)
    parser.add_argument("--dry-run", action="store_true", help="only list the runs")
    group = parser.add_argument_group("machine")
    for name in PLACE:
        option(group, name)


def run(args: argparse.Namespace) -> int:
    """Play the sweep; 1 where a run failed."""
    from rich.console import Console

    from halfmoon.cli.console import say, show
    from halfmoon.sweeps import grid, recipe
    from halfmoon.sweeps.sweep_folder import SweepFolder, cores, table

    plan = recipe.load(args.recipe)
    scale = plan.scale(args.scale) if args.scale else None
    jobs = _whole("--jobs", args.jobs, 1)
    over = requested(args, PLACE)
    over = settings.anchored(over, Path())
    if jobs > 1 and args.engine == "local" and "threads" not in over:
        over["threads"] = max(1, cores() // jobs)
    seeds = [_whole("--seeds", word, 0) for word in args.seeds] if args.seeds else None
    cells = grid.cells(plan, grid.selection(plan, args.only), seeds, scale, over)
    words = shlex.join(["halfmoon", *args.words])
    folder = SweepFolder(args.out, plan, scale)
    if args.dry_run:
        return _list(cells, args.json)
    # The table of several commands names them all.
    commands = [*folder.read().get("command", "").splitlines(), words]
    folder = replace(folder, command="\n".join(dict.fromkeys(commands)))
    code = _play(args, folder, cells, jobs)
    facts = folder.read()
    if args.json:
        print_json({"folder": str(folder.path), **facts})
    else:
        console = Console()
        if scale is not None:
            say(console, f"SCALED DOWN, not the paper's experiment: {scale.about}")
        show(console, *table(facts))
        say(console, f"sweep folder: {folder.path}\nas a page: halfmoon report {folder.path} --out page.html")
    return code


def _play(args: argparse.Namespace, folder: SweepFolder, cells: list[Any], jobs: int) -> int:
    from rich.console import Console

    from halfmoon.cli.console import duration, say, watcher
    from halfmoon.sweeps.play import sweep

    console = Console(stderr=True)

    def tell(step: Step) -> None:
        words = f"[{step.number}/{step.runs}] {step.words}: "
        if step.failed:
            words += f"failed: {step.failed}"
        elif step.summary and "accuracy" in step.summary:
            accuracy = step.summary["accuracy"]
            words += f"last {100 * accuracy['last']:.2f}, best {100 * accuracy['best']:.2f} %"
            words += ", finished before" if step.before else f" ({duration(step.summary['seconds'])})"
        else:
            words += "finished"
        say(console, words)

    watch = watcher(console, args.json or jobs > 1 or args.engine == "ray")
    try:
        with redirect_stdout(sys.stderr), watch, ExitStack() as ends:  # Ray prints remarks; results alone go to stdout
            failed = sweep(folder, cells, _engine(args, watch, jobs, ends), tell)
    except KeyboardInterrupt:
        if args.debug:
            raise
        return complain("stopped; the same command goes on where it was.", 130)  # what is finished is printed
    return 1 if failed else 0


def _engine(args: argparse.Namespace, watch: Any, jobs: int, ends: ExitStack) -> Engine:
    from halfmoon.runs.callbacks import Callbacks
    from halfmoon.sweeps import engines

    if args.ray_address is not None and args.engine != "ray":
        raise UserError("--ray-address goes with --engine ray.")
    watching = Callbacks(*trackers(args))
    if args.engine == "ray":
        from halfmoon.sweeps.ray_engine import Rays

        rays = Rays(jobs, args.ray_address, watching)
        ends.callback(rays.close)
        return rays
    return engines.Processes(jobs, watching) if jobs > 1 else engines.Here(Callbacks(watch, watching, warn=watch.say))


def _whole(flag: str, word: str, least: int) -> int:
    if not word.isdecimal() or int(word) < least:
        raise UserError(f"{flag} is {word!r}: it must be a whole number from {least}.")
    return int(word)


def _list(cells: list[Any], as_json: bool) -> int:
    from rich.console import Console

    from halfmoon.cli.console import show
    from halfmoon.config.schema import identity

    rows = [
        (cell.words, str(seed), identity(config, config.method)[:16])
        for cell in cells
        for seed, config in cell.configs.items()
    ]
    if as_json:
        print_json([dict(zip(("cell", "seed", "identity"), row, strict=True)) for row in rows])
    else:
        show(Console(), ("cell", "seed", "identity"), rows)
    return 0
