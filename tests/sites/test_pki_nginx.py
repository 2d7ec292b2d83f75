"""Check the configuration of nginx in the real nginx, in front of a stand-in for the SuperLink: what it forwards."""

import http.client
import json
import os
import socket
import ssl
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from fake_transport import free_port
from nginx_proxy import NGINX, NginxProxy, StandInServer

from halfmoon.sites.keys.make import create_keys, renew_certificates

pytestmark = pytest.mark.skipif(NGINX is None, reason="nginx is not installed")

CHUNK_BYTES = 5 * 2**20
"""Bytes of the chunks into which Flower splits arrays."""


def start_nginx(keys: Path, user: str | None) -> None:
    command = [str(NGINX), "-c", str(keys / "nginx.conf")]
    for message in ([*command, "-t"], command):
        done = subprocess.run(message, capture_output=True, text=True, check=False, user=user)
        assert done.returncode == 0, done.stderr


def stop_nginx(keys: Path) -> None:
    number = int((keys / "nginx" / "nginx.pid").read_text())
    os.kill(number, 15)
    wait_until(lambda: not (keys / "nginx" / "nginx.pid").exists())


@pytest.fixture(params=["root", "nobody"])
def proxy(request: pytest.FixtureRequest) -> Iterator[NginxProxy]:
    """Yield a proxy in front of a stand-in, run by the user of the tests and by a user with few permissions."""
    user = None if request.param == "root" else "nobody"
    if user and os.getuid() != 0:
        pytest.skip("only root can run nginx as another user")
    with tempfile.TemporaryDirectory(prefix="a proxy's ") as temporary, ExitStack() as ending:
        os.chmod(temporary, 0o755)
        keys = Path(temporary, "keys")
        port = free_port()
        listen = free_port()
        server = StandInServer()
        create_keys(keys, ["north"], port=port, listen=listen)
        if user is not None:
            subprocess.run(["chown", "-R", user, str(keys)], check=True)
        listener = server.serve(port, keys)
        ending.callback(listener.server_close)
        ending.callback(listener.shutdown)
        start_nginx(keys, user)
        ending.callback(stop_nginx, keys)
        yield NginxProxy(keys, listen, server)


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait until a condition is true; fail after a minute."""
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def reload(proxy: NginxProxy, done: Callable[[], bool]) -> None:
    """Reload nginx and wait until the new configuration has an effect."""
    command = [str(NGINX), "-c", str(proxy.keys / "nginx.conf"), "-s", "reload"]
    subprocess.run(command, check=True, capture_output=True)
    wait_until(done)


def test_only_requests_of_sites_are_forwarded(proxy: NginxProxy) -> None:
    """Requests of a SuperNode reach the SuperLink; those that control it get a 403 and a line in the log."""
    for name in ("pull-messages", "push-object", "activate-node"):
        assert proxy.request("POST", f"/v1/fleet/{name}", b"12345") == (200, b"oo")
    assert proxy.request("GET", "/health") == (200, b"oo")
    passed = [*(("POST", f"/v1/fleet/{name}", 5) for name in ("pull-messages", "push-object", "activate-node"))]
    passed += [("GET", "/health", 0)]
    assert proxy.server.seen == passed
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
        assert proxy.request(method, path)[0] == 403, path
    assert proxy.server.seen == passed
    wait_until(lambda: proxy.log().count("\n") == len(refused))  # nginx writes its line after the response
    for method, path in refused:
        assert f' 403 "{method} {path} HTTP/1.1" ' in proxy.log(), path
    assert proxy.server.forwarded == {"127.0.0.1"}


@pytest.mark.parametrize("proxy", ["root"], indirect=True)
def test_no_spelling_of_a_path_bypasses_the_proxy(proxy: NginxProxy) -> None:
    """Dots, doubled and encoded slashes, other host names: each forwarded path is a fleet path to the SuperLink, too."""
    order = "control/list-runs"
    for name in ("control", "127.0.0.1:8000", "localhost"):
        assert proxy.request("POST", f"/v1/{order}", Host=name)[0] in (400, 403)
    assert proxy.server.seen == []
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
        status = proxy.request("POST", path)[0]
        assert status in (200, 400, 403), path
    for method, path, _ in proxy.server.seen:
        assert method == "POST"
        assert path.startswith("/v1/fleet/"), path
        assert "/../" not in path
    # Request smuggling: the two ends of the connection might disagree on where the first request ends.
    inner = f"POST /v1/{order} HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n".encode()
    before = len(proxy.server.seen)
    chunked = {"Transfer-Encoding": "chunked", "Content-Length": "0"}
    assert proxy.request("POST", "/v1/fleet/x", b"0\r\n\r\n" + inner, **chunked)[0] in (200, 400)
    assert all("control" not in path for _, path, _ in proxy.server.seen[before:])


def test_requests_are_limited_to_the_size_of_a_chunk(proxy: NginxProxy) -> None:
    """Flower's largest request is one chunk of 5 MiB and its header; responses may have any size."""
    flwr = pytest.importorskip("flwr.proto.message_pb2", reason="Flower is not installed")
    from flwr.app.message.arraychunk import ArrayChunk

    chunk = ArrayChunk(memoryview(bytes(CHUNK_BYTES))).deflate()
    number = 2**63
    request = flwr.PushObjectRequest(run_id=number, object_id="f" * 64, object_content=chunk)
    request.node.node_id = number
    body = request.SerializeToString()
    assert CHUNK_BYTES < len(body) < CHUNK_BYTES + 1000
    assert proxy.request("POST", "/v1/fleet/push-object", body) == (200, b"oo")
    assert proxy.server.seen == [("POST", "/v1/fleet/push-object", len(body))]
    assert len(proxy.request("POST", "/v1/fleet/pull-object", Want=str(8 * CHUNK_BYTES))[1]) == 8 * CHUNK_BYTES
    with suppress(
        BrokenPipeError, ConnectionResetError, ssl.SSLError
    ):  # nginx may close the connection before all is sent
        assert proxy.request("POST", "/v1/fleet/push-object", bytes(6 * 2**20 + 1))[0] == 413
    wait_until(lambda: ' 413 "POST /v1/fleet/push-object HTTP/1.1" ' in proxy.log())
    assert len(proxy.server.seen) == 2
    wait_until(lambda: "client intended to send too large body: 6291457 bytes" in proxy.log("error.log"))


