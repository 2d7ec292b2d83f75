"""A federation's server: from its plan to a finished run folder, over any post; stopped anywhere, it goes on there."""

from __future__ import annotations

import hashlib
import json
import math
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path

import numpy as np

from halfmoon.aggregation.weights import WeightCap
from halfmoon.api.types import ClientUpdate, Task
from halfmoon.config import schema as settings
from halfmoon.core import tree
from halfmoon.core.errors import UserError
from halfmoon.core.tree import Tree
from halfmoon.data import Images, Split
from halfmoon.data.partition.split import SERVER
from halfmoon.engine.budget import Budget, ClientSize
from halfmoon.engine.evaluation import Examples, Tally
from halfmoon.engine.local_clients import FederatedDataset, LocalClients, Training
from halfmoon.engine.loop import Experiment, Row, play
from halfmoon.engine.runtime import RuntimeSettings
from halfmoon.engine.sampling import Amount
from halfmoon.federation.protocol import limits
from halfmoon.federation.protocol.log import EventLog
from halfmoon.federation.protocol.messages import Final, write
from halfmoon.federation.protocol.tree_spec import UplinkSpec
from halfmoon.federation.server.calls import Inspection, RunIdentity, SiteCalls
from halfmoon.federation.server.delivery import DELIVERY, hand_out
from halfmoon.federation.server.plan import Plan
from halfmoon.federation.server.quarantine import Quarantine
from halfmoon.federation.server.runtime import RemoteRuntime
from halfmoon.federation.server.secure_sum import shown
from halfmoon.federation.server.sessions import ClientManager
from halfmoon.federation.server.spool import SPOOL, Spool
from halfmoon.federation.server.transport import Transport
from halfmoon.federation.site.images import labeled_images
from halfmoon.methods import registry
from halfmoon.runs import assembly
from halfmoon.runs.factory import (
    aggregators,
    batch_rules,
    budget,
    computing,
    device,
    examples,
    method,
    site_threads,
    task,
    views,
)
from halfmoon.runs.model_card import Card
from halfmoon.sites.folders.prepare import HOME
from halfmoon.sites.inference.load import load_model
from halfmoon.storage import atomic_io, toml
from halfmoon.storage.run_folder import MODEL, RunFolder
from halfmoon.storage.state_store import StateView, Store

LOG, SITES, TERMS, NUMBER, SECRET = "serve.log", "sites.json", "terms.json", "number", "secret"


