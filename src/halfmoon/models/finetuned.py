"""Networks that start from given weights, with some of the parameters frozen.

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

from halfmoon.core import tree
from halfmoon.core.errors import UserError, suggest
from halfmoon.core.normalize import Normalize
from halfmoon.core.tree import Tree
from halfmoon.models.efficientnet import centered
from halfmoon.models.feature_classifier import FeatureClassifier
from halfmoon.models.network import Network, forward_tangent
from halfmoon.models.weights import Weights, fit_weights_to_network, is_head_path

BACKBONE = "backbone"
"""The pattern for all layers except the head."""


@dataclass(frozen=True)
class FineTunedNetwork(Network):
    """The network `inner` with pretrained weights of SHA-256 `sha256`, and with the layers of `patterns` frozen.

    `norm` is "batch" if a trained layer tracks statistics. `fresh` is true if the head starts at random.
    """

    inner: Network = field(kw_only=True)
    sha256: str = field(kw_only=True)
    patterns: tuple[str, ...] = field(kw_only=True)
    fresh: bool = field(kw_only=True)
    start: Tree = field(
        kw_only=True, compare=False, repr=False
    )  # pretrained values of trained parameters, without a random head
    frozen: Tree = field(kw_only=True, compare=False, repr=False)
    sliceable: ClassVar[bool] = False
    _moved: dict[Any, Tree] = field(default_factory=dict, kw_only=True, compare=False, repr=False)

    @property
    def head(self) -> str | None:
        return self.inner.head

    @property
    def has_dropout(self) -> bool:
        return self.inner.has_dropout

    def init(self, generator: torch.Generator) -> Tree:
        """Return the initial values of what is trained: pretrained where there are weights, otherwise random.

        A head without weights starts at random. Frozen leaves are left out: each pass adds them.

        Args:
            generator: draws the values of the inner network, those that are replaced included.

        Returns:
            "params" and "stats", either of which may be {}. Under the default device "meta", of which only the shapes
            matter, no weights are copied.
        """
        # All leaves are drawn, in the order of the inner network, so that the head does not depend on what is frozen.
        random_leaves = tree.flatten(self.inner.init(generator))
        pretrained = tree.flatten(self.start)
        frozen = tree.flatten(self.frozen)
        needs_only_shapes = torch.get_default_device().type == "meta"
        initial: dict[str, Tensor] = {}
        for path, leaf in random_leaves.items():
            if path in frozen:
                continue
            use_pretrained = path in pretrained and not needs_only_shapes
            initial[path] = pretrained[path].clone() if use_pretrained else leaf
        return {"params": {}, "stats": {}, **tree.unflatten(initial)}

    def full_model(self, model: Tree) -> tuple[Network, Tree]:
        like = next(tree.leaves(model["params"]))
        return self.inner.in_float32, tree.merge(self._frozen_at(like), model)

    @property
    def in_float32(self) -> Network:
        return self if self.precision == "float32" else replace(self, precision="float32", inner=self.inner.in_float32)

    def _frozen_at(self, like: Tensor) -> Tree:
        # Cache the copy: every pass needs the frozen parameters on its device and in its dtype.
        key = (like.device, like.dtype)
        if key not in self._moved:
            self._moved[key] = tree.to(self.frozen, like.device, like.dtype)
        return self._moved[key]

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
        self, params: Tree, x: Tensor, fixed_stats: Tree | None = None, real: Tensor | None = None
    ) -> tuple[Tensor, Tree]:
        merged, stats = self._with_frozen(params)
        return self.inner.train(merged, x, tree.merge(stats, fixed_stats or {}), real)

    def embed(
        self, params: Tree, x: Tensor, fixed_stats: Tree | None = None, real: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tree]:
        merged, stats = self._with_frozen(params)
        return self.inner.embed(merged, x, tree.merge(stats, fixed_stats or {}), real)

    def linearize(self, params: Tree, x: Tensor, real: Tensor | None = None) -> tuple[Tensor, list[Tensor]]:
        if self.patterns:
            return self.train(params, x, real=real)[0], []
        return self.inner.linearize(params, x, real)

    def tangent(
        self, params: Tree, x: Tensor, tape: list[Tensor], direction: Tree, real: Tensor | None = None
    ) -> Tensor:
        """Compute the derivative (B, classes) of the logits along `direction`, a tree like `params` (forward mode).

        Without frozen layers the inner network uses `tape`, the activations that `linearize` recorded. With some, no
        tape was recorded, and `torch.func.jvp` repeats the forward pass on the images x.
        """
        if not self.patterns:  # no layer is frozen
            return self.inner.tangent(params, x, tape, direction, real)
        refusal = (
            "the trained part of the network has a layer that PyTorch cannot differentiate forward, which this "
            "method needs; freeze that layer too, or choose another method."
        )
        return forward_tangent(self, params, x, direction, real, refusal)

    def represent(self, params: Tree, stats: Tree, x: Tensor) -> tuple[Tensor, Tensor]:
        merged, frozen = self._with_frozen(params)
        return self.inner.represent(merged, tree.merge(frozen, stats), x)


@lru_cache(maxsize=8)
def fine_tune(
    network: Network, weights: Weights, patterns: tuple[str, ...], classes: tuple[str, ...]
) -> FineTunedNetwork:
    """Create a network that starts from pretrained weights, with some layers frozen.

    The statistics of a normalization with a frozen weight do not change. The head is random if the weights have none, or
    one for other classes.

    Args:
        network: the architecture.
        weights: the pretrained weights.
        patterns: names of layers to freeze, with * and ? as wildcards; "backbone" is every layer but the head.
        classes: names of the classes.

    Raises:
        UserError: if the weights do not fit the network, a pattern matches no layer, or all parameters are frozen.
    """
    values, head_is_random = fit_weights_to_network(network, weights, classes)
    flat = tree.flatten(values)
    with torch.device("meta"):
        paths = list(tree.flatten(network.init(torch.Generator())))
    parameters = [path.removeprefix("params/") for path in paths if path.startswith("params/")]
    frozen_paths = _match_patterns(network, parameters, patterns)
    if len(frozen_paths) == len(parameters):
        raise UserError(f"freeze is {', '.join(patterns)}, which leaves nothing to train: freeze fewer layers.")
    if head_is_random and any(is_head_path(network, path) for path in frozen_paths):
        raise UserError(
            f"freeze is {', '.join(patterns)}, but the head starts at random, as {weights.name} has none for these "
            "classes: freeze other layers."
        )
    stats = [path for path in paths if path.startswith("stats/")]  # such as "stats/block1a/mean"
    frozen_stats: set[str] = set()
    for path in stats:
        layer = path.removeprefix("stats/").rpartition("/")[0]
        if _has_frozen_stats(layer, frozen_paths, patterns):
            frozen_stats.add(path)
    frozen = frozen_stats | {f"params/{path}" for path in frozen_paths}
    trained_leaves = {path: leaf for path, leaf in flat.items() if path not in frozen}
    frozen_leaves = {path: leaf for path, leaf in flat.items() if path in frozen}
    start = {"params": {}, "stats": {}, **tree.unflatten(trained_leaves)}
    fixed = {"params": {}, "stats": {}, **tree.unflatten(frozen_leaves)}
    # The network's kind of normalization is what is trained: "batch" only if running statistics still change.
    norm = network.norm
    if len(frozen_stats) < len(stats):
        norm = "batch"
    elif network.norm == "batch":
        norm = "none"
    return FineTunedNetwork(
        network.channels,
        network.classes,
        network.width,
        norm,
        precision=network.precision,
        inner=network,
        sha256=weights.sha256,
        patterns=patterns,
        fresh=head_is_random,
        start=start,
        frozen={**fixed, "params": tree.channels_last(fixed["params"])},
    )


def training_summary(network: Network) -> str | None:
    """Describe in a sentence how much of a network is trained, None if it has no pretrained weights.

    Only trained numbers travel between clients and server: frozen ones are in the weights file, which all have.
    """
    if not isinstance(network, FineTunedNetwork):
        return None
    # `FineTunedNetwork.init` leaves out frozen parameters, its inner network's does not. Only shapes are needed.
    with torch.device("meta"):
        trained = tree.numel(network.init(torch.Generator()))
        total = tree.numel(network.inner.init(torch.Generator()))
    share = (
        f"{trained:,} of {total:,} numbers are trained and travel"
        if trained < total
        else f"all {total:,} numbers train"
    )
    # `fresh`: the weights have no head for these classes.
    head = "the head starts at random" if network.fresh else "the head starts from the weights"
    return f"from given weights: {share}; {head}."


def backbone_paths(network: Network, params: Iterable[str]) -> frozenset[str]:
    """Return the paths of the backbone's parameters; raise `UserError` if the network has no head."""
    _require_head(network, "backbone_lr")
    return frozenset(path for path in params if not is_head_path(network, path))


