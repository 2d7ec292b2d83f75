"""`halfmoon predict`: a table of labels for a folder of images."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from halfmoon.cli.commands.base import command, print_json, say, show
from halfmoon.cli.commands.trained import complain_unreadable, loaded, of_model, on_device, sure

OUT = Path("predictions.csv")


def add(commands: Any) -> None:
    """Add the command's parser."""
    parser = command(commands, "predict", "label the images of a folder with a trained model", "MODEL FOLDER ")
    of_model(parser)
    on_device(parser)
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="images of any size, also in folders below it")
    parser.add_argument("--out", metavar="FILE", type=Path, default=OUT, help=f"the table (default: {OUT})")
    sure(parser)


def run(given: argparse.Namespace) -> int:
    """Write the table, and say what is in it and which images could not be read."""
    from halfmoon.sites.inference.predict import predict

    model = loaded(given)
    found = predict(model, given.folder, given.out, given.sure)
    if given.json:
        facts = {"out": str(found.out), "images": found.images, "sure": given.sure, "unsure": found.unsure}
        print_json({**facts, "labels": found.labels, "unreadable": [each._asdict() for each in found.unreadable]})
    else:
        show(["label", "images"], [[name, f"{count:,}"] for name, count in found.labels.items()])
        say(f"unsure, below {given.sure:g}: {found.unsure:,} of {found.images:,} images\ntable: {found.out}")
    return complain_unreadable(found.unreadable)
