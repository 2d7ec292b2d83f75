"""Simulate hostile clients, which change their uploads or their labels.

Every attack is a basic one from the literature. Hostile clients do not know each other or the defense:

- "sign-flip": the update times -`factor`, which reverses the learning (Li et al. 2019, RSA).
- "noise": the update and Gaussian noise of `NOISE_FACTOR` times its norm (Blanchard et al. 2017 send only noise).
- "stale": the downloaded model is uploaded unchanged: a free rider that leaves the work to other clients
  (Fraboni, Vidal and Lorenzi 2021).
- "nan": an update that is not a number, such as a broken machine would send.
- "false-counts": an honest upload with a claim of `FALSE_COUNT_FACTOR` times the images, so that it dominates every mean.
- "sign-flip-false-counts": both at once; a bound on the norm of updates does not prevent this.
- "label-flip": class c becomes C - 1 - c in a hostile client's labeled rows; apart from that it trains like an honest
  one (Fang et al. 2020). This module does not change its uploads: `halfmoon.engine.local_clients.FederatedDataset`
  changes the labels.

Other uploaded values (FedDB's mean predictions, statistics, counts if the attack does not falsify them) are those of an
honest client.
"""

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from halfmoon.aggregation.base import AggregationContext, Aggregator, compute_update, replace_update, select_uploads
from halfmoon.api.uploads import Upload
from halfmoon.core import rng, tree

Attack = Literal[
    "sign-flip", "noise", "label-flip", "stale", "nan", "false-counts", "sign-flip-false-counts"
]  # fmt: skip

NOISE_FACTOR = 10.0
"""Norm of the noise in multiples of the update's norm. Blanchard et al. 2017 use a standard deviation of 200 in every
coordinate; relative to the update, an attack is equally strong for every network."""

FALSE_COUNT_FACTOR = 1e6
"""Factor of a false count: a federation's server without a cap accepts as much from any authenticated site."""


class HostileClients(Aggregator):
    """An aggregator that applies an attack to the uploads of hostile clients; the first one in a simulation.

    Its metrics list the hostile clients of the round. Random numbers depend on (`seed`, "attack", round, query, client)
    only.

    Args:
        attack: The attack.
        clients: The numbers of the hostile clients.
        seed: The seed of the run.
        factor: The factor of "sign-flip".
    """

    def __init__(self, attack: Attack, clients: Sequence[int], seed: int, factor: float = 1.0) -> None:
        self.attack = attack
        self.clients = frozenset(clients)
        self.seed = seed
        self.factor = factor
        self._hostile_in_round: set[int] = set()

    def process_uploads(self, context: AggregationContext, upload: Upload) -> tuple[Sequence[int], Upload]:
        """Simulate an attack: change the uploads of hostile clients, and leave those of honest clients unchanged.

        Args:
            context: The query and the k clients that responded.
            upload: Their uploads, leaves (k, ...).

        Returns:
            The indices of all k clients (no upload is dropped), and the uploads.
        """
        indices = range(len(context.clients))
        hostile_indices = [index for index in indices if context.clients[index] in self.clients]
        self._hostile_in_round.update(context.clients[index] for index in hostile_indices)  # for the round's metrics
        if not hostile_indices:
            return indices, upload
        if self.attack in ("false-counts", "sign-flip-false-counts"):
            upload = _claim_false_counts(upload, hostile_indices)
        # "label-flip" changed the labels before the training, so its updates are not changed here.
        if self.attack not in ("false-counts", "label-flip"):
            upload = self._attack_updates(context, upload, hostile_indices)
        return indices, upload

    def row(self) -> dict[str, Any]:
        hostile = sorted(self._hostile_in_round)
        self._hostile_in_round = set()
        return {"hostile": hostile}

    def _attack_updates(self, context: AggregationContext, upload: Upload, hostile_indices: Sequence[int]) -> Upload:
        """Replace the updates of the clients at `hostile_indices` by hostile ones; arguments as in `process_uploads`."""
        updates = compute_update(upload, context)  # {path: (k, ...)}: the uploaded minus the downloaded values
        if not updates:
            return upload
        new_updates = {path: leaf.clone() for path, leaf in updates.items()}
        for index in hostile_indices:
            honest = {path: leaf[index] for path, leaf in updates.items()}
            generator = rng.generator(self.seed, "attack", context.round, context.query, context.clients[index])
            for path, leaf in self._attack_update(honest, generator).items():
                new_updates[path][index] = leaf
        is_hostile = torch.tensor([index in hostile_indices for index in range(len(context.clients))])
        # Downloaded value plus update may round, so the honest clients' uploads are taken from the original.
        return select_uploads(mask=is_hostile, new=replace_update(upload, context, new_updates), old=upload)

    def _attack_update(self, change: dict[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
        """Turn the honest update of one client, {path: (...)}, into the hostile one."""
        if self.attack.startswith("sign-flip"):
            return {path: -self.factor * leaf for path, leaf in change.items()}
        if self.attack == "noise":
            return _add_noise(change, generator)
        value = 0.0 if self.attack == "stale" else math.nan
        return {path: torch.full_like(leaf, value) for path, leaf in change.items()}


def draw_hostile_clients(clients: int, share: float, seed: int) -> list[int]:
    """Draw the hostile clients of a run: ceil(share * clients) sorted numbers below `clients`."""
    order = torch.randperm(clients, generator=rng.generator(seed, "hostile"))
    # Round first, so that 0.1 * 30 = 3.0000000000000004 does not become 4.
    return sorted(order[: math.ceil(round(share * clients, 9))].tolist())


def _claim_false_counts(upload: Upload, hostile_indices: Sequence[int]) -> Upload:
    """Multiply the weights of hostile clients, which are the numbers of images that they claim to have."""
    weight = upload.weight.clone()
    weight[hostile_indices] *= FALSE_COUNT_FACTOR
    return upload._replace(weight=weight)


def _add_noise(change: dict[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
    """Add Gaussian noise of `NOISE_FACTOR` times the norm of all leaves together."""
    noise = {path: torch.randn(leaf.shape, generator=generator, dtype=torch.float64) for path, leaf in change.items()}
    update_norm = tree.squared_norm({path: leaf.double() for path, leaf in change.items()}).sqrt()
    noise_norm = tree.squared_norm({path: leaf.double() for path, leaf in noise.items()}).sqrt()
    scale = NOISE_FACTOR * float(update_norm) / float(noise_norm)
    return {path: leaf + (scale * noise[path]).to(leaf) for path, leaf in change.items()}
