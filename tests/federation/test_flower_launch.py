"""The processes of a federation: what is started, what is refused in a sentence, what survives a kill, what is left."""

import http.server
import json
import os
import shutil
import signal
import ssl
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from fake_transport import free_port
from PIL import Image
from toy_federation import JOIN, ToyFederation, create_authority, wait_until

from halfmoon.cli import main as cli
from halfmoon.core.errors import UserError
from halfmoon.federation.protocol import bundle
from halfmoon.federation.transport import launch, processes
from halfmoon.federation.transport.contact import Address, ServerUnreachable, check_server
from halfmoon.federation.transport.launch import (
    Halted,
    ServerOptions,
    is_finished,
    render_connection,
    render_run_config,
    serve,
    superlink_arguments,
)
from halfmoon.federation.transport.node import APP_FAILED, WORKER_DIED, Worker, WorkerError
from halfmoon.federation.transport.processes import SERVER_APP, SUPERLINK, ProcessFolder, exclusive
from halfmoon.federation.transport.records import unwrap_message, wrap_message
from halfmoon.federation.transport.site_process import SiteOptions, join_federation, node_options
from halfmoon.sites.keys import certificates
from halfmoon.storage.events import EventLog, NullRecorder, Tail

pytest.importorskip("flwr")

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends children with their parent")


def test_the_superlink_is_started_with_its_queue_and_without_installing(tmp_path: Path):
    """It listens at the given address, without TLS if there are no certificates; its queue is in memory by default."""
    options = ServerOptions(tmp_path / "f.toml", tmp_path / "run", port=9099)
    flag = "--disable-runtime-dependency-installation"
    address = ["--host", "127.0.0.1", "--port", "9099"]
    assert superlink_arguments(options) == [*address, "--database", ":flwr-in-memory:", flag, "--insecure"]
    database = str(tmp_path / "run" / "flower" / "state.db")
    on_disk = superlink_arguments(replace(options, queue="disk"))
    assert on_disk == [*address, "--database", database, flag, "--insecure"]
    files = create_authority(tmp_path)
    safe = superlink_arguments(ServerOptions(tmp_path / "f.toml", tmp_path / "run", "0.0.0.0", **files))
    assert "--insecure" not in safe
    pairs = dict(zip(safe[-6::2], safe[-5::2], strict=True))
    assert pairs == {
        "--ssl-ca-certfile": str(files["ca"]),
        "--ssl-certfile": str(files["certificate"]),
        "--ssl-keyfile": str(files["key"]),
    }


def test_settings_passed_to_flower_in_addition_to_the_app(tmp_path: Path):
    """Quotes, blanks and letters beyond ASCII in a folder's name come through."""
    folder = tmp_path / 'a "b" é'
    given = tomllib.loads(render_run_config(ServerOptions(folder / "f.toml", folder / "run")))
    assert given == {"federation": f"{folder}/f.toml", "run-dir": f"{folder}/run"}
    files = create_authority(tmp_path)
    safe = tomllib.loads(render_connection(ServerOptions(folder / "f.toml", folder / "run", "0.0.0.0", 7000, **files)))
    held = {"address": "127.0.0.1:7000", "root-certificates": str(files["ca"])}
    assert safe["superlink"] == {"default": "halfmoon", "halfmoon": held}
    plain = tomllib.loads(render_connection(ServerOptions(folder / "f.toml", folder / "run", "::1", 7000)))
    assert plain["superlink"]["halfmoon"] == {"address": "[::1]:7000", "insecure": True}


def member(folder: Path, **given: object) -> SiteOptions:
    options: dict = {
        "server": Address("127.0.0.1", 9092),
        "name": "site-00",
        "folder": folder,
        "state_folder": folder / "home",
    }
    return SiteOptions(**{**options, "images": 3, "labeled": 2, **given})


