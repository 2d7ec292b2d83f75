"""Run all checks of the contract for one method, as its author does before using it."""

import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from halfmoon.api.uploads import Upload
from halfmoon.core import rng, tree
from halfmoon.federation.contract import checks
from halfmoon.federation.contract.checks import BATCHINGS, ROUNDS, BrokenPromise
from halfmoon.federation.contract.small_federation import (
    CLASSES,
    NETWORK,
    Snapshot,
    max_difference,
    run_rounds,
    start_server,
)
from halfmoon.methods import registry
from halfmoon.models import Network
from halfmoon.models import registry as networks

LIBRARIES = (str(Path(__file__).parents[1]), str(Path(torch.__file__).parent))
"""The folders of halfmoon and torch. Other files in a traceback are the author's."""

BATCH_DESCRIPTIONS = {"both": "4 + 4 images a step", "rest": "2 + the rest, separate passes"}
"""The batch rules `BATCHINGS` in the names of promises."""

MIN_TRAINED_DISTANCE = 1e-6
"""How much the parameter that changed the most has changed, at a minimum, if a method trains."""


@dataclass(frozen=True)
class PromiseResult:
    """The result of one check.

    Attributes:
        promise: the checked property, such as "trains".
        kept: whether the method has the property.
        said: a measurement, or a sentence about the fault.
        trace: the traceback of an error in the author's code.
    """

    promise: str
    kept: bool
    said: str = ""
    trace: str = ""


def check_method(
    method: str, options: dict[str, Any] | None = None, network: str | None = None
) -> Iterator[PromiseResult]:
    """Run all checks of the contract for a method, and yield each result as soon as it is known.

    The method trains a small federation under each batch rule of `BATCHINGS`, with each executor: "loop" trains its
    clients one after the other, "vmap" together. Later checks compare these runs with repeated, resumed and remote
    ones. A check that needs the run of a failed one is left out.

    Args:
        method: the name of the method.
        options: its options.
        network: the name of a custom network to test with, for gray images of 8x8 pixels; None: the small network.

    Yields:
        The result of each check.

    Raises:
        UserError: there is no such method or network.
    """
    entry = replace(registry.entry(method), method=registry.make(method, options))
    if network is None:
        test_network = NETWORK
    else:
        test_network = networks.make(network, 1, CLASSES, (8, 8), "batch", None)
    test_network.check((1, 8, 8))
    runs: dict[tuple[str, str], list[Snapshot]] = {}  # by batch rule and executor, without failed ones

    def run_and_store(batch_rule: str, executor: str) -> str:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the federation is too small for most methods, which they report
            runs[batch_rule, executor] = checks.run_experiment(entry, batch_rule, executor, test_network)
        return f"{ROUNDS} rounds"

    yield _run_check("its fields are its options", partial(checks.check_fields, entry.method))
    for batch_rule in BATCHINGS:
        description = BATCH_DESCRIPTIONS[batch_rule]
        for executor in ("loop", "vmap"):
            yield _run_check(f"runs in {executor}, {description}", partial(run_and_store, batch_rule, executor))
        if (batch_rule, "loop") in runs and (batch_rule, "vmap") in runs:
            compare = partial(_compare_executors, runs[batch_rule, "loop"], runs[batch_rule, "vmap"])
            yield _run_check(f"loop = vmap, {description}", compare)
    if ("both", "loop") not in runs:
        return
    run = runs["both", "loop"]
    yield _run_check("a run repeats itself", partial(_check_repeated_run, entry, test_network, run))
    yield _run_check("gives a model, and keeps only tensors", partial(_check_tensors, entry, test_network, run))
    yield _run_check("counts its passes", partial(_check_passes, entry, test_network))
    yield _run_check("trains", partial(_check_training, entry, test_network, run))
    for executor in ("loop", "vmap"):
        if ("both", executor) in runs:
            resume = partial(_check_resume, entry, test_network, executor, runs["both", executor])
            yield _run_check(f"resumes bit by bit in {executor}", resume)
    if entry.pooled:
        return  # a centralized method has no sites
    for batch_rule in BATCHINGS:
        if (batch_rule, "loop") in runs:
            suffix = ", 2 + the rest" if batch_rule == "rest" else ""
            check_sites = partial(_check_sites, entry, test_network, batch_rule, runs[batch_rule, "loop"])
            yield _run_check(f"sites behind messages compute the same{suffix}", check_sites)


