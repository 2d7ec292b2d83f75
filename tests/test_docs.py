"""The pages are true: their Python runs, their commands are understood, their tables are those of the code."""

import io
import json
import os
import re
import shlex
import tomllib
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from packaging.requirements import Requirement
from PIL import Image
from scripts import load_script

import halfmoon
from halfmoon.cli import main as cli
from halfmoon.contract import check_method
from halfmoon.data import Images, sources
from halfmoon.methods import registry
from halfmoon.report import tables
from halfmoon.runs import outside, runner

ROOT = Path(__file__).resolve().parents[1]
PAGES = [
    *(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


generate = load_script("docs/generate.py")


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path) -> list[tuple[str, str]]:
    return FENCE.findall(page.read_text(encoding="utf-8"))


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run every test in an empty folder, on a terminal of 80 columns."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")


def test_generated_tables_are_those_of_the_code() -> None:
    texts = {name_of(page): page.read_text(encoding="utf-8") for page in PAGES}
    assert [name for name, text in texts.items() if generate.renew(text) != text] == [], "run: python docs/generate.py"


def test_a_stale_table_is_seen() -> None:
    others = "".join(f"| `{name}` | | | b |\n" for name in registry.options("fedprox-sl") if name != "prox")

    def defaults(method: str, row: str) -> str:
        return generate.renew(f"<!-- defaults: {method} -->\n{row}\n{others}<!-- /defaults -->")

    fresh = defaults("fedprox-sl", "| `prox` | `0.01` | a number | mu of 1 \\| 2 |")
    assert fresh.splitlines()[1] == "| `prox` | `0.01` | a number | mu of 1 \\| 2 |"
    assert defaults("fedprox-sl", "| `prox` | `0.5` | text | mu of 1 \\| 2 |") == fresh
    assert defaults("fedprox-sl", "| `prox` | | | mu of 1 \\| 2 |") == fresh
    for method, row, why in (
        ("fedavg", "", "has no row for prox"),
        ("fedavg", "| `threshold` | | | a |", "no option `threshold`"),
        ("fedavg", "| `prox` | | |", "needs a default, values and a meaning"),
    ):
        with pytest.raises(ValueError, match=why):
            defaults(method, row)
    table = "<!-- generated: methods -->\n| nothing |\n<!-- /generated -->"
    assert all(f"[`{name}`](methods/" in generate.renew(table) for name in registry.names())


def test_a_round_of_fedavg_is_one_model_each_way() -> None:
    """Both ways the model is sent, up with a weight of 8 bytes; clients keep nothing, the server retains the model.
    FedLoKe's clients keep a second model; FedProx's objective alone differs, so it sends what FedAvg sends."""
    plain = generate.measured("fedavg")
    assert (plain.down, plain.client, plain.server) == (1.0, 0.0, 1.0)
    assert 0 < plain.up - 1 < 1e-3
    assert generate.measured("fedprox-fixmatch") == plain
    assert generate.measured("fedloke").client == 1.0


def test_every_method_says_where_it_departs() -> None:
    """In a paragraph after "server:" in its file's docstring, for custom started with "Departures:"."""
    for name in registry.names():
        assert len(generate.describe_departures(type(registry.entry(name).method))) > 60, name


def test_every_method_has_a_page_with_its_options() -> None:
    for page, names in generate.families().items():
        text = read(f"docs/methods/{page}.md")
        assert f"<!-- method: {page} -->" in text
        for name in names:
            assert f"`{name}`" in text
            assert all(re.search(rf"`{key}( = |`)", text) for key in registry.options(name))


def test_every_flag_of_a_command_is_on_the_page() -> None:
    """In the command's own section, in the list of common flags, or in a row of the table that names the command."""
    page, options = read("docs/cli.md"), read("docs/options.md")
    for command in generate.COMMANDS:
        page_section = page.split(f"## halfmoon {command}\n")[1].split("\n## ")[0] + page.split("\n## ")[0]
        shown = generate.flags(command)
        assert len(shown) > 2
        for flag in shown:
            takes = rf"^- `{command}` takes .*`{flag}`(,|$)" if command not in ("run", "compare") else rf"^\| `{flag}`"
            there = re.search(takes, options, re.MULTILINE) or re.search(rf"`{flag}\b", page_section)
            assert there, f"{flag} of halfmoon {command}"


def test_the_main_job_is_described() -> None:
    section = read("docs/cli.md").split("## halfmoon run\n")[1].split("\n## ")[0]
    assert all(f"`{name}`" in section for name in cli.MAIN_JOB["baselines"])


