"""Heads on frozen features that are solved from sums: they do not depend on who holds which images.

Of an image's features f (F,), none negative, q = sqrt(f) and h = (q - m) / |q - m| with m the mean q of all images.

RidgeHead (AFL, CVPR 2025; Fed3R, ICML 2024): ridge regression of one-hot labels on h, from sums over labeled images.
MixtureHead: ten rounds of EM follow. Clients send sums over their unlabeled images, weighted by soft labels; the server
fits Gaussians of one covariance in the leading principal directions, and adds their logits to the ridge head's.

server: params, stats, and in float64 head, ridge, first and second moments of h, label statistics, correction.
broadcast: params, head, and zeros.  memory: nothing.  upload: weight 1, and in the place of the zeros sums in float64,
of symmetric matrices the upper triangle.

Departures: AFL and Fed3R regress on f itself without an intercept; AFL adds the strength at each client and removes it
at the server. Here the server adds it once, to the sum, so a client of any rank is welcome.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from halfmoon.api.method_entry import MethodEntry
from halfmoon.api.requirements import ALL_LABEL_LOCATIONS, Requirements
from halfmoon.api.types import ClientData, ClientUpdate, Federation, Passes, Task, UpdateRequirements
from halfmoon.api.uploads import Upload, UploadSpec
from halfmoon.core import tree
from halfmoon.core.errors import UserError
from halfmoon.core.tree import Tree
from halfmoon.methods.objectives.base import split_into_chunks

SHARPNESS = (4.0, 6.0)
"""Spread of the mixture head's logits in its first and last round."""

MEMORY = 0.7
"""How much of the correction of the class totals stays from round to round."""


@dataclass(frozen=True)
class Sums(ClientUpdate):
    """Send sums over a client's images, without a step; subclasses say which.

    They go up as an update of zeros that come down: so they can be masked and clipped as every update.
    With a `basis` (F, r), orthonormal columns that span all q of a federation in one place, q is expressed in it: (r,).
    """

    basis: Tensor | None = None

    @property
    def requirements(self) -> UpdateRequirements:
        return UpdateRequirements(trains=False, all_rows=True, upload_spec=UploadSpec(("sums",), ("sums",), "one"))

    def sums(self, broadcast: Tree, data: ClientData) -> Tree:
        """Return the sums by name, float64."""
        raise NotImplementedError

    def zeros(self, broadcast: Tree) -> Tree:
        """Return the sums of no images."""
        like, none = (
            broadcast["head"]["center"],
            torch.zeros((), dtype=torch.int64, device=broadcast["head"]["center"].device),
        )
        images = like.new_zeros(0, 1, 1, len(like))
        return self.sums(broadcast, ClientData(images, none.new_zeros(0), images, none, none))

    @torch.no_grad()
    def begin(self, broadcast: Tree, memory: Tree, data: ClientData) -> Tree:
        return self.sums(broadcast, data)

    def finish(self, broadcast: Tree, carry: Tree, data: ClientData) -> tuple[Upload, Tree]:
        return Upload({"sums": carry}, torch.ones_like(data.labeled, dtype=torch.float64)), {}

    def passes(self, labeled: int, unlabeled: int) -> Passes:
        return Passes(0, 0)

    def images_outside_steps(self, labeled: int, unlabeled: int) -> int:
        return labeled + unlabeled

    def roots(self, broadcast: Tree, images: Tensor) -> Tensor:
        """Return q (n, F), float64."""
        center, network = broadcast["head"]["center"], self.task.network
        if not len(images):
            return center.new_zeros(0, len(center))
        parts = [
            network.represent(broadcast["params"], {}, self.task.normalize(part))[1]
            for part in split_into_chunks(images)
        ]
        q = torch.cat(parts).to(center.dtype).clamp_min(0).sqrt()
        return q if self.basis is None else q @ self.basis

    def unit(self, broadcast: Tree, images: Tensor) -> Tensor:
        """Return h (n, F), float64."""
        q = self.roots(broadcast, images) - broadcast["head"]["center"]
        return F.normalize(q, dim=1)


