"""Helpers for the tests of methods: images, clients, simulated rounds, a two-weight network and reference steps."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch_models import TorchSmall, load_weights

from halfmoon.api.types import Batch, ClientData, ClientUpdate, Method, Task
from halfmoon.core import tree
from halfmoon.core.normalize import Normalize
from halfmoon.core.tree import Tree
from halfmoon.data.views import Plain
from halfmoon.engine.local_clients import FederatedDataset
from halfmoon.engine.sampling import Views
from halfmoon.federation.contract.checks import compare_executors
from halfmoon.federation.contract.small_federation import (
    CLASSES,
    NETWORK,
    Snapshot,
    make_simulation,
    run_rounds,
    start_server,
)
from halfmoon.models import Network
from halfmoon.models.passes import ForwardPass


@dataclass(frozen=True)
class TwoWeightNetwork(Network):
    """A network with two classes, whose logits are one weight each times the first pixel."""

    channels: int = 1
    classes: int = 2

    def init(self, generator: torch.Generator) -> Tree:
        return make_two_weight_model(0.0, 0.0)

    def layers(self, x: Tensor, run: ForwardPass) -> Tensor:
        # One pixel, so that losses and gradients can be derived by hand.
        return run.linear("head", x.flatten(1)[:, :1])

    def check(self, shape: tuple[int, int, int]) -> None:
        pass


TWO_WEIGHT_NETWORK = TwoWeightNetwork(norm="none")


def make_two_weight_model(first: float, second: float) -> Tree:
    """Return the model of `TwoWeightNetwork` with these weights."""
    return {"params": {"head": {"weight": torch.tensor([[first], [second]], dtype=torch.float64)}}, "stats": {}}


def make_pixel_images(*values: float) -> Tensor:
    """Return images (n, 1, 1, 1) of one pixel."""
    return torch.tensor(values, dtype=torch.float64).view(-1, 1, 1, 1)


def make_random_images(count: int, seed: int) -> Tensor:
    """Return random normalized images (count, 1, 8, 8)."""
    return torch.randn(count, 1, 8, 8, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def make_client_data(labeled: int = 5, unlabeled: int = 6, y: Tensor | None = None, **views: Tensor) -> ClientData:
    """Return a client with these numbers of images, but without images: tests pass those to the steps."""
    no_images = torch.zeros(0, 1, 8, 8, dtype=torch.uint8)
    y = torch.zeros(0, dtype=torch.int64) if y is None else y
    return ClientData(no_images, y, no_images, torch.tensor(labeled), torch.tensor(unlabeled), views)


def begin_update(update: ClientUpdate, broadcast: Tree, data: ClientData) -> Tree:
    """Start a client's first update and return its carry."""
    return update.begin(broadcast, update.initial_memory(broadcast, torch.Generator()), data)


def simulate_rounds(
    method: Method, task: Task, dataset: FederatedDataset | None = None, *, rounds: int = 1, **options: Any
) -> list[Snapshot]:
    """Simulate the first rounds of a federation and return their snapshots."""
    return run_rounds(
        method, make_simulation(method, task, dataset, **options), start_server(method, task), range(rounds)
    )


def simulate_with_both_executors(
    method: Method, task: Task, dataset: FederatedDataset | None = None, *, rounds: int = 2, **options: Any
) -> list[Snapshot]:
    """Simulate the first rounds with the executors "loop" and "vmap", compare both, and return those of "loop"."""
    loop, vmap = (
        simulate_rounds(method, task, dataset, rounds=rounds, executor=each, **options) for each in ("loop", "vmap")
    )
    compare_executors(loop, vmap)
    return loop


def make_torch_module(broadcast: Tree) -> TorchSmall:
    """Return the small federation's network as a module in training mode, with the model that was broadcast."""
    return load_weights(TorchSmall(1, CLASSES, NETWORK.width), broadcast).train()


def assert_params_match(params: Tree, module: nn.Module, rtol: float = 1e-8, atol: float = 1e-10) -> None:
    """Assert that parameters are close to those of a module."""
    for (name, p), leaf in zip(module.named_parameters(), tree.leaves(params), strict=True):
        torch.testing.assert_close(leaf, p.detach(), rtol=rtol, atol=atol, msg=name)


def make_batches(names: tuple[str, ...], count: int = 3) -> list[Batch]:
    """Return batches of 5 labeled and 6 unlabeled random images, each with all of the named views."""
    g = torch.Generator().manual_seed(1)

    def draw_images(n: int) -> Tensor:
        return torch.randn(n, 1, 8, 8, generator=g, dtype=torch.float64)

    result = []
    for _ in range(count):
        x = draw_images(5)
        y = torch.randint(0, CLASSES, (5,), generator=g)
        u = {name: draw_images(6) for name in names}
        views = {name: draw_images(5) for name in names}
        # 5 and 6 images: a function that confuses labeled and unlabeled ones fails by their number.
        result.append(Batch(x, y, torch.arange(5), u, torch.arange(6), x_views=views))
    return result


@dataclass(frozen=True)
class InvertedView:
    """A deterministic view that inverts the image."""

    def draw(self, n: int, shape: tuple[int, int, int], generator: torch.Generator) -> dict[str, Tensor]:
        return {}

    def apply(self, images: Tensor, draws: dict[str, Tensor], normalize: Normalize) -> Tensor:
        return normalize(255 - images)


FIXED_VIEWS = Views(InvertedView(), {"plain": Plain(), "weak": Plain(), "strong": InvertedView()})
"""Deterministic views. Labeled images use the same view as strongly augmented ones."""


def forward_groups(task: Task, params: Tree, *groups: Tensor) -> tuple[list[Tensor], list[Tree]]:
    """Return the logits of groups of images and the batch moments.

    There is one pass for all groups if the task's statistics are "joint", otherwise one for each group.
    """
    if task.statistics == "joint":
        # Batch statistics are computed over all groups, as in one forward pass of concatenated views.
        logits, moments = task.network.train(params, torch.cat(groups))
        return list(logits.split([len(group) for group in groups])), [moments]
    outputs = [task.network.train(params, group) for group in groups]
    return [logits for logits, _ in outputs], [moments for _, moments in outputs]


def update_running_stats(stats: Tree, moments: list[Tree]) -> Tree:
    """Update running statistics with the moments of passes, as PyTorch does with a momentum of 0.1."""
    for each in moments:
        stats = tree.map(lambda old, new: 0.9 * old + 0.1 * new.detach(), stats, each)
    return stats


def copy_requiring_grad(params: Tree) -> Tree:
    """Return copies of the leaves that require gradients."""
    return tree.map(lambda leaf: leaf.detach().clone().requires_grad_(), params)


def autograd_step(losses: dict[str, Tensor], leaves: dict[str, Tree], lr: float) -> dict[str, Tree]:
    """Return each tree after a step of SGD on the sum of all losses, differentiated in one backward pass."""
    total = torch.stack(list(losses.values())).sum()
    flat = [leaf for params in leaves.values() for leaf in tree.leaves(params)]
    # One backward pass through the sum, so that parameters which several losses share get the sum of their gradients.
    gradients = iter(torch.autograd.grad(total, flat))
    step: Callable[[Tensor], Tensor] = lambda leaf: leaf.detach() - lr * next(gradients)  # noqa: E731
    return {name: tree.map(step, params) for name, params in leaves.items()}
