"""The only round loop: ask the method for a round, measure, write down, save."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, cast

import torch

from halfmoon.api.types import Method, Task
from halfmoon.core import rng, tree
from halfmoon.core.errors import UserError
from halfmoon.core.memory import release_memory
from halfmoon.core.tensors import to_ints
from halfmoon.core.tree import Tree
from halfmoon.engine.budget import Cost
from halfmoon.engine.driver import Diverged
from halfmoon.engine.evaluation import Examples, ModelEvaluation, ParallelMap, evaluate_model
from halfmoon.engine.runtime import RoundReport, Row, ServerRuntime, TooFewReplies
from halfmoon.storage.checkpoints import METRICS, LoadedCheckpoint
from halfmoon.storage.run_folder import RunFolder

_COUNTS = {each.name for each in fields(Cost)}

NOTHING: Tree = {}


@dataclass(frozen=True)
class Experiment:
    """One method on one federation; without `test` images nothing is evaluated here.

    With `validation` images, or where clients have some of their own, the model of the round that is best on them is
    the run's. With `ema` > 0 what is evaluated is an average of the server's models, which keeps that share of itself
    in each round (`tree.moving_average`).
    """

    method: Method
    task: Task
    runtime: ServerRuntime
    test: Examples | None
    seed: int
    evaluate_every: int = 1
    checkpoint_every: int = 1
    validation: Examples | None = None
    ema: float = 0.0
    parallel_map: ParallelMap = map  # where test images are counted


class _State(NamedTuple):
    """What the rounds carry on; a part that is not wanted is {}."""

    server: Tree
    average: Tree = NOTHING  # of the server's models
    chosen: Tree = NOTHING  # the model of the round that is best on the validation images

    def solution(self, experiment: Experiment) -> Tree:
        return self.average or experiment.method.solution(experiment.task, self.server)


def initial_model(task: Task, seed: int, device: torch.device) -> Tree:
    """Return the model {"params", "stats"} that every method of a seed starts from."""
    return tree.to(task.network.init(rng.generator(seed, "model")), device)


def run_rounds(
    experiment: Experiment, folder: RunFolder, loaded: LoadedCheckpoint | None, watch: Callable[[Row], None]
) -> Row:
    """Play the rounds that are left; return {"model", "confusion", "accuracy", "cost", "aggregation", "ended", ...}.

    "model" is that of the last round or, with validation images, of the round that was best on them. "confusion" is
    that of "model" on the test set: rows are true classes, columns predicted ones; "correct" packs in bits which images
    are right. Without a test set these and "accuracy" are None. Where clients' validation images have chosen,
    "concluded" is what their test images say of the last model, and "chosen" {"round", "accuracy"}; both are None
    elsewhere. "aggregation" is what the last row says of aggregators. "ended" says why the run is over before its
    last round, None where it is not. The folder gets a line a round and a checkpoint every `checkpoint_every`
    rounds; the run goes on from `loaded`, the folder's newest checkpoint, if there is one. Raises
    `halfmoon.engine.driver.Diverged` when a loss is not a number.
    """
    task, runtime = experiment.task, experiment.runtime
    state, first = _start(experiment, folder, loaded, runtime.device)
    scores, test = _validated(experiment, folder.rows()), None
    number, ended = first, runtime.stop_reason(first) if first < task.rounds else None
    if ended is not None and not first:
        raise UserError(ended)
    while number < task.rounds and ended is None:
        began, before = time.perf_counter(), state.solution(experiment)
        server = _round(experiment, number, state)
        runtime.record_server_bytes(tree.nbytes(server))
        state = state._replace(server=server, average=_follow(experiment, number, server, state.average))
        row = _row(number, runtime.close())
        state, scores = _best(state, scores, before, _validated(experiment, [row]))
        number += 1
        ended = runtime.stop_reason(number) if number < task.rounds else None
        last = number == task.rounds or ended is not None
        if number % experiment.evaluate_every == 0 or last:
            state, scores, test = _evaluate(experiment, state, scores, test, row)
            release_memory(tree.nbytes(server))
        folder.log(row)
        if number % experiment.checkpoint_every == 0 or last:
            _save(folder, number, state, runtime, row["cost"])
            release_memory(tree.nbytes(server))
        folder.time({"round": number, "seconds": round(time.perf_counter() - began, 4)})
        watch(row)
    tested, validated = runtime.final_evaluation(state.solution(experiment))
    if validated is not None:
        latest = _validated(experiment, [{"validation": {**validated, "round": number}, "round": number}])
        state, scores = _best(state, scores, state.solution(experiment), latest)
    model = state.chosen or state.solution(experiment)
    if test is None and experiment.test is not None:  # it was stopped between an evaluation and its end
        test = _tally(experiment, model, experiment.test)
    confusion = None if test is None else [to_ints(row) for row in test.confusion]
    result = {**_result(folder.verified_rows(), scores), "correct": None if test is None else test.packed}
    best = None if validated is None or not scores else max(scores)
    choice = best and {"round": best.round, "accuracy": best.accuracy}
    return {"model": model, "confusion": confusion, "concluded": tested, "chosen": choice, **result, "ended": ended}


def _round(experiment: Experiment, number: int, state: _State) -> Tree:
    """Return the server's tree after a round, which is played until enough clients have answered."""
    while True:
        experiment.runtime.open(number)
        remote = experiment.test is None or experiment.validation is None
        if remote and number and number % experiment.evaluate_every == 0:
            experiment.runtime.evaluate_next_round(state.solution(experiment))
        try:
            return experiment.method.round(experiment.task.at(number), state.server, experiment.runtime)
        except TooFewReplies as few:
            experiment.runtime.retry_round(few)


