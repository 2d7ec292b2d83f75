"""The command line: `halfmoon COMMAND`.

Flags are the options of `halfmoon.config.schema` and override a TOML file. Every mistake ends in one sentence on
stderr: exit code 2 for a mistake of the user, 1 for a run that failed, 130 for Ctrl-C.
"""

from __future__ import annotations

import argparse
import errno
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from halfmoon.cli import own
from halfmoon.cli.commands import base, data, federation, methods, paged, privacy, report, site, sweep, trained
from halfmoon.config import preset, retired
from halfmoon.config import schema as settings
from halfmoon.config.schema import Config
from halfmoon.core.errors import UserError, suggest
from halfmoon.storage import toml

if TYPE_CHECKING:
    from halfmoon.runs.runner import Callback, RunResult
    from halfmoon.studies.plan import Plan
    from halfmoon.studies.run_plan import PlanResult

Outcome = TypeVar("Outcome")

MAIN_JOB: dict[str, Any] = {
    "baselines": ("fedavg", "fedavg-control", "fedavg-fixmatch", "fedavg-sl"),
    "setting": "iid-dir", "rounds": 80, "lr": 6e-3, "steps": 6, "unlabeled_batch": 30, "labeling": "running",
    "options": {"labels": "round", "regulator_bias": 0.0, "fedavg-fixmatch": {"labels": "round", "threshold": 0.7},
                "fedavg-control": {"labels": "round"}},
}  # fmt: skip
"""What `halfmoon run` without a method and a file sets: the recipe for digits, chosen on validation images."""

OTHER_DATA = ("fedavg", "fedavg-control", "fedavg-fixmatch-global", "fedavg-soft-labels", "fedavg-sl")
"""The methods beside FedDure where `halfmoon run` names other data and no method."""

OTHERS = (
    methods.add, data.add, sweep.add_recipes, sweep.add, report.add, federation.add_federation,
    site.add, federation.add_serve, trained.add, paged.add_watch, privacy.add, methods.add_check,
)  # fmt: skip
"""What adds the other commands."""

