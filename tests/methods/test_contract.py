"""What every method of the catalog has to keep: a new one joins by its row there."""

import dataclasses
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from halfmoon.api.types import Method, Task
from halfmoon.core import rng, tree
from halfmoon.core.errors import UserError
from halfmoon.core.tree import Tree
from halfmoon.engine.simulation import Simulation
from halfmoon.federation.contract import checks
from halfmoon.federation.contract.checks import BATCHINGS, ROUNDS
from halfmoon.federation.contract.small_federation import CLASSES, Snapshot, max_difference, run_rounds, start_server
from halfmoon.methods import registry
from halfmoon.models import SmallCNN

# An untrained network of four classes is confident of nothing; three rounds see the foot of a ramp, and no tenth round.
SOME = {"threshold": 0.39, "delta": 1.35, "ramp_rounds": 2, "interval": 1, "tuning_passes": 5}


def method_of(name: str, **more: Any) -> Method:
    """Return a method that uses some, but not all, of its pseudo-labels on random images."""
    options = registry.options(name)
    some = {key: value for key, value in SOME.items() if key in options}
    if "threshold" in some and "debias" in options and options["debias"].default:
        some["threshold"] = 0.28  # a pseudo-label divided by the mean of all pseudo-labels is less sure still
    if "teacher" in options and options["teacher"].default in ("global", "average"):
        # Under tracked statistics, which are young, the received model is less sure, and the average still less.
        some["threshold"] = 0.32 if options["teacher"].default == "global" else 0.31
    if "tail" in options:
        some["threshold"] = 0.25  # to which the share of a class, 0.1, is added
    return registry.make(name, {**some, **more})


def row_of(name: str, **more: Any) -> registry.MethodEntry:
    """Return the method's row with the options of `method_of`."""
    return dataclasses.replace(registry.entry(name), method=method_of(name, **more))


def build_simulation(
    name: str, rule: str, executor: str = "loop", labels_at: str | None = None, **options: Any
) -> tuple[Method, Task, Simulation]:
    """Return a method, its task and its federation of unequal clients in double precision."""
    return checks.make_federation(row_of(name), rule, executor, labels_at, **options)


@cache
def straight(name: str, rule: str, executor: str = "loop") -> list[Snapshot]:
    """Return the rounds of a run, shared by the tests below."""
    method, shared, simulation = build_simulation(name, rule, executor)
    return run_rounds(method, simulation, start_server(method, shared), range(ROUNDS))


def pair(name: str) -> tuple[type, ...]:
    """Return the classes that a row is made of: the method, and what it is put around."""
    method = registry.entry(name).method
    parts = [vars(method).get(field, method) for field in ("method", "objective")]
    inner = vars(parts[0]).get("objective", parts[0])
    return type(method), *map(type, parts), type(inner)


DISTINCT = list({pair(name): name for name in reversed(registry.names())}.values())[::-1]
"""The first row of every pair of a method and an objective: the others differ in options alone."""


def in_turn(choices: Iterable[str]) -> list[Any]:
    """Return every method with every choice: by default with one of them, in turn, and with the others at night."""
    every = list(choices)
    return [
        pytest.param(name, choice, marks=[] if choice == every[number % len(every)] else [pytest.mark.nightly])
        for number, name in enumerate(DISTINCT)
        for choice in every
    ]


EVERY = pytest.mark.parametrize("name", DISTINCT, scope="module")  # all tests of a method stand together
EVERY_ROW = pytest.mark.parametrize("name", registry.names())
BOTH = pytest.mark.parametrize("rule", BATCHINGS)


@pytest.mark.parametrize(("name", "rule"), in_turn(BATCHINGS), scope="module")
def test_loop_equals_vmap(name, rule):
    """Three rounds in float64 with clients of unequal size: server, memories and metrics agree to 1e-9.

    Under 4 + 4 with joint statistics, and under 2 + the rest with separate ones and labels by running statistics.
    """
    checks.compare_executors(straight(name, rule), straight(name, rule, "vmap"))


LOCATIONS = {name: registry.entry(name).label_locations for name in DISTINCT}


@pytest.mark.parametrize(
    ("name", "labels_at"),
    [(name, labels_at) for name, locations in LOCATIONS.items() for labels_at in locations[1:] or locations],
)
def test_every_label_location_works_in_both_executors(name, labels_at):
    """Labels at every client, at some, or at the server, with clients that fail to reply: loop = vmap, all finite.

    Of the clients that were queried, those who are silent in a round leave its cohort. At the first place of several,
    where all reply, the methods run in the test above.
    """
    results = []
    for executor in ("loop", "vmap"):
        method, shared, simulation = build_simulation(name, "both", executor, labels_at, client_dropout=0.4)
        results.append(run_rounds(method, simulation, start_server(method, shared), range(2)))
    checks.compare_executors(*results)
    assert all(finite(one.server) for one in results[0])
    sizes = {len(one.report.cohort) for one in results[0]}
    assert sizes == {1} if registry.entry(name).pooled else min(sizes) < 3


