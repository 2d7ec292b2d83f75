"""The exact price of noised sums: against the library's PLD accountant, by its public interface, and by hand."""

import ast
import inspect
import math
from collections import Counter
from importlib.util import find_spec

import pytest

from halfmoon.aggregation.privacy import accounting
from halfmoon.aggregation.privacy.accounting import (
    ORDERS,
    CohortDraw,
    _compute_renyi_epsilon,
    compute_epsilon,
    compute_exact_epsilon,
    compute_planned_epsilon,
)

pytestmark = pytest.mark.skipif(find_spec("dp_accounting") is None, reason="needs dp_accounting")


@pytest.mark.parametrize(
    ("noise", "count", "delta"), [(2.0, 1, 1e-5), (10.0, 20, 1e-5), (40.0, 100, 1e-6), (6.0, 3, 1e-3)]
)
def test_it_is_what_a_pld_accountant_approximates(noise: float, count: int, delta: float):
    """A client replaced by another moves a sum by 2 C: the accountant's multiplier is z / 2."""
    from dp_accounting import dp_event
    from dp_accounting.pld import PLDAccountant

    accountant = PLDAccountant()
    accountant.compose(dp_event.GaussianDpEvent(noise / 2), count)
    expected = accountant.get_epsilon(delta)
    assert compute_exact_epsilon([noise] * count, delta) == pytest.approx(expected, rel=2e-3)
    assert compute_exact_epsilon([noise] * count, delta) <= expected * 1.0005


def test_sums_compose_by_their_precisions():
    """Four of z are one of z / 2; nothing costs nothing; ten times the noise costs less than a tenth."""
    assert compute_exact_epsilon([8.0] * 4, 1e-5) == pytest.approx(compute_exact_epsilon([4.0], 1e-5))
    assert compute_exact_epsilon([], 1e-5) == 0.0
    assert compute_exact_epsilon([1e9], 1e-5) == 0.0
    assert compute_exact_epsilon([40.0], 1e-5) < compute_exact_epsilon([4.0], 1e-5) / 10 * 1.2


@pytest.mark.parametrize("noise", [0.01, 0.5, 1.0, 4.0])
def test_tiny_noise_does_not_overflow(noise: float):
    """Epsilon beyond 10^5 is a number as well."""
    assert math.isfinite(compute_exact_epsilon([noise] * 50, 1e-5))


def test_whole_cohorts_cost_less_than_by_renyi_and_sampled_ones_as_before():
    """Ten sites that all take part in twenty rounds with z = 8: exact; one of a thousand: the sampling counts."""
    from dp_accounting import NeighboringRelation, dp_event
    from dp_accounting.rdp import RdpAccountant

    renyi = RdpAccountant(neighboring_relation=NeighboringRelation.REPLACE_ONE)
    renyi.compose(dp_event.GaussianDpEvent(4.0), 20)
    assert compute_planned_epsilon(10, 10, 20, 8.0, 1e-5) == pytest.approx(compute_exact_epsilon([8.0] * 20, 1e-5))
    assert compute_planned_epsilon(10, 10, 20, 8.0, 1e-5) < 0.95 * renyi.get_epsilon(1e-5)
    assert compute_epsilon([(2.0, CohortDraw(10, 1000))] * 20, 1e-5) < 0.5 * compute_exact_epsilon([2.0] * 20, 1e-5)


def test_the_pld_accountant_has_no_cohorts_of_a_fixed_size():
    """Where this fails, the library has learned it: take it for sampled cohorts, instead of Renyi's bound."""
    from dp_accounting import NeighboringRelation, UnsupportedEventError, dp_event
    from dp_accounting.pld import PLDAccountant

    drawn = dp_event.SampledWithoutReplacementDpEvent(100, 10, dp_event.GaussianDpEvent(2.0))
    for relation in NeighboringRelation:
        with pytest.raises(UnsupportedEventError):
            PLDAccountant(relation).compose(drawn)


@pytest.mark.parametrize("kind", [(4.0, CohortDraw(10, 100)), (100.0, CohortDraw(1, 10_000)), (8.0, None), (0.1, None)])
def test_curve_is_read_from_the_accountant(kind: tuple[float, CohortDraw | None]):
    """An event's divergence is its own, however often: epsilon of 1 and of 300 is what the library composes itself."""
    from dp_accounting import NeighboringRelation, dp_event
    from dp_accounting.rdp import RdpAccountant

    noise, sampled = kind
    event = plain = dp_event.GaussianDpEvent(noise / 2)
    if sampled:
        event = dp_event.SampledWithoutReplacementDpEvent(sampled.clients, sampled.cohort, plain)
    for count in (1, 300):
        made = RdpAccountant(ORDERS, NeighboringRelation.REPLACE_ONE).compose(event, count)
        assert _compute_renyi_epsilon(Counter({kind: count}), 1e-5) == pytest.approx(made.get_epsilon(1e-5), rel=1e-9)


def test_only_public_names_of_the_library_are_used():
    """A name of the accountant that begins with "_" may change with any version, and epsilon with it, in silence."""
    tree = ast.parse(inspect.getsource(accounting))
    names = [node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    taken = [each.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for each in node.names]
    assert "compose" in names
    assert not [name for name in (*names, *taken) if name.startswith("_") and not name.startswith("__")]
