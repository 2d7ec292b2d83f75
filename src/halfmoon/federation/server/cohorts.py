"""Draws the sites of a round as a simulation does, and others where too few have answered."""

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from halfmoon.aggregation.secure.csprng import keystream, subkey
from halfmoon.core import rng
from halfmoon.engine.loop import TooFew
from halfmoon.engine.runtime import RuntimeSettings
from halfmoon.federation.server.quarantine import Quarantine


class CohortSampler:
    """Draws cohorts by number, so the order of the `names` is a part of the federation; counts failures in a round.

    Sites in quarantine are not drawn. With `settings.cohort_secret` cohorts are drawn from it, not from the seed, which
    every site knows.
    """

    def __init__(self, names: Sequence[str], settings: RuntimeSettings, quarantine: Quarantine) -> None:
        self.names, self.settings, self.quarantine = tuple(names), settings, quarantine
        self.attempt = 0  # how often the round was played before
        self.remaining: set[int] = set()  # of the cohort, those who have not failed in this attempt
        self.size = 0
        self.uniform = True  # whether the cohort was drawn from all clients alike
        self._failures: set[int] = set()  # of this round

    def draw(self, round: int) -> Tensor:
        """Return the cohort of a round, sorted; those who have failed in it are drawn only where others are too few.

        Raise `TooFew` where every site is in quarantine.
        """
        here = [k for k in self._order(round) if self.names[k] not in self.quarantine.sites]
        if not here:
            raise TooFew("every site is set aside; look into serve.log, and let sites back in with --readmit.")
        fresh = [k for k in here if k not in self._failures]
        cohort = [*fresh, *(k for k in here if k in self._failures)][: self.settings.cohort]
        self.remaining, self.size = set(cohort), len(cohort)
        self.uniform = not self.attempt and len(here) == len(self.names)
        return torch.tensor(cohort, dtype=torch.int64).sort().values

    def lose(self, clients: Iterable[int]) -> None:
        lost = set(clients)
        self._failures |= lost
        self.remaining -= lost

    def end_round(self) -> None:
        self.attempt = 0
        self._failures.clear()

    def _order(self, round: int) -> list[int]:
        """Return all clients in the random order in which they are drawn for a round, or for another attempt at it."""
        clients = len(self.names)
        if self.settings.cohort_secret is not None:
            words = keystream(subkey(self.settings.cohort_secret, "cohort", round, self.attempt), clients)
            return np.argsort(words, kind="stable").tolist()
        path = ("cohort", round, self.attempt) if self.attempt else ("cohort", round)
        return torch.randperm(clients, generator=rng.generator(self.settings.seed, *path)).tolist()
