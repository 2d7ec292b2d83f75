"""Pretrained weights from a safetensors file of halfmoon or of a PyTorch state dict."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from halfmoon.core import hubs, tree, weight_files
from halfmoon.core.errors import UserError, one_line
from halfmoon.core.tree import Tree
from halfmoon.models.hubs import convert_names
from halfmoon.models.modules import ModuleNetwork, build_module
from halfmoon.models.network import Network


@dataclass(frozen=True)
class Weights:
    """The contents of a weights file: name, SHA-256, tensors, and the classes of its head."""

    name: str
    sha256: str
    classes: tuple[str, ...] | None = None  # only in files of halfmoon
    tensors: Mapping[str, Tensor] = field(default_factory=dict, compare=False, repr=False)


def read_weights_file(name: str) -> Weights:
    """Read a safetensors file of pretrained weights.

    Args:
        name: path of the file, or the hash under which its path was registered on this machine.

    Raises:
        UserError: if the file is missing or is no safetensors file of finite numbers.
    """
    path = weight_files.find(name)
    if path.suffix in (".pt", ".pth", ".bin", ".ckpt"):
        raise UserError(
            f"weights {path} is a pickle, which can run code when it is opened: save its tensors as safetensors "
            "(safetensors.torch.save_file(model.state_dict(), FILE))."
        )
    return _read_checked(path, sha256=weight_files.file_sha256(path))


@lru_cache(maxsize=4)
def _read_checked(path: Path, sha256: str) -> Weights:
    """Read the tensors and class names of a safetensors file, and check that all values are finite.

    Args:
        path: path of the file.
        sha256: its hash, so that the cache of this function notices a changed file.

    Raises:
        UserError: it is no safetensors file, or has values that are not finite.
    """
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            # Copy: mapped tensors would change with the file.
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 (it is no dict)
    except (OSError, SafetensorError) as error:
        raise UserError(f"weights {path}: it is no safetensors file ({one_line(error)[:160]}).") from error
    for name, value in tensors.items():
        if value.is_floating_point() and not value.isfinite().all():
            raise UserError(f"weights {path}: the tensor {name!r} holds values that are not finite.")
    # Files of halfmoon name the classes of their head; of other files they are unknown.
    try:
        classes = tuple(str(each) for each in json.loads(metadata["classes"]))
    except (KeyError, TypeError, ValueError):
        classes = None
    return Weights(path.name, sha256, classes, tensors)


def fit_weights_to_network(network: Network, weights: Weights, classes: tuple[str, ...]) -> tuple[Tree, bool]:
    """Convert pretrained weights to a network's tree {"params", "stats"}, and check that they fit.

    The head is omitted if the file has no head, one of another shape, or one for classes of other names.

    Args:
        network: the network.
        weights: the content of the weights file.
        classes: names of the classes of this run.

    Returns:
        The tree, and whether the head is omitted.

    Raises:
        UserError: if tensors are missing, unknown to the network, or of another shape.
    """
    expected = _model_shapes(network)
    tensors = _map_to_paths(network, weights)
    # A head of other classes, or of another number of them, cannot be used; the rest of the network can.
    head_paths = [path for path in expected if path.startswith("params/") and _is_head(network, path)]
    has_other_classes = weights.classes is not None and weights.classes != classes
    head_fits = all(path in tensors and tensors[path].shape == expected[path].shape for path in head_paths)
    omit_head = bool(head_paths) and (has_other_classes or not head_fits)
    if omit_head:
        expected = {path: leaf for path, leaf in expected.items() if not _is_head(network, path)}
        tensors = {path: leaf for path, leaf in tensors.items() if not _is_head(network, path)}
    _check_fit(weights, tensors, expected)
    flat = {path: tensors[path].float().contiguous() for path in expected}
    return {"params": {}, "stats": {}, **tree.unflatten(flat)}, omit_head


def _check_fit(weights: Weights, tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Raise UserError if `tensors` of a weights file are not exactly the `expected` ones, by path and shape."""
    for path in sorted(expected):
        if path not in tensors:
            example = f"it has {', '.join(sorted(tensors)[:3])} ..." if tensors else "it has none of its tensors"
            raise UserError(
                f"weights {weights.name} lack the tensor {_dotted(path)} of the network ({example}): give a file of this "
                "network."
            )
        _check_shape(weights, path, tensors[path].shape, expected[path].shape)
    unknown_paths = sorted(tensors.keys() - expected.keys())
    if unknown_paths:
        raise UserError(
            f"weights {weights.name} have a tensor {_dotted(unknown_paths[0])}, for which the network has no place: "
            "give a file of this network."
        )