@dataclass(frozen=True)
class FederationServer:
    """The server of a federation: its plan, and the folder of its run."""

    plan: Plan
    path: Path

    @property
    def log(self) -> EventLog:
        """Where the server writes down what happens."""
        return EventLog(self.path / LOG)

    @property
    def most(self) -> int:
        """The bytes that no answer of a site may have, whatever it is asked."""
        return limits.unsure(task(self.plan.config, self.plan.terms.form).network)

    def make(self) -> None:
        """Make the run's folder, or look into the one that is there.

        Raise UserError where that holds something else, and for what could only fail later: folders of the server that
        cannot be read, a method without its labels.
        """
        config = self.plan.config
        for folder in (self.plan.test, self.plan.server, self.plan.validation):
            if folder is not None:
                self._labeled(folder)
        if config.labels_at == "server" and self.plan.server is None:
            raise UserError(
                "labels_at is 'server', but [federation] names no folder of the server's own labeled images: give its "
                "path as server."
            )
        with self._folder():
            pass

    def readmit(self, name: str) -> None:
        """Let a site back in that was set aside; raise UserError for a name that is none of the federation's."""
        self._register().readmit(name)

    def _register(self) -> Quarantine:
        terms, rules = self.plan.terms, self.plan.rules
        return Quarantine(terms.sites, rules.strikes, self.path / SITES)

    def _number(self) -> str:
        """Return what tells this run from others of the same federation; made with the first round."""
        return self._drawn(NUMBER, 16).hex()

    def _secret(self) -> bytes:
        """Return what noise is drawn from, which no site may know; made with the first round."""
        return self._drawn(SECRET, 32)

    def _drawn(self, name: str, size: int) -> bytes:
        """Return random bytes that a file of the run's folder keeps with their SHA-256; made with the first round.

        Raise UserError where they are damaged, or missing after a round: with others the run would be another one.
        """
        path = self.path / name
        held = atomic_io.read(path)
        again = "put it back from a backup, or serve in another folder, as another run."
        if held is None:
            if any(self.path.glob("checkpoint-*")):
                raise UserError(f"{path} is missing, but rounds were played with it: {again}")
            drawn = secrets.token_bytes(size)
            atomic_io.replace(path, drawn + hashlib.sha256(drawn).digest(), private=True)
            return drawn
        drawn = held[:size]
        if held[size:] != hashlib.sha256(drawn).digest():
            raise UserError(f"{path} is damaged: {again}")
        return drawn

    def serve(self, post: Transport, patience: float = math.inf) -> Row:
        """Play all rounds that are left, and return the run's summary; one that is finished is only read.

        Sites are waited for without end, or for `patience` seconds. Where the folder's file of deliveries says "again",
        the sites that lack the model of a finished run get it when they come.

        Raise UserError where the folder holds something else or is in use, or too few sites answer again and again;
        the run goes on when it is served again.
        """
        with self._folder() as folder:
            done = folder.summary()
            if done is not None:
                said = atomic_io.read_json(self.path / DELIVERY) or {}
                if said.get("again") is True and said.get("lacks"):
                    self._hand_out_again(said["lacks"], post, patience)
                return done
            with computing(site_threads(self.plan.config)):
                return self._play(folder, post, patience)

    def _hand_out_again(self, names: Sequence[str], post: Transport, patience: float) -> None:
        """Give the model that lies here to the sites that lack it."""
        terms, rules = self.plan.terms, self.plan.rules
        held = load_model(self.path / MODEL, network=terms.config.network)
        mine = tree.flatten(limits.abstract(task(terms.config, terms.form).network))
        whole = tree.flatten({"params": held.params, "stats": held.stats})
        model = {"params": {}, "stats": {}, **tree.unflatten({path: whole[path].contiguous() for path in mine})}
        version = metadata.version("halfmoon")
        manager = ClientManager(post, terms, version, rules.round_timeout, rules.absence, self.log.say)
        hand_out(manager, names, self._final(held.card, model), self.path, self.log.say, patience)

    def _final(self, card: Card, model: Tree) -> bytes:
        """Return what a site gets: the trained part, and a card that says what was agreed on, not where it lies."""
        terms = self.plan.terms
        told = replace(card, config=settings.text(terms.config)).render()
        return write(Final(terms.hash, metadata.version("halfmoon"), json.dumps(told), model))

    def _labeled(self, folder: Path) -> Images:
        """Return the labeled images of one of the server's folders; raise UserError where there are none."""
        channels, height, width = self.plan.terms.form.image
        return labeled_images(folder, self.plan.terms, folder / HOME / f"{height}x{width}x{channels}")

    def _folder(self) -> RunFolder:
        terms = self.plan.terms
        if not RunFolder.made(self.path):
            return RunFolder.create(self.path, _words(self.plan), terms.hash)
        folder = RunFolder.open(self.path)
        if folder.identity != terms.hash:
            raise UserError(
                f"{self.path} holds a run of other terms ({folder.identity[:8]}, these are {terms.hash[:8]}): undo the "
                "change of the configuration, or choose another --run-dir."
            )
        return folder

    def _play(self, folder: RunFolder, post: Transport, patience: float) -> Row:
        terms, config, rules = self.plan.terms, self.plan.config, self.plan.rules
        say = self.log.say
        version = metadata.version("halfmoon")
        loaded = folder.load()
        for warning in [*(loaded.warnings if loaded else []), *([folder.remark] if folder.remark else [])]:
            say(warning)
        say(f"{terms.said()}; halfmoon {version}")
        atomic_io.replace(self.path / TERMS, terms.text.encode())
        spool = Spool(self.path / SPOOL)
        spool.clear()
        manager = ClientManager(post, terms, version, rules.round_timeout, rules.absence, say, spool=spool)
        experiment = self._experiment(manager, version, patience)
        if loaded:
            say(f"going on after round {loaded.round}")
        manager.gather(rules.quorum(config.cohort), patience)
        runtime = experiment.runtime
        played = play(experiment, folder, loaded, lambda row: say(_told(row, config.rounds)))
        if isinstance(runtime, RemoteRuntime) and experiment.test is None:
            said = runtime.concluded(played["model"])
            if said is not None:
                say(f"the sites' own test images: accuracy {said.row()['accuracy']:.2%}")
                played |= {"confusion": said.confusion.tolist(), "accuracy": _accuracy(folder, said, played)}
        place = {"federation": terms.hash, "sites": list(terms.sites)}
        summary = assembly.summary(config, place, terms.form.classes, folder, played)
        network, model = experiment.task.network.whole(played["model"])
        card = assembly.card(config, terms.form, network, _words(self.plan))
        names = [name for name in terms.sites if name not in self._register().aside]
        # Before the run ends: then nobody answers any more.
        hand_out(manager, names, self._final(card, played["model"]), self.path, say, rules.linger)
        spool.clear()
        folder.finish(model, card.render(), summary)
        say(f"finished: the model is {self.path / 'model.safetensors'}")
        return summary

    def _experiment(self, manager: ClientManager, version: str, patience: float) -> Experiment:
        terms, config, rules = self.plan.terms, self.plan.config, self.plan.rules
        shared, seen = task(config, terms.form), views(config, terms.form)
        store = Store(cap=config.memory_cap * 1_000_000)
        place = device(config)
        test, validation = (
            None if held is None else examples(self._labeled(held), place)
            for held in (self.plan.test, self.plan.validation)
        )
        batching, serving = batch_rules(config)
        measure = budget(config, shared)
        server = None
        if self.plan.server is not None and config.labels_at == "server":
            held = _served(examples(self._labeled(self.plan.server), place), len(terms.sites))
            state_store = StateView(store, "client/", place)
            server = LocalClients(held, seen, Training(batching, measure, serving), config.seed, state_store)

        inspection = _inspection(self.plan, manager, shared, measure, (test is None, validation is None))
        inspection = replace(inspection, cap=_cap(self.plan, self.log.say))
        calls = SiteCalls(
            manager,
            terms.sites,
            RunIdentity(terms.hash, version, self._number()),
            # A bound from what the others sent would let one site's update decide whose counts.
            rules if config.dp_clip is None else replace(rules, norm_bound=0.0),
            self._register(),
            inspection,
            self.log.say,
            lambda wanted: manager.gather(wanted, patience, 0.0),
        )
        secret = None if config.dp_clip is None else self._secret()
        drawn = RuntimeSettings(config.cohort, config.seed, device=place, cohort_secret=secret)
        between = aggregators(config, self._secret(), self.path, summed=config.secure_aggregation)
        runtime = RemoteRuntime(method(config), shared, seen, calls, drawn, server, store, between)
        return assembly.experiment(config, shared, runtime, test, validation)


