"""`halfmoon serve`: run Flower's SuperLink and the ServerApp, and restart them until the run is finished."""

import errno
import json
import re
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from halfmoon.core.errors import UserError
from halfmoon.federation.protocol.bundle import APPS, PROJECT_FILE, render_project
from halfmoon.federation.transport.admission import KEYS_FILE, TIMEOUT_SECONDS, Admission
from halfmoon.federation.transport.contact import Address, ServerUnreachable, check_server, tls_context
from halfmoon.federation.transport.internals import ControlApi
from halfmoon.federation.transport.processes import (
    SERVER_APP,
    SUPEREXEC,
    SUPERLINK,
    ProcessFolder,
    exclusive,
    require_flower,
    stop_process,
)
from halfmoon.sites.keys import Access
from halfmoon.storage import atomic_io, toml
from halfmoon.storage.events import SERVER_LOG, EventLog, EventTail, Tail

METRICS_FILE = "metrics.jsonl"
SUMMARY_FILE = "summary.json"
MODEL_FILE = "model.safetensors"
DELIVERY_FILE = "delivery.json"
"""Files of a run folder. `halfmoon.storage.run_folder`, which writes them, would import torch."""

RUN_CONFIG = "run.toml"
"""File in the folder of Flower's processes with the options of the ServerApp."""

START_SECONDS = 60.0
"""Time limit until a SuperLink replies, or a ServerApp has started."""

POLL_SECONDS = 0.1
"""Time between two polls of processes and events."""

CLOSE_SECONDS = 10.0
"""Time that a ServerApp has to report its end to Flower once its run is finished."""

MAX_PAUSE_SECONDS = 10.0
"""Longest pause before a program that has died twice is restarted."""

_ANY_TEXT = re.compile(r"\w")
_ERROR = re.compile(r"\w(Error|Exception|Exit)\b")
_COLORS = re.compile(r"\x1b\[\d*m")
_CONNECTION = "halfmoon"

Queue = Literal["memory", "disk"]
"""Storage of a SuperLink: its memory, which is faster and smaller, or a database on the disk."""

MEMORY_DATABASE = ":flwr-in-memory:"
"""Flower's name of a database in memory."""

Outcome = Literal["finished", "link", "app"]
"""The run is finished, the SuperLink has died, or the ServerApp has."""


class Halted(UserError):
    """The federation cannot continue; its finished rounds are in its run folder."""


@dataclass(frozen=True)
class ServerOptions:
    """Options of a server.

    Attributes:
        config: the federation's file.
        run: the run folder.
        host: address to listen at.
        port: its port.
        ca: certificate of the authority for TLS. Without TLS the connection is plain, which needs `insecure` unless the
            server listens only on this machine.
        certificate: the server's certificate.
        key: the server's private key.
        insecure: whether plain connections of other machines are allowed.
        access: the sites to admit, by their keys; None admits all.
        sites: the sites of the federation.
        restarts: number of restarts of programs that die without a new round in between.
        redeliver: whether a finished run is served until no site lacks its model.
        queue: where the SuperLink stores messages: in "memory", or on "disk".
        apps: the ServerApp and the ClientApp.

    Raises:
        UserError: the options contradict each other, or a file is missing.
    """

    config: Path
    run: Path
    host: str = "127.0.0.1"
    port: int = 9092
    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None
    insecure: bool = False
    access: Access | None = None
    sites: tuple[str, ...] = ()
    restarts: int = 5
    redeliver: bool = False
    queue: Queue = "memory"
    apps: tuple[str, str] = APPS

    def __post_init__(self) -> None:
        files = {"--ca": self.ca, "--certificate": self.certificate, "--key": self.key}
        missing = [flag for flag, path in files.items() if path is None]
        if missing and len(missing) < len(files):
            raise UserError(f"{missing[0]} is missing: --ca, --certificate and --key go together.")
        if self.ca is not None and self.insecure:
            raise UserError("--insecure and certificates contradict each other; leave one of them out.")
        for flag, path in files.items():
            if path is not None and not path.is_file():
                raise UserError(f"{flag} {path}: there is no such file.")
        if self.ca is not None:
            tls_context(self.ca)
        elif not self.insecure and not self.address.is_loopback:
            raise UserError(
                f"--host {self.host} is open to other machines, and nothing would be encrypted: give --ca, "
                "--certificate and --key, or --insecure where the network itself is safe."
            )

    @classmethod
    def with_access(
        cls, config: Path, run: Path, access: Access, sites: Sequence[str], restarts: int, queue: Queue = "memory"
    ) -> "ServerOptions":
        """Make the options of a server behind the proxy of an access folder, which only sites with a key can reach.

        The server itself listens only on this machine.
        """
        return cls(
            config,
            run,
            port=access.port,
            ca=access.ca,
            certificate=access.certificate,
            key=access.key,
            access=access,
            sites=tuple(sites),
            restarts=restarts,
            queue=queue,
        )

    @property
    def address(self) -> Address:
        """The address to listen at."""
        return Address(self.host, self.port)

    @property
    def processes(self) -> ProcessFolder:
        """The folder of Flower's processes."""
        return ProcessFolder(self.run / "flower")


