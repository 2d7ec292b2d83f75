"""What the servers of most methods do with uploads."""

from __future__ import annotations

from halfmoon import tree
from halfmoon.tree import Tree


def average(up: Tree, server: Tree | None = None) -> Tree:
    """Return everything in the uploads (leaves (K, ...)), averaged with their "weight" (K,).

    Batch-normalization statistics are averaged like parameters (McMahan et al. 2017, Algorithm 1; FedDure's
    aggregation_content "all"). Where all weights are zero, nobody had anything to learn from: what `server` holds
    of the same names stays.
    """
    parts = {name: part for name, part in up.items() if name != "weight"}
    if server is not None and not bool(up["weight"].sum() > 0):
        return {name: server[name] for name in parts}
    return tree.weighted_mean(parts, up["weight"])
