"""Runs with user code: methods passed as objects, and checks that plugins and weights have not changed."""

import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from halfmoon.api.types import Method
from halfmoon.config.schema import Config, initial_weights, plugin_origins
from halfmoon.core import plugins, weight_files
from halfmoon.core.errors import UserError
from halfmoon.methods import registry
from halfmoon.methods.fedavg import FedAvg
from halfmoon.methods.objectives import Objective

_ORIGIN = re.compile(r"^# (.+ sha256 [0-9a-f]{64})$", re.MULTILINE)
"""A comment of a run's config.toml that records the hash of a plugin or of weights."""

_UNNAMED = "of one's own"
"""Stands for the name of a custom method in errors, "method of one's own ...", as long as it has none."""


CustomMethod = Method | Objective | registry.MethodEntry | Callable[[], Method]
"""A method as an object, an objective for FedAvg, a registry entry, or a callable such as `partial(FedAvg, Mine())`."""


def register(method: CustomMethod) -> str:
    """Register a custom method in this process, so that configurations can name it, and return its name.

    The name is that of its class, "module:Class". An objective (a loss) is trained by FedAvg, and FedAvg with an
    objective has the name of the objective's class.

    Args:
        method: the method, an objective, or an entry of the catalog of methods; or a class or function that builds one.

    Raises:
        UserError: it is no method.
    """
    # Calls a class or function; an object is returned unchanged.
    instance: Any = registry.instance(name=_UNNAMED, plugin=method)
    is_entry = isinstance(instance, registry.MethodEntry)
    # `core` is the object that gives the name: the objective of FedAvg, otherwise the method.
    method_class = type(registry.core(instance.method if is_entry else instance))
    name = f"{method_class.__module__}:{method_class.__qualname__}"
    if not is_entry:
        # The name stands for the method with its default options, as in a process that resumes the run and imports the
        # class. The run's file stores the options of `method` that differ.
        # A class without defaults is registered as it is.
        with suppress(TypeError):
            instance = method_class()
    registry.plugin_entry(name, instance)  # only to raise the error of an object that is no method
    plugins.register("method", name, instance)
    return name


def _changed_options(method: Any, name: str) -> dict[str, Any]:
    """Find the options of a method that differ from the defaults of the registered method of this name.

    A run's config.toml stores the method's name and these options, from which a later process rebuilds the method.

    Raises:
        UserError: it differs in anything else, such as a function; the file stores numbers, strings and Booleans only.
    """
    default_method = registry.entry(name).method
    options = registry.options_in(method)  # by name, also those of its objective
    defaults = registry.options_in(default_method)
    # An option of the instance has the instance's value as its default.
    changed = {
        option_name: option.default
        for option_name, option in options.items()
        if option_name in defaults and option != defaults[option_name]
    }
    # A method built from the changed options must be equal to the object; otherwise it could not be rebuilt.
    if registry.with_options(default_method, changed) != method:
        raise UserError(
            f"method {name} differs from {type(registry.core(method)).__name__}() in more than its options, which a "
            "run's file could not say: give such a method a class or a MethodEntry of its own."
        )
    return changed


def describe_method(method: CustomMethod | str) -> tuple[str, dict[str, Any]]:
    """Return the name of a method and its options that are not at their defaults, as a configuration stores a method.

    An object is registered in this process under the name.

    Raises:
        UserError: it is no method, or a run's file cannot store the options in which it differs from its defaults.
    """
    # A name of the catalog means the method with its defaults.
    if isinstance(method, str):
        return method, {}
    name = register(method)
    instance = registry.instance(name=_UNNAMED, plugin=method)
    # An entry is registered with its method as it is, so none of its options differs.
    if isinstance(instance, registry.MethodEntry):
        return name, {}
    # The registered method of an objective is FedAvg with it.
    if isinstance(instance, Objective):
        instance = FedAvg(instance)
    return name, _changed_options(instance, name)


def check_origins(config: Config, text: str, root: Path) -> None:
    """Check that the plugins (code of the user) and the initial weights of a stored run have not changed.

    A run that was resumed with other code would mix two methods.

    Args:
        config: the run's configuration.
        text: its config.toml, whose comments record the hashes.
        root: the folder, for messages.

    Raises:
        UserError: a plugin or the weights are missing, or have another hash.
    """
    # Lines such as "weights from FILE sha256 HASH" and "PLUGIN from MODULE sha256 HASH".
    recorded = set(_ORIGIN.findall(text))
    weights = initial_weights(config)
    current = ""
    if weights is not None:
        current = f"weights from {weight_files.display_name(weights)} sha256 {weight_files.sha256_of(weights)}"
    before = next((line for line in recorded if line.startswith("weights from ")), "")
    # Only the hashes are compared: the same file may be in another folder now.
    if current.rpartition(" ")[2] != before.rpartition(" ")[2]:
        raise UserError(
            f"{root} was started with the {before or 'network without weights'}, but here is "
            f"{current or 'no such file'}: restore it, or start a new run."
        )
    for origin in plugin_origins(config):
        if str(origin) in recorded:
            continue
        first = next((line for line in sorted(recorded) if line.startswith(f"{origin.name} from ")), None)
        if first is None:
            difference = f"does not record which {origin.name} it was started with"
        else:
            difference = f"was started with {first.rpartition(' from ')[2]}"
        current = str(origin).rpartition(" from ")[2]
        raise UserError(f"{root} {difference}, but here is {current}: restore it, or start a new run.")
