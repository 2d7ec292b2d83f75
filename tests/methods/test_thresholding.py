"""Thresholds that follow the model: every number by hand, and their state where it belongs, in every method."""

from math import exp, log

import pytest
import torch
from method_helpers import simulate_rounds, simulate_with_both_executors
from test_objectives import Line, batch, pseudo_label
from torch import Tensor

from halfmoon.api.types import ClientData, Task
from halfmoon.core.normalize import Normalize
from halfmoon.core.optim import SGD
from halfmoon.federation.contract.small_federation import make_dataset, make_task, trees_equal
from halfmoon.methods import registry
from halfmoon.methods.objectives import FixMatch, PseudoLabel
from halfmoon.methods.objectives.pseudo_labeling import select_more_confident
from halfmoon.methods.objectives.thresholding import Threshold


def p(*first: float) -> Tensor:
    """Return predictions on two classes, given the probabilities of class 0."""
    return torch.tensor([[one, 1 - one] for one in first], dtype=torch.float64)


LIKE = torch.zeros((), dtype=torch.float64)


def data(rows: int, offset: int = 0) -> ClientData:
    """Return a client's unlabeled rows."""
    u = (torch.arange(rows) + offset).to(torch.uint8)[:, None, None, None]
    none = torch.zeros(0, 1, 1, 1, dtype=torch.uint8)
    return ClientData(none, torch.zeros(0, dtype=torch.int64), u, torch.tensor(0), torch.tensor(rows))


def test_fixed_by_hand():
    """0.8 counts what is at least 0.8, and there is no state."""
    pseudo, state = Threshold("fixed", 0.8).pseudo_label(p(0.8, 0.3, 0.9), torch.arange(3), {})
    assert (pseudo.label.tolist(), pseudo.weight.tolist(), state) == ([0, 1, 0], [1.0, 0.0, 1.0], {})


def test_freematch_by_hand():
    """decay 1/2, from t = 1/2 and q = (1/2, 1/2), a step with p0 = 0.9, 0.8, 0.4: max p = 0.9, 0.8, 0.6, mean 23/30.

    t = 1/4 + 23/60 = 19/30; mean p = (0.7, 0.3), q = (0.6, 0.4). Class 0 needs t = 0.6333, class 1 t * 2/3 = 0.4222:
    all three count. The next step with p0 = 0.55 and 0.55: t = 19/60 + 0.275 = 0.59167, q = (0.575, 0.425): class 0
    needs 0.59167, more than 0.55. A fixed 0.95 would have counted none.
    """
    rule = Threshold("freematch", decay=0.5)
    pseudo, state = rule.pseudo_label(p(0.9, 0.8, 0.4), torch.arange(3), rule.initial_memory(2, LIKE))
    assert float(state["confidence"]) == pytest.approx(19 / 30, rel=1e-12)
    assert state["classes"].tolist() == pytest.approx([0.6, 0.4], rel=1e-12)
    assert pseudo.weight.tolist() == [1.0, 1.0, 1.0]
    pseudo, state = rule.pseudo_label(p(0.55, 0.55), torch.arange(2), state)
    assert float(state["confidence"]) == pytest.approx(19 / 60 + 0.275, rel=1e-12)
    assert state["classes"].tolist() == pytest.approx([0.575, 0.425], rel=1e-12)
    assert pseudo.weight.tolist() == [0.0, 0.0]


def test_flexmatch_by_hand():
    """Five rows, threshold = 0.8. At first none has a label: b = 0 and everything counts; rows 0, 1 (class 0), 2
    (class 1) get one. Then "none" has 2, class 0 has 2, class 1 has 1: b = (1, 1/2), thresholds 0.8 and 0.8 (1/2) /
    (3/2).

    Class 0 with 0.7 is out, class 1 with 0.6 is in; neither is confident enough to store. After row 3 and 4 have class 0,
    b = (1, 1/4) and class 1 needs 0.8 (1/4) / (7/4) = 4/35.
    """
    rule = Threshold("flexmatch", 0.8)
    state = rule.begin(rule.initial_memory(2, LIKE), data(5))
    assert state["label"].tolist() == [-1] * 5
    pseudo, state = rule.pseudo_label(p(0.9, 0.85, 0.1, 0.6), torch.arange(4), state)
    assert pseudo.weight.tolist() == [1.0] * 4
    assert state["label"].tolist() == [0, 0, 1, -1, -1]
    pseudo, state = rule.pseudo_label(p(0.7, 0.4), torch.tensor([3, 4]), state)
    assert pseudo.weight.tolist() == [0.0, 1.0]
    assert state["label"].tolist() == [0, 0, 1, -1, -1]
    _, state = rule.pseudo_label(p(0.9, 0.9), torch.tensor([3, 4]), state)
    assert rule._class_progress(state["label"], 2).tolist() == pytest.approx([1, 0.25])
    assert rule.pseudo_label(p(0.49), torch.tensor([0]), state)[0].weight.tolist() == [1.0]


