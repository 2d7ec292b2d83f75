"""Run the trial of a plan: train from scratch on splits on which heads on features are solved, too, and choose."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy import special

from halfmoon.config.schema import Config
from halfmoon.data import Images, Source
from halfmoon.engine.evaluation import Examples
from halfmoon.engine.loop import Row
from halfmoon.methods import registry
from halfmoon.report.paired import Difference, read_correct
from halfmoon.runs import factory, runner
from halfmoon.runs.callbacks import Callback
from halfmoon.runs.factory import Problem
from halfmoon.storage.events import NullRecorder
from halfmoon.studies.decision import Decision, difference_interval, estimate_missing_labels, name_verdict
from halfmoon.studies.fold_solver import DrawSolver, FoldSolver
from halfmoon.studies.folds import Fold, cross_validation_folds
from halfmoon.studies.head_comparison import NORMAL_QUANTILE, class_weights
from halfmoon.studies.plan import Plan, single_client_split
from halfmoon.studies.scan_folder import load_site_source
from halfmoon.studies.scratch_trial import ScratchTrial

FOLDER = "from-scratch"
"""Folder of the runs of a trial, in the run folder of the plan."""

MIN_SPLITS = 2
"""Splits before a trial may stop early."""

CLEAR_ERRORS = 3.0
"""Standard errors between the best method from scratch and the head from which on a trial stops early."""

VERDICTS = (
    "Training from scratch is ahead of features",
    "Features are ahead of training from scratch",
    "Training from scratch is no better than features",
)


class MethodAccuracy(NamedTuple):
    """The accuracy of a method of a trial.

    Attributes:
        name: the name of the method.
        accuracy: its accuracy on the tested images in percent, each class with the same weight.
    """

    name: str
    accuracy: float


@dataclass(frozen=True)
class TrialResult:
    """The result of a trial.

    Attributes:
        head: the head on features that the trial was compared with.
        methods: the methods from scratch.
        decision: the difference between the best method from scratch (`ours`) and the head (`base`).
        planned: the planned number of splits; `decision.splits` were run.
        seconds: the seconds that all runs took.
        model: the folder of the best model from scratch, relative to the run folder of the plan; None if features are
            preferred.
    """

    head: MethodAccuracy
    methods: tuple[MethodAccuracy, ...]
    decision: Decision
    planned: int
    seconds: float
    model: str | None

    @property
    def best(self) -> MethodAccuracy:
        """The method from scratch with the largest accuracy."""
        return max(self.methods, key=lambda method: method.accuracy)

    def as_json(self) -> dict[str, Any]:
        """Return the result as JSON-compatible values, without times, so that a resumed plan has the same."""
        decision = self.decision
        return {
            "head": self.head._asdict(),
            "methods": [method._asdict() for method in self.methods],
            "kind": decision.kind,
            "sentence": decision.sentence,
            **decision.difference._asdict(),
            "splits": decision.splits,
            "planned_splits": self.planned,
            "model": self.model,
        }


class _Split(NamedTuple):
    """A split of a trial.

    Attributes:
        folder: the folder of its runs.
        problem: the data and the split of the runs from scratch.
        fold: the same rows, for the heads. Test rows of class folders follow the training rows.
    """

    folder: Path
    problem: Problem
    fold: Fold


class CorrectPredictions:
    """Record which test images of each split the methods of a trial classify correctly.

    Args:
        labels: the label of each row, int64 (N,).
    """

    def __init__(self, labels: np.ndarray) -> None:
        self.labels = labels
        self.rows: list[np.ndarray] = []
        self.correct: dict[str, list[np.ndarray]] = {}

    def add(self, rows: np.ndarray, correct: dict[str, np.ndarray]) -> None:
        """Add a split: its test rows, and by method which of them are correct, bool."""
        self.rows.append(rows)
        for name, values in correct.items():
            self.correct.setdefault(name, []).append(values)

    @property
    def tested(self) -> np.ndarray:
        """The rows that some split tests, int64 (n,)."""
        return np.unique(np.concatenate(self.rows))

    def image_means(self, name: str) -> np.ndarray:
        """Compute how often each tested image is classified correctly, (n,)."""
        rows = np.concatenate(self.rows)
        sums = np.bincount(rows, np.concatenate(self.correct[name]))
        return sums[self.tested] / np.bincount(rows)[self.tested]

    def accuracy(self, name: str) -> float:
        """Compute the accuracy in percent, in which each class has the same weight."""
        return 100 * float(class_weights(self.labels[self.tested]) @ self.image_means(name))

    def split_accuracies(self, name: str) -> list[float]:
        """Compute this accuracy of every split."""
        pairs = zip(self.rows, self.correct[name], strict=True)
        return [100 * float(class_weights(self.labels[rows]) @ correct) for rows, correct in pairs]

    def compare_by_image(self, method: str, baseline: str) -> tuple[Difference, float]:
        """Compare two methods, paired by image, with the interval for a cross-validation (Bayle et al., NeurIPS 2020).

        Returns:
            The difference in points and its standard error.
        """
        weights = class_weights(self.labels[self.tested])
        differences = 100 * (self.image_means(method) - self.image_means(baseline))
        count = len(differences)
        mean = float(weights @ differences)
        variance = float((weights**2) @ (differences - mean) ** 2) * count / max(count - 1, 1)
        if variance == 0:
            # Without any difference among n images, another one differs with a probability below 3 / n (95 %).
            bound = 300 / count
            return Difference(mean, max(-100.0, mean - bound), min(100.0, mean + bound), 1.0), bound / NORMAL_QUANTILE
        error = math.sqrt(variance)
        low = max(-100.0, mean - NORMAL_QUANTILE * error)
        high = min(100.0, mean + NORMAL_QUANTILE * error)
        return Difference(mean, low, high, float(2 * special.ndtr(-abs(mean) / error))), error


def run_trial(plan: Plan, problem: Problem, head: str, root: Path, watch: Callback) -> TrialResult | None:
    """Train from scratch on several splits, compare with a head on the same splits, and train the better one.

    The trial stops after `MIN_SPLITS` or more splits if one side is ahead by `CLEAR_ERRORS` standard errors. Finished
    runs of the folder are read, so that a trial that was stopped continues.

    Args:
        plan: the plan, which has a trial.
        problem: the data, split and task of the heads; its images are features.
        head: the name of the head to compare with.
        root: the run folder of the plan; the runs of the trial are below it.
        watch: receives the progress of each run.

    Returns:
        The result; None where there are too few splits, or the images are not those of the heads.
    """
    trial = plan.trial
    assert trial is not None, "called for plans with a trial"
    source = load_trial_images(plan, trial)
    if not _has_same_images(source, problem.source, trial.site):
        text = "Training from scratch is not tried: at its size, other images are copies of each other."
        watch.record("scratch_trial_left_out", text)
        return None
    splits = _site_splits(trial, source, problem, root) if trial.site else _label_draws(trial, source, root)
    solve = _make_head_solver(plan.config, problem, head, trial.site)
    labels = problem.train.labels if problem.test is None or trial.site else _join(problem).labels
    predictions = CorrectPredictions(labels.numpy())
    seconds = 0.0
    count = 0
    best = trial.config.method
    for count, split in enumerate(splits, start=1):
        correct = {head: solve(split.fold)}
        for name in trial.methods:
            row = train_from_scratch(trial.config, name, split.folder / name, split.problem, watch)
            values = read_correct(row)
            assert values is not None, "a run without early stopping is tested with its last model"
            correct[name] = values
            seconds += row["seconds"]
        predictions.add(split.fold.test, correct)
        best = max(trial.methods, key=predictions.accuracy)
        texts = [f"{registry.entry(name).title} {predictions.accuracy(name):.1f} %" for name in correct]
        text = f"from scratch, split {count} of {trial.splits}: {', '.join(texts)}; {seconds / 60:.1f} minutes so far."
        watch.record("scratch_split_finished", text, split=count, splits=trial.splits)
        difference, error = predictions.compare_by_image(best, head)
        if MIN_SPLITS <= count < trial.splits and abs(difference.mean) > CLEAR_ERRORS * error:
            side = "training from scratch is" if difference.mean > 0 else "features are"
            text = f"from scratch: {side} clearly ahead, the other splits are left out."
            watch.record("scratch_trial_stopped", text, split=count)
            break
    if count < MIN_SPLITS:
        return None
    decision = _decide(predictions, best, head, trial.site, ratio=len(source.test) / len(source.train.labels))
    model = None
    if decision.difference.mean > 0:
        model = f"{FOLDER}/{best}"
        if trial.site:
            everything = factory.build_problem(trial.config, single_client_split(source.train.labels), raw=source)
            seconds += train_from_scratch(trial.config, best, root / model, everything, watch, tests=False)["seconds"]
    return TrialResult(
        head=MethodAccuracy(head, predictions.accuracy(head)),
        methods=tuple(MethodAccuracy(name, predictions.accuracy(name)) for name in trial.methods),
        decision=decision,
        planned=trial.splits,
        seconds=seconds,
        model=model,
    )


def _decide(predictions: CorrectPredictions, best: str, head: str, site: bool, ratio: float) -> Decision:
    """Decide between the best method from scratch and a head.

    Args:
        predictions: the correct test images of all splits.
        best: the method from scratch.
        head: the head.
        site: whether the splits are folds, which test each image once. Draws of the labels of class folders share their
            test images: there the interval is that of the corrected resampled t-test.
        ratio: the ratio of test to training images of a draw.
    """
    tested = len(predictions.tested)
    if site:
        difference, _ = predictions.compare_by_image(best, head)
    else:
        accuracies = predictions.split_accuracies(best), predictions.split_accuracies(head)
        difference = difference_interval(*accuracies, test_train_ratio=ratio, labels=tested)
    kind = name_verdict(difference)
    return Decision(
        kind=kind,
        base=predictions.accuracy(head),
        ours=predictions.accuracy(best),
        difference=difference,
        splits=len(predictions.rows),
        labels=tested,
        missing=estimate_missing_labels(difference, tested) if kind == "unknown" else 0,
        verdicts=VERDICTS,
    )


def load_trial_images(plan: Plan, trial: ScratchTrial) -> Source:
    """Load the images of the heads at the size for training from scratch, without messages: the heads' had the same."""
    flip = bool(trial.config.flip)
    if trial.site:
        preparation = factory.image_preparation(trial.config)
        return load_site_source(plan.contents, preparation, plan.share, flip=flip, display=NullRecorder())
    return replace(factory.load_images(trial.config), mirror=flip)


