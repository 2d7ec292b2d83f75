"""Pi-Model, Pseudo-Label and Mean Teacher: by hand on one weight, and compared with autograd on the textbook's formulas."""

import itertools
from dataclasses import replace
from math import exp, log
from typing import Any

import pytest
import reference_objectives as textbook
import torch
from method_helpers import simulate_rounds, simulate_with_both_executors
from reference_objectives import NETWORK, ReferenceModel, make_batch, make_module
from test_objectives import Line, W, batch, pseudo_label
from torch.func import grad_and_value

from halfmoon.api.types import Batch, Task
from halfmoon.core import tree
from halfmoon.federation.contract.small_federation import (
    make_dataset,
    make_simulation,
    make_task,
    max_difference,
    start_server,
    trees_equal,
)
from halfmoon.methods.fedavg import FedAvg
from halfmoon.methods.objectives import FixMatch, MeanTeacher, Objective, PiModel, PseudoLabel
from halfmoon.methods.objectives.base import compute_mean_prediction, ramp_weight, update_teacher
from halfmoon.models import track

RULES = list(itertools.product(["joint", "separate"], ["batch", "running"]))
RULED = pytest.mark.parametrize(("statistics", "labeling"), RULES)


def one(value: float) -> torch.Tensor:
    """Return a one-pixel image."""
    return torch.full((1, 1, 1, 1), value, dtype=torch.float64)


def test_pi_model_by_hand():
    """Views x = 1 and x = 2 have (3/4, 1/4) and (9/10, 1/10): both squares are 0.15^2, and so is the mean over classes.

    With p = 3/4, q = 9/10 it is (p - q)^2, with derivative 2 (p - q) (p (1 - p) * 1 - q (1 - q) * 2): through both.
    """
    given = batch([1], [0])._replace(u={"weak": one(1), "weak2": one(2)})
    loss, gradient, seen = pseudo_label(PiModel(unlabeled_weight=2.0, ramp=0), given)
    assert loss == pytest.approx(log(4 / 3) + 2 * 0.15**2, rel=1e-12)
    assert gradient == pytest.approx(-1 / 4 + 2 * 2 * -0.15 * (0.1875 - 0.18), rel=1e-12)
    assert seen.pseudo[0].confidence.tolist() == pytest.approx([0.825], rel=1e-12)
    assert seen.pseudo[0].weight.tolist() == [1.0]


def test_mean_teacher_by_hand():
    """A teacher of weight 0 says 1/2 of everything; the student says (3/4, 1/4) at x = 1: a distance of (1/4)^2.

    Its derivative is 2 * (1/4) * 3/16; nothing flows into the teacher.
    """
    objective = MeanTeacher(unlabeled_weight=2.0, ramp=0)
    given = batch([1], [0])._replace(u={"weak": one(1), "weak2": one(5)})
    aux = {"teacher": {"w": torch.zeros((), dtype=torch.float64)}}
    model = {"params": {"w": torch.tensor(W, dtype=torch.float64)}, "stats": {}}
    loss, gradient, _ = learned(objective, given, model, make_task(Line(1)), aux)
    assert loss == pytest.approx(log(4 / 3) + 2 / 16, rel=1e-12)
    assert float(gradient["w"]) == pytest.approx(-1 / 4 + 2 * 2 / 4 * 3 / 16, rel=1e-12)


def test_pseudo_label_by_hand():
    """threshold = 0.8 lets x = 2, class 0 with 9/10, teach itself, and x = -1, class 1 with 3/4, not; the mean is
    over both.

    CE is ln(10/9), with derivative -(1 - 9/10) * 2.
    """
    given = batch([1], [0], weak=[2, -1])
    loss, gradient, seen = pseudo_label(PseudoLabel(0.8, 3.0, ramp=0), given)
    assert loss == pytest.approx(log(4 / 3) + 3 * log(10 / 9) / 2, rel=1e-12)
    assert gradient == pytest.approx(-1 / 4 - 3 * 0.2 / 2, rel=1e-12)
    assert seen.pseudo[0].label.tolist() == [0, 1]
    assert seen.pseudo[0].weight.tolist() == [1.0, 0.0]
    loss, _, _ = pseudo_label(PseudoLabel(0.0, 3.0, ramp=0), given)  # Lee's: all count
    assert loss == pytest.approx(log(4 / 3) + 3 * (log(10 / 9) + log(4 / 3)) / 2, rel=1e-12)


