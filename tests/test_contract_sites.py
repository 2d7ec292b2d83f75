"""What every federated method of the catalog has to keep over the network.

In a file of its own behind `test_contract.py`, whose runs it compares with: one process plays both, and each once.
"""

from __future__ import annotations

import pytest
from scenes import begin, same
from test_contract import BATCHINGS, ROUNDS, straight
from test_net import FEDERATED, federation


@pytest.mark.parametrize("rule", list(BATCHINGS))
@pytest.mark.parametrize("name", FEDERATED)
def test_sites_compute_what_a_simulation_computes(name: str, rule: str) -> None:
    """The server's tree after every round, what is reported and what is counted are equal in every bit."""
    method, shared, remote, _ = federation(name, rule)
    server = begin(method, shared)
    for number, there in zip(range(ROUNDS), straight(name, rule), strict=True):
        remote.open(number)
        server = method.round(remote.task, server, remote)
        report = remote.close()
        assert same(server, there.server)
        assert report.cohort == there.report.cohort
        assert report.cost == there.report.cost
        ours, theirs = ({key: [float(v) for v in s] for key, s in r.samples.items()} for r in (report, there.report))
        assert ours == theirs
        assert same(remote.state(), {"shelf": there.state["shelf"]})
