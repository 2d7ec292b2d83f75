"""Recipes: one TOML file a table or figure of a paper, its grid of runs, and what they are set to.

    title = "FedDure, Table 1"      # how it is called
    paper = "FedDure"
    item = "Table 1"
    about = "one sentence"
    reading = "what the paper leaves open, and how it is read here"
    extends = "_feddure"            # a file beside it whose keys are the defaults of this one's
    kind = "table"                  # table, lines (accuracy against `x`), curves (against rounds), splits (no training)
    rows = "method"
    columns = ["dataset", "setting"]
    x = "gamma"                     # for lines: an axis whose values are named by numbers
    seeds = [0, 1, 2]
    published = { table = "1" }     # which rows of the published numbers the cells are looked up in

    [protocol]                      # options of a run, those of methods in [protocol.options.METHOD]
    rounds = 200

    [axes.method.feddure]           # one value of one axis: its title, and the options that it sets
    title = "FedDure"               # as the paper prints it
    set = { method = "feddure" }
    published = { method = "FedDure" }  # where its name in the published numbers is not its title
    extra = true                    # not of the paper: only where `--only` asks for it

    [[when]]                        # options of some cells, later ones win
    at = { dataset = ["svhn"], setting = ["iid"] }
    set = { labels = 1000 }
    published = { labels = "1000 labels" }

    [scales.small]                  # a scaled-down version, marked in everything that comes out
    about = "what it changes"
    set = { rounds = 40 }
    when = [{ at = { method = ["feddb"] }, set = { steps = 5 } }]

A `set` may hold `unset`, a list of options that go back to their defaults. A cell's options are the protocol, then its
values' in the order of the axes, then `when`, then the scale's and its `when`, then what the command line says.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Literal, get_args

from halfmoon import config as settings
from halfmoon.errors import UserError, nearest
from halfmoon.sweep.published import COLUMNS

Kind = Literal["table", "lines", "curves", "splits"]
Layer = Mapping[str, Any]
"""Options of a run, and perhaps `unset`."""

UNSET = "unset"
_KEYS = {
    "recipe": ("title", "paper", "item", "about", "reading", "extends", "kind", "rows", "columns", "x", "seeds"),
    "tables": ("published", "protocol", "axes", "when", "scales"),
    "value": ("title", "set", "published", "extra"),
    "when": ("at", "set", "published"),
    "scale": ("about", "set", "when"),
}
_NEEDED = ("title", "paper", "item", "about", "rows", "axes")


@dataclass(frozen=True)
class Value:
    """One value of an axis: its name on the command line, the paper's title, and the options that it sets."""

    name: str
    title: str
    set: Layer
    published: Mapping[str, str] | None = None  # None: its title, where its axis is a column of the published numbers
    extra: bool = False


@dataclass(frozen=True)
class When:
    """Options of the cells whose values are among `at`'s, and where else their published numbers stand."""

    at: Mapping[str, tuple[str, ...]]
    set: Layer
    published: Mapping[str, str]

    def meets(self, at: Mapping[str, str]) -> bool:
        """Say whether a cell with these values is meant."""
        return all(at.get(axis) in names for axis, names in self.at.items())


@dataclass(frozen=True)
class Scale:
    """A scaled-down version: `about` says in words what it changes."""

    name: str
    about: str
    set: Layer
    when: tuple[When, ...]


@dataclass(frozen=True)
class Recipe:
    """A table or a figure: what the head of this module describes."""

    name: str
    title: str
    paper: str
    item: str
    about: str
    reading: str
    kind: Kind
    rows: str
    columns: tuple[str, ...]
    x: str | None
    seeds: tuple[int, ...]
    axes: Mapping[str, tuple[Value, ...]]
    protocol: Layer
    when: tuple[When, ...]
    scales: Mapping[str, Scale]
    published: Mapping[str, str]

    def scale(self, name: str) -> Scale:
        """Return a scale by its name; raise UserError with the nearest one for an unknown."""
        if name not in self.scales:
            raise UserError(f"recipe {self.name} has no scale {name!r}: {_nearest(name, self.scales)}")
        return self.scales[name]


