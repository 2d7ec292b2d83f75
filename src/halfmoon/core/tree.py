"""Trees: nested dicts whose leaves are tensors. Everything that is stored, sent or lifted is one."""

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
    """Apply `function` to the leaves of trees of one shape."""
    # One and two trees are spelled out: every step of every client comes through here several times.
    if not others:
        return {
            key: map(function, one) if isinstance(one, dict) else function(one)  # pyright: ignore[reportUnknownArgumentType]
            for key, one in tree.items()
        }
    if len(others) == 1:
        two = others[0]
        return {
            key: map(function, one, two[key]) if isinstance(one, dict) else function(one, two[key])  # pyright: ignore[reportUnknownArgumentType]
            for key, one in tree.items()
        }
    return {
        key: map(function, one, *[other[key] for other in others])  # pyright: ignore[reportUnknownArgumentType]
        if isinstance(one, dict)
        else function(one, *[other[key] for other in others])
        for key, one in tree.items()
    }


def leaves(tree: Tree) -> Iterator[Tensor]:
    """Yield the leaves in the order of the keys' insertion."""
    for value in tree.values():
        if isinstance(value, dict):
            yield from leaves(value)  # pyright: ignore[reportUnknownArgumentType]
        else:
            yield value


def leaves_like(like: Tree, tree: Tree) -> Iterator[Tensor]:
    """Yield the leaves of a tree in the order of those of `like`, which has the same keys."""
    for key, value in like.items():
        if isinstance(value, dict):
            yield from leaves_like(value, tree[key])  # pyright: ignore[reportUnknownArgumentType]
        else:
            yield tree[key]


def flatten(tree: Tree, prefix: str = "") -> dict[str, Tensor]:
    """Return `{"a/b/c": leaf}`; an empty dict in the tree leaves no trace."""
    flat: dict[str, Tensor] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            flat.update(flatten(value, f"{prefix}{key}/"))  # pyright: ignore[reportUnknownArgumentType]
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def unflatten(flat: dict[str, Tensor]) -> Tree:
    """Undo `flatten`."""
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
    """Return a tree with the leaves of both; a leaf that both have is the second's."""
    result: Tree = dict(first)
    for key, value in second.items():
        mine = result.get(key)
        result[key] = merge(mine, value) if isinstance(mine, dict) and isinstance(value, dict) else value  # pyright: ignore[reportUnknownArgumentType]
    return result


def stack(trees: Sequence[Tree]) -> Tree:
    """Stack K trees of one shape: every leaf gets a leading dimension K."""
    return map(lambda *each: torch.stack(each), trees[0], *trees[1:])


def index(tree: Tree, position: int) -> Tree:
    return map(lambda leaf: leaf[position], tree)


def zeros_like(tree: Tree) -> Tree:
    return map(torch.zeros_like, tree)


def select(condition: Tensor, new: Tree, old: Tree) -> Tree:
    return map(lambda a, b: torch.where(condition, a, b), new, old)


class RunningMean:
    """The weighted mean of trees that come one after the other; in memory are the mean and the tree that is added.

    It depends on the order of the trees, as every sum of floating-point numbers does, and on nothing else. Leaves of
    whole numbers stay those of the first tree.
    """

    def __init__(self) -> None:
        self.mean: Tree = {}
        self.weight = 0.0

    def add(self, tree: Tree, weight: float) -> None:
        """Take in a tree, which is not kept; one that weighs 0 changes nothing."""
        if not self.mean:
            self.mean = map(torch.clone, tree)
        elif weight and not self.weight:  # none before weighed anything
            map(Tensor.copy_, self.mean, tree)
        elif weight:
            share = weight / (self.weight + weight)
            map(lambda old, new: old.lerp_(new, share) if old.is_floating_point() else old, self.mean, tree)
        self.weight += weight


def weighted_mean(tree: Tree, weights: Tensor) -> Tree:
    """Average stacked trees (leaves (K, ...)) with `weights` (K,), in the order 0..K-1 (`RunningMean`)."""
    mean = RunningMean()
    for position, weight in enumerate(cast("list[float]", weights.double().tolist())):  # pyright: ignore[reportUnknownMemberType]
        mean.add(index(tree, position), weight)
    return mean.mean


def moving_average(average: Tree, model: Tree, round: int, keep: float) -> Tree:
    """Return the average of a run's models after `model` of `round` (from 0): keep average + (1 - keep) model.

    `keep` is at most round / (round + 1), so that the first models count alike and what was there before them not at
    all. Tracked statistics are averaged with the same weights as the parameters that they belong to.
    """
    new = 1 - min(keep, round / (round + 1))
    return map(lambda old, now: old + new * (now - old), average, model) if new < 1 else model


def squared_norm(tree: Tree) -> Tensor:
    return sum_scalars(leaf.square().sum() for leaf in leaves(tree))


def sum_scalars(terms: Iterator[Tensor]) -> Tensor:
    """Add scalars in order."""
    total = next(terms)
    for term in terms:
        total = total + term
    return total


def channels_last(tree: Tree) -> Tree:
    """Lay out the 4-dimensional leaves channels-last: a CPU convolves a third faster."""
    return map(lambda leaf: leaf.contiguous(memory_format=torch.channels_last) if leaf.dim() == 4 else leaf, tree)


def contiguous(tree: Tree) -> Tree:
    return map(lambda leaf: leaf.contiguous(), tree)


def numel(tree: Tree) -> int:
    return sum(leaf.numel() for leaf in leaves(tree))


def nbytes(tree: Tree) -> int:
    """Return the number of bytes the leaves take on the wire."""
    return sum(leaf.numel() * leaf.element_size() for leaf in leaves(tree))


def to(tree: Tree, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Tree:
    return map(lambda leaf: leaf.to(device=device, dtype=dtype if leaf.is_floating_point() else None), tree)
