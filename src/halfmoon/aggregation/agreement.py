"""Who points against the others: the clients that the rule "cosine" leaves out.

A client has two scores, and is outside where one of them is negative and more than `SPREADS` median deviations under
the cohort's:

- the median of its cosines with the others of the round;
- its cosine with where the others, and all who were inside in earlier rounds, go together; each round counts `HISTORY`
  times the one after it. Sites with few labels have different classes, and so point in a few directions, in groups: an
  update with its sign turned looks like one of another group's, until what the sites learned before is looked at.

Where the cohort's median is under `ALIKE`, a client is outside from `AGAINST` under it. Parameters, statistics and
auxiliary sums are compared apart; of fewer than `LEAST` clients nobody is outside. The history is a direction for each
client update and part in the server's state store.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from halfmoon.aggregation.base import AggregationContext, along
from halfmoon.api.uploads import Upload
from halfmoon.core import tree

CHUNK = 2**18
"""Coordinates of an update that are looked at together: k x CHUNK numbers in float64 are all the memory it takes."""

LEAST, SPREADS, LONG = 4, 3.0, 4.0
"""The fewest clients of whom one can be outside; how many median deviations of cosines it is away then, or how many
median lengths its sums have for each image."""

ALIKE, AGAINST = 0.02, -0.25
"""The median score from which a cohort agrees, and how far from it a client is outside where it does not: sites with
other classes than the others' point elsewhere without being hostile."""

HISTORY = 0.9
TINY = torch.finfo(torch.float64).tiny

Change = Mapping[str, Tensor]
"""The update of each client, {path: (k, ...)}."""


def outside(context: AggregationContext, upload: Upload, change: Change) -> dict[int, dict[str, Any]]:
    """Return what was measured of each client that points against the others, by its place."""
    voters = (upload.weight > 0).nonzero().flatten().tolist()
    if len(voters) < LEAST:
        return {}
    upload_spec = context.upload_spec
    aux = {name: upload.aux[name] for kind in ("sum", "mean") for name in upload_spec.names(reduce=kind)}
    sums = [leaf[voters] for leaf in tree.flatten({"aux": aux}).values() if leaf.is_floating_point()]
    outliers: dict[int, dict[str, Any]] = {}
    if sums:
        square = gram(sums)
        lengths = square.diagonal().sqrt() / upload.weight[voters].double().cpu()
        outliers = _apart("sums", agreement(square), lengths > LONG * median(lengths))
    for part, paths in groups(change, upload_spec.statistics).items():
        if paths:
            outliers = _compared(context, part, {path: change[path][voters] for path in paths}) | outliers
    return {voters[place]: {"client": context.clients[voters[place]], **facts} for place, facts in outliers.items()}


def _compared(context: AggregationContext, part: str, leaves: Change) -> dict[int, dict[str, Any]]:
    """Return who is outside by a part of the updates, by place, and add the directions of the others to its history."""
    key, count = f"direction-{context.client_update}-{part}", len(next(iter(leaves.values())))
    memory = None if context.memory is None else context.memory.get(key)
    past = {path: leaf.new_zeros(leaf.shape[1:]) for path, leaf in leaves.items()}
    past |= tree.flatten(memory or {})
    square = gram([torch.cat([leaf, past[path].to(leaf)[None]]) for path, leaf in leaves.items()])
    now = square[:count, :count]
    outliers = _apart(part, alignment(square)) | _apart(part, agreement(now))
    if context.memory is not None:
        share = 1 / now.diagonal().sqrt().clamp_min(TINY)
        share[list(outliers)] = 0
        share /= max(1, count - len(outliers))
        new = {path: HISTORY * past[path] + (along(share, leaf) * leaf).sum(0) for path, leaf in leaves.items()}
        context.memory.put(key, tree.unflatten(new))
    return outliers


def _apart(part: str, scores: Tensor, long: Tensor | None = None) -> dict[int, dict[str, Any]]:
    """Return what was measured of each client that is too far under the median score, or too long, by its place."""
    middle = median(scores)
    bound = min(0.0, float(middle - SPREADS * median((scores - middle).abs())))
    if middle <= ALIKE:
        bound = min(0.0, float(middle)) + AGAINST
    far = scores < bound if long is None else (scores < bound) | long
    others = round(float(middle), 4)
    facts = [{"part": part, "cosine": round(score, 4), "others": others} for score in scores.tolist()]
    return {place: facts[place] for place in far.nonzero().flatten().tolist()}


def agreement(square: Tensor) -> Tensor:
    """Return of each client the median of its cosines with the others (k,), from their inner products (k, k)."""
    k, norms = len(square), square.diagonal().sqrt()
    cosines = square / (norms[:, None] * norms[None, :]).clamp_min(TINY)
    others = cosines.flatten()[1:].view(k - 1, k + 1)[:, :-1].reshape(k, k - 1)
    return median(others.T)


def alignment(square: Tensor) -> Tensor:
    """Return of each client the cosine with what the others and the history, last of (k + 1, k + 1), share."""
    norms, k = square.diagonal().sqrt(), len(square) - 1
    norms[k] = 1
    inner = square / (norms[:, None] * norms[None, :]).clamp_min(TINY)
    rest = torch.cat([(1 - torch.eye(k, dtype=inner.dtype)) / (k - 1), torch.ones(k, 1, dtype=inner.dtype)], 1)
    lengths = (rest @ inner @ rest.T).diagonal().clamp_min(0).sqrt()
    return (rest @ inner).diagonal() / lengths.clamp_min(TINY)


def gram(leaves: Sequence[Tensor]) -> Tensor:
    """Return the inner products (k, k), float64, of vectors in pieces (k, ...)."""
    total = torch.zeros((len(leaves[0]), len(leaves[0])), dtype=torch.float64)
    for leaf in leaves:
        for part in leaf.flatten(1).split(CHUNK, 1):
            wide = part.double()
            total += (wide @ wide.T).cpu()
    return total


def median(leaf: Tensor) -> Tensor:
    """Return the coordinate-wise median (...) of (k, ...); of an even number the mean of the middle two."""
    ordered, k = leaf.sort(0).values, len(leaf)
    # Halves first: the sum of two large numbers may be none.
    return ordered[k // 2] if k % 2 else ordered[k // 2 - 1] / 2 + ordered[k // 2] / 2


def groups(change: Change, statistics: Sequence[str]) -> dict[str, list[str]]:
    """Return the paths of the parameters, and those of the parts that are `statistics`."""
    paths: dict[str, list[str]] = {"parameters": [], "statistics": []}
    for path in change:
        paths["statistics" if path.split("/")[0] in statistics else "parameters"].append(path)
    return paths
