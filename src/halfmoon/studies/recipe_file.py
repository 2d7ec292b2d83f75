"""Files of recipes: TOML files that describe the runs of a paper's table, and may extend another file, their base.

A recipe has axes, such as methods and data sets, and a cell of the table is one value of each. `protocol` has the options
of all cells, a value of an axis the options that it sets, and an entry `when` options for the cells it names. A scale is
a shortened version of the experiment, with options and `when` entries of its own.
"""

import tomllib
from collections.abc import Iterable, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from halfmoon.config import schema as settings
from halfmoon.core import toml
from halfmoon.core.errors import UserError, suggest

Layer = Mapping[str, Any]
"""Options of a run, and optionally `UNSET`."""

UNSET = "unset"
"""Key of a layer: a list of options that return to their defaults."""

INHERITED = "inherited"
"""Key that `read_recipe` adds: how many `when` entries come from the base file ("" for those of the recipe itself)."""

KEYS: Mapping[str, type] = {
    **dict.fromkeys(("title", "paper", "item", "about", "reading", "sources", "extends"), str),
    **dict.fromkeys(("kind", "rows", "x", "measure"), str),
    **dict.fromkeys(("columns", "seeds", "skip", "when"), list),
    **dict.fromkeys(("published", "panels", "protocol", "axes", "scales"), dict),
}
"""The keys of a recipe's file, and their types."""

UNUSED_OPTIONS: Mapping[str, str] = {
    "run_dir": "each run has a folder in that of {out}",
    "processes": "{jobs} sets how many runs are trained at once",
    "baselines": "each cell is a run of one method",
}
"""Options of a run that no run of a sweep uses, with the reasons; options of the command are in braces."""

_TYPE_NAMES = {str: "a text", list: "a list", dict: "a table"}
_SCALE_KEYS: Mapping[str, type] = {"about": str, "reading": str, "set": dict, "when": list}


def recipes_folder() -> Any:
    """Return the folder of the recipes that halfmoon ships, as a resource."""
    return resources.files("halfmoon") / "recipes"


