"""FedLoKe: two steps by hand, autograd on the formulas, and what remains when a part is taken away."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import log
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from method_helpers import (
    FIXED_VIEWS,
    TWO_WEIGHT_NETWORK,
    autograd_step,
    copy_requiring_grad,
    forward_groups,
    make_batches,
    make_client_data,
    make_pixel_images,
    make_two_weight_model,
    simulate_rounds,
    update_running_stats,
)
from recording_methods import RecordingMethod
from torch import Tensor
from torch.distributions import Categorical

from halfmoon.api.types import Batch, Task
from halfmoon.core import tree
from halfmoon.core.optim import SGD
from halfmoon.engine.sampling import Batching
from halfmoon.federation.contract.small_federation import (
    make_simulation,
    make_task,
    max_difference,
    run_rounds,
    start_server,
    trees_equal,
)
from halfmoon.methods.fedavg import FedAvg
from halfmoon.methods.fedloke import FedLoKe
from halfmoon.methods.objectives import UDA

RULES = pytest.mark.parametrize(
    ("statistics", "labeling"), [("joint", "batch"), ("separate", "batch"), ("joint", "running")]
)
ROLES = {
    "default": ("weak", "strong"),
    "strong": ("strong2", "strong"),
    "weak": ("weak", "weak2"),
    "none": ("plain", "plain2"),
}
"""Views of the guesses (and the local model's labels), and of everything else."""


def run_update(
    method: FedLoKe, shared: Task, broadcast: dict, memory: dict, steps: list[Batch]
) -> tuple[dict, list, dict, dict]:
    """Return the last carry, all notes, the upload and the memory of a client's local update."""
    client_update = method.client_updates(shared)["train"]
    carry = client_update.begin(broadcast, memory, make_client_data())
    notes = []
    for batch in steps:
        carry, note = client_update.step(broadcast, carry, batch)
        notes.append(note)
    return carry, notes, *client_update.finish(broadcast, carry, make_client_data())


def test_one_step_by_hand():
    """Two weights, SGD with rate 1, round 50 of a ramp of 200 (lambda = 1/4), delta = 0.6 nats.

    Eq. 2, mu = 1/2: the remembered (2 ln 3, 0) and the received (0, 0) make the local model (ln 3, 0).
    Pseudo-labels on the quiet pixels 1 and 0: the local model's are (3/4, 1/4), of entropy 0.562 < 0.6, and (1/2, 1/2), of
    entropy ln 2 = 0.693; the global model's are both (1/2, 1/2). So the local model's first pseudo-label alone teaches.
    Global: labels (class 0, loud pixel 2): (p - y) x = (1/2 - 1) 2 = -1 for the first weight; the lesson on the loud
    pixel -1: lambda (1/2)(q - p_l) x = (1/4)(1/2)(1/2 - 3/4)(-1) = 1/32. The second weight's are their negatives, so
    (0, 0) becomes (31/32, -31/32). Local: labels (quiet pixel 1): (3/4 - 1) 1 = -1/4, and no lesson.
    Losses: ln 2 + (1/4)(1/2) KL, KL = 3/4 ln(3/2) + 1/4 ln(1/2), and -ln(3/4).
    """
    method = FedLoKe(ema=0.5, delta=0.6)
    shared = make_task(TWO_WEIGHT_NETWORK, optimizer=SGD(1.0), round=50)
    batch = Batch(
        make_pixel_images(99),  # the run's own labeled view is not used
        torch.tensor([0]),
        torch.tensor([0]),
        {"weak": make_pixel_images(1, 0), "strong": make_pixel_images(-1, 5)},
        torch.tensor([0, 1]),
        x_views={"weak": make_pixel_images(1), "strong": make_pixel_images(2)},
    )
    _, (notes,), upload, memory = run_update(
        method, shared, make_two_weight_model(0, 0), make_two_weight_model(2 * log(3), 0), [batch]
    )
    assert upload.update["params"]["head"]["weight"].flatten().tolist() == pytest.approx([31 / 32, -31 / 32], rel=1e-12)
    assert memory["params"]["head"]["weight"].flatten().tolist() == pytest.approx([log(3) + 1 / 4, -1 / 4], rel=1e-12)
    divergence = 3 / 4 * log(3 / 2) + 1 / 4 * log(1 / 2)
    assert float(notes.loss) == pytest.approx(log(2) + divergence / 8 - log(3 / 4), rel=1e-12)
    assert {name: each.total.item() for name, each in notes.samples.items()} == {"global_sure": 0, "local_sure": 1}
    assert {each.count.item() for each in notes.samples.values()} == {2}
    assert notes.pseudo[0].weight.tolist() == [0, 0]
    assert notes.pseudo[0].confidence.tolist() == [0.5, 0.5]
    assert float(upload.weight) == 11


@dataclass(frozen=True)
class Formula:
    """The losses of Eq. 9 to 14, written once more."""

    method: FedLoKe
    task: Task

    def compute_outputs(
        self, leaves: dict, stats: dict, batch: Batch, labeled: str
    ) -> tuple[Tensor, Tensor, Tensor, list[dict]]:
        """Return the logits of labels, loud and quiet images, and the moments."""
        quiet, loud = ROLES[self.method.views]
        x = batch.x_views[labeled]
        u = batch.u
        if self.task.labeling == "running":
            (labels, strong), moments = forward_groups(self.task, leaves, x, u[loud])
            return labels, strong, self.task.network.predict(leaves, stats, u[quiet]), moments
        (weak, labels, strong), moments = forward_groups(self.task, leaves, u[quiet], x, u[loud])
        return labels, strong, weak, moments

    def lesson(self, guess: Tensor, strong: Tensor) -> Tensor:
        """Return the masked mean of KL(teacher || student) over the whole minibatch."""
        target = guess.detach().softmax(-1)
        each = F.kl_div(strong.log_softmax(-1), target, reduction="none").sum(-1)
        delta = self.method.delta
        mask = torch.ones(len(each)) if delta is None else (Categorical(probs=target).entropy() < delta).double()
        ramp = 1 if not self.method.ramp_rounds else min(1, self.task.round / self.method.ramp_rounds)
        return self.method.unlabeled_weight * ramp * (mask * each).sum() / len(each)

    def step(self, models: dict, batch: Batch) -> tuple[dict, float]:
        """Return the models after one backward pass through the sum of all losses, and that sum."""
        leaves = {name: copy_requiring_grad(one["params"]) for name, one in models.items()}
        quiet, loud = ROLES[self.method.views]
        view = {"global": loud, "local": quiet}
        text = {
            name: self.compute_outputs(leaves[name], one["stats"], batch, view[name]) for name, one in models.items()
        }
        teacher = {"global": text.get("local", text["global"])[2], "local": text["global"][2]}
        losses = {}
        for name, (labels, strong, _, _) in text.items():
            losses[name] = F.cross_entropy(labels, batch.y)
            if name == "global" or self.method.global_labels:
                losses[name] = losses[name] + self.lesson(teacher[name], strong)
        moved = autograd_step(losses, leaves, self.task.optimizer.lr)
        new = {
            name: {"params": moved[name], "stats": update_running_stats(one["stats"], text[name][3])}
            for name, one in models.items()
        }
        return new, sum(loss.item() for loss in losses.values())


@RULES
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"delta": None, "unlabeled_weight": 3.0},
        {"ramp_rounds": 0},
        {"global_labels": False},
        {"local": False},
        {"views": "strong"},
        {"views": "weak"},
        {"views": "none"},
    ],
    ids=str,
)
def test_steps_are_autograds_on_the_formula(options: Mapping[str, Any], statistics, labeling):
    """Three steps of both models at round 3 of a ramp of 4: parameters, running statistics and losses agree.

    The oracle adds all losses and differentiates once, as the authors do: a pseudo-label that is not detached, a model that
    moves before the other has been read, or a KL the wrong way round would show. Some pseudo-labels pass the filter, not all.
    """
    method = FedLoKe(**{"delta": 1.1, "ramp_rounds": 4, "ema": 1.0, **options})
    shared = make_task(optimizer=SGD(0.2), statistics=statistics, labeling=labeling, round=3)
    broadcast = start_server(method, shared)
    memory = start_server(method, shared, seed=5)
    for one, shift in (
        (broadcast, 0.05),
        (memory, 0.02),
    ):  # more confident than at their start, with statistics of something
        one["params"]["head"] = tree.map(lambda leaf: 3 * leaf, one["params"]["head"])
        one["stats"] = {k: {"mean": each["mean"] + shift, "var": 0.3 * each["var"]} for k, each in one["stats"].items()}
    oracle = Formula(method, shared)
    models = {"global": broadcast, "local": memory} if method.local else {"global": broadcast}
    steps = make_batches(ROLES[method.views])
    client_update = method.client_updates(shared)["train"]
    carry = client_update.begin(broadcast, memory if method.local else {}, make_client_data())
    shares = []
    for batch in steps:
        carry, notes = client_update.step(broadcast, carry, batch)
        models, loss = oracle.step(models, batch)
        assert float(notes.loss) == pytest.approx(loss, rel=1e-11)
        for name, each in models.items():
            assert max_difference({"params": carry[name]["params"], "stats": carry[name]["stats"]}, each) < 1e-11
        shares += [float(s.total / s.count) for s in notes.samples.values()]
    assert max_difference(carry["global"]["params"], broadcast["params"]) > 1e-2
    if method.delta is not None:
        assert 0 < sum(shares) < len(shares)