def _match_patterns(network: Network, parameters: Sequence[str], patterns: Sequence[str]) -> set[str]:
    """Return the paths of the parameters to freeze.

    Args:
        network: the network.
        parameters: paths of all its parameters, such as "layer1/conv/weight".
        patterns: the user's option `freeze`: "backbone" (all but the head), or names of layers with wildcards.

    Raises:
        UserError: a pattern matches no layer, or "backbone" is of a network without a head.
    """
    paths: set[str] = set()
    for pattern in patterns:
        if pattern == BACKBONE:
            _require_head(network, "freeze backbone")
            paths |= {path for path in parameters if not is_head_path(network, path)}
            continue
        matched = {path for path in parameters if _matches(path, pattern)}
        if not matched:
            layers = {BACKBONE}  # what the user may have meant
            for path in parameters:
                layers.update(_path_prefixes(path))
            raise UserError(f"freeze names {pattern!r}, but the network has no such layer: {suggest(pattern, layers)}")
        paths |= matched
    return paths


def _has_frozen_stats(layer: str, frozen_paths: set[str], patterns: Sequence[str]) -> bool:
    """Test if the statistics of a normalization are frozen: its weight is frozen, or a pattern matches the layer."""
    if f"{layer}/norm/weight" in frozen_paths or f"{layer}/weight" in frozen_paths:
        return True
    return any(pattern == BACKBONE or _matches(f"{layer}/mean", pattern) for pattern in patterns)


