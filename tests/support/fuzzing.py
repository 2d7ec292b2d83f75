"""What a fuzzed input may do: work or be refused with a `UserError`, in bounded time and memory, leaving nothing half.

A `Target` reads one file (or one message) that somebody else has written. `run_case` gives it some bytes and raises
`RuleViolation` for whatever it must not do; `test_fuzz.py` and `benchmarks/fuzz.py` do so with thousands of them.
"""

import contextlib
import io
import math
import shutil
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from hypothesis import strategies as st

from halfmoon.core.errors import UserError

CPU_SECONDS = 10
"""Processor time that a case may take; a case that waits, instead of computing, may take `WALL_SECONDS` by the clock."""

WALL_SECONDS = 120
MEMORY_MEGABYTES = 1024
"""How much the memory of the process may grow during a case, at its peak; measured on Linux alone, which counts it."""

ADDRESS_SPACE_BYTES = 4 * 2**30
"""Addresses that a case may take beside those that are taken: what asks for more gets a MemoryError.
Larger than `MEMORY_MEGABYTES`, for address space is reserved in large pieces that nobody touches."""

UNFINISHED_SUFFIXES = (".partial", ".part")
"""Suffixes of files that are being written."""


class RuleViolation(AssertionError):
    """What an input made halfmoon do that no input may."""


class LimitExceeded(BaseException):
    """A case took longer than it may; no `except Exception` hides it."""


