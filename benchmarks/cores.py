"""What a round of many clients gains from more cores: measured in processor time, and counted on from there.

    python benchmarks/cores.py [--cohort 10] [--steps 8] [--turns 5] [--cores 2 4 8 10 16]

FixMatch on ResNet-9 of width 16, 10 + 10 images of 32x32 a step, one thread a process. A round with worker processes
has a part that no core but one can do (drawing the cohort, packing what is sent, unpacking and adding up what comes
back), and the clients, of which each core trains the next. Both are measured in processor seconds, which a busy machine
disturbs less than the clock: `serial` is what the process that asks spends, `client` what the workers spend on one
client. With n cores a round then takes serial + ceil(cohort / n) * client at most (some of the serial part is done
while clients train), against what one process takes alone. What the count leaves out: cores that share a memory bus, a
cache or a clock rate. So the two workers that run here are timed by the clock as well, beside the same count.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from peer_rounds import ours
from peer_side import processor

from halfmoon.core.memory import retain_freed_memory
from halfmoon.engine.executors.processes import ProcessExecutor


def timed(play: Callable[[], object]) -> tuple[float, float, float]:
    """Return the seconds of a round: of this process, of its children, and of the clock."""
    own, everything, clock = time.process_time(), processor(), time.perf_counter()
    play()
    wall, spent = time.perf_counter() - clock, time.process_time() - own
    return spent, processor() - everything - spent, wall


def megabytes(process: int) -> int:
    """Return the memory of a process, of pages that several share its part; 0 where the system does not say."""
    file = Path(f"/proc/{process}/smaps_rollup")
    lines = file.read_text().splitlines() if file.exists() else []
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) // 1000


def main() -> None:
    """Print what was measured, and what it says of more cores."""
    parser = argparse.ArgumentParser(description="What a round of many clients gains from more cores")
    parser.add_argument("--cohort", type=int, default=10)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--cores", type=int, nargs="+", default=[2, 4, 8, 10, 16])
    given = parser.parse_args()
    torch.set_num_threads(1)
    retain_freed_memory()
    pool = ProcessExecutor(2)
    alone = ours("large", "fixmatch", given.cohort, "loop", steps=given.steps)
    together = ours("large", "fixmatch", given.cohort, "loop", pool, given.steps)
    found: list[tuple[float, float, float, float]] = []
    for turn in range(given.turns + 1):
        one, _, clock = timed(alone)
        serial, workers, both = timed(together)
        if turn:  # the first starts the processes
            found.append((one, serial, workers / given.cohort, clock / both))
    memory = [megabytes(process) for process in (os.getpid(), *((pool._pool and pool._pool._processes) or ()))]
    pool.close()
    one, serial, client, faster = (statistics.median(column) for column in zip(*found, strict=True))
    print(f"one process {one:.2f} s, serial {serial:.3f} s, a client {client:.3f} s (load {os.getloadavg()[0]:.1f})")
    print(f"two workers by the clock: {faster:.2f} times as fast")
    print("MB of this process and of each worker, shared pages by part:", *memory)
    for cores in given.cores:
        speed = one / (serial + -(-given.cohort // cores) * client)
        print(f"{cores:>3} cores: {speed:.2f} times, {speed / min(given.cohort, cores):.2f} of min(cohort, cores)")


if __name__ == "__main__":
    main()
