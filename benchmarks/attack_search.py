"""Random attacks for `attacks.py --search`: concentrated and spread changes of an upload, inside a server's bounds.

A try is a number, from which `draw_attack` draws what hostile sites change, in which direction and how far. The same
number is the same attack under every rule, so that rules are compared on the same attacks.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from halfmoon.aggregation.base import AggregationContext, compute_update, replace_update
from halfmoon.api.uploads import Upload
from halfmoon.core import rng

MAX_NORM = 9.9
"""Largest norm of an upload's update, in the honest median: a server refuses updates of ten medians."""

CLAIM = 2.0
"""Claimed number of images in the honest median: the most that a server's weight cap lets through."""

ALIGNMENT = 0.05
"""Cosine with the honest mean of an attack that evades a comparison of directions."""

TARGETS = (
    "one head bias", "one class row", "one channel", "one tensor", "random coordinates", "all parameters",
    "one statistic", "all statistics", "counts",
)  # fmt: skip
"""Coordinates that an attack changes. "counts": none; only the claimed number of images is false."""

DIRECTIONS = ("up", "down", "fixed random", "reversed mean", "mean less deviations", "edge of the honest range")
"""Directions of the change. The last two replace the values of the target; the others are added to the base."""

BASES = ("local update", "honest mean", "nothing")
"""Update to which the change is added."""


class Attack(NamedTuple):
    """An attack on the uploads of one run.

    Attributes:
        target: One of `TARGETS`.
        direction: One of `DIRECTIONS`.
        length: The norm of the change in the honest median norm, or the number of standard deviations.
        base: One of `BASES`.
        start: The first round of the attack, from 0.
        evade: True to add as much of the honest mean as a cosine of `ALIGNMENT` with it needs.
        claim: True to claim `CLAIM` times the honest median number of images.
        share: The share of "random coordinates".
        seed: The seed of the target's coordinates and of the fixed random direction.
    """

    target: str
    direction: str
    length: float = 1.4
    base: str = "local update"
    start: int = 0
    evade: bool = False
    claim: bool = True
    share: float = 1.0
    seed: int = 0

    def describe(self) -> str:
        """Describe the attack in one line."""
        words = [self.target]
        if self.target == "random coordinates":
            words[0] = f"{100 * self.share:.2g} % of all coordinates"
        if self.target != "counts":
            unit = "deviations" if self.direction == "mean less deviations" else "median norms"
            length = "" if self.direction.startswith("edge") else f", {self.length:.2g} {unit}"
            words += [f"{self.direction}{length}", f"on the {self.base}" if self.base != "nothing" else "alone"]
        words += [f"from round {self.start + 1}"] if self.start else []
        words += ["aligned with the mean"] if self.evade else []
        words += [f"claims {CLAIM:g} medians of images"] if self.claim else []
        return ", ".join(words)


NAMED: dict[str, Attack] = {
    "one head bias": Attack("one head bias", "up"),
    "one class row": Attack("one class row", "up"),
    "one channel": Attack("one channel", "fixed random"),
    "one tensor": Attack("one tensor", "fixed random"),
    "one statistic": Attack("one statistic", "up"),
    "edge of the honest range": Attack("all parameters", "edge of the honest range"),
}
"""Attacks of the fixed table that the search's terms describe."""


