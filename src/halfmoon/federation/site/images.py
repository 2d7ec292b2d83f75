"""The images of a site, decoded into the form of a federation's terms."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from halfmoon.core.errors import UserError
from halfmoon.federation.protocol.images import decode, form_name, labeled_images, numbered, prepared_folder
from halfmoon.federation.protocol.terms import Terms
from halfmoon.federation.site.runtime import HeldOut, SiteRuntime
from halfmoon.runs.factory import examples, preparation
from halfmoon.sites.folders.prepare import open_site
from halfmoon.sites.folders.site_folder import SiteFolder


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

    def runtime(self, terms: Terms, name: str, version: str, say: Callable[[str], None]) -> SiteRuntime:
        """Return the site `name` with its images in the terms' form; new ones are decoded, and `say` hears of it.

        Raises `RefusalError` where the terms and the site's labels do not fit together.
        """
        folder = self._decoded(terms, say)
        assert folder.images is not None, "it was just prepared"
        number = terms.sites.index(name)
        site = SiteRuntime.of(terms, number, folder.images, numbered(folder, terms), version, self.device)
        device = site.local_clients.dataset.train.labels.device
        other = {
            part: examples(labeled_images(path, terms, self.home / f"{part}-{form_name(terms)}"), device)
            for part, path in (("tests", self.tests), ("validations", self.validations))
            if path is not None
        }
        return replace(site, held_out=HeldOut(**other))

    def _decoded(self, terms: Terms, say: Callable[[str], None]) -> SiteFolder:
        """Return the folder, decoded at home, or beside that where another form is at home already."""
        form = preparation(terms.config).form
        if (folder := prepared_folder(self.folder, self.home, terms, form)) is not None:
            return folder
        out = self.home / form_name(terms) if self._occupied() else self.home
        result = decode(self.folder, out, terms)
        if result.decoded:
            say(f"decoded {result.decoded:,} images; {len(result.left_out):,} cannot be read and are left out")
        return result.site

    def _occupied(self) -> bool:
        try:
            return open_site(self.folder, self.home).images is not None
        except UserError:
            return False
