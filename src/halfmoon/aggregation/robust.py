"""Robust aggregation: limit the influence of hostile or broken clients before a method averages uploads.

The rules look at `update`: what clients changed of what they were sent. "clip" scales each update down to at most the
cohort's median norm: norm bounding (Sun et al. 2019, "Can you really backdoor federated learning?"), with a bound that
is taken anew from each cohort. "median" and "trimmed" are the coordinate-wise median and trimmed mean (Yin et al.
2018), "krum" is the one update that is nearest to its neighbors (Blanchard et al. 2017). The last three give every
client the one aggregate, so that a method's weights have no say: they are unweighted, as published. "cosine" leaves
out who points against the others (`halfmoon.aggregation.agreement`), and scales down the rest to `ROOM` times the
median norm: closer, and honest updates that are a little longer lose what they learned.

Two kinds of clients have no part in a rule: those whose upload is not finite, who are left out altogether, and those
who weigh 0, because they had nothing to learn from and sent back what they got.

What an upload holds beside an update:

- Counts of rows ("weight") stay each client's own. They have a say under "clip" alone.
- FedDB's mean predictions ("appu") stay too: under "clip" they decide the weights as always, under the others they
  cannot, and its debiased averaging has no effect. "cosine" also compares auxiliary sums and means.
- FedRGD averages its groups as always; under the rules that make one aggregate, all groups move by the same.
- FedMatch, SemiFed and HeteroFL need single clients' models: only "clip" and "cosine" can stand before them. SemiFL
  and HeteroFL also count statistics in a query of their own (`methods.static`), which is no update, so that no rule
  would look at it: none can stand before them where clients count such statistics
  (`halfmoon.api.method_entry.MethodEntry.robust_rule_conflict`).
"""

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from halfmoon.aggregation.agreement import Change, gram, groups, median, outside
from halfmoon.aggregation.base import AggregationContext, Aggregator, along, changed, mixed, update
from halfmoon.api.uploads import Upload
from halfmoon.core import tree
from halfmoon.core.errors import UserError

Rule = Literal["clip", "cosine", "median", "trimmed", "krum"]

ROOM = 1.5
"""How many median norms "cosine" leaves of an update."""


class Robust(Aggregator):
    """An aggregator that lets a cohort's uploads through as `rule` leaves them.

    `byzantine` is the share of hostile clients that "trimmed" and "krum" expect. Its row says what was clipped, trimmed
    or chosen in the round's last update, of how many that were counted, and whose upload was not finite.
    """

    def __init__(self, rule: Rule, byzantine: float) -> None:
        self.rule, self.byzantine = rule, byzantine
        self._row: dict[str, Any] = {}

    def uploads(self, context: AggregationContext, upload: Upload) -> tuple[Sequence[int], Upload]:
        """Return the places of the finite uploads, and these as the rule leaves them."""
        change = update(upload, context)
        # A finite upload may be so far away that the difference is not.
        places = finite([*tree.leaves(upload.tree), *change.values()])
        lost = [client for place, client in enumerate(context.clients) if place not in places]
        if lost:
            self._row["not_finite"] = sorted({*self._row.get("not_finite", ()), *lost})
            context, upload, change = only(places, context, upload, change)
        if self.rule == "cosine":
            outliers = outside(context, upload, change)
            inside = [place for place in range(len(places)) if place not in outliers]
            if outliers:
                self._row["outside"] = [*self._row.get("outside", ()), *outliers.values()]
                context, upload, change = only(inside, context, upload, change)
                places = [places[place] for place in inside]
        voters = (upload.weight > 0).nonzero().flatten().tolist()
        if change and voters:
            upload, measures = self._ruled(context, upload, change, voters)
            self._row |= measures
        return places, upload

    def row(self) -> dict[str, Any]:
        row, self._row = self._row, {}
        return row

    def _ruled(
        self, context: AggregationContext, upload: Upload, change: Change, voters: list[int]
    ) -> tuple[Upload, dict[str, Any]]:
        if self.rule in ("clip", "cosine"):
            return clipped(context, upload, change, voters, 1.0 if self.rule == "clip" else ROOM)
        mine = {path: leaf[voters] for path, leaf in change.items()}
        if self.rule == "krum":
            hostile = tolerated(len(voters), self.byzantine)
            place = krum(mine, hostile, context.upload_spec.statistics)
            new = {path: leaf[place] for path, leaf in mine.items()}
            return changed(upload, context, new), {"chosen": context.clients[voters[place]], "expected": hostile}
        if self.rule == "median":
            return changed(upload, context, {path: median(leaf) for path, leaf in mine.items()}), {
                "counted": len(voters)
            }
        cut = share(self.byzantine, len(voters))
        new = {path: trimmed(leaf, cut) for path, leaf in mine.items()}
        return changed(upload, context, new), {"trimmed": 2 * cut, "counted": len(voters)}


