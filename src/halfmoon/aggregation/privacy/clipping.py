"""The client half of client-level differential privacy: no client's update is longer than a bound.

McMahan, Ramage, Talwar and Zhang 2018 (Learning Differentially Private Recurrent Language Models), Section 2: all that
a client changes is one vector, and where its Euclidean norm is over the bound, it is scaled down to it.
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
class Clipped:
    """A method whose clients clip what they send: all that one client update changes has at most the norm `norm`."""

    method: Method
    norm: float

    def client_updates(self, task: Task) -> Mapping[str, ClientUpdate]:
        """Return the client updates of the method, each with its upload clipped."""
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
    """A client update like another one, with what it sends clipped."""

    client_update: ClientUpdate = field(kw_only=True)
    norm: float = field(kw_only=True)

    def __post_init__(self) -> None:
        # Whoever replaces the task of this client update means the one inside.
        object.__setattr__(self, "client_update", replace(self.client_update, task=self.task))

    @property
    def requirements(self) -> UpdateRequirements:
        return self.client_update.requirements

    @property
    def at_server(self) -> ClientUpdate:
        """Return the client update without the clip: the server's own images are not a client's."""
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
        return clipped(upload, broadcast, self.norm), memory

    def passes(self, labeled: int, unlabeled: int) -> Passes:
        return self.client_update.passes(labeled, unlabeled)

    def images_outside_steps(self, labeled: int, unlabeled: int) -> int:
        return self.client_update.images_outside_steps(labeled, unlabeled)

    def traffic(self, broadcast: Tree, upload: Upload) -> tuple[int, int]:
        return self.client_update.traffic(broadcast, upload)


def clipped(upload: Upload, broadcast: Tree, norm: float) -> Upload:
    """Return one client's upload with its update at most `norm` long: all its floating leaves together.

    The norm is that of the numbers that are sent, after they are rounded to their type. An update within the bound
    stays as it is, bit by bit; so does what is no update.
    """
    before = tree.flatten(broadcast)
    moved = {
        path: (leaf, before[path]) for path, leaf in tree.flatten(upload.update).items() if leaf.is_floating_point()
    }
    if not moved:
        return upload
    length = _length([new.double() - old.double() for new, old in moved.values()])
    # Rounding old + update to the leaves' type may lengthen an update by half an eps of what is rounded.
    eps = max(torch.finfo(new.dtype).eps for new, _ in moved.values())
    room = 2 * eps * (_length([old.double() for _, old in moved.values()]) + norm)
    fits = length <= norm
    scale = (norm - room).clamp_min(0) / torch.where(fits, torch.ones_like(length), length)

    def shorter(new: Tensor, old: Tensor) -> Tensor:
        start = old.double()
        return torch.where(fits, new, (start + scale * (new.double() - start)).to(new.dtype))

    return upload._replace(
        update=tree.replace_leaves(upload.update, {path: shorter(new, old) for path, (new, old) in moved.items()})
    )


def _length(leaves: list[Tensor]) -> Tensor:
    """Return the Euclidean norm of leaves taken together, in the order of their elements whatever their layout."""
    return torch.stack([leaf.reshape(-1).square().sum() for leaf in leaves]).sum().sqrt()
