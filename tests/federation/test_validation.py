"""Replies before they touch the model: real ones pass every check, spoiled ones are refused with the reason."""

import json
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_contract import DISTINCT, build_simulation
from test_messages import REQUEST

from halfmoon.api.types import Batch, ClientData, ClientUpdate, StepMetrics, Task, UpdateRequirements
from halfmoon.api.uploads import UPDATE_ONLY, Aux, Upload, UploadSpec
from halfmoon.core import tree
from halfmoon.core.errors import UserError
from halfmoon.core.tree import Tree
from halfmoon.data.partition.split import SERVER
from halfmoon.engine.budget import Budget
from halfmoon.engine.driver import ClientContext, ClientResult
from halfmoon.engine.sampling import Amount, Views
from halfmoon.federation.contract.small_federation import make_task, start_server
from halfmoon.federation.protocol.messages import Reply
from halfmoon.federation.protocol.tree_spec import TreeSpec, UploadProbe, make_tree_spec
from halfmoon.federation.server.cohorts import Quarantine, Refusals
from halfmoon.federation.server.validation import (
    MAX_BYTES,
    MAX_PASSES,
    check_counts,
    check_norm,
    check_schema,
    update_norm,
)
from halfmoon.methods import registry

FEDERATED = [name for name in DISTINCT if not registry.entry(name).pooled]
IMAGE = (1, 8, 8)
F64 = torch.float64


def patterns(shared: Task | None = None) -> UploadProbe:
    return UploadProbe(shared or make_task(), Views(), IMAGE, 3)


class Trip(NamedTuple):
    """One question to the clients of a real run, and what came of it."""

    context: ClientContext
    clients: Sequence[int]
    downlinks: list[Tree]
    outcomes: list[ClientResult]
    most: list[Amount]
    images: list[int]


@cache
def queries(name: str, labels_at: str | None = None, **options: Any) -> tuple[Task, list[Trip]]:
    """Return all questions of two rounds of a method in a simulation."""
    method, shared, simulation = build_simulation(name, "both", labels_at=labels_at, **options)
    requests: list[Trip] = []
    local_clients = simulation.local_clients
    train = local_clients.train
    held = local_clients.dataset

    def spied(context, clients, broadcast, each):
        results = list(train(context, clients, broadcast, each))
        outcomes = [result for _, result in results]
        if list(clients) != [SERVER]:
            downlinks = [{**broadcast, **tree.index(each, k)} for k in range(len(clients))]
            client_sizes = [(held.training_size(k), held.split_size(k)) for k in clients]
            maximum = [
                Budget().amount(local_clients.training.batching, context.client_update, *holding)
                for holding in client_sizes
            ]
            images = [int((held.split.client == k).sum()) for k in clients]
            requests.append(Trip(context, clients, downlinks, outcomes, maximum, images))
        return results

    simulation.local_clients.train = spied
    server = start_server(method, shared)
    for number in range(2):
        simulation.open(number)
        server = method.round(simulation.task, server, simulation)
    return shared, requests


def make_reply(outcome: ClientResult, **changes: Any) -> Reply:
    """Return the reply of a site that did what `outcome` says."""
    return replace(Reply.from_result(REQUEST, "1", outcome), **changes)


LOCATIONS = [(name, labels_at) for name in FEDERATED for labels_at in registry.entry(name).label_locations]


@pytest.mark.parametrize(("name", "labels_at"), LOCATIONS)
def test_the_pattern_is_that_of_every_real_upload(name: str, labels_at: str) -> None:
    """Names, shapes and dtypes of each client's upload in each trip of two rounds; clients of unequal size, some
    without labels where labels lie at some or at the server: no shape depends on the client.

    What the sites answered passes every other check, too."""
    shared, requested = queries(name, labels_at)
    known = patterns(shared)
    assert requested
    for query in requested:
        upload_spec = query.context.client_update.requirements.upload_spec
        for k, outcome in enumerate(query.outcomes):
            pattern = known.find_spec(query.context, query.downlinks[k])
            assert pattern is not None
            flat = tree.flatten(outcome.upload.tree)
            assert {path: kind for path, kind in pattern.items() if kind is not None} == {
                path: (tuple(leaf.shape), leaf.dtype) for path, leaf in flat.items()
            }
            assert pattern == make_tree_spec(outcome.upload.tree)
            reply = make_reply(outcome)
            assert check_schema(reply.upload, reply.samples, pattern, upload_spec) is None
            assert check_schema(reply.upload, reply.samples, None, upload_spec) is None
            assert check_counts(reply, query.most[k], query.images[k], upload_spec) is None
        sites = [str(client) for client in query.clients]
        ups = dict(zip(sites, [outcome.upload for outcome in query.outcomes], strict=True))
        found = {
            name: update_norm(upload, broadcast, upload_spec)
            for (name, upload), broadcast in zip(ups.items(), query.downlinks, strict=True)
        }
        assert all(math.isfinite(norm) for norm in found.values())
        assert check_norm(found, 10.0) == {}


