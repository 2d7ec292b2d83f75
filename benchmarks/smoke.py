"""Start every script of benchmarks/ and results/ at its smallest size, so that none rots.

    python benchmarks/smoke.py [--only NAME ...] [--jobs 2]

Numbers mean nothing at this size. A script that is missing from `SMALLEST` and `IMPORTED`, or that ends with an error,
fails the check. Images are stand-ins of random pixels in the formats of Fashion-MNIST, PneumoniaMNIST and CIFAR-10.
Federations whose real processes the tests play already, or another script, are played in one process (`REHEARSED`).
"""

import argparse
import atexit
import gzip
import importlib
import io
import multiprocessing
import os
import runpy
import shutil
import struct
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

ROOT = Path(__file__).resolve().parents[1]
PATIENCE = 420
"""Seconds until a script counts as stuck."""

IMPORTED = {"attack_search", "disturbed", "federation_stock", "peer_rounds", "peer_side", "records", "smoke"}
"""Modules of benchmarks/ and results/ that other scripts import or start."""

SHARED = [
    "torch", "numpy", "pyarrow.parquet", "PIL.Image", "matplotlib.pyplot", "scipy.stats", "sklearn.metrics",
    "halfmoon.runs.runner", "halfmoon.cli.main", "halfmoon.federation.transport.local",
    "halfmoon.federation.transport.client_app", "halfmoon.federation.transport.server_app",
]  # fmt: skip
"""What many scripts import."""
SERVER = multiprocessing.get_context("forkserver")

LONGEST = ("federation_cost", "federation_link", "soak", "foreign_app", "features", "faults", "peers")
"""What begins first: a long script that begins last would end alone."""

Small = tuple[str, dict[str, Any]]

REHEARSED = {
    "federation_attacks": ("attackers", "AttackedFederation", "start_command"),
    "federation_faults": ("disturbed", "Federation", "start"),
    "hostile_site": ("disturbed", "Federation", "start"),
}
"""Scripts whose federations run in one process, and the module, class and method that would start their processes."""

ONE = ("site-00",)
NAMES = ("site-00", "site-01")


ALIKE = (
    "failing call", "full disk", "too many files", "cut file", "deleted file", "hostile image", "hostile DICOM",
    "hostile model or run folder", "hostile server", "dead Ray actor",
)  # fmt: skip
"""Kinds of faults that are left out."""


def export(sites: int) -> tuple[str, ...]:
    """Return the command that writes the sites of federations which have five elsewhere."""
    return ("site", "export", "digits", "--sites", str(sites), "--labels-per-class", "4")


