"""Implement the semi-supervised losses with `torch.nn` modules and autograd, as a reference for the tests."""

import copy
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_models import TorchSmall, load_weights

from halfmoon.api.types import Batch
from halfmoon.core.tree import Tree
from halfmoon.models import SmallCNN

NETWORK = SmallCNN(1, 4, 4)


def make_batch(labeled: int = 5, unlabeled: int = 6, views: tuple[str, ...] = (), seed: int = 0) -> Batch:
    """Return a batch of random images with a mixing coefficient, a permutation and rotations."""
    g = torch.Generator().manual_seed(seed)
    draw = lambda n: torch.randn(n, 1, 8, 8, generator=g, dtype=torch.float64)  # noqa: E731
    drawn = {
        "mix": torch.tensor(0.3, dtype=torch.float64),  # below 1/2, so that the losses have to replace it by 0.7
        "order": torch.randperm(labeled + len(views) * unlabeled, generator=g),
        "turn": torch.randint(4, (unlabeled,), generator=g),
    }
    y = torch.randint(0, 4, (labeled,), generator=g)
    u = {name: draw(unlabeled) for name in views}
    rows = torch.arange(unlabeled)
    return Batch(draw(labeled), y, torch.arange(labeled), u, rows, {}, drawn, {"strong": draw(labeled)})


@dataclass
class ReferenceModel:
    """A module in training with the normalization rules of a task.

    Attributes:
        module: the module, in training mode.
        statistics: "joint" if all groups of images share one pass, otherwise each group has a separate pass.
        labeling: "running" if pseudo-labels use running statistics, "batch" if they use batch statistics.
        eval_module: a copy in evaluation mode, with the running statistics before the step.
    """

    module: nn.Module
    statistics: str = "joint"
    labeling: str = "batch"

    def __post_init__(self) -> None:
        self.eval_module = copy.deepcopy(self.module).eval()

    def forward(self, trained: list[Tensor], labeling_groups: list[Tensor] = ()) -> tuple[list[Tensor], list[Tensor]]:
        """Return the logits of `trained` groups and the detached logits of `labeling_groups`."""
        features, pseudo_logits = self.features(trained, labeling_groups)
        return [self.module.head(each) for each in features], pseudo_logits

    def features(self, trained: list[Tensor], labeling_groups: list[Tensor] = ()) -> tuple[list[Tensor], list[Tensor]]:
        """Return the features of `trained` groups and the detached logits of `labeling_groups`."""
        module: Any = self.module
        running = self.labeling == "running"
        separate_groups = [] if running else list(labeling_groups)
        pseudo_logits = [self.eval_module(each).detach() for each in labeling_groups] if running else []
        if self.statistics == "joint":
            sizes = [len(each) for each in (*trained, *separate_groups)]
            features = module.features(torch.cat([*trained, *separate_groups])).split(sizes)
            return list(features[: len(trained)]), pseudo_logits + [
                module.head(p).detach() for p in features[len(trained) :]
            ]
        for each in separate_groups:
            pseudo_logits.append(module(each).detach())
        return [module.features(each) if len(each) else each.new_zeros(0, 8) for each in trained], pseudo_logits


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """Return the mean of -sum target ln softmax over rows, 0 without rows. Targets are classes or distributions."""
    if not len(target):
        return logits.sum() * 0  # 0 with a gradient, as the loss of other terms has
    if target.dim() == 1:
        target = torch.eye(logits.shape[-1], dtype=logits.dtype)[target]
    return -(target * torch.log(F.softmax(logits, -1))).sum(-1).mean()


def pi_model(model: ReferenceModel, batch: Batch, weight: float) -> Tensor:
    """Return Laine and Aila's loss (Algorithm 1), the consistency term on unlabeled images."""
    (x, one, two), _ = model.forward([batch.x, batch.u["weak"], batch.u["weak2"]])
    squared_differences = (F.softmax(one, -1) - F.softmax(two, -1)) ** 2
    return cross_entropy(x, batch.y) + weight * squared_differences.sum() / squared_differences.numel()


def mean_teacher(model: ReferenceModel, teacher: nn.Module, batch: Batch, weight: float) -> Tensor:
    """Return Tarvainen and Valpola's loss. With "running" the teacher uses the student's running statistics."""
    (x, student), _ = model.forward([batch.x, batch.u["weak"]])
    if model.labeling == "running":
        teacher = copy.deepcopy(teacher)  # its buffers are replaced below, which the caller must not see
        for teacher_buffer, student_buffer in zip(teacher.buffers(), model.eval_module.buffers(), strict=True):
            teacher_buffer.copy_(student_buffer)
        teacher.eval()
    squared_differences = (F.softmax(student, -1) - F.softmax(teacher(batch.u["weak2"]).detach(), -1)) ** 2
    return cross_entropy(x, batch.y) + weight * squared_differences.sum() / squared_differences.numel()


