"""Shared parts of all commands: the argument parser, flags of run options, and printing of results."""

from __future__ import annotations

import argparse
import codecs
import io
import json
import re
import shutil
import signal
import sys
import threading
import time
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from halfmoon.config import retired
from halfmoon.config import schema as settings
from halfmoon.config.option_types import describe_type
from halfmoon.config.schema import Config
from halfmoon.core import toml
from halfmoon.core.errors import UserError, escape_controls, suggest
from halfmoon.storage.events import EventPrinter

if TYPE_CHECKING:
    from halfmoon.config.explain import ExplainedOption
    from halfmoon.runs.callbacks import Callback
    from halfmoon.runs.runner import RunResult
    from halfmoon.studies.decision import Decision
    from halfmoon.studies.run_trial import TrialResult


COMMON_OPTIONS = {
    *("method", "baselines", "protocol", "data", "resize", "channels", "clients", "setting", "dirichlet_alpha"),
    *("labels", "labels_per_class", "labels_at", "cohort", "rounds", "seed", "steps", "network", "weights", "lr"),
    *("device", "run_dir"),
}
"""The options of a run that its --help shows; --help-all shows all."""

MODEL_COMMANDS = ("predict", "evaluate", "review", "calibrate", "export")
"""The commands whose first argument is a trained model."""

Command = Callable[[argparse.Namespace], int]
PROGRESS_SECONDS = 5.0
"""Seconds between two progress lines of a command."""


class Parser(argparse.ArgumentParser):
    """An argument parser that raises `UserError` for wrong arguments."""

    def error(self, message: str) -> NoReturn:
        """Raise `UserError` in place of argparse's message, with the type of value that an option needs."""
        # Such as "argument --rounds: expected one argument".
        without_value = re.fullmatch(r"argument (--[\w-]+)(?:/\S+)?: expected (?:one|at least one) argument", message)
        if without_value:
            flag = without_value[1]
            option_type = settings.option_types().get(flag.removeprefix("--").replace("-", "_"))
            expected = f": it must be {describe_type(option_type)}" if option_type else ""
            raise UserError(f"{flag} has no value{expected}.")
        # Such as "argument --flip/--no-flip: ignored explicit argument 'yes'".
        unneeded_value = re.fullmatch(r"argument --([\w-]+).*: ignored explicit argument .*", message)
        if unneeded_value:
            name = unneeded_value[1]
            negation = f" or --no-{name}" if "--no-" in message else ""
            raise UserError(f"--{name} takes no value: write --{name}{negation} without one.")
        raise UserError(message.removesuffix(".") + ".")


def add_command(commands: Any, name: str, about: str, usage: str, do: Command) -> argparse.ArgumentParser:
    """Add a command and return its parser.

    Args:
        commands: the commands of halfmoon, or the actions of a command, from `add_actions`.
        name: the name of the command.
        about: its help text in lower case, without a full stop.
        usage: the arguments to print between its name and `[options]`, with a space at the end.
        do: the function that runs the command and returns its exit code.
    """
    parser = _add_parser(commands, name, about, usage)
    parser.set_defaults(do=do)
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    parser.add_argument("--debug", action="store_true", help="show where in the program an error arose")
    return parser


def add_actions(commands: Any, name: str, about: str) -> Any:
    """Add a command with actions, such as `site` with its action `join`.

    Each parser has the default `do`, the function that runs its command. That of the command itself, for a call without
    an action, raises an error that names the actions; the parsers of the actions replace it.

    Returns:
        argparse's collection of the actions, to which `add_command` adds each.
    """
    parser = _add_parser(commands, name, about, "ACTION ")
    actions = parser.add_subparsers(dest="action", metavar="ACTION", parser_class=Parser, prog=f"halfmoon {name}")

    def refuse(args: argparse.Namespace) -> NoReturn:
        raise UserError(f"{name} needs an action: {suggest('', actions.choices)}")

    parser.set_defaults(do=refuse)
    return actions


