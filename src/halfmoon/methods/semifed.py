"""SemiFed (Lin, Lou, Xiong and Shahabi 2021): unlabeled images get a permanent label once enough models agree on it.

At every step a client learns from labels, and its prediction on an image augmented by RandAugment is drawn to its
prediction on the image without augmentation:

    loss = mean CE(y, f(x)) + unlabeled_weight * mean KL(p(u) || p(strong(u))),    p(u) detached.

Every `interval` rounds the server sends the clients' last uploaded models together with the global model. An image on
which enough of these models agree, each with a confidence of at least `threshold`, is accepted: from then on it counts
in the first mean and no longer in the second.

server: params, stats; on its state store the last models of up to `peers` clients.  broadcast: params, stats, in
labeling rounds also peers, leaves (n, ...): n + 1 models, all of whose bytes are counted.  memory: labels (U,), -1
without one, and a hash of the rows they belong to.  upload: params, stats, weight (|labeled| + |unlabeled|).

There is no public code, and the paper itself was not available: this file follows its abstract and descriptions in
other papers. Not verified, hence options: `threshold` and its change over the rounds (`threshold_last`), `agree`,
`interval`, `unlabeled_weight`, and whether all models or only those that agree have to be confident (`confident`). Up
to `peers` models are sent: those of all of ten clients, else the latest ones. The receiver's last model is among them.
The batch rule sets the size of a labeled minibatch: accepted images are not added to it, but used when they are drawn
among the unlabeled ones. Their view is `view`, which in the paper is the image without augmentation.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any, ClassVar, Literal

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
from halfmoon.methods.objectives.base import cross_entropy_per_image, label_weights, predict_all_rows
from halfmoon.methods.objectives.thresholding import NO_LABEL, recall_row_labels
from halfmoon.models import forward


@dataclass(frozen=True)
class SemiFed(ModelAveraging):
    """SemiFed; no default is verified.

    Attributes:
        threshold: confidence that a vote needs in the first round.
        threshold_last: confidence that a vote needs in the last round, linearly interpolated; None: `threshold`.
        agree: share of the models that have to vote for one class, above 0.
        confident: "agreeing" counts confident votes only; "all" accepts an image only if every model is confident.
        interval: images are labeled in every `interval`-th round.
        peers: largest number of clients' models that are sent.
        unlabeled_weight: weight of the consistency loss.
        view: view that is labeled, and that strong views are drawn to.

    Raises:
        UserError: for `interval` below 1, negative `peers`, or `agree` of 0 or less.
    """

    uses_class_weights: ClassVar[bool] = True

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
        return {"train": SemiFedClient(task, self, self._is_labeling_round(task))}

    def round(self, task: Task, server: Tree, federation: Federation) -> Tree:
        """Let the cohort label (in a labeling round) and train, average, and store the cohort's models."""
        broadcast = {"params": server["params"], "stats": server.get("stats", {})}
        peers = self._last_models(federation, broadcast) if self._is_labeling_round(task) else []
        upload = federation.query("train", {**broadcast, "peers": tree.stack(peers)} if peers else broadcast)
        if self.peers:
            self._store_models(federation, task.round, upload)
        return average_uploads(upload, broadcast)

    def threshold_in(self, task: Task) -> float:
        """Compute the confidence that a vote needs in the task's round."""
        last = self.threshold if self.threshold_last is None else self.threshold_last
        return self.threshold + (last - self.threshold) * task.round / max(1, task.rounds - 1)

    def _is_labeling_round(self, task: Task) -> bool:
        return (task.round + 1) % self.interval == 0

    def _last_models(self, federation: Federation, like: Tree) -> list[Tree]:
        """Load the last models of up to `peers` clients, with the sections of `like`."""
        models = [federation.state_store.get(f"model-{slot}") for slot in range(self.peers)]
        return [{name: model.get(name, {}) for name in like} for model in models if model is not None]

    def _store_models(self, federation: Federation, round: int, upload: Upload) -> None:
        """Store the uploaded models of a round in up to `peers` slots of the server's state store.

        A client overwrites its previous model; a new client overwrites the oldest model.

        Args:
            federation: with the state store, and the clients that responded.
            round: the round, from 0.
            upload: the models of these clients, leaves (k, ...).
        """
        state_store = federation.state_store
        no_slots = torch.full((self.peers,), -1)
        # "book" stores for each slot the client whose model it has, and the round of that model; -1 if it is empty.
        slots = state_store.get("book") or {"client": no_slots, "round": no_slots}
        clients = slots["client"].tolist()
        rounds = slots["round"].tolist()
        for k, client in enumerate(to_ints(federation.responders)):
            slot = clients.index(client) if client in clients else rounds.index(min(rounds))
            clients[slot] = client
            rounds[slot] = round
            state_store.put(f"model-{slot}", tree.index(upload.update, k))
        state_store.put("book", {"client": torch.tensor(clients), "round": torch.tensor(rounds)})


