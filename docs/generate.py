"""Write into the pages what the code knows: `python docs/generate.py` renews README.md and docs/*.md.

A page holds a block between `<!-- generated: NAME -->` and `<!-- /generated -->`, which is written anew as a whole. A
method's page has one between `<!-- method: FILE -->` and `<!-- /method -->`. Between `<!-- defaults: METHOD -->` and
`<!-- /defaults -->` stands a table written by hand: of its rows (name, default, values, meaning) only the default and
the values are renewed. A test demands that nothing is left to renew.
"""

import inspect
import io
import json
import math
import re
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import MISSING, fields
from functools import cache
from pathlib import Path
from textwrap import shorten
from typing import Any, NamedTuple, get_type_hints

import numpy as np
import torch
from torch import Tensor

from halfmoon.api.requirements import requirements_of
from halfmoon.api.types import Task
from halfmoon.cli import main as cli
from halfmoon.config import schema as settings
from halfmoon.config.option_types import describe_type
from halfmoon.core import tree
from halfmoon.core.normalize import Normalize
from halfmoon.core.optim import Adam
from halfmoon.core.tree import Tree
from halfmoon.data.partition.split import SERVER, Split
from halfmoon.engine.budget import Budget
from halfmoon.engine.driver import ClientContext, ClientResult
from halfmoon.engine.evaluation import Examples
from halfmoon.engine.local_clients import FederatedDataset, Training
from halfmoon.engine.loop import initial_model
from halfmoon.engine.runtime import RuntimeSettings
from halfmoon.engine.sampling import Batching, Views
from halfmoon.engine.simulation import Simulation
from halfmoon.federation.protocol.disclosure import MEANINGS
from halfmoon.federation.protocol.log import format_bytes
from halfmoon.federation.protocol.terms import Terms
from halfmoon.federation.server.plan import FederationTable, Rules, option_descriptions
from halfmoon.methods import registry
from halfmoon.methods.analytic import ON_FEATURES
from halfmoon.methods.objectives import Objective
from halfmoon.models import SmallCNN
from halfmoon.runs.factory import ImageSpec
from halfmoon.studies import grid, recipe

ROOT = Path(__file__).resolve().parents[1]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
COMMANDS = ("run", "compare", "methods", "data", "resume", "recipes", "sweep", "report")
FEDERATED = ("serve", "site join")
"""Commands that take no options of a run."""
CLIENTS, COHORT, ROUNDS, LABELED, UNLABELED = 8, 4, 2, 10, 20
"""The federation in which methods are measured: clients, those of a round, rounds, and a client's images."""
WIDEST = 150
"""Characters of a cell that lists methods."""
MANY = 64
"""Numbers of a tensor from which on two that are alike are one and the same: smaller ones begin alike, as zeros."""

_GENERATED = re.compile(r"(<!-- generated: ([\w-]+) -->\n).*?(<!-- /generated -->)", re.DOTALL)
_METHOD = re.compile(r"(<!-- method: (\w+) -->\n).*?(<!-- /method -->)", re.DOTALL)
_DEFAULTS = re.compile(r"(<!-- defaults: ([\w-]+) -->\n)(.*?)(<!-- /defaults -->)", re.DOTALL)
_FLAG = re.compile(r"^  (?:-\w, )?(--[a-z][\w-]*)", re.MULTILINE)


def flags(command: str) -> list[str]:
    """Return the flags that `halfmoon COMMAND --help-all` shows, in its order; COMMAND may be two words."""
    shown = io.StringIO()
    with redirect_stdout(shown):
        cli.main([*command.split(), "--help-all"])
    return _FLAG.findall(shown.getvalue())


