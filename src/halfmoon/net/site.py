"""A site: one client of a federation with its own rows and its own memory, which answers what it is asked."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from halfmoon import catalog
from halfmoon.client import Errand, Outcome, images_a_call
from halfmoon.data import Images, Split
from halfmoon.data.draw import Amount
from halfmoon.errors import UserError
from halfmoon.evaluate import Examples, Quality, tally
from halfmoon.ground import Ground, Holdings
from halfmoon.net import bounds
from halfmoon.net.downs import Downs
from halfmoon.net.journal import size
from halfmoon.net.message import OTHER_VERSION, UNFIT, UNKNOWN, Reply, Request, Sealed
from halfmoon.net.patterns import pattern_of
from halfmoon.net.terms import Terms
from halfmoon.pieces import batch_rules, budget, device, examples, method, task, views
from halfmoon.store import Store, StoreShelf
from halfmoon.tree import Tree
from halfmoon.types import Method, Shelf, Task

NOTHING = Outcome({}, {}, {}, Amount(0, 0, 0), (0, 0))
"""What comes of a request without work."""


class Refused(UserError):
    """What a site does not do, and why; the message goes to the server, so it names nothing that only the site knows.

    `kind` is one of the words of `halfmoon.net.message`.
    """

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind


@lru_cache(maxsize=4)
def agreed(text: str) -> Downs:
    """Return what a server of the terms with this `text` sends; that takes seconds for a large network.

    It is the same for every site: those that share a process, as in a rehearsal, find it out once.
    """
    terms = Terms.parse(text)
    config, form = terms.config, terms.form
    shared = task(config, form)
    return Downs.of(method(config), shared, views(config, form), form.image, config.seed, len(terms.sites))


@dataclass
class Site:
    """The client `number` of a federation: `ground` has its rows alone, under that number.

    `federation` is the hash of what all agreed on when the site joined, `version` that of its halfmoon. `tests` are
    images of its own that are never trained on, `downs` what a server of its method sends.
    """

    number: int
    method: Method
    task: Task
    ground: Ground
    federation: str
    version: str
    tests: Examples | None = None
    downs: Downs = field(default_factory=lambda: Downs({}, 0))

    @classmethod
    def of(
        cls, terms: Terms, number: int, images: np.ndarray, labels: np.ndarray, version: str, place: str = "auto"
    ) -> Site:
        """Return the site with these images, uint8 (N, H, W, C), and labels, int64 (N,), -1 where there is none.

        It computes on the device `place`. Raises `Refused` where the method cannot use such a site.
        """
        config = replace(terms.config, device=place)
        shared = task(config, terms.form)
        labeled = labels >= 0
        entry = catalog.entry(config.method)
        if config.labels_at == "server" and not entry.all_labels:
            labeled = np.zeros_like(labeled)
        made = method(config)
        _check(terms, made, shared, int(labeled.sum()), int((~labeled).sum()))
        # Rows without a label get one that nothing looks at.
        held = examples(Images(np.array(images), np.where(labeled, labels, 0)), device(config))
        split = Split(np.full(len(labels), number), labeled, len(terms.sites))
        memories = StoreShelf(Store(), "client/", held.labels.device)
        holdings = Holdings(held, split, entry.all_labels, reuse_labeled=config.reuse_labeled)
        rules, measure = batch_rules(config), budget(config, shared)
        for work in made.works(shared).values():
            amount = measure.amount(rules[0], work, holdings.own(number), holdings.given(number))
            fault = bounds.check_visit(work, amount, terms.form.image)
            if fault is not None:
                raise Refused(UNFIT, fault)
        ground = Ground(
            holdings, views(config, terms.form), *rules, measure, config.seed, "loop", memories,
        )  # fmt: skip
        return cls(number, made, shared, ground, terms.hash, version)

    def look(self, request: Request, sealed: Sealed[Any]) -> None:
        """Raise `Refused` for a request that this site does not do; of its trees the header alone was read."""
        self.check(request)
        down, exam = sealed.pattern("down"), sealed.pattern("exam")
        fault = self.downs.fault(request.work, down)
        if fault is not None or (down and not request.work):
            why = f": {fault}" if fault else ""
            raise Refused(UNFIT, f"what the server sends for {request.work!r} is not what its method sends{why}.")
        network = self.task.network
        if exam not in ({}, pattern_of(bounds.abstract(network))):
            raise Refused(UNFIT, "the model that the server sends for a test is not the one that was agreed on.")
        most = bounds.unsure(network)
        if request.work not in self.downs.known and len(sealed.data) > most:
            raise Refused(UNFIT, f"the server sends {size(len(sealed.data))}, of {size(most)} at most.")

    def counts(self) -> tuple[int, int]:
        """Return how many labeled and how many unlabeled images the site gives."""
        rows = self.ground.holdings.split.labeled
        return int(rows.sum()), int((~rows).sum())

    def do(self, request: Request, memories: Shelf | None = None) -> Reply:
        """Do what a request asks; `memories` is where the site remembers. Raises `Refused` where it will not."""
        self.check(request)
        shared = self.task.at(request.round)
        exam = self._examined(request.exam) if request.exam else {}
        if not request.work:
            return replace(Reply.of(request, self.version, NOTHING), exam=exam)
        works = self.method.works(shared)
        if request.work not in works:
            raise Refused(
                UNFIT, f"the server asks for {request.work!r}, which the method does not have; it has {list(works)}."
            )
        ground = self.ground if memories is None else replace(self.ground, memories=memories)
        place = ground.holdings.train.labels.device
        rows = images_a_call(place)
        errand = Errand(works[request.work], ground.views, ground.seed, request.round, request.trip, rows)
        stage = ground.holdings.stage(request.round, self.task.rounds)
        # Its unlabeled rows have no labels that pseudo-labels could be compared with: nobody reads this.
        quality = Quality(shared.network.classes, 1.0, place)
        (outcome,) = ground.visit(errand, [self.number], stage, request.down, {}, quality)
        return replace(Reply.of(request, self.version, outcome), exam=exam)

    def _examined(self, model: Tree) -> Tree:
        """Return what a model says of the site's test images, {} where it has none."""
        if self.tests is None:
            return {}
        said = tally(self.task.network, model, self.task.normalize, self.tests)
        return {"confusion": said.confusion.cpu(), "loss": torch.tensor(said.loss, dtype=torch.float64)}

    def check(self, request: Request) -> None:
        """Raise `Refused` for a request of another version, of another federation, or of a round that there is not."""
        check_version(self.version, request.version)
        if request.federation != self.federation:
            raise Refused(
                UNKNOWN,
                f"the server plays federation {request.federation[:8]}, but this site joined {self.federation[:8]}; "
                "join again with the server's configuration.",
            )
        if not 0 <= request.round < self.task.rounds:
            raise Refused(UNFIT, f"the server asks for round {request.round + 1} of {self.task.rounds}.")


