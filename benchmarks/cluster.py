"""Train on one machine, in processes, and on Ray clusters, and compare bytes, processor time and memory.

    python benchmarks/cluster.py engines [--rounds 40] [--turns 1] [--workers 1 2 ray]
    python benchmarks/cluster.py nodes [--rounds 30]
    python benchmarks/cluster.py clients --data-dir DATA [--clients 1000] [--rounds 3] [--network small]

engines: `halfmoon run` with `--workers 1`, `--workers 2` and `--workers ray`, in turns. FedAvg + FixMatch on digits, with
ResNet-9 of width 16. The processor time is that of all processes of the command, with Ray's daemons and their workers.

nodes: `halfmoon sweep` of a recipe with two methods and two seeds, in one process, and on a Ray cluster of two nodes on
this machine (`ray.cluster_utils`). One node is killed in the middle of the sweep, with its workers.

clients: `halfmoon run` with all of 1,000 clients in every round, on Fashion-MNIST: 60 images a client.

In each comparison the model, the metrics and the split must have the same bytes; of the model's file those after its header,
which has the options of the run.
"""

import argparse
import ctypes
import hashlib
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

TICKS = os.sysconf("SC_CLK_TCK")
SAMPLE_SECONDS = 0.5
COMPARED_FILES = ("model.safetensors", "metrics.jsonl", "split.parquet")
PR_SET_CHILD_SUBREAPER = 36
"""Option of prctl: processes whose parent has ended become children of this process."""

RECIPE = """
title = "Two methods on digits"
paper = "halfmoon"
item = "cluster"
about = "two methods"
reading = "as it is"
columns = ["labels"]
rows = "method"

[protocol]
data = "digits"
network = "small"
rounds = {rounds}
clients = 20
cohort = 5
steps = 6
device = "cpu"
threads = 1

[axes.labels.few]
title = "few"
set = {{ labels_per_class = 0.5 }}

[axes.method.fedavg]
title = "FedAvg, labels only"
set = {{ method = "fedavg" }}

[axes.method.fedavg-fixmatch]
title = "FedAvg + FixMatch"
set = {{ method = "fedavg-fixmatch" }}
"""


class CommandCost(NamedTuple):
    """What a command used.

    Attributes:
        processor: seconds of all of its processes.
        daemons: those of Ray's own processes among them: all but halfmoon's and the workers that train.
        wall: seconds by the clock.
        memory: MB of all of its processes at the peak, each with its share of shared pages.
    """

    processor: float
    daemons: float
    wall: float
    memory: float


def list_descendants() -> dict[int, float]:
    """Return the processor seconds of each running descendant of this process."""
    parents: dict[int, int] = {}
    seconds: dict[int, float] = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdecimal():
            continue
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # the process has ended
            continue
        process = int(folder.name)
        parents[process] = int(fields[1])
        seconds[process] = (int(fields[11]) + int(fields[12])) / TICKS

    def is_descendant(process: int) -> bool:
        while process and process != os.getpid():
            process = parents.get(process, 0)
        return process == os.getpid()

    return {process: seconds[process] for process in parents if process != os.getpid() and is_descendant(process)}


def is_daemon(process: int) -> bool:
    """Check by its command whether a process is one of Ray's own, and no worker that trains."""
    try:
        command = Path(f"/proc/{process}/cmdline").read_text()
    except OSError:  # the process has ended
        return False
    is_agent = command.startswith("ray::") and "Agent" in command
    return is_agent or "/ray/core/" in command or "/site-packages/ray/" in command


def measure_memory(processes: list[int]) -> float:
    """Return the memory of processes in MB, each with its share of shared pages."""
    total = 0
    for process in processes:
        try:
            lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
        except OSError:  # the process has ended
            continue
        total += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total * 1024 / 1e6


