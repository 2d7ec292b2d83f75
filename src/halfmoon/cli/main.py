"""The command line: `halfmoon COMMAND`.

Flags are the options of `halfmoon.config.schema` and override a TOML file. Errors are printed to stderr in one
sentence. Exit codes: 2 for a mistake of the user, 1 for a run that failed, 130 for Ctrl-C.
"""

from __future__ import annotations

import argparse
import errno
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from importlib import metadata
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halfmoon.cli import studies
from halfmoon.cli.commands import base, data, federation, methods, paged, privacy, report, site, sweep, trained
from halfmoon.config import preset, retired
from halfmoon.config import schema as settings
from halfmoon.config.schema import Config
from halfmoon.core import toml
from halfmoon.core.errors import RESUME, UserError, as_flag, suggest
from halfmoon.core.versions import installed_version
from halfmoon.storage import atomic_io

if TYPE_CHECKING:
    from halfmoon.runs.runner import Callback
    from halfmoon.studies.plan import Plan

MAIN_JOB: dict[str, Any] = {
    "baselines": ("fedavg", "fedavg-control", "fedavg-fixmatch", "fedavg-sl"),
    "setting": "iid-dir", "rounds": 80, "lr": 6e-3, "steps": 6, "unlabeled_batch": 30, "labeling": "running",
    "options": {"labels": "round", "regulator_bias": 0.0, "fedavg-fixmatch": {"labels": "round", "threshold": 0.7},
                "fedavg-control": {"labels": "round"}},
}  # fmt: skip
"""Options of `halfmoon run` without a method and a file: the recipe for digits, chosen on validation images."""

RECOMMENDATION_LIMITS = {
    "fedavg-soft-labels": "; it gained nothing over fedavg-control on X-rays: add --baselines fedavg fedavg-control",
    "fedavg": "; no method gained over it",
    "fl2": "; it gained on Fashion-MNIST and lost on X-rays: add --baselines partially-supervised",
}
"""Results of docs/choosing.md that limit the recommendation of a method."""

OTHER_DATA_BASELINES = ("fedavg", "fedavg-control", "fedavg-fixmatch-global", "fedavg-soft-labels", "fedavg-sl")
"""Baselines of `halfmoon run` with other data than the digits and without a method."""

COMMAND_BUILDERS = (
    methods.add, data.add, sweep.add_recipes, sweep.add, report.add, federation.add_federation,
    site.add, federation.add_serve, trained.add, paged.add_watch, privacy.add, methods.add_check,
)  # fmt: skip
"""Functions that add the other commands, in the order of `halfmoon --help`."""

