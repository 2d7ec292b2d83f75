"""A federation's server: from its plan to a finished run folder, over any post; stopped anywhere, it goes on there."""

from __future__ import annotations

import math
import secrets
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path

import numpy as np

from halfmoon import catalog, disk, toml
from halfmoon import config as settings
from halfmoon.budget import Holding
from halfmoon.data import Images, Split
from halfmoon.data.draw import Amount
from halfmoon.data.split import SERVER
from halfmoon.deploy.card import Card
from halfmoon.errors import UserError
from halfmoon.evaluate import Examples, Tally
from halfmoon.experiment import Experiment, Row, play
from halfmoon.ground import Ground, Holdings
from halfmoon.net import bounds
from halfmoon.net.journal import Journal
from halfmoon.net.member import labeled_images
from halfmoon.net.patterns import Patterns
from halfmoon.net.plan import Plan
from halfmoon.net.register import Register
from halfmoon.net.remote import Inspection, Remote
from halfmoon.net.roster import Post, Roster
from halfmoon.net.sums import shown
from halfmoon.pieces import batch_rules, budget, computing, device, examples, guards, method, task, views
from halfmoon.record import TIMINGS, RunFolder
from halfmoon.site.prepare import HOME
from halfmoon.store import Store, StoreShelf
from halfmoon.types import Work

LOG, SITES, TERMS, NUMBER, SECRET = "serve.log", "sites.json", "terms.json", "number", "secret"


@dataclass(frozen=True)
class Host:
    """The server of a federation: its plan, and the folder of its run."""

    plan: Plan
    path: Path

    @property
    def journal(self) -> Journal:
        """Where the server writes down what happens."""
        return Journal(self.path / LOG)

    @property
    def most(self) -> int:
        """The bytes that no answer of a site may have, whatever it is asked."""
        return bounds.unsure(task(self.plan.config, self.plan.terms.form).network)

    def make(self) -> None:
        """Make the run's folder, or look into the one that is there.

        Raise UserError where that holds something else, and for what could only fail later: folders of the server that
        cannot be read, a method without its labels.
        """
        config = self.plan.config
        for folder in (self.plan.test, self.plan.server):
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

    def _register(self) -> Register:
        terms, rules = self.plan.terms, self.plan.rules
        return Register(terms.sites, rules.strikes, self.path / SITES)

    def _number(self) -> str:
        """Return what tells this run from others of the same federation; made with the first round."""
        path = self.path / NUMBER
        held = disk.read(path)
        if held is None:
            held = secrets.token_hex(16).encode()
            disk.replace(path, held)
        return held.decode()

    def _secret(self) -> bytes:
        """Return what noise is drawn from, which no site may know; made with the first round."""
        path = self.path / SECRET
        held = disk.read(path)
        if held is None:
            held = secrets.token_bytes(32)
            disk.replace(path, held, private=True)
        return held

    def serve(self, post: Post, patience: float = math.inf) -> Row:
        """Play all rounds that are left, and return the run's summary; one that is finished is only read.

        Sites are waited for without end, or for `patience` seconds.

        Raise UserError where the folder holds something else or is in use, or too few sites answer again and again;
        the run goes on when it is served again.
        """
        with self._folder() as folder:
            done = folder.summary()
            if done is not None:
                return done
            with computing(self.plan.config):
                return self._play(folder, post, patience)

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

    def _play(self, folder: RunFolder, post: Post, patience: float) -> Row:
        terms, config, rules = self.plan.terms, self.plan.config, self.plan.rules
        say = self.journal.say
        version = metadata.version("halfmoon")
        loaded = folder.load()
        for warning in loaded.warnings if loaded else []:
            say(warning)
        say(f"{terms.said()}; halfmoon {version}")
        disk.replace(self.path / TERMS, terms.text.encode())
        roster = Roster(post, terms, version, rules.round_timeout, rules.absence, say)
        experiment = self._experiment(roster, version, patience)
        if loaded:
            say(f"going on after round {loaded.round}")
        roster.gather(rules.quorum(config.cohort), patience)
        runtime = experiment.runtime
        played = play(experiment, folder, loaded, lambda row: say(_told(row, config.rounds)))
        if isinstance(runtime, Remote) and experiment.test is None:
            said = runtime.concluded(played["model"])
            if said is not None:
                say(f"the sites' own test images: accuracy {said.row()['accuracy']:.2%}")
                played |= {"confusion": said.confusion.tolist(), "accuracy": _accuracy(folder, said, config.rounds)}
        summary = _summary(self.plan, folder, played)
        folder.finish(played["model"], _card(self.plan, experiment).render(), summary)
        say(f"finished: the model is {self.path / 'model.safetensors'}")
        return summary

    def _experiment(self, roster: Roster, version: str, patience: float) -> Experiment:
        terms, config, rules = self.plan.terms, self.plan.config, self.plan.rules
        shared, seen = task(config, terms.form), views(config, terms.form)
        entry = catalog.entry(config.method)
        store = Store(cap=config.memory_cap * 1_000_000)
        place = device(config)
        test = None if self.plan.test is None else examples(self._labeled(self.plan.test), place)
        batching, serving = batch_rules(config)
        measure = budget(config, shared)
        server = None
        if self.plan.server is not None and config.labels_at == "server":
            held = _served(examples(self._labeled(self.plan.server), place), len(terms.sites))
            shelf = StoreShelf(store, "client/", place)
            server = Ground(held, seen, batching, serving, measure, config.seed, "loop", shelf)

        def most(work: Work, site: str) -> tuple[Amount, int]:
            said = roster.joined[site]
            images = said.labeled + said.unlabeled
            given = Holding(said.labeled, images if config.reuse_labeled else said.unlabeled)
            own = Holding(images, 0) if entry.all_labels else given
            return measure.amount(batching, work, own, given), images

        def tests(site: str) -> int:
            return roster.joined[site].tests if site in roster.joined else 0

        runtime = Remote(
            method(config),
            shared,
            seen,
            roster,
            terms.sites,
            federation=terms.hash,
            version=version,
            run=self._number(),
            cohort=config.cohort,
            seed=config.seed,
            device=place,
            server=server,
            store=store,
            # A bound from what the others sent would let one site's update decide whose counts.
            rules=rules if config.dp_clip is None else replace(rules, norm_bound=0.0),
            register=self._register(),
            secret=None if config.dp_clip is None else self._secret(),
            inspection=Inspection(Patterns(shared, seen, terms.form.image, config.seed), most, tests),
            say=self.journal.say,
            ready=lambda wanted: roster.gather(wanted, patience, 0.0),
            guards=guards(config, self._secret(), self.path, summed=config.secure_aggregation),
            keys=(lambda: shown(roster.joined)) if config.secure_aggregation else None,
        )
        return Experiment(
            runtime.method, shared, runtime, test, config.seed, config.evaluate_every, config.checkpoint_every
        )