def _follow(experiment: Experiment, number: int, server: Tree, average: Tree) -> Tree:
    if not experiment.ema:
        return {}
    model = experiment.method.solution(experiment.task, server)
    return tree.moving_average(average, model, number, experiment.ema) if average else model


def _tally(experiment: Experiment, model: Tree, images: Examples) -> ModelEvaluation:
    task = experiment.task
    return evaluate_model(
        task.network, model, task.normalize, images, statistics=task.testing, parallel_map=experiment.parallel_map
    )


def _evaluate(
    experiment: Experiment, state: _State, scores: "list[_Validated]", previous: ModelEvaluation | None, row: Row
) -> "tuple[_State, list[_Validated], ModelEvaluation | None]":
    """Put into the row what the round's model is worth; keep it if the validation images say that it is the best.

    `scores` is what they have said so far; `previous`, and the one returned, is the test set's of the run's model.
    """
    model = state.solution(experiment)
    images = experiment.test
    test = None if images is None else _tally(experiment, model, images)
    if images is not None and test is not None:
        if not math.isfinite(test.loss):
            raise Diverged(row["round"] - 1, None, None, test.loss, "test loss")
        row["test"] = test.row()
        row["prior"] = experiment.runtime.prediction_bias(model, test.per_class)
        at_clients = experiment.runtime.client_prediction_bias(
            model, test.per_class, lambda local: _tally(experiment, local, images).per_class
        )
        row |= {} if at_clients is None else {"clients": at_clients}
    if experiment.validation is None:
        return state, scores, test
    row["validation"] = _tally(experiment, model, experiment.validation).row()
    best, scores = _best(state, scores, model, _validated(experiment, [row]))
    return best, scores, test if best is not state else previous


class _Validated(NamedTuple):
    """What the validation images say of a round; the largest is the best."""

    accuracy: float
    lead: float  # minus the loss: it decides between equal accuracies
    round: int


def _validated(experiment: Experiment, rows: list[Row]) -> list[_Validated]:
    """Return what rows say: of their own round's model or, where clients judge, of that of the round before."""
    return [
        _Validated(result["accuracy"], -result["loss"], result.get("round", row["round"]))
        for row in rows
        if (result := row.get("validation")) is not None
    ]


def _best(
    state: _State, scores: list[_Validated], model: Tree, latest: list[_Validated]
) -> tuple[_State, list[_Validated]]:
    """Keep a model if it is the best so far; `latest` is what the validation images say of it, or nothing."""
    if not latest:
        return state, scores
    scores = [*scores, *latest]
    return (state._replace(chosen=model) if max(scores) == scores[-1] else state), scores


