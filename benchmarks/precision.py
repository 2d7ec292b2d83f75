"""Play labels only, FixMatch and soft labels in float32 and with bf16 products, and compare.

    python benchmarks/precision.py [--rounds 40] [--seeds 0 1 2 3 4] [--data-dir DATA]

Prints test accuracies after the last round, the difference from float32 with its 95 % interval over the seeds, the
megabytes that clients sent, and the processor time. Digits: the main job's recipe, half as long. With `--data-dir`
Fashion-MNIST at half size as well.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import halfmoon
from halfmoon import Config
from halfmoon.report.paired import compare_paired

METHODS: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "fedavg-fixmatch": {"labels": "round", "threshold": 0.7},
    "fedavg-soft-labels": {},
}
VARIANTS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bf16 products": {"precision": "bf16"},
}
SHARED: dict[str, Any] = {"steps": 6, "unlabeled_batch": 30, "labeling": "running", "workers": 1, "threads": 1}
SETS: dict[str, dict[str, Any]] = {
    "digits": {"lr": 6e-3, "executor": "vmap"},
    "fashion_mnist": {"lr": 5e-3, "shrink": 2, "width": 16, "labels_per_class": 0.5, "executor": "loop"},
}
HEAD = """| data | method | variant | accuracy by seed, % | to float32 | 95 % interval | sent, MB | processor, s |
|---|---|---|---|--:|---|--:|--:|"""


class Played(NamedTuple):
    """A run: its test accuracy in percent, MB sent up, and seconds of the processor."""

    accuracy: float
    sent: float
    seconds: float


def play(**options: Any) -> Played:
    """Play a run and return what it came to."""
    with tempfile.TemporaryDirectory() as folder:
        place, start = Path(folder) / "run", time.process_time()
        halfmoon.run(Config(run_dir=place, **options))
        row = json.loads((place / "metrics.jsonl").read_text().splitlines()[-1])
        return Played(100 * row["test"]["accuracy"], row["cost"]["bytes_up"] / 1e6, time.process_time() - start)


def compare(
    data: str, method: str, variants: Mapping[str, dict[str, Any]], seeds: Sequence[int], **options: Any
) -> None:
    """Print a row for each variant of a method, the first of which the others are compared with."""
    base: list[float] = []
    for variant, change in variants.items():
        runs = [play(seed=seed, data=data, method=method, **options, **change) for seed in seeds]
        accuracies = [run.accuracy for run in runs]
        cells = ["", ""]
        if len(base) > 1:
            difference = compare_paired(accuracies, base)
            cells = [f"{difference.mean:+.1f}", f"{difference.low:+.1f} to {difference.high:+.1f}"]
        base = base or accuracies
        each = ", ".join(f"{accuracy:.1f}" for accuracy in accuracies)
        sent, seconds = runs[0].sent, sum(run.seconds for run in runs)
        cells = [data, method, variant, each, *cells, f"{sent:.1f}", f"{seconds:.0f}"]
        print(f"| {' | '.join(cells)} |", flush=True)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="Accuracy in float32 and in bf16.")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--data-dir", type=Path)
    given = parser.parse_args()
    print(HEAD)
    for data in SETS if given.data_dir else ("digits",):
        for method, own in METHODS.items():
            options = {**SHARED, **SETS[data], "options": own, "rounds": given.rounds, "data_dir": given.data_dir}
            compare(data, method, VARIANTS, given.seeds, **options)


if __name__ == "__main__":
    main()
