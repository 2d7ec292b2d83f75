"""Common parts of the pages for labeling and reviewing: a site's labels and images, and parsers of requests."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from halfmoon.core.errors import UserError
from halfmoon.pages.background_prediction import BackgroundPrediction
from halfmoon.pages.browser_images import ImageCache, TooManyRequests
from halfmoon.pages.dicom_captions import caption_images
from halfmoon.pages.label_store import LabelStore
from halfmoon.pages.server import BadRequest, Endpoint, build_app, serve_page
from halfmoon.sites.folders.site_folder import LABELS_FILE, SiteFolder
from halfmoon.storage import atomic_io
from halfmoon.storage.events import EventRecorder

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.types import ASGIApp

MAX_TEXT_CHARACTERS = 300
"""Largest length of a text in a request."""

MAX_DIGITS = 18
"""Most digits of a number in a request."""


class FolderPage:
    """A page of a site's images and labels.

    Attributes:
        site: the site's folder.
        prediction: the model's prediction of the images, None without a model.
        store: the site's labels.
        images: the site's images as the browser receives them.
    """

    def __init__(
        self,
        site: SiteFolder,
        classes: Sequence[str],
        prediction: BackgroundPrediction | None,
        window: tuple[float, float] | None = None,
        labels_file: str = LABELS_FILE,
    ) -> None:
        """Open the labels of a site's images for a page on which people label or review them.

        Args:
            site: the site's folder.
            classes: the classes to choose from, besides those of the site's files.
            prediction: the model's prediction of the images, None without a model.
            window: the values of black and white in deep images (more than 8 bits), instead of those in the files.
            labels_file: name of the labels file; a second person has another one.
        """
        self.site = site
        self.prediction = prediction
        self.store = LabelStore(site, classes, labels_file)
        self.images = ImageCache(site.folder, window)
        self._captions: dict[int, str] | None = None  # of DICOM images by row; read at the first request
        self._captions_lock = threading.Lock()

    def get_start(self, request: Request) -> dict[str, Any]:
        """Build the response with everything that a page needs when it opens.

        Returns:
            The state (`get_state`); the "folder", "paths" and "labels" of all images; "undecided_rows", the rows of
            undecided images; "labels_from_folders", whether the labels are names of class folders.
        """
        return self.get_state(request) | {
            "folder": self.site.folder.resolve().name,
            "paths": list(self.site.paths),
            "labels": self.store.labels.tolist(),
            "undecided_rows": np.flatnonzero(self.store.undecided).tolist(),
            "labels_from_folders": self.store.labels_from_folders,
        }

    def get_state(self, request: Request) -> dict[str, Any]:
        """Build the response with counts, the changes after ?since=VERSION, and the model's progress."""
        since = request.query_params.get("since", "")
        return self.describe(parse_digits("since", since) if since.isdecimal() else None)

    def describe(self, since: Any) -> dict[str, Any]:
        """Describe for the page the labels that have changed, and how many images the model has predicted.

        Args:
            since: the version of the labels that the page has, an integer. With anything else, such as None, the page
                gets the latest version and no changes.
        """
        model = None
        if (prediction := self.prediction) is not None:
            model = {
                "done": prediction.count,
                "total": prediction.total,
                "ready": prediction.result is not None,
                "error": prediction.error,
            }
        version = since if type(since) is int else self.store.version
        return self.store.describe(version) | {"model": model}

    def get_captions(self, request: Request) -> dict[str, Any]:
        """Build the response with captions of DICOM images by row; the first request reads all headers."""
        with self._captions_lock:
            if self._captions is None:
                self._captions = caption_images(self.site.folder, self.site.paths)
            return {"captions": self._captions}

    def get_image(self, request: Request) -> Response:
        """Build the response with an image, or with its thumbnail for ?small=1.

        Images of more than 8 bits have a header "x-grays", by which the page converts their pixels to gray values.
        """
        from starlette.responses import PlainTextResponse, Response

        path = self.site.paths[parse_row(request, len(self.site))]
        try:
            image = self.images.get(path, request.query_params.get("small") == "1")
        except TooManyRequests as error:
            return PlainTextResponse(str(error), 503, {"retry-after": "2"})  # too busy
        except UserError as error:
            return PlainTextResponse(str(error), 415)  # an unsupported media type
        headers = {"cache-control": "private, max-age=3600"}
        if image.grays is not None:
            headers["x-grays"] = json.dumps(image.grays)
        return Response(image.data, media_type=image.media_type, headers=headers)

    def post_label(self, request: Request) -> dict[str, Any]:
        """Write the label of an image to the site's labels file, and describe all labels for the page.

        Until there is this file, labels may be the names of class folders; the first label then writes all of them.

        Args:
            request: JSON with "row" (number of the image), "label" (class name), "previous" (the label that the page
                showed, so that another person's label is not overwritten) and "since" (version that the page has).
        """
        message = parse_body(request)
        self.store.set_label(
            row=parse_row(message, len(self.site)),
            label=parse_text(message, "label"),
            previous=parse_text(message, "previous"),
            by=self.parse_annotator(message),
        )
        return self.describe(message.get("since"))

    def post_labels(self, request: Request) -> dict[str, Any]:
        """Write the labels of several images, all or none, to the site's labels file, and describe all labels.

        Args:
            request: JSON with "entries", a list of [row, label, previous] as in `post_label`, and "since".
        """
        message = parse_body(request)
        items = message.get("entries")
        if not isinstance(items, list) or not all(isinstance(item, list) and len(item) == 3 for item in items):
            raise UserError("entries must be a list of [row, label, previous].")
        entries = []
        for item in items:
            named: dict[str, Any] = dict(zip(("row", "label", "previous"), item, strict=True))
            row = parse_row(named, len(self.site))
            entries.append((row, parse_text(named, "label"), parse_text(named, "previous")))
        self.store.set_labels(entries, self.parse_annotator(message))
        return self.describe(message.get("since"))

    def parse_annotator(self, message: Mapping[str, Any]) -> str | None:
        """Get the name to record with a label; None if names are not recorded."""
        return None

    def build_app(self, page: str, title: str, gets: Mapping[str, Endpoint], posts: Mapping[str, Endpoint]) -> ASGIApp:
        """Build the web app of this page from its HTML file, the common endpoints of all pages, and its own ones.

        Args:
            page: name of the HTML file, without its ending.
            title: what the page does, such as "Label"; the folder's name is appended.
            gets: endpoints of GET by path, in addition to the common ones.
            posts: endpoints of POST by path, in addition to the common ones.
        """
        common = {
            "/start": self.get_start,
            "/state": self.get_state,
            "/captions": self.get_captions,
            "/image/{row}": self.get_image,
        }
        title = f"{title} {self.site.folder.resolve().name}"
        return build_app(
            page, title, {**common, **gets}, {"/label": self.post_label, "/labels": self.post_labels, **posts}
        )

    def serve(
        self,
        app: ASGIApp,
        action: str,
        noun: str,
        port: int | None,
        open_browser: bool,
        display: EventRecorder,
    ) -> None:
        """Serve the page until Ctrl-C, while the model predicts the images, and report how many labels were written.

        Args:
            app: the app of the page.
            action: what the page does, printed before its address.
            noun: the name of a written label in the report, in the singular.
            port: the port, None for a free one.
            open_browser: whether to open the page in a browser.
            display: shows messages on the terminal.

        Raises:
            KeyboardInterrupt: the user pressed Ctrl-C.
        """
        if self.prediction is not None:
            self.prediction.start()
        try:
            serve_page(app, f"{action} {self.site.folder}", port, open_browser, display)
        finally:
            if self.prediction is not None:
                self.prediction.stop()
            count = self.store.written_count
            nouns = noun if count == 1 else f"{noun}s"
            file = self.site.folder / self.store.labels_file
            display.record("labels_written", f"{count} {nouns} written to {file}.", count=count, file=str(file))