def test_what_a_run_leaves_is_described(tmp_path: Path) -> None:
    outcome = halfmoon.run(halfmoon.Config(rounds=1, baselines=("fedavg",), threads=1, run_dir=tmp_path / "run"))
    page = read("docs/runs.md")
    rows = read("docs/metrics.md")
    for path in outcome.folder.iterdir():
        name = re.sub(r"checkpoint-\d{6}\.json", ".json", re.sub(r"\d{6}\.s", "NNNNNN.s", path.name))
        assert f"`{name}" in page, path.name
    (row,) = [json.loads(line) for line in (outcome.folder / "metrics.jsonl").read_text().splitlines()]
    described = dict.fromkeys(("round", "cohort", "test", "prior", "train", "pseudo"), rows)
    described |= {"cost": read("docs/budgets.md")}
    assert row.keys() == described.keys()
    for row_section, text in described.items():
        assert f"| `{row_section}` |" in rows
        for key in row[row_section] if isinstance(row[row_section], dict) and row_section != "test" else []:
            assert f"`{key.removesuffix('_spread')}`" in text, key


def form(printed: str) -> list[str]:
    """Return printed lines without what differs between machines: the numbers, and the width of columns."""
    masked = re.sub(r"\d[\d,.]*(e-?\d+)?", "#", printed.strip())
    return [re.sub(r"[ -]+", " ", line).strip() for line in masked.splitlines()]


def test_the_form_of_a_text_keeps_its_words() -> None:
    assert form("a: 12.50 ± 3.1   b\n-----  --\n") == form("a:  9 ± 0.25 b\n---  ---")
    assert form("a: 1") != form("b: 1")


