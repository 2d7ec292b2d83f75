"""What an objective is, and what most of them compute with: losses, sweeps, debiasing, forward passes."""

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
from halfmoon.models import forward, seen_by

Ramp = Literal["linear", "sigmoid"]
"""How a weight grows: t, or exp(-5 (1 - t)^2) (Laine and Aila 2017), for t from 0 to 1."""

NOTHING: Tree = {}
CHUNK = 250
"""Images that share a forward pass, and so their batch statistics, when all rows of a client are looked at."""


class StepResult(NamedTuple):
    """What a loss leaves behind: the moments of its forward passes, its pseudo-labels, its running averages."""

    moments: list[Tree]
    pseudo: tuple[PseudoLabels, ...]  # none or one
    aux: Tree = NOTHING  # new values of what `start` put beside the model, and of what `begin` returned


@dataclass(frozen=True)
class Objective:
    """A loss for one minibatch; its fields are its hyper-parameters.

    What it keeps beside the model (an averaged teacher, running class frequencies) travels and is averaged with it;
    what `remember` returns stays at each client.
    `decay` is the share that an averaged teacher keeps at each step, which is then what is evaluated; None: no teacher.
    Where a network tracks statistics the teacher has its own, "teacher_stats", counted anew at the end of each client
    update: the student's are those of other activations.
    """

    decay: float | None = field(default=None, kw_only=True)
    method_requirements: ClassVar[Requirements] = SUM
    heads: ClassVar[tuple[str, ...]] = ()  # parts of the parameters that `start` adds: they are not evaluated

    @property
    def requirements(self) -> UpdateRequirements:
        """Return what it needs of the engine; by default labeled images alone."""
        return UpdateRequirements()

    @property
    def averages(self) -> float | None:
        """Return the share that an average of the server's models keeps in each round, if it needs one to come down.

        It comes down as "average", {"params", "stats"}, beside the model.
        """
        return None

    @property
    def travels(self) -> tuple[str, ...]:
        """Return what `start` puts beside the model: it goes down and up with it, and is averaged."""
        return () if self.decay is None else ("teacher", "teacher_steps", "teacher_stats")

    def start(self, task: Task, model: Tree) -> Tree:
        """Return the server's first tree: `model` = {"params", "stats"} and what is kept beside it."""
        if self.decay is None:
            return model
        steps = torch.zeros((), dtype=torch.float64, device=next(leaves(model["params"])).device)
        tracked = {"teacher_stats": model["stats"]} if model["stats"] else {}
        return {**model, "teacher": model["params"], "teacher_steps": steps, **tracked}

    def solution(self, server: Tree) -> Tree:
        """Return the model {"params", "stats"} that is evaluated."""
        plain = self.decay is None
        params = server["params" if plain else "teacher"]
        stats = server["stats"] if plain else server.get("teacher_stats", {})
        return {"params": {name: part for name, part in params.items() if name not in self.heads}, "stats": stats}

    def prepare(self, task: Task, broadcast: Tree, data: ClientData) -> Tree:
        """Return what is computed once a client update, from the received model and all rows."""
        return {}

    def initial_memory(self, task: Task, broadcast: Tree) -> Tree:
        """Return what a client that has not trained yet knows: it stays there from round to round; {} for nothing."""
        return {}

    def begin(self, task: Task, memory: Tree, data: ClientData, cached: Tree) -> Tree:
        """Return what changes from step to step beside the model, and does not travel: all names of `remember`."""
        return {}

    def after(self, carry: Tree, params: Tree) -> Tree:
        """Return new values, when a step has made these `params`, of what follows them."""
        return {} if self.decay is None else follow(carry, params, self.decay)

    def finish(self, task: Task, carry: Tree) -> Tree:
        """Return new values, when a client update ends, of what `start` put beside the model."""
        return {}

    def __call__(
        self, task: Task, params: Tree, stats: Tree, batch: Batch, aux: Tree = NOTHING, cached: Tree = NOTHING
    ) -> tuple[Tensor, StepResult]:
        """Return the scalar loss and what was seen.

        `aux` holds what travels beside the model and what `begin` returned, `cached` what `prepare` did.
        """
        raise NotImplementedError

    def passes(self, task: Task, labeled: int, unlabeled: int) -> Passes:
        """Count the images that one gradient of the loss sends through the network."""
        images = labeled + len(self.requirements.views) * unlabeled
        return Passes(images, images)


