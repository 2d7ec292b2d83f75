"""FedMatch (Jeong et al., ICLR 2021): parameters in two parts, and clients that ask clients like them.

Each kernel is theta = sigma + psi: sigma learns from labels, psi from unlabeled images, neither from the other's loss.
A client takes first the step on L_s(sigma) = labeled_weight CE(y, f(x)), then the one on

    L_u(psi) = consistency_weight (1/H) sum_j KL(p_j || p) + unlabeled_weight CE(label, f(strong))
               + l2_weight ||sigma - psi||^2 + l1_weight ||psi||_1,

over images of which its own p(un-augmented u) is sure (max p >= threshold). p_j are helpers: other clients' psi on the
client's received sigma. `label` is what most of the client and its helpers vote for. The server hands out the H nearest
clients of all that it has met, by the distance of their predictions on one fixed image of noise; without helpers the
first term is gone and the label is the client's own. Labels lie at clients, or at the server: it then trains sigma at
the beginning of a round (as the authors' code does), and psi alone goes up.

server: sigma, psi, stats; on its state store the psi and the embedding of every client met.  broadcast: the same three,
every `interval` rounds with helpers (H psi and who is there).  memory: sigma, psi as the server last knew them; the
state of thresholds that run.  upload: sigma (where there are labels), psi, stats, embedding (C floats), how many
entries changed.

Bytes: an entry travels where it has moved by more than `delta_threshold` from what the receiver has (the paper's sparse
communication), as 4 bytes of index and its value; a tree of which more than half has moved travels whole. What has not
travelled is not used either. It is this wire format that is counted; the paper gives shares of parameters.

Departures from the authors' code:
- Biases and normalizations belong to sigma: their networks have neither (`norm` "none"; there sigma and psi are all).
- The noise is embedded by the client, as the server knows no size of images. Normalized, its pixels are whole numbers.
- sigma is averaged over the clients with labels; in their two scenarios all clients have some, or none.
- Downloads below the threshold are left out; there, all server weights then overwrite them. The entries of psi that go
  up are cut at `l1_threshold`; there, those that changed go up uncut. A first meeting is counted whole.
- Learning rates follow the task; theirs fall to a third when a client's validation loss stops improving. At
  1 / (2 l2_weight), plain SGD sets psi to sigma in one step, and from twice that it diverges.
- For labels at the server they set l1_weight, l1_threshold and delta_threshold to 1e-5.

SemiFL's tables have a version of their own: `halfmoon.methods.semifl`, `fedmatch-semifl`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any, Literal, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from halfmoon.api.method_entry import MethodEntry
from halfmoon.api.requirements import ALL_LABEL_LOCATIONS, Requirements
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
from halfmoon.core.tensors import euclidean_norm, normal_cdf, normal_quantile, tensor_from_numpy, to_ints
from halfmoon.core.tree import Tree
from halfmoon.methods.averaging import average_uploads
from halfmoon.methods.mutual import divergence
from halfmoon.methods.objectives.base import (
    debias_logits,
    labeled_cross_entropy,
    mean_prediction,
    predict_all_rows,
    predict_with_teacher,
)
from halfmoon.methods.objectives.thresholding import Rule, Threshold
from halfmoon.models import forward, track
from halfmoon.models.network import kernels

INDEX_BYTES = 4


@dataclass(frozen=True)
class FedMatch:
    """FedMatch; the defaults are those of the authors' code for labels at clients (the paper's threshold is 0.85).

    `helpers` is H; they come in every `interval`-th round, for that client update (1: in every round). `mean`: whether
    the first two terms of L_u are means over the images the client is sure of, or over all. `ties`: which class wins
    among equally many votes, the "first" by number (theirs) or the client's "own". `view` is the one that is guessed
    on. sigma starts as the initial kernels, psi as `psi_start` times them. `delta_threshold` None: whole
    trees travel and nothing is remembered. `debias` divides the client's own prediction by its mean over the client's
    rows (FedDPL, FedDB Eq. 14) before it votes and is judged. `thresholding` and `threshold_decay`: of which images it
    is sure. Raises `UserError` for a count below its least value.
    """

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
    def rule(self) -> Threshold:
        """Return which guesses count."""
        return Threshold(self.thresholding, self.threshold, self.threshold_decay)

    def __post_init__(self) -> None:
        check_minimum(self, 0, "helpers")
        check_minimum(self, 1, "interval")

    def requirements(self, norm: str) -> Requirements:
        reason = "the halves of the parameters have weights of their own, and helpers are single clients' models"
        return Requirements(reason=reason, label_locations=ALL_LABEL_LOCATIONS, personal=True, period=self.interval)

    def client_updates(self, task: Task) -> Mapping[str, ClientUpdate]:
        return {"train": Disjoint(task, self, self._due(task)), "serve": FedMatchClient(task, self)}

    def start(self, task: Task, model: Tree) -> Tree:
        psi = tree.map(lambda leaf: leaf * self.psi_start, kernels(model["params"]))
        return {"sigma": model["params"], "psi": psi, "stats": model["stats"]}

    def round(self, task: Task, server: Tree, federation: Federation) -> Tree:
        """Teach sigma where the server has labels, let the cohort train, average the parts, embed who came back."""
        broadcast = {"sigma": server["sigma"], "psi": server["psi"], "stats": server.get("stats", {})}
        if federation.labeled:
            broadcast = {**broadcast, **federation.query_server("serve", broadcast).update}
        each = self._nearest(broadcast["psi"], federation) if self._due(task) else None
        upload = federation.query("train", broadcast, each)
        for place, client in enumerate(to_ints(federation.responders) if self.helpers else ()):
            federation.state_store.put(f"psi-{client}", tree.index(upload.update["psi"], place))
            federation.state_store.put(f"embedding-{client}", {"vector": upload.aux["embedding"][place]})
        sigma = average_uploads(Upload({"sigma": upload.update["sigma"]}, upload.aux["labels"]), broadcast)
        return {
            **sigma,
            **average_uploads(upload._replace(update={name: upload.update[name] for name in ("psi", "stats")})),
        }

    def solution(self, task: Task, server: Tree) -> Tree:
        params = composed(server["sigma"], cut(server["psi"], self.l1_threshold))
        return {"params": params, "stats": server.get("stats", {})}

    def _due(self, task: Task) -> int:
        """Return how many helpers come in the task's round: all or none."""
        return 0 if (task.round + 1) % self.interval else self.helpers

    def _nearest(self, psi: Tree, federation: Federation) -> Tree:
        """Return the helpers of each client of the cohort: psi, leaves (K, H, ...), and who is "there", (K, H)."""
        state_store, vectors = federation.state_store, dict[int, Tensor]()
        for key in state_store.keys():  # noqa: SIM118
            if key.startswith("embedding-"):
                vectors[int(key.removeprefix("embedding-"))] = (state_store.get(key) or {})["vector"]
        neighbors = [nearest(vectors, client, self.helpers) for client in to_ints(federation.cohort)]
        nobody = tree.zeros_like(psi)
        there = torch.tensor([[float(k < len(own)) for k in range(self.helpers)] for own in neighbors])
        trees = [
            tree.stack([state_store.get(f"psi-{k}") or nobody for k in own] + [nobody] * (self.helpers - len(own)))
            for own in neighbors
        ]
        return {"helpers": tree.stack(trees), "there": there.to(next(tree.leaves(psi)))}


