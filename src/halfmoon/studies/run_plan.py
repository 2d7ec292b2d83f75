"""Run a plan: train the two methods, compare them on repeated splits, and decide whether unlabeled images help."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from halfmoon.api.types import Method
from halfmoon.config.schema import Config, identity, to_toml
from halfmoon.core.errors import UserError
from halfmoon.data import Images
from halfmoon.engine.evaluation import Examples, ModelEvaluation
from halfmoon.engine.loop import Row
from halfmoon.runs import factory, runner
from halfmoon.runs.callbacks import Callback, feature_progress
from halfmoon.runs.factory import Problem
from halfmoon.runs.jobs import parse_config
from halfmoon.runs.runner import RunResult
from halfmoon.storage import atomic_io
from halfmoon.storage.folder_writer import REPEAT_ADVICE, RESUME_ADVICE, WriteError, advise_for_parent
from halfmoon.storage.output_paths import check_output_folder
from halfmoon.storage.run_folder import BASELINES, DECISION, PLAN, SCRATCH_TRIAL, SKIPPED, RunFolder
from halfmoon.studies.decision import Decision, decide_by_evaluations
from halfmoon.studies.fold_solver import DrawSolver, FoldSolver
from halfmoon.studies.folds import FOLDS, Fold, cross_validation_folds, label_draws
from halfmoon.studies.head_comparison import decide_by_image, predict_folds
from halfmoon.studies.plan import Plan, PlanStep, single_client_split
from halfmoon.studies.run_trial import TrialResult, restrict_to_fold, run_trial
from halfmoon.studies.scan_folder import FolderContents, load_site_source, scan_folder
from halfmoon.studies.scratch_trial import ScratchTrial


@dataclass(frozen=True)
class PlanResult:
    """The results of a plan.

    Attributes:
        runs: the runs' summaries, the recommended method first.
        outcome: the comparison on test images; None for a site's folder, which has none.
        decision: None where the methods were compared on a single split.
        trial: the comparison with training from scratch; None where it was not tried.
    """

    runs: list[Row]
    outcome: RunResult | None
    decision: Decision | None
    trial: TrialResult | None = None


def load_plan(root: Path) -> Plan | None:
    """Load the plan of a run folder, to resume it; None if the folder was not made by a plan, or no run has started.

    The run's configuration is that of its folder, and the folder of images is scanned again. The plan's file has the
    rest, without reasons and times: those were printed at the start.

    Raises:
        UserError: the folder of images is empty or gone.
    """
    record = atomic_io.read_json(root / PLAN)  # as `_write_plan` writes it
    if record is None or not RunFolder.exists(root):
        return None
    with RunFolder.open(root) as folder:
        config = replace(parse_config(folder.config, root), baselines=tuple(record["baselines"]))
    # The folder's configuration names the method whose budget all methods share, even if the plan's does not. Runs on
    # splits use the plan's, so that those of a resumed plan have the same bytes. Plans of halfmoon 0.2 lack it.
    config = replace(config, reference=record.get("reference", config.reference))
    contents = scan_folder(Path(config.data), config.group_pattern)
    if contents is None:
        raise UserError(f"{config.data}, on which {root} was trained, holds no images any more: put them back.")
    labels_only, with_unlabeled = record["pair"]
    return Plan(
        config=config,
        contents=contents,
        pair=(labels_only, with_unlabeled),
        heads=record["heads"],
        splits=record["splits"],
        share=record["share"],
        reasons=(),
        steps=(PlanStep("", 0.0),),  # `Plan.seconds_after_runs` reads the last step
        trial=_load_trial(record, root, contents),
    )


def _load_trial(record: Row, root: Path, contents: FolderContents) -> ScratchTrial | None:
    """Load the trial of a plan from its file; plans of halfmoon 0.3 and earlier have none."""
    if record.get("trial") is None:
        return None
    config = replace(parse_config(record["trial"], root), run_dir=None)
    return ScratchTrial(config, splits=FOLDS, site=contents.site)


def run_plan(plan: Plan, root: Path, watch: Callback, resume: bool = False) -> PlanResult:
    """Train both methods of a plan in the folder `root`, and decide by repeated splits whether unlabeled images help.

    A site's folder, in which few images have labels, is one client, and all its labels are trained on. Of class folders
    all labels are known, so some are hidden, and the images are split among simulated clients.

    Args:
        plan: the plan.
        root: the run folder, new unless `resume`.
        watch: receives the progress of each run.
        resume: continue the runs that the folder has.

    Raises:
        UserError: as `halfmoon.runs.runner.start`.
    """
    config = replace(plan.config, run_dir=root)
    with advise_for_parent(root), nullcontext() if resume else _new_folder(plan, config, root):
        methods = [config.method, *config.baselines]
        if plan.contents.site:
            source = load_site_source(
                plan.contents, factory.image_preparation(config), plan.share, flip=bool(config.flip), display=watch
            )
            split = single_client_split(source.train.labels)
        else:
            source = replace(factory.load_images(config), mirror=bool(config.flip))
            for note in source.notes:
                watch.record("data_note", note)
            split = None
        if source.skipped:
            runner.write_skipped(root, source.skipped)
            source = replace(source, skipped=())  # the runs of this plan need no lists of their own
        # Without a split, the images are divided by the options of `config`.
        problem = factory.build_problem(config, split, methods, raw=source, progress=feature_progress(watch))
        outcome = None
        if plan.contents.site:
            runs = _run_site_methods(config, methods, root, watch, problem)
        else:
            outcome = runner.start(config, watch, problem, resume_existing=True)
            runs = outcome.summaries
        # Heads are solved in seconds, so that they are compared without further runs.
        if plan.heads and plan.contents.site:
            decision = _cross_validate_heads(plan, problem)
        elif plan.heads:
            decision = _compare_label_draws(plan, problem)
        elif plan.splits < 2:
            decision = None
        elif plan.contents.site:
            decision = _compare_fold_runs(plan, problem, root, watch)
        else:
            decision = _compare_split_runs(plan, problem, root, runs, watch)
        trial = None
        if plan.trial is not None:
            trial = run_trial(plan, problem, plan.preferred_method(decision), root, watch)
        for name, result in ((DECISION, decision), (SCRATCH_TRIAL, trial)):
            if result is not None:
                _write(root, name, (json.dumps(result.as_json(), indent=2) + "\n").encode())
        return PlanResult(runs, outcome, decision, trial)


@contextmanager
def _new_folder(plan: Plan, config: Config, root: Path) -> Iterator[None]:
    """Write the plan into a new run folder; remove it if a mistake of the user ends the block before a run has started.

    Args:
        plan: the plan.
        config: the configuration of its runs.
        root: the run folder, which must not contain a run.

    Raises:
        UserError: the folder contains a run, or cannot be written.
    """
    RunFolder.check_unused(root, identity(config, config.method))
    check_output_folder(root, "run_dir")
    existed = root.exists()
    try:
        _write_plan(plan, root)
        yield
    except UserError:
        if not RunFolder.exists(root):  # no run has started, so nothing can be resumed
            for name in (PLAN, SKIPPED):
                (root / name).unlink(missing_ok=True)
            if not existed and not any(root.iterdir()):
                root.rmdir()
        raise


def _write_plan(plan: Plan, root: Path) -> None:
    """Write into a run's folder what `load_plan` needs of its plan besides the run's own configuration."""
    record = {
        "pair": plan.pair,
        "heads": plan.heads,
        "splits": plan.splits,
        "share": plan.share,
        "baselines": plan.config.baselines,
        "reference": plan.config.reference,
        "trial": None if plan.trial is None else to_toml(plan.trial.config),
    }
    _write(root, PLAN, json.dumps(record).encode())


def _write(root: Path, name: str, data: bytes) -> None:
    """Write a file of a plan into its folder, which is created if it is missing; raise WriteError if that fails."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        atomic_io.write_atomically(root / name, data)
    except OSError as error:
        advice = RESUME_ADVICE if RunFolder.exists(root) else REPEAT_ADVICE
        raise WriteError(
            f"{root / name} cannot be written ({atomic_io.error_reason(error)}). First {atomic_io.write_remedy(error)}, "
            f"then {advice}",
            resume=root,
        ) from error


