"""pydicom's own test files: what of each is read, what is refused and why; then a folder as an archive exports it.

    python benchmarks/dicom_files.py [--out results/dicom_files.md]

It needs the extra `dicom`. The archive's folder has study and series folders, files without a suffix and a DICOMDIR;
it is checked, prepared and read as a site.
"""

import argparse
import shutil
import tempfile
import warnings
from collections import Counter
from pathlib import Path

import pydicom

from halfmoon.core.errors import UserError
from halfmoon.data import dicom
from halfmoon.data.preparation import Preparation
from halfmoon.data.readers.decode import decode_prepared
from halfmoon.sites.folders import prepare_site, scan_site

FILES = Path(pydicom.__file__).parent / "data" / "test_files"


def row(path: Path) -> tuple[str, str]:
    """Return what becomes of a file, and its row of the table."""
    data, name = path.read_bytes(), str(path.relative_to(FILES))
    if not dicom.is_dicom(data):
        return "no DICOM file", f"| {name} | no DICOM file: it lacks the mark | |"
    if not dicom.holds_image(path):
        return "no image by its kind", f"| {name} | ignored: a kind without pixels | |"
    file = pydicom.dcmread(path, stop_before_pixels=True)
    about = f"{file.get('PhotometricInterpretation', '')}, {file.get('BitsStored', '-')} bits"
    try:
        pixels = decode_prepared(data, name, Preparation())
    except UserError as error:
        return "refused", f"| {name} | refused: {str(error).removeprefix(f'{name}: ').replace('|', '/')[:150]} | |"
    height, width, channels = pixels.shape
    return (
        "read",
        f"| {name} | read, {about}, {dicom.read_header(path, name)[3]} frames | {width}x{height}x{channels} |",
    )


def archive(folder: Path) -> str:
    """Return a sentence about what a site makes of all files with an image, exported as an archive would."""
    count = 0
    for path in sorted(FILES.rglob("*")):
        if not path.is_file() or not dicom.is_dicom(path.read_bytes()):
            continue
        file = pydicom.dcmread(path, stop_before_pixels=True)
        study, series = (str(file.get(name) or "none") for name in ("StudyInstanceUID", "SeriesInstanceUID"))
        place = folder / study / series / f"IM{count:06}"
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, place)
        count += 1
    site, findings = scan_site(folder)
    others = sum(len(each.names) for each in findings if each.kind == "files that are no images")
    made = prepare_site(folder, (64, 64), 1)
    people = dicom.find_patients([folder / path for path in site.paths]) or []
    return (
        f"{count} files without a suffix in study and series folders: {len(site)} are known as images, {others} as "
        f"others; {len(made.site)} are decoded, {len(made.left_out)} left out with a reason; "
        f"{len(set(people) - {''})} patients group them."
    )


def main() -> None:
    """Read all files, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, help="only the first ones")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    paths = sorted(path for path in FILES.rglob("*") if path.is_file())[: given.files]
    rows = [row(path) for path in paths]
    many = Counter((path.parent, kind) for path, (kind, _) in zip(paths, rows, strict=True))
    told: dict[object, str] = {}
    for path, (kind, line) in zip(paths, rows, strict=True):
        count, name = many[path.parent, kind], str(path.relative_to(FILES))
        lump = kind == "refused" and path.parent != FILES
        told[(path.parent, kind) if lump else path] = (
            line.replace(name, f"{name} and {count - 1} more") if lump else line
        )
    counts = ", ".join(f"{count} {kind}" for kind, count in Counter(kind for kind, _ in rows).most_common())
    with tempfile.TemporaryDirectory() as home:
        export = archive(Path(home)) if given.files is None else ""
    table = "\n".join(["| file | result | image |", "| --- | --- | --- |", *told.values()])
    words = "# DICOM files\n\n    python benchmarks/dicom_files.py\n\n"
    words += f"{len(rows)} files of pydicom {pydicom.__version__}: {counts}.\n\n"
    words += f"As an archive exports them: {export}\n\n{table}\n"
    print(words) if given.out is None else given.out.write_text(words)


if __name__ == "__main__":
    main()
