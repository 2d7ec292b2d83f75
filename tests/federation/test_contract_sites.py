"""What every federated method of the catalog has to keep over the network.

In a file of its behind `test_contract.py`, whose runs it compares with: one process runs both, and each once.
"""

import pytest
from test_contract import BATCHINGS, DISTINCT, in_turn, row_of, straight

from halfmoon.federation.contract import checks
from halfmoon.methods import registry

CASES = [
    # By default every third method: test_federation.py compares all of them over the application's messages.
    pytest.param(
        *case.values, marks=case.marks if DISTINCT.index(str(case.values[0])) % 3 == 0 else pytest.mark.nightly
    )
    for case in in_turn(BATCHINGS)
    if not registry.entry(str(case.values[0])).pooled
]


@pytest.mark.parametrize(("name", "rule"), CASES)
def test_sites_compute_what_a_simulation_computes(name: str, rule: str) -> None:
    """The server's tree after every round, what is reported and what is counted are equal in every bit."""
    checks.check_sites(row_of(name), rule, straight(name, rule))
