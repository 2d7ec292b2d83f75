"""What every federated method of the catalog has to keep over the network.

In a file of its own behind `test_contract.py`, whose runs it compares with: one process plays both, and each once.
"""

import pytest
from test_contract import BATCHINGS, DISTINCT, row_of, straight

from halfmoon.contract import checks
from halfmoon.methods import registry


@pytest.mark.parametrize("rule", list(BATCHINGS))
@pytest.mark.parametrize("name", [name for name in DISTINCT if not registry.entry(name).pooled])
def test_sites_compute_what_a_simulation_computes(name: str, rule: str) -> None:
    """The server's tree after every round, what is reported and what is counted are equal in every bit."""
    checks.check_sites(row_of(name), rule, straight(name, rule))
