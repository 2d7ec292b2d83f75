"""The server half of a runtime, wherever the clients are: draws cohorts, asks them, and counts what it costs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from halfmoon import rng, tree
from halfmoon.budget import Cost
from halfmoon.client import Errand, Outcome, add, images_a_call
from halfmoon.data.draw import Views
from halfmoon.data.split import SERVER
from halfmoon.evaluate import Quality
from halfmoon.experiment import Report, Row, TooFew
from halfmoon.guards import Guard, Question
from halfmoon.manifest import Contents
from halfmoon.store import Store, StoreShelf
from halfmoon.tree import Tree
from halfmoon.types import Method, Sample, Shelf, Task, Work


class Rounds(ABC):
    """A `halfmoon.experiment.Runtime` whose clients are somewhere: `_visit` knows where.

    A round is `open`, any number of questions, `close`. Everything drawn depends on (seed, round, trip, client) alone.
    A client of the cohort fails to answer with probability `silent`, for a whole round; one always answers. What the
    server's shelf remembers lies in `store`. Uploads pass through `guards`, one after the other, to the method.
    """

    def __init__(
        self,
        method: Method,
        task: Task,
        views: Views,
        *,
        clients: int,
        cohort: int,
        seed: int,
        device: torch.device,
        confident: float,
        silent: float,
        store: Store | None,
        guards: Sequence[Guard] = (),
    ) -> None:
        self.method, self.base, self.task, self.views, self.seed = method, task, task, views, seed
        self.works = method.works(task)
        self.clients, self.size, self.confident, self.silent = clients, cohort, confident, silent
        self.device = device
        self.guards = tuple(guards)
        self.store = Store() if store is None else store
        self.shelf: Shelf = StoreShelf(self.store, "shelf/", device)
        self.cost = Cost()
        self.cohort = self.answered = torch.zeros(0, dtype=torch.int64)
        self._round = self._attempt = self._trip = 0
        self._fair = True  # whether the cohort was drawn from all clients alike
        self._samples: dict[str, Sample] = {}
        self._quality = self._fresh_quality()

    @property
    @abstractmethod
    def labeled(self) -> int:
        """Return how many labeled images the server itself has."""

    @abstractmethod
    def prior(self, model: Tree, per_class: Sequence[float]) -> Row | None:
        """Return what the model leans to (`halfmoon.evaluate.leaning`), None where that cannot be known."""

    @abstractmethod
    def _visit(self, errand: Errand, clients: Sequence[int], down: Tree, each: Tree) -> dict[int, Outcome]:
        """Visit clients (or the `SERVER`); `each` (leaves (K, ...)) is merged into `down`, a slice for each.

        Return what came of it by client, in their order, of those who answered: of one at least, if it is the cohort.
        """

    @abstractmethod
    def again(self, few: TooFew) -> None:
        """Make ready to play the round again that too few have answered, or raise `few`."""

    @abstractmethod
    def bring(self, model: Tree) -> None:
        """Have the model tested with the next question, where clients have test images of their own."""

    @abstractmethod
    def saved(self, round: int) -> None:
        """Take note that the first `round` rounds are on the disk."""

    def open(self, round: int) -> None:
        """Begin a round: draw its cohort, the same for every method of one seed."""
        g = rng.generator(self.seed, "cohort", round)
        self.cohort = torch.randperm(self.clients, generator=g)[: self.size].sort().values
        self.task = self.base.at(round)
        self.works = self.method.works(self.task)
        self._round, self._trip = round, 0
        self._samples, self._quality = {}, self._fresh_quality()

    def ask(self, work: str, down: Tree, each: Tree | None = None, to: Tensor | None = None) -> Tree:
        """Send `down` (and its slice of `each`) to the cohort, or `to` others; return uploads, each leaf (k, ...).

        Of `to` nobody may answer; then there are no uploads: {}.
        """
        asked = self.cohort if to is None else to.cpu()
        there = self._there(asked)
        private = {} if each is None else each
        outcomes = self._ask(self.works[work], asked[there].tolist(), down, tree.map(lambda leaf: leaf[there], private))
        up = tree.stack([outcome.up for outcome in outcomes.values()]) if outcomes else {}
        if up and self.guards:
            place = {client: k for k, client in enumerate(asked.tolist())}
            mine = torch.tensor([place[client] for client in outcomes], dtype=torch.int64)
            each = tree.map(lambda leaf: leaf[mine.to(leaf.device)], private)
            at = (self._round, self._attempt, self._trip - 1)
            drawn = to is None and self._fair
            up = self._guarded(Question(*at, work, down, each, tuple(outcomes), len(asked), drawn), up)
        else:
            self.answered = torch.tensor(list(outcomes), dtype=torch.int64)
        mute = asked[~torch.isin(asked, self.answered)]
        self.cohort = self.cohort[~torch.isin(self.cohort, mute)]
        lost = len(asked) - len(self.answered)  # they are sent something too
        self.cost.bytes_down += lost * (tree.nbytes(down) + tree.nbytes(private) // len(asked))
        return up

    def _guarded(self, question: Question, up: Tree) -> Tree:
        """Return the uploads as the guards let them through; those whose answers do not count have not answered."""
        for guard in self.guards:
            places, up = guard.uploads(question, up)
            if not places:
                what = f"round {question.round + 1}, trip {question.trip + 1} ({question.work})"
                raise TooFew(f"{what} has no usable upload of {question.asked}.")
            question = question if len(places) == len(question.clients) else question.only(places)
        self.answered = torch.tensor(question.clients, dtype=torch.int64)
        return up

    def ended(self, round: int) -> str | None:
        """Return why `round` may not be played, None where it may."""
        return next((why for guard in self.guards if (why := guard.ended(round)) is not None), None)

    def ask_server(self, work: str, down: Tree) -> Tree:
        """Do a work at the server, on its own labeled images; nothing travels. `down` is all that it starts from."""
        traffic = self.cost.bytes_down, self.cost.bytes_up
        outcome = self._ask(self.works[work].at_server, [SERVER], down, {})[SERVER]
        self.cost.bytes_down, self.cost.bytes_up = traffic
        return outcome.up

    def stored(self, server: int) -> None:
        """Take note of the bytes of the server's tree; what lies on its shelf counts too."""
        beside = self.store.held("shelf/") + self.store.held(f"client/{SERVER}")
        self.cost.stored_server = max(self.cost.stored_server, server + beside)

    def close(self) -> Report:
        """End the round: what it measured and what the run has cost so far."""
        said = {name: value for guard in self.guards for name, value in guard.row().items()}
        return Report(self.cohort.tolist(), self._samples, self._quality.row(), self.cost.row(), guard=said or None)

    def state(self) -> Tree:
        """Return a copy of all that is remembered here; a checkpoint commits the store instead."""
        shelves = {"shelf": self.shelf}
        return {name: {key: shelf.get(key) for key in shelf.keys()} for name, shelf in shelves.items()}  # noqa: SIM118

    def restore(self, clients: Contents, cost: dict[str, int]) -> None:
        """Go on from a checkpoint."""
        self.store.restore(clients)
        self.cost = Cost(**cost)

    def _ask(self, work: Work, clients: Sequence[int], down: Tree, each: Tree) -> dict[int, Outcome]:
        """Visit clients (or the server) and count what it takes."""
        errand = Errand(work, self.views, self.seed, self._round, self._trip, images_a_call(self.device))
        self._trip += 1
        outcomes = self._visit(errand, clients, down, each)
        for client, outcome in outcomes.items():
            if client != SERVER:
                self.cost.stored_client = max(self.cost.stored_client, outcome.kept)
            for name, new in outcome.samples.items():
                self._samples[name] = add(self._samples.get(name), new)
            passes = work.passes(outcome.amount.labeled, outcome.amount.unlabeled)
            self.cost.visit(outcome.amount, passes, outcome.swept)
            self.cost.bytes_down += outcome.traffic[0]
            self.cost.bytes_up += outcome.traffic[1]
        return outcomes

    def _there(self, asked: Tensor) -> Tensor:
        """Return the places in `asked` of those who answer in this round; at least one does."""
        if not self.silent:
            return torch.arange(len(asked))
        draws = [
            float(torch.rand((), generator=rng.generator(self.seed, "silent", self._round, k))) for k in asked.tolist()
        ]
        there = [place for place, drawn in enumerate(draws) if drawn >= self.silent]
        return torch.tensor(there or [max(range(len(draws)), key=draws.__getitem__)])

    def _fresh_quality(self) -> Quality:
        return Quality(self.base.network.classes, self.confident, self.device)
