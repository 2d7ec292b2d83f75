"""Plugins: methods, networks and split rules of a user's module or an installed package.

A plugin is named "my_module:Name", or by the name of an entry point of its package. Modules are also searched in the
folder in which a command is started, by its child processes too. If names come from a federation's terms or a model
file, `allow_only` limits the modules that may be imported: a name in a file or a message never makes this process run
code that its user did not name.
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
"""Entry point group of each kind of plugin."""

SPEC = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
"""Name of a plugin in a module."""

_REGISTERED: dict[tuple[Kind, str], Any] = {}
_TRUSTED: list[frozenset[str]] = []  # a stack: the last set applies; if it is empty, all plugins are trusted


@dataclass(frozen=True)
class PluginOrigin:
    """Origin of a plugin.

    Attributes:
        name: its name.
        module: its module, or its package.
        version: version of the package.
        sha256: hash of the source.
    """

    name: str
    module: str
    version: str
    sha256: str

    def __str__(self) -> str:
        return f"{self.name} from {self.module} {self.version} sha256 {self.sha256}"


def register(kind: Kind, name: str, plugin: Any) -> None:
    """Register a plugin under a name in this process; an earlier one of that name is replaced."""
    _REGISTERED[kind, name] = plugin


@cache
def entry_points(kind: Kind) -> dict[str, metadata.EntryPoint]:
    """List the entry points of a kind, by name."""
    return {point.name: point for point in metadata.entry_points(group=GROUPS[kind])}


def is_plugin(name: str, kind: Kind) -> bool:
    """Check whether a name is that of a plugin, without importing it."""
    if kind == "network" and hubs.package_of(name):
        return True
    return (kind, name) in _REGISTERED or bool(SPEC.fullmatch(name)) or name in entry_points(kind)


def is_module(name: str) -> bool:
    """Check whether the current folder contains a module of this name."""
    path = Path(*name.split("."))
    # Path.is_file raises OSError for names that are too long for the file system.
    return os.path.isfile(path.with_suffix(".py")) or os.path.isfile(path / "__init__.py")


def load(name: str, kind: Kind) -> Any:
    """Load a plugin: a registered object, an entry point of an installed package, or "my_module:Name".

    Args:
        name: its name.
        kind: what it is, such as "method" or "network"; names of different kinds are independent.

    Raises:
        UserError: there is no such plugin, importing it fails, or `allow_only` forbids it: inside of that context, only
            the modules that the user has named are imported, not those that a file or a server names.
    """
    if (kind, name) in _REGISTERED:
        return _REGISTERED[kind, name]
    entry_point = entry_points(kind).get(name)
    if entry_point is not None:
        try:
            return entry_point.load()
        except Exception as error:  # code of another package may raise anything
            raise UserError(f"{kind} {name}: {entry_point.value} cannot be loaded ({_describe(error)}).") from error
    if not SPEC.fullmatch(name):
        raise UserError(f"{kind} {name!r} is not the name of a plugin: write my_module:Name.")
    # A stack of the names allowed by nested `allow_only`; everything is allowed if it is empty.
    if _TRUSTED and name not in _TRUSTED[-1]:
        raise UserError(
            f"{kind} {name} is code from outside halfmoon, which is not loaded because a file or a server names it",
            option=kind,
            hint=f"if you have it and trust it, give {{{kind}={name}}}.",
        )
    module, _, path = name.partition(":")
    plugin: Any = _import_module(module, name, kind)
    for attribute in path.split("."):
        if not hasattr(plugin, attribute):
            raise UserError(f"{kind} {name}: module {module} has no {path}.")
        # vars() returns a function of a class as it was written, without binding it.
        attributes = cast("dict[str, Any]", vars(plugin))
        plugin = attributes[attribute] if attribute in attributes else getattr(plugin, attribute)
    return plugin


@contextmanager
def allow_only(names: Iterable[str]) -> Generator[None, None, None]:
    """Within this block, import only the plugins with these names."""
    _TRUSTED.append(frozenset(names))
    try:
        yield
    finally:
        _TRUSTED.pop()


def describe_origin(name: str, kind: Kind) -> PluginOrigin:
    """Describe the origin of a plugin: its module, version and a hash of its code. Raise `UserError` if it cannot be loaded.

    A run records it, so that a changed plugin is noticed when the run is continued or repeated. For a network of
    another package (torchvision, timm, ...) the hash is that of its name and the package's version.

    Args:
        name: the name of the plugin: that of an entry point, or "module:attribute".
        kind: what the plugin is, such as "method" or "network".
    """
    if kind == "network" and (package := hubs.package_of(name)):
        version = hubs.package_version(name)
        portable = hubs.portable_name(name)
        digest = hashlib.sha256(f"{package} {version} {portable}".encode())
        return PluginOrigin(hubs.short_name(portable), package, version, digest.hexdigest())
    plugin = load(name, kind)
    entry_point = entry_points(kind).get(name)
    module = getattr(plugin, "__module__", None) or type(plugin).__module__
    if (kind, name) not in _REGISTERED:
        # The module that the name states comes first, because an object may have been defined in another one.
        module = (entry_point.module if entry_point is not None else name.partition(":")[0]) or module
    return PluginOrigin(name, module, _package_version(module), _source_digest(module))


def instantiate_method(name: str, plugin: Any) -> Any:
    """Call a method's class, or a function that makes a method; an object that is a method is returned unchanged.

    Args:
        name: the name of the method, for messages.
        plugin: the class, the function or the object that was loaded by this name.

    Raises:
        UserError: the class or the function needs arguments, or fails.
    """
    is_class = isinstance(plugin, type)
    is_factory = callable(plugin) and not hasattr(plugin, "client_updates")
    if not is_class and not is_factory:
        return plugin
    try:
        return plugin()
    except Exception as error:  # code of another package may raise anything
        raise UserError(
            f"method {name}: calling it without arguments failed ({_describe(error)}); every field of a method needs a "
            "default."
        ) from error


def check_method(name: str, method: Any) -> None:
    """Check that an object has the four functions of a method, and its options as fields; raises `UserError`."""
    functions = ("client_updates", "start", "round", "solution")
    missing = [function for function in functions if not callable(getattr(method, function, None))]
    if missing or not is_dataclass(method) or not method.__dataclass_params__.frozen:  # type: ignore[attr-defined]
        fault = f"has no {missing[0]}" if missing else "is no frozen dataclass, whose fields are its options"
        raise UserError(f"method {name} cannot be used: {type(method).__name__} {fault} (see halfmoon.Method).")


def class_attribute(method_class: type, name: str) -> Any:
    """Get an attribute of a method's dataclass; None if there is none, or if it is a field and so an option."""
    option_names = {option.name for option in fields(method_class)}
    return None if name in option_names else getattr(method_class, name, None)