@pytest.fixture
def few_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep 400 of the 1,437 training digits, and 60 for the test: what a page prints is compared without its numbers."""
    train, test, classes = sources._load_digits()
    few = Images(train.images[:400], train.labels[:400]), Images(test.images[:60], test.labels[:60])
    monkeypatch.setattr(sources, "_load_digits", lambda: (*few, classes))


PYTHON = [
    ROOT / name
    for name in ("docs/quickstart.md", "docs/objective.md", "docs/trackers.md", "README.md", "CONTRIBUTING.md")
]


@pytest.mark.parametrize("page", PYTHON, ids=name_of)
def test_python_on_a_page_runs_and_prints_what_stands_below_it(page: Path, few_digits: None) -> None:
    names: dict[str, Any] = {"__name__": "page"}
    printed = io.StringIO()
    ran = 0
    for language, content in blocks(page):
        if language == "python":
            printed = io.StringIO()
            with redirect_stdout(printed):
                # A page's blocks do not inherit this file's __future__ import.
                exec(compile(content, page.name, "exec", dont_inherit=True), names)
            ran += 1
        elif language == "text":
            assert form(printed.getvalue()) == form(content)
    assert ran >= (6 if page.stem == "quickstart" else 1)


def test_the_method_of_the_rules_keeps_them() -> None:
    names: dict[str, Any] = {"__name__": "page"}
    exec(dict(blocks(ROOT / "docs/contract.md"))["python"], names)
    outside.register(names["bold"])
    assert [each for each in check_method("page:ByLabels") if not each.kept] == []


class Command(NamedTuple):
    """A command of a page with what it prints there."""

    argument_list: list[str]
    printed: str

    @property
    def real(self) -> bool:
        """Whether the test lets it run until it ends: it needs no data but the digits and trains nothing."""
        small = (["data", "digits"], ["data", "--split"])
        quick = self.argument_list[0] in ("methods", "site", "privacy", "--help") or self.argument_list[:2] in small
        return quick or self.printed.startswith("halfmoon: ")


class Understood(Exception):
    """The command line has understood a command, and would now begin to load or to train."""


def commands(page: Path) -> list[Command | str]:
    """Return the commands of a page in order, and its TOML files."""
    found: list[Command | str] = []
    for language, content in blocks(page):
        if language == "toml":
            found.append(content)
        if language == "console":
            for row_section in re.split(r"^\$ ", content, flags=re.MULTILINE)[1:]:
                line, _, printed = row_section.partition("\n")
                arguments = shlex.split(line)
                assert arguments[0] == "halfmoon", line
                found.append(Command(arguments[1:], printed))
    return found


@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)], ids=name_of)
def test_commands_on_a_page_are_understood_and_print_what_stands_below_them(page, monkeypatch, capsys):
    def stop(*_: Any, **__: Any) -> None:
        raise Understood

    for each in commands(page):
        if isinstance(each, str):
            name = re.match(r"# (\S+\.toml)\n", each)
            assert name, "a TOML block begins with its file's name"
            Path(name[1]).write_text(each, encoding="utf-8")
            continue
        capsys.readouterr()
        if each.real:
            code = cli.main(each.argument_list)
            out, complaint = capsys.readouterr()
            if each.printed.startswith("halfmoon: "):
                assert (code, complaint) == (2, each.printed)
            else:
                assert code == 0, complaint
                assert matches(out, each.printed), out
            continue
        with monkeypatch.context() as patch:
            for attribute in ("start", "compare", "resume"):
                patch.setattr(runner, attribute, stop)
            patch.setattr("halfmoon.data.load", stop)
            patch.setattr("halfmoon.runs.factory.load_source", stop)
            patch.setattr("halfmoon.studies.run_sweep.run_sweep", stop)
            patch.setattr("halfmoon.runs.workers.RayExecutor", stop)
            patch.setattr("halfmoon.report.writer.write_report", stop)
            with pytest.raises(Understood):
                cli.main(each.argument_list)
        heading = re.match(r"method .*", each.printed)
        assert not heading or heading[0].split() == " ".join(tables.comparison_table([]).headings).split()


def matches(printed: str, wanted: str) -> bool:
    """Say whether `printed` is what a page shows, where a line `...` stands for any lines, and nothing for anything."""
    if not wanted.strip():
        return True
    lines = [r"(?:.*\n)*?" if line == "..." else re.escape(line.rstrip()) + r"[ ]*\n" for line in wanted.splitlines()]
    return re.fullmatch("".join(lines), printed if printed.endswith("\n") else printed + "\n") is not None


def test_dots_on_a_page_stand_for_whole_lines() -> None:
    assert matches("a\nb\nc\n", "a\n...\nc\n")
    assert matches("a\nc\n", "a\n...\nc\n")
    assert not matches("a\nb\nd\n", "a\n...\nc\n")
    assert not matches("a\nb\n", "a\n")


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_links_lead_somewhere_and_pages_name_no_machine() -> None:
    for page in [*PAGES, *sorted((ROOT / "results").glob("*.md"))]:
        text = page.read_text(encoding="utf-8")
        assert page not in PAGES or not re.search(r"/(?:work|opt|tmp|home|root)/", text), page
        for target in re.findall(r"\]\((?!https://)([^)\s]+)\)", FENCE.sub("", text)):
            path, _, anchor = target.partition("#")
            attribute = page.parent / path if path else page
            assert attribute.exists(), (page, target)
            assert not anchor or anchor in anchors(attribute), (page, target)


def test_pictures_are_small() -> None:
    pictures = list((ROOT / "docs" / "images").iterdir())
    assert pictures
    for path in pictures:
        assert path.stat().st_size < 150_000
        with Image.open(path) as image:
            assert image.format == "PNG"


def test_readme_has_two_commands_and_the_check_takes_the_second() -> None:
    both = [content.strip() for language, content in blocks(ROOT / "README.md") if language == "bash"]
    assert both == [
        "pip install -c constraints.txt . && halfmoon run",
        "pip install -c constraints.txt -e '.[dev]' && python -m pytest",
    ]
    check = ROOT / ".ci" / "run"
    assert f"(\n  {both[1]}\n)\n" in check.read_text()
    assert "--last-failed" not in check.read_text()
    assert "set -euo pipefail" in check.read_text()
    assert os.access(check, os.X_OK)


def test_readme_names_the_pin_and_the_least_python() -> None:
    (pin,) = [line for line in read("constraints.txt").splitlines() if line and not line.startswith("#")]
    project = tomllib.loads(read("pyproject.toml"))["project"]
    readme = read("README.md")
    assert f"`{pin}`" in readme
    assert f"Python {project['requires-python'].removeprefix('>=')} or newer" in readme
    (torch,) = [one for one in map(Requirement, project["dependencies"]) if one.name == "torch"]
    assert torch.specifier.contains(pin.removeprefix("torch=="))


def test_the_newest_change_is_this_version() -> None:
    versions = re.findall(r"^## (\d\S+)", read("CHANGELOG.md"), re.MULTILINE)
    assert versions[0] == tomllib.loads(read("pyproject.toml"))["project"]["version"]


README_CHARACTERS, WRITTEN_BYTES, DOCS_BYTES = 5_000, 234_000, 304_000
"""The most of the README, of what people write in docs/, and of docs/ with tables by programs."""
CELL, WORDS = 160, 40
"""Characters of a table's cell, and words of a sentence."""
GENERATED = re.compile(r"<!-- (generated|method|table): .*?<!-- /\w+ -->", re.DOTALL)
WRITTEN = {"CHANGELOG.md"}
"""The log of past versions keeps its words."""
BANNED = {
    r"\b(a|the|its|his|each|every|of|one|no) works?\b(?! (with|on|under|by|for))": "client update",
    r"\bvisits?\b": "round",
    r"\b(a|the|its) (look|judge|aside|ready)\b": "view, pseudo-label, cache",
    r"\bprobabilities true\b": "calibrate",
    r"\bmay come in\b": "certificates and keys",
    r"\bnothing that is told from\b": "not distinguishable from",
    r"\bby more than anybody\b|\bthan anybody thinks\b": "a number",
    r"\btau\b(?!-b)": "threshold",
    r"halfmoon\[": "pip install -c constraints.txt '.[extra]'",
}
"""Patterns that no page uses, with what to write instead."""


