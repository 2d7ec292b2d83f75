"""Write frames of DICOM files as files of their own: each is an image then that can be labeled."""

from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

from halfmoon.core.errors import UserError
from halfmoon.data import dicom
from halfmoon.sites.folders.site_folder import read
from halfmoon.storage import atomic_io


def write_frames(folder: Path, out: Path, which: str) -> tuple[int, int]:
    """Write the frames of a folder's files that have several; return of how many files, and how many frames.

    `which` is that of `halfmoon.data.dicom.frames`. Raise UserError where a file cannot be read, where there is no such
    file, or where `out` exists.
    """
    if out.exists():
        raise UserError(f"{out} exists: choose a new --out.")
    paths = [path for path in read(folder).paths if dicom.holds_image(folder / path)]
    counts = Counter[str]()
    try:
        with TemporaryDirectory(dir=out.parent, prefix=".frames-") as place:  # all of them are written, or none
            for path in paths:
                for number, part in dicom.frames((folder / path).read_bytes(), path, which):
                    target = Path(place, "out", Path(path).with_suffix(""), f"{number:04}.dcm")
                    target.parent.mkdir(parents=True, exist_ok=True)
                    part.save_as(target, enforce_file_format=True)
                    counts[path] += 1
            if not counts:
                raise UserError(f"{folder} has no DICOM file of several frames.")
            Path(place, "out").rename(out)
    except OSError as error:
        raise UserError(f"{out}: frames cannot be written there ({atomic_io.reason(error)}).") from error
    return len(counts), counts.total()