def test_rows_that_count_twice_are_plausible() -> None:
    """Where labeled rows are unlabeled ones as well, a client of 16 images (5 labeled) weighs 5 + 16 = 21: over 16."""
    _, _, simulation = build_simulation("feddb", "both")
    held = replace(simulation.dataset, reuse_labeled=True)
    heaviest = max(
        held.training_size(k).labeled + held.training_size(k).unlabeled - int((held.split.client == k).sum())
        for k in range(4)
    )
    assert heaviest > 0
    _, requested = queries("feddb")
    outcome = requested[0].outcomes[0]._replace(upload=Upload({}, torch.tensor(21.0)), traffic=(0, 0))
    assert check_counts(make_reply(outcome), outcome.amount, 16, UPDATE_ONLY) is None
    assert "weight" in str(check_counts(make_reply(outcome), outcome.amount, 10, UPDATE_ONLY))


def test_probe_update_has_no_side_effects() -> None:
    """Global generators stand where they stood, what came down is as it was, and the same asked again is the same."""
    shared, requested = queries("feddure")
    query = requested[0]
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()  # noqa: NPY002
    broadcast = tree.map(torch.clone, query.downlinks[0])
    first = patterns(shared).find_spec(query.context, query.downlinks[0])
    after = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()  # noqa: NPY002
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]
    assert all(map(torch.equal, tree.leaves(broadcast), tree.leaves(query.downlinks[0])))
    assert patterns(shared).find_spec(query.context, query.downlinks[0]) == first


@dataclass(frozen=True)
class Echo(ClientUpdate):
    """A work that counts how often it begins, and sends `times` its first leaf; its loss is `loss`."""

    @property
    def requirements(self) -> UpdateRequirements:
        return UpdateRequirements(upload_spec=UploadSpec((), (), aux={"seen": Aux(), "none": Aux()}))

    log: Callable[[], None] = lambda: None
    times: int = 1
    loss: float = 0.0

    def begin(self, broadcast: Tree, memory: Tree, data: ClientData) -> Tree:
        self.log()
        return {"seen": torch.stack([broadcast["w"]] * self.times)}

    def step(self, broadcast: Tree, carry: Tree, batch: Batch) -> tuple[Tree, StepMetrics]:
        return carry, StepMetrics(torch.tensor(self.loss), {}, ())

    def finish(self, broadcast: Tree, carry: Tree, data: ClientData) -> tuple[Upload, Tree]:
        return Upload({}, torch.ones(()), {**carry, "none": {}}), {}

    def passes(self, labeled: int, unlabeled: int) -> Any:
        raise NotImplementedError


def context(client_update: ClientUpdate, round: int = 0) -> ClientContext:
    return ClientContext(client_update, Views(), 3, round, 0)


def test_probe_update_runs_once_for_each_download_structure() -> None:
    """The round and its learning rate do not count; the work's own fields, and shapes and dtypes of `broadcast`, do."""
    started: list[int] = []

    def log() -> None:
        started.append(1)

    known = patterns()
    shared = make_task()
    small = {"w": torch.ones(3)}
    weighed = {"update": None, "weight": ((), torch.float32)}
    for round in range(3):
        pattern = known.find_spec(context(Echo(shared.at(round), log=log), round), small)
        assert pattern == {**weighed, "aux/seen": ((1, 3), torch.float32), "aux/none": None}
    assert len(started) == 1

    def seen(broadcast: Tree, **options: Any) -> Any:
        return (known.find_spec(context(Echo(shared, log=log, **options)), broadcast) or {})["aux/seen"]

    assert seen(small, times=2) == ((2, 3), torch.float32)
    assert seen({"w": torch.ones(5)}) == ((1, 5), torch.float32)
    assert seen({"w": torch.ones(3, dtype=F64)}) == ((1, 3), F64)
    assert len(started) == 4


