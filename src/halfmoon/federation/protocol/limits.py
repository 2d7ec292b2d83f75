"""The limits of a federation: of its terms, local updates and messages, and of a machine's memory and disk.

Terms, requests and replies may be hostile. Their sizes are computed from the announced shapes before anything is
allocated.
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
from halfmoon.core import toml, tree
from halfmoon.core.errors import UserError
from halfmoon.engine.sampling import Amount
from halfmoon.federation.protocol.log import format_bytes
from halfmoon.federation.protocol.tree_spec import TreeSpec
from halfmoon.models import Network, hubs
from halfmoon.runs.factory import ImageSpec, build_task

MAX_TERMS_BYTES = 2**20

MAX_SITES = 2**15
MAX_CLASSES = 2**15
MAX_TEXT_LENGTH = 100  # characters of a class name, and of a text option

MAX_RUN_OPTIONS = {
    "rounds": 10**6, "steps": 10**6, "epochs": 10**4, "server_epochs": 10**4, "labeled_batch": 10**5,
    "unlabeled_batch": 10**5, "server_batch": 10**5, "width": 10**4, "seed": 2**63 - 1,
}  # fmt: skip
"""The largest value that terms may give to each of these options."""

MAX_METHOD_OPTION = 10**6  # largest absolute value of an integer option of a method

MAX_PARAMETERS = 2**28
"""Parameters of a network: 268 million, 1.1 GB. The largest network of the papers has 23 million."""

MAX_STEP_VALUES = 2**27  # values of a step's images (512 MiB): 890 images of 224x224 pixels with 3 channels

MAX_UPDATE_IMAGES = 10**7
"""Images in the steps of one local update. The batch indices of all steps are in memory at once."""

REPLY_OVERHEAD_BYTES = 2**20
"""Bytes of a reply besides its tensors and their entries in the header: counts and samples."""

TENSOR_ENTRY_BYTES = 1024  # of one tensor in the header, besides its name

MAX_BYTES_PER_NAME_CHARACTER = 24
"""The header contains each path twice. The second is JSON within JSON, where escaping a character takes up to twelve
bytes."""

UNKNOWN_TREES_BYTES = 2**26
UNKNOWN_TREES_MODELS = 16
"""Limit of a message whose shapes are not known in advance: so many bytes plus so many times the model's bytes."""

MIN_FREE_BYTES = 2**28
"""Bytes of a site's disk that must remain free (a hundredth of the disk if it is smaller than 25 GiB)."""


def check_terms(config: Config, image_spec: ImageSpec, sites: int) -> None:
    """Check that terms do not demand more of a site than any federation needs.

    Terms are the configuration that a server sends and the sites agree to. The server may be hostile. So all option
    values are checked before anything is computed from them, and the network's parameters are counted without
    allocating the network.

    Args:
        config: the options of the terms.
        image_spec: the classes and the image size of the terms.
        sites: the number of sites.

    Raises:
        UserError: the first limit that is exceeded.
    """
    if sites > MAX_SITES:
        raise UserError(f"sites names {sites:,} sites: a federation has {MAX_SITES:,} at most.")
    class_count = len(image_spec.classes)
    if class_count > MAX_CLASSES:
        raise UserError(f"classes names {class_count:,} classes: a federation has {MAX_CLASSES:,} at most.")
    for name in image_spec.classes:
        if len(name) > MAX_TEXT_LENGTH or not name.isprintable():
            raise UserError(
                f"classes has {name[:MAX_TEXT_LENGTH]!r}: a class name must be printable and have up to "
                f"{MAX_TEXT_LENGTH} characters."
            )
    for name, limit in MAX_RUN_OPTIONS.items():
        value = getattr(config, name)
        if isinstance(value, int) and value > limit:
            raise UserError(f"{name} is {_format_integer(value)}: a federation has {limit:,} at most.")
    options = method_options(config, config.method)
    for name, value in options.items():
        _check_method_option(name, value)
    values_per_image = math.prod(image_spec.image)
    for name in ("labeled_batch", "unlabeled_batch"):
        batch_size = getattr(config, name)  # a number, or a rule such as "rest"
        if isinstance(batch_size, int) and batch_size * values_per_image > MAX_STEP_VALUES:
            raise UserError(_describe_large_step(f"{name} is {batch_size:,}", image_spec.image))
    network_parameters, _ = count_trained_and_frozen(config, image_spec)
    # The method FedDure trains a second network, the regulator, with one hidden layer. Each hidden unit has a weight
    # for each logit of the main network, a bias, and a weight of the output. Other methods have no option `hidden`.
    regulator_parameters = (class_count + 2) * options.get("hidden", 0)
    parameters = network_parameters + regulator_parameters
    if parameters > MAX_PARAMETERS:
        raise UserError(
            f"the network has {parameters:,} parameters; the limit is {MAX_PARAMETERS:,}: choose a smaller width."
        )


def _check_method_option(name: str, value: Any) -> None:
    """Check the value of an option of a method that a server has sent, before a site computes anything from it.

    A huge number could occupy a site's memory or processor for days, and a text is shown in a terminal.

    Raises:
        UserError: the value is too large, not finite, or a text that is long or cannot be printed.
    """
    if isinstance(value, int) and abs(value) > MAX_METHOD_OPTION:
        raise UserError(
            f"the option {name} is {_format_integer(value)}: a federation has {MAX_METHOD_OPTION:,} at most."
        )
    if isinstance(value, float) and not math.isfinite(value):
        raise UserError(f"the option {name} is {toml.format_text(value)}: it must be a finite number.")
    if isinstance(value, str) and (len(value) > MAX_TEXT_LENGTH or not value.isprintable()):
        raise UserError(
            f"the option {name} is {value[:MAX_TEXT_LENGTH]!r}: it must be printable and have up to "
            f"{MAX_TEXT_LENGTH} characters."
        )


