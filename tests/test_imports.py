"""The house rules as tests: imports go down only, names are kept in one table, every public name says what it is."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import halfmoon

ROOT = Path(halfmoon.__file__).parent

FLOORS = [
    {"errors"},
    {"tree", "transform", "rng", "models", "disk", "toml", "memory", "values", "checks"}
    | {"packing", "manifest", "store", "checkpoint"},
    {"optim", "augment", "types"},
    {"data", "guards", "objectives", "methods", "evaluate"},
    {"budget", "catalog", "client", "record", "experiment", "ground", "rounds"},
    {"sim", "config", "report", "site"},
    {"access", "build", "deploy", "pieces", "trackers", "watch"},
    {"sweep", "net"},
    {"flower"},
    {"cli", "commands", "console"},
]
"""The modules and packages of each floor, from the ground up."""

NAMING = {"catalog", "build", "cli"}
"""Who may import a concrete method: the table of names, and what assembles runs."""

LONGEST = 450
LONGER: dict[str, int] = {}
"""Files that are longer than they should be, and how long at most: numbers to take back, not to add to."""


def modules() -> dict[str, Path]:
    """Return the files of the package by module name; a package is its `__init__`."""
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(part for part in parts if part != "__init__")
        found[name] = path
    return found


MODULES = modules()


@cache
def text_of(name: str) -> str:
    """Return the text of a module, which many rules are about."""
    return MODULES[name].read_text()


@cache
def tree_of(name: str) -> ast.Module:
    return ast.parse(text_of(name))


FACE = ""  # halfmoon/__init__.py names everything that is public and is above all floors
INSIDE = [name for name in MODULES if name != FACE]


@cache
def imported(name: str, text: str | None = None) -> frozenset[str]:
    """Return the full names that a module imports anywhere in it: at its top, in a function, for type checking.

    `from a import b` counts as a.b, and as a itself where b is no module of its own.
    """
    is_package = MODULES[name].name == "__init__.py" if text is None else False
    here = ["halfmoon", *name.split(".")] if name else ["halfmoon"]
    found: set[str] = set()
    for node in ast.walk(tree_of(name) if text is None else ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = here[: len(here) - node.level + is_package] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                full = f"{source}.{alias.name}"
                found |= {full} if full.removeprefix("halfmoon.") in MODULES else {source, full}
    return frozenset(found)


def edges(name: str) -> set[str]:
    """Return the modules of the package that a module imports."""
    return {target.removeprefix("halfmoon.") for target in imported(name) if target.startswith("halfmoon.")} & set(
        INSIDE
    )


def home(name: str) -> str:
    """Return the part of the package that stands on a floor: `data` for `data.draw`."""
    return name.split(".")[0]


def floor(name: str) -> int:
    """Return the floor of a module."""
    (number,) = [n for n, members in enumerate(FLOORS) if home(name) in members]
    return number


def test_every_module_has_a_floor():
    """A new module has to be given its place."""
    known = set().union(*FLOORS)
    assert sorted({home(name) for name in INSIDE} - known) == []


def test_the_reader_of_imports_sees_all_kinds():
    """Plain, from, nested, relative and aliased imports are found: the tests below are not blind."""
    text = """
import halfmoon.sim as s
def f():
    from halfmoon import catalog
    from ..augment import views, Weak
from . import sources
from halfmoon import Config
"""
    assert imported("data.draw", text) >= {
        "halfmoon.sim",
        "halfmoon.catalog",
        "halfmoon.augment.views",
        "halfmoon.augment",
        "halfmoon.data.sources",
        "halfmoon",
    }
    assert "halfmoon.data" not in imported("data.draw", text)
    assert "data.draw" in edges("client")
    assert "catalog" in edges("config")  # inside a function


def test_imports_go_down_only():
    """A module imports from lower floors or its own; never the package's public face."""
    up = [
        f"{name} (floor {floor(name)}) imports {target} (floor {floor(target)})"
        for name in INSIDE
        for target in sorted(edges(name))
        if floor(target) > floor(name)
    ]
    assert up == []
    assert [name for name in INSIDE if "halfmoon" in imported(name)] == []


def test_imports_form_no_circle():
    """The modules can be put in an order in which each needs earlier ones only."""
    graph = {name: edges(name) for name in INSIDE}
    try:
        list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        pytest.fail(f"a circle of imports: {' -> '.join(error.args[1])}")


def test_homes_of_one_floor_form_no_circle():
    """Where two parts of one floor know each other, only one of them knows the other."""
    graph: dict[str, set[str]] = {}
    for name in INSIDE:
        graph.setdefault(home(name), set()).update({home(target) for target in edges(name)} - {home(name)})
    try:
        list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        pytest.fail(f"a circle of imports: {' -> '.join(error.args[1])}")


def test_simulation_and_network_never_see_each_other():
    """The same method code runs behind both, and neither is the other's special case."""
    for name in INSIDE:
        if home(name) in ("sim", "flower"):
            other = "flower" if home(name) == "sim" else "sim"
            assert other not in {home(target) for target in edges(name)}


