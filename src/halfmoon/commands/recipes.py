"""`halfmoon recipes [NAME ...]`: the tables and figures that `halfmoon sweep` plays, and what they cost here."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halfmoon.commands.base import command, print_json
from halfmoon.errors import UserError

if TYPE_CHECKING:
    from halfmoon.sweep.cost import Estimator, Price
    from halfmoon.sweep.grid import Cell
    from halfmoon.sweep.recipe import Recipe


def add(commands: Any) -> None:
    """Add the command's parser."""
    about = "list the tables and figures that sweep plays, and what they cost on this machine"
    parser = command(commands, "recipes", about, "[NAME ...] ")
    parser.add_argument("names", metavar="NAME", nargs="*", help="only these, one alone in detail; a TOML file too")
    parser.add_argument("--scale", metavar="NAME", help="the cost of a scaled-down version, such as small")
    parser.add_argument("--no-cost", action="store_true", help="leave the cost out: nothing is measured")


def run(given: argparse.Namespace) -> int:
    """List the recipes."""
    from halfmoon.sweep import cost, recipe, timing

    found = [recipe.load(name) for name in given.names or recipe.names()]
    if given.scale and given.names:
        for each in found:
            each.scale(given.scale)
    estimator = None
    if not given.no_cost:
        estimator = cost.Estimator(timing.Timings(timing.cache_folder(), _tell))
    facts = [_facts(each, given.scale, estimator) for each in found]
    if given.json:
        machine = None if estimator is None else estimator.timings.machine
        print_json({"recipes": facts, "machine": machine})
        return 0
    here = None if estimator is None else cost.words_of(estimator.timings.machine)
    if len(facts) == 1:
        _detail(facts[0], here)
    else:
        _list(facts, here)
    return 0


def duration(seconds: float | None) -> str:
    """Return seconds in the unit that fits, from seconds to years; `-` for none."""
    if seconds is None:
        return "-"
    for size, unit in ((31_557_600, "years"), (86_400, "days"), (3_600, "hours"), (60, "min")):
        if seconds >= 1.5 * size:
            return f"{seconds / size:,.1f} {unit}" if seconds < 10 * size else f"{seconds / size:,.0f} {unit}"
    return f"{seconds:.0f} s"


def _tell(path: Path) -> None:
    """Say on stderr that this machine is being measured, and that a busy one measures badly."""
    import os

    words = f"measuring this machine, which takes about a minute; the times are kept in {path}"
    load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    if load > cores:
        words += (
            f" (it is busy: {load:.0f} processes for {cores} cores, so the times may be too long; remove the file "
            "to measure again)"
        )
    sys.stderr.write(f"halfmoon: {words}.\n")


def _facts(found: Recipe, name: str | None, estimator: Estimator | None) -> dict[str, Any]:
    """Return what there is to say of a recipe at a scale, ready for JSON."""
    from halfmoon.sweep import grid

    scale = found.scales.get(name) if name else None
    cells: list[Cell] = []
    reason = f"it has no scale {name}" if name and scale is None else None
    if reason is None:
        try:
            cells = grid.cells(found, {}, found.seeds[:1], scale)
        except UserError as error:
            reason = str(error)
    facts = {
        "name": found.name,
        "title": found.title,
        "paper": found.paper,
        "item": found.item,
        "about": found.about,
        "reading": found.reading,
        "kind": found.kind,
        "cells": len(cells),
        "seeds": list(found.seeds),
        "runs": None if reason else _runs(cells) * len(found.seeds),
        "scale": scale and {"name": scale.name, "about": scale.about},
        "scales": [{"name": each.name, "about": each.about} for each in found.scales.values()],
        "axes": [_axis(axis, values) for axis, values in found.axes.items()],
        "protocol": dict(found.protocol),
        "reason": reason,
    }
    return facts | ({} if estimator is None else {"cost": _cost(found, cells, reason, estimator)})


def _runs(cells: Sequence[Cell]) -> int:
    """Return how many runs of one seed differ."""
    from halfmoon.config import identity

    configs = [next(iter(cell.configs.values())) for cell in cells]
    return len({identity(config, config.method) for config in configs})


def _axis(axis: str, values: Sequence[Any]) -> dict[str, Any]:
    named = [{"name": value.name, "title": value.title, "extra": value.extra} for value in values]
    return {"name": axis, "values": named}


