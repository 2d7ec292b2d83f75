"""What every command is made of: a parser whose complaints are sentences, and how results are printed."""

from __future__ import annotations

import argparse
import json
import re
import signal
import sys
import threading
import time
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from halfmoon.config import retired
from halfmoon.config import schema as settings
from halfmoon.config.option_types import describe_type
from halfmoon.config.schema import Config
from halfmoon.core.errors import UserError, suggest

if TYPE_CHECKING:
    from halfmoon.runs.callbacks import Callback
    from halfmoon.runs.runner import RunResult
    from halfmoon.studies.decision import Decision


COMMON = {
    *("method", "baselines", "protocol", "data", "resize", "channels", "clients", "setting", "dirichlet_alpha"),
    *("labels", "labels_per_class", "labels_at", "cohort", "rounds", "seed", "steps", "network", "weights", "lr"),
    *("device", "run_dir"),
}
"""The options of a run that its --help shows; --help-all shows all."""

TRAINED = ("predict", "evaluate", "review", "calibrate", "export")
"""The commands that take a model first."""

Command = Callable[[argparse.Namespace], int]
EVERY = 5.0
"""Seconds between two lines about how far a command is."""


class Parser(argparse.ArgumentParser):
    """A parser whose complaints are `UserError`s."""

    def error(self, message: str) -> NoReturn:
        """Raise the complaint as one sentence."""
        missing = re.fullmatch(r"argument (--[\w-]+)(?:/\S+)?: expected (?:one|at least one) argument", message)
        if missing:
            kind = settings.option_types().get(missing[1][2:].replace("-", "_"))
            what = f": it must be {describe_type(kind)}" if kind else ""
            raise UserError(f"{missing[1]} has no value{what}.")
        valued = re.fullmatch(r"argument (--([\w-]+)).*: ignored explicit argument .*", message)
        if valued:
            no = f" or --no-{valued[2]}" if "--no-" in message else ""
            raise UserError(f"{valued[1]} takes no value: write {valued[1]}{no} alone.")
        raise UserError(message.removesuffix(".") + ".")


def add_command(commands: Any, name: str, about: str, usage: str, do: Command) -> argparse.ArgumentParser:
    """Return the parser of a new command, which `do` plays; `usage` stands between its name and its options.

    `commands` are those of halfmoon, or the actions of a command, which `actions` gives.
    """
    parser = _parser(commands, name, about, usage)
    parser.set_defaults(do=do)
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    parser.add_argument("--debug", action="store_true", help="show where in the program an error arose")
    return parser


def add_actions(commands: Any, name: str, about: str) -> Any:
    """Return the actions of a new command, to which `command` adds; without one the command raises `UserError`."""
    parser = _parser(commands, name, about, "ACTION ")
    matches = parser.add_subparsers(dest="action", metavar="ACTION", parser_class=Parser, prog=f"halfmoon {name}")

    def refuse(args: argparse.Namespace) -> NoReturn:
        raise UserError(f"{name} needs to know what to do: {suggest('', matches.choices)}")

    parser.set_defaults(do=refuse)
    return matches


def _parser(commands: Any, name: str, about: str, usage: str) -> argparse.ArgumentParser:
    return commands.add_parser(
        name,
        help=about,
        description=f"{about[0].upper()}{about[1:]}.",
        usage=f"{commands._prog_prefix} {name} {usage}[options]",
        allow_abbrev=False,
    )


def add_option(group: Any, name: str, hidden: bool = False) -> None:
    """Add the flag of a run's option to a parser or a group of one; without it the result has no such name."""
    kind, default = settings.option_types()[name], getattr(Config, name)
    about = settings.option_helps()[name].replace("%", "%%")
    if default not in (None, ()):
        about += f" (default: {default})"
    flag = f"--{name.replace('_', '-')}"
    extra: dict[str, Any] = {"metavar": _metavar(kind)}
    if kind in (bool, bool | None):
        extra = {"action": argparse.BooleanOptionalAction}
    elif kind == tuple[str, ...]:
        extra = {"metavar": "NAME", "nargs": "*"}
    elif kind == tuple[float, ...] | None:
        extra = {"metavar": "X", "nargs": "+", "type": float}
        if name == "window":
            extra |= {"metavar": ("LOW", "HIGH"), "nargs": 2}
    group.add_argument(flag, dest=name, default=argparse.SUPPRESS, help=argparse.SUPPRESS if hidden else about, **extra)


def add_options(parser: argparse.ArgumentParser, names: Sequence[str], full: bool = True, own: bool = True) -> None:
    """Add a flag for each of these options of a run; without `full` the help shows those that people use."""
    parser.add_argument("--config", metavar="FILE", type=Path, help="a TOML file of options; flags override it")
    for title, section in settings.SECTIONS.items():
        group = parser.add_argument_group(title)
        for name in settings.option_names(section):
            if name in names:
                add_option(group, name, hidden=not full and name not in COMMON)
    if not full:
        parser.epilog = f"These are the options most people use; all {len(names)}: {parser.prog} --help-all."
    if own:
        group = parser.add_argument_group("options of a method (see halfmoon methods)")
        about = "set an option of the method, or METHOD.NAME=VALUE of another; may be repeated"
        group.add_argument("--option", metavar="NAME=VALUE", action="append", default=[], help=about)


