"""halfmoon: federated semi-supervised learning.

One classifier is trained across many data holders when almost nothing is labeled and no image may leave its owner.
The names below are the public face; they are imported when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from halfmoon.build import Outcome, compare, resume
    from halfmoon.build import start as run
    from halfmoon.client import Diverged
    from halfmoon.config import Config
    from halfmoon.data import Images, Scenario, Source, Split
    from halfmoon.data import load as load_data
    from halfmoon.deploy import Model, load_model
    from halfmoon.errors import UserError
    from halfmoon.pieces import World, world
    from halfmoon.types import Batch, Federation, Local, Method, Notes, Task, Work
    from halfmoon.watch import Running, Silence, Watch, Watches

_PLACES = {
    "run": ("halfmoon.build", "start"),
    "compare": ("halfmoon.build", "compare"),
    "resume": ("halfmoon.build", "resume"),
    "world": ("halfmoon.pieces", "world"),
    "World": ("halfmoon.pieces", "World"),
    "Model": ("halfmoon.deploy", "Model"),
    "load_model": ("halfmoon.deploy", "load_model"),
    "Outcome": ("halfmoon.build", "Outcome"),
    "Running": ("halfmoon.watch", "Running"),
    "Watch": ("halfmoon.watch", "Watch"),
    "Watches": ("halfmoon.watch", "Watches"),
    "Silence": ("halfmoon.watch", "Silence"),
    "Config": ("halfmoon.config", "Config"),
    "Diverged": ("halfmoon.client", "Diverged"),
    "UserError": ("halfmoon.errors", "UserError"),
    "Images": ("halfmoon.data", "Images"),
    "Source": ("halfmoon.data", "Source"),
    "Scenario": ("halfmoon.data", "Scenario"),
    "Split": ("halfmoon.data", "Split"),
    "load_data": ("halfmoon.data", "load"),
    "Batch": ("halfmoon.types", "Batch"),
    "Federation": ("halfmoon.types", "Federation"),
    "Local": ("halfmoon.types", "Local"),
    "Method": ("halfmoon.types", "Method"),
    "Notes": ("halfmoon.types", "Notes"),
    "Task": ("halfmoon.types", "Task"),
    "Work": ("halfmoon.types", "Work"),
}

__all__ = [
    "Batch",
    "Config",
    "Diverged",
    "Federation",
    "Images",
    "Local",
    "Method",
    "Model",
    "Notes",
    "Outcome",
    "Running",
    "Scenario",
    "Silence",
    "Source",
    "Split",
    "Task",
    "UserError",
    "Watch",
    "Watches",
    "Work",
    "World",
    "compare",
    "load_data",
    "load_model",
    "resume",
    "run",
    "world",
]


def __getattr__(name: str) -> Any:
    """Import a public name on its first use, so that `halfmoon --help` does not wait for torch."""
    if name not in _PLACES:
        raise AttributeError(f"module 'halfmoon' has no attribute '{name}'")
    module, attribute = _PLACES[name]
    return import_module(module).__dict__[attribute]


def __dir__() -> list[str]:
    """Return the public names."""
    return __all__
