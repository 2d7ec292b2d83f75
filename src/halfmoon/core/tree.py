"""Trees: nested dicts whose leaves are tensors, such as parameters, uploads and client memories."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast, overload

import torch
from torch import Tensor

Tree = dict[str, Any]
"""A nested dict with `str` keys and `Tensor` leaves."""


@overload
def map(function: Callable[[Tensor], Tensor], tree: Tree, /) -> Tree: ...
@overload
def map(function: Callable[[Tensor, Tensor], Tensor], tree: Tree, second: Tree, /) -> Tree: ...
@overload
def map(function: Callable[[Tensor, Tensor, Tensor], Tensor], tree: Tree, second: Tree, third: Tree, /) -> Tree: ...
@overload
def map(function: Callable[..., Tensor], tree: Tree, /, *others: Tree) -> Tree: ...
def map(function: Callable[..., Tensor], tree: Tree, /, *others: Tree) -> Tree:
    """Apply `function` to corresponding leaves of trees with the same keys, and return the tree of its results."""
    # One and two trees have code without argument lists, because every step of every client calls this several times.
    if not others:
        return {
            key: map(function, value) if isinstance(value, dict) else function(value)  # pyright: ignore[reportUnknownArgumentType]
            for key, value in tree.items()
        }
    if len(others) == 1:
        second = others[0]
        return {
            key: map(function, value, second[key]) if isinstance(value, dict) else function(value, second[key])  # pyright: ignore[reportUnknownArgumentType]
            for key, value in tree.items()
        }
    result: Tree = {}
    for key, value in tree.items():
        other_values = [other[key] for other in others]
        if isinstance(value, dict):
            result[key] = map(function, value, *other_values)  # pyright: ignore[reportUnknownArgumentType]
        else:
            result[key] = function(value, *other_values)
    return result


def leaves(tree: Tree) -> Iterator[Tensor]:
    """Yield the leaves in the order of the keys' insertion."""
    collected: list[Tensor] = []
    _append_leaves(tree, collected)
    return iter(collected)


def _append_leaves(tree: Tree, leaves: list[Tensor]) -> None:
    """Append the leaves of a tree to a list, which is faster than a generator for each branch."""
    for value in tree.values():
        if isinstance(value, dict):
            _append_leaves(value, leaves)  # pyright: ignore[reportUnknownArgumentType]
        else:
            leaves.append(value)


def leaves_like(template: Tree, tree: Tree) -> Iterator[Tensor]:
    """Yield the leaves of a tree in the order of those of `template`, which has the same keys."""
    for key, value in template.items():
        if isinstance(value, dict):
            yield from leaves_like(value, tree[key])  # pyright: ignore[reportUnknownArgumentType]
        else:
            yield tree[key]


def flatten(tree: Tree, prefix: str = "") -> dict[str, Tensor]:
    """Turn a tree into a flat dict, {"a/b/c": leaf}. Empty branches are lost."""
    flat: dict[str, Tensor] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            flat.update(flatten(value, f"{prefix}{key}/"))  # pyright: ignore[reportUnknownArgumentType]
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def unflatten(flat: dict[str, Tensor]) -> Tree:
    """Turn a flat dict {"a/b/c": leaf} into a tree."""
    tree: Tree = {}
    for path, leaf in flat.items():
        *parents, name = path.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = leaf
    return tree


def replace_leaves(tree: Tree, new: Mapping[str, Any], prefix: str = "") -> Tree:
    """Replace the leaves whose paths are in `new`; empty branches remain.

    Args:
        tree: the tree, which is not changed.
        new: leaves by path ("a/b/c").
        prefix: the path of `tree` itself, with a slash at its end.
    """
    result: Tree = {}
    for key, value in tree.items():
        path = f"{prefix}{key}"
        if isinstance(value, dict):
            result[key] = replace_leaves(cast(Tree, value), new, f"{path}/")
        else:
            result[key] = new.get(path, value)
    return result


def merge(first: Tree, second: Tree) -> Tree:
    """Merge two trees. A leaf that both have is taken from the second."""
    result: Tree = dict(first)
    for key, value in second.items():
        previous = result.get(key)
        if isinstance(previous, dict) and isinstance(value, dict):
            result[key] = merge(previous, value)  # pyright: ignore[reportUnknownArgumentType]
        else:
            result[key] = value
    return result


