"""`halfmoon recipes` and `sweep`: tables and figures of papers, what one costs and to play it; `tune`: a search."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from contextlib import ExitStack, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halfmoon.cli.commands.base import (
    add_command,
    add_option,
    add_options,
    add_tracker_flag,
    make_trackers,
    parse_int,
    print_json,
    print_table,
    print_text,
    print_warning,
    read_layers,
    requested_options,
)
from halfmoon.config import schema as settings
from halfmoon.core.errors import UserError
from halfmoon.storage import toml

if TYPE_CHECKING:
    from halfmoon.studies.executors import Engine
    from halfmoon.studies.recipe import Recipe
    from halfmoon.studies.run_sweep import Step
    from halfmoon.studies.sweep_folder import SweepFolder

TIMED = ("data_dir", "cache", "device", "executor", "threads", "workers")
"""The options of a run that change how long it takes and none of its numbers."""

PLACE = (*TIMED, "memory_cap", "checkpoint_every")
"""The options of a run that change none of its numbers, and so can be said for a whole sweep."""


def add(commands: Any) -> None:
    """Add the command's parser."""
    parser = add_command(
        commands, "sweep", "play a table or figure of a paper (see halfmoon recipes)", "RECIPE ", _sweep
    )
    parser.add_argument("recipe", metavar="RECIPE", help="a recipe's name, or a TOML file of one's own")
    about = "only these cells: AXIS=VALUE,AXIS=VALUE; repeat it or an axis for more"
    parser.add_argument("--only", metavar="CELLS", action="append", default=[], help=about)
    parser.add_argument("--seeds", metavar="N", nargs="+", help="seeds of training and split (default: the recipe's)")
    parser.add_argument("--scale", metavar="NAME", help="a scaled-down version of the recipe, such as small")
    parser.add_argument("--out", metavar="DIR", type=Path, default=Path("runs"), help="where to put it (default: runs)")
    parser.add_argument("--jobs", metavar="N", default="1", help="runs at a time on a machine (default: 1)")
    about = "what plays the runs: processes here, or a Ray cluster (needs the extra ray) (default: local)"
    parser.add_argument("--engine", choices=("local", "ray"), default="local", help=about)
    about = "the Ray cluster (default: RAY_ADDRESS, or that of this machine, or one that is started for the sweep)"
    parser.add_argument("--ray-address", metavar="HOST:PORT", help=about)
    add_tracker_flag(parser)
    parser.add_argument("--dry-run", action="store_true", help="only list the runs")
    group = parser.add_argument_group("machine")
    for name in PLACE:
        add_option(group, name)


