"""What a round of a federation costs: seconds and bytes next to the simulator and stock Flower, and halfmoon's share of it.

    OMP_NUM_THREADS=1 python benchmarks/federation_cost.py [--rounds 8] [--steps 20] [--out results/federation_cost]

FedAvg with three sites and only labeled images, in one run one after the other: halfmoon (i) in the simulator, (ii)
over the in-process grid, (iii) over real processes on loopback, and (iv) stock Flower (`federation_stock.py`: Flower's
FedAvg, plain PyTorch) over real processes on loopback. The same networks, images, numbers of local steps, batch and
optimizer, without evaluations. Of the rounds all count but the first and the last (the simulator evaluates only
the last). Bytes are those of the arrays in requests and replies, and the network traffic of a run by `flwr ls`.

halfmoon's share is the time of a round over real processes beyond the computing of its slowest site, which the sites'
logs have to a tenth of a second.
"""

import argparse
import json
import os
import re
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from federation_parity import (
    BenchmarkProcesses,
    about,
    connection,
    export,
    free_port,
    halfmoon,
    joined,
    machine,
    names,
    open_processes,
    project,
    save,
    script,
    superlink,
    wait,
    written,
)
from federation_stock import NETWORKS

from halfmoon.config import schema as settings
from halfmoon.core import rng, tree
from halfmoon.federation.server.plan import load_plan
from halfmoon.federation.transport import client_app as clients
from halfmoon.federation.transport import local
from halfmoon.federation.transport.contact import Address
from halfmoon.federation.transport.records import unwrap_message
from halfmoon.runs import runner
from halfmoon.runs.factory import build_task
from halfmoon.sites.folders import prepare_site
from halfmoon.storage import atomic_io
from halfmoon.storage.run_folder import TIMINGS

MODELS = {"small, width 16": ("small", 16), "ResNet-9, width 16": ("resnet9", 16)}
SITES = 3
BATCH = 10
LR = 0.05
SIDE = 16
STOCK = ("federation_stock:server", "federation_stock:client")


@dataclass(frozen=True)
class Plan:
    """The size of a federation: network and width, rounds, local steps; `folder` has the files of one model."""

    network: str
    width: int
    rounds: int
    steps: int
    folder: Path

    def sites(self, here: BenchmarkProcesses) -> Path:
        """Write three sites whose images are decoded; return the federation's file."""
        sites = self.folder / "sites"
        if not sites.exists():
            options = ("--sites", str(SITES), "--labels-per-class", "8", "--image-size", str(SIDE))
            export("site", "export", "digits", *options, out=sites)
            for name in names(sites):
                found = prepare_site(sites / name, (SIDE, SIDE), 1, sites / name / ".halfmoon").site
                assert found.images is not None
                rows = np.flatnonzero(found.labels >= 0)
                images = np.ascontiguousarray(np.array(found.images[rows]).transpose(0, 3, 1, 2))
                np.savez(sites / f"{name}.npz", images=images, labels=found.labels[rows])
            text = (sites / "federation.toml").read_text()
            # Without test images no round is evaluated.
            lines = [line for line in text.splitlines() if line.split(" = ")[0] != "test"]
            (sites / "federation.toml").write_text("\n".join(lines) + "\n")
        options = {
            "method": "fedavg", "rounds": self.rounds, "cohort": SITES, "steps": self.steps, "labeled_batch": BATCH,
            "budget": "none", "labeled_view": "plain", "optimizer": "sgd", "lr": LR, "network": self.network,
            "width": self.width, "evaluate_every": self.rounds, "threads": 1,
        }  # fmt: skip
        return written(sites, options)


def check(file: Path, name: str, width: int) -> None:
    """Raise ValueError if stock Flower's network and halfmoon's have other logits with the same weights."""
    config = load_plan(file).config
    form = load_plan(file).terms.image_spec
    model = build_task(config, form).network.init(rng.generator(0, "model"))
    flower_network = NETWORKS[name](width).eval()
    leaves = iter(tree.leaves(model["params"]))
    for leaf in flower_network.parameters():
        leaf.data.copy_(next(leaves))
    images = torch.rand(4, *form.image, generator=torch.Generator().manual_seed(0))
    logits = build_task(config, form).network.predict(model["params"], model["stats"], images)
    if next(leaves, None) is not None or not torch.allclose(logits, flower_network(images), atol=1e-5):
        raise ValueError(f"{name} is not the same network in both")