def finite(server: Tree) -> bool:
    return all(bool(leaf.isfinite().all()) for leaf in tree.leaves(server) if leaf.is_floating_point())


@pytest.mark.parametrize("name", [name for name in DISTINCT if "threshold" in registry.options(name)])
def test_unconfident_pseudo_labels_do_not_affect_training(name):
    """With a threshold that no probability reaches, every round ends, and with finite numbers."""
    options = registry.options(name)
    never = dict[str, Any](threshold=1.01)
    if "adaptive" in options:
        never["adaptive"] = False
    if "tail" in options:
        never["tail"] = None
    method = registry.make(name, never)
    _, shared, simulation = build_simulation(name, "both", cohort=2)
    simulation.method = method
    for one in run_rounds(method, simulation, start_server(method, shared), range(2)):
        assert finite(one.server)
        if one.report.pseudo is not None and not name.startswith("feddure"):
            assert one.report.pseudo["share_used"] == 0


@BOTH
def test_clients_of_the_simulation_differ(rule):
    """The contract is only as strong as its scene: steps differ, and under "rest" so do the unlabeled images a step."""
    _, _, simulation = build_simulation("fedavg-fixmatch", rule)
    client_update = simulation.client_updates["train"]
    training = simulation.local_clients.training
    owned = [simulation.dataset.training_size(k) for k in range(4)]
    amounts = [
        training.budget.amount(training.batching, client_update, client_sizes, client_sizes) for client_sizes in owned
    ]
    assert len({amount.steps for amount in amounts}) > 1
    assert (len({amount.unlabeled for amount in amounts}) > 1) == (rule == "rest")


@EVERY
def test_training_changes_the_model_and_uses_pseudo_labels(name):
    """The rounds that the other tests compare do something: parameters move, and some pseudo-labels count.

    FedCon learns from its views without one, and the control has none.
    """
    method, shared, _ = build_simulation(name, "both")
    server = start_server(method, shared)
    last = straight(name, "both")[-1]
    before = method.solution(shared, server)
    after = method.solution(shared, last.server)
    assert max_difference(after["params"], before["params"]) > 1e-3
    assert max_difference(after["stats"], before["stats"]) > 1e-3
    if name not in ("fedcon", "fedavg-control") and any(
        client_update.requirements.views for client_update in method.client_updates(shared).values()
    ):
        assert last.report.pseudo is not None
        assert last.report.pseudo["share_used"] > 0
        used = min(one.report.pseudo["share_used"] for one in straight(name, "both") if one.report.pseudo)
        stored = [one.report.samples["kept"] for one in straight(name, "both") if "kept" in one.report.samples]
        if stored:  # only rows that it is confident of are drawn, and it says how many these are
            used = float(sum(each.total for each in stored) / sum(each.count for each in stored))
        options = registry.options(name)
        weighed = "fine" in options and options["fine"].default  # by F-reg, instead of a threshold
        assert used < 1 or weighed or "threshold" not in options


@EVERY
def test_run_is_deterministic_and_does_not_modify_its_inputs(name):
    """Two runs of one seed are equal in every bit. Neither the initial model nor the server's tree is written into, and
    after the run method and client updates are what they were: all state is in the trees."""
    method, shared, simulation = build_simulation(name, "both")
    client_updates = dict(method.client_updates(shared.at(ROUNDS - 1)))  # what the last round is run with
    model = tree.to(shared.network.init(rng.generator(0, "model")), dtype=torch.float64)
    first_model = tree.map(torch.clone, model)
    server = method.start(shared, model)
    first_server = tree.map(torch.clone, server)
    checks.check_equal_runs(straight(name, "both"), run_rounds(method, simulation, server, range(ROUNDS)))
    checks.check_unchanged(model, first_model)
    checks.check_unchanged(server, first_server)
    checks.check_stateless(row_of(name), simulation, client_updates)


@pytest.mark.parametrize(("name", "executor"), in_turn(("vmap", "loop")), scope="module")
def test_restored_run_continues_with_the_same_bits(name, executor, tmp_path: Path):
    """Saved after round 2 and restored from the run folder: round 3 equals that of the straight run."""
    checks.check_resume(row_of(name), straight(name, "both", executor), executor, tmp_path / "run")