def _run_site_methods(
    config: Config, methods: Sequence[str], root: Path, watch: Callback, problem: Problem
) -> list[Row]:
    """Train each method on all of a site's labels. Nothing is tested: the site has no other labels.

    Args:
        config: the run's configuration.
        methods: the method of `config`, whose run folder is `root`, and its baselines, which have folders below it.
        root: the run folder.
        watch: receives the progress of each run.
        problem: the data, split and task of all runs.

    Returns:
        The summary of each run.
    """
    summaries: list[Row] = []
    for name in methods:
        # With a shared budget, all methods take as many steps as the reference method.
        method_config = replace(config, method=name, baselines=(), reference=config.reference or config.method)
        path = root if name == config.method else root / BASELINES / name
        summaries.append(runner.run_in_folder(method_config, path, watch, tests=False, problem=problem))
    return summaries


def _build_pair(plan: Plan) -> tuple[Method, Method]:
    """Build the two heads of a plan with their default options: with labels only, and with unlabeled images."""
    labels_only, with_unlabeled = (
        factory.build_method(replace(plan.config, method=name, options={}, baselines=())) for name in plan.pair
    )
    return labels_only, with_unlabeled


def _cross_validate_heads(plan: Plan, problem: Problem) -> Decision | None:
    """Compare two heads by cross-validation of a site's labeled images; None where no class has two labels."""
    labels_only, with_unlabeled = _build_pair(plan)
    groups = problem.source.train.groups
    solver = FoldSolver(problem.task, problem.train)
    predictions = predict_folds(solver, labels_only, with_unlabeled, cross_validation_folds(solver.labels, groups))
    return None if predictions is None or not (solver.labels < 0).any() else decide_by_image(predictions)


