"""What a round puts into a state store, kept apart until the round counts."""

from __future__ import annotations

from dataclasses import dataclass, field

from halfmoon.api.types import StateStore
from halfmoon.core.tree import Tree


@dataclass
class StagedStore:
    """A state store whose changes count when the round does: a round that is played again finds it as it was."""

    state_store: StateStore
    changed: dict[str, Tree] = field(default_factory=dict)

    def get(self, key: str) -> Tree | None:
        """Return a tree, None where there is none."""
        return self.changed[key] if key in self.changed else self.state_store.get(key)

    def put(self, key: str, tree: Tree) -> None:
        """Keep a tree until the round is over."""
        self.changed[key] = tree

    def keys(self) -> list[str]:
        """Return the names, sorted."""
        return sorted({*self.state_store.keys(), *self.changed})

    def keep(self) -> None:
        """Take the changes over."""
        for key, value in self.changed.items():
            self.state_store.put(key, value)
        self.changed.clear()
