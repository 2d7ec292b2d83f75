"""The pages about federations are true: its rehearsal runs over real processes, its sentences are those of the code."""

import ast
import contextlib
import csv
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from scripts import load_script

from halfmoon.cli import main as cli
from halfmoon.federation.server.plan import Rules, load_plan

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("federation", "federation_machines", "federation_data", "federation_faults")
PAGE = "\n".join((ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8") for name in PAGES)
SHARED = ROOT.parent / "shared" / "data"
SENTENCES = ("federation", "cli/commands")
"""Packages whose sentences people read while a federation runs."""

RUN = "In ten minutes on one machine"
"""The chapter that is executed."""

PATIENCE = 600.0
"""Seconds for the whole federation, on a machine that does much else."""


def chapter(title: str, level: str = "##") -> str:
    """Return what stands between a heading and the next one that is not below it."""
    text = re.split(rf"^{level} {re.escape(title)}$", PAGE, flags=re.MULTILINE)[1]
    return re.split(rf"^#{{{min(2, len(level))},{len(level)}}} ", text, flags=re.MULTILINE)[0]


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)


def commands(text: str) -> dict[str, str]:
    parts = [section for block in blocks(text, "shell") for section in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]]
    return {line: printed for line, _, printed in (section.partition("\n") for section in parts)}


def form(line: str) -> str:
    """Return a line without its numbers."""
    return re.sub(r"\d[\d,.]*", "#", re.sub(r"[ -]+", " ", line)).strip()


def processes(folder: Path) -> list[str]:
    """Return the command lines of the processes that are about something in a folder, or work there."""
    found = []
    for each in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            message = (each / "cmdline").read_bytes() + b"\0" + (each / "environ").read_bytes()
            here = str(folder).encode() in message or Path(os.readlink(each / "cwd")).is_relative_to(folder)
            if here and int(each.name) != os.getpid():
                found.append((each / "cmdline").read_bytes().replace(b"\0", b" ").decode())
    return found


class Terminals:
    """Commands that run beside each other in a folder, each with its output."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {**os.environ, "COLUMNS": "100", "OMP_NUM_THREADS": "1"}
        self.started: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, line: str) -> subprocess.Popen[bytes]:
        program = [sys.executable, "-c", "from halfmoon.cli import main; raise SystemExit(main.main())"]
        program += shlex.split(line)[1:]
        with self.output(line).open("wb") as file:
            self.started[line] = subprocess.Popen(
                program, cwd=self.folder, env=self.environment, stdout=file, stderr=subprocess.STDOUT
            )
        return self.started[line]

    def output(self, line: str) -> Path:
        return self.folder / f"{re.sub('[^a-z0-9]+', '-', line)[:120]}.txt"

    def read_output(self, line: str) -> str:
        return self.output(line).read_text()

    def end(self, lines: list[str]) -> list[int]:
        for line in lines:
            self.started[line].send_signal(signal.SIGINT)
        return [self.started[line].wait(30) for line in lines]


@pytest.fixture
def terminals(tmp_path: Path) -> Iterator[Terminals]:
    made = Terminals(tmp_path)
    yield made
    for each in made.started.values():
        if each.poll() is None:
            each.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                each.wait(30)
            each.kill()


def adapted(port: int) -> tuple[list[str], str]:
    """Return the page's commands with another port, and the first lines of federation.toml with less to train on.
    Two rounds of three steps at two sites make a model as well that is the simulator's or is not."""
    text = chapter(RUN).split("### With chest X-rays")[0]
    lines = [line.replace("9092", str(port)).replace("--sites 3", "--sites 2") for line in commands(text)]
    lines = [line for line in lines if "site-02" not in line]
    assert "rounds = 10\n" in blocks(text, "text")
    return lines, "rounds = 2\nsteps = 3\n"


