"""Time the executors of client training: vmapped programs, padded programs, worker processes, and rounds on a GPU.

    python benchmarks/executors.py vmap [--clients 20] [--group-sizes 5 10 20] [--turns 4] [--networks small:16:8:1 ...]
    python benchmarks/executors.py padding [--methods NAME ...] [--rules main rest large] [--cohorts 5 20] [--turns 9]
    python benchmarks/executors.py workers [--cohort 10] [--steps 8] [--turns 5] [--cores 2 4 8 10 16]
    python benchmarks/executors.py device [--device cuda] [--rounds 10] [--no-ceilings] [--networks small resnet9]
                                          [--methods fedavg fedavg-fixmatch feddure] [--executors loop vmap]
                                          [--images 500]

vmap: clients of equal size in vmapped programs of several sizes against the loop, over networks given as
NAME:WIDTH:PIXELS:CHANNELS. Each round has two steps of FedAvg on 10 labeled images a client, or of FixMatch on 10 + 10 or
10 + 30. A line shows the milliseconds of the loop, and for each group size the median over turns of the program's
processor time over the loop's in the same turn. `factory.MAX_VMAP_PRODUCTS` and `factory.MAX_VMAPPED_CLIENTS_ON_CPU` were
chosen by these numbers.

padding: a Dirichlet cohort on the digits as padded programs against the loop. Batch rule "main" is that of `halfmoon run`
without options (six steps on 10 labeled and 30 unlabeled images at every client; clients differ in their number of labels
at the start of a round). "rest" spreads the unlabeled images of each client over its steps, so steps and images a step
differ as well. In "large" one client is ten times as large as each of the others, and steps of 10 + 30 images pass all
unlabeled ones: in programs with at most a third of padding, and in one program of all clients.

workers: what a round gains from more cores. FixMatch on ResNet-9 of width 16, 10 + 10 images of 32x32 a step, one thread
a process. A round has a serial part (drawing the cohort, packing requests, unpacking and adding up uploads) and the
clients, which the cores share. Both are measured in processor seconds, which a busy machine disturbs less than the clock.
With n cores a round then takes at most serial + ceil(cohort / n) * client seconds. This ignores that cores share a memory
bus, a cache and a clock rate, so two workers are timed by the clock as well.

device: runs on random images of 32x32 on a GPU or CPU, ten clients of which five train in a round, with batches of 10
labeled and 90 unlabeled images, as in FedDure's Table 1 at full size. Each line is the median of the rounds after the
first, which warms up cuDNN and the allocator. TFLOP/s are those of the convolutions and linear layers in the passes of the
clients, counted from the network. Calls, launches, copies and waits are those of a second run of two rounds.
Before that, the limits of the device: a large copy and a large matrix product in float32, TF32 and bfloat16.
The share of the peak is that of the float32 product; `--no-ceilings` leaves both out.
"""

import argparse
import itertools
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from support.peer_library import processor_seconds
from support.rounds import build_round, repeat_first_round
from torch.profiler import ProfilerActivity, profile

import halfmoon
from halfmoon import Config
from halfmoon.core.memory import retain_freed_memory
from halfmoon.data import Scenario
from halfmoon.data.partition.split import Split
from halfmoon.engine.budget import Budget
from halfmoon.engine.evaluation import Examples
from halfmoon.engine.executors.processes import ProcessExecutor
from halfmoon.engine.executors.serial import SerialExecutor
from halfmoon.engine.executors.vmap import VmapExecutor
from halfmoon.engine.groups import MAX_PADDING
from halfmoon.engine.local_clients import FederatedDataset, Training
from halfmoon.engine.runtime import RuntimeSettings
from halfmoon.engine.simulation import Simulation
from halfmoon.methods import registry
from halfmoon.models import NETWORKS
from halfmoon.runs import factory
from halfmoon.runs.factory import ImageSpec

# vmap

VMAP_ROUNDS = (("fedavg", 10), ("fedavg-fixmatch", 10), ("fedavg-fixmatch", 30))
"""Methods, and their unlabeled images a step."""
VMAP_NETWORKS = (
    *("small:16:8:1", "small:8:16:1", "small:32:8:1", "small:16:16:1", "small:16:28:1", "small:64:8:1"),
    *("small:16:32:3", "small:32:32:3"),
)