def draw_attack(number: int, rounds: int) -> Attack:
    """Draw the attack of a try; the first ones have every target once, the later ones any."""
    generator = rng.generator(number, "attack-search")

    def choose(options: Sequence[Any]) -> Any:
        return options[int(torch.randint(len(options), (), generator=generator))]

    def uniform(low: float, high: float) -> float:
        return low + (high - low) * float(torch.rand((), generator=generator))

    target = TARGETS[number] if number < len(TARGETS) else choose(TARGETS[:-1])
    direction = choose(DIRECTIONS)
    length = uniform(0.3, 2.5) if direction == "mean less deviations" else math.exp(uniform(math.log(0.2), math.log(9)))
    return Attack(
        target=target,
        direction=direction,
        length=length,
        base=choose(BASES),
        start=choose((0, 0, rounds // 3, 2 * rounds // 3)),
        evade=choose((False, True)),
        claim=target == "counts" or choose((True, True, False)),
        share=10 ** uniform(-3, 0),
        seed=number,
    )


def apply_attack(attack: Attack, hostile: int, context: AggregationContext, upload: Upload) -> Upload:
    """Replace the uploads of the first `hostile` clients, which see the uploads of all others."""
    if context.round < attack.start:
        return upload
    if attack.claim:
        weight = upload.weight.clone()
        weight[:hostile] = CLAIM * weight[hostile:].median()
        upload = upload._replace(weight=weight)
    part = "stats" if attack.target.endswith(("statistic", "statistics")) else "params"
    change = {path: leaf for path, leaf in compute_update(upload, context).items() if path.split("/")[0] == part}
    if attack.target == "counts" or not change:
        return upload
    flat = torch.cat([leaf.flatten(1).double() for leaf in change.values()], 1)
    is_target = _select_coordinates(attack, {path: leaf[0] for path, leaf in change.items()})
    sent = [_forge(attack, flat[hostile:], local_update, is_target) for local_update in flat[:hostile]]
    columns = torch.cat([torch.stack(sent), flat[hostile:]]).split([leaf[0].numel() for leaf in change.values()], 1)
    new = {
        path: column.to(leaf).reshape(leaf.shape) for (path, leaf), column in zip(change.items(), columns, strict=True)
    }
    return replace_update(upload, context, {**compute_update(upload, context), **new})


def _select_coordinates(attack: Attack, leaves: Mapping[str, Tensor]) -> Tensor:
    """Select the coordinates (D,) that an attack changes, of leaves (...) that are D numbers together."""
    generator = rng.generator(attack.seed, "attack-target")

    def draw(count: int) -> int:
        return int(torch.randint(count, (), generator=generator))

    masks = {path: torch.zeros(leaf.shape, dtype=torch.bool) for path, leaf in leaves.items()}
    paths = list(masks)
    head = paths[-1].rsplit("/", 1)[0]
    if attack.target in ("one head bias", "one class row"):
        entry = draw(len(masks[f"{head}/bias"]))
        masks[f"{head}/bias"][entry] = True
        if attack.target == "one class row":
            masks[f"{head}/weight"][entry] = True
    elif attack.target == "one channel":
        filters = [path for path, mask in masks.items() if mask.dim() == 4]
        path = filters[draw(len(filters))]
        masks[path][draw(len(masks[path]))] = True
    elif attack.target == "one tensor":
        masks[paths[draw(len(paths))]][:] = True
    elif attack.target == "one statistic":
        path = paths[draw(len(paths))]
        masks[path][draw(len(masks[path]))] = True
    flat = torch.cat([mask.flatten() for mask in masks.values()])
    if attack.target in ("all parameters", "all statistics"):
        flat[:] = True
    elif attack.target == "random coordinates":
        flat = torch.rand(len(flat), generator=generator) < attack.share
        flat[draw(len(flat))] = True
    return flat


def _forge(attack: Attack, honest: Tensor, local_update: Tensor, is_target: Tensor) -> Tensor:
    """Compute what a hostile client sends (D,) from the honest updates (k, D) and its local one (D,)."""
    mean = honest.mean(0)
    unit = honest.norm(dim=1).median()
    base = {"local update": local_update, "honest mean": mean, "nothing": torch.zeros_like(mean)}[attack.base]
    if attack.direction == "mean less deviations":
        sent = torch.where(is_target, mean - attack.length * mean.sign() * honest.std(0), base)
    elif attack.direction == "edge of the honest range":
        sent = torch.where(is_target, torch.where(mean > 0, honest.amin(0), honest.amax(0)), base)
    else:
        directions = {
            "up": torch.ones_like(mean),
            "down": -torch.ones_like(mean),
            "fixed random": torch.randn(
                len(mean), generator=rng.generator(attack.seed, "attack-direction"), dtype=mean.dtype
            ),
            "reversed mean": -mean,
        }
        direction = torch.where(is_target, directions[attack.direction], 0.0)
        sent = base + attack.length * unit * direction / direction.norm().clamp_min(1e-30)
    mean_direction = mean / mean.norm().clamp_min(1e-30)
    if attack.evade and sent @ mean_direction < ALIGNMENT * sent.norm():
        rest = sent - (sent @ mean_direction) * mean_direction
        sent = rest + ALIGNMENT * rest.norm() * mean_direction
    return sent * (MAX_NORM * unit / sent.norm().clamp_min(1e-30)).clamp_max(1.0)


Column = tuple[str, str, int, str, int]
"""Data, setting, labels, method and sites of a table."""


def find_column(row: Mapping[str, Any]) -> Column:
    """Return the table that a run belongs to."""
    return row["data"], row["setting"], row["labels"], row["method"], row["sites"]


def find_calm(rows: Sequence[Mapping[str, Any]], column: Column) -> dict[int, float]:
    """Return the accuracy of the mean without an attack for each seed."""
    return {
        row["seed"]: row["accuracy"] for row in rows
        if find_column(row) == column and row["attack"] == "none" and row["rule"] == "mean"
    }  # fmt: skip


def format_search(rows: Sequence[Mapping[str, Any]], rules: Sequence[str], seeds: Sequence[int]) -> str:
    """Format the results of a search as Markdown.

    Args:
        rows: The runs. A loss is the accuracy of the mean without an attack, of the same seed, minus that of a run.
        rules: The rules, a line of each table.
        seeds: All seeds. A try is drawn for one of them, and counts as confirmed once it has a run with each.
    """
    lines: list[str] = []
    for column in dict.fromkeys(find_column(row) for row in rows):
        data, setting, labels, method, sites = column
        calm = find_calm(rows, column)
        accuracy = f"{statistics.mean(calm.values()):.1f} %" if calm else "not measured"
        lines += [f"## {data}, {setting}, {sites} sites, {labels} labels, {method}", ""]
        lines += [f"Mean without an attack: {accuracy} ({len(calm)} seeds).", ""]
        lines += [
            "| rule | without an attack | hostile sites left out | tries | median | 95 % of tries below "
            "| tries above 3 points | worst try | worst mean over all seeds | what it is |",
            "|---|---|---|---|---|---|---|---|---|---|",
        ]
        for rule in rules:
            found = [row for row in rows if find_column(row) == column and row["rule"] == rule and row["seed"] in calm]
            lines += _format_rule(rule, found, calm, seeds)
        lines.append("")
    return "\n".join(lines)


def _format_rule(
    rule: str, rows: Sequence[Mapping[str, Any]], calm: Mapping[int, float], seeds: Sequence[int]
) -> list[str]:
    """Format a rule's line of a table; none without a try."""
    losses: dict[str, dict[int, float]] = {}
    descriptions: dict[str, str] = {}
    for row in rows:
        losses.setdefault(row["attack"], {})[row["seed"]] = calm[row["seed"]] - row["accuracy"]
        if "try" in row:
            descriptions[row["attack"]] = row["description"]
    drawn = [losses[attack].get(seeds[int(attack.split()[1]) % len(seeds)]) for attack in descriptions]
    values = sorted(loss for loss in drawn if loss is not None)
    if not values:
        return []
    means = {attack: statistics.mean(losses[attack].values()) for attack in losses if set(losses[attack]) >= set(seeds)}
    confirmed = sorted((means[attack], attack) for attack in descriptions if attack in means)
    quiet = [f"{means[attack]:.1f}" if attack in means else "not measured" for attack in ("none", "(left out by hand)")]
    quantile = values[math.ceil(0.95 * len(values)) - 1]
    worst = (
        (f"{confirmed[-1][0]:.1f}", f"{confirmed[-1][1]}: {descriptions[confirmed[-1][1]]}")
        if confirmed
        else ("-", "-")
    )
    cells = [
        f"`{rule}`", *quiet, str(len(values)), f"{statistics.median(values):.1f}", f"{quantile:.1f}",
        str(sum(loss > 3 for loss in values)), f"{values[-1]:.1f}", *worst,
    ]  # fmt: skip
    return ["| " + " | ".join(cells) + " |"]
