"""Some of a cohort's uploads, by their places, in place of others."""

import torch
from torch import Tensor

from halfmoon.api.uploads import Upload
from halfmoon.core import tree


def along(values: Tensor, leaf: Tensor) -> Tensor:
    """Return (k,) in a shape that meets a leaf (k, ...), on its device; numbers in its dtype."""
    there = values.to(leaf.device) if values.dtype == torch.bool else values.to(leaf)
    return there.reshape(-1, *[1] * (leaf.dim() - 1))


def mixed(mask: Tensor, new: Upload, old: Upload) -> Upload:
    """Return the uploads `new` at the places where `mask` (k,) holds, and `old`, bit by bit, at the others."""

    def one(a: Tensor, b: Tensor) -> Tensor:
        return b if a is b else torch.where(along(mask, b), a, b)

    return Upload.of(tree.map(one, new.tree, old.tree))