def options() -> str:
    """Return a table of all options for each section of `halfmoon run --help-all`."""
    takers = {command: set(flags(command)) for command in COMMANDS}
    defaults = {each.name: each.default for each in fields(settings.Config)}
    parts, other = [], dict[str, list[str]]()
    for title, section in settings.SECTIONS.items():
        names = [name for name in settings.option_names(section) if name in settings.option_types()]
        rows = []
        for name in names:
            flag = f"--{name.replace('_', '-')}"
            kind = settings.option_types()[name]
            no = f", `--no-{flag[2:]}`" if kind in (bool, bool | None) else ""
            for command in takers:
                if (flag in takers[command]) != (command in ("run", "compare")):
                    other.setdefault(command, []).append(f"`{flag}`")
            meaning = shorten(settings.option_helps()[name], WIDEST, placeholder=" ...")
            rows.append([f"`{flag}`{no}", _brief(describe_type(kind)), _default(defaults[name]), meaning])
        header = ["flag", "value", "default", "meaning"]
        parts.append(f"**{title[0].upper()}{title[1:]}**\n\n{table(header, rows)}")
    lines = [
        f"- `{command}` {'does not take' if command in ('run', 'compare') else 'takes'} {', '.join(names)}\n"
        for command, names in other.items()
    ]
    return "\n".join([*parts, "**Which commands**\n", "".join(lines)])


def _brief(kind: str) -> str:
    """Return the words for a type as short as a column of them may have them."""
    for words, short in (("a whole number", "integer"), ("a list of ", ""), ("true or false", "yes or no"), ("a ", "")):
        kind = kind.replace(words, short)
    return kind.replace("'", "`")


def methods() -> str:
    """Write the tables of methods: those to begin with, the federated ones, and the centralized ones.

    Year, idea and use of a method are in docs/methods.toml; the rest is in the catalog.

    Raises:
        ValueError: a method of the catalog is missing in docs/methods.toml, or the other way round.
    """
    notes = tomllib.loads((ROOT / "docs" / "methods.toml").read_text(encoding="utf-8"))
    names = [*registry.names(), *(entry.name for entry in ON_FEATURES)]
    if different := set(notes) ^ set(names):
        raise ValueError(f"docs/methods.toml and the catalog of methods differ in {sorted(different)}")
    first = [name for name in notes if notes[name].get("first")]
    rest = [name for name in names if name not in first]
    federated = [name for name in rest if not registry.entry(name).pooled]
    centralized = [name for name in rest if registry.entry(name).pooled]

    def rows(of: Sequence[str]) -> str:
        head = ["name", "year", "labels needed at", "how unlabeled images are used", "when to use it"]
        return table(head, [_method_row(name, notes[name]) for name in of])

    return (
        f"Begin with these:\n\n{rows(first)}\nAll others:\n\n{rows(federated)}\n"
        f"Centralized, with all images in one place, to compare with:\n\n{rows(centralized)}"
    )


def _method_row(name: str, note: Mapping[str, Any]) -> list[str]:
    """Return a method's cells: name with a link to its page, year, who needs labels, idea, and use."""
    entry = registry.entry(name)
    page = "weights.md" if entry in ON_FEATURES else f"methods/{page_of(name)}.md"
    return [f"[`{name}`]({page})", str(note["year"]), entry.labels, note["idea"], note["use"]]


def page_of(name: str) -> str:
    """Return the page of a method: its file's name, or its objective's file for FedAvg around one."""
    method = registry.entry(name).method
    parts = [one for one in vars(method).values() if isinstance(one, Objective)]
    module = type(method).__module__
    if parts and module == "halfmoon.methods.fedavg" and not registry.entry(name).all_labels:
        module = type(parts[0]).__module__
    stem = module.rpartition(".")[2]
    return "fedavg" if stem == "supervised" else stem


def families() -> dict[str, list[str]]:
    """Return the names of methods by page."""
    found: dict[str, list[str]] = {}
    for name in registry.names():
        found.setdefault(page_of(name), []).append(name)
    return found