def _run_check(promise: str, function: Callable[[], Any]) -> PromiseResult:
    """Run one check of a method, and describe its result.

    Args:
        promise: the name of what is checked.
        function: the check. It raises an exception if the method fails, and may return a sentence about a measurement.
    """
    try:
        message = function()
    except BrokenPromise as error:
        return PromiseResult(promise, kept=False, said=str(error))
    except Exception as error:  # any error in the author's code
        reason = " ".join(str(error).split())[:300]
        message = f"it raised {type(error).__name__}{_author_line(error)}: {reason}"
        trace = "".join(traceback.format_exception(error))
        return PromiseResult(promise, kept=False, said=message, trace=trace)
    return PromiseResult(promise, kept=True, said=message if isinstance(message, str) else "")


def _author_line(error: Exception) -> str:
    """Return the last line of the author's code in an error's traceback, as " at FILE:LINE", or ""."""
    lines = [
        f" at {frame.filename}:{frame.lineno}"
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(LIBRARIES)
    ]
    return lines[-1] if lines else ""


def _compare_executors(loop: list[Snapshot], vmap: list[Snapshot]) -> str:
    return f"within {checks.compare_executors(loop, vmap):.1e}"


def _check_repeated_run(entry: registry.MethodEntry, network: Network, run: list[Snapshot]) -> None:
    """Check that a second run has the same bits, and that it changes neither its arguments nor the method.

    Args:
        entry: the method's entry of the catalog.
        network: the network to train.
        run: the state after each round of the first run.
    """
    method, task, simulation = checks.make_federation(entry, "both", network=network)
    client_updates = dict(method.client_updates(task.at(ROUNDS - 1)))
    server = start_server(method, task)
    copy = tree.map(torch.clone, server)
    checks.check_equal_runs(run, run_rounds(method, simulation, server, range(ROUNDS)))
    checks.check_unchanged(server, copy)
    checks.check_stateless(entry, simulation, client_updates)


def _check_tensors(entry: registry.MethodEntry, network: Network, run: list[Snapshot]) -> None:
    """Check the server's trees before and after a run."""
    method, task, _ = checks.make_federation(entry, "both", network=network)
    model = tree.to(network.init(rng.generator(0, "model")), dtype=torch.float64)
    for server in (start_server(method, task), run[-1].server):
        checks.check_tensors(method, task, server, model)


def _check_passes(entry: registry.MethodEntry, network: Network) -> None:
    method, task, _ = checks.make_federation(entry, "both", network=network)
    checks.check_passes(method, task)


def _check_training(entry: registry.MethodEntry, network: Network, run: list[Snapshot]) -> str:
    """Check that a run of a method changes the model's parameters, and that they remain finite.

    Args:
        entry: the method's entry of the catalog.
        network: the network that was trained.
        run: the state after each round.

    Returns:
        A remark for the user: how far the parameters have moved.

    Raises:
        BrokenPromise: the parameters did not change, or are not finite.
    """
    method, task, _ = checks.make_federation(entry, "both", network=network)
    before = method.solution(task, start_server(method, task))
    after = method.solution(task, run[-1].server)
    distance = max_difference(after["params"], before["params"])
    if not distance > MIN_TRAINED_DISTANCE:
        raise BrokenPromise(f"{ROUNDS} rounds leave the model as it was")
    if not all(bool(leaf.isfinite().all()) for leaf in tree.leaves(after)):
        raise BrokenPromise(f"after {ROUNDS} rounds the model has numbers that are not finite")
    return f"parameters move by {distance:.2g}"


def _check_resume(entry: registry.MethodEntry, network: Network, executor: str, run: list[Snapshot]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        checks.check_resume(entry, run, executor, Path(folder) / "run", network)


def _check_sites(entry: registry.MethodEntry, network: Network, batch_rule: str, run: list[Snapshot]) -> str:
    """Check the method with sites, and list what they upload: every section with its largest size."""
    _, replies = checks.check_sites(entry, batch_rule, run, network)
    sizes: dict[str, int] = {}
    for reply in replies:
        for name, leaves in Upload.from_tree(reply.upload).parts.items():
            sizes[name] = max(sizes.get(name, 0), tree.nbytes(leaves))
    return "what leaves a site: " + ", ".join(f"{name} ({count:,} bytes)" for name, count in sizes.items())
