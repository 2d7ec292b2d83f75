"""Removed and renamed options, commands and method options, each with one sentence on what to use instead.

Flags, keys of TOML files and keywords of `Config` look here before they report an unknown name. Existing
names are not affected, so an entry may be added before its feature is removed.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halfmoon.core import toml
from halfmoon.core.errors import UserError

NO_DEFAULT = object()
"""Marks a removed option that no file of an earlier version contains at its default."""


@dataclass(frozen=True)
class RetiredOption:
    """A removed option of a run.

    Attributes:
        advice: one sentence on what to use instead.
        default: its last default. Files of earlier versions list every option, so a key that has this value is ignored.
        in_identity: whether the default is part of the hash by which a run folder recognizes its configuration.
    """

    advice: str
    default: Any = NO_DEFAULT
    in_identity: bool = False


_NO_START = (
    "training a start without labels did not improve accuracy; start from pretrained weights with `weights` or a "
    "pretrained `network`."
)

REMOVED_OPTIONS: Mapping[str, RetiredOption] = {
    "seeds_together": RetiredOption("leave it out: the seeds of a comparison train one after the other.", False),
    "compile": RetiredOption("leave it out: compiled steps paid off only in long runs of tiny networks.", False),
    "start": RetiredOption(_NO_START, "none", in_identity=True),
    "start_rounds": RetiredOption(_NO_START, 40, in_identity=True),
    "start_lr": RetiredOption(_NO_START, None, in_identity=True),
}
"""Removed options of a run, by key."""

RENAMED_OPTIONS: Mapping[str, str] = {
    "silent": "client_dropout",
    "beside": "baselines",
    "gamma": "dirichlet_alpha",
    "confident": "confidence_threshold",
}
"""Options of a run that have another name since version 0.2: old key to new key."""

REMOVED_COMMAND_FLAGS: Mapping[tuple[str, str], str] = {
    ("site check", "--sheet"): "open the images in a file browser, or label a few with `halfmoon site label`.",
}
"""Removed flags of single commands: (command, flag) to advice."""

REMOVED_COMMANDS: Mapping[str, str] = {
    "site agreement": (
        "compare the labels of two readers with pandas and `sklearn.metrics.cohen_kappa_score`: each reader's labels "
        "are in a CSV file of the site folder."
    ),
    "site frames": "write the frames of DICOM files with pydicom, one file each.",
    "leaderboard": "it wrote this repository's results page; in a clone run `python tools/leaderboard.py`.",
}
"""Removed commands, such as "leaderboard" or "site agreement"."""

REMOVED_METHOD_OPTIONS: Mapping[str, str] = {}
"""Removed options of methods: "METHOD.NAME" (one method) or "NAME" (all methods) to advice."""


def identity_defaults() -> dict[str, Any]:
    """Return removed options that are still part of a configuration's hash, at their last defaults.

    With them, a run folder of an earlier version is still recognized as the same configuration.
    """
    return {name: option.default for name, option in REMOVED_OPTIONS.items() if option.in_identity}


def is_ignored(name: str, value: Any) -> bool:
    """Check whether a key of a file is a removed option at its last default, which has no effect."""
    option = REMOVED_OPTIONS.get(name)
    return option is not None and type(value) is type(option.default) and value == option.default


def strip_ignored_lines(text: str) -> str:
    """Remove options that no longer exist from a run's configuration, so that it compares equal to one of today.

    Earlier versions wrote such options too, mostly at their defaults, which have no effect. Lines with another value
    remain, so that these configurations differ.

    Args:
        text: a configuration that `to_toml` of this or an earlier version has written.
    """
    ignored_lines: set[str] = set()
    for name, option in REMOVED_OPTIONS.items():
        # Of an option without a default (NO_DEFAULT) each value counts. One whose default was None has no line at
        # its default, as TOML has no such value.
        if option.default is not NO_DEFAULT and option.default is not None:
            ignored_lines.add(f"{name} = {toml.format_value(option.default)}")
    lines = text.split("\n")
    # The run's options come first. A table has the options of a method, which may have the same names: it is kept.
    first_table = next((number for number, line in enumerate(lines) if line.startswith("[")), len(lines))
    remaining = [line for line in lines[:first_table] if line not in ignored_lines]
    return "\n".join([*remaining, *lines[first_table:]])


def option_error(name: str, file: Path | str | None = None) -> UserError | None:
    """Build the error about an option of a run that earlier versions had: it was renamed or removed.

    Args:
        name: its key, such as "seeds_together".
        file: the TOML file (or Python call) that sets it; None for a flag of the command line.

    Returns:
        The error, or None if no version had such an option.
    """
    new_name = RENAMED_OPTIONS.get(name)
    if file is None:
        subject = f"option '{_flag(name)}'"
        new_name = new_name and _flag(new_name)
    else:
        subject = f"option {name!r} in {Path(file).name}"
    if new_name is not None:
        return UserError(f"{subject} is called {new_name} since version 0.2: rename it.")
    if name in REMOVED_OPTIONS:
        return UserError(f"{subject} was removed: {REMOVED_OPTIONS[name].advice}")
    return None


def command_error(command: str) -> UserError | None:
    """Build the error about a removed command, such as "site agreement"; None if there was no such command."""
    if command not in REMOVED_COMMANDS:
        return None
    return UserError(f"command 'halfmoon {command}' was removed: {REMOVED_COMMANDS[command]}")


def command_flag_error(command: str, flag: str) -> UserError | None:
    """Build the error about a removed flag of one command; None if there was no such flag."""
    if (command, flag) not in REMOVED_COMMAND_FLAGS:
        return None
    return UserError(f"option {flag!r} of {command} was removed: {REMOVED_COMMAND_FLAGS[command, flag]}")


def method_option_error(method: str, name: str) -> UserError | None:
    """Build the error about a removed option of a method; None if there was no such option."""
    advice = REMOVED_METHOD_OPTIONS.get(f"{method}.{name}") or REMOVED_METHOD_OPTIONS.get(name)
    return UserError(f"option {name!r} of method {method} was removed: {advice}") if advice else None


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
