"""Run the real nginx with the configuration of `halfmoon federation init` in front of a stand-in for the SuperLink.

Used by tests/sites/test_pki_nginx.py and by benchmarks/server_attacks.py.
"""

import http.client
import shutil
import ssl
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")


@dataclass
class StandInServer:
    """Stand in for the SuperLink: record each request, and reply with as many bytes as its header `Want` demands.

    Attributes:
        seen: (method, path, bytes of the body) of each request.
        callers: the addresses of the connections.
        forwarded: the values of X-Forwarded-For.
    """

    seen: list[tuple[str, str, int]] = field(default_factory=list)
    callers: set[tuple[str, int]] = field(default_factory=set)
    forwarded: set[str] = field(default_factory=set)

    def serve(self, port: int, keys: Path) -> ThreadingHTTPServer:
        """Serve with the certificate in a folder of keys until the returned server is shut down."""
        stand_in = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _reply(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                stand_in.seen.append((self.command, self.path, len(body)))
                stand_in.callers.add(self.client_address)
                stand_in.forwarded.add(self.headers["X-Forwarded-For"])
                time.sleep(float(self.headers.get("Wait", 0)))
                size = int(self.headers.get("Want", 2))
                self.send_response(200)
                self.send_header("Content-Length", str(size))
                self.end_headers()
                self.wfile.write(b"o" * size)

            do_GET = do_POST = do_PUT = do_DELETE = _reply

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
class NginxProxy:
    """A running nginx of a folder of keys, and the stand-in behind it."""

    keys: Path
    port: int
    server: StandInServer

    def request(self, method: str, path: str, body: bytes = b"", **headers: str) -> tuple[int, bytes]:
        """Send a request over TLS, trusting the folder's authority; the path is sent as given."""
        context = ssl.create_default_context(cafile=self.keys / "ca.crt")
        connection = http.client.HTTPSConnection("localhost", self.port, timeout=20, context=context)
        try:
            connection.putrequest(method, path, skip_accept_encoding=True)
            for name, value in {"Content-Length": str(len(body)), **headers}.items():
                connection.putheader(name, value)
            connection.endheaders()
            connection.send(body)
            reply = connection.getresponse()
            return reply.status, reply.read()
        finally:
            connection.close()

    def log(self, name: str = "access.log") -> str:
        """Read a log of nginx."""
        return (self.keys / "nginx" / name).read_text()
