"""Numbers of methods' options that make no sense are refused before the start, and the usual ones are not."""

import math

import pytest

from halfmoon.cli.main import main
from halfmoon.config import schema
from halfmoon.config.schema import Config
from halfmoon.core.errors import UserError
from halfmoon.methods import registry

NUMBERS = [
    (name, option)
    for name in registry.names()
    for option, declared in registry.options(name).items()
    if isinstance(declared.default, int | float) and not isinstance(declared.default, bool)
]


def test_defaults_and_papers_options_are_in_range() -> None:
    for name in registry.names():
        values = {option: declared.default for option, declared in registry.options(name).items()}
        for option, value in {**values, **registry.entry(name).paper_options}.items():
            limits = registry.option_range(name, option)
            if limits is not None:
                limits.check(f"{name}.{option}", value)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_no_option_is_infinite_or_no_number(value: float) -> None:
    assert len(NUMBERS) > 200
    for name, option in NUMBERS:
        with pytest.raises(UserError, match=rf"option {option} of {name}"):
            schema.check_methods(Config(method=name, labels_at=label_location(name), options={option: value}))


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("threshold", 1.5, "from 0 to 1"),
        ("threshold", -0.1, "from 0 to 1"),
        ("threshold_decay", 1.1, "from 0 to 1"),
        ("decay", 2.0, "from 0 to 1"),
        ("temperature", 0.0, "a number above 0"),
        ("unlabeled_weight", -1.0, "at least 0"),
        ("prox", -0.1, "at least 0"),
        ("regulator_lr", -1e-3, "at least 0"),
        ("hidden", 0, "at least 1"),
    ],
)
def test_numbers_out_of_range_are_refused(option: str, value: float, message: str) -> None:
    names = [name for name in registry.names() if option in registry.options(name)]
    assert names
    for name in names:
        with pytest.raises(UserError, match=rf"option {option} of {name} is .*: it must be {message}\.$"):
            schema.check_methods(Config(method=name, labels_at=label_location(name), options={option: value}))


def label_location(name: str) -> str:
    return registry.entry(name).label_locations[0]


def test_the_command_line_refuses_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--method", "fedavg-fixmatch", "--option", "threshold=1.5", "--rounds", "1"]) == 2
    assert capsys.readouterr().err == (
        "halfmoon: option threshold of fedavg-fixmatch is 1.5: it must be from 0 to 1.\n"
    )


@pytest.mark.parametrize("values", ["0.1", "0.1,0.1", "1e-3,1e-2,1e-3"])
def test_a_knob_needs_different_values(values: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One value was tried again and again."""
    assert main(["tune", "--method", "fedavg", "--knob", f"lr={values}"]) == 2
    assert f"--knob 'lr={values}': a search needs two or more different values" in capsys.readouterr().err
