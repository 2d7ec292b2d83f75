"""Write DICOM files whose header has marked values, to search for in output, logs and written files."""

import warnings
from pathlib import Path

import numpy as np

MARK = "SECRETMARK"

TEXT_TAGS = (
    *("PatientName", "PatientID", "OtherPatientIDs", "PatientAddress", "PatientComments", "AccessionNumber", "StudyID"),
    *("ReferringPhysicianName", "InstitutionName", "StudyDescription", "SeriesDescription", "DeviceSerialNumber"),
)
INVALID_TAGS = ("StudyInstanceUID", "SeriesInstanceUID", "PatientBirthDate", "StudyDate", "StudyTime", "PatientAge")
"""Tags whose marked value does not fit their type, about which pydicom warns with the value."""


def write_marked_dicom(path: Path, number: int, **attributes: object) -> None:
    """Write a DICOM file whose identifying header values are `MARK` and a number; `attributes` override the header."""
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
        data.Modality = "DX"
        data.Rows = 12
        data.Columns = 16
        data.SamplesPerPixel = 1
        data.PhotometricInterpretation = "MONOCHROME2"
        data.BitsAllocated = 16
        data.BitsStored = 16
        data.HighBit = 15
        data.PixelRepresentation = 0
        data.PixelData = np.random.default_rng(number).integers(0, 900, (12, 16)).astype(np.uint16).tobytes()
        for name, value in attributes.items():
            setattr(data, name, value)
        data.save_as(path, enforce_file_format=True)