@pytest.mark.skipif(not (SHARED / "pneumonia_mnist").is_dir(), reason="the chest X-rays are not here")
def test_the_pages_xrays_make_folders_and_a_file_like_the_digits(tmp_path, monkeypatch, capsys):
    """With a fifth of the images: labels and test images as many as the page states, and a file that takes its lines."""
    monkeypatch.chdir(tmp_path)
    text = chapter(RUN).split("### With chest X-rays")[1]
    (line,) = commands(text)
    line = line.replace("--data-dir data", f"--data-dir {shlex.quote(str(SHARED))} --data-share 0.2")
    assert cli.main(shlex.split(line)[1:]) == 0
    capsys.readouterr()
    (top,) = blocks(text, "text")
    file = tmp_path / "rehearsal" / "federation.toml"
    file.write_text(top + file.read_text())
    plan = load_plan(file)
    assert (plan.terms.config.rounds, plan.terms.config.steps, plan.terms.config.network) == (10, 20, "small")
    assert plan.terms.sites == ("site-00", "site-01", "site-02")
    for name in plan.terms.sites:
        site = file.with_name(name)
        assert 5 * len(list(site.glob("**/*.png"))) == pytest.approx(1570, abs=5)
        assert len(list(csv.DictReader((site / "labels.csv").open()))) == 40
    assert "Each site has 1,569 or 1,570 images, 40 of them labeled" in text
    assert len(list(file.parent.glob("test/**/*.png"))) == 624


@pytest.mark.nightly  # a federation of processes is in test_dicom_federation.py, the simulator's bits in test_federation.py
@pytest.mark.skipif(sys.platform != "linux", reason="federations are made for Linux")
def test_the_pages_rehearsal_gives_the_simulators_model_over_real_processes(terminals, monkeypatch, capsys):
    """Every command of the page does what is reported there, the model is the simulator's to the bit, nothing remains.
    Commands with a separate terminal on the page run as processes; commands that end are called here.
    """
    pytest.importorskip("flwr")
    from fake_transport import free_port

    folder = terminals.folder
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", "100")

    def here(line: str) -> str:
        code = cli.main(shlex.split(line)[1:])
        output = capsys.readouterr()
        assert code == 0, output
        return output.out + output.err

    lines, top = adapted(free_port())
    joins = [line for line in lines if "site join" in line]
    (serve,) = (line for line in lines if "halfmoon serve" in line)
    first, check = lines[:2]
    predict, evaluate, simulate = lines[-3:]
    assert lines == [first, check, serve, *joins, predict, evaluate, simulate]
    here(first)
    here(check)
    file = folder / "rehearsal" / "federation.toml"
    file.write_text(top + file.read_text())
    try:
        terminals.start(serve)
        for line in joins:
            terminals.start(line)
        assert terminals.started[serve].wait(PATIENCE) == 0, terminals.read_output(serve) + terminals.read_output(
            joins[0]
        )
        for line in joins:  # each has the final model, and ends by itself
            assert terminals.started[line].wait(30) == 0, terminals.read_output(line)
            assert "finished: the model is in" in terminals.read_output(line)
    finally:
        terminals.end(joins)
    until = time.monotonic() + 10
    while (left := processes(folder)) and time.monotonic() < until:
        time.sleep(0.1)
    assert not left
    logs = [block for block in blocks(chapter(RUN), "text") if "joins" in block or "finished" in block]
    for log, line in zip(logs, (serve, joins[0]), strict=True):
        read_output = {form(each) for each in terminals.read_output(line).splitlines()}
        # Another federation may have other terms, and decodes its images in another time; sites may come at once.
        there = [each for each in log.splitlines() if not re.search(r"; classes|; missing|finished|^\.\.\.$", each)]
        assert set(map(form, there)) <= read_output
    here(predict)
    rows = list(csv.DictReader((folder / "found.csv").open()))
    images = sorted(path.relative_to(folder / "rehearsal" / "test") for path in folder.glob("rehearsal/test/**/*.png"))
    assert [row["path"] for row in rows] == [path.as_posix() for path in images]
    assert len(rows) == 360
    assert f"images: {len(rows)}\n" in here(evaluate)
    here(simulate)
    served, simulated = (load_file(folder / run / "model.safetensors") for run in ("first", "simulated"))
    assert served.keys() == simulated.keys()
    for name, leaf in served.items():
        assert leaf.dtype == simulated[name].dtype
        assert np.array_equal(leaf.view(np.uint8), simulated[name].view(np.uint8)), name


