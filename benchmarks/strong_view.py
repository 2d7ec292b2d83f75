"""Time the strong view against the same pipeline in Pillow: same images, same draws, one process, one thread.

    python benchmarks/strong_view.py [--json]

Both sides start from uint8 images and the draws and end with normalized float32 tensors; the two are timed in turn,
and the medians are reported in microseconds an image. `ratio` is Pillow's time over ours at 90 images.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import numpy as np
import torch

from halfmoon.core.normalize import Normalize
from halfmoon.data.views import Strong

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))
import pillow_reference

SHAPE = (3, 32, 32)
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


def compare(batch: int, rounds: int) -> dict[str, float]:
    """Return the two medians in microseconds an image for one batch size; the two results must agree."""
    generator = torch.Generator().manual_seed(batch)
    strong, normalize = Strong(), Normalize(MEAN, STD)
    coarse = torch.randint(0, 256, (batch, 3, 8, 8), generator=generator).float()
    images = torch.nn.functional.interpolate(coarse, size=SHAPE[1:], mode="bilinear").to(torch.uint8)
    array = images.numpy()
    mean, std = (np.array(value, dtype=np.float32).reshape(3, 1, 1) for value in (MEAN, STD))
    calls = max(1, 90 // batch)  # each timing covers at least 90 images, so that a small batch is not all cold caches
    ours, pillow = [], []
    for _ in range(rounds):
        # Fresh draws a round: which operations they hold decides what a small batch costs.
        drawn = [strong.draw(batch, SHAPE, generator) for _ in range(calls)]
        rows = [pillow_reference.split_draws(draw) for draw in drawn]
        start = time.perf_counter()
        views = [strong.apply(images, draw, normalize) for draw in drawn]
        between = time.perf_counter()
        expected = [pillow_reference.make_strong_views(array, row, mean, std) for row in rows]
        stop = time.perf_counter()
        ours.append((between - start) / calls)
        pillow.append((stop - between) / calls)
    if not all(torch.allclose(one, other, atol=1e-5) for one, other in zip(views, expected, strict=True)):
        raise SystemExit("the two pipelines disagree: their times mean nothing")
    ours_us, pillow_us = (statistics.median(times) / batch * 1e6 for times in (ours, pillow))
    return {"ratio": pillow_us / ours_us, "ours_us": ours_us, "pillow_us": pillow_us}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--rounds", type=int, default=0, help="rounds a batch size (default: by its size)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    compare(10, 3)  # tables and threads are made ready outside of the measurement
    batches = {size: compare(size, options.rounds or max(15, min(40, 4000 // size))) for size in (10, 90, 450)}
    result = {**batches[90], "batches": {str(size): times for size, times in batches.items()}}
    if options.json:
        sys.stdout.write(json.dumps(result) + "\n")
        return
    for size, times in batches.items():
        sys.stdout.write(
            f"{size:4d} images: ours {times['ours_us']:6.1f} us an image, "
            f"Pillow {times['pillow_us']:6.1f}, ratio {times['ratio']:.1f}\n"
        )


if __name__ == "__main__":
    main()
