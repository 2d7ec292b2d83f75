"""The server half of client-level differential privacy: replace uploads by their noised mean, within a privacy budget.

DP-FedAvg with a fixed denominator (McMahan, Ramage, Talwar and Zhang 2018, "Learning Differentially Private Recurrent
Language Models", Algorithm 1): all weights are 1, and the mean is

    (sum of the clipped updates that arrived + N(0, (z C)^2 I)) / (number of clients that received the query).

The sum is in float64. The server clips every update once more, so that a hostile or broken client has no more influence
than any other.

The noise is derived from the server's secret and the sum itself. A round that is repeated after a restart, with the same
sum, gets the same noise and reveals nothing new. A different sum gets independent noise.
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

from halfmoon.aggregation.base import AggregationContext, Aggregator, compute_update, downloaded_values, replace_update
from halfmoon.aggregation.privacy import accounting
from halfmoon.aggregation.privacy.accounting import CohortDraw
from halfmoon.aggregation.privacy.releases import Release, ReleaseLog
from halfmoon.aggregation.secure.csprng import derive_subkey, generate_gaussians
from halfmoon.api.uploads import Upload
from halfmoon.core import tree
from halfmoon.core.errors import UserError


class PrivacyPlan(NamedTuple):
    """The privacy options of a run.

    Attributes:
        clip: C, the largest norm of an update.
        noise: z, the noise on the sum in units of C.
        delta: The delta at which epsilon is computed.
        budget: The largest epsilon; None to report epsilon without a limit.
        cohort: The number of clients in a round.
        clients: The number of all clients.
    """

    clip: float
    noise: float
    delta: float
    budget: float | None
    cohort: int
    clients: int


@dataclass
class DifferentialPrivacy(Aggregator):
    """An aggregator that replaces the update of every client by the noised mean.

    Attributes:
        plan: The privacy options.
        secret: The server's secret, from which noise is derived.
        ledger: The noised sums so far.
    """

    plan: PrivacyPlan
    secret: bytes
    ledger: ReleaseLog
    _round: int = field(default=-1, init=False)

    def process_uploads(self, context: AggregationContext, upload: Upload) -> tuple[Sequence[int], Upload]:
        """Replace each client's update by the same noised mean (differential privacy), with weight 1.

        The noise follows from the server's secret and the sum of the updates. A restarted server that repeats the round
        therefore adds the same noise; two draws of noise on the same sum would reveal more than the ledger records.

        Args:
            context: The query and the k clients that responded.
            upload: Their uploads, leaves (k, ...). Those that are not finite are dropped.

        Returns:
            The indices of the k' clients whose upload is finite, and the mean for each of them, leaves (k', ...).

        Raises:
            UserError: If an upload has values other than an update and a weight, or the budget is spent.
        """
        self._round = context.round
        _check_upload_content(context, upload)
        indices, total = sum_clipped_updates(context, upload, clip=self.plan.clip)
        if not indices:
            return indices, upload
        upload = upload.map(lambda leaf: leaf[torch.tensor(indices, device=leaf.device)])
        context = context.only(indices)  # `context.cohort` remains the number of clients that received the query
        flat_sum = np.concatenate([leaf.numpy().ravel() for leaf in total.values()])
        sum_hash = self._hash_sum(context, flat_sum)
        self._record_release(context, sum_hash)
        noise_key = derive_subkey(self.secret, "noise", sum_hash)
        noise = self.plan.noise * self.plan.clip * generate_gaussians(noise_key, len(flat_sum))
        # Divided by the size of the cohort, not by the number of replies: the latter may depend on private data.
        mean = torch.from_numpy((flat_sum + noise) / context.cohort)
        sections = mean.split([leaf.numel() for leaf in total.values()])
        leaves = tree.flatten(upload.update)
        change = {
            path: section.reshape(total[path].shape).to(leaves[path])
            for path, section in zip(total, sections, strict=True)
        }
        upload = replace_update(upload, context, change)
        return indices, upload._replace(weight=torch.ones_like(upload.weight))

    def row(self) -> dict[str, Any]:
        releases = [release for release in self.ledger.releases if release.round <= self._round]
        return {"epsilon": self._epsilon(releases), "delta": self.plan.delta}

    def stop_reason(self, round: int) -> str | None:
        """Check whether the epsilon of all past rounds and the next one would exceed the privacy budget.

        The ledger lists a release, a noised sum that the server used, for each query of the past rounds.

        Args:
            round: The next round, from 0.

        Returns:
            A sentence on why the run stops before this round; None if it continues.

        Raises:
            UserError: If the ledger lacks a completed round.
        """
        self.ledger.check(round)
        past = self.ledger.releases
        budget = self.plan.budget
        if budget is None or any(release.round == round for release in past):
            return None  # a round that ran before a restart is in the ledger already
        next_release = Release(
            round=round,
            attempt=0,
            query=0,
            sampled=self._sampling(self.plan.cohort),
            noise=self.plan.noise,
            mark="",  # the hash of its sum, which does not exist yet; epsilon does not depend on it
        )
        next_epsilon = self._epsilon([*past, next_release])
        if next_epsilon <= budget:
            return None
        if not past:
            return (
                f"dp_epsilon is {budget:g}, but the first round alone costs {next_epsilon:.4g} (at delta "
                f"{self.plan.delta:g}, {self.plan.cohort} of {self.plan.clients} clients a round): raise "
                "dp_noise, or dp_epsilon."
            )
        return (
            f"the privacy budget is spent: epsilon is {self._epsilon(past):.4g} after round {round}, and another round "
            f"would make it {next_epsilon:.4g}, over dp_epsilon {budget:g} (at delta {self.plan.delta:g})."
        )

    def _record_release(self, context: AggregationContext, sum_hash: bytes) -> None:
        """Write the release of a noised sum to the privacy ledger, before the sum is used.

        Args:
            context: The query of the sum.
            sum_hash: A keyed hash of the sum: the same sum, after a restart, is not counted twice.

        Raises:
            UserError: If it would exceed the privacy budget.
        """
        # A repeated round has the same cohort: it was not drawn at random for this attempt.
        sampled = self._sampling(context.cohort) if context.random_cohort and not context.attempt else None
        release = Release(
            round=context.round,
            attempt=context.attempt,
            query=context.query,
            sampled=sampled,
            noise=self.plan.noise,
            mark=sum_hash.hex(),
        )
        if release in self.ledger:
            return
        next_epsilon = self._epsilon([*self.ledger.releases, release])
        if self.plan.budget is not None and next_epsilon > self.plan.budget:
            raise UserError(
                f"the privacy budget is spent: round {context.round + 1} would make epsilon {next_epsilon:.4g}, over "
                f"dp_epsilon {self.plan.budget:g}, because its cohort is not a new random draw from all clients "
                "(a repeated round, or an excluded site); the last checkpoint is from the round before."
            )
        self.ledger.add(release)

    def _hash_sum(self, context: AggregationContext, flat_sum: np.ndarray) -> bytes:
        """Compute a keyed hash that identifies a sum in its query without revealing its values.

        Args:
            context: The query of the sum.
            flat_sum: The sum of the clipped updates, float64 (n,).
        """
        return derive_subkey(
            self.secret,
            "sum",
            context.round,
            context.attempt,
            context.query,
            context.client_update,
            context.cohort,
            f"{self.plan.clip!r} {self.plan.noise!r}",
            sha256(flat_sum.astype("<f8").tobytes()).digest(),
        )

    def _sampling(self, cohort: int) -> CohortDraw | None:
        """Describe the draw of a cohort; None if it consists of all clients, so that nothing is random."""
        return CohortDraw(cohort, self.plan.clients) if cohort < self.plan.clients else None

    def _epsilon(self, releases: Sequence[Release]) -> float:
        """Compute epsilon of these releases at the plan's delta."""
        return compute_spent_epsilon(releases, self.plan.delta)