def build_equal_round(network: str, method: str, unlabeled: int, clients: int, group_size: int) -> Callable[[], None]:
    """Return a round of equal clients in programs of `group_size`; 1 is the loop."""
    name, width, pixels, channels = (int(field) if field.isdecimal() else field for field in network.split(":"))
    config = Config(
        method=method, cohort=clients, clients=clients, device="cpu", network=str(name), width=int(width), steps=2,
        unlabeled_batch=unlabeled,
    )  # fmt: skip
    shape = (int(channels), int(pixels), int(pixels))
    g = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (clients * 70, *shape), generator=g, dtype=torch.uint8)
    labels = torch.arange(len(images)) % 10
    spec = ImageSpec(shape, tuple("0123456789"), False, (0.5,) * shape[0], (0.25,) * shape[0])
    scenario = Scenario(setting="iid-iid", clients=clients, labels_per_class=1.0)
    dataset = FederatedDataset(Examples(images, labels), scenario.split(labels.numpy(), spec.classes, "noise"))
    task = factory.build_task(config, spec)
    chosen = registry.make(method)
    batching, serving = factory.build_batch_rules(config)
    executor = SerialExecutor() if group_size == 1 else VmapExecutor(max_group_size=group_size)
    training = Training(batching, Budget(), serving, executor)
    views = factory.build_views(config, spec)
    return repeat_first_round(chosen, Simulation(chosen, task, dataset, views, training, RuntimeSettings(clients)))


def measure_vmap(options: argparse.Namespace) -> None:
    """Print a line for each network and round."""
    for method, unlabeled in VMAP_ROUNDS:
        for network in options.networks:
            spent: dict[int, list[float]] = {size: [] for size in (1, *options.group_sizes)}
            rounds = {size: build_equal_round(network, method, unlabeled, options.clients, size) for size in spent}
            for turn in range(options.turns + 1):
                for size, run_round in rounds.items():
                    start = time.process_time()
                    run_round()
                    if turn:  # the first turn warms up
                        spent[size].append(time.process_time() - start)
            ratios = {
                size: round(statistics.median(a / b for a, b in zip(spent[size], spent[1], strict=True)), 2)
                for size in options.group_sizes
            }
            print(method, unlabeled, network, f"{statistics.median(spent[1]) * 1e3:.0f} ms", ratios, flush=True)


# padding

PADDING_METHODS = ("fedavg", "fedavg-fixmatch", "feddure")
METHOD_OPTIONS: dict[str, dict[str, Any]] = {
    "fedavg-fixmatch": {"labels": "round", "threshold": 0.7},
    "feddure": {"labels": "round", "regulator_bias": 0.0},
    # With the default threshold no client would train on the pseudo-labels of an untrained model.
    "semifl": {"threshold": 0.3},
    "cbafed": {"threshold": 0.1, "warmup": 0.0},
    # Tuning runs on the server, and is independent of the executor.
    "proxyfl": {"tuning_passes": 0},
}
BATCH_RULES: dict[str, dict[str, Any]] = {
    "main": {"steps": 6, "unlabeled_batch": 30},
    "rest": {},
    "large": {"unlabeled_batch": 30},
}


def build_unequal_rounds(
    method_name: str, rule: str, cohort: int, executor: str, max_padding: Fraction = MAX_PADDING
) -> Callable[[int], None]:
    """Return a function that runs the round of a number, each time from the same initial model."""
    has_large_client = rule == "large"
    config = Config(
        method=method_name, data="digits", clients=cohort if has_large_client else 20, cohort=cohort, lr=6e-3,
        labeling="running", device="cpu", options=METHOD_OPTIONS.get(method_name, {}), **BATCH_RULES[rule],
    )  # fmt: skip
    problem = factory.build_problem(config)
    method = factory.build_method(config)
    chosen = VmapExecutor(max_padding=max_padding) if executor == "vmap" else SerialExecutor()
    training = Training(problem.batching, Budget(), problem.server_batching, chosen)
    split = split_with_large_client(len(problem.train.labels), cohort) if has_large_client else problem.split
    dataset = FederatedDataset(problem.train, split)
    simulation = Simulation(method, problem.task, dataset, problem.views, training, RuntimeSettings(cohort))
    server = method.start(problem.task, problem.task.network.init(torch.Generator().manual_seed(0)))

    def run_round(number: int) -> None:
        simulation.open(number)
        method.round(simulation.task, server, simulation)
        simulation.close()

    return run_round


