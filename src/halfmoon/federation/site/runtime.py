"""A site: one client of a federation with its own rows and its own memory, which answers requests."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError

from halfmoon.api.types import Method, StateStore, Task
from halfmoon.api.uploads import Upload
from halfmoon.core import tree
from halfmoon.core.errors import UserError
from halfmoon.core.tree import Tree
from halfmoon.data import Images, Split
from halfmoon.engine.driver import ClientContext, ClientResult, images_a_call
from halfmoon.engine.evaluation import Examples, Quality, tally
from halfmoon.engine.local_clients import FederatedDataset, LocalClients, Training
from halfmoon.engine.sampling import Amount
from halfmoon.federation.protocol import limits
from halfmoon.federation.protocol.log import format_bytes
from halfmoon.federation.protocol.messages import (
    OTHER_VERSION,
    RefusalError,
    Reply,
    Request,
    RoundKey,
    UnparsedMessage,
)
from halfmoon.federation.protocol.terms import (
    Terms,
    decode_folder,
    image_spec_name,
    load_labeled_images,
    map_labels,
    open_prepared_folder,
)
from halfmoon.federation.protocol.tree_spec import make_tree_spec
from halfmoon.federation.site.download_spec import DownloadSpecs
from halfmoon.methods import registry
from halfmoon.runs.budgets import budget
from halfmoon.runs.factory import batch_rules, device, examples, method, task, views
from halfmoon.runs.features import Progress, inputs
from halfmoon.sites.folders.prepare import open_prepared_site
from halfmoon.sites.folders.site_folder import SiteFolder
from halfmoon.storage import atomic_io, serialization
from halfmoon.storage.state_store import StateView, Store

_FILE = re.compile(r"memory-(\d{6,})-(\d{3,})-(\d{3,})-[0-9a-f]{16}\.safetensors")
_INSTEAD = "what was remembered before it counts; put it back from a backup."


@dataclass(frozen=True)
class SiteMemory:
    """A `StateStore` of one client in the client update `at`, which goes on from `latest`; `warn` hears of damage."""

    folder: Path
    at: RoundKey
    latest: RoundKey | None
    device: torch.device
    warn: Callable[[str], None]

    def get(self, key: str) -> Tree | None:
        """Return the memory of the last client update that counted, None where there is none; raises OSError."""
        if self.latest is None:
            return None
        files = [(at, path) for at, path in _files(self.folder) if at <= self.latest]
        if not files or files[-1][0] != self.latest:
            self.warn(f"the memory of round {self.latest[0] + 1} is missing: {_INSTEAD}")
        for _, path in reversed(files):
            memory = _read(path)
            if memory is not None:
                return tree.map(lambda leaf: leaf.to(self.device, copy=True), memory)
            self.warn(f"{path.name} is damaged: {_INSTEAD}")
        return None

    def put(self, key: str, tree: Tree) -> None:
        """Write the memory of this client update, whole or not at all; raises OSError where the disk refuses."""
        data = serialization.pack_file(tree)
        round, attempt, query = self.at
        name = f"memory-{round:06d}-{attempt:03d}-{query:03d}-{atomic_io.digest(data)[:16]}.safetensors"
        self.folder.mkdir(parents=True, exist_ok=True)
        atomic_io.replace(self.folder / name, data)
        for at, path in _files(self.folder):  # of the same update, requested before a server was killed
            if at == self.at and path.name != name:
                path.unlink(missing_ok=True)

    def keys(self) -> list[str]:
        """Return nothing: a site has one client, whose memory is read by number."""
        return []


def prune_memories(folder: Path, oldest: RoundKey | None) -> None:
    """Remove what is older than `oldest`, from which the server may still go on; raises OSError."""
    for at, path in _files(folder):
        if oldest is not None and at < oldest:
            path.unlink(missing_ok=True)


def parse_round_key(numbers: Sequence[int]) -> RoundKey | None:
    """Return the client update that three numbers name, None for no numbers; raise `RefusalError` for others."""
    if not numbers:
        return None
    if len(numbers) != 3:
        why = "it must be a round, an attempt and a query, from 0"
        raise RefusalError(f"what the server asks to go on from is no client update: {why}.")
    return (numbers[0], numbers[1], numbers[2])


def _read(path: Path) -> Tree | None:
    if atomic_io.digest(path.read_bytes())[:16] != path.stem.rpartition("-")[2]:
        return None
    try:
        return serialization.map_file(path)
    except SafetensorError:
        return None


def _files(folder: Path) -> list[tuple[RoundKey, Path]]:
    if not folder.is_dir():
        return []
    matches = ((_FILE.fullmatch(path.name), path) for path in folder.iterdir())
    return sorted(((int(match[1]), int(match[2]), int(match[3])), path) for match, path in matches if match)


EMPTY_RESULT = ClientResult(Upload({}, torch.zeros(0)), {}, {}, Amount(0, 0, 0), (0, 0))
"""The result of a request without a client update."""


class HeldOut(NamedTuple):
    """Images of a site that are never trained on: `tests` to test models, `validations` to choose the round."""

    tests: Examples | None = None
    validations: Examples | None = None


@lru_cache(maxsize=4)
def compute_download_specs(text: str) -> DownloadSpecs:
    """Return what a server of these terms sends; it takes seconds, so that a process computes it once."""
    terms = Terms.parse(text)
    config, form = terms.config, terms.image_spec
    shared = task(config, form)
    return DownloadSpecs.from_trial(
        method(config), shared, views(config, form), form.image, config.seed, len(terms.sites)
    )


@dataclass
class SiteRuntime:
    """The client `number` of a federation; `local_clients` has its rows alone."""

    number: int
    method: Method
    task: Task
    local_clients: LocalClients
    version: str
    held_out: HeldOut = field(default_factory=HeldOut)
    downlinks: DownloadSpecs = field(default_factory=lambda: DownloadSpecs({}, 0))

    @classmethod
    def from_terms(
        cls, terms: Terms, number: int, images: np.ndarray, labels: np.ndarray, version: str, place: str = "auto"
    ) -> "SiteRuntime":
        """Return the site with images (N, H, W, C) and labels (-1: none); raise `RefusalError` for a misfit."""
        config = replace(terms.config, device=place)
        shared = task(config, terms.image_spec)
        labeled = labels >= 0
        entry = registry.entry(config.method)
        if config.labels_at == "server" and not entry.all_labels:
            labeled = np.zeros_like(labeled)
        own = method(config)
        _check_labels(terms, own, shared, int(labeled.sum()), int((~labeled).sum()))
        # Rows without a label get one that nothing reads.
        rows = examples(Images(np.array(images), np.where(labeled, labels, 0)), device(config))
        split = Split(np.full(len(labels), number), labeled, len(terms.sites))
        memories = StateView(Store(), "client/", rows.labels.device)
        dataset = FederatedDataset(rows, split, entry.all_labels, reuse_labeled=config.reuse_labeled)
        rules, measure = batch_rules(config), budget(config, shared)
        for client_update in own.client_updates(shared).values():
            amount = measure.amount(rules[0], client_update, dataset.own(number), dataset.split_size(number))
            fault = limits.find_update_fault(client_update, amount, terms.image_spec.image)
            if fault is not None:
                raise RefusalError(fault)
        training = Training(rules[0], measure, rules[1])
        local_clients = LocalClients(dataset, views(config, terms.image_spec), training, config.seed, memories)
        return cls(number, own, shared, local_clients, version)

    def check_request(self, request: Request, unparsed: UnparsedMessage[Any]) -> None:
        """Raise `RefusalError` for a request that this site does not answer; of its trees the header alone was read."""
        if request.round >= self.task.rounds:
            raise RefusalError(f"the server asks for round {request.round + 1} of {self.task.rounds}.")
        broadcast, evaluation = unparsed.tree_spec("download"), unparsed.tree_spec("evaluation")
        fault = self.downlinks.fault(request.client_update, broadcast)
        if fault is not None or (broadcast and not request.client_update):
            why = f": {fault}" if fault else ""
            raise RefusalError(
                f"what the server sends for {request.client_update!r} is not what its method sends{why}."
            )
        network = self.task.network
        if evaluation not in ({}, make_tree_spec(limits.make_meta_model(network))):
            raise RefusalError("the model that the server sends for a test is not the one that was agreed on.")
        most = limits.max_unknown_message_bytes(network)
        if request.client_update not in self.downlinks.specs and len(unparsed.data) > most:
            raise RefusalError(f"the server sends {format_bytes(len(unparsed.data))}, of {format_bytes(most)} at most.")

    def counts(self) -> tuple[int, int]:
        rows = self.local_clients.dataset.split.labeled
        return int(rows.sum()), int((~rows).sum())

    def reply(self, request: Request, memories: StateStore | None = None) -> Reply:
        """Answer a request; `memories` is where the site remembers. Raises `RefusalError` where it will not."""
        shared = self.task.at(request.round)
        evaluation = self.evaluate(request.evaluation) if request.evaluation else {}
        if not request.client_update:
            return replace(Reply.from_result(request, self.version, EMPTY_RESULT), upload={}, evaluation=evaluation)
        client_updates = self.method.client_updates(shared)
        if request.client_update not in client_updates:
            raise RefusalError(
                f"the server asks for {request.client_update!r}, which the method does not have; it has "
                f"{list(client_updates)}."
            )
        local = self.local_clients if memories is None else replace(self.local_clients, memories=memories)
        place = local.dataset.train.labels.device
        client_update, rows = client_updates[request.client_update], images_a_call(place)
        context = ClientContext(client_update, local.views, local.seed, request.round, request.query, rows)
        stage = local.dataset.stage(request.round, self.task.rounds)
        # Its unlabeled rows have no labels to compare pseudo-labels with: nobody reads this.
        quality = Quality(shared.network.classes, 1.0, place)
        (result,) = local.update(context, [self.number], stage, request.download, {}, quality)
        return replace(Reply.from_result(request, self.version, result), evaluation=evaluation)

    def evaluate(self, model: Tree) -> Tree:
        """Return the `Reply.evaluation` of a model, {} where the site has no such images."""

        def evaluation(images: Examples) -> Tree:
            test = tally(self.task.network, model, self.task.normalize, images, statistics=self.task.testing)
            return {"confusion": test.confusion.cpu(), "loss": torch.tensor(test.loss, dtype=torch.float64)}

        tests, validations = self.held_out
        test = {} if tests is None else evaluation(tests)
        return test if validations is None else {**test, "validation": evaluation(validations)}


def check_version(mine: str, theirs: str) -> None:
    """Raise `RefusalError` where a site runs another halfmoon than the server: the sentence says who has to upgrade."""
    if mine == theirs:
        return
    older, newer = sorted((mine, theirs), key=_version_key)
    late = "this site" if mine == older else "the server"
    raise RefusalError(
        f"this site runs halfmoon {mine}, the server {theirs}: {late} has to upgrade to {newer}.", OTHER_VERSION
    )


def _version_key(version: str) -> tuple[list[int], bool, str]:
    """Return the sort key of a version: 0.10.0 is newer than 0.9.0, and than 0.10.0.dev1 and 0.10.0rc1."""
    release = re.match(r"\d+(\.\d+)*", version)
    rest = version[release.end() :] if release else version
    numbers = [int(part) for part in release[0].split(".")] if release else []
    return numbers, not rest or rest.startswith("+"), rest


def _check_labels(terms: Terms, own: Method, shared: Task, labeled: int, unlabeled: int) -> None:
    """Raise `RefusalError` where the method needs labels, or images without labels, that the site does not have."""
    config, entry = terms.config, registry.entry(terms.config.method)
    if entry.all_labels:
        if unlabeled:
            raise RefusalError(f"method {entry.name} needs a label for every image, but {unlabeled:,} have none.")
        return
    if config.labels_at == "clients" and not labeled:
        raise RefusalError("the federation has labels at every site, but this site has none.")
    if (
        next(iter(own.client_updates(shared).values())).requirements.views
        and not unlabeled
        and not config.reuse_labeled
    ):
        raise RefusalError(f"method {entry.name} needs images without a label, but this site has none.")


def _progress_printer(say: Callable[[str], None]) -> Progress:
    """Return what says after every thousand images or so, and at the end, how many have features."""

    def progress(number: int, count: int) -> None:
        if number == count or not number % 1024:
            say(f"{number:,} of {count:,} images have features, which are computed once and stay here")

    return progress


@dataclass(frozen=True)
class SiteImages:
    """The images in `folder`, decoded into `home`; `tests` and `validations` are folders of others, for no training."""

    folder: Path
    home: Path
    tests: Path | None = None
    device: str = "auto"
    validations: Path | None = None

    def runtime(self, terms: Terms, name: str, version: str, say: Callable[[str], None]) -> SiteRuntime:
        """Return the site with its images in the terms' form; raise `RefusalError` for a misfit."""
        folder = self._decoded(terms, say)
        assert folder.images is not None, "it was just prepared"
        number = terms.sites.index(name)
        site = SiteRuntime.from_terms(terms, number, folder.images, map_labels(folder, terms), version, self.device)
        local, device = site.local_clients, site.local_clients.dataset.train.labels.device
        own = inputs(terms.config, site.task, local.views, self.home / "features", progress=_progress_printer(say))
        dataset = replace(local.dataset, train=own.trained(local.dataset.train))
        other = {
            part: own.tested(
                examples(load_labeled_images(path, terms, self.home / f"{part}-{image_spec_name(terms)}"), device)
            )
            for part, path in (("tests", self.tests), ("validations", self.validations))
            if path is not None
        }
        local = replace(local, dataset=dataset, views=own.views)
        return replace(site, task=own.task, local_clients=local, held_out=HeldOut(**other))

    def _decoded(self, terms: Terms, say: Callable[[str], None]) -> SiteFolder:
        """Return the folder, decoded at home, or beside that where another form is at home already."""
        if (folder := open_prepared_folder(self.folder, self.home, terms)) is not None:
            return folder
        out = self.home / image_spec_name(terms) if self._occupied() else self.home
        result = decode_folder(self.folder, out, terms)
        if result.decoded:
            say(f"decoded {result.decoded:,} images; {len(result.left_out):,} cannot be read and are left out")
        return result.site

    def _occupied(self) -> bool:
        try:
            return open_prepared_site(self.folder, self.home).images is not None
        except UserError:
            return False
