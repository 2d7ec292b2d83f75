"""Static batch normalization (HeteroFL, ICLR 2021; SemiFL, NeurIPS 2022): statistics are counted, not tracked.

Networks train on batch statistics alone and send none. When a model is to label or to be evaluated, its rows are looked
at once more, un-augmented and without a step, and the mean and the unbiased variance of every batch are averaged; the
variance between batches is no part of it, as in the authors' code.

Departure: their code passes the pooled images of all holders through one sequence of batches of 250, each counting the
same, the cut last one too. Rows do not leave their holders here, so a batch holds rows of one client, cut into nearly
equal parts of at most 250; it counts by its rows, or a client of twelve images would weigh as much as one of 250.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch

from halfmoon import tree
from halfmoon.errors import UserError
from halfmoon.objectives.base import chunks
from halfmoon.tree import Tree
from halfmoon.types import Federation, Local, Passes, Work

Over = Literal["all", "cohort", "server"]
"""Whose rows are counted beside the server's: those of all registered clients, of the round's cohort, or nobody's."""


@dataclass(frozen=True)
class Census(Work):
    """Look once at all rows, labeled and unlabeled, and send the sum over rows of their batches' moments.

    down: params.  up: moments (as stats, summed over rows), rows ().  Nothing is remembered.
    """

    @property
    def trains(self) -> bool:
        """Return that it takes no steps."""
        return False

    @property
    def whole(self) -> bool:
        """Return that it looks at all rows together."""
        return True

    @torch.no_grad()
    def begin(self, down: Tree, memory: Tree, data: Local) -> Tree:
        """Pass all rows through the received network."""
        images = torch.cat([data.x, data.u])
        if not len(images):
            like = {name: part["norm"]["bias"] for name, part in down["params"].items() if "norm" in part}
            return {"moments": {n: {"mean": torch.zeros_like(b), "var": torch.zeros_like(b)} for n, b in like.items()}}
        total: Tree = {}
        for part in chunks(images):
            rows, moments = len(part), self.task.network.train(down["params"], self.task.normalize(part))[1]
            total = total or tree.zeros_like(moments)
            total = tree.map(partial(torch.add, alpha=rows), total, moments)
        return {"moments": total}

    def finish(self, down: Tree, carry: Tree, data: Local) -> tuple[Tree, Tree]:
        """Send the sums and the number of rows."""
        return {"moments": carry["moments"], "rows": (data.labeled + data.unlabeled).double()}, {}

    def passes(self, labeled: int, unlabeled: int) -> Passes:
        """Count a step's images: there are no steps."""
        return Passes(0, 0)

    def swept(self, labeled: int, unlabeled: int) -> int:
        """Count all rows once."""
        return labeled + unlabeled


def estimate(federation: Federation, server: Tree, over: Over, serving: bool = True) -> Tree:
    """Return new statistics for the model `server`["params"]: the mean moments over the rows that `over` names.

    The work "census" has to be the method's `Census`. `serving` adds the server's own rows. Clients are asked a
    cohort's number at a time: a device holds no more of them than in training. A network without statistics costs
    nothing; raises `UserError` where nobody who is asked has a row.
    """
    if not server.get("stats"):
        return {}
    down = {"params": server["params"]}
    asked = {
        "all": torch.arange(federation.clients).split(max(1, len(federation.cohort))),
        "cohort": (federation.cohort,),
        "server": (),
    }[over]
    counts = [up for clients in asked if (up := federation.ask("census", down, to=clients))]
    if serving and federation.labeled:
        counts.append(tree.map(lambda leaf: leaf[None], federation.ask_server("census", down)))
    rows = sum(float(each["rows"].sum()) for each in counts)
    if not rows:
        raise UserError(
            f"static batch normalization over '{over}' finds no image to look at: the server has none; set sbn to "
            "'all' or 'cohort'."
        )
    sums = [tree.map(lambda leaf: leaf.sum(0), each["moments"]) for each in counts]
    return tree.map(lambda *leaves: torch.stack(leaves).sum(0) / rows, *sums)
