"""The cross-entropy of labels, written out where `torch.func.vmap` would walk through Python for it."""

from typing import Literal

import torch.nn.functional as F
from torch import Tensor

from halfmoon.core.autodiff import inside


def cross_entropy(logits: Tensor, labels: Tensor, reduction: Literal["mean", "none"] = "mean") -> Tensor:
    """Return `torch.nn.functional.cross_entropy` of logits (n, classes) and labels (n,): scalar, or (n,) for "none".

    Under vmap PyTorch takes it apart in Python, at every step, and imports SymPy for that; so there it is a gather.
    """
    if not inside():
        return F.cross_entropy(logits, labels, reduction=reduction)
    each = -logits.log_softmax(-1).gather(-1, labels[:, None])[:, 0]
    return each.mean() if reduction == "mean" else each