def _add_parser(commands: Any, name: str, about: str, usage: str) -> argparse.ArgumentParser:
    """Add the parser of a command, with its usage line and its description."""
    return commands.add_parser(
        name,
        help=about,
        description=f"{about[0].upper()}{about[1:]}.",
        usage=f"{commands._prog_prefix} {name} {usage}[options]",
        allow_abbrev=False,
    )


def add_option(group: Any, name: str, hidden: bool = False) -> None:
    """Add the flag of a run's option to a parser or an argument group.

    The namespace of parsed arguments has the option only if its flag is given, so that files and protocols below it
    can set it.

    Args:
        group: the parser or argument group.
        name: the name of the option.
        hidden: leave the flag out of the help.
    """
    option_type = settings.option_types()[name]
    default = getattr(Config, name)
    # A single % in a help text would start one of argparse's format fields.
    about = settings.option_helps()[name].replace("%", "%%")
    if default not in (None, ()):
        about += f" (default: {default})"
    flag = f"--{name.replace('_', '-')}"
    arguments: dict[str, Any] = {"metavar": _metavar(option_type)}
    if option_type in (bool, bool | None):
        arguments = {"action": argparse.BooleanOptionalAction}
    elif option_type == tuple[str, ...]:
        # `*` and not `+`: an empty list removes the names that a file sets.
        arguments = {"metavar": "NAME", "nargs": "*"}
    elif option_type == tuple[float, ...] | None:
        arguments = {"metavar": "X", "nargs": "+", "type": float}
        if name == "window":
            arguments |= {"metavar": ("LOW", "HIGH"), "nargs": 2}
    help_text = argparse.SUPPRESS if hidden else about
    group.add_argument(flag, dest=name, default=argparse.SUPPRESS, help=help_text, **arguments)


def add_options(
    parser: argparse.ArgumentParser, names: Sequence[str], full: bool = True, method_options: bool = True
) -> None:
    """Add `--config` and a flag for each of these options of a run.

    Args:
        parser: the parser of the command.
        names: the names of the options.
        full: show all flags in the help, instead of the `COMMON_OPTIONS`.
        method_options: also add `--option NAME=VALUE`.
    """
    parser.add_argument("--config", metavar="FILE", type=Path, help="a TOML file of options; flags override it")
    for title, section in settings.SECTIONS.items():
        group = parser.add_argument_group(title)
        for name in settings.option_names(section):
            if name in names:
                add_option(group, name, hidden=not full and name not in COMMON_OPTIONS)
    if not full:
        parser.epilog = f"These are the options most people use; all {len(names)}: {parser.prog} --help-all."
    if method_options:
        group = parser.add_argument_group("options of a method (see halfmoon methods)")
        about = "set an option of the method, or METHOD.NAME=VALUE for another method; may be repeated"
        group.add_argument("--option", metavar="NAME=VALUE", action="append", default=[], help=about)


def requested_options(args: argparse.Namespace, names: Iterable[str]) -> dict[str, Any]:
    """Return the options of `names` that were given on the command line, by name."""
    options: dict[str, Any] = {}
    for name in names:
        if name in vars(args):
            value = vars(args)[name]
            options[name] = settings.parse_option(name, value) if isinstance(value, str) else value
    return options


class GivenOptions(NamedTuple):
    """The options that a user gives; flags override those of the file.

    Attributes:
        file_options: the options of the file of `--config`; {} without one.
        flags: the options of the command line.
        file: the file, for messages; "the file" without one, as no message is then about it.
    """

    file_options: dict[str, Any]
    flags: dict[str, Any]
    file: Path | str


