"""Base class of objectives, and functions that they share: losses, predictions, debiasing, forward passes."""

from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import ClassVar, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from halfmoon.api.requirements import SUM, Requirements
from halfmoon.api.types import Batch, ClientData, ClientUpdate, Passes, PseudoLabels, Task, UpdateRequirements
from halfmoon.api.uploads import Upload
from halfmoon.core import padding, tree
from halfmoon.core.autodiff import cross_entropy
from halfmoon.core.optim import Number, at_most_one, exp
from halfmoon.core.tree import Tree, leaves
from halfmoon.models import forward, mark_if_any_real

Ramp = Literal["linear", "sigmoid"]
"""Growth of a weight with t from 0 to 1: t, or exp(-5 (1 - t)^2) (Laine and Aila 2017)."""

EMPTY: Tree = {}
"""Default of optional trees."""

CHUNK_IMAGES = 250
"""Largest number of images in one forward pass over all rows of a client; they share batch statistics."""


class StepResult(NamedTuple):
    """Results of a loss besides its value.

    Attributes:
        moments: batch statistics of the forward passes.
        pseudo: the pseudo-labels that were used, at most one entry.
        aux: new values of the tensors that `Objective.start` added to the model or that `Objective.begin` returned.
    """

    moments: list[Tree]
    pseudo: tuple[PseudoLabels, ...]
    aux: Tree = EMPTY


@dataclass(frozen=True)
class Objective:
    """A loss on one minibatch. Its fields are its hyper-parameters.

    Tensors that `start` adds to the model (an averaged teacher, running class frequencies) are sent and averaged with
    it. Tensors that `initial_memory` returns are stored at each client.

    If the network tracks batch statistics, an averaged teacher has its own, "teacher_stats", because its activations
    differ from the student's. They are counted at the end of each client update.

    Attributes:
        decay: share of itself that an averaged teacher retains at each step. The teacher is then the evaluated model.
            None: there is no teacher.
        method_requirements: requirements of FedAvg with this objective.
        heads: names of the parameter groups that `start` adds to "params". They are not part of the evaluated model.
    """

    uses_class_weights: ClassVar[bool] = False
    """Whether the loss of labeled images is weighted by `task.class_weights`; otherwise the option is refused."""

    decay: float | None = field(default=None, kw_only=True)
    method_requirements: ClassVar[Requirements] = SUM
    heads: ClassVar[tuple[str, ...]] = ()

    @property
    def requirements(self) -> UpdateRequirements:
        """Requirements for the engine; by default only labeled images."""
        return UpdateRequirements()

    @property
    def server_average_decay(self) -> float | None:
        """Share of itself that the average of the server's models retains in each round.

        The server sends this average as "average", {"params", "stats"}, with the model. None: it is not needed.
        """
        return None

    @property
    def shared_names(self) -> tuple[str, ...]:
        """Names of the tensors that `start` adds to the model. They are sent in both directions and averaged."""
        return () if self.decay is None else ("teacher", "teacher_steps", "teacher_stats")

    def start(self, task: Task, model: Tree) -> Tree:
        """Build the server's state before the first round: the model, and a mean teacher if `decay` is set.

        Args:
            task: settings that all methods share: network, optimizer, rules for batch statistics.
            model: "params" and "stats" (running batch-norm statistics) of the initial model.

        Returns:
            The model, and the tensors that `shared_names` lists, which are sent and averaged with it: the teacher's
            parameters, its number of updates and, with batch normalization, its running statistics.
        """
        if self.decay is None:
            return model
        # The teacher starts as the model itself.
        steps = torch.zeros((), dtype=torch.float64, device=next(leaves(model["params"])).device)
        server = {**model, "teacher": model["params"], "teacher_steps": steps}
        if model["stats"]:
            server["teacher_stats"] = model["stats"]
        return server

    def solution(self, server: Tree) -> Tree:
        """Select the model to evaluate: the mean teacher if there is one, without heads that only training uses.

        Args:
            server: the server's state, as `start` built it and rounds have changed it.

        Returns:
            "params" and "stats".
        """
        if self.decay is None:
            params = server["params"]
            stats = server["stats"]
        else:
            params = server["teacher"]
            stats = server.get("teacher_stats", {})
        return {"params": {name: group for name, group in params.items() if name not in self.heads}, "stats": stats}

    def prepare(self, task: Task, broadcast: Tree, data: ClientData) -> Tree:
        """Compute constants of a client update from the received model and all rows. Steps get them as `cached`."""
        return {}

    def initial_memory(self, task: Task, broadcast: Tree) -> Tree:
        """Build the memory of a client that has not trained yet; {} if the objective stores nothing at clients."""
        return {}

    def begin(self, task: Task, memory: Tree, data: ClientData, cached: Tree) -> Tree:
        """Build the tensors that change from step to step but are not uploaded, under the names of the memory."""
        return {}

    def after_step(self, carry: Tree, params: Tree) -> Tree:
        """Compute new values of tensors that follow the parameters, after a step that resulted in `params`."""
        return {} if self.decay is None else update_teacher(carry, params, self.decay)

    def finish(self, task: Task, carry: Tree) -> Tree:
        """Compute new values, at the end of a client update, of tensors in `shared_names`."""
        return {}

    def __call__(
        self, task: Task, params: Tree, stats: Tree, batch: Batch, aux: Tree = EMPTY, cached: Tree = EMPTY
    ) -> tuple[Tensor, StepResult]:
        """Compute the loss of a minibatch; every objective overrides it.

        An objective is the loss that clients minimize under FedAvg and similar methods.

        Args:
            task: settings that all methods share: network, optimizer, rules for batch statistics.
            params: parameters of the model, in which the loss is differentiated.
            stats: its running batch statistics.
            batch: the minibatch.
            aux: state that changes from step to step: that which is sent and averaged with the model (`shared_names`),
                and that which `begin` returned, such as adaptive thresholds.
            cached: what `prepare` computed once, before the first step, such as predictions on all images.

        Returns:
            The loss (), and the other results of the step: batch statistics, pseudo-labels, and the new `aux`.
        """
        raise NotImplementedError

    def passes(self, task: Task, labeled: int, unlabeled: int) -> Passes:
        """Count the images that one gradient of the loss sends through the network."""
        images = labeled + len(self.requirements.views) * unlabeled
        return Passes(images, images)


