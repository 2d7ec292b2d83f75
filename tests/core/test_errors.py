"""Errors of users: options are written as flags on the command line and as keywords in Python."""

import doctest
import pickle

import pytest

from halfmoon.core import errors
from halfmoon.core.errors import UserError, as_flag, as_keyword


def test_examples() -> None:
    assert doctest.testmod(errors).failed == 0


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
