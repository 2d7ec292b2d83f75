"""Measure the gradient norm of FedDure's Theorem 1 against the number of rounds T, with rates rescaled for each T.

    taskset -c 1 nice -n 10 python results/convergence.py [--out results/convergence] [--fit T]

Theorem 1 (AAAI 2024, Eq. 11): with eta_s = min{1, e / T} and eta = min{1 / L, c / sqrt(T)}, the minimum over t of the
squared norm of the gradient in theta of CE(y, f_d(x; phi^{t+1}(theta^t))) is O(c / sqrt(T)). Here phi^{t+1} is C-reg
after one step (Eq. 2) on pseudo-labels that theta gives. As an arg max has no gradient, the label is its expectation
under the model, a soft label, which is the derivation of Eq. 8. One run per T: T rounds of one local step each, plain
gradient steps, the paper's preset of FedDure, eta = eta_w = c / sqrt(T). At the start and after 25 evenly spaced
rounds three squared norms are measured on all images of all clients, without augmentation, by double back-propagation
with plain `torch.func`:

    theorem    of the mean over labeled images of the loss above, each client with its F-reg
    direction  the same divided by eta_s^2, a factor that comes from the step of phi^{t+1}, which has length eta_s
    labeled    of CE(y, f(x; theta)), the labeled loss of the global model

Finished runs are stored in OUT.csv.gz, and a stopped command continues there. When all are finished it draws OUT.png and
prints the minimum and the mean over t of each norm, by T, and the slopes of their logarithms over log T, from the first T
and from the second: the mean of the seeds' least squares slopes, with Student's 95 % interval.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import records
import torch
from scipy import special

from halfmoon import Config
from halfmoon.core import tree
from halfmoon.core.optim import gradient_step
from halfmoon.core.tree import Tree
from halfmoon.engine.driver import create_first_memory
from halfmoon.engine.executors.vmap import VmapExecutor
from halfmoon.engine.local_clients import FederatedDataset, Training
from halfmoon.engine.loop import initial_model
from halfmoon.engine.runtime import RuntimeSettings
from halfmoon.engine.simulation import Simulation
from halfmoon.methods.feddure import PAPER
from halfmoon.methods.fine_regulator import compute_instance_weights
from halfmoon.runs.budgets import build_budget
from halfmoon.runs.factory import build_batch_rules, build_method, build_problem

HORIZONS = (25, 50, 100, 200, 400)
SEEDS = (0, 1, 2, 3, 4)
C = 5.0
E = 10.0
MEASUREMENTS = 25
"""Rounds of a run after which norms are measured."""
NORMS = ("theorem", "direction", "labeled")
COLUMNS: tuple[str, ...] = ("seed", "horizon", "round", *NORMS)
FEDERATION: dict[str, Any] = {
    "data": "digits", "network": "small", "width": 8, "norm": "group", "clients": 10, "cohort": 5, "setting": "iid-iid",
    "labels_per_class": 5.0, "labeled_batch": 10, "unlabeled_batch": 10, "steps": 1,
    "optimizer": "sgd", "momentum": 0.0, "weight_decay": 0.0, "schedule": "constant", "labeled_view": "plain",
    "budget": "none", "method": "feddure",
}  # fmt: skip


def learning_rates(horizon: int) -> tuple[float, float]:
    """Return eta and eta_s of a horizon; 1 / L is unknown and assumed to be larger."""
    return C / horizon**0.5, min(1.0, E / horizon)


class MeasuredRun:
    """A run whose squared norms are measured between its rounds."""

    def __init__(self, horizon: int, seed: int) -> None:
        eta, self.eta_s = learning_rates(horizon)
        rates = {"virtual_lr": self.eta_s, "coarse_lr": self.eta_s, "regulator_lr": eta, "coarse_step": "plain"}
        options = {**PAPER, **rates}
        config = Config(**FEDERATION, lr=eta, rounds=horizon, seed=seed, split_seed=seed, options={"feddure": options})
        problem = build_problem(config)
        batching, serving = build_batch_rules(config)
        self.horizon = horizon
        self.seed = seed
        self.task = problem.task
        self.method = build_method(config)
        self.runtime = Simulation(
            self.method, self.task, FederatedDataset(problem.train, problem.split), problem.views,
            Training(batching, build_budget(config, self.task), serving, VmapExecutor()), RuntimeSettings(config.cohort, seed),
        )  # fmt: skip
        self.client_update = self.method.client_updates(self.task)["train"]
        self.locals = [self.runtime.dataset.client_data(client)[0] for client in range(config.clients)]

    def models(self) -> Iterator[tuple[int, Tree]]:
        """Yield the number of finished rounds and the server's state, at the start and after `MEASUREMENTS` rounds."""
        server = self.method.start(self.task, initial_model(self.task, self.seed, torch.device("cpu")))
        yield 0, server
        for number in range(self.horizon):
            self.runtime.open(number)
            server = self.method.round(self.task.at(number), server, self.runtime)
            self.runtime.close()
            if (number + 1) % max(1, self.horizon // MEASUREMENTS) == 0:
                yield number + 1, server

    def rows(self) -> list[dict[str, Any]]:
        """Return the norms of `models`."""
        run = {"seed": self.seed, "horizon": self.horizon}
        return [{**run, "round": number, **self.norms(server)} for number, server in self.models()]

    def fit(self, server: Tree) -> str:
        """Return labeled loss and accuracy on the labeled images of all clients."""
        x, y = (torch.cat([getattr(local, name) for local in self.locals]) for name in "xy")
        z = self.task.network.train(server["params"], self.task.normalize(x))[0]
        return f"loss {torch.nn.functional.cross_entropy(z, y):.2f}, right {(z.argmax(1) == y).float().mean():.0%}"

    def norms(self, server: Tree) -> dict[str, float]:
        """Return the three squared norms at a global model."""
        network = self.task.network
        normalize = self.task.normalize
        params = server["params"]
        total = float(sum(local.labeled for local in self.locals))
        theorem_gradient = tree.zeros_like(params)
        labeled_gradient = tree.zeros_like(params)
        for client, local in enumerate(self.locals):
            broadcast = {"params": params, "stats": server["stats"], "gate": torch.ones(())}
            memory = self.runtime.memories.get(str(client))
            memory = memory or create_first_memory(self.client_update, broadcast, self.seed, client)
            regulator = memory["regulator"]["params"]
            x = normalize(local.x)
            u = normalize(local.u)

            def coarse_loss(phi: Tree, theta: Tree, u: torch.Tensor = u, regulator: Tree = regulator) -> torch.Tensor:
                soft = network.train(theta, u)[0].softmax(-1)
                z = network.train(phi, u)[0]
                return (compute_instance_weights(regulator, z, "logits") * -(soft * z.log_softmax(-1)).sum(-1)).mean()

            def loss(theta: Tree, x: torch.Tensor = x, y: torch.Tensor = local.y) -> torch.Tensor:
                return torch.nn.functional.cross_entropy(network.train(theta, x)[0], y)

            def loss_after_step(theta: Tree, coarse_loss: Any = coarse_loss, loss: Any = loss) -> torch.Tensor:
                return loss(gradient_step(params, torch.func.grad(coarse_loss)(params, theta), self.eta_s))

            share = float(local.labeled) / total
            theorem_gradient = gradient_step(theorem_gradient, torch.func.grad(loss_after_step)(params), -share)
            labeled_gradient = gradient_step(labeled_gradient, torch.func.grad(loss)(params), -share)
        theorem, plain = (
            float(sum(leaf.square().sum() for leaf in tree.leaves(each)))
            for each in (theorem_gradient, labeled_gradient)
        )
        return dict(zip(NORMS, (theorem, theorem / self.eta_s**2, plain), strict=True))


def slope(values: np.ndarray, first: int) -> str:
    """Return the mean slope of log(values) over log(T) from the horizon with index `first` on, with its 95 % interval.

    `values` is (seeds, horizons).
    """
    slopes = np.polyfit(np.log(HORIZONS[first:]), np.log(values[:, first:]).T, 1)[0]
    mean = slopes.mean()
    half = special.stdtrit(len(slopes) - 1, 0.975) * slopes.std(ddof=1) / len(slopes) ** 0.5
    return f"{mean:+.2f} [{mean - half:+.2f}, {mean + half:+.2f}]"


def report(rows: list[dict[str, Any]], out: Path) -> None:
    """Draw the curves and print the table."""
    from matplotlib.figure import Figure

    curves = {
        (name, horizon): np.array([
            [float(row[name]) for row in rows if (int(row["seed"]), int(row["horizon"])) == (seed, horizon)]
            for seed in SEEDS
        ])
        for name in NORMS for horizon in HORIZONS
    }  # fmt: skip
    figure = Figure(figsize=(11, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    for n, horizon in enumerate(HORIZONS):
        curve = curves["theorem", horizon]
        shade = str(0.75 * (1 - n / len(HORIZONS)))
        rounds = np.linspace(0, horizon, curve.shape[1])
        left.semilogy(rounds / horizon, curve.mean(0), color=shade, label=f"T = {horizon}")
    left.set(xlabel="t / T", ylabel="mean of the seeds", title="Eq. 11's squared norm")
    reductions = {"minimum": np.min, "mean": np.mean}
    found = {
        (how, name): np.stack([take(curves[name, horizon], axis=1) for horizon in HORIZONS], 1)
        for how, take in reductions.items() for name in NORMS
    }  # fmt: skip
    print("| T | eta | eta_s | " + " | ".join(f"{name}, {how}" for how, name in found) + " |")
    print("|--:" * (3 + len(found)) + "|")
    for n, horizon in enumerate(HORIZONS):
        cells = " | ".join(f"{values[:, n].mean():.3g}" for values in found.values())
        print("| {} | {:.3g} | {:.3g} | {} |".format(horizon, *learning_rates(horizon), cells))
    for first in (0, 1):
        slopes = " | ".join(slope(values, first) for values in found.values())
        print(f"| slope from T = {HORIZONS[first]} | -0.5 | -1 | {slopes} |")
    for name, color in zip(NORMS, ("#0072b2", "#d55e00", "#777777"), strict=True):
        for (how, named), values in found.items():
            if named == name:
                style = {"minimum": "o-", "mean": "s--"}[how]
                right.loglog(HORIZONS, values.mean(0), style, color=color, label=f"{name}, {how}", markersize=4)
        start = found["minimum", name].mean(0)[0]
        right.loglog(HORIZONS, [start * (HORIZONS[0] / horizon) ** 0.5 for horizon in HORIZONS], ":", color=color)
    right.set(xlabel="horizon T", ylabel="squared norm", title="dotted: slope -1/2 of the theorem")
    right.set_xticks(HORIZONS, [str(horizon) for horizon in HORIZONS])
    right.minorticks_off()
    figure.legend(loc="outside right upper", fontsize=8)
    figure.savefig(out.with_suffix(".png"), dpi=110)


def main() -> None:
    """Run what is missing, then report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results/convergence"))
    parser.add_argument("--fit", type=int, help="print loss and accuracy on labeled images of seed 0 at this T instead")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.fit:
        run = MeasuredRun(options.fit, 0)
        for number, server in run.models():
            print(number, run.fit(server), flush=True)
        return
    file = options.out.with_suffix(".csv.gz")
    done = {(int(row["seed"]), int(row["horizon"])) for row in records.read_rows(file)}
    for seed, horizon in ((seed, horizon) for seed in SEEDS for horizon in HORIZONS):
        if (seed, horizon) not in done:
            records.append_rows(file, MeasuredRun(horizon, seed).rows())
    report(records.read_rows(file), options.out)


if __name__ == "__main__":
    main()
