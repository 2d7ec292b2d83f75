"""Networks that start from given weights, with a part of the parameters frozen.

`FineTunedNetwork` wraps any network. Methods, messages, optimizers and averages see only the trained parameters; the
frozen ones, with the statistics of their batch normalizations, are added inside each pass. `FeatureHead` is a linear
head on features that a frozen backbone has computed once.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import jvp

from halfmoon.core import tree
from halfmoon.core.errors import UserError, suggest
from halfmoon.core.tree import Tree
from halfmoon.models.efficientnet import centered
from halfmoon.models.network import Network, Normalize, forward_tangent
from halfmoon.models.weights import Weights, fit_to_network, is_head_path

BACKBONE = "backbone"
"""The pattern that means every layer but the head."""


@dataclass(frozen=True)
class FineTunedNetwork(Network):
    """`inner` from the weights whose SHA-256 is `sha256`, without training the parts that `patterns` name.

    `norm` is "batch" where statistics are tracked in the trained part. `fresh` says that the head starts at random.
    """

    inner: Network = field(kw_only=True)
    sha256: str = field(kw_only=True)
    patterns: tuple[str, ...] = field(kw_only=True)
    fresh: bool = field(kw_only=True)
    start: Tree = field(
        kw_only=True, compare=False, repr=False
    )  # the trained part of the weights, without a fresh head
    frozen: Tree = field(kw_only=True, compare=False, repr=False)
    sliceable: ClassVar[bool] = False
    _moved: dict[Any, Tree] = field(default_factory=dict, kw_only=True, compare=False, repr=False)

    @property
    def head(self) -> str | None:
        return self.inner.head

    def init(self, generator: torch.Generator) -> Tree:
        random = tree.flatten(self.inner.init(generator))
        weights, frozen = tree.flatten(self.start), tree.flatten(self.frozen)
        shapes = torch.get_default_device().type == "meta"
        start = {
            path: weights[path].clone() if path in weights and not shapes else leaf
            for path, leaf in random.items()
            if path not in frozen
        }
        return {"params": {}, "stats": {}, **tree.unflatten(start)}

    def full_model(self, model: Tree) -> tuple[Network, Tree]:
        like = next(tree.leaves(model["params"]))
        return self.inner.in_float32, tree.merge(self._frozen_at(like), model)

    @property
    def in_float32(self) -> Network:
        return self if self.precision == "float32" else replace(self, precision="float32", inner=self.inner.in_float32)

    def _frozen_at(self, like: Tensor) -> Tree:
        place = like.device, like.dtype
        if place not in self._moved:
            self._moved[place] = tree.to(self.frozen, *place)
        return self._moved[place]

    def _with_frozen(self, params: Tree) -> tuple[Tree, Tree]:
        frozen = self._frozen_at(next(tree.leaves(params)))
        return tree.merge(frozen["params"], params), frozen["stats"]

    def zero_moments(self, params: Tree) -> Tree:
        moments = tree.flatten(self.inner.zero_moments(self._with_frozen(params)[0]))
        frozen = tree.flatten(self.frozen["stats"])
        return tree.unflatten({path: leaf for path, leaf in moments.items() if path not in frozen})

    def count_products(self, shape: tuple[int, int, int]) -> int | None:
        return self.inner.count_products(shape)

    def check(self, shape: tuple[int, int, int]) -> None:
        self.inner.check(shape)

    def train(
        self, params: Tree, x: Tensor, settled: Tree | None = None, real: Tensor | None = None
    ) -> tuple[Tensor, Tree]:
        whole, stats = self._with_frozen(params)
        return self.inner.train(whole, x, tree.merge(stats, settled or {}), real)

    def embed(
        self, params: Tree, x: Tensor, settled: Tree | None = None, real: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tree]:
        whole, stats = self._with_frozen(params)
        return self.inner.embed(whole, x, tree.merge(stats, settled or {}), real)

    def linearize(self, params: Tree, x: Tensor, real: Tensor | None = None) -> tuple[Tensor, list[Tensor]]:
        if self.patterns:
            return self.train(params, x, real=real)[0], []
        return self.inner.linearize(params, x, real)

    def tangent(
        self, params: Tree, x: Tensor, tape: list[Tensor], direction: Tree, real: Tensor | None = None
    ) -> Tensor:
        if not self.patterns:
            return self.inner.tangent(params, x, tape, direction, real)
        refusal = (
            "the trained part of the network has a layer that PyTorch cannot differentiate forward, which this "
            "method needs; freeze that layer too, or choose another method."
        )
        return forward_tangent(self, params, x, direction, real, refusal)

    def represent(self, params: Tree, stats: Tree, x: Tensor) -> tuple[Tensor, Tensor]:
        whole, frozen = self._with_frozen(params)
        return self.inner.represent(whole, tree.merge(frozen, stats), x)


@lru_cache(maxsize=8)
def fine_tune(
    network: Network, weights: Weights, patterns: tuple[str, ...], classes: tuple[str, ...]
) -> FineTunedNetwork:
    """Return the network from these weights, without training what `patterns` name.

    A pattern names a layer, or several with * and ?; "backbone" is every layer but the head. A normalization whose
    weight is frozen keeps its statistics. The head is drawn anew where the weights have none, or one for other classes.
    Raise `UserError` where the weights are not the network's, a pattern names nothing, or nothing is left to train.
    """
    values, fresh = fit_to_network(network, weights, classes)
    flat = tree.flatten(values)
    with torch.device("meta"):
        every = list(tree.flatten(network.init(torch.Generator())))
    parameters = [path.removeprefix("params/") for path in every if path.startswith("params/")]
    still = _named(network, parameters, patterns)
    if len(still) == len(parameters):
        raise UserError(f"freeze is {', '.join(patterns)}, which leaves nothing to train: freeze fewer layers.")
    if fresh and any(is_head_path(network, path) for path in still):
        raise UserError(
            f"freeze is {', '.join(patterns)}, but the head starts at random, as {weights.name} has none for these "
            "classes: freeze other layers."
        )
    settled = {
        path
        for path in every
        if path.startswith("stats/") and _frozen(path.removeprefix("stats/").rpartition("/")[0], still, patterns)
    }
    frozen = settled | {f"params/{path}" for path in still}
    parts = [{path: flat[path] for path in flat if (path in frozen) is side} for side in (False, True)]
    start, fixed = ({"params": {}, "stats": {}, **tree.unflatten(part)} for part in parts)
    tracked = any(path.startswith("stats/") and path not in frozen for path in every)
    norm = "batch" if tracked else "none" if network.norm == "batch" else network.norm
    return FineTunedNetwork(
        network.channels,
        network.classes,
        network.width,
        norm,
        precision=network.precision,
        inner=network,
        sha256=weights.sha256,
        patterns=patterns,
        fresh=fresh,
        start=start,
        frozen={**fixed, "params": tree.channels_last(fixed["params"])},
    )


def training_summary(network: Network) -> str | None:
    """Return in a sentence what of a network is trained, None where it starts from no weights."""
    if not isinstance(network, FineTunedNetwork):
        return None
    with torch.device("meta"):
        mine, whole = (tree.numel(each.init(torch.Generator())) for each in (network, network.inner))
    part = f"{mine:,} of {whole:,} numbers are trained and travel" if mine < whole else f"all {whole:,} numbers train"
    head = "the head starts at random" if network.fresh else "the head starts from the weights"
    return f"from given weights: {part}; {head}."


def backbone_paths(network: Network, params: Iterable[str]) -> frozenset[str]:
    """Return the paths of parameters that are the backbone's; raise `UserError` where the network has no head."""
    _headed(network, "backbone_lr")
    return frozenset(path for path in params if not is_head_path(network, path))


