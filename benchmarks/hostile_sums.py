"""Attacks on heads that are solved from sums, by one site of five that stays within the server's bounds.

    python benchmarks/hostile_sums.py [--seeds 0 1 ...] [--labels 50 250] [--out results/hostile_sums]

The site knows the honest sums and the rules. It declares twice the median numbers of images and of labeled images, which
is the most that a server's cap lets through, and sends sums that pass every check (`SumsUpdate.find_fault`): each is of
possible images. OUT.md has the points of accuracy on test images that are lost to the run without an attack.
"""

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "results"))

import numpy as np
import records
import torch

from halfmoon import Config
from halfmoon.aggregation.base import AggregationContext
from halfmoon.api.uploads import Upload
from halfmoon.core import tree
from halfmoon.core.tree import Tree
from halfmoon.engine.evaluation import evaluate_model
from halfmoon.engine.local_clients import FederatedDataset, Training
from halfmoon.engine.loop import initial_model
from halfmoon.engine.runtime import RuntimeSettings
from halfmoon.engine.simulation import Simulation
from halfmoon.methods.analytic import MeanSums, MomentSums, SoftSums, SumsUpdate
from halfmoon.runs import factory
from halfmoon.runs.budgets import build_budget

SITES = 5
SHARE = 1.0
"""Share of the training images that are used."""
CAP = 2.0
"""Weight cap of a server: multiples of the median number of images."""

METHODS = {"ridge-head": 1, "mixture-head": 11}
"""The methods, and their rounds."""

Forge = Callable[[str, Tree, Tree], Tree]
"""(name of the query, honest sums (k, ...), sums of the hostile site's images) -> what it sends."""


def upper_triangle(matrix: torch.Tensor) -> torch.Tensor:
    """Extract the upper triangle of a matrix (F, F), row by row, (F (F + 1) / 2,)."""
    rows, columns = torch.triu_indices(*matrix.shape)
    return matrix[rows, columns]


def _declare_more(name: str, honest: Tree, sums: Tree) -> Tree:
    """Scale the site's true sums to twice the median number of images."""
    counts = honest["r"].sum(1) if name == "soft labels" else honest["count"]
    count = sums["r"].sum() if name == "soft labels" else sums["count"]
    return tree.map(lambda leaf: leaf * (CAP * counts.median() / count.clamp_min(1e-9)), sums)


def shift_labels(name: str, honest: Tree, sums: Tree) -> Tree:
    """Give each image the label of the next class."""
    sums = _declare_more(name, honest, sums)
    if name == "moments":
        return {**sums, "label_counts": sums["label_counts"].roll(1), "label_hy": sums["label_hy"].roll(1, 1)}
    if name == "soft labels":
        return {"r": sums["r"].roll(1), "rh": sums["rh"].roll(1, 0)}
    return sums


def swap_means(name: str, honest: Tree, sums: Tree) -> Tree:
    """Send labeled images that all lie at the others' mean of the next class: the largest sums that are possible."""
    if name != "moments":
        return shift_labels(name, honest, sums)
    return _moments(honest, -1, 1.0)


def reverse_means(name: str, honest: Tree, sums: Tree) -> Tree:
    """Send labeled images opposite to the others' mean of their class."""
    if name != "moments":
        return shift_labels(name, honest, sums)
    return _moments(honest, 0, -1.0)


def move_center(name: str, honest: Tree, sums: Tree) -> Tree:
    """Send a mean feature vector of twice the usual length, in the features that are rare, and true sums else."""
    sums = _declare_more(name, honest, sums)
    if name == "mean":
        mean = honest["q"].sum(0) / honest["count"].sum()
        rare = (mean < mean.median()).to(mean.dtype)
        length = 1.99 * (honest["q"].norm(dim=1) / honest["count"]).median()
        sums = {**sums, "q": sums["count"] * length * rare / rare.norm()}
    return sums


def move_all(name: str, honest: Tree, sums: Tree) -> Tree:
    """Move the center and swap means."""
    return move_center(name, honest, sums) if name == "mean" else swap_means(name, honest, sums)


def exceed_bounds(name: str, honest: Tree, sums: Tree) -> Tree:
    """Multiply the class sums by -10: a server refuses it where it sees single uploads."""
    return {**sums, "label_hy": -10 * sums["label_hy"]} if name == "moments" else sums


def _moments(honest: Tree, shift: int, sign: float) -> Tree:
    """Make moments of labeled and unlabeled images that all lie at a class's direction."""
    counts = honest["label_counts"].sum(0)
    directions = honest["label_hy"].sum(0) / counts.clamp_min(1)
    directions = sign * torch.nn.functional.normalize(directions.roll(shift, 1), dim=0)
    classes = len(counts)
    labeled = CAP * honest["label_counts"].sum(1).median() / classes
    everything = CAP * honest["count"].median() / classes
    label_counts = torch.full_like(counts, float(labeled))
    label_hy = directions * labeled
    outer = directions @ directions.T
    return {
        "count": everything * classes,
        "h": directions.sum(1) * everything,
        "hh": upper_triangle(outer * everything),
        "label_counts": label_counts,
        "label_h": label_hy.sum(1),
        "label_hh": upper_triangle(outer * labeled),
        "label_hy": label_hy,
    }


