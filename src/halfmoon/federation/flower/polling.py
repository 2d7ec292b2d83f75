"""How often a SuperNode asks for work: soon after it had some, then more seldom, at last every three seconds.

Flower's loop sleeps three seconds whenever nothing has come, which is most of the time of a short round. A round is
several messages to the same sites, so one that has just answered is likely to be asked again at once; an idle site
burdens its server as before.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

IDLE = 3.0
"""Seconds that Flower sleeps where nothing has come; what is shorter is a wait for the site's own program."""

FIRST = 0.2
"""Seconds until the first look after an answer; each further one waits twice as long, up to what Flower would."""

OWN = 0.1
"""Seconds, at most, between two looks for what the site's own program has answered."""


class Pace:
    """Stands for the module `time` in Flower's loop: its `sleep` is another, everything else is the module's."""

    def __init__(self, sleep: Callable[[float], None] = time.sleep) -> None:
        """Sleep by `sleep`."""
        self._sleep = sleep
        self._looks = 0

    def sleep(self, seconds: float) -> None:
        """Sleep so long at most, less where work is to be expected."""
        if seconds < IDLE:
            self._looks = 0
            self._sleep(min(seconds, OWN))
            return
        self._sleep(min(seconds, FIRST * 2**self._looks))
        self._looks = min(self._looks + 1, 10)

    def __getattr__(self, name: str) -> Any:
        """Return what the module has."""
        return getattr(time, name)