def stack(trees: Sequence[Tree]) -> Tree:
    """Stack K trees of equal shapes: every leaf gets a leading dimension K."""
    return map(lambda *copies: torch.stack(copies), trees[0], *trees[1:])


def index(tree: Tree, position: int) -> Tree:
    """Select one of K stacked trees."""
    return map(lambda leaf: leaf[position], tree)


def zeros_like(tree: Tree) -> Tree:
    """Make a tree of zeros of the same shapes."""
    return map(torch.zeros_like, tree)


def select(condition: Tensor, new: Tree, old: Tree) -> Tree:
    """Choose `new` if a condition () bool is True, otherwise `old`, without a branch, as vmap requires."""
    return map(lambda a, b: torch.where(condition, a, b), new, old)


class RunningMean:
    """Weighted mean of a stream of trees, with only the mean and the added tree in memory.

    Like every floating-point sum it depends on the order of the trees. Integer leaves are those of the first tree.
    """

    def __init__(self) -> None:
        self.mean: Tree = {}
        self.weight = 0.0

    def add(self, tree: Tree, weight: float) -> None:
        """Update the running weighted mean with another tree (nested dict of tensors), whose tensors are copied.

        A tree of weight 0 does not change the mean, except that the mean is the first tree until a weight is positive.
        """
        if not self.mean:
            self.mean = map(torch.clone, tree)
        elif weight and not self.weight:  # all earlier weights are 0
            map(Tensor.copy_, self.mean, tree)
        elif weight:
            # mean += (tree - mean) * weight / total weight; integers, such as counters, keep their first value.
            share = weight / (self.weight + weight)
            map(lambda old, new: old.lerp_(new, share) if old.is_floating_point() else old, self.mean, tree)
        self.weight += weight


def weighted_mean(tree: Tree, weights: Tensor) -> Tree:
    """Average stacked trees (leaves (K, ...)) with weights (K,), in the order 0 to K - 1 (`RunningMean`)."""
    mean = RunningMean()
    for position, weight in enumerate(cast("list[float]", weights.double().tolist())):  # pyright: ignore[reportUnknownMemberType]
        mean.add(index(tree, position), weight)
    return mean.mean


def moving_average(average: Tree, model: Tree, round: int, keep: float) -> Tree:
    """Update a moving average of models over rounds: keep * average + (1 - keep) * model.

    `keep` is limited to round / (round + 1), so that the first models have equal weights and the initial average has
    none. All leaves are averaged alike, the running means and variances of batch normalization too.

    Args:
        average: the average before this round.
        model: the model after this round.
        round: number of the round, from 0.
        keep: share that the average retains.
    """
    new_share = 1 - min(keep, round / (round + 1))
    if new_share >= 1:
        return model  # in round 0, also if the average has values that are not finite
    return map(lambda old, new: old + new_share * (new - old), average, model)


def squared_norm(tree: Tree) -> Tensor:
    """Compute the squared Euclidean norm () of all leaves together."""
    return sum_scalars(leaf.square().sum() for leaf in leaves(tree))


def sum_scalars(terms: Iterator[Tensor]) -> Tensor:
    """Add scalars in order."""
    total = next(terms)
    for term in terms:
        total = total + term
    return total


def channels_last(tree: Tree) -> Tree:
    """Store 4-dimensional leaves in channels-last order, in which a CPU convolves a third faster."""
    return map(lambda leaf: leaf.contiguous(memory_format=torch.channels_last) if leaf.dim() == 4 else leaf, tree)


def contiguous(tree: Tree) -> Tree:
    """Store all leaves in the standard order."""
    return map(lambda leaf: leaf.contiguous(), tree)


def numel(tree: Tree) -> int:
    """Count the numbers in all leaves."""
    return sum(leaf.numel() for leaf in leaves(tree))


def nbytes(tree: Tree) -> int:
    """Count the bytes of all leaves, as they are sent."""
    return sum(leaf.numel() * leaf.element_size() for leaf in leaves(tree))


def to(tree: Tree, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Tree:
    """Move all leaves to a device, and floating-point ones to a dtype."""
    return map(lambda leaf: leaf.to(device=device, dtype=dtype if leaf.is_floating_point() else None), tree)
