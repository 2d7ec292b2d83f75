"""ProxyFL's client loss (CVPR 2026): labels of the received model, and features drawn to proxies of likely classes."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from halfmoon.api.types import Batch, ClientData, Passes, PseudoLabels, Task
from halfmoon.core import padding, rng, tree
from halfmoon.core.autodiff import cross_entropy
from halfmoon.core.tree import Tree
from halfmoon.methods.objectives.base import NOTHING, StepResult, embedded, one_hot, supervised
from halfmoon.methods.objectives.pseudo_labeling import WithReceived, received
from halfmoon.models.network import linear

LEAST = 1e-6
"""Features less similar than this are no negatives (the authors' code)."""


@dataclass(frozen=True)
class ICPL(WithReceived):
    """CE(y, f(x)) + unlabeled_weight * mean_i used_i CE(argmax g_i, f(strong_i)) + proxy_weight * InfoNCE.

    g is the received model's prediction on the weak view, under the statistics that came with it. An image counts where
    the local or the received model is sure of it (max p >= threshold); `sure` "global": the received one. InfoNCE
    ("indecisive-categories proxy learning"): every image has a set of classes, {argmax g} where it counts, else all c
    with g(c) > prior(c). Its features, through a linear head, are drawn to the proxy of its class, or to the sum of
    g(c) proxy_c over its set, and away from the features of images of the minibatch with no class in common; a proxy is
    a row of the classifier through a second head. All have length 1, the temperature is 1, the mean runs over both
    views of the unlabeled images. The sets of labeled images are the received model's as well (`labeled_sets` "label":
    their labels). prior is the running distribution of training labels, confident pseudo-labels among them.

    Where paper and authors' code differ, the defaults are the code's. Departures: prior goes up as each client's own
    running mean and is averaged by rows, where the code sums the clients' counts; it counts the whole round, not the
    last epoch alone. The heads start as PyTorch draws linear layers, alike for all seeds; they are no part of the
    solution.
    """

    heads: ClassVar[tuple[str, ...]] = ("feature_head", "proxy_head")
    threshold: float = 0.95
    unlabeled_weight: float = 1.0
    proxy_weight: float = 1.0
    prior_decay: float = 0.99
    sure: Literal["either", "global"] = "either"
    labeled_sets: Literal["guess", "label"] = "guess"

    @property
    def travels(self) -> tuple[str, ...]:
        return (*super().travels, "prior")

    def start(self, task: Task, model: Tree) -> Tree:
        head = model["params"]["head"]["weight"]
        classes, features = head.shape
        g = rng.generator(0, "proxyfl", features)
        heads = {"feature_head": linear(g, features, features)}
        heads["proxy_head"] = {"weight": linear(g, features, features)["weight"]}
        params = {**model["params"], **tree.to(heads, head.device, head.dtype)}
        return super().start(task, {**model, "params": params}) | {"prior": head.new_full((classes,), 1 / classes)}

    def begin(self, task: Task, memory: Tree, data: ClientData, cached: Tree) -> Tree:
        head = cached["received"]["params"]["head"]["weight"]
        return {"counts": torch.zeros_like(head[:, 0])}

    def finish(self, task: Task, carry: Tree) -> Tree:
        total = carry["counts"].sum()
        moved = torch.lerp(carry["prior"], carry["counts"] / total.clamp_min(1), 1 - self.prior_decay)
        return {"prior": torch.where(total > 0, moved, carry["prior"])}

    def __call__(
        self, task: Task, params: Tree, stats: Tree, batch: Batch, aux: Tree = NOTHING, cached: Tree = NOTHING
    ) -> tuple[Tensor, StepResult]:
        x, weak, strong = batch.x, batch.u["weak"], batch.u["strong"]
        logits, features, moments = embedded(task, params, (x, strong, weak), batch.masks(2))
        guess = logits[2].detach()
        if task.labeling == "running":
            with torch.no_grad():
                guess = task.network.predict(params, stats, weak).detach()
        g = received(task, cached, torch.cat([x, weak])).softmax(-1)
        local = torch.cat([logits[0].detach(), guess]).softmax(-1).amax(-1)
        wide, label = g.max(-1)
        sure = wide >= self.threshold
        if self.sure == "either":
            sure = sure | (local >= self.threshold)
        used = padding.mask(sure[len(x) :].to(guess.dtype), batch.u_real)
        pseudo = PseudoLabels(label[len(x) :], wide[len(x) :], used)
        taught = padding.mean(cross_entropy(logits[1], pseudo.label, reduction="none") * used, batch.u_real)
        sets, pull = self._classes(g, label, sure, aux["prior"], batch.y)
        contrast = self._contrast(params, features, sets, pull, batch)
        labels = one_hot(batch.y, g.shape[-1], g)
        label_counts = (labels if batch.x_real is None else labels * batch.x_real[:, None]).sum(0)
        counts = label_counts + (one_hot(pseudo.label, g.shape[-1], g) * used[:, None]).sum(0)
        loss = (
            supervised(logits[0], batch.y, batch.x_real) + self.unlabeled_weight * taught + self.proxy_weight * contrast
        )
        return loss, StepResult(moments, (pseudo,), {"counts": aux["counts"] + counts})

    def passes(self, task: Task, labeled: int, unlabeled: int) -> Passes:
        again = unlabeled if task.labeling == "running" else 0
        taught = labeled + 2 * unlabeled
        return Passes(taught + again + labeled + unlabeled, taught)

    def _classes(self, g: Tensor, label: Tensor, sure: Tensor, prior: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return of images with predictions g (B + b, classes), labeled ones first, the set of classes as 0 and 1, and
        the weights of proxies, both (B + b, classes).
        """
        top = one_hot(label, g.shape[-1], g)
        wide = (g > prior).to(g.dtype)
        sets, pull = torch.where(sure[:, None], top, wide), torch.where(sure[:, None], top, wide * g)
        if self.labeled_sets == "label":
            sets = torch.cat([one_hot(y, g.shape[-1], g), sets[len(y) :]])
        return sets, pull

    def _contrast(self, params: Tree, features: list[Tensor], sets: Tensor, pull: Tensor, batch: Batch) -> Tensor:
        """Return InfoNCE over the strong and the weak views, of features of labeled, strong and weak images."""
        head, labeled, real = params["feature_head"], len(batch.x), padding.concat(batch.masks(2))
        z = F.normalize(F.linear(torch.cat(features), head["weight"], head["bias"]), dim=-1)
        proxies = F.normalize(F.linear(params["head"]["weight"], params["proxy_head"]["weight"]), dim=-1)
        sets = torch.cat([sets, sets[labeled:]])
        anchors, pull = z[labeled:], torch.cat([pull[labeled:]] * 2)
        positive = (anchors * (pull @ proxies)).sum(-1, keepdim=True)
        alike = anchors @ z.T
        apart = (sets[labeled:] @ sets.T == 0) & (alike > LEAST)
        apart = apart if real is None else apart & real
        negative = torch.where(apart, alike, -torch.inf)
        each = torch.cat([positive, negative], -1).logsumexp(-1, keepdim=True) - positive
        return padding.mean(each, None if real is None else real[labeled:])