def nearest(vectors: dict[int, Tensor], client: int, count: int) -> list[int]:
    """Return up to `count` other clients by the distance of their embeddings (C,); none for a client without one."""
    if client not in vectors:
        return []
    away = {
        other: float(euclidean_norm(vector - vectors[client])) for other, vector in vectors.items() if other != client
    }
    return sorted(away, key=lambda other: (away[other], other))[:count]


@dataclass(frozen=True)
class FedMatchClient(ClientUpdate):
    """The server's own training: sigma on its labels.

    broadcast: sigma, psi, stats.  upload: sigma, stats.  Nothing is remembered.
    """

    options: FedMatch = FedMatch()

    @property
    def requirements(self) -> UpdateRequirements:
        return UpdateRequirements(masks_padding=True, upload_spec=UploadSpec(("sigma", "stats")))

    def begin(self, broadcast: Tree, memory: Tree, data: ClientData) -> Tree:
        return {
            "sigma": broadcast["sigma"],
            "stats": broadcast["stats"],
            "optimizer": self.task.optimizer.init(broadcast["sigma"]),
        }

    def step(self, broadcast: Tree, carry: Tree, batch: Batch) -> tuple[Tree, StepMetrics]:
        new, loss = labeled_step(self.task, self.options.labeled_weight, carry, broadcast["psi"], batch)
        return new, StepMetrics(loss, {}, ())

    def finish(self, broadcast: Tree, carry: Tree, data: ClientData) -> tuple[Upload, Tree]:
        return Upload({"sigma": carry["sigma"], "stats": carry["stats"]}, (data.labeled > 0).double()), {}


