"""What the servers of most methods do with uploads."""

from __future__ import annotations

from halfmoon import tree
from halfmoon.tree import Tree


def average(up: Tree) -> Tree:
    """Return the model {"params", "stats"} averaged over uploads with their "weight" (K,).

    Batch-normalization statistics are averaged like parameters (McMahan et al. 2017, Algorithm 1; FedDure's
    aggregation_content "all").
    """
    return tree.weighted_mean({"params": up["params"], "stats": up["stats"]}, up["weight"])