def _named(network: Network, parameters: Sequence[str], patterns: Sequence[str]) -> set[str]:
    paths: set[str] = set()
    for pattern in patterns:
        if pattern == BACKBONE:
            _headed(network, "freeze backbone")
            paths |= {path for path in parameters if not is_head_path(network, path)}
            continue
        matched = {path for path in parameters if _matches(path, pattern)}
        if not matched:
            layers = {place for path in parameters for place in _places(path)} | {BACKBONE}
            raise UserError(f"freeze names {pattern!r}, but the network has no such layer: {suggest(pattern, layers)}")
        paths |= matched
    return paths


def _frozen(layer: str, still: set[str], patterns: Sequence[str]) -> bool:
    """Return whether the statistics of a normalization stay: those of a frozen weight, or, without one, named ones."""
    own = [path for path in (f"{layer}/norm/weight", f"{layer}/weight") if path in still]
    if own:
        return True
    return any(pattern == BACKBONE or _matches(f"{layer}/mean", pattern) for pattern in patterns)


def _matches(path: str, pattern: str) -> bool:
    glob = pattern.replace(".", "/")
    return any(fnmatchcase(place, glob) for place in _places(path))


def _places(path: str) -> list[str]:
    """Return a path and the layers that it lies in: a, a/b, a/b/weight."""
    words = path.split("/")
    return ["/".join(words[:count]) for count in range(1, len(words) + 1)]


