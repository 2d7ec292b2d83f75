"""The configuration of nginx, in the real nginx before a stand-in for the SuperLink: what it lets through."""

import http.client
import json
import os
import shutil
import socket
import ssl
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from halfmoon.sites.keys.make import create_keys, renew_certificates

NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
pytestmark = pytest.mark.skipif(NGINX is None, reason="nginx is not installed")

PIECE = 5 * 2**20
"""Bytes of what Flower cuts arrays into."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@dataclass
class Link:
    """Stands in for the SuperLink: notes what reaches it, and answers with as many bytes as it is asked for."""

    seen: list[tuple[str, str, int]] = field(default_factory=list)
    callers: set[tuple[str, int]] = field(default_factory=set)
    forwarded: set[str] = field(default_factory=set)

    def serve(self, port: int, keys: Path) -> ThreadingHTTPServer:
        """Serve with the certificate in a folder of keys until it is told to end."""
        link = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                link.seen.append((self.command, self.path, len(body)))
                link.callers.add(self.client_address)
                link.forwarded.add(self.headers["X-Forwarded-For"])
                time.sleep(float(self.headers.get("Wait", 0)))
                size = int(self.headers.get("Want", 2))
                self.send_response(200)
                self.send_header("Content-Length", str(size))
                self.end_headers()
                self.wfile.write(b"o" * size)

            do_GET = do_POST = do_PUT = do_DELETE = _answer

            def log_message(self, *_: object) -> None:
                pass

        class Quiet(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, *_: object) -> None:
                pass

        server = Quiet(("127.0.0.1", port), Handler)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(keys / "server" / "server.crt", keys / "server" / "server.key")
        server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        return server


@dataclass
class Door:
    """A running nginx of a folder of keys."""

    keys: Path
    port: int
    link: Link

    def ask(self, method: str, path: str, body: bytes = b"", **headers: str) -> tuple[int, bytes]:
        """Ask over TLS, trusting the folder's authority; the path goes out as it is given."""
        context = ssl.create_default_context(cafile=self.keys / "ca.crt")
        link = http.client.HTTPSConnection("localhost", self.port, timeout=20, context=context)
        try:
            link.putrequest(method, path, skip_accept_encoding=True)
            for name, value in {"Content-Length": str(len(body)), **headers}.items():
                link.putheader(name, value)
            link.endheaders()
            link.send(body)
            reply = link.getresponse()
            return reply.status, reply.read()
        finally:
            link.close()

    def log(self, name: str = "access.log") -> str:
        return (self.keys / "nginx" / name).read_text()


def _started(keys: Path, who: str | None) -> None:
    command = [str(NGINX), "-c", str(keys / "nginx.conf")]
    for message in ([*command, "-t"], command):
        done = subprocess.run(message, capture_output=True, text=True, check=False, user=who)
        assert done.returncode == 0, done.stderr


def _ended(keys: Path) -> None:
    number = int((keys / "nginx" / "nginx.pid").read_text())
    os.kill(number, 15)
    soon(lambda: not (keys / "nginx" / "nginx.pid").exists())


@pytest.fixture(params=["me", "nobody"])
def door(request: pytest.FixtureRequest) -> Iterator[Door]:
    """Give a door with a stand-in behind it, run by who runs the tests, and by a user who may do little."""
    who = None if request.param == "me" else "nobody"
    if who and os.getuid() != 0:
        pytest.skip("only root can run nginx as somebody else")
    with tempfile.TemporaryDirectory(prefix="a door's ") as home, ExitStack() as ending:
        os.chmod(home, 0o755)
        keys = Path(home, "keys")
        port = free_port()
        listen = free_port()
        link = Link()
        create_keys(keys, ["north"], port=port, listen=listen)
        if who is not None:
            subprocess.run(["chown", "-R", who, str(keys)], check=True)
        server = link.serve(port, keys)
        ending.callback(server.server_close)
        ending.callback(server.shutdown)
        _started(keys, who)
        ending.callback(_ended, keys)
        yield Door(keys, listen, link)


