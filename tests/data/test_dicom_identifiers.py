"""No value of a DICOM header that identifies a patient or study reaches output, logs or written files."""

import logging
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
import warnings
from pathlib import Path

import pytest
from support.dicom_files import MARK, write_marked_dicom
from test_options import COMMANDS

from halfmoon.cli.main import main
from halfmoon.core.errors import UserError
from halfmoon.data import dicom

pydicom = pytest.importorskip("pydicom")


RUN = "--clients 2 --cohort 2 --labels 12 --setting iid-iid --resize 8 --steps 1 --rounds 1 --network small"

RECIPE = """
title = "Two"
paper = "none"
item = "Table 1"
about = "one method"
rows = "method"
[protocol]
data = 'DATA'
rounds = 1
clients = 2
cohort = 2
labels = 12
setting = "iid-iid"
resize = 8
steps = 1
network = "small"
[axes.method]
a = { title = "a", set = { method = "fedavg" } }
"""

COMMANDS_ON_IMAGES = {
    "run --data --plan": "run --data DATA --plan --network small",
    "run": f"run --method fedavg --data DATA {RUN} --run-dir out",
    "run --sites": "run --sites site test --resize 8 --network small --rounds 1 --steps 1 --run-dir rehearsal",
    "resume": "resume out",
    "compare": f"compare --methods fedavg fedavg-sl --data DATA {RUN} --run-dir compared",
    "tune": f"tune --method fedavg --data DATA {RUN} --validation-share 0.3 --knob lr=0.1,0.2 --trials 2 --run-dir tuned",
    "sweep": "sweep recipe.toml --out swept",
    "recipes": "recipes recipe.toml --time",
    "data": "data DATA --clients 2 --labels 12 --setting iid-iid --save split.parquet",
    "site check": "site check site --test test",
    "site prepare": "site prepare site --size 8x8",
    "site export": "site export DATA --sites 2 --labels 12 --setting iid-iid --resize 8 --out exported",
    "predict": "predict out DATA --out predictions.csv",
    "evaluate": "evaluate out test --out scores",
    "calibrate": "calibrate out test",
    "export": "export out --torch model.pt2",
    "report": "report out --out page.html",
}
"""A call of each command that reads images, or files that other commands wrote about them."""

TESTED_ELSEWHERE = {
    "site label": "test_pages_show_and_write_no_identifiers",
    "review": "test_pages_show_and_write_no_identifiers",
    "watch": "test_pages_show_and_write_no_identifiers",
    "site join": "tests/federation/test_dicom_federation.py",
    "serve": "tests/federation/test_dicom_federation.py",
}

WITHOUT_IMAGES = {
    *("methods", "privacy", "site terms", "check-method"),
    *("federation init", "federation add-site", "federation remove-site", "federation rotate", "federation show"),
}
"""Commands that read neither images nor files about them."""


