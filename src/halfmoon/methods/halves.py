"""Parameters in two halves, theta = sigma + psi, and what of them travels: what FedMatch computes with."""

from typing import cast

import torch
from torch import Tensor

from halfmoon.core import tree
from halfmoon.core.tree import Tree


def composed(sigma: Tree, psi: Tree) -> Tree:
    """Return theta: sigma + psi, where there is a psi."""
    theta: Tree = {}
    for name, part in sigma.items():
        if isinstance(part, dict):
            part = composed(cast(Tree, part), psi.get(name, {}))
        theta[name] = part + psi[name] if name in psi and not isinstance(part, dict) else part
    return theta


def cut(psi: Tree, threshold: float) -> Tree:
    """Return psi without its entries up to `threshold`."""
    return tree.map(lambda leaf: torch.where(leaf.abs() <= threshold, 0.0, leaf), psi)


def patched(old: Tree, new: Tree, threshold: float) -> Tree:
    """Return `old` with the entries of `new` that are further away than `threshold`, or that are no numbers."""
    return tree.map(lambda a, b: torch.where((b - a).abs() <= threshold, a, b), old, new)


def changes(old: Tree, new: Tree, threshold: float) -> Tensor:
    """Return how many entries `patched` takes over, as float64."""
    pairs = zip(tree.leaves(old), tree.leaves(new), strict=True)
    return tree.sum_of((~((b - a).abs() <= threshold)).sum().double() for a, b in pairs)


def apart(params: Tree) -> tuple[Tree, Tree]:
    """Return the kernels of all layers but the head, and the rest: biases, normalizations and the head."""
    flat = tree.flatten(params)
    kernel = {path for path, leaf in flat.items() if leaf.dim() > 1 and not path.startswith("head/")}
    parts = ({path: leaf for path, leaf in flat.items() if (path in kernel) is own} for own in (True, False))
    return tree.unflatten(next(parts)), tree.unflatten(next(parts))


def merge(rest: Tree, kernel: Tree) -> Tree:
    """Return what `apart` has taken apart."""
    return tree.unflatten({**tree.flatten(rest), **tree.flatten(kernel)})