class Finite(Aggregator):
    """An aggregator before a plain mean: an upload that is not finite ends the run, in place of all that was learned.

    `robust` says whether a robust rule could stand here instead: not where masks or noise follow.
    """

    def __init__(self, robust: bool = True) -> None:
        self.robust = robust

    def uploads(self, context: AggregationContext, upload: Upload) -> tuple[Sequence[int], Upload]:
        """Return everything as it is; raise UserError where an upload is not finite."""
        places = finite(list(tree.leaves(upload.tree)))
        lost = [client for place, client in enumerate(context.clients) if place not in places]
        if lost:
            advice = "leave it out with --aggregation cosine, clip, median, trimmed or krum"
            if not self.robust:
                advice = (
                    "an aggregation that would leave it out does not go with secure_aggregation or dp_clip; play "
                    "without the attack, or without them"
                )
            raise UserError(
                f"the upload of client {lost[0]} in round {context.round + 1} ({context.client_update}) is not finite, "
                f"and in a mean it would spoil the model: {advice}."
            )
        return places, upload


def finite(leaves: Sequence[Tensor]) -> list[int]:
    """Return the places k at which every number of some leaves (k, ...) is finite."""
    good = torch.stack([leaf.flatten(1).isfinite().all(1) if leaf.dim() > 1 else leaf.isfinite() for leaf in leaves])
    return good.all(0).nonzero().flatten().tolist()


def only(
    places: Sequence[int], context: AggregationContext, upload: Upload, change: Change
) -> tuple[AggregationContext, Upload, Change]:
    """Return a question, its uploads and updates as if those at `places` alone had answered."""
    indices = list(places)
    change = {path: leaf[indices] for path, leaf in change.items()}
    return context.only(indices), upload.map(lambda leaf: leaf[indices]), change


def share(byzantine: float, count: int) -> int:
    """Return how many of `count` clients the share `byzantine` is, rounded down."""
    return math.floor(round(byzantine * count, 9))


def tolerated(count: int, byzantine: float) -> int:
    """Return how many hostile clients Krum allows for among `count`: the share, or the most for which 2f + 3 <= count.

    A configuration is refused where its whole cohort is too small; where fewer answer, Krum goes on with the most that
    it can bear, and the row of the round says so.
    """
    return max(0, min(share(byzantine, count), (count - 3) // 2))


def clipped(
    context: AggregationContext, upload: Upload, change: Change, voters: Sequence[int], room: float = 1.0
) -> tuple[Upload, dict[str, Any]]:
    """Return uploads whose updates are at most `room` times as long as the median one, and how many were longer.

    Parameters and statistics have norms and medians of their own; both medians are those of `voters`, and of an even
    number the mean of the middle two. An update that is no longer than that keeps its bits.
    """
    long = torch.zeros(len(context.clients), dtype=torch.bool)
    medians: dict[str, float] = {}
    for name, paths in groups(change, context.upload_spec.statistics).items():
        if paths:
            norms = _norms(change, paths)
            middle = median(norms[list(voters)])
            medians[name], bound = float(middle), room * middle
            over, scale = norms > bound, bound / norms
            long |= over
            shorter = {path: change[path] * along(scale, change[path]) for path in paths}
            upload = mixed(over, changed(upload, context, shorter), upload)
    return upload, {"clipped": int(long.sum()), "counted": len(context.clients), "median_norm": medians}


def trimmed(leaf: Tensor, cut: int) -> Tensor:
    """Return the coordinate-wise mean (...) of (k, ...) without the `cut` smallest and the `cut` largest of each."""
    return leaf.sort(0).values[cut : len(leaf) - cut].double().mean(0).to(leaf.dtype)


def krum(change: Change, hostile: int, statistics: Sequence[str] = ()) -> int:
    """Return the place of the update whose k - hostile - 2 nearest others are nearest to it; of equals, the first.

    Distances are squared Euclidean ones over the parameters; statistics do not count.
    """
    square = distances(change, statistics)
    k = len(square)
    near = max(1, k - hostile - 2) if k > 1 else 0
    # Of each row the smallest is the distance to itself, 0.
    scores = square.fill_diagonal_(-1.0).sort(1).values[:, 1 : 1 + near].sum(1)
    return int(scores.argmin())


def distances(change: Change, statistics: Sequence[str] = ()) -> Tensor:
    """Return the squared distances (k, k), float64, between the updates' parameters, from their inner products."""
    square = gram([change[path] for path in groups(change, statistics)["parameters"]])
    own = square.diagonal()
    # Of two numbers beyond what squares in float64 the difference is none: they are as far as can be.
    return (own[:, None] + own[None, :] - 2 * square).clamp_min(0.0).nan_to_num(nan=math.inf, posinf=math.inf)


def _norms(change: Change, paths: Sequence[str]) -> Tensor:
    """Return the Euclidean norms (k,) over some leaves, in float64."""
    each = [torch.linalg.vector_norm(change[path].flatten(1).double(), dim=1).cpu() for path in paths]
    return torch.linalg.vector_norm(torch.stack(each), dim=0)
