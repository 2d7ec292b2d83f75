"""Clients of unequal sizes as one batch: padded, masked, and equal to the loop for any padding holds."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from test_contract import DISTINCT
from torch import Tensor
from torch.func import vmap

from halfmoon.aggregation.privacy.clipping import ClippedMethod
from halfmoon.api.types import Batch, ClientData, ClientUpdate, Method
from halfmoon.core import tree
from halfmoon.core.autodiff import grad_and_value
from halfmoon.engine import local_clients, vmapped_clients
from halfmoon.engine.sampling import Batching
from halfmoon.federation.contract.checks import compare_executors
from halfmoon.federation.contract.small_federation import (
    CLASSES,
    NETWORK,
    ExecutorName,
    Snapshot,
    make_dataset,
    make_simulation,
    make_task,
    max_difference,
    run_rounds,
    start_server,
)
from halfmoon.methods import registry
from halfmoon.methods.cbafed import CBAFed
from halfmoon.methods.fedavg import FedAvg
from halfmoon.methods.feddb import FedDB
from halfmoon.methods.feddure import FedDure
from halfmoon.methods.fedmatch import FedMatch
from halfmoon.methods.fl2 import FL2
from halfmoon.methods.fml import FML
from halfmoon.methods.objectives import FixMatch, MeanTeacher, MixMatch, Objective, PiModel, ReMixMatch, Supervised
from halfmoon.methods.objectives.base import index_chunks, labeled_cross_entropy, split_into_chunks
from halfmoon.methods.objectives.icpl import ICPL
from halfmoon.methods.objectives.thresholding import NO_LABEL
from halfmoon.methods.proxyfl import ProxyTuning
from halfmoon.methods.semifed import SemiFed
from halfmoon.methods.semifl import SemiFL
from halfmoon.models import ResNet9, ResNet18, WideResNet
from halfmoon.models.modules import from_factory

UNEQUAL = ((5, 11), (1, 1), (2, 14), (4, 3))
"""(labeled, unlabeled) rows of each client; under `REST` their images a step, steps and sizes all differ."""
BARE = ((5, 11), (0, 1), (1, 14), (0, 6))
"""The same with two clients that have no label."""
OTHERS = (
    "proxyfl",
    "fedloke",
    "feddb",
    "semifl",
    "fedmatch",
    "fl2",
    "cbafed",
    "twin-sight",
    "protofssl",
    "semifed",
    "fml",
    "rscfed",
    "fedirm",
    "fedcon",
)
REST = Batching("all", "rest", epochs=2)
CLOSE = 1e-12
THRESHOLD = 0.3


FEDERATED = [name for name in registry.names() if not registry.entry(name).pooled]
"""The methods of the catalog that have clients: all of them mask."""


def rounds(method: Method, executor: ExecutorName, sizes: Any = UNEQUAL, batching: Batching = REST, **shared: Any):
    made = make_task(rounds=2, **shared)
    simulation = make_simulation(
        method, made, make_dataset(sizes), batching=batching, executor=executor, cohort=len(sizes)
    )
    return run_rounds(method, simulation, start_server(method, made), range(2))


@pytest.fixture
def agree(programs):
    """Return a test that a method's rounds are equal in loop and vmap, there as programs of so many clients."""

    def check(method: Method, *where: Any, clients: int = 4, **shared: Any) -> list[Snapshot]:
        loop, many = (rounds(method, executor, *where, **shared) for executor in ("loop", "vmap"))
        assert compare_executors(loop, many) < CLOSE
        assert {len(program) for program in programs} == {clients}
        return many

    return check


SOME = {"threshold": THRESHOLD, "delta": 1.35, "ramp_rounds": 0, "interval": 1, "tuning_passes": 2}
"""Options under which an untrained network of four classes uses some of its pseudo-labels within two rounds."""


def of(name: str) -> Method:
    """Return a method that uses some of its pseudo-labels on random images."""
    options = registry.options(name)
    some = {key: value for key, value in SOME.items() if key in options}
    if "tail" in options:  # a class's share, 0.1, is added; and pseudo-labels teach from the start
        some |= {"threshold": 0.25, "warmup": 0.0}
    return registry.make(name, some)


