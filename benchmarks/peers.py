"""Time rounds of FedAvg and FixMatch against a plain loop that somebody writes by hand.

    python benchmarks/peers.py [--json] [--only plain halfmoon] [--cohorts 5 20 100] [--sizes tiny large] [--turns N]

Two sizes: "tiny" is the digits' small network on 8x8 images, six steps on 10 labeled and 30 unlabeled images a client
(the main job's); "large" is ResNet-9 of width 16 on 32x32 images of noise, three steps on 10 + 10. Every side plays the
same round: the same clients, images and views (drawn and made by `halfmoon.augment` on all sides, once a client), the
same numbers of steps and images, an average at the end. What differs is the engine:

    plain      `torch.nn` modules, `torch.optim.Adam` and a loop over clients and batches; layout and threads as ours
    loop       halfmoon, client by client
    vmap       halfmoon, clients as one program
    default    halfmoon as it chooses
    workers    halfmoon, clients in two processes (large only)

The sides take turns in one process on one thread, so a busy machine disturbs all alike; a ratio is the median over
turns of a side's time over the plain loop's in the same turn. Times are the process's CPU time, of `workers` the wall
clock, against the plain loop's. `--json` gives the default's ratios at cohort 5 as `fedavg_tiny`, `fixmatch_tiny`,
`fedavg_resnet9` and `fixmatch_resnet9`, all others under "ratios", and what an empty process needs from `import torch`
to the end of one round of FedAvg as `startup_seconds` (of CPU time).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))

from torch_models import TorchResNet9, TorchSmall, twin

from halfmoon import Config
from halfmoon.core.allocator import keep_memory
from halfmoon.data import Scenario
from halfmoon.data.partition.split import Split
from halfmoon.engine.budget import Budget
from halfmoon.engine.evaluation import Examples
from halfmoon.engine.local_clients import FederatedDataset, Training
from halfmoon.engine.runtime import RuntimeSettings
from halfmoon.engine.sampling import Wanted, draw
from halfmoon.engine.simulation import Simulation
from halfmoon.methods import registry
from halfmoon.runs import factory
from halfmoon.runs.factory import ImageSpec
from halfmoon.runs.workers import Workers

METHODS = {"fedavg": "fedavg", "fixmatch": "fedavg-fixmatch"}
SIZES = {"tiny": "tiny", "large": "resnet9"}
STARTUP = """
import tempfile, time
import torch
began = time.process_time()
import halfmoon
with tempfile.TemporaryDirectory() as folder:
    halfmoon.run(halfmoon.Config(method="fedavg", rounds=1, run_dir=folder + "/run"))
