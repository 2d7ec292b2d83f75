"""Disturb a federation of real processes for a long time, and observe its memory and open files.

    python benchmarks/soak.py [--minutes 90] [--rounds 500] [--seconds 6] [--out results/soak]

Five sites. Every minute or two a process is killed with SIGKILL (and its command restarted), the network to a site is
interrupted for seconds to minutes, a process of a site is paused, or the clock of a site is moved by an hour. One site is
slow: it sleeps `--seconds` before each reply. Memory and open files of every process are read from /proc every ten seconds.
At the end the weights are compared with the simulator's. Writes .json.gz, .md and .png. Only Linux.
"""

import argparse
import contextlib
import json
import os
import random
import select
import signal
import socket
import socketserver
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "results"))

import disturbed
import matplotlib
import records
from disturbed import Federation
from federation_faults import machine
from federation_parity import digest, export, free_port, written

from halfmoon.config import schema as settings
from halfmoon.federation.transport.processes import SERVER_APP, SUPERLINK, SUPERNODE, WORKER, interruptible
from halfmoon.runs import runner

matplotlib.use("agg")
from matplotlib import pyplot as plt

SITES = tuple(f"site-{number:02}" for number in range(5))
SLOW = SITES[1]
SHIFTED = SITES[2]
EXPORT = ("site", "export", "digits", "--sites", str(len(SITES)), "--labels-per-class", "4")
OPTIONS = {
    "method": "fedavg-soft-labels", "steps": 4, "labeled_batch": 8, "unlabeled_batch": 16, "width": 8,
    "aggregation": "cosine",
}  # fmt: skip
RULES = {"min_replies": len(SITES), "absence": 900.0, "attempts": 1000}
PAUSE = (45.0, 100.0)
SAMPLE = 10.0
"""Seconds between two disturbances, and between two samples of memory."""


class Link(socketserver.ThreadingTCPServer):
    """A port that forwards to the server, unless it is cut."""

    allow_reuse_address = daemon_threads = True
    cut = False

    def __init__(self, port: int, server: int) -> None:
        self.server_port = server
        super().__init__(("127.0.0.1", port), Relay)
        threading.Thread(target=self.serve_forever, daemon=True).start()


class Relay(socketserver.BaseRequestHandler):
    """One connection of a link."""

    server: Link

    def handle(self) -> None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.server.server_port)) as other:
            ways = {self.request: other, other: self.request}
            while not self.server.cut:
                for source in select.select(list(ways), [], [], 0.2)[0]:
                    data = source.recv(2**16)
                    if not data:
                        return
                    ways[source].sendall(data)


class Soak(Federation):
    """A federation whose sites reach the server by separate links."""

    def __init__(self, folder: Path, seconds: float) -> None:
        super().__init__(folder, sites=SITES)
        self.seconds = seconds
        self.links = {site: Link(free_port(), self.port) for site in SITES}
        self.clock = folder / "clock"
        self.clock.write_text("0")

    def start(self, who: str) -> None:
        port = self.port
        self.port = self.links[who].server_address[1] if who in self.links else self.port
        paths = [str(Path(__file__).parent / "misbehaving"), os.environ.get("PYTHONPATH", "")]
        spoilt = {"MISBEHAVE": "slow", "MISBEHAVE_SECONDS": str(self.seconds)} if who == SLOW else {}
        spoilt = {"MISBEHAVE": "clock", "MISBEHAVE_CLOCK": str(self.clock)} if who == SHIFTED else spoilt
        before = dict(os.environ)
        os.environ.update(spoilt, **({"PYTHONPATH": os.pathsep.join(filter(None, paths))} if spoilt else {}))
        try:
            super().start(who)
        finally:
            os.environ.clear()
            os.environ.update(before)
            self.port = port

    def processes(self) -> Iterator[tuple[str, int]]:
        """Yield the role and the id of every running process."""
        for who, process in self.running.items():
            if process.poll() is None:
                yield f"{who}: command", process.pid
            for script in (SUPERLINK, SERVER_APP) if who == "serve" else (SUPERNODE, WORKER):
                number = self.number(who, script)
                if number:
                    yield f"{who}: {script}", number


