"""The round loop of every run: train a round, evaluate its model, write metrics, save a checkpoint."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, cast

import numpy as np
import torch

from halfmoon.api.types import Method, Task
from halfmoon.core import rng, tree
from halfmoon.core.errors import Diverged, UserError
from halfmoon.core.memory import release_memory
from halfmoon.core.tensors import to_ints
from halfmoon.core.tree import Tree
from halfmoon.engine.budget import Cost
from halfmoon.engine.evaluation import (
    SERIAL,
    Examples,
    ModelEvaluation,
    accuracy_by_client,
    evaluate_model,
    summarize_clients,
)
from halfmoon.engine.executors.base import Executor
from halfmoon.engine.runtime import RoundReport, Row, ServerRuntime, TooFewReplies
from halfmoon.storage.checkpoints import METRICS, LoadedCheckpoint
from halfmoon.storage.run_folder import RunFolder

_COST_FIELDS = {field.name for field in fields(Cost)}

EMPTY: Tree = {}


@dataclass(frozen=True)
class Experiment:
    """One method on one federation.

    Attributes:
        method: the method that trains.
        task: network, optimizer and number of rounds.
        runtime: the federation.
        test: test images of the server; None if it has none, and no round is tested here.
        seed: the seed of the initial model.
        evaluate_every: rounds between evaluations.
        checkpoint_every: rounds between checkpoints.
        validation: validation images of the server. With them, or with validation images of clients, the run's model
            is that of the round with the best validation accuracy.
        ema: decay of the exponential moving average of the server's models, which is evaluated instead of the
            latest one (`tree.moving_average`); 0: no average.
        executor: computes batches of test images.
        patience: validations in a row without a better score after which training stops; None: never.
        test_clients: the client of each test image (`halfmoon.data.partition.client_tests`), int64 (N,), by which
            accuracies by client are computed; None if the images are not those of clients.
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
    executor: Executor = SERIAL
    test_clients: np.ndarray | None = None
    patience: int | None = None


class _ValidationScore(NamedTuple):
    """The validation result of one round; the largest is the best.

    Tuples are compared field by field: by accuracy, between equal accuracies by loss, and then by round.
    """

    accuracy: float
    negative_loss: float
    round: int  # counted from 1


def initial_model(task: Task, seed: int, device: torch.device) -> Tree:
    """Return the model {"params", "stats"} that every method of a seed starts from."""
    return tree.to(task.network.init(rng.generator(seed, "model")), device)


def run_rounds(
    experiment: Experiment, folder: RunFolder, loaded: LoadedCheckpoint | None, watch: Callable[[Row], None]
) -> Row:
    """Run all remaining rounds of an experiment and return its results.

    A round samples a cohort, which trains the server's model, and averages the uploads (McMahan et al. 2017, Algorithm 1).
    Each round adds a line to the folder's metrics. The new model is evaluated every `evaluate_every` rounds, and a
    checkpoint is saved every `checkpoint_every` rounds.

    Args:
        experiment: the method and its federation.
        folder: the run folder.
        loaded: the folder's newest checkpoint, from which the run continues; None starts the run.
        watch: called with the row of every round.

    Returns:
        A dictionary with the keys

        - "model": the model of the last round or, with validation images, of the best round on them;
        - "confusion": its confusion matrix on the test set (rows are true classes); None without a test set;
        - "correct": which test images it classifies correctly, one bit each; None without a test set;
        - "accuracy": test accuracies (last, best, chosen); None without a test set;
        - "last_client_test": the clients' test results for the last model, where clients' validation images chose the round;
        - "chosen": {"round", "accuracy"} of that round, None elsewhere;
        - "client_accuracy": `summarize_clients` of that model, with "each" by client number; None if unknown;
        - "measured", "cost", "aggregation": see `summarize_pseudo_labels`, and the last row of the metrics;
        - "ended": a sentence on why the run stopped before its last round, or None.

    Raises:
        Diverged: a loss is not a finite number.
        UserError: the run may not start, or the checkpoint and the metrics do not belong together.
    """
    method = experiment.method
    runtime = experiment.runtime
    run = _Run.start(experiment, folder, loaded)
    stop_reason = run.stop_reason()
    if stop_reason is not None and run.round == 0:
        raise UserError(stop_reason)
    while run.round < experiment.task.rounds and stop_reason is None:
        start_time = time.perf_counter()
        received_model = run.model()
        server: Tree | None = None
        while server is None:  # until enough clients have replied
            runtime.open(run.round)  # samples the cohort
            run.request_evaluation(received_model)
            try:
                # Sends the server's model to the cohort, which trains it, and averages the uploads.
                server = method.round(experiment.task.at(run.round), run.state.server, runtime)
            except TooFewReplies as error:
                runtime.retry_round(error)  # waits, or raises an error after too many tries
        row = run.finish_round(server, received_model)
        stop_reason = run.stop_reason()
        if run.is_due(experiment.evaluate_every) or stop_reason is not None:
            run.evaluate(row)
            stop_reason = stop_reason or run.stop_reason()
        folder.log(row)
        if run.is_due(experiment.checkpoint_every) or stop_reason is not None:
            run.save(row["cost"])
        folder.log_timing({"round": run.round, "seconds": round(time.perf_counter() - start_time, 4)})
        watch(row)
    return run.conclude(stop_reason)


