"""Attacks by sites that know the rule, against the mean and a federation's default: accuracy on test images.

    python benchmarks/attacks.py [--data digits --data-dir DIR] [--labels 50] [--sites 5 10 ...] [--methods NAME ...]
        [--seeds 0 1 ...] [--rules mean cosine ...] [--out results/attacks]
    python benchmarks/attacks.py --search [--tries 200] [...] [--out results/attack_search]

One site in five is hostile, and all hostile sites work together: they see the honest updates of a round before they
send theirs. Each also claims twice the median number of images, which is the most that a server's cap lets through.

`--search` draws random attacks instead of the fixed ones (`attack_search.py`), each with one of the seeds, and reports
the worst for each rule. A finished run is a line of OUT.jsonl.gz and is not repeated; OUT.md is written after each run.
"""

import argparse
import math
import os
import platform
import re
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.append(str(Path(__file__).resolve().parents[1] / "results"))

import numpy as np
import records
import torch
from attack_search import NAMED, Attack, apply_attack, draw_attack, find_calm, format_search
from torch import Tensor

from halfmoon import Config
from halfmoon.aggregation.base import AggregationContext, compute_update, replace_update
from halfmoon.aggregation.robust import RobustAggregator
from halfmoon.aggregation.weights import FACTOR, WeightCap
from halfmoon.api.uploads import Upload
from halfmoon.core import rng
from halfmoon.core.errors import Diverged
from halfmoon.core.memory import retain_freed_memory
from halfmoon.data import Split
from halfmoon.engine.evaluation import Examples, evaluate_model
from halfmoon.engine.executors.vmap import VmapExecutor
from halfmoon.engine.local_clients import FederatedDataset, Training
from halfmoon.engine.loop import initial_model
from halfmoon.engine.runtime import RuntimeSettings
from halfmoon.engine.simulation import Simulation
from halfmoon.runs import factory
from halfmoon.runs.budgets import build_budget

METHODS = ("fedavg-soft-labels", "fedavg-fixmatch", "feddure")
RULES = ("mean", "cosine", "cosine-trimmed", "cosine-nnm")
SETTINGS = ("iid-dir", "uneven")
ROUNDS = 15
STEPS = 6
LABELS = 50
"""Labels of all sites together."""

BOUND = 9.9
"""Norm of an update in medians: a server refuses ten."""

Forge = Callable[[Tensor, Tensor], Tensor]
"""(honest updates (k, D), the hostile site's own (D,)) -> what it sends."""


def _unit(vector: Tensor) -> Tensor:
    return vector / vector.norm()


def _bias(honest: Tensor, own: Tensor) -> Tensor:
    """Return a site's update and the same direction in every round, as long as an honest update."""
    steady = torch.randn(len(own), generator=rng.generator(0, "bias"), dtype=own.dtype)
    return own + honest.norm(dim=1).median() * _unit(steady)


def _orthogonal(honest: Tensor, own: Tensor) -> Tensor:
    """Return the update without its component along the honest mean, plus a twentieth of its length along that mean."""
    mean = _unit(honest.mean(0))
    rest = own - (own @ mean) * mean
    return honest.norm(dim=1).median() * _unit(rest + 0.05 * rest.norm() * mean)


def flip(part: str, factor: float) -> tuple[str, Forge]:
    """Return the attack that sends minus `factor` times its update of a part."""
    return part, lambda honest, own: -factor * own


FORGED: dict[str, tuple[str, Forge]] = {
    **{f"sign flip x{factor}": flip("params", factor) for factor in (1, 4)},
    "sign flip at the bound": ("params", lambda honest, own: -BOUND * honest.norm(dim=1).median() * _unit(own)),
    **{f"statistics flip x{factor}": flip("stats", factor) for factor in (1, 4)},
    "others' mean reversed": (
        "params",
        lambda honest, own: -honest.norm(dim=1).median() * _unit(honest.mean(0)),
    ),
    "a little is enough (1.5 sd)": ("params", lambda honest, own: honest.mean(0) - 1.5 * honest.std(0)),
    "steady bias": ("params", _bias),
    "just inside the rule": ("params", _orthogonal),
}
"""What is sent in place of an update, and the part of it that is forged."""

LEFT_OUT = "(left out by hand)"
"""No attack: who would be hostile is left out, so that its images and labels alone are missing."""