def disturb(fed: Soak, draw: random.Random) -> str:
    """Disturb the federation once, and return a description."""
    who = draw.choice(SITES)
    kind = draw.choice(("kill", "kill", "kill", "cut", "stand", "clock"))
    if kind == "cut":
        seconds = draw.choice((3, 10, 30, 90))
        fed.links[who].cut = True
        time.sleep(seconds)
        fed.links[who].cut = False
        return f"network of {who} cut for {seconds} s"
    if kind == "clock":
        hours = draw.choice((-1, 0, 1))
        fed.clock.write_text(str(3600 * hours))
        return f"clock of {SHIFTED} moved to {hours:+} h"
    processes = [(who, WORKER), (who, SUPERNODE), (who, ""), ("serve", ""), ("serve", SERVER_APP), ("serve", SUPERLINK)]
    who, script = draw.choice(processes[:2] if kind == "stand" else processes)
    number = fed.number(who, script) if script else fed.running[who].pid
    if not number:
        return f"nothing: {script} of {who} was not running"
    if kind == "stand":
        seconds = draw.randint(5, 20)
        os.kill(number, signal.SIGSTOP)
        time.sleep(seconds)
        with contextlib.suppress(ProcessLookupError):
            os.kill(number, signal.SIGCONT)
        return f"{script} of {who} stood still for {seconds} s"
    with contextlib.suppress(ProcessLookupError):
        os.kill(number, signal.SIGKILL)
    if not script:
        fed.running[who].wait()
        fed.start(who)
    return f"kill -9 of {who}'s {script or 'command'}"


def sample(fed: Soak, start: float) -> list[dict[str, Any]]:
    """Return memory (resident bytes) and open files of every process."""
    rows: list[dict[str, Any]] = []
    for role, number in fed.processes():
        with contextlib.suppress(OSError, IndexError, ValueError):
            pages = int(Path(f"/proc/{number}/statm").read_text().split()[1])
            files = len(os.listdir(f"/proc/{number}/fd"))
            memory = pages * os.sysconf("SC_PAGE_SIZE")
            at = round(time.monotonic() - start, 1)
            rows.append({"at": at, "role": role, "process": number, "memory": memory, "files": files})
    return rows