def split_with_large_client(rows: int, clients: int) -> Split:
    """Return a split in which the first client has ten times the images of each other one, a fifth of them labeled."""
    share = rows // (clients + 9)
    client = np.repeat(np.arange(clients), [10 * share, *[share] * (clients - 1)])
    client = np.concatenate([client, np.full(rows - len(client), -1)])
    return Split(client, np.arange(rows) % 5 == 0, clients)


def compare_padded(method: str, rule: str, cohort: int, turns: int) -> dict[str, float]:
    """Return the median milliseconds of the loop, and the median ratio of the programs' time to it.

    With a large client `ratio_of_one` is the ratio of a single program of all clients.
    """
    rounds = {
        "loop": build_unequal_rounds(method, rule, cohort, "loop"),
        "ratio": build_unequal_rounds(method, rule, cohort, "vmap"),
    }
    if rule == "large":
        rounds["ratio_of_one"] = build_unequal_rounds(method, rule, cohort, "vmap", Fraction(1))
    spent: dict[str, list[float]] = {name: [] for name in rounds}
    for turn in range(turns + 1):
        for name, run_round in rounds.items():
            start = time.process_time()
            run_round(turn)
            if turn:  # the first turn warms up
                spent[name].append(time.process_time() - start)
    loop = spent.pop("loop")
    figures = {"loop_ms": float(round(statistics.median(loop) * 1e3))}
    for name, seconds in spent.items():
        figures[name] = round(statistics.median(a / b for a, b in zip(seconds, loop, strict=True)), 2)
    return figures


def measure_padding(options: argparse.Namespace) -> None:
    """Print the figures of each batch rule, method and cohort."""
    for rule in options.rules:
        for method in options.methods:
            for cohort in options.cohorts:
                print(f"{rule} {method} {cohort}", compare_padded(method, rule, cohort, options.turns), flush=True)


# workers


def time_processes(run_round: Callable[[], object]) -> tuple[float, float, float]:
    """Return the seconds of a round: processor time of this process and of its children, and the clock's."""
    before = time.process_time()
    before_all = processor_seconds()
    start = time.perf_counter()
    run_round()
    wall = time.perf_counter() - start
    spent = time.process_time() - before
    return spent, processor_seconds() - before_all - spent, wall


def proportional_megabytes(process: int) -> int:
    """Return the memory of a process, with its share of shared pages (Pss); 0 if the system does not report it."""
    file = Path(f"/proc/{process}/smaps_rollup")
    lines = file.read_text().splitlines() if file.exists() else []
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) // 1000


