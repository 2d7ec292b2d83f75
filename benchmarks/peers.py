"""Time rounds of FedAvg and FixMatch against a plain PyTorch loop and against other libraries.

    python benchmarks/peers.py [--json] [--only plain halfmoon pfl flower] [--cohorts 5 20 100] [--sizes tiny large]
                               [--turns N] [--folder FOLDER] [--save FILE] [--picture FILE]

Two sizes: "tiny" is the digits' small network on 8x8 images, six steps on 10 labeled and 30 unlabeled images a client
(those of `halfmoon run`); "large" is ResNet-9 of width 16 on 32x32 images of noise, three steps on 10 + 10, in cohorts up to 20.
Every engine runs the same round: the same clients, images and views (drawn and computed by `halfmoon.data.views`, once
a client), the same numbers of steps and images, an average at the end. The engines:

    plain      `torch.nn` modules, `torch.optim.Adam` and a loop over clients and batches; the same layout and threads
    loop       halfmoon, client by client
    vmap       halfmoon, all clients in one vmapped program
    workers    halfmoon, clients in two worker processes (large only)
    pfl        pfl-research: its PyTorch model, simulated backend and federated averaging, on the plain loop's network
    flower     Flower's simulation on Ray with one actor: ServerApp, FedAvg and ClientApp, on the plain loop's network

This script installs pfl and Flower in separate environments below --folder, with this repository and its pinned
dependencies, and reuses environments that exist. The engines take turns, round by round, each on one thread, so a busy
machine slows all of them; a ratio is the median over turns of an engine's time over the plain loop's in the same turn.
Times are processor seconds, including those of an engine's processes; for `workers` they are wall clock seconds, over
the plain loop's. Start it on one processor (`taskset -c 0`), and for `workers` on two.

`--json` prints the ratios of halfmoon's default executor at cohort 5 as `fedavg_tiny`, `fixmatch_tiny`,
`fedavg_resnet9` and `fixmatch_resnet9`, all others under "ratios", and the processor seconds of a new process from
`import torch` to the end of one round of FedAvg as `startup_seconds`. `--save` adds the figures to a JSON file, and
`--picture` draws all figures of that file.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from support.rounds import METHODS, SIZES, build_plain_round, build_round, default_executor

from halfmoon.core.memory import retain_freed_memory
from halfmoon.engine.executors.processes import ProcessExecutor

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = {"pfl": "pfl[pytorch]==0.6.0", "flower": "flwr[simulation]>=1.41,<1.43"}
ENGINES = ("plain", "halfmoon", *PACKAGES)
TITLES = {"fedavg": "FedAvg", "fixmatch": "FixMatch", "tiny": "digits' network", "resnet9": "ResNet-9, width 16"}
LARGEST = {"tiny": 1000, "large": 20}  # a cohort of 100 large clients takes minutes a round
STARTS = 3
STARTUP = """
import tempfile, time
import torch
start = time.process_time(), time.perf_counter()
import halfmoon
with tempfile.TemporaryDirectory() as folder:
    halfmoon.run(halfmoon.Config(method="fedavg", rounds=1, run_dir=folder + "/run"))
print(time.process_time() - start[0], time.perf_counter() - start[1])
"""


class Spent(NamedTuple):
    """Seconds of a round."""

    cpu: float
    wall: float


TimedRound = Callable[[], Spent]


def time_round(run_round: Callable[[], object]) -> TimedRound:
    """Return a function that runs a round in this process and returns its seconds."""

    def run_timed() -> Spent:
        start = time.process_time(), time.perf_counter()
        run_round()
        return Spent(time.process_time() - start[0], time.perf_counter() - start[1])

    return run_timed


def prepare_environment(library: str, folder: Path) -> Path:
    """Return the Python of a library's environment below a folder; create and fill the environment if needed."""
    environment = folder / library
    python = environment / "bin" / "python"
    ready = environment / "ready"
    if not ready.exists():
        subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
        install = [str(python), "-m", "pip", "install", "--quiet", "-c", str(ROOT / "constraints.txt"), str(ROOT)]
        subprocess.run([*install, PACKAGES[library]], check=True)
        ready.touch()
    return python


