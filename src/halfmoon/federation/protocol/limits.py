"""The limits of a federation: of its terms, of a client update, of a message, and of a machine's memory and disk.

Authors of terms, requests and replies may be hostile. Sizes are computed from their words before anything is allocated.
"""

import math
import os
import shutil
from collections.abc import Iterable
from errno import ENOSPC
from pathlib import Path
from typing import Any

import torch

from halfmoon.api.types import ClientUpdate
from halfmoon.config.schema import Config, method_options
from halfmoon.core import hubs as names
from halfmoon.core import tree
from halfmoon.core.errors import UserError
from halfmoon.engine.sampling import Amount
from halfmoon.federation.protocol.log import format_bytes
from halfmoon.federation.protocol.tree_spec import TreeSpec
from halfmoon.models import Network, hubs
from halfmoon.runs.factory import ImageSpec, task
from halfmoon.storage import toml

MAX_TERMS_BYTES = 2**20  # bytes of terms at most

MAX_SITES = MAX_CLASSES = 2**15
MAX_TEXT_LENGTH = 100  # characters of a class name, and of an option that is a text, at most

MAX_RUN_OPTIONS = {
    "rounds": 10**6, "steps": 10**6, "epochs": 10**4, "server_epochs": 10**4, "labeled_batch": 10**5,
    "unlabeled_batch": 10**5, "server_batch": 10**5, "width": 10**4, "seed": 2**63 - 1,
}  # fmt: skip
"""Options of a run, and the most that terms may say of each."""

MAX_METHOD_OPTION = 10**6  # a method's own option that is a whole number is at most this

MAX_PARAMETERS = 2**28
"""Numbers of a network at most: 268 million, 1.1 GB. The largest one of the papers has 23 million."""

MAX_STEP_VALUES = 2**27  # values of a step's images at most (512 MiB): 890 images of 224x224 with 3 channels

MAX_UPDATE_IMAGES = 10**7
"""Images that a client update may train on in its steps. The batches of all steps are in memory at once."""

REPLY_OVERHEAD_BYTES = 2**20
"""Bytes that a reply may have beside its tensors and their places in the header: counts and samples."""

TENSOR_ENTRY_BYTES = 1024  # bytes that one tensor takes in a header at most, beside its name

UNKNOWN_TREES_BYTES, UNKNOWN_TREES_MODELS = 2**26, 16
"""Bytes of a message whose trees have unknown shapes, at most: so many, and as many times the model's."""

MIN_FREE_BYTES = 2**28
"""Bytes of a site's disk that stay free (a hundredth of a disk that is smaller than 25 GiB)."""


def check_terms(config: Config, form: ImageSpec, sites: int) -> None:
    """Raise UserError, with one sentence, for the first thing that no site should be asked for.

    All numbers are checked before anything is counted, and a network is counted without being made.
    """
    for name, count, most in (("sites", sites, MAX_SITES), ("classes", len(form.classes), MAX_CLASSES)):
        if count > most:
            raise UserError(f"{name} names {count:,} {name}: a federation has {most:,} at most.")
    for name in form.classes:
        if len(name) > MAX_TEXT_LENGTH or not name.isprintable():
            raise UserError(
                f"classes has {name[:MAX_TEXT_LENGTH]!r}: a class is named by up to {MAX_TEXT_LENGTH} letters, without breaks."
            )
    for name, most in MAX_RUN_OPTIONS.items():
        value = getattr(config, name)
        if isinstance(value, int) and value > most:
            raise UserError(f"{name} is {_digits(value)}: a federation has {most:,} at most.")
    options = method_options(config, config.method)
    for name, value in options.items():
        _check_option(name, value)
    for name in ("labeled_batch", "unlabeled_batch"):
        batch = getattr(config, name)
        if isinstance(batch, int) and batch * math.prod(form.image) > MAX_STEP_VALUES:
            raise UserError(_too_large(f"{name} is {batch:,}", form.image))
    # The regulator of FedDure is a network of its own.
    count = count_trained_and_frozen(config, form)[0] + (len(form.classes) + 2) * options.get("hidden", 0)
    if count > MAX_PARAMETERS:
        raise UserError(f"the network has {count:,} numbers, of {MAX_PARAMETERS:,} at most: choose a smaller width.")


