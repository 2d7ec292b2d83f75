"""`halfmoon recipes` and `sweep`: list, time and run the tables and figures of papers; `tune`: search options."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halfmoon.cli.commands.base import (
    EXPLANATION_HEADER,
    add_command,
    add_explain_flag,
    add_option,
    add_options,
    add_tracker_flag,
    explanation_cells,
    explanation_fields,
    make_trackers,
    parse_int,
    print_json,
    print_table,
    print_text,
    print_warning,
    read_options,
    requested_options,
)
from halfmoon.config import schema as settings
from halfmoon.core import toml
from halfmoon.core.errors import UserError
from halfmoon.storage.events import EventPrinter

if TYPE_CHECKING:
    from halfmoon.studies.grid import GridExplanation
    from halfmoon.studies.recipe import Recipe, Value
    from halfmoon.studies.run_sweep import RunReport
    from halfmoon.studies.sweep_folder import SweepFolder
    from halfmoon.studies.tuning import Trial

TIME_OPTIONS = ("data_dir", "cache", "device", "executor", "threads", "workers")
"""Options of a run that change its time and not its results."""

EXECUTION_OPTIONS = (*TIME_OPTIONS, "memory_cap", "checkpoint_every")
"""Options of a run that do not change its results, so that they can be set for a whole sweep."""


def add(commands: Any) -> None:
    """Add the command's parser."""
    parser = add_command(
        commands, "sweep", "run a table or figure of a paper (see halfmoon recipes)", "RECIPE ", _sweep
    )
    parser.add_argument("recipe", metavar="RECIPE", help="the name of a recipe, or your TOML file")
    about = "run only cells with these values: AXIS=VALUE,AXIS=VALUE; repeat the flag or an axis to add values"
    parser.add_argument("--only", metavar="CELLS", action="append", default=[], help=about)
    parser.add_argument("--seeds", metavar="N", nargs="+", help="seeds of training and split (default: the recipe's)")
    parser.add_argument("--scale", metavar="NAME", help="a scaled-down version of the recipe, such as small")
    parser.add_argument(
        "--out", metavar="DIR", type=Path, default=Path("runs"), help="the folder of its output (default: runs)"
    )
    parser.add_argument("--jobs", metavar="N", default="1", help="runs at the same time on a machine (default: 1)")
    about = "where runs are executed: local processes, or a Ray cluster (needs the extra ray) (default: local)"
    parser.add_argument("--engine", choices=("local", "ray"), default="local", help=about)
    about = "the Ray cluster (default: RAY_ADDRESS, or the one on this machine, or one that is started for the sweep)"
    parser.add_argument("--ray-address", metavar="HOST:PORT", help=about)
    add_tracker_flag(parser)
    parser.add_argument("--dry-run", action="store_true", help="only list the runs")
    add_explain_flag(parser)
    group = parser.add_argument_group("machine")
    for name in EXECUTION_OPTIONS:
        add_option(group, name)