def soon(condition: Callable[[], bool]) -> None:
    """Wait until something is so; fail where it does not become so."""
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def reload(door: Door, done: Callable[[], bool]) -> None:
    """Reload nginx and wait until that shows."""
    command = [str(NGINX), "-c", str(door.keys / "nginx.conf"), "-s", "reload"]
    subprocess.run(command, check=True, capture_output=True)
    soon(done)


def test_sites_get_through_and_nobody_else(door: Door) -> None:
    """What a SuperNode asks for reaches the SuperLink; orders to it get a 403, and a line in the log."""
    for name in ("pull-messages", "push-object", "activate-node"):
        assert door.ask("POST", f"/v1/fleet/{name}", b"12345") == (200, b"oo")
    assert door.ask("GET", "/health") == (200, b"oo")
    passed = [*(("POST", f"/v1/fleet/{name}", 5) for name in ("pull-messages", "push-object", "activate-node"))]
    passed += [("GET", "/health", 0)]
    assert door.link.seen == passed
    refused = [
        ("POST", "/v1/control/list-runs"),
        ("POST", "/v1/control/start-run"),
        ("POST", "/v1/control/register-node"),
        ("POST", "/v1/runtime/pull-messages"),
        ("GET", "/"),
        ("GET", "/docs"),
        ("GET", "/openapi.json"),
        ("GET", "/healthy"),
        ("POST", "/v1/fleet"),
        ("POST", "/v1/FLEET/pull-messages"),
        ("GET", "/v1/fleet/pull-messages"),
        ("DELETE", "/v1/fleet/pull-messages"),
        ("POST", "/health"),
        ("PUT", "/health"),
    ]
    for method, path in refused:
        assert door.ask(method, path)[0] == 403, path
    assert door.link.seen == passed
    soon(lambda: door.log().count("\n") == len(refused))  # nginx writes its line after it has answered
    for method, path in refused:
        assert f' 403 "{method} {path} HTTP/1.1" ' in door.log(), path
    assert door.link.forwarded == {"127.0.0.1"}


@pytest.mark.parametrize("door", ["me"], indirect=True)
def test_no_spelling_of_a_path_leads_around_the_door(door: Door) -> None:
    """Dots, doubled and encoded slashes: whatever is let through is a path of the fleet's to the SuperLink too; nor
    does a host's name."""
    order = "control/list-runs"
    for name in ("control", "127.0.0.1:8000", "localhost"):
        assert door.ask("POST", f"/v1/{order}", Host=name)[0] in (400, 403)
    assert door.link.seen == []
    for path in (
        f"/v1/fleet/../{order}",
        f"/v1/fleet/%2e%2e/{order}",
        f"/v1/fleet/..%2f{order}",
        f"/v1/fleet/x/../../{order}",
        f"/v1/fleet//..//{order}",
        f"//v1/{order}",
        f"/v1/{order}/../../fleet/x",
        f"/v1/{order}/..%2f..%2ffleet/x",
        f"/v1/{order}%3f/../../fleet/x",
        f"/v1/fleet/..;/{order}",
        f"/v1/fleet/..%5c{order}",
        f"/v1/fleet/%252e%252e/{order}",
        f"/v1/fleet/.%00./{order}",
        f"https://localhost/v1/{order}",
        f"/v1/fleet/..?/v1/{order}",
        f"/{order}/v1/fleet/x",
        f"/v1/{order}?/v1/fleet/x",
        f"/v1/{order}#/v1/fleet/x",
    ):
        status = door.ask("POST", path)[0]
        assert status in (200, 400, 403), path
    for method, path, _ in door.link.seen:
        assert method == "POST"
        assert path.startswith("/v1/fleet/"), path
        assert "/../" not in path
    # Two requests in one, should the two ends of the connection see its end at different places.
    inner = f"POST /v1/{order} HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n".encode()
    before = len(door.link.seen)
    chunked = {"Transfer-Encoding": "chunked", "Content-Length": "0"}
    assert door.ask("POST", "/v1/fleet/x", b"0\r\n\r\n" + inner, **chunked)[0] in (200, 400)
    assert all("control" not in path for _, path, _ in door.link.seen[before:])