def requested_options(args: argparse.Namespace, names: Iterable[str]) -> dict[str, Any]:
    """Return the options of `names` that were given on the command line, by name."""
    matches = {name: vars(args)[name] for name in names if name in vars(args)}
    return {
        name: settings.parse_option(name, each) if isinstance(each, str) else each for name, each in matches.items()
    }


def read_layers(args: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any], Path | str]:
    """Return the values of the file, those of the flags, and the file's name."""
    flags = requested_options(args, settings.option_types())
    own: dict[str, Any] = {}
    for words in getattr(args, "option", []):
        path, sign, value = words.partition("=")
        if not sign or not path:
            raise UserError(f"--option {words!r} is not NAME=VALUE: write, for example, --option threshold=0.9.")
        own[path] = _value(value)
    if own:
        flags["options"] = settings.merge_method_options({}, own, "--option")
    values = settings.load_file(args.config) if args.config else {}
    return values, settings.resolve_paths(flags, Path()), args.config or "the file"


def _value(words: str) -> Any:
    try:
        value = tomllib.loads(f"value = {words}")["value"]
    except tomllib.TOMLDecodeError:
        return words
    return value if isinstance(value, bool | int | float | str) else words


def _metavar(kind: Any) -> str:
    words = describe_type(kind)
    if "'" in words:
        names = "|".join(re.findall(r"'([\w-]+)'", words))
        return f"N|{names}" if "number" in words else names
    return {"a whole number": "N", "a number": "X", "a path": "PATH"}.get(words, "NAME")


def add_unchecked_flag(parser: argparse.ArgumentParser) -> None:
    """Let a command that reads run folders take --unchecked, for those that an older halfmoon wrote."""
    about = "read run folders without checksums as they are: nobody knows whether their files were changed"
    parser.add_argument("--unchecked", action="store_true", help=about)


def run_command(args: argparse.Namespace, command: Callable[[argparse.Namespace], int]) -> int:
    """Run a command, with --unchecked on folders without checksums as well, and return its exit code."""
    if not getattr(args, "unchecked", False):
        return command(args)
    from halfmoon.storage import integrity

    print_warning("files without a checksum are not checked: their numbers are those that the folder says now.")
    with integrity.allow_missing_checksums():
        return command(args)


def add_tracker_flag(parser: argparse.ArgumentParser) -> None:
    about = "also write every round for a tracker: tensorboard, wandb or mlflow, by extras; may be repeated"
    parser.add_argument("--tracker", metavar="NAME", action="append", default=[], help=about)


def make_trackers(args: argparse.Namespace) -> list[Callback]:
    from halfmoon.runs.trackers import tracker

    return [tracker(name) for name in dict.fromkeys(args.tracker)]


def list_flags(parser: argparse.ArgumentParser, args: argparse.Namespace) -> list[str]:
    """Return the long flags that a parser takes, and those of its action that is given, or of all where none is."""
    matches = [flag for action in parser._actions for flag in action.option_strings if flag.startswith("--")]
    for nested in (action for action in parser._actions if isinstance(action, argparse._SubParsersAction)):
        named = getattr(args, nested.dest, None)
        for each in nested.choices.values() if named is None else [nested.choices[named]]:
            matches += list_flags(each, args)
    return [*dict.fromkeys(matches)]


def action_names(parser: argparse.ArgumentParser) -> list[str]:
    """List the actions of a command, such as `join` of `site`; empty for a command without actions."""
    nested = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return [name for action in nested for name in action.choices]


def model_flag_error(command: str) -> UserError:
    return UserError(f"{command} takes the model first, without --model: write halfmoon {command} RUN ...")


def unknown_argument_error(
    args: argparse.Namespace, rest: list[str], parsers: Mapping[str, argparse.ArgumentParser]
) -> UserError:
    """Return the complaint about the first argument that nobody takes; `parsers` are the parsers of the commands."""
    command: str | None = args.command
    if command in TRAINED and any(word.split("=")[0] == "--model" for word in rest):
        return model_flag_error(command)
    flag = next((word.split("=")[0] for word in rest if word.startswith("--")), None)
    if flag is None:
        return UserError(f"unexpected argument {rest[0]!r}; see halfmoon {command} --help.")
    name = flag[2:].replace("-", "_")
    if command is None:
        return UserError(f"{flag} comes before any command: write halfmoon COMMAND {flag}, see halfmoon --help.")
    if command == "resume" and name in settings.option_types():
        return UserError(f"{flag} cannot change on the way: halfmoon resume goes on as the run was configured.")
    if command == "compare" and name in ("method", "baselines", "seed"):
        return UserError(
            f"unknown option {flag!r} of compare: did you mean '--{'seeds' if name == 'seed' else 'methods'}'?"
        )
    action = getattr(args, "action", None)
    error = retired.command_flag_error(f"{command} {action}" if action else command, flag)
    error = error or retired.option_error(name)
    return error or UserError(f"unknown option {flag!r}: {suggest(flag, list_flags(parsers[command], args))}")


