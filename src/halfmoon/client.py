"""The driver of a client's visit: begin, step by step, finish; for one client in a loop, or for K lifted by vmap."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from halfmoon import rng, tree
from halfmoon.data.draw import Amount, Views, Visit, Wanted, batches, draw, sweep
from halfmoon.transform import lifted
from halfmoon.tree import Tree
from halfmoon.types import Batch, Local, Notes, Pseudo, Sample, Work

Observer = Callable[[int, Batch, Notes], None]
"""Called after each step with the client's place in the group, its batch and its notes (diagnostics)."""


class Diverged(RuntimeError):
    """A loss, or a weight, that is not a finite number: training has to stop."""

    def __init__(self, round: int, client: int, step: int, value: float, what: str = "loss") -> None:
        super().__init__(
            f"The {what} became {value} in round {round + 1} at client {client}, step {step + 1}: training stopped. "
            "The last checkpoint is from before it; a smaller learning rate is the usual remedy."
        )
        self.round, self.client, self.step = round, client, step


def images_a_call(device: torch.device) -> int:
    """Return of how many images views are made in one call: what fits a CPU's cache, or fills a GPU."""
    return 512 if device.type == "cpu" else 8192


@dataclass(frozen=True)
class Errand:
    """One trip to the clients: what they are asked, when, and under which seed."""

    work: Work
    views: Views
    seed: int
    round: int
    trip: int
    rows: int = 512  # images whose views are made in one call

    def path(self, client: int) -> tuple[str, int, int, int]:
        """Return where the random numbers of a visit come from, with the seed."""
        return ("visit", self.round, self.trip, client)


class Outcome(NamedTuple):
    """What one client's visit leaves: its upload, its memory, and what was counted.

    `swept` images went through the network outside the steps; `kept` are the bytes of the memory, wherever that is.
    """

    up: Tree
    memory: Tree
    samples: dict[str, Sample]
    amount: Amount
    traffic: tuple[int, int]  # bytes down and up
    swept: int = 0
    kept: int = 0


def visit_one(
    errand: Errand, client: int, down: Tree, memory: Tree, data: Local, amount: Amount, observe: Observer
) -> Outcome:
    """Run a visit in a plain loop: what a CPU, and a site in a real federation, does.

    On a CPU everything is laid out channels-last in here, and plain again outside: what goes up and what is remembered
    does not depend on how it was computed.
    """
    work = errand.work
    laid = data.x.device.type == "cpu"
    if laid:
        down, memory = tree.channels_last(down), tree.channels_last(memory)
    data = _swept(errand, client, data)
    carry = work.begin(down, memory, data)
    visit = _drawn(errand, client, data, amount, work.keep(carry, data))
    log = _Log()
    for stacked in batches([data], [visit], errand.views, work.task.normalize, errand.rows):
        batch = _one(stacked, 0)
        batch = _laid(batch) if laid else batch
        carry, notes = work.step(down, carry, batch)
        observe(0, batch, notes)
        log.add(notes)
    log.check(errand, client)
    up, memory = work.finish(down, carry, data)
    _check_upload(errand, client, up, visit.amount.steps)
    traffic = work.traffic(down, up)
    swept = work.swept(len(data.x), len(data.u))
    up, memory = tree.contiguous(up), tree.contiguous(memory)
    return Outcome(up, memory, log.samples, visit.amount, traffic, swept, tree.nbytes(memory))


def visit_many(
    errand: Errand,
    clients: Sequence[int],
    downs: Tree,
    each: Tree,
    memories: Sequence[Tree],
    datas: Sequence[Local],
    amounts: Sequence[Amount],
    observe: Observer,
) -> list[Outcome]:
    """Run K visits with equal images a step as one program; `downs` is shared, `each` differs (leaves (K, ...)).

    Clients with fewer steps are frozen when theirs are over. The clients of a work that looks at `whole` clients have
    to be of one size.
    """
    work, n = errand.work, len(clients)
    datas = [_swept(errand, client, data) for client, data in zip(clients, datas, strict=True)]
    padded = _padded(datas)
    memory = tree.stack(list(memories)) if memories[0] else {}

    def merged(function: Callable) -> Callable:
        """Lift, and merge the shared and the private part of `down` inside the lifted function."""
        return lifted(lambda private, *rest: function({**downs, **private}, *rest))

    carry = (
        merged(work.begin)(each, memory, padded)
        if memory
        else lifted(lambda private, data: work.begin({**downs, **private}, {}, data))(each, padded)
    )
    visits = [
        _drawn(errand, client, data, amount, _kept(work, carry, padded, k))
        for k, (client, data, amount) in enumerate(zip(clients, datas, amounts, strict=True))
    ]
    device = padded.y.device
    steps = torch.tensor([visit.amount.steps for visit in visits], device=device)
    fewest = min(visit.amount.steps for visit in visits)
    step = merged(work.step)
    logs = [_Log() for _ in clients]
    for t, batch in enumerate(batches(datas, visits, errand.views, work.task.normalize, errand.rows)):
        new, notes = step(each, carry, batch)
        carry = new if t < fewest else lifted(tree.select)(t < steps, new, carry)
        for k in range(n):
            if t < visits[k].amount.steps:
                mine = _note(notes, k)
                observe(k, _one(batch, k), mine)
                logs[k].add(mine)
    for log, client in zip(logs, clients, strict=True):
        log.check(errand, client)
    up, memory = merged(work.finish)(each, carry, padded)
    outcomes: list[Outcome] = []
    for k, client in enumerate(clients):
        mine = tree.index(up, k)
        _check_upload(errand, client, mine, visits[k].amount.steps)
        # A clone: a slice would keep the memories of the whole group alive.
        kept = tree.map(torch.clone, tree.index(memory, k))
        traffic = work.traffic({**downs, **tree.index(each, k)}, mine)
        swept = work.swept(len(datas[k].x), len(datas[k].u))
        outcomes.append(Outcome(mine, kept, logs[k].samples, visits[k].amount, traffic, swept, tree.nbytes(kept)))
    return outcomes


