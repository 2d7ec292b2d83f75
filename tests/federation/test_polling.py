"""The polls of a site and of a server for their next message."""

from collections.abc import Sequence

import pytest

from halfmoon.federation.protocol.polling import PollSchedule
from halfmoon.federation.server.sessions import make_schedule
from halfmoon.federation.transport.node import IDLE_SHARE, MAX_POLL_SECONDS


def make_site_schedule() -> PollSchedule:
    return PollSchedule(IDLE_SHARE, MAX_POLL_SECONDS, MAX_POLL_SECONDS)


def poll_until(schedule: PollSchedule, arrival: float) -> list[float]:
    """Return 0 and the times of all polls up to the one that finds a message, and record its wait."""
    times = [0.0]
    while times[-1] < arrival:
        times.append(times[-1] + schedule.pause(times[-1]))
    schedule.record(times[-1])
    return times


def test_an_idle_site_polls_as_rarely_as_flowers_node():
    schedule = make_site_schedule()
    assert [schedule.pause(waited) for waited in (0.0, 0.1, 1.0, 4.0, 1000.0)] == [0.1, 0.1, 0.5, 2.0, 3.0]


@pytest.mark.parametrize(("round_seconds", "polls", "delay"), [(0.2, 3, 0.03), (0.5, 4, 0.05), (5.0, 5, 0.5)])
@pytest.mark.parametrize("make", [make_site_schedule, make_schedule])
def test_a_message_as_late_as_the_last_one_needs_few_polls_and_waits_shortly(
    make, round_seconds: float, polls: int, delay: float
):
    schedule = make()
    poll_until(schedule, round_seconds)
    for _ in range(6):
        times = poll_until(schedule, round_seconds)
        assert times[-1] - round_seconds <= delay
        assert len(times[1:]) <= polls


@pytest.mark.parametrize("arrivals", [(0.3, 30.0, 0.3, 30.0, 0.3), (60.0, 0.2, 60.0, 0.2)])
@pytest.mark.parametrize(("make", "longest"), [(make_site_schedule, 3.0), (make_schedule, 2.0)])
def test_early_message_waits_no_longer_than_the_longest_pause(arrivals: Sequence[float], make, longest: float):
    schedule = make()
    for arrival in arrivals:
        assert poll_until(schedule, arrival)[-1] - arrival <= longest


def test_the_shortest_of_the_last_eight_waits_decides():
    """A method with two messages a round, after 0.2 s and 10 s: the first one is not made to wait for 8 s."""
    schedule = make_site_schedule()
    for wait in (0.2, 10.0, 0.2, 10.0):
        schedule.record(wait)
    assert schedule.pause(0.0) == pytest.approx(0.16)
    for _ in range(8):
        schedule.record(2.0)
    assert schedule.pause(0.0) == pytest.approx(1.6)
