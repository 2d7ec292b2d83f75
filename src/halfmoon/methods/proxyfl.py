"""ProxyFL (CVPR 2026): the server tunes the averaged classifier against all clients' own, as proxies of the classes.

A row of the classifier stands for its class. After averaging, the rows W of the global classifier are tuned, so that
every uploaded row r of class c is nearest to W_c: for `tuning_passes` passes over all rows of all clients, in batches
of `tuning_batch`, SGD on

    mean over the batch of CE(c, softmax_k(-|r - W_k| - margin [k = c])),

margin = min(100, the largest distance of a row of the average to its nearest neighbor). The clients' half is
`halfmoon.methods.objectives.icpl`; the tuning can follow any method that averages models.

server: what the method inside keeps.  broadcast: the same as that one's.  memory: that one's.  upload: that one's; of
it the server uses every client's classifier.

Where paper and code differ this file follows the code, margin included: the paper contrasts each global row with local
rows. Departures: batches follow a hash of the round; a client that weighs nothing has no say.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor

from halfmoon.aggregation.mean import mean_of
from halfmoon.api.method_entry import MethodEntry
from halfmoon.api.requirements import Requirements, requirements_of
from halfmoon.api.types import ClientUpdate, Federation, Method, Task
from halfmoon.api.uploads import Upload, UploadSpec
from halfmoon.core import rng
from halfmoon.core.errors import check_minimum
from halfmoon.core.tensors import euclidean_norm
from halfmoon.core.tree import Tree
from halfmoon.methods.fedavg import FedAvg
from halfmoon.methods.objectives import FixMatch
from halfmoon.methods.objectives.icpl import ICPL
from halfmoon.methods.objectives.pseudo_labeling import refuse_average_teacher


@dataclass(frozen=True)
class ProxyTuning:
    """Global proxy tuning after each round of a method whose server tree and uploads have "params" with a "head".

    By default that is FedAvg of `ICPL`: ProxyFL. The authors pass 100 times (10 on CIFAR-100).
    """

    method: Method = field(default_factory=lambda: FedAvg(ICPL()))
    tuning_passes: int = 100
    tuning_lr: float = 0.005
    tuning_batch: int = 4

    def __post_init__(self) -> None:
        check_minimum(self, 0, "tuning_passes")
        check_minimum(self, 1, "tuning_batch")
        if isinstance(self.method, FedAvg):
            refuse_average_teacher("proxy tuning", self.method.objective)

    def requirements(self, norm: str) -> Requirements:
        inner, reason = requirements_of(self.method, norm), "the classifier is tuned against each client's own"
        return replace(inner, aggregation="individual", reason=reason, personal=True)

    def client_updates(self, task: Task) -> Mapping[str, ClientUpdate]:
        return self.method.client_updates(task)

    def start(self, task: Task, model: Tree) -> Tree:
        return self.method.start(task, model)

    def round(self, task: Task, server: Tree, federation: Federation) -> Tree:
        listener = Listener(federation)
        new = self.method.round(task, server, cast(Federation, listener))
        if not len(rows := listener.rows):
            return new
        head, g = new["params"]["head"], rng.generator(0, "proxy-tuning", task.round)
        tuned = tune(head["weight"].cpu(), rows.cpu(), self.tuning_passes, self.tuning_lr, self.tuning_batch, g)
        return {**new, "params": {**new["params"], "head": {**head, "weight": tuned.to(head["weight"])}}}

    def solution(self, task: Task, server: Tree) -> Tree:
        return self.method.solution(task, server)


class Listener:
    """A federation that keeps the classifiers of the last uploads."""

    def __init__(self, federation: Federation) -> None:
        self._federation = federation
        self.rows = torch.zeros(0)  # (M, classes, features)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._federation, name)

    def query(
        self, client_update: str, broadcast: Tree, per_client: Tree | None = None, clients: Tensor | None = None
    ) -> Upload:
        upload = self._federation.query(client_update, broadcast, per_client, clients)
        head = upload.update.get("params", {}).get("head")
        if head is not None:
            self.rows = head["weight"][(upload.weight > 0).to(head["weight"].device)]
        return upload

    def average(self, client_update: str, broadcast: Tree) -> Upload:
        return mean_of(self.query(client_update, broadcast), UploadSpec(), broadcast, client_update)


def tune(mean: Tensor, rows: Tensor, passes: int, lr: float, batch: int, generator: torch.Generator) -> Tensor:
    """Return the classifier (C, F), tuned from the `mean` against the clients' `rows` (M, C, F)."""
    classes, features = mean.shape
    margin = widest(mean)
    points, labels = rows.reshape(-1, features), torch.arange(classes).repeat(len(rows))
    for _ in range(passes):
        for part in torch.split(torch.randperm(len(points), generator=generator), batch):
            mean = mean - lr * slope(mean, points[part], labels[part], margin)
    return mean


def widest(mean: Tensor) -> float:
    """Return the margin: the largest distance of a row (C, F) to its nearest neighbor, at most 100."""
    apart = torch.cdist(mean, mean, compute_mode="donot_use_mm_for_euclid_dist").fill_diagonal_(torch.inf)
    return min(100.0, float(apart.amin(-1).max())) if len(mean) > 1 else 0.0


def slope(mean: Tensor, points: Tensor, labels: Tensor, margin: float) -> Tensor:
    """Return the gradient, in the rows `mean` (C, F), of the loss of points (b, F) with labels (b,)."""
    away = mean - points[:, None]  # (b, C, F)
    distance = euclidean_norm(away, dim=-1)
    own = (labels[:, None] == torch.arange(len(mean))).to(mean.dtype)
    pull = own - (-distance - margin * own).softmax(-1)
    unit = away / distance.clamp_min(1e-12)[..., None]  # where a point lies on a row, no direction is the nearest
    return (pull[..., None] * unit).mean(0)


ROWS = (
    MethodEntry("fixmatch-proxy-tuning", "FixMatch, global labels, proxy tuning", "ProxyFL, CVPR 2026, Table 4",
                "FixMatch-GPL with ProxyFL's tuning of the classifier at the server",
                ProxyTuning(FedAvg(FixMatch(teacher="global")))),
    MethodEntry("proxyfl", "ProxyFL", "ProxyFL, CVPR 2026", "features are drawn to proxies of the classes",
                ProxyTuning()),
)  # fmt: skip
