"""`halfmoon site label`: unlabeled images one after the other, the most useful first, a key for each class."""

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

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.types import ASGIApp

    from halfmoon.sites.inference.load import InferenceModel

REORDER_AFTER_LABELS = 20  # answers after which the order is chosen anew


@dataclass(frozen=True)
class LabelOptions:
    """How a folder is labeled."""

    by: str | None = None  # who answers; None: nobody is named, "": the page asks
    seed: int = 0  # of the order
    window: tuple[float, float] | None = None  # the values of black and white, in place of the files' own
    reader: str | None = None  # a second one, who sees the images that have a label, and no label


def open_site_to_label(folder: Path, classes: Sequence[str] = ()) -> SiteFolder:
    """Return a site to label; class names that are given make a classes.txt where there is none.

    Raise UserError where the folder cannot be read, or has another classes.txt.
    """
    site = read_site(folder)
    file = folder / CLASSES_FILE
    if not classes:
        return site
    if file.exists():
        if list(site.classes) != list(classes):
            raise UserError(f"{file} names other classes ({', '.join(site.classes)}): leave --classes out.")
        return site
    strange = [name for name in site.classes if name not in classes]
    if strange:
        raise UserError(f"{folder} has labels of the class {strange[0]!r}, which --classes does not name; add it.")
    if len(set(classes)) < len(classes) or not all(name.strip() == name and name for name in classes):
        raise UserError("--classes names a class twice, or has a name with blanks at its ends.")
    try:
        atomic_io.write_atomically(file, "".join(f"{name}\n" for name in classes).encode())
    except OSError as error:
        raise UserError(
            f"{file} cannot be written ({atomic_io.error_reason(error)}); make the folder writable."
        ) from error
    return read_site(folder)


ORDERS = ("mixed", "unsure", "random")
"""Ways to order images: unsure ones spread over classes and looks, the least sure first, and by chance."""


def order_unlabeled(guesses: Predictions | None, book: LabelStore, seed: int, way: str = ORDERS[0]) -> np.ndarray:
    """Return the rows to label, the most useful first, without those that have a label or were too hard to name."""
    left = (book.labels < 0) & ~book.undecided
    by_chance = shuffle_rows(left, seed)
    if guesses is None or way == "random":
        return by_chance
    labels = labels_in_model_classes(guesses, book)
    if way == "unsure":
        return order_for_labeling(guesses, labels, left, seed, spread=0)
    return mix_in_random(order_for_labeling(guesses, labels, left, seed), by_chance)


def labels_in_model_classes(guesses: Predictions, book: LabelStore) -> np.ndarray:
    """Return the labels as numbers of a model's classes, -1 for none and for those that it does not have."""
    number = {name: n for n, name in enumerate(guesses.classes)}
    return np.array([number.get(name, -1) for name in book.classes] + [-1])[book.labels]