def run_command(arguments: list[str]) -> CommandCost:
    """Run a halfmoon command; exit with its output if it fails.

    The seconds of a process are those of the last sample before its end, so up to half a second of each is missing.
    """
    command = [sys.executable, "-m", "halfmoon", *arguments]
    seconds: dict[int, float] = {}
    daemons: dict[int, bool] = {}
    memory = 0.0
    start = time.perf_counter()
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=make_environment())
        while process.poll() is None:
            running = list_descendants()
            seconds |= running
            # A worker looks like a daemon until it gets its first task, so the last look counts.
            daemons |= {each: is_daemon(each) for each in running}
            memory = max(memory, measure_memory([*running]))
            time.sleep(SAMPLE_SECONDS)
        if process.returncode:
            output.seek(0)
            sys.exit(output.read())
    wall = time.perf_counter() - start
    stop_descendants()
    return CommandCost(
        sum(seconds.values()), sum(seconds[each] for each, is_one in daemons.items() if is_one), wall, memory
    )


def stop_descendants() -> None:
    """Wait until Ray's daemons have ended, at most 20 s, and kill what remains."""
    deadline = time.monotonic() + 20
    while list_descendants() and time.monotonic() < deadline:
        time.sleep(SAMPLE_SECONDS)
        reap_children()
    for process in list_descendants():
        os.kill(process, signal.SIGKILL)
    reap_children()