def first_memory(work: Work, down: Tree, seed: int) -> Tree:
    """Return the memory of a client that is met for the first time."""
    return work.remember(down, rng.generator(seed, "remember"))


class _Log:
    """Losses and samples of one visit, on the device until it ends."""

    def __init__(self) -> None:
        self.losses: list[Tensor] = []
        self.samples: dict[str, Sample] = {}

    def add(self, notes: Notes) -> None:
        loss = notes.loss.detach()
        self.losses.append(loss)
        one = torch.ones_like(loss)
        for name, new in {"loss": Sample(loss, loss.square(), one), **notes.samples}.items():
            self.samples[name] = add(self.samples.get(name), new)

    def check(self, errand: Errand, client: int) -> None:
        if not self.losses:
            return
        losses = torch.stack(self.losses)
        bad = (~losses.isfinite()).nonzero()
        if len(bad):
            step = int(bad[0])
            raise Diverged(errand.round, client, step, float(losses[step]))


def _check_upload(errand: Errand, client: int, up: Tree, steps: int) -> None:
    """Refuse an upload that the last step has spoiled: its loss was still finite."""
    fine = [leaf.isfinite().all() for leaf in tree.leaves(up)]
    if not fine or bool(torch.stack(fine).all()):  # asked of the device once
        return
    for name, leaf in tree.flatten(up).items():
        if not bool(leaf.isfinite().all()):
            worst = float(leaf[~leaf.isfinite()].flatten()[0])
            raise Diverged(errand.round, client, max(0, steps - 1), worst, f"upload '{name}'")


def add(old: Sample | None, new: Sample) -> Sample:
    """Add two samples."""
    if old is None:
        return new
    return Sample(old.total + new.total, old.squares + new.squares, old.count + new.count)


def _drawn(errand: Errand, client: int, data: Local, amount: Amount, keep: Tensor | None) -> Visit:
    work = errand.work
    wanted = Wanted(work.views, work.others, work.mixup, work.labeled_views)
    return draw(amount, data, errand.views, wanted, keep, errand.seed, *errand.path(client))


def _swept(errand: Errand, client: int, data: Local) -> Local:
    normalize = errand.work.task.normalize
    return sweep(data, errand.views, errand.work.sweep, normalize, errand.seed, *errand.path(client))


def _one(batch: Batch, k: int) -> Batch:
    u, others, drawn, more = (
        {name: leaf[k] for name, leaf in part.items()} for part in (batch.u, batch.others, batch.drawn, batch.x_views)
    )
    return Batch(batch.x[k], batch.y[k], batch.x_rows[k], u, batch.u_rows[k], others, drawn, more)


def _laid(batch: Batch) -> Batch:
    u, others, more = (tree.channels_last(part) for part in (batch.u, batch.others, batch.x_views))
    return batch._replace(x=batch.x.contiguous(memory_format=torch.channels_last), u=u, others=others, x_views=more)


def _note(notes: Notes, k: int) -> Notes:
    samples = {name: Sample(*(leaf[k] for leaf in s)) for name, s in notes.samples.items()}
    pseudo = tuple(Pseudo(*(leaf[k] for leaf in each)) for each in notes.pseudo)
    return Notes(notes.loss[k], samples, pseudo)


def _kept(work: Work, carry: Tree, padded: Local, k: int) -> Tensor | None:
    views = tree.index(padded.views, k)
    return work.keep(tree.index(carry, k), Local(*(leaf[k] for leaf in padded[:5]), views=views))


def _padded(datas: Sequence[Local]) -> Local:
    """Stack clients of unequal size: rows beyond a client's own repeat them from the start."""

    def wrap(images: Tensor, length: int) -> Tensor:
        if not len(images):
            return images.new_zeros((length, *images.shape[1:]))
        return images[torch.arange(length, device=images.device) % len(images)]

    longest_x, longest_u = max(len(d.x) for d in datas), max(len(d.u) for d in datas)
    return Local(
        torch.stack([wrap(d.x, longest_x) for d in datas]),
        torch.stack([wrap(d.y, longest_x) for d in datas]),
        torch.stack([wrap(d.u, longest_u) for d in datas]),
        torch.stack([d.labeled for d in datas]),
        torch.stack([d.unlabeled for d in datas]),
        {name: torch.stack([d.views[name] for d in datas]) for name in datas[0].views},
    )
