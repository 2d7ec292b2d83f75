"""Fuzz every reader of files and messages with thousands of inputs, and count the outcomes in a table.

    python benchmarks/fuzz.py --cases 10000 --out results/fuzz

Each target of `tests/support/fuzz_targets.py` gets generated and mutated inputs from hypothesis (a tenth), and the others
from atheris, which searches for inputs that reach new code (`pip install atheris`, on Linux; it is not a dependency of
halfmoon). Without atheris the others are random mutations, and the table reports it. The rules for an input are in
`tests/support/fuzzing.py`. Every target runs in a separate process, so a crash or a hang ends only that; findings are
written to --findings with their inputs, one for each exception and line. `--seconds` limits the time of a target, and the
table reports targets that reached it. With `--only` the other rows of the table remain unchanged.
"""

import argparse
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
import traceback
import zlib
from dataclasses import asdict, dataclass, field
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "support"))

GUIDED = find_spec("atheris") is not None
SHARE = 10
"""Hypothesis draws one of this many cases."""

INSTRUMENTED = ["halfmoon", "PIL"]
"""Packages whose branches atheris observes."""

EXTRA_SECONDS = 180
"""Seconds that a process may exceed its limit: for the start, and for the last case."""


@dataclass
class TargetCounts:
    """The outcomes of one target so far."""

    target: str
    reads: str
    drawn: int = 0
    searched: int = 0
    worked: int = 0
    refused: int = 0
    seconds: float = 0.0
    stop_reason: str = ""  # why not all cases were run
    findings: dict[str, int] = field(default_factory=dict)  # how often each was found


