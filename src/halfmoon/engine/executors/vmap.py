"""The executor that trains clients in groups, each batched by `torch.func.vmap`."""

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from fractions import Fraction
from functools import partial

from halfmoon.api.types import ClientUpdate
from halfmoon.engine.driver import ClientResult, ClientTask
from halfmoon.engine.executors.base import AnyTask, Executor, Item, Result, WorkerDied
from halfmoon.engine.executors.serial import SerialExecutor
from halfmoon.engine.groups import MAX_PADDING, group_clients


class VmapExecutor(Executor):
    """Trains clients in groups, each batched by `torch.func.vmap`; another executor computes the groups.

    Clients of a group have equal keys (`ClientTask.group_key`) and similar sizes (`group_clients`). A client without such
    another one trains by itself, without vmap.
    """

    def __init__(
        self,
        inner: Executor | None = None,
        max_group_size: int | None = None,
        max_padding: Fraction = MAX_PADDING,
    ) -> None:
        """Create an executor of groups.

        Args:
            inner: computes the groups, and everything that is no client; None for this process.
            max_group_size: the largest number of clients in a group; None for no limit.
            max_padding: the largest share of padding in a group (`group_clients`).
        """
        self.inner = SerialExecutor() if inner is None else inner
        self.max_group_size = max_group_size
        self.max_padding = max_padding

    def map(self, function: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
        return self.inner.map(function, items)

    def run_tasks(
        self, function: Callable[[AnyTask], Result], tasks: Sequence[AnyTask]
    ) -> Generator[tuple[AnyTask, Result | WorkerDied]]:
        return self.inner.run_tasks(function, tasks)

    def run_clients(
        self,
        tasks: Iterable[ClientTask],
        client_update: ClientUpdate,
        train_one: Callable[[ClientTask], ClientResult],
        train_group: Callable[[Sequence[ClientTask]], Sequence[ClientResult]],
    ) -> Iterator[ClientResult]:
        order: deque[int] = deque()  # the clients whose results have not been yielded, in the order of the tasks

        def note_client(task: ClientTask) -> ClientTask:
            order.append(task.client)
            return task

        results: dict[int, ClientResult] = {}
        groups = self._make_groups(client_update, map(note_client, tasks))
        for group_results in self.inner.map(partial(_train_by_number, train_one, train_group), groups):
            results |= group_results
            group_results.clear()  # the map may hold a reference to the dictionary while the next group trains
            # Groups finish in another order than that of the tasks: a result waits until all before it are yielded.
            while order and order[0] in results:
                yield results.pop(order.popleft())

    def _make_groups(self, client_update: ClientUpdate, tasks: Iterable[ClientTask]) -> Iterator[list[ClientTask]]:
        """Yield the groups of clients that train together.

        Tasks with equal keys are collected up to the largest group size and then divided by size (`group_clients`).

        Args:
            client_update: the update that they run.
            tasks: the clients' tasks, which are created one by one, so that only those of unfinished groups need memory.
        """
        waiting: dict[tuple[object, ...], list[ClientTask]] = {}  # clients that are not yet in a group, by key
        pending: deque[list[ClientTask]] = deque()  # groups that are complete
        for task in tasks:
            key = task.group_key
            waiting.setdefault(key, []).append(task)
            del task  # free the task as soon as its group has trained
            if len(waiting[key]) == self.max_group_size:
                pending.extend(self._divide(client_update, waiting.pop(key)))
            while pending:
                yield pending.popleft()
        # No client is left to join those that wait: they form the last groups of their keys.
        while waiting:
            pending.extend(self._divide(client_update, waiting.pop(next(iter(waiting)))))
            while pending:
                yield pending.popleft()

    def _divide(self, client_update: ClientUpdate, tasks: list[ClientTask]) -> list[list[ClientTask]]:
        """Divide tasks with equal keys into groups of similar size."""
        sizes = [task.work_size for task in tasks]
        groups = group_clients(client_update, sizes, self.max_padding)
        return [[tasks[position] for position in group] for group in groups]

    def close(self) -> None:
        self.inner.close()


def _train_by_number(
    train_one: Callable[[ClientTask], ClientResult],
    train_group: Callable[[Sequence[ClientTask]], Sequence[ClientResult]],
    tasks: Sequence[ClientTask],
) -> dict[int, ClientResult]:
    """Train the clients of a group, and return their results by the number of the client."""
    if len(tasks) == 1:
        return {tasks[0].client: train_one(tasks[0])}  # for one client vmap would only add overhead
    return {task.client: result for task, result in zip(tasks, train_group(tasks), strict=True)}
