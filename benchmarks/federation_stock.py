"""FedAvg as Flower ships it, around plain PyTorch: what `federation_cost.py` sets halfmoon's federation beside.

Nothing of halfmoon is imported. The run's configuration says "network" (small or resnet9), "width", "steps", "batch",
"lr", "rounds", "sites" and "times" (a file that gets the time after every round, and the bytes of its arrays); a node's
says "images": an .npz with labeled images, uint8 (N, 1, H, W), and labels.
"""

import json
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from torch import Tensor, nn

MEAN = 0.5
STD = 0.25

client = ClientApp()
server = ServerApp()


def block(inputs: int, outputs: int) -> nn.Sequential:
    """Return a 3x3 convolution, its normalization and its activation."""
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU())


class Residual(nn.Sequential):
    """Blocks whose output is added to their input."""

    def forward(self, input: Tensor) -> Tensor:
        """Return input + blocks(input)."""
        return input + super().forward(input)


class Mean(nn.Module):
    """The mean of each channel, (B, C)."""

    def forward(self, z: Tensor) -> Tensor:
        """Return the mean over height and width."""
        return z.mean((-2, -1))


def small(w: int) -> nn.Sequential:
    """Return the network that halfmoon calls small."""
    pool = nn.MaxPool2d(2)
    return nn.Sequential(block(1, w), pool, block(w, 2 * w), pool, block(2 * w, 2 * w), Mean(), nn.Linear(2 * w, 10))


def resnet9(w: int) -> nn.Sequential:
    """Return ResNet-9."""
    pool = nn.MaxPool2d(2)
    return nn.Sequential(
        *(block(1, w), block(w, 2 * w), pool, Residual(block(2 * w, 2 * w), block(2 * w, 2 * w))),
        *(block(2 * w, 4 * w), pool, block(4 * w, 8 * w), pool, Residual(block(8 * w, 8 * w), block(8 * w, 8 * w))),
        *(nn.AdaptiveMaxPool2d(1), nn.Flatten(), nn.Linear(8 * w, 10)),
    )


NETWORKS = {"small": small, "resnet9": resnet9}


def network(context: Context) -> nn.Sequential:
    """Return the run's network."""
    return NETWORKS[str(context.run_config["network"])](int(context.run_config["width"]))


@client.train()
def train(message: Message, context: Context) -> Message:
    """Take the run's number of steps on the node's labeled images."""
    torch.set_num_threads(1)
    steps, batch, lr = (float(context.run_config[name]) for name in ("steps", "batch", "lr"))
    model = network(context)
    model.load_state_dict(message.content.array_records["arrays"].to_torch_state_dict())
    held = np.load(str(context.node_config["images"]))
    images = torch.from_numpy(held["images"])
    labels = torch.from_numpy(held["labels"])
    optimizer = torch.optim.SGD(model.parameters(), lr)
    total = 0.0
    order = torch.zeros(0, dtype=torch.int64)
    for _ in range(int(steps)):
        while len(order) < batch:
            order = torch.cat([order, torch.randperm(len(labels))])
        rows = order[: int(batch)]
        order = order[int(batch) :]
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model((images[rows] / 255 - MEAN) / STD), labels[rows])
        loss.backward()
        optimizer.step()
        total += loss.item()
    metrics = MetricRecord({"loss": total / steps, "num-examples": len(labels)})
    return Message(RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}), reply_to=message)


class Counted(FedAvg):
    """Flower's FedAvg, and the bytes of the arrays that it has sent and got."""

    sent = 0

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Count what goes down."""
        messages = list(super().configure_train(server_round, arrays, config, grid))
        self.sent += sum(size(message) for message in messages)
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Count what comes up."""
        replies = list(replies)
        self.sent += sum(size(reply) for reply in replies)
        return super().aggregate_train(server_round, replies)


def size(message: Message) -> int:
    """Return the bytes of a message's arrays."""
    return sum(len(array.data) for record in message.content.array_records.values() for array in record.values())


@server.main()
def main(grid: Grid, context: Context) -> None:
    """Run the rounds, and record when each ended."""
    sites = int(context.run_config["sites"])
    rounds = int(context.run_config["rounds"])
    times = Path(str(context.run_config["times"]))
    strategy = Counted(fraction_evaluate=0.0, min_train_nodes=sites, min_available_nodes=sites)

    def after(number: int, arrays: ArrayRecord) -> None:
        with times.open("a") as file:
            file.write(json.dumps({"round": number, "at": time.monotonic(), "bytes": strategy.sent}) + "\n")

    arrays = ArrayRecord(network(context).state_dict())
    strategy.start(grid, arrays, num_rounds=rounds, evaluate_fn=after)
