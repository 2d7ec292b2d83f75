"""`halfmoon export`: a trained model as a file for other programs."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from halfmoon.cli.commands.base import command, print_json, say
from halfmoon.cli.commands.trained import of_model
from halfmoon.core.errors import UserError


def add(commands: Any) -> None:
    """Add the command's parser."""
    parser = command(commands, "export", "write a trained model for other programs", "MODEL ")
    of_model(parser)
    parser.add_argument("--onnx", metavar="FILE", type=Path, help="an ONNX file (needs halfmoon[onnx])")
    parser.add_argument("--torch", metavar="FILE", type=Path, help="a program of torch.export (.pt2)")
    about = "a folder of real images on which the files are compared with the model, besides random ones"
    parser.add_argument("--images", metavar="FOLDER", type=Path, help=about)


def run(given: argparse.Namespace) -> int:
    """Write the files that are asked for, and say how they compare with the model."""
    if given.onnx is None and given.torch is None:
        raise UserError("nothing is to be written: give --onnx FILE, --torch FILE or both.")
    from halfmoon.sites.inference import load_model
    from halfmoon.sites.inference.export import export_onnx, export_torch, real_images

    model = load_model(given.model)
    real = real_images(model, given.images)
    makers = {"onnx": (export_onnx, given.onnx), "torch": (export_torch, given.torch)}
    found = {name: make(model, path, real) for name, (make, path) in makers.items() if path is not None}
    if given.json:
        facts = {
            name: {"path": str(each.path), "images": each.images, "difference": each.difference}
            for name, each in found.items()
        }
        print_json(facts)
        return 0
    for name, each in found.items():
        words = f"compared on {each.images} images, the largest difference of a probability is {each.difference:.1e}"
        say(f"{name}: {each.path} ({words})")
    return 0