class _State(NamedTuple):
    """The trees of a run that a checkpoint stores, under these names; unused ones are {}."""

    server: Tree
    average: Tree = EMPTY  # the moving average of the server's models
    chosen: Tree = EMPTY  # the model with the best validation accuracy until now


@dataclass
class _Run:
    """A run between two rounds.

    Attributes:
        experiment: the method and its federation.
        folder: the run folder.
        state: the trees that a checkpoint stores.
        round: the number of finished rounds.
        scores: the validation scores of these rounds.
        test: the test result of the best model until now; without validation images of the server, of the latest
            tested model.
    """

    experiment: Experiment
    folder: RunFolder
    state: _State
    round: int
    scores: list[_ValidationScore]
    test: ModelEvaluation | None = None

    @classmethod
    def start(cls, experiment: Experiment, folder: RunFolder, loaded: LoadedCheckpoint | None) -> "_Run":
        """Start a run from the initial model, or continue it from a checkpoint.

        Args:
            experiment: the method and its federation. Its runtime, with the clients' memories and the bytes sent until
                then ("cost"), is restored from the checkpoint.
            folder: the run folder; a new run saves its first checkpoint there.
            loaded: the newest checkpoint; None for a new run.

        Raises:
            UserError: the checkpoint and the metrics do not belong together.
        """
        runtime = experiment.runtime
        device = runtime.device
        if loaded is not None:
            _check_checkpoint(folder, loaded)
            runtime.restore(loaded.clients, loaded.meta["cost"])
            state = _State(**{name: tree.to(subtree, device) for name, subtree in loaded.state.items()})
            return cls(experiment, folder, state, loaded.round, _validation_scores(folder.rows()))
        model = initial_model(experiment.task, experiment.seed, device)
        state = _State(tree.to(experiment.method.start(experiment.task, model), device))
        run = cls(experiment, folder, state, 0, _validation_scores(folder.rows()))
        # What initialization and saving freed goes back to the system before training needs memory.
        run.save(cost=runtime.close().cost)
        return run

    def model(self) -> Tree:
        """Return the model {"params", "stats"} to evaluate: the method's, or the moving average of its models."""
        return self.state.average or self.experiment.method.solution(self.experiment.task, self.state.server)

    def request_evaluation(self, received_model: Tree) -> None:
        """Have clients evaluate the model that they receive, if the server lacks test or validation images.

        Args:
            received_model: the model of the round before. It is not evaluated in round 0.
        """
        experiment = self.experiment
        clients_may_evaluate = experiment.test is None or experiment.validation is None
        if clients_may_evaluate and self.round and self.round % experiment.evaluate_every == 0:
            experiment.runtime.evaluate_next_round(received_model)

    def finish_round(self, server: Tree, received_model: Tree) -> Row:
        """Store the server's new tree, count the round, and return its line of metrics.

        Args:
            server: the tree that `Method.round` has returned.
            received_model: the model that the clients have received in this round.
        """
        runtime = self.experiment.runtime
        runtime.record_server_bytes(tree.nbytes(server))
        self.state = self.state._replace(server=server, average=self._update_average(server))
        row = _metrics_row(self.round, runtime.close())
        # Validation results of clients are about the model that they received.
        self._keep_best(received_model, _validation_scores([row]))
        self.round += 1
        return row

    def is_due(self, period: int) -> bool:
        """Check whether work that is done every `period` rounds, and after the last one, is done now."""
        return self.round % period == 0 or self.round == self.experiment.task.rounds

    def evaluate(self, row: Row) -> None:
        """Add the evaluation of the latest model to its row, and keep the model if its validation accuracy is the best.

        The result on test images is kept with it. Without validation images the latest model is the result of the run,
        so that its test result is kept in each evaluation.

        Args:
            row: the round's line of metrics, which is extended.

        Raises:
            Diverged: the test or validation loss is not finite.
        """
        experiment = self.experiment
        model = self.model()
        test = None
        if experiment.test is not None:
            test = self._test(model, experiment.test, row)
        is_best = True
        if experiment.validation is not None:
            validation = _evaluate_images(experiment, model, experiment.validation)
            _check_loss(validation, self.round, "validation loss")
            row["validation"] = validation.row()
            is_best = self._keep_best(model, _validation_scores([row]))
        if is_best:
            self.test = test
        # Memory that the evaluation has freed is returned to the system, if the model is large.
        release_memory(tree.nbytes(self.state.server))

    def _test(self, model: Tree, images: Examples, row: Row) -> ModelEvaluation:
        """Evaluate the latest model on the server's test images, and add the results to its row.

        Args:
            model: the model.
            images: the test images.
            row: the round's line of metrics, which is extended.

        Raises:
            Diverged: the loss is not finite.
        """
        experiment = self.experiment
        test = _evaluate_images(experiment, model, images)
        _check_loss(test, self.round, "test loss")
        row["test"] = test.row()
        client_accuracies = _client_accuracies(experiment, test)
        if client_accuracies:
            row["test"]["clients"] = summarize_clients([*client_accuracies.values()])
        # Class bias: the model's mean prediction, and the accuracy of each class, also of clients' uploaded models.
        row["prior"] = experiment.runtime.prediction_bias(model, test.per_class)
        client_bias = experiment.runtime.client_prediction_bias(
            model, test.per_class, lambda client_model: _evaluate_images(experiment, client_model, images).per_class
        )
        if client_bias is not None:
            row["clients"] = client_bias
        return test

    def stop_reason(self) -> str | None:
        """Check whether training stops early: by an aggregator's limit, or after `patience` evaluations without a gain.

        Returns:
            A sentence on why training stops before its last round; None if it continues.
        """
        rounds = self.experiment.task.rounds
        if self.round >= rounds:
            return None
        reason = self.experiment.runtime.stop_reason(self.round)
        patience = self.experiment.patience
        if reason is not None or patience is None or not self.scores:
            return reason
        # Without the round, so that equal results compare equal. `index` finds the first best one: a later one that only
        # equals it is no improvement.
        results = [(score.accuracy, score.negative_loss) for score in self.scores]
        evaluations_since_best = len(results) - 1 - results.index(max(results))
        if evaluations_since_best < patience:
            return None
        evaluations = "1 evaluation" if patience == 1 else f"{patience} evaluations"
        chosen_round = max(self.scores).round  # of the model that `_keep_best` chose: the latest of equal ones
        return (
            f"stopped after round {self.round} of {rounds}: no better validation accuracy in {evaluations}; "
            f"best round {chosen_round}"
        )

    def save(self, cost: dict[str, int]) -> None:
        """Save a checkpoint with the cost of the run until now, and notify the runtime."""
        runtime = self.experiment.runtime
        trees = {name: subtree for name, subtree in self.state._asdict().items() if subtree or name == "server"}
        self.folder.save(self.round, trees, {"cost": cost}, runtime.store)
        runtime.on_checkpoint(self.round)
        release_memory(tree.nbytes(self.state.server))

    def conclude(self, stop_reason: str | None) -> Row:
        """Evaluate the last model at the clients, select the run's model, and build the results of `run_rounds`.

        Args:
            stop_reason: a sentence on why the run stopped before its last round, or None.

        Returns:
            "model" and its test results: "confusion" matrix, "correct" (a bit for each image), "client_accuracy". Where
            clients have validation images: "chosen", the round whose model was the best on these, with its accuracy
            there, and "last_client_test", the clients' test results for the last model. "ended" is `stop_reason`.
        """
        experiment = self.experiment
        last_model = self.model()
        client_test, client_validation = experiment.runtime.final_evaluation(last_model, self.round)
        if client_validation is not None:
            # The last round has no later one in which clients would evaluate its model: that was done just now.
            self._keep_best(last_model, _validation_scores([{"validation": client_validation, "round": self.round}]))
            # It is of the latest model: clients report on a model only after the server has tested the next one.
            self.test = None
        model = self.state.chosen or last_model
        if self.test is None and experiment.test is not None:
            # Clients have chosen the round, or the run was stopped after its last evaluation, before its end.
            self.test = _evaluate_images(experiment, model, experiment.test)
        best = None
        if client_validation is not None and self.scores:
            best = max(self.scores)
        test = self.test
        return {
            "model": model,
            "confusion": None if test is None else [to_ints(counts) for counts in test.confusion],
            "last_client_test": client_test,
            "chosen": None if best is None else {"round": best.round, "accuracy": best.accuracy},
            **_summarize_rows(self.folder.verified_rows(), self.scores),
            "correct": None if test is None else test.packed,
            "client_accuracy": _final_client_accuracy(experiment, test),
            "ended": stop_reason,
        }

    def _update_average(self, server: Tree) -> Tree:
        """Return the moving average of the server's models after a round, {} if the experiment has none."""
        experiment = self.experiment
        if not experiment.ema:
            return {}
        model = experiment.method.solution(experiment.task, server)
        average = self.state.average
        return tree.moving_average(average, model, self.round, experiment.ema) if average else model

    def _keep_best(self, model: Tree, latest: list[_ValidationScore]) -> bool:
        """Keep a model if its validation score is the best until now, and return whether it is.

        Of models with equal accuracy and loss the latest is kept.

        Args:
            model: the model that `latest` is about.
            latest: its validation score in a list; empty if it was not validated.
        """
        self.scores = [*self.scores, *latest]
        if not latest or max(self.scores) != latest[-1]:
            return False
        self.state = self.state._replace(chosen=model)
        return True


