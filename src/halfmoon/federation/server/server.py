"""A federation's server: from its plan to a finished run folder, over any transport; it resumes wherever it stopped."""

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
from halfmoon.config.schema import Config
from halfmoon.config.validation import DEFAULT_DEFENSE, MIN_COHORT_FOR_DEFENSE, effective_norm
from halfmoon.core import tree
from halfmoon.core.errors import UserError
from halfmoon.core.tree import Tree
from halfmoon.core.user_cache import user_cache
from halfmoon.data import Images, Split
from halfmoon.data.partition.split import SERVER
from halfmoon.engine.budget import Budget, ClientSize
from halfmoon.engine.evaluation import ModelEvaluation
from halfmoon.engine.local_clients import FederatedDataset, LocalClients, Training
from halfmoon.engine.loop import Experiment, Row, run_rounds
from halfmoon.engine.runtime import RuntimeSettings
from halfmoon.engine.sampling import Amount
from halfmoon.federation.protocol import limits
from halfmoon.federation.protocol.log import EventLog
from halfmoon.federation.protocol.messages import (
    FinalModel,
    MalformedMessage,
    Receipt,
    Refusal,
    read_message,
    write_message,
)
from halfmoon.federation.protocol.terms import image_spec_name, load_labeled_images
from halfmoon.federation.protocol.tree_spec import UploadProbe
from halfmoon.federation.server.calls import Inspection, RunIdentity, SiteCalls
from halfmoon.federation.server.cohorts import Quarantine
from halfmoon.federation.server.connection import SPOOL_FOLDER, Spool, Transport, read_content
from halfmoon.federation.server.plan import FederationPlan
from halfmoon.federation.server.runtime import RemoteRuntime
from halfmoon.federation.server.secure_sum import lasting_keys
from halfmoon.federation.server.sessions import ClientManager
from halfmoon.methods import registry
from halfmoon.runs import assembly, budgets, factory
from halfmoon.runs.features import inputs
from halfmoon.runs.model_card import Card
from halfmoon.sites.folders.prepare import STATE_FOLDER
from halfmoon.sites.inference.load import load_model
from halfmoon.storage import atomic_io, toml
from halfmoon.storage.run_folder import MODEL, RunFolder
from halfmoon.storage.state_store import StateView, TreeStore

LOG_FILE, QUARANTINE_FILE, TERMS_FILE, RUN_NUMBER_FILE, SECRET_FILE = (
    "serve.log",
    "sites.json",
    "terms.json",
    "number",
    "secret",
)


