"""The configuration of a run: every option with its type, default and help in one place, strictly checked.

The same fields are the flags of the command line, the keys of a TOML file and the arguments of `Config`.
"""

from __future__ import annotations

import hashlib
import json
import re
import tomllib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields
from functools import cache as remembered
from importlib import metadata
from itertools import count
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_type_hints

from halfmoon import toml
from halfmoon.checks import check
from halfmoon.errors import UserError, nearest
from halfmoon.values import expected, joined, members, typed
from halfmoon.values import parse as parsed

Scalar = bool | int | float | str
Options = Mapping[str, Scalar | Mapping[str, Scalar]]

Setting = Literal[
    "iid-iid", "iid-dir", "dir-dir", "semifl-iid", "semifl-shards", "semifl-dir", "feddb-iid", "feddb-dir",
    "fedloke", "fedloke-balanced", "fedmatch-iid", "fedmatch-noniid", "fedmatch-stream",
]  # fmt: skip

# What does not change a run's numbers, or is said by `method` and its own options.
PLACE = {"run_dir", "data_dir", "cache", "device", "executor", "threads", "checkpoint_every", "memory_cap"}
# Labeled images of each class and client where nothing says how many.
LABELS = 0.5
# What a saved split decides in place of the options.
SCENARIO = (
    *("clients", "setting", "gamma", "labels_per_class", "label_ratio", "labels", "labels_at", "labeled_clients"),
    *("classes_per_client", "stages", "unlabeled_share", "min_size", "split_seed"),
)
# Hostile clients exist in simulations alone, as far as anybody says.
ATTACKS = ("attack", "attackers")
# What stands between the clients' uploads and a method.
GUARDS = (
    *("aggregation", "byzantine", "secure_aggregation", "dp_clip", "dp_noise", "dp_epsilon", "dp_delta"),
    *ATTACKS,
)
# What stands between the clients and the method.
GUARDS = (
    *("aggregation", "byzantine", "secure_aggregation", "dp_clip", "dp_noise", "dp_epsilon", "dp_delta"),
    *ATTACKS,
)
# What a real federation needs to know beside a run's options: `halfmoon serve` reads it, a simulation does not.
TABLE = "federation"
# What a site or a federation can be called: it becomes the name of a folder, and a word of a command line.
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
# Three ways to say how many labels there are.
AMOUNTS = ("labels_per_class", "label_ratio", "labels")


