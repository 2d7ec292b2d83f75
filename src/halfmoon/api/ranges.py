"""The range of a number: what lies in it, and how a sentence names it."""

import math
from dataclasses import dataclass
from typing import Any

from halfmoon.core.errors import UserError
from halfmoon.storage import toml

LARGEST = 10**100
"""The largest whole number of an option: more digits are no number that anybody meant, and no float holds them all."""


@dataclass(frozen=True)
class Range:
    """Numbers from `low` to `high`, each end in it or not, and the words that say so."""

    low: float
    high: float
    words: str
    with_low: bool = True
    with_high: bool = True

    def check(self, name: str, value: Any) -> None:
        """Raise UserError where a number is not in the range; what is no number is not looked at."""
        if not isinstance(value, int | float) or isinstance(value, bool):
            return
        above = self.low <= value if self.with_low else self.low < value
        below = value <= self.high if self.with_high else value < self.high
        if not (above and below):
            raise UserError(f"{name} is {toml.text(value)}: it must be {self.words}.")
        if isinstance(value, int) and value > LARGEST:
            raise UserError(f"{name} is {toml.text(value)[:40]}...: it must be at most 10^100.")


def at_least(low: int) -> Range:
    """Return the finite numbers from `low` on."""
    return Range(low, math.inf, f"at least {low}", with_high=False)


POSITIVE = Range(0, math.inf, "a number above 0", with_low=False, with_high=False)
SHARE = Range(0, 1, "above 0 and at most 1", with_low=False)
PROBABILITY = Range(0, 1, "from 0 to 1")
BELOW_ONE = Range(0, 1, "from 0 to below 1", with_high=False)
BELOW_HALF = Range(0, 0.5, "from 0 to below 0.5", with_high=False)
BETWEEN = Range(0, 1, "above 0 and below 1", with_low=False, with_high=False)
