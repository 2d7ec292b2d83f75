"""What a server may send: known to a site that trusts no server, by playing a few rounds with made-up clients.

The counterpart of `halfmoon.federation.protocol.tree_spec`. A site trains what comes down, and networks read their
sizes from it: a wider one would be trained as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from halfmoon.aggregation.mean import mean_of
from halfmoon.api.requirements import requirements_of
from halfmoon.api.types import Method, StateStore, Task
from halfmoon.api.uploads import Upload
from halfmoon.core import rng, tree
from halfmoon.core.errors import UserError
from halfmoon.core.tree import Tree
from halfmoon.engine.driver import ClientContext
from halfmoon.engine.sampling import Views
from halfmoon.federation.protocol.header import TYPES
from halfmoon.federation.protocol.tree_spec import TreeSpec, UplinkSpec, spec_of
from halfmoon.storage.state_store import StateView, Store

COHORTS, ROUNDS = (1, 5), 3
"""How many made-up clients there are, and how many rounds they play: what only comes later has come by then.

Of a method that does something else every few rounds (`halfmoon.api.requirements`: `period`) the first such rounds are
played after these.
"""

FREE = -1
"""In place of the first dimension of a leaf that counts something, such as the other clients who have sent a model."""

NAMES = {kind: name for name, kind in TYPES.items()}


@dataclass(frozen=True)
class DownlinkSpec:
    """By the name of a work, what may come down for it; a dimension that is `FREE` goes up to `sites`."""

    known: Mapping[str, list[TreeSpec]]
    sites: int

    @classmethod
    def of(
        cls, method: Method, task: Task, views: Views, image: tuple[int, int, int], seed: int, sites: int
    ) -> DownlinkSpec:
        """Return what a server of the method sends; of a work about which nothing can be found out, nothing."""
        patterns = UplinkSpec(task, views, image, seed)
        known: dict[str, list[TreeSpec]] = {}
        for clients in COHORTS:
            played = _Played(patterns, views, seed, clients)
            try:
                played.play(method, task)
            except _Unknown:
                return cls({}, sites)
            for client_update, seen in played.seen.items():
                for pattern in seen:
                    _add(known.setdefault(client_update, []), pattern)
        return cls(known, sites)

    @classmethod
    def parse(cls, held: Any, sites: int) -> DownlinkSpec:
        """Undo `facts`; raise ValueError, LookupError or TypeError where that cannot be."""
        kinds: Any = {
            client_update: [
                {path: kind and (tuple(kind[0]), TYPES[kind[1]]) for path, kind in pattern.items()} for pattern in each
            ]
            for client_update, each in dict(held).items()
        }
        return cls(kinds, sites)

    def facts(self) -> dict[str, Any]:
        """Return what is known as JSON can say it."""
        return {
            client_update: [
                {path: kind and [list(kind[0]), NAMES[kind[1]]] for path, kind in pattern.items()} for pattern in each
            ]
            for client_update, each in self.known.items()
        }

    def fault(self, client_update: str, pattern: TreeSpec) -> str | None:
        """Return why what came for a work is not what its method sends, None where it is, or nothing is known."""
        # Of several that may come, the one with the most names in common comes last.
        wanted = sorted(self.known.get(client_update, []), key=lambda each: -len(each.keys() ^ pattern.keys()))
        faults = [self._unlike(pattern, each) for each in wanted]
        return None if None in faults or not faults else faults[-1]

    def _unlike(self, found: TreeSpec, wanted: TreeSpec) -> str | None:
        for path in (*wanted, *found):
            if path not in found or path not in wanted:
                return f"{path[:80]!r} {'is missing' if path in wanted else 'was not agreed on'}"
            if not self._alike(found[path], wanted[path]):
                return f"{path[:80]!r} is not of the size or the type that was agreed on"
        return None

    def _alike(self, one: Any, wanted: Any) -> bool:
        if one is None or wanted is None:
            return one is wanted
        (shape, dtype), (sides, kind) = one, wanted
        if len(shape) != len(sides) or dtype != kind:
            return False
        if sides and sides[0] == FREE:
            return 1 <= shape[0] <= self.sites and shape[1:] == sides[1:]
        return shape == sides


class _Unknown(Exception):
    """What made-up clients send could not be found out."""


@dataclass
class _Played:
    """A `halfmoon.api.types.Federation` of made-up clients, who send ones; `seen` has what each work was sent."""

    patterns: UplinkSpec
    views: Views
    seed: int
    clients: int
    seen: dict[str, list[TreeSpec]] = field(default_factory=dict)

    def play(self, method: Method, task: Task) -> None:
        """Play rounds; raise `_Unknown` where that cannot be done."""
        self.state_store: StateStore = StateView(Store(), "state/", torch.device("cpu"))
        self.labeled = 0
        try:
            server = method.start(task, task.network.init(rng.generator(self.seed, "model")))
            period = requirements_of(method, task.network.norm).period
            for number in [*range(ROUNDS), *(k * period - 1 for k in (1, 2, 3) if period > ROUNDS)]:
                # Of a run with fewer rounds the rate of learning is not known later, and does not matter.
                at = replace(task.at(min(number, task.rounds - 1)), round=number)
                self.client_updates, self.round = method.client_updates(at), number
                self.cohort = self.answered = torch.arange(self.clients)
                server = method.round(at, server, self)
        except (UserError, RuntimeError, LookupError, ValueError) as error:
            raise _Unknown from error

    def ask(self, client_update: str, down: Tree, each: Tree | None = None, to: Tensor | None = None) -> Upload:
        """Take note of what is sent, and return what clients might send."""
        self.answered = self.cohort if to is None else to
        ups: list[Tree] = []
        for place in range(len(self.answered)):
            whole = {**down, **tree.index(each or {}, place)}
            self.seen.setdefault(client_update, []).append(spec_of(whole))
            context = ClientContext(self.client_updates[client_update], self.views, self.seed, self.round, 0)
            pattern = self.patterns.of(context, whole)
            if pattern is None:
                raise _Unknown
            ups.append(_made(pattern))
        return Upload.of(tree.stack(ups))

    def average(self, client_update: str, down: Tree) -> Upload:
        """Do as `ask`, and return the mean."""
        return mean_of(
            self.ask(client_update, down), self.client_updates[client_update].needs.uplink, down, client_update
        )

    def ask_server(self, client_update: str, down: Tree) -> Upload:
        """Refuse: nothing that goes down depends on whether the server trains as well."""
        raise _Unknown


def _made(pattern: TreeSpec) -> Tree:
    """Return a tree of ones, of which no mean and no count is 0."""
    found: Tree = {}
    for path, kind in pattern.items():
        *above, name = path.split("/")
        branch = found
        for part in above:
            branch = branch.setdefault(part, {})
        branch[name] = {} if kind is None else torch.ones(kind[0], dtype=kind[1])
    return found


def _add(known: list[TreeSpec], pattern: TreeSpec) -> None:
    """Take a pattern in; one that differs from another in first dimensions alone frees these."""
    for place, other in enumerate(known):
        if other.keys() == pattern.keys():
            merged = {path: _merged(other[path], pattern[path]) for path in pattern}
            if () not in merged.values():
                known[place] = merged
                return
    known.append(pattern)


def _merged(one: Any, other: Any) -> Any:
    """Return what is common to two leaves, () where that is nothing."""
    if one == other:
        return one
    if one is None or other is None or one[1] != other[1] or len(one[0]) != len(other[0]) or one[0][1:] != other[0][1:]:
        return ()
    return ((FREE, *one[0][1:]), one[1])
