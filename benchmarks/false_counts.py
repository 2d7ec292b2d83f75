"""Clients that claim a million times their images, alone and with flipped signs, against every rule and the cap.

    python benchmarks/false_counts.py [--seeds 0 1 2] [--out results/false_counts.md]

The embedded digits, ten clients that all train in every round, of whom `ATTACKERS` attack. A row is a rule, with and
without the cap on weights that a federation's server has by default; a cell is test accuracy in percent after the last
round, mean and standard deviation over the seeds.
"""

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

from halfmoon.aggregation.weights import FACTOR
from halfmoon.config.schema import Config
from halfmoon.core.errors import UserError
from halfmoon.runs import runner

ATTACKS = ("none", "sign-flip", "false-counts", "sign-flip-false-counts")
RULES = ("mean", "clip", "median", "trimmed", "krum")
ATTACKERS = 0.1
COMMON: dict[str, Any] = {
    "data": "digits", "method": "fedavg-fixmatch", "clients": 10, "cohort": 10, "setting": "iid-dir",
    "dirichlet_alpha": 0.5, "labels_per_class": 4.0, "network": "small", "width": 6, "lr": 5e-3, "labeled_batch": 20,
    "unlabeled_batch": 20, "steps": 8, "rounds": 10, "evaluate_every": 10, "checkpoint_every": 10, "byzantine": 0.2,
    "executor": "loop", "device": "cpu", "threads": 1,
}  # fmt: skip


def played(seed: int, attack: str, rule: str, cap: float) -> float | None:
    """Return the test accuracy in percent after the last round; None where the run was stopped with a sentence."""
    own = {"seed": seed, "split_seed": seed, "attack": attack, "aggregation": rule, "weight_cap": cap}
    config = Config(**COMMON, **own, attackers=0.0 if attack == "none" else ATTACKERS)  # type: ignore[arg-type]
    with tempfile.TemporaryDirectory() as folder:
        try:
            return 100 * runner.run_in_folder(config, Path(folder) / "run")["accuracy"]["last"]
        except UserError:
            return None


def shown(values: list[float | None]) -> str:
    """Return a cell."""
    through = [value for value in values if value is not None]
    if len(through) < len(values):
        return "stopped"
    return f"{statistics.mean(through):.1f} ± {statistics.stdev(through) if len(through) > 1 else 0:.1f}"


def main() -> None:
    """Play all cells, and write the page after each row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=Path("results/false_counts.md"))
    given = parser.parse_args()
    head = [
        "# False counts", "", "    python benchmarks/false_counts.py --seeds " + " ".join(map(str, given.seeds)), "",
        f"Test accuracy in percent, mean ± standard deviation over {len(given.seeds)} seeds (of three differences of a",
        "few points mean nothing): FedAvg + FixMatch on the embedded digits, ten clients of whom one is hostile, ten",
        "short rounds. `false-counts` claims 10^6 times its images; `sign-flip-false-counts` also sends its update the",
        f"wrong way round. `weight_cap` {FACTOR:g} is what `halfmoon serve` has by default; 0 is no cap.", "",
        "| aggregation | weight_cap | " + " | ".join(ATTACKS) + " |", "| --- | --- |" + " --- |" * len(ATTACKS),
    ]  # fmt: skip
    rows: list[str] = []
    for rule in RULES:
        for cap in (0.0, FACTOR):
            cells = [shown([played(seed, attack, rule, cap) for seed in given.seeds]) for attack in ATTACKS]
            rows.append(f"| `{rule}` | {cap:g} | " + " | ".join(cells) + " |")
            given.out.write_text("\n".join([*head, *rows]) + "\n")
            print(rows[-1], flush=True)


if __name__ == "__main__":
    main()
