"""The federation on this machine: cohorts, memories, counts, hidden labels, diagnostics, and what stops it."""

import itertools
import weakref
from dataclasses import astuple, replace
from fractions import Fraction
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from recording_methods import CountingMethod, RecordingMethod, collect_tensors
from test_contract import DISTINCT
from torch.utils._python_dispatch import TorchDispatchMode
from torch_models import TorchSmall, load_weights

from halfmoon.aggregation import AggregationContext
from halfmoon.api.types import Batch, ClientData, Method
from halfmoon.api.uploads import Upload
from halfmoon.core import tree
from halfmoon.core.errors import Diverged
from halfmoon.core.optim import SGD, CosineSchedule
from halfmoon.data.partition.heterogeneity import jensen_shannon
from halfmoon.data.partition.split import SERVER, Split
from halfmoon.engine import driver, local_clients, vmapped_clients
from halfmoon.engine import simulation as simulation_module
from halfmoon.engine.budget import Budget
from halfmoon.engine.driver import ClientContext
from halfmoon.engine.evaluation import Examples, Quality, compute_mean_prediction
from halfmoon.engine.executors.serial import SerialExecutor
from halfmoon.engine.executors.vmap import VmapExecutor
from halfmoon.engine.local_clients import FederatedDataset
from halfmoon.engine.runtime import first_of_permutation, sample_responders
from halfmoon.engine.sampling import Batching
from halfmoon.federation.contract.small_federation import (
    CLASSES,
    NETWORK,
    SIZES,
    make_dataset,
    make_simulation,
    make_task,
    max_difference,
    run_rounds,
    start_server,
    trees_equal,
)
from halfmoon.methods import registry
from halfmoon.methods.fedavg import FedAvg
from halfmoon.methods.feddure import FedDure
from halfmoon.methods.objectives import FixMatch
from halfmoon.models import ResNet9

BOTH = pytest.mark.parametrize("executor", ["loop", "vmap"])


def cohorts(simulation, rounds: int = 12) -> list[list[int]]:
    made = []
    for number in range(rounds):
        simulation.open(number)
        made.append(simulation.cohort.tolist())
    return made


def test_all_methods_of_a_seed_meet_the_same_clients():
    """Cohorts, three of nine and sorted, depend on seed and round alone: not on method, executor, or rounds before.
    How often each client is met is tested with the accountant, which is told that they are drawn alike."""
    held = make_dataset(((2, 2),) * 9)
    shared = make_task()
    one = cohorts(make_simulation(FedAvg(), shared, held))
    assert all(cohort == sorted(set(cohort)) and len(cohort) == 3 for cohort in one)
    assert cohorts(make_simulation(FedDure(), shared, held, executor="vmap")) == one
    late = make_simulation(FedAvg(FixMatch()), shared, held)
    late.open(7)
    assert late.cohort.tolist() == one[7]
    assert cohorts(make_simulation(FedAvg(), shared, held, seed=4)) != one
    assert len({tuple(cohort) for cohort in one}) > 5


@pytest.mark.parametrize("count", [1, 2, 3, 7, 100, 100_000])
def test_a_cohort_is_the_beginning_of_pytorchs_permutation(count: int) -> None:
    """Number by number, in the order of the permutation, for every size up to 12 and all there are."""
    for seed in range(10 if count < 1000 else 2):
        whole = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
        for size in (*range(13), *([count] if count < 1000 else [])):
            drawn = first_of_permutation(count, size, torch.Generator().manual_seed(seed))
            assert torch.equal(drawn, whole[:size])
    with pytest.raises(ValueError, match="fewer than"):
        first_of_permutation(2**31, 1, torch.Generator())


def test_no_upload_is_held_while_the_next_client_trains() -> None:
    """Of a cohort of four whose method averages none is alive when the next one's training begins."""
    method = FedAvg()
    shared = make_task()
    held = make_dataset()
    simulation = make_simulation(method, shared, held, cohort=4)
    alive = weakref.WeakSet[torch.Tensor]()
    seen = list[int]()

    def count_uploads(function):
        def counted(task):
            seen.append(len(alive))
            result = function(task)
            alive.add(next(tree.leaves(result.upload.update)))
            return result

        return counted

    class Watched(SerialExecutor):
        def map(self, function, items):
            return map(count_uploads(function), items)

    local_clients = simulation.local_clients
    local_clients.training = replace(local_clients.training, executor=Watched())
    simulation.open(0)
    method.round(simulation.task, start_server(method, shared), simulation)
    assert seen == [0, 0, 0, 0]


def test_methods_of_a_seed_see_the_same_labeled_batches():
    seen = []
    for method in (FedAvg(), FedAvg(FixMatch()), FedDure()):
        recording = RecordingMethod(method)
        shared = make_task()
        run_rounds(
            recording,
            make_simulation(recording, shared, batching=Batching(2, "rest")),
            start_server(recording, shared),
            range(2),
        )
        seen.append([batch for _, _, batch in recording.list_calls("step")])
    assert len(seen[0]) == len(seen[1]) == len(seen[2]) > 4
    for one, two, three in zip(*seen, strict=True):
        assert torch.equal(one.x_rows, two.x_rows)
        assert torch.equal(one.x, two.x)
        assert torch.equal(one.x, three.x)
        assert torch.equal(two.u["weak"], three.u["weak"])
        assert torch.equal(two.u["strong"], three.u["strong"])
        assert one.u == {}