def test_each_command_is_tested() -> None:
    tested = {name.partition(" --")[0] for name in COMMANDS_ON_IMAGES}
    assert tested | TESTED_ELSEWHERE.keys() | WITHOUT_IMAGES == COMMANDS.keys()
    assert all(name == "run" or text.startswith(name.partition(" --")[0]) for name, text in COMMANDS_ON_IMAGES.items())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two classes of DICOM files, one of which has no pixels of the size that it states."""
    for number in range(48):
        write_marked_dicom(tmp_path / "in" / "ab"[number % 2] / f"{number}.dcm", number)
    write_marked_dicom(tmp_path / "in" / "a" / "short.dcm", 99, PixelData=b"\0" * 10)
    for number in range(4):
        write_marked_dicom(tmp_path / "test" / "ab"[number % 2] / f"{number}.dcm", 200 + number)
    return tmp_path


def test_the_files_make_pydicom_warn(folder: Path) -> None:
    """Otherwise the test below could not fail."""
    with pytest.warns(UserWarning, match=MARK):
        _ = pydicom.dcmread(folder / "in" / "a" / "0.dcm").StudyInstanceUID


def test_no_command_shows_or_writes_identifiers(
    folder: Path,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    recwarn: pytest.WarningsRecorder,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caplog.set_level(logging.DEBUG)
    logging.getLogger("matplotlib").setLevel(logging.WARNING)
    warnings.simplefilter("always")
    data = str(folder / "in")
    (folder / "site").mkdir()
    for path in sorted((folder / "in").rglob("*.dcm")):
        (folder / "site" / f"{path.parent.name}-{path.name}").write_bytes(path.read_bytes())
    names = [f"{letter}-{number}.dcm" for number in range(12) for letter in "ab" if number % 2 == "ab".index(letter)]
    labels = [f"{name},{name[0]}" for name in names]
    (folder / "site" / "labels.csv").write_text("\n".join(["path,label", *labels]))
    (folder / "recipe.toml").write_text(RECIPE.replace("DATA", data))
    monkeypatch.chdir(folder)
    for command in COMMANDS_ON_IMAGES.values():
        words = [word.replace("DATA", data) for word in command.split()]
        assert main(words) in (0, 1), (words, capfd.readouterr().err)
    shown = capfd.readouterr()
    assert "short.dcm" in shown.out + shown.err
    assert MARK not in shown.out + shown.err
    assert MARK not in caplog.text
    assert not [warning for warning in recwarn if MARK in str(warning.message)]
    inputs = {folder / "in", folder / "test"}
    written = [path for path in folder.rglob("*") if path.is_file() and path.suffix != ".dcm"]
    assert len([path for path in written if not inputs & set(path.parents)]) > 10
    for path in written:
        assert MARK.encode() not in path.read_bytes(), path


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("RescaleSlope", f"{MARK}1"),
        ("WindowCenter", f"{MARK}2"),
        ("NumberOfFrames", f"{MARK}3"),
        ("PhotometricInterpretation", MARK),
        ("Rows", None),
    ],
)
def test_errors_do_not_quote_the_header(
    folder: Path, name: str, value: object, capfd: pytest.CaptureFixture[str]
) -> None:
    path = folder / "in" / "a" / "0.dcm"
    data = pydicom.dcmread(path)
    if name in ("RescaleSlope", "WindowCenter", "NumberOfFrames"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            data.add_new(pydicom.datadict.tag_for_keyword(name), "LO", str(value))
    elif value is None:
        del data[name]
    else:
        setattr(data, name, value)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        data.save_as(path)
    errors: list[UserError] = []
    for read in (_read, lambda path: dicom.read_header(path, "x.dcm")):
        try:
            read(path)
        except UserError as error:
            errors.append(error)
    dicom.find_patients([path])
    assert MARK not in "".join(map(str, errors))
    assert all(error.__suppress_context__ and error.__cause__ is None for error in errors if error.__context__)
    shown = capfd.readouterr()
    assert MARK not in shown.out + shown.err


def _read(path: Path) -> None:
    with path.open("rb") as file:
        dicom.read(file, "x.dcm")


def test_pages_show_and_write_no_identifiers(folder: Path) -> None:
    """The label page with a model, and the review page: every response, their output, and what they write."""
    site = folder / "in"
    run = folder / "run"
    options = ["--method", "fedavg", "--clients", "2", "--labels", "12", "--setting", "iid-iid", "--resize", "8"]
    assert (
        main(["run", "--data", str(site), *options, "--rounds", "1", "--network", "small", "--run-dir", str(run)]) == 0
    )
    responses = []
    for command in (
        ["site", "label", str(site), "--model", str(run), "--classes", "a", "b", "--no-browser"],
        ["review", str(run), str(site), "--no-browser"],
        ["watch", str(run), "--no-browser"],
    ):
        code = "import warnings; warnings.simplefilter('always'); from halfmoon.cli.main import main; main()"
        with subprocess.Popen(
            [sys.executable, "-c", code, *command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as page:
            try:
                assert page.stdout is not None
                found = None
                lines = []
                while found is None and (line := page.stdout.readline()):
                    lines.append(line)
                    found = re.search(r"http://127\.0\.0\.1:\d+/[\w-]{20,}/", line)
                assert found, lines
                paths = ["", "start", "poll", "captions", "queue", "predictions", "scores", "predictions.csv", "data"]
                paths += [f"{name}/{row}" for name in ("image", "guess", "similar") for row in range(49)]
                ok = 0
                for path in paths:
                    for query in ("", "?small=1") if path.startswith("image") else ("",):
                        try:
                            with urllib.request.urlopen(f"{found[0]}{path}{query}", timeout=20) as response:
                                responses.append(response.read() + str(response.headers).encode())
                            ok += 1
                        except urllib.error.HTTPError as error:
                            responses.append(error.read())
                is_watch = command[0] == "watch"
                assert ok >= (2 if is_watch else 98)  # both sizes of the readable images, and the page
            finally:
                page.send_signal(signal.SIGINT)
                output, _ = page.communicate(timeout=30)
        responses.append("".join([*lines, output]).encode())
    assert any(b"study 1" in response for response in responses)  # captions are there, without identifiers
    assert any(b"short.dcm" in response for response in responses)  # and so is the unreadable file
    assert not [response for response in responses if MARK.encode() in response]
    for path in folder.rglob("*"):
        if path.is_file() and path.suffix != ".dcm":
            assert MARK.encode() not in path.read_bytes(), path
