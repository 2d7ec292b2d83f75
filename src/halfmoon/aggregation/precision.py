"""Compress uploads: a client rounds the change of its parameters, and the server adds it to the values it had sent.

float16 rounds to nearest. int8 uses the stochastic rounding of QSGD (Alistarh, Grubic, Li, Tomioka and Vojnovic 2017,
Section 3.1), which is unbiased; as in their experiments, a tensor's largest change is its scale.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from halfmoon.api.uploads import Precision, Upload, UploadSpec
from halfmoon.core import tree
from halfmoon.core.tree import Tree

LEVELS = 127
"""Steps from 0 to the largest change of a tensor: whole numbers from -127 to 127."""


def compress_upload(
    upload: Upload,
    broadcast: Tree,
    precision: Precision,
    upload_spec: UploadSpec,
    draws: Callable[[str], torch.Generator],
) -> Upload:
    """Compress one client's upload: replace each parameter by its change since the download, in low precision.

    Running statistics, integers, the weight and auxiliary values remain exact. An update entry that is a single tensor
    remains exact too: it may be a class distribution, which must not become negative.

    Args:
        upload: One client's upload.
        broadcast: The values that the client downloaded.
        precision: "float16" changes the dtype only; "int8" replaces a leaf by {"levels": int8 (...), "scale": ()}.
        upload_spec: The declaration of the upload, with the names of its running statistics.
        draws: Makes the random generator for the leaf at a path; for int8 only.

    Returns:
        The compressed upload.
    """
    downloaded = tree.flatten(broadcast)
    parameter_trees: Tree = {}
    for name, branch in upload.update.items():
        if isinstance(branch, dict) and name not in upload_spec.statistics:
            parameter_trees[name] = branch
    changes: dict[str, Any] = {}
    for path, leaf in tree.flatten(parameter_trees).items():
        if leaf.is_floating_point():
            change = leaf - downloaded[path]
            changes[path] = change.half() if precision == "float16" else quantize(change, draws(path))
    return upload._replace(update=tree.replace_leaves(upload.update, changes))


def decompress_upload(upload: Upload, broadcast: Tree, precision: Precision) -> Upload:
    """Decompress an upload: invert `compress_upload`, except for the rounding error.

    A difference that is not finite results in a model that is not finite.

    Args:
        upload: The compressed upload of one client.
        broadcast: The values that this client downloaded.
        precision: The precision of the upload; "float32" means uncompressed.

    Returns:
        The upload with the client's model.
    """
    if precision == "float32":
        return upload
    return upload._replace(update=_add_to_broadcast(upload.update, broadcast))


def quantize(change: Tensor, generator: torch.Generator) -> Tree:
    """Quantize a tensor to int8 by stochastic rounding, which is unbiased (QSGD, Alistarh et al. 2017).

    Args:
        change: The tensor (...).
        generator: Draws the random numbers that round up or down.

    Returns:
        {"levels": int8 (...), "scale": ()}: the expectation of levels times scale is `change` (...). For all zeros the
        scale is 0; for values that are not finite it is not finite.
    """
    scale = change.abs().amax() / LEVELS if change.numel() else change.new_zeros(())
    # Avoid 0 / 0 and infinity / infinity, which cannot be converted to int8.
    steps = torch.where((scale > 0) & scale.isfinite(), change / scale, torch.zeros_like(change))
    low = steps.floor()
    # Drawn on the CPU, so that the numbers are the same on every device.
    uniform = torch.rand(change.shape, generator=generator, dtype=change.dtype).to(change.device)
    round_up = uniform < steps - low
    return {"levels": (low + round_up).clamp(-LEVELS, LEVELS).to(torch.int8), "scale": scale}


def _add_to_broadcast(leaf: Any, downloaded: Any) -> Any:
    """Add compressed differences to the downloaded values, recursively; return uncompressed leaves unchanged.

    Args:
        leaf: A tree of an upload, or one of its leaves: float16, {"levels", "scale"}, or an uncompressed tensor.
        downloaded: The values at the same path that the client downloaded.
    """
    if isinstance(downloaded, dict) and isinstance(leaf, dict):
        return {name: _add_to_broadcast(child, downloaded.get(name)) for name, child in leaf.items()}
    if isinstance(leaf, dict) and isinstance(downloaded, Tensor) and leaf.keys() == {"levels", "scale"}:
        return downloaded + leaf["scale"] * leaf["levels"].to(downloaded.dtype)
    if isinstance(downloaded, Tensor) and isinstance(leaf, Tensor) and leaf.dtype == torch.float16:
        return downloaded + leaf.to(downloaded.dtype)
    return leaf
