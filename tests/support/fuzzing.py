"""Run fuzzed inputs through a reader and check the rules that every reader must follow.

A reader accepts an input or refuses it with a `UserError`, in bounded time and memory, and leaves no unfinished file.
A `Target` reads one file or message from an untrusted source. `run_case` passes it some bytes and raises
`RuleViolation` if it breaks a rule. `test_fuzz.py` runs a few hundred inputs, `benchmarks/fuzz.py` thousands.
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
"""Limit of processor time for one case. A case that waits instead of computing is limited by `WALL_SECONDS`."""

WALL_SECONDS = 120
MEMORY_MEGABYTES = 1024
"""Limit for the growth of the peak memory during one case. Measured on Linux only."""

ADDRESS_SPACE_BYTES = 4 * 2**30
"""Address space that a case may reserve. An allocation beyond it raises MemoryError.
Larger than `MEMORY_MEGABYTES`, because allocators reserve large blocks that they never touch."""

UNFINISHED_SUFFIXES = (".partial", ".part")
"""Suffixes of files that are being written."""


class RuleViolation(AssertionError):
    """A reader broke a rule."""


class LimitExceeded(BaseException):
    """A case took too long. Derives from BaseException so that no `except Exception` hides it."""


@dataclass
class CaseFolder:
    """The folder in which cases run.

    Attributes:
        folder: the folder that the target reads.
        file: the fuzzed file in it.
        initial: content of all files before the first case, by relative path.
        current: content of all files after the latest case.
    """

    folder: Path
    file: Path
    initial: dict[str, bytes] = field(default_factory=dict)
    current: dict[str, bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.initial = read_files(self.folder)
        self.current = self.initial

    def reset(self, data: bytes) -> dict[str, bytes]:
        """Restore the initial files, write `data` as the fuzzed file, and return the content of all files."""
        name = self.file.relative_to(self.folder).as_posix()
        current = self.current
        for other in current.keys() - self.initial.keys() - {name}:
            (self.folder / other).unlink()
        for other, content in self.initial.items():
            # Only files that the latest case changed are written: this runs before each of thousands of cases.
            if other != name and current.get(other) != content:
                (self.folder / other).parent.mkdir(parents=True, exist_ok=True)
                (self.folder / other).write_bytes(content)
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self.file.write_bytes(data)
        self.current = {**self.initial, name: data}
        return self.current


@dataclass(frozen=True)
class Target:
    """One reader of untrusted bytes.

    Attributes:
        name: short name, also the name of the folder in `tests/corpus`.
        description: the command or the part of halfmoon that reads the input.
        make_folder: creates the folder of the cases. Called once.
        seeds: returns valid inputs.
        inputs: returns a strategy that draws generated and mutated inputs.
        read: reads the file of a folder. May raise UserError, and then has to leave the folder unchanged.
        changeable_files: names of files that may change even if the input is refused.
        dictionary: tokens that a fuzzer may insert.
    """

    name: str
    description: str
    make_folder: Callable[[Path], CaseFolder]
    seeds: Callable[[], Sequence[bytes]]
    inputs: Callable[[], st.SearchStrategy[bytes]]
    read: Callable[[CaseFolder], object]
    changeable_files: tuple[str, ...] = (".lock", "lock")
    dictionary: tuple[bytes, ...] = ()


Verdict = Literal["worked", "refused"]


def run_case(target: Target, case: CaseFolder, data: bytes) -> Verdict:
    """Let a target read `data`.

    Raises:
        RuleViolation: if it raises anything but UserError, exceeds a limit, leaves an unfinished file, or refuses the
            input but changes other files.
    """
    before = case.reset(data)
    verdict: Verdict = "worked"
    try:
        with limit_resources(), suppress_output():
            target.read(case)
    except UserError as error:
        verdict = "refused"
        if "\n" in str(error).strip() and "\\n" not in repr(data):
            raise RuleViolation(f"{target.name}: the message has more than one line: {error}") from error
    except RuleViolation:
        raise
    except LimitExceeded as error:
        raise RuleViolation(f"{target.name}: it took longer than {error}") from error
    except Exception as error:
        raise RuleViolation(f"{target.name}: {type(error).__name__}: {str(error)[:300]}") from error
    after = read_files(case.folder)
    case.current = after
    unfinished = [name for name in after if name.endswith(UNFINISHED_SUFFIXES) and name not in before]
    if unfinished:
        raise RuleViolation(f"{target.name}: left {', '.join(unfinished)}")
    if verdict == "refused":
        changed = [
            name
            for name in before.keys() | after.keys()
            if before.get(name) != after.get(name) and Path(name).name not in target.changeable_files
        ]
        if changed:
            raise RuleViolation(f"{target.name}: refused, but changed {', '.join(sorted(changed))}")
    return verdict


def read_files(folder: Path) -> dict[str, bytes]:
    """Return the content of all files below a folder, by relative path."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@contextmanager
def limit_resources() -> Iterator[None]:
    """Raise `LimitExceeded` or `RuleViolation` if the block takes more time or memory than a case may."""
    with _limit_time(), _limit_address_space():
        start = _reset_peak()
        yield
        growth = _read_peak_memory() - start
    if growth > MEMORY_MEGABYTES * 2**20:
        raise RuleViolation(f"memory grew by {growth / 2**20:.0f} MiB, over {MEMORY_MEGABYTES}")