def compute_spent_epsilon(releases: Sequence[Release], delta: float) -> float:
    """Compute the epsilon of differential privacy that the noised sums of a run have spent.

    A random cohort lowers the price of a release only if it is the only one of its round. Several releases of a round
    have the same cohort: an observer could use what the first reveals about the cohort on the second.

    Args:
        releases: The noised sums.
        delta: The delta, between 0 and 1.
    """
    releases_in_round = Counter(release.round for release in releases)
    noised_sums: list[tuple[float, CohortDraw | None]] = []
    for release in releases:
        is_only_one = releases_in_round[release.round] == 1
        noised_sums.append((release.noise, release.sampled if is_only_one else None))
    return accounting.compute_epsilon(noised_sums, delta)


def sum_clipped_updates(
    context: AggregationContext, upload: Upload, clip: float
) -> tuple[list[int], dict[str, Tensor]]:
    """Clip the updates of k clients to the norm `clip` and add them up.

    Updates are added in the order of the uploads, on the CPU, so that the sum has the same bits on every device.

    Args:
        context: The query, with the values that the clients downloaded.
        upload: The uploads, leaves (k, ...).
        clip: The largest Euclidean norm of an update, over all its leaves together.

    Returns:
        The indices of the uploads that are finite, and the sum of their clipped updates by path, float64.
    """
    received = downloaded_values(context)
    flat = tree.flatten(upload.update)
    paths = sorted(compute_update(upload, context))
    total = {path: torch.zeros(flat[path].shape[1:], dtype=torch.float64) for path in paths}
    indices: list[int] = []
    for index in range(len(context.clients)):
        update = {path: _client_values(flat[path], index) - _client_values(received[path], index) for path in paths}
        squares = [float(leaf.reshape(-1).square().sum()) for leaf in update.values()]
        norm = math.sqrt(math.fsum(squares))  # fsum: the norm does not depend on the order of the leaves
        if not math.isfinite(norm):
            continue
        indices.append(index)
        scale = clip / norm if norm > clip else 1.0
        for path, leaf in update.items():
            total[path] += scale * leaf
    return indices, total


def _client_values(leaf: Tensor, index: int) -> Tensor:
    """Select a client's slice of a leaf (k, ...), or the common one of a leaf (1, ...), in float64 on the CPU."""
    return leaf[index if len(leaf) > 1 else 0].cpu().double()


def _check_upload_content(context: AggregationContext, upload: Upload) -> None:
    """Raise UserError if an upload has values other than an update and a weight: they would get no noise."""
    extra = sorted({*upload.aux, *(set(tree.flatten(upload.update)) - set(compute_update(upload, context)))})
    if extra:
        raise UserError(
            f"dp_clip cannot be used here: clients send {extra[0]!r} in addition to their update, and it would get no "
            "noise; choose another method, or omit its option."
        )