def test_a_pattern_does_not_hang_on_weights() -> None:
    """A server's model of NaN has the pattern of any other; a loss that is none even at zero leaves it unknown."""
    shared, requested = queries("fedavg-fixmatch")
    query = requested[0]
    spoiled = tree.map(lambda leaf: torch.full_like(leaf, math.nan), query.downlinks[0])
    known = patterns(shared)
    assert known.find_spec(query.context, spoiled) == make_tree_spec(query.outcomes[0].upload.tree)
    assert known.find_spec(context(Echo(shared, loss=math.inf)), {"w": torch.ones(3)}) is None


@pytest.fixture
def pattern() -> TreeSpec:
    """Of an upload like that of FedAvg with group normalization."""
    return {"params/a": ((2, 3), torch.float32), "params/b": ((3,), torch.float32), "stats": None, "weight": ((), F64)}


def upload(**changes: Any) -> Tree:
    upload = {
        "params": {"a": torch.ones(2, 3), "b": torch.ones(3)},
        "stats": {},
        "weight": torch.tensor(5.0, dtype=F64),
    }
    return {**upload, **changes}


def test_an_upload_of_the_pattern_has_no_fault(pattern: TreeSpec) -> None:
    assert make_tree_spec(upload()) == pattern
    assert check_schema(upload(), {}, pattern) is None


LINE = torch.ones(3)


@pytest.mark.parametrize(
    ("upload", "message"),
    [
        (upload(params={"a": torch.ones(2, 3)}), "'params/b' is missing"),
        (upload(params=LINE), "'params/a' is missing"),
        (upload(stats={"var": LINE}), "'stats' is missing"),
        ({name: key for name, key in upload().items() if name != "stats"}, "'stats' is missing"),
        (upload(more=LINE), "'more' was not requested"),
        (upload(more={}), "'more' was not requested"),
        (upload(params={"a": torch.ones(2, 3), "b": LINE, "x": {"y": LINE}}), "'params/x/y' was not requested"),
        # The same paths once joined, another tree: a name that contains the separator.
        ({**upload(stats={}), "params": {"a": torch.ones(2, 3)}, "params/b": LINE}, "'params/b' is missing"),
        (upload(**{"params/b": LINE}), "'params/b' was not requested"),
        (upload(stats=LINE), "'stats' is a tensor, not empty"),
        (upload(params={"a": torch.ones(2, 3), "b": {}}), "'params/b' is empty, not a tensor"),
        (upload(params={"a": torch.ones(3, 2), "b": LINE}), "'params/a' has the shape (3, 2), not (2, 3)"),
        (upload(weight=torch.ones(1, dtype=F64)), "'weight' has the shape (1,), not ()"),
        (upload(weight=torch.tensor(5.0)), "'weight' has dtype float32, not float64"),
        (upload(weight=torch.tensor(math.nan, dtype=F64)), "'weight' has values that are not finite"),
        (upload(params={"a": torch.ones(2, 3), "b": LINE / 0}), "'params/b' has values that are not finite"),
        (LINE, "it is not a tree of tensors"),
    ],
)
def test_the_first_fault_of_an_upload_is_named(pattern: TreeSpec, upload: Tree, message: str) -> None:
    assert check_schema(upload, {}, pattern) == message


def test_values_are_validated_without_a_pattern() -> None:
    assert check_schema(upload(more=LINE), {}, None) is None
    assert check_schema(upload(more=-LINE / 0), {}, None) == "'more' has values that are not finite"
    odd = LINE.to(torch.float8_e4m3fn)
    assert check_schema(upload(more=odd), {}, None) == "'more' has dtype float8_e4m3fn, which no method sends"
    assert check_schema(LINE, {}, None) == "it is not a tree of tensors"  # pyright: ignore[reportArgumentType]