def test_pseudo_label_quality_is_that_of_the_teacher():
    """The global model's; the local one's where the global one teaches nobody. They weigh the ramp times the mask."""
    shared = make_task(round=1, statistics="separate")
    (batch,) = make_batches(ROLES["default"], 1)
    broadcast = start_server(FedLoKe(), shared)
    memory = start_server(FedLoKe(), shared, seed=5)
    whole = FedLoKe(ema=1.0, delta=1.34, ramp_rounds=4)
    for method, teacher in (
        (whole, broadcast),
        (replace(whole, global_labels=False), memory),
        (replace(whole, local=False), broadcast),
    ):
        _, (notes,), _, _ = run_update(method, shared, broadcast, memory if method.local else {}, [batch])
        prediction = shared.network.train(teacher["params"], batch.u["weak"])[0].softmax(-1)
        confidence, label = prediction.max(-1)
        (text,) = notes.pseudo
        assert text.label.tolist() == label.tolist()
        assert text.confidence.tolist() == pytest.approx(confidence.tolist(), rel=1e-12)
        used = (Categorical(probs=prediction).entropy() < 1.34).double()
        assert text.weight.tolist() == (used / 4).tolist()
        assert set(notes.models) == ({"global", "local"} if method.local else set())
        for name, each in notes.models.items():
            weak_logits = shared.network.train((broadcast if name == "global" else memory)["params"], batch.u["weak"])[
                0
            ]
            assert each.label.tolist() == weak_logits.argmax(-1).tolist()
        if not method.global_labels:
            assert not notes.models["global"].weight.any()  # it teaches nobody


