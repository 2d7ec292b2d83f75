"""Ask the labeling page for one large image 40 times at once: how many answers come, and what memory it takes.

    python benchmarks/page_memory.py [--side 8192] [--kinds turned-jpeg rgb-png rgba-png gray16-png turned-tiff]

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
from PIL import Image

REQUESTS = 40
KINDS = {
    "turned-jpeg": ("RGB", "jpg", 6),
    "rgb-png": ("RGB", "png", 1),
    "rgba-png": ("RGBA", "png", 1),
    "gray16-png": ("I;16", "png", 1),
    "turned-tiff": ("RGB", "tif", 6),
}
"""Mode, suffix and EXIF orientation."""


def image(side: int, kind: str, folder: Path) -> None:
    """Write an image of a kind."""
    mode, suffix, orientation = KINDS[kind]
    bands = len(Image.new(mode, (1, 1)).getbands())
    blocks = np.random.default_rng(0).integers(0, 256, (side // 32, side // 32, bands))
    if mode == "I;16":
        made = Image.fromarray(np.kron(blocks[:, :, 0].astype(np.uint16) * 257, np.ones((32, 32), np.uint16)))
    else:
        made = Image.fromarray(blocks.astype(np.uint8)).resize((side, side), Image.Resampling.NEAREST)
    exif = Image.Exif()
    exif[0x0112] = orientation
    made.save(folder / f"a.{suffix}", **({"exif": exif} if orientation > 1 else {"compress_level": 1}))


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
            image(given.side, kind, Path(folder))
            print(json.dumps({"kind": kind, "side": given.side, **measured(Path(folder))}), flush=True)


if __name__ == "__main__":
    main()