ATTACKS = ("none", LEFT_OUT, *FORGED, *NAMED, "label flip", "back door")


class Cell(NamedTuple):
    """One run."""

    seed: int
    method: str
    setting: str
    sites: int
    attack: str
    rule: str
    data: str = "digits"
    labels: int = LABELS


def find_drawn(attack: str) -> Attack | None:
    """Return the terms of a named attack or of a try of the search; None for all others."""
    if attack.startswith("try "):
        return draw_attack(int(attack.removeprefix("try ")), ROUNDS)
    return NAMED.get(attack)


class Forgers:
    """The first aggregator: the uploads of the first `hostile` clients become what `attack` makes of them."""

    def __init__(self, attack: str, hostile: int) -> None:
        self.attack = attack
        self.hostile = hostile
        self.drawn = find_drawn(attack)

    def process_uploads(self, context: AggregationContext, upload: Upload) -> tuple[Sequence[int], Upload]:
        everyone = range(len(context.clients))
        if self.attack == "none":
            return everyone, upload
        if self.attack == LEFT_OUT:
            return everyone[self.hostile :], upload.map(lambda leaf: leaf[self.hostile :])
        if self.drawn is not None:
            return everyone, apply_attack(self.drawn, self.hostile, context, upload)
        weight = upload.weight.clone()
        weight[: self.hostile] = FACTOR * weight[self.hostile :].median()
        upload = upload._replace(weight=weight)
        if self.attack not in FORGED:
            return everyone, upload
        part, forge = FORGED[self.attack]
        change = {path: leaf for path, leaf in compute_update(upload, context).items() if path.split("/")[0] == part}
        if not change:
            return everyone, upload
        flat = torch.cat([leaf.flatten(1).double() for leaf in change.values()], 1)
        honest = flat[self.hostile :]
        sent = torch.cat([torch.stack([forge(honest, own) for own in flat[: self.hostile]]), honest])
        pieces = sent.split([leaf[0].numel() for leaf in change.values()], 1)
        new = {
            path: piece.to(leaf).reshape(leaf.shape) for (path, leaf), piece in zip(change.items(), pieces, strict=True)
        }
        return everyone, replace_update(upload, context, {**compute_update(upload, context), **new})

    def row(self) -> dict[str, Any]:
        return {}

    def stop_reason(self, round: int) -> str | None:
        return None


def uneven(split: Split, seed: int) -> Split:
    """Return a split in which the last site has most images, and the first ones hardly any."""
    client = split.client.copy()
    generator = np.random.default_rng(rng.derive_seed(seed, "uneven"))
    for site in range(split.clients - 1):
        for labeled in (True, False):
            rows = split.rows(site, labeled)
            moved = rows[generator.random(len(rows)) < 1 - (site + 1) / split.clients]
            client[moved[: len(rows) - 2] if labeled else moved] = split.clients - 1
    return Split(client, split.labeled, split.clients)


def patched(images: Tensor) -> Tensor:
    """Return images with a white square of 2x2 pixels in their last corner."""
    images = images.clone()
    images[..., -2:, -2:] = images.max()
    return images


