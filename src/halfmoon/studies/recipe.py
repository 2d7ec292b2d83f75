"""Recipes: one TOML file for each table or figure of a paper, with its grid of runs and their options.

docs/recipes.md, "A recipe of one's own", describes the file field by field, and `recipe_file.KEYS` lists the fields.

The options of a cell are merged from layers; later layers win: the protocol, the cell's values in the order of the
axes, the `when` entries that hold in the cell, the scale, the scale's `when` entries, the command line. `set` may hold
`unset`, a list of options that return to their defaults. If a recipe and the file that it extends both have a scale,
the recipe's layer is applied after the base's, and the recipe's `about` replaces the base's.
"""

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from halfmoon.core.errors import UserError, suggest
from halfmoon.studies.recipe_file import (
    INHERITED,
    Layer,
    check_keys,
    check_layer,
    read_recipe,
    recipes_folder,
    suggest_choice,
)

Kind = Literal["table", "lines", "curves", "splits"]

AxisSelection = Mapping[str, tuple[str, ...]]
"""A set of cells: the allowed values by axis; an axis without an entry is not restricted."""

MEASURES: Mapping[str, str] = {
    "test": "test accuracy",
    "pseudo": "accuracy of pseudo-labels",
    "used": "share of unlabeled images with a pseudo-label",
    "pseudo.local": "accuracy of the local model's pseudo-labels",
    "pseudo.global": "accuracy of the global model's pseudo-labels",
}
"""The quantities that a table can compare, with their titles."""

AxisValues = Mapping[str, Sequence[str]]
"""The names of the values of every axis."""

COLUMNS: Mapping[str, type] = dict.fromkeys(("paper", "table", "dataset", "setting", "labels", "method"), object)
"""The columns of the published numbers (`halfmoon/recipes/published.csv`)."""

_VALUE_KEYS: Mapping[str, type] = dict.fromkeys(("title", "set", "published", "measure", "extra"), object)
_WHEN_KEYS: Mapping[str, type] = dict.fromkeys(("at", "set", "published"), object)
_REQUIRED_KEYS = ("title", "paper", "item", "about", "rows", "axes")


@dataclass(frozen=True)
class Value:
    """One value of an axis.

    Attributes:
        name: The name on the command line.
        title: The title in the paper's table.
        set: The options that the value sets.
        published: The columns of its published numbers. None means its title, if its axis is one of the columns.
        measure: The quantity that its cells compare. None means the recipe's.
        extra: The paper does not have this value; it is trained only if it is selected.
    """

    name: str
    title: str
    set: Layer
    published: Mapping[str, str] | None = None
    measure: str | None = None
    extra: bool = False


@dataclass(frozen=True)
class When:
    """A condition: options of the cells in `at`, and the columns of their published numbers."""

    at: AxisSelection
    set: Layer
    published: Mapping[str, str]


@dataclass(frozen=True)
class Scale:
    """A scaled-down version of a recipe.

    Attributes:
        name: The name on the command line.
        about: A description of the changes.
        set: The options that it sets.
        when: Further options of some cells.
        reading: Replaces the recipe's `reading` unless it is empty.
    """

    name: str
    about: str
    set: Layer
    when: tuple[When, ...]
    reading: str = ""


@dataclass(frozen=True)
class Recipe:
    """A table or a figure of a paper; docs/recipes.md describes the fields."""

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
    panels: Mapping[str, AxisSelection] = field(default_factory=dict)
    skip: tuple[AxisSelection, ...] = ()
    sources: str = ""

    def scale(self, name: str) -> Scale:
        """Return the scale of this name.

        Raises:
            UserError: If there is none; the message suggests a similar name.
        """
        if name not in self.scales:
            raise UserError(f"recipe {self.name} has no scale {name!r}: {suggest_choice(name, self.scales)}")
        return self.scales[name]

    def describe_reading(self, scale: Scale | None) -> str:
        """Describe how the recipe interprets the paper, and, for the full experiment, its sources in the paper."""
        if scale is not None:
            return scale.reading or self.reading
        return " ".join(text for text in (self.reading, self.sources) if text)