def pseudo_label(model: ReferenceModel, batch: Batch, weight: float, threshold: float) -> Tensor:
    """Return Lee's loss of pseudo-labels with a confidence of at least `threshold`."""
    labeling_groups = [batch.u["weak"]] if model.labeling == "running" else []
    (x, u), pseudo_logits = model.forward([batch.x, batch.u["weak"]], labeling_groups)
    p = F.softmax(pseudo_logits[0] if pseudo_logits else u.detach(), -1)
    total = torch.zeros((), dtype=x.dtype)
    # Row by row, unlike the vectorized implementation that it is compared with.
    for row, each in zip(u, p, strict=True):
        if each.max() >= threshold:
            total = total - torch.log(F.softmax(row, -1)[each.argmax()])
    return cross_entropy(x, batch.y) + weight * total / len(u)


def _mix(rows: Tensor, batch: Batch) -> Tensor:
    # At least 1/2, so that a mixed image is closer to its first image than to its partner (MixMatch, Eq. 9).
    lam = max(float(batch.mixing["mix"]), 1 - float(batch.mixing["mix"]))
    partners = torch.stack([rows[int(k)] for k in batch.mixing["order"]])
    return lam * rows + (1 - lam) * partners


def mixmatch(model: ReferenceModel, batch: Batch, weight: float, temperature: float) -> Tensor:
    """Return MixMatch's loss (Algorithm 1, Eq. 2 to 5)."""
    weak = [batch.u["weak"], batch.u["weak2"]]
    count = len(batch.x)
    n = len(weak[0])
    images = _mix(torch.cat([batch.x, *weak]), batch).split([count, n, n])
    (x, one, two), pseudo_logits = model.forward(list(images), weak)
    mean = sum(F.softmax(each, -1) for each in pseudo_logits) / 2
    q = mean ** (1 / temperature)
    q = q / q.sum(-1, keepdim=True)
    # Both weak views have the same target, so it appears twice.
    targets = _mix(torch.cat([torch.eye(4, dtype=q.dtype)[batch.y], q, q]), batch)
    squared_differences = (targets[count:] - F.softmax(torch.cat([one, two]), -1)) ** 2
    return cross_entropy(x, targets[:count]) + weight * squared_differences.sum() / squared_differences.numel()


def remixmatch(model, head, batch, ratio, weights, temperature):
    """Return ReMixMatch's loss (Algorithm 1) with two strong views.

    Args:
        model: the model in training.
        head: weight and bias of the rotation head.
        batch: the images.
        ratio: class shares of the labels divided by those of the predictions.
        weights: weights of the unlabeled, pre-mixup and rotation losses.
        temperature: temperature of the sharpening.
    """
    weak, strong, second = (batch.u[name] for name in ("weak", "strong", "strong2"))
    labeled = batch.x_views["strong"]
    count = len(labeled)
    n = len(weak)
    images = _mix(torch.cat([labeled, weak, strong, second]), batch).split([count, n, n, n])
    rotated = torch.stack(
        [torch.rot90(each, int(k), (1, 2)) for each, k in zip(strong, batch.mixing["turn"], strict=True)]
    )
    features, (pseudo_logits,) = model.features([*images, strong, rotated], [weak])
    x, a, b, c, anchor = (model.module.head(each) for each in features[:5])  # pyright: ignore
    aligned = F.softmax(pseudo_logits, -1) * ratio
    aligned = aligned / aligned.sum(-1, keepdim=True)
    q = aligned ** (1 / temperature)
    q = q / q.sum(-1, keepdim=True)
    targets = _mix(torch.cat([torch.eye(4, dtype=q.dtype)[batch.y], q, q, q]), batch)
    rotations = cross_entropy(features[5] @ head[0].T + head[1], batch.mixing["turn"])
    loss = cross_entropy(x, targets[:count]) + weights[0] * cross_entropy(torch.cat([a, b, c]), targets[count:])
    return loss + weights[1] * cross_entropy(anchor, q) + weights[2] * rotations


def make_module(model: Tree) -> TorchSmall:
    """Return a module in training mode with a model's parameters, without its rotation head, and statistics."""
    params = {name: part for name, part in model["params"].items() if name != "rotation"}
    module: Any = load_weights(TorchSmall(1, 4, NETWORK.width), {"params": params, "stats": model["stats"]})
    return module
