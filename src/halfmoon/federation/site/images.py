"""The images of a site in the form that a federation agreed on, with labels numbered as it numbers its classes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from halfmoon.core.errors import UserError
from halfmoon.data import Images
from halfmoon.federation.protocol import limits
from halfmoon.federation.protocol.messages import UNFIT
from halfmoon.federation.protocol.terms import Terms
from halfmoon.federation.site.runtime import HeldOut, Impossible, SiteRuntime
from halfmoon.runs.factory import examples, preparation
from halfmoon.sites.folders import Prepared, prepare
from halfmoon.sites.folders.prepare import open_site
from halfmoon.sites.folders.site_folder import SiteFolder as Folder
from halfmoon.sites.folders.site_folder import meant, read


@dataclass(frozen=True)
class SiteImages:
    """The images in `folder`, decoded into `home`; `tests` and `validations` are folders of others, for no training.

    `device` is where a site computes with them: auto, cpu or cuda.
    """

    folder: Path
    home: Path
    tests: Path | None = None
    device: str = "auto"
    validations: Path | None = None

    def opened(self, terms: Terms, name: str, version: str, say: Callable[[str], None]) -> SiteRuntime:
        """Return the site `name` with its images in the terms' form; those not decoded before are decoded, and said.

        Raises `Refused` where the terms and the site's labels do not fit together.
        """
        folder = self._prepared(terms, say)
        assert folder.images is not None, "it was just prepared"
        number = terms.sites.index(name)
        site = SiteRuntime.of(terms, number, folder.images, numbered(folder, terms), version, self.device)
        place = site.local_clients.dataset.train.labels.device
        folders = {"tests": self.tests, "validations": self.validations}
        found = {
            word: labeled_images(folder, terms, self.home / f"{word}-{_form(terms)}")
            for word, folder in folders.items()
            if folder is not None
        }
        return replace(site, held=HeldOut(**{word: examples(each, place) for word, each in found.items()}))

    def _prepared(self, terms: Terms, say: Callable[[str], None]) -> Folder:
        """Return the folder, decoded at home, or beside that where another form is at home already."""
        channels, height, width = terms.form.image
        kept = _opened(self.folder, self.home)
        if kept is not None and kept.images is not None:
            same = kept.images.shape[1:] == (height, width, channels)
            if same and _opened(self.folder, self.home, preparation(terms.config).form) is not None:
                return kept
            return self._decoded(terms, self.home / _form(terms), say)
        return self._decoded(terms, self.home, say)

    def _decoded(self, terms: Terms, out: Path, say: Callable[[str], None]) -> Folder:
        channels, height, width = terms.form.image
        limits.check_images(out, len(read(self.folder)), terms.form.image)
        how = preparation(terms.config)
        done: Prepared = prepare(self.folder, (height, width), channels, out, crop=how.crop, window=how.window)
        if done.decoded:
            say(f"decoded {done.decoded:,} images; {len(done.left_out):,} cannot be read and are left out")
        return done.site


def _form(terms: Terms) -> str:
    channels, height, width = terms.form.image
    return f"{height}x{width}x{channels}"


def _opened(folder: Path, home: Path, form: str | None = None) -> Folder | None:
    """Return a prepared folder, None where it is not prepared, or not in this form."""
    try:
        return open_site(folder, home, form)
    except UserError:
        return None


def labeled_images(folder: Path, terms: Terms, out: Path) -> Images:
    """Return a folder's labeled images in the terms' form, decoded into `out`; raise UserError where there are none."""
    channels, height, width = terms.form.image
    how = preparation(terms.config)
    found = _opened(folder, out, how.form)
    if found is None or found.images is None or found.images.shape[1:] != (height, width, channels):
        limits.check_images(out, len(read(folder)), terms.form.image)
        found = prepare(folder, (height, width), channels, out, crop=how.crop, window=how.window).site
    assert found.images is not None, "it was just prepared"
    rows = np.flatnonzero(found.labels >= 0)
    if not len(rows):
        raise UserError(f"{folder} has no labeled image: name some in its labels.csv.")
    return Images(np.array(found.images[rows]), numbered(found, terms)[rows])


def numbered(folder: Folder, terms: Terms) -> np.ndarray:
    """Return the labels, int64 (N,), numbered as the federation numbers its classes; -1 where there is none."""
    numbers = np.array(
        [terms.form.classes.index(name) if name in terms.form.classes else -2 for name in folder.classes]
    )
    used = folder.labels >= 0
    labels = folder.labels.copy()
    if used.any():
        labels[used] = numbers[folder.labels[used]]
    if (labels == -2).any():
        strange = [
            name
            for number, name in enumerate(folder.classes)
            if numbers[number] == -2 and (folder.labels == number).any()
        ]
        told = ", ".join(f"{name}{meant(name, terms.form.classes)}" for name in strange)
        words = (
            f"{folder.folder} has labels of classes that federation {terms.name} does not have: {told}. Its classes "
            f"are {', '.join(terms.form.classes)}: correct the labels, or agree on the classes."
        )
        # The server hears no name of this site's classes.
        told = "it has labels of classes that the federation does not have; its own log names them."
        raise Impossible(UNFIT, told) from UserError(words)
    return labels