@BOTH
def test_memories_belong_to_their_clients(executor):
    """Each client counts its local updates; who was not asked has no memory; the next local update finds the last one's."""
    method = CountingMethod(queries=1)
    shared = make_task()
    simulation = make_simulation(method, shared, executor=executor, cohort=2)
    updates = dict.fromkeys(range(4), 0)
    server = start_server(method, shared)
    for number in range(5):
        (round_result,) = run_rounds(method, simulation, server, range(number, number + 1))
        server = round_result.server
        for index, client in enumerate(round_result.report.cohort):
            assert float(server["uploads"]["query0"]["updates"][index]) == updates[client]
            updates[client] += 1
        assert {int(k): float(m["updates"]) for k, m in round_result.state["client"].items()} == {
            k: n for k, n in updates.items() if n
        }


def test_regulator_of_each_client_continues_across_rounds():
    """F-reg has taken as many Adam steps as its client; all clients of a seed start from the same one."""
    method = FedDure()
    shared = make_task()
    simulation = make_simulation(method, shared, cohort=2)
    steps = dict.fromkeys(range(4), 0)
    for round_result in run_rounds(method, simulation, start_server(method, shared), range(4)):
        for client in round_result.report.cohort:
            steps[client] += -(-SIZES[client][1] // 4)
        counted = {int(k): float(m["regulator"]["optimizer"]["steps"]) for k, m in round_result.state["client"].items()}
        assert counted == {k: n for k, n in steps.items() if n}
    firsts = []
    for seed in (0, 1):
        recording = RecordingMethod(method)
        run_rounds(
            recording,
            make_simulation(recording, shared, cohort=4, seed=seed),
            start_server(recording, shared),
            range(1),
        )
        first = [memory["regulator"]["params"] for _, memory, _ in recording.list_calls("begin")]
        assert len(first) == 4
        assert all(trees_equal(first[0], other) for other in first)
        firsts.append(first[0])
    assert not trees_equal(*firsts)


@BOTH
def test_clients_get_their_slices_and_queries_independent_draws(executor):
    """`each` reaches client k as its k-th slice, merged with what is shared; two trips see other images."""
    method = CountingMethod()
    shared = make_task()
    (round_result,) = run_rounds(
        method, make_simulation(method, shared, executor=executor), start_server(method, shared), range(1)
    )
    uploads = round_result.server["uploads"]
    cohort = round_result.report.cohort
    for query in ("query0", "query1"):
        assert uploads[query]["tag"].tolist() == [100.0 + k for k in cohort]
        assert uploads[query]["labeled"].tolist() == [SIZES[k][0] for k in cohort]
        assert uploads[query]["unlabeled"].tolist() == [SIZES[k][1] for k in cohort]
        assert uploads[query]["steps"].tolist() == [-(-SIZES[k][1] // 4) for k in cohort]
    assert not torch.equal(uploads["query0"]["pixels"], uploads["query1"]["pixels"])


@pytest.mark.parametrize("views", [(), ("weak",), ("plain", "strong")])
@pytest.mark.parametrize("batching", [Batching(4, 4), Batching(2, "rest"), Batching(3, 5, steps=2)], ids=str)
def test_both_executors_draw_the_same(views, batching):
    method = CountingMethod(views)
    shared = make_task()
    one, many = (
        run_rounds(
            method,
            make_simulation(method, shared, executor=e, batching=batching),
            start_server(method, shared),
            range(2),
        )[-1]
        for e in ("loop", "vmap")
    )
    for query in ("query0", "query1"):
        for name in ("steps", "rows", "tag", "updates"):
            assert torch.equal(one.server["uploads"][query][name], many.server["uploads"][query][name])
        torch.testing.assert_close(
            one.server["uploads"][query]["pixels"], many.server["uploads"][query]["pixels"], rtol=1e-12, atol=1e-9
        )
    assert one.report.cost == many.report.cost


@BOTH
def test_client_without_selected_rows_takes_no_step(executor):
    """Its upload equals its download, costs only bytes, and the other clients train as without it."""
    shared = make_task()
    some = CountingMethod(idle_tag=102)
    every = CountingMethod()
    held = make_dataset()
    idle, busy = (
        run_rounds(m, make_simulation(m, shared, held, executor=executor, cohort=4), start_server(m, shared), range(1))[
            -1
        ]
        for m in (some, every)
    )
    for query in ("query0", "query1"):
        steps = idle.server["uploads"][query]["steps"].tolist()
        assert steps == [3, 2, 0, 3]
        for k in (0, 1, 3):
            assert float(idle.server["uploads"][query]["pixels"][k]) == float(
                busy.server["uploads"][query]["pixels"][k]
            )
        assert float(idle.server["uploads"][query]["pixels"][2]) == 0
    assert idle.report.cost["labeled_steps"] == 2 * 8
    assert busy.report.cost["labeled_steps"] == 2 * 12


@BOTH
def test_costs_equal_a_hand_count(executor):
    """One round of all four clients, FixMatch in batches of 4 + 4, joint statistics. Steps: ceil(11/4) + ceil(6/4) +
    ceil(14/4) + ceil(9/4) = 3 + 2 + 4 + 3 = 12, so 48 labeled and 48 unlabeled images. A step passes 4 + 2 * 4 = 12
    images forward and back: 144 each. The network has 40 + 8, 296 + 16, 584 + 16 and 36, that is 996 parameters, and 2
    * (4 + 8 + 8) = 40 statistics: 1036 numbers of 8 bytes; an upload adds a weight of 8."""
    method = FedAvg(FixMatch())
    shared = make_task()
    (round_result,) = run_rounds(
        method, make_simulation(method, shared, cohort=4, executor=executor), start_server(method, shared), range(1)
    )
    assert round_result.report.cost == {
        "labeled_steps": 12,
        "labeled_images": 48,
        "unlabeled_images": 48,
        "forward": 144,
        "backward": 144,
        "bytes_down": 4 * 1036 * 8,
        "bytes_up": 4 * (1036 * 8 + 8),
        "stored_client": 0,
        "stored_server": 0,
    }


@BOTH
def test_private_downloads_are_counted_once(executor):
    """Two trips to three clients: 4 shared bytes to each, and a slice of a float64 and an int64 for each."""
    method = CountingMethod()
    shared = make_task()
    (round_result,) = run_rounds(
        method, make_simulation(method, shared, executor=executor), start_server(method, shared), range(1)
    )
    assert round_result.report.cost["bytes_down"] == 2 * (3 * 4 + 3 * (8 + 8))
    assert round_result.report.cost["bytes_up"] == 2 * 3 * 8 * 8


class Passing(TorchDispatchMode):
    """Count the images that go through the first and back through the last convolution of a network.

    Below torch.func every pass is a call of `aten.convolution` in the first layer: one for a plain pass, and one, of
    the images with the tangent of the weights, for a tangent. (`jvp` adds one of the images' own tangent, which is all
    zero, as images have none: it is not counted.) A backward pass is one `aten.convolution_backward` in the last layer,
    whichever of its derivatives are wanted. Layers are known by the shapes of their weights."""

    def __init__(self, first: torch.Size, last: torch.Size) -> None:
        super().__init__()
        self.first = first
        self.last = last
        self.forward = self.backward = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.convolution.default and args[1].shape == self.first and args[0].any():
            self.forward += len(args[0])
        if func is torch.ops.aten.convolution_backward.default and args[2].shape == self.last:
            self.backward += len(args[0])
        return func(*args, **(kwargs or {}))


def some(name: str) -> Method:
    """Return a method whose threshold takes some of an untrained network's pseudo-labels."""
    return registry.make(name, {"threshold": 0.39} if "threshold" in registry.options(name) else {})


RULES = [(NETWORK, *rule) for rule in itertools.product(["joint", "separate"], ["batch", "running"])]


def passing_cases() -> list[Any]:
    """Return every method under every rule. By default it is under one, in turn, and only if it differs from another
    method in more than options."""
    cases = []
    for name in registry.names():
        quick = RULES[DISTINCT.index(name) % len(RULES)] if name in DISTINCT else None
        cases += [pytest.param(name, *rule, marks=[] if rule == quick else [pytest.mark.nightly]) for rule in RULES]
    return cases


@pytest.mark.parametrize(
    ("name", "network", "statistics", "labeling"),
    [*passing_cases(), ("feddure", ResNet9(1, CLASSES, 2), "joint", "batch")],
)
def test_passes_are_what_went_through_the_network(name, network, statistics, labeling):
    """Two rounds of every method of the catalog count what its local updates send forward and back, under every rule.
    The count does not depend on the network."""
    entry = registry.entry(name)
    shared = make_task(network, statistics=statistics, labeling=labeling)
    method = some(name)
    side = 8 if network is NETWORK else 16
    # Small clients: every operation below torch.func is seen in Python here.
    sizes = ((5, 5), (3, 4), (2, 3))
    held = make_dataset(sizes, entry.all_labels, entry.label_locations[0], entry.pooled, side=side)
    simulation = make_simulation(method, shared, held, cohort=2)
    params = tree.flatten(network.init(torch.Generator())["params"])
    weights = [leaf.shape for path, leaf in params.items() if path.endswith("conv/weight")]
    assert weights.count(weights[0]) == 1
    counter = Passing(weights[0], weights[-1])
    train = simulation.local_clients.train

    def watched(*given):
        with counter:
            return iter(list(train(*given)))

    simulation.local_clients.train = watched  # the server's computing, an embedding say, is nobody's local update
    (_, last) = run_rounds(method, simulation, start_server(method, shared), range(2))
    cost = last.report.cost
    backward = counter.backward // weights.count(weights[-1])
    assert (counter.forward, backward) == (cost["forward"], cost["backward"])


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in DISTINCT else [pytest.mark.nightly])
        for name in registry.names()
        if not registry.entry(name).all_labels
    ],
)
def test_hidden_labels_do_not_affect_training(name):
    """Other labels at the unlabeled rows: the same server, memories and losses in every bit, other diagnostics.
    Everything a client is given in two rounds has the same bits, too."""
    entry = registry.entry(name)
    shared = make_task()
    runs = []
    given = []
    held = make_dataset(labels_at=entry.label_locations[0], pooled=entry.pooled)
    hidden = torch.from_numpy(~held.split.labeled)
    for shift in (0, 1):
        labels = torch.where(hidden, (held.train.labels + shift) % CLASSES, held.train.labels)
        recording = RecordingMethod(registry.make(name))
        changed = replace(held, train=Examples(held.train.images, labels))
        runs.append(
            run_rounds(
                recording, make_simulation(recording, shared, changed), start_server(recording, shared), range(2)
            )
        )
        kinds = ("begin", "drawable_rows", "step", "finish")
        given.append([leaf for kind in kinds for what in recording.list_calls(kind) for leaf in collect_tensors(what)])
    for a, b in zip(*runs, strict=True):
        assert trees_equal(a.server, b.server)
        assert trees_equal(a.state, b.state)
        assert a.report.samples == b.report.samples
        if a.report.pseudo is not None:
            assert a.report.pseudo != b.report.pseudo
            assert a.report.pseudo["share_used"] == b.report.pseudo["share_used"]
    assert len(given[0]) == len(given[1]) > 200
    assert all(torch.equal(one, two) for one, two in zip(*given, strict=True))
    assert Batch._fields == ("x", "y", "x_rows", "u", "u_rows", "second_batch", "mixing", "x_views", "real")
    assert ClientData._fields == ("x", "y", "u", "labeled", "unlabeled", "views", "real")


