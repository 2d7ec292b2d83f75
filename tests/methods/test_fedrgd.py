"""FedRGD: averages of groups by hand, the groups, the server's copies, and where it is FedAvg."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from recording_methods import RecordingMethod
from torch import Tensor

from halfmoon.api.uploads import Upload
from halfmoon.core import tree
from halfmoon.core.optim import SGD
from halfmoon.core.tree import Tree
from halfmoon.engine.sampling import Batching
from halfmoon.federation.contract.small_federation import (
    CLASSES,
    make_dataset,
    make_simulation,
    make_task,
    max_difference,
    run_rounds,
    start_server,
    trees_equal,
)
from halfmoon.methods.fedavg import FedAvg
from halfmoon.methods.fedrgd import FedRGD, assign_groups, mean
from halfmoon.methods.objectives import FixMatch
from halfmoon.models import SmallCNN

GROUPED = SmallCNN(1, CLASSES, 4, "group")
"""With group normalization, as FedRGD has it."""

SURE = FixMatch(threshold=0.3)


def number(value: float) -> Tree:
    """Return a model of one weight."""
    return {"params": {"w": torch.tensor([value], dtype=torch.float64)}, "stats": {}}


class Answers:
    """A federation with scripted uploads, and with scripted copies of the server's model."""

    def __init__(self, uploads: dict[int, float], copies: list[float], asked: list[int] | None = None) -> None:
        self.uploads = uploads
        self.copies = copies
        self.labeled = len(copies)
        self.cohort = torch.tensor(sorted(asked or uploads))
        self.responders = torch.tensor(sorted(uploads))
        self.given: list[tuple[Tree, Tree | None]] = []

    def query(
        self, client_update: str, broadcast: Tree, per_client: Tree | None = None, clients: Tensor | None = None
    ) -> Upload:
        self.given.append((broadcast, per_client))
        upload = tree.stack([number(self.uploads[k]) for k in self.responders.tolist()])
        return Upload(upload, torch.arange(1.0, 1 + len(self.responders)))

    def query_server(self, client_update: str, broadcast: Tree) -> Upload:
        self.given.append((broadcast, None))
        return Upload(number(self.copies.pop(0)), torch.tensor(7.0))


def split(cohort: list[int], round: int) -> list[list[int]]:
    """Return the members of two groups."""
    group = assign_groups(cohort, round, 2)
    return [[k for k in cohort if group[k] == s] for s in (0, 1)]


def test_the_mean_of_group_means_by_hand():
    """Three clients: a pair that sends 1 and 3 and a single one that sends 6. Means 2 and 6, and of these 4.

    The plain mean would be 10 / 3, and one by rows yet another: groups and members count alike.
    """
    pair, single = sorted(split([0, 1, 2], 0), key=len, reverse=True)
    federation: Any = Answers({pair[0]: 1.0, pair[1]: 3.0, single[0]: 6.0}, [])
    new = FedRGD().round(make_task(), number(0.0), federation)
    assert new["params"]["w"].tolist() == pytest.approx([4.0])
    assert set(new) == {"params", "stats"}


def test_server_copies_join_their_groups_by_hand():
    """The same three clients, and copies of the server's model that return as 6 and 10.

    Group 0 gets the first. Pair and copy: (1 + 3 + c) / 3; single and copy: (6 + c) / 2; then their mean.
    """
    groups = split([0, 1, 2], 0)
    values = {groups[s][0]: 6.0 for s in (0, 1) if len(groups[s]) == 1}
    pair = max(groups, key=len)
    values |= {pair[0]: 1.0, pair[1]: 3.0}
    federation: Any = Answers(values, [6.0, 10.0])
    new = FedRGD().round(make_task(), number(5.0), federation)
    means = [
        (sum(values[k] for k in members) + copy) / (len(members) + 1)
        for members, copy in zip(groups, (6, 10), strict=True)
    ]
    assert new["params"]["w"].tolist() == pytest.approx([sum(means) / 2])
    downlinks = [float(broadcast["params"]["w"]) for broadcast, _ in federation.given]
    assert downlinks == [5.0, 5.0, 5.0]  # clients and both copies start from the server's model


def test_groups_are_given_back_by_hand():
    """With `return_group` the groups' means are retained, and a client starts from the one of the group it falls into next.

    A group of which nobody replies retains its model, and does not count in the mean over groups.
    """
    method = FedRGD(return_group=True)
    shared = make_task(rounds=5)
    server = method.start(shared, number(0.0))
    groups = split([0, 1, 2, 3], 0)
    values = dict(zip(groups[0] + groups[1], (1.0, 3.0, 6.0, 8.0), strict=True))
    federation: Any = Answers(values, [])
    server = method.round(shared.at(0), server, federation)
    assert server["groups"]["params"]["w"].flatten().tolist() == [2.0, 7.0]
    assert server["params"]["w"].tolist() == [4.5]
    assert method.solution(shared, server)["params"]["w"].tolist() == [4.5]

    later = split([0, 1, 2, 3], 1)
    federation = Answers({later[1][0]: 9.0, later[1][1]: 11.0}, [], [0, 1, 2, 3])
    new = method.round(shared.at(1), server, federation)
    ((broadcast, each),) = federation.given
    assert broadcast == {}
    assert each is not None
    expected = [2.0 if k in later[0] else 7.0 for k in range(4)]
    assert each["params"]["w"].flatten().tolist() == expected
    assert new["groups"]["params"]["w"].flatten().tolist() == [2.0, 10.0]
    assert new["params"]["w"].tolist() == [10.0]

    federation = Answers(values, [6.0, 8.0])  # where the server has labels, its copies start from the mean over groups
    method.round(shared.at(2), new, federation)
    assert [float(broadcast["params"]["w"]) for broadcast, _ in federation.given[1:]] == [10.0, 10.0]


