"""The checks of the contract: each raises `BrokenPromise`, in one sentence, for a method that does not pass."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch

from halfmoon.api.method_entry import MethodEntry
from halfmoon.api.types import Method, Task, WeightedMetric
from halfmoon.core import tree
from halfmoon.core.tree import Tree
from halfmoon.engine.sampling import Batching
from halfmoon.engine.simulation import Simulation
from halfmoon.federation.contract.sites import make_remote_runtime
from halfmoon.federation.contract.small_federation import (
    NETWORK,
    ExecutorName,
    Snapshot,
    make_dataset,
    make_simulation,
    make_task,
    max_difference,
    run_rounds,
    start_server,
    trees_equal,
)
from halfmoon.federation.protocol.messages import Reply, read_message
from halfmoon.models import Network
from halfmoon.storage.run_folder import RunFolder
from halfmoon.storage.state_store import TreeStore

ROUNDS = 3
SIZES = ((5, 4), (3, 8), (6, 7), (4, 6))
"""(labeled, unlabeled) rows of each client: few, but with unequal steps under both batch rules."""

BATCHINGS = {"both": Batching(4, 4), "rest": Batching(2, "rest")}
"""Batches of 4 + 4 images; and of 2 + the rest."""

STATISTICS: dict[str, dict[str, Any]] = {"both": {}, "rest": {"statistics": "separate", "labeling": "running"}}
"""Options of the task with these batches: "rest" has separate passes, and pseudo-labels with running statistics."""

TOLERANCE = 1e-9
"""The largest difference between loop and vmap, in float64."""


class BrokenPromise(AssertionError):
    """A method does not pass a check of the contract."""


def make_federation(
    entry: MethodEntry,
    rule: str,
    executor: str = "loop",
    labels_at: str | None = None,
    network: Network = NETWORK,
    **options: Any,
) -> tuple[Method, Task, Simulation]:
    """Make a small federation for the checks of a method, with unequal clients and in double precision.

    Args:
        entry: the method.
        rule: the batch rule: "both", 4 labeled and 4 unlabeled images a step; or "rest", 2 labeled images a step, and as
            many unlabeled ones as make all of the client's take part once. `STATISTICS` has the options of the task
            that go with the rule: with "rest", labeled and unlabeled images have separate forward passes.
        executor: "loop" trains the clients one after the other, "vmap" all at once.
        labels_at: where labels are: at all "clients", "some" clients or the "server"; None: the first location that the
            method supports.
        network: the network.
        options: other options of `make_simulation`.
    """
    task = make_task(network, rounds=ROUNDS, **STATISTICS[rule])
    dataset = make_dataset(
        SIZES, all_labels=entry.all_labels, pooled=entry.pooled, labels_at=labels_at or entry.label_locations[0]
    )
    simulation = make_simulation(
        entry.method, task, dataset, batching=BATCHINGS[rule], executor=cast(ExecutorName, executor), **options
    )
    return entry.method, task, simulation


def run_experiment(entry: MethodEntry, rule: str, executor: str = "loop", network: Network = NETWORK) -> list[Snapshot]:
    """Run all `ROUNDS` rounds of a method in a small federation, and return the state after each of them.

    Args:
        entry: the method.
        rule: the batch rule, "both" or "rest", as in `make_federation`.
        executor: "loop" trains the clients one after the other, "vmap" all at once.
        network: the network.
    """
    method, task, simulation = make_federation(entry, rule, executor, network=network)
    return run_rounds(method, simulation, start_server(method, task), range(ROUNDS))


def flatten_numbers(row: Any) -> list[float]:
    """List the numbers in nested metrics in the order of sorted keys, so that two sets of metrics can be compared.

    Args:
        row: nested dicts, lists and tuples of numbers and None. None becomes a number that no metric has.
    """
    if isinstance(row, dict):
        return [value for key in sorted(row) for value in flatten_numbers(row[key])]
    if isinstance(row, list | tuple):
        return [value for item in row for value in flatten_numbers(item)]
    return [-1e300 if row is None else float(row)]


def compare_executors(loop: list[Snapshot], vmap: list[Snapshot]) -> float:
    """Compare a run whose clients train one by one with a run whose clients are vmapped, round by round.

    Both runs have the same seed and are in float64, so that only the order of summations may differ.

    Args:
        loop: the states after each round of the first run: the server's tree, all stored trees, and the round's report.
        vmap: those of the second run.

    Returns:
        The largest difference between two trees, relative to max(1, |value|).

    Raises:
        BrokenPromise: a method does not pass: states, memories or metrics differ by more than rounding (`TOLERANCE`).
    """
    largest = 0.0
    for number, (from_loop, from_vmap) in enumerate(zip(loop, vmap, strict=True), start=1):
        pairs = (
            ("server's tree", from_vmap.server, from_loop.server),
            ("memories", from_vmap.state, from_loop.state),
        )
        for name, vmap_tree, loop_tree in pairs:
            _compare_names(name, vmap_tree, loop_tree)
            difference = max_difference(vmap_tree, loop_tree)
            largest = max(largest, difference)
            if not difference < TOLERANCE:  # also for NaN
                raise BrokenPromise(f"after round {number} the {name} of loop and vmap differ by {difference:.2g}")
        if from_vmap.report.cohort != from_loop.report.cohort or from_vmap.report.cost != from_loop.report.cost:
            raise BrokenPromise(f"in round {number} loop and vmap report another cohort or cost")
        if from_vmap.report.samples.keys() != from_loop.report.samples.keys():
            raise BrokenPromise(f"in round {number} loop and vmap report other samples")
        _compare_metrics(number, from_vmap.report.samples, from_loop.report.samples)
        vmap_quality = _comparable_quality(from_vmap.report.pseudo)  # of pseudo-labels
        loop_quality = _comparable_quality(from_loop.report.pseudo)
        _compare_metrics(number, vmap_quality, loop_quality)
    return largest


def _compare_metrics(number: int, vmap: Any, loop: Any) -> None:
    """Raise `BrokenPromise` if two rows of metrics of round `number` differ by more than rounding."""
    for vmap_value, loop_value in zip(flatten_numbers(vmap), flatten_numbers(loop), strict=True):
        # Negated, so that NaN fails too.
        if not abs(vmap_value - loop_value) <= TOLERANCE * max(1.0, abs(loop_value)):
            raise BrokenPromise(f"in round {number} loop and vmap report {vmap_value} and {loop_value}")


def _comparable_quality(pseudo: dict[str, Any] | None) -> dict[str, Any]:
    """Select the metrics of pseudo-labels that rounding cannot change, to compare two runs.

    The accuracies and the areas under ROC curves (AUC) of all pseudo-labels are left out: they also count those that
    training does not use, and where all classes are equally likely, rounding decides the label.

    Args:
        pseudo: the metrics of a round; None if it had no pseudo-labels. A method that trains several models has the
            same metrics for each of them under "models", by name.
    """
    if pseudo is None:
        return {}
    left_out = ("accuracy", "per_class", "auc_confidence", "auc_weight", "models")
    row = {name: value for name, value in pseudo.items() if name not in left_out}
    for name, model_quality in pseudo.get("models", {}).items():
        row[name] = _comparable_quality(model_quality)
    return row


def _compare_names(subject: str, first: Tree, second: Tree) -> None:
    """Raise `BrokenPromise` if two trees have different names; `subject` is what the message calls them."""
    differing = sorted(tree.flatten(first).keys() ^ tree.flatten(second).keys())
    if differing:
        raise BrokenPromise(f"the {subject} has {differing[0]!r} in one run and not in the other")


def check_equal_runs(one: list[Snapshot], two: list[Snapshot]) -> None:
    """Check that two runs of one seed are equal bit by bit; raise `BrokenPromise` if they differ.

    Args:
        one: the states after each round of the first run: the server's tree, all stored trees, and the round's report.
        two: those of the second run.
    """
    for number, (a, b) in enumerate(zip(one, two, strict=True), 1):
        equal_trees = trees_equal(a.server, b.server) and trees_equal(a.state, b.state)
        if not equal_trees or flatten_numbers(a.report) != flatten_numbers(b.report):
            raise BrokenPromise(
                f"two runs of one seed differ after round {number}: it draws random numbers, or keeps state"
            )


def check_resume(
    entry: MethodEntry, run: list[Snapshot], executor: str, folder: Path, network: Network = NETWORK
) -> None:
    """Check that a run which is resumed from a checkpoint before its last round ends in the same bits.

    Args:
        entry: the method.
        run: the states after each of the `ROUNDS` rounds of a run under the batch rule "both".
        executor: "loop" trains the clients one after the other, "vmap" all at once.
        folder: a new folder for the checkpoint.
        network: the network.

    Raises:
        BrokenPromise: the method does not pass.
    """
    before_last, last = run[-2:]
    saved_round = ROUNDS - 1  # the number of completed rounds, and the next round counted from 0
    store = TreeStore()
    for prefix, trees in before_last.state.items():
        for key, stored_tree in trees.items():
            store.put(f"{prefix}/{key}", stored_tree)
    with RunFolder.create(folder, config="", identity="0" * 64) as run_folder:  # any identity: no options are compared
        run_folder.save(
            saved_round,
            state={"server": before_last.server},
            meta={"cost": before_last.report.cost},
            clients=store,
        )
    with RunFolder.open(folder) as run_folder:
        loaded = run_folder.load()
    if loaded is None or loaded.round != saved_round:
        raise BrokenPromise(f"the checkpoint of round {saved_round} cannot be read")
    method, _, simulation = make_federation(entry, "both", executor, network=network)
    simulation.restore(loaded.clients, loaded.meta["cost"])
    if not trees_equal(simulation.state(), before_last.state):
        raise BrokenPromise("the memories of clients differ from those that were saved")
    # Only the last round is run: the checkpoint must contain all that it depends on.
    (resumed,) = run_rounds(method, simulation, loaded.state["server"], range(saved_round, ROUNDS))
    check_equal_runs([last], [resumed])


def check_fields(method: Method) -> None:
    """Check that a method is a frozen, hashable dataclass with no attributes but its fields."""
    if not dataclasses.is_dataclass(method) or isinstance(method, type):
        raise BrokenPromise("it is no dataclass")
    if not method.__dataclass_params__.frozen:  # type: ignore[attr-defined]
        raise BrokenPromise("its dataclass is not frozen")
    # An attribute outside of the fields would be state that no checkpoint stores.
    if set(vars(method)) != {field.name for field in dataclasses.fields(method)}:
        raise BrokenPromise("it has attributes other than its fields")
    try:
        hash(method)
    except TypeError as error:
        raise BrokenPromise(f"its fields cannot be hashed ({error})") from error


def check_stateless(entry: MethodEntry, simulation: Simulation, client_updates: dict[str, Any]) -> None:
    """Check that a run has changed neither the method nor its client updates: all state must be in trees.

    Args:
        entry: the method.
        simulation: its federation after the run.
        client_updates: the client updates of the last round, by name, made before the run.
    """
    if simulation.method != entry.method or dict(simulation.client_updates) != client_updates:
        raise BrokenPromise("method or client updates are not what they were before the run")
    for name, client_update in simulation.client_updates.items():
        if set(vars(client_update)) != {field.name for field in dataclasses.fields(client_update)}:
            raise BrokenPromise(f"its client update {name!r} has attributes other than its fields")


def check_tensors(method: Method, task: Task, server: Tree, model: Tree) -> None:
    """Check the server's state: it must be stored in checkpoints, and give a model of the network.

    Args:
        method: the method.
        task: its task.
        server: the server's tree, before the first round or after a round.
        model: any model {"params", "stats"} of the network.

    Raises:
        BrokenPromise: a leaf is not a tensor or requires a gradient, or `Method.solution` returns a tree whose names or
            shapes differ from those of `model`.
    """
    for path, leaf in tree.flatten(server).items():
        if not isinstance(leaf, torch.Tensor):
            raise BrokenPromise(f"the server's {path!r} is a {type(leaf).__name__}, no tensor")
        if leaf.requires_grad:
            raise BrokenPromise(f"the server's {path!r} hangs on a graph: detach it")
    solution = method.solution(task, server)
    if set(solution) != {"params", "stats"}:
        raise BrokenPromise(f"its solution has {sorted(solution)}, not params and stats")
    solution_shapes = {path: leaf.shape for path, leaf in tree.flatten(solution).items()}
    model_shapes = {path: leaf.shape for path, leaf in tree.flatten(model).items()}
    if solution_shapes != model_shapes:
        raise BrokenPromise("its solution is no model of the network: other names or shapes")


def check_unchanged(argument: Tree, copy: Tree) -> None:
    """Check that a tree which a method received still equals its copy."""
    if not trees_equal(argument, copy):
        raise BrokenPromise("it writes into a tree that it was given")


def check_passes(method: Method, task: Task) -> None:
    """Check that a step counts every image once or more, forward and backward, and an update without steps none."""
    for name, client_update in method.client_updates(task).items():
        passes = client_update.passes(4, 6)
        # With fewer than 4 passes not even all labeled images would be counted.
        valid = min(passes) >= 4 if client_update.requirements.trains else passes == (0, 0)
        if not valid:
            raise BrokenPromise(f"its client update {name!r} counts {passes} for a step of 4 + 6 images")


def _to_numbers(samples: Mapping[str, WeightedMetric]) -> dict[str, list[float]]:
    """Convert the sums of each metric from tensors to numbers, which can be compared with `==`."""
    return {name: [float(value) for value in metric] for name, metric in samples.items()}


def check_sites(
    entry: MethodEntry, rule: str, run: list[Snapshot], network: Network = NETWORK
) -> tuple[list[bytes], list[Reply]]:
    """Check that sites which exchange messages compute bit for bit what a simulation computes, and send no pixels.

    The sites are objects in this process; a recorded connection passes the messages as bytes.

    Args:
        entry: the method.
        rule: the batch rule: "both" (4 labeled + 4 unlabeled images a step) or "rest" (2 + the rest).
        run: the states after each round of the simulated run.
        network: the network.

    Returns:
        All messages, and the decoded replies of sites among them.

    Raises:
        BrokenPromise: the method does not pass.
    """
    method, task, simulation = make_federation(entry, rule, network=network)
    remote, wire = make_remote_runtime(simulation, BATCHINGS[rule])
    server = start_server(method, task)
    for number, simulated in enumerate(run):
        remote.open(number)
        server = method.round(remote.task, server, remote)
        report = remote.close()
        same_report = (
            report.cohort == simulated.report.cohort
            and report.cost == simulated.report.cost
            and _to_numbers(report.samples) == _to_numbers(simulated.report.samples)
        )
        if not trees_equal(server, simulated.server):
            raise BrokenPromise(
                f"after round {number + 1} sites behind messages have another server's tree than a simulation"
            )
        # A server has only its state store ("state"): the clients' memories are at the sites.
        if not same_report or not trees_equal(remote.state(), {"state": simulated.state["state"]}):
            raise BrokenPromise(f"in round {number + 1} sites behind messages report something else than a simulation")
    traffic = b"".join(wire.messages)
    for site in wire.sites.values():
        for image in site.local_clients.dataset.train.images:
            # The beginning of an image, as bytes and as the numbers that a network would get: 8 float64 have 64 bytes.
            first_row = image[0, 0].numpy().tobytes()
            first_numbers = (image.double() / 255).numpy().tobytes()[:64]
            if first_row in traffic or first_numbers in traffic:
                raise BrokenPromise("pixels of a site's image are in what it sends")
    # The kind of a message is an escaped string in its header.
    replies = [read_message(data, Reply) for data in wire.messages if b'\\"reply\\"' in data]
    return wire.messages, replies
