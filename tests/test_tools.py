"""What stands around the package: the lock, the release notes, the site of the docs, examples, nox and hosted CI."""

import importlib
import importlib.util
import json
import os
import pkgutil
import re
import shutil
import subprocess
import tomllib
from itertools import product
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from scripts import load_script

ROOT = Path(__file__).resolve().parents[1]


def plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def locked() -> list[Requirement]:
    lines = re.sub(r" \\\n +--hash=\S+", "", (ROOT / "requirements" / "ci.txt").read_text()).splitlines()
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


def test_the_lock_names_one_version_of_everything_with_checksums() -> None:
    """PyTorch, whose builds have other checksums on every index, is in a list of its own, of the pinned version."""
    text = (ROOT / "requirements" / "ci.txt").read_text()
    packages = [block for block in re.split(r"^(?=[\w-])", text, flags=re.MULTILINE) if not block.startswith("#")]
    assert len(packages) > 100
    assert all(re.match(r"[\w-]+==\S+", each) and "--hash=sha256:" in each for each in packages)
    assert not {"torch", "torchvision"} & {plain(each.name) for each in locked()}
    torch = (ROOT / "requirements" / "torch.txt").read_text()
    (pin,) = re.findall("^torch==.*$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert re.findall("^torch.*$", torch, re.MULTILINE) == [pin + " \\"]
    assert torch.count("--hash=sha256:") > 20


def test_the_lock_fits_what_the_package_asks_for() -> None:
    """Every requirement of the extra `dev` and of the extras in it has a version that its range admits."""
    versions: dict[str, list[str]] = {}
    for each in locked():
        versions.setdefault(plain(each.name), []).append(next(iter(each.specifier)).version)
    requested = load_script("tools/lock.py").package_requirements()
    assert {"numpy", "pytest", "flwr"} <= {each.name for each in requested}
    for each in requested:
        found = versions.get(plain(each.name))
        assert found, f"{each.name} is not locked: run python tools/lock.py"
        assert all(each.specifier.contains(version) for version in found), each


def test_the_tools_of_a_release_are_locked_by_checksum() -> None:
    """`pip install build` took whatever version the index had on that day, and pip fetched the build backend by itself."""
    text = (ROOT / "requirements" / "release.txt").read_text()
    packages = [block for block in re.split(r"^(?=[\w-])", text, flags=re.MULTILINE) if not block.startswith("#")]
    assert all(re.match(r"[\w-]+==\S+", each) and "--hash=sha256:" in each for each in packages)
    versions = dict(re.findall(r"^([\w-]+)==(\S+)", text, re.MULTILINE))
    for tool in map(Requirement, load_script("tools/lock.py").RELEASE_TOOLS):
        assert tool.specifier.contains(versions[tool.name]), f"{tool} is not locked: run python tools/lock.py"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert {Requirement(each).name for each in project["build-system"]["requires"]} <= set(versions)
    release = (ROOT / ".ci" / "release").read_text()
    installed = re.findall(r'tools/bin/python" -m pip install (.*)', release)
    assert installed == ['-q --require-hashes -r "$temporary/source/requirements/release.txt"']
    assert re.findall(r"-m build .*", release)[0].split(" >")[0].endswith("--no-isolation")


def test_the_notes_of_a_tag_are_its_section() -> None:
    notes = load_script(".ci/notes.py").notes
    changes = "# Changes\n\n## 0.2.0\n\n- new\n\n### More\n\n## 0.1.0\n\n- first\n"
    assert notes("v0.2.0", "0.2.0", changes) == "- new\n\n### More\n"
    assert notes("v0.1.0", "0.1.0", changes) == "- first\n"
    with pytest.raises(ValueError, match=r"the tag is v0\.1\.0, but pyproject\.toml has version 0\.2\.0"):
        notes("v0.1.0", "0.2.0", changes)
    for empty in ("## 0.2.0\n\n## 0.1.0\n- first\n", "# Changes\n"):
        with pytest.raises(ValueError, match=r"no changes below '## 0\.2\.0'"):
            notes("v0.2.0", "0.2.0", empty)


def test_a_signature_is_of_these_checksums_and_this_key(tmp_path: Path) -> None:
    """As docs/security.md verifies it; a changed byte or another key is found, and without a key it fails."""
    sums, other = tmp_path / "SHA256SUMS", tmp_path / "other"
    sums.write_text("ab  halfmoon.whl\n")
    for key in (tmp_path / "key", other):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)

    def sign(program: str = "sign", **more: str) -> "subprocess.CompletedProcess[str]":
        environment = {"PATH": os.environ["PATH"], **more}
        return subprocess.run(
            [ROOT / ".ci" / program, *([sums] if program == "sign" else [])],
            env=environment, capture_output=True, text=True, check=False,
        )  # fmt: skip

    def verified(key: Path) -> bool:
        (tmp_path / "signers").write_text(f"maintainer {key.with_suffix('.pub').read_text()}")
        (message,) = re.findall(r"^\$ (ssh-keygen -Y verify .*)$", (ROOT / "docs" / "security.md").read_text(), re.M)
        return not subprocess.run(message, cwd=tmp_path, shell=True, capture_output=True, check=False).returncode

    for done in (sign(), sign("release")):
        assert done.returncode == 1
        assert done.stderr.startswith("not signed: name a private SSH key in HALFMOON_SIGNING_KEY")
    assert not (tmp_path / "SHA256SUMS.sig").exists()
    sign(HALFMOON_SIGNING_KEY=str(other))
    assert not verified(tmp_path / "key")
    sign(HALFMOON_SIGNING_KEY=str(tmp_path / "key"))
    assert verified(tmp_path / "key")
    sums.write_text("ac  halfmoon.whl\n")
    assert not verified(tmp_path / "key")


