"""Time FedDure's local iteration on ResNet-9 against double back-propagation and in units of one forward pass.

    python benchmarks/feddure_step.py [--json] [--threads N] [--seconds N] [--width N] [--unlabeled N ...]
                                      [--rules joint separate] [--clock wall|cpu]

All sides take the same step on the same images, with the same threads and the same allocator settings (`retain_freed_memory`),
in one process and in turns, so that a noisy machine disturbs all of them; medians are compared. No batch size begins
another turn when its share of `--seconds` is over. The test suite shows that they compute the same numbers. Ours is
what `halfmoon` ships, laid out channels-last as its CPU runs are. The textbook is `torch.nn` modules,
`torch.optim.Adam` and `create_graph=True`, in whichever of the two memory layouts is faster for it with the fewest
images, and comes in two forms:

    literal      every equation by itself: Eq. 1, 6, 7, 8 and 9 each with a forward pass of the local model, Eq. 7, 8
                 and 9 each with a backward pass. Under joint batch statistics each of these passes holds all labeled,
                 strong and weak images, which a careful author would not repeat: most of the distance between the two
                 forms is this repetition.
    economical   one forward pass for all of these and one backward pass for the sum of Eq. 7 to 9, as ours. What is
                 left between it and ours is how Eq. 2, 4 and 5 are computed, the layout and the overheads.

`ratio_10_U` is our time over the literal textbook's with 10 labeled and U unlabeled images, `ratio_10_U_economical`
that over the economical one's. `forwards_10_U` is our time in forward passes: one training-mode pass of 10 + U images
without gradients. `floor_10_U` is what our step cannot go below in these units: the images that its passes send through
the network (`FedDureClient.passes`), a backward pass at two forward ones (the gradients in input and weight of each layer)
and the tangent at two; under the joint rule 8 * 10 + 13 U. All is given under the default rule for batch statistics
(joint), and with `--rules separate` under the other one as `_separate`. `--clock cpu` takes the process's CPU time, for
a machine that is busy with something else.
"""

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))

from reference_feddure import ReferenceFedDure
from torch_models import TorchResNet9, load_weights

from halfmoon.api.types import Batch, ClientData, Statistics, Task
from halfmoon.core import tree
from halfmoon.core.memory import retain_freed_memory
from halfmoon.core.normalize import Normalize
from halfmoon.core.optim import Adam
from halfmoon.methods.feddure import FedDure
from halfmoon.models import ResNet9

Calls = dict[str, Callable[[], object]]
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
LABELED = 10
FORMS = ("literal", "economical")


def floor(unlabeled: int, rule: Statistics) -> float:
    """Return the least that a step takes, in forward passes of the labeled and strong images."""
    task = Task(ResNet9(3, 10, 8), Adam(5e-4), Normalize((0.5,) * 3, (0.25,) * 3), rule)
    passes = FedDure().client_updates(task)["train"].passes(LABELED, unlabeled)
    tangent = unlabeled  # counted as one forward pass there; it takes two convolutions a layer
    return (passes.forward + 2 * passes.backward + tangent) / (LABELED + unlabeled)


