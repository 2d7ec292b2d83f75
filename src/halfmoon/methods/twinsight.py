"""Twin-sight (Zhang et al., ICLR 2024): each client trains the classifier and an unsupervised network together.

The unsupervised network has the classifier's architecture, with a two-layer projector in place of the head. On two
views a and b of all images of a minibatch, labeled and unlabeled,

    loss = CE(y, classifier(a)) + contrast_weight InfoNCE(second(a), second(b)) + gram_weight mean (U U' - V V')^2,

where InfoNCE is SimCLR's loss between all 2 N projections, at `temperature`. The rows of U and V are the features of
the unsupervised network and of the classifier on view a, scaled to length 1.

server: params and stats, in each the unsupervised network's under "twin".  broadcast: the same.  memory: with
`keep_optimizer`, the optimizer's state.  upload: the trained broadcast, and weight: more than twice FedAvg's bytes.

Departures from the authors' code: it divides the Gram term by `64 ^ 2`, in Python 66, where the square of 64 is meant;
`gram_weight` 62 reproduces it. Its optional FreeMatch loss is left out. The projector has `hidden` and `projected`
units, where the code has 4096 and 2048. The unsupervised network starts from the same values for all seeds, and it is
not part of the solution. Both views are weak.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from typing import ClassVar

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

SECOND = "twin"
"""Key of the unsupervised network in params and stats."""

PROJECTOR = "projector"
VIEWS = ("weak", "weak2")


@dataclass(frozen=True)
class TwinSight(ModelAveraging):
    """Twin-sight with the weights and the temperature of the authors' code.

    Attributes:
        contrast_weight: weight of InfoNCE.
        gram_weight: weight of the squared difference of the Gram matrices.
        temperature: divides the cosine similarities in InfoNCE.
        hidden: units of the projector's first layer.
        projected: units of the projector's second layer.
        keep_optimizer: whether clients keep the optimizer's state between rounds.
    """

    uses_class_weights: ClassVar[bool] = True

    method_requirements = Requirements(aggregation="sum", reason="", label_locations=("some", "clients"))
    contrast_weight: float = 0.5
    gram_weight: float = 1.0
    temperature: float = 0.07
    hidden: int = 512
    projected: int = 128
    keep_optimizer: bool = False

    def client_updates(self, task: Task) -> Mapping[str, ClientUpdate]:
        return {"train": TwinSightClient(task, self)}

    def start(self, task: Task, model: Tree) -> Tree:
        """Build the server's state: the classifier, and Twin-sight's second network, which learns without labels.

        The second network has the classifier's architecture, with a two-layer projector as its head.

        Args:
            task: with the network.
            model: "params" and "stats" of the initial classifier.

        Raises:
            UserError: the classifier's last layer is not named "head", so it cannot be replaced by the projector.
        """
        if task.network.head != "head":
            raise UserError(
                "twin-sight needs one of halfmoon's networks: its second network has another head in that position."
            )
        head = model["params"]["head"]["weight"]
        # A method draws no random numbers of the run: the second network's start is the same for every seed.
        generator = rng.generator(0, "twin-sight")
        initial = task.network.init(generator)
        second = {**initial["params"], "head": linear(generator, head.shape[1], self.hidden)}
        second[PROJECTOR] = linear(generator, self.hidden, self.projected)
        params = tree.to(second, head.device, head.dtype)
        stats = tree.to(initial["stats"], head.device, head.dtype)
        return {"params": {**model["params"], SECOND: params}, "stats": {**model["stats"], **_second_stats(stats)}}

    def solution(self, task: Task, server: Tree) -> Tree:
        return {name: _classifier_only(server.get(name, {})) for name in ("params", "stats")}


def _second_stats(stats: Tree) -> Tree:
    """Name the second network's statistics; {} for networks without any, as flattened trees have no empty nodes."""
    return {SECOND: stats} if stats else {}


def _classifier_only(section: Tree) -> Tree:
    """Drop the unsupervised network from params or stats."""
    return {name: leaf for name, leaf in section.items() if name != SECOND}


