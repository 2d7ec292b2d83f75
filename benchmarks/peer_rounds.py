"""The rounds that `peers.py` times: who trains on what, halfmoon's round, and the one that somebody writes by hand."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))

from torch_models import TorchResNet9, TorchSmall, load_weights

from halfmoon import Config
from halfmoon.api.types import Method, UpdateRequirements
from halfmoon.data import Scenario
from halfmoon.engine.budget import Budget
from halfmoon.engine.evaluation import Examples
from halfmoon.engine.executors.processes import ProcessExecutor
from halfmoon.engine.executors.serial import SerialExecutor
from halfmoon.engine.executors.vmap import VmapExecutor
from halfmoon.engine.local_clients import FederatedDataset, Training
from halfmoon.engine.runtime import RuntimeSettings
from halfmoon.engine.sampling import draw
from halfmoon.engine.simulation import Simulation
from halfmoon.methods import registry
from halfmoon.runs import factory
from halfmoon.runs.factory import ImageSpec

METHODS = {"fedavg": "fedavg", "fixmatch": "fedavg-fixmatch"}
SIZES = {"tiny": "tiny", "large": "resnet9"}
THRESHOLD = 0.95

Step = tuple[Tensor, Tensor, dict[str, Tensor]]
"""The images and labels of one step, and its unlabeled views by name."""


class Scene(NamedTuple):
    """Who trains on what: a configuration, the form of its images, and these by client."""

    config: Config
    form: ImageSpec
    dataset: FederatedDataset


def scene(size: str, method: str, cohort: int, steps: int | None = None) -> Scene:
    """Return the scene of a size, the same in every process: all clients of the cohort have 70 images of noise.

    They take `steps` steps, or as many as the size has.
    """
    shared: dict[str, Any] = {"method": METHODS[method], "cohort": cohort, "clients": cohort, "device": "cpu"}
    g = torch.Generator().manual_seed(0)
    if size == "tiny":
        config = Config(**shared, data="digits", steps=steps or 6, unlabeled_batch=30)
        side, channels, rows = 8, 1, 70
    else:
        config = Config(**shared, data="cifar10", network="resnet9", width=16, steps=steps or 3)
        side, channels, rows = 32, 3, 70
    images = torch.randint(0, 256, (cohort * rows, channels, side, side), generator=g, dtype=torch.uint8)
    labels = torch.arange(len(images)) % 10
    form = ImageSpec((channels, side, side), tuple("0123456789"), False, (0.5,) * channels, (0.25,) * channels)
    rule = Scenario(setting="iid-iid", clients=cohort, labels_per_class=1.0)
    split = rule.split(labels.numpy(), form.classes, "noise")
    return Scene(config, form, FederatedDataset(Examples(images, labels), split))


def chosen(size: str) -> str:
    """Return how halfmoon runs the clients of a round of this size where nobody says."""
    config, form, _ = scene(size, "fedavg", 2)
    return factory.select_executor(
        factory.choose_executor(config, factory.build_task(config, form).network, form.image)
    )


def ours(
    size: str, method: str, cohort: int, executor: str, pool: ProcessExecutor | None = None, steps: int | None = None
) -> Callable[[], object]:
    """Return one round of halfmoon."""
    config, form, dataset = scene(size, method, cohort, steps)
    config = replace(config, executor=executor)
    task, views = factory.build_task(config, form), factory.build_views(config, form)
    batching, serving = factory.build_batch_rules(config)
    made = registry.make(config.method)
    inner = pool or SerialExecutor()
    is_vmapped = factory.select_executor(config) == "vmap"
    trainer = VmapExecutor(inner, factory.max_vmapped_clients(config)) if is_vmapped else inner
    training = Training(batching, Budget(), serving, trainer)
    return one_round(made, Simulation(made, task, dataset, views, training, RuntimeSettings(cohort)))


def one_round(made: Method, runtime: Simulation) -> Callable[[], None]:
    """Return what plays the first round of a method, from the same model each time."""
    server = made.start(runtime.task, runtime.task.network.init(torch.Generator().manual_seed(0)))

    def play() -> None:
        runtime.open(0)
        made.round(runtime.task.at(0), server, runtime)
        runtime.close()

    return play


class ByHand:
    """What a client trains and on what, for whoever writes the loop: a `torch.nn` network, its steps, the loss."""

    def __init__(self, size: str, method: str, cohort: int) -> None:
        """Make the scene, and the network as all sides start it."""
        self.config, form, self.dataset = scene(size, method, cohort)
        self.views, self.task = factory.build_views(self.config, form), factory.build_task(self.config, form)
        self.batching = factory.build_batch_rules(self.config)[0]
        self.update = registry.make(self.config.method).client_updates(self.task)["train"]
        model = self.task.network.init(torch.Generator().manual_seed(0))
        width = self.task.network.width
        module = (TorchSmall if size == "tiny" else TorchResNet9)(form.image[0], 10, width)
        self.net = load_weights(module, model).to(memory_format=torch.channels_last)
        self.first = {name: leaf.clone() for name, leaf in self.net.state_dict().items()}

    def steps(self, client: int) -> list[Step]:
        """Return the steps of a client's update, of views that are made once."""
        local, _ = self.dataset.client_data(client)
        amount = Budget().amount(
            self.batching, self.update, self.dataset.training_size(client), self.dataset.split_size(client)
        )
        drawn = draw(
            amount,
            local,
            self.views,
            UpdateRequirements(self.update.requirements.views),
            None,
            0,
            "visit",
            0,
            0,
            client,
        )
        normalize = self.task.normalize
        x, y = self.views.labeled.apply(local.x[drawn.x_rows], drawn.x_draws, normalize), local.y[drawn.x_rows]
        u = {
            name: self.views.unlabeled[name].apply(local.u[drawn.u_rows], drawn.u_draws[name], normalize)
            for name in self.update.requirements.views
        }
        a, b = amount.labeled, amount.unlabeled
        return [
            (x[k * a : (k + 1) * a], y[k * a : (k + 1) * a], {name: v[k * b : (k + 1) * b] for name, v in u.items()})
            for k in range(amount.steps)
        ]

    def train(self, steps: Sequence[Step]) -> None:
        """Train the network on the steps, from where it is."""
        self.net.train()
        optimizer = torch.optim.Adam(self.net.parameters(), lr=self.config.lr)
        for x, y, u in steps:
            optimizer.zero_grad()
            loss(self.net, x, y, u).backward()
            optimizer.step()


