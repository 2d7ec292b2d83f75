"""Play soft labels and FedDure with uploads in float32, float16 and int8, and compare accuracies and bytes.

    python benchmarks/upload_precision.py [--rounds 80] [--seeds 40 41 42 43 44] [--data-dir DATA]

Digits: the main job. With `--data-dir` soft labels on Fashion-MNIST at half size as well, half as many rounds.
"""

import argparse
from pathlib import Path
from typing import Any

from precision import HEAD, SETS, SHARED, compare

from halfmoon.cli.main import MAIN_JOB

VARIANTS: dict[str, dict[str, Any]] = {name: {"upload_precision": name} for name in ("float32", "float16", "int8")}


def main_job(method: str, rounds: int) -> dict[str, Any]:
    """Return the options of the main job for one of its methods."""
    if method == "feddure":
        options = {name: value for name, value in MAIN_JOB["options"].items() if not isinstance(value, dict)}
    else:
        options = MAIN_JOB["options"].get(method, {})
    shared = {name: value for name, value in MAIN_JOB.items() if name not in ("baselines", "options")}
    return {**shared, "method": method, "rounds": rounds, "device": "cpu", "options": {method: options}}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="Accuracy by what uploads are sent in.")
    parser.add_argument("--rounds", type=int, default=80)
    parser.add_argument("--seeds", type=int, nargs="+", default=[40, 41, 42, 43, 44])
    parser.add_argument("--data-dir", type=Path)
    given = parser.parse_args()
    print(HEAD)
    for method in ("fedavg-soft-labels", "feddure"):
        options = {**main_job(method, given.rounds), "threads": 1, "workers": 1}
        compare("digits", options.pop("method"), VARIANTS, given.seeds, **options)
    if given.data_dir:
        options = {**SHARED, **SETS["fashion_mnist"], "rounds": given.rounds // 2, "data_dir": given.data_dir}
        compare("fashion_mnist", "fedavg-soft-labels", VARIANTS, given.seeds, **options)


if __name__ == "__main__":
    main()
