"""Compare the order of the labeling page with a random one: accuracy of the head on features after each 20 labels.

    python results/label_choice.py --set NAME=DATA ... [--out results/label_choice] [--minutes 9]

All orders start with the same 20 random labels. Then, round by round, the head that "Train" of `halfmoon site label`
computes is computed from all labels so far and selects the next 20 images; the random order draws them. Accuracy is the
mean of the classes' recall on test images. At `CROSS_VALIDATED` labels the page's cross-validation runs as well, for the
default order.

Finished seeds are stored in OUT.csv, and a stopped command continues there. When all are finished it writes OUT.png and
prints the table: the labels with which the mean curve of an order reaches the accuracy of 200 random labels, by linear
interpolation, and a 95 % interval from leaving out one seed at a time (jackknife).
"""

import argparse
import csv
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from scipy import special

from halfmoon.data import Images, load
from halfmoon.pages.label_order import (
    Predictions,
    find_randomly_labeled,
    mix_in_random,
    order_for_labeling,
    shuffle_rows,
)
from halfmoon.studies.label_selection import FolderFeatures, folder_features, head_problem, predict_images

BATCH = 20
ROUNDS = 10
SEEDS = (0, 1, 2, 3, 4)
CROSS_VALIDATED = (200,)
POOL = 2000
TESTS = 2000
ORDERS: dict[str, int | None] = {"random": None, "mixed": BATCH}
"""How many images are selected one by one, every fifth at random; the others are sorted by uncertainty. None: random."""

COLUMNS = ("set", "seed", "order", "labels", "accuracy", "cross_validated")
COLUMNS += ("judged", "low", "high", "gain", "gain_low", "gain_high")


def compute_features(images: Images, count: int, folder: Path) -> tuple[FolderFeatures, np.ndarray]:
    """Return the features of `count` images, the same ones in every call, and their labels."""
    rows = np.random.default_rng(0).permutation(len(images.labels))[:count]
    for n, row in enumerate(rows):
        pixels = images.images[row]
        Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels).save(folder / f"{n:05}.png")
    names = [f"{n:05}.png" for n in range(len(rows))]
    return folder_features(folder, names, lambda step, done, count: None), images.labels[rows]


def measure_curve(
    pool: tuple[FolderFeatures, np.ndarray],
    test: tuple[FolderFeatures, np.ndarray],
    classes: Any,
    order: str,
    seed: int,
) -> Iterator[dict[str, Any]]:
    """Yield the test accuracy after each 20 labels, in percent."""
    features, truth = pool
    labels = np.full(len(truth), -1)
    queue = shuffle_rows(np.ones(len(truth), bool), seed)
    for turn in range(ROUNDS):
        rows = queue[:BATCH]
        labels[rows] = truth[rows]
        head = head_problem(features, labels, classes)
        model = head.solve()
        logits = head.task.network.predict(model["params"], {}, test[0].values[:, 0, 0].float())
        predicted = np.array([classes.index(name) for name in head.classes])[logits.argmax(1).numpy()]
        recall = [(predicted == test[1])[test[1] == k].mean() for k in np.unique(test[1])]
        row = {"order": order, "labels": BATCH * (turn + 1), "accuracy": 100 * statistics.fmean(recall)}
        if order == "mixed" and row["labels"] in CROSS_VALIDATED:
            point = head.cross_validate(
                lambda step, done, count: None, find_randomly_labeled(labels, labels < -1, seed)
            )
            assert point is not None, "there are enough labels"
            row |= {name: getattr(point, name) for name in COLUMNS[6:]} | {"cross_validated": point.accuracy}
        yield row
        spread = ORDERS[order]
        queue = queue[BATCH:]
        if spread is not None:
            numbers = {name: n for n, name in enumerate(head.classes)}
            known = np.array([numbers.get(name, -1) for name in classes] + [-1])[labels]
            queue = order_for_labeling(Predictions(*predict_images(head, model)), known, labels < 0, seed, spread)
            if spread:
                queue = mix_in_random(queue, shuffle_rows(labels < 0, seed))


def labels_needed(chosen: np.ndarray, random: np.ndarray) -> float:
    """Return the labels with which the chosen curve reaches the end of the random one; 200 if it never does."""
    reached = np.flatnonzero(chosen >= random[-1])
    if not len(reached) or reached[0] == 0:
        return float(BATCH * (reached[0] + 1 if len(reached) else ROUNDS))
    n = int(reached[0])
    return float(BATCH * (n + (random[-1] - chosen[n - 1]) / (chosen[n] - chosen[n - 1])))


