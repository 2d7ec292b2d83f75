"""Measure the time and memory of whole processes: start, large data sets, large models, and the labeling page.

    python benchmarks/resources.py start [--against FOLDER] [--turns 5]
    python benchmarks/resources.py phases --data-dir DATA [--rounds 40] [--shrink 2] [--labels-per-class 2]
    python benchmarks/resources.py images COUNT [--side 64] [--folder FOLDER]
    python benchmarks/resources.py model [--width 120] [--turns 2] [--rounds 5] [--methods fedavg fedavg-fixmatch]
                                         [--statistics joint separate]
    python benchmarks/resources.py page [--side 8192] [--kinds KIND ...]

start: the time until PyTorch and halfmoon are imported, until `halfmoon --help` has ended, and until `halfmoon run` and
`halfmoon.run` in Python take their first step on digits. Seconds of the processor and of the clock, medians over turns; with
`--against` another checkout takes turns, and the medians of the ratios within a turn are printed.

phases: the processor time of loading and evaluation in a short run on CIFAR-10, twice: first with an empty cache of decoded
images, then with it. The run is FedAvg + FixMatch like that of the scale "small" of `halfmoon sweep feddure-table1`, but it
chooses the rounds that are evaluated. Loading includes the test images and the split, but no imports; evaluation includes
that of training images for the model's bias.

images: the start of a run on many images, the first time and from the cache. Writes a parquet data set of COUNT random PNG
images of SIDE x SIDE RGB into FOLDER (a temporary one), then runs `halfmoon run` twice with one round of two clients of
1,000. Prints the seconds until the run has ended, the processor's share of them (the rest is waiting for the disk or for
other programs), and the peak resident memory, of which the system can reclaim mapped pages ("anonymous" it cannot).

model: the memory and the processor time of a model of 23 million parameters against a plain PyTorch loop, and the size of
the run folder. ResNet-9 on digits, padded to 16x16: rounds of 2 clients, 3 steps each, Adam. Both are separate processes,
in turns; peak resident memory and processor time are those of `os.wait4`. The time of a round is that of a run of
`--rounds` rounds minus that of a run of one round, over the rounds between, so that it includes neither imports nor the one
evaluation after the last round. The plain loop has a global and a local network, gradients and Adam, a sum of the updates,
and a `torch.save` of the model each round; its unlabeled images are the same digits with noise. It passes the same groups of
images through the network as halfmoon: with FixMatch and `joint` statistics labeled, weak and strong images together, with
`separate` statistics each group by itself, the weak images without gradients. FedAvg has one group of images.

page: the labeling page under 40 concurrent requests for one large image of random blocks, every other one for its preview.
The peak is that of the process of `halfmoon site label` (VmHWM of /proc, MB).
"""

import argparse
import io
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

ROOT = Path(__file__).resolve().parents[1]

# start

EXIT_AT_FIRST_STEP = """\
import importlib.machinery, os, sys
class Finder(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name != "halfmoon.core.autodiff":
            return None
        spec = super().find_spec(name, path, target)
        execute = spec.loader.exec_module
        def exec_module(module):
            execute(module)
            module.grad_and_value = lambda *_, **__: os._exit(17)
        spec.loader.exec_module = exec_module
        return spec
sys.meta_path.insert(0, Finder)
"""
"""Code after which a process exits with code 17 at the first gradient."""

RUN_COMMAND = """\
from halfmoon.cli.main import main
sys.exit(main(["run", "--method", "fedavg-fixmatch", "--rounds", "1", "--run-dir", "{folder}/run"]))
"""
START_PROGRAMS = {
    "import torch": ("import torch", 0),
    "import halfmoon": ("import halfmoon", 0),
    "halfmoon --help": ('import sys\nfrom halfmoon.cli.main import main\nsys.exit(main(["--help"]))', 0),
    "halfmoon run, first step": (EXIT_AT_FIRST_STEP + RUN_COMMAND, 17),
    "halfmoon.run(), first step": (
        EXIT_AT_FIRST_STEP + "import halfmoon\n"
        'halfmoon.run(method="fedavg-fixmatch", rounds=1, run_dir="{folder}/run")',
        17,
    ),
}
"""Programs, in which {folder} is a temporary folder, and their exit codes."""


def time_program(checkout: Path, program: str, exit_code: int) -> tuple[float, float]:
    """Run a program with the halfmoon of a checkout; return the seconds of the processor and of the clock."""
    with tempfile.TemporaryDirectory() as folder:
        program = program.replace("{folder}", folder)
        environment = {**os.environ, "PYTHONPATH": str(checkout / "src"), "OMP_NUM_THREADS": "1"}
        start = time.perf_counter()
        with Path(folder, "output").open("w") as file:
            process = subprocess.Popen([sys.executable, "-c", program], stdout=file, stderr=file, env=environment)
            _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode != exit_code:
            sys.exit(Path(folder, "output").read_text())
        return usage.ru_utime + usage.ru_stime, time.perf_counter() - start