@pytest.mark.parametrize("norm", ["group", pytest.param("none", marks=pytest.mark.nightly)])
@pytest.mark.parametrize(
    ("name", "options"),
    [("fedloke", {}), ("fml", {}), ("fedmatch", {"debias": True}), ("fedrgd", {"return_group": True, "decay": 0.9})],
)
def test_networks_without_statistics_go_on_after_a_checkpoint(name, options, norm, tmp_path):
    """Empty statistics leave no trace on disk: a run whose trees were written and read runs on bit by bit."""
    row = row_of(name, **options)
    network = SmallCNN(1, CLASSES, 4, norm)
    runs = {executor: checks.run_experiment(row, "both", executor, network) for executor in ("loop", "vmap")}
    checks.compare_executors(*runs.values())
    for executor, run in runs.items():
        checks.check_resume(row, run, executor, tmp_path / executor, network)


@EVERY_ROW
def test_a_method_is_its_hyper_parameters(name):
    """A frozen dataclass, equal to another of the same fields, with nothing in it but hashable values."""
    method = method_of(name)
    checks.check_fields(method)
    assert hash(method) == hash(method_of(name))
    assert method == method_of(name)


@EVERY
def test_server_state_contains_tensors_and_gives_a_model(name):
    """Every leaf is a tensor without a graph; the solution is a model that the network can evaluate."""
    method, shared, _ = build_simulation(name, "both")
    model = tree.to(shared.network.init(rng.generator(0, "model")), dtype=torch.float64)
    for server in (start_server(method, shared), straight(name, "both")[-1].server):
        checks.check_tensors(method, shared, server, model)


@EVERY_ROW
def test_options_rebuild_the_method(name):
    """The catalog's options with their defaults are the catalog's method; a changed one changes it."""
    options = registry.options(name)
    assert registry.make(name, {key: option.default for key, option in options.items()}) == registry.make(name)
    for key, option in options.items():
        if isinstance(option.default, float):
            if (name, key) == ("feddure-without-freg", "signal_weight"):
                continue  # It belongs to F-reg; that it is refused without F-reg is tested with FedDure.
            assert registry.make(name, {key: option.default / 2 or 0.125}) != registry.make(name)


IMPOSSIBLE = [
    ("cbafed", {"residual_every": 0}, "residual_every is 0"),
    ("feddure", {"reward_baseline": 1.0}, "reward_baseline is 1"),
    ("feddure", {"reward_bound": 0.0}, "reward_bound is 0"),
    ("feddure", {"labeled_first": -1}, "labeled_first is -1"),
    ("fedloke", {"ema": 1.5}, "ema is 1.5"),
    ("fedloke", {"ema": -0.1}, "ema is -0.1"),
    ("fedloke", {"ramp_rounds": -1}, "ramp_rounds is -1"),
    ("fedmatch", {"interval": 0}, "interval is 0"),
    ("fedmatch", {"helpers": -1}, "helpers is -1"),
    ("fedrgd", {"groups": 0}, "groups is 0"),
    ("fl2", {"warmup": -1}, "warmup is -1"),
    ("fml", {"private_share": -0.1}, "private_share is -0.1"),
    ("fml", {"meme_share": 1.5}, "meme_share is 1.5"),
    ("mean-teacher", {"decay": None}, "needs a teacher"),
    ("protofssl", {"helpers": 0}, "helpers is 0"),
    ("proxyfl", {"tuning_batch": 0}, "tuning_batch is 0"),
    ("remixmatch", {"anchors": 0}, "at least 1 strong view"),
    ("rscfed", {"groups": 0}, "groups is 0"),
    ("semifed", {"interval": 0}, "every 0 rounds"),
    ("semifed", {"peers": -1}, "-1 peers"),
    ("semifed", {"agree": 0.0}, "agree is 0"),
    ("semifl", {"halves": True, "fine_tune": False}, "halves is set and fine_tune is not"),
    ("fedavg-fixmatch", {"labels": "round", "teacher": "global"}, "with labels 'round'"),
]


@pytest.mark.parametrize(("name", "options", "message"), IMPOSSIBLE)
def test_impossible_options_are_refused(name, options, message):
    """In a sentence that names the option."""
    with pytest.raises(UserError, match=message):
        registry.make(name, options)


@EVERY_ROW
def test_every_client_update_counts_its_passes(name):
    """A step looks at every image at least once, forward and backward; a client update without steps counts none."""
    method, shared, _ = build_simulation(name, "both")
    checks.check_passes(method, shared)