def method_page(page: str) -> str:
    """Return what the code knows of the methods of a page: rows, traffic, options and departures from the paper."""
    names = families()[page]
    entries = [registry.entry(name) for name in names]
    first = entries[0].method
    rows = "".join(f"- `{each.name}`: {each.about}. Labels: {each.labels}.\n" for each in entries)
    papers = "; ".join(dict.fromkeys(paper for each in entries for paper in each.paper.split("; ")))
    parts = [f"Paper: {papers}.\n\n{rows}"]
    federated = [each.name for each in entries if not each.pooled]
    if federated:
        shared = page not in ("fedavg", type(first).__module__.rpartition(".")[2])
        moves = "As in [FedAvg](fedavg.md)." if shared else _moves(type(first))
        alike: dict[tuple[str, ...], list[str]] = {}
        for name in federated:
            alike.setdefault(tuple(map(_units, measured(name))), []).append(f"`{name}`")
        parts.append(f"## Traffic and memory\n\n{moves}\n")
        if not shared or list(alike) != [tuple(map(_units, measured("fedavg")))]:
            header = ["name", "down", "up", "a client keeps", "the server keeps"]
            parts.append(table(header, [[", ".join(same), *cells] for cells, same in alike.items()]))
    if page != "feddure":
        parts.append(f"## Options\n\n{_family_options(names)}")
    parts.append("## Departures\n\n" + _sources(page) + "\n")
    return "\n".join(parts)


def _sources(page: str) -> str:
    """Return where the departures of a page's methods are written: the file's docstring, which the site shows here."""
    folder = "objectives/" if not (ROOT / "src" / "halfmoon" / "methods" / f"{page}.py").exists() else ""
    path = f"src/halfmoon/methods/{folder}{page}.py"
    return f"[The file's docstring](../../{path})."


def _family_options(names: list[str]) -> str:
    """Return the options of related methods: the first one's defaults, then how the others differ."""
    options = {name: {key: option.default for key, option in registry.options(name).items()} for name in names}
    base = options[names[0]]
    lines = [", ".join(f"`{key} = {_shown(value)}`" for key, value in base.items())]
    for name in names[1:]:
        own = {key: value for key, value in options[name].items() if key not in base or base[key] != value}
        lines += [f"`{name}`: " + ", ".join(f"`{key} = {_shown(value)}`" for key, value in own.items())] if own else []
    return "\n\n".join(lines) + "\n"


class Measured(NamedTuple):
    """Bytes in units of the model's: what a participant gets and sends in a round, and what is kept between rounds."""

    down: float
    up: float
    client: float
    server: float


def _parts(name: str) -> list[type]:
    """Return the method's class, and its objective's where that has something to say."""
    method = registry.entry(name).method
    found = [type(method), *(type(one) for one in vars(method).values() if isinstance(one, Objective))]
    return [part for part in found if _readings(part)]


def _paragraphs(method: type) -> tuple[list[str], int]:
    """Return the paragraphs of a method's file's docstring, and which of them says what travels.

    Raise ValueError where none begins with "server:".
    """
    found = inspect.cleandoc(sys.modules[method.__module__].__doc__ or "").split("\n\n")
    for number, words in enumerate(found):
        if words.startswith("server:"):
            return found, number
    raise ValueError(f'the docstring of {method.__module__} has no paragraph that begins with "server:"')


def _moves(method: type) -> str:
    """Return what the docstring says of the four trees; raise ValueError where one of them is left out."""
    found, number = _paragraphs(method)
    parts = re.split(r"(?:^|\n|\s{2,})(server|broadcast|memory|upload):\s+", found[number])[1:]
    if parts[::2] != ["server", "broadcast", "memory", "upload"]:
        raise ValueError(
            f"the docstring of {method.__module__} has to state server, broadcast, memory and upload, in this order"
        )
    return "\n".join(
        f"- **{key}**: {' '.join(words.split())}" for key, words in zip(parts[::2], parts[1::2], strict=True)
    )