@dataclass(frozen=True)
class Measured:
    """Seconds of each round, bytes a round, the run's traffic by `flwr ls`, and seconds beyond the computing."""

    seconds: list[float]
    bytes: int
    traffic: int | None = None
    beyond: list[float] = field(default_factory=list)

    @property
    def spread(self) -> "Spread":
        """The spread of the seconds between the first round and the last; of all if there are only two."""
        return Spread(self.seconds[1:-1] or self.seconds)


def traffic(listing: Any) -> int | None:
    """Return the bytes that `flwr ls` counts of the only run; None if it lists none."""
    with suppress(LookupError, TypeError):
        return listing["runs"][0]["network-traffic"]["total-bytes"]
    return None


LOGS = "*/.halfmoon/join.log"


def seconds(run: Path) -> list[float]:
    """Read the seconds of each round of a run folder."""
    return [row["seconds"] for row in atomic_io.read_rows(run / TIMINGS)]


def in_simulator(here: BenchmarkProcesses, plan: Plan, file: Path) -> Measured:
    """Run way (i)."""
    run = plan.folder / "simulated"
    row = runner.run_in_folder(settings.resolve(settings.load_file(file), {}), run)
    return Measured(seconds(run), (row["cost"]["bytes_down"] + row["cost"]["bytes_up"]) // plan.rounds)


def in_process(here: BenchmarkProcesses, plan: Plan, file: Path) -> Measured:
    """Run way (ii), and count the bytes of every request for work and its reply."""
    run = plan.folder / "rehearsed"
    total = 0
    original = local.LocalGrid._reply

    def reply_and_count(self: local.LocalGrid, message: Any) -> Any:
        nonlocal total
        reply = original(self, message)
        if message.metadata.message_type == "train":
            total += len(unwrap_message(message.content)) + len(unwrap_message(reply.content))
        return reply

    with mock.patch.object(local.LocalGrid, "_reply", reply_and_count):
        local.rehearse(file, run, file.parent)
    clients._open_cached_client.cache_clear()  # the next way must not reuse these sites
    return Measured(seconds(run), total // plan.rounds)


SIZE = re.compile(r"([\d.]+) (B|kB|MB)")
TRAINED = re.compile(r"round (\d+), \S+ received ([^;]+); trained .* in ([\d.]+) s.*; sends (.*)")


def over_processes(here: BenchmarkProcesses, plan: Plan, file: Path) -> Measured:
    """Run way (iii), and read the sites' logs."""
    run = plan.folder / "served"
    port = free_port()
    for log in file.parent.glob(LOGS):
        log.unlink()  # of way (ii)
    # Flower's default. The shorter time of the other ways would add requests to a round.
    here = replace(here, more={**here.more, "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "1"})
    with joined(here, file.parent, port):
        here.run(*halfmoon("serve", file, "--run-dir", run, "--port", str(port)))
    here.clear()
    took = seconds(run)
    slowest, total = trained(file.parent, plan.rounds)
    beyond = [round - computing for round, computing in zip(took, slowest, strict=True)]
    return Measured(took, int(total) // plan.rounds, beyond=beyond)


def trained(sites: Path, rounds: int) -> tuple[list[float], float]:
    """Return from the sites' logs the seconds that the slowest computed in each round, and the bytes of all rounds."""
    slowest = [0.0] * rounds
    total = 0.0
    for log in sites.glob(LOGS):
        for match in TRAINED.finditer(log.read_text()):
            number = int(match[1]) - 1
            slowest[number] = max(slowest[number], float(match[3]))
            sizes = SIZE.findall(match[2]) + SIZE.findall(match[4])
            total += sum(float(n) * {"B": 1, "kB": 1e3, "MB": 1e6}[unit] for n, unit in sizes)
    return slowest, total


def stock(here: BenchmarkProcesses, plan: Plan, file: Path) -> Measured:
    """Run way (iv)."""
    folder = plan.folder / "stock"
    times = folder / "times.jsonl"
    (folder / "app").mkdir(parents=True)
    address = Address("127.0.0.1", free_port())
    config = {"network": plan.network, "width": plan.width, "steps": plan.steps, "batch": BATCH, "lr": LR}
    config |= {"rounds": plan.rounds, "sites": SITES, "times": str(times)}
    (folder / "app/pyproject.toml").write_text(project(STOCK, config))
    (folder / "config.toml").write_text(connection(address))
    here = replace(here, more={"PYTHONPATH": str(Path(__file__).parent), "FLWR_HOME": str(folder)})
    with superlink(here, address, folder):
        for name in names(file.parent):
            node = f'images="{file.parent / name}.npz"'
            arguments = ["--insecure", "--superlink", str(address), "--port", str(free_port()), "--node-config", node]
            here.start(script("flower-supernode"), *arguments, log=folder / f"{name}.log")
        here.run(script("flwr"), "run", folder / "app", "here")
        wait(lambda: len(atomic_io.read_rows(times)) > plan.rounds, folder / "superlink.log")
        time.sleep(5)  # until Flower has counted the last messages
        listing = json.loads(here.run(script("flwr"), "ls", "here", "--format", "json"))
    here.clear()
    rows = atomic_io.read_rows(times)
    passed = [round(b["at"] - a["at"], 4) for a, b in pairwise(rows)]
    return Measured(passed, rows[-1]["bytes"] // plan.rounds, traffic(listing))


WAYS: dict[str, Callable[[BenchmarkProcesses, Plan, Path], Measured]] = {
    "halfmoon, simulator": in_simulator,
    "halfmoon, in-process grid": in_process,
    "halfmoon, real processes": over_processes,
    "stock Flower, real processes": stock,
}


class Spread:
    """The median and the range of some numbers."""

    def __init__(self, values: Sequence[float]) -> None:
        self.median = statistics.median(values)
        self.minimum = min(values)
        self.maximum = max(values)

    def format(self, digits: int, unit: float = 1.0) -> str:
        """Format the spread, in multiples of `unit`."""
        middle, low, high = (f"{value / unit:.{digits}f}" for value in (self.median, self.minimum, self.maximum))
        return f"{middle} ({low} to {high})"


def run_federation(here: BenchmarkProcesses, options: argparse.Namespace) -> dict[str, dict[str, Measured]]:
    """Run every model in every way."""
    found: dict[str, dict[str, Measured]] = {}
    for name, (network, width) in MODELS.items():
        folder = here.folder / network
        folder.mkdir()
        plan = Plan(network, width, options.rounds, options.steps, folder)
        file = plan.sites(here)
        check(file, network, width)
        for way, do in WAYS.items():
            found.setdefault(name, {})[way] = do(here, plan, file)
            sys.stderr.write(f"{name}, {way}: {found[name][way].seconds}\n")
    return found


SET_UP = """\
FedAvg with three sites of `halfmoon site export digits`, with images padded to 16x16 and {labels}.
All sites train in each of {rounds} rounds, on their labeled images only: {steps} local steps of 10 images, SGD, one thread a
process. There is no evaluation. "Stock Flower" is Flower's FedAvg with the same networks in plain PyTorch
(`benchmarks/federation_stock.py`). The four systems ran one after the other. Seconds are the median (and
range) of the {counted} rounds between the first and the last.
"""


def page(found: Mapping[str, Mapping[str, Measured]], metadata: Mapping[str, Any], options: argparse.Namespace) -> str:
    """Return the results as a page."""
    load = " to ".join(f"{value:.0f}" for value in metadata["load"])
    sizes = {"labels": "8 labeled images of each class at each site", "rounds": options.rounds, "steps": options.steps}
    lines = ["# The cost of a round of a federation", "", f"    {metadata['command']}", ""]
    lines += [SET_UP.format(**sizes, counted=options.rounds - 2), f"{about(metadata)} Load of the machine: {load}.", ""]
    head = "s a round | ratio to the simulator | bytes of messages a round | `flwr ls`: bytes a round"
    for model, ways in found.items():
        first = next(iter(ways.values())).spread.median
        lines += [f"## {model}", "", f"| | {head} |", "|---|---|---|---|---|"]
        for way, each in ways.items():
            spread = each.spread
            seen = "" if each.traffic is None else f"{each.traffic // options.rounds:,}"
            lines.append(f"| {way} | {spread.format(2)} | {spread.median / first:.1f} | {each.bytes:,} | {seen} |")
        lines.append("")
        if "halfmoon, real processes" in ways:
            beyond = Spread(ways["halfmoon, real processes"].beyond[1:-1])
            sentence = f"In addition to the computing of its slowest site, a round over real processes takes {beyond.format(1)} s."
            lines += [sentence, ""]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="What a round of a federation costs, next to stock Flower.")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path("results/federation_cost"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    before = os.getloadavg()[0]
    with open_processes() as here:
        found = run_federation(here, options)
    command = shlex.join(["python", f"benchmarks/{Path(__file__).name}", *sys.argv[1:]])
    metadata = {**machine(), "command": command, "load": [before, os.getloadavg()[0]]}
    text = page(found, metadata, options)
    rows = {model: {way: asdict(each) for way, each in ways.items()} for model, ways in found.items()}
    save(options.out, text, {**metadata, "rounds": options.rounds, "steps": options.steps, "models": rows})
    sys.stdout.write(text)


if __name__ == "__main__":
    main()