def test_flexmatch_stores_labels_by_row():
    """Labels return for the same rows alone; of two views of a row the sure one counts, whatever its place."""
    rule = Threshold("flexmatch", 0.8)
    _, state = rule.pseudo_label(p(0.1, 0.6), torch.tensor([1, 1]), rule.begin(rule.initial_memory(2, LIKE), data(3)))
    assert state["label"].tolist() == [-1, 1, -1]
    assert rule.begin(state, data(3))["label"].tolist() == [-1, 1, -1]
    assert rule.begin(state, data(3, offset=1))["label"].tolist() == [-1] * 3
    assert rule.begin(state, data(4))["label"].tolist() == [-1] * 4


def test_softmatch_by_hand():
    """decay 1/2. p0 = 0.9 and 0.5: their mean (0.7, 0.3) is the first running mean, and divides: 0.9 : 0.1 becomes
    (0.9/0.7) : (0.1/0.3) = 0.794 : 0.206, and 0.5 : 0.5 becomes 0.3 : 0.7.

    m = 1/4 + mean(0.794, 0.7) / 2, v = 1/2 + var / 2 with var = (0.794 - 0.7)^2 / 2. The first is above m: weight 1.
    """
    rule = Threshold("softmatch", decay=0.5)
    pseudo, state = rule.pseudo_label(p(0.9, 0.5), torch.arange(2), rule.initial_memory(2, LIKE))
    first = (0.9 / 0.7) / (0.9 / 0.7 + 0.1 / 0.3)
    assert pseudo.label.tolist() == [0, 1]
    assert pseudo.confidence.tolist() == pytest.approx([first, 0.7], rel=1e-5)
    m = 0.25 + (first + 0.7) / 4
    v = 0.5 + (first - 0.7) ** 2 / 4
    assert float(state["confidence"]) == pytest.approx(m, rel=1e-5)
    assert float(state["variance"]) == pytest.approx(v, rel=1e-5)
    assert pseudo.weight.tolist() == pytest.approx([1.0, 1.0], rel=1e-5)
    pseudo, state = rule.pseudo_label(p(0.6, 0.6), torch.arange(2), state)
    assert state["classes"].tolist() == pytest.approx([0.65, 0.35], rel=1e-12)
    confident = (0.4 / 0.35) / (0.6 / 0.65 + 0.4 / 0.35)
    m = m / 2 + confident / 2
    v = v / 2
    assert pseudo.label.tolist() == [1, 1]
    assert pseudo.weight.tolist() == pytest.approx([exp(-((confident - m) ** 2) / (2 * v / 4))] * 2, rel=1e-4)


def test_fl2_by_hand():
    """All rows at once: p0 = 0.9, 0.9, 0.3 has t = 2.5/3 and q = (0.7, 0.3).

    Class 0 needs 0.833, class 1 0.833 * 3/7 = 0.357; the state is the local update's, and a step does not move it.
    """
    rule = Threshold("fl2")
    state = rule.begin({}, data(3), p(0.9, 0.9, 0.3))
    assert float(state["confidence"]) == pytest.approx(2.5 / 3, rel=1e-12)
    pseudo, after = rule.pseudo_label(p(0.83, 0.84, 0.4), torch.arange(3), state)
    assert pseudo.weight.tolist() == [0.0, 1.0, 1.0]
    assert after is state
    assert rule.initial_memory(2, LIKE) == {}
    assert rule.pseudo_label_all(p(0.9, 0.9, 0.3), {}).weight.tolist() == [1.0, 1.0, 1.0]
    assert rule.begin({}, data(0), torch.zeros(0, 2))["classes"].tolist() == [0.5, 0.5]


def test_looking_at_all_rows_at_once():
    """FreeMatch's means are then the rows' own: (FL)^2's rule; FlexMatch counts the labels of the same look."""
    rows = p(0.9, 0.9, 0.7, 0.3)
    assert Threshold("freematch").pseudo_label_all(rows, {}).weight.tolist() == [1.0, 1.0, 0.0, 1.0]
    assert Threshold("fl2").pseudo_label_all(rows, {}).weight.tolist() == [1.0, 1.0, 0.0, 1.0]
    # threshold 0.8: two rows of class 0, none of class 1, two without: b = (1, 0), class 1 needs nothing
    assert Threshold("flexmatch", 0.8).pseudo_label_all(rows, {}).weight.tolist() == [1.0, 1.0, 0.0, 1.0]
    assert Threshold("softmatch").pseudo_label_all(rows, {}).weight.min() > 0


def test_an_objective_weighs_by_its_rule():
    """FixMatch at t = 1/C from the start: both images count, where 0.8 let one through (test_objectives).

    ln(4/3) for the strong x = 1 of class 0, and for x = -2 of class 1 -ln(0.9): the mean is half of their sum.
    """
    given = batch([1], [0], weak=[2, -1], strong=[1, -2])
    line = Task(Line(1), SGD(0.1), Normalize())
    model = line.network.init(torch.Generator())
    objective = FixMatch(thresholding="freematch")
    loss, seen = objective(line, model["params"], model["stats"], given, objective.initial_memory(line, model))
    assert float(loss) == pytest.approx(log(4 / 3) + (log(4 / 3) + log(10 / 9)) / 2, rel=1e-12)
    assert float(seen.aux["thresholds"]["confidence"]) == pytest.approx(0.999 / 2 + 0.001 * (0.9 + 0.75) / 2)


