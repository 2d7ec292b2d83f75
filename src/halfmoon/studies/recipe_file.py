"""File of a recipe: its keys, merged with those of the file that it extends, and the merging of option layers."""

import tomllib
from collections.abc import Iterable, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from halfmoon.config import schema as settings
from halfmoon.core.errors import UserError, suggest
from halfmoon.storage import toml

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

_TYPE_NAMES = {str: "a text", list: "a list", dict: "a table"}
_SCALE_KEYS: Mapping[str, type] = {"about": str, "reading": str, "set": dict, "when": list}


def recipes_folder() -> Any:
    """Return the folder of the recipes that halfmoon ships, as a resource."""
    return resources.files("halfmoon") / "recipes"


def read_recipe(path: Path, extending: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Read a recipe's file and merge its keys over those of the file that it extends, its base.

    Most keys replace those of the base. Options of the `protocol`, axes and scales are merged one by one, and its `when`
    entries follow those of the base.

    Args:
        path: The file.
        extending: The files that extend this one, directly or not, to detect cycles.

    Returns:
        The merged keys. If the file extends another, `INHERITED` maps "" and the names of scales to how many of their
        first `when` entries come from the other file.

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
    """Merge layers of options; later layers win, and tables of method options are merged option by option.

    Some options are alternatives: there are three ways to give the number of labels. A later one removes the earlier.
    """
    merged: dict[str, Any] = {}
    for layer in layers:
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
    """Read and check the keys of a recipe's file, without those of the file that it extends."""
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
    """Check that a layer has only options that exist. Values are checked later, with the cell's other options.

    Args:
        layer: The value that should be a table of options.
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
    settings.merge_method_options({}, layer.get("options", {}), f"{section}, options")


def suggest_choice(text: str, choices: Iterable[str]) -> str:
    """Suggest a similar choice, like `suggest`, but also for an empty list of choices."""
    entries = list(choices)
    return suggest(text, entries) if entries else "there is none."


def _find_base(path: Path, base_name: str, extending: tuple[Path, ...]) -> Path:
    """Find the file that a recipe extends: the one in the same folder, else the one that halfmoon ships.

    Args:
        path: The recipe's file.
        base_name: The name that its key `extends` has, a file name without .toml.
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
    """Complete a recipe's axes from the base: a value given by name only is the base's value of that name.

    Axes that only the base has are not in the result.
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
    """Merge the scales of both files; for a scale in both, the recipe's options and texts win over the base's."""
    merged = {**base_scales, **scales}
    for name in set(base_scales) & set(scales):
        base_scale = base_scales[name]
        scale = scales[name]
        layers = [base_scale.get("set", {}), scale.get("set", {})]
        # `merge_layers` applies `unset` to the layers below and drops it. Keep it here: it must also apply to the
        # layers below the scale, those of the protocol and the axes.
        unset = [option for layer in layers for option in layer.get(UNSET, ())]
        merged[name] = {**base_scale, **scale, "set": {**merge_layers(layers), UNSET: unset}}
        merged[name]["when"] = [*base_scale.get("when", []), *scale.get("when", [])]
    return merged
