"""Read pydicom's test files, and compare their grays and colors with pydicom's own pipeline.

    python benchmarks/dicom_files.py [--out results/dicom_files.md]

It needs the extra `dicom`. `pydicom_grays` applies pydicom's modality table or rescale, and its window or presentation
table. Generated files have the attributes that pydicom's files lack. Then a folder as an archive exports it, with study
and series folders, files without a suffix and a DICOMDIR, is checked, prepared and read as a site.
"""

import argparse
import io
import shutil
import tempfile
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pydicom
from pydicom import pixels as tools
from pydicom.dataset import Dataset, FileDataset, FileMetaDataset
from pydicom.uid import ExplicitVRLittleEndian

from halfmoon.core.errors import UserError
from halfmoon.data import dicom
from halfmoon.data.preparation import Preparation
from halfmoon.data.readers.decode import decode_prepared
from halfmoon.sites.folders import prepare_site, scan_site

FILES = Path(pydicom.__file__).parent / "data" / "test_files"


GRAY_KINDS = ("MONOCHROME1", "MONOCHROME2")


def make_file(pixels: np.ndarray, **header: Any) -> bytes:
    """Write a DICOM file of `pixels` (H, W) or (H, W, 3); `header` replaces attributes, None removes one."""
    meta = FileMetaDataset()
    meta.TransferSyntaxUID = ExplicitVRLittleEndian
    meta.MediaStorageSOPClassUID = "1.2.840.10008.5.1.4.1.1.7"
    meta.MediaStorageSOPInstanceUID = "1.2.3"
    bits = 8 * pixels.itemsize
    data = FileDataset("file", {}, file_meta=meta, preamble=bytes(128))
    attributes = {
        "SOPClassUID": meta.MediaStorageSOPClassUID,
        "SOPInstanceUID": "1.2.3",
        "Rows": pixels.shape[0],
        "Columns": pixels.shape[1],
        "SamplesPerPixel": 1 if pixels.ndim == 2 else pixels.shape[2],
        "BitsAllocated": bits,
        "BitsStored": bits,
        "HighBit": bits - 1,
        "PixelRepresentation": int(pixels.dtype.kind == "i"),
        "PhotometricInterpretation": "MONOCHROME2" if pixels.ndim == 2 else "RGB",
        "PlanarConfiguration": None if pixels.ndim == 2 else 0,
        "PixelData": pixels.tobytes() + bytes(pixels.nbytes % 2),
        **header,
    }
    for name, value in attributes.items():
        if value is not None:
            setattr(data, name, value)
    file = io.BytesIO()
    data.save_as(file, enforce_file_format=True)
    return file.getvalue()


def make_table(first: int, values: Any, bits: int, words: bool = True) -> list[Dataset]:
    """Make a sequence with a lookup table from `first` on, stored as words (OW) or as numbers (US)."""
    item = Dataset()
    item.LUTDescriptor = [len(values), first, bits]
    entries = np.asarray(values).astype(np.uint16)
    item.add_new("LUTData", "OW" if words else "US", entries.tobytes() if words else entries.tolist())
    item.LUTExplanation = "a table"
    return [item]