def read_options(args: argparse.Namespace) -> GivenOptions:
    """Read the options of the configuration file and of the command line.

    Raises:
        UserError: an option is unknown or has an invalid value, or the file cannot be read.
    """
    flags = requested_options(args, settings.option_types())
    method_options: dict[str, Any] = {}
    for assignment in getattr(args, "option", []):
        name, sign, text = assignment.partition("=")
        if not sign or not name:
            raise UserError(f"--option {assignment!r} is not NAME=VALUE: write, for example, --option threshold=0.9.")
        # The value is a TOML number, true or false; any other text remains a text.
        try:
            value = toml.parse(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            value = text
        method_options[name] = value if isinstance(value, bool | int | float | str) else text
    if method_options:
        flags["options"] = settings.merge_method_options({}, method_options, "--option")
    return GivenOptions(
        file_options=settings.load_file(args.config) if args.config else {},
        flags=settings.resolve_paths(flags, Path()),
        file=args.config or "the file",
    )


def check_option_flags(flags: Mapping[str, Any], methods: Sequence[str]) -> None:
    """Raise UserError if a flag --option METHOD.NAME=VALUE names a method that is not used.

    A file may have tables of options for more methods than a command trains, but a flag is for this command only.

    Args:
        flags: the options of the command line.
        methods: the methods that the command uses.
    """
    for method, values in flags.get("options", {}).items():
        if isinstance(values, Mapping) and method not in methods:
            name = next(iter(values), "NAME")
            raise UserError(
                f"--option {method}.{name} has no effect: {method} is not among the methods of this command "
                f"({', '.join(dict.fromkeys(methods))}); leave it out, or add {method} to them."
            )


def _metavar(option_type: Any) -> str:
    """Return the placeholder of an option's value in the help, such as "N" or "iid|dir"."""
    description = describe_type(option_type)
    if "'" in description:
        names = "|".join(re.findall(r"'([\w-]+)'", description))
        return f"N|{names}" if "number" in description else names
    return {"a whole number": "N", "a number": "X", "a path": "PATH"}.get(description, "NAME")


def refuse_windows() -> None:
    """Raise UserError on Windows: locks, signals and private folders of a federation are those of Linux and macOS."""
    if sys.platform == "win32":
        raise UserError("a federation does not run on Windows: use Linux, macOS, or WSL (the Linux inside Windows).")


def add_unchecked_flag(parser: argparse.ArgumentParser) -> None:
    """Add `--unchecked`, which reads run folders of older versions, that have no checksums."""
    about = "read run folders without checksums, although changes of their files cannot be detected"
    parser.add_argument("--unchecked", action="store_true", help=about)


@contextmanager
def apply_unchecked_flag(args: argparse.Namespace) -> Iterator[None]:
    """Read files without checksums inside of the block, if the command has `--unchecked` and it is given."""
    if not getattr(args, "unchecked", False):
        yield
        return
    from halfmoon.storage import integrity

    print_warning("files without a checksum are not checked: if they were changed, the results are wrong.")
    with integrity.allow_missing_checksums():
        yield


def add_tracker_flag(parser: argparse.ArgumentParser) -> None:
    """Add `--tracker`."""
    about = "also log every round to a tracker: tensorboard, wandb or mlflow (each needs its extra); may be repeated"
    parser.add_argument("--tracker", metavar="NAME", action="append", default=[], help=about)
    about = (
        "the name of the group of these runs in wandb and mlflow (default: the name of the folder of a comparison, a "
        "sweep, or a run with baselines)"
    )
    parser.add_argument("--tracker-group", metavar="NAME", help=about)


def make_trackers(args: argparse.Namespace) -> list[Callback]:
    """Create a callback for each `--tracker`, in the group of `--tracker-group`."""
    from halfmoon.runs.trackers import GROUPING_TRACKERS, tracker

    names = dict.fromkeys(args.tracker)
    if args.tracker_group is None:
        return [tracker(name) for name in names]
    if not set(names) & set(GROUPING_TRACKERS):
        raise UserError(
            "--tracker-group needs --tracker wandb or --tracker mlflow; TensorBoard groups runs by their folders."
        )
    return [tracker(name, args.tracker_group if name in GROUPING_TRACKERS else None) for name in names]


def replay_untracked(args: argparse.Namespace, runs: Iterable[Path]) -> None:
    """Write TensorBoard's event files of the finished runs that have none, if `--tracker tensorboard` is given.

    Args:
        args: the parsed command line.
        runs: the run folders.
    """
    from halfmoon.runs.trackers import EVENTS, replay

    if "tensorboard" in args.tracker:
        for path in runs:
            if not (path / EVENTS).exists():
                replay(path)


def list_flags(parser: argparse.ArgumentParser, args: argparse.Namespace) -> list[str]:
    """List the long flags of a parser and of the action in `args`, or of all actions if none is given."""
    flags = [flag for action in parser._actions for flag in action.option_strings if flag.startswith("--")]
    for nested in (action for action in parser._actions if isinstance(action, argparse._SubParsersAction)):
        named = getattr(args, nested.dest, None)
        for each in nested.choices.values() if named is None else [nested.choices[named]]:
            flags += list_flags(each, args)
    return [*dict.fromkeys(flags)]


def action_names(parser: argparse.ArgumentParser) -> list[str]:
    """List the actions of a command, such as `join` of `site`; empty for a command without actions."""
    nested = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return [name for action in nested for name in action.choices]


def flag_names(parser: argparse.ArgumentParser, words: Sequence[str]) -> set[str]:
    """List the flags of a command; of one with actions, those of the action that is the first of `words`, or of all."""
    nested = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    actions = {name: each for action in nested for name, each in action.choices.items()}
    selected = [actions[words[0]]] if words and words[0] in actions else [*actions.values()]
    return {flag for each in (parser, *selected) for flag in each._option_string_actions}


def model_flag_error(command: str) -> UserError:
    """Build the error about `--model` of a command whose first argument is the model."""
    return UserError(f"{command} has no --model, its first argument is the model: write halfmoon {command} RUN ...")


def unknown_argument_error(
    args: argparse.Namespace, rest: list[str], parsers: Mapping[str, argparse.ArgumentParser]
) -> UserError:
    """Build the error about the first unknown argument.

    Args:
        args: the arguments that were parsed.
        rest: the arguments that no parser knows.
        parsers: the parser of each command.
    """
    command: str | None = args.command
    if command in MODEL_COMMANDS and any(argument.split("=")[0] == "--model" for argument in rest):
        return model_flag_error(command)
    flag = next((argument.split("=")[0] for argument in rest if argument.startswith("--")), None)
    if flag is None:
        return _unexpected_word_error(command, rest)
    # Options are compared by their names in files, which have underscores.
    name = flag[2:].replace("-", "_")
    if command is None:
        return UserError(f"{flag} is before the command: write halfmoon COMMAND {flag}, see halfmoon --help.")
    if command == "resume" and name in settings.option_types():
        return UserError(f"{flag} cannot be changed: halfmoon resume continues the run with its configuration.")
    if command == "compare" and name in ("method", "baselines", "seed"):
        similar_flag = "--seeds" if name == "seed" else "--methods"
        return UserError(f"unknown option {flag!r} of compare: did you mean '{similar_flag}'?")
    # Flags of older versions get a sentence with their replacement, before a similar flag is suggested.
    action = getattr(args, "action", None)
    full_command = f"{command} {action}" if action else command
    error = retired.command_flag_error(full_command, flag) or retired.option_error(name)
    if error is not None:
        return error
    return UserError(f"unknown option {flag!r}: {suggest(flag, list_flags(parsers[command], args))}")


def _unexpected_word_error(command: str | None, words: Sequence[str]) -> UserError:
    """Build the error about words that are the value of no flag; folders, and methods of `compare`, need a flag."""
    if command == "compare":
        return UserError(f"compare has its methods after a flag: write --methods {' '.join(words)}.")
    if command in ("run", "tune") and Path(words[0]).is_dir():
        return UserError(f"unexpected argument {words[0]!r}: a folder of images is --data {words[0]}.")
    return UserError(f"unexpected argument {words[0]!r}; see halfmoon {command} --help.")


def print_text(text: str, wrap: bool = True) -> None:
    """Print a text to stdout without markup.

    Args:
        text: one or more lines.
        wrap: wrap lines between words on a terminal; False for commands and paths that users copy.
    """
    from rich.console import Console

    from halfmoon.runs.progress import print_line, wrap_lines

    console = Console()
    print_line(console, wrap_lines(text, console.width) if wrap and console.is_terminal else text)


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table to stdout."""
    from rich.console import Console

    from halfmoon.cli import console

    console.print_table(Console(), header, rows)


def add_explain_flag(parser: argparse.ArgumentParser) -> None:
    """Add the flag `--explain` to the parser of a command that trains."""
    about = "print the options that are not at their defaults, and which layer sets each, and exit without training"
    parser.add_argument("--explain", action="store_true", help=about)


EXPLANATION_HEADER = ("option", "value", "set by")


def explanation_cells(row: ExplainedOption) -> list[str]:
    """Format an explained option as cells of a table, below `EXPLANATION_HEADER`."""
    text = " ".join(map(str, row.value)) if isinstance(row.value, tuple) else str(row.value)
    return [row.name, text, row.layer]


def explanation_fields(row: ExplainedOption) -> dict[str, Any]:
    """Format an explained option as an object of the JSON output."""
    value = row.value if isinstance(row.value, bool | int | float | str | tuple) else str(row.value)
    return {"option": row.name, "value": value, "layer": row.layer}


def print_json(value: Any) -> None:
    """Print a value to stdout as JSON."""
    sys.stdout.write(json.dumps(value, indent=2) + "\n")


class CommandExit(Exception):
    """An exit of a command with a message on stderr.

    Attributes:
        code: the exit code.
    """

    def __init__(self, message: str, code: int = 1) -> None:
        super().__init__(message)
        self.code = code


@contextmanager
def exit_on_interrupt(message: str) -> Iterator[None]:
    """Exit with this message on Ctrl-C."""
    try:
        yield
    except KeyboardInterrupt as error:
        raise CommandExit(message, 130) from error


def print_warning(message: str, code: int = 0) -> int:
    """Print a message to stderr and return `code`."""
    sys.stderr.write(f"halfmoon: {escape_controls(message)}\n")
    return code


def image_progress() -> Callable[[int, int], None]:
    """Create a callback (images done, images in all) that prints to stderr every `PROGRESS_SECONDS`."""
    # Starting from now, a task that takes less than the interval prints nothing.
    last = time.monotonic()

    def print_progress(count: int, total: int) -> None:
        nonlocal last
        if time.monotonic() - last > PROGRESS_SECONDS:
            last = time.monotonic()
            sys.stderr.write(f"halfmoon: {count:,} of {total:,} images\n")

    return print_progress


MAX_PORT = 2**16 - 1
"""Largest number of a TCP port."""

MAX_DIGITS = 100
"""Largest number of digits of a whole number on the command line."""


def parse_int(flag: str, text: str, minimum: int, maximum: int | None = None) -> int:
    """Parse the value of a flag as an integer.

    Args:
        flag: the flag, for errors.
        text: its value.
        minimum: the smallest number, at least 0.
        maximum: the largest number, or None.

    Raises:
        UserError: the value is not a number in this range.
    """
    # Python refuses to parse numbers of thousands of digits.
    is_number = text.isdecimal() and len(text) <= MAX_DIGITS
    if not is_number or int(text) < minimum or (maximum is not None and int(text) > maximum):
        limit = "" if maximum is None else f" to {maximum}"
        raise UserError(f"{flag} is {text!r}: it must be a whole number from {minimum}{limit}.")
    return int(text)


def event_printer(as_json: bool) -> EventPrinter:
    """Create a recorder that prints the sentences of events to stdout, or to stderr if stdout is for JSON."""
    return EventPrinter(sys.stderr if as_json else sys.stdout)


def line_writer(as_json: bool) -> Callable[[str], None]:
    """Create a function that writes a line and flushes it, to stdout, or to stderr if stdout is for JSON.

    On a terminal a long line is wrapped between words.
    """
    stream = sys.stderr if as_json else sys.stdout

    def write_line(line: str) -> None:
        if stream.isatty():
            from halfmoon.runs.progress import wrap_lines

            line = wrap_lines(line, shutil.get_terminal_size().columns)
        stream.write(f"{line}\n")
        stream.flush()

    return write_line


def print_run_result(
    outcome: RunResult,
    as_json: bool,
    wide: bool,
    decision: Decision | None = None,
    trial: TrialResult | None = None,
) -> None:
    """Print the results of a run or a comparison.

    Args:
        outcome: the results.
        as_json: print them as JSON.
        wide: print all columns of the table.
        decision: the decision of a plan, which becomes part of the JSON.
        trial: the plan's comparison with training from scratch, likewise.
    """
    from halfmoon.methods import registry
    from halfmoon.report import tables
    from halfmoon.report.paired import compare_methods, one_seed_hint
    from halfmoon.report.remarks import describe_gain, list_remarks

    table = tables.comparison_table(outcome.summaries)
    paired = compare_methods(outcome.summaries, registry.ceilings())
    sentence = describe_gain(outcome.summaries, registry.ceilings())
    notes = list_remarks(outcome.summaries, registry.ceilings())
    if as_json:
        runs = []
        for summary, path in zip(outcome.summaries, outcome.runs, strict=True):
            runs.append({**summary, "folder": str(path)})
        print_json(
            {
                "folder": str(outcome.folder),
                "curves": str(outcome.curves),
                "tables": [str(path) for path in outcome.tables],
                "comparison": table.as_json(),
                "differences": paired and paired.as_json(),
                "gain": sentence,
                **({} if decision is None else {"decision": decision.as_json()}),
                **({} if trial is None else {"from_scratch": trial.as_json()}),
                "remarks": notes,
                "runs": runs,
            }
        )
        return
    wide_table = replace(table, wide=wide)
    print_table(wide_table.headings, wide_table.cells)
    if paired:
        print_table(paired.headings, paired.cells)
        print_text(paired.description)
    elif decision is None and len(table.lines) > 1 and len({summary["seed"] for summary in outcome.summaries}) == 1:
        print_text(one_seed_hint("halfmoon compare --seeds 0 1 2 3 4"))
    if sentence:
        print_text(sentence)
    for note in notes:
        print_text(note)
    print_text(f"curves: {outcome.curves}\nrun folder: {outcome.folder}", wrap=False)


def interrupt_on_sigterm() -> None:
    """Handle SIGTERM as Ctrl-C, so that a run that is stopped by the system saves its state too."""
    # Python allows signal handlers in the main thread only; a program may run commands in another one.
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.default_int_handler)


def describe_out_of_memory(error: BaseException) -> str | None:
    """Describe an error about memory that is used up, with advice; None for any other error."""
    # On a CPU torch raises a plain RuntimeError, which only its text identifies.
    if isinstance(error, MemoryError) or "DefaultCPUAllocator: can't allocate memory" in str(error):
        return "the memory of this machine is used up: take smaller batches or --executor loop, or end other programs."
    # By name, because importing torch only to compare types would take seconds.
    if type(error).__name__ == "OutOfMemoryError" or "CUDA out of memory" in str(error):
        return "the GPU's memory is used up: take smaller batches, --executor loop or --device cpu."
    return None


_ASCII_FORMS = {"\u00b1": "+-", "\u2026": "...", "\u2013": "-", "\u2014": "-", "\u00d7": "x"}
"""Characters of tables and messages, and what replaces them where the output's encoding lacks them."""


def replace_unencodable_characters() -> None:
    """Let output in an encoding such as ASCII replace the characters that it lacks, instead of raising an error."""
    codecs.register_error("halfmoon", _replace_characters)
    for stream in (sys.stdout, sys.stderr):
        if not isinstance(stream, io.TextIOWrapper):
            continue
        if stream.errors in ("strict", "surrogateescape") and not stream.encoding.lower().startswith("utf"):
            stream.reconfigure(errors="halfmoon")


def _replace_characters(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    characters = error.object[error.start : error.end]
    return "".join(_ASCII_FORMS.get(character, "?") for character in characters), error.end
