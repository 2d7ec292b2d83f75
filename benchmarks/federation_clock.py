"""Flower's two apps with a clock inside: what halfmoon itself takes in the processes of `federation_cost.py`.

`server_app` and `client_app` are halfmoon's own. Where the environment names a folder in HALFMOON_CLOCK, they add a
line for each visit of the cohort to server.jsonl there, and one for each answer of a site to site.jsonl.
"""

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from halfmoon.engine import driver
from halfmoon.federation.flower import client_app as clients
from halfmoon.federation.flower import server_app as servers
from halfmoon.federation.flower.link import GridPost
from halfmoon.federation.protocol import messages
from halfmoon.federation.protocol.tree_spec import UplinkSpec
from halfmoon.federation.server import calls, runtime, sessions
from halfmoon.federation.site import client
from halfmoon.storage import atomic_io

LOG = "HALFMOON_CLOCK"
"""A variable of the environment that names the folder where the clocked apps write."""


class Clock:
    """Seconds by name, by the wall clock and of this thread's processor time, of calls that are timed; and bytes."""

    def __init__(self) -> None:
        self.wall: dict[str, float] = {}
        self.cpu: dict[str, float] = {}
        self.bytes = 0

    def timed(self, name: str, call: Callable[..., Any], done: Callable[[], None] | None = None) -> Callable[..., Any]:
        """Return `call`, timed under a name; `done` is called after it."""

        def run(*words: Any, **named: Any) -> Any:
            began = time.perf_counter(), time.thread_time()
            try:
                return call(*words, **named)
            finally:
                self.wall[name] = self.wall.get(name, 0.0) + time.perf_counter() - began[0]
                self.cpu[name] = self.cpu.get(name, 0.0) + time.thread_time() - began[1]
                if done is not None:
                    done()

        return run

    def write(self, file: str) -> None:
        """Add what was timed to a file, and begin anew."""
        path = Path(os.environ[LOG], file)
        atomic_io.append(path, (json.dumps({"wall": self.wall, "cpu": self.cpu, "bytes": self.bytes}) + "\n").encode())
        self.wall, self.cpu, self.bytes = {}, {}, 0


def clocked_server() -> None:
    """Time what the server does of its own in this process: a line a visit of the cohort."""
    clock = Clock()
    for name in ("nodes", "send", "collect"):
        setattr(GridPost, name, clock.timed("Flower", getattr(GridPost, name)))
    original = sessions.Clock
    sessions.Clock = lambda: original(sleep=clock.timed("asleep", time.sleep))  # type: ignore[assignment]
    UplinkSpec.of = clock.timed("patterns", UplinkSpec.of)  # type: ignore[method-assign]
    messages.scan, messages.write = clock.timed("read", messages.scan), clock.timed("write", messages.write)
    for name in ("check_schema", "check_counts", "norms"):
        setattr(calls, name, clock.timed("checks", getattr(calls, name)))
    exchange = sessions.ClientManager.exchange

    def counted(self: sessions.ClientManager, requests: Mapping[str, bytes], what: str) -> dict[str, sessions.Answer]:
        answers = exchange(self, requests, what)
        clock.bytes += sum(map(len, requests.values())) + sum(len(each.data or b"") for each in answers.values())
        return answers

    sessions.ClientManager.exchange = counted  # type: ignore[method-assign]
    original = runtime.RemoteRuntime._visit

    def whole(*given: Any) -> Iterator[Any]:
        """Visit all, so that the time is that of the visit."""
        return iter(list(original(*given)))

    visit = clock.timed("visit", whole, lambda: clock.write("server.jsonl"))
    runtime.RemoteRuntime._visit = visit  # type: ignore[method-assign]


def clocked_site() -> None:
    """Time what a site does of its own in this process: a line an answer."""
    clock = Clock()
    driver.update_together = clock.timed("method", driver.update_together)  # type: ignore[method-assign]
    client.SiteClient._runtime = clock.timed("open images", client.SiteClient._runtime)  # type: ignore[method-assign]
    messages.scan, messages.write = clock.timed("read", messages.scan), clock.timed("write", messages.write)
    client.SiteClient._say = clock.timed("log", client.SiteClient._say)  # type: ignore[method-assign]
    answer = clock.timed("answer", client.SiteClient.answer, lambda: clock.write("site.jsonl"))
    client.SiteClient.answer = answer  # type: ignore[method-assign]


if LOG in os.environ:
    clocked_server()
    clocked_site()
# One statement each: Flower looks for them without running this.
server_app = servers.app
client_app = clients.app
