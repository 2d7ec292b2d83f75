"""What the commands share that use a trained model."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from halfmoon import config as settings
from halfmoon.commands.base import complain

if TYPE_CHECKING:
    from halfmoon.deploy import Model
    from halfmoon.deploy.folder import Unreadable


def of_model(parser: argparse.ArgumentParser) -> None:
    """Let a command take --model."""
    about = "the folder of a finished run, or its model.safetensors"
    parser.add_argument("--model", metavar="RUN", type=Path, required=True, help=about)


def on_device(parser: argparse.ArgumentParser) -> None:
    """Let a command take --device."""
    about = "where to compute (default: auto)"
    parser.add_argument("--device", metavar="auto|cpu|cuda", default="auto", help=about)


def sure(parser: argparse.ArgumentParser) -> None:
    """Let a command take --sure."""
    about = "probability from which a label counts as sure (default: 0.9)"
    parser.add_argument("--sure", metavar="X", type=float, default=0.9, help=about)


def complain_unreadable(unreadable: Sequence[Unreadable]) -> int:
    """Name the images that could not be read, and return the exit code: 1 where there are any."""
    for each in unreadable:
        complain(f"{each.path}: {each.reason}", 1)
    if not unreadable:
        return 0
    return complain(f"{len(unreadable)} image(s) could not be read; the results are of the others.", 1)


def loaded(given: argparse.Namespace) -> Model:
    """Return the model of --model on --device; raise `UserError` where there is none."""
    from halfmoon.deploy import load_model
    from halfmoon.pieces import device

    place = device(settings.Config(device=settings.parse("device", given.device)))
    return load_model(given.model, place)
