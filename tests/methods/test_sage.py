"""SAGE's targets by hand: on the line of `test_objectives`, the received model has a weight of its own."""

from math import log

import pytest
import torch
from test_objectives import Line, batch
from torch.func import grad_and_value

from halfmoon.api.types import ClientData, Task
from halfmoon.core.normalize import Normalize
from halfmoon.core.optim import SGD
from halfmoon.methods import registry
from halfmoon.methods.objectives import SAGE

NOBODY = ClientData(*[torch.zeros(0)] * 3, torch.tensor(0), torch.tensor(0))


def validated(objective: SAGE, local: float, received: float, weak: list[float], strong: list[float], **line):
    """Return the loss of the unlabeled term, its derivative in w and the pseudo-labels, with w = local."""
    task = Task(Line(1, **line), SGD(0.1), Normalize())
    model = task.network.init(torch.Generator())
    came = {"params": {"w": torch.tensor(received, dtype=torch.float64)}, "stats": model["stats"]}
    cached = objective.prepare(task, came, NOBODY)
    given = batch([], [], weak=weak, strong=strong)
    lost = lambda params: objective(task, params, model["stats"], given, {}, cached)  # noqa: E731
    params = {"w": torch.tensor(local, dtype=torch.float64)}
    gradient, (loss, seen) = grad_and_value(lost, has_aux=True)(params)
    return float(loss), float(gradient["w"]), seen.pseudo[0]


def test_a_target_between_two_classes():
    """w = ln 3 on x = 2: class 0 with 0.9. Received w = -ln 3 / 2: class 1 with 3/4. The gap 0.15 is three half gaps:
    the target is (1/8, 7/8). Compared with the strong x = 1, p = (3/4, 1/4): 1/8 ln(4/3) + 7/8 ln 4, derivative 3/4 - 1/8.
    """
    loss, slope, pseudo = validated(SAGE(0.8), log(3), -log(3) / 2, [2], [1])
    assert loss == pytest.approx(log(4 / 3) / 8 + 7 / 8 * log(4), rel=1e-12)
    assert slope == pytest.approx(0.625, rel=1e-12)
    assert (pseudo.label.tolist(), pseudo.weight.tolist()) == ([1], [1.0])
    assert pseudo.confidence.tolist() == pytest.approx([0.9], rel=1e-12)
    half, _, _ = validated(SAGE(0.8, half_gap=0.15), log(3), -log(3) / 2, [2], [1])
    assert half == pytest.approx(log(4 / 3) / 2 + log(4) / 2, rel=1e-12)


def test_more_confident_model_is_followed():
    """threshold = 0.8; strong x = 1 costs ln(4/3) for class 0 and ln 4 for class 1, w = ln 3. The mean runs over all
    four.

    Weak 2: local 0.9 (class 0). Weak 1: 3/4, not confident; received -2 ln 3: class 1 with 0.9: followed. Weak 0: nobody is
    sure. Weak -2: local class 1 with 0.9, received class 0 with 81/82.
    """
    loss, _, pseudo = validated(SAGE(0.8), log(3), -2 * log(3), [1, 0], [1, 1])
    assert pseudo.label.tolist() == [1, 0]
    assert pseudo.weight.tolist() == [1.0, 0.0]
    assert loss == pytest.approx(log(4) / 2, rel=1e-12)
    equal, slope, _ = validated(SAGE(0.8), log(3), log(3), [2], [1])
    assert equal == pytest.approx(log(4 / 3), rel=1e-12)  # no gap: the local class, which is the global one
    assert slope == pytest.approx(-0.25, rel=1e-12)
    opposed, _, _ = validated(SAGE(0.8), log(3), -log(3), [2], [1])
    assert opposed == pytest.approx(log(4 / 3), rel=1e-12)  # equally sure of different classes: the local one


def test_received_model_uses_its_statistics():
    """Centered by the tracked mean 1, weak 3 is 2 for it: 0.9, sure. Alone in its batch, 3 is 0 for the local one."""
    loss, _, pseudo = validated(SAGE(0.8), log(3), log(3), [3], [3], centered=True)
    assert pseudo.confidence.tolist() == pytest.approx([0.9], rel=1e-12)
    assert pseudo.weight.tolist() == [1.0]
    assert loss == pytest.approx(log(2), rel=1e-12)


def test_it_counts_the_received_models_pass():
    """4 labeled and 6 unlabeled images: 16 through the model in training, all of which return, and 6 pseudo-labels."""
    entry = registry.entry("sage")
    passes = SAGE().passes(Task(Line(1), SGD(0.1), Normalize()), 4, 6)
    assert passes == (22, 16)
    assert entry.method.objective == SAGE(0.95, 1.0, 0.05)
