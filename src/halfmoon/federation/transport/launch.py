"""`halfmoon serve`: Flower's SuperLink and the ServerApp, started again until the run is finished."""

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

METRICS_FILE, SUMMARY_FILE, MODEL_FILE = "metrics.jsonl", "summary.json", "model.safetensors"
DELIVERY_FILE = "delivery.json"
"""Files of a run folder, by name: `halfmoon.storage.run_folder`, which writes them, would bring torch."""

RUN_CONFIG = "run.toml"
"""The file, in the folder of Flower's processes, of what the ServerApp is told."""

STARTING = 60.0  # seconds until a SuperLink has to answer, or a ServerApp to have begun
POLL_SECONDS = 0.1  # seconds between two looks at processes and logs
CLOSING = 10.0  # seconds that a ServerApp has for its last words to Flower once its run is finished
LONGEST_PAUSE = 10.0  # seconds of pause, at most, before what has died twice is started again

_WORDS, _ERROR = re.compile(r"\w"), re.compile(r"\w(Error|Exception|Exit)\b")
_COLORS = re.compile(r"\x1b\[\d*m")
_CONNECTION = "halfmoon"

Outcome = Literal["finished", "link", "app"]


class Halted(UserError):
    """The federation cannot go on; what it has played is in its run folder."""