def _headed(network: Network, word: str) -> None:
    if network.head is None:
        raise UserError(
            f"{word} means every layer but the head, and this network does not end in a linear layer: name layers with "
            "freeze."
        )


@dataclass(frozen=True)
class FeatureHead(Network):
    """The head of `inner`, whose backbone is frozen: features (B, F) -> logits (B, classes), each pass one product.

    Its parameters are those of `inner`, at the same paths: what travels, is averaged and saved does not change.
    """

    inner: FineTunedNetwork = field(kw_only=True)

    @property
    def head(self) -> str | None:
        return self.inner.head

    def init(self, generator: torch.Generator) -> Tree:
        return self.inner.init(generator)

    def full_model(self, model: Tree) -> tuple[Network, Tree]:
        return self.inner.full_model(model)

    @property
    def in_float32(self) -> Network:
        return self

    def zero_moments(self, params: Tree) -> Tree:
        return {}

    def count_products(self, shape: tuple[int, int, int]) -> int | None:
        return shape[-1] * self.classes

    def check(self, shape: tuple[int, int, int]) -> None:
        return None

    def train(
        self, params: Tree, x: Tensor, settled: Tree | None = None, real: Tensor | None = None
    ) -> tuple[Tensor, Tree]:
        return self.predict(params, {}, x), {}

    def embed(
        self, params: Tree, x: Tensor, settled: Tree | None = None, real: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tree]:
        return *self.represent(params, {}, x), {}

    def linearize(self, params: Tree, x: Tensor, real: Tensor | None = None) -> tuple[Tensor, list[Tensor]]:
        return self.predict(params, {}, x), []

    def tangent(
        self, params: Tree, x: Tensor, tape: list[Tensor], direction: Tree, real: Tensor | None = None
    ) -> Tensor:
        if self._leaf(params, "center") is None:
            return self.predict(direction, {}, x)  # logits are linear in the head
        return jvp(lambda p: self.predict(p, {}, x), (params,), (direction,))[1]

    def represent(self, params: Tree, stats: Tree, x: Tensor) -> tuple[Tensor, Tensor]:
        flat, center = tree.flatten(params), self._leaf(params, "center")
        h = x if center is None else centered(x.to(center.dtype), center)
        return F.linear(h, flat[f"{self.head}/weight"], flat[f"{self.head}/bias"]), x

    def _leaf(self, params: Tree, name: str) -> Tensor | None:
        return tree.flatten(params).get(f"{self.head}/{name}")


@dataclass(frozen=True)
class FirstView(Normalize):
    """Of features (n, views, 1, F) the plain view, in float32 (n, F): what stands in the place of normalization."""

    def __call__(self, images: Tensor) -> Tensor:
        return images[:, 0, 0].float()


def feature_head(network: Network) -> FeatureHead | None:
    """Return the head that can be trained on features in the network's place, None where it is no frozen backbone's."""
    if not isinstance(network, FineTunedNetwork) or network.patterns != ("backbone",) or network.head is None:
        return None
    with torch.device("meta"):
        trained = tree.flatten(network.init(torch.Generator()))
    names = {path.removeprefix(f"params/{network.head}/") for path in trained}
    if names not in ({"weight", "bias"}, {"weight", "bias", "center"}):
        return None
    return FeatureHead(network.channels, network.classes, network.width, "none", inner=network)
