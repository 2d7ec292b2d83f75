"""Simulate how often the 95 % intervals of a comparison of two methods contain the true difference.

    python results/interval_coverage.py [--trials 2000] [--out results/coverage.md]

Two methods on n splits and m test images. The probability that a method is correct on an image has a random term of the
image and one of the split; the true difference is that over the population of splits and images. `compare_paired` is
Student's t over the splits, `compare_by_image` the interval over splits and images (`halfmoon.report.paired`).
"""

import argparse
from itertools import product
from pathlib import Path

import numpy as np

from halfmoon.report.paired import compare_by_image, compare_paired

SPLITS = (3, 5, 10)
IMAGES = (360, 2000)
SPREADS = {"splits": (0.0, 0.02), "images": (0.2, 0.0), "both": (0.2, 0.02)}
"""Standard deviations of the probability of being correct: of a method on an image, and of a method on a split."""
ACCURACY = 0.8


def simulate_coverage(
    splits: int, images: int, spreads: tuple[float, float], trials: int
) -> tuple[np.ndarray, np.ndarray]:
    """Simulate trials of `compare_paired` and `compare_by_image`.

    Args:
        splits: splits of a trial.
        images: test images of a trial.
        spreads: standard deviations of the image terms and of the split terms.
        trials: simulated comparisons.

    Returns:
        The percentage of intervals that contain the true difference (2,), and their median widths (2,).
    """
    generator = np.random.default_rng([splits, images])
    image_spread, split_spread = spreads
    # Clipping changes the mean probability of both methods equally, so the true difference is 0.
    hits = np.zeros(2)
    widths = np.zeros((trials, 2))
    for trial in range(trials):
        chances = (
            ACCURACY
            + generator.normal(0, image_spread, (2, 1, images))
            + generator.normal(0, split_spread, (2, splits, 1))
        )
        ours, base = generator.random((2, splits, images)) < chances.clip(0, 1)
        for k, found in enumerate(
            (compare_paired(*(100 * each.mean(1) for each in (ours, base))), compare_by_image(ours, base))
        ):
            hits[k] += found.low <= 0 <= found.high
            widths[trial, k] = found.high - found.low
    return 100 * hits / trials, np.median(widths, 0)


def main() -> None:
    parser = argparse.ArgumentParser(description="Count how often intervals contain the true difference.")
    parser.add_argument("--trials", type=int, default=2000)
    parser.add_argument("--out", type=Path, default=Path("results/coverage.md"))
    options = parser.parse_args()
    lines = ["| what differs | splits | test images | over splits | over splits and images |", "|---|---|---|---|---|"]
    for name, splits, images in product(SPREADS, SPLITS, IMAGES):
        share, width = simulate_coverage(splits, images, SPREADS[name], options.trials)
        cells = [f"{each:.1f} % ({wide:.1f})" for each, wide in zip(share, width, strict=True)]
        lines.append(f"| {name} | {splits} | {images:,} | {cells[0]} | {cells[1]} |")
        options.out.write_text(PAGE.format(trials=options.trials, table="\n".join(lines)))


PAGE = """# Do the intervals contain the true difference?

    python results/interval_coverage.py

An interval over seeds covers other splits on the same test images. That of `halfmoon compare` covers other test images as
well: a random effect of the split and one of the image, with Satterthwaite's degrees of freedom
(`halfmoon.report.paired.compare_by_image`); it is never narrower than the first. Of {trials:,} simulated comparisons, 95 %
should contain the true difference; three standard errors are 1.5 %.

Intervals that contain it, and in brackets their median width in points:

{table}

Two methods are correct on 80 % of the images. "Images": the probability of a method on an image has a standard deviation
of 20 points. "Splits": that on a split has one of 2 points. The terms of the two methods are independent: if both fail on
the same images, both intervals are narrower.
"""


if __name__ == "__main__":
    main()