class LabelPage(FolderPage):
    """The page's memory: the labels, the order, and what the model makes of the images."""

    def __init__(
        self, site: SiteFolder, classes: Sequence[str], guessing: BackgroundPrediction | None, options: LabelOptions
    ) -> None:
        table = LABELS_FILE if options.reader is None else reader_labels_file(options.reader)
        super().__init__(site, site.classes or classes, guessing, options.window, table)
        self._again = (site.labels >= 0) & (options.reader is not None)
        self.options = options
        self._lock = threading.Lock()
        self._order: tuple[tuple[int, int, str], np.ndarray] | None = None
        self.training = BackgroundTraining(site.folder, site.paths, table)

    @property
    def guesses(self) -> Predictions | None:
        """Return what the last training, or else the model, makes of the images; None: not yet."""
        return self.training.result or (self.guessing.result if self.guessing else None)

    def facts(self, since: Any) -> dict[str, Any]:
        """Return what every page shows; `guesses` counts what they came from, 0 as long as there are none."""
        count = 2 * self.training.count + int(self.guesses is not None)
        return super().facts(since) | {"training": self.training.facts(), "guesses": count}

    def order(self, way: str = ORDERS[0]) -> np.ndarray:
        """Return the rows to label; chosen anew when the guesses come, and after every `AGAIN` labels."""
        with self._lock:
            guesses = self.guesses
            key = (int((self.book.labels >= 0).sum()) // REORDER_AFTER_LABELS, id(guesses), way)
            if self._order is None or self._order[0] != key:
                rows = order_unlabeled(guesses, self.book, self.options.seed, way)
                self._order = key, rows[self._again[rows]] if self._again.any() else rows
            return self._order[1]

    def queue(self, request: Request) -> dict[str, Any]:
        """Return the rows to label in the order of ?way=, and why: uncertainty, its rank, and that of `novelty`.

        A rank of 0 is unknown.
        """
        way = request.query_params.get("way", ORDERS[0])
        if way not in ORDERS:
            raise UserError(f"there is no order {way!r}.")
        self.book.refresh()
        rows, guesses = self.order(way), self.guesses
        uncertainty = far = np.full(len(rows), np.nan)
        if guesses is not None:
            uncertainty = guesses.uncertainty[rows]
            far = distance_to_labeled(guesses, labels_in_model_classes(guesses, self.book))[rows]
        values = np.round(np.nan_to_num(uncertainty), 6).tolist()
        result = {"order": rows.tolist(), "uncertainty": values}
        return result | {"rank": rank_descending(uncertainty).tolist(), "far": rank_descending(far).tolist()}

    def start(self, request: Request) -> dict[str, Any]:
        facts = {"by": self.options.by, "notes": self.book.notes(), "differing": self._differing()}
        return super().start(request) | self.queue(request) | facts

    def _differing(self) -> list[int]:
        """Return the rows on which two readers disagree; a second reader does not see them."""
        if self.options.reader is not None:
            return []
        paths = set(find_disagreements(self.site.folder))
        return [row for row, path in enumerate(self.site.paths) if normalize_path(path) in paths]

    def guess(self, request: Request) -> dict[str, Any]:
        """Return what the model would say of an image: only asked for where the person wants to see it."""
        row, guesses = parse_row(request, len(self.site)), self.guesses
        if guesses is None or not guesses.mask[row]:
            return {"label": "", "probability": None}
        best = int(guesses.predicted[row])
        return {"label": guesses.classes[best], "probability": float(guesses.probabilities[row, best])}

    def similar(self, request: Request) -> dict[str, Any]:
        """Return all rows, those whose features are nearest to an image's first: itself."""
        row, guesses = parse_row(request, len(self.site)), self.guesses
        if guesses is None or not guesses.mask[row]:
            raise UserError("Similar images need a model's features of this image: train first.")
        return {"rows": sort_by_similarity(guesses, row).tolist()}

    def train(self, request: Request) -> dict[str, Any]:
        """Train on what is labeled now, in the background."""
        self.book.refresh()
        mask = find_randomly_labeled(self.book.labels, self.book.undecided, self.options.seed)
        self.training.begin(self.book.labels, self.book.classes, mask)
        return self.facts(None)

    def answers(self, request: Request) -> dict[str, Any]:
        """Write the answers to many images, all or none: `said` has [row, label, the label that was seen] of each."""
        message = parse_body(request)
        entries = message.get("said")
        if not isinstance(entries, list) or not all(isinstance(each, list) and len(each) == 3 for each in entries):
            raise UserError("said is no list of [row, label, seen].")
        named: list[dict[str, Any]] = [dict(zip(("row", "label", "seen"), each, strict=True)) for each in entries]
        many = [
            (parse_row(each, len(self.site)), parse_text(each, "label"), parse_text(each, "seen")) for each in named
        ]
        self.book.answers_of(many, self.name_in(message))
        return self.facts(message.get("since"))

    def note(self, request: Request) -> dict[str, Any]:
        message = parse_body(request)
        self.book.note(parse_row(message, len(self.site)), parse_text(message, "note"), self.name_in(message))
        return self.facts(message.get("since"))

    def doubt(self, request: Request) -> dict[str, Any]:
        """Note that an image is too hard to name, or take that back."""
        message = parse_body(request)
        row, doubted = parse_row(message, len(self.site)), message.get("on")
        if not isinstance(doubted, bool):
            raise UserError("on is none of True, False.")
        self.book.doubt(row, doubted, self.name_in(message))
        return self.facts(message.get("since"))

    def name_in(self, message: Mapping[str, Any]) -> str | None:
        return None if self.options.by is None else parse_text(message, "by") or self.options.by

    def app(self) -> ASGIApp:
        gets = {"/queue": self.queue, "/guess/{row:int}": self.guess, "/similar/{row:int}": self.similar}
        posts = {"/answers": self.answers, "/doubt": self.doubt, "/note": self.note, "/train": self.train}
        return self.application("label", "Label", gets, posts)


def serve_label_page(
    site: SiteFolder,
    load: Callable[[], InferenceModel] | None,
    classes: Sequence[str],
    options: LabelOptions,
    port: int | None,
    browser: bool,
    say: Callable[[str], None],
) -> None:
    """Serve the page until Ctrl-C, which raises KeyboardInterrupt; `load` returns the model, whose `classes` these are.

    Raise UserError where nobody names a class, or the port is taken.
    """
    if not (site.classes or classes):
        raise UserError(
            f"{site.folder} does not say which classes there are: give them by --classes NAME ..., or write a "
            f"{CLASSES_FILE} with one name a line."
        )
    guessing = BackgroundPrediction(load, site.folder, site.paths) if load is not None else None
    labeling = LabelPage(site, classes, guessing, options)
    try:
        labeling.serve(labeling.app(), "label", "answer", port, browser, say)
    finally:
        labeling.training.stop()
