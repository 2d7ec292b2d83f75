"""What the tests of FedLoKe and FML share: a network of two weights, views without chance, and autograd's steps."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from scenes import CLASSES
from torch import Tensor

from halfmoon.api.types import Batch, Local, Task
from halfmoon.core import tree
from halfmoon.core.tree import Tree
from halfmoon.data.views import Plain
from halfmoon.engine.sampling import Views
from halfmoon.models import Network
from halfmoon.models.network import Normalize
from halfmoon.models.passes import Run


@dataclass(frozen=True)
class Pixel(Network):
    """Two classes, whose logits are a weight each times the first pixel."""

    channels: int = 1
    classes: int = 2

    def init(self, generator: torch.Generator) -> Tree:
        return model(0.0, 0.0)

    def layers(self, x: Tensor, run: Run) -> Tensor:
        return run.linear("head", x.flatten(1)[:, :1])

    def check(self, shape: tuple[int, int, int]) -> None:
        pass


PIXEL = Pixel(norm="none")


def model(one: float, two: float) -> Tree:
    """Return the model of `Pixel` with these weights."""
    return {"params": {"head": {"weight": torch.tensor([[one], [two]], dtype=torch.float64)}}, "stats": {}}


def pixels(*values: float) -> Tensor:
    """Return images (n, 1, 1, 1) of one pixel."""
    return torch.tensor(values, dtype=torch.float64).view(-1, 1, 1, 1)


def local(labeled: int = 5, unlabeled: int = 6) -> Local:
    nothing = torch.zeros(0, 1, 8, 8, dtype=torch.uint8)
    return Local(nothing, torch.zeros(0), nothing, torch.tensor(labeled), torch.tensor(unlabeled))


def batches(names: tuple[str, ...], count: int = 3) -> list[Batch]:
    """Return batches of 5 + 6 random images with all of these views, of labeled and of unlabeled images."""
    g = torch.Generator().manual_seed(1)
    draw = lambda n: torch.randn(n, 1, 8, 8, generator=g, dtype=torch.float64)  # noqa: E731
    return [
        Batch(
            draw(5),
            torch.randint(0, CLASSES, (5,), generator=g),
            torch.arange(5),
            {name: draw(6) for name in names},
            torch.arange(6),
            x_views={name: draw(5) for name in names},
        )
        for _ in range(count)
    ]


@dataclass(frozen=True)
class Negative:
    """The image with its values turned round: a view that differs, and of which nothing is drawn."""

    def draw(self, n: int, shape: tuple[int, int, int], generator: torch.Generator) -> dict[str, Tensor]:
        return {}

    def apply(self, images: Tensor, draws: dict[str, Tensor], normalize: Normalize) -> Tensor:
        return normalize(255 - images)


FIXED = Views(Negative(), {"plain": Plain(), "weak": Plain(), "strong": Negative()})
"""Views without chance: a labeled image is shown as the strong view shows it."""


def looked(task: Task, leaves: Tree, *groups: Tensor) -> tuple[list[Tensor], list[Tree]]:
    """Return the logits of groups of images and the moments, in one pass or each in its own, as the task says."""
    if task.statistics == "joint":
        logits, moments = task.network.train(leaves, torch.cat(groups))
        return list(logits.split([len(group) for group in groups])), [moments]
    made = [task.network.train(leaves, group) for group in groups]
    return [logits for logits, _ in made], [moments for _, moments in made]


def tracked(stats: Tree, moments: list[Tree]) -> Tree:
    """Return running statistics after these passes, by PyTorch's formula with its momentum of 0.1."""
    for each in moments:
        stats = tree.map(lambda old, new: 0.9 * old + 0.1 * new.detach(), stats, each)
    return stats


def differentiable(params: Tree) -> Tree:
    return tree.map(lambda leaf: leaf.detach().clone().requires_grad_(), params)


def autograd_step(losses: dict[str, Tensor], leaves: dict[str, Tree], lr: float) -> dict[str, Tree]:
    """Return each tree after a step of SGD on the SUM of all losses, differentiated in one backward pass."""
    total = torch.stack(list(losses.values())).sum()
    flat = [leaf for params in leaves.values() for leaf in tree.leaves(params)]
    gradients = iter(torch.autograd.grad(total, flat))
    step: Callable[[Tensor], Tensor] = lambda leaf: leaf.detach() - lr * next(gradients)  # noqa: E731
    return {name: tree.map(step, params) for name, params in leaves.items()}
