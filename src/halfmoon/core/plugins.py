"""Parts from outside: methods, networks and split rules that a module or an installed package brings.

A part is named "my_module:Mine", or by the name under which a package announces it (entry point). The folder in which a
command is started is one of the places where modules lie, for the processes that it starts as well. Where names come
from others (a federation's terms, a model file), `only` says which modules may be imported: no name in a file or a
message makes this process run code that its user did not name.
"""

import hashlib
import importlib
import os
import re
import sys
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from importlib import metadata, util
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, cast

from halfmoon.core import hubs
from halfmoon.core.errors import UserError, one_line

Kind = Literal["method", "network", "split"]

GROUPS: dict[Kind, str] = {"method": "halfmoon.methods", "network": "halfmoon.networks", "split": "halfmoon.splits"}
"""The entry point groups, as a package's pyproject.toml names them."""

SPEC = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
"""How a part of a module is named."""

_REGISTERED: dict[tuple[Kind, str], Any] = {}
_TRUSTED: list[frozenset[str]] = []  # the innermost is in force; none: everything is


@dataclass(frozen=True)
class PluginOrigin:
    """Where a part comes from: its module, the version of the package, and the SHA-256 of the source."""

    part: str
    module: str
    version: str
    sha256: str

    def __str__(self) -> str:
        return f"{self.part} from {self.module} {self.version} sha256 {self.sha256}"


def register(kind: Kind, name: str, part: Any) -> None:
    """Let this process know a part under a name, in place of what had it before."""
    _REGISTERED[kind, name] = part


@cache
def entry_points(kind: Kind) -> dict[str, metadata.EntryPoint]:
    return {point.name: point for point in metadata.entry_points(group=GROUPS[kind])}


def is_plugin(name: str, kind: Kind) -> bool:
    if kind == "network" and hubs.package_of(name):
        return True
    return (kind, name) in _REGISTERED or bool(SPEC.fullmatch(name)) or name in entry_points(kind)


def is_module(name: str) -> bool:
    path = Path(*name.split("."))
    # Of a name that is too long for a file system Path.is_file raises OSError.
    return os.path.isfile(path.with_suffix(".py")) or os.path.isfile(path / "__init__.py")


def load(name: str, kind: Kind) -> Any:
    """Return the part of this name; raise `UserError` where there is none, or its module may not be imported."""
    if (kind, name) in _REGISTERED:
        return _REGISTERED[kind, name]
    point = entry_points(kind).get(name)
    if point is not None:
        try:
            return point.load()
        except Exception as error:  # whatever somebody else's code does
            raise UserError(f"{kind} {name}: {point.value} cannot be loaded ({_why(error)}).") from error
    if not SPEC.fullmatch(name):
        raise UserError(f"{kind} {name!r} is no name of a part: write my_module:Name.")
    if _TRUSTED and name not in _TRUSTED[-1]:
        raise UserError(
            f"{kind} {name} is code from outside halfmoon, which is not loaded because a file or a server names it",
            option=kind,
            hint=f"if you have it and trust it, give {{{kind}={name}}}.",
        )
    where, _, path = name.partition(":")
    part: Any = _module(where, name, kind)
    for word in path.split("."):
        if not hasattr(part, word):
            raise UserError(f"{kind} {name}: module {where} has no {path}.")
        part = cast(Any, vars(part)[word] if word in vars(part) else getattr(part, word))
    return part


@contextmanager
def allow_only(names: Iterable[str]) -> Generator[None, None, None]:
    """Import no module in this block but those of these names."""
    _TRUSTED.append(frozenset(names))
    try:
        yield
    finally:
        _TRUSTED.pop()


def describe_origin(name: str, kind: Kind) -> PluginOrigin:
    """Return where a part comes from; raise `UserError` where it cannot be loaded.

    Of a network that a package brings by name, the hash is that of the name and the package's version.
    """
    if kind == "network" and (package := hubs.package_of(name)):
        version, portable = hubs.package_version(name), hubs.portable_name(name)
        facts = hashlib.sha256(f"{package} {version} {portable}".encode())
        return PluginOrigin(hubs.short_name(portable), package, version, facts.hexdigest())
    part = load(name, kind)
    point = entry_points(kind).get(name)
    where = getattr(part, "__module__", None) or type(part).__module__
    if (kind, name) not in _REGISTERED:
        where = (point.module if point is not None else name.partition(":")[0]) or where
    return PluginOrigin(name, where, _version(where), _digest(where))


