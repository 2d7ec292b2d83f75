"""What a client's visit looks at: how many steps, which rows in which order, and the draws of their views.

All of it is decided here from (seed, round, trip, client), outside every method, so that a loop, a batched cohort and a
real network see the same images. Labeled and unlabeled rows have generators of their own: methods that look at
labeled images only see, with as many steps, the same labeled batches as the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from halfmoon import rng
from halfmoon.augment import Drawn, Labeled, Normalize, Plain, Strong, View, Weak
from halfmoon.errors import UserError
from halfmoon.types import Batch, Local


@dataclass(frozen=True)
class Batching:
    """The batch rule that all methods of a comparison share.

    `labeled` and `unlabeled` are images a step; "rest" spreads the unlabeled rows over the steps (FedDure's released
    code: N_u // steps). One epoch is one pass over the labeled rows, round(N_l / labeled) steps, or one over the
    unlabeled rows, ceil(N_u / unlabeled) steps: `epoch` says which; the other set is cycled. "auto" is unlabeled where
    `unlabeled` is a number and labeled where it is "rest". `steps` fixes the number of steps instead. A set smaller
    than its batch is cycled, never padded.
    """

    labeled: int = 10
    unlabeled: int | Literal["rest"] = "rest"
    epochs: int = 1
    epoch: Literal["auto", "labeled", "unlabeled"] = "auto"
    steps: int | None = None

    def __post_init__(self) -> None:
        sizes = {"labeled": self.labeled, "epochs": self.epochs, "steps": 1 if self.steps is None else self.steps}
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
        """Return the steps of a visit to a client with `labeled` rows that trains on labels alone."""
        return self.steps or self.epochs * max(1, round(labeled / self.labeled))

    def steps_both(self, labeled: int, unlabeled: int) -> int:
        """Return the steps of a visit that trains on both sets, at least 1; `draw` needs unlabeled rows."""
        by_labels = self.epoch == "labeled" or (self.epoch == "auto" and self.unlabeled == "rest")
        if self.steps or by_labels or self.unlabeled == "rest":
            return self.steps_labeled(labeled)
        return self.epochs * max(1, -(-unlabeled // self.unlabeled))

    def unlabeled_size(self, labeled: int, unlabeled: int) -> int:
        """Return the unlabeled images of each step."""
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
    """How much one visit looks at."""

    steps: int
    labeled: int  # images a step
    unlabeled: int  # images a step, 0 for a work without views


class Visit(NamedTuple):
    """The draws of one client's visit, on the CPU."""

    amount: Amount
    x_rows: Tensor  # (steps * labeled,) int64
    x_drawn: Drawn
    u_rows: Tensor  # (steps * unlabeled,) int64
    u_drawn: dict[str, Drawn]


def cycle(rows: Tensor, length: int, generator: torch.Generator) -> Tensor:
    """Return `length` entries of `rows` (n,): one shuffled pass after another, the last one cut."""
    passes = -(-length // len(rows))
    return torch.cat([rows[torch.randperm(len(rows), generator=generator)] for _ in range(passes)])[:length]


def draw(
    amount: Amount,
    local: Local,
    views: Views,
    names: Sequence[str],
    keep: Tensor | None,
    seed: int,
    *path: int | str,
) -> Visit:
    """Draw a visit from (seed, *path); a client whose `keep` (U,) allows no row takes no step."""
    shape = tuple(local.x.shape[1:])
    shape = (shape[0], shape[1], shape[2])
    allowed = torch.arange(int(local.unlabeled))
    if keep is not None:
        allowed = allowed[keep.cpu()[: len(allowed)]]
    if names and not len(allowed):
        amount = Amount(0, amount.labeled, amount.unlabeled)
    g = rng.generator(seed, *path, "labeled")
    total = amount.steps * amount.labeled
    x_rows = cycle(torch.arange(int(local.labeled)), total, g) if total else torch.zeros(0, dtype=torch.int64)
    x_drawn = views.labeled.draw(total, shape, g)
    u_rows, u_drawn = torch.zeros(0, dtype=torch.int64), {}
    if names:
        total = amount.steps * amount.unlabeled
        g = rng.generator(seed, *path, "unlabeled")
        u_rows = cycle(allowed, total, g) if total else u_rows
        u_drawn = {name: views.unlabeled[name].draw(total, shape, rng.generator(seed, *path, name)) for name in names}
    return Visit(amount, x_rows, x_drawn, u_rows, u_drawn)


def batches(
    locals_: Sequence[Local], visits: Sequence[Visit], views: Views, normalize: Normalize, rows: int
) -> Iterator[Batch]:
    """Yield the batches of K clients' visits step by step, every leaf (K, ...).

    Views are made for several steps in one call, about `rows` images at a time: they do not depend on it. All visits
    share the images a step; a visit that is over repeats its last step, and one without any shows the longest visit's
    images, which the caller discards.
    """
    longest = max(range(len(visits)), key=lambda k: visits[k].amount.steps)
    seats = [k if visit.amount.steps else longest for k, visit in enumerate(visits)]
    locals_, visits = [locals_[k] for k in seats], [visits[k] for k in seats]
    _, labeled, unlabeled = visits[0].amount
    last = max(visit.amount.steps for visit in visits)
    together = max(1, rows // max(1, len(visits) * max(labeled, unlabeled)))
    for first in range(0, last, together):
        steps = range(first, min(first + together, last))
        span = [_positions(visit, steps, labeled) for visit in visits]
        x_rows = [visit.x_rows[at] for visit, at in zip(visits, span, strict=True)]
        x = _view(views.labeled, [v.x_drawn for v in visits], span, [c.x for c in locals_], x_rows, normalize)
        y = torch.stack([c.y[r.to(c.y.device)] for c, r in zip(locals_, x_rows, strict=True)])
        u: dict[str, Tensor] = {}
        span = [_positions(visit, steps, unlabeled) for visit in visits]
        u_rows = [
            visit.u_rows[at] if len(visit.u_rows) else visit.u_rows for visit, at in zip(visits, span, strict=True)
        ]
        for name in visits[0].u_drawn:
            drawn = [visit.u_drawn[name] for visit in visits]
            u[name] = _view(views.unlabeled[name], drawn, span, [c.u for c in locals_], u_rows, normalize)
        x_index, u_index = torch.stack(x_rows).to(y.device), torch.stack(u_rows).to(y.device)
        for step in range(len(steps)):
            a, b = slice(step * labeled, (step + 1) * labeled), slice(step * unlabeled, (step + 1) * unlabeled)
            yield Batch(x[:, a], y[:, a], x_index[:, a], {name: view[:, b] for name, view in u.items()}, u_index[:, b])


def _positions(visit: Visit, steps: range, size: int) -> Tensor:
    """Return where the images of `steps` stand in the visit; steps beyond its end repeat the last."""
    at = torch.arange(steps.start, steps.stop).clamp_max(visit.amount.steps - 1)
    return (at[:, None] * size + torch.arange(size)).flatten()


def _view(
    view: View,
    drawn: Sequence[Drawn],
    span: Sequence[Tensor],
    images: Sequence[Tensor],
    rows: Sequence[Tensor],
    normalize: Normalize,
) -> Tensor:
    """Return one view of every client's rows, (K, n, C, H, W), made in one call."""
    picked = torch.cat([each[r.to(each.device)] for each, r in zip(images, rows, strict=True)])
    joined = {name: torch.cat([d[name][at] for d, at in zip(drawn, span, strict=True)]) for name in drawn[0]}
    made = view.apply(picked, joined, normalize)
    return made.unflatten(0, (len(rows), -1))