def names() -> list[str]:
    """Return the names of the recipes that come with halfmoon."""
    found = (entry.name for entry in _folder().iterdir())
    return sorted(name.removesuffix(".toml") for name in found if name.endswith(".toml") and not name.startswith("_"))


def load(name: str) -> Recipe:
    """Return a recipe that comes with halfmoon, by its name, or of a file, by a path that ends in .toml.

    Raise UserError where there is none, or with the first mistake in it.
    """
    if name.endswith(".toml") or "/" in name:
        return _recipe(Path(name).stem, _read(Path(name)))
    if name not in names():
        raise UserError(f"unknown recipe {name!r}: {nearest(name, names())}")
    with resources.as_file(_folder() / f"{name}.toml") as path:
        return _recipe(name, _read(path))


def layered(layers: Iterable[Layer]) -> dict[str, Any]:
    """Return options of which later layers win; method options are joined one by one.

    Of options that say the same thing (three ways to say how many labels there are), the later displaces the earlier.
    """
    found: dict[str, Any] = {}
    for layer in layers:
        for name in layer.get(UNSET, ()):
            found.pop(name, None)
        if any(name in layer for name in settings.AMOUNTS):
            found = {name: value for name, value in found.items() if name not in settings.AMOUNTS}
        for name, value in layer.items():
            if name == "options":
                found[name] = settings.joined(found.get(name, {}), value, name)
            elif name != UNSET:
                found[name] = value
    return found


def _folder() -> Any:
    return resources.files("halfmoon") / "recipes"


def _read(path: Path) -> dict[str, Any]:
    """Return the keys of a recipe's file, over those of the file that it extends."""
    try:
        own = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read ({error}); give a recipe's name or file.") from error
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{path} is not valid TOML: {error}.") from error
    _check_keys(own, (*_KEYS["recipe"], *_KEYS["tables"]), path.name)
    base = own.get("extends")
    if base is None:
        return own
    under = _read(path.with_name(f"{base}.toml"))
    merged = {**under, **own}
    for table in ("protocol", "published", "scales"):
        merged[table] = {**under.get(table, {}), **own.get(table, {})}
    merged["protocol"] = layered([under.get("protocol", {}), own.get("protocol", {})])
    merged["when"] = [*under.get("when", []), *own.get("when", [])]
    merged["axes"] = _axes_over(under.get("axes", {}), own.get("axes", {}), path.name)
    return merged


def _axes_over(under: Mapping[str, Any], own: Mapping[str, Any], file: str) -> dict[str, Any]:
    """Return a recipe's own axes; a value without keys is the one of that name in the file that it extends."""
    axes: dict[str, Any] = {}
    for axis, values in own.items():
        known = under.get(axis, {})
        if isinstance(values, list):
            unknown = [name for name in values if name not in known]
            if unknown:
                raise UserError(f"{file}: axis {axis} has no value {unknown[0]!r}: {_nearest(unknown[0], known)}")
            axes[axis] = {name: known[name] for name in values}
        else:
            axes[axis] = {name: value or known.get(name, {}) for name, value in values.items()}
    return axes


def _recipe(name: str, keys: Mapping[str, Any]) -> Recipe:
    where = f"recipe {name}"
    missing = [key for key in _NEEDED if key not in keys]
    if missing:
        raise UserError(f"{where}: {missing[0]} is missing; see halfmoon.sweep.recipe for what a recipe holds.")
    axes = {axis: _values(axis, values, where) for axis, values in keys["axes"].items()}
    # A base file speaks of axes and values that not every recipe over it has.
    known = None if "extends" in keys else {axis: [value.name for value in values] for axis, values in axes.items()}
    whens = tuple(_when(each, known, where) for each in keys.get("when", ()))
    scales = {each: _scale(each, value, known, where) for each, value in keys.get("scales", {}).items()}
    kind = keys.get("kind", "table")
    if kind not in get_args(Kind):
        raise UserError(f"{where}: kind is {kind!r}: {_nearest(kind, get_args(Kind))}")
    for key in ("rows", "x"):
        if keys.get(key) is not None and keys[key] not in axes:
            raise UserError(f"{where}: {key} is {keys[key]!r}, which is no axis: {_nearest(keys[key], axes)}")
    columns = tuple(keys.get("columns", [axis for axis in axes if axis != keys["rows"]]))
    for axis in columns:
        if axis not in axes:
            raise UserError(f"{where}: columns has {axis!r}, which is no axis: {_nearest(axis, axes)}")
    _check_layer(keys.get("protocol", {}), f"{where}, protocol")
    _check_keys(keys.get("published", {}), COLUMNS, f"{where}, published")
    return Recipe(
        name,
        *(str(keys[key]) for key in ("title", "paper", "item", "about")),
        reading=str(keys.get("reading", "")),
        kind=kind,
        rows=keys["rows"],
        columns=columns,
        x=keys.get("x"),
        seeds=_seeds(keys.get("seeds", [0]), where),
        axes=axes,
        protocol=keys.get("protocol", {}),
        when=whens,
        scales=scales,
        published=keys.get("published", {}),
    )