COMMAND_SYNONYMS = {
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
"""Names of commands in other programs, and the commands of halfmoon, for the error about an unknown command."""


SKIP_FLAG = "--skip-unreadable"
SKIPPING_COMMANDS = ("run", "compare", "tune", "data")
"""Commands with the flag `SKIP_FLAG`."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    Errors of the user and of the machine are printed as one sentence. `--debug` raises them with their traceback, as
    always happens for a bug.

    Args:
        argv: the arguments after the program's name; None for those of this process.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    base.replace_unencodable_characters()
    try:
        code = _run_command_line(arguments)
        # Flush inside `try`: with a closed pipe the write fails here and not at exit of the interpreter.
        sys.stdout.flush()
        return code
    except SystemExit as error:  # argparse, after --help and --version
        return int(error.code or 0)
    except BrokenPipeError:
        # The reader, such as `head`, has closed the pipe. Python flushes stdout at exit, which must not fail a second time.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (base.CommandExit, UserError, RuntimeError, KeyboardInterrupt, OSError) as error:
        # Too many images are unreadable, and the user agrees at the terminal to leave them out: re-run the command.
        if _is_skip_confirmed(error, arguments):
            return main([*arguments, SKIP_FLAG])
        if "--debug" in arguments:
            # A command raises CommandExit for a message and an exit code; its cause has the traceback.
            if isinstance(error, base.CommandExit) and error.__cause__ is not None:
                raise error.__cause__ from None
            raise
        message_and_code = _describe_error(error, arguments)
        if message_and_code is None:  # a bug
            raise
        message, code = message_and_code
        return base.print_warning(message, code)


def _is_skip_confirmed(error: BaseException, arguments: Sequence[str]) -> bool:
    """Ask at a terminal whether many unreadable images are left out, if `error` is about them; True for yes."""
    is_about_images = isinstance(error, UserError) and "skip_unreadable" in error.options
    has_flag = arguments and arguments[0] in SKIPPING_COMMANDS and "--json" not in arguments
    if not is_about_images or not has_flag or not (sys.stdin.isatty() and sys.stderr.isatty()):
        return False
    print(f"halfmoon: {error}\nLeave them out and continue? [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


OPTION_FILES = {
    "sweep": "in the recipe",
    "recipes": "in the recipe",
    "serve": "in the federation's file",
    "site": "in the federation's file",
}
"""Commands that lack most options of a run, and where these are set for them."""


def _write_option(arguments: Sequence[str], option: str, value: str) -> str:
    """Write an option in an error: as a flag if the command has it, else as a name and where it is set.

    Args:
        arguments: the command line.
        option: the configuration name of the option.
        value: its value, "" without one.
    """
    _, commands = _build_parser(full=False)
    command = arguments[0] if arguments else ""
    flag = f"--{option.replace('_', '-')}"
    if command not in commands or option == RESUME or flag in base.flag_names(commands[command], arguments[1:2]):
        return as_flag(option, value)
    if option in settings.option_types() and command in OPTION_FILES:
        key = "--out" if option == "run_dir" and command == "sweep" else f"{option}{f' = {value}' if value else ''}"
        return key if key == "--out" else f"{key} {OPTION_FILES[command]}"
    owners = [name for name, parser in commands.items() if flag in base.flag_names(parser, ())]
    # A positional argument, such as the folder of a command, is written by its name.
    return f"{as_flag(option, value)} of halfmoon {owners[0]}" if owners else option


def _describe_error(error: BaseException, arguments: Sequence[str]) -> tuple[str, int] | None:
    """Describe an error that stopped a command.

    Args:
        error: the error.
        arguments: the command line, by which the options in the message are written.

    Returns:
        The message for the user and the exit code; None for a bug, whose traceback is useful.
    """
    if isinstance(error, base.CommandExit):
        return str(error), error.code
    if isinstance(error, UserError):
        # A full or failing disk is reported as a UserError for its message, but is no mistake of the user.
        cause = error.__cause__
        disk_failed = atomic_io.is_disk_full(cause) or (isinstance(cause, OSError) and cause.errno == errno.EIO)
        return error.render(partial(_write_option, arguments)), 1 if disk_failed else 2
    if isinstance(error, OSError):
        remedy = "; free some space, then repeat the command" if atomic_io.is_disk_full(error) else ""
        return f"{error.filename or 'a file'}: {error.strerror or error}{remedy}.", 1
    if isinstance(error, KeyboardInterrupt):
        return "stopped.", 130
    # Imported late, because it loads torch: errors of the command line itself need no torch.
    from halfmoon.core.errors import Diverged

    return (str(error), 1) if isinstance(error, Diverged) else None


def _run_command_line(arguments: list[str]) -> int:
    """Parse the arguments and run the command; raise an exception for every error."""
    parser, commands = _build_parser("--help-all" in arguments)
    _refuse_removed_command(arguments, commands)
    if arguments and not arguments[0].startswith("-") and arguments[0] not in commands:
        synonym = COMMAND_SYNONYMS.get(arguments[0])
        hint = f"did you mean {synonym!r}?" if synonym else suggest(arguments[0], commands)
        raise UserError(f"unknown command {arguments[0]!r}: {hint}")
    words = list(takewhile(lambda argument: not argument.startswith("-"), arguments[1:]))  # before the first flag
    if arguments[:1] == ["compare"] and words and "--methods" not in arguments:
        # argparse would report that --methods is missing.
        raise UserError(f"compare has its methods after a flag: write halfmoon compare --methods {' '.join(words)}.")
    # argparse would first report the missing positional argument, which does not help a user who wrote --model.
    has_model_flag = any(argument.split("=")[0] == "--model" for argument in arguments)
    if arguments and arguments[0] in base.MODEL_COMMANDS and has_model_flag:
        raise base.model_flag_error(arguments[0])
    # --help-all has changed the parser already; from here on it is a plain --help.
    arguments = ["--help" if argument == "--help-all" else argument for argument in arguments]
    if not arguments:
        parser.print_help()
        return 0
    # argparse's error about unknown arguments has no suggestions, so they are collected and reported here.
    args, unknown_arguments = parser.parse_known_args(arguments)
    if unknown_arguments:
        raise base.unknown_argument_error(args, unknown_arguments, commands)
    if args.command is None:
        raise UserError(f"no command is given: {suggest('', commands)}")
    args.words = arguments  # commands print or record how they were called
    with base.apply_unchecked_flag(args):
        return args.do(args)


def _refuse_removed_command(arguments: Sequence[str], commands: Mapping[str, argparse.ArgumentParser]) -> None:
    """Raise `UserError` if the first arguments are a removed command, or a removed action of a command."""
    if not arguments or arguments[0].startswith("-"):
        return
    command = arguments[0]
    error = None
    if command not in commands:
        error = retired.command_error(command)
    elif len(arguments) > 1 and arguments[1] not in base.action_names(commands[command]):
        error = retired.command_error(f"{command} {arguments[1]}")
    if error is not None:
        raise error


@cache  # for programs that run several commands: it takes 13 ms
def _build_parser(full: bool) -> tuple[base.Parser, Mapping[str, argparse.ArgumentParser]]:
    """Build the parser of the command line; with `full`, its help shows all options of a run.

    Returns:
        The parser, and the parser of each command by its name.
    """
    parser = base.Parser(prog="halfmoon", description=metadata.metadata("halfmoon")["Summary"], allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"halfmoon {installed_version('halfmoon')}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=base.Parser)

    run = base.add_command(
        commands, "run", "train a method; without --method and --config: FedDure and its baselines on digits", "", _run
    )
    studies.add_sites_flag(run)
    studies.add_plan_flags(run)
    base.add_explain_flag(run)
    base.add_tracker_flag(run)
    _add_wide_flag(run)
    base.add_options(run, list(settings.option_types()), full)

    compare = base.add_command(
        commands, "compare", "train several methods on the same split and cohorts", "--methods NAME ... ", _compare
    )
    compare.add_argument("--methods", nargs="+", metavar="NAME", required=True, help="the methods to compare")
    compare.add_argument("--seeds", nargs="+", metavar="N", default=["0"], help="seeds of training (default: 0)")
    base.add_explain_flag(compare)
    base.add_tracker_flag(compare)
    _add_wide_flag(compare)
    replaced = ("method", "baselines", "seed")  # by --methods and --seeds
    base.add_options(compare, [name for name in settings.option_types() if name not in replaced], full)

    sweep.add_tune(commands, full)

    resume = base.add_command(commands, "resume", "continue a run that was stopped", "DIR ", _resume)
    resume.add_argument("folder", type=Path, metavar="DIR", help="the run folder")
    base.add_unchecked_flag(resume)
    base.add_tracker_flag(resume)
    _add_wide_flag(resume)

    for add_command in COMMAND_BUILDERS:
        add_command(commands)
    return parser, commands.choices


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
        base.print_json({"options": [base.explanation_fields(row) for row in rows]})
        return 0
    base.print_table(base.EXPLANATION_HEADER, [base.explanation_cells(row) for row in rows])
    return 0


def _add_wide_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--wide", action="store_true", help="print all columns, also if they need more than 80 characters"
    )


def _run(args: argparse.Namespace) -> int:
    """Run `halfmoon run`: train a method.

    Three other tasks are passed on: `--sites` simulates a federation of site folders, `--data FOLDER` plans a training
    on a folder of images, and `--explain` prints the options without training.

    Args:
        args: the parsed command line.
    """
    # Three layers of options: flags win over the file of --config, and both over the recipe below.
    file_options, flags, file = base.read_options(args)
    if args.sites:
        return _rehearse_sites(args, file_options, flags, file)
    studies.refuse_federation(args.config, file_options, flags)
    plan = studies.plan_from_flags(args, flags)
    if plan is not None:
        if args.explain:
            return _print_explanation(args, plan.config, {"flag": flags}, "plan of the folder")
        if args.plan or not args.json:
            studies.print_plan(plan, args.json)
        if args.plan:
            return 0
        folder = plan.config.run_dir or settings.next_free_folder(plan.config, plan.config.method)
        return _train_plan(args, plan, folder)
    # A file or a method describes the experiment; without both, the recipe does.
    if args.config is None and not {"method", "baselines"} & flags.keys():
        flags_and_recipe = _main_job(flags)
    else:
        flags_and_recipe = flags
    requested = {**file_options, **flags_and_recipe}
    if not args.explain:
        methods = [requested.get("method", Config.method), *requested.get("baselines", ())]
        _announce(requested.get("data", Config.data), methods)
    config = settings.resolve(file_options, _with_processes(file_options, flags_and_recipe), file)
    if args.explain:
        layers = {
            "flag": flags,
            f"file {file}": file_options,
            "recipe of halfmoon run": flags_and_recipe,
            "halfmoon run": _with_processes(file_options, {}),
        }
        return _print_explanation(args, config, layers)
    folder = config.run_dir or settings.next_free_folder(config, config.method)
    used_methods = [config.method, *config.baselines, *([config.reference] if config.reference else [])]
    base.check_option_flags(flags, used_methods)
    # The method "recommended" was resolved to the one for the location of the labels: print which.
    if requested.get("method") == preset.RECOMMENDED:
        limits = RECOMMENDATION_LIMITS.get(config.method, "")
        print(f"recommended method with labels at {config.labels_at}: {config.method}{limits}", file=sys.stderr)
    _print_notes(config, requested)
    # Imported late, because it loads all that a training needs: --explain above does not wait for it.
    from halfmoon.runs import runner

    with _show_progress(args, folder, rows=1 + len(config.baselines)) as callback:
        result = runner.start(replace(config, run_dir=folder), callback)
    base.print_run_result(result, as_json=args.json, wide=args.wide)
    return 0


def _rehearse_sites(
    args: argparse.Namespace, file_options: Mapping[str, Any], flags: Mapping[str, Any], file: Path | str
) -> int:
    """Run `halfmoon run --sites`: simulate a federation of site folders, and estimate the gain of each site.

    Args:
        args: the parsed command line.
        file_options: the options of the configuration file.
        flags: the options of the command line, which override them.
        file: the name of the file, for errors.
    """
    studies.refuse_flags_of_other_runs(args, flags)
    config, folders = studies.rehearsal_config(args, {**file_options, **flags}, file, flags.get("cohort"))
    if args.explain:
        recipe = {} if args.config else studies.REHEARSAL_RECIPE
        layers = {"flag": flags, f"file {file}": file_options, "recipe of --sites": recipe}
        return _print_explanation(args, config, layers)
    assert config.run_dir is not None
    root = config.run_dir
    from halfmoon.studies.site_rehearsal import estimate_gains, rehearse

    with _show_progress(args, root, how_to_resume="run the same command again to continue.") as callback:
        rows = rehearse(config, folders, root, callback)
        gains = estimate_gains(folders, config.group_pattern, callback)
    studies.print_rehearsal(args, root, (rows, gains))
    return 0


def _train_plan(args: argparse.Namespace, plan: Plan, folder: Path, resume: bool = False) -> int:
    """Run the steps of a plan with a progress display, and print the results; return the exit code.

    Args:
        args: the parsed command line.
        plan: which methods to train on a folder of images, and the splits to compare them on.
        folder: the run folder.
        resume: the run folder exists; run only the steps that are not finished.
    """
    from halfmoon.studies.run_plan import run_plan

    with _show_progress(args, folder, rows=plan.runs, seconds_after_runs=plan.seconds_after_runs) as callback:
        result = run_plan(plan, folder, callback, resume)
    studies.print_plan_result(plan, args, folder, result)
    return 0


def _announce(data: str, methods: Sequence[str], seeds: int = 1) -> None:
    """Print what will be trained, before PyTorch is loaded, which takes a second or more.

    Only a terminal shows it: someone waits there. A log gets the plan and the progress of the run as before.

    Args:
        data: the data set, as the user named it.
        methods: names of all methods that will be trained.
        seeds: number of seeds of each method.
    """
    if not sys.stderr.isatty():
        return
    what = methods[0] if len(methods) == 1 else f"{len(methods)} methods"
    if seeds > 1:
        what = f"{what} with {seeds} seeds"
    # To stderr, because stdout has only the results.
    base.line_writer(as_json=True)(f"halfmoon: training {what} on {data}")


def _print_notes(config: Config, requested: Mapping[str, Any]) -> None:
    """Print warnings about a centralized method, and about values of a protocol that other options replace.

    A protocol is a named set of option values, such as those of a paper's experiments.

    Args:
        config: the configuration of the run.
        requested: the options that the user set.
    """
    from halfmoon.methods import registry

    # A pooled method trains one model on the images of all clients, for comparison.
    if registry.entry(config.method).pooled:
        federated = f"fedavg-{config.method}"
        hint = f"; {federated} is its federated form" if federated in registry.names() else ""
        base.print_warning(f"{config.method} is centralized: it trains on the images of all clients together{hint}.")
    for name, (value, cause) in preset.displaced_protocol_values(requested).items():
        flag = f"--{name.replace('_', '-')} {toml.format_text(value)}"
        message = f"protocol {requested['protocol']} sets {name}, but not together with {cause}"
        base.print_warning(f"{message}; to use its value, add {flag}.")


def _main_job(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Complete the options of a `halfmoon run` that names neither a method nor a file, so that it trains something useful.

    The digits get the options of `MAIN_JOB`, chosen for them: FedDure, the default method, with baselines. Other data
    get baselines and the protocol for few labels. A protocol or preset of the user gets the baselines only.

    Args:
        flags: the options of the command line, which win over those that are added.

    Returns:
        All options together.
    """
    if {"protocol", "preset"} & flags.keys():
        return {"baselines": MAIN_JOB["baselines"], **flags}
    if flags.get("data", Config.data) != Config.data:
        return {"baselines": OTHER_DATA_BASELINES, "protocol": "few-labels", **flags}
    # An option of the user can make others of the recipe meaningless: --epochs replaces its steps.
    displaced = preset.displaced_options(flags)
    recipe = {name: value for name, value in MAIN_JOB.items() if name not in displaced}
    method_options = settings.merge_method_options(recipe["options"], flags.get("options", {}), "--option")
    return {**recipe, **flags, "options": method_options}


def _with_processes(values: Mapping[str, Any], flags: dict[str, Any]) -> dict[str, Any]:
    """Add `processes = "auto"` to the flags, so that runs are trained in parallel, unless the user sets a number.

    Only the command line does this. In a Python program each new process imports the program's file again, so there
    the user has to choose it.
    """
    return flags if "processes" in values else {"processes": "auto", **flags}


def _parse_seeds(texts: Sequence[str]) -> list[int]:
    """Parse the seeds of a comparison, whole numbers from 0; raise UserError for other texts."""
    seeds: list[int] = []
    for text in texts:
        # Python refuses to parse numbers of thousands of digits.
        if not text.isdecimal() or len(text) > base.MAX_DIGITS:
            raise UserError("it must be whole numbers from 0.", option="seeds", value=repr(text))
        seeds.append(int(text))
    return seeds


def _check_options_name_methods(layer: Mapping[str, Any], first_method: str) -> None:
    """Check that each method option of a comparison names its method, as `feddure.regulator_bias` does.

    Args:
        layer: the options of a file or of the command line. Under "options" are options of methods, by method.
        first_method: the first method that is compared; an example in the message if the layer has no method.

    Raises:
        UserError: an option is given without a method, so it is not clear to which method it belongs.
    """
    without_method = [name for name, value in layer.get("options", {}).items() if not isinstance(value, Mapping)]
    if without_method:
        name = without_method[0]
        # A file that was written for a single run has options of that run's method.
        method = layer.get("method", first_method)
        raise UserError(f"option {name!r} does not name its method: in a comparison write {method}.{name}.")


def _compare(args: argparse.Namespace) -> int:
    """Run the command `halfmoon compare`: train several methods with several seeds on the same split.

    Options come from two layers, a file (`--config`) and flags, which override the file. `--explain` prints them instead.
    """
    file_options, flags, file = base.read_options(args)
    seeds = _parse_seeds(args.seeds)
    for layer in (file_options, flags):
        _check_options_name_methods(layer, args.methods[0])
    # A configuration has one method: the first one stands for all, and `runner.compare` sets each.
    flags |= {"method": args.methods[0], "baselines": ()}
    if not args.explain:
        _announce({**file_options, **flags}.get("data", Config.data), args.methods, len(seeds))
    config = settings.resolve(file_options, _with_processes(file_options, flags), file)
    if args.explain:
        layers = {"flag": flags, f"file {file}": file_options, "halfmoon compare": _with_processes(file_options, {})}
        return _print_explanation(args, config, layers)
    folder = config.run_dir or settings.next_free_folder(config, "compare")
    base.check_option_flags(flags, [*args.methods, *([config.reference] if config.reference else [])])
    from halfmoon.runs import runner

    with _show_progress(args, folder, rows=len(args.methods) * len(seeds)) as callback:
        result = runner.compare(replace(config, run_dir=folder), args.methods, seeds, callback)
    base.print_run_result(result, as_json=args.json, wide=args.wide)
    return 0


def _resume(args: argparse.Namespace) -> int:
    """Run `resume`: continue a run, a comparison or a plan."""
    from halfmoon.runs import runner
    from halfmoon.studies.run_plan import load_plan

    if (plan := load_plan(args.folder)) is not None:
        return _train_plan(args, plan, args.folder, resume=True)
    with _show_progress(args, args.folder) as callback:
        result = runner.resume(args.folder, callback)
        base.replay_untracked(args, result.runs)
    base.print_run_result(result, as_json=args.json, wide=args.wide)
    return 0


@contextmanager
def _show_progress(
    args: argparse.Namespace,
    folder: Path,
    how_to_resume: str = "",
    rows: int = 0,
    seconds_after_runs: float = 0.0,
) -> Iterator[Callback]:
    """Show the progress of the runs that the block trains, and explain how to resume if it is interrupted.

    Args:
        args: the parsed command line.
        folder: the run folder.
        how_to_resume: advice after an interruption; "" for `halfmoon resume`.
        rows: the number of methods and seeds that will be trained; 0 if it is not known.
        seconds_after_runs: expected seconds of other work after the runs, for the estimated time.

    Yields:
        The callback to pass to the runs.

    Raises:
        CommandExit: the training was interrupted, diverged, or used up the memory.
    """
    from rich.console import Console

    from halfmoon.core.errors import Diverged
    from halfmoon.runs.callbacks import Callbacks
    from halfmoon.runs.progress import make_progress

    # Progress goes to stderr, so that stdout has only the results.
    progress = make_progress(Console(stderr=True), args.json, rows, seconds_after_runs)
    base.interrupt_on_sigterm()
    trackers = base.make_trackers(args)
    try:
        with progress:
            yield Callbacks(progress, *trackers, failures=progress)
    except KeyboardInterrupt as error:
        advice = how_to_resume or _resume_advice(folder) or "nothing was saved yet."
        raise base.CommandExit(f"stopped; {advice}", 130) from error
    except Diverged as error:
        raise base.CommandExit(f"{error} The run folder is {folder}.") from error
    except (MemoryError, RuntimeError) as error:
        message = base.describe_out_of_memory(error)
        if message is None:
            raise
        advice = how_to_resume or _resume_advice(folder)
        saved = f"The last checkpoint is intact: {advice}" if advice else "Nothing was saved yet."
        raise base.CommandExit(f"{message} {saved}") from error
    # No method has started: all of them were finished by an earlier process.
    if not progress.runs:
        progress.record("finished_before", f"{folder} is finished already; these are its results.")
        if others := [name for name in dict.fromkeys(args.tracker) if name != "tensorboard"]:
            text = f"nothing is logged to {' and '.join(others)}, which follow runs only while they train."
            progress.record("tracker_unused", text)


def _resume_advice(folder: Path) -> str:
    """Return the command that continues an interrupted run; "" if nothing was saved."""
    saved = any((folder / name).exists() for name in ("run.json", "comparison.json", "pending.json"))
    return f"go on with: {as_flag(RESUME, str(folder))}" if saved else ""
