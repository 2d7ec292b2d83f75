"""How a model does on test and validation images that only the sites have: what each counted, added up."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from halfmoon.aggregation.weights import caps
from halfmoon.core.tree import Tree
from halfmoon.engine.evaluation import Tally


@dataclass
class FederatedEvaluation:
    """The sum of what sites said of one model; none counts more than `cap` times the median number of test images.

    Nobody sees a site's test images: one that claims 10^9 of them would be the accuracy. 0 caps nothing.
    """

    cap: float = 0.0
    said: list[tuple[Tensor, float]] = field(default_factory=list)

    @property
    def sites(self) -> int:
        """Return how many sites have said something."""
        return len(self.said)

    def add(self, said: object, classes: int, tests: int) -> bool:
        """Add what a site said (`halfmoon.federation.protocol.messages.Reply`), and return whether that can be.

        It told of `tests` test images, each of one of the classes.
        """
        if not isinstance(said, dict):
            return False
        told = cast(Tree, said)
        cells, loss = told.get("confusion"), told.get("loss")
        if not isinstance(cells, Tensor) or not isinstance(loss, Tensor):
            return False
        if cells.shape != (classes, classes) or cells.dtype != torch.int64 or loss.shape != ():
            return False
        if int(cells.min()) < 0 or int(cells.sum()) != tests or not tests or not bool(loss.isfinite()):
            return False
        self.said.append((cells.clone(), float(loss)))
        return True

    def tally(self) -> Tally | None:
        """Return the sum, None where nothing was added; a site over the cap has each cell scaled down."""
        if not self.said:
            return None
        counts = [int(cells.sum()) for cells, _ in self.said]
        limits = caps([float(count) for count in counts], self.cap)
        total, loss = torch.zeros_like(self.said[0][0]), 0.0
        for (cells, mean), count, limit in zip(self.said, counts, limits, strict=True):
            if count > limit:
                cells = (cells.double() * (limit / count)).floor().to(torch.int64)
            total = total + cells
            loss += mean * int(cells.sum())
        return Tally(total, loss / max(1, int(total.sum())))

    def row(self, round: int) -> dict[str, Any] | None:
        """Return {"round", "sites", "accuracy", "loss", "per_class"} of the model of a round, None for nothing."""
        said = self.tally()
        return None if said is None else {"round": round, "sites": self.sites, **said.row()}


class Evaluations(NamedTuple):
    """What sites say of one model: of their test images, and of those that choose the round."""

    tests: FederatedEvaluation
    validations: FederatedEvaluation

    @classmethod
    def capped(cls, cap: float) -> Evaluations:
        """Return two empty ones with this cap."""
        return cls(FederatedEvaluation(cap), FederatedEvaluation(cap))
