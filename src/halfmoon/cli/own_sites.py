"""`halfmoon run --sites`: a rehearsal with the sites' own folders, and the table that a manager needs."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halfmoon.cli.commands.base import print_json, say, show
from halfmoon.config import preset
from halfmoon.config import schema as settings
from halfmoon.config.schema import Config
from halfmoon.core.errors import UserError, nearest

if TYPE_CHECKING:
    from halfmoon.sweeps.own_sites import Played


RECIPE: dict[str, Any] = {
    "method": "fedavg-fixmatch-global", "options": {"threshold": 0.8}, "network": "resnet9", "width": 16, "rounds": 100,
    "steps": 10, "unlabeled_batch": 30, "lr": 2e-3, "server_ema": 0.9, "evaluate_every": 10,
}  # fmt: skip
"""What a rehearsal without a file plays: few steps between two averages, and a network that a processor trains in
minutes. Found on validation images (docs/training.md#a-few-sites)."""


def add(parser: argparse.ArgumentParser) -> None:
    about = "simulate a federation of these site folders: each alone, labels together, the federation, fewer labels"
    parser.add_argument("--sites", metavar="FOLDER", nargs="+", type=Path, default=[], help=about)


def refuse_federation(file: Path | None, values: Mapping[str, Any], flags: Mapping[str, Any]) -> None:
    """Raise `UserError` for a file that describes a federation and names no data: another command was meant."""
    if file is None or "data" in {**values, **flags} or settings.TABLE not in settings.read(file):
        return
    name = shlex.quote(str(file))
    raise UserError(
        f"{file} describes a federation and names no data to simulate it on: `halfmoon serve {name}` plays it with its "
        f"sites, and `halfmoon run --config {name} --sites FOLDER FOLDER` simulates it on folders that are here."
    )


def rehearsal_of(args: argparse.Namespace, layer: Mapping[str, Any], file: Path | str) -> tuple[Config, list[Path]]:
    """Return a rehearsal's configuration and site folders; without a file, `RECIPE` fills in the options."""
    values = {"method": RECIPE["method"], **layer} if args.config else _filled(layer)
    folders = args.sites
    if isinstance(table := settings.read(args.config).get(settings.TABLE) if args.config else None, Mapping):
        folders = _of_federation(folders, table, args.config)
        values = {**_form(table), **values}
    values |= {"data": "digits", "clients": max(1, len(folders)), "cohort": min(5, max(1, len(folders)))}
    config = settings.resolve({}, values, file)
    root = config.run_dir or Path("runs", f"sites-{config.method}-seed{config.seed}")
    return replace(config, run_dir=root), folders


def print_rows(args: argparse.Namespace, folder: Path, table: Sequence[Played]) -> None:
    """Print the table of a rehearsal that lies in `folder`."""
    if args.json:
        print_json({"folder": str(folder), "rows": [asdict(each) for each in table]})
        return
    from halfmoon.sweeps.own_sites import HELD_OUT

    rows = [[each.name, f"{each.labels:,}", f"{each.accuracy:.2%}"] for each in table]
    show(["trained on", "labels", "right"], rows)
    tests = table[0].tests
    say(
        f"tested on one of {HELD_OUT} labeled images of every class and site, {tests:,} in all: "
        f"a row is good to {98 / tests**0.5:.0f} points or better (95 %)",
    )
    say(f"runs: {folder}")


def _filled(requested: Mapping[str, Any]) -> dict[str, Any]:
    without = preset.overruled(requested) | ({"options"} if "method" in requested else set())
    rest = {name: value for name, value in RECIPE.items() if name not in without}
    own = settings.joined(rest.get("options", {}), requested.get("options", {}), "--option")
    return {**rest, **requested, "options": own}


def _of_federation(folders: Sequence[Path], table: Mapping[str, Any], file: Path) -> list[Path]:
    """Return the folders of a federation's sites; raise `UserError` for one that is called as none of them."""
    names = [str(each) for each in table.get("sites", ())]
    if len(folders) == 1 and folders[0].resolve().name not in names:
        missing = [name for name in names if not (folders[0] / name).is_dir()]
        if missing:
            raise UserError(
                f"{folders[0]} holds no folder {missing[0]}, which is a site of {file.name}: give all folders."
            )
        return [folders[0] / name for name in names]
    for folder in folders:
        if folder.resolve().name not in names:
            raise UserError(
                f"{folder} is called as no site of {file.name}: {nearest(folder.resolve().name, names)} Folders are "
                "known by their names."
            )
    return list(folders)


def _form(table: Mapping[str, Any]) -> dict[str, Any]:
    image = table.get("image", ())
    if len(image) != 3 or image[1] != image[2]:
        return {}
    return {"channels": image[0], "resize": image[1]}
