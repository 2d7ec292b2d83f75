"""FedCon (Long et al. 2021): the server trains the classifier, clients the features, on two views of each image.

The server trains f on two views x, x' of each labeled image, with a target g that is a running mean of f:

    loss = (CE(y, f(x)) + CE(y, f(x')) + w (KL(g(x') || f(x)) + KL(g(x) || f(x')))) / 2, mean over images,

w = `consistency_weight` exp(-5 (1 - t)^2), where t grows to 1 over the first `ramp` (a share) of the rounds. A client
trains h, all of f but its head. A two-layer predictor q, with a hidden layer three times as wide as the features,
predicts the features of the other view under a target k, a running mean of h. q and k are stored at their client:

    loss = -(s(q(h(weak)), k(weak2)) + s(q(h(weak2)), k(weak))) / 2, mean over images, s the cosine.

Clients have equal weights in the average.

server: params, stats.  broadcast: the same.  memory: the target; at clients the predictor, at the server the target's
steps.  upload: params, with the received head if there is no label, stats, weight (1, or 0 without an image).

Formulas and constants are those of the authors' code. Departures: the code updates the server's target without ever
evaluating it, so that both sides of the KL are f's; here one is g, which starts as the mean of the models, and has a
constant decay, not a cosine. In the code clients train last in a round; here the server does, and it also trains once
before the first round. q normalizes both views together (the authors' is 12,288 wide: three times their features of
CIFAR-10). A client with labels adds mean CE(y, f).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from halfmoon.api.method_entry import MethodEntry
from halfmoon.api.requirements import Requirements
from halfmoon.api.types import (
    Batch,
    ClientData,
    ClientUpdate,
    Federation,
    Passes,
    StepMetrics,
    Task,
    UpdateRequirements,
)
from halfmoon.api.uploads import Upload, UploadSpec
from halfmoon.core import padding, tree
from halfmoon.core.autodiff import grad_and_value
from halfmoon.core.errors import UserError
from halfmoon.core.tree import Tree
from halfmoon.methods.averaging import ModelAveraging, select_model
from halfmoon.methods.mutual import divergence
from halfmoon.methods.objectives.base import (
    MeanTeacherClient,
    embed_groups,
    labeled_cross_entropy,
    ramp_weight,
    update_teacher,
)
from halfmoon.models import forward
from halfmoon.models.network import affine, linear
from halfmoon.models.passes import TrainPass

PREDICTOR = "predictor"


@dataclass(frozen=True)
class FedCon(ModelAveraging):
    """FedCon with the settings of the authors' code, whose ramp is 100 of 200 rounds.

    Attributes:
        consistency_weight: final weight of the server's KL terms.
        ramp: share of the rounds over which that weight grows.
        server_decay: largest decay of the server's target.
        target_decay: decay of the clients' targets.
    """

    uses_class_weights: ClassVar[bool] = True

    method_requirements = Requirements(aggregation="sum", reason="", label_locations=("server", "clients", "some"))
    consistency_weight: float = 1.0
    ramp: float = 0.5
    server_decay: float = 0.9996
    target_decay: float = 0.999

    def client_updates(self, task: Task) -> Mapping[str, ClientUpdate]:
        if task.network.head is None:
            raise UserError(
                "fedcon needs a network that ends in a linear layer: its predictor works on that layer's input."
            )
        return {"train": FedConClient(task, self), "fine-tune": FedConServerUpdate(task, self)}

    def round(self, task: Task, server: Tree, federation: Federation) -> Tree:
        """Let the cohort train and average it; the server then trains on the average."""
        model = select_model(server)
        if task.round == 0 and federation.labeled:
            model = federation.query_server("fine-tune", model).update
        mean = select_model(federation.average("train", model).update)
        return federation.query_server("fine-tune", mean).update if federation.labeled else mean


@dataclass(frozen=True)
class FedConServerUpdate(MeanTeacherClient):
    """FedCon's server, on its labeled images; the teacher is its target."""

    options: FedCon = FedCon()

    @property
    def requirements(self) -> UpdateRequirements:
        return UpdateRequirements(labeled_views=("weak",), masks_padding=True)

    def step(self, broadcast: Tree, carry: Tree, batch: Batch) -> tuple[Tree, StepMetrics]:
        gradient, loss, moments = grad_and_value(self._loss, carry["params"], carry, batch)
        new = self.optimizer_step(carry, gradient, moments)
        new |= update_teacher(carry, new["params"], self.options.server_decay)
        return new, StepMetrics(loss, samples={}, pseudo=())

    def _loss(self, params: Tree, carry: Tree, batch: Batch) -> tuple[Tensor, list[Tree]]:
        """Compute FedCon's server loss: cross-entropy of two views, and consistency with the target (mean teacher).

        Args:
            params: parameters of the network, in which the loss is differentiated.
            carry: state of the update, with the target's parameters in "teacher".
            batch: the minibatch; two views of each labeled image.

        Returns:
            The loss (), and the batch statistics of the network's passes.
        """
        network = self.task.network
        joint = self.task.statistics == "joint"
        views = (batch.x, batch.x_views["weak"])
        # `masks` returns a tuple, with no entry if no row is padding: repeated, it masks both views.
        masks = batch.masks(views=0) * 2
        (first_logits, second_logits), _, moments = forward(network, params, joint, views, real=masks)
        # The teacher gets no gradient: no views are passed with gradients (`()`), both without.
        _, (first_target, second_target), _ = forward(network, carry["teacher"], joint, (), views, masks)
        class_weights = self.task.class_weights
        labeled_loss = labeled_cross_entropy(first_logits, batch.y, batch.x_real, class_weights)
        labeled_loss = labeled_loss + labeled_cross_entropy(second_logits, batch.y, batch.x_real, class_weights)
        # Each view follows the target's prediction on the other one.
        divergences = divergence(second_target, first_logits) + divergence(first_target, second_logits)
        consistency = padding.mean_or_zero(divergences, batch.x_real)
        weight = ramp_weight(self.task, self.options.consistency_weight, self.options.ramp, "sigmoid")
        # Both terms are sums over two views: halved, they are means.
        return (labeled_loss + weight * consistency) / 2, moments

    def passes(self, labeled: int, unlabeled: int) -> Passes:
        return Passes(4 * labeled, 2 * labeled)


