"""How much one update tells an honest-but-curious server of a client's images, with and without the defenses.

    python benchmarks/leakage.py [--out results/leakage.md]

On the embedded digits. Whoever looks knows the model that went down, the code, and what came back: one client's update,
or only the sum over a cohort (secure aggregation), or a model that noise was added to (differential privacy).

Membership inference: was this image, whose label is known, among the client's? Two scores: by how much the update
lowers the image's loss (Yeom et al. 2018), and the cosine between the update and the step that the image alone would
ask for (Nasr et al. 2019). Members are the client's images, others are test images. AUC 0.5 is guessing; the second
number is the share of members found while one of a hundred others is taken for one (Carlini et al. 2022).

Gradient inversion (Geiping et al. 2020): an image is searched whose gradient points where the update points, by Adam,
in eight attempts of which the best counts; the labels are known. Whether one image's label can be read off the last
layer (Zhao et al. 2020) is looked at apart. An image counts as found where, of 50 images of its class, the true one is
the nearest to what came out: 0.02 is guessing.
"""

import argparse
import json
import platform
import time
from collections.abc import Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from scipy.optimize import linear_sum_assignment
from sklearn.metrics import roc_auc_score, roc_curve
from torch import Tensor

from halfmoon.api.upload_mean import average_stacked_uploads
from halfmoon.api.uploads import Upload
from halfmoon.config.schema import Config
from halfmoon.core import rng, tree
from halfmoon.core.tree import Tree
from halfmoon.data.partition.split import Split
from halfmoon.engine.evaluation import Examples
from halfmoon.engine.local_clients import FederatedDataset, Training
from halfmoon.engine.loop import initial_model
from halfmoon.engine.runtime import RuntimeSettings
from halfmoon.engine.simulation import Simulation
from halfmoon.runs.budgets import build_budget
from halfmoon.runs.factory import Problem, build_batch_rules, build_method, build_problem

CLIENTS, COHORT = 20, 10
CLIP, NOISE = 1.0, 1.0
"""Of the views with differential privacy: the largest norm of an update, and the noise on the sum in units of it."""
POOL, TRIALS, ATTEMPTS, STEPS = 50, 10, 8, 500
ROUNDS = (0, 4, 19)
"""Rounds, from 0, whose updates are tried."""
METHODS = ("feddure", "fedavg-fixmatch", "fedavg")
BASE: dict[str, Any] = {
    "data": "digits", "clients": CLIENTS, "cohort": COHORT, "rounds": 20, "norm": "group", "seed": 0,
    "setting": "iid-iid", "labels_per_class": 1.0, "labeled_batch": 10, "unlabeled_batch": 10, "budget": "none",
}  # fmt: skip

Flat = dict[str, Tensor]


def views(updates: Sequence[Flat], seed: int) -> dict[str, Flat]:
    """Return what can be seen of the updates of a cohort, of which the first is the client that is looked at."""

    def mean(parts: Sequence[Flat]) -> Flat:
        return {path: torch.stack([part[path] for part in parts]).mean(0) for path in parts[0]}

    clipped = [scaled(each, min(1.0, CLIP / norm(each))) for each in updates]
    g = rng.generator(seed, "leakage noise")
    noisy = {
        path: leaf + torch.randn(leaf.shape, generator=g) * CLIP * NOISE / len(updates)
        for path, leaf in mean(clipped).items()
    }
    return {
        "one client's update": updates[0],
        f"the same, clipped to {CLIP:g}": clipped[0],
        "the sum of 3": mean(updates[:3]),
        f"the sum of {len(updates)}": mean(updates),
        f"the noised mean of {len(updates)} (clip {CLIP:g}, noise {NOISE:g})": noisy,
    }


def norm(update: Flat) -> float:
    """Return the Euclidean norm of an update."""
    return float(sum(leaf.double().square().sum() for leaf in update.values())) ** 0.5


def scaled(update: Flat, factor: float) -> Flat:
    """Return an update times a number."""
    return {path: leaf * factor for path, leaf in update.items()}


def simulation(config: Config, shared: Problem, held: FederatedDataset | None = None) -> Simulation:
    """Return a federation of a configuration, on these holdings or on those of its split."""
    batching, serving = build_batch_rules(config)
    dataset = held or FederatedDataset(shared.train, shared.split)
    return Simulation(
        build_method(config), shared.task, dataset, shared.views, Training(batching, build_budget(config, shared.task), serving),
        RuntimeSettings(min(config.cohort, dataset.clients), config.seed),
    )  # fmt: skip


