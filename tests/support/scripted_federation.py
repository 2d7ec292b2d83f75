"""A network of one weight and a federation that answers by the book: for numbers that can be derived by hand."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from halfmoon.aggregation.mean import average_stacked_uploads
from halfmoon.api.types import StateStore
from halfmoon.api.uploads import Upload, UploadSpec, stack
from halfmoon.core import tree
from halfmoon.core.tree import Tree
from halfmoon.models import Network
from halfmoon.models.passes import ForwardPass
from halfmoon.storage.state_store import StateView, TreeStore


@dataclass(frozen=True)
class OneWeightNetwork(Network):
    """Logits (w x, 0), x the mean of an image; its moments are those of x, and nothing is normalized by them."""

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
        seen = x.mean((1, 2, 3))
        var = seen.var() if len(seen) > 1 else seen.sum() * 0
        return self.predict(params, {}, x), {"pixel": {"mean": seen.mean()[None], "var": var[None]}}

    def predict(self, params: Tree, stats: Tree, x: Tensor) -> Tensor:
        z = params["pixel"]["norm"]["bias"] * x.mean((1, 2, 3))
        return torch.stack([z, torch.zeros_like(z)], -1)

    def check(self, shape: tuple[int, int, int]) -> None:
        pass


@dataclass(frozen=True)
class LinearNetwork(Network):
    """Logits w_c * x for x the mean of an image: one weight a class, and no bias."""

    channels: int = 1
    classes: int = 2

    def init(self, generator: torch.Generator) -> Tree:
        return {"params": make_linear_params(*[1.0] * self.classes), "stats": {}}

    def layers(self, x: Tensor, run: ForwardPass) -> Tensor:
        return run.linear("head", x.mean((-3, -2, -1))[:, None])

    def check(self, shape: tuple[int, int, int]) -> None:
        pass


def make_linear_params(*weights: float) -> Tree:
    """Return the parameters of `LinearNetwork`."""
    return {"head": {"weight": torch.tensor(weights, dtype=torch.float64)[:, None]}}


def make_one_weight_params(value: float) -> Tree:
    """Return the parameters of `OneWeightNetwork` with w = value."""
    return {"pixel": {"norm": {"bias": torch.tensor([value], dtype=torch.float64)}}}


def get_weight(params: Tree) -> float:
    return float(params["pixel"]["norm"]["bias"])


def make_pixel_images(values: Sequence[float]) -> Tensor:
    """Return images (n, 1, 1, 1), as a network sees them."""
    return torch.tensor(list(values), dtype=torch.float64).reshape(-1, 1, 1, 1)


def make_upload(held: Tree, *aux: str) -> Upload:
    """Return an upload (or several, stacked) of its parts by name, of which `aux` go beside the update.
    Without a "weight" it weighs 1."""
    update = {name: part for name, part in held.items() if name not in ("weight", *aux)}
    like = next(tree.leaves(held))
    count = (len(like),) if like.dim() else ()
    weight = held.get("weight", torch.ones(count, dtype=torch.float64))
    return Upload(update, weight, {name: held[name] for name in aux})


ReplyFunction = Callable[[Any, Any], Sequence[Upload]]
"""What clients say to (down, who is asked): one upload each."""


@dataclass
class ScriptedFederation:
    """A federation whose clients say what they are told to say; `asked` keeps (work, clients), -2 for the server."""

    answers: Mapping[str, ReplyFunction]
    clients: int = 4
    cohort: Tensor = field(default_factory=lambda: torch.arange(2))
    labeled: int = 1
    asked: list[tuple[str, list[int]]] = field(default_factory=list)
    downlinks: list[Tree] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.responders: Tensor = self.cohort
        self.state_store: StateStore = StateView(TreeStore(), "state/", torch.device("cpu"))

    def query(
        self, client_update: str, broadcast: Tree, per_client: Tree | None = None, clients: Tensor | None = None
    ) -> Upload:
        self.responders = self.cohort if clients is None else clients
        return stack(list(self._ask(client_update, broadcast, self.responders.tolist())))

    def average(self, client_update: str, broadcast: Tree) -> Upload:
        return average_stacked_uploads(self.query(client_update, broadcast), UploadSpec(), broadcast, client_update)

    def query_server(self, client_update: str, broadcast: Tree) -> Upload:
        (upload,) = self._ask(client_update, broadcast, [-2])
        return upload

    def _ask(self, client_update: str, broadcast: Tree, who: list[int]) -> Any:
        self.asked.append((client_update, who))
        self.downlinks.append(broadcast)
        return self.answers[client_update](broadcast, who)
