"""Sample mutants of the package, run the tests that can catch each of them, and list the mutants that survive.

    pip install -e '.[dev,mutation]'
    python tools/mutants.py cover --work mutants
    python tools/mutants.py run --work mutants --count 100 --seed 0
    python tools/mutants.py retest --work mutants tests/methods/test_cbafed.py
    python tools/mutants.py table --work mutants

A mutant is the package with one operator, keyword or number changed; cosmic-ray makes the changes. It survives if all tests
pass. `cover` records which test runs which line, in a copy of the repository below `--work`: mutants are written only there.
`run` draws mutants evenly over packages and kinds of change, and runs for each the tests that cover its line: first those
of its package, then, if they pass, the others. A larger `--count` goes on where a smaller one ended. `retest` runs new
tests with every survivor; `table` prints the counts and the survivors.
"""

import argparse
import ast
import difflib
import importlib
import itertools
import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("methods", "engine", "aggregation", "data", "core", "models")
KINDS = ("comparison", "arithmetic", "boolean", "number")

GROUPS = (
    ("Eq", "NotEq", "Lt", "LtE", "Gt", "GtE"),
    ("Is", "IsNot"),
    ("Add", "Sub", "Mul", "Div", "FloorDiv", "Mod", "Pow"),
    ("BitOr", "BitAnd", "BitXor"),
    ("LShift", "RShift"),
)
"""Operators that replace each other. Across groups a mutant fails with a TypeError, whatever the tests check."""

BOOLEAN = (
    "core/AddNot",
    "core/ReplaceAndWithOr",
    "core/ReplaceFalseWithTrue",
    "core/ReplaceOrWithAnd",
    "core/ReplaceTrueWithFalse",
    "core/ReplaceUnaryOperator_Delete_Invert",
    "core/ReplaceUnaryOperator_Delete_Not",
)
"""cosmic-ray's operators that change a condition or a truth value."""

SECONDS = {"package": 45.0, "suite": 120.0}
"""How long the tests that run with one mutant take without it; the tests that take longest are left out."""

LIBRARIES = ("numpy", "pandas", "PIL.Image", "pyarrow.parquet", "pytest", "scipy.stats", "torch")
"""Libraries that tests use and mutants do not change: they are imported once."""

COVERAGE = """\
[run]
source = halfmoon
branch = false
disable_warnings = module-not-measured
"""

Range = tuple[tuple[int, int], tuple[int, int]]
"""Start and end of a piece of source: lines from 1, columns from 0."""


@dataclass(frozen=True)
class Mutant:
    """One change of one file.

    Attributes:
        package: The package of the file, such as "methods".
        kind: One of `KINDS`.
        path: The file, from the root of the repository.
        line: The first line that changes, from 1.
        column: The column that changes, from 0.
        operator: The name of cosmic-ray's operator.
        occurrence: The number of the place in the file among those where the operator applies, from 0.
    """

    package: str
    kind: str
    path: str
    line: int
    column: int
    operator: str
    occurrence: int


def kind_of(operator: str) -> str | None:
    """Return the kind of one of cosmic-ray's operators, or None if it is left out."""
    if operator in BOOLEAN:
        return "boolean"
    if operator == "core/NumberReplacer":
        return "number"
    if operator == "core/ReplaceUnaryOperator_USub_UAdd":
        return "arithmetic"
    found = re.fullmatch(r"core/Replace(Comparison|Binary)Operator_(\w+)_(\w+)", operator)
    if found is None or not any(found[2] in group and found[3] in group for group in GROUPS):
        return None
    return "comparison" if found[1] == "Comparison" else "arithmetic"


def annotation_ranges(source: str) -> list[Range]:
    """Return where annotations of types are: their operators do not run, or only while a module is imported."""
    ranges = []
    for node in ast.walk(ast.parse(source)):
        found: list[ast.expr | None] = []
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found = [node.returns]
        elif isinstance(node, ast.arg | ast.AnnAssign):
            found = [node.annotation]
        for each in found:
            if each is not None:
                end = (each.end_lineno or each.lineno, each.end_col_offset or 0)
                ranges.append(((each.lineno, each.col_offset), end))
    return ranges


def find_mutants(path: Path, root: Path) -> list[Mutant]:
    """Return all mutants of a file of the package below `root`, except in annotations."""
    from cosmic_ray.ast import ast_nodes, get_ast
    from cosmic_ray.plugins import get_operator, operator_names

    source = path.read_text(encoding="utf-8")
    skipped = annotation_ranges(source)
    nodes = list(ast_nodes(get_ast(source)))
    name = path.relative_to(root).as_posix()
    package = path.relative_to(root / "src" / "halfmoon").parts[0]
    mutants = []
    for operator in sorted(operator_names()):
        kind = kind_of(operator)
        if kind is None:
            continue
        changes = get_operator(operator)()
        starts = [start for node in nodes for start, _ in changes.mutation_positions(node)]
        mutants += [
            Mutant(package, kind, name, *start, operator, occurrence)
            for occurrence, start in enumerate(starts)
            if not any(first <= start < last for first, last in skipped)
        ]
    return mutants


