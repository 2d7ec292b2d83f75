"""FedDure (AAAI 2024): two regulators decide for each image how much weight its pseudo-label gets in the loss.

On each client a fine-grained regulator (F-reg, a small MLP f_w) weighs every unlabeled image, and a coarse-grained
regulator (C-reg, a copy f_d of the network) measures whether training on the pseudo-labels lowered the labeled loss.
F-reg is trained through one virtual step of C-reg (bi-level optimization). The usual implementation stores the graph of
that step's gradient. Here the same derivative is one forward-mode pass: with v the gradient of the labeled loss at the
virtual parameters, dL/dw = - virtual_lr * d/dw D_v [mean_i H(w; z_i) CE(label_i, z_i)], where z are the strong views'
logits. D_v needs only their tangent along v, which `Network.tangent` computes from the activations of Eq. 4's forward
pass. Only the MLP remains to be differentiated in w, in closed form (`halfmoon.methods.fine_regulator`).

server: params, stats, round; with `share_regulator` regulator (F-reg's parameters).  broadcast: params, stats, gate; with
`share_regulator` regulator.  memory: regulator (its parameters and optimizer state) or, without F-reg, the state of
adaptive thresholds; with `reward_baseline` the mean of past rewards; with `signal_weight` the mean signal of each
unlabeled image; with `keep_optimizer` the optimizer's state.  upload: params, stats, weight; with `share_regulator` regulator.

Departures: where the authors' released code departs from the paper, this file follows the paper, because publications
compare with the paper. That code has no trained F-reg, the opposite sign of d (`sign`), soft pseudo-labels above a
threshold of 0.6, a ramped weight of the unlabeled loss, C-reg on weak views, a learning rate with repeated warm-up, and
labeled-only steps at the start of every client update (`labeled_first`). Points that the paper leaves open are options.
The defaults depart from the paper in `regulator_input`, `regulator_bias`, `regulator_lr`, `regulator_start` and
`through_weights`; `preset = "paper"` sets these to the paper's values. `regulator_prior`, `signal_weight`,
`share_regulator`, `signal_labels` and the input "confidence" are ours, and off by default. The paper prints Eq. 2 as a plain step; Adam is
our reading of its "Adam optimizer ... for eta_s, eta and eta_w"; `coarse_step` "plain" is the other reading.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, NamedTuple

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
from halfmoon.api.uploads import UPDATE_ONLY, Upload, UploadSpec
from halfmoon.core import padding, rng, tree
from halfmoon.core.autodiff import cross_entropy, grad_and_value, vjp
from halfmoon.core.errors import UserError
from halfmoon.core.optim import SGD, Number, Optimizer, gradient_step
from halfmoon.core.padding import mean
from halfmoon.core.tensors import euclidean_norm
from halfmoon.core.tree import Tree
from halfmoon.methods.averaging import ModelAveraging
from halfmoon.methods.fine_regulator import (
    GradientPath,
    RegulatorInput,
    WeightedLoss,
    compute_instance_weights,
    compute_log_odds,
)
from halfmoon.methods.objectives.base import cross_entropy_per_image, label_weights
from halfmoon.methods.objectives.pseudo_labeling import PseudoLabeling
from halfmoon.methods.objectives.thresholding import NO_LABEL, Rule, recall_row_labels, unused_threshold_options
from halfmoon.models.network import linear

ONLY_WITHOUT_FREG: tuple[str, ...] = ("threshold", "thresholding", "threshold_decay")
ONLY_WITH_FREG: tuple[str, ...] = (
    "hidden",
    "regulator_bias",
    "regulator_input",
    "regulator_start",
    "virtual_lr",
    "regulator_lr",
    "keep_regulator",
    "keep_regulator_optimizer",
    "through_weights",
)
ONLY_WITH_CREG: tuple[str, ...] = ("coarse_lr", "coarse_step", "sign", "reward_baseline", "reward_bound")


@dataclass(frozen=True)
class FedDure(ModelAveraging):
    """FedDure, Algorithm 1. `PAPER` contains the paper's values of the options.

    Attributes:
        coarse: whether there is a C-reg (Table 2). Without it, f_l replaces f_d in Eq. 4 and 5, and the term of Eq. 8
            is dropped.
        fine: whether there is an F-reg (Table 2). Without it, the weights are 1[max p >= threshold], or those of
            another `thresholding` (with `threshold_decay` for its running means), and Eq. 2 is unweighted.
        regulator_bias: added to F-reg's last bias at the start: with 0 all weights begin at about 0.5, with -4 at about
            0.02.
        regulator_input: F-reg gets an image's logits, their softmax, or the logits minus their mean over the classes
            ("centered"). Cross-entropy does not depend on a constant that is added to all logits, and Adam lets that
            constant drift; so raw logits change F-reg's weights without any learning. "confidence": F-reg gets only the
            log-odds of the pseudo-label's confidence, so it learns from which confidence on pseudo-labels help.
        regulator_prior: "confidence" adds the log-odds of the pseudo-label's confidence to F-reg's output before the
            sigmoid: an untrained F-reg with `regulator_bias` 0 weighs an image by about its confidence.
        signal_weight: if above 0, the client stores for each unlabeled image the mean of its signals of all steps (how much
            a step on it would have lowered the labeled loss, `WeightedLoss.compute_signal`) since its pseudo-label last
            changed. This mean, times `signal_weight`, is added to F-reg's output before the sigmoid.
        share_regulator: whether the server averages F-reg's parameters over clients, like the model. Otherwise F-reg
            remains at its client (Algorithm 1), where it learns from the client's labels only.
        signal_labels: labeled images by which Eq. 3 and 5 measure the effect of a step on pseudo-labels: those of the
            "minibatch" on which the local model trains, or "halves": in every round the local model trains on every
            other labeled image of the client, and Eq. 3 and 5 use the rest. The halves swap from round to round.
        regulator_start: F-reg's initial parameters are the same at all "clients", or drawn for each "client".
        through_weights: whether the gradients of Eq. 2 and 4 also pass through H's input ("product") or not
            ("detached").
        virtual_lr, coarse_lr, regulator_lr: step sizes of Eq. 4, 2 and 5; None: the optimizer's learning rate.
        coarse_step: whether Eq. 2 uses the shared "optimizer" or a "plain" gradient step, as printed.
        judge_prior: whether Eq. 3 and 5 add to the logits of the labeled loss the log share of each class among the
            client's labels (Menon et al. 2021). Then F-reg is not rewarded for agreeing with the client's class mix.
        reward_baseline: decay of a running mean of the client's past d, which is subtracted from d (a plain mean in the
            first steps).
        reward_bound: the result is then clipped to this absolute value.
        warmup: number of rounds that train on labels only, while the regulators train.
        labeled_first: number of steps at the start of every client update that train on labels only, while the
            regulators do not change.
        labels: Eq. 1 predicts with the current model in each "step", or with the received model once a "round".
        debias: whether predictions are first divided by the client's mean prediction of the round (FedDB's FedDPL,
            IJCAI 2024, Eq. 14).
        keep_optimizer: whether the local model's optimizer state is retained between rounds.
    """

    uses_class_weights: ClassVar[bool] = True

    method_requirements = Requirements(aggregation="sum", reason="", label_locations=("clients",))
    coarse: bool = True
    fine: bool = True
    threshold: float = 0.95
    thresholding: Rule = "fixed"
    threshold_decay: float = 0.999
    hidden: int = 128
    regulator_bias: float = -4.0
    regulator_input: RegulatorInput = "centered"
    regulator_start: Literal["clients", "client"] = "clients"
    regulator_prior: Literal["none", "confidence"] = "none"
    signal_weight: float = 0.0
    share_regulator: bool = False
    signal_labels: Literal["minibatch", "halves"] = "minibatch"
    through_weights: GradientPath = "detached"
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
        if self.signal_weight < 0:
            raise UserError(f"signal_weight is {self.signal_weight:g}: it must be at least 0.")
        if self.labeled_first < 0:
            raise UserError(f"labeled_first is {self.labeled_first}: it must be at least 0.")
        if not self.fine:
            for name, default in (("regulator_prior", "none"), ("signal_weight", 0), ("share_regulator", False)):
                if getattr(self, name) != default:
                    raise UserError(f"{name} has no effect without F-reg (fine is false): leave it out.")
            if not self.coarse and self.signal_labels != "minibatch":
                raise UserError(
                    "signal_labels has no effect without regulators (fine and coarse are false): leave it out."
                )
        if self.share_regulator and self.regulator_start == "client":
            raise UserError(
                "regulator_start is 'client', but with share_regulator the server sends all clients one F-reg: leave "
                "one of the two out."
            )
        if self.regulator_input == "confidence" and self.through_weights == "product":
            raise UserError(
                "through_weights is 'product', but F-reg's input is the confidence, through which no gradient passes: "
                "set through_weights to 'detached'."
            )

    @property
    def unused_options(self) -> dict[str, str]:
        """List the options that have no effect beside the others, each with the reason (`registry.unused_options`)."""
        unused: dict[str, str] = {}
        if self.fine:
            reason = "with F-reg (fine is true), which weighs every pseudo-label"
            unused |= dict.fromkeys(ONLY_WITHOUT_FREG, reason)
        else:
            unused |= unused_threshold_options(self.thresholding)
            unused |= dict.fromkeys(ONLY_WITH_FREG, "without F-reg (fine is false)")
        if not self.coarse:
            unused |= dict.fromkeys(ONLY_WITH_CREG, "without C-reg (coarse is false)")
        if not self.fine and not self.coarse:
            without_regulators = ("judging", "judge_prior")
            unused |= dict.fromkeys(without_regulators, "without regulators (fine and coarse are false)")
        if not self.keep_regulator and self.fine:
            unused["keep_regulator_optimizer"] = "if clients do not keep F-reg (keep_regulator is false)"
        return unused

    def client_updates(self, task: Task) -> Mapping[str, ClientUpdate]:
        return {"train": FedDureClient(task, self)}

    @property
    def pseudo_labeling(self) -> PseudoLabeling:
        """The rule of FedDure's Eq. 1, by which a client predicts labels of its unlabeled images.

        The fine-grained regulator weighs every image, so a confidence threshold applies only without it (`fine` False).
        With `debias` predictions are divided by their mean over the client's images; `labels` is whether labels are
        predicted in each "step" or once a "round".
        """
        threshold_options: dict[str, Any] = {}
        if not self.fine:
            threshold_options = {
                "thresholding": self.thresholding,
                "threshold_decay": self.threshold_decay,
                "threshold": self.threshold,
            }
        return PseudoLabeling(labels=self.labels, debias=self.debias, **threshold_options)

    def start(self, task: Task, model: Tree) -> Tree:
        server: Tree = {**model, "round": torch.zeros((), dtype=torch.int64)}
        if self.share_regulator:
            # The same initial F-reg for every seed.
            generator = rng.generator(0, "feddure", "regulator")
            server["regulator"] = self.init_regulator(task, generator, next(tree.leaves(model["params"])))
        return server

    def init_regulator(self, task: Task, generator: torch.Generator, like: Tensor) -> Tree:
        """Draw initial parameters of F-reg, an MLP with one hidden layer.

        Args:
            task: with the network, whose number of classes is the number of F-reg's inputs.
            generator: draws the parameters.
            like: gives their device and dtype.
        """
        inputs = 1 if self.regulator_input == "confidence" else task.network.classes
        params = {"hidden": linear(generator, inputs, self.hidden), "out": linear(generator, self.hidden, 1)}
        # The output's bias sets the initial weight of all images: sigmoid(bias), without a prior.
        params["out"]["bias"] = params["out"]["bias"] + self.regulator_bias
        return tree.to(params, like.device, like.dtype)

    def round(self, task: Task, server: Tree, federation: Federation) -> Tree:
        """Train the cohort, and average; the gate is 0 during the labeled-only `warmup` rounds."""
        gate = (server["round"] >= self.warmup).to(torch.float32)
        broadcast = {"params": server["params"], "stats": server["stats"], "gate": gate}
        if self.share_regulator:
            broadcast["regulator"] = server["regulator"]
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
"""Options that the paper states in its text (hidden, the three learning rates), its equations or Algorithm 1."""

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
"""Options of the run that the paper states (Section 4.1)."""


MIN_MEAN_WEIGHT = 1e-12
"""Smallest divisor if weights are normalized by their mean."""


class Student(NamedTuple):
    """The network that the regulators train on: f_d, or f_l without C-reg.

    Attributes:
        params: its parameters.
        logits: of the strong views, (b, classes).
        backward: computes the gradient in the parameters from a gradient in the logits; the second argument is True if
            the graph is needed for a later call.
        tangent: computes the derivative of the logits along a direction of the parameters.
    """

    params: Tree
    logits: Tensor
    backward: Callable[[Tensor, bool], Tree]
    tangent: Callable[[Tree], Tensor]


def build_coarse_student(task: Task, params: Tree, batch: Batch) -> Student:
    """Run FedDure's coarse-grained regulator (C-reg), a copy of the classifier, on the strong views of a minibatch.

    Args:
        task: with the network.
        params: C-reg's parameters.
        batch: the minibatch; only the strongly augmented unlabeled images are used.

    Returns:
        C-reg's logits, and functions for its reverse-mode gradient and its forward-mode derivative.
    """
    network = task.network
    strong_images = batch.u["strong"]
    mask = batch.u_real
    # One forward pass serves two derivatives: `backward` (reverse mode, a gradient in the parameters), and the function
    # `tangent` below (forward mode), for which `linearize` returns the activations of all layers as `tape`.
    logits, backward, tape = vjp(lambda params: network.linearize(params, strong_images, mask), params)

    def tangent(direction: Tree) -> Tensor:
        """Compute the derivative of the logits along `direction`, a tree like `params`."""
        return network.tangent(params, strong_images, tape, direction, mask)

    return Student(params, logits, backward, tangent)


def build_local_student(
    task: Task,
    params: Tree,
    batch: Batch,
    logits: tuple[Tensor, Tensor],
    backward: Callable[..., Tree],
    labels_of_round: bool,
) -> Student:
    """Use the local model instead of FedDure's C-reg, with the forward pass that has already been made.

    Args:
        task: settings that all methods share: network, optimizer, rules for batch statistics.
        params: parameters of the local model.
        batch: labeled images x, labels y, views u of unlabeled images; x_real and u_real mask padding.
        logits: those of labeled images (B, classes) and of strong views (b, classes).
        backward: computes the gradient of that pass in the parameters, from gradients in both logits.
        labels_of_round: whether the weak views were not part of the pass, because labels are computed once a round.

    Returns:
        What the fine-grained regulator trains through: the logits of the strong views, with functions for their gradient
        and for their derivative along a direction of the parameters.
    """
    network = task.network
    labeled_logits, strong_logits = logits
    views = (batch.u["strong"],)
    images_before_strong = 0
    mask = batch.u_real
    if task.statistics == "joint":
        # Batch statistics depend on all images of the pass: repeat them in the same order.
        images_before_strong = len(batch.x)
        # "running": pseudo-labels are predicted in another pass, under running statistics.
        weak_separate = labels_of_round or task.labeling == "running"
        views = (batch.x, *views) if weak_separate else (batch.x, *views, batch.u["weak"])
        mask = padding.concat(batch.masks(views=len(views) - 1))
    images = torch.cat(views)

    def tangent(direction: Tree) -> Tensor:
        # The local model's pass recorded no tape, so the forward pass is repeated here.
        tape = network.linearize(params, images, mask)[1]
        tangents = network.tangent(params, images, tape, direction, mask)
        # Only the strong views have pseudo-labels.
        return tangents[images_before_strong : images_before_strong + len(strong_logits)]

    def strong_backward(gradient: Tensor, retain_graph: bool) -> Tree:
        # Retain the graph in any case: the local model's gradient is computed from it afterwards.
        return backward((torch.zeros_like(labeled_logits), gradient), True)

    return Student(params, strong_logits, strong_backward, tangent)


def compute_log_shares(data: ClientData, classes: int) -> Tensor:
    """Compute the logarithm (classes,) of each class's share of a client's labels; finite for absent classes."""
    # Padding rows come last.
    is_real = torch.arange(len(data.y), device=data.y.device) < data.labeled
    is_class = data.y[:, None] == torch.arange(classes, device=data.y.device)
    class_counts = (is_class & is_real[:, None]).sum(0)
    shares = class_counts.to(torch.float32) / data.labeled
    return shares.clamp_min(torch.finfo(torch.float32).tiny).log()


def update_running_mean(baseline: Tree, value: Tensor, decay: float) -> Tree:
    """Update an exponential moving average that starts as the plain mean of its first values.

    FedDure subtracts this mean of past rewards (`reward_baseline`) from a client's reward.

    Args:
        baseline: "mean" () of the earlier values, and their "count" ().
        value: the new value, ().
        decay: largest weight of the old mean in the new one, from 0 to below 1.

    Returns:
        The new "mean" and "count".
    """
    count = baseline["count"] + 1
    # The weight of the new value is 1 / count until that falls to 1 - decay: there is no bias towards the initial 0.
    new_weight = 1 - (1 - 1 / count).clamp_max(decay)
    return {"mean": baseline["mean"] + new_weight.to(value.dtype) * (value - baseline["mean"]), "count": count}


def compute_gradient_norm(gradient: Tree) -> Tensor:
    """Compute the Euclidean norm () of a tree, reading each leaf once."""
    return euclidean_norm(torch.stack([euclidean_norm(leaf) for leaf in tree.leaves(gradient)]))


class Regulation(NamedTuple):
    """Result of the regulators' steps.

    Attributes:
        weights: m_i of Eq. 6, (b,).
        d: improvement of the labeled loss (Eq. 3), (); 0 without C-reg.
        reward: weight of the term of Eq. 8, (): d, after baseline and bound.
        carry: the regulators' new entries of the carry.
        norms: gradient norms of Theorems 1 and 2, by name.
    """

    weights: Tensor
    d: Tensor
    reward: Tensor
    carry: Tree
    norms: dict[str, Tensor]


SHARED_REGULATOR = UploadSpec(update=("params", "stats", "regulator"))
"""Content of an upload with the option `share_regulator`."""


SIGNAL_ROWS = {"signals/label": NO_LABEL, "signals/mean": 0, "signals/count": 0}
"""Leaves of the memory with an entry for each unlabeled image, with the option `signal_weight`."""

PRIOR_SIGNALS = 5
"""Number of signals of 0 that count in an image's mean, so that the first few signals do not decide."""


