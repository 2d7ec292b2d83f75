"""Compare training from given weights: all layers, a slower backbone, or only the head, and from scratch.

    python results/finetuning.py DATA [FOLDER [OUT]]

DATA contains fashion_mnist and pneumonia_mnist, FOLDER (a temporary one) the runs; results are OUT.md and OUT.json. A
small network of width 16 is trained on Fashion-MNIST by one client, without X-rays. Then 20 clients with 5 labels of each
class on average train it on chest X-rays, 5 a round, with FixMatch. The learning rate of each row is the better of two on
validation images of seed 100; test images select nothing. The seed is that of training and of the split.
"""

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import halfmoon
from halfmoon import Config

RESULTS = Path(__file__).with_name("finetuning")
SEEDS = (0, 1, 2)
SELECTION_SEED = 100
RATES = (8e-3, 2e-3)
SHARED: dict[str, Any] = {"device": "cpu", "threads": 1, "network": "small", "width": 16, "checkpoint_every": 20}
PRETRAINING: dict[str, Any] = {
    **SHARED, "data": "fashion_mnist", "method": "fedavg", "clients": 1, "cohort": 1, "setting": "iid-iid",
    "label_ratio": 0.9, "rounds": 10, "steps": 200, "labeled_batch": 64, "budget": "none", "evaluate_every": 10,
}  # fmt: skip
TRAINING: dict[str, Any] = {
    **SHARED, "data": "pneumonia_mnist", "method": "fedavg-fixmatch", "options": {"threshold": 0.9}, "clients": 20,
    "cohort": 5, "setting": "dir-dir", "labels_per_class": 5.0, "rounds": 40, "steps": 6, "labeled_batch": 10,
    "unlabeled_batch": 20, "flip": False, "validation_share": 0.1, "budget": "none", "evaluate_every": 5,
}  # fmt: skip
ROWS: dict[str, dict[str, Any]] = {
    "from scratch, all trained": {},
    "given weights, all trained": {"weights": True},
    "given weights, backbone at a tenth of the rate": {"weights": True, "backbone_lr": 0.1},
    "given weights, backbone frozen": {"weights": True, "freeze": ("backbone",)},
}


def run_and_summarize(config: Config) -> dict[str, Any]:
    """Run, and return the summary with the best validation accuracy."""
    result = halfmoon.run(config)
    lines = [json.loads(line) for line in (result.folder / "metrics.jsonl").read_text().splitlines()]
    accuracies = [row["validation"]["accuracy"] for row in lines if "validation" in row]
    return {**result.summaries[0], "validation": max(accuracies, default=None)}


def main() -> None:
    """Train on Fashion-MNIST, select the rates, train each row, and write the table."""
    data = Path(sys.argv[1])
    with tempfile.TemporaryDirectory(dir=sys.argv[2] if len(sys.argv) > 2 else None) as folder:
        root = Path(folder)
        start = time.perf_counter()
        processor = time.process_time()
        first = run_and_summarize(Config(**PRETRAINING, data_dir=data, run_dir=root / "first"))
        weights = str(root / "first" / "model.safetensors")
        rows: list[dict[str, Any]] = []
        for number, (title, changes) in enumerate(ROWS.items()):
            options = {**TRAINING, **changes, **({"weights": weights} if changes else {})}

            def run(seed: int, lr: float, options: dict[str, Any] = options, number: int = number) -> dict[str, Any]:
                folder = root / f"{number}-{lr}-{seed}"
                return run_and_summarize(
                    Config(**options, data_dir=data, lr=lr, seed=seed, split_seed=seed, run_dir=folder)
                )

            validation = {lr: run(SELECTION_SEED, lr)["validation"] for lr in RATES}
            lr = max(validation, key=lambda each: validation[each])
            summaries = [run(seed, lr) for seed in SEEDS]
            accuracy = [100 * each["accuracy"]["last"] for each in summaries]
            cost = summaries[0]["cost"]
            rows.append({
                "row": title, "lr": lr, "accuracy": accuracy, "mean": statistics.mean(accuracy),
                "deviation": statistics.stdev(accuracy), "bytes_down": cost["bytes_down"], "bytes_up": cost["bytes_up"],
                "seconds": [each["seconds"] for each in summaries],
            })  # fmt: skip
            print(json.dumps(rows[-1]), flush=True)
        figures = {
            "first": 100 * first["accuracy"]["last"], "rows": rows, "seconds": round(time.perf_counter() - start),
            "processor_seconds": round(time.process_time() - processor),
        }  # fmt: skip
    out = Path(sys.argv[3]) if len(sys.argv) > 3 else RESULTS
    out.with_suffix(".json").write_text(json.dumps(figures, indent=1) + "\n")
    out.with_suffix(".md").write_text(format_page(figures))


def format_page(figures: dict[str, Any]) -> str:
    lines = [
        "# Training from given weights in a federation: all layers, or only the head",
        "",
        "    python results/finetuning.py DATA",
        "",
        "Setup: chest X-rays (PneumoniaMNIST, 28x28, 2 classes), 20 clients, 5 a round, Dirichlet 0.5, 5 labels of each class",
        "and client on average, FixMatch, 40 rounds of 6 steps, small network of width 16. The weights come from",
        f"Fashion-MNIST ({figures['first']:.2f} % there); no X-ray was used to train them. Test accuracy (%) of the last round;",
        "mean and standard deviation of seeds 0, 1 and 2, which are those of training and split. Rates: the better of",
        "0.008 and 0.002 on validation images of seed 100.",
        "",
        "| | accuracy | lr | sent to clients | sent back |",
        "|---|---|---|---|---|",
    ]
    for row in figures["rows"]:
        sizes = " | ".join(f"{row[name] / 1e6:,.2f} MB" for name in ("bytes_down", "bytes_up"))
        lines.append(f"| {row['row']} | {row['mean']:.2f} ± {row['deviation']:.2f} | {row['lr']} | {sizes} |")
    return "\n".join([*lines, "", f"All runs together took {figures['processor_seconds']} s of one core.", ""])


if __name__ == "__main__":
    main()
