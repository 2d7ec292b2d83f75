"""FedDure with random numbers in place of F-reg's weights, for the ablation of results/feddure_table2.py."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from halfmoon.api.types import Batch, ClientUpdate, PseudoLabels, Task
from halfmoon.core.tree import Tree
from halfmoon.methods.feddure import FedDure, FedDureClient, Regulation, Student


@dataclass(frozen=True)
class RandomWeights(FedDure):
    """FedDure whose local model weighs each pseudo-label by a uniform random number (Eq. 6 and 7)."""

    def client_updates(self, task: Task) -> Mapping[str, ClientUpdate]:
        return {"train": RandomWeightsClient(task, self)}


@dataclass(frozen=True)
class RandomWeightsClient(FedDureClient):
    """The client of FedDure with random weights. Both regulators train as in FedDure, so d is the same kind of number."""

    def _regulate(
        self, carry: Tree, batch: Batch, student: Student, pseudo: PseudoLabels, strong: Tensor
    ) -> Regulation:
        regulation = super()._regulate(carry, batch, student, pseudo, strong)
        # Uniform in [0, 1): their mean is that of F-reg's weights at the start.
        return regulation._replace(weights=torch.rand_like(regulation.weights))


random_weights = RandomWeights()
