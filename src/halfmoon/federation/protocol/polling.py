"""Pauses between polls: Flower cannot notify a server or a site of a message, so both ask for it."""

from collections import deque

EARLY_SHARE = 0.8
"""When to poll first, as a share of the shortest recent wait."""

STEP_SHARE = 0.1
"""Shortest pause, as a share of the time of the first poll."""

UNKNOWN_STEP_SECONDS = 0.1
"""Shortest pause before any message has arrived."""

SHORTEST_SECONDS = 0.03
"""Shortest pause. A poll takes about 5 ms of a processor of the server's machine."""

RECENT_MESSAGES = 8
"""Number of messages whose waits are remembered."""


class PollSchedule:
    """Choose the pause before the next poll for a message, from the time that earlier messages took.

    The rounds of a federation take about the same time. So the first poll is a little before the shortest recent wait,
    and the pauses after it are short. It is the shortest one because a round may have several messages after different
    waits, and a message that is ready should not wait long.

    If the message takes longer, the pauses grow in proportion to the time since the first poll.
    """

    def __init__(self, growth: float, longest: float, longest_first: float) -> None:
        """Create a schedule that has seen no message yet; until then the first poll is at once.

        Args:
            growth: pause as a share of the time since the first poll.
            longest: longest pause in seconds.
            longest_first: longest pause in seconds before the first poll.
        """
        self.growth = growth
        self.longest = longest
        self.longest_first = longest_first
        self._waits: deque[float] = deque(maxlen=RECENT_MESSAGES)

    def record(self, waited: float) -> None:
        """Remember that a message arrived after this many seconds."""
        self._waits.append(waited)

    def pause(self, waited: float) -> float:
        """Compute the seconds until the next poll.

        Args:
            waited: seconds for which the message has been waited for.
        """
        first_poll = EARLY_SHARE * min(self._waits, default=0.0)
        step = STEP_SHARE * first_poll if self._waits else UNKNOWN_STEP_SECONDS
        step = max(SHORTEST_SECONDS, step)
        if waited < first_poll:
            # At least a step, so that a wait which ends at once is not followed by two polls at the same time.
            return min(self.longest_first, max(step, first_poll - waited))
        return min(self.longest, max(step, self.growth * (waited - first_poll)))
