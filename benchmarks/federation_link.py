"""What a round of a federation costs beyond its slowest site's computing and its link, and the bytes on the wire.

    python benchmarks/federation_link.py [--only loopback slow] [--turns 2] [--out results/federation_link]
    python benchmarks/federation_link.py --records results/federation_link.json --out OUT

FedAvg with three sites (`federation_cost.py`'s) over real processes. On loopback in two ways, in turns: with the
SuperLink's queue on the disk, and in memory, the default. Then over a link of 20 ms each way and 1 Mbit/s in each
direction for all sites together, which a proxy in this process imposes and whose bytes it counts.

With `--records` nothing is measured: the page is written from an earlier measurement.

The requests to the SuperLink are counted in the processes that send them. Its processor time and its memory are those
of `/proc`, so this needs Linux.
"""

import argparse
import asyncio
import json
import os
import shlex
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from federation_cost import SITES, Plan, seconds, trained
from federation_parity import BenchmarkProcesses, about, free_port, halfmoon, joined, machine, open_processes, save

from halfmoon.core import rng, tree
from halfmoon.federation.server.plan import load_plan
from halfmoon.federation.transport.processes import SUPERLINK, lock_path
from halfmoon.runs.factory import build_task
from halfmoon.storage import atomic_io
from halfmoon.storage.run_folder import TIMINGS

DELAY = 0.02
RATE = 1e6 / 8
"""Seconds of delay each way, and bytes a second in each direction."""

COUNTING = """\
import os, sys, time
class Counter:
    def find_spec(self, name, path=None, target=None):
        if name == "httpx":
            sys.meta_path.remove(self)
            import httpx
            send = httpx.Client.send
            def counted(self, request, **options):
                with open({log!r}, "a") as log:
                    log.write(str(time.time()) + "\\n")
                return send(self, request, **options)
            httpx.Client.send = counted
sys.meta_path.insert(0, Counter())
"""
"""A `sitecustomize` that writes the time of every request to a file."""


class Scene(NamedTuple):
    """One federation.

    Attributes:
        network: the network.
        width: its width.
        steps: local steps.
        rounds: rounds.
        slow: whether the link is slow.
        queue: where the SuperLink stores messages.
    """

    network: str
    width: int
    steps: int
    rounds: int
    slow: bool = False
    queue: str = "memory"


LOOPBACK = {
    "small, 20 steps, queue on disk": Scene("small", 16, 20, 8, queue="disk"),
    "small, 20 steps": Scene("small", 16, 20, 8),
    "ResNet-9, 20 steps, queue on disk": Scene("resnet9", 16, 20, 8, queue="disk"),
    "ResNet-9, 20 steps": Scene("resnet9", 16, 20, 8),
    "small, 1,000 steps": Scene("small", 16, 1000, 5),
}
SLOW = {
    "small, 20 steps": Scene("small", 16, 20, 6, slow=True),
    "ResNet-9, 20 steps": Scene("resnet9", 16, 20, 2, slow=True),
}