@dataclass(frozen=True)
class FederationServer:
    """The server of a federation: its plan, and the folder of its run."""

    plan: FederationPlan
    path: Path

    @property
    def log(self) -> EventLog:
        return EventLog(self.path / LOG_FILE)

    @property
    def most(self) -> int:
        """The bytes that no answer of a site may have, whatever it is asked."""
        return limits.max_unknown_message_bytes(factory.task(self.plan.config, self.plan.terms.image_spec).network)

    def prepare(self) -> None:
        """Create the run's folder, or check it; raise UserError for all that could only fail later."""
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
        """Let a site out of quarantine; raise UserError for a name that is none of the federation's."""
        self._register().readmit(name)

    def _register(self) -> Quarantine:
        return Quarantine(self.plan.terms.sites, self.plan.rules.strikes, self.path / QUARANTINE_FILE)

    def _secret(self) -> bytes:
        """Return the secret of the noise, which no site may know; generated with the first round."""
        return self._random(SECRET_FILE, 32)

    def _random(self, name: str, size: int) -> bytes:
        """Return a file's random bytes, made before the first round; raise UserError if they are gone."""
        path = self.path / name
        data = atomic_io.read(path)
        again = "put it back from a backup, or serve in another folder, as another run."
        if data is None:
            if any(self.path.glob("checkpoint-*")):
                raise UserError(f"{path} is missing, but rounds were played with it: {again}")
            random = secrets.token_bytes(size)
            atomic_io.write_atomically(path, random + hashlib.sha256(random).digest(), private=True)
            return random
        random = data[:size]
        if data[size:] != hashlib.sha256(random).digest():
            raise UserError(f"{path} is damaged: {again}")
        return random

    def serve(self, post: Transport, patience: float = math.inf) -> Row:
        """Play all rounds that are left and return the run's summary, which a finished run only reads.

        Sites are waited for `patience` seconds. With "again" in the file of deliveries, sites that lack the final model
        get it. Raise UserError where the folder is another run's or in use, or too few sites answer.
        """
        with self._folder() as folder:
            summary = folder.summary()
            if summary is not None:
                record = atomic_io.read_json(self.path / DELIVERY) or {}
                if record.get("again") is True and record.get("lacks"):
                    self._hand_out_again(record["lacks"], post, patience)
                return summary
            with factory.computing(factory.site_threads(self.plan.config)):
                return self._play(folder, post, patience)

    def _manager(self, post: Transport, spool: Spool | None = None) -> ClientManager:
        terms, rules, version = self.plan.terms, self.plan.rules, metadata.version("halfmoon")
        return ClientManager(post, terms, version, rules.round_timeout, rules.absence, self.log.write, spool=spool)

    def _hand_out_again(self, names: Sequence[str], post: Transport, patience: float) -> None:
        """Give the saved model to the sites that lack it."""
        terms = self.plan.terms
        saved = load_model(self.path / MODEL, network=terms.config.network)
        own = tree.flatten(limits.make_meta_model(factory.task(terms.config, terms.image_spec).network))
        whole = tree.flatten({"params": saved.params, "stats": saved.stats})
        model = {"params": {}, "stats": {}, **tree.unflatten({path: whole[path].contiguous() for path in own})}
        deliver_model(self._manager(post), names, self._final(saved.card, model), self.path, patience)

    def _final(self, card: Card, model: Tree) -> bytes:
        """Return the message with the trained part, and a card of the terms, not of where the model lies."""
        terms = self.plan.terms
        text = json.dumps(replace(card, config=settings.to_toml(terms.config)).render())
        return write_message(FinalModel(terms.hash, metadata.version("halfmoon"), text, model))

    def _labeled(self, folder: Path) -> Images:
        return load_labeled_images(folder, self.plan.terms, folder / STATE_FOLDER / image_spec_name(self.plan.terms))

    def _folder(self) -> RunFolder:
        terms = self.plan.terms
        if not RunFolder.exists(self.path):
            return RunFolder.create(self.path, _config_text(self.plan), terms.hash)
        folder = RunFolder.open(self.path)
        if folder.identity != terms.hash:
            raise UserError(
                f"{self.path} holds a run of other terms ({folder.identity[:8]}, these are {terms.hash[:8]}): undo the "
                "change of the configuration, or choose another --run-dir."
            )
        return folder

    def _play(self, folder: RunFolder, post: Transport, patience: float) -> Row:
        terms, config, rules = self.plan.terms, self.plan.config, self.plan.rules
        say = self.log.write
        checkpoint = folder.load()
        for warning in [*(checkpoint.warnings if checkpoint else []), *([folder.remark] if folder.remark else [])]:
            say(warning)
        say(f"{terms.sentence()}; halfmoon {metadata.version('halfmoon')}")
        if (trusting := defense_warning(config)) is not None:
            say(trusting)
        atomic_io.write_atomically(self.path / TERMS_FILE, terms.text.encode())
        spool = Spool(self.path / SPOOL_FOLDER)
        spool.clear()
        manager = self._manager(post, spool)
        experiment = self._experiment(manager, patience)
        if checkpoint:
            say(f"going on after round {checkpoint.round}")
        manager.wait_for_sites(rules.quorum(config.cohort), patience)
        runtime = experiment.runtime
        results = run_rounds(
            experiment, folder, checkpoint, lambda row: say(describe_round(row, settings.count_rounds(config)))
        )
        if isinstance(runtime, RemoteRuntime) and experiment.test is None:
            tally = runtime.evaluate_last(results["model"])
            if tally is not None:
                say(f"the sites' own test images: accuracy {tally.row()['accuracy']:.2%}")
                results |= {"confusion": tally.confusion.tolist(), "accuracy": _accuracy(folder, tally, results)}
        place = {"federation": terms.hash, "sites": list(terms.sites)}
        summary = assembly.summary(config, place, terms.image_spec.classes, folder, results)
        network, model = experiment.task.network.full_model(results["model"])
        card = assembly.card(config, terms.image_spec, network, _config_text(self.plan))
        names = [name for name in terms.sites if name not in self._register().sites]
        # Before the run ends: then nobody answers any more.
        deliver_model(manager, names, self._final(card, results["model"]), self.path, rules.linger)
        spool.clear()
        folder.finish(model, card.render(), summary)
        say(f"finished: the model is {self.path / 'model.safetensors'}")
        return summary

    def _experiment(self, manager: ClientManager, patience: float) -> Experiment:
        terms, config, rules = self.plan.terms, self.plan.config, self.plan.rules
        task, views = factory.task(config, terms.image_spec), factory.views(config, terms.image_spec)
        own = inputs(config, task, views, user_cache("features"))
        store = TreeStore(cap=config.memory_cap * 1_000_000)
        place = factory.device(config)
        test, validation = (
            None if path is None else own.tested(factory.examples(self._labeled(path), place))
            for path in (self.plan.test, self.plan.validation)
        )
        batching, server_batching = factory.batch_rules(config)
        measure = budgets.budget(config, task)
        server = None
        if self.plan.server is not None and config.labels_at == "server":
            rows = own.trained(factory.examples(self._labeled(self.plan.server), place))
            count = len(rows.labels)
            split = Split(np.full(count, SERVER), np.ones(count, bool), len(terms.sites))
            training = Training(batching, measure, server_batching)
            state_store = StateView(store, "client/", place)
            server = LocalClients(FederatedDataset(rows, split), own.views, training, config.seed, state_store)
        calls = SiteCalls(
            manager,
            terms.sites,
            RunIdentity(terms.hash, metadata.version("halfmoon"), self._random(RUN_NUMBER_FILE, 16).hex()),
            # A bound from what the others sent would let one site's update decide whose counts.
            rules if config.dp_clip is None else replace(rules, norm_bound=0.0),
            self._register(),
            _inspection(self.plan, manager, task, measure, (test is None, validation is None)),
            self.log.write,
            lambda needed: manager.wait_for_sites(needed, patience, 0.0),
        )
        secret = None if config.dp_clip is None else self._secret()
        runtime_settings = RuntimeSettings(config.cohort, config.seed, device=place, cohort_secret=secret)
        between = factory.aggregators(config, self._secret(), self.path, summed=config.secure_aggregation)
        runtime = RemoteRuntime(
            factory.method(config), own.task, own.views, calls, runtime_settings, server, store, between
        )
        return assembly.experiment(config, own.task, runtime, test, validation)