def _readings(part: type) -> str:
    """Return where a method or an objective departs from its paper and the authors' code, and why; "" for nowhere.

    Of a method: what follows the paragraph "server:" in its file's docstring, by custom "Departures: ...", with the
    departures of files that it shares with others. Of an objective: its own docstring, where that says more than the
    loss.
    """
    if issubclass(part, Objective):
        words = re.sub(r"\s*\bRaises\b.*", "", inspect.cleandoc(part.__doc__ or ""), flags=re.DOTALL)
        loss, _, rest = words.partition("\n\n")
        return f"`{' '.join(loss.split())}`\n\n{_escaped(rest)}" if rest else ""
    found, number = _paragraphs(part)
    return _escaped("\n\n".join([*found[number + 1 :], *_shared(part)]))


def _shared(method: type) -> list[str]:
    """Return the paragraphs "Departure ..." of the files of methods that are no method themselves and are used here."""
    own = {type(registry.entry(name).method).__module__ for name in registry.names()}
    used = {getattr(each, "__module__", None) or "" for each in vars(sys.modules[method.__module__]).values()}
    helpers = sorted(name for name in used - own if name.startswith("halfmoon.methods."))
    found = []
    for name in helpers:
        for words in inspect.cleandoc(sys.modules[name].__doc__ or "").split("\n\n"):
            kind, colon, rest = words.partition(":")
            if colon and kind in ("Departure", "Departures"):
                found.append(f"Of `{name.rpartition('.')[2]}`, which other methods share:{rest}")
    return found


def _escaped(words: str) -> str:
    return words.replace("<", "&lt;")


@cache
def measured(name: str) -> Measured:
    """Play a method with labels in the first place that it can use, and weigh what it sends."""
    runtime, model = _played(name, registry.entry(name).label_locations[0])
    cost, rounds = runtime.cost, _rounds(name)
    each_round = cost.bytes_down / (rounds * COHORT), cost.bytes_up / (rounds * COHORT)
    return Measured(*(count / tree.nbytes(model) for count in (*each_round, cost.stored_client, cost.stored_server)))


class Overheard(Simulation):
    """A simulation that listens to what clients send: the names of an upload's parts, and of what it reports.

    `passed` gets the parts of what clients are sent in which other clients' uploads are found again, as they were.
    """

    heard: dict[str, tuple[set[str], set[str]]]
    passed: set[str]
    known: dict[int, set[int]]  # who sent a tensor, by its bytes' hash

    def _client_rounds(
        self, context: ClientContext, clients: Sequence[int], down: Tree, per_client: Tree
    ) -> Iterator[tuple[int, ClientResult]]:
        sent: dict[int, set[int]] = {}
        for place, client in enumerate(clients):
            for path, leaf in tree.flatten({**down, **tree.index(per_client, place)}).items():
                marks = [_mark(part) for part in (leaf, *(leaf if leaf.dim() else ()))]
                sent.setdefault(client, set()).update(marks)
                if any(self.known.get(mark, {client}) - {client} for mark in marks):
                    self.passed.add(path.split("/")[0])
        outcomes = dict(super()._client_rounds(context, clients, down, per_client))
        for client, outcome in outcomes.items():
            for leaf in tree.leaves(outcome.upload.update) if client != SERVER else ():
                # What a client sends back as it came tells nothing of it.
                if leaf.numel() > MANY and _mark(leaf) not in sent[client]:
                    self.known.setdefault(_mark(leaf), set()).add(client)
        name = next(
            name for name, client_update in self.client_updates.items() if client_update is context.client_update
        )
        for client, outcome in outcomes.items():
            if client != SERVER:
                parts, samples = self.heard.setdefault(name, (set(), set()))
                parts.update(outcome.upload.parts)
                samples |= set(outcome.samples)
        yield from outcomes.items()


def _mark(leaf: Tensor) -> int:
    """Return what tells a tensor of more than `MANY` numbers from any other; 0 for a smaller one."""
    return hash(leaf.contiguous().numpy().tobytes()) if leaf.numel() > MANY else 0


