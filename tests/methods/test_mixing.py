"""MixMatch and ReMixMatch: mixing, sharpening, aligning and turning by hand; gradients against the textbook's."""

import itertools
from dataclasses import replace
from math import log
from typing import Any

import pytest
import reference_objectives as textbook
import torch
from method_helpers import simulate_rounds, simulate_with_both_executors
from reference_objectives import NETWORK, ReferenceModel, make_batch, make_module
from test_consistency import check, learned
from test_objectives import Line, W, batch

from halfmoon.api.types import Batch, ClientData
from halfmoon.core import tree
from halfmoon.core.errors import UserError
from halfmoon.federation.contract.small_federation import (
    make_dataset,
    make_task,
    max_difference,
    start_server,
    trees_equal,
)
from halfmoon.methods.fedavg import FedAvg
from halfmoon.methods.objectives import MixMatch, ReMixMatch
from halfmoon.methods.objectives.base import mix_rows, one_hot, sharpen, soft_cross_entropy
from halfmoon.methods.objectives.remixmatch import TINY, quarter_turns

RULED = pytest.mark.parametrize(
    ("statistics", "labeling"), list(itertools.product(["joint", "separate"], ["batch", "running"]))
)
REMIX = ("weak", "strong", "strong2")


def test_mixing_by_hand():
    """A coefficient of 1/4 is folded to 3/4: 3/4 of itself and 1/4 of its partner (3, 1, 2)."""
    rows = torch.tensor([[4.0], [8.0], [16.0]])
    order = torch.tensor([2, 0, 1])
    for mix in (0.25, 0.75):
        made = mix_rows(rows, torch.tensor(mix, dtype=torch.float64), order)
        assert made.flatten().tolist() == [3 + 4, 6 + 1, 12 + 2]
        assert made.dtype == torch.float32


def test_sharpening_by_hand():
    """At 1/2, (3/4, 1/4) becomes (9, 1) / 10; at 1 nothing changes; a probability of 0 remains one."""
    p = torch.tensor([[0.75, 0.25], [1.0, 0.0]], dtype=torch.float64)
    assert sharpen(p, 0.5).flatten().tolist() == pytest.approx([0.9, 0.1, 1.0, 0.0], abs=1e-12)
    assert sharpen(p, 1.0).flatten().tolist() == pytest.approx(p.flatten().tolist(), abs=1e-12)


def test_soft_labels_by_hand():
    """Labels 1 and 0 as distributions; CE of (1/4, 3/4) at probabilities (3/4, 1/4); nothing of nothing."""
    logits = torch.tensor([[log(3), 0.0]], dtype=torch.float64)
    assert one_hot(torch.tensor([1, 0]), 2, logits).tolist() == [[0.0, 1.0], [1.0, 0.0]]
    found = soft_cross_entropy(logits, torch.tensor([[0.25, 0.75]], dtype=torch.float64))
    assert float(found) == pytest.approx(0.25 * log(4 / 3) + 0.75 * log(4), rel=1e-12)
    assert float(soft_cross_entropy(logits[:0], logits[:0])) == 0.0


def test_mixmatch_by_hand():
    """Without mixing (a coefficient of 1): x = 1 costs ln(4/3). Views 1 and 1 say (3/4, 1/4), sharpened (9, 1) / 10.

    Both views are 0.15 from it in either class: 0.15^2, derivative 2 (3/4 - 9/10) 3/16, none through the target.
    With a coefficient of 1/2 and the labeled image and the second view exchanged (all of x = 1, so all images stay):
    the label becomes (0.95, 0.05), the second view's target too, the first view's remains.
    """
    drawn: Any = {"mix": torch.tensor(1.0), "order": torch.tensor([2, 1, 0])}
    pixel = torch.ones(1, 1, 1, 1, dtype=torch.float64)
    given = batch([1], [0])._replace(u={"weak": pixel, "weak2": pixel}, mixing=drawn)
    model = {"params": {"w": torch.tensor(W, dtype=torch.float64)}, "stats": {}}
    objective = MixMatch(2.0, ramp=0)
    loss, gradient, _ = learned(objective, given, model, make_task(Line(1)))
    assert loss == pytest.approx(log(4 / 3) + 2 * 0.15**2, rel=1e-12)
    assert float(gradient["w"]) == pytest.approx(-1 / 4 - 2 * 2 * 0.15 * 3 / 16, rel=1e-12)
    drawn["mix"] = torch.tensor(0.5, dtype=torch.float64)
    loss, _, _ = learned(objective, given, model, make_task(Line(1)))
    wanted = 0.95 * log(4 / 3) + 0.05 * log(4) + 2 * (0.15**2 + 0.2**2) / 2
    assert loss == pytest.approx(wanted, rel=1e-12)


