"""A site: one client of a federation with its own rows and its own memory, which answers what it is asked."""

from __future__ import annotations

from dataclasses import dataclass

from halfmoon.client import Errand, images_a_call
from halfmoon.errors import UserError
from halfmoon.evaluate import Quality
from halfmoon.ground import Ground
from halfmoon.net.message import Reply, Request
from halfmoon.types import Method, Task


class Refused(UserError):
    """A request that a site does not do: another federation, another version, a work that its method does not have."""


@dataclass
class Site:
    """The client `number` of a federation: `ground` has its rows alone, under that number.

    `federation` is the hash of what all agreed on when the site joined, `version` that of its halfmoon.
    """

    number: int
    method: Method
    task: Task
    ground: Ground
    federation: str
    version: str

    def answer(self, data: bytes) -> bytes:
        """Do what a request asks and return the reply; raise Malformed or Refused where it will not."""
        request = Request.from_bytes(data)
        self._check(request)
        task = self.task.at(request.round)
        works = self.method.works(task)
        if request.work not in works:
            raise Refused(
                f"the server asks for {request.work!r}, which the method does not have; it has {list(works)}."
            )
        device = self.ground.holdings.train.labels.device
        rows = images_a_call(device)
        errand = Errand(works[request.work], self.ground.views, self.ground.seed, request.round, request.trip, rows)
        stage = self.ground.holdings.stage(request.round, self.task.rounds)
        # Its unlabeled rows have no labels that pseudo-labels could be compared with: nobody reads this.
        quality = Quality(task.network.classes, 1.0, device)
        (outcome,) = self.ground.visit(errand, [self.number], stage, request.down, {}, quality)
        return Reply.of(request, self.version, outcome).to_bytes()

    def _check(self, request: Request) -> None:
        if request.version != self.version:
            old, new = sorted((self.version, request.version))
            late = "this site" if self.version == old else "the server"
            raise Refused(
                f"this site runs halfmoon {self.version}, the server {request.version}: {late} has to upgrade to {new}."
            )
        if request.federation != self.federation:
            raise Refused(
                f"the server plays federation {request.federation[:8]}, but this site joined {self.federation[:8]}; "
                "join again with the server's configuration."
            )
        if not 0 <= request.round < self.task.rounds:
            raise Refused(f"the server asks for round {request.round + 1} of {self.task.rounds}.")
