"""Measure the calibration error on the test images of PneumoniaMNIST, with temperatures fitted on different images.

    python results/calibration.py DATA RUN... [--json FILE]

DATA is the folder of the data set with its three official subsets; each RUN was trained with a `validation_share`, so its
model has a temperature. Compared are unscaled logits, the temperature of the run (`run`), and one fitted on the official
validation images (`official`, 524 that no run has used). Prints a line for each run: its accuracy on the test images and
the expected calibration errors there, in percent.
"""

import argparse
import json
from pathlib import Path

import torch

from halfmoon.data import load
from halfmoon.models.temperature import find_temperature
from halfmoon.sites.inference.load import load_model
from halfmoon.sites.inference.measure import measure_fit


def measure_run(run: Path, data: Path) -> dict[str, str | float]:
    """Return the line of a run."""
    model = load_model(run)
    validation, test = (load(str(data), test=subset).test for subset in ("validation", "test"))
    logits = model.logits(validation.images)
    official = find_temperature(torch.from_numpy(logits), torch.from_numpy(validation.labels))
    test_logits = model.logits(test.images)
    errors = {
        name: round(100 * measure_fit(test_logits, test.labels, at).calibration_error, 2)
        for name, at in {"plain": 1.0, "run": model.card.temperature, "official": official}.items()
    }
    accuracy = 100 * float((test_logits.argmax(1) == test.labels).mean())
    return {"folder": run.name, "accuracy": round(accuracy, 1), "temperature": round(official, 2), **errors}


def main() -> None:
    """Print a line for each run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    lines = [measure_run(run, options.data) for run in options.runs]
    for line in lines:
        print(json.dumps(line), flush=True)
    if options.json:
        options.json.write_text(json.dumps(lines, indent=1) + "\n")


if __name__ == "__main__":
    main()
