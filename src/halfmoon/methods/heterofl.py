"""HeteroFL (Diao, Ding and Tarokh, ICLR 2021): small clients train only the leading channels of the network.

A client of rate r receives the first ceil(r n) of every n hidden channels, in each leaf; image channels and classes are
not reduced. While it trains, the output of each convolution is divided by r (the Scaler), so that activations are as
large as the full network's, and the logits of classes without an image at the client are set to 0 (masked
cross-entropy). The server averages each entry over the clients that trained it, with equal weights, and rows of the
head over those with images of the class. Entries that no client trained keep their value. Statistics are estimated for
the full network after each round (`batchnorm_stats`).

Supervised: all rows count as labeled. With `rates` "1" and `masked` False this is FedAvg with static batch
normalization; with `server_momentum` 0.5 and `keep_optimizer` too it is the row "HeteroFL" of SemiFL's tables.

server: params, stats, and with server_momentum its buffer.  broadcast: params, cut to the client's rate.  memory: with
`keep_optimizer` the optimizer's state.  upload: the trained broadcast, present (classes,), weight.  About r^2 of
FedAvg's bytes; but estimating the statistics sends the full network to all clients whose rows are counted (the authors'
code pools the data instead).

Departures: client k always has rate number k modulo the number of rates, where the authors' code assigns them to blocks
of clients. `masked` also decides which clients' rows of the head are averaged: without it, those of all clients.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from halfmoon.api.method_entry import MethodEntry
from halfmoon.api.requirements import Requirements
from halfmoon.api.types import Batch, ClientData, ClientUpdate, Federation, StepMetrics, Task, UpdateRequirements
from halfmoon.api.uploads import Aux, Upload, UploadSpec
from halfmoon.core import tree
from halfmoon.core.autodiff import grad_and_value
from halfmoon.core.errors import UserError
from halfmoon.core.label_locations import ALL_LABEL_LOCATIONS
from halfmoon.core.tensors import to_ints
from halfmoon.core.tree import Tree
from halfmoon.methods.averaging import ModelAveraging, take_momentum_step
from halfmoon.methods.batchnorm_stats import BatchNormStatistics, estimate_statistics
from halfmoon.methods.objectives.base import labeled_cross_entropy
from halfmoon.models import Network


@dataclass(frozen=True)
class HeteroFL(ModelAveraging):
    """HeteroFL, Algorithm 1.

    Attributes:
        rates: widths, separated by "-": with "1-0.5-0.25" a third of the clients train the full network, a third half
            of its channels, a third a quarter. One has to be 1, or some channels would never be trained.
        masked: whether clients leave classes without an image there to other clients.
        sbn: rows that the batch-normalization statistics are estimated on.
        server_momentum: momentum of the server's step towards the average.
        keep_optimizer: whether clients keep the optimizer's state between rounds.

    Raises:
        UserError: for `rates` outside (0, 1] or without a 1.
    """

    uses_class_weights: ClassVar[bool] = True

    rates: str = "1"
    masked: bool = True
    sbn: Literal["all", "cohort"] = "all"
    server_momentum: float = 0.0
    keep_optimizer: bool = False

    def __post_init__(self) -> None:
        parse_rates(self.rates)

    def requirements(self, norm: str) -> Requirements:
        reason = "each parameter is averaged over the clients that trained it and have images of its class"
        counts = "norm 'group' or 'none'" if norm == "batch" else ""
        return Requirements(reason=reason, label_locations=ALL_LABEL_LOCATIONS, personal=True, counts_statistics=counts)

    def client_updates(self, task: Task) -> Mapping[str, ClientUpdate]:
        if not task.network.sliceable:
            raise UserError(
                "heterofl cuts networks to their leading channels, and cannot identify the channels of an nn.Module or "
                "of given weights; choose a network of halfmoon without weights, or another method."
            )
        rates = sorted(set(parse_rates(self.rates)), reverse=True)
        training = {update_name(rate): HeteroFLClient(task, self, rate) for rate in rates}
        return training | {"census": BatchNormStatistics(task)}

    def start(self, task: Task, model: Tree) -> Tree:
        return {**model, "momentum": tree.zeros_like(model["params"])} if self.server_momentum else model

    def round(self, task: Task, server: Tree, federation: Federation) -> Tree:
        """Run a round of HeteroFL: clients of each rate train the leading channels, the server averages each entry.

        Each number of a parameter is averaged over the clients that trained it; without any it remains the server's.

        Args:
            task: settings that all methods share: network, optimizer, rules for batch statistics.
            server: the server's state: the full network, and momentum with `server_momentum`.
            federation: the clients of this round.

        Returns:
            The server's new state.
        """
        rates = parse_rates(self.rates)
        fixed_dims = fixed_dimensions(task.network)
        full = tree.flatten(server["params"])
        total = tree.zeros_like(full)
        counts = tree.zeros_like(full)
        # One query for each rate, as the clients of a query share the shapes of their parameters.
        for rate in sorted(set(rates), reverse=True):
            # Client k has the rate at position k of the list, which is repeated.
            members = [client for client in to_ints(federation.cohort) if rates[client % len(rates)] == rate]
            if members:
                broadcast = {"params": cut_to_leading_channels(server["params"], rate, fixed_dims)}
                clients = torch.tensor(members, dtype=torch.int64)
                upload = federation.query(update_name(rate), broadcast, clients=clients)
                if len(upload.weight):  # no client of this rate may have replied
                    self._add_uploads(upload, total, counts)
        mean = {path: torch.where(counts[path] > 0, total[path] / counts[path], old) for path, old in full.items()}
        new: Tree = {"params": tree.unflatten(mean)}
        if self.server_momentum:
            params, momentum = take_momentum_step(
                server["params"], new["params"], server["momentum"], self.server_momentum
            )
            new = {"params": params, "momentum": momentum}
        # `serving` False: the server's images do not count, as it trains on none.
        stats = estimate_statistics(federation, {**new, "stats": server.get("stats", {})}, self.sbn, serving=False)
        return {**new, "stats": stats}

    def _add_uploads(self, upload: Upload, total: dict[str, Tensor], counts: dict[str, Tensor]) -> None:
        """Add the parameters of HeteroFL's narrow networks to the sums over clients, in place.

        A small client trains the leading channels of each layer, so its leaf is the leading block of the full one. With
        `masked`, a client counts in the head only for the classes of which it has images ("present").

        Args:
            upload: parameters, leaves (k, ...), of k clients with the same width.
            total: for each parameter of the full network, by path, the sum; the leading channels are added to.
            counts: for each entry of these, the number of clients that trained it.
        """
        for path, leaf in tree.flatten(upload.update["params"]).items():
            # (k, 1), for rows of the head (k, classes): dimension 1 of a stacked leaf is its output dimension.
            weight = upload.weight.to(leaf.dtype)[:, None]
            if path.startswith("head/") and self.masked:
                weight = weight * upload.aux["present"].to(leaf.dtype)
            # Broadcast over the input dimensions.
            weight = weight.reshape(*weight.shape, *[1] * (leaf.dim() - 2))
            leading = tuple(slice(size) for size in leaf.shape[1:])
            total[path][leading] += (leaf * weight).sum(0)
            counts[path][leading] += weight.sum(0)


@dataclass(frozen=True)
class HeteroFLClient(ClientUpdate):
    """The client of HeteroFL at one rate: it trains the leading channels on labeled images."""

    options: HeteroFL = field(default_factory=HeteroFL)
    rate: float = 1.0

    @property
    def requirements(self) -> UpdateRequirements:
        upload_spec = UploadSpec(update=("params",), statistics=(), weight="one", aux={"present": Aux(values="mark")})
        return UpdateRequirements(
            masks_padding=True, keep_optimizer=self.options.keep_optimizer, upload_spec=upload_spec
        )

    def begin(self, broadcast: Tree, memory: Tree, data: ClientData) -> Tree:
        # Padding rows repeat the client's rows, so they add no class.
        counts = F.one_hot(data.y, self.task.network.classes).sum(0)
        present = (counts > 0) & (data.labeled > 0)
        return {**super().begin(broadcast, memory, data), "present": present}

    def step(self, broadcast: Tree, carry: Tree, batch: Batch) -> tuple[Tree, StepMetrics]:
        gradient, loss, _ = grad_and_value(self._loss, carry["params"], carry["present"], batch)
        return self.optimizer_step(carry, gradient), StepMetrics(loss, samples={}, pseudo=())

    def finish(self, broadcast: Tree, carry: Tree, data: ClientData) -> tuple[Upload, Tree]:
        weight = (data.labeled > 0).double()
        _, memory = super().finish(broadcast, carry, data)
        aux = {"present": carry["present"].double()}
        return Upload({"params": carry["params"]}, weight=weight, aux=aux), memory

    def _loss(self, params: Tree, present: Tensor, batch: Batch) -> tuple[Tensor, tuple[Any, ...]]:
        logits, _ = self.task.network.train(scale_convolutions(params, self.rate), batch.x, real=batch.x_real)
        if self.options.masked:
            # Classes without an image at this client get a constant logit: no gradient moves their rows of the head.
            logits = torch.where(present, logits, 0.0)
        return labeled_cross_entropy(logits, batch.y, batch.x_real, self.task.class_weights), ()


def update_name(rate: float) -> str:
    """Build the name of the client update at a rate."""
    return f"train-{rate:g}"


def parse_rates(rates: str) -> tuple[float, ...]:
    """Parse HeteroFL's option for the widths of clients' networks.

    Args:
        rates: shares of the full network's channels, such as "1-0.5-0.25".

    Returns:
        The shares.

    Raises:
        UserError: one is not a number above 0 and at most 1, or none is 1.
    """
    try:
        values = tuple(float(rate) for rate in rates.split("-"))
    except ValueError:
        values = ()
    if not values or not all(0 < rate <= 1 for rate in values) or max(values) < 1:
        raise UserError(
            f"rates is {rates!r}: give numbers above 0 and at most 1 with '-' between them and one of them 1: '1-0.5'."
        )
    return values


@lru_cache(maxsize=8)
def fixed_dimensions(network: Network) -> dict[str, tuple[bool, ...]]:
    """Find the dimensions of each parameter that HeteroFL never cuts: image channels, classes and kernel sizes.

    Args:
        network: the full network.

    Returns:
        For each parameter's path one bool for each dimension, True if it is not cut.
    """
    # A dimension of image channels or classes changes if the network gets one more of these; hidden ones do not. The
    # first two dimensions are outputs and inputs, further ones are kernel sizes.
    larger = replace(network, channels=network.channels + 1, classes=network.classes + 1)
    leaves = tree.flatten(network.init(torch.Generator())["params"])
    larger_leaves = tree.flatten(larger.init(torch.Generator())["params"])
    fixed: dict[str, tuple[bool, ...]] = {}
    for path, leaf in leaves.items():
        sizes = zip(leaf.shape, larger_leaves[path].shape, strict=True)
        fixed[path] = tuple(dimension > 1 or size != larger_size for dimension, (size, larger_size) in enumerate(sizes))
    return fixed


def cut_to_leading_channels(params: Tree, rate: float, fixed: Mapping[str, tuple[bool, ...]]) -> Tree:
    """Cut a network to its leading channels: the first ceil(rate * n) of the n entries of each dimension.

    Args:
        params: the full network's parameters.
        rate: share of the hidden channels, above 0 and at most 1.
        fixed: for each parameter's path, True for dimensions that are not cut, see `fixed_dimensions`.

    Returns:
        The parameters of the narrow network, as new tensors.
    """
    leaves: dict[str, Tensor] = {}
    for path, leaf in tree.flatten(params).items():
        sizes: list[int] = []
        for size, is_fixed in zip(leaf.shape, fixed[path], strict=True):
            # Round to 9 decimals first: 0.07 * 100 is slightly above 7 in floating point, and `ceil` would give 8.
            sizes.append(size if is_fixed else math.ceil(round(rate * size, 9)))
        leaves[path] = leaf[tuple(slice(size) for size in sizes)].contiguous()
    return tree.unflatten(leaves)


def scale_convolutions(params: Tree, rate: float) -> Tree:
    """Divide the parameters of each convolution, and so its output, by `rate`: HeteroFL's Scaler.

    A narrow network sums over fewer channels; the division makes activations as large as in the full network.

    Args:
        params: the network's parameters; those of convolutions are under "conv" in each layer.
        rate: share of the full network's channels.
    """
    if rate == 1:
        return params
    scaled: Tree = {}
    for name, layer in params.items():
        if "conv" in layer:
            layer = {**layer, "conv": tree.map(lambda leaf: leaf / rate, layer["conv"])}
        scaled[name] = layer
    return scaled


ROWS = (
    MethodEntry("heterofl", "HeteroFL (all labels)", "HeteroFL, ICLR 2021",
                "all labels; clients train networks of different widths", HeteroFL(), all_labels=True),
)  # fmt: skip