@dataclass(frozen=True)
class Config:
    """Say everything about a run; the defaults are the main job on the embedded digits.

    Raise UserError where a value has the wrong type or range, or two options exclude each other. The names and
    options of methods are checked by `check_methods`.
    """

    method: Annotated[str, "the method to train (see halfmoon methods)"] = "feddure"
    beside: Annotated[tuple[str, ...], "methods to train beside it on the same split and cohorts"] = ()

    data: Annotated[str, "a data set: its name, its folder, or owner/name on the Hugging Face hub"] = "digits"
    data_dir: Annotated[Path | None, "the folder where named data sets lie; none: the hub"] = None
    cache: Annotated[Path | None, "a folder that keeps decoded images; none: nothing is kept"] = None
    image_size: Annotated[int | None, "pad images with zeros to this size; none: what the network needs"] = None
    data_share: Annotated[float, "share of the training images of each class that is used at all"] = 1.0
    shrink: Annotated[int, "average-pool the images by this factor"] = 1

    clients: Annotated[int, "how many clients hold the data"] = 20
    setting: Annotated[Setting, "how labeled and unlabeled images lie among the clients"] = "dir-dir"
    gamma: Annotated[float, "concentration of the Dirichlet draws; smaller is more uneven"] = 0.5
    labels_per_class: Annotated[
        float | None, "labeled images of each class, a client on average; none: 0.5 where nothing says how many"
    ] = None
    label_ratio: Annotated[float | None, "instead of labels_per_class: the share of images that is labeled"] = None
    labels: Annotated[int | None, "instead of labels_per_class: labeled images in all, evenly of each class"] = None
    labels_at: Annotated[Literal["clients", "some", "server"], "who holds labels: all clients, some, the server"] = (
        "clients"
    )
    labeled_clients: Annotated[int | None, "with labels_at some: how many clients hold labels"] = None
    classes_per_client: Annotated[int, "with setting semifl-shards: shards, each of one class, of a client"] = 2
    reuse_labeled: Annotated[bool, "put a client's labeled images among its unlabeled ones as well (FedDB)"] = False
    stages: Annotated[int, "parts of each client's unlabeled images that are seen one after the other"] = 1
    unlabeled_share: Annotated[float, "share of each client's unlabeled images that it has"] = 1.0
    min_size: Annotated[int | None, "fewest labeled, and unlabeled, images of a client; none: from the mean"] = None
    split_seed: Annotated[int, "seed of the split, apart from the seed of training"] = 0
    split: Annotated[Path | None, "a saved split to load instead of making one"] = None

    cohort: Annotated[int, "clients that train in a round"] = 5
    rounds: Annotated[int, "rounds to play"] = 40
    seed: Annotated[int, "seed of the first model, the cohorts, batches and views"] = 0

    labeled_batch: Annotated[int | Literal["all"], "labeled images in a step; all: every one of the client's"] = 10
    unlabeled_batch: Annotated[
        int | Literal["rest"], "unlabeled images in a step; rest: all, spread over one pass of the labeled ones"
    ] = 10
    epochs: Annotated[int, "local epochs in a round"] = 1
    epoch: Annotated[
        Literal["auto", "labeled", "unlabeled"],
        "the images an epoch passes over once; auto: labeled with unlabeled_batch rest, else unlabeled",
    ] = "auto"
    steps: Annotated[int | None, "local steps in a round instead of epochs"] = None
    server_batch: Annotated[int | None, "images in a step of the server's own training; none: labeled_batch"] = None
    server_epochs: Annotated[int | None, "epochs of the server's own training in a round; none: epochs"] = None
    silent: Annotated[float, "probability that a client of the cohort does not answer in a round"] = 0.0
    statistics: Annotated[
        Literal["joint", "separate"], "which views share a forward pass, and so their batch statistics"
    ] = "joint"
    labeling: Annotated[Literal["batch", "running"], "which statistics normalize pseudo-labeled views"] = "batch"
    budget: Annotated[
        Literal["none", "labeled-steps", "forwards"], "what all methods of a comparison get the same amount of"
    ] = "labeled-steps"
    reference: Annotated[str | None, "the method that sets the shared budget; none: the main one"] = None

    network: Annotated[
        Literal["auto", "resnet9", "wrn", "small"], "the network; auto: small for digits, else resnet9"
    ] = "auto"
    width: Annotated[int | None, "width of the network (2 is WRN-28-2); none: its own default"] = None
    norm: Annotated[Literal["batch", "group", "none"], "how the network normalizes"] = "batch"
    optimizer: Annotated[Literal["adam", "sgd"], "the clients' optimizer"] = "adam"
    lr: Annotated[float, "the clients' learning rate"] = 1e-3
    momentum: Annotated[float, "momentum of sgd"] = 0.0
    nesterov: Annotated[bool, "Nesterov's momentum in sgd"] = False
    weight_decay: Annotated[float, "weight decay of the clients' optimizer"] = 0.0
    clip_norm: Annotated[float | None, "largest Euclidean norm of a gradient; none: it is not clipped"] = None
    clip_value: Annotated[float | None, "largest absolute value in a gradient; none: it is not clipped"] = None
    schedule: Annotated[
        Literal["constant", "cosine", "step"], "the learning rate over the rounds; step: a tenth at 1/2 and at 3/4"
    ] = "constant"

    strong_view: Annotated[
        Literal["feddure", "semifl", "fedloke"], "whose RandAugment makes the strong views (SemiFL's is FedDB's too)"
    ] = "feddure"
    shared_views: Annotated[bool, "draw one augmentation for all images of a step, as FedLoKe's code does"] = False
    labeled_view: Annotated[
        Literal["cutout", "weak", "plain"], "how labeled images are augmented: weak with cutout, weak, or not at all"
    ] = "cutout"
    flip: Annotated[bool | None, "mirror images at random; none: where the data set allows it"] = None
    confident: Annotated[float, "confidence from which the diagnostics call a pseudo-label confident"] = 0.95

    aggregation: Annotated[
        Literal["mean", "clip", "median", "trimmed", "krum"],
        "what the server makes of uploads before it averages them; clip: to the cohort's median norm",
    ] = "mean"
    byzantine: Annotated[float, "share of a cohort that trimmed and krum expect to be hostile"] = 0.2
    secure_aggregation: Annotated[bool, "the server learns the sum of a cohort's uploads alone"] = False
    dp_clip: Annotated[
        float | None, "client-level differential privacy: largest norm of a client's update; none: no privacy"
    ] = None
    dp_noise: Annotated[float | None, "standard deviation of the noise on the sum of updates, in units of dp_clip"] = (
        None
    )
    dp_epsilon: Annotated[float | None, "epsilon at which training stops; none: it is counted alone"] = None
    dp_delta: Annotated[float, "delta at which epsilon is counted"] = 1e-5
    attack: Annotated[
        Literal["none", "sign-flip", "noise", "label-flip", "stale", "nan"],
        "what hostile clients of a simulation do",
    ] = "none"
    attackers: Annotated[float, "share of the clients that is hostile"] = 0.0

    device: Annotated[Literal["auto", "cpu", "cuda"], "where to compute"] = "auto"
    executor: Annotated[Literal["auto", "loop", "vmap"], "clients one by one, or batched; auto: vmap on a GPU"] = "auto"
    threads: Annotated[int | None, "processor threads; none: 1 for the small network, else all"] = None
    evaluate_every: Annotated[int, "rounds between evaluations on the test images"] = 1
    checkpoint_every: Annotated[int, "rounds between checkpoints"] = 1
    memory_cap: Annotated[int, "MB of clients' memories that stay in RAM; the rest lies on disk"] = 2048
    run_dir: Annotated[Path | None, "the run's folder; none: the next free runs/<data>-<method>-seed<seed>-<n>"] = None
    options: Annotated[Options, "the method's own options; a table named after a method holds those of that method"] = (
        field(default_factory=dict)
    )

    def __post_init__(self) -> None:
        values = {name: typed(name, kind, getattr(self, name)) for name, kind in kinds().items()}
        if all(values[name] is None for name in AMOUNTS):
            values["labels_per_class"] = LABELS
        values["options"] = joined({}, self.options, "options")
        for name, value in anchored(values, Path()).items():
            object.__setattr__(self, name, value)
        check(self)


