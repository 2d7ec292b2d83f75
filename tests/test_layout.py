"""The house rules as tests: imports go down only, names are retained in one table, every public name says what it is."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from importlib import metadata
from pathlib import Path

import pytest

import halfmoon

ROOT = Path(halfmoon.__file__).parent

PACKAGES = [
    "core",
    "models",
    "storage",
    "api",
    "data",
    "report",
    "aggregation",
    "methods",
    "config",
    "engine",
    "runs",
    "sites",
    "studies",
    "federation.protocol",
    "federation.site",
    "federation.server",
    "federation.transport",
    "federation.contract",
    "pages",
    "cli",
    "__main__",
]
"""The packages in the order of their imports: each imports from itself and from those above it in this list only."""

NAMING = {"methods.registry", "runs.runner", "cli.main"}
"""Who may import a concrete method: the table of names, and what assembles runs."""


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


FACES = ("", "contract")
"""`halfmoon` and `halfmoon.contract`: modules that only name what is public. No module of the package imports them."""

INSIDE = [name for name in MODULES if name not in FACES]


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


def package_of(name: str) -> str:
    """Return the package of a module: `data` for `data.readers.idx`, `federation.site` for `federation.site.client`."""
    parts = name.split(".")
    return ".".join(parts[:2]) if parts[0] == "federation" and len(parts) > 1 else parts[0]


def test_every_package_has_a_place():
    """A new package has to be given its place in the order of imports; nothing lies next to the packages."""
    homes = {package_of(name) for name in INSIDE} - {"federation"}
    assert sorted(homes - set(PACKAGES)) == []
    assert sorted(set(PACKAGES) - homes) == []


def test_the_reader_of_imports_sees_all_kinds():
    """Plain, from, nested, relative and aliased imports are found: the tests below are not blind."""
    text = """
import halfmoon.sweep as s
def f():
    from halfmoon.methods import registry
    from ..data.views import policies, Weak
from . import sources
from halfmoon import Config
"""
    assert imported("data.sources", text) >= {
        "halfmoon.sweep",
        "halfmoon.methods.registry",
        "halfmoon.data.views.policies",
        "halfmoon.data.views",
        "halfmoon.data.sources",
        "halfmoon",
    }
    assert "halfmoon.data" not in imported("data.sources", text)
    assert "engine.sampling" in edges("engine.driver")
    assert "methods.registry" in edges("config.schema")  # inside a function


def test_imports_go_up_the_list_only():
    """A module imports from its package and from those before it; never the package's public face."""
    rank = {package: number for number, package in enumerate(PACKAGES)}
    wrong = [
        f"{name} imports {target}"
        for name in INSIDE
        for target in sorted(edges(name))
        if target != "federation" and name != "federation" and rank[package_of(target)] > rank[package_of(name)]
    ]
    assert wrong == []
    faces = {f"halfmoon.{face}".strip(".") for face in FACES}
    assert [name for name in INSIDE if imported(name) & faces] == []


def test_servers_and_sites_of_a_federation_know_only_the_protocol():
    """Neither side imports a module of the other; the order of packages would allow it to one of them."""
    sides = {"federation.server", "federation.site"}
    for name in INSIDE:
        if package_of(name) in sides:
            assert [target for target in edges(name) if package_of(target) in sides - {package_of(name)}] == [], name


def test_imports_form_no_circle():
    """The modules can be put in an order in which each needs earlier ones only."""
    graph = {name: edges(name) for name in INSIDE}
    try:
        list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        pytest.fail(f"a circle of imports: {' -> '.join(error.args[1])}")


def test_simulation_knows_no_network():
    """The same method code runs behind both: the engine of rounds knows neither sites nor Flower."""
    for name in INSIDE:
        if package_of(name) in ("api", "methods", "objectives", "runs"):
            assert [target for target in edges(name) if target.startswith("federation")] == []
        if package_of(name) not in ("federation.transport", "cli"):
            assert [target for target in edges(name) if package_of(target) == "federation.transport"] == []
            assert "flwr" not in {target.split(".")[0] for target in imported(name)}


def test_what_flower_does_not_promise_is_touched_in_one_file():
    """Elsewhere Flower is imported by the three packages that it promises, and none of its modules is named."""
    promised = {"flwr.app", "flwr.clientapp", "flwr.serverapp"}
    for name in INSIDE:
        if name != "federation.transport.internals":
            used = {target for target in imported(name) if target.split(".")[0] == "flwr"}
            assert {target for target in used if ".".join(target.split(".")[:2]) not in promised} == set(), name
            for message in ("flwr.super", "flwr.proto", "_runtime_client", "PullMessages", "TaskIdentity"):
                assert message not in text_of(name), f"{name} touches {message}"


def test_only_the_table_knows_methods():
    """A concrete method is imported by the registry and by what assembles runs; methods do not know one another.

    The other modules there are mathematics that methods share, and so is FedAvg's local training.
    """
    rows = {name for name in INSIDE if name.startswith("methods.") and "\nROWS = (" in text_of(name)}
    concrete = {name for name in rows if not name.startswith("methods.objectives")}
    assert len(concrete) > 1
    for name in INSIDE:
        if name not in NAMING:
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
    """No module imports pickle or what wraps it, loads a file that may hold one, or runs a text.

    One writes and reads pickles: between a run and processes that it has started itself, as `multiprocessing` does.
    Another reads published weights, whose bytes it knows by their hash.
    """
    pipes = "engine.executors.pools"
    assert [name for name in INSIDE if {target.split(".")[0] for target in imported(name)} & RUNNING] == [pipes]
    risky = {name: found for name in INSIDE if (found := executing(tree_of(name)))}
    (published,) = risky.pop("models.efficientnet")
    assert published.startswith("torch.load")
    assert risky == {}


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
    reports = [name for name in INSIDE if package_of(name) == "report"]
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
        if package_of(name) != "cli"
        for node in ast.walk(tree_of(name))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ] == []