def instantiate_method(name: str, part: Any) -> Any:
    """Return what a method's class, or a function that makes one, gives; what is a method already stays as it is."""
    if not isinstance(part, type) and not (callable(part) and not hasattr(part, "client_updates")):
        return part
    try:
        return part()
    except Exception as error:  # whatever somebody else's code does
        raise UserError(
            f"method {name}: calling it without arguments failed ({_why(error)}); every field of a method needs a "
            "default."
        ) from error


def check_method(name: str, method: Any) -> None:
    """Raise `UserError` unless this is an object that has the four functions of a method, and options as fields."""
    functions = ("client_updates", "start", "round", "solution")
    missing = [each for each in functions if not callable(getattr(method, each, None))]
    if missing or not is_dataclass(method) or not method.__dataclass_params__.frozen:  # type: ignore[attr-defined]
        what = f"has no {missing[0]}" if missing else "is no frozen dataclass, whose fields are its options"
        raise UserError(f"method {name} cannot be used: {type(method).__name__} {what} (see halfmoon.Method).")


def class_attribute(kind: type, name: str) -> Any:
    return None if name in {each.name for each in fields(kind)} else getattr(kind, name, None)


def catalog_fields(kind: type) -> dict[str, Any]:
    """Return what stands in the table about a method's class: title, paper, the docstring's first line."""
    about = (kind.__doc__ or "").strip().partition("\n")[0].rstrip(".")
    words = {
        "title": str(class_attribute(kind, "title") or kind.__name__),
        "paper": str(class_attribute(kind, "paper") or ""),
    }
    own = {each: value for each in ("all_labels", "pooled") if (value := class_attribute(kind, each)) is not None}
    return {"about": about, **words, **own}


def _module(where: str, name: str, kind: Kind) -> ModuleType:
    """Import a module that may lie in the present folder, and let processes that are started from here find it too."""
    here = str(Path.cwd())
    try:
        importable = where in sys.modules or util.find_spec(where.partition(".")[0]) is not None
    except (ImportError, ValueError):
        importable = False
    if not importable and here not in sys.path:
        sys.path.insert(0, here)
        paths = [here, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
        os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    try:
        return importlib.import_module(where)
    except Exception as error:  # whatever somebody else's code does
        absent = error.name if isinstance(error, ModuleNotFoundError) else None
        if absent and (where == absent or where.startswith(f"{absent}.")):
            raise UserError(
                f"{kind} {name}: there is no module {absent}, neither installed nor in {here}; install it, or "
                "start in its folder."
            ) from error
        raise UserError(f"{kind} {name}: importing {where} failed ({_why(error)}).") from error


def _version(where: str) -> str:
    """Return the version of the package that brings a module, or the one that the module names."""
    top = where.partition(".")[0]
    for name in _distributions(tuple(sys.path)).get(top, ()):
        return metadata.version(name)
    release = getattr(sys.modules.get(top), "__version__", None)
    return release if isinstance(release, str) and re.fullmatch(r"[\w.+-]{1,40}", release) else "without a version"


@cache
def _distributions(path: tuple[str, ...]) -> Mapping[str, list[str]]:
    """Return the names of the packages on `sys.path` by their modules; it reads the records of all of them."""
    return metadata.packages_distributions()


def _digest(where: str) -> str:
    """Return the SHA-256 of a module's file; of a package, of all its Python files with their names."""
    top = sys.modules.get(where.partition(".")[0])
    paths = [Path(each) for each in getattr(top, "__path__", ())]
    files = sorted((path, path.relative_to(root).as_posix()) for root in paths for path in root.rglob("*.py"))
    if not files and (file := getattr(top, "__file__", None)):
        files = [(Path(file), Path(file).name)]
    digest = hashlib.sha256()
    for path, name in sorted(files, key=lambda each: each[1]):
        if path.is_file():  # typed at a prompt, a module has no file
            digest.update(f"{name}\0".encode() + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def _why(error: Exception) -> str:
    return f"{type(error).__name__}: {one_line(error)[:200]}"


def folder_name(name: str) -> str:
    """Return the name of a folder for a part such as my_module:Mine: colons mean something to tar, scp and Windows."""
    return name.replace(":", ".")
