"""Whether unlabeled images help: paired differences over repeated splits, a verdict, and how many labels it lacks."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from halfmoon.api.types import ClientData, ClientUpdate, Federation, Method, Task
from halfmoon.api.uploads import Upload
from halfmoon.core import rng
from halfmoon.core.tree import Tree
from halfmoon.data.groups import apart
from halfmoon.data.partition.primitives import Sides, stream
from halfmoon.engine.evaluation import Examples, tally
from halfmoon.methods.analytic import Sums
from halfmoon.report.paired import Difference, paired

MARGIN = 2.0
"""Points of accuracy: where a gain as large as this is ruled out, labels alone are as good."""

FOLDS, REPEATS = 5, 3
"""Parts of the labels in a cross-validation, and how often it is repeated."""

DRAWS = 10
"""Draws of the labels where all labels are known."""

SPARE = 128
"""Directions beyond those of the images, so that the mixture head finds as many as it asks for."""

Kind = Literal["help", "harm", "equal", "unknown"]

UNLABELED = "Unlabeled images help", "Labels alone are better", "Labels alone are as good"
JOINING = "Joining helps", "Alone is better", "Alone is as good"
"""What is said of a gain, of a loss, and of a gain below the margin."""


class Fold(NamedTuple):
    """Rows, int64, of one split: those whose labels are used, those without, and those that are tested on."""

    labeled: np.ndarray
    unlabeled: np.ndarray
    test: np.ndarray


@dataclass(frozen=True)
class Decision:
    """What the splits say; `missing` is about how many more labels would tell, where these cannot."""

    kind: Kind
    base: float  # mean accuracy of labels alone, in percent
    ours: float
    difference: Difference
    splits: int
    labels: int
    missing: int = 0
    words: tuple[str, str, str] = UNLABELED

    @property
    def sentence(self) -> str:
        """The decision in words, with its interval."""
        d = self.difference
        points = f"{d.mean:+.1f} points, 95 % {d.low:+.1f} to {d.high:+.1f}"
        if self.base == self.ours == 100:
            return f"Both are at the ceiling ({points}): no tested image is left that unlabeled images could win."
        if self.kind == "unknown":
            more = f"about {self.missing:,} more labeled images would" if self.missing else "more would"
            return f"Cannot tell with so few labels ({points}): {more}."
        return f"{dict(zip(('help', 'harm', 'equal'), self.words, strict=True))[self.kind]} ({points})."

    def as_json(self) -> dict[str, Any]:
        facts = {"kind": self.kind, "sentence": self.sentence, "labels_only": self.base, "with_unlabeled": self.ours}
        return {**facts, **self.difference._asdict(), "splits": self.splits, "missing": self.missing}


def decide(
    ours: Sequence[float], base: Sequence[float], overlap: float, labels: int, words: tuple[str, str, str] = UNLABELED
) -> Decision:
    """Judge accuracies in percent of two methods on the same splits, tested on `labels` different images in all.

    The interval is that of `interval`.
    """
    difference = interval(ours, base, overlap, labels)
    kind: Kind = "unknown"
    if difference.low > 0:
        kind = "help"
    elif difference.high < 0:
        kind = "harm"
    elif difference.high < MARGIN:
        kind = "equal"
    missing = more_labels(difference, labels) if kind == "unknown" else 0
    return Decision(kind, float(np.mean(base)), float(np.mean(ours)), difference, len(ours), labels, missing, words)


def interval(ours: Sequence[float], base: Sequence[float], overlap: float, labels: int) -> Difference:
    """Return the difference of accuracies in percent on the same splits, tested on `labels` different images in all.

    The interval is that of the corrected resampled t-test (`halfmoon.report.paired.paired`). Where all splits show one
    difference it is that of a proportion of which none of n was seen, 3 / n.
    """
    difference = paired(ours, base, overlap)
    reach = 300 / labels if difference.low == difference.high else 0
    return Difference(difference.mean, difference.low - reach, difference.high + reach, difference.p)


def more_labels(difference: Difference, labels: int) -> int:
    """Return about how many more labels would make the interval as narrow as its mean, or `MARGIN`, is large.

    Its width shrinks with the square root of their number; rounded up to tens.
    """
    reach, target = difference.high - difference.mean, max(abs(difference.mean), MARGIN)
    return max(10, 10 * math.ceil(labels * ((reach / target) ** 2 - 1) / 10))


def folds(labels: np.ndarray, groups: Sequence[str] | None = None) -> Iterator[Fold]:
    """Yield `REPEATS` cross-validations of the labeled rows in `FOLDS` parts, each with its share of every class.

    `labels` is int64 (N,), negative where there is none. A class of one label is always trained on. A group is in one
    part, which is that of its first row; no row of it, labeled or not, is on both sides.
    """
    for repeat in range(REPEATS):
        part, offset, parts = np.full(len(labels), -1), 0, dict[str, int]()
        for label in np.unique(labels[labels >= 0]):
            rows = stream(0, "folds", str(repeat), str(label)).permutation(np.flatnonzero(labels == label))
            if len(rows) > 1:
                part[rows] = (offset + np.arange(len(rows))) % FOLDS
                offset += len(rows)
                for row in rows:
                    if groups is not None and (name := groups[int(row)]):
                        part[row] = parts.setdefault(name, int(part[row]))
        for number in range(FOLDS):
            tests = np.flatnonzero(part == number)
            sides = (np.flatnonzero(rows) for rows in ((labels >= 0) & (part != number), labels < 0))
            labeled, unlabeled = (apart(rows, tests, groups) for rows in sides)
            if len(tests) and len(labeled):
                yield Fold(labeled, unlabeled, tests)


def draws(
    labels: np.ndarray, counts: Sequence[int], tests: np.ndarray | None = None, groups: Sequence[str] | None = None
) -> Iterator[Fold]:
    """Yield `DRAWS` draws of so many labels of each class of rows whose labels are all known, int64 (N,).

    The rows of `tests` are tested on. None: a fifth of every class, drawn anew each time, with all of their groups.
    """
    owners = groups or [""] * len(labels)
    for number in range(DRAWS):
        labeled, rest, test_rows = list[np.ndarray](), list[np.ndarray](), list[np.ndarray]()
        sides = Sides()
        for label, count in enumerate(counts):
            rows = stream(0, "draws", str(number), str(label)).permutation(np.flatnonzero(labels == label))
            mine = np.isin(rows, sides.draw(rows, owners, len(rows) // FOLDS) if tests is None else tests)
            test_rows.append(rows[mine])
            labeled.append(rows[~mine][:count])
            rest.append(rows[~mine][count:])
        yield Fold(*(np.sort(np.concatenate(each)) for each in (labeled, rest, test_rows)))


def head_accuracy(method: Method, task: Task, data: Examples, fold: Fold) -> float:
    """Return the accuracy, in percent, of a head that is solved from sums over the fold's rows, all in one place."""
    return right(task, solved(method, task, data, fold), data, fold.test)


