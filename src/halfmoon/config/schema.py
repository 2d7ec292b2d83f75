"""The configuration of a run: every option with its type, default and help in one place, strictly checked.

The same fields are the flags of the command line, the keys of a TOML file and the arguments of `Config`.
"""

import hashlib
import json
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import cache as remembered
from importlib import metadata
from itertools import count
from pathlib import Path
from typing import Any, get_args, get_type_hints

from halfmoon.api.ranges import Range
from halfmoon.api.requirements import PLACES
from halfmoon.config import retired, sections
from halfmoon.config.option_types import members, merge_options, typed
from halfmoon.config.option_types import parse as parsed
from halfmoon.config.preset import AMOUNTS, SCENARIO, SOLVED, check_preset, cohort_of, named, paper_run, protocol_run
from halfmoon.config.sections import SECTIONS
from halfmoon.config.validation import check, check_cohort, defense
from halfmoon.core import hubs, plugins, weight_files
from halfmoon.core.errors import UserError, suggest
from halfmoon.storage import toml

SETTINGS = (
    *("iid-iid", "iid-dir", "dir-dir", "semifl-iid", "semifl-shards", "semifl-dir", "feddb-iid", "feddb-dir"),
    *("fedloke", "fedloke-balanced", "pair-dir", "fedmatch-iid", "fedmatch-noniid", "fedmatch-stream"),
)
NETWORKS = ("auto", "resnet8", "resnet9", "resnet18", "resnet18-imagenet", "small", "vit", "wrn")
# Options that name a part, and those of this package.
_PARTS: dict[str, tuple[tuple[str, ...], plugins.Kind]] = {
    "network": (NETWORKS, "network"),
    "setting": (SETTINGS, "split"),
}

# What does not change a run's numbers, or is said by `method` and its own options.
PLACE = {
    *("run_dir", "data_dir", "cache", "device", "executor", "compile", "threads", "workers", "processes"),
    *("checkpoint_every", "memory_cap", "seeds_together"),
}
# Labeled images of each class and client where nothing says how many.
LABELS = 0.5
# What a real federation needs to know beside a run's options: `halfmoon serve` reads it, a simulation does not.
TABLE = "federation"
# The largest weight of a site in a federation, in medians of its cohort's, where its file says none.
WEIGHT_CAP = 2.0
# What a site or a federation can be called: it becomes the name of a folder, and a word of a command line.
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def names_of(*parts: type) -> tuple[str, ...]:
    return tuple(each.name for part in parts for each in fields(part))


ATTACKS = ("attack", "attackers", "attack_factor", "weight_cap")
IMAGES = ("resize", "channels", "crop", "window", "group_pattern")
PIXELS = ("pixel_mean", "pixel_std")


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
    """Say everything about a run; the defaults are the main job on the embedded digits.

    [Options](../options.md) has the meaning, values and default of each; `--server-ema` there is `server_ema` here.
    Raise UserError where a value has the wrong type or range, or two options exclude each other. The names and
    options of methods are checked by `check_methods`. What a `preset` or a `protocol` says of a run lies under what is
    said, as `Config.of` and files know it.
    """

    def __new__(cls, *args: Any, **options: Any) -> "Config":
        """Refuse a removed option with a sentence, before the constructor calls it an unexpected keyword."""
        for name in options:
            if name not in kinds() and (error := retired.option_error(name, "Config")) is not None:
                raise error
        return super().__new__(cls)

    def __post_init__(self) -> None:
        values = {name: _typed(name, name, getattr(self, name)) for name in kinds()}
        if all(values[name] is None for name in AMOUNTS):
            values["labels_per_class"] = LABELS
        values["method"] = named(values)
        if values["split"] is None and values["cohort"] == Config.cohort:  # the default
            values["cohort"] = cohort_of(values, values["clients"])
        values["options"] = merge_options({}, self.options, "options")
        if values["protocol"] != "none":
            raise UserError(
                "protocol fills in what is not said, which Config cannot know: use Config.of(protocol=...)."
            )
        for name, value in anchored(values, Path()).items():
            object.__setattr__(self, name, value)
        for name, allowed in ranges().items():
            allowed.check(name, getattr(self, name))
        check(self)

    @classmethod
    def of(cls, **options: Any) -> "Config":
        return resolve(options, {}, "Config.of")

    def __repr__(self) -> str:
        changed = {each.name: value for each in fields(self) if (value := getattr(self, each.name)) != each.default}
        return f"Config({', '.join(f'{name}={value!r}' for name, value in changed.items() if value != {})})"


