"""Serve a page to a browser on this machine, at an address that contains a secret token.

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
from halfmoon.storage.events import EventRecorder

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

LOCAL_ADDRESS = "127.0.0.1"
MAX_BODY_BYTES = 2**20
"""Largest body of a request; labels of many images are sent together."""

Endpoint = Callable[["Request"], Any]
"""Receives a request and returns a response, or a value for JSON; a `UserError` becomes a response with its message."""

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
    """Raise `UserError` if the extra "pages" is not installed."""
    try:
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise UserError(f"a page needs {error.name}: {install_command('pages')}.") from error


class RequestGuard:
    """ASGI middleware that accepts only requests from the page itself, with the right Host, Origin and token.

    It protects against other web pages in the same browser (DNS rebinding, cross-site requests) and against other users
    of the machine. Requests that change something need an Origin. The token is the first part of every path; `app`
    receives paths without it.
    """

    def __init__(self, app: ASGIApp, token: str, port: int) -> None:
        """Protect an app from requests of other pages and programs on this machine.

        Args:
            app: the app of the page.
            token: the secret in the address, which only the printed address has.
            port: the port at which the page is served.
        """
        self.app = app
        self.token = token.encode()
        self.hosts = {f"{name}:{port}" for name in (LOCAL_ADDRESS, "localhost")}
        if port == 80:  # browsers leave the default port out
            self.hosts |= {LOCAL_ADDRESS, "localhost"}
        self.origins = {f"http://{host}" for host in self.hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse a request without the right token, host and origin, or pass it on and add headers to the response.

        This is the interface of ASGI: `scope` describes the request, and `send` receives the messages of the response.
        """
        reason = self.find_refusal(scope)
        if reason:
            await _send_text(send, 403, reason)
            return
        if scope["path"].count("/") == 1:
            # Redirect /TOKEN to /TOKEN/, because relative addresses in the page need the slash.
            await _send_text(send, 307, "", [(b"location", b"/" + scope["path"][1:].encode() + b"/")])
            return
        path = scope["path"].split("/", 2)[2]  # without the token
        inner_scope = {**scope, "path": f"/{path}", "raw_path": None, "root_path": ""}

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                names = {name for name, _ in message.get("headers", [])}
                extra = [(k.encode(), v.encode()) for k, v in SECURITY_HEADERS.items() if k.encode() not in names]
                message = {**message, "headers": [*message.get("headers", []), *extra]}
            await send(message)

        await self.app(inner_scope, receive, send_with_headers)

    def find_refusal(self, scope: Scope) -> str:
        """Find the reason why a request is refused; "" if it is accepted.

        Another page in the same browser must neither read this page nor change labels: it has another origin, and a
        host name that it lets point to this machine is not the printed one. Other users of the machine lack the token.
        """
        headers: dict[bytes, list[bytes]] = {}
        for name, value in scope["headers"]:
            headers.setdefault(name.lower(), []).append(value)
        hosts = headers.get(b"host", [])
        if len(hosts) != 1 or hosts[0].decode("latin-1").lower() not in self.hosts:
            return "This page can be opened only at the address that halfmoon printed."
        origins = [origin.decode("latin-1") for origin in headers.get(b"origin", [])]
        is_change = scope["method"] not in ("GET", "HEAD")
        if (origins or is_change) and not (len(origins) == 1 and origins[0] in self.origins):
            return "This page accepts only requests from itself."
        fetch_site = headers.get(b"sec-fetch-site", [b""])[0]
        fetch_mode = headers.get(b"sec-fetch-mode", [b""])[0]
        # A link from another page may open this one, but not load data from it.
        if fetch_site not in (b"", b"same-origin", b"none") and fetch_mode != b"navigate":
            return "This page accepts only requests from itself."
        token = scope["path"].split("/")[1].encode("utf-8", "replace") if scope["path"].startswith("/") else b""
        if not hmac.compare_digest(token, self.token):  # in constant time
            return "The address lacks its key: open the one that halfmoon printed."
        return ""


async def _send_text(send: Send, status: int, text: str, headers: Sequence[tuple[bytes, bytes]] = ()) -> None:
    content = [(b"content-type", b"text/plain; charset=utf-8"), (b"x-content-type-options", b"nosniff")]
    await send({"type": "http.response.start", "status": status, "headers": [*content, *headers]})
    await send({"type": "http.response.body", "body": text.encode()})


class BadRequest(UserError):
    """A request that no page of halfmoon sends."""


def build_app(page: str, title: str, gets: Mapping[str, Endpoint], posts: Mapping[str, Endpoint]) -> ASGIApp:
    """Build the web app of a page: its HTML file at "/", the files that it loads below "/web/", and its endpoints.

    Args:
        page: name of the HTML file in the folder `web`, without its ending.
        title: the page's title.
        gets: endpoints of GET by path: functions of the request that return a response, or a value for JSON. They run
            in threads.
        posts: endpoints of POST by path.

    Raises:
        UserError: the extra "pages" is not installed.
    """
    require_pages()
    from starlette.applications import Starlette
    from starlette.routing import Route

    routes = [
        Route("/", lambda request: _page_response(page, title)),
        Route("/web/{name}", lambda request: _file_response(request.path_params["name"])),
        *(Route(path, _to_handler(endpoint), methods=["GET"]) for path, endpoint in gets.items()),
        *(Route(path, _to_handler(endpoint), methods=["POST"]) for path, endpoint in posts.items()),
    ]
    return Starlette(routes=routes)