def test_processes_of_a_site_read_server_and_identity_from_a_file(tmp_path: Path):
    folder = tmp_path / "ward 'x' = \"7\""
    config = {"name": "site-00", "folder": str(folder), "home": f"{folder}/home", "device": "auto"}
    apps = list(bundle.APPS)
    assert node_options(member(folder)) == {
        "server": "127.0.0.1:9092", "ca": None, "key": None, "apps": apps, "config": config,
    }  # fmt: skip
    files = create_authority(tmp_path)
    safe = node_options(member(folder, ca=files["ca"], key=files["key"]))
    assert (safe["ca"], safe["key"], safe["config"]["key"]) == (str(files["ca"]), *[str(files["key"])] * 2)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"host": "0.0.0.0"}, "--host 0.0.0.0 is open to other machines"),
        ({"ca": "ca"}, "--certificate is missing"),
        ({"ca": "ca", "certificate": "certificate"}, "--key is missing"),
        ({"ca": "ca", "certificate": "certificate", "key": "nothing"}, "there is no such file"),
        ({"ca": "key", "certificate": "certificate", "key": "key"}, "no file of certificates in PEM"),
        ({"ca": "ca", "certificate": "certificate", "key": "key", "insecure": True}, "contradict"),
    ],
)
def test_a_server_is_refused(tmp_path: Path, given: dict, message: str):
    """Without TLS a server is for this machine; files of TLS come together, exist, and are what they should be."""
    create_authority(tmp_path)
    files = {name: tmp_path / f"{value}.pem" if isinstance(value, str) else value for name, value in given.items()}
    files |= {"host": given["host"]} if "host" in given else {}
    with pytest.raises(UserError, match=message):
        ServerOptions(tmp_path / "f.toml", tmp_path / "run", **files)
    ServerOptions(tmp_path / "f.toml", tmp_path / "run", "0.0.0.0", insecure=True)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"name": "a/b"}, "--name is 'a/b'"),
        ({"name": ".."}, "--name is"),
        ({"server": Address("192.0.2.7", 9092)}, "nothing on the way to 192.0.2.7:9092 would be encrypted"),
        ({"key": "key"}, "--key needs --ca"),
        ({"ca": "ca", "key": "nothing"}, "there is no such file"),
        ({"ca": "ca", "key": "folder"}, "this is a folder; give the file of the key"),
        ({"ca": "nothing"}, "no file of certificates in PEM"),
        ({"ca": "ca", "insecure": True}, "contradict"),
    ],
)
def test_a_site_is_refused(tmp_path: Path, given: dict, message: str):
    """A name that is a folder's or a flag's, a plain connection through a network, keys without TLS."""
    create_authority(tmp_path)
    (tmp_path / "folder.pem").mkdir()
    files = {name: tmp_path / f"{given[name]}.pem" for name in ("ca", "key") if name in given}
    with pytest.raises(UserError, match=message):
        member(tmp_path, **{**given, **files})


@pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="ssh-keygen is not installed")
@pytest.mark.parametrize("make", ["-t ecdsa -b 384 -N secret", "-t rsa -b 2048 -N", "-t ecdsa -m PEM -N", "public"])
def test_a_key_that_flower_does_not_take_is_refused_before_anything_starts(tmp_path: Path, make: str):
    """It has a passphrase, is of another kind or form, or is the public half: to try it again would never help."""
    files = create_authority(tmp_path)
    key = tmp_path / "north"
    flags = ["-t", "ecdsa", "-N", ""] if make == "public" else make.split()
    flags += [""] if flags[-1] == "-N" else []
    subprocess.run(["ssh-keygen", "-q", *flags, "-f", str(key)], check=True)
    site = member(tmp_path, ca=files["ca"], key=key.with_suffix(".pub") if make == "public" else key)
    with pytest.raises(UserError, match="is no private key that Flower takes"):
        join_federation(site, NullRecorder())
    assert not site.processes.folder.exists()


@pytest.mark.parametrize("message", ["", "host", "host:", ":9092", "host:0", "host:65536", "http://host:1", "::1:9092"])
def test_an_address_is_refused(message: str):
    """A host and a port from 1 to 65535, nothing else."""
    with pytest.raises(UserError, match="HOST:PORT"):
        Address.parse(message)


def test_addresses():
    """IPv6 stands in brackets; everywhere is also here."""
    assert Address.parse("[::1]:9092") == Address("::1", 9092)
    assert str(Address("::1", 9092)) == "[::1]:9092"
    assert Address("::", 1).local == Address("::1", 1)
    assert Address("0.0.0.0", 1).local == Address("127.0.0.1", 1)
    local = [Address.parse(f"{host}:1").is_loopback for host in ("localhost", "127.3.2.1", "[::1]", "0.0.0.0", "a.org")]
    assert local == [True, True, True, False, False]


