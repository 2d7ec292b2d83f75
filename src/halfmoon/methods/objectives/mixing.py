"""What MixMatch and ReMixMatch share: mixed images with mixed soft labels, and sharpened guesses."""

import torch
import torch.nn.functional as F
from torch import Tensor

from halfmoon.core.padding import share


def mixed(rows: Tensor, mix: Tensor, order: Tensor) -> Tensor:
    """Return l rows + (1 - l) rows[order] for rows (n, ...), a permutation (n,) and l = max(mix, 1 - mix), mix ().

    So each row stays closer to itself than to its partner (MixMatch, Eq. 9).
    """
    share = mix.maximum(1 - mix).to(rows.dtype)
    return share * rows + (1 - share) * rows[order]


def sharpened(p: Tensor, temperature: float) -> Tensor:
    """Return p^(1 / temperature), normalized, for probabilities p (n, classes) (MixMatch, Eq. 7)."""
    return (p.clamp_min(1e-30).log() / temperature).softmax(-1)


def one_hot(y: Tensor, classes: int, like: Tensor) -> Tensor:
    """Return labels y (n,) as distributions (n, classes) of the dtype of `like` (vmap refuses `F.one_hot`)."""
    return (y[:, None] == torch.arange(classes, device=y.device)).to(like.dtype)


def soft_cross_entropy(logits: Tensor, target: Tensor, real: Tensor | None = None) -> Tensor:
    """Return the mean cross-entropy of logits (n, classes) for distributions (n, classes); zero for no row.

    With a mask `real` (n,), the mean is over the real rows.
    """
    if real is not None:
        return share(real, logits) @ F.cross_entropy(logits, target, reduction="none")
    return F.cross_entropy(logits, target) if len(target) else logits.sum() * 0.0