def _start(
    experiment: Experiment, folder: RunFolder, loaded: LoadedCheckpoint | None, device: torch.device
) -> tuple[_State, int]:
    if loaded is None:
        model = initial_model(experiment.task, experiment.seed, device)
        state = _State(tree.to(experiment.method.start(experiment.task, model), device))
        _save(folder, 0, state, experiment.runtime, experiment.runtime.close().cost)
        release_memory(tree.nbytes(state.server))
        return state, 0
    _check(folder, loaded)
    experiment.runtime.restore(loaded.clients, loaded.meta["cost"])
    return _State(**{name: tree.to(part, device) for name, part in loaded.state.items()}), loaded.round


def _check(folder: RunFolder, loaded: LoadedCheckpoint) -> None:
    cost: Any = loaded.meta.get("cost")
    valid_cost = (
        isinstance(cost, dict)
        and cost.keys() <= _COUNTS
        and all(type(each) is int for each in cast(Row, cost).values())
    )
    parts = loaded.state.keys() <= set(_State._fields) and all(isinstance(part, dict) for part in loaded.state.values())
    if not valid_cost or not parts or "server" not in loaded.state:
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
    metrics: list[Any] = [row.get("test", {"accuracy": 0.0}), row.get("validation", {"accuracy": 0.0, "loss": 0.0})]
    valid = all(isinstance(each, dict) and type(cast(Row, each).get("accuracy")) is float for each in metrics)
    loss = valid and type(metrics[1].get("loss")) is float
    return row.get("round") == number and isinstance(row.get("cost"), dict) and loss


def _save(folder: RunFolder, number: int, state: _State, runtime: ServerRuntime, cost: dict[str, int]) -> None:
    parts = {name: part for name, part in state._asdict().items() if part or name == "server"}
    folder.save(number, parts, {"cost": cost}, runtime.store)
    runtime.on_checkpoint(number)


def _row(number: int, report: RoundReport) -> Row:
    train: Row = {}
    for name, each in report.samples.items():
        total, squares, count = (float(value) for value in each)
        mean = total / count
        train[name] = mean
        train[f"{name}_spread"] = math.sqrt(max(0.0, squares / count - mean * mean))
    row = {
        "round": number + 1,
        "cohort": report.cohort,
        "train": train,
        "pseudo": report.pseudo,
        "cost": report.cost,
    }
    more = {"evaluation": report.evaluation, "validation": report.validation, "aggregation": report.aggregator}
    return row | {name: part for name, part in more.items() if part is not None}


def _result(rows: list[Row], scores: Sequence[_Validated]) -> Row:
    tested = [(row["test"]["accuracy"], row["round"]) for row in rows if "test" in row]
    common = {"measured": measured(rows), "cost": rows[-1]["cost"], "aggregation": rows[-1].get("aggregation")}
    if not tested:
        return {"accuracy": None, **common}
    accuracy = _last_and_best(tested)
    if scores:
        best = max(scores)
        by_round = {round: share for share, round in tested}
        accuracy |= {"chosen": by_round[best.round], "chosen_round": best.round, "validation": best.accuracy}
    return {"accuracy": accuracy, **common}


def measured(rows: Sequence[Row]) -> Row:
    """Return what else a figure may compare, the last and the best over the rounds that measured it, as shares.

    "pseudo" is the accuracy of the pseudo-labels that a method teaches with, "pseudo.MODEL" that of one of several
    models, "used" the share of the unlabeled images whose pseudo-label teaches.
    """
    series: dict[str, list[tuple[float, int]]] = {}
    for row in rows:
        if pseudo := row.get("pseudo"):
            each = {"pseudo": pseudo["accuracy"], "used": pseudo["share_used"]}
            each |= {f"pseudo.{name}": its["accuracy"] for name, its in pseudo.get("models", {}).items()}
            for name, value in each.items():
                if value is not None:  # of pseudo-labels whose truth nobody knows
                    series.setdefault(name, []).append((value, row["round"]))
    return {name: _last_and_best(values) for name, values in series.items()}


def _last_and_best(measured: Sequence[tuple[float, int]]) -> Row:
    best, best_round = max(measured, key=lambda each: (each[0], -each[1]))
    return {"last": measured[-1][0], "best": best, "best_round": best_round}
