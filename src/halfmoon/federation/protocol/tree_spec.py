"""The shape that an upload must have. A server that trusts no site finds it by the same update on made-up images."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from halfmoon.api.types import ClientUpdate, Task
from halfmoon.core import rng, tree
from halfmoon.core.tree import Tree
from halfmoon.data.partition.split import Split
from halfmoon.data.views import Plain
from halfmoon.engine.budget import Budget
from halfmoon.engine.driver import ClientContext, Diverged
from halfmoon.engine.evaluation import Examples, Quality
from halfmoon.engine.local_clients import FederatedDataset, LocalClients, Training
from halfmoon.engine.sampling import Batching, Views
from halfmoon.storage.state_store import StateView, Store

TreeSpec = dict[str, tuple[tuple[int, ...], torch.dtype] | None]
"""Path as of `tree.flatten` -> (shape, dtype) of the leaf; None marks a branch without leaves ("stats": {}).

Such branches count: the server's sums walk over all uploads together, and one that lacks a branch would stop them.
"""

PROBE_IMAGES = 2
"""Made-up images of each kind, labeled and unlabeled: with one alone a variance may be undefined."""


class UploadProbe:
    """The shapes of a federation's uploads, found by one step of a made-up client on a downlink of zeros.

    Nothing depends on the run. No upload of the catalog has a shape that depends on the client.
    """

    def __init__(self, task: Task, views: Views, image: tuple[int, int, int], seed: int) -> None:
        self.task, self.seed = task, seed
        # Views change neither shapes nor dtypes; plain ones are quick, and fit any number of images.
        self.views = Views(Plain(), {name: Plain() for name in views.unlabeled})
        g = rng.generator(seed, "pattern")
        images = torch.randint(0, 256, (2 * PROBE_IMAGES, *image), generator=g, dtype=torch.uint8)
        labels = torch.arange(2 * PROBE_IMAGES) % task.network.classes
        split = Split(np.zeros(2 * PROBE_IMAGES, np.int64), np.arange(2 * PROBE_IMAGES) < PROBE_IMAGES, 1)
        self.dataset = FederatedDataset(Examples(images, labels), split)
        self._cache: list[tuple[ClientUpdate, TreeSpec, TreeSpec | None]] = []

    def find_spec(self, context: ClientContext, down: Tree) -> TreeSpec | None:
        """Return the shape of the upload for a downlink, computed once a structure; None for an infinite loss."""
        client_update, structure = replace(context.client_update, task=self.task), make_tree_spec(down)
        for other, downlink, spec in self._cache:
            if other == client_update and downlink == structure:
                return spec
        spec = self._play(replace(context, client_update=client_update), down)
        self._cache.append((client_update, structure, spec))
        return spec

    def _play(self, context: ClientContext, down: Tree) -> TreeSpec | None:
        cpu, batching = torch.device("cpu"), Batching(PROBE_IMAGES, PROBE_IMAGES, steps=1)
        state_store = StateView(Store(), "client/", cpu)
        local_clients = LocalClients(self.dataset, self.views, Training(batching, Budget()), self.seed, state_store)
        context = replace(context, views=self.views, seed=self.seed)
        quality = Quality(self.task.network.classes, 1.0, cpu)
        try:
            (result,) = local_clients.update(context, [0], None, tree.zeros_like(down), {}, quality)
        except Diverged:
            return None
        return make_tree_spec(result.up.tree)


def make_tree_spec(up: Tree) -> TreeSpec:
    """Return the shape of a tree; its keys may hold no "/"."""
    return {
        "/".join(path): None if leaf is None else (tuple(leaf.shape), leaf.dtype) for path, leaf in iterate_leaves(up)
    }


def build_tree(spec: TreeSpec, leaf: Callable[[tuple[int, ...], torch.dtype], Tensor]) -> Tree:
    """Return a tree of this shape, whose leaves `leaf` makes of their shape and dtype."""
    root: Tree = {}
    for path, kind in spec.items():
        *parents, name = path.split("/")
        branch = root
        for parent in parents:
            branch = branch.setdefault(parent, {})
        branch[name] = {} if kind is None else leaf(*kind)
    return root


def iterate_leaves(branch: Tree, above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Tensor | None]]:
    """Yield the leaves of a tree by path, and None for each branch below its root that has none."""
    if not branch and above:
        yield above, None
    for key, value in branch.items():
        if isinstance(value, dict):
            yield from iterate_leaves(value, (*above, key))
        else:
            yield (*above, key), value
