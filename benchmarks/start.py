"""The time until `halfmoon --help` is over, and until `halfmoon run` takes its first step on digits.

    python benchmarks/start.py [--against FOLDER] [--turns 5]

Seconds of the processor (and of the wall clock) of a process from its start, medians over turns; with another checkout
of halfmoon in turns, and the medians of the ratios within a turn.
"""

import argparse
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

FIRST = """\
import importlib.machinery, os, sys
class Found(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name != "halfmoon.core.autodiff":
            return None
        spec = super().find_spec(name, path, target)
        run = spec.loader.exec_module
        def exec_module(module):
            run(module)
            module.grad_and_value = lambda *_, **__: os._exit(17)
        spec.loader.exec_module = exec_module
        return spec
sys.meta_path.insert(0, Found)
"""
"""A process that ends with code 17 when its first step computes a gradient."""

WORDS = {
    "--help": (["--help"], 0),
    "run": (["run", "--method", "fedavg-fixmatch", "--rounds", "1", "--run-dir", "{folder}/run"], 17),
}


def started(tree: Path, words: list[str], code: int) -> tuple[float, float]:
    """Return the processor's and the wall clock's seconds of a command of the halfmoon in a checkout."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = [word.format(folder=folder) for word in words]
        program = f"{FIRST if code else ''}import sys\nfrom halfmoon.cli.main import main\nsys.exit(main({arguments}))"
        environment = {**os.environ, "PYTHONPATH": str(tree / "src"), "OMP_NUM_THREADS": "1"}
        begin = time.perf_counter()
        with Path(folder, "words").open("w") as file:
            process = subprocess.Popen([sys.executable, "-c", program], stdout=file, stderr=file, env=environment)
            _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode != code:
            sys.exit(Path(folder, "words").read_text())
        return usage.ru_utime + usage.ru_stime, time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description="How long halfmoon takes to start.")
    parser.add_argument("--against", type=Path, metavar="FOLDER", help="another checkout")
    parser.add_argument("--turns", type=int, default=5)
    options = parser.parse_args()
    trees = [ROOT, *([] if options.against is None else [options.against])]
    print(shlex.join(["python", f"benchmarks/{Path(__file__).name}", *sys.argv[1:]]), end="\n\n")
    print("| | processor, s | wall clock, s | the other's processor, s | times |\n|---|---|---|---|---|")
    for name, (words, code) in WORDS.items():
        turns = [[started(tree, words, code) for tree in trees] for _ in range(options.turns)]
        here, other = [each[0] for each in turns], [each[-1] for each in turns]
        ratio = statistics.median(a[0] / b[0] for a, b in zip(here, other, strict=True))
        cells = [statistics.median(each[k] for each in here) for k in (0, 1)]
        print(f"| {name} | {cells[0]:.2f} | {cells[1]:.2f} ", end="")
        print(f"| {statistics.median(each[0] for each in other):.2f} | {ratio:.2f} |" if len(trees) > 1 else "| | |")


if __name__ == "__main__":
    main()
