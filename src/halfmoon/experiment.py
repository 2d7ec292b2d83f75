"""The only round loop: ask the method for a round, measure, write down, save."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, Protocol

import torch

from halfmoon import rng, tree
from halfmoon.budget import Cost
from halfmoon.errors import UserError
from halfmoon.evaluate import Examples, Tally, tally
from halfmoon.manifest import Contents
from halfmoon.record import METRICS, Loaded, RunFolder
from halfmoon.store import Store
from halfmoon.tree import Tree
from halfmoon.types import Federation, Method, Sample, Task

_COUNTS = {each.name for each in fields(Cost)}

Row = dict[str, Any]
"""One round's line of metrics.jsonl."""


class TooFew(UserError):
    """A round that too few clients have answered: nothing of it counts, and it is played again."""


class Report(NamedTuple):
    """What a runtime measured in one round."""

    cohort: list[int]
    samples: dict[str, Sample]
    pseudo: Row | None
    cost: dict[str, int]  # of the run so far
    exam: Row | None = None  # how the model before this round did on test images that only the clients have
    guard: Row | None = None  # what stood between the uploads and the method says of the round


class Runtime(Federation, Protocol):
    """A federation that the round loop can drive: on this machine, or over a network."""

    store: Store  # what has to be saved beside the server's tree
    device: torch.device  # where the server computes

    def open(self, round: int) -> None:
        """Begin a round, or begin it again: draw its cohort."""
        ...

    def again(self, few: TooFew) -> None:
        """Make ready to play the round again that too few have answered, or raise `few`."""
        ...

    def ended(self, round: int) -> str | None:
        """Return in a sentence why `round` (from 0) may not be played, None where it may."""
        ...

    def bring(self, model: Tree) -> None:
        """Have the model tested with the next question, where clients have test images of their own."""
        ...

    def saved(self, round: int) -> None:
        """Take note that the first `round` rounds are on the disk."""
        ...

    def stored(self, server: int) -> None:
        """Take note of the bytes of the server's tree."""
        ...

    def close(self) -> Report:
        """End a round: what it measured."""
        ...

    def prior(self, model: Tree, per_class: Sequence[float]) -> Row | None:
        """Return what the model {"params", "stats"} leans to: the row of `halfmoon.evaluate.leaning`.

        It is measured on the unlabeled rows of this round's cohort and adds nothing to the cost; None where there is
        no such row. `per_class` (classes,) is the model's test accuracy by class.
        """
        ...

    def restore(self, clients: Contents, cost: dict[str, int]) -> None:
        """Go on from a checkpoint: with what the store held then."""
        ...


@dataclass(frozen=True)
class Experiment:
    """One method on one federation; without `test` images nothing is evaluated here."""

    method: Method
    task: Task
    runtime: Runtime
    test: Examples | None
    seed: int
    evaluate_every: int = 1
    checkpoint_every: int = 1


def initial_model(task: Task, seed: int, device: torch.device) -> Tree:
    """Return the model {"params", "stats"} that every method of a seed starts from."""
    return tree.to(task.network.init(rng.generator(seed, "model")), device)


def play(experiment: Experiment, folder: RunFolder, loaded: Loaded | None, watch: Callable[[Row], None]) -> Row:
    """Play the rounds that are left; return the run's {"model", "confusion", "accuracy", "cost", "guard", "ended"}.

    "guard" is what the last row says of guards. "ended" says why the run is over before its last round, None where it
    is not. "confusion" is that of the final model
    on the test set: rows are true classes, columns predicted ones. Without a test set it and "accuracy" are None.
    The folder gets a line a round and a checkpoint every `checkpoint_every` rounds; the run goes on from `loaded`,
    the folder's newest checkpoint, if there is one. Raises `halfmoon.client.Diverged` when a loss is not a number.
    """
    task, runtime = experiment.task, experiment.runtime
    server, first = _start(experiment, folder, loaded, runtime.device)
    final: _Tested | None = None
    number, ended = first, runtime.ended(first) if first < task.rounds else None
    if ended is not None and not first:
        raise UserError(ended)
    while number < task.rounds and ended is None:
        began = time.perf_counter()
        server = _round(experiment, number, server)
        runtime.stored(tree.nbytes(server))
        row = _row(number, runtime.close())
        number += 1
        ended = runtime.ended(number) if number < task.rounds else None
        last = number == task.rounds or ended is not None
        if number % experiment.evaluate_every == 0 or last:
            final = _test(experiment, server)
            if final.said is not None:
                row["test"] = final.said.row()
                row["prior"] = runtime.prior(final.model, final.said.per_class)
        folder.log(row)
        if number % experiment.checkpoint_every == 0 or last:
            _save(folder, number, server, runtime, row["cost"])
        folder.time({"round": number, "seconds": round(time.perf_counter() - began, 4)})
        watch(row)
    if final is None:  # it was stopped between its last round and its end
        final = _test(experiment, server)
    confusion = None if final.said is None else final.said.confusion.tolist()
    return {"model": final.model, "confusion": confusion, **_result(folder.rows()), "ended": ended}