def test_a_variance_is_not_negative() -> None:
    """A finite one below 0 would give NaN under the root of every image's normalization."""
    stats = {"conv1": {"mean": -LINE, "var": LINE - 1}}
    worse = {"conv1": {"mean": LINE, "var": torch.tensor([1.0, -1e-9])}}
    upload_spec = UploadSpec(aux={"moments": Aux("sum", "statistic")})
    for key, name in (("update", "stats"), ("aux", "moments")):
        up = {"update": {}, "weight": torch.ones(())}
        assert check_schema({**up, key: {name: stats}}, {}, None, upload_spec) is None
        output = check_schema({**up, key: {name: worse}}, {}, None, upload_spec)
        assert output == f"'{key}/{name}/conv1/var' has a variance below 0"


def test_upload_text_is_quoted_short_and_escaped() -> None:
    """A name of an upload ends up in a log: no line break, no terminal code, no page of text."""
    output = check_schema({"\x1b[2J\n" + "x" * 5000: LINE / 0}, {}, None)
    assert output.isprintable()
    assert output.startswith(r"'\x1b[2J\nxxx")
    assert len(output) < 130


def one(total: float = 1.0, squares: float = 2.0, count: float = 3.0) -> Tree:
    return {"total": torch.tensor(total), "squares": torch.tensor(squares), "count": torch.tensor(count)}


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ({"loss": one()}, None),
        ({"loss": one(-1.0, 0.0, 1.0)}, None),
        ({"loss": one(math.nan)}, "its sample 'loss' is not finite"),
        ({"loss": one(squares=math.inf)}, "its sample 'loss' is not finite"),
        ({"loss": one(), "d": one(count=0.0)}, "its sample 'd' counts 0 values"),
        ({"d": one(count=-2.0)}, "its sample 'd' counts -2 values"),
        ({"d": one(squares=-0.5)}, "its sample 'd' has the sum of squares -0.5"),
        ({"d": {**one(), "count": torch.ones(2)}}, "its sample 'd' is not three single numbers"),
        ({"d": {**one(), "count": {}}}, "its sample 'd' is not three single numbers"),
        ({"d": {**one(), "more": torch.ones(())}}, "its sample 'd' is not total, squares, count"),
        ({"d": torch.ones(())}, "its sample 'd' is not total, squares, count"),
        (LINE, "it is not a tree of tensors"),
    ],
)
def test_a_sample_is_three_sound_numbers(pattern: TreeSpec, samples: Any, message: str | None) -> None:
    assert check_schema(upload(), samples, pattern) == message


MOST = Amount(4, 10, 30, 0)


def counted(**changes: Any) -> Reply:
    """Return the reply of a site with 12 images to `MOST`."""
    upload = Upload({"x": torch.zeros(3)}, torch.tensor(12.0))
    return make_reply(ClientResult(upload, {}, {}, MOST, (100, 10), 12, 50), **changes)


def weighing(weight: float = 1.0, **aux: Any) -> Reply:
    upload = Upload({}, torch.tensor(weight), {name: torch.tensor(leaf) for name, leaf in aux.items()})
    return counted(upload=upload.tree, traffic=[0, 0])


