"""The shapes that a server may send. A site that trusts no server finds them by rounds with made-up clients.

The counterpart of `halfmoon.federation.protocol.tree_spec`. A site trains its downlink, and networks read their sizes
from it: a wider one would be trained as well.
"""

from collections.abc import Callable, Mapping
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
from halfmoon.federation.protocol.header import DTYPES
from halfmoon.federation.protocol.tree_spec import TreeSpec, UploadProbe, build_tree, make_tree_spec
from halfmoon.storage.state_store import StateView, Store

TRIAL_COHORTS, TRIAL_ROUNDS = (1, 5), 3
"""Numbers of made-up clients, and of the rounds that they play: leaves that come later have come by then.

Of a method that does something else every few rounds (`halfmoon.api.requirements`: `period`) the first such rounds are
played after these.
"""

ANY_COUNT = -1
"""In place of the first dimension of a leaf that counts something, such as the other clients who have sent a model."""

DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class DownloadSpecs:
    """By the name of a client update, the shapes of its downlink; a dimension that is `FREE` goes up to `sites`."""

    specs: Mapping[str, list[TreeSpec]]
    sites: int

    @classmethod
    def from_trial(
        cls, method: Method, task: Task, views: Views, image: tuple[int, int, int], seed: int, sites: int
    ) -> "DownloadSpecs":
        """Return the shapes that a server of the method sends; nothing where one cannot be computed."""
        task = replace(task, upload_precision="float32")  # as the server computes with what comes
        uplinks = UploadProbe(task, views, image, seed)
        specs: dict[str, list[TreeSpec]] = {}
        for clients in TRIAL_COHORTS:
            trial = _Trial(uplinks, views, seed, clients)
            try:
                trial.play(method, task)
            except _Unknown:
                return cls({}, sites)
            for client_update, downlinks in trial.downlinks.items():
                for spec in downlinks:
                    _add(specs.setdefault(client_update, []), spec)
        return cls(specs, sites)

    @classmethod
    def from_json(cls, facts: Any, sites: int) -> "DownloadSpecs":
        return cls(_map(dict(facts), lambda kind: (tuple(kind[0]), DTYPES[kind[1]])), sites)

    def to_json(self) -> dict[str, Any]:
        return _map(self.specs, lambda kind: [list(kind[0]), DTYPE_NAMES[kind[1]]])

    def fault(self, client_update: str, spec: TreeSpec) -> str | None:
        """Return how a downlink differs from the method's; None where it does not, or nothing is known."""
        # Of several shapes, the one with the most names in common comes last.
        specs = sorted(self.specs.get(client_update, []), key=lambda own: -len(own.keys() ^ spec.keys()))
        faults = [self._difference(spec, own) for own in specs]
        return None if None in faults or not faults else faults[-1]

    def _difference(self, spec: TreeSpec, own: TreeSpec) -> str | None:
        for path in (*own, *spec):
            if path not in spec or path not in own:
                return f"{path[:80]!r} {'is missing' if path in own else 'was not agreed on'}"
            if not self._alike(spec[path], own[path]):
                return f"{path[:80]!r} is not of the size or the type that was agreed on"
        return None

    def _alike(self, kind: Any, own: Any) -> bool:
        if kind is None or own is None:
            return kind is own
        (shape, dtype), (sides, own_dtype) = kind, own
        if len(shape) != len(sides) or dtype != own_dtype:
            return False
        if sides and sides[0] == ANY_COUNT:
            return 1 <= shape[0] <= self.sites and shape[1:] == sides[1:]
        return shape == sides


def _map(specs: Mapping[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    return {
        client_update: [{path: kind and change(kind) for path, kind in spec.items()} for spec in own]
        for client_update, own in specs.items()
    }


class _Unknown(Exception):
    """The uploads of made-up clients could not be computed."""


@dataclass
class _Trial:
    """A `halfmoon.api.types.Federation` of made-up clients, who send ones; `downlinks` records what each was sent."""

    uplinks: UploadProbe
    views: Views
    seed: int
    clients: int
    downlinks: dict[str, list[TreeSpec]] = field(default_factory=dict)

    def play(self, method: Method, task: Task) -> None:
        """Play rounds; raise `_Unknown` where that cannot be done."""
        self.state_store: StateStore = StateView(Store(), "state/", torch.device("cpu"))
        self.labeled = 0
        try:
            server = method.start(task, task.network.init(rng.generator(self.seed, "model")))
            period = requirements_of(method, task.network.norm).period
            for number in [*range(TRIAL_ROUNDS), *(k * period - 1 for k in (1, 2, 3) if period > TRIAL_ROUNDS)]:
                # Beyond the last round the learning rate is not known, and does not matter.
                at = replace(task.at(min(number, task.rounds - 1)), round=number)
                self.client_updates, self.round = method.client_updates(at), number
                self.cohort = self.responders = torch.arange(self.clients)
                server = method.round(at, server, self)
        except (UserError, RuntimeError, LookupError, ValueError) as error:
            raise _Unknown from error

    def query(
        self, client_update: str, broadcast: Tree, per_client: Tree | None = None, clients: Tensor | None = None
    ) -> Upload:
        """Record the downlink, and return what clients might send."""
        self.responders = self.cohort if clients is None else clients
        ups: list[Tree] = []
        for place in range(len(self.responders)):
            whole = {**broadcast, **tree.index(per_client or {}, place)}
            self.downlinks.setdefault(client_update, []).append(make_tree_spec(whole))
            context = ClientContext(self.client_updates[client_update], self.views, self.seed, self.round, 0)
            spec = self.uplinks.find_spec(context, whole)
            if spec is None:
                raise _Unknown
            ups.append(
                build_tree(spec, lambda shape, dtype: torch.ones(shape, dtype=dtype))
            )  # no mean and no count is 0
        return Upload.from_tree(tree.stack(ups))

    def average(self, client_update: str, broadcast: Tree) -> Upload:
        return mean_of(
            self.query(client_update, broadcast),
            self.client_updates[client_update].requirements.upload_spec,
            broadcast,
            client_update,
        )

    def query_server(self, client_update: str, broadcast: Tree) -> Upload:
        raise _Unknown


def _add(specs: list[TreeSpec], spec: TreeSpec) -> None:
    """Add a shape; one that differs from another in first dimensions alone frees these."""
    for place, other in enumerate(specs):
        if other.keys() == spec.keys():
            merged = {path: _merge(other[path], spec[path]) for path in spec}
            if () not in merged.values():
                specs[place] = merged
                return
    specs.append(spec)


def _merge(one: Any, other: Any) -> Any:
    if one == other:
        return one
    if one is None or other is None or one[1] != other[1] or len(one[0]) != len(other[0]) or one[0][1:] != other[0][1:]:
        return ()
    return ((ANY_COUNT, *one[0][1:]), one[1])