def generated_files() -> dict[str, bytes]:
    """Generate a file for each attribute that changes the meaning of a pixel."""
    random = np.random.default_rng(0)
    gray = random.integers(0, 4096, (24, 32)).astype(np.uint16)
    signed = (gray.astype(np.int32) - 1000).astype(np.int16)
    small = (gray >> 4).astype(np.uint8)
    color = random.integers(0, 256, (24, 32, 3)).astype(np.uint8)
    twelve: dict[str, Any] = {"BitsStored": 12, "HighBit": 11}
    window: dict[str, Any] = {"WindowCenter": 1500, "WindowWidth": 1000}
    curve = (np.sin(np.linspace(0, np.pi / 2, 4096)) * 65535).round()
    squares = (np.linspace(0, 1, 4096) ** 2 * 4095).round()
    padded = gray.copy()
    padded[:6] = 4000
    signed_padded = signed.copy()
    signed_padded[:, :8] = -2000
    palette: dict[str, Any] = {"PhotometricInterpretation": "PALETTE COLOR"}
    for number, name in enumerate(("Red", "Green", "Blue")):
        palette[f"{name}PaletteColorLookupTableDescriptor"] = [256, 0, 16]
        ramp = np.roll(np.arange(256), 80 * number).astype(np.uint16) * 257
        palette[f"{name}PaletteColorLookupTableData"] = ramp.tobytes()
    inverse = {"PhotometricInterpretation": "MONOCHROME1"}
    sigmoid = {**window, "VOILUTFunction": "SIGMOID"}
    planar = color.transpose(2, 0, 1).copy().tobytes()
    return {
        "window": make_file(gray, **twelve, **window),
        "window of a signed image with a rescale": make_file(signed, **window, RescaleSlope=2, RescaleIntercept=-100),
        "window, function LINEAR_EXACT": make_file(gray, **twelve, **window, VOILUTFunction="LINEAR_EXACT"),
        "window, function SIGMOID": make_file(gray, **twelve, **sigmoid),
        "window, function SIGMOID, MONOCHROME1": make_file(gray, **twelve, **sigmoid, **inverse),
        "window, MONOCHROME1": make_file(gray, **twelve, **window, **inverse),
        "window, negative slope": make_file(
            gray, **twelve, WindowCenter=-1500, WindowWidth=1000, RescaleSlope=-1, RescaleIntercept=0
        ),
        "window, negative slope, MONOCHROME1": make_file(
            gray, **twelve, **inverse, WindowCenter=-1500, WindowWidth=1000, RescaleSlope=-1, RescaleIntercept=0
        ),
        "window and presentation table": make_file(gray, **twelve, **window, VOILUTSequence=make_table(0, curve, 16)),
        "presentation table": make_file(gray, **twelve, VOILUTSequence=make_table(0, curve, 16)),
        "presentation table, MONOCHROME1": make_file(
            gray, **twelve, **inverse, VOILUTSequence=make_table(0, curve, 16)
        ),
        "presentation table of a signed image": make_file(
            signed, VOILUTSequence=make_table(-1000, squares, 12, words=False)
        ),
        "presentation table after a rescale": make_file(
            gray, **twelve, RescaleSlope=1, RescaleIntercept=-500, VOILUTSequence=make_table(0, curve[:3000], 16)
        ),
        "modality table and window": make_file(
            gray, **twelve, **window, ModalityLUTSequence=make_table(100, squares, 16)
        ),
        "empty modality table, rescale and window": make_file(
            gray, **twelve, **window, ModalityLUTSequence=[], RescaleSlope=2, RescaleIntercept=-1000
        ),
        "padding value": make_file(padded, **twelve, **window, PixelPaddingValue=4000),
        "padding range": make_file(padded, **twelve, **window, PixelPaddingValue=4000, PixelPaddingRangeLimit=4095),
        "padding value of a signed image": make_file(signed_padded, **window, PixelPaddingValue=-2000),
        "padding value without a window": make_file(padded, **twelve, PixelPaddingValue=4000),
        "8 bits": make_file(small),
        "8 bits, MONOCHROME1": make_file(small, **inverse),
        "6 of 8 bits": make_file(small >> 2, BitsStored=6, HighBit=5),
        "unused bits set": make_file(gray | 0xF000, **twelve, **window),
        "palette of 16 bits": make_file(small, **palette),
        "RGB": make_file(color),
        "RGB by planes": make_file(color, PlanarConfiguration=1, PixelData=planar),
        "RGB of 12 bits": make_file(color.astype(np.uint16) << 4, BitsStored=12, HighBit=11),
        "YBR_FULL": make_file(color, PhotometricInterpretation="YBR_FULL"),
        "high bit 15 of 12 bits": make_file(gray << 4, BitsStored=12, HighBit=15),
        "YBR_PARTIAL_422": make_file(color, PhotometricInterpretation="YBR_PARTIAL_422"),
        "HSV": make_file(color, PhotometricInterpretation="HSV"),
        "no photometric interpretation": make_file(gray, PhotometricInterpretation=None),
        "unknown window function": make_file(gray, **twelve, **window, VOILUTFunction="CUBIC"),
        "MONOCHROME2 with INVERSE": make_file(gray, **twelve, PresentationLUTShape="INVERSE"),
        "colors for some grays": make_file(gray, **twelve, PixelPresentation="MIXED"),
        "signed colors": make_file(color.astype(np.int8)),
    }


