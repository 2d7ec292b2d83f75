"""The interface of executors, which decide where and how work is computed.

There are four, each in its module:

| executor | module | work is computed |
|---|---|---|
| `SerialExecutor` | `serial` | item by item in this process |
| `VmapExecutor` | `vmap` | clients in groups, each batched by `torch.func.vmap`; the groups by another executor |
| `ProcessExecutor` | `processes` | in several processes on this machine |
| `RayExecutor` | `ray_cluster` | in processes on the machines of a Ray cluster |

A new executor implements `map` and `run_tasks`. Its results must not depend on where they are computed: the serial
executor, processes and Ray give the same bytes, and `VmapExecutor` differs from them by rounding only.
`halfmoon.runs.workers` chooses executors: `open_executor` that of a run, `make_sweep_executor` that of a sweep.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from halfmoon.api.types import ClientUpdate
from halfmoon.engine.driver import ClientResult, ClientTask

Item = TypeVar("Item")
Result = TypeVar("Result")

MAX_ATTEMPTS = 3
"""How often a task is started before it counts as failed because its worker died."""


class ExecutorTask(Protocol):
    """A task that runs on its own, such as a run of a sweep: plain data that can be sent to another machine."""

    @property
    def name(self) -> str:
        """The name in lists of tasks."""
        ...

    @property
    def uses_gpu(self) -> bool:
        """Whether the task computes on a GPU if its machine has one."""
        ...


AnyTask = TypeVar("AnyTask", bound=ExecutorTask)


@dataclass(frozen=True)
class WorkerDied:
    """The result of a task whose worker has died `MAX_ATTEMPTS` times; `reason` is a sentence."""

    reason: str


class Executor(ABC):
    """Computes functions of items: the local updates of clients, batches of test images, or the runs of a sweep."""

    @abstractmethod
    def map(self, function: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
        """Yield function(item) in the order of the items, as the built-in `map` does.

        Items are read as late as possible and no result is retained, because each may be as large as a model. An
        exception of the function is raised at its item.

        Args:
            function: the function. Executors with processes send it to each of them.
            items: the items.

        Raises:
            UserError: a worker has died.
        """

    @abstractmethod
    def run_tasks(
        self, function: Callable[[AnyTask], Result], tasks: Sequence[AnyTask]
    ) -> Generator[tuple[AnyTask, Result | WorkerDied]]:
        """Yield each task with function(task) as soon as it is finished, in any order.

        A task may take days, so one whose worker dies is started again, up to `MAX_ATTEMPTS` times, and the others go
        on. If the iteration is stopped, so are the tasks.

        Args:
            function: runs a task, and continues from what an earlier attempt has stored.
            tasks: the tasks.
        """

    def run_clients(
        self,
        tasks: Iterable[ClientTask],
        client_update: ClientUpdate,
        train_one: Callable[[ClientTask], ClientResult],
        train_group: Callable[[Sequence[ClientTask]], Sequence[ClientResult]],
    ) -> Iterator[ClientResult]:
        """Yield the results of the local updates of clients, in the order of the tasks.

        Here each client trains by itself. `VmapExecutor` chooses groups of clients that train together.

        Args:
            tasks: the clients' images, memories and numbers of steps; each is created when it is read.
            client_update: the update that the clients run, whose cost decides which of them form a group.
            train_one: trains one client.
            train_group: trains several clients at once, and returns their results in the order of the tasks.
        """
        return self.map(train_one, tasks)

    def close(self) -> None:
        """Free processes and connections, without waiting for their work."""
        return
