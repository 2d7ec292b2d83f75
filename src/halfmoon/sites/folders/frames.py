"""Write frames of DICOM files as files of their own: each is an image then that can be labeled."""

import shutil
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

from halfmoon.core.errors import UserError
from halfmoon.data import dicom
from halfmoon.sites.folders.site_folder import read
from halfmoon.storage import atomic_io


def write_frames(folder: Path, out: Path, which: str) -> tuple[int, int, list[str]]:
    """Write the frames of a folder's files that have several; return of how many files, how many frames, and a sentence
    about each file that is left out.

    A folder of frames is called like its file, without its suffix unless the rest is another file's too. `which` is
    that of `halfmoon.data.dicom.frames`. Raise UserError where no file has them, or where `out` exists.
    """
    if out.exists():
        raise UserError(f"{out} exists: choose a new --out.")
    paths = [path for path in read(folder).paths if dicom.holds_image(folder / path)]
    stems = Counter(Path(path).with_suffix("") for path in paths)
    counts, left_out = Counter[str](), list[str]()
    try:
        with TemporaryDirectory(dir=out.parent, prefix=".frames-") as place:  # all of them are written, or none
            for path in paths:
                stem = Path(path).with_suffix("")
                target = Path(place, "out", stem if stems[stem] == 1 else path)
                try:
                    for number, part in dicom.frames((folder / path).read_bytes(), path, which):
                        target.mkdir(parents=True, exist_ok=True)
                        part.save_as(target / f"{number:04}.dcm", enforce_file_format=True)
                        counts[path] += 1
                except UserError as error:
                    left_out.append(str(error))
                    shutil.rmtree(target, ignore_errors=True)
                    del counts[path]
            if not counts:
                raise UserError(left_out[0] if left_out else f"{folder} has no DICOM file of several frames.")
            Path(place, "out").rename(out)
    except OSError as error:
        raise UserError(f"{out}: frames cannot be written there ({atomic_io.reason(error)}).") from error
    return len(counts), counts.total(), left_out