def _accuracy(folder: RunFolder, last: Tally, rounds: int) -> Row:
    """Return the last and the best accuracy on the sites' own test images."""
    tested = [(row["exam"]["accuracy"], row["exam"]["round"]) for row in folder.rows() if row.get("exam")]
    final = last.row()["accuracy"]
    best, best_round = max([*tested, (final, rounds)], key=lambda each: (each[0], -each[1]))
    return {"last": final, "best": best, "best_round": best_round}


def _served(rows: Examples, sites: int) -> Holdings:
    count = len(rows.labels)
    return Holdings(rows, Split(np.full(count, SERVER), np.ones(count, bool), sites))


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


def _card(plan: Plan, experiment: Experiment) -> Card:
    form = plan.terms.form
    return Card(
        classes=form.classes,
        image=form.image,
        taken=form.image[1:],
        shrink=1,
        mean=form.mean,
        std=form.std,
        network=experiment.task.network,
        method=plan.config.method,
        config=_words(plan),
    )


def _told(row: Row, rounds: int) -> str:
    """Return a round's line in words."""
    test = row.get("test")
    exam = row.get("exam")
    said = f", accuracy {test['accuracy']:.2%}" if test else ""
    if exam:
        said = f"; the model before it: accuracy {exam['accuracy']:.2%} at {exam['sites']} sites"
    loss = row["train"].get("loss")
    told = f", mean loss {loss:.4f}" if loss is not None else ""
    guard = row.get("guard") or {}
    if "epsilon" in guard:
        said += f"; epsilon {guard['epsilon']:.4g} (delta {guard['delta']:g})"
    return f"round {row['round']} of {rounds}: {len(row['cohort'])} sites{told}{said}"


def _summary(plan: Plan, folder: RunFolder, played: Row) -> Row:
    config = plan.config
    seconds = sum(row.get("seconds", 0.0) for row in disk.read_rows(folder.path / TIMINGS))
    return {
        "method": config.method,
        "title": catalog.entry(config.method).title,
        "data": config.data,
        "federation": plan.terms.hash,
        "sites": list(plan.terms.sites),
        "seed": config.seed,
        "rounds": config.rounds,
        "accuracy": played["accuracy"],
        "cost": played["cost"],
        "classes": list(plan.terms.form.classes),
        "confusion": played["confusion"],
        "seconds": round(seconds, 1),
        **({"guards": chosen} if (chosen := settings.guarding(config)) else {}),
        **{name: played[name] for name in ("guard", "ended") if played[name] is not None},
        "finished": True,
    }