def pydicom_grays(data: bytes) -> np.ndarray | None:
    """Convert a file to 8 bits with pydicom's functions, float (H, W, C); None where it defines no black and white."""
    file = pydicom.dcmread(io.BytesIO(data))
    frames = int(file.get("NumberOfFrames") or 1)
    number = int(file.get("RepresentativeFrameNumber") or 0)
    frame = number - 1 if 1 <= number <= frames else frames // 2
    pixels = tools.pixel_array(io.BytesIO(data), index=frame)
    kind = file.PhotometricInterpretation
    if kind not in GRAY_KINDS:
        if kind == "PALETTE COLOR":
            pixels = tools.apply_color_lut(pixels, file)
            return pixels[..., :3] * 255.0 / (2 ** (8 * pixels.itemsize) - 1)
        return pixels[..., :3] * 255.0 / (2**file.BitsStored - 1)
    real = tools.apply_modality_lut(pixels, file)
    has_table = bool(file.get("VOILUTSequence"))
    has_window = file.get("WindowCenter") is not None and file.get("WindowWidth") is not None
    if has_window:
        shown = tools.apply_voi_lut(real, file, prefer_lut=False)
        low, high = output_range(file)
    elif has_table:
        whole = np.rint(real).astype(np.int64) if real.dtype.kind == "f" else real
        shown = tools.apply_voi_lut(whole, file)
        low = 0.0
        high = 2.0 ** file.VOILUTSequence[0].LUTDescriptor[2] - 1
    elif file.BitsStored <= 8 and not file.PixelRepresentation and real is pixels:
        shown = real
        low = 0.0
        high = 2.0**file.BitsStored - 1
    else:
        return None
    grays = (shown.astype(np.float64) - low) / (high - low) * 255
    if kind == "MONOCHROME1":
        grays = 255 - grays
    padding = file.get("PixelPaddingValue")
    if padding is not None:  # pydicom has no function for it
        end = file.get("PixelPaddingRangeLimit", padding)
        is_padding = (pixels >= min(padding, end)) & (pixels <= max(padding, end))
        if not is_padding.all():
            grays[is_padding] = 0
    return grays[..., None]


def output_range(file: Any) -> tuple[float, float]:
    """Return the values that `apply_windowing` gives black and white."""
    if file.get("ModalityLUTSequence"):
        low = 0.0
        high = 2.0 ** file.ModalityLUTSequence[0].LUTDescriptor[2] - 1
    elif file.PixelRepresentation:
        low = -(2.0 ** (file.BitsStored - 1))
        high = 2.0 ** (file.BitsStored - 1) - 1
    else:
        low = 0.0
        high = 2.0**file.BitsStored - 1
    slope = float(file.get("RescaleSlope", 1))
    intercept = float(file.get("RescaleIntercept", 0))
    if not file.get("ModalityLUTSequence"):
        low = low * slope + intercept
        high = high * slope + intercept
    return low, high


def compare(data: bytes, grays: np.ndarray) -> str:
    """Return the largest difference of a gray or color from pydicom's, for the table."""
    try:
        expected = pydicom_grays(data)
    except Exception as error:
        return f"pydicom raises {type(error).__name__}"
    if expected is None:
        return "no window: estimated"
    return f"{np.abs(np.clip(expected, 0, 255) - grays).max():.2f}"


def read_file(path: Path) -> tuple[str, str]:
    """Read a file; return the outcome and its row of the table."""
    data = path.read_bytes()
    name = str(path.relative_to(FILES))
    if not dicom.is_dicom(data):
        return "no DICOM file", f"| {name} | no DICOM file: it lacks the magic bytes | | |"
    if not dicom.holds_image(path):
        return "no image by its kind", f"| {name} | ignored: a kind without pixels | | |"
    return read_content(data, name, dicom.read_header(path, name)[3])