def _sweep(args: argparse.Namespace) -> int:
    """Play the sweep; 1 where a run failed."""
    from halfmoon.studies import grid, recipe
    from halfmoon.studies.sweep_folder import SweepFolder, cores, table

    plan = recipe.load(args.recipe)
    scale = plan.scale(args.scale) if args.scale else None
    jobs = parse_int("--jobs", args.jobs, 1)
    over = settings.resolve_paths(requested_options(args, PLACE), Path())
    if jobs > 1 and args.engine == "local" and "threads" not in over:
        over["threads"] = max(1, cores() // jobs)
    seeds = [parse_int("--seeds", word, 0) for word in args.seeds] if args.seeds else None
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
        if scale is not None:
            print_text(f"SCALED DOWN, not the paper's experiment: {scale.about}")
        print_table(*table(facts))
        print_text(f"sweep folder: {folder.path}\nas a page: halfmoon report {folder.path} --out page.html")
    return code


def _play(args: argparse.Namespace, folder: SweepFolder, cells: list[Any], jobs: int) -> int:
    from rich.console import Console

    from halfmoon.cli import console as screen
    from halfmoon.studies.run_sweep import sweep

    console = Console(stderr=True)

    def tell(step: Step) -> None:
        words = f"[{step.number}/{step.runs}] {step.words}: "
        if step.failed:
            words += f"failed: {step.failed}"
        elif step.summary and "accuracy" in step.summary:
            accuracy = step.summary["accuracy"]
            words += f"last {100 * accuracy['last']:.2f}, best {100 * accuracy['best']:.2f} %"
            words += ", finished before" if step.before else f" ({screen.duration(step.summary['seconds'])})"
        else:
            words += "finished"
        screen.say(console, words)

    watch = screen.watcher(console, args.json or jobs > 1 or args.engine == "ray")
    try:
        with redirect_stdout(sys.stderr), watch, ExitStack() as ends:  # Ray prints remarks; results alone go to stdout
            failed = sweep(folder, cells, _engine(args, watch, jobs, ends), tell)
    except KeyboardInterrupt:
        if args.debug:
            raise
        return print_warning("stopped; the same command goes on where it was.", 130)  # what is finished is printed
    return 1 if failed else 0


def _engine(args: argparse.Namespace, watch: Any, jobs: int, ends: ExitStack) -> Engine:
    from halfmoon.runs.callbacks import Callbacks
    from halfmoon.studies import executors

    if args.ray_address is not None and args.engine != "ray":
        raise UserError("--ray-address goes with --engine ray.")
    watching = Callbacks(*make_trackers(args))
    if args.engine == "ray":
        from halfmoon.studies.ray_executor import RayExecutor

        rays = RayExecutor(jobs, args.ray_address, watching)
        ends.callback(rays.close)
        return rays
    if jobs > 1:
        return executors.ProcessExecutor(jobs, watching)
    return executors.SerialExecutor(Callbacks(watch, watching, warn=watch.say))


def _list(cells: list[Any], as_json: bool) -> int:
    rows = [
        (cell.words, str(seed), settings.identity(config, config.method)[:16])
        for cell in cells
        for seed, config in cell.configs.items()
    ]
    if as_json:
        print_json([dict(zip(("cell", "seed", "identity"), row, strict=True)) for row in rows])
    else:
        print_table(("cell", "seed", "identity"), rows)
    return 0


def add_recipes(commands: Any) -> None:
    """Add the command's parser."""
    about = "list the tables and figures that sweep plays, and with --time what one costs on this machine"
    parser = add_command(commands, "recipes", about, "[NAME ...] ", _recipes)
    parser.add_argument("names", metavar="NAME", nargs="*", help="only these, one alone in detail; a TOML file too")
    about = "estimate the time: train one round of one cell of each row, and multiply"
    parser.add_argument("--time", action="store_true", help=about)
    parser.add_argument("--scale", metavar="NAME", help="with --time: a scaled-down version, such as small")
    about = "with --time: only these cells: AXIS=VALUE,AXIS=VALUE, as in halfmoon sweep"
    parser.add_argument("--only", metavar="CELLS", action="append", default=[], help=about)
    group = parser.add_argument_group("machine")
    for name in TIMED:
        add_option(group, name)


def _recipes(args: argparse.Namespace) -> int:
    from halfmoon.studies import recipe

    loaded = [recipe.load(name) for name in args.names or recipe.names()]
    if args.time and len(loaded) != 1:
        raise UserError("--time is about one recipe: write, for example, halfmoon recipes feddure-table1 --time.")
    if not args.time and (args.scale or args.only):
        raise UserError("--scale and --only go with --time.")
    facts = [_facts(each) for each in loaded]
    if args.time:
        facts[0]["cost"] = _cost(loaded[0], args)
    if args.json:
        print_json({"recipes": facts})
    elif len(facts) == 1:
        _detail(facts[0])
    else:
        _show_recipes(facts)
    return 0


def duration(seconds: float | None) -> str:
    """Return seconds in the unit that fits, from seconds to years; `-` for none."""
    if seconds is None:
        return "-"
    for size, unit in ((31_557_600, "years"), (86_400, "days"), (3_600, "hours"), (60, "min")):
        if seconds >= 1.5 * size:
            return f"{seconds / size:,.1f} {unit}" if seconds < 10 * size else f"{seconds / size:,.0f} {unit}"
    return f"{seconds:.0f} s"


def _facts(loaded: Recipe) -> dict[str, Any]:
    from halfmoon.studies import grid

    return {
        "name": loaded.name,
        "title": loaded.title,
        "paper": loaded.paper,
        "item": loaded.item,
        "about": loaded.about,
        "reading": loaded.words(None),
        "kind": loaded.kind,
        "cells": len(grid.combinations(loaded, {})),
        "seeds": list(loaded.seeds),
        "panels": {name: {axis: list(names) for axis, names in at.items()} for name, at in loaded.panels.items()},
        "scales": [{"name": each.name, "about": each.about} for each in loaded.scales.values()],
        "axes": [
            {"name": axis, "values": [{"name": each.name, "title": each.title, "extra": each.extra} for each in values]}
            for axis, values in loaded.axes.items()
        ],
        "protocol": dict(loaded.protocol),
    }


def _cost(loaded: Recipe, args: argparse.Namespace) -> dict[str, Any]:
    """Return what the cells that are asked for cost on this machine: a timed round of each row, multiplied."""
    from halfmoon.studies import cost, grid
    from halfmoon.studies.sweep_folder import machine

    scale = loaded.scale(args.scale) if args.scale else None
    over = requested_options(args, TIMED)
    cells = grid.cells(loaded, grid.selection(loaded, args.only), None, scale, settings.resolve_paths(over, Path()))
    rows = {
        name: {
            "cell": row.cell,
            "seconds_per_round": round(row.seconds_per_round, 4),
            "runs": row.runs,
            "seconds": round(row.seconds, 3),
        }
        for name, row in cost.estimate_costs(loaded, cells).items()
    }
    return {
        "machine": cost.describe_machine(machine()),
        "scale": scale and {"name": scale.name, "about": scale.about},
        "of": loaded.rows,
        "rows": rows,
        "runs": sum(row["runs"] for row in rows.values()),
        "seconds": round(sum(row["seconds"] for row in rows.values()), 3),
    }


def _show_recipes(facts: Sequence[dict[str, Any]]) -> None:
    rows = [
        [
            *(each["name"], each["title"], f"{each['cells']:,}", str(len(each["seeds"]))),
            ", ".join(scale["name"] for scale in each["scales"]) or "-",
            each["about"],
        ]
        for each in facts
    ]
    print_table(["name", "title", "cells", "seeds", "scales", "what it is"], rows)
    print_text("in detail: halfmoon recipes NAME; to play one: halfmoon sweep NAME")


def _detail(facts: dict[str, Any]) -> None:
    print_text(f"{facts['name']}: {facts['title']}\n  {facts['about']}")
    if facts["reading"]:
        print_text(f"  reading: {facts['reading']}")
    seeds = ", ".join(map(str, facts["seeds"]))
    print_text(f"  {facts['cells']:,} cells, each with seeds {seeds}; cells that are alike share a run\n")
    for axis in facts["axes"]:
        names = [f"{value['name']}{' (with --only)' if value['extra'] else ''}" for value in axis["values"]]
        print_text(f"  {axis['name']}: {', '.join(names)}")
    for name, at in facts["panels"].items():
        words = "; ".join(f"{axis} {', '.join(names)}" for axis, names in at.items())
        print_text(f"  panel {name}: {words}")
    options = [f"{name} = {_text(value)}" for name, value in facts["protocol"].items()]
    print_text(f"\n  protocol: {', '.join(options) or 'the defaults'}")
    for scale in facts["scales"]:
        print_text(f"  scale {scale['name']}: {scale['about']}")
    if "cost" in facts:
        _show_cost(facts["cost"])
    else:
        print_text(f"\nwhat it costs here: halfmoon recipes {facts['name']} --time")


def _show_cost(cost: dict[str, Any]) -> None:
    if cost["scale"]:
        print_text(f"\n  SCALED DOWN, not the paper's experiment: {cost['scale']['about']}")
    print_text(f"\ncost on {cost['machine']}: a round of one cell of each row was timed, and multiplied")
    rows = [
        [name, each["cell"], f"{each['seconds_per_round']:.2f}", f"{each['runs']:,}", duration(each["seconds"])]
        for name, each in cost["rows"].items()
    ]
    rows.append(["all", "", "", f"{cost['runs']:,}", duration(cost["seconds"])])
    print_table([cost["of"], "timed", "s a round", "runs", "all runs"], rows)


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name} = {_text(each)}" for name, each in value.items()) + "}"
    return toml.format_text(value) if isinstance(value, bool | int | float | str) else str(value)


