"""What noised sums cost: epsilon at a delta, the smaller of Renyi's bound (Google's dp-accounting) and the exact one.

A sum of updates of norm at most C, plus Gaussian noise of standard deviation z C. Two federations are neighbors where
one client's data, all of it, is replaced by any other: the sum of those asked moves by 2 C at most (from one end of the
ball to the other), so what the library calls the noise multiplier, the noise in units of that, is z / 2. An answer that
is missing is an update of zero, which is one of those in the ball.

Cohorts of k of n clients are drawn without replacement, with a fixed size: Theorem 27 of Wang, Balle and
Kasiviswanathan 2019 (Subsampled Renyi Differential Privacy and Analytical Moments Accountant), which holds for
neighbors in this sense ("replace one", n is public), is what the library computes. That theorem's bound can be above
the one without sampling, which holds as well: the smaller counts, order by order.

Where everybody is in every cohort, as in most federations of sites, no sampling helps and Renyi's bound is loose: there
the exact distribution of the privacy loss is taken (`exact`), which the library's PLD accountant approximates. For
cohorts of a fixed size it has none: it refuses sampling without replacement, and knows Poisson sampling alone, where
each client is asked or not by a coin of its own. Only public names of the library are used.
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
"""Renyi orders of which the best is taken. More of them would cost seconds and lower no epsilon above 0.3 by 1 %."""

APART = 2.0
"""Renyi divergence that is far enough from none for the library to convert it without a bound."""


class Sampled(NamedTuple):
    """A cohort that was drawn at random: `cohort` of `clients`, all alike."""

    cohort: int
    clients: int


@lru_cache(maxsize=64)
def curve(noise: float, sampled: Sampled | None) -> np.ndarray:
    """Return the Renyi divergence of one release at each of `ORDERS`; `noise` is z, None for no random cohort.

    Raises UserError where the library is missing.
    """
    try:
        from dp_accounting import dp_event
    except ImportError as error:
        raise UserError(
            f"epsilon needs the library dp-accounting, which is not installed: {install_command('privacy')}."
        ) from error
    plain = dp_event.GaussianDpEvent(noise / 2)
    if sampled is None or sampled.cohort >= sampled.clients:
        return _divergences(plain)
    event = dp_event.SampledWithoutReplacementDpEvent(sampled.clients, sampled.cohort, plain)
    return np.minimum(_divergences(plain), _divergences(event))


def _divergences(event: DpEvent) -> np.ndarray:
    """Return the Renyi divergence of an event at each of `ORDERS`.

    The library's accountant tells an epsilon, the least over its orders. With one order alone that is the sum of
    divergences there and a number that depends on the order and delta (Canonne, Kamath and Steinke 2020, Proposition
    12), so an event's own divergence is by how much epsilon grows with it. A first event, of divergence `APART`, keeps
    both away from zero, where epsilon is cut off. Curves are kept: composing anew costs a second a round.
    """
    from dp_accounting import NeighboringRelation, dp_event
    from dp_accounting.rdp import RdpAccountant

    def grows(order: float) -> float:
        accountant = RdpAccountant([order], NeighboringRelation.REPLACE_ONE)
        before = accountant.compose(dp_event.ZCDpEvent(rho=0.0, xi=APART)).get_epsilon(0.5)
        return max(0.0, accountant.compose(event).get_epsilon(0.5) - before)

    return np.array([grows(order) for order in ORDERS])


def epsilon(releases: Iterable[tuple[float, Sampled | None]], delta: float) -> float:
    """Return epsilon at `delta` of releases (their noise, and how their cohort was drawn), one after the other.

    It is the smaller of two bounds that both hold: Renyi's, which knows what a random cohort is worth, and the exact
    one of the same releases without it.
    """
    counts = Counter(releases)
    if not counts:
        return 0.0
    return min(
        _renyi(counts, delta), exact((noise for (noise, _), count in counts.items() for _ in range(count)), delta)
    )


def exact(noises: Iterable[float], delta: float) -> float:
    """Return epsilon at `delta` of noised sums (z each), whoever was in the cohort: no other is smaller.

    Sums with Gaussian noise compose into one: in units of how far a client can move them, 2 C, their precisions add up.
    That one's privacy loss is Gaussian too, so that its distribution needs no numbers (Balle and Wang 2018, "Improving
    the Gaussian Mechanism for Differential Privacy", Theorem 8): this is what a PLD accountant approximates.
    """
    shift = math.sqrt(math.fsum((2 / noise) ** 2 for noise in noises))

    def lost(epsilon: float) -> float:
        """Return the least delta that goes with an epsilon."""
        second = epsilon + _log_tail(shift / 2 + epsilon / shift)
        return math.exp(_log_tail(epsilon / shift - shift / 2)) - math.exp(min(second, 0.0))

    low, high = 0.0, 1.0
    if shift == 0 or lost(0.0) <= delta:
        return 0.0
    while lost(high) > delta:
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if lost(middle) > delta else (low, middle)
    return high


def _log_tail(x: float) -> float:
    """Return the logarithm of the probability that a standard normal number is over x, far out a bound from below."""
    if x < 30:
        return math.log(math.erfc(x / math.sqrt(2)) / 2)
    return -x * x / 2 - math.log(math.sqrt(2 * math.pi)) + math.log(x / (x * x + 1))


def _renyi(counts: Counter[tuple[float, Sampled | None]], delta: float) -> float:
    total = sum((count * curve(*each) for each, count in counts.items()), np.zeros(len(ORDERS)))
    from dp_accounting.rdp import compute_epsilon

    return float(compute_epsilon(ORDERS, total.tolist(), delta)[0])


def planned(cohort: int, clients: int, rounds: int, noise: float, delta: float) -> float:
    """Return epsilon of so many rounds with cohorts of `cohort` of `clients`."""
    return epsilon([(noise, Sampled(cohort, clients))] * rounds, delta)


def noise_for(target: float, cohort: int, clients: int, rounds: int, delta: float) -> float:
    """Return the least noise, to three digits and rounded up, with which so many rounds keep epsilon at most `target`.

    Raises UserError where even a million is too little.
    """

    def costs(noise: float) -> float:
        return planned(cohort, clients, rounds, noise, delta)

    low, high = 1e-2, 1.0
    while costs(high) > target:
        low, high = high, 4 * high
        if high > 1e6:
            raise UserError(f"no noise up to {high:.0e} keeps epsilon at most {target:g}: ask for a larger epsilon.")
    while high / low > 1.0005:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if costs(middle) > target else (low, middle)
    step = 10.0 ** (math.floor(math.log10(high)) - 2)
    rounded = math.ceil(high / step) * step
    return round(rounded, 12)
