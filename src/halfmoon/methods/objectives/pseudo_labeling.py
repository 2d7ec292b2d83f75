"""Sources of pseudo-labels, and the options that all objectives with weak and strong views share."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from halfmoon.api.types import Batch, ClientData, Passes, PseudoLabels, Task, UpdateRequirements
from halfmoon.core.errors import UserError
from halfmoon.core.tree import Tree, leaves
from halfmoon.methods.objectives.base import (
    Objective,
    compute_mean_prediction,
    count_passes,
    debias_logits,
    forward_weak_and_strong,
    predict_all_rows,
)
from halfmoon.methods.objectives.thresholding import Rule, Threshold, unused_threshold_options
from halfmoon.models import forward

Teacher = Literal["local", "global", "both", "average"]
"""Model that predicts pseudo-labels: the one in training, the received one, the more confident of these two, or the
average of the server's models over the rounds."""


@dataclass(frozen=True, kw_only=True)
class PseudoLabeling:
    """Mixin of objectives with weak and strong views: computes pseudo-labels and decides which of them are used.

    Attributes:
        labels: "step": predict on the weak views of each step; "round": predict once a client update, with the received
            model (FedDB, Algorithm 3) or the average.
        teacher: model that predicts in a step: the one in training ("local"), the received one ("global", which is not
            changed, under its running statistics), for each image the more confident of the two ("both"), or the
            average of the server's models ("average"). The server sends that average with the model. It retains the
            share `teacher_decay` of itself in each round, so it changes less than the model of a small cohort.
        debias: divide each prediction by the average prediction before the threshold is applied. The average is over
            all of the client's rows once a round (FedDB's APP-U), or, with `debias_over` "step", over the images of the
            step, which costs nothing but varies more.
        thresholding, threshold_decay: rule for the pseudo-labels to use (`halfmoon.methods.objectives.thresholding`).

    Raises:
        UserError: `labels` is "round" with a `teacher` that predicts in each step, or `teacher_decay` is not from 0 to
            below 1.
    """

    labels: Literal["step", "round"] = "step"
    teacher: Teacher = "local"
    teacher_decay: float = 0.9
    debias: bool = False
    debias_over: Literal["all", "step"] = "all"
    thresholding: Rule = "fixed"
    threshold_decay: float = 0.999
    threshold: float = 0.95

    def __post_init__(self) -> None:
        if self.labels == "round" and self.teacher not in ("local", "average"):
            raise UserError(
                f"teacher is {self.teacher!r}, but with labels 'round' the received model predicts all labels once a "
                "round: set labels to 'step', or leave teacher out."
            )
        if not 0 <= self.teacher_decay < 1:
            raise UserError(f"teacher_decay is {self.teacher_decay}: it must be at least 0 and below 1.")

    @property
    def unused_options(self) -> dict[str, str]:
        """List the options that have no effect beside the others, each with the reason (`registry.unused_options`)."""
        unused = unused_threshold_options(self.thresholding)
        if self.teacher != "average":
            unused["teacher_decay"] = f"with teacher {self.teacher!r}, which is no average"
        if not self.debias:
            unused["debias_over"] = "without debias"
        return unused

    @property
    def requirements(self) -> UpdateRequirements:
        """Data that pseudo-labeling needs: weak and strong views, and predictions on all images if an option uses them.

        With `labels` "round" predictions are made once, so that steps need no weak views.
        """
        debiases_over_all = self.debias and self.debias_over == "all"
        needs_all_rows = self.labels == "round" or self.threshold_rule.needs_all_rows or debiases_over_all
        return UpdateRequirements(
            views=("strong",) if self.labels == "round" else ("weak", "strong"),
            precomputed_views=("weak",) if needs_all_rows else (),
            masks_padding=True,
            row_memory=self.threshold_rule.row_memory,
        )

    @property
    def server_average_decay(self) -> float | None:
        return self.teacher_decay if self.teacher == "average" else None

    @property
    def teacher_is_received(self) -> bool:
        """True if only models that the server sent predict pseudo-labels."""
        return self.teacher in ("global", "average")

    @property
    def threshold_rule(self) -> Threshold:
        """Rule for the pseudo-labels to use."""
        return Threshold(self.thresholding, self.threshold, self.threshold_decay)

    def prepare(self, task: Task, broadcast: Tree, data: ClientData) -> Tree:
        logits = None
        if self.requirements.precomputed_views:
            model = self.select_teacher(broadcast)
            logits = predict_all_rows(task, model["params"], model["stats"], data.views["weak"], data.u_real)
        return self.cache_predictions(broadcast, data, logits)

    def select_teacher(self, broadcast: Tree) -> Tree:
        """Select the received model that predicts: the average of the server's models, or the server's model."""
        model = broadcast["average"] if self.teacher == "average" else broadcast
        return {"params": model["params"], "stats": model.get("stats", {})}

    def cache_predictions(self, broadcast: Tree, data: ClientData, logits: Tensor | None) -> Tree:
        """Collect what the steps of a client update share: it is computed once, when the update begins.

        Args:
            broadcast: the tree that the server sent.
            data: the client's images; `u_real` masks padding rows.
            logits: predictions of a received model on all unlabeled rows, (U, classes); None if no option uses them.

        Returns:
            Up to four entries:

            - "received": the received model, if it predicts pseudo-labels in each step.
            - "prior": the mean prediction (classes,), by which predictions are divided to debias them; with `logits`.
            - "round_logits": `logits`, if the pseudo-labels of all steps are made from them (`labels` is "round").
            - "thresholds": those of a rule that needs the predictions on all rows.
        """
        cached: Tree = {}
        received_model_predicts_in_steps = self.teacher != "local" and self.labels == "step"
        if received_model_predicts_in_steps:
            cached["received"] = self.select_teacher(broadcast)
        if logits is None:
            return cached
        cached["prior"] = compute_mean_prediction(logits, data.u_real)
        if self.labels == "round":
            cached["round_logits"] = logits
        if self.threshold_rule.needs_all_rows:
            # Thresholds are of the predictions that they are applied to, after debiasing.
            thresholded = debias_logits(logits, cached["prior"]) if self.debias else logits
            # Such a rule stores nothing between client updates.
            cached["thresholds"] = self.threshold_rule.begin(state={}, data=data, p=thresholded.softmax(-1))
        return cached

    def initial_memory(self, task: Task, broadcast: Tree) -> Tree:
        state = self.threshold_rule.initial_memory(task.network.classes, next(leaves(broadcast["params"])))
        return {"thresholds": state} if state else {}

    def begin(self, task: Task, memory: Tree, data: ClientData, cached: Tree) -> Tree:
        if self.threshold_rule.needs_all_rows:
            return {"thresholds": cached["thresholds"]}
        return {"thresholds": self.threshold_rule.begin(memory.get("thresholds", {}), data)}

    def pseudo_label(self, logits: Tensor, batch: Batch, aux: Tree) -> tuple[PseudoLabels, Tree]:
        """Compute the pseudo-labels of a step from logits (b, classes), and the new state of the thresholds."""
        thresholds = aux.get("thresholds", {})
        pseudo, state = self.threshold_rule.pseudo_label(logits.softmax(-1), batch.u_rows, thresholds, batch.u_real)
        return pseudo, {"thresholds": state} if state else {}

    def compute_outputs(
        self, task: Task, params: Tree, stats: Tree, batch: Batch, cached: Tree
    ) -> tuple[Tensor, Tensor, Tensor, list[Tree]]:
        """Run the network on a minibatch, and compute the predictions from which its pseudo-labels are made.

        The predictions are by the model in training, the received model, the more confident of both, or those of the
        start of the round, as the options `labels` and `teacher` select.

        Args:
            task: settings that all methods share: network, optimizer, rules for batch statistics.
            params: parameters of the model in training.
            stats: its running batch-norm statistics.
            batch: the minibatch of B labeled and b unlabeled images.
            cached: the result of `cache_predictions`.

        Returns:
            Logits of labeled images (B, classes) and of strong views (b, classes); detached, debiased predictions
            (b, classes), as logits; and the batch statistics of the passes.
        """
        # In this case the model in training does not predict, so weak views are not part of its pass.
        if self.labels == "round" or self.teacher_is_received:
            groups = (batch.x, batch.u["strong"])
            joint = task.statistics == "joint"
            (labeled, strong), _, moments = forward(task.network, params, joint, groups, real=batch.masks(views=1))
            if self.labels == "round":
                # All images were predicted when the client update started: a lookup in place of a forward pass.
                weak = cached["round_logits"][batch.u_rows]
            else:
                weak = predict_with_received(task, cached, batch.u["weak"])
        else:
            labeled, strong, weak, moments = forward_weak_and_strong(task, params, stats, batch)
            if self.teacher == "both":
                weak = select_more_confident(weak, predict_with_received(task, cached, batch.u["weak"]))
        return labeled, strong, self.debias_predictions(weak, batch, cached), moments

    def debias_predictions(self, logits: Tensor, batch: Batch, cached: Tree) -> Tensor:
        """Debias the predictions (b, classes) of a step, if the option `debias` is set."""
        if not self.debias:
            return logits
        # "all": the mean over all images of the client, computed once; else that over this minibatch.
        prior = cached["prior"] if self.debias_over == "all" else compute_mean_prediction(logits, batch.u_real)
        return debias_logits(logits, prior)

    def passes(self, task: Task, labeled: int, unlabeled: int) -> Passes:
        if self.labels == "round":
            return Passes(labeled + unlabeled, labeled + unlabeled)
        if self.teacher_is_received:
            return Passes(labeled + 2 * unlabeled, labeled + unlabeled)
        # Trained are labeled images and strong views; weak views are predicted, with "both" by two models.
        passes = count_passes(task, labeled + unlabeled, unlabeled)
        return passes._replace(forward=passes.forward + unlabeled) if self.teacher == "both" else passes