def _matches(path: str, pattern: str) -> bool:
    glob = pattern.replace(".", "/")
    return any(fnmatchcase(prefix, glob) for prefix in _path_prefixes(path))


def _path_prefixes(path: str) -> list[str]:
    """List all prefixes of a path: a, a/b, a/b/weight."""
    names = path.split("/")
    return ["/".join(names[:count]) for count in range(1, len(names) + 1)]


def _require_head(network: Network, option: str) -> None:
    if network.head is None:
        raise UserError(
            f"{option} means every layer but the head, and this network does not end in a linear layer: name layers with "
            "freeze."
        )


@dataclass(frozen=True)
class FeatureHead(FeatureClassifier):
    """The head of `inner`, whose backbone is frozen, as a network from features (B, F) to logits (B, classes).

    It has the parameters of `inner` at the same paths, so uploads, averages and saved models are the same.
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

    def count_products(self, shape: tuple[int, int, int]) -> int | None:
        return shape[-1] * self.classes

    def tangent(
        self, params: Tree, x: Tensor, tape: list[Tensor], direction: Tree, real: Tensor | None = None
    ) -> Tensor:
        if self._leaf(params, "center") is None:
            return self.predict(direction, {}, x)  # logits are linear in the head
        return super().tangent(params, x, tape, direction, real)

    def represent(self, params: Tree, stats: Tree, x: Tensor) -> tuple[Tensor, Tensor]:
        flat = tree.flatten(params)
        center = self._leaf(params, "center")
        h = x if center is None else centered(x.to(center.dtype), center)
        return F.linear(h, flat[f"{self.head}/weight"], flat[f"{self.head}/bias"]), x

    def _leaf(self, params: Tree, name: str) -> Tensor | None:
        return tree.flatten(params).get(f"{self.head}/{name}")


@dataclass(frozen=True)
class FirstView(Normalize):
    """Select the first view of features (n, views, 1, F) as float32 (n, F), in place of normalization."""

    def __call__(self, images: Tensor) -> Tensor:
        return images[:, 0, 0].float()


def feature_head(network: Network) -> FeatureHead | None:
    """Return the linear head of a network whose backbone is frozen, to be trained on precomputed features.

    A frozen backbone gives an image the same features in each step, so they are computed once.

    Returns:
        The head; None if other layers are frozen than the backbone, or more than one linear layer is trained.
    """
    if not isinstance(network, FineTunedNetwork) or network.patterns != (BACKBONE,) or network.head is None:
        return None
    with torch.device("meta"):  # only the names are needed
        trained = tree.flatten(network.init(torch.Generator()))
    # All that is trained must be one linear layer. Some heads also have `center`, the mean of all features, which they
    # subtract from an image's features.
    names = {path.removeprefix(f"params/{network.head}/") for path in trained}
    if names not in ({"weight", "bias"}, {"weight", "bias", "center"}):
        return None
    return FeatureHead(network.channels, network.classes, network.width, norm="none", inner=network)