def prose(page: Path) -> str:
    """Return a page's text without code, tables, links' targets, generated blocks and comments."""
    text = GENERATED.sub("", FENCE.sub("", page.read_text(encoding="utf-8")))
    text = re.sub(r"^(    .*|```.*|<!--.*-->)$", "", text, flags=re.MULTILINE)
    text = re.sub(r"```.*?```|`[^`\n]*`", "`", text, flags=re.DOTALL)
    return re.sub(r"\]\([^)]*\)", "]", text)


def split_sentences(page: Path) -> list[str]:
    stored = [line for line in prose(page).splitlines() if not line.startswith("|")]
    blocks_ = re.split(r"\n\s*\n|\n(?=\s*(?:[-*#]|\d+\.)\s)", "\n".join(stored))
    sentences_ = []
    for block in blocks_:
        sentences_ += re.split(r"(?<=[.:?!;])\**[)\"]*\s+", re.sub(r"\s+", " ", block).strip())
    return sentences_


def cells(page: Path) -> list[str]:
    """Return the cells of a page's tables, links without their targets."""
    lines = [line for line in FENCE.sub("", page.read_text(encoding="utf-8")).splitlines() if line.startswith("|")]
    return [re.sub(r"\]\([^)]*\)", "]", cell.strip()) for line in lines for cell in re.split(r"(?<!\\)\|", line)]


def screens(page: Path) -> float:
    """Return about how many screens of 1280x800 a page fills."""
    total = 0.0
    code = False
    for line in page.read_text(encoding="utf-8").splitlines():
        code = not code if line.startswith("```") else code
        if line.startswith("|"):
            widest = max(len(cell) for cell in re.sub(r"\]\([^)]*\)", "]", line).split("|"))
            total += 1.6 * max(1.0, widest / 45)
        elif line.startswith("!["):
            total += 14
        else:
            total += 0.85 if code else max(0.6, len(line) / 100)
    return total / 40


STRICT = [page for page in PAGES if name_of(page) not in WRITTEN]


def test_the_readme_and_the_docs_are_short() -> None:
    assert len(read("README.md")) <= README_CHARACTERS
    texts = [page.read_text(encoding="utf-8") for page in (ROOT / "docs").rglob("*.md")]
    assert sum(len(text.encode()) for text in texts) <= DOCS_BYTES
    assert sum(len(GENERATED.sub("", text).encode()) for text in texts) <= WRITTEN_BYTES


def test_pages_are_easy_to_read() -> None:
    """Cells and sentences are short, a page fills at most 12 screens, and its words are the field's."""
    for page in STRICT:
        long = [cell for cell in cells(page) if len(cell) > CELL]
        long += [sentence for sentence in split_sentences(page) if len(sentence.split()) > WORDS]
        text = prose(page)
        banned = [(found[0], instead) for word, instead in BANNED.items() if (found := re.search(word, text))]
        assert (name_of(page), long, banned, screens(page) <= 12) == (name_of(page), [], [], True)


def test_long_and_banned_language_is_noticed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# T\n\n" + "word " * 41 + ".\n\n| a | " + "b" * 161 + " |\n| --- | --- |\n\nIn a visit tau counts.\n"
    )
    assert [len(each.split()) for each in split_sentences(page)] == [2, 42, 5]
    assert max(map(len, cells(page))) == 161
    assert sum(bool(re.search(word, prose(page))) for word in BANNED) == 2