@dataclass(frozen=True)
class Disjoint(ClientUpdate):
    """The client of FedMatch in a round with `helpers` helpers: sigma's step, then psi's."""

    options: FedMatch = FedMatch()
    helpers: int = 0

    @property
    def requirements(self) -> UpdateRequirements:
        o = self.options
        sweep = (o.view,) if o.debias or o.rule.needs_all_rows else ()
        aux = {"embedding": Aux(), "labels": Aux(values="mark"), "changed": Aux(values="count")}
        upload_spec = UploadSpec(("sigma", "psi", "stats"), weight="one", aux=aux)
        return UpdateRequirements(
            (o.view, "strong"),
            precomputed_views=sweep,
            masks_padding=True,
            row_memory=o.rule.row_memory,
            upload_spec=upload_spec,
        )

    def initial_memory(self, broadcast: Tree, generator: torch.Generator) -> Tree:
        state = self.options.rule.initial_memory(self.task.network.classes, next(tree.leaves(broadcast["psi"])))
        first = {"thresholds": state} if state else {}
        if self.options.delta_threshold is None:
            return first
        parts = {name: tree.zeros_like(broadcast[name]) for name in ("sigma", "psi")}
        met = torch.zeros((), dtype=torch.float64, device=next(tree.leaves(broadcast["psi"])).device)
        return {**first, **parts, "met": met}

    def begin(self, broadcast: Tree, memory: Tree, data: ClientData) -> Tree:
        received = {name: broadcast[name] for name in ("sigma", "psi")}
        changed = {name: changes(part, part, -1.0) for name, part in received.items()}
        if "met" in memory:
            met = memory["met"] > 0
            some = {name: changes(memory[name], part, self._delta) for name, part in received.items()}
            fresh = {name: patched(memory[name], part, self._delta) for name, part in received.items()}
            changed, received = tree.select(met, some, changed), tree.select(met, fresh, received)
        carry = {**received, "received": received, "changed": changed, "stats": broadcast["stats"]}
        carry["optimizer"] = self.task.optimizer.init(received["sigma"])
        carry["psi_optimizer"] = self.task.optimizer.init(received["psi"])
        rule = self.options.rule
        carry["thresholds"] = {} if rule.needs_all_rows else rule.begin(memory.get("thresholds", {}), data)
        if self.requirements.precomputed_views:
            views = data.views[self.options.view]
            guess = predict_all_rows(self.task, composed(**received), broadcast["stats"], views, data.u_real)
            carry["prior"] = mean_prediction(guess, data.u_real)
            if rule.needs_all_rows:
                guess = debias_logits(guess, carry["prior"]) if self.options.debias else guess
                carry["thresholds"] = rule.begin({}, data, guess.softmax(-1))
        return carry

    def step(self, broadcast: Tree, carry: Tree, batch: Batch) -> tuple[Tree, StepMetrics]:
        """Take sigma's step, if there are labeled images, then psi's with the new sigma."""
        labeled = torch.zeros((), dtype=next(tree.leaves(carry["psi"])).dtype, device=batch.u_rows.device)
        if len(batch.x):
            taught, labeled = labeled_step(self.task, self.options.labeled_weight, carry, carry["psi"], batch)
            carry = taught if batch.x_real is None else tree.select(batch.x_real.any(), taught, carry)
        helped = self._ask_helpers(broadcast, carry, batch)
        gradient, loss, aux = grad_and_value(self._loss, carry["psi"], carry, batch, *helped)
        moments, pseudo, samples, state = aux
        psi, optimizer = self.task.optimizer.step(carry["psi"], gradient, carry["psi_optimizer"])
        stats = reduce(track, moments, carry["stats"])
        new = {"psi": psi, "psi_optimizer": optimizer, "stats": stats, "thresholds": state}
        return {**carry, **new}, StepMetrics(labeled + loss, samples, pseudo)

    def finish(self, broadcast: Tree, carry: Tree, data: ClientData) -> tuple[Upload, Tree]:
        received, labels = carry["received"], (data.labeled > 0).double()
        new = {"sigma": carry["sigma"], "psi": cut(carry["psi"], self.options.l1_threshold)}
        there = dict(carry["changed"])
        if self.helpers:
            helpers = [tree.index(broadcast["helpers"], k) for k in range(self.helpers)]
            there["helpers"] = torch.stack([changes(received["psi"], each, self._delta) for each in helpers])
        back = {name: changes(received[name], new[name], self._delta) for name in new}
        upload = {name: patched(received[name], new[name], self._delta) for name in new}
        image = self.task.normalize(noise(data.u)).to(data.u.device)
        embedding = self.task.network.predict(composed(**upload), carry["stats"], image)[0].softmax(-1)
        aux = {"embedding": embedding, "labels": labels, "changed": {"down": there, "up": back}}
        memory = {} if self.options.delta_threshold is None else {**upload, "met": torch.ones_like(labels)}
        if self.options.rule.has_memory:
            memory = {"thresholds": carry["thresholds"], **memory}
        return Upload({**upload, "stats": carry["stats"]}, torch.ones_like(labels), aux), memory

    def passes(self, labeled: int, unlabeled: int) -> Passes:
        shared = self.task.labeling == "batch" and self.task.statistics == "joint"
        taught = 2 if self.helpers or shared else 1
        return Passes(labeled + (2 + self.helpers) * unlabeled, labeled + taught * unlabeled)

    def images_outside_steps(self, labeled: int, unlabeled: int) -> int:
        return 1 + (unlabeled if self.requirements.precomputed_views else 0)

    def traffic(self, broadcast: Tree, upload: Upload) -> tuple[int, int]:
        counts, parts = upload.aux["changed"], ("sigma", "psi")
        there = tree.nbytes(broadcast["stats"]) + sum(
            self._wire(broadcast[name], counts["down"][name]) for name in parts
        )
        there += sum(
            self._wire(tree.index(broadcast["helpers"], k), counts["down"]["helpers"][k])
            for k in range(self.helpers)
            if broadcast["there"][k] > 0
        )
        back = tree.nbytes(upload.update["stats"]) + upload.aux["embedding"].nbytes
        taught = parts if upload.aux["labels"] > 0 else ("psi",)
        return there, back + sum(self._wire(upload.update[name], counts["up"][name]) for name in taught)

    @property
    def _delta(self) -> float:
        """Return how far an entry has to move to travel; -1 where all do."""
        return -1.0 if self.options.delta_threshold is None else self.options.delta_threshold

    def _wire(self, whole: Tree, count: Tensor) -> int:
        """Return the bytes of `count` entries of a tree, each with an index, or of the whole tree if that is less."""
        entry = tree.nbytes(whole) // tree.numel(whole) + INDEX_BYTES
        return min(tree.nbytes(whole), int(count) * entry)

    def _loss(self, psi: Tree, carry: Tree, batch: Batch, *helped: Tensor) -> tuple[Tensor, tuple[Any, ...]]:
        """Return L_u(psi), and (moments, pseudo-labels, samples)."""
        o = self.options
        strong, quiet, moments = self._outputs(composed(carry["sigma"], psi), carry["stats"], batch)
        own = debias_logits(quiet.detach(), carry["prior"]) if o.debias else quiet.detach()
        (label, confidence, used), state = o.rule.pseudo_label(
            own.softmax(-1), batch.u_rows, carry["thresholds"], batch.u_real
        )
        each = torch.zeros_like(used)
        if self.helpers:
            logits, there = helped
            share = there / there.sum().clamp_min(1)
            each = o.consistency_weight * (share[:, None] * divergence(logits, quiet)).sum(0)
            label = vote(label, logits.argmax(-1), there, logits.shape[-1], o.ties)
        each = each + o.unlabeled_weight * F.cross_entropy(strong, label, reduction="none")
        count = used.sum().clamp_min(1) if o.mean == "used" else padding.count(used, batch.u_real)
        far = tree.squared_norm(tree.map(torch.sub, psi, carry["sigma"]))
        penalty = o.l2_weight * far + o.l1_weight * tree.sum_scalars(leaf.abs().sum() for leaf in tree.leaves(psi))
        pseudo = (PseudoLabels(label, confidence, used),)
        return (each * used).sum() / count + penalty, (moments, pseudo, {"penalty": weighted_metric(penalty)}, state)

    def _outputs(self, theta: Tree, stats: Tree, batch: Batch) -> tuple[Tensor, Tensor, list[Tree]]:
        """Return the logits (b, classes) of strong and guessed view, and the moments."""
        network, joint = self.task.network, self.task.statistics == "joint"
        strong, view, real = batch.u["strong"], batch.u[self.options.view], batch.masks(2)[1:]
        if self.task.labeling == "running":
            (loud,), _, moments = forward(network, theta, joint, (strong,), real=real[:1])
            with torch.set_grad_enabled(bool(self.helpers)):
                return loud, network.predict(theta, stats, view), moments
        if self.helpers:
            (loud, quiet), _, moments = forward(network, theta, joint, (strong, view), real=real)
        else:
            (loud,), (quiet,), moments = forward(network, theta, joint, (strong,), (view,), real)
        return loud, quiet, moments

    @torch.no_grad()
    def _ask_helpers(self, broadcast: Tree, carry: Tree, batch: Batch) -> tuple[Tensor, ...]:
        """Return the helpers' logits (H, b, classes) and who is there (H,); nothing in a round without them."""
        if not self.helpers:
            return ()
        view, received = batch.u[self.options.view], carry["received"]
        helpers = patched(received["psi"], broadcast["helpers"], self._delta)
        models = [composed(received["sigma"], tree.index(helpers, k)) for k in range(self.helpers)]
        logits = [predict_with_teacher(self.task, theta, carry["stats"], view, batch.u_real) for theta in models]
        return torch.stack(logits), broadcast["there"].to(view.dtype)


