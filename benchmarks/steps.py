"""Time single steps: FedDure's local iteration, large models, Adam under vmap, and the strong view.

    python benchmarks/steps.py feddure [--threads N] [--seconds 40] [--width 64] [--unlabeled 10 90]
                                       [--rules joint separate] [--clock wall|cpu] [--operators]
    python benchmarks/steps.py large [--width 120] [--turns 3] [--methods fedavg fedavg-fixmatch]
                                     [--rules joint separate]
    python benchmarks/steps.py adam [--clients 5 20] [--turns 20]
    python benchmarks/steps.py strong-view

feddure: FedDure's step on ResNet-9 against double back-propagation, and in units of one forward pass. All versions take the
same step on the same images, with the same threads and allocator settings (`retain_freed_memory`), in one process and in
turns, so that a busy machine slows all of them; medians are compared. No batch size starts another turn when its share of
`--seconds` is over. The tests show that all versions compute the same numbers. Halfmoon's is in channels-last layout, as in
its runs on a CPU. The textbook version has `torch.nn` modules, `torch.optim.Adam` and `create_graph=True`, in whichever
memory layout is faster for it with the fewest images, and two forms:

    literal      every equation separately: Eq. 1, 6, 7, 8 and 9 each with a forward pass of the local model, Eq. 7, 8 and
                 9 each with a backward pass. Under joint batch statistics each of these passes contains all labeled,
                 strong and weak images. A careful author would not repeat them: most of the distance between the two forms
                 is this repetition.
    economical   one forward pass for all of these and one backward pass for the sum of Eq. 7 to 9, as in halfmoon. The
                 remaining distance is how Eq. 2, 4 and 5 are computed, the layout and overheads.

`ratio_10_U` is halfmoon's time over the literal textbook's with 10 labeled and U unlabeled images, `ratio_10_U_economical`
that over the economical one's. `forwards_10_U` is halfmoon's time in forward passes: one training-mode pass of 10 + U
images without gradients. `floor_10_U` is the lower bound in these units: the images that its passes send through the
network (`FedDureClient.passes`), a backward pass as two forward ones (the gradients of input and weight of each layer) and
the tangent as two; under joint statistics 8 * 10 + 13 U. With `--rules separate` the figures of separate batch statistics
have the suffix `_separate`. `--clock cpu` measures processor time, for a busy machine. `--operators` prints the time of
halfmoon's step by operator instead.

large: a step of a model of 23 million parameters (ResNet-9 of width 120, 16x16 pixels) against `torch.nn` modules and
`torch.optim.Adam`, in turns in one process, on 10 labeled and, for FixMatch, 30 unlabeled images. Both pass the same groups
of images through the network: with joint statistics labeled, weak and strong images in one pass with gradients, with
separate ones each group by itself. A table has the time of both by operator, from a profile of further steps.

adam: Adam's step of several clients under vmap, with one call for all leaves against the calls of each leaf, on the
parameters of the small network and of ResNet-9 of width 16. Both are computed in turns, and must be equal.

strong-view: the strong view against the same pipeline in Pillow: same images, same random draws, one process, one thread.
Both start from uint8 images and the draws and end with normalized float32 tensors; they take turns, and medians are in
microseconds an image. The ratio is Pillow's time over halfmoon's.
"""

import argparse
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))

import pillow_reference
from reference_feddure import ReferenceFedDure
from torch_models import TorchResNet9, load_weights

from halfmoon.api.types import Batch, ClientData, Statistics, Task
from halfmoon.core import tree
from halfmoon.core.autodiff import vmap_clients
from halfmoon.core.memory import retain_freed_memory
from halfmoon.core.normalize import Normalize
from halfmoon.core.optim import Adam
from halfmoon.data.views import Strong
from halfmoon.methods import registry
from halfmoon.methods.feddure import FedDure
from halfmoon.models import ResNet9, SmallCNN
from halfmoon.models.network import Network

# feddure

Calls = dict[str, Callable[[], object]]
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
LABELED = 10
FORMS = ("literal", "economical")


def lower_bound(unlabeled: int, rule: Statistics) -> float:
    """Return the lower bound of a step, in forward passes of the labeled and strong images."""
    task = Task(ResNet9(3, 10, 8), Adam(5e-4), Normalize((0.5,) * 3, (0.25,) * 3), rule)
    passes = FedDure().client_updates(task)["train"].passes(LABELED, unlabeled)
    # `passes` counts the tangent as one forward pass; it takes two convolutions a layer.
    tangent = unlabeled
    return (passes.forward + 2 * passes.backward + tangent) / (LABELED + unlabeled)