def test_the_fusion_by_hand():
    """mu = 0.75 of 4 and 8: 0.75 * 4 + 0.25 * 8 = 5, statistics alike; 1 retains the local model, 0 takes the received.

    The global model is what came down.
    """
    broadcast = {"params": {"w": torch.tensor([8.0])}, "stats": {"n": {"mean": torch.tensor([80.0])}}}
    memory = {"params": {"w": torch.tensor([4.0])}, "stats": {"n": {"mean": torch.tensor([40.0])}}}
    for mu, expected in ((0.75, 5.0), (1.0, 4.0), (0.0, 8.0)):
        carry = FedLoKe(ema=mu).client_updates(make_task())["train"].begin(broadcast, memory, make_client_data())
        assert carry["local"]["params"]["w"].tolist() == [expected]
        assert carry["local"]["stats"]["n"]["mean"].tolist() == [10 * expected]
        assert carry["global"]["params"]["w"].tolist() == [8.0]


def test_a_local_model_starts_as_the_first_received():
    """Two clients meet two different global models: each remembers its own."""
    client_update = FedLoKe().client_updates(make_task())["train"]
    for seed in (0, 1):
        broadcast = start_server(FedLoKe(), make_task(), seed)
        assert trees_equal(client_update.initial_memory(broadcast, torch.Generator()), broadcast)
    assert FedLoKe(local=False).client_updates(make_task())["train"].initial_memory(broadcast, torch.Generator()) == {}


STEPPED = {"batching": Batching(2, "rest"), "views": FIXED_VIEWS, "cohort": 4}
"""As many steps with unlabeled views as without, in views without chance, and all clients in every round."""


def purely_local(recording: RecordingMethod, start: dict, shared: Task, view: str) -> list[dict]:
    """Return each client's parameters after training alone on the labels of its recorded batches, round by round."""
    params: dict[bytes, dict] = {}
    who = b""
    for kind, what in recording.calls:
        if kind == "begin":
            who = what[2].x.numpy().tobytes()
            params.setdefault(who, start["params"])
        elif kind == "step":
            leaves = copy_requiring_grad(params[who])
            logits, _ = shared.network.train(leaves, what[2].x_views[view])
            loss = F.cross_entropy(logits, what[2].y)
            params[who] = autograd_step({"": loss}, {"": leaves}, shared.optimizer.lr)[""]
    return list(params.values())