@RULED
@pytest.mark.parametrize("labeled", [5, 0])
@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_mixmatchs_gradients_are_autograds(statistics, labeling, labeled, temperature):
    shared = make_task(NETWORK, statistics=statistics, labeling=labeling)
    model = start_server(FedAvg(), shared)
    given = make_batch(labeled, 6, ("weak", "weak2"))
    reference = ReferenceModel(make_module(model), statistics, labeling)
    actual = learned(MixMatch(30.0, temperature, ramp=0), given, model, shared)
    check(actual, reference.module, textbook.mixmatch(reference, given, 30.0, temperature))


def remix_model(objective: ReMixMatch, shared: Any) -> dict:
    """Return a model whose rotation head is not zero, with a running mean."""
    model = objective.start(shared, start_server(FedAvg(), shared))
    g = torch.Generator().manual_seed(5)
    head = tree.map(lambda leaf: torch.randn(leaf.shape, generator=g, dtype=leaf.dtype), model["params"]["rotation"])
    model = {**model, "params": {**model["params"], "rotation": head}}
    return {**model, "predicted": torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)} if objective.align else model


@RULED
@pytest.mark.parametrize("labeled", [5, 0])
@pytest.mark.parametrize("align", [True, False])
def test_remixmatchs_gradients_are_autograds(statistics, labeling, labeled, align):
    """Loss and gradient, the rotation head's among them."""
    shared = make_task(NETWORK, statistics=statistics, labeling=labeling)
    objective = ReMixMatch(1.5, 0.5, 0.7, align=align, ramp=0)
    model = remix_model(objective, shared)
    given = make_batch(labeled, 6, REMIX)
    cached = {"label_frequencies": torch.tensor([0.5, 0.25, 0.25, 0.0], dtype=torch.float64)}
    reference = ReferenceModel(make_module(model), statistics, labeling)
    head = [leaf.clone().requires_grad_() for leaf in tree.leaves(model["params"]["rotation"])]
    ratio = (
        (cached["label_frequencies"] + TINY) / (model["predicted"] + TINY)
        if align
        else torch.ones(4, dtype=torch.float64)
    )
    expected = textbook.remixmatch(reference, (head[0], head[1]), given, ratio, (1.5, 0.5, 0.7), 0.5)
    loss, gradient, stats = learned(objective, given, model, shared, model, cached)
    gradients = torch.autograd.grad(expected, head, retain_graph=True)
    for name, leaf in zip(("weight", "bias"), gradients, strict=True):
        torch.testing.assert_close(gradient["rotation"][name], leaf, rtol=1e-8, atol=1e-11)
        assert float(leaf.abs().max()) > 1e-3
    plain = {name: part for name, part in gradient.items() if name != "rotation"}
    check((loss, plain, stats), reference.module, expected)
    _, seen = objective(shared, model["params"], model["stats"], given, model, cached)
    assert set(seen.aux) == ({"predicted"} if align else set())


def test_the_alignment_by_hand():
    """A pseudo-label (3/4, 1/4) where labels are (1/4, 3/4) and predictions so far even: (3/16, 3/16), thus undecided.

    The running mean moves a share of 1/4 from (1/2, 1/2) to the batch's mean, here (3/4, 1/4): (9/16, 7/16).
    """
    objective = ReMixMatch(alignment_decay=0.75)
    prediction = torch.tensor([[0.75, 0.25]], dtype=torch.float64)
    aux = {"predicted": torch.tensor([0.5, 0.5], dtype=torch.float64)}
    cached = {"label_frequencies": torch.tensor([0.25, 0.75], dtype=torch.float64)}
    aligned, news = objective._align_predictions(prediction, aux, cached, None)
    assert aligned.flatten().tolist() == pytest.approx([0.5, 0.5], abs=1e-5)
    assert news["predicted"].tolist() == pytest.approx([9 / 16, 7 / 16], rel=1e-12)
    none = {"label_frequencies": torch.zeros(2, dtype=torch.float64)}  # no labels: towards even classes
    aux = {"predicted": torch.tensor([0.75, 0.25], dtype=torch.float64)}
    assert objective._align_predictions(prediction, aux, none, None)[0].flatten().tolist() == pytest.approx(
        [0.5, 0.5], abs=1e-5
    )
    assert replace(objective, align=False)._align_predictions(prediction, aux, cached, None) == (prediction, {})


def test_class_frequencies_count_the_rows_of_a_client():
    """Two of class 0, one of class 2; the rows that fill a batched client up do not count."""
    y = torch.tensor([0, 2, 0, 0, 2])
    none = torch.zeros(0, 1, 8, 8, dtype=torch.uint8)
    data = ClientData(none, y, none, torch.tensor(3), torch.tensor(0))
    broadcast = {"predicted": torch.zeros(4, dtype=torch.float64)}
    found = ReMixMatch().prepare(make_task(NETWORK), broadcast, data)["label_frequencies"]
    assert found.tolist() == pytest.approx([2 / 3, 0, 1 / 3, 0])
    empty = ReMixMatch().prepare(make_task(NETWORK), broadcast, data._replace(y=y[:0], labeled=torch.tensor(0)))
    assert empty["label_frequencies"].tolist() == [0.0] * 4