def sizes_of(name: str) -> tuple[tuple[int, int], ...]:
    """Return `UNEQUAL`, but for methods of which rounding shows at a client with one unlabeled image.
    Divided by their mean, its prediction, its classes are equally likely; an L1 norm has a kink at the weights that
    it alone does not move; and FedCon's predictor normalizes over its two views."""
    debias_logits = registry.options(name).get("debias")
    single = (
        name.startswith("fedmatch")
        or name in ("feddb", "fedcon")
        or (debias_logits is not None and debias_logits.default)
    )
    return tuple((labeled, unlabeled + (single and unlabeled == 1)) for labeled, unlabeled in UNEQUAL)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in DISTINCT else [pytest.mark.nightly]) for name in FEDERATED]
)
def test_unequal_clients_are_one_program_that_equals_the_loop(name, agree):
    """Images a step, steps and sizes differ; one client has one image of each kind. All take two rounds together.
    With joint statistics; the contract's "rest" has separate ones."""
    last = agree(of(name), sizes_of(name))[-1].report.pseudo
    assert last is None or last["share_used"] > 0


@pytest.mark.parametrize(
    ("name", "statistics", "labeling"),
    [
        ("fedavg-fixmatch", "joint", "batch"),
        ("fedavg-fixmatch", "joint", "running"),
        ("fedavg-fixmatch", "separate", "batch"),
        ("fedavg-fixmatch", "separate", "running"),
        ("sage", "separate", "batch"),
        *[(name, "separate", "running") for name in OTHERS],
    ],
)
def test_a_client_without_labels_is_one_of_the_program(name, statistics, labeling, agree):
    """Its labeled images are padding alone: they teach nothing, and no running statistic sees them."""
    agree(of(name), BARE, statistics=statistics, labeling=labeling)


def test_clients_without_a_step_are_left_out(agree, programs):
    """With labels only, a client without labels has no step to pad."""
    agree(FedAvg(), BARE, clients=2)
    assert len(programs) == 4


OPTIONS: list[dict[str, Any]] = [
    {"labels": "round"},
    {"labels": "round", "debias": True, "mean": "used"},
    {"debias": True},
    {"teacher": "global"},
    {"teacher": "both"},
    {"teacher": "average", "debias": True, "debias_over": "step"},
    {"thresholding": "freematch"},
    {"thresholding": "softmatch"},
    {"thresholding": "fl2"},
    {"labels": "round", "thresholding": "softmatch"},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(map(str, options.values())))
def test_every_option_of_pseudo_labels_leaves_padding_out(options, agree):
    """Under separate statistics; under joint ones the catalog's methods do."""
    agree(FedAvg(FixMatch(**{"threshold": THRESHOLD, **options})), BARE, statistics="separate", labeling="running")


REGULATED: list[dict[str, Any]] = [
    {"labels": "round", "regulator_bias": 0.0},
    {"through_weights": "product", "regulator_input": "softmax", "normalize_weights": True},
    {"coarse": False},
    {"coarse": False, "labels": "round"},
    {"fine": False, "thresholding": "freematch", "threshold": THRESHOLD},
    {"judge_prior": True, "judging": "running", "labeled_first": 1, "reward_baseline": 0.9},
]


@pytest.mark.parametrize("options", REGULATED, ids=lambda options: "-".join(map(str, options.values())))
def test_feddure_leaves_padding_out(options, agree):
    """Both regulators, each alone, and what they look at: labeled losses, weights, tangents and virtual steps."""
    agree(FedDure(**options), statistics="separate")


ROWS: list[Method] = [
    FedAvg(FixMatch(thresholding="flexmatch", threshold=THRESHOLD)),
    FedDure(fine=False, thresholding="flexmatch", threshold=THRESHOLD),
    FedDB(labels="step", debias=False, thresholding="flexmatch", threshold=THRESHOLD),
    FedMatch(thresholding="flexmatch", threshold=THRESHOLD),
    SemiFL(labels="step", thresholding="flexmatch", threshold=THRESHOLD),
    SemiFed(threshold=THRESHOLD, interval=1),
]