def jackknife(chosen: np.ndarray, random: np.ndarray) -> tuple[float, float, float]:
    """Return the labels needed by the mean curves of (seeds, rounds), and the ends of a 95 % interval."""
    count = len(chosen)
    estimate = labels_needed(chosen.mean(0), random.mean(0))
    subsets = [np.arange(count) != n for n in range(count)]
    without = np.array([labels_needed(chosen[rows].mean(0), random[rows].mean(0)) for rows in subsets])
    error = np.sqrt((count - 1) / count * ((without - without.mean()) ** 2).sum())
    half_width = float(special.stdtrit(count - 1, 0.975)) * error
    return estimate, estimate - half_width, estimate + half_width


def report(rows: list[dict[str, Any]], out: Path) -> None:
    """Print the labels that each order needs and the results of cross-validation; draw the curves."""
    from matplotlib.figure import Figure

    sets = list(dict.fromkeys(row["set"] for row in rows))
    figure = Figure(figsize=(4 * len(sets), 3.2), layout="constrained")
    print(
        f"| set | order | after {BATCH * ROUNDS} labels | labels for the accuracy of {BATCH * ROUNDS} random ones | 95 % |"
    )
    print("|---|---|---:|---:|---:|")
    for name, axes in zip(sets, np.atleast_1d(figure.subplots(1, len(sets))), strict=True):
        curves = {}
        for order, color in zip(ORDERS, ("#777777", "#0072b2"), strict=True):
            selected = [row for row in rows if row["set"] == name and row["order"] == order]
            seeds = sorted({row["seed"] for row in selected})
            curves[order] = np.array(
                [[float(row["accuracy"]) for row in selected if row["seed"] == seed] for seed in seeds]
            )
            x = BATCH * np.arange(1, curves[order].shape[1] + 1)
            y = curves[order]
            axes.plot(x, y.mean(0), color=color, label=order)
            axes.fill_between(x, y.min(0), y.max(0), color=color, alpha=0.15, linewidth=0)
            count, low, high = jackknife(curves[order], curves["random"])
            ends = "" if order == "random" else f"{low:.0f} to {high:.0f}"
            print(f"| {name} | {order} | {y[:, -1].mean():.1f} ± {y[:, -1].std(ddof=1):.1f} | {count:.0f} | {ends} |")
        axes.set(title=name, xlabel="labels", ylabel="test accuracy, %")
    figure.axes[0].legend()
    figure.savefig(out.with_suffix(".png"), dpi=120)
    print("\n| set | labels | cross-validation | test | second half: estimate | on test images | recommends to stop |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    validated = [row for row in rows if row["judged"]]
    for name, labels in dict.fromkeys((row["set"], row["labels"]) for row in validated):
        rows_here = [row for row in validated if (row["set"], row["labels"]) == (name, labels)]
        half = BATCH * max(1, round(int(labels) / 2 / BATCH))
        halves = [row for row in rows if row["set"] == name and row["order"] == "mixed" and int(row["labels"]) == half]
        means = [
            statistics.fmean(float(row[key]) for row in rows_here) for key in ("cross_validated", "accuracy", "gain")
        ]
        gained = means[1] - statistics.fmean(float(row["accuracy"]) for row in halves)
        stops = sum(float(row["gain_high"]) < 2 for row in rows_here)
        cells = (
            f"{means[0]:.1f}",
            f"{means[1]:.1f}",
            f"{means[2]:+.1f}",
            f"{gained:+.1f}",
            f"{stops} of {len(rows_here)}",
        )
        print(f"| {name} | {labels} | {' | '.join(cells)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--set", dest="sets", action="append", default=[], help="NAME=DATA as --data takes it")
    parser.add_argument("--out", type=Path, default=Path("results/label_choice"))
    parser.add_argument("--minutes", type=float, default=1e9, help="start no seed after so many")
    options = parser.parse_args()
    torch.set_num_threads(1)
    file = options.out.with_suffix(".csv")
    start = time.monotonic()
    rows = list(csv.DictReader(file.open())) if file.exists() else []
    for name, data in (each.split("=", 1) for each in options.sets or ["digits=digits"]):
        done = {int(row["seed"]) for row in rows if row["set"] == name}
        if not set(SEEDS) - done:
            continue
        source = load(data)
        with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
            pool = compute_features(source.train, POOL, Path(one))
            test = compute_features(source.test, TESTS, Path(other))
        for seed in sorted(set(SEEDS) - done):
            if time.monotonic() - start > 60 * options.minutes:
                return
            found = [row for order in ORDERS for row in measure_curve(pool, test, list(source.classes), order, seed)]
            rows += [{"set": name, "seed": str(seed)} | {key: str(row[key]) for key in row} for row in found]
            with file.open("w", newline="") as out:
                writer = csv.DictWriter(out, COLUMNS, restval="")
                writer.writeheader()
                writer.writerows(rows)
            print(f"{name}, seed {seed}: {time.monotonic() - start:.0f} s", flush=True)
    report([{**dict.fromkeys(COLUMNS, ""), **row} for row in rows], options.out)


if __name__ == "__main__":
    main()
