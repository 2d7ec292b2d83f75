"""Grid of a recipe: the selected cells, and the complete configuration of every run in them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from halfmoon.config import explain
from halfmoon.config import schema as settings
from halfmoon.config.explain import ExplainedOption
from halfmoon.config.schema import Config
from halfmoon.core.errors import UserError, suggest
from halfmoon.studies.recipe import COLUMNS, Published, Recipe, Scale, Value, find_published, matches_axes
from halfmoon.studies.recipe_file import UNSET, Layer, merge_layers

Selection = Mapping[str, tuple[str, ...]]
"""The selected values by axis; an axis without an entry is not restricted."""


@dataclass(frozen=True)
class RecipeCell:
    """One cell of a table: a value for every axis, and a run for every seed.

    Attributes:
        at: The names of the values by axis.
        published: The number that the paper prints in this cell, if there is one.
        configs: The runs' configurations by seed.
        measure: The quantity that the table compares, one of `halfmoon.studies.recipe.MEASURES`.
        layers: The options that the configurations are merged from, each layer with its name; later layers win.
    """

    at: Mapping[str, str]
    published: Published | None
    configs: Mapping[int, Config]
    measure: str = "test"
    layers: tuple[explain.Layer, ...] = ()

    @property
    def label(self) -> str:
        """The values as text: "axis=value, axis=value"."""
        return ", ".join(f"{axis}={value}" for axis, value in self.at.items())


def parse_selection(recipe: Recipe, texts: Sequence[str]) -> Selection:
    """Parse the values of the option `--only`.

    Args:
        recipe: The recipe whose axes are selected from.
        texts: Texts of the form "axis=value,axis=value". Several values of one axis are alternatives.

    Returns:
        The selected values by axis.

    Raises:
        UserError: For an axis or a value that the recipe does not have.
    """
    selection: dict[str, list[str]] = {}
    pairs = [pair.strip() for text in texts for pair in text.split(",")]
    for pair in pairs:
        axis, equal_sign, name = (piece.strip() for piece in pair.partition("="))
        if not equal_sign or not name:
            example = ",".join(f"{axis}={values[0].name}" for axis, values in list(recipe.axes.items())[:2])
            raise UserError(
                f"{{only}} {pair!r} is not AXIS=VALUE: write, for example, {{only={example}}}.", option="only"
            )
        if axis not in recipe.axes:
            raise UserError(
                f"{{only}}: recipe {recipe.name} has no axis {axis!r}: {suggest(axis, recipe.axes)}", option="only"
            )
        values = [value.name for value in recipe.axes[axis]]
        if name not in values:
            raise UserError(
                f"{{only}}: axis {axis} of recipe {recipe.name} has no value {name!r}: {suggest(name, values)}",
                option="only",
            )
        if name not in selection.setdefault(axis, []):
            selection[axis].append(name)
    return {axis: tuple(names) for axis, names in selection.items()}


def select_values(recipe: Recipe, selection: Selection) -> dict[str, list[Value]]:
    """Select values of every axis of a recipe's table, such as methods and data sets.

    Args:
        recipe: The recipe.
        selection: The names of the values by axis. Of an axis that is missing here, all values are selected that the
            paper has; those that it does not have are marked as `extra`.

    Raises:
        UserError: If no value of an axis is selected.
    """
    values_by_axis: dict[str, list[Value]] = {}
    for axis, values in recipe.axes.items():
        names = selection.get(axis)
        if names:
            selected = [value for value in values if value.name in names]
        else:
            selected = [value for value in values if not value.extra]
        if not selected:
            raise UserError(
                f"recipe {recipe.name}: axis {axis} has no selected value", option="only", hint="name some with {only}."
            )
        values_by_axis[axis] = selected
    return values_by_axis


def build_cells(
    recipe: Recipe,
    selection: Selection,
    seeds: Sequence[int] | None = None,
    scale: Scale | None = None,
    overrides: Layer | None = None,
) -> list[RecipeCell]:
    """Build the selected cells of a paper's table with the configurations of their runs, in the order of the axes.

    Args:
        recipe: The recipe, which describes the table and its runs.
        selection: The names of the selected values by axis.
        seeds: The seeds; None means the recipe's.
        scale: A scaled-down version of the recipe, or None for the full experiment.
        overrides: Options that win over those of the recipe.

    Returns:
        The cells.

    Raises:
        UserError: If the recipe skips all of these cells; with a cell's name, if its configuration is invalid.
    """
    seeds = seeds or recipe.seeds
    return [
        _build_cell(recipe, values, seeds, scale, overrides or {}) for values in list_combinations(recipe, selection)
    ]


def list_combinations(recipe: Recipe, selection: Selection) -> list[tuple[Value, ...]]:
    """List the selected cells of a recipe's table: every combination of one value for each axis, except skipped ones.

    Args:
        recipe: describes the table. An axis is what varies along it, such as the method or the data set. `skip` names
            combinations that the paper does not have.
        selection: the names of the selected values by axis; of a missing axis, all values of the paper.

    Returns:
        Tuples with one value for each axis, in the order of the axes.

    Raises:
        UserError: If the recipe skips all of these cells.
    """
    combinations: list[tuple[Value, ...]] = []
    for values in product(*select_values(recipe, selection).values()):
        value_names = _names_by_axis(recipe, values)
        if not any(matches_axes(skipped, value_names) for skipped in recipe.skip):
            combinations.append(values)
    if not combinations:
        raise UserError(f"recipe {recipe.name} has none of these cells: they are combinations that it leaves out.")
    return combinations


def _names_by_axis(recipe: Recipe, values: Sequence[Value]) -> dict[str, str]:
    """Map axes to the names of their values in one cell."""
    return dict(zip(recipe.axes, (value.name for value in values), strict=True))


def _build_cell(
    recipe: Recipe, values: Sequence[Value], seeds: Sequence[int], scale: Scale | None, overrides: Layer
) -> RecipeCell:
    """Build one cell of a paper's table: merge its options, look up its published number, and configure its runs.

    Args:
        recipe: describes the table. Each of its `when` entries has options, and columns of published numbers, for the
            cells whose names of values are in its selection `at`.
        values: one value of each axis, which together name the cell.
        seeds: the seeds, each of which has one run.
        scale: a scaled-down version of the recipe, with options that win over the recipe's; None for the full experiment.
        overrides: options that win over all others.
    """
    at = _names_by_axis(recipe, values)
    layers = _list_layers(recipe, values, scale, overrides)
    # The last axis whose value names a measure decides what the table compares in this cell.
    measure = next((value.measure for value in reversed(values) if value.measure), recipe.measure)
    # The papers print test accuracies, so the other measures have no published number.
    has_published = bool(recipe.published) and measure == "test"
    published = find_published(_published_columns(recipe, at, values)) if has_published else None
    cell = RecipeCell(at, published, configs={}, measure=measure, layers=layers)
    try:
        config = settings.resolve(merge_layers(layer.options for layer in layers), {}, recipe.name, check_catalog=False)
        # A recipe may have option tables of all its methods; a run's configuration has only those of its methods.
        methods = {config.method, config.reference}
        options = {
            name: value for name, value in config.options.items() if name in methods or not isinstance(value, Mapping)
        }
        configs = {seed: replace(config, seed=seed, split_seed=seed, options=options) for seed in seeds}
        settings.check_methods(configs[seeds[0]])
    except UserError as error:
        raise UserError(f"recipe {recipe.name}, cell {cell.label}: {error}") from error
    return replace(cell, configs=configs)


def _list_layers(
    recipe: Recipe, values: Sequence[Value], scale: Scale | None, overrides: Layer
) -> tuple[explain.Layer, ...]:
    """List the layers of options of a cell. Later layers win, so the order is from the general to the specific.

    Args:
        recipe: the recipe.
        values: the cell's values, one for each axis.
        scale: a scaled-down version of the recipe; None for the full experiment.
        overrides: options that win over all others.
    """
    at = _names_by_axis(recipe, values)
    # A sweep reports the best round, and therefore evaluates every round unless the protocol sets another interval.
    layers = [
        explain.Layer("halfmoon sweep", {"evaluate_every": 1}),
        explain.Layer(f"recipe {recipe.name}", recipe.protocol),
    ]
    for axis, value in zip(recipe.axes, values, strict=True):
        layers.append(explain.Layer(f"axis {axis}={value.name}", value.set))
    for when in recipe.when:
        if matches_axes(when.at, at):
            layers.append(explain.Layer(f"recipe {recipe.name}, when {_describe_axes(when.at)}", when.set))
    if scale is not None:
        layers.append(explain.Layer(f"scale {scale.name}", scale.set))
        for when in scale.when:
            if matches_axes(when.at, at):
                layers.append(explain.Layer(f"scale {scale.name}, when {_describe_axes(when.at)}", when.set))
    layers.append(explain.Layer("flag", overrides))
    return tuple(layers)


def _describe_axes(selection: Mapping[str, Iterable[str]]) -> str:
    """Describe a set of cells in the form of the option `--only`: axis=value,axis=value."""
    return ",".join(f"{axis}={name}" for axis, names in selection.items() for name in names) or "any"


@dataclass(frozen=True)
class GridExplanation:
    """The options of the runs of a sweep that are not at their defaults, each with the layer that set it.

    Attributes:
        common: The options that all cells share, value and layer.
        cells: For each cell, its other options.
    """

    common: tuple[ExplainedOption, ...]
    cells: tuple[tuple[RecipeCell, tuple[ExplainedOption, ...]], ...]


def explain_cells(cells: Sequence[RecipeCell], seeds_layer: str, computed: Layer | None = None) -> GridExplanation:
    """List the options of all cells that are not at their defaults, and the layer that set each.

    Args:
        cells: The cells.
        seeds_layer: The name of the layer that set the seeds.
        computed: The options among the overrides that no flag has set.
    """
    explanations = [_explain_cell(cell, seeds_layer, computed or {}) for cell in cells]
    # Not a set: the values of some options are not hashable.
    common = tuple(row for row in explanations[0] if all(row in rows for rows in explanations))
    differing = tuple(
        (cell, tuple(row for row in rows if row not in common)) for cell, rows in zip(cells, explanations, strict=True)
    )
    return GridExplanation(common, differing)


def _explain_cell(cell: RecipeCell, seeds_layer: str, computed: Layer) -> list[ExplainedOption]:
    """List the options of a cell that are not at their defaults; its seeds are one row, as a tuple.

    Args:
        cell: The cell.
        seeds_layer: The name of the layer that set the seeds.
        computed: The options among the overrides that no flag has set.
    """
    layers: list[explain.Layer] = []  # from the highest priority down
    removed: set[str] = set()  # by a higher layer: it unsets the option, or sets another amount of labels
    for layer in reversed(cell.layers):
        options = {name: value for name, value in layer.options.items() if name not in removed and name != UNSET}
        layers.append(explain.Layer(layer.name, options))
        removed |= set(layer.options.get(UNSET, ()))
        if any(name in layer.options for name in settings.LABEL_AMOUNTS):
            removed |= set(settings.LABEL_AMOUNTS)
    flags = {name: value for name, value in layers[0].options.items() if name not in computed}
    layers[:1] = [explain.Layer("flag", flags), explain.Layer("halfmoon sweep", computed)]
    config = next(iter(cell.configs.values()))
    rows = explain.explain_options(config, layers)
    seeds = tuple(cell.configs)
    rows = [row for row in rows if row.name not in ("seed", "split_seed")]
    if seeds != (Config.seed,):
        rows += [ExplainedOption(name, seeds, seeds_layer) for name in ("seed", "split_seed")]
    return rows


def _published_columns(recipe: Recipe, at: Mapping[str, str], values: Sequence[Value]) -> dict[str, str]:
    """Collect the columns of published.csv, and their values, that identify the paper's number for a cell.

    Later sources win: the recipe, the cell's values in the order of the axes, and the `when` entries of the recipe that
    hold in the cell. A value without columns of its own is found by its title, in the column with the name of its axis.

    Args:
        recipe: the recipe.
        at: the names of the cell's values by axis.
        values: the cell's values, one for each axis.
    """
    columns = {"paper": recipe.paper, **recipe.published}
    for axis, value in zip(recipe.axes, values, strict=True):
        if value.published is not None:
            columns |= value.published
        elif axis in COLUMNS:
            columns[axis] = value.title
    for when in recipe.when:
        if matches_axes(when.at, at):
            columns |= when.published
    return columns