def draw(
    mutants: Iterable[Mutant], count: int, seed: int, is_valid: Callable[[Mutant], bool] = lambda mutant: True
) -> list[Mutant]:
    """Draw mutants evenly over packages and kinds: first a place, then one of the changes that are possible there.

    The first mutants are the same for every `count`, and no place is drawn twice. Mutants that are not valid are passed over.
    """
    cells: dict[tuple[str, str], dict[tuple[str, int, int], list[Mutant]]] = {}
    for each in mutants:
        places = cells.setdefault((each.kind, each.package), {})
        places.setdefault((each.path, each.line, each.column), []).append(each)
    queues = []
    for kind, package in itertools.product(KINDS, PACKAGES):
        generator = random.Random(f"{seed} {package} {kind}")
        places = cells.get((kind, package), {})
        order = sorted(places)
        generator.shuffle(order)
        queues.append(filter(is_valid, [generator.choice(places[place]) for place in order]))
    turns = itertools.zip_longest(*queues)
    return list(itertools.islice((mutant for turn in turns for mutant in turn if mutant is not None), count))


def mutate(mutant: Mutant, source: str) -> str:
    """Return the source of the mutant's file with its change."""
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator

    changed = mutate_code(source, get_operator(mutant.operator)(), mutant.occurrence)
    if changed is None:
        raise ValueError(f"{mutant.path} has changed since the mutants were drawn")
    return changed


def is_valid(mutant: Mutant, root: Path) -> bool:
    """Return whether a mutant is Python: the `**` of an argument, for one, is an operator to cosmic-ray."""
    try:
        ast.parse(mutate(mutant, (root / mutant.path).read_text(encoding="utf-8")))
    except SyntaxError:
        return False
    return True


def statement_lines(source: str, line: int) -> list[range]:
    """Return the lines of the statement at a line, then those of its function or class, and so on outward.

    A compound statement, such as `if`, counts without its body. A line without a statement yields the whole file alone.
    """
    found: list[range] = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.stmt) or node.end_lineno is None:
            continue
        whole = range(node.lineno, node.end_lineno + 1)
        body = getattr(node, "body", None)
        if body and isinstance(body, list):
            header = range(node.lineno, max(body[0].lineno, node.lineno + 1))
            found += [header] if line in header else []
            is_scope = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
            found += [whole] if is_scope and line in whole else []
        elif line in whole:
            found.append(whole)
    # The smallest range that contains the line comes first.
    return [*sorted(found, key=len), range(1, source.count("\n") + 2)]


def covering_tests(source: str, line: int, contexts: Mapping[int, Sequence[str]]) -> set[str]:
    """Return the tests that run the statement at a line.

    A statement that runs while its module is imported belongs to no test; then those of the function, the class or the
    module around it are returned.

    Args:
        source: The file.
        line: The line, from 1.
        contexts: The tests that run each line.
    """
    for lines in statement_lines(source, line):
        tests = {context.partition("|")[0] for each in lines for context in contexts.get(each, ())} - {""}
        if tests:
            return tests
    return set()


def select_tests(tests: Iterable[str], seconds: Mapping[str, float], mirror: str, limit: float) -> list[str]:
    """Order tests by their time, those of the file `mirror` first, and return as many as take `limit` seconds together.

    Tests without a time failed without a mutant, or were not run: they are left out.
    """
    known = [test for test in tests if test in seconds]
    known.sort(key=lambda test: (not test.startswith(mirror), seconds[test], test))
    total = 0.0
    chosen = []
    for test in known:
        total += seconds[test]
        if total > limit and chosen:
            break
        chosen.append(test)
    return chosen


def read_seconds(report: Path) -> dict[str, float]:
    """Read from a JUnit report how long each test took that passed."""
    seconds = {}
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        if any(case.find(state) is not None for state in ("failure", "error", "skipped")):
            continue
        path = case.get("file", "")
        scope = case.get("classname", "").removeprefix(path.removesuffix(".py").replace("/", ".")).strip(".")
        parts = [path, *scope.split(".")] if scope else [path]
        seconds["::".join([*parts, case.get("name", "")])] = float(case.get("time", 0))
    return seconds


