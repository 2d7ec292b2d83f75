"""Robust aggregation: limit the influence of hostile or broken clients before a method averages uploads.

All rules process updates, the differences between uploaded and downloaded values:

- "clip" scales each update down to at most the cohort's median norm: norm bounding (Sun et al. 2019, "Can You Really
  Backdoor Federated Learning?"), with a bound that is computed for each cohort.
- "cosine" removes clients that point away from the rest (`halfmoon.aggregation.agreement`), and scales the remaining
  updates down to `COSINE_MAX_NORM` times the median norm. A tighter bound would shorten honest updates that are only a
  little longer.
- "cosine-nnm", the default of federations, removes the same clients as "cosine". Then it bounds how much of an update may
  be in one output unit, such as a class's row of the classifier: the largest shares of a unit are scaled down to the next
  largest one, and long updates to `COSINE_MAX_NORM` times the median norm. After that it replaces each update by the
  weighted mean of this update and its nearest others, all but the expected number of hostile clients: nearest-neighbor
  mixing (Allouah et al. 2023, "Fixing by Mixing: A Recipe for Optimal Byzantine ML under Heterogeneity"). An update that
  is far from all others is in no mean but its own. Distances are those before the bound of the norm, which would bring a
  long update nearer to the others. In each coordinate the highest and the lowest values are then clamped to the next
  value, so that this one mean cannot leave the range of the others. Last, it scales updates down as "cosine" does.
  Clamping rather than trimming: if sites have different classes, an extreme value of a coordinate is often that of the
  only client that has seen a class.
- "cosine-trimmed" removes the same clients as "cosine". Then it trims each coordinate: the lowest and the highest values
  are replaced by the mean of the values between them, weighted like the method's mean. Last, it scales updates down as
  "cosine" does. A direction over all coordinates tells little about a single one: a client that changes only one bias of
  the classifier is almost orthogonal to all other clients and passes "cosine", but neither the trimming nor the bounds
  of "cosine-nnm". Unlike "trimmed", both retain weights: a client with more images still counts more.
- "median" and "trimmed" are the coordinate-wise median and trimmed mean (Yin et al. 2018, Definitions 1 and 2).
- "krum" selects the one update that is closest to its neighbors (Blanchard et al. 2017, "Machine Learning with
  Adversaries: Byzantine Tolerant Gradient Descent", Section 4).

"median", "trimmed" and "krum" give every client the same aggregate, so that a method's weights have no effect: they are
unweighted, as published.

Two kinds of clients do not take part in a rule: clients whose upload is not finite, which are removed, and clients of
weight 0, which had no data and returned what they received.

Values other than an update:

- Image counts ("weight") remain each client's. They matter under "clip", "cosine", "cosine-trimmed" and
  "cosine-nnm" only.
- FedDB's mean predictions ("appu") remain too. Under "clip" they determine the weights as usual; if all clients have the
  same aggregate, FedDB's debiased averaging has no effect. The rules with "cosine" in their names also compare
  auxiliary sums and means.
- FedRGD averages its groups as usual; with a single aggregate, all groups change by the same amount.
- FedMatch, SemiFed and HeteroFL need the models of single clients: only "clip" and "cosine" are possible. SemiFL
  and HeteroFL also compute statistics in a separate query (`methods.static`), which is no update and would pass
  unchecked: no rule is possible if clients compute such statistics
  (`halfmoon.api.method_entry.MethodEntry.robust_rule_conflict`).
"""

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from halfmoon.aggregation.agreement import (
    MIN_CLIENTS,
    Change,
    compute_inner_products,
    find_outliers,
    median,
    split_paths,
)
from halfmoon.aggregation.base import (
    AggregationContext,
    Aggregator,
    align_with_leaf,
    compute_update,
    replace_update,
    select_uploads,
)
from halfmoon.api.uploads import Upload
from halfmoon.core import tree
from halfmoon.core.errors import UserError

Rule = Literal["clip", "cosine", "cosine-nnm", "cosine-trimmed", "median", "trimmed", "krum"]

MIXED_COLUMNS = 2**11
"""Coordinates that `mix_nearest` averages at once. It reads each of them k times, which is ten times as fast with 100
clients if k x MIXED_COLUMNS numbers in float64 fit in the processor's cache."""

COSINE_MAX_NORM = 1.5
"""Largest norm of an update under the rules with "cosine" in their names, in multiples of the cohort's median norm."""


