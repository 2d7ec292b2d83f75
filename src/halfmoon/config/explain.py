"""List the options of a run that are not at their defaults, each with the layer that set it.

The defaults are the fields of `halfmoon.config.sections`. Every other source of a value is a layer above them: a
preset, a protocol, a recipe, a TOML file, and the flags.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from halfmoon.config.schema import DEFAULT_LABELS_PER_CLASS, Config, lower_layers, option_types

COMPUTED = "computed"
"""The layer of a value that follows from other options, such as a cohort of all clients where there are few."""


@dataclass(frozen=True)
class Layer:
    """A source of option values.

    Attributes:
        name: the name to print, such as "flag" or "protocol sage".
        options: its values by option name; `options["options"]` is its table of method options.
    """

    name: str
    options: Mapping[str, Any]


@dataclass(frozen=True)
class ExplainedOption:
    """An option that is not at its default.

    Attributes:
        name: its name as in a TOML file; options of methods are "options.NAME" or "options.METHOD.NAME".
        value: its value in the configuration.
        layer: the name of the layer that set it.
    """

    name: str
    value: Any
    layer: str


def explain_options(config: Config, layers: Sequence[Layer], fallback: str = COMPUTED) -> list[ExplainedOption]:
    """List the options of a configuration that are not at their defaults, and the layer that set each.

    Args:
        config: the configuration that the layers resolve to.
        layers: what the user and the command set, highest priority first. Below them come the preset (options of the
            method's paper), and then the protocol (the experiment of a paper), if they name some.
        fallback: the layer to name for values that none of the layers contains: they follow from other options.
    """
    explicit: dict[str, Any] = {}
    # From the lowest to the highest priority, so that the highest wins.
    for layer in reversed(layers):
        # "options" is the table of method options, which `_explain_method_options` handles.
        explicit |= {name: value for name, value in layer.options.items() if name != "options"}
    # `recommended` is a placeholder: a preset belongs to the method that replaces it.
    explicit["method"] = config.method
    paper_options, protocol_options = lower_layers(explicit)  # the values of preset and protocol
    protocol = explicit.get("protocol", "none")
    preset_name = f"preset {config.preset}"
    all_layers = [*layers, Layer(preset_name, paper_options), Layer(f"protocol {protocol}", protocol_options)]

    rows: list[ExplainedOption] = []
    for name in option_types():
        # A configuration stores "none" as its protocol, because the protocol's values are already filled in.
        value = protocol if name == "protocol" else getattr(config, name)
        layer_name = _setting_layer(all_layers, name, fallback)
        # Where no option sets an amount of labels, the constructor fills in this one.
        is_default_amount = name == "labels_per_class" and value == DEFAULT_LABELS_PER_CLASS and layer_name == fallback
        if value != getattr(Config, name) and not is_default_amount:
            rows.append(ExplainedOption(name, value, layer_name))
    rows += _explain_method_options(config, all_layers, fallback, preset_name)
    return rows


def _explain_method_options(
    config: Config, layers: Sequence[Layer], fallback: str, preset_name: str
) -> Iterator[ExplainedOption]:
    """Yield the options of methods that are not at their defaults, with the layer that set each.

    Args:
        config: the configuration.
        layers: the layers of options, highest priority first.
        fallback: the layer to name for values that none of them contains.
        preset_name: the name of the layer of the preset, which sets the options of the method's paper.
    """
    # Imported here, as it imports PyTorch, without which the list of recipes is printed at once.
    from halfmoon.methods import registry

    # A table has NAME for the trained method and {METHOD: {NAME: ...}} for others; flat names make layers comparable.
    tables = [Layer(layer.name, _flatten(layer.options.get("options", {}))) for layer in layers]
    values = _flatten(config.options)
    for name, value in values.items():
        method, _, option = name.rpartition(".")
        declared = registry.options(method or config.method)
        if option not in declared or declared[option].default != value:
            yield ExplainedOption(f"options.{name}", value, _setting_layer(tables, name, fallback))
    # Values of the preset are not in `config.options`: they are merged when the method is built.
    if config.preset == "paper":
        defaults = registry.options(config.method)
        for name, value in registry.entry(config.method).paper_options.items():
            # The user may have set it as NAME or in the table of the method.
            is_overridden = name in values or f"{config.method}.{name}" in values
            if not is_overridden and defaults[name].default != value:
                yield ExplainedOption(f"options.{name}", value, preset_name)


def _setting_layer(layers: Sequence[Layer], name: str, fallback: str) -> str:
    """Return the name of the highest layer that sets an option."""
    return next((layer.name for layer in layers if layer.options.get(name) is not None), fallback)


def _flatten(options: Mapping[str, Any]) -> dict[str, Any]:
    """Flatten method options {"NAME": value, "METHOD": {"NAME": value}} to {"NAME": value, "METHOD.NAME": value}."""
    flat: dict[str, Any] = {}
    for name, value in options.items():
        if isinstance(value, Mapping):
            table = cast(Mapping[str, Any], value)
            flat |= {f"{name}.{option}": setting for option, setting in table.items()}
        else:
            flat[name] = value
    return flat