class Spy:
    """The method's federation, of which the server keeps what went down and what each client changed."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation, self.broadcast, self.updates, self.clients = simulation, {}, [], []
        self.query_first = simulation.query
        simulation.query = self.query  # type: ignore[method-assign]
        simulation.average = self.average  # type: ignore[method-assign]

    def average(self, client_update: str, broadcast: Tree) -> Upload:
        """Average uploads that are all kept."""
        upload_spec = self.simulation.client_updates[client_update].requirements.upload_spec
        return average_stacked_uploads(self.query(client_update, broadcast), upload_spec, broadcast, client_update)

    def query(
        self, client_update: str, broadcast: Tree, per_client: Tree | None = None, clients: Tensor | None = None
    ) -> Upload:
        """Ask, and look."""
        upload = self.query_first(client_update, broadcast, per_client, clients)
        before, after = tree.flatten({"params": broadcast["params"]}), tree.flatten({"params": upload.update["params"]})
        self.broadcast, self.clients = broadcast, self.simulation.responders.tolist()
        self.updates = [{path: after[path][k] - before[path] for path in before} for k in range(len(self.clients))]
        return upload


# Membership


def membership(config: Config, shared: Problem, rounds: Sequence[int]) -> list[dict[str, Any]]:
    """Return AUC and true positives at one percent, by view, score and whether a client's image has a label."""
    federation = simulation(config, shared)
    spy, made = Spy(federation), federation.method
    server = made.start(shared.task, initial_model(shared.task, config.seed, torch.device("cpu")))
    found: dict[tuple[str, str, str], list[tuple[np.ndarray, np.ndarray]]] = {}
    for number in range(max(rounds) + 1):
        federation.open(number)
        server = made.round(shared.task.at(number), server, federation)
        if number not in rounds:
            continue
        known = {
            "train": Candidates(shared, spy.broadcast, shared.train),
            "test": Candidates(shared, spy.broadcast, shared.test),
        }
        for k in range(len(spy.clients)):
            order = [k, *(other for other in range(len(spy.clients)) if other != k)]
            seen = views([spy.updates[place] for place in order], config.seed + 1000 * number + k)
            for view, update in seen.items():
                said = {name: each.scores(update) for name, each in known.items()}
                for kind in (True, False):
                    rows = shared.split.rows(spy.clients[k], kind)
                    for score in ("loss drop", "cosine"):
                        pair = said["train"][score][rows], said["test"][score]
                        found.setdefault((view, score, "labeled" if kind else "unlabeled"), []).append(pair)
    rows = []
    for (view, score, kind), pairs in found.items():
        inside, outside = (np.concatenate([pair[side] for pair in pairs]) for side in (0, 1))
        truth = np.r_[np.ones(len(inside)), np.zeros(len(outside))]
        said = np.r_[inside, outside]
        false, true, _ = roc_curve(truth, said)
        auc = roc_auc_score(truth, said)
        rows.append(
            {"method": config.method, "view": view, "score": score, "images": kind, "members": len(inside),
             "auc": round(float(auc), 3), "tpr_at_1": round(float(true[false <= 0.01].max()), 3)}
        )  # fmt: skip
    return rows


class Candidates:
    """Images whose membership is asked for: their losses under what went down, and their gradients."""

    def __init__(self, shared: Problem, broadcast: Tree, held: Examples) -> None:
        self.network, self.params = shared.task.network, broadcast["params"]
        self.x, self.y = shared.task.normalize(held.images), held.labels
        self.before = self.losses(self.params)
        one = torch.func.vmap(torch.func.grad(self.loss), (None, 0, 0))
        parts = [one(self.params, x, y) for x, y in zip(self.x.split(256), self.y.split(256), strict=True)]
        flat = [tree.flatten({"params": part}) for part in parts]
        self.gradients = torch.cat([torch.cat([leaf.flatten(1) for leaf in part.values()], 1) for part in flat])
        self.lengths = self.gradients.norm(dim=1).clamp_min(1e-12)

    def loss(self, params: Tree, image: Tensor, label: Tensor) -> Tensor:
        """Return the cross-entropy of one image."""
        return F.cross_entropy(self.network.predict(params, {}, image[None]), label[None])

    @torch.no_grad()
    def losses(self, params: Tree) -> Tensor:
        """Return the cross-entropy of each image (n,)."""
        return F.cross_entropy(self.network.predict(params, {}, self.x), self.y, reduction="none")

    def scores(self, update: Flat) -> dict[str, np.ndarray]:
        """Return by how much the update lowers each loss, and its cosine with the step the image would ask for (n,)."""
        moved = tree.map(torch.add, {"params": self.params}, tree.unflatten(update))["params"]
        step = torch.cat([leaf.flatten() for leaf in update.values()])
        cosine = -(self.gradients @ step) / self.lengths / max(norm(update), 1e-12)
        return {"loss drop": (self.before - self.losses(moved)).numpy(), "cosine": cosine.numpy()}