def read_recipe(path: Path, extending: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Read a recipe's file and merge its keys over those of the file that it extends, its base.

    Most keys replace those of the base. The options of all runs (`protocol`), axes and scales (shortened versions of the
    experiment) are merged one by one. The `when` entries, options for some cells of the table, follow those of the base.

    Args:
        path: The file.
        extending: The files that extend this one, directly or not, to detect cycles.

    Returns:
        The merged keys. If the file extends another, the key `INHERITED` has the number of `when` entries that come from
        the base, by the name of the scale that they belong to; "" is the recipe itself.

    Raises:
        UserError: If a file cannot be read, is not valid TOML, has an unknown key or a value of another type, or
            extends itself.
    """
    keys = _read_single_file(path)
    base_name = keys.get("extends")
    if base_name is None:
        return keys
    chain = (path, *extending)
    base = read_recipe(_find_base(path, base_name, chain), chain)
    merged = {**base, **keys, "published": {**base.get("published", {}), **keys.get("published", {})}}
    merged["protocol"] = merge_layers([base.get("protocol", {}), keys.get("protocol", {})])
    merged["when"] = [*base.get("when", []), *keys.get("when", [])]
    merged["axes"] = _merge_axes(base.get("axes", {}), keys.get("axes", {}), path.name)
    merged["scales"] = _merge_scales(base.get("scales", {}), keys.get("scales", {}))
    # The base's `when` entries come first in the merged lists, so their number is enough to identify them. They may name
    # axes and values that this recipe does not have.
    merged[INHERITED] = {name: len(scale.get("when", [])) for name, scale in base.get("scales", {}).items()}
    merged[INHERITED][""] = len(base.get("when", []))
    return merged


def merge_layers(layers: Iterable[Layer]) -> dict[str, Any]:
    """Merge layers of a run's options; later layers win, and tables of method options are merged option by option.

    Some options are alternatives: there are three ways to give the number of labels. A later one removes the earlier.

    Args:
        layers: tables of options by name, from general to specific. A layer's `UNSET` lists options that earlier layers
            set and that return to their defaults.
    """
    merged: dict[str, Any] = {}
    for layer in layers:
        # First: a layer may remove an option and set it anew.
        for name in layer.get(UNSET, ()):
            merged.pop(name, None)
        if any(name in layer for name in settings.LABEL_AMOUNTS):
            merged = {name: value for name, value in merged.items() if name not in settings.LABEL_AMOUNTS}
        for name, value in layer.items():
            if name == "options":
                merged[name] = settings.merge_method_options(merged.get(name, {}), value, name)
            elif name != UNSET:
                merged[name] = value
    return merged


def _read_single_file(path: Path) -> dict[str, Any]:
    """Read the keys of a recipe's TOML file, without those of the file that it extends, and check their names and types.

    Values are checked when the configurations of the runs are built, because they depend on each other.

    Raises:
        UserError: If the file cannot be read, or for the first mistake in it.
    """
    try:
        keys = toml.parse(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read ({error}); give a recipe's name or file.") from error
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{path} is not valid TOML: {error}.") from error
    check_keys(keys, KEYS, path.name)
    check_layer(keys.get("protocol", {}), f"{path.name}, protocol")
    for name, values in keys.get("axes", {}).items():
        if not isinstance(values, Mapping | list) or not values:
            raise UserError(f"{path.name}: axis {name} has no values; write [axes.{name}.NAME] for each.")
    for name, scale in keys.get("scales", {}).items():
        check_keys(scale, _SCALE_KEYS, f"{path.name}, scale {name}")
        check_layer(scale.get("set", {}), f"{path.name}, scale {name}")
    return keys


def check_keys(table: Any, types: Mapping[str, type], section: str) -> None:
    """Check the keys of a table and the types of their values.

    Args:
        table: The value that should be a table.
        types: The allowed keys with the types of their values.
        section: The table's name in the file, for messages.

    Raises:
        UserError: If it is not a table, has an unknown key, or a value of another type.
    """
    if not isinstance(table, Mapping):
        raise UserError(f"{section}: it must be a table.")
    for key, value in table.items():
        if key not in types:
            raise UserError(f"{section}: unknown field {key!r}: {suggest(key, types)}")
        if not isinstance(value, types[key]):
            raise UserError(f"{section}: {key} must be {_TYPE_NAMES[types[key]]}.")


def check_layer(layer: Any, section: str) -> None:
    """Check that a layer of a recipe's options has only those that exist.

    Values are checked later, with the other options of the run.

    Args:
        layer: The value that should be a table of options; its `UNSET` lists options that return to their defaults.
        section: Its name in the file, for messages.

    Raises:
        UserError: If it is not a table, or for the first unknown option.
    """
    if not isinstance(layer, Mapping):
        raise UserError(f"{section}: set must be a table of options.")
    unset = layer.get(UNSET, [])
    if not isinstance(unset, list):
        raise UserError(f"{section}: unset must be a list of options.")
    for name in (*layer, *map(str, unset)):
        if name not in (*settings.option_helps(), UNSET):
            raise UserError(f"{section}: unknown option {name!r}: {suggest(name, settings.option_helps())}")
        if name in UNUSED_OPTIONS:
            raise UserError(
                f"{section}: {name} has no effect in a recipe ({UNUSED_OPTIONS[name]}): leave it out.",
                option=("out", "jobs"),
            )
    settings.merge_method_options({}, layer.get("options", {}), f"{section}, options")


def suggest_choice(text: str, choices: Iterable[str]) -> str:
    """Suggest a similar choice, like `suggest`, but also for an empty list of choices."""
    entries = list(choices)
    return suggest(text, entries) if entries else "there is none."


def _find_base(path: Path, base_name: str, extending: tuple[Path, ...]) -> Path:
    """Find the file that a recipe extends: the one in the same folder, else the one that halfmoon ships.

    Args:
        path: The recipe's file.
        base_name: The value of its key `extends`, a file name without .toml.
        extending: The recipe's file and those that extend it, to detect cycles.

    Raises:
        UserError: If the file is among `extending`, the files that lead to it.
    """
    # A name with a folder in it must not lead out of the recipe's folder; as `path` it is refused as a cycle.
    is_plain_name = Path(base_name).name == base_name
    neighbor = path.with_name(f"{base_name}.toml") if is_plain_name else path
    if neighbor in extending:
        raise UserError(f"{path.name}: it extends {base_name}, which leads back to itself.")
    if neighbor.is_file():
        return neighbor
    with resources.as_file(recipes_folder() / f"{base_name}.toml") as shipped:
        # If neither exists, reading the neighbor raises the error that names the path the user probably meant.
        return shipped if shipped.is_file() else neighbor


def _merge_axes(base_axes: Mapping[str, Any], axes: Mapping[str, Any], file_name: str) -> dict[str, Any]:
    """Complete the axes of a recipe (such as methods or data sets) from the file that it extends, the base.

    Args:
        base_axes: the base's axes: name of an axis to its values, each a table of keys by its name.
        axes: the recipe's axes. Their values may also be a list of names, or have empty tables: the keys are then those
            of the base's value of that name.
        file_name: the recipe's file, for errors.

    Returns:
        The axes of the recipe. Those that only the base has are left out.
    """
    merged: dict[str, Any] = {}
    for axis, values in axes.items():
        base_values = base_axes.get(axis, {})
        if isinstance(values, list):
            unknown = [name for name in values if name not in base_values]
            if unknown:
                hint = suggest_choice(str(unknown[0]), base_values)
                raise UserError(f"{file_name}: axis {axis} has no value {unknown[0]!r}: {hint}")
            merged[axis] = {name: base_values[name] for name in values}
        else:
            merged[axis] = {name: value or base_values.get(name, {}) for name, value in values.items()}
    return merged


def _merge_scales(base_scales: Mapping[str, Any], scales: Mapping[str, Any]) -> dict[str, Any]:
    """Merge a recipe's scales, shortened versions of its experiment, with those of the file that it extends, its base.

    Args:
        base_scales: the base's scales by name. The keys of a scale are `set`, options that win over those of the
            experiment; `when`, options for some cells of the table; and texts about it.
        scales: the recipe's scales, of the same form.

    Returns:
        The scales of both. One that both have gets the options of both, where the recipe's win, and all `when` entries.
    """
    merged = {**base_scales, **scales}
    for name in set(base_scales) & set(scales):
        base_scale = base_scales[name]
        scale = scales[name]
        layers = [base_scale.get("set", {}), scale.get("set", {})]
        # `UNSET` lists options that return to their defaults. `merge_layers` removes these from the base's scale and drops
        # the list. Keep it here: the options of the experiment are merged later, and must lose them as well.
        unset = [option for layer in layers for option in layer.get(UNSET, ())]
        merged[name] = {**base_scale, **scale, "set": {**merge_layers(layers), UNSET: unset}}
        merged[name]["when"] = [*base_scale.get("when", []), *scale.get("when", [])]
    return merged