def matches_axes(selection: AxisSelection, at: Mapping[str, str]) -> bool:
    """Return True if the cell with the values `at` is in a set of cells."""
    return all(at.get(axis) in names for axis, names in selection.items())


def list_names() -> list[str]:
    """List the names of the recipes that halfmoon ships, without base files, which start with "_"."""
    entries = (entry.name for entry in recipes_folder().iterdir())
    return sorted(name.removesuffix(".toml") for name in entries if name.endswith(".toml") and not name.startswith("_"))


def load(name: str) -> Recipe:
    """Load a recipe.

    Args:
        name: The name of a recipe that halfmoon ships, or a path that ends in .toml.

    Raises:
        UserError: If there is no such recipe, or for the first mistake in its file.
    """
    if name.endswith(".toml") or "/" in name:
        return _parse_recipe(Path(name).stem, read_recipe(Path(name)))
    if name not in list_names():
        raise UserError(f"unknown recipe {name!r}: {suggest(name, list_names())}")
    with resources.as_file(recipes_folder() / f"{name}.toml") as path:
        return _parse_recipe(name, read_recipe(path))


def _parse_recipe(name: str, keys: Mapping[str, Any]) -> Recipe:
    """Check the keys of a recipe's file and build the recipe.

    Raises:
        UserError: For the first mistake.
    """
    section = f"recipe {name}"
    missing = [key for key in _REQUIRED_KEYS if key not in keys]
    if missing:
        raise UserError(f"{section}: {missing[0]} is missing; docs/recipes.md describes the fields of a recipe.")
    axes = {axis: _parse_values(axis, values, section) for axis, values in keys["axes"].items()}
    axis_values = {axis: [value.name for value in values] for axis, values in axes.items()}
    inherited = keys.get(INHERITED, {})
    whens = _parse_whens(keys.get("when", []), inherited.get("", 0), axis_values, section)
    scales = {
        scale: _parse_scale(scale, scale_keys, inherited.get(scale, 0), axis_values, section)
        for scale, scale_keys in keys.get("scales", {}).items()
    }
    kind = keys.get("kind", "table")
    if kind not in get_args(Kind):
        raise UserError(f"{section}: kind is {kind!r}: {suggest_choice(kind, get_args(Kind))}")
    for key in ("rows", "x"):
        if keys.get(key) is not None and keys[key] not in axes:
            raise UserError(f"{section}: {key} is {keys[key]!r}, which is no axis: {suggest_choice(keys[key], axes)}")
    columns = tuple(map(str, keys.get("columns", [axis for axis in axes if axis != keys["rows"]])))
    for axis in columns:
        if axis not in axes:
            raise UserError(f"{section}: columns has {axis!r}, which is no axis: {suggest_choice(axis, axes)}")
    check_keys(keys.get("published", {}), COLUMNS, f"{section}, published")
    panels = {
        panel: _parse_axis_selection(at, axis_values, f"{section}, panel {panel}")
        for panel, at in keys.get("panels", {}).items()
    }
    return Recipe(
        name=name,
        title=str(keys["title"]),
        paper=str(keys["paper"]),
        item=str(keys["item"]),
        about=str(keys["about"]),
        reading=str(keys.get("reading", "")),
        kind=kind,
        rows=keys["rows"],
        columns=columns,
        x=keys.get("x"),
        seeds=_parse_seeds(keys.get("seeds", [0]), section),
        axes=axes,
        protocol=keys.get("protocol", {}),
        when=whens,
        scales=scales,
        published=keys.get("published", {}),
        measure=_parse_measure(keys.get("measure", "test"), section),
        panels=panels,
        skip=_parse_skip(keys.get("skip", []), axis_values, section),
        sources=str(keys.get("sources", "")),
    )


