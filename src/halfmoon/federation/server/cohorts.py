"""Draws the sites of a round as a simulation does, and others where too few have answered."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from halfmoon.aggregation.secure.csprng import keystream, subkey
from halfmoon.core import rng
from halfmoon.core.errors import UserError, suggest
from halfmoon.engine.loop import TooFewReplies
from halfmoon.engine.runtime import RuntimeSettings
from halfmoon.storage import atomic_io


class Refusals(NamedTuple):
    """The unusable replies of one site; `round` (from 0) and `reason` are those of the last one, if any."""

    name: str
    count: int = 0
    round: int | None = None
    reason: str = ""
    quarantined: bool = False


class Quarantine:
    """The refusals of the sites in `names`; one with `limit` of them (0: never) takes no part until it is readmitted.

    A good reply does not reduce the count. With a `path` each change is on the disk first. Raises UserError where the
    register cannot be read or written.
    """

    def __init__(self, names: Sequence[str], limit: int, path: Path | None) -> None:
        self.limit, self.path = limit, path
        before = {} if path is None else _read(path)
        self._refusals = {name: before.get(name, Refusals(name)) for name in names}

    @property
    def sites(self) -> frozenset[str]:
        return frozenset(row.name for row in self.refusals() if row.quarantined)

    def count_refusal(self, name: str, round: int, reason: str) -> bool:
        """Count a reply that was refused in `round` (from 0); return whether the site is in quarantine from now on."""
        count = self._refusals[name].count + 1
        self._change(Refusals(name, count, round, reason))
        return count == self.limit

    def readmit(self, name: str) -> None:
        if name not in self._refusals:
            raise UserError(f"there is no site {name!r} in this federation: {suggest(name, self._refusals)}")
        self._change(Refusals(name))

    def refusals(self) -> list[Refusals]:
        return [row._replace(quarantined=0 < self.limit <= row.count) for row in self._refusals.values()]

    def _change(self, new: Refusals) -> None:
        refusals = {**self._refusals, new.name: new}
        if self.path is not None:
            _write(self.path, refusals)
        self._refusals = refusals


def _write(path: Path, refusals: dict[str, Refusals]) -> None:
    rows = {
        name: {"count": row.count, "round": row.round, "reason": row.reason}
        for name, row in refusals.items()
        if row.count
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_io.write_atomically(path, (json.dumps({"sites": rows}, indent=1) + "\n").encode())
    except OSError as error:
        raise UserError(
            f"{path}: the list of refused replies cannot be written ({atomic_io.error_reason(error)}); mend that, and go on."
        ) from error


def _read(path: Path) -> dict[str, Refusals]:
    try:
        data = atomic_io.read(path)
        if data is None:
            return {}
        return {name: _row(name, facts) for name, facts in json.loads(data)["sites"].items()}
    except OSError as error:
        raise UserError(
            f"{path}: the register of refused replies cannot be read ({atomic_io.error_reason(error)}); mend that, and go on."
        ) from error
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(
            f"{path} holds no register of refused replies ({type(error).__name__}); restore it, or remove it to count "
            "from 0 again."
        ) from error


def _row(name: str, facts: dict[str, Any]) -> Refusals:
    count, round, reason = facts["count"], facts["round"], facts["reason"]
    if type(count) is not int or type(round) is not int or type(reason) is not str or count < 1 or round < 0:
        raise TypeError(f"the row of {name!r} is not a count, a round and a reason")
    return Refusals(name, count, round, reason)


class CohortSampler:
    """Draws cohorts by number, without sites in quarantine, and counts failures in a round.

    With `settings.cohort_secret` cohorts are drawn from it, not from the seed, which every site knows.
    """

    def __init__(self, names: Sequence[str], settings: RuntimeSettings, quarantine: Quarantine) -> None:
        self.names, self.settings, self.quarantine = tuple(names), settings, quarantine
        self.attempt = 0  # how often the round was played before
        self.remaining: set[int] = set()  # of the cohort, those who have not failed in this attempt
        self.size = 0
        self.uniform = True  # whether the cohort was drawn from all clients alike
        self._failures: set[int] = set()  # of this round

    def draw(self, round: int) -> Tensor:
        """Return a round's cohort, sorted, first those that have not failed in it; raise `TooFewReplies` for none."""
        here = [k for k in self._order(round) if self.names[k] not in self.quarantine.sites]
        if not here:
            raise TooFewReplies("every site is set aside; look into serve.log, and let sites back in with --readmit.")
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
        clients = len(self.names)
        if self.settings.cohort_secret is not None:
            words = keystream(subkey(self.settings.cohort_secret, "cohort", round, self.attempt), clients)
            return np.argsort(words, kind="stable").tolist()
        path = ("cohort", round, self.attempt) if self.attempt else ("cohort", round)
        return torch.randperm(clients, generator=rng.generator(self.settings.seed, *path)).tolist()
