"""The grid of a recipe: which cells are asked for, and the complete configuration of every run in them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from halfmoon.config import schema as settings
from halfmoon.config.schema import Config
from halfmoon.core.errors import UserError, suggest
from halfmoon.studies.recipe import COLUMNS, Published, Recipe, Scale, Value, lookup, meets
from halfmoon.studies.recipe_file import Layer, layered

Selection = Mapping[str, tuple[str, ...]]
"""The values of some axes that are asked for."""


@dataclass(frozen=True)
class Cell:
    """One cell of a table: its values by axis, what the paper prints there, and a configuration for every seed.

    `measure` is what is compared there, one of `halfmoon.studies.recipe.MEASURES`.
    """

    at: Mapping[str, str]
    published: Published | None
    configs: Mapping[int, Config]
    measure: str = "test"

    @property
    def words(self) -> str:
        return ", ".join(f"{axis}={value}" for axis, value in self.at.items())


def selection(recipe: Recipe, words: Sequence[str]) -> Selection:
    """Return what `--only` asks for: "axis=value,axis=value", a further value of the same axis is one more.

    Raise UserError for an axis or a value that the recipe does not have.
    """
    selection: dict[str, list[str]] = {}
    for part in (part.strip() for word in words for part in word.split(",")):
        axis, sign, name = (word.strip() for word in part.partition("="))
        if not sign or not name:
            example = ",".join(f"{axis}={values[0].name}" for axis, values in list(recipe.axes.items())[:2])
            raise UserError(f"--only {part!r} is not AXIS=VALUE: write, for example, --only {example}.")
        if axis not in recipe.axes:
            raise UserError(f"--only: recipe {recipe.name} has no axis {axis!r}: {suggest(axis, recipe.axes)}")
        values = [value.name for value in recipe.axes[axis]]
        if name not in values:
            raise UserError(
                f"--only: axis {axis} of recipe {recipe.name} has no value {name!r}: {suggest(name, values)}"
            )
        if name not in selection.setdefault(axis, []):
            selection[axis].append(name)
    return {axis: tuple(names) for axis, names in selection.items()}


def selected_values(recipe: Recipe, only: Selection) -> dict[str, list[Value]]:
    """Return the values of every axis that are played: those asked for, else all that are the paper's."""
    values_of: dict[str, list[Value]] = {}
    for axis, values in recipe.axes.items():
        names = only.get(axis)
        values_of[axis] = [value for value in values if (value.name in names if names else not value.extra)]
        if not values_of[axis]:
            raise UserError(f"recipe {recipe.name}: nothing of axis {axis} is selected; name its values with --only.")
    return values_of


def cells(
    recipe: Recipe,
    only: Selection,
    seeds: Sequence[int] | None = None,
    scale: Scale | None = None,
    over: Layer | None = None,
) -> list[Cell]:
    """Return the cells that are asked for, in the order of the axes; `over` are options that win over the recipe's.

    Raise UserError where the recipe skips all of them, and, with a cell's name, where its configuration is impossible
    or no run could take it.
    """
    seeds = seeds or recipe.seeds
    return [_cell(recipe, values, seeds, scale, over or {}) for values in combinations(recipe, only)]


def combinations(recipe: Recipe, only: Selection) -> list[tuple[Value, ...]]:
    """Return the values of every cell that is asked for, a value of every axis, in the order of the axes.

    Raise UserError where the recipe skips all of them.
    """
    cells = product(*selected_values(recipe, only).values())
    result = [each for each in cells if not any(meets(when, _at(recipe, each)) for when in recipe.skip)]
    if not result:
        raise UserError(f"recipe {recipe.name} has none of these cells: they are combinations that it leaves out.")
    return result


def _at(recipe: Recipe, values: Sequence[Value]) -> dict[str, str]:
    return dict(zip(recipe.axes, (value.name for value in values), strict=True))


def _cell(recipe: Recipe, values: Sequence[Value], seeds: Sequence[int], scale: Scale | None, over: Layer) -> Cell:
    at = _at(recipe, values)
    whens = [when for when in recipe.when if meets(when.at, at)]
    layers = [{"evaluate_every": 1}, recipe.protocol, *(value.set for value in values), *(when.set for when in whens)]
    if scale is not None:
        layers += [scale.set, *(when.set for when in scale.when if meets(when.at, at))]
    where = {"paper": recipe.paper, **recipe.published}
    for axis, value in zip(recipe.axes, values, strict=True):
        if value.published is not None:
            where |= value.published
        elif axis in COLUMNS:
            where[axis] = value.title
    for when in whens:
        where |= when.published
    measure = next((value.measure for value in reversed(values) if value.measure), recipe.measure)
    published = lookup(where) if recipe.published and measure == "test" else None  # the papers print test accuracies
    cell = Cell(at, published, {}, measure)
    try:
        config = settings.merge(layered([*layers, over]), {}, recipe.name)
        methods = {config.method, config.reference}
        options = {
            name: value for name, value in config.options.items() if name in methods or not isinstance(value, Mapping)
        }
        configs = {seed: replace(config, seed=seed, split_seed=seed, options=options) for seed in seeds}
        settings.check_methods(configs[seeds[0]])
    except UserError as error:
        raise UserError(f"recipe {recipe.name}, cell {cell.words}: {error}") from error
    return replace(cell, configs=configs)