def _sweep(args: argparse.Namespace) -> int:
    """Run `halfmoon sweep`: train all cells of a recipe, and print its table; return 1 if a run failed."""
    from halfmoon.studies import grid, recipe
    from halfmoon.studies.sweep_folder import SweepFolder, build_table, count_cores

    plan = recipe.load(args.recipe)
    scale = plan.scale(args.scale) if args.scale else None
    jobs = parse_int("--jobs", args.jobs, 1)
    # Absolute paths, because a worker on another machine has another current folder.
    machine_options = settings.resolve_paths(requested_options(args, EXECUTION_OPTIONS), Path())
    # Every process would use all cores: share them, or several runs at once are slower than one after another.
    computed_options: dict[str, Any] = {}
    if jobs > 1 and args.engine == "local" and "threads" not in machine_options:
        computed_options["threads"] = max(1, count_cores() // jobs)
    seeds = [parse_int("--seeds", text, 0) for text in args.seeds] if args.seeds else None  # None: the recipe's
    selection = grid.parse_selection(plan, args.only)
    cells = grid.build_cells(plan, selection, seeds, scale, overrides={**machine_options, **computed_options})
    if args.explain and args.dry_run:
        raise UserError("{explain} and {dry_run} print different lists: choose one.", option=("explain", "dry_run"))
    if args.explain:
        seeds_layer = f"recipe {plan.name}" if seeds is None else "flag"
        return _print_explanation(grid.explain_cells(cells, seeds_layer, computed_options), args.json)
    command = shlex.join(["halfmoon", *args.words])
    folder = SweepFolder(args.out, plan, scale)
    if args.dry_run:
        return _print_cells(cells, args.json)
    # A sweep can be run in pieces, by several commands: its table names all of them.
    commands = [*folder.read().get("command", "").splitlines(), command]
    folder = replace(folder, command="\n".join(dict.fromkeys(commands)))
    # Read the file again after the runs: it also has the cells of earlier commands.
    code = _run_cells(args, folder, cells, jobs)
    contents = folder.read()
    if args.json:
        print_json({"folder": str(folder.path), **contents})
    else:
        if scale is not None:
            print_text(f"SCALED DOWN, not the paper's experiment: {scale.about}")
        headings, rows = build_table(contents)
        print_table(headings, rows)
        print_text(f"sweep folder: {folder.path}\nas a page: halfmoon report {folder.path} --out page.html", wrap=False)
    return code


def _run_cells(args: argparse.Namespace, folder: SweepFolder, cells: list[Any], jobs: int) -> int:
    """Train the runs of a sweep with a progress display, which fill the cells of a paper's table.

    Args:
        args: the parsed command line.
        folder: the sweep folder, to which results are written.
        cells: the cells, each with a configuration for every seed.
        jobs: the number of runs at the same time.

    Returns:
        The exit code: 1 if a run failed, 130 after Ctrl-C.
    """
    from rich.console import Console

    from halfmoon.runs.callbacks import Callbacks
    from halfmoon.runs.progress import duration, make_progress, print_line, wrap_lines
    from halfmoon.runs.workers import make_sweep_executor
    from halfmoon.studies.run_sweep import run_sweep

    console = Console(stderr=True)

    def print_step(step: RunReport) -> None:
        """Print the result of a finished run in one line."""
        text = f"[{step.number}/{step.runs}] {step.label}: "
        if step.failed:
            text += f"failed: {step.failed}"
        elif step.summary and "accuracy" in step.summary:
            accuracy = step.summary["accuracy"]
            text += f"last {100 * accuracy['last']:.2f}, best {100 * accuracy['best']:.2f} %"
            text += ", finished before" if step.finished_before else f" ({duration(step.summary['seconds'])})"
        else:
            text += "finished"
        print_line(console, wrap_lines(text, console.width) if console.is_terminal else text)

    # Lines of several runs at once would mix; a line for each finished run remains.
    progress = make_progress(console, args.json or jobs > 1 or args.engine == "ray")
    try:
        # Ray prints to stdout, which is only for results.
        with redirect_stdout(sys.stderr), progress, ExitStack() as cleanup:
            trackers = Callbacks(*make_trackers(args))
            executor = make_sweep_executor(args.engine, jobs, args.ray_address)
            cleanup.callback(executor.close)
            # With several processes, trackers run in the workers; the progress display cannot be sent there.
            is_here = args.engine != "ray" and jobs == 1
            callback = Callbacks(progress, trackers, failures=progress) if is_here else trackers
            # Only the machines of a cluster need to have the data and a GPU.
            failed = run_sweep(folder, cells, executor, print_step, callback, check_first=args.engine != "ray")
    except KeyboardInterrupt:
        if args.debug:
            raise
        return print_warning("stopped; run the same command again to continue.", 130)
    return 1 if failed else 0


def _print_cells(cells: list[Any], as_json: bool) -> int:
    """Print the runs that a sweep would train: its cell of the paper's table, its seed, and a hash of its configuration.

    Cells with the same hash share a run.
    """
    headings = ("cell", "seed", "identity")
    rows = []
    for cell in cells:
        for seed, config in cell.configs.items():
            identity = settings.identity(config, config.method)
            rows.append((cell.label, str(seed), identity[:16]))
    if as_json:
        print_json([dict(zip(headings, row, strict=True)) for row in rows])
    else:
        print_table(headings, rows)
    return 0


def _print_explanation(explanation: GridExplanation, as_json: bool) -> int:
    """Print the options that are not at their defaults: those of all runs, then for each cell those that differ."""
    if as_json:
        cells = []
        for cell, rows in explanation.cells:
            options = [explanation_fields(row) for row in rows]
            cells.append({"cell": cell.label, "seeds": list(cell.configs), "options": options})
        print_json({"common": [explanation_fields(row) for row in explanation.common], "cells": cells})
        return 0
    count = sum(len(cell.configs) for cell, _ in explanation.cells)
    if explanation.common:
        print_text(f"options of all {count:,} runs")
        print_table(EXPLANATION_HEADER, [explanation_cells(row) for row in explanation.common])
    for cell, rows in explanation.cells:
        if rows:
            print_text(f"\n{cell.label}")
            print_table(EXPLANATION_HEADER, [explanation_cells(row) for row in rows])
    return 0


def add_recipes(commands: Any) -> None:
    """Add the command's parser."""
    about = "list the tables and figures that sweep runs; with --time, estimate the time of one on this machine"
    parser = add_command(commands, "recipes", about, "[NAME ...] ", _recipes)
    parser.add_argument(
        "names", metavar="NAME", nargs="*", help="only these recipes or TOML files; a single one in detail"
    )
    about = "estimate the time: train one round of one cell of each row, and multiply"
    parser.add_argument("--time", action="store_true", help=about)
    parser.add_argument("--scale", metavar="NAME", help="with --time: a scaled-down version, such as small")
    about = "with --time: only these cells: AXIS=VALUE,AXIS=VALUE, as in halfmoon sweep"
    parser.add_argument("--only", metavar="CELLS", action="append", default=[], help=about)
    group = parser.add_argument_group("machine")
    for name in TIME_OPTIONS:
        add_option(group, name)


def _recipes(args: argparse.Namespace) -> int:
    """Run `recipes`: list recipes, print one in detail, or estimate its time."""
    from halfmoon.studies.recipe import list_names, load

    loaded_recipes = [load(name) for name in args.names or list_names()]
    if args.time and len(loaded_recipes) != 1:
        raise UserError("--time needs one recipe: write, for example, halfmoon recipes feddure-table1 --time.")
    if not args.time and (args.scale or args.only):
        raise UserError("{scale} and {only} need {time}.", option=("scale", "only", "time"))
    machine_flags = requested_options(args, TIME_OPTIONS)
    if machine_flags and not args.time:
        name = next(iter(machine_flags))
        raise UserError(f"{{{name}}} needs {{time}}: a list of recipes trains nothing.", option=(name, "time"))
    descriptions = [_describe_recipe(recipe) for recipe in loaded_recipes]
    if args.time:
        descriptions[0]["cost"] = _estimate_cost(loaded_recipes[0], args)
    if args.json:
        print_json({"recipes": descriptions})
    elif len(descriptions) == 1:
        _print_recipe(descriptions[0])
    else:
        _print_recipes(descriptions)
    return 0


def duration(seconds: float | None) -> str:
    """Format seconds in a suitable unit, from seconds to years; `-` for None."""
    if seconds is None:
        return "-"
    # 1.5 units: "80 min" is easier to read than "1.3 hours".
    for size, unit in ((31_557_600, "years"), (86_400, "days"), (3_600, "hours"), (60, "min")):
        if seconds >= 1.5 * size:
            return f"{seconds / size:,.1f} {unit}" if seconds < 10 * size else f"{seconds / size:,.0f} {unit}"
    return f"{seconds:.0f} s"


def _describe_recipe(loaded: Recipe) -> dict[str, Any]:
    """Describe a recipe, the runs of a paper's table or figure, as fields of the JSON output.

    Fields whose names do not explain themselves:

    - "item": the table or figure, such as "Table 1".
    - "reading": how the paper is interpreted where it is ambiguous.
    - "kind": what is drawn, such as "table".
    - "axes": what varies, such as the method and the data set; "cells" counts the combinations of their values.
    - "panels": parts of a figure, and the values of axes that each of them shows.
    - "scales": scaled-down versions of the experiment.
    - "protocol": the options of all runs.
    """
    from halfmoon.studies import grid

    return {
        "name": loaded.name,
        "title": loaded.title,
        "paper": loaded.paper,
        "item": loaded.item,
        "about": loaded.about,
        "reading": loaded.describe_reading(scale=None),
        "kind": loaded.kind,
        "cells": len(grid.list_combinations(loaded, selection={})),
        "seeds": list(loaded.seeds),
        "panels": {
            panel: {axis: list(names) for axis, names in selection.items()}
            for panel, selection in loaded.panels.items()
        },
        "scales": [{"name": scale.name, "about": scale.about} for scale in loaded.scales.values()],
        "axes": [{"name": axis, "values": _describe_values(values)} for axis, values in loaded.axes.items()],
        "protocol": dict(loaded.protocol),
    }


def _describe_values(values: Iterable[Value]) -> list[dict[str, Any]]:
    """Describe the values of an axis of a recipe as fields of the JSON output."""
    return [{"name": value.name, "title": value.title, "extra": value.extra} for value in values]


def _estimate_cost(loaded: Recipe, args: argparse.Namespace) -> dict[str, Any]:
    """Estimate the time of a paper's table on this machine, from one timed round of each row.

    Args:
        loaded: the recipe, which describes the table and its runs.
        args: the parsed command line; `--only` selects cells of the table, and `--scale` a shortened experiment.

    Returns:
        Fields of the JSON output; "of" is the axis whose values are the rows, such as "method".
    """
    from halfmoon.studies import cost, grid
    from halfmoon.studies.sweep_folder import detect_machine

    scale = loaded.scale(args.scale) if args.scale else None
    machine_options = settings.resolve_paths(requested_options(args, TIME_OPTIONS), Path())
    selection = grid.parse_selection(loaded, args.only)
    # A cell is a combination of values of the table's axes, with one run for each of the recipe's seeds.
    cells = grid.build_cells(loaded, selection, seeds=None, scale=scale, overrides=machine_options)
    rows = {}
    for name, row in cost.estimate_costs(loaded, cells).items():
        rows[name] = {
            "cell": row.cell,
            "seconds_per_round": round(row.seconds_per_round, 4),
            "runs": row.runs,
            "seconds": round(row.seconds, 3),
        }
    return {
        "machine": cost.describe_machine(detect_machine()),
        "scale": None if scale is None else {"name": scale.name, "about": scale.about},
        "of": loaded.rows,
        "rows": rows,
        "runs": sum(row["runs"] for row in rows.values()),
        "seconds": round(sum(row["seconds"] for row in rows.values()), 3),
    }


def _print_recipes(recipes: Sequence[dict[str, Any]]) -> None:
    """Print a table of recipes, from the fields of `_describe_recipe`."""
    rows = []
    for recipe in recipes:
        scales = ", ".join(scale["name"] for scale in recipe["scales"]) or "-"
        seeds = str(len(recipe["seeds"]))
        rows.append([recipe["name"], recipe["title"], f"{recipe['cells']:,}", seeds, scales, recipe["about"]])
    print_table(["name", "title", "cells", "seeds", "scales", "description"], rows)
    print_text("in detail: halfmoon recipes NAME; to run one: halfmoon sweep NAME")


def _print_recipe(recipe: dict[str, Any]) -> None:
    """Print a recipe in detail, from the fields of `_describe_recipe`."""
    print_text(f"{recipe['name']}: {recipe['title']}\n  {recipe['about']}")
    if recipe["reading"]:
        print_text(f"  reading: {recipe['reading']}")
    seeds = ", ".join(map(str, recipe["seeds"]))
    print_text(f"  {recipe['cells']:,} cells, each with seeds {seeds}; cells with the same configuration share a run\n")
    for axis in recipe["axes"]:
        names = [f"{value['name']}{' (with --only)' if value['extra'] else ''}" for value in axis["values"]]
        print_text(f"  {axis['name']}: {', '.join(names)}")
    for name, selection in recipe["panels"].items():
        restriction = "; ".join(f"{axis} {', '.join(names)}" for axis, names in selection.items())
        print_text(f"  panel {name}: {restriction}")
    options = [f"{name} = {_text(value)}" for name, value in recipe["protocol"].items()]
    print_text(f"\n  protocol: {', '.join(options) or 'the defaults'}")
    for scale in recipe["scales"]:
        print_text(f"  scale {scale['name']}: {scale['about']}")
    if "cost" in recipe:
        _print_cost(recipe["cost"])
    else:
        print_text(f"\nestimate its time here: halfmoon recipes {recipe['name']} --time")


def _print_cost(cost: dict[str, Any]) -> None:
    """Print the estimated time of each row of a recipe, from the fields of `_estimate_cost`."""
    if cost["scale"]:
        print_text(f"\n  SCALED DOWN, not the paper's experiment: {cost['scale']['about']}")
    print_text(f"\ncost on {cost['machine']}: one round of one cell of each row was timed, and multiplied")
    rows = [
        [name, row["cell"], f"{row['seconds_per_round']:.2f}", f"{row['runs']:,}", duration(row["seconds"])]
        for name, row in cost["rows"].items()
    ]
    rows.append(["all", "", "", f"{cost['runs']:,}", duration(cost["seconds"])])
    print_table([cost["of"], "timed", "s a round", "runs", "all runs"], rows)


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name} = {_text(each)}" for name, each in value.items()) + "}"
    return toml.format_text(value) if isinstance(value, bool | int | float | str) else str(value)