def composed(sigma: Tree, psi: Tree) -> Tree:
    """Return theta: sigma + psi, where there is a psi."""
    theta: Tree = {}
    for name, part in sigma.items():
        if isinstance(part, dict):
            part = composed(cast(Tree, part), psi.get(name, {}))
        theta[name] = part + psi[name] if name in psi and not isinstance(part, dict) else part
    return theta


def cut(psi: Tree, threshold: float) -> Tree:
    """Return psi without its entries up to `threshold`."""
    return tree.map(lambda leaf: torch.where(leaf.abs() <= threshold, 0.0, leaf), psi)


def patched(old: Tree, new: Tree, threshold: float) -> Tree:
    """Return `old` with the entries of `new` that are further away than `threshold`, or that are no numbers."""
    return tree.map(lambda a, b: torch.where((b - a).abs() <= threshold, a, b), old, new)


def changes(old: Tree, new: Tree, threshold: float) -> Tensor:
    """Return how many entries `patched` takes over, as float64."""
    pairs = zip(tree.leaves(old), tree.leaves(new), strict=True)
    return tree.sum_scalars((~((b - a).abs() <= threshold)).sum().double() for a, b in pairs)


def labeled_step(task: Task, weight: float, carry: Tree, psi: Tree, batch: Batch) -> tuple[Tree, Tensor]:
    """Return the carry after a step of "sigma" on weight * CE(y, f(x; sigma + psi)), and that loss."""

    def loss(sigma: Tree) -> tuple[Tensor, Tree]:
        logits, moments = task.network.train(composed(sigma, psi), batch.x, real=batch.x_real)
        return weight * labeled_cross_entropy(logits, batch.y, batch.x_real), moments

    gradient, value, moments = grad_and_value(loss, carry["sigma"])
    sigma, optimizer = task.optimizer.step(carry["sigma"], gradient, carry["optimizer"])
    return {**carry, "sigma": sigma, "optimizer": optimizer, "stats": track(carry["stats"], moments)}, value