def recall_signals(memory: Tree, data: ClientData) -> Tree:
    """Load the mean signal of each image, F-reg's learning signal averaged over earlier rounds, from a client's memory.

    Signals of other images are of no use: if the client's images have changed since, all begin anew.

    Args:
        memory: "label" (U,), the pseudo-label that an image's signals are of; their "mean" (U,) and "count" (U,); and
            "mark" (), a hash of the images at that time.
        data: the client's U unlabeled images.

    Returns:
        The same for the current images. Without a label, mean and count are of no meaning.
    """
    label, mark = recall_row_labels(memory, data)
    stored = {name: memory[name] for name in ("mean", "count")}
    if len(memory["label"]) != len(label):
        stored = {name: torch.zeros_like(label, dtype=leaf.dtype) for name, leaf in stored.items()}
    return {"label": label, "mark": mark, **stored}


def update_signals(signals: Tree, signal: Tensor, labels: Tensor, rows: Tensor, real: Tensor | None) -> Tree:
    """Add the signals of a minibatch to the means of its images. An image with a new pseudo-label starts anew.

    Args:
        signals: the result of `recall_signals`.
        signal: of b images, (b,).
        labels: their pseudo-labels, (b,).
        rows: indices of the images among the client's U images, (b,).
        real: (b,) bool, False for padding rows; None if no row is padding.
    """
    # A comparison with all rows instead of an indexed write: a minibatch may contain an image twice.
    is_row = rows[:, None] == torch.arange(len(signals["label"]), device=rows.device)
    if real is not None:
        is_row = is_row & real[:, None]
    new_label = torch.where(is_row, labels[:, None], NO_LABEL).amax(0)
    new_label = torch.where(new_label == NO_LABEL, signals["label"], new_label)
    restarts = new_label != signals["label"]
    mean_before = torch.where(restarts, 0.0, signals["mean"])
    count_before = torch.where(restarts, 0.0, signals["count"])
    new_count = is_row.to(signal.dtype).sum(0)
    new_total = signal @ is_row.to(signal.dtype)
    count = count_before + new_count
    new_mean = mean_before + (new_total - new_count * mean_before) / count.clamp_min(1)
    return {"label": new_label, "mark": signals["mark"], "mean": new_mean, "count": count}