@pytest.mark.parametrize("method", ROWS, ids=lambda method: type(method).__name__.lower())
def test_memory_of_each_row_belongs_to_its_client(method, agree):
    """FlexMatch and SemiFed keep a label of each row: no row that is padding has one, counts, or is retained."""
    sizes = UNEQUAL if isinstance(method, FedDure) else BARE  # its regulators need labels
    many = agree(method, sizes, statistics="separate", labeling="running")
    ends = ("thresholds/label", "/labels")
    labels = {path: leaf for path, leaf in tree.flatten(many[-1].state).items() if path.endswith(ends)}
    assert sorted(len(leaf) for leaf in labels.values()) == sorted(unlabeled for _, unlabeled in sizes)
    assert any(bool((leaf >= 0).any()) for leaf in labels.values())


def test_labels_of_other_rows_are_forgotten_in_a_program_too():
    """Of a client that has got more rows since, none has a label; of one with as many others neither."""
    client_update = FedAvg(FixMatch(thresholding="flexmatch", threshold=THRESHOLD)).client_updates(make_task())["train"]
    before, after = (make_dataset(sizes).client_data(0)[0] for sizes in (((2, 3),), ((2, 5),)))
    memory = {"thresholds": {"label": torch.tensor([1, 2, 0]), "mark": before.u.sum().double()}}
    for data, left in ((before, [1, 2, 0, NO_LABEL, NO_LABEL]), (after, [NO_LABEL] * 5)):
        padded = vmapped_clients._pad_row_memory(client_update, memory, data, 5)
        assert padded["thresholds"]["label"].tolist() == left
        unpadded = vmapped_clients._unpad_row_memory(client_update, padded, len(data.u))
        assert unpadded["thresholds"]["label"].tolist() == left[: len(data.u)]


MIXED: list[Objective] = [
    MixMatch(),
    ReMixMatch(),
    ReMixMatch(rotation_weight=0.0, strong_labels=False, align=False, decay=None),
    MeanTeacher(),
    PiModel(),
    Supervised(decay=0.9),
]


STATISTICS: list[dict[str, Any]] = [{}, {"statistics": "separate", "labeling": "running"}]


@pytest.mark.parametrize(
    ("objective", "shared"),
    [
        pytest.param(objective, shared, marks=[pytest.mark.nightly] if (number + turn) % 2 else [])
        for number, objective in enumerate(MIXED)
        for turn, shared in enumerate(STATISTICS)
    ],
)
def test_objectives_ignore_padding_at_clients(objective, shared, agree):
    """Mixtures have real partners alone, and averaged teachers' statistics are counted over real rows."""
    agree(FedAvg(objective, keep_optimizer=True), BARE if objective.requirements.views else UNEQUAL, **shared)


CHOICES: list[Method] = [
    ProxyTuning(FedAvg(ICPL(threshold=THRESHOLD, labeled_sets="label", sure="global")), tuning_passes=2),
    FedDB(threshold=THRESHOLD, accumulate="finish"),
    FedDB(threshold=THRESHOLD, accumulate_over="used", labels="step"),
    SemiFL(threshold=THRESHOLD, labels="step"),
    SemiFL(threshold=THRESHOLD, labels="step", mix_weight=0.0),
    SemiFL(thresholding="softmatch"),
    SemiFL(thresholding="flexmatch", threshold=THRESHOLD),
    SemiFL(labels="step", thresholding="fl2"),
    FedMatch(threshold=THRESHOLD, helpers=0, mean="all", debias=True),
    FL2(adaptive=False, sharpness=False, status_aware=False, threshold=THRESHOLD),
    CBAFed(threshold=0.25, warmup=0.0, tail=None, local_residual_every=1),
    SemiFed(threshold=THRESHOLD, interval=1, confident="all", agree=0.3),
    FML(delta=1.35),
]


@pytest.mark.parametrize("method", CHOICES, ids=lambda method: type(method).__name__.lower())
def test_options_of_methods_leave_padding_out(method, agree):
    """What is counted only under an option: teachers' pseudo-labels, thresholds over all rows, epochs, means."""
    agree(method, BARE)


