"""Configure all tests: one thread per process, because the networks here are too small for several.

pytest-xdist runs tests in several processes instead.
"""

import base64
import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

# Without stored bytecode each of hundreds of processes compiles the modules of PyTorch and Flower, which takes seconds,
# and pytest rewrites the asserts of 6,000 tests.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

import torch  # noqa: E402

from halfmoon.data import Images, sources  # noqa: E402
from halfmoon.report import curves  # noqa: E402

draw_curves = curves.draw_curves

WORKERS = 2
"""Processes for the whole suite. With more, files whose tests share an expensive fixture are distributed over processes:
three took 11:15 instead of 9:57 on two cores."""

PIXEL = base64.b64decode("iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGNgAAAAAgABSK+kcQAAAABJRU5ErkJggg==")
"""A PNG file of one pixel."""

torch.set_num_threads(1)

# Without deadlines, because the time of an example depends on the load of the machine.
# `nox -s slow` draws more examples, with the profile `nightly`.
for name, examples in (("shared", 30), ("nightly", 300)):
    hypothesis.settings.register_profile(
        name, max_examples=examples, deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
    )
hypothesis.settings.load_profile("shared")


@pytest.fixture(autouse=True, scope="session")
def _disable_fsync() -> Iterator[None]:
    """Replace `os.fsync`, which waits for a busy disk. Tests of flushing replace it by functions that record calls."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda handle: None)
        yield


@pytest.fixture(autouse=True, scope="session")
def _disable_curves() -> Iterator[None]:
    """Write an image of one pixel instead of the learning curves, which take longer to draw than a tiny run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(curves, "draw_curves", lambda runs, path: path.write_bytes(PIXEL))
        yield


@pytest.fixture
def curves_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw the learning curves in a test. tests/report always draws them."""
    monkeypatch.setattr(curves, "draw_curves", draw_curves)


@pytest.fixture
def few_test_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep 60 of the digits' 360 test images, whose features take longer than those of a small training set."""
    train, test, classes = sources._load_digits()
    monkeypatch.setattr(sources, "_load_digits", lambda: (train, Images(test.images[:60], test.labels[:60]), classes))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Disable the garbage collector during the collection of tests, whose modules are never garbage."""
    gc.disable()
    yield
    gc.freeze()
    gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Return the number of processes for `-n auto` in pyproject.toml: `WORKERS` for folders, 0 for single files.

    Single files start faster without workers. `-n N` on the command line overrides this.
    """
    has_folder = any(Path(name).is_dir() for name in config.args)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return WORKERS if has_folder and cores >= WORKERS else 0
