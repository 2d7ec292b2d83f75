"""The server of a federation: from its plan to a finished run folder, over any transport. It resumes after a stop."""

import hashlib
import json
import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path

import numpy as np

from halfmoon.aggregation.weights import WeightCap
from halfmoon.api.requirements import requirements_of
from halfmoon.api.types import ClientUpdate, Task
from halfmoon.config import schema as settings
from halfmoon.config.schema import Config
from halfmoon.config.validation import (
    DEFAULT_DEFENSES,
    MEASURED_COHORT,
    MIN_COHORT_FOR_DEFENSE,
    effective_norm,
)
from halfmoon.core import tree
from halfmoon.core.errors import UserError
from halfmoon.core.tree import Tree
from halfmoon.core.user_cache import user_cache
from halfmoon.data import Images, Split
from halfmoon.data.partition.split import SERVER
from halfmoon.engine.budget import Budget, ClientSize
from halfmoon.engine.evaluation import ModelEvaluation, summarize_clients
from halfmoon.engine.local_clients import FederatedDataset, LocalClients, Training
from halfmoon.engine.loop import Experiment, Row, run_rounds
from halfmoon.engine.runtime import RuntimeSettings
from halfmoon.engine.sampling import Amount
from halfmoon.federation.protocol import limits
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
from halfmoon.runs.features import select_inputs
from halfmoon.runs.model_card import Card
from halfmoon.sites.folders.prepare import STATE_FOLDER
from halfmoon.sites.inference.load import load_model
from halfmoon.storage import atomic_io, toml
from halfmoon.storage.events import SERVER_LOG, EventLog, EventRecorder
from halfmoon.storage.run_folder import MODEL, RunFolder
from halfmoon.storage.state_store import StateView, TreeStore

QUARANTINE_FILE = "sites.json"
"""File in a run folder with the unusable replies of each site."""

TERMS_FILE = "terms.json"
"""File in a run folder with the terms of the federation."""

RUN_NUMBER_FILE = "number"
"""File in a run folder with the random id of the run."""

UNCHECKED_LOSS = "one site of five costs 86 to 93 points of accuracy"
CHECKED_LOSS = "one site of five inside the bounds costs up to 31 points of accuracy"
"""Losses of `benchmarks/hostile_sums.py`, for the server's log."""

SECRET_FILE = "secret"
"""File in a run folder with the secret of noise and cohorts."""


