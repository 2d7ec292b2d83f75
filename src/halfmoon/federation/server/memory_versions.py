"""Which client update of each site was the last that counted and left a memory there: the server says it to the
sites."""

from __future__ import annotations

import torch

from halfmoon.federation.site.memory import RoundKey
from halfmoon.storage.state_store import Store

KEY = "visits"


class MemoryVersions:
    """The last visits of sites, kept in the server's store, so that a checkpoint has them.

    Those of a round count when it is over: `keep`; a round that begins again has had none: `drop`.
    """

    def __init__(self, store: Store) -> None:
        """Begin with none."""
        self.store = store
        self._kept: dict[str, RoundKey] = {}
        self._new: dict[str, RoundKey] = {}
        self._saved: tuple[dict[str, RoundKey], dict[str, RoundKey]] = (
            {},
            {},
        )  # as of the older checkpoint and the newer

    def known(self, site: str) -> list[int]:
        """Return the last client update of a site that counts, nothing where there is none."""
        return list(self._new.get(site, self._kept.get(site, ())))

    def safe(self, site: str) -> list[int]:
        """Return the oldest visit that may count again: that of the checkpoint to fall back on."""
        return list(self._saved[0].get(site, ()))

    def add(self, site: str, visit: RoundKey) -> None:
        """Take note of a client update in the round that is played."""
        self._new[site] = visit

    def drop(self) -> None:
        """Forget the client updates of the round that is played."""
        self._new = {}

    def keep(self) -> None:
        """Take over the client updates of the round that is over."""
        if self._new:
            self._kept |= self._new
            self.store.put(KEY, {site: torch.tensor(visit) for site, visit in self._kept.items()})
        self._new = {}

    def saved(self) -> None:
        """Take note that what counts is on the disk."""
        self._saved = (self._saved[1], dict(self._kept))

    def restore(self) -> None:
        """Go on from what the store holds."""
        held = self.store.get(KEY) or {}
        rows = {site: leaf.tolist() for site, leaf in held.items()}
        self._kept = {site: (row[0], row[1], row[2]) for site, row in rows.items()}
        self._new, self._saved = {}, ({}, {})