def test_pseudo_labels_of_the_round_and_debiased():
    """Pseudo-labels are rows of the sweep, not of the step: rows 2 and 0 of it; a prior of (0.9, 0.1) turns the second over.

    Row 0 says (0.75, 0.25): over the prior (0.8333, 2.5), normalized (1/4, 3/4), class 1 with 3/4.
    """
    prediction = torch.log(torch.tensor([[0.75, 0.25], [0.5, 0.5], [0.99, 0.01]], dtype=torch.float64))
    cached = {"round_logits": prediction, "prior": torch.tensor([0.9, 0.1], dtype=torch.float64)}
    given = batch([1], [0], weak=[2, -1])._replace(u_rows=torch.tensor([2, 0]))
    shared = make_task(Line(1))
    params = {"w": torch.tensor(W, dtype=torch.float64)}
    for debias, labels, confident in ((False, [0, 0], [0.99, 0.75]), (True, [0, 1], [11 / 12, 0.75])):
        objective = PseudoLabel(0.7, ramp=0, labels="round", debias=debias)
        loss, seen = objective(shared, params, {}, given, {}, cached)
        assert seen.pseudo[0].label.tolist() == labels
        assert seen.pseudo[0].confidence.tolist() == pytest.approx(confident, rel=1e-12)
        second = log(4) if labels[1] == 0 else log(4 / 3)  # x = -1 is class 0 with 1/4
        assert float(loss) == pytest.approx(log(4 / 3) + (log(10 / 9) + second) / 2, rel=1e-12)


def test_pseudo_labels_are_debiased_over_the_step():
    """(0.99, 0.01) and (0.75, 0.25) have the mean (0.87, 0.13), over which they are (0.9367, .) and (., 0.6905)."""
    prediction = torch.log(torch.tensor([[0.75, 0.25], [0.5, 0.5], [0.99, 0.01]], dtype=torch.float64))
    given = batch([1], [0], weak=[2, -1])._replace(u_rows=torch.tensor([2, 0]))
    objective = PseudoLabel(0.0, ramp=0, labels="round", debias=True, debias_over="step")
    params = {"w": torch.tensor(W, dtype=torch.float64)}
    _, seen = objective(make_task(Line(1)), params, {}, given, {}, {"round_logits": prediction})
    assert seen.pseudo[0].label.tolist() == [0, 1]
    confident = [0.99 / 0.87 / (0.99 / 0.87 + 0.01 / 0.13), 0.25 / 0.13 / (0.25 / 0.13 + 0.75 / 0.87)]
    assert seen.pseudo[0].confidence.tolist() == pytest.approx(confident, rel=1e-12)
    assert FixMatch(debias=True, debias_over="step").requirements.precomputed_views == ()
    assert FixMatch(debias=True).requirements.precomputed_views == ("weak",)


def learned(
    objective: Objective, given: Batch, model: dict, shared: Task, aux: Any = None, cached: Any = None
) -> tuple[float, dict, dict]:
    """Return our loss, its gradient, and the statistics that all passes leave."""
    lost = lambda params: objective(shared, params, model["stats"], given, aux or {}, cached or {})  # noqa: E731
    gradient, (loss, seen) = grad_and_value(lost, has_aux=True)(model["params"])
    stats = model["stats"]
    for moments in seen.moments if stats else ():
        stats = track(stats, moments)
    return float(loss), gradient, stats