def _cap(plan: FederationPlan, say: Callable[[str], None]) -> WeightCap | None:
    """Return the cap on weights; None where nobody sees single weights, or all are 1."""
    config, rules, names = plan.config, plan.rules, plan.terms.sites
    if config.secure_aggregation or config.dp_clip is not None:
        return None

    def warn(client: int, share: float) -> None:
        say(f"{names[client]} has {share:.0%} of the weight of a round: alone it decides the model")

    return WeightCap(rules.weight_cap, dict(enumerate(rules.images or ())), warn)


def _inspection(
    plan: FederationPlan, manager: ClientManager, task: Task, measure: Budget, parts: tuple[bool, bool]
) -> Inspection:
    """Return the knowledge of sites; `parts` says whether their test and their validation images are used."""
    terms, config, rules = plan.terms, plan.config, plan.rules
    entry = registry.entry(config.method)

    def most(client_update: ClientUpdate, name: str) -> tuple[Amount, int]:
        site = manager.acceptances[name]
        images = site.labeled + site.unlabeled
        if rules.images is not None:
            images = min(images, rules.images[terms.sites.index(name)])
        labeled = min(site.labeled, images)
        plain = ClientSize(labeled, images if config.reuse_labeled else images - labeled)
        own = ClientSize(images, 0) if entry.all_labels else plain
        return measure.amount(factory.batch_rules(config)[0], client_update, own, plain), images

    def tests(name: str) -> int:
        return manager.acceptances[name].tests if parts[0] and name in manager.acceptances else 0

    def validations(name: str) -> int:
        return manager.acceptances[name].validations if parts[1] and name in manager.acceptances else 0

    return Inspection(
        UploadProbe(task, factory.views(config, terms.image_spec), terms.image_spec.image, config.seed),
        most,
        tests,
        validations,
        (lambda: lasting_keys(manager.acceptances)) if config.secure_aggregation else None,
        _cap(plan, manager.say),
        lambda name: name in manager.acceptances and manager.acceptances[name].shared == 1,
    )


def _accuracy(folder: RunFolder, tally: ModelEvaluation, results: Row) -> Row:
    """Return the last, the best and the chosen accuracy on the sites' own test images; `tally` is the saved model's."""
    rows = folder.rows()
    tests = [(row["evaluation"]["accuracy"], row["evaluation"]["round"]) for row in rows if row.get("evaluation")]
    share, choice = tally.row()["accuracy"], results["chosen"]
    last = share if choice is None else results["concluded"]["accuracy"]
    best, best_round = max([*tests, (last, len(rows))], key=lambda test: (test[0], -test[1]))
    accuracy = {"last": last, "best": best, "best_round": best_round}
    if choice is None:
        return accuracy
    return accuracy | {"chosen": share, "chosen_round": choice["round"], "validation": choice["accuracy"]}


def _config_text(plan: FederationPlan) -> str:
    terms = plan.terms
    form = terms.image_spec
    table = {
        "name": terms.name, "sites": terms.sites, "classes": form.classes, "image": form.image, "mirror": form.mirror,
        "mean": form.mean, "std": form.std, "hash": terms.hash,
    }  # fmt: skip
    lines = [f"{name} = {toml.format_value(value)}" for name, value in table.items()]
    return settings.to_toml(plan.config) + "\n".join(["", "[federation]", *lines]) + "\n"