def check_version(mine: str, theirs: str) -> None:
    """Raise `Refused` where a site runs another halfmoon than the server: the sentence says who has to upgrade."""
    if mine == theirs:
        return
    older, newer = sorted((mine, theirs), key=_parts)
    late = "this site" if mine == older else "the server"
    raise Refused(
        OTHER_VERSION, f"this site runs halfmoon {mine}, the server {theirs}: {late} has to upgrade to {newer}."
    )


def _parts(version: str) -> tuple[list[int], bool, str]:
    """Return what versions are compared by: 0.10.0 is newer than 0.9.0, and than 0.10.0.dev1 and 0.10.0rc1."""
    said = re.match(r"\d+(\.\d+)*", version)
    rest = version[said.end() :] if said else version
    return [int(part) for part in said[0].split(".")] if said else [], not rest or rest.startswith("+"), rest


def _check(terms: Terms, method: Method, shared: Task, labeled: int, unlabeled: int) -> None:
    """Raise `Refused` where the method needs labels, or images without labels, that the site does not have."""
    config, entry = terms.config, catalog.entry(terms.config.method)
    if entry.all_labels:
        if unlabeled:
            raise Refused(UNFIT, f"method {entry.name} needs a label for every image, but {unlabeled:,} have none.")
        return
    if config.labels_at == "clients" and not labeled:
        raise Refused(UNFIT, "the federation has labels at every site, but this site has none.")
    if next(iter(method.works(shared).values())).views and not unlabeled and not config.reuse_labeled:
        raise Refused(UNFIT, f"method {entry.name} needs images without a label, but this site has none.")