@dataclass(frozen=True)
class FederationServer:
    """The server of a federation.

    Attributes:
        plan: the federation.
        path: the folder of its run.
    """

    plan: FederationPlan
    path: Path

    @property
    def log(self) -> EventLog:
        """The event log in the run folder."""
        return EventLog(self.path / SERVER_LOG)

    @property
    def max_reply_bytes(self) -> int:
        """The size that no reply of a site may exceed, whatever the request."""
        network = factory.build_task(self.plan.config, self.plan.terms.image_spec).network
        return limits.max_unknown_message_bytes(network)

    def prepare(self) -> None:
        """Create or check the run folder, and check the server's image folders.

        Raises:
            UserError: for anything that would otherwise fail later.
        """
        for folder in (self.plan.test, self.plan.server, self.plan.validation):
            if folder is not None:
                self._load_images(folder)
        if self.plan.config.labels_at == "server" and self.plan.server is None:
            raise UserError(
                "labels_at is 'server', but [federation] names no folder of the server's own labeled images: give its "
                "path as server."
            )
        with self._open_folder():
            pass

    def readmit(self, name: str) -> None:
        """Let a site out of quarantine; raise UserError for an unknown site."""
        self._quarantine().readmit(name)

    def serve(self, transport: Transport, patience: float = math.inf) -> Row:
        """Run the remaining rounds. If the run is finished, deliver the model to sites that lack it, if requested.

        Args:
            transport: carries messages to the sites.
            patience: seconds to wait for enough sites.

        Returns:
            The summary of the run.

        Raises:
            UserError: if the folder belongs to another run or is in use, or too few sites answer.
        """
        with self._open_folder() as folder:
            summary = folder.summary()
            if summary is None:
                config = self.plan.config
                with factory.apply_compute_settings(config, factory.count_site_threads(config)):
                    return self._run(folder, transport, patience)
            record = atomic_io.read_json(self.path / DELIVERY) or {}
            if record.get("again") is True and record.get("lacks"):
                self._redeliver(record["lacks"], transport, patience)
            return summary

    def _run(self, folder: RunFolder, transport: Transport, patience: float) -> Row:
        """Run the remaining rounds, deliver the model to the sites, and finish the run folder."""
        terms = self.plan.terms
        config = self.plan.config
        log = self.log
        checkpoint = folder.load()
        for warning in checkpoint.warnings if checkpoint else []:
            log.record("warning", warning)
        if folder.remark:
            log.record("warning", folder.remark)
        text = f"{terms.sentence()}; halfmoon {metadata.version('halfmoon')}"
        log.record("started", text, federation=terms.name, method=config.method, rounds=settings.count_rounds(config))
        warning = defense_warning(config)
        if warning is not None:
            log.record("warning", warning)
        atomic_io.write_atomically(self.path / TERMS_FILE, terms.text.encode())

        spool = Spool(self.path / SPOOL_FOLDER)
        spool.clear()
        manager = self._manager(transport, spool)
        experiment = self._experiment(manager, patience)
        if checkpoint:
            log.record("resumed", f"going on after round {checkpoint.round}", round=checkpoint.round)
        manager.wait_for_sites(self.plan.rules.quorum(config.cohort), patience)
        self._check_patience(manager)
        results = run_rounds(experiment, folder, checkpoint, self._record_round)
        if isinstance(experiment.runtime, RemoteRuntime) and experiment.test is None:
            evaluation = experiment.runtime.evaluate_last(results["model"])
            tally = evaluation.tally()
            if tally is not None:
                accuracy = tally.row()["accuracy"]
                text = f"the sites' own test images: accuracy {accuracy:.2%}"
                log.record("final_evaluation", text, accuracy=accuracy)
                results |= {"confusion": tally.confusion.tolist(), "accuracy": _accuracy(folder, tally, results)}
            if len(evaluation.by_site) > 1:
                shares = evaluation.by_site
                results["client_accuracy"] = {**summarize_clients([*shares.values()]), "each": dict(shares)}

        identity = {"federation": terms.hash, "sites": list(terms.sites)}
        summary = assembly.build_summary(config, identity, terms.image_spec.classes, folder, results)
        network, model = experiment.task.network.full_model(results["model"])
        card = assembly.build_card(config, terms.image_spec, network, _config_text(self.plan))
        quarantined = self._quarantine().sites
        names = [name for name in terms.sites if name not in quarantined]
        # Deliver before the run is finished: afterwards Flower's server no longer answers the sites.
        final = self._final_message(card, results["model"])
        deliver_model(manager, names, final, self.path, self.plan.rules.linger)
        spool.clear()
        folder.finish(model, card.render(), summary)
        log.record("finished", f"finished: the model is {self.path / 'model.safetensors'}")
        return summary

    def _check_patience(self, manager: ClientManager) -> None:
        """Raise UserError if training is to stop by validation images, but neither server nor sites have any."""
        has_validation = self.plan.validation is not None
        has_validation |= any(acceptance.validations for acceptance in manager.acceptances.values())
        if self.plan.config.patience is not None and not has_validation:
            raise UserError(
                f"patience is {self.plan.config.patience}, but neither the server nor a site that joined has validation "
                "images: set validation in the table [federation], have a site join with --validation, or leave "
                "patience out."
            )

    def _record_round(self, row: Row) -> None:
        text = describe_round(row, settings.count_rounds(self.plan.config))
        names = self.plan.terms.sites
        cohort = [names[client] for client in row["cohort"]]
        outliers = (row.get("aggregation") or {}).get("outside", ())
        left_out = {outlier["site"]: describe_outlier(outlier) for outlier in outliers}
        self.log.record("round_finished", text, round=row["round"], cohort=cohort, left_out=left_out)

    def _redeliver(self, names: Sequence[str], transport: Transport, patience: float) -> None:
        """Deliver the saved model to the sites that lack it."""
        terms = self.plan.terms
        saved = load_model(self.path / MODEL, network=terms.config.network)
        # The saved model also has frozen layers. Only the trained ones are sent, as at the end of the run.
        trained = tree.flatten(limits.make_meta_model(factory.build_task(terms.config, terms.image_spec).network))
        leaves = tree.flatten({"params": saved.params, "stats": saved.stats})
        trained_groups = tree.unflatten({path: leaves[path].contiguous() for path in trained})
        final = self._final_message(saved.card, {"params": {}, "stats": {}, **trained_groups})
        deliver_model(self._manager(transport), names, final, self.path, patience)

    def _final_message(self, card: Card, model: Tree) -> bytes:
        """Serialize the final model. Its card has the configuration of the terms, without paths of this machine."""
        terms = self.plan.terms
        text = json.dumps(replace(card, config=settings.to_toml(terms.config)).render())
        return write_message(FinalModel(terms.hash, metadata.version("halfmoon"), text, model))

    def _manager(self, transport: Transport, spool: Spool | None = None) -> ClientManager:
        rules = self.plan.rules
        version = metadata.version("halfmoon")
        return ClientManager(
            transport, self.plan.terms, version, rules.round_timeout, rules.absence, self.log, spool=spool
        )

    def _experiment(self, manager: ClientManager, patience: float) -> Experiment:
        """Build the experiment: as in a simulation, with a runtime whose clients are sites."""
        terms = self.plan.terms
        config = self.plan.config
        task = factory.build_task(config, terms.image_spec)
        model_inputs = select_inputs(
            config, task, factory.build_views(config, terms.image_spec), user_cache("features")
        )
        store = TreeStore(cap=config.memory_cap * 1_000_000)
        device = factory.select_device(config)
        test = None
        if self.plan.test is not None:
            test = model_inputs.prepare_test(factory.to_examples(self._load_images(self.plan.test), device))
        validation = None
        if self.plan.validation is not None:
            validation = model_inputs.prepare_test(factory.to_examples(self._load_images(self.plan.validation), device))
        batching, server_batching = factory.build_batch_rules(config)
        budget = budgets.build_budget(config, task)

        server = None
        if self.plan.server is not None and config.labels_at == "server":
            examples = model_inputs.prepare_training(factory.to_examples(self._load_images(self.plan.server), device))
            count = len(examples.labels)
            split = Split(np.full(count, SERVER), np.ones(count, bool), len(terms.sites))
            server = LocalClients(
                FederatedDataset(examples, split),
                model_inputs.views,
                Training(batching, budget, server_batching),
                config.seed,
                StateView(store, "client/", device),
            )

        rules = self.plan.rules
        if config.dp_clip is not None:
            # With a bound on norms, the update of one site would decide which other updates count.
            rules = replace(rules, norm_bound=0.0)
        calls = SiteCalls(
            link=manager,
            names=terms.sites,
            run=RunIdentity(terms.hash, metadata.version("halfmoon"), self._random_bytes(RUN_NUMBER_FILE, 16).hex()),
            rules=rules,
            quarantine=self._quarantine(),
            inspection=_inspection(
                self.plan, manager, task, budget, use_tests=test is None, use_validations=validation is None
            ),
            log=self.log,
            wait_for_sites=lambda needed: manager.wait_for_sites(needed, patience, 0.0),
        )
        runtime_settings = RuntimeSettings(
            config.cohort,
            config.seed,
            device=device,
            cohort_secret=None if config.dp_clip is None else self._secret(),
        )
        runtime = RemoteRuntime(
            factory.build_method(config),
            model_inputs.task,
            model_inputs.views,
            calls,
            runtime_settings,
            server,
            store,
            factory.build_aggregators(config, self._secret(), self.path, summed=config.secure_aggregation),
        )
        return assembly.build_experiment(config, model_inputs.task, runtime, test, validation)

    def _open_folder(self) -> RunFolder:
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

    def _load_images(self, folder: Path) -> Images:
        return load_labeled_images(folder, self.plan.terms, folder / STATE_FOLDER / image_spec_name(self.plan.terms))

    def _quarantine(self) -> Quarantine:
        return Quarantine(self.plan.terms.sites, self.plan.rules.strikes, self.path / QUARANTINE_FILE)

    def _secret(self) -> bytes:
        """Load the secret of the noise, which no site may know. It is generated before the first round."""
        return self._random_bytes(SECRET_FILE, 32)

    def _random_bytes(self, name: str, size: int) -> bytes:
        """Load random bytes from a file, generated before the first round; raise UserError if they are lost."""
        path = self.path / name
        data = atomic_io.read(path)
        advice = "put it back from a backup, or serve in another folder, as another run."
        if data is None:
            if any(self.path.glob("checkpoint-*")):
                raise UserError(f"{path} is missing, but finished rounds depend on it: {advice}")
            random = secrets.token_bytes(size)
            atomic_io.write_atomically(path, random + hashlib.sha256(random).digest(), private=True)
            return random
        random = data[:size]
        if data[size:] != hashlib.sha256(random).digest():
            raise UserError(f"{path} is damaged: {advice}")
        return random