def _typed(subject: str, name: str, value: Any) -> Any:
    value = typed(subject, kinds()[name], value)
    choices, kind = _PARTS.get(name, ((), "network"))
    if choices and value not in choices and not plugins.foreign(value, kind):
        if plugins.is_module(value):
            part = "make" if kind == "network" else "rule"
            raise UserError(f"{subject} is {value!r}, a module: name its function too, such as {value}:{part}.")
        raise UserError(f"{subject} is {value!r}: {suggest(value, [*choices, *plugins.announced(kind)])}")
    return value


@remembered
def _declared() -> Mapping[str, tuple[Any, ...]]:
    """Return (type, help, range if there is one) of every option, in the order of the sections."""
    declarations: dict[str, tuple[Any, ...]] = {}
    for section in SECTIONS.values():
        hints = get_type_hints(section, include_extras=True)
        declarations |= {each.name: get_args(hints[each.name]) for each in fields(section)}
    return declarations


@remembered
def kinds() -> Mapping[str, Any]:
    return {name: row[0] for name, row in _declared().items() if name != "options"}


@remembered
def helps() -> Mapping[str, str]:
    return {name: row[1] for name, row in _declared().items()}


@remembered
def ranges() -> Mapping[str, Range]:
    return {name: row[2] for name, row in _declared().items() if len(row) > 2}


def load(path: Path) -> dict[str, Any]:
    """Return the values of a TOML file without its table [federation]; its relative paths start at the file's folder.

    A simulation of a federation caps weights and aggregates as its server does, and trains clients one by one.

    Raise UserError where the file cannot be read or is no TOML. Names and types are checked by `resolve`.
    """
    values = read(path)
    if isinstance(values.get(TABLE), Mapping):
        table = values.pop(TABLE)
        values.setdefault("executor", "loop")
        if not values.get("secure_aggregation") and values.get("dp_clip") is None:
            values.setdefault("weight_cap", table.get("weight_cap", WEIGHT_CAP))
        sites: Sequence[Any] = table["sites"] if isinstance(table.get("sites"), list) else [None]
        here = {} if "split" in values else {"clients": len(sites)}
        values.setdefault("aggregation", defense(merge({**here, **values}, {}, path), _registry().entry))
    return anchored(values, path.parent)


def read(path: Path) -> dict[str, Any]:
    """Return what a TOML file says, as it stands there; raise UserError where it cannot be read or is no TOML."""
    try:
        content = path.read_bytes().decode()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}.") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is no text file: byte {error.start} is not UTF-8.") from error
    try:
        return toml.loads(content)
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{path} is not valid TOML: {error}.") from error