# Inversion


def inversion(config: Config, shared: Problem, images: int, trials: int, words: str) -> list[dict[str, Any]]:
    """Return how well `images` labeled images of a client are found again, by view, over several clients."""
    tally: dict[str, list[tuple[float, float, float]]] = {}
    for trial in range(trials):
        g = rng.generator(trial, "inversion")
        count = len(shared.train.labels)
        rows = torch.randperm(count, generator=g)[: COHORT * images].numpy()
        client = np.full(count, -1)
        client[rows] = np.repeat(np.arange(COHORT), images)
        held = FederatedDataset(shared.train, Split(client, np.ones(count, bool), COHORT))
        alone = replace(config, clients=COHORT, cohort=COHORT, seed=trial)
        federation = simulation(alone, shared, held)
        spy = Spy(federation)
        model = initial_model(shared.task, trial, torch.device("cpu"))
        federation.open(0)
        federation.method.round(shared.task.at(0), federation.method.start(shared.task, model), federation)
        mine = held.rows(0, True)
        truth = shared.train.images[mine], shared.train.labels[mine]
        for view, update in views(spy.updates, trial).items():
            if view.startswith("the same"):
                continue  # clipping leaves the direction, and the direction is all that is used
            guess = search(shared, model["params"], update, truth[1], g)
            tally.setdefault(view, []).append(judged(shared, guess, *truth, g))
            if images == 1:
                # The gradient of a logit is negative for the true label alone.
                read = update["params/head/weight"].sum(1).argmax()
                tally[view][-1] = (*tally[view][-1][:2], float(read == truth[1][0]))
    rows = []
    for view, each in tally.items():
        error, hit, label = np.mean(each, 0).tolist()
        rows.append(
            {"update": words, "view": view, "trials": trials, "rmse": round(error, 3), "found": round(hit, 3),
             "label": round(label, 3) if images == 1 else None}
        )  # fmt: skip
    return rows


def search(shared: Problem, params: Tree, update: Flat, y: Tensor, generator: torch.Generator) -> Tensor:
    """Return images (n, C, H, W), as the network reads them, whose gradient points where the update points.

    Half of the attempts start from images of other people with these labels, half from noise; the best one counts.
    """
    low, high = ends(shared)
    others = shared.task.normalize(shared.test.images)
    starts = []
    for attempt in range(ATTEMPTS):
        known = [others[shared.test.labels == label] for label in y]
        places = [int(torch.randint(0, len(each), (), generator=generator)) for each in known]
        near = torch.stack([each[place] for each, place in zip(known, places, strict=True)])
        starts.append(near if attempt % 2 else torch.rand(near.shape, generator=generator) * (high - low) + low)
    x = torch.stack(starts).requires_grad_()

    def loss(p: Tree, images: Tensor) -> Tensor:
        return F.cross_entropy(shared.task.network.predict(p, {}, images), y)

    asked = torch.func.vmap(torch.func.grad(loss), (None, 0))
    wanted = -torch.cat([update[f"params/{path}"].flatten() for path in tree.flatten(params)])
    wanted = wanted / wanted.norm()
    optimizer = torch.optim.Adam([x], lr=0.03 * (high - low))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    apart = torch.zeros(ATTEMPTS)
    for _ in range(STEPS):
        gradient = torch.cat([leaf.flatten(1) for leaf in tree.leaves(asked(params, x))], 1)
        apart = 1 - (gradient @ wanted) / gradient.norm(dim=1)
        optimizer.zero_grad()
        apart.sum().backward(inputs=[x])
        optimizer.step()
        schedule.step()
        with torch.no_grad():
            x.clamp_(low, high)
    return x.detach()[int(apart.detach().argmin())]


def ends(shared: Problem) -> tuple[float, float]:
    """Return what the network reads for black and for white."""
    low, high = (float(shared.task.normalize(torch.full((1, 1, 1, 1), v, dtype=torch.uint8))) for v in (0, 255))
    return low, high