@remembered
def kinds() -> Mapping[str, Any]:
    """Return the type of every option but `options`, in the order of the fields."""
    hints = get_type_hints(Config)
    return {each.name: hints[each.name] for each in fields(Config) if each.name != "options"}


@remembered
def helps() -> Mapping[str, str]:
    """Return one line about every option."""
    hints = get_type_hints(Config, include_extras=True)
    return {each.name: get_args(hints[each.name])[1] for each in fields(Config)}


def load(path: Path) -> dict[str, Any]:
    """Return the values of a TOML file without its table [federation]; its relative paths start at the file's folder.

    Raise UserError where the file cannot be read or is no TOML. Names and types are checked by `resolve`.
    """
    values = read(path)
    if isinstance(values.get(TABLE), Mapping):
        del values[TABLE]
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
    """Return `values` with every path, and a `data` that is a path, made absolute from `folder`."""
    result = dict(values)
    for name, kind in kinds().items():
        value = result.get(name)
        if isinstance(value, str | Path) and Path in members(kind):
            result[name] = _absolute(folder, value)
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
    given: dict[str, Any] = {}
    for layer, spelled in ((values, f"{{}} in {Path(file).name}"), (flags, "--{}")):
        for name, value in layer.items():
            said = spelled.format(name if layer is values else _flag(name))
            if name not in helps():
                raise _unknown(name, file if layer is values else None)
            if name == "options":
                given[name] = joined(given.get(name, {}), value, said)
            else:
                given[name] = typed(said, kinds()[name], value)
        # Of two options that exclude each other, the later layer's displaces the earlier one's.
        if any(layer.get(name) is not None for name in AMOUNTS):
            given |= dict.fromkeys(set(AMOUNTS) - set(layer))
    if given.get("split") is not None:
        _check_split(given)
    return Config(**given)


def check_methods(config: Config) -> None:
    """Raise UserError where a method is unknown or cannot use the labels where they are, or for a wrong option."""
    reference = [config.reference] if config.reference else []
    for method in (config.method, *config.beside, *reference, *_tables(config)):
        method_options(config, method)
    if config.split is None:
        for method in (config.method, *config.beside):
            check_place(method, config.labels_at)


def check_place(method: str, place: Any) -> None:
    """Raise UserError where `method` cannot work with labels at `place`, with the methods that can."""
    from halfmoon import catalog  # slow to import: it brings torch

    entry = catalog.entry(method)
    if place not in entry.places:
        raise UserError(
            f"method {method} needs labels at {entry.labels}, but they are at {catalog.PLACES[place]}; "
            f"choose another labels_at, or one of: {', '.join(catalog.names_at(place))}."
        )


def method_options(config: Config, method: str) -> dict[str, Any]:
    """Return the options given to `method`: its own table over, for the main method, the bare ones.

    Raise UserError where the method has no such option, or a value has the wrong type.
    """
    from halfmoon import catalog  # slow to import: it brings torch

    known = catalog.options(method)
    given = {**(_bare(config) if method == config.method else {}), **_tables(config).get(method, {})}
    for name in given:
        if name not in known:
            hint = nearest(name, known) if known else "it has no options of its own."
            raise UserError(f"method {method} has no option {name!r}: {hint}")
    return {name: typed(f"option {name} of {method}", known[name].type, value) for name, value in given.items()}