def _weight_cap(plan: FederationPlan, log: EventRecorder) -> WeightCap | None:
    """Create the cap on weights; None if the server cannot see single weights, or all weights are 1."""
    if plan.config.secure_aggregation or plan.config.dp_clip is not None:
        return None
    names = plan.terms.sites

    def warn(client: int, share: float) -> None:
        text = f"{names[client]} has {share:.0%} of the weight of a round: alone it decides the model"
        log.record("site_dominates", text, site=names[client], share=share)

    return WeightCap(plan.rules.weight_cap, dict(enumerate(plan.rules.images or ())), warn)


def _inspection(
    plan: FederationPlan,
    manager: ClientManager,
    task: Task,
    budget: Budget,
    use_tests: bool,
    use_validations: bool,
) -> Inspection:
    """Collect what the server knows about its sites.

    Args:
        plan: the federation.
        manager: has the acceptances of the sites.
        task: the federation's task.
        budget: the steps of a local update.
        use_tests: whether models are tested on the sites' test images.
        use_validations: whether the round is chosen by the sites' validation images.
    """
    config = plan.config
    image_spec = plan.terms.image_spec
    entry = registry.entry(config.method)

    def count_images(name: str) -> int:
        acceptance = manager.acceptances[name]
        images = acceptance.labeled + acceptance.unlabeled
        if plan.rules.images is not None:
            images = min(images, plan.rules.images[plan.terms.sites.index(name)])
        return images

    def declared_size(name: str) -> ClientSize:
        images = count_images(name)
        labeled = min(manager.acceptances[name].labeled, images)
        return ClientSize(labeled, images if config.reuse_labeled else images - labeled)

    def max_amount(client_update: ClientUpdate, name: str) -> tuple[Amount, int]:
        images = count_images(name)
        declared = declared_size(name)
        trained = ClientSize(images, 0) if entry.all_labels else declared
        batching, _ = factory.build_batch_rules(config)
        return budget.amount(batching, client_update, trained, declared), images

    def tests(name: str) -> int:
        return manager.acceptances[name].tests if use_tests and name in manager.acceptances else 0

    def validations(name: str) -> int:
        return manager.acceptances[name].validations if use_validations and name in manager.acceptances else 0

    def shows_accuracy(name: str) -> bool:
        return name in manager.acceptances and manager.acceptances[name].shared == 1

    return Inspection(
        patterns=UploadProbe(task, factory.build_views(config, image_spec), image_spec.image, config.seed),
        max_amount=max_amount,
        tests=tests,
        validations=validations,
        keys=(lambda: lasting_keys(manager.acceptances)) if config.secure_aggregation else None,
        cap=_weight_cap(plan, manager.log),
        shared=shows_accuracy,
        declared=declared_size,
    )


