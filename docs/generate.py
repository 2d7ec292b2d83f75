"""Update the tables of README.md and docs/*.md from the code: `python docs/generate.py`.

Three kinds of blocks of a page are updated:

- from `<!-- generated: NAME -->` to `<!-- /generated -->`: replaced by the result of `BLOCKS[NAME]`;
- from `<!-- method: FILE -->` to `<!-- /method -->`, on the page of a method: replaced by the result of `method_page`;
- from `<!-- defaults: METHOD -->` to `<!-- /defaults -->`: a table with the columns name, default, values and meaning, of
  which only the default and the values are replaced.

A test fails if a page differs from what this script would write.
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
"""Commands whose options of a run are compared in the table of options."""
CLIENTS, COHORT, ROUNDS, LABELED, UNLABELED = 8, 4, 2, 10, 20
"""The federation in which methods are measured: clients, clients of a round, rounds, and the images of a client."""
MAX_CELL_LENGTH = 150
"""Largest number of characters of a table cell that lists methods or describes an option."""
MIN_IDENTIFIABLE_SIZE = 64
"""Number of elements above which two equal tensors count as the same one; small ones may be equal by chance, as zeros."""

_GENERATED = re.compile(r"(<!-- generated: ([\w-]+) -->\n).*?(<!-- /generated -->)", re.DOTALL)
_METHOD = re.compile(r"(<!-- method: (\w+) -->\n).*?(<!-- /method -->)", re.DOTALL)
_DEFAULTS = re.compile(r"(<!-- defaults: ([\w-]+) -->\n)(.*?)(<!-- /defaults -->)", re.DOTALL)
_FLAG = re.compile(r"^  (?:-\w, )?(--[a-z][\w-]*)", re.MULTILINE)


def flags(command: str) -> list[str]:
    """List the flags that `halfmoon COMMAND --help-all` shows, in its order; COMMAND may be two words."""
    help_text = io.StringIO()
    with redirect_stdout(help_text):
        cli.main([*command.split(), "--help-all"])
    return _FLAG.findall(help_text.getvalue())


def options() -> str:
    """Write a table of options for each section of `halfmoon run --help-all`, and which commands differ from `run`."""
    flags_of_command = {command: set(flags(command)) for command in COMMANDS}
    defaults = {option.name: option.default for option in fields(settings.Config)}
    tables = list[str]()
    differing = dict[str, list[str]]()  # by command: flags that it takes and `run` does not, or the other way round
    for title, section in settings.SECTIONS.items():
        names = [name for name in settings.option_names(section) if name in settings.option_types()]
        rows = []
        for name in names:
            flag = f"--{name.replace('_', '-')}"
            option_type = settings.option_types()[name]
            negation = f", `--no-{flag[2:]}`" if option_type in (bool, bool | None) else ""
            for command in flags_of_command:
                if (flag in flags_of_command[command]) != (command in ("run", "compare")):
                    differing.setdefault(command, []).append(f"`{flag}`")
            meaning = shorten(settings.option_helps()[name], MAX_CELL_LENGTH, placeholder=" ...")
            rows.append(
                [
                    f"`{flag}`{negation}",
                    _shorten_type(describe_type(option_type)),
                    _format_default(defaults[name]),
                    meaning,
                ]
            )
        header = ["flag", "value", "default", "meaning"]
        tables.append(f"**{title[0].upper()}{title[1:]}**\n\n{table(header, rows)}")
    lines = [
        f"- `{command}` {'does not take' if command in ('run', 'compare') else 'takes'} {', '.join(names)}\n"
        for command, names in differing.items()
    ]
    return "\n".join([*tables, "**Which commands**\n", "".join(lines)])


def _shorten_type(description: str) -> str:
    """Shorten the description of an option's type for a narrow column."""
    replacements = {"a whole number": "integer", "a list of ": "", "true or false": "yes or no", "a ": "", "'": "`"}
    for long, short in replacements.items():
        description = description.replace(long, short)
    return description


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
    """Return the name of a method's page: that of its module, or of its objective's module for FedAvg with an objective."""
    method = registry.entry(name).method
    objectives = [value for value in vars(method).values() if isinstance(value, Objective)]
    module = type(method).__module__
    if objectives and module == "halfmoon.methods.fedavg" and not registry.entry(name).all_labels:
        module = type(objectives[0]).__module__
    stem = module.rpartition(".")[2]
    return "fedavg" if stem == "supervised" else stem