def text(config: Config) -> str:
    """Return the configuration as TOML that `load` and `resolve` turn into an equal one, without its `run_dir`.

    Equal runs in different folders save the same bytes.
    """
    lines = [f"# {name} {metadata.version(name)}" for name in ("halfmoon", "torch")]
    for name in kinds():
        value = getattr(config, name)
        if value is not None and name not in _unsaid(config):
            lines.append(f"{name} = {toml.value(value)}")
    tables = {f"options.{toml.key(method)}": table for method, table in _tables(config).items()}
    for header, table in {"options": _bare(config), **tables}.items():
        if table or header != "options":
            lines += ["", f"[{header}]", *(f"{toml.key(name)} = {toml.value(value)}" for name, value in table.items())]
    return "\n".join(lines) + "\n"


def identity(config: Config, method: str) -> str:
    """Return the SHA-256 of everything that changes the numbers of `method` in this run.

    Left out is where things lie and how they are computed: folders, device, executor, threads, checkpoints.
    Of the other methods of the run only the one that sets a shared budget counts.
    """
    from halfmoon import catalog  # slow to import: it brings torch

    without = PLACE | {"method", "beside", "reference"} | _unsaid(config)
    facts = {name: getattr(config, name) for name in kinds() if name not in without}
    defaults = {name: option.default for name, option in catalog.options(method).items()}
    facts |= {"method": method, "options": {**defaults, **method_options(config, method)}}
    if config.budget != "none":
        facts["reference"] = config.reference or config.method
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()


def guarding(config: Config) -> dict[str, Any]:
    """Return the options of defenses, privacy and attacks that a configuration sets: a run's summary has them."""
    default = {each.name: each.default for each in fields(Config)}
    return {name: value for name in GUARDS if (value := getattr(config, name)) != default[name]}


def _unsaid(config: Config) -> set[str]:
    """Return the options that a run's file leaves out: where it lies, and what a saved split decides."""
    return {"run_dir", *(SCENARIO if config.split is not None else ())}


def free_folder(config: Config, word: str) -> Path:
    """Return the next free runs/<data>-<word>-seed<seed>-<n>; `word` is the method, or what the run is."""
    name = f"{Path(config.data).name}-{word}-seed{config.seed}"
    return next(path for n in count(1) if not (path := Path("runs", f"{name}-{n}")).exists())


def template() -> str:
    """Return a commented TOML file with every option at its default."""
    lines: list[str] = []
    defaults = {each.name: each.default for each in fields(Config)}
    for name, about in helps().items():
        if name == "options":
            entry = "# [options]"
        elif defaults[name] is None:
            entry = f"# {name} = {expected(kinds()[name])}"
        else:
            entry = f"{name} = {toml.value(defaults[name])}"
        lines += [f"# {about}", entry, ""]
    return "\n".join(lines)


def parse(name: str, words: str) -> Any:
    """Return the value that an option of this name has on the command line; raise UserError where it is none."""
    return parsed(f"--{_flag(name)}", kinds()[name], words)


def _bare(config: Config) -> dict[str, Scalar]:
    return {name: value for name, value in config.options.items() if not isinstance(value, Mapping)}


def _tables(config: Config) -> dict[str, Mapping[str, Scalar]]:
    return {name: value for name, value in config.options.items() if isinstance(value, Mapping)}


def _flag(name: str) -> str:
    return name.replace("_", "-")


def _unknown(name: str, file: Path | str | None) -> UserError:
    if file is None:
        flags = [f"--{_flag(known)}" for known in helps()]
        return UserError(f"unknown option '--{_flag(name)}': {nearest(f'--{_flag(name)}', flags)}")
    return UserError(f"unknown option {name!r} in {Path(file).name}: {nearest(name, helps())}")


def _check_split(given: Mapping[str, Any]) -> None:
    clash = [name for name in SCENARIO if given.get(name) is not None]
    if clash:
        raise UserError(
            f"{clash[0]} and split exclude each other: the saved split has its own {clash[0]}; give one of them."
        )


def _absolute(folder: Path, path: str | Path) -> Path:
    with suppress(RuntimeError):  # a tilde before no user's name stays what it is
        path = Path(path).expanduser()
    return (folder / path).absolute()


def _is_folder(data: str, folder: Path, values: Mapping[str, Any]) -> bool:
    """Say whether `data` means a folder, not the name of a data set."""
    if data.startswith((".", "/", "~")):
        return True
    if data == "digits" or values.get("data_dir") is not None or not (folder / data).is_dir():
        return False
    from halfmoon.data import sources  # not needed for the embedded digits

    return data not in sources.names()