@dataclass(frozen=True)
class MeanSums(Sums):
    """How many images there are, and the sum of their q."""

    def sums(self, broadcast: Tree, data: ClientData) -> Tree:
        q = self.roots(broadcast, torch.cat([data.x, data.u]))
        return {"count": (data.labeled + data.unlabeled).to(q.dtype), "q": q.sum(0)}


@dataclass(frozen=True)
class MomentSums(Sums):
    """First and second moments of h, of all images and of the labeled ones, by class; of h h' the upper triangle."""

    def sums(self, broadcast: Tree, data: ClientData) -> Tree:
        x, u = self.unit(broadcast, data.x), self.unit(broadcast, data.u)
        y = F.one_hot(data.y, self.task.network.classes).to(x.dtype)
        own = x.T @ x
        return {
            "count": (data.labeled + data.unlabeled).to(x.dtype),
            "h": x.sum(0) + u.sum(0),
            "hh": triangle(own + u.T @ u),
            "label_counts": y.sum(0),
            "label_h": x.sum(0),
            "label_hh": triangle(own),
            "label_hy": x.T @ y,
        }


@dataclass(frozen=True)
class SoftSums(Sums):
    """Soft labels r of the unlabeled images: the sum of r (K,), and of r h' (K, F)."""

    def sums(self, broadcast: Tree, data: ClientData) -> Tree:
        h, head = self.unit(broadcast, data.u), broadcast["head"]
        r = (h @ head["weight"].T + head["bias"]).softmax(1)
        return {"r": r.sum(0), "rh": r.T @ h}


@dataclass(frozen=True)
class RidgeHead:
    """Ridge regression of one-hot labels on h with an intercept that is not penalized, `strength` for all data sets.

    The first round solves it; later rounds leave it as it is.
    """

    strength: float = 1.0

    def requirements(self, norm: str) -> Requirements:
        return Requirements(
            "sum", label_locations=ALL_LABEL_LOCATIONS, counts_statistics="aggregation 'mean' among trusted sites"
        )

    def client_updates(self, task: Task) -> Mapping[str, ClientUpdate]:
        return {"mean": MeanSums(task), "moments": MomentSums(task)}

    def start(self, task: Task, model: Tree) -> Tree:
        """Return the model, with its head in float64; raise `UserError` where the network is no frozen backbone with a
        centered head.
        """
        flat, head = tree.flatten(model["params"]), task.network.head
        if flat.keys() != {f"{head}/{name}" for name in ("weight", "bias", "center")}:
            raise UserError(
                "the head is solved on the features of a frozen backbone that ends in a centered layer: add --network "
                "efficientnet-lite0 --tune head."
            )
        values = {name: flat[f"{head}/{name}"].double() for name in ("weight", "bias", "center")}
        return {"params": model["params"], "stats": model["stats"], "head": values}

    def round(self, task: Task, server: Tree, federation: Federation) -> Tree:
        """Ask for the mean, then for the moments, and solve; after the first round return `server`."""
        if task.round > 0:
            return server
        server, sums = self.statistics(task, server, federation)
        return {**server, "head": {**server["head"], **solve(sums, self.strength)}}

    def statistics(self, task: Task, server: Tree, federation: Federation) -> tuple[Tree, Tree]:
        """Return the server's tree with the mean as its center, and the sums of all clients' moments."""
        sums = total(MeanSums(task), "mean", server, federation, True)
        center = sums["q"] / sums["count"].clamp_min(1)
        server = {**server, "head": {**server["head"], "center": center}}
        sums = total(MomentSums(task), "moments", server, federation, True)
        sums |= {name: symmetric(sums[name], len(center)) for name in ("hh", "label_hh")}
        if not sums["label_counts"].sum() > 0:
            raise UserError(
                "neither a client nor the server has a labeled image, or noise hides them: a head cannot be solved."
            )
        return server, sums

    def solution(self, task: Task, server: Tree) -> Tree:
        flat = tree.flatten(server["params"])
        head = {f"{task.network.head}/{name}": leaf for name, leaf in server["head"].items()}
        params = {path: head[path].to(leaf.dtype) for path, leaf in flat.items()}
        return {"params": tree.unflatten(params), "stats": server["stats"]}


