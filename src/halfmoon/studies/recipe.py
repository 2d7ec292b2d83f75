"""Recipes: one TOML file a table or figure of a paper, its grid of runs, and what they are set to.

docs/recipes.md, "A recipe of one's own", says what a file holds, field by field; `recipe_file.KEYS` which fields there
are. A value of an axis may say how the published numbers call it, and a scale how the paper is read there (`reading`).
A `set` may hold `unset`, a list of options that go back to their defaults. A cell's options are the protocol, then its
values' in the order of the axes, then `when`, then the scale's and its `when`, then what the command line says. A scale
that both files have is the base's, then this one's; what is said `about` it is this one's.
"""

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from halfmoon.core.errors import UserError, suggest
from halfmoon.studies.recipe_file import INHERITED, Layer, check_layer, check_shape, folder, nearest_of, read

Kind = Literal["table", "lines", "curves", "splits"]
At = Mapping[str, tuple[str, ...]]
"""Which values of which axes are meant; an axis that is not named is meant with all its values."""
MEASURES: Mapping[str, str] = {
    "test": "test accuracy",
    "pseudo": "accuracy of pseudo-labels",
    "used": "share of unlabeled images with a pseudo-label",
    "pseudo.local": "accuracy of the local model's pseudo-labels",
    "pseudo.global": "accuracy of the global model's pseudo-labels",
}
"""What can be compared, in words."""
AxisValues = Mapping[str, Sequence[str]]
"""The names of the values of every axis."""

COLUMNS: Mapping[str, type] = dict.fromkeys(("paper", "table", "dataset", "setting", "labels", "method"), object)
"""The columns of the published numbers (`halfmoon/recipes/published.csv`)."""
_VALUE: Mapping[str, type] = dict.fromkeys(("title", "set", "published", "measure", "extra"), object)
_WHEN: Mapping[str, type] = dict.fromkeys(("at", "set", "published"), object)
_NEEDED = ("title", "paper", "item", "about", "rows", "axes")


@dataclass(frozen=True)
class Value:
    """One value of an axis: its name on the command line, the paper's title, and the options that it sets."""

    name: str
    title: str
    set: Layer
    published: Mapping[str, str] | None = None  # None: its title, where its axis is a column of the published numbers
    measure: str | None = None  # None: the recipe's
    extra: bool = False


@dataclass(frozen=True)
class When:
    """Options of the cells whose values are among `at`'s, and where else their published numbers stand."""

    at: At
    set: Layer
    published: Mapping[str, str]


@dataclass(frozen=True)
class Scale:
    """A scaled-down version; `about` says in words what it changes, `reading` replaces the recipe's if not ""."""

    name: str
    about: str
    set: Layer
    when: tuple[When, ...]
    reading: str = ""


@dataclass(frozen=True)
class Recipe:
    """A table or a figure; docs/recipes.md says what its fields are."""

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
    measure: str = "test"
    panels: Mapping[str, At] = field(default_factory=dict)
    skip: tuple[At, ...] = ()
    sources: str = ""

    def scale(self, name: str) -> Scale:
        """Return a scale by its name; raise UserError with the nearest one for an unknown."""
        if name not in self.scales:
            raise UserError(f"recipe {self.name} has no scale {name!r}: {nearest_of(name, self.scales)}")
        return self.scales[name]

    def words(self, scale: Scale | None) -> str:
        """Return how the paper is read, and at full scale where in it the protocol stands."""
        if scale is not None:
            return scale.reading or self.reading
        return " ".join(part for part in (self.reading, self.sources) if part)


def meets(selected: At, at: Mapping[str, str]) -> bool:
    return all(at.get(axis) in names for axis, names in selected.items())


def names() -> list[str]:
    entries = (entry.name for entry in folder().iterdir())
    return sorted(name.removesuffix(".toml") for name in entries if name.endswith(".toml") and not name.startswith("_"))


def load(name: str) -> Recipe:
    """Return a recipe that comes with halfmoon, by its name, or of a file, by a path that ends in .toml.

    Raise UserError where there is none, or with the first mistake in it.
    """
    if name.endswith(".toml") or "/" in name:
        return _recipe(Path(name).stem, read(Path(name)))
    if name not in names():
        raise UserError(f"unknown recipe {name!r}: {suggest(name, names())}")
    with resources.as_file(folder() / f"{name}.toml") as path:
        return _recipe(name, read(path))


def _recipe(name: str, keys: Mapping[str, Any]) -> Recipe:
    where = f"recipe {name}"
    missing = [key for key in _NEEDED if key not in keys]
    if missing:
        raise UserError(f"{where}: {missing[0]} is missing; docs/recipes.md says what a recipe holds.")
    axes = {axis: _values(axis, values, where) for axis, values in keys["axes"].items()}
    axis_values = {axis: [value.name for value in values] for axis, values in axes.items()}
    inherited = keys.get(INHERITED, {})
    whens = _whens(keys.get("when", []), inherited.get("", 0), axis_values, where)
    scales = {
        entry: _scale(entry, value, inherited.get(entry, 0), axis_values, where)
        for entry, value in keys.get("scales", {}).items()
    }
    kind = keys.get("kind", "table")
    if kind not in get_args(Kind):
        raise UserError(f"{where}: kind is {kind!r}: {nearest_of(kind, get_args(Kind))}")
    for key in ("rows", "x"):
        if keys.get(key) is not None and keys[key] not in axes:
            raise UserError(f"{where}: {key} is {keys[key]!r}, which is no axis: {nearest_of(keys[key], axes)}")
    columns = tuple(map(str, keys.get("columns", [axis for axis in axes if axis != keys["rows"]])))
    for axis in columns:
        if axis not in axes:
            raise UserError(f"{where}: columns has {axis!r}, which is no axis: {nearest_of(axis, axes)}")
    check_shape(keys.get("published", {}), COLUMNS, f"{where}, published")
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
        measure=_measure(keys.get("measure", "test"), where),
        panels={name: _at(at, axis_values, f"{where}, panel {name}") for name, at in keys.get("panels", {}).items()},
        skip=_skip(keys.get("skip", []), axis_values, where),
        sources=str(keys.get("sources", "")),
    )