@contextmanager
def start_library(python: Path, *arguments: str) -> Iterator[TimedRound]:
    """Start a process in another environment, and yield a function that makes it run a round."""
    paths = [str(ROOT / "src"), str(ROOT / "benchmarks"), str(ROOT / "tests" / "support")]
    quiet = {"FLWR_TELEMETRY_ENABLED": "0", "RAY_DEDUP_LOGS": "0", "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0"}
    env = {**os.environ, **quiet, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    command = [str(python), str(ROOT / "benchmarks" / "support" / "peer_library.py"), *arguments]
    log = open(f"{python.parents[1]}.log", "ab")  # noqa: SIM115 (closed below)
    process = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True)
    stdin = cast(Any, process.stdin)
    stdout = cast(Any, process.stdout)

    def run_timed() -> Spent:
        stdin.write("round\n")
        stdin.flush()
        reply = stdout.readline()
        if not reply:
            raise SystemExit(f"{arguments[0]} has ended; its output is in {log.name}")
        return Spent(**json.loads(reply))

    try:
        yield run_timed
    finally:
        stdin.close()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
        log.close()


def measure(engines: dict[str, TimedRound], turns: int) -> dict[str, dict[str, float]]:
    """Return the median milliseconds of each engine, and its median ratio to the plain loop.

    The first turn warms up and is not counted.
    """
    spent: dict[str, list[Spent]] = {name: [] for name in engines}
    for turn in range(turns + 1):
        for name, run_timed in engines.items():
            seconds = run_timed()
            if turn:
                spent[name].append(seconds)

    def summarize(name: str) -> dict[str, float]:
        rounds = spent[name]
        clock = "wall" if name == "workers" else "cpu"
        figures = {
            f"{each}_ms": statistics.median(getattr(one, each) for one in rounds) * 1e3 for each in Spent._fields
        }
        if "plain" in engines:
            pairs = zip(rounds, spent["plain"], strict=True)
            figures["ratio"] = statistics.median(getattr(a, clock) / getattr(b, clock) for a, b in pairs)
        return {key: round(value, 3) for key, value in figures.items()}

    return {name: summarize(name) for name in engines}


def build_engines(
    size: str, method: str, cohort: int, only: list[str], pool: ProcessExecutor | None, folder: Path, stack: ExitStack
) -> dict[str, TimedRound]:
    """Return the engines that take turns at one size; the processes of other libraries end with `stack`."""
    engines: dict[str, TimedRound] = {}
    if "plain" in only:
        engines["plain"] = time_round(build_plain_round(size, method, cohort))
    if "halfmoon" in only:
        for executor in ("loop", "vmap"):
            engines[executor] = time_round(build_round(size, method, cohort, executor))
        if pool is not None and size == "large":
            engines["workers"] = time_round(build_round(size, method, cohort, "loop", pool))
    for library in PACKAGES:
        if library in only:
            python = prepare_environment(library, folder)
            engines[library] = stack.enter_context(start_library(python, library, size, method, str(cohort)))
    return engines


def measure_startup() -> tuple[float, float]:
    """Return the seconds of the processor and of the clock from `import torch` to the end of a round in a new process."""
    command = [sys.executable, "-c", STARTUP]
    outputs = [
        subprocess.run(command, capture_output=True, text=True, check=True).stdout.split() for _ in range(STARTS)
    ]
    cpu, wall = (min(float(each[k - 2]) for each in outputs) for k in range(2))
    return round(cpu, 2), round(wall, 2)


