"""ProtoFSSL (Kim et al. 2022): classify by the nearest class prototype in feature space, and exchange prototypes.

With d(e, p) = the mean over features of (e - p)^2, a step is an episode: the features of the first image of each class
in the labeled minibatch are its prototype (support), and the other images (queries) are classified:

    loss = mean over queries CE(y, softmax(-d(e, P))) + unlabeled_weight mean over u CE(t(u), softmax(-d(e(u), P))),

t = sharpen(mean over helpers h of softmax(-d(e(u), P_h))): the prototypes of up to `helpers` clients of the last round
label the unlabeled images. After training, a client computes the mean features of its labeled images of each class, and
uploads them with the model. The server averages the models with equal weights, and broadcasts the helpers' prototypes.
Classes that a helper does not have are filled with the mean of the clients that have them.

server: params, stats; of the last round mean (classes, features), the known classes (classes,), helpers (H, classes,
features), and a mask of those that exist (H,).  broadcast: the same without the mean.  memory: none.  upload: params,
stats, own (classes, features), present (classes,), weight (1; 0 from a client without images). A prototype of few
images reveals much about them: of one image, its features.

Departures: the authors' episodes draw 1 support and 2 query images of each class; here the batch rule draws them, and
a class without an image in the minibatch has the helpers' mean as its prototype. Images are shown in the weak view. As
in the authors' code the target is differentiated (`through_target`). Prototypes are computed under running statistics.
The evaluated model has the mean prototypes as its head: -d(e, p) is (2 e p - p^2) / features, up to a term that is the
same for all classes. RMSprop and the authors' test at the best round on validation images are options of the run.
"""

from collections.abc import Mapping
from dataclasses import dataclass

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
)
from halfmoon.api.uploads import Aux, Upload, UploadSpec
from halfmoon.core.autodiff import cross_entropy, grad_and_value
from halfmoon.core.errors import UserError, check_minimum
from halfmoon.core.padding import mask
from halfmoon.core.tree import Tree
from halfmoon.methods.averaging import average_uploads
from halfmoon.methods.objectives.base import embed_groups, one_hot, sharpen, soft_cross_entropy, split_into_chunks

UNKNOWN_CLASS_DISTANCE = 1e4
"""Distance to a class without a known prototype: after a softmax its probability is 0."""


@dataclass(frozen=True)
class ProtoFSSL:
    """ProtoFSSL with the authors' settings: 5 helpers, weight 0.3, temperature 0.5.

    Attributes:
        helpers: number of clients whose prototypes are broadcast.
        unlabeled_weight: weight of the loss on unlabeled images.
        temperature: sharpens the helpers' mean prediction.
        through_target: differentiate the target, too (the authors' code).
        min_class_images: fewest labeled images of a class at a site of a federation that has any: of one image, the
            class's prototype is that image's feature vector. Has no effect in simulations.

    Raises:
        UserError: for fewer than one helper or image of a class, and for a network without a bias in its head (`norm`
            "none").
    """

    helpers: int = 5
    unlabeled_weight: float = 0.3
    temperature: float = 0.5
    through_target: bool = True
    min_class_images: int = 5

    def __post_init__(self) -> None:
        check_minimum(self, 1, "helpers", "min_class_images")

    def requirements(self, norm: str) -> Requirements:
        reason = "clients are sent the prototypes of single other clients"
        return Requirements(
            reason=reason, label_locations=("clients",), personal=True, min_class_images=self.min_class_images
        )

    def client_updates(self, task: Task) -> Mapping[str, ClientUpdate]:
        return {"train": ProtoFSSLClient(task, self)}

    def start(self, task: Task, model: Tree) -> Tree:
        task.network.check_head_name("ProtoFSSL")
        head = model["params"]["head"]
        if "bias" not in head:
            raise UserError("ProtoFSSL's prototypes make a head with a bias; set norm to 'batch' or 'group'.")
        mean = torch.zeros_like(head["weight"])
        helpers = mean.new_zeros(self.helpers, *mean.shape)
        return {**model, "mean": mean, "known": mean[:, 0], "helpers": helpers, "there": helpers[:, 0, 0]}

    def round(self, task: Task, server: Tree, federation: Federation) -> Tree:
        """Run a round of ProtoFSSL: average models and class prototypes, and select the next round's helpers.

        A class's prototype is the mean feature vector of a client's labeled images of it. Helpers are clients of this
        round whose prototypes label unlabeled images at all clients in the next one.

        Args:
            task: settings that all methods share: network, optimizer, rules for batch statistics.
            server: the server's state: the model; "mean" prototypes (classes, F), and "known" (classes,), 1 for classes
                that have one; "helpers" (H, classes, F), and "there" (H,), 1 for those that exist.
            federation: the clients of this round, which upload their prototypes as "own".

        Returns:
            The server's new state.
        """
        server = {"stats": {}, **server}
        upload = federation.query("train", {name: section for name, section in server.items() if name != "mean"})
        new = average_uploads(upload, server)
        prototypes = upload.aux["own"]  # (k, classes, features)
        present = upload.aux["present"] * (upload.weight > 0)[:, None]
        # Of each class, the clients that have images of it count the same in its mean prototype.
        client_share = present / present.sum(0).clamp_min(1)
        class_present = (present.sum(0) > 0)[:, None]
        # A class without an image in this cohort retains its prototype of an earlier round.
        mean = torch.where(class_present, (client_share[..., None] * prototypes).sum(0), server["mean"])
        # Classes that a client lacks get the mean prototype.
        filled = torch.where(present[..., None] > 0, prototypes, mean)
        # The first clients of the cohort with images are the helpers: the cohort is drawn at random.
        indices = (upload.weight > 0).nonzero().flatten()[: self.helpers]
        helpers = torch.zeros_like(server["helpers"])
        helpers[: len(indices)] = filled[indices].to(helpers)
        exists = torch.zeros_like(server["there"])
        exists[: len(indices)] = 1.0
        class_mask = torch.maximum(server["known"], class_present[:, 0].to(server["known"]))
        return {**new, "mean": mean.to(server["mean"]), "known": class_mask, "helpers": helpers, "there": exists}

    def solution(self, task: Task, server: Tree) -> Tree:
        # -d(e, p) = (2 e p - p^2 - e^2) / features. The term e^2 is the same for all classes and is left out.
        mean = server["mean"]
        bias = -mean.square().mean(-1) - UNKNOWN_CLASS_DISTANCE * (1 - server["known"])
        head = {"weight": 2 * mean / mean.shape[-1], "bias": bias}
        return {"params": {**server["params"], "head": head}, "stats": server.get("stats", {})}


