"""FedDure (AAAI 2024): two regulators decide, image by image, how far a client may trust its own pseudo-labels.

On each client a fine-grained regulator (F-reg, a small MLP f_w) weighs every unlabeled image, and a coarse-grained
regulator (C-reg, a copy f_d of the network) reports whether learning from the pseudo-labels lowered the labeled loss.
F-reg is trained through one virtual step of C-reg (bi-level); the textbook way keeps the graph of that step's gradient.
Here the same derivative is one forward-mode pass: with v the gradient of the labeled loss at the virtual parameters,
dL/dw = - virtual_lr * d/dw D_v [mean_i H(w; z_i) CE(label_i, z_i)], where z are the strong views' logits; D_v needs
their tangent along v only, which `Network.tangent` takes from the activations of Eq. 4's forward pass. What is left
to differentiate in w is the MLP, whose derivatives are written out (`halfmoon.methods.fine_regulator`).

server: params, stats, round.  down: params, stats, gate.  memory: regulator (its parameters and optimizer state) or,
without F-reg, the state of thresholds that run; with `reward_baseline` the mean of past rewards; with
`keep_optimizer` the optimizer's state.  up: params, stats, weight.

Departures: where the authors' released code departs from the paper, this file follows the paper, which is what others
compare with. That code has no trained F-reg, the opposite sign of d (`sign`), soft pseudo-labels above a threshold of
0.6, a ramped weight of the unlabeled loss, C-reg on weak views, a learning rate that warms up anew, and labeled-only
steps at the start of every client update (`labeled_first`). What the paper leaves open is an option. The defaults
depart from the paper in `regulator_input`, `regulator_bias`, `regulator_lr`, `regulator_start` and `through_weights`;
`preset = "paper"` sets these to what the paper says. Adam in Eq. 2, which the paper prints as a plain step, is our
reading of its "Adam optimizer ... for eta_s, eta and eta_w"; `coarse_step` "plain" is the other one.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
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
from halfmoon.api.uploads import Upload
from halfmoon.core import padding, tree
from halfmoon.core.autodiff import cross_entropy, grad_and_value, vjp
from halfmoon.core.errors import UserError
from halfmoon.core.optim import SGD, Number, Optimizer, descend
from halfmoon.core.padding import mean
from halfmoon.core.tensors import euclidean
from halfmoon.core.tree import Tree
from halfmoon.methods.averaging import ModelAveraging
from halfmoon.methods.fine_regulator import Input, Through, WeightedLoss, weigh
from halfmoon.methods.objectives.base import per_image
from halfmoon.methods.objectives.pseudo_labeling import PseudoLabeling
from halfmoon.methods.objectives.thresholding import Rule
from halfmoon.models.network import linear


@dataclass(frozen=True)
class FedDure(ModelAveraging):
    """FedDure, Algorithm 1; where the defaults are not the paper's, `PAPER` holds what is.

    `coarse` and `fine` switch the regulators (Table 2): without C-reg, f_l takes the place of f_d in Eq. 4 and 5 and
    the term of Eq. 8 is dropped; without F-reg, the weights are 1[max p >= threshold], or those of another
    `thresholding` (`threshold_decay`: of its running means), and Eq. 2 is unweighted.
    `regulator_input`: F-reg sees an image's logits, their softmax, or the logits minus their mean over the classes
    ("centered"): cross-entropy does not see a number that is added to all logits, and Adam lets it drift, so raw logits
    move F-reg's answers without anything having been learned.
    `regulator_bias` is added to F-reg's last bias at the start: with 0 all weights begin near one half, with -4 near
    0.02. `regulator_start`: F-reg's first parameters are the same at all "clients" or drawn for each "client".
    `through_weights`: whether the gradients of Eq. 2 and 4 also pass through H's input ("product") or not ("detached").
    `virtual_lr`, `coarse_lr` and `regulator_lr` (None: the optimizer's) are the step sizes of Eq. 4, 2 and 5.
    `coarse_step`: Eq. 2 by the shared "optimizer" or as printed ("plain").
    `judge_prior`: Eq. 3 and 5 take the labeled loss of logits plus the log share of each class among the client's
    labels (Menon et al. 2021): agreeing with the client's class mix alone earns nothing then.
    `reward_baseline`: d counts from the mean of the client's earlier ones, which keeps this share of itself at a step
    (less in the first ones, where it is their plain mean); `reward_bound` then clips it to +- this.
    `warmup` rounds learn from labels alone, while the regulators train; so do the `labeled_first` steps at the start
    of every client update, in which the regulators stand still.
    `labels`: Eq. 1 asks the model of the moment at each "step", or the received model once a "round"; `debias` divides
    its answers by the client's mean prediction of the round first (FedDB's FedDPL, IJCAI 2024, Eq. 14).
    `keep_optimizer`: the local model's optimizer goes on where the client's last update ended.
    """

    needed = Requirements("sum", "", ("clients",))
    coarse: bool = True
    fine: bool = True
    threshold: float = 0.95
    thresholding: Rule = "fixed"
    threshold_decay: float = 0.999
    hidden: int = 128
    regulator_bias: float = -4.0
    regulator_input: Input = "centered"
    regulator_start: Literal["clients", "client"] = "clients"
    through_weights: Through = "detached"
    virtual_lr: float | None = None
    coarse_lr: float | None = None
    regulator_lr: float | None = 5e-5
    coarse_step: Literal["optimizer", "plain"] = "optimizer"
    sign: Literal["old-new", "new-old"] = "old-new"
    reward_baseline: float | None = None
    reward_bound: float | None = None
    judging: Literal["batch", "running"] = "batch"
    judge_prior: bool = False
    normalize_weights: bool = False
    keep_regulator: bool = True
    keep_regulator_optimizer: bool = True
    warmup: int = 0
    labels: Literal["step", "round"] = "step"
    debias: bool = False
    labeled_first: int = 0
    keep_optimizer: bool = False

    def __post_init__(self) -> None:
        if self.reward_baseline is not None and not 0 <= self.reward_baseline < 1:
            raise UserError(f"reward_baseline is {self.reward_baseline:g}: it must be from 0 to below 1.")
        if self.reward_bound is not None and not self.reward_bound > 0:
            raise UserError(f"reward_bound is {self.reward_bound:g}: it must be above 0.")
        if self.labeled_first < 0:
            raise UserError(f"labeled_first is {self.labeled_first}: it must be at least 0.")

    def client_updates(self, task: Task) -> Mapping[str, ClientUpdate]:
        return {"train": Regulated(task, self)}

    @property
    def guessing(self) -> PseudoLabeling:
        """Return where the pseudo-labels of Eq. 1 come from, and which count where no F-reg weighs them."""
        rule: dict[str, Any] = {"thresholding": self.thresholding, "threshold_decay": self.threshold_decay}
        rule = {} if self.fine else {**rule, "threshold": self.threshold}
        return PseudoLabeling(labels=self.labels, debias=self.debias, **rule)

    def start(self, task: Task, model: Tree) -> Tree:
        return {**model, "round": torch.zeros((), dtype=torch.int64)}

    def round(self, task: Task, server: Tree, federation: Federation) -> Tree:
        """Let the cohort train, and average; the gate stays shut during the labeled-only `warmup` rounds."""
        gate = (server["round"] >= self.warmup).to(torch.float32)
        broadcast = {"params": server["params"], "stats": server["stats"], "gate": gate}
        return {**federation.average("train", broadcast).update, "round": server["round"] + 1}


PAPER: dict[str, bool | int | float | str | None] = {
    "hidden": 128,
    "regulator_bias": 0.0,
    "regulator_input": "logits",
    "regulator_start": "client",
    "through_weights": "product",
    "virtual_lr": None,
    "coarse_lr": None,
    "regulator_lr": None,
    "sign": "old-new",
    "normalize_weights": False,
    "keep_regulator": True,
    "warmup": 0,
    "labeled_first": 0,
}
"""The options that the paper fixes, by its text (hidden, the three rates), its equations or Algorithm 1."""

PAPER_RUN: dict[str, int | float | str] = {
    "clients": 100,
    "cohort": 5,
    "dirichlet_alpha": 0.5,
    "labels_per_class": 5.0,
    "labeled_batch": 10,
    "epochs": 1,
    "network": "resnet9",
    "optimizer": "adam",
    "lr": 5e-4,
    "schedule": "constant",
}
"""What the paper fixes of a run beside the method (Section 4.1)."""


class Student(NamedTuple):
    """The network that the regulators train on: f_d, or f_l without C-reg."""

    params: Tree
    z: Tensor  # (b, classes) its logits of the strong views
    pull: Callable[[Tensor, bool], Tree]  # cotangent of z, whether another pull follows -> gradient in the parameters
    tangent: Callable[[Tree], Tensor]  # direction of the parameters -> tangent of z


def coarse_student(task: Task, params: Tree, batch: Batch) -> Student:
    """Return C-reg on the strong views alone."""
    network, strong, real = task.network, batch.u["strong"], batch.u_real
    z, pull, tape = vjp(lambda params: network.linearize(params, strong, real), params)

    def tangent(direction: Tree) -> Tensor:
        return network.tangent(params, strong, tape, direction, real)

    return Student(params, z, pull, tangent)


def local_student(
    task: Task, params: Tree, batch: Batch, logits: tuple[Tensor, Tensor], pull: Callable[..., Tree], apart: bool
) -> Student:
    """Return the local model in C-reg's place: the pass that it has made already.

    `logits` are those of labeled and strong images; `apart` says that the weak views had no part in the pass.
    """
    network, views, before = task.network, (batch.u["strong"],), 0
    real = batch.u_real
    labeled, strong = logits
    if task.statistics == "joint":  # the images of the pass that it has made, in its order
        before = len(batch.x)
        alone = apart or task.labeling == "running"
        views = (batch.x, *views) if alone else (batch.x, *views, batch.u["weak"])
        real = padding.concat(batch.masks(len(views) - 1))
    images = torch.cat(views)

    def tangent(direction: Tree) -> Tensor:
        tape = network.linearize(params, images, real)[1]
        moved = network.tangent(params, images, tape, direction, real)
        return moved[before : before + len(strong)]

    def pulled(cotangent: Tensor, again: bool) -> Tree:
        return pull((torch.zeros_like(labeled), cotangent), True)  # another pull always follows: the model's own

    return Student(params, strong, pulled, tangent)


def log_shares(data: ClientData, classes: int) -> Tensor:
    """Return the log share (classes,) of each class among a client's labels; a class without labels has next to none.

    Rows beyond the client's own are not counted.
    """
    own = torch.arange(len(data.y), device=data.y.device) < data.labeled
    counts = ((data.y[:, None] == torch.arange(classes, device=data.y.device)) & own[:, None]).sum(0)
    shares = counts.to(torch.float32) / data.labeled
    return shares.clamp_min(torch.finfo(torch.float32).tiny).log()


def followed(baseline: Tree, d: Tensor, decay: float) -> Tree:
    """Return the mean of rewards after it has seen d: a plain mean until `decay` forgets faster than that."""
    count = baseline["count"] + 1
    new = 1 - (1 - 1 / count).clamp_max(decay)
    return {"mean": baseline["mean"] + new.to(d.dtype) * (d - baseline["mean"]), "count": count}


def norm(gradient: Tree) -> Tensor:
    """Return the Euclidean norm of a tree, reading each leaf once."""
    return euclidean(torch.stack([euclidean(leaf) for leaf in tree.leaves(gradient)]))


@dataclass(frozen=True)
class Regulated(ClientUpdate):
    """The client of FedDure: F-reg and C-reg take a step each, then the local model does."""

    options: FedDure = FedDure()

    @property
    def requirements(self) -> UpdateRequirements:
        o = self.options
        return replace(
            o.guessing.requirements, per_client_generator=o.regulator_start == "client", keep_optimizer=o.keep_optimizer
        )

    def initial_memory(self, broadcast: Tree, generator: torch.Generator) -> Tree:
        like = next(tree.leaves(broadcast["params"]))
        memory: Tree = {} if self.options.fine else dict(self.options.guessing.initial_memory(self.task, broadcast))
        if self.options.fine:
            classes, hidden = self.task.network.classes, self.options.hidden
            params = {"hidden": linear(generator, classes, hidden), "out": linear(generator, hidden, 1)}
            params["out"]["bias"] = params["out"]["bias"] + self.options.regulator_bias
            memory["regulator"] = self._learner("regulator", tree.to(params, like.device, like.dtype))
        memory |= super().initial_memory(broadcast, generator)
        if self.options.reward_baseline is not None:
            memory["baseline"] = {"mean": like.new_zeros(()), "count": like.new_zeros((), dtype=torch.float64)}
        return memory

    def begin(self, broadcast: Tree, memory: Tree, data: ClientData) -> Tree:
        cached = self.options.guessing.prepare(self.task, broadcast, data)
        carry = {**super().begin(broadcast, memory, data), "cached": cached}
        carry |= self.options.guessing.begin(self.task, memory, data, cached)
        if self.options.coarse:
            carry["coarse"] = self._learner("coarse", broadcast["params"])
        if self.options.fine:
            regulator, fresh = memory["regulator"], not self.options.keep_regulator_optimizer
            carry["regulator"] = self._learner("regulator", regulator["params"]) if fresh else dict(regulator)
        if self.options.reward_baseline is not None:
            carry["baseline"] = memory["baseline"]
        if self.options.judge_prior:
            like = next(tree.leaves(broadcast["params"]))
            carry["judge"] = log_shares(data, self.task.network.classes).to(like.dtype)
        if self.options.labeled_first:
            carry["steps"] = torch.zeros((), dtype=torch.int64, device=data.y.device)
        return carry

    def step(self, broadcast: Tree, carry: Tree, batch: Batch) -> tuple[Tree, StepMetrics]:
        """Take one step of Algorithm 1, lines 8 to 17 (Eq. 1 to 10)."""
        forward = self.options.guessing.outputs

        def outputs(params: Tree) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, list[Tree]]]:
            labeled, strong, weak, moments = forward(self.task, params, carry["stats"], batch, carry["cached"])
            return (labeled, strong), (weak, moments)

        (labeled, strong), pull, (weak, moments) = vjp(outputs, carry["params"])
        (label, confidence, mask), own = self.options.guessing.pseudo_label(weak, batch, carry)  # Eq. 1
        if self.options.coarse:
            student = coarse_student(self.task, carry["coarse"]["params"], batch)
        else:
            apart = self.options.labels == "round"
            student = local_student(self.task, carry["params"], batch, (labeled, strong), pull, apart)
        weights, d, reward, regulators, norms = self._regulate(carry, batch, student, label, strong, mask)
        gate = broadcast["gate"].to(strong.dtype)
        if self.options.labeled_first:
            joint = carry["steps"] >= self.options.labeled_first
            gate, before = gate * joint.to(gate.dtype), {name: carry[name] for name in regulators}
            regulators = {**tree.select(joint, regulators, before), "steps": carry["steps"] + 1}
        trust = (weights + reward) * gate

        def loss(z: Tree) -> tuple[Tensor, tuple[Any, ...]]:  # Eq. 7, 8 and 9; Eq. 10 is the optimizer's step
            taught = mean(trust * per_image(z["strong"], label), batch.u_real)
            return _cross_entropy(z["labeled"], batch) + taught, ()

        cotangent, value, _ = grad_and_value(loss, {"labeled": labeled, "strong": strong})
        gradient = pull((cotangent["labeled"], cotangent["strong"]), False)
        samples = {"m": weighted_metric(weights, batch.u_real), "d": weighted_metric(d)}
        samples["mean_logit"] = weighted_metric(strong.mean(-1), batch.u_real)
        samples |= {name: weighted_metric(norm) for name, norm in norms.items()}
        notes = StepMetrics(value, samples, (PseudoLabels(label, confidence, trust),))
        return self.advance(carry, gradient, moments, consume=True, **own, **regulators), notes

    def finish(self, broadcast: Tree, carry: Tree, data: ClientData) -> tuple[Upload, Tree]:
        upload, memory = super().finish(broadcast, carry, data)
        names = list(() if self.options.fine else self.options.guessing.initial_memory(self.task, broadcast))
        names += ["regulator"] if self.options.fine and self.options.keep_regulator else []
        names += ["baseline"] if "baseline" in carry else []
        return upload, {**memory, **{name: carry[name] for name in names}}

    def passes(self, labeled: int, unlabeled: int) -> Passes:
        """Count the images of one step: local model, C-reg, tangent, virtual and judging passes.

        C-reg's tangent works from activations that are there: it counts as one forward pass, though it takes two
        convolutions a layer. Without C-reg the local model passes once more: two.
        """
        forward, backward = self.options.guessing.passes(self.task, labeled, unlabeled)
        shared = self.task.statistics == "joint"
        whole, whole_back = (backward, backward) if shared else (unlabeled, labeled + unlabeled)
        tangent = 2 * whole
        if self.options.coarse:
            tangent = whole_back = unlabeled
            forward, backward = forward + unlabeled + 2 * labeled, backward + unlabeled
        if self.options.fine:
            forward, backward = forward + tangent + labeled, backward + whole_back + labeled
        return Passes(forward, backward)

    def _regulate(
        self, carry: Tree, batch: Batch, student: Student, label: Tensor, strong: Tensor, mask: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tree, dict[str, Tensor]]:
        """Let F-reg, then C-reg, take their step, and return their verdicts.

        The weights m_i (b,) of Eq. 6, d () of Eq. 3, zero without C-reg, and what is made of it: the reward (), which
        weighs the term of Eq. 8; the regulators' new parts of the carry; the gradient norms of Theorems 1 and 2.
        """
        new: Tree = {}
        norms: dict[str, Tensor] = {}
        regulator: Tree = {}
        kind, through = self.options.regulator_input, self.options.through_weights
        weighted = WeightedLoss.of(student.z, label, kind, through, batch.u_real)
        if self.options.fine:
            new["regulator"], norms["regulator_gradient"] = self._teach_fine(carry, batch, student, weighted)
            regulator = new["regulator"]["params"]
            weights = weigh(regulator, strong, self.options.regulator_input)  # Eq. 6
        else:
            weights = mask
        if self.options.normalize_weights:
            weights = weights / mean(weights, batch.u_real).clamp_min(1e-12)
        d = reward = torch.zeros_like(weights.mean())
        if self.options.coarse:
            gradient = student.pull(weighted.blame(regulator), False)  # Eq. 2
            norms["coarse_gradient"] = norm(gradient)
            new["coarse"] = self._learned("coarse", carry["coarse"], gradient)
            with torch.no_grad():  # Eq. 3
                before, after = (
                    self._labeled_loss(part["params"], carry, batch) for part in (carry["coarse"], new["coarse"])
                )
            reward = d = after - before if self.options.sign == "new-old" else before - after
            if self.options.reward_baseline is not None:
                reward = d - carry["baseline"]["mean"]
                new["baseline"] = followed(carry["baseline"], d, self.options.reward_baseline)
            if self.options.reward_bound is not None:
                reward = reward.clamp(-self.options.reward_bound, self.options.reward_bound)
        return weights, d, reward, new, norms

    def _teach_fine(self, carry: Tree, batch: Batch, student: Student, weighted: WeightedLoss) -> tuple[Tree, Tensor]:
        """Return F-reg after a step on the labeled loss at the virtual parameters (Eq. 4, 5), and its gradient norm."""
        before = carry["regulator"]
        lr = self._rate("virtual")
        virtual = descend(student.params, student.pull(weighted.blame(before["params"]), True), lr)
        labeled_gradient, _, _ = grad_and_value(lambda params: (self._labeled_loss(params, carry, batch), ()), virtual)
        lesson = weighted.lesson(before["params"], student.tangent(labeled_gradient))
        gradient = tree.map(lambda leaf: leaf * -lr, lesson)  # Eq. 5
        size = norm(gradient)
        return self._learned("regulator", before, gradient), size

    def _optimizer(self, which: Literal["coarse", "regulator"]) -> Optimizer:
        """Return the shared optimizer with this regulator's learning rate, or C-reg's plain step."""
        lr, plain = self._rate(which), which == "coarse" and self.options.coarse_step == "plain"
        return SGD(lr) if plain else self.task.optimizer.with_lr(lr)

    def _rate(self, which: Literal["virtual", "coarse", "regulator"]) -> Number:
        """Return eta_s, eta or eta_w; the paper sets all three to the optimizer's."""
        lr: float | None = getattr(self.options, f"{which}_lr")
        return self.task.optimizer.lr if lr is None else lr * self.task.rate

    def _learner(self, which: Literal["coarse", "regulator"], params: Tree) -> Tree:
        return {"params": params, "optimizer": self._optimizer(which).init(params)}

    def _learned(self, which: Literal["coarse", "regulator"], learner: Tree, gradient: Tree) -> Tree:
        stays = self.options.labeled_first > 0  # and may be gone back to
        state = learner["optimizer"]
        params, optimizer = self._optimizer(which).step(learner["params"], gradient, state, consume=not stays)
        return {"params": params, "optimizer": optimizer}

    def _labeled_loss(self, params: Tree, carry: Tree, batch: Batch) -> Tensor:
        """Return CE(y, f(x)) of the minibatch, the judge of Eq. 3 and 5."""
        if self.options.judging == "running":
            logits = self.task.network.predict(params, carry["stats"], batch.x)
        else:
            logits = self.task.network.train(params, batch.x, real=batch.x_real)[0]
        return _cross_entropy(logits + carry["judge"] if self.options.judge_prior else logits, batch)


def _cross_entropy(logits: Tensor, batch: Batch) -> Tensor:
    """Return the mean over the labeled images of a minibatch."""
    if batch.x_real is None:
        return cross_entropy(logits, batch.y)
    return mean(per_image(logits, batch.y), batch.x_real)


ROWS = (
    MethodEntry("feddure", "FedDure", "FedDure, AAAI 2024", "dual regulators weigh each client's pseudo-labels",
                FedDure(), paper_options=PAPER, paper_run=PAPER_RUN),
    MethodEntry("feddure-without-creg", "FedDure without C-reg", "FedDure, AAAI 2024, Table 2",
                "the fine-grained regulator alone, trained through the local model", FedDure(coarse=False),
                paper_options=PAPER, paper_run=PAPER_RUN),
    MethodEntry("feddure-without-freg", "FedDure without F-reg", "FedDure, AAAI 2024, Table 2",
                "the coarse-grained regulator alone, with a fixed threshold", FedDure(fine=False), paper_options=PAPER,
                paper_run=PAPER_RUN),
)  # fmt: skip
