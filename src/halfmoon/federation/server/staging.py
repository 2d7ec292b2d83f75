"""Changes of a round at the server, which count only when the round does."""

from dataclasses import dataclass, field

import torch

from halfmoon.api.types import StateStore
from halfmoon.core.tree import Tree
from halfmoon.federation.protocol.messages import RoundKey
from halfmoon.storage.state_store import Store

KEY = "visits"


@dataclass
class StagedStore:
    """A state store whose changes count when the round does: a round that is played again finds it as it was."""

    state_store: StateStore
    changes: dict[str, Tree] = field(default_factory=dict)

    def get(self, key: str) -> Tree | None:
        return self.changes[key] if key in self.changes else self.state_store.get(key)

    def put(self, key: str, tree: Tree) -> None:
        self.changes[key] = tree

    def keys(self) -> list[str]:
        return sorted({*self.state_store.keys(), *self.changes})

    def commit(self) -> None:
        for key, value in self.changes.items():
            self.state_store.put(key, value)
        self.changes.clear()


class MemoryVersions:
    """The last client update of each site that counted and left a memory there; the server tells it to the sites.

    They lie in the server's store, so that a checkpoint has them. Those of a round count when it is over: `commit`; a
    round that begins again has had none: `drop`.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self._current: dict[str, RoundKey] = {}
        self._new: dict[str, RoundKey] = {}
        self._checkpoints: tuple[dict[str, RoundKey], ...] = ({}, {})  # the older and the newer one

    def latest(self, site: str) -> list[int]:
        """Return the last client update of a site that counts, nothing where there is none."""
        return list(self._new.get(site, self._current.get(site, ())))

    def oldest(self, site: str) -> list[int]:
        """Return the oldest client update that may count again: that of the checkpoint to fall back on."""
        return list(self._checkpoints[0].get(site, ()))

    def add(self, site: str, at: RoundKey) -> None:
        self._new[site] = at

    def drop(self) -> None:
        self._new = {}

    def commit(self) -> None:
        """Count the client updates of the round that is over."""
        if self._new:
            self._current |= self._new
            self.store.put(KEY, {site: torch.tensor(at) for site, at in self._current.items()})
        self._new = {}

    def saved(self) -> None:
        """Take note that a checkpoint of the current state is on the disk."""
        self._checkpoints = (self._checkpoints[1], dict(self._current))

    def restore(self) -> None:
        rows = {site: leaf.tolist() for site, leaf in (self.store.get(KEY) or {}).items()}
        self._current = {site: (row[0], row[1], row[2]) for site, row in rows.items()}
        self._new, self._checkpoints = {}, ({}, {})