def _check_option(name: str, value: Any) -> None:
    if isinstance(value, int) and abs(value) > MAX_METHOD_OPTION:
        raise UserError(f"the option {name} is {_digits(value)}: a federation has {MAX_METHOD_OPTION:,} at most.")
    if isinstance(value, float) and not math.isfinite(value):
        raise UserError(f"the option {name} is {toml.text(value)}: it must be a number.")
    if isinstance(value, str) and (len(value) > MAX_TEXT_LENGTH or not value.isprintable()):
        raise UserError(
            f"the option {name} is {value[:MAX_TEXT_LENGTH]!r}: it may have {MAX_TEXT_LENGTH} letters, without breaks."
        )


def _digits(value: int) -> str:
    return f"{value:,}" if value < 10**18 else "more than 10^18"


def count_parameters(network: Network) -> int:
    return tree.size(make_meta_model(network))


def count_trained_and_frozen(config: Config, form: ImageSpec) -> tuple[int, int]:
    """Return how many numbers of a network travel, and how many stay as its weights have them.

    A module of another package is counted whole: what is trained of it shows when it is made.
    """
    channels, height, width = form.image
    if names.package(config.network) and config.network not in names.PRETRAINED:
        return hubs.size(config.network, channels, len(form.classes), (height, width)), 0
    network = task(config, form).network
    trained = count_parameters(network)
    return trained, count_parameters(network.whole(make_meta_model(network))[0]) - trained


def make_meta_model(network: Network) -> tree.Tree:
    """Return a network's {"params", "stats"} as tensors that have a shape and take no memory."""
    with torch.device("meta"):
        return network.init(torch.Generator())


def find_update_fault(client_update: ClientUpdate, amount: Amount, image: tuple[int, int, int]) -> str | None:
    """Return why a client update is too much for any site, None where it is not."""
    views = max(1, len(client_update.needs.views) + len(client_update.needs.others))
    step = amount.labeled + views * amount.unlabeled
    if step * math.prod(image) > MAX_STEP_VALUES:
        return _too_large(f"a step is of {step:,} images", image)
    if amount.steps * step > MAX_UPDATE_IMAGES:
        return (
            f"a round is of {amount.steps:,} steps of {step:,} images: a site trains on {MAX_UPDATE_IMAGES:,} at most."
        )
    return None


def _too_large(subject: str, image: tuple[int, int, int]) -> str:
    channels, height, width = image
    most = MAX_STEP_VALUES // math.prod(image)
    return f"{subject} with {channels} channel(s) of {height}x{width} pixels: a step has {most:,} of these at most."


def max_message_bytes(specs: Iterable[TreeSpec]) -> int:
    """Return the most bytes of a message with trees of these shapes."""
    total = REPLY_OVERHEAD_BYTES
    for spec in specs:
        for path, kind in spec.items():
            # A name stands in the header twice, and JSON in JSON escapes a letter by up to twelve bytes.
            total += TENSOR_ENTRY_BYTES + 24 * len(path)
            if kind is not None:
                shape, dtype = kind
                total += math.prod(shape) * dtype.itemsize
    return total


def max_unknown_message_bytes(network: Network) -> int:
    return UNKNOWN_TREES_BYTES + UNKNOWN_TREES_MODELS * tree.nbytes(make_meta_model(network))


def evaluation_spec(classes: int) -> TreeSpec:
    test: TreeSpec = {"confusion": ((classes, classes), torch.int64), "loss": ((), torch.float64)}
    return {**test, **{f"validation/{name}": kind for name, kind in test.items()}}


def check_images_fit(folder: Path, count: int, image: tuple[int, int, int]) -> None:
    """Raise UserError where decoded images do not fit this machine's memory, OSError where not the disk of `folder`."""
    required = count * math.prod(image)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if required > memory:
        raise UserError(
            f"{count:,} images of {image[1]}x{image[2]} pixels with {image[0]} channel(s) take {format_bytes(required)}, but "
            f"this machine's memory has {format_bytes(memory)}."
        )
    check_free_disk(folder, required)


def check_free_disk(folder: Path, required: int) -> None:
    """Raise OSError, as a full disk does, where so many bytes more would leave too little of a folder's disk free."""
    disk = shutil.disk_usage(next(path for path in (folder, *folder.parents) if path.exists()))
    if disk.free - required < min(MIN_FREE_BYTES, disk.total // 100):
        raise OSError(ENOSPC, os.strerror(ENOSPC), str(folder))