def _compare_label_draws(plan: Plan, problem: Problem) -> Decision | None:
    """Decide whether unlabeled images help, by solving two heads on several random choices of the labeled images.

    In class folders all labels are known, and the run hides most of them. So other choices of the labels that it uses can
    be drawn, as many of each class as in the run. Each draw is tested on the test folders or, without these, on images
    that it draws from each class. The gain is the difference in balanced accuracy.

    Args:
        plan: the plan, whose heads are the last layers of a pretrained network.
        problem: the data, split and task of the run; its images are features.

    Returns:
        The decision; None where a draw leaves no labels, no unlabeled or no test images.
    """
    draws = _redraw_labels(plan, problem)
    if len(draws.splits) < 2 or not all(map(len, draws.splits[0])):
        return None
    labels_only, with_unlabeled = _build_pair(plan)
    baseline: list[ModelEvaluation] = []
    method: list[ModelEvaluation] = []
    solver = DrawSolver(problem.task, draws.images)
    for fold in draws.splits:
        labels_only_evaluation, with_unlabeled_evaluation = solver.evaluate([labels_only, with_unlabeled], fold)
        baseline.append(labels_only_evaluation)
        method.append(with_unlabeled_evaluation)
    first = draws.splits[0]
    test_counts = np.bincount(draws.images.labels[torch.from_numpy(first.test)].numpy())
    return decide_by_evaluations(
        method,
        baseline,
        test_train_ratio=draws.test_train_ratio,
        tested=draws.test_count,
        available=len(first.unlabeled),
        test_shares=test_counts / test_counts.sum(),
    )


class _LabelDraws(NamedTuple):
    """The draws of the labels on which two heads are compared.

    Attributes:
        images: the images that the rows of the splits number, and their labels.
        splits: the rows of each split.
        test_train_ratio: the ratio of test to training images of a split, which corrects the interval for splits that
            share images.
        test_count: the number of different test images of all splits.
    """

    images: Examples
    splits: list[Fold]
    test_train_ratio: float
    test_count: int