def build_steps(unlabeled: int, width: int, rule: Statistics) -> Calls:
    """Return halfmoon's step, the textbook's in each form and layout ("literal/plain"), and one forward pass."""
    g = torch.Generator().manual_seed(0)
    network = ResNet9(3, 10, width)
    task = Task(network, Adam(5e-4), Normalize((0.5,) * 3, (0.25,) * 3), rule)
    model = network.init(g)
    images = [torch.randn(n, 3, 32, 32, generator=g) for n in (LABELED, unlabeled, unlabeled)]
    x, weak, strong = (each.contiguous(memory_format=torch.channels_last) for each in images)
    y = torch.randint(0, 10, (LABELED,), generator=g)
    # "product" is Eq. 2 and 4 as printed, which the textbook computes, too.
    client_update = FedDure(through_weights="product").client_updates(task)["train"]
    broadcast = tree.channels_last({**model, "gate": torch.ones(())})
    no_images = torch.zeros(0, 3, 1, 1, dtype=torch.uint8)
    local = ClientData(no_images, y, no_images, torch.tensor(LABELED), torch.tensor(unlabeled))
    carry = client_update.begin(broadcast, client_update.initial_memory(broadcast, g), local)
    batch = Batch(x, y, y, {"weak": weak, "strong": strong}, torch.arange(unlabeled))
    both = torch.cat([x, strong])

    def run_halfmoon() -> None:
        with torch.no_grad():
            client_update.step(broadcast, carry, batch)

    def run_forward() -> None:
        with torch.no_grad():
            network.train(broadcast["params"], both)

    def build_textbook(literal: bool, layout: torch.memory_format) -> Callable[[], object]:
        regulator = nn.Sequential(nn.Linear(10, 128), nn.ReLU(), nn.Linear(128, 1), nn.Sigmoid())
        module = load_weights(TorchResNet9(3, 10, width), model).to(memory_format=layout)
        reference = ReferenceFedDure(
            module, regulator, torch.optim.Adam, 5e-4, joint=rule == "joint", product=True, literal=literal
        )
        converted = [each.contiguous(memory_format=layout) for each in images]
        return lambda: reference.step(converted[0], y, converted[1], converted[2])

    layouts = {"channels_last": torch.channels_last, "plain": torch.contiguous_format}
    textbooks = {
        f"{form}/{name}": build_textbook(form == "literal", layout)
        for form in FORMS
        for name, layout in layouts.items()
    }
    return {"forward": run_forward, "halfmoon": run_halfmoon, **textbooks}


