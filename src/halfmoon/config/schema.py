"""The configuration of a run: all options with their types and defaults, read from files and flags and checked.

The same options are the flags of the command line, the keys of a TOML file and the keywords of `Config`. From the
highest to the lowest priority, values come from flags, the file, the preset, the protocol and the defaults.
"""

import hashlib
import json
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any, get_args, get_type_hints

from halfmoon.config import preset, retired, sections
from halfmoon.config.option_types import convert_value, merge_method_options, parse_value, union_members
from halfmoon.config.preset import LABEL_AMOUNTS, PARTITION_OPTIONS
from halfmoon.config.sections import SECTIONS
from halfmoon.config.validation import check_cohort, check_combinations, default_aggregation
from halfmoon.core import hubs, plugins, toml, weight_files
from halfmoon.core.errors import UserError, suggest
from halfmoon.core.label_locations import LABEL_LOCATIONS, LabelLocation
from halfmoon.core.ranges import Range
from halfmoon.core.split_options import DEFAULT_LABELS_PER_CLASS
from halfmoon.core.versions import installed_version

SETTINGS = (
    *("iid-iid", "iid-dir", "dir-dir", "semifl-iid", "semifl-shards", "semifl-dir", "feddb-iid", "feddb-dir"),
    *("fedloke", "fedloke-balanced", "pair-dir", "fedmatch-iid", "fedmatch-noniid", "fedmatch-stream"),
)
"""The partition rules of this package, by which images and labels are distributed over clients."""

NETWORKS = ("auto", "resnet8", "resnet9", "resnet18", "resnet18-imagenet", "small", "vit", "wrn")
"""The networks of this package, and "auto"."""

_PLUGIN_OPTIONS: dict[str, tuple[tuple[str, ...], plugins.Kind]] = {
    "network": (NETWORKS, "network"),
    "setting": (SETTINGS, "split"),
}
"""Options that name a plugin: the choices of this package, and the kind of plugin."""

EXECUTION_OPTIONS = {
    *("run_dir", "data_dir", "cache", "device", "executor", "deterministic", "threads", "workers"),
    "processes",
    *("checkpoint_every", "memory_cap", "skip_unreadable"),
}
"""Options for where and how a run is computed. They are not part of its identity."""

ADDED_OPTIONS = ("patience", "class_weights", "unknown_classes", "unknown_share")
"""Options of later versions, which at their default are not part of the identity: runs of earlier versions resume."""

FEDERATION_TABLE = "federation"
"""The table of a TOML file that describes a real federation to `halfmoon serve`. A simulation does not read it."""

DEFAULT_WEIGHT_CAP = 2.0
"""The largest weight of a site in a federation, in medians of its cohort's weights, if its file sets none."""

SITE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
"""Names of sites and federations. They become names of folders and words of command lines."""


def option_names(*option_sections: type) -> tuple[str, ...]:
    """List the options of these sections in the order of their declaration."""
    return tuple(option.name for section in option_sections for option in fields(section))


ATTACK_OPTIONS = ("attack", "attackers", "attack_factor", "weight_cap")
IMAGE_OPTIONS = ("resize", "channels", "crop", "window", "group_pattern")
PIXEL_OPTIONS = ("pixel_mean", "pixel_std")


