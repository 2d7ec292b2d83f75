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

from halfmoon.cli.main import main
from halfmoon.core.errors import UserError
from halfmoon.data import dicom

pydicom = pytest.importorskip("pydicom")


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
    folder: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, recwarn: pytest.WarningsRecorder
) -> None:
    caplog.set_level(logging.DEBUG)
    logging.getLogger("matplotlib").setLevel(logging.WARNING)
    warnings.simplefilter("always")
    data = str(folder / "in")
    site = str(folder / "site")
    (folder / "site").mkdir()
    for path in sorted((folder / "in").rglob("*.dcm")):
        (folder / "site" / f"{path.parent.name}-{path.name}").write_bytes(path.read_bytes())
    labels = [f"{path.name},{path.name[0]}" for path in sorted((folder / "site").iterdir())[:12]]
    (folder / "site" / "labels.csv").write_text("\n".join(["path,label", *labels]))
    options = ["--method", "fedavg", "--clients", "2", "--labels", "12", "--setting", "iid-iid", "--resize", "8"]
    commands = [
        ["run", "--data", data, "--plan", "--network", "small"],
        ["data", data, "--clients", "2", "--labels", "12", "--setting", "iid-iid"],
        ["run", "--data", data, *options, "--rounds", "1", "--network", "small", "--run-dir", str(folder / "out")],
        ["site", "check", site, "--test", str(folder / "test")],
        ["site", "prepare", site, "--size", "8x8"],
        ["predict", str(folder / "out"), data, "--out", str(folder / "predictions.csv")],
        ["evaluate", str(folder / "out"), str(folder / "test"), "--out", str(folder / "scores")],
    ]
    for command in commands:
        assert main(command) in (0, 1), (command, capfd.readouterr().err)
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
                paths = ["", "start", "poll", "captions", "queue", "predictions", "scores", "predictions.csv"]
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
                assert ok >= 98  # both sizes of the readable images, and the page
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
