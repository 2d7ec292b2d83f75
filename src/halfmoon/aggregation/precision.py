"""Uploads in fewer bytes: a client rounds what it changed, and the server adds that to what it had sent.

float16 rounds to nearest. int8 is the stochastic rounding of QSGD (Alistarh, Grubic, Li, Tomioka and Vojnovic 2017,
Section 3.1), whose mean is the number itself; a tensor's largest change is its scale, as in their experiments.
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


def encoded(
    upload: Upload,
    broadcast: Tree,
    precision: Precision,
    upload_spec: UploadSpec,
    draws: Callable[[str], torch.Generator],
) -> Upload:
    """Return one client's upload as it travels: of each parameter its difference from `broadcast`, in `precision`.

    With float16 its dtype changes alone. With int8 it becomes {"levels": int8, "scale": ()}, by a generator that
    `draws` makes of its path. Running statistics, whole numbers, the weight and what goes beside an update stay exact.
    So does a part of the update that is one tensor: a distribution over classes must not fall below 0.
    """
    before = tree.flatten(broadcast)
    trees = {
        name: part
        for name, part in upload.update.items()
        if isinstance(part, dict) and name not in upload_spec.statistics
    }
    changes: dict[str, Any] = {}
    for path, leaf in tree.flatten(trees).items():
        if leaf.is_floating_point():
            change = leaf - before[path]
            changes[path] = change.half() if precision == "float16" else quantized(change, draws(path))
    return upload._replace(update=tree.replace_leaves(upload.update, changes))


def decoded(upload: Upload, broadcast: Tree, precision: Precision) -> Upload:
    """Return an upload with the rounded model of a client that was sent `broadcast`: undoes `encoded` but for the rounding.

    A difference that is not finite leaves a model that is not.
    """
    return upload if precision == "float32" else upload._replace(update=_restored(upload.update, broadcast))


def quantized(change: Tensor, generator: torch.Generator) -> Tree:
    """Return {"levels": int8 of the shape of `change`, "scale": ()}; levels times scale has the mean `change`.

    All zeros have the scale 0; where a number is not finite the scale is not either.
    """
    scale = change.abs().amax() / LEVELS if change.numel() else change.new_zeros(())
    steps = torch.where((scale > 0) & scale.isfinite(), change / scale, torch.zeros_like(change))
    low = steps.floor()
    upload = torch.rand(change.shape, generator=generator, dtype=change.dtype).to(change.device) < steps - low
    return {"levels": (low + upload).clamp(-LEVELS, LEVELS).to(torch.int8), "scale": scale}


def _restored(leaf: Any, before: Any) -> Any:
    if isinstance(before, dict) and isinstance(leaf, dict):
        return {name: _restored(part, before.get(name)) for name, part in leaf.items()}
    if isinstance(leaf, dict) and isinstance(before, Tensor) and leaf.keys() == {"levels", "scale"}:
        return before + leaf["scale"] * leaf["levels"].to(before.dtype)
    if isinstance(before, Tensor) and isinstance(leaf, Tensor) and leaf.dtype == torch.float16:
        return before + leaf.to(before.dtype)
    return leaf
