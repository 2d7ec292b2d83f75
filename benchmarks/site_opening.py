"""How long a site needs to open its prepared folder, which it does for every message: by its number of images.

    OMP_NUM_THREADS=1 python benchmarks/site_opening.py [--images 500 5000 20000] [--side 28]

Over real processes every message is answered by a fork of a process that knows no folder yet. Folders of random gray
PNG files, one in ten with a label, are written, decoded once and opened five times; seconds are those of the processor.
"""

import argparse
import csv
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from halfmoon.federation.protocol.terms import Terms, map_labels
from halfmoon.federation.site.runtime import SiteRuntime
from halfmoon.runs.factory import ImageSpec
from halfmoon.sites.folders import prepare_site
from halfmoon.sites.folders.prepare import open_prepared_site

CLASSES = ("a", "b")


def written(folder: Path, images: int, side: int) -> None:
    """Write a site folder."""
    (folder / "images").mkdir(parents=True)
    pixels = np.random.default_rng(0).integers(0, 256, (images, side, side), dtype=np.uint8)
    with (folder / "labels.csv").open("w", newline="") as file:
        lines = csv.writer(file)
        lines.writerow(["path", "label"])
        for number, each in enumerate(pixels):
            Image.fromarray(each).save(folder / "images" / f"{number:06d}.png", compress_level=0)
            if number % 10 == 0:
                lines.writerow([f"images/{number:06d}.png", CLASSES[number // 10 % 2]])


def opened(images: int, side: int) -> tuple[float, float]:
    """Return the median seconds to read the folder, and to make the site's tensors of what was decoded."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place, "site")
        home = Path(place, "home")
        written(folder, images, side)
        prepare_site(folder, (side, side), 1, home)
        form = ImageSpec((1, side, side), CLASSES, False, (0.5,), (0.25,))
        terms = Terms.from_options(
            "opening", ("site",), form, {"method": "fedavg", "network": "small", "cohort": 1}, ""
        )
        times: list[tuple[float, float]] = []
        for _ in range(5):
            began = time.thread_time()
            found = open_prepared_site(folder, home)
            read = time.thread_time()
            assert found is not None
            assert found.images is not None
            SiteRuntime.from_terms(terms, 0, found.images, map_labels(found, terms), "")
            times.append((read - began, time.thread_time() - read))
    folders, tensors = zip(*times, strict=True)
    return statistics.median(folders), statistics.median(tensors)


def main() -> None:
    parser = argparse.ArgumentParser(description="How long a site needs to open its prepared folder.")
    parser.add_argument("--images", type=int, nargs="+", default=[500, 5000, 20000])
    parser.add_argument("--side", type=int, default=28)
    options = parser.parse_args()
    torch.set_num_threads(1)
    sys.stdout.write("| images | folder, ms | tensors, ms |\n|---|---|---|\n")
    for images in options.images:
        folder, tensors = opened(images, options.side)
        sys.stdout.write(f"| {images:,} | {1000 * folder:.1f} | {1000 * tensors:.1f} |\n")


if __name__ == "__main__":
    main()