def anchored(values: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return `values` with every path, also one in `data`, `weights` or `network`, made absolute from `folder`."""
    result = dict(values)
    for name, kind in kinds().items():
        value = result.get(name)
        if isinstance(value, str | Path) and Path in members(kind):
            result[name] = _absolute(folder, value)
    weights, network = result.get("weights"), result.get("network")
    if isinstance(weights, str) and not weights.startswith(weight_files.PREFIX):
        result["weights"] = str(_absolute(folder, weights))
    if isinstance(network, str):
        result["network"] = hubs.anchored(network, folder)
    data = result.get("data")
    if isinstance(data, str) and _is_folder(data, folder, result):
        result["data"] = str(_absolute(folder, data))
    return result


def resolve(values: Mapping[str, Any], flags: Mapping[str, Any], file: Path | str = "the file") -> Config:
    """Return the configuration of a file's `values` overridden by `flags`, checked against the catalog.

    Raise UserError with one sentence for the first mistake; `file` is named in it.
    """
    config = merge(values, flags, file)
    check_methods(config)
    return config


def merge(values: Mapping[str, Any], flags: Mapping[str, Any], file: Path | str = "the file") -> Config:
    """Do what `resolve` does, without a look at the methods' own options."""
    settings: dict[str, Any] = {}
    for layer, spelled in ((values, f"{{}} in {Path(file).name}"), (flags, "--{}")):
        for name, value in layer.items():
            subject = spelled.format(name if layer is values else _flag(name))
            if name not in helps():
                if layer is values and retired.is_ignored(name, value):
                    continue
                raise unknown_option(name, file if layer is values else None)
            if name == "options":
                settings[name] = merge_options(settings.get(name, {}), value, subject)
            else:
                settings[name] = _typed(subject, name, value)
        # Of two options that exclude each other, the later layer's displaces the earlier one's.
        if any(layer.get(name) is not None for name in AMOUNTS):
            settings |= dict.fromkeys(set(AMOUNTS) - set(layer))
    _check_split(settings)
    if "method" in settings:
        settings["method"] = named(settings)
    requested = settings.get("cohort")
    paper = paper_run(settings) if settings.get("preset") == "paper" else {}
    settings = {**paper, **settings}
    under = protocol_run(settings)
    settings["protocol"] = "none"  # its values stand in its place
    settings["options"] = merge_options(under.get("options", {}), settings.get("options", {}), "options")
    settings = {**under, **settings}
    clients = _clients(settings)
    if requested is None:
        settings["cohort"] = cohort_of({"cohort": Config.cohort, **settings}, clients)
    elif settings.get("split") is None:
        check_cohort(requested, clients)
    return Config(**settings)


def _clients(settings: Mapping[str, Any]) -> int:
    split = settings.get("split")
    if split is None or not split.is_file():
        return settings.get("clients", Config.clients)
    from halfmoon.data import Split  # not needed where nothing is saved

    return Split.load(split).clients


def _registry() -> Any:
    from halfmoon.methods import registry  # slow to import: it brings torch

    return registry


def check_methods(config: Config) -> None:
    """Raise UserError where a method is unknown or cannot use the labels where they are, or for a wrong option."""
    check_preset(config)
    reference = [config.reference] if config.reference else []
    for method in (config.method, *config.baselines, *reference, *_tables(config)):
        method_options(config, method)
    if config.split is None:
        for method in (config.method, *config.baselines):
            check_place(method, config.labels_at)


def check_place(method: str, place: Any) -> None:
    """Raise UserError where `method` cannot work with labels at `place`, with the methods that can."""
    entry = _registry().entry(method)
    if place not in entry.places:
        raise UserError(
            f"method {method} needs labels at {entry.labels}, but they are at {PLACES[place]}; "
            f"choose another labels_at, or one of: {', '.join(_registry().names_at(place))}."
        )


def method_options(config: Config, method: str) -> dict[str, Any]:
    """Return what `own_options` does, over the options of the preset."""
    own = own_options(config, method)
    return {**_registry().entry(method).paper_options, **own} if config.preset == "paper" else own


def own_options(config: Config, method: str) -> dict[str, Any]:
    """Return the options given to `method`: its own table over, for the main method, the bare ones.

    Raise UserError where the method has no such option, or a value has the wrong type.
    """
    options = _registry().options(method)
    values = {**(_bare(config) if method == config.method else {}), **_tables(config).get(method, {})}
    for name in values:
        if name not in options:
            if (error := retired.method_option_error(method, name)) is not None:
                raise error
            hint = _registry().hint(name, options)
            raise UserError(f"method {method} has no option {name!r}: {hint}")
    return {name: typed(f"option {name} of {method}", options[name].type, value) for name, value in values.items()}


def rounds_of(config: Config) -> int:
    """Return how many rounds are played: a head that is solved from sums needs no more than its own."""
    if config.method not in SOLVED:
        return config.rounds
    later = own_options(config, config.method).get("em_rounds", SOLVED[config.method])
    return min(config.rounds, 1 + later)


def text(config: Config) -> str:
    """Return the configuration as TOML that `load` and `resolve` turn into an equal one, without its `run_dir`.

    Equal runs in different folders save the same bytes.
    """
    lines = [f"# {name} {metadata.version(name)}" for name in ("halfmoon", "torch")]
    lines += [f"# {each}" for each in origins(config)]
    if (start := weights_of(config)) is not None:
        lines.append(f"# weights from {weight_files.title(start)} sha256 {weight_files.named(start)}")
    for name in kinds():
        value = getattr(config, name)
        if value is not None and name not in _unsaved(config):
            lines.append(f"{name} = {toml.value(value)}")
    tables = {f"options.{toml.key(method)}": table for method, table in _tables(config).items()}
    for header, table in {"options": _bare(config), **tables}.items():
        if table or header != "options":
            lines += ["", f"[{header}]", *(f"{toml.key(name)} = {toml.value(value)}" for name, value in table.items())]
    return "\n".join(lines) + "\n"


def origins(config: Config) -> list[plugins.Origin]:
    """Return where the parts come from that are not this package's: method, network and split rule."""
    methods = filter(None, (config.method, *config.baselines, config.reference))
    named: list[tuple[str, plugins.Kind]] = [("", "method"), (config.network, "network"), (config.setting, "split")]
    named[:1] = [(name, "method") for name in methods]
    return [plugins.origin(name, kind) for name, kind in dict.fromkeys(named) if plugins.foreign(name, kind)]


def weights_of(config: Config) -> str | None:
    """Return the file of weights that a run starts from, a path or a hash: its own, or that of its network's folder."""
    if config.weights is not None:
        return config.weights
    if config.network in hubs.PRETRAINED:
        from halfmoon.models.hubs import weights  # slow to import: it brings torch

        beside = weights(config.network)
    else:
        beside = hubs.weights(config.network)
    return None if beside is None else str(beside)


def identity(config: Config, method: str) -> str:
    """Return the SHA-256 of everything that changes the numbers of `method` in this run.

    Left out is where things lie and how they are computed: folders, device, executor, compile, threads, checkpoints.
    Of the other methods of the run only the one that sets a shared budget counts.
    """
    without = PLACE | {"method", "baselines", "reference", "preset", "protocol"} | _unsaved(config)
    facts = {**retired.identity_defaults(), **{name: getattr(config, name) for name in kinds() if name not in without}}
    defaults = {name: option.default for name, option in _registry().options(method).items()}
    facts |= {"method": method, "options": {**defaults, **method_options(config, method)}}
    start = weights_of(config)
    facts |= {"weights": start and weight_files.named(start), "network": hubs.portable(config.network)}
    if config.budget != "none":
        facts["reference"] = config.reference or config.method
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()


def guarding(config: Config) -> dict[str, Any]:
    """Return the options of defenses, privacy and attacks that a configuration sets: a run's summary has them."""
    names = names_of(sections.AggregationOptions, sections.PrivacyOptions)
    values = {name: getattr(config, name) for name in names}
    return {name: value for name, value in values.items() if value != getattr(Config, name)}


def _unsaved(config: Config) -> set[str]:
    return {"run_dir", *(SCENARIO if config.split is not None else ())}


def free_folder(config: Config, word: str) -> Path:
    """Return the next free runs/<data>-<word>-seed<seed>-<n>; `word` is the method, or what the run is."""
    name = plugins.folder_of(f"{Path(config.data).name}-{word}-seed{config.seed}")
    return next(path for n in count(1) if not (path := Path("runs", f"{name}-{n}")).exists())


def parse(name: str, words: str) -> Any:
    return parsed(f"--{_flag(name)}", kinds()[name], words)


def _bare(config: Config) -> dict[str, sections.Scalar]:
    return {name: value for name, value in config.options.items() if not isinstance(value, Mapping)}


def _tables(config: Config) -> dict[str, Mapping[str, sections.Scalar]]:
    return {name: value for name, value in config.options.items() if isinstance(value, Mapping)}


def _flag(name: str) -> str:
    return name.replace("_", "-")


def unknown_option(name: str, file: Path | str | None) -> UserError:
    """Return the sentence about an option that does not exist, of a TOML file or (None) of the command line."""
    if (error := retired.option_error(name, file)) is not None:
        return error
    if file is None:
        flags = [f"--{_flag(each)}" for each in helps()]
        return UserError(f"unknown option '--{_flag(name)}': {suggest(f'--{_flag(name)}', flags)}")
    return UserError(f"unknown option {name!r} in {Path(file).name}: {suggest(name, helps())}")


def _check_split(settings: Mapping[str, Any]) -> None:
    clash = [name for name in SCENARIO if settings.get(name) is not None]
    if clash and settings.get("split") is not None:
        raise UserError(
            f"{clash[0]} and split exclude each other: the saved split has its own {clash[0]}; give one of them."
        )


def _absolute(folder: Path, path: str | Path) -> Path:
    with suppress(RuntimeError, ValueError):  # a tilde before no user's name stays what it is
        path = Path(path).expanduser()
    return (folder / path).absolute()


def _is_folder(data: str, folder: Path, values: Mapping[str, Any]) -> bool:
    """Say whether `data` means a folder, not the name of a data set."""
    if data.startswith((".", "/", "~")):
        return True
    if data == "digits" or values.get("data_dir") is not None or not os.path.isdir(folder / data):
        return False
    from halfmoon.data import sources  # not needed for the embedded digits

    return data not in sources.names()