class RobustAggregator(Aggregator):
    """An aggregator that applies a robust rule to a cohort's uploads.

    Its metrics describe the last update of the round: the number of clients that were clipped, trimmed or chosen, the
    number that were counted, the outliers, and the clients whose upload was not finite.

    Args:
        rule: The rule.
        byzantine: The share of hostile clients that "trimmed", "cosine-trimmed", "cosine-nnm" and "krum" expect.
    """

    def __init__(self, rule: Rule, byzantine: float) -> None:
        self.rule = rule
        self.byzantine = byzantine
        self._row: dict[str, Any] = {}

    def process_uploads(self, context: AggregationContext, upload: Upload) -> tuple[Sequence[int], Upload]:
        """Apply the rule to the finite uploads of a cohort, and record the metrics of the round.

        All rules with "cosine" in their names first remove the clients whose update points away from the others'.
        "cosine-trimmed" then replaces the extreme values of each coordinate; "cosine-nnm" bounds the shares of output units,
        averages each update with its nearest neighbors and clamps the extreme values. Other rules follow in `_apply_rule`.

        Args:
            context: The query and the k clients that responded.
            upload: Their uploads, leaves (k, ...).

        Returns:
            The indices of the k' clients that are neither removed as outliers nor sent values that are not finite, and
            the uploads that the method receives, leaves (k', ...).
        """
        change = compute_update(upload, context)
        # The difference of two finite numbers may be infinite, so the updates are checked too.
        indices = find_finite_clients([*tree.leaves(upload.tree), *change.values()])
        not_finite = [client for index, client in enumerate(context.clients) if index not in indices]
        if not_finite:
            self._row["not_finite"] = sorted({*self._row.get("not_finite", ()), *not_finite})
            context, upload, change = select_clients(indices, context, upload, change)
        # Before outliers are removed: the share of hostile clients refers to the whole cohort, and an outlier that is
        # an honest client by mistake must not make the trimming weaker.
        cut = count_trimmed_values(self.byzantine, int((upload.weight > 0).sum()))
        if self.rule.startswith("cosine"):
            outliers = find_outliers(context, upload, change)
            if outliers:
                self._row["outside"] = [*self._row.get("outside", ()), *outliers.values()]
                inliers = [index for index in range(len(indices)) if index not in outliers]
                context, upload, change = select_clients(inliers, context, upload, change)
                # The outliers are indices into the finite uploads; `indices` refers to all uploads.
                indices = [indices[index] for index in inliers]
        # Clients of weight 0 had no data: they returned what they downloaded, and no rule compares them.
        voters = (upload.weight > 0).nonzero().flatten().tolist()
        if not change or not voters:
            return indices, upload
        if self.rule == "cosine-nnm":
            statistics = context.upload_spec.statistics
            limited = limit_unit_shares(change, voters, cut, statistics)
            bounded = limit_norms(limited, change, voters, statistics, COSINE_MAX_NORM) if cut else change
            change = mix_nearest(upload.weight, limited, bounded, voters, cut, statistics)
            upload = replace_update(upload, context, change)
            upload, metrics = limit_coordinates(context, upload, change, voters, cut, clamp=True)
        elif self.rule == "cosine-trimmed":
            upload, metrics = limit_coordinates(context, upload, change, voters, cut, clamp=False)
        else:
            upload, metrics = self._apply_rule(context, upload, change, voters)
        self._row |= metrics
        return indices, upload

    def row(self) -> dict[str, Any]:
        row = self._row
        self._row = {}
        return row

    def _apply_rule(
        self, context: AggregationContext, upload: Upload, change: Change, voters: list[int]
    ) -> tuple[Upload, dict[str, Any]]:
        """Apply a rule other than "cosine-trimmed" and "cosine-nnm" to the clients' updates.

        "clip" and "cosine" scale long updates down. "krum" (one selected update), "median" and "trimmed" (both for each
        coordinate) give all clients the same update, so that any mean which the method computes equals it.

        Args:
            context: The query and its k clients.
            upload: Their uploads, leaves (k, ...).
            change: Their updates by path, (k, ...).
            voters: The indices of the clients with data, which the rule compares.

        Returns:
            The uploads, and the metrics of the round.
        """
        if self.rule in ("clip", "cosine"):
            max_norm = 1.0 if self.rule == "clip" else COSINE_MAX_NORM
            return clip_to_median(context, upload, change, voters, max_norm)
        voter_change = {path: leaf[voters] for path, leaf in change.items()}
        metrics: dict[str, Any]
        if self.rule == "krum":
            hostile = count_tolerated(count=len(voters), byzantine=self.byzantine)
            selected = select_by_krum(voter_change, hostile=hostile, statistics=context.upload_spec.statistics)
            aggregate = {path: leaf[selected] for path, leaf in voter_change.items()}
            metrics = {"chosen": context.clients[voters[selected]], "expected": hostile}
        elif self.rule == "median":
            aggregate = {path: median(leaf) for path, leaf in voter_change.items()}
            metrics = {"counted": len(voters)}
        else:  # "trimmed"
            cut = expected_hostile(byzantine=self.byzantine, count=len(voters))
            aggregate = {path: compute_trimmed_mean(leaf, cut) for path, leaf in voter_change.items()}
            metrics = {"trimmed": 2 * cut, "counted": len(voters)}
        return replace_update(upload, context, aggregate), metrics


