"""Errors name only options that the command at hand has."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest
from test_options import COMMANDS

import halfmoon
from halfmoon.cli import main as cli
from halfmoon.config import schema
from halfmoon.core.errors import UserError
from halfmoon.studies.sweep_tasks import describe_error

PACKAGE = Path(halfmoon.__file__).parent
ERRORS = ("UserError", "OptionText", "UnreadableImagesError", "ImageReadError", "UnknownRangeError")
FLAG = re.compile(r"--[a-z][a-z-]+")

RAISED_BY = {
    "data/readers/class_folders.py": ("run",),
    "data/sources.py": ("run",),
    "federation/transport/contact.py": ("site join",),
    "federation/transport/internals.py": ("site join",),
    "federation/transport/launch.py": ("serve",),
    "federation/transport/site_process.py": ("site join",),
    "runs/factory.py": ("data",),
    "sites/keys/certificates.py": ("federation rotate",),
    "sites/keys/make.py": ("federation init", "federation rotate", "federation add-site"),
    "studies/site_rehearsal.py": ("run",),
    "studies/tuning.py": ("tune",),
}
"""Modules whose errors name flags, not options in braces, and the commands that these are flags of."""


@cache
def find_errors() -> list[tuple[str, ast.Call]]:
    """List the errors that the package creates, each with the path of its module."""
    return [
        (path.relative_to(PACKAGE).as_posix(), node)
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", "")) in ERRORS
    ]


def list_texts(node: ast.AST) -> list[str]:
    """List the string constants of an expression."""
    return [each.value for each in ast.walk(node) if isinstance(each, ast.Constant) and isinstance(each.value, str)]


def list_flags(command: str) -> set[str]:
    return set(COMMANDS[command]._option_string_actions)


def test_options_in_braces_are_written_as_the_command_has_them() -> None:
    """A sweep advised --skip-unreadable, which is an option of its recipe."""
    options = set(schema.option_types())
    for _, error in find_errors():
        for keyword in error.keywords:
            if keyword.arg == "option":
                options |= set(list_texts(keyword.value))
    assert {"skip_unreadable", "unchecked", "out", "sites"} <= options
    for command in COMMANDS:
        for option in options:
            text = cli._write_option(command.split(), option, "")
            for flag in FLAG.findall(text):
                owner = text.partition(" of halfmoon ")[2]
                assert flag in (list_flags(command) if not owner else cli_flags(owner)), (command, text)


def cli_flags(command: str) -> set[str]:
    """List the flags of a command and of its actions."""
    return set().union(*(list_flags(name) for name in COMMANDS if name.split()[0] == command))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["run"], "--skip-unreadable"),
        (["sweep", "mine.toml"], "skip_unreadable in the recipe"),
        (["serve", "wards.toml"], "skip_unreadable in the federation's file"),
        (["evaluate", "run", "folder"], "--skip-unreadable of halfmoon run"),
    ],
)
def test_where_an_option_is_that_a_command_lacks(arguments: list[str], expected: str) -> None:
    error = UserError(
        "6 images cannot be read", option="skip_unreadable", hint="leave them out with {skip_unreadable}."
    )
    message = cli._describe_error(error, arguments)
    assert message == (f"6 images cannot be read; leave them out with {expected}.", 2)


def test_errors_of_the_runs_of_a_sweep_name_the_recipe() -> None:
    sizes = describe_error(
        UserError("two sizes; give one by {resize=N}, or choose {run_dir}.", option=("resize", "run_dir"))
    )
    assert sizes == "two sizes; give one by resize = N in the recipe, or choose --out."
    assert sizes.python_text == "two sizes; give one by resize = N in the recipe, or choose out."


def test_flags_in_errors_are_flags_of_the_commands_that_raise_them() -> None:
    named: set[str] = set()
    for module, error in find_errors():
        flags = set(FLAG.findall(" ".join(list_texts(error))))
        # Those about Ray name flags of the command `ray start`.
        if not flags or module.startswith(("cli/", "engine/executors/ray")):
            continue
        named.add(module)
        owned = set().union(*(list_flags(command) for command in RAISED_BY.get(module, ())))
        assert flags <= owned, (module, error.lineno, flags - owned)
    assert named == set(RAISED_BY)