@dataclass(frozen=True)
class TwinSightClient(ClientUpdate):
    """The client of Twin-sight: it trains the classifier and the unsupervised network on one loss."""

    options: TwinSight = TwinSight()

    @property
    def requirements(self) -> UpdateRequirements:
        return UpdateRequirements(
            views=VIEWS, labeled_views=VIEWS, masks_padding=True, keep_optimizer=self.options.keep_optimizer
        )

    def step(self, broadcast: Tree, carry: Tree, batch: Batch) -> tuple[Tree, StepMetrics]:
        gradient, loss, (passes, predictions, terms) = grad_and_value(self._loss, carry["params"], batch)
        # The classifier makes the first pass; all further passes are the second network's.
        classifier_stats = track(_classifier_only(carry["stats"]), passes[0])
        second_stats = reduce(track, passes[1:], carry["stats"].get(SECOND, {}))
        new = self.optimizer_step(carry, gradient, stats={**classifier_stats, **_second_stats(second_stats)})
        samples = {name: weighted_metric(value) for name, value in terms.items()}
        return new, StepMetrics(loss, samples=samples, pseudo=(as_pseudo_labels(predictions),))

    def passes(self, labeled: int, unlabeled: int) -> Passes:
        return Passes(3 * (labeled + unlabeled), 3 * (labeled + unlabeled))

    def _loss(self, params: Tree, batch: Batch) -> tuple[Tensor, tuple[list[Tree], Tensor, dict[str, Tensor]]]:
        """Compute Twin-sight's loss: cross-entropy, the second network's contrastive loss, and their Gram distance.

        The second network learns without labels, that two views of an image are more similar than views of others
        (InfoNCE of SimCLR). The Gram distance compares the similarities between images in both networks' features, so
        that the classifier learns them.

        Args:
            params: parameters of the classifier and (in `SECOND`) of the network that learns without labels.
            batch: the minibatch; two views of each labeled and unlabeled image.

        Returns:
            The loss (), and (batch statistics of both networks' passes, predictions on unlabeled images (b, classes),
            the contrastive and the Gram term).
        """
        options = self.options
        second = params[SECOND]
        first_view, second_view = (torch.cat([batch.x_views[view], batch.u[view]]) for view in VIEWS)
        mask = concat(batch.masks(views=1))
        logits, features, moments = self.task.network.embed(params, first_view, real=mask)
        view_masks = () if mask is None else (mask, mask)
        # The second network's head is the projector's hidden layer; `second_features` are those of the first view.
        hidden, (second_features, _), passes = embed_groups(self.task, second, (first_view, second_view), view_masks)
        projections = F.linear(F.relu(torch.cat(hidden)), second[PROJECTOR]["weight"], second[PROJECTOR]["bias"])
        terms = {
            "contrast": compute_info_nce(projections, options.temperature, concat(view_masks)),
            "gram": compute_gram_distance(second_features, features, mask),
        }
        # Rows of `logits`: first the labeled images, then the unlabeled ones.
        labeled_logits = logits[: len(batch.x)]
        unlabeled_logits = logits[len(batch.x) :]
        loss = labeled_cross_entropy(labeled_logits, batch.y, batch.x_real, self.task.class_weights)
        loss = loss + options.contrast_weight * terms["contrast"] + options.gram_weight * terms["gram"]
        return loss, ([moments, *passes], unlabeled_logits.softmax(-1), terms)


def compute_gram_distance(features: Tensor, other_features: Tensor, real: Tensor | None = None) -> Tensor:
    """Compute the mean squared difference () of two networks' matrices of cosine similarities between images.

    Args:
        features: features of a network, (N, F).
        other_features: features of another network on the same images, (N, F).
        real: (N,) bool, False where a row is padding; None if no row is.
    """
    unit = F.normalize(features, dim=-1)
    other_unit = F.normalize(other_features, dim=-1)
    difference = (unit @ unit.T - other_unit @ other_unit.T).square()
    # Padding rows are excluded from both means: the one over columns and the one over rows.
    return difference.mean() if real is None else mean(row_mean(difference, real), real)


def compute_info_nce(projections: Tensor, temperature: float, real: Tensor | None = None) -> Tensor:
    """Compute SimCLR's contrastive loss NT-Xent (Chen et al. 2020, Eq. 1).

    Args:
        projections: (2 N, P); rows i and i + N are the two views of one image.
        temperature: divides the cosine similarities.
        real: (2 N,) bool, False where a row is padding; None if no row is.

    Returns:
        The mean over rows, ().
    """
    unit = F.normalize(projections, dim=-1)
    # A row is no negative for itself.
    excluded = torch.eye(len(unit), dtype=torch.bool, device=unit.device)
    if real is not None:
        # A padding row is never a negative for a real row. Padding rows retain their partner: the loss of such a row
        # does not count, but it has to be finite.
        excluded = excluded | (real[:, None] & ~real)
    similarity = torch.where(excluded, -torch.inf, unit @ unit.T / temperature)
    # The loss is the cross-entropy of finding the image's other view, N rows further, among all rows.
    partner = torch.arange(len(unit), device=unit.device).roll(len(unit) // 2)
    return labeled_cross_entropy(similarity, partner, real)


ROWS = (
    MethodEntry("twin-sight", "Twin-sight", "Twin-sight, ICLR 2024", "a second network without labels", TwinSight()),
)