def measure_start(options: argparse.Namespace) -> None:
    """Print the times of both commands."""
    checkouts = [ROOT, *([] if options.against is None else [options.against])]
    print("| | processor, s | wall clock, s | the other's processor, s | ratio |\n|---|---|---|---|---|")
    for name, (program, exit_code) in START_PROGRAMS.items():
        turns = [[time_program(each, program, exit_code) for each in checkouts] for _ in range(options.turns)]
        this = [turn[0] for turn in turns]
        cells = [f"{statistics.median(seconds[k] for seconds in this):.2f}" for k in (0, 1)]
        if len(checkouts) > 1:
            other = [turn[1] for turn in turns]
            ratio = statistics.median(a[0] / b[0] for a, b in zip(this, other, strict=True))
            cells += [f"{statistics.median(seconds[0] for seconds in other):.2f}", f"{ratio:.2f}"]
        else:
            cells += ["", ""]
        print(f"| {name} | {' | '.join(cells)} |")


# phases

TIMED_RUN = """\
import json, sys, time
from halfmoon.cli.main import main
from halfmoon.engine.loop import _Run
from halfmoon.runs import factory

seconds = {"loading": 0.0, "evaluation": 0.0}

def time_calls(owner, name, phase):
    function = getattr(owner, name)
    def timed(*arguments, **options):
        start = time.process_time()
        try:
            return function(*arguments, **options)
        finally:
            seconds[phase] += time.process_time() - start
    setattr(owner, name, timed)

time_calls(factory, "build_problem", "loading")
time_calls(_Run, "evaluate", "evaluation")
code = main(sys.argv[1:])
print(json.dumps({**seconds, "all": time.process_time()}))
sys.exit(code)
"""
"""A program that runs a command and prints the processor seconds of its phases in the last line."""


def measure_phases(options: argparse.Namespace) -> None:
    """Print a row for the first and for the second start."""
    print("| start | all, s | loading, s | evaluation, s | loading and evaluation, share |\n|---|--:|--:|--:|--:|")
    with tempfile.TemporaryDirectory() as name:
        for start in ("first", "second"):
            arguments = {
                "data": "cifar10", "data-dir": options.data_dir, "method": "fedavg-fixmatch", "setting": "dir-dir",
                "network": "small", "width": 16, "shrink": options.shrink, "clients": 20, "cohort": 5,
                "labels-per-class": options.labels_per_class, "rounds": options.rounds, "steps": 20, "unlabeled-batch": 50,
                "threads": 1, "device": "cpu", "lr": 1e-3, "workers": 1,
                "cache": Path(name, "cache"), "run-dir": Path(name, start),
            }  # fmt: skip
            flags = [flag for key, value in arguments.items() for flag in (f"--{key}", str(value))]
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            command = [sys.executable, "-c", TIMED_RUN, "run", *flags]
            done = subprocess.run(command, capture_output=True, text=True, env=environment)
            if done.returncode:
                sys.exit(done.stdout + done.stderr)
            seconds = json.loads(done.stdout.splitlines()[-1])
            loading = seconds["loading"]
            evaluation = seconds["evaluation"]
            share = (loading + evaluation) / seconds["all"]
            print(f"| {start} | {seconds['all']:.1f} | {loading:.1f} | {evaluation:.1f} | {share:.0%} |", flush=True)


# images

ROWS_PER_FILE = 50_000


def write_data_set(folder: Path, count: int, side: int) -> None:
    """Write a data set of 64 different images, repeated, so that only decoding takes long."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    from PIL import Image

    generator = np.random.default_rng(0)
    encoded = []
    for _ in range(64):
        file = io.BytesIO()
        pixels = generator.integers(0, 256, (side // 8, side // 8, 3), np.uint8)
        Image.fromarray(pixels).resize((side, side)).save(file, "PNG")
        encoded.append(file.getvalue())
    folder.mkdir(parents=True)
    files = -(-count // ROWS_PER_FILE)
    names = [(f"train-{n:05d}-of-{files:05d}", ROWS_PER_FILE) for n in range(files)]
    for name, rows in (*names, ("test", 1000)):
        rows = min(rows, count)
        table = {"image": [{"bytes": encoded[k % 64]} for k in range(rows)], "label": [k % 10 for k in range(rows)]}
        pq.write_table(pa.table(table), folder / f"{name}.parquet")


def watch_memory(process: subprocess.Popen) -> tuple[int, int]:
    """Return the peaks of a process' resident and anonymous memory in bytes, when it has ended."""
    resident = anonymous = 0
    while process.poll() is None:
        try:
            status = Path(f"/proc/{process.pid}/status").read_text()
        except OSError:
            break
        sizes = {
            line.split(":")[0]: int(line.split()[1]) * 1024 for line in status.splitlines() if "rss" in line.lower()
        }
        resident = max(resident, sizes.get("VmRSS", 0))
        anonymous = max(anonymous, sizes.get("RssAnon", 0))
        time.sleep(0.05)
    return resident, anonymous


