"""Check guards between uploads and a method: their inputs, what they may change, and which methods allow them."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from test_contract import DISTINCT, build_simulation

from halfmoon.aggregation import AggregationContext, Aggregator, compute_update, downloaded_values, replace_update
from halfmoon.aggregation.privacy.clipping import ClippedMethod
from halfmoon.api.requirements import requirements_of
from halfmoon.api.upload_mean import UploadMean
from halfmoon.api.uploads import Aux, Upload, UploadSpec
from halfmoon.config.schema import Config
from halfmoon.core import tree
from halfmoon.core.errors import UserError
from halfmoon.engine.loop import TooFewReplies
from halfmoon.federation.contract.small_federation import (
    make_dataset,
    make_simulation,
    make_task,
    max_difference,
    run_rounds,
    start_server,
)
from halfmoon.methods import registry
from halfmoon.methods.fedavg import FedAvg
from halfmoon.methods.fedrgd import FedRGD
from halfmoon.runs.factory import build_method

ROUNDS = range(3)


@dataclass
class Recorder(Aggregator):
    """A guard that does `act` and keeps what it was told."""

    act: Any = None
    seen: list[AggregationContext] = field(default_factory=list)

    def process_uploads(self, question: AggregationContext, upload: Upload) -> tuple[Sequence[int], Upload]:
        self.seen.append(question)
        return (range(len(question.clients)), upload) if self.act is None else self.act(question, upload)

    def row(self) -> dict[str, Any]:
        return {"questions": len(self.seen)}


def mean_for_all(requested: AggregationContext, upload: Upload) -> tuple[Sequence[int], Upload]:
    change = tree.weighted_mean(compute_update(upload, requested), upload.weight)
    return range(len(requested.clients)), replace_update(upload, requested, change)


def test_update_is_the_change_of_the_client():
    broadcast = {"params": {"w": torch.tensor([1.0, 2.0])}, "round": torch.tensor(3)}
    each = {"own": torch.tensor([[10.0], [20.0]])}
    parts = {
        "params": {"w": torch.tensor([[1.5, 2.0], [0.0, 2.0]])},
        "own": torch.tensor([[11.0], [19.0]]),
        "round": torch.tensor([4, 4]),
    }
    upload = Upload(parts, torch.tensor([2.0, 3.0]), {"beside": torch.ones(2, 3)})
    requested = AggregationContext(0, 0, 0, "train", broadcast, each, (4, 7), 2, True)
    change = compute_update(upload, requested)
    assert {path: leaf.tolist() for path, leaf in change.items()} == {
        "params/w": [[0.5, 0.0], [-1.0, 0.0]],
        "own": [[1.0], [-1.0]],
    }
    repeated = replace_update(upload, requested, change)
    assert all(torch.equal(a, b) for a, b in zip(tree.leaves(repeated.tree), tree.leaves(upload.tree), strict=True))
    one = replace_update(upload, requested, {"params/w": torch.tensor([5.0, 5.0])})
    assert one.update["params"]["w"].tolist() == [[6.0, 7.0], [6.0, 7.0]]
    assert one.weight.tolist() == [2.0, 3.0]
    assert downloaded_values(requested.only([1]))["own"].tolist() == [[20.0]]
    assert requested.only([1]).clients == (7,)


def test_guard_without_effect_changes_no_upload_and_gets_the_responders():
    """A run with a guard without effect has the same bits; the guard gets the round, the query and the responders, in order."""
    made, shared, plain = build_simulation("fedavg-fixmatch", "both", client_dropout=0.4)
    aggregator = Recorder()
    _, _, baselines = build_simulation("fedavg-fixmatch", "both", client_dropout=0.4, aggregators=[aggregator])
    rounds = [run_rounds(made, each, start_server(made, shared), ROUNDS) for each in (plain, baselines)]
    for one, two in zip(*rounds, strict=True):
        assert max_difference(two.server, one.server) == 0
        assert two.report.cohort == one.report.cohort
    assert [requested[:4] for requested in aggregator.seen] == [(k, 0, 0, "train") for k in ROUNDS]
    assert list(aggregator.seen[-1].clients) == two.report.cohort
    assert aggregator.seen[-1].cohort == baselines.size
    assert all(requested.random_cohort for requested in aggregator.seen)
    assert two.report.aggregator == {"questions": 3}


def test_client_excluded_by_a_guard_is_not_a_responder():
    """The cohort and the average are without it; where nobody is left, the round has too few."""

    def first_only(requested: AggregationContext, upload: Upload) -> tuple[Sequence[int], Upload]:
        return [0], upload.map(lambda leaf: leaf[:1])

    made, _, single = build_simulation("fedavg", "both", aggregators=[Recorder(first_only)])
    shared = single.base
    (result,) = run_rounds(made, single, start_server(made, shared), [0])
    single.open(0)
    first = int(single.cohort[0])
    assert result.report.cohort == [first]
    upload = single.query("train", start_server(made, shared), clients=torch.tensor([first]))
    assert max_difference(result.server, upload.at(0).update) < 1e-12
    _, _, empty = build_simulation("fedavg", "both", aggregators=[Recorder(lambda asked, upload: ([], upload))])
    with pytest.raises(TooFewReplies, match=r"round 1, query 1 \(train\) has no usable upload"):
        run_rounds(made, empty, start_server(made, shared), [0])


def test_mean_reduces_auxiliary_values_as_declared() -> None:
    """(1 * 2 + 3 * 6) / 4 = 5; sums add up; what the server needs of each client cannot be averaged; nobody weighs."""
    upload_spec = UploadSpec(aux={"share": Aux("mean"), "moments": Aux("sum", "statistic")})
    mean = UploadMean(upload_spec, "train")
    broadcast = {"params": {"w": torch.tensor([7.0])}}
    for value, weight in ((2.0, 1.0), (6.0, 3.0), (99.0, 0.0)):
        leaf = torch.tensor([value])
        mean.add(Upload({"params": {"w": leaf}}, torch.tensor(weight), {"share": leaf, "moments": weight * leaf}))
    got = mean.result(broadcast)
    assert (got.update["params"]["w"].tolist(), float(got.weight)) == ([5.0], 4.0)
    assert (got.aux["share"].tolist(), got.aux["moments"].tolist()) == ([5.0], [20.0])
    nobody = UploadMean(UploadSpec(), "train")
    nobody.add(Upload({"params": {"w": torch.tensor([1.0])}}, torch.tensor(0.0)))
    assert nobody.result(broadcast).update == broadcast
    with pytest.raises(UserError, match="needs 'appu' of each client"):
        UploadMean(UploadSpec(aux={"appu": Aux()}), "train")


def test_what_a_client_update_does_not_declare_is_refused() -> None:
    broadcast = {"params": {"w": torch.zeros(2)}}
    one = torch.ones(())
    UploadSpec().check(Upload({"params": {"w": torch.ones(2)}, "stats": {}}, one), broadcast, "Mine")
    for upload, text in (
        (Upload({"more": {}}, one), "Mine sends update 'more', which it does not declare"),
        (Upload({}, one, {"appu": one}), "Mine sends aux 'appu', which it does not declare"),
        (Upload({"params": {"w": torch.ones(3)}}, one), "Mine sends 'params/w' as an update, but the broadcast has no"),
    ):
        with pytest.raises(UserError, match=text):
            UploadSpec().check(upload, broadcast, "Mine")


SUMS = [name for name in registry.names() if not registry.entry(name).individual_uploads]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in DISTINCT else [pytest.mark.nightly]) for name in SUMS]
)
def test_a_method_that_needs_no_single_upload_gets_along_with_the_mean(name):
    """With the weighted mean instead of every upload its server does the same, to rounding."""
    made, shared, plain = build_simulation(name, "both")
    _, _, summed = build_simulation(name, "both", aggregators=[Recorder(mean_for_all)])
    one = run_rounds(made, plain, start_server(made, shared), ROUNDS)
    two = run_rounds(made, summed, start_server(made, shared), ROUNDS)
    assert max_difference(two[-1].server, one[-1].server) < 1e-9


def test_semifl_needs_no_single_upload_where_clients_count_no_statistics():
    """With sbn 'server' a sum is enough, for its mean and to be private; a network without such statistics has none."""
    made = registry.make("semifl", {"threshold": 0.39, "sbn": "server"})
    shared = make_task(rounds=3)
    held = make_dataset(labels_at="server")
    recorder = Recorder(mean_for_all)
    plain = make_simulation(made, shared, held)
    summed = make_simulation(made, shared, held, aggregators=[recorder])
    one = run_rounds(made, plain, start_server(made, shared), ROUNDS)
    two = run_rounds(made, summed, start_server(made, shared), ROUNDS)
    assert max_difference(two[-1].server, one[-1].server) < 1e-9
    assert {requested.client_update for requested in recorder.seen} == {"train"}
    config = Config(method="semifl", labels_at="server", secure_aggregation=True, options={"sbn": "server"})
    assert build_method(config)
    assert build_method(replace(config, options={}, norm="group"))
    robust = replace(config, secure_aggregation=False, aggregation="median")
    assert build_method(robust)
    with pytest.raises(UserError, match="no robust rule checks; use norm 'group' or 'none', or sbn 'server'"):
        build_method(replace(robust, options={}))


def test_training_on_the_server_is_not_clipped():
    """Clients' updates are cut to nothing: what is left of a round of SemiFL is its fine-tuning, whole."""
    made = registry.make("semifl", {"threshold": 0.39, "sbn": "server", "server_momentum": 0.0})
    shared = make_task(rounds=1)
    first = start_server(made, shared)
    clipped = make_simulation(ClippedMethod(made, 1e-12), shared, make_dataset(labels_at="server"))
    (result,) = run_rounds(ClippedMethod(made, 1e-12), clipped, first, range(1))
    moved = max_difference(result.server["params"], first["params"])
    single = make_simulation(made, shared, make_dataset(labels_at="server"))
    single.open(0)
    single.query_server("census", first)  # each trip of a round has random numbers of its own
    single.query("train", first)
    tuned = single.query_server("fine-tune", {"params": first["params"], "stats": result.server["stats"]})
    assert moved > 1e-3
    assert max_difference(result.server["params"], tuned.update["params"]) < 1e-9


@dataclass(frozen=True)
class OtherGroups(FedRGD):
    """A method of somebody's own that begins with one of ours."""


class Undeclared:
    """A method that says nothing of itself."""


def test_custom_method_is_refused_unless_it_declares_a_sum():
    """What inherits from FedRGD needs single uploads as FedRGD does, and so does what declares nothing."""
    for made in (OtherGroups(), Undeclared()):
        assert requirements_of(made).aggregation == "individual"
        entry = registry.MethodEntry("other", "Other", "none", "a method of one's own", made)
        assert entry.individual_uploads == requirements_of(made).reason != ""
    assert requirements_of(FedAvg()).aggregation == "sum"


def test_catalog_lists_the_methods_that_need_single_uploads():
    """FedDure and FedAvg do not; the others are refused, with the reason, wherever only a sum is seen."""
    assert {"feddure", "fedavg", "fedavg-fixmatch", "fedloke", "fml"} <= set(SUMS)
    for name in set(registry.names()) - set(SUMS):
        entry = registry.entry(name)
        if entry.pooled:
            continue
        with pytest.raises(UserError, match="secure_aggregation cannot be used"):
            build_method(Config(method=name, labels_at=entry.label_locations[0], secure_aggregation=True))