def _to_handler(endpoint: Endpoint) -> Callable[[Request], Awaitable[Response]]:
    """Wrap an endpoint for Starlette, so that it can be a function of the request that returns a value for JSON.

    The body is read up to a limit, the function runs in a thread, and errors become responses with their message: 409
    for a label that somebody else has changed, 400 and 422 for invalid requests.
    """
    from starlette.concurrency import run_in_threadpool
    from starlette.responses import JSONResponse, Response

    async def handle(request: Request) -> Response:
        if request.method == "POST":
            body = b""
            async for chunk in request.stream():
                body += chunk
                if len(body) > MAX_BODY_BYTES:
                    return JSONResponse({"error": f"the request has more than {MAX_BODY_BYTES:,} bytes."}, 413)
            request.state.body = body
        try:
            result = await run_in_threadpool(endpoint, request)
        except LabelConflict as error:
            return JSONResponse({"error": str(error), "current": error.current}, 409)
        except BadRequest as error:
            return JSONResponse({"error": str(error)}, 400)
        except UserError as error:
            return JSONResponse({"error": str(error)}, 422)
        if isinstance(result, Response):
            return result
        return JSONResponse(result, headers={"cache-control": "no-store"})

    return handle


def _page_response(page: str, title: str) -> Response:
    from starlette.responses import HTMLResponse

    return HTMLResponse(
        templates.render("halfmoon.pages", f"{page}.html", title=title), headers={"cache-control": "no-store"}
    )


def _file_response(name: str) -> Response:
    """Build the response with a script, style sheet or image of a page; 404 for any other name."""
    from starlette.responses import PlainTextResponse, Response

    # The charts and the logo of reports are shared.
    package = "halfmoon.report" if name in ("plot.js", "draw.js", "charts.js", "logo.svg") else "halfmoon.pages"
    try:
        if not re.fullmatch(r"[a-z_]{1,32}\.(css|js|svg)", name):
            raise FileNotFoundError(name)
        content = templates.read_web_file(package, name)
    except FileNotFoundError:
        return PlainTextResponse("There is no such file.", 404)
    kinds = {"css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
    kind = kinds[name.rsplit(".", 1)[1]]
    return Response(content, media_type=kind, headers={"cache-control": "no-cache"})


def open_socket(port: int | None) -> socket.socket:
    """Open a socket that only this machine can reach, at `port` or, for None, a free one.

    Raises:
        UserError: the port is taken or not allowed.
    """
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((LOCAL_ADDRESS, port or 0))
        sock.listen()  # so that connections before the start of the server wait instead of failing
    except OSError as error:
        sock.close()
        raise UserError(
            f"{{port}} {port}: it cannot be used ({error.strerror or error}); leave {{port}} out, or choose another.",
            option="port",
        ) from error
    return sock


def serve_page(app: ASGIApp, title: str, port: int | None, open_browser: bool, display: EventRecorder) -> None:
    """Serve a page in this thread until Ctrl-C, and print its address.

    Args:
        app: the app of the page.
        title: printed before the address.
        port: the port, None for a free one.
        open_browser: whether to open the page in a browser.
        display: shows messages on the terminal.

    Raises:
        UserError: the port is not available.
        KeyboardInterrupt: the user pressed Ctrl-C.
    """
    with _server(app, port) as (server, sock, address):
        text = f"{title}: {address}\nOnly this machine can open it. Press Ctrl-C to stop it."
        display.record("page_opened", text, address=address)
        with _open_browser(address) if open_browser else nullcontext():
            server.run(sockets=[sock])
    raise KeyboardInterrupt  # some versions of uvicorn catch it and return


@contextmanager
def _open_browser(address: str) -> Iterator[None]:
    """Open the address in a browser through a private file, because other users can read command lines."""
    with tempfile.TemporaryDirectory(prefix="halfmoon-") as folder:  # only the user can read it
        file = Path(folder, "open.html")
        file.write_text(f'<!doctype html><meta http-equiv="refresh" content="0;url={escape(address)}">')
        # Without a display, webbrowser would start a text browser in this terminal.
        if sys.platform in ("win32", "darwin") or {"DISPLAY", "WAYLAND_DISPLAY"} & os.environ.keys():
            webbrowser.open(file.as_uri())
        yield


@contextmanager
def serve_in_background(app: ASGIApp, title: str, port: int | None, display: EventRecorder) -> Iterator[str]:
    """Serve a page in a thread until the context ends, and print its address.

    Args:
        app: the app of the page.
        title: printed before the address.
        port: the port, None for a free one.
        display: shows messages on the terminal.

    Yields:
        The address, with its secret token.

    Raises:
        UserError: the port is not available.
    """
    with _server(app, port) as (server, sock, address):
        thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, daemon=True)
        thread.start()
        display.record("page_opened", f"{title}: {address}", address=address)
        try:
            yield address
        finally:
            server.should_exit = True
            thread.join(3)  # seconds, so that an open connection does not delay the end


@contextmanager
def _server(app: ASGIApp, port: int | None) -> Iterator[tuple[Any, socket.socket, str]]:
    """Create uvicorn's server of an app, its socket, and the address with a new secret token.

    Yields:
        The server, which is not started, the open socket, and the address.
    """
    import uvicorn

    with open_socket(port) as sock:
        token = secrets.token_urlsafe(18)
        bound_port = sock.getsockname()[1]
        config = uvicorn.Config(
            RequestGuard(app, token, bound_port),
            # uvicorn's own configuration of logging would close the handlers of the whole program, and absl's handler, which
            # TensorBoard installs, closes the standard error with itself.
            log_config=None,
            log_level="error",
            access_log=False,
            server_header=False,
            lifespan="off",
            ws="none",
            timeout_graceful_shutdown=2,
        )
        yield uvicorn.Server(config), sock, f"http://{LOCAL_ADDRESS}:{bound_port}/{token}/"