def reap_children() -> None:
    """Reap the processes that have ended and whose parents had ended before."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def make_environment() -> dict[str, str]:
    """Return the environment of commands: one thread a process, and no usage statistics of Ray."""
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ADDRESS": "local",  # a new cluster, also where another one is running
        # Ray would make its workers nice; on a busy machine they would then get less of the processors than others.
        "RAY_worker_niceness": "0",
        "RAY_raylet_start_wait_time_s": "300",
    }


def hash_results(folder: Path) -> dict[str, str]:
    """Return the hash of each compared file, by its path in the folder."""
    hashes: dict[str, str] = {}
    for name in COMPARED_FILES:
        for path in sorted(folder.rglob(name)):
            data = path.read_bytes()
            if path.suffix == ".safetensors":
                # The file begins with the length of its header, which has the options, and so the number of processes.
                data = data[8 + int.from_bytes(data[:8], "little") :]
            hashes[str(path.relative_to(folder))] = hashlib.sha256(data).hexdigest()
    return hashes


def require_equal(results: dict[str, dict[str, str]]) -> None:
    """Exit if two folders have different bytes, or no results."""
    reference = next(iter(results.values()))
    for name, each in results.items():
        if not each or each != reference:
            sys.exit(f"{name} has other bytes: {each} instead of {reference}")
    print(f"\nThe {len(reference)} compared files have the same bytes: {', '.join(results)}.")


# engines

ENGINES = {"1": "one process", "2": "two processes", "ray": "Ray"}
"""Values of --workers, and their names in the table."""


def measure_engines(options: argparse.Namespace) -> None:
    """Print a row for each engine; the ratios are to the pool of processes if it is measured."""
    costs: dict[str, list[CommandCost]] = {ENGINES[workers]: [] for workers in options.workers}
    results: dict[str, dict[str, str]] = {}
    for _ in range(options.turns):
        for workers in options.workers:
            name = ENGINES[workers]
            with tempfile.TemporaryDirectory() as folder:
                run = Path(folder, "run")
                arguments = {
                    "method": "fedavg-fixmatch", "network": "resnet9", "width": 16, "clients": 10, "cohort": 10,
                    "steps": 4, "rounds": options.rounds, "evaluate-every": options.rounds, "threads": 1,
                    "executor": "loop", "workers": workers, "device": "cpu", "run-dir": run,
                }  # fmt: skip
                flags = [flag for key, value in arguments.items() for flag in (f"--{key}", str(value))]
                costs[name].append(run_command(["run", *flags]))
                print(f"{name}: {costs[name][-1]}", file=sys.stderr, flush=True)
                results[name] = hash_results(run)
    print(
        "| engine | processor, s | ratio | of it Ray's daemons, s | clock, s | memory, MB |\n|---|--:|--:|--:|--:|--:|"
    )
    for name, each in costs.items():
        pools = costs.get(ENGINES["2"], each)
        ratio = statistics.median(cost.processor / pool.processor for cost, pool in zip(each, pools, strict=True))
        processor, daemons, wall, memory = (statistics.median(values) for values in zip(*each, strict=True))
        print(f"| {name} | {processor:.1f} | {ratio:.2f} | {daemons:.1f} | {wall:.0f} | {memory:,.0f} |")
    require_equal(results)


# nodes


def measure_nodes(options: argparse.Namespace) -> None:
    """Compare a sweep on two nodes, of which one is killed, with a sweep in one process."""
    from ray.cluster_utils import Cluster

    os.environ.update(make_environment())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        recipe = folder / "recipe.toml"
        recipe.write_text(RECIPE.format(rounds=options.rounds))
        sweep = ["sweep", str(recipe), "--seeds", "0", "1", "--checkpoint-every", "5"]
        alone = run_command([*sweep, "--out", str(folder / "alone")])

        # The head has no processors, so that the runs are on the other two nodes.
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
        nodes = [cluster.add_node(num_cpus=1) for _ in range(2)]
        out = folder / "cluster"
        command = [*sweep, "--engine", "ray", "--ray-address", str(cluster.address), "--out", str(out)]
        start = time.perf_counter()
        with (folder / "output").open("w") as output:
            running = subprocess.Popen([sys.executable, "-m", "halfmoon", *command], stdout=output, stderr=output)
            # Both nodes train when two runs have metrics.
            while len([*out.rglob("metrics.jsonl")]) < 2 and running.poll() is None:
                time.sleep(SAMPLE_SECONDS)
            finished = len([*out.rglob("summary.json")])
            cluster.remove_node(nodes[0], allow_graceful=False)
            running.wait()
        wall = time.perf_counter() - start
        cluster.shutdown()
        stop_descendants()
        if running.returncode:
            sys.exit((folder / "output").read_text())
        print(f"one process: {alone.wall:.0f} s by the clock; two nodes, one killed: {wall:.0f} s.")
        print(f"{finished} of 4 runs had ended when the node was killed.")
        require_equal({"one process": hash_results(folder / "alone"), "two nodes": hash_results(out)})


# clients


def measure_clients(options: argparse.Namespace) -> None:
    """Print the time and memory of a run in which every client trains in each round."""
    with tempfile.TemporaryDirectory() as name:
        run = Path(name, "run")
        arguments = {
            "method": "fedavg-fixmatch", "data": "fashion_mnist", "data-dir": options.data_dir,
            "network": options.network, "setting": "iid-iid", "labels-per-class": 1, "clients": options.clients,
            "cohort": options.clients, "steps": 2, "rounds": options.rounds, "evaluate-every": options.rounds,
            "threads": 1, "device": "cpu", "run-dir": run,
        }  # fmt: skip
        flags = [flag for key, value in arguments.items() for flag in (f"--{key}", str(value))]
        print("halfmoon run", *flags)
        cost = run_command(["run", *flags])
        print("\n| clients a round | rounds | processor, s | clock, s | peak memory, MB |\n|--:|--:|--:|--:|--:|")
        print(
            f"| {options.clients:,} | {options.rounds} | {cost.processor:.1f} | {cost.wall:.0f} | {cost.memory:,.0f} |"
        )
        print("\n" + (run / "timings.jsonl").read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    engines = commands.add_parser("engines")
    engines.set_defaults(measure=measure_engines)
    engines.add_argument("--rounds", type=int, default=40)
    engines.add_argument("--turns", type=int, default=1)
    engines.add_argument("--workers", nargs="+", choices=ENGINES, default=list(ENGINES))
    nodes = commands.add_parser("nodes")
    nodes.set_defaults(measure=measure_nodes)
    nodes.add_argument("--rounds", type=int, default=30)
    clients = commands.add_parser("clients")
    clients.set_defaults(measure=measure_clients)
    clients.add_argument("--data-dir", type=Path, required=True)
    clients.add_argument("--clients", type=int, default=1000)
    clients.add_argument("--rounds", type=int, default=3)
    clients.add_argument("--network", default="small")
    options = parser.parse_args()
    if sys.platform.startswith("linux"):
        # Ray's daemons outlive the process that started them; as children of this one they are counted.
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    if shutil.which("ray", path=str(Path(sys.executable).parent)) is None and options.measure is not measure_clients:
        sys.exit("Ray is not installed: pip install -c constraints.txt '.[ray]'")
    options.measure(options)


if __name__ == "__main__":
    main()