def test_quarter_turns_by_hand():
    """1 2 / 3 4, turned counter-clockwise: 2 4 / 1 3, then 4 3 / 2 1, then 3 1 / 4 2."""
    image = torch.tensor([[1, 2], [3, 4]])[None]
    turned = quarter_turns(torch.stack([image] * 5), torch.tensor([0, 1, 2, 3, 1]))
    rows = [[1, 2, 3, 4], [2, 4, 1, 3], [4, 3, 2, 1], [3, 1, 4, 2], [2, 4, 1, 3]]
    assert turned.flatten(1).tolist() == rows


def test_zero_head_predicts_all_rotations_equally():
    """At the start the rotation term is ln 4, and moves the head alone."""
    shared = make_task(NETWORK)
    objective = ReMixMatch(0.0, 0.0, 1.0)
    model = objective.start(shared, start_server(FedAvg(), shared))
    given = make_batch(views=REMIX)
    cached = {"label_frequencies": torch.full((4,), 0.25, dtype=torch.float64)}

    def lost(params, rotation_weight):
        chosen = replace(objective, rotation_weight=rotation_weight)
        return chosen(shared, params, model["stats"], given, model, cached)[0]

    with_it, without = (torch.func.grad_and_value(lambda p, r=r: lost(p, r))(model["params"]) for r in (1.0, 1e-300))
    assert float(with_it[1] - without[1]) == pytest.approx(log(4), rel=1e-9)
    rest = [{k: v for k, v in each[0].items() if k != "rotation"} for each in (with_it, without)]
    assert max_difference(*rest) < 1e-12
    assert float(with_it[0]["rotation"]["weight"].abs().max()) > 1e-3


def test_options_of_remixmatch_have_their_effects():
    """Anchors are views; labels are not strengthened, not aligned, not turned where that is off."""
    assert ReMixMatch(anchors=3).requirements.views == ("weak", "strong", "strong2", "strong3")
    assert ReMixMatch().requirements.labeled_views == ("strong",)
    assert ReMixMatch(strong_labels=False).requirements.labeled_views == ()
    shared = make_task(NETWORK)
    given = make_batch(views=REMIX)
    weak_labels = given._replace(x_views={"strong": given.x})
    without = given._replace(x_views={})
    cached = {"label_frequencies": torch.full((4,), 0.25, dtype=torch.float64)}
    model = remix_model(ReMixMatch(), shared)

    def loss(objective: ReMixMatch, given: Batch) -> float:
        return float(objective(shared, model["params"], model["stats"], given, model, cached)[0])

    assert loss(ReMixMatch(), weak_labels) == loss(ReMixMatch(strong_labels=False), without)
    assert loss(ReMixMatch(), given) != loss(ReMixMatch(), weak_labels)
    late = make_task(NETWORK, rounds=64, round=1)
    early = ReMixMatch(rotation_weight=0.0, strong_labels=False)
    assert float(early(shared, model["params"], model["stats"], without, model, cached)[0]) < float(
        early(late, model["params"], model["stats"], without, model, cached)[0]
    )


def test_solution_has_the_shape_of_the_network():
    """After three rounds of three clients the rotation head has learned, and is not in what is evaluated."""
    shared = make_task(rounds=3)
    method = FedAvg(ReMixMatch())
    server = simulate_rounds(method, shared, rounds=3)[-1].server
    plain = shared.network.init(torch.Generator())
    assert tree.flatten(method.solution(shared, server)).keys() == tree.flatten(plain).keys()
    assert trees_equal({"p": method.solution(shared, server)["params"]["head"]}, {"p": server["teacher"]["head"]})
    assert float(server["params"]["rotation"]["weight"].abs().max()) > 1e-3
    assert float(server["predicted"].sum()) == pytest.approx(1.0, rel=1e-12)
    assert max_difference({"p": server["predicted"]}, {"p": torch.full_like(server["predicted"], 0.25)}) > 1e-3


def test_images_that_are_not_square_are_not_turned():
    with pytest.raises(UserError, match="8x6"):
        quarter_turns(torch.zeros(2, 1, 8, 6), torch.tensor([0, 1]))


@pytest.mark.parametrize("objective", [MixMatch(), ReMixMatch(), ReMixMatch(align=False, rotation_weight=0.0)])
def test_federated_mixing_runs_in_both_executors(objective):
    """On unequal clients, some without labels: loop = vmap."""
    simulate_with_both_executors(FedAvg(objective), make_task(rounds=3), make_dataset(labels_at="some"), rounds=3)
