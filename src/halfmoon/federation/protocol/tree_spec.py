"""The tree structure, shapes and dtypes that an upload must have.

A server that trusts no site computes them itself, by running the same local update on random images.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from halfmoon.api.types import ClientUpdate, Task
from halfmoon.core import rng, tree
from halfmoon.core.errors import Diverged
from halfmoon.core.tree import Tree
from halfmoon.data.partition.split import Split
from halfmoon.data.views import Plain
from halfmoon.engine.budget import Budget
from halfmoon.engine.driver import ClientContext
from halfmoon.engine.evaluation import Examples
from halfmoon.engine.local_clients import FederatedDataset, LocalClients, Training
from halfmoon.engine.sampling import Batching, Views
from halfmoon.storage.state_store import StateView, TreeStore

TreeSpec = dict[str, tuple[tuple[int, ...], torch.dtype] | None]
"""Path as of `tree.flatten` -> (shape, dtype) of the leaf. None marks a branch without leaves ("stats": {}).

Empty branches matter: the server's sums walk over all uploads together and would fail if one lacked a branch.
"""

PROBE_IMAGES = 2
"""Labeled and, as many again, unlabeled images of the probe. With one image a variance may be undefined."""


class UploadProbe:
    """Find the specs of a federation's uploads by one step of a local update on random images and zero weights.

    The result does not depend on the run. No upload of a built-in method has a shape that depends on the client.
    """

    def __init__(self, task: Task, views: Views, image: tuple[int, int, int], seed: int) -> None:
        """Generate the random images on which the probe runs local updates, to find the shapes of their uploads.

        All belong to one client, which has a label for the first half of them.

        Args:
            task: the federation's task.
            views: the views of the federation; only the names of the unlabeled ones are used.
            image: channels, height and width.
            seed: seed of the random images.
        """
        self.task = task
        self.seed = seed
        # Augmentations change neither shapes nor dtypes. Plain views are fast and accept any number of images.
        self.views = Views(Plain(), {name: Plain() for name in views.unlabeled})
        generator = rng.generator(seed, "pattern")  # the stream's name keeps these draws apart from those of training
        images = torch.randint(0, 256, (2 * PROBE_IMAGES, *image), generator=generator, dtype=torch.uint8)
        labels = torch.arange(2 * PROBE_IMAGES) % task.network.classes
        client_of_image = np.zeros(2 * PROBE_IMAGES, np.int64)
        has_label = np.arange(2 * PROBE_IMAGES) < PROBE_IMAGES
        split = Split(client_of_image, has_label, 1)
        self.dataset = FederatedDataset(Examples(images, labels), split)
        self.metrics: set[str] = set()  # names of the measures that the updates reported
        # What `find_spec` has computed: the client update, the spec of its download and that of its upload. It is a
        # list, because specs are dicts, which cannot be keys.
        self._cache: list[tuple[ClientUpdate, TreeSpec, TreeSpec | None]] = []

    def find_spec(self, context: ClientContext, broadcast: Tree) -> TreeSpec | None:
        """Find names, shapes and dtypes of the upload that an honest site sends, by running its update on random images.

        Results are cached by client update and by the shapes of the download. The client update (the method's code that
        a client runs) is used with the probe's task, which is that of round 0: otherwise each learning rate of a
        schedule would be another entry of the cache, although shapes do not depend on it.

        Args:
            context: the client update and its round.
            broadcast: the tree that the server sends to a client, the download; only its structure matters.

        Returns:
            The spec, or None if the loss of the probe is not finite.
        """
        client_update = replace(context.client_update, task=self.task)
        download_spec = make_tree_spec(broadcast)
        for cached_update, cached_download, upload_spec in self._cache:
            if cached_update == client_update and cached_download == download_spec:
                return upload_spec
        upload_spec = self._run_update(replace(context, client_update=client_update), broadcast)
        self._cache.append((client_update, download_spec, upload_spec))
        return upload_spec

    def _run_update(self, context: ClientContext, broadcast: Tree) -> TreeSpec | None:
        """Run one step of a local update on the random images, starting from zeros in the shapes of `broadcast`.

        Returns:
            The spec of its upload; None if the loss is not finite.
        """
        cpu = torch.device("cpu")
        batching = Batching(PROBE_IMAGES, PROBE_IMAGES, steps=1)
        empty_memories = StateView(TreeStore(), "client/", cpu)  # the client's state between rounds: none so far
        training = Training(batching, Budget())  # the default budget does not shorten the one step
        local_clients = LocalClients(self.dataset, self.views, training, self.seed, empty_memories)
        context = replace(context, views=self.views, seed=self.seed)
        zeros = tree.zeros_like(broadcast)
        try:
            ((_, result),) = local_clients.train(
                context,
                clients=[0],  # the only client of the dataset
                broadcast=zeros,
                per_client={},  # the zeros contain the values for this client too
            )
        except Diverged:
            return None
        self.metrics.update(result.samples)
        return make_tree_spec(result.upload.tree)


def make_tree_spec(branch: Tree) -> TreeSpec:
    """Make the spec of a tree. No key may contain a "/"."""
    return {
        "/".join(path): None if leaf is None else (tuple(leaf.shape), leaf.dtype)
        for path, leaf in iterate_leaves(branch)
    }


def build_tree(spec: TreeSpec, make_leaf: Callable[[tuple[int, ...], torch.dtype], Tensor]) -> Tree:
    """Build a tree (nested dict of tensors) from the names, shapes and dtypes of its leaves.

    Args:
        spec: (shape, dtype) by path, with "/" between keys; None is a branch without leaves.
        make_leaf: makes a tensor from its shape and dtype.
    """
    root: Tree = {}
    for path, leaf_spec in spec.items():
        *parents, name = path.split("/")
        branch = root
        for parent in parents:
            branch = branch.setdefault(parent, {})
        branch[name] = {} if leaf_spec is None else make_leaf(*leaf_spec)
    return root


def iterate_leaves(branch: Tree, prefix: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Tensor | None]]:
    """Yield the path and value of each leaf of a tree, and None for each branch below the root without leaves."""
    if not branch and prefix:
        yield prefix, None
    for key, value in branch.items():
        if isinstance(value, dict):
            yield from iterate_leaves(value, (*prefix, key))
        else:
            yield (*prefix, key), value