def unused_ramp_options(ramp: float) -> dict[str, str]:
    """List the options of `ramp_weight` that have no effect beside `ramp`, each with the reason."""
    return {} if ramp else {"ramp_shape": "with ramp 0, a constant weight"}


@dataclass(frozen=True)
class Consistency(Objective):
    """Cross-entropy of labeled images plus a consistency term between two weak views.

    The weight of that term grows to `unlabeled_weight` over the first `ramp` (a share) of the rounds.
    """

    unlabeled_weight: float = 1.0
    _: KW_ONLY
    ramp: float = 0.4
    ramp_shape: Ramp = "linear"

    @property
    def unused_options(self) -> dict[str, str]:
        """List the options that have no effect beside the others, each with the reason (`registry.unused_options`)."""
        return unused_ramp_options(self.ramp)

    @property
    def requirements(self) -> UpdateRequirements:
        return UpdateRequirements(views=("weak", "weak2"), masks_padding=True)

    def total_loss(self, task: Task, labeled_loss: Tensor, distance: Tensor) -> Tensor:
        """Add the consistency term, with the weight of this round, to the loss of the labeled images."""
        return labeled_loss + ramp_weight(task, self.unlabeled_weight, self.ramp, self.ramp_shape) * distance


class FedAvgRow(NamedTuple):
    """An entry of the catalog (`halfmoon.api.method_entry.MethodEntry`) for FedAvg with an objective.

    If it is `pooled`, all images belong to one client, whose optimizer state is retained between rounds.
    """

    name: str
    title: str
    paper: str
    about: str
    objective: Objective
    prox: float = 0.0
    keep_optimizer: bool = False
    all_labels: bool = False
    pooled: bool = False


def labeled_cross_entropy(
    logits: Tensor, y: Tensor, real: Tensor | None = None, class_weights: tuple[float, ...] = ()
) -> Tensor:
    """Compute the mean cross-entropy of labeled images; 0 if there is no image.

    Args:
        logits: (B, classes).
        y: labels, (B,) int64.
        real: (B,) bool, False for padding rows; None if no row is padding.
        class_weights: an image's loss is multiplied by the weight of its class; (): 1 for all.

    Returns:
        The mean over images, ().
    """
    if class_weights:
        losses = cross_entropy_per_image(logits, y) * label_weights(class_weights, y, logits)
        if real is not None:
            return padding.row_weights(real, logits) @ losses
        return losses.mean() if len(y) else logits.sum() * 0.0
    if real is not None:
        return padding.row_weights(real, logits) @ cross_entropy_per_image(logits, y)
    # The product with 0 keeps the loss of no images a function of the parameters, so that it has a gradient.
    return cross_entropy(logits, y) if len(y) else logits.sum() * 0.0


