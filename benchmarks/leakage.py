"""Measure what an honest-but-curious server learns about a client's images from one update, with and without defenses.

    python benchmarks/leakage.py [--out results/leakage.md]

On the embedded digits. The attacker knows the model that was sent to clients, the code, and the upload: one client's update,
or only the sum over a cohort (secure aggregation), or a sum with noise (differential privacy).

Membership inference: does the client have this image, whose label is known? Two scores: the decrease of the image's loss by
the update (Yeom et al. 2018), and the cosine between the update and the gradient step of this image (Nasr et al. 2019).
Members are the client's images, non-members are test images. AUC 0.5 is chance; the second number is the true positive
rate at a false positive rate of one percent (Carlini et al. 2022).

Gradient inversion (Geiping et al. 2020): Adam searches for an image whose gradient has the direction of the update, in eight
attempts of which the best counts; the labels are known. Whether the last layer reveals the label of a single image (Zhao et
al. 2020) is measured separately. An image counts as found if the true one is the nearest to the result among 50 images of
its class: chance is 0.02.
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

CLIENTS = 20
COHORT = 10
CLIP = 1.0
NOISE = 1.0
"""With differential privacy: the clip norm of an update, and the noise on the sum in units of it."""
POOL = 50
TRIALS = 10
ATTEMPTS = 8
STEPS = 500
ROUNDS = (0, 4, 19)
"""Rounds, from 0, whose updates are attacked."""
METHODS = ("feddure", "fedavg-fixmatch", "fedavg")
BASE: dict[str, Any] = {
    "data": "digits", "clients": CLIENTS, "cohort": COHORT, "rounds": 20, "norm": "group", "seed": 0,
    "setting": "iid-iid", "labels_per_class": 1.0, "labeled_batch": 10, "unlabeled_batch": 10, "budget": "none",
}  # fmt: skip

Flat = dict[str, Tensor]


def views(updates: Sequence[Flat], seed: int) -> dict[str, Flat]:
    """Return what the attacker sees of the updates of a cohort; the first client is the one under attack."""

    def mean(cohort: Sequence[Flat]) -> Flat:
        return {path: torch.stack([update[path] for update in cohort]).mean(0) for path in cohort[0]}

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


def simulation(config: Config, shared: Problem, dataset: FederatedDataset | None = None) -> Simulation:
    """Simulate a federation on a dataset, by default that of the configuration's split."""
    batching, serving = build_batch_rules(config)
    dataset = dataset or FederatedDataset(shared.train, shared.split)
    return Simulation(
        build_method(config), shared.task, dataset, shared.views, Training(batching, build_budget(config, shared.task), serving),
        RuntimeSettings(min(config.cohort, dataset.clients), config.seed),
    )  # fmt: skip