def judged(
    shared: Problem, guess: Tensor, images: Tensor, labels: Tensor, generator: torch.Generator
) -> tuple[float, float, float]:
    """Return (root mean square error in units of the pixels' range, share of images found, nan)."""
    normalize = shared.task.normalize
    low, high = ends(shared)

    def pixels(x: Tensor) -> Tensor:
        return ((x - low) / (high - low)).flatten(1)

    said, truth = pixels(guess), pixels(normalize(images))
    distance = torch.cdist(said, truth)
    for row, label in enumerate(labels):
        distance[row, labels != label] = 1e6  # an image was searched for each label
    rows, columns = linear_sum_assignment(distance.numpy())
    errors, hits = [], []
    everything = pixels(normalize(shared.train.images))
    for row, column in zip(rows, columns, strict=True):
        errors.append(float((said[row] - truth[column]).square().mean().sqrt()))
        same = torch.nonzero(shared.train.labels == labels[column])[:, 0]
        others = everything[same[torch.randperm(len(same), generator=generator)]]
        others = others[(others - truth[column]).square().sum(1) > 0][: POOL - 1]
        nearest = (others - said[row]).square().sum(1).min()
        hits.append(float((truth[column] - said[row]).square().sum() < nearest))
    return float(np.mean(errors)), float(np.mean(hits)), float("nan")


def main() -> None:
    """Measure and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results/leakage.md"))
    parser.add_argument("--trials", type=int, default=TRIALS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    began = time.perf_counter()
    base = Config(**BASE)
    members: list[dict[str, Any]] = []
    for name in METHODS:
        config = replace(base, method=name)
        members += membership(config, build_problem(config), ROUNDS)
    one = replace(
        base, method="fedavg", optimizer="sgd", lr=0.1, labeled_view="plain", labeled_batch=2, steps=1, norm="none"
    )
    eight, few = replace(one, labeled_batch=8), max(1, given.trials // 2)
    real = replace(eight, steps=10, optimizer="adam", lr=1e-3, labeled_view="cutout")
    attempts: Sequence[tuple[Config, int, int, str]] = (
        (one, 1, given.trials, "1 image, one step of SGD, no normalization, no augmentation"),
        (replace(one, norm="group"), 1, few, "the same with group normalization"),
        (eight, 8, few, "8 images, one step of SGD, no normalization, no augmentation"),
        (real, 8, few, "8 images, ten steps of Adam, augmented as in training"),
    )
    found = [row for config, *rest in attempts for row in inversion(config, build_problem(config), *rest)]
    facts = {
        "machine": f"{platform.machine()}, 2 cores, one thread",
        "python": platform.python_version(),
        "torch": metadata.version("torch"),
        "seconds": round(time.perf_counter() - began),
        "membership": members,
        "inversion": found,
    }
    given.out.with_suffix(".json").write_text(json.dumps(facts, indent=1) + "\n")
    given.out.write_text(page(facts))


def page(facts: dict[str, Any]) -> str:
    """Return the tables as Markdown."""
    lines = [
        "# What one update tells a curious server", "", "    python benchmarks/leakage.py", "",
        f"The embedded digits; {facts['machine']}, Python {facts['python']}, torch {facts['torch']}, "
        f"{facts['seconds']} s by the clock. The script's first lines say what is measured and how.", "",
        "## Membership", "",
        f"{CLIENTS} clients of about 72 images, 10 of them labeled; group normalization; the updates of rounds 1, 5",
        f"and 20 ({COHORT} clients each) together, the best of the two scores (loss drop, cosine).", "",
        "| method | what is seen | labeled: AUC | found at 1 % false | unlabeled: AUC | found at 1 % false |",
        "|---|---|---|---|---|---|",
    ]  # fmt: skip
    pairs: dict[tuple[str, str], dict[str, tuple[float, float]]] = {}
    for row in facts["membership"]:
        held = pairs.setdefault((row["method"], row["view"]), {})
        new = (row["auc"], row["tpr_at_1"])
        held[row["images"]] = max(held.get(row["images"], (0.0, 0.0)), new)
    for (name, view), held in pairs.items():
        cells = [f"{value:.3f}" for kind in ("labeled", "unlabeled") for value in held[kind]]
        lines.append(f"| `{name}` | {view} | {' | '.join(cells)} |")
    lines += [
        "", "## Inversion", "",
        f"| the update | what is seen | error (RMS, pixels in 0..1) | found among {POOL} of its class | label read "
        "| clients |",
        "|---|---|---|---|---|---|",
    ]  # fmt: skip
    for row in facts["inversion"]:
        label = "-" if row["label"] is None else f"{row['label']:.2f}"
        lines.append(
            f"| {row['update']} | {row['view']} | {row['rmse']:.3f} | {row['found']:.2f} | {label} | {row['trials']} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
