"""Static batch normalization (HeteroFL, ICLR 2021; SemiFL, NeurIPS 2022): statistics are counted, not tracked.

Networks train on batch statistics alone and send none. When a model is to label or to be evaluated, its rows are looked
at once more, un-augmented and without a step, and the mean and the unbiased variance of every batch are averaged; the
variance between batches is no part of it, as in the authors' code.

Departure: their code passes the pooled images of all holders through one sequence of batches of 250, each counting the
same, the cut last one too. Rows do not leave their holders here, so a batch holds rows of one client, cut into nearly
equal parts of at most 250; it counts by its rows, or a client of twelve images would weigh as much as one of 250.
"""

from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from halfmoon.api.requirements import LabelLocation, Requirements
from halfmoon.api.types import ClientData, ClientUpdate, Federation, Passes, Task, UpdateRequirements
from halfmoon.api.uploads import Aux, Upload, UploadSpec
from halfmoon.core import tree
from halfmoon.core.errors import UserError
from halfmoon.core.tree import Tree
from halfmoon.methods.objectives.base import chunks, masked_chunks

Over = Literal["all", "cohort", "server"]
"""Whose rows are counted beside the server's: those of all registered clients, of the round's cohort, or nobody's."""

LABEL_LOCATIONS: tuple[LabelLocation, ...] = ("server", "clients", "some")


@dataclass(frozen=True)
class BatchNormStatistics(ClientUpdate):
    """Look once at all rows, labeled and unlabeled, and send the sum over rows of their batches' moments.

    down: params.  up: no update; rows () as the weight, and beside it moments (as stats, summed over rows).  Nothing is
    remembered.
    """

    @property
    def requirements(self) -> UpdateRequirements:
        upload_spec = UploadSpec((), (), aux={"moments": Aux("sum", "statistic")})
        return UpdateRequirements(trains=False, all_rows=True, masks_padding=True, upload_spec=upload_spec)

    @torch.no_grad()
    def begin(self, broadcast: Tree, memory: Tree, data: ClientData) -> Tree:
        if not len(data.x) + len(data.u):
            return {"moments": self.task.network.unseen(broadcast["params"])}
        return {"moments": row_moments(self.task, broadcast["params"], data)}

    def finish(self, broadcast: Tree, carry: Tree, data: ClientData) -> tuple[Upload, Tree]:
        return Upload({}, data.rows, {"moments": carry["moments"]}), {}

    def passes(self, labeled: int, unlabeled: int) -> Passes:
        return Passes(0, 0)

    def images_outside_steps(self, labeled: int, unlabeled: int) -> int:
        return labeled + unlabeled


def counting(norm: str, over: Over) -> Requirements:
    """Return what a method needs whose statistics are counted `over` the rows of these."""
    if norm != "batch" or over == "server":
        return Requirements("sum", "", LABEL_LOCATIONS)
    reason = (
        "the statistics of a model are put together from each client's own (a sum is enough with sbn 'server', or "
        "with norm 'group' or 'none')"
    )
    return Requirements(
        reason=reason, label_locations=LABEL_LOCATIONS, counts_statistics="norm 'group' or 'none', or sbn 'server'"
    )


@torch.no_grad()
def row_moments(task: Task, params: Tree, data: ClientData) -> Tree:
    """Return the moments (as stats) of all rows of a client in nearly equal batches, summed over rows; {} of none.

    Rows that are padding are left out: the batches are those that the others make alone.
    """
    images, total = torch.cat([data.x, data.u]), {}
    if data.real:
        return _row_moments_apart(task, params, data, images)
    for part in chunks(images) if len(images) else ():
        rows, moments = len(part), task.network.train(params, task.normalize(part))[1]
        total = total or tree.zeros_like(moments)
        total = tree.map(partial(torch.add, alpha=rows), total, moments)
    return total


def _row_moments_apart(task: Task, params: Tree, data: ClientData, images: Tensor) -> Tree:
    """Return what `row_moments` does of images (n, C, H, W), of which the last labeled and the last unlabeled ones
    are padding.
    """
    at = torch.arange(len(images), device=images.device)
    own = torch.where(at < data.labeled, at, at - data.labeled + len(data.x)).clamp_max(len(images) - 1)
    rows, there, _ = masked_chunks(at < data.labeled + data.unlabeled)
    total: Tree = {}
    for part, real in zip(rows.unbind(), there.unbind(), strict=True):
        moments = task.network.train(params, task.normalize(images[own[part]]), real=real)[1]
        total = total or tree.zeros_like(moments)
        total = tree.map(lambda old, new, real=real: old + real.sum() * new, total, moments)
    return total


def estimate(federation: Federation, server: Tree, over: Over, serving: bool = True) -> Tree:
    """Return new statistics for the model `server`["params"]: the mean moments over the rows that `over` names.

    The client update "census" has to be the method's `BatchNormStatistics`. `serving` adds the server's own rows.
    Clients are asked a cohort's number at a time: a device holds no more of them than in training. A network
    without statistics
    costs nothing; raises `UserError` where nobody who is asked has a row.
    """
    if not server.get("stats"):
        return {}
    broadcast = {"params": server["params"]}
    cohorts = {
        "all": torch.split(torch.arange(federation.clients), max(1, len(federation.cohort))),
        "cohort": (federation.cohort,),
        "server": (),
    }[over]
    counts = [
        upload for clients in cohorts if len((upload := federation.query("census", broadcast, clients=clients)).weight)
    ]
    if serving and federation.labeled:
        counts.append(federation.query_server("census", broadcast).map(lambda leaf: leaf[None]))
    rows = sum(float(each.weight.sum()) for each in counts)
    if not rows:
        raise UserError(
            f"static batch normalization over '{over}' finds no image to look at: the server has none; set sbn to "
            "'all' or 'cohort'."
        )
    sums = [tree.map(lambda leaf: leaf.sum(0), each.aux["moments"]) for each in counts]
    return tree.map(lambda *leaves: torch.stack(leaves).sum(0) / rows, *sums)
