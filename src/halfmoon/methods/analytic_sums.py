"""The sums over a client's images from which heads on frozen features are solved (`analytic`).

Of an image's features f (F,), none negative, q = sqrt(f) and h = (q - m) / |q - m| with m the mean q of all images.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from halfmoon.api.types import ClientUpdate, Local, Needs, Passes
from halfmoon.api.uploads import Uplink, Upload
from halfmoon.core.tree import Tree
from halfmoon.methods.objectives.base import chunks


@dataclass(frozen=True)
class Sums(ClientUpdate):
    """Send sums over a client's images, without a step; subclasses say which.

    They go up as an update of zeros that come down: so they can be masked and clipped as every update.
    With a `basis` (F, r), orthonormal columns that span all q of a federation in one place, q is expressed in it: (r,).
    """

    basis: Tensor | None = None

    @property
    def needs(self) -> Needs:
        return Needs(trains=False, all_rows=True, uplink=Uplink(("sums",), ("sums",), "one"))

    def sums(self, down: Tree, data: Local) -> Tree:
        """Return the sums by name, float64."""
        raise NotImplementedError

    def zeros(self, down: Tree) -> Tree:
        """Return the sums of no images."""
        like, none = down["head"]["center"], torch.zeros((), dtype=torch.int64, device=down["head"]["center"].device)
        images = like.new_zeros(0, 1, 1, len(like))
        return self.sums(down, Local(images, none.new_zeros(0), images, none, none))

    @torch.no_grad()
    def begin(self, down: Tree, memory: Tree, data: Local) -> Tree:
        return self.sums(down, data)

    def finish(self, down: Tree, carry: Tree, data: Local) -> tuple[Upload, Tree]:
        return Upload({"sums": carry}, torch.ones_like(data.labeled, dtype=torch.float64)), {}

    def passes(self, labeled: int, unlabeled: int) -> Passes:
        return Passes(0, 0)

    def swept(self, labeled: int, unlabeled: int) -> int:
        return labeled + unlabeled

    def roots(self, down: Tree, images: Tensor) -> Tensor:
        """Return q (n, F), float64."""
        center, network = down["head"]["center"], self.task.network
        if not len(images):
            return center.new_zeros(0, len(center))
        parts = [network.represent(down["params"], {}, self.task.normalize(part))[1] for part in chunks(images)]
        q = torch.cat(parts).to(center.dtype).clamp_min(0).sqrt()
        return q if self.basis is None else q @ self.basis

    def unit(self, down: Tree, images: Tensor) -> Tensor:
        """Return h (n, F), float64."""
        q = self.roots(down, images) - down["head"]["center"]
        return F.normalize(q, dim=1)


@dataclass(frozen=True)
class MeanSums(Sums):
    """How many images there are, and the sum of their q."""

    def sums(self, down: Tree, data: Local) -> Tree:
        q = self.roots(down, torch.cat([data.x, data.u]))
        return {"count": (data.labeled + data.unlabeled).to(q.dtype), "q": q.sum(0)}


@dataclass(frozen=True)
class MomentSums(Sums):
    """First and second moments of h, of all images and of the labeled ones, by class; of h h' the upper triangle."""

    def sums(self, down: Tree, data: Local) -> Tree:
        x, u = self.unit(down, data.x), self.unit(down, data.u)
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

    def sums(self, down: Tree, data: Local) -> Tree:
        h, head = self.unit(down, data.u), down["head"]
        r = (h @ head["weight"].T + head["bias"]).softmax(1)
        return {"r": r.sum(0), "rh": r.T @ h}


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
