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

from halfmoon.core import toml
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
from halfmoon.storage import atomic_io
from halfmoon.storage.events import SERVER_LOG, EventLog, EventRecorder, EventTail, Tail

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
        """Check the server's options for encryption: all three files of TLS, or a plain connection that is allowed.

        Without TLS, others could read and change what sites send; so a server that other machines can reach needs
        `insecure`.
        """
        tls_files = {"--ca": self.ca, "--certificate": self.certificate, "--key": self.key}
        missing = [flag for flag, path in tls_files.items() if path is None]
        if missing and len(missing) < len(tls_files):
            raise UserError(f"{missing[0]} is missing: --ca, --certificate and --key go together.")
        if self.ca is not None and self.insecure:
            raise UserError("--insecure and certificates contradict each other; leave one of them out.")
        if self.insecure and self.address.is_loopback:
            raise UserError(
                f"--insecure allows connections of other machines, but --host {self.host} is this machine only: leave "
                "--insecure out, or give the --host that the sites reach."
            )
        for flag, path in tls_files.items():
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
        """Make the options of a server that only sites with a registered key can reach, through a proxy.

        The server itself listens only on this machine.

        Args:
            config: the federation's file.
            run: the run folder.
            access: the folder with the certificates, and the keys of the sites.
            sites: the sites of the federation.
            restarts: number of restarts of programs that die without a new round in between.
            queue: where Flower's SuperLink stores messages.
        """
        return cls(
            config=config,
            run=run,
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
    """Build the command-line arguments of Flower's `flower-superlink`, which passes messages between server and sites."""
    arguments = ["--host", server.host, "--port", str(server.port)]
    # A SuperLink with its database in memory loses the messages of the present round when it dies. The round is repeated
    # from the last checkpoint in either case, because a restarted ServerApp has another run of Flower.
    database = MEMORY_DATABASE if server.queue == "memory" else str(server.processes.folder / "state.db")
    arguments += ["--database", database]
    # The apps run in this environment, so everything that they need is installed.
    arguments.append("--disable-runtime-dependency-installation")
    tls_files = {"--ssl-ca-certfile": server.ca, "--ssl-certfile": server.certificate, "--ssl-keyfile": server.key}
    if server.ca is None:
        arguments.append("--insecure")
    for flag, path in tls_files.items():
        if path is not None:
            arguments += [flag, str(path.absolute())]
    if server.access:
        arguments.append("--enable-supernode-auth")
    return arguments


def render_run_config(server: ServerOptions) -> str:
    """Render the options of the ServerApp as TOML. They are not in the app bundle, so no site receives them."""
    options = {"federation": server.config.absolute(), "run-dir": server.run.absolute()}
    if server.access:
        options["keys"] = (server.processes.folder / KEYS_FILE).absolute()
    return "".join(f"{name} = {toml.format_value(path)}\n" for name, path in options.items())


def render_connection(server: ServerOptions) -> str:
    """Render the config.toml by which Flower's command `flwr` finds the SuperLink: its address and certificates."""
    if server.ca is None:
        security = "insecure = true"
    else:
        security = f"root-certificates = {toml.format_value(server.ca.absolute())}"
    lines = [
        "[superlink]",
        f'default = "{_CONNECTION}"',
        "",
        f"[superlink.{_CONNECTION}]",
        f"address = {toml.format_value(str(server.address.local))}",
        security,
    ]
    return "\n".join(lines) + "\n"


def is_finished(run: Path) -> bool:
    """Check whether a run folder is finished."""
    return atomic_io.read_json(run / SUMMARY_FILE) is not None


def sites_without_model(run: Path) -> list[str]:
    """List the sites that do not have the final model of a finished run; [] for other runs."""
    names = (atomic_io.read_json(run / DELIVERY_FILE) or {}).get("lacks") if is_finished(run) else None
    return [str(name) for name in names] if isinstance(names, list) else []


def serve(server: ServerOptions, display: EventRecorder) -> None:
    """Run the server of a federation until its run is finished, and end all processes that it has started.

    Args:
        server: the options.
        display: shows the events of the log on the terminal.

    Raises:
        Halted: the federation cannot continue.
        UserError: another process serves the run folder, or Flower is not installed.
    """
    require_flower()
    processes = server.processes
    conflict = f"{server.run} is being served by another process; wait for it, or end it."
    with exclusive(processes.folder / "serve.lock", conflict):
        processes.prepare()
        processes.kill_all()  # processes of an earlier server that was killed
        _write_files(server)
        tail = EventTail(server.run)
        try:
            _Session(server, tail, display).run()
        finally:
            # The last events, such as the reason of an error, which the session has not shown.
            for event in tail.read_events():
                display.record(event.name, event.line, **event.fields)


def _write_files(server: ServerOptions) -> None:
    """Write the files that Flower's processes read: the app bundle, the options of the ServerApp, and the connection."""
    if server.redeliver:
        # The ServerApp reads this request from the delivery record. It cannot be an option of the app bundle, whose hash
        # the sites have agreed to.
        record = atomic_io.read_json(server.run / DELIVERY_FILE) or {}
        record["again"] = True
        atomic_io.write_atomically(server.run / DELIVERY_FILE, (json.dumps(record) + "\n").encode())
    folder = server.processes.folder
    app_folder = folder / "app"
    app_folder.mkdir(exist_ok=True)
    atomic_io.write_atomically(app_folder / PROJECT_FILE, render_project(server.apps).encode())
    atomic_io.write_atomically(folder / RUN_CONFIG, render_run_config(server).encode())
    atomic_io.write_atomically(folder / "config.toml", render_connection(server).encode())
    for script in (SUPERLINK, SERVER_APP):
        # Logs of an earlier server would be taken for those of the new processes.
        server.processes.log(script).write_bytes(b"")


class _Session:
    """One call of `halfmoon serve`: it starts Flower's SuperLink, submits the run, and restarts programs that die."""

    def __init__(self, server: ServerOptions, tail: EventTail, display: EventRecorder) -> None:
        """Prepare to run Flower's SuperLink and the ServerApp of a federation, and to restart them.

        Args:
            server: the options.
            tail: reads the events that the ServerApp adds to the log of the run folder.
            display: shows events on the terminal.
        """
        self.server = server
        self.tail = tail
        self.display = display
        self.processes = server.processes
        self.log = EventLog(server.run / SERVER_LOG)
        self.superlink: subprocess.Popen[bytes] | None = None
        self.run_id_file = self.processes.folder / "number"  # has the id of the current run of Flower
        self.failures = 0  # in a row, without a new round
        self.rounds = _count_rounds(server.run)
        self.admission: Admission | None = None

    def run(self) -> None:
        """Start Flower's SuperLink and submit the run, until the run is finished; restart programs that die.

        Raises:
            Halted: the federation cannot continue.
        """
        try:
            self._start()
            while True:
                # `_submit` returns None if the run was submitted.
                outcome = self._submit() or self._watch()
                if outcome == "finished":
                    break
                self._restart(outcome)
            # The ServerApp has written its results. It still has to report its end to Flower.
            self._wait(lambda: not self.processes.is_running(SERVER_APP), CLOSE_SECONDS)
            self.run_id_file.unlink(missing_ok=True)
        finally:
            stop_process(self.superlink)
            self.processes.kill_all()

    def _start(self) -> None:
        """Start the SuperLink, wait until it replies, register the keys of the sites, and stop an earlier run.

        Raises:
            UserError: the port is in use.
            Halted: the SuperLink does not start.
        """
        address = self.server.address
        if _is_port_in_use(address):
            raise UserError(f"port {address.port} is taken by another process: end it, or give another --port.")
        for script in (SUPEREXEC, SUPERLINK):
            self.processes.clear_lock(script)  # so that the new process is not taken for the one before it
        log = Tail(self.processes.log(SUPERLINK))
        self.superlink = self.processes.start(SUPERLINK, superlink_arguments(self.server))
        if not self._wait(self._superlink_replies, START_SECONDS):
            reason = _find_last_line(log.read_lines()) or "it printed nothing"
            raise Halted(f"the SuperLink did not start: {reason}; see {log.path}.")
        self._admit_sites()
        self._stop_earlier_run()

    def _admit_sites(self) -> None:
        """Register the keys of the sites with the SuperLink, which then refuses all others; if sites have keys."""
        server = self.server
        if server.access is None or server.ca is None:
            return
        registry = ControlApi(f"https://{server.address.local}", tls_context(server.ca), TIMEOUT_SECONDS)
        self.admission = Admission(
            access=server.access,
            registry=registry,
            path=self.processes.folder / KEYS_FILE,
            names=server.sites,
            log=self.log,
        )
        self.admission.open()
        self._show()

    def _stop_earlier_run(self) -> None:
        """Stop the previous run of Flower. It would end only after a minute, in which sites would wait for its messages."""
        run_id = atomic_io.read(self.run_id_file)
        if run_id:
            with suppress(subprocess.TimeoutExpired):
                self.processes.flwr(["stop", run_id.decode(), _CONNECTION])
            self.run_id_file.unlink()

    def _superlink_replies(self) -> bool:
        """Check whether the SuperLink accepts connections."""
        with suppress(ServerUnreachable):
            check_server(self.server.address.local, self.server.ca)
            return True
        return False

    def _wait(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Wait until a condition is met; return False if the SuperLink dies before, or at the time limit."""
        deadline = time.monotonic() + seconds
        while not condition():
            superlink_died = self.superlink is None or self.superlink.poll() is not None
            if superlink_died or time.monotonic() > deadline:
                return False
            time.sleep(POLL_SECONDS / 2)
        return True

    def _submit(self) -> Outcome | None:
        """Submit the app bundle to the SuperLink as a run, which starts the ServerApp, and store the id of the run.

        Returns:
            None if the run is submitted; "link" if the SuperLink has died or does not reply in time.

        Raises:
            Halted: the SuperLink refuses the run.
        """
        assert self.superlink is not None
        self.processes.clear_lock(SERVER_APP)  # the run starts a new ServerApp
        folder = self.processes.folder
        options = ["--run-config", str(folder / RUN_CONFIG), "--format", "json"]
        try:
            result = self.processes.flwr(["run", str(folder / "app"), _CONNECTION, *options], START_SECONDS)
        except subprocess.TimeoutExpired:
            return "link"
        # The output of a failed submission is not JSON, or has no id.
        with suppress(ValueError, LookupError, TypeError):
            run_id = str(json.loads(result.stdout)["run-id"])
            atomic_io.write_atomically(self.run_id_file, run_id.encode())
            return None
        if self.superlink.poll() is None:
            text = " ".join((result.stdout + result.stderr).decode(errors="replace").split())
            raise Halted(f"Flower did not take the run: {text}")
        return "link"

    def _watch(self) -> Outcome:
        """Print the events of the run until it is finished or a program dies.

        Returns:
            "finished", or the program that has died.

        Raises:
            Halted: the ServerApp has recorded that it cannot continue.
        """
        start = time.monotonic()
        app_log = Tail(self.processes.log(SERVER_APP))
        while True:
            # Checked before the events are read, so that those of a dead program are complete.
            outcome = self._check_outcome(seconds=time.monotonic() - start)
            if outcome is None and self.admission is not None:
                self.admission.poll()
            self._show()
            if outcome == "app":
                reason = _find_last_line(app_log.read_lines(), _ERROR)  # the last line of a Python traceback
                if reason:
                    self.log.record("program_failed", f"the server's program ended with: {reason}", reason=reason)
            if outcome is not None:
                return outcome
            time.sleep(POLL_SECONDS)

    def _check_outcome(self, seconds: float) -> Outcome | None:
        """Check whether the run is finished or a program has died.

        Args:
            seconds: time since the run was submitted.

        Returns:
            "finished"; "link" if the SuperLink is to be restarted: it or the process that starts apps (SuperExec) has
            died, or they have not started the ServerApp in time; "app" if only the ServerApp has died; or None.
        """
        assert self.superlink is not None
        # Read first: a ServerApp that starts after this line is not yet expected to be alive below.
        has_started = self.processes.has_started(SERVER_APP)
        run = self.server.run
        waits_for_sites = self.server.redeliver and bool(sites_without_model(run))
        if is_finished(run) and not waits_for_sites:
            return "finished"
        superexec_died = self.processes.has_started(SUPEREXEC) and not self.processes.is_running(SUPEREXEC)
        if self.superlink.poll() is not None or superexec_died:
            return "link"
        if has_started and not self.processes.is_running(SERVER_APP):
            return "app"
        if not has_started and seconds > START_SECONDS:
            return "link"
        return None

    def _show(self) -> None:
        for event in self.tail.read_events():
            self.display.record(event.name, event.line, **event.fields)
            if event.name == "stopped":
                raise Halted(str(event.fields.get("reason", event.text)))

    def _restart(self, died: Outcome) -> None:
        """Restart after a program has died, from the last checkpoint of the run.

        The second restart in a row without a new round waits a second, and each further one twice as long.

        The caller submits the run afterwards, so that Flower starts the ServerApp once more.

        Args:
            died: "app" for the ServerApp; "link" for the SuperLink, which is restarted here.

        Raises:
            Halted: there were too many restarts in a row.
        """
        rounds = _count_rounds(self.server.run)
        made_progress = rounds > self.rounds
        self.failures = 1 if made_progress else self.failures + 1  # in a row, with this one
        self.rounds = rounds
        program = "the SuperLink" if died == "link" else "the server's program"
        if self.failures > self.server.restarts:
            times = f"{self.failures} times" if self.failures > 1 else "once"
            raise Halted(
                f"{program} died, {times} in a row without a new round; {self.processes.folder} has the logs, and "
                "halfmoon serve goes on with the run."
            )
        text = f"{program} died; it is started again, and the federation goes on after round {rounds}"
        self.log.record("program_restarted", text, round=rounds)
        self._show()
        if self.failures > 1:
            time.sleep(min(2.0 ** (self.failures - 2), MAX_PAUSE_SECONDS))
        if died == "app":
            self._stop_earlier_run()
            if self.superlink is not None and self.superlink.poll() is None:
                return
        stop_process(self.superlink)
        self.processes.kill_all()
        self._start()


def _count_rounds(run: Path) -> int:
    return (atomic_io.read(run / METRICS_FILE) or b"").count(b"\n")


def _is_port_in_use(address: Address) -> bool:
    """Check whether another process listens at an address, by binding a socket to it.

    Raises:
        UserError: this machine does not have the address, or the user may not use the port.
    """
    try:
        candidates = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
        family, _, _, _, socket_address = candidates[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            # Without this, connections of a server that has just ended would count as in use for a minute.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(socket_address)
    except PermissionError as error:
        raise UserError(f"port {address.port} may not be used by you: give a --port from 1024.") from error
    except OSError as error:
        if isinstance(error, socket.gaierror) or error.errno != errno.EADDRINUSE:
            raise UserError(f"--host {address.host} is no address of this machine ({error.strerror}).") from error
        return True
    return False


def _find_last_line(lines: list[str], pattern: re.Pattern[str] = _ANY_TEXT) -> str:
    """Find the last line with a pattern, without the codes of terminal colors; "" if there is none."""
    plain = [_COLORS.sub("", line).strip() for line in lines]
    return next((line for line in reversed(plain) if pattern.search(line)), "")