Named = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def publics(node: ast.Module | ast.ClassDef, prefix: str = "") -> Iterator[tuple[str, Named]]:
    """Yield the public functions, classes and methods of a module by name; an overload stands for its function."""
    for child in node.body:
        if isinstance(child, Named) and not child.name.startswith("_"):
            if any(isinstance(each, ast.Name) and each.id == "overload" for each in child.decorator_list):
                continue
            yield f"{prefix}{child.name}", child
            if isinstance(child, ast.ClassDef):
                yield from publics(child, f"{child.name}.")


SHORT = 3
"""Lines of a function that its name and types may explain alone."""


def inherited() -> set[str]:
    """Return the names of methods that a class documents for those that override or implement them."""
    bases = {
        base.id
        for name in MODULES
        for node in ast.walk(tree_of(name))
        if isinstance(node, ast.ClassDef)
        for base in node.bases
        if isinstance(base, ast.Name)
    }
    return {
        child.name
        for name in MODULES
        for node in ast.walk(tree_of(name))
        if isinstance(node, ast.ClassDef)
        and (node.name in bases or any(ast.unparse(base) == "Protocol" for base in node.bases))
        for child in node.body
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(child)
    }


def test_no_module_imports_what_developers_alone_install():
    """The extras `dev` and `docs` are not there where halfmoon is installed for use."""
    extras = tomllib.loads((ROOT.parents[1] / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    expected = {
        re.split(r"\W", line.replace("-", "_"), maxsplit=1)[0] for name in ("dev", "docs") for line in extras[name]
    }
    modules_of = metadata.packages_distributions().items()
    names = {top for top, places in modules_of if {each.replace("-", "_") for each in places} & expected}
    assert {"hypothesis", "pytest"} <= names
    assert {(name, each) for name in INSIDE for each in imported(name) if each.partition(".")[0] in names} == set()


def test_every_public_name_has_a_docstring():
    """Modules, classes and functions; a few lines explain themselves, and an override has its base's words."""
    assert [name for name in MODULES if not ast.get_docstring(tree_of(name))] == []
    overridden = inherited()
    bare = [
        f"{name}: {each}"
        for name in MODULES
        for each, node in publics(tree_of(name))
        if not ast.get_docstring(node)
        and (isinstance(node, ast.ClassDef) or (node.end_lineno or 0) - node.body[0].lineno >= SHORT)
        and not ("." in each and node.name in overridden)
    ]
    assert bare == [], "\n".join(bare)


BANNED = {
    "work", "works", "visit", "visits", "look", "looked", "judge", "judged", "aside", "ready", "tau",
    "said", "told", "seen", "wanted", "given", "found", "made", "taken", "kept", "drawn", "held", "asked", "sent",
    "shown", "played", "chosen", "joined", "done", "known", "counted", "meant", "brought",
}  # fmt: skip
"""Names that the field does not use, or that are participles where a noun says what the value is."""


def banned_names(parsed: ast.AST) -> set[str]:
    """Return the banned names that a module binds: variables, parameters, attributes, functions and classes."""
    names: set[str] = set()
    for node in ast.walk(parsed):
        if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.id if isinstance(node, ast.Name) else node.attr)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, Named):
            names.add(node.name)
    return {name for name in names if name.lower().strip("_") in BANNED}


def test_banned_names_are_found_where_they_are_bound():
    text = "def told(seen, x):\n    self.kept = x.made\n    for found in x: y = found\nclass Visit: ..."
    assert banned_names(ast.parse(text)) == {"told", "seen", "kept", "found", "Visit"}


ALLOWED = {
    "federation.contract.promises": {"kept", "said"},  # fields that `check-method --json` prints
    "engine.loop": {"chosen"},  # a key of the run's state in every checkpoint
    "federation.protocol.messages": {"kept", "sent"},  # the field of `Reply` is one of the message's header
    "sites.keys.key_folder": {"made"},  # the field of `SiteKeys` is a key of access.json
    "studies.label_selection": {"judged"},  # the field of `Point` is a key of a folder's trainings-*.jsonl
}
"""Names that a module binds because files, messages or printed records have them."""


def test_no_module_binds_banned_names():
    names = {name: banned_names(tree_of(name)) - ALLOWED.get(name, set()) for name in INSIDE}
    assert {name: found for name, found in names.items() if found} == {}


SCRIPTS = [path for path in sorted(ROOT.rglob("web/*.js")) if path.name != "plot.js"]
"""Scripts of the pages, without the bundled library."""


def banned_script_names(text: str) -> set[str]:
    """Return the banned names that a script binds: variables, parts of destructured values, functions and classes."""
    names = re.findall(r"\b(?:const|let|function|class)\s+(\w+)", text)
    for parts in re.findall(r"\b(?:const|let)\s+[\[{]([^=]*)[\]}]\s*=", text):
        names += re.findall(r"\w+(?=\s*(?:[,}\]]|$))", parts)
    return {name for name in names if name.lower() in BANNED}


def test_banned_names_of_scripts_are_found_where_they_are_bound():
    text = "const told = 1; let { x, y: seen } = z;\nfunction look(a) { const [kept, b] = a; return made; }"
    assert banned_script_names(text) == {"told", "seen", "look", "kept"}


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_scripts_have_short_lines_and_no_banned_names(path: Path):
    text = path.read_text(encoding="utf-8")
    assert [line for line in text.splitlines() if len(line) > 120] == []
    assert banned_script_names(text) == set()
