"""A site that has just answered asks again soon; one that has nothing to do asks as seldom as Flower's own program."""

import pytest

pytest.importorskip("flwr")

from halfmoon.federation.flower.node import pause


def test_polls_become_seldom_and_never_more_seldom_than_flowers():
    assert [pause(idle) for idle in (0.0, 0.1, 1.0, 4.0, 1000.0)] == [0.1, 0.1, 0.5, 2.0, 3.0]


def test_a_request_waits_half_of_the_round_at_most():
    """Whenever the request comes after 0.2 s, the time until the poll that fetches it is half of the wait before."""
    time = 0.0
    while time < 100:
        step = pause(time)
        assert step <= max(0.1, time / 2)
        time += step
