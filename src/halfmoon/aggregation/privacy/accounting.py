"""Privacy accounting for noised sums: epsilon at a delta, the smaller of a Renyi bound and an exact value.

**Noise.** A sum of updates of norm at most C gets Gaussian noise of standard deviation z C. Two federations are
neighbors if they differ in all data of one client ("replace one"). The sum over a cohort then differs by at most 2 C,
from one end of the ball to the other, and the "noise multiplier" of Google's dp-accounting, which is in units of that
sensitivity, is z / 2. A missing reply counts as an update of zero, which is in the ball too.

**Sampling.** Cohorts of k of n clients are drawn without replacement, with a fixed size. The library computes Theorem 27
of Wang, Balle and Kasiviswanathan 2019 ("Subsampled Renyi Differential Privacy and Analytical Moments Accountant"),
which applies to these neighbors (n is public). The bound of that theorem can be larger than the bound without sampling,
which is valid too: the accountant uses the smaller one at each order.

**Full participation.** If all clients are in every cohort, as in most federations of sites, sampling does not help and
the Renyi bound is loose. `compute_exact_epsilon` then uses the exact distribution of the privacy loss, which the library's PLD
accountant approximates. That accountant does not support cohorts of a fixed size, only Poisson sampling, in which each
client participates independently. This module uses only public names of the library.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from halfmoon.core.errors import UserError, install_command

if TYPE_CHECKING:
    from dp_accounting.dp_event import DpEvent

ORDERS = (*(1 + k / 10 for k in range(1, 100)), *range(11, 33), 40, 48, 64, 96, 128)
"""Renyi orders; the accountant uses the best. More orders would take seconds and lower no epsilon above 0.3 by 1 %."""

BISECTIONS = 60
"""Number of bisections by which an epsilon is found: more than a float has digits."""

MAX_NOISE = 1e6
"""Largest noise that is searched for a target epsilon."""

BISECTION_RATIO = 1.0005
"""Ratio of the bounds at which the search for a noise ends: less than its third digit."""

OFFSET_DIVERGENCE = 2.0
"""Renyi divergence of an auxiliary event, large enough that the library converts it to an epsilon above 0."""


class CohortDraw(NamedTuple):
    """A cohort drawn uniformly at random without replacement: `cohort` of `clients`."""

    cohort: int
    clients: int


@lru_cache(maxsize=64)
def compute_renyi_curve(noise: float, sampled: CohortDraw | None) -> np.ndarray:
    """Compute the Renyi divergence of one noised sum (differential privacy) at each order of `ORDERS`.

    Neighbors differ in all data of one client ("replace one"): a sum of updates of norm at most C then changes by up to
    2 C, from one end of the ball to the other. This sensitivity is the unit of the library's noise multiplier.

    Args:
        noise: z, the standard deviation of the noise in units of the clipping bound C.
        sampled: The random draw of the cohort from all clients, None if it was not random.

    Returns:
        float64 (orders,): at each order the smaller of the bounds with and without sampling. Both are valid, and that
        for sampling without replacement may be the larger one.

    Raises:
        UserError: If the library dp-accounting is not installed.
    """
    try:
        from dp_accounting import dp_event
    except ImportError as error:
        raise UserError(
            f"epsilon needs the library dp-accounting, which is not installed: {install_command('privacy')}."
        ) from error
    gaussian = dp_event.GaussianDpEvent(noise_multiplier=noise / 2)
    if sampled is None or sampled.cohort >= sampled.clients:
        return _divergences(gaussian)
    sampled_gaussian = dp_event.SampledWithoutReplacementDpEvent(
        source_dataset_size=sampled.clients, sample_size=sampled.cohort, event=gaussian
    )
    return np.minimum(_divergences(gaussian), _divergences(sampled_gaussian))


def _divergences(event: DpEvent) -> np.ndarray:
    """Compute the Renyi divergence of an event at each of `ORDERS`, from public functions of the library.

    The library's accountant reports only an epsilon, the minimum over its orders. For a single order this is the sum of
    all divergences at that order plus a number that depends on order and delta only (Canonne, Kamath and Steinke 2020,
    Proposition 12). The divergence of an event is therefore the increase of epsilon that it causes. An auxiliary event
    before it, of divergence `OFFSET_DIVERGENCE`, ensures that both epsilons are above zero, where the library truncates
    them.

    Args:
        event: A noised sum, as dp-accounting describes it.
    """
    from dp_accounting import NeighboringRelation, dp_event
    from dp_accounting.rdp import RdpAccountant

    delta = 0.5  # any value: the term that depends on it cancels in the difference

    def epsilon_increase(order: float) -> float:
        accountant = RdpAccountant([order], NeighboringRelation.REPLACE_ONE)
        offset = dp_event.ZCDpEvent(rho=0.0, xi=OFFSET_DIVERGENCE)
        epsilon_before = accountant.compose(offset).get_epsilon(delta)
        return max(0.0, accountant.compose(event).get_epsilon(delta) - epsilon_before)

    return np.array([epsilon_increase(order) for order in ORDERS])


def compute_epsilon(releases: Iterable[tuple[float, CohortDraw | None]], delta: float) -> float:
    """Compute epsilon at `delta` of a sequence of noised sums.

    The result is the smaller of two valid bounds: the Renyi bound, which benefits from random cohorts, and the exact
    epsilon of the same sums without sampling.

    Args:
        releases: The noise z and the draw of the cohort, None if it was not random, of each sum.
        delta: The delta, between 0 and 1.
    """
    counts = Counter(releases)
    if not counts:
        return 0.0
    noises = [noise for (noise, _), count in counts.items() for _ in range(count)]
    return min(_compute_renyi_epsilon(counts, delta), compute_exact_epsilon(noises, delta))


def compute_exact_epsilon(noises: Iterable[float], delta: float) -> float:
    """Compute the exact epsilon of noised sums without sampling: no smaller value is valid.

    If all data of one client are replaced, a sum of clipped updates changes by at most 2 C (the sensitivity). Several
    Gaussian sums together are as private as one whose mean changes by `shift` standard deviations. Its privacy loss is
    Gaussian, so that delta has a closed form for each epsilon (Balle and Wang 2018, "Improving the Gaussian Mechanism
    for Differential Privacy", Theorem 8). Bisection inverts it.

    Args:
        noises: The noise z of each sum: its standard deviation in units of the clipping bound C.
        delta: The delta, between 0 and 1.
    """
    # 2 C / (z C) for a single sum; squares add up, as for a vector of all sums.
    shift = math.sqrt(math.fsum((2 / noise) ** 2 for noise in noises))

    def delta_of(epsilon: float) -> float:
        """Compute the smallest valid delta of an epsilon: tail(e/s - s/2) - exp(e) tail(e/s + s/2) for shift s."""
        # In logarithms: exp(epsilon) alone would overflow where its product with the tail is small.
        log_first = _log_tail(epsilon / shift - shift / 2)
        log_second = epsilon + _log_tail(shift / 2 + epsilon / shift)
        return math.exp(log_first) - math.exp(min(log_second, 0.0))  # the second term is at most 1, except for rounding

    if shift == 0 or delta_of(0.0) <= delta:
        return 0.0
    low = 0.0
    high = 1.0
    while delta_of(high) > delta:  # delta falls as epsilon grows
        low = high
        high = 2 * high
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        if delta_of(middle) > delta:
            low = middle
        else:
            high = middle
    return high


def _log_tail(x: float) -> float:
    """Compute log P(N(0, 1) > x): exact below 30, and a lower bound above, where erfc underflows."""
    if x < 30:
        return math.log(math.erfc(x / math.sqrt(2)) / 2)
    return -x * x / 2 - math.log(math.sqrt(2 * math.pi)) + math.log(x / (x * x + 1))


def _compute_renyi_epsilon(counts: Counter[tuple[float, CohortDraw | None]], delta: float) -> float:
    """Compute the Renyi bound of epsilon; divergences of several sums add up at each order.

    Args:
        counts: How many sums have the same noise and the same draw of the cohort.
        delta: The delta, between 0 and 1.
    """
    total = np.zeros(len(ORDERS))
    for (noise, sampled), count in counts.items():
        total = total + count * compute_renyi_curve(noise, sampled)
    from dp_accounting.rdp import compute_epsilon

    return float(compute_epsilon(ORDERS, total.tolist(), delta)[0])


def compute_planned_epsilon(cohort: int, clients: int, rounds: int, noise: float, delta: float) -> float:
    """Compute epsilon at `delta` of a plan: `rounds` rounds with random cohorts of `cohort` of `clients`."""
    return compute_epsilon([(noise, CohortDraw(cohort, clients))] * rounds, delta)


def find_noise(target: float, cohort: int, clients: int, rounds: int, delta: float) -> float:
    """Find the smallest noise z with which a run is differentially private at epsilon `target`.

    Args:
        target: The largest epsilon of the run.
        cohort: The number of clients in a round.
        clients: The number of all clients.
        rounds: The number of rounds.
        delta: The delta, between 0 and 1.

    Returns:
        The noise in units of the clipping bound, rounded up to three digits.

    Raises:
        UserError: If a noise of a million is not sufficient.
    """

    def epsilon_of(noise: float) -> float:
        return compute_planned_epsilon(cohort=cohort, clients=clients, rounds=rounds, noise=noise, delta=delta)

    low = 1e-2
    high = 1.0
    while epsilon_of(high) > target:
        low = high
        high = 4 * high
        if high > MAX_NOISE:
            raise UserError(f"no noise up to {high:.0e} keeps epsilon at most {target:g}: ask for a larger epsilon.")
    # Bisection on a logarithmic scale.
    while high / low > BISECTION_RATIO:
        middle = math.sqrt(low * high)
        if epsilon_of(middle) > target:
            low = middle
        else:
            high = middle
    step = 10.0 ** (math.floor(math.log10(high)) - 2)  # the third digit
    rounded_up = math.ceil(high / step) * step
    return round(rounded_up, 12)  # removes the rounding error of the product
