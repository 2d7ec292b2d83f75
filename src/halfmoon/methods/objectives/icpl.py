"""ProxyFL's client loss (CVPR 2026): pseudo-labels of the received model, and features drawn to proxies of classes."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from halfmoon.api.types import Batch, ClientData, Passes, PseudoLabels, Task
from halfmoon.core import padding, rng, tree
from halfmoon.core.autodiff import cross_entropy
from halfmoon.core.tree import Tree
from halfmoon.methods.objectives.base import EMPTY, StepResult, embed_groups, labeled_cross_entropy, one_hot
from halfmoon.methods.objectives.pseudo_labeling import ReceivedModelObjective, predict_with_received
from halfmoon.models.network import linear

MIN_NEGATIVE_SIMILARITY = 1e-6
"""Features whose cosine similarity to the anchor is not above this are not used as negatives (the authors' code)."""


@dataclass(frozen=True)
class ICPL(ReceivedModelObjective):
    """CE(y, f(x)) + unlabeled_weight * mean_i used_i CE(argmax g_i, f(strong_i)) + proxy_weight * InfoNCE.

    g is the received model's prediction on the weak view, under the statistics that it was sent with. An image is used
    if the local or the received model is confident (max p >= threshold); with `sure` "global", if the received model
    is.

    InfoNCE ("indecisive-categories proxy learning"): every image has a set of classes, {argmax g} if it is used, else
    all c with g(c) > prior(c). Its features, through a linear head, are drawn to the proxy of its class, or to the sum
    of g(c) proxy_c over its set, and pushed away from the features of images of the minibatch that have no class in
    common with it. A proxy is a row of the classifier, through a second head. All vectors have length 1, the
    temperature is 1, and the mean is over both views of the unlabeled images. The sets of labeled images are the
    received model's too (`labeled_sets` "label": their labels). prior is the running distribution of training labels,
    including confident pseudo-labels.

    Where paper and authors' code differ, the defaults are the code's. Departures: each client uploads a local running
    mean as prior, and these are averaged by rows, while the code sums the clients' counts; it counts the whole round,
    not only the last epoch. The heads start as PyTorch initializes linear layers, identically for all seeds. They are
    not part of the solution.
    """

    uses_class_weights: ClassVar[bool] = True

    heads: ClassVar[tuple[str, ...]] = ("feature_head", "proxy_head")
    threshold: float = 0.95
    unlabeled_weight: float = 1.0
    proxy_weight: float = 1.0
    prior_decay: float = 0.99
    sure: Literal["either", "global"] = "either"
    labeled_sets: Literal["guess", "label"] = "guess"

    @property
    def shared_names(self) -> tuple[str, ...]:
        return (*super().shared_names, "prior")

    def start(self, task: Task, model: Tree) -> Tree:
        task.network.check_head_name("ProxyFL's loss")
        head = model["params"]["head"]["weight"]
        classes, features = head.shape
        generator = rng.generator(0, "proxyfl", features)
        heads = {"feature_head": linear(generator, features, features)}
        heads["proxy_head"] = {"weight": linear(generator, features, features)["weight"]}
        params = {**model["params"], **tree.to(heads, head.device, head.dtype)}
        return super().start(task, {**model, "params": params}) | {"prior": head.new_full((classes,), 1 / classes)}

    def begin(self, task: Task, memory: Tree, data: ClientData, cached: Tree) -> Tree:
        head = cached["received"]["params"]["head"]["weight"]
        return {"counts": torch.zeros_like(head[:, 0])}

    def finish(self, task: Task, carry: Tree) -> Tree:
        total = carry["counts"].sum()
        # A moving average of the class shares; a client update without a training label leaves it as it is.
        new_prior = torch.lerp(carry["prior"], carry["counts"] / total.clamp_min(1), 1 - self.prior_decay)
        return {"prior": torch.where(total > 0, new_prior, carry["prior"])}

    def __call__(
        self, task: Task, params: Tree, stats: Tree, batch: Batch, aux: Tree = EMPTY, cached: Tree = EMPTY
    ) -> tuple[Tensor, StepResult]:
        """Compute ProxyFL's client loss: cross-entropy of labels and pseudo-labels, and InfoNCE with class proxies.

        Args:
            task: settings that all methods share: network, optimizer, rules for batch statistics.
            params: parameters of the network and of two linear heads, in which the loss is differentiated.
            stats: running batch-norm statistics.
            batch: labeled images x, labels y, views u of unlabeled images; x_real and u_real mask padding.
            aux: "prior" (classes,), the distribution of training labels, and "counts" (classes,), those of this update.
            cached: the received model, which predicts the pseudo-labels.

        Returns:
            The loss (), and batch statistics, pseudo-labels and the new counts.
        """
        x = batch.x
        weak = batch.u["weak"]
        logits, features, moments = embed_groups(task, params, (x, batch.u["strong"], weak), batch.masks(views=2))
        labeled_logits, strong_logits, weak_logits = logits
        local_weak = weak_logits.detach()
        if task.labeling == "running":
            with torch.no_grad():
                local_weak = task.network.predict(params, stats, weak).detach()

        # Predictions of both models on the labeled images, then on the weak views.
        global_p = predict_with_received(task, cached, torch.cat([x, weak])).softmax(-1)
        local_confidence = torch.cat([labeled_logits.detach(), local_weak]).softmax(-1).amax(-1)
        global_confidence, global_label = global_p.max(-1)
        confident = global_confidence >= self.threshold
        if self.sure == "either":
            confident = confident | (local_confidence >= self.threshold)

        used = padding.mask(confident[len(x) :].to(local_weak.dtype), batch.u_real)
        pseudo = PseudoLabels(global_label[len(x) :], global_confidence[len(x) :], used)
        pseudo_loss = padding.mean(cross_entropy(strong_logits, pseudo.label, reduction="none") * used, batch.u_real)
        class_sets, proxy_weights = self._class_sets(global_p, global_label, confident, aux["prior"], batch.y)
        contrast = self._contrast(params, features, class_sets, proxy_weights, batch)
        labels = one_hot(batch.y, global_p.shape[-1], global_p)
        label_counts = (labels if batch.x_real is None else labels * batch.x_real[:, None]).sum(0)
        counts = label_counts + (one_hot(pseudo.label, global_p.shape[-1], global_p) * used[:, None]).sum(0)
        loss = (
            labeled_cross_entropy(labeled_logits, batch.y, batch.x_real, task.class_weights)
            + self.unlabeled_weight * pseudo_loss
            + self.proxy_weight * contrast
        )
        return loss, StepResult(moments, pseudo=(pseudo,), aux={"counts": aux["counts"] + counts})

    def passes(self, task: Task, labeled: int, unlabeled: int) -> Passes:
        trained = labeled + 2 * unlabeled
        # The received model predicts on labeled images too, for their sets of classes.
        local_predictions = unlabeled if task.labeling == "running" else 0
        received_predictions = labeled + unlabeled
        return Passes(trained + local_predictions + received_predictions, trained)

    def _class_sets(
        self, probabilities: Tensor, label: Tensor, confident: Tensor, prior: Tensor, y: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Compute each image's set of possible classes, and the weights of the proxies that attract its features.

        The set of a confident prediction is its class; else it is all classes that are more probable than their share
        of the training labels (ProxyFL's "indecisive categories"). A proxy is the learned vector of a class: features
        are drawn to the proxies of their set.

        Args:
            probabilities: the received model's predictions, (B + b, classes), labeled images first.
            label: their argmax, (B + b,).
            confident: whether a prediction is confident, (B + b,) bool.
            prior: the classes' shares of training labels, (classes,).
            y: labels of the labeled images, (B,).

        Returns:
            The sets as 0 and 1, (B + b, classes), and the weights, (B + b, classes).
        """
        classes = probabilities.shape[-1]
        predicted_class = one_hot(label, classes, probabilities)
        likely_classes = (probabilities > prior).to(probabilities.dtype)
        class_sets = torch.where(confident[:, None], predicted_class, likely_classes)
        proxy_weights = torch.where(confident[:, None], predicted_class, likely_classes * probabilities)
        if self.labeled_sets == "label":  # the true labels instead of predictions ("guess", as in the authors' code)
            class_sets = torch.cat([one_hot(y, classes, probabilities), class_sets[len(y) :]])
        return class_sets, proxy_weights

    def _contrast(
        self, params: Tree, features: list[Tensor], class_sets: Tensor, proxy_weights: Tensor, batch: Batch
    ) -> Tensor:
        """Compute InfoNCE between unlabeled images' features and class proxies (ProxyFL, CVPR 2026).

        The positive is the sum of the proxies of the image's possible classes, by `proxy_weights`; negatives are the
        features of images that have no possible class in common with it. Proxies are the classifier's weight rows
        through the layer "proxy_head", and features pass through "feature_head". Each proxy and each feature vector has
        length 1, and the temperature is 1.

        Args:
            params: parameters, with the linear layers "feature_head" and "proxy_head".
            features: of labeled images (B, F), strong views (b, F) and weak views (b, F).
            class_sets: possible classes of each image as 0 and 1, (B + b, classes).
            proxy_weights: weights of the proxies that attract the image, (B + b, classes).
            batch: labeled images x, labels y, views u of unlabeled images; x_real and u_real mask padding.

        Returns:
            The mean over both views, ().
        """
        labeled = len(batch.x)
        mask = padding.concat(batch.masks(views=2))
        head = params["feature_head"]
        embeddings = F.normalize(F.linear(torch.cat(features), head["weight"], head["bias"]), dim=-1)
        proxies = F.normalize(F.linear(params["head"]["weight"], params["proxy_head"]["weight"]), dim=-1)
        # Both views of an unlabeled image have the same set and weights: rows for labeled, strong and weak.
        class_sets = torch.cat([class_sets, class_sets[labeled:]])
        proxy_weights = torch.cat([proxy_weights[labeled:]] * 2)
        # Only unlabeled images are anchors; labeled ones are negatives of them.
        anchors = embeddings[labeled:]
        # As in the authors' code the sum of proxies is not scaled to length 1: a doubtful image has a weaker positive.
        positive = (anchors * (proxy_weights @ proxies)).sum(-1, keepdim=True)
        similarity = anchors @ embeddings.T
        without_common_class = class_sets[labeled:] @ class_sets.T == 0
        # As in the authors' code, images whose features point away from the anchor already are not pushed further.
        is_negative = without_common_class & (similarity > MIN_NEGATIVE_SIMILARITY)
        is_negative = is_negative if mask is None else is_negative & mask
        negatives = torch.where(is_negative, similarity, -torch.inf)
        # Cross-entropy of the positive among itself and the negatives.
        losses = torch.cat([positive, negatives], -1).logsumexp(-1, keepdim=True) - positive
        return padding.mean(losses, None if mask is None else mask[labeled:])
