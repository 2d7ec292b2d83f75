"""Mean and spread of vectors, from sums over all clients: the partition into clients does not change them.

server: params, stats, head with center and scale.  broadcast: params, head, and zeros.  memory: none.  upload: weight 1,
and in place of the zeros sums in float64.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from halfmoon.api.requirements import Requirements
from halfmoon.api.types import ClientData, ClientUpdate, Federation, Task
from halfmoon.core.label_locations import ALL_LABEL_LOCATIONS
from halfmoon.core.tree import Tree
from halfmoon.methods.analytic import MeanSums, SumsUpdate, count_faults, sum_over_clients


@dataclass(frozen=True)
class SpreadSums(SumsUpdate):
    """Upload the number of vectors and the sum of their squared distances to the mean, by coordinate."""

    def sums(self, broadcast: Tree, data: ClientData) -> Tree:
        distances = self.unit(broadcast, torch.cat([data.x, data.u]))
        count = (data.labeled + data.unlabeled).to(distances.dtype)
        return {"count": count, "squares": distances.square().sum(0)}

    def faults(self, sums: Tree, labeled: int, unlabeled: int) -> Iterator[str]:
        yield from count_faults("count", float(sums["count"]), labeled + unlabeled)
        if float(sums["squares"].min()) < 0:
            yield "its sum of squares is negative"


@dataclass(frozen=True)
class Standardization:
    """Compute the mean of all clients' vectors and the factors with which their coordinates have equal variance.

    The factors are 1 / (standard deviation * sqrt(F)), so that a vector's mean squared distance to the mean is 1 for any
    number F of coordinates. A constant coordinate has the standard deviation 1, as in scikit-learn.

    The server's tree has "head" with "center" (F,) and "scale" (F,), float64.
    """

    def requirements(self, norm: str) -> Requirements:
        return Requirements(aggregation="sum", label_locations=ALL_LABEL_LOCATIONS, every_client=True)

    def client_updates(self, task: Task) -> Mapping[str, ClientUpdate]:
        return {"mean": MeanSums(task), "spread": SpreadSums(task)}

    def start(self, task: Task, model: Tree) -> Tree:
        center = model["params"]["head"]["center"]
        return {**model, "head": {"center": center, "scale": torch.ones_like(center)}}

    def round(self, task: Task, server: Tree, federation: Federation) -> Tree:
        """Compute mean and scale of all clients' feature vectors: query the mean, then squared distances to it.

        The scale is the factor of each coordinate that gives all the same variance, so that a classifier can be trained
        on the vectors. One query of sums and sums of squares would be enough in exact arithmetic; two avoid the
        cancellation of large means.

        Args:
            task: settings that all methods share: network, optimizer, rules for batch statistics.
            server: the server's state; "head" gets "center" (F,) and "scale" (F,), float64.
            federation: the clients of this round.
        """
        sums = sum_over_clients(MeanSums(task), "mean", server, federation)
        count = sums["count"]
        center = sums["q"] / count
        server = {**server, "head": {**server["head"], "center": center}}
        variance = sum_over_clients(SpreadSums(task), "spread", server, federation)["squares"] / count
        # A variance that is only the rounding error of equal values: the bound of scikit-learn's `StandardScaler`. There
        # the deviation is 1, so that a constant coordinate becomes 0.
        epsilon = torch.finfo(variance.dtype).eps
        is_constant = variance <= count * epsilon * variance + (count * center * epsilon).square()
        deviation = torch.where(is_constant, 1.0, variance.sqrt())
        # Divided by the root of F, vectors have a mean squared length of 1, whatever F is.
        return {**server, "head": {"center": center, "scale": 1 / (deviation * len(deviation) ** 0.5)}}

    def solution(self, task: Task, server: Tree) -> Tree:
        return {"params": server["params"], "stats": server["stats"]}