def copy_repository(copy: Path) -> None:
    """Copy all files that git does not ignore, so that no mutant is ever written into the repository.

    Files that are equal keep their time, and with it their compiled code.
    """
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        source = ROOT / name
        target = copy / name
        if not source.is_file():
            continue
        if not target.exists() or source.read_bytes() != target.read_bytes():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target)
    if not (copy / ".git").exists():
        subprocess.run(["git", "init", "-q"], cwd=copy, check=True)


def run_pytest(copy: Path, arguments: Sequence[str], timeout: float | None = None) -> tuple[str, str]:
    """Run pytest on the copy in a fork of this process, which has imported the large libraries, but not the package.

    Returns:
        The outcome ("passed", "failed", "import" or "timeout"; "import" if tests could not be collected), and the output.
    """
    for name in LIBRARIES:
        importlib.import_module(name)
    log = copy.parent / "pytest.log"
    process = multiprocessing.get_context("fork").Process(target=_become_pytest, args=(copy, arguments, log))
    process.start()
    process.join(timeout)
    outcomes = {0: "passed", 1: "failed", None: "timeout"}
    outcome = outcomes.get(process.exitcode, "import")
    if outcome == "timeout":
        # Also the processes that the tests have started, which are in the group of the fork.
        os.killpg(process.pid or 0, signal.SIGKILL)
        process.join()
    return outcome, log.read_text(errors="replace")


def _become_pytest(copy: Path, arguments: Sequence[str], log: Path) -> None:
    """Run pytest in this process, which is a fork."""
    os.setsid()
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.chdir(copy)
    os.environ |= {"PYTHONPATH": str(copy / "src"), "OMP_NUM_THREADS": "1"}
    sys.path.insert(0, str(copy / "src"))
    sys.argv = ["pytest"]
    # pytest-cov records no test of a line if tests may be distributed.
    code = importlib.import_module("pytest").main(["-n", "0", "--dist", "no", "-p", "no:cacheprovider", *arguments])
    sys.stdout.flush()
    # Threads that tests have left do not delay the end.
    os._exit(int(code))


def cover(work: Path, paths: Sequence[str]) -> None:
    """Run tests without mutants, record which test runs which line and how long it takes, and add that to `work`."""
    copy = work / "copy"
    copy_repository(copy)
    (work / "coveragerc").write_text(f"{COVERAGE}data_file = {work / 'coverage.sqlite'}\n")
    report = work / f"junit-{len(list(work.glob('junit-*.xml')))}.xml"
    arguments = [
        *("-m", "not nightly and not slow", "--cov", "--cov-append", "--cov-context=test", "--cov-report="),
        *(f"--cov-config={work / 'coveragerc'}", f"--junitxml={report}", "-o", "junit_family=xunit1", *paths),
    ]
    _, output = run_pytest(copy, arguments)
    print(output[-2000:])


def read_contexts(work: Path, path: str) -> dict[int, list[str]]:
    """Return the tests that run each line of a file of the copy."""
    from coverage import CoverageData

    data = CoverageData(basename=str(work / "coverage.sqlite"))
    data.read()
    return data.contexts_by_lineno(str(work / "copy" / path))


def failed_tests(output: str) -> list[str]:
    """Return the tests that pytest's summary names as failed, without their messages."""
    return [line.split(" - ")[0] for line in re.findall(r"^(?:FAILED|ERROR) (.*)$", output, re.MULTILINE)]


@contextmanager
def applied(mutant: Mutant, copy: Path) -> Iterator[str]:
    """Write a mutant into the copy, yield its changed lines, and restore the file with its time."""
    path = copy / mutant.path
    source = path.read_text(encoding="utf-8")
    times = path.stat()
    changed = mutate(mutant, source)
    lines = difflib.unified_diff(source.splitlines(), changed.splitlines(), lineterm="", n=0)
    path.write_text(changed, encoding="utf-8")
    try:
        yield "\n".join(line for line in lines if not line.startswith(("---", "+++", "@@")))
    finally:
        path.write_text(source, encoding="utf-8")
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def try_mutant(mutant: Mutant, work: Path, seconds: Mapping[str, float]) -> dict[str, Any]:
    """Run the tests that cover a mutant, first those of its package, then the others, until one fails.

    Returns:
        The mutant's fields with `change` (the lines before and after), `caught` ("package", "suite" or None), `outcome` of
        pytest, `by` (the test that failed), `tests` (how many were run of how many that cover the line) and `seconds`.
    """
    started = time.monotonic()
    copy = work / "copy"
    source = (copy / mutant.path).read_text(encoding="utf-8")
    tests = covering_tests(source, mutant.line, read_contexts(work, mutant.path))
    folder = f"tests/{mutant.package}/"
    mirror = f"{folder}test_{Path(mutant.path).stem}.py"
    stages = {
        "package": [test for test in tests if test.startswith(folder)],
        "suite": [test for test in tests if not test.startswith(folder)],
    }
    row: dict[str, Any] = {**asdict(mutant), "caught": None, "outcome": "passed", "by": "", "tests": {}}
    with applied(mutant, copy) as row["change"]:
        for stage, candidates in stages.items():
            chosen = select_tests(candidates, seconds, mirror, SECONDS[stage])
            row["tests"][stage] = (len(chosen), len(candidates))
            if not chosen:
                continue
            (work / "tests.txt").write_text("\n".join(chosen) + "\n")
            # A busy machine is several times slower than it was during `cover`.
            limit = 60 + 4 * sum(seconds[test] for test in chosen)
            outcome, output = run_pytest(copy, ["-x", "-q", f"@{work / 'tests.txt'}"], limit)
            if outcome != "passed":
                row |= {"caught": stage, "outcome": outcome, "by": ", ".join(failed_tests(output)) or output[-500:]}
                break
    row["seconds"] = round(time.monotonic() - started, 1)
    return row


