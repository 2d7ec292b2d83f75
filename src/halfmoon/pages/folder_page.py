"""What the pages of label and review have in common: a site's labels, its pictures, and what they read of requests."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from halfmoon.core.errors import UserError
from halfmoon.pages.background_prediction import BackgroundPrediction
from halfmoon.pages.browser_images import ImageCache, TooManyRequests
from halfmoon.pages.label_store import LabelStore
from halfmoon.pages.server import Endpoint, build_app, serve_page
from halfmoon.sites.folders.site_folder import LABELS_FILE, SiteFolder
from halfmoon.storage import atomic_io

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.types import ASGIApp


class FolderPage:
    """A page of a site's images and labels; `classes` are those to choose from, `guessing` the model's progress.

    `window`: the values of black and white, in place of the files' own. `table`: the file of the labels.
    """

    def __init__(
        self,
        site: SiteFolder,
        classes: Sequence[str],
        guessing: BackgroundPrediction | None,
        window: tuple[float, float] | None = None,
        table: str = LABELS_FILE,
    ) -> None:
        self.site, self.guessing = site, guessing
        self.book = LabelStore(site, classes, table)
        self.pictures = ImageCache(site.folder, window)

    def start(self, request: Request) -> dict[str, Any]:
        """Return everything that a page needs when it opens."""
        return self.state(request) | {
            "folder": self.site.folder.resolve().name,
            "paths": list(self.site.paths),
            "labels": self.book.labels.tolist(),
            "unsure_rows": np.flatnonzero(self.book.undecided).tolist(),
            "foldered": self.book.foldered,
        }

    def state(self, request: Request) -> dict[str, Any]:
        """Return counts, the changes after ?since=VERSION, and the model's progress."""
        since = request.query_params.get("since", "")
        return self.facts(int(since) if since.isdecimal() else None)

    def facts(self, since: Any) -> dict[str, Any]:
        """Return what `state` does; without a whole number as version there are no changes."""
        model = None
        if (guess := self.guessing) is not None:
            model = {"done": guess.count, "of": guess.of, "ready": guess.result is not None, "error": guess.error}
        version = since if type(since) is int else self.book.version
        return self.book.facts(version) | {"model": model}

    def image(self, request: Request) -> Response:
        """Return the image of a request, small with ?small=1."""
        from starlette.responses import PlainTextResponse, Response

        path = self.site.paths[parse_row(request, len(self.site))]
        try:
            image = self.pictures.get(path, request.query_params.get("small") == "1")
        except TooManyRequests as error:
            return PlainTextResponse(str(error), 503, {"retry-after": "2"})
        except UserError as error:
            return PlainTextResponse(str(error), 415)
        headers = {"cache-control": "private, max-age=3600"}
        if image.grays is not None:
            headers["x-grays"] = json.dumps(image.grays)
        return Response(image.data, media_type=image.kind, headers=headers)

    def answer(self, request: Request) -> dict[str, Any]:
        """Write an image's label; the first one turns labels of class folders into a labels.csv with all of them."""
        message = parse_body(request)
        row, label, before = (
            parse_row(message, len(self.site)),
            parse_text(message, "label"),
            parse_text(message, "seen"),
        )
        self.book.answer(row, label, before, self.name_in(message))
        return self.facts(message.get("since"))

    def name_in(self, message: Mapping[str, Any]) -> str | None:
        """Return who answers, None where nobody is named."""
        return None

    def application(
        self, page: str, title: str, gets: Mapping[str, Endpoint], posts: Mapping[str, Endpoint]
    ) -> ASGIApp:
        """Return the page's app: `gets` and `posts` are its own endpoints, beside those that all of them have."""
        gets = {"/start": self.start, "/state": self.state, "/image/{row:int}": self.image, **gets}
        title = f"{title} {self.site.folder.resolve().name}"
        return build_app(page, title, gets, {"/answer": self.answer, **posts})

    def serve(
        self, app: ASGIApp, action: str, noun: str, port: int | None, browser: bool, say: Callable[[str], None]
    ) -> None:
        """Serve the page until Ctrl-C, which raises KeyboardInterrupt, and say how many answers were written."""
        if self.guessing is not None:
            self.guessing.start()
        try:
            serve_page(app, f"{action} {self.site.folder}", port, browser, say)
        finally:
            if self.guessing is not None:
                self.guessing.stop()
            count = self.book.answers
            say(f"{count} {noun if count == 1 else f'{noun}s'} written to {self.site.folder / self.book.table}.")


def parse_body(request: Request) -> dict[str, Any]:
    """Return the JSON object that was sent; raise UserError for anything else."""
    try:
        message = atomic_io.parse_json(request.state.body)
    except ValueError as error:
        raise UserError("the request is no JSON.") from error
    if not isinstance(message, dict):
        raise UserError("the request is no object.")
    return message


def parse_text(message: Mapping[str, Any], name: str) -> str:
    """Return a text of one line and 300 letters at most; raise UserError where it is none."""
    value = message.get(name, "")
    if not isinstance(value, str) or len(value) > 300 or any(ord(letter) < 32 for letter in value):
        raise UserError(f"{name} is no short text of one line.")
    return value.strip()


def parse_row(message: Any, count: int) -> int:
    """Return the row that a request's path or a body names; raise UserError where there is none such."""
    row = message.get("row") if isinstance(message, dict) else message.path_params["row"]
    if type(row) is not int or not 0 <= row < count:
        raise UserError(f"there is no image {row}.")
    return row
