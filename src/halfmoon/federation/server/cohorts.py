"""Sampling of cohorts, as in a simulation; replacement of failed sites; quarantine of sites with unusable replies."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from halfmoon.aggregation.secure.csprng import derive_subkey, generate_keystream
from halfmoon.core import rng
from halfmoon.core.errors import UserError, suggest
from halfmoon.engine.loop import TooFewReplies
from halfmoon.engine.runtime import RuntimeSettings
from halfmoon.storage import atomic_io


class Refusals(NamedTuple):
    """The unusable replies of one site.

    Attributes:
        name: the site.
        count: number of unusable replies.
        round: round of the last one, from 0.
        reason: why the last one was unusable.
        quarantined: whether the site has reached the limit.
    """

    name: str
    count: int = 0
    round: int | None = None
    reason: str = ""
    quarantined: bool = False


class Quarantine:
    """Counts the unusable replies of sites. A site that reaches the limit is in quarantine until it is readmitted.

    A good reply does not reduce the count.
    """

    def __init__(self, names: Sequence[str], limit: int, path: Path | None) -> None:
        """Load the sites' counts of unusable replies, by which they are put into quarantine.

        Args:
            names: the sites.
            limit: number of unusable replies that put a site into quarantine; 0 for never.
            path: the file of the counts, which is written before a change takes effect; None to count in memory.

        Raises:
            UserError: if the file cannot be read. The methods raise it if the file cannot be written.
        """
        self.limit = limit
        self.path = path
        stored = {} if path is None else _read(path)
        self._refusals = {name: stored.get(name, Refusals(name)) for name in names}

    @property
    def sites(self) -> frozenset[str]:
        """The sites in quarantine."""
        return frozenset(row.name for row in self.refusals() if row.quarantined)

    def count_refusal(self, name: str, round: int, reason: str) -> bool:
        """Count an unusable reply of `round` (from 0); return whether it puts the site into quarantine."""
        count = self._refusals[name].count + 1
        self._change(Refusals(name, count, round, reason))
        return count == self.limit  # not above it, so that the caller logs the quarantine once

    def readmit(self, name: str) -> None:
        """Reset the count of a site; raise UserError for an unknown site."""
        if name not in self._refusals:
            raise UserError(f"there is no site {name!r} in this federation: {suggest(name, self._refusals)}")
        self._change(Refusals(name))

    def refusals(self) -> list[Refusals]:
        """List the counts of all sites."""
        return [row._replace(quarantined=0 < self.limit <= row.count) for row in self._refusals.values()]

    def _change(self, new: Refusals) -> None:
        refusals = {**self._refusals, new.name: new}
        # Written first: a restart of the server must not reset a count that has taken effect.
        if self.path is not None:
            _write(self.path, refusals)
        self._refusals = refusals


def _write(path: Path, refusals: dict[str, Refusals]) -> None:
    """Write the counts of unusable replies to a JSON file, as {"sites": {name: {"count", "round", "reason"}}}.

    Round (from 0) and reason are those of a site's last unusable reply. Sites without any are left out.

    Raises:
        UserError: if the file cannot be written.
    """
    rows = {}
    for name, row in refusals.items():
        if row.count:
            rows[name] = {"count": row.count, "round": row.round, "reason": row.reason}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_io.write_atomically(path, (json.dumps({"sites": rows}, indent=1) + "\n").encode())
    except OSError as error:
        raise UserError(
            f"{path}: the register of refused replies cannot be written ({atomic_io.error_reason(error)}); repair that and start again."
        ) from error


def _read(path: Path) -> dict[str, Refusals]:
    """Read the counts of unusable replies that `_write` has written; empty if there is no file.

    Raises:
        UserError: if the file cannot be read, or has another format.
    """
    try:
        data = atomic_io.read(path)
        if data is None:
            return {}
        rows = json.loads(data)["sites"]
        return {name: _parse_row(name, row) for name, row in rows.items()}
    except OSError as error:
        raise UserError(
            f"{path}: the register of refused replies cannot be read ({atomic_io.error_reason(error)}); repair that and start again."
        ) from error
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(
            f"{path} is not a register of refused replies ({type(error).__name__}); restore it, or delete it to reset the "
            "counts."
        ) from error


def _parse_row(name: str, row: dict[str, Any]) -> Refusals:
    count = row["count"]
    round = row["round"]
    reason = row["reason"]
    if type(count) is not int or type(round) is not int or type(reason) is not str or count < 1 or round < 0:
        raise TypeError(f"the row of {name!r} is not a count, a round and a reason")
    return Refusals(name, count, round, reason)


class CohortSampler:
    """Samples cohorts of client numbers, without sites in quarantine, and tracks failures within a round.

    Attributes:
        attempt: number of earlier attempts at the round.
        remaining: clients of the cohort that have not failed in this attempt.
        size: size of the cohort.
        uniform: whether the cohort was sampled uniformly from all clients.
    """

    def __init__(self, names: Sequence[str], settings: RuntimeSettings, quarantine: Quarantine) -> None:
        """Prepare to sample the cohort (the clients that train) of each round.

        Args:
            names: the sites, in the order of their client numbers.
            settings: cohort size and seed. With `cohort_secret` cohorts depend on it instead of the seed: every site
                knows the seed, and differential privacy counts on cohorts that nobody can predict.
            quarantine: the sites to leave out.
        """
        self.names = tuple(names)
        self.settings = settings
        self.quarantine = quarantine
        self.attempt = 0  # earlier attempts at this round, which had too few replies
        # Of the last cohort: its clients that have not failed, the number of all its clients, and whether it is a
        # uniform sample of the sites, which differential privacy needs.
        self.remaining: set[int] = set()
        self.size = 0
        self.uniform = True
        self._failures: set[int] = set()  # clients that failed in any attempt at this round

    def draw(self, round: int) -> Tensor:
        """Sample the cohort of a round. Clients that already failed in this round are used only if others are lacking.

        Returns:
            Client numbers, int64, ascending.

        Raises:
            TooFewReplies: if every site is in quarantine.
        """
        available = [client for client in self._order(round) if self.names[client] not in self.quarantine.sites]
        if not available:
            raise TooFewReplies("every site is set aside; look into serve.log, and let sites back in with --readmit.")
        not_failed = [client for client in available if client not in self._failures]
        failed = [client for client in available if client in self._failures]
        cohort = [*not_failed, *failed][: self.settings.cohort]
        self.remaining = set(cohort)
        self.size = len(cohort)
        # Amplification of differential privacy by sampling holds for uniform samples only.
        self.uniform = self.attempt == 0 and len(available) == len(self.names)
        return torch.tensor(cohort, dtype=torch.int64).sort().values

    def mark_failed(self, clients: Iterable[int]) -> None:
        """Mark clients of which no usable reply came in this attempt."""
        failed = set(clients)
        self._failures |= failed
        self.remaining -= failed

    def end_round(self) -> None:
        """Forget the failures of the round."""
        self.attempt = 0
        self._failures.clear()

    def _order(self, round: int) -> list[int]:
        """Shuffle all client numbers, differently for each round and each attempt at it.

        The order depends on the seed, and the first attempt at a round has the order of a simulation. With
        `cohort_secret` it depends on that, because the sites know the seed and could predict the cohorts.
        """
        client_count = len(self.names)
        if self.settings.cohort_secret is not None:
            key = derive_subkey(self.settings.cohort_secret, "cohort", round, self.attempt)
            sort_keys = generate_keystream(key, client_count)
            return np.argsort(sort_keys, kind="stable").tolist()
        stream_name = ("cohort", round, self.attempt) if self.attempt else ("cohort", round)
        generator = rng.generator(self.settings.seed, *stream_name)
        return torch.randperm(client_count, generator=generator).tolist()