def _format_integer(value: int) -> str:
    # Formatting an integer takes time quadratic in its digits, and terms may contain one with thousands.
    return f"{value:,}" if value < 10**18 else "more than 10^18"


def count_parameters(network: Network) -> int:
    """Count the numbers of a network's parameters and statistics."""
    return tree.numel(make_meta_model(network))


def count_trained_and_frozen(config: Config, image_spec: ImageSpec) -> tuple[int, int]:
    """Count a network's trained values, which are sent each round, and the values of its frozen pretrained weights.

    Values are parameters, and means and variances of batch normalization.

    The network is built without memory for its values, so that even a huge one can be counted.

    Args:
        config: the configuration, which names the network.
        image_spec: the size and the classes of the images.

    Returns:
        The number of trained and the number of frozen values.
    """
    channels, height, width = image_spec.image
    if names.package_of(config.network) and config.network not in names.PRETRAINED:
        # Which values of a network from another package are trained is known only once it is built: count all of them.
        return hubs.count_numbers(config.network, channels, len(image_spec.classes), (height, width)), 0
    network = build_task(config, image_spec).network
    trained = count_parameters(network)
    # The tensors without memory (device "meta") of the trained model; `full_model` adds those of the frozen layers.
    trained_model = make_meta_model(network)
    _, complete_model = network.full_model(trained_model)
    return trained, tree.numel(complete_model) - trained


def make_meta_model(network: Network) -> tree.Tree:
    """Make a network's {"params", "stats"} on PyTorch's meta device: tensors with a shape that occupy no memory."""
    with torch.device("meta"):
        return network.init(torch.Generator())


def find_update_fault(client_update: ClientUpdate, amount: Amount, image: tuple[int, int, int]) -> str | None:
    """Check that one local update is not too large for a site: the images of a step, and those of all steps.

    Args:
        client_update: the local update. Its requirements name the augmented views of unlabeled images that a step
            needs, and in `second_batch` the views of a second minibatch of the same size, if it draws one.
        amount: its steps, and labeled and unlabeled images a step.
        image: channels, height and width.

    Returns:
        The limit that is exceeded, as a sentence; None if there is none.
    """
    # Each view is a tensor of `amount.unlabeled` images, whichever minibatch it is of. An update without views counts
    # as one view: it may load the unlabeled images as they are.
    requirements = client_update.requirements
    view_count = max(1, len(requirements.views) + len(requirements.second_batch))
    step_images = amount.labeled + view_count * amount.unlabeled
    if step_images * math.prod(image) > MAX_STEP_VALUES:
        return _describe_large_step(f"a step has {step_images:,} images", image)
    if amount.steps * step_images > MAX_UPDATE_IMAGES:
        return (
            f"a round has {amount.steps:,} steps of {step_images:,} images: a site trains on {MAX_UPDATE_IMAGES:,} at "
            "most."
        )
    return None


def _describe_large_step(subject: str, image: tuple[int, int, int]) -> str:
    channels, height, width = image
    limit = MAX_STEP_VALUES // math.prod(image)
    return f"{subject} with {channels} channel(s) of {height}x{width} pixels: a step has {limit:,} of these at most."


def max_message_bytes(specs: Iterable[TreeSpec]) -> int:
    """Compute the largest size of a message with tensors of known names, shapes and dtypes.

    Args:
        specs: for each tree of tensors (shape, dtype) by path; None for an empty branch.
    """
    total = REPLY_OVERHEAD_BYTES
    for spec in specs:
        for path, leaf_spec in spec.items():
            # The header has an entry with the tensor's name, shape and type, and the layout has the name once more.
            total += TENSOR_ENTRY_BYTES + MAX_BYTES_PER_NAME_CHARACTER * len(path)
            if leaf_spec is not None:
                shape, dtype = leaf_spec
                total += math.prod(shape) * dtype.itemsize
    return total


def max_unknown_message_bytes(network: Network) -> int:
    """Compute the largest size of a message whose shapes are not known in advance."""
    return UNKNOWN_TREES_BYTES + UNKNOWN_TREES_MODELS * tree.nbytes(make_meta_model(network))


def evaluation_spec(classes: int) -> TreeSpec:
    """Make the spec of a reply's evaluation: confusion matrix and loss, on test and on validation images."""
    test: TreeSpec = {"confusion": ((classes, classes), torch.int64), "loss": ((), torch.float64)}
    validation = {f"validation/{name}": leaf_spec for name, leaf_spec in test.items()}
    return {**test, **validation}


def check_images_fit(folder: Path, count: int, image: tuple[int, int, int]) -> None:
    """Check that images, once decoded, fit into this machine's memory and on its disk, before hours are spent on that.

    Args:
        folder: where they will be stored.
        count: the number of images.
        image: channels, height and width; each value is one byte.

    Raises:
        UserError: they do not fit into memory.
        OSError: they do not fit on the disk.
    """
    required_bytes = count * math.prod(image)
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if required_bytes > memory_bytes:
        channels, height, width = image
        raise UserError(
            f"{count:,} images of {height}x{width} pixels with {channels} channel(s) need "
            f"{format_bytes(required_bytes)}, but this machine's memory has {format_bytes(memory_bytes)}."
        )
    check_free_disk(folder, required_bytes)


def check_free_disk(folder: Path, required_bytes: int) -> None:
    """Raise OSError, as a full disk does, if writing `required_bytes` would leave too little free space."""
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    disk = shutil.disk_usage(existing)
    min_free_bytes = min(MIN_FREE_BYTES, disk.total // 100)
    if disk.free - required_bytes < min_free_bytes:
        raise OSError(ENOSPC, os.strerror(ENOSPC), str(folder))