def right(task: Task, model: Tree, data: Examples, rows: np.ndarray) -> float:
    """Return how often, in percent, a model is right on rows, int64."""
    test = torch.from_numpy(rows)
    metrics = tally(task.network, model, task.normalize, Examples(data.images[test], data.labels[test])).row()
    return 100 * cast(float, metrics["accuracy"])


def solved(method: Method, task: Task, data: Examples, fold: Fold) -> Tree:
    """Return the model of such a head.

    Fewer images than half of the features are solved in a basis of what they span, which gives the same head sooner.
    """
    x, u = torch.from_numpy(fold.labeled), torch.from_numpy(fold.unlabeled)
    counts = torch.tensor([len(x), len(u)])
    local = ClientData(data.images[x], data.labels[x], data.images[u], counts[0], counts[1])
    updates = cast(Mapping[str, Sums], method.client_updates(task))
    server = method.start(task, task.network.init(rng.generator(0, "head")))
    images, head = torch.cat([local.x, local.u]), server["head"]
    basis = None
    if 2 * (len(images) + SPARE) < len(head["center"]):
        basis = orthonormal_basis(updates["mean"].roots(server, images))
        updates = {name: replace(update, basis=basis) for name, update in updates.items()}
        server = {**server, "head": {**head, "weight": head["weight"] @ basis, "center": head["center"] @ basis}}
    federation = cast(Federation, _OnePlace(updates, local))
    for number in range(task.rounds):
        server = method.round(replace(task, round=number), server, federation)
    if basis is not None:
        head = server["head"]
        server = {**server, "head": {**head, "weight": head["weight"] @ basis.T, "center": basis @ head["center"]}}
    return method.solution(task, server)


def orthonormal_basis(rows: Tensor) -> Tensor:
    """Return orthonormal columns (F, n + `SPARE`) whose span holds `rows` (n, F)."""
    spare = torch.eye(rows.shape[1], SPARE, dtype=rows.dtype, device=rows.device)
    columns = torch.linalg.qr(torch.cat([rows.T, spare], 1))  # pyright: ignore[reportUnknownMemberType]
    return cast(Tensor, columns[0])


class _OnePlace:
    """A federation of one client, which is always asked."""

    clients, labeled = 1, 0

    def __init__(self, updates: Mapping[str, ClientUpdate], data: ClientData) -> None:
        self.updates, self.data = updates, data
        self.cohort = self.responders = torch.zeros(1, dtype=torch.int64)

    def average(self, client_update: str, broadcast: Tree) -> Upload:
        return Upload({"sums": self.updates[client_update].begin(broadcast, {}, self.data)}, torch.ones(1))
