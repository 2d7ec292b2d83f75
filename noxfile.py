"""Checks for an edit, for a change, and for nightly runs: `nox -s fast`, `nox -s full`, `nox -s slow`.

With `--no-venv` they run in the current environment.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from tempfile import TemporaryDirectory

import nox

# A new environment has no compiled modules, and with this variable each process would compile all that it imports.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

nox.options.sessions = ["fast"]
nox.options.reuse_venv = "yes"

PYTHONS = ["3.11", "3.12", "3.13", "3.14"]
"""Python versions with which hosted CI runs `.ci/run`."""

FLOWER_VERSIONS = ["1.41.0", "1.42.0"]
"""The oldest and the newest version of Flower that halfmoon supports; `VERSIONS` of `federation.transport.internals`."""

FLOWER_TESTS = (
    "tests/federation/test_flower_internals.py",
    "tests/federation/test_flower_launch.py",
    "tests/federation/test_delivery.py",
    "tests/federation/test_polling.py",
    "tests/federation/test_federation_restarts.py",
)
"""Tests of all that uses private names of Flower, with federations of real processes."""

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
"""Tests that are most likely to fail after an edit: layout, configuration, mathematics, partitions, rounds, one method.

Tests marked slow are left out. In parallel with lint and types, these should take less than 90 seconds."""


@nox.session
def fast(session: nox.Session) -> None:
    """Run linter, type checker and the tests of `FAST`; arguments after `--` go to pytest, such as more files."""
    install(session)
    with ThreadPoolExecutor(1) as pool:
        linted = pool.submit(check_code, session, silent=True)
        session.run("python", "-m", "pytest", "-m", "not slow and not nightly", *FAST, *session.posargs)
        linted.result()


@nox.session(python=PYTHONS)
def pythons(session: nox.Session) -> None:
    """Run the tests of `FAST` with each Python version that is installed; `nox -s pythons-3.14` runs one.

    A version that is not installed is skipped with a warning. Arguments after `--` go to pytest.
    """
    install(session)
    session.run("python", "-m", "pytest", "-m", "not slow and not nightly", *FAST, *session.posargs)


@nox.session
def full(session: nox.Session) -> None:
    """Run all checks of `.ci/run`; `-- tested linted` leaves out the tests and the session `lint`."""
    install(session)
    if "tested" not in session.posargs:
        session.run("python", "-m", "pytest")
    # The other checks run in parallel with the benchmarks, which often wait. Their output is shown if they fail.
    with TemporaryDirectory(dir=session.create_tmp()) as folder, ThreadPoolExecutor(1) as pool:
        rest = pool.submit(run_other_checks, session, folder)
        session.run("python", "benchmarks/smoke.py")
        rest.result()


@nox.session
def slow(session: nox.Session) -> None:
    """Run the long tests that the default suite leaves out: those marked nightly, and ten times as many drawn examples.

    Arguments after `--` are passed to pytest.
    """
    install(session)
    profile = ("--hypothesis-profile", "nightly")
    session.run(
        "python", "-m", "pytest", "-m", "nightly or hypothesis", *profile, "--durations", "20", *session.posargs
    )


def run_other_checks(session: nox.Session, folder: str) -> None:
    """Lint and check types, build the documentation as a site, and run the main job for few rounds."""
    if "linted" not in session.posargs:
        check_code(session, silent=True)
    quick = {"HALFMOON_EXAMPLES": "quick"}  # with this variable the examples' runs have two rounds
    session.run("mkdocs", "build", "--strict", "--quiet", "--site-dir", f"{folder}/site", silent=True, env=quick)
    session.run("halfmoon", "run", "--rounds", "2", "--run-dir", f"{folder}/run", silent=True)


@nox.session
@nox.parametrize("version", FLOWER_VERSIONS)
def flower(session: nox.Session, version: str) -> None:
    """Run the tests of federations with the oldest and with the newest version of Flower."""
    install(session)
    session.install(f"flwr[simulation]=={version}")
    session.run("python", "-m", "pytest", *FLOWER_TESTS, *session.posargs)


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
    """Build the documentation into site/; with `-- serve`, serve it and rebuild it after every change."""
    install(session)
    session.run("mkdocs", *(["serve"] if "serve" in session.posargs else ["build", "--strict"]))


@nox.session
def lock(session: nox.Session) -> None:
    """Rewrite requirements/ci.txt with the newest versions that pyproject.toml allows."""
    install(session)
    if session.venv_backend != "none":
        session.install("uv")
    session.run("python", "tools/lock.py", external=True)


def install(session: nox.Session) -> None:
    """Install the package for development, except with `--no-venv`."""
    if session.venv_backend != "none":
        session.install("-c", "constraints.txt", "-e", ".[dev]")


def check_code(session: nox.Session, silent: bool = False) -> None:
    """Run the linter, the formatter and the type checker; if `silent`, show the output only of one that fails."""
    session.run("ruff", "check", silent=silent)
    session.run("ruff", "format", "--check", silent=silent)
    session.run("pyright", silent=silent)
