"""Check the contract of a method: its promises in a simulation, and with sites that exchange messages in memory.

Users import the names from `halfmoon.contract`.
"""

from halfmoon.federation.contract.checks import BrokenPromise
from halfmoon.federation.contract.promises import PromiseResult, check_method

__all__ = ["BrokenPromise", "PromiseResult", "check_method"]