def vote(own: Tensor, others: Tensor, there: Tensor, classes: int, ties: Literal["first", "own"]) -> Tensor:
    """Return the class (b,) that most of own (b,) and others (H, b) name; `there` (H,) says which of these vote."""
    names = torch.arange(classes, device=own.device)
    mine = (own[..., None] == names).to(there.dtype)
    votes = mine + (there[:, None, None] * (others[..., None] == names)).sum(0)
    return (votes + 0.5 * mine if ties == "own" else votes).argmax(-1)


def noise(like: Tensor) -> Tensor:
    """Return the one image that models are compared on, uint8 (1, C, H, W) for images `like` (n, C, H, W).

    Normal pixels of mean and deviation 125, cut at 0 and 255: always the same ones, and no part of a run's randomness.
    """
    shape = tuple(like.shape[-3:])
    uniform = tensor_from_numpy(np.random.Generator(np.random.PCG64(0)).random((1, *shape)))
    low, high = (normal_cdf(torch.tensor((edge - 125) / 125, dtype=torch.float64)) for edge in (0.0, 255.0))
    pixels = 125 + 125 * normal_quantile(low + (high - low) * uniform)
    return pixels.round().clamp(0, 255).to(torch.uint8)


ROWS = (
    MethodEntry("fedmatch", "FedMatch", "FedMatch, ICLR 2021",
                "one half of the parameters learns from labels, the other from guesses that similar clients share",
                FedMatch()),
    MethodEntry("fedmatch-feddpl", "FedMatch + FedDPL", "FedMatch, ICLR 2021; FedDB, IJCAI 2024",
                "FedMatch with its own guesses divided by each client's mean prediction", FedMatch(debias=True)),
)  # fmt: skip