def _measure(name: Any, where: str) -> str:
    if name not in MEASURES:
        raise UserError(f"{where}: measure is {name!r}: {suggest(str(name), MEASURES)}")
    return name


def _skip(value: Sequence[Any], axis_values: AxisValues, where: str) -> tuple[At, ...]:
    entries = tuple(_at(entry, axis_values, f"{where}, skip") for entry in value)
    if not all(entries):
        raise UserError(f"{where}, skip: an entry without an axis would leave out every cell; remove it.")
    return entries


def _seeds(value: Sequence[Any], where: str) -> tuple[int, ...]:
    whole = all(type(entry) is int and entry >= 0 for entry in value)
    if not whole or not value or len(set(value)) < len(value):
        raise UserError(f"{where}: seeds must be different whole numbers from 0, in a list.")
    return tuple(value)


def _values(axis: str, values: Any, where: str) -> tuple[Value, ...]:
    if not isinstance(values, Mapping) or not values:
        raise UserError(f"{where}: axis {axis} has no values; write [axes.{axis}.NAME] for each.")
    result = []
    for name, keys in values.items():
        here = f"{where}, axis {axis}, value {name}"
        if not isinstance(keys, Mapping) or not keys:
            raise UserError(f"{here}: it needs a title and what it sets.")
        check_shape(keys, _VALUE, here)
        check_layer(keys.get("set", {}), here)
        title = str(keys.get("title", name))
        check_shape(keys.get("published", {}), COLUMNS, f"{here}, published")
        measure = _measure(keys["measure"], here) if "measure" in keys else None
        result.append(Value(name, title, keys.get("set", {}), keys.get("published"), measure, bool(keys.get("extra"))))
    return tuple(result)


def _whens(all_of: Sequence[Any], inherited: int, axis_values: AxisValues, where: str) -> tuple[When, ...]:
    """Return what is said of some cells; a base file speaks of axes and values that not every recipe over it has."""
    return tuple(_when(entry, axis_values if place >= inherited else None, where) for place, entry in enumerate(all_of))


def _when(keys: Any, axis_values: AxisValues | None, where: str) -> When:
    here = f"{where}, when"
    check_shape(keys, _WHEN, here)
    check_layer(keys.get("set", {}), here)
    check_shape(keys.get("published", {}), COLUMNS, f"{here}, published")
    return When(_at(keys.get("at", {}), axis_values, here), keys.get("set", {}), keys.get("published", {}))


def _at(keys: Any, axis_values: AxisValues | None, where: str) -> At:
    """Return which values are meant; they have to be among `axis_values`, where these are known."""
    if not isinstance(keys, Mapping):
        raise UserError(f"{where}: it must be a table of axes with the values that are meant.")
    at: dict[str, tuple[str, ...]] = {}
    for axis, selected in keys.items():
        names = [selected] if isinstance(selected, str) else selected if isinstance(selected, list) else ()
        at[axis] = tuple(map(str, names))
        if not at[axis]:
            raise UserError(f"{where}: {axis} must be the name of a value, or a list of names.")
        if axis_values is None:
            continue
        if axis not in axis_values:
            raise UserError(f"{where}: {axis!r} is no axis: {nearest_of(axis, axis_values)}")
        for name in at[axis]:
            if name not in axis_values[axis]:
                raise UserError(f"{where}: axis {axis} has no value {name!r}: {nearest_of(name, axis_values[axis])}")
    return at


def _scale(name: str, keys: Mapping[str, Any], inherited: int, axis_values: AxisValues, where: str) -> Scale:
    here = f"{where}, scale {name}"
    if not keys.get("about"):
        raise UserError(f"{here}: about is missing; say in words what the scale changes.")
    whens = _whens(keys.get("when", []), inherited, axis_values, here)
    return Scale(name, keys["about"], keys.get("set", {}), whens, keys.get("reading", ""))


class Published(NamedTuple):
    """A published test accuracy in percent; `deviation` is as the paper gives it, None where it gives none."""

    mean: float
    deviation: float | None
    note: str


def lookup(where: Mapping[str, str]) -> Published | None:
    """Return the one published number whose columns are all as in `where`; None where there is none, or several."""
    values = tuple(where.values())
    rows = _by(tuple(where)).get(values, []) if all(isinstance(value, str) for value in values) else []
    if len(rows) != 1 or not rows[0]["mean"]:
        return None
    (row,) = rows
    return Published(float(row["mean"]), float(row["std"]) if row["std"] else None, row["note"])


@cache
def _by(columns: tuple[str, ...]) -> Mapping[tuple[str, ...], list[Mapping[str, str]]]:
    """Return the rows by what stands in some columns: a sweep looks up thousands of cells."""
    rows: dict[tuple[str, ...], list[Mapping[str, str]]] = {}
    for row in _rows():
        rows.setdefault(tuple(row[column] for column in columns), []).append(row)
    return rows


@cache
def _rows() -> tuple[Mapping[str, str], ...]:
    words = (folder() / "published.csv").read_text(encoding="utf-8")
    return tuple(csv.DictReader(words.splitlines()))
