"""Errors of users: options are written as flags on the command line and as keywords in Python."""

import ast
import doctest
import json
import pickle
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from halfmoon.core import errors
from halfmoon.core.errors import OptionText, UserError, as_flag, as_keyword, in_python


def test_examples() -> None:
    """Those of public names, such as UserError, run in tests/test_reference.py."""
    runner = doctest.DocTestRunner()
    for test in doctest.DocTestFinder().find(OptionText, globs=vars(errors)):
        runner.run(test)
    assert (runner.failures, runner.tries) == (0, 3)


@pytest.mark.parametrize(
    ("value", "flag", "keyword"),
    [
        ("", "--run-dir", "run_dir"),
        ("2", "--run-dir 2", "run_dir=2"),
        ("0 1", "--run-dir 0 1", "run_dir=[0, 1]"),
        ("FILE", "--run-dir FILE", "run_dir=FILE"),
        ("timm:NAME", "--run-dir timm:NAME", 'run_dir="timm:NAME"'),
    ],
)
def test_an_option_as_flag_and_keyword(value: str, flag: str, keyword: str) -> None:
    assert as_flag("run_dir", value) == flag
    assert as_keyword("run_dir", value) == keyword


def test_several_options_and_other_braces() -> None:
    error = UserError(
        "{noise} needs {clip=1.0} ({'a': 1}, {seed})", option=("noise", "clip"), value=0.5, hint="leave {noise} out."
    )
    assert str(error) == "--noise is 0.5: --noise needs --clip 1.0 ({'a': 1}, {seed}); leave --noise out."
    assert error.in_python() == "noise is 0.5: noise needs clip=1.0 ({'a': 1}, {seed}); leave noise out."


def test_an_error_survives_pickling() -> None:
    error = pickle.loads(pickle.dumps(UserError("wrong", option="clip", value=3, hint="use {clip=1}.")))
    assert (error.options, error.value, error.hint) == (("clip",), 3, "use {clip=1}.")
    assert str(error) == "--clip is 3: wrong; use --clip 1."
    assert error.in_python() == "clip is 3: wrong; use clip=1."


def test_a_text_of_options_survives_pickling_and_json() -> None:
    text = OptionText("train fewer {jobs=2} in {other}", "jobs")
    assert str(text) == json.loads(json.dumps(text)) == "train fewer --jobs 2 in {other}"
    assert in_python(pickle.loads(pickle.dumps(text))) == "train fewer jobs=2 in {other}"
    assert in_python("plain --jobs") == "plain --jobs"


def test_a_folder_is_resumed_by_a_command_or_a_call() -> None:
    """Also one whose name the shell or a pattern would read otherwise."""
    error = UserError("{run_dir} is taken: {resume}", option="run_dir", resume=Path("my {run_dir}"))
    assert str(error) == "--run-dir is taken: halfmoon resume 'my {run_dir}'"
    assert in_python(error.as_text()) == 'run_dir is taken: halfmoon.resume("my {run_dir}")'


SOURCE = Path(errors.__file__).parents[1]
COMMAND_LINE_ONLY = ("cli/", "federation/transport/", "sites/keys/", "studies/tuning.py", "studies/site_rehearsal.py")
"""Modules whose errors only a user of the command line sees."""

COMMANDS = re.compile(r"`halfmoon [^`]*`|halfmoon (?:data|federation)[^;.]*|ray start --[a-z]+")
FLAG = re.compile(r"(?<![\w{-])--[a-z][a-z-]+")
PLACEHOLDER = re.compile(r"{([a-z_]+)(?:=[^{}]*)?}")
DOUBLED = re.compile(r"{{[a-z_]+(?:=[^{}]*)?}}")


def raised_errors() -> Iterator[tuple[str, list[str], set[str]]]:
    """Yield each call of an error class in the source: its location, the texts in it, and the names in `option`."""
    for path in sorted(SOURCE.rglob("*.py")):
        for call in ast.walk(ast.parse(path.read_text())):
            if not isinstance(call, ast.Call) or not ast.unparse(call.func).endswith(("Error", "FolderInUse")):
                continue
            options = {keyword.arg: keyword.value for keyword in call.keywords}.get("option")
            names = {leaf.value for leaf in ast.walk(options) if isinstance(leaf, ast.Constant)} if options else set()
            if any(keyword.arg == "resume" for keyword in call.keywords):
                names.add(errors.RESUME)
            leaves = [leaf for part in (*call.args, *call.keywords) for leaf in ast.walk(part)]
            texts = [leaf.value for leaf in leaves if isinstance(leaf, ast.Constant) and isinstance(leaf.value, str)]
            yield f"{path.relative_to(SOURCE).as_posix()}:{call.lineno}", texts, names


def test_errors_that_python_users_see_name_no_flags() -> None:
    """An option in a message is a placeholder, which each side renders in its way."""
    flags = []
    for location, texts, _ in raised_errors():
        # A command that the user is to run is the same for both; X stands for the values in it.
        text = COMMANDS.sub("", "X".join(texts))
        if not location.startswith(COMMAND_LINE_ONLY) and FLAG.search(text):
            flags.append(f"{location}: {text}")
    assert flags == []


def test_every_option_in_a_message_is_declared() -> None:
    """A placeholder that `option` does not list would be printed with its braces."""
    found = [(location, set(PLACEHOLDER.findall(" ".join(texts))), names) for location, texts, names in raised_errors()]
    undeclared = {location: names - declared for location, names, declared in found if names - declared}
    assert undeclared == {}
    assert not [location for location, texts, _ in raised_errors() if DOUBLED.search(" ".join(texts))]
    assert sum(bool(declared) for _, _, declared in found) > 60


def test_messages_of_a_run_spell_no_flag() -> None:
    """Callbacks of Python users get them, too: an option in one is a placeholder of `OptionText`."""
    flags = []
    for path in sorted(SOURCE.rglob("*.py")):
        location = path.relative_to(SOURCE).as_posix()
        if location.startswith(COMMAND_LINE_ONLY):
            continue
        for call in ast.walk(ast.parse(path.read_text())):
            is_message = isinstance(call, ast.Call) and ast.unparse(call.func).endswith(
                (".record", "print_message", "warn", "OptionText")
            )
            if is_message and FLAG.search(COMMANDS.sub("", ast.unparse(call))):
                flags.append(f"{location}:{call.lineno}")
    assert flags == []