def _cap(plan: Plan, say: Callable[[str], None]) -> WeightCap | None:
    """Return the cap on weights; None where nobody sees single weights, or all are 1."""
    config, rules, names = plan.config, plan.rules, plan.terms.sites
    if config.secure_aggregation or config.dp_clip is not None:
        return None

    def warn(client: int, share: float) -> None:
        say(f"{names[client]} has {share:.0%} of the weight of a round: alone it decides the model")

    return WeightCap(rules.weight_cap, dict(enumerate(rules.images or ())), warn)


def _inspection(
    plan: Plan, manager: ClientManager, shared: Task, measure: Budget, asked: tuple[bool, bool]
) -> Inspection:
    """Return what is known of sites; `asked` says whether their test and their validation images are wanted."""
    terms, config, rules = plan.terms, plan.config, plan.rules
    entry = registry.entry(config.method)

    def most(client_update: ClientUpdate, site: str) -> tuple[Amount, int]:
        said = manager.joined[site]
        images = said.labeled + said.unlabeled
        if rules.images is not None:
            images = min(images, rules.images[terms.sites.index(site)])
        labeled = min(said.labeled, images)
        given = ClientSize(labeled, images if config.reuse_labeled else images - labeled)
        own = ClientSize(images, 0) if entry.all_labels else given
        return measure.amount(batch_rules(config)[0], client_update, own, given), images

    def tests(site: str) -> int:
        return manager.joined[site].tests if asked[0] and site in manager.joined else 0

    def validations(site: str) -> int:
        return manager.joined[site].validations if asked[1] and site in manager.joined else 0

    return Inspection(
        UplinkSpec(shared, views(config, terms.form), terms.form.image, config.seed),
        most,
        tests,
        validations,
        (lambda: shown(manager.joined)) if config.secure_aggregation else None,
    )


