"""What an upload has to look like: known to a server that trusts no site, by doing the same work on made-up images."""

from __future__ import annotations

from collections.abc import Iterator
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

KIND = 2
"""Made-up images of each kind, labeled and unlabeled: one alone may leave a variance of one value, which is none."""


class UplinkSpec:
    """The patterns of a federation's uploads; `image` is (C, H, W) as the sites have them.

    A made-up client (a few random images, some labeled) does the work, for one step at most, with zeros in place of
    what goes down: no weight can then make a loss infinite, and nothing depends on the run. Its memory is thrown away,
    its randomness is its own. No upload of the catalog has a shape that depends on the client: what is remembered of
    each row stays at the site.
    """

    def __init__(self, task: Task, views: Views, image: tuple[int, int, int], seed: int) -> None:
        self.task, self.seed = task, seed
        # Views change neither shapes nor dtypes; plain ones are quick, and fit any number of images.
        self.views = Views(Plain(), {name: Plain() for name in views.unlabeled})
        g = rng.generator(seed, "pattern")
        images = torch.randint(0, 256, (2 * KIND, *image), generator=g, dtype=torch.uint8)
        labels = torch.arange(2 * KIND) % task.network.classes
        split = Split(np.zeros(2 * KIND, np.int64), np.arange(2 * KIND) < KIND, 1)
        self.dataset = FederatedDataset(Examples(images, labels), split)
        self._known: list[tuple[ClientUpdate, TreeSpec, TreeSpec | None]] = []

    def of(self, context: ClientContext, down: Tree) -> TreeSpec | None:
        """Return the pattern of what comes up for `down`, all that goes to one site; None where it cannot be found out.

        It is found out once for each work (whatever the round of its task) and structure of `down`: what a work sends
        may depend on its fields and on the names, shapes and dtypes that come down, not on the round alone. None is
        for a loss that is not finite even here.
        """
        client_update, structure = replace(context.client_update, task=self.task), spec_of(down)
        for other, seen, pattern in self._known:
            if other == client_update and seen == structure:
                return pattern
        pattern = self._played(context, down)
        self._known.append((client_update, structure, pattern))
        return pattern

    def _played(self, context: ClientContext, down: Tree) -> TreeSpec | None:
        cpu, batching = torch.device("cpu"), Batching(KIND, KIND, steps=1)
        state_store = StateView(Store(), "client/", cpu)
        local_clients = LocalClients(self.dataset, self.views, Training(batching, Budget()), self.seed, state_store)
        made_up = replace(context, views=self.views, seed=self.seed)
        quality = Quality(self.task.network.classes, 1.0, cpu)
        try:
            (outcome,) = local_clients.visit(made_up, [0], None, tree.zeros_like(down), {}, quality)
        except Diverged:
            return None
        return spec_of(outcome.up.tree)


def spec_of(up: Tree) -> TreeSpec:
    """Return the pattern of a tree that is there; its keys may hold no "/"."""
    return {"/".join(path): None if leaf is None else (tuple(leaf.shape), leaf.dtype) for path, leaf in parts(up)}


def parts(branch: Tree, above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Tensor | None]]:
    """Yield the leaves of a tree by path, and None for each branch below its root that has none."""
    if not branch and above:
        yield above, None
    for key, value in branch.items():
        if isinstance(value, dict):
            yield from parts(value, (*above, key))
        else:
            yield (*above, key), value