@dataclass(frozen=True)
class ServerOptions:
    """How a federation is served: its file, its run folder, where it listens, and how often it is started again.

    `certificate` and `key` are the server's for TLS, `ca` has the authority that signed them; without them the
    connection is plain, which away from this machine needs `insecure`. `access` says which sites may come in, of whom
    `sites` are those of the federation; without it any may. `restarts` is how often, without a new round in between,
    what dies is started again. Raise UserError where these do not fit.
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
    redeliver: bool = False  # whether a finished run is served until no site lacks its model
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
        cls, config: Path, run: Path, access: Access, sites: Sequence[str], restarts: int
    ) -> "ServerOptions":
        """Return a server that only sites with a key of `access` reach: by its proxy, so it listens here alone."""
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
        )

    @property
    def address(self) -> Address:
        return Address(self.host, self.port)

    @property
    def home(self) -> ProcessFolder:
        return ProcessFolder(self.run / "flower")


def superlink_arguments(server: ServerOptions) -> list[str]:
    """Return the arguments of `flower-superlink`."""
    files = {"--ssl-ca-certfile": server.ca, "--ssl-certfile": server.certificate, "--ssl-keyfile": server.key}
    tls = [word for flag, path in files.items() if path is not None for word in (flag, str(path.absolute()))]
    return [
        *("--host", server.host, "--port", str(server.port)),
        *("--database", str(server.home.folder / "state.db")),
        # Everything that the apps need is installed: it is what runs here.
        "--disable-runtime-dependency-installation",
        *(tls or ["--insecure"]),
        *(["--enable-supernode-auth"] if server.access else []),
    ]


def render_run_config(server: ServerOptions) -> str:
    """Return what the ServerApp is told, as TOML; it stays on this machine, and is no part of the app bundle."""
    facts = {"federation": server.config.absolute(), "run-dir": server.run.absolute()}
    facts |= {"keys": (server.home.folder / KEYS_FILE).absolute()} if server.access else {}
    return "".join(f"{name} = {toml.format_value(path)}\n" for name, path in facts.items())


def render_connection(server: ServerOptions) -> str:
    """Return the config.toml by which `flwr` finds the SuperLink."""
    ca = server.ca
    safety = "insecure = true" if ca is None else f"root-certificates = {toml.format_value(ca.absolute())}"
    address = toml.format_value(str(server.address.local))
    return f'[superlink]\ndefault = "{_CONNECTION}"\n\n[superlink.{_CONNECTION}]\naddress = {address}\n{safety}\n'


def is_finished(run: Path) -> bool:
    return atomic_io.read_json(run / SUMMARY_FILE) is not None


def sites_without_model(run: Path) -> list[str]:
    names = (atomic_io.read_json(run / DELIVERY_FILE) or {}).get("lacks") if is_finished(run) else None
    return [str(name) for name in names] if isinstance(names, list) else []


def serve(server: ServerOptions, show: Callable[[str], None]) -> None:
    """Serve a federation until its run is finished, and leave no process; raise Halted where it cannot go on."""
    require_flower()
    home = server.home
    with exclusive(
        home.folder / "serve.lock", f"{server.run} is being served by another process; wait for it, or end it."
    ):
        home.prepare()
        home.kill_all()  # what a server left behind that was killed
        _write_files(server)
        tail = EventTail(server.run)
        try:
            _Session(server, tail, show).play()
        finally:
            for event in tail.read_events():
                show(event.line)


def _write_files(server: ServerOptions) -> None:
    if server.redeliver:  # the bundle, whose hash the sites know, has no word for it
        record = atomic_io.read_json(server.run / DELIVERY_FILE) or {}
        atomic_io.write_atomically(server.run / DELIVERY_FILE, (json.dumps({**record, "again": True}) + "\n").encode())
    app = server.home.folder / "app"
    app.mkdir(exist_ok=True)
    atomic_io.write_atomically(app / PROJECT_FILE, render_project(server.apps).encode())
    atomic_io.write_atomically(server.home.folder / RUN_CONFIG, render_run_config(server).encode())
    atomic_io.write_atomically(server.home.folder / "config.toml", render_connection(server).encode())
    for script in (SUPERLINK, SERVER_APP):
        server.home.log(script).write_bytes(b"")


class _Session:
    """A federation that is served: the SuperLink's process, and in a file the number of Flower's run."""

    def __init__(self, server: ServerOptions, tail: EventTail, show: Callable[[str], None]) -> None:
        self.server, self.tail, self.show = server, tail, show
        self.home, self.log = server.home, EventLog(server.run / SERVER_LOG)
        self.link: subprocess.Popen[bytes] | None = None
        self.number = self.home.folder / "number"
        self.failures, self.rounds = 0, _rounds(server.run)
        self.admission: Admission | None = None

    def play(self) -> None:
        try:
            self._start()
            while (ended := self._submit() or self._watch()) != "finished":
                self._again(ended)
            self._wait(lambda: not self.home.is_running(SERVER_APP), CLOSING)
            self.number.unlink(missing_ok=True)
        finally:
            stop_process(self.link)
            self.home.kill_all()

    def _start(self) -> None:
        address = self.server.address
        if _in_use(address):
            raise UserError(f"port {address.port} is taken by another process: end it, or give another --port.")
        for script in (SUPEREXEC, SUPERLINK):
            self.home.clear_lock(script)
        log = Tail(self.home.log(SUPERLINK))
        self.link = self.home.start(SUPERLINK, superlink_arguments(self.server))
        if not self._wait(self._answers, STARTING):
            raise Halted(
                f"the SuperLink did not start: {_last_line(log.read_lines()) or 'it said nothing'}; see {log.path}."
            )
        self._admit()
        self._forget_run()

    def _admit(self) -> None:
        """Let the sites in that may come in, and no others, where they are known by their keys."""
        server = self.server
        if server.access is None or server.ca is None:
            return
        registry = ControlApi(f"https://{server.address.local}", tls_context(server.ca), TIMEOUT_SECONDS)
        self.admission = Admission(
            server.access, registry, self.home.folder / KEYS_FILE, server.sites, self._record_admission
        )
        self.admission.open()
        self._show()

    def _forget_run(self) -> None:
        """Stop Flower's last run: it would notice in a minute, and sites would wait for the rest of its messages."""
        if number := atomic_io.read(self.number):
            with suppress(subprocess.TimeoutExpired):
                self.home.flwr(["stop", number.decode(), _CONNECTION])
            self.number.unlink()

    def _answers(self) -> bool:
        with suppress(ServerUnreachable):
            check_server(self.server.address.local, self.server.ca)
            return True
        return False

    def _wait(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Wait until something is so; return False where the SuperLink dies first, or it takes too long."""
        end = time.monotonic() + seconds
        while not condition():
            if self.link is None or self.link.poll() is not None or time.monotonic() > end:
                return False
            time.sleep(POLL_SECONDS / 2)
        return True

    def _submit(self) -> Outcome | None:
        """Give Flower a run that goes on; return what died instead, and raise Halted for a refusal."""
        assert self.link is not None
        self.home.clear_lock(SERVER_APP)
        with suppress(subprocess.TimeoutExpired):
            options = ["--run-config", str(self.home.folder / RUN_CONFIG), "--format", "json"]
            result = self.home.flwr(["run", str(self.home.folder / "app"), _CONNECTION, *options], STARTING)
            with suppress(ValueError, LookupError, TypeError):
                atomic_io.write_atomically(self.number, str(json.loads(result.stdout)["run-id"]).encode())
                return None
            if self.link.poll() is None:
                text = " ".join((result.stdout + result.stderr).decode(errors="replace").split())
                raise Halted(f"Flower did not take the run: {text}")
        return "link"

    def _watch(self) -> Outcome:
        """Show the log until something ends, and return what it was; raise Halted where the log says so."""
        begin = time.monotonic()
        errors = Tail(self.home.log(SERVER_APP))
        while True:
            # Looked at before the log is read: what is dead has written its last line.
            ended = self._ended(time.monotonic() - begin)
            if ended is None and self.admission is not None:
                self.admission.poll()
            self._show()
            if ended is not None:
                if ended == "app" and (reason := _last_line(errors.read_lines(), _ERROR)):
                    self.log.record("program_failed", f"the server's program ended with: {reason}", reason=reason)
                return ended
            time.sleep(POLL_SECONDS)

    def _ended(self, seconds: float) -> Outcome | None:
        assert self.link is not None
        begun = self.home.has_started(SERVER_APP)
        silent = begun and not self.home.is_running(SERVER_APP)
        run = self.server.run
        if is_finished(run) and not (self.server.redeliver and sites_without_model(run)):
            return "finished"
        if self.link.poll() is not None or (self.home.has_started(SUPEREXEC) and not self.home.is_running(SUPEREXEC)):
            return "link"
        if silent:
            return "app"
        return "link" if not begun and seconds > STARTING else None

    def _show(self) -> None:
        for event in self.tail.read_events():
            self.show(event.line)
            if event.name == "stopped":
                raise Halted(str(event.fields.get("reason", event.text)))

    def _record_admission(self, text: str) -> None:
        self.log.record("admission", text)

    def _again(self, died: Outcome) -> None:
        """Start again what died; raise Halted where that was done too often in a row."""
        rounds = _rounds(self.server.run)
        self.failures = 1 if rounds > self.rounds else self.failures + 1
        self.rounds = rounds
        what = "the SuperLink" if died == "link" else "the server's program"
        if self.failures > self.server.restarts:
            times = f"{self.failures} times" if self.failures > 1 else "once"
            raise Halted(
                f"{what} died, {times} in a row without a new round; {self.home.folder} has the logs, and "
                "halfmoon serve goes on with the run."
            )
        text = f"{what} died; it is started again, and the federation goes on after round {rounds}"
        self.log.record("program_restarted", text, round=rounds)
        self._show()
        time.sleep(min(2.0 ** (self.failures - 2), LONGEST_PAUSE) if self.failures > 1 else 0)
        if died == "app":
            self._forget_run()
            if self.link is not None and self.link.poll() is None:
                return
        stop_process(self.link)
        self.home.kill_all()
        self._start()


def _rounds(run: Path) -> int:
    return (atomic_io.read(run / METRICS_FILE) or b"").count(b"\n")


def _in_use(address: Address) -> bool:
    """Say whether somebody listens at an address; raise UserError where this machine does not have it."""
    try:
        places = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
        with socket.socket(places[0][0], socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(places[0][4])
    except PermissionError as error:
        raise UserError(f"port {address.port} may not be used by you: give a --port from 1024.") from error
    except OSError as error:
        if isinstance(error, socket.gaierror) or error.errno != errno.EADDRINUSE:
            raise UserError(f"--host {address.host} is no address of this machine ({error.strerror}).") from error
        return True
    return False


def _last_line(lines: list[str], sought: re.Pattern[str] = _WORDS) -> str:
    """Return the last line with what is sought, without colors; nothing where there is none."""
    plain = [_COLORS.sub("", line).strip() for line in lines]
    return next((line for line in reversed(plain) if sought.search(line)), "")