def _round(experiment: Experiment, number: int, server: Tree) -> Tree:
    """Return the server's tree after a round, which is played until enough clients have answered."""
    while True:
        experiment.runtime.open(number)
        if experiment.test is None and number and number % experiment.evaluate_every == 0:
            experiment.runtime.bring(experiment.method.solution(experiment.task, server))
        try:
            return experiment.method.round(experiment.task.at(number), server, experiment.runtime)
        except TooFew as few:
            experiment.runtime.again(few)


class _Tested(NamedTuple):
    """A model and what it said of the test set."""

    model: Tree
    said: Tally | None  # None where there is no test set


def _test(experiment: Experiment, server: Tree) -> _Tested:
    task = experiment.task
    model = experiment.method.solution(task, server)
    test = experiment.test
    return _Tested(model, None if test is None else tally(task.network, model, task.normalize, test))


def _start(experiment: Experiment, folder: RunFolder, loaded: Loaded | None, device: torch.device) -> tuple[Tree, int]:
    """Return the server's tree and the first round: from the newest sound checkpoint, or from nothing."""
    if loaded is None:
        server = experiment.method.start(experiment.task, initial_model(experiment.task, experiment.seed, device))
        server = tree.to(server, device)
        _save(folder, 0, server, experiment.runtime, experiment.runtime.close().cost)
        return server, 0
    _check(folder, loaded)
    experiment.runtime.restore(loaded.clients, loaded.meta["cost"])
    return tree.to(loaded.state["server"], device), loaded.round


def _check(folder: RunFolder, loaded: Loaded) -> None:
    """Raise UserError where a checkpoint, or a row of metrics before it, lacks what the end of a run needs of it."""
    cost = loaded.meta.get("cost")
    counted = isinstance(cost, dict) and cost.keys() <= _COUNTS and all(type(each) is int for each in cost.values())
    if not counted or not isinstance(loaded.state.get("server"), dict):
        raise UserError(f"{folder.path}: its checkpoint holds no state of a run; start the run again elsewhere.")
    rows = folder.rows()
    fine = [_is_round(row, number) for number, row in enumerate(rows, start=1)]
    if len(rows) != loaded.round or not all(fine):
        line = fine.index(False) + 1 if False in fine else len(rows)
        raise UserError(
            f"{folder.path / METRICS}, line {line}: the rows are not those of rounds 1 to {loaded.round}; restore the "
            "file, or start the run again in another --run-dir."
        )


def _is_round(row: Row, number: int) -> bool:
    """Return whether a row of metrics has what the end of a run needs of it."""
    tested = row.get("test", {"accuracy": 0.0})
    accuracy = tested.get("accuracy") if isinstance(tested, dict) else None
    return row.get("round") == number and isinstance(row.get("cost"), dict) and type(accuracy) is float


def _save(folder: RunFolder, number: int, server: Tree, runtime: Runtime, cost: dict[str, int]) -> None:
    folder.save(number, {"server": server}, {"cost": cost}, runtime.store)
    runtime.saved(number)


def _row(number: int, report: Report) -> Row:
    """Return the line of one round; a sample becomes its mean and, where it varies, its spread."""
    train: Row = {}
    for name, each in report.samples.items():
        total, squares, count = (float(value) for value in each)
        mean = total / count
        train[name] = mean
        train[f"{name}_spread"] = math.sqrt(max(0.0, squares / count - mean * mean))
    return {
        "round": number + 1,
        "cohort": report.cohort,
        "train": train,
        "pseudo": report.pseudo,
        "cost": report.cost,
        **({} if report.exam is None else {"exam": report.exam}),
        **({} if report.guard is None else {"guard": report.guard}),
    }


def _result(rows: list[Row]) -> Row:
    """Return the last and the best test accuracy, and what the last row says of cost and guards."""
    tested = [(row["test"]["accuracy"], row["round"]) for row in rows if "test" in row]
    said = {"cost": rows[-1]["cost"], "guard": rows[-1].get("guard")}
    if not tested:
        return {"accuracy": None, **said}
    best, best_round = max(tested, key=lambda each: (each[0], -each[1]))
    accuracy = {"last": tested[-1][0], "best": best, "best_round": best_round}
    return {"accuracy": accuracy, **said}