@dataclass(frozen=True)
class Config(
    sections.MethodOptions,
    sections.DataOptions,
    sections.PartitionOptions,
    sections.RoundOptions,
    sections.BatchOptions,
    sections.NetworkOptions,
    sections.OptimizerOptions,
    sections.ViewOptions,
    sections.EvaluationOptions,
    sections.AggregationOptions,
    sections.PrivacyOptions,
    sections.MachineOptions,
):
    """All options of a run. The defaults train FedDure on the digits data set, which is part of the package.

    [Options](../options.md) lists the meaning, values and default of each; `--server-ema` there is `server_ema` here.
    Names and options of methods are checked later, by `check_methods`. A `protocol` needs `Config.of`, because the
    constructor does not know which options were set.

    Raises:
        UserError: a value has the wrong type or range, or two options exclude each other.

    Examples:
        >>> config = halfmoon.Config(method="feddure", rounds=10, clients=5)
        >>> halfmoon.run(config)
    """

    def __new__(cls, *args: Any, **options: Any) -> "Config":
        """Refuse a removed option with a sentence, before the constructor calls it an unexpected keyword."""
        for name in options:
            if name not in option_types() and (error := retired.option_error(name, "Config")) is not None:
                raise error
        return super().__new__(cls)

    def __post_init__(self) -> None:
        """Convert all options to their types, fill in defaults that depend on others, and check combinations."""
        values = {name: _convert_option(name, name, getattr(self, name)) for name in option_types()}
        # Of several options for the number of labels one may be set. So none of the fields has a default: it could not
        # be told from an amount that the user has set.
        if all(values[name] is None for name in LABEL_AMOUNTS):
            values["labels_per_class"] = DEFAULT_LABELS_PER_CLASS
        values["method"] = preset.resolve_method(values)
        # A cohort at its default is fitted to the number of clients. A saved split has its number of clients in a file.
        if values["split"] is None and values["cohort"] == Config.cohort:
            values["cohort"] = preset.default_cohort(values, values["clients"])
        values["options"] = merge_method_options({}, self.options, "options")
        # `Config.of` replaces a protocol by its values. Here options that were left out have their defaults already.
        if values["protocol"] != "none":
            raise UserError(
                "protocol sets options that you leave out, which Config cannot detect: use Config.of(protocol=...)."
            )
        for name, value in resolve_paths(values, Path()).items():
            # The class is frozen, and the values are final only now.
            object.__setattr__(self, name, value)
        for name, allowed in option_ranges().items():
            allowed.check(name, getattr(self, name))
        check_combinations(self)

    @classmethod
    def of(cls, **options: Any) -> "Config":
        """Build a configuration with the values of its preset and protocol for options that are left out."""
        return resolve(options, {}, "Config.of")

    def __repr__(self) -> str:
        changed = {option.name: getattr(self, option.name) for option in fields(self)}
        defaults = {option.name: option.default for option in fields(self)}
        arguments = [f"{name}={value!r}" for name, value in changed.items() if value != defaults[name] and value != {}]
        return f"Config({', '.join(arguments)})"


def _convert_option(subject: str, name: str, value: Any) -> Any:
    """Convert a value to the type of an option; check that a name of the user's code (a plugin) can be found.

    Args:
        subject: what an error message calls the option, such as "--network".
        name: the name of the option.
        value: the value, from TOML or Python.

    Raises:
        UserError: the value has the wrong type, or names neither a choice nor a plugin.
    """
    value = convert_value(subject, option_types()[name], value)
    if name not in _PLUGIN_OPTIONS:
        return value
    choices, kind = _PLUGIN_OPTIONS[name]  # names of this package, and what a plugin makes: "network" or "split"
    if value in choices or plugins.is_plugin(value, kind):
        return value
    if plugins.is_module(value):
        example = "make" if kind == "network" else "rule"
        raise UserError(f"{subject} is {value!r}, a module: name its function too, such as {value}:{example}.")
    raise UserError(f"{subject} is {value!r}: {suggest(value, [*choices, *plugins.entry_points(kind)])}")


@cache
def _declarations() -> Mapping[str, tuple[Any, ...]]:
    """Return (type, help) or (type, help, range) of every option, in the order of the sections."""
    declarations: dict[str, tuple[Any, ...]] = {}
    for section in SECTIONS.values():
        hints = get_type_hints(section, include_extras=True)
        declarations |= {option.name: get_args(hints[option.name]) for option in fields(section)}
    return declarations


@cache
def option_types() -> Mapping[str, Any]:
    """Return the type of every option, without the table of method options."""
    return {name: declaration[0] for name, declaration in _declarations().items() if name != "options"}


@cache
def option_helps() -> Mapping[str, str]:
    """Return the help text of every option."""
    return {name: declaration[1] for name, declaration in _declarations().items()}


@cache
def option_ranges() -> Mapping[str, Range]:
    """Return the range of every option that has one."""
    return {name: declaration[2] for name, declaration in _declarations().items() if len(declaration) > 2}