@dataclass(frozen=True)
class Consistency(Objective):
    """Labels, and a term on two weak views, whose weight grows to `unlabeled_weight` over the first `ramp` of the
    rounds.
    """

    unlabeled_weight: float = 1.0
    _: KW_ONLY
    ramp: float = 0.4
    ramp_shape: Ramp = "linear"

    @property
    def requirements(self) -> UpdateRequirements:
        return UpdateRequirements(("weak", "weak2"), masks_padding=True)

    def total(self, task: Task, labels: Tensor, apart: Tensor) -> Tensor:
        """Return the loss of both terms."""
        return labels + ramped(task, self.unlabeled_weight, self.ramp, self.ramp_shape) * apart


class FedAvgRow(NamedTuple):
    """A row of the catalog (`halfmoon.api.method_entry.MethodEntry`) that is FedAvg around an objective.

    Where all rows are `pooled`, the federation is one client, whose optimizer lives on from round to round.
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


def supervised(logits: Tensor, y: Tensor, real: Tensor | None = None) -> Tensor:
    """Return the cross-entropy of logits (B, classes), zero where there is no labeled image; of those that are `real`
    (B,).
    """
    if real is not None:
        return padding.share(real, logits) @ per_image(logits, y)
    return cross_entropy(logits, y) if len(y) else logits.sum() * 0.0


def per_image(logits: Tensor, label: Tensor) -> Tensor:
    """Return the cross-entropy (b,) of each image."""
    return cross_entropy(logits, label, reduction="none")


def guess_of(p: Tensor) -> PseudoLabels:
    """Return the pseudo-labels that predictions p (b, classes) amount to, where all of them count alike."""
    confidence, label = p.detach().max(-1)
    return PseudoLabels(label, confidence, torch.ones_like(confidence))


def follow(aux: Tree, params: Tree, decay: float) -> Tree:
    """Return the averaged teacher in `aux` after it has seen `params`: teacher <- keep teacher + (1 - keep) params.

    keep = min(decay, 1 - 1 / (steps + 1)): the plain mean of all models so far, until the decay forgets faster than
    that (Tarvainen and Valpola's code). So a short run does not end with a teacher that is mostly the initial model.
    """
    steps = aux["teacher_steps"] + 1
    new = 1 - (1 - 1 / (steps + 1)).clamp_max(decay)
    teacher = tree.map(lambda old, now: old + new.to(old.dtype) * (now - old), aux["teacher"], params)
    return {"teacher": teacher, "teacher_steps": steps}


def ramped(task: Task, weight: float, share: float, shape: Ramp = "linear") -> Number:
    """Return a weight that grows from 0 over the first `share` of the run's rounds, in the round at hand; 0: no growth.

    All steps of a round have one weight. "sigmoid" starts at exp(-5).
    """
    progress = 1.0 if share <= 0 else at_most_one(task.round / (share * task.rounds))
    return weight * (progress if shape == "linear" else exp(-5 * (1 - progress) ** 2))


def debiased(logits: Tensor, prior: Tensor) -> Tensor:
    """Return logits (..., classes) whose softmax is proportional to softmax(logits) / prior (FedDB, Eq. 14)."""
    return logits - prior.clamp_min(torch.finfo(prior.dtype).tiny).log()


def prior(logits: Tensor, real: Tensor | None = None) -> Tensor:
    """Return the mean prediction (classes,) over rows (n, classes): FedDB's APP-U (Eq. 8); uniform over no row.

    With a mask `real` (n,), the mean is over the real rows.
    """
    if real is not None and len(logits):
        return torch.where(real.any(), padding.row_mean(logits.softmax(-1), real), 1 / logits.shape[-1])
    return logits.softmax(-1).mean(0) if len(logits) else torch.full_like(logits.sum(0), 1 / logits.shape[-1])


@torch.no_grad()
def teacher_logits(task: Task, params: Tree, stats: Tree, images: Tensor, real: Tensor | None = None) -> Tensor:
    """Return detached logits (b, classes) of a model that teaches, under the task's `labeling` statistics."""
    if task.labeling == "running":
        return task.network.predict(params, stats, images).detach()
    return task.network.train(params, images, real=real)[0].detach()


@dataclass(frozen=True)
class LabeledOnce(ClientUpdate):
    """A client that labels its rows when its update begins: its carry has "label", "confidence" and "weight" (U,)."""

    def drawable_rows(self, carry: Tree, data: ClientData) -> Tensor | None:
        sure = carry["weight"] > 0
        return sure | ((data.labeled > 0) & ~sure.any())

    def initial_pseudo_labels(self, carry: Tree, data: ClientData) -> tuple[PseudoLabels, ...]:
        return (PseudoLabels(carry["label"], carry["confidence"], carry["weight"]),)


TEACHER = ("teacher", "teacher_steps")


class TeacherClient(ClientUpdate):
    """A client with a mean teacher of its own, which stays with it from round to round; a step lets it `follow`.

    memory: the teacher's parameters and steps, and what `ClientUpdate` remembers.
    """

    def initial_memory(self, broadcast: Tree, generator: torch.Generator) -> Tree:
        steps = torch.tensor(-1.0, dtype=torch.float64, device=next(tree.leaves(broadcast["params"])).device)
        return {"teacher": broadcast["params"], "teacher_steps": steps, **super().initial_memory(broadcast, generator)}

    def begin(self, broadcast: Tree, memory: Tree, data: ClientData) -> Tree:
        return {**super().begin(broadcast, memory, data), **{name: memory[name] for name in TEACHER}}

    def finish(self, broadcast: Tree, carry: Tree, data: ClientData) -> tuple[Upload, Tree]:
        upload, memory = super().finish(broadcast, carry, data)
        return upload, {**memory, **{name: carry[name] for name in TEACHER}}

    def passes(self, labeled: int, unlabeled: int) -> Passes:
        return Passes(labeled + 2 * unlabeled, labeled + unlabeled)


@torch.no_grad()
def running_logits(task: Task, params: Tree, stats: Tree, images: Tensor) -> Tensor:
    """Return detached logits (n, classes) of all images (n, C, H, W) under these statistics."""
    return torch.cat([task.network.predict(params, stats, part).detach() for part in chunks(images)])


@torch.no_grad()
def sweep_logits(task: Task, params: Tree, stats: Tree, images: Tensor, real: Tensor | None = None) -> Tensor:
    """Return detached logits (n, classes) of all images (n, C, H, W), under the task's `labeling` statistics.

    With a mask `real` (n,), the real images come first, and share their passes as they would without the others.
    """
    if not len(images):
        return next(leaves(params)).new_zeros(0, task.network.classes)
    if task.labeling == "running":
        return running_logits(task, params, stats, images)
    if real is None:
        return torch.cat([task.network.train(params, part)[0].detach() for part in chunks(images)])
    rows, there, places = masked_chunks(real)
    passes = [
        task.network.train(params, images[part], real=mask)[0].detach()
        for part, mask in zip(rows.unbind(), there.unbind(), strict=True)
    ]
    return torch.cat(passes)[places]


def chunks(images: Tensor, size: int = CHUNK) -> Iterator[Tensor]:
    """Yield nearly equal parts of at most `size` images: none is left with a batch of one."""
    yield from images.tensor_split(max(1, -(-len(images) // size)))


def masked_chunks(real: Tensor, size: int = CHUNK) -> tuple[Tensor, Tensor, Tensor]:
    """Return the parts that `chunks` makes of the real images, which come first of (n,), whatever their number is.

    The rows (parts, images) of each part and which of them are there, and the place (n,) of each row in the parts, one
    after the other. How many parts there are, and of how many images, depends on n alone.
    """
    n = len(real)
    most, widest = -(-n // size), min(n, size)
    count = real.sum()
    parts = ((count + size - 1) // size).clamp_min(1)
    least, longer = count // parts, count % parts  # the first ones are longer by one
    each = torch.arange(most, device=real.device)
    length = torch.where(each < parts, least + (each < longer), 0)
    at = torch.arange(widest, device=real.device)
    rows = each[:, None] * least + torch.minimum(each, longer)[:, None] + at
    row = torch.arange(n, device=real.device)
    early, rest = least + 1, row - longer * (least + 1)
    part = torch.where(rest < 0, row // early, longer + rest // least.clamp_min(1))
    inner = torch.where(rest < 0, row % early, rest % least.clamp_min(1))
    places = (part * widest + inner).clamp_max(most * widest - 1)
    return rows.clamp_max(n - 1), at < length[:, None], places


def taught_and_guessed(
    task: Task,
    params: Tree,
    stats: Tree,
    taught: tuple[Tensor, ...],
    guessed: tuple[Tensor, ...],
    real: tuple[Tensor, ...] = (),
) -> tuple[list[Tensor], list[Tensor], list[Tree]]:
    """Return the logits of the `taught` groups, the detached ones of the `guessed`, and the moments of the passes.

    Under the task's rules: which groups share a pass, and which statistics normalize those that are given labels.
    `real` has a mask of each group, `taught` first, where rows are padding.
    """
    joint = task.statistics == "joint"
    if task.labeling == "batch":
        return forward(task.network, params, joint, taught, guessed, real)
    with torch.no_grad():
        guesses = [task.network.predict(params, stats, group).detach() for group in guessed]
    logits, _, moments = forward(task.network, params, joint, taught, real=real[: len(taught)])
    return logits, guesses, moments


def embedded(
    task: Task, params: Tree, groups: Sequence[Tensor], real: tuple[Tensor, ...]
) -> tuple[list[Tensor], list[Tensor], list[Tree]]:
    """Return the logits of each group of images, what the head was given of it (n, F), and the moments of the passes.

    Under the task's rule which groups share a pass. `real` has a mask of each group where rows are padding.
    """
    network = task.network
    if task.statistics == "joint":
        sizes = [len(group) for group in groups]
        every, inputs, moments = network.embed(params, torch.cat([*groups]), real=padding.concat(real))
        return [*torch.split(every, sizes)], [*torch.split(inputs, sizes)], [moments]
    logits: list[Tensor] = []
    features: list[Tensor] = []
    passes: list[Tree] = []
    for group, mask in zip(groups, real or (None,) * len(groups), strict=True):
        if len(group):
            z, h, moments = network.embed(params, group, real=mask)
            passes.append(seen_by(moments, mask))
        else:
            head = params["head"]["weight"]
            z, h = head.new_zeros(0, len(head)), head.new_zeros(0, head.shape[1])
        logits.append(z)
        features.append(h)
    return logits, features, passes


def guessing_passes(task: Task, taught: int, guessed: int) -> Passes:
    """Count the images of `taught_and_guessed` and of one backward pass through it."""
    shared = task.statistics == "joint" and task.labeling == "batch"
    return Passes(taught + guessed, taught + (guessed if shared else 0))


def weak_and_strong(task: Task, params: Tree, stats: Tree, batch: Batch) -> tuple[Tensor, Tensor, Tensor, list[Tree]]:
    """Return the logits of labeled (B, classes), strong (b, classes) and, detached, weak images, and the moments."""
    groups = (batch.x, batch.u["strong"])
    guessed, real = (batch.u["weak"],), batch.masks(2)
    (labeled, strong), (weak,), moments = taught_and_guessed(task, params, stats, groups, guessed, real)
    return labeled, strong, weak, moments


def mixed(rows: Tensor, mix: Tensor, order: Tensor) -> Tensor:
    """Return l rows + (1 - l) rows[order] for rows (n, ...), a permutation (n,) and l = max(mix, 1 - mix), mix ().

    So each row stays closer to itself than to its partner (MixMatch, Eq. 9).
    """
    share = mix.maximum(1 - mix).to(rows.dtype)
    return share * rows + (1 - share) * rows[order]


def sharpened(p: Tensor, temperature: float) -> Tensor:
    """Return p^(1 / temperature), normalized, for probabilities p (n, classes) (MixMatch, Eq. 7)."""
    return (p.clamp_min(1e-30).log() / temperature).softmax(-1)


def one_hot(y: Tensor, classes: int, like: Tensor) -> Tensor:
    """Return labels y (n,) as distributions (n, classes) of the dtype of `like` (vmap refuses `F.one_hot`)."""
    return (y[:, None] == torch.arange(classes, device=y.device)).to(like.dtype)


def soft_cross_entropy(logits: Tensor, target: Tensor, real: Tensor | None = None) -> Tensor:
    """Return the mean cross-entropy of logits (n, classes) for distributions (n, classes); zero for no row.

    With a mask `real` (n,), the mean is over the real rows.
    """
    if real is not None:
        return padding.share(real, logits) @ F.cross_entropy(logits, target, reduction="none")
    return F.cross_entropy(logits, target) if len(target) else logits.sum() * 0.0