def _parse_measure(name: Any, section: str) -> str:
    """Check the name of a measure."""
    if name not in MEASURES:
        raise UserError(f"{section}: measure is {name!r}: {suggest(str(name), MEASURES)}")
    return name


def _parse_skip(entries: Sequence[Any], axis_values: AxisValues, section: str) -> tuple[AxisSelection, ...]:
    """Parse the sets of cells that a recipe leaves out."""
    skipped = tuple(_parse_axis_selection(entry, axis_values, f"{section}, skip") for entry in entries)
    if not all(skipped):
        raise UserError(f"{section}, skip: an entry without an axis would leave out every cell; remove it.")
    return skipped


def _parse_seeds(seeds: Sequence[Any], section: str) -> tuple[int, ...]:
    """Check a recipe's seeds."""
    # bool is a subclass of int: `seeds = [true]` must be an error.
    all_integers = all(type(seed) is int and seed >= 0 for seed in seeds)
    if not all_integers or not seeds or len(set(seeds)) < len(seeds):
        raise UserError(f"{section}: seeds must be different whole numbers from 0, in a list.")
    return tuple(seeds)


def _parse_values(axis: str, values: Any, section: str) -> tuple[Value, ...]:
    """Parse the values of an axis of a recipe's table, such as its methods.

    Args:
        axis: the name of the axis.
        values: the table of the file: keys of each value by its name.
        section: the part of the file, for messages.

    Raises:
        UserError: For an axis without values, or an unknown key, option or column.
    """
    if not isinstance(values, Mapping) or not values:
        raise UserError(f"{section}: axis {axis} has no values; write [axes.{axis}.NAME] for each.")
    parsed = []
    for name, keys in values.items():
        subsection = f"{section}, axis {axis}, value {name}"
        if not isinstance(keys, Mapping) or not keys:
            raise UserError(f"{subsection}: it needs a title and what it sets.")
        check_keys(keys, _VALUE_KEYS, subsection)
        check_layer(keys.get("set", {}), subsection)
        check_keys(keys.get("published", {}), COLUMNS, f"{subsection}, published")
        value = Value(
            name=name,
            title=str(keys.get("title", name)),
            set=keys.get("set", {}),
            published=keys.get("published"),
            measure=_parse_measure(keys["measure"], subsection) if "measure" in keys else None,
            extra=bool(keys.get("extra")),
        )
        parsed.append(value)
    return tuple(parsed)


def _parse_whens(entries: Sequence[Any], inherited: int, axis_values: AxisValues, section: str) -> tuple[When, ...]:
    """Parse `when` entries, of which the first `inherited` come from the base file."""
    whens = []
    for index, entry in enumerate(entries):
        # Many recipes extend one base file, whose entries may name axes and values that this recipe does not have.
        known_values = axis_values if index >= inherited else None
        whens.append(_parse_when(entry, known_values, section))
    return tuple(whens)


def _parse_when(keys: Any, axis_values: AxisValues | None, section: str) -> When:
    """Parse an entry [[when]] of a recipe's file: it sets options in the cells of a table that match its `at`.

    Args:
        keys: the entry: `at`, the names of values by axis; `set`, the options; and `published`, the columns and values
            by which the paper's numbers for these cells are found.
        axis_values: the names that `at` may have; None to allow any, for an entry of a base file that other recipes
            extend as well.
        section: the part of the file, for messages.

    Raises:
        UserError: For an unknown key, option, column, axis or value.
    """
    subsection = f"{section}, when"
    check_keys(keys, _WHEN_KEYS, subsection)
    check_layer(keys.get("set", {}), subsection)
    check_keys(keys.get("published", {}), COLUMNS, f"{subsection}, published")
    return When(
        at=_parse_axis_selection(keys.get("at", {}), axis_values, subsection),
        set=keys.get("set", {}),
        published=keys.get("published", {}),
    )