class FiniteCheck(Aggregator):
    """An aggregator before a plain mean that stops the run if an upload is not finite, before it destroys the model.

    Args:
        robust: True if the error message may recommend a robust rule, which is impossible with masks or noise.
    """

    def __init__(self, robust: bool = True) -> None:
        self.robust = robust

    def process_uploads(self, context: AggregationContext, upload: Upload) -> tuple[Sequence[int], Upload]:
        """Check, as the aggregator `FiniteCheck` in front of a plain mean, that all uploads are finite.

        A single NaN or infinity in a mean destroys the model of all clients.

        Args:
            context: The query and the k clients that responded.
            upload: Their uploads, leaves (k, ...).

        Returns:
            The indices of all k clients, and the uploads unchanged.

        Raises:
            UserError: If an upload is not finite. If `self.robust` is true the message recommends robust rules: with
                masks (secure aggregation) or noise (differential privacy) they are impossible.
        """
        finite_indices = find_finite_clients(list(tree.leaves(upload.tree)))
        not_finite = [client for index, client in enumerate(context.clients) if index not in finite_indices]
        if not_finite:
            advice = "leave it out with {aggregation=cosine-nnm}, cosine-trimmed, cosine, clip, median, trimmed or krum"
            if not self.robust:
                advice = (
                    "an aggregation that would leave it out cannot be combined with secure_aggregation or dp_clip; run "
                    "without the attack, or without them"
                )
            raise UserError(
                f"the upload of client {not_finite[0]} in round {context.round + 1} ({context.client_update}) is not "
                f"finite, and in a mean it would spoil the model: {advice}.",
                option="aggregation",
            )
        return finite_indices, upload  # these are all clients


def find_finite_clients(leaves: Sequence[Tensor]) -> list[int]:
    """Find the clients for which all values of all leaves (k, ...) are finite, and return their indices."""
    is_finite = torch.stack(
        [leaf.flatten(1).isfinite().all(1) if leaf.dim() > 1 else leaf.isfinite() for leaf in leaves]
    )
    return is_finite.all(0).nonzero().flatten().tolist()


def select_clients(
    indices: Sequence[int], context: AggregationContext, upload: Upload, change: Change
) -> tuple[AggregationContext, Upload, Change]:
    """Restrict a query, its uploads and its updates to the clients at these indices."""
    selected = list(indices)
    change = {path: leaf[selected] for path, leaf in change.items()}
    return context.only(selected), upload.map(lambda leaf: leaf[selected]), change


def expected_hostile(byzantine: float, count: int) -> int:
    """Convert a share of hostile clients to a number of `count` clients, rounded down."""
    # Round to 9 digits first, so that 0.29 * 100 = 28.999999999999996 becomes 29.
    return math.floor(round(byzantine * count, 9))