OTHER_NAMES = {
    "train": "run",
    "fit": "run",
    "simulate": "run",
    "search": "tune",
    "list": "methods",
    "datasets": "data",
    "test": "evaluate",
    "eval": "evaluate",
    "infer": "predict",
    "plot": "report",
    "dashboard": "watch",
    "server": "serve",
    "client": "site join",
    "join": "site join",
    "label": "site label",
    "terms": "site terms",
}
"""The commands by names that other programs give them."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        code = _main(words)
        sys.stdout.flush()
        return code
    except SystemExit as done:  # argparse, after --help and --version
        return int(done.code or 0)
    except BrokenPipeError:
        # Whoever read the output has seen enough; nothing may be written when Python closes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (base.CommandExit, UserError, RuntimeError, KeyboardInterrupt, OSError) as error:
        if "--debug" in words and isinstance(error, base.CommandExit) and error.__cause__ is not None:
            raise error.__cause__ from None
        if "--debug" in words or (end := _end(error)) is None:
            raise
        return base.print_warning(*end)


def _end(error: BaseException) -> tuple[str, int] | None:
    if isinstance(error, base.CommandExit):
        return str(error), error.code
    if isinstance(error, UserError):
        cause = error.__cause__
        full = isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO)
        return str(error), 1 if full else 2
    if isinstance(error, OSError):
        return f"{error.filename or 'a file'}: {error.strerror or error}.", 1
    if isinstance(error, KeyboardInterrupt):
        return "stopped.", 130
    from halfmoon.engine.driver import Diverged

    return (str(error), 1) if isinstance(error, Diverged) else None


def _main(words: list[str]) -> int:
    """Parse and do; every mistake is raised."""
    parser, commands = _parser("--help-all" in words)
    _refuse_removed_command(words, commands)
    if words and not words[0].startswith("-") and words[0] not in commands:
        near = OTHER_NAMES.get(words[0])
        hint = f"did you mean {near!r}?" if near else suggest(words[0], commands)
        raise UserError(f"unknown command {words[0]!r}: {hint}")
    if words and words[0] in base.TRAINED and any(word.split("=")[0] == "--model" for word in words):
        raise base.model_flag_error(words[0])
    words = ["--help" if word == "--help-all" else word for word in words]
    if not words:
        parser.print_help()
        return 0
    args, rest = parser.parse_known_args(words)
    if rest:
        raise base.unknown_argument_error(args, rest, commands)
    if args.command is None:
        raise UserError(f"no command is given: {suggest('', commands)}")
    args.words = words
    return base.run_command(args, args.do)


def _refuse_removed_command(words: Sequence[str], commands: Mapping[str, argparse.ArgumentParser]) -> None:
    """Raise `UserError` if the first words are a removed command, or a removed action of a command."""
    if not words or words[0].startswith("-"):
        return
    if words[0] not in commands:
        error = retired.command_error(words[0])
    elif len(words) > 1 and words[1] not in base.action_names(commands[words[0]]):
        error = retired.command_error(f"{words[0]} {words[1]}")
    else:
        error = None
    if error is not None:
        raise error


def _parser(full: bool) -> tuple[base.Parser, Mapping[str, argparse.ArgumentParser]]:
    parser = base.Parser(prog="halfmoon", description=metadata.metadata("halfmoon")["Summary"], allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"halfmoon {metadata.version('halfmoon')}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=base.Parser)

    run = base.add_command(
        commands, "run", "train a method; without --method and --config: the main job on digits", "", _run
    )
    own.sites_flags(run)
    own.plan_flags(run)
    _add_explain_flag(run)
    base.add_tracker_flag(run)
    _wide(run)
    base.add_options(run, list(settings.option_types()), full)

    compare = base.add_command(
        commands, "compare", "train several methods on the same split and cohorts", "--methods NAME ... ", _compare
    )
    compare.add_argument("--methods", nargs="+", metavar="NAME", required=True, help="the methods to compare")
    compare.add_argument("--seeds", nargs="+", metavar="N", default=["0"], help="seeds of training (default: 0)")
    _add_explain_flag(compare)
    base.add_tracker_flag(compare)
    _wide(compare)
    base.add_options(
        compare, [name for name in settings.option_types() if name not in ("method", "baselines", "seed")], full
    )

    sweep.add_tune(commands, full)

    resume = base.add_command(commands, "resume", "go on with a run that was stopped", "DIR ", _resume)
    resume.add_argument("folder", type=Path, metavar="DIR", help="the run folder")
    base.add_unchecked_flag(resume)
    base.add_tracker_flag(resume)
    _wide(resume)

    for add in OTHERS:
        add(commands)
    return parser, commands.choices


def _add_explain_flag(parser: argparse.ArgumentParser) -> None:
    about = "print the options that are not at their defaults, and which layer sets each, and exit without training"
    parser.add_argument("--explain", action="store_true", help=about)


def _print_explanation(
    args: argparse.Namespace, config: Config, layers: Mapping[str, Mapping[str, Any]], fallback: str = "computed"
) -> int:
    """Print the options that are not at their defaults, and the layer that sets each.

    Args:
        args: the parsed command line; with `--json` the rows are printed as JSON.
        config: the resolved configuration.
        layers: name of a layer to its options, highest priority first.
        fallback: the layer to name for values that are in none of `layers`.
    """
    from halfmoon.config.explain import Layer, explain_options  # slow to import: it loads torch

    rows = explain_options(config, [Layer(name, options) for name, options in layers.items()], fallback)
    if args.json:
        options = []
        for row in rows:
            value = row.value if isinstance(row.value, bool | int | float | str | tuple) else str(row.value)
            options.append({"option": row.name, "value": value, "layer": row.layer})
        base.print_json({"options": options})
        return 0
    cells = []
    for row in rows:
        if isinstance(row.value, tuple):
            text = " ".join(map(str, row.value))
        else:
            text = str(row.value)
        cells.append([row.name, text, row.layer])
    base.print_table(["option", "value", "set by"], cells)
    return 0


def _wide(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--wide", action="store_true", help="print all columns, also those beyond 80 characters")


def _run(args: argparse.Namespace) -> int:
    values, flags, file = base.read_layers(args)
    if args.sites:
        config, folders = own.rehearsal_of(args, {**values, **flags}, file)
        if args.explain:
            recipe = {} if args.config else own.RECIPE
            layers = {"flag": flags, f"file {file}": values, "recipe of --sites": recipe}
            return _print_explanation(args, config, layers)
        assert config.run_dir is not None
        from halfmoon.studies.site_rehearsal import estimate_gains, rehearse

        root, again = config.run_dir, "the same command goes on"
        return _play(
            args,
            root,
            lambda watch: (
                rehearse(config, folders, root, watch),
                estimate_gains(folders, config.group_pattern, watch),
            ),
            own.print_rows,
            again,
        )
    own.refuse_federation(args.config, values, flags)
    if (plan := own.planned(args, flags)) is not None:
        if args.explain:
            return _print_explanation(args, plan.config, {"flag": flags}, "plan of the folder")
        return _play_plan(args, plan)
    if args.config is None and not {"method", "baselines"} & flags.keys():
        recipe = _main_job(flags)
    else:
        recipe = flags
    config = settings.resolve(values, _at_once(values, recipe), file)
    if args.explain:
        layers = {
            "flag": flags,
            f"file {file}": values,
            "recipe of halfmoon run": recipe,
            "halfmoon run": _at_once(values, {}),
        }
        return _print_explanation(args, config, layers)
    flags = recipe
    if {**values, **flags}.get("method") == preset.RECOMMENDED:
        print(f"recommended with labels at {config.labels_at}: {config.method}", file=sys.stderr)
    _note(config, {**values, **flags})
    folder = config.run_dir or settings.next_free_folder(config, config.method)
    from halfmoon.runs import runner

    rows = 1 + len(config.baselines)
    return _play(args, folder, lambda watch: runner.start(replace(config, run_dir=folder), watch), rows=rows)


def _play_plan(args: argparse.Namespace, plan: Plan) -> int:
    if args.plan or not args.json:
        own.show_plan(plan, args.json)
    if args.plan:
        return 0
    return _play_rows(args, plan, plan.config.run_dir or settings.next_free_folder(plan.config, plan.config.method))


def _play_rows(args: argparse.Namespace, plan: Plan, folder: Path, again: bool = False) -> int:
    from halfmoon.studies.run_plan import run_plan

    def show(args: argparse.Namespace, folder: Path, result: PlanResult) -> None:
        if result.outcome is not None:
            base.print_run_result(result.outcome, args.json, args.wide, result.decision)
        own.show_played(plan, result, folder, args.json)

    return _play(
        args, folder, lambda watch: run_plan(plan, folder, watch, again), show, "", plan.runs, plan.seconds_after_runs
    )


def _note(config: Config, requested: Mapping[str, Any]) -> None:
    from halfmoon.methods import registry

    if registry.entry(config.method).pooled:
        federated = f"fedavg-{config.method}"
        hint = f"; {federated} is its federated form" if federated in registry.names() else ""
        base.print_warning(f"{config.method} is centralized: it trains on all rows in one place{hint}.")
    for name, (value, cause) in preset.displaced_protocol_values(requested).items():
        flag = f"--{name.replace('_', '-')} {toml.format_text(value)}"
        base.print_warning(f"protocol {requested['protocol']} sets {name}, but not beside {cause}: {flag} keeps it.")


def _main_job(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return the main job's options under those of the command line; other data take the recipe for few labels."""
    if {"protocol", "preset"} & flags.keys():
        return {"baselines": MAIN_JOB["baselines"], **flags}
    if flags.get("data", Config.data) != Config.data:
        return {"baselines": OTHER_DATA, "protocol": "few-labels", **flags}
    without = preset.displaced_options(flags)
    recipe = {name: value for name, value in MAIN_JOB.items() if name not in without}
    return {
        **recipe,
        **flags,
        "options": settings.merge_method_options(recipe["options"], flags.get("options", {}), "--option"),
    }