def _cost(found: Recipe, cells: Sequence[Cell], reason: str | None, estimator: Estimator) -> dict[str, Any] | None:
    """Return what all runs cost, and those of each value of the axis of rows, in seconds; None where it is unknown."""
    if reason is not None:
        return None
    trains, seeds = found.kind != "splits", len(found.seeds)
    rows = {}
    for value in dict.fromkeys(cell.at[found.rows] for cell in cells):
        mine = [cell for cell in cells if cell.at[found.rows] == value]
        rows[value] = _price(estimator.price(mine, seeds, trains))
    return {**_price(estimator.price(cells, seeds, trains)), "of": found.rows, "rows": rows}


def _price(price: Price) -> dict[str, Any]:
    known = [round(each, 3) for each in price.seconds]
    spans = {"shortest": min(known), "longest": max(known)} if known else {"shortest": None, "longest": None}
    total = None if price.total is None else round(price.total, 3)
    mean = None if price.mean is None else round(price.mean, 3)
    return {"runs": price.runs, "seconds": total, "seconds_per_run": mean, **spans, "reason": price.reason}


# For people


def _list(facts: Sequence[dict[str, Any]], here: str | None) -> None:
    from rich.console import Console

    from halfmoon.console import say, show

    console = Console()
    header = ["name", "title", "runs", *([] if here is None else ["one run", "all"]), "scales", "what it is"]
    rows = [
        [
            *(each["name"], each["title"], "-" if each["runs"] is None else f"{each['runs']:,}"),
            *([] if here is None else _spent(each)),
            ", ".join(scale["name"] for scale in each["scales"]) or "-",
            each["about"],
        ]
        for each in facts
    ]
    show(console, header, rows)
    if here is not None:
        say(console, f"\none run (the mean) and all runs, one after another, on {here}: estimated from timed steps")
        for each in facts:
            why = _why(each)
            if why:
                say(console, f"{each['name']}: {why}")
    say(console, "in detail: halfmoon recipes NAME; to play one: halfmoon sweep NAME")


def _spent(facts: dict[str, Any]) -> list[str]:
    """Return the durations of one run and of all."""
    cost = facts["cost"]
    if cost is None:
        return ["-", "-"]
    return [duration(cost["seconds_per_run"]), duration(cost["seconds"])]


def _why(facts: dict[str, Any]) -> str | None:
    """Return why there is no cost, None where there is one."""
    return facts["reason"] or (facts["cost"] or {}).get("reason")


def _detail(facts: dict[str, Any], here: str | None) -> None:
    from rich.console import Console

    from halfmoon.console import say, show

    console = Console()
    say(console, f"{facts['name']}: {facts['title']}\n  {facts['about']}")
    if facts["reading"]:
        say(console, f"  reading: {facts['reading']}")
    if facts["scale"]:
        say(console, f"  SCALED DOWN, not the paper's experiment: {facts['scale']['about']}")
    runs = "-" if facts["runs"] is None else f"{facts['runs']:,}"
    seeds = ", ".join(map(str, facts["seeds"]))
    say(console, f"  runs: {runs} ({facts['cells']:,} cells, seeds {seeds}; cells that are alike share a run)\n")
    for axis in facts["axes"]:
        names = [f"{value['name']}{' (with --only)' if value['extra'] else ''}" for value in axis["values"]]
        say(console, f"  {axis['name']}: {', '.join(names)}")
    options = [f"{name} = {_shown(value)}" for name, value in facts["protocol"].items()]
    say(console, f"\n  protocol: {', '.join(options) or 'the defaults'}")
    for scale in facts["scales"]:
        say(console, f"  scale {scale['name']}: {scale['about']}")
    why = _why(facts) if here is not None else facts["reason"]
    if why:
        say(console, f"\nno cost of all: {why}")
    if here is None or facts.get("cost") is None:
        return
    cost = facts["cost"]
    say(console, f"\ncost on {here}, estimated from timed steps:")
    rows = [
        [name, f"{each['runs']:,}", duration(each["seconds_per_run"]), _span(each), duration(each["seconds"])]
        for name, each in [*cost["rows"].items(), ("all", cost)]
    ]
    show(console, [cost["of"], "runs", "one run", "from - to", "all"], rows)


def _span(cost: dict[str, Any]) -> str:
    return "-" if cost["shortest"] is None else f"{duration(cost['shortest'])} - {duration(cost['longest'])}"


def _shown(value: Any) -> str:
    from halfmoon import toml

    if isinstance(value, dict):
        return "{" + ", ".join(f"{name} = {_shown(each)}" for name, each in value.items()) + "}"
    return toml.shown(value) if isinstance(value, bool | int | float | str) else str(value)
