"""Cap client weights: clients report their own sample counts, which may be wrong.

A client that claims 10^9 images determines the average, even if the norm of its update is bounded. So weights are
capped at `factor` times the cohort's median weight (of an even number the lower middle one: half of a cohort that
claims too much cannot raise it above an honest weight), or at the declared number of the client's images, if the
server's operators know it. Sums that a client has multiplied by its weight (`halfmoon.api.uploads.Aux`: "sum") are
scaled down with it. One client may still have half of all weights or more (in a cohort of two it cannot be avoided);
that is reported as a warning.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from halfmoon.aggregation.base import AggregationContext, Aggregator
from halfmoon.api.uploads import Upload, UploadSpec
from halfmoon.core import tree
from halfmoon.core.tree import Tree

FACTOR = 2.0
"""Default of the largest weight in a federation, in multiples of the cohort's median weight."""

DOMINANT_SHARE = 0.5
"""Share of all weights above which a single client determines the average."""


class WeightCap(Aggregator):
    """An aggregator that caps client weights.

    Its metrics list the clients whose weight was capped, and the largest share of one client in the sum of weights.

    Args:
        factor: The cap in multiples of the cohort's median weight; 0 for no cap.
        declared: The known number of images by client number; it replaces the cap for this client.
        warn: Called with a client's number and share, once per client, if the share is above `DOMINANT_SHARE`.
    """

    def __init__(
        self,
        factor: float = FACTOR,
        declared: Mapping[int, int] | None = None,
        warn: Callable[[int, float], None] = lambda client, share: None,
    ) -> None:
        """Create an aggregator that caps the weights of clients, which report their own numbers of images.

        Args:
            factor: The cap in multiples of the cohort's median weight; 0 for no cap.
            declared: The known number of images by client number; it replaces the cap for this client.
            warn: Called with a client's number and its share of all weights, once per client, if the share is above
                `DOMINANT_SHARE`; by default nothing happens.
        """
        self.factor = factor
        self.declared = dict(declared or {})
        self.warn = warn
        self._row: dict[str, Any] = {}  # metrics of the current round
        self._warned: set[int] = set()  # clients that `warn` was called for

    def process_uploads(self, context: AggregationContext, upload: Upload) -> tuple[Sequence[int], Upload]:
        """Cap the weights of the uploads; uploads below the cap remain unchanged, bit by bit."""
        scale = self.scale(context.clients, upload.weight.double().tolist())
        return range(len(context.clients)), cap_weights(upload, context.upload_spec, scale)

    def scale(self, clients: Sequence[int], weights: Sequence[float]) -> list[float]:
        """Compute the factor that lowers each client's weight to its cap, the largest weight that it may have.

        The numbers of the capped clients are recorded in the metrics of the round.

        Args:
            clients: The numbers of k clients.
            weights: Their reported weights, such as numbers of images.

        Returns:
            k factors: 1 for weights that are not above the cap.
        """
        limits = compute_caps(weights, self.factor, [self.declared.get(client) for client in clients])
        factors = [limit / weight if weight > limit else 1.0 for weight, limit in zip(weights, limits, strict=True)]
        capped_clients = [client for client, factor in zip(clients, factors, strict=True) if factor < 1]
        if capped_clients:
            self._row["capped"] = sorted({*self._row.get("capped", ()), *capped_clients})
        capped_weights = [weight * factor for weight, factor in zip(weights, factors, strict=True)]
        self._report_largest_share(clients, capped_weights)
        return factors

    def _report_largest_share(self, clients: Sequence[int], weights: Sequence[float]) -> None:
        """Record the largest share of one client in the sum of weights, and warn if it dominates the average.

        The share is recorded if it is above `DOMINANT_SHARE`, or if a limit on the weights has lowered some in this round:
        it then shows what the limit left. A round may average several times, and keeps the largest share of all.

        Args:
            clients: The numbers of k clients.
            weights: Their weights, after the cap. The warning is given once for each client above `DOMINANT_SHARE`.
        """
        total = sum(weights)
        if len(weights) < 2 or not total > 0:
            return
        heaviest = max(range(len(weights)), key=weights.__getitem__)
        share = weights[heaviest] / total
        if share > DOMINANT_SHARE or "capped" in self._row:
            self._row["largest_share"] = round(max(share, self._row.get("largest_share", 0.0)), 4)
        if share > DOMINANT_SHARE and clients[heaviest] not in self._warned:
            self._warned.add(clients[heaviest])
            self.warn(clients[heaviest], share)

    def row(self) -> dict[str, Any]:
        row = self._row
        self._row = {}
        return row


def cap_weights(upload: Upload, upload_spec: UploadSpec, scale: Sequence[float]) -> Upload:
    """Reduce the influence of clients on weighted means: scale their weights, and with them their sums over images.

    A client has multiplied its auxiliary sums by its number of images already, so they must shrink with its weight.
    If sections of the update itself are such sums, only these are scaled. The weights are then 1 for all clients, as the
    number of images is in the sums already.

    Args:
        upload: The uploads of k clients, leaves (k, ...).
        upload_spec: Declares which sections of the update ("sums") and which auxiliary values are sums.
        scale: A factor for each client: 1, which changes no bit, or less.
    """
    if all(factor == 1 for factor in scale):
        return upload
    if upload_spec.sums:
        section_sums = {name: scale_by_client(upload.update[name], scale) for name in upload_spec.sums}
        return upload._replace(update={**upload.update, **section_sums})
    sums = {name: scale_by_client(upload.aux[name], scale) for name in upload_spec.names(reduce="sum")}
    return Upload(upload.update, weight=scale_by_client(upload.weight, scale), aux={**upload.aux, **sums})


def compute_caps(weights: Sequence[float], factor: float, declared: Sequence[float | None] = ()) -> list[float]:
    """Compute the largest allowed weight of each client.

    Args:
        weights: The reported weights of k clients.
        factor: The cap in multiples of the lower median of all positive weights; 0 for no cap.
        declared: The known weight of each client, None for unknown ones; a known weight replaces the cap.

    Returns:
        k caps, infinity for none.
    """
    positive = [weight for weight in weights if weight > 0]
    limit = factor * statistics.median_low(positive) if factor and positive else float("inf")
    known_weights = declared or [None] * len(weights)
    return [limit if weight is None else float(weight) for weight in known_weights]


def scale_by_client(tensors: Tree | Tensor, scale: Sequence[float]) -> Any:
    """Multiply each client's slice of tensors by a factor.

    Args:
        tensors: A tree or a tensor, leaves (k, ...); integers are not scaled.
        scale: The factor of each of the k clients, at most 1; a factor of 1 changes no bit.
    """

    def scale_leaf(leaf: Tensor) -> Tensor:
        if not leaf.is_floating_point():
            return leaf
        # float64: a product in the leaf's dtype would be rounded twice.
        factor = torch.tensor(scale, dtype=torch.float64, device=leaf.device).reshape(-1, *[1] * (leaf.dim() - 1))
        return torch.where(factor < 1, (leaf.double() * factor).to(leaf.dtype), leaf)

    if isinstance(tensors, Tensor):
        return scale_leaf(tensors)
    return tree.map(scale_leaf, tensors)