def read_rows(work: Path) -> list[dict[str, Any]]:
    """Return the results so far."""
    path = work / "mutants.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def write_rows(work: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    (work / "mutants.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def as_mutant(row: Mapping[str, Any]) -> Mutant:
    return Mutant(**{name: row[name] for name in Mutant.__dataclass_fields__})


def describe(row: Mapping[str, Any]) -> str:
    """Return a line about the result of a mutant."""
    place = f"{row['path']}:{row['line']}"
    return f"{row['caught'] or 'survived':8} {place}  {' '.join(row['change'].split())}  {row['by'][:80]}"


def run(work: Path, count: int, seed: int) -> None:
    """Draw mutants, and test those that are not in mutants.jsonl."""
    copy = work / "copy"
    paths = [path for package in PACKAGES for path in sorted((copy / "src/halfmoon" / package).rglob("*.py"))]
    drawn = draw(
        [mutant for path in paths for mutant in find_mutants(path, copy)], count, seed, partial(is_valid, root=copy)
    )
    seconds = {test: time for report in work.glob("junit-*.xml") for test, time in read_seconds(report).items()}
    rows = read_rows(work)
    done = {as_mutant(row) for row in rows}
    for mutant in drawn:
        if mutant not in done:
            rows.append(try_mutant(mutant, work, seconds))
            write_rows(work, rows)
            print(describe(rows[-1]), flush=True)


def retest(work: Path, paths: Sequence[str], label: str) -> None:
    """Copy the repository's tests, run some with every survivor, and note `label` for the mutants that they catch."""
    copy = work / "copy"
    shutil.copytree(ROOT / "tests", copy / "tests", dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    outcome, output = run_pytest(copy, ["-q", *paths])
    if outcome != "passed":
        sys.exit(f"the tests fail without a mutant:\n{output[-2000:]}")
    rows = read_rows(work)
    for row in rows:
        if row["caught"] is None:
            with applied(as_mutant(row), copy):
                outcome, output = run_pytest(copy, ["-x", "-q", *paths], 600)
            if outcome != "passed":
                row |= {"caught": label, "outcome": outcome, "by": ", ".join(failed_tests(output))}
            print(describe(row), flush=True)
            write_rows(work, rows)


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a table of the results by package, and a list of the survivors."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for row in rows:
        counts[row["package"]][row["caught"] or "survived"] += 1
        counts["all"][row["caught"] or "survived"] += 1
    columns = ("package", "suite", "new test", "survived")
    lines = ["| package | mutants | its tests | suite | new test | survived |", "|---|---:|---:|---:|---:|---:|"]
    for name in (*PACKAGES, "all"):
        cells = [str(counts[name][column]) for column in columns]
        lines.append(f"| {name} | {counts[name].total()} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", *(describe(row) for row in rows if row["caught"] is None)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("cover", "run", "retest", "table"))
    parser.add_argument("tests", nargs="*", default=["tests"], help="cover, retest: files or folders of tests")
    parser.add_argument("--work", type=Path, default=Path("mutants"), help="folder of the copy and of the results")
    parser.add_argument("--count", type=int, default=100, help="run: number of mutants")
    parser.add_argument("--seed", type=int, default=0, help="run: seed of the draw")
    parser.add_argument(
        "--label", choices=("suite", "new test"), default="new test", help="retest: the column of the table"
    )
    options = parser.parse_intermixed_args()
    work = options.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    if options.command == "cover":
        cover(work, options.tests)
    elif options.command == "run":
        run(work, options.count, options.seed)
    elif options.command == "retest":
        retest(work, options.tests, options.label)
    else:
        print(table(read_rows(work)))


if __name__ == "__main__":
    main()