def _parse_axis_selection(keys: Any, axis_values: AxisValues | None, section: str) -> AxisSelection:
    """Parse a set of cells of a recipe's table, given by names of values for some of its axes.

    Args:
        keys: the table of the file: by axis one name, or a list of alternatives.
        axis_values: the names of all values by axis; None to allow any.
        section: the part of the file, for messages.

    Raises:
        UserError: For a wrong type, or an axis or value that is not in `axis_values`.
    """
    if not isinstance(keys, Mapping):
        raise UserError(f"{section}: it must be a table of axes with the values that are meant.")
    selection: dict[str, tuple[str, ...]] = {}
    for axis, selected in keys.items():
        names = [selected] if isinstance(selected, str) else selected
        if not isinstance(names, list) or not names:
            raise UserError(f"{section}: {axis} must be the name of a value, or a list of names.")
        selection[axis] = tuple(map(str, names))
        if axis_values is None:
            continue
        if axis not in axis_values:
            raise UserError(f"{section}: {axis!r} is no axis: {suggest_choice(axis, axis_values)}")
        for name in selection[axis]:
            if name not in axis_values[axis]:
                hint = suggest_choice(name, axis_values[axis])
                raise UserError(f"{section}: axis {axis} has no value {name!r}: {hint}")
    return selection


def _parse_scale(name: str, keys: Mapping[str, Any], inherited: int, axis_values: AxisValues, section: str) -> Scale:
    """Parse a scale of a recipe's file: options that shorten the experiment, such as fewer rounds or clients.

    Args:
        name: the name of the scale.
        keys: its table: `about`, `set` and `when` as in the recipe, and `reading`, how the paper is interpreted where it
            is ambiguous.
        inherited: how many of the first `when` entries come from the file that the recipe extends. These may name axes
            and values that this recipe does not have.
        axis_values: the names of the values of every axis of the recipe.
        section: the part of the file, for messages.
    """
    subsection = f"{section}, scale {name}"
    if not keys.get("about"):
        raise UserError(f"{subsection}: about is missing; describe what the scale changes.")
    return Scale(
        name=name,
        about=keys["about"],
        set=keys.get("set", {}),
        when=_parse_whens(keys.get("when", []), inherited, axis_values, subsection),
        reading=keys.get("reading", ""),
    )


class Published(NamedTuple):
    """A published test accuracy in percent; `deviation` is None if the paper gives none."""

    mean: float
    deviation: float | None
    note: str


def find_published(columns: Mapping[str, str]) -> Published | None:
    """Find the accuracy that a paper publishes for a cell of its table, in published.csv.

    Args:
        columns: values by which to find its row, such as {"paper": "FedDure", "table": "1", "dataset": "CIFAR-10"}.

    Returns:
        The accuracy; None unless exactly one row has these values, and a mean.
    """
    values = tuple(columns.values())
    # A recipe's file may give a number, which no column of published.csv has.
    if not all(isinstance(value, str) for value in values):
        return None
    rows = _group_rows(tuple(columns)).get(values, [])
    if len(rows) != 1 or not rows[0]["mean"]:
        return None
    (row,) = rows
    return Published(float(row["mean"]), float(row["std"]) if row["std"] else None, row["note"])


@cache  # a sweep searches for thousands of cells by the same few columns
def _group_rows(columns: tuple[str, ...]) -> Mapping[tuple[str, ...], list[Mapping[str, str]]]:
    """Group the rows of the published numbers by their values in some columns."""
    groups: dict[tuple[str, ...], list[Mapping[str, str]]] = {}
    for row in _read_published_rows():
        groups.setdefault(tuple(row[column] for column in columns), []).append(row)
    return groups


@cache
def _read_published_rows() -> tuple[Mapping[str, str], ...]:
    """Read the published numbers."""
    text = (recipes_folder() / "published.csv").read_text(encoding="utf-8")
    return tuple(csv.DictReader(text.splitlines()))