def label_weights(class_weights: tuple[float, ...], y: Tensor, like: Tensor) -> Tensor:
    """Look up the class weight of each label, (B,), with the dtype and device of `like`; 1 without class weights."""
    if not class_weights:
        return torch.ones_like(y, dtype=like.dtype)
    return torch.tensor(class_weights, dtype=like.dtype, device=like.device)[y]


def cross_entropy_per_image(logits: Tensor, label: Tensor) -> Tensor:
    """Compute the cross-entropy (b,) of each image."""
    return cross_entropy(logits, label, reduction="none")


def as_pseudo_labels(probabilities: Tensor) -> PseudoLabels:
    """Turn predictions (b, classes) into pseudo-labels that all have the weight 1."""
    confidence, label = probabilities.detach().max(-1)
    return PseudoLabels(label, confidence, torch.ones_like(confidence))


def update_teacher(aux: Tree, params: Tree, decay: float) -> Tree:
    """Update a mean teacher, the moving average of the student: teacher <- keep * teacher + (1 - keep) * params.

    keep = min(decay, 1 - 1 / (steps + 1)), as in the code of Tarvainen and Valpola (2017): the teacher is the plain mean
    of all models until the decay is the smaller of the two. So a short run does not end with a teacher that is mostly
    the initial model.

    Args:
        aux: "teacher", its parameters, and "teacher_steps" (), the number of updates so far.
        params: parameters of the student.
        decay: the largest share of itself that the teacher retains, from 0 to 1.

    Returns:
        The new "teacher" and "teacher_steps".
    """
    steps = aux["teacher_steps"] + 1
    # `steps` is float64; the rate is cast to the type of each leaf only when it is used.
    rate = 1 - (1 - 1 / (steps + 1)).clamp_max(decay)
    teacher = tree.map(lambda old, new: old + rate.to(old.dtype) * (new - old), aux["teacher"], params)
    return {"teacher": teacher, "teacher_steps": steps}


def ramp_weight(task: Task, weight: float, share: float, shape: Ramp = "linear") -> Number:
    """Compute the weight of a loss term in the current round, if it grows over the first rounds of a run.

    Args:
        task: has the current round and the number of rounds.
        weight: the final value.
        share: share of the rounds over which the weight grows; 0: it has its final value from the start.
        shape: "linear" grows from 0, "sigmoid" from exp(-5) as exp(-5 (1 - t)^2) (Laine and Aila 2017).

    Returns:
        A number from 0 to `weight`; a tensor where rounds are tensors.
    """
    progress = 1.0 if share <= 0 else at_most_one(task.round / (share * task.rounds))
    return weight * (progress if shape == "linear" else exp(-5 * (1 - progress) ** 2))


def debias_logits(logits: Tensor, prior: Tensor) -> Tensor:
    """Compute logits (..., classes) whose softmax is proportional to softmax(logits) / prior (FedDB, Eq. 14)."""
    # The smallest normal number: log(0) of a class that is never predicted would give infinite logits.
    return logits - prior.clamp_min(torch.finfo(prior.dtype).tiny).log()


def compute_mean_prediction(logits: Tensor, real: Tensor | None = None) -> Tensor:
    """Compute a client's mean prediction over its images: APP-U, the class bias that FedDB estimates (Eq. 8).

    Args:
        logits: (n, classes).
        real: (n,) bool, False for padding rows; None if no row is padding.

    Returns:
        Probabilities (classes,); uniform if there is no row.
    """
    uniform = 1 / logits.shape[-1]
    if not len(logits):
        return torch.full_like(logits.sum(0), uniform)
    if real is None:
        return logits.softmax(-1).mean(0)
    return torch.where(real.any(), padding.row_mean(logits.softmax(-1), real), uniform)