MARKED = UploadSpec(("x",), (), aux={"labels": Aux(values="mark"), "changed": Aux(values="count"), "appu": Aux()})


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (counted(), None),
        (counted(amount=[0, 0, 0, 0]), None),
        (counted(amount=[5, 10, 30, 0]), "it counts 5 steps, of 4 at most for its 12 images"),
        (counted(amount=[4, 11, 30, 0]), "it counts 11 labeled images a step, of 10 at most for its 12 images"),
        (counted(amount=[4, 10, 31, 0]), "it counts 31 unlabeled images a step, of 30 at most for its 12 images"),
        (counted(amount=[4, 10, 30, 1]), "it counts 1 epochs, of 0 at most for its 12 images"),
        (counted(amount=[10**4000, 0, 0, 0]), "it counts more than 10^18 steps, of 4 at most for its 12 images"),
        # 12 images, each of which may count twice: 24.
        (weighing(weight=24.0), None),
        (weighing(weight=25.0), "its weight is 25, not between 0 and 24, the most for 12 images"),
        (weighing(weight=-1.0), "its weight is -1, not between 0 and 24, the most for 12 images"),
        (weighing(weight=math.nan), "its weight is nan, not between 0 and 24, the most for 12 images"),
        (weighing(labels=1.0), None),
        (weighing(labels=2.0), "its labels is 2, not between 0 and 1, the most for 12 images"),
        (weighing(labels=[0.0, 1.0]), None),
        (weighing(labels=[0.0, 7.0]), "its labels is 7, not between 0 and 1, the most for 12 images"),
        (weighing(changed=1e9, appu=-7.0), None),
        (weighing(changed=-1), "its changed is -1, not 0 or more, the most for 12 images"),
        (counted(images_outside_steps=12 * MAX_PASSES + 1), None),
        (counted(images_outside_steps=12 * MAX_PASSES + 2), "it counts 12290 images outside steps, of 12289 at most"),
        # An upload of 4 float32: 16 bytes.
        (counted(traffic=[MAX_BYTES, 16]), None),
        (counted(traffic=[MAX_BYTES + 1, 16]), f"it counts {MAX_BYTES + 1} bytes received, of {MAX_BYTES} at most"),
        (counted(traffic=[0, 17]), "it counts 17 bytes sent, of 16 at most"),
        (
            counted(memory_bytes=MAX_BYTES + 1),
            f"it counts {MAX_BYTES + 1} bytes of client memory, of {MAX_BYTES} at most",
        ),
    ],
)
def test_counts_are_those_that_a_site_can_have(reply: Reply, message: str | None) -> None:
    assert check_counts(reply, MOST, 12, MARKED) == message


def test_a_client_that_weighs_one_may_not_weigh_its_images() -> None:
    """SemiFL's clients weigh 1 or 0, whatever they have."""
    alike = UploadSpec(weight="one")
    assert check_counts(weighing(1.0), MOST, 12, alike) is None
    assert "between 0 and 1" in str(check_counts(weighing(12.0), MOST, 12, alike))


@pytest.mark.parametrize(
    ("upload", "message"),
    [
        ({"update": {"params": {}}, "weight": torch.ones(())}, None),
        ({"update": {"more": LINE}, "weight": torch.ones(())}, "'update/more' was not requested"),
        ({"update": {}, "weight": torch.ones(()), "aux": {"more": LINE}}, "'aux/more' was not requested"),
        ({"update": LINE, "weight": torch.ones(())}, "its update is not a tree"),
        ({"update": {}}, "it is not an update with a weight"),
        ({"update": {}, "weight": torch.ones(()), "note": LINE}, "'note' was not requested"),
    ],
)
def test_what_a_work_does_not_declare_is_refused(upload: Tree, message: str | None) -> None:
    """Also where no pattern of its uploads could be found out."""
    assert check_schema(upload, {}, None, UPDATE_ONLY) == message


def test_site_without_images_has_at_most_weight_one() -> None:
    """FML weighs its clients alike, whatever they have: by 1."""
    reply = weighing(weight=1.0)
    assert check_counts(replace(reply, amount=[0, 0, 0, 0], images_outside_steps=1), Amount(0, 0, 0), 0, MARKED) is None
    assert check_counts(replace(weighing(weight=1.5), amount=[0, 0, 0, 0]), Amount(0, 0, 0), 0, MARKED) is not None


def test_the_norm_of_an_update_by_hand() -> None:
    """Moved by (3, 4) in params/a and by 12 in params/b; what goes beside as numbers counts as it is, `extra`, 84:
    sqrt(9 + 16 + 144 + 7056) = sqrt(7225) = 85. Weights, marks, counts, statistics and whole numbers do not count."""
    broadcast = {
        "params": {"a": torch.tensor([1.0, 1.0]), "b": torch.ones(1), "seen": torch.tensor(1)},
        "stats": {"v": {"var": torch.ones(1)}},
    }
    update = {
        "params": {"a": torch.tensor([4.0, 5.0]), "b": torch.tensor([13.0]), "seen": torch.tensor(1000)},
        "stats": {"v": {"var": torch.full((1,), 1e9)}},
    }
    aux = {
        "extra": torch.tensor([84.0], dtype=F64),
        "labels": torch.tensor(1e9),
        "changed": {"up": {"psi": torch.tensor(1e9)}},
        "moments": {"v": {"mean": torch.full((1,), 1e9)}},
    }
    kinds = {"labels": "mark", "changed": "count", "moments": "statistic", "extra": "number"}
    upload_spec = UploadSpec(aux={name: Aux(values=kind) for name, kind in kinds.items()})
    upload = Upload(update, torch.tensor(1e9), aux)
    assert update_norm(upload, broadcast, upload_spec) == 85.0
    assert update_norm(Upload(broadcast, torch.tensor(1.0)), broadcast, upload_spec) == 0.0


