"""The server of a federation: from its plan to a finished run folder, over any transport. It resumes after a stop."""

import hashlib
import json
import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
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
from halfmoon.core import toml, tree
from halfmoon.core.errors import UserError
from halfmoon.core.tree import Tree
from halfmoon.core.user_cache import user_cache
from halfmoon.core.versions import installed_version
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
    PermanentRefusal,
    Receipt,
    Refusal,
    read_message,
    write_message,
)
from halfmoon.federation.protocol.terms import describe_held_out, image_spec_name, load_labeled_images
from halfmoon.federation.protocol.tree_spec import UploadProbe
from halfmoon.federation.server.calls import Inspection, RunIdentity, SiteCalls
from halfmoon.federation.server.cohorts import Quarantine
from halfmoon.federation.server.connection import SPOOL_FOLDER, Spool, Transport
from halfmoon.federation.server.plan import FederationPlan
from halfmoon.federation.server.runtime import RemoteRuntime
from halfmoon.federation.server.secure_sum import lasting_keys
from halfmoon.federation.server.sessions import ClientManager
from halfmoon.methods import registry
from halfmoon.models.model_card import Card
from halfmoon.runs import assembly, budgets, factory
from halfmoon.runs.features import select_inputs
from halfmoon.sites.folders.prepare import STATE_FOLDER
from halfmoon.sites.inference.load import load_model
from halfmoon.storage import atomic_io
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
        """Check everything that the server needs before it waits for sites: its image folders and its run folder.

        A run folder that does not exist yet is created.

        Raises:
            UserError: if an image folder cannot be read or is missing, or the run folder belongs to another run.
        """
        for folder in (self.plan.test, self.plan.server, self.plan.validation):
            if folder is not None:
                self._load_images(folder)  # decodes them and stores the result, which is loaded again when it is needed
        if self.plan.config.labels_at == "server" and self.plan.server is None:
            raise UserError(
                "labels_at is 'server', but [federation] names no folder of the server's own labeled images: give its "
                "path as server."
            )
        # Opening checks that the folder belongs to this run. It is closed, because `serve` opens it later.
        self._open_folder().close()

    def readmit(self, site_name: str) -> None:
        """Let a site out of quarantine; raise UserError for an unknown site."""
        self._quarantine().readmit(site_name)

    def serve(self, transport: Transport, patience: float = math.inf) -> Row:
        """Run the rounds that the run folder does not contain yet, from its last checkpoint.

        If the run is finished, send its model to the sites that do not have it, provided that the delivery record in
        the run folder requests this. `deliver_model` writes this JSON file: "lacks" are the sites without the model;
        `halfmoon serve` sets "again" if it is started once more.

        Args:
            transport: carries messages to the sites.
            patience: seconds to wait for enough sites.

        Returns:
            The summary of the run.

        Raises:
            UserError: if the folder belongs to another run or is in use, or too few sites reply.
        """
        with self._open_folder() as folder:
            summary = folder.summary()
            if summary is None:
                config = self.plan.config
                thread_count = factory.count_site_threads(config)
                with factory.apply_compute_settings(config, thread_count):
                    return self._run(folder, transport, patience)
            record = atomic_io.read_json(self.path / DELIVERY) or {}
            sites_without_model = record.get("lacks")
            if record.get("again") is True and sites_without_model:
                self._redeliver(sites_without_model, transport, patience)
            return summary

    def _run(self, folder: RunFolder, transport: Transport, patience: float) -> Row:
        """Run the remaining rounds, deliver the model to the sites, and finish the run folder.

        Args:
            folder: the run folder, with the checkpoint of a run that was stopped.
            transport: carries messages to the sites.
            patience: seconds to wait for enough sites.

        Returns:
            The summary of the run.
        """
        terms = self.plan.terms
        config = self.plan.config
        log = self.log
        checkpoint = folder.load()
        for warning in checkpoint.warnings if checkpoint else []:
            log.record("warning", warning)
        if folder.lock_warning:
            log.record("warning", folder.lock_warning)
        text = f"{terms.sentence()}; halfmoon {installed_version('halfmoon')}"
        log.record("started", text, federation=terms.name, method=config.method, rounds=settings.count_rounds(config))
        warning = defense_warning(config)
        if warning is not None:
            log.record("warning", warning)
        for note in self._describe_images():
            log.record("warning", note)
        atomic_io.write_atomically(self.path / TERMS_FILE, terms.text.encode())

        spool = Spool(self.path / SPOOL_FOLDER)
        spool.clear()
        manager = self._manager(transport, spool)
        experiment = self._experiment(manager, patience)
        if checkpoint:
            log.record("resumed", f"going on after round {checkpoint.round}", round=checkpoint.round)
        manager.wait_for_sites(self.plan.rules.quorum(config.cohort), patience)
        # Only now is it known which sites have validation images: they report it when they join.
        self._check_patience(manager)
        results = run_rounds(experiment, folder, checkpoint, self._record_round)
        if isinstance(experiment.runtime, RemoteRuntime) and experiment.test is None:
            results |= self._evaluate_at_sites(experiment.runtime, folder, results)

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

    def _evaluate_at_sites(self, runtime: RemoteRuntime, folder: RunFolder, results: Row) -> Row:
        """Evaluate the final model on the sites' test images, and return fields to add to the results of the run.

        Args:
            runtime: sends the model to the sites.
            folder: the run folder, with the evaluations of earlier rounds.
            results: the results of the rounds; "model" is the final model.

        Returns:
            "confusion" and "accuracy" over all sites, if any has test images, and "client_accuracy", if two sites or
            more allow their accuracy to be shown.
        """
        evaluation = runtime.evaluate_last(results["model"])
        fields: Row = {}
        total = evaluation.total()
        if total is not None:
            accuracy = total.row()["accuracy"]
            text = f"the sites' own test images: accuracy {accuracy:.2%}"
            self.log.record("final_evaluation", text, accuracy=accuracy)
            fields["confusion"] = total.confusion.tolist()
            fields["accuracy"] = _summarize_accuracy(folder, total, results)
        site_accuracies = evaluation.by_site
        if len(site_accuracies) > 1:
            mean_and_spread = summarize_clients([*site_accuracies.values()])
            fields["client_accuracy"] = {**mean_and_spread, "each": dict(site_accuracies)}
        return fields

    def _check_patience(self, manager: ClientManager) -> None:
        """Check that early stopping (option `patience`) has validation images, at the server or at a site that joined.

        Raises:
            UserError: if there are none.
        """
        if self.plan.config.patience is None:
            return
        server_has_images = self.plan.validation is not None
        site_has_images = any(acceptance.validations for acceptance in manager.acceptances.values())
        if not server_has_images and not site_has_images:
            raise UserError(
                f"patience is {self.plan.config.patience}, but neither the server nor a site that joined has validation "
                # UserError writes {validation} as the user does: --validation or validation=.
                "images: set validation in the table [federation], have a site join with {validation}, or leave "
                "patience out.",
                option="validation",
            )

    def _record_round(self, row: Row) -> None:
        """Log that a round is finished, with its sites and the outliers that the aggregation left out.

        Args:
            row: the round's line of metrics.jsonl. "cohort" has the client numbers.
        """
        text = describe_round(row, settings.count_rounds(self.plan.config))
        site_names = self.plan.terms.sites
        cohort = [site_names[client] for client in row["cohort"]]
        aggregation = row.get("aggregation") or {}
        left_out = {outlier["site"]: describe_outlier(outlier) for outlier in aggregation.get("outside", ())}
        self.log.record("round_finished", text, round=row["round"], cohort=cohort, left_out=left_out)

    def _redeliver(self, site_names: Sequence[str], transport: Transport, patience: float) -> None:
        """Load the model of a finished run and deliver it to the sites that do not have it.

        It is sent as at the end of the run: without its frozen pretrained layers, which the sites have.

        Args:
            site_names: the sites without the model.
            transport: carries messages to the sites.
            patience: seconds to wait for sites that are disconnected.
        """
        terms = self.plan.terms
        saved = load_model(self.path / MODEL, network=terms.config.network)
        network = factory.build_task(terms.config, terms.image_spec).network
        # The paths of the trained layers are found by building these layers only, without memory (device "meta").
        trained_paths = tree.flatten(limits.make_meta_model(network)).keys()
        saved_leaves = tree.flatten({"params": saved.params, "stats": saved.stats})
        trained = tree.unflatten({path: saved_leaves[path].contiguous() for path in trained_paths})
        # A message needs both keys, even if no statistics are trained.
        model = {"params": {}, "stats": {}, **trained}
        message = self._final_message(saved.card, model)
        deliver_model(self._manager(transport), site_names, message, self.path, patience)

    def _final_message(self, card: Card, model: Tree) -> bytes:
        """Serialize the final model and its model card.

        The card gets the configuration that the sites agreed to, which has no paths of this machine.
        """
        terms = self.plan.terms
        public_card = replace(card, config=settings.to_toml(terms.config))
        card_text = json.dumps(public_card.render())
        return write_message(FinalModel(terms.hash, installed_version("halfmoon"), card_text, model))

    def _manager(self, transport: Transport, spool: Spool | None = None) -> ClientManager:
        """Create the manager that exchanges messages with the sites; `spool` stores their replies on the disk."""
        rules = self.plan.rules
        return ClientManager(
            transport,
            self.plan.terms,
            version=installed_version("halfmoon"),
            timeout=rules.round_timeout,
            absence=rules.absence,
            log=self.log,
            spool=spool,
        )

    def _experiment(self, manager: ClientManager, patience: float) -> Experiment:
        """Build the experiment that `run_rounds` runs: as in a simulation, with a runtime whose clients are sites.

        Args:
            manager: exchanges messages with the sites.
            patience: seconds to wait for enough sites before a round is tried once more.
        """
        terms = self.plan.terms
        config = self.plan.config
        task = factory.build_task(config, terms.image_spec)
        model_inputs = select_inputs(
            config, task, factory.build_views(config, terms.image_spec), user_cache("features")
        )
        store = TreeStore(cap=config.memory_cap * 1_000_000)  # from megabytes to bytes
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
            # Differential privacy bounds the influence of one site. With a bound on norms relative to the median, its
            # update would decide which other updates count.
            rules = replace(rules, norm_bound=0.0)
        calls = SiteCalls(
            link=manager,
            names=terms.sites,
            run=RunIdentity(terms.hash, installed_version("halfmoon"), self._random_bytes(RUN_NUMBER_FILE, 16).hex()),
            rules=rules,
            quarantine=self._quarantine(),
            inspection=_inspection(
                self.plan, manager, task, budget, use_tests=test is None, use_validations=validation is None
            ),
            log=self.log,
            # Before a round is tried again, the server waits only for as many sites as it needs.
            wait_for_sites=lambda needed: manager.wait_for_sites(needed, patience, grace=0.0),
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
        """Open the run folder of this federation, or create it.

        Its identity is the hash of the terms (the options that all sites agree to), so that a run never resumes with
        other ones.

        Raises:
            UserError: if the folder contains a run of a federation with other terms, or is in use.
        """
        terms = self.plan.terms
        if not RunFolder.exists(self.path):
            title = registry.entry(self.plan.config.method).title
            return RunFolder.create(self.path, _config_text(self.plan), terms.hash, title)
        folder = RunFolder.open(self.path)
        if folder.identity != terms.hash:
            raise UserError(
                f"{self.path} holds a run of other terms ({folder.identity[:8]}, these are {terms.hash[:8]}): undo the "
                "change of the configuration, or choose another {run_dir}.",  # UserError writes it as --run-dir
                option="run_dir",
            )
        return folder

    def _load_images(self, folder: Path) -> Images:
        try:
            return load_labeled_images(
                folder, self.plan.terms, folder / STATE_FOLDER / image_spec_name(self.plan.terms)
            )
        except PermanentRefusal as error:
            # Its text is for the server of another machine; the cause names folder and classes.
            raise error.__cause__ or error from None

    def _describe_images(self) -> list[str]:
        """Describe what is wrong with the server's folders of images (`describe_held_out`)."""
        folders = dict.fromkeys((self.plan.server, self.plan.validation, self.plan.test))
        return describe_held_out({folder: self._load_images(folder) for folder in folders if folder is not None})

    def _quarantine(self) -> Quarantine:
        return Quarantine(self.plan.terms.sites, self.plan.rules.strikes, self.path / QUARANTINE_FILE)

    def _secret(self) -> bytes:
        """Load the secret of the noise, which no site may know. It is generated before the first round."""
        return self._random_bytes(SECRET_FILE, 32)

    def _random_bytes(self, file_name: str, size: int) -> bytes:
        """Load random bytes, such as the secret of cohorts and noise, from a file; generate them when the run begins.

        The file contains the bytes and their SHA-256, which shows a damaged file. A run that resumed with other bytes
        would draw other cohorts and noise than before, so bytes that are lost are never generated a second time.

        Args:
            file_name: name of the file in the run folder.
            size: number of random bytes.

        Raises:
            UserError: if the file is damaged, or is missing although rounds are finished.
        """
        path = self.path / file_name
        content = atomic_io.read(path)
        advice = "put it back from a backup, or serve in another folder, as another run."
        if content is None:
            if any(self.path.glob("checkpoint-*")):
                raise UserError(f"{path} is missing, but finished rounds depend on it: {advice}")
            random_bytes = secrets.token_bytes(size)
            checksum = hashlib.sha256(random_bytes).digest()
            atomic_io.write_atomically(path, random_bytes + checksum, private=True)
            return random_bytes
        random_bytes = content[:size]
        checksum = content[size:]
        if checksum != hashlib.sha256(random_bytes).digest():
            raise UserError(f"{path} is damaged: {advice}")
        return random_bytes


def _weight_cap(plan: FederationPlan, log: EventRecorder) -> WeightCap | None:
    """Create the cap on the weights with which sites enter the average, a multiple of the median weight of a round.

    The weight of a site is its number of images, as it reports them. A site whose number the server knows
    (`plan.rules.images`) may have that weight, even if it is above the cap.

    Args:
        plan: the federation, with the rules of its server.
        log: receives a warning about a site that dominates a round.

    Returns:
        The cap; None with secure aggregation, where the server cannot see the weight of a single site, and with
        differential privacy, where all weights are 1 so that the influence of each site is bounded.
    """
    if plan.config.secure_aggregation or plan.config.dp_clip is not None:
        return None
    site_names = plan.terms.sites

    def warn(client: int, share: float) -> None:
        """Log that one client has more than half of the weight of a round."""
        text = f"{site_names[client]} has {share:.0%} of the weight of a round: alone it decides the model"
        log.record("site_dominates", text, site=site_names[client], share=share)

    known_counts = dict(enumerate(plan.rules.images or ()))
    return WeightCap(plan.rules.weight_cap, known_counts, warn)


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
        # A site may claim more images than it has, to weigh more. Numbers that the server knows are a limit.
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
        # A supervised baseline (`all_labels`) trains on all images as labeled ones.
        trained = ClientSize(images, 0) if entry.all_labels else declared
        batching, _ = factory.build_batch_rules(config)
        return budget.amount(batching, client_update, trained, declared), images

    def test_count(name: str) -> int:
        return manager.acceptances[name].tests if use_tests and name in manager.acceptances else 0

    def validation_count(name: str) -> int:
        return manager.acceptances[name].validations if use_validations and name in manager.acceptances else 0

    def shows_accuracy(name: str) -> bool:
        return name in manager.acceptances and manager.acceptances[name].shared == 1

    return Inspection(
        upload_probe=UploadProbe(task, factory.build_views(config, image_spec), image_spec.image, config.seed),
        max_amount=max_amount,
        test_count=test_count,
        validation_count=validation_count,
        keys=(lambda: lasting_keys(manager.acceptances)) if config.secure_aggregation else None,
        cap=_weight_cap(plan, manager.log),
        shows_accuracy=shows_accuracy,
        declared_size=declared_size,
    )


def _summarize_accuracy(folder: RunFolder, final_evaluation: ModelEvaluation, results: Row) -> Row:
    """Compute the last, the best and the chosen accuracy of a run on the sites' test images.

    Args:
        folder: the run folder. Its rows have the evaluations of earlier rounds.
        final_evaluation: the evaluation of the saved model.
        results: the results of the rounds. "chosen" has the round with the best validation accuracy, and this accuracy;
            it is None without validation images. "last_client_test" is then the evaluation of the model of the last round.

    Returns:
        {"last", "best", "best_round"}; with a chosen round also {"chosen", "chosen_round", "validation"}.
    """
    rows = folder.rows()
    # Sites evaluate a model at the start of the next round. Each evaluation names the number of rounds of its model.
    evaluations = [row["evaluation"] for row in rows if row.get("evaluation")]
    saved_accuracy = final_evaluation.row()["accuracy"]
    chosen_row = results["chosen"]
    # With a chosen round, the saved model is that of the round; the last model was evaluated after the last round.
    last_accuracy = saved_accuracy if chosen_row is None else results["last_client_test"]["accuracy"]
    candidates = [(evaluation["accuracy"], evaluation["round"]) for evaluation in evaluations]
    candidates.append((last_accuracy, len(rows)))
    # Of rounds with the same accuracy the first one counts.
    best_accuracy, best_round = max(candidates, key=lambda candidate: (candidate[0], -candidate[1]))
    summary = {"last": last_accuracy, "best": best_accuracy, "best_round": best_round}
    if chosen_row is not None:
        summary |= {"chosen": saved_accuracy, "chosen_round": chosen_row["round"], "validation": chosen_row["accuracy"]}
    return summary


def _config_text(plan: FederationPlan) -> str:
    """Write the configuration of a run as TOML, for its run folder: the options, the sites and the format of images."""
    terms = plan.terms
    image_spec = terms.image_spec
    federation = {
        "name": terms.name,
        "sites": terms.sites,
        "classes": image_spec.classes,
        "image": image_spec.image,
        "mirror": image_spec.mirror,
        "mean": image_spec.mean,
        "std": image_spec.std,
        "hash": terms.hash,
    }
    lines = [f"{name} = {toml.format_value(value)}" for name, value in federation.items()]
    table = "\n".join(["", "[federation]", *lines, ""])
    return settings.to_toml(plan.config) + table


def defense_warning(config: Config) -> str | None:
    """Explain against what the aggregation of a federation does not defend: a site that sends harmful updates.

    Args:
        config: the configuration; `aggregation` is the mean or a robust rule, such as "cosine".

    Returns:
        A sentence for the server's log, with the reason and advice; None for a rule that withstands one hostile site.
    """
    if config.aggregation == "mean":
        return _describe_undefended_mean(config)
    if config.aggregation == "cosine":
        default = DEFAULT_DEFENSES[0]
        # The reason why the method does not allow the default rule, or "".
        conflict = registry.entry(config.method).robust_rule_conflict(default, effective_norm(config))
        if conflict:
            reason = f"with {config.method} {conflict}"
        else:
            reason = f"its file says aggregation cosine; {default} is the default"
        return (
            "one hostile site can spoil this model, because aggregation cosine does not notice an update that "
            f"concentrates on one class: {reason}, or admit only sites that you trust."
        )
    if config.cohort < MEASURED_COHORT:
        return (
            f"of {config.cohort} sites a round one hostile site is a larger share than a rule can be trusted to outvote "
            f"(one of {MEASURED_COHORT}): have more take part, or admit only sites that you trust."
        )
    return None


def _describe_undefended_mean(config: Config) -> str:
    """Explain why a federation aggregates by the mean, which one hostile site can spoil.

    `DEFAULT_DEFENSES` are the robust rules that a federation uses by default: the first one that its method allows.
    """
    entry = registry.entry(config.method)
    norm = effective_norm(config)
    requirements = requirements_of(factory.build_method(config), norm)
    if requirements.aggregation == "sum" and requirements.min_class_images:
        return _describe_sum_checks(config)
    # The reasons why the method does not allow these rules; "" for a rule that it allows.
    conflicts = [entry.robust_rule_conflict(rule, norm) for rule in DEFAULT_DEFENSES]
    if config.secure_aggregation or config.dp_clip is not None:
        reason = "sums of masked or noised uploads hide who sent what; leave secure_aggregation and dp_clip out"
    elif config.cohort < MIN_COHORT_FOR_DEFENSE:
        reason = (
            f"of fewer than {MIN_COHORT_FOR_DEFENSE} sites a round no rule can tell which one is wrong; have more take "
            "part"
        )
    elif all(conflicts):
        reason = f"with {config.method} {conflicts[-1]}"
    else:
        reason = f"its file says aggregation mean; {DEFAULT_DEFENSES[0]} is the default"
    return f"one hostile site can spoil this model: {reason}, or admit only sites that you trust."


def _describe_sum_checks(config: Config) -> str:
    """Describe for the log what one hostile site can do to a method that solves the classifier head from sums.

    Such a method has no gradient updates that an outlier rule could compare. The server can only check the sums of each
    site against its image counts, and not even that if secure aggregation or differential privacy hides them.
    """
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
    """Describe a finished round in one line for the server's log.

    Args:
        row: the round's line of metrics.jsonl. Its "test" is the accuracy on the server's test images; "evaluation" is
            that on the sites' test images, of the model before the round.
        rounds: the number of rounds of the run.

    Returns:
        Text such as "round 3 of 9: 2 sites, mean loss 0.1234, accuracy 91.20%".
    """
    text = f"round {row['round']} of {rounds}: {len(row['cohort'])} sites"
    loss = row["train"].get("loss")
    if loss is not None:
        text += f", mean loss {loss:.4f}"

    test = row.get("test")
    evaluation = row.get("evaluation")
    if evaluation:
        text += f"; the model before it: accuracy {evaluation['accuracy']:.2%} at {evaluation['sites']} sites"
    elif test:
        text += f", accuracy {test['accuracy']:.2%}"
    if "validation" in row:
        # Sites validate the model that they receive, which is that of the round before; the server validates the new one.
        model = "the round before" if "sites" in row["validation"] else "it"
        text += f"; validation images, of {model}: {row['validation']['accuracy']:.2%}"

    aggregation = row.get("aggregation") or {}
    if "epsilon" in aggregation:
        text += f"; epsilon {aggregation['epsilon']:.4g} (delta {aggregation['delta']:g})"
    for outlier in aggregation.get("outside", ()):
        text += f"; {describe_outlier(outlier)}"
    return text


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


def deliver_model(
    manager: ClientManager, site_names: Sequence[str], message: bytes, run_folder: Path, wait_seconds: float
) -> None:
    """Send the final model to the sites of a federation, and record in the run folder which of them have it.

    Each site gets the model once. Then the server waits for the sites that did not confirm it: one that is connected
    gets it another time, at most every `REDELIVERY_SECONDS`. The record is written after each attempt, so it is true
    even if the server is stopped while it waits.

    Args:
        manager: sends the message to connected sites.
        site_names: the sites.
        message: the serialized model.
        run_folder: the folder of the run.
        wait_seconds: how long to wait after the first attempt.
    """
    record = atomic_io.read_json(run_folder / DELIVERY) or {}
    delivered: list[str] = record.get("has", [])
    delivered += send_model(manager, site_names, message, run_folder / MODEL)
    missing = _record_delivery(run_folder, record, site_names, delivered)

    deadline = manager.clock.now() + wait_seconds
    if missing and wait_seconds > 0:
        text = f"the server stays for {', '.join(missing)}: who comes back gets the model"
        manager.log.record("waiting_to_deliver", text, sites=missing)
    last_attempts: dict[str, float] = {}  # time of the last attempt while waiting, by site
    while missing and (now := manager.clock.now()) < deadline:
        connected = manager.poll()
        due = []
        for name in missing:
            if name in connected and now - last_attempts.get(name, -math.inf) >= REDELIVERY_SECONDS:
                due.append(name)
                last_attempts[name] = now
        if due:
            delivered += send_model(manager, due, message, run_folder / MODEL)
            missing = _record_delivery(run_folder, record, site_names, delivered)
        else:
            manager.clock.sleep(POLL_SECONDS)


def _record_delivery(
    run_folder: Path, earlier_record: Row, site_names: Sequence[str], delivered: Sequence[str]
) -> list[str]:
    """Write which sites have the final model to the delivery record, and return the sites that do not have it.

    Args:
        run_folder: the folder of the run.
        earlier_record: the record when the delivery began; its other fields are preserved.
        site_names: the sites to deliver to.
        delivered: the sites that have the model.
    """
    missing = [name for name in site_names if name not in delivered]
    record = {**earlier_record, "has": sorted(set(delivered)), "lacks": missing}
    atomic_io.write_atomically(run_folder / DELIVERY, (json.dumps(record) + "\n").encode())
    return missing


def send_model(manager: ClientManager, site_names: Sequence[str], message: bytes, model_file: Path) -> list[str]:
    """Send the final model to sites once, and log which of them have stored it.

    Args:
        manager: sends the message to connected sites.
        site_names: the sites.
        message: the serialized model.
        model_file: the model on this machine. The log names it, so that a person can send it by other means.

    Returns:
        The sites that confirmed that they have stored the model.
    """
    delivered: list[str] = []
    failures: dict[str, str] = {}  # why a site does not have the model, by site
    responses = manager.exchange(dict.fromkeys(site_names, message), "the final model")
    for name, response in responses.items():
        if not response.has_arrived:
            failures[name] = response.problem
            continue
        try:
            reply = read_message(response.read(), Receipt, Refusal)
        except MalformedMessage as error:
            failures[name] = str(error)
            continue
        if isinstance(reply, Refusal):
            failures[name] = reply.reason
        else:
            delivered.append(name)

    text = f"the final model is at {len(delivered)} of {len(site_names)} sites"
    manager.log.record("model_delivered", text, sites=delivered)
    for name, reason in failures.items():
        text = f"{name} does not have the final model ({reason}): send it {model_file}, or serve the federation again"
        manager.log.record("model_not_delivered", text, site=name, reason=reason)
    return delivered
