"""How long a run takes to start on many images, and how much memory it holds, the first time and afterwards.

python benchmarks/large_data.py IMAGES [SIDE] [FOLDER]: writes a parquet set of IMAGES random PNG images of SIDE x SIDE
RGB (64) into FOLDER (a temporary one), then starts halfmoon run twice on it with one round of two clients of 1,000,
each time in a process of its own. Printed: seconds until the first round is over and drawn, of these the processor's
(the rest is waiting for the disk, or for other programs), and the largest resident memory, of which mapped pages can be
taken back by the system at any time ("anonymous" cannot).
"""

import io
import json
import resource
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

PART = 50_000


def write(folder: Path, count: int, side: int) -> None:
    """Write the set: 64 different images, repeated, so that only decoding is slow."""
    draw = np.random.default_rng(0)
    encoded = []
    for _ in range(64):
        file = io.BytesIO()
        Image.fromarray(draw.integers(0, 256, (side // 8, side // 8, 3), np.uint8)).resize((side, side)).save(
            file, "PNG"
        )
        encoded.append(file.getvalue())
    folder.mkdir(parents=True)
    parts = -(-count // PART)
    for part, rows in (*((f"train-{n:05d}-of-{parts:05d}", PART) for n in range(parts)), ("test", 1000)):
        rows = min(rows, count)
        table = {"image": [{"bytes": encoded[k % 64]} for k in range(rows)], "label": [k % 10 for k in range(rows)]}
        pq.write_table(pa.table(table), folder / f"{part}.parquet")


def resident(process: subprocess.Popen) -> tuple[int, int]:
    """Return the largest resident memory of a process and of that what is its own, in bytes, when it has ended."""
    most = own = 0
    while process.poll() is None:
        try:
            words = Path(f"/proc/{process.pid}/status").read_text()
        except OSError:
            break
        held = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in words.splitlines() if "rss" in line.lower()}
        most, own = max(most, held.get("VmRSS", 0)), max(own, held.get("RssAnon", 0))
        time.sleep(0.05)
    return most, own


def play(folder: Path, run: Path) -> dict[str, float]:
    """Start a run in a process of its own."""
    words = [
        *("run", "--method", "fedavg-fixmatch", "--data", str(folder), "--cache", str(folder.parent / "cache")),
        *("--network", "small", "--clients", "1000", "--cohort", "2", "--rounds", "1", "--steps", "5"),
        *("--setting", "iid-iid", "--run-dir", str(run)),
    ]
    code = "import sys; from halfmoon.cli.main import main; sys.exit(main(sys.argv[1:]))"
    begin, used = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    process = subprocess.Popen([sys.executable, "-c", code, *words], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    found: list[tuple[int, int]] = []
    watcher = threading.Thread(target=lambda: found.append(resident(process)))
    watcher.start()
    _, said = process.communicate()
    watcher.join()
    if process.returncode:
        sys.exit(said.decode())
    most, own = found[0]
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {
        "seconds": round(time.perf_counter() - begin, 1),
        "processor_seconds": round(spent.ru_utime + spent.ru_stime - used.ru_utime - used.ru_stime, 1),
        "resident_mb": most // 10**6,
        "anonymous_mb": own // 10**6,
    }


def main() -> None:
    """Write the set, play twice, print."""
    count, side = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 64
    with tempfile.TemporaryDirectory(dir=sys.argv[3] if len(sys.argv) > 3 else None) as place:
        folder = Path(place) / "set"
        write(folder, count, side)
        rows = {name: play(folder, Path(place) / name) for name in ("first", "again")}
    print(json.dumps({"images": count, "side": side, "decoded_mb": count * side * side * 3 // 10**6, **rows}, indent=1))


if __name__ == "__main__":
    main()