def test_only_the_table_knows_methods():
    """A concrete method is imported by the catalog and by what assembles runs; methods do not know one another.

    The other modules there are mathematics that methods share, and so is FedAvg's local training.
    """
    concrete = {name for name in edges("catalog") if home(name) == "methods"} - {"methods.fedavg"}
    assert len(concrete) > 1
    for name in INSIDE:
        if home(name) not in NAMING:
            assert edges(name) & concrete == set(), f"{name} knows a method"


RUNNING = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "shelve", "joblib", "marshal", "jsonpickle", "code"}
"""Modules that make programs of data, or use what does."""

LOADING = {
    ("torch", "load"),
    ("torch", "save"),
    ("np", "load"),
    ("numpy", "load"),
    ("yaml", "load"),
    ("joblib", "load"),
}
"""Functions that may do so: of these numpy's is allowed where it says that it does not."""


def executing(parsed: ast.Module) -> list[str]:
    """Return what in a module can make a program of data, each with its line."""
    found: list[str] = []
    for node in ast.walk(parsed):
        if isinstance(node, ast.Call):
            plain = {each.arg: each.value for each in node.keywords}
            pickles = plain.get("allow_pickle")
            allowed = isinstance(pickles, ast.Constant) and bool(pickles.value)
            if isinstance(node.func, ast.Name) and node.func.id in ("eval", "exec", "compile", "__import__"):
                found.append(f"{node.func.id}, line {node.lineno}")
            if isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name):
                name = (node.func.value.id, node.func.attr)
                safe = name[0] in ("np", "numpy") and isinstance(pickles, ast.Constant) and pickles.value is False
                if name in LOADING and not safe:
                    found.append(f"{'.'.join(name)}, line {node.lineno}")
                if name in (("os", "system"), ("os", "popen")):
                    found.append(f"{'.'.join(name)}, line {node.lineno}")
            # A shell reads a program too.
            if "shell" in plain or allowed:
                found.append(f"shell or allow_pickle, line {node.lineno}")
    return found


def test_data_never_becomes_a_program():
    """No module imports pickle or what wraps it, loads a file that may hold one, or runs a text."""
    assert [name for name in INSIDE if {target.split(".")[0] for target in imported(name)} & RUNNING] == []
    assert {name: found for name in INSIDE if (found := executing(tree_of(name)))} == {}


def test_what_runs_data_is_seen():
    """Each kind once; what looks like it and is harmless is none."""
    harmless = "re.compile('a')\nnp.load(x, allow_pickle=False)\nmodel.eval()\nsubprocess.run([a])\njson.load(x)"
    assert executing(ast.parse(harmless)) == []
    for text in (
        "eval(x)", "exec(x)", "compile(x, 'a', 'exec')", "torch.load(x)", "torch.load(x, weights_only=True)",
        "torch.save(x, y)", "np.load(x)", "numpy.load(x, allow_pickle=True)", "np.load(x, allow_pickle=flag)",
        "yaml.load(x)", "subprocess.run(x, shell=True)", "os.system(x)", "other(x, allow_pickle=True)",
    ):  # fmt: skip
        assert executing(ast.parse(text)), text


def reached(name: str) -> set[str]:
    """Return a module's imports with those of the package that they bring, at the top level or not."""
    seen: set[str] = set()
    waiting = [name]
    while waiting:
        one = waiting.pop()
        if one not in seen:
            seen.add(one)
            waiting += edges(one)
    return seen


def test_reports_need_no_torch():
    """Neither a module of `report` nor anything it imports mentions torch, and importing it does not load it."""
    reports = [name for name in INSIDE if home(name) == "report"]
    assert len(reports) > 2
    for name in reports:
        for each in reached(name):
            assert "torch" not in {target.split(".")[0] for target in imported(each)}, f"{name} needs torch by {each}"
    names = ", ".join(f"halfmoon.{name}" for name in reports)
    code = f"import {names}, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_only_the_command_line_prints():
    """A library is silent."""
    assert [
        f"{name}, line {node.lineno}"
        for name in INSIDE
        if home(name) not in ("cli", "console")
        for node in ast.walk(tree_of(name))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ] == []


Named = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def publics(node: ast.Module | ast.ClassDef, prefix: str = "") -> Iterator[tuple[str, Named]]:
    """Yield the public functions, classes and methods of a module by name."""
    for child in node.body:
        if isinstance(child, Named) and not child.name.startswith("_"):
            yield f"{prefix}{child.name}", child
            if isinstance(child, ast.ClassDef):
                yield from publics(child, f"{child.name}.")


def test_every_public_name_has_a_docstring():
    """Modules, functions, classes and methods."""
    assert [name for name in MODULES if not ast.get_docstring(tree_of(name))] == []
    bare = [
        f"{name}: {each}" for name in MODULES for each, node in publics(tree_of(name)) if not ast.get_docstring(node)
    ]
    assert bare == []


def test_no_file_is_too_long():
    """Each does one thing; those that are longer may only shrink."""
    lines = {path.relative_to(ROOT).as_posix(): len(text_of(name).splitlines()) for name, path in MODULES.items()}
    assert len(lines) > 100
    assert {file: count for file, count in lines.items() if count > LONGER.get(file, LONGEST)} == {}


def test_longer_files_are_still_longer():
    """A file that has shrunk leaves the list."""
    for name in LONGER:
        assert len((ROOT / name).read_text().splitlines()) > LONGEST
