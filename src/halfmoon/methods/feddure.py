"""FedDure (AAAI 2024): two regulators decide, image by image, how far a client may trust its own pseudo-labels.

On each client a fine-grained regulator (F-reg, a small MLP f_w) weighs every unlabeled image, and a coarse-grained
regulator (C-reg, a copy f_d of the network) reports whether learning from the pseudo-labels lowered the labeled loss.
F-reg is trained through one virtual step of C-reg (bi-level); the textbook way keeps the graph of that step's gradient.
Here the same derivative is one forward-mode pass: with v the gradient of the labeled loss at the virtual parameters,
dL/dw = - virtual_lr * d/dw D_v [mean_i H(w; z_i) CE(label_i, z_i)], where z are the strong views' logits; D_v needs
their tangent along v only, which `Network.tangent` takes from the activations of Eq. 4's forward pass. What is left
to differentiate in w is the MLP.

server: params, stats, round.  down: params, stats, gate.  memory: regulator (its parameters and optimizer state).
up: params, stats, weight.

Departures: where the authors' released code departs from the paper, this file follows the paper, which is what others
compare with. That code has no trained F-reg, the opposite sign of d (`sign`), soft pseudo-labels above a threshold of
0.6, a ramped weight of the unlabeled loss, C-reg on weak views, a learning rate that warms up anew, and labeled-only
steps at the start of every visit. What the paper leaves open is an option; `regulator_bias`, `regulator_lr` and
`through_weights` have the values that did best in our trials.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import grad, jvp

from halfmoon import tree
from halfmoon.methods.averaging import average
from halfmoon.models import track
from halfmoon.models.network import linear
from halfmoon.objectives.base import weak_and_strong, weak_and_strong_passes
from halfmoon.optim import Optimizer, descend
from halfmoon.transform import grad_and_value, vjp
from halfmoon.tree import Tree
from halfmoon.types import Batch, Federation, Local, Notes, Passes, Pseudo, Task, Work, sample


@dataclass(frozen=True)
class FedDure:
    """FedDure, Algorithm 1; the defaults are the paper's reading wherever it fixes one.

    Where it leaves a choice, the default did best in trials, which results/feddure_trials.md logs with their limits.

    `coarse` and `fine` switch the regulators (Table 2): without C-reg, f_l takes the place of f_d in Eq. 4 and 5 and
    the term of Eq. 8 is dropped; without F-reg, the weights are 1[max p >= threshold] and Eq. 2 is unweighted.
    `through_weights`: whether the gradients of Eq. 2 and 4 also pass through H's input ("product") or not ("detached").
    `regulator_bias` is added to F-reg's last bias at the start: with -4 it trusts almost nothing (0.02) until it has
    learned to; with 0 it starts by trusting all pseudo-labels by half, and follows the wrong ones.
    `virtual_lr`, `coarse_lr` and `regulator_lr` (None: the optimizer's) are the step sizes of Eq. 4, 2 and 5. The paper
    sets all to 5e-4; at that rate F-reg came to trust every pseudo-label within some 60 rounds, hence 5e-5 for Eq. 5.
    """

    coarse: bool = True
    fine: bool = True
    threshold: float = 0.95
    hidden: int = 128
    regulator_bias: float = -4.0
    regulator_input: Literal["logits", "softmax"] = "logits"
    through_weights: Literal["product", "detached"] = "detached"
    virtual_lr: float | None = None
    coarse_lr: float | None = None
    regulator_lr: float | None = 5e-5
    sign: Literal["old-new", "new-old"] = "old-new"
    judging: Literal["batch", "running"] = "batch"
    normalize_weights: bool = False
    keep_regulator: bool = True
    keep_regulator_optimizer: bool = True
    warmup: int = 0

    def works(self, task: Task) -> Mapping[str, Work]:
        """Return the one thing a client does."""
        return {"train": Regulated(task, ("weak", "strong"), self)}

    def start(self, task: Task, model: Tree) -> Tree:
        """Remember the model and the number of rounds played."""
        return {**model, "round": torch.zeros((), dtype=torch.int64)}

    def round(self, task: Task, server: Tree, federation: Federation) -> Tree:
        """Let the cohort train, and average; the gate stays shut during the labeled-only `warmup` rounds."""
        gate = (server["round"] >= self.warmup).to(torch.float32)
        up = federation.ask("train", {"params": server["params"], "stats": server["stats"], "gate": gate})
        return {**average(up, server), "round": server["round"] + 1}

    def solution(self, task: Task, server: Tree) -> Tree:
        """Return the averaged model; C-reg never leaves its client."""
        return {"params": server["params"], "stats": server["stats"]}


class Judged(NamedTuple):
    """What the regulators say of one minibatch."""

    weights: Tensor  # (b,) m_i of Eq. 6
    reward: Tensor  # () d of Eq. 3, zero without C-reg
    carry: Tree  # the regulators' new parts of the carry
    norms: dict[str, Tensor]  # gradient norms of Theorems 1 and 2


class Student(NamedTuple):
    """The network that the regulators train on: f_d, or f_l without C-reg."""

    params: Tree
    z: Tensor  # (b, classes) its logits of the strong views
    pull: Callable[[Tensor, bool], Tree]  # cotangent of z, whether another pull follows -> gradient in the parameters
    tangent: Callable[[Tree], Tensor]  # direction of the parameters -> tangent of z


@dataclass(frozen=True)
class Regulated(Work):
    """The client of FedDure: F-reg and C-reg take a step each, then the local model does."""

    options: FedDure = FedDure()

    def remember(self, down: Tree, generator: torch.Generator) -> Tree:
        """Return F-reg (Algorithm 1, line 2: one for each client), the same at the start for all."""
        if not self.options.fine:
            return {}
        like = next(tree.leaves(down["params"]))
        classes, hidden = self.task.network.classes, self.options.hidden
        params = {"hidden": linear(generator, classes, hidden), "out": linear(generator, hidden, 1)}
        params["out"]["bias"] = params["out"]["bias"] + self.options.regulator_bias
        params = tree.to(params, like.device, like.dtype)
        return {"regulator": {"params": params, "optimizer": self._rate("regulator").init(params)}}

    def begin(self, down: Tree, memory: Tree, data: Local) -> Tree:
        """Start the local model and C-reg as copies of the server's model, F-reg as it was left."""
        optimizer = self.task.optimizer.init(down["params"])
        carry = {"params": down["params"], "stats": down["stats"], "optimizer": optimizer}
        if self.options.coarse:
            carry["coarse"] = {
                "params": down["params"],
                "optimizer": self._rate("coarse").init(down["params"]),
            }
        if self.options.fine:
            carry["regulator"] = dict(memory["regulator"])
            if not self.options.keep_regulator_optimizer:
                carry["regulator"]["optimizer"] = self._rate("regulator").init(carry["regulator"]["params"])
        return carry

    def step(self, down: Tree, carry: Tree, batch: Batch) -> tuple[Tree, Notes]:
        """Take one step of Algorithm 1, lines 8 to 17 (Eq. 1 to 10)."""

        def look(params: Tree) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, list[Tree]]]:
            labeled, strong, weak, moments = weak_and_strong(self.task, params, carry["stats"], batch)
            return (labeled, strong), (weak, moments)

        (labeled, strong), pull, (weak, moments) = vjp(look, carry["params"])
        confidence, label = weak.softmax(-1).max(-1)  # Eq. 1
        if self.options.coarse:
            student = self._coarse(carry["coarse"]["params"], batch)
        else:
            student = self._local(carry["params"], batch, strong, pull, torch.zeros_like(labeled))
        judged = self._judge(carry, batch, student, label, strong, confidence)
        trust = (judged.weights + judged.reward) * down["gate"].to(strong.dtype)

        def loss(z: Tree) -> tuple[Tensor, tuple]:  # Eq. 7, 8 and 9; Eq. 10 is the optimizer's step
            return F.cross_entropy(z["labeled"], batch.y) + (trust * per_image(z["strong"], label)).mean(), ()

        cotangent, value, _ = grad_and_value(loss, {"labeled": labeled, "strong": strong})
        gradient = pull((cotangent["labeled"], cotangent["strong"]), False)
        params, optimizer = self.task.optimizer.step(carry["params"], gradient, carry["optimizer"])
        stats = carry["stats"]
        for each in moments:
            stats = track(stats, each)
        samples = {"m": sample(judged.weights), "d": sample(judged.reward)}
        samples |= {name: sample(norm) for name, norm in judged.norms.items()}
        notes = Notes(value, samples, (Pseudo(label, confidence, trust),))
        return {"params": params, "stats": stats, "optimizer": optimizer, **judged.carry}, notes

    def finish(self, down: Tree, carry: Tree, data: Local) -> tuple[Tree, Tree]:
        """Send the local model with its weight |labeled| + |unlabeled|; F-reg stays."""
        weight = (data.labeled + data.unlabeled).double()
        up = {"params": carry["params"], "stats": carry["stats"], "weight": weight}
        keeps = self.options.fine and self.options.keep_regulator
        return up, ({"regulator": carry["regulator"]} if keeps else {})

    def passes(self, labeled: int, unlabeled: int) -> Passes:
        """Count the images of one step: local model, C-reg, tangent, virtual and judging passes.

        C-reg's tangent works from activations that are there: it counts as one forward pass, though it takes two
        convolutions a layer. Without C-reg the local model passes once more: two.
        """
        forward, backward = weak_and_strong_passes(self.task, labeled, unlabeled)
        shared = self.task.statistics == "joint"
        whole, whole_back = (backward, backward) if shared else (unlabeled, labeled + unlabeled)
        tangent = 2 * whole
        if self.options.coarse:
            tangent = whole_back = unlabeled
            forward, backward = forward + unlabeled + 2 * labeled, backward + unlabeled
        if self.options.fine:
            forward, backward = forward + tangent + labeled, backward + whole_back + labeled
        return Passes(forward, backward)

    def _judge(
        self, carry: Tree, batch: Batch, student: Student, label: Tensor, strong: Tensor, confidence: Tensor
    ) -> Judged:
        """Let F-reg, then C-reg, take their step, and return their verdicts."""
        new: Tree = {}
        norms: dict[str, Tensor] = {}
        regulator: Tree = {}
        if self.options.fine:
            new["regulator"], norms["regulator_gradient"] = self._teach_fine(carry, batch, student, label)
            regulator = new["regulator"]["params"]
            weights = self._weigh(regulator, strong)  # Eq. 6
        else:
            weights = (confidence >= self.options.threshold).to(strong.dtype)
        if self.options.normalize_weights:
            weights = weights / weights.mean().clamp_min(1e-12)
        reward = torch.zeros_like(weights.mean())
        if self.options.coarse:
            gradient = student.pull(self._blamed(regulator, student.z, label), False)  # Eq. 2
            norms["coarse_gradient"] = norm(gradient)
            params, optimizer = self._rate("coarse").step(student.params, gradient, carry["coarse"]["optimizer"])
            new["coarse"] = {"params": params, "optimizer": optimizer}
            with torch.no_grad():  # Eq. 3
                before = self._labeled_loss(student.params, carry["stats"], batch)
                reward = before - self._labeled_loss(params, carry["stats"], batch)
            if self.options.sign == "new-old":
                reward = -reward
        return Judged(weights, reward, new, norms)

    def _teach_fine(self, carry: Tree, batch: Batch, student: Student, label: Tensor) -> tuple[Tree, Tensor]:
        """Return F-reg after a step on the labeled loss at the virtual parameters (Eq. 4, 5), and its gradient norm."""
        before = carry["regulator"]
        lr = self._lr("virtual")
        virtual = descend(student.params, student.pull(self._blamed(before["params"], student.z, label), True), lr)
        judged, _, _ = grad_and_value(lambda params: (self._labeled_loss(params, carry["stats"], batch), ()), virtual)
        tangent = student.tangent(judged)

        def gain(params: Tree) -> Tensor:
            return -lr * jvp(lambda z: self._weighted(params, z, label), (student.z,), (tangent,))[1]

        gradient = grad(gain)(before["params"])  # Eq. 5
        params, optimizer = self._rate("regulator").step(before["params"], gradient, before["optimizer"])
        return {"params": params, "optimizer": optimizer}, norm(gradient)

    def _coarse(self, params: Tree, batch: Batch) -> Student:
        """Return C-reg on the strong views alone."""
        network, strong = self.task.network, batch.u["strong"]
        z, pull, tape = vjp(lambda params: network.linearize(params, strong), params)
        return Student(
            params,
            z,
            pull,
            lambda direction: network.tangent(params, strong, tape, direction),
        )

    def _local(self, params: Tree, batch: Batch, strong: Tensor, pull: Callable, nothing: Tensor) -> Student:
        """Return the local model in C-reg's place: the pass that it has made already."""

        network, views, before = self.task.network, (batch.u["strong"],), 0
        if self.task.statistics == "joint":  # the images of the pass that it has made, in its order
            before = len(batch.x)
            views = (batch.x, *views) if self.task.labeling == "running" else (batch.x, *views, batch.u["weak"])
        images = torch.cat(views)

        def tangent(direction: Tree) -> Tensor:
            moved = network.tangent(params, images, network.linearize(params, images)[1], direction)
            return moved[before : before + len(strong)]

        return Student(
            params,
            strong,
            lambda cotangent, again: pull((nothing, cotangent), True),  # another pull always follows: the model's own
            tangent,
        )

    def _weigh(self, regulator: Tree, z: Tensor) -> Tensor:
        """Return H (b,) in (0, 1) for logits z (b, classes)."""
        z = z.softmax(-1) if self.options.regulator_input == "softmax" else z
        hidden = F.relu(F.linear(z, regulator["hidden"]["weight"], regulator["hidden"]["bias"]))
        return F.linear(hidden, regulator["out"]["weight"], regulator["out"]["bias"]).squeeze(-1).sigmoid()

    def _weighted(self, regulator: Tree, z: Tensor, label: Tensor) -> Tensor:
        """Return mean_i H(w; z_i) CE(label_i, z_i), the loss inside Eq. 2 and 4; H is 1 without F-reg."""
        loss = per_image(z, label)
        if self.options.fine:
            seen = z.detach() if self.options.through_weights == "detached" else z
            loss = self._weigh(regulator, seen) * loss
        return loss.mean()

    def _blamed(self, regulator: Tree, z: Tensor, label: Tensor) -> Tensor:
        """Return the gradient of `_weighted` in z (b, classes)."""
        return grad_and_value(lambda at: (self._weighted(regulator, at["z"], label), ()), {"z": z})[0]["z"]

    def _labeled_loss(self, params: Tree, stats: Tree, batch: Batch) -> Tensor:
        """Return CE(y, f(x)) of the minibatch, the judge of Eq. 3 and 5."""
        if self.options.judging == "running":
            return F.cross_entropy(self.task.network.predict(params, stats, batch.x), batch.y)
        return F.cross_entropy(self.task.network.train(params, batch.x)[0], batch.y)

    def _lr(self, which: Literal["virtual", "coarse", "regulator"]) -> float:
        """Return eta_s, eta or eta_w; the paper sets all three to the optimizer's."""
        o = self.options
        chosen = {"virtual": o.virtual_lr, "coarse": o.coarse_lr, "regulator": o.regulator_lr}[which]
        return self.task.optimizer.lr if chosen is None else chosen * self.task.rate

    def _rate(self, which: Literal["coarse", "regulator"]) -> Optimizer:
        """Return the shared optimizer with this regulator's learning rate."""
        return self.task.optimizer.with_lr(self._lr(which))


def per_image(logits: Tensor, label: Tensor) -> Tensor:
    """Return the cross-entropy (b,) of each image."""
    return F.cross_entropy(logits, label, reduction="none")


def norm(gradient: Tree) -> Tensor:
    """Return the Euclidean norm of a tree, reading each leaf once."""
    return torch.stack([torch.linalg.vector_norm(leaf) for leaf in tree.leaves(gradient)]).norm()