def families() -> dict[str, list[str]]:
    """Group the names of methods by their page."""
    names: dict[str, list[str]] = {}
    for name in registry.names():
        names.setdefault(page_of(name), []).append(name)
    return names


def method_page(page: str) -> str:
    """Write the block of a page of methods: papers, traffic, memory, options and departures from the paper."""
    names = families()[page]
    entries = [registry.entry(name) for name in names]
    method = type(entries[0].method)
    rows = "".join(f"- `{entry.name}`: {entry.about}. Labels: {entry.labels}.\n" for entry in entries)
    papers = "; ".join(dict.fromkeys(paper for entry in entries for paper in entry.paper.split("; ")))
    sections = [f"Paper: {papers}.\n\n{rows}"]
    federated = [entry.name for entry in entries if not entry.pooled]
    if federated:
        # Pages of objectives have the server half of FedAvg, which its own page describes.
        is_fedavg = page not in ("fedavg", method.__module__.rpartition(".")[2])
        traffic = "As in [FedAvg](fedavg.md)." if is_fedavg else _describe_traffic(method)
        names_by_cost: dict[tuple[str, ...], list[str]] = {}
        for name in federated:
            names_by_cost.setdefault(tuple(map(_format_models, measured(name))), []).append(f"`{name}`")
        sections.append(f"## Traffic and memory\n\n{traffic}\n")
        if not is_fedavg or list(names_by_cost) != [tuple(map(_format_models, measured("fedavg")))]:
            header = ["name", "down", "up", "a client keeps", "the server keeps"]
            sections.append(table(header, [[", ".join(equal), *costs] for costs, equal in names_by_cost.items()]))
    if page != "feddure":  # its page has a table of options written by hand
        sections.append(f"## Options\n\n{_family_options(names)}")
    sections.append("## Departures\n\n" + _link_docstring(page) + "\n")
    return "\n".join(sections)


def _link_docstring(page: str) -> str:
    """Link the docstring that lists the departures from the paper; the site shows its text instead of the link."""
    folder = "objectives/" if not (ROOT / "src" / "halfmoon" / "methods" / f"{page}.py").exists() else ""
    path = f"src/halfmoon/methods/{folder}{page}.py"
    return f"[The file's docstring](../../{path})."


def _family_options(names: list[str]) -> str:
    """List the options of the methods of a page: the first one's defaults, then those in which another method differs."""
    options = {name: {key: option.default for key, option in registry.options(name).items()} for name in names}
    base = options[names[0]]
    lines = [", ".join(f"`{key} = {_to_toml(value)}`" for key, value in base.items())]
    for name in names[1:]:
        different = {key: value for key, value in options[name].items() if key not in base or base[key] != value}
        if different:
            lines.append(f"`{name}`: " + ", ".join(f"`{key} = {_to_toml(value)}`" for key, value in different.items()))
    return "\n\n".join(lines) + "\n"


class Measured(NamedTuple):
    """Bytes in units of the model's: what a client gets and sends in a round, and what client and server keep between rounds."""

    down: float
    up: float
    client: float
    server: float


def _split_docstring(method: type) -> tuple[list[str], int]:
    """Split the docstring of a method's module into paragraphs.

    Returns:
        The paragraphs, and the number of the one that describes the trees of server, broadcast, memory and upload.

    Raises:
        ValueError: no paragraph begins with "server:".
    """
    paragraphs = inspect.cleandoc(sys.modules[method.__module__].__doc__ or "").split("\n\n")
    for number, paragraph in enumerate(paragraphs):
        if paragraph.startswith("server:"):
            return paragraphs, number
    raise ValueError(f'the docstring of {method.__module__} has no paragraph that begins with "server:"')