def _client_accuracies(experiment: Experiment, test: ModelEvaluation) -> dict[int, float]:
    """Compute the accuracy of each client on its test images; {} if the images are not those of clients."""
    if experiment.test_clients is None or test.correct is None:
        return {}
    return accuracy_by_client(test.correct, experiment.test_clients)


def _final_client_accuracy(experiment: Experiment, test: ModelEvaluation | None) -> Row | None:
    """Return the summary of the clients' accuracies with the value of each client; None if there are none."""
    accuracies = {} if test is None else _client_accuracies(experiment, test)
    if not accuracies:
        return None
    each = {str(client): accuracy for client, accuracy in accuracies.items()}
    return {**summarize_clients([*accuracies.values()]), "each": each}


def _evaluate_images(experiment: Experiment, model: Tree, images: Examples) -> ModelEvaluation:
    """Evaluate a model on the server's test or validation images, with the settings of the experiment."""
    task = experiment.task
    return evaluate_model(
        task.network,
        model,
        task.normalize,
        images,
        statistics=task.testing,
        executor=experiment.executor,
    )


def _check_loss(evaluation: ModelEvaluation, rounds: int, quantity: str) -> None:
    """Raise `Diverged` if the loss of the model after so many rounds is not finite.

    A checkpoint could not be resumed: a loss that is no number has no order, and is null in the metrics.

    Args:
        evaluation: the evaluation of the model.
        rounds: the number of finished rounds.
        quantity: the name of the loss, for the error.
    """
    if not math.isfinite(evaluation.loss):
        raise Diverged(rounds - 1, client=None, step=None, value=evaluation.loss, quantity=quantity)


