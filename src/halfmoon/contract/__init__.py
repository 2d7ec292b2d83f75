"""The contract of every method, as functions. The test suite calls them, and so does `halfmoon check-method`."""

from halfmoon.contract.checks import BrokenPromise
from halfmoon.contract.promises import PromiseResult, check_method

__all__ = ["BrokenPromise", "PromiseResult", "check_method"]