def plain(size: str, method: str, cohort: int) -> Callable[[], object]:
    """Return one round as somebody writes it by hand."""
    hand = ByHand(size, method, cohort)

    def play() -> dict[str, Tensor]:
        total: dict[str, Tensor] = {}
        for k in range(cohort):
            hand.net.load_state_dict(hand.first)
            hand.train(hand.steps(k))
            for name, leaf in hand.net.state_dict().items():
                part = leaf.clone() / cohort if leaf.is_floating_point() else leaf.clone()
                total[name] = total[name] + part if name in total else part
        return total

    return play


def loss(net: nn.Module, x: Tensor, y: Tensor, u: dict[str, Tensor]) -> Tensor:
    """Return FedAvg's labeled loss, or FixMatch's, with joint batch statistics."""
    if not u:
        return F.cross_entropy(net(laid(x)), y)
    logits = net(laid(torch.cat([x, u["strong"], u["weak"]])))
    labeled, strong, weak = logits.split([len(y), len(u["strong"]), len(u["weak"])])
    confidence, label = weak.detach().softmax(-1).max(-1)
    used = (confidence >= THRESHOLD).float()
    return F.cross_entropy(labeled, y) + (F.cross_entropy(strong, label, reduction="none") * used).mean()


def laid(x: Tensor) -> Tensor:
    """Lay images out channels-last."""
    return x.contiguous(memory_format=torch.channels_last)
