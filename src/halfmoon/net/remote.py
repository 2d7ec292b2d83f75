"""The server's runtime where the clients are sites behind a link: the same rounds, the visits elsewhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from halfmoon import tree
from halfmoon.client import Errand, Outcome
from halfmoon.data.draw import Views
from halfmoon.data.split import SERVER
from halfmoon.errors import UserError
from halfmoon.experiment import Row
from halfmoon.ground import Ground
from halfmoon.net.message import Malformed, Reply, Request
from halfmoon.rounds import Rounds
from halfmoon.store import Store
from halfmoon.tree import Tree
from halfmoon.types import Method, Task


class Link(Protocol):
    """What carries messages to sites and back; it knows nothing of what they say."""

    def exchange(self, requests: Mapping[str, bytes]) -> Mapping[str, bytes]:
        """Send a request to each named site and return the replies that came, by name."""
        ...


class Remote(Rounds):
    """A runtime whose client k is the site `names[k]`; `server` has the server's own labeled rows, where it has some.

    Cohorts are drawn by number, so the order of the names is a part of the federation. Replies are taken in the order
    of the numbers, whatever order they came in.
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
        cohort: int,
        seed: int,
        server: Ground | None = None,
        store: Store | None = None,
    ) -> None:
        super().__init__(
            method,
            task,
            views,
            clients=len(names),
            cohort=cohort,
            seed=seed,
            device=torch.device("cpu"),
            confident=1.0,
            silent=0.0,
            store=store,
        )
        self.link, self.names, self.server = link, tuple(names), server
        self.federation, self.version = federation, version

    @property
    def labeled(self) -> int:
        """Return how many labeled images the server itself has."""
        return 0 if self.server is None else self.server.holdings.own(SERVER).labeled

    def prior(self, model: Tree, per_class: Sequence[float]) -> Row | None:
        """Return None: the server sees no unlabeled image."""
        return None

    def _visit(self, errand: Errand, clients: Sequence[int], down: Tree, each: Tree) -> list[Outcome]:
        if list(clients) == [SERVER]:
            assert self.server is not None, "a method asks a server for its labels where it has some"
            return self.server.visit(errand, clients, None, down, each, self._quality)
        work = next(name for name, known in self.works.items() if known is errand.work)
        requests = {
            self.names[client]: Request(
                self.federation, self.version, errand.round, errand.trip, work, {**down, **tree.index(each, k)}
            ).to_bytes()
            for k, client in enumerate(clients)
        }
        replies = self.link.exchange(requests)
        return [self._read(self.names[client], replies, errand, work) for client in clients]

    def _read(self, name: str, replies: Mapping[str, bytes], errand: Errand, work: str) -> Outcome:
        if name not in replies:
            raise UserError(f"site {name} did not answer in round {errand.round + 1}; start it, and resume the run.")
        try:
            reply = Reply.from_bytes(replies[name])
        except Malformed as error:
            raise UserError(f"site {name} answered what cannot be used in round {errand.round + 1}: {error}") from error
        asked = (self.federation, self.version, errand.round, errand.trip, work)
        if (reply.federation, reply.version, reply.round, reply.trip, reply.work) != asked:
            raise UserError(
                f"site {name} answered round {reply.round + 1}, trip {reply.trip + 1} ({reply.work}), when it was "
                f"asked for round {errand.round + 1}, trip {errand.trip + 1} ({work}): it is late, or of another "
                "federation."
            )
        return reply.outcome()
