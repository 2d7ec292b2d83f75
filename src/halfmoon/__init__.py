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
    from halfmoon.data import load as load_data
    from halfmoon.engine.driver import Diverged
    from halfmoon.runs.callbacks import Callback, Callbacks, NullCallback, RunInfo
    from halfmoon.runs.factory import Problem, problem
    from halfmoon.runs.runner import RunResult, compare, resume
    from halfmoon.runs.runner import start as run
    from halfmoon.sites.inference import Model, load_model

_PLACES = {
    "run": ("halfmoon.runs.runner", "start"),
    "compare": ("halfmoon.runs.runner", "compare"),
    "resume": ("halfmoon.runs.runner", "resume"),
    "problem": ("halfmoon.runs.factory", "problem"),
    "Problem": ("halfmoon.runs.factory", "Problem"),
    "Model": ("halfmoon.sites.inference", "Model"),
    "load_model": ("halfmoon.sites.inference", "load_model"),
    "RunResult": ("halfmoon.runs.runner", "RunResult"),
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
    "load_data": ("halfmoon.data", "load"),
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
    "RunInfo",
    "RunResult",
    "Scenario",
    "Source",
    "Split",
    "StepMetrics",
    "Task",
    "UserError",
    "compare",
    "load_data",
    "load_model",
    "problem",
    "resume",
    "run",
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