def catalog_fields(method_class: type) -> dict[str, Any]:
    """Collect the description of a method class (a training algorithm) for the table that lists all methods.

    Returns:
        "about" (the first line of the docstring), "title" and "paper" as texts, and of the flags "all_labels" (it
        trains with all labels, as an upper bound) and "pooled" (it trains on the data of all clients together) those
        that the class sets.
    """
    about = (method_class.__doc__ or "").strip().partition("\n")[0].rstrip(".")
    texts = {
        "title": str(class_attribute(method_class, "title") or method_class.__name__),
        "paper": str(class_attribute(method_class, "paper") or ""),
    }
    flags = {}
    for flag in ("all_labels", "pooled"):
        value = class_attribute(method_class, flag)
        if value is not None:
            flags[flag] = value
    return {"about": about, **texts, **flags}


def _import_module(module: str, name: str, kind: Kind) -> ModuleType:
    """Import a plugin's module, from an installed package or the current folder; child processes find it, too.

    Args:
        module: the name of the module.
        name: the name of the plugin, for messages.
        kind: what the plugin is, for messages.

    Raises:
        UserError: the module does not exist or raises an error.
    """
    folder = str(Path.cwd())
    try:
        importable = module in sys.modules or util.find_spec(module.partition(".")[0]) is not None
    except (ImportError, ValueError):
        importable = False
    if not importable and folder not in sys.path:
        sys.path.insert(0, folder)
        paths = [folder, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
        os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    try:
        return importlib.import_module(module)
    except Exception as error:  # code of another package may raise anything
        absent = error.name if isinstance(error, ModuleNotFoundError) else None
        if absent and (module == absent or module.startswith(f"{absent}.")):
            raise UserError(
                f"{kind} {name}: there is no module {absent}, neither installed nor in {folder}; install it, or "
                "start in its folder."
            ) from error
        raise UserError(f"{kind} {name}: importing {module} failed ({_describe(error)}).") from error


def _package_version(module: str) -> str:
    """Find the version of a module's package, or otherwise that in the module's `__version__`."""
    top = module.partition(".")[0]
    for name in _distributions(tuple(sys.path)).get(top, ()):
        return metadata.version(name)
    release = getattr(sys.modules.get(top), "__version__", None)
    return release if isinstance(release, str) and re.fullmatch(r"[\w.+-]{1,40}", release) else "without a version"


@cache
def _distributions(path: tuple[str, ...]) -> Mapping[str, list[str]]:
    """List the packages on `sys.path` by their modules. This reads the records of all packages, so it is cached."""
    return metadata.packages_distributions()


def _source_digest(module: str) -> str:
    """Compute a SHA-256 of the code that a module belongs to.

    Args:
        module: the name of an imported module. In a package, all Python files of the top-level package and their names
            are hashed, as the module may call any of them; otherwise the module's file.
    """
    top_package = sys.modules.get(module.partition(".")[0])
    folders = [Path(folder) for folder in getattr(top_package, "__path__", ())]
    files = sorted((path, path.relative_to(folder).as_posix()) for folder in folders for path in folder.rglob("*.py"))
    if not files and (file := getattr(top_package, "__file__", None)):
        files = [(Path(file), Path(file).name)]
    digest = hashlib.sha256()
    for path, name in sorted(files, key=lambda file: file[1]):
        if path.is_file():  # a module that was typed at a prompt has no file
            digest.update(f"{name}\0".encode() + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {one_line(error)[:200]}"


RESERVED_NAMES = frozenset(
    {"con", "prn", "aux", "nul", *(f"{port}{number}" for port in ("com", "lpt") for number in range(1, 10))}
)
"""Names, in lower case and before their first dot, that Windows does not allow for files and folders."""


def folder_name(name: str) -> str:
    """Turn a name, such as that of a plugin, into that of a folder, which Windows allows as well.

    Colons, which have a meaning for tar and scp too, become dots, and other letters that Windows refuses become dashes.
    Names that it reserves, and those with a dot or a blank at their end, get an underscore.
    """
    name = re.sub(r'[<>"/\\|?*\x00-\x1f]', "-", name.replace(":", "."))
    if name.partition(".")[0].strip().lower() in RESERVED_NAMES:
        name = f"_{name}"
    return f"{name}_" if name.endswith((".", " ")) else name