@cache
def _played(name: str, place: str) -> tuple[Overheard, Tree]:
    """Play a method for a few rounds with labels at `place`; return its runtime and its first model.

    One that sends something every few rounds (its `period`) plays that long, and the next one; in a place where it is
    not measured, but only listened to, it does so every round.
    """
    entry, rounds = registry.entry(name), _rounds(name)
    changed: dict[str, Any] = {}
    if place == "clients" and entry.label_locations[0] == "server":
        changed["threshold"] = 0.0  # SemiFL trains on rows alone that it is sure of, which random images would not have
    if place != entry.label_locations[0] and "interval" in registry.options(name):
        changed["interval"], rounds = 1, ROUNDS
    changed = {key: value for key, value in changed.items() if key in registry.options(name)}
    method = registry.make(name, changed) if changed else entry.method
    shared = Task(SmallCNN(1, 10), Adam(), Normalize((0.5,), (0.5,)), rounds=rounds)
    training = Training(Batching(LABELED, LABELED), Budget())
    runtime = Overheard(method, shared, _holdings(entry, place), Views(), training, RuntimeSettings(COHORT))
    runtime.heard, runtime.passed, runtime.known = {}, set(), {}
    model = initial_model(shared, 0, torch.device("cpu"))
    server = method.start(shared, model)
    for number in range(rounds):
        runtime.open(number)
        server = method.round(runtime.task, server, runtime)
        runtime.record_server_bytes(tree.nbytes(server))
    return runtime, model


def _rounds(name: str) -> int:
    period = requirements_of(registry.entry(name).method).period
    return ROUNDS if period == 1 else period + 1


def leaves() -> str:
    """Return what the sites of each federated method send: the parts of each upload, and what it reports.

    Overheard with labels at the clients and at the server, where the method can use them there.
    """
    rows: dict[tuple[str, str], list[str]] = {}
    for entry in (each for each in map(registry.entry, registry.names()) if not each.pooled):
        places = {entry.label_locations[0]} if entry.all_labels else {"clients", "server"} & set(entry.label_locations)
        heard = [_played(entry.name, place)[0].heard for place in sorted(places)]
        client_updates = {client_update: "" for each in heard for client_update in each}
        parts = {
            client_update: set().union(*(each[client_update][0] for each in heard if client_update in each))
            for client_update in client_updates
        }
        told = set().union(*(samples for each in heard for _, samples in each.values()))
        sent = "; ".join(f"{client_update}: {_named(names)}" for client_update, names in parts.items())
        rows.setdefault((sent, _named(told)), []).append(f"`{entry.name}`")
    header = ["methods", "sent for each client update", "reported"]
    return table(header, grouped(rows))


def tells() -> str:
    """Return each tensor that a site of a listed method sends, its size in bytes, and what it tells of one image.

    Found as for the text that the people of a site agree to, for the network `small` on images of 28x28 and ten classes.
    """
    sizes: dict[str, set[int]] = {}
    classes = tuple(map(str, range(10)))
    image_spec = ImageSpec((1, 28, 28), classes, False, (0.5,), (0.25,))
    for entry in (each for each in map(registry.entry, registry.names()) if not each.pooled):
        options = {"method": entry.name, "network": "small", "labels_at": entry.label_locations[0]}
        sent = Terms.from_options("page", tuple(map(str, range(COHORT))), image_spec, options, "page").disclosure
        for client_update in {tensor.client_update for tensor in sent.tensors}:
            totals: dict[str, int] = {}
            for tensor in sent.tensors:
                if tensor.client_update == client_update:
                    totals[tensor.section] = totals.get(tensor.section, 0) + tensor.nbytes
            for section, total in totals.items():
                sizes.setdefault(section, set()).add(total)
    rows = []
    for section, meaning in MEANINGS.items():
        if section in sizes:
            few, most = format_bytes(min(sizes[section])), format_bytes(max(sizes[section]))
            rows.append([f"`{section}`", few if few == most else f"{few} to {most}", meaning])
    return table(["tensors", "bytes", "what they tell about a single image"], rows)


