"""The client half of client-level differential privacy: no client's update is longer than a bound.

McMahan, Ramage, Talwar and Zhang 2018 (Learning Differentially Private Recurrent Language Models), Section 2: all that
a client changes is one vector, and where its Euclidean norm is over the bound, it is scaled down to it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from halfmoon.api.uploads import Uplink, Upload
from halfmoon.core import tree
from halfmoon.core.tree import Tree


@dataclass(frozen=True)
class Clip:
    """Clips an upload, so that all that one client update changes has at most the norm `norm`."""

    norm: float

    def __call__(self, up: Upload, down: Tree, uplink: Uplink) -> Upload:
        return clipped(up, down, self.norm)


def clipped(up: Upload, down: Tree, norm: float) -> Upload:
    """Return one client's upload with its update at most `norm` long: all its floating leaves together.

    The norm is that of the numbers that are sent, after they are rounded to their type. An update within the bound
    stays as it is, bit by bit; so does what is no update.
    """
    before = tree.flatten(down)
    moved = {path: (leaf, before[path]) for path, leaf in tree.flatten(up.update).items() if leaf.is_floating_point()}
    if not moved:
        return up
    length = _length([new.double() - old.double() for new, old in moved.values()])
    # Rounding old + update to the leaves' type may lengthen an update by half an eps of what is rounded.
    eps = max(torch.finfo(new.dtype).eps for new, _ in moved.values())
    room = 2 * eps * (_length([old.double() for _, old in moved.values()]) + norm)
    fits = length <= norm
    scale = (norm - room).clamp_min(0) / torch.where(fits, torch.ones_like(length), length)

    def shorter(new: Tensor, old: Tensor) -> Tensor:
        start = old.double()
        return torch.where(fits, new, (start + scale * (new.double() - start)).to(new.dtype))

    return up._replace(update=tree.replaced(up.update, {path: shorter(new, old) for path, (new, old) in moved.items()}))


def _length(leaves: list[Tensor]) -> Tensor:
    """Return the Euclidean norm of leaves taken together, in the order of their elements whatever their layout."""
    return torch.stack([leaf.reshape(-1).square().sum() for leaf in leaves]).sum().sqrt()
