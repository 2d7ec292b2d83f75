"""What the tests of methods share: images, clients and runs, a network of two weights, fixed views, and oracles."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch_models import TorchSmall, load_weights

from halfmoon.api.types import Batch, ClientData, ClientUpdate, Method, Task
from halfmoon.contract.checks import compare_executors
from halfmoon.contract.small_federation import CLASSES, NETWORK, Snapshot, make_simulation, run_rounds, start_server
from halfmoon.core import tree
from halfmoon.core.tree import Tree
from halfmoon.data.views import Plain
from halfmoon.engine.local_clients import FederatedDataset
from halfmoon.engine.sampling import Views
from halfmoon.models import Network
from halfmoon.models.network import Normalize
from halfmoon.models.passes import ForwardPass


@dataclass(frozen=True)
class TwoWeightNetwork(Network):
    """Two classes, whose logits are a weight each times the first pixel."""

    channels: int = 1
    classes: int = 2

    def init(self, generator: torch.Generator) -> Tree:
        return make_two_weight_model(0.0, 0.0)

    def layers(self, x: Tensor, run: ForwardPass) -> Tensor:
        return run.linear("head", x.flatten(1)[:, :1])

    def check(self, shape: tuple[int, int, int]) -> None:
        pass


TWO_WEIGHT_NETWORK = TwoWeightNetwork(norm="none")


def make_two_weight_model(one: float, two: float) -> Tree:
    """Return the model of `TwoWeightNetwork` with these weights."""
    return {"params": {"head": {"weight": torch.tensor([[one], [two]], dtype=torch.float64)}}, "stats": {}}


def make_pixel_images(*values: float) -> Tensor:
    """Return images (n, 1, 1, 1) of one pixel."""
    return torch.tensor(values, dtype=torch.float64).view(-1, 1, 1, 1)


def make_random_images(count: int, seed: int) -> Tensor:
    """Return random images (count, 1, 8, 8), as a network sees them."""
    return torch.randn(count, 1, 8, 8, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def make_client_data(labeled: int = 5, unlabeled: int = 6, y: Tensor | None = None, **views: Tensor) -> ClientData:
    """Return a client of these counts; steps bring images of their own."""
    nothing = torch.zeros(0, 1, 8, 8, dtype=torch.uint8)
    y = torch.zeros(0, dtype=torch.int64) if y is None else y
    return ClientData(nothing, y, nothing, torch.tensor(labeled), torch.tensor(unlabeled), views)


def begin_update(update: ClientUpdate, broadcast: Tree, data: ClientData) -> Tree:
    """Return the carry of a client's first update."""
    return update.begin(broadcast, update.initial_memory(broadcast, torch.Generator()), data)


def simulate_rounds(
    method: Method, shared: Task, held: FederatedDataset | None = None, *, rounds: int = 1, **options: Any
) -> list[Snapshot]:
    """Return the first rounds of a federation."""
    return run_rounds(
        method, make_simulation(method, shared, held, **options), start_server(method, shared), range(rounds)
    )


def simulate_with_both_executors(
    method: Method, shared: Task, held: FederatedDataset | None = None, *, rounds: int = 2, **options: Any
) -> list[Snapshot]:
    """Return the first rounds, which are the same client by client and with clients as one program: to 1e-9."""
    loop, vmap = (
        simulate_rounds(method, shared, held, rounds=rounds, executor=each, **options) for each in ("loop", "vmap")
    )
    compare_executors(loop, vmap)
    return loop


def make_torch_module(broadcast: Tree) -> TorchSmall:
    """Return the network of the scene as a module in training, with a model's parameters and statistics."""
    return load_weights(TorchSmall(1, CLASSES, NETWORK.width), broadcast).train()


def assert_params_match(params: Tree, module: nn.Module, rtol: float = 1e-8, atol: float = 1e-10) -> None:
    """Compare parameters with a module's."""
    for (name, p), leaf in zip(module.named_parameters(), tree.leaves(params), strict=True):
        torch.testing.assert_close(leaf, p.detach(), rtol=rtol, atol=atol, msg=name)


def make_batches(names: tuple[str, ...], count: int = 3) -> list[Batch]:
    """Return batches of 5 + 6 random images with all of these views, of labeled and of unlabeled images."""
    g = torch.Generator().manual_seed(1)
    draw = lambda n: torch.randn(n, 1, 8, 8, generator=g, dtype=torch.float64)  # noqa: E731
    found = []
    for _ in range(count):
        x = draw(5)
        y = torch.randint(0, CLASSES, (5,), generator=g)
        u = {name: draw(6) for name in names}
        views = {name: draw(5) for name in names}
        found.append(Batch(x, y, torch.arange(5), u, torch.arange(6), x_views=views))
    return found


@dataclass(frozen=True)
class InvertedView:
    """The image with its values turned round: a view that differs, and of which nothing is drawn."""

    def draw(self, n: int, shape: tuple[int, int, int], generator: torch.Generator) -> dict[str, Tensor]:
        return {}

    def apply(self, images: Tensor, draws: dict[str, Tensor], normalize: Normalize) -> Tensor:
        return normalize(255 - images)


FIXED_VIEWS = Views(InvertedView(), {"plain": Plain(), "weak": Plain(), "strong": InvertedView()})
"""Views without chance: a labeled image is shown as the strong view shows it."""


def forward_groups(task: Task, leaves: Tree, *groups: Tensor) -> tuple[list[Tensor], list[Tree]]:
    """Return the logits of groups of images and the moments, in one pass or each in its own, as the task says."""
    if task.statistics == "joint":
        logits, moments = task.network.train(leaves, torch.cat(groups))
        return list(logits.split([len(group) for group in groups])), [moments]
    made = [task.network.train(leaves, group) for group in groups]
    return [logits for logits, _ in made], [moments for _, moments in made]


def update_running_stats(stats: Tree, moments: list[Tree]) -> Tree:
    """Return running statistics after these passes, by PyTorch's formula with its momentum of 0.1."""
    for each in moments:
        stats = tree.map(lambda old, new: 0.9 * old + 0.1 * new.detach(), stats, each)
    return stats


def copy_requiring_grad(params: Tree) -> Tree:
    return tree.map(lambda leaf: leaf.detach().clone().requires_grad_(), params)


def autograd_step(losses: dict[str, Tensor], leaves: dict[str, Tree], lr: float) -> dict[str, Tree]:
    """Return each tree after a step of SGD on the SUM of all losses, differentiated in one backward pass."""
    total = torch.stack(list(losses.values())).sum()
    flat = [leaf for params in leaves.values() for leaf in tree.leaves(params)]
    gradients = iter(torch.autograd.grad(total, flat))
    step: Callable[[Tensor], Tensor] = lambda leaf: leaf.detach() - lr * next(gradients)  # noqa: E731
    return {name: tree.map(step, params) for name, params in leaves.items()}