@pytest.mark.parametrize("network", [WideResNet(1, CLASSES, 1), ResNet18(1, CLASSES, 2)], ids=["wrn", "resnet18"])
def test_pass_of_only_padding_is_finite_in_a_deep_network(network):
    """Of a client without labels, whose labeled images pass alone: its loss and its gradient are zero, not NaN."""
    g = torch.Generator().manual_seed(0)
    params = network.init(g)["params"]
    x = torch.randn((2, 1, 16, 16), generator=g)
    nobody = torch.zeros(2, dtype=torch.bool)

    def loss(params: Any) -> tuple[Tensor, tuple[Any, ...]]:
        return labeled_cross_entropy(
            network.train(params, x, real=nobody)[0], torch.zeros(2, dtype=torch.int64), nobody
        ), ()

    gradient, value, _ = grad_and_value(loss, params)
    assert float(value) == 0
    assert all(bool((leaf == 0).all()) for leaf in tree.leaves(gradient))


def test_client_larger_than_a_pass_is_evaluated_as_if_single(agree, monkeypatch):
    monkeypatch.setattr("halfmoon.methods.objectives.base.CHUNK_IMAGES", 4)
    monkeypatch.setattr(split_into_chunks, "__defaults__", (4,))
    monkeypatch.setattr(index_chunks, "__defaults__", (4,))
    agree(FedAvg(FixMatch(threshold=THRESHOLD, labels="round")))


SPOILED: dict[str, Method] = {
    "fixmatch": FedAvg(FixMatch(threshold=THRESHOLD, labels="round", debias=True)),
    "mixmatch": FedAvg(MixMatch()),
    "remixmatch": FedAvg(ReMixMatch()),
    "flexmatch": FedAvg(FixMatch(threshold=THRESHOLD, thresholding="flexmatch")),
    **{name: of(name) for name in ("feddure", "proxyfl", "semifl", "fedmatch", "fl2", "twin-sight", "semifed")},
}


REPEATED = ("remixmatch", "proxyfl", "semifl", "fl2")
"""Methods whose masks are those of another one."""


@pytest.mark.parametrize(
    "method",
    [
        pytest.param(method, id=name, marks=[pytest.mark.nightly] if name in REPEATED else [])
        for name, method in SPOILED.items()
    ],
)
def test_content_of_the_padding_does_not_matter(method, monkeypatch):
    """Noise instead of rows that are padding, in steps and in sweeps: the same numbers, bit by bit."""
    before = rounds(method, "vmap", UNEQUAL)
    batches = vmapped_clients.batches
    padded = vmapped_clients._pad
    g = torch.Generator().manual_seed(0)
    filled = []

    def noise(leaf: Tensor, real: Tensor) -> Tensor:
        filled.append(int((~real).sum()))
        wide = real.reshape(*real.shape, *[1] * (leaf.dim() - 2))
        if leaf.is_floating_point():
            return torch.where(wide, leaf, 5 * torch.randn(leaf.shape, generator=g, dtype=leaf.dtype))
        highest = CLASSES if leaf.dim() == 2 else 256
        return torch.where(wide, leaf, torch.randint(highest, leaf.shape, generator=g).to(leaf.dtype))

    def noisy(*given: Any) -> Iterator[Batch]:
        for batch in batches(*given):
            x = batch.real["x"]
            u = batch.real["u"]
            views, others = (
                {name: noise(view, u) for name, view in each.items()} for each in (batch.u, batch.second_batch)
            )
            more = {name: noise(view, x) for name, view in batch.x_views.items()}
            yield batch._replace(x=noise(batch.x, x), y=noise(batch.y, x), u=views, second_batch=others, x_views=more)

    def spoiled(*given: Any) -> ClientData:
        local = padded(*given)
        x = local.real["x"]
        u = local.real["u"]
        views = {name: noise(view, u) for name, view in local.views.items()}
        return local._replace(x=noise(local.x, x), y=noise(local.y, x), u=noise(local.u, u), views=views)

    monkeypatch.setattr(vmapped_clients, "batches", noisy)
    monkeypatch.setattr(vmapped_clients, "_pad", spoiled)
    after = rounds(method, "vmap", UNEQUAL)
    assert sum(filled) > 100
    for one, other in zip(before, after, strict=True):
        assert max_difference(one.server, other.server) == 0
        assert max_difference(one.state, other.state) == 0
        assert one.report.samples == other.report.samples