def load_file(path: Path) -> dict[str, Any]:
    """Read the options of a TOML file, without its table [federation]. Relative paths start at the file's folder.

    A file with that table describes a real federation of sites. It gets the defaults of a federation, so that a
    simulation of it caps client weights and aggregates as its server does, and trains clients one by one (executor
    "loop"). `resolve` checks names and types.

    Raises:
        UserError: the file cannot be read or is not valid TOML.
    """
    options = read_file(path)
    if isinstance(options.get(FEDERATION_TABLE), Mapping):
        table = options.pop(FEDERATION_TABLE)
        options.setdefault("executor", "loop")
        # With secure aggregation or differential privacy the server cannot cap single weights.
        if not options.get("secure_aggregation") and options.get("dp_clip") is None:
            options.setdefault("weight_cap", table.get("weight_cap", DEFAULT_WEIGHT_CAP))
        sites: Sequence[Any] = table["sites"] if isinstance(table.get("sites"), list) else [None]
        # The sites are the clients, unless a saved split has its number of clients.
        clients = {} if "split" in options else {"clients": len(sites)}
        # The default rule of aggregation depends on the complete configuration, and on the entry of its method in the
        # catalog.
        config = resolve(file_options={**clients, **options}, flags={}, file=path, check_catalog=False)
        options.setdefault("aggregation", default_aggregation(config, _registry().entry))
    return resolve_paths(options, path.parent)


def read_file(path: Path) -> dict[str, Any]:
    """Parse a TOML file; raise UserError if it cannot be read or is not valid TOML."""
    try:
        content = path.read_bytes().decode("utf-8-sig")  # editors of Windows write a byte order mark
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}.") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not a text file: byte {error.start} is not UTF-8.") from error
    try:
        return toml.parse(content)
    except tomllib.TOMLDecodeError as error:
        hint = " In TOML a path with backslashes is in single quotes, such as 'C:\\images'." if "\\" in content else ""
        raise UserError(f"{path} is not valid TOML: {error}.{hint}") from error


