"""What the commands share that use a trained model."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from halfmoon.cli.commands.base import complain
from halfmoon.config import schema as settings

if TYPE_CHECKING:
    import torch

    from halfmoon.sites.inference import Model
    from halfmoon.sites.inference.image_folder import UnreadableImage


def of_model(parser: argparse.ArgumentParser) -> None:
    about = "the folder of a finished run, or its model.safetensors"
    parser.add_argument("model", metavar="MODEL", type=Path, help=about)
    from_outside(parser)


def from_outside(parser: argparse.ArgumentParser) -> None:
    about = "the model's network, where it comes from outside halfmoon: no file names code that you do not name"
    parser.add_argument("--network", metavar="MODULE:MAKE", help=about)


def on_device(parser: argparse.ArgumentParser) -> None:
    about = "where to compute (default: auto)"
    parser.add_argument("--device", metavar="auto|cpu|cuda", default="auto", help=about)


def sure(parser: argparse.ArgumentParser) -> None:
    about = "probability from which a label counts as sure (default: 0.9)"
    parser.add_argument("--sure", metavar="X", type=float, default=0.9, help=about)


def complain_unreadable(unreadable: Sequence[UnreadableImage]) -> int:
    """Name the images that could not be read, and return the exit code: 1 where there are any."""
    for each in unreadable:
        complain(f"{each.path}: {each.reason}", 1)
    if not unreadable:
        return 0
    return complain(f"{len(unreadable)} image(s) could not be read; the results are of the others.", 1)


def place(given: argparse.Namespace) -> torch.device:
    """Return the device of --device; raise `UserError` where there is none."""
    from halfmoon.runs.factory import device

    return device(settings.Config(device=settings.parse("device", given.device)))


def loaded(given: argparse.Namespace) -> Model:
    """Return the model of a command on --device; raise `UserError` where there is none."""
    from halfmoon.sites.inference import load_model

    return load_model(given.model, place(given), given.network)