@dataclass(frozen=True)
class ProtoFSSLClient(ClientUpdate):
    """The client of ProtoFSSL: it trains on episodes and computes the prototypes of its labeled images."""

    options: ProtoFSSL = ProtoFSSL()

    @property
    def requirements(self) -> UpdateRequirements:
        aux = {"own": Aux(), "present": Aux(values="mark")}
        return UpdateRequirements(views=("weak",), masks_padding=True, upload_spec=UploadSpec(weight="one", aux=aux))

    def step(self, broadcast: Tree, carry: Tree, batch: Batch) -> tuple[Tree, StepMetrics]:
        gradient, loss, (moments, pseudo) = grad_and_value(self._loss, carry["params"], broadcast, batch)
        return self.optimizer_step(carry, gradient, moments), StepMetrics(loss, samples={}, pseudo=(pseudo,))

    def finish(self, broadcast: Tree, carry: Tree, data: ClientData) -> tuple[Upload, Tree]:
        """Upload the trained model with the client's class prototypes: the mean features of its labeled images.

        Args:
            broadcast: the tree that the server sent.
            carry: state of the client update after its last step.
            data: the client's images and labels.

        Returns:
            The upload, with the prototypes (classes, features) and a mask of the classes that have images; {}, as the
            client stores nothing.
        """
        head = carry["params"]["head"]["weight"]
        # Rows from number `labeled` on are padding.
        is_real = (torch.arange(len(data.y), device=data.y.device) < data.labeled)[:, None]
        membership = one_hot(data.y, len(head), head) * is_real  # (L, classes)
        class_counts = membership.sum(0)
        feature_sums = torch.zeros_like(head)
        if len(data.x):
            features = [self._features(carry, images) for images in split_into_chunks(data.x)]
            feature_sums = membership.T @ torch.cat(features)
        model = {"params": carry["params"], "stats": carry["stats"]}
        prototypes = feature_sums / class_counts.clamp_min(1)[:, None]
        aux = {"own": prototypes, "present": (class_counts > 0).to(head.dtype)}
        has_images = (data.labeled + data.unlabeled > 0).double()
        return Upload(model, weight=has_images, aux=aux), {}

    def images_outside_steps(self, labeled: int, unlabeled: int) -> int:
        return labeled

    @torch.no_grad()
    def _features(self, model: Tree, images: Tensor) -> Tensor:
        """Compute the features (n, F), the input of the last layer, of which ProtoFSSL's prototypes are means.

        Args:
            model: "params" and "stats" (running batch-norm statistics).
            images: (n, C, H, W) uint8, which are not augmented.
        """
        # With the identity as its head the network returns its features.
        weight = model["params"]["head"]["weight"]
        identity = {"weight": torch.eye(weight.shape[1], dtype=weight.dtype, device=weight.device)}
        params = {**model["params"], "head": identity}
        return self.task.network.predict(params, model["stats"], self.task.normalize(images))

    def _loss(self, params: Tree, broadcast: Tree, batch: Batch) -> tuple[Tensor, tuple[list[Tree], PseudoLabels]]:
        """Compute ProtoFSSL's loss of an episode: one image of each class is its prototype, the others are classified.

        Args:
            params: parameters of the network, in which the loss is differentiated.
            broadcast: the helpers' prototypes (H, classes, features), and masks of known classes and helpers.
            batch: labeled images x, labels y, views u of unlabeled images; x_real and u_real mask padding.

        Returns:
            The loss (), and (batch statistics, pseudo-labels).
        """
        options = self.options
        class_mask = broadcast["known"]
        exists = broadcast["there"]
        groups = (batch.x, batch.u["weak"])
        _, (labeled, unlabeled), moments = embed_groups(
            self.task, params, groups, batch.masks(views=1)
        )  # features (n, F)
        # Support: the first image of each class is its prototype, so the product below selects rows of features. A class
        # without an image in the minibatch has the helpers' mean prototype.
        helper_mean = (broadcast["helpers"] * exists[:, None, None]).sum(0) / exists.sum().clamp_min(1)
        support = mask(first_of_each_class(batch.y), batch.x_real)
        membership = one_hot(batch.y, len(class_mask), labeled) * support[:, None]
        in_minibatch = membership.sum(0) > 0
        prototypes = torch.where(in_minibatch[:, None], membership.T @ labeled, helper_mean)
        has_prototype = in_minibatch | ((class_mask > 0) & (exists.sum() > 0))
        unknown_distance = torch.where(has_prototype, 0.0, UNKNOWN_CLASS_DISTANCE)
        # Queries: all other labeled images. The product with 0 keeps the loss of no images differentiable.
        query = mask(1 - support, batch.x_real)
        query_logits = -distances(labeled, prototypes) - unknown_distance
        query_loss = cross_entropy(query_logits, batch.y, reduction="none") * query
        loss = (query_loss.sum() if len(batch.y) else labeled.sum() * 0.0) / query.sum().clamp_min(1)
        # Unlabeled images: the target is the mean prediction by the helpers' prototypes.
        predictions: list[Tensor] = []
        for helper in broadcast["helpers"]:
            logits = -distances(unlabeled, helper) - UNKNOWN_CLASS_DISTANCE * (1 - class_mask)
            predictions.append(logits.softmax(-1))
        mean = (torch.stack(predictions) * exists[:, None, None]).sum(0) / exists.sum().clamp_min(1)
        target = sharpen(mean, options.temperature)
        target = target if options.through_target else target.detach()
        unlabeled_logits = -distances(unlabeled, prototypes) - unknown_distance
        unlabeled_loss = soft_cross_entropy(unlabeled_logits, target, batch.u_real)
        # In the first round there are no helpers, and no loss on unlabeled images.
        has_helpers = (exists.sum() > 0).to(loss.dtype)
        confidence, label = target.detach().max(-1)
        pseudo = PseudoLabels(label, confidence, has_helpers * torch.ones_like(confidence))
        return loss + options.unlabeled_weight * has_helpers * unlabeled_loss, (moments, pseudo)


def first_of_each_class(y: Tensor) -> Tensor:
    """Mark the first image of each class: 1.0 for it, 0.0 for the other labels of y (n,)."""
    index = torch.arange(len(y), device=y.device)
    earlier = (y[:, None] == y) & (index < index[:, None])
    return (~earlier.any(-1)).to(torch.get_default_dtype())


def distances(features: Tensor, prototypes: Tensor) -> Tensor:
    """Compute d (n, classes), the mean squared difference of features (n, F) and prototypes (classes, F)."""
    return (features[:, None] - prototypes).square().mean(-1)


ROWS = (
    MethodEntry("protofssl", "ProtoFSSL", "Kim et al. 2022", "class prototypes in place of a classifier", ProtoFSSL()),
)
