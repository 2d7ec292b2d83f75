"""The page of `halfmoon review`: a model's predictions for a folder's images, to sort, check and correct."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from halfmoon.core.errors import UserError
from halfmoon.core.spreadsheet import escape_formula
from halfmoon.pages.background_prediction import BackgroundPrediction
from halfmoon.pages.folder_page import FolderPage
from halfmoon.pages.label_order import Predictions
from halfmoon.sites.folders.labels import find_labels_file
from halfmoon.sites.folders.site_folder import CLASSES_FILE, UNLABELED, SiteFolder, read_site
from halfmoon.storage.events import EventRecorder

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.types import ASGIApp

    from halfmoon.sites.inference.load import InferenceModel

TABLE_COLUMNS = ("path", "predicted", "probability", "runner_up", "runner_up_probability", "label", "agrees")
"""Columns of the table of predictions."""


def open_folder_to_review(folder: Path, classes: Sequence[str]) -> SiteFolder:
    """Open a folder of images with its labels, which may be the names of class folders, to review predictions of them.

    Args:
        folder: the folder. Its top folders that are named like a class give labels if there is no labels.csv and no
            classes.txt.
        classes: the model's classes.

    Raises:
        UserError: the folder cannot be read.
    """
    site = read_site(folder)
    if find_labels_file(folder).exists() or (folder / CLASSES_FILE).exists():
        return site
    # A folder without these files: images in a top folder with the name of a class have this label.
    number = {name: n for n, name in enumerate(classes)}
    top_folders = [path.split("/")[0] if "/" in path else "" for path in site.paths]
    labels = np.array([number.get(name, UNLABELED) for name in top_folders], np.int64)
    return replace(site, labels=labels, classes=tuple(classes)) if (labels >= 0).any() else site


class ReviewPage(FolderPage):
    """The state and the endpoints of the review page."""

    prediction: BackgroundPrediction

    def __init__(
        self, model: str, site: SiteFolder, prediction: BackgroundPrediction, window: tuple[float, float] | None = None
    ) -> None:
        """Open the labels of a folder for the page on which a person compares them with a model's predictions.

        Args:
            model: name of the model, which the page shows.
            site: the folder.
            prediction: the model's prediction of the images.
            window: the values of black and white in deep images, instead of those in the files.
        """
        super().__init__(site, (*site.classes, *prediction.classes), prediction, window)
        self.model = model

    def get_start(self, request: Request) -> dict[str, Any]:
        return super().get_start(request) | {"model_name": self.model, "by": None}

    def require_predictions(self) -> Predictions:
        """Get the predictions of all images; raise `UserError` before they are complete."""
        if self.prediction.result is None:
            raise UserError("the model has not predicted all images yet.")
        return self.prediction.result

    def get_predictions(self, request: Request) -> dict[str, Any]:
        """Build the response with the model's prediction of each image.

        Returns:
            Lists in the order of the images: "predicted", the class (-1 for an unreadable image); its "probability";
            "runner_up", the next class. "known" is the number of the model's classes; labels may be of others.
        """
        predictions = self.require_predictions()
        probabilities = np.nan_to_num(predictions.probabilities)
        # Stable, so that the lower class number wins a tie, as in argmax.
        order = np.argsort(-probabilities, axis=1, kind="stable")[:, :2]
        top = np.take_along_axis(probabilities, order, 1)
        # The page numbers the classes of the site and of the model together.
        page_class = np.array([self.store.classes.index(name) for name in self.prediction.classes])
        predicted = np.where(predictions.mask, page_class[order[:, 0]], -1)
        return {
            "predicted": predicted.tolist(),
            "probability": np.round(top[:, 0], 6).tolist(),
            "runner_up": page_class[order[:, -1]].tolist(),
            "known": len(self.prediction.classes),
        }

    def get_scores(self, request: Request) -> dict[str, Any]:
        """Build the response with the model's accuracy, confusion and calibration over the labeled images.

        The numbers are those of `halfmoon evaluate`. Labels of classes that the model does not have are left out.
        """
        from halfmoon.sites.inference.measure import compute_scores

        predictions = self.require_predictions()
        self.store.refresh()
        names = self.prediction.classes
        # The last entry maps the index -1, no label, to -1.
        model_class = np.array([names.index(name) if name in names else -1 for name in self.store.classes] + [-1])
        truth = model_class[self.store.labels]
        rows = np.flatnonzero((truth >= 0) & predictions.mask)
        if not len(rows):
            return {"images": 0}
        confidence = predictions.probabilities[rows].max(1)
        return compute_scores(truth[rows], predictions.predicted[rows], confidence, classes=names)

    def get_table(self, request: Request) -> Response:
        """Build the response with a CSV file of all images (`TABLE_COLUMNS`): prediction, label, whether they agree.

        Texts that a spreadsheet would read as a formula are escaped.
        """
        from starlette.responses import Response

        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(TABLE_COLUMNS)
        page_predictions = self.get_predictions(request)
        predictions = self.require_predictions()
        names = self.store.classes
        for row, path in enumerate(self.site.paths):
            label = names[self.store.labels[row]] if self.store.labels[row] >= 0 else ""
            predicted = ""
            cells = ["", "", "", ""]  # the predicted class, its probability, the next class, its probability
            if page_predictions["predicted"][row] >= 0:
                predicted = names[page_predictions["predicted"][row]]
                highest_first = np.sort(predictions.probabilities[row])[::-1]
                cells[:2] = [predicted, f"{highest_first[0]:.6f}"]
                if len(highest_first) > 1:
                    cells[2:] = [names[page_predictions["runner_up"][row]], f"{highest_first[1]:.6f}"]
            agrees = ""
            if label and predicted:
                agrees = "yes" if label == predicted else "no"
            writer.writerow([escape_formula(cell) for cell in (path, *cells, label, agrees)])
        folder_name = self.site.folder.resolve().name
        # Quotes and letters beyond ASCII are not allowed in the header.
        name = "".join(c if c.isascii() and (c.isalnum() or c in "-_") else "_" for c in folder_name)
        headers = {"content-disposition": f'attachment; filename="predictions-{name}.csv"', "cache-control": "no-store"}
        return Response(text.getvalue().encode("utf-8", "surrogateescape"), media_type="text/csv", headers=headers)

    def app(self) -> ASGIApp:
        """Build the app of the page."""
        gets = {"/predictions": self.get_predictions, "/scores": self.get_scores, "/predictions.csv": self.get_table}
        return self.build_app("review", "Review", gets, {})


def serve_review_page(
    model: InferenceModel,
    name: str,
    folder: Path,
    port: int | None,
    open_browser: bool,
    display: EventRecorder,
) -> None:
    """Serve the page on which a person reviews and corrects a model's predictions of a folder, until Ctrl-C.

    Args:
        model: the model.
        name: its name, which the page shows.
        folder: the folder of the images.
        port: the port, None for a free one.
        open_browser: whether to open the page in a browser.
        display: shows messages on the terminal.

    Raises:
        UserError: the folder cannot be read, or the port is not available.
        KeyboardInterrupt: the user pressed Ctrl-C.
    """
    site = open_folder_to_review(folder, model.classes)
    prediction = BackgroundPrediction(lambda: model, folder, site.paths)
    prediction.classes = model.classes  # the page needs them before the prediction is complete
    page = ReviewPage(name, site, prediction, model.card.window)
    page.serve(page.app(), action="review", noun="correction", port=port, open_browser=open_browser, display=display)