def superlink_arguments(server: ServerOptions) -> list[str]:
    """Build the arguments of `flower-superlink`."""
    # A SuperLink that dies loses the messages of the present round. The round is repeated from the last checkpoint in
    # either case, because a restarted ServerApp has another run of Flower.
    database = MEMORY_DATABASE if server.queue == "memory" else str(server.processes.folder / "state.db")
    files = {"--ssl-ca-certfile": server.ca, "--ssl-certfile": server.certificate, "--ssl-keyfile": server.key}
    tls: list[str] = []
    for flag, path in files.items():
        if path is not None:
            tls += [flag, str(path.absolute())]
    return [
        *("--host", server.host, "--port", str(server.port)),
        *("--database", database),
        # The apps run in this environment, so everything that they need is installed.
        "--disable-runtime-dependency-installation",
        *(tls or ["--insecure"]),
        *(["--enable-supernode-auth"] if server.access else []),
    ]


def render_run_config(server: ServerOptions) -> str:
    """Render the options of the ServerApp as TOML. They are not in the app bundle, so no site receives them."""
    options = {"federation": server.config.absolute(), "run-dir": server.run.absolute()}
    if server.access:
        options["keys"] = (server.processes.folder / KEYS_FILE).absolute()
    return "".join(f"{name} = {toml.format_value(path)}\n" for name, path in options.items())


def render_connection(server: ServerOptions) -> str:
    """Render the config.toml by which `flwr` finds the SuperLink."""
    if server.ca is None:
        security = "insecure = true"
    else:
        security = f"root-certificates = {toml.format_value(server.ca.absolute())}"
    address = toml.format_value(str(server.address.local))
    return f'[superlink]\ndefault = "{_CONNECTION}"\n\n[superlink.{_CONNECTION}]\naddress = {address}\n{security}\n'


def is_finished(run: Path) -> bool:
    """Check whether a run folder is finished."""
    return atomic_io.read_json(run / SUMMARY_FILE) is not None


def sites_without_model(run: Path) -> list[str]:
    """List the sites that do not have the final model of a finished run; [] for other runs."""
    names = (atomic_io.read_json(run / DELIVERY_FILE) or {}).get("lacks") if is_finished(run) else None
    return [str(name) for name in names] if isinstance(names, list) else []


def serve(server: ServerOptions, show: Callable[[str], None]) -> None:
    """Serve a federation until its run is finished, and leave no process.

    Args:
        server: the options.
        show: prints a line.

    Raises:
        Halted: the federation cannot continue.
        UserError: another process serves the run folder, or Flower is not installed.
    """
    require_flower()
    processes = server.processes
    with exclusive(
        processes.folder / "serve.lock", f"{server.run} is being served by another process; wait for it, or end it."
    ):
        processes.prepare()
        processes.kill_all()  # processes of an earlier server that was killed
        _write_files(server)
        tail = EventTail(server.run)
        try:
            _Session(server, tail, show).run()
        finally:
            for event in tail.read_events():
                show(event.line)


