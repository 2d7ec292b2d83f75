"""Serve a page to this machine's own browser, at one address with a secret in it.

Starlette and uvicorn (the extra "pages") are imported when a page is served, not before.
"""

from __future__ import annotations

import hmac
import os
import re
import secrets
import socket
import sys
import tempfile
import threading
import webbrowser
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halfmoon.core.errors import UserError, install_command
from halfmoon.report import templates
from halfmoon.sites.folders.labels import LabelConflict

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

LOCAL_ADDRESS = "127.0.0.1"
MAX_BODY_BYTES = 2**20  # bytes of a request's body at most: answers to a wall of images

Endpoint = Callable[["Request"], Any]
"""Takes a request and returns a response, or a value for JSON; a UserError becomes an answer with its sentence."""

SECURITY_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "x-frame-options": "DENY",
}


def require_pages() -> None:
    """Raise UserError where the extra "pages" is not installed."""
    try:
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise UserError(f"a page needs {error.name}: {install_command('pages')}.") from error


class RequestGuard:
    """Let through what comes from the page's own address: the right Host, Origin and token; the rest gets a refusal.

    `port` is where the page is served. The token is the first part of every path and is taken off before `app` sees
    it. A request that changes something must say its Origin.
    """

    def __init__(self, app: ASGIApp, token: str, port: int) -> None:
        """Stand before `app`."""
        self.app, self.token = app, token.encode()
        self.hosts = {f"{name}:{port}" for name in (LOCAL_ADDRESS, "localhost")}
        if port == 80:
            self.hosts |= {LOCAL_ADDRESS, "localhost"}
        self.origins = {f"http://{host}" for host in self.hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        reason = self.refusal(scope)
        if reason:
            await _plain(send, 403, reason)
            return
        _, token, rest = scope["path"].split("/", 2) if scope["path"].count("/") > 1 else ("", scope["path"][1:], None)
        if rest is None:  # without the last slash, relative addresses would lead beside the page
            await _plain(send, 307, "", [(b"location", b"/" + token.encode() + b"/")])
            return
        inside = {**scope, "path": f"/{rest}", "raw_path": None, "root_path": ""}

        async def headed(message: Message) -> None:
            if message["type"] == "http.response.start":
                names = {name for name, _ in message.get("headers", [])}
                extra = [(k.encode(), v.encode()) for k, v in SECURITY_HEADERS.items() if k.encode() not in names]
                message = {**message, "headers": [*message.get("headers", []), *extra]}
            await send(message)

        await self.app(inside, receive, headed)

    def refusal(self, scope: Scope) -> str:
        """Return why a request is refused, "" where it is not."""
        headers: dict[bytes, list[bytes]] = {}
        for name, value in scope["headers"]:
            headers.setdefault(name.lower(), []).append(value)
        hosts = headers.get(b"host", [])
        if len(hosts) != 1 or hosts[0].decode("latin-1").lower() not in self.hosts:
            return "This page answers at its own address only."
        origins = headers.get(b"origin", [])
        changing = scope["method"] not in ("GET", "HEAD")
        if (origins or changing) and [origin.decode("latin-1") for origin in origins] not in [
            [own] for own in self.origins
        ]:
            return "This page answers to itself only."
        site, mode = (headers.get(name, [b""])[0] for name in (b"sec-fetch-site", b"sec-fetch-mode"))
        if site not in (b"", b"same-origin", b"none") and mode != b"navigate":
            return "This page answers to itself only."
        token = scope["path"].split("/")[1].encode("utf-8", "replace") if scope["path"].startswith("/") else b""
        if not hmac.compare_digest(token, self.token):
            return "The address lacks its key: open the one that halfmoon printed."
        return ""


async def _plain(send: Send, status: int, words: str, headers: Sequence[tuple[bytes, bytes]] = ()) -> None:
    kind = [(b"content-type", b"text/plain; charset=utf-8"), (b"x-content-type-options", b"nosniff")]
    await send({"type": "http.response.start", "status": status, "headers": [*kind, *headers]})
    await send({"type": "http.response.body", "body": words.encode()})


def build_app(page: str, title: str, gets: Mapping[str, Endpoint], posts: Mapping[str, Endpoint]) -> ASGIApp:
    """Return the app of a page: the file web/`page`.html at its root, what it loads, and its own addresses.

    `gets` and `posts` are endpoints by path; they run in threads.
    """
    require_pages()
    from starlette.applications import Starlette
    from starlette.routing import Route

    routes = [
        Route("/", lambda request: _index(page, title)),
        Route("/web/{name}", lambda request: _asset(request.path_params["name"])),
        *(Route(path, _endpoint(endpoint), methods=["GET"]) for path, endpoint in gets.items()),
        *(Route(path, _endpoint(endpoint), methods=["POST"]) for path, endpoint in posts.items()),
    ]
    return Starlette(routes=routes)


def _endpoint(endpoint: Endpoint) -> Callable[[Request], Awaitable[Response]]:
    """Return an endpoint that reads a short body, runs in a thread, and turns the result into a response."""
    from starlette.concurrency import run_in_threadpool
    from starlette.responses import JSONResponse, Response

    async def answer(request: Request) -> Response:
        if request.method == "POST":
            body = b""
            async for part in request.stream():
                body += part
                if len(body) > MAX_BODY_BYTES:
                    return JSONResponse({"error": "the request is too long."}, 413)
            request.state.body = body
        try:
            result = await run_in_threadpool(endpoint, request)
        except LabelConflict as error:
            return JSONResponse({"error": str(error), "held": error.current}, 409)
        except UserError as error:
            return JSONResponse({"error": str(error)}, 422)
        if isinstance(result, Response):
            return result
        return JSONResponse(result, headers={"cache-control": "no-store"})

    return answer


def _index(page: str, title: str) -> Response:
    from starlette.responses import HTMLResponse

    return HTMLResponse(
        templates.render("halfmoon.pages", f"{page}.html", title=title), headers={"cache-control": "no-store"}
    )


def _asset(name: str) -> Response:
    from starlette.responses import PlainTextResponse, Response

    package = "halfmoon.report" if name in ("draw.js", "charts.js") else "halfmoon.pages"
    try:
        if not re.fullmatch(r"[a-z]{1,32}\.(css|js)", name):
            raise FileNotFoundError(name)
        content = templates.read_web_file(package, name)
    except FileNotFoundError:
        return PlainTextResponse("There is no such file.", 404)
    kind = "text/css" if name.endswith(".css") else "text/javascript"
    return Response(content, media_type=kind, headers={"cache-control": "no-cache"})


def open_socket(port: int | None) -> socket.socket:
    """Return a socket bound to this machine's own address, at `port` or a free one; raise UserError where it cannot."""
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((LOCAL_ADDRESS, port or 0))
        sock.listen()  # who comes before the server runs waits
    except OSError as error:
        sock.close()
        raise UserError(
            f"--port {port}: it cannot be used ({error.strerror or error}); leave --port out, or choose another."
        ) from error
    return sock


def serve_page(app: ASGIApp, what: str, port: int | None, browser: bool, say: Callable[[str], None]) -> None:
    """Serve a page until Ctrl-C, which raises KeyboardInterrupt; `say` gets the address.

    Raise UserError where the port is taken.
    """
    with _server(app, port) as (server, sock, address):
        say(f"{what}: {address}\nOnly this machine can open it. Ctrl-C ends it.")
        with _open_browser(address) if browser else nullcontext():
            server.run(sockets=[sock])
    raise KeyboardInterrupt  # some versions of uvicorn return quietly


@contextmanager
def _open_browser(address: str) -> Iterator[None]:
    """Open the address in a browser by a private file that leads there: other users can read command lines."""
    with tempfile.TemporaryDirectory(prefix="halfmoon-") as folder:  # readable by its owner alone
        file = Path(folder, "open.html")
        file.write_text(f'<!doctype html><meta http-equiv="refresh" content="0;url={escape(address)}">')
        if sys.platform in ("win32", "darwin") or {"DISPLAY", "WAYLAND_DISPLAY"} & os.environ.keys():
            webbrowser.open(file.as_uri())  # without a screen it would start a browser in this very terminal
        yield


@contextmanager
def serve_in_background(app: ASGIApp, what: str, port: int | None, say: Callable[[str], None]) -> Iterator[str]:
    """Serve a page in a thread while something else is done, and give its address; `say` gets it, too.

    Raise UserError where the port is taken.
    """
    with _server(app, port) as (server, sock, address):
        thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, daemon=True)
        thread.start()
        say(f"{what}: {address}")
        try:
            yield address
        finally:
            server.should_exit = True
            thread.join(3)


@contextmanager
def _server(app: ASGIApp, port: int | None) -> Iterator[tuple[Any, socket.socket, str]]:
    """Give uvicorn's server, its socket, and the address with a new token."""
    import uvicorn

    with open_socket(port) as sock:
        token, bound = secrets.token_urlsafe(18), sock.getsockname()[1]
        config = uvicorn.Config(
            RequestGuard(app, token, bound),
            log_level="error",
            access_log=False,
            server_header=False,
            lifespan="off",
            ws="none",
            timeout_graceful_shutdown=2,
        )
        yield uvicorn.Server(config), sock, f"http://{LOCAL_ADDRESS}:{bound}/{token}/"
