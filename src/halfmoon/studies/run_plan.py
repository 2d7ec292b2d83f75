"""A plan is played: two rows, and the decision whether unlabeled images help, from repeated splits of the labels."""

import json
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from halfmoon.config.schema import Config, identity
from halfmoon.core.errors import UserError
from halfmoon.data import Images
from halfmoon.engine.evaluation import Examples
from halfmoon.engine.loop import Row
from halfmoon.runs import factory, runner
from halfmoon.runs.callbacks import Callback, told_of
from halfmoon.runs.factory import Problem
from halfmoon.runs.jobs import parsed
from halfmoon.runs.runner import RunResult
from halfmoon.storage import atomic_io
from halfmoon.storage.run_folder import BASELINES, DECISION, PLAN, RunFolder
from halfmoon.studies.decision import FOLDS, Decision, Fold, decide, draws, folds, head_accuracy
from halfmoon.studies.plan import Plan, Step, one_holder
from halfmoon.studies.scan_folder import contents_of, site_source


@dataclass(frozen=True)
class PlanResult:
    """What was played, the recommended method first; `outcome` is None where no image was left to test on."""

    runs: list[Row]
    outcome: RunResult | None
    decision: Decision | None


def left(root: Path) -> Plan | None:
    """Return the plan of a run folder, to go on with it; None where it was not made by a plan."""
    record = atomic_io.read_json(root / PLAN)
    if record is None or not RunFolder.exists(root):
        return None
    with RunFolder.open(root) as folder:
        config = replace(parsed(folder.config, root), baselines=tuple(record.pop("baselines")))
    contents = contents_of(Path(config.data), config.group_pattern)
    if contents is None:
        raise UserError(f"{config.data}, on which {root} was trained, holds no images any more: put them back.")
    pair = record["pair"][0], record["pair"][1]
    return Plan(config, contents, **{**record, "pair": pair}, reasons=(), steps=(Step("", 0.0),))


def play(plan: Plan, root: Path, watch: Callback, again: bool = False) -> PlanResult:
    """Play the rows in the folder `root`, or go on `again`, and decide; a decision is None where one split was played.

    Raise what `halfmoon.runs.runner.start` raises.
    """
    config = replace(plan.config, run_dir=root)
    if not again:
        RunFolder.refuse(root, identity(config, config.method))
        facts = {name: getattr(plan, name) for name in ("pair", "heads", "splits", "share")}
        root.mkdir(parents=True, exist_ok=True)
        atomic_io.replace(root / PLAN, json.dumps({**facts, "baselines": config.baselines}).encode())
    methods = [config.method, *config.baselines]
    if plan.contents.site:
        flip = bool(config.flip)
        source = site_source(plan.contents, factory.preparation(config), plan.share, flip, watch.say)
        split = one_holder(source.train.labels)
    else:
        source, split = replace(factory.images(config), mirror=bool(config.flip)), None
    shared = factory.problem(config, split, methods, source, told_of(watch))
    outcome, runs = None, list[Row]()
    if plan.contents.site:
        for name in methods:
            one = replace(config, method=name, baselines=(), reference=config.reference or config.method)
            path = root if name == config.method else root / BASELINES / name
            runs.append(runner.cell(one, path, watch, tests=False, shared=shared))
    else:
        outcome = _gone_on(config, watch, shared)
        runs = outcome.summaries
    decision = _of_heads(plan, shared) if plan.heads else _of_runs(plan, shared, root, runs, watch)
    if decision is not None:
        atomic_io.replace(root / DECISION, (json.dumps(decision.as_json(), indent=2) + "\n").encode())
    return PlanResult(runs, outcome, decision)


def _of_heads(plan: Plan, shared: Problem) -> Decision | None:
    """Decide by heads that are solved anew on every split."""
    labels = shared.source.train.labels
    data, overlap, tested = shared.train, 1 / (FOLDS - 1), int((labels >= 0).sum())
    if plan.contents.site:
        splits = list(folds(labels, shared.source.train.groups))
    else:
        assert shared.test is not None, "a folder has a test part"
        data = Examples(*(torch.cat(pair) for pair in zip(shared.train, shared.test, strict=True)))
        labels, tests = data.labels.numpy(), None
        if plan.contents.tests:
            tests = np.arange(len(shared.train.labels), len(labels))
            overlap = len(tests) / len(shared.train.labels)
        marked = shared.source.train.labels[shared.split.labeled & (shared.split.client != -1)]
        parts = [each.groups for each in (shared.source.train, shared.source.test)]
        owners = None if None in parts else [name for part in parts if part for name in part]
        counts = np.bincount(marked, minlength=len(plan.contents.classes)).tolist()
        splits = list(draws(labels, counts, tests, owners))
        tested = len(labels) if tests is None else len(tests)
    if len(splits) < 2 or not all(map(len, splits[0])):
        return None
    heads = [factory.method(replace(plan.config, method=name, options={}, baselines=())) for name in plan.pair]
    results = [[head_accuracy(method, shared.task, data, fold) for method in heads] for fold in splits]
    base, ours = zip(*results, strict=True)
    return decide(ours, base, overlap, tested)


def _of_runs(plan: Plan, shared: Problem, root: Path, runs: list[Row], watch: Callback) -> Decision | None:
    """Decide by runs on other splits, each in a folder of its own."""
    if plan.splits < 2:
        return None
    labels = shared.source.train.labels
    results: list[dict[str, float]] = []
    if not plan.contents.site:
        results.append({row["method"]: _last(row) for row in runs})
    cases: list[Fold | None] = [None] * (plan.splits - 1)
    if plan.contents.site:
        cases = list[Fold | None](folds(labels, shared.source.train.groups))[:FOLDS]
    for number, fold in enumerate(cases, start=1):
        where = root / "splits" / str(number)
        if fold is None:
            config = replace(plan.config, run_dir=where, split_seed=plan.config.split_seed + number)
            part = replace(shared, split=factory.split_of(config, shared.source))
        else:
            config, part = replace(plan.config, run_dir=where), _part(shared, fold)
        rows = _gone_on(config, watch, part).summaries
        results.append({row["method"]: _last(row) for row in rows})
    base, ours = ([row[name] for row in results] for name in plan.pair)
    if len(results) < 2:
        return None
    tests = len(shared.source.test)
    if plan.contents.site:
        return decide(ours, base, 1 / (FOLDS - 1), int((labels >= 0).sum()))
    return decide(ours, base, tests / len(labels), tests)


def _gone_on(config: Config, watch: Callback, shared: Problem) -> RunResult:
    assert config.run_dir is not None, "each is played in a folder of its own"
    if RunFolder.exists(config.run_dir):
        return runner.resume(config.run_dir, watch, shared=shared)
    return runner.start(config, watch, shared=shared)


def _part(shared: Problem, fold: Fold) -> Problem:
    """Return a problem whose labels are those of a fold, and whose test images are its own."""
    train = shared.source.train
    rows = np.sort(np.concatenate([fold.labeled, fold.unlabeled]))
    parts = {"train": rows, "test": fold.test}
    images = {name: Images(train.images[of], train.labels[of]) for name, of in parts.items()}
    examples = {name: Examples(*(each[torch.from_numpy(of)] for each in shared.train)) for name, of in parts.items()}
    source = replace(shared.source, **images)
    return replace(shared, source=source, split=one_holder(train.labels[rows]), **examples)


def _last(row: Row) -> float:
    if row["accuracy"] is None:
        raise UserError(f"{row['title']} was tested on no image.")
    return 100 * row["accuracy"]["last"]