@torch.no_grad()
def predict_with_teacher(task: Task, params: Tree, stats: Tree, images: Tensor, real: Tensor | None = None) -> Tensor:
    """Compute detached logits (b, classes) of a teacher, under the statistics that `task.labeling` names."""
    if task.labeling == "running":
        return task.network.predict(params, stats, images).detach()
    return task.network.train(params, images, real=real)[0].detach()


@dataclass(frozen=True)
class RoundLabelingClient(ClientUpdate):
    """A client that pseudo-labels its rows when its update begins.

    Its carry contains "label", "confidence" and "weight", each (U,).
    """

    def drawable_rows(self, carry: Tree, data: ClientData) -> Tensor | None:
        used = carry["weight"] > 0
        # A client with labels but without any pseudo-label draws from all rows: its steps need a minibatch.
        return used | ((data.labeled > 0) & ~used.any())

    def initial_pseudo_labels(self, carry: Tree, data: ClientData) -> tuple[PseudoLabels, ...]:
        return (PseudoLabels(carry["label"], carry["confidence"], carry["weight"]),)


TEACHER_NAMES = ("teacher", "teacher_steps")


class MeanTeacherClient(ClientUpdate):
    """A client with a local mean teacher, which it retains between rounds. Steps move it by `update_teacher`.

    Its memory contains the teacher's parameters, the number of its steps, and the memory of `ClientUpdate`.
    """

    def initial_memory(self, broadcast: Tree, generator: torch.Generator) -> Tree:
        # -1 steps: the first update then replaces the teacher by the student.
        steps = torch.tensor(-1.0, dtype=torch.float64, device=next(tree.leaves(broadcast["params"])).device)
        return {"teacher": broadcast["params"], "teacher_steps": steps, **super().initial_memory(broadcast, generator)}

    def begin(self, broadcast: Tree, memory: Tree, data: ClientData) -> Tree:
        return {**super().begin(broadcast, memory, data), **{name: memory[name] for name in TEACHER_NAMES}}

    def finish(self, broadcast: Tree, carry: Tree, data: ClientData) -> tuple[Upload, Tree]:
        upload, memory = super().finish(broadcast, carry, data)
        return upload, {**memory, **{name: carry[name] for name in TEACHER_NAMES}}

    def passes(self, labeled: int, unlabeled: int) -> Passes:
        return Passes(labeled + 2 * unlabeled, labeled + unlabeled)


@torch.no_grad()
def predict_with_running_stats(task: Task, params: Tree, stats: Tree, images: Tensor) -> Tensor:
    """Compute detached logits (n, classes) of any number of images (n, C, H, W) under running statistics."""
    logits = [task.network.predict(params, stats, chunk).detach() for chunk in split_into_chunks(images)]
    return torch.cat(logits)


@torch.no_grad()
def predict_all_rows(task: Task, params: Tree, stats: Tree, images: Tensor, real: Tensor | None = None) -> Tensor:
    """Compute detached logits of all unlabeled images of a client, for pseudo-labels.

    `task.labeling` selects the batch-norm statistics. "running": running statistics. "batch": those of the images that
    share a forward pass, chunks of at most `CHUNK_IMAGES`.

    Args:
        task: settings that all methods share: network, optimizer, rules for batch statistics.
        params: parameters of the model.
        stats: its running statistics, which are only read with "running".
        images: (n, C, H, W), any number.
        real: (n,) bool, False for padding rows, which come last; None if no row is padding. The real images share
            forward passes as they would without padding.

    Returns:
        Logits (n, classes) in the order of the images; those of padding rows are undefined.
    """
    if not len(images):
        return next(leaves(params)).new_zeros(0, task.network.classes)
    if task.labeling == "running":
        return predict_with_running_stats(task, params, stats, images)
    # A pass of training normalizes by batch statistics. Its moments are dropped: nothing is trained here.
    if real is None:
        return torch.cat([task.network.train(params, chunk)[0].detach() for chunk in split_into_chunks(images)])
    chunk_rows, chunk_masks, positions = index_chunks(real)
    chunk_logits = [
        task.network.train(params, images[rows], real=mask)[0].detach()
        for rows, mask in zip(chunk_rows.unbind(), chunk_masks.unbind(), strict=True)
    ]
    # Chunks are padded too: `positions` finds the logits of each image among those of all chunks.
    return torch.cat(chunk_logits)[positions]