class Recorder:
    """Record the model that a simulation sends to clients, and the update of each client."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation
        self.broadcast = {}
        self.updates = []
        self.clients = []
        self.original_query = simulation.query
        simulation.query = self.query  # type: ignore[method-assign]
        simulation.average = self.average  # type: ignore[method-assign]

    def average(self, client_update: str, broadcast: Tree) -> Upload:
        """Average uploads, after recording all of them."""
        upload_spec = self.simulation.client_updates[client_update].requirements.upload_spec
        return average_stacked_uploads(self.query(client_update, broadcast), upload_spec, broadcast, client_update)

    def query(
        self, client_update: str, broadcast: Tree, per_client: Tree | None = None, clients: Tensor | None = None
    ) -> Upload:
        """Run the query, and record it."""
        upload = self.original_query(client_update, broadcast, per_client, clients)
        before = tree.flatten({"params": broadcast["params"]})
        after = tree.flatten({"params": upload.update["params"]})
        self.broadcast = broadcast
        self.clients = self.simulation.responders.tolist()
        self.updates = [{path: after[path][k] - before[path] for path in before} for k in range(len(self.clients))]
        return upload


# Membership


def membership(config: Config, shared: Problem, rounds: Sequence[int]) -> list[dict[str, Any]]:
    """Return AUC and true positive rate at one percent, by view, score and whether the image has a label."""
    federation = simulation(config, shared)
    recorder = Recorder(federation)
    method = federation.method
    server = method.start(shared.task, initial_model(shared.task, config.seed, torch.device("cpu")))
    found: dict[tuple[str, str, str], list[tuple[np.ndarray, np.ndarray]]] = {}
    for number in range(max(rounds) + 1):
        federation.open(number)
        server = method.round(shared.task.at(number), server, federation)
        if number not in rounds:
            continue
        known = {
            "train": Candidates(shared, recorder.broadcast, shared.train),
            "test": Candidates(shared, recorder.broadcast, shared.test),
        }
        for k in range(len(recorder.clients)):
            order = [k, *(other for other in range(len(recorder.clients)) if other != k)]
            seen = views([recorder.updates[other] for other in order], config.seed + 1000 * number + k)
            for view, update in seen.items():
                scores = {name: each.scores(update) for name, each in known.items()}
                for is_labeled in (True, False):
                    rows = shared.split.rows(recorder.clients[k], is_labeled)
                    for score in ("loss drop", "cosine"):
                        pair = scores["train"][score][rows], scores["test"][score]
                        found.setdefault((view, score, "labeled" if is_labeled else "unlabeled"), []).append(pair)
    rows = []
    for (view, score, kind), pairs in found.items():
        members, others = (np.concatenate([pair[k] for pair in pairs]) for k in (0, 1))
        truth = np.r_[np.ones(len(members)), np.zeros(len(others))]
        scores = np.r_[members, others]
        false, true, _ = roc_curve(truth, scores)
        auc = roc_auc_score(truth, scores)
        rows.append(
            {"method": config.method, "view": view, "score": score, "images": kind, "members": len(members),
             "auc": round(float(auc), 3), "tpr_at_1": round(float(true[false <= 0.01].max()), 3)}
        )  # fmt: skip
    return rows


class Candidates:
    """Images whose membership is inferred: their losses under the model sent to clients, and their gradients."""

    def __init__(self, shared: Problem, broadcast: Tree, examples: Examples) -> None:
        self.network = shared.task.network
        self.params = broadcast["params"]
        self.x = shared.task.normalize(examples.images)
        self.y = examples.labels
        self.before = self.losses(self.params)
        one = torch.func.vmap(torch.func.grad(self.loss), (None, 0, 0))
        chunks = [one(self.params, x, y) for x, y in zip(self.x.split(256), self.y.split(256), strict=True)]
        flat = [tree.flatten({"params": chunk}) for chunk in chunks]
        self.gradients = torch.cat(
            [torch.cat([leaf.flatten(1) for leaf in gradients.values()], 1) for gradients in flat]
        )
        self.lengths = self.gradients.norm(dim=1).clamp_min(1e-12)

    def loss(self, params: Tree, image: Tensor, label: Tensor) -> Tensor:
        """Return the cross-entropy of one image."""
        return F.cross_entropy(self.network.predict(params, {}, image[None]), label[None])

    @torch.no_grad()
    def losses(self, params: Tree) -> Tensor:
        """Return the cross-entropy of each image (n,)."""
        return F.cross_entropy(self.network.predict(params, {}, self.x), self.y, reduction="none")

    def scores(self, update: Flat) -> dict[str, np.ndarray]:
        """Return the decrease of each loss by the update, and its cosine with the gradient step of each image (n,)."""
        moved = tree.map(torch.add, {"params": self.params}, tree.unflatten(update))["params"]
        step = torch.cat([leaf.flatten() for leaf in update.values()])
        cosine = -(self.gradients @ step) / self.lengths / max(norm(update), 1e-12)
        return {"loss drop": (self.before - self.losses(moved)).numpy(), "cosine": cosine.numpy()}


# Inversion


def inversion(config: Config, shared: Problem, images: int, trials: int, title: str) -> list[dict[str, Any]]:
    """Reconstruct `images` labeled images of a client; return the success by view, over several clients."""
    results: dict[str, list[tuple[float, float, float]]] = {}
    for trial in range(trials):
        g = rng.generator(trial, "inversion")
        count = len(shared.train.labels)
        rows = torch.randperm(count, generator=g)[: COHORT * images].numpy()
        client = np.full(count, -1)
        client[rows] = np.repeat(np.arange(COHORT), images)
        dataset = FederatedDataset(shared.train, Split(client, np.ones(count, bool), COHORT))
        single = replace(config, clients=COHORT, cohort=COHORT, seed=trial)
        federation = simulation(single, shared, dataset)
        recorder = Recorder(federation)
        model = initial_model(shared.task, trial, torch.device("cpu"))
        federation.open(0)
        federation.method.round(shared.task.at(0), federation.method.start(shared.task, model), federation)
        members = dataset.rows(0, True)
        truth = shared.train.images[members], shared.train.labels[members]
        for view, update in views(recorder.updates, trial).items():
            if view.startswith("the same"):
                continue  # clipping does not change the direction, and only that is used
            found = search(shared, model["params"], update, truth[1], g)
            results.setdefault(view, []).append(compare_images(shared, found, *truth, g))
            if images == 1:
                # The gradient of a logit is negative only for the true label.
                read = update["params/head/weight"].sum(1).argmax()
                results[view][-1] = (*results[view][-1][:2], float(read == truth[1][0]))
    rows = []
    for view, each in results.items():
        error, hit, label = np.mean(each, 0).tolist()
        rows.append(
            {"update": title, "view": view, "trials": trials, "rmse": round(error, 3), "found": round(hit, 3),
             "label": round(label, 3) if images == 1 else None}
        )  # fmt: skip
    return rows


def search(shared: Problem, params: Tree, update: Flat, y: Tensor, generator: torch.Generator) -> Tensor:
    """Return normalized images (n, C, H, W) whose gradient has the direction of the update.

    Half of the attempts start from test images with these labels, half from noise; the best attempt counts.
    """
    low, high = pixel_range(shared)
    others = shared.task.normalize(shared.test.images)
    starts = []
    for attempt in range(ATTEMPTS):
        known = [others[shared.test.labels == label] for label in y]
        rows = [int(torch.randint(0, len(each), (), generator=generator)) for each in known]
        similar = torch.stack([each[row] for each, row in zip(known, rows, strict=True)])
        starts.append(similar if attempt % 2 else torch.rand(similar.shape, generator=generator) * (high - low) + low)
    x = torch.stack(starts).requires_grad_()

    def loss(p: Tree, images: Tensor) -> Tensor:
        return F.cross_entropy(shared.task.network.predict(p, {}, images), y)

    gradients_of = torch.func.vmap(torch.func.grad(loss), (None, 0))
    direction = -torch.cat([update[f"params/{path}"].flatten() for path in tree.flatten(params)])
    direction = direction / direction.norm()
    optimizer = torch.optim.Adam([x], lr=0.03 * (high - low))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    distances = torch.zeros(ATTEMPTS)
    for _ in range(STEPS):
        gradient = torch.cat([leaf.flatten(1) for leaf in tree.leaves(gradients_of(params, x))], 1)
        distances = 1 - (gradient @ direction) / gradient.norm(dim=1)
        optimizer.zero_grad()
        distances.sum().backward(inputs=[x])
        optimizer.step()
        schedule.step()
        with torch.no_grad():
            x.clamp_(low, high)
    return x.detach()[int(distances.detach().argmin())]


def pixel_range(shared: Problem) -> tuple[float, float]:
    """Return the normalized values of black and of white."""
    low, high = (float(shared.task.normalize(torch.full((1, 1, 1, 1), v, dtype=torch.uint8))) for v in (0, 255))
    return low, high


def compare_images(
    shared: Problem, found: Tensor, images: Tensor, labels: Tensor, generator: torch.Generator
) -> tuple[float, float, float]:
    """Return (root mean square error in units of the pixels' range, share of images found, nan)."""
    normalize = shared.task.normalize
    low, high = pixel_range(shared)

    def pixels(x: Tensor) -> Tensor:
        return ((x - low) / (high - low)).flatten(1)

    reconstructed = pixels(found)
    truth = pixels(normalize(images))
    distance = torch.cdist(reconstructed, truth)
    for row, label in enumerate(labels):
        distance[row, labels != label] = 1e6  # each label has an image that was searched for
    rows, columns = linear_sum_assignment(distance.numpy())
    errors = []
    hits = []
    everything = pixels(normalize(shared.train.images))
    for row, column in zip(rows, columns, strict=True):
        errors.append(float((reconstructed[row] - truth[column]).square().mean().sqrt()))
        same = torch.nonzero(shared.train.labels == labels[column])[:, 0]
        others = everything[same[torch.randperm(len(same), generator=generator)]]
        others = others[(others - truth[column]).square().sum(1) > 0][: POOL - 1]
        nearest = (others - reconstructed[row]).square().sum(1).min()
        hits.append(float((truth[column] - reconstructed[row]).square().sum() < nearest))
    return float(np.mean(errors)), float(np.mean(hits)), float("nan")


def main() -> None:
    """Measure and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results/leakage.md"))
    parser.add_argument("--trials", type=int, default=TRIALS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    start = time.perf_counter()
    base = Config(**BASE)
    members: list[dict[str, Any]] = []
    for name in METHODS:
        config = replace(base, method=name)
        members += membership(config, build_problem(config), ROUNDS)
    one = replace(
        base, method="fedavg", optimizer="sgd", lr=0.1, labeled_view="plain", labeled_batch=2, steps=1, norm="none"
    )
    eight = replace(one, labeled_batch=8)
    few = max(1, options.trials // 2)
    real = replace(eight, steps=10, optimizer="adam", lr=1e-3, labeled_view="cutout")
    attempts: Sequence[tuple[Config, int, int, str]] = (
        (one, 1, options.trials, "1 image, one step of SGD, no normalization, no augmentation"),
        (replace(one, norm="group"), 1, few, "the same with group normalization"),
        (eight, 8, few, "8 images, one step of SGD, no normalization, no augmentation"),
        (real, 8, few, "8 images, ten steps of Adam, augmented as in training"),
    )
    found = [row for config, *rest in attempts for row in inversion(config, build_problem(config), *rest)]
    record = {
        "machine": f"{platform.machine()}, 2 cores, one thread",
        "python": platform.python_version(),
        "torch": metadata.version("torch"),
        "halfmoon": metadata.version("halfmoon"),
        "seconds": round(time.perf_counter() - start),
        "membership": members,
        "inversion": found,
    }
    options.out.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n")
    options.out.write_text(format_page(record))


def format_page(record: dict[str, Any]) -> str:
    """Return the tables as Markdown."""
    pairs: dict[tuple[str, str], dict[str, tuple[float, float]]] = {}
    for row in record["membership"]:
        scores = pairs.setdefault((row["method"], row["view"]), {})
        new = (row["auc"], row["tpr_at_1"])
        scores[row["images"]] = max(scores.get(row["images"], (0.0, 0.0)), new)
    single = "one client's update"
    first, *_, last = [row for row in record["inversion"] if row["view"] == single]
    auc = {
        kind: [scores[kind][0] for (_, view), scores in pairs.items() if view == single]
        for kind in ("labeled", "unlabeled")
    }
    threat, membership_text, inversion_text = (__doc__ or "").strip().split("\n\n")[2:]
    lines = [
        "# What one update reveals to a curious server", "",
        f"From one client's update, a server infers which labeled images the client has slightly better than chance (AUC "
        f"{min(auc['labeled']):.2f} to {max(auc['labeled']):.2f}), and not which unlabeled ones (AUC "
        f"{min(auc['unlabeled']):.2f} to {max(auc['unlabeled']):.2f}).",
        f"Gradient inversion found a share of {first['found']:.2f} of single images after one step of SGD, and "
        f"{last['found']:.2f} of images after ten augmented steps of Adam (chance: 0.02).", "",
        "    python benchmarks/leakage.py", "",
        *threat.splitlines(), "",
        f"{record['machine']}, Python {record['python']}, torch {record['torch']}, "
        f"halfmoon {record['halfmoon']}, {record['seconds']} s by the clock.", "",
        "## Membership", "",
        *membership_text.splitlines(), "",
        f"{CLIENTS} clients of about 72 images, 10 of them labeled, with group normalization. The table combines the updates",
        f"of rounds 1, 5 and 20 ({COHORT} clients each), and has the better of the two scores.", "",
        "| method | known to the server | labeled: AUC | TPR at 1 % FPR | unlabeled: AUC | TPR at 1 % FPR |",
        "|---|---|---|---|---|---|",
    ]  # fmt: skip
    for (name, view), scores in pairs.items():
        cells = [f"{value:.3f}" for kind in ("labeled", "unlabeled") for value in scores[kind]]
        lines.append(f"| `{name}` | {view} | {' | '.join(cells)} |")
    lines += [
        "", "## Inversion", "",
        *inversion_text.splitlines(), "",
        f"| the update | known to the server | error (RMS, pixels in 0..1) | found among {POOL} of its class | label revealed "
        "| clients |",
        "|---|---|---|---|---|---|",
    ]  # fmt: skip
    for row in record["inversion"]:
        label = "-" if row["label"] is None else f"{row['label']:.2f}"
        lines.append(
            f"| {row['update']} | {row['view']} | {row['rmse']:.3f} | {row['found']:.2f} | {label} | {row['trials']} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