def test_a_piece_of_a_model_gets_through_and_more_does_not(door: Door) -> None:
    """Flower's largest request is one piece of 5 MiB and its head; answers may have any size."""
    flwr = pytest.importorskip("flwr.proto.message_pb2", reason="Flower is not installed")
    from flwr.app.message.arraychunk import ArrayChunk

    piece = ArrayChunk(memoryview(bytes(PIECE))).deflate()
    number = 2**63
    request = flwr.PushObjectRequest(run_id=number, object_id="f" * 64, object_content=piece)
    request.node.node_id = number
    body = request.SerializeToString()
    assert PIECE < len(body) < PIECE + 1000
    assert door.ask("POST", "/v1/fleet/push-object", body) == (200, b"oo")
    assert door.link.seen == [("POST", "/v1/fleet/push-object", len(body))]
    assert len(door.ask("POST", "/v1/fleet/pull-object", Want=str(8 * PIECE))[1]) == 8 * PIECE
    with suppress(BrokenPipeError, ConnectionResetError, ssl.SSLError):  # it may hang up before all is sent
        assert door.ask("POST", "/v1/fleet/push-object", bytes(6 * 2**20 + 1))[0] == 413
    soon(lambda: ' 413 "POST /v1/fleet/push-object HTTP/1.1" ' in door.log())
    assert len(door.link.seen) == 2
    soon(lambda: "client intended to send too large body: 6291457 bytes" in door.log("error.log"))