def _is_head(network: Network, path: str) -> bool:
    """Check whether a path in a model {"params", "stats"} is of the network's head."""
    return is_head_path(network, path.removeprefix("params/"))


def is_head_path(network: Network, path: str) -> bool:
    """Check whether a path in the network's parameters is of its head, the last linear layer."""
    return network.head is not None and path.startswith(f"{network.head}/")


def _map_to_paths(network: Network, weights: Weights) -> dict[str, Tensor]:
    """Rename the tensors of a weights file to their paths in the network's tree.

    Files of halfmoon have these paths. Names of a PyTorch state dict are converted: "block.conv.weight" becomes
    "params/block/conv/weight". Tensors that the network does not store, such as buffers with constants, are left out.

    Args:
        network: the network.
        weights: the content of the file.

    Returns:
        The tensors by path, such as "params/block/conv/weight".
    """
    is_halfmoon_file = any(name.startswith("params/") for name in weights.tensors)
    if is_halfmoon_file:
        return dict(weights.tensors)
    tensors = dict(weights.tensors)
    if isinstance(network, ModuleNetwork):
        module = build_module(network)
        is_hub_model = bool(hubs.package_of(network.factory))  # timm, torchvision or transformers
        if is_hub_model:
            tensors = convert_names(network.name, module, tensors)
        constants = _constant_buffers(network, module)
        tensors = {name: value for name, value in tensors.items() if name not in constants}
    paths = {name: network.tree_path(name) for name in tensors}
    return {path: tensors[name] for name, path in paths.items() if path is not None}


def _constant_buffers(network: ModuleNetwork, module: torch.nn.Module) -> set[str]:
    """Find the buffers that are no running statistics, such as tables of positions, which the module itself computes."""
    stat_paths = {path for path in _model_shapes(network) if path.startswith("stats/")}
    return {name for name, _ in module.named_buffers() if network.tree_path(name) not in stat_paths}


def _model_shapes(network: Network) -> dict[str, Tensor]:
    """Return a network's tensors by path, such as "params/head/weight", without data: they have only shapes."""
    with torch.device("meta"):
        return tree.flatten(network.init(torch.Generator()))


def _check_shape(weights: Weights, path: str, actual: torch.Size, expected: torch.Size) -> None:
    """Check that a tensor of a weights file has the shape that the network expects.

    Args:
        weights: the content of the file, with its name for the error message.
        path: path of the tensor in the model.
        actual: its shape in the file.
        expected: its shape in the network.

    Raises:
        UserError: it has another shape. If only the image channels of a convolution differ, the message says so.
    """
    if actual == expected:
        return
    advice = "give a file of this network"
    are_convolutions = len(actual) == len(expected) == 4
    if are_convolutions and actual[1] != expected[1] and actual[0] == expected[0] and actual[2:] == expected[2:]:
        advice = f"they are for images of {actual[1]} channels, these have {expected[1]}: set channels to {actual[1]}"
    raise UserError(
        f"weights {weights.name}: the tensor {_dotted(path)} is {tuple(actual)}, but the network's is "
        f"{tuple(expected)}; {advice}."
    )


def _dotted(path: str) -> str:
    """Convert a path in the model, "params/block/conv/weight", to a name for messages, "block.conv.weight"."""
    return path.partition("/")[2].replace("/", ".")
