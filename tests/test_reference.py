"""The API reference: what `import halfmoon` gives says of every argument and field what it is, and what is raised."""

import ast
import doctest
import importlib.metadata
import re
import sys
from inspect import signature
from operator import attrgetter
from pathlib import Path
from typing import Any

import griffe
import numpy as np
import PIL.Image
import pytest
import torch
from PIL import Image
from report_folders import write_sweep

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


METHODS = [
    *("Results.to_frame", "Results.plot", "Results.to_latex"),
    *("Model.predict", "Model.predict_proba", "Model.evaluate", "Model.calibrate", "Model.export"),
]
"""Methods of public classes that have an entry of their own in the reference."""
LONG = (
    *("run", "compare", "sweep", "resume", "tracker", "Config", "FederatedClassifier"),
    *("Callback", "Callbacks", "ClientUpdate", "Federation", "NullCallback", "Model.export"),
    *("Method", "RunInfo", "Diverged"),
)
"""Names whose examples take longer than others of their kind."""
EXAMPLES = [
    pytest.param(name, marks=pytest.mark.nightly) if name in LONG else name for name in (*halfmoon.__all__, *METHODS)
]


def docs_site() -> Any:
    sys.path.append(str(ROOT / "tools"))
    import docs_site

    return docs_site


@pytest.mark.parametrize("name", [*halfmoon.__all__, *METHODS])
def test_each_name_has_an_example_with_arguments_that_exist(name: str) -> None:
    code = docs_site().example(attrgetter(name)(halfmoon))
    assert code
    for call in [node for node in ast.walk(ast.parse("\n".join(code))) if isinstance(node, ast.Call)]:
        called = ast.unparse(call.func)
        if not re.fullmatch(r"halfmoon\.\w+", called):
            continue
        function = getattr(halfmoon, called.removeprefix("halfmoon."))
        known = {*signature(function).parameters, *Config.__dataclass_fields__}
        assert {keyword.arg for keyword in call.keywords} <= known


@pytest.fixture(scope="module")
def example_names(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Prepare a folder, and the names that examples use: images and labels, a finished run and its model."""
    folder = tmp_path_factory.mktemp("examples")
    digits = halfmoon.load_data("digits")
    X, y = digits.train.images[:200], digits.train.labels[:200]
    test = (digits.test.images[:80], digits.test.labels[:80])
    Image.fromarray(np.repeat(X[0], 3, axis=2)).save(folder / "photo.jpg")
    (folder / "folder").mkdir()
    Image.fromarray(X[0, :, :, 0]).save(folder / "folder" / "a.png")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        small = {"method": "fedavg-soft-labels", "rounds": 2, "clients": 5, "cohort": 2, "steps": 2, "threads": 1}
        results = halfmoon.run(run_dir="runs/first", data_share=0.2, **small)
        halfmoon.run(data=(X, y), run_dir="runs/arrays", **small)
    write_sweep(folder / "sweeps").rename(folder / "sweeps" / "feddure-table1-tiny")
    names = {"halfmoon": halfmoon, "np": np, "torch": torch, "PIL": PIL, "digits": digits, "folder": folder}
    names |= {"X": X, "y": y, "X_new": X[:3], "X_test": test[0], "y_test": test[1], "test": test}
    names |= {"X_validation": test[0], "y_validation": test[1], "results": results, "model": results.model}
    return {**names, "UserError": halfmoon.UserError, "FederatedClassifier": halfmoon.FederatedClassifier}


class PrintedIfGiven(doctest.OutputChecker):
    """Compare what a statement prints only where the docstring has it."""

    def check_output(self, want: str, got: str, optionflags: int) -> bool:
        return not want or super().check_output(want, got, optionflags)


def run_examples(value: Any, names: dict[str, Any]) -> str:
    """Run the examples of a docstring, and return a report of those that fail: "" for none."""
    report: list[str] = []
    examples = docs_site().read_examples(value)
    test = doctest.DocTest(examples, dict(names), value.__qualname__, None, None, value.__doc__)
    doctest.DocTestRunner(PrintedIfGiven(), verbose=False).run(test, out=report.append)
    return "".join(report)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", EXAMPLES)
def test_each_example_runs_and_prints_what_is_below_it(
    name: str, example_names: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(example_names["folder"])
    assert run_examples(attrgetter(name)(halfmoon), example_names) == ""


def test_an_example_that_fails_is_noticed() -> None:
    def wrong() -> None:
        """Do nothing.

        Examples:
            >>> 1 + 1
            3
            >>> missing
        """

    report = run_examples(wrong, {})
    assert "Expected:\n    3\nGot:\n    2" in report
    assert "NameError" in report


def test_what_a_docstring_does_not_say_is_noticed() -> None:
    code = 'def f(a, b):\n    """F.\n\n    Args:\n        a: x\n    """\n    raise UserError()\n'
    with griffe.temporary_visited_module(code, docstring_parser="google") as module:
        assert lacking(module["f"]) == ["module.f: b", "module.f: raises"]


def test_the_version_is_that_of_the_installed_package() -> None:
    assert halfmoon.__version__ == importlib.metadata.version("halfmoon")
