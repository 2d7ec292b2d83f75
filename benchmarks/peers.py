"""Time rounds of FedAvg and FixMatch against a plain loop that somebody writes by hand, and against other libraries.

    python benchmarks/peers.py [--json] [--only plain halfmoon pfl flower] [--cohorts 5 20 100] [--sizes tiny large]
                               [--turns N] [--folder FOLDER] [--save FILE] [--picture FILE]

Two sizes: "tiny" is the digits' small network on 8x8 images, six steps on 10 labeled and 30 unlabeled images a client
(the main job's); "large" is ResNet-9 of width 16 on 32x32 images of noise, three steps on 10 + 10, in cohorts up to 20.
Every side plays the same round: the same clients, images and views (drawn and made by `halfmoon.data.views` on all
sides, once a client), the same numbers of steps and images, an average at the end. What differs is the engine:

    plain      `torch.nn` modules, `torch.optim.Adam` and a loop over clients and batches; layout and threads as ours
    loop       halfmoon, client by client
    vmap       halfmoon, clients as one program
    workers    halfmoon, clients in two processes (large only)
    pfl        pfl-research: its PyTorch model, simulated backend and federated averaging, on the plain loop's network
    flower     Flower's simulation on Ray with one actor: ServerApp, FedAvg and ClientApp, on the plain loop's network

pfl and Flower are installed by this script in environments of their own below --folder, with this repository and its
pins, and reused when they are there. The sides take turns, round by round, each on one thread, so a busy machine
disturbs all alike; a ratio is the median over turns of a side's time over the plain loop's in the same turn. Times are
processor seconds, with those of a side's processes; of `workers` the wall clock, against the plain loop's. Start it on
one processor (`taskset -c 0`), and for `workers` on two.

`--json` gives the ratios at cohort 5 of what halfmoon does where nobody says, as `fedavg_tiny`, `fixmatch_tiny`,
`fedavg_resnet9` and `fixmatch_resnet9`, all others under "ratios", and what an empty process needs from `import torch`
to the end of one round of FedAvg as `startup_seconds` (of processor time). `--save` adds the figures to a JSON file,
and `--picture` draws all that stands there.
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
from peer_rounds import METHODS, SIZES, chosen, ours, plain

from halfmoon.core.memory import retain_freed_memory
from halfmoon.engine.executors.processes import ProcessExecutor

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = {"pfl": "pfl[pytorch]==0.6.0", "flower": "flwr[simulation]>=1.41,<1.43"}
SIDES = ("plain", "halfmoon", *PACKAGES)
TITLES = {"fedavg": "FedAvg", "fixmatch": "FixMatch", "tiny": "digits' network", "resnet9": "ResNet-9, width 16"}
LARGEST = {"tiny": 1000, "large": 20}  # a cohort of 100 large clients takes minutes a round
STARTS = 3
STARTUP = """
import tempfile, time
import torch
began = time.process_time(), time.perf_counter()
import halfmoon
with tempfile.TemporaryDirectory() as folder:
    halfmoon.run(halfmoon.Config(method="fedavg", rounds=1, run_dir=folder + "/run"))
print(time.process_time() - began[0], time.perf_counter() - began[1])
"""


class Spent(NamedTuple):
    """Seconds of a round."""

    cpu: float
    wall: float


Play = Callable[[], Spent]


def here(round: Callable[[], object]) -> Play:
    """Return a round of this process that says what it took."""

    def play() -> Spent:
        began = time.process_time(), time.perf_counter()
        round()
        return Spent(time.process_time() - began[0], time.perf_counter() - began[1])

    return play


def environment(library: str, folder: Path) -> Path:
    """Return the Python of a library's environment below a folder, made and filled where it is not there."""
    made = folder / library
    python = made / "bin" / "python"
    ready = made / "ready"
    if not ready.exists():
        subprocess.run([sys.executable, "-m", "venv", str(made)], check=True)
        install = [str(python), "-m", "pip", "install", "--quiet", "-c", str(ROOT / "constraints.txt"), str(ROOT)]
        subprocess.run([*install, PACKAGES[library]], check=True)
        ready.touch()
    return python


@contextmanager
def there(python: Path, *words: str) -> Iterator[Play]:
    """Give a round that another environment's process plays when it is asked."""
    paths = [str(ROOT / "src"), str(ROOT / "benchmarks"), str(ROOT / "tests" / "support")]
    quiet = {"FLWR_TELEMETRY_ENABLED": "0", "RAY_DEDUP_LOGS": "0", "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0"}
    env = {**os.environ, **quiet, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    command = [str(python), str(ROOT / "benchmarks" / "peer_side.py"), *words]
    said = open(f"{python.parents[1]}.log", "ab")  # noqa: SIM115 (closed below)
    side = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=said, text=True)
    stdin, stdout = cast(Any, side.stdin), cast(Any, side.stdout)

    def play() -> Spent:
        stdin.write("play\n")
        stdin.flush()
        answer = stdout.readline()
        if not answer:
            raise SystemExit(f"{words[0]} has ended; what it said is in {said.name}")
        return Spent(**json.loads(answer))

    try:
        yield play
    finally:
        stdin.close()
        try:
            side.wait(60)
        except subprocess.TimeoutExpired:
            side.kill()
        said.close()


def measure(sides: dict[str, Play], turns: int) -> dict[str, dict[str, float]]:
    """Return the median milliseconds and the median ratio of each side to the plain loop, in turns after one."""
    spent: dict[str, list[Spent]] = {name: [] for name in sides}
    for turn in range(turns + 1):
        for name, play in sides.items():
            took = play()
            if turn:
                spent[name].append(took)

    def told(name: str) -> dict[str, float]:
        mine = spent[name]
        clock = "wall" if name == "workers" else "cpu"
        made = {f"{each}_ms": statistics.median(getattr(one, each) for one in mine) * 1e3 for each in Spent._fields}
        if "plain" in sides:
            pairs = zip(mine, spent["plain"], strict=True)
            made["ratio"] = statistics.median(getattr(a, clock) / getattr(b, clock) for a, b in pairs)
        return {key: round(value, 3) for key, value in made.items()}

    return {name: told(name) for name in sides}


