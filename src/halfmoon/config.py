"""The configuration of a run: every option with its type, default and help in one place, strictly checked.

The same fields are the flags of the command line, the keys of a TOML file and the arguments of `Config`.
"""

from __future__ import annotations

import hashlib
import json
import math
import tomllib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields
from functools import cache as remembered
from importlib import metadata
from itertools import count
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import TypeAdapter, ValidationError

from halfmoon import toml
from halfmoon.errors import UserError, nearest

Scalar = bool | int | float | str
Options = Mapping[str, Scalar | Mapping[str, Scalar]]

# What does not change a run's numbers, or is said by `method` and its own options.
PLACE = {"run_dir", "data_dir", "cache", "device", "executor", "threads", "checkpoint_every"}
# Labeled images of each class and client where nothing says how many.
LABELS = 0.5
# What a saved split decides in place of the options.
SCENARIO = ("clients", "setting", "gamma", "labels_per_class", "label_ratio", "min_size", "split_seed")


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
    shrink: Annotated[int, "average-pool the images by this factor"] = 1

    clients: Annotated[int, "how many clients hold the data"] = 20
    setting: Annotated[
        Literal["iid-iid", "iid-dir", "dir-dir"], "how labeled and unlabeled images lie among the clients"
    ] = "dir-dir"
    gamma: Annotated[float, "concentration of the Dirichlet draws; smaller is more uneven"] = 0.5
    labels_per_class: Annotated[
        float | None, "labeled images of each class, a client on average; none: 0.5 without label_ratio"
    ] = None
    label_ratio: Annotated[float | None, "instead of labels_per_class: the share of images that is labeled"] = None
    min_size: Annotated[int | None, "fewest labeled, and unlabeled, images of a client; none: from the mean"] = None
    split_seed: Annotated[int, "seed of the split, apart from the seed of training"] = 0
    split: Annotated[Path | None, "a saved split to load instead of making one"] = None

    cohort: Annotated[int, "clients that train in a round"] = 5
    rounds: Annotated[int, "rounds to play"] = 40
    seed: Annotated[int, "seed of the first model, the cohorts, batches and views"] = 0

    labeled_batch: Annotated[int, "labeled images in a step"] = 10
    unlabeled_batch: Annotated[
        int | Literal["rest"], "unlabeled images in a step; rest: all, spread over one pass of the labeled ones"
    ] = 10
    epochs: Annotated[int, "local epochs in a round"] = 1
    epoch: Annotated[
        Literal["auto", "labeled", "unlabeled"],
        "the images an epoch passes over once; auto: labeled with unlabeled_batch rest, else unlabeled",
    ] = "auto"
    steps: Annotated[int | None, "local steps in a round instead of epochs"] = None
    statistics: Annotated[
        Literal["joint", "separate"], "which views share a forward pass, and so their batch statistics"
    ] = "joint"
    labeling: Annotated[Literal["batch", "running"], "which statistics normalize pseudo-labeled views"] = "batch"
    budget: Annotated[
        Literal["none", "labeled-steps", "forwards"], "what all methods of a comparison get the same amount of"
    ] = "labeled-steps"
    reference: Annotated[str | None, "the method that sets the shared budget; none: the main one"] = None

    network: Annotated[Literal["auto", "resnet9", "small"], "the network; auto: small for digits, else resnet9"] = (
        "auto"
    )
    width: Annotated[int | None, "width of the network; none: its own default"] = None
    optimizer: Annotated[Literal["adam", "sgd"], "the clients' optimizer"] = "adam"
    lr: Annotated[float, "the clients' learning rate"] = 1e-3
    momentum: Annotated[float, "momentum of sgd"] = 0.0
    weight_decay: Annotated[float, "weight decay of the clients' optimizer"] = 0.0

    labeled_view: Annotated[
        Literal["cutout", "weak", "plain"], "how labeled images are augmented: weak with cutout, weak, or not at all"
    ] = "cutout"
    flip: Annotated[bool | None, "mirror images at random; none: where the data set allows it"] = None
    confident: Annotated[float, "confidence from which the diagnostics call a pseudo-label confident"] = 0.95

    device: Annotated[Literal["auto", "cpu", "cuda"], "where to compute"] = "auto"
    executor: Annotated[Literal["auto", "loop", "vmap"], "clients one by one, or batched; auto: vmap on a GPU"] = "auto"
    threads: Annotated[int | None, "processor threads; none: 1 for the small network, else all"] = None
    evaluate_every: Annotated[int, "rounds between evaluations on the test images"] = 1
    checkpoint_every: Annotated[int, "rounds between checkpoints"] = 1
    run_dir: Annotated[Path | None, "the run's folder; none: the next free runs/<data>-<method>-seed<seed>-<n>"] = None
    options: Annotated[Options, "the method's own options; a table named after a method holds those of that method"] = (
        field(default_factory=dict)
    )

    def __post_init__(self) -> None:
        values = {name: _typed(name, kind, getattr(self, name)) for name, kind in kinds().items()}
        if self.labels_per_class is None and self.label_ratio is None:
            values["labels_per_class"] = LABELS
        values["options"] = _joined({}, self.options, "options")
        for name, value in anchored(values, Path()).items():
            object.__setattr__(self, name, value)
        _check(self)


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
    """Return the values of a TOML file; its relative paths start at the file's folder.

    Raise UserError where the file cannot be read or is no TOML. Names and types are checked by `resolve`.
    """
    try:
        content = path.read_bytes().decode()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}.") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is no text file: byte {error.start} is not UTF-8.") from error
    try:
        values = tomllib.loads(content)
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{path} is not valid TOML: {error}.") from error
    return anchored(values, path.parent)