def test_a_norm_is_taken_in_float64() -> None:
    """1e30 and 1e200 have squares beyond float32 and float64: the first is measured, the second is infinite."""
    for value, dtype, norm in ((1e30, torch.float32, 2e30), (1e200, F64, math.inf)):
        broadcast = {"params": torch.zeros(4, dtype=dtype)}
        upload = Upload({"params": torch.full((4,), value, dtype=dtype)}, torch.ones(()))
        assert update_norm(upload, broadcast, UPDATE_ONLY) == pytest.approx(norm, rel=1e-6)


@pytest.mark.parametrize(
    ("found", "bound", "who"),
    [
        ({"a": 1.0, "b": 2.0, "c": 3.0, "d": 100.0}, 10.0, {"d"}),
        ({"a": 1.0, "b": 2.0, "c": 3.0, "d": 100.0}, 50.0, set()),  # over the bound, not at it: 100 = 50 * 2
        ({"a": 1.0, "b": 2.0, "c": 3.0, "d": 100.0}, 0.0, set()),
        ({"a": 1.0, "b": 1000.0}, 10.0, set()),  # who of two is odd?
        ({"a": 1.0, "b": 1.0, "c": 1000.0}, 10.0, {"c"}),
        # A half is huge: the mean of the two in the middle, 500.5, would let all pass.
        ({"a": 1.0, "b": 1.0, "c": 1000.0, "d": 1000.0}, 10.0, {"c", "d"}),
        # Most are huge: they are the median, and a small update is never refused.
        ({"a": 1.0, "b": 1000.0, "c": 1000.0, "d": 1000.0}, 10.0, set()),
        ({"a": 0.0, "b": 0.0, "c": 1000.0}, 10.0, set()),
        ({"a": 0.0, "b": 0.0, "c": math.inf}, 10.0, {"c"}),
        ({"a": 1.0, "b": math.inf, "c": math.inf}, 10.0, {"b", "c"}),
        ({"a": 1.0, "b": 2.0, "c": math.nan}, 10.0, {"c"}),
    ],
)
def test_who_is_outsized(found: dict[str, float], bound: float, who: set[str]) -> None:
    assert set(check_norm(found, bound)) == who


def test_the_reason_names_both_numbers() -> None:
    reasons = check_norm({"a": 1.5, "b": 2.5, "c": 2500.0}, 10.0)
    assert reasons == {"c": "its update has the norm 2.5e+03, over 10 times the cohort's median of 2.5"}


@settings(deadline=None)
@given(sizes=st.lists(st.floats(0.5, 2.0), min_size=3, max_size=8), data=st.data())
def test_an_update_scaled_by_1000_is_refused_and_no_other(sizes: list[float], data: st.DataObject) -> None:
    """Norms between 0.5 and 2 differ by 4 at most: under a bound of 10 only the one times 1000 (500 or more) is over.
    The order of the sites changes nothing."""
    wrong = data.draw(st.integers(0, len(sizes) - 1))
    order = data.draw(st.permutations(range(len(sizes))))
    broadcast = {"params": {"a": torch.tensor([7.0, -3.0], dtype=F64)}}
    direction = torch.tensor([0.6, 0.8], dtype=F64)
    scaled = [size * (1000 if k == wrong else 1) for k, size in enumerate(sizes)]
    ups = {
        f"site-{k}": Upload({"params": {"a": broadcast["params"]["a"] + scaled[k] * direction}}, torch.ones(()))
        for k in order
    }
    found = {name: update_norm(upload, broadcast, UPDATE_ONLY) for name, upload in ups.items()}
    assert found[f"site-{wrong}"] == pytest.approx(scaled[wrong], rel=1e-9)
    assert list(check_norm(found, 10.0)) == [f"site-{wrong}"]
    assert check_norm(found, 10.0) == check_norm(dict(sorted(found.items())), 10.0)