@pytest.mark.parametrize(
    ("message", "expected_text"),
    [
        (["serve", "f.toml", "--port", "0"], "--port is '0'"),
        (["serve", "f.toml", "--restarts", "-1"], "--restarts"),
        (["serve", "f.toml"], "f.toml"),
        (["site", "join", "--server", "x", "--site", "s", "--name", "n"], "HOST:PORT"),
        (["site", "join", "--server", "x:1", "--site", "s", "--name", "n"], "there is no such folder"),
        (["site", "join", "--server", "x:1", "--site", "s", "--name", "n", "--device", "tpu"], "--device"),
        (["site", "join", "--server", "x:1", "--site", "t", "--name", "n"], "would be encrypted"),
        (["site", "join", "--server", "localhost:1", "--site", "u", "--name", "n"], "labels without a file"),
        (["site", "join", "--site", "t", "--name", "n"], "--server"),
    ],
)
def test_the_command_line_refuses_in_one_sentence(tmp_path, monkeypatch, capsys, message, expected_text):
    """Nothing is started before what can be known is known; exit code 2."""
    monkeypatch.chdir(tmp_path)
    for name in "tu":
        (tmp_path / name).mkdir()
        Image.new("L", (4, 4)).save(tmp_path / name / "a.png")
    (tmp_path / "u" / "labels.csv").write_text("path,label\nb.png,cat\n")
    assert cli.main(message) == 2
    heard = capsys.readouterr().err
    assert expected_text in heard
    assert heard.startswith("halfmoon: ")
    assert len(heard.splitlines()) == 1
    assert not (tmp_path / "runs").exists()


def test_without_flower_the_error_names_the_package_to_install(tmp_path, monkeypatch, capsys):
    there = metadata.version

    def version(name: str) -> str:
        if name == "flwr":
            raise metadata.PackageNotFoundError(name)
        return there(name)

    monkeypatch.setattr(metadata, "version", version)
    assert cli.main(["serve", str(tmp_path / "f.toml")]) == 2
    assert "'.[flower]'" in capsys.readouterr().err


def test_halfmoon_does_not_need_flower():
    code = "import halfmoon.cli.main, sys; "
    code += "import halfmoon.federation.transport.site_process, halfmoon.federation.transport.launch; "
    code += "sys.exit(' '.join({'flwr', 'torch'} & set(sys.modules)) or 0)"
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True)
    assert done.returncode == 0, done.stderr


class Health(http.server.BaseHTTPRequestHandler):
    """Replies /health as a SuperLink does, and nothing else."""

    known = "/health"

    def do_GET(self) -> None:
        self.send_response(200 if self.path == self.known else 404)
        self.end_headers()

    def log_message(self, *message: object) -> None:
        """Say nothing."""


@contextmanager
def listening(known: str = "/health", **files: Path) -> Iterator[Address]:
    """Serve on a free port; only the path `known` is there."""
    handler = type("Known", (Health,), {"known": known})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    if files:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(files["certificate"], files["key"])
        server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield Address("127.0.0.1", server.server_port)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_server_is_distinguished_from_closed_ports_and_different_servers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    files = create_authority(tmp_path / "a")
    strange = create_authority(tmp_path / "b")
    monkeypatch.setattr(certificates, "LOCAL_HOSTS", ("192.0.2.7",))
    elsewhere = create_authority(tmp_path / "c")
    with pytest.raises(ServerUnreachable, match="does not answer"):
        check_server(Address("127.0.0.1", free_port()), None)
    with pytest.raises(ServerUnreachable):
        check_server(Address("127.0.0.1", free_port()), files["ca"])
    with listening() as plain:
        check_server(plain, None)
        with pytest.raises(UserError, match="does not speak TLS") as found:
            check_server(plain, files["ca"])
        assert not isinstance(found.value, ServerUnreachable)
    with listening("/index.html") as other, pytest.raises(UserError, match="no server of a federation"):
        check_server(other, None)
    with listening(**files) as safe:
        check_server(safe, files["ca"])
        with pytest.raises(UserError, match="speaks TLS only"):
            check_server(safe, None)
        with pytest.raises(UserError, match="not to be trusted"):
            check_server(safe, strange["ca"])
    with listening(**elsewhere) as named, pytest.raises(UserError, match="must name this host"):
        check_server(named, elsewhere["ca"])