def _accuracy(folder: RunFolder, tally: ModelEvaluation, results: Row) -> Row:
    """Compute the last, the best and the chosen accuracy on the sites' test images.

    Args:
        folder: the run folder, whose rows have the evaluations of earlier rounds.
        tally: the evaluation of the saved model.
        results: the results of the rounds.
    """
    rows = folder.rows()
    tests = [(row["evaluation"]["accuracy"], row["evaluation"]["round"]) for row in rows if row.get("evaluation")]
    saved = tally.row()["accuracy"]
    choice = results["chosen"]
    # With a chosen round, the saved model is that of the round; the last model was evaluated after the last round.
    last = saved if choice is None else results["concluded"]["accuracy"]
    best, best_round = max([*tests, (last, len(rows))], key=lambda test: (test[0], -test[1]))
    accuracy = {"last": last, "best": best, "best_round": best_round}
    if choice is None:
        return accuracy
    return accuracy | {"chosen": saved, "chosen_round": choice["round"], "validation": choice["accuracy"]}


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
    """Explain what the federation's aggregation cannot defend against one hostile site; None if nothing is known."""
    entry = registry.entry(config.method)
    norm = effective_norm(config)
    default = DEFAULT_DEFENSES[0]
    if config.aggregation == "cosine":
        why = entry.robust_rule_conflict(default, norm)
        reason = f"with {config.method} {why}" if why else f"its file says aggregation cosine; {default} is the default"
        return (
            "one hostile site can spoil this model, because aggregation cosine does not notice an update that "
            f"concentrates on one class: {reason}, or admit only sites that you trust."
        )
    if config.aggregation != "mean" and config.cohort < MEASURED_COHORT:
        return (
            f"of {config.cohort} sites a round one hostile site is a larger share than a rule can be trusted to outvote "
            f"(one of {MEASURED_COHORT}): have more take part, or admit only sites that you trust."
        )
    if config.aggregation != "mean":
        return None
    requirements = requirements_of(factory.build_method(config), norm)
    if requirements.aggregation == "sum" and requirements.min_class_images:
        return _describe_sum_checks(config)
    conflicts = [entry.robust_rule_conflict(rule, norm) for rule in DEFAULT_DEFENSES]
    why = conflicts[-1] if all(conflicts) else ""
    reasons = {
        "sums of masked or noised uploads hide who sent what; leave secure_aggregation and dp_clip out": (
            config.secure_aggregation or config.dp_clip is not None
        ),
        f"of fewer than {MIN_COHORT_FOR_DEFENSE} sites a round no rule can tell which one is wrong; have more take part": (
            config.cohort < MIN_COHORT_FOR_DEFENSE
        ),
        f"with {config.method} {why}": bool(why),
        f"its file says aggregation mean; {default} is the default": True,
    }
    reason = next(text for text, applies in reasons.items() if applies)
    return f"one hostile site can spoil this model: {reason}, or admit only sites that you trust."


