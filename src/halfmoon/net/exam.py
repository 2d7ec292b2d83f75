"""How a model does on test images that only the sites have: what each counted, added up."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from halfmoon.evaluate import Tally
from halfmoon.tree import Tree


@dataclass
class Exam:
    """The sum of what `sites` sites said of one model."""

    cells: Tensor | None = None
    loss: float = 0.0
    sites: int = 0

    def add(self, said: Tree, classes: int, tests: int) -> bool:
        """Add what a site said (`halfmoon.net.message.Reply`), and return whether that can be.

        It told of `tests` test images, each of one of the classes.
        """
        cells, loss = said.get("confusion"), said.get("loss")
        if not isinstance(cells, Tensor) or not isinstance(loss, Tensor):
            return False
        if cells.shape != (classes, classes) or cells.dtype != torch.int64 or loss.shape != ():
            return False
        if int(cells.min()) < 0 or int(cells.sum()) != tests or not tests or not bool(loss.isfinite()):
            return False
        self.cells = cells.clone() if self.cells is None else self.cells + cells
        self.loss += float(loss) * tests
        self.sites += 1
        return True

    def tally(self) -> Tally | None:
        """Return the sum, None where nothing was added."""
        return None if self.cells is None else Tally(self.cells, self.loss / int(self.cells.sum()))