def _accuracy(folder: RunFolder, kept: Tally, played: Row) -> Row:
    """Return the last, the best and the chosen accuracy on the sites' own test images; `kept` is the kept model's."""
    rows = folder.rows()
    tested = [(row["evaluation"]["accuracy"], row["evaluation"]["round"]) for row in rows if row.get("evaluation")]
    share, chosen = kept.row()["accuracy"], played["chosen"]
    last = share if chosen is None else played["concluded"]["accuracy"]
    best, best_round = max([*tested, (last, len(rows))], key=lambda each: (each[0], -each[1]))
    said = {"last": last, "best": best, "best_round": best_round}
    if chosen is None:
        return said
    return said | {"chosen": share, "chosen_round": chosen["round"], "validation": chosen["accuracy"]}


def _served(rows: Examples, sites: int) -> FederatedDataset:
    count = len(rows.labels)
    return FederatedDataset(rows, Split(np.full(count, SERVER), np.ones(count, bool), sites))


def _words(plan: Plan) -> str:
    """Return the run folder's config.toml: the options, and who takes part."""
    terms = plan.terms
    form = terms.form
    table = {
        "name": terms.name, "sites": terms.sites, "classes": form.classes, "image": form.image, "mirror": form.mirror,
        "mean": form.mean, "std": form.std, "hash": terms.hash,
    }  # fmt: skip
    lines = [f"{name} = {toml.value(value)}" for name, value in table.items()]
    return settings.text(plan.config) + "\n".join(["", "[federation]", *lines]) + "\n"


def _told(row: Row, rounds: int) -> str:
    """Return a round's line in words."""
    test = row.get("test")
    evaluation = row.get("evaluation")
    said = f", accuracy {test['accuracy']:.2%}" if test else ""
    if evaluation:
        said = f"; the model before it: accuracy {evaluation['accuracy']:.2%} at {evaluation['sites']} sites"
    if "validation" in row:
        of = "the round before" if "sites" in row["validation"] else "it"
        said += f"; validation images, of {of}: {row['validation']['accuracy']:.2%}"
    loss = row["train"].get("loss")
    told = f", mean loss {loss:.4f}" if loss is not None else ""
    aggregator = row.get("aggregation") or {}
    if "epsilon" in aggregator:
        said += f"; epsilon {aggregator['epsilon']:.4g} (delta {aggregator['delta']:g})"
    return f"round {row['round']} of {rounds}: {len(row['cohort'])} sites{told}{said}"