@dataclass(frozen=True)
class FedConClient(ClientUpdate):
    """FedCon's client, whose carry has the predictor among the parameters."""

    options: FedCon = FedCon()

    @property
    def requirements(self) -> UpdateRequirements:
        return UpdateRequirements(
            views=("weak", "weak2"), masks_padding=True, per_client_generator=True, upload_spec=UploadSpec(weight="one")
        )

    def initial_memory(self, broadcast: Tree, generator: torch.Generator) -> Tree:
        head = self.task.network.head_layer(broadcast["params"], "fedcon")["weight"]
        predictor = _new_predictor(generator, features=head.shape[1])
        return {"target": broadcast["params"], PREDICTOR: tree.to(predictor, head.device, head.dtype)}

    def begin(self, broadcast: Tree, memory: Tree, data: ClientData) -> Tree:
        broadcast = {**broadcast, "params": {**broadcast["params"], PREDICTOR: memory[PREDICTOR]}}
        return {**super().begin(broadcast, memory, data), "target": memory["target"]}

    def step(self, broadcast: Tree, carry: Tree, batch: Batch) -> tuple[Tree, StepMetrics]:
        gradient, loss, moments = grad_and_value(self._loss, carry["params"], carry, batch)
        new = self.optimizer_step(carry, gradient, moments)
        # The target network is a moving average of the network.
        rate = 1 - self.options.target_decay
        target = tree.map(lambda a, b: torch.lerp(a, b, rate), carry["target"], _network_params(new["params"]))
        return {**new, "target": target}, StepMetrics(loss, samples={}, pseudo=())

    def finish(self, broadcast: Tree, carry: Tree, data: ClientData) -> tuple[Upload, Tree]:
        params = tree.flatten(_network_params(carry["params"]))
        # Without labels the head has no loss, but weight decay moves it all the same: upload the received head.
        for path in [path for path in params if path.startswith(f"{self.task.network.head}/")]:
            params[path] = torch.where(data.labeled > 0, params[path], tree.flatten(broadcast["params"])[path])
        has_images = (data.rows > 0).double()
        upload = Upload({"params": tree.unflatten(params), "stats": carry["stats"]}, weight=has_images)
        return upload, {"target": carry["target"], PREDICTOR: carry["params"][PREDICTOR]}

    def _loss(self, params: Tree, carry: Tree, batch: Batch) -> tuple[Tensor, list[Tree]]:
        """Compute FedCon's client loss: cross-entropy of labeled images minus the similarity of two unlabeled views.

        As in BYOL, a predictor maps the features of one view to the target network's features of the other.

        Args:
            params: parameters of the network and of the predictor, in which the loss is differentiated.
            carry: state of the update, with the target network (a running mean of the network).
            batch: labeled images x, labels y, views u of unlabeled images; x_real and u_real mask padding.

        Returns:
            The loss (), and the batch statistics of all passes.
        """
        network_params = _network_params(params)  # without the predictor
        (labeled_logits,), _, labeled_moments = forward(
            self.task.network, network_params, joint=False, differentiated=(batch.x,), real=batch.masks(views=0)
        )
        features, moments = self._embed_views(params, batch)
        with torch.no_grad():
            targets, _ = self._embed_views(carry["target"], batch)
        predictions = _predict(params[PREDICTOR], features, batch)
        similarity = _view_similarity(predictions, targets, batch)
        labeled_loss = labeled_cross_entropy(labeled_logits, batch.y, batch.x_real, self.task.class_weights)
        # The similarity is the sum of both directions: halved, it is their mean.
        return labeled_loss - similarity / 2, labeled_moments + moments

    def _embed_views(self, params: Tree, batch: Batch) -> tuple[Tensor, list[Tree]]:
        """Compute the features (2 b, F) of both views of the unlabeled images, and the moments of the passes."""
        images = [batch.u[view] for view in self.requirements.views]
        _, features, moments = embed_groups(self.task, _network_params(params), images, batch.masks(views=2)[1:])
        return torch.cat(features), moments

    def passes(self, labeled: int, unlabeled: int) -> Passes:
        return Passes(labeled + 4 * unlabeled, labeled + 2 * unlabeled)


