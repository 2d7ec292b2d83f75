"""Methods that watch other methods, and methods made for one question."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from halfmoon.aggregation import AggregationContext
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
from halfmoon.api.uploads import Aux, Upload, UploadSpec
from halfmoon.core import tree
from halfmoon.core.tree import Tree


@dataclass(frozen=True)
class RecordingUpdate(ClientUpdate):
    """Do what another work does, and write down everything it is given and everything it says."""

    inner: Any = None
    seen: list[tuple[str, Any]] = field(default_factory=list, compare=False)

    @property
    def requirements(self) -> UpdateRequirements:
        return replace(
            self.inner.requirements,
            all_rows=self.inner.requirements.needs_full_batch,
            masks_padding=False,
            row_memory={},
        )

    def images_outside_steps(self, labeled: int, unlabeled: int) -> int:
        return self.inner.images_outside_steps(labeled, unlabeled)

    def traffic(self, broadcast: Tree, upload: Upload) -> tuple[int, int]:
        return self.inner.traffic(broadcast, upload)

    def initial_memory(self, broadcast: Tree, generator: torch.Generator) -> Tree:
        return self.inner.initial_memory(broadcast, generator)

    def begin(self, broadcast: Tree, memory: Tree, data: ClientData) -> Tree:
        self.seen.append(("begin", (broadcast, memory, data)))
        return self.inner.begin(broadcast, memory, data)

    def drawable_rows(self, carry: Tree, data: ClientData) -> Tensor | None:
        self.seen.append(("keep", (carry, data)))
        return self.inner.drawable_rows(carry, data)

    def step(self, broadcast: Tree, carry: Tree, batch: Batch) -> tuple[Tree, StepMetrics]:
        self.seen.append(("step", (broadcast, carry, batch)))
        carry, notes = self.inner.step(broadcast, carry, batch)
        self.seen.append(("notes", notes))
        return carry, notes

    def finish(self, broadcast: Tree, carry: Tree, data: ClientData) -> tuple[Upload, Tree]:
        self.seen.append(("finish", (broadcast, carry, data)))
        return self.inner.finish(broadcast, carry, data)

    def passes(self, labeled: int, unlabeled: int) -> Passes:
        return self.inner.passes(labeled, unlabeled)


@dataclass(frozen=True)
class RecordingMethod:
    """A method whose clients are watched."""

    inner: Method
    seen: list[tuple[str, Any]] = field(default_factory=list, compare=False)

    def client_updates(self, task: Task) -> Mapping[str, ClientUpdate]:
        return {
            name: RecordingUpdate(task, inner=client_update, seen=self.seen)
            for name, client_update in self.inner.client_updates(task).items()
        }

    def start(self, task: Task, model: Tree) -> Tree:
        return self.inner.start(task, model)

    def round(self, task: Task, server: Tree, federation: Federation) -> Tree:
        return self.inner.round(task, server, federation)

    def solution(self, task: Task, server: Tree) -> Tree:
        return self.inner.solution(task, server)

    def of(self, kind: str) -> list[Any]:
        return [what for name, what in self.seen if name == kind]


@dataclass(frozen=True)
class CountingUpdate(ClientUpdate):
    """Count steps, add up what is drawn, burn down a fuse, and send all of it back.

    carry: steps, the sum of rows, the sum of pixels, the fuse. The loss is NaN at the step that the fuse names. With
    `idle` the client whose offset is `idle` may draw no unlabeled row."""

    views: tuple[str, ...] = ()
    idle: int = -1

    @property
    def requirements(self) -> UpdateRequirements:
        names = ("steps", "rows", "pixels", "visits", "mark", "labeled", "unlabeled")
        return UpdateRequirements(self.views, upload_spec=UploadSpec((), (), "one", dict.fromkeys(names, Aux())))

    def begin(self, broadcast: Tree, memory: Tree, data: ClientData) -> Tree:
        zero = torch.zeros((), dtype=torch.float64)
        visits = memory["visits"] if memory else zero
        return {
            "steps": zero,
            "rows": zero,
            "pixels": zero,
            "visits": visits,
            "mark": broadcast["mark"] + broadcast["base"],
        }

    def initial_memory(self, broadcast: Tree, generator: torch.Generator) -> Tree:
        return {"visits": torch.zeros((), dtype=torch.float64)}

    def drawable_rows(self, carry: Tree, data: ClientData) -> Tensor:
        return (torch.arange(len(data.u)) >= 0) & (carry["mark"] != self.idle)

    def step(self, broadcast: Tree, carry: Tree, batch: Batch) -> tuple[Tree, StepMetrics]:
        steps = carry["steps"] + 1
        rows = carry["rows"] + batch.x_rows.sum() + (batch.u_rows.sum() if self.views else 0)
        pixels = carry["pixels"] + batch.x.double().sum() + sum(batch.u[name].double().sum() for name in self.views)
        loss = torch.where(steps == broadcast["fuse"], torch.nan, pixels)
        return {**carry, "steps": steps, "rows": rows, "pixels": pixels}, StepMetrics(loss, {}, ())

    def finish(self, broadcast: Tree, carry: Tree, data: ClientData) -> tuple[Upload, Tree]:
        upload = {**carry, "labeled": data.labeled, "unlabeled": data.unlabeled}
        return Upload({}, torch.ones(()).double(), upload), {"visits": carry["visits"] + 1}

    def passes(self, labeled: int, unlabeled: int) -> Passes:
        return Passes(labeled + unlabeled, labeled)


@dataclass(frozen=True)
class CountingMethod:
    """A method of two trips a round whose server keeps the uploads of the last one.

    `mark` of client k is 100 + k and differs from client to client; `fuse` is the step at which client `doomed` fails
    in round `when`."""

    views: tuple[str, ...] = ("weak",)
    queries: int = 2
    idle: int = -1
    doomed: int = -1
    when: int = 0
    fuse: int = 1

    def client_updates(self, task: Task) -> Mapping[str, ClientUpdate]:
        return {"count": CountingUpdate(task, self.views, self.idle)}

    def start(self, task: Task, model: Tree) -> Tree:
        return {"round": torch.zeros(())}

    def round(self, task: Task, server: Tree, federation: Federation) -> Tree:
        ups: Tree = {}
        for query in range(self.queries):
            fuse = (federation.cohort == self.doomed) & (server["round"] == self.when)
            each = {"mark": federation.cohort.double(), "fuse": torch.where(fuse, self.fuse, -1)}
            ups[f"trip{query}"] = federation.query("count", {"base": torch.tensor(100.0)}, each).aux
        return {"round": server["round"] + 1, "ups": ups}

    def solution(self, task: Task, server: Tree) -> Tree:
        return server


def make_context(broadcast: Tree, clients: int, cohort: int | None = None, **changes: Any) -> AggregationContext:
    """Return a question of the first round, to so many clients, that those from 0 on have answered."""
    asked = AggregationContext(0, 0, 0, "train", broadcast, {}, tuple(range(clients)), cohort or clients, True)
    return asked._replace(**changes)


def collect_tensors(what: Any) -> list[Tensor]:
    """Return all tensors in nested tuples, lists and dicts."""
    if isinstance(what, Tensor):
        return [what]
    if isinstance(what, dict):
        return list(tree.leaves(what)) if all(isinstance(v, Tensor | dict) for v in what.values()) else []
    if isinstance(what, list | tuple):
        return [leaf for each in what for leaf in collect_tensors(each)]
    return []