def add_tune(commands: Any, full: bool) -> None:
    """Add the command's parser; its help shows all options of a run where it is `full`."""
    parser = add_command(
        commands, "tune", "search options of a run by validation images", "--knob NAME=VALUES ... ", _tune
    )
    about = "an option to search: NAME=LOW..HIGH or NAME=VALUE,VALUE (METHOD.NAME of a method's own); may be repeated"
    parser.add_argument("--knob", metavar="NAME=VALUES", action="append", default=[], help=about)
    parser.add_argument("--trials", metavar="N", type=int, default=20, help="trials in all (default: 20)")
    about = "seeds that each trial is played with (default: 100; leave those that you report out)"
    parser.add_argument("--seeds", metavar="N", type=int, nargs="+", default=[100], help=about)
    left_out = ("baselines", "seed")
    add_options(parser, [name for name in settings.option_types() if name not in left_out], full)


def _tune(args: argparse.Namespace) -> int:
    """Search, and say what came out."""
    from rich.console import Console

    from halfmoon.cli import console as screen
    from halfmoon.studies.tuning import BEST, KNOBS, TABLE, Knob
    from halfmoon.studies.tuning import tune as search

    if args.trials < 1 or min(args.seeds) < 0:
        raise UserError("--trials must be at least 1, and --seeds whole numbers from 0.")
    values, flags, file = read_layers(args)
    knobs = [Knob.parse(words) for words in args.knob or KNOBS]
    config = settings.resolve(values, flags, file)
    folder = config.run_dir or settings.next_free_folder(config, "tune")
    console = Console(stderr=True)
    trials = search(config, knobs, args.trials, args.seeds, folder, lambda words: screen.say(console, words))
    if args.json:
        rows = [{"trial": each.number, "validation_accuracy": each.accuracy, "values": each.values} for each in trials]
        print_json({"folder": str(folder), "best": str(folder / BEST), "trials": rows})
        return 0
    names = [knob.name for knob in knobs]
    cells = [
        [
            str(each.number),
            "diverged" if each.accuracy is None else f"{100 * each.accuracy:.2f}",
            *(f"{value:.3g}" if isinstance(value := each.values[name], float) else str(value) for name in names),
        ]
        for each in trials[:10]
    ]
    print_table(["trial", "validation %", *names], cells)
    if config.budget != "none" and not (config.reference or config.steps or "steps" in names):
        words = f"Budget: what {config.method} takes by its own rule. compare gives every method the largest budget: "
        print_text(words + "to search for a comparison, name the method that takes most with --reference.")
    print_text(f"all trials: {folder / TABLE}\nthe best: halfmoon run --config {folder / BEST}")
    return 0