def _at_once(values: Mapping[str, Any], flags: dict[str, Any]) -> dict[str, Any]:
    """Return the flags that play runs side by side where nothing says how many.

    A program that calls halfmoon has to say it: a process that is started imports the program's file again.
    """
    return flags if "processes" in values else {"processes": "auto", **flags}


def _compare(args: argparse.Namespace) -> int:
    values, flags, file = base.read_layers(args)
    seeds = []
    for word in args.seeds:
        if not word.isdecimal() or len(word) > 100:
            raise UserError(f"--seeds is {word!r}: it must be whole numbers from 0.")
        seeds.append(int(word))
    for layer in (values, flags):
        bare = [name for name, value in layer.get("options", {}).items() if not isinstance(value, Mapping)]
        if bare:
            raise UserError(
                f"option {bare[0]!r} does not say of which method: in a comparison write {args.methods[0]}.{bare[0]}."
            )
    flags |= {"method": args.methods[0], "baselines": ()}
    config = settings.resolve(values, _at_once(values, flags), file)
    if args.explain:
        layers = {"flag": flags, f"file {file}": values, "halfmoon compare": _at_once(values, {})}
        return _print_explanation(args, config, layers)
    folder = config.run_dir or settings.next_free_folder(config, "compare")
    from halfmoon.runs import runner

    config = replace(config, run_dir=folder)
    rows = len(args.methods) * len(seeds)
    return _play(args, folder, lambda watch: runner.compare(config, args.methods, seeds, watch), rows=rows)


