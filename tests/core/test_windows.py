"""What can be tested of Windows on another system: paths, names, and a run without what only Unix has."""

import subprocess
import sys
import tomllib
from pathlib import Path, PureWindowsPath

import pytest
from test_every_option import write_images

from halfmoon.cli import main as cli
from halfmoon.config import schema
from halfmoon.core import toml
from halfmoon.core.plugins import folder_name
from halfmoon.data.readers import label_table
from halfmoon.runs.jobs import parse_config
from halfmoon.sites.folders import read_site

PATHS = [r"C:\images\new", r"\\server\share\x", r"D:\Users\name.test\u0041", "C:/mixed\\path", r"relative\folder"]

PROGRAM = """
import os, sys, types
import torch, numpy, PIL.Image, matplotlib, pandas, pyarrow, scipy, rich.console, safetensors.torch, pydantic, jinja2
import torch.func, torch.utils.data, torch._dynamo, pyarrow.parquet, matplotlib.pyplot, scipy.optimize, tempfile, subprocess

for name in ("fcntl", "resource", "pwd", "grp", "termios"):
    sys.modules[name] = None
sys.modules["msvcrt"] = types.SimpleNamespace(locking=lambda handle, mode, size: None, LK_NBLCK=2)
for name in ("sysconf", "O_CLOEXEC", "O_DIRECTORY", "O_NOFOLLOW", "getuid", "geteuid", "getgid", "fork", "killpg",
             "getpgid", "setsid", "sched_getaffinity", "sched_setaffinity", "pread", "pwrite", "fchmod"):
    if hasattr(os, name):
        delattr(os, name)
sys.platform = "win32"

from halfmoon.cli.main import main

codes = [main(line.split()) for line in sys.argv[1].splitlines()]
print(codes)
"""
"""Runs commands in a process that lacks the modules and functions that Windows lacks."""


@pytest.mark.parametrize("path", PATHS)
def test_a_path_of_windows_survives_toml(path: str, tmp_path: Path) -> None:
    """As it is written into config.toml, and as people write it: in single quotes."""
    pure = PureWindowsPath(path)
    for text in (toml.format_value(path), toml.format_value(str(pure)), f"'{path}'"):
        assert PureWindowsPath(tomllib.loads(f"data = {text}")["data"]) == pure
    (tmp_path / "config.toml").write_text(f"data = '{path}'\n")
    assert schema.load_file(tmp_path / "config.toml")["data"] in (path, str(tmp_path / path))
    config = schema.Config(data=path, threads=1)
    assert parse_config(schema.to_toml(config), tmp_path).data == path


def test_a_path_in_double_quotes_gets_a_hint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "config.toml"
    file.write_text('data = "C:\\images"\n')
    assert cli.main(["run", "--config", str(file)]) == 2
    error = capsys.readouterr().err
    assert "In TOML a path with backslashes is in single quotes, such as 'C:\\images'." in error
    assert error.count("\n") == 1


def test_a_byte_order_mark_is_read(tmp_path: Path) -> None:
    """As Notepad and PowerShell write it, with their ends of lines."""
    (tmp_path / "config.toml").write_bytes(b"\xef\xbb\xbfrounds = 3\r\nclients = 4\r\n")
    assert schema.load_file(tmp_path / "config.toml") == {"rounds": 3, "clients": 4}


@pytest.mark.parametrize("path", PATHS[:2])
def test_a_path_of_windows_elsewhere_is_a_sentence(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["data", path], ["run", "--data", path], ["site", "export", path, "--sites", "2", "--out", "out"]):
        assert cli.main(words) == 2
        assert capsys.readouterr().err == (
            f"halfmoon: {path} is a path of Windows, but this is another system: give its path here (in WSL, the drive "
            "C: is /mnt/c).\n"
        )


@pytest.mark.parametrize("command", ["predict", "evaluate", "resume", "report", "watch", "site check", "site label"])
def test_other_commands_name_the_path(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*command.split(), r"C:\runs\one", *([r"C:\images"] if command in ("predict", "evaluate") else [])]
    assert cli.main(words) == 2
    error = capsys.readouterr().err
    assert r"C:\runs\one" in error
    assert error.count("\n") == 1


def test_labels_with_backslashes_are_found(tmp_path: Path) -> None:
    """In labels.csv of a site, and as every reader of tables normalizes paths; CRLF, a byte order mark, semicolons."""
    folder = write_images(tmp_path / "site", {"a.png": None, "b.png": None})
    (folder / "sub").mkdir()
    (folder / "b.png").rename(folder / "sub" / "b.png")
    (folder / "labels.csv").write_bytes(b"\xef\xbb\xbfpath;label\r\n.\\a.png;cat\r\nsub\\b.png;dog\r\n")
    site = read_site(folder)
    assert [site.classes[label] for label in site.labels] == ["cat", "dog"]
    assert label_table.normalize_path(r"sub\..\sub\b.png") == "sub/b.png"


def test_a_drive_in_labels_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_images(tmp_path / "site", {"a.png": "cat", "b.png": "dog"})
    (folder / "labels.csv").write_text("path,label\nC:\\data\\a.png,cat\nb.png,dog\n")
    assert cli.main(["site", "check", str(folder)]) == 1
    assert "C:/data/a.png" in capsys.readouterr().out.replace("\\", "/")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("my_module:Mine", "my_module.Mine"), ("digits-feddure-seed0", "digits-feddure-seed0"), ("NUL", "_NUL"),
        ("con.images-seed0", "_con.images-seed0"), ("LPT1", "_LPT1"), ("console", "console"), ("a.", "a._"),
        ('a<b>c"d|e?f*g\\h/i', "a-b-c-d-e-f-g-h-i"), ("tab\there ", "tab-here _"),
    ],
)  # fmt: skip
def test_names_of_folders_are_allowed_on_windows(name: str, expected: str) -> None:
    assert folder_name(name) == expected
    assert not PureWindowsPath(expected).drive
    assert len(PureWindowsPath(expected).parts) == 1


FEDERATION_COMMANDS = [
    "serve f.toml", "site join --server 127.0.0.1:9092 --site s --name a", "federation init keys",
    "federation add-site keys a", "federation remove-site keys a", "federation rotate keys --ca", "federation show keys",
]  # fmt: skip


@pytest.mark.parametrize("words", FEDERATION_COMMANDS)
def test_a_federation_on_windows_is_refused(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "platform", "win32")
    assert cli.main(words.split()) == 2
    assert capsys.readouterr().err == (
        "halfmoon: a federation does not run on Windows: use Linux, macOS, or WSL (the Linux inside Windows).\n"
    )
    assert list(tmp_path.iterdir()) == []


def test_commands_run_without_what_only_unix_has(tmp_path: Path) -> None:
    """Training, resuming, prediction, evaluation, a site's folder, and a page of results."""
    write_images(tmp_path / "site", {f"{number}.png": ("dark", "bright")[number % 2] for number in range(8)})
    run = "run --method fedavg --clients 2 --cohort 1 --rounds 1 --steps 1 --width 2 --threads 1 --data-share 0.2"
    lines = [
        f"{run} --run-dir run", "resume run", "predict run site --out p.csv", "site check site", "site prepare site --size 8x8",
        "report run", "data digits --clients 2", "methods fedavg", "run --width 9999 --explain", "serve f.toml",
    ]  # fmt: skip
    command = [sys.executable, "-c", PROGRAM, "\n".join(lines)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.endswith("[0, 0, 0, 0, 0, 0, 0, 0, 0, 2]\n"), done.stderr[-2000:]
    assert "a federation does not run on Windows" in done.stderr
