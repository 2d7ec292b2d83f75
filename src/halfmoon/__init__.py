"""halfmoon: federated semi-supervised learning.

One classifier is trained across many data holders when almost nothing is labeled and no image may leave its owner.
The names below are the public face; they are imported when they are first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from halfmoon.api.types import Batch, ClientUpdate, Federation, Local, Method, StepMetrics, Task
    from halfmoon.config.schema import Config
    from halfmoon.core.errors import UserError
    from halfmoon.data import Images, Scenario, Source, Split
    from halfmoon.engine.driver import Diverged
    from halfmoon.notebook.calls import compare, load_data, load_run, problem, resume, run, save_data, sweep
    from halfmoon.notebook.results import Results, SweepResults
    from halfmoon.notebook.trained import Model, load_model
    from halfmoon.runs.callbacks import Callback, Callbacks, NullCallback, RunInfo
    from halfmoon.runs.factory import Problem
    from halfmoon.runs.trackers import tracker

_PLACES = {
    "run": ("halfmoon.notebook.calls", "run"),
    "compare": ("halfmoon.notebook.calls", "compare"),
    "sweep": ("halfmoon.notebook.calls", "sweep"),
    "tracker": ("halfmoon.runs.trackers", "tracker"),
    "resume": ("halfmoon.notebook.calls", "resume"),
    "load_run": ("halfmoon.notebook.calls", "load_run"),
    "load_data": ("halfmoon.notebook.calls", "load_data"),
    "save_data": ("halfmoon.notebook.calls", "save_data"),
    "problem": ("halfmoon.notebook.calls", "problem"),
    "Problem": ("halfmoon.runs.factory", "Problem"),
    "Model": ("halfmoon.notebook.trained", "Model"),
    "load_model": ("halfmoon.notebook.trained", "load_model"),
    "Results": ("halfmoon.notebook.results", "Results"),
    "SweepResults": ("halfmoon.notebook.results", "SweepResults"),
    "RunInfo": ("halfmoon.runs.callbacks", "RunInfo"),
    "Callback": ("halfmoon.runs.callbacks", "Callback"),
    "Callbacks": ("halfmoon.runs.callbacks", "Callbacks"),
    "NullCallback": ("halfmoon.runs.callbacks", "NullCallback"),
    "Config": ("halfmoon.config.schema", "Config"),
    "Diverged": ("halfmoon.engine.driver", "Diverged"),
    "UserError": ("halfmoon.core.errors", "UserError"),
    "Images": ("halfmoon.data", "Images"),
    "Source": ("halfmoon.data", "Source"),
    "Scenario": ("halfmoon.data", "Scenario"),
    "Split": ("halfmoon.data", "Split"),
    "Batch": ("halfmoon.api.types", "Batch"),
    "Federation": ("halfmoon.api.types", "Federation"),
    "Local": ("halfmoon.api.types", "Local"),
    "Method": ("halfmoon.api.types", "Method"),
    "StepMetrics": ("halfmoon.api.types", "StepMetrics"),
    "Task": ("halfmoon.api.types", "Task"),
    "ClientUpdate": ("halfmoon.api.types", "ClientUpdate"),
}

__all__ = [
    "Batch",
    "Callback",
    "Callbacks",
    "ClientUpdate",
    "Config",
    "Diverged",
    "Federation",
    "Images",
    "Local",
    "Method",
    "Model",
    "NullCallback",
    "Problem",
    "Results",
    "RunInfo",
    "Scenario",
    "Source",
    "Split",
    "StepMetrics",
    "SweepResults",
    "Task",
    "UserError",
    "compare",
    "load_data",
    "load_model",
    "load_run",
    "problem",
    "resume",
    "run",
    "save_data",
    "sweep",
    "tracker",
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
