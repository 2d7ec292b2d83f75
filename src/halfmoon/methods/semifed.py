"""SemiFed (Lin, Lou, Xiong and Shahabi 2021): unlabeled images get a label for good once enough models agree on it.

At every step a client learns from labels, and its prediction on an image that RandAugment has changed follows that on
the image itself:

    loss = mean CE(y, f(x)) + unlabeled_weight * mean KL(p(u) || p(strong(u))),    p(u) detached.

Every `interval` rounds the server sends, beside the global model, the models that its clients sent last. A client's
image on which enough of them agree, each with a confidence of `threshold` or more, joins its labeled images: from
then on the first mean runs over it too and the second no longer does.

server: params, stats; on its state store the last models of up to `peers` clients.  broadcast: params, stats, in
labeling rounds also peers, leaves (n, ...): n + 1 models, all of whose bytes are counted.  memory: labels (U,), -1
where there is none, and a mark of the rows they belong to.  upload: params, stats, weight (|labeled| + |unlabeled|).

There is no public code, and the paper itself could not be had: this file follows its abstract and what others write of
it. Not verified, hence options: `threshold` and how it moves over the rounds (`threshold_last`), `agree`, `interval`,
`unlabeled_weight`, and whether all models or those that agree have to be confident (`confident`). With ten clients all
models are sent (`peers`); of more clients, the models sent last are. The receiver's own last model is one of them.
A labeled minibatch is as large as the batch rule says: accepted images are learned from where they are drawn, among the
unlabeled ones. They are looked at in the view `view`, which in the paper is the image itself.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from halfmoon.api.method_entry import MethodEntry
from halfmoon.api.requirements import Requirements
from halfmoon.api.types import (
    Batch,
    ClientData,
    ClientUpdate,
    Federation,
    Passes,
    PseudoLabels,
    StepMetrics,
    Task,
    UpdateRequirements,
)
from halfmoon.api.uploads import Upload
from halfmoon.core import padding, tree
from halfmoon.core.autodiff import cross_entropy, grad_and_value
from halfmoon.core.errors import UserError
from halfmoon.core.tensors import to_ints
from halfmoon.core.tree import Tree
from halfmoon.methods.averaging import ModelAveraging, average_uploads
from halfmoon.methods.mutual import divergence
from halfmoon.methods.objectives.base import cross_entropy_per_image, predict_all_rows
from halfmoon.methods.objectives.thresholding import NO_LABEL, recall_row_labels
from halfmoon.models import forward


@dataclass(frozen=True)
class SemiFed(ModelAveraging):
    """SemiFed; no default is verified.

    `threshold` is the confidence that a vote needs, moving in a straight line to `threshold_last` in the last round
    (None: it stays); `agree` the share of the models that have to name one class. `confident`: "agreeing" counts
    confident votes alone, "all" accepts an image only if every model is confident of its own vote. `peers` is how
    many clients' models go out at most. Raises `UserError` for a share or a count that cannot be.
    """

    threshold: float = 0.95
    threshold_last: float | None = None
    agree: float = 0.8
    confident: Literal["agreeing", "all"] = "agreeing"
    interval: int = 10
    peers: int = 10
    unlabeled_weight: float = 1.0
    view: Literal["plain", "weak"] = "plain"

    def __post_init__(self) -> None:
        if self.interval < 1 or self.peers < 0:
            raise UserError(
                f"SemiFed labels every {self.interval} rounds with {self.peers} peers: interval has to be at least 1, "
                "peers at least 0."
            )
        if self.agree <= 0:
            raise UserError(f"SemiFed's agree is {self.agree}: it is the share of models, above 0, at most 1.")

    def requirements(self, norm: str) -> Requirements:
        reason = "clients are sent the models of single other clients"
        return Requirements(reason=reason, personal=True, period=self.interval)

    def client_updates(self, task: Task) -> Mapping[str, ClientUpdate]:
        return {"train": Growing(task, self, self._labels(task))}

    def round(self, task: Task, server: Tree, federation: Federation) -> Tree:
        """Let the cohort train, after labeling in a labeling round, and average; keep who sent what."""
        broadcast = {"params": server["params"], "stats": server.get("stats", {})}
        peers = self._last_models(federation, broadcast) if self._labels(task) else []
        upload = federation.query("train", {**broadcast, "peers": tree.stack(peers)} if peers else broadcast)
        if self.peers:
            self._put(federation, task.round, upload)
        return average_uploads(upload, broadcast)

    def threshold_in(self, task: Task) -> float:
        """Return the confidence that a vote needs in the task's round."""
        last = self.threshold if self.threshold_last is None else self.threshold_last
        return self.threshold + (last - self.threshold) * task.round / max(1, task.rounds - 1)

    def _labels(self, task: Task) -> bool:
        return (task.round + 1) % self.interval == 0

    def _last_models(self, federation: Federation, like: Tree) -> list[Tree]:
        """Return the models that up to `peers` clients sent last, each with the names of `like`."""
        models = [federation.state_store.get(f"model-{place}") for place in range(self.peers)]
        return [{name: model.get(name, {}) for name in like} for model in models if model is not None]

    def _put(self, federation: Federation, round: int, upload: Upload) -> None:
        """Keep the uploads of those who answered: a newcomer takes the oldest's place."""
        state_store, nobody = federation.state_store, torch.full((self.peers,), NO_LABEL)
        book = state_store.get("book") or {"client": nobody, "round": nobody}
        client, when = book["client"].tolist(), book["round"].tolist()
        for k, number in enumerate(to_ints(federation.responders)):
            place = client.index(number) if number in client else when.index(min(when))
            client[place], when[place] = number, round
            state_store.put(f"model-{place}", tree.index(upload.update, k))
        state_store.put("book", {"client": torch.tensor(client), "round": torch.tensor(when)})