@dataclass
class CaseFolder:
    """The folder in which a case is played: `file` is what is fuzzed, `held` what lies beside it before the case."""

    folder: Path
    file: Path
    held: dict[str, bytes] = field(default_factory=dict)
    now: dict[str, bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.held = self.now = read_files(self.folder)

    def put(self, data: bytes) -> dict[str, bytes]:
        """Bring the folder back to what it was, with `data` as the file, and return what it then holds."""
        name = self.file.relative_to(self.folder).as_posix()
        now = self.now
        for other in now.keys() - self.held.keys() - {name}:
            (self.folder / other).unlink()
        for other, content in self.held.items():
            if other != name and now.get(other) != content:
                (self.folder / other).parent.mkdir(parents=True, exist_ok=True)
                (self.folder / other).write_bytes(content)
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self.file.write_bytes(data)
        self.now = {**self.held, name: data}
        return self.now


@dataclass(frozen=True)
class Target:
    """One reader of foreign bytes.

    `scene` makes a folder, once; `seeds` are valid inputs; `inputs` draws generated and mutated ones. `play` reads
    `scene.file`; it may raise UserError, which has to leave the folder as it was, but for files named in `loose`."""

    name: str
    reads: str  # in words: what halfmoon does with the input
    scene: Callable[[Path], CaseFolder]
    seeds: Callable[[], Sequence[bytes]]
    inputs: Callable[[], st.SearchStrategy[bytes]]
    play: Callable[[CaseFolder], object]
    loose: tuple[str, ...] = (".lock", "lock")
    dictionary: tuple[bytes, ...] = ()  # words that a fuzzer may put in


Verdict = Literal["worked", "refused"]


def run_case(target: Target, scene: CaseFolder, data: bytes) -> Verdict:
    """Play a case; raise `RuleViolation` where it neither works nor is refused, or leaves something that it must not."""
    before = scene.put(data)
    verdict: Verdict = "worked"
    try:
        with limit_resources(), suppress_output():
            target.play(scene)
    except UserError as error:
        verdict = "refused"
        if "\n" in str(error).strip() and "\\n" not in repr(data):
            raise RuleViolation(f"{target.name}: the refusal is more than a line: {error}") from error
    except RuleViolation:
        raise
    except LimitExceeded as error:
        raise RuleViolation(f"{target.name}: it took longer than {error}") from error
    except Exception as error:
        raise RuleViolation(f"{target.name}: {type(error).__name__}: {str(error)[:300]}") from error
    after = scene.now = read_files(scene.folder)
    left = [name for name in after if name.endswith(UNFINISHED_SUFFIXES) and name not in before]
    if left:
        raise RuleViolation(f"{target.name}: left {', '.join(left)}")
    if verdict == "refused":
        changed = [
            name
            for name in before.keys() | after.keys()
            if before.get(name) != after.get(name) and Path(name).name not in target.loose
        ]
        if changed:
            raise RuleViolation(f"{target.name}: refused, but changed {', '.join(sorted(changed))}")
    return verdict


def read_files(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@contextmanager
def limit_resources() -> Iterator[None]:
    """Raise `LimitExceeded` or `RuleViolation` where the block takes more time or memory than a case may."""
    with _limited_time(), _limited_addresses():
        start = _reset_peak()
        yield
        grown = _peak() - start
    if grown > MEMORY_MEGABYTES * 2**20:
        raise RuleViolation(f"memory grew by {grown / 2**20:.0f} MiB, over {MEMORY_MEGABYTES}")


@contextmanager
def suppress_output() -> Iterator[None]:
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextmanager
def _limited_time() -> Iterator[None]:
    if sys.platform == "win32":  # it has no such timers
        yield
        return

    def late(number: int, frame: object) -> None:
        raise LimitExceeded(f"{CPU_SECONDS} s of processor time" if number == signal.SIGPROF else f"{WALL_SECONDS} s")

    before = [(number, signal.signal(number, late)) for number in (signal.SIGPROF, signal.SIGALRM)]
    # Processor time: a busy machine makes no case late. Wall time beside it: a case that waits uses none.
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
    signal.setitimer(signal.ITIMER_REAL, WALL_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before:
            signal.signal(number, handler)


@contextmanager
def _limited_addresses() -> Iterator[None]:
    used = _status("VmSize")
    if used is None:
        yield
        return
    import resource

    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + ADDRESS_SPACE_BYTES, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def _reset_peak() -> int:
    """Let the kernel forget the peak of this process' memory, where it can, and return the bytes that it has now."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS") or 0


def _peak() -> int:
    return _status("VmHWM") or 0


def _status(name: str) -> int | None:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), None)


DEEPLY_NESTED = "[" * 100_000
HUGE_INTEGER = 10**5000
"""Over the number of digits that Python turns into a whole number."""


def draw_one_of(values: Sequence[Any]) -> st.SearchStrategy[Any]:
    """Draw one of some values by its number: hypothesis would write long ones out, and cannot write the longest."""
    return st.integers(0, len(values) - 1).map(values.__getitem__)


NUMBERS = st.one_of(
    st.integers(-3, 300),
    draw_one_of((2**31, 2**53, 2**63 - 1, 2**63, -(2**63) - 1, 2**64, 10**30, 10**400, HUGE_INTEGER)),
    st.floats(),
    draw_one_of((0.0, -0.0, 1e308, 5e-324, math.inf)),
)
TEXTS = st.one_of(
    st.text(max_size=12),
    draw_one_of(("", ".", "..", "/", "a/b", "none", "auto", "nan", "\0", "\ud800", "\u202e", "a" * 5000, "~x/y", "%s")),
)
LEAVES = st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS)
JUNK = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4), max_leaves=6
)
"""Values that JSON has, most of them where no reader wants them."""


def edit_bytes(seeds: Sequence[bytes], words: Sequence[bytes] = ()) -> st.SearchStrategy[bytes]:
    """Draw one of the seeds with a few edits: bytes changed, cut, doubled, put in, or a part of another seed."""
    return st.composite(_spoiled)(
        HiddenValue(tuple(seeds)), HiddenValue((*words, *(bytes.fromhex(each) for each in LENGTHS_HEX)))
    )


LENGTHS_HEX = ("00000000", "ffffffff", "7fffffff", "00000080", "ffffffffffffff7f")
"""Lengths, in hexadecimal, that files do not have."""


@dataclass(frozen=True)
class HiddenValue:
    """A value that hypothesis need not write out."""

    value: Any = field(repr=False)


def _spoiled(draw: Callable[[st.SearchStrategy[Any]], Any], seeds: HiddenValue, words: HiddenValue) -> bytes:
    data = bytearray(draw(draw_one_of(seeds.value)))
    for _ in range(draw(st.integers(1, 4))):
        edit = draw(st.sampled_from(["set", "flip", "cut", "take", "put", "word", "double", "join"]))
        at = draw(st.integers(0, len(data)))
        # Most headers are short: half of the edits are made in the first bytes.
        at = min(at, draw(st.integers(0, 64))) if draw(st.booleans()) else at
        length = draw(st.integers(1, 16))
        if edit == "set":
            data[at : at + 1] = bytes([draw(st.integers(0, 255))])
        elif edit == "flip" and at < len(data):
            data[at] ^= 1 << draw(st.integers(0, 7))
        elif edit == "cut":
            del data[at:]
        elif edit == "take":
            del data[at : at + length]
        elif edit == "put":
            data[at:at] = draw(st.binary(min_size=1, max_size=length))
        elif edit == "word":
            word = draw(draw_one_of(words.value))
            data[at : at + (len(word) if draw(st.booleans()) else 0)] = word
        elif edit == "double":
            data[at:at] = data[at : at + length] * draw(st.integers(1, 50))
        elif edit == "join":
            other = draw(draw_one_of(seeds.value))
            data[at:] = other[draw(st.integers(0, len(other))) :]
    return bytes(data)


def edit_json(value: Any) -> st.SearchStrategy[Any]:
    """Draw a JSON value with a few of its parts replaced by junk, left out or added."""
    return st.composite(_changed)(HiddenValue(value))


def _changed(draw: Callable[[st.SearchStrategy[Any]], Any], kept: HiddenValue) -> Any:
    value = kept.value
    for _ in range(draw(st.integers(1, 3))):
        value = _edited(draw, value)
    return value


def _edited(draw: Callable[[st.SearchStrategy[Any]], Any], value: Any) -> Any:
    """Return the value with one edit somewhere in it."""
    if isinstance(value, dict) and value:
        what = draw(st.sampled_from(["into", "into", "into", "out", "in", "here"]))
        name = draw(st.sampled_from(sorted(value)))
        if what == "into":
            return {**value, name: _edited(draw, value[name])}
        if what == "out":
            return {key: each for key, each in value.items() if key != name}
        if what == "in":
            return {**value, draw(TEXTS): draw(JUNK)}
    elif isinstance(value, list) and value:
        what = draw(st.sampled_from(["into", "into", "into", "out", "in", "here"]))
        place = draw(st.integers(0, len(value) - 1))
        if what == "into":
            return [*value[:place], _edited(draw, value[place]), *value[place + 1 :]]
        if what == "out":
            return [*value[:place], *value[place + 1 :]]
        if what == "in":
            return [*value[:place], draw(JUNK), *value[place:]]
    return draw(JUNK)


def copy_folder(source: Path, folder: Path, *without: str) -> Path:
    """Return a copy of a folder, without the files of some names."""
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns(*without), dirs_exist_ok=True)
    return folder
