"""Run rounds of another library for `peers.py`, in an environment of that library: one for each line of standard input.

    python benchmarks/support/peer_library.py pfl|flower tiny|large fedavg|fixmatch COHORT

A reply is a line of JSON: the processor seconds of this process and of all that it started, and those of the clock.
Clients, images, views and steps are those of `rounds.py`, whose `torch.nn` network and loss both libraries train.
"""

import json
import logging
import os
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

from support import rounds
from support.rounds import PlainClient

TICKS = os.sysconf("SC_CLK_TCK")
FOREVER = 10**9


def processor_seconds() -> float:
    """Return the processor seconds of this process and of all its running descendants."""
    parents = dict[int, int]()
    spent = dict[int, float]()
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                words = (folder / "stat").read_text().rpartition(")")[2].split()
            except OSError:  # the process has ended
                continue
            parents[int(folder.name)], spent[int(folder.name)] = (
                int(words[1]),
                (int(words[11]) + int(words[12])) / TICKS,
            )

    def is_descendant(process: int) -> bool:
        while process and process != os.getpid():
            process = parents.get(process, 0)
        return process == os.getpid()

    return time.process_time() + sum(spent[each] for each in spent if each != os.getpid() and is_descendant(each))


class RoundTimer:
    """Waits for requests, and replies with the seconds that the round took.

    Args:
        replies: the file that replies are written to.
    """

    def __init__(self, replies: Any) -> None:
        self._replies = replies
        self._start = (0.0, 0.0)

    def wait_for_request(self, first: bool = False) -> bool:
        """Report the round that has ended, except at the first call, and wait for the next request.

        Returns:
            Whether another round is requested.
        """
        if not first:
            spent = {"cpu": processor_seconds() - self._start[0], "wall": time.perf_counter() - self._start[1]}
            print(json.dumps(spent), file=self._replies, flush=True)
        requested = bool(sys.stdin.readline())
        self._start = processor_seconds(), time.perf_counter()
        return requested


def run_pfl(size: str, method: str, cohort: int, wait_for_request: Callable[..., bool]) -> None:
    """Train in pfl: its PyTorch model, simulated backend and federated averaging, which averages only parameters."""
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.sampling import get_user_sampler
    from pfl.hyperparam import NNTrainHyperParams
    from pfl.metrics import Metrics
    from pfl.model.pytorch import PyTorchModel

    client = PlainClient(size, method, cohort)
    views = client.update.requirements.views

    class Trained(torch.nn.Module):
        """The network with a loss in the form of pfl: a batch is one step, with a leading dimension of one."""

        def __init__(self) -> None:
            super().__init__()
            self.net = client.net

        def loss(self, x: Any, y: Any, *u: Any) -> Any:
            self.net.train()
            unlabeled = {name: view[0] for name, view in zip(views, u, strict=True)}
            return rounds.loss(self.net, x[0], y[0], unlabeled)

        def metrics(self, *data: Any) -> dict[str, Any]:
            return {}

    def user_dataset(user: int) -> Dataset:
        steps = client.steps(user)
        columns = [
            [x for x, _, _ in steps],
            [y for _, y, _ in steps],
            *[[u[name] for _, _, u in steps] for name in views],
        ]
        return Dataset([torch.stack(column) for column in columns], user_id=user)

    class WaitAfterRound(TrainingProcessCallback):
        """Report each round, and wait for the next request."""

        def after_central_iteration(self, *_: Any, **__: Any) -> tuple[bool, Metrics]:
            return not wait_for_request(), Metrics()

    model = Trained()
    central = torch.optim.SGD(model.parameters(), lr=1.0)
    data = FederatedDataset(user_dataset, get_user_sampler("minimize_reuse", range(cohort)))
    training = NNTrainHyperParams(local_num_epochs=1, local_learning_rate=client.config.lr, local_batch_size=1)
    params = NNAlgorithmParams(
        central_num_iterations=FOREVER, evaluation_frequency=FOREVER, train_cohort_size=cohort, val_cohort_size=0
    )
    if wait_for_request(first=True):
        FederatedAveraging().run(
            params,
            SimulatedBackend(data, data),
            PyTorchModel(model, torch.optim.Adam, central),
            training,
            callbacks=[WaitAfterRound()],
            send_metrics_to_platform=False,
        )


@cache
def cached_client(size: str, method: str, cohort: int) -> PlainClient:
    """Return the local update of the clients, built once in a process."""
    torch.set_num_threads(1)
    return PlainClient(size, method, cohort)


def run_flower(size: str, method: str, cohort: int, wait_for_request: Callable[..., bool]) -> None:
    """Train in Flower's simulation on Ray: a ServerApp with its FedAvg, a ClientApp, one processor."""
    from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    client = ClientApp()
    server = ServerApp()

    @client.train()
    def _(message: Message, context: Context) -> Message:
        # Ray pickles this function without its module, so it imports what it needs.
        from support import peer_library

        trained = peer_library.cached_client(size, method, cohort)
        trained.net.load_state_dict(message.content["arrays"].to_torch_state_dict())
        steps = trained.steps(int(context.node_config["partition-id"]))
        trained.train(steps)
        content = RecordDict(
            {"arrays": ArrayRecord(trained.net.state_dict()), "metrics": MetricRecord({"num-examples": 1})}
        )
        return Message(content=content, reply_to=message)

    @server.main()
    def _(grid: Grid, context: Context) -> None:
        first = ArrayRecord(cached_client(size, method, cohort).first)
        requested = wait_for_request(first=True)
        while requested:
            strategy = FedAvg(fraction_evaluate=0.0, min_train_nodes=cohort, min_available_nodes=cohort)
            strategy.start(grid, first, num_rounds=1)
            requested = wait_for_request()

    backend = {
        "init_args": {"address": "local", "num_cpus": 1, "include_dashboard": False},
        "client_resources": {"num_cpus": 1},
    }
    run_simulation(server, client, cohort, backend_config=backend)


def main() -> None:
    """Run rounds until standard input ends."""
    library, size, method, cohort = sys.argv[1:]
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the libraries print to standard output
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    runners = {"pfl": run_pfl, "flower": run_flower}
    runners[library](size, method, int(cohort), RoundTimer(replies).wait_for_request)


if __name__ == "__main__":
    main()
