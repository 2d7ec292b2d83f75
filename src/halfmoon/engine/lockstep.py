"""Several runs in lockstep: the clients that they ask the same at the same time train as one program.

Each run has a thread of its own, and one thread computes at a time: a run, until it asks its clients or is over, then
the one that called, which trains the clients of all runs. Runs that are alike but for their seeds ask alike, round by
round; one that has to catch up does so alone while the others wait, and one that is over, or fails, leaves the others
their way.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from fractions import Fraction
from threading import Event, Semaphore, Thread
from typing import Any, Generic, NamedTuple, TypeVar, cast

from halfmoon.api.types import ClientUpdate
from halfmoon.core import tree
from halfmoon.core.errors import one_line
from halfmoon.core.tree import Tree
from halfmoon.engine.driver import ClientResult, ClientTask, Query, update_joint
from halfmoon.engine.evaluation import Item, Result, Spread
from halfmoon.engine.programs import PADDED, grouped

Value = TypeVar("Value")
Results = dict[int, ClientResult]


class Request(NamedTuple):
    """A query of one run, and its clients in the programs in which they would train without company."""

    query: Query
    programs: list[list[ClientTask]]


def lockstep(
    plays: Sequence[Callable[[Spread], Value]], most: int | None = None, padded: Fraction = PADDED
) -> list[Value]:
    """Play runs, each of which trains its clients through the `Spread` that it is given; return what they return.

    Clients of different runs train as one program where their works are equal and they are of one kind, about `most` at
    a time (None: all) and with a share `padded` of padding at most; a run without company computes what it would alone,
    bit by bit. The first exception that a run has raised is raised when the others are over; one that is no
    `Exception`, such as KeyboardInterrupt, ends all.
    """
    runs = [_Run(play) for play in plays]
    try:
        for run in runs:
            run.go_on()
        while waiting := [run for run in runs if run.request is not None]:
            first = min(_when(run.request) for run in waiting)
            group = [run for run in waiting if _when(run.request) == first]
            requests = [cast(Request, run.request) for run in group]
            for run, answer in zip(group, _answers(requests, most, padded), strict=True):
                run.go_on(answer)
    finally:
        for run in runs:
            run.stop()
    for run in runs:
        if run.error is not None:
            raise run.error
    return [cast(Value, run.value) for run in runs]


class _Stopped(BaseException):
    """Ends the thread of a run that does not go on."""


class _Run(Generic[Value]):
    """A run in a thread of its own, which moves between two queries while nobody else does."""

    def __init__(self, play: Callable[[Spread], Value]) -> None:
        """Take note of the run; it begins when it may `go_on`."""
        self.request: Request | None = None
        self.value: Value | None = None
        self.error: BaseException | None = None
        self._answer: Results | Exception | None = None
        self._play, self._stopping = play, False
        self._turn, self._still = Semaphore(0), Event()
        self._thread = Thread(target=self._run, daemon=True)
        self._thread.start()

    def go_on(self, answer: Results | Exception | None = None) -> None:
        """Let the run move, with what came of its clients, until it asks again or is over.

        Raise what it has raised where that is no `Exception`.
        """
        self._answer, self.request = answer, None
        self._still.clear()
        self._turn.release()
        self._still.wait()
        if self.error is not None and not isinstance(self.error, Exception):
            raise self.error

    def stop(self) -> None:
        """End the run where it stands, or as soon as it asks; its folder is then free."""
        self._stopping = True
        self._turn.release()
        self._thread.join()

    def _run(self) -> None:
        try:
            self._await_turn()
            self.value = self._play(self._spread)
        except _Stopped:
            pass
        except BaseException as error:
            self.error = error
        finally:
            self._still.set()

    def _await_turn(self) -> None:
        self._turn.acquire()
        if self._stopping:
            raise _Stopped

    def _spread(self, function: Callable[[Item], Result], items: Iterable[Item], /) -> Iterator[Result]:
        """Have clients trained with those of the other runs; compute anything else here (a `Spread`)."""
        if not isinstance(function, Query):
            return map(function, items)
        self.request = Request(function, cast("list[list[ClientTask]]", list(items)))
        self._still.set()
        self._await_turn()
        answer, self._answer = self._answer, None
        if isinstance(answer, Exception):
            raise answer
        return iter([cast(Result, answer)])


def _when(request: Request | None) -> tuple[int, int]:
    context = cast(Request, request).query.context
    return context.round, context.query


def _answers(requests: Sequence[Request], most: int | None, padded: Fraction) -> list[Results | Exception]:
    """Return what comes of the clients of every run, or what they raise.

    Where one program for all fails, each run's clients train apart: who has failed then fails alone. Where nobody has,
    it was the program, too large for the memory perhaps, and a warning says so.
    """
    failed: Exception | None = None
    if len(requests) > 1:
        try:
            return list(_joint(requests, most, padded))
        except Exception as error:
            failed = error
    answers = [_apart(each) for each in requests]
    if failed is not None and not any(isinstance(each, Exception) for each in answers):
        words = f"Seeds train one by one, which takes longer: one program for all failed ({one_line(failed)})."
        warnings.warn(words, RuntimeWarning, stacklevel=2)
    return answers


def _apart(request: Request) -> Results | Exception:
    """Return what comes of a run's clients in its own programs."""
    results: Results = {}
    try:
        for tasks in request.programs:
            results |= request.query(tasks)
    except Exception as error:
        return error
    return results


def _joint(requests: Sequence[Request], most: int | None, padded: Fraction) -> list[Results]:
    """Return what comes of the clients of every run, in programs of clients of several runs."""
    results: list[Results] = [{} for _ in requests]
    for part in _parts(requests, most, padded):
        if len({run for run, _ in part}) == 1:
            run = part[0][0]
            results[run] |= requests[run].query([task for _, task in part])
            continue
        outcomes = update_joint([(requests[run].query, task) for run, task in part])
        for (run, task), result in zip(part, outcomes, strict=True):
            results[run][task.client] = result
    return results


def _parts(requests: Sequence[Request], most: int | None, padded: Fraction) -> Iterator[list[tuple[int, ClientTask]]]:
    """Yield the clients of each program: about `most`, of one kind, and not too unlike in size (`grouped`)."""
    for kin in _alike(requests):
        client_update = requests[kin[0][0]].query.context.client_update
        for places in grouped(client_update, [task.extent for _, task in kin], padded):
            group = [kin[place] for place in places]
            count = max(1, round(len(group) / most)) if most else 1
            yield from (group[k * len(group) // count : (k + 1) * len(group) // count] for k in range(count))


def _alike(requests: Sequence[Request]) -> Iterable[list[tuple[int, ClientTask]]]:
    """Return the clients, with the numbers of their runs, in groups of those that can train as one program."""
    client_updates: list[ClientUpdate] = []
    groups: dict[tuple[Any, ...], list[tuple[int, ClientTask]]] = {}
    for run, (query, programs) in enumerate(requests):
        if query.context.client_update not in client_updates:
            client_updates.append(query.context.client_update)
        shared = client_updates.index(query.context.client_update), _shapes(query.broadcast)
        for task in (task for tasks in programs for task in tasks):
            groups.setdefault((*shared, _shapes(task.private), task.kind), []).append((run, task))
    return groups.values()


def _shapes(broadcast: Tree) -> tuple[tuple[str, Any, Any], ...]:
    return tuple(sorted((path, leaf.shape, str(leaf.dtype)) for path, leaf in tree.flatten(broadcast).items()))