def _network_params(params: Tree) -> Tree:
    """Return the parameters of the network, without those of the predictor."""
    return {name: layer for name, layer in params.items() if name != PREDICTOR}


def _new_predictor(generator: torch.Generator, features: int) -> dict[str, Any]:
    """Draw the parameters of a predictor, which `_predict` applies."""
    first = linear(generator, features, 3 * features)
    last = linear(generator, 3 * features, features)
    return {"first": {"weight": first["weight"], "norm": affine(3 * features)}, "last": last}


def _predict(predictor: Tree, features: Tensor, batch: Batch) -> Tensor:
    """Apply the predictor to the features (2 b, F) of both views: linear, batch normalization, ReLU, linear."""
    run = TrainPass(predictor, "batch", real=_mask_of_both_views(batch))
    # `norm` expects images (n, channels, height, width); features are images of one pixel.
    hidden = run.norm("first", run.linear("first", features)[:, :, None, None])
    return run.linear("last", run.relu(hidden).flatten(1))


def _mask_of_both_views(batch: Batch) -> Tensor | None:
    """Return the mask (2 b,) of the rows of both views that are no padding; None if no row is padding."""
    return padding.concat(batch.masks(views=2)[1:])


def _view_similarity(predicted: Tensor, targets: Tensor, batch: Batch) -> Tensor:
    """Compute the cosine similarity of each view's predicted features with the target's features of the other view.

    Args:
        predicted: features (2 b, F): b images in the first view, then in the second.
        targets: the same of the target network.
        batch: the minibatch, with the mask of padding rows.

    Returns:
        The sum of the two directions' mean similarities, ().
    """
    # Rolling by half the rows puts the target of the other view at each row.
    other_view = targets.detach().roll(len(targets) // 2, 0)
    similarities = F.cosine_similarity(predicted, other_view, dim=-1)
    # A mean over 2 b rows is half the sum of the two views' means.
    return 2 * padding.mean(similarities, _mask_of_both_views(batch))


ROWS = (MethodEntry("fedcon", "FedCon", "FedCon, arXiv 2109.04533", "clients learn features from two views", FedCon()),)