def measure_cell(cell: Cell, folder: Path | None) -> dict[str, Any]:
    """Run a cell; return its accuracy and how often images with a patch get the class of the back door, in percent."""
    began = time.process_time()
    n = cell.sites
    classes = 2 if cell.data == "pneumonia_mnist" else 10
    config = Config(
        method=cell.method, data=cell.data, data_dir=folder, clients=n, cohort=n, dirichlet_alpha=0.5,
        labels_per_class=cell.labels / classes / n,
        setting="iid-dir" if cell.setting == "iid-dir" else "dir-dir", steps=STEPS, rounds=ROUNDS, seed=cell.seed,
        split_seed=cell.seed, device="cpu", threads=1, network="small",
    )  # fmt: skip
    shared = factory.build_problem(config)
    method = factory.build_method(config)
    split = uneven(shared.split, cell.seed) if cell.setting == "uneven" else shared.split
    hostile = 0 if cell.attack == "none" else max(1, n // 5)
    train = shared.train
    if cell.attack == "back door":
        images = train.images.clone()
        labels = train.labels.clone()
        for site in range(hostile):
            for labeled in (True, False):
                rows = split.rows(site, labeled)
                rows = rows[: math.ceil(0.05 * len(rows))]
                images[rows] = patched(images[rows])
                labels[rows] = 0
        train = Examples(images, labels)
    label_flippers = frozenset(range(hostile) if cell.attack == "label flip" else ())
    training = Training(shared.batching, build_budget(config, shared.task), shared.server_batching, VmapExecutor())
    rules = [Forgers(cell.attack, hostile), WeightCap(FACTOR)]
    rules += [] if cell.rule == "mean" else [RobustAggregator(cell.rule, 0.2)]
    simulation = Simulation(
        method, shared.task, FederatedDataset(train, split, label_flippers=label_flippers, classes=classes), shared.views, training,
        RuntimeSettings(n, config.seed), None, rules,
    )  # fmt: skip
    server = method.start(shared.task, initial_model(shared.task, config.seed, torch.device("cpu")))
    outside = [0, 0]
    try:
        for number in range(ROUNDS):
            simulation.open(number)
            server = method.round(shared.task.at(number), server, simulation)
            for fact in (simulation.close().aggregator or {}).get("outside", ()):
                outside[fact["client"] < hostile] += 1
    except Diverged:
        return {**cell._asdict(), "accuracy": 10.0, "diverged": True}

    def accuracy(images: Examples) -> float:
        model = method.solution(shared.task, server)
        row: dict[str, Any] = evaluate_model(shared.task.network, model, shared.task.normalize, images).row()
        return round(100 * row["accuracy"], 2)

    assert shared.test is not None, "the digits have a test set"
    result: dict[str, Any] = {**cell._asdict(), "accuracy": accuracy(shared.test), "outside": outside}
    if cell.attack == "back door":
        others = shared.test.labels != 0
        result["opened"] = accuracy(Examples(patched(shared.test.images[others]), 0 * shared.test.labels[others]))
    return {**result, "seconds": round(time.process_time() - began, 1)}


SHOWN_METHODS = {"fedavg-soft-labels": "soft labels", "fedavg-fixmatch": "FixMatch", "feddure": "FedDure"}
SHOWN_ATTACKS = {
    "none": "no attack",
    LEFT_OUT: "(hostile site left out by hand)",
    "just inside the rule": "just inside the filter",
    "label flip": "wrong labels",
}
SEEDS = 5
"""Seeds of a complete cell; a cell with fewer has their number in parentheses."""

Columns = Sequence[tuple[str, int, str, int]]
"""(data, labels, method, sites) of each column."""


def fill_page(page: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write the tables of each rule into the page, between its markers; the text around them remains."""
    text = "# Attacks that know the rule\n" + "".join(
        f"\n## `{rule}`\n\n<!-- losses: {rule} -->\n<!-- /losses -->\n" for rule in RULES
    )
    text = page.read_text() if page.exists() else text
    for rule in dict.fromkeys((*RULES, *(row["rule"] for row in rows))):
        tables = format_losses(rows, rule)
        text = re.sub(
            rf"(<!-- losses: {re.escape(rule)} -->\n).*?(<!-- /losses -->)",
            lambda found, tables=tables: f"{found[1]}\n{tables}\n{found[2]}",
            text,
            flags=re.DOTALL,
        )
    page.write_text(text)


def format_losses(rows: Sequence[dict[str, Any]], rule: str) -> str:
    """Return the tables of a rule: five sites, and all other numbers of sites."""
    found = dict.fromkeys(_column(row) for row in rows if row["rule"] == rule)
    order = sorted(found, key=lambda column: (column[0], column[1], column[3], list(SHOWN_METHODS).index(column[2])))
    groups = ([column for column in order if column[3] == 5], [column for column in order if column[3] != 5])
    return "\n".join(format_group(rows, rule, group) for group in groups if group)


def format_group(rows: Sequence[dict[str, Any]], rule: str, columns: Columns) -> str:
    """Return one table. A cell has the points lost on even and on uneven sites."""
    heads = [_head(column) for column in columns]
    lines = ["| attack | " + " | ".join(heads) + " |", "|---" * (1 + len(heads)) + "|"]
    accuracies = ["the mean without an attack, %"]
    for column in columns:
        calm = [_accuracies(rows, column, setting, "none", "mean") for setting in SETTINGS]
        accuracies.append(" / ".join(f"{statistics.mean(each.values()):.1f}" for each in calm if each))
    lines.append("| " + " | ".join(accuracies) + " |")
    for attack in dict.fromkeys((*ATTACKS, *(row["attack"] for row in rows))):
        if (attack, rule) == ("none", "mean"):
            continue
        cells = [_lost(rows, column, attack, rule) for column in columns]
        if set(cells) != {"-"}:
            lines.append(f"| {SHOWN_ATTACKS.get(attack, attack)} | " + " | ".join(cells) + " |")
    opened = [_opened(rows, column, rule) for column in columns]
    if set(opened) != {"-"}:
        lines.append("| back door: share opened, % | " + " | ".join(opened) + " |")
    return "\n".join(lines) + "\n"


def _head(column: tuple[str, int, str, int]) -> str:
    data, labels, method, sites = column
    xrays = "X-rays, " if data == "pneumonia_mnist" else "" if data == "digits" else f"{data}, "
    return f"{xrays}{SHOWN_METHODS.get(method, method)}, {sites} sites" + (
        f", {labels} labels" if labels != LABELS else ""
    )


def _column(row: dict[str, Any]) -> tuple[str, int, str, int]:
    """Return the column of a run; older rows of the digits lack data and labels."""
    return row.get("data", "digits"), row.get("labels", LABELS), row["method"], row["sites"]


def _accuracies(
    rows: Sequence[dict[str, Any]], column: tuple[str, int, str, int], setting: str, attack: str, rule: str
) -> dict[int, float]:
    """Return the accuracy of each seed."""
    return {
        row["seed"]: row["accuracy"]
        for row in rows
        if _column(row) == column and (row["setting"], row["attack"], row["rule"]) == (setting, attack, rule)
    }


def _join(even: Sequence[float], uneven: Sequence[float], digits: int = 1) -> str:
    """Format the means on even and on uneven sites, each with the number of seeds if these are few."""
    cells = [
        f"{statistics.mean(values):.{digits}f}" + (f" ({len(values)})" if len(values) < SEEDS else "")
        if values
        else "-"
        for values in (even, uneven)
    ]
    return cells[0] if cells[1] == "-" else " / ".join(cells)


def _lost(rows: Sequence[dict[str, Any]], column: tuple[str, int, str, int], attack: str, rule: str) -> str:
    """Return the points that a rule loses to the mean without an attack."""
    losses: list[list[float]] = []
    for setting in SETTINGS:
        calm = _accuracies(rows, column, setting, "none", "mean")
        found = _accuracies(rows, column, setting, attack, rule)
        losses.append([calm[seed] - accuracy for seed, accuracy in found.items() if seed in calm])
    return _join(*losses)


def _opened(rows: Sequence[dict[str, Any]], column: tuple[str, int, str, int], rule: str) -> str:
    """Return the share of test images that a back door turns into the attacker's class, in percent."""
    shares = [
        [row["opened"] for row in rows if "opened" in row and _column(row) == column
         and (row["setting"], row["rule"]) == (setting, rule)]
        for setting in SETTINGS
    ]  # fmt: skip
    return _join(*shares, digits=0)


def search(options: argparse.Namespace) -> None:
    """Run every try of a search under every rule, repeat the worst ones with all seeds, and write lines and page."""
    lines = options.out.with_suffix(".jsonl.gz")
    page = options.out.with_suffix(".md")
    rows = records.read_lines(lines)
    done = {Cell(*(row[name] for name in Cell._fields)) for row in rows}
    places = [
        (method, setting, sites)
        for sites in options.sites
        for method in options.methods
        for setting in options.settings
    ]
    head = [
        "# Search for attacks", "",
        f"    python benchmarks/attacks.py {' '.join(sys.argv[1:])}", "",
        f"Each try is a random attack by one site in five, the same one under every rule, with one of the seeds "
        f"({' '.join(map(str, options.seeds))}). The {options.confirm} worst tries of each rule are repeated with all "
        "seeds, because the worst of many single runs is partly chance. Points of test accuracy lost, compared with the "
        f"mean of the same seed without an attack; [every run]({lines.name}). {ROUNDS} rounds of {STEPS} steps. "
        f"{os.cpu_count()} cores ({platform.machine()}), PyTorch {torch.__version__}, one thread a run.", "",
    ]  # fmt: skip

    def run_cell(seed: int, attack: str, rule: str, place: tuple[str, str, int]) -> None:
        cell = Cell(seed, *place, attack, rule, options.data, options.labels)
        if cell in done:
            return
        done.add(cell)
        row = measure_cell(cell, options.data_dir)
        if attack.startswith("try "):
            number = int(attack.removeprefix("try "))
            row |= {"try": number, "description": draw_attack(number, ROUNDS).describe()}
        rows.append(row)
        records.append_line(lines, row)

    def write_page() -> None:
        page.write_text("\n".join(head) + "\n" + format_search(rows, options.rules, options.seeds))

    for place in places:
        for seed in options.seeds:
            for rule in dict.fromkeys(["mean", *options.rules]):  # losses are compared with the mean
                run_cell(seed, "none", rule, place)
                run_cell(seed, LEFT_OUT, rule, place)
    for number in range(options.tries):
        for place in places:
            for rule in options.rules:
                run_cell(options.seeds[number % len(options.seeds)], f"try {number}", rule, place)
        write_page()
    for place in places:
        for rule in options.rules:
            for number in find_worst(rows, Cell(0, *place, "", rule, options.data, options.labels), options):
                for seed in options.seeds:
                    run_cell(seed, f"try {number}", rule, place)
                write_page()


def find_worst(rows: Sequence[dict[str, Any]], cell: Cell, options: argparse.Namespace) -> list[int]:
    """Return the tries of a cell that lost most with the seed they were drawn for, the worst first."""
    wanted = cell._replace(seed=0, attack="")
    found = [row for row in rows if Cell(*(row[name] for name in Cell._fields))._replace(seed=0, attack="") == wanted]
    calm = find_calm(rows, (cell.data, cell.setting, cell.labels, cell.method, cell.sites))
    losses = {
        row["try"]: calm[row["seed"]] - row["accuracy"] for row in found
        if row.get("try", options.tries) < options.tries
        and row["seed"] == options.seeds[row["try"] % len(options.seeds)]
    }  # fmt: skip
    return sorted(losses, key=lambda number: -losses[number])[: options.confirm]


def main() -> None:
    parser = argparse.ArgumentParser(description="Attack federations by sites that know the rule.")
    parser.add_argument("--data", default="digits")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--labels", type=int, default=LABELS, help="of all sites together")
    parser.add_argument("--sites", type=int, nargs="+", default=[5, 10, 20, 3])
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--attacks", nargs="+", choices=ATTACKS, default=list(ATTACKS))
    parser.add_argument("--rules", nargs="+", default=list(RULES))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--out", type=Path, help="default: results/attacks, or results/attack_search")
    parser.add_argument("--search", action="store_true", help="draw random attacks instead of the fixed ones")
    parser.add_argument("--tries", type=int, default=200, help="attacks that --search draws")
    parser.add_argument("--confirm", type=int, default=5, help="worst attacks of each rule to repeat with all seeds")
    parser.add_argument("--factors", type=float, nargs="*", default=[], help="more factors of flipped updates")
    options = parser.parse_args()
    for factor in options.factors:
        names = {f"sign flip x{factor:g}": "params", f"statistics flip x{factor:g}": "stats"}
        FORGED.update({name: flip(part, factor) for name, part in names.items()})
        options.attacks += [name for name in names if name not in options.attacks]
    options.out = options.out or Path("results/attack_search" if options.search else "results/attacks")
    retain_freed_memory()
    torch.set_num_threads(1)
    if options.search:
        search(options)
        return
    lines = options.out.with_suffix(".jsonl.gz")
    page = options.out.with_suffix(".md")
    rows = records.read_lines(lines)
    done = {Cell(*(row[name] for name in Cell._fields if name in row)) for row in rows}
    for sites in options.sites:
        for method in options.methods:
            for seed in options.seeds:
                for setting in options.settings:
                    for attack in options.attacks:
                        for rule in options.rules:
                            cell = Cell(seed, method, setting, sites, attack, rule, options.data, options.labels)
                            if cell not in done:
                                rows.append(measure_cell(cell, options.data_dir))
                                records.append_line(lines, rows[-1])
                                fill_page(page, rows)
    fill_page(page, rows)


if __name__ == "__main__":
    main()