def draw(figures: dict[str, dict[str, dict[str, float]]], path: Path) -> None:
    """Draw the ratio of each engine to the plain loop: a panel for each round, bars by cohort."""
    from halfmoon.report.figures import new_figure

    names = {"loop": "halfmoon, loop", "vmap": "halfmoon, vmap", "pfl": "pfl", "flower": "Flower simulation"}
    rounds = list(dict.fromkeys(name.rpartition("_")[0] for name in figures))
    lines = -(-len(rounds) // 2)
    figure = new_figure(9.0, 0.4 + 2.8 * lines)
    panels = figure.subplots(lines, 2, squeeze=False, sharey=True).flatten()
    for panel in panels[len(rounds) :]:
        panel.remove()
    for panel, name in zip(panels, rounds, strict=False):
        cohorts = [key.rpartition("_")[2] for key in figures if key.rpartition("_")[0] == name]
        for k, (engine, title) in enumerate(names.items()):
            bars = [figures[f"{name}_{cohort}"].get(engine, {}).get("ratio") for cohort in cohorts]
            positions = [i + (k - 1.5) * 0.2 for i, ratio in enumerate(bars) if ratio is not None]
            drawn_bars = panel.bar(positions, [ratio for ratio in bars if ratio is not None], 0.2, label=title)
            panel.bar_label(drawn_bars, fmt="%.2f", fontsize=7)
        panel.axhline(1.0, color="black", linewidth=0.8)
        panel.set_xticks(range(len(cohorts)), cohorts)
        method, _, size = name.partition("_")
        panel.set_title(f"{TITLES[method]}, {TITLES[size]}")
        panel.margins(y=0.08)
    figure.supxlabel("clients of a round", fontsize=9)
    figure.supylabel("processor time over the plain loop's", fontsize=9)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=len(names), fontsize=8)
    figure.savefig(path, dpi=90)


def measure_all(options: argparse.Namespace) -> dict[str, Any]:
    """Return all figures, and print each when it is measured."""
    cpu, wall = measure_startup()
    figures: dict[str, Any] = {"torch": torch.__version__, "load": round(os.getloadavg()[0], 1)}
    figures |= {"startup_seconds": cpu, "startup_wall_seconds": wall}
    ratios: dict[str, dict[str, dict[str, float]]] = {}
    pool = ProcessExecutor(2) if options.workers else None
    for size in options.sizes:
        default = default_executor(size)
        for cohort in (each for each in options.cohorts if each <= LARGEST[size]):
            for method in METHODS:
                turns = max(1, options.turns if cohort <= 5 else options.turns * 3 // 5 if cohort <= 20 else 2)
                with ExitStack() as stack:
                    engines = build_engines(size, method, cohort, options.only, pool, options.folder, stack)
                    found = measure(engines, turns)
                ratios[f"{method}_{SIZES[size]}_{cohort}"] = found
                if cohort == options.cohorts[0] and "ratio" in found.get(default, {}):
                    figures[f"{method}_{SIZES[size]}"] = found[default]["ratio"]
                if not options.json:
                    print(f"{method}_{SIZES[size]}_{cohort}", found, flush=True)
    if pool is not None:
        pool.close()
    return {**figures, "ratios": ratios}


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", nargs="*", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--cohorts", type=int, nargs="+", default=[5, 20, 100])
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=list(SIZES))
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--workers", action="store_true", help="measure two worker processes as well (size large)")
    parser.add_argument("--folder", type=Path, default=Path("peers-environments"))
    parser.add_argument("--save", type=Path)
    parser.add_argument("--picture", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    retain_freed_memory()
    figures = measure_all(options) if options.only else {"ratios": {}}
    saved: dict[str, Any] = json.loads(options.save.read_text()) if options.save and options.save.exists() else {}
    if options.save:
        saved |= figures["ratios"]
        options.save.write_text(json.dumps(saved, indent=1) + "\n")
    if options.picture:
        draw(saved or figures["ratios"], options.picture)
    print(json.dumps(figures) if options.json else {name: value for name, value in figures.items() if name != "ratios"})


if __name__ == "__main__":
    main()