def run_disturbed(fed: Soak, minutes: float, seed: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Disturb a federation until it has finished or `minutes` are over; return the samples and the disturbances."""
    for who in ("serve", *SITES):
        fed.start(who)
    start = time.monotonic()
    samples = []
    events = []
    stop = threading.Event()

    def watch() -> None:
        while not stop.wait(SAMPLE):
            samples.extend(sample(fed, start))

    watcher = threading.Thread(target=watch)
    watcher.start()
    draw = random.Random(seed)
    try:
        fed.until(lambda: "round 1 of" in fed.log(), "the first round")
        while time.monotonic() - start < 60 * minutes and not finished(fed):
            time.sleep(min(draw.uniform(*PAUSE), max(1.0, 6 * minutes)))
            if not finished(fed):
                events.append({"at": round(time.monotonic() - start, 1), "what": disturb(fed, draw)})
                sys.stderr.write(f"{events[-1]['at']:6.0f} s  {events[-1]['what']}\n")
        disturbed.PATIENCE = 3600.0
        fed.until(lambda: finished(fed), "the end")
        fed.until(lambda: fed.running["serve"].poll() is not None, "the server's end")
    finally:
        stop.set()
        watcher.join()
        fed.end()
    return samples, events


def finished(fed: Soak) -> bool:
    return "finished: the model is" in fed.log()


def medians(samples: list[dict[str, Any]], what: str) -> dict[str, tuple[float, float]]:
    """Return for each role the medians of the middle and of the last third of its longest-running process."""
    found: dict[str, tuple[float, float]] = {}
    for role in dict.fromkeys(row["role"] for row in samples):
        rows = [row for row in samples if row["role"] == role]
        lives = [[row[what] for row in rows if row["process"] == each] for each in {row["process"] for row in rows}]
        life = max(lives, key=len)
        third = len(life) // 3
        if third >= 3:
            found[role] = statistics.median(life[third : 2 * third]), statistics.median(life[2 * third :])
    return found


def thinned(samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one sample a minute of each process."""
    return list({(row["process"], row["at"] // 60): row for row in samples}.values())


def chart(samples: list[dict[str, Any]], events: list[dict[str, Any]], path: Path) -> None:
    """Draw memory and open files of every role over the minutes."""
    figure, axes = plt.subplots(2, 1, figsize=(9, 7), sharex=True, layout="constrained")
    for axis, what, unit in zip(axes, ("memory", "files"), (2**20, 1), strict=True):
        for role in dict.fromkeys(row["role"] for row in samples):
            rows = [row for row in samples if row["role"] == role]
            color = "tab:red" if role.startswith("serve") else "tab:blue" if WORKER in role else "tab:gray"
            axis.plot([r["at"] / 60 for r in rows], [r[what] / unit for r in rows], ".", ms=2, color=color)
        for event in events:
            axis.axvline(event["at"] / 60, color="0.85", lw=0.6, zorder=0)
        axis.set_ylim(bottom=0)
        axis.set_ylabel("memory (MiB)" if what == "memory" else "open files")
    axes[0].set_title("server (red), sites' workers (blue), nodes and commands (gray); lines: disturbances", fontsize=9)
    axes[1].set_xlabel("minutes")
    figure.savefig(path, dpi=110)


def format_page(record: dict[str, Any]) -> str:
    """Format the page of results."""
    machine_ = record["machine"]
    memory = record["memory"]
    files = record["files"]
    largest = max((last / middle - 1 for middle, last in memory.values()), default=0.0)
    kinds: dict[str, int] = {}
    for event in record["events"]:
        kind = next((each for each in ("kill", "network", "stood still", "clock") if each in event["what"]), "nothing")
        kinds[kind] = kinds.get(kind, 0) + 1
    same = "the same bytes as" if record["weights"] == record["straight"] else "OTHER bytes than"
    rows = "\n".join(
        f"| {role} | {middle / 2**20:.1f} | {last / 2**20:.1f} | {files[role][0]:g} | {files[role][1]:g} |"
        for role, (middle, last) in memory.items()
    )
    names = {
        "clock": "moved clocks",
        "kill": "kills",
        "network": "network cuts",
        "stood still": "pauses",
        "nothing": "others",
    }
    listed = ", ".join(f"{count} {names[kind]}" for kind, count in sorted(kinds.items()))
    return f"""# A federation that is disturbed for a long time

A federation of five sites and a server finished {record["rounds"]} rounds in {record["minutes"]} minutes, in spite of
{len(record["events"])} disturbances. The final model has {same} the simulator's, and no process uses more than {largest:.1%} more memory
at the end than in the middle.

    {record["command"]}

![memory and open files of every process](soak.png)

The disturbances were {listed}:

- Kill: SIGKILL of a process. A command that was killed is restarted.
- Network cut: for seconds to minutes, all connections of a site's link are closed and new ones refused.
- Pause: a process of a site is stopped for a while.
- Moved clock: `time.time` in the processes of one site changes by an hour.

One site also sleeps before each reply. The table has the median memory and open files in the middle third and in the last third of each
process's longest lifetime.

| process | MiB, middle third | last third | open files, middle third | last third |
|---|--:|--:|--:|--:|
{rows}

{machine_["cores"]} cores of an {machine_["cpu"]}, shared with other work (load {machine_["load"][0]}); Python {machine_["python"]},
torch {machine_["torch"]}, Flower {machine_["flwr"]}.
[soak.json.gz](soak.json.gz) has a sample a minute and all events.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description="Disturb a federation for a long time, and watch its memory.")
    parser.add_argument("--minutes", type=float, default=90)
    parser.add_argument("--rounds", type=int, default=500)
    parser.add_argument("--seconds", type=float, default=6.0, help="that the slow site sleeps before a reply")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("results/soak"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="halfmoon-soak-") as name, interruptible():
        folder = Path(name)
        export(*EXPORT, out=folder / "sites")
        file = folder / "sites" / "federation.toml"
        straight = folder / "straight"
        written(folder / "sites", {**OPTIONS, "rounds": options.rounds})
        file.write_text(file.read_text() + "".join(f"{name} = {value}\n" for name, value in RULES.items()))
        start = time.monotonic()
        fed = Soak(folder, options.seconds)
        samples, events = run_disturbed(fed, options.minutes, options.seed)
        runner.run_in_folder(settings.resolve(settings.load_file(file), {}), straight)
        record: dict[str, Any] = {
            "command": " ".join(["python benchmarks/soak.py", *sys.argv[1:]]),
            "machine": machine(), "minutes": round((time.monotonic() - start) / 60), "rounds": options.rounds,
            "weights": digest(fed.run), "straight": digest(straight), "events": events,
            "memory": medians(samples, "memory"), "files": medians(samples, "files"), "samples": thinned(samples),
        }  # fmt: skip
    chart(samples, events, options.out.with_suffix(".png"))
    records.write_text(options.out.with_suffix(".json.gz"), json.dumps(record) + "\n")
    options.out.with_suffix(".md").write_text(format_page(record))
    if record["weights"] != record["straight"]:
        sys.exit("The model is not that of the simulator.")


if __name__ == "__main__":
    main()