def _has_same_images(source: Source, other: Source, site: bool) -> bool:
    """Check that two sources have the same images in the same rows, at different sizes.

    In class folders without a test folder, copies are not divided between training and test. Which images are copies
    may depend on their size.
    """
    parts = ((source.train, other.train), (source.test, other.test))
    if not all(np.array_equal(mine.labels, theirs.labels) for mine, theirs in parts):
        return False
    return site or all(_number_groups(mine) == _number_groups(theirs) for mine, theirs in parts)


def _number_groups(images: Images) -> list[int]:
    """Number the groups of images by their first member; an image without a group is a group by itself."""
    if images.groups is None:
        return list(range(len(images)))
    first: dict[str, int] = {}
    return [first.setdefault(group, row) if group else row for row, group in enumerate(images.groups)]


def _site_splits(trial: ScratchTrial, source: Source, problem: Problem, root: Path) -> Iterator[_Split]:
    """Yield the folds of the first repetition of the cross-validation that compares the heads."""
    small = factory.build_problem(trial.config, single_client_split(source.train.labels), raw=source)
    train = problem.source.train
    for number, fold in enumerate(cross_validation_folds(train.labels, train.groups, repeats=1), start=1):
        yield _Split(root / FOLDER / "splits" / str(number), restrict_to_fold(small, fold), fold)


