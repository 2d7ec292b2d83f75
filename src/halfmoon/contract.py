"""The contract of every method, as functions for the tests of a method; `halfmoon check-method` calls the same."""

from halfmoon.federation.contract import BrokenPromise, PromiseResult, check_method

__all__ = ["BrokenPromise", "PromiseResult", "check_method"]
