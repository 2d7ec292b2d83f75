"""The contract, promise by promise: each function raises `Broken`, in one sentence, where a method does not keep it."""

import dataclasses
from pathlib import Path
from typing import Any, cast

import torch

from halfmoon.api.method_entry import MethodEntry
from halfmoon.api.types import Method, Task
from halfmoon.contract.scene import NETWORK, Snapshot, begin, dataset, furthest, play, same, simulate, task
from halfmoon.contract.sites import behind
from halfmoon.core import tree
from halfmoon.core.tree import Tree
from halfmoon.engine.local_clients import Executor
from halfmoon.engine.sampling import Batching
from halfmoon.engine.simulation import Simulation
from halfmoon.federation.protocol.messages import Reply, read_message
from halfmoon.models import Network
from halfmoon.storage.run_folder import RunFolder
from halfmoon.storage.state_store import TreeStore

ROUNDS = 3
SIZES = ((5, 4), (3, 8), (6, 7), (4, 6))
"""(labeled, unlabeled) rows of each client: no more than what makes their steps differ under both batch rules."""
BATCHINGS = {"both": Batching(4, 4), "rest": Batching(2, "rest")}
"""4 + 4 images a step; and 2 + the rest, with separate passes and labels by running statistics."""
STATISTICS: dict[str, dict[str, Any]] = {"both": {}, "rest": {"statistics": "separate", "labeling": "running"}}
CLOSE = 1e-9


class Broken(AssertionError):
    """A promise that a method does not keep."""


def scene(
    entry: MethodEntry,
    rule: str,
    executor: str = "loop",
    place: str | None = None,
    network: Network = NETWORK,
    **options: Any,
) -> tuple[Method, Task, Simulation]:
    """Return a row's method, its task and its federation of unequal clients in double precision.

    Labels lie at `place`, by default the first that the method can use.
    """
    shared = task(network, rounds=ROUNDS, **STATISTICS[rule])
    federation = dataset(
        SIZES, all_labels=entry.all_labels, pooled=entry.pooled, place=place or entry.label_locations[0]
    )
    simulation = simulate(
        entry.method, shared, federation, batching=BATCHINGS[rule], executor=cast(Executor, executor), **options
    )
    return entry.method, shared, simulation


def straight(entry: MethodEntry, rule: str, executor: str = "loop", network: Network = NETWORK) -> list[Snapshot]:
    """Return the rounds of a run."""
    method, shared, simulation = scene(entry, rule, executor, network=network)
    return play(method, simulation, begin(method, shared), range(ROUNDS))


def numbers(row: Any) -> list[float]:
    """Return the numbers of a nested row in order; None counts as a number that equals only itself."""
    if isinstance(row, dict):
        return [value for key in sorted(row) for value in numbers(row[key])]
    if isinstance(row, list | tuple):
        return [value for item in row for value in numbers(item)]
    return [-1e300 if row is None else float(row)]


def executors_agree(loop: list[Snapshot], vmap: list[Snapshot]) -> float:
    """Compare two runs, client by client and lifted: server, memories, metrics; return the largest difference."""
    worst = 0.0
    for number, (one, many) in enumerate(zip(loop, vmap, strict=True), 1):
        for what, ours, theirs in (("server's tree", many.server, one.server), ("memories", many.state, one.state)):
            _same_names(what, ours, theirs)
            worst = max(worst, gap := furthest(ours, theirs))
            if not gap < CLOSE:
                raise Broken(f"after round {number} the {what} of loop and vmap differ by {gap:.2g}")
        if many.report.cohort != one.report.cohort or many.report.cost != one.report.cost:
            raise Broken(f"in round {number} loop and vmap report another cohort or cost")
        if many.report.samples.keys() != one.report.samples.keys():
            raise Broken(f"in round {number} loop and vmap report other samples")
        pairs = ((many.report.samples, one.report.samples), (_used(many.report.pseudo), _used(one.report.pseudo)))
        for ours, theirs in pairs:
            for a, b in zip(numbers(ours), numbers(theirs), strict=True):
                if not abs(a - b) <= CLOSE * max(1.0, abs(b)):
                    raise Broken(f"in round {number} loop and vmap report {a} and {b}")
    return worst


def _used(pseudo: dict[str, Any] | None) -> dict[str, Any]:
    """Return what a report says of guesses that count; where all classes tie, rounding chooses the label of others."""
    named = (pseudo or {}).items()
    rows = {name: value for name, value in named if name not in ("accuracy", "per_class", "models")}
    return rows | {name: _used(model) for name, model in (pseudo or {}).get("models", {}).items()}


def _same_names(what: str, ours: Tree, theirs: Tree) -> None:
    differing = sorted(tree.flatten(ours).keys() ^ tree.flatten(theirs).keys())
    if differing:
        raise Broken(f"the {what} has {differing[0]!r} in one run and not in the other")


def repeats(one: list[Snapshot], two: list[Snapshot]) -> None:
    """Compare two runs of one seed, bit by bit."""
    for number, (a, b) in enumerate(zip(one, two, strict=True), 1):
        if not (same(a.server, b.server) and same(a.state, b.state) and numbers(a.report) == numbers(b.report)):
            raise Broken(f"two runs of one seed differ after round {number}: it draws random numbers, or keeps state")


