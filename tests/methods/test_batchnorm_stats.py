"""Static batch normalization: counted by hand, and against the batch statistics of `torch.nn.BatchNorm2d`."""

import pytest
import torch
from method_helpers import make_torch_module
from scripted_federation import OneWeightNetwork, ScriptedFederation, get_weight, make_one_weight_params
from torch import nn

from halfmoon.api.types import ClientData
from halfmoon.core import tree
from halfmoon.core.errors import UserError
from halfmoon.core.normalize import Normalize
from halfmoon.data.partition.split import SERVER
from halfmoon.federation.contract.small_federation import (
    CLASSES,
    SIZES,
    make_dataset,
    make_simulation,
    make_task,
    max_difference,
    start_server,
)
from halfmoon.methods.batchnorm_stats import BatchNormStatistics, estimate_statistics
from halfmoon.methods.heterofl import HeteroFL
from halfmoon.methods.semifl import SemiFL
from halfmoon.models import SmallCNN

AS_IS = Normalize((0.0,), (1 / 255,), torch.float64)
"""Pixels as they are, 0 to 255."""


def local(labeled: list[int], unlabeled: list[int]) -> ClientData:
    """Return a client whose images are these pixels."""
    x, u = (torch.tensor(each, dtype=torch.uint8).reshape(-1, 1, 1, 1) for each in (labeled, unlabeled))
    return ClientData(x, torch.zeros(len(x), dtype=torch.int64), u, torch.tensor(len(x)), torch.tensor(len(u)))


def counted(model: tree.Tree, holders: list[torch.Tensor], parts: int = 1) -> tree.Tree:
    """Return the statistics of images in (-1, 1), holder by holder: BatchNorm2d's own batch moments, by the row."""
    sums: dict[str, torch.Tensor] = {}
    rows = 0
    for images in holders:
        for part in (images.double() / 255 * 2 - 1).chunk(parts):
            oracle = make_torch_module(model)
            for module in oracle.modules():
                if isinstance(module, nn.BatchNorm2d):
                    module.momentum = 1.0  # retains the last batch alone
            oracle(part)
            rows += len(part)
            for name, buffer in oracle.named_buffers():
                if not name.endswith("tracked"):
                    sums[name] = sums.get(name, 0) + len(part) * buffer
    layers = {name.split(".")[0] for name in sums}
    return {
        layer: {"mean": sums[f"{layer}.norm.running_mean"] / rows, "var": sums[f"{layer}.norm.running_var"] / rows}
        for layer in layers
    }


def test_the_mean_of_two_clients_by_hand():
    """Pixels 0, 2 (labeled) and 10, 10, 10: means 1 and 10, unbiased variances 2 and 0.

    By the row (2 * 1 + 3 * 10) / 5 = 6.4 and (2 * 2 + 3 * 0) / 5 = 0.8; the 24.3 between the clients is no part of it.
    A server with the pixels 4, 6, 8 (mean 6, variance 4) makes it (32 + 18) / 8 = 6.25 and (4 + 12) / 8 = 2. A client
    without rows changes nothing.
    """
    shared = make_task(OneWeightNetwork(), normalize=AS_IS)
    held = {0: local([0, 2], []), 1: local([], [10, 10, 10]), 2: local([], []), SERVER: local([4, 6, 8], [])}

    def bn_statistics(broadcast, who):
        assert get_weight(broadcast["params"]) == 3
        client_update = BatchNormStatistics(shared)
        return [client_update.finish(broadcast, client_update.begin(broadcast, {}, held[k]), held[k])[0] for k in who]

    server = {"params": make_one_weight_params(3.0), "stats": {"pixel": {"mean": torch.zeros(1), "var": torch.ones(1)}}}
    message = ScriptedFederation({"census": bn_statistics}, clients=3, cohort=torch.tensor([1]))
    both = estimate_statistics(message, server, "all")["pixel"]
    assert [float(both["mean"]), float(both["var"])] == pytest.approx([6.25, 2.0])
    clients = estimate_statistics(message, server, "all", serving=False)["pixel"]
    assert [float(clients["mean"]), float(clients["var"])] == pytest.approx([6.4, 0.8])
    some = estimate_statistics(message, server, "cohort")["pixel"]
    assert [float(some["mean"]), float(some["var"])] == pytest.approx([48 / 6, 12 / 6])
    own = estimate_statistics(message, server, "server")["pixel"]
    assert [float(own["mean"]), float(own["var"])] == pytest.approx([6, 4])
    single = [[0], [1], [2]]  # a cohort of one: asked one by one
    assert [who for _, who in message.queries] == [*single, [SERVER], *single, [1], [SERVER], [SERVER]]


def test_without_rows_the_error_explains_what_to_do():
    """The server's rows are requested, and it has none."""
    server = {"params": make_one_weight_params(1.0), "stats": {"pixel": {"mean": torch.zeros(1), "var": torch.ones(1)}}}
    with pytest.raises(UserError, match="set sbn to 'all' or 'cohort'"):
        estimate_statistics(ScriptedFederation({}, labeled=0), server, "server")


@pytest.mark.parametrize("norm", ["group", "none"])
def test_network_without_statistics_sends_no_query(norm):
    """Nothing is sent and nothing returns, also where the empty tree has got lost on the way through a file."""
    model = start_server(SemiFL(), make_task(SmallCNN(1, CLASSES, 4, norm)))
    message = ScriptedFederation({})
    assert estimate_statistics(message, model, "all") == {}
    assert estimate_statistics(message, {"params": model["params"]}, "all") == {}
    assert message.queries == []


@pytest.mark.parametrize("executor", ["loop", "vmap"])
@pytest.mark.parametrize("over", ["all", "cohort", "server"])
def test_the_statistics_are_those_of_batch_norm_2d(executor, over):
    """Labels at the server, unequal clients, one of them empty: each holder's batch moments, weighted by its rows."""
    held = make_dataset((*SIZES[:3], (0, 0), (4, 9)), labels_at="server")
    method = SemiFL()
    shared = make_task()
    simulation = make_simulation(method, shared, held, executor=executor)
    model = start_server(method, shared)
    simulation.open(0)
    clients = {"all": range(5), "cohort": simulation.cohort.tolist(), "server": []}[over]
    assert len(clients) in (5, 3, 0)
    actual = estimate_statistics(simulation, model, over)
    holders = [held.client_data(k)[0].u for k in clients if k != 3] + [held.client_data(SERVER)[0].x]
    assert max_difference(actual, counted(model, holders)) < 1e-12
    rows = sum(len(images) for images in holders)
    cost = simulation.cost
    assert (cost.forward, cost.backward, cost.labeled_steps) == (rows, 0, 0)
    assert cost.bytes_down == len(clients) * tree.nbytes(model["params"])
    assert cost.bytes_up == len(clients) * (tree.nbytes(model["stats"]) + 8)


def test_labeled_and_unlabeled_rows_are_cut_into_equal_batches():
    """300 rows, 20 of them labeled: two batches of 150, the labeled rows in the first."""
    held = make_dataset(((20, 280),))
    method = HeteroFL()
    shared = make_task()
    simulation = make_simulation(method, shared, held, cohort=1)
    model = start_server(method, shared)
    simulation.open(0)
    data = held.client_data(0)[0]
    actual = estimate_statistics(simulation, model, "all", serving=False)
    assert max_difference(actual, counted(model, [torch.cat([data.x, data.u])], parts=2)) < 1e-12
    assert max_difference(actual, counted(model, [torch.cat([data.x, data.u])])) > 1e-6