def parse_body(request: Request) -> dict[str, Any]:
    """Parse the JSON object in a request's body; raise `UserError` for anything else."""
    try:
        message = atomic_io.parse_json(request.state.body)
    except ValueError as error:
        raise UserError("the request is not JSON.") from error
    if not isinstance(message, dict):
        raise UserError("the request is not a JSON object.")
    return message


def parse_text(message: Mapping[str, Any], name: str) -> str:
    """Get a text of one line from a message, "" if it is missing; raise `UserError` if it is not valid."""
    value = message.get(name, "")
    valid = isinstance(value, str) and len(value) <= MAX_TEXT_CHARACTERS and all(ord(letter) >= 32 for letter in value)
    if not valid:
        raise UserError(f"{name} must be one line of at most {MAX_TEXT_CHARACTERS} characters.")
    # JSON may have half of a surrogate pair, which no file can store.
    if any("\ud800" <= letter <= "\udfff" for letter in value):
        raise BadRequest(f"{name} has a character that is no Unicode text.")
    return value.strip()


def parse_digits(name: str, text: str) -> int:
    """Convert decimal digits of a request to an integer; raise `BadRequest` if it is none, or too long."""
    # Python refuses to convert thousands of digits, and no count needs them.
    if not text.isdecimal() or len(text) > MAX_DIGITS:
        raise BadRequest(f"{name} must be a whole number of at most {MAX_DIGITS} digits.")
    return int(text)


def parse_row(message: Any, count: int) -> int:
    """Get the row of an image from a request's path or from a message; raise `UserError` if there is no such row."""
    row = message.get("row") if isinstance(message, dict) else parse_digits("row", message.path_params["row"])
    if type(row) is not int or not 0 <= row < count:
        raise UserError(f"there is no image {row}.")
    return row
