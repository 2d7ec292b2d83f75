"""Twin-sight (Zhang et al., ICLR 2024): every client also trains a second network, without labels.

The twin is the same network with a projector (two layers) in place of the head. On two views a and b of all images of a
minibatch, labeled and not,

    loss = CE(y, classifier(a)) + contrast_weight InfoNCE(twin(a), twin(b)) + gram_weight mean (U U' - V V')^2,

where InfoNCE is SimCLR's, between all 2 N projections, at `temperature`; the rows of U and V are the features of the
twin and of the classifier on view a, each of length 1.

server: params and stats, in each the twin's under "twin".  broadcast: the same.  memory: with `keep_optimizer`, the
optimizer's state.  upload: the same as down, trained, and weight: twice FedAvg's bytes and more.

Departures: the authors' code divides the Gram term by 64 xor 2 = 66 where the square of 64 must be meant: `gram_weight`
62 is that. Its optional FreeMatch loss is left out. The projector has `hidden` and `projected` numbers, theirs 4096 and
2048. The twin starts alike for all seeds, and is no part of the solution. Both views are weak ones.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce

import torch
import torch.nn.functional as F
from torch import Tensor

from halfmoon.api.method_entry import MethodEntry
from halfmoon.api.requirements import Requirements
from halfmoon.api.types import Batch, ClientUpdate, Passes, StepMetrics, Task, UpdateRequirements, weighted_metric
from halfmoon.core import rng, tree
from halfmoon.core.autodiff import grad_and_value
from halfmoon.core.errors import UserError
from halfmoon.core.padding import concat, mean, row_mean
from halfmoon.core.tree import Tree
from halfmoon.methods.averaging import ModelAveraging
from halfmoon.methods.objectives.base import as_pseudo_labels, embed_groups, labeled_cross_entropy
from halfmoon.models import track
from halfmoon.models.network import linear

TWIN, PROJECTOR = "twin", "projector"
VIEWS = ("weak", "weak2")


@dataclass(frozen=True)
class TwinSight(ModelAveraging):
    """Twin-sight with the weights and the temperature of the authors' code."""

    method_requirements = Requirements("sum", "", ("some", "clients"))
    contrast_weight: float = 0.5
    gram_weight: float = 1.0
    temperature: float = 0.07
    hidden: int = 512
    projected: int = 128
    keep_optimizer: bool = False

    def client_updates(self, task: Task) -> Mapping[str, ClientUpdate]:
        return {"train": TwinSightClient(task, self)}

    def start(self, task: Task, model: Tree) -> Tree:
        if task.network.head != "head":
            raise UserError(
                "twin-sight needs one of halfmoon's networks: its second network has another head in that position."
            )
        like = model["params"]["head"]["weight"]
        g = rng.generator(0, "twin-sight")
        fresh = task.network.init(g)
        twin = {**fresh["params"], "head": linear(g, like.shape[1], self.hidden)}
        twin[PROJECTOR] = linear(g, self.hidden, self.projected)
        params, stats = (tree.to(part, like.device, like.dtype) for part in (twin, fresh["stats"]))
        return {"params": {**model["params"], TWIN: params}, "stats": {**model["stats"], **_named(stats)}}

    def solution(self, task: Task, server: Tree) -> Tree:
        return {name: _without_twin(server.get(name, {})) for name in ("params", "stats")}


def _named(stats: Tree) -> Tree:
    return {TWIN: stats} if stats else {}


def _without_twin(part: Tree) -> Tree:
    return {name: leaf for name, leaf in part.items() if name != TWIN}


@dataclass(frozen=True)
class TwinSightClient(ClientUpdate):
    """The client of Twin-sight."""

    options: TwinSight = TwinSight()

    @property
    def requirements(self) -> UpdateRequirements:
        return UpdateRequirements(
            VIEWS, labeled_views=VIEWS, masks_padding=True, keep_optimizer=self.options.keep_optimizer
        )

    def step(self, broadcast: Tree, carry: Tree, batch: Batch) -> tuple[Tree, StepMetrics]:
        gradient, loss, (passes, guess, terms) = grad_and_value(self._loss, carry["params"], batch)
        own, twin = _without_twin(carry["stats"]), reduce(track, passes[1:], carry["stats"].get(TWIN, {}))
        new = self.advance(carry, gradient, stats={**track(own, passes[0]), **_named(twin)})
        samples = {name: weighted_metric(value) for name, value in terms.items()}
        return new, StepMetrics(loss, samples, (as_pseudo_labels(guess),))

    def passes(self, labeled: int, unlabeled: int) -> Passes:
        return Passes(3 * (labeled + unlabeled), 3 * (labeled + unlabeled))

    def _loss(self, params: Tree, batch: Batch) -> tuple[Tensor, tuple[list[Tree], Tensor, dict[str, Tensor]]]:
        """Return the loss, and (moments of the classifier and the twin, guesses of unlabeled images, its terms)."""
        o, network, twin = self.options, self.task.network, params[TWIN]
        a, b = (torch.cat([batch.x_views[view], batch.u[view]]) for view in VIEWS)
        real = concat(batch.masks(1))
        logits, features, moments = network.embed(params, a, real=real)
        views = () if real is None else (real, real)
        hidden, (own, _), passes = embed_groups(self.task, twin, (a, b), views)
        z = F.linear(F.relu(torch.cat(hidden)), twin[PROJECTOR]["weight"], twin[PROJECTOR]["bias"])
        terms = {"contrast": info_nce(z, o.temperature, concat(views)), "gram": gram_distance(own, features, real)}
        loss = labeled_cross_entropy(logits[: len(batch.x)], batch.y, batch.x_real)
        loss = loss + o.contrast_weight * terms["contrast"] + o.gram_weight * terms["gram"]
        return loss, ([moments, *passes], logits[len(batch.x) :].softmax(-1), terms)


def gram_distance(one: Tensor, other: Tensor, real: Tensor | None = None) -> Tensor:
    """Return the mean squared difference () of the cosines between all (`real`) rows of `one` and of `other` (N, F)."""
    u, v = F.normalize(one, dim=-1), F.normalize(other, dim=-1)
    apart = (u @ u.T - v @ v.T).square()
    return apart.mean() if real is None else mean(row_mean(apart, real), real)


def info_nce(z: Tensor, temperature: float, real: Tensor | None = None) -> Tensor:
    """Compute SimCLR's loss NT-Xent (Chen et al. 2020, Eq. 1).

    Args:
        z: projections (2 N, P); rows i and i + N are the two views of one image.
        temperature: divides the cosine similarities.
        real: (2 N,) bool, False where a row is padding; None if no row is.
    """
    z = F.normalize(z, dim=-1)
    excluded = torch.eye(len(z), dtype=torch.bool, device=z.device)
    if real is not None:
        # A padding row is never a negative for a real row. Among padding rows the partner stays: the loss of such a
        # row does not count, but it has to be finite.
        excluded = excluded | (real[:, None] & ~real)
    similarity = torch.where(excluded, -torch.inf, z @ z.T / temperature)
    partner = torch.arange(len(z), device=z.device).roll(len(z) // 2)
    return labeled_cross_entropy(similarity, partner, real)


ROWS = (
    MethodEntry("twin-sight", "Twin-sight", "Twin-sight, ICLR 2024", "a second network without labels", TwinSight()),
)
