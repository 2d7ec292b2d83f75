"""Labeled images of a folder in the form of a federation's terms, with labels numbered as its classes."""

from pathlib import Path

import numpy as np

from halfmoon.core.errors import UserError
from halfmoon.data import Images
from halfmoon.federation.protocol import limits
from halfmoon.federation.protocol.messages import Impossible
from halfmoon.federation.protocol.terms import Terms
from halfmoon.runs.factory import preparation
from halfmoon.sites.folders import Prepared, prepare
from halfmoon.sites.folders.prepare import open_site
from halfmoon.sites.folders.site_folder import SiteFolder, read, suggestion


def form_name(terms: Terms) -> str:
    channels, height, width = terms.form.image
    return f"{height}x{width}x{channels}"


def prepared_folder(folder: Path, out: Path, terms: Terms, form: str | None = None) -> SiteFolder | None:
    """Return a folder that is decoded into `out` with the terms' shape (and that `form`), else None."""
    channels, height, width = terms.form.image
    try:
        site = open_site(folder, out, form)
    except UserError:
        return None
    return site if site.images is not None and site.images.shape[1:] == (height, width, channels) else None


def decode(folder: Path, out: Path, terms: Terms) -> Prepared:
    """Decode a folder's images into `out`; raise UserError or OSError where they do not fit."""
    channels, height, width = terms.form.image
    limits.check_images(out, len(read(folder)), terms.form.image)
    options = preparation(terms.config)
    return prepare(folder, (height, width), channels, out, crop=options.crop, window=options.window)


def labeled_images(folder: Path, terms: Terms, out: Path) -> Images:
    """Return a folder's labeled images, decoded into `out`; raise UserError where there are none."""
    site = prepared_folder(folder, out, terms, preparation(terms.config).form) or decode(folder, out, terms).site
    assert site.images is not None, "it was just prepared"
    rows = np.flatnonzero(site.labels >= 0)
    if not len(rows):
        raise UserError(f"{folder} has no labeled image: name some in its labels.csv.")
    return Images(np.array(site.images[rows]), numbered(site, terms)[rows])


def numbered(site: SiteFolder, terms: Terms) -> np.ndarray:
    """Return the labels by the terms' class numbers, -1 for none; raise `Impossible` for another class."""
    classes = terms.form.classes
    used = {int(label) for label in np.unique(site.labels[site.labels >= 0])}
    strange = [name for number, name in enumerate(site.classes) if number in used and name not in classes]
    if strange:
        near = ", ".join(f"{name}{suggestion(name, classes)}" for name in strange)
        words = (
            f"{site.folder} has labels of classes that federation {terms.name} does not have: {near}. Its classes "
            f"are {', '.join(classes)}: correct the labels, or agree on the classes."
        )
        # The server hears no name of this site's classes.
        public = "it has labels of classes that the federation does not have; its own log names them."
        raise Impossible(public) from UserError(words)
    labels = site.labels.copy()
    for number in used:
        labels[site.labels == number] = classes.index(site.classes[number])
    return labels
