"""Inject faults into runs and read hostile input, many times, and count the outcomes in one table.

    python benchmarks/faults.py [--minutes 10] [--only KIND ...] [--seed 0] [--out results/faults]

Each kind of fault runs in a separate process for its share of the minutes. A trial ends with the same bytes as an
undisturbed run, or with an error message of one sentence ("refused"). "Silent" is other bytes without an error,
"traceback" any other exception, "hung" a process that did not end. OUT.json has the sums over all calls of this script
and the next seed, so that it can be stopped and continued; OUT.md has the table. Faults between real servers and sites
over the network are in `federation_faults.py` and `federation_attacks.py`.
"""

import argparse
import faulthandler
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any

import psutil

from halfmoon.config.schema import Config
from halfmoon.core.errors import UserError
from halfmoon.engine.executors.processes import ProcessExecutor
from halfmoon.runs import runner
from halfmoon.storage import atomic_io

TESTS = Path(__file__).resolve().parent.parent / "tests"
sys.path.insert(0, str(TESTS / "support"))

import damaged_folders as folders  # noqa: E402
import disk_failures as disks  # noqa: E402
from fuzz_targets import TARGETS, list_decompression_bombs  # noqa: E402
from fuzzing import RuleViolation, run_case  # noqa: E402
from interrupted_runs import InterruptAfterRound  # noqa: E402

SAME, REFUSED, SILENT, TRACEBACK, HUNG = OUTCOMES = ("same", "refused", "silent", "traceback", "hung")
EXTRA_SECONDS = 180
"""Seconds that a process may exceed its share before it counts as hung."""
MAX_RUNS = 10
"""Runs in which a trial tries to kill a process of Ray."""

Trial = Callable[[random.Random], str]
"""Runs one trial and returns its outcome; an AssertionError is "silent", another exception "traceback"."""


