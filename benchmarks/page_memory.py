"""Ask the labeling page for one large image 40 times at once: how many answers come, and what memory it takes.

    python benchmarks/page_memory.py [--side 8192] [--kinds KIND ...]

An image of side x side random blocks; every other request is for its small picture. The peak is that of the command
`halfmoon site label` (VmHWM of /proc, MB) and what it is above the peak before the first request.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pydicom
from PIL import Image
from pydicom import uid

REQUESTS = 40
KINDS = {
    "turned-jpeg": ("RGB", "jpg", {"quality": 90}),
    "progressive-jpeg": ("RGB", "jpg", {"progressive": True}),
    "cmyk-jpeg": ("CMYK", "jpg", {}),
    "rgb-png": ("RGB", "png", {}),
    "rgba-png": ("RGBA", "png", {}),
    "turned-rgba-png": ("RGBA", "png", {}),
    "la-png": ("LA", "png", {}),
    "palette-png": ("P", "png", {"transparency": 0}),
    "gray16-png": ("I;16", "png", {}),
    "turned-tiff": ("RGB", "tif", {}),
    "turned-rgba-tiff": ("RGBA", "tif", {"compression": "tiff_lzw"}),
    "turned-gray16-tiff": ("I;16", "tif", {}),
    "float-tiff": ("F", "tif", {}),
    "rgb-webp": ("RGB", "webp", {"quality": 50, "method": 0}),
    "dicom16": ("I;16", "dcm", {}),
    "dicom-rgb": ("RGB", "dcm", {}),
    "dicom-ybr": ("RGB", "dcm", {}),
    "dicom-jpeg2000": ("I;16", "dcm", {}),
    "dicom-rgb-jpeg2000": ("RGB", "dcm", {}),
}
"""Mode, suffix and how Pillow saves it; a turned one has EXIF orientation 6."""

LARGEST = {"rgb-webp": 5152, "dicom-rgb": 7712, "dicom-jpeg2000": 5152, "dicom-ybr": 3840, "dicom-rgb-jpeg2000": 3840}
"""The largest sides of which pages show these."""


def image(side: int, kind: str, folder: Path) -> None:
    """Write an image of a kind."""
    mode, suffix, options = KINDS[kind]
    bands = {"I;16": 1, "F": 1, "P": 1}.get(mode) or len(Image.new(mode, (1, 1)).getbands())
    blocks = np.random.default_rng(0).integers(0, 256, (side // 32, side // 32, bands), np.uint8)
    pixels = np.kron(blocks, np.ones((32, 32, 1), np.uint8)).squeeze()
    if mode in ("I;16", "F"):
        pixels = pixels.astype(np.uint16) * 257 if mode == "I;16" else pixels.astype(np.float32)
    if suffix == "dcm":
        dicom(pixels, kind, folder / "a.dcm")
        return
    exif = Image.Exif()
    exif[0x0112] = 6 if "turned" in kind else 1
    made = Image.fromarray(pixels, mode) if mode in ("CMYK", "P") else Image.fromarray(pixels)
    made.save(folder / f"a.{suffix}", exif=exif, **({"compress_level": 1} if suffix == "png" else {}), **options)


def dicom(pixels: np.ndarray, kind: str, path: Path) -> None:
    """Write pixels as a DICOM file."""
    file = pydicom.Dataset()
    file.SOPClassUID, file.SOPInstanceUID = uid.SecondaryCaptureImageStorage, uid.generate_uid()
    file.ensure_file_meta()
    file.file_meta.TransferSyntaxUID = uid.ExplicitVRLittleEndian
    file.set_pixel_data(
        pixels,
        ("YBR_FULL" if kind == "dicom-ybr" else "RGB") if pixels.ndim == 3 else "MONOCHROME2",
        8 * pixels.itemsize,
    )
    if "jpeg2000" in kind:
        file.compress(uid.JPEG2000Lossless)
    file.save_as(path, enforce_file_format=True)


def measured(folder: Path) -> dict[str, Any]:
    """Return the peaks before and after all requests, and how many were answered."""
    command = [sys.executable, "-m", "halfmoon", "site", "label", str(folder), "--classes", "a", "b", "--no-browser"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as page:
        assert page.stdout is not None, "it is a pipe"
        address = next(word for line in page.stdout for word in line.split() if word.startswith("http://"))

        def ask(number: int) -> int:
            return urllib.request.urlopen(f"{address}image/0?small={number % 2}", timeout=300).status

        def peak() -> int:
            lines = Path(f"/proc/{page.pid}/status").read_text().splitlines()
            return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) // 1024

        urllib.request.urlopen(f"{address}start", timeout=60).read()
        before, began = peak(), time.monotonic()
        with ThreadPoolExecutor(REQUESTS) as threads:
            answers = list(threads.map(ask, range(REQUESTS)))
        found = {"peak": peak(), "above": peak() - before, "answered": answers.count(200)}
        page.terminate()
        return found | {"seconds": round(time.monotonic() - began, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--side", type=int, default=8192)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    given = parser.parse_args()
    for kind in given.kinds:
        with tempfile.TemporaryDirectory() as folder:
            side = min(given.side, LARGEST.get(kind, given.side))
            image(side, kind, Path(folder))
            print(json.dumps({"kind": kind, "side": side, **measured(Path(folder))}), flush=True)


if __name__ == "__main__":
    main()
