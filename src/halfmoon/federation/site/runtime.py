"""A site: one client of a federation with its own rows and its own memory, which answers what it is asked."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch

from halfmoon.api.types import Method, StateStore, Task
from halfmoon.api.uploads import Upload
from halfmoon.core.errors import UserError
from halfmoon.core.tree import Tree
from halfmoon.data import Images, Split
from halfmoon.engine.driver import ClientContext, ClientResult, images_a_call
from halfmoon.engine.evaluation import Examples, Quality, tally
from halfmoon.engine.local_clients import FederatedDataset, LocalClients, Training
from halfmoon.engine.sampling import Amount
from halfmoon.federation.protocol import limits
from halfmoon.federation.protocol.log import size
from halfmoon.federation.protocol.messages import OTHER_VERSION, UNFIT, UNKNOWN, Reply, Request, UnparsedMessage
from halfmoon.federation.protocol.terms import Terms
from halfmoon.federation.protocol.tree_spec import spec_of
from halfmoon.federation.site.downlink_spec import DownlinkSpec
from halfmoon.methods import registry
from halfmoon.runs.factory import batch_rules, budget, device, examples, method, task, views
from halfmoon.storage.state_store import StateView, Store

NOTHING = ClientResult(Upload({}, torch.zeros(0)), {}, {}, Amount(0, 0, 0), (0, 0))
"""What comes of a request without work."""


class HeldOut(NamedTuple):
    """Images of a site that are never trained on: models are tested on these, and the round is chosen by those."""

    tests: Examples | None = None
    validations: Examples | None = None


class Refused(UserError):
    """What a site does not do, and why; the message goes to the server, so it names nothing that only the site knows.

    `kind` is one of the words of `halfmoon.federation.protocol.messages`.
    """

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind


class Impossible(Refused):
    """A join that the same site can never make: whoever waits for it is told at once."""


@lru_cache(maxsize=4)
def agreed(text: str) -> DownlinkSpec:
    """Return what a server of the terms with this `text` sends; that takes seconds for a large network.

    It is the same for every site: those that share a process, as in a rehearsal, find it out once.
    """
    terms = Terms.parse(text)
    config, form = terms.config, terms.form
    shared = task(config, form)
    return DownlinkSpec.of(method(config), shared, views(config, form), form.image, config.seed, len(terms.sites))


@dataclass
class SiteRuntime:
    """The client `number` of a federation: `local_clients` has its rows alone, under that number.

    `federation` is the hash of what all agreed on when the site joined, `version` that of its halfmoon. `held` are
    images of its own that are never trained on, `downlinks` what a server of its method sends.
    """

    number: int
    method: Method
    task: Task
    local_clients: LocalClients
    federation: str
    version: str
    held: HeldOut = field(default_factory=HeldOut)
    downlinks: DownlinkSpec = field(default_factory=lambda: DownlinkSpec({}, 0))

    @classmethod
    def of(
        cls, terms: Terms, number: int, images: np.ndarray, labels: np.ndarray, version: str, place: str = "auto"
    ) -> SiteRuntime:
        """Return the site with these images, uint8 (N, H, W, C), and labels, int64 (N,), -1 where there is none.

        It computes on the device `place`. Raises `Refused` where the method cannot use such a site.
        """
        config = replace(terms.config, device=place)
        shared = task(config, terms.form)
        labeled = labels >= 0
        entry = registry.entry(config.method)
        if config.labels_at == "server" and not entry.all_labels:
            labeled = np.zeros_like(labeled)
        made = method(config)
        _check(terms, made, shared, int(labeled.sum()), int((~labeled).sum()))
        # Rows without a label get one that nothing looks at.
        held = examples(Images(np.array(images), np.where(labeled, labels, 0)), device(config))
        split = Split(np.full(len(labels), number), labeled, len(terms.sites))
        memories = StateView(Store(), "client/", held.labels.device)
        dataset = FederatedDataset(held, split, entry.all_labels, reuse_labeled=config.reuse_labeled)
        rules, measure = batch_rules(config), budget(config, shared)
        for client_update in made.client_updates(shared).values():
            amount = measure.amount(rules[0], client_update, dataset.own(number), dataset.given(number))
            fault = limits.check_visit(client_update, amount, terms.form.image)
            if fault is not None:
                raise Refused(UNFIT, fault)
        local_clients = LocalClients(
            dataset, views(config, terms.form), Training(rules[0], measure, rules[1]), config.seed, memories
        )
        return cls(number, made, shared, local_clients, terms.hash, version)

    def look(self, request: Request, unparsed: UnparsedMessage[Any]) -> None:
        """Raise `Refused` for a request that this site does not do; of its trees the header alone was read."""
        self.check(request)
        down, evaluation = unparsed.pattern("down"), unparsed.pattern("evaluation")
        fault = self.downlinks.fault(request.client_update, down)
        if fault is not None or (down and not request.client_update):
            why = f": {fault}" if fault else ""
            raise Refused(
                UNFIT, f"what the server sends for {request.client_update!r} is not what its method sends{why}."
            )
        network = self.task.network
        if evaluation not in ({}, spec_of(limits.abstract(network))):
            raise Refused(UNFIT, "the model that the server sends for a test is not the one that was agreed on.")
        most = limits.unsure(network)
        if request.client_update not in self.downlinks.known and len(unparsed.data) > most:
            raise Refused(UNFIT, f"the server sends {size(len(unparsed.data))}, of {size(most)} at most.")

    def counts(self) -> tuple[int, int]:
        """Return how many labeled and how many unlabeled images the site gives."""
        rows = self.local_clients.dataset.split.labeled
        return int(rows.sum()), int((~rows).sum())

    def do(self, request: Request, memories: StateStore | None = None) -> Reply:
        """Do what a request asks; `memories` is where the site remembers. Raises `Refused` where it will not."""
        self.check(request)
        shared = self.task.at(request.round)
        evaluation = self.examined(request.evaluation) if request.evaluation else {}
        if not request.client_update:
            return replace(Reply.of(request, self.version, NOTHING), up={}, evaluation=evaluation)
        client_updates = self.method.client_updates(shared)
        if request.client_update not in client_updates:
            raise Refused(
                UNFIT,
                f"the server asks for {request.client_update!r}, which the method does not have; it has "
                f"{list(client_updates)}.",
            )
        local_clients = self.local_clients if memories is None else replace(self.local_clients, memories=memories)
        place = local_clients.dataset.train.labels.device
        rows = images_a_call(place)
        context = ClientContext(
            client_updates[request.client_update],
            local_clients.views,
            local_clients.seed,
            request.round,
            request.query,
            rows,
        )
        stage = local_clients.dataset.stage(request.round, self.task.rounds)
        # Its unlabeled rows have no labels that pseudo-labels could be compared with: nobody reads this.
        quality = Quality(shared.network.classes, 1.0, place)
        (outcome,) = local_clients.visit(context, [self.number], stage, request.down, {}, quality)
        return replace(Reply.of(request, self.version, outcome), evaluation=evaluation)

    def examined(self, model: Tree) -> Tree:
        """Return what a model says of the site's test and validation images (`Reply`), {} where it has none."""

        def said(images: Examples) -> Tree:
            found = tally(self.task.network, model, self.task.normalize, images, statistics=self.task.testing)
            return {"confusion": found.confusion.cpu(), "loss": torch.tensor(found.loss, dtype=torch.float64)}

        tested = {} if self.held.tests is None else said(self.held.tests)
        return tested if self.held.validations is None else {**tested, "validation": said(self.held.validations)}

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
    config, entry = terms.config, registry.entry(terms.config.method)
    if entry.all_labels:
        if unlabeled:
            raise Refused(UNFIT, f"method {entry.name} needs a label for every image, but {unlabeled:,} have none.")
        return
    if config.labels_at == "clients" and not labeled:
        raise Refused(UNFIT, "the federation has labels at every site, but this site has none.")
    if next(iter(method.client_updates(shared).values())).needs.views and not unlabeled and not config.reuse_labeled:
        raise Refused(UNFIT, f"method {entry.name} needs images without a label, but this site has none.")
