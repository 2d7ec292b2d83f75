"""Names of classes: one spelling for each, their order, and names that are suspiciously alike."""

import re
import unicodedata
from collections.abc import Iterable, Sequence
from decimal import Decimal

MISSING_LABELS = frozenset({"nan", "na", "n/a", "<na>", "null"})
"""Labels, in lower case, that spreadsheets and pandas write for a missing value."""

_NUMBER = re.compile(r"[+-]?\d+(\.\d*)?", re.ASCII)


def normalize_class_name(name: str) -> str:
    """Compose accents (NFC), strip blanks at both ends, and join repeated blanks to one."""
    return " ".join(unicodedata.normalize("NFC", name).split())


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
    """Find names that differ only in case, blanks, dashes or underscores, or in how a number is written.

    Returns:
        The names of each such group, in the order of `names`: ("Cat", "cat"), ("1", "1.0", "01").
    """
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(_simplify(name), []).append(name)
    return [tuple(group) for group in groups.values() if len(group) > 1]


def match_class_name(name: str, classes: Iterable[str]) -> str | None:
    """Find the class whose name is nearly equal to `name` (see `find_near_equal`); None if there is none."""
    return next((other for other in classes if _simplify(other) == _simplify(name)), None)


def _simplify(name: str) -> str:
    text = normalize_class_name(name)
    if _NUMBER.fullmatch(text):
        return str(Decimal(text).normalize())
    # Names that consist of signs only, such as "+" and "-", remain different.
    return re.sub(r"[\s_-]+", "", text).casefold() or text