def test_received_model_gives_pseudo_labels():
    """w = ln 3 as received has x = 1 at 3/4; in training, at w = 2 ln 3, at 9/10.

    "local" is confident at threshold = 0.8, "global" is not; of "both" the more confident one counts. With w = -ln 3 received, it
    says class 1 of x = 2 with 9/10, the model in training (w = ln 3 / 2) class 0 with 3/4: "both" follows the
    received one.
    """
    line = Task(Line(1), SGD(0.1), Normalize())
    local = line.network.init(torch.Generator())

    def validated(teacher, now: float, received: float, x: float):
        objective = FixMatch(0.8, teacher=teacher)
        came = {"params": {"w": torch.tensor(received, dtype=torch.float64)}, "stats": local["stats"]}
        cached = objective.prepare(line, came, data(1))
        given = batch([1], [0], weak=[x], strong=[1])
        w = {"w": torch.tensor(now, dtype=torch.float64)}
        return objective(line, w, local["stats"], given, {}, cached)[1].pseudo[0]

    assert validated("local", 2 * log(3), log(3), 1).weight.tolist() == [1.0]
    assert validated("global", 2 * log(3), log(3), 1).weight.tolist() == [0.0]
    assert validated("both", 2 * log(3), log(3), 1).weight.tolist() == [1.0]
    other = validated("both", log(3) / 2, -log(3), 2)
    assert (other.label.tolist(), other.weight.tolist()) == ([1], [1.0])
    assert other.confidence.tolist() == pytest.approx([0.9], rel=1e-12)


def test_of_equals_the_first_counts():
    one = torch.tensor([[1.0, 0.0]])
    other = torch.tensor([[0.0, 1.0]])
    assert torch.equal(select_more_confident(one, other), one)
    assert pseudo_label(PseudoLabel(0.8), batch([1], [0], weak=[2]))[2].pseudo[0].weight.tolist() == [1.0]


RULES = ("freematch", "flexmatch", "softmatch", "fl2")
METHODS = {
    "fedavg-fixmatch": {},
    "fedprox-uda": {"labels": "round"},
    "pseudo-label": {},
    "fixmatch-feddpl": {},
    "feddb": {"labels": "step"},
    "fedrgd": {},
    "semifl": {},
    "semifl-feddpl": {"labels": "step"},
    "fedmatch": {"delta_threshold": None},
    "feddure-without-freg": {},
}
SIZES = ((5, 4), (3, 8), (6, 7), (4, 6))


# All rules in one method; in the others one that remembers each row, or one that looks at all rows first.
CASES = [
    pytest.param(name, rule, marks=[] if name == "fedavg-fixmatch" or number % 2 == turn else [pytest.mark.nightly])
    for number, name in enumerate(METHODS)
    for turn, rule in enumerate(RULES if name == "fedavg-fixmatch" else ("flexmatch", "fl2"))
]


@pytest.mark.parametrize(("name", "rule"), CASES)
def test_thresholding_state_is_never_sent(name, rule):
    """Two rounds of all clients: loop = vmap, running state in the clients' memories alone, the same bits anew."""
    options = {**METHODS[name], "thresholding": rule}
    method = registry.make(name, options)
    shared = make_task(rounds=2)
    entry = registry.entry(name)
    held = make_dataset(SIZES, pooled=entry.pooled, labels_at=entry.label_locations[0])
    run = simulate_with_both_executors(method, shared, held, cohort=4)
    assert not any("threshold" in path for one in run for path in one.server)
    memories = run[-1].state["client"]
    stored = rule != "fl2" and name != "semifl"  # SemiFL looks at all rows in every local update
    states = [memory["thresholds"] for memory in memories.values() if "thresholds" in memory]
    assert bool(states) == stored
    if stored and rule == "flexmatch":
        assert sorted(len(state["label"]) for state in states) == ([25] if entry.pooled else [4, 6, 7, 8])
    if stored and rule == "freematch" and len(states) > 1:
        assert len({float(state["confidence"]) for state in states}) == len(states)
    plain = simulate_rounds(registry.make(name, METHODS[name]), shared, held, rounds=2, cohort=4)
    assert not trees_equal(plain[-1].server, run[-1].server)


@pytest.mark.parametrize("teacher", ["global", "both"])
@pytest.mark.parametrize("name", ["fedavg-fixmatch", "fedprox-uda", "pseudo-label"])
def test_received_labels_in_both_executors(name, teacher):
    method = registry.make(name, {"teacher": teacher, "threshold": 0.39})
    shared = make_task(rounds=2, labeling="running")
    simulate_with_both_executors(method, shared, make_dataset(SIZES, pooled=registry.entry(name).pooled))
    passes = method.client_updates(shared)["train"].passes(4, 6)
    assert passes.forward == {"fedavg-fixmatch": 16, "fedprox-uda": 16, "pseudo-label": 10}[name] + 6 * (
        teacher == "both"
    ) + (6 if name == "pseudo-label" else 0)