class Line:
    """One direction of the link: bytes leave one after the other at `RATE`, and arrive `DELAY` later."""

    def __init__(self) -> None:
        self.free = 0.0
        self.bytes = 0

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        clock = asyncio.get_running_loop()
        with suppress(ConnectionError, asyncio.CancelledError):
            while data := await reader.read(4096):
                self.bytes += len(data)
                self.free = max(self.free, clock.time()) + len(data) / RATE
                clock.call_at(self.free + DELAY, self._deliver, writer, data)
                await asyncio.sleep(self.free - clock.time())
            await asyncio.sleep(DELAY)
            writer.close()

    def _deliver(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        if not writer.is_closing():
            writer.write(data)


class Proxy:
    """A proxy that sites join in place of their server; `broadcast` and `upload` are its two lines."""

    def __init__(self, port: int, server: int) -> None:
        self.port = port
        self.server = server
        self.down = Line()
        self.up = Line()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, back = await asyncio.open_connection("127.0.0.1", self.server)
        except OSError:
            writer.close()
            return
        await asyncio.gather(self.up.carry(reader, back), self.down.carry(there, writer))

    async def _serve(self, started: list[Any]) -> None:
        over = asyncio.Event()
        async with await asyncio.start_server(self._connect, "127.0.0.1", self.port):
            started += [asyncio.get_running_loop(), over]
            await over.wait()

    @contextmanager
    def running(self) -> Iterator[None]:
        started: list[Any] = []
        thread = threading.Thread(target=lambda: asyncio.run(self._serve(started)), daemon=True)
        thread.start()
        try:
            yield
        finally:
            loop, over = started
            loop.call_soon_threadsafe(over.set)
            thread.join(10)


class Mark(NamedTuple):
    """What was counted when a round had ended: the time, bytes on the wire, and the SuperLink's processor time."""

    time: float
    bytes: int
    processor: float


@dataclass
class Found:
    """The measurements of a scene, of all rounds but the first.

    Attributes:
        necessary: bytes that a round has to carry.
        rounds: seconds of each round.
        computing: seconds of its slowest site's computing.
        requests: requests a round to the SuperLink, of each turn.
        processor: seconds of the processor a round of the SuperLink, of each turn.
        memory: the most megabytes of the SuperLink, of each turn.
        wire: bytes a round on the wire; None without a proxy.
    """

    necessary: int
    rounds: list[float] = field(default_factory=list)
    computing: list[float] = field(default_factory=list)
    requests: list[float] = field(default_factory=list)
    processor: list[float] = field(default_factory=list)
    memory: list[float] = field(default_factory=list)
    wire: float | None = None

    def add(self, other: "Found") -> None:
        """Add the measurements of another turn."""
        self.rounds += other.rounds
        self.computing += other.computing
        self.requests += other.requests
        self.processor += other.processor
        self.memory += other.memory


def necessary(file: Path) -> int:
    """Return the bytes that a round has to carry: the model to every site, and an update of its size back."""
    config = load_plan(file).config
    form = load_plan(file).terms.image_spec
    model = build_task(config, form).network.init(rng.generator(0, "model"))
    return 2 * SITES * tree.nbytes(model)


def read_superlink(run: Path) -> tuple[float, float]:
    """Read the SuperLink's processor time in seconds, and the most memory that it has had, in megabytes; 0 without one."""
    number = atomic_io.read(lock_path(run / "flower", SUPERLINK)) or b""
    try:
        process = Path("/proc", str(int(number)))
        times = (process / "stat").read_text().rsplit(")", 1)[1].split()[11:13]
        status = dict(line.split(":", 1) for line in (process / "status").read_text().splitlines())
        memory = int(status["VmHWM"].split()[0]) / 1e3
    except (OSError, ValueError, KeyError):  # it has not started, or has just ended
        return 0.0, 0.0
    return sum(map(int, times)) / os.sysconf("SC_CLK_TCK"), memory


def run_federation(here: BenchmarkProcesses, name: str, scene: Scene) -> Found:
    """Run one federation and measure all of its rounds but the first."""
    folder = here.folder / f"{name}-{len(list(here.folder.iterdir()))}"
    folder.mkdir()
    requests_log = folder / "requests"
    requests_log.touch()
    (folder / "sitecustomize.py").write_text(COUNTING.format(log=str(requests_log)))
    paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    here = replace(here, more={**here.more, "PYTHONPATH": os.pathsep.join(paths)})
    plan = Plan(scene.network, scene.width, scene.rounds, scene.steps, folder)
    file = plan.sites(here)
    run = folder / "served"
    port = free_port()
    proxy = Proxy(free_port(), port)
    marks: dict[int, Mark] = {}
    memory = [0.0]
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.05):
            finished = len(atomic_io.read_rows(run / TIMINGS)) if (run / TIMINGS).exists() else 0
            processor, most = read_superlink(run)
            memory[0] = max(memory[0], most)
            if finished not in marks:
                marks[finished] = Mark(time.time(), proxy.down.bytes + proxy.up.bytes, processor)

    watcher = threading.Thread(target=watch)
    with proxy.running(), joined(here, file.parent, proxy.port if scene.slow else port):
        watcher.start()
        try:
            here.run(*halfmoon("serve", file, "--run-dir", run, "--port", str(port), "--queue", scene.queue))
        finally:
            over.set()
            watcher.join()
    here.clear()
    slowest, _ = trained(file.parent, scene.rounds)
    found = Found(necessary(file), seconds(run)[1:], slowest[1:], memory=memory)
    last = max(marks)
    if 1 in marks and last > 1:
        first = marks[1]
        final = marks[last]
        times = [float(line) for line in requests_log.read_text().splitlines()]
        found.requests.append(sum(first.time <= each < final.time for each in times) / (last - 1))
        found.processor.append((final.processor - first.processor) / (last - 1))
        if scene.slow:
            found.wire = (final.bytes - first.bytes) / (last - 1)
    return found


