"""`halfmoon run --data FOLDER`: a plan with minutes, two rows, and whether unlabeled images help."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halfmoon.cli.commands.base import print_json, say, show
from halfmoon.config.schema import Config
from halfmoon.core.errors import UserError

if TYPE_CHECKING:
    from halfmoon.sweeps.own_images import Played
    from halfmoon.sweeps.own_plan import Plan

ELSEWHERE = {"method", "baselines", "protocol", "preset", "split"}
"""Options that say themselves what is played."""


def add(parser: argparse.ArgumentParser) -> None:
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
    name = flags.get("data", Config.data)
    if args.config is None and not ELSEWHERE & flags.keys() and Path(name).is_dir():
        from halfmoon.sweeps.own_folder import look
        from halfmoon.sweeps.own_plan import MINUTES, plan

        contents = look(Path(name))
        if contents is not None:
            return plan(flags, contents, args.minutes or MINUTES)
    if args.plan or args.minutes is not None:
        raise UserError(
            "--plan and --minutes go with --data FOLDER, a folder of class folders or of images with a labels.csv, and "
            f"without {', '.join('--' + each for each in sorted(ELSEWHERE))} and --config."
        )
    return None


def show_plan(plan: Plan, as_json: bool) -> None:
    """Print what the folder holds, what was chosen and why, and minutes for each step and in all."""
    from rich.console import Console

    from halfmoon.cli.console import wrapped

    if as_json:
        print_json(plan.as_json())
        return
    say(f"{plan.contents.sentence}.")
    for name, words in plan.reasons:
        say(wrapped(Console(), f"{name}: {words}"))
    rows = [[step.name, f"{step.seconds / 60:.1f}"] for step in plan.steps]
    show(["step", "minutes"], [*rows, ["in all, about", f"{plan.seconds / 60:.1f}"]])


def show_played(plan: Plan, played: Played, root: Path, as_json: bool) -> None:
    """Print the decision, and which model to use; as JSON only where no other table was printed."""
    decision = played.decision
    if as_json:
        if played.outcome is None:
            print_json({"folder": str(root), "runs": played.runs, "decision": decision and decision.as_json()})
        return
    if decision is None:
        every = plan.contents.site and plan.contents.labeled == len(plan.contents.paths)
        why = "Every image has a label: there are none without to help." if every else ""
        say(why or "One split decides nothing: give more --minutes for several, or label more images.")
        return
    from halfmoon.methods import registry

    titles = [registry.entry(name).title for name in plan.pair]
    cells = [[title, f"{value:.1f}"] for title, value in zip(titles, (decision.base, decision.ours), strict=True)]
    show([f"mean of {decision.splits} splits", "right %"], cells)
    say(decision.sentence)
    labels_alone = decision.kind in ("harm", "equal") and plan.pair[0] in plan.config.baselines
    model = root / "baselines" / plan.pair[0] if labels_alone else root
    say(f"use the model: halfmoon predict {shlex.quote(str(model))} FOLDER")