def _describe_traffic(method: type) -> str:
    """List what the docstring of a method's module says of server, broadcast, memory and upload.

    Raises:
        ValueError: one of the four is missing, or their order is different.
    """
    paragraphs, number = _split_docstring(method)
    fields_and_texts = re.split(r"(?:^|\n|\s{2,})(server|broadcast|memory|upload):\s+", paragraphs[number])[1:]
    names, texts = fields_and_texts[::2], fields_and_texts[1::2]
    if names != ["server", "broadcast", "memory", "upload"]:
        raise ValueError(
            f"the docstring of {method.__module__} has to state server, broadcast, memory and upload, in this order"
        )
    return "\n".join(f"- **{name}**: {' '.join(text.split())}" for name, text in zip(names, texts, strict=True))


def describe_departures(code: type) -> str:
    """Find where a method or an objective departs from its paper and the authors' code, and why; "" for nowhere.

    For a method this is the text after the paragraph "server:" of its module's docstring, and the departures of modules
    that it shares with other methods. For an objective it is its own docstring without the first paragraph, the loss.
    """
    if issubclass(code, Objective):
        docstring = re.sub(r"\s*\bRaises\b.*", "", inspect.cleandoc(code.__doc__ or ""), flags=re.DOTALL)
        loss, _, rest = docstring.partition("\n\n")
        return f"`{' '.join(loss.split())}`\n\n{_escape_html(rest)}" if rest else ""
    paragraphs, number = _split_docstring(code)
    return _escape_html("\n\n".join([*paragraphs[number + 1 :], *_shared_departures(code)]))


def _shared_departures(method: type) -> list[str]:
    """List the paragraphs "Departure ..." of helper modules that a method's module uses and that define no method."""
    method_modules = {type(registry.entry(name).method).__module__ for name in registry.names()}
    values = vars(sys.modules[method.__module__]).values()
    used = {getattr(value, "__module__", None) or "" for value in values}
    helpers = sorted(name for name in used - method_modules if name.startswith("halfmoon.methods."))
    departures = list[str]()
    for name in helpers:
        for paragraph in inspect.cleandoc(sys.modules[name].__doc__ or "").split("\n\n"):
            heading, colon, text = paragraph.partition(":")
            if colon and heading in ("Departure", "Departures"):
                departures.append(f"Of `{name.rpartition('.')[2]}`, which other methods share:{text}")
    return departures


def _escape_html(text: str) -> str:
    return text.replace("<", "&lt;")


@cache
def measured(name: str) -> Measured:
    """Run a method for a few rounds, with labels where it prefers them, and measure its traffic and memory."""
    runtime, model = _run_method(name, registry.entry(name).label_locations[0])
    cost, rounds = runtime.cost, _rounds(name)
    down, up = cost.bytes_down / (rounds * COHORT), cost.bytes_up / (rounds * COHORT)
    model_bytes = tree.nbytes(model)
    return Measured(*(count / model_bytes for count in (down, up, cost.stored_client, cost.stored_server)))


class RecordingSimulation(Simulation):
    """A simulation that records what clients send, and whether they receive tensors of other clients.

    Attributes:
        sent_names: by client update, the names of the sections of an upload, and of the metrics that clients report.
        forwarded: names of broadcast sections that contain another client's upload unchanged.
        senders: the clients that have sent a tensor, by the hash of its bytes.
    """

    sent_names: dict[str, tuple[set[str], set[str]]]
    forwarded: set[str]
    senders: dict[int, set[int]]

    def train(
        self, context: ClientContext, clients: Sequence[int], down: Tree, per_client: Tree
    ) -> Iterator[tuple[int, ClientResult]]:
        """Train the clients of a query as `LocalClients` does, and record what they receive and send."""
        received: dict[int, set[int]] = {}
        for place, client in enumerate(clients):
            for path, leaf in tree.flatten({**down, **tree.index(per_client, place)}).items():
                # Also each row, as a broadcast may stack the models of several clients.
                has_large_rows = leaf.dim() and leaf.numel() > MIN_IDENTIFIABLE_SIZE * len(leaf)
                hashes = [_hash_tensor(tensor) for tensor in (leaf, *(leaf if has_large_rows else ()))]
                received.setdefault(client, set()).update(hashes)
                if any(self.senders.get(value, {client}) - {client} for value in hashes):
                    self.forwarded.add(path.split("/")[0])
        results = dict(self.local_clients.train(context, clients, down, per_client))
        for client, result in results.items():
            for leaf in tree.leaves(result.upload.update) if client != SERVER else ():
                # A tensor that a client returns as it was received says nothing about the client.
                if leaf.numel() > MIN_IDENTIFIABLE_SIZE and _hash_tensor(leaf) not in received[client]:
                    self.senders.setdefault(_hash_tensor(leaf), set()).add(client)
        for client, result in results.items():
            if client != SERVER:
                sections, metrics = self.sent_names.setdefault(context.name, (set(), set()))
                sections.update(result.upload.parts)
                metrics |= set(result.samples)
        yield from results.items()