def check(computed: tuple[float, dict, dict], module: torch.nn.Module, loss: torch.Tensor) -> None:
    """Compare a loss, its gradient and the running statistics with those of a module that has seen the step."""
    for layer, stats in computed[2].items():
        for name, leaf in stats.items():
            torch.testing.assert_close(leaf, module.get_buffer(f"{layer}.norm.running_{name}"), rtol=1e-9, atol=1e-11)
    assert computed[0] == pytest.approx(float(loss.detach()), rel=1e-10)
    expected = torch.autograd.grad(loss, list(module.parameters()))
    assert max(float(g.abs().max()) for g in expected) > 1e-3
    for mine, g in zip(tree.leaves(computed[1]), expected, strict=True):
        torch.testing.assert_close(mine, g, rtol=1e-8, atol=1e-11)


@RULED
@pytest.mark.parametrize("labeled", [5, 0])
def test_gradients_are_autograds(statistics, labeling, labeled):
    """Loss and gradient of all three under every rule, with labels and without any."""
    shared = make_task(NETWORK, statistics=statistics, labeling=labeling)
    model = start_server(FedAvg(), shared)
    given = make_batch(labeled, 6, ("weak", "weak2"))
    actual = learned(PiModel(7.0, ramp=0), given, model, shared)
    reference = ReferenceModel(make_module(model), statistics, labeling)
    check(actual, reference.module, textbook.pi_model(reference, given, 7.0))
    teacher = start_server(FedAvg(), shared, seed=1)
    aux = {"teacher": teacher["params"], "teacher_stats": model["stats"]}  # the textbook has one set for both
    actual = learned(MeanTeacher(9.0, ramp=0), given, model, shared, aux)
    reference = ReferenceModel(make_module(model), statistics, labeling)
    check(actual, reference.module, textbook.mean_teacher(reference, make_module(teacher), given, 9.0))
    given = given._replace(u={"weak": given.u["weak"]})
    _, seen = PseudoLabel(0.0, ramp=0)(shared, model["params"], model["stats"], given)
    for threshold in (0.0, float(seen.pseudo[0].confidence.median())):  # all six images, and some
        actual = learned(PseudoLabel(threshold, 3.0, ramp=0), given, model, shared)
        reference = ReferenceModel(make_module(model), statistics, labeling)
        check(actual, reference.module, textbook.pseudo_label(reference, given, 3.0, threshold))


def test_ramps_by_hand():
    """Over 0.4 of 10 rounds: 0, 1/4, 1/2, 3/4, then 1; "sigmoid" has exp(-5) first, exp(-5/4) half way; 0 is none."""
    shared = make_task(rounds=10)
    at = lambda n, shape="linear": ramp_weight(replace(shared, round=n), 8.0, 0.4, shape)  # noqa: E731
    assert [at(n) for n in (0, 1, 2, 3, 4, 9)] == pytest.approx([0, 2, 4, 6, 8, 8])
    assert at(0, "sigmoid") == pytest.approx(8 * exp(-5))
    assert at(2, "sigmoid") == pytest.approx(8 * exp(-5 / 4))
    assert at(4, "sigmoid") == 8
    assert ramp_weight(shared, 8.0, 0.0) == 8
    for shape in ("linear", "sigmoid"):  # the round may be a tensor
        rounds = (torch.tensor(float(n), dtype=torch.float64) for n in (0, 1, 2, 3, 4, 9))
        assert [float(at(n, shape)) for n in rounds] == pytest.approx([at(n, shape) for n in (0, 1, 2, 3, 4, 9)])


