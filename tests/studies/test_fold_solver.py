"""Heads on many draws of the labels: the predictions of the heads that each draw would have by itself."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from halfmoon.api.types import Task
from halfmoon.core.optim import SGD
from halfmoon.core.tree import Tree
from halfmoon.engine.evaluation import Examples, ModelEvaluation
from halfmoon.methods.analytic import MixtureHead, RidgeHead, principal_directions
from halfmoon.models.vectors import LinearClassifier, Standardize
from halfmoon.studies import fold_solver
from halfmoon.studies.decision import evaluate_rows, solve_heads
from halfmoon.studies.fold_solver import DrawSolver, improve_directions
from halfmoon.studies.folds import label_draws

METHODS = (RidgeHead(), MixtureHead(directions=12, em_rounds=3))
CLASSES = 4
FEATURES = 90


def make_task(width: int) -> Task:
    network = LinearClassifier(classes=CLASSES, norm="none", features=width, centered=True)
    center = torch.zeros(width, dtype=torch.float64)
    normalize = Standardize(center=center, scale=torch.ones_like(center))
    return Task(network, SGD(), normalize, rounds=4)


def make_data(count: int, width: int) -> Examples:
    """Draw vectors of four classes, whose coordinates vary less and less, like those of real features."""
    generator = torch.Generator().manual_seed(5)
    labels = torch.arange(count) % CLASSES
    scales = torch.arange(1, width + 1, dtype=torch.float64) ** -0.7
    means = 0.8 * torch.randn(CLASSES, width, generator=generator, dtype=torch.float64) * scales
    vectors = means[labels] + torch.randn(count, width, generator=generator, dtype=torch.float64) * scales
    return Examples(vectors[:, None, None], labels)


@pytest.mark.parametrize("labels", [3, 20], ids=["few labels", "more labels than half of the features"])
def test_a_draw_has_the_heads_of_all_features(labels: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fold_solver, "FIRST_DIRECTIONS", 22)
    data = make_data(count=300, width=FEATURES)
    task = make_task(FEATURES)
    # Equal labeled images are linearly dependent: a basis with arbitrary columns would not be orthonormal.
    data.images[4] = data.images[0]
    solver = DrawSolver(task, data)
    for fold in label_draws(data.labels.numpy(), [labels] * CLASSES):
        if 0 not in fold.labeled and 4 not in fold.labeled:
            rows = np.union1d(fold.labeled, [0, 4])
            fold = fold._replace(labeled=rows, unlabeled=np.setdiff1d(fold.unlabeled, rows))
        models = solve_heads(METHODS, task, data, fold)
        expected = [evaluate_rows(task, model, data, fold.test) for model in models]
        for evaluation, other in zip(solver.evaluate(METHODS, fold), expected, strict=True):
            assert torch.equal(evaluation.confusion, other.confusion)
            assert evaluation.loss == pytest.approx(other.loss, rel=0.02)
            assert evaluation.correct is not None
            assert other.correct is not None
            assert np.array_equal(evaluation.correct, other.correct)


def test_ten_draws_have_the_pooled_heads_to_1e_9(monkeypatch: pytest.MonkeyPatch) -> None:
    """The logits equal those of the heads that are solved on all features of a draw.

    Exact principal directions replace the approximate ones, on which only the mixture head depends.
    """

    def exact_directions(vectors: torch.Tensor, basis: torch.Tensor, count: int) -> torch.Tensor:
        return principal_directions(vectors.T @ vectors, count)

    logits: list[torch.Tensor] = []
    evaluate_head = fold_solver._evaluate_head

    def record_logits(head: Tree, vectors: torch.Tensor, labels: torch.Tensor) -> ModelEvaluation:
        logits.append(vectors @ head["weight"].T + head["bias"])
        return evaluate_head(head, vectors, labels)

    monkeypatch.setattr(fold_solver, "FIRST_DIRECTIONS", 22)
    monkeypatch.setattr(fold_solver, "_evaluate_head", record_logits)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    data = make_data(count=300, width=FEATURES)
    task = make_task(FEATURES)
    solver = DrawSolver(task, data)
    monkeypatch.setattr(fold_solver, "improve_directions", exact_directions)
    draws = list(label_draws(data.labels.numpy(), [3] * CLASSES))
    assert len(draws) == 10
    for fold in draws:
        logits.clear()
        solver.evaluate(METHODS, fold)
        for model, drawn in zip(solve_heads(METHODS, task, data, fold), logits, strict=True):
            pooled = task.network.predict(model["params"], {}, data.images[fold.test][:, 0, 0])
            torch.testing.assert_close(drawn, pooled, atol=1e-9, rtol=1e-9)


def test_few_images_are_solved_with_all_features() -> None:
    data = make_data(count=60, width=FEATURES)
    task = replace(make_task(FEATURES), rounds=1)
    fold = next(label_draws(data.labels.numpy(), [5] * CLASSES))
    evaluation = DrawSolver(task, data).evaluate(METHODS[:1], fold)[0]
    model = solve_heads(METHODS[:1], task, data, fold)[0]
    assert torch.equal(evaluation.confusion, evaluate_rows(task, model, data, fold.test).confusion)


def test_directions_converge_from_random_ones() -> None:
    vectors = make_data(count=300, width=FEATURES).images[:, 0, 0]
    start = torch.randn(FEATURES, 20, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    basis = torch.linalg.qr(start)[0]
    for _ in range(20):
        basis = improve_directions(vectors.float(), basis, 20)
    leading = torch.linalg.eigh(vectors.T @ vectors)[1][:, -10:]
    torch.testing.assert_close(basis.T @ basis, torch.eye(20, dtype=torch.float64), atol=1e-10, rtol=0)
    # The ten leading directions are in the span of the 20 estimates.
    torch.testing.assert_close(
        (basis.T @ leading).square().sum(0), torch.ones(10, dtype=torch.float64), atol=1e-6, rtol=0
    )
