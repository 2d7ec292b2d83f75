"""Build the rounds that `peers.py` and `executors.py` time: halfmoon's, and one of a plain PyTorch loop."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "support"))

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


class Setup(NamedTuple):
    """A configuration, the specification of its images, and the images of each client."""

    config: Config
    image_spec: ImageSpec
    dataset: FederatedDataset


def build_setup(size: str, method: str, cohort: int, steps: int | None = None) -> Setup:
    """Return the setup of a size, the same in every process: each client of the cohort has 70 images of noise.

    Args:
        size: a key of `SIZES`.
        method: a key of `METHODS`.
        cohort: clients of a round.
        steps: local steps, by default those of the size.
    """
    shared: dict[str, Any] = {"method": METHODS[method], "cohort": cohort, "clients": cohort, "device": "cpu"}
    g = torch.Generator().manual_seed(0)
    if size == "tiny":
        config = Config(**shared, data="digits", steps=steps or 6, unlabeled_batch=30)
        side = 8
        channels = 1
        rows = 70
    else:
        config = Config(**shared, data="cifar10", network="resnet9", width=16, steps=steps or 3)
        side = 32
        channels = 3
        rows = 70
    images = torch.randint(0, 256, (cohort * rows, channels, side, side), generator=g, dtype=torch.uint8)
    labels = torch.arange(len(images)) % 10
    image_spec = ImageSpec((channels, side, side), tuple("0123456789"), False, (0.5,) * channels, (0.25,) * channels)
    rule = Scenario(setting="iid-iid", clients=cohort, labels_per_class=1.0)
    split = rule.split(labels.numpy(), image_spec.classes, "noise")
    return Setup(config, image_spec, FederatedDataset(Examples(images, labels), split))


def default_executor(size: str) -> str:
    """Return the executor that `executor = "auto"` selects for a size."""
    config, image_spec, _ = build_setup(size, "fedavg", 2)
    return factory.select_executor(
        factory.choose_executor(config, factory.build_task(config, image_spec).network, image_spec.image)
    )


def build_round(
    size: str, method: str, cohort: int, executor: str, pool: ProcessExecutor | None = None, steps: int | None = None
) -> Callable[[], object]:
    """Return a function that runs one round of halfmoon; with `pool` clients train in its worker processes."""
    config, image_spec, dataset = build_setup(size, method, cohort, steps)
    config = replace(config, executor=executor)
    task = factory.build_task(config, image_spec)
    views = factory.build_views(config, image_spec)
    batching, serving = factory.build_batch_rules(config)
    chosen = registry.make(config.method)
    inner = pool or SerialExecutor()
    is_vmapped = factory.select_executor(config) == "vmap"
    trainer = VmapExecutor(inner, factory.max_vmapped_clients(config)) if is_vmapped else inner
    training = Training(batching, Budget(), serving, trainer)
    return repeat_first_round(chosen, Simulation(chosen, task, dataset, views, training, RuntimeSettings(cohort)))


def repeat_first_round(method: Method, runtime: Simulation) -> Callable[[], None]:
    """Return a function that runs the first round of a method, each time from the same model."""
    server = method.start(runtime.task, runtime.task.network.init(torch.Generator().manual_seed(0)))

    def run_round() -> None:
        runtime.open(0)
        method.round(runtime.task.at(0), server, runtime)
        runtime.close()

    return run_round


class PlainClient:
    """The local update in plain PyTorch: a `torch.nn` network, the batches of each step, and the loss."""

    def __init__(self, size: str, method: str, cohort: int) -> None:
        """Build the setup, and the network with the initial weights of every competitor."""
        self.config, image_spec, self.dataset = build_setup(size, method, cohort)
        self.views = factory.build_views(self.config, image_spec)
        self.task = factory.build_task(self.config, image_spec)
        self.batching = factory.build_batch_rules(self.config)[0]
        self.update = registry.make(self.config.method).client_updates(self.task)["train"]
        model = self.task.network.init(torch.Generator().manual_seed(0))
        width = self.task.network.width
        module = (TorchSmall if size == "tiny" else TorchResNet9)(image_spec.image[0], 10, width)
        self.net = load_weights(module, model).to(memory_format=torch.channels_last)
        self.first = {name: leaf.clone() for name, leaf in self.net.state_dict().items()}

    def steps(self, client: int) -> list[Step]:
        """Return the batches of a client's steps; each view is computed once."""
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
            "visit",  # the purpose that halfmoon draws with
            0,
            0,
            client,
        )
        normalize = self.task.normalize
        x = self.views.labeled.apply(local.x[drawn.x_rows], drawn.x_draws, normalize)
        y = local.y[drawn.x_rows]
        u = {
            name: self.views.unlabeled[name].apply(local.u[drawn.u_rows], drawn.u_draws[name], normalize)
            for name in self.update.requirements.views
        }
        a = amount.labeled
        b = amount.unlabeled
        return [
            (x[k * a : (k + 1) * a], y[k * a : (k + 1) * a], {name: v[k * b : (k + 1) * b] for name, v in u.items()})
            for k in range(amount.steps)
        ]

    def train(self, steps: Sequence[Step]) -> None:
        """Train the network on the batches of the steps."""
        self.net.train()
        optimizer = torch.optim.Adam(self.net.parameters(), lr=self.config.lr)
        for x, y, u in steps:
            optimizer.zero_grad()
            loss(self.net, x, y, u).backward()
            optimizer.step()


def build_plain_round(size: str, method: str, cohort: int) -> Callable[[], object]:
    """Return a function that runs one round in plain PyTorch, client after client."""
    client = PlainClient(size, method, cohort)

    def run_round() -> dict[str, Tensor]:
        total: dict[str, Tensor] = {}
        for k in range(cohort):
            client.net.load_state_dict(client.first)
            client.train(client.steps(k))
            for name, leaf in client.net.state_dict().items():
                share = leaf.clone() / cohort if leaf.is_floating_point() else leaf.clone()
                total[name] = total[name] + share if name in total else share
        return total

    return run_round


def loss(net: nn.Module, x: Tensor, y: Tensor, u: dict[str, Tensor]) -> Tensor:
    """Return FedAvg's labeled loss, or FixMatch's, with joint batch statistics."""
    if not u:
        return F.cross_entropy(net(to_channels_last(x)), y)
    logits = net(to_channels_last(torch.cat([x, u["strong"], u["weak"]])))
    labeled, strong, weak = logits.split([len(y), len(u["strong"]), len(u["weak"])])
    confidence, label = weak.detach().softmax(-1).max(-1)
    used = (confidence >= THRESHOLD).float()
    return F.cross_entropy(labeled, y) + (F.cross_entropy(strong, label, reduction="none") * used).mean()


def to_channels_last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)