NAMES = ("north", "south", "west")


def test_a_site_is_set_aside_at_the_limit() -> None:
    quarantine = Quarantine(NAMES, 2, None)
    assert quarantine.sites == frozenset()
    assert not quarantine.count_refusal("south", 0, "'params' is missing")
    assert not quarantine.count_refusal("west", 0, "late")
    assert quarantine.count_refusal("south", 3, "its weight is -1")
    assert quarantine.sites == {"south"}
    assert not quarantine.count_refusal("south", 4, "again")  # by an earlier one
    assert quarantine.refusals() == [
        Refusals("north"),
        Refusals("south", 3, 4, "again", True),
        Refusals("west", 1, 0, "late", False),
    ]
    quarantine.readmit("south")
    assert quarantine.sites == frozenset()
    assert quarantine.refusals()[1] == Refusals("south")
    assert not quarantine.count_refusal("south", 5, "late")


def test_limit_0_sets_no_site_aside() -> None:
    quarantine = Quarantine(NAMES, 0, None)
    assert not any(quarantine.count_refusal("north", round, "late") for round in range(50))
    assert quarantine.sites == frozenset()


def test_an_unknown_site_is_an_error() -> None:
    quarantine = Quarantine(NAMES, 1, None)
    with pytest.raises(UserError, match=r"there is no site 'sout'.*did you mean 'south'"):
        quarantine.readmit("sout")


def test_every_change_is_on_the_disk(tmp_path: Path) -> None:
    """Read by another register after each change, as a server does that was killed; in a folder that was not there."""
    path = tmp_path / "federation" / "refused.json"
    quarantine = Quarantine(NAMES, 2, path)
    assert not path.exists()
    changes: list[Callable[[], Any]] = [
        lambda: quarantine.count_refusal("south", 0, "late"),
        lambda: quarantine.count_refusal("south", 1, "its weight is \u2212\u221e"),
        lambda: quarantine.count_refusal("west", 1, "late"),
        lambda: quarantine.readmit("south"),
    ]
    for change in changes:
        change()
        assert Quarantine(NAMES, 2, path).refusals() == quarantine.refusals()
        assert Quarantine(NAMES, 2, path).sites == quarantine.sites
    assert [each.count for each in quarantine.refusals()] == [0, 0, 1]
    # The limit is not kept with the counts, and who has left is forgotten.
    assert Quarantine(("west",), 1, path).sites == {"west"}
    assert Quarantine(("north",), 1, path).refusals() == [Refusals("north")]


def row(**changes: Any) -> str:
    return json.dumps({"sites": {"south": {"count": 1, "round": 0, "reason": "late", **changes}}})


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "[]", "{}", '{"sites": 3}', '{"sites": {"south": 3}}', '{"sites": {"south": {}}}', "\ud800"),
        *(row(count="1"), row(count=True), row(count=0), row(round=-1), row(round=None), row(reason=["late"])),
    ],
)
def test_a_damaged_register_is_an_error(tmp_path: Path, text: str) -> None:
    path = tmp_path / "refused.json"
    path.write_bytes(row().encode())
    assert Quarantine(NAMES, 1, path).sites == {"south"}
    path.write_bytes(text.encode(errors="surrogatepass"))
    with pytest.raises(
        UserError, match=r"refused\.json is not a register of refused replies .* restore it, or delete it"
    ):
        Quarantine(NAMES, 1, path)


def test_unwritable_quarantine_file_records_no_fault(tmp_path: Path) -> None:
    """The folder's name is taken by a file. Nor can a folder be read as a register."""
    (tmp_path / "taken").write_text("")
    quarantine = Quarantine(NAMES, 1, None)
    quarantine.path = tmp_path / "taken" / "refused.json"
    with pytest.raises(UserError, match="cannot be written"):
        quarantine.count_refusal("south", 0, "late")
    assert quarantine.sites == frozenset()
    with pytest.raises(UserError, match="cannot be read"):
        Quarantine(NAMES, 1, tmp_path)
