"""Methods that watch other methods, and methods made for one question."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from halfmoon.aggregation import AggregationContext
from halfmoon.api.types import Batch, ClientUpdate, Federation, Local, Method, Needs, Passes, StepMetrics, Task
from halfmoon.api.uploads import Aux, Uplink, Upload
from halfmoon.core import tree
from halfmoon.core.tree import Tree


@dataclass(frozen=True)
class SpyUpdate(ClientUpdate):
    """Do what another work does, and write down everything it is given and everything it says."""

    inner: Any = None
    seen: list[tuple[str, Any]] = field(default_factory=list, compare=False)

    @property
    def needs(self) -> Needs:
        return replace(self.inner.needs, all_rows=self.inner.needs.whole, masks=False, row_memory={})

    def swept(self, labeled: int, unlabeled: int) -> int:
        return self.inner.swept(labeled, unlabeled)

    def traffic(self, down: Tree, up: Upload) -> tuple[int, int]:
        return self.inner.traffic(down, up)

    def remember(self, down: Tree, generator: torch.Generator) -> Tree:
        return self.inner.remember(down, generator)

    def begin(self, down: Tree, memory: Tree, data: Local) -> Tree:
        self.seen.append(("begin", (down, memory, data)))
        return self.inner.begin(down, memory, data)

    def keep(self, carry: Tree, data: Local) -> Tensor | None:
        self.seen.append(("keep", (carry, data)))
        return self.inner.keep(carry, data)

    def step(self, down: Tree, carry: Tree, batch: Batch) -> tuple[Tree, StepMetrics]:
        self.seen.append(("step", (down, carry, batch)))
        carry, notes = self.inner.step(down, carry, batch)
        self.seen.append(("notes", notes))
        return carry, notes

    def finish(self, down: Tree, carry: Tree, data: Local) -> tuple[Upload, Tree]:
        self.seen.append(("finish", (down, carry, data)))
        return self.inner.finish(down, carry, data)

    def passes(self, labeled: int, unlabeled: int) -> Passes:
        return self.inner.passes(labeled, unlabeled)


@dataclass(frozen=True)
class Spy:
    """A method whose clients are watched."""

    inner: Method
    seen: list[tuple[str, Any]] = field(default_factory=list, compare=False)

    def client_updates(self, task: Task) -> Mapping[str, ClientUpdate]:
        return {
            name: SpyUpdate(task, inner=client_update, seen=self.seen)
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
class CountingWork(ClientUpdate):
    """Count steps, add up what is drawn, burn down a fuse, and send all of it back.

    carry: steps, the sum of rows, the sum of pixels, the fuse. The loss is NaN at the step that the fuse names. With
    `idle` the client whose offset is `idle` may draw no unlabeled row."""

    views: tuple[str, ...] = ()
    idle: int = -1

    @property
    def needs(self) -> Needs:
        names = ("steps", "rows", "pixels", "visits", "mark", "labeled", "unlabeled")
        return Needs(self.views, uplink=Uplink((), (), "one", dict.fromkeys(names, Aux())))

    def begin(self, down: Tree, memory: Tree, data: Local) -> Tree:
        zero = torch.zeros((), dtype=torch.float64)
        visits = memory["visits"] if memory else zero
        return {"steps": zero, "rows": zero, "pixels": zero, "visits": visits, "mark": down["mark"] + down["base"]}

    def remember(self, down: Tree, generator: torch.Generator) -> Tree:
        return {"visits": torch.zeros((), dtype=torch.float64)}

    def keep(self, carry: Tree, data: Local) -> Tensor:
        return (torch.arange(len(data.u)) >= 0) & (carry["mark"] != self.idle)

    def step(self, down: Tree, carry: Tree, batch: Batch) -> tuple[Tree, StepMetrics]:
        steps = carry["steps"] + 1
        rows = carry["rows"] + batch.x_rows.sum() + (batch.u_rows.sum() if self.views else 0)
        pixels = carry["pixels"] + batch.x.double().sum() + sum(batch.u[name].double().sum() for name in self.views)
        loss = torch.where(steps == down["fuse"], torch.nan, pixels)
        return {**carry, "steps": steps, "rows": rows, "pixels": pixels}, StepMetrics(loss, {}, ())

    def finish(self, down: Tree, carry: Tree, data: Local) -> tuple[Upload, Tree]:
        up = {**carry, "labeled": data.labeled, "unlabeled": data.unlabeled}
        return Upload({}, torch.ones(()).double(), up), {"visits": carry["visits"] + 1}

    def passes(self, labeled: int, unlabeled: int) -> Passes:
        return Passes(labeled + unlabeled, labeled)


@dataclass(frozen=True)
class Counting:
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
        return {"count": CountingWork(task, self.views, self.idle)}

    def start(self, task: Task, model: Tree) -> Tree:
        return {"round": torch.zeros(())}

    def round(self, task: Task, server: Tree, federation: Federation) -> Tree:
        ups: Tree = {}
        for query in range(self.queries):
            fuse = (federation.cohort == self.doomed) & (server["round"] == self.when)
            each = {"mark": federation.cohort.double(), "fuse": torch.where(fuse, self.fuse, -1)}
            ups[f"trip{query}"] = federation.ask("count", {"base": torch.tensor(100.0)}, each).aux
        return {"round": server["round"] + 1, "ups": ups}

    def solution(self, task: Task, server: Tree) -> Tree:
        return server


def question(down: Tree, clients: int, cohort: int | None = None, **changes: Any) -> AggregationContext:
    """Return a question of the first round, to so many clients, that those from 0 on have answered."""
    asked = AggregationContext(0, 0, 0, "train", down, {}, tuple(range(clients)), cohort or clients, True)
    return asked._replace(**changes)


def tensors(what: Any) -> list[Tensor]:
    """Return all tensors in nested tuples, lists and dicts."""
    if isinstance(what, Tensor):
        return [what]
    if isinstance(what, dict):
        return list(tree.leaves(what)) if all(isinstance(v, Tensor | dict) for v in what.values()) else []
    if isinstance(what, list | tuple):
        return [leaf for each in what for leaf in tensors(each)]
    return []