@dataclass(frozen=True)
class MixtureHead(RidgeHead):
    """The ridge head, then `em_rounds` rounds of EM on unlabeled images.

    `even_labels`: labels a class at which labels and unlabeled images are trusted alike. `directions`: principal
    directions of the mixture. `shrinkage`: of its covariance, to a multiple of the identity.
    """

    even_labels: float = 25.0
    directions: int = 96
    shrinkage: float = 0.2
    em_rounds: int = 10

    def client_updates(self, task: Task) -> Mapping[str, ClientUpdate]:
        return {**super().client_updates(task), "soft labels": SoftSums(task)}

    def round(self, task: Task, server: Tree, federation: Federation) -> Tree:
        """Solve the ridge head in the first round; take one step of EM in each of the `em_rounds` that follow."""
        if task.round > self.em_rounds:
            return server
        if task.round == 0:
            return self._first(*self.statistics(task, server, federation))
        return self._step(task.round - 1, server, total(SoftSums(task), "soft labels", server, federation))

    def _first(self, server: Tree, sums: Tree) -> Tree:
        """Return the server's tree after the statistics: the ridge head without the labels' prior gives soft labels."""
        n, prior = sums["count"], sums["label_counts"] / sums["label_counts"].sum()
        moments = {"first": sums["h"] / n, "second": sums["hh"] / n}
        ridge = solve(sums, self.strength)
        ridge = unit_spread({"weight": ridge["weight"], "bias": ridge["bias"] - prior}, moments)
        basis = directions(moments["second"], self.directions)
        moments |= {
            "basis": basis,
            "scatter": basis.T @ (sums["hh"] - sums["label_hh"]) @ basis,
            "label_scatter": basis.T @ sums["label_hh"] @ basis,
            "label_sums": sums["label_hy"].T @ basis,
            "label_counts": sums["label_counts"],
            "unlabeled": n - sums["label_counts"].sum(),
        }
        head = {**server["head"], **tree.map(lambda leaf: SHARPNESS[0] * leaf, ridge)}
        return {**server, "head": head, "ridge": ridge, "moments": moments, "correction": torch.zeros_like(prior)}

    def _step(self, step: int, server: Tree, sums: Tree) -> Tree:
        """Return the server's tree after a step of EM, the class totals divided out once."""
        moments, r = server["moments"], sums["r"]
        if not r.sum() > 0:
            return server  # no client has an unlabeled image
        counts, basis = moments["label_counts"], moments["basis"]
        trust = counts.mean() / (counts.mean() + self.even_labels)
        label_weight = trust / (1 - trust) * moments["unlabeled"] / counts.sum()
        mass = r + label_weight * counts
        means = (sums["rh"] @ basis + label_weight * moments["label_sums"]) / mass[:, None]
        between = (means * mass[:, None]).T @ means
        covariance = (moments["scatter"] + label_weight * moments["label_scatter"] - between) / mass.sum()
        identity = torch.eye(len(covariance), dtype=r.dtype, device=r.device)
        covariance = torch.lerp(covariance, covariance.trace() / len(covariance) * identity, self.shrinkage)
        slopes = solution(covariance, means.T)
        mixture = {"weight": (basis @ slopes).T, "bias": -0.5 * (means.T * slopes).sum(0)}
        mixture = unit_spread(mixture, moments)
        both = tree.map(lambda a, b: trust * a + (1 - trust) * b, server["ridge"], mixture)
        both = unit_spread(both, moments)
        share = min(step + 1, self.em_rounds - 1) / max(self.em_rounds - 1, 1)
        sharpness = SHARPNESS[0] + (SHARPNESS[1] - SHARPNESS[0]) * share
        totals = (r * len(r) / r.sum()).clamp_min(1e-9)
        correction = MEMORY * server["correction"] - (1 - MEMORY) * totals.log()
        head = {"weight": sharpness * both["weight"], "bias": sharpness * both["bias"] + correction}
        return {**server, "head": {**server["head"], **head}, "correction": correction}


