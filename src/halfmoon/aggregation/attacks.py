"""Hostile clients of a simulation: what they do to their uploads, or to their labels.

Every attack is the plain one of the literature, by clients that know nothing of one another and of the defense:

- "sign-flip": the update times -`factor`, so that the model is led away from what was learned (Li et al. 2019, RSA).
- "noise": the update and Gaussian noise of `NOISE` times its norm (Blanchard et al. 2017 send noise alone).
- "stale": the model that was sent comes back as it is, the last round's model: a free rider that has the others work
  (Fraboni, Vidal and Lorenzi 2021).
- "nan": an update that is not a number, as a broken machine would send.
- "false-counts": the upload as it is, and a claim of `LIE` times the images, so that it is most of every mean.
- "sign-flip-false-counts": both at once, against which no bound on norms helps.
- "label-flip": class c becomes C - 1 - c in a hostile client's labeled rows, and it trains on them as an honest one
  (Fang et al. 2020). Its uploads are not touched here: `halfmoon.engine.local_clients.FederatedDataset` has the labels.

What else is no update (FedDB's mean predictions, a count of statistics) is sent as an honest client would, and so are
counts where no attack says otherwise.
"""

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from halfmoon.aggregation.base import AggregationContext, Aggregator, changed, mixed, update
from halfmoon.api.uploads import Upload
from halfmoon.core import rng, tree

Attack = Literal[
    "sign-flip", "noise", "label-flip", "stale", "nan", "false-counts", "sign-flip-false-counts"
]  # fmt: skip

NOISE = 10.0
"""Norm of the noise in norms of the update. Blanchard et al. 2017 draw with a standard deviation of 200 in every
coordinate; in units of the update an attack means the same to every network."""


LIE = 1e6
"""What a false count is multiplied by: as much as a federation's server let through of a site with a key."""


class Hostile(Aggregator):
    """The first guard of a simulation: the uploads of `clients` (by number) become what `attack` makes of them.

    All that it draws comes from (`seed`, "attack", round, query, client). Its row names the hostile clients of a round.
    """

    def __init__(self, attack: Attack, clients: Sequence[int], seed: int, factor: float = 1.0) -> None:
        self.attack, self.clients, self.seed, self.factor = attack, frozenset(clients), seed, factor
        self._met: set[int] = set()

    def uploads(self, context: AggregationContext, upload: Upload) -> tuple[Sequence[int], Upload]:
        """Return all places, and the uploads with those of hostile clients in place of what they were."""
        everyone = range(len(context.clients))
        hostile = [place for place in everyone if context.clients[place] in self.clients]
        self._met |= {context.clients[place] for place in hostile}
        if self.attack.endswith("false-counts"):
            weight = upload.weight.clone()
            weight[hostile] *= LIE
            upload = upload._replace(weight=weight)
        change = update(upload, context)
        if not hostile or not change or self.attack in ("label-flip", "false-counts"):
            return everyone, upload
        new = {path: leaf.clone() for path, leaf in change.items()}
        for place in hostile:
            mine = {path: leaf[place] for path, leaf in change.items()}
            path = ("attack", context.round, context.query, context.clients[place])
            for name, leaf in self._spoiled(mine, rng.generator(self.seed, *path)).items():
                new[name][place] = leaf
        bad = torch.tensor([place in hostile for place in everyone])
        return everyone, mixed(bad, changed(upload, context, new), upload)

    def row(self) -> dict[str, Any]:
        met, self._met = sorted(self._met), set()
        return {"hostile": met}

    def _spoiled(self, change: dict[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
        """Return what a hostile client says that it has changed, for what it would have said."""
        if self.attack.startswith("sign-flip"):
            return {path: -self.factor * leaf for path, leaf in change.items()}
        if self.attack == "noise":
            return _noisy(change, generator)
        value = 0.0 if self.attack == "stale" else math.nan
        return {path: torch.full_like(leaf, value) for path, leaf in change.items()}


def hostile(clients: int, share: float, seed: int) -> list[int]:
    """Return the hostile ones among `clients`, the same in all rounds: ceil(share * clients) of them, sorted."""
    order = torch.randperm(clients, generator=rng.generator(seed, "hostile"))
    return sorted(order[: math.ceil(round(share * clients, 9))].tolist())


def _noisy(change: dict[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
    """Return an update with Gaussian noise of `NOISE` times its norm, over all leaves together."""
    noise = {path: torch.randn(leaf.shape, generator=generator, dtype=torch.float64) for path, leaf in change.items()}
    own, length = (tree.squared_norm({p: leaf.double() for p, leaf in t.items()}).sqrt() for t in (change, noise))
    scale = NOISE * float(own) / float(length)
    return {path: leaf + (scale * noise[path]).to(leaf) for path, leaf in change.items()}
