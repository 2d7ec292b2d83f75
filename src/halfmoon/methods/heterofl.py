"""HeteroFL (Diao, Ding and Tarokh, ICLR 2021): clients too small for the whole network train the leading part of it.

A client of rate r gets the leading ceil(r n) of every n hidden channels, in each leaf; image channels and classes stay
whole. While it trains, the output of each convolution is divided by r (the Scaler), so that activations are as large as
the whole network's, and the logits of classes that it has no image of are set to 0 (masked cross-entropy). The server
averages each entry over the clients that hold it, all counting the same, the head's rows over those that have images of
the class; an entry that nobody holds keeps its value. Statistics are counted anew for the whole network (`static`).

Supervised: all rows count as labeled. With `rates` "1" and `masked` False this is FedAvg with static batch
normalization; with `server_momentum` 0.5 and `keep_optimizer` too it is the row "HeteroFL" of SemiFL's tables.

server: params, stats, and with server_momentum its buffer.  broadcast: the client's part of params.  memory: with
`keep_optimizer` the optimizer's state.  upload: that part, trained, present (classes,), weight.  About r^2 of FedAvg's
bytes; but the count of statistics sends the whole network to all whose rows are counted (the authors' code pools the
data for it).

Departures: client k has the rate k modulo the number of rates for good, where the authors' code hands them out in
blocks of clients. The mask also says whose rows of the head are averaged: without it, all clients' are.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from halfmoon.api.method_entry import MethodEntry
from halfmoon.api.requirements import ALL_LABEL_LOCATIONS, Requirements
from halfmoon.api.types import Batch, ClientData, ClientUpdate, Federation, StepMetrics, Task, UpdateRequirements
from halfmoon.api.uploads import Aux, Upload, UploadSpec
from halfmoon.core import tree
from halfmoon.core.autodiff import grad_and_value
from halfmoon.core.errors import UserError
from halfmoon.core.tensors import to_ints
from halfmoon.core.tree import Tree
from halfmoon.methods.averaging import ModelAveraging, momentum_step
from halfmoon.methods.batchnorm_stats import BatchNormStatistics, estimate_statistics
from halfmoon.methods.objectives.base import labeled_cross_entropy
from halfmoon.models import Network


@dataclass(frozen=True)
class HeteroFL(ModelAveraging):
    """HeteroFL, Algorithm 1.

    `rates` are the widths, divided by "-": with "1-0.5-0.25" every third client trains the whole network, every third
    half its channels, every third a quarter. One has to be 1, or a part of the network would never be trained; raises
    `UserError` for others. `masked`: whether classes that a client has no image of are left to the others.
    """

    rates: str = "1"
    masked: bool = True
    sbn: Literal["all", "cohort"] = "all"
    server_momentum: float = 0.0
    keep_optimizer: bool = False

    def __post_init__(self) -> None:
        parsed(self.rates)

    def requirements(self, norm: str) -> Requirements:
        reason = "each parameter is averaged over the clients whose width has it and who hold its class"
        counts = "norm 'group' or 'none'" if norm == "batch" else ""
        return Requirements(reason=reason, label_locations=ALL_LABEL_LOCATIONS, personal=True, counts_statistics=counts)

    def client_updates(self, task: Task) -> Mapping[str, ClientUpdate]:
        if not task.network.sliceable:
            raise UserError(
                "heterofl cuts networks to their leading channels, and does not know which those of an nn.Module or of "
                "given weights are; choose a network of halfmoon without weights, or another method."
            )
        rates = sorted(set(parsed(self.rates)), reverse=True)
        return {name(rate): Narrow(task, self, rate) for rate in rates} | {"census": BatchNormStatistics(task)}

    def start(self, task: Task, model: Tree) -> Tree:
        return {**model, "momentum": tree.zeros_like(model["params"])} if self.server_momentum else model

    def round(self, task: Task, server: Tree, federation: Federation) -> Tree:
        """Let each client train the part it can hold, and average entry by entry."""
        rates, fixed_dims = parsed(self.rates), fixed(task.network)
        cohort, whole = federation.cohort, tree.flatten(server["params"])
        total, counts = tree.zeros_like(whole), tree.zeros_like(whole)
        for rate in sorted(set(rates), reverse=True):
            mine = torch.tensor([k for k in to_ints(cohort) if rates[k % len(rates)] == rate], dtype=torch.int64)
            if len(mine):
                upload = federation.query(name(rate), {"params": cut(server["params"], rate, fixed_dims)}, clients=mine)
                if len(upload.weight):  # one of them at least has answered
                    self._count(upload, total, counts)
        mean = {path: torch.where(counts[path] > 0, total[path] / counts[path], old) for path, old in whole.items()}
        new: Tree = {"params": tree.unflatten(mean)}
        if self.server_momentum:
            params, momentum = momentum_step(server["params"], new["params"], server["momentum"], self.server_momentum)
            new = {"params": params, "momentum": momentum}
        stats = estimate_statistics(federation, {**new, "stats": server.get("stats", {})}, self.sbn, serving=False)
        return {**new, "stats": stats}

    def _count(self, upload: Upload, total: dict[str, Tensor], counts: dict[str, Tensor]) -> None:
        """Add the uploads (k, ...) of one rate into the leading part of the sums, and the number of their holders."""
        for path, leaf in tree.flatten(upload.update["params"]).items():
            there = upload.weight.to(leaf.dtype)[:, None]
            if path.startswith("head/") and self.masked:
                there = there * upload.aux["present"].to(leaf.dtype)
            there = there.reshape(*there.shape, *[1] * (leaf.dim() - 2))
            part = tuple(slice(size) for size in leaf.shape[1:])
            total[path][part] += (leaf * there).sum(0)
            counts[path][part] += there.sum(0)


@dataclass(frozen=True)
class Narrow(ClientUpdate):
    """Train the leading part of the network on labeled images, and send it back."""

    options: HeteroFL = field(default_factory=HeteroFL)
    rate: float = 1.0

    @property
    def requirements(self) -> UpdateRequirements:
        keep, upload_spec = (
            self.options.keep_optimizer,
            UploadSpec(("params",), (), "one", {"present": Aux(values="mark")}),
        )
        return UpdateRequirements(masks_padding=True, keep_optimizer=keep, upload_spec=upload_spec)

    def begin(self, broadcast: Tree, memory: Tree, data: ClientData) -> Tree:
        counts = F.one_hot(data.y, self.task.network.classes).sum(0)  # rows beyond the client's own repeat them
        present = (counts > 0) & (data.labeled > 0)
        return {**super().begin(broadcast, memory, data), "present": present}

    def step(self, broadcast: Tree, carry: Tree, batch: Batch) -> tuple[Tree, StepMetrics]:
        gradient, loss, _ = grad_and_value(self._loss, carry["params"], carry["present"], batch)
        return self.advance(carry, gradient), StepMetrics(loss, {}, ())

    def finish(self, broadcast: Tree, carry: Tree, data: ClientData) -> tuple[Upload, Tree]:
        weight = (data.labeled > 0).double()
        _, memory = super().finish(broadcast, carry, data)
        return Upload({"params": carry["params"]}, weight, {"present": carry["present"].double()}), memory

    def _loss(self, params: Tree, present: Tensor, batch: Batch) -> tuple[Tensor, tuple[Any, ...]]:
        logits, _ = self.task.network.train(scaled(params, self.rate), batch.x, real=batch.x_real)
        if self.options.masked:
            logits = torch.where(present, logits, 0.0)
        return labeled_cross_entropy(logits, batch.y, batch.x_real), ()


def name(rate: float) -> str:
    """Return the name of the client update at a rate."""
    return f"train-{rate:g}"


def parsed(rates: str) -> tuple[float, ...]:
    """Return the rates of "1-0.5-0.25"; raises `UserError` where one is no number in (0, 1] or none is 1."""
    try:
        values = tuple(float(each) for each in rates.split("-"))
    except ValueError:
        values = ()
    if not values or not all(0 < rate <= 1 for rate in values) or max(values) < 1:
        raise UserError(
            f"rates is {rates!r}: give numbers above 0 and at most 1 with '-' between them and one of them 1: '1-0.5'."
        )
    return values


@lru_cache(maxsize=8)
def fixed(network: Network) -> dict[str, tuple[bool, ...]]:
    """Return which dimensions of each parameter stay whole: those of image channels, classes and kernels.

    Outputs and inputs are a leaf's first two, hidden unless they change with the network's channels or classes.
    """
    other = replace(network, channels=network.channels + 1, classes=network.classes + 1)
    ours, theirs = (tree.flatten(each.init(torch.Generator())["params"]) for each in (network, other))
    pairs = {path: zip(leaf.shape, theirs[path].shape, strict=True) for path, leaf in ours.items()}
    return {path: tuple(d > 1 or a != b for d, (a, b) in enumerate(sizes)) for path, sizes in pairs.items()}


def cut(params: Tree, rate: float, dims: Mapping[str, tuple[bool, ...]]) -> Tree:
    """Return the leading ceil(rate * n) entries along every dimension (n) of each leaf, all along those in `dims`."""

    def part(path: str, leaf: Tensor) -> Tensor:
        sizes = [n if whole else math.ceil(round(rate * n, 9)) for n, whole in zip(leaf.shape, dims[path], strict=True)]
        return leaf[tuple(slice(size) for size in sizes)].contiguous()

    return tree.unflatten({path: part(path, leaf) for path, leaf in tree.flatten(params).items()})


def scaled(params: Tree, rate: float) -> Tree:
    """Return the parameters under which each convolution gives its output divided by `rate`."""
    if rate == 1:
        return params
    return {
        layer: {**part, "conv": tree.map(lambda leaf: leaf / rate, part["conv"])} if "conv" in part else part
        for layer, part in params.items()
    }


ROWS = (
    MethodEntry("heterofl", "HeteroFL (all labels)", "HeteroFL, ICLR 2021",
                "all labels, clients as wide as they can be", HeteroFL(), all_labels=True),
)  # fmt: skip