print(time.process_time() - began)
"""
THRESHOLD = 0.95


def scene(size: str, method: str, cohort: int) -> tuple[Config, ImageSpec, Examples, Split]:
    """Return a configuration, the form of its images, these, and who holds them."""
    shared: dict[str, Any] = {"method": METHODS[method], "cohort": cohort, "clients": cohort, "device": "cpu"}
    g = torch.Generator().manual_seed(0)
    if size == "tiny":
        config = Config(**shared, data="digits", steps=6, unlabeled_batch=30)
        side, channels, rows = 8, 1, 70
    else:
        config = Config(**shared, data="cifar10", network="resnet9", width=16, steps=3)
        side, channels, rows = 32, 3, 70
    images = torch.randint(0, 256, (cohort * rows, channels, side, side), generator=g, dtype=torch.uint8)
    labels = torch.arange(len(images)) % 10
    form = ImageSpec((channels, side, side), tuple("0123456789"), False, (0.5,) * channels, (0.25,) * channels)
    rule = Scenario(setting="iid-iid", clients=cohort, labels_per_class=1.0)
    return config, form, Examples(images, labels), rule.split(labels.numpy(), form.classes, "noise")


def ours(size: str, method: str, cohort: int, executor: str, pool: Workers | None = None) -> Callable[[], object]:
    """Return one round of halfmoon."""
    config, form, train, split = scene(size, method, cohort)
    if executor != "default":
        config = replace(config, executor=executor)
    task, views, (batching, serving) = (
        factory.task(config, form),
        factory.views(config, form),
        factory.batch_rules(config),
    )
    made = registry.make(config.method)
    training = Training(batching, Budget(), serving, factory.executor(config), pool or map)
    runtime = Simulation(made, task, FederatedDataset(train, split), views, training, RuntimeSettings(cohort))
    server = made.start(task, task.network.init(torch.Generator().manual_seed(0)))

    def play() -> None:
        runtime.open(0)
        made.round(task.at(0), server, runtime)
        runtime.close()

    return play


def plain(size: str, method: str, cohort: int) -> Callable[[], object]:
    """Return one round as somebody writes it by hand."""
    config, form, train, split = scene(size, method, cohort)
    views, task = factory.views(config, form), factory.task(config, form)
    dataset = FederatedDataset(train, split)
    batching = factory.batch_rules(config)[0]
    model = task.network.init(torch.Generator().manual_seed(0))
    width = getattr(task.network, "width")  # noqa: B009 (of both networks here)
    module = (TorchSmall if size == "tiny" else TorchResNet9)(form.image[0], 10, width)
    net = twin(module, model).to(memory_format=torch.channels_last)
    first = {name: leaf.clone() for name, leaf in net.state_dict().items()}
    update = registry.make(config.method).client_updates(task)["train"]

    def client(k: int) -> None:
        local, _ = dataset.local(k)
        net.load_state_dict(first)
        net.train()
        optimizer = torch.optim.Adam(net.parameters(), lr=config.lr)
        amount = Budget().amount(batching, update, dataset.own(k), dataset.given(k))
        drawn = draw(amount, local, views, Wanted(update.views), None, 0, "visit", 0, 0, k)
        x = views.labeled.apply(local.x[drawn.x_rows], drawn.x_drawn, task.normalize)
        y = local.y[drawn.x_rows]
        u = {
            name: views.unlabeled[name].apply(local.u[drawn.u_rows], drawn.u_drawn[name], task.normalize)
            for name in update.views
        }
        for step in range(amount.steps):
            a = slice(step * amount.labeled, (step + 1) * amount.labeled)
            b = slice(step * amount.unlabeled, (step + 1) * amount.unlabeled)
            optimizer.zero_grad()
            loss(net, x[a], y[a], {name: view[b] for name, view in u.items()}).backward()
            optimizer.step()

    def play() -> dict[str, Tensor]:
        total: dict[str, Tensor] = {}
        for k in range(cohort):
            client(k)
            for name, leaf in net.state_dict().items():
                part = leaf.clone() / cohort if leaf.is_floating_point() else leaf.clone()
                total[name] = total[name] + part if name in total else part
        return total

    return play


def loss(net: nn.Module, x: Tensor, y: Tensor, u: dict[str, Tensor]) -> Tensor:
    """Return FedAvg's labeled loss, or FixMatch's, with joint batch statistics."""
    if not u:
        return F.cross_entropy(net(laid(x)), y)
    logits = net(laid(torch.cat([x, u["strong"], u["weak"]])))
    labeled, strong, weak = logits.split([len(y), len(u["strong"]), len(u["weak"])])
    confidence, label = weak.detach().softmax(-1).max(-1)
    used = (confidence >= THRESHOLD).float()
    return F.cross_entropy(labeled, y) + (F.cross_entropy(strong, label, reduction="none") * used).mean()


def laid(x: Tensor) -> Tensor:
    """Lay images out channels-last."""
    return x.contiguous(memory_format=torch.channels_last)


def measure(sides: dict[str, Callable[[], object]], turns: int) -> dict[str, dict[str, float]]:
    """Return the median milliseconds and the median ratio of each side to the plain loop, in turns after one."""
    cpu: dict[str, list[float]] = {name: [] for name in sides}
    wall: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(turns + 1):
        for name, play in sides.items():
            clocks = time.process_time(), time.perf_counter()
            play()
            if turn:
                cpu[name].append(time.process_time() - clocks[0])
                wall[name].append(time.perf_counter() - clocks[1])

    def told(name: str) -> dict[str, float]:
        clock = wall if name == "workers" else cpu
        made = {"cpu_ms": statistics.median(cpu[name]) * 1e3, "wall_ms": statistics.median(wall[name]) * 1e3}
        if "plain" in sides:
            made["ratio"] = statistics.median(a / b for a, b in zip(clock[name], clock["plain"], strict=True))
        return {key: round(value, 3) for key, value in made.items()}

    return {name: told(name) for name in sides}


def sides_of(size: str, method: str, cohort: int, only: list[str], pool: Workers) -> dict[str, Callable[[], object]]:
    """Return what takes turns at one size."""
    made: dict[str, Callable[[], object]] = {}
    if "plain" in only:
        made["plain"] = plain(size, method, cohort)
    if "halfmoon" in only:
        made["default"] = ours(size, method, cohort, "default")
        made["loop"] = ours(size, method, cohort, "loop")
        if size == "tiny":
            made["vmap"] = ours(size, method, cohort, "vmap")
        else:
            made["workers"] = ours(size, method, cohort, "loop", pool)
    return made


def startup() -> float:
    """Return the seconds of CPU time from `import torch` to the end of one round of FedAvg, in a fresh process."""
    done = [
        subprocess.run([sys.executable, "-c", STARTUP], capture_output=True, text=True, check=True) for _ in range(3)
    ]
    return round(min(float(each.stdout.split()[-1]) for each in done), 2)


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", nargs="+", choices=["plain", "halfmoon"], default=["plain", "halfmoon"])
    parser.add_argument("--cohorts", type=int, nargs="+", default=[5, 20, 100])
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=list(SIZES))
    parser.add_argument("--turns", type=int, default=5)
    given = parser.parse_args()
    torch.set_num_threads(1)
    keep_memory()
    figures: dict[str, Any] = {"torch": torch.__version__, "load": os.getloadavg()[0], "startup_seconds": startup()}
    pool = Workers(2)
    ratios: dict[str, dict[str, dict[str, float]]] = {}
    for size in given.sizes:
        for cohort in given.cohorts if size == "tiny" else given.cohorts[:1]:
            for method in METHODS:
                turns = given.turns if cohort < 100 else max(1, given.turns // 2)
                found = measure(sides_of(size, method, cohort, given.only, pool), turns)
                ratios[f"{method}_{SIZES[size]}_{cohort}"] = found
                if cohort == given.cohorts[0] and "ratio" in found.get("default", {}):
                    figures[f"{method}_{SIZES[size]}"] = found["default"]["ratio"]
                if not given.json:
                    print(f"{method}_{SIZES[size]}_{cohort}", found, flush=True)
    pool.close()
    figures["ratios"] = ratios
    print(json.dumps(figures) if given.json else {name: value for name, value in figures.items() if name != "ratios"})


if __name__ == "__main__":
    main()
