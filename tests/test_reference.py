"""The API reference: what `import halfmoon` gives says of every argument and field what it is, and what is raised."""

import ast
import importlib.metadata
import re
import sys
from inspect import signature
from operator import attrgetter
from pathlib import Path

import griffe
import pytest

import halfmoon
from halfmoon import Config

ROOT = Path(__file__).resolve().parents[1]
LONE = {"self", "cls"}


@pytest.fixture(scope="module")
def package() -> griffe.Module:
    sys.path.append(str(ROOT / "tools"))
    from fields import Comments

    found = griffe.load(
        "halfmoon", search_paths=[ROOT / "src"], docstring_parser="google", extensions=griffe.Extensions(Comments())
    )
    assert isinstance(found, griffe.Module)
    return found


def docstring_text(thing: griffe.Object) -> str:
    return thing.docstring.value if thing.docstring else ""


def arguments(function: griffe.Function) -> set[str]:
    """Return the names of a function's arguments that its section "Args" describes."""
    sections = function.docstring.parsed if function.docstring else []
    parts = [section for section in sections if isinstance(section, griffe.DocstringSectionParameters)]
    return {argument.name.lstrip("*") for section in parts for argument in section.value}


def lacking(function: griffe.Function, around: str = "") -> list[str]:
    """Return what the docstring of a function does not say; for a method, its class's may say it."""
    wanted = {each.name for each in function.parameters} - LONE - arguments(function)
    if around:
        wanted = {name for name in wanted if f"`{name}`" not in around + docstring_text(function)}
    raises = ["raises"] if "raise UserError" in function.source and "UserError" not in docstring_text(function) else []
    return [f"{function.path}: {each}" for each in [*sorted(wanted), *raises]]


@pytest.mark.parametrize("name", halfmoon.__all__)
def test_a_public_name_says_what_it_takes_and_raises(package: griffe.Module, name: str) -> None:
    made = getattr(halfmoon, name)
    thing = package[f"{made.__module__}.{made.__qualname__}".removeprefix("halfmoon.")]
    assert docstring_text(thing)
    if isinstance(thing, griffe.Function):
        assert lacking(thing) == []
        return
    around, missing = docstring_text(thing), []
    for each in thing.members.values() if thing.name != "Config" else ():
        if (each.name.startswith("_") and each.name != "__init__") or each.is_alias or not each.lineno:
            continue
        if isinstance(each, griffe.Function):
            missing += lacking(each, around) if each.name != "__init__" or each.lineno != thing.lineno else []
        elif not docstring_text(each) and f"`{each.name}`" not in around and f"{each.name}:" not in around:
            missing.append(each.path)
    assert missing == []


CALLED = [
    *("run", "compare", "problem", "resume", "load_run", "sweep", "load_data", "save_data", "load_model", "tracker"),
    *("Config", "Scenario", "Split", "FederatedClassifier", "Results", "Results.to_frame", "Results.plot"),
    *("Results.to_latex", "Model.predict", "Model.predict_proba", "Model.evaluate", "Model.calibrate", "Model.export"),
]


@pytest.mark.parametrize("name", CALLED)
def test_what_users_call_has_an_example_with_arguments_that_exist(name: str) -> None:
    sys.path.append(str(ROOT / "tools"))
    from docs_site import example

    code = example(attrgetter(name)(halfmoon))
    assert code
    for call in [node for node in ast.walk(ast.parse("\n".join(code))) if isinstance(node, ast.Call)]:
        called = ast.unparse(call.func)
        if not re.fullmatch(r"halfmoon\.\w+", called):
            continue
        function = getattr(halfmoon, called.removeprefix("halfmoon."))
        known = {*signature(function).parameters, *Config.__dataclass_fields__}
        assert {keyword.arg for keyword in call.keywords} <= known


def test_what_a_docstring_does_not_say_is_noticed() -> None:
    code = 'def f(a, b):\n    """F.\n\n    Args:\n        a: x\n    """\n    raise UserError()\n'
    with griffe.temporary_visited_module(code, docstring_parser="google") as module:
        assert lacking(module["f"]) == ["module.f: b", "module.f: raises"]


def test_the_version_is_that_of_the_installed_package() -> None:
    assert halfmoon.__version__ == importlib.metadata.version("halfmoon")
