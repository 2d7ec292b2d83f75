"""The clients of one cohort on the machines of a Ray cluster (extra `ray`), with the same bits as one by one.

Each actor takes `threads` processors of a machine and trains one client at a time; functions, clients and results
travel as `halfmoon.runs.worker_main` packs them, so machines need halfmoon, and no folder in common.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

from halfmoon.core.errors import UserError
from halfmoon.engine.spread import Item, Result
from halfmoon.runs.ray_cluster import installed, join
from halfmoon.runs.worker_main import Answer, answered, known, packed, settle, unpacked


class RayWorkers:
    """Actors in a Ray cluster that compute side by side; a `halfmoon.engine.spread.Spread`."""

    def __init__(self, threads: int = 1, most: int = 1) -> None:
        """Reach the cluster that is there (`ray.init`, RAY_ADDRESS, this machine), or start one until `close`.

        There are `most` actors at most. Raise UserError where Ray is not installed, or no cluster answers.
        """
        self._ray, self._threads, self._most = installed(), threads, most
        self._joined = not self._ray.is_initialized()
        if self._joined:
            join(self._ray, None)
        self._actors: list[Any] = []

    def __call__(self, function: Callable[[Item], Result], items: Iterable[Item], /) -> Iterator[Result]:
        """Yield function(item) in the order of the items; what it raises is raised in its place.

        Raise UserError where an actor dies: killed, out of memory, or its machine is gone.
        """
        ray, actors = self._ray, self._started()
        shared = ray.put(packed(function))
        running: deque[Any] = deque()
        turns: deque[Any] = deque(actors)
        busy: dict[Any, Any] = {}  # by what is awaited of it
        for item in items:
            if not turns:
                self._free(turns, busy)
            actor = turns.popleft()
            made = actor.answer.remote(shared, packed(item))
            busy[made] = actor
            running.append(made)
        while running:
            yield self._value(running.popleft())

    def close(self) -> None:
        """End the actors, and leave the cluster where this has joined it."""
        for each in self._actors:
            self._ray.kill(each)
        self._actors = []
        if self._joined:
            self._ray.shutdown()
            self._joined = False

    def _started(self) -> list[Any]:
        """Return an actor for each `threads` processors of each machine."""
        if self._actors:
            return self._actors
        alive = [node["Resources"].get("CPU", 0) for node in self._ray.nodes() if node["Alive"]]
        number = sum(int(each) // self._threads for each in alive)
        if not number:
            raise UserError(
                f"no machine of the Ray cluster has {self._threads} processors; choose fewer --threads, or start one "
                "with: ray start --address=..."
            )
        kind = self._ray.remote(num_cpus=self._threads)(_Actor)
        self._actors = [kind.remote(self._threads, sys.path) for _ in range(min(number, self._most))]
        return self._actors

    def _free(self, turns: deque[Any], busy: dict[Any, Any]) -> None:
        """Wait until an actor has nothing to do."""
        for done in self._ray.wait(list(busy), num_returns=1)[0]:
            turns.append(busy.pop(done))

    def _value(self, made: Any) -> Any:
        try:
            answer = cast(Answer, unpacked(self._ray.get(made)))
        except self._ray.exceptions.RayActorError as error:
            raise UserError(
                "a process of the Ray cluster that trained clients died: killed, out of memory, or its machine is "
                "gone; go on with the run folder."
            ) from error
        if answer.error is not None:
            raise answer.error
        return answer.value


class _Actor:
    """What trains clients on a machine of the cluster."""

    def __init__(self, threads: int, path: list[str]) -> None:
        sys.path += [each for each in path if each not in sys.path]
        settle(threads)
        self._known: tuple[bytes, Any] = (b"", None)

    def answer(self, function: bytes, item: bytes) -> bytes:
        """Return the packed answer of function(item)."""
        if function != self._known[0]:
            self._known = function, known(function)
        return answered(self._known[1], item)
