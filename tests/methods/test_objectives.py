"""The objectives on a network of one weight, where every number can be derived by hand.

The network says (w * x, 0) for one-pixel images x, so its probability of class 0 is sigmoid(w * x). With w = ln 3 an
image x = 1 has the probabilities (3/4, 1/4), x = 2 has (9/10, 1/10), x = -1 has (1/4, 3/4), x = 0 has (1/2, 1/2).
The cross-entropy of class 0 is ln(4/3) at x = 1, and its derivative in w is -(1 - p) * x = -1/4.
"""

from dataclasses import dataclass
from math import log

import pytest
import torch
from torch import Tensor
from torch.func import grad_and_value

from halfmoon.api.types import Batch, Labeling, Statistics, Task
from halfmoon.core.normalize import Normalize
from halfmoon.core.optim import SGD
from halfmoon.core.tree import Tree
from halfmoon.methods.objectives import UDA, FixMatch, Objective, PseudoLabel, Supervised
from halfmoon.models import Network
from halfmoon.models.network import ForwardPass

W = log(3)


@dataclass(frozen=True)
class Line(Network):
    """Logits (w * x, 0); with `centered`, x minus the mean of its batch, or minus the tracked mean."""

    classes: int = 2
    centered: bool = False

    def init(self, generator: torch.Generator) -> Tree:
        params = {"w": torch.tensor(W, dtype=torch.float64)}
        return {"params": params, "stats": {"in": {"mean": torch.tensor(1.0, dtype=torch.float64)}}}

    def layers(self, x: Tensor, run: ForwardPass) -> Tensor:
        raise AssertionError("no layer of a linear network needs a run")

    def check(self, shape: tuple[int, int, int]) -> None:
        """Take anything."""

    def train(self, params: Tree, x: Tensor, real: Tensor | None = None) -> tuple[Tensor, Tree]:
        mean = x.mean()
        return self._logits(params, x - mean * self.centered), {"in": {"mean": mean}}

    def predict(self, params: Tree, stats: Tree, x: Tensor) -> Tensor:
        return self._logits(params, x - stats["in"]["mean"] * self.centered)

    def _logits(self, params: Tree, x: Tensor) -> Tensor:
        z = params["w"] * x.flatten()
        return torch.stack([z, torch.zeros_like(z)], -1)


def batch(x: list[float], y: list[int], weak: list[float] = (), strong: list[float] = ()) -> Batch:
    """Return a batch of one-pixel images."""
    pixels = lambda values: torch.tensor(list(values), dtype=torch.float64).view(-1, 1, 1, 1)  # noqa: E731
    return Batch(
        pixels(x),
        torch.tensor(y),
        torch.arange(len(x)),
        {"weak": pixels(weak), "strong": pixels(strong)},
        torch.arange(len(weak)),
    )


def pseudo_label(
    objective: Objective,
    given: Batch,
    *,
    centered: bool = False,
    statistics: Statistics = "joint",
    labeling: Labeling = "batch",
):
    """Return the loss, its derivative in w, and what was seen."""
    task = Task(Line(1, centered=centered), SGD(0.1), Normalize(), statistics, labeling)
    model = task.network.init(torch.Generator())
    lost = lambda params: objective(task, params, model["stats"], given)  # noqa: E731
    gradient, (loss, seen) = grad_and_value(lost, has_aux=True)(model["params"])
    return float(loss), float(gradient["w"]), seen


def test_supervised_by_hand():
    """x = 1 of class 0: ln(4/3), derivative -1/4. x = 2 of class 1: ln 10, derivative 0.9 * 2. The loss is the mean."""
    loss, gradient, seen = pseudo_label(Supervised(), batch([1, 2], [0, 1]))
    assert loss == pytest.approx((log(4 / 3) + log(10)) / 2, rel=1e-12)
    assert gradient == pytest.approx((-0.25 + 1.8) / 2, rel=1e-12)
    assert seen.pseudo == ()
    assert len(seen.moments) == 1


