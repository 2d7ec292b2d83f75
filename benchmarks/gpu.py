"""Measure rounds, memory and copies on a GPU (or a processor), by network, method and executor.

    python benchmarks/gpu.py [--device cuda] [--rounds 10] [--out results/gpu.md]

First the ceilings of the device: a large copy and a large matrix product in float32, TF32 and bfloat16. Then runs on
random images of 32 x 32 pixels, ten clients of which five train in a round, with batches of 10 labeled and 90 unlabeled
images, as FedDure's Table 1 at full size has them. Each line is the median of the rounds after the first, in which
cuDNN and the allocator warm up; calls, launches, copies and waits are those of a second run of two rounds.
"""

import argparse
import json
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

import halfmoon

NETWORKS = {"small, width 16": ("small", 16), "ResNet-9, width 64": ("resnet9", 64)}
METHODS = {"fedavg": {}, "fedavg-fixmatch": {}, "feddure": {"preset": "paper"}}
EXECUTORS = ("loop", "vmap")
CLIENTS = 10
COHORT = 5
IMAGES_PER_CLIENT = 500
MATRIX_SIDE = 8192
COPY_BYTES = 2**30


def wait(device: torch.device) -> None:
    """Wait until the device has done all that it was asked."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def median_seconds(call: Callable[[], object], device: torch.device, repeats: int = 10) -> float:
    """Return the median time of a call after two that warm up."""
    times = []
    for repeat in range(repeats + 2):
        wait(device)
        start = time.perf_counter()
        call()
        wait(device)
        if repeat >= 2:
            times.append(time.perf_counter() - start)
    return statistics.median(times)


def measure_ceilings(device: torch.device) -> dict[str, float]:
    """Return GB/s of a copy (bytes read and written) and TFLOP/s of matrix products."""
    source = torch.randint(0, 255, (COPY_BYTES,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    rates = {"copy GB/s": 2 * COPY_BYTES / median_seconds(lambda: target.copy_(source), device) / 1e9}
    products = 2 * MATRIX_SIDE**3
    a = torch.randn(MATRIX_SIDE, MATRIX_SIDE, device=device)
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


def make_images(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return random images (N, 32, 32, 3) uint8, their classes, and the client of each."""
    generator = np.random.default_rng(seed)
    n = CLIENTS * IMAGES_PER_CLIENT
    images = generator.integers(0, 256, (n, 32, 32, 3), dtype=np.uint8)
    labels = np.tile(np.arange(10), n // 10)
    labels[generator.random(n) < 0.9] = -1
    labels[: 10 * CLIENTS] = np.tile(np.arange(10), CLIENTS)
    clients = np.arange(n) % CLIENTS
    return images, labels, clients


def run_rounds(method: str, network: str, executor: str, rounds: int, device: str, folder: Path) -> dict[str, float]:
    """Train a few rounds and return what they took."""
    kind, width = NETWORKS[network]
    images, labels, clients = make_images(seed=0)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    options = dict(
        method=method, data=(images, labels), clients=clients, network=kind, width=width, cohort=COHORT, rounds=rounds,
        executor=executor, device=device, labeled_batch=10, unlabeled_batch=90, epochs=1, optimizer="adam", lr=5e-4,
        statistics="joint", budget="none", evaluate_every=rounds, checkpoint_every=rounds, seed=0, **METHODS[method],
    )  # fmt: skip
    halfmoon.run(**options, test=(images[:100], np.arange(100) % 10), run_dir=folder, progress=False)
    seconds = [json.loads(line)["seconds"] for line in (folder / "timings.jsonl").read_text().splitlines()]
    figures = {"seconds a round": statistics.median(seconds[1:])}
    if device == "cuda":
        figures["peak MB"] = torch.cuda.max_memory_allocated() / 1e6
    return figures


def count_kernels(method: str, network: str, executor: str, device: str, folder: Path) -> dict[str, int]:
    """Count the kernels and the copies from the processor of one run of one round."""
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device == "cuda" else [])
    with profile(activities=activities) as profiled:
        run_rounds(method, network, executor, 2, device, folder)
    names = [event.name for event in profiled.events()]
    if device != "cuda":
        return {"calls": sum(name.startswith("aten::") for name in names)}
    return {
        "kernel launches": sum(name.startswith("cudaLaunchKernel") for name in names),
        "copies to the GPU": sum(name.startswith("Memcpy HtoD") for name in names),
        "waits for the GPU": sum(name in ("cudaStreamSynchronize", "cudaDeviceSynchronize") for name in names),
    }


def describe_machine(device: torch.device) -> str:
    """Name the device and the versions."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return f"{name}; Python {platform.python_version()}, torch {torch.__version__}, CUDA {torch.version.cuda}"


def main() -> None:
    """Measure and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--out", type=Path, help="the page; without it, only the terminal")
    parser.add_argument("--no-ceilings", action="store_true")
    given = parser.parse_args()
    device = torch.device(given.device)
    lines = ["# Rounds on this device", "", f"    python benchmarks/gpu.py {' '.join(sys.argv[1:])}", ""]
    lines += [describe_machine(device), ""]
    if not given.no_ceilings:
        lines += ["| " + " | ".join(rates := measure_ceilings(device)) + " |", "|" + "--:|" * len(rates)]
        lines += ["| " + " | ".join(f"{rate:.1f}" for rate in rates.values()) + " |", ""]
    header_written = False
    for network in NETWORKS:
        for method in METHODS:
            for executor in EXECUTORS:
                with tempfile.TemporaryDirectory() as folder:
                    figures = run_rounds(method, network, executor, given.rounds, given.device, Path(folder) / "run")
                    figures |= count_kernels(method, network, executor, given.device, Path(folder) / "profiled")
                if not header_written:
                    lines += ["| network | method | executor | " + " | ".join(figures) + " |"]
                    lines += ["|---|---|---|" + "--:|" * len(figures)]
                    header_written = True
                values = [f"{value:.3f}" if isinstance(value, float) else f"{value:,}" for value in figures.values()]
                lines += [f"| {network} | `{method}` | {executor} | " + " | ".join(values) + " |"]
                print(lines[-1], flush=True)
    lines += ["", "Calls, launches, copies and waits are those of a run of two rounds with its evaluation.", ""]
    text = "\n".join(lines)
    if given.out:
        given.out.write_text(text)
    else:
        print(text)


if __name__ == "__main__":
    main()
