"""`halfmoon calibrate`: fit the temperature of a trained model on labeled images that it has not seen."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

from halfmoon.cli.commands.base import command, print_json, say, show
from halfmoon.cli.commands.trained import complain_unreadable, of_model, on_device, place


def add(commands: Any) -> None:
    """Add the command's parser."""
    about = "calibrate a trained model on labeled images that it was not trained on"
    parser = command(commands, "calibrate", about, "MODEL FOLDER ")
    of_model(parser)
    on_device(parser)
    about = "validation images: a folder for each class, or images with a labels.csv (path,label)"
    parser.add_argument("folder", metavar="FOLDER", type=Path, help=about)


def run(given: argparse.Namespace) -> int:
    """Fit, write the temperature into the model's file, and say what it brings."""
    from halfmoon.sites.inference.calibrate import calibrate

    found = calibrate(given.model, given.folder, str(place(given)), given.network)
    if given.json:
        facts = {"model": str(found.model), "images": found.images, "before": asdict(found.before)}
        print_json({**facts, "after": asdict(found.after), "unreadable": [each._asdict() for each in found.unreadable]})
    else:
        rows = [
            [name, f"{each.temperature:.3f}", f"{100 * each.calibration_error:.2f}", f"{each.loss:.4f}"]
            for name, each in (("before", found.before), ("after", found.after))
        ]
        show(["", "temperature", "calibration error %", "cross-entropy"], rows)
        words = f"measured on the {found.images:,} images that it was fitted on; measure others with halfmoon evaluate"
        say(f"{words}\nwritten: {found.model}")
    return complain_unreadable(found.unreadable)