@pytest.mark.parametrize("proxy", ["root"], indirect=True)
def test_many_sites_of_one_address_are_accepted_and_share_connections(proxy: NginxProxy) -> None:
    """Forty callers of one address with twenty requests each: none is refused, and the SuperLink sees few callers."""
    statuses: list[int] = []

    def call() -> None:
        context = ssl.create_default_context(cafile=proxy.keys / "ca.crt")
        link = http.client.HTTPSConnection("127.0.0.1", proxy.port, timeout=20, context=context)
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
    assert len(proxy.server.callers) < 200


@pytest.mark.parametrize("proxy", ["root"], indirect=True)
def test_requests_above_the_rate_limit_get_a_status_that_sites_retry(proxy: NginxProxy) -> None:
    """With limits that a test can reach: 503, which Flower treats as a server that is unavailable."""
    retry = pytest.importorskip("flwr.supercore.retry.http_retry", reason="Flower is not installed")
    assert {502, 503, 504} <= retry._RETRYABLE_STATUS_CODES
    text = (proxy.keys / "nginx.conf").read_text()
    assert text.count("rate=500r/s") == text.count("burst=2000") == 1
    (proxy.keys / "nginx.conf").write_text(text.replace("rate=500r/s", "rate=1r/m").replace("burst=2000", "burst=3"))
    reload(proxy, lambda: proxy.request("GET", "/health")[0] == 503)
    wait_until(lambda: ' 503 "GET /health HTTP/1.1" ' in proxy.log())
    wait_until(lambda: "limiting requests, excess: " in proxy.log("error.log"))