SMALLEST: dict[str, Small] = {
    "accountants": ("", {"PLANS": ((10, 10, 8.0),), "ROUNDS": (1,)}),
    "attacks": (
        "--seeds 0 --sites 4 --methods fedavg-fixmatch --settings uneven --attacks none --out {out}/attacks && "
        "--search --tries 9 --seeds 0 --sites 5 --methods fedavg-fixmatch --settings uneven --rules cosine-trimmed "
        "--out {out}/search",
        {"ROUNDS": 1},
    ),
    "calibration": ("{data}/pneumonia_mnist {run}", {}),
    "client_store": ("--clients 8 --width 4 --cap-mib 1 --cohort 2 --rounds 1", {}),
    "convergence": (
        "--out {out}/convergence",
        {"HORIZONS": (1, 2, 3), "SEEDS": (0, 1), "LOOKS": 1, "FEDERATION": {"clients": 2, "cohort": 2}},
    ),
    "cores": ("--cohort 2 --steps 1 --turns 1 --cores 2", {}),
    "coverage": ("--trials 2 --out {out}/coverage.md", {"SPLITS": (3,), "IMAGES": (20,)}),
    "damaged_federations": ("--places 1", {}),
    "damaged_folders": ("--places 1", {}),
    "dicom_files": ("--files 20", {}),
    "gpu": (
        "--device cpu --rounds 2 --no-ceilings",
        {
            "NETWORKS": {"small, width 16": ("small", 4), "ResNet-9, width 64": None},
            "METHODS": {"fedavg-fixmatch": None, "feddure": None},
            "EXECUTORS": ("loop",),
            "IMAGES_PER_CLIENT": 40,
        },
    ),
    "failing_disks": ("--every 60", {}),
    "false_counts": (
        "--seeds 0 --out {out}/counts.md",
        {"RULES": ("mean",), "ATTACKS": ("none", "false-counts"), "COMMON": {"rounds": 1}},
    ),
    # One kind of each function; a process of Ray is killed in tests/runs/test_workers.py.
    "faults": ("--minutes 0", {"KINDS": dict.fromkeys(ALIKE)}),
    "feddure_step": ("--width 4 --seconds 1 --unlabeled 10", {}),
    "head_features": ("{data} --images 60 --tests 20 --seeds 0 1 --sets pneumonia_mnist", {"LABELS": (3,)}),
    "features": (
        "{data} --images 40 --turns 1",
        {
            "METHODS": ("fedavg",),
            "SHARE": 0.05,
            "CLIENTS": 2,
            "ROUNDS": 2,
            "ROWS": ("mixture-head",),
            "COMMON": {"clients": 2, "cohort": 2},
            "FILL": {"resize": 32, "labels": 20},
        },
    ),
    "federation_attacks": ("--only undisturbed --out {out}/attacks", {}),
    "federation_cost": (
        "--rounds 1 --steps 1 --out {out}/cost",
        {
            "MODELS": {"small, width 16": ("small", 4), "ResNet-9, width 16": None},
            "SITES": 1,
            "WAYS": {"halfmoon, real processes": None},  # federation_link.py plays these
        },
    ),
    "federation_faults": ("--only undisturbed --out {out}/faults", {"OPTIONS": {"steps": 2}}),
    "federation_link": (
        "--turns 1 --out {out}/link",
        {
            "federation_cost.SITES": 1,
            "LOOPBACK": {"small, 20 steps, Flower's waits": None, "small, 20 steps": None, "small, 1,000 steps": None},
            "SLOW": {"small, 20 steps": ("small", 4, 1, 3, True), "ResNet-9, 20 steps": None},
        },
    ),
    "federation_parity": ("--methods semifl --ways simulator --rounds 1 --out {out}/parity", {}),
    "finetuning": (
        "{data} {out} {out}/finetuning",
        {
            "SEEDS": (0, 1),
            "RATES": (8e-3,),
            "FIRST": {"rounds": 1, "steps": 1},
            "THEN": {"rounds": 1, "steps": 1},
            "ROWS": {"given weights, all trained": None, "given weights, backbone at a tenth of the rate": None},
        },
    ),
    "foreign_app": ("", {"MOMENTS": ("after the run",)}),
    "fuzz": ("--cases 5 --seconds 3 --only toml --out {out}/fuzz --findings {out}/findings", {}),
    "half_open": ("--connections 5 --seconds 1", {}),
    "hostile_sums": ("--seeds 0 --labels 50 --out {out}/sums", {"METHODS": {"mixture-head": None}, "SHARE": 0.1}),
    "hostile_site": ("--rounds 1 --only hostile --out {out}/hostile", {"SITES": NAMES, "EXPORT": export(2)}),
    "label_choice": ("--out {out}/choice", {"SEEDS": (0, 1), "ROUNDS": 2, "JUDGED": (), "POOL": 45, "TESTS": 12}),
    "large_data": ("6000 8 {out}", {}),
    "large_model": ("--width 8 --turns 1 --methods fedavg", {}),
    "leakage": (
        "--trials 1 --out {out}/leakage.md",
        {"STEPS": 2, "ATTEMPTS": 2, "ROUNDS": (0,), "METHODS": ("feddure",), "BASE": {"data_share": 0.2, "width": 4}},
    ),
    "page_memory": ("--side 256 --kinds palette-png turned-rgba-tiff dicom-jpeg2000", {"REQUESTS": 4}),
    "peers": ("--only plain halfmoon --cohorts 5 --sizes tiny --turns 1 --folder {out}/environments", {"STARTS": 1}),
    "precision": ("--rounds 1 --seeds 0", {"METHODS": {"fedavg-fixmatch": None, "fedavg-soft-labels": None}}),
    "privacy": (
        "--data-dir {data} --kept {out}/privacy.jsonl",
        {"METHODS": ("fedavg",), "COMMON": {"rounds": 1, "clients": 10, "cohort": 5}},
    ),
    "programs": ("--clients 4 --together 2 --turns 1 --networks small:8:8:1", {}),
    "robust": (
        "--data-dir {data} --kept {out}/robust.jsonl",
        {
            "METHODS": ("fedavg-fixmatch",),
            "RULES": ("median",),
            "SHARES": (0.2,),
            "COMMON": {"rounds": 1, "labels_per_class": 2.0},
        },
    ),
    "scale": ("--part uploads fedavg 2", {}),
    "secure_sums": ("--sites 3 --parameters 1000 --out {out}/sums", {}),
    "soak": (
        "--minutes 0 --rounds 2 --seconds 1 --out {out}/soak",
        {"SAMPLE": 0.2, "SITES": ONE, "SLOW": ONE[0], "EXPORT": export(1), "RULES": {"min_replies": 1}},
    ),
    "site_opening": ("--images 20 --side 8", {}),
    "start": ("--turns 1", {}),
    "strong_view": ("--rounds 1", {}),
    "unlike": (
        "--seeds 0 --networks small --out {out}/unlike.csv",
        {"KNOWN": 50, "OTHERS": 20, "FOREIGN": 10, "NETWORKS": {"small": {"rounds": 1, "steps": 2}}},
    ),
    "unequal_clients": ("--methods fedavg --cohorts 2 --turns 1", {}),
    "upload_precision": ("--rounds 1 --seeds 40", {"VARIANTS": {"float16": None}}),
}
"""The command line of each script of benchmarks/ (several are separated by "&&"), and the constants that make it small."""