def add_tune(commands: Any, full: bool) -> None:
    """Add the parser of `tune`; with `full` its help shows all options of a run."""
    parser = add_command(
        commands, "tune", "search options of a run by validation images", "--knob NAME=VALUES ... ", _tune
    )
    about = "an option to search: NAME=LOW..HIGH or NAME=VALUE,VALUE (METHOD.NAME for an option of a method); may be repeated"
    parser.add_argument("--knob", metavar="NAME=VALUES", action="append", default=[], help=about)
    parser.add_argument("--trials", metavar="N", type=int, default=20, help="number of trials (default: 20)")
    about = "seeds of each trial (default: 100; do not use the seeds of your results)"
    parser.add_argument("--seeds", metavar="N", type=int, nargs="+", default=[100], help=about)
    excluded = ("baselines", "seed")
    add_options(parser, [name for name in settings.option_types() if name not in excluded], full)


SHOWN_TRIALS = 10
"""Largest number of trials in the printed table."""


def _print_trials(trials: Sequence[Trial], names: Sequence[str]) -> None:
    """Print a table of trials of a search: the accuracy, and the values of the searched options `names`."""
    rows = []
    for trial in trials:
        accuracy = "diverged" if trial.accuracy is None else f"{100 * trial.accuracy:.2f}"
        values = [trial.values[name] for name in names]
        texts = [f"{value:.3g}" if isinstance(value, float) else str(value) for value in values]
        rows.append([str(trial.number), accuracy, *texts])
    print_table(["trial", "validation %", *names], rows)