def _describe_sum_checks(config: Config) -> str:
    """Explain what one hostile site can do to a head that is solved from sums."""
    if config.secure_aggregation or config.dp_clip is not None:
        hidden = "secure_aggregation" if config.secure_aggregation else "dp_clip"
        return (
            f"one hostile site can spoil this model: {hidden} hides single sums, so no site's sums can be checked. Leave it "
            f"out to have them checked, or admit only sites that you trust. Measured on digits: {UNCHECKED_LOSS}."
        )
    return (
        "one hostile site can still harm this model: each site's sums are checked against its counts, but possible sums "
        f"may be wrong, so admit only sites that you trust. Measured on digits: {CHECKED_LOSS}."
    )


def describe_round(row: Row, rounds: int) -> str:
    """Describe a round in one line for the log."""
    test = row.get("test")
    evaluation = row.get("evaluation")
    details = f", accuracy {test['accuracy']:.2%}" if test else ""
    if evaluation:
        details = f"; the model before it: accuracy {evaluation['accuracy']:.2%} at {evaluation['sites']} sites"
    if "validation" in row:
        model = "the round before" if "sites" in row["validation"] else "it"
        details += f"; validation images, of {model}: {row['validation']['accuracy']:.2%}"
    loss = row["train"].get("loss")
    mean = f", mean loss {loss:.4f}" if loss is not None else ""
    aggregator = row.get("aggregation") or {}
    if "epsilon" in aggregator:
        details += f"; epsilon {aggregator['epsilon']:.4g} (delta {aggregator['delta']:g})"
    for outlier in aggregator.get("outside", ()):
        details += f"; {describe_outlier(outlier)}"
    return f"round {row['round']} of {rounds}: {len(row['cohort'])} sites{mean}{details}"


