"""Sweeps: grids of runs with published numbers; `halfmoon.sweep(NAME)`, the package called, plays one."""

import sys
from importlib import import_module
from types import ModuleType
from typing import Any


class _Sweep(ModuleType):
    def __call__(self, *args: Any, **options: Any) -> Any:
        return import_module("halfmoon").__getattr__("sweep")(*args, **options)


sys.modules[__name__].__class__ = _Sweep  # `halfmoon.sweep` is this package as soon as anything has imported it