def print_text(words: str) -> None:
    """Print words as they are."""
    from rich.console import Console

    from halfmoon.cli import console

    console.say(Console(), words)


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table."""
    from rich.console import Console

    from halfmoon.cli import console

    console.show(Console(), header, rows)


def print_json(value: Any) -> None:
    sys.stdout.write(json.dumps(value, indent=2) + "\n")


class CommandExit(Exception):
    """What ends a command with a sentence on stderr and an exit code."""

    def __init__(self, words: str, code: int = 1) -> None:
        super().__init__(words)
        self.code = code


@contextmanager
def exit_on_interrupt(words: str) -> Iterator[None]:
    """Let Ctrl-C end the command with these words."""
    try:
        yield
    except KeyboardInterrupt as error:
        raise CommandExit(words, 130) from error


def print_warning(words: str, code: int = 0) -> int:
    sys.stderr.write(f"halfmoon: {words}\n")
    return code


def image_progress() -> Callable[[int, int], None]:
    """Return what writes to stderr, every few seconds, how many images are done."""
    last = time.monotonic()

    def tell(count: int, of: int) -> None:
        nonlocal last
        if time.monotonic() - last > EVERY:
            last = time.monotonic()
            sys.stderr.write(f"halfmoon: {count:,} of {of:,} images\n")

    return tell


def parse_int(flag: str, words: str, least: int, most: int | None = None) -> int:
    """Return the number that `words` spell, the value of a flag; raise UserError where it is none in this range."""
    number = int(words) if words.isdecimal() and len(words) <= 100 else -1  # of more digits Python makes no number
    if number < least or (most is not None and number > most):
        limit = "" if most is None else f" to {most}"
        raise UserError(f"{flag} is {words!r}: it must be a whole number from {least}{limit}.")
    return number


def line_writer(json: bool) -> Callable[[str], None]:
    """Return what writes a line at once: to stdout, or to stderr where stdout is kept for `--json`."""
    stream = sys.stderr if json else sys.stdout

    def write_line(line: str) -> None:
        stream.write(f"{line}\n")
        stream.flush()

    return write_line


def print_run_result(outcome: RunResult, as_json: bool, wide: bool, decision: Decision | None = None) -> None:
    """Print the table, what was won and where all of it lies; as JSON, everything, with a `decision` where one was
    made.
    """
    from halfmoon.methods import registry
    from halfmoon.report import tables
    from halfmoon.report.paired import ONE_SEED_HINT, compare_methods
    from halfmoon.report.remarks import describe_gain, list_remarks

    table = tables.comparison_table(outcome.summaries)
    paired = compare_methods(outcome.summaries, registry.ceilings())
    sentence = describe_gain(outcome.summaries, registry.ceilings())
    notes = list_remarks(outcome.summaries, registry.ceilings())
    if as_json:
        print_json(
            {
                "folder": str(outcome.folder),
                "curves": str(outcome.curves),
                "tables": [str(path) for path in outcome.tables],
                "comparison": table.as_json(),
                "differences": paired and paired.as_json(),
                "gain": sentence,
                **({} if decision is None else {"decision": decision.as_json()}),
                "remarks": notes,
                "runs": [
                    {**summary, "folder": str(path)}
                    for summary, path in zip(outcome.summaries, outcome.runs, strict=True)
                ],
            }
        )
        return
    wide_table = replace(table, wide=wide)
    print_table(wide_table.headings, wide_table.cells)
    if paired:
        print_table(paired.headings, paired.cells)
        print_text(paired.sentence)
    elif decision is None and len(table.lines) > 1 and len({summary["seed"] for summary in outcome.summaries}) == 1:
        print_text(ONE_SEED_HINT)
    for words in (*([sentence] if sentence else ()), *notes):
        print_text(words)
    print_text(f"curves: {outcome.curves}\nrun folder: {outcome.folder}")


def interrupt_on_sigterm() -> None:
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.default_int_handler)


def describe_out_of_memory(error: BaseException) -> str | None:
    """Return a sentence where an error says that memory is used up, None where it says something else."""
    if isinstance(error, MemoryError) or "DefaultCPUAllocator: can't allocate memory" in str(error):
        return "the memory of this machine is used up: take smaller batches or --executor loop, or end other programs."
    if type(error).__name__ == "OutOfMemoryError" or "CUDA out of memory" in str(error):
        return "the GPU's memory is used up: take smaller batches, --executor loop or --device cpu."
    return None