def learned() -> str:
    """Return what the server and other sites learn of a single site, by method: played, with what the catalog says."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for entry in (each for each in map(registry.entry, registry.names()) if not each.pooled):
        runtime, _ = _played(entry.name, entry.label_locations[0])
        parts = _named(set().union(*(names for names, _ in runtime.heard.values())))
        hidden = "not available" if entry.individual_uploads else "the sums of updates and of weights"
        passed = f"uploads of others, in {_named(runtime.passed)}" if runtime.passed else "nothing but models"
        rows.setdefault((parts, hidden, passed), []).append(f"`{entry.name}`")
    header = [
        "methods",
        "the server, of each site",
        "the server, with `secure_aggregation`",
        "other sites, of each site",
    ]
    return table(header, grouped(rows))


def sums() -> str:
    """Return for which methods a weighted sum of uploads is enough, and what the others need single ones for."""
    rows: dict[str, list[str]] = {}
    for entry in (each for each in map(registry.entry, registry.names()) if not each.pooled):
        rows.setdefault(f"no: {entry.individual_uploads}" if entry.individual_uploads else "yes", []).append(
            f"`{entry.name}`"
        )
    return table(["methods", "a sum is enough"], grouped(rows))


def _named(words: set[str]) -> str:
    return ", ".join(f"`{word}`" for word in sorted(words))


def federation() -> str:
    """Return a table of the options in the table [federation] of a federation's file."""
    rows = []
    for kind in (FederationTable, Rules):
        hints, lines = get_type_hints(kind), option_descriptions(kind)
        for each in fields(kind):
            default = "required" if each.default is MISSING else _default(each.default)
            rows.append([f"`{each.name}`", describe_type(hints[each.name]), default, lines[each.name]])
    return table(["option", "value", "default", "meaning"], rows)


def _holdings(entry: registry.MethodEntry, place: str) -> FederatedDataset:
    """Return random images: every client has as many labeled and as many unlabeled ones; `place` has the labeled."""
    client = np.repeat(np.arange(CLIENTS), LABELED + UNLABELED)
    labeled = np.tile(np.arange(LABELED + UNLABELED) < LABELED, CLIENTS)
    if place == "server":
        client = np.where(labeled, SERVER, client)
    draw = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (len(client), 1, 8, 8), generator=draw, dtype=torch.uint8)
    labels = torch.randint(0, 10, (len(client),), generator=draw)
    return FederatedDataset(Examples(images, labels), Split(client, labeled, CLIENTS), entry.all_labels)


def _units(value: float) -> str:
    """Return a number of models with two digits that count."""
    if not value:
        return "0"
    value = float(f"{value:.1e}")
    return f"{value:.{max(0, 1 - math.floor(math.log10(value)))}f} P"


def passes() -> str:
    """Return what a step of each method on B labeled and b unlabeled images sends through the classifier.

    And what is read once a round, of L and U rows, before its steps or instead of any.
    """
    shared = Task(SmallCNN(), Adam(), Normalize((0.5,) * 3, (0.5,) * 3))
    rows: dict[tuple[str, ...], list[str]] = {}
    for name in registry.names():
        client_updates = registry.make(name).client_updates(shared)
        client_update = next(iter(client_updates.values()))
        terms = [
            _terms(*each, "Bb") for each in zip(client_update.passes(1, 0), client_update.passes(0, 1), strict=True)
        ]
        costs = [
            f"{one.forward}, {one.backward}" for one in (client_update.passes(10, 10), client_update.passes(10, 90))
        ]
        looks = {"": client_update} | {
            f"{key}: ": each for key, each in client_updates.items() if not each.requirements.trains
        }
        once = [
            f"{key}{_terms(each.images_outside_steps(1, 0), each.images_outside_steps(0, 1), 'LU')}"
            for key, each in looks.items()
        ]
        rows.setdefault((*terms, "; ".join(filter(None, once)) or "-", *costs), []).append(f"`{name}`")
    header = ["method", "forward", "backward", "once a round", "both at 10 + 10", "both at 10 + 90"]
    return table(header, grouped(rows))


def _terms(labeled: int, unlabeled: int, letters: str) -> str:
    factors = zip((labeled, unlabeled), letters, strict=True)
    return " + ".join(f"{'' if factor == 1 else factor}{letter}" for factor, letter in factors if factor)


