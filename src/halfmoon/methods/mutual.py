"""Mutual learning of two models at one client: functions that FedLoKe and FML share.

Both models process their images first, then both take a step: each learns from the prediction that the other made
before its step.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from halfmoon.api.types import ClientData, ClientUpdate, PseudoLabels, Task
from halfmoon.api.uploads import UploadSpec
from halfmoon.core import tree
from halfmoon.core.autodiff import grad_and_value, vjp
from halfmoon.core.tree import Tree
from halfmoon.methods.averaging import select_model

Weights = Literal["size", "uniform"]
"""Weight of a client's upload: |labeled| + |unlabeled| rows (McMahan et al. 2017), or 1."""

Outputs = tuple[tuple[Tensor, Tensor], tuple[Tensor, list[Tree]]]
"""((logits of labeled images, logits of unlabeled ones), (detached predictions, moments of the passes))."""


class ModelOutputs(NamedTuple):
    """Outputs of one model for a minibatch, and the function that differentiates them.

    Attributes:
        labeled: logits of the labeled images, (B, classes).
        unlabeled: logits of the unlabeled images, (b, classes).
        prediction: detached logits that label the images for the other model, (b, classes).
        moments: batch statistics of the passes.
        backward: computes the gradient in the parameters, as `halfmoon.core.autodiff.vjp` returns it.
    """

    labeled: Tensor
    unlabeled: Tensor
    prediction: Tensor
    moments: list[Tree]
    backward: Callable[[tuple[Tensor, Tensor], bool], Tree]


def init_training(task: Task, model: Tree) -> Tree:
    """Build {"params", "stats", "optimizer"} of a model, with a new optimizer state."""
    return {**model, "optimizer": task.optimizer.init(model["params"])}


def select_memory(model: Tree, *names: str) -> Tree:
    """Select sections of a model for the client memory, without empty ones: a flattened tree cannot contain these."""
    return {name: model[name] for name in names if model[name]}


def initial_private_model(
    task: Task, broadcast: Tree, private: Literal["copy", "fresh"], generator: torch.Generator
) -> Tree:
    """Build a client's first private model: a copy of the received model, or a randomly initialized network."""
    if private == "copy":
        return select_model(broadcast)
    model_leaf = next(tree.leaves(broadcast["params"]))
    return tree.to(task.network.init(generator), model_leaf.device, model_leaf.dtype)


def as_pseudo_labels(logits: Tensor, weight: Tensor) -> PseudoLabels:
    """Turn logits (b, classes) into pseudo-labels with these weights (b,)."""
    confidence, label = logits.softmax(-1).max(-1)
    return PseudoLabels(label, confidence, weight)


def run_and_record(forward: Callable[[Tree], Outputs], params: Tree) -> ModelOutputs:
    """Compute a model's outputs, and record the forward pass, so that their gradient needs no second one.

    Args:
        forward: computes, from parameters, the logits (labeled, unlabeled) to differentiate, and (prediction, moments),
            which are not differentiated.
        params: the model's parameters.
    """
    (labeled, unlabeled), backward, (prediction, moments) = vjp(forward, params)
    return ModelOutputs(labeled, unlabeled, prediction, moments, backward)


def optimizer_step(
    update: ClientUpdate, model: Tree, outputs: ModelOutputs, loss: Callable[[Tensor, Tensor], Tensor]
) -> tuple[Tree, Tensor]:
    """Take one optimizer step of one of two models that learn from each other; its forward pass has already been made.

    Args:
        update: the client update, with the optimizer.
        model: parameters, running statistics and optimizer state.
        outputs: the model's outputs on the minibatch, with the recorded pass.
        loss: a function of the logits of labeled (B, classes) and unlabeled images (b, classes).

    Returns:
        The model after the step, and the loss ().
    """
    # The network was run once, before the other model's step. The loss is differentiated in the logits only, and its
    # gradient there is back-propagated through the stored pass.
    logits = {"labeled": outputs.labeled, "unlabeled": outputs.unlabeled}
    logit_gradient, value, _ = grad_and_value(lambda z: (loss(z["labeled"], z["unlabeled"]), ()), logits)
    # False: the stored pass is not needed again, and is freed.
    gradient = outputs.backward((logit_gradient["labeled"], logit_gradient["unlabeled"]), False)
    return update.optimizer_step(model, gradient, outputs.moments, consume=True), value


def divergence(teacher: Tensor, student: Tensor) -> Tensor:
    """Compute KL(softmax(teacher) || softmax(student)) (n,) in nats from logits (n, classes)."""
    target = teacher.detach().log_softmax(-1)
    return (target.exp() * (target - student.log_softmax(-1))).sum(-1)


def select_low_entropy(logits: Tensor, max_entropy: float | None) -> Tensor:
    """Select the predictions that are certain enough to be pseudo-labels: those with a low entropy.

    Args:
        logits: (n, classes).
        max_entropy: entropy in nats below which a prediction is selected; None selects all.

    Returns:
        1 for selected predictions and 0 for others, (n,), in the dtype of the logits.
    """
    if max_entropy is None:
        return torch.ones_like(logits[:, 0])
    log_probabilities = logits.log_softmax(-1)
    entropy = -(log_probabilities.exp() * log_probabilities).sum(-1)
    return (entropy < max_entropy).to(logits.dtype)


def upload_spec_for(weights: Weights) -> UploadSpec:
    """Declare the upload of one model with its weight."""
    return UploadSpec(weight="rows" if weights == "size" else "one")


def upload_weight(data: ClientData, weights: Weights) -> Tensor:
    """Compute the weight () of a client's upload."""
    rows = data.rows
    return rows if weights == "size" else torch.ones_like(rows)