RESULTS: dict[str, Small] = {
    "choosing": (
        "run fashion_mnist clients --seeds 9 --rows fedavg --runs {out} --data-dir {data}",
        {"SHARED": {"rounds": 1}},
    ),
    "equal_trials": (
        "run digits --trials 1 --seeds 90 91 --rounds 1 --runs {out}",
        {
            "KNOBS": dict.fromkeys(
                ("fedavg-soft-labels", "fedavg-uda", "feddure", "fedmatch", "fedloke", "sage", "proxyfl")
            )
        },
    ),
    "evidence": ("run digits --seeds 99 --rows fedavg --runs {out}", {"SETS": {"digits": {"rounds": 1}}}),
    "feddure_budget": (
        "run --seeds 9 --steps 1 --schedules constant --width 4 --shrink 4 --runs {out} --data-dir {data}",
        {"METHODS": {"feddure": None, "fedavg-fixmatch": None}, "SHARED": {"rounds": 1, "clients": 4, "cohort": 2}},
    ),
    "full_size": (
        "run fedavg --data-dir {data} --runs {out}",
        {"PROTOCOL": {"data": "cifar10", "clients": 4, "cohort": 2, "rounds": 1, "network": "small", "threads": 1}},
    ),
    "mechanisms": ("run --seeds 9 --rounds 1 --only fedloke --runs {out}", {}),
    "regulator_auc": ("run --seeds 9 --rounds 1 --runs {out}", {}),
    "regulator_signal": ("run --seeds 9 --rounds 1 --rows control prior-signal-halves --runs {out}", {}),
    "feddure_trials": ("run --seeds 9 --runs {out}", {"TRIALS": 1, "ROUNDS": 1}),
    "labels_curve": (
        "run cifar10 --seeds 9 --runs {out} --data-dir {data}",
        {
            "SHARES": {"cifar10": 0.1},
            "LABELS": (1,),
            "SETTINGS": {"uneven": None},
            "ROWS": dict.fromkeys(("fedavg", "fedavg-soft-labels", "fedavg-fixmatch-global", "mixture-head")),
        },
    ),
    "decisions": (
        "--data-dir {data} --features {out}/features --out {out}/decisions.csv --sets digits --decisions 1 --unlabeled 30",
        {"IMAGES": 100},
    ),
    "uneven_classes": (
        "--data-dir {data} --features {out}/features --out {out}/uneven.csv --sets pneumonia_mnist --labels 3 "
        "--draws 0 1 --images 60 --tests 40",
        {"MIXES": ("even", "1:5"), "IMAGES": 30},
    ),
    "open_set": (
        "--runs {out}/open --seeds 0 --sets digits --methods fedavg-soft-labels",
        {"SHARES": (0.3,), "TRAINED": {"rounds": 1}},
    ),
    "own_images": ("--data-dir {data} --out {out}/photos --images 20", {}),
    "collect": ("smoke {run}", {}),
}
"""The same of results/, in a copy of that folder; those that have a `report` write it, too."""


