"""Static batch normalization (HeteroFL, ICLR 2021; SemiFL, NeurIPS 2022): statistics are counted, not tracked.

Networks train on batch statistics and upload none. Before a model predicts pseudo-labels or is evaluated, it processes
the rows once more, without augmentation and without a step, and the mean and the unbiased variance of every batch are
averaged. As in the authors' code, the variance between batches is not included.

Departure: their code sends the pooled images of all holders through one sequence of batches of 250, each with the same
weight, including the last, incomplete one. Here rows do not leave their holders, so a batch contains rows of one
client, which are split into nearly equal chunks of at most 250. A batch is weighted by its rows; otherwise a client
with twelve images would have the weight of one with 250.
"""

from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from halfmoon.api.requirements import Requirements
from halfmoon.api.types import ClientData, ClientUpdate, Federation, Passes, Task, UpdateRequirements
from halfmoon.api.uploads import Aux, Upload, UploadSpec
from halfmoon.core import tree
from halfmoon.core.errors import UserError
from halfmoon.core.label_locations import LabelLocation
from halfmoon.core.tree import Tree
from halfmoon.methods.objectives.base import index_chunks, split_into_chunks

Over = Literal["all", "cohort", "server"]
"""Clients whose rows are counted, in addition to the server's: all registered ones, the round's cohort, or none."""

LABEL_LOCATIONS: tuple[LabelLocation, ...] = ("server", "clients", "some")


@dataclass(frozen=True)
class BatchNormStatistics(ClientUpdate):
    """Process all rows once, labeled and unlabeled, and upload the sum over rows of their batches' moments.

    broadcast: params.  memory: none.  upload: no update; the number of rows () as the weight, and moments (as stats,
    summed over rows).
    """

    @property
    def requirements(self) -> UpdateRequirements:
        upload_spec = UploadSpec(update=(), statistics=(), aux={"moments": Aux("sum", "statistic")})
        return UpdateRequirements(trains=False, all_rows=True, masks_padding=True, upload_spec=upload_spec)

    @torch.no_grad()
    def begin(self, broadcast: Tree, memory: Tree, data: ClientData) -> Tree:
        if not len(data.x) + len(data.u):
            return {"moments": self.task.network.zero_moments(broadcast["params"])}
        return {"moments": sum_row_moments(self.task, broadcast["params"], data)}

    def finish(self, broadcast: Tree, carry: Tree, data: ClientData) -> tuple[Upload, Tree]:
        return Upload({}, data.rows, {"moments": carry["moments"]}), {}

    def passes(self, labeled: int, unlabeled: int) -> Passes:
        return Passes(0, 0)

    def images_outside_steps(self, labeled: int, unlabeled: int) -> int:
        return labeled + unlabeled


def statistics_requirements(norm: str, over: Over) -> Requirements:
    """Build the requirements of a method with static batch normalization (sBN): how uploads may be aggregated.

    Under sBN clients train without running statistics, and upload those of the averaged model in a query after the
    round. The server needs each client's ("individual", the default), so secure aggregation, which shows it only sums,
    is refused. Robust aggregation rules are refused too, as none checks such a query (`counts_statistics`).

    Args:
        norm: normalization of the network: "batch", "group" or "none".
        over: clients on whose images the statistics are estimated; "server": on the server's images, without a query.

    Returns:
        Requirements with the reason and the remedy for error messages; "sum" if clients upload no statistics.
    """
    if norm != "batch" or over == "server":
        return Requirements(aggregation="sum", reason="", label_locations=LABEL_LOCATIONS)
    reason = (
        "the statistics of a model are computed from those of each client (a sum is enough with sbn 'server', or with "
        "norm 'group' or 'none')"
    )
    return Requirements(
        reason=reason,
        label_locations=LABEL_LOCATIONS,
        counts_statistics="norm 'group' or 'none', or sbn 'server'",  # the remedy, the end of a sentence
    )