def _seeds(value: Any, where: str) -> tuple[int, ...]:
    whole = isinstance(value, list) and all(type(each) is int and each >= 0 for each in value)
    if not whole or not value or len(set(value)) < len(value):
        raise UserError(f"{where}: seeds must be different whole numbers from 0, in a list.")
    return tuple(value)


def _values(axis: str, values: Any, where: str) -> tuple[Value, ...]:
    if not isinstance(values, Mapping) or not values:
        raise UserError(f"{where}: axis {axis} has no values; write [axes.{axis}.NAME] for each.")
    made = []
    for name, keys in values.items():
        here = f"{where}, axis {axis}, value {name}"
        if not isinstance(keys, Mapping) or not keys:
            raise UserError(f"{here}: it needs a title and what it sets.")
        _check_keys(keys, _KEYS["value"], here)
        _check_layer(keys.get("set", {}), here)
        title = str(keys.get("title", name))
        _check_keys(keys.get("published", {}), COLUMNS, f"{here}, published")
        made.append(Value(name, title, keys.get("set", {}), keys.get("published"), bool(keys.get("extra"))))
    return tuple(made)


def _when(keys: Any, known: Mapping[str, list[str]] | None, where: str) -> When:
    here = f"{where}, when"
    _check_keys(keys, _KEYS["when"], here)
    at: dict[str, tuple[str, ...]] = {}
    for axis, meant in keys.get("at", {}).items():
        at[axis] = (meant,) if isinstance(meant, str) else tuple(meant)
        if known is None:
            continue
        if axis not in known:
            raise UserError(f"{here}: {axis!r} is no axis: {_nearest(axis, known)}")
        for name in at[axis]:
            if name not in known[axis]:
                raise UserError(f"{here}: axis {axis} has no value {name!r}: {_nearest(name, known[axis])}")
    _check_layer(keys.get("set", {}), here)
    _check_keys(keys.get("published", {}), COLUMNS, f"{here}, published")
    return When(at, keys.get("set", {}), keys.get("published", {}))


def _scale(name: str, keys: Any, known: Mapping[str, list[str]] | None, where: str) -> Scale:
    here = f"{where}, scale {name}"
    _check_keys(keys, _KEYS["scale"], here)
    if not keys.get("about"):
        raise UserError(f"{here}: about is missing; say in words what the scale changes.")
    _check_layer(keys.get("set", {}), here)
    return Scale(
        name, str(keys["about"]), keys.get("set", {}), tuple(_when(e, known, here) for e in keys.get("when", ()))
    )


def _check_keys(keys: Any, known: Sequence[str], where: str) -> None:
    if not isinstance(keys, Mapping):
        raise UserError(f"{where}: it must be a table.")
    for key in keys:
        if key not in known:
            raise UserError(f"{where}: unknown field {key!r}: {nearest(key, known)}")


def _check_layer(layer: Any, where: str) -> None:
    """Raise UserError for the first option that a run does not have; values are checked with the cell."""
    if not isinstance(layer, Mapping):
        raise UserError(f"{where}: set must be a table of options.")
    for name in (*layer, *layer.get(UNSET, ())):
        if name not in (*settings.helps(), UNSET):
            raise UserError(f"{where}: unknown option {name!r}: {nearest(name, settings.helps())}")


def _nearest(word: str, choices: Iterable[str]) -> str:
    found = list(choices)
    return nearest(word, found) if found else "there is none."
