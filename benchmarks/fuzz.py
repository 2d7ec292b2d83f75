"""Thousands of foreign inputs for every reader of halfmoon: what they find, as a table.

    python benchmarks/fuzz.py --cases 10000 --out results/fuzz

Each target of `tests/support/fuzz_targets.py` gets generated and mutated inputs from hypothesis (a tenth), and the rest
from atheris, which looks for inputs that reach code that none has reached before (`pip install atheris`, on Linux; it
is no dependency of halfmoon). Without atheris the rest are random mutations, and the table says so. What an input may
do is said in `tests/support/fuzzing.py`. Every target runs in a process of its own, which a crash or a hang ends;
findings are written to --findings with their inputs, one for each exception and line. `--seconds` ends a target early,
and the table says so. With `--only` the other rows stay as the files have them.
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
"""One of so many cases is drawn by hypothesis."""

INSTRUMENTED = ["halfmoon", "PIL"]
"""Packages whose branches atheris watches."""

MORE = 180
"""Seconds that a process may take over its own limit before it is ended: the start, and one last case."""


@dataclass
class Tally:
    """What came of one target so far."""

    target: str
    reads: str
    drawn: int = 0
    searched: int = 0
    worked: int = 0
    refused: int = 0
    seconds: float = 0.0
    ended: str = ""  # why it did not play all cases
    findings: dict[str, int] = field(default_factory=dict)  # how often each was seen


class Player:
    """One target: plays cases, counts, and keeps the smallest input of each finding."""

    def __init__(self, name: str, cases: int, seconds: float, seed: int, place: Path) -> None:
        from fuzz_targets import TARGETS

        (self.target,) = [each for each in TARGETS if each.name == name]
        self.cases, self.seed, self.place = cases, seed, place
        self.tally = Tally(name, self.target.description)
        self.sizes: dict[str, int] = {}
        self.scene = self.target.make_folder(Path(tempfile.mkdtemp(prefix="fuzz-")) / "case")
        for data in self.target.seeds():  # what is made once is made before the clock runs
            self.play(data)
        self.tally = Tally(name, self.target.description)
        self.began, self.until = time.monotonic(), time.monotonic() + seconds

    @property
    def over(self) -> bool:
        """Whether the time is up."""
        return time.monotonic() > self.until

    def play(self, data: bytes) -> None:
        """Play one case. The input is on disk before, for a crash leaves nothing else."""
        from fuzzing import RuleViolation, run_case

        (self.place / "current").write_bytes(data)
        try:
            verdict = run_case(self.target, self.scene, data)
        except RuleViolation as broken:
            self.note(data, broken)
        else:
            self.tally.worked += verdict == "worked"
            self.tally.refused += verdict == "refused"

    def note(self, data: bytes, broken: Exception) -> None:
        """Count a finding; of each keep the smallest input."""
        cause = broken.__cause__
        frames = traceback.extract_tb(cause.__traceback__) if cause else []
        own = [frame for frame in frames if "/halfmoon/" in frame.filename]
        place = f" ({own[-1].filename.rpartition('/halfmoon/')[2]}:{own[-1].lineno})" if own else ""
        words = f"{type(cause).__name__}{place}" if cause else str(broken).split(": ", 1)[-1][:120]
        self.tally.findings[words] = self.tally.findings.get(words, 0) + 1
        if len(data) < self.sizes.get(words, sys.maxsize):
            self.sizes[words] = len(data)
            name = f"{self.tally.target}-{zlib.crc32(words.encode()):08x}"
            (self.place / name).write_bytes(data)
            (self.place / f"{name}.txt").write_text(f"{words}\n{broken}\n", errors="replace")

    def save(self, ended: str = "") -> None:
        """Write down how far it is."""
        self.tally.ended = ended
        self.tally.seconds = round(time.monotonic() - self.began, 1)
        (self.place / "tally.json").write_text(json.dumps(asdict(self.tally)))

    def draw(self, count: int) -> None:
        """Play cases that hypothesis draws."""
        from hypothesis import HealthCheck, Phase, given, seed, settings

        @seed(self.seed)
        @settings(
            max_examples=count,
            deadline=None,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(self.target.inputs())
        def case(data: bytes) -> None:
            if not self.over:
                self.tally.drawn += 1
                self.play(data)

        case()
        self.save("time")  # until it is known to be done

    def search(self) -> None:
        """Play the rest, and end this process: atheris does not return."""
        seeds = list(self.target.seeds())
        if not GUIDED:
            self.mutate(seeds)
        import atheris

        corpus = self.place / "corpus"
        corpus.mkdir()
        for number, data in enumerate(seeds):
            (corpus / str(number)).write_bytes(data)
        words = self.place / "words"
        escaped = ("".join(f"\\x{byte:02x}" for byte in word) for word in self.target.dictionary if len(word) < 64)
        words.write_text("".join(f'"{word}"\n' for word in escaped if word))
        left = self.cases - self.tally.drawn
        longest = max(4096, 2 * max(map(len, seeds)))
        flags = [f"-seed={self.seed + 1}", "-timeout=0", "-rss_limit_mb=0", "-print_final_stats=0", "-verbosity=0"]
        flags += [f"-max_len={longest}", *([f"-dict={words}"] if words.stat().st_size else [])]
        atheris.Setup(["fuzz", *flags, str(corpus)], lambda data: self._one(data, left))
        atheris.Fuzz()

    def _one(self, data: bytes, left: int) -> None:
        self.tally.searched += 1
        self.play(data)
        done = self.tally.searched >= left
        if done or self.over:
            self.save("" if done else "time")
            os._exit(0)

    def mutate(self, seeds: list[bytes]) -> None:
        """Play random mutations of the seeds."""
        generator = random.Random(self.seed)
        while self.tally.drawn + self.tally.searched < self.cases and not self.over:
            data = bytearray(generator.choice(seeds))
            for _ in range(generator.randint(1, 6)):
                at = generator.randint(0, len(data))
                data[at : at + generator.randint(0, 4)] = generator.randbytes(generator.randint(0, 4))
            self.tally.searched += 1
            self.play(bytes(data))
        self.save("time" if self.over else "")
        os._exit(0)


def child(given: argparse.Namespace) -> None:
    """Play one target in this process."""
    if GUIDED:
        import atheris

        with atheris.instrument_imports(include=INSTRUMENTED):
            import fuzz_targets  # noqa: F401
    import torch

    torch.set_num_threads(1)
    player = Player(given.child, given.cases, given.seconds, given.seed, given.place)
    player.draw(max(1, given.cases // SHARE))
    player.search()


def parent(given: argparse.Namespace) -> None:
    """Play all targets, one after the other, each in a process of its own, and write the table."""
    from fuzz_targets import TARGETS

    given.findings.mkdir(parents=True, exist_ok=True)
    tallies: list[Tally] = []
    for target in TARGETS:
        if given.only and target.name not in given.only:
            continue
        with tempfile.TemporaryDirectory() as name:
            place = Path(name)
            tally = one(given, target.name, place) or Tally(target.name, target.description, ended="it did not start")
            for path in place.glob(f"{target.name}-*"):
                path.rename(given.findings / path.name)
        tallies.append(tally)
        print(
            f"{tally.target}: {tally.drawn + tally.searched} cases, {tally.seconds} s, {tally.findings} {tally.ended}"
        )
        write(given, tallies)


def one(given: argparse.Namespace, name: str, place: Path) -> Tally | None:
    """Play one target in a process, and return what came of it."""
    words = [sys.executable, __file__, "--child", name, "--place", str(place), "--seed", str(given.seed)]
    words += ["--cases", str(given.cases), "--seconds", str(given.seconds)]
    with (place / "log").open("wb") as log, tempfile.TemporaryDirectory() as own:
        try:
            code = subprocess.run(
                words, stdout=log, stderr=log, timeout=given.seconds + MORE, env={**os.environ, "TMPDIR": own}
            ).returncode
            problem = f"the process ended with code {code}" if code else ""
        except subprocess.TimeoutExpired:
            problem = "a case did not end"
    if problem and (place / "current").exists():
        (place / f"{name}-crash").write_bytes((place / "current").read_bytes())
        (place / f"{name}-crash.txt").write_bytes((place / "log").read_bytes()[-5000:])
    try:
        tally = Tally(**json.loads((place / "tally.json").read_text()))
    except (OSError, ValueError):
        return None
    if problem:
        tally.findings[problem] = 1
        tally.ended = problem
    return tally


def write(given: argparse.Namespace, tallies: list[Tally]) -> None:
    """Write the table, and the same as JSON; rows of other targets stay as the files have them."""
    from fuzz_targets import TARGETS

    versions = {name: metadata.version(name) for name in ("halfmoon", "torch", "pillow", "pyarrow", "safetensors")}
    versions |= {name: metadata.version(name) for name in ("hypothesis", *(["atheris"] if GUIDED else []))}
    path = given.out.with_suffix(".json")
    before = json.loads(path.read_text())["targets"] if path.exists() else []
    known = {each["target"]: Tally(**each) for each in before} | {each.target: each for each in tallies}
    tallies = [known[each.name] for each in TARGETS if each.name in known]
    facts: dict[str, Any] = {
        "command": f"python benchmarks/fuzz.py --cases {given.cases} --seconds {given.seconds:g} --seed {given.seed}",
        "machine": f"{os.cpu_count()} processors ({platform.machine()}), shared with other work",
        "python": platform.python_version(),
        "versions": versions,
        "coverage_guided": GUIDED,
        "targets": [asdict(tally) for tally in tallies],
    }
    given.out.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(facts, indent=1) + "\n")
    given.out.with_suffix(".md").write_text(page(facts, tallies))


def page(facts: dict[str, Any], tallies: list[Tally]) -> str:
    """Return the table in Markdown."""
    from fuzz_targets import TARGETS

    how = "coverage-guided" if facts["coverage_guided"] else "random mutations"
    rows = [
        f"| `{t.target}` | {t.reads} | {t.drawn:,} | {t.searched:,} | {t.worked:,} | {t.refused:,} | {t.seconds:,.0f} "
        f"| {'; '.join(f'{words} ({count})' for words, count in t.findings.items()) or 'nothing'} |"
        for t in tallies
    ]
    early = [f"`{t.target}`" for t in tallies if t.ended]
    said = f"Ended before all cases were played: {', '.join(early)}." if early else "All cases were played."
    missing = [f"`{each.name}`" for each in TARGETS if each.name not in {t.target for t in tallies}]
    said += f" Not played: {', '.join(missing)}." if missing else ""
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    return f"""# What foreign inputs do to halfmoon

`{facts["command"]}`, on {facts["machine"]}, Python {facts["python"]}, {versions}.

Every file and message that somebody else may have written, with inputs that are generated from the structure of valid
ones or mutated from them (hypothesis), and inputs that are searched for ({how}, from valid ones). An
input has to work or to be refused with one sentence, within 10 s of processor time and 1 GiB of memory; a refusal has
to leave the folder as it was. "Found" is what did something else, and how often, when it was found: it is repaired, and
its smallest input is a test (`tests/corpus`). Targets were played one by one, on the version of that moment. {said}

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
    parser.add_argument("--place", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    (child if given.child else parent)(given)
