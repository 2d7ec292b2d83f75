"""The page of `halfmoon site label`: unlabeled images one after the other, the most useful first."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from halfmoon.core.errors import UserError
from halfmoon.pages.background_prediction import BackgroundPrediction
from halfmoon.pages.folder_page import FolderPage, parse_body, parse_row, parse_text
from halfmoon.pages.label_order import (
    Predictions,
    distance_to_labeled,
    find_randomly_labeled,
    mix_in_random,
    order_for_labeling,
    rank_descending,
    shuffle_rows,
    sort_by_similarity,
)
from halfmoon.pages.label_store import LabelStore
from halfmoon.pages.training import BackgroundTraining
from halfmoon.sites.folders.labels import find_disagreements, normalize_path, reader_labels_file
from halfmoon.sites.folders.site_folder import CLASSES_FILE, LABELS_FILE, SiteFolder, read_site
from halfmoon.storage import atomic_io
from halfmoon.storage.events import EventRecorder

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.types import ASGIApp

    from halfmoon.sites.inference.load import InferenceModel

REORDER_AFTER_LABELS = 20
"""Number of labels after which the order is recomputed."""

ORDERS = ("mixed", "uncertain", "random")
"""Orders of images: uncertain ones spread over classes and features, the most uncertain first, and random."""


@dataclass(frozen=True)
class LabelOptions:
    """Options of the labeling page.

    Attributes:
        by: name to record with each label; None to record no name, "" to ask for it in the page.
        seed: seed of the order.
        window: the values of black and white in deep images, instead of those in the files.
        reader: name of a second reader, who labels the labeled images without seeing their labels.
    """

    by: str | None = None
    seed: int = 0
    window: tuple[float, float] | None = None
    reader: str | None = None


def open_site_to_label(folder: Path, classes: Sequence[str] = ()) -> SiteFolder:
    """Open a site's folder of images to label them, and write the given classes to a new classes.txt.

    Args:
        folder: the folder of the images.
        classes: the classes in their order; () for those of the folder.

    Returns:
        The images, labels and classes of the folder.

    Raises:
        UserError: the folder cannot be read, or has other classes.
    """
    site = read_site(folder)
    file = folder / CLASSES_FILE
    if not classes:
        return site
    if file.exists():
        if list(site.classes) != list(classes):
            raise UserError(
                f"{file} names other classes ({', '.join(site.classes)}): leave {{classes}} out.", option="classes"
            )
        return site
    missing = [name for name in site.classes if name not in classes]
    if missing:
        raise UserError(
            f"{folder} has labels of the class {missing[0]!r}, which {{classes}} does not name; add it.",
            option="classes",
        )
    if len(set(classes)) < len(classes) or not all(name.strip() == name and name for name in classes):
        raise UserError("{classes} names a class twice, or has a name with blanks at its ends.", option="classes")
    try:
        atomic_io.write_atomically(file, "".join(f"{name}\n" for name in classes).encode())
    except OSError as error:
        raise UserError(
            f"{file} cannot be written ({atomic_io.error_reason(error)}); make the folder writable."
        ) from error
    return read_site(folder)


def order_unlabeled(
    predictions: Predictions | None, store: LabelStore, seed: int, order: str = ORDERS[0]
) -> np.ndarray:
    """Order the unlabeled images in which a page shows them to be labeled, the most useful first.

    Args:
        predictions: predictions of the images, None for a random order.
        store: the labels so far, and the images that a person could not label ("undecided").
        seed: the seed of the random order.
        order: "mixed", "uncertain" (the most uncertain first) or "random". In the mixed order uncertain images are spread
            over classes and features, and every fifth image is a random one.

    Returns:
        The rows, int64, without labeled and undecided images.
    """
    unlabeled = (store.labels < 0) & ~store.undecided
    random_order = shuffle_rows(unlabeled, seed)
    if predictions is None or order == "random":
        return random_order
    labels = labels_in_model_classes(predictions, store)
    if order == "uncertain":
        return order_for_labeling(predictions, labels, unlabeled, seed, greedy_images=0)  # by uncertainty only
    return mix_in_random(order_for_labeling(predictions, labels, unlabeled, seed), random_order)


def labels_in_model_classes(predictions: Predictions, store: LabelStore) -> np.ndarray:
    """Convert the labels to indices of the model's classes, int64 (N,); -1 for none and for unknown classes."""
    number = {name: n for n, name in enumerate(predictions.classes)}
    # The last entry maps the index -1, no label, to -1.
    return np.array([number.get(name, -1) for name in store.classes] + [-1])[store.labels]


