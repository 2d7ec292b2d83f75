"""halfmoon: federated semi-supervised learning.

One classifier is trained across many data holders when almost nothing is labeled and no image may leave its owner.
The names below are the public face; they are imported when they are first used.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from halfmoon.api.types import Batch, ClientData, ClientUpdate, Federation, Method, StepMetrics, Task
    from halfmoon.config.schema import Config
    from halfmoon.core.errors import Diverged, UserError
    from halfmoon.data import Images, Scenario, Source, Split
    from halfmoon.runs.callbacks import Callback, Callbacks, NullCallback, RunInfo
    from halfmoon.runs.factory import Problem
    from halfmoon.runs.trackers import tracker
    from halfmoon.sites.inference.model import Model, load_model
    from halfmoon.studies.estimator import FederatedClassifier
    from halfmoon.studies.python_api import compare, load_data, load_run, problem, resume, run, save_data, sweep
    from halfmoon.studies.results import Results, SweepResults

_MODULES = {
    "api.types": ("Batch", "ClientUpdate", "Federation", "ClientData", "Method", "StepMetrics", "Task"),
    "config.schema": ("Config",),
    "core.errors": ("Diverged", "UserError"),
    "data": ("Images", "Scenario", "Source", "Split"),
    "runs.callbacks": ("Callback", "Callbacks", "NullCallback", "RunInfo"),
    "runs.factory": ("Problem",),
    "runs.trackers": ("tracker",),
    "sites.inference.model": ("Model", "load_model"),
    "studies.estimator": ("FederatedClassifier",),
    "studies.python_api": ("compare", "load_data", "load_run", "problem", "resume", "run", "save_data", "sweep"),
    "studies.results": ("Results", "SweepResults"),
}
"""The public names by the modules that have them."""

__all__ = [
    "Batch",
    "Callback",
    "Callbacks",
    "ClientData",
    "ClientUpdate",
    "Config",
    "Diverged",
    "FederatedClassifier",
    "Federation",
    "Images",
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
if find_spec("sklearn") is None:
    # `from halfmoon import *` must not fail for want of an optional package.
    __all__.remove("FederatedClassifier")


def __getattr__(name: str) -> Any:
    """Import a public name on its first use, so that `halfmoon --help` does not wait for torch."""
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(f"halfmoon.{module}"), name)
    if name == "__version__":
        from halfmoon.core.versions import installed_version

        return installed_version("halfmoon")
    raise AttributeError(f"module 'halfmoon' has no attribute '{name}'")


def __dir__() -> list[str]:
    """Return the public names."""
    return __all__
