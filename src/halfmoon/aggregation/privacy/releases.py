"""The record of the noised sums that a run has used, from which its privacy loss is computed."""

from typing import NamedTuple, Protocol

from halfmoon.aggregation.privacy.accounting import CohortDraw


class Release(NamedTuple):
    """A noised sum that the server used.

    Attributes:
        round: The round, from 0.
        attempt: The number of earlier attempts at this round.
        query: The number of earlier queries in this round.
        sampled: The draw of the cohort, None if it was not random.
        noise: The noise z, in units of the clipping bound.
        mark: A keyed hash that identifies the sum; without the server's secret it gives no information about it.
    """

    round: int
    attempt: int
    query: int
    sampled: CohortDraw | None
    noise: float
    mark: str


class ReleaseLog(Protocol):
    """All noised sums that a run has used, earlier processes included (`halfmoon.runs.privacy_ledger.Ledger`).

    Attributes:
        releases: The noised sums, in the order of their use.
    """

    releases: list[Release]

    def __contains__(self, release: Release) -> bool:
        """Check whether this noised sum was used before."""
        ...

    def add(self, release: Release) -> None:
        """Record a release before its noised sum is used."""
        ...

    def check(self, rounds: int) -> None:
        """Raise `UserError` if one of the completed rounds has no release."""
        ...