def resumes(entry: MethodEntry, run: list[Snapshot], executor: str, folder: Path, network: Network = NETWORK) -> None:
    """Save after the last round but one, restore from the folder, and compare the last round bit by bit."""
    _, halfway, whole = run
    clients = TreeStore()
    for state_store, trees in halfway.state.items():
        for key, each in trees.items():
            clients.put(f"{state_store}/{key}", each)
    with RunFolder.create(folder, "", "0" * 64) as run_folder:
        run_folder.save(2, {"server": halfway.server}, {"cost": halfway.report.cost}, clients)
    with RunFolder.open(folder) as run_folder:
        loaded = run_folder.load()
    if loaded is None or loaded.round != 2:
        raise Broken("what was saved after round 2 cannot be read")
    method, _, simulation = scene(entry, "both", executor, network=network)
    simulation.restore(loaded.clients, loaded.meta["cost"])
    if not same(simulation.state(), halfway.state):
        raise Broken("what clients remember is not what was saved")
    (third,) = play(method, simulation, loaded.state["server"], range(2, ROUNDS))
    repeats([whole], [third])


def is_its_hyper_parameters(method: Method) -> None:
    """A frozen dataclass with nothing in it but its fields, which can be hashed."""
    if not dataclasses.is_dataclass(method) or isinstance(method, type):
        raise Broken("it is no dataclass")
    if not method.__dataclass_params__.frozen:  # type: ignore[attr-defined]
        raise Broken("its dataclass is not frozen")
    if set(vars(method)) != {field.name for field in dataclasses.fields(method)}:
        raise Broken("it holds something beside its fields")
    try:
        hash(method)
    except TypeError as error:
        raise Broken(f"its fields cannot be hashed ({error})") from error


def keeps_no_state(entry: MethodEntry, simulation: Simulation, client_updates: dict[str, Any]) -> None:
    """After a run, method and client updates are what they were: all state is in the trees."""
    if simulation.method != entry.method or dict(simulation.client_updates) != client_updates:
        raise Broken("method or client updates are not what they were before the run")
    for name, client_update in simulation.client_updates.items():
        if set(vars(client_update)) != {field.name for field in dataclasses.fields(client_update)}:
            raise Broken(f"its client update {name!r} holds something beside its fields")


def holds_tensors(method: Method, shared: Task, server: Tree, model: Tree) -> None:
    """Every leaf is a tensor without a graph; the solution is a model that the network can evaluate."""
    for path, leaf in tree.flatten(server).items():
        if not isinstance(leaf, torch.Tensor):
            raise Broken(f"the server's {path!r} is a {type(leaf).__name__}, no tensor")
        if leaf.requires_grad:
            raise Broken(f"the server's {path!r} hangs on a graph: detach it")
    solution = method.solution(shared, server)
    if set(solution) != {"params", "stats"}:
        raise Broken(f"its solution has {sorted(solution)}, not params and stats")
    shapes = [{path: leaf.shape for path, leaf in tree.flatten(each).items()} for each in (solution, model)]
    if shapes[0] != shapes[1]:
        raise Broken("its solution is no model of the network: other names or shapes")


def leaves_as_given(argument: Tree, copy: Tree) -> None:
    """What a method is given is not written into."""
    if not same(argument, copy):
        raise Broken("it writes into a tree that it was given")


def counts_passes(method: Method, shared: Task) -> None:
    """A step looks at every image at least once, forward and backward; a client update without steps counts none."""
    for name, client_update in method.client_updates(shared).items():
        passes = client_update.passes(4, 6)
        if not (min(passes) >= 4 if client_update.requirements.trains else passes == (0, 0)):
            raise Broken(f"its client update {name!r} counts {passes} for a step of 4 + 6 images")


def sites_compute_the_same(
    entry: MethodEntry, rule: str, run: list[Snapshot], network: Network = NETWORK
) -> tuple[list[bytes], list[Reply]]:
    """Play the run between sites that are sent messages, and compare all of it bit by bit.

    Return what went over the wire, and the replies in it.
    """
    method, shared, simulation = scene(entry, rule, network=network)
    remote, wire = behind(simulation, BATCHINGS[rule])
    server = begin(method, shared)
    for number, there in enumerate(run):
        remote.open(number)
        server = method.round(remote.task, server, remote)
        report = remote.close()
        ours, theirs = ({key: [float(v) for v in s] for key, s in r.samples.items()} for r in (report, there.report))
        same_report = report.cohort == there.report.cohort and report.cost == there.report.cost and ours == theirs
        if not same(server, there.server):
            raise Broken(f"after round {number + 1} sites behind messages have another server's tree than a simulation")
        if not same_report or not same(remote.state(), {"state": there.state["state"]}):
            raise Broken(f"in round {number + 1} sites behind messages report something else than a simulation")
    traffic = b"".join(wire.messages)
    for site in wire.sites.values():
        for image in site.local_clients.dataset.train.images:
            bits = (image[0, 0].numpy().tobytes(), (image.double() / 255).numpy().tobytes()[:64])
            if any(each in traffic for each in bits):
                raise Broken("pixels of a site's image are in what it sends")
    return wire.messages, [read_message(data, Reply) for data in wire.messages if b'\\"reply\\"' in data]