def _label_draws(trial: ScratchTrial, source: Source, root: Path) -> Iterator[_Split]:
    """Yield draws of the labels of class folders, of which the first is the split of the run."""
    count = len(source.train.labels)
    for number in range(trial.splits):
        config = replace(trial.config, split_seed=trial.config.split_seed + number)
        problem = factory.build_problem(config, raw=source)
        is_used = problem.split.client != -1  # an image at client -1 is not trained on
        fold = Fold(
            labeled=np.flatnonzero(is_used & problem.split.labeled),
            unlabeled=np.flatnonzero(is_used & ~problem.split.labeled),
            test=np.arange(count, count + len(source.test)),
        )
        folder = root / FOLDER if number == 0 else root / FOLDER / "splits" / str(number)
        yield _Split(folder, problem, fold)


def _make_head_solver(config: Config, problem: Problem, head: str, site: bool) -> Callable[[Fold], np.ndarray]:
    """Create a function that solves a head on a fold, and returns which test images it classifies correctly, bool."""
    method = factory.build_method(replace(config, method=head, options={}, baselines=()))
    if site:
        folds = FoldSolver(problem.task, problem.train)
        return lambda fold: (folds.predict(method, fold) == folds.labels)[fold.test]
    draws = DrawSolver(problem.task, _join(problem))

    def solve(fold: Fold) -> np.ndarray:
        (evaluation,) = draws.evaluate([method], fold)
        assert evaluation.correct is not None, "all images are on this machine"
        return evaluation.correct

    return solve


def _join(problem: Problem) -> Examples:
    """Join the training and the test images of a problem."""
    assert problem.test is not None, "class folders have test images"
    parts = (problem.train, problem.test)
    return Examples(torch.cat([part.images for part in parts]), torch.cat([part.labels for part in parts]))


def train_from_scratch(
    config: Config, name: str, path: Path, problem: Problem, watch: Callback, tests: bool = True
) -> Row:
    """Train a method in a folder, or read its finished run, and return the summary."""
    method_config = replace(config, method=name, baselines=(), reference=config.method)
    return runner.run_in_folder(method_config, path, watch, tests=tests, problem=problem)


def restrict_to_fold(problem: Problem, fold: Fold) -> Problem:
    """Restrict the data of a run to a fold: train on its labeled and unlabeled rows as one client, and test on its rows.

    Args:
        problem: the data, split and task of the run.
        fold: the rows of a cross-validation's fold, which index the training images.
    """
    train = problem.source.train
    train_rows = np.sort(np.concatenate([fold.labeled, fold.unlabeled]))

    def select_images(rows: np.ndarray) -> Images:
        return Images(train.images[rows], train.labels[rows])

    def select_examples(rows: np.ndarray) -> Examples:
        indices = torch.from_numpy(rows)
        return Examples(problem.train.images[indices], problem.train.labels[indices])

    # The test rows' labels are hidden in training, as they are not among `train_rows`.
    return replace(
        problem,
        source=replace(problem.source, train=select_images(train_rows), test=select_images(fold.test)),
        split=single_client_split(train.labels[train_rows]),
        train=select_examples(train_rows),
        test=select_examples(fold.test),
    )