def defense_warning(config: Config) -> str | None:
    """Return why nothing defends a federation against a hostile site, and what to do; None where a rule does."""
    if config.aggregation != "mean":
        return None
    why = registry.entry(config.method).robust_rule_conflict(DEFAULT_DEFENSE, effective_norm(config))
    reasons = {
        "sums of masked or noised uploads hide who sent what; leave secure_aggregation and dp_clip out": (
            config.secure_aggregation or config.dp_clip is not None
        ),
        f"of fewer than {MIN_COHORT_FOR_DEFENSE} sites a round no rule can tell which one is wrong; have more take part": (
            config.cohort < MIN_COHORT_FOR_DEFENSE
        ),
        f"with {config.method} {why}": bool(why),
        f"its file says aggregation mean; {DEFAULT_DEFENSE} is the default": True,
    }
    reason = next(words for words, active in reasons.items() if active)
    return f"one hostile site can spoil this model: {reason}, or admit only sites that you trust."


def describe_round(row: Row, rounds: int) -> str:
    """Return a round's line in the log."""
    test = row.get("test")
    evaluation = row.get("evaluation")
    words = f", accuracy {test['accuracy']:.2%}" if test else ""
    if evaluation:
        words = f"; the model before it: accuracy {evaluation['accuracy']:.2%} at {evaluation['sites']} sites"
    if "validation" in row:
        of = "the round before" if "sites" in row["validation"] else "it"
        words += f"; validation images, of {of}: {row['validation']['accuracy']:.2%}"
    loss = row["train"].get("loss")
    mean = f", mean loss {loss:.4f}" if loss is not None else ""
    aggregator = row.get("aggregation") or {}
    if "epsilon" in aggregator:
        words += f"; epsilon {aggregator['epsilon']:.4g} (delta {aggregator['delta']:g})"
    for fact in aggregator.get("outside", ()):
        words += f"; {fact['site']} was left out: its {fact['part']} point against the others (cosine "
        words += f"{fact['cosine']:.3f}, median {fact['others']:.3f})"
    return f"round {row['round']} of {rounds}: {len(row['cohort'])} sites{mean}{words}"


DELIVERY = "delivery.json"
"""The file in a run folder that says which sites have the final model, and which lack it."""

PERIOD, RETRY = 2.0, 30.0
"""Seconds between two polls for sites that were away, and between two attempts at one that did not take the model."""


def deliver_model(manager: ClientManager, names: Sequence[str], final: bytes, run: Path, seconds: float) -> None:
    """Deliver the final model to sites, also to those that come back within `seconds`, and write who has it."""
    record = atomic_io.read_json(run / DELIVERY) or {}
    has: list[str] = record.get("has", [])
    attempts: dict[str, float] = {}

    def serve(some: Sequence[str]) -> list[str]:
        has.extend(send_model(manager, some, final, run / MODEL))
        lacks = [name for name in names if name not in has]
        facts = {**record, "has": sorted(set(has)), "lacks": lacks}
        atomic_io.write_atomically(run / DELIVERY, (json.dumps(facts) + "\n").encode())
        return lacks

    lacks, end = serve(names), manager.clock.now() + seconds
    if lacks and seconds > 0:
        manager.say(f"the server stays for {', '.join(lacks)}: who comes back gets the model")
    while lacks and (now := manager.clock.now()) < end:
        here = manager.poll()
        back = [name for name in lacks if name in here and now - attempts.get(name, -RETRY) >= RETRY]
        attempts |= dict.fromkeys(back, now)
        if back:
            lacks = serve(back)
        else:
            manager.clock.sleep(PERIOD)


def send_model(manager: ClientManager, names: Sequence[str], final: bytes, model: Path) -> list[str]:
    """Send sites the final model and return those that have it; `model` is its place here."""
    has, missing = list[str](), dict[str, str]()
    for name, answer in manager.exchange(dict.fromkeys(names, final), "the final model").items():
        try:
            if answer.data is None:
                raise MalformedMessage(answer.reason)
            reply = read_message(read_content(answer.data), Receipt, Refusal)
            if isinstance(reply, Refusal):
                raise MalformedMessage(reply.reason)
            has.append(name)
        except MalformedMessage as error:
            missing[name] = str(error)
    manager.say(f"the final model is at {len(has)} of {len(names)} sites")
    for name, why in missing.items():
        manager.say(f"{name} does not have the final model ({why}): send it {model}, or serve the federation again")
    return has
