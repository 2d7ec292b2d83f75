"""Compare the orders of the labeling page with a random one: accuracy of the head on features after each 20 labels.

    python benchmarks/label_choice.py --set NAME=DATA ... [--out results/label_choice] [--minutes 9]

All sides begin with the same 20 random labels. Then, round by round, the head that "Train" of `halfmoon site label`
solves is solved on all labels so far, and says which 20 images come next; or chance does. Accuracy is the mean of the
classes' recall on test images. At `JUDGED` labels the page's cross-validation is played too, of the default order.

Finished seeds stay in OUT.csv, and the command goes on where it stopped. With all of them it writes OUT.png and prints
the table: labels with which the mean curve of an order reaches what 200 random labels reach, by linear interpolation,
and a 95 % interval from leaving out one seed at a time (jackknife).
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

BATCH, ROUNDS, SEEDS, JUDGED = 20, 10, (0, 1, 2, 3, 4), (200,)
POOL, TESTS = 2000, 2000
ORDERS: dict[str, int | None] = {"random": None, "mixed": BATCH}
"""How many images of each order are chosen one by one, every fifth by chance; the others follow by uncertainty."""

COLUMNS = ("set", "seed", "order", "labels", "accuracy", "cross_validated")
COLUMNS += ("judged", "low", "high", "gain", "gain_low", "gain_high")


def read(images: Images, count: int, place: Path) -> tuple[FolderFeatures, np.ndarray]:
    """Return the features of some images, the same ones every time, and their labels."""
    rows = np.random.default_rng(0).permutation(len(images.labels))[:count]
    for n, row in enumerate(rows):
        pixels = images.images[row]
        Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels).save(place / f"{n:05}.png")
    names = [f"{n:05}.png" for n in range(len(rows))]
    return folder_features(place, names, lambda step, done, count: None), images.labels[rows]


def curve(
    pool: tuple[FolderFeatures, np.ndarray], test: tuple[FolderFeatures, np.ndarray], classes: Any, way: str, seed: int
) -> Iterator[dict[str, Any]]:
    """Yield the test accuracy after each 20 labels, in percent."""
    own, truth = pool
    held = np.full(len(truth), -1)
    queue = shuffle_rows(np.ones(len(truth), bool), seed)
    for turn in range(ROUNDS):
        rows = queue[:BATCH]
        held[rows] = truth[rows]
        head = head_problem(own, held, classes)
        model = head.solve()
        logits = head.task.network.predict(model["params"], {}, test[0].values[:, 0, 0].float())
        predicted = np.array([classes.index(name) for name in head.classes])[logits.argmax(1).numpy()]
        recall = [(predicted == test[1])[test[1] == k].mean() for k in np.unique(test[1])]
        row = {"order": way, "labels": BATCH * (turn + 1), "accuracy": 100 * statistics.fmean(recall)}
        if way == "mixed" and row["labels"] in JUDGED:
            point = head.cross_validate(lambda step, done, count: None, find_randomly_labeled(held, held < -1, seed))
            assert point is not None, "there are labels enough"
            row |= {name: getattr(point, name) for name in COLUMNS[6:]} | {"cross_validated": point.accuracy}
        yield row
        spread = ORDERS[way]
        queue = queue[BATCH:]
        if spread is not None:
            numbers = {name: n for n, name in enumerate(head.classes)}
            known = np.array([numbers.get(name, -1) for name in classes] + [-1])[held]
            queue = order_for_labeling(Predictions(*predict_images(head, model)), known, held < 0, seed, spread)
            if spread:
                queue = mix_in_random(queue, shuffle_rows(held < 0, seed))


def needed(chosen: np.ndarray, random: np.ndarray) -> float:
    """Return the labels with which the chosen curve reaches the end of the random one; 200 where it never does."""
    reached = np.flatnonzero(chosen >= random[-1])
    if not len(reached) or reached[0] == 0:
        return float(BATCH * (reached[0] + 1 if len(reached) else ROUNDS))
    n = int(reached[0])
    return float(BATCH * (n + (random[-1] - chosen[n - 1]) / (chosen[n] - chosen[n - 1])))


def jackknife(chosen: np.ndarray, random: np.ndarray) -> tuple[float, float, float]:
    """Return the labels needed by the mean curves of (seeds, rounds), and the ends of a 95 % interval."""
    count = len(chosen)
    whole = needed(chosen.mean(0), random.mean(0))
    kept = [np.arange(count) != n for n in range(count)]
    without = np.array([needed(chosen[rows].mean(0), random[rows].mean(0)) for rows in kept])
    error = np.sqrt((count - 1) / count * ((without - without.mean()) ** 2).sum())
    reach = float(special.stdtrit(count - 1, 0.975)) * error
    return whole, whole - reach, whole + reach


def table(rows: list[dict[str, Any]], out: Path) -> None:
    """Print what each order needs, and what cross-validation said; draw the curves."""
    from matplotlib.figure import Figure

    sets = list(dict.fromkeys(row["set"] for row in rows))
    figure = Figure(figsize=(4 * len(sets), 3.2), layout="constrained")
    print(f"| set | order | after {BATCH * ROUNDS} labels | labels for what {BATCH * ROUNDS} random ones give | 95 % |")
    print("|---|---|---:|---:|---:|")
    for name, axes in zip(sets, np.atleast_1d(figure.subplots(1, len(sets))), strict=True):
        curves = {}
        for way, color in zip(ORDERS, ("#777777", "#0072b2"), strict=True):
            mine = [row for row in rows if row["set"] == name and row["order"] == way]
            seeds = sorted({row["seed"] for row in mine})
            curves[way] = np.array([[float(row["accuracy"]) for row in mine if row["seed"] == seed] for seed in seeds])
            x, y = BATCH * np.arange(1, curves[way].shape[1] + 1), curves[way]
            axes.plot(x, y.mean(0), color=color, label=way)
            axes.fill_between(x, y.min(0), y.max(0), color=color, alpha=0.15, linewidth=0)
            count, low, high = jackknife(curves[way], curves["random"])
            ends = "" if way == "random" else f"{low:.0f} to {high:.0f}"
            print(f"| {name} | {way} | {y[:, -1].mean():.1f} ± {y[:, -1].std(ddof=1):.1f} | {count:.0f} | {ends} |")
        axes.set(title=name, xlabel="labels", ylabel="right on test images, %")
    figure.axes[0].legend()
    figure.savefig(out.with_suffix(".png"), dpi=120)
    print("\n| set | labels | cross-validation | test | second half: estimate | on test images | says stop |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    judged = [row for row in rows if row["judged"]]
    for name, labels in dict.fromkeys((row["set"], row["labels"]) for row in judged):
        at = [row for row in judged if (row["set"], row["labels"]) == (name, labels)]
        near = BATCH * max(1, round(int(labels) / 2 / BATCH))
        halves = [row for row in rows if row["set"] == name and row["order"] == "mixed" and int(row["labels"]) == near]
        means = [statistics.fmean(float(row[key]) for row in at) for key in ("cross_validated", "accuracy", "gain")]
        brought = means[1] - statistics.fmean(float(row["accuracy"]) for row in halves)
        stops = sum(float(row["gain_high"]) < 2 for row in at)
        cells = (f"{means[0]:.1f}", f"{means[1]:.1f}", f"{means[2]:+.1f}", f"{brought:+.1f}", f"{stops} of {len(at)}")
        print(f"| {name} | {labels} | {' | '.join(cells)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--set", dest="sets", action="append", default=[], help="NAME=DATA as --data takes it")
    parser.add_argument("--out", type=Path, default=Path("results/label_choice"))
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no seed after so many")
    given = parser.parse_args()
    torch.set_num_threads(1)
    file, began = given.out.with_suffix(".csv"), time.monotonic()
    rows = list(csv.DictReader(file.open())) if file.exists() else []
    for name, data in (each.split("=", 1) for each in given.sets or ["digits=digits"]):
        done = {int(row["seed"]) for row in rows if row["set"] == name}
        if not set(SEEDS) - done:
            continue
        source = load(data)
        with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
            pool, test = read(source.train, POOL, Path(one)), read(source.test, TESTS, Path(other))
        for seed in sorted(set(SEEDS) - done):
            if time.monotonic() - began > 60 * given.minutes:
                return
            found = [row for way in ORDERS for row in curve(pool, test, list(source.classes), way, seed)]
            rows += [{"set": name, "seed": str(seed)} | {key: str(row[key]) for key in row} for row in found]
            with file.open("w", newline="") as place:
                table_of = csv.DictWriter(place, COLUMNS, restval="")
                table_of.writeheader()
                table_of.writerows(rows)
            print(f"{name}, seed {seed}: {time.monotonic() - began:.0f} s", flush=True)
    table([{**dict.fromkeys(COLUMNS, ""), **row} for row in rows], given.out)


if __name__ == "__main__":
    main()
