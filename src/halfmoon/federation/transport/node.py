"""The two processes of a site: a node that polls the server for messages, and a worker that replies to them.

No code of the server is executed: its app bundle is not unpacked, and the worker runs the app that is installed at the
site. A run with another bundle than that of the terms is refused, with Flower's error code for it. The worker imports
its modules and opens the site's images once. If it dies, the node sends an error at once and starts another worker.

The node reads and writes messages of Flower. Between the two processes there are only the bytes of halfmoon's messages.
"""

import importlib
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

from flwr.app import Error, Message, RecordDict

from halfmoon.federation.protocol import bundle
from halfmoon.federation.protocol.bundle import ForeignBundle
from halfmoon.federation.transport import internals
from halfmoon.federation.transport.internals import MESSAGE_RECEIVED, REPLY_SENT, Fleet
from halfmoon.federation.transport.processes import NODE_FILE, SUPERNODE, WORKER, claim_lock, command, interruptible
from halfmoon.federation.transport.records import unwrap_message, wrap_message
from halfmoon.storage import atomic_io
from halfmoon.storage.events import SITE_LOG, EventLog

APP_FAILED = 2
WRONG_BUNDLE = 7
WORKER_DIED = 8
"""Codes of Flower's `ErrorCode`."""

FAILED = b""
"""What the worker sends instead of a reply if the app has failed. A message of halfmoon has at least its header."""

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
    """Run the node of a site: poll the server for messages, have a worker process reply, until the connection ends.

    Args:
        folder: the folder of the site's processes, with the file of options.

    Returns:
        The exit code of the process: 1, because a node has no end. The site's main process decides when its
        participation is over; until then it restarts the node.
    """
    options = atomic_io.read_json(folder / NODE_FILE) or {}
    ca = None if options["ca"] is None else Path(options["ca"])
    key = None if options["key"] is None else Path(options["key"])
    _server_app, client_app = options["apps"]  # import paths, which the server's bundle must name
    worker = Worker(client_app, options["config"])
    checker = BundleChecker(tuple(options["apps"]), EventLog(folder.parent / SITE_LOG))
    try:
        with interruptible(), internals.connect_fleet(options["server"], ca, key) as fleet:
            worker.start()
            _reply_forever(fleet, worker, checker)
    except KeyboardInterrupt:
        internals.print_line("told to end")
    finally:
        worker.stop()
    return 1


def _reply_forever(fleet: Fleet, worker: "Worker", checker: "BundleChecker") -> None:
    """Poll the server and reply to each message, until an exception ends the process.

    Args:
        fleet: the connection to the server.
        worker: computes replies in another process.
        checker: finds runs whose program is not the one that the site's people agreed to; these get an error.
    """
    last_reply = time.monotonic()
    while True:
        message = fleet.receive()
        if message is None:
            time.sleep(poll_delay(time.monotonic() - last_reply))
            continue
        internals.print_line(MESSAGE_RECEIVED)
        start = time.monotonic()
        if checker.find_fault(fleet, message.metadata.run_id) is not None:
            content: RecordDict | Error = Error(WRONG_BUNDLE, "another program")
        elif not message.has_content():
            content = Error(APP_FAILED, "there is nothing in the message")
        else:
            try:
                content = worker.reply_to(message.content)
            except WorkerError as error:
                # A failure is sent as an error, so that the server does not wait for a reply until its timeout.
                content = Error(error.code, str(error))
        last_reply = time.monotonic()
        if fleet.send(Message(content, reply_to=message), last_reply - start):
            internals.print_line(REPLY_SENT)


class BundleChecker:
    """Check the app bundle of each run of a server; a run with another one than that of the terms is logged once."""

    def __init__(self, apps: tuple[str, ...], log: EventLog) -> None:
        self.apps = apps
        self.log = log
        self._faults: dict[int, str | None] = {}

    def find_fault(self, fleet: Fleet, run: int) -> str | None:
        """Find the reason to refuse a run of Flower, whose bundle is the program that its server wants executed.

        Args:
            fleet: the connection to the server.
            run: the id of the run.

        Returns:
            The reason; None if the bundle is that of the terms. Results are cached by run.
        """
        if run in self._faults:
            return self._faults[run]
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
        return fault


class WorkerError(Exception):
    """A worker has no reply to a message.

    Attributes:
        code: one of Flower's `ErrorCode`.
    """

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code = code


class Worker:
    """The worker process, as used by the node. It imports the app while the node waits for the first message."""

    def __init__(self, app: str, config: Mapping[str, str]) -> None:
        """Prepare to run an app in another process, which `start` starts.

        Args:
            app: Flower's ClientApp, as module:attribute.
            config: options of the site's app.
        """
        self.app = app
        self.config = config
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the worker process with a pipe to it, unless it is alive."""
        if self.process is not None and self.process.poll() is None:
            return
        self.link, worker_end = Pipe()
        with worker_end:  # closed in this process, so that reading from the pipe fails when the worker dies
            file_number = worker_end.fileno()
            self.process = subprocess.Popen([*command(WORKER), str(file_number), self.app], pass_fds=[file_number])
        self.link.send_bytes(atomic_io.json_line(dict(self.config)))

    def reply_to(self, content: RecordDict) -> RecordDict:
        """Have the worker process compute the reply to a message of halfmoon.

        Args:
            content: the record with the serialized message. It is emptied, as the model in it need not be in memory
                while the worker trains.

        Returns:
            The record with the serialized reply.

        Raises:
            WorkerError: the app has failed, or the worker has died, which is then restarted for the next message.
        """
        try:
            self.start()
            self.link.send_bytes(unwrap_message(content))
            content.clear()
            reply = self.link.recv_bytes()
        except (OSError, EOFError) as error:
            self.stop()
            self.start()
            raise WorkerError(WORKER_DIED, "its process died") from error
        if reply == FAILED:
            raise WorkerError(APP_FAILED, "its program failed")
        return wrap_message(reply)

    def stop(self) -> None:
        """End the process at once."""
        if self.process is not None:
            self.link.close()
            self.process.kill()
            self.process.wait()


def run_worker(number: str, app: str) -> int:
    """Run the worker process of a site: read messages from a pipe and write replies to it, until the node ends.

    The function `open_client` in the module of the site's ClientApp opens the client that replies. The ClientApp itself,
    which passes messages of Flower to such a client, is for programs of Flower.

    Args:
        number: the file number of the pipe.
        app: Flower's ClientApp, as module:attribute.

    Returns:
        The exit code of the process.
    """
    module = importlib.import_module(app.split(":")[0])
    with Connection(int(number)) as link, suppress(EOFError):
        client = module.open_client(atomic_io.parse_json(link.recv_bytes()))
        while True:
            data = link.recv_bytes()
            try:
                reply = client.reply_to(data)
            except Exception:
                traceback.print_exc()
                reply = FAILED  # without any reply the server would wait until its timeout
            link.send_bytes(reply)
            del data, reply  # the last model need not be in memory while the worker waits
    return 0


if __name__ == "__main__":
    folder = claim_lock(sys.argv[1])
    sys.exit(run_node(folder) if sys.argv[1] == SUPERNODE else run_worker(*sys.argv[2:]))