def look_up_signals(signals: Tree, labels: Tensor, rows: Tensor) -> Tensor:
    """Look up the mean signals (b,) of a minibatch, shrunk towards 0; 0 for an image with a new pseudo-label.

    Args:
        signals: the result of `update_signals`.
        labels: pseudo-labels of the images, (b,).
        rows: indices of the images, (b,).
    """
    count = signals["count"][rows]
    shrunk = signals["mean"][rows] * count / (count + PRIOR_SIGNALS)
    return torch.where(signals["label"][rows] == labels, shrunk, 0.0)


@dataclass(frozen=True)
class FedDureClient(ClientUpdate):
    """The client of FedDure: F-reg and C-reg take a step each, then the local model does."""

    uses_tangents: ClassVar[bool] = True
    options: FedDure = FedDure()

    @property
    def requirements(self) -> UpdateRequirements:
        pseudo_labeling = self.options.pseudo_labeling.requirements
        return replace(
            pseudo_labeling,
            per_client_generator=self.options.regulator_start == "client",
            keep_optimizer=self.options.keep_optimizer,
            row_memory={**pseudo_labeling.row_memory, **(SIGNAL_ROWS if self.options.signal_weight else {})},
            upload_spec=SHARED_REGULATOR if self.options.share_regulator else UPDATE_ONLY,
        )

    def initial_memory(self, broadcast: Tree, generator: torch.Generator) -> Tree:
        """Create the state that a client of FedDure stores between rounds, when it takes part for the first time.

        Args:
            broadcast: the server's model; it gives the device and dtype.
            generator: draws the initial weights of the fine-grained regulator (F-reg), an MLP on an image's logits.

        Returns:
            F-reg with its optimizer state ("regulator") or, without F-reg, the state of adaptive thresholds; and the
            running mean of past rewards ("baseline") if that option is set.
        """
        model_leaf = next(tree.leaves(broadcast["params"]))
        memory: Tree = {}
        if self.options.fine:
            params = self.options.init_regulator(self.task, generator, model_leaf)
            memory["regulator"] = self._init_regulator("regulator", params)
        else:
            memory |= self.options.pseudo_labeling.initial_memory(self.task, broadcast)
        if self.options.signal_weight:
            no_rows = model_leaf.new_zeros((0,))
            no_labels = no_rows.to(torch.int64)
            mark = model_leaf.new_zeros((), dtype=torch.float64)
            memory["signals"] = {"label": no_labels, "mark": mark, "mean": no_rows, "count": no_rows.clone()}
        memory |= super().initial_memory(broadcast, generator)
        if self.options.reward_baseline is not None:
            memory["baseline"] = {
                "mean": model_leaf.new_zeros(()),
                "count": model_leaf.new_zeros((), dtype=torch.float64),
            }
        return memory

    def begin(self, broadcast: Tree, memory: Tree, data: ClientData) -> Tree:
        """Build the state of a client update (`carry`): the local model, both regulators, and data of pseudo-labeling.

        F-reg, the fine-grained regulator, is an MLP that weighs pseudo-labeled images, and remains at its client. C-reg,
        the coarse-grained one, is a copy of the classifier that tests whether the pseudo-labels lower the labeled loss.

        Args:
            broadcast: the model that the server sent, in "params" and "stats".
            memory: the state that the client stored after its last update.
            data: the client's images and labels.
        """
        # What is predicted once, on all images, before the first step.
        cached = self.options.pseudo_labeling.prepare(self.task, broadcast, data)
        carry = {**super().begin(broadcast, memory, data), "cached": cached}
        carry |= self.options.pseudo_labeling.begin(self.task, memory, data, cached)
        if self.options.coarse:
            # C-reg starts from the received global model in every round; it is not stored.
            carry["coarse"] = self._init_regulator("coarse", broadcast["params"])
        if self.options.fine:
            regulator = memory["regulator"]
            if self.options.share_regulator:
                # The optimizer's state is the client's: only the parameters are averaged.
                regulator = {**regulator, "params": broadcast["regulator"]}
            if self.options.keep_regulator_optimizer:
                carry["regulator"] = dict(regulator)
            else:
                carry["regulator"] = self._init_regulator("regulator", regulator["params"])
        if self.options.signal_weight:
            carry["signals"] = recall_signals(memory["signals"], data)
        if self.options.reward_baseline is not None:
            carry["baseline"] = memory["baseline"]
        if self.options.judge_prior:
            # Added to the logits in the labeled loss, so that it does not reward the client's frequent classes.
            model_leaf = next(tree.leaves(broadcast["params"]))
            carry["label_log_shares"] = compute_log_shares(data, self.task.network.classes).to(model_leaf.dtype)
        if self.options.labeled_first:
            # Number of steps so far: in the first `labeled_first` ones only labels count, and the regulators rest.
            carry["steps"] = torch.zeros((), dtype=torch.int64, device=data.y.device)
        return carry

    def step(self, broadcast: Tree, carry: Tree, batch: Batch) -> tuple[Tree, StepMetrics]:
        """Take one step of FedDure (AAAI 2024), Algorithm 1, lines 8 to 17.

        Pseudo-label the weak views (Eq. 1), let both regulators take a step (Eq. 2 to 6), then train the local model on
        labels and weighted pseudo-labels (Eq. 7 to 10).

        Args:
            broadcast: the tree that the server sent; "gate" is 0 in rounds that train on labels only, else 1.
            carry: state of the client update: local model, regulators, optimizers' states, thresholds.
            batch: labeled images x, labels y, views u of unlabeled images; x_real and u_real mask padding.

        Returns:
            The new carry, and the step's loss, metrics and pseudo-labels.
        """

        def outputs(params: Tree) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, list[Tree]]]:
            """Split the outputs into those to differentiate and auxiliary ones."""
            labeled, strong, weak, moments = self.options.pseudo_labeling.compute_outputs(
                self.task, params, carry["stats"], batch, carry["cached"]
            )
            return (labeled, strong), (weak, moments)

        (labeled, strong), backward, (weak, moments) = vjp(outputs, carry["params"])
        pseudo, thresholds = self.options.pseudo_labeling.pseudo_label(weak, batch, carry)  # Eq. 1
        if self.options.coarse:
            student = build_coarse_student(self.task, carry["coarse"]["params"], batch)
        else:
            labels_of_round = self.options.labels == "round"
            student = build_local_student(
                self.task, carry["params"], batch, (labeled, strong), backward, labels_of_round
            )
        regulation = self._regulate(carry, batch, student, pseudo, strong)
        new_regulators = regulation.carry
        gate = broadcast["gate"].to(strong.dtype)
        if self.options.labeled_first:
            is_past = carry["steps"] >= self.options.labeled_first
            gate = gate * is_past.to(gate.dtype)
            old_regulators = {name: carry[name] for name in new_regulators}
            new_regulators = {**tree.select(is_past, new_regulators, old_regulators), "steps": carry["steps"] + 1}
        # Eq. 7 weighs each image by m_i, and Eq. 8 adds the reward d to all images of the minibatch.
        trust = (regulation.weights + regulation.reward) * gate

        def loss(logits: Tree) -> tuple[Tensor, tuple[Any, ...]]:
            """Compute Eq. 7, 8 and 9; Eq. 10 is the optimizer's step."""
            pseudo_loss = mean(trust * cross_entropy_per_image(logits["strong"], pseudo.label), batch.u_real)
            labeled_loss = self._labeled_cross_entropy(logits["labeled"], batch, self._training_images(batch))
            return labeled_loss + pseudo_loss, ()

        logit_gradient, value, _ = grad_and_value(loss, {"labeled": labeled, "strong": strong})
        # False: this is the last use of the local model's graph, which is then freed.
        gradient = backward((logit_gradient["labeled"], logit_gradient["strong"]), False)
        samples = {"m": weighted_metric(regulation.weights, batch.u_real), "d": weighted_metric(regulation.d)}
        samples["mean_logit"] = weighted_metric(strong.mean(-1), batch.u_real)
        samples |= {name: weighted_metric(norm) for name, norm in regulation.norms.items()}
        metrics = StepMetrics(value, samples=samples, pseudo=(PseudoLabels(pseudo.label, pseudo.confidence, trust),))
        new = self.optimizer_step(carry, gradient, moments, consume=True, **thresholds, **new_regulators)
        return new, metrics

    def finish(self, broadcast: Tree, carry: Tree, data: ClientData) -> tuple[Upload, Tree]:
        """Return the upload (the local model, weighted by images), and the state that the client stores.

        The stored state is the fine-grained regulator or, without it, the state of adaptive thresholds; and the running
        mean of rewards. C-reg is not stored: it starts from the global model in every round.

        Args:
            broadcast: the tree that the server sent.
            carry: state of the client update after its last step.
            data: the client's images and labels.
        """
        upload, memory = super().finish(broadcast, carry, data)
        stored_names: list[str] = []
        if not self.options.fine:
            # The keys of the thresholds' state; its initial values are not used here.
            stored_names += self.options.pseudo_labeling.initial_memory(self.task, broadcast)
        elif self.options.keep_regulator:
            stored_names.append("regulator")
        stored_names += [name for name in ("baseline", "signals") if name in carry]
        if self.options.share_regulator:
            upload = upload._replace(update={**upload.update, "regulator": carry["regulator"]["params"]})
        return upload, {**memory, **{name: carry[name] for name in stored_names}}

    def passes(self, labeled: int, unlabeled: int) -> Passes:
        """Count the images that one step of FedDure sends forward and backward through networks of the classifier's size.

        The student is the network on which the regulators train: the coarse-grained regulator C-reg, a copy of the
        classifier, or without it the local model. The fine-grained regulator F-reg is a small MLP and is not counted,
        but its gradient needs a labeled loss, and a tangent (forward-mode derivative) of the student.

        Args:
            labeled: number of labeled images of the step.
            unlabeled: number of unlabeled images of the step.
        """
        # The local model: predicting pseudo-labels, and its training step.
        forward, backward = self.options.pseudo_labeling.passes(self.task, labeled, unlabeled)
        if self.options.coarse:
            strong_views = unlabeled
            labeled_losses = 2 * labeled  # before and after C-reg's step, whose difference is the reward
            forward += strong_views + labeled_losses
            backward += unlabeled  # C-reg's step
            # The student is C-reg. Its tangent costs one forward pass, as the activations are those of C-reg's pass.
            tangent = unlabeled
            virtual_step = unlabeled
        elif self.task.statistics == "joint":
            # The student is the local model, whose images, those of `backward`, share batch statistics and so their
            # passes. For the tangent its activations are recomputed: two forward passes.
            tangent = 2 * backward
            virtual_step = backward
        else:
            # The same, but the tangent needs only the pass of the strong views, which has no labeled images.
            tangent = 2 * unlabeled
            virtual_step = labeled + unlabeled
        if self.options.fine:
            # F-reg's step: the student's virtual step and tangent, and the labeled loss after the virtual step.
            forward += tangent + labeled
            backward += virtual_step + labeled
        return Passes(forward, backward)

    def _regulate(
        self, carry: Tree, batch: Batch, student: Student, pseudo: PseudoLabels, strong: Tensor
    ) -> Regulation:
        """Take a step of the fine-grained regulator F-reg, then one of the coarse-grained C-reg (FedDure, Eq. 2 to 6).

        Args:
            carry: state of the client update, with the regulators.
            batch: labeled images x, labels y, views u of unlabeled images; x_real and u_real mask padding.
            student: the network that the regulators train on.
            pseudo: the pseudo-labels; without F-reg, their weights count.
            strong: the local model's logits of the strong views, (b, classes).
        """
        new: Tree = {}
        norms: dict[str, Tensor] = {}
        regulator: Tree = {}
        weighted_loss = WeightedLoss.from_logits(
            student.logits,
            pseudo.label,
            self.options.regulator_input,
            self.options.through_weights,
            batch.u_real,
            pseudo.confidence,
            self._compute_offset(carry, batch, pseudo),
        )
        if self.options.fine:
            new["regulator"], logit_tangent, norms["regulator_gradient"] = self._fine_regulator_step(
                carry, batch, student, weighted_loss
            )
            regulator = new["regulator"]["params"]
            if self.options.signal_weight:
                signal = weighted_loss.compute_signal(logit_tangent)
                new["signals"] = update_signals(carry["signals"], signal, pseudo.label, batch.u_rows, batch.u_real)
            # After F-reg's step, and as constants of the local model's loss: no gradient passes through them.
            weights = compute_instance_weights(
                regulator,
                strong,
                self.options.regulator_input,
                pseudo.confidence,
                self._compute_offset(new, batch, pseudo),
            )  # Eq. 6
        else:
            weights = pseudo.weight
        if self.options.normalize_weights:
            weights = weights / mean(weights, batch.u_real).clamp_min(MIN_MEAN_WEIGHT)
        # Zeros with the shape that scalars have here: under vmap they need one entry for each client.
        d = reward = torch.zeros_like(weights.mean())
        if self.options.coarse:
            # C-reg's step with F-reg's new parameters. This is the last use of the student's graph, which is then
            # freed.
            gradient = student.backward(weighted_loss.logit_gradient(regulator), False)  # Eq. 2
            norms["coarse_gradient"] = compute_gradient_norm(gradient)
            new["coarse"] = self._take_step("coarse", carry["coarse"], gradient)
            with torch.no_grad():  # Eq. 3
                loss_before = self._labeled_loss(carry["coarse"]["params"], carry, batch)
                loss_after = self._labeled_loss(new["coarse"]["params"], carry, batch)
            d = loss_after - loss_before if self.options.sign == "new-old" else loss_before - loss_after
            reward = d
            if self.options.reward_baseline is not None:
                reward = d - carry["baseline"]["mean"]
                new["baseline"] = update_running_mean(carry["baseline"], d, self.options.reward_baseline)
            if self.options.reward_bound is not None:
                reward = reward.clamp(-self.options.reward_bound, self.options.reward_bound)
        return Regulation(weights, d, reward, new, norms)

    def _fine_regulator_step(
        self, carry: Tree, batch: Batch, student: Student, weighted_loss: WeightedLoss
    ) -> tuple[Tree, Tensor, Tensor]:
        """Take a step of the fine-grained regulator (F-reg): FedDure's bi-level optimization, Eq. 4 and 5.

        F-reg weighs the pseudo-label loss. A virtual gradient step on that loss moves the student, and F-reg descends on
        the labeled loss at the virtual parameters.

        Args:
            carry: state of the client update, with F-reg.
            batch: the minibatch.
            student: the network that takes the virtual step, with its forward pass on the strong views.
            weighted_loss: the pseudo-label loss of these views.

        Returns:
            F-reg's new parameters and optimizer state, the derivative of the student's logits along the labeled gradient
            (b, classes), and the norm () of F-reg's gradient.
        """
        regulator = carry["regulator"]
        virtual_lr = self._learning_rate("virtual")

        def labeled_loss(params: Tree) -> tuple[Tensor, tuple[()]]:
            return self._labeled_loss(params, carry, batch), ()

        # Eq. 4: a virtual step of the student. True: the graph is retained for C-reg's step, which uses it later.
        logit_gradient = weighted_loss.logit_gradient(regulator["params"])
        virtual_gradient = student.backward(logit_gradient, True)
        virtual_params = gradient_step(student.params, virtual_gradient, virtual_lr)
        labeled_gradient, _, _ = grad_and_value(labeled_loss, virtual_params)
        # Eq. 5 by the chain rule: the virtual parameters are student - lr * gradient(regulator), so the gradient of
        # the labeled loss in F-reg is -lr times the derivative of that gradient along the labeled gradient. A
        # forward-mode tangent replaces the second backward pass.
        logit_tangent = student.tangent(labeled_gradient)
        directional_gradient = weighted_loss.regulator_gradient(regulator["params"], logit_tangent)
        gradient = tree.map(lambda leaf: leaf * -virtual_lr, directional_gradient)
        norm = compute_gradient_norm(gradient)  # before the step, which may overwrite the gradient
        return self._take_step("regulator", regulator, gradient), logit_tangent, norm

    def _compute_offset(self, state: Tree, batch: Batch, pseudo: PseudoLabels) -> Tensor | None:
        """Compute what is added to F-reg's output before the sigmoid, (b,); None for nothing.

        Args:
            state: with the images' mean signals, if `signal_weight` is above 0.
            batch: the minibatch.
            pseudo: its pseudo-labels.
        """
        offset: Tensor | None = None
        if self.options.regulator_prior == "confidence":
            offset = compute_log_odds(pseudo.confidence)
        if self.options.signal_weight:
            signals = self.options.signal_weight * look_up_signals(state["signals"], pseudo.label, batch.u_rows)
            offset = signals if offset is None else offset + signals
        return offset

    def _optimizer(self, which: Literal["coarse", "regulator"]) -> Optimizer:
        """Build a regulator's optimizer: the shared one with its learning rate, or a plain step for C-reg."""
        lr = self._learning_rate(which)
        if which == "coarse" and self.options.coarse_step == "plain":
            return SGD(lr)
        return self.task.optimizer.with_lr(lr)

    def _learning_rate(self, which: Literal["virtual", "coarse", "regulator"]) -> Number:
        """Compute eta_s, eta or eta_w; the paper sets all three to the optimizer's learning rate."""
        lr: float | None = getattr(self.options, f"{which}_lr")
        return self.task.optimizer.lr if lr is None else lr * self.task.rate

    def _init_regulator(self, which: Literal["coarse", "regulator"], params: Tree) -> Tree:
        """Join a regulator's parameters and the initial state of its optimizer."""
        return {"params": params, "optimizer": self._optimizer(which).init(params)}

    def _take_step(self, which: Literal["coarse", "regulator"], regulator: Tree, gradient: Tree) -> Tree:
        """Take an optimizer step of a regulator, and return its new parameters and optimizer state."""
        # With `labeled_first` the old state may be selected afterwards, so it must not be overwritten.
        consume = self.options.labeled_first <= 0
        optimizer = self._optimizer(which)
        params, state = optimizer.step(regulator["params"], gradient, regulator["optimizer"], consume=consume)
        return {"params": params, "optimizer": state}

    def _labeled_loss(self, params: Tree, carry: Tree, batch: Batch) -> Tensor:
        """Compute the cross-entropy () of the labeled images of a minibatch under `params` (FedDure, Eq. 3 and 5).

        By this loss the regulators are judged, before and after a step on pseudo-labels. The option `judging` selects the
        batch-normalization statistics: the "running" ones or those of these images. With `judge_prior` the logits are
        adjusted by the logarithms of the client's class shares.

        Args:
            params: parameters of the network to evaluate.
            carry: state of the client update, with running batch-norm statistics and the client's class shares.
            batch: labeled images x, labels y, views u of unlabeled images; x_real and u_real mask padding.
        """
        if self.options.judging == "running":
            logits = self.task.network.predict(params, carry["stats"], batch.x)
        else:
            logits = self.task.network.train(params, batch.x, real=batch.x_real)[0]
        if self.options.judge_prior:
            logits = logits + carry["label_log_shares"]
        is_training = self._training_images(batch)
        return self._labeled_cross_entropy(logits, batch, None if is_training is None else ~is_training)

    def _training_images(self, batch: Batch) -> Tensor | None:
        """Select the labeled images (B,) on which the local model trains; None: all, with `signal_labels` "minibatch".

        The other half measures the effect of pseudo-labels. A client's rows are divided by their number, so that an
        image which a minibatch has twice is in one half only.
        """
        if self.options.signal_labels == "minibatch":
            return None
        return (batch.x_rows + self.task.round) % 2 == 0

    def _labeled_cross_entropy(self, logits: Tensor, batch: Batch, selected: Tensor | None) -> Tensor:
        """Compute the mean cross-entropy of the labeled images of a minibatch, with class weights if there are any.

        Args:
            logits: of all labeled images of the minibatch, (B, classes).
            batch: the minibatch.
            selected: (B,) bool, the images to average over; None: all. Without any the loss is 0.
        """
        if selected is None and not self.task.class_weights and batch.x_real is None:
            return cross_entropy(logits, batch.y)
        losses = cross_entropy_per_image(logits, batch.y)
        if self.task.class_weights:
            losses = losses * label_weights(self.task.class_weights, batch.y, logits)
        if selected is None:
            return mean(losses, batch.x_real)
        return padding.mean_or_zero(losses, padding.mask(selected, batch.x_real))


ROWS = (
    MethodEntry("feddure", "FedDure", "FedDure, AAAI 2024", "dual regulators weigh each client's pseudo-labels",
                FedDure(), paper_options=PAPER, paper_run=PAPER_RUN),
    MethodEntry("feddure-without-creg", "FedDure without C-reg", "FedDure, AAAI 2024, Table 2",
                "only the fine-grained regulator, trained through the local model", FedDure(coarse=False),
                paper_options=PAPER, paper_run=PAPER_RUN),
    MethodEntry("feddure-without-freg", "FedDure without F-reg", "FedDure, AAAI 2024, Table 2",
                "only the coarse-grained regulator, with a fixed threshold", FedDure(fine=False), paper_options=PAPER,
                paper_run=PAPER_RUN),
)  # fmt: skip