@torch.no_grad()
def sum_row_moments(task: Task, params: Tree, data: ClientData) -> Tree:
    """Compute the batch-norm moments (mean and variance of each layer's inputs) of a client's images, summed over images.

    The images, labeled and unlabeled, pass through the network in nearly equal batches. Padding rows are left out: the
    batches are the same as without them.

    Args:
        task: with the network.
        params: the network's parameters.
        data: the client's images; `real` has masks if the client is padded to the size of others.

    Returns:
        A tree like the network's running statistics; {} if there is no image.
    """
    images = torch.cat([data.x, data.u])
    total: Tree = {}
    if data.real:
        return _sum_padded_row_moments(task, params, data, images)
    for chunk in split_into_chunks(images) if len(images) else ():
        _, moments = task.network.train(params, task.normalize(chunk))
        # Weighted by rows: the moments of a chunk are means, and chunks may differ by one row.
        total = total or tree.zeros_like(moments)
        total = tree.map(partial(torch.add, alpha=len(chunk)), total, moments)
    return total


def _sum_padded_row_moments(task: Task, params: Tree, data: ClientData, images: Tensor) -> Tree:
    """Compute the batch-norm moments of a client whose images are padded, summed over images (`sum_row_moments`).

    Args:
        task: with the network.
        params: the network's parameters.
        data: the client's images, with the numbers of those that are not padding.
        images: (n, C, H, W): labeled images, their padding, unlabeled images, their padding.
    """
    index = torch.arange(len(images), device=images.device)
    # Move the unlabeled rows forward, over the padding of the labeled ones: then all real rows come first.
    unlabeled_index = index - data.labeled + len(data.x)
    order = torch.where(index < data.labeled, index, unlabeled_index).clamp_max(len(images) - 1)
    is_real = index < data.labeled + data.unlabeled
    # The same chunks as those of a client without padding; the mask tells which rows of a chunk are real.
    chunk_rows, chunk_masks, _ = index_chunks(is_real)
    total: Tree = {}
    for rows, mask in zip(chunk_rows.unbind(), chunk_masks.unbind(), strict=True):
        batch = task.normalize(images[order[rows]])
        _, moments = task.network.train(params, batch, real=mask)
        total = total or tree.zeros_like(moments)
        # Weighted by the number of real images in the chunk. The default argument binds this iteration's mask.
        total = tree.map(lambda old, new, mask=mask: old + mask.sum() * new, total, moments)
    return total


def estimate_statistics(federation: Federation, server: Tree, over: Over, serving: bool = True) -> Tree:
    """Estimate the batch-norm statistics of the server's model, as the mean over the clients' images.

    This is static batch normalization (HeteroFL, SemiFL). The method's client update "census" has to be
    `BatchNormStatistics`: its upload has the sums over the client's images, with their number as its weight. Clients
    are queried in groups of the size of a cohort, so that a device has no more of them in memory than in training.

    Args:
        federation: the clients.
        server: contains "params", and "stats" if the network has statistics.
        over: clients whose images are used: "all", the round's "cohort", or none ("server").
        serving: whether the server's images are used too.

    Returns:
        Mean and variance of each layer; {} for a network without batch normalization.

    Raises:
        UserError: there is no image.
    """
    if not server.get("stats"):
        return {}
    broadcast = {"params": server["params"]}
    groups_by_option = {
        "all": torch.split(torch.arange(federation.clients), max(1, len(federation.cohort))),
        "cohort": (federation.cohort,),
        "server": (),
    }
    client_groups = groups_by_option[over]
    # No weights change between the groups, so the division into groups does not affect the result.
    uploads: list[Upload] = []
    for clients in client_groups:
        upload = federation.query("census", broadcast, clients=clients)
        if len(upload.weight):
            uploads.append(upload)
    if serving and federation.labeled:
        # The server's upload gets a leading dimension, like a group of one client.
        uploads.append(federation.query_server("census", broadcast).map(lambda leaf: leaf[None]))
    images = sum(float(upload.weight.sum()) for upload in uploads)
    if not images:
        raise UserError(
            f"static batch normalization over '{over}' finds no image: the server has none; set sbn to 'all' or "
            "'cohort'."
        )
    sums = [tree.map(lambda leaf: leaf.sum(0), upload.aux["moments"]) for upload in uploads]
    return tree.map(lambda *leaves: torch.stack(leaves).sum(0) / images, *sums)