class LabelPage(FolderPage):
    """The state and the endpoints of the labeling page."""

    def __init__(
        self, site: SiteFolder, classes: Sequence[str], prediction: BackgroundPrediction | None, options: LabelOptions
    ) -> None:
        """Open the labels of a site for the labeling page; no training starts.

        Args:
            site: the site's folder.
            classes: the classes to choose from if the site has none.
            prediction: the prediction of a model that the user gave, None without.
            options: the options of the page. Its `reader` is a second reader, who labels in a separate file the images
                that are labeled already, without seeing their labels; None for the first reader.
        """
        labels_file = LABELS_FILE if options.reader is None else reader_labels_file(options.reader)
        super().__init__(site, site.classes or classes, prediction, options.window, labels_file)
        # bool (N,): the only images that a second reader labels; all False for the first one.
        self._to_relabel = (site.labels >= 0) & (options.reader is not None)
        self.options = options
        self._lock = threading.Lock()
        # The last computed order of images and what it was computed for: (number of labels // REORDER_AFTER_LABELS, id
        # of the predictions, name of the order).
        self._order: tuple[tuple[int, int, str], np.ndarray] | None = None
        self.training = BackgroundTraining(site.folder, site.paths, labels_file)

    @property
    def predictions(self) -> Predictions | None:
        """Predictions of the last training, otherwise those of the given model; None if there are none yet."""
        return self.training.result or (self.prediction.result if self.prediction else None)

    def describe(self, since: Any) -> dict[str, Any]:
        """Describe the labels, the model's progress and the training.

        "predictions_version" is 0 without predictions, and changes when the predictions change.
        """
        # Unique for each source: 1 for the given model, 2n or 2n + 1 after n trainings.
        version = 2 * self.training.count + int(self.predictions is not None)
        return super().describe(since) | {"training": self.training.describe(), "predictions_version": version}

    def order(self, order: str = ORDERS[0]) -> np.ndarray:
        """Order the images to label, as rows in the list of the site's images.

        The order is recomputed when the predictions change, and after every `REORDER_AFTER_LABELS` labels.
        """
        with self._lock:
            predictions = self.predictions
            label_count = int((self.store.labels >= 0).sum())
            # id() tells apart the predictions of different trainings.
            key = (label_count // REORDER_AFTER_LABELS, id(predictions), order)
            if self._order is None or self._order[0] != key:
                rows = order_unlabeled(predictions, self.store, self.options.seed, order)
                if self._to_relabel.any():
                    rows = rows[self._to_relabel[rows]]
                self._order = key, rows
            return self._order[1]

    def get_queue(self, request: Request) -> dict[str, Any]:
        """Build the response with the images to label in the order of ?order=, and the ranks from which it results.

        Returns:
            "order": the rows of the images; and for each of them its "uncertainty" (0 to 1), "uncertainty_rank", and
            "distance_rank", the rank of its distance to labeled images. The largest has rank 1; 0 is unknown.
        """
        order = request.query_params.get("order", ORDERS[0])
        if order not in ORDERS:
            raise UserError(f"there is no order {order!r}; choose one of {', '.join(ORDERS)}.")
        self.store.refresh()
        rows = self.order(order)
        predictions = self.predictions
        uncertainty = np.full(len(rows), np.nan)
        distance = uncertainty
        if predictions is not None:
            uncertainty = predictions.uncertainty[rows]
            distance = distance_to_labeled(predictions, labels_in_model_classes(predictions, self.store))[rows]
        return {
            "order": rows.tolist(),
            "uncertainty": np.round(np.nan_to_num(uncertainty), 6).tolist(),
            "uncertainty_rank": rank_descending(uncertainty).tolist(),
            "distance_rank": rank_descending(distance).tolist(),
        }

    def get_start(self, request: Request) -> dict[str, Any]:
        notes = self.store.read_notes()
        page_fields = {"by": self.options.by, "notes": notes, "disagreements": self._find_disagreements()}
        return super().get_start(request) | self.get_queue(request) | page_fields

    def _find_disagreements(self) -> list[int]:
        """Find the rows to which two readers gave different labels; [] for a second reader, who must not see them."""
        if self.options.reader is not None:
            return []
        paths = set(find_disagreements(self.site.folder))
        return [row for row, path in enumerate(self.site.paths) if normalize_path(path) in paths]

    def get_prediction(self, request: Request) -> dict[str, Any]:
        """Build the response with the predicted class of an image, which the page shows only on request."""
        row = parse_row(request, len(self.site))
        predictions = self.predictions
        if predictions is None or not predictions.mask[row]:
            return {"label": "", "probability": None}
        best = int(predictions.predicted[row])
        return {"label": predictions.classes[best], "probability": float(predictions.probabilities[row, best])}

    def get_similar(self, request: Request) -> dict[str, Any]:
        """Build the response with all rows, sorted by the distance of their features to those of an image."""
        row = parse_row(request, len(self.site))
        predictions = self.predictions
        if predictions is None or not predictions.mask[row]:
            raise UserError("Similar images need a model's features of this image: train first.")
        return {"rows": sort_by_similarity(predictions, row).tolist()}

    def post_train(self, request: Request) -> dict[str, Any]:
        """Start a training on the labels so far, in the background."""
        self.store.refresh()
        mask = find_randomly_labeled(self.store.labels, self.store.undecided, self.options.seed)
        self.training.begin(self.store.labels, self.store.classes, mask)
        return self.describe(None)

    def post_note(self, request: Request) -> dict[str, Any]:
        """Write a note about an image."""
        message = parse_body(request)
        row = parse_row(message, len(self.site))
        self.store.set_note(row, parse_text(message, "note"), self.parse_annotator(message))
        return self.describe(message.get("since"))

    def post_undecided(self, request: Request) -> dict[str, Any]:
        """Record that a person could not label an image, or remove this record, and describe all labels.

        Args:
            request: JSON with "row" (number of the image), "undecided" (false removes the record) and "since".
        """
        message = parse_body(request)
        row = parse_row(message, len(self.site))
        undecided = message.get("undecided")
        if not isinstance(undecided, bool):
            raise UserError("undecided must be true or false.")
        self.store.set_undecided(row, undecided, self.parse_annotator(message))
        return self.describe(message.get("since"))

    def parse_annotator(self, message: Mapping[str, Any]) -> str | None:
        return None if self.options.by is None else parse_text(message, "by") or self.options.by

    def app(self) -> ASGIApp:
        """Build the web app of the labeling page from its endpoints, in addition to those of all pages."""
        gets = {
            "/queue": self.get_queue,
            "/prediction/{row}": self.get_prediction,
            "/similar/{row}": self.get_similar,
        }
        posts = {
            "/undecided": self.post_undecided,
            "/note": self.post_note,
            "/train": self.post_train,
        }
        return self.build_app("label", "Label", gets, posts)


def serve_label_page(
    site: SiteFolder,
    load: Callable[[], InferenceModel] | None,
    classes: Sequence[str],
    options: LabelOptions,
    port: int | None,
    open_browser: bool,
    display: EventRecorder,
) -> None:
    """Serve the page on which a person labels the images of a site in a browser, until Ctrl-C.

    Args:
        site: the site's folder.
        load: loads a model whose predictions order the images; None without a model.
        classes: the classes to choose from if the site has none, those of the model.
        options: the options of the page.
        port: the port, None for a free one.
        open_browser: whether to open the page in a browser.
        display: shows messages on the terminal.

    Raises:
        UserError: there are no classes, or the port is not available.
        KeyboardInterrupt: the user pressed Ctrl-C.
    """
    if not (site.classes or classes):
        raise UserError(
            f"{site.folder} has no classes: give them by {{classes=NAME ...}}, or write a {CLASSES_FILE} with one name "
            "a line.",
            option="classes",
        )
    prediction = BackgroundPrediction(load, site.folder, site.paths) if load is not None else None
    page = LabelPage(site, classes, prediction, options)
    try:
        page.serve(page.app(), action="label", noun="label", port=port, open_browser=open_browser, display=display)
    finally:
        page.training.stop()