@pytest.mark.parametrize(
    ("found", "flags", "code", "message"),
    [
        ([{"name": "a", "skip_reason": "not on PyPI"}] * 3, "", 1, "skipped: .* knows none of 3 packages"),
        ([{"name": "a", "skip_reason": "not on PyPI"}], "--allow-skipped", 0, "skipped: .* knows none of 1 packages"),
        (
            [{"name": "a", "version": "1", "vulns": []}, {"name": "b", "skip_reason": "?"}],
            "",
            0,
            "^1 packages .* 1 more are not in it: b",
        ),
        (
            [{"name": "a", "version": "1", "vulns": []}, {"name": "torch", "skip_reason": "?"}],
            "",
            1,
            "1 more are not in it: torch.(.|\n)*audit skipped: .*pypi: lacks torch",
        ),
        (
            [{"name": "torch", "version": "1", "vulns": []}, {"name": "flwr", "skip_reason": "?"}],
            "--allow-skipped",
            0,
            "lacks flwr",
        ),
        ([{"name": "a", "version": "1", "vulns": [{"id": "CVE-1"}]}], "--allow-skipped", 1, "a 1: CVE-1"),
    ],
)
def test_an_audit_counts_what_was_compared(
    tmp_path: Path, found: list[dict], flags: str, code: int, message: str
) -> None:
    """An index that is a mirror knows no package: no vulnerability found there means nothing, and is not said."""
    program = tmp_path / "pip-audit"
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{json.dumps({'dependencies': found})}\nEND\n")
    program.chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        [ROOT / ".ci" / "audit", *flags.split()], env={"PATH": path}, capture_output=True, text=True, check=False
    )
    assert done.returncode == code
    assert re.search(message, done.stdout)


