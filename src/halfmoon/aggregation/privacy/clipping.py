"""The client half of client-level differential privacy: clip the norm of each client's update.

McMahan, Ramage, Talwar and Zhang 2018 ("Learning Differentially Private Recurrent Language Models"), Section 2, flat
clipping: all values of an update are one vector, which is scaled down if its Euclidean norm exceeds the bound.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from halfmoon.api.types import (
    Batch,
    ClientData,
    ClientUpdate,
    Federation,
    Method,
    Passes,
    StepMetrics,
    Task,
    UpdateRequirements,
)
from halfmoon.api.uploads import Upload
from halfmoon.core import tree
from halfmoon.core.tree import Tree


@dataclass(frozen=True)
class ClippedMethod:
    """A method whose clients clip their updates.

    Attributes:
        method: The method; its server half is unchanged.
        norm: The largest Euclidean norm of an update.
    """

    method: Method
    norm: float

    def client_updates(self, task: Task) -> Mapping[str, ClientUpdate]:
        """Wrap each client update of the method in a `ClippedUpdate`."""
        return {
            name: ClippedUpdate(client_update.task, client_update=client_update, norm=self.norm)
            for name, client_update in self.method.client_updates(task).items()
        }

    def start(self, task: Task, model: Tree) -> Tree:
        return self.method.start(task, model)

    def round(self, task: Task, server: Tree, federation: Federation) -> Tree:
        return self.method.round(task, server, federation)

    def solution(self, task: Task, server: Tree) -> Tree:
        return self.method.solution(task, server)


@dataclass(frozen=True)
class ClippedUpdate(ClientUpdate):
    """A client update that runs another one and clips its upload.

    Attributes:
        client_update: The client update to run.
        norm: The largest Euclidean norm of the upload's update.
    """

    client_update: ClientUpdate = field(kw_only=True)
    norm: float = field(kw_only=True)

    def __post_init__(self) -> None:
        # `dataclasses.replace(..., task=...)` on this wrapper must also replace the task of the wrapped client update.
        object.__setattr__(self, "client_update", replace(self.client_update, task=self.task))

    @property
    def requirements(self) -> UpdateRequirements:
        return self.client_update.requirements

    @property
    def at_server(self) -> ClientUpdate:
        """The client update without clipping: the server's images belong to no client."""
        return self.client_update

    def initial_memory(self, broadcast: Tree, generator: torch.Generator) -> Tree:
        return self.client_update.initial_memory(broadcast, generator)

    def begin(self, broadcast: Tree, memory: Tree, data: ClientData) -> Tree:
        return self.client_update.begin(broadcast, memory, data)

    def drawable_rows(self, carry: Tree, data: ClientData) -> Tensor | None:
        return self.client_update.drawable_rows(carry, data)

    def step(self, broadcast: Tree, carry: Tree, batch: Batch) -> tuple[Tree, StepMetrics]:
        return self.client_update.step(broadcast, carry, batch)

    def finish(self, broadcast: Tree, carry: Tree, data: ClientData) -> tuple[Upload, Tree]:
        upload, memory = self.client_update.finish(broadcast, carry, data)
        return clip_upload(upload, broadcast, self.norm), memory

    def passes(self, labeled: int, unlabeled: int) -> Passes:
        return self.client_update.passes(labeled, unlabeled)

    def images_outside_steps(self, labeled: int, unlabeled: int) -> int:
        return self.client_update.images_outside_steps(labeled, unlabeled)

    def traffic(self, broadcast: Tree, upload: Upload) -> tuple[int, int]:
        return self.client_update.traffic(broadcast, upload)


def clip_upload(upload: Upload, broadcast: Tree, norm: float) -> Upload:
    """Scale down one client's update to a Euclidean norm of at most `norm` (DP-FedAvg's flat clipping).

    The update is the uploaded minus the received values. Differential privacy relies on the bound, so it holds for the
    uploaded numbers after they are rounded to their dtype: an update that is too long is scaled to a little less.

    Args:
        upload: The upload of one client, leaves (...).
        broadcast: The values that the client received.
        norm: The largest norm of all floating-point leaves of the update together.

    Returns:
        The upload. An update within the bound is unchanged, bit by bit; so are values that are no update.
    """
    received = tree.flatten(broadcast)
    pairs: dict[str, tuple[Tensor, Tensor]] = {}  # the uploaded and the received value, by path
    for path, leaf in tree.flatten(upload.update).items():
        if leaf.is_floating_point():
            pairs[path] = (leaf, received[path])
    if not pairs:
        return upload
    update_norm = _norm([new.double() - old.double() for new, old in pairs.values()])
    # Rounding old + update to the leaves' dtype can lengthen the update by half an eps of the norm of the result, which
    # is at most |old| + norm. The margin is four times that: 2 eps.
    eps = max(torch.finfo(new.dtype).eps for new, _ in pairs.values())
    received_norm = _norm([old.double() for _, old in pairs.values()])
    rounding_margin = 2 * eps * (received_norm + norm)
    fits = update_norm <= norm
    # The denominator is 1 where the scale is not used, so that an update of zero does not divide by zero. `where`
    # instead of `if`: under vmap the comparison has no Python value.
    scale = (norm - rounding_margin).clamp_min(0) / torch.where(fits, torch.ones_like(update_norm), update_norm)

    def scale_down(new: Tensor, old: Tensor) -> Tensor:
        start = old.double()
        return torch.where(fits, new, (start + scale * (new.double() - start)).to(new.dtype))

    clipped_leaves = {path: scale_down(new, old) for path, (new, old) in pairs.items()}
    return upload._replace(update=tree.replace_leaves(upload.update, clipped_leaves))


def _norm(leaves: list[Tensor]) -> Tensor:
    """Compute the Euclidean norm of all leaves together; the memory layout does not affect the order of summation."""
    return torch.stack([leaf.reshape(-1).square().sum() for leaf in leaves]).sum().sqrt()
