"""`halfmoon recipes [NAME ...]`: the tables and figures that `halfmoon sweep` plays, and what one costs here."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halfmoon.cli.commands.base import command, option, print_json, requested, say, show
from halfmoon.core.errors import UserError

if TYPE_CHECKING:
    from halfmoon.sweeps.recipe import Recipe

PLACE = ("data_dir", "cache", "device", "executor", "compile", "threads", "workers")
"""The options of a run that change how long it takes and none of its numbers."""


def add(commands: Any) -> None:
    """Add the command's parser."""
    about = "list the tables and figures that sweep plays, and with --time what one costs on this machine"
    parser = command(commands, "recipes", about, "[NAME ...] ", run)
    parser.add_argument("names", metavar="NAME", nargs="*", help="only these, one alone in detail; a TOML file too")
    about = "play a round of one cell of each row of the recipe, and multiply its seconds"
    parser.add_argument("--time", action="store_true", help=about)
    parser.add_argument("--scale", metavar="NAME", help="with --time: a scaled-down version, such as small")
    about = "with --time: only these cells: AXIS=VALUE,AXIS=VALUE, as in halfmoon sweep"
    parser.add_argument("--only", metavar="CELLS", action="append", default=[], help=about)
    group = parser.add_argument_group("machine")
    for name in PLACE:
        option(group, name)


def run(args: argparse.Namespace) -> int:
    """List the recipes."""
    from halfmoon.sweeps import recipe

    loaded = [recipe.load(name) for name in args.names or recipe.names()]
    if args.time and len(loaded) != 1:
        raise UserError("--time is about one recipe: write, for example, halfmoon recipes feddure-table1 --time.")
    if not args.time and (args.scale or args.only):
        raise UserError("--scale and --only go with --time.")
    facts = [_facts(each) for each in loaded]
    if args.time:
        facts[0]["cost"] = _cost(loaded[0], args)
    if args.json:
        print_json({"recipes": facts})
    elif len(facts) == 1:
        _detail(facts[0])
    else:
        _list(facts)
    return 0


def duration(seconds: float | None) -> str:
    """Return seconds in the unit that fits, from seconds to years; `-` for none."""
    if seconds is None:
        return "-"
    for size, unit in ((31_557_600, "years"), (86_400, "days"), (3_600, "hours"), (60, "min")):
        if seconds >= 1.5 * size:
            return f"{seconds / size:,.1f} {unit}" if seconds < 10 * size else f"{seconds / size:,.0f} {unit}"
    return f"{seconds:.0f} s"


def _facts(loaded: Recipe) -> dict[str, Any]:
    from halfmoon.sweeps import grid

    return {
        "name": loaded.name,
        "title": loaded.title,
        "paper": loaded.paper,
        "item": loaded.item,
        "about": loaded.about,
        "reading": loaded.words(None),
        "kind": loaded.kind,
        "cells": len(grid.combinations(loaded, {})),
        "seeds": list(loaded.seeds),
        "panels": {name: {axis: list(names) for axis, names in at.items()} for name, at in loaded.panels.items()},
        "scales": [{"name": each.name, "about": each.about} for each in loaded.scales.values()],
        "axes": [_axis(axis, values) for axis, values in loaded.axes.items()],
        "protocol": dict(loaded.protocol),
    }


def _axis(axis: str, values: Sequence[Any]) -> dict[str, Any]:
    named = [{"name": value.name, "title": value.title, "extra": value.extra} for value in values]
    return {"name": axis, "values": named}


def _cost(loaded: Recipe, args: argparse.Namespace) -> dict[str, Any]:
    """Return what the cells that are asked for cost on this machine: a timed round of each row, multiplied."""
    from halfmoon.config import schema
    from halfmoon.sweeps import cost, grid
    from halfmoon.sweeps.sweep_folder import machine

    scale = loaded.scale(args.scale) if args.scale else None
    over = requested(args, PLACE)
    cells = grid.cells(loaded, grid.selection(loaded, args.only), None, scale, schema.anchored(over, Path()))
    rows = {
        name: {
            "cell": row.cell,
            "seconds_per_round": round(row.seconds_per_round, 4),
            "runs": row.runs,
            "seconds": round(row.seconds, 3),
        }
        for name, row in cost.price(loaded, cells).items()
    }
    return {
        "machine": cost.words_of(machine()),
        "scale": scale and {"name": scale.name, "about": scale.about},
        "of": loaded.rows,
        "rows": rows,
        "runs": sum(row["runs"] for row in rows.values()),
        "seconds": round(sum(row["seconds"] for row in rows.values()), 3),
    }


# For people


def _list(facts: Sequence[dict[str, Any]]) -> None:
    rows = [
        [
            *(each["name"], each["title"], f"{each['cells']:,}", str(len(each["seeds"]))),
            ", ".join(scale["name"] for scale in each["scales"]) or "-",
            each["about"],
        ]
        for each in facts
    ]
    show(["name", "title", "cells", "seeds", "scales", "what it is"], rows)
    say("in detail: halfmoon recipes NAME; to play one: halfmoon sweep NAME")


def _detail(facts: dict[str, Any]) -> None:
    say(f"{facts['name']}: {facts['title']}\n  {facts['about']}")
    if facts["reading"]:
        say(f"  reading: {facts['reading']}")
    seeds = ", ".join(map(str, facts["seeds"]))
    say(f"  {facts['cells']:,} cells, each with seeds {seeds}; cells that are alike share a run\n")
    for axis in facts["axes"]:
        names = [f"{value['name']}{' (with --only)' if value['extra'] else ''}" for value in axis["values"]]
        say(f"  {axis['name']}: {', '.join(names)}")
    for name, at in facts["panels"].items():
        words = "; ".join(f"{axis} {', '.join(names)}" for axis, names in at.items())
        say(f"  panel {name}: {words}")
    options = [f"{name} = {_text(value)}" for name, value in facts["protocol"].items()]
    say(f"\n  protocol: {', '.join(options) or 'the defaults'}")
    for scale in facts["scales"]:
        say(f"  scale {scale['name']}: {scale['about']}")
    if "cost" in facts:
        _show_cost(facts["cost"])
    else:
        say(f"\nwhat it costs here: halfmoon recipes {facts['name']} --time")


def _show_cost(cost: dict[str, Any]) -> None:
    if cost["scale"]:
        say(f"\n  SCALED DOWN, not the paper's experiment: {cost['scale']['about']}")
    say(f"\ncost on {cost['machine']}: a round of one cell of each row was timed, and multiplied")
    rows = [
        [name, each["cell"], f"{each['seconds_per_round']:.2f}", f"{each['runs']:,}", duration(each["seconds"])]
        for name, each in cost["rows"].items()
    ]
    rows.append(["all", "", "", f"{cost['runs']:,}", duration(cost["seconds"])])
    show([cost["of"], "timed", "s a round", "runs", "all runs"], rows)


def _text(value: Any) -> str:
    from halfmoon.storage import toml

    if isinstance(value, dict):
        return "{" + ", ".join(f"{name} = {_text(each)}" for name, each in value.items()) + "}"
    return toml.text(value) if isinstance(value, bool | int | float | str) else str(value)
