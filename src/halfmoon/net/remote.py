"""The server's runtime where the clients are sites behind a link: the same rounds, the visits elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from halfmoon import rng, tree
from halfmoon.client import Errand, Outcome
from halfmoon.data.draw import Amount, Views
from halfmoon.data.split import SERVER
from halfmoon.errors import UserError
from halfmoon.evaluate import Tally
from halfmoon.experiment import Report, Row, TooFew
from halfmoon.ground import Ground
from halfmoon.guards import Guard, Question
from halfmoon.guards.stream import keystream, subkey
from halfmoon.manifest import Contents
from halfmoon.net import bounds
from halfmoon.net.checks import implausible, misfit, norms, outsized
from halfmoon.net.exam import Exam
from halfmoon.net.message import LARGEST, Malformed, Refusal, Reply, Request, read, write
from halfmoon.net.patterns import Pattern, Patterns, pattern_of
from halfmoon.net.plan import Rules
from halfmoon.net.register import Register
from halfmoon.net.roster import Answer
from halfmoon.net.sums import MaskedSum, layout, summed, uploads
from halfmoon.net.visits import Visits
from halfmoon.rounds import Rounds
from halfmoon.store import Store, StoreShelf
from halfmoon.tree import Tree
from halfmoon.types import Method, Sample, Shelf, Task, Work

CPU = torch.device("cpu")


class Link(Protocol):
    """What carries messages to sites and back; it knows nothing of what they say."""

    def exchange(self, requests: Mapping[str, bytes], what: str) -> Mapping[str, Answer]:
        """Send each named site a request, and return what each answered; `what` says in words what it is."""
        ...


@dataclass(frozen=True)
class Inspection:
    """What is known of sites before they answer, to judge their answers by.

    `most` returns how much a visit of a work to a site may look at, and of how many images the site told; `tests` of
    how many test images of its own it told.
    """

    patterns: Patterns
    most: Callable[[Work, str], tuple[Amount, int]]
    tests: Callable[[str], int]


@dataclass
class Draft:
    """A shelf whose changes count when the round does: a round that is played again finds it as it was."""

    shelf: Shelf
    changed: dict[str, Tree] = field(default_factory=dict)

    def get(self, key: str) -> Tree | None:
        """Return a tree, None where there is none."""
        return self.changed[key] if key in self.changed else self.shelf.get(key)

    def put(self, key: str, tree: Tree) -> None:
        """Keep a tree until the round is over."""
        self.changed[key] = tree

    def keys(self) -> list[str]:
        """Return the names, sorted."""
        return sorted({*self.shelf.keys(), *self.changed})

    def keep(self) -> None:
        """Take the changes over."""
        for key, value in self.changed.items():
            self.shelf.put(key, value)
        self.changed.clear()


class Remote(Rounds):
    """A runtime whose client k is the site `names[k]`; `server` has the server's own labeled rows, where it has some.

    Cohorts are drawn by number, so the order of the names is a part of the federation. Replies are taken in the order
    of the numbers, whatever order they came in. A site without a usable answer leaves its round; a round with too few
    is played again, with other sites where there are some. `register` counts unusable answers, and who is set aside is
    drawn no more. `run` tells this run from others of the same federation. Without an `inspection` replies are only
    read, not judged. `ready` returns when so many sites can be asked: a round is not played again before. With a
    `secret` the cohorts are drawn from it, not from the seed, which every site knows. With `keys`, those that sites
    showed when they joined, uploads come under masks, and their sum is all that can be read (it needs an `inspection`).
    """

    def __init__(
        self,
        method: Method,
        task: Task,
        views: Views,
        link: Link,
        names: Sequence[str],
        *,
        federation: str,
        version: str,
        run: str,
        cohort: int,
        seed: int,
        device: torch.device = CPU,
        server: Ground | None = None,
        store: Store | None = None,
        rules: Rules | None = None,
        register: Register | None = None,
        inspection: Inspection | None = None,
        say: Callable[[str], None] = lambda _: None,
        ready: Callable[[int], None] = lambda _: None,
        guards: Sequence[Guard] = (),
        secret: bytes | None = None,
        keys: Callable[[], Mapping[str, bytes]] | None = None,
    ) -> None:
        super().__init__(
            method,
            task,
            views,
            clients=len(names),
            cohort=cohort,
            seed=seed,
            device=device,
            confident=1.0,
            silent=0.0,
            store=store,
            guards=guards,
        )
        self.link, self.names = link, tuple(names)
        self.server = None if server is None else replace(server, memories=Draft(server.memories))
        self.federation, self.version, self.run = federation, version, run
        self.rules = rules or Rules()
        self.register = register or Register(names, self.rules.strikes, None)
        self.inspection, self.say, self.ready = inspection, say, ready
        self._draft = Draft(StoreShelf(self.store, "shelf/", self.device))
        self.shelf: Shelf = self._draft
        self._failed: set[int] = set()  # of this round
        self._left: set[int] = set()  # of the cohort, those who have not failed in this attempt
        self._drawn = 0
        self._secret, self._keys = secret, keys
        self._visits = Visits(self.store)
        self._brought: Tree = {}
        self._exam: Exam | None = None

    @property
    def labeled(self) -> int:
        """Return how many labeled images the server itself has."""
        return 0 if self.server is None else self.server.holdings.own(SERVER).labeled

    def prior(self, model: Tree, per_class: Sequence[float]) -> Row | None:
        """Return None: the server sees no unlabeled image."""
        return None

    def open(self, round: int) -> None:
        """Begin a round, or begin it again: draw its cohort, at first as a simulation does."""
        super().open(round)
        self._brought, self._exam = {}, None
        self._visits.drop()
        for draft in self._drafts():
            draft.changed.clear()
        order = self._order(round)
        here = [k for k in order if self.names[k] not in self.register.aside]
        if not here:
            raise TooFew("every site is set aside; look into serve.log, and let sites back in with --readmit.")
        fresh = [k for k in here if k not in self._failed]
        # Those who have failed are asked again only where the others are too few.
        chosen = [*fresh, *(k for k in here if k in self._failed)][: self.size]
        self.cohort = torch.tensor(chosen, dtype=torch.int64).sort().values
        self._left, self._drawn = set(chosen), len(chosen)
        self._fair = not self._attempt and len(here) == self.clients

    def _order(self, round: int) -> list[int]:
        """Return all clients in the random order in which they are drawn for a round, or for another attempt at it."""
        if self._secret is not None:
            words = keystream(subkey(self._secret, "cohort", round, self._attempt), self.clients)
            return np.argsort(words, kind="stable").tolist()
        path = ("cohort", round, self._attempt) if self._attempt else ("cohort", round)
        return torch.randperm(self.clients, generator=rng.generator(self.seed, *path)).tolist()

    def again(self, few: TooFew) -> None:
        """Make ready to play the round again, or raise `few` when that was tried often enough."""
        self._attempt += 1
        if self._attempt >= self.rules.attempts or len(self.register.aside) == self.clients:
            raise few
        self.say(f"round {self._round + 1} is played again, attempt {self._attempt + 1}: {few}")
        self.ready(self.rules.quorum(self.size))

    def bring(self, model: Tree) -> None:
        """Have the model tested with the next question by those who have test images of their own."""
        self._brought = model

    def concluded(self, model: Tree) -> Tally | None:
        """Return how a model does on the test images of all sites that have some and answer, None where none does."""
        names = [name for name in self.names if self._tests(name) and name not in self.register.aside]
        requests = {name: self._request(name, self.task.rounds - 1, self._trip, "", {}, model) for name in names}
        exam = Exam()
        if names:
            asked = {name: write(request) for name, request in requests.items()}
            for name, answer in self.link.exchange(asked, "the last test").items():
                reply = self._read(name, answer, requests[name], self._most(None, requests[name], {}))
                if reply is not None:
                    self._add(exam, name, reply)
        return exam.tally()

    def saved(self, round: int) -> None:
        """Take note of what is on the disk: the newest checkpoint, and the one to fall back on."""
        self._visits.saved()

    def restore(self, clients: Contents, cost: dict[str, int]) -> None:
        """Go on from a checkpoint."""
        super().restore(clients, cost)
        self._visits.restore()

    def stored(self, server: int) -> None:
        """Take note of the bytes of the server's tree; the round is over, so what it put on shelves counts."""
        self._keep()
        super().stored(server)

    def close(self) -> Report:
        """End the round: what it measured and what the run has cost so far."""
        self._keep()
        self._attempt = 0
        self._failed.clear()
        report = super().close()
        said = self._exam and self._exam.tally()
        if not (self._exam and said):
            return report
        return report._replace(exam={"round": self._round, "sites": self._exam.sites, **said.row()})

    def _keep(self) -> None:
        """Take over what a round that is over has changed; once it is done, there is nothing more to take."""
        for draft in self._drafts():
            draft.keep()
        self._visits.keep()

    def _drafts(self) -> list[Draft]:
        """Return what the server remembers of a round only when it is over."""
        own = None if self.server is None else self.server.memories
        return [self._draft, own] if isinstance(own, Draft) else [self._draft]

    def _visit(self, errand: Errand, clients: Sequence[int], down: Tree, each: Tree) -> dict[int, Outcome]:
        if list(clients) == [SERVER]:
            assert self.server is not None, "a method asks a server for its labels where it has some"
            (outcome,) = self.server.visit(errand, clients, None, down, each, self._quality)
            return {SERVER: outcome}
        name = next(name for name, known in self.works.items() if known is errand.work)
        downs = {
            self.names[k]: {**down, **tree.index(each, place)}
            for place, k in enumerate(clients)
            if self.names[k] not in self.register.aside  # a method may ask others than its cohort
        }
        brought, self._brought = self._brought, {}
        exams = {site: brought if self._tests(site) else {} for site in downs}
        exam = Exam() if any(exams.values()) else None
        self.cost.bytes_down += sum(tree.nbytes(each) for each in exams.values())
        what = f"round {errand.round + 1}, trip {errand.trip + 1} ({name})"
        requests = {
            site: self._request(site, errand.round, errand.trip, name, own, exams[site]) for site, own in downs.items()
        }
        masked = None
        if self._keys is not None:
            places = {self.names[k]: k for k in clients}
            masked = MaskedSum(requests, places, self._keys(), self._asked, what)
            requests = masked.begin()
        answers = self.link.exchange({site: write(request) for site, request in requests.items()}, what)
        replies = {
            site: self._read(
                site,
                answer,
                requests[site],
                self._most(errand if masked is None else None, requests[site], downs[site]),
            )
            for site, answer in answers.items()
        }
        good = self._judged({site: reply for site, reply in replies.items() if reply is not None}, errand, downs)
        if exam is not None:
            for site, reply in good.items():
                self._add(exam, site, reply)
            self._exam = exam
        lost = {k for k in clients if self.names[k] not in good}
        self._failed |= lost
        self._left -= lost
        # Those of its cohort count, in all its trips: a method may ask others as well, of whom some are always away.
        wanted = self.rules.quorum(self._drawn)
        if len(self._left) < wanted:
            raise TooFew(f"{what} has {len(self._left)} usable replies of {self._drawn}, and {wanted} are needed.")
        if masked is not None:
            good = self._unmasked(masked.total(good), good, errand, clients, down, each)
        for site, reply in good.items():
            if reply.kept:
                self._visits.add(site, (errand.round, self._attempt, errand.trip))
        return {k: self._placed(good[self.names[k]].outcome()) for k in clients if self.names[k] in good}

    def _asked(self, requests: Mapping[str, Request], pattern: Pattern, what: str) -> dict[str, Reply]:
        """Return the replies to requests about a masked sum alone; sites without a usable one have failed."""
        answers = self.link.exchange({site: write(request) for site, request in requests.items()}, what)
        good: dict[str, Reply] = {}
        for site, answer in answers.items():
            reply = self._read(site, answer, requests[site], bounds.weight([pattern]))
            fault = None if reply is None else misfit(reply.up, reply.samples, pattern)
            if fault is not None:
                self._refuse(site, fault)
            elif reply is not None:
                good[site] = reply
        self._failed |= {k for k, site in enumerate(self.names) if site in requests and site not in good}
        return good

    def _unmasked(
        self, total: Tensor, good: dict[str, Reply], errand: Errand, clients: Sequence[int], down: Tree, each: Tree
    ) -> dict[str, Reply]:
        """Return the replies of a masked question with the mean of all in the place of each one's update."""
        places = [place for place, k in enumerate(clients) if self.names[k] in good]
        there = tuple(clients[place] for place in places)
        mine = tree.to(tree.map(lambda leaf: leaf[torch.tensor(places, device=leaf.device)], each), CPU)
        at = (errand.round, self._attempt, errand.trip)
        question = Question(*at, "", tree.to(down, CPU), mine, there, len(clients), True)
        whole = {**down, **tree.index(each, places[0])}
        upload = self._plain(errand, whole)
        ups = uploads(question, upload, total, layout(upload, pattern_of(whole)))
        return {self.names[k]: replace(good[self.names[k]], up=up) for k, up in zip(there, ups, strict=True)}

    def _plain(self, errand: Errand, down: Tree) -> Pattern:
        """Return the pattern of the uploads that a masked question hides."""
        pattern = self.inspection and self.inspection.patterns.of(errand, down)
        if not pattern:
            raise UserError("what sites would send cannot be found out, so that no masked sum of it can be read.")
        return pattern

    def _request(self, site: str, round: int, trip: int, work: str, down: Tree, exam: Tree) -> Request:
        known, safe = self._visits.known(site), self._visits.safe(site)
        return Request(
            self.federation, self.version, self.run, round, self._attempt, trip, work, known, safe, down, exam
        )

    def _tests(self, site: str) -> int:
        return 0 if self.inspection is None else self.inspection.tests(site)

    def _add(self, exam: Exam, site: str, reply: Reply) -> None:
        """Count what a site says of a model, if it says something."""
        if not reply.exam:
            return
        if not exam.add(reply.exam, self.base.network.classes, self._tests(site)):
            self.say(f"{site} tested a model in a way that cannot be: that is left out")

    def _placed(self, outcome: Outcome) -> Outcome:
        """Return what came of a visit on the server's device."""
        samples = {name: Sample(*(leaf.to(self.device) for leaf in each)) for name, each in outcome.samples.items()}
        return outcome._replace(up=tree.to(outcome.up, self.device), samples=samples)

    def _most(self, errand: Errand | None, request: Request, down: Tree) -> int:
        """Return the most bytes of an honest site's reply; `errand` is None where none says what it looks like."""
        if self.inspection is None:
            return LARGEST
        network = self.base.network
        pattern = None if errand is None else self.inspection.patterns.of(errand, down)
        if pattern is None and request.work:
            return bounds.unsure(network)
        return bounds.weight([pattern or {}, bounds.examined(network.classes) if request.exam else {}])

    def _read(self, site: str, answer: Answer, request: Request, most: int) -> Reply | None:
        """Return the reply to a request, None where there is none that could be used; no more than `most` is read."""
        if answer.data is None:
            self.say(f"{site} has no part in round {request.round + 1}: {answer.reason}")
            return None
        if answer.reason:
            return self._refuse(site, answer.reason)
        try:
            said = read(answer.data, Reply, Refusal, limit=most)
        except Malformed as error:
            return self._refuse(site, str(error))
        if isinstance(said, Refusal):
            self.say(f"{site} has no part in round {request.round + 1}: {said.reason[:500]}")
            return None
        asked, told = (
            (each.federation, each.version, each.run, each.round, each.attempt, each.trip, each.work)
            for each in (request, said)
        )
        if asked != told:
            return self._refuse(site, f"it answers round {said.round + 1}, trip {said.trip + 1} ({said.work[:40]})")
        return said

    def _judged(self, replies: Mapping[str, Reply], errand: Errand, downs: Mapping[str, Tree]) -> dict[str, Reply]:
        """Return the replies that may touch the model."""
        if self.inspection is None:
            return dict(replies)
        good: dict[str, Reply] = {}
        for site, reply in replies.items():
            pattern = self.inspection.patterns.of(errand, downs[site])
            if self._keys is not None:
                pattern = summed(layout(self._plain(errand, downs[site]), pattern_of(downs[site])))
            fault = misfit(reply.up, reply.samples, pattern)
            fault = fault or implausible(reply, *self.inspection.most(errand.work, site))
            if fault is None:
                good[site] = reply
            else:
                self._refuse(site, fault)
        large = outsized(norms({s: reply.up for s, reply in good.items()}, downs), self.rules.norm_bound)
        for site, fault in large.items():
            self._refuse(site, fault)
        return {site: reply for site, reply in good.items() if site not in large}

    def _refuse(self, site: str, reason: str) -> None:
        """Count an answer that cannot be used, with its reason."""
        aside = self.register.refuse(site, self._round, reason)
        self.say(f"refused in round {self._round + 1}: the answer of {site}: {reason}")
        if aside:
            self.say(f"{site} is set aside after {self.register.limit} unusable answers; --readmit {site} lets it back")