def describe_outlier(outlier: Row) -> str:
    """Describe why a site was left out of a round's aggregate, as in the field "outside" of metrics.jsonl."""
    return (
        f"{outlier['site']} was left out: its {outlier['part']} point against the others (cosine "
        f"{outlier['cosine']:.3f}, median {outlier['others']:.3f})"
    )


DELIVERY = "delivery.json"
"""File in a run folder with the sites that have the final model, and those that lack it."""

POLL_SECONDS = 2.0
"""Seconds between two polls for sites that were disconnected."""

REDELIVERY_SECONDS = 30.0
"""Seconds between two attempts at a site that did not take the model."""


def deliver_model(manager: ClientManager, names: Sequence[str], final: bytes, run: Path, seconds: float) -> None:
    """Deliver the final model to sites, and record in the run folder which of them have it.

    Args:
        manager: sends the model.
        names: the sites.
        final: the serialized message.
        run: the run folder.
        seconds: how long to wait for sites that are disconnected.
    """
    record = atomic_io.read_json(run / DELIVERY) or {}
    has: list[str] = record.get("has", [])
    attempts: dict[str, float] = {}

    def deliver(sites: Sequence[str]) -> list[str]:
        has.extend(send_model(manager, sites, final, run / MODEL))
        lacks = [name for name in names if name not in has]
        new_record = {**record, "has": sorted(set(has)), "lacks": lacks}
        atomic_io.write_atomically(run / DELIVERY, (json.dumps(new_record) + "\n").encode())
        return lacks

    lacks = deliver(names)
    end = manager.clock.now() + seconds
    if lacks and seconds > 0:
        text = f"the server stays for {', '.join(lacks)}: who comes back gets the model"
        manager.log.record("waiting_to_deliver", text, sites=lacks)
    while lacks and (now := manager.clock.now()) < end:
        connected = manager.poll()
        returned = []
        for name in lacks:
            if name in connected and now - attempts.get(name, -REDELIVERY_SECONDS) >= REDELIVERY_SECONDS:
                returned.append(name)
                attempts[name] = now
        if returned:
            lacks = deliver(returned)
        else:
            manager.clock.sleep(POLL_SECONDS)


def send_model(manager: ClientManager, names: Sequence[str], final: bytes, model: Path) -> list[str]:
    """Send the final model to sites once.

    Args:
        manager: sends the model.
        names: the sites.
        final: the serialized message.
        model: the model's file on this machine, for the log.

    Returns:
        The sites that have stored it.
    """
    has: list[str] = []
    missing: dict[str, str] = {}
    for name, response in manager.exchange(dict.fromkeys(names, final), "the final model").items():
        try:
            if response.data is None:
                raise MalformedMessage(response.reason)
            reply = read_message(read_content(response.data), Receipt, Refusal)
            if isinstance(reply, Refusal):
                raise MalformedMessage(reply.reason)
            has.append(name)
        except MalformedMessage as error:
            missing[name] = str(error)
    manager.log.record("model_delivered", f"the final model is at {len(has)} of {len(names)} sites", sites=has)
    for name, reason in missing.items():
        text = f"{name} does not have the final model ({reason}): send it {model}, or serve the federation again"
        manager.log.record("model_not_delivered", text, site=name, reason=reason)
    return has