REPORTING = ("choosing", "equal_trials", "evidence", "feddure_budget", "feddure_trials", "labels_curve")
"""Scripts of results/ whose `report` needs only their records, which a run appends to."""


def idx(path: Path, values: np.ndarray) -> None:
    """Write a file of Fashion-MNIST's format."""
    head = struct.pack(">HBB", 0, 8, values.ndim) + struct.pack(f">{values.ndim}I", *values.shape)
    path.write_bytes(gzip.compress(head + values.astype(np.uint8).tobytes(), 1))


def parquet(path: Path, images: np.ndarray, labels: np.ndarray) -> None:
    """Write PNG images (N, H, W[, 3]) with their labels as the Hugging Face hub does."""
    files = [io.BytesIO() for _ in images]
    for file, pixels in zip(files, images, strict=True):
        Image.fromarray(pixels).save(file, "PNG")
    rows = [{"bytes": file.getvalue(), "path": None} for file in files]
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    pq.write_table(pa.table({"image": pa.array(rows, kind), "label": pa.array(labels, pa.int64())}), path)


def data(folder: Path) -> None:
    """Write the stand-ins: 2,400 + 100 images of ten classes, 600 + 60 + 60 of two, 400 + 50 in color."""
    draw = np.random.default_rng(0)
    for name in ("fashion_mnist", "pneumonia_mnist", "cifar10"):
        (folder / name).mkdir(parents=True)
    for part, count in (("train", 2400), ("t10k", 100)):
        idx(folder / f"fashion_mnist/{part}-images-idx3-ubyte.gz", draw.integers(0, 256, (count, 28, 28)))
        idx(folder / f"fashion_mnist/{part}-labels-idx1-ubyte.gz", np.arange(count) % 10)
    for part, count in (("train", 600), ("validation", 60), ("test", 60)):
        pixels = draw.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        parquet(folder / f"pneumonia_mnist/{part}.parquet", pixels, np.arange(count) % 2)
    for part, count in (("train-00000-of-00001", 400), ("test", 50)):
        pixels = draw.integers(0, 256, (count, 32, 32, 3), dtype=np.uint8)
        parquet(folder / f"cifar10/{part}.parquet", pixels, np.arange(count) % 10)


def run(folder: Path) -> None:
    """Play a run whose folder some scripts read."""
    import halfmoon

    data = folder.parent / "data" / "pneumonia_mnist"
    own = {"network": "small", "method": "fedavg", "rounds": 1, "validation_share": 0.2, "clients": 5}
    even = {"setting": "iid-iid", "labels_per_class": 5.0}
    halfmoon.run(halfmoon.Config.of(data=str(data), run_dir=folder, **own, **even))


def smaller(value: Any, small: Any) -> Any:
    """Return a constant made small: a dict with other values (None: without the key), a list cut, or another value."""
    if isinstance(value, dict):
        kept = {key: part for key, part in value.items() if small.get(key, part) is not None}
        new = {
            key: smaller(kept[key], part) if key in kept else part for key, part in small.items() if part is not None
        }
        return {**kept, **new}
    return value[:small] if isinstance(value, list) else small


class Over:
    """A command that has ended."""

    def poll(self) -> int:
        return 0

    def wait(self, *_: Any) -> int:
        return 0

    def kill(self) -> None:
        """Do nothing."""

    terminate = kill
    send_signal = wait


def rehearse(fed: Any, who: str, *words: str, **_: str) -> None:
    """Play a federation at once where its server is started, in this process; a site's command is over at once."""
    from halfmoon.federation.transport import local

    fed.running[who] = Over()
    if who == "serve":
        file = Path(words[1]) if words else fed.folder / "sites" / "federation.toml"
        if getattr(fed, "spoil", ""):
            os.environ["MISBEHAVE"] = fed.spoil
            runpy.run_path(str(ROOT / "benchmarks" / "misbehaving" / "sitecustomize.py"))["spoil_answers"]()
        local.rehearse(file, fed.run, file.parent)


