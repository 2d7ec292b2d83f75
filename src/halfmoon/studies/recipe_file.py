"""The file of a recipe: its keys, over those of the file that it extends, and the options that layers come to."""

import tomllib
from collections.abc import Iterable, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from halfmoon.config import schema as settings
from halfmoon.core.errors import UserError, suggest
from halfmoon.storage import toml

Layer = Mapping[str, Any]
"""Options of a run, and perhaps `unset`."""

UNSET, INHERITED = "unset", "inherited"
KEYS: Mapping[str, type] = {
    **dict.fromkeys(("title", "paper", "item", "about", "reading", "sources", "extends"), str),
    **dict.fromkeys(("kind", "rows", "x", "measure"), str),
    **dict.fromkeys(("columns", "seeds", "skip", "when"), list),
    **dict.fromkeys(("published", "panels", "protocol", "axes", "scales"), dict),
}
"""The keys of a recipe's file, and what each of them holds."""
_WORDS = {str: "a text", list: "a list", dict: "a table"}
_SCALE: Mapping[str, type] = {"about": str, "reading": str, "set": dict, "when": list}


def folder() -> Any:
    return resources.files("halfmoon") / "recipes"


def read(path: Path, over: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Return the keys of a recipe's file, over those of the file that it extends; the files `over` it extend it.

    `INHERITED` in it says how many of the first `when` (""), and of those of each scale, are the other file's.
    Raise UserError where a file cannot be read, is no TOML, has an unknown key or one that holds something else, or
    extends itself.
    """
    own = _own(path)
    base = own.get("extends")
    if base is None:
        return own
    under = read(_beside(path, base, (path, *over)), (path, *over))
    merged = {**under, **own, "published": {**under.get("published", {}), **own.get("published", {})}}
    merged["protocol"] = layered([under.get("protocol", {}), own.get("protocol", {})])
    merged["when"] = [*under.get("when", []), *own.get("when", [])]
    merged["axes"] = _axes_over(under.get("axes", {}), own.get("axes", {}), path.name)
    merged["scales"] = _scales_over(under.get("scales", {}), own.get("scales", {}))
    merged[INHERITED] = {name: len(keys.get("when", [])) for name, keys in under.get("scales", {}).items()}
    merged[INHERITED][""] = len(under.get("when", []))
    return merged


def layered(layers: Iterable[Layer]) -> dict[str, Any]:
    """Return options of which later layers win; method options are joined one by one.

    Of options that say the same thing (three ways to say how many labels there are), the later displaces the earlier.
    """
    result: dict[str, Any] = {}
    for layer in layers:
        for name in layer.get(UNSET, ()):
            result.pop(name, None)
        if any(name in layer for name in settings.LABEL_AMOUNTS):
            result = {name: value for name, value in result.items() if name not in settings.LABEL_AMOUNTS}
        for name, value in layer.items():
            if name == "options":
                result[name] = settings.merge_method_options(result.get(name, {}), value, name)
            elif name != UNSET:
                result[name] = value
    return result


def _own(path: Path) -> dict[str, Any]:
    try:
        own = toml.parse(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read ({error}); give a recipe's name or file.") from error
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{path} is not valid TOML: {error}.") from error
    check_shape(own, KEYS, path.name)
    check_layer(own.get("protocol", {}), f"{path.name}, protocol")
    for name, values in own.get("axes", {}).items():
        if not isinstance(values, Mapping | list) or not values:
            raise UserError(f"{path.name}: axis {name} has no values; write [axes.{name}.NAME] for each.")
    for name, keys in own.get("scales", {}).items():
        check_shape(keys, _SCALE, f"{path.name}, scale {name}")
        check_layer(keys.get("set", {}), f"{path.name}, scale {name}")
    return own


def check_shape(keys: Any, shapes: Mapping[str, type], where: str) -> None:
    """Raise UserError for what is no table, for a key that is not one of `shapes`, or that holds something else."""
    if not isinstance(keys, Mapping):
        raise UserError(f"{where}: it must be a table.")
    for key, value in keys.items():
        if key not in shapes:
            raise UserError(f"{where}: unknown field {key!r}: {suggest(key, shapes)}")
        if not isinstance(value, shapes[key]):
            raise UserError(f"{where}: {key} must be {_WORDS[shapes[key]]}.")


def check_layer(layer: Any, where: str) -> None:
    """Raise UserError for the first option that a run does not have; values are checked with the cell."""
    if not isinstance(layer, Mapping):
        raise UserError(f"{where}: set must be a table of options.")
    unset = layer.get(UNSET, [])
    if not isinstance(unset, list):
        raise UserError(f"{where}: unset must be a list of options.")
    for name in (*layer, *map(str, unset)):
        if name not in (*settings.option_helps(), UNSET):
            raise UserError(f"{where}: unknown option {name!r}: {suggest(name, settings.option_helps())}")
    settings.merge_method_options({}, layer.get("options", {}), f"{where}, options")


def nearest_of(word: str, choices: Iterable[str]) -> str:
    """Return the hint at the choice that was meant; there may be none."""
    entries = list(choices)
    return suggest(word, entries) if entries else "there is none."


def _beside(path: Path, base: str, over: tuple[Path, ...]) -> Path:
    """Return the file that a recipe extends: the one beside it, else the one that comes with halfmoon."""
    beside = path.with_name(f"{base}.toml") if Path(base).name == base else path
    if beside in over:
        raise UserError(f"{path.name}: it extends {base}, which leads back to itself.")
    if beside.is_file():
        return beside
    with resources.as_file(folder() / f"{base}.toml") as shipped:
        return shipped if shipped.is_file() else beside


def _axes_over(under: Mapping[str, Any], own: Mapping[str, Any], file: str) -> dict[str, Any]:
    """Return a recipe's own axes; a value without keys is the one of that name in the file that it extends."""
    axes: dict[str, Any] = {}
    for axis, values in own.items():
        base = under.get(axis, {})
        if isinstance(values, list):
            unknown = [name for name in values if name not in base]
            if unknown:
                raise UserError(f"{file}: axis {axis} has no value {unknown[0]!r}: {nearest_of(str(unknown[0]), base)}")
            axes[axis] = {name: base[name] for name in values}
        else:
            axes[axis] = {name: value or base.get(name, {}) for name, value in values.items()}
    return axes


def _scales_over(under: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return the scales of both files; of one that both have, what the recipe's own says comes on top."""
    result = {**under, **own}
    for name in set(under) & set(own):
        layers = [keys[name].get("set", {}) for keys in (under, own)]
        # What goes back to its default does so whatever the layers below the scale say.
        unset = [option for layer in layers for option in layer.get(UNSET, ())]
        result[name] = {**under[name], **own[name], "set": {**layered(layers), UNSET: unset}}
        result[name]["when"] = [*under[name].get("when", []), *own[name].get("when", [])]
    return result