LOOPBACK_HEAD = "| | s a round | slowest site's computing, s | requests a round | SuperLink's processor, s a round | its memory, MB |"
SLOW_HEAD = "| | s a round | slowest site's computing, s | ideal link, s | ratio to both | MB a round | ratio to the MB needed |"


def loopback_row(name: str, found: Found) -> str:
    """Return a line of the table on loopback."""
    spread = f"{statistics.median(found.rounds):.2f} ({min(found.rounds):.2f} to {max(found.rounds):.2f})"
    cells = [name, spread, f"{statistics.median(found.computing):.1f}"]
    for values, digits in ((found.requests, 0), (found.processor, 2), (found.memory, 0)):
        cells.append(f"{statistics.median(values):.{digits}f}" if values else "")
    return f"| {' | '.join(cells)} |"


def slow_row(name: str, found: Found) -> str:
    """Return a line of the table on the slow link."""
    whole = statistics.median(found.rounds)
    computing = statistics.median(found.computing)
    link = found.necessary / RATE + 2 * DELAY
    wire = "" if found.wire is None else f"{found.wire / 1e6:.3f}"
    share = "" if found.wire is None else f"{found.wire / found.necessary:.3f}"
    spread = f"{whole:.2f} ({min(found.rounds):.2f} to {max(found.rounds):.2f})"
    return f"| {name} | {spread} | {computing:.1f} | {link:.1f} | {whole / (computing + link):.2f} | {wire} | {share} |"


def page(found: dict[str, dict[str, Found]], facts: dict[str, Any]) -> str:
    """Return the results as a page."""
    titles = {"loopback": "On loopback", "slow": "20 ms each way, 1 Mbit/s in each direction"}
    lines = ["# The overhead of a round over the network", "", f"    {facts['command']}", ""]
    load = " to ".join(f"{value:.0f}" for value in facts["load"])
    lines += [f"{about(facts)} Load of the machine: {load}. Medians and ranges of all rounds but the first.", ""]
    for way, scenes in found.items():
        head, row = (LOOPBACK_HEAD, loopback_row) if way == "loopback" else (SLOW_HEAD, slow_row)
        lines += [f"## {titles[way]}", "", head, "|---" * (head.count("|") - 1) + "|"]
        lines += [*(row(name, each) for name, each in scenes.items()), ""]
    return "\n".join(lines)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run the federations; return the record: what was measured, on which machine, by which command."""
    before = os.getloadavg()[0]
    found: dict[str, dict[str, Found]] = {}
    with open_processes() as here:
        here = replace(here, more={"FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "1"})
        for way in options.only:
            for turn in range(options.turns if way == "loopback" else 1):
                for name, scene in (LOOPBACK if way == "loopback" else SLOW).items():
                    result = run_federation(here, f"{scene[0]}-{turn}", Scene(*scene))
                    sys.stderr.write(f"{way}, {name}: {result}\n")
                    known = found.setdefault(way, {})
                    if name in known:
                        known[name].add(result)
                    else:
                        known[name] = result
    command = shlex.join(["python", f"benchmarks/{Path(__file__).name}", *sys.argv[1:]])
    rows = {way: {name: asdict(each) for name, each in scenes.items()} for way, scenes in found.items()}
    return {**machine(), "command": command, "load": [before, os.getloadavg()[0]], "found": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description="What a round costs beyond its slowest site and its link.")
    parser.add_argument("--only", nargs="+", choices=("loopback", "slow"), default=["loopback", "slow"])
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("results/federation_link"))
    parser.add_argument("--records", type=Path, metavar="FILE", help="write the page of this .json, measure nothing")
    options = parser.parse_args()
    torch.set_num_threads(1)
    record = json.loads(options.records.read_text()) if options.records else measure(options)
    found = {way: {name: Found(**each) for name, each in rows.items()} for way, rows in record["found"].items()}
    text = page(found, record)
    save(options.out, text, record)
    sys.stdout.write(text)


if __name__ == "__main__":
    main()