@contextmanager
def kill_run(folder: Path) -> Iterator[Trial]:
    """Kill the process of a run at a random time, and resume the run."""
    options = {**folders.RUN_OPTIONS, "rounds": folders.ROUNDS}
    runner.run_in_folder(Config(**options), folder / "straight")
    expected = folders.read_numbers(folder / "straight")
    number = count()
    code = "import sys; from pathlib import Path; from halfmoon import Config; from halfmoon.runs import runner; "
    code += f"print(1, flush=True); runner.run_in_folder(Config(**{options!r}), Path(sys.argv[1]))"

    def trial(generator: random.Random) -> str:
        path = folder / f"run-{next(number)}"
        child = subprocess.Popen(
            [sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        assert child.stdout is not None
        child.stdout.readline()
        time.sleep(generator.uniform(0, 2))
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
        runner.run_in_folder(Config(**options), path)
        assert folders.read_numbers(path) == expected
        return SAME

    yield trial


@contextmanager
def fail_disk(folder: Path, error_number: int | None) -> Iterator[Trial]:
    """Let one call that changes a run folder fail, or lose power at it (None)."""
    expected = disks.run_and_read(folder / "straight")
    calls = disks.count_calls(folder / "counted")
    number = count()

    def trial(generator: random.Random) -> str:
        path = folder / f"run-{next(number)}"
        found = disks.run_with_failure(path, generator.randrange(calls), error_number, expected)
        return SAME if found == "same" else REFUSED

    yield trial


@contextmanager
def damage_run(folder: Path, damage: str) -> Iterator[Trial]:
    """Damage a file of a finished or of a stopped run."""
    config = Config(**folders.RUN_OPTIONS, rounds=folders.ROUNDS)
    runner.run_in_folder(config, folder / "finished")
    with suppress(KeyboardInterrupt):
        runner.run_in_folder(config, folder / "stopped", InterruptAfterRound(folders.ROUNDS - 1))
    expected = folders.read_numbers(folder / "finished")
    readers = (("finished", folders.read_numbers), ("stopped", folders.resume_and_read_numbers))

    def trial(generator: random.Random) -> str:
        name, read = generator.choice(readers)
        file = generator.choice(folders.list_files(folder / name))
        found = folders.read_damaged(folder / name, folder / "run", file, damage, generator, read, expected)
        return SAME if found == "equal" else REFUSED

    yield trial


@contextmanager
def read_hostile(folder: Path, names: tuple[str, ...]) -> Iterator[Trial]:
    """Read a valid input of which a few bytes are changed, removed or duplicated."""
    chosen = [target for target in TARGETS if target.name in names]
    inputs = {target.name: (target.make_folder(folder / target.name), list(target.seeds())) for target in chosen}

    def trial(generator: random.Random) -> str:
        target = generator.choice(chosen)
        target_folder, seeds = inputs[target.name]
        data = bytearray(generator.choice(seeds))
        for _ in range(generator.randint(1, 6)):
            at = generator.randint(0, len(data))
            data[at : at + generator.randint(0, 4)] = generator.randbytes(generator.randint(0, 4))
        try:
            return REFUSED if run_case(target, target_folder, bytes(data)) == "refused" else SAME
        except RuleViolation as violation:
            return TRACEBACK if violation.__cause__ else SILENT

    yield trial


@contextmanager
def read_archive_bomb(folder: Path) -> Iterator[Trial]:
    """Read a small file that unpacks to up to four gigabytes; memory and time of a trial are limited."""
    targets = {target.name: target for target in TARGETS if target.name in dict(list_decompression_bombs())}
    target_folders = {name: target.make_folder(folder / name) for name, target in targets.items()}

    def trial(generator: random.Random) -> str:
        name, pack = generator.choice(list_decompression_bombs())
        try:
            verdict = run_case(targets[name], target_folders[name], pack(generator.randint(1, 256)))
            return REFUSED if verdict == "refused" else SAME
        except RuleViolation as violation:
            return TRACEBACK if violation.__cause__ else SILENT

    yield trial


@contextmanager
def kill_ray_actor(folder: Path) -> Iterator[Trial]:
    """Kill a process of Ray that trains clients in the middle of a run, and resume the run."""
    import ray  # an extra

    options = {**folders.RUN_OPTIONS, "rounds": folders.ROUNDS, "executor": "loop"}
    runner.run_in_folder(Config(**options), folder / "straight")
    expected = folders.read_numbers(folder / "straight")
    number = count()
    # Ray lowers the priority of its workers: on a busy machine they would hardly compute.
    system = {"worker_niceness": 0}
    ray.init(num_cpus=2, log_to_driver=False, logging_level="ERROR", include_dashboard=False, _system_config=system)

    def trial(generator: random.Random) -> str:
        for _ in range(MAX_RUNS):
            path = folder / f"run-{next(number)}"
            killed: list[int] = []
            config = Config(**options, workers="ray")
            killer = threading.Timer(generator.uniform(0, 0.5), kill_actors, [killed])
            killer.start()
            with suppress(UserError):
                runner.run_in_folder(config, path)
            killer.join()
            runner.run_in_folder(config, path)
            assert folders.read_numbers(path) == expected
            if killed:  # otherwise the run ended first
                return SAME
        raise RuntimeError(f"no process of Ray could be killed in {MAX_RUNS} runs")

    yield trial
    ray.shutdown()


def kill_actors(killed: list[int]) -> None:
    """Kill the Ray processes of this process, as soon as there are any, and add their process ids to `killed`."""
    until = time.monotonic() + 5
    while not killed and time.monotonic() < until:
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):
                if process.cmdline()[:1] and process.cmdline()[0].startswith("ray::_answer"):
                    process.kill()
                    killed.append(process.pid)


@contextmanager
def end_worker(folder: Path) -> Iterator[Trial]:
    """End one of the worker processes that train clients."""

    def trial(generator: random.Random) -> str:
        pool = ProcessExecutor(2)
        try:
            list(pool.map(os._exit, [generator.randint(1, 9)] * generator.randint(2, 4)))
        except UserError:
            return REFUSED
        finally:
            pool.close()
        return SILENT

    yield trial


FILES = {
    "hostile image": ("image", "predict", "idx", "parquet", "records"),
    "hostile DICOM": ("dicom",),
    "hostile CSV or TOML": ("config", "federation", "labels", "classes"),
    "hostile model or run folder": (
        *("model", "split", "run-metrics.jsonl", "run-timings.jsonl", "run-summary.json", "run-split.json"),
        *("run-run.json", "run-config.toml", "sweep.json"),
    ),
    "hostile server": ("message", "terms", "member"),
    "hostile site": ("reply",),
}
EIO, FULL, FILES_OPEN = disks.ERROR_NUMBERS
KINDS: dict[str, Callable[[Path], Any]] = {
    "kill": kill_run,
    "power loss": lambda folder: fail_disk(folder, None),
    "failing call": lambda folder: fail_disk(folder, EIO),
    "full disk": lambda folder: fail_disk(folder, FULL),
    "too many files": lambda folder: fail_disk(folder, FILES_OPEN),
    "bit flip": lambda folder: damage_run(folder, "flip"),
    "cut file": lambda folder: damage_run(folder, "cut"),
    "deleted file": lambda folder: damage_run(folder, "delete"),
    **{kind: lambda folder, names=names: read_hostile(folder, names) for kind, names in FILES.items()},
    "archive bomb": read_archive_bomb,
    "dead worker": end_worker,
    "dead Ray actor": kill_ray_actor,
}


def run_trials(kind: str, seed: int, seconds: float) -> None:
    """Run trials of one kind until its time is over; print the number of each outcome after each trial."""
    counts = dict.fromkeys(OUTCOMES, 0)
    notes: list[str] = []
    with tempfile.TemporaryDirectory(prefix="halfmoon-faults-") as folder, KINDS[kind](Path(folder)) as trial:
        end = time.monotonic() + seconds
        number = 0
        while number == 0 or time.monotonic() < end:
            try:
                outcome = trial(random.Random(f"{kind} {seed} {number}"))
            except AssertionError as error:
                outcome = SILENT
                notes.append(f"{kind}, seed {seed}, trial {number}: {str(error)[:200]}")
            except Exception as error:
                outcome = TRACEBACK
                notes.append(f"{kind}, seed {seed}, trial {number}: {type(error).__name__}: {str(error)[:200]}")
            counts[outcome] += 1
            number += 1
            print(json.dumps({"counts": counts, "notes": notes[:5]}), flush=True)


def run_kind(kind: str, seed: int, seconds: float) -> dict[str, Any]:
    """Run trials of one kind in a process, and return its counts.

    The process is forked, because importing PyTorch in each of eighteen takes a minute.
    """
    with tempfile.NamedTemporaryFile("r", prefix="halfmoon-faults-") as output:
        process = multiprocessing.get_context("fork").Process(
            target=run_redirected, args=(kind, seed, seconds, output.name)
        )
        process.start()
        process.join(seconds + EXTRA_SECONDS)
        fault = HUNG if process.exitcode is None else TRACEBACK if process.exitcode else ""
        process.kill()
        lines = output.read().splitlines()
    reports = [json.loads(line) for line in lines if line.startswith('{"counts"')]
    found = reports[-1] if reports else {"counts": dict.fromkeys(OUTCOMES, 0), "notes": []}
    if fault:
        found["counts"][fault] += 1
        last = "did not end\n" if fault == HUNG else ""
        last += "\n".join(lines)[-1500:]
        found["notes"].append(f"{kind}, seed {seed}: {last}")
    return found


def run_redirected(kind: str, seed: int, seconds: float, output: str) -> None:
    """Run trials in this process, with its output in a file."""
    with open(output, "w") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    faulthandler.dump_traceback_later(seconds + EXTRA_SECONDS - 5)  # the note then shows where it hangs
    run_trials(kind, seed, seconds)


PAGE = """# Faults

Of {trials:,} trials with injected faults or hostile input, {same:,} have the bytes of an undisturbed run and {refused:,} an error
message. Any other outcome is a failure, and makes the benchmark exit with an error.

    python benchmarks/faults.py

A trial injects one fault into a run, or reads one hostile input. Its outcome is one of:

- Same bytes: the run, resumed if the fault stopped it, has the bytes of an undisturbed run. For hostile input: it could be
  read, and no other file changed.
- Refused: an error message of one sentence.
- Silent: other bytes, without an error.
- Traceback: any other exception.
- Hung: the process did not end.

"Power loss", "failing call", "full disk" and "too many files" let one call that changes the run folder fail. "Dead Ray actor" kills
an actor in a round and resumes the run. The numbers are sums over several calls of the script with different seeds. Faults
between real servers and sites are in [federation_faults.md](federation_faults.md).

{rows}

{notes}"""


def format_page(state: dict[str, Any]) -> str:
    """Return the table as Markdown."""
    rows = ["| fault | trials | same bytes | refused with a sentence | silent | traceback | hung |", "|---" * 7 + "|"]
    for kind in (kind for kind in KINDS if kind in state["counts"]):
        counts = [state["counts"][kind][outcome] for outcome in OUTCOMES]
        rows.append(f"| {kind} | {sum(counts):,} | " + " | ".join(f"{number:,}" for number in counts) + " |")
    total = [sum(state["counts"][kind][outcome] for kind in KINDS if kind in state["counts"]) for outcome in OUTCOMES]
    rows.append(f"| all | {sum(total):,} | " + " | ".join(f"{number:,}" for number in total) + " |")
    notes = "".join(f"- {note}\n" for note in state["notes"])
    return (
        PAGE.format(trials=sum(total), same=total[0], refused=total[1], rows="\n".join(rows), notes=notes).rstrip()
        + "\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, help="for all kinds together, without their preparation")
    available = [kind for kind in KINDS if kind != "dead Ray actor" or find_spec("ray")]
    parser.add_argument("--only", nargs="+", choices=KINDS, metavar="KIND", default=available)
    parser.add_argument(
        "--seed", type=int, default=0, help="of the first call; later calls continue from the stored state"
    )
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    file = options.out and options.out.with_suffix(".json")
    state = (file and atomic_io.read_json(file)) or {"seed": options.seed, "counts": {}, "notes": []}
    for kind in options.only:
        found = run_kind(kind, state["seed"], 60 * options.minutes / len(options.only))
        before = state["counts"].get(kind, dict.fromkeys(OUTCOMES, 0))
        state["counts"][kind] = {outcome: before[outcome] + found["counts"][outcome] for outcome in OUTCOMES}
        state["notes"] += found["notes"]
        print(kind, found["counts"], *found["notes"], flush=True)
        if file:
            file.write_text(json.dumps(state, indent=1) + "\n")
            options.out.with_suffix(".md").write_text(format_page(state))
    print(format_page(state))
    state["seed"] += 1
    if file:
        file.write_text(json.dumps(state, indent=1) + "\n")
    if any(counts[outcome] for counts in state["counts"].values() for outcome in (SILENT, TRACEBACK, HUNG)):
        sys.exit("\n".join(state["notes"]) or "a trial was silent, raised, or did not end")


if __name__ == "__main__":
    main()