def holder(folder: Path, script: str) -> subprocess.Popen[bytes]:
    code = "import sys, time; from pathlib import Path; from halfmoon.federation.transport import processes; "
    code += "processes.lock_until_exit(processes.lock_path(Path(sys.argv[1]), sys.argv[2])); time.sleep(60)"
    return subprocess.Popen([sys.executable, "-c", code, str(folder), script], start_new_session=True)


def test_process_with_a_lock_is_running_and_can_be_ended(tmp_path: Path):
    """Even a process that another, dead one has started, and before anybody has waited for it."""
    process_folder = ProcessFolder(tmp_path)
    assert not process_folder.is_running(SUPERLINK)
    assert not process_folder.has_started(SUPERLINK)
    process = holder(tmp_path, SUPERLINK)
    try:
        wait_until(lambda: process_folder.has_started(SUPERLINK))
        assert process_folder.is_running(SUPERLINK)
        assert not process_folder.is_running(SERVER_APP)
        process_folder.kill_all()
        assert not process_folder.is_running(SUPERLINK)
        assert process_folder.has_started(SUPERLINK)
        process_folder.clear_lock(SUPERLINK)
        assert not process_folder.has_started(SUPERLINK)
        assert process.wait() == -signal.SIGKILL
    finally:
        process.kill()


def test_one_at_a_time(tmp_path: Path):
    path = tmp_path / "deep" / "lock"
    with exclusive(path, "first"), pytest.raises(UserError, match="not twice"), exclusive(path, "not twice"):
        pass
    with exclusive(path, "free again"):
        pass


def test_scripts_find_flower_without_a_path(tmp_path: Path):
    """A script of Flower's name runs Flower's command, from a folder whose name needs quotes, in another's cwd."""
    process_folder = ProcessFolder(tmp_path / "a 'b'")
    process_folder.prepare()
    (tmp_path / "flwr.py").write_text("raise SystemExit('the wrong one')")
    environment = {**process_folder.environment(), "PATH": f"{process_folder.folder / 'bin'}:/bin:/usr/bin"}
    done = subprocess.run(
        ["flower-superlink", "--version"], env=environment, cwd=tmp_path, capture_output=True, check=False
    )
    assert metadata.version("flwr") in done.stdout.decode(), done.stderr


WORKING = """
import json, os

class Client:
    def __init__(self, options):
        self.options = options

    def reply_to(self, data):
        order = data.decode()
        if order == "die":
            os._exit(1)
        if order == "fail":
            raise ValueError("no")
        facts = {"pid": os.getpid(), "name": self.options["name"], "order": order}
        return json.dumps(facts).encode()

open_client = Client
"""


def test_worker_handles_many_messages_and_is_replaced_after_a_crash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A failure and a death return as Flower's errors 2 and 8; the next message finds a process that works."""
    (tmp_path / "working.py").write_text(WORKING)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv(processes.FOLDER_VARIABLE, str(tmp_path))
    worker = Worker("working:client", {"name": "north"})

    def send(order: str) -> dict[str, Any]:
        return json.loads(unwrap_message(worker.reply_to(wrap_message(order.encode()))))

    try:
        first, second = (send(order) for order in ("one", "two"))
        assert (first["name"], first["order"], second["order"]) == ("north", "one", "two")
        assert first["pid"] == second["pid"]
        for order, code in (("fail", APP_FAILED), ("die", WORKER_DIED)):
            with pytest.raises(WorkerError) as error:
                send(order)
            assert error.value.code == code
        assert send("three")["pid"] != first["pid"]
    finally:
        worker.stop()


def test_the_end_of_a_log_is_followed_by_whole_lines(tmp_path: Path):
    """What was there before is old; half a line is not yet there; a file that begins anew is read from its start."""
    path = tmp_path / "log"
    assert Tail(path).read_lines() == []
    path.write_text("old\n")
    tail = Tail(path)
    with path.open("a") as file:
        file.write("one\ntw")
        file.flush()
        assert tail.read_lines() == ["one"]
        assert tail.read_lines() == []
        file.write("o\n")
    assert tail.read_lines() == ["two"]
    path.write_text("new\n")
    assert tail.read_lines() == ["new"]


