"""What every method has to keep, as functions: the test suite calls them, and so does `halfmoon check-method`."""

from halfmoon.contract.checks import Broken
from halfmoon.contract.promises import PromiseResult, check

__all__ = ["Broken", "PromiseResult", "check"]