def _redraw_labels(plan: Plan, problem: Problem) -> _LabelDraws:
    """Draw again which images of class folders are labeled, so that methods are compared on more than one split.

    Rows of the splits number the training and then the test images of the run. Each draw has as many labels of a class as
    the run. Test images of a test folder stay those; otherwise each draw also holds out other test images.
    """
    source = problem.source
    assert problem.test is not None, "class folders have test images"
    images = torch.cat([problem.train.images, problem.test.images])
    labels = torch.cat([problem.train.labels, problem.test.labels])
    train_count = len(problem.train.labels)
    if plan.contents.tests:
        test_rows = np.arange(train_count, len(labels))
        test_count = len(test_rows)
        test_train_ratio = test_count / train_count
    else:
        test_rows = None  # drawn in every split, so that every image may be a test image
        test_count = len(labels)
        test_train_ratio = 1 / (FOLDS - 1)
    groups = None
    if source.train.groups is not None and source.test.groups is not None:
        groups = [*source.train.groups, *source.test.groups]
    is_used = problem.split.labeled & (problem.split.client != -1)  # an image at client -1 is not trained on
    used_labels = source.train.labels[is_used]
    labels_per_class = np.bincount(used_labels, minlength=len(plan.contents.classes)).tolist()
    splits = list(label_draws(labels.numpy(), labels_per_class, test_rows, groups))
    return _LabelDraws(Examples(images, labels), splits, test_train_ratio, test_count)


def _compare_fold_runs(plan: Plan, problem: Problem, root: Path, watch: Callback) -> Decision | None:
    """Compare runs on the folds of one cross-validation of a site's labels."""
    train = problem.source.train
    results: list[dict[str, ModelEvaluation]] = []
    for number, fold in enumerate(cross_validation_folds(train.labels, train.groups, repeats=1), start=1):
        config = replace(plan.config, run_dir=root / "splits" / str(number))
        outcome = runner.start(config, watch, restrict_to_fold(problem, fold), resume_existing=True)
        results.append(_evaluate_runs(outcome.summaries))
    return _decide_by_results(plan, results, problem.source.test, 1 / (FOLDS - 1), int((train.labels < 0).sum()))


def _compare_split_runs(plan: Plan, problem: Problem, root: Path, runs: list[Row], watch: Callback) -> Decision | None:
    """Compare both methods of a plan on several draws of the labels of class folders, each of which trains them anew.

    Args:
        plan: the plan, with the number of draws (splits).
        problem: the data, split and task of the first draw.
        root: the run folder; the runs of draw i are in its folder splits/i.
        runs: the summaries of the finished runs of the first draw.
        watch: receives the progress of the others.
    """
    train = problem.source.train
    results = [_evaluate_runs(runs)]
    for number in range(1, plan.splits):
        config = replace(plan.config, run_dir=root / "splits" / str(number), split_seed=plan.config.split_seed + number)
        split_problem = replace(problem, split=factory.get_split(config, problem.source))
        outcome = runner.start(config, watch, split_problem, resume_existing=True)
        results.append(_evaluate_runs(outcome.summaries))
    test = problem.source.test
    hidden = int((~problem.split.labeled).sum())
    return _decide_by_results(plan, results, test, len(test) / len(train.labels), hidden)


def _decide_by_results(
    plan: Plan,
    results: Sequence[Mapping[str, ModelEvaluation]],
    test: Images,
    test_train_ratio: float,
    available: int,
) -> Decision | None:
    """Decide by the evaluations of each split; None where there are fewer than two.

    Args:
        plan: the plan.
        results: the evaluation of each method on each split, by the method's name.
        test: the test images of all splits.
        test_train_ratio: the ratio of test to training images of a split.
        available: the number of images that could be labeled.
    """
    if len(results) < 2:
        return None
    baseline, method = ([result[name] for result in results] for name in plan.pair)
    test_counts = np.bincount(test.labels, minlength=len(plan.contents.classes))
    return decide_by_evaluations(
        method,
        baseline,
        test_train_ratio=test_train_ratio,
        tested=len(test),
        available=available,
        test_shares=test_counts / test_counts.sum(),
    )


def _evaluate_runs(rows: Sequence[Row]) -> dict[str, ModelEvaluation]:
    """Read the evaluation of the last model of each run from its summary, by the method's name."""
    evaluations: dict[str, ModelEvaluation] = {}
    for row in rows:
        if row["accuracy"] is None:
            raise UserError(f"{row['title']} was tested on no image.")
        evaluations[row["method"]] = ModelEvaluation(torch.tensor(row["confusion"]), loss=0.0)
    return evaluations