@pytest.mark.parametrize("weight", [1.0, 0.5])
def test_fixmatch_by_hand(weight):
    """Two unlabeled images, of which threshold = 0.8 lets one through.

    Weak x = 2 is class 0 with 0.9; its strong view x = 1 costs ln(4/3) with derivative -1/4. Weak x = -1 is class 1
    with 0.75 and is not used. The mean runs over both, so the second term is half of the first image's.
    """
    loss, gradient, seen = pseudo_label(FixMatch(0.8, weight), batch([1], [0], weak=[2, -1], strong=[1, -2]))
    assert loss == pytest.approx(log(4 / 3) + weight * log(4 / 3) / 2, rel=1e-12)
    assert gradient == pytest.approx(-1 / 4 - weight / 8, rel=1e-12)
    (pseudo,) = seen.pseudo
    assert pseudo.label.tolist() == [0, 1]
    assert pseudo.confidence.tolist() == pytest.approx([0.9, 0.75], rel=1e-12)
    assert pseudo.weight.tolist() == [1.0, 0.0]


@pytest.mark.parametrize("weight", [1.0, 0.5])
def test_uda_by_hand(weight):
    """threshold = 0.7 lets weak x = 1 through and x = 0 not; temperature 0.5 squares and normalizes.

    (3/4, 1/4) becomes (9/16, 1/16) / (10/16) = (0.9, 0.1). Compared with the strong view x = 1 that is
    0.9 ln(4/3) + 0.1 ln 4, with derivative (p - 0.9) x = 0.75 - 0.9 = -0.15: none of it through the target, which
    would add the derivative of (0.9, 0.1) times (ln 4/3, ln 4). The mean over two images halves it.
    """
    loss, gradient, seen = pseudo_label(UDA(0.7, 0.5, weight), batch([1], [0], weak=[1, 0], strong=[1, 1]))
    assert loss == pytest.approx(log(4 / 3) + weight * (0.9 * log(4 / 3) + 0.1 * log(4)) / 2, rel=1e-12)
    assert gradient == pytest.approx(-1 / 4 - weight * 0.15 / 2, rel=1e-12)
    (pseudo,) = seen.pseudo
    assert pseudo.confidence.tolist() == pytest.approx([0.75, 0.5], rel=1e-12)
    assert pseudo.weight.tolist() == [1.0, 0.0]


@pytest.mark.parametrize("make", [FixMatch, UDA])
def test_pseudo_label_at_the_threshold_counts(make):
    """x = 0 has the probability 1/2 exactly: used at threshold = 0.5, not one step of a double above it."""
    given = batch([1], [0], weak=[0], strong=[1])
    assert pseudo_label(make(threshold=0.5), given)[2].pseudo[0].weight.tolist() == [1.0]
    above = torch.nextafter(torch.tensor(0.5, dtype=torch.float64), torch.tensor(1.0, dtype=torch.float64)).item()
    loss, _, seen = pseudo_label(make(threshold=above), given)
    assert seen.pseudo[0].weight.tolist() == [0.0]
    assert loss == pytest.approx(log(4 / 3), rel=1e-12)


@pytest.mark.parametrize("objective", [FixMatch(threshold=0.6), UDA(threshold=0.6), PseudoLabel(0.6, 5.0, ramp=0)])
def test_without_confident_pseudo_labels_only_the_supervised_loss_remains(objective):
    """With every pseudo-label at 1/2 nothing is added, and the mean over no used image is 0, not NaN."""
    loss, gradient, _ = pseudo_label(objective, batch([1], [0], weak=[0, 0], strong=[3, -5]))
    assert loss == pytest.approx(log(4 / 3), rel=1e-12)
    assert gradient == pytest.approx(-1 / 4, rel=1e-12)


CENTERED = batch([3], [0], weak=[2], strong=[1])


