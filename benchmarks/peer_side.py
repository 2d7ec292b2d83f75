"""One side of `peers.py` in an environment of its own: plays a round for each line of standard input.

    python benchmarks/peer_side.py pfl|flower tiny|large fedavg|fixmatch COHORT

An answer is a line of JSON: the processor seconds of this process and of all that it started, and the wall clock's.
Clients, images, views and steps are those of `peer_rounds.py`, whose `torch.nn` network and loss both libraries train.
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

import peer_rounds
import torch
from peer_rounds import ByHand

TICKS = os.sysconf("SC_CLK_TCK")
FOREVER = 10**9


def processor() -> float:
    """Return the processor seconds of this process and of all below it that live."""
    parents, spent = dict[int, int](), dict[int, float]()
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                words = (folder / "stat").read_text().rpartition(")")[2].split()
            except OSError:  # it has ended
                continue
            parents[int(folder.name)], spent[int(folder.name)] = (
                int(words[1]),
                (int(words[11]) + int(words[12])) / TICKS,
            )

    def below(process: int) -> bool:
        while process and process != os.getpid():
            process = parents.get(process, 0)
        return process == os.getpid()

    return time.process_time() + sum(spent[each] for each in spent if each != os.getpid() and below(each))


class Clock:
    """Waits for a question, and answers it with what passed since: `turn` ends a round and waits for the next."""

    def __init__(self, answers: Any) -> None:
        """Write answers there."""
        self._answers, self._began = answers, (0.0, 0.0)

    def turn(self, first: bool = False) -> bool:
        """Answer, except at first, and return whether another round is wanted."""
        if not first:
            spent = {"cpu": processor() - self._began[0], "wall": time.perf_counter() - self._began[1]}
            print(json.dumps(spent), file=self._answers, flush=True)
        asked = bool(sys.stdin.readline())
        self._began = processor(), time.perf_counter()
        return asked


def pfl(size: str, method: str, cohort: int, turn: Callable[..., bool]) -> None:
    """Play in pfl: its PyTorch model, simulated backend and federated averaging. It averages parameters alone."""
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

    hand = ByHand(size, method, cohort)
    views = hand.update.requirements.views

    class Trained(torch.nn.Module):
        """The network with the loss that pfl asks it for; a batch is one step, under a leading dimension of one."""

        def __init__(self) -> None:
            super().__init__()
            self.net = hand.net

        def loss(self, x: Any, y: Any, *u: Any) -> Any:
            self.net.train()
            given = {name: view[0] for name, view in zip(views, u, strict=True)}
            return peer_rounds.loss(self.net, x[0], y[0], given)

        def metrics(self, *data: Any) -> dict[str, Any]:
            return {}

    def user(client: int) -> Dataset:
        steps = hand.steps(client)
        columns = [
            [x for x, _, _ in steps],
            [y for _, y, _ in steps],
            *[[u[name] for _, _, u in steps] for name in views],
        ]
        return Dataset([torch.stack(column) for column in columns], user_id=client)

    class Turns(TrainingProcessCallback):
        """Waits after each round."""

        def after_central_iteration(self, *_: Any, **__: Any) -> tuple[bool, Metrics]:
            return not turn(), Metrics()

    model = Trained()
    central = torch.optim.SGD(model.parameters(), lr=1.0)
    data = FederatedDataset(user, get_user_sampler("minimize_reuse", range(cohort)))
    how = NNTrainHyperParams(local_num_epochs=1, local_learning_rate=hand.config.lr, local_batch_size=1)
    params = NNAlgorithmParams(
        central_num_iterations=FOREVER, evaluation_frequency=FOREVER, train_cohort_size=cohort, val_cohort_size=0
    )
    if turn(first=True):
        FederatedAveraging().run(
            params,
            SimulatedBackend(data, data),
            PyTorchModel(model, torch.optim.Adam, central),
            how,
            callbacks=[Turns()],
            send_metrics_to_platform=False,
        )


@cache
def known(size: str, method: str, cohort: int) -> ByHand:
    """Return what clients train, made once in a process."""
    torch.set_num_threads(1)
    return ByHand(size, method, cohort)


def flower(size: str, method: str, cohort: int, turn: Callable[..., bool]) -> None:
    """Play in Flower's simulation, on Ray: a ServerApp with its FedAvg, a ClientApp, one processor."""
    from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    client, server = ClientApp(), ServerApp()

    @client.train()
    def _(message: Message, context: Context) -> Message:
        import peer_side  # this function is sent without the module around it

        hand = peer_side.known(size, method, cohort)
        hand.net.load_state_dict(message.content["arrays"].to_torch_state_dict())
        steps = hand.steps(int(context.node_config["partition-id"]))
        hand.train(steps)
        told = RecordDict({"arrays": ArrayRecord(hand.net.state_dict()), "metrics": MetricRecord({"num-examples": 1})})
        return Message(content=told, reply_to=message)

    @server.main()
    def _(grid: Grid, context: Context) -> None:
        first = ArrayRecord(known(size, method, cohort).first)
        wanted = turn(first=True)
        while wanted:
            strategy = FedAvg(fraction_evaluate=0.0, min_train_nodes=cohort, min_available_nodes=cohort)
            strategy.start(grid, first, num_rounds=1)
            wanted = turn()

    backend = {
        "init_args": {"address": "local", "num_cpus": 1, "include_dashboard": False},
        "client_resources": {"num_cpus": 1},
    }
    run_simulation(server, client, cohort, backend_config=backend)


def main() -> None:
    """Play until the standard input ends."""
    library, size, method, cohort = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the libraries print is no answer
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    {"pfl": pfl, "flower": flower}[library](size, method, int(cohort), Clock(answers).turn)


if __name__ == "__main__":
    main()
