"""What all tests share: one thread, because the networks here are smaller than the cost of waking a second.

Cores are used by running tests side by side instead (pytest-xdist).
"""

import base64
import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

# Where nothing compiled is stored, each of hundreds of processes compiles PyTorch's and Flower's modules, in seconds,
# and pytest rewrites the asserts of 6,000 tests.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

import torch  # noqa: E402

from halfmoon.data import Images, sources  # noqa: E402
from halfmoon.report import curves  # noqa: E402

draw_curves = curves.draw_curves

WORKERS = 2
"""How many processes share the whole suite: with more, files that share what is costly are torn apart; three took an
eighth longer on two cores (11:15 for 9:57)."""

PIXEL = base64.b64decode("iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGNgAAAAAgABSK+kcQAAAABJRU5ErkJggg==")
"""A PNG file of one pixel."""

torch.set_num_threads(1)

# How long an example takes, or is looked for, says more about who else computes than about halfmoon.
# `nox -s slow` draws more examples, with the profile `nightly`.
for name, examples in (("shared", 30), ("nightly", 300)):
    hypothesis.settings.register_profile(
        name, max_examples=examples, deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
    )
hypothesis.settings.load_profile("shared")


@pytest.fixture(autouse=True, scope="session")
def _flush_nothing() -> Iterator[None]:
    """Leave out what guards against a loss of power: no test can cause one, and each flush waits for a busy disk.
    That files are flushed, and when, is seen by tests that put something else in its place."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda handle: None)
        yield


@pytest.fixture(autouse=True, scope="session")
def _draw_nothing() -> Iterator[None]:
    """Write an empty picture of one pixel in the place of the curves, which take longer than a tiny run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(curves, "draw_curves", lambda runs, path: path.write_bytes(PIXEL))
        yield


@pytest.fixture
def curves_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw the curves of runs in a test after all; tests/report draws them by itself."""
    monkeypatch.setattr(curves, "draw_curves", draw_curves)


@pytest.fixture
def few_test_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep 60 of the digits' 360 test images, whose features take longer than those of a small training set."""
    train, test, classes = sources._load_digits()
    monkeypatch.setattr(sources, "_load_digits", lambda: (train, Images(test.images[:60], test.labels[:60]), classes))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collect tests, whose modules are never garbage, without the garbage collector's looking through them."""
    gc.disable()
    yield
    gc.freeze()
    gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Return what `-n auto` of pyproject.toml means: `WORKERS`, but none for single files, which start faster alone.
    `-n N` on the command line overrides it; `-n 0` is one process."""
    whole = any(Path(name).is_dir() for name in config.args)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return WORKERS if whole and cores >= WORKERS else 0
