"""Names of classes: one spelling for each, their order, and names that are suspiciously alike."""

import re
import unicodedata
from collections.abc import Collection, Iterable, Sequence
from decimal import Decimal

from halfmoon.core.errors import UserError

MISSING_LABELS = frozenset({"nan", "na", "n/a", "#n/a", "<na>", "null"})
"""Labels, in lower case, that spreadsheets and pandas write for a missing value."""

_INVISIBLE = re.compile(
    "[\x00-\x08\x0e-\x1b\x7f-\x84\x86-\x9f\xad\u200b\u200e\u200f\u202a-\u202e\u2060\u2066-\u2069\ufeff]"
)
"""Control characters, and characters that change only the direction of text or its line breaks."""

_NUMBER = re.compile(r"[+-]?\d+(\.\d*)?", re.ASCII)


def normalize_class_name(name: str) -> str:
    """Compose accents (NFC), remove invisible characters, strip blanks at both ends, and join repeated blanks to one."""
    return " ".join(unicodedata.normalize("NFC", _INVISIBLE.sub("", name)).split())


def is_missing_label(label: str) -> bool:
    """Check whether a label means that there is none: empty, or one of `MISSING_LABELS`."""
    return not label or label.lower() in MISSING_LABELS


def sort_class_names(names: Iterable[str]) -> list[str]:
    """Sort class names: as numbers if all of them are numbers, otherwise as texts."""
    unsorted = list(names)
    if all(_NUMBER.fullmatch(name) for name in unsorted):
        return sorted(unsorted, key=lambda name: (Decimal(name), name))
    return sorted(unsorted)


def find_near_equal(names: Sequence[str]) -> list[tuple[str, ...]]:
    """Find names that differ only in case, blanks, dashes, underscores, Unicode forms or in how a number is written.

    Returns:
        The names of each such group, in the order of `names`: ("Cat", "cat"), ("1", "1.0", "01").
    """
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(_simplify(name), []).append(name)
    return [tuple(group) for group in groups.values() if len(group) > 1]


def describe_near_equal(names: Sequence[str]) -> list[str]:
    """Describe in a sentence for the user each group of names that are nearly equal (see `find_near_equal`)."""
    return [
        f"the class names {' and '.join(map(repr, group))} are nearly the same: check that both are meant"
        for group in find_near_equal(names)
    ]


def refuse_near_equal(names: Sequence[str], location: object, confirmed: Collection[str] = (), hint: str = "") -> None:
    """Raise UserError for names that are nearly equal (see `find_near_equal`), unless the user has confirmed them.

    Args:
        names: the class names.
        location: the file or folder that they are from.
        confirmed: names that the user has listed as different classes.
        hint: how to confirm that names are different classes, after "if both are meant, "; "" if that is impossible.
    """
    for group in find_near_equal(names):
        if not set(group) <= set(confirmed):
            remedy = f"; if both are meant, {hint}" if hint else ""
            raise UserError(
                f"{location}: the class names {' and '.join(map(repr, group))} differ only in case, blanks, dashes, "
                f"underscores, Unicode forms or the form of a number: use one of them{remedy}."
            )


def match_class_name(name: str, classes: Iterable[str]) -> str | None:
    """Find the class whose name is nearly equal to `name` (see `find_near_equal`); None if there is none."""
    return next((other for other in classes if _simplify(other) == _simplify(name)), None)


def _simplify(name: str) -> str:
    """Reduce a class name so that names become equal that probably mean one class: "Cat", "cat "; "class_01", "class1".

    Returns:
        For a number its shortest form, "1" for "01" and "1.0"; for other names the lower-case letters without blanks,
        dashes, underscores and leading zeros.
    """
    text = normalize_class_name(name)
    if _NUMBER.fullmatch(text):
        return str(Decimal(text).normalize())  # without trailing zeros
    # NFKC also unites forms of one character, such as full-width letters. Between digits a separator remains: 1-11, 11-1.
    text = unicodedata.normalize("NFKC", text)
    compact = re.sub(r"(?<=\d)[\s_-]+(?=\d)", "-", text)
    compact = re.sub(r"(?<!\d)[\s_-]+|[\s_-]+(?!\d)", "", compact)
    # "class01" and "class1", but not the decimals of "v1.10" and "v1.1".
    compact = re.sub(r"(?<![\d.])0+(?=\d)", "", compact)
    # Names that consist of signs only, such as "+" and "-", remain different.
    return compact.casefold() or text