def test_an_audit_compares_versions_without_their_local_part(tmp_path: Path) -> None:
    program = tmp_path / "pip-audit"
    output = json.dumps({"dependencies": [{"name": "torch", "version": "2.9.0", "vulns": []}]})
    program.write_text(f"#!/bin/sh\ncat \"$8\" > {tmp_path}/seen\necho '{output}'\n")
    program.chmod(0o755)
    (tmp_path / "locked.txt").write_text("torch==2.9.0+cpu\nflwr==1.20.0\n")
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        [ROOT / ".ci" / "audit", tmp_path / "locked.txt"],
        env={"PATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0
    assert (tmp_path / "seen").read_text() == "torch==2.9.0\nflwr==1.20.0\n"


def test_a_release_has_the_committed_files_and_no_others(tmp_path: Path) -> None:
    """An untracked file below src/ was built, signed and shipped; it and a change that is not committed are named."""
    repository = tmp_path / "repository"
    (repository / ".ci").mkdir(parents=True)
    shutil.copy(ROOT / ".ci" / "source", repository / ".ci" / "source")
    (repository / "module.py").write_text("committed\n")

    def git(*message: str) -> None:
        who = ("-c", "user.name=t", "-c", "user.email=t@t")
        subprocess.run(["git", *who, *message], cwd=repository, check=True, capture_output=True)

    git("init", "-q")
    git("add", "-A")
    git("commit", "-qm", "First")
    (repository / "module.py").write_text("changed\n")
    (repository / "planted.py").write_text("planted\n")
    done = subprocess.run([".ci/source", tmp_path / "out"], cwd=repository, capture_output=True, text=True, check=True)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [".ci", "module.py"]
    assert (tmp_path / "out" / "module.py").read_text() == "committed\n"
    assert "planted.py" in done.stderr
    assert "module.py" in done.stderr
    release = (ROOT / ".ci" / "release").read_text()
    assert re.findall(r'-m build --outdir "\$out" (\S+)', release) == ['"$temporary/source"']


def test_links_of_the_repository_hold_on_the_site() -> None:
    """README.md is index.md there, docs/ is its root; a file that is no page leaves its words; code remains as it is."""
    translate_links = load_script("tools/docs_site.py").translate_links
    known = {
        "README.md": "index.md",
        "docs/cli.md": "cli.md",
        "docs/images/a.png": "images/a.png",
        "results/README.md": "results/index.md",
        "results/robust.md": "results/robust.md",
    }
    for name, text, wanted in (
        ("README.md", "[c](docs/cli.md#run) ![p](docs/images/a.png)", "[c](cli.md#run) ![p](images/a.png)"),
        ("docs/cli.md", "[r](../results/robust.md) [h](../README.md#x)", "[r](results/robust.md) [h](index.md#x)"),
        ("results/robust.md", "[c](../docs/cli.md), [b](README.md)", "[c](../cli.md), [b](index.md)"),
        ("docs/cli.md", "[`t`](../tests/test_fuzz.py), [s](#here)", "`t`, [s](#here)"),
        ("results/robust.md", "[`[t]`](../docs/cli.md#x)", "[`[t]`](../cli.md#x)"),
        ("docs/cli.md", "[w](https://a.b/c)", "[w](https://a.b/c)"),
        ("docs/cli.md", "```text\n[c](../README.md)\n```\n", "```text\n[c](../README.md)\n```\n"),
    ):  # fmt: skip
        assert translate_links(text, name, known) == wanted


@pytest.mark.parametrize(
    ("page", "message"), [("semifl", "fine_tune"), ("mixmatch", "Beta(concentration, concentration)")]
)
def test_a_method_s_page_has_the_departures_of_its_file(page: str, message: str) -> None:
    """On the site they stand instead of the link to the file, which readers of the repository follow."""
    text = (ROOT / "docs" / "methods" / f"{page}.md").read_text()
    assert message not in text.split("## Departures")[1]
    assert message in load_script("tools/docs_site.py").departures(text).split("## Departures")[1]


def test_the_site_has_every_page() -> None:
    """Each page of docs/ stands in the navigation, and each module of the package on the page of its package."""
    entries = re.findall(r"^ +- (?:\w+: )?(\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    site = load_script("tools/docs_site.py")
    pages = {
        path for name, path in site.site_paths().items() if name.endswith(".md") and not name.startswith("results/")
    }
    assert set(entries) == pages
    assert len(entries) == len(pages)
    assert {"core", "methods", "federation"} <= set(site.packages())
    assert "::: halfmoon.core.tree\n" in site.reference("core")
    assert "::: halfmoon.federation.site.client\n" in site.reference("federation")


def test_the_index_of_results_names_every_page() -> None:
    named = re.findall(r"\]\((\w+\.md)\)", (ROOT / "results" / "README.md").read_text())
    assert sorted(set(named)) == sorted(
        path.name for path in (ROOT / "results").glob("*.md") if path.name != "README.md"
    )


def test_the_checks_name_what_is_there() -> None:
    """nox's fast tests exist, `.ci/run` calls nox's full session, and hosted CI calls `.ci/run` on nox's Pythons."""
    nox = load_script("noxfile.py")
    assert [path for path in nox.FAST if not (ROOT / path).exists()] == []
    assert "nox --no-venv --session full -- tested linted\n" in (ROOT / ".ci" / "run").read_text()
    hosted = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    assert f"python: {nox.PYTHONS}".replace("'", '"') in hosted
    assert "- run: .ci/run --locked\n" in hosted
    assert "- run: nox --no-venv --session slow\n" in hosted
    assert "schedule:" in hosted
    assert hosted.count("python: [") == hosted.count(f"python: {nox.PYTHONS}".replace("'", '"'))
    hooks = (ROOT / ".pre-commit-config.yaml").read_text()
    assert "tests/test_layout.py" in hooks


def test_a_quick_gallery_takes_two_rounds() -> None:
    rounds = load_script("tools/gallery.py").ROUNDS
    text = 'rounds=20, seeds=3\n{"rounds": 12}\n"rounds = 4\\n"\nrows["round"] == 20\nmap(draw, range(5))'
    assert rounds.sub(r"\g<1>2", text) == (
        'rounds=2, seeds=3\n{"rounds": 2}\n"rounds = 2\\n"\nrows["round"] == 2\nmap(draw, range(2))'
    )


def test_the_gallery_has_every_script() -> None:
    """A script of examples/ is short and says what one learns; building the documentation runs them all."""
    gallery = load_script("tools/gallery.py")
    scripts = sorted((ROOT / "examples").glob("*.py"))
    assert sorted(gallery.ORDER) == [path.stem for path in scripts]
    text = "# Learn x.\n# %% [markdown]\n# # Title\n# words\n# %%\na = 1\n\nb = 2\n"
    assert gallery.cells(text) == [("markdown", "# Title\nwords"), ("code", "a = 1\n\nb = 2")]
    for path in scripts:
        lines = path.read_text(encoding="utf-8").splitlines()
        assert len(lines) <= 60, path
        assert lines[0].startswith("# Learn "), path
        assert lines[1] == "# %% [markdown]", path
        assert lines[2].startswith("# # "), path


def test_git_ignores_nothing_of_the_package() -> None:
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("this is no clone")
    modules = [path.relative_to(ROOT).as_posix() for path in (ROOT / "src").rglob("*.py")]
    arguments = ["git", "check-ignore", "--no-index", *modules]
    found = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (found.stdout, found.returncode) == ("", 1)


def resolved(name: str) -> object:
    """Return what a dotted name means; raise ImportError or AttributeError where it means nothing."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            found: object = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        for part in parts[count:]:
            found = getattr(found, part)
        return found
    raise ImportError(name)


@pytest.mark.parametrize("page", ["docs/architecture.md", "docs/glossary.md", "CONTRIBUTING.md"])
def test_what_a_page_names_is_there(page: str) -> None:
    """Every `halfmoon.x.y` can be imported, and every path of the repository exists."""
    text = (ROOT / page).read_text()
    names = set(re.findall(r"`(halfmoon(?:\.\w+)+)`", text)) - {"halfmoon.methods", "halfmoon.networks"}
    assert names
    for name in names:
        resolved(name)
    paths = re.findall(r"`((?:src|tests|docs|tools|requirements|\.ci)/[\w./-]*[\w/])", text)
    assert [path for path in paths if not (ROOT / path).exists() and "NAME" not in path] == []


def test_the_terms_are_in_order() -> None:
    terms = re.findall(r"^\| (\w.*?) \|", (ROOT / "docs" / "glossary.md").read_text(), re.MULTILINE)[1:]
    assert len(terms) > 30
    assert terms == sorted(terms, key=str.lower)


def test_the_picture_of_the_packages_is_true() -> None:
    rows = load_script("docs/draw_architecture.py").ROWS
    height = {name: len(rows) - number for number, row in enumerate(rows) for name in row}
    source = ROOT / "src" / "halfmoon"
    assert sorted(height) == sorted(path.parent.name for path in source.glob("*/__init__.py"))
    for name in height:
        for path in (source / name).rglob("*.py"):
            used = set(re.findall(r"^\s*(?:from|import) halfmoon\.(\w+)", path.read_text(), re.MULTILINE))
            assert all(height[other] < height[name] for other in used - {name}), path


def test_mutants_are_drawn_evenly() -> None:
    """Each turn draws one mutant of each kind and package; a larger sample has the smaller one as its start."""
    tool = load_script("tools/mutants.py")
    places = [
        tool.Mutant(package, kind, f"{package}.py", line, 0, operator, line)
        for package in tool.PACKAGES
        for kind in tool.KINDS
        for line in range(3 if (package, kind) == ("core", "number") else 9)
        for operator in ("first", "second")
    ]
    large = tool.draw(places, 100, seed=1)
    assert large[:60] == tool.draw(places, 60, seed=1)
    assert len({(each.path, each.kind, each.line) for each in large}) == 100
    counts = [sum((each.package, each.kind) == cell for each in large) for cell in product(tool.PACKAGES, tool.KINDS)]
    assert sorted(counts) == [3, *[4] * 18, *[5] * 5]
    assert tool.draw(places, 100, seed=2) != large
    assert {each.line for each in tool.draw(places, 1000, seed=1, is_valid=lambda each: each.line > 5)} == {6, 7, 8}


def test_operators_replace_those_of_their_group() -> None:
    kinds = {
        "core/ReplaceComparisonOperator_Lt_GtE": "comparison",
        "core/ReplaceComparisonOperator_Is_Lt": None,
        "core/ReplaceBinaryOperator_Add_Sub": "arithmetic",
        "core/ReplaceBinaryOperator_Add_BitOr": None,
        "core/ReplaceUnaryOperator_USub_UAdd": "arithmetic",
        "core/ReplaceUnaryOperator_Delete_Not": "boolean",
        "core/NumberReplacer": "number",
        "core/RemoveDecorator": None,
    }
    tool = load_script("tools/mutants.py")
    assert {name: tool.kind_of(name) for name in kinds} == kinds


def test_a_mutant_is_tested_by_what_runs_its_line() -> None:
    """A default is evaluated on import, under no test; those that run its function stand in for it."""
    tool = load_script("tools/mutants.py")
    source = "LIMIT = 3\ndef f(a=1):\n    if a < (\n        2\n    ):\n        return 0\n    return 1\n"
    contexts = {1: [""], 2: [""], 3: ["a|run", "b|run", "c|setup"], 6: ["a|run"], 7: ["b|run", "c|setup"]}
    assert tool.covering_tests(source, 4, contexts) == {"a", "b", "c"}  # in the condition of lines 3 to 5
    assert tool.covering_tests(source, 6, contexts) == {"a"}
    assert tool.covering_tests(source, 2, contexts) == {"a", "b", "c"}
    assert tool.covering_tests(source, 1, contexts) == {"a", "b", "c"}
    assert tool.covering_tests(source, 1, {}) == set()
    seconds = {"x::slow": 50.0, "x::fast": 1.0, "y::mirror": 2.0, "x::medium": 8.0}
    tests = [*seconds, "x::failed"]
    assert tool.select_tests(tests, seconds, "y::", 12.0) == ["y::mirror", "x::fast", "x::medium"]
    assert tool.select_tests(["x::slow"], seconds, "y::", 12.0) == ["x::slow"]


def test_types_are_no_places_of_mutants() -> None:
    source = "def f(a: int | None = 1) -> int | str:\n    b: int | str = 2\n"
    ranges = load_script("tools/mutants.py").annotation_ranges(source)
    assert sorted(ranges) == [((1, 9), (1, 19)), ((1, 28), (1, 37)), ((2, 7), (2, 16))]


def test_a_report_of_junit_has_the_tests_that_passed(tmp_path: Path) -> None:
    (tmp_path / "junit.xml").write_text(
        '<testsuites><testsuite><testcase classname="tests.core.test_a" name="test_b[1-x]" file="tests/core/test_a.py" '
        'time="0.5"/><testcase classname="tests.core.test_a.TestC" name="test_d" file="tests/core/test_a.py" time="2"/>'
        '<testcase classname="tests.core.test_a" name="test_e" file="tests/core/test_a.py" time="1"><failure/></testcase>'
        "</testsuite></testsuites>"
    )
    found = load_script("tools/mutants.py").read_seconds(tmp_path / "junit.xml")
    assert found == {"tests/core/test_a.py::test_b[1-x]": 0.5, "tests/core/test_a.py::TestC::test_d": 2.0}


def test_the_functions_of_the_traced_paths_exist() -> None:
    """A function that was renamed or moved would be missed only when somebody traces the path."""
    for _, stages in load_script("tools/paths.py").PATHS.values():
        for stage in stages:
            names = [stage.entry, *(name for station in stage.stations for name in station.split(" > "))]
            for name in names:
                assert callable(pkgutil.resolve_name(f"halfmoon.{name}")), name