def _hash_tensor(tensor: Tensor) -> int:
    """Hash the bytes of a tensor; 0 for one that is too small to be identified."""
    if tensor.numel() <= MIN_IDENTIFIABLE_SIZE:
        return 0
    return hash(tensor.contiguous().numpy().tobytes())


@cache
def _run_method(name: str, labels_at: str) -> tuple[RecordingSimulation, Tree]:
    """Run a method for a few rounds on random images.

    A method that sends something only every few rounds (its `period`) runs that long, and one round more. Where it is
    not measured, because it prefers labels elsewhere, it sends it every round instead.

    Args:
        name: the method.
        labels_at: "clients", "some" or "server".

    Returns:
        The simulation after the last round, and the first model.
    """
    entry, rounds = registry.entry(name), _rounds(name)
    changed: dict[str, Any] = {}
    if labels_at == "clients" and entry.label_locations[0] == "server":
        # SemiFL trains on images only whose predictions are confident, and none of random images is.
        changed["threshold"] = 0.0
    if labels_at != entry.label_locations[0] and "interval" in registry.options(name):
        changed["interval"], rounds = 1, ROUNDS
    changed = {key: value for key, value in changed.items() if key in registry.options(name)}
    method = registry.make(name, changed) if changed else entry.method
    task = Task(SmallCNN(1, 10), Adam(), Normalize((0.5,), (0.5,)), rounds=rounds)
    training = Training(Batching(LABELED, LABELED), Budget())
    dataset = _random_images(entry, labels_at)
    simulation = RecordingSimulation(method, task, dataset, Views(), training, RuntimeSettings(COHORT))
    simulation.sent_names = {}
    simulation.forwarded = set()
    simulation.senders = {}
    simulation.trainer = simulation
    model = initial_model(task, 0, torch.device("cpu"))
    server = method.start(task, model)
    for number in range(rounds):
        simulation.open(number)
        server = method.round(simulation.task, server, simulation)
        simulation.record_server_bytes(tree.nbytes(server))
    return simulation, model


def _rounds(name: str) -> int:
    """Choose the number of rounds in which a method sends all that it ever sends."""
    period = requirements_of(registry.entry(name).method).period
    return ROUNDS if period == 1 else period + 1


def leaves() -> str:
    """Write a table of what sites send with each federated method: sections of each upload, and reported metrics.

    Recorded with labels at the clients and with labels at the server, if the method can use them there.
    """
    rows: dict[tuple[str, str], list[str]] = {}
    for entry in federated_entries():
        if entry.all_labels:
            locations = {entry.label_locations[0]}
        else:
            locations = {"clients", "server"} & set(entry.label_locations)
        sections: dict[str, set[str]] = {}
        metrics: set[str] = set()
        for location in sorted(locations):
            for client_update, (sent, reported) in _run_method(entry.name, location)[0].sent_names.items():
                sections.setdefault(client_update, set()).update(sent)
                metrics |= reported
        sent_text = "; ".join(f"{client_update}: {_join_code(names)}" for client_update, names in sections.items())
        rows.setdefault((sent_text, _join_code(metrics)), []).append(f"`{entry.name}`")
    header = ["methods", "sent for each client update", "reported"]
    return table(header, grouped(rows))


def federated_entries() -> list[registry.MethodEntry]:
    """List the catalog entries of all methods but the centralized ones."""
    return [entry for entry in map(registry.entry, registry.names()) if not entry.pooled]


