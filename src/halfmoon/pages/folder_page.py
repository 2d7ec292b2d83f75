"""Share what the pages of label and review have in common: a site's labels, its pictures, and a model's progress."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from halfmoon.pages.book import Book
from halfmoon.pages.guessing import Guessing
from halfmoon.pages.pictures import Pictures
from halfmoon.pages.requests import picture_of
from halfmoon.pages.server import App, serve
from halfmoon.sites.folders.site_folder import LABELS, SiteFolder

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response


class FolderPage:
    """A page of a site's images and labels; `classes` are those to choose from, `guessing` the model's progress.

    `window`: the values of black and white, in place of the files' own. `table`: the file of the labels."""

    def __init__(
        self,
        site: SiteFolder,
        classes: Sequence[str],
        guessing: Guessing | None,
        window: tuple[float, float] | None = None,
        table: str = LABELS,
    ) -> None:
        self.site, self.guessing = site, guessing
        self.book = Book(site, classes, table)
        self.pictures = Pictures(site.folder, window)

    def start(self, request: Request) -> dict[str, Any]:
        """Return everything that a page needs when it opens."""
        return self.state(request) | {
            "folder": self.site.folder.resolve().name,
            "paths": list(self.site.paths),
            "labels": self.book.labels.tolist(),
            "unsure_rows": np.flatnonzero(self.book.unsure).tolist(),
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
        return picture_of(request, self.pictures, self.site.paths)

    def serve(
        self, app: App, action: str, noun: str, port: int | None, browser: bool, say: Callable[[str], None]
    ) -> None:
        """Serve the page until Ctrl-C, which raises KeyboardInterrupt, and say how many answers were written."""
        if self.guessing is not None:
            self.guessing.start()
        try:
            serve(app, f"{action} {self.site.folder}", port, browser, say)
        finally:
            if self.guessing is not None:
                self.guessing.stop()
            count = self.book.answers
            say(f"{count} {noun if count == 1 else f'{noun}s'} written to {self.site.folder / self.book.table}.")
