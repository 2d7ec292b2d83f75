"""The two processes of a site: a node that asks the server for messages, and a worker that answers them.

Nothing that a server sends is executed: no app bundle is unpacked, and the worker has the app that is installed here. A
run of another bundle than the agreed one is refused, with Flower's error for that. The worker imports everything and
opens the site's images once; where it dies over a message the server is told at once, and the next one gets another.
"""

import importlib
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from halfmoon.federation.protocol import bundle
from halfmoon.federation.protocol.bundle import ForeignBundle
from halfmoon.federation.transport import internals
from halfmoon.federation.transport.internals import MESSAGE_RECEIVED, REPLY_SENT, Fleet, Packet
from halfmoon.federation.transport.processes import SUPERNODE, WORKER, claim_lock, command, interruptible
from halfmoon.storage import atomic_io
from halfmoon.storage.events import SITE_LOG, EventLog

NODE_FILE = "node.json"
"""The file in the folder of a site's processes with all that they have to know; and above it, the site's log."""

APP_FAILED, WRONG_BUNDLE, WORKER_DIED = 2, 7, 8
"""Codes of Flower's `ErrorCode`: the app failed, the bundle is another one, the worker died."""

SHORTEST, LONGEST, SHARE = 0.1, 3.0, 0.5
"""Seconds between two polls, at least and at most, and the share of the time since the last answer that lies between.

A round is several messages to the same sites, so one that has just answered is likely to be asked again at once; an
idle site burdens its server as Flower's own would.
"""


def poll_delay(idle: float) -> float:
    """Return the seconds until the next poll of a site that has been idle for so long."""
    return min(LONGEST, max(SHORTEST, SHARE * idle))


def run_node(folder: Path) -> int:
    """Ask the server for messages until the connection ends, and return the exit code."""
    facts = atomic_io.read_json(folder / NODE_FILE) or {}
    ca, key = (None if facts[name] is None else Path(facts[name]) for name in ("ca", "key"))
    worker = Worker(facts["apps"][1])
    checker = BundleChecker(tuple(facts["apps"]), EventLog(folder.parent / SITE_LOG))
    try:
        with interruptible(), internals.connect_fleet(facts["server"], ca, key) as fleet:
            worker.start()
            _loop(fleet, worker, checker, facts["config"])
    except KeyboardInterrupt:
        internals.print_line("told to end")
    finally:
        worker.stop()
    return 1


def _loop(fleet: Fleet, worker: "Worker", checker: "BundleChecker", config: dict[str, Any]) -> None:
    last = time.monotonic()
    while True:
        packet = fleet.receive()
        if packet is None:
            time.sleep(poll_delay(time.monotonic() - last))
            continue
        internals.print_line(MESSAGE_RECEIVED)
        begin = time.monotonic()
        foreign = checker.find_fault(fleet, packet.message.metadata.run_id)
        if foreign is not None:
            answer = internals.error_reply(packet.message, WRONG_BUNDLE, "another program")
        else:
            answer = worker.answer(packet, config)
        last = time.monotonic()
        if fleet.send(answer, last - begin):
            internals.print_line(REPLY_SENT)


class BundleChecker:
    """The runs of a server: each of another bundle than the agreed one is refused, and the log says why, once."""

    def __init__(self, apps: tuple[str, ...], log: EventLog) -> None:
        self.apps, self.log = apps, log
        self._faults: dict[int, str | None] = {}

    def find_fault(self, fleet: Fleet, run: int) -> str | None:
        """Return why a run is refused, None where it is not."""
        if run not in self._faults:
            fault = None
            try:
                content = fleet.bundle(run)
                if content is None:  # its run is over, and nobody reads the answer
                    return None
                bundle.check_bundle(content, self.apps)
            except ForeignBundle as error:
                fault = str(error)
            if fault is not None and fault not in self._faults.values():
                with suppress(OSError):  # a full disk: it is refused all the same
                    text = f"refused: the server wants another program executed here than the agreed one: {fault}"
                    self.log.record("program_refused", text)
            self._faults[run] = fault
        return self._faults[run]


class Worker:
    """The process that answers, as the node sees it; it imports `app` while the first message is waited for."""

    def __init__(self, app: str) -> None:
        self.app = app
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the process, where there is none that lives."""
        if self.process is not None and self.process.poll() is None:
            return
        self.link, end = Pipe()
        with end:
            number = end.fileno()
            self.process = subprocess.Popen([*command(WORKER), str(number), self.app], pass_fds=[number])

    def answer(self, packet: Packet, config: dict[str, Any]) -> Packet:
        """Return the worker's answer to a message; that of a worker that has died says so."""
        self.start()
        try:
            _send(self.link, [atomic_io.json_line({"config": config}), *internals.to_frames(packet)])
            return internals.from_frames(_get(self.link))
        except (OSError, EOFError):
            self.stop()
            self.start()
            return internals.error_reply(packet.message, WORKER_DIED, "its process died")

    def stop(self) -> None:
        """End the process at once."""
        if self.process is not None:
            self.link.close()
            self.process.kill()
            self.process.wait()


def run_worker(number: str, app: str) -> int:
    """Answer the messages that come through a pipe, until the node is gone."""
    module, attribute = app.split(":")
    client_app = getattr(importlib.import_module(module), attribute)
    with Connection(int(number)) as link, suppress(EOFError):
        while True:
            facts, *frames = _get(link)
            config = atomic_io.parse_json(facts)["config"]
            _send(link, internals.to_frames(_answer(client_app, internals.from_frames(frames), config)))
    return 0


def _answer(app: Callable[..., Any], packet: Packet, config: dict[str, Any]) -> Packet:
    try:
        message = internals.unpack_message(packet)
        return internals.pack_message(app(message, internals.app_context(message, config)))
    except Exception as error:  # whatever it is, the server has to hear that no answer will come
        traceback.print_exc()
        return internals.error_reply(packet.message, APP_FAILED, type(error).__name__)


def _send(link: Connection, frames: Sequence[bytes]) -> None:
    link.send_bytes(str(len(frames)).encode())
    for frame in frames:
        link.send_bytes(frame)


def _get(link: Connection) -> list[bytes]:
    return [link.recv_bytes() for _ in range(int(link.recv_bytes()))]


if __name__ == "__main__":
    place = claim_lock(sys.argv[1])
    sys.exit(run_node(place) if sys.argv[1] == SUPERNODE else run_worker(*sys.argv[2:]))