@pytest.fixture
def toys(tmp_path: Path) -> Iterator[ToyFederation]:
    """Yield a federation of toy apps; no process is left afterwards."""
    federation = ToyFederation(tmp_path)
    yield federation
    federation.kill_all()


@pytest.mark.nightly  # kills of a site are in test_dicom_federation.py
@LINUX
def test_a_federation_survives_kills_and_leaves_no_process(toys: ToyFederation):
    """Over TLS: the SuperLink is killed after round 1 and `serve` after round 2; each round was run once, in order.
    A killed `serve` takes its processes along at once, and so does a site that is told to end."""
    (toys.folder / "ward").mkdir()
    site = toys.start(JOIN, "j", toys.port, toys.folder / "ward", toys.files["ca"])
    serving = toys.start_server("s")
    wait_until(lambda: "round 1 is over" in toys.read_output("s"))
    os.kill(int((toys.run / "flower" / "flower-superlink.lock").read_text()), signal.SIGKILL)
    wait_until(lambda: "round 2 is over" in toys.read_output("s"))
    assert "the SuperLink died; it is started again, and the federation goes on after round 1" in toys.read_output("s")
    assert len(toys.list_processes("run")) >= 3  # the reader of processes is not blind
    serving.kill()
    serving.wait()
    wait_until(lambda: not toys.list_processes("run"), 5)
    repeated = toys.start_server("s2")
    assert repeated.wait(90) == 0, toys.read_output("s2")
    rows = [json.loads(line) for line in (toys.run / "metrics.jsonl").read_text().splitlines()]
    assert rows == [{"round": number, "site": "site-00"} for number in range(3)]
    assert is_finished(toys.run)
    site.send_signal(signal.SIGTERM)
    site.wait(20)
    assert toys.list_processes() == []
    text = toys.read_output("j")
    assert f"site-00 (3 images, 2 labeled) joins 127.0.0.1:{toys.port}" in text
    # Each loss is reported once, however often Flower tries; the last one may be of the server that has finished.
    assert text.count(": waiting for it") - text.count("answers\n") in (0, 1)
    assert text.count(": waiting for it") <= 5
    assert "asked for 2" in text


def test_what_the_log_calls_stopped_is_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The sentence of the server's program is the error; nothing is restarted; a second server is refused."""
    started: list[str] = []

    def start(self: ProcessFolder, script: str, arguments: Sequence[str]) -> subprocess.Popen[bytes]:
        started.append(script)
        return subprocess.Popen(["sleep", "60"])

    def flwr(
        self: ProcessFolder, arguments: Sequence[str], seconds: float = 60.0
    ) -> subprocess.CompletedProcess[bytes]:
        log = EventLog(self.folder.parent / "serve.log")
        log.record("resumed", "goes on after round 0")
        log.record("stopped", "stopped: there is no disk left.", reason="there is no disk left.")
        return subprocess.CompletedProcess(arguments, 0, b'{"run-id": 7}', b"")

    monkeypatch.setattr(ProcessFolder, "start", start)
    monkeypatch.setattr(ProcessFolder, "flwr", flwr)
    monkeypatch.setattr(launch, "check_server", lambda address, ca: None)
    server = ServerOptions(tmp_path / "f.toml", tmp_path / "run", port=free_port())
    seen: list[str] = []

    class Display:
        def record(self, name: str, text: str, /, **fields: Any) -> None:
            seen.append(text)
            with pytest.raises(UserError, match="served by another process"):
                serve(server, self)

    with pytest.raises(Halted, match=r"^there is no disk left\.$"):
        serve(server, Display())
    assert [line.split("  ")[1] for line in seen] == ["goes on after round 0", "stopped: there is no disk left."]
    assert started == [SUPERLINK]
    with listening() as other, pytest.raises(UserError, match=f"port {other.port} is taken"):
        serve(replace(server, port=other.port), Display())


def test_flower_prints_no_colors_in_a_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """FORCE_COLOR, which Jupyter's kernels set, colored the JSON that says which run was taken."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "FORCE_COLOR" not in processes.ProcessFolder(tmp_path).environment()