def recipes() -> str:
    """Return a table of the recipes that come with halfmoon: what each plays, its cells and seeds."""
    rows = []
    for name in recipe.list_names():
        found = recipe.load(name)
        count = len(grid.list_combinations(found, {}))
        about = shorten(found.about.replace("test accuracy", "accuracy"), 60, placeholder=" ...")
        rows.append([f"`{name}`", about, str(count), str(len(found.seeds))])
    return table(["recipe", "what is run", "cells", "seeds"], rows)


BLOCKS: dict[str, Callable[[], str]] = {
    "options": options,
    "methods": methods,
    "passes": passes,
    "leaves": leaves,
    "learned": learned,
    "tells": tells,
    "sums": sums,
    "federation": federation,
    "recipes": recipes,
}


def grouped(rows: dict[Any, list[str]]) -> list[list[str]]:
    """Return a row for each key, which are cells, after the names that have it; long lists of names take several."""
    found = []
    for cells, names in rows.items():
        line: list[str] = []
        for name in [*names, ""]:
            if line and (not name or len(", ".join([*line, name])) > WIDEST):
                found.append([", ".join(line), *([cells] if isinstance(cells, str) else cells)])
                line = []
            line.append(name)
    return found


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    escaped = [[cell.replace("|", "\\|").replace("<", "&lt;") for cell in row] for row in rows]
    lines = [header, ["---"] * len(header), *escaped]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def renew(text: str) -> str:
    """Return a page with its blocks as the code has them; raise ValueError where a table's rows are not its options."""
    text = _GENERATED.sub(lambda found: f"{found[1]}{BLOCKS[found[2]]()}{found[3]}", text)
    text = _METHOD.sub(lambda found: f"{found[1]}{method_page(found[2])}{found[3]}", text)
    return _DEFAULTS.sub(lambda found: f"{found[1]}{_with_defaults(found[2], found[3])}{found[4]}", text)


def _with_defaults(method: str, block: str) -> str:
    known = registry.options(method)
    lines, seen = block.splitlines(), []
    for number, line in enumerate(lines):
        if not re.match(r"\| *`", line):
            continue
        name, *cells = (cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1])
        option = known.get(name.strip("`"))
        if option is None:
            raise ValueError(f"{method} has no option {name}")
        if len(cells) != 3 or not cells[2]:
            raise ValueError(f"the row of {name} in the table of {method} needs a default, values and a meaning")
        lines[number] = f"| {name} | {_default(option.default)} | {_values(option)} | {cells[2]} |"
        seen.append(name.strip("`"))
    missing = [name for name in known if name not in seen]
    if missing:
        raise ValueError(f"the table of {method} has no row for {', '.join(missing)}")
    return "".join(f"{line}\n" for line in lines)


def _values(option: registry.Option) -> str:
    return describe_type(option.type).replace("|", "\\|")


def _shown(value: Any) -> str:
    """Return a value as TOML and JSON write it."""
    return "none" if value is None else json.dumps(value)


def _default(value: Any) -> str:
    return "none" if value in (None, ()) else f"`{_shown(value).strip(chr(34))}`"


def main() -> int:
    """Renew every page, create those of new methods, and print the names of those that changed."""
    torch.set_num_threads(1)  # the networks are tiny: on a busy machine, threads that wait for each other cost minutes
    for name, rows in families().items():
        page = ROOT / "docs" / "methods" / f"{name}.md"
        if not page.exists():
            title = registry.entry(rows[0]).title
            page.write_text(f"# {title}\n\n<!-- method: {name} -->\n<!-- /method -->\n", encoding="utf-8")
    for page in sorted({*PAGES, *(ROOT / "docs" / "methods").glob("*.md")}):
        before = page.read_text(encoding="utf-8")
        after = renew(before)
        if after != before:
            page.write_text(after, encoding="utf-8")
            sys.stdout.write(f"renewed {page.relative_to(ROOT)}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