def total(update: Sums, query: str, server: Tree, federation: Federation, serving: bool = False) -> Tree:
    """Return the sums of all clients' answers, and of the server's own where `serving`; raise `UserError` where the
    cohort is not all clients.
    """
    if len(federation.cohort) != federation.clients:
        raise UserError(
            f"the head is solved from the sums of all {federation.clients} clients, and a round has "
            f"{len(federation.cohort)}: set cohort to {federation.clients}."
        )
    broadcast = {"params": server["params"], "head": server["head"]}
    broadcast["sums"] = update.zeros(broadcast)
    mean = federation.average(query, broadcast)
    sums = tree.map(lambda leaf: leaf * len(federation.responders), mean.update["sums"])
    if serving and federation.labeled:
        sums = tree.map(torch.add, sums, federation.query_server(query, broadcast).update["sums"])
    return sums


def solve(sums: Tree, strength: float) -> Tree:
    """Return the ridge head (weight (K, F), bias (K,)) of the labeled sums."""
    n = sums["label_counts"].sum()
    h, y = sums["label_h"] / n, sums["label_counts"] / n
    scatter = sums["label_hh"] - n * torch.outer(h, h)
    scatter = scatter + strength * torch.eye(len(h), dtype=h.dtype, device=h.device)
    weight = solution(scatter, sums["label_hy"] - n * torch.outer(h, y)).T.contiguous()
    return {"weight": weight, "bias": y - weight @ h}


def solution(matrix: Tensor, right: Tensor) -> Tensor:
    """Return x (F, K) with matrix x = right."""
    return cast(Tensor, torch.linalg.solve(matrix, right))  # pyright: ignore[reportUnknownMemberType]


def directions(second: Tensor, count: int) -> Tensor:
    """Return the `count` leading eigenvectors (F, count) of a matrix of second moments."""
    vectors = cast(Tensor, torch.linalg.eigh(second)[1])  # pyright: ignore[reportUnknownMemberType]
    return vectors.flip(1)[:, :count].contiguous()


def triangle(matrix: Tensor) -> Tensor:
    """Return the upper triangle of a matrix (F, F), row by row, (F (F + 1) / 2,)."""
    rows, columns = torch.triu_indices(*matrix.shape, device=matrix.device)
    return matrix[rows, columns]


def symmetric(upper: Tensor, side: int) -> Tensor:
    """Return the symmetric matrix (side, side) of an upper triangle."""
    rows, columns = torch.triu_indices(side, side, device=upper.device)
    matrix = upper.new_zeros(side, side)
    matrix[rows, columns] = upper
    matrix[columns, rows] = upper
    return matrix


def unit_spread(head: Tree, moments: Tree) -> Tree:
    """Return the head with logits whose squares, centered over classes, have the mean one over all images."""
    weight, bias = head["weight"] - head["weight"].mean(0), head["bias"] - head["bias"].mean()
    squares = (weight @ moments["second"] * weight).sum() + 2 * (weight @ moments["first"]) @ bias + bias @ bias
    scale = (squares / len(bias)).clamp_min(0).sqrt().clamp_min(1e-12)
    return tree.map(partial(torch.mul, 1 / scale), head)


ON_FEATURES = (
    MethodEntry("ridge-head", "Ridge head", "AFL, CVPR 2025; Fed3R, ICML 2024",
                "labeled images only: ridge regression on frozen features, from sums", RidgeHead()),
    MethodEntry("mixture-head", "Mixture head", "after AFL, CVPR 2025",
                "a mixture of Gaussians on frozen features, from sums weighted by soft labels", MixtureHead()),
)  # fmt: skip
"""Rows that do not stand in `ROWS`: the contract's networks have no centered head."""
