"""ReMixMatch (Berthelot et al. 2020): aligned predictions on weak views label mixed, plain and rotated images."""

from dataclasses import dataclass, field
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from halfmoon.api.types import Batch, ClientData, Passes, Task, UpdateRequirements
from halfmoon.core.errors import UserError
from halfmoon.core.padding import concat, row_mean
from halfmoon.core.tree import Tree
from halfmoon.methods.objectives.base import (
    EMPTY,
    FedAvgRow,
    Objective,
    Ramp,
    StepResult,
    as_pseudo_labels,
    count_passes,
    embed_groups,
    forward_and_predict,
    labeled_cross_entropy,
    mix_rows,
    one_hot,
    ramp_weight,
    sharpen,
    soft_cross_entropy,
    unused_ramp_options,
)

TINY = 1e-6
"""Added to both class frequencies before one is divided by the other (the authors' code)."""


@dataclass(frozen=True)
class ReMixMatch(Objective):
    """CE(y', f(x')) + w CE(q', f(u')) + v CE(q, f(strong)) + r CE(turn, rotation head of the turned strong view).

    q is the weak view's prediction, times labeled class frequencies over the running mean of all predictions (`align`),
    normalized, sharpened with `temperature`. Primes are mixtures, as in MixMatch, of the labeled images (a strong view
    of them; batch.x without `strong_labels`), the weak view, and `anchors` strong views. The terms with v and r use the
    first strong view, unmixed. Weights are w = `unlabeled_weight`, v = `anchor_weight`, r = `rotation_weight`; w and v
    grow over the first `ramp` (a share) of the rounds. The averaged teacher of `decay` is only used for evaluation.

    The running mean of the predictions, with the decay `alignment_decay` (the authors' code: the mean of the last 128),
    starts uniform, and is sent and averaged with the model; the class frequencies are each client's. The rotation head,
    a linear layer on the input of the network's head, starts at zero and is sent and averaged too, but is not part of
    the solution. Defaults are the paper's, except 2 strong views instead of 8.

    Departures: the strong views are the run's (no CTAugment); one mixing coefficient a step, not one for each image;
    each image is turned at random, while the code turns a quarter of the batch in each direction.

    Raises:
        UserError: `anchors` is below 1, or images to turn are not square.
    """

    uses_class_weights: ClassVar[bool] = True

    heads: ClassVar[tuple[str, ...]] = ("rotation",)
    unlabeled_weight: float = 1.5
    anchor_weight: float = 0.5
    rotation_weight: float = 0.5
    temperature: float = 0.5
    concentration: float = 0.75
    anchors: int = 2
    strong_labels: bool = True
    align: bool = True
    alignment_decay: float = 1 - 1 / 128
    ramp: float = 1 / 64
    ramp_shape: Ramp = "linear"
    decay: float | None = field(default=0.999, kw_only=True)

    def __post_init__(self) -> None:
        if self.anchors < 1:
            raise UserError(f"anchors is {self.anchors}: ReMixMatch needs at least 1 strong view.")

    @property
    def unused_options(self) -> dict[str, str]:
        """List the options that have no effect beside the others, each with the reason (`registry.unused_options`)."""
        unused = unused_ramp_options(self.ramp)
        if not self.align:
            unused["alignment_decay"] = "without align"
        return unused

    @property
    def requirements(self) -> UpdateRequirements:
        views = ("weak", "strong", *(f"strong{n}" for n in range(2, self.anchors + 1)))
        labeled_views = ("strong",) if self.strong_labels else ()
        return UpdateRequirements(views, labeled_views=labeled_views, mixup=self.concentration, masks_padding=True)

    @property
    def shared_names(self) -> tuple[str, ...]:
        return (*super().shared_names, *(["predicted"] if self.align else []))

    def start(self, task: Task, model: Tree) -> Tree:
        task.network.check_head_name("ReMixMatch")
        head = model["params"]["head"]["weight"]
        # A second head predicts by which of four angles an image was rotated.
        rotation = {"weight": head.new_zeros(4, head.shape[1]), "bias": head.new_zeros(4)}
        server = super().start(task, {**model, "params": {**model["params"], "rotation": rotation}})
        return {**server, "predicted": head.new_full((len(head),), 1 / len(head))} if self.align else server

    def prepare(self, task: Task, broadcast: Tree, data: ClientData) -> Tree:
        if not self.align:
            return {}
        # Rows from number `labeled` on are padding.
        is_real = (torch.arange(len(data.y), device=data.y.device) < data.labeled)[:, None]
        counts = (one_hot(data.y, task.network.classes, broadcast["predicted"]) * is_real).sum(0)
        return {"label_frequencies": counts / data.labeled.clamp_min(1)}

    def __call__(
        self, task: Task, params: Tree, stats: Tree, batch: Batch, aux: Tree = EMPTY, cached: Tree = EMPTY
    ) -> tuple[Tensor, StepResult]:
        """Compute ReMixMatch's loss on mixed labeled, mixed unlabeled, plain strong, and rotated images.

        Args:
            task: settings that all methods share: network, optimizer, rules for batch statistics.
            params: parameters of the network and of the rotation head, in which the loss is differentiated.
            stats: running batch-norm statistics.
            batch: the minibatch, with the draws of mixup and rotations.
            aux: "predicted" (classes,), the running mean of predictions.
            cached: "label_frequencies" (classes,) of the client's labels.

        Returns:
            The loss (), and batch statistics, pseudo-labels and the new running mean.
        """
        groups = (
            batch.x_views["strong"] if self.strong_labels else batch.x,
            *(batch.u[name] for name in self.requirements.views),
        )
        mix = batch.mixing["mix"]
        order = batch.mixing["order"]
        mixtures = torch.split(mix_rows(torch.cat(groups), mix, order), [len(group) for group in groups])
        strong_images = batch.u["strong"]
        turned = quarter_turns(strong_images, batch.mixing["turn"]) if self.rotation_weight else None
        # In the order of the groups: mixtures of labeled images, those of each view of unlabeled ones, plain strong
        # views.
        (labeled, *unlabeled, strong), weak, rotations, moments = self._compute_outputs(
            task, params, stats, (*mixtures, strong_images), turned, batch
        )
        prediction, new_aux = self._align_predictions(weak.softmax(-1), aux, cached, batch.u_real)
        pseudo_labels = sharpen(prediction, self.temperature)
        labels = one_hot(batch.y, task.network.classes, pseudo_labels)
        # Labels are mixed in the order of the images: all views of an unlabeled image have the same pseudo-label.
        targets = mix_rows(torch.cat([labels, *[pseudo_labels] * len(unlabeled)]), mix, order)
        labeled_targets = targets[: len(labels)]
        unlabeled_targets = targets[len(labels) :]
        ramp = ramp_weight(task, 1.0, self.ramp, self.ramp_shape)
        unlabeled_mask = concat(batch.masks(views=len(unlabeled))[1:])
        loss = soft_cross_entropy(labeled, labeled_targets, batch.x_real, task.class_weights)
        mixed_loss = soft_cross_entropy(torch.cat(unlabeled), unlabeled_targets, unlabeled_mask)
        loss = loss + ramp * self.unlabeled_weight * mixed_loss
        loss = loss + ramp * self.anchor_weight * soft_cross_entropy(strong, pseudo_labels, batch.u_real)
        if turned is not None:
            rotation_loss = labeled_cross_entropy(rotations, batch.mixing["turn"], batch.u_real)
            loss = loss + self.rotation_weight * rotation_loss
        return loss, StepResult(moments, pseudo=(as_pseudo_labels(prediction),), aux=new_aux)

    def passes(self, task: Task, labeled: int, unlabeled: int) -> Passes:
        trained = labeled + (2 + self.anchors + bool(self.rotation_weight)) * unlabeled
        return count_passes(task, trained, unlabeled)

    def _align_predictions(
        self, prediction: Tensor, aux: Tree, cached: Tree, real: Tensor | None
    ) -> tuple[Tensor, Tree]:
        """Align predictions with the class frequencies of the labels (ReMixMatch's distribution alignment).

        Over many images, pseudo-labels then have the same class frequencies as the client's labels.

        Args:
            prediction: probabilities of b images, (b, classes).
            aux: "predicted" (classes,), the running mean of predictions.
            cached: "label_frequencies" (classes,).
            real: (b,) bool, False for padding rows; None if no row is padding.

        Returns:
            prediction * label frequencies / running mean, normalized, (b, classes); and the new running mean.
        """
        if not self.align:
            return prediction, {}
        aligned = prediction * (cached["label_frequencies"] + TINY) / (aux["predicted"] + TINY)
        predicted = torch.lerp(aux["predicted"], row_mean(prediction, real), 1 - self.alignment_decay)
        return aligned / aligned.sum(-1, keepdim=True), {"predicted": predicted}

    def _compute_outputs(
        self,
        task: Task,
        params: Tree,
        stats: Tree,
        train_groups: tuple[Tensor, ...],
        turned: Tensor | None,
        batch: Batch,
    ) -> tuple[list[Tensor], Tensor, Tensor, list[Tree]]:
        """Run the network on all images of a ReMixMatch step, in as few passes as the statistics allow.

        Args:
            task: settings that all methods share: network, optimizer, rules for batch statistics.
            params: parameters of the network and of the rotation head.
            stats: running batch-norm statistics.
            train_groups: groups of images whose logits get gradients.
            turned: rotated images (b, C, H, W), whose rotation is predicted; None: no rotation loss.
            batch: labeled images x, labels y, views u of unlabeled images; x_real and u_real mask padding.

        Returns:
            Logits of each of `train_groups`; detached logits of the weak views; outputs of the rotation head (b, 4);
            and the batch statistics of the passes.
        """
        head = params["rotation"]
        weak = batch.u["weak"]
        # Separate batch statistics: each group of images has a forward pass of its own.
        if turned is None or task.statistics == "separate":
            real = batch.masks(views=len(train_groups))
            logits, (weak_logits,), moments = forward_and_predict(task, params, stats, train_groups, (weak,), real)
            if turned is None:
                return logits, weak_logits, weak.new_zeros(0, 4), moments
            _, features, turned_moments = task.network.embed(params, turned, real=batch.u_real)
            rotations = F.linear(features, head["weight"], head["bias"])
            return logits, weak_logits, rotations, [*moments, turned_moments]
        # Joint: all groups share one pass, also the weak views, unless running statistics normalize these.
        groups = (*train_groups, turned, weak) if task.labeling == "batch" else (*train_groups, turned)
        logits, features, moments = embed_groups(task, params, groups, batch.masks(views=len(groups) - 1))
        rotations = F.linear(features[len(train_groups)], head["weight"], head["bias"])
        if task.labeling == "batch":
            weak_logits = logits[-1].detach()
        else:
            with torch.no_grad():
                weak_logits = task.network.predict(params, stats, weak).detach()
        return logits[: len(train_groups)], weak_logits, rotations, moments


def quarter_turns(images: Tensor, turns: Tensor) -> Tensor:
    """Turn each image counter-clockwise by a multiple of 90 degrees, which ReMixMatch's rotation head has to predict.

    Args:
        images: (b, C, H, H).
        turns: number of quarter turns of each image, from 0 to 3, (b,) int64.

    Raises:
        UserError: the images are not square.
    """
    if images.shape[-1] != images.shape[-2]:
        height, width = images.shape[-2:]
        raise UserError(
            f"ReMixMatch turns images by 90 degrees, but these are {height}x{width}: pad them to a square "
            "(image_size), or set rotation_weight = 0."
        )
    # vmap cannot turn each image by its own angle: compute all four and select.
    all_turns = torch.stack([torch.rot90(images, k, (-2, -1)) for k in range(4)])
    return all_turns[turns, torch.arange(len(images), device=images.device)]


ROWS = (
    FedAvgRow("remixmatch", "ReMixMatch", "Berthelot et al. 2020",
              "aligned predictions label strong views, mixed and turned", ReMixMatch(), pooled=True),
)  # fmt: skip
