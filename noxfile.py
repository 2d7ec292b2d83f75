"""The checks of an edit, of a change, and of a night: `nox -s fast`, `nox -s full`, `nox -s slow`.

With `--no-venv` they run in the current environment.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from tempfile import TemporaryDirectory

import nox

# In a fresh environment nothing is compiled: where nothing may be stored, each process compiles all that it imports.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

nox.options.sessions = ["fast"]
nox.options.reuse_venv = "yes"

PYTHONS = ["3.11", "3.12", "3.13", "3.14"]
"""The versions of Python that hosted CI runs `.ci/run` with."""

FAST = (
    "tests/test_layout.py",
    "tests/config",
    "tests/core",
    "tests/data/test_partition.py",
    "tests/data/test_rules.py",
    "tests/data/test_scenario.py",
    "tests/data/test_settings.py",
    "tests/engine",
    "tests/methods/test_fedavg.py",
    "tests/models/test_models.py",
    "tests/models/test_modules.py",
    "tests/models/test_norms.py",
    "tests/methods/test_objectives.py",
)
"""Tests that an edit breaks first: the layout, configuration, mathematics, partitions, the round, and one method.

Without those that are marked slow: beside lint and types they should stay below 90 seconds."""


@nox.session
def fast(session: nox.Session) -> None:
    """Lint, types, and the tests that matter for an edit; what follows `--` goes to pytest, as more files to test."""
    install(session)
    with ThreadPoolExecutor(1) as pool:
        linted = pool.submit(check_code, session, silent=True)
        session.run("python", "-m", "pytest", "-m", "not slow and not nightly", *FAST, *session.posargs)
        linted.result()


@nox.session
def full(session: nox.Session) -> None:
    """Everything that `.ci/run` demands; with `-- tested linted` without the tests and the session `lint`."""
    install(session)
    if "tested" not in session.posargs:
        session.run("python", "-m", "pytest")
    # The rest stands beside the benchmarks, which often wait; what it says is shown where it fails.
    with TemporaryDirectory(dir=session.create_tmp()) as folder, ThreadPoolExecutor(1) as pool:
        rest = pool.submit(others, session, folder)
        session.run("python", "benchmarks/smoke.py")
        rest.result()


@nox.session
def slow(session: nox.Session) -> None:
    """Long evidence that the default suite leaves out: tests marked nightly, and ten times as many drawn examples.

    What follows `--` goes to pytest.
    """
    install(session)
    profile = ("--hypothesis-profile", "nightly")
    session.run(
        "python", "-m", "pytest", "-m", "nightly or hypothesis", *profile, "--durations", "20", *session.posargs
    )


def others(session: nox.Session, folder: str) -> None:
    """Lint and check types, build the documentation as a site, and play the main job in few rounds."""
    if "linted" not in session.posargs:
        check_code(session, silent=True)
    quick = {"HALFMOON_EXAMPLES": "quick"}  # the examples' runs have two rounds
    session.run("mkdocs", "build", "--strict", "--quiet", "--site-dir", f"{folder}/site", silent=True, env=quick)
    session.run("halfmoon", "run", "--rounds", "2", "--run-dir", f"{folder}/run", silent=True)


@nox.session
def lint(session: nox.Session) -> None:
    """Run the linter, the formatter and the type checker."""
    install(session)
    check_code(session)


@nox.session
def benchmarks(session: nox.Session) -> None:
    """Start every script of benchmarks/ and results/ at its smallest size."""
    install(session)
    session.run("python", "benchmarks/smoke.py", *session.posargs)


@nox.session
def docs(session: nox.Session) -> None:
    """Build the pages into site/; with `-- serve` show them while they are written."""
    install(session)
    session.run("mkdocs", *(["serve"] if "serve" in session.posargs else ["build", "--strict"]))


@nox.session
def lock(session: nox.Session) -> None:
    """Write requirements/ci.txt anew, with the newest versions that pyproject.toml admits."""
    install(session)
    if session.venv_backend != "none":
        session.install("uv")
    session.run("python", "tools/lock.py", external=True)


def install(session: nox.Session) -> None:
    """Install the package for development, except in an environment that is not nox's own."""
    if session.venv_backend != "none":
        session.install("-c", "constraints.txt", "-e", ".[dev]")


def check_code(session: nox.Session, silent: bool = False) -> None:
    """Run the linter, the formatter and the type checker; if `silent`, show what they say where one fails."""
    session.run("ruff", "check", silent=silent)
    session.run("ruff", "format", "--check", silent=silent)
    session.run("pyright", silent=silent)
