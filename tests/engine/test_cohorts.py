"""Cohorts of very many clients: the same draws as a permutation of all."""

import weakref
from dataclasses import replace

import pytest
import torch
from scenes import begin, dataset, simulate, task

from halfmoon.aggregation.mean import UploadMean
from halfmoon.api.uploads import Aux, Uplink, Upload
from halfmoon.core import tree
from halfmoon.core.errors import UserError
from halfmoon.engine.runtime import first_of_permutation
from halfmoon.methods.fedavg import FedAvg


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
    method, shared, held = FedAvg(), task(), dataset()
    simulation, alive, seen = simulate(method, shared, held, cohort=4), weakref.WeakSet[torch.Tensor](), list[int]()

    def watched(function, items):
        def counted(program):
            seen.append(len(alive))
            results = function(program)
            for result in results.values():
                alive.add(next(tree.leaves(result.up.update)))
            return results

        return map(counted, items)

    local_clients = simulation.local_clients
    local_clients.training = replace(local_clients.training, spread=watched)
    simulation.open(0)
    method.round(simulation.task, begin(method, shared), simulation)
    assert seen == [0, 0, 0, 0]


def test_a_mean_reduces_what_goes_beside_as_it_is_declared() -> None:
    """(1 * 2 + 3 * 6) / 4 = 5; sums add up; what the server needs of each client cannot be averaged; nobody weighs."""
    uplink = Uplink(aux={"share": Aux("mean"), "moments": Aux("sum", "statistic")})
    mean, down = UploadMean(uplink, "train"), {"params": {"w": torch.tensor([7.0])}}
    for value, weight in ((2.0, 1.0), (6.0, 3.0), (99.0, 0.0)):
        leaf = torch.tensor([value])
        mean.add(Upload({"params": {"w": leaf}}, torch.tensor(weight), {"share": leaf, "moments": weight * leaf}))
    got = mean.result(down)
    assert (got.update["params"]["w"].tolist(), float(got.weight)) == ([5.0], 4.0)
    assert (got.aux["share"].tolist(), got.aux["moments"].tolist()) == ([5.0], [20.0])
    nobody = UploadMean(Uplink(), "train")
    nobody.add(Upload({"params": {"w": torch.tensor([1.0])}}, torch.tensor(0.0)))
    assert nobody.result(down).update == down
    with pytest.raises(UserError, match="needs 'appu' of each client"):
        UploadMean(Uplink(aux={"appu": Aux()}), "train")


def test_what_a_client_update_does_not_declare_is_refused() -> None:
    down = {"params": {"w": torch.zeros(2)}}
    one = torch.ones(())
    Uplink().check(Upload({"params": {"w": torch.ones(2)}, "stats": {}}, one), down, "Mine")
    for up, said in (
        (Upload({"more": {}}, one), "Mine sends update 'more', which it does not declare"),
        (Upload({}, one, {"appu": one}), "Mine sends aux 'appu', which it does not declare"),
        (Upload({"params": {"w": torch.ones(3)}}, one), "Mine sends 'params/w' as an update, but nothing"),
    ):
        with pytest.raises(UserError, match=said):
            Uplink().check(up, down, "Mine")
