"""Run every script of benchmarks/ and results/ at its smallest size, to check that it still works.

    python benchmarks/smoke.py [--only NAME ...] [--jobs 4]

Numbers mean nothing at this size. A script that is missing from `BENCHMARKS`, `RESULTS` and `IMPORTED`, or that fails, fails
the check. Images are random pixels in the formats of Fashion-MNIST, PneumoniaMNIST and CIFAR-10. Federations of real
processes that the tests or another script run already are rehearsed in one process (`REHEARSED`).
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
TIMEOUT = 420
"""Seconds until a script is stopped."""

IMPORTED = {"attack_search", "disturbed", "federation_stock", "random_weights", "records", "smoke"}
"""Modules of benchmarks/ and results/ that other scripts import or start."""

SHARED = [
    "torch", "torch._dynamo", "numpy", "pyarrow.parquet", "PIL.Image", "matplotlib.pyplot",
    "matplotlib.backends.backend_agg", "scipy.stats", "sklearn.metrics",
    "halfmoon.runs.runner", "halfmoon.cli.main", "halfmoon.studies.run_plan", "halfmoon.studies.results",
    "halfmoon.federation.transport.local", "halfmoon.federation.transport.client_app",
    "halfmoon.federation.transport.server_app",
]  # fmt: skip
"""Modules that many scripts import."""
SERVER = multiprocessing.get_context("forkserver")

LONGEST = ("faults", "federation_cost", "federation_link", "features", "peers", "resources", "server_attacks", "soak")
"""Scripts that start first, because a long script that starts last would delay the end."""

Small = tuple[str, dict[str, Any]]
"""Command lines of a script, separated by "&&", and the constants that make it small."""

REHEARSED = {
    "federation_attacks": ("attackers", "AttackedFederation", "start_command"),
    "federation_faults": ("disturbed", "Federation", "start"),
    "hostile_site": ("disturbed", "Federation", "start"),
}
"""Scripts whose federations run in one process, and the module, class and method that would start their processes."""

ONE_SITE = ("site-00",)
TWO_SITES = ("site-00", "site-01")

SIMILAR_FAULTS = (
    "failing call", "full disk", "too many files", "cut file", "deleted file", "hostile image", "hostile DICOM",
    "hostile model or run folder", "hostile server", "dead Ray actor",
)  # fmt: skip
"""Kinds of faults that the same functions inject as kinds that run. The tests kill a process of Ray."""


def export_command(sites: int) -> tuple[str, ...]:
    """Return the command that writes the sites of a federation that has more of them at full size."""
    return ("site", "export", "digits", "--sites", str(sites), "--labels-per-class", "4")


def run_forked(command: list[str], cache: str) -> None:
    """Run a Python command as `features.run_command` does, but in a fork of this process, which has imported PyTorch.

    Args:
        command: the interpreter, then a script or `-m` and a module, and their arguments.
        cache: the folder of the command's cache.

    Raises:
        RuntimeError: the command failed; its output is that of this process.
    """
    process = multiprocessing.get_context("fork").Process(target=_run_here, args=(command[1:], cache))
    process.start()
    process.join()
    if process.exitcode:
        raise RuntimeError(f"{' '.join(command[1:4])} ended with {process.exitcode}")


def _run_here(arguments: list[str], cache: str) -> None:
    os.environ["XDG_CACHE_HOME"] = cache
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        runpy.run_path(arguments[0], run_name="__main__")


BENCHMARKS: dict[str, Small] = {
    "attacks": (
        "--seeds 0 --sites 4 --methods fedavg-fixmatch --settings uneven --attacks none --out {out}/attacks && "
        "--search --tries 9 --seeds 0 --sites 5 --methods fedavg-fixmatch --settings uneven --rules cosine-trimmed "
        "--out {out}/search",
        {"ROUNDS": 1},
    ),
    "cluster": ("clients --data-dir {data} --clients 4 --rounds 1", {}),
    "damaged_federations": ("--trials 1", {}),
    "dicom_files": ("--files 20", {}),
    "executors": (
        "vmap --clients 4 --group-sizes 2 --turns 1 --networks small:8:8:1 && "
        "padding --methods fedavg --rules large --cohorts 2 --turns 1 && "
        "workers --cohort 2 --steps 1 --turns 1 --cores 2 && device --device cpu --rounds 2 --no-ceilings",
        {
            "VMAP_ROUNDS": (("fedavg-fixmatch", 10),),
            "DEVICE_NETWORKS": {"small, width 16": ("small", 4), "ResNet-9, width 64": None},
            "DEVICE_METHODS": {"fedavg-fixmatch": None, "feddure": None},
            "DEVICE_EXECUTORS": ("loop",),
            "IMAGES_PER_CLIENT": 20,
        },
    ),
    "faults": ("--minutes 0", {"KINDS": dict.fromkeys(SIMILAR_FAULTS)}),
    "features": (
        "{data} --images 40 --turns 1",
        {
            "METHODS": ("fedavg",),
            "SHARE": 0.05,
            "CLIENTS": 2,
            "ROUNDS": 1,
            "ROWS": ("mixture-head",),
            "COMMON": {"clients": 2, "cohort": 2},
            "FILL": {"resize": 32, "labels": 20},
            "run_command": run_forked,
        },
    ),
    "federation_attacks": ("--only undisturbed --out {out}/attacks", {}),
    "federation_cost": (
        "--rounds 1 --steps 1 --out {out}/cost",
        {
            "MODELS": {"small, width 16": ("small", 4), "ResNet-9, width 16": None},
            "SITES": 1,
            "WAYS": {"halfmoon, real processes": None},  # federation_link.py runs these
        },
    ),
    "federation_faults": ("--only undisturbed --out {out}/faults", {"OPTIONS": {"steps": 2}}),
    "federation_link": (
        "--only slow --out {out}/link && --records {benchmarks}/../results/federation_link.json --out {out}/again",
        {
            "federation_cost.SITES": 1,
            "SLOW": {"small, 20 steps": ("small", 4, 1, 2, True), "ResNet-9, 20 steps": None},
        },
    ),
    "federation_parity": ("--methods semifl --ways simulator --rounds 1 --out {out}/parity", {}),
    "fuzz": ("--cases 5 --seconds 3 --only toml --out {out}/fuzz --findings {out}/findings", {}),
    "hostile_site": (
        "--rounds 1 --only hostile --out {out}/hostile",
        {"SITES": TWO_SITES, "EXPORT": export_command(2)},
    ),
    "hostile_sums": ("--seeds 0 --labels 50 --out {out}/sums", {"METHODS": {"mixture-head": None}, "SHARE": 0.1}),
    "leakage": (
        "--trials 1 --out {out}/leakage.md",
        {"STEPS": 2, "ATTEMPTS": 2, "ROUNDS": (0,), "METHODS": ("feddure",), "BASE": {"data_share": 0.2, "width": 4}},
    ),
    "peers": ("--only plain halfmoon --cohorts 2 --sizes tiny --turns 1 --folder {out}/environments", {"STARTS": 1}),
    "photographs": ("{data}/photographs --plain", {"LABELS_PER_CLASS": 3}),
    "resources": (
        "start --turns 1 && images 6000 --side 8 --folder {out} && model --width 8 --turns 1 --rounds 2 --methods fedavg && "
        "phases --data-dir {data} --rounds 2 --labels-per-class 0.5 && "
        "page --side 256 --kinds turned-rgba-tiff dicom-jpeg2000",
        {
            "REQUESTS": 4,
            "START_PROGRAMS": dict.fromkeys(("import torch", "halfmoon --help", "halfmoon.run(), first step")),
        },
    ),
    "scale": (
        "uploads --cohort 2 && dirichlet --clients 5 --images 100 && "
        "store --clients 8 --width 4 --cap-mib 1 --cohort 2 --rounds 1",
        {},
    ),
    "secure_sums": ("--sites 3 --parameters 1000 --out {out}/sums", {}),
    "server_attacks": ("half-open --connections 5 --seconds 1 && foreign-app", {"MOMENTS": ("after the run",)}),
    "site_opening": ("--images 20 --side 8", {}),
    "soak": (
        "--minutes 0 --rounds 2 --seconds 1 --out {out}/soak",
        {
            "SAMPLE": 0.2,
            "SITES": ONE_SITE,
            "SLOW": ONE_SITE[0],
            "EXPORT": export_command(1),
            "RULES": {"min_replies": 1},
        },
    ),
    "steps": (
        "feddure --width 4 --seconds 0 --unlabeled 10 && feddure --operators --width 4 --unlabeled 10 && "
        "large --width 4 --turns 1 --methods fedavg-fixmatch && adam --clients 2 --turns 1 && strong-view --rounds 1",
        {},
    ),
}

RESULTS: dict[str, Small] = {
    "calibration": ("{data}/pneumonia_mnist {run}", {}),
    "convergence": (
        "--out {out}/convergence",
        {
            "HORIZONS": (1, 2, 3),
            "SEEDS": (0, 1),
            "MEASUREMENTS": 1,
            "FEDERATION": {"clients": 2, "cohort": 2, "width": 2},
        },
    ),
    "interval_coverage": ("--trials 2 --out {out}/coverage.md", {"SPLITS": (3,), "IMAGES": (20,)}),
    "finetuning": (
        "{data} {out} {out}/finetuning",
        {
            "SEEDS": (0, 1),
            "RATES": (8e-3,),
            "PRETRAINING": {"rounds": 1, "steps": 1, "width": 4},
            "TRAINING": {"rounds": 1, "steps": 1, "clients": 2, "cohort": 2, "width": 4},
            "ROWS": {"given weights, all trained": None, "given weights, backbone at a tenth of the rate": None},
        },
    ),
    "heads": ("{data} --images 60 --tests 20 --seeds 0 1 --sets pneumonia_mnist", {"LABELS": (3,)}),
    "label_choice": (
        "--out {out}/choice",
        {"SEEDS": (0, 1), "ROUNDS": 2, "CROSS_VALIDATED": (), "POOL": 45, "TESTS": 12},
    ),
    "precision": (
        "training --rounds 1 --seeds 0 && uploads --rounds 1 --seeds 40",
        {"METHODS": {"fedavg-fixmatch": None, "fedavg-soft-labels": None}, "UPLOADS": {"float16": None}},
    ),
    "privacy": (
        "accuracy --data-dir {data} --records {out}/privacy.jsonl && accountants",
        {
            "METHODS": ("fedavg",),
            "COMMON": {"rounds": 1, "clients": 10, "cohort": 5, "steps": 1},
            "PLANS": ((10, 10, 8.0),),
            "ROUNDS": (1,),
        },
    ),
    "robust": (
        "attacks --data-dir {data} --records {out}/robust.jsonl && false-counts --seeds 0 --out {out}/counts.md",
        {
            "METHODS": ("fedavg-fixmatch",),
            "RULES": ("median",),
            "SHARES": (0.2,),
            "COMMON": {"rounds": 1, "steps": 1, "labels_per_class": 2.0},
            "COUNT_ATTACKS": ("none", "false-counts"),
            "COUNT_OPTIONS": {"rounds": 1, "steps": 1},
        },
    ),
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
    "feddure_table2": ("run --seeds 99 --rounds 1 --sets digits-even --rows control random --runs {out}", {}),
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
    "scratch_trial": (
        "--data-dir {data} --runs {out}/scratch --out {out}/scratch.csv --sets digits --labels 2 --draws 0",
        {
            "IMAGES": {"digits": 60},
            "TESTS": 20,
            "halfmoon.studies.scratch_trial.MIN_ROUNDS": 1,
            "halfmoon.studies.scratch_trial.MAX_ROUNDS": 1,
            "halfmoon.studies.scratch_trial.FOLDS": 2,
            "halfmoon.studies.folds.FOLDS": 2,
            "halfmoon.studies.folds.REPEATS": 1,
        },
    ),
    "own_images": ("--data-dir {data} --out {out}/photos --images 20", {}),
    "collect": ("smoke {run}", {}),
}
"""Scripts of results/, which run in a copy of that folder."""

REPORTING = ("choosing", "equal_trials", "evidence", "feddure_budget", "feddure_trials", "labels_curve")
"""Scripts of results/ whose `report` runs as well: it needs only the records, which a run appends to."""


def write_idx(path: Path, values: np.ndarray) -> None:
    """Write a file in the format of Fashion-MNIST."""
    head = struct.pack(">HBB", 0, 8, values.ndim) + struct.pack(f">{values.ndim}I", *values.shape)
    path.write_bytes(gzip.compress(head + values.astype(np.uint8).tobytes(), 1))


def write_parquet(path: Path, images: np.ndarray, labels: np.ndarray) -> None:
    """Write PNG images (N, H, W[, 3]) with their labels as the Hugging Face hub does."""
    files = [io.BytesIO() for _ in images]
    for file, pixels in zip(files, images, strict=True):
        Image.fromarray(pixels).save(file, "PNG")
    rows = [{"bytes": file.getvalue(), "path": None} for file in files]
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    pq.write_table(pa.table({"image": pa.array(rows, kind), "label": pa.array(labels, pa.int64())}), path)


def write_data_sets(folder: Path) -> None:
    """Write random images: 2,400 + 100 of ten classes, 600 + 60 + 60 of two, 400 + 50 in color."""
    generator = np.random.default_rng(0)
    for name in ("fashion_mnist", "pneumonia_mnist", "cifar10"):
        (folder / name).mkdir(parents=True)
    for subset, count in (("train", 2400), ("t10k", 100)):
        write_idx(folder / f"fashion_mnist/{subset}-images-idx3-ubyte.gz", generator.integers(0, 256, (count, 28, 28)))
        write_idx(folder / f"fashion_mnist/{subset}-labels-idx1-ubyte.gz", np.arange(count) % 10)
    for subset, count in (("train", 600), ("validation", 60), ("test", 60)):
        pixels = generator.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        write_parquet(folder / f"pneumonia_mnist/{subset}.parquet", pixels, np.arange(count) % 2)
    for subset, count in (("train-00000-of-00001", 400), ("test", 50)):
        pixels = generator.integers(0, 256, (count, 32, 32, 3), dtype=np.uint8)
        write_parquet(folder / f"cifar10/{subset}.parquet", pixels, np.arange(count) % 10)


def write_photographs(folder: Path) -> None:
    """Write five random JPEG images of each of two classes."""
    generator = np.random.default_rng(0)
    for name in ("cat", "dog"):
        (folder / name).mkdir(parents=True)
        for number in range(5):
            pixels = generator.integers(0, 256, (32, 32, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{number}.jpg")


def write_run(folder: Path) -> None:
    """Run, so that there is a run folder for scripts that read one."""
    import halfmoon

    data = folder.parent / "data" / "pneumonia_mnist"
    options = {
        "network": "small", "method": "fedavg", "rounds": 1, "validation_share": 0.2, "clients": 5, "setting": "iid-iid",
        "labels_per_class": 5.0,
    }  # fmt: skip
    halfmoon.run(halfmoon.Config.of(data=str(data), run_dir=folder, **options))


def reduce_constant(value: Any, small: Any) -> Any:
    """Return the small version of a constant.

    Args:
        value: the constant.
        small: for a dict the changed values, None to remove a key; for a list its new length; else the new value.
    """
    if isinstance(value, dict):
        rest = {key: item for key, item in value.items() if small.get(key, item) is not None}
        changed = {
            key: reduce_constant(rest[key], item) if key in rest else item
            for key, item in small.items()
            if item is not None
        }
        return {**rest, **changed}
    return value[:small] if isinstance(value, list) else small


class FinishedProcess:
    """A process that has finished."""

    def poll(self) -> int:
        return 0

    def wait(self, *_: Any) -> int:
        return 0

    def kill(self) -> None:
        """Do nothing."""

    terminate = kill
    send_signal = wait


def rehearse(fed: Any, process_name: str, *arguments: str, **_: str) -> None:
    """Run the federation in this process when its server is started; the command of a site does nothing."""
    from halfmoon.federation.transport import local

    fed.running[process_name] = FinishedProcess()
    if process_name == "serve":
        file = Path(arguments[1]) if arguments else fed.folder / "sites" / "federation.toml"
        if getattr(fed, "spoil", ""):
            os.environ["MISBEHAVE"] = fed.spoil
            runpy.run_path(str(ROOT / "benchmarks" / "misbehaving" / "sitecustomize.py"))["spoil_answers"]()
        local.rehearse(file, fed.run, file.parent)


def rehearse_command(fed: Any, process_name: str, arguments: list[str], environment: dict[str, str]) -> Any:
    """Rehearse the federation of a command of `AttackedFederation`, with its arguments in a list."""
    rehearse(fed, process_name, *arguments)
    return fed.running[process_name]


def run_script(script_folder: str, name: str, arguments: list[str], constants: dict[str, Any], out: str) -> None:
    """Run a script in this process: as on the command line, or its `main` with other constants."""
    with open(f"{out}/output", "w") as output:
        for stream in (1, 2):
            os.dup2(output.fileno(), stream)
    os.chdir(out)
    path = Path(script_folder, f"{name}.py")
    sys.path[:] = [script_folder, *(each for each in sys.path if Path(each) != ROOT / "benchmarks")]
    sys.argv = [str(path), *arguments]
    try:
        if constants or name in REHEARSED:
            script = importlib.import_module(name)
            for dotted, small in constants.items():
                module_name, _, key = dotted.rpartition(".")
                module = importlib.import_module(module_name or name)
                setattr(module, key, reduce_constant(getattr(module, key), small))
            if name in REHEARSED:
                module_name, key, method = REHEARSED[name]
                rehearsal = rehearse_command if method == "start_command" else rehearse
                setattr(getattr(importlib.import_module(module_name), key), method, rehearsal)
            script.main()
        else:
            runpy.run_path(str(path), run_name="__main__")
    finally:
        atexit._run_exitfuncs()  # a process of multiprocessing does not call them
        Path(out, "seconds").write_text(str(sum(os.times()[:4])))


def start_script(name: str, folder: Path) -> tuple[float, float, str]:
    """Run a script in a new folder and process.

    The process is forked from one that has imported `SHARED`, because importing PyTorch in each would take minutes.

    Returns:
        Seconds of the clock and of the processor, and the end of its output if it failed.
    """
    is_benchmark = name in BENCHMARKS
    command_lines, constants = BENCHMARKS[name] if is_benchmark else RESULTS[name]
    out = folder / name
    out.mkdir()
    paths = {"out": out, "data": folder / "data", "run": folder / "run", "benchmarks": ROOT / "benchmarks"}
    script_folder = ROOT / "benchmarks" if is_benchmark else Path(shutil.copytree(ROOT / "results", out / "results"))
    if not is_benchmark:  # a report writes tables into pages
        shutil.copytree(ROOT / "docs", out / "docs")
        shutil.copy(ROOT / "README.md", out)
    start = time.perf_counter()
    processor = 0.0
    lines = command_lines.split(" && ") + ["report"] * (name in REPORTING)
    for line in lines:
        arguments = (str(script_folder), name, line.format(**paths).split(), constants, str(out))
        process = SERVER.Process(target=run_script, args=arguments)
        process.start()
        process.join(TIMEOUT)
        if process.exitcode is None:
            process.kill()
            return time.perf_counter() - start, processor, f"did not end within {TIMEOUT} seconds"
        if process.exitcode:
            message = "\n".join((out / "output").read_text().splitlines()[-12:])
            return time.perf_counter() - start, processor, message
        processor += float((out / "seconds").read_text())
    return time.perf_counter() - start, processor, ""


def main() -> None:
    """Run all scripts, some at a time; exit with 1 if one fails or is not listed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", default=[*BENCHMARKS, *RESULTS])
    parser.add_argument("--jobs", type=int, default=4, help="scripts at a time; many mostly wait (default: 4)")
    options = parser.parse_args()
    scripts = {path.stem for each in ("benchmarks", "results") for path in (ROOT / each).glob("*.py")}
    missing = sorted(scripts - {*BENCHMARKS, *RESULTS, *IMPORTED})
    failures = dict.fromkeys(missing, "is not in BENCHMARKS or RESULTS of benchmarks/smoke.py")
    with tempfile.TemporaryDirectory(prefix="halfmoon-smoke-") as temporary:
        folder = Path(temporary)
        os.environ["OMP_NUM_THREADS"] = "1"
        SERVER.set_forkserver_preload(SHARED)
        write_data_sets(folder / "data")
        write_photographs(folder / "data" / "photographs")
        first = SERVER.Process(target=write_run, args=(folder / "run",))
        first.start()
        first.join()
        with ThreadPoolExecutor(options.jobs) as pool:
            names = sorted(options.only, key=lambda name: name not in LONGEST)
            outcomes = pool.map(lambda name: (name, *start_script(name, folder)), names)
            total = 0.0
            for name, seconds, processor, message in outcomes:
                result = "failed" if message else "ok"
                print(f"{name:20} {seconds:6.1f} s, processor {processor:5.1f} s  {result}", flush=True)
                total += processor
                if message:
                    failures[name] = message
            print(f"{len(names)} scripts, {total:.0f} s of the processor")
    for name, message in failures.items():
        print(f"\n{name}: {message}")
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