@dataclass(frozen=True)
class Growing(ClientUpdate):
    """The client of SemiFed: label, in a round in which it `labels`, then train."""

    options: SemiFed = SemiFed()
    labels: bool = False

    @property
    def requirements(self) -> UpdateRequirements:
        view = self.options.view
        sweep = (view,) if self.labels else ()
        return UpdateRequirements(
            (view, "strong"), precomputed_views=sweep, masks_padding=True, row_memory={"labels": NO_LABEL}
        )

    def initial_memory(self, broadcast: Tree, generator: torch.Generator) -> Tree:
        device = next(tree.leaves(broadcast["params"])).device
        none = torch.zeros(0, dtype=torch.int64, device=device)
        return {"labels": none, "mark": torch.zeros((), dtype=torch.float64, device=device)}

    def begin(self, broadcast: Tree, memory: Tree, data: ClientData) -> Tree:
        labels, mark = recall_row_labels({"label": memory["labels"], "mark": memory["mark"]}, data)
        if self.labels:
            accepted = self._vote(broadcast, data)
            labels = torch.where(labels == NO_LABEL, accepted, labels)
        return {**super().begin(broadcast, memory, data), "labels": labels, "mark": mark}

    def step(self, broadcast: Tree, carry: Tree, batch: Batch) -> tuple[Tree, StepMetrics]:
        gradient, loss, (moments, pseudo) = grad_and_value(self._loss, carry["params"], carry, batch)
        return self.advance(carry, gradient, moments), StepMetrics(loss, {}, pseudo)

    def finish(self, broadcast: Tree, carry: Tree, data: ClientData) -> tuple[Upload, Tree]:
        upload, _ = super().finish(broadcast, carry, data)
        return upload, {"labels": carry["labels"], "mark": carry["mark"]}

    def passes(self, labeled: int, unlabeled: int) -> Passes:
        forward, backward = super().passes(labeled, unlabeled)
        return Passes(forward + (unlabeled if self.task.labeling == "running" else 0), backward)

    def images_outside_steps(self, labeled: int, unlabeled: int) -> int:
        return unlabeled * (1 + self.options.peers) if self.labels else 0

    def _vote(self, broadcast: Tree, data: ClientData) -> Tensor:
        """Return for each row (U,) the class that enough models name, or -1."""
        o, images = self.options, data.views[self.options.view]
        peers = broadcast.get("peers", {"params": {}, "stats": {}})
        count = next((len(leaf) for leaf in tree.leaves(peers["params"])), 0)
        models = [broadcast, *(tree.index(peers, k) for k in range(count))]
        logits = [predict_all_rows(self.task, each["params"], each["stats"], images, data.u_real) for each in models]
        guesses = [each.softmax(-1).max(-1) for each in logits]
        confidence, label = (torch.stack([each[part] for each in guesses]) for part in (0, 1))
        sure = confidence >= o.threshold_in(self.task)
        names = torch.arange(self.task.network.classes, device=label.device)
        for_class = label[..., None] == names
        mask = for_class & sure[..., None] if o.confident == "agreeing" else for_class
        votes, winner = mask.sum(0).max(-1)
        accepted = votes >= ceil(round(o.agree * len(models), 9))
        if o.confident == "all":
            accepted = accepted & sure.all(0)
        return torch.where(accepted, winner, NO_LABEL)

    def _loss(self, params: Tree, carry: Tree, batch: Batch) -> tuple[Tensor, tuple[Any, ...]]:
        """Return the loss, and (moments, pseudo-labels)."""
        network, view, strong = self.task.network, batch.u[self.options.view], batch.u["strong"]
        joint = self.task.statistics == "joint"
        (labeled, plain, loud), _, moments = forward(
            network, params, joint, (batch.x, view, strong), real=batch.masks(2)
        )
        target = plain.detach()
        if self.task.labeling == "running":
            with torch.no_grad():
                target = network.predict(params, carry["stats"], view).detach()
        stored = carry["labels"][batch.u_rows]
        has = padding.mask((stored != NO_LABEL).to(plain.dtype), batch.u_real)
        without = padding.mask(1 - has, batch.u_real)
        own = F.cross_entropy(labeled, batch.y, reduction="sum") if len(batch.x) else labeled.sum() * 0.0
        own = own if batch.x_real is None else cross_entropy_per_image(labeled, batch.y) @ batch.x_real.to(own.dtype)
        accepted = cross_entropy(plain, stored.clamp_min(0), reduction="none") * has
        taught = (own + accepted.sum()) / (padding.count(batch.x, batch.x_real) + has.sum()).clamp_min(1)
        apart = divergence(target, loud)
        consistent = (apart * without).sum() / without.sum().clamp_min(1)
        confidence, guess = target.softmax(-1).max(-1)
        pseudo = PseudoLabels(torch.where(has > 0, stored, guess), confidence, has)
        return taught + self.options.unlabeled_weight * consistent, (moments, (pseudo,))


ROWS = (
    MethodEntry("semifed", "SemiFed", "Lin et al. 2021",
                "consistency, and labels for good where enough clients' models agree", SemiFed()),
)  # fmt: skip