def split_into_chunks(images: Tensor, size: int = CHUNK_IMAGES) -> Iterator[Tensor]:
    """Yield nearly equal chunks of at most `size` images, so that no chunk has a single image."""
    yield from images.tensor_split(max(1, -(-len(images) // size)))


def index_chunks(real: Tensor, size: int = CHUNK_IMAGES) -> tuple[Tensor, Tensor, Tensor]:
    """Split the real images of a padded client into nearly equal chunks (`split_into_chunks`), as indices and masks.

    Under `torch.func.vmap` the number of real images is a tensor, so shapes may depend only on the padded number n of
    rows: there are ceil(n / size) chunks of min(n, size) rows, of which some rows, or entire chunks, are masked out.

    Args:
        real: (n,) bool, True for the real rows, which come first.
        size: largest number of images in a chunk.

    Returns:
        The row indices of each chunk (chunks, width) int64; which of them are real rows of that chunk (chunks, width)
        bool; and the position (n,) of each row in the concatenated chunks.
    """
    n = len(real)
    max_chunks = -(-n // size)  # n / size, rounded up
    width = min(n, size)
    count = real.sum()
    chunks = ((count + size - 1) // size).clamp_min(1)
    # Like `Tensor.tensor_split`: the first `longer_chunks` chunks have one image more than the others.
    shorter_length = count // chunks
    longer_chunks = count % chunks
    chunk = torch.arange(max_chunks, device=real.device)
    length = torch.where(chunk < chunks, shorter_length + (chunk < longer_chunks), 0)
    offset = torch.arange(width, device=real.device)
    first_row = chunk * shorter_length + torch.minimum(chunk, longer_chunks)
    rows = first_row[:, None] + offset

    # The inverse: chunk and offset of each row. Rows of longer chunks come first; `rest` counts the rows after them.
    row = torch.arange(n, device=real.device)
    longer_length = shorter_length + 1
    rest = row - longer_chunks * longer_length
    row_chunk = torch.where(rest < 0, row // longer_length, longer_chunks + rest // shorter_length.clamp_min(1))
    row_offset = torch.where(rest < 0, row % longer_length, rest % shorter_length.clamp_min(1))
    # Padding rows may have any valid position: their result is not used.
    positions = (row_chunk * width + row_offset).clamp_max(max_chunks * width - 1)
    return rows.clamp_max(n - 1), offset < length[:, None], positions


def forward_and_predict(
    task: Task,
    params: Tree,
    stats: Tree,
    train_groups: tuple[Tensor, ...],
    predict_groups: tuple[Tensor, ...],
    real: tuple[Tensor, ...] = (),
) -> tuple[list[Tensor], list[Tensor], list[Tree]]:
    """Compute logits of images to train on and of images to pseudo-label.

    `task.statistics` decides which groups share a forward pass, and `task.labeling` which statistics normalize the
    images to pseudo-label.

    Args:
        task: settings that all methods share: network, optimizer, rules for batch statistics.
        params: parameters of the model.
        stats: its running statistics.
        train_groups: groups of images whose logits get gradients.
        predict_groups: groups of images to pseudo-label.
        real: a mask for each group, `train_groups` first, if there are padding rows.

    Returns:
        The logits of each of `train_groups`, the detached logits of each of `predict_groups`, and the moments (batch
        statistics) of the passes.
    """
    joint = task.statistics == "joint"
    if task.labeling == "batch":
        return forward(task.network, params, joint, train_groups, predict_groups, real)
    with torch.no_grad():
        predicted = [task.network.predict(params, stats, group).detach() for group in predict_groups]
    logits, _, moments = forward(task.network, params, joint, train_groups, real=real[: len(train_groups)])
    return logits, predicted, moments


def embed_groups(
    task: Task, params: Tree, groups: Sequence[Tensor], real: tuple[Tensor, ...]
) -> tuple[list[Tensor], list[Tensor], list[Tree]]:
    """Compute logits and features of groups of images, for example labeled ones and two views of unlabeled ones.

    In a network with batch normalization it matters which images share a forward pass: with `task.statistics` "joint" all
    groups do, and have the same batch statistics; else each group has a pass.

    Args:
        task: settings that all methods share: network, optimizer, rules for batch statistics.
        params: parameters of the model.
        groups: groups of images (n, C, H, W).
        real: a mask for each group; () if no image is padding.

    Returns:
        Of each group the logits (n, classes) and the features (n, F), which are the input of the head; and the moments
        of the passes.
    """
    network = task.network
    if task.statistics == "joint":
        sizes = [len(group) for group in groups]
        all_logits, all_features, moments = network.embed(params, torch.cat([*groups]), real=padding.concat(real))
        return [*torch.split(all_logits, sizes)], [*torch.split(all_features, sizes)], [moments]
    logits: list[Tensor] = []
    features: list[Tensor] = []
    passes: list[Tree] = []
    for group, mask in zip(groups, real or (None,) * len(groups), strict=True):
        if len(group):
            group_logits, group_features, moments = network.embed(params, group, real=mask)
            # With the mark, a pass of padding only does not change the running statistics.
            passes.append(mark_if_any_real(moments, mask))
        else:  # an empty batch has no statistics: build the empty outputs without the network
            head = network.head_layer(params, "this method")["weight"]  # (classes, F)
            group_logits = head.new_zeros(0, len(head))
            group_features = head.new_zeros(0, head.shape[1])
        logits.append(group_logits)
        features.append(group_features)
    return logits, features, passes


def count_passes(task: Task, trained: int, predicted: int) -> Passes:
    """Count the images of `forward_and_predict`, with so many to train on and to pseudo-label, and of its gradient."""
    shared_pass = task.statistics == "joint" and task.labeling == "batch"
    return Passes(trained + predicted, trained + (predicted if shared_pass else 0))


def forward_weak_and_strong(
    task: Task, params: Tree, stats: Tree, batch: Batch
) -> tuple[Tensor, Tensor, Tensor, list[Tree]]:
    """Compute the logits of labeled images, strong views to train on, and weak views to pseudo-label.

    Args:
        task: the settings that all methods share: which images share a pass, and the statistics of weak views.
        params: parameters of the model.
        stats: its running batch-norm statistics.
        batch: the minibatch of B labeled and b unlabeled images.

    Returns:
        Logits of labeled images (B, classes), of strong views (b, classes) and, detached, of weak views (b, classes);
        and the moments of the passes.
    """
    (labeled, strong), (weak,), moments = forward_and_predict(
        task,
        params,
        stats,
        train_groups=(batch.x, batch.u["strong"]),
        predict_groups=(batch.u["weak"],),
        real=batch.masks(views=2),
    )
    return labeled, strong, weak, moments


def mix_rows(rows: Tensor, mix: Tensor, order: Tensor) -> Tensor:
    """Mix each row with a partner (mixup): l * rows + (1 - l) * rows[order], where l = max(mix, 1 - mix).

    By the maximum, each row is closer to itself than to its partner (MixMatch, Eq. 9).

    Args:
        rows: images or labels, (n, ...).
        mix: the mixing coefficient, () from 0 to 1.
        order: the partners, a permutation, (n,) int64.
    """
    share = mix.maximum(1 - mix).to(rows.dtype)
    return share * rows + (1 - share) * rows[order]


def sharpen(probabilities: Tensor, temperature: float) -> Tensor:
    """Compute p^(1 / temperature), normalized, for probabilities p (n, classes) (MixMatch, Eq. 7)."""
    return (probabilities.clamp_min(1e-30).log() / temperature).softmax(-1)


def one_hot(y: Tensor, classes: int, like: Tensor) -> Tensor:
    """Turn labels y (n,) into distributions (n, classes) of the dtype of `like`."""
    # vmap does not support `F.one_hot`.
    return (y[:, None] == torch.arange(classes, device=y.device)).to(like.dtype)


def soft_cross_entropy(
    logits: Tensor, target: Tensor, real: Tensor | None = None, class_weights: tuple[float, ...] = ()
) -> Tensor:
    """Compute the mean cross-entropy () for soft labels; 0 if there is no row.

    Args:
        logits: (n, classes).
        target: distributions (n, classes).
        real: (n,) bool, False for padding rows; None if no row is padding.
        class_weights: the weight of each class, by which its term of the cross-entropy is multiplied; (): 1 for all.
    """
    if class_weights:
        # The weighted target no longer sums to 1, which cross-entropy allows: it is linear in the target.
        target = target * torch.tensor(class_weights, dtype=target.dtype, device=target.device)
    if real is not None:
        return padding.row_weights(real, logits) @ F.cross_entropy(logits, target, reduction="none")
    return F.cross_entropy(logits, target) if len(target) else logits.sum() * 0.0
