"""A model's evaluation on the test and validation images of the sites: the sum of their counts."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from halfmoon.aggregation.weights import caps
from halfmoon.engine.evaluation import Tally


@dataclass
class FederatedEvaluation:
    """The sum of the sites' results; none counts more than `cap` times the median number of test images.

    Nobody sees a site's test images: one that claims 10^9 of them would be the accuracy. 0 caps nothing.
    """

    cap: float = 0.0
    results: list[tuple[Tensor, float]] = field(default_factory=list)

    def add(self, result: object, classes: int, tests: int) -> bool:
        """Add a result (`halfmoon.federation.protocol.messages.Reply`) on `tests` images; False if it cannot be."""
        if not isinstance(result, dict):
            return False
        cells, loss = result.get("confusion"), result.get("loss")
        if not isinstance(cells, Tensor) or not isinstance(loss, Tensor):
            return False
        if cells.shape != (classes, classes) or cells.dtype != torch.int64 or loss.shape != ():
            return False
        if int(cells.min()) < 0 or int(cells.sum()) != tests or not tests or not bool(loss.isfinite()):
            return False
        self.results.append((cells.clone(), float(loss)))
        return True

    def tally(self) -> Tally | None:
        """Return the sum, None where nothing was added; a site over the cap has each cell scaled down."""
        if not self.results:
            return None
        counts = [int(cells.sum()) for cells, _ in self.results]
        limits = caps([float(count) for count in counts], self.cap)
        total, loss = torch.zeros_like(self.results[0][0]), 0.0
        for (cells, mean), count, limit in zip(self.results, counts, limits, strict=True):
            if count > limit:
                cells = (cells.double() * (limit / count)).floor().to(torch.int64)
            total = total + cells
            loss += mean * int(cells.sum())
        return Tally(total, loss / max(1, int(total.sum())))

    def row(self, round: int) -> dict[str, Any] | None:
        """Return {"round", "sites", "accuracy", "loss", "per_class"} of the model of a round, None for nothing."""
        tally = self.tally()
        return None if tally is None else {"round": round, "sites": len(self.results), **tally.row()}


class Evaluations(NamedTuple):
    """The results on test images, and on the validation images that choose the round."""

    tests: FederatedEvaluation
    validations: FederatedEvaluation

    @classmethod
    def capped(cls, cap: float) -> "Evaluations":
        return cls(FederatedEvaluation(cap), FederatedEvaluation(cap))