@pytest.mark.parametrize("name", ["fedavg-fixmatch", "feddure"])
def test_pseudo_label_quality_is_measured_on_the_passed_images(name):
    """The row of a round is that of its pseudo-labels, with unlabeled images known again by their pixels."""
    held = make_dataset()
    shared = make_task()
    recording = RecordingMethod(some(name))
    (round_result,) = run_rounds(
        recording,
        make_simulation(recording, shared, held, confidence_threshold=0.39),
        start_server(recording, shared),
        range(1),
    )
    known = {image.numpy().tobytes(): int(label) for image, label in zip(*held.train, strict=True)}
    quality = Quality(CLASSES, 0.39, torch.device("cpu"))
    counted = 0
    for kind, what in recording.calls:
        if kind == "begin":
            _, _, client = what
        elif kind == "step":
            rows = what[2].u_rows
        elif kind == "metrics":
            hidden = [known[client.u[row].contiguous().numpy().tobytes()] for row in rows]
            quality.add(what.pseudo[0], torch.tensor(hidden))
            counted += len(hidden)
    row = round_result.report.pseudo
    assert row == quality.row()
    assert counted == round_result.report.cost["unlabeled_images"]
    assert 0 < row["share_above"] < 1
    assert row["share_used"] > 0


@BOTH
def test_samples_add_over_steps_and_clients(executor):
    method = CountingMethod(queries=1)
    shared = make_task()
    (round_result,) = run_rounds(
        method, make_simulation(method, shared, executor=executor), start_server(method, shared), range(1)
    )
    loss = round_result.report.samples["loss"]
    assert float(loss.count) == sum(-(-SIZES[k][1] // 4) for k in round_result.report.cohort)
    recording = RecordingMethod(method)
    run_rounds(recording, make_simulation(recording, shared), start_server(recording, shared), range(1))
    losses = [float(notes.loss) for notes in recording.list_calls("metrics")]
    assert float(loss.total) == pytest.approx(sum(losses), rel=1e-9)
    assert float(loss.squares) == pytest.approx(sum(value * value for value in losses), rel=1e-9)


@BOTH
@pytest.mark.parametrize(("client", "step"), [(2, 4), (3, 1)])
def test_a_loss_that_is_not_a_number_is_named(executor, client, step):
    """The run stops with round, client and step (counted from 1 in words); the client's memory remains what it was.
    Those before it may have put theirs down: no checkpoint of that round will name it."""
    method = CountingMethod(queries=1, failing_client=client, failing_round=1, failing_step=step)
    shared = make_task()
    simulation = make_simulation(method, shared, executor=executor, cohort=4)
    (round_result,) = run_rounds(method, simulation, start_server(method, shared), range(1))
    with pytest.raises(Diverged, match=f"nan in round 2 at client {client}, step {step}:") as caught:
        run_rounds(method, simulation, round_result.server, range(1, 2))
    assert (caught.value.round, caught.value.client, caught.value.step) == (1, client, step - 1)
    stored, before = (each["client"][str(client)] for each in (simulation.state(), round_result.state))
    assert trees_equal(stored, before)


@BOTH
def test_a_frozen_client_cannot_diverge(executor):
    """A loss that would be NaN after a client's last step, while others still train, is not the client's."""
    method = CountingMethod(queries=1, failing_client=1, failing_step=3)
    shared = make_task()
    (round_result,) = run_rounds(
        method, make_simulation(method, shared, executor=executor, cohort=4), start_server(method, shared), range(1)
    )
    assert round_result.server["uploads"]["query0"]["steps"].tolist() == [3, 2, 4, 3]


@BOTH
@pytest.mark.parametrize("lr", [1e300, 1e12])
def test_a_real_divergence_stops(executor, lr):
    """A learning rate of 1e300 makes losses infinite; with 1e12 they stay finite, but mean nothing."""
    method = FedAvg()
    shared = make_task(optimizer=SGD(lr))
    with pytest.raises(Diverged, match="learning rate"):
        run_rounds(method, make_simulation(method, shared, executor=executor), start_server(method, shared), range(2))


def test_all_labels_turns_every_row_into_a_labeled_one():
    """The upper bound trains on all rows of a client, in their order, with their labels; nothing is unlabeled."""
    held = make_dataset()
    every = FederatedDataset(held.train, held.split, all_labels=True)
    for k, (labeled, unlabeled) in enumerate(SIZES):
        local, hidden = every.client_data(k)
        rows = torch.from_numpy(np.flatnonzero(held.split.client == k))
        assert torch.equal(local.x, held.train.images[rows])
        assert torch.equal(local.y, held.train.labels[rows])
        assert (int(local.labeled), int(local.unlabeled)) == (labeled + unlabeled, 0)
        assert len(local.u) == len(hidden) == 0
        assert tuple(vars(every.training_size(k)).values()) == (labeled + unlabeled, 0)
        assert tuple(vars(every.split_size(k)).values()) == (labeled, unlabeled)


def test_client_has_its_rows():
    """Labeled images with labels, unlabeled images without; the labels that are hidden belong to these."""
    held = make_dataset()
    for k, (labeled, unlabeled) in enumerate(SIZES):
        local, hidden = held.client_data(k)
        assert local.x.shape == (labeled, 1, 8, 8)
        assert local.u.shape == (unlabeled, 1, 8, 8)
        x, u = (torch.from_numpy(held.split.rows(k, is_labeled)) for is_labeled in (True, False))
        assert torch.equal(local.y, held.train.labels[x])
        assert torch.equal(local.u, held.train.images[u])
        assert torch.equal(hidden, held.train.labels[u])


def test_clients_lifted_together_are_wrapped_around():
    """Under vmap the rows beyond a client's repeat them from the start; a client without any shows zeros."""
    sizes = ((5, 0), (3, 7), (6, 4))
    clients = [make_dataset(sizes).client_data(k)[0] for k in range(3)]
    padded = vmapped_clients._pad(clients)
    for k, (local, (labeled, unlabeled)) in enumerate(zip(clients, sizes, strict=True)):
        assert torch.equal(padded.x[k], local.x[torch.arange(6) % labeled])
        assert torch.equal(padded.y[k], local.y[torch.arange(6) % labeled])
        rows = local.u[torch.arange(7) % unlabeled] if unlabeled else torch.zeros_like(padded.u[k])
        assert torch.equal(padded.u[k], rows)
        assert (int(padded.labeled[k]), int(padded.unlabeled[k])) == (labeled, unlabeled)


def test_programs_hold_so_many_clients_and_no_more(programs):
    """Four alike in programs of three: three lifted, the last alone; uploads come as from one program."""
    shared = make_task()
    method = FedAvg(FixMatch(threshold=0.3))

    def asked(together: int | None):
        simulation = make_simulation(method, shared, executor="vmap", cohort=4)
        executor = VmapExecutor(max_group_size=together, max_padding=Fraction(1))
        simulation.local_clients.training = replace(simulation.local_clients.training, executor=executor)
        simulation.open(0)
        return simulation.query("train", start_server(method, shared)).tree

    assert max_difference(asked(3), asked(None)) < 1e-12
    assert [len(program) for program in programs] == [3, 4]


@BOTH
def test_a_spoiled_upload_is_named(executor):
    """The only step has a finite loss and leaves infinite weights: nothing of it reaches the average."""
    method = FedAvg()
    shared = make_task(optimizer=SGD(1e3, weight_decay=1e308))
    batching = Batching(4, 4, steps=1)
    with pytest.raises(Diverged, match=r"upload 'params/.*' became .* in round 1 at client \d, step 1:"):
        run_rounds(
            method,
            make_simulation(method, shared, executor=executor, batching=batching),
            start_server(method, shared),
            range(1),
        )


def test_finite_numbers_whose_sum_overflows_are_accepted():
    """The sum of an upload is only a quick check of its numbers."""
    upload = Upload({"params": {"weight": torch.full((3,), 1e308, dtype=torch.float64)}}, torch.ones(()))
    assert not driver.is_finite(upload)
    update = SimpleNamespace(requirements=SimpleNamespace(upload_spec=Mock()))
    context = cast(ClientContext, SimpleNamespace(round=0, client_update=update))
    driver.check_upload(context, client=0, upload=upload, broadcast={}, steps=1)
    upload.update["params"]["weight"][1] = torch.inf
    with pytest.raises(Diverged, match="upload 'params/weight' became inf"):
        driver.check_upload(context, client=0, upload=upload, broadcast={}, steps=1)


def test_a_remembered_client_does_not_hold_its_group():
    method = FedDure()
    shared = make_task()
    simulation = make_simulation(method, shared, executor="vmap", cohort=4)
    run_rounds(method, simulation, start_server(method, shared), range(1))
    stored = simulation.store.get("client/0")
    assert stored
    for leaf in tree.leaves(stored):
        assert leaf.untyped_storage().nbytes() == leaf.numel() * leaf.element_size()


def test_who_is_silent_leaves_the_cohort():
    """With probability 0.4 a client of three does not reply, the same in all trips of a round; one always does.
    Over 200 rounds 3 * 0.6 = 1.8 answer on average (plus 0.4^3 rounds in which one has to): 1.864 +- 0.06."""
    simulation = make_simulation(CountingMethod(), make_task(rounds=200), client_dropout=0.4)
    server = start_server(CountingMethod(), make_task())
    messages = []
    for round_result in run_rounds(CountingMethod(), simulation, server, range(12)):
        messages.append(len(round_result.report.cohort))
        for query in ("query0", "query1"):
            assert len(round_result.server["uploads"][query]["tag"]) == messages[-1]
            assert (round_result.server["uploads"][query]["tag"] - 100).tolist() == round_result.report.cohort
    for number in range(12, 200):
        simulation.open(number)
        messages.append(len(sample_responders(simulation.cohort, 0.4, simulation.seed, number)))
    assert min(messages) == 1
    assert max(messages) == 3
    assert abs(np.mean(messages) - 1.864) < 4 * 0.06
    everybody = make_simulation(CountingMethod(), make_task())
    assert all(
        len(round_result.report.cohort) == 3
        for round_result in run_rounds(CountingMethod(), everybody, server, range(4))
    )


class LeaveOutFirst:
    """Leave out the first upload of a query."""

    def process_uploads(self, context: AggregationContext, upload: Upload) -> tuple[list[int], Upload]:
        positions = list(range(1, len(context.clients)))
        return positions, upload.map(lambda leaf: leaf[positions])

    def row(self) -> dict[str, Any]:
        return {}

    def stop_reason(self, round: int) -> None:
        return None


def test_the_download_of_a_client_that_is_left_out_counts_once():
    """It has replied, so that its result has the bytes already: those of three clients, whether one is left out or not."""
    costs = []
    for aggregators in ((), (LeaveOutFirst(),)):
        simulation = make_simulation(CountingMethod(queries=1), make_task(), aggregators=aggregators)
        simulation.open(0)
        each = {"tag": torch.zeros(3), "failing_step": torch.full((3,), -1)}
        upload = simulation.query("count", {"base": torch.tensor(0.0)}, each)
        assert len(simulation.cohort) == len(upload.weight) == 3 - len(aggregators)
        costs.append(simulation.cost.bytes_down)
    assert costs == 2 * [3 * (4 + 4 + 8)]


def test_clients_outside_the_cohort_can_be_queried():
    """All that are registered, in the order asked; the cohort remains, and each gets its slice."""
    simulation = make_simulation(CountingMethod(queries=1), make_task())
    simulation.open(0)
    cohort = simulation.cohort
    to = torch.tensor([2, 0, 3, 1])
    each = {"tag": to.double(), "failing_step": torch.full((4,), -1)}
    upload = simulation.query("count", {"base": torch.tensor(0.0)}, each, to)
    assert simulation.responders.tolist() == [2, 0, 3, 1]
    assert torch.equal(simulation.cohort, cohort)
    assert upload.aux["tag"].tolist() == [2, 0, 3, 1]
    assert upload.aux["labeled"].tolist() == [SIZES[k][0] for k in (2, 0, 3, 1)]
    assert simulation.clients == 4


@pytest.mark.parametrize("clients", [torch.zeros(0, dtype=torch.int64), torch.tensor([])])
def test_a_query_of_no_client_is_refused(clients):
    simulation = make_simulation(CountingMethod(queries=1), make_task())
    simulation.open(0)
    with pytest.raises(ValueError, match=r"query\('count'\) has no clients: give at least one, or leave clients out"):
        simulation.query("count", {"base": torch.tensor(0.0)}, clients=clients)


@BOTH
def test_server_trains_on_its_rows(executor):
    """It sees its labels and no unlabeled row, remembers from round to round, and nothing is sent."""
    method = CountingMethod(queries=1, views=())
    simulation = make_simulation(
        method,
        make_task(),
        make_dataset(labels_at="server"),
        executor=executor,
        server_batching=Batching(5, epochs=2),
        budget=Budget(),
    )
    broadcast = {"base": torch.tensor(0.0), "tag": torch.tensor(1.0).double(), "failing_step": torch.tensor(-1)}
    for update_index in range(2):
        simulation.open(update_index)
        upload = simulation.query_server("count", broadcast)
        assert float(upload.aux["updates"]) == update_index
        assert int(upload.aux["labeled"]) == sum(a for a, _ in SIZES)
        assert int(upload.aux["unlabeled"]) == 0
        assert float(upload.aux["steps"]) == 2 * round(18 / 5)
    assert simulation.cost.bytes_down == simulation.cost.bytes_up == 0
    assert simulation.cost.labeled_steps == 2 * 2 * round(18 / 5)


def test_a_schedule_reaches_clients_and_server_half():
    """Under a cosine to zero over 4 rounds each round moves the model less; the last one by 15 % of the rate."""
    shared = make_task(rounds=4, schedule=CosineSchedule(), optimizer=SGD(0.1))
    simulation = make_simulation(FedAvg(), shared, cohort=4)
    rates = []
    for number in range(4):
        simulation.open(number)
        rates.append(simulation.client_updates["train"].task.optimizer.lr)
        assert simulation.task.optimizer.lr == rates[-1]
    assert rates == pytest.approx([0.1, 0.08536, 0.05, 0.01464], abs=1e-5)


@BOTH
def test_client_without_labels_has_no_weight_if_only_labels_train(executor):
    """Labels at the even clients: the average is that of clients 0 and 2 by their sizes, whoever else was queried."""
    shared = make_task(optimizer=SGD(0.1))
    method = FedAvg()
    held = make_dataset(labels_at="some")
    simulation = make_simulation(method, shared, held, executor=executor, cohort=4)
    server = start_server(method, shared)
    simulation.open(0)
    upload = simulation.query("train", server)
    assert upload.weight.tolist() == [16.0, 0.0, 20.0, 0.0]
    assert trees_equal(tree.index(upload.update["params"], 1), server["params"])
    (round_result,) = run_rounds(
        method, make_simulation(method, shared, held, executor=executor, cohort=4), server, range(1)
    )
    assert (
        max_difference(round_result.server["params"], tree.weighted_mean(upload.update["params"], upload.weight)) == 0
    )
    single = make_simulation(
        method, shared, make_dataset(((0, 6), (0, 9)), labels_at="clients"), executor=executor, cohort=2
    )
    (round_result,) = run_rounds(method, single, server, range(1))
    assert trees_equal(round_result.server, server)


def test_a_pooled_federation_is_one_client_with_everything():
    """All rows but nobody's, the server's too, at client 0; the cohort is that one client."""
    for labels_at, labeled in (("clients", 18), ("server", 18), ("some", 11)):
        held = make_dataset(labels_at=labels_at, pooled=True)
        local, _ = held.client_data(0)
        assert (int(local.labeled), int(local.unlabeled)) == (labeled, 40)
        simulation = make_simulation(FedAvg(FixMatch()), make_task(), held)
        simulation.open(0)
        assert simulation.cohort.tolist() == [0]
        assert simulation.clients == 1


def test_labeled_rows_can_be_unlabeled_ones_as_well():
    """A client's unlabeled rows are all its rows; with all labels each row counts once; the server's stay labeled."""
    held = replace(make_dataset(), reuse_labeled=True)
    for k, (labeled, unlabeled) in enumerate(SIZES):
        local, hidden = held.client_data(k)
        assert (int(local.labeled), int(local.unlabeled)) == (labeled, labeled + unlabeled)
        assert len(hidden) == labeled + unlabeled
        images = {image.numpy().tobytes() for image in local.u}
        assert all(image.numpy().tobytes() in images for image in local.x)
        assert astuple(replace(held, all_labels=True).training_size(k)) == (labeled + unlabeled, 0)
    assert int(replace(make_dataset(labels_at="server"), reuse_labeled=True).client_data(SERVER)[0].unlabeled) == 0


def test_a_stream_shows_each_stage_in_its_rounds():
    """Three stages over six rounds: two rounds each; unlabeled rows come and go, labeled ones stay."""
    held = make_dataset(((3, 9), (3, 6)))
    rows = np.arange(len(held.split))
    stage = np.where(held.split.labeled, 0, rows % 3).astype(np.int64)
    held = replace(held, split=Split(held.split.client, held.split.labeled, 2, stage=stage))
    assert [held.stage(number, 6) for number in range(6)] == [0, 0, 1, 1, 2, 2]
    recording = RecordingMethod(FedAvg(FixMatch()))
    shared = make_task(rounds=6)
    run_rounds(recording, make_simulation(recording, shared, held, cohort=2), start_server(recording, shared), range(6))
    seen = [data for _, _, data in recording.list_calls("begin")]
    assert len(seen) == 12
    for index, data in enumerate(seen):
        number, client = divmod(index, 2)
        unlabeled_rows = rows[(held.split.client == client) & ~held.split.labeled & (stage == number // 2)]
        assert torch.equal(data.u, held.train.images[torch.from_numpy(unlabeled_rows)])
        assert int(data.unlabeled) == len(unlabeled_rows)
        assert int(data.labeled) == 3
    assert make_dataset().stage(3, 6) is None


def leanings(held, cohort=3, number=0, method=None, **options):
    """Return the open simulation of a round, a model that is confident of itself, and what it leans to there."""
    method = method or FedAvg()
    shared = make_task(rounds=6)
    simulation = make_simulation(method, shared, held, cohort=cohort, **options)
    model = start_server(method, shared)
    model["params"]["head"] = tree.map(lambda leaf: 300 * leaf, model["params"]["head"])
    simulation.open(number)
    return simulation, model, simulation.prediction_bias(model, [0.5, 0.25, 0.25, 0.0])


def shares(labels: np.ndarray) -> list[float]:
    return [round(float((labels == k).mean()), 6) for k in range(CLASSES)]


def predicted(model, held, rows: np.ndarray) -> np.ndarray:
    """Return the mean softmax of a module in eval mode over training rows (classes,)."""
    with torch.no_grad():
        logits = load_weights(TorchSmall(1, CLASSES, 4), model).eval()(held.train.images[rows].double() / 127.5 - 1)
    return logits.softmax(-1).mean(0).numpy()


@BOTH
def test_prediction_bias_is_measured_on_the_cohorts_unlabeled_rows(executor):
    """Shares and mean prediction of the rows of the three clients of round 2, counted in numpy; nothing is a cost."""
    held = make_dataset()
    simulation, model, row = leanings(held, number=1, executor=executor)
    unlabeled_rows = np.isin(held.split.client, simulation.cohort.numpy())
    labels = held.train.labels.numpy()
    assert 0 < unlabeled_rows.sum() < len(unlabeled_rows)
    assert row["labeled"] == shares(labels[unlabeled_rows & held.split.labeled])
    assert row["unlabeled"] == shares(labels[unlabeled_rows & ~held.split.labeled])
    assert row["app_u"] == pytest.approx(predicted(model, held, unlabeled_rows & ~held.split.labeled), abs=1e-6)
    assert max(row["app_u"]) > 0.3
    accuracy, app_u, labeled = (np.array(row[name]) for name in ("accuracy", "app_u", "labeled"))
    assert accuracy.tolist() == [0.5, 0.25, 0.25, 0.0]
    assert row["js_app_u"] == pytest.approx(jensen_shannon(accuracy, app_u), abs=1e-5)
    assert row["js_labeled"] == pytest.approx(jensen_shannon(accuracy, labeled), abs=1e-5)
    assert not any(simulation.close().cost.values())


def test_prediction_bias_respects_stages_and_missing_replies():
    """In a stream the rows of this stage count; of a client that did not reply, none."""
    held = make_dataset()
    stage = np.where(held.split.labeled, 0, np.arange(len(held.split)) % 3).astype(np.int64)
    held = replace(held, split=Split(held.split.client, held.split.labeled, 4, stage=stage))
    labels = held.train.labels.numpy()
    split = held.split
    for number in (0, 5):
        simulation, model, row = leanings(held, number=number)
        here = np.isin(split.client, simulation.cohort.numpy()) & ~split.labeled & (stage == number // 2)
        assert row["unlabeled"] == shares(labels[here])
        assert row["app_u"] == pytest.approx(predicted(model, held, here), abs=1e-6)
    held = make_dataset()
    simulation, model, _ = leanings(held, cohort=4, client_dropout=0.6)
    simulation.query("train", model)
    there = simulation.cohort.numpy()
    assert 0 < len(there) < 4
    here = np.isin(held.split.client, there) & ~held.split.labeled
    row = simulation.prediction_bias(model, [0.5, 0.25, 0.25, 0.0])
    assert row["unlabeled"] == shares(labels[here])


def test_prediction_bias_uses_the_location_of_labels():
    """The server's labels where it has them; a cohort without any has no labeled share; all labels leave no row."""
    labels = make_dataset().train.labels.numpy()
    held = make_dataset(labels_at="server")
    _, _, row = leanings(held)
    assert row["labeled"] == shares(labels[held.split.client == SERVER])
    held = make_dataset(labels_at="some")
    for number in range(6):
        simulation, _, row = leanings(held, cohort=1, number=number)
        (client,) = simulation.cohort.tolist()
        assert row is not None
        known = shares(labels[held.split.rows(client, True)]) if client % 2 == 0 else None
        assert row["labeled"] == known
        assert (row["js_labeled"] is None) == (client % 2 == 1)
    assert leanings(make_dataset(all_labels=True))[2] is None
    assert leanings(make_dataset(tuple((labeled, 0) for labeled, _ in SIZES)))[2] is None
    _, _, row = leanings(replace(make_dataset(), reuse_labeled=True), cohort=4)
    assert row["unlabeled"] == shares(labels)


def test_prediction_bias_uses_a_limited_number_of_images(monkeypatch):
    """Of a pooled run's 40 unlabeled rows 12 are looked at, others in another round; all are in the shares."""
    held = make_dataset(pooled=True, labels_at="server")
    labels = make_dataset().train.labels.numpy()
    seen = []

    def record_call(network, model, normalize, images, executor):
        seen.append({image.numpy().tobytes() for image in images})
        return compute_mean_prediction(network, model, normalize, images)

    monkeypatch.setattr(simulation_module, "compute_mean_prediction", record_call)
    monkeypatch.setattr(simulation_module, "MAX_BIAS_IMAGES", 12)
    for number in (0, 1, 0):
        _, _, row = leanings(held, cohort=1, number=number)
        assert row["unlabeled"] == shares(labels[~held.split.labeled])
        assert row["labeled"] == shares(labels[held.split.labeled])
    unlabeled = {image.numpy().tobytes() for image in held.train.images[torch.from_numpy(~held.split.labeled)]}
    assert [len(images) for images in seen] == [12, 12, 12]
    assert all(images <= unlabeled for images in seen)
    assert seen[0] == seen[2] != seen[1]


@pytest.mark.parametrize("count", [0, 2])
def test_the_models_of_single_clients_are_measured(count):
    """Of two of three: what each has sent, and the new model, on the rows of its own; without the option of none."""
    method = FedAvg(FixMatch())
    shared = make_task(rounds=1)
    federation = make_simulation(method, shared, client_models=count)
    (last,) = run_rounds(method, federation, start_server(method, shared), range(1))
    model = method.solution(shared, last.server)
    tested = []

    def test(local: dict) -> list[float]:
        tested.append(local)
        return [0.0, 0.0, 0.5, 0.5]

    row = federation.client_prediction_bias(model, [0.5, 0.25, 0.25, 0.0], test)
    if not count:
        assert row is None
        return
    clients = federation.cohort.tolist()[:2]
    assert [each["client"] for each in row["each"]] == clients
    assert not any(trees_equal({"params": local["params"]}, {"params": model["params"]}) for local in tested)
    for client, local, each in zip(clients, tested, row["each"], strict=True):
        images = federation.dataset.train.images[federation.dataset.rows(client, False)]
        for name, made, accuracy in (("local", local, [0.0, 0.0, 0.5, 0.5]), ("global", model, [0.5, 0.25, 0.25, 0.0])):
            text = shared.network.predict(made["params"], made["stats"], shared.normalize(images)).softmax(-1).mean(0)
            assert each[name]["app_u"] == pytest.approx(text.tolist(), abs=1e-5)
            assert each[name]["accuracy"] == pytest.approx(accuracy)
    values = [each["local"]["js_labeled"] for each in row["each"]]
    assert (row["local_js_labeled_low"], row["local_js_labeled_high"]) == (min(values), max(values))
    assert row["local_js_labeled"] == pytest.approx(sum(values) / 2, abs=1e-6)


@pytest.mark.parametrize(
    ("device", "rows", "layout"),
    [("cpu", 2**10, tree.channels_last), ("cpu", 2**23, tree.contiguous), ("meta", 2**23, tree.channels_last)],
)
def test_a_large_model_on_a_cpu_trains_in_the_standard_layout(device, rows, layout):
    """2^23 numbers are 32 MiB; other trees beside the parameters do not count."""
    broadcast = {
        "params": {"w": torch.empty(1, 1, 1, 1, device=device).expand(rows, 1, 1, 1)},
        "average": {"w": torch.empty(1, 1, 1, 1, device=device).expand(2**24, 1, 1, 1)},
    }
    assert local_clients._choose_layout(broadcast) is layout
    assert local_clients._choose_layout({}) is tree.channels_last