def _validation_scores(rows: list[Row]) -> list[_ValidationScore]:
    """Read the validation scores from rows of metrics, skipping rounds without validation.

    Args:
        rows: rows of metrics.jsonl. A result belongs to the row's round or, if clients validate, to the round that it
            names, because clients evaluate the model of the round before.
    """
    scores: list[_ValidationScore] = []
    for row in rows:
        result = row.get("validation")
        if result is not None:
            scores.append(_ValidationScore(result["accuracy"], -result["loss"], result.get("round", row["round"])))
    return scores


def _check_checkpoint(folder: RunFolder, loaded: LoadedCheckpoint) -> None:
    """Check that a checkpoint has the state of a run, and that the folder's metrics have the same rounds.

    Args:
        folder: the run folder, with the metrics.
        loaded: the checkpoint.

    Raises:
        UserError: a check fails.
    """
    cost: Any = loaded.meta.get("cost")
    has_cost = (
        isinstance(cost, dict)
        and cost.keys() <= _COST_FIELDS
        and all(type(count) is int for count in cast(Row, cost).values())
    )
    has_known_trees = "server" in loaded.state and loaded.state.keys() <= set(_State._fields)
    has_state = has_known_trees and all(isinstance(subtree, dict) for subtree in loaded.state.values())
    if not has_cost or not has_state:
        raise UserError(f"{folder.path}: its checkpoint holds no state of a run; start the run again elsewhere.")
    # A row that was cut or lost would otherwise be noticed only when the run ends.
    rows = folder.rows()
    invalid_lines = [number for number, row in enumerate(rows, start=1) if not _is_round_row(row, number)]
    if len(rows) != loaded.round or invalid_lines:
        line = invalid_lines[0] if invalid_lines else len(rows)
        raise UserError(
            f"{folder.path / METRICS}, line {line}: the rows are not those of rounds 1 to {loaded.round}; restore the "
            "file, or start the run again in another {run_dir}.",
            option="run_dir",
        )