class Fuzzer:
    """Runs the cases of one target, counts outcomes, and stores the smallest input of each finding."""

    def __init__(self, name: str, cases: int, seconds: float, seed: int, folder: Path) -> None:
        from fuzz_targets import TARGETS

        (self.target,) = [each for each in TARGETS if each.name == name]
        self.cases = cases
        self.seed = seed
        self.folder = folder
        self.counts = TargetCounts(name, self.target.description)
        self.sizes: dict[str, int] = {}
        self.target_folder = self.target.make_folder(Path(tempfile.mkdtemp(prefix="fuzz-")) / "case")
        for data in self.target.seeds():  # warm up, before the time is measured
            self.run_case(data)
        self.counts = TargetCounts(name, self.target.description)
        self.start_time = time.monotonic()
        self.end_time = self.start_time + seconds

    @property
    def is_time_over(self) -> bool:
        """Whether the time limit is reached."""
        return time.monotonic() > self.end_time

    def run_case(self, data: bytes) -> None:
        """Run one case; its input is written first, because a crash leaves only that."""
        from fuzzing import RuleViolation, run_case

        (self.folder / "current").write_bytes(data)
        try:
            outcome = run_case(self.target, self.target_folder, data)
        except RuleViolation as violation:
            self.record_finding(data, violation)
        else:
            self.counts.worked += outcome == "worked"
            self.counts.refused += outcome == "refused"

    def record_finding(self, data: bytes, violation: Exception) -> None:
        """Count a finding, and store its input if it is the smallest so far."""
        cause = violation.__cause__
        frames = traceback.extract_tb(cause.__traceback__) if cause else []
        internal = [frame for frame in frames if "/halfmoon/" in frame.filename]
        location = f" ({internal[-1].filename.rpartition('/halfmoon/')[2]}:{internal[-1].lineno})" if internal else ""
        title = f"{type(cause).__name__}{location}" if cause else str(violation).split(": ", 1)[-1][:120]
        self.counts.findings[title] = self.counts.findings.get(title, 0) + 1
        if len(data) < self.sizes.get(title, sys.maxsize):
            self.sizes[title] = len(data)
            name = f"{self.counts.target}-{zlib.crc32(title.encode()):08x}"
            (self.folder / name).write_bytes(data)
            (self.folder / f"{name}.txt").write_text(f"{title}\n{violation}\n", errors="replace")

    def save(self, stop_reason: str = "") -> None:
        """Write the counts."""
        self.counts.stop_reason = stop_reason
        self.counts.seconds = round(time.monotonic() - self.start_time, 1)
        (self.folder / "counts.json").write_text(json.dumps(asdict(self.counts)))

    def draw(self, count: int) -> None:
        """Run cases that hypothesis draws."""
        from hypothesis import HealthCheck, Phase, options, seed, settings

        @seed(self.seed)
        @settings(
            max_examples=count,
            deadline=None,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @options(self.target.inputs())
        def case(data: bytes) -> None:
            if not self.is_time_over:
                self.counts.drawn += 1
                self.run_case(data)

        case()
        self.save("time")  # replaced when all cases are run

    def search(self) -> None:
        """Run the remaining cases, and exit: atheris does not return."""
        seeds = list(self.target.seeds())
        if not GUIDED:
            self.mutate(seeds)
        import atheris

        corpus = self.folder / "corpus"
        corpus.mkdir()
        for number, data in enumerate(seeds):
            (corpus / str(number)).write_bytes(data)
        dictionary = self.folder / "dictionary"
        escaped = ("".join(f"\\x{byte:02x}" for byte in word) for word in self.target.dictionary if len(word) < 64)
        dictionary.write_text("".join(f'"{word}"\n' for word in escaped if word))
        remaining = self.cases - self.counts.drawn
        longest = max(4096, 2 * max(map(len, seeds)))
        flags = [f"-seed={self.seed + 1}", "-timeout=0", "-rss_limit_mb=0", "-print_final_stats=0", "-verbosity=0"]
        flags += [f"-max_len={longest}", *([f"-dict={dictionary}"] if dictionary.stat().st_size else [])]
        atheris.Setup(["fuzz", *flags, str(corpus)], lambda data: self._run_searched(data, remaining))
        atheris.Fuzz()

    def _run_searched(self, data: bytes, remaining: int) -> None:
        self.counts.searched += 1
        self.run_case(data)
        done = self.counts.searched >= remaining
        if done or self.is_time_over:
            self.save("" if done else "time")
            os._exit(0)

    def mutate(self, seeds: list[bytes]) -> None:
        """Run random mutations of the seeds."""
        generator = random.Random(self.seed)
        while self.counts.drawn + self.counts.searched < self.cases and not self.is_time_over:
            data = bytearray(generator.choice(seeds))
            for _ in range(generator.randint(1, 6)):
                at = generator.randint(0, len(data))
                data[at : at + generator.randint(0, 4)] = generator.randbytes(generator.randint(0, 4))
            self.counts.searched += 1
            self.run_case(bytes(data))
        self.save("time" if self.is_time_over else "")
        os._exit(0)


def run_target(options: argparse.Namespace) -> None:
    """Run one target in this process."""
    if GUIDED:
        import atheris

        with atheris.instrument_imports(include=INSTRUMENTED):
            import fuzz_targets  # noqa: F401
    import torch

    torch.set_num_threads(1)
    fuzzer = Fuzzer(options.child, options.cases, options.seconds, options.seed, options.folder)
    fuzzer.draw(max(1, options.cases // SHARE))
    fuzzer.search()


def run_all(options: argparse.Namespace) -> None:
    """Run all targets, one after the other, each in a separate process, and write the table."""
    from fuzz_targets import TARGETS

    options.findings.mkdir(parents=True, exist_ok=True)
    all_counts: list[TargetCounts] = []
    for target in TARGETS:
        if options.only and target.name not in options.only:
            continue
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            counts = run_in_process(options, target.name, folder) or TargetCounts(
                target.name, target.description, stop_reason="it did not start"
            )
            for path in folder.glob(f"{target.name}-*"):
                path.rename(options.findings / path.name)
        all_counts.append(counts)
        print(
            f"{counts.target}: {counts.drawn + counts.searched} cases, {counts.seconds} s, {counts.findings} {counts.stop_reason}"
        )
        write_table(options, all_counts)


def run_in_process(options: argparse.Namespace, name: str, folder: Path) -> TargetCounts | None:
    """Run one target in a process, and return its counts; None if it did not start."""
    command = [sys.executable, __file__, "--child", name, "--folder", str(folder), "--seed", str(options.seed)]
    command += ["--cases", str(options.cases), "--seconds", str(options.seconds)]
    with (folder / "log").open("wb") as log, tempfile.TemporaryDirectory() as temporary:
        try:
            code = subprocess.run(
                command,
                stdout=log,
                stderr=log,
                timeout=options.seconds + EXTRA_SECONDS,
                env={**os.environ, "TMPDIR": temporary},
            ).returncode
            problem = f"the process ended with code {code}" if code else ""
        except subprocess.TimeoutExpired:
            problem = "a case did not end"
    if problem and (folder / "current").exists():
        (folder / f"{name}-crash").write_bytes((folder / "current").read_bytes())
        (folder / f"{name}-crash.txt").write_bytes((folder / "log").read_bytes()[-5000:])
    try:
        counts = TargetCounts(**json.loads((folder / "counts.json").read_text()))
    except (OSError, ValueError):
        return None
    if problem:
        counts.findings[problem] = 1
        counts.stop_reason = problem
    return counts


def write_table(options: argparse.Namespace, all_counts: list[TargetCounts]) -> None:
    """Write the table, and the same as JSON; rows of other targets remain."""
    from fuzz_targets import TARGETS

    versions = {name: metadata.version(name) for name in ("halfmoon", "torch", "pillow", "pyarrow", "safetensors")}
    versions |= {name: metadata.version(name) for name in ("hypothesis", *(["atheris"] if GUIDED else []))}
    path = options.out.with_suffix(".json")
    before = json.loads(path.read_text())["targets"] if path.exists() else []
    known = {each["target"]: TargetCounts(**each) for each in before} | {each.target: each for each in all_counts}
    all_counts = [known[each.name] for each in TARGETS if each.name in known]
    record: dict[str, Any] = {
        "command": f"python benchmarks/fuzz.py --cases {options.cases} --seconds {options.seconds:g} --seed {options.seed}",
        "machine": f"{os.cpu_count()} processors ({platform.machine()}), shared with other work",
        "python": platform.python_version(),
        "versions": versions,
        "coverage_guided": GUIDED,
        "targets": [asdict(counts) for counts in all_counts],
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")
    options.out.with_suffix(".md").write_text(format_page(record, all_counts))


def format_page(record: dict[str, Any], all_counts: list[TargetCounts]) -> str:
    """Return the table in Markdown."""
    from fuzz_targets import TARGETS

    search = "coverage-guided" if record["coverage_guided"] else "random mutations"
    rows = [
        f"| `{t.target}` | {t.reads} | {t.drawn:,} | {t.searched:,} | {t.worked:,} | {t.refused:,} | {t.seconds:,.0f} "
        f"| {'; '.join(f'{title} ({count})' for title, count in t.findings.items()) or '-'} |"
        for t in all_counts
    ]
    early = [f"`{t.target}`" for t in all_counts if t.stop_reason]
    note = f"Time ran out before all cases were run: {', '.join(early)}." if early else "All cases were run."
    missing = [f"`{each.name}`" for each in TARGETS if each.name not in {t.target for t in all_counts}]
    note += f" Not run: {', '.join(missing)}." if missing else ""
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    faulty = sum(bool(t.findings) for t in all_counts)
    return f"""# Fuzzing

Fuzzing found faults in {faulty} of {len(all_counts)} readers of foreign files and messages. All of them are repaired, and the
smallest input of each is now a test (`tests/corpus`).

    {record["command"]}

On {record["machine"]}, Python {record["python"]}, {versions}.

hypothesis generates inputs from the structure of valid ones, or mutates valid ones ("drawn"). The other inputs come from a
search that starts with valid ones ("searched": {search}). A reader has to accept an input ("worked") or to
refuse it with one sentence, within 10 s of processor time and 1 GiB of memory. A refusal must not change the folder.
"Found" lists everything else, and how often it occurred. Each target ran separately, on the development version of its time,
to which the lines in this column belong.
{note}

| target | what reads it | drawn | searched | worked | refused | seconds | found |
|---|---|---:|---:|---:|---:|---:|---|
{chr(10).join(rows)}
"""


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=3600.0, help="for one target")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", help="targets; none: all")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "fuzz")
    parser.add_argument("--findings", type=Path, default=Path("fuzz-findings"))
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    (run_target if options.child else run_all)(options)