class ReceivedModelObjective(Objective):
    """An objective in which the received model also predicts on weak views, in addition to the model in training."""

    @property
    def requirements(self) -> UpdateRequirements:
        return UpdateRequirements(views=("weak", "strong"), masks_padding=True)

    def prepare(self, task: Task, broadcast: Tree, data: ClientData) -> Tree:
        return {"received": {"params": broadcast["params"], "stats": broadcast.get("stats", {})}}

    def passes(self, task: Task, labeled: int, unlabeled: int) -> Passes:
        passes = count_passes(task, labeled + unlabeled, unlabeled)
        return passes._replace(forward=passes.forward + unlabeled)


def refuse_average_teacher(method: str, objective: Objective) -> None:
    """Check that an objective does not need the average of the server's models, which `method` does not compute.

    With `teacher` "average" the running average of the models of past rounds predicts the pseudo-labels. FedAvg computes
    and sends it; methods with another server would train without a teacher.

    Args:
        method: name of the method, for the error message.
        objective: the clients' loss.

    Raises:
        UserError: it needs the average.
    """
    if objective.server_average_decay is not None:
        raise UserError(
            f"teacher is 'average', but {method} computes no average of the server's models: choose another teacher, "
            "or a method that averages by rows, such as fedavg-soft-labels."
        )


@torch.no_grad()
def predict_with_received(task: Task, cached: Tree, images: Tensor) -> Tensor:
    """Compute detached logits (b, classes) of the received model in `cached`, under the statistics it was sent with."""
    return task.network.predict(cached["received"]["params"], cached["received"]["stats"], images).detach()


def select_more_confident(logits: Tensor, other_logits: Tensor) -> Tensor:
    """Select for each row the logits (b, classes) with the larger maximal probability; `logits` if they are equal."""
    other_is_larger = other_logits.softmax(-1).amax(-1) > logits.softmax(-1).amax(-1)
    return torch.where(other_is_larger[:, None], other_logits, logits)
