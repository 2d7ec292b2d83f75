"""What a round of a federation costs beyond its slowest site's computing and its link, and the bytes on the wire.

    python benchmarks/federation_link.py [--only loopback slow] [--turns 2] [--out results/federation_link]

FedAvg with three sites (`federation_cost.py`'s) over real processes. On loopback with halfmoon's waits for what is
under way and with Flower's own, in turns; then over a link of 20 ms each way and 1 Mbit/s in each direction for all
sites together, which a proxy in this process imposes and whose bytes it counts.
"""

import argparse
import asyncio
import os
import shlex
import statistics
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from federation_cost import SITES, Plan, seconds, trained
from federation_parity import Place, about, free_port, halfmoon, joined, machine, place, save

from halfmoon.core import rng, tree
from halfmoon.federation.server.plan import load_plan
from halfmoon.runs.factory import build_task
from halfmoon.storage import atomic_io
from halfmoon.storage.run_folder import TIMINGS

DELAY, RATE = 0.02, 1e6 / 8
"""Seconds of delay each way, and bytes a second in each direction."""

FLOWERS_WAITS = """\
from halfmoon.federation.transport import internals
def waits(object_ids, pull_object_fn):
    from flwr.supercore.inflatable.inflatable_utils import pull_objects
    return pull_objects(list(dict.fromkeys(object_ids)), pull_object_fn)
internals.pull_soon = waits
"""
"""A `sitecustomize` that puts Flower's own waits in place of ours."""


class Scene(NamedTuple):
    """What is played: a network and its width, local steps, rounds, and whether the link is slow or Flower waits."""

    network: str
    width: int
    steps: int
    rounds: int
    slow: bool = False
    flowers: bool = False


LOOPBACK = {
    "small, 20 steps, Flower's waits": Scene("small", 16, 20, 8, flowers=True),
    "small, 20 steps": Scene("small", 16, 20, 8),
    "small, 1,000 steps": Scene("small", 16, 1000, 5),
}
SLOW = {
    "small, 20 steps": Scene("small", 16, 20, 6, slow=True),
    "ResNet-9, 20 steps": Scene("resnet9", 16, 20, 2, slow=True),
}


class Line:
    """One direction of the link: bytes leave one after the other at `RATE`, and arrive `DELAY` later."""

    def __init__(self) -> None:
        self.free, self.bytes = 0.0, 0

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
        self.port, self.server, self.down, self.up = port, server, Line(), Line()

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


@dataclass
class Found:
    """Seconds of rounds and of their slowest site's computing; bytes a round on the wire, None without a proxy."""

    necessary: int
    rounds: list[float] = field(default_factory=list)
    computing: list[float] = field(default_factory=list)
    wire: float | None = None

    def add(self, other: "Found") -> None:
        """Take in another turn."""
        self.rounds += other.rounds
        self.computing += other.computing


def necessary(file: Path) -> int:
    """Return the bytes that a round has to carry: the model to every site, and an update of its size back."""
    config, form = load_plan(file).config, load_plan(file).terms.image_spec
    model = build_task(config, form).network.init(rng.generator(0, "model"))
    return 2 * SITES * tree.nbytes(model)


def play(here: Place, name: str, scene: Scene) -> Found:
    """Play one federation; all rounds count but the first."""
    folder = here.folder / f"{name}-{len(list(here.folder.iterdir()))}"
    folder.mkdir()
    if scene.flowers:
        (folder / "sitecustomize.py").write_text(FLOWERS_WAITS)
        paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
        here = replace(here, more={**here.more, "PYTHONPATH": os.pathsep.join(paths)})
    plan = Plan(scene.network, scene.width, scene.rounds, scene.steps, folder)
    file = plan.sites(here)
    run, port = folder / "served", free_port()
    proxy = Proxy(free_port(), port)
    marks: dict[int, int] = {}
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.05):
            played = len(atomic_io.read_rows(run / TIMINGS)) if (run / TIMINGS).exists() else 0
            marks.setdefault(played, proxy.down.bytes + proxy.up.bytes)

    watcher = threading.Thread(target=watch)
    with proxy.running(), joined(here, file.parent, proxy.port if scene.slow else port):
        watcher.start()
        try:
            here.run(*halfmoon("serve", file, "--run-dir", run, "--port", str(port)))
        finally:
            over.set()
            watcher.join()
    here.clear()
    slowest, _ = trained(file.parent, scene.rounds)
    found = Found(necessary(file), seconds(run)[1:], slowest[1:])
    last = max(marks)
    if scene.slow and 1 in marks and last > 1:
        found.wire = (marks[last] - marks[1]) / (last - 1)
    return found


HEAD = "| | s a round | slowest site's computing, s | link at best, s | times both | MB a round | times those needed |"


def row(name: str, scene: Scene, found: Found) -> str:
    """Return a line of the page's table."""
    whole, computing = statistics.median(found.rounds), statistics.median(found.computing)
    link = found.necessary / RATE + 2 * DELAY if scene.slow else 0.0
    wire = "" if found.wire is None else f"{found.wire / 1e6:.3f}"
    share = "" if found.wire is None else f"{found.wire / found.necessary:.3f}"
    spread = f"{whole:.2f} ({min(found.rounds):.2f} to {max(found.rounds):.2f})"
    times = f"{whole / (computing + link):.2f}" if computing + link else ""  # logs say tenths of seconds
    return f"| {name} | {spread} | {computing:.1f} | {link:.1f} | {times} | {wire} | {share} |"


def page(found: dict[str, dict[str, Found]], facts: dict[str, Any]) -> str:
    """Return the results as a page."""
    titles = {"loopback": "On loopback", "slow": "20 ms each way, 1 Mbit/s in each direction"}
    lines = ["# A round beyond its slowest site and its link", "", f"    {facts['command']}", ""]
    load = " to ".join(f"{value:.0f}" for value in facts["load"])
    lines += [f"{about(facts)} Load of the machine: {load}. Medians and ranges of all rounds but the first.", ""]
    for way, scenes in found.items():
        lines += [f"## {titles[way]}", "", HEAD, "|---|---|---|---|---|---|---|"]
        table = LOOPBACK if way == "loopback" else SLOW
        lines += [*(row(name, Scene(*table[name]), each) for name, each in scenes.items()), ""]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="What a round costs beyond its slowest site and its link.")
    parser.add_argument("--only", nargs="+", choices=("loopback", "slow"), default=["loopback", "slow"])
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("results/federation_link"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    before = os.getloadavg()[0]
    found: dict[str, dict[str, Found]] = {}
    with place() as here:
        here = replace(here, more={"FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "1"})
        for way in options.only:
            for turn in range(options.turns if way == "loopback" else 1):
                for name, scene in (LOOPBACK if way == "loopback" else SLOW).items():
                    result = play(here, f"{scene[0]}-{turn}", Scene(*scene))
                    sys.stderr.write(f"{way}, {name}: {result}\n")
                    known = found.setdefault(way, {})
                    if name in known:
                        known[name].add(result)
                    else:
                        known[name] = result
    command = shlex.join(["python", f"benchmarks/{Path(__file__).name}", *sys.argv[1:]])
    facts = {**machine(), "command": command, "load": [before, os.getloadavg()[0]]}
    words = page(found, facts)
    rows = {way: {name: asdict(each) for name, each in scenes.items()} for way, scenes in found.items()}
    save(options.out, words, {**facts, "found": rows})
    sys.stdout.write(words)


if __name__ == "__main__":
    main()