def test_a_loop_has_no_masks(monkeypatch):
    """A client alone, and clients of one size, see no mask: nothing is computed for them that was not before."""
    seen: list[bool] = []
    batches = local_clients.batches

    def watched(*given: Any) -> Iterator[Batch]:
        for batch in batches(*given):
            seen.append(bool(batch.real))
            yield batch

    monkeypatch.setattr(local_clients, "batches", watched)
    monkeypatch.setattr(vmapped_clients, "batches", watched)
    rounds(FedAvg(FixMatch()), "loop")
    rounds(FedAvg(FixMatch()), "vmap", ((4, 6),) * 3)
    assert seen
    assert not any(seen)


@pytest.mark.parametrize("size", [1, 3, 4, 7])
def test_masked_chunks_are_the_chunks_of_the_real_rows(size):
    """For every number of real rows of 15: the same parts in the same order, as `tensor_split` cuts them."""
    for count in range(16):
        real = torch.arange(15) < count
        rows, there, positions = index_chunks(real, size)
        actual = [chunk[mask].tolist() for chunk, mask in zip(rows, there, strict=True)]
        expected = [chunk.tolist() for chunk in split_into_chunks(torch.arange(count), size)] if count else []
        assert [chunk for chunk in actual if chunk] == expected
        assert torch.equal(rows.flatten()[positions][:count], torch.arange(count))


OUTSIDE = from_factory("custom_models:build_small", 1, CLASSES, (8, 8))


@pytest.mark.parametrize("network", [NETWORK, ResNet9(1, CLASSES, 2), OUTSIDE], ids=["small", "resnet9", "module"])
def test_a_masked_pass_and_its_tangent_are_those_of_the_real_rows(network):
    """Logits, moments and tangents of 3 real images among 5 equal those of the 3 alone, lifted or not."""
    side = 16 if isinstance(network, ResNet9) else 8
    g = torch.Generator().manual_seed(0)
    params = tree.to(network.init(g)["params"], dtype=torch.float64)
    along = tree.map(lambda leaf: torch.randn(leaf.shape, generator=g, dtype=leaf.dtype), params)
    x = torch.randn((5, 1, side, side), generator=g, dtype=torch.float64)
    real = torch.tensor([True, False, True, True, False])

    def passed(x: Tensor, mask: Tensor | None) -> dict[str, Any]:
        logits, moments = network.train(params, x, real=mask)
        tape = network.linearize(params, x, mask)[1]
        tangent = network.tangent(params, x, tape, along, mask)
        return {"moments": moments, "logits": logits, "tangent": tangent}

    single = passed(x[real], None)
    many = passed(x, real)
    lifted = tree.index(vmap(passed)(x[None], real[None]), 0)
    for each in (many, lifted):
        each = {**each, "logits": each["logits"][real], "tangent": each["tangent"][real]}
        assert max_difference(each, single) < CLOSE


def test_every_work_of_the_catalog_masks():
    """What declares nothing is batched as before; a clipped work and an averaged teacher say what their insides do."""
    shared = make_task()
    assert FedAvg(Supervised()).client_updates(shared)["train"].requirements.masks_padding
    assert FedAvg(Supervised(decay=0.9)).client_updates(shared)["train"].requirements.masks_padding
    assert not ClientUpdate(shared).requirements.masks_padding
    assert ClippedMethod(FedAvg(FixMatch()), 1.0).client_updates(shared)["train"].requirements.masks_padding
    for name in FEDERATED:
        for client_update in registry.entry(name).method.client_updates(shared).values():
            assert client_update.requirements.masks_padding, name


def test_masks_mark_the_rows_of_each_client() -> None:
    """Of clients with 2 and 3 labeled images and with 3 and 1 unlabeled ones."""

    def client(labeled: int, unlabeled: int) -> ClientData:
        x = torch.zeros(labeled, 1, 1, 1, dtype=torch.uint8)
        u = torch.zeros(unlabeled, 1, 1, 1, dtype=torch.uint8)
        return ClientData(x, torch.zeros(labeled).long(), u, torch.tensor(labeled), torch.tensor(unlabeled))

    real = vmapped_clients._pad([client(2, 3), client(3, 1)]).real
    assert real["x"].tolist() == [[True, True, False], [True, True, True]]
    assert real["u"].tolist() == [[True, True, True], [True, False, False]]
