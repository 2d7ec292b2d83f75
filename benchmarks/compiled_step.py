"""Time a step of a client update as it is written, and compiled: after how many steps has compiling paid for itself?

    python benchmarks/compiled_step.py [--methods fedavg ...] [--scenes small-loop ...] [--turns 7] [--json]

The digits' network has the batches of the main job, client by client and with 5 or 20 clients as one program; ResNet-9
of width 16 has 10 + 30 images of 3x32x32. Both kinds of steps take turns, in processor seconds. Warm-up is what the
first step takes beyond others, g++ included: with nothing in Inductor's cache on the disk, and with what the first
left there, which is what a later run, process or resumption pays. Inductor's import comes before, and once.
"""

import argparse
import json
import os
import resource
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp()

import torch

import halfmoon
from halfmoon import Config
from halfmoon.cli.main import MAIN_JOB
from halfmoon.contract.scene import begin, dataset, simulate, task
from halfmoon.core.optim import Adam
from halfmoon.engine import compiled, driver
from halfmoon.engine.compiled import Steps
from halfmoon.engine.sampling import Batching
from halfmoon.methods import registry
from halfmoon.models import ResNet9

METHODS = ("fedavg", "fedavg-fixmatch", "feddure")
SCENES = ("small-loop", "small-vmap-5", "small-vmap-20", "resnet9-loop")


@dataclass
class Taken(Exception):
    """The first step that a run would take, with what it is given."""

    steps: Steps
    carry: Any
    batch: Any


class Catch(Steps):
    """Raise the first step."""

    def __call__(self, carry: Any, batch: Any) -> Any:
        """Raise it."""
        raise Taken(self, carry, batch)


def digits(method: str, executor: Any, cohort: int) -> None:
    """Begin digits' main job."""
    own = {name: value for name, value in MAIN_JOB["options"].items() if not isinstance(value, dict)}
    options = own if method == "feddure" else MAIN_JOB["options"].get(method, {})
    kept = {name: value for name, value in MAIN_JOB.items() if name not in ("baselines", "options")}
    job = {**kept, "method": method, "cohort": cohort, "executor": executor, "options": {method: options}}
    with tempfile.TemporaryDirectory() as folder:
        halfmoon.run(Config(**job, device="cpu", run_dir=Path(folder) / "run"))


def resnet9(method: str) -> None:
    """Begin a round of ResNet-9 on random images."""
    shared = task(ResNet9(3, 10, 16), torch.float32, optimizer=Adam())
    held = dataset(((20, 60),) * 2, channels=3, side=32, classes=10)
    plays = registry.entry(method).method
    simulation = simulate(plays, shared, held, batching=Batching(10, 30), cohort=2)
    simulation.open(0)
    plays.round(simulation.task, begin(plays, shared), simulation)


def first_step(scene: str, method: str) -> Taken:
    """Return the first step of a scene."""
    network, executor, *cohort = scene.split("-")
    play: Callable[[], None] = (
        (lambda: digits(method, executor, int(cohort[0]) if cohort else 5))
        if network == "small"
        else (lambda: resnet9(method))
    )
    with mock.patch.object(driver, "Steps", Catch):
        try:
            play()
        except Taken as taken:
            return taken
    raise AssertionError("no step was taken")


def spent() -> float:
    """Return the processor seconds of this process and of those that it has waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def warmed(taken: Taken) -> tuple[Steps, float]:
    """Return the steps, compiled, and the processor seconds of the first one."""
    compiled._programs.cache_clear()
    known = vars(taken.steps)
    steps = Steps(*(known[name] for name in ("client_update", "broadcast", "per_client", "together")), compiled=True)
    began = spent()
    steps(taken.carry, taken.batch)
    assert not steps.remark, steps.remark
    return steps, spent() - began


def measured(scene: str, method: str, turns: int) -> dict[str, Any]:
    """Return a row of the table."""
    taken = first_step(scene, method)
    cold = warmed(taken)[1]
    fast, warm = warmed(taken)
    plain = Steps(fast.client_update, fast.broadcast, fast.per_client, fast.together)
    carries = {"plain": taken.carry, "compiled": taken.carry}
    times: dict[str, list[float]] = {"plain": [], "compiled": []}
    for turn in range(turns + 1):
        for name, steps in (("plain", plain), ("compiled", fast)):
            count, began = 0, spent()
            while spent() - began < 0.5 or count < 3:
                carries[name], _ = steps(carries[name], taken.batch)
                count += 1
            if turn:  # the first one warms caches
                times[name].append((spent() - began) / count)
    eager, quick = (statistics.median(times[name]) for name in ("plain", "compiled"))
    gained = eager - quick
    return {
        "scene": scene,
        "method": method,
        "images": [list(taken.batch.x.shape), {name: list(u.shape) for name, u in taken.batch.u.items()}],
        "eager_ms": round(1e3 * eager, 2),
        "compiled_ms": round(1e3 * quick, 2),
        "ratio": round(statistics.median(b / a for a, b in zip(*times.values(), strict=True)), 2),
        "cold_s": round(cold, 1),
        "warm_s": round(warm, 1),
        "cold_steps": round(cold / gained) if gained > 0 else None,
        "warm_steps": round(warm / gained) if gained > 0 else None,
    }


def main() -> None:
    """Print a line for each scene and method."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--methods", nargs="+", default=METHODS)
    parser.add_argument("--scenes", nargs="+", choices=SCENES, default=SCENES)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--json", action="store_true", help="print JSON, a line a row")
    given = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    compiled.check(torch.device("cpu"))
    heads = {
        "scene": "scene",
        "method": "method",
        "eager_ms": "as written, ms",
        "compiled_ms": "compiled, ms",
        "ratio": "ratio",
        "cold_s": "warm-up, s",
        "cold_steps": "paid after steps",
        "warm_s": "from the disk, s",
        "warm_steps": "paid after steps",
    }
    if not given.json:
        print(f"| {' | '.join(heads.values())} |\n|{'---|' * len(heads)}")
    for scene in given.scenes:
        for method in given.methods:
            row = measured(scene, method, given.turns)
            print(json.dumps(row) if given.json else f"| {' | '.join(str(row[name]) for name in heads)} |", flush=True)


if __name__ == "__main__":
    main()
