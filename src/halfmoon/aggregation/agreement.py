"""Outlier detection for the rule "cosine": find clients whose updates point away from the rest of the cohort.

A client has two scores. It is an outlier if one of them is negative and more than `MAX_DEVIATIONS` median absolute
deviations below the cohort's median:

- agreement: the median of the cosines between its update and each other update of the round;
- alignment: the cosine between its update and the sum of a history and the mean direction of all other clients. The
  history is the exponentially decaying sum of the mean directions of earlier rounds without outliers. It is needed
  because sites with few labels have different classes and form groups with different directions: in a single round, an
  update with its sign flipped resembles one of another group.

If the cohort's median is below `MIN_AGREEMENT`, a client is an outlier from `DISAGREEMENT_MARGIN` below the median.
Parameters, statistics and auxiliary sums are compared separately. Cohorts of fewer than `MIN_CLIENTS` have no outliers.
The server's state store contains one history for each client update and group of leaves.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from halfmoon.aggregation.base import AggregationContext, align_with_leaf
from halfmoon.api.uploads import Upload
from halfmoon.core import tree

CHUNK = 2**18
"""Coordinates of an update that are processed at once, which limits the memory to k x CHUNK numbers in float64."""

MIN_CLIENTS = 4
"""Fewest clients among which one can be an outlier."""

MAX_DEVIATIONS = 3.0
"""Median absolute deviations by which a score may be below the median."""

MAX_SUM_LENGTH = 4.0
"""Largest norm of a client's auxiliary sums per image, in multiples of the cohort's median."""

MIN_AGREEMENT = 0.02
"""Median score from which a cohort agrees on a direction."""

DISAGREEMENT_MARGIN = -0.25
"""Distance of an outlier from the median score if the cohort does not agree: the updates of honest sites with different
classes point in different directions."""

HISTORY_DECAY = 0.9
"""Weight of a round in the history, relative to the round after it."""

TINY = torch.finfo(torch.float64).tiny
"""Lower bound of denominators: the smallest positive normal number."""

Change = Mapping[str, Tensor]
"""The update of each client, {path: (k, ...)}."""


def find_outliers(context: AggregationContext, upload: Upload, change: Change) -> dict[int, dict[str, Any]]:
    """Find the clients whose uploads point away from the rest, and update the history of directions.

    Three groups of values are compared separately, by the cosines between clients: auxiliary sums (values besides the
    update that methods add up or average), parameters, and statistics such as batch norm's running means.

    Args:
        context: The query and its k clients; the history is in its memory.
        upload: The uploads, leaves (k, ...). Clients of weight 0 have no data and are not compared.
        change: The updates (uploaded minus downloaded values) by path, (k, ...).

    Returns:
        The metrics of each outlier, by its index among the k clients: its number and those of `_low_scores`.
    """
    voters = (upload.weight > 0).nonzero().flatten().tolist()
    if len(voters) < MIN_CLIENTS:
        return {}
    upload_spec = context.upload_spec
    aux = {name: upload.aux[name] for kind in ("sum", "mean") for name in upload_spec.names(reduce=kind)}
    sums = [leaf[voters] for leaf in tree.flatten({"aux": aux}).values() if leaf.is_floating_point()]
    outliers: dict[int, dict[str, Any]] = {}  # by the index among the voters
    if sums:
        inner_products = compute_inner_products(sums)
        # A direction has no length: a sum that is too large for its number of images is detected separately.
        norms = inner_products.diagonal().sqrt()
        norms_per_image = norms / upload.weight[voters].double().cpu()
        too_long = norms_per_image > MAX_SUM_LENGTH * median(norms_per_image)
        outliers = _low_scores("sums", compute_agreement_scores(inner_products), too_long)
    for group, paths in split_paths(change, upload_spec.statistics).items():
        if paths:
            voter_leaves = {path: change[path][voters] for path in paths}
            # If a client is an outlier in several groups, its metrics are those of the first.
            outliers = _compare_directions(context, group, voter_leaves) | outliers
    return {voters[index]: {"client": context.clients[voters[index]], **metrics} for index, metrics in outliers.items()}


def _compare_directions(context: AggregationContext, group: str, leaves: Change) -> dict[int, dict[str, Any]]:
    """Find the clients whose update in one group of leaves points away from the other clients'.

    Each client has two scores: its median cosine with the other updates of this round, and its cosine with a reference
    that contains the history of mean directions. The history is needed because sites with different classes form
    groups: in one round, an update with its sign flipped resembles one of another group. The mean direction of the
    clients that are no outliers is then added to the history, in `context.memory`.

    Args:
        context: The query and its clients.
        group: "parameters" or "statistics".
        leaves: The updates of this group by path, (k, ...), of the k clients to compare.

    Returns:
        The metrics of each outlier, by its index among these k.
    """
    key = f"direction-{context.client_update}-{group}"
    count = len(next(iter(leaves.values())))
    memory = None if context.memory is None else context.memory.get(key)
    history = {path: leaf.new_zeros(leaf.shape[1:]) for path, leaf in leaves.items()}
    history |= tree.flatten(memory or {})
    # The history is one more row, after the clients: one pass computes all inner products.
    inner_products = compute_inner_products(
        [torch.cat([leaf, history[path].to(leaf)[None]]) for path, leaf in leaves.items()]
    )
    between_clients = inner_products[:count, :count]
    misaligned = _low_scores(group, compute_alignment_scores(inner_products))
    disagreeing = _low_scores(group, compute_agreement_scores(between_clients))
    outliers = misaligned | disagreeing  # one low score is enough
    if context.memory is not None:
        # The mean of unit vectors without outliers: each client counts the same, however long its update is.
        norms = between_clients.diagonal().sqrt()
        factors = 1 / norms.clamp_min(TINY)
        factors[list(outliers)] = 0
        factors /= max(1, count - len(outliers))
        new_history: dict[str, Tensor] = {}
        for path, leaf in leaves.items():
            mean_direction = (align_with_leaf(factors, leaf) * leaf).sum(0)
            new_history[path] = HISTORY_DECAY * history[path] + mean_direction
        context.memory.put(key, tree.unflatten(new_history))
    return outliers


def _low_scores(group: str, scores: Tensor, too_long: Tensor | None = None) -> dict[int, dict[str, Any]]:
    """Select the clients with a low score: a cosine between a client's update and the direction of the others.

    The threshold is `MAX_DEVIATIONS` median absolute deviations below the cohort's median. If the median is close to 0
    the cohort has no common direction, and the deviations are not informative; the threshold is then a fixed distance
    below the median. It is never above 0: an update with a positive cosine still helps the others, however well they
    agree.

    Args:
        group: The group of leaves that was compared, for the metrics.
        scores: The clients' cosines, (k,).
        too_long: Further clients to select, whose values are too large, (k,) bool.

    Returns:
        The metrics of each by index: the group ("part"), the score ("cosine") and the cohort's median ("others").
    """
    cohort_median = median(scores)
    if cohort_median <= MIN_AGREEMENT:
        threshold = min(0.0, float(cohort_median)) + DISAGREEMENT_MARGIN  # the margin is negative
    else:
        deviation = median((scores - cohort_median).abs())
        threshold = min(0.0, float(cohort_median - MAX_DEVIATIONS * deviation))
    is_outlier = scores < threshold
    if too_long is not None:
        is_outlier |= too_long
    rounded_median = round(float(cohort_median), 4)
    rounded_scores = [round(score, 4) for score in scores.tolist()]
    return {
        index: {"part": group, "cosine": rounded_scores[index], "others": rounded_median}
        for index in is_outlier.nonzero().flatten().tolist()
    }


def compute_agreement_scores(inner_products: Tensor) -> Tensor:
    """Compute the median cosine between each client's update and those of all other clients.

    Args:
        inner_products: Inner products of the k updates, (k, k).

    Returns:
        (k,).
    """
    k = len(inner_products)
    norms = inner_products.diagonal().sqrt()
    cosines = inner_products / (norms[:, None] * norms[None, :]).clamp_min(TINY)
    # Remove the diagonal: it consists of every (k + 1)-th element. Without the first element, k - 1 rows of k + 1 remain,
    # each of which ends with an element of the diagonal.
    without_self = cosines.flatten()[1:].view(k - 1, k + 1)[:, :-1].reshape(k, k - 1)
    return median(without_self.T)


def compute_alignment_scores(inner_products: Tensor) -> Tensor:
    """Compute the cosine between each client's update and a reference direction.

    A client's reference is the sum of the history (a decaying sum of the mean directions of earlier rounds) and the
    mean direction of all other clients. The client itself is left out, so that it cannot vote for itself.

    Args:
        inner_products: Inner products of the k updates and, last, the history, (k + 1, k + 1).

    Returns:
        (k,).
    """
    k = len(inner_products) - 1
    norms = inner_products.diagonal().sqrt()
    # Updates become unit vectors, but the history is not divided by its norm: it is long, and so outweighs this round,
    # only if the directions of the earlier rounds were similar.
    norms[k] = 1
    products = inner_products / (norms[:, None] * norms[None, :]).clamp_min(TINY)
    # The reference of client i is r_i = sum_j c_ij v_j over the unit vectors v_0 to v_{k-1} and the history v_k, with
    # c_ij = 1 / (k - 1) for each other client, 0 for itself, and 1 for the history.
    client_coefficients = (1 - torch.eye(k, dtype=products.dtype)) / (k - 1)
    coefficients = torch.cat([client_coefficients, torch.ones(k, 1, dtype=products.dtype)], 1)
    # With P the inner products of the vectors v, <r_i, v_i> = (c P)_ii and |r_i|^2 = (c P c^T)_ii.
    dot_products = (coefficients @ products).diagonal()
    squared_norms = (coefficients @ products @ coefficients.T).diagonal()
    return dot_products / squared_norms.clamp_min(0).sqrt().clamp_min(TINY)


def compute_inner_products(leaves: Sequence[Tensor]) -> Tensor:
    """Compute the inner products (k, k), in float64, of k vectors that are divided into leaves (k, ...)."""
    total = torch.zeros((len(leaves[0]), len(leaves[0])), dtype=torch.float64)
    # In chunks of coordinates, as a float64 copy of all updates would need too much memory.
    for leaf in leaves:
        for columns in leaf.flatten(1).split(CHUNK, 1):
            columns_float64 = columns.double()
            total += (columns_float64 @ columns_float64.T).cpu()
    return total


def median(leaf: Tensor) -> Tensor:
    """Compute the coordinate-wise median (...) of (k, ...): the mean of the middle two values if k is even."""
    ordered = leaf.sort(0).values
    k = len(leaf)
    if k % 2:
        return ordered[k // 2]
    # Halve before adding: the sum of two large numbers may overflow.
    return ordered[k // 2 - 1] / 2 + ordered[k // 2] / 2


def split_paths(change: Change, statistics: Sequence[str]) -> dict[str, list[str]]:
    """Divide the paths of an update into "parameters" and "statistics" (such as batch norm's running means).

    Args:
        change: The updates.
        statistics: The first components of the paths that are statistics.
    """
    paths: dict[str, list[str]] = {"parameters": [], "statistics": []}
    for path in change:
        paths["statistics" if path.split("/")[0] in statistics else "parameters"].append(path)
    return paths
