"""FedMatch (Jeong et al., ICLR 2021): parameters in two parts, and pseudo-labels voted on with similar clients' models.

Each kernel is theta = sigma + psi: sigma learns from labels, psi from unlabeled images, neither from the other's loss.
A client first takes a step on L_s(sigma) = labeled_weight CE(y, f(x)), then one on

    L_u(psi) = consistency_weight (1/H) sum_j KL(p_j || p) + unlabeled_weight CE(label, f(strong))
               + l2_weight ||sigma - psi||^2 + l1_weight ||psi||_1,

over images on which the client's prediction p(un-augmented u) is confident (max p >= threshold). Helper j predicts p_j
with another client's psi and the client's received sigma. `label` is the majority vote of the client and its helpers.
The server sends the H nearest of all clients that have trained so far, by the distance of their predictions on one
fixed noise image. In rounds without helpers the first term is absent and the label is the client's prediction. Labels
are at clients or at the server. In the second case the server trains sigma at the beginning of a round (as in the
authors' code), and clients upload psi only.

server: sigma, psi, stats; on its state store the psi and the embedding of every client that has trained.  broadcast:
sigma, psi, stats, every `interval` rounds with helpers (H psi and a mask of those that exist).  memory: sigma, psi as
the server last received them; the state of adaptive thresholds.  upload: sigma (with labels), psi, stats, embedding
(C floats), the numbers of changed entries.

Bytes: an entry is sent if it differs by more than `delta_threshold` from the receiver's value (the paper's sparse
communication), as 4 bytes of index and its value. A tree of which more than half has changed is sent without indices.
Entries that are not sent are not used either. Traffic is counted in this wire format; the paper reports shares of
parameters.

Departures from the authors' code:
- Biases and normalizations belong to sigma: the authors' networks have neither (`norm` "none"; there sigma and psi are
  all parameters).
- The noise is embedded by the client, as the server does not know the size of images. It is an image of whole-number
  pixels, which is then normalized like any other.
- sigma is averaged over the clients with labels; in the authors' two scenarios all clients have some, or none.
- Downloads below the threshold are left out; in the authors' code, all server weights then overwrite them. Uploaded
  entries of psi are cut at `l1_threshold`; in the code, entries that changed are uploaded uncut. A client's first
  download is counted in full.
- Learning rates follow the task; the authors' fall to a third when a client's validation loss stops improving. At
  1 / (2 l2_weight), plain SGD sets psi to sigma in one step, and from twice that it diverges.
- For labels at the server the authors set l1_weight, l1_threshold and delta_threshold to 1e-5.

SemiFL's tables have another version: `halfmoon.methods.semifl`, `fedmatch-semifl`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any, ClassVar, Literal, cast

import numpy as np
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
    weighted_metric,
)
from halfmoon.api.uploads import Aux, Upload, UploadSpec
from halfmoon.core import padding, tree
from halfmoon.core.autodiff import grad_and_value
from halfmoon.core.errors import check_minimum
from halfmoon.core.label_locations import ALL_LABEL_LOCATIONS
from halfmoon.core.tensors import euclidean_norm, normal_cdf, normal_quantile, tensor_from_numpy, to_ints
from halfmoon.core.tree import Tree
from halfmoon.methods.averaging import average_uploads
from halfmoon.methods.mutual import divergence
from halfmoon.methods.objectives.base import (
    compute_mean_prediction,
    debias_logits,
    labeled_cross_entropy,
    predict_all_rows,
    predict_with_teacher,
)
from halfmoon.methods.objectives.thresholding import Rule, Threshold, unused_threshold_options
from halfmoon.models import forward, track
from halfmoon.models.network import kernels

INDEX_BYTES = 4
"""Size of the index of an entry that is sent separately."""

NOISE_MEAN = 125
NOISE_DEVIATION = 125
"""Mean and standard deviation of the pixels of the noise image, before they are truncated to 0..255."""


@dataclass(frozen=True)
class FedMatch:
    """FedMatch; the defaults are those of the authors' code for labels at clients (the paper's threshold is 0.85).

    Attributes:
        helpers: number of helper models, H.
        interval: helpers are sent in every `interval`-th round, for that round only; 1 sends them in every round.
        threshold: confidence from which a pseudo-label is used.
        labeled_weight: weight of the labeled loss.
        consistency_weight: weight of the divergence from the helpers' predictions.
        unlabeled_weight: weight of the cross-entropy on pseudo-labels.
        l2_weight: weight of ||sigma - psi||^2.
        l1_weight: weight of ||psi||_1.
        l1_threshold: entries of psi up to this size are set to 0 in uploads and in the solution.
        delta_threshold: change from which an entry is sent; None sends full trees and stores none at the client.
        psi_start: psi starts as the initial kernels times this factor, sigma as the initial kernels.
        view: view of an unlabeled image that is pseudo-labeled.
        mean: the first two terms of L_u are means over the confident images ("used") or over all ("all").
        ties: class that wins among equally many votes: the "first" by number (the authors' code) or the client's "own".
        debias: divide the client's prediction by its mean over the client's rows (FedDPL, FedDB Eq. 14) before it votes
            and before the threshold.
        thresholding: rule that adapts the threshold.
        threshold_decay: decay of the running means that some rules use.

    Raises:
        UserError: for negative `helpers` or an `interval` below 1.
    """

    uses_class_weights: ClassVar[bool] = True

    helpers: int = 2
    interval: int = 10
    threshold: float = 0.75
    labeled_weight: float = 10.0
    consistency_weight: float = 1e-2
    unlabeled_weight: float = 1e-2
    l2_weight: float = 10.0
    l1_weight: float = 1e-4
    l1_threshold: float = 5e-6
    delta_threshold: float | None = 5e-5
    psi_start: float = 0.2
    view: Literal["plain", "weak"] = "plain"
    mean: Literal["all", "used"] = "used"
    ties: Literal["first", "own"] = "first"
    debias: bool = False
    thresholding: Rule = "fixed"
    threshold_decay: float = 0.999

    @property
    def unused_options(self) -> dict[str, str]:
        """List the options that have no effect beside the others, each with the reason (`registry.unused_options`)."""
        return unused_threshold_options(self.thresholding)

    @property
    def rule(self) -> Threshold:
        """Build the rule that selects the pseudo-labels that are used."""
        return Threshold(self.thresholding, self.threshold, self.threshold_decay)

    def __post_init__(self) -> None:
        check_minimum(self, 0, "helpers")
        check_minimum(self, 1, "interval")

    def requirements(self, norm: str) -> Requirements:
        reason = "the two halves of the parameters are weighted differently, and helpers are single clients' models"
        return Requirements(reason=reason, label_locations=ALL_LABEL_LOCATIONS, personal=True, period=self.interval)

    def client_updates(self, task: Task) -> Mapping[str, ClientUpdate]:
        return {
            "train": FedMatchClient(task, self, self._helpers_in_round(task)),
            "serve": FedMatchServerUpdate(task, self),
        }

    def start(self, task: Task, model: Tree) -> Tree:
        psi = tree.map(lambda leaf: leaf * self.psi_start, kernels(model["params"]))
        return {"sigma": model["params"], "psi": psi, "stats": model["stats"]}

    def round(self, task: Task, server: Tree, federation: Federation) -> Tree:
        """Run a round of FedMatch (ICLR 2021): average sigma, learned from labels, and psi, from pseudo-labels.

        The network's parameters are sigma + psi. If the server has labels it first trains sigma on them ("serve"). Every
        few rounds, clients also get the psi of the clients with the most similar models ("helpers"): models are similar
        if their predictions on one noise image, the uploaded embeddings, are.

        Args:
            task: settings that all methods share: network, optimizer, rules for batch statistics.
            server: the server's state: "sigma", "psi" and "stats".
            federation: the clients of this round.

        Returns:
            The server's new state.
        """
        broadcast = {"sigma": server["sigma"], "psi": server["psi"], "stats": server.get("stats", {})}
        if federation.labeled:
            broadcast = {**broadcast, **federation.query_server("serve", broadcast).update}
        per_client = None
        if self._helpers_in_round(task):
            per_client = self._nearest_helpers(broadcast["psi"], federation)
        upload = federation.query("train", broadcast, per_client)
        if self.helpers:
            # For `_nearest_helpers` in later rounds.
            for index, client in enumerate(to_ints(federation.responders)):
                federation.state_store.put(f"psi-{client}", tree.index(upload.update["psi"], index))
                federation.state_store.put(f"embedding-{client}", {"vector": upload.aux["embedding"][index]})
        # sigma counts for clients with labels only, psi and the statistics for all.
        sigma_of_labeled = Upload({"sigma": upload.update["sigma"]}, weight=upload.aux["labels"])
        sigma = average_uploads(sigma_of_labeled, broadcast)
        psi_and_stats = {name: upload.update[name] for name in ("psi", "stats")}
        return {**sigma, **average_uploads(upload._replace(update=psi_and_stats))}  # weight 1 for each client

    def solution(self, task: Task, server: Tree) -> Tree:
        params = add_halves(server["sigma"], zero_small_entries(server["psi"], self.l1_threshold))
        return {"params": params, "stats": server.get("stats", {})}

    def _helpers_in_round(self, task: Task) -> int:
        """Compute the number of helpers that are sent in the task's round: all or none."""
        return 0 if (task.round + 1) % self.interval else self.helpers

    def _nearest_helpers(self, psi: Tree, federation: Federation) -> Tree:
        """Collect the helpers of each client of the cohort: the psi of the H clients with the nearest embeddings.

        Args:
            psi: the server's psi, for the shapes.
            federation: its state store has each client's last psi and embedding.

        Returns:
            "helpers": psi, leaves (K, H, ...), zeros for missing helpers; "there": 1 for those that exist, (K, H).
        """
        state_store = federation.state_store
        embeddings: dict[int, Tensor] = {}
        for key in state_store.keys():  # noqa: SIM118
            if key.startswith("embedding-"):
                # A stored key has a tree: `or {}` is for the type checker only.
                embeddings[int(key.removeprefix("embedding-"))] = (state_store.get(key) or {})["vector"]
        missing = tree.zeros_like(psi)
        trees: list[Tree] = []
        exists: list[list[float]] = []
        for client in to_ints(federation.cohort):
            neighbors = nearest_clients(embeddings, client, self.helpers)
            helpers = [state_store.get(f"psi-{neighbor}") or missing for neighbor in neighbors]
            # All clients get H trees, so that the cohort's can be stacked.
            trees.append(tree.stack(helpers + [missing] * (self.helpers - len(helpers))))
            exists.append([float(k < len(helpers)) for k in range(self.helpers)])
        exists_mask = torch.tensor(exists).to(next(tree.leaves(psi)))
        return {"helpers": tree.stack(trees), "there": exists_mask}


def nearest_clients(embeddings: dict[int, Tensor], client: int, count: int) -> list[int]:
    """List the clients whose embeddings are nearest to those of `client`, by Euclidean distance.

    Args:
        embeddings: for each client that has trained, its model's prediction on a fixed noise image, (classes,).
        client: the client whose neighbors are wanted.
        count: the largest number of neighbors.

    Returns:
        Clients, the nearest first, ties by number; empty for a client without an embedding.
    """
    if client not in embeddings:
        return []
    distances: dict[int, float] = {}
    for candidate, embedding in embeddings.items():
        if candidate != client:
            distances[candidate] = float(euclidean_norm(embedding - embeddings[client]))
    return sorted(distances, key=lambda candidate: (distances[candidate], candidate))[:count]


@dataclass(frozen=True)
class FedMatchServerUpdate(ClientUpdate):
    """The server's training: sigma on its labels.

    broadcast: sigma, psi, stats.  memory: none.  upload: sigma, stats.
    """

    options: FedMatch = FedMatch()

    @property
    def requirements(self) -> UpdateRequirements:
        return UpdateRequirements(masks_padding=True, upload_spec=UploadSpec(update=("sigma", "stats")))

    def begin(self, broadcast: Tree, memory: Tree, data: ClientData) -> Tree:
        return {
            "sigma": broadcast["sigma"],
            "stats": broadcast["stats"],
            "optimizer": self.task.optimizer.init(broadcast["sigma"]),
        }

    def step(self, broadcast: Tree, carry: Tree, batch: Batch) -> tuple[Tree, StepMetrics]:
        new, loss = take_labeled_step(self.task, self.options.labeled_weight, carry, broadcast["psi"], batch)
        return new, StepMetrics(loss, samples={}, pseudo=())

    def finish(self, broadcast: Tree, carry: Tree, data: ClientData) -> tuple[Upload, Tree]:
        return Upload({"sigma": carry["sigma"], "stats": carry["stats"]}, (data.labeled > 0).double()), {}


@dataclass(frozen=True)
class FedMatchClient(ClientUpdate):
    """The client of FedMatch in a round with `helpers` helpers: sigma's step, then psi's."""

    options: FedMatch = FedMatch()
    helpers: int = 0

    @property
    def requirements(self) -> UpdateRequirements:
        """Data that FedMatch's client needs from the engine, and the content of its upload.

        Besides the model (sigma + psi) it uploads an embedding, by which the server finds similar clients, a mark whether
        it has labels, and the number of entries that changed, of which the cost of sparse communication is counted.
        """
        options = self.options
        # The mean prediction of all images is needed to debias, and by some rules of the confidence threshold.
        predicts_all_rows = options.debias or options.rule.needs_all_rows
        # What the server accepts as values: a "mark" is 0 or 1, a "count" a whole number.
        aux = {"embedding": Aux(), "labels": Aux(values="mark"), "changed": Aux(values="count")}
        upload_spec = UploadSpec(update=("sigma", "psi", "stats"), weight="one", aux=aux)
        return UpdateRequirements(
            views=(options.view, "strong"),
            precomputed_views=(options.view,) if predicts_all_rows else (),
            masks_padding=True,
            row_memory=options.rule.row_memory,
            upload_spec=upload_spec,
        )

    def initial_memory(self, broadcast: Tree, generator: torch.Generator) -> Tree:
        """Create the state that a client of FedMatch stores: adaptive thresholds, and the model that it last uploaded.

        With sparse communication (`delta_threshold`) only changes of that model are sent.

        Args:
            broadcast: the tree that the server sent, for shapes and dtypes.
            generator: unused: the state has no random numbers.
        """
        psi_leaf = next(tree.leaves(broadcast["psi"]))
        thresholds_state = self.options.rule.initial_memory(self.task.network.classes, psi_leaf)
        thresholds = {"thresholds": thresholds_state} if thresholds_state else {}
        if self.options.delta_threshold is None:
            return thresholds
        model = {name: tree.zeros_like(broadcast[name]) for name in ("sigma", "psi")}
        # "met" is 1 from the second update on: before it, the zeros are not a model that the client has received.
        met = torch.zeros((), dtype=torch.float64, device=psi_leaf.device)
        return {**thresholds, **model, "met": met}

    def begin(self, broadcast: Tree, memory: Tree, data: ClientData) -> Tree:
        """Build the state of a client update: the received halves, their optimizers, and the thresholds.

        FedMatch's parameters are sigma, trained on labels, plus psi, trained on pseudo-labels. With sparse communication
        the received model is the one that the client stores, with the entries replaced that differ by more than
        `delta_threshold`.

        Args:
            broadcast: "sigma", "psi" and "stats" of the server.
            memory: the state that the client stored after its last update; "met" is 0 before the first one.
            data: the client's images.

        Returns:
            The carry, with the number of entries that the client was sent in "changed", and with "prior", the mean
            prediction of all its images, if an option needs it.
        """
        received = {name: broadcast[name] for name in ("sigma", "psi")}
        # A first contact sends all entries: the threshold -1 counts each of them as changed.
        changed = {name: count_changes(half, half, -1.0) for name, half in received.items()}
        if "met" in memory:
            # Both outcomes are computed and one is selected: a branch on a tensor would forbid vmap over clients.
            met = memory["met"] > 0
            patch_counts = {name: count_changes(memory[name], half, self._delta) for name, half in received.items()}
            patched = {name: apply_changes(memory[name], half, self._delta) for name, half in received.items()}
            changed = tree.select(met, patch_counts, changed)
            received = tree.select(met, patched, received)
        carry = {**received, "received": received, "changed": changed, "stats": broadcast["stats"]}
        carry["optimizer"] = self.task.optimizer.init(received["sigma"])
        carry["psi_optimizer"] = self.task.optimizer.init(received["psi"])
        rule = self.options.rule
        carry["thresholds"] = {} if rule.needs_all_rows else rule.begin(memory.get("thresholds", {}), data)
        if self.requirements.precomputed_views:
            views = data.views[self.options.view]
            params = add_halves(**received)
            logits = predict_all_rows(self.task, params, broadcast["stats"], views, data.u_real)
            carry["prior"] = compute_mean_prediction(logits, data.u_real)
            if rule.needs_all_rows:
                logits = debias_logits(logits, carry["prior"]) if self.options.debias else logits
                carry["thresholds"] = rule.begin({}, data, logits.softmax(-1))
        return carry

    def step(self, broadcast: Tree, carry: Tree, batch: Batch) -> tuple[Tree, StepMetrics]:
        """Take a step of sigma on the labeled images, if there are any, then a step of psi on the unlabeled ones.

        The parameters of FedMatch's network are sigma + psi.

        Args:
            broadcast: the tree that the server sent, with the helpers' psi.
            carry: state of the client update: sigma and psi with their optimizers' states, thresholds, statistics.
            batch: labeled images x, labels y, views u of unlabeled images; x_real and u_real mask padding.

        Returns:
            The new carry, and the sum of both losses with the pseudo-labels.
        """
        labeled_loss = torch.zeros((), dtype=next(tree.leaves(carry["psi"])).dtype, device=batch.u_rows.device)
        if len(batch.x):
            trained, labeled_loss = take_labeled_step(
                self.task, self.options.labeled_weight, carry, carry["psi"], batch
            )
            # A minibatch of padding only must not move sigma, not even by momentum or weight decay.
            carry = trained if batch.x_real is None else tree.select(batch.x_real.any(), trained, carry)
        helper_logits, helper_exists = self._query_helpers(broadcast, carry, batch)
        gradient, unlabeled_loss, aux = grad_and_value(
            self._loss, carry["psi"], carry, batch, helper_logits, helper_exists
        )
        moments, pseudo, samples, thresholds = aux
        psi, optimizer = self.task.optimizer.step(carry["psi"], gradient, carry["psi_optimizer"])
        stats = reduce(track, moments, carry["stats"])
        new = {"psi": psi, "psi_optimizer": optimizer, "stats": stats, "thresholds": thresholds}
        return {**carry, **new}, StepMetrics(labeled_loss + unlabeled_loss, samples=samples, pseudo=pseudo)

    def finish(self, broadcast: Tree, carry: Tree, data: ClientData) -> tuple[Upload, Tree]:
        """Build the upload and the state that the client stores.

        The parameters are sigma + psi (halves). The upload has both as trained, but with entries that changed by at most
        `delta_threshold` as they were received; the prediction on a fixed noise image as the client's embedding, by which
        the server compares clients; and the number of entries that were sent down to the client and up from it.

        Args:
            broadcast: the tree that the server sent, with the helpers' psi in rounds with helpers.
            carry: state of the client update after its last step.
            data: the client's images and labels.
        """
        received = carry["received"]
        labels = (data.labeled > 0).double()
        new = {"sigma": carry["sigma"], "psi": zero_small_entries(carry["psi"], self.options.l1_threshold)}
        down_counts = dict(carry["changed"])
        if self.helpers:
            helpers = [tree.index(broadcast["helpers"], k) for k in range(self.helpers)]
            counts = [count_changes(received["psi"], helper, self._delta) for helper in helpers]
            down_counts["helpers"] = torch.stack(counts)
        up_counts = {name: count_changes(received[name], new[name], self._delta) for name in new}
        halves = {name: apply_changes(received[name], new[name], self._delta) for name in new}
        image = self.task.normalize(draw_noise_image(data.u)).to(data.u.device)
        embedding = self.task.network.predict(add_halves(**halves), carry["stats"], image)[0].softmax(-1)
        aux = {"embedding": embedding, "labels": labels, "changed": {"down": down_counts, "up": up_counts}}
        memory = {} if self.options.delta_threshold is None else {**halves, "met": torch.ones_like(labels)}
        if self.options.rule.has_memory:
            memory = {"thresholds": carry["thresholds"], **memory}
        upload = Upload({**halves, "stats": carry["stats"]}, weight=torch.ones_like(labels), aux=aux)
        return upload, memory

    def passes(self, labeled: int, unlabeled: int) -> Passes:
        # The pseudo-labeled view is differentiated for the helpers' term, or because it shares the strong view's pass.
        shared = self.task.labeling == "batch" and self.task.statistics == "joint"
        differentiated = 2 if self.helpers or shared else 1
        return Passes(labeled + (2 + self.helpers) * unlabeled, labeled + differentiated * unlabeled)

    def images_outside_steps(self, labeled: int, unlabeled: int) -> int:
        # The noise image, and all unlabeled rows if they are predicted once.
        return 1 + (unlabeled if self.requirements.precomputed_views else 0)

    def traffic(self, broadcast: Tree, upload: Upload) -> tuple[int, int]:
        """Count the bytes that are sent to a client and back, with changed entries only (FedMatch's sparse updates).

        Args:
            broadcast: the tree that the server sent; "helpers" has the psi of similar clients, and "there" is 1 for
                those that exist, 0 for padding.
            upload: the client's upload, with the numbers of changed entries.

        Returns:
            Bytes to the client, bytes from the client.
        """
        counts = upload.aux["changed"]
        down_bytes = tree.nbytes(broadcast["stats"])
        for name in ("sigma", "psi"):
            down_bytes += self._wire_bytes(broadcast[name], counts["down"][name])
        for k in range(self.helpers):
            if broadcast["there"][k] > 0:
                down_bytes += self._wire_bytes(tree.index(broadcast["helpers"], k), counts["down"]["helpers"][k])
        up_bytes = tree.nbytes(upload.update["stats"]) + upload.aux["embedding"].nbytes
        # Without labels sigma has not changed, and the server ignores it.
        trained = ("sigma", "psi") if upload.aux["labels"] > 0 else ("psi",)
        for name in trained:
            up_bytes += self._wire_bytes(upload.update[name], counts["up"][name])
        return down_bytes, up_bytes

    @property
    def _delta(self) -> float:
        """Change above which an entry is sent; -1 sends all."""
        return -1.0 if self.options.delta_threshold is None else self.options.delta_threshold

    def _wire_bytes(self, full: Tree, count: Tensor) -> int:
        """Count the bytes of `count` entries of a tree, each with an index, or of the full tree if that is less."""
        entry_bytes = tree.nbytes(full) // tree.numel(full) + INDEX_BYTES
        return min(tree.nbytes(full), int(count) * entry_bytes)

    def _loss(
        self, psi: Tree, carry: Tree, batch: Batch, helper_logits: Tensor | None, helper_exists: Tensor | None
    ) -> tuple[Tensor, tuple[Any, ...]]:
        """Compute FedMatch's unlabeled loss: divergence from helpers, cross-entropy on voted labels, penalties on psi.

        Helpers are models of similar clients, which the server sent in this round. On the label of an image the client's
        prediction on the plain view and theirs vote; the strong view is trained on it. The network is sigma + psi.

        Args:
            psi: the half of the parameters in which the loss is differentiated.
            carry: state of the client update; sigma is a constant here, so that unlabeled images do not train it.
            batch: labeled images x, labels y, views u of unlabeled images; x_real and u_real mask padding.
            helper_logits: logits of the helper models, (H, b, classes); None in a round without helpers.
            helper_exists: 1 for helpers that exist, 0 for missing ones, (H,).

        Returns:
            The loss (), and (batch statistics, pseudo-labels, metrics, state of the thresholds).
        """
        options = self.options
        strong, plain, moments = self._outputs(add_halves(carry["sigma"], psi), carry["stats"], batch)
        target = debias_logits(plain.detach(), carry["prior"]) if options.debias else plain.detach()
        (label, confidence, used), thresholds = options.rule.pseudo_label(
            target.softmax(-1), batch.u_rows, carry["thresholds"], batch.u_real
        )
        # `used` is 1 for images whose confidence passes the threshold, else 0.
        image_losses = torch.zeros_like(used)
        if helper_logits is not None and helper_exists is not None:
            share = helper_exists / helper_exists.sum().clamp_min(1)
            image_losses = options.consistency_weight * (share[:, None] * divergence(helper_logits, plain)).sum(0)
            label = vote_on_labels(
                label, helper_logits.argmax(-1), helper_exists, classes=helper_logits.shape[-1], ties=options.ties
            )
        image_losses = image_losses + options.unlabeled_weight * F.cross_entropy(strong, label, reduction="none")
        count = used.sum().clamp_min(1) if options.mean == "used" else padding.count(used, batch.u_real)
        squared_distance = tree.squared_norm(tree.map(torch.sub, psi, carry["sigma"]))
        absolute_sum = tree.sum_scalars(leaf.abs().sum() for leaf in tree.leaves(psi))
        penalty = options.l2_weight * squared_distance + options.l1_weight * absolute_sum
        pseudo = (PseudoLabels(label, confidence, used),)
        loss = (image_losses * used).sum() / count + penalty
        return loss, (moments, pseudo, {"penalty": weighted_metric(penalty)}, thresholds)

    def _outputs(self, params: Tree, stats: Tree, batch: Batch) -> tuple[Tensor, Tensor, list[Tree]]:
        """Run the network on the strong view of unlabeled images, and on the view that is pseudo-labeled.

        Only the divergence from the helpers differentiates the pseudo-labeled view; without helpers no graph is
        recorded for that view.

        Args:
            params: parameters of the network.
            stats: running batch-norm statistics.
            batch: the minibatch of b unlabeled images.

        Returns:
            Logits (b, classes) of the strong view, those of the pseudo-labeled view, and the passes' batch statistics.
        """
        network = self.task.network
        joint = self.task.statistics == "joint"
        strong_images = batch.u["strong"]
        plain_images = batch.u[self.options.view]
        masks = batch.masks(views=2)[1:]  # without the mask of the labeled images
        if self.task.labeling == "running":
            # Pseudo-labels under running statistics need an evaluation pass of their own.
            (strong_logits,), _, moments = forward(network, params, joint, (strong_images,), real=masks[:1])
            with torch.set_grad_enabled(bool(self.helpers)):
                return strong_logits, network.predict(params, stats, plain_images), moments
        if self.helpers:
            both = (strong_images, plain_images)
            (strong_logits, plain_logits), _, moments = forward(network, params, joint, both, real=masks)
        else:
            (strong_logits,), (plain_logits,), moments = forward(
                network, params, joint, differentiated=(strong_images,), detached=(plain_images,), real=masks
            )
        return strong_logits, plain_logits, moments

    @torch.no_grad()
    def _query_helpers(self, broadcast: Tree, carry: Tree, batch: Batch) -> tuple[Tensor | None, Tensor | None]:
        """Run the helper models (psi of similar clients, with this client's sigma) on the unlabeled images.

        Args:
            broadcast: the tree that the server sent, with the helpers' psi.
            carry: state of the client update, with the received halves.
            batch: the minibatch of b unlabeled images.

        Returns:
            Logits (H, b, classes), and 1 for helpers that exist, 0 for missing ones (H,); None in rounds without them.
        """
        if not self.helpers:
            return None, None
        view = batch.u[self.options.view]
        received = carry["received"]
        # Helpers are sent sparsely, too: the client's received psi has the entries that are not sent.
        helpers = apply_changes(received["psi"], broadcast["helpers"], self._delta)
        logits: list[Tensor] = []
        for k in range(self.helpers):
            params = add_halves(received["sigma"], tree.index(helpers, k))
            logits.append(predict_with_teacher(self.task, params, carry["stats"], view, batch.u_real))
        return torch.stack(logits), broadcast["there"].to(view.dtype)


def add_halves(sigma: Tree, psi: Tree) -> Tree:
    """Join the two halves of FedMatch's parameters: sigma + psi for kernels, sigma for biases and normalizations."""
    params: Tree = {}
    for name, node in sigma.items():
        if isinstance(node, dict):
            params[name] = add_halves(cast(Tree, node), psi.get(name, {}))
        else:
            params[name] = node + psi[name] if name in psi else node
    return params


def zero_small_entries(psi: Tree, threshold: float) -> Tree:
    """Set the entries of psi whose absolute value is at most `threshold` to 0."""
    return tree.map(lambda leaf: torch.where(leaf.abs() <= threshold, 0.0, leaf), psi)


def apply_changes(old: Tree, new: Tree, threshold: float) -> Tree:
    """Replace the entries of `old` that differ from `new` by more than `threshold`, or where the difference is NaN."""
    # `<=` is False for NaN: a diverged model reaches the other side instead of disappearing.
    return tree.map(lambda a, b: torch.where((b - a).abs() <= threshold, a, b), old, new)


def count_changes(old: Tree, new: Tree, threshold: float) -> Tensor:
    """Count the entries that `apply_changes` replaces, () float64."""
    pairs = zip(tree.leaves(old), tree.leaves(new), strict=True)
    return tree.sum_scalars((~((b - a).abs() <= threshold)).sum().double() for a, b in pairs)


def take_labeled_step(task: Task, weight: float, carry: Tree, psi: Tree, batch: Batch) -> tuple[Tree, Tensor]:
    """Take an optimizer step of sigma on FedMatch's labeled loss, weight * CE(y, f(x; sigma + psi)).

    Args:
        task: settings that all methods share: network, optimizer, rules for batch statistics.
        weight: weight of the loss.
        carry: state of the update, with "sigma", its optimizer's state, and running statistics.
        psi: the other half of the parameters, which is not changed.
        batch: labeled images x, labels y, views u of unlabeled images; x_real and u_real mask padding.

    Returns:
        The carry after the step, and the loss ().
    """

    def loss(sigma: Tree) -> tuple[Tensor, Tree]:
        logits, moments = task.network.train(add_halves(sigma, psi), batch.x, real=batch.x_real)
        return weight * labeled_cross_entropy(logits, batch.y, batch.x_real, task.class_weights), moments

    gradient, value, moments = grad_and_value(loss, carry["sigma"])
    sigma, optimizer = task.optimizer.step(carry["sigma"], gradient, carry["optimizer"])
    return {**carry, "sigma": sigma, "optimizer": optimizer, "stats": track(carry["stats"], moments)}, value


def vote_on_labels(
    label: Tensor, helper_labels: Tensor, exists: Tensor, classes: int, ties: Literal["first", "own"]
) -> Tensor:
    """Compute FedMatch's pseudo-labels: the majority vote of a client and its helpers, the models of similar clients.

    Args:
        label: the client's class for each image, (b,).
        helper_labels: the helpers' classes, (H, b).
        exists: 1 for helpers that vote, 0 for missing ones, (H,).
        classes: number of classes.
        ties: class that wins among equally many votes: the "first" by number, or the client's "own".

    Returns:
        The winning classes, (b,).
    """
    class_numbers = torch.arange(classes, device=label.device)
    client_vote = (label[..., None] == class_numbers).to(exists.dtype)
    helper_votes = (exists[:, None, None] * (helper_labels[..., None] == class_numbers)).sum(0)
    votes = client_vote + helper_votes
    if ties == "own":
        # Half a vote more decides ties and changes no other result.
        votes = votes + 0.5 * client_vote
    # `argmax` resolves the remaining ties to the lowest class.
    return votes.argmax(-1)


def draw_noise_image(like: Tensor) -> Tensor:
    """Draw the image of noise on which FedMatch compares models: the same in every run.

    Its pixels are normal with mean and standard deviation 125, truncated to 0..255.

    Args:
        like: images (n, C, H, W) that give the shape.

    Returns:
        The image, uint8 (1, C, H, W).
    """
    shape = tuple(like.shape[-3:])
    # Inverse-transform sampling of the truncated normal: uniform between the two edges' quantiles.
    uniform = tensor_from_numpy(np.random.Generator(np.random.PCG64(0)).random((1, *shape)))
    low, high = (
        normal_cdf(torch.tensor((edge - NOISE_MEAN) / NOISE_DEVIATION, dtype=torch.float64)) for edge in (0.0, 255.0)
    )
    pixels = NOISE_MEAN + NOISE_DEVIATION * normal_quantile(low + (high - low) * uniform)
    return pixels.round().clamp(0, 255).to(torch.uint8)


ROWS = (
    MethodEntry("fedmatch", "FedMatch", "FedMatch, ICLR 2021",
                "half of the parameters learns from labels, half from pseudo-labels that similar clients vote on",
                FedMatch()),
    MethodEntry("fedmatch-feddpl", "FedMatch + FedDPL", "FedMatch, ICLR 2021; FedDB, IJCAI 2024",
                "FedMatch with each client's predictions divided by their mean", FedMatch(debias=True)),
)  # fmt: skip
