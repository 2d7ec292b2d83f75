"""The polls of a site for its next message: soon after a reply, rarely when it is idle."""

from halfmoon.federation.transport.node import poll_delay


def test_an_idle_site_polls_as_rarely_as_flowers_node():
    assert [poll_delay(idle) for idle in (0.0, 0.1, 1.0, 4.0, 1000.0)] == [0.1, 0.1, 0.5, 2.0, 3.0]


def test_a_message_waits_for_half_of_the_pause_before_it_at_most():
    """Whenever a message comes after 0.2 s, the next poll is at most half of the time since the last reply away."""
    seconds = 0.0
    while seconds < 100:
        delay = poll_delay(seconds)
        assert delay <= max(0.1, seconds / 2)
        seconds += delay
