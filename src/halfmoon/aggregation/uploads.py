"""A method whose clients change what they send: they clip it, for differential privacy."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from halfmoon.api.types import Batch, ClientUpdate, Federation, Local, Method, Needs, Passes, StepMetrics, Task
from halfmoon.api.uploads import Uplink, Upload
from halfmoon.core.tree import Tree


class UploadChange(Protocol):
    """Changes one client's upload before it is sent; equal ones change it alike."""

    def __call__(self, up: Upload, down: Tree, uplink: Uplink) -> Upload:
        """Return what is sent in place of `up`, of a client that was sent `down`."""
        ...


@dataclass(frozen=True)
class Changed:
    """A method whose clients apply `change` to all that they send."""

    method: Method
    change: UploadChange

    def client_updates(self, task: Task) -> Mapping[str, ClientUpdate]:
        return {
            name: ChangedUpdate(update.task, client_update=update, change=self.change)
            for name, update in self.method.client_updates(task).items()
        }

    def start(self, task: Task, model: Tree) -> Tree:
        return self.method.start(task, model)

    def round(self, task: Task, server: Tree, federation: Federation) -> Tree:
        return self.method.round(task, server, federation)

    def solution(self, task: Task, server: Tree) -> Tree:
        return self.method.solution(task, server)


@dataclass(frozen=True)
class ChangedUpdate(ClientUpdate):
    """A client update like another one, with what it sends changed."""

    client_update: ClientUpdate = field(kw_only=True)
    change: UploadChange = field(kw_only=True)

    def __post_init__(self) -> None:
        # Whoever replaces the task of this client update means the one inside.
        object.__setattr__(self, "client_update", replace(self.client_update, task=self.task))

    @property
    def needs(self) -> Needs:
        return self.client_update.needs

    @property
    def at_server(self) -> ClientUpdate:
        """Return the client update as it was: at the server nothing is sent."""
        return self.client_update.at_server

    def remember(self, down: Tree, generator: torch.Generator) -> Tree:
        return self.client_update.remember(down, generator)

    def begin(self, down: Tree, memory: Tree, data: Local) -> Tree:
        return self.client_update.begin(down, memory, data)

    def keep(self, carry: Tree, data: Local) -> Tensor | None:
        return self.client_update.keep(carry, data)

    def step(self, down: Tree, carry: Tree, batch: Batch) -> tuple[Tree, StepMetrics]:
        return self.client_update.step(down, carry, batch)

    def finish(self, down: Tree, carry: Tree, data: Local) -> tuple[Upload, Tree]:
        up, memory = self.client_update.finish(down, carry, data)
        return self.change(up, down, self.needs.uplink), memory

    def passes(self, labeled: int, unlabeled: int) -> Passes:
        return self.client_update.passes(labeled, unlabeled)

    def swept(self, labeled: int, unlabeled: int) -> int:
        return self.client_update.swept(labeled, unlabeled)

    def traffic(self, down: Tree, up: Upload) -> tuple[int, int]:
        return self.client_update.traffic(down, up)