@pytest.mark.parametrize("make", [PiModel, PseudoLabel, MeanTeacher, FixMatch])
@pytest.mark.parametrize(("shape", "factor"), [("linear", 0.5), ("sigmoid", exp(-5 / 4))])
def test_the_ramp_weighs_the_unlabeled_term(make, shape, factor):
    """Half way, the loss is that of the weight times the ramp's value, ramped no further."""
    shared = replace(make_task(NETWORK, rounds=10), round=2)
    model = start_server(FedAvg(), shared)
    aux = {"teacher": start_server(FedAvg(), shared, 1)["params"], "teacher_stats": model["stats"]}
    given = make_batch(views=("weak", "weak2", "strong"))
    options: dict[str, Any] = {"threshold": 0.2} if make in (PseudoLabel, FixMatch) else {}
    half = learned(make(unlabeled_weight=8.0, ramp=0.4, ramp_shape=shape, **options), given, model, shared, aux)
    same_weight = learned(make(unlabeled_weight=8 * factor, ramp=0.0, **options), given, model, shared, aux)
    assert half[0] == pytest.approx(same_weight[0], rel=1e-12)
    none = learned(make(unlabeled_weight=0.0, ramp=0.0, **options), given, model, shared, aux)
    assert half[0] != pytest.approx(none[0], rel=1e-4)


def test_a_teacher_by_hand():
    """From 0, models 1 and 2: the means 1/2 and 1. With decay 1/2, the second step keeps half: 1/4 + 2/2 = 5/4."""
    at = lambda value: {"w": torch.tensor([value])}  # noqa: E731
    for decay, wanted in ((0.999, 1.0), (0.5, 1.25), (0.0, 2.0)):
        aux: Any = {"teacher": at(0.0), "teacher_steps": torch.zeros((), dtype=torch.float64)}
        aux = update_teacher(aux, at(1.0), decay)
        assert float(aux["teacher"]["w"]) == (0.5 if decay else 1.0)
        aux = update_teacher(aux, at(2.0), decay)
        assert float(aux["teacher"]["w"]) == pytest.approx(wanted)
        assert float(aux["teacher_steps"]) == 2
        assert aux["teacher"]["w"].dtype == torch.float32


@pytest.mark.parametrize("objective", [FixMatch(0.39), PseudoLabel(0.39)])
def test_a_teacher_that_only_evaluates_changes_no_step(objective):
    """With `decay`, the trained model is the same in every bit; the solution is its average, not the model."""
    shared = make_task(rounds=3)
    runs = []
    for method in (FedAvg(objective), FedAvg(replace(objective, decay=0.9))):
        result = simulate_rounds(method, shared, rounds=2)[-1]
        runs.append((result.server, method.solution(shared, result.server)))
    (plain, evaluated), (trained, average) = runs
    assert trees_equal({"params": plain["params"]}, {"params": trained["params"]})
    assert trees_equal({"params": evaluated["params"]}, {"params": plain["params"]})
    assert trees_equal(average, {"params": trained["teacher"], "stats": trained["teacher_stats"]})
    assert 1e-3 < max_difference(average["params"], evaluated["params"]) < 1


def test_a_federated_teacher_runs_in_both_executors():
    """FedAvg(MeanTeacher()) on unequal clients: loop = vmap, and the teacher is the clients' weighted mean."""
    shared = make_task(rounds=3)
    method = FedAvg(MeanTeacher(), prox=0.01)
    first = simulate_with_both_executors(method, shared, rounds=3)[0]
    simulation = make_simulation(method, shared)
    simulation.open(0)
    upload = simulation.query("train", start_server(method, shared))
    share = upload.weight / upload.weight.sum()
    bias = (share[:, None] * upload.update["teacher"]["head"]["bias"]).sum(0)
    torch.testing.assert_close(first.server["teacher"]["head"]["bias"], bias, rtol=1e-12, atol=1e-14)
    assert float(first.server["teacher_steps"]) == pytest.approx(float((share * upload.update["teacher_steps"]).sum()))


def test_a_client_without_unlabeled_rows_has_a_uniform_prior():
    """FixMatch with labels of the round sweeps nothing there, and the client takes no step."""
    assert compute_mean_prediction(torch.zeros(0, 4)).tolist() == [0.25] * 4
    shared = make_task()
    held = make_dataset(((5, 11), (3, 0), (6, 14)))
    method = FedAvg(FixMatch(0.39, labels="round", debias=True))
    result = simulate_rounds(method, shared, held)[-1]
    assert all(bool(leaf.isfinite().all()) for leaf in tree.leaves(result.server))