@contextmanager
def suppress_output() -> Iterator[None]:
    """Discard standard output, standard error and warnings of the block."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextmanager
def _limit_time() -> Iterator[None]:
    if sys.platform == "win32":  # Windows has no interval timers
        yield
        return

    def raise_limit_exceeded(number: int, frame: object) -> None:
        raise LimitExceeded(f"{CPU_SECONDS} s of processor time" if number == signal.SIGPROF else f"{WALL_SECONDS} s")

    before = [(number, signal.signal(number, raise_limit_exceeded)) for number in (signal.SIGPROF, signal.SIGALRM)]
    # Processor time does not depend on other processes. Wall time catches a case that waits and uses no processor.
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
def _limit_address_space() -> Iterator[None]:
    used = _read_process_status("VmSize")
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
    """Reset the kernel's peak memory of this process, if possible, and return the bytes in use now."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return _read_process_status("VmRSS") or 0


def _read_peak_memory() -> int:
    return _read_process_status("VmHWM") or 0


def _read_process_status(name: str) -> int | None:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), None)


DEEPLY_NESTED = "[" * 100_000
HUGE_INTEGER = 10**5000
"""More digits than Python converts from text to an integer."""


def draw_one_of(values: Sequence[Any]) -> st.SearchStrategy[Any]:
    """Draw one of some values by its index: hypothesis prints what it draws, and cannot print the longest values."""
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
"""Any JSON value."""


def edit_bytes(seeds: Sequence[bytes], tokens: Sequence[bytes] = ()) -> st.SearchStrategy[bytes]:
    """Draw one of the seeds with a few edits: bytes changed, deleted, repeated or inserted, or joined to another seed."""
    lengths = [bytes.fromhex(each) for each in LENGTHS_HEX]
    return st.composite(_draw_edited_bytes)(HiddenValue(tuple(seeds)), HiddenValue((*tokens, *lengths)))


LENGTHS_HEX = ("00000000", "ffffffff", "7fffffff", "00000080", "ffffffffffffff7f")
"""Length fields, in hexadecimal, that no valid file has."""


@dataclass(frozen=True)
class HiddenValue:
    """A value that hypothesis does not print."""

    value: Any = field(repr=False)


def _draw_edited_bytes(draw: Callable[[st.SearchStrategy[Any]], Any], seeds: HiddenValue, tokens: HiddenValue) -> bytes:
    data = bytearray(draw(draw_one_of(seeds.value)))
    for _ in range(draw(st.integers(1, 4))):
        edit = draw(st.sampled_from(["set", "flip", "cut", "delete", "insert", "token", "repeat", "join"]))
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
        elif edit == "delete":
            del data[at : at + length]
        elif edit == "insert":
            data[at:at] = draw(st.binary(min_size=1, max_size=length))
        elif edit == "token":
            token = draw(draw_one_of(tokens.value))
            # Half of the tokens replace as many bytes, the others are inserted.
            data[at : at + (len(token) if draw(st.booleans()) else 0)] = token
        elif edit == "repeat":
            data[at:at] = data[at : at + length] * draw(st.integers(1, 50))
        elif edit == "join":
            other = draw(draw_one_of(seeds.value))
            data[at:] = other[draw(st.integers(0, len(other))) :]
    return bytes(data)


def edit_json(value: Any) -> st.SearchStrategy[Any]:
    """Draw a JSON value with a few of its elements replaced, removed or added."""
    return st.composite(_draw_edited_json)(HiddenValue(value))


def _draw_edited_json(draw: Callable[[st.SearchStrategy[Any]], Any], original: HiddenValue) -> Any:
    value = original.value
    for _ in range(draw(st.integers(1, 3))):
        value = _edit_once(draw, value)
    return value


def _edit_once(draw: Callable[[st.SearchStrategy[Any]], Any], value: Any) -> Any:
    """Return the value with one edit at a random depth."""
    if isinstance(value, dict) and value:
        edit = draw(st.sampled_from(["descend", "descend", "descend", "remove", "add", "replace"]))
        name = draw(st.sampled_from(sorted(value)))
        if edit == "descend":
            return {**value, name: _edit_once(draw, value[name])}
        if edit == "remove":
            return {key: each for key, each in value.items() if key != name}
        if edit == "add":
            return {**value, draw(TEXTS): draw(JUNK)}
    elif isinstance(value, list) and value:
        edit = draw(st.sampled_from(["descend", "descend", "descend", "remove", "add", "replace"]))
        index = draw(st.integers(0, len(value) - 1))
        if edit == "descend":
            return [*value[:index], _edit_once(draw, value[index]), *value[index + 1 :]]
        if edit == "remove":
            return [*value[:index], *value[index + 1 :]]
        if edit == "add":
            return [*value[:index], draw(JUNK), *value[index:]]
    return draw(JUNK)


def copy_folder(source: Path, folder: Path, *without: str) -> Path:
    """Copy a folder without files that match the patterns `without`, and return the copy."""
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns(*without), dirs_exist_ok=True)
    return folder