def sides_of(
    size: str, method: str, cohort: int, only: list[str], pool: ProcessExecutor | None, folder: Path, stack: ExitStack
) -> dict[str, Play]:
    """Return what takes turns at one size; other libraries' processes end with `stack`."""
    made: dict[str, Play] = {}
    if "plain" in only:
        made["plain"] = here(plain(size, method, cohort))
    if "halfmoon" in only:
        for executor in ("loop", "vmap"):
            made[executor] = here(ours(size, method, cohort, executor))
        if pool is not None and size == "large":
            made["workers"] = here(ours(size, method, cohort, "loop", pool))
    for library in PACKAGES:
        if library in only:
            python = environment(library, folder)
            made[library] = stack.enter_context(there(python, library, size, method, str(cohort)))
    return made


def startup() -> tuple[float, float]:
    """Return the seconds, of the processor and the clock, from `import torch` to the end of a round, afresh."""
    command = [sys.executable, "-c", STARTUP]
    done = [subprocess.run(command, capture_output=True, text=True, check=True).stdout.split() for _ in range(STARTS)]
    cpu, wall = (min(float(each[k - 2]) for each in done) for k in range(2))
    return round(cpu, 2), round(wall, 2)


def picture(figures: dict[str, dict[str, dict[str, float]]], path: Path) -> None:
    """Draw each side's ratio to the plain loop: a panel for each round, bars by cohort."""
    from halfmoon.report.figures import new_figure

    names = {"loop": "halfmoon, loop", "vmap": "halfmoon, vmap", "pfl": "pfl", "flower": "Flower simulation"}
    rounds = list(dict.fromkeys(name.rpartition("_")[0] for name in figures))
    lines = -(-len(rounds) // 2)
    drawn = new_figure(9.0, 0.4 + 2.8 * lines)
    panels = drawn.subplots(lines, 2, squeeze=False, sharey=True).flatten()
    for panel in panels[len(rounds) :]:
        panel.remove()
    for panel, name in zip(panels, rounds, strict=False):
        cohorts = [key.rpartition("_")[2] for key in figures if key.rpartition("_")[0] == name]
        for k, (side, title) in enumerate(names.items()):
            bars = [figures[f"{name}_{cohort}"].get(side, {}).get("ratio") for cohort in cohorts]
            places = [i + (k - 1.5) * 0.2 for i, ratio in enumerate(bars) if ratio is not None]
            drawn_bars = panel.bar(places, [ratio for ratio in bars if ratio is not None], 0.2, label=title)
            panel.bar_label(drawn_bars, fmt="%.2f", fontsize=7)
        panel.axhline(1.0, color="black", linewidth=0.8)
        panel.set_xticks(range(len(cohorts)), cohorts)
        method, _, size = name.partition("_")
        panel.set_title(f"{TITLES[method]}, {TITLES[size]}")
        panel.margins(y=0.08)
    drawn.supxlabel("clients of a round", fontsize=9)
    drawn.supylabel("processor time over the plain loop's", fontsize=9)
    drawn.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=len(names), fontsize=8)
    drawn.savefig(path, dpi=90)


def played(given: argparse.Namespace) -> dict[str, Any]:
    """Return all figures, and print each as it comes."""
    cpu, wall = startup()
    figures: dict[str, Any] = {"torch": torch.__version__, "load": round(os.getloadavg()[0], 1)}
    figures |= {"startup_seconds": cpu, "startup_wall_seconds": wall}
    ratios: dict[str, dict[str, dict[str, float]]] = {}
    pool = ProcessExecutor(2) if given.workers else None
    for size in given.sizes:
        mine = chosen(size)
        for cohort in (each for each in given.cohorts if each <= LARGEST[size]):
            for method in METHODS:
                turns = max(1, given.turns if cohort <= 5 else given.turns * 3 // 5 if cohort <= 20 else 2)
                with ExitStack() as stack:
                    sides = sides_of(size, method, cohort, given.only, pool, given.folder, stack)
                    found = measure(sides, turns)
                ratios[f"{method}_{SIZES[size]}_{cohort}"] = found
                if cohort == given.cohorts[0] and "ratio" in found.get(mine, {}):
                    figures[f"{method}_{SIZES[size]}"] = found[mine]["ratio"]
                if not given.json:
                    print(f"{method}_{SIZES[size]}_{cohort}", found, flush=True)
    if pool is not None:
        pool.close()
    return {**figures, "ratios": ratios}


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", nargs="*", choices=SIDES, default=list(SIDES))
    parser.add_argument("--cohorts", type=int, nargs="+", default=[5, 20, 100])
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=list(SIZES))
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--workers", action="store_true", help="two processes as well, where the size is large")
    parser.add_argument("--folder", type=Path, default=Path("peers-environments"))
    parser.add_argument("--save", type=Path)
    parser.add_argument("--picture", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    retain_freed_memory()
    figures = played(given) if given.only else {"ratios": {}}
    saved: dict[str, Any] = json.loads(given.save.read_text()) if given.save and given.save.exists() else {}
    if given.save:
        saved |= figures["ratios"]
        given.save.write_text(json.dumps(saved, indent=1) + "\n")
    if given.picture:
        picture(saved or figures["ratios"], given.picture)
    print(json.dumps(figures) if given.json else {name: value for name, value in figures.items() if name != "ratios"})


if __name__ == "__main__":
    main()
