"""LANG=C, output in ASCII, and a home that cannot be written: training on a folder, prediction, and a site that joins."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

BARE = {
    "LANG": "C", "LC_ALL": "C", "PYTHONIOENCODING": "ascii",  # Python reads names of files as UTF-8 even so
    "HOME": "/proc/nobody", "MPLBACKEND": "agg",  # not even root can make this folder
}  # fmt: skip

PROGRAM = """
import sys
from halfmoon.cli.main import main
assert sys.stdout.encoding == "ascii", sys.stdout.encoding
print([main(line.split()) for line in sys.argv[1].splitlines()])
"""


def environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("XDG_", "LC_", "FLWR_"))}
    for name in ("PYTHONUTF8", "PYTHONCOERCECLOCALE"):
        kept.pop(name, None)
    return {**kept, **BARE, "PYTHONPATH": str(Path(__file__).parents[2] / "src")}


def write_classes(folder: Path) -> None:
    """Write images of two classes; the names of a class and of files are not ASCII."""
    generator = np.random.default_rng(0)
    for name, low in (("Füße", 0), ("hände", 120)):
        (folder / name).mkdir(parents=True)
        for number in range(20):
            pixels = generator.integers(low, low + 100, (8, 8), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / name / f"größe{number}.png")


@pytest.mark.skipif(sys.platform != "linux", reason="folders that cannot be made are different elsewhere")
def test_training_and_prediction(tmp_path: Path) -> None:
    write_classes(tmp_path / "bilder")
    run = (
        "run --data bilder --resize 8 --method fedavg --labels-per-class 4 --clients 2 --cohort 1 --rounds 1 --steps 1"
    )
    lines = [
        f"{run} --width 2 --threads 1 --run-dir run", "resume run", "predict run bilder --out p.csv",
        "evaluate run bilder --out measured", "data bilder --resize 8 --labels-per-class 4 --clients 2", "report run",
    ]  # fmt: skip
    command = [sys.executable, "-c", PROGRAM, "\n".join(lines)]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, timeout=200, check=False)
    assert done.stdout.endswith(b"[0, 0, 0, 0, 0, 0]\n"), done.stderr[-2000:].decode(errors="replace")
    # The terminal gets question marks, files get the names.
    assert b"F??e" in done.stdout or b"F?e" in done.stdout
    table = (tmp_path / "p.csv").read_text(encoding="utf-8")
    assert "Füße/größe0.png" in table
    assert "Füße" in (tmp_path / "measured" / "classes.csv").read_text(encoding="utf-8")


@pytest.mark.skipif(sys.platform != "linux", reason="folders that cannot be made are different elsewhere")
def test_a_site_joins(tmp_path: Path) -> None:
    """It reads its folder and calls the server, which is not there; Ctrl-C ends it."""
    pytest.importorskip("flwr")
    write_classes(tmp_path / "klinik")
    rows = "".join(f"{path.relative_to(tmp_path / 'klinik')},{path.parent.name}\n" for path in tmp_path.rglob("*.png"))
    (tmp_path / "klinik" / "labels.csv").write_text(f"path,label\n{rows}", encoding="utf-8")
    words = ["site", "join", "--server", "127.0.0.1:1", "--site", "klinik", "--name", "a", "--terms", "any"]
    with subprocess.Popen(
        [sys.executable, "-m", "halfmoon", *words],
        cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        deadline = time.monotonic() + 120
        lines = []
        while not any(b"waiting for it" in line for line in lines) and time.monotonic() < deadline:
            lines.append(process.stdout.readline())
            assert lines[-1], lines
        process.send_signal(signal.SIGINT)
        rest = process.stdout.read()
    assert any(b"a (40 images, 40 labeled) joins 127.0.0.1:1" in line for line in lines)
    assert process.returncode == 130, rest
    assert b"Traceback" not in b"".join(lines) + rest