ATTACKS: dict[str, Forge | None] = {
    "none": None,
    "true sums, twice the images": _declare_more,
    "labels of the next class": shift_labels,
    "means of the next class": swap_means,
    "opposite means": reverse_means,
    "another center": move_center,
    "another center, means of the next class": move_all,
    "class sums times -10 (secure sums only)": exceed_bounds,
}


class Forger:
    """An aggregator that replaces the sums of the first client, and checks that a server would accept them."""

    def __init__(self, forge: Forge | None, updates: dict[str, SumsUpdate]) -> None:
        self.forge = forge
        self.updates = updates

    def process_uploads(self, context: AggregationContext, upload: Upload) -> tuple[Sequence[int], Upload]:
        everyone = range(len(context.clients))
        if self.forge is None:
            return everyone, upload
        sums = upload.update["sums"]
        honest = tree.map(lambda leaf: leaf[1:], sums)
        forged = self.forge(context.client_update, honest, tree.index(sums, 0))
        update = self.updates[context.client_update]
        # A site may declare any numbers: the largest here stand for those that the forged sums need.
        fault = update.find_fault(Upload({"sums": forged}, upload.weight[0]), 10**6, 10**6)
        if self.forge is not exceed_bounds:
            assert fault is None, f"{context.client_update}: {fault}"
        if context.client_update == "mean":
            norms = [update.upload_norm(Upload({"sums": each}, upload.weight[0])) or 0.0 for each in _rows(honest)]
            norm = update.upload_norm(Upload({"sums": forged}, upload.weight[0])) or 0.0
            assert norm <= update.max_norm_ratio * statistics.median_low([norm, *norms])
        changed = tree.map(lambda leaf, new: torch.cat([new[None].to(leaf), leaf[1:]]), sums, forged)
        return everyone, upload._replace(update={"sums": changed})

    def row(self) -> dict[str, Any]:
        return {}

    def stop_reason(self, round: int) -> str | None:
        return None


def _rows(sums: Tree) -> list[Tree]:
    return [tree.index(sums, row) for row in range(len(next(tree.leaves(sums))))]


def measure_accuracy(method: str, labels: int, seed: int, attack: str) -> float:
    """Run a federation and return its accuracy on the test images, in percent."""
    config = Config(
        method=method, data="digits", network="efficientnet-lite0", clients=SITES, cohort=SITES, setting="iid-dir",
        dirichlet_alpha=0.5, labels_per_class=labels / 10 / SITES, rounds=METHODS[method], seed=seed, split_seed=seed,
        device="cpu", threads=1, budget="none", data_share=SHARE,
    )  # fmt: skip
    shared = factory.build_problem(config)
    head = factory.build_method(config)
    updates = {"mean": MeanSums(shared.task), "moments": MomentSums(shared.task), "soft labels": SoftSums(shared.task)}
    training = Training(shared.batching, build_budget(config, shared.task), shared.server_batching)
    dataset = FederatedDataset(shared.train, shared.split, classes=10)
    settings = RuntimeSettings(SITES, seed, clients=SITES)
    simulation = Simulation(
        head, shared.task, dataset, shared.views, training, settings, None, [Forger(ATTACKS[attack], updates)]
    )
    server = head.start(shared.task, initial_model(shared.task, seed, torch.device("cpu")))
    for number in range(METHODS[method]):
        simulation.open(number)
        server = head.round(shared.task.at(number), server, simulation)
        simulation.close()
    assert shared.test is not None, "the digits have a test set"
    model = head.solution(shared.task, server)
    row: dict[str, Any] = evaluate_model(shared.task.network, model, shared.task.normalize, shared.test).row()
    return 100 * row["accuracy"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--labels", type=int, nargs="+", default=[250, 1000], help="of all sites together")
    parser.add_argument("--out", type=Path, default=Path("results/hostile_sums"))
    given = parser.parse_args()
    columns = [(method, labels) for labels in given.labels for method in METHODS]
    lines = [
        "| one site of five, inside the bounds | " + " | ".join(f"{m}, {k} labels" for m, k in columns) + " |",
        "| --- " * (1 + len(columns)) + "|",
    ]
    calm = {column: [measure_accuracy(*column, seed, "none") for seed in given.seeds] for column in columns}
    lines.append("| accuracy without an attack | " + " | ".join(f"{np.mean(calm[c]):.1f}" for c in columns) + " |")
    for attack in list(ATTACKS)[1:]:
        cells = []
        for column in columns:
            lost = [
                before - measure_accuracy(*column, seed, attack)
                for seed, before in zip(given.seeds, calm[column], strict=True)
            ]
            cells.append(f"{np.mean(lost):.1f} ({max(lost):.1f})")
        lines.append(f"| {attack} | " + " | ".join(cells) + " |")
        print(lines[-1], flush=True)
    head = f"# Hostile sums\n\nPoints of accuracy lost, mean of {len(given.seeds)} seeds (largest loss)."
    records.replace_table(given.out.with_suffix(".md"), "\n".join(lines), head)


if __name__ == "__main__":
    main()