_OPTION = re.compile(r"\{(\w+)\}")


def _write_flag(match: "re.Match[str]") -> str:
    return "--" + match[1].replace("_", "-")


@cache
def templates() -> list[re.Pattern[str]]:
    """Return patterns of all sentences in the code; what is put in stands for anything."""
    found = []
    for package in SENTENCES:
        for path in (ROOT / "src" / "halfmoon" / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    parts = [node.value]
                elif isinstance(node, ast.JoinedStr):
                    parts = [each.value if isinstance(each, ast.Constant) else None for each in node.values]
                else:
                    continue
                # Messages name an option as {run_dir}; the command line writes its flag instead.
                parts = [_OPTION.sub(_write_flag, section) if isinstance(section, str) else None for section in parts]
                fixed = "".join(section for section in parts if isinstance(section, str))
                if len(re.findall("[a-z]", fixed)) >= 7:
                    message = (".*" if section is None else re.escape(str(section)) for section in parts)
                    found.append(re.compile("".join(message), re.DOTALL))
    return found


def sentences() -> list[str]:
    text = chapter("If something fails")
    rows = re.findall(r"^\| `(.*?)` \| \S", text, flags=re.MULTILINE)
    assert len(rows) > 15
    return rows


@pytest.mark.parametrize("sentence", sentences())
def test_sentences_explained_in_the_docs_exist_in_the_code(sentence: str):
    """A sentence of the code matches that of the page, with any values in its placeholders."""
    plain = sentence.removeprefix("stopped: ")
    assert any(each.fullmatch(plain) for each in templates()), sentence


def test_sentence_missing_from_the_code_is_detected():
    assert any(each.fullmatch("site-02 is no longer connected") for each in templates())
    assert not any(each.fullmatch("site-02 is not connected any more") for each in templates())


def test_the_pages_file_is_a_federation(tmp_path: Path):
    (message,) = blocks(chapter("On three machines"), "toml")
    (tmp_path / "wards.toml").write_text(message)
    plan = load_plan(tmp_path / "wards.toml")
    assert plan.terms.sites == ("north", "south", "harbour")
    assert plan.terms.config.network == "resnet9"
    assert plan.test == tmp_path / "test"
    assert plan.rules == Rules()


def test_every_field_that_leaves_a_site_is_documented():
    text = chapter("What leaves a site", "#")
    table, below = text.split("<!-- /generated -->", 1)
    columns = [line.split(" | ") for line in (*table.splitlines(), "end", *below.splitlines())]
    end = columns.index(["end"])
    sent = {name for row in columns[:end] if row[0].startswith("| `") for name in re.findall("`(.*?)`", row[1])}
    messages = {name for row in columns[end:] if row[0].startswith("| `") for name in re.findall("`(.*?)`", row[0])}
    assert len(sent) > 8
    assert sent <= messages


@pytest.mark.parametrize("command", ["serve", "site join"])
def test_every_flag_of_a_command_is_on_the_page_of_commands(command: str):
    page = (ROOT / "docs" / "cli_federation.md").read_text(encoding="utf-8")
    section = page.split(f"## halfmoon {command}\n")[1].split("\n## ")[0] + page.split("\n## ")[0]
    flags = load_script("docs/generate.py").flags(command)
    assert len(flags) > 8
    assert not [flag for flag in flags if not re.search(rf"`{flag}\b", section)]


def test_the_pages_app_folder_is_the_one_that_serve_makes(tmp_path: Path):
    """Word for word: sites know it by what it says."""
    from halfmoon.federation.protocol.bundle import render_project

    made = render_project()
    (shown,) = blocks(chapter("Without `halfmoon serve`", "###"), "text")
    assert shown == made
