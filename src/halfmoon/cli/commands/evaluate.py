"""`halfmoon evaluate`: how good a trained model is on a folder of labeled images."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from halfmoon.cli.commands.base import command, print_json, say, show
from halfmoon.cli.commands.trained import complain_unreadable, loaded, of_model, on_device, sure

SHOWN = 12
"""The most classes whose confusion matrix is printed."""


def add(commands: Any) -> None:
    """Add the command's parser."""
    about = "measure a trained model on labeled images"
    parser = command(commands, "evaluate", about, "MODEL FOLDER ")
    of_model(parser)
    on_device(parser)
    about = "a folder for each class, or images with a labels.csv (path,label)"
    parser.add_argument("folder", metavar="FOLDER", type=Path, help=about)
    about = "also write evaluation.json, classes.csv, confusion.csv, reliability.csv and reliability.png there"
    parser.add_argument("--out", metavar="DIR", type=Path, help=about)
    sure(parser)


def run(given: argparse.Namespace) -> int:
    """Measure, print and, with --out, write what was found."""
    from halfmoon.sites.inference.measure import evaluate, write

    model = loaded(given)
    found, unreadable = evaluate(model, given.folder, given.sure)
    found["temperature"] = model.card.temperature
    files = [str(path) for path in write(found, unreadable, given.out)] if given.out is not None else []
    if given.out is not None:
        from halfmoon.report.reliability import reliability  # Matplotlib is slow to import

        picture = given.out / "reliability.png"
        reliability(found, picture)
        files.append(str(picture))
    if given.json:
        print_json({**found, "unreadable": [each._asdict() for each in unreadable], "files": files})
    else:
        _show(found, files)
    return complain_unreadable(unreadable)


def _show(found: dict[str, Any], files: Sequence[str]) -> None:
    rows = [
        [each["class"], *(_percent(each[name]) for name in ("precision", "recall", "f1")), f"{each['support']:,}"]
        for each in found["per_class"]
    ]
    show(["class", "precision %", "recall %", "F1 %", "images"], rows)
    if len(found["classes"]) <= SHOWN:
        say("\nconfusion (rows: true class, columns: predicted class)")
        matrix = zip(found["classes"], found["confusion"], strict=True)
        show(["", *found["classes"]], [[name, *map(str, row)] for name, row in matrix])
    say("\nreliability (images by the probability of their label)")
    rows = [
        [
            f"{each['above']:.3f} to {each['to']:.3f}",
            f"{each['images']:,}",
            *(_percent(each[name]) for name in ("confidence", "accuracy")),
        ]
        for each in found["reliability"]
        if each["images"]
    ]
    show(["probability", "images", "mean probability %", "accuracy %"], rows)
    certain = found["sure"]
    lines = [
        "",
        f"images: {found['images']:,}",
        f"accuracy: {_percent(found['accuracy'])} %",
        f"balanced accuracy: {_percent(found['balanced_accuracy'])} %",
        f"area under the ROC curve: {_percent(found['auc'])} %",
        f"expected calibration error: {_percent(found['calibration_error'])} % "
        f"(temperature {found['temperature']:.3g})",
        f"sure, from {certain['at_least']:g}: {_percent(certain['share'])} % of the images, "
        f"accuracy among them: {_percent(certain['accuracy'])} %",
        *(f"written: {file}" for file in files),
    ]
    say("\n".join(lines))


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.2f}"