def measure_workers(options: argparse.Namespace) -> None:
    """Print what was measured with two workers, and what follows for more cores."""
    pool = ProcessExecutor(2)
    single = build_round("large", "fixmatch", options.cohort, "loop", steps=options.steps)
    parallel = build_round("large", "fixmatch", options.cohort, "loop", pool, options.steps)
    rows: list[tuple[float, float, float, float]] = []
    for turn in range(options.turns + 1):
        one, _, clock = time_processes(single)
        serial, children, parallel_clock = time_processes(parallel)
        if turn:  # the first turn starts the processes
            rows.append((one, serial, children / options.cohort, clock / parallel_clock))
    memory = [
        proportional_megabytes(process) for process in (os.getpid(), *((pool._pool and pool._pool._processes) or ()))
    ]
    pool.close()
    one, serial, client, speedup = (statistics.median(column) for column in zip(*rows, strict=True))
    print(f"one process {one:.2f} s, serial {serial:.3f} s, a client {client:.3f} s (load {os.getloadavg()[0]:.1f})")
    print(f"two workers by the clock: {speedup:.2f} times as fast")
    print("MB of this process and of each worker, with their shares of shared pages:", *memory)
    for cores in options.cores:
        speed = one / (serial + -(-options.cohort // cores) * client)
        print(f"{cores:>3} cores: {speed:.2f} times, {speed / min(options.cohort, cores):.2f} of min(cohort, cores)")


# device

DEVICE_NETWORKS = {"small, width 16": ("small", 16), "ResNet-9, width 64": ("resnet9", 64)}
DEVICE_METHODS = {"fedavg": {}, "fedavg-fixmatch": {}, "feddure": {"preset": "paper"}}
DEVICE_EXECUTORS = ("loop", "vmap")
CLIENTS = 10
COHORT = 5
IMAGES_PER_CLIENT = 500
MATRIX_SIDES = {"cuda": 8192, "cpu": 1024}
COPY_BYTES = {"cuda": 2**30, "cpu": 2**26}
"""Sizes for the limits of a device, which a processor would take minutes for."""


def wait_for(device: torch.device) -> None:
    """Wait until the device has finished its queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def median_seconds(call: Callable[[], object], device: torch.device, repeats: int = 10) -> float:
    """Return the median time of a call after two that warm up."""
    times = []
    for repeat in range(repeats + 2):
        wait_for(device)
        start = time.perf_counter()
        call()
        wait_for(device)
        if repeat >= 2:
            times.append(time.perf_counter() - start)
    return statistics.median(times)


def measure_limits(device: torch.device) -> dict[str, float]:
    """Return GB/s of a copy (bytes read and written) and TFLOP/s of matrix products."""
    copied = COPY_BYTES[device.type]
    side = MATRIX_SIDES[device.type]
    source = torch.randint(0, 255, (copied,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    rates = {"copy GB/s": 2 * copied / median_seconds(lambda: target.copy_(source), device) / 1e9}
    products = 2 * side**3
    a = torch.randn(side, side, device=device)
    for name, dtype, precision in (
        ("float32", torch.float32, "highest"),
        ("TF32", torch.float32, "high"),
        ("bfloat16", torch.bfloat16, "highest"),
    ):
        torch.set_float32_matmul_precision(precision)
        left = a.to(dtype)
        rates[f"{name} TFLOP/s"] = products / median_seconds(lambda x=left: x @ x, device, repeats=3) / 1e12
    torch.set_float32_matmul_precision("highest")
    return rates


def make_images(images_per_client: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return random images (N, 32, 32, 3) uint8, their classes with -1 for unlabeled, and the client of each."""
    generator = np.random.default_rng(0)
    n = CLIENTS * images_per_client
    images = generator.integers(0, 256, (n, 32, 32, 3), dtype=np.uint8)
    labels = np.tile(np.arange(10), n // 10)
    labels[generator.random(n) < 0.9] = -1
    labels[: 10 * CLIENTS] = np.tile(np.arange(10), CLIENTS)
    clients = np.arange(n) % CLIENTS
    return images, labels, clients


class DeviceCase(NamedTuple):
    """A row of the table: the network (a key of `DEVICE_NETWORKS`), the method, the executor, and the images a client."""

    network: str
    method: str
    executor: str
    images_per_client: int


def run_rounds(case: DeviceCase, rounds: int, device: str, folder: Path) -> dict[str, float]:
    """Train some rounds; return the median seconds a round, TFLOP/s and, on a GPU, the peak memory."""
    name, width = DEVICE_NETWORKS[case.network]
    method = case.method
    images, labels, clients = make_images(case.images_per_client)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    options = dict(
        method=method, data=(images, labels), clients=clients, network=name, width=width, cohort=COHORT, rounds=rounds,
        executor=case.executor, device=device, labeled_batch=10, unlabeled_batch=90, epochs=1, optimizer="adam", lr=5e-4,
        statistics="joint", budget="none", evaluate_every=rounds, checkpoint_every=rounds, seed=0,
        **DEVICE_METHODS[method],
    )  # fmt: skip
    halfmoon.run(**options, test=(images[:100], np.arange(100) % 10), run_dir=folder, progress=False)
    seconds = [json.loads(line)["seconds"] for line in (folder / "timings.jsonl").read_text().splitlines()]
    figures = {"seconds a round": statistics.median(seconds[1:])}
    costs = [json.loads(line)["cost"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    images_passed = [costs[-1][key] - costs[0][key] for key in ("forward", "backward")]
    products = NETWORKS[name](channels=3, classes=10, width=width).count_products((3, 32, 32))
    # A backward pass has two products of the size of each forward one: the gradients of the input and of the weights.
    operations = 2 * products * (images_passed[0] + 2 * images_passed[1])
    figures["TFLOP/s"] = operations / sum(seconds[1:]) / 1e12
    if device == "cuda":
        figures["peak MB"] = torch.cuda.max_memory_allocated() / 1e6
    return figures


def count_kernels(case: DeviceCase, device: str, folder: Path) -> dict[str, int]:
    """Count the kernel launches, copies and waits of a run of two rounds; on a CPU the calls of operators."""
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device == "cuda" else [])
    with profile(activities=activities) as profiled:
        run_rounds(case, 2, device, folder)
    names = [event.name for event in profiled.events()]
    if device != "cuda":
        return {"calls": sum(name.startswith("aten::") for name in names)}
    return {
        "kernel launches": sum(name.startswith("cudaLaunchKernel") for name in names),
        "copies to the GPU": sum(name.startswith("Memcpy HtoD") for name in names),
        "waits for the GPU": sum(name in ("cudaStreamSynchronize", "cudaDeviceSynchronize") for name in names),
    }


def measure_device(options: argparse.Namespace) -> None:
    """Print the tables of a device."""
    device = torch.device(options.device)
    is_gpu = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if is_gpu else platform.processor() or platform.machine()
    print(f"{name}; Python {platform.python_version()}, torch {torch.__version__}, CUDA {torch.version.cuda}\n")
    rates: dict[str, float] = {}
    if not options.no_ceilings:
        rates = measure_limits(device)
        print("| " + " | ".join(rates) + " |\n|" + "--:|" * len(rates))
        print("| " + " | ".join(f"{rate:.3g}" for rate in rates.values()) + " |\n")
    header_written = False
    networks = [key for key, (network, _) in DEVICE_NETWORKS.items() if network in options.networks]
    methods = [method for method in DEVICE_METHODS if method in options.methods]
    executors = [executor for executor in DEVICE_EXECUTORS if executor in options.executors]
    for case in (DeviceCase(*each, options.images) for each in itertools.product(networks, methods, executors)):
        with tempfile.TemporaryDirectory() as folder:
            figures = run_rounds(case, options.rounds, options.device, Path(folder) / "run")
            if rates:
                figures["share of the peak"] = figures["TFLOP/s"] / rates["float32 TFLOP/s"]
            figures |= count_kernels(case, options.device, Path(folder) / "profiled")
        if not header_written:
            print("| network | method | executor | " + " | ".join(figures) + " |")
            print("|---|---|---|" + "--:|" * len(figures))
            header_written = True
        values = [f"{value:.3f}" if isinstance(value, float) else f"{value:,}" for value in figures.values()]
        print(f"| {case.network} | `{case.method}` | {case.executor} | " + " | ".join(values) + " |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    vmap = commands.add_parser("vmap")
    vmap.set_defaults(measure=measure_vmap)
    vmap.add_argument("--clients", type=int, default=20)
    vmap.add_argument("--group-sizes", type=int, nargs="+", default=[5, 10, 20], help="clients in a program")
    vmap.add_argument("--turns", type=int, default=4)
    vmap.add_argument("--networks", nargs="+", default=VMAP_NETWORKS)
    padding = commands.add_parser("padding")
    padding.set_defaults(measure=measure_padding)
    padding.add_argument("--methods", nargs="+", default=PADDING_METHODS)
    padding.add_argument("--rules", nargs="+", choices=list(BATCH_RULES), default=["main", "rest"])
    padding.add_argument("--cohorts", type=int, nargs="+", default=[5, 20])
    padding.add_argument("--turns", type=int, default=9)
    workers = commands.add_parser("workers")
    workers.set_defaults(measure=measure_workers)
    workers.add_argument("--cohort", type=int, default=10)
    workers.add_argument("--steps", type=int, default=8)
    workers.add_argument("--turns", type=int, default=5)
    workers.add_argument("--cores", type=int, nargs="+", default=[2, 4, 8, 10, 16])
    device = commands.add_parser("device")
    device.set_defaults(measure=measure_device)
    device.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    device.add_argument("--rounds", type=int, default=10)
    device.add_argument("--no-ceilings", action="store_true", help="skip the limits of the device")
    device.add_argument("--networks", nargs="+", default=["small", "resnet9"], help="of both networks, these")
    device.add_argument("--methods", nargs="+", choices=list(DEVICE_METHODS), default=list(DEVICE_METHODS))
    device.add_argument("--executors", nargs="+", choices=DEVICE_EXECUTORS, default=DEVICE_EXECUTORS)
    device.add_argument("--images", type=int, default=IMAGES_PER_CLIENT, help="images of each client")
    options = parser.parse_args()
    if options.command != "device":
        torch.set_num_threads(1)
        retain_freed_memory()
    options.measure(options)


if __name__ == "__main__":
    main()
