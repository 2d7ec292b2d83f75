"""Measure temperatures on PneumoniaMNIST: how far probabilities are off on test images, and with which images' help.

    python benchmarks/calibration.py DATA RUN... [--json FILE]

DATA is the folder of the data set with its three official parts; each RUN is one whose training set a share aside
(`validation_share`), so that its model has a temperature already. Compared are the logits as they are, that temperature
(`own`), and one fitted on the official validation images (`official`, 524 that no run has seen). Printed is a line a
run: its accuracy on the test images and the expected calibration errors there, in percent.
"""

import argparse
import json
from pathlib import Path

import torch

from halfmoon.data import load
from halfmoon.models.temperature import find_temperature
from halfmoon.sites.inference.load import load_model
from halfmoon.sites.inference.measure import measure_fit


def measured(run: Path, data: Path) -> dict[str, str | float]:
    """Return a run's line."""
    model = load_model(run)
    held, test = (load(str(data), test=part).test for part in ("validation", "test"))
    logits = model.logits(held.images)
    official = find_temperature(torch.from_numpy(logits), torch.from_numpy(held.labels))
    seen = model.logits(test.images)
    errors = {
        name: round(100 * measure_fit(seen, test.labels, at).calibration_error, 2)
        for name, at in {"plain": 1.0, "own": model.card.temperature, "official": official}.items()
    }
    right = 100 * float((seen.argmax(1) == test.labels).mean())
    return {"run": run.name, "accuracy": round(right, 1), "temperature": round(official, 2), **errors}


def main() -> None:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    lines = [measured(run, given.data) for run in given.runs]
    for line in lines:
        print(json.dumps(line), flush=True)
    if given.json:
        given.json.write_text(json.dumps(lines, indent=1) + "\n")


if __name__ == "__main__":
    main()