def test_groups_are_equal_random_and_reproducible():
    """Sizes differ by one at most; a pair of ten clients falls into one group of two as often as chance has it.

    Of 9 others, 4 are in one's group: 4 / 9 = 0.444 of 2000 rounds, with a standard deviation of 0.011.
    """
    together = 0
    for round in range(2000):
        group = assign_groups(range(10), round, 2)
        assert sorted(group) == list(range(10))
        assert sum(group.values()) == 5
        together += group[3] == group[8]
    assert together / 2000 == pytest.approx(4 / 9, abs=4 * 0.0111)
    assert assign_groups(range(10), 7, 2) == assign_groups(range(10), 7, 2)
    assert sorted(assign_groups(range(7), 1, 3).values()) == [0, 0, 0, 1, 1, 2, 2]
    assert sorted(assign_groups([5], 1, 3).values()) == [0]
    assert mean([]) == {}


@pytest.mark.parametrize(("norm", "decay"), [("group", None), ("batch", None), ("batch", 0.9)])
def test_with_equal_groups_it_is_fedavg(norm, decay):
    """Four equal clients in two groups, labels at clients, one model for all: FedAvg with FixMatch, to rounding.

    So is its averaged teacher, where it has one.
    """
    held = make_dataset(((4, 8),) * 4)
    shared = make_task(SmallCNN(1, CLASSES, 4, norm), optimizer=SGD(0.05, momentum=0.5))
    objective = replace(SURE, decay=decay)
    actual = FedRGD(objective, keep_optimizer=True)
    expected_value = FedAvg(objective, keep_optimizer=True)
    server = start_server(actual, shared)
    one = run_rounds(actual, make_simulation(actual, shared, held, cohort=4), server, range(3))
    two = run_rounds(expected_value, make_simulation(expected_value, shared, held, cohort=4), server, range(3))
    for a, b in zip(one, two, strict=True):
        assert max_difference(a.server, b.server) < 1e-12
        assert max_difference(a.state["client"], b.state["client"]) < 1e-12
        assert a.report.cost == b.report.cost
        assert max_difference(actual.solution(shared, a.server), expected_value.solution(shared, b.server)) < 1e-12
    assert max_difference(one[-1].server, server) > 1e-2
    other = FedRGD(objective, keep_optimizer=True, groups=3)  # of two, one and one
    (first, *_) = run_rounds(other, make_simulation(other, shared, held, cohort=4), server, range(1))
    assert max_difference(first.server, one[0].server) > 1e-4


def test_return_group_changes_who_starts_where():
    """The first round is that of one model for all; from the second on clients start from two different models."""
    shared = make_task(GROUPED, optimizer=SGD(0.05))
    runs = []
    starts = []
    for back in (False, True):
        method = FedRGD(SURE, return_group=back)
        recording = RecordingMethod(method)
        runs.append(run_rounds(recording, make_simulation(recording, shared), start_server(method, shared), range(2)))
        starts.append(
            {float(broadcast["params"]["head"]["bias"][0]) for broadcast, _, _ in recording.list_calls("begin")[3:]}
        )
    assert max_difference(runs[1][0].server["params"], runs[0][0].server["params"]) < 1e-15
    assert [len(each) for each in starts] == [1, 2]
    groups = runs[1][0].server["groups"]["params"]["head"]["bias"][:, 0]
    assert starts[1] == set(groups.tolist())
    assert max_difference(runs[1][1].server["params"], runs[0][1].server["params"]) > 1e-6


def test_the_servers_copies_are_plain_training():
    """Labels at the server, clients that are confident of nothing: their models stay, and each copy is SGD on the labels.

    So w = (1/2) sum_s (w_s + |s| w_0) / (|s| + 1) with w_s by torch.autograd, |s| = 2 and 1.
    """
    method = FedRGD(FixMatch(threshold=1.01))
    held = make_dataset(labels_at="server")
    shared = make_task(GROUPED, optimizer=SGD(0.05))
    recording = RecordingMethod(method)
    server = start_server(method, shared)
    (result,) = run_rounds(
        recording, make_simulation(recording, shared, held, server_batching=Batching(6)), server, range(1)
    )
    steps = [batch for _, _, batch in recording.list_calls("step") if len(batch.x)]
    assert len(steps) == 2 * 3
    copies = []
    for half in (steps[:3], steps[3:]):
        flat = tree.flatten(server["params"])
        for batch in half:
            flat = {name: leaf.clone().requires_grad_() for name, leaf in flat.items()}
            loss = F.cross_entropy(GROUPED.predict(tree.unflatten(flat), {}, batch.x), batch.y)
            gradients = torch.autograd.grad(loss, list(flat.values()))
            flat = {name: leaf.detach() - 0.05 * g for (name, leaf), g in zip(flat.items(), gradients, strict=True)}
        copies.append(flat)
    sizes = [len(members) for members in split(result.report.cohort, 0)]
    assert sorted(sizes) == [1, 2]
    for name, leaf in tree.flatten(server["params"]).items():
        expected = sum((copy[name] + size * leaf) / (size + 1) for copy, size in zip(copies, sizes, strict=True)) / 2
        torch.testing.assert_close(tree.flatten(result.server["params"])[name], expected, rtol=1e-10, atol=1e-12)
    assert not trees_equal(tree.unflatten(copies[0]), tree.unflatten(copies[1]))  # each with minibatches of its own
    assert result.report.pseudo is not None
    assert result.report.pseudo["share_used"] == 0
