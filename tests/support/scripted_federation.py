"""Tiny networks and a federation with scripted replies, for tests whose numbers are derived by hand."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from halfmoon.api.types import StateStore
from halfmoon.api.upload_mean import average_stacked_uploads
from halfmoon.api.uploads import Upload, UploadSpec, stack
from halfmoon.core import tree
from halfmoon.core.tree import Tree
from halfmoon.models import Network
from halfmoon.models.passes import ForwardPass
from halfmoon.storage.state_store import StateView, TreeStore


@dataclass(frozen=True)
class OneWeightNetwork(Network):
    """A network with one weight w: its logits are (w x, 0) for x the mean of an image.

    It reports the batch mean and variance of x, but does not normalize by them.
    """

    channels: int = 1
    classes: int = 2
    width: int = 1

    def init(self, generator: torch.Generator) -> Tree:
        stats = {"pixel": {"mean": torch.zeros(1), "var": torch.ones(1)}}
        return {"params": {"pixel": {"norm": {"bias": torch.ones(1)}}}, "stats": stats}

    def layers(self, x: Tensor, run: ForwardPass) -> Tensor:
        z = run.params["pixel"]["norm"]["bias"] * x.mean((1, 2, 3))
        return torch.stack([z, torch.zeros_like(z)], -1)

    def train(self, params: Tree, x: Tensor, real: Tensor | None = None) -> tuple[Tensor, Tree]:
        means = x.mean((1, 2, 3))
        var = means.var() if len(means) > 1 else means.sum() * 0
        return self.predict(params, {}, x), {"pixel": {"mean": means.mean()[None], "var": var[None]}}

    def predict(self, params: Tree, stats: Tree, x: Tensor) -> Tensor:
        z = params["pixel"]["norm"]["bias"] * x.mean((1, 2, 3))
        return torch.stack([z, torch.zeros_like(z)], -1)

    def check(self, shape: tuple[int, int, int]) -> None:
        pass


@dataclass(frozen=True)
class LinearNetwork(Network):
    """A network with one weight per class and no bias: its logits are w_c x for x the mean of an image."""

    channels: int = 1
    classes: int = 2

    def init(self, generator: torch.Generator) -> Tree:
        return {"params": make_linear_params(*[1.0] * self.classes), "stats": {}}

    def layers(self, x: Tensor, run: ForwardPass) -> Tensor:
        return run.linear("head", x.mean((-3, -2, -1))[:, None])

    def check(self, shape: tuple[int, int, int]) -> None:
        pass


def make_linear_params(*weights: float) -> Tree:
    """Return the parameters of `LinearNetwork` with a weight per class."""
    return {"head": {"weight": torch.tensor(weights, dtype=torch.float64)[:, None]}}


def make_one_weight_params(weight: float) -> Tree:
    """Return the parameters of `OneWeightNetwork`."""
    return {"pixel": {"norm": {"bias": torch.tensor([weight], dtype=torch.float64)}}}


def get_weight(params: Tree) -> float:
    """Return the weight of `OneWeightNetwork`."""
    return float(params["pixel"]["norm"]["bias"])


def make_pixel_images(values: Sequence[float]) -> Tensor:
    """Return normalized images (n, 1, 1, 1) of one pixel."""
    return torch.tensor(list(values), dtype=torch.float64).reshape(-1, 1, 1, 1)


def make_upload(content: Tree, *aux: str) -> Upload:
    """Return an upload.

    Args:
        content: the parts of the upload by name. "weight" is its weight, by default 1. If the leaves have a first axis,
            several uploads are stacked along it.
        aux: names of parts that are auxiliary values instead of parts of the update.
    """
    update = {name: part for name, part in content.items() if name not in ("weight", *aux)}
    leaf = next(tree.leaves(content))
    count = (len(leaf),) if leaf.dim() else ()
    weight = content.get("weight", torch.ones(count, dtype=torch.float64))
    return Upload(update, weight, {name: content[name] for name in aux})


ReplyFunction = Callable[[Any, Any], Sequence[Upload]]
"""Returns the uploads of clients, given (broadcast, client numbers)."""

SERVER = -2
"""The client number of the server's labeled data."""


@dataclass
class ScriptedFederation:
    """A `Federation` whose clients reply with scripted uploads.

    Attributes:
        replies: function that returns the uploads, by name of the client update.
        clients: number of clients.
        cohort: numbers of the clients in each round.
        labeled: number of labeled clients.
        queries: (client update, client numbers) of each query, `SERVER` for the server.
        broadcasts: the broadcast of each query.
    """

    replies: Mapping[str, ReplyFunction]
    clients: int = 4
    cohort: Tensor = field(default_factory=lambda: torch.arange(2))
    labeled: int = 1
    queries: list[tuple[str, list[int]]] = field(default_factory=list)
    broadcasts: list[Tree] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.responders: Tensor = self.cohort
        self.state_store: StateStore = StateView(TreeStore(), "state/", torch.device("cpu"))

    def query(
        self, client_update: str, broadcast: Tree, per_client: Tree | None = None, clients: Tensor | None = None
    ) -> Upload:
        """Return the stacked uploads of some clients, by default the cohort."""
        self.responders = self.cohort if clients is None else clients
        return stack(list(self._record_query(client_update, broadcast, self.responders.tolist())))

    def average(self, client_update: str, broadcast: Tree) -> Upload:
        """Return the weighted mean of the cohort's uploads."""
        return average_stacked_uploads(self.query(client_update, broadcast), UploadSpec(), broadcast, client_update)

    def query_server(self, client_update: str, broadcast: Tree) -> Upload:
        """Return the upload of the server's labeled data."""
        (upload,) = self._record_query(client_update, broadcast, [SERVER])
        return upload

    def _record_query(self, client_update: str, broadcast: Tree, clients: list[int]) -> Any:
        self.queries.append((client_update, clients))
        self.broadcasts.append(broadcast)
        return self.replies[client_update](broadcast, clients)