def anchored(values: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return `values` with every path, and a `data` that is a path, made absolute from `folder`."""
    result = dict(values)
    for name, kind in kinds().items():
        value = result.get(name)
        if isinstance(value, str | Path) and Path in _members(kind):
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
                given[name] = _joined(given.get(name, {}), value, said)
            else:
                given[name] = _typed(said, kinds()[name], value)
        # Of two options that exclude each other, the later layer's displaces the earlier one's.
        for one, other in (("label_ratio", "labels_per_class"), ("labels_per_class", "label_ratio")):
            if layer.get(one) is not None and other not in layer:
                given[other] = None
    if given.get("split") is not None:
        _check_split(given)
    return Config(**given)


def check_methods(config: Config) -> None:
    """Raise UserError where a method or one of its options is unknown, or an option has the wrong type."""
    reference = [config.reference] if config.reference else []
    for method in (config.method, *config.beside, *reference, *_tables(config)):
        method_options(config, method)


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
    return {name: _typed(f"option {name} of {method}", known[name].type, value) for name, value in given.items()}


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
    """Return the value that an option of this name has on the command line; `none` is None where it may be.

    Raise UserError where the words are no such value.
    """
    kind = kinds()[name]
    if NoneType in _members(kind) and words == "none":
        return None
    if Path in _members(kind):
        return Path(words)
    try:
        return _adapter(kind).validate_strings(words)
    except ValidationError:
        return _refuse(f"--{_flag(name)}", kind, words)


def expected(kind: Any) -> str:
    """Return in words what a value of this type is."""
    members = [member for member in _members(kind) if member is not NoneType]
    words = {bool: "true or false", int: "a whole number", float: "a number", str: "text", Path: "a path"}
    said = []
    for member in members:
        if get_origin(member) is Literal:
            said.append(" or ".join(repr(choice) for choice in get_args(member)))
        else:
            said.append(words.get(member, "a list of names"))
    return " or ".join(said)


@remembered
def _adapter(kind: Any) -> TypeAdapter:
    return TypeAdapter(kind)


def _members(kind: Any) -> tuple[Any, ...]:
    """Return the types of a union, or the one type."""
    return get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)


def _typed(said: str, kind: Any, value: Any) -> Any:
    """Return `value` as this type; an int serves as a float, a list as a tuple, text as a path, nothing else."""
    if isinstance(value, list):
        value = tuple(value)
    if isinstance(value, str) and Path in _members(kind):
        value = Path(value)
    try:
        return _adapter(kind).validate_python(value, strict=True)
    except ValidationError:
        return _refuse(said, kind, value)


def _refuse(said: str, kind: Any, value: Any) -> Any:
    choices = [choice for member in _members(kind) if get_origin(member) is Literal for choice in get_args(member)]
    if choices and isinstance(value, str) and int not in _members(kind):
        raise UserError(f"{said} is {value!r}: {nearest(value, choices)}")
    raise UserError(f"{said} is {toml.shown(value)}: it must be {expected(kind)}.")


def _joined(old: Mapping[str, Any], new: Any, said: str) -> dict[str, Any]:
    """Return two tables of method options as one; the new ones win, one by one."""
    if not isinstance(new, Mapping):
        raise UserError(f"{said} is {toml.shown(new)}: it must be a table of the method's options.")
    result = dict(old)
    for name, value in new.items():
        if isinstance(value, Mapping):
            before = result.get(name)
            inner = before if isinstance(before, Mapping) else {}
            for key, each in value.items():
                _check_scalar(f"{said}: {name}.{key}", each)
            result[name] = {**inner, **value}
        else:
            _check_scalar(f"{said}: {name}", value)
            result[name] = value
    return result


def _bare(config: Config) -> dict[str, Scalar]:
    return {name: value for name, value in config.options.items() if not isinstance(value, Mapping)}


def _tables(config: Config) -> dict[str, Mapping[str, Scalar]]:
    return {name: value for name, value in config.options.items() if isinstance(value, Mapping)}


def _check_scalar(said: str, value: Any) -> None:
    if not isinstance(value, bool | int | float | str):
        raise UserError(f"{said} is {toml.shown(value)}: it must be a number, text, true or false.")


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


def _check(c: Config) -> None:
    """Raise UserError for the first value out of its range and the first impossible combination."""
    least = {
        "image_size": 1, "shrink": 1, "clients": 1, "min_size": 0, "split_seed": 0, "cohort": 1, "rounds": 1,
        "seed": 0, "labeled_batch": 1, "unlabeled_batch": 1, "epochs": 1, "steps": 1, "width": 1, "threads": 1,
        "evaluate_every": 1, "checkpoint_every": 1, "momentum": 0, "weight_decay": 0,
    }  # fmt: skip
    for name, bound in least.items():
        value = getattr(c, name)
        if isinstance(value, int | float) and not (value >= bound and math.isfinite(value)):
            raise UserError(f"{name} is {toml.shown(value)}: it must be at least {bound}.")
    for name in ("gamma", "labels_per_class", "lr"):
        value = getattr(c, name)
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise UserError(f"{name} is {toml.shown(value)}: it must be a number above 0.")
    if c.label_ratio is not None and not 0 < c.label_ratio <= 1:
        raise UserError(f"label_ratio is {toml.shown(c.label_ratio)}: it must be above 0 and at most 1.")
    if not 0 <= c.confident <= 1:
        raise UserError(f"confident is {toml.shown(c.confident)}: it must be from 0 to 1.")
    if c.momentum >= 1:
        raise UserError(f"momentum is {toml.shown(c.momentum)}: it must be below 1.")
    _check_together(c)


def _check_together(c: Config) -> None:
    if c.labels_per_class is not None and c.label_ratio is not None:
        raise UserError("labels_per_class and label_ratio exclude each other: give one of them.")
    if c.split is None and c.cohort > c.clients:
        raise UserError(f"cohort is {c.cohort}, but clients is {c.clients}: it must be at most {c.clients}.")
    for name, size in (("labeled_batch", c.labeled_batch), ("unlabeled_batch", c.unlabeled_batch)):
        if size == 1 and (name == "labeled_batch" or c.statistics == "separate"):
            raise UserError(f"{name} is 1: a batch of one image has no variance to normalize by: use at least 2.")
    if c.unlabeled_batch == "rest" and c.epoch == "unlabeled":
        raise UserError(
            "epoch 'unlabeled' needs a number as unlabeled_batch: 'rest' is what one pass over the labeled "
            "images leaves to each step."
        )
    if c.steps is not None and (c.epochs != 1 or c.epoch != "auto"):
        other = "epochs" if c.epochs != 1 else "epoch"
        raise UserError(f"steps and {other} exclude each other: both say how long a client trains.")
    if c.momentum and c.optimizer != "sgd":
        raise UserError(f"momentum is {toml.shown(c.momentum)}, but {c.optimizer} has none: use optimizer 'sgd'.")
    methods = (c.method, *c.beside)
    twice = [name for name in methods if methods.count(name) > 1]
    if twice:
        raise UserError(f"method {twice[0]} is named twice in method and beside: name it once.")


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