def _resume(args: argparse.Namespace) -> int:
    from halfmoon.runs import runner
    from halfmoon.studies.run_plan import load_plan

    if (plan := load_plan(args.folder)) is not None:
        return _play_rows(args, plan, args.folder, again=True)
    return _play(args, args.folder, lambda watch: runner.resume(args.folder, watch))


def _outcome(args: argparse.Namespace, folder: Path, outcome: RunResult) -> None:
    base.print_run_result(outcome, as_json=args.json, wide=args.wide)


def _play(
    args: argparse.Namespace,
    folder: Path,
    play: Callable[[Callback], Outcome],
    show: Callable[[argparse.Namespace, Path, Outcome], None] = _outcome,
    again: str = "",
    rows: int = 0,
    after: float = 0.0,
) -> int:
    """Play runs before the user's eyes and show what came out; `again`: how to go on, if not by `halfmoon resume`.

    There are so many `rows`, where that is known, and `after` seconds of other work follow.
    """
    from rich.console import Console

    from halfmoon.cli.console import watcher
    from halfmoon.engine.driver import Diverged
    from halfmoon.runs.callbacks import Callbacks

    watch = watcher(Console(stderr=True), args.json, rows, after)
    base.interrupt_on_sigterm()
    tracking = base.make_trackers(args)
    try:
        with watch:
            outcome = play(Callbacks(watch, *tracking, warn=watch.say))
    except KeyboardInterrupt as error:
        raise base.CommandExit(f"stopped; {again or _way_back(folder) or 'nothing was saved yet.'}", 130) from error
    except Diverged as error:
        raise base.CommandExit(f"{error} The run folder is {folder}.") from error
    except (MemoryError, RuntimeError) as error:
        if (words := base.describe_out_of_memory(error)) is None:
            raise
        way_back = again or _way_back(folder)
        intact = f"What was saved is intact: {way_back}" if way_back else "Nothing was saved yet."
        raise base.CommandExit(f"{words} {intact}") from error
    if not watch.runs:
        watch.say(f"{folder} is finished already; this is what came out.")
    show(args, folder, outcome)
    return 0


def _way_back(folder: Path) -> str:
    """Return how to go on with a run that was stopped, nothing where nothing was saved."""
    from halfmoon.storage.folder_writer import resume_command

    saved = any((folder / name).exists() for name in ("run.json", "comparison.json"))
    return f"go on with: {resume_command(folder)}" if saved else ""
