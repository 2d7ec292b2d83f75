"""All promises of the contract for one method: what its author runs before anybody else does."""

import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from halfmoon.api.uploads import Upload
from halfmoon.contract import checks
from halfmoon.contract.checks import BATCHINGS, ROUNDS, Broken
from halfmoon.contract.scene import CLASSES, NETWORK, Snapshot, begin, play
from halfmoon.core import rng, tree
from halfmoon.federation.protocol.messages import Reply
from halfmoon.methods import registry
from halfmoon.models import Network
from halfmoon.models import registry as networks

LIBRARIES = (str(Path(__file__).parents[1]), str(Path(torch.__file__).parent))
"""The folders of halfmoon and torch: an author wrote the other files of a traceback."""


@dataclass(frozen=True)
class PromiseResult:
    """One promise: what it says, whether it is kept, what was measured or is wrong, and the author's traceback."""

    promise: str
    kept: bool
    said: str = ""
    trace: str = ""


def check(method: str, options: dict[str, Any] | None = None, network: str | None = None) -> Iterator[PromiseResult]:
    """Yield every promise as it is tried, for a method by name with these options.

    `network` is one from outside to try it on, for gray images of 8x8 pixels. Raise `UserError` where there is no such
    method or network. A promise that cannot be tried because an earlier one is broken is left out.
    """
    entry = replace(registry.entry(method), method=registry.make(method, options))
    which = NETWORK if network is None else networks.make(network, 1, CLASSES, (8, 8), "batch", None)
    which.check((1, 8, 8))
    runs: dict[tuple[str, str], list[Snapshot]] = {}

    def tried(promise: str, function: Callable[[], Any]) -> PromiseResult:
        try:
            message = function()
        except Broken as broken:
            return PromiseResult(promise, False, str(broken))
        except Exception as error:  # whatever an author's code does
            words = f"it raised {type(error).__name__}{_place(error)}: {' '.join(str(error).split())[:300]}"
            return PromiseResult(promise, False, words, "".join(traceback.format_exception(error)))
        return PromiseResult(promise, True, message if isinstance(message, str) else "")

    def execute(rule: str, executor: str) -> str:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            runs[rule, executor] = checks.straight(entry, rule, executor, which)
        return f"{ROUNDS} rounds"

    yield tried("its fields are its options", lambda: checks.is_its_hyper_parameters(entry.method))
    for rule in BATCHINGS:
        words = {"both": "4 + 4 images a step", "rest": "2 + the rest, separate passes"}[rule]
        for executor in ("loop", "vmap"):
            yield tried(f"plays in {executor}, {words}", lambda rule=rule, executor=executor: execute(rule, executor))
        if {(rule, "loop"), (rule, "vmap")} <= runs.keys():
            pair = runs[rule, "loop"], runs[rule, "vmap"]
            yield tried(f"loop = vmap, {words}", lambda p=pair: f"within {checks.executors_agree(*p):.1e}")
    if ("both", "loop") not in runs:
        return
    run = runs["both", "loop"]
    yield tried("a run repeats itself", lambda: _again(entry, which, run))
    yield tried("gives a model, and keeps only tensors", lambda: _tensors(entry, which, run))
    yield tried("counts its passes", lambda: checks.counts_passes(*checks.scene(entry, "both", network=which)[:2]))
    yield tried("trains", lambda: _trained(entry, which, run))
    for executor in ("loop", "vmap"):
        if ("both", executor) in runs:
            each = runs["both", executor]
            yield tried(f"resumes bit by bit in {executor}", lambda e=executor, r=each: _resumed(entry, which, e, r))
    if entry.pooled:
        return
    for rule in BATCHINGS:
        if (rule, "loop") in runs:
            yield tried(
                "sites behind messages compute the same" + (", 2 + the rest" if rule == "rest" else ""),
                lambda rule=rule: _leaving(checks.sites_compute_the_same(entry, rule, runs[rule, "loop"], which)[1]),
            )


def _place(error: Exception) -> str:
    """Return the last line of the author's own code in an error's traceback, as " at FILE:LINE"."""
    frames = [(each.filename, each.lineno) for each in traceback.extract_tb(error.__traceback__)]
    own = [f" at {file}:{line}" for file, line in frames if not file.startswith(LIBRARIES)]
    return own[-1] if own else ""


def _again(entry: registry.MethodEntry, network: Network, run: list[Snapshot]) -> None:
    """Play once more, and look at what was given, and at what is kept."""
    method, shared, simulation = checks.scene(entry, "both", network=network)
    client_updates = dict(method.client_updates(shared.at(ROUNDS - 1)))
    server = begin(method, shared)
    copy = tree.map(torch.clone, server)
    checks.repeats(run, play(method, simulation, server, range(ROUNDS)))
    checks.leaves_as_given(server, copy)
    checks.keeps_no_state(entry, simulation, client_updates)


def _tensors(entry: registry.MethodEntry, network: Network, run: list[Snapshot]) -> None:
    method, shared, _ = checks.scene(entry, "both", network=network)
    model = tree.to(network.init(rng.generator(0, "model")), dtype=torch.float64)
    for server in (begin(method, shared), run[-1].server):
        checks.holds_tensors(method, shared, server, model)


def _trained(entry: registry.MethodEntry, network: Network, run: list[Snapshot]) -> str:
    method, shared, _ = checks.scene(entry, "both", network=network)
    before, after = (method.solution(shared, each) for each in (begin(method, shared), run[-1].server))
    moved = checks.furthest(after["params"], before["params"])
    if not moved > 1e-6:
        raise Broken(f"{ROUNDS} rounds leave the model as it was")
    if not all(bool(leaf.isfinite().all()) for leaf in tree.leaves(after)):
        raise Broken(f"after {ROUNDS} rounds the model has numbers that are not finite")
    return f"parameters move by {moved:.2g}"


def _resumed(entry: registry.MethodEntry, network: Network, executor: str, run: list[Snapshot]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        checks.resumes(entry, run, executor, Path(folder) / "run", network)


def _leaving(replies: list[Reply]) -> str:
    """Return in words what leaves a site: every part that goes up, with its bytes."""
    parts: dict[str, int] = {}
    for reply in replies:
        for name, part in Upload.from_tree(reply.upload).parts.items():
            parts[name] = max(parts.get(name, 0), tree.nbytes(part))
    return "what leaves a site: " + ", ".join(f"{name} ({count:,} bytes)" for name, count in parts.items())
