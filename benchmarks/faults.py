"""Everything that can go wrong, played again and again, as one table: the same bytes, a sentence, or a fault of ours.

    python benchmarks/faults.py [--minutes 10] [--only KIND ...] [--seed 0] [--out results/faults]

Each kind of fault is played in a process of its own for its share of the minutes. A trial ends with the same bytes as
an undisturbed run, or with a refusal in one sentence ("refused"). "Silent" is other bytes without a word, "traceback"
any other exception, "hung" a process that did not end. OUT.json adds up all calls, with the seeds of their trials, so
that the benchmark can be stopped and gone on with; OUT.md shows it. Faults between real servers and sites over the
network have scripts of their own: `federation_faults.py` and `federation_attacks.py`.
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
from pathlib import Path
from typing import Any

import psutil

from halfmoon.config.schema import Config
from halfmoon.core.errors import UserError
from halfmoon.engine.executors.processes import ProcessExecutor
from halfmoon.runs import runner
from halfmoon.storage import atomic_io

TESTS = Path(__file__).resolve().parent.parent / "tests"
sys.path[:0] = [str(TESTS / "support"), str(TESTS / "storage")]

import test_failing_disks as disks  # noqa: E402
import test_integrity as folders  # noqa: E402
from fuzz_targets import TARGETS, list_decompression_bombs  # noqa: E402
from fuzzing import RuleViolation, run_case  # noqa: E402
from interrupted_runs import InterruptAfterRound  # noqa: E402

SAME, REFUSED, SILENT, TRACEBACK, HUNG = VERDICTS = ("same", "refused", "silent", "traceback", "hung")
PATIENCE = 180
"""Seconds that a process may take over its share before it counts as hung."""
TRIES = 10
"""Runs in which a process of Ray is looked for, to be killed."""

Trial = Callable[[random.Random], str]
"""Plays one trial and returns its verdict; an AssertionError is "silent", another exception "traceback"."""


@contextmanager
def _killed(place: Path) -> Iterator[Trial]:
    """A run's process is killed at a random moment, and gone on with."""
    options = {**folders.SMALL, "rounds": folders.ROUNDS}
    runner.run_in_folder(Config(**options), place / "straight")
    wanted, number = folders.numbers(place / "straight"), iter(range(10**9))
    code = "import sys; from pathlib import Path; from halfmoon import Config; from halfmoon.runs import runner; "
    code += f"print(1, flush=True); runner.run_in_folder(Config(**{options!r}), Path(sys.argv[1]))"

    def trial(chance: random.Random) -> str:
        path = place / f"run-{next(number)}"
        child = subprocess.Popen(
            [sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        assert child.stdout is not None
        child.stdout.readline()
        time.sleep(chance.uniform(0, 2))
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
        runner.run_in_folder(Config(**options), path)
        assert folders.numbers(path) == wanted
        return SAME

    yield trial


@contextmanager
def _failing(place: Path, number: int | None) -> Iterator[Trial]:
    """Each call that changes a run's folder fails once, or the power goes."""
    wanted, count, serial = (
        disks.run_and_read(place / "straight"),
        disks.count_calls(place / "counted"),
        iter(range(10**9)),
    )

    def trial(chance: random.Random) -> str:
        found = disks.run_with_failure(place / f"run-{next(serial)}", chance.randrange(count), number, wanted)
        return SAME if found == "same" else REFUSED

    yield trial


@contextmanager
def _damaged(place: Path, act: str) -> Iterator[Trial]:
    """A file of a finished or of a stopped run is damaged."""
    config = Config(**folders.SMALL, rounds=folders.ROUNDS)
    runner.run_in_folder(config, place / "finished")
    with suppress(KeyboardInterrupt):
        runner.run_in_folder(config, place / "stopped", InterruptAfterRound(folders.ROUNDS - 1))
    folders.WANTED[:] = [folders.numbers(place / "finished")]

    def trial(chance: random.Random) -> str:
        name, read = chance.choice((("finished", folders.numbers), ("stopped", folders.resumed)))
        file = chance.choice(folders.names(place / name))
        found = folders.damaged(place / name, place / "run", file, act, chance, read)
        return SAME if found == "equal" else REFUSED

    yield trial


@contextmanager
def _hostile(place: Path, names: tuple[str, ...]) -> Iterator[Trial]:
    """Somebody else's bytes are read: a valid input with a few of its bytes changed, left out or doubled."""
    chosen = [target for target in TARGETS if target.name in names]
    scenes = {target.name: (target.make_folder(place / target.name), list(target.seeds())) for target in chosen}

    def trial(chance: random.Random) -> str:
        target = chance.choice(chosen)
        scene, seeds = scenes[target.name]
        data = bytearray(chance.choice(seeds))
        for _ in range(chance.randint(1, 6)):
            at = chance.randint(0, len(data))
            data[at : at + chance.randint(0, 4)] = chance.randbytes(chance.randint(0, 4))
        try:
            return REFUSED if run_case(target, scene, bytes(data)) == "refused" else SAME
        except RuleViolation as broken:
            return TRACEBACK if broken.__cause__ else SILENT

    yield trial


@contextmanager
def _bomb(place: Path) -> Iterator[Trial]:
    """A small file unpacks to up to four gigabytes; memory and time of a trial are bounded."""
    made = {target.name: target for target in TARGETS if target.name in dict(list_decompression_bombs())}
    scenes = {name: target.make_folder(place / name) for name, target in made.items()}

    def trial(chance: random.Random) -> str:
        name, pack = chance.choice(list_decompression_bombs())
        try:
            return REFUSED if run_case(made[name], scenes[name], pack(chance.randint(1, 256))) == "refused" else SAME
        except RuleViolation as broken:
            return TRACEBACK if broken.__cause__ else SILENT

    yield trial


@contextmanager
def _actor(place: Path) -> Iterator[Trial]:
    """A process of Ray that trains clients is killed in the middle of a run, which is then gone on with."""
    import ray  # an extra

    options = {**folders.SMALL, "rounds": folders.ROUNDS, "executor": "loop"}
    runner.run_in_folder(Config(**options), place / "straight")
    wanted, number = folders.numbers(place / "straight"), iter(range(10**9))
    # Ray makes its workers nice: on a busy machine they would hardly get to compute.
    system = {"worker_niceness": 0}
    ray.init(num_cpus=2, log_to_driver=False, logging_level="ERROR", include_dashboard=False, _system_config=system)

    def trial(chance: random.Random) -> str:
        for _ in range(TRIES):
            path, killed = place / f"run-{next(number)}", list[int]()
            config = Config(**options, workers="ray")
            killer = threading.Timer(chance.uniform(0, 0.5), _kill_actors, [killed])
            killer.start()
            with suppress(UserError):
                runner.run_in_folder(config, path)
            killer.join()
            runner.run_in_folder(config, path)
            assert folders.numbers(path) == wanted
            if killed:  # else the run was over first
                return SAME
        raise RuntimeError(f"no process of Ray could be killed in {TRIES} runs")

    yield trial
    ray.shutdown()


def _kill_actors(killed: list[int]) -> None:
    """Kill the processes of Ray that compute for this one, as soon as there are any, and note their numbers."""
    until = time.monotonic() + 5
    while not killed and time.monotonic() < until:
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):
                if process.cmdline()[:1] and process.cmdline()[0].startswith("ray::_answer"):
                    process.kill()
                    killed.append(process.pid)


@contextmanager
def _worker(place: Path) -> Iterator[Trial]:
    """One of the processes that train clients dies."""

    def trial(chance: random.Random) -> str:
        pool = ProcessExecutor(2)
        try:
            list(pool.map(os._exit, [chance.randint(1, 9)] * chance.randint(2, 4)))
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
EIO, FULL, FILES_OPEN = disks.REFUSALS
KINDS: dict[str, Callable[[Path], Any]] = {
    "kill": _killed,
    "power loss": lambda place: _failing(place, None),
    "failing call": lambda place: _failing(place, EIO),
    "full disk": lambda place: _failing(place, FULL),
    "too many files": lambda place: _failing(place, FILES_OPEN),
    "bit flip": lambda place: _damaged(place, "flip"),
    "cut file": lambda place: _damaged(place, "cut"),
    "deleted file": lambda place: _damaged(place, "delete"),
    **{kind: lambda place, names=names: _hostile(place, names) for kind, names in FILES.items()},
    "archive bomb": _bomb,
    "dead worker": _worker,
    "dead Ray actor": _actor,
}


def child(kind: str, seed: int, seconds: float) -> None:
    """Play one kind until its time is up; print the number of trials with each verdict after each trial."""
    counts, notes = dict.fromkeys(VERDICTS, 0), list[str]()
    with tempfile.TemporaryDirectory(prefix="halfmoon-faults-") as place, KINDS[kind](Path(place)) as trial:
        until, number = time.monotonic() + seconds, 0
        while number == 0 or time.monotonic() < until:
            try:
                verdict = trial(random.Random(f"{kind} {seed} {number}"))
            except AssertionError as error:
                verdict = SILENT
                notes.append(f"{kind}, seed {seed}, trial {number}: {str(error)[:200]}")
            except Exception as error:
                verdict = TRACEBACK
                notes.append(f"{kind}, seed {seed}, trial {number}: {type(error).__name__}: {str(error)[:200]}")
            counts[verdict] += 1
            number += 1
            print(json.dumps({"counts": counts, "notes": notes[:5]}), flush=True)


def started(kind: str, seed: int, seconds: float) -> dict[str, Any]:
    """Return what came of a kind in a process of its own, forked: eighteen times PyTorch's import are a minute."""
    with tempfile.NamedTemporaryFile("r", prefix="halfmoon-faults-") as said:
        process = multiprocessing.get_context("fork").Process(target=_told, args=(kind, seed, seconds, said.name))
        process.start()
        process.join(seconds + PATIENCE)
        fault = HUNG if process.exitcode is None else TRACEBACK if process.exitcode else ""
        process.kill()
        lines = said.read().splitlines()
    facts = [json.loads(line) for line in lines if line.startswith('{"counts"')]
    found = facts[-1] if facts else {"counts": dict.fromkeys(VERDICTS, 0), "notes": []}
    if fault:
        found["counts"][fault] += 1
        last = "did not end\n" if fault == HUNG else ""
        last += "\n".join(lines)[-1500:]
        found["notes"].append(f"{kind}, seed {seed}: {last}")
    return found


def _told(kind: str, seed: int, seconds: float, said: str) -> None:
    """Play a kind in this process, whose words go into a file."""
    with open(said, "w") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    faulthandler.dump_traceback_later(seconds + PATIENCE - 5)  # so that the note says where it hangs
    child(kind, seed, seconds)


def page(facts: dict[str, Any]) -> str:
    """Return the table as Markdown."""
    rows = ["| fault | trials | same bytes | refused with a sentence | silent | traceback | hung |", "|---" * 7 + "|"]
    for kind in (kind for kind in KINDS if kind in facts["counts"]):
        counts = [facts["counts"][kind][verdict] for verdict in VERDICTS]
        rows.append(f"| {kind} | {sum(counts):,} | " + " | ".join(f"{count:,}" for count in counts) + " |")
    total = [sum(counts[verdict] for counts in facts["counts"].values()) for verdict in VERDICTS]
    rows.append(f"| all | {sum(total):,} | " + " | ".join(f"{count:,}" for count in total) + " |")
    notes = "".join(f"- {note}\n" for note in facts["notes"])
    how = "Of hostile bytes, the same bytes are those that could be read and changed nothing else. "
    how += "After an actor was killed in a round, the run is resumed."
    return f"# Faults\n\n    python benchmarks/faults.py\n\n{chr(10).join(rows)}\n\n{how}\n\n{notes}".rstrip() + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, help="for all kinds together, without their starts")
    there = [kind for kind in KINDS if kind != "dead Ray actor" or find_spec("ray")]
    parser.add_argument("--only", nargs="+", choices=KINDS, metavar="KIND", default=there)
    parser.add_argument("--seed", type=int, default=0, help="of the first call; the next one goes on")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    kept = given.out and given.out.with_suffix(".json")
    facts = (kept and atomic_io.read_json(kept)) or {"seed": given.seed, "counts": {}, "notes": []}
    for kind in given.only:
        found = started(kind, facts["seed"], 60 * given.minutes / len(given.only))
        before = facts["counts"].get(kind, dict.fromkeys(VERDICTS, 0))
        facts["counts"][kind] = {verdict: before[verdict] + found["counts"][verdict] for verdict in VERDICTS}
        facts["notes"] += found["notes"]
        print(kind, found["counts"], *found["notes"], flush=True)
        if kept:
            kept.write_text(json.dumps(facts, indent=1) + "\n")
            given.out.with_suffix(".md").write_text(page(facts))
    print(page(facts))
    facts["seed"] += 1
    if kept:
        kept.write_text(json.dumps(facts, indent=1) + "\n")
    if any(counts[verdict] for counts in facts["counts"].values() for verdict in (SILENT, TRACEBACK, HUNG)):
        sys.exit("\n".join(facts["notes"]) or "a trial was silent, raised, or did not end")


if __name__ == "__main__":
    main()