def count_tolerated(count: int, byzantine: float) -> int:
    """Compute f, the number of hostile clients that Krum assumes: a share of the cohort, as far as 2 f + 3 <= count.

    A configuration whose full cohort is too small for its share is refused earlier. If fewer clients respond in a
    round, Krum continues with the largest possible f, and the round's metrics contain it.

    Args:
        count: The number of clients that responded.
        byzantine: The expected share of hostile clients.
    """
    return max(0, min(expected_hostile(byzantine, count), (count - 3) // 2))


def clip_to_median(
    context: AggregationContext, upload: Upload, change: Change, voters: Sequence[int], max_norm: float = 1.0
) -> tuple[Upload, dict[str, Any]]:
    """Scale updates down to at most `max_norm` times the median norm; shorter updates remain unchanged, bit by bit.

    Parameters and statistics have separate norms and medians.

    Args:
        context: The query.
        upload: The uploads, leaves (k, ...).
        change: The updates by path, (k, ...).
        voters: The indices of the clients whose norms determine the medians.
        max_norm: The bound in multiples of the median.

    Returns:
        The uploads, and the metrics: the number of clipped clients, the number of all, and the median norms.
    """
    is_clipped = torch.zeros(len(context.clients), dtype=torch.bool)
    medians: dict[str, float] = {}
    for group, paths in split_paths(change, context.upload_spec.statistics).items():
        if not paths:
            continue
        norms = _norms(change, paths)
        median_norm = median(norms[list(voters)])
        medians[group] = float(median_norm)
        bound = max_norm * median_norm
        exceeds = norms > bound
        scale = bound / norms
        is_clipped |= exceeds
        scaled_down = {path: change[path] * align_with_leaf(scale, change[path]) for path in paths}
        upload = select_uploads(exceeds, replace_update(upload, context, scaled_down), upload)
    return upload, {"clipped": int(is_clipped.sum()), "counted": len(context.clients), "median_norm": medians}


def limit_coordinates(
    context: AggregationContext, upload: Upload, change: Change, voters: Sequence[int], cut: int, clamp: bool
) -> tuple[Upload, dict[str, Any]]:
    """Limit the extreme values of each coordinate, then scale long updates down to `COSINE_MAX_NORM` median norms.

    Args:
        context: The query.
        upload: The uploads, leaves (k, ...).
        change: The updates by path, (k, ...).
        voters: The indices of the clients that are compared; the updates of other clients remain unchanged.
        cut: The number of smallest values, and of largest ones, that are limited in each coordinate.
        clamp: True to clamp these values to the next value; False to replace them by the mean of the others.

    Returns:
        The uploads, and the metrics: those of `clip_to_median`, and the number of values limited in each coordinate.
    """
    # At least one value of each coordinate must remain.
    cut = min(cut, (len(voters) - 1) // 2)
    if cut:
        weight = upload.weight[voters]
        new = {path: leaf.clone() for path, leaf in change.items()}
        for path, leaf in change.items():
            values = leaf[voters]
            new[path][voters] = clamp_extremes(values, cut) if clamp else replace_extremes(values, cut, weight)
        change = new
        upload = replace_update(upload, context, change)
    upload, metrics = clip_to_median(context, upload, change, voters, COSINE_MAX_NORM)
    return upload, {"trimmed": 2 * cut, **metrics}


def limit_unit_shares(change: Change, voters: Sequence[int], cut: int, statistics: Sequence[str]) -> Change:
    """Limit how much of a client's update may be in a single output unit, by the shares of the other clients.

    An output unit is an index of a leaf's first axis: a class's row of the classifier, a filter of a convolution, an
    entry of a bias or of a statistic. Its share is the norm of its update divided by the norm of the client's whole
    update. The largest shares of each unit are scaled down to the next largest one.

    Distances and directions of whole updates tell little about a single unit. A client that sends the mean of the others,
    and reverses the row of one class, is close to all of them: it would be in every mean of `mix_nearest`, and clamping
    could not remove it from there. Shares are compared, not norms, because an honest client with many images has longer
    updates than the others in every unit.

    Args:
        change: The updates by path, (k, ...).
        voters: The indices of the clients that are compared; the updates of other clients remain unchanged.
        cut: The number of largest shares of each unit that are scaled down. 0 to change nothing.
        statistics: The first components of the paths that are statistics; parameters and statistics are separate updates.

    Returns:
        The new updates, {path: (k, ...)}. Units with smaller shares remain unchanged, bit by bit.
    """
    # At least one share of each unit must remain.
    cut = min(cut, (len(voters) - 1) // 2)
    if not cut:
        return change
    rows = list(voters)
    new = {path: leaf.clone() for path, leaf in change.items()}
    for paths in split_paths(change, statistics).values():
        # In float64, so that squares of large values stay finite.
        squares = {path: _by_unit(change[path][rows]).double().square().sum(2) for path in paths}
        total = sum((leaf.sum(1) for leaf in squares.values()), torch.zeros(())).sqrt()
        for path, leaf in squares.items():
            shares = torch.where(total[:, None] > 0, leaf.sqrt() / total[:, None], 0.0)
            bound = shares.sort(dim=0).values[len(rows) - 1 - cut]
            scale = torch.where(shares > bound, bound / shares, 1.0)
            values = change[path][rows]
            new[path][rows] = (_by_unit(values) * scale[:, :, None].to(values.dtype)).reshape(values.shape)
    return new


def _by_unit(leaf: Tensor) -> Tensor:
    """Reshape a leaf (k, units, ...) to (k, units, n); a leaf (k,) has one unit."""
    units = leaf.shape[1] if leaf.dim() > 1 else 1
    return leaf.reshape(len(leaf), units, -1)


def limit_norms(
    limited: Change, change: Change, voters: Sequence[int], statistics: Sequence[str], max_norm: float
) -> Change:
    """Scale updates whose output units are limited by the factors that bound the norms of the updates as they were sent.

    A share is relative to its update: the share that other clients have in one unit is still a long row in an update of
    nine median norms. The norm of what remains of such an update tells nothing, because most of it may have been removed.

    Args:
        limited: The updates to scale, by path, (k, ...).
        change: The updates as they were sent, whose norms are bounded.
        voters: The indices of the clients whose norms determine the medians.
        statistics: The first components of the paths that are statistics, which have separate norms and medians.
        max_norm: The bound in multiples of the median.

    Returns:
        The new updates, {path: (k, ...)}. Those within the bound remain unchanged, bit by bit.
    """
    new = dict(limited)
    for paths in split_paths(change, statistics).values():
        if paths:
            norms = _norms(change, paths)
            bound = max_norm * median(norms[list(voters)])
            scale = torch.where(norms > bound, bound / norms, 1.0)
            new |= {path: limited[path] * align_with_leaf(scale, limited[path]) for path in paths}
    return new


def mix_nearest(
    weight: Tensor,
    change: Change,
    bounded: Change,
    voters: Sequence[int],
    hostile: int,
    statistics: Sequence[str],
) -> Change:
    """Replace each update by the weighted mean of itself and its nearest others: nearest-neighbor mixing.

    Distances are Euclidean. Parameters and statistics have separate neighbors.

    Args:
        weight: The weights (k,) of the clients.
        change: The updates whose distances determine the neighbors.
        bounded: The updates that are averaged.
        voters: The indices of the clients that are compared; the updates of all others remain unchanged.
        hostile: f, the number of hostile clients to expect: the f updates that are farthest from an update are not in
            its mean. 0 for no mixing.
        statistics: The first components of the paths that are statistics.

    Returns:
        The new updates, {path: (k, ...)}.
    """
    hostile = min(hostile, (len(voters) - 1) // 2)
    if not hostile:
        return bounded
    rows = list(voters)
    voter_weight = weight[rows].double().cpu()
    new = {path: leaf.clone() for path, leaf in bounded.items()}
    for paths in split_paths(change, statistics).values():
        if not paths:
            continue
        squared = compute_squared_distances({path: change[path][rows] for path in paths})
        # -1 puts each update first in its sorted row. Equal distances are in the order of the clients.
        order = squared.fill_diagonal_(-1.0).sort(dim=1, stable=True).indices
        share = torch.zeros_like(squared)
        share.scatter_(1, order[:, : len(rows) - hostile], 1.0)
        share *= voter_weight
        share /= share.sum(1, keepdim=True)
        for path in paths:
            leaf = bounded[path][rows]
            columns = [_average_rows(part, share.to(leaf.device)) for part in leaf.flatten(1).split(MIXED_COLUMNS, 1)]
            new[path][rows] = torch.cat(columns, 1).reshape(leaf.shape)
    return new


def _average_rows(leaf: Tensor, share: Tensor) -> Tensor:
    """Compute the averages (k, n) of the rows of a leaf (k, n) with the shares (k, k), in float64.

    Rows are added one after the other, because the bits of a matrix product, and of a sum over an axis, may depend on
    the number of threads and of columns.
    """
    total = leaf.new_zeros(leaf.shape, dtype=torch.float64)
    for column, row in zip(share.T, leaf.double(), strict=True):
        total += column[:, None] * row
    return total.to(leaf.dtype)


def count_trimmed_values(byzantine: float, count: int) -> int:
    """Compute how many of the smallest, and of the largest, values "cosine-trimmed" replaces and "cosine-nnm" clamps.

    "cosine-nnm" also bounds so many of the largest shares of each output unit, and leaves so many of the farthest updates
    out of each mean. This is the expected number of hostile clients, and 1 or more: of four clients a fifth is less than
    one client. Cohorts that are too small for outliers are not trimmed either.

    Args:
        byzantine: The expected share of hostile clients.
        count: The number of clients.
    """
    if not byzantine or count < MIN_CLIENTS:
        return 0
    return max(1, expected_hostile(byzantine, count))


def clamp_extremes(leaf: Tensor, cut: int) -> Tensor:
    """Clamp the smallest and largest values of each coordinate to the nearest of the values between them.

    Statistics calls this winsorizing.

    Args:
        leaf: The values of k clients, (k, ...).
        cut: The number of smallest values, and of largest ones, to clamp: 1 or more, and below k / 2.

    Returns:
        The new values (k, ...).
    """
    ordered = leaf.sort(dim=0).values
    return leaf.clamp(min=ordered[cut], max=ordered[len(leaf) - 1 - cut])


def replace_extremes(leaf: Tensor, cut: int, weight: Tensor) -> Tensor:
    """Replace the smallest and largest values of each coordinate by the weighted mean of the values between them.

    The weighted mean of the result is the weighted trimmed mean. Of equal values those with the smallest weights are
    replaced, so that the order of the clients does not matter.

    Args:
        leaf: The values of k clients, (k, ...).
        cut: The number of smallest values, and of largest ones, to replace: 1 or more, and below k / 2.
        weight: The weights (k,) of the means.

    Returns:
        The new values (k, ...).
    """
    by_weight = weight.to(leaf.device).argsort(stable=True)
    sorted_by_weight = leaf[by_weight]
    is_extreme = torch.zeros_like(leaf, dtype=torch.bool)
    for values in (sorted_by_weight, -sorted_by_weight):
        smallest = values.sort(dim=0, stable=True).indices[:cut]
        is_extreme.scatter_(0, by_weight[smallest], True)
    inner_weight = torch.where(is_extreme, 0.0, align_with_leaf(weight.double(), leaf.double()))
    # Divide the weights first: the product of a large value and a large count may overflow.
    mean = (leaf.double() * (inner_weight / inner_weight.sum(0))).sum(0).to(leaf.dtype)
    return torch.where(is_extreme, mean, leaf)


def compute_trimmed_mean(leaf: Tensor, cut: int) -> Tensor:
    """Compute the coordinate-wise mean (...) of (k, ...) without the `cut` smallest and `cut` largest values."""
    return leaf.sort(0).values[cut : len(leaf) - cut].double().mean(0).to(leaf.dtype)


def select_by_krum(change: Change, hostile: int, statistics: Sequence[str] = ()) -> int:
    """Select one update by Krum: that with the smallest sum of squared distances to its k - f - 2 nearest neighbors.

    Blanchard et al. 2017, "Machine Learning with Adversaries: Byzantine Tolerant Gradient Descent", Section 4.

    Args:
        change: The updates of k clients by path, (k, ...); distances are Euclidean, over the parameters.
        hostile: f, the number of hostile clients to expect.
        statistics: The first components of the paths that are statistics, which distances ignore.

    Returns:
        The index of the selected client; the first of several with equal sums.
    """
    squared = compute_squared_distances(change, statistics)
    k = len(squared)
    neighbors = max(1, k - hostile - 2) if k > 1 else 0
    # -1 puts each update's distance to itself first in its sorted row, where the slice skips it.
    scores = squared.fill_diagonal_(-1.0).sort(1).values[:, 1 : 1 + neighbors].sum(1)
    return int(scores.argmin())


def compute_squared_distances(change: Change, statistics: Sequence[str] = ()) -> Tensor:
    """Compute the squared distances (k, k), in float64, between the updates without the sections `statistics`."""
    # |a - b|^2 = |a|^2 + |b|^2 - 2 a.b needs (k, k) numbers only, not (k, k, n). Rounding may make it negative.
    inner_products = compute_inner_products([change[path] for path in split_paths(change, statistics)["parameters"]])
    squared_norms = inner_products.diagonal()
    squared = squared_norms[:, None] + squared_norms[None, :] - 2 * inner_products
    # Norms whose squares overflow float64 give inf - inf = NaN: treat these distances as infinite.
    return squared.clamp_min(0.0).nan_to_num(nan=math.inf, posinf=math.inf)


def _norms(change: Change, paths: Sequence[str]) -> Tensor:
    """Compute the Euclidean norm (k,) of each client's update over some leaves, in float64."""
    leaf_norms = [torch.linalg.vector_norm(change[path].flatten(1).double(), dim=1).cpu() for path in paths]
    return torch.linalg.vector_norm(torch.stack(leaf_norms), dim=0)
