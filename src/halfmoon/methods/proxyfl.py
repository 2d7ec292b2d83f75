"""ProxyFL (CVPR 2026): the server tunes the averaged classifier with the clients' classifiers as class proxies.

Each row of the classifier is a proxy of its class. After averaging, the rows W of the global classifier are tuned, so
that W_c is the nearest row to every uploaded row r of class c: for `tuning_passes` passes over all rows of all clients,
in batches of `tuning_batch`, SGD on

    mean over the batch of CE(c, softmax_k(-|r - W_k| - margin [k = c])),

margin = min(100, the largest distance of a row of the average to its nearest neighbor). The clients' half is
`halfmoon.methods.objectives.icpl`; the tuning can follow any method that averages models.

server: as the inner method.  broadcast: as the inner method.  memory: as the inner method.  upload: as the inner
method; the server also uses every client's classifier from it.

If paper and code differ this file follows the code, including the margin: the paper contrasts each global row with
local rows. Departures: batches follow a hash of the round; clients with weight 0 do not take part in the tuning.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor

from halfmoon.api.method_entry import MethodEntry
from halfmoon.api.requirements import Requirements, requirements_of
from halfmoon.api.types import ClientUpdate, Federation, Method, Task
from halfmoon.api.upload_mean import average_stacked_uploads
from halfmoon.api.uploads import Upload, UploadSpec
from halfmoon.core import rng
from halfmoon.core.errors import check_minimum
from halfmoon.core.tensors import euclidean_norm
from halfmoon.core.tree import Tree
from halfmoon.methods.fedavg import FedAvg
from halfmoon.methods.objectives import FixMatch
from halfmoon.methods.objectives.icpl import ICPL
from halfmoon.methods.objectives.pseudo_labeling import refuse_average_teacher

MIN_DISTANCE = 1e-12
"""Smallest distance to divide by."""


@dataclass(frozen=True)
class ProxyTuning:
    """Global proxy tuning after each round of a method whose server tree and uploads have "params" with a "head".

    Attributes:
        method: the inner method; by default FedAvg of `ICPL`, which makes this ProxyFL.
        tuning_passes: passes over all clients' rows (the authors: 100, and 10 on CIFAR-100).
        tuning_lr: learning rate of the tuning.
        tuning_batch: rows in a batch of the tuning.
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
        inner = requirements_of(self.method, norm)
        reason = "the classifier is tuned with each client's classifier"
        return replace(inner, aggregation="individual", reason=reason, personal=True)

    def client_updates(self, task: Task) -> Mapping[str, ClientUpdate]:
        return self.method.client_updates(task)

    def start(self, task: Task, model: Tree) -> Tree:
        task.network.check_head_name("ProxyFL")
        return self.method.start(task, model)

    def round(self, task: Task, server: Tree, federation: Federation) -> Tree:
        """Run a round of the inner method, then tune the averaged classifier with the clients' classifiers (ProxyFL).

        Args:
            task: settings that all methods share: network, optimizer, rules for batch statistics.
            server: the inner method's state.
            federation: the clients of this round.

        Returns:
            The inner method's new state, with the tuned weight of the linear layer "head".
        """
        # The inner method queries the clients through this wrapper, which stores the classifiers that they upload.
        recorder = ClassifierRecorder(federation)
        new = self.method.round(task, server, cast(Federation, recorder))
        if not len(recorder.rows):
            return new
        head = new["params"]["head"]
        # On the CPU: thousands of tiny steps, and the same result on every device.
        tuned = tune_classifier(
            head["weight"].cpu(),
            recorder.rows.cpu(),
            passes=self.tuning_passes,
            lr=self.tuning_lr,
            batch=self.tuning_batch,
            generator=rng.generator(0, "proxy-tuning", task.round),
        )
        return {**new, "params": {**new["params"], "head": {**head, "weight": tuned.to(head["weight"])}}}

    def solution(self, task: Task, server: Tree) -> Tree:
        return self.method.solution(task, server)