def tells() -> str:
    """Write a table of the tensors that sites send: size in bytes, and what a tensor tells about a single image.

    The sizes are those of the consent text, for the network `small` on images of 28x28 and ten classes.
    """
    sizes: dict[str, set[int]] = {}
    classes = tuple(map(str, range(10)))
    image_spec = ImageSpec((1, 28, 28), classes, False, (0.5,), (0.25,))
    for entry in federated_entries():
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
            smallest, largest = format_bytes(min(sizes[section])), format_bytes(max(sizes[section]))
            size = smallest if smallest == largest else f"{smallest} to {largest}"
            rows.append([f"`{section}`", size, meaning])
    return table(["tensors", "bytes", "what they tell about a single image"], rows)


def learned() -> str:
    """Write a table of what the server and other sites learn about a single site, by method."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for entry in federated_entries():
        simulation, _ = _run_method(entry.name, entry.label_locations[0])
        sections = _join_code(set().union(*(sent for sent, _ in simulation.sent_names.values())))
        secure = "not available" if entry.individual_uploads else "the sums of updates and of weights"
        forwarded = "nothing but models"
        if simulation.forwarded:
            forwarded = f"uploads of others, in {_join_code(simulation.forwarded)}"
        rows.setdefault((sections, secure, forwarded), []).append(f"`{entry.name}`")
    header = [
        "methods",
        "the server, of each site",
        "the server, with `secure_aggregation`",
        "other sites, of each site",
    ]
    return table(header, grouped(rows))


def sums() -> str:
    """Write a table of the methods for which the weighted sum of uploads is enough, and why others need single ones."""
    rows: dict[str, list[str]] = {}
    for entry in federated_entries():
        answer = f"no: {entry.individual_uploads}" if entry.individual_uploads else "yes"
        rows.setdefault(answer, []).append(f"`{entry.name}`")
    return table(["methods", "a sum is enough"], grouped(rows))


def _join_code(names: set[str]) -> str:
    """Join names in alphabetical order, each marked as code."""
    return ", ".join(f"`{name}`" for name in sorted(names))


def federation() -> str:
    """Write a table of the options in the table [federation] of a federation's file."""
    rows = []
    for section in (FederationTable, Rules):
        types, descriptions = get_type_hints(section), option_descriptions(section)
        for option in fields(section):
            default = "required" if option.default is MISSING else _format_default(option.default)
            row = [f"`{option.name}`", describe_type(types[option.name]), default, descriptions[option.name]]
            rows.append(row)
    return table(["option", "value", "default", "meaning"], rows)


def _random_images(entry: registry.MethodEntry, labels_at: str) -> FederatedDataset:
    """Draw random images: `LABELED` and `UNLABELED` for each client; with `labels_at` "server" the server has the labeled."""
    client = np.repeat(np.arange(CLIENTS), LABELED + UNLABELED)
    labeled = np.tile(np.arange(LABELED + UNLABELED) < LABELED, CLIENTS)
    if labels_at == "server":
        client = np.where(labeled, SERVER, client)
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (len(client), 1, 8, 8), generator=generator, dtype=torch.uint8)
    labels = torch.randint(0, 10, (len(client),), generator=generator)
    return FederatedDataset(Examples(images, labels), Split(client, labeled, CLIENTS), entry.all_labels)


def _format_models(value: float) -> str:
    """Format a number of models (P) with two significant digits."""
    if not value:
        return "0"
    value = float(f"{value:.1e}")
    return f"{value:.{max(0, 1 - math.floor(math.log10(value)))}f} P"