def read_content(data: bytes, name: str, frames: int = 1) -> tuple[str, str]:
    """Read the content of a file with an image; return the outcome and its row of the table."""
    file = pydicom.dcmread(io.BytesIO(data), stop_before_pixels=True)
    about = f"{file.get('PhotometricInterpretation', '')}, {file.get('BitsStored', '-')} bits"
    try:
        pixels = decode_prepared(data, name, Preparation())
    except UserError as error:
        return "refused", f"| {name} | refused: {str(error).removeprefix(f'{name}: ').replace('|', '/')[:150]} | | |"
    height, width, channels = pixels.shape
    result = f"read, {about}, {frames} frames"
    return "read", f"| {name} | {result} | {width}x{height}x{channels} | {compare(data, pixels)} |"


def scan_archive(folder: Path) -> str:
    """Copy all files as an archive exports them, and describe in a sentence how a site reads the folder."""
    count = 0
    for path in sorted(FILES.rglob("*")):
        if not path.is_file() or not dicom.is_dicom(path.read_bytes()):
            continue
        file = pydicom.dcmread(path, stop_before_pixels=True)
        study, series = (str(file.get(name) or "none") for name in ("StudyInstanceUID", "SeriesInstanceUID"))
        target = folder / study / series / f"IM{count:06}"
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)
        count += 1
    site, findings = scan_site(folder)
    others = sum(len(each.names) for each in findings if each.kind == "files that are no images")
    prepared = prepare_site(folder, (64, 64), 1)
    people = dicom.find_patients([folder / path for path in site.paths]) or []
    return (
        f"{count} files without a suffix, in study and series folders. halfmoon recognizes {len(site)} as images and {others} "
        f"as other files. It decodes {len(prepared.site)} and leaves {len(prepared.left_out)} out with a reason. "
        f"The images are grouped by {len(set(people) - {''})} patients."
    )


def main() -> None:
    """Read all files, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, help="only the first ones")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    paths = sorted(path for path in FILES.rglob("*") if path.is_file())[: options.files]
    rows = [read_file(path) for path in paths]
    many = Counter((path.parent, kind) for path, (kind, _) in zip(paths, rows, strict=True))
    lines: dict[object, str] = {}
    for path, (kind, line) in zip(paths, rows, strict=True):
        count = many[path.parent, kind]
        name = str(path.relative_to(FILES))
        is_grouped = kind == "refused" and path.parent != FILES
        lines[(path.parent, kind) if is_grouped else path] = (
            line.replace(name, f"{name} and {count - 1} more") if is_grouped else line
        )
    counts = ", ".join(f"{count} {kind}" for kind, count in Counter(kind for kind, _ in rows).most_common())
    with tempfile.TemporaryDirectory() as folder:
        export = scan_archive(Path(folder)) if options.files is None else ""
    head = ["| file | result | image | largest difference from pydicom |", "| --- | --- | --- | --- |"]
    table = "\n".join([*head, *lines.values()])
    generated = "\n".join([*head, *(read_content(data, name)[1] for name, data in generated_files().items())])
    text = "# DICOM files\n\n"
    text += (
        f"halfmoon reads each of the {len(rows)} test files of pydicom {pydicom.__version__}, or refuses it with a sentence: "
        f"{counts}.\n\n    python benchmarks/dicom_files.py\n\n"
    )
    text += f"The same files in the layout of an archive's export: {export}\n\n"
    text += (
        "The last column is the largest difference of a gray or color value from pydicom's pipeline, in levels of 0 to "
        "255. The pipeline is the modality table or rescale, and then the window, or the presentation table if there is "
        "no window. A difference of 0.5 is the rounding of grays. A difference of 1 is the rounding of colors of more "
        "than 8 bits, whose low bits are dropped. Padding has to be black. pydicom does not estimate a window for a file "
        "without one, so these files have no comparison.\n\n"
    )
    text += f"{table}\n\n## Generated files\n\nThese have attributes that pydicom's files lack.\n\n{generated}\n"
    print(text) if options.out is None else options.out.write_text(text)


if __name__ == "__main__":
    main()