class ClassifierRecorder:
    """A wrapper around a federation that stores the classifiers of the last uploads.

    Attributes:
        rows: classifiers of the clients with a weight above 0, (M, classes, features).
    """

    def __init__(self, federation: Federation) -> None:
        self._federation = federation
        self.rows = torch.zeros(0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._federation, name)

    def query(
        self, client_update: str, broadcast: Tree, per_client: Tree | None = None, clients: Tensor | None = None
    ) -> Upload:
        upload = self._federation.query(client_update, broadcast, per_client, clients)
        head = upload.update.get("params", {}).get("head")
        if head is not None:
            # The weights of the linear layer at clients that have trained, (M, classes, features).
            self.rows = head["weight"][(upload.weight > 0).to(head["weight"].device)]
        return upload

    def average(self, client_update: str, broadcast: Tree) -> Upload:
        # A federation may average without single uploads in memory; here they are needed.
        return average_stacked_uploads(self.query(client_update, broadcast), UploadSpec(), broadcast, client_update)


def tune_classifier(
    mean: Tensor, rows: Tensor, passes: int, lr: float, batch: int, generator: torch.Generator
) -> Tensor:
    """Tune the averaged classifier by SGD, so that each class's row is the nearest to that class's rows of all clients.

    This is the global proxy tuning of ProxyFL (CVPR 2026): a row of the last layer's weight is a "proxy" of its class.

    Args:
        mean: the averaged classifier's weight, (C classes, F features).
        rows: the weights of the classifiers of M clients, (M, C, F), whose M C rows are the training points.
        passes: passes over all M C rows.
        lr: learning rate.
        batch: rows in a batch.
        generator: shuffles the rows in each pass.

    Returns:
        The tuned classifier, (C, F).
    """
    classes, features = mean.shape
    # A row must be nearer to its class than to any other by this distance.
    margin = compute_margin(mean)
    points = rows.reshape(-1, features)
    labels = torch.arange(classes).repeat(len(rows))
    for _ in range(passes):
        for indices in torch.split(torch.randperm(len(points), generator=generator), batch):
            mean = mean - lr * compute_tuning_gradient(mean, points[indices], labels[indices], margin)
    return mean


def compute_margin(mean: Tensor) -> float:
    """Compute the largest distance of a row of the classifier (C, F) to its nearest neighbor, at most 100."""
    # The matrix-product mode of cdist is inexact for near rows, and its result depends on the machine.
    distances = torch.cdist(mean, mean, compute_mode="donot_use_mm_for_euclid_dist").fill_diagonal_(torch.inf)
    return min(100.0, float(distances.amin(-1).max())) if len(mean) > 1 else 0.0


def compute_tuning_gradient(mean: Tensor, points: Tensor, labels: Tensor, margin: float) -> Tensor:
    """Compute the gradient of ProxyFL's tuning loss in W in closed form.

    The loss is the mean over points r, of class c, of the cross-entropy of the logits z_k = -|r - W_k|, where z_c is
    reduced by the margin.

    Args:
        mean: the classifier W, (C, F).
        points: rows r of clients' classifiers, (b, F).
        labels: the points' classes c, (b,).
        margin: subtracted from the logit of the true class, so that its distance must be smaller by as much.

    Returns:
        The gradient in `mean`, (C, F).
    """
    difference = mean - points[:, None]  # (b, C, F)
    distance = euclidean_norm(difference, dim=-1)
    target = (labels[:, None] == torch.arange(len(mean))).to(mean.dtype)
    # The gradient of a cross-entropy in its logits is softmax - target. The logits are the negative distances, so the
    # gradient in the distances is target - softmax.
    distance_gradient = target - (-distance - margin * target).softmax(-1)
    # A distance of 0 has no gradient: the difference is 0, and 0 after the division too.
    unit = difference / distance.clamp_min(MIN_DISTANCE)[..., None]
    return (distance_gradient[..., None] * unit).mean(0)


ROWS = (
    MethodEntry("fixmatch-proxy-tuning", "FixMatch, global labels, proxy tuning", "ProxyFL, CVPR 2026, Table 4",
                "FixMatch-GPL with ProxyFL's tuning of the classifier at the server",
                ProxyTuning(FedAvg(FixMatch(teacher="global")))),
    MethodEntry("proxyfl", "ProxyFL", "ProxyFL, CVPR 2026", "features are drawn to proxies of the classes",
                ProxyTuning()),
)  # fmt: skip
