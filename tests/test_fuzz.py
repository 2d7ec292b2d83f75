"""Foreign bytes: a few hundred drawn inputs of every reader, and each input that has broken one before.

What holds for all of them is reported in `fuzzing.py`: an input works, or is refused with a `UserError`, in bounded time
and memory, and a refusal leaves the folder as it was. `benchmarks/fuzz.py` runs thousands.
"""

import gzip
import mmap
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest
from fuzz_targets import TARGETS, make_png, make_png_chunk
from fuzzing import CaseFolder, LimitExceeded, RuleViolation, Target, limit_resources, run_case
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from halfmoon.core.errors import UserError
from halfmoon.data.preparation import MAX_PIXELS
from halfmoon.data.readers import idx
from halfmoon.data.readers.decode import decode_to_shape, read_header

CASES = (15, pytest.param(150, marks=pytest.mark.nightly))
"""Drawn inputs of each target: with 23 targets, some 350 by default and 3,500 at night."""

CORPUS = Path(__file__).parent / "corpus"
BY_NAME = {each.name: each for each in TARGETS}
KEPT = sorted(path for path in CORPUS.glob("*/*") if path.is_file())


@cache
def get_case_folder(name: str) -> CaseFolder:
    return BY_NAME[name].make_folder(Path(mkdtemp(prefix="fuzz-")) / "case")


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_valid_inputs_work(target: Target) -> None:
    """What is spoiled was whole: otherwise every case would only be refused for what all have in common."""
    assert "worked" in {run_case(target, get_case_folder(target.name), seed) for seed in target.seeds()}


@pytest.mark.parametrize("cases", CASES)
@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_drawn_inputs_work_or_are_refused(target: Target, cases: int) -> None:
    @settings(
        max_examples=cases,
        derandomize=True,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(target.inputs())
    def case(data: bytes) -> None:
        run_case(target, get_case_folder(target.name), data)

    case()


@pytest.mark.parametrize("path", KEPT, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_what_has_broken_a_reader_before(path: Path) -> None:
    run_case(BY_NAME[path.parent.name], get_case_folder(path.parent.name), path.read_bytes())


def test_the_corpus_is_of_known_targets() -> None:
    assert KEPT
    assert {path.parent.name for path in KEPT} <= set(BY_NAME)
    assert max(path.stat().st_size for path in KEPT) < 20_000


def test_a_small_png_that_claims_gigabytes_is_refused_before_they_are_there() -> None:
    """100,000 x 100,000 RGB is 30 GB; a checksum-true header reports it in 57 bytes and more."""
    for side in (100_000, 2**14):
        data = make_png(side, side, 8, 2, [make_png_chunk(b"IDAT", bytes(8))])
        with limit_resources(), pytest.raises(UserError, match="too large to open safely"):
            decode_to_shape(data, "it", 8, 8, 3)


def test_the_bound_on_pixels_does_not_hang_on_warnings() -> None:
    """Pillow only warns up to twice its limit, and another thread may have silenced warnings meanwhile."""
    assert MAX_PIXELS < 9_000 * 9_000
    data = make_png(9_000, 9_000, 8, 0, [make_png_chunk(b"IDAT", bytes(8))])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(UserError, match="9000x9000 pixels, of 67,108,864 at most"):
            decode_to_shape(data, "it", 8, 8, 3)


def test_a_small_gzip_file_that_unpacks_to_gigabytes_is_refused_early(tmp_path, monkeypatch):
    """The bound applies to unpacked bytes, not to the header: one byte over it is refused."""
    monkeypatch.setattr(idx, "MAX_UNPACKED_BYTES", 4 * 2**20)
    path = tmp_path / "it.gz"
    side = 4 * 2**20 - 8
    whole = b"\0\0\x08\x01" + side.to_bytes(4, "big") + bytes(side)
    path.write_bytes(gzip.compress(whole))
    assert idx.read_idx(path, 1).shape == (side,)
    path.write_bytes(gzip.compress(whole + b"\0"))
    with pytest.raises(UserError, match=r"it unpacks to over 4,194,304 bytes"):
        idx.read_idx(path, 1)


def test_what_is_no_image_starts_no_program(tmp_path: Path) -> None:
    """EPS is a program, which Pillow hands to Ghostscript; no reader opens it."""
    eps = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 4 4\n%%EndComments\n%%EOF\n"
    path = tmp_path / "it.png"
    path.write_bytes(eps)
    assert read_header(path) is None
    with pytest.raises(UserError, match="no known format"):
        decode_to_shape(eps, "it", 8, 8, 1)


def made(read_case: Callable[[CaseFolder], object]) -> tuple[Target, CaseFolder]:
    folder = Path(mkdtemp(prefix="fuzz-"))
    target = Target("made", "", lambda _: CaseFolder(folder, folder / "it"), lambda: [b""], st.binary, read_case)
    return target, target.make_folder(folder)


def refuse(setup: CaseFolder) -> None:
    setup.file.with_name("left").write_bytes(b"")
    raise UserError("no")


def leave(setup: CaseFolder) -> None:
    setup.file.with_name("x.partial").write_bytes(b"")


def fill(setup: CaseFolder) -> None:
    # Not from the heap, which may hold as much from before.
    with mmap.mmap(-1, 200 * 2**20) as memory:
        memory.write(bytes(200 * 2**20))


def spin(setup: CaseFolder) -> None:
    while True:
        pass


def raise_key(setup: CaseFolder) -> None:
    raise KeyError("x")


@pytest.mark.parametrize(
    ("read_case", "message"),
    [
        (refuse, "refused, but changed left"),
        (leave, "left x.partial"),
        (raise_key, "KeyError"),
        (spin, "longer than 0.2 s"),
        (fill, "memory grew"),
    ],
)
def test_the_judge_sees_what_must_not_be(read_case, message, monkeypatch):
    monkeypatch.setattr("fuzzing.CPU_SECONDS", 0.2 if read_case is spin else 10)
    monkeypatch.setattr("fuzzing.MEMORY_MEGABYTES", 100)
    if read_case is fill and not Path("/proc/self/clear_refs").exists():
        pytest.skip("memory is counted on Linux only")
    with pytest.raises(RuleViolation, match=message):
        run_case(*made(read_case), b"it")


def test_no_handler_hides_that_a_case_takes_too_long() -> None:
    assert not issubclass(LimitExceeded, Exception)