def test_joint_statistics_by_hand():
    """The mean of 3, 1 and 2 is 2: labeled 1, strong -1, weak 0, whose pseudo-label is class 0 with 1/2, used at threshold =
    0.5.

    Loss ln(4/3) + CE of class 0 at -1 = ln(4/3) + ln 4; derivative -1/4 - (1 - 1/4) * (-1) = 1/2.
    """
    loss, gradient, seen = pseudo_label(FixMatch(threshold=0.5), CENTERED, centered=True)
    assert loss == pytest.approx(log(4 / 3) + log(4), rel=1e-12)
    assert gradient == pytest.approx(0.5, rel=1e-12)
    assert [float(m["in"]["mean"]) for m in seen.moments] == [2.0]


def test_separate_statistics_by_hand():
    """Each image is its mean: all logits 0, loss 2 ln 2, derivative 0; moments of weak, labeled, strong."""
    loss, gradient, seen = pseudo_label(FixMatch(threshold=0.5), CENTERED, centered=True, statistics="separate")
    assert loss == pytest.approx(2 * log(2), rel=1e-12)
    assert gradient == 0
    assert [float(m["in"]["mean"]) for m in seen.moments] == [2.0, 3.0, 1.0]


def test_running_labels_by_hand():
    """The tracked mean is 1: the weak image 2 becomes 1, class 0 with 3/4. The others share the mean of 3 and 1.

    Joint: labeled 1, strong -1, loss ln(4/3) + ln 4, and the weak images leave no moments.
    """
    loss, gradient, seen = pseudo_label(FixMatch(threshold=0.7), CENTERED, centered=True, labeling="running")
    assert loss == pytest.approx(log(4 / 3) + log(4), rel=1e-12)
    assert gradient == pytest.approx(0.5, rel=1e-12)
    assert seen.pseudo[0].confidence.tolist() == pytest.approx([0.75], rel=1e-12)
    assert [float(m["in"]["mean"]) for m in seen.moments] == [2.0]
    _, _, distance = pseudo_label(
        FixMatch(threshold=0.7), CENTERED, centered=True, labeling="running", statistics="separate"
    )
    assert distance.pseudo[0].confidence.tolist() == pytest.approx([0.75], rel=1e-12)
    assert [float(m["in"]["mean"]) for m in distance.moments] == [3.0, 1.0]


@pytest.mark.parametrize("objective", [FixMatch(threshold=0.5), UDA(threshold=0.5)])
@pytest.mark.parametrize("statistics", ["joint", "separate"])
@pytest.mark.parametrize("labeling", ["batch", "running"])
def test_pseudo_labels_carry_no_gradient(objective, statistics, labeling):
    """The derivative in w is that of the loss with the weak view's logits held fixed, by central differences.

    Compared with the full derivative of UDA, in which the target moves too, the numbers differ.
    """
    given = batch([1.5, -0.5], [0, 1], weak=[2, 0.7], strong=[1, -0.4])
    _, gradient, _ = pseudo_label(objective, given, statistics=statistics, labeling=labeling)

    def fixed(w: float) -> float:
        """Return the loss at w with pseudo-labels made at W (nothing is centered, so views do not mix)."""
        z = torch.tensor([1.5, -0.5, 1.0, -0.4], dtype=torch.float64) * w
        zero = torch.zeros_like(z)
        cost = -torch.stack([z, zero], -1).log_softmax(-1)
        prediction = torch.stack([torch.tensor([2.0, 0.7], dtype=torch.float64) * W, zero[:2]], -1)
        hard = torch.tensor([[1.0, 0.0], [1.0, 0.0]], dtype=torch.float64)
        target = (prediction / 0.4).softmax(-1) if isinstance(objective, UDA) else hard
        return float((cost[0, 0] + cost[1, 1]) / 2 + (target * cost[2:]).sum() / 2)

    assert gradient == pytest.approx((fixed(W + 1e-5) - fixed(W - 1e-5)) / 2e-5, rel=1e-8)