def passes() -> str:
    """Write a table of the images that each method sends through the classifier, in a step and once a round.

    A step has B labeled and b unlabeled images. Once a round a method may also read L labeled and U unlabeled images,
    before its steps or instead of them.
    """
    task = Task(SmallCNN(), Adam(), Normalize((0.5,) * 3, (0.5,) * 3))
    rows: dict[tuple[str, ...], list[str]] = {}
    for name in registry.names():
        client_updates = registry.make(name).client_updates(task)
        trained = next(iter(client_updates.values()))
        # The numbers of passes are linear in B and b: one image of each kind gives the factors.
        factors = zip(trained.passes(1, 0), trained.passes(0, 1), strict=True)
        formulas = [_format_sum(*pair, "Bb") for pair in factors]
        examples = [trained.passes(10, 10), trained.passes(10, 90)]
        costs = [f"{passes.forward}, {passes.backward}" for passes in examples]
        once_a_round = [_format_sum(trained.images_outside_steps(1, 0), trained.images_outside_steps(0, 1), "LU")]
        for key, client_update in client_updates.items():
            if not client_update.requirements.trains:
                labeled, unlabeled = client_update.images_outside_steps(1, 0), client_update.images_outside_steps(0, 1)
                once_a_round.append(f"{key}: {_format_sum(labeled, unlabeled, 'LU')}")
        once = "; ".join(filter(None, once_a_round)) or "-"
        rows.setdefault((*formulas, once, *costs), []).append(f"`{name}`")
    header = ["method", "forward", "backward", "once a round", "both at 10 + 10", "both at 10 + 90"]
    return table(header, grouped(rows))


def _format_sum(labeled: int, unlabeled: int, letters: str) -> str:
    """Format a number of images such as 2B + 3b; `letters` are the symbols of labeled and unlabeled images."""
    factors = zip((labeled, unlabeled), letters, strict=True)
    return " + ".join(f"{'' if factor == 1 else factor}{letter}" for factor, letter in factors if factor)


def recipes() -> str:
    """Write a table of the recipes that are included: what each runs, and the numbers of combinations and seeds."""
    rows = []
    for name in recipe.list_names():
        loaded = recipe.load(name)
        combinations = len(grid.list_combinations(loaded, {}))
        about = shorten(loaded.about.replace("test accuracy", "accuracy"), 60, placeholder=" ...")
        rows.append([f"`{name}`", about, str(combinations), str(len(loaded.seeds))])
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
    """Make a row for each group of names that have equal cells; a group with many names gets several rows.

    Args:
        rows: names by their cells: a string, or a sequence of strings.
    """
    lines = []
    for cells, names in rows.items():
        other_cells = [cells] if isinstance(cells, str) else list(cells)
        line: list[str] = []
        for name in names:
            if line and len(", ".join([*line, name])) > MAX_CELL_LENGTH:
                lines.append([", ".join(line), *other_cells])
                line = []
            line.append(name)
        lines.append([", ".join(line), *other_cells])
    return lines


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format a Markdown table."""
    escaped = [[cell.replace("|", "\\|").replace("<", "&lt;") for cell in row] for row in rows]
    lines = [header, ["---"] * len(header), *escaped]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def renew(text: str) -> str:
    """Replace the blocks of a page by what the code says now.

    Raises:
        ValueError: a table of defaults does not have one row for each option of its method.
    """
    text = _GENERATED.sub(lambda match: f"{match[1]}{BLOCKS[match[2]]()}{match[3]}", text)
    text = _METHOD.sub(lambda match: f"{match[1]}{method_page(match[2])}{match[3]}", text)
    return _DEFAULTS.sub(lambda match: f"{match[1]}{_renew_defaults(match[2], match[3])}{match[4]}", text)


def _renew_defaults(method: str, block: str) -> str:
    """Replace defaults and values in a table of a method's options, and retain the meanings."""
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
        lines[number] = f"| {name} | {_format_default(option.default)} | {_describe_option_type(option)} | {cells[2]} |"
        seen.append(name.strip("`"))
    missing = [name for name in known if name not in seen]
    if missing:
        raise ValueError(f"the table of {method} has no row for {', '.join(missing)}")
    return "".join(f"{line}\n" for line in lines)


def _describe_option_type(option: registry.Option) -> str:
    return describe_type(option.type).replace("|", "\\|")


def _to_toml(value: Any) -> str:
    """Write a value as TOML and JSON do; none stands for a missing one."""
    return "none" if value is None else json.dumps(value)


def _format_default(value: Any) -> str:
    return "none" if value in (None, ()) else f"`{_to_toml(value).strip(chr(34))}`"


def main() -> int:
    """Renew every page, create the pages of new methods, and print the names of the pages that changed."""
    torch.set_num_threads(1)  # the networks are tiny, and threads would wait for each other
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