def measure_medians(calls: Calls, seconds: float, clock: Callable[[], float]) -> dict[str, float]:
    """Return the median milliseconds of each call, in turns until `seconds` are over, at least one turn.

    Halfmoon's step and the forward pass, which are the shortest, are warmed up and repeated three times a turn.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    short = ("forward", "halfmoon")
    for name in short:
        calls[name]()
    start = time.perf_counter()
    while not times["halfmoon"] or time.perf_counter() - start < seconds:
        for name in (*calls, *short, *short):
            before = clock()
            calls[name]()
            times[name].append((clock() - before) * 1e3)
    return {name: statistics.median(each) for name, each in times.items()}


def fastest_layout(ms: dict[str, float], form: str) -> str:
    """Return the name of the faster layout of a form."""
    return min((name for name in ms if name.startswith(form)), key=ms.__getitem__)


def compare_steps(ms: dict[str, float], unlabeled: int, rule: Statistics) -> dict[str, object]:
    """Return the figures of one batch size under one rule for batch statistics."""
    literal, economical = (ms[fastest_layout(ms, form)] for form in FORMS)
    key = f"{LABELED}_{unlabeled}"
    suffix = "" if rule == "joint" else f"_{rule}"
    return {
        f"floor_{key}{suffix}": round(lower_bound(unlabeled, rule), 2),
        f"forwards_{key}{suffix}": round(ms["halfmoon"] / ms["forward"], 2),
        f"ratio_{key}{suffix}": round(ms["halfmoon"] / literal, 3),
        f"ratio_{key}_economical{suffix}": round(ms["halfmoon"] / economical, 3),
        f"milliseconds_{key}{suffix}": {name: round(value, 1) for name, value in ms.items()},
    }


def processor_name() -> str:
    """Return the name of the processor if the system reports it, else the architecture."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def measure_feddure(options: argparse.Namespace) -> None:
    """Print the figures."""
    torch.set_num_threads(options.threads)
    if options.operators:
        retain_freed_memory()
        for unlabeled in options.unlabeled:
            calls = build_steps(unlabeled, options.width, options.rules[0])
            calls["halfmoon"]()  # warms up
            calls["forward"]()
            print(f"\n{LABELED} + {unlabeled} images\n")
            print_operators({name: profile_operators(calls[name]) for name in ("forward", "halfmoon")})
        return
    figures: dict[str, object] = {
        "machine": processor_name(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "retains_memory": retain_freed_memory(),
        "clock": options.clock,
        "threads": options.threads,
        "width": options.width,
    }
    for rule in options.rules:
        layouts: dict[str, str] = {}  # the faster layout of each form, found with the fewest images
        for unlabeled in sorted(options.unlabeled):
            calls = build_steps(unlabeled, options.width, rule)
            chosen = {name: calls[name] for name in ("forward", "halfmoon", *layouts.values())} if layouts else calls
            seconds = options.seconds / len(options.unlabeled) / len(options.rules)
            ms = measure_medians(chosen, seconds, CLOCKS[options.clock])
            layouts = {form: fastest_layout(ms, form) for form in FORMS}
            figures |= compare_steps(ms, unlabeled, rule)
    for name, value in figures.items():
        print(f"{name:32} {value}")


# large

LARGE_SIDE = 16
LARGE_UNLABELED = 30
PROFILED_CALLS = 3
OPERATOR_ROWS = 12
"""Operators in a table; the others are summed."""


def build_large_steps(method: str, width: int, rule: Statistics) -> Calls:
    """Return a plain step ("plain") and halfmoon's ("halfmoon") on the same images and initial weights."""
    g = torch.Generator().manual_seed(0)
    network = ResNet9(1, 10, width)
    model = network.init(g)
    unlabeled = LARGE_UNLABELED if method != "fedavg" else 0
    x, weak, strong = (torch.randn(n, 1, LARGE_SIDE, LARGE_SIDE, generator=g) for n in (LABELED, unlabeled, unlabeled))
    y = torch.randint(0, 10, (LABELED,), generator=g)

    task = Task(network, Adam(1e-3), Normalize((0.5,), (0.25,)), rule)
    client_update = registry.make(method).client_updates(task)["train"]
    no_images = torch.zeros(0, 1, 1, 1, dtype=torch.uint8)
    local = ClientData(no_images, y, no_images, torch.tensor(LABELED), torch.tensor(unlabeled))
    carry = client_update.begin(model, client_update.initial_memory(model, g), local)
    views = {name: view for name, view in (("weak", weak), ("strong", strong)) if unlabeled}
    batch = Batch(x, y, y, views, torch.arange(unlabeled))

    def run_halfmoon() -> None:
        nonlocal carry
        with torch.no_grad():
            carry, _ = client_update.step(model, carry, batch)

    module = load_weights(TorchResNet9(1, 10, width), model)
    optimizer = torch.optim.Adam(module.parameters(), 1e-3)

    def run_plain() -> None:
        optimizer.zero_grad()
        if not unlabeled:
            loss = F.cross_entropy(module(x), y)
        else:
            if rule == "joint":
                outputs = module(torch.cat([x, weak, strong]))
                labeled_logits, weak_logits, strong_logits = outputs.split([LABELED, unlabeled, unlabeled])
            else:
                with torch.no_grad():
                    weak_logits = module(weak)
                labeled_logits = module(x)
                strong_logits = module(strong)
            confidence, pseudo = weak_logits.detach().softmax(1).max(1)
            strong_losses = F.cross_entropy(strong_logits, pseudo, reduction="none")
            loss = F.cross_entropy(labeled_logits, y) + ((confidence > 0.95) * strong_losses).mean()
        loss.backward()
        optimizer.step()

    return {"plain": run_plain, "halfmoon": run_halfmoon}


def profile_operators(call: Callable[[], object]) -> dict[str, float]:
    """Return the milliseconds of a call by operator, without those of the operators that it calls.

    The profiler reads the clock, so of several calls the shortest is taken, which other programs disturbed least.
    """
    profiles: list[dict[str, float]] = []
    for _ in range(PROFILED_CALLS):
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            call()
        profiles.append({event.key: event.self_cpu_time_total / 1e3 for event in profiled.key_averages()})
    return min(profiles, key=lambda each: sum(each.values()))


def print_operators(profiles: dict[str, dict[str, float]]) -> None:
    """Print a table of the longest operators of each profile; the last row is the sum of all others."""
    longest = sorted({key for each in profiles.values() for key in each}, key=lambda key: -max(
        each.get(key, 0.0) for each in profiles.values()
    ))  # fmt: skip
    print("| operator | " + " | ".join(f"{name}, ms" for name in profiles) + " |")
    print("|---|" + "--:|" * len(profiles))
    for key in longest[:OPERATOR_ROWS]:
        print(f"| {key} | " + " | ".join(f"{each.get(key, 0.0):.0f}" for each in profiles.values()) + " |")
    rest = longest[OPERATOR_ROWS:]
    print(
        "| others | "
        + " | ".join(f"{sum(each.get(key, 0.0) for key in rest):.0f}" for each in profiles.values())
        + " |"
    )


def measure_large(options: argparse.Namespace) -> None:
    """Print the ratio of each method and rule, and the operators of both steps."""
    torch.set_num_threads(1)
    retain_freed_memory()
    for method in options.methods:
        # With one group of images a step, both rules are the same.
        for rule in options.rules if method != "fedavg" else options.rules[:1]:
            calls = build_large_steps(method, options.width, rule)
            for call in calls.values():
                call()  # warms up
            turns = [[measure_seconds(call) for call in calls.values()] for _ in range(options.turns)]
            plain, halfmoon = (statistics.median(turn[k] for turn in turns) for k in (0, 1))
            ratio = statistics.median(turn[1] / turn[0] for turn in turns)
            print(
                f"\n{method}, {rule}: plain {plain:.3f} s, halfmoon {halfmoon:.3f} s, ratio {ratio:.3f}\n", flush=True
            )
            print_operators({name: profile_operators(call) for name, call in calls.items()})


def measure_seconds(call: Callable[[], object]) -> float:
    """Return the processor seconds of a call."""
    start = time.process_time()
    call()
    return time.process_time() - start


# adam

ADAM_NETWORKS = {"small, width 16": SmallCNN(1, 10, 16), "ResNet-9, width 16": ResNet9(3, 10, 16)}


def compare_adam_steps(network: Network, clients: int, turns: int) -> tuple[float, float, float]:
    """Return the milliseconds of a step by leaf and with all leaves at once, and the median ratio of the latter."""
    g = torch.Generator().manual_seed(0)
    params = tree.map(lambda leaf: torch.stack([leaf] * clients), network.init(g)["params"])
    gradient = tree.map(lambda leaf: torch.randn(leaf.shape, generator=g), params)
    optimizer = Adam(1e-3)
    state = vmap_clients(optimizer.init)(params)
    all_at_once = vmap_clients(optimizer.step)

    def step_by_leaf() -> tuple[tree.Tree, tree.Tree]:
        # A learning rate as a tensor takes the implementation that calls every operator for each leaf.
        return torch.func.vmap(replace(optimizer, lr=torch.tensor(1e-3)).step)(params, gradient, state)

    new, _ = all_at_once(params, gradient, state)
    for leaf, expected in zip(tree.leaves(new), tree.leaves(step_by_leaf()[0]), strict=True):
        torch.testing.assert_close(leaf, expected)
    times = [
        (measure_seconds(step_by_leaf), measure_seconds(lambda: all_at_once(params, gradient, state)))
        for _ in range(turns)
    ]
    by_leaf, at_once = (statistics.median(each[k] for each in times) * 1e3 for k in (0, 1))
    return by_leaf, at_once, statistics.median(b / a for a, b in times)


def measure_adam(options: argparse.Namespace) -> None:
    """Print a row for each network and number of clients."""
    torch.set_num_threads(1)
    retain_freed_memory()
    print("| network | clients | each leaf, ms | all leaves, ms | ratio |\n|---|--:|--:|--:|--:|")
    for name, network in ADAM_NETWORKS.items():
        for clients in options.clients:
            by_leaf, at_once, ratio = compare_adam_steps(network, clients, options.turns)
            print(f"| {name} | {clients} | {by_leaf:.2f} | {at_once:.2f} | {ratio:.2f} |", flush=True)


# strong-view

SHAPE = (3, 32, 32)
MEAN = (0.4914, 0.4822, 0.4465)
STD = (0.2470, 0.2435, 0.2616)


def compare_views(batch: int, rounds: int) -> tuple[float, float]:
    """Return the median microseconds an image of halfmoon and of Pillow; the two results must be equal."""
    generator = torch.Generator().manual_seed(batch)
    strong = Strong()
    normalize = Normalize(MEAN, STD)
    coarse = torch.randint(0, 256, (batch, 3, 8, 8), generator=generator).float()
    images = torch.nn.functional.interpolate(coarse, size=SHAPE[1:], mode="bilinear").to(torch.uint8)
    array = images.numpy()
    mean, std = (np.array(value, dtype=np.float32).reshape(3, 1, 1) for value in (MEAN, STD))
    # Each timing covers at least 90 images, so that a small batch does not only measure cold caches.
    calls = max(1, 90 // batch)
    halfmoon_times = []
    pillow = []
    for _ in range(rounds):
        # New draws each round: the drawn operations determine the time of a small batch.
        drawn = [strong.draw(batch, SHAPE, generator) for _ in range(calls)]
        rows = [pillow_reference.split_draws(draw) for draw in drawn]
        start = time.perf_counter()
        views = [strong.apply(images, draw, normalize) for draw in drawn]
        between = time.perf_counter()
        expected = [pillow_reference.make_strong_views(array, row, mean, std) for row in rows]
        stop = time.perf_counter()
        halfmoon_times.append((between - start) / calls)
        pillow.append((stop - between) / calls)
    if not all(torch.allclose(one, other, atol=1e-5) for one, other in zip(views, expected, strict=True)):
        raise SystemExit("the two pipelines give different images: their times cannot be compared")
    return statistics.median(halfmoon_times) / batch * 1e6, statistics.median(pillow) / batch * 1e6


def measure_strong_view(options: argparse.Namespace) -> None:
    """Print a line for each batch size."""
    torch.set_num_threads(1)
    compare_views(10, 3)  # lookup tables and threads are prepared before the measurement
    for size in (10, 90, 450):
        halfmoon_us, pillow = compare_views(size, options.rounds or max(15, min(40, 4000 // size)))
        print(
            f"{size:4d} images: halfmoon {halfmoon_us:6.1f} us an image, Pillow {pillow:6.1f}, ratio {pillow / halfmoon_us:.1f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    feddure = commands.add_parser("feddure")
    feddure.set_defaults(measure=measure_feddure)
    feddure.add_argument("--threads", type=int, default=torch.get_num_threads())
    feddure.add_argument("--seconds", type=float, default=40, help="after which no batch size starts another turn")
    feddure.add_argument("--width", type=int, default=64)
    feddure.add_argument("--unlabeled", type=int, nargs="+", default=[10, 90])
    feddure.add_argument("--rules", nargs="+", choices=["joint", "separate"], default=["joint"])
    feddure.add_argument("--clock", choices=sorted(CLOCKS), default="wall")
    feddure.add_argument("--operators", action="store_true", help="print halfmoon's step by operator")
    large = commands.add_parser("large")
    large.set_defaults(measure=measure_large)
    large.add_argument("--width", type=int, default=120)
    large.add_argument("--turns", type=int, default=3)
    large.add_argument("--methods", nargs="+", default=["fedavg", "fedavg-fixmatch"])
    large.add_argument("--rules", nargs="+", choices=["joint", "separate"], default=["joint", "separate"])
    adam = commands.add_parser("adam")
    adam.set_defaults(measure=measure_adam)
    adam.add_argument("--clients", type=int, nargs="+", default=[5, 20])
    adam.add_argument("--turns", type=int, default=20)
    strong_view = commands.add_parser("strong-view")
    strong_view.set_defaults(measure=measure_strong_view)
    strong_view.add_argument("--rounds", type=int, default=0, help="rounds of a batch size (default: by its size)")
    options = parser.parse_args()
    options.measure(options)


if __name__ == "__main__":
    main()
