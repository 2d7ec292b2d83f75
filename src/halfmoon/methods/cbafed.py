"""CBAFed (Li et al., CVPR 2023): pseudo-labels fixed for a client update, and thresholds that balance the classes.

When a client update begins, the client labels all its rows once with the received model, and trains on those that pass
a threshold. The threshold of a class follows its share of all training labels of the last round, labels and accepted
pseudo-labels of all clients together. With r(c) = share(c) C / 10,

    T(c) = min(threshold_most, r(c) + threshold - std(r)).

If the most likely class of a row does not pass, the second one is accepted if it is in the tail (r < tail). Residual
weights slow the model down: every `residual_every` rounds the server replaces the model by residual * saved +
(1 - residual) * new, where "saved" is the blend of the last time. A client with labels does the same every
`local_residual_every` epochs of a client update, with the share `local_residual`.

server: params, stats, share (classes,), saved (params, stats).  broadcast: params, stats, share.  memory: the
optimizer's state.  upload: params, stats, share (that of the client's training labels), and weight, the number of
images it trained on; so the server needs only a weighted mean.

Departures: clients with labels train `labeled_epochs` times as long (theirs: 11, so that the local residual acts twice;
learning rates of 0.03 with labels and 0.02 without). Accepted rows get a new weak view each time (theirs are trained on
as they were cropped when labeled). A client with labels uses its unlabeled rows as well; the two kinds have separate
means. `warmup` is the share of the rounds that train on labels only (theirs: 501 epochs of the one labeled client
before 501 rounds); without it, second classes of an untrained model would be accepted. The standard deviation is that
of the population, not of a sample. Their ten-fold weight of labeled clients on skin images is left out.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from halfmoon.api.method_entry import MethodEntry
from halfmoon.api.requirements import Requirements
from halfmoon.api.types import (
    Batch,
    ClientData,
    ClientUpdate,
    Federation,
    PseudoLabels,
    StepMetrics,
    Task,
    UpdateRequirements,
    weighted_metric,
)
from halfmoon.api.uploads import Upload, UploadSpec
from halfmoon.core import padding, tree
from halfmoon.core.autodiff import grad_and_value
from halfmoon.core.errors import check_minimum
from halfmoon.core.tree import Tree
from halfmoon.methods.averaging import ModelAveraging, select_model
from halfmoon.methods.objectives.base import (
    RoundLabelingClient,
    cross_entropy_per_image,
    labeled_cross_entropy,
    one_hot,
    predict_all_rows,
)
from halfmoon.models import forward

REFERENCE_CLASSES = 10
"""Number of classes for which the authors chose their constants."""


@dataclass(frozen=True)
class CBAFed(ModelAveraging):
    """CBAFed with the constants of the authors' code (threshold_most is 0.9 on SVHN and skin images).

    `tail` None never accepts second classes, `adaptive` False sets every threshold to `threshold`, and `residual` 0 and
    `local_residual` 0 disable the residual weights.

    Raises:
        UserError: an interval is below 1.
    """

    uses_class_weights: ClassVar[bool] = True

    method_requirements = Requirements(aggregation="sum", reason="", label_locations=("some", "clients"))
    threshold: float = 0.84
    threshold_most: float = 0.95
    tail: float | None = 0.03
    adaptive: bool = True
    unlabeled_weight: float = 1.0
    residual: float = 0.5
    residual_every: int = 5
    local_residual: float = 0.8
    local_residual_every: int = 5
    warmup: float = 0.5
    labeled_epochs: int = 1
    keep_optimizer: bool = True

    def __post_init__(self) -> None:
        check_minimum(self, 1, "residual_every", "local_residual_every", "labeled_epochs")

    def client_updates(self, task: Task) -> Mapping[str, ClientUpdate]:
        return {"train": CBAFedClient(task, self)}

    def start(self, task: Task, model: Tree) -> Tree:
        # Before the first upload all classes have the same share. The first model is the saved one.
        classes = task.network.classes
        like = next(tree.leaves(model["params"]))
        return {**model, "share": like.new_full((classes,), 1 / classes), "saved": dict(model)}

    def round(self, task: Task, server: Tree, federation: Federation) -> Tree:
        """Run a round of CBAFed: train the cohort, average, and every `residual_every` rounds blend in an older model.

        Args:
            task: the settings that all methods share, with the round.
            server: the server's state: model, class shares of the training labels, and the last blend ("saved").
            federation: the clients of this round.
        """
        # A network without batch normalization has no "stats".
        broadcast: Tree = {"stats": {}, **{name: section for name, section in server.items() if name != "saved"}}
        new = federation.average("train", broadcast).update
        saved: Tree = {"stats": {}, **server["saved"]}
        # Residual weight connection: every few rounds the new model is blended with the last saved blend.
        if self.residual and (task.round + 1) % self.residual_every == 0:
            saved = blend_with_saved({name: new[name] for name in ("params", "stats")}, saved, self.residual)
            new = {**new, **saved}
        return {**new, "saved": saved}

    def thresholds(self, share: Tensor) -> tuple[Tensor, Tensor]:
        """Compute a confidence threshold for each class, and find the rare classes (CBAFed, CVPR 2023).

        Args:
            share: each class's share of all labels and accepted pseudo-labels of the last round, (classes,).

        Returns:
            The thresholds (classes,), and whether a class is rare ("in the tail"), (classes,) bool.
        """
        # The constants were chosen for 10 classes; with this factor a uniform share is 0.1 for any number of classes.
        scaled_share = share * len(share) / REFERENCE_CLASSES
        if self.adaptive:
            # Frequent classes need more confidence; an uneven distribution lowers all thresholds.
            thresholds = scaled_share + self.threshold - scaled_share.std(correction=0)
            thresholds = thresholds.clamp_max(self.threshold_most)
        else:
            thresholds = torch.full_like(scaled_share, self.threshold)
        if self.tail is None:
            in_tail = torch.zeros_like(scaled_share, dtype=torch.bool)
        else:
            in_tail = scaled_share < self.tail
        return thresholds, in_tail


def blend_with_saved(new: Tree, saved: Tree, share: float) -> Tree:
    """Compute share * saved + (1 - share) * new."""
    return tree.map(lambda saved_leaf, new_leaf: torch.lerp(new_leaf, saved_leaf, share), saved, new)


@dataclass(frozen=True)
class CBAFedClient(RoundLabelingClient):
    """The client of CBAFed."""

    options: CBAFed = CBAFed()

    @property
    def requirements(self) -> UpdateRequirements:
        return UpdateRequirements(
            views=("weak",),
            precomputed_views=("weak",),
            labeled_epochs=self.options.labeled_epochs,
            masks_padding=True,
            keep_optimizer=self.options.keep_optimizer,
            upload_spec=UploadSpec(update=("params", "stats", "share")),
        )

    def begin(self, broadcast: Tree, memory: Tree, data: ClientData) -> Tree:
        """Build the state of a client update; CBAFed computes the pseudo-labels of all images here, once.

        Args:
            broadcast: the server's model, and each class's share of all training labels ("share").
            memory: the state that the client stored after its last update.
            data: the client's images; predictions use their weakly augmented views.
        """
        logits = predict_all_rows(self.task, broadcast["params"], broadcast["stats"], data.views["weak"], data.u_real)
        pseudo = self.pseudo_label(logits.softmax(-1), broadcast["share"])
        pseudo = pseudo._replace(weight=padding.mask(pseudo.weight, data.u_real))
        # During the warm-up, a share of the run's rounds, clients train on labels only.
        if self.task.round < self.options.warmup * self.task.rounds:
            pseudo = pseudo._replace(weight=torch.zeros_like(pseudo.weight))
        saved: Tree = {}
        if self.options.local_residual:
            saved = {"params": broadcast["params"], "stats": broadcast["stats"]}
        return {
            **super().begin(broadcast, memory, data),  # "params", "stats" and "optimizer"
            **pseudo._asdict(),  # "label", "confidence" and "weight" of every unlabeled row, (U,)
            "real": data.real,  # masks of the rows that are not padding
            "labeled": data.labeled.double(),  # number of labeled images
            "images": torch.zeros_like(data.labeled, dtype=torch.float64),  # labeled images of all steps so far
            "saved": saved,  # the model of the last blend
        }

    def pseudo_label(self, p: Tensor, share: Tensor) -> PseudoLabels:
        """Turn predictions into pseudo-labels: the first class if it passes its threshold, or a rare second class.

        Args:
            p: predicted probabilities of U images, (U, classes).
            share: the classes' shares of all training labels, (classes,), which determine the thresholds.

        Returns:
            Labels and confidences (U,), and weights (U,): 1 for images to train on, 0 for others.
        """
        thresholds, in_tail = self.options.thresholds(share)
        top_p, top_class = p.topk(2, -1)
        first_p, second_p = top_p.unbind(-1)
        first_class, second_class = top_class.unbind(-1)
        first_passes = first_p > thresholds[first_class]
        # A rare class is accepted as the second choice if the first one is not confident.
        accepted = first_passes | in_tail[second_class]
        # Rows that are not accepted report the first class, with the weight 0.
        takes_second = accepted & ~first_passes
        label = torch.where(takes_second, second_class, first_class)
        confidence = torch.where(takes_second, second_p, first_p)
        return PseudoLabels(label, confidence, accepted.to(p.dtype))

    def step(self, broadcast: Tree, carry: Tree, batch: Batch) -> tuple[Tree, StepMetrics]:
        """Take one optimizer step of CBAFed; every few epochs of the labeled images, blend in the saved model.

        Args:
            broadcast: the server's tree.
            carry: the entries that `begin` creates.
            batch: labeled images x, labels y, views u of unlabeled images; x_real and u_real mask padding.
        """
        gradient, loss, (moments, pseudo) = grad_and_value(self._loss, carry["params"], carry, batch)
        new = self.optimizer_step(carry, gradient, moments)
        images = carry["images"] + padding.count(batch.x, batch.x_real)
        if saved := carry["saved"]:
            model = select_model(new)
            # Blend if the number of seen images passes a multiple of the interval. It is counted in images and not in
            # steps, because an epoch may end in the middle of a batch. Both models are computed and one is selected,
            # because clients of a vmap cannot branch.
            interval = (carry["labeled"] * self.options.local_residual_every).clamp_min(1)
            interval_ends = (images / interval).floor() > (carry["images"] / interval).floor()
            blend = blend_with_saved(model, saved, self.options.local_residual)
            new |= {**tree.select(interval_ends, blend, model), "saved": tree.select(interval_ends, blend, saved)}
        # The metric "kept" is the share of all unlabeled images of the client whose pseudo-label `begin` accepted.
        accepted = (carry["weight"] > 0).to(loss.dtype)
        samples = {"kept": weighted_metric(accepted, carry["real"].get("u"))}
        return {**new, "images": images}, StepMetrics(loss, samples=samples, pseudo=(pseudo,))

    def finish(self, broadcast: Tree, carry: Tree, data: ClientData) -> tuple[Upload, Tree]:
        """Upload the model and the classes' shares of this client's training labels, weighted by their number.

        Training labels are true labels and accepted pseudo-labels. From these shares the server computes the
        thresholds of the next round.

        Args:
            broadcast: the tree that the server sent, with the old class shares.
            carry: state of the client update, with the pseudo-labels of all unlabeled images.
            data: the client's images and labels.

        Returns:
            The upload, and the state that the client stores.
        """
        old_share = broadcast["share"]
        classes = len(old_share)
        # Rows from number `labeled` on are padding.
        is_real = (torch.arange(len(data.y), device=data.y.device) < data.labeled).to(old_share)
        class_counts = (one_hot(data.y, classes, old_share) * is_real[:, None]).sum(0)
        class_counts = class_counts + (one_hot(carry["label"], classes, old_share) * carry["weight"][:, None]).sum(0)
        total = class_counts.sum()
        share = torch.where(total > 0, class_counts / total.clamp_min(1), old_share)
        upload, memory = super().finish(broadcast, carry, data)
        # The sum of ones in floating point is rounded to the number of images that it is.
        return Upload({**upload.update, "share": share}, weight=total.round().double()), memory

    def _loss(self, params: Tree, carry: Tree, batch: Batch) -> tuple[Tensor, tuple[list[Tree], PseudoLabels]]:
        """Compute CBAFed's loss: CE(labels) + unlabeled_weight * CE(accepted pseudo-labels), each a mean over images.

        Args:
            params: parameters of the network, in which the loss is differentiated.
            carry: state of the client update, with the pseudo-labels of all images, predicted when it started; "weight" is
                1 for accepted ones and 0 for others.
            batch: labeled images x, labels y, views u of unlabeled images; x_real and u_real mask padding.

        Returns:
            The loss (), and (batch statistics of the pass, the minibatch's pseudo-labels).
        """
        groups = (batch.x, batch.u["weak"])
        # "joint": labeled and unlabeled images share a forward pass, and so their batch statistics.
        joint = self.task.statistics == "joint"
        (labeled, logits), _, moments = forward(self.task.network, params, joint, groups, real=batch.masks(views=1))
        pseudo = PseudoLabels(
            label=carry["label"][batch.u_rows],
            confidence=carry["confidence"][batch.u_rows],
            weight=padding.mask(carry["weight"][batch.u_rows], batch.u_real),
        )
        pseudo_losses = cross_entropy_per_image(logits, pseudo.label) * pseudo.weight
        pseudo_loss = pseudo_losses.sum() / pseudo.weight.sum().clamp_min(1)
        labeled_loss = labeled_cross_entropy(labeled, batch.y, batch.x_real, self.task.class_weights)
        return labeled_loss + self.options.unlabeled_weight * pseudo_loss, (moments, pseudo)


ROWS = (MethodEntry("cbafed", "CBAFed", "CBAFed, CVPR 2023", "thresholds that balance the classes", CBAFed()),)
