"""`halfmoon review`: what a model says of a folder, as a wall of images that can be sorted, checked and corrected."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from halfmoon.core.errors import UserError
from halfmoon.pages.background_prediction import BackgroundPrediction
from halfmoon.pages.folder_page import FolderPage
from halfmoon.pages.label_order import Predictions
from halfmoon.report.spreadsheet import escape_formula
from halfmoon.sites.folders.labels import find_labels_file
from halfmoon.sites.folders.site_folder import CLASSES_FILE, UNLABELED, SiteFolder, read_site

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.types import ASGIApp

    from halfmoon.sites.inference.load import InferenceModel

TABLE_COLUMNS = ("path", "predicted", "probability", "runner_up", "runner_up_probability", "label", "agrees")


def open_folder_to_review(folder: Path, classes: Sequence[str]) -> SiteFolder:
    """Return a folder of images with its labels, which may be the names of class folders.

    A class folder is one at the top whose name is one of `classes`, and counts where there is no labels.csv and no
    classes.txt. Raise UserError where the folder cannot be read.
    """
    site = read_site(folder)
    if find_labels_file(folder).exists() or (folder / CLASSES_FILE).exists():
        return site
    number = {name: n for n, name in enumerate(classes)}
    tops = [path.split("/")[0] if "/" in path else "" for path in site.paths]
    labels = np.array([number.get(top, UNLABELED) for top in tops], np.int64)
    return replace(site, labels=labels, classes=tuple(classes)) if (labels >= 0).any() else site


class ReviewPage(FolderPage):
    """The page's memory: the predictions, and the labels as they stand."""

    guessing: BackgroundPrediction

    def __init__(
        self, model: str, site: SiteFolder, guessing: BackgroundPrediction, window: tuple[float, float] | None = None
    ) -> None:
        super().__init__(site, (*site.classes, *guessing.classes), guessing, window)
        self.model = model

    def start(self, request: Request) -> dict[str, Any]:
        return super().start(request) | {"model_name": self.model, "by": None}

    def guesses(self) -> Predictions:
        """Return the model's guesses; raise UserError before they are complete."""
        if self.guessing.result is None:
            raise UserError("the model is not through yet.")
        return self.guessing.result

    def predictions(self, request: Request) -> dict[str, Any]:
        """Return the predicted class of each image (-1: it could not be read), its probability, and the next class."""
        guesses = self.guesses()
        values = np.nan_to_num(guesses.probabilities)
        order = np.argsort(-values, axis=1, kind="stable")[:, :2]
        top = np.take_along_axis(values, order, 1)
        own = np.array([self.book.classes.index(name) for name in self.guessing.classes])
        predicted = np.where(guesses.mask, own[order[:, 0]], -1)
        return {
            "predicted": predicted.tolist(),
            "probability": np.round(top[:, 0], 6).tolist(),
            "second": own[order[:, -1]].tolist(),
            "known": len(self.guessing.classes),
        }

    def scores(self, request: Request) -> dict[str, Any]:
        """Return accuracy, confusion and calibration over the labeled images, as `halfmoon evaluate` counts them."""
        from halfmoon.sites.inference.measure import compute_scores

        guesses = self.guesses()
        self.book.refresh()
        names = self.guessing.classes
        number = np.array([names.index(name) if name in names else -1 for name in self.book.classes] + [-1])
        truth = number[self.book.labels]
        rows = np.flatnonzero((truth >= 0) & guesses.mask)
        if not len(rows):
            return {"images": 0}
        return compute_scores(truth[rows], guesses.predicted[rows], guesses.probabilities[rows].max(1), classes=names)

    def table(self, request: Request) -> Response:
        """Return all predictions as CSV: what a spreadsheet would take for a formula is text."""
        from starlette.responses import Response

        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(TABLE_COLUMNS)
        predictions = self.predictions(request)
        guesses, names = self.guesses(), self.book.classes
        for row, path in enumerate(self.site.paths):
            label = names[self.book.labels[row]] if self.book.labels[row] >= 0 else ""
            cells = ["", "", "", ""]
            if predictions["predicted"][row] >= 0:
                top = np.sort(guesses.probabilities[row])[::-1]
                second = [names[predictions["second"][row]], f"{top[1]:.6f}"] if len(top) > 1 else ["", ""]
                cells = [names[predictions["predicted"][row]], f"{top[0]:.6f}", *second]
            agrees = "" if not label or not cells[0] else "yes" if label == cells[0] else "no"
            writer.writerow([escape_formula(cell) for cell in (path, *cells, label, agrees)])
        name = "".join(
            c if c.isascii() and (c.isalnum() or c in "-_") else "_" for c in self.site.folder.resolve().name
        )
        headers = {"content-disposition": f'attachment; filename="predictions-{name}.csv"', "cache-control": "no-store"}
        return Response(text.getvalue().encode("utf-8", "surrogateescape"), media_type="text/csv", headers=headers)

    def app(self) -> ASGIApp:
        gets = {"/predictions": self.predictions, "/scores": self.scores, "/predictions.csv": self.table}
        return self.application("review", "Review", gets, {})


def serve_review_page(
    model: InferenceModel, name: str, folder: Path, port: int | None, browser: bool, say: Callable[[str], None]
) -> None:
    """Serve the page until Ctrl-C, which raises KeyboardInterrupt.

    Raise UserError where the folder cannot be read or the port is taken.
    """
    site = open_folder_to_review(folder, model.classes)
    guessing = BackgroundPrediction(lambda: model, folder, site.paths)
    guessing.classes = model.classes
    review = ReviewPage(name, site, guessing, model.card.window)
    review.serve(review.app(), "review", "correction", port, browser, say)
