"""Captions of DICOM images for pages: numbers of study, series and image, but no identifier."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from halfmoon.data import dicom

MAX_NUMBER_DIGITS = 6
"""Longer series and image numbers are not shown, because some devices derive them from identifiers or dates."""


class SeriesPosition(NamedTuple):
    """Position of an image in its study and series.

    Attributes:
        study: StudyInstanceUID, which a caption must not show.
        series: SeriesInstanceUID, which a caption must not show.
        series_number: SeriesNumber, None if it is missing or too long.
        image_number: InstanceNumber, None if it is missing or too long.
    """

    study: str
    series: str
    series_number: int | None
    image_number: int | None


def caption_images(folder: Path, paths: Sequence[str]) -> dict[int, str]:
    """Write a caption such as "study 2, series 1, image 14" for each DICOM image of a folder, without patient data.

    Studies are numbered in the order of their first path, and so are series without a number in their study. UIDs,
    dates, names and descriptions are read by no caption.

    Args:
        folder: the folder.
        paths: paths of its images relative to the folder.

    Returns:
        The captions by row; images of other formats, and DICOM files that cannot be read, have none.
    """
    positions: dict[int, SeriesPosition] = {}
    for row, path in enumerate(paths):
        if (position := read_position(folder / path)) is not None:
            positions[row] = position
    study_numbers = _number_in_order(position.study for position in positions.values())
    series_numbers: dict[str, dict[str, int]] = {}
    for study in study_numbers:
        series_numbers[study] = _number_in_order(p.series for p in positions.values() if p.study == study)
    captions = {}
    for row, position in positions.items():
        series = position.series_number
        if series is None:
            series = series_numbers[position.study][position.series]
        image = "" if position.image_number is None else f", image {position.image_number}"
        captions[row] = f"study {study_numbers[position.study]}, series {series}{image}"
    return captions


def read_position(path: Path) -> SeriesPosition | None:
    """Read the position of an image from the header of a DICOM file; None for other files and unreadable ones."""
    values = dicom.read_text_values(path, ("StudyInstanceUID", "SeriesInstanceUID", "SeriesNumber", "InstanceNumber"))
    if values is None:
        return None
    study, series, series_number, image_number = values
    return SeriesPosition(study, series, _parse_number(series_number), _parse_number(image_number))


def _parse_number(text: str) -> int | None:
    """Parse a short whole number; None for any other text."""
    return int(text) if text.isdecimal() and len(text) <= MAX_NUMBER_DIGITS else None


def _number_in_order(names: Iterable[str]) -> dict[str, int]:
    """Number different names from 1, in the order of their first occurrence."""
    return {name: number for number, name in enumerate(dict.fromkeys(names), 1)}
