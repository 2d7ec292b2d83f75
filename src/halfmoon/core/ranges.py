"""Ranges of numeric options: a check, and a description for messages."""

import math
from dataclasses import dataclass
from typing import Any

from halfmoon.core import toml
from halfmoon.core.errors import UserError

LARGEST_INTEGER = 10**100
"""Largest integer of an option. No option needs more digits, and a float cannot represent all of such an integer."""


@dataclass(frozen=True)
class Range:
    """Numbers between two limits.

    Attributes:
        low: lower limit.
        high: upper limit.
        description: the range in words, as the end of "it must be ...".
        with_low: whether the lower limit belongs to the range.
        with_high: whether the upper limit belongs to the range.
    """

    low: float
    high: float
    description: str
    with_low: bool = True
    with_high: bool = True

    def check(self, name: str, value: Any) -> None:
        """Check that a number is in the range. Values of other types are not checked.

        Raises:
            UserError: the number is outside.
        """
        if not isinstance(value, int | float) or isinstance(value, bool):
            return
        is_above_low = self.low <= value if self.with_low else self.low < value
        is_below_high = value <= self.high if self.with_high else value < self.high
        if not (is_above_low and is_below_high):
            raise UserError(f"{name} is {toml.format_text(value)}: it must be {self.description}.")
        if isinstance(value, int) and value > LARGEST_INTEGER:
            raise UserError(f"{name} is {toml.format_text(value)[:40]}...: it must be at most 10^100.")


def minimum(low: int) -> Range:
    """Build the range of finite numbers from `low` on."""
    return Range(low, math.inf, f"at least {low}", with_high=False)


FINITE = Range(-math.inf, math.inf, "a finite number", with_low=False, with_high=False)
POSITIVE = Range(0, math.inf, "a number above 0", with_low=False, with_high=False)
SHARE = Range(0, 1, "above 0 and at most 1", with_low=False)
PROBABILITY = Range(0, 1, "from 0 to 1")
BELOW_ONE = Range(0, 1, "from 0 to below 1", with_high=False)
BELOW_HALF = Range(0, 0.5, "from 0 to below 0.5", with_high=False)
BETWEEN = Range(0, 1, "above 0 and below 1", with_low=False, with_high=False)
