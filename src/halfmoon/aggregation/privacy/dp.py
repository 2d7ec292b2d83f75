"""The server half of client-level differential privacy: a noised sum in the place of every update, and its price.

DP-FedAvg with a fixed denominator (McMahan, Ramage, Talwar and Zhang 2018, Algorithm 1): the mean is (the sum of the
clipped updates of those who answered + N(0, (z C)^2 I)) / (how many were asked), and all weights are 1. The sum is in
float64, and every update is clipped again: what a hostile or broken client sends counts no more than another's.

The noise comes from a key that depends on the server's secret and on the sum itself: a round that is played again with
the same sum gets the same noise and tells nothing new; another sum gets noise that is independent of it.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from halfmoon.aggregation.base import AggregationContext, Aggregator, changed, downlinks, update
from halfmoon.aggregation.privacy import accounting
from halfmoon.aggregation.privacy.accounting import Sampled
from halfmoon.aggregation.privacy.ledger import Ledger, Release
from halfmoon.aggregation.secure.csprng import gaussians, subkey
from halfmoon.api.uploads import Upload
from halfmoon.core import tree
from halfmoon.core.errors import UserError


class Promise(NamedTuple):
    """What is promised, and what a round is planned to be."""

    clip: float  # C, the largest norm of an update
    noise: float  # z, the noise on the sum in units of C
    delta: float
    budget: float | None  # the largest epsilon; None: it is counted alone
    cohort: int
    clients: int


@dataclass
class Private(Aggregator):
    """An aggregator that puts the noised mean in the place of every update.

    `secret` is what noise is drawn from. Raises UserError for an upload that holds more than an update and a weight,
    and for a release that the budget does not allow.
    """

    promise: Promise
    secret: bytes
    ledger: Ledger
    _round: int = field(default=-1, init=False)

    def uploads(self, context: AggregationContext, upload: Upload) -> tuple[Sequence[int], Upload]:
        """Return all answers that hold numbers, each with the noised mean of them all and the weight 1."""
        self._round = context.round
        _refuse_more(context, upload)
        places, total = clipped_sum(context, upload, self.promise.clip)
        if not places:
            return places, upload
        upload = upload.map(lambda leaf: leaf[torch.tensor(places, device=leaf.device)])
        context = context.only(places)
        flat = np.concatenate([leaf.numpy().ravel() for leaf in total.values()])
        mark = self._mark(context, flat)
        self._write_down(context, mark)
        noise = gaussians(subkey(self.secret, "noise", mark), len(flat))
        mean = torch.from_numpy((flat + self.promise.noise * self.promise.clip * noise) / context.cohort)
        parts = mean.split([leaf.numel() for leaf in total.values()])
        leaves = tree.flatten(upload.update)
        change = {
            path: part.reshape(total[path].shape).to(leaves[path]) for path, part in zip(total, parts, strict=True)
        }
        upload = changed(upload, context, change)
        return places, upload._replace(weight=torch.ones_like(upload.weight))

    def row(self) -> dict[str, Any]:
        releases = [release for release in self.ledger.releases if release.round <= self._round]
        return {"epsilon": self._epsilon(releases), "delta": self.promise.delta}

    def ended(self, round: int) -> str | None:
        """Return why `round` may not be played: it would cost more than the budget has left."""
        self.ledger.check(round)
        past, budget = self.ledger.releases, self.promise.budget
        if budget is None or any(release.round == round for release in past):
            return None  # a round that was played before a kill has been paid
        then = self._epsilon([*past, Release(round, 0, 0, self._sample(self.promise.cohort), self.promise.noise, "")])
        if then <= budget:
            return None
        if not past:
            return (
                f"dp_epsilon is {budget:g}, but the first round alone costs {then:.4g} (at delta "
                f"{self.promise.delta:g}, {self.promise.cohort} of {self.promise.clients} clients a round): raise "
                "dp_noise, or dp_epsilon."
            )
        return (
            f"the privacy budget is spent: epsilon is {self._epsilon(past):.4g} after round {round}, and another round "
            f"would make it {then:.4g}, over dp_epsilon {budget:g} (at delta {self.promise.delta:g})."
        )

    def _write_down(self, context: AggregationContext, mark: bytes) -> None:
        """Write a release into the ledger before anybody sees it; raise UserError where it would cost too much."""
        sampled = self._sample(context.cohort) if context.random_cohort and not context.attempt else None
        release = Release(*context[:3], sampled, self.promise.noise, mark.hex())
        if release in self.ledger:
            return
        then = self._epsilon([*self.ledger.releases, release])
        if self.promise.budget is not None and then > self.promise.budget:
            what = "a round that is played again, or a site that is set aside"
            raise UserError(
                f"the privacy budget is spent: round {context.round + 1} would make epsilon {then:.4g}, over "
                f"dp_epsilon {self.promise.budget:g}, as its cohort was not drawn anew from all clients alike "
                f"({what}); the last checkpoint is from before it."
            )
        self.ledger.add(release)

    def _mark(self, context: AggregationContext, flat: np.ndarray) -> bytes:
        """Return what tells a sum from any other, without telling the sum: a hash under the secret."""
        facts = (*context[:3], context.client_update, context.cohort, f"{self.promise.clip!r} {self.promise.noise!r}")
        return subkey(self.secret, "sum", *facts, sha256(flat.astype("<f8").tobytes()).digest())

    def _sample(self, cohort: int) -> Sampled | None:
        return Sampled(cohort, self.promise.clients) if cohort < self.promise.clients else None

    def _epsilon(self, releases: Sequence[Release]) -> float:
        return spent(releases, self.promise.delta)


def spent(releases: Sequence[Release], delta: float) -> float:
    """Return epsilon of releases at `delta`.

    A random cohort lowers the price of one release. Of a round that released more than one sum none is lowered: they
    are of one cohort, not of one each, and what its first sum tells of the cohort, the second could use.
    """
    count = Counter(release.round for release in releases)
    return accounting.epsilon(
        [(each.noise, each.sampled if count[each.round] == 1 else None) for each in releases], delta
    )


def clipped_sum(context: AggregationContext, upload: Upload, clip: float) -> tuple[list[int], dict[str, Tensor]]:
    """Return the places of the answers that are finite, and the sum of their clipped updates by path, in float64.

    Updates are taken one after the other in the order of the uploads, on the CPU, so that the sum has the same bits
    wherever the clients are.
    """
    broadcast = downlinks(context)
    flat = tree.flatten(upload.update)
    paths = sorted(update(upload, context))
    total = {path: torch.zeros(flat[path].shape[1:], dtype=torch.float64) for path in paths}
    places: list[int] = []
    for place in range(len(context.clients)):
        change = {path: _row(flat[path], place) - _row(broadcast[path], place) for path in paths}
        length = math.sqrt(math.fsum(float(leaf.reshape(-1).square().sum()) for leaf in change.values()))
        if not math.isfinite(length):
            continue
        places.append(place)
        share = clip / length if length > clip else 1.0
        for path, leaf in change.items():
            total[path] += share * leaf
    return places, total


def _row(leaf: Tensor, place: int) -> Tensor:
    """Return one client's slice of a leaf (k, ...), or the one of all (1, ...), in float64 on the CPU."""
    return leaf[place if len(leaf) > 1 else 0].cpu().double()


def _refuse_more(context: AggregationContext, upload: Upload) -> None:
    """Raise UserError where an upload holds what would pass without noise."""
    more = sorted({*upload.aux, *(set(tree.flatten(upload.update)) - set(update(upload, context)))})
    if more:
        raise UserError(
            f"dp_clip cannot be used here: clients send {more[0]!r} beside their update, which would pass without "
            "noise; choose another method, or leave its option out."
        )
