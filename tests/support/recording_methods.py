"""Wrap a method to record its calls, and define a method that counts steps and images."""

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
    """Pass every call on to another client update, and record its arguments and its step metrics in `calls`."""

    inner: Any = None
    calls: list[tuple[str, Any]] = field(default_factory=list, compare=False)

    @property
    def requirements(self) -> UpdateRequirements:
        return replace(
            self.inner.requirements,
            all_rows=self.inner.requirements.needs_full_batch,
            # Without padding, so that the recorded tensors are those of one client in full.
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
        self.calls.append(("begin", (broadcast, memory, data)))
        return self.inner.begin(broadcast, memory, data)

    def drawable_rows(self, carry: Tree, data: ClientData) -> Tensor | None:
        self.calls.append(("drawable_rows", (carry, data)))
        return self.inner.drawable_rows(carry, data)

    def step(self, broadcast: Tree, carry: Tree, batch: Batch) -> tuple[Tree, StepMetrics]:
        self.calls.append(("step", (broadcast, carry, batch)))
        carry, metrics = self.inner.step(broadcast, carry, batch)
        self.calls.append(("metrics", metrics))
        return carry, metrics

    def finish(self, broadcast: Tree, carry: Tree, data: ClientData) -> tuple[Upload, Tree]:
        self.calls.append(("finish", (broadcast, carry, data)))
        return self.inner.finish(broadcast, carry, data)

    def passes(self, labeled: int, unlabeled: int) -> Passes:
        return self.inner.passes(labeled, unlabeled)


@dataclass(frozen=True)
class RecordingMethod:
    """A method that records the calls of its clients' updates as (function, arguments)."""

    inner: Method
    calls: list[tuple[str, Any]] = field(default_factory=list, compare=False)

    def client_updates(self, task: Task) -> Mapping[str, ClientUpdate]:
        return {
            name: RecordingUpdate(task, inner=client_update, calls=self.calls)
            for name, client_update in self.inner.client_updates(task).items()
        }

    def start(self, task: Task, model: Tree) -> Tree:
        return self.inner.start(task, model)

    def round(self, task: Task, server: Tree, federation: Federation) -> Tree:
        return self.inner.round(task, server, federation)

    def solution(self, task: Task, server: Tree) -> Tree:
        return self.inner.solution(task, server)

    def list_calls(self, function: str) -> list[Any]:
        """Return the recorded arguments of a function in the order of its calls."""
        return [arguments for name, arguments in self.calls if name == function]


@dataclass(frozen=True)
class CountingUpdate(ClientUpdate):
    """Count steps and local updates, add up row numbers and pixels, and upload these sums.

    The loss is NaN at the step that the broadcast names as "failing_step".

    Attributes:
        views: views of unlabeled images whose pixels are added.
        idle_tag: the client with this tag may draw no unlabeled row.
    """

    views: tuple[str, ...] = ()
    idle_tag: int = -1

    @property
    def requirements(self) -> UpdateRequirements:
        names = ("steps", "rows", "pixels", "updates", "tag", "labeled", "unlabeled")
        return UpdateRequirements(self.views, upload_spec=UploadSpec((), (), "one", dict.fromkeys(names, Aux())))

    def begin(self, broadcast: Tree, memory: Tree, data: ClientData) -> Tree:
        zero = torch.zeros((), dtype=torch.float64)
        updates = memory["updates"] if memory else zero
        return {
            "steps": zero,
            "rows": zero,
            "pixels": zero,
            "updates": updates,
            "tag": broadcast["tag"] + broadcast["base"],
        }

    def initial_memory(self, broadcast: Tree, generator: torch.Generator) -> Tree:
        return {"updates": torch.zeros((), dtype=torch.float64)}

    def drawable_rows(self, carry: Tree, data: ClientData) -> Tensor:
        # All rows or none. Computed with tensors only, because under vmap the tag differs between clients.
        return (torch.arange(len(data.u)) >= 0) & (carry["tag"] != self.idle_tag)

    def step(self, broadcast: Tree, carry: Tree, batch: Batch) -> tuple[Tree, StepMetrics]:
        steps = carry["steps"] + 1
        rows = carry["rows"] + batch.x_rows.sum() + (batch.u_rows.sum() if self.views else 0)
        pixels = carry["pixels"] + batch.x.double().sum() + sum(batch.u[name].double().sum() for name in self.views)
        loss = torch.where(steps == broadcast["failing_step"], torch.nan, pixels)
        return {**carry, "steps": steps, "rows": rows, "pixels": pixels}, StepMetrics(loss, {}, ())

    def finish(self, broadcast: Tree, carry: Tree, data: ClientData) -> tuple[Upload, Tree]:
        upload = {**carry, "labeled": data.labeled, "unlabeled": data.unlabeled}
        return Upload({}, torch.ones(()).double(), upload), {"updates": carry["updates"] + 1}

    def passes(self, labeled: int, unlabeled: int) -> Passes:
        return Passes(labeled + unlabeled, labeled)


@dataclass(frozen=True)
class CountingMethod:
    """A method with several queries a round, whose server stores the uploads of the latest round.

    The tag of client k is 100 + k.

    Attributes:
        views: views of unlabeled images.
        queries: queries to all clients in each round.
        idle_tag: tag of a client that may draw no unlabeled row.
        failing_client: number of a client whose loss becomes NaN.
        failing_round: the round in which it does.
        failing_step: the step at which it does.
    """

    views: tuple[str, ...] = ("weak",)
    queries: int = 2
    idle_tag: int = -1
    failing_client: int = -1
    failing_round: int = 0
    failing_step: int = 1

    def client_updates(self, task: Task) -> Mapping[str, ClientUpdate]:
        return {"count": CountingUpdate(task, self.views, self.idle_tag)}

    def start(self, task: Task, model: Tree) -> Tree:
        return {"round": torch.zeros(())}

    def round(self, task: Task, server: Tree, federation: Federation) -> Tree:
        uploads: Tree = {}
        for query in range(self.queries):
            # Step -1 never comes: the loss of all other clients stays finite.
            fails = (federation.cohort == self.failing_client) & (server["round"] == self.failing_round)
            per_client = {"tag": federation.cohort.double(), "failing_step": torch.where(fails, self.failing_step, -1)}
            uploads[f"query{query}"] = federation.query("count", {"base": torch.tensor(100.0)}, per_client).aux
        return {"round": server["round"] + 1, "uploads": uploads}

    def solution(self, task: Task, server: Tree) -> Tree:
        return server


def make_context(broadcast: Tree, clients: int, cohort: int | None = None, **changes: Any) -> AggregationContext:
    """Return the aggregation context of the first query of a run.

    Args:
        broadcast: sent to all clients.
        clients: number of clients that have replied, from client 0.
        cohort: number of clients in the cohort, by default `clients`.
        changes: other fields of the context.
    """
    context = AggregationContext(0, 0, 0, "train", broadcast, {}, tuple(range(clients)), cohort or clients, True)
    return context._replace(**changes)


def collect_tensors(value: Any) -> list[Tensor]:
    """Return all tensors in nested tuples, lists and dicts."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        return list(tree.leaves(value)) if all(isinstance(v, Tensor | dict) for v in value.values()) else []
    if isinstance(value, list | tuple):
        return [leaf for each in value for leaf in collect_tensors(each)]
    return []