@pytest.mark.parametrize("door", ["me"], indirect=True)
def test_many_sites_are_not_too_many_and_share_connections(door: Door) -> None:
    """Forty callers of one address with twenty requests each: none is refused, and the SuperLink sees few callers."""
    statuses: list[int] = []

    def call() -> None:
        context = ssl.create_default_context(cafile=door.keys / "ca.crt")
        link = http.client.HTTPSConnection("127.0.0.1", door.port, timeout=20, context=context)
        for _ in range(20):
            link.request("POST", "/v1/fleet/pull-messages", b"12")
            reply = link.getresponse()
            reply.read()
            statuses.append(reply.status)
        link.close()

    threads = [threading.Thread(target=call) for _ in range(40)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert statuses == [200] * 800
    assert len(door.link.callers) < 200


@pytest.mark.parametrize("door", ["me"], indirect=True)
def test_what_is_too_much_is_answered_with_what_a_site_tries_again_at(door: Door) -> None:
    """The configuration with limits that a test can reach: 503, which Flower takes for a server that is away."""
    retry = pytest.importorskip("flwr.supercore.retry.http_retry", reason="Flower is not installed")
    assert {502, 503, 504} <= retry._RETRYABLE_STATUS_CODES
    text = (door.keys / "nginx.conf").read_text()
    assert text.count("rate=500r/s") == text.count("burst=2000") == 1
    (door.keys / "nginx.conf").write_text(text.replace("rate=500r/s", "rate=1r/m").replace("burst=2000", "burst=3"))
    reload(door, lambda: door.ask("GET", "/health")[0] == 503)
    soon(lambda: ' 503 "GET /health HTTP/1.1" ' in door.log())
    soon(lambda: "limiting requests, excess: " in door.log("error.log"))


@pytest.mark.parametrize("door", ["me"], indirect=True)
def test_the_door_speaks_tls_of_today_alone(door: Door) -> None:
    """Not plain HTTP, not TLS 1.1; TLS 1.2 and 1.3."""
    link = http.client.HTTPConnection("127.0.0.1", door.port, timeout=20)
    link.request("GET", "/health")
    assert link.getresponse().status == 400
    link.close()

    def shake(minimum: ssl.TLSVersion, maximum: ssl.TLSVersion, ciphers: str = "DEFAULT") -> str | None:
        context = ssl.create_default_context(cafile=door.keys / "ca.crt")
        context.minimum_version = minimum
        context.maximum_version = maximum
        context.set_ciphers(ciphers)
        with socket.create_connection(("127.0.0.1", door.port), timeout=20) as plain:
            return context.wrap_socket(plain, server_hostname="localhost").version()

    assert shake(ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_2) == "TLSv1.2"
    assert shake(ssl.TLSVersion.TLSv1_3, ssl.TLSVersion.TLSv1_3) == "TLSv1.3"
    with pytest.warns(DeprecationWarning, match="TLSv1"), pytest.raises(OSError, match="alert protocol version"):
        shake(ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1, "ALL:@SECLEVEL=0")
    assert door.link.seen == []


@pytest.mark.parametrize("door", ["me"], indirect=True)
def test_the_superlink_behind_the_door_is_checked_too(door: Door) -> None:
    """Another process at its port, with a certificate of another authority, hears nothing: 502, and error.log."""
    record = json.loads((door.keys / "access.json").read_bytes())
    assert door.ask("POST", "/v1/fleet/x") == (200, b"oo")
    swapped = door.keys.parent / "other"
    create_keys(swapped, port=record["port"], listen=record["listen"])
    text = (door.keys / "nginx.conf").read_text()
    trusting = f'proxy_ssl_trusted_certificate "{door.keys / "ca.crt"}"'
    assert text.count(trusting) == 1
    (door.keys / "nginx.conf").write_text(text.replace(trusting, trusting.replace(str(door.keys), str(swapped))))
    reload(door, lambda: door.ask("POST", "/v1/fleet/x")[0] == 502)
    soon(lambda: "upstream SSL certificate verify error" in door.log("error.log"))


@pytest.mark.parametrize("door", ["me"], indirect=True)
def test_a_new_certificate_is_taken_by_a_reload(door: Door) -> None:
    """As rotate says: the sites' ca.crt stays, and the fingerprint that they see is the new one's.
    A worker of before may still answer beside the new ones, until it has ended."""

    def shown() -> bytes | None:
        context = ssl.create_default_context(cafile=door.keys / "ca.crt")
        with socket.create_connection(("127.0.0.1", door.port), timeout=20) as plain:
            return context.wrap_socket(plain, server_hostname="localhost").getpeercert(binary_form=True)

    before = shown()
    renew_certificates(door.keys)
    expected = ssl.PEM_cert_to_DER_cert((door.keys / "server" / "server.crt").read_text())
    assert before != expected
    reload(door, lambda: all(shown() == expected for _ in range(5)))
    # The SuperLink still has the certificate of before: no restart is needed until that expires.
    assert door.ask("POST", "/v1/fleet/pull-messages") == (200, b"oo")


@pytest.mark.parametrize("door", ["nobody" if hasattr(os, "getuid") and os.getuid() == 0 else "me"], indirect=True)
def test_connections_that_say_nothing_keep_nobody_out(door: Door):
    """More than a worker of nginx had once (1,024 each): a site is answered while they are open, and they are cut off.
    benchmarks/half_open.py holds 10,000 for a minute."""
    held: list[socket.socket] = []
    try:
        for number in range(1100 * (os.cpu_count() or 1)):
            held.append(socket.create_connection(("127.0.0.1", door.port), timeout=5))
            if number % 2:
                held[-1].send(bytes.fromhex("1603010200010001fc0303"))
        start_time = time.monotonic()
        assert door.ask("POST", "/v1/fleet/pull-messages")[0] == 200
        assert time.monotonic() - start_time < 2
        held[0].settimeout(8)
        with suppress(ConnectionError):
            assert held[0].recv(1) == b"", "nginx cuts off who says nothing"
    finally:
        for each in held:
            each.close()