def test_without_confident_pseudo_labels_the_two_models_train_separately():
    """delta = 0 and mu = 1, every view in its pass: the global model is FedAvg's, supervised on strong views.

    And a client's local model has been trained on its labels' weak views alone, as autograd does it.
    """
    shared = make_task(optimizer=SGD(0.1), statistics="separate")
    recording = RecordingMethod(FedLoKe(ema=1.0, delta=0.0, ramp_rounds=0))
    start = start_server(recording, shared)
    actual = run_rounds(recording, make_simulation(recording, shared, **STEPPED), start, range(2))[-1]
    expected_value = run_rounds(FedAvg(), make_simulation(FedAvg(), shared, **STEPPED), start, range(2))[-1]
    assert max_difference(actual.server["params"], expected_value.server["params"]) < 1e-12
    assert max_difference(actual.server["params"], start["params"]) > 1e-2
    single = purely_local(recording, start, shared, "weak")
    assert len(single) == 4
    for k, params in enumerate(single):
        assert max_difference(actual.state["client"][str(k)]["params"], params) < 1e-12


@pytest.mark.parametrize(
    ("options", "reads"),
    [
        ({"ema": 1.0, "global_labels": False}, False),
        ({"ema": 1.0, "delta": 0.0}, False),
        ({"ema": 1.0}, True),
        ({"ema": 0.9, "global_labels": False}, True),
    ],
    ids=str,
)
def test_what_the_local_model_reads_of_the_global(options, reads):
    """With mu = 1 only its pseudo-labels do: without these, a different global model gives the same local one, bit by bit."""
    method = FedLoKe(**{"delta": None, "ramp_rounds": 0, **options})
    shared = make_task(optimizer=SGD(0.1))
    memory = start_server(method, shared, seed=5)
    one, two = (
        run_update(method, shared, start_server(method, shared, seed), memory, make_batches(ROLES["default"]))[3]
        for seed in (0, 1)
    )
    assert trees_equal(one, two) != reads


def test_the_first_round_has_no_unsupervised_loss():
    """lambda = 0 at t = 0: the round is that of a filter which lets nothing through; the next one is not.

    Pseudo-labels are counted as unused.
    """
    shared = make_task(rounds=2)
    runs = []
    for delta in (None, 0.0):
        method = FedLoKe(delta=delta, ramp_rounds=4)
        runs.append(simulate_rounds(method, shared, rounds=2))
    (first, second), (quiet, later) = runs
    assert max_difference(first.server, quiet.server) == 0
    assert max_difference(first.state, quiet.state) == 0
    assert first.report.pseudo["share_used"] == 0
    assert second.report.pseudo["share_used"] == 1
    assert max_difference(second.server, later.server) > 1e-5


@pytest.mark.parametrize(("round", "expected"), [(0, 0), (50, 0.25), (200, 1), (499, 1)])
def test_the_ramp(round, expected):
    """min(1, t / 200), times the weight; without a ramp 1 from the first round on."""
    assert FedLoKe().ramp(round) == expected
    assert float(FedLoKe().ramp(torch.tensor(float(round)))) == expected
    assert FedLoKe(unlabeled_weight=2.0).ramp(round) == 2 * expected
    assert FedLoKe(ramp_rounds=0).ramp(round) == 1


def test_without_local_models_it_is_uda_without_threshold():
    """No local model, filter or ramp: the gradient of KL to one's own pseudo-label is that of the cross-entropy with it.

    So FedAvg + UDA at temperature 1 and threshold 0, on labeled images in the strong view. Clients remember nothing.
    """
    shared = make_task(optimizer=SGD(0.1))
    actual = FedLoKe(local=False, delta=None, ramp_rounds=0)
    expected_value = FedAvg(UDA(threshold=0.0, temperature=1.0))
    start = start_server(actual, shared)
    one = run_rounds(actual, make_simulation(actual, shared, views=FIXED_VIEWS), start, range(2))[-1]
    two = run_rounds(expected_value, make_simulation(expected_value, shared, views=FIXED_VIEWS), start, range(2))[-1]
    assert max_difference(one.server, two.server) < 1e-12
    assert one.state == {} or not one.state["client"]
    assert one.report.cost["stored_client"] == 0
    assert one.report.cost["forward"] == two.report.cost["forward"]
    assert one.report.cost["backward"] == two.report.cost["backward"]


def test_what_a_round_costs():
    """FedAvg's bytes (down the model, up the model and a weight), one more model at a client, and twice the passes."""
    shared = make_task()
    method = FedLoKe()
    single = FedLoKe(local=False)
    start = start_server(method, shared)
    cost = run_rounds(method, make_simulation(method, shared), start, range(1))[-1].report.cost
    assert cost["bytes_down"] == 3 * tree.nbytes(start)
    assert cost["bytes_up"] == 3 * (tree.nbytes(start) + 8)
    assert cost["stored_client"] == tree.nbytes(start)
    half = run_rounds(single, make_simulation(single, shared), start, range(1))[-1].report.cost
    assert (cost["forward"], cost["backward"]) == (2 * half["forward"], 2 * half["backward"])