@pytest.mark.parametrize("proxy", ["root"], indirect=True)
def test_proxy_accepts_only_current_tls(proxy: NginxProxy) -> None:
    """Not plain HTTP, not TLS 1.1; TLS 1.2 and 1.3."""
    link = http.client.HTTPConnection("127.0.0.1", proxy.port, timeout=20)
    link.request("GET", "/health")
    assert link.getresponse().status == 400
    link.close()

    def shake(minimum: ssl.TLSVersion, maximum: ssl.TLSVersion, ciphers: str = "DEFAULT") -> str | None:
        context = ssl.create_default_context(cafile=proxy.keys / "ca.crt")
        context.minimum_version = minimum
        context.maximum_version = maximum
        context.set_ciphers(ciphers)
        with socket.create_connection(("127.0.0.1", proxy.port), timeout=20) as plain:
            return context.wrap_socket(plain, server_hostname="localhost").version()

    assert shake(ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_2) == "TLSv1.2"
    assert shake(ssl.TLSVersion.TLSv1_3, ssl.TLSVersion.TLSv1_3) == "TLSv1.3"
    with pytest.warns(DeprecationWarning, match="TLSv1"), pytest.raises(OSError, match="alert protocol version"):
        shake(ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1, "ALL:@SECLEVEL=0")
    assert proxy.server.seen == []


@pytest.mark.parametrize("proxy", ["root"], indirect=True)
def test_proxy_verifies_the_certificate_of_the_superlink(proxy: NginxProxy) -> None:
    """A process at its port with a certificate of another authority receives nothing: 502, and a line in error.log."""
    record = json.loads((proxy.keys / "access.json").read_bytes())
    assert proxy.request("POST", "/v1/fleet/x") == (200, b"oo")
    swapped = proxy.keys.parent / "other"
    create_keys(swapped, port=record["port"], listen=record["listen"])
    text = (proxy.keys / "nginx.conf").read_text()
    trusting = f'proxy_ssl_trusted_certificate "{proxy.keys / "ca.crt"}"'
    assert text.count(trusting) == 1
    (proxy.keys / "nginx.conf").write_text(text.replace(trusting, trusting.replace(str(proxy.keys), str(swapped))))
    reload(proxy, lambda: proxy.request("POST", "/v1/fleet/x")[0] == 502)
    wait_until(lambda: "upstream SSL certificate verify error" in proxy.log("error.log"))


@pytest.mark.parametrize("proxy", ["root"], indirect=True)
def test_reload_uses_the_new_certificate(proxy: NginxProxy) -> None:
    """The sites' ca.crt remains valid, and they see the fingerprint of the new certificate.

    Old workers of nginx may still reply until they have ended.
    """

    def read_certificate() -> bytes | None:
        context = ssl.create_default_context(cafile=proxy.keys / "ca.crt")
        with socket.create_connection(("127.0.0.1", proxy.port), timeout=20) as plain:
            return context.wrap_socket(plain, server_hostname="localhost").getpeercert(binary_form=True)

    before = read_certificate()
    renew_certificates(proxy.keys)
    expected = ssl.PEM_cert_to_DER_cert((proxy.keys / "server" / "server.crt").read_text())
    assert before != expected
    reload(proxy, lambda: all(read_certificate() == expected for _ in range(5)))
    # The SuperLink still has the old certificate: no restart is needed until that expires.
    assert proxy.request("POST", "/v1/fleet/pull-messages") == (200, b"oo")


@pytest.mark.parametrize("proxy", ["nobody" if hasattr(os, "getuid") and os.getuid() == 0 else "root"], indirect=True)
def test_idle_connections_do_not_block_a_site(proxy: NginxProxy):
    """With more idle connections than nginx' default limit (1,024 a worker) a site gets a response, and they are closed.

    `benchmarks/server_attacks.py half-open` opens 10,000 for a minute.
    """
    idle: list[socket.socket] = []
    try:
        for number in range(1100 * (os.cpu_count() or 1)):
            idle.append(socket.create_connection(("127.0.0.1", proxy.port), timeout=5))
            if number % 2:
                idle[-1].send(bytes.fromhex("1603010200010001fc0303"))
        start_time = time.monotonic()
        assert proxy.request("POST", "/v1/fleet/pull-messages")[0] == 200
        assert time.monotonic() - start_time < 2
        idle[0].settimeout(8)
        with suppress(ConnectionError):
            assert idle[0].recv(1) == b"", "nginx closes an idle connection"
    finally:
        for each in idle:
            each.close()
