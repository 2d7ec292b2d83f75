"""Compare labels on chosen images with labels on random ones: accuracy of a small network after each 20 labels.

    python benchmarks/label_choice.py [--json FILE] [--xrays FOLDER]

Both sides begin with the same 20 random labels. Then, round by round, a network is trained on all labels so far, and
20 more are given: chosen by `halfmoon.pages.choice.order`, as `halfmoon site label --model` shows them, or drawn at
random. What a choice saves: 1 - (labels with which the chosen side reaches what the random side has at its end) / (its
labels), by linear interpolation of the mean curves.
"""

import argparse
import json
import math
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from halfmoon.core.optim import Adam
from halfmoon.data import load
from halfmoon.models import SmallCNN
from halfmoon.models.network import track
from halfmoon.models.normalize import Normalize
from halfmoon.pages.choice import Guesses, order, random_order
from halfmoon.pages.guesses import predict_with_features
from halfmoon.runs.model_card import Card
from halfmoon.sites.inference import Model

BATCH, ROUNDS, SEEDS, STEPS, TRAINED, LR = 20, 5, 5, 200, 32, 3e-3
XRAYS = Path(__file__).resolve().parents[2] / "shared" / "data" / "pneumonia_mnist"


def trained(images: np.ndarray, labels: np.ndarray, classes: int, seed: int) -> Model:
    """Return a small network trained on a few labeled images, uint8 (N, H, W, C), each step on moved copies of some."""
    generator = torch.Generator().manual_seed(seed)
    size, channels = images.shape[1:3], images.shape[3]
    network = SmallCNN(channels, classes)
    held = network.init(generator)
    params, stats = held["params"], held["stats"]
    mean, std = (tuple(np.maximum(f(images / 255, axis=(0, 1, 2)), 1e-3).tolist()) for f in (np.mean, np.std))
    normalize, adam = Normalize(mean, std), Adam(LR)
    state = adam.init(params)
    x, y = torch.from_numpy(images.transpose(0, 3, 1, 2).copy()), torch.from_numpy(labels)
    reach = max(1, size[0] // 14)

    def loss(params: Any, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, Any]:
        logits, moments = network.train(params, x)
        return torch.nn.functional.cross_entropy(logits, y), moments

    step = torch.func.grad(loss, has_aux=True)
    for n in range(STEPS):
        rows = torch.randint(len(y), (TRAINED,), generator=generator)
        by = torch.randint(-reach, reach + 1, (2,), generator=generator).tolist()
        gradient, moments = step(params, normalize(x[rows].roll(by, (2, 3))), y[rows])
        # The rate falls to 0: the last few batches of so few images must not decide.
        params, state = adam.with_lr(LR * (1 + math.cos(math.pi * n / STEPS)) / 2).step(params, gradient, state)
        stats = track(stats, moments)
    names = tuple(map(str, range(classes)))
    card = Card(names, (channels, *size), size, 1, mean, std, network, "benchmark", "")
    return Model(card, params, stats, torch.device("cpu"))


def guesses_of(model: Model, images: np.ndarray) -> Guesses:
    parts = [predict_with_features(model, images[n : n + 512]) for n in range(0, len(images), 512)]
    return Guesses(np.concatenate([p for p, _ in parts]), np.concatenate([f for _, f in parts]))


def curve(source: Any, side: str, seed: int) -> list[float]:
    """Return the balanced test accuracy after each 20 labels."""
    train, test = source.train, source.test
    classes, count = len(source.classes), len(train.labels)
    held = np.full(count, -1)
    queue = random_order(np.ones(count, bool), seed)
    found = []
    for turn in range(ROUNDS):
        rows = queue[:BATCH]
        held[rows] = train.labels[rows]
        mine = np.flatnonzero(held >= 0)
        model = trained(train.images[mine], held[mine], classes, seed)
        seen = np.concatenate([model.probabilities(test.images[n : n + 512]) for n in range(0, len(test.labels), 512)])
        right = seen.argmax(1) == test.labels
        found.append(statistics.fmean(right[test.labels == k].mean() for k in range(classes)))
        if turn + 1 == ROUNDS:
            break
        chosen = side == "chosen"
        queue = order(guesses_of(model, train.images), held, held < 0, seed, BATCH) if chosen else queue[BATCH:]
    return found


def saved(chosen: np.ndarray, random: np.ndarray) -> float:
    """Return the share of labels that the choice saves, from mean curves; NaN where it never gets there."""
    labels = BATCH * np.arange(1, ROUNDS + 1)
    reached = np.flatnonzero(chosen >= random[-1])
    if not len(reached):
        return float("nan")
    n = int(reached[0])
    if n == 0:
        return 1 - labels[0] / labels[-1]
    part = (random[-1] - chosen[n - 1]) / (chosen[n] - chosen[n - 1])
    return float(1 - (labels[n - 1] + part * BATCH) / labels[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write all numbers there")
    parser.add_argument("--xrays", type=Path, default=XRAYS, help="the folder of PneumoniaMNIST (default: ../shared)")
    given = parser.parse_args()
    torch.set_num_threads(1)
    sets = {"digits": load("digits")}
    if given.xrays.exists():
        sets["chest X-rays"] = load(str(given.xrays))
    results: dict[str, Any] = {}
    began = time.process_time()
    for name, source in sets.items():
        curves = {side: np.array([curve(source, side, seed) for seed in range(SEEDS)]) for side in ("random", "chosen")}
        means = {side: values.mean(0) for side, values in curves.items()}
        share = saved(means["chosen"], means["random"])
        results[name] = {**{side: values.tolist() for side, values in curves.items()}, "saved": share}
        print(f"\n{name}: balanced test accuracy, %, mean ± deviation of {SEEDS} seeds\n\n| labels | random | chosen |")
        print("|---:|---:|---:|")
        for turn in range(ROUNDS):
            cells = (f"{100 * v[:, turn].mean():.1f} ± {100 * v[:, turn].std(ddof=1):.1f}" for v in curves.values())
            print(f"| {BATCH * (turn + 1)} | {' | '.join(cells)} |")
        print(f"\nlabels saved: {100 * share:.0f} %")
    print(f"\n{time.process_time() - began:.0f} core-seconds")
    if given.json:
        given.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
