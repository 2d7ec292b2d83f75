"""No value of a DICOM header that identifies a patient or study reaches output, logs or written files."""

import logging
import warnings
from pathlib import Path

import numpy as np
import pytest

from halfmoon.cli.main import main
from halfmoon.core.errors import UserError
from halfmoon.data import dicom

pydicom = pytest.importorskip("pydicom")

MARK = "SECRETMARK"

TEXT_TAGS = (
    *("PatientName", "PatientID", "OtherPatientIDs", "PatientAddress", "PatientComments", "AccessionNumber", "StudyID"),
    *("ReferringPhysicianName", "InstitutionName", "StudyDescription", "SeriesDescription", "DeviceSerialNumber"),
)
INVALID_TAGS = ("StudyInstanceUID", "SeriesInstanceUID", "PatientBirthDate", "StudyDate", "StudyTime", "PatientAge")
"""Tags whose marked value does not fit their type, about which pydicom warns with the value."""


def write_file(path: Path, number: int, **attributes: object) -> None:
    from pydicom.dataset import Dataset, FileMetaDataset
    from pydicom.uid import ExplicitVRLittleEndian, generate_uid

    path.parent.mkdir(parents=True, exist_ok=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        data = Dataset()
        data.file_meta = FileMetaDataset()
        data.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
        data.SOPClassUID = data.file_meta.MediaStorageSOPClassUID = "1.2.840.10008.5.1.4.1.1.1"
        data.SOPInstanceUID = data.file_meta.MediaStorageSOPInstanceUID = generate_uid()
        for name in TEXT_TAGS + INVALID_TAGS:
            setattr(data, name, f"{MARK}{number}")
        data.Modality, data.Rows, data.Columns, data.SamplesPerPixel = "DX", 12, 16, 1
        data.PhotometricInterpretation = "MONOCHROME2"
        data.BitsAllocated, data.BitsStored, data.HighBit, data.PixelRepresentation = 16, 16, 15, 0
        data.PixelData = np.random.default_rng(number).integers(0, 900, (12, 16)).astype(np.uint16).tobytes()
        for name, value in attributes.items():
            setattr(data, name, value)
        data.save_as(path, enforce_file_format=True)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two classes of DICOM files, one of which has no pixels of the size that it states."""
    for number in range(48):
        write_file(tmp_path / "in" / "ab"[number % 2] / f"{number}.dcm", number)
    write_file(tmp_path / "in" / "a" / "short.dcm", 99, PixelData=b"\0" * 10)
    for number in range(4):
        write_file(tmp_path / "test" / "ab"[number % 2] / f"{number}.dcm", 200 + number)
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
