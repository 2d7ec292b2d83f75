"""The executor that computes one item after another in this process."""

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence

from halfmoon.engine.executors.base import AnyTask, Executor, Item, Result, WorkerDied


class SerialExecutor(Executor):
    """Computes one item after another in this process."""

    def map(self, function: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
        return map(function, items)

    def run_tasks(
        self, function: Callable[[AnyTask], Result], tasks: Sequence[AnyTask]
    ) -> Generator[tuple[AnyTask, Result | WorkerDied]]:
        for task in tasks:
            yield task, function(task)