def run_on_images(folder: Path, run: Path) -> dict[str, float]:
    """Run one round in a separate process; return seconds and megabytes."""
    arguments = [
        *("run", "--method", "fedavg-fixmatch", "--data", str(folder), "--cache", str(folder.parent / "cache")),
        *("--network", "small", "--clients", "1000", "--cohort", "2", "--rounds", "1", "--steps", "5"),
        *("--setting", "iid-iid", "--run-dir", str(run)),
    ]
    command = [sys.executable, "-m", "halfmoon", *arguments]
    start = time.perf_counter()
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    peaks: list[tuple[int, int]] = []
    watcher = threading.Thread(target=lambda: peaks.append(watch_memory(process)))
    watcher.start()
    _, errors = process.communicate()
    watcher.join()
    if process.returncode:
        sys.exit(errors.decode())
    resident, anonymous = peaks[0]
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {
        "seconds": round(time.perf_counter() - start, 1),
        "processor_seconds": round(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, 1),
        "resident_mb": resident // 10**6,
        "anonymous_mb": anonymous // 10**6,
    }


def measure_images(options: argparse.Namespace) -> None:
    """Write the data set, run twice, and print the figures."""
    count = options.count
    side = options.side
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name) / "set"
        write_data_set(folder, count, side)
        rows = {start: run_on_images(folder, Path(name) / start) for start in ("first", "cached")}
    print(json.dumps({"images": count, "side": side, "decoded_mb": count * side * side * 3 // 10**6, **rows}, indent=1))


# model

LABELED = 10
UNLABELED = 30
STEPS = 3
CLIENTS = 2


class ProcessCost(NamedTuple):
    """Peak resident memory in MB, processor seconds, and MB of the files that a process left."""

    memory: float
    seconds: float
    files: float


def run_plain_loop(method: str, statistics: str, width: int, rounds: int, folder: Path) -> None:
    """Train in a plain loop, with the `torch.nn` network of the tests."""
    sys.path.insert(0, str(ROOT / "tests/support"))
    import copy

    import torch
    import torch.nn.functional as F
    from torch_models import TorchResNet9

    torch.set_num_threads(1)
    torch.manual_seed(0)
    digits = np.load(ROOT / "src/halfmoon/data/digits.npz")
    images = F.pad(torch.from_numpy(digits["images"]).reshape(-1, 1, 8, 8).float() / 16, (4,) * 4)
    labels = torch.from_numpy(digits["labels"]).long()
    model = TorchResNet9(1, 10, width)
    local = copy.deepcopy(model)
    for _ in range(rounds):
        total: dict[str, torch.Tensor] = {}
        for _ in range(CLIENTS):
            local.load_state_dict(model.state_dict())
            local.train()
            optimizer = torch.optim.Adam(local.parameters(), 1e-3)
            for _ in range(STEPS):
                rows = torch.randint(0, len(labels), (LABELED,))
                x = images[rows]
                optimizer.zero_grad()
                if method == "fedavg":
                    loss = F.cross_entropy(local(x), labels[rows])
                else:
                    u = images[torch.randint(0, len(labels), (UNLABELED,))]
                    changed = u + 0.1 * torch.randn_like(u)
                    if statistics == "joint":
                        labeled, weak, strong = local(torch.cat([x, u, changed])).split([LABELED, UNLABELED, UNLABELED])
                    else:
                        with torch.no_grad():
                            weak = local(u)
                        labeled = local(x)
                        strong = local(changed)
                    confidence, pseudo = weak.detach().softmax(1).max(1)
                    loss = F.cross_entropy(labeled, labels[rows])
                    loss = loss + ((confidence > 0.95) * F.cross_entropy(strong, pseudo, reduction="none")).mean()
                loss.backward()
                optimizer.step()
            for name, leaf in local.state_dict().items():
                total[name] = total[name].add_(leaf) if name in total else leaf.clone()
            del optimizer, loss
            local.zero_grad(set_to_none=True)
        model.load_state_dict({name: leaf / CLIENTS for name, leaf in total.items()})
        torch.save(model.state_dict(), folder / "model.pt")
    model.eval()
    with torch.no_grad():
        predicted = torch.cat([model(batch).argmax(1) for batch in images[-360:].split(120)])
        print((predicted == labels[-360:]).float().mean().item())


def halfmoon_command(method: str, statistics: str, width: int, rounds: int, folder: Path) -> list[str]:
    """Return the command of the same training with halfmoon."""
    arguments = {
        "method": method, "network": "resnet9", "width": width, "clients": CLIENTS, "cohort": CLIENTS, "rounds": rounds,
        "steps": STEPS, "threads": 1, "device": "cpu", "labeled-batch": LABELED, "unlabeled-batch": UNLABELED,
        "statistics": statistics, "evaluate-every": rounds, "run-dir": folder / "run",
    }  # fmt: skip
    flags = [flag for name, value in arguments.items() for flag in (f"--{name}", str(value))]
    return [sys.executable, "-m", "halfmoon", "run", *flags]


def run_process(command: list[str], folder: Path) -> ProcessCost:
    """Run a command that leaves its files in a folder; exit with its output if it fails."""
    with (folder / "output").open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env={**os.environ, "OMP_NUM_THREADS": "1"})
        _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit((folder / "output").read_text())
    files = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    return ProcessCost(usage.ru_maxrss * 1024 / 1e6, usage.ru_utime + usage.ru_stime, files / 1e6)


def run_both(method: str, statistics: str, width: int, rounds: int) -> tuple[ProcessCost, ProcessCost]:
    """Run the plain loop and halfmoon, one after the other, in new folders."""
    with tempfile.TemporaryDirectory() as name:
        plain = Path(name, "plain")
        run = Path(name, "halfmoon")
        plain.mkdir()
        run.mkdir()
        command = [sys.executable, __file__, "model", "--plain", str(plain), "--methods", method]
        command += ["--statistics", statistics, "--width", str(width), "--rounds", str(rounds)]
        return run_process(command, plain), run_process(halfmoon_command(method, statistics, width, rounds, run), run)


def measure_model(options: argparse.Namespace) -> None:
    """Print the table of both loops."""
    if options.plain:
        run_plain_loop(options.methods[0], options.statistics[0], options.width, options.rounds, options.plain)
        return
    print("| method | statistics | plain, MB | halfmoon, MB | ratio ", end="")
    print("| plain, s a round | halfmoon, s a round | ratio | run folder, MB |\n|---|---|" + "---|" * 7)
    # With one group of images a step, both statistics are the same.
    cases = [(method, each) for method in options.methods for each in options.statistics]
    cases = [(method, each) for method, each in cases if method != "fedavg" or each == options.statistics[0]]
    for method, statistics_rule in cases:
        memory: list[tuple[float, float]] = []
        seconds: list[tuple[float, float]] = []
        files: list[float] = []
        for _ in range(options.turns):
            plain_first, first = run_both(method, statistics_rule, options.width, 1)
            plain, run = run_both(method, statistics_rule, options.width, options.rounds)
            memory.append((plain.memory, run.memory))
            between = options.rounds - 1
            seconds.append(((plain.seconds - plain_first.seconds) / between, (run.seconds - first.seconds) / between))
            files.append(run.files)
        cells: list[str] = []
        for pairs, form in ((memory, ",.0f"), (seconds, ".2f")):
            cells += [format(statistics.median(values), form) for values in zip(*pairs, strict=True)]
            cells.append(f"{statistics.median(mine / theirs for theirs, mine in pairs):.2f}")
        print(f"| {method} | {statistics_rule} | {' | '.join(cells)} | {statistics.median(files):,.0f} |", flush=True)


# page

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
"""Mode, suffix and options of Pillow; "turned" images have EXIF orientation 6."""

MAX_SIDES = {"rgb-webp": 5152, "dicom-rgb": 7712, "dicom-jpeg2000": 5152, "dicom-ybr": 3840, "dicom-rgb-jpeg2000": 3840}
"""The largest sides that the page shows of these kinds."""


def write_image(side: int, kind: str, folder: Path) -> None:
    """Write a square image of random blocks."""
    from PIL import Image

    mode, suffix, options = KINDS[kind]
    bands = {"I;16": 1, "F": 1, "P": 1}.get(mode) or len(Image.new(mode, (1, 1)).getbands())
    blocks = np.random.default_rng(0).integers(0, 256, (side // 32, side // 32, bands), np.uint8)
    pixels = np.kron(blocks, np.ones((32, 32, 1), np.uint8)).squeeze()
    if mode == "I;16":
        pixels = pixels.astype(np.uint16) * 257
    elif mode == "F":
        pixels = pixels.astype(np.float32)
    if suffix == "dcm":
        write_dicom(pixels, kind, folder / "a.dcm")
        return
    exif = Image.Exif()
    exif[0x0112] = 6 if "turned" in kind else 1
    image = Image.fromarray(pixels, mode) if mode in ("CMYK", "P") else Image.fromarray(pixels)
    image.save(folder / f"a.{suffix}", exif=exif, **({"compress_level": 1} if suffix == "png" else {}), **options)


def write_dicom(pixels: np.ndarray, kind: str, path: Path) -> None:
    """Write pixels as a DICOM file."""
    import pydicom
    from pydicom import uid

    file = pydicom.Dataset()
    file.SOPClassUID = uid.SecondaryCaptureImageStorage
    file.SOPInstanceUID = uid.generate_uid()
    file.ensure_file_meta()
    file.file_meta.TransferSyntaxUID = uid.ExplicitVRLittleEndian
    color_space = "YBR_FULL" if kind == "dicom-ybr" else "RGB"
    file.set_pixel_data(pixels, color_space if pixels.ndim == 3 else "MONOCHROME2", 8 * pixels.itemsize)
    if "jpeg2000" in kind:
        file.compress(uid.JPEG2000Lossless)
    file.save_as(path, enforce_file_format=True)


def measure_requests(folder: Path) -> dict[str, Any]:
    """Return the peak in MB, its distance from the peak before the requests, and the number of successful replies."""
    command = [sys.executable, "-m", "halfmoon", "site", "label", str(folder), "--classes", "a", "b", "--no-browser"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as page:
        assert page.stdout is not None, "it is a pipe"
        address = next(word for line in page.stdout for word in line.split() if word.startswith("http://"))

        def request_image(number: int) -> int:
            return urllib.request.urlopen(f"{address}image/0?small={number % 2}", timeout=300).status

        def peak_memory() -> int:
            lines = Path(f"/proc/{page.pid}/status").read_text().splitlines()
            return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) // 1024

        urllib.request.urlopen(f"{address}start", timeout=60).read()
        before = peak_memory()
        start = time.monotonic()
        with ThreadPoolExecutor(REQUESTS) as threads:
            statuses = list(threads.map(request_image, range(REQUESTS)))
        figures = {"peak": peak_memory(), "above": peak_memory() - before, "answered": statuses.count(200)}
        page.terminate()
        return figures | {"seconds": round(time.monotonic() - start, 1)}


def measure_page(options: argparse.Namespace) -> None:
    """Print a line for each kind of image."""
    for kind in options.kinds:
        with tempfile.TemporaryDirectory() as folder:
            side = min(options.side, MAX_SIDES.get(kind, options.side))
            write_image(side, kind, Path(folder))
            print(json.dumps({"kind": kind, "side": side, **measure_requests(Path(folder))}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    start = commands.add_parser("start")
    start.set_defaults(measure=measure_start)
    start.add_argument("--against", type=Path, metavar="FOLDER", help="another checkout")
    start.add_argument("--turns", type=int, default=5)
    phases = commands.add_parser("phases")
    phases.set_defaults(measure=measure_phases)
    phases.add_argument("--data-dir", type=Path, required=True)
    phases.add_argument("--rounds", type=int, default=40)
    phases.add_argument("--shrink", type=int, default=2)
    phases.add_argument("--labels-per-class", type=float, default=2, help="of each client")
    images = commands.add_parser("images")
    images.set_defaults(measure=measure_images)
    images.add_argument("count", type=int)
    images.add_argument("--side", type=int, default=64)
    images.add_argument("--folder", type=Path)
    model = commands.add_parser("model")
    model.set_defaults(measure=measure_model)
    model.add_argument("--width", type=int, default=120)
    model.add_argument("--turns", type=int, default=2)
    model.add_argument("--rounds", type=int, default=5)
    model.add_argument("--methods", nargs="+", default=["fedavg", "fedavg-fixmatch"])
    model.add_argument("--statistics", nargs="+", choices=["joint", "separate"], default=["joint"])
    model.add_argument("--plain", type=Path, metavar="FOLDER", help="run the plain loop in this process")
    page = commands.add_parser("page")
    page.set_defaults(measure=measure_page)
    page.add_argument("--side", type=int, default=8192)
    page.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    options = parser.parse_args()
    options.measure(options)


if __name__ == "__main__":
    main()