def rehearse_command(fed: Any, process_name: str, arguments: list[str], environment: dict[str, str]) -> Any:
    """Rehearse the federation of a command of `AttackedFederation`, with its arguments in a list."""
    rehearse(fed, process_name, *arguments)
    return fed.running[process_name]


def child(home: str, name: str, words: list[str], constants: dict[str, Any], out: str) -> None:
    """Run a script in this process: as its command line does, or its `main` with other constants."""
    with open(f"{out}/said", "w") as said:
        for stream in (1, 2):
            os.dup2(said.fileno(), stream)
    os.chdir(out)
    path = Path(home, f"{name}.py")
    sys.path[:] = [home, *(place for place in sys.path if Path(place) != ROOT / "benchmarks")]
    sys.argv = [str(path), *words]
    try:
        if constants or name in REHEARSED:
            script = importlib.import_module(name)
            for words_, small in constants.items():
                place, _, key = words_.rpartition(".")
                module = importlib.import_module(place or name)
                setattr(module, key, smaller(getattr(module, key), small))
            if name in REHEARSED:
                place, key, method = REHEARSED[name]
                rehearsal = rehearse_command if method == "start_command" else rehearse
                setattr(getattr(importlib.import_module(place), key), method, rehearsal)
            script.main()
        else:
            runpy.run_path(str(path), run_name="__main__")
    finally:
        atexit._run_exitfuncs()  # which a process of multiprocessing leaves out


def started(name: str, folder: Path) -> tuple[float, str]:
    """Run a script in a folder and a process of its own; return its seconds, and the end of its words where it failed.

    The process is forked from one that has imported `SHARED`: sixty times PyTorch's import are minutes."""
    benchmark = name in SMALLEST
    words, constants = SMALLEST[name] if benchmark else RESULTS[name]
    out = folder / name
    out.mkdir()
    places = {"out": out, "data": folder / "data", "run": folder / "run"}
    home = ROOT / "benchmarks" if benchmark else Path(shutil.copytree(ROOT / "results", out / "results"))
    if not benchmark:  # a report writes tables into pages
        shutil.copytree(ROOT / "docs", out / "docs")
        shutil.copy(ROOT / "README.md", out)
    begin = time.perf_counter()
    for line in [words, "report"] if name in REPORTING else words.split(" && "):
        given = (str(home), name, line.format(**places).split(), constants, str(out))
        process = SERVER.Process(target=child, args=given)
        process.start()
        process.join(PATIENCE)
        if process.exitcode is None:
            process.kill()
            return time.perf_counter() - begin, f"did not end within {PATIENCE} seconds"
        if process.exitcode:
            return time.perf_counter() - begin, "\n".join((out / "said").read_text().splitlines()[-12:])
    return time.perf_counter() - begin, ""


def main() -> None:
    """Start all scripts, some at a time, and end with 1 where one fails or is not listed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", default=[*SMALLEST, *RESULTS])
    parser.add_argument("--jobs", type=int, default=4, help="scripts at a time; many wait (default: 4)")
    options = parser.parse_args()
    scripts = {path.stem for place in ("benchmarks", "results") for path in (ROOT / place).glob("*.py")}
    missing = sorted(scripts - {*SMALLEST, *RESULTS, *IMPORTED})
    failures = dict.fromkeys(missing, "is not in SMALLEST or RESULTS of benchmarks/smoke.py")
    with tempfile.TemporaryDirectory(prefix="halfmoon-smoke-") as place:
        folder = Path(place)
        os.environ["OMP_NUM_THREADS"] = "1"
        SERVER.set_forkserver_preload(SHARED)
        data(folder / "data")
        first = SERVER.Process(target=run, args=(folder / "run",))
        first.start()
        first.join()
        with ThreadPoolExecutor(options.jobs) as pool:
            names = sorted(options.only, key=lambda name: name not in LONGEST)
            outcomes = pool.map(lambda name: (name, *started(name, folder)), names)
            for name, seconds, words in outcomes:
                print(f"{name:20} {seconds:6.1f} s  {'failed' if words else 'ok'}", flush=True)
                if words:
                    failures[name] = words
    for name, words in failures.items():
        print(f"\n{name}: {words}")
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