def resolve_paths(options: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Make relative paths in options absolute.

    Args:
        options: options by name. `data`, `weights` and `network` may be paths too.
        folder: the folder in which relative paths start.
    """
    resolved = dict(options)
    for name, option_type in option_types().items():
        value = resolved.get(name)
        if isinstance(value, str | Path) and Path in union_members(option_type):
            resolved[name] = _absolute(folder, value)
    # `weights`, `network` and `data` are texts that may be paths, which their types do not show.
    weights = resolved.get("weights")
    if isinstance(weights, str) and not weights.startswith(weight_files.PREFIX):
        resolved["weights"] = str(_absolute(folder, weights))
    network = resolved.get("network")
    if isinstance(network, str):
        resolved["network"] = hubs.absolute_name(network, folder)
    data = resolved.get("data")
    if isinstance(data, str) and _is_data_folder(data, folder, resolved):
        resolved["data"] = str(_absolute(folder, data))
    return resolved


def resolve(
    file_options: Mapping[str, Any],
    flags: Mapping[str, Any],
    file: Path | str = "the file",
    check_catalog: bool = True,
) -> Config:
    """Build and check a configuration from its layers of options.

    The layers from the lowest to the highest priority: defaults, the protocol (a paper's experiment), the preset (the
    options of a method's paper), the file, and the flags.

    Args:
        file_options: options of a file, or of a Python call.
        flags: options that override them; an error calls them `--name`.
        file: the name of the file, for errors.
        check_catalog: check the names of methods and their options, which needs the catalog of methods.

    Raises:
        UserError: the first mistake.
    """
    # The options that the user set, with converted values. Flags come later, so that they override the file.
    explicit: dict[str, Any] = {}
    for layer, is_file in ((file_options, True), (flags, False)):
        for name, value in layer.items():
            subject = f"{name} in {Path(file).name}" if is_file else _flag(name)
            if name not in option_helps():
                # A file of an earlier version lists removed options, which are harmless at their defaults.
                if is_file and retired.is_ignored(name, value):
                    continue
                raise unknown_option(name, file if is_file else None)
            if name == "options":
                explicit[name] = merge_method_options(explicit.get(name, {}), value, subject)
            else:
                explicit[name] = _convert_option(subject, name, value)
        # The options for the number of labels exclude each other: one of the flags replaces another one of the file.
        sets_label_amount = any(layer.get(name) is not None for name in LABEL_AMOUNTS)
        if sets_label_amount:
            for name in set(LABEL_AMOUNTS) - set(layer):
                explicit[name] = None  # not set
    _check_split(explicit)
    if "method" in explicit:
        explicit["method"] = preset.resolve_method(explicit)

    paper_options, protocol_options = lower_layers(explicit)
    options = {**protocol_options, **paper_options, **explicit}
    options["protocol"] = "none"  # replaced by its values
    # The table of method options is merged by its keys; the table of the protocol would get lost otherwise.
    upper_table = explicit.get("options", paper_options.get("options", {}))
    options["options"] = merge_method_options(protocol_options.get("options", {}), upper_table, "options")
    clients = _count_clients(options)
    # Only a cohort that the user set may be an error; others are fitted to the number of clients.
    if "cohort" not in explicit:
        options["cohort"] = preset.default_cohort({"cohort": Config.cohort, **options}, clients)
    elif options.get("split") is None:
        check_cohort(explicit["cohort"], clients)
    config = Config(**options)
    if check_catalog:
        check_methods(config)
    return config


def lower_layers(explicit: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the options of the preset and of the protocol that the user's options name; the first override the second.

    Either is empty if `explicit` names none.
    """
    paper_options = preset.paper_run_options(explicit) if explicit.get("preset") == "paper" else {}
    return paper_options, preset.protocol_options({**paper_options, **explicit})


def _count_clients(options: Mapping[str, Any]) -> int:
    """Return the number of clients of the saved split, or otherwise that of the options."""
    split = options.get("split")
    if split is None or not split.is_file():
        return options.get("clients", Config.clients)
    from halfmoon.data import Split  # not needed without a saved split

    return Split.load(split).clients


def _registry() -> Any:
    """Import the registry of methods on first use."""
    from halfmoon.methods import registry  # slow to import: it loads torch

    return registry


def check_methods(config: Config) -> None:
    """Raise UserError for an unknown method, a wrong method option, or labels where a method cannot use them."""
    preset.check_preset(config)
    reference = [config.reference] if config.reference else []
    for method in (config.method, *config.baselines, *reference, *_method_tables(config)):
        method_options(config, method)
    if config.split is None:
        for method in (config.method, *config.baselines):
            check_label_location(method, config.labels_at)


def check_label_location(method: str, labels_at: Any) -> None:
    """Raise UserError if a method cannot work with labels at this location, such as "server"; name those that can."""
    entry = _registry().entry(method)
    if labels_at not in entry.label_locations:
        raise UserError(
            f"method {method} needs labels at {entry.labels}, but they are at {LABEL_LOCATIONS[labels_at]}; "
            f"choose another labels_at, or one of: {', '.join(list_methods_at(labels_at))}."
        )


def list_methods_at(labels_at: LabelLocation) -> list[str]:
    """List the federated semi-supervised methods that can train with labels at this location."""
    return _registry().names_at(labels_at)


def method_options(config: Config, method: str, with_preset: bool = True) -> dict[str, Any]:
    """Return the options of `method` that the configuration and its preset set, converted to their types.

    The configuration has them in the method's table, and for the trained method also outside of a table; the table wins.

    Args:
        config: the configuration.
        method: the name of the method.
        with_preset: include the options of the preset (the values of a paper), which those of the configuration override.

    Raises:
        UserError: the method has no such option, or a value has the wrong type.
    """
    registry = _registry()
    declared = registry.options(method)
    main_options = _main_options(config) if method == config.method else {}
    values = {**main_options, **_method_tables(config).get(method, {})}
    for name in values:
        if name not in declared:
            removed_option_error = retired.method_option_error(method, name)
            if removed_option_error is not None:
                raise removed_option_error
            raise UserError(f"method {method} has no option {name!r}: {registry.hint(name, declared)}")
    converted: dict[str, Any] = {}
    for name, value in values.items():
        subject = f"option {name} of {method}"
        converted[name] = convert_value(subject, declared[name].type, value)
        limits = registry.option_range(method, name)
        if limits is not None:
            limits.check(subject, converted[name])
    if not with_preset or config.preset != "paper":
        return converted
    return {**registry.entry(method).paper_options, **converted}


def check_effects(config: Config, method: str) -> None:
    """Raise UserError if the configuration changes an option of `method` that has no effect beside its other options.

    The default and the value of the method's paper are not refused. Stored configurations of earlier versions may have
    such options: this check is for new runs only.
    """
    explicit = method_options(config, method, with_preset=False)
    declared = _registry().options(method)
    # Protocols and recipes set an option to its paper's value, also for runs whose other options turn it off.
    paper = _registry().entry(method).paper_options
    changed = {
        name
        for name, value in explicit.items()
        if value != declared[name].default and not (name in paper and value == paper[name])
    }
    unused = _registry().unused_options(_registry().make(method, method_options(config, method)))
    for name in sorted(changed & unused.keys()):
        raise UserError(f"option {name} of {method} has no effect {unused[name]}: leave it out.")


def count_rounds(config: Config) -> int:
    """Return the number of rounds: a head that is solved from sums needs one, and those of EM after it."""
    if config.method not in preset.SOLVER_EM_ROUNDS:
        return config.rounds
    default = preset.SOLVER_EM_ROUNDS[config.method]
    em_rounds = method_options(config, config.method, with_preset=False).get("em_rounds", default)
    return min(config.rounds, 1 + em_rounds)


def to_toml(config: Config) -> str:
    """Format a configuration as the text of a config.toml, from which `resolve` builds an equal configuration.

    The text does not contain `run_dir`, so equal runs in different folders write the same bytes.
    """
    # Comments record the versions and hashes of the code and the weights. They are not options: `resolve` ignores them,
    # and `halfmoon.runs.outside.check_origins` compares them when a run resumes.
    lines = [f"# {name} {installed_version(name)}" for name in ("halfmoon", "torch")]
    lines += [f"# {origin}" for origin in plugin_origins(config)]
    weights = initial_weights(config)
    if weights is not None:
        lines.append(f"# weights from {weight_files.display_name(weights)} sha256 {weight_files.sha256_of(weights)}")
    unwritten = _unwritten_options(config)
    for name in option_types():
        value = getattr(config, name)
        # TOML has no null: an option that is left out is None.
        if value is not None and name not in unwritten:
            lines.append(f"{name} = {toml.format_value(value)}")
    main_options = _main_options(config)
    if main_options:
        lines += _format_table("options", main_options)
    for method, table in _method_tables(config).items():
        lines += _format_table(f"options.{toml.format_key(method)}", table)
    return "\n".join(lines) + "\n"


def _format_table(header: str, values: Mapping[str, Any]) -> list[str]:
    """Format a TOML table as lines, after an empty line."""
    lines = ["", f"[{header}]"]
    lines += [f"{toml.format_key(name)} = {toml.format_value(value)}" for name, value in values.items()]
    return lines


def plugin_origins(config: Config) -> list[plugins.PluginOrigin]:
    """Return the sources of methods, network and partition rule that are not part of this package."""
    names: list[tuple[str, plugins.Kind]] = []
    for method in (config.method, *config.baselines, config.reference):
        if method:
            names.append((method, "method"))
    names.append((config.network, "network"))
    names.append((config.setting, "split"))
    return [plugins.describe_origin(name, kind) for name, kind in dict.fromkeys(names) if plugins.is_plugin(name, kind)]


def initial_weights(config: Config) -> str | None:
    """Find the file of weights that a run starts from: that of the option `weights`, or of a pretrained network.

    Returns:
        A path, or "sha256:..." in the terms that a federation's server sends to sites, as paths differ there; None for
        random weights.
    """
    if config.weights is not None:
        return config.weights
    if config.network in hubs.PRETRAINED:
        from halfmoon.models.hubs import weights_file  # slow to import: it loads torch

        path = weights_file(config.network)
    else:
        # A network "transformers:FOLDER" has its weights in that folder; None for all others.
        path = hubs.weights_file(config.network)
    return None if path is None else str(path)


def identity(config: Config, method: str) -> str:
    """Compute the SHA-256 of all options that change the results of `method` in this run, to recognize equal runs.

    A run resumes only in a folder with its identity, so a new version must compute the same hash: options that were
    added later count only if they are not at their defaults, and removed options count at their last defaults.

    It leaves out folders, device and other `EXECUTION_OPTIONS`. Of the run's other methods only the one that sets a
    shared budget counts.
    """
    # The preset and the protocol count by the values that they set.
    excluded = EXECUTION_OPTIONS | {"method", "baselines", "reference", "preset", "protocol"}
    excluded |= _unwritten_options(config)
    excluded |= {name for name in ADDED_OPTIONS if getattr(config, name) == getattr(Config, name)}
    values = {name: getattr(config, name) for name in option_types() if name not in excluded}
    values = {**retired.identity_defaults(), **values}
    defaults = {name: option.default for name, option in _registry().options(method).items()}
    values["method"] = method
    values["options"] = {**defaults, **method_options(config, method)}
    weights = initial_weights(config)
    values["weights"] = weights and weight_files.sha256_of(weights)
    # The hash must be the same on every machine: contents of files count, and not their paths.
    values["network"] = hubs.portable_name(config.network)
    # With a shared budget the reference method sets the number of steps, so it changes the numbers.
    if config.budget != "none":
        values["reference"] = config.reference or config.method
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()


def security_options(config: Config) -> dict[str, Any]:
    """Collect the options of defenses, privacy and attacks that are not at their default."""
    names = option_names(sections.AggregationOptions, sections.PrivacyOptions)
    values = {name: getattr(config, name) for name in names}
    return {name: value for name, value in values.items() if value != getattr(Config, name)}


def _unwritten_options(config: Config) -> set[str]:
    """Return the options that are neither written nor part of the identity, because the folder or the split has them."""
    return {"run_dir", *(PARTITION_OPTIONS if config.split is not None else ())}


def next_free_folder(config: Config, name: str) -> Path:
    """Choose the next free folder runs/<data>-<name>-seed<seed>-<n>; `name` is the method or the command."""
    stem = plugins.folder_name(f"{Path(config.data).name}-{name}-seed{config.seed}")
    return next(path for number in count(1) if not (path := Path("runs", f"{stem}-{number}")).exists())


def parse_option(name: str, text: str) -> Any:
    """Parse the value of option `name` from the text of its flag."""
    return parse_value(_flag(name), option_types()[name], text)


def _main_options(config: Config) -> dict[str, sections.Scalar]:
    """Return the method options outside of tables, which are those of the main method."""
    return {name: value for name, value in config.options.items() if not isinstance(value, Mapping)}


def _method_tables(config: Config) -> dict[str, Mapping[str, sections.Scalar]]:
    """Return the tables of method options by method."""
    return {name: value for name, value in config.options.items() if isinstance(value, Mapping)}


def _flag(name: str) -> str:
    """Write the flag of an option."""
    return f"--{name.replace('_', '-')}"


def unknown_option(name: str, file: Path | str | None) -> UserError:
    """Build the error about an option that does not exist, in a TOML file or, with None, on the command line."""
    if (error := retired.option_error(name, file)) is not None:
        return error
    if file is None:
        flags = [_flag(option) for option in option_helps()]
        return UserError(f"unknown option '{_flag(name)}': {suggest(_flag(name), flags)}")
    return UserError(f"unknown option {name!r} in {Path(file).name}: {suggest(name, option_helps())}")


def _check_split(options: Mapping[str, Any]) -> None:
    """Raise UserError if a saved split and an option that it replaces are both set."""
    conflicting = [name for name in PARTITION_OPTIONS if options.get(name) is not None]
    if conflicting and options.get("split") is not None:
        name = conflicting[0]
        raise UserError(f"{name} and split exclude each other: the saved split has its own {name}; give one of them.")


def _absolute(folder: Path, path: str | Path) -> Path:
    """Make a path absolute, relative to `folder`; a tilde is the user's home."""
    with suppress(RuntimeError, ValueError):  # a tilde before a name that is no user's remains as it is
        path = Path(path).expanduser()
    return (folder / path).absolute()


def _is_data_folder(data: str, folder: Path, options: Mapping[str, Any]) -> bool:
    """Check whether the option `data` is a folder and not the name of a data set.

    Args:
        data: the value of the option.
        folder: the folder in which relative paths start.
        options: the other options.
    """
    if data.startswith((".", "/", "~")):
        return True
    # A folder of the user may have the name of a data set: names that halfmoon knows win.
    if data == "digits" or options.get("data_dir") is not None or not os.path.isdir(folder / data):
        return False
    from halfmoon.data import sources  # not needed for the digits, which are part of the package

    return data not in sources.list_datasets()