def _write_files(server: ServerOptions) -> None:
    # The app bundle cannot have this option: its hash is in the terms.
    if server.redeliver:
        record = atomic_io.read_json(server.run / DELIVERY_FILE) or {}
        atomic_io.write_atomically(server.run / DELIVERY_FILE, (json.dumps({**record, "again": True}) + "\n").encode())
    app = server.processes.folder / "app"
    app.mkdir(exist_ok=True)
    atomic_io.write_atomically(app / PROJECT_FILE, render_project(server.apps).encode())
    atomic_io.write_atomically(server.processes.folder / RUN_CONFIG, render_run_config(server).encode())
    atomic_io.write_atomically(server.processes.folder / "config.toml", render_connection(server).encode())
    for script in (SUPERLINK, SERVER_APP):
        server.processes.log(script).write_bytes(b"")


class _Session:
    """A served federation: the process of the SuperLink, and the number of Flower's run, which is stored in a file."""

    def __init__(self, server: ServerOptions, tail: EventTail, show: Callable[[str], None]) -> None:
        self.server = server
        self.tail = tail
        self.show = show
        self.processes = server.processes
        self.log = EventLog(server.run / SERVER_LOG)
        self.link: subprocess.Popen[bytes] | None = None
        self.number = self.processes.folder / "number"
        self.failures = 0  # in a row, without a new round
        self.rounds = _count_rounds(server.run)
        self.admission: Admission | None = None

    def run(self) -> None:
        """Run the federation until it is finished."""
        try:
            self._start()
            while (outcome := self._submit() or self._watch()) != "finished":
                self._restart(outcome)
            self._wait(lambda: not self.processes.is_running(SERVER_APP), CLOSE_SECONDS)
            self.number.unlink(missing_ok=True)
        finally:
            stop_process(self.link)
            self.processes.kill_all()

    def _start(self) -> None:
        address = self.server.address
        if _in_use(address):
            raise UserError(f"port {address.port} is taken by another process: end it, or give another --port.")
        for script in (SUPEREXEC, SUPERLINK):
            self.processes.clear_lock(script)
        log = Tail(self.processes.log(SUPERLINK))
        self.link = self.processes.start(SUPERLINK, superlink_arguments(self.server))
        if not self._wait(self._replies, START_SECONDS):
            reason = _last_line(log.read_lines()) or "it printed nothing"
            raise Halted(f"the SuperLink did not start: {reason}; see {log.path}.")
        self._admit()
        self._forget_run()

    def _admit(self) -> None:
        """Admit the sites of the access folder and no others, if sites have keys."""
        server = self.server
        if server.access is None or server.ca is None:
            return
        registry = ControlApi(f"https://{server.address.local}", tls_context(server.ca), TIMEOUT_SECONDS)
        self.admission = Admission(
            server.access, registry, self.processes.folder / KEYS_FILE, server.sites, self._record_admission
        )
        self.admission.open()
        self._show()

    def _forget_run(self) -> None:
        """Stop the previous run of Flower. It would end only after a minute, in which sites would wait for its messages."""
        if number := atomic_io.read(self.number):
            with suppress(subprocess.TimeoutExpired):
                self.processes.flwr(["stop", number.decode(), _CONNECTION])
            self.number.unlink()

    def _replies(self) -> bool:
        with suppress(ServerUnreachable):
            check_server(self.server.address.local, self.server.ca)
            return True
        return False

    def _wait(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Wait until a condition is met; return False if the SuperLink dies before, or at the time limit."""
        end = time.monotonic() + seconds
        while not condition():
            if self.link is None or self.link.poll() is not None or time.monotonic() > end:
                return False
            time.sleep(POLL_SECONDS / 2)
        return True

    def _submit(self) -> Outcome | None:
        """Submit the run to Flower; return what died instead, if anything, and raise `Halted` for a refusal."""
        assert self.link is not None
        self.processes.clear_lock(SERVER_APP)
        with suppress(subprocess.TimeoutExpired):
            options = ["--run-config", str(self.processes.folder / RUN_CONFIG), "--format", "json"]
            result = self.processes.flwr(
                ["run", str(self.processes.folder / "app"), _CONNECTION, *options], START_SECONDS
            )
            with suppress(ValueError, LookupError, TypeError):
                atomic_io.write_atomically(self.number, str(json.loads(result.stdout)["run-id"]).encode())
                return None
            if self.link.poll() is None:
                text = " ".join((result.stdout + result.stderr).decode(errors="replace").split())
                raise Halted(f"Flower did not take the run: {text}")
        return "link"

    def _watch(self) -> Outcome:
        """Show events until something ends, and return what it was; raise `Halted` if the server's program stopped."""
        start = time.monotonic()
        errors = Tail(self.processes.log(SERVER_APP))
        while True:
            # Checked before the events are read, so that those of a dead program are complete.
            outcome = self._outcome(time.monotonic() - start)
            if outcome is None and self.admission is not None:
                self.admission.poll()
            self._show()
            if outcome is not None:
                if outcome == "app" and (reason := _last_line(errors.read_lines(), _ERROR)):
                    self.log.record("program_failed", f"the server's program ended with: {reason}", reason=reason)
                return outcome
            time.sleep(POLL_SECONDS)

    def _outcome(self, seconds: float) -> Outcome | None:
        """Find out what has outcome, if anything, so many seconds after the submission."""
        assert self.link is not None
        has_started = self.processes.has_started(SERVER_APP)
        run = self.server.run
        if is_finished(run) and not (self.server.redeliver and sites_without_model(run)):
            return "finished"
        if self.link.poll() is not None or (
            self.processes.has_started(SUPEREXEC) and not self.processes.is_running(SUPEREXEC)
        ):
            return "link"
        if has_started and not self.processes.is_running(SERVER_APP):
            return "app"
        return "link" if not has_started and seconds > START_SECONDS else None

    def _show(self) -> None:
        for event in self.tail.read_events():
            self.show(event.line)
            if event.name == "stopped":
                raise Halted(str(event.fields.get("reason", event.text)))

    def _record_admission(self, text: str) -> None:
        self.log.record("admission", text)

    def _restart(self, died: Outcome) -> None:
        """Restart the program that died; raise `Halted` after too many restarts in a row."""
        rounds = _count_rounds(self.server.run)
        self.failures = 1 if rounds > self.rounds else self.failures + 1
        self.rounds = rounds
        what = "the SuperLink" if died == "link" else "the server's program"
        if self.failures > self.server.restarts:
            times = f"{self.failures} times" if self.failures > 1 else "once"
            raise Halted(
                f"{what} died, {times} in a row without a new round; {self.processes.folder} has the logs, and "
                "halfmoon serve goes on with the run."
            )
        text = f"{what} died; it is started again, and the federation goes on after round {rounds}"
        self.log.record("program_restarted", text, round=rounds)
        self._show()
        if self.failures > 1:
            time.sleep(min(2.0 ** (self.failures - 2), MAX_PAUSE_SECONDS))
        if died == "app":
            self._forget_run()
            if self.link is not None and self.link.poll() is None:
                return
        stop_process(self.link)
        self.processes.kill_all()
        self._start()


def _count_rounds(run: Path) -> int:
    return (atomic_io.read(run / METRICS_FILE) or b"").count(b"\n")


def _in_use(address: Address) -> bool:
    """Check whether a process listens at an address; raise `UserError` if this machine does not have the address."""
    try:
        candidates = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
        with socket.socket(candidates[0][0], socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(candidates[0][4])
    except PermissionError as error:
        raise UserError(f"port {address.port} may not be used by you: give a --port from 1024.") from error
    except OSError as error:
        if isinstance(error, socket.gaierror) or error.errno != errno.EADDRINUSE:
            raise UserError(f"--host {address.host} is no address of this machine ({error.strerror}).") from error
        return True
    return False


def _last_line(lines: list[str], pattern: re.Pattern[str] = _ANY_TEXT) -> str:
    """Find the last line with a pattern, without colors; "" if there is none."""
    plain = [_COLORS.sub("", line).strip() for line in lines]
    return next((line for line in reversed(plain) if pattern.search(line)), "")
