"""What a client's update looks at: how many steps, which rows in which order, and the draws of their views.

All of it is decided here from (seed, round, query, client), outside every method, so that a loop, a batched cohort and
a real network see the same images. Labeled and unlabeled rows have generators of their own: methods that look at
labeled images only see, with as many steps, the same labeled batches as the others.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from halfmoon.api.types import Batch, ClientData, UpdateRequirements
from halfmoon.core import rng
from halfmoon.core.errors import UserError
from halfmoon.core.tensors import tensor_from_numpy
from halfmoon.data.views import Draws, Labeled, Plain, Shared, Strong, View, Weak
from halfmoon.models.network import Normalize

NO_ROWS = torch.zeros(0, dtype=torch.int64)


@dataclass(frozen=True)
class Batching:
    """The batch rule that all methods of a comparison share.

    `labeled` and `unlabeled` are images a step; "rest" spreads the unlabeled rows over the steps (FedDure's released
    code: N_u // steps); labeled "all" puts all labeled rows into every step. One epoch is one pass over the labeled
    rows, round(N_l / labeled) steps, or one over the unlabeled rows, ceil(N_u / unlabeled) steps: `epoch` says which;
    the other set is cycled. "auto" is unlabeled where `unlabeled` is a number and labeled where it is "rest"; "larger"
    is at each client the set that takes more steps. `steps`
    fixes the number of steps instead. A set smaller than its batch is cycled, never padded.
    """

    labeled: int | Literal["all"] = 10
    unlabeled: int | Literal["rest"] = "rest"
    epochs: int = 1
    epoch: Literal["auto", "labeled", "unlabeled", "larger"] = "auto"
    steps: int | None = None

    def __post_init__(self) -> None:
        sizes = {"epochs": self.epochs, "steps": 1 if self.steps is None else self.steps}
        if self.labeled != "all":
            sizes["labeled"] = self.labeled
        if self.unlabeled != "rest":
            sizes["unlabeled"] = self.unlabeled
        for name, value in sizes.items():
            if value < 1:
                raise UserError(f"batch {name} is {value}: it must be at least 1.")
        if self.unlabeled == "rest" and self.epoch == "unlabeled":
            raise UserError(
                "batch epoch = 'unlabeled' needs a number of unlabeled images a step, not 'rest': the rest is what one "
                "pass over the labeled rows leaves to each step."
            )

    def steps_labeled(self, labeled: int) -> int:
        """Return the steps of a client update to a client with `labeled` rows that trains on labels alone."""
        return self.steps or self.epochs * max(1, round(labeled / max(1, self.labeled_size(labeled))))

    def labeled_size(self, labeled: int) -> int:
        """Return the labeled images of each step: none at a client that has none."""
        if not labeled:
            return 0
        return labeled if self.labeled == "all" else self.labeled

    def steps_both(self, labeled: int, unlabeled: int) -> int:
        """Return the steps of a client update that trains on both sets, at least 1; `draw` needs unlabeled rows."""
        passes = self.passes(labeled, unlabeled)
        if not passes:
            return self.steps_labeled(labeled)
        return passes * max(1, -(-unlabeled // self.unlabeled_size(labeled, unlabeled)))

    def passes(self, labeled: int, unlabeled: int) -> int:
        """Return the passes over the unlabeled rows that are a client update; 0 where something else measures it."""
        if self.steps or self.unlabeled == "rest" or self.epoch == "labeled":
            return 0
        steps = self.epochs * -(-unlabeled // self.unlabeled)
        return 0 if self.epoch == "larger" and self.steps_labeled(labeled) > steps else self.epochs

    def unlabeled_size(self, labeled: int, unlabeled: int) -> int:
        if self.unlabeled == "rest":
            return max(1, unlabeled * self.epochs // self.steps_both(labeled, unlabeled))
        return self.unlabeled


@dataclass(frozen=True)
class Views:
    """The recipes of a run: the labeled images' view, and the unlabeled ones by name."""

    labeled: View = field(default_factory=Labeled)
    unlabeled: Mapping[str, View] = field(
        default_factory=lambda: {"plain": Plain(), "weak": Weak(), "strong": Strong()}
    )


class Amount(NamedTuple):
    """How much one client update looks at."""

    steps: int
    labeled: int  # images a step
    unlabeled: int  # images a step, 0 for a work without views
    epochs: int = 0  # if not 0: as many passes over the kept unlabeled rows in place of `steps`


class DrawnUpdate(NamedTuple):
    """The draws of one client's update, on the CPU."""

    amount: Amount
    x_rows: Tensor  # (steps * labeled,) int64
    x_drawn: Draws
    u_rows: Tensor  # (steps * unlabeled,) int64
    u_drawn: dict[str, Draws]
    o_rows: Tensor  # (steps * unlabeled,) int64, of the second minibatches; empty where none is wanted
    o_drawn: dict[str, Draws]
    mixed: dict[str, Tensor]  # leaves (steps, ...): "mix", "order", "turn"
    more_drawn: dict[str, Draws]  # by name, of the labeled images' further views


def recipe(views: Views, name: str) -> View:
    """Return the recipe of an unlabeled view: "weak2" is one more draw of "weak"."""
    return views.unlabeled[name.rstrip("0123456789")]


def on_labels(views: Views, labeled: int) -> Views:
    """Return the recipes for labeled images, `labeled` a step: a draw shared by a step's images is shared by these."""
    shared = {
        name: replace(view, rows=max(1, labeled)) if isinstance(view, Shared) else view
        for name, view in views.unlabeled.items()
    }
    return replace(views, unlabeled=shared)


def cycle(rows: Tensor, length: int, generator: torch.Generator) -> Tensor:
    """Return `length` entries of `rows` (n,): one shuffled pass after another, the last one cut."""
    passes = -(-length // len(rows))
    return torch.cat([rows[torch.randperm(len(rows), generator=generator)] for _ in range(passes)])[:length]


def draw(
    amount: Amount,
    local: ClientData,
    views: Views,
    requirements: UpdateRequirements,
    keep: Tensor | None,
    seed: int,
    *path: int | str,
) -> DrawnUpdate:
    """Draw a client update from (seed, *path); a client whose `keep` (U,) allows no row takes no step.

    All rows of `local` are the client's own: their counts, which lie on the device, are not waited for.
    """
    shape = _shape(local)
    count = len(local.u)
    allowed = torch.arange(count)
    if keep is not None:
        allowed = allowed[keep.cpu()[:count]]
        if amount.epochs:
            amount = amount._replace(steps=amount.epochs * -(-len(allowed) // amount.unlabeled))
    if requirements.views and not len(allowed):
        amount = amount._replace(steps=0)
    g = rng.generator(seed, *path, "labeled")
    total = amount.steps * amount.labeled
    x_rows = cycle(torch.arange(len(local.x)), total, g) if total else NO_ROWS
    x_drawn = views.labeled.draw(total, shape, g)
    more_drawn = _draws(
        on_labels(views, amount.labeled), requirements.labeled_views, total, shape, seed, *path, "labeled"
    )
    total = amount.steps * amount.unlabeled
    u_rows = cycle(allowed, total, rng.generator(seed, *path, "unlabeled")) if requirements.views and total else NO_ROWS
    u_drawn = _draws(views, requirements.views, total, shape, seed, *path)
    o_rows, o_drawn = NO_ROWS, {}
    if requirements.second_batch and total:
        o_rows = torch.randint(count, (total,), generator=rng.generator(seed, *path, "others"))
        o_drawn = _draws(views, requirements.second_batch, total, shape, seed, *path, "others")
    mixed = {} if requirements.mixup is None else _mixed(amount, requirements, requirements.mixup, seed, *path, "mixup")
    return DrawnUpdate(amount, x_rows, x_drawn, u_rows, u_drawn, o_rows, o_drawn, mixed, more_drawn)


def compute_views(
    local: ClientData, views: Views, names: Sequence[str], normalize: Normalize, seed: int, *path: int | str
) -> ClientData:
    """Return what a client holds together with the named views of all its unlabeled rows."""
    if not names:
        return local
    n = len(local.u)
    draws = _draws(views, names, n, _shape(local), seed, *path, "sweep")
    return local._replace(views={name: recipe(views, name).apply(local.u, draws[name], normalize) for name in names})


def _shape(local: ClientData) -> tuple[int, int, int]:
    channels, height, width = local.x.shape[1:]
    return channels, height, width


def _draws(
    views: Views, names: Sequence[str], total: int, shape: tuple[int, int, int], seed: int, *path: int | str
) -> dict[str, Draws]:
    return {name: recipe(views, name).draw(total, shape, rng.generator(seed, *path, name)) for name in names}


def _mixed(
    amount: Amount, requirements: UpdateRequirements, concentration: float, seed: int, *path: int | str
) -> dict[str, Tensor]:
    steps, images = amount.steps, amount.labeled + len(requirements.views) * amount.unlabeled
    g = rng.generator(seed, *path)
    mix = np.random.Generator(np.random.PCG64(rng.derive_seed(seed, *path))).beta(concentration, concentration, steps)
    orders = [torch.randperm(images, generator=g) for _ in range(steps)]
    return {
        "mix": tensor_from_numpy(mix),
        "order": torch.stack(orders) if orders else torch.zeros(0, images, dtype=torch.int64),
        "turn": torch.randint(4, (steps, amount.unlabeled), generator=g),
    }


def batches(
    locals_: Sequence[ClientData], updates: Sequence[DrawnUpdate], views: Views, normalize: Normalize, rows: int
) -> Iterator[Batch]:
    """Yield the batches of K clients' updates step by step, every leaf (K, ...).

    Views are made for several steps in one call, about `rows` images at a time: they do not depend on it. Where updates
    differ in their images a step, those with fewer are filled up, which `Batch.real` says; a client update that is over
    repeats its last step, and one without any shows the longest one's images, which the caller discards.
    """
    longest = max(range(len(updates)), key=lambda k: updates[k].amount.steps)
    seats = [k if update.amount.steps else longest for k, update in enumerate(updates)]
    locals_, updates = [locals_[k] for k in seats], [updates[k] for k in seats]
    sizes = [update.amount.labeled for update in updates], [update.amount.unlabeled for update in updates]
    labeled, unlabeled = (max(each) for each in sizes)
    device = locals_[0].y.device
    real = _real(sizes, device)
    last = max(update.amount.steps for update in updates)
    together = max(1, rows // max(1, len(updates) * max(labeled, unlabeled)))
    for first in range(0, last, together):
        steps = range(first, min(first + together, last))
        mine = _step_images(updates, steps, sizes[0], [d.x_rows for d in updates], [c.x for c in locals_])
        x = mine.view(views.labeled, [d.x_drawn for d in updates], normalize)
        more = mine.named(views, [d.more_drawn for d in updates], normalize)
        y = mine.stacked([c.y[r.to(device)] for c, r in zip(locals_, mine.rows, strict=True)])
        x_index = mine.stacked(mine.rows).to(device)
        mine = _step_images(updates, steps, sizes[1], [d.u_rows for d in updates], [c.u for c in locals_])
        u, u_index = mine.named(views, [d.u_drawn for d in updates], normalize), mine.stacked(mine.rows).to(device)
        mine = _step_images(updates, steps, sizes[1], [d.o_rows for d in updates], [c.u for c in locals_])
        others, o_index = mine.named(views, [d.o_drawn for d in updates], normalize), mine.stacked(mine.rows).to(device)
        mixed = [_widened(_at(update, steps), update, labeled, unlabeled) for update in updates]
        mixed = {name: torch.stack([each[name] for each in mixed]).to(device) for name in mixed[0]}
        for step in range(len(steps)):
            a, b = slice(step * labeled, (step + 1) * labeled), slice(step * unlabeled, (step + 1) * unlabeled)
            extra = {name: leaf[:, step] for name, leaf in mixed.items()}
            if others:
                extra["second_batch_rows"] = o_index[:, b]
            yield Batch(
                x[:, a],
                y[:, a],
                x_index[:, a],
                {name: view[:, b] for name, view in u.items()},
                u_index[:, b],
                {name: view[:, b] for name, view in others.items()},
                extra,
                {name: view[:, a] for name, view in more.items()},
                real,
            )


def _real(sizes: tuple[list[int], list[int]], device: torch.device) -> dict[str, Tensor]:
    """Return which of the K clients' labeled and unlabeled images of a step are no padding, (K, images); {} if all."""
    if all(len(set(each)) == 1 for each in sizes):
        return {}
    return {
        name: torch.arange(max(each), device=device) < torch.tensor(each, device=device)[:, None]
        for name, each in zip("xu", sizes, strict=True)
    }


class _StepImages(NamedTuple):
    """The images of K clients that several steps look at."""

    images: list[Tensor]  # K of (rows of the client, C, H, W)
    rows: list[Tensor]  # K of (n_k,), which of them
    span: list[Tensor]  # K of (n_k,), where their draws stand
    fill: Tensor | None  # (K, n), where what is stacked stands in all n_k after each other; None: as it is

    def stacked(self, leaves: list[Tensor]) -> Tensor:
        """Return leaves (n_k, ...) as one (K, n, ...); where a client lacks images of a step, its last repeats."""
        return torch.stack(leaves) if self.fill is None else torch.cat(leaves)[self.fill.to(leaves[0].device)]

    def named(self, views: Views, draws: Sequence[dict[str, Draws]], normalize: Normalize) -> dict[str, Tensor]:
        """Return the views that are drawn, by name, each as `view` makes it."""
        return {name: self.view(recipe(views, name), [each[name] for each in draws], normalize) for name in draws[0]}

    def view(self, view: View, draws: Sequence[Draws], normalize: Normalize) -> Tensor:
        """Return one view of every client's rows, (K, n, C, H, W), made in one call."""
        picked = torch.cat([each[r.to(each.device)] for each, r in zip(self.images, self.rows, strict=True)])
        params = {name: torch.cat([d[name][at] for d, at in zip(draws, self.span, strict=True)]) for name in draws[0]}
        output = view.apply(picked, params, normalize)
        if self.fill is None:
            return torch.unflatten(output, 0, (len(self.rows), -1))
        return output[self.fill.to(output.device)]


def _step_images(
    updates: Sequence[DrawnUpdate], steps: range, sizes: list[int], rows: list[Tensor], images: list[Tensor]
) -> _StepImages:
    span = [_positions(update, steps, size) for update, size in zip(updates, sizes, strict=True)]
    indices = [each[at] if len(each) else each for each, at in zip(rows, span, strict=True)]
    fill = None
    if len(set(sizes)) > 1 and any(len(each) for each in indices):
        fill = _fill(sizes, len(steps))
    return _StepImages(images, indices, span, fill)


def _fill(sizes: list[int], steps: int) -> Tensor:
    """Return where the images of K clients, as many a step as the largest has, stand in their rows after each other.

    A client that has none at all is filled up with another's.
    """
    most, start = max(sizes), 0
    places: list[Tensor] = []
    for size in sizes:
        each = torch.arange(steps)[:, None] * size + torch.arange(most).clamp_max(size - 1)
        places.append(start + each.flatten() if size else torch.zeros(steps * most, dtype=torch.int64))
        start += size * steps
    return torch.stack(places)


def _at(update: DrawnUpdate, steps: range) -> dict[str, Tensor]:
    """Return the mixing draws of `steps`; steps beyond the client update's end repeat the last."""
    at = torch.arange(steps.start, steps.stop).clamp_max(update.amount.steps - 1)
    return {name: leaf[at] for name, leaf in update.mixed.items()}


def _widened(mixed: dict[str, Tensor], update: DrawnUpdate, labeled: int, unlabeled: int) -> dict[str, Tensor]:
    """Return mixing draws (steps, ...) for so many images a step; what fills it up is mixed with itself, unturned."""
    amount, views = update.amount, len(update.u_drawn)
    if not mixed or (amount.labeled, amount.unlabeled) == (labeled, unlabeled):
        return mixed
    places = torch.arange(labeled + views * unlabeled)
    own = places < amount.labeled
    own[labeled:] = (places[labeled:] - labeled) % max(1, unlabeled) < amount.unlabeled
    order = places.repeat(len(mixed["mix"]), 1)
    order[:, own] = places[own][mixed["order"]]
    turn = torch.nn.functional.pad(mixed["turn"], (0, unlabeled - amount.unlabeled))
    return {**mixed, "order": order, "turn": turn}


def _positions(update: DrawnUpdate, steps: range, size: int) -> Tensor:
    """Return where the images of `steps` stand in the client update; steps beyond its end repeat the last."""
    at = torch.arange(steps.start, steps.stop).clamp_max(update.amount.steps - 1)
    return (at[:, None] * size + torch.arange(size)).flatten()
