"""The semi-supervised losses once more as a textbook has them, on `torch.nn` modules with autograd: an oracle."""

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
    """Return random images with a permutation, a coefficient and quarter turns."""
    g = torch.Generator().manual_seed(seed)
    draw = lambda n: torch.randn(n, 1, 8, 8, generator=g, dtype=torch.float64)  # noqa: E731
    drawn = {
        "mix": torch.tensor(0.3, dtype=torch.float64),
        "order": torch.randperm(labeled + len(views) * unlabeled, generator=g),
        "turn": torch.randint(4, (unlabeled,), generator=g),
    }
    y = torch.randint(0, 4, (labeled,), generator=g)
    u = {name: draw(unlabeled) for name in views}
    rows = torch.arange(unlabeled)
    return Batch(draw(labeled), y, torch.arange(labeled), u, rows, {}, drawn, {"strong": draw(labeled)})


@dataclass
class ReferenceModel:
    """A module that learns, and the rules of the task; `settled` normalizes by the statistics of the step's start."""

    module: nn.Module
    statistics: str = "joint"
    labeling: str = "batch"

    def __post_init__(self) -> None:
        self.settled = copy.deepcopy(self.module).eval()

    def look(self, taught: list[Tensor], guessed: list[Tensor] = ()) -> tuple[list[Tensor], list[Tensor]]:
        """Return logits of `taught` groups and constants of `guessed` ones, under the rules."""
        features, guesses = self.features(taught, guessed)
        return [self.module.head(each) for each in features], guesses

    def features(self, taught: list[Tensor], guessed: list[Tensor] = ()) -> tuple[list[Tensor], list[Tensor]]:
        """Return features of `taught` groups and constant logits of `guessed` ones, under the rules."""
        module: Any = self.module
        running = self.labeling == "running"
        alone = [] if running else list(guessed)
        guesses = [self.settled(each).detach() for each in guessed] if running else []
        if self.statistics == "joint":
            sizes = [len(each) for each in (*taught, *alone)]
            parts = module.features(torch.cat([*taught, *alone])).split(sizes)
            return list(parts[: len(taught)]), guesses + [module.head(p).detach() for p in parts[len(taught) :]]
        for each in alone:
            guesses.append(module(each).detach())
        return [module.features(each) if len(each) else each.new_zeros(0, 8) for each in taught], guesses


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """Return -sum target ln softmax, the mean over rows, 0 for none; classes are taken as distributions."""
    if not len(target):
        return logits.sum() * 0
    if target.dim() == 1:
        target = torch.eye(logits.shape[-1], dtype=logits.dtype)[target]
    return -(target * torch.log(F.softmax(logits, -1))).sum(-1).mean()


def pi_model(book: ReferenceModel, batch: Batch, weight: float) -> Tensor:
    """Return Laine and Aila's loss (Algorithm 1), the consistency term on unlabeled images."""
    (x, one, two), _ = book.look([batch.x, batch.u["weak"], batch.u["weak2"]])
    apart = (F.softmax(one, -1) - F.softmax(two, -1)) ** 2
    return cross_entropy(x, batch.y) + weight * apart.sum() / apart.numel()


def mean_teacher(book: ReferenceModel, teacher: nn.Module, batch: Batch, weight: float) -> Tensor:
    """Return Tarvainen and Valpola's loss; in "running" the teacher is normalized by the student's statistics."""
    (x, student), _ = book.look([batch.x, batch.u["weak"]])
    if book.labeling == "running":
        teacher = copy.deepcopy(teacher)
        for mine, theirs in zip(teacher.buffers(), book.settled.buffers(), strict=True):
            mine.copy_(theirs)
        teacher.eval()
    apart = (F.softmax(student, -1) - F.softmax(teacher(batch.u["weak2"]).detach(), -1)) ** 2
    return cross_entropy(x, batch.y) + weight * apart.sum() / apart.numel()


def pseudo_label(book: ReferenceModel, batch: Batch, weight: float, threshold: float) -> Tensor:
    """Return Lee's loss, of guesses of at least `threshold`."""
    guessed = [batch.u["weak"]] if book.labeling == "running" else []
    (x, u), guess = book.look([batch.x, batch.u["weak"]], guessed)
    p = F.softmax(guess[0] if guess else u.detach(), -1)
    total = torch.zeros((), dtype=x.dtype)
    for row, each in zip(u, p, strict=True):
        if each.max() >= threshold:
            total = total - torch.log(F.softmax(row, -1)[each.argmax()])
    return cross_entropy(x, batch.y) + weight * total / len(u)


def _mix(rows: Tensor, batch: Batch) -> Tensor:
    lam = max(float(batch.mixing["mix"]), 1 - float(batch.mixing["mix"]))
    partners = torch.stack([rows[int(k)] for k in batch.mixing["order"]])
    return lam * rows + (1 - lam) * partners


def mixmatch(book: ReferenceModel, batch: Batch, weight: float, temperature: float) -> Tensor:
    """Return MixMatch's loss (Algorithm 1, Eq. 2 to 5)."""
    weak = [batch.u["weak"], batch.u["weak2"]]
    count = len(batch.x)
    n = len(weak[0])
    images = _mix(torch.cat([batch.x, *weak]), batch).split([count, n, n])
    (x, one, two), guesses = book.look(list(images), weak)
    mean = sum(F.softmax(each, -1) for each in guesses) / 2
    q = mean ** (1 / temperature)
    q = q / q.sum(-1, keepdim=True)
    targets = _mix(torch.cat([torch.eye(4, dtype=q.dtype)[batch.y], q, q]), batch)
    apart = (targets[count:] - F.softmax(torch.cat([one, two]), -1)) ** 2
    return cross_entropy(x, targets[:count]) + weight * apart.sum() / apart.numel()


def remixmatch(book, head, batch, ratio, weights, temperature):
    """Return ReMixMatch's loss (Algorithm 1) with two strong views; `ratio` is labels' over predictions' share."""
    weak, strong, second = (batch.u[name] for name in ("weak", "strong", "strong2"))
    labeled = batch.x_views["strong"]
    count = len(labeled)
    n = len(weak)
    images = _mix(torch.cat([labeled, weak, strong, second]), batch).split([count, n, n, n])
    turned = torch.stack(
        [torch.rot90(each, int(k), (1, 2)) for each, k in zip(strong, batch.mixing["turn"], strict=True)]
    )
    features, (guess,) = book.features([*images, strong, turned], [weak])
    x, a, b, c, anchor = (book.module.head(each) for each in features[:5])  # pyright: ignore
    aligned = F.softmax(guess, -1) * ratio
    aligned = aligned / aligned.sum(-1, keepdim=True)
    q = aligned ** (1 / temperature)
    q = q / q.sum(-1, keepdim=True)
    targets = _mix(torch.cat([torch.eye(4, dtype=q.dtype)[batch.y], q, q, q]), batch)
    rotations = cross_entropy(features[5] @ head[0].T + head[1], batch.mixing["turn"])
    loss = cross_entropy(x, targets[:count]) + weights[0] * cross_entropy(torch.cat([a, b, c]), targets[count:])
    return loss + weights[1] * cross_entropy(anchor, q) + weights[2] * rotations


def make_module(model: Tree) -> TorchSmall:
    """Return a module with a model's parameters (a rotation head left out) and statistics, in training mode."""
    params = {name: part for name, part in model["params"].items() if name != "rotation"}
    made: Any = load_weights(TorchSmall(1, 4, NETWORK.width), {"params": params, "stats": model["stats"]})
    return made
