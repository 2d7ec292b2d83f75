"""The two processes of a site: a node that polls the server for messages, and a worker that replies to them.

No code of the server is executed: its app bundle is not unpacked, and the worker runs the app that is installed at the
site. A run with another bundle than that of the terms is refused, with Flower's error code for it. The worker imports
its modules and opens the site's images once. If it dies, the node sends an error at once and starts another worker.
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
"""File in the folder of a site's processes with their options. The site's log is in the folder above."""

APP_FAILED = 2
WRONG_BUNDLE = 7
WORKER_DIED = 8
"""Codes of Flower's `ErrorCode`."""

MIN_POLL_SECONDS = 0.1
MAX_POLL_SECONDS = 3.0
"""Bounds of the time between two polls."""

IDLE_SHARE = 0.5
"""Time between two polls as a share of the time since the last reply.

A round has several messages to the same sites, so a site that has just replied is likely to get the next message soon. An
idle site polls as rarely as Flower's node.
"""


def poll_delay(idle_seconds: float) -> float:
    """Compute the seconds until the next poll of a site, from the seconds since its last reply."""
    return min(MAX_POLL_SECONDS, max(MIN_POLL_SECONDS, IDLE_SHARE * idle_seconds))


def run_node(folder: Path) -> int:
    """Poll the server for messages until the connection ends, and return the exit code."""
    options = atomic_io.read_json(folder / NODE_FILE) or {}
    ca, key = (None if options[name] is None else Path(options[name]) for name in ("ca", "key"))
    worker = Worker(options["apps"][1])
    checker = BundleChecker(tuple(options["apps"]), EventLog(folder.parent / SITE_LOG))
    try:
        with interruptible(), internals.connect_fleet(options["server"], ca, key) as fleet:
            worker.start()
            _reply_forever(fleet, worker, checker, options["config"])
    except KeyboardInterrupt:
        internals.print_line("told to end")
    finally:
        worker.stop()
    return 1


def _reply_forever(fleet: Fleet, worker: "Worker", checker: "BundleChecker", config: dict[str, Any]) -> None:
    last_reply = time.monotonic()
    while True:
        packet = fleet.receive()
        if packet is None:
            time.sleep(poll_delay(time.monotonic() - last_reply))
            continue
        internals.print_line(MESSAGE_RECEIVED)
        start = time.monotonic()
        fault = checker.find_fault(fleet, packet.message.metadata.run_id)
        if fault is not None:
            reply = internals.error_reply(packet.message, WRONG_BUNDLE, "another program")
        else:
            reply = worker.reply_to(packet, config)
        last_reply = time.monotonic()
        if fleet.send(reply, last_reply - start):
            internals.print_line(REPLY_SENT)


class BundleChecker:
    """Check the app bundle of each run of a server; a run with another one than that of the terms is logged once."""

    def __init__(self, apps: tuple[str, ...], log: EventLog) -> None:
        self.apps = apps
        self.log = log
        self._faults: dict[int, str | None] = {}

    def find_fault(self, fleet: Fleet, run: int) -> str | None:
        """Find the reason to refuse a run; None if its bundle is that of the terms."""
        if run not in self._faults:
            fault = None
            try:
                content = fleet.bundle(run)
                if content is None:  # the run is over
                    return None
                bundle.check_bundle(content, self.apps)
            except ForeignBundle as error:
                fault = str(error)
            if fault is not None and fault not in self._faults.values():
                with suppress(OSError):  # a full disk does not change the refusal
                    text = f"refused: the server wants another program executed here than the agreed one: {fault}"
                    self.log.record("program_refused", text)
            self._faults[run] = fault
        return self._faults[run]


class Worker:
    """The worker process, as used by the node. It imports the app while the node waits for the first message."""

    def __init__(self, app: str) -> None:
        self.app = app
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the process, unless it is alive."""
        if self.process is not None and self.process.poll() is None:
            return
        self.link, worker_end = Pipe()
        with worker_end:
            number = worker_end.fileno()
            self.process = subprocess.Popen([*command(WORKER), str(number), self.app], pass_fds=[number])

    def reply_to(self, packet: Packet, config: dict[str, Any]) -> Packet:
        """Get the worker's reply to a message; an error if the worker has died."""
        self.start()
        try:
            _send(self.link, [atomic_io.json_line({"config": config}), *internals.to_frames(packet)])
            return internals.from_frames(_receive(self.link))
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
    """Reply to the messages in a pipe until the node ends.

    Args:
        number: the file number of the pipe.
        app: the ClientApp, as module:attribute.
    """
    module, attribute = app.split(":")
    client_app = getattr(importlib.import_module(module), attribute)
    with Connection(int(number)) as link, suppress(EOFError):
        while True:
            options, *frames = _receive(link)
            config = atomic_io.parse_json(options)["config"]
            _send(link, internals.to_frames(_reply_to(client_app, internals.from_frames(frames), config)))
    return 0


def _reply_to(app: Callable[..., Any], packet: Packet, config: dict[str, Any]) -> Packet:
    try:
        message = internals.unpack_message(packet)
        return internals.pack_message(app(message, internals.app_context(message, config)))
    except Exception as error:  # without an error reply the server would wait until its timeout
        traceback.print_exc()
        return internals.error_reply(packet.message, APP_FAILED, type(error).__name__)


def _send(link: Connection, frames: Sequence[bytes]) -> None:
    link.send_bytes(str(len(frames)).encode())
    for frame in frames:
        link.send_bytes(frame)


def _receive(link: Connection) -> list[bytes]:
    return [link.recv_bytes() for _ in range(int(link.recv_bytes()))]


if __name__ == "__main__":
    folder = claim_lock(sys.argv[1])
    sys.exit(run_node(folder) if sys.argv[1] == SUPERNODE else run_worker(*sys.argv[2:]))