@dataclass(frozen=True)
class SemiFedClient(ClientUpdate):
    """The client of SemiFed: it labels images in a labeling round (`labels`), then it trains."""

    options: SemiFed = SemiFed()
    labels: bool = False

    @property
    def requirements(self) -> UpdateRequirements:
        view = self.options.view
        return UpdateRequirements(
            (view, "strong"),
            precomputed_views=(view,) if self.labels else (),
            masks_padding=True,
            row_memory={"labels": NO_LABEL},
        )

    def initial_memory(self, broadcast: Tree, generator: torch.Generator) -> Tree:
        device = next(tree.leaves(broadcast["params"])).device
        no_rows = torch.zeros(0, dtype=torch.int64, device=device)
        return {"labels": no_rows, "mark": torch.zeros((), dtype=torch.float64, device=device)}

    def begin(self, broadcast: Tree, memory: Tree, data: ClientData) -> Tree:
        labels, row_hash = recall_row_labels({"label": memory["labels"], "mark": memory["mark"]}, data)
        if self.labels:
            accepted = self._vote(broadcast, data)
            # Labels of earlier votes are permanent.
            labels = torch.where(labels == NO_LABEL, accepted, labels)
        return {**super().begin(broadcast, memory, data), "labels": labels, "mark": row_hash}

    def step(self, broadcast: Tree, carry: Tree, batch: Batch) -> tuple[Tree, StepMetrics]:
        gradient, loss, (moments, pseudo) = grad_and_value(self._loss, carry["params"], carry, batch)
        return self.optimizer_step(carry, gradient, moments), StepMetrics(loss, samples={}, pseudo=pseudo)

    def finish(self, broadcast: Tree, carry: Tree, data: ClientData) -> tuple[Upload, Tree]:
        upload, _ = super().finish(broadcast, carry, data)
        return upload, {"labels": carry["labels"], "mark": carry["mark"]}

    def passes(self, labeled: int, unlabeled: int) -> Passes:
        forward, backward = super().passes(labeled, unlabeled)
        return Passes(forward + (unlabeled if self.task.labeling == "running" else 0), backward)

    def images_outside_steps(self, labeled: int, unlabeled: int) -> int:
        return unlabeled * (1 + self.options.peers) if self.labels else 0

    def _vote(self, broadcast: Tree, data: ClientData) -> Tensor:
        """Label the client's images by a vote of the global model and other clients' models (SemiFed).

        Args:
            broadcast: the global model, and "peers" with leaves (n, ...): other clients' models, if any were sent.
            data: the client's U unlabeled images.

        Returns:
            The class for which enough models vote, or -1, (U,).
        """
        options = self.options
        images = data.views[options.view]
        peers = broadcast.get("peers", {"params": {}, "stats": {}})
        peer_count = next((len(leaf) for leaf in tree.leaves(peers["params"])), 0)
        models = [broadcast, *(tree.index(peers, k) for k in range(peer_count))]
        confidences: list[Tensor] = []
        labels: list[Tensor] = []
        for model in models:
            logits = predict_all_rows(self.task, model["params"], model["stats"], images, data.u_real)
            model_confidence, model_label = logits.softmax(-1).max(-1)
            confidences.append(model_confidence)
            labels.append(model_label)
        label = torch.stack(labels)
        confident = torch.stack(confidences) >= options.threshold_in(self.task)
        class_numbers = torch.arange(self.task.network.classes, device=label.device)
        ballots = label[..., None] == class_numbers  # (models, U, classes)
        if options.confident == "agreeing":
            ballots = ballots & confident[..., None]
        votes, winner = ballots.sum(0).max(-1)
        # Rounding first: 0.55 * 20 is slightly above 11 in floating point, and 11 votes must be enough.
        accepted = votes >= ceil(round(options.agree * len(models), 9))
        if options.confident == "all":
            accepted = accepted & confident.all(0)
        return torch.where(accepted, winner, NO_LABEL)

    def _loss(self, params: Tree, carry: Tree, batch: Batch) -> tuple[Tensor, tuple[Any, ...]]:
        """Compute SemiFed's loss: cross-entropy of labeled and accepted images, and consistency of the others.

        An unlabeled image is accepted, with a permanent label, once enough clients' models agree on it. Of the others
        the prediction on the strong view is drawn to that on the view that the option `view` names, called plain here.

        Args:
            params: parameters of the network, in which the loss is differentiated.
            carry: state of the client update; "labels" has the label of each accepted image and -1 for others.
            batch: labeled images x, labels y, views u of unlabeled images; x_real and u_real mask padding.

        Returns:
            The loss (), and (batch statistics, pseudo-labels).
        """
        network = self.task.network
        view = batch.u[self.options.view]
        groups = (batch.x, view, batch.u["strong"])
        joint = self.task.statistics == "joint"
        (labeled, plain, strong), _, moments = forward(network, params, joint, groups, real=batch.masks(views=2))
        target = plain.detach()
        if self.task.labeling == "running":  # predict under running statistics instead of the batch's
            with torch.no_grad():
                target = network.predict(params, carry["stats"], view).detach()
        stored = carry["labels"][batch.u_rows]
        is_accepted = padding.mask((stored != NO_LABEL).to(plain.dtype), batch.u_real)
        # Images that are not accepted learn from consistency.
        is_unlabeled = padding.mask(1 - is_accepted, batch.u_real)
        label_sum = self._sum_labeled_losses(labeled, batch)
        # Rows without a label (-1) get class 0 for the lookup; their loss is then multiplied by 0.
        accepted_losses = cross_entropy(plain, stored.clamp_min(0), reduction="none") * is_accepted
        count = padding.count(batch.x, batch.x_real) + is_accepted.sum()
        supervised = (label_sum + accepted_losses.sum()) / count.clamp_min(1)
        consistency = (divergence(target, strong) * is_unlabeled).sum() / is_unlabeled.sum().clamp_min(1)
        confidence, predicted = target.softmax(-1).max(-1)
        pseudo = PseudoLabels(torch.where(is_accepted > 0, stored, predicted), confidence, is_accepted)
        return supervised + self.options.unlabeled_weight * consistency, (moments, (pseudo,))

    def _sum_labeled_losses(self, logits: Tensor, batch: Batch) -> Tensor:
        """Sum the cross-entropy of the labeled images of a minibatch, (); padding is left out.

        It is a sum, as SemiFed's mean is over labeled and accepted images together.

        Args:
            logits: logits of the labeled images, (n, classes).
            batch: the minibatch, with their labels and the mask of padding.
        """
        if self.task.class_weights:
            weights = padding.mask(label_weights(self.task.class_weights, batch.y, logits), batch.x_real)
            return (cross_entropy_per_image(logits, batch.y) * weights).sum()
        if batch.x_real is not None:
            losses = cross_entropy_per_image(logits, batch.y)
            return losses @ batch.x_real.to(losses.dtype)
        if not len(batch.x):
            # The product with 0 keeps the loss a function of the parameters, so that it has a gradient.
            return logits.sum() * 0.0
        return F.cross_entropy(logits, batch.y, reduction="sum")


ROWS = (
    MethodEntry("semifed", "SemiFed", "Lin et al. 2021",
                "consistency, and permanent labels for images on which enough clients' models agree", SemiFed()),
)  # fmt: skip