def sides(unlabeled: int, width: int, rule: Statistics) -> Calls:
    """Return one step of ours, of the textbook in its two forms and layouts ("literal/plain"), and one forward pass."""
    g = torch.Generator().manual_seed(0)
    network = ResNet9(3, 10, width)
    task = Task(network, Adam(5e-4), Normalize((0.5,) * 3, (0.25,) * 3), rule)
    model = network.init(g)
    images = [torch.randn(n, 3, 32, 32, generator=g) for n in (LABELED, unlabeled, unlabeled)]
    x, weak, strong = (each.contiguous(memory_format=torch.channels_last) for each in images)
    y = torch.randint(0, 10, (LABELED,), generator=g)
    client_update = FedDure(through_weights="product").client_updates(task)[
        "train"
    ]  # Eq. 2 and 4 as printed, on all sides
    broadcast = tree.channels_last({**model, "gate": torch.ones(())})
    nothing = torch.zeros(0, 3, 1, 1, dtype=torch.uint8)
    local = ClientData(nothing, y, nothing, torch.tensor(LABELED), torch.tensor(unlabeled))
    carry = client_update.begin(broadcast, client_update.initial_memory(broadcast, g), local)
    batch = Batch(x, y, y, {"weak": weak, "strong": strong}, torch.arange(unlabeled))
    both = torch.cat([x, strong])

    def ours() -> None:
        with torch.no_grad():
            client_update.step(broadcast, carry, batch)

    def forward() -> None:
        with torch.no_grad():
            network.train(broadcast["params"], both)

    def textbook(literal: bool, layout: torch.memory_format) -> Callable[[], object]:
        regulator = nn.Sequential(nn.Linear(10, 128), nn.ReLU(), nn.Linear(128, 1), nn.Sigmoid())
        module = load_weights(TorchResNet9(3, 10, width), model).to(memory_format=layout)
        book = ReferenceFedDure(
            module, regulator, torch.optim.Adam, 5e-4, joint=rule == "joint", product=True, literal=literal
        )
        laid = [each.contiguous(memory_format=layout) for each in images]
        return lambda: book.step(laid[0], y, laid[1], laid[2])

    layouts = {"channels_last": torch.channels_last, "plain": torch.contiguous_format}
    books = {
        f"{form}/{name}": textbook(form == "literal", layout) for form in FORMS for name, layout in layouts.items()
    }
    return {"forward": forward, "ours": ours, **books}


def medians(calls: Calls, seconds: float, clock: Callable[[], float]) -> dict[str, float]:
    """Return the median milliseconds of each call, taken in turns until `seconds` are over, at least one turn.

    Ours and the forward pass, which take least, are warmed up before, and taken three times in a turn.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    quick = ("forward", "ours")
    for name in quick:
        calls[name]()
    began = time.perf_counter()
    while not times["ours"] or time.perf_counter() - began < seconds:
        for name in (*calls, *quick, *quick):
            before = clock()
            calls[name]()
            times[name].append((clock() - before) * 1e3)
    return {name: statistics.median(each) for name, each in times.items()}


def fastest(ms: dict[str, float], form: str) -> str:
    """Return which of a form's layouts took least."""
    return min((name for name in ms if name.startswith(form)), key=ms.__getitem__)


def compare(ms: dict[str, float], unlabeled: int, rule: Statistics) -> dict[str, object]:
    """Return the figures of one batch size under one rule for batch statistics."""
    literal, economical = (ms[fastest(ms, form)] for form in FORMS)
    key, suffix = f"{LABELED}_{unlabeled}", "" if rule == "joint" else f"_{rule}"
    return {
        f"floor_{key}{suffix}": round(floor(unlabeled, rule), 2),
        f"forwards_{key}{suffix}": round(ms["ours"] / ms["forward"], 2),
        f"ratio_{key}{suffix}": round(ms["ours"] / literal, 3),
        f"ratio_{key}_economical{suffix}": round(ms["ours"] / economical, 3),
        f"milliseconds_{key}{suffix}": {name: round(value, 1) for name, value in ms.items()},
    }


def processor() -> str:
    """Return the name of the processor where the system tells it."""
    told = Path("/proc/cpuinfo")
    lines = told.read_text().splitlines() if told.exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=40, help="after which no batch size begins another turn")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--unlabeled", type=int, nargs="+", default=[10, 90])
    parser.add_argument("--rules", nargs="+", choices=["joint", "separate"], default=["joint"])
    parser.add_argument("--clock", choices=sorted(CLOCKS), default="wall")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    figures: dict[str, object] = {
        "machine": processor(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "keeps_memory": retain_freed_memory(),
        "clock": given.clock,
        "threads": given.threads,
        "width": given.width,
        "ratio": "ours / literal textbook (each equation its own passes); _economical: / textbook that shares passes",
    }
    for rule in given.rules:
        left: dict[str, str] = {}  # the faster layout of each form
        for unlabeled in sorted(given.unlabeled):
            calls = sides(unlabeled, given.width, rule)
            kept = {name: calls[name] for name in ("forward", "ours", *left.values())} if left else calls
            share = given.seconds / len(given.unlabeled) / len(given.rules)
            ms = medians(kept, share, CLOCKS[given.clock])
            left = {form: fastest(ms, form) for form in FORMS}
            figures |= compare(ms, unlabeled, rule)
    if given.json:
        print(json.dumps(figures))
        return
    for name, value in figures.items():
        print(f"{name:32} {value}")


if __name__ == "__main__":
    main()