def _is_round_row(row: Row, number: int) -> bool:
    """Check that a row has the number of its round, and the types of what is read from it later."""
    test: Any = row.get("test", {"accuracy": 0.0})
    validation: Any = row.get("validation", {"accuracy": 0.0, "loss": 0.0})
    for result in (test, validation):
        if not isinstance(result, dict) or type(cast(Row, result).get("accuracy")) is not float:
            return False
    has_loss = type(validation.get("loss")) is float
    return row.get("round") == number and isinstance(row.get("cost"), dict) and has_loss


def _metrics_row(number: int, report: RoundReport) -> Row:
    """Build a round's line of metrics.jsonl.

    Args:
        number: the round, from 0.
        report: the round's measurements.
    """
    train: Row = {}
    for name, sample in report.samples.items():
        total, squares, count = (float(value) for value in sample)
        mean = total / count
        train[name] = mean
        # The standard deviation; rounding may make the variance of equal values slightly negative.
        train[f"{name}_spread"] = math.sqrt(max(0.0, squares / count - mean * mean))
    row = {
        "round": number + 1,
        "cohort": report.cohort,
        "train": train,
        "pseudo": report.pseudo,
        "cost": report.cost,
    }
    optional = {"evaluation": report.evaluation, "validation": report.validation, "aggregation": report.aggregator}
    return row | {name: value for name, value in optional.items() if value is not None}


def _summarize_rows(rows: list[Row], scores: Sequence[_ValidationScore]) -> Row:
    """Summarize a finished run from its rows of metrics.

    Args:
        rows: the rows of all rounds, of which those of evaluated rounds have "test".
        scores: the validation scores; the best selects the round of "chosen".

    Returns:
        "accuracy" (last, best and chosen test accuracy; None without a test), "measured" (pseudo-label metrics), "cost"
        (bytes and images, summed over rounds: those of the last row) and "aggregation" (the rule's metrics, if any).
    """
    tested = [(row["test"]["accuracy"], row["round"]) for row in rows if "test" in row]
    summary = {
        "measured": summarize_pseudo_labels(rows),
        "cost": rows[-1]["cost"],
        "aggregation": rows[-1].get("aggregation"),
    }
    if not tested:
        return {"accuracy": None, **summary}
    accuracy = _last_and_best(tested)
    if scores:
        best = max(scores)
        by_round = {round: share for share, round in tested}
        accuracy |= {"chosen": by_round[best.round], "chosen_round": best.round, "validation": best.accuracy}
    return {"accuracy": accuracy, **summary}


def summarize_pseudo_labels(rows: Sequence[Row]) -> Row:
    """Summarize the pseudo-label metrics of a run: the last and the best value of each, as shares.

    Args:
        rows: the rows of metrics.jsonl; those without pseudo-labels are skipped.

    Returns:
        {"last", "best", "best_round"} of each metric: "pseudo", the accuracy of the pseudo-labels that a method trains
        on; "pseudo.MODEL", that of one of several models; "used", the share of unlabeled images whose pseudo-label is
        used.
    """
    series: dict[str, list[tuple[float, int]]] = {}
    for row in rows:
        pseudo = row.get("pseudo")
        if not pseudo:
            continue
        metrics = {"pseudo": pseudo["accuracy"], "used": pseudo["share_used"]}
        for name, model_metrics in pseudo.get("models", {}).items():
            metrics[f"pseudo.{name}"] = model_metrics["accuracy"]
        for name, value in metrics.items():
            # An accuracy is None if no true label is known.
            if value is not None:
                series.setdefault(name, []).append((value, row["round"]))
    return {name: _last_and_best(values) for name, values in series.items()}


def _last_and_best(values: Sequence[tuple[float, int]]) -> Row:
    """Return the last and the best of (value, round), and the first round that reached the best."""
    best, best_round = max(values, key=lambda entry: (entry[0], -entry[1]))
    return {"last": values[-1][0], "best": best, "best_round": best_round}