def _tune(args: argparse.Namespace) -> int:
    """Run `halfmoon tune`: search options of a run by validation images, and print the best trials.

    A knob is an option that is searched, with its range or choices. Each trial trains with one value of every knob, once
    for each seed.
    """
    from halfmoon.studies.tuning import BEST, DEFAULT_KNOBS, TABLE, Knob
    from halfmoon.studies.tuning import tune as search

    if args.trials < 1 or min(args.seeds) < 0:
        raise UserError("--trials must be at least 1, and --seeds whole numbers from 0.")
    file_options, flags, file = read_options(args)
    knobs = [Knob.parse(text) for text in args.knob or DEFAULT_KNOBS]
    config = settings.resolve(file_options, flags, file)
    folder = config.run_dir or settings.next_free_folder(config, "tune")
    # All trials in the folder, the best first. With enough trials from an earlier call nothing is trained.
    trials = search(config, knobs, args.trials, args.seeds, folder, EventPrinter(sys.stderr))
    if args.json:
        rows = [
            {"trial": trial.number, "validation_accuracy": trial.accuracy, "values": trial.values} for trial in trials
        ]
        print_json({"folder": str(folder), "best": str(folder / BEST), "trials": rows})
        return 0
    names = [knob.name for knob in knobs]
    _print_trials(trials[:SHOWN_TRIALS], names)
    # The steps of each round are neither set nor searched, so they are the method's own, which `compare` may raise.
    if config.budget != "none" and not (config.reference or config.steps or "steps" in names):
        print_text(
            f"Budget: the default steps of {config.method}. compare gives every method the largest budget of all: to "
            "search for a comparison, name the method with the largest budget with --reference."
        )
    print_text(f"all trials: {folder / TABLE}\nthe best: halfmoon run --config {folder / BEST}", wrap=False)
    return 0
