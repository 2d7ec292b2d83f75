"""How often the 95 % intervals of method against method hold the truth, where the truth is known: a simulation.

    python benchmarks/coverage.py [--trials 2000] [--out results/coverage.md]

Two methods on n splits and m test images. Each is right on an image with a chance that has a part of its own for each
image, and one for each split; the truth is the difference over all splits and images there could be. `compare_paired` is
Student's t over the splits, `compare_by_image` the interval over splits and images (`halfmoon.report.paired`).
"""

import argparse
from itertools import product
from pathlib import Path

import numpy as np

from halfmoon.report.paired import compare_by_image, compare_paired

SPLITS, IMAGES = (3, 5, 10), (360, 2000)
SPREADS = {"splits": (0.0, 0.02), "images": (0.2, 0.0), "both": (0.2, 0.02)}
"""Standard deviations of the chance to be right, of a method on an image and of a method on a split."""
RIGHT = 0.8


def covered(splits: int, images: int, spreads: tuple[float, float], trials: int) -> tuple[np.ndarray, np.ndarray]:
    """Return in how many of 100 trials `compare_paired` and `compare_by_image` hold the truth (2,), and their median widths (2,)."""
    draw = np.random.default_rng([splits, images])
    of_image, of_split = spreads
    # The mean chance after it is cut to [0, 1] is the same for both methods: the true difference is 0.
    hits, widths = np.zeros(2), np.zeros((trials, 2))
    for trial in range(trials):
        chances = RIGHT + draw.normal(0, of_image, (2, 1, images)) + draw.normal(0, of_split, (2, splits, 1))
        ours, base = draw.random((2, splits, images)) < chances.clip(0, 1)
        for place, found in enumerate(
            (compare_paired(*(100 * each.mean(1) for each in (ours, base))), compare_by_image(ours, base))
        ):
            hits[place] += found.low <= 0 <= found.high
            widths[trial, place] = found.high - found.low
    return 100 * hits / trials, np.median(widths, 0)


def main() -> None:
    parser = argparse.ArgumentParser(description="Count how often intervals hold the truth.")
    parser.add_argument("--trials", type=int, default=2000)
    parser.add_argument("--out", type=Path, default=Path("results/coverage.md"))
    options = parser.parse_args()
    lines = ["| what differs | splits | test images | splits alone | splits and images |", "|---|---|---|---|---|"]
    for name, splits, images in product(SPREADS, SPLITS, IMAGES):
        share, width = covered(splits, images, SPREADS[name], options.trials)
        cells = [f"{each:.1f} % ({wide:.1f})" for each, wide in zip(share, width, strict=True)]
        lines.append(f"| {name} | {splits} | {images:,} | {cells[0]} | {cells[1]} |")
        options.out.write_text(PAGE.format(trials=options.trials, table="\n".join(lines)))


PAGE = """# Do the intervals hold the truth?

    python benchmarks/coverage.py

An interval over seeds alone says what other splits would give on the same test images. That of `halfmoon compare` is
for other test images as well: a random effect of the split and one of the image, with Satterthwaite's degrees of
freedom (`halfmoon.report.paired.compare_by_image`); it is never narrower than the first. Of {trials:,} simulated comparisons,
95 % should hold the truth; three standard errors are 1.5 %.

How many intervals hold it, and in brackets their median width in points:

{table}

Two methods are right on 80 % of the images. "Images": the chance of a method on an image has a standard deviation of
20 points. "Splits": that on a split has one of 2 points. Each method has its own, so that no image or split is common
to both: where methods fail on the same images, both intervals are narrower.
"""


if __name__ == "__main__":
    main()
