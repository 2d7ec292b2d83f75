"""Compare training and uploads in lower precision with float32.

    python results/precision.py training [--rounds 40] [--seeds 0 1 2 3 4] [--data-dir DATA]
    python results/precision.py uploads [--rounds 80] [--seeds 40 41 42 43 44] [--data-dir DATA]

Prints test accuracies after the last round, the difference from float32 with its 95 % interval over the seeds, the
megabytes that clients sent, and the processor time.

training: labels only, FixMatch and soft labels with bf16 products. Digits: the recipe of `halfmoon run`, half as long. With
`--data-dir` Fashion-MNIST at half size as well.

uploads: soft labels and FedDure with uploads in float16 and int8. Digits: `halfmoon run` without options. With `--data-dir`
soft labels on Fashion-MNIST at half size as well, half as many rounds.
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
from halfmoon.cli.main import MAIN_JOB
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
UPLOADS: dict[str, dict[str, Any]] = {name: {"upload_precision": name} for name in ("float32", "float16", "int8")}
SHARED: dict[str, Any] = {"steps": 6, "unlabeled_batch": 30, "labeling": "running", "workers": 1, "threads": 1}
SETS: dict[str, dict[str, Any]] = {
    "digits": {"lr": 6e-3, "executor": "vmap"},
    "fashion_mnist": {"lr": 5e-3, "shrink": 2, "width": 16, "labels_per_class": 0.5, "executor": "loop"},
}
HEAD = """| data | method | variant | accuracy by seed, % | minus float32 | 95 % interval | sent, MB | processor, s |
|---|---|---|---|--:|---|--:|--:|"""


class RunResult(NamedTuple):
    """The test accuracy of a run in percent, MB of uploads, and seconds of the processor."""

    accuracy: float
    sent: float
    seconds: float


def run_once(**options: Any) -> RunResult:
    """Run, and return the result."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        start = time.process_time()
        halfmoon.run(Config(run_dir=run, **options))
        row = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
        return RunResult(100 * row["test"]["accuracy"], row["cost"]["bytes_up"] / 1e6, time.process_time() - start)


def compare(
    data: str, method: str, variants: Mapping[str, dict[str, Any]], seeds: Sequence[int], **options: Any
) -> None:
    """Print a row for each variant of a method, compared with the first one."""
    base: list[float] = []
    for variant, change in variants.items():
        runs = [run_once(seed=seed, data=data, method=method, **options, **change) for seed in seeds]
        accuracies = [run.accuracy for run in runs]
        cells = ["", ""]
        if len(base) > 1:
            difference = compare_paired(accuracies, base)
            cells = [f"{difference.mean:+.1f}", f"{difference.low:+.1f} to {difference.high:+.1f}"]
        base = base or accuracies
        each = ", ".join(f"{accuracy:.1f}" for accuracy in accuracies)
        sent = runs[0].sent
        seconds = sum(run.seconds for run in runs)
        cells = [data, method, variant, each, *cells, f"{sent:.1f}", f"{seconds:.0f}"]
        print(f"| {' | '.join(cells)} |", flush=True)


def compare_training(options: argparse.Namespace) -> None:
    """Print the rows of bf16 products."""
    for data in SETS if options.data_dir else ("digits",):
        for method, method_options in METHODS.items():
            shared = {**SHARED, **SETS[data], "options": method_options}
            compare(data, method, VARIANTS, options.seeds, **shared, rounds=options.rounds, data_dir=options.data_dir)


def main_job(method: str, rounds: int) -> dict[str, Any]:
    """Return the options of `halfmoon run` for one of its methods."""
    if method == "feddure":
        options = {name: value for name, value in MAIN_JOB["options"].items() if not isinstance(value, dict)}
    else:
        options = MAIN_JOB["options"].get(method, {})
    shared = {name: value for name, value in MAIN_JOB.items() if name not in ("baselines", "options")}
    return {**shared, "method": method, "rounds": rounds, "device": "cpu", "options": {method: options}}


def compare_uploads(options: argparse.Namespace) -> None:
    """Print the rows of float16 and int8."""
    for method in ("fedavg-soft-labels", "feddure"):
        config = {**main_job(method, options.rounds), "threads": 1, "workers": 1}
        compare("digits", config.pop("method"), UPLOADS, options.seeds, **config)
    if options.data_dir:
        config = {**SHARED, **SETS["fashion_mnist"], "rounds": options.rounds // 2, "data_dir": options.data_dir}
        compare("fashion_mnist", "fedavg-soft-labels", UPLOADS, options.seeds, **config)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    for name, compare_all, rounds, seeds in (
        ("training", compare_training, 40, [0, 1, 2, 3, 4]),
        ("uploads", compare_uploads, 80, [40, 41, 42, 43, 44]),
    ):
        command = commands.add_parser(name)
        command.set_defaults(compare_all=compare_all)
        command.add_argument("--rounds", type=int, default=rounds)
        command.add_argument("--seeds", type=int, nargs="+", default=seeds)
        command.add_argument("--data-dir", type=Path)
    options = parser.parse_args()
    print(HEAD)
    options.compare_all(options)


if __name__ == "__main__":
    main()
