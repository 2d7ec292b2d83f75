"""Colors, dashes and markers of lines, which color-blind readers can distinguish. A method always has the same style."""

import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

# Okabe and Ito (2008), distinguishable under every color blindness. Their yellow is too pale for a line on white, and
# black is invisible on a dark page: violet and gray replace them.
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#6A51A3", "#737373")
_DASHES = ((0, ()), (0, (5, 1.5)), (0, (1.5, 1.2)), (0, (6, 1.5, 1.5, 1.5)), (0, (3, 1.2, 1.2, 1.2, 1.2, 1.2)))
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "*", "p", "H")

DISTINCT_STYLES = 60
"""Number of styles that differ in marker or dashes, which are distinguishable without color."""

_METHODS_IN_ORDER = (
    *("feddure", "fedavg", "fedavg-fixmatch", "fedavg-sl", "feddb", "semifl", "fedavg-soft-labels"),
    *("fedavg-control", "fedloke", "fedrgd"),
    *("fedavg-uda", "semifed", "fedprox-fixmatch", "fedprox-uda", "fedprox-sl", "fml", "heterofl"),
    *("feddure-without-creg", "feddure-without-freg", "fixmatch-feddpl", "semifl-feddpl", "fedmatch-feddpl"),
    *("fedmatch-semifl", "fedrgd-feddpl", "supervised", "partially-supervised", "fixmatch", "uda", "mixmatch"),
    *("remixmatch", "mean-teacher", "pseudo-label", "pi-model"),
    *("fedavg-fixmatch-global", "fixmatch-proxy-tuning", "sage", "proxyfl", "protofssl", "cbafed", "fl2"),
    *("fedmatch",),
)
"""Methods with fixed styles. The first ones are compared often, so they differ in color, dashes and marker."""


class LineStyle(NamedTuple):
    """Style of one line: color, dashes (offset, lengths) and marker."""

    color: str
    dashes: tuple[int, tuple[float, ...]]
    marker: str


def line_style(number: int) -> LineStyle:
    """Make the style of a number. Styles of adjacent numbers differ in everything, and 60 differ in marker or dashes."""
    return LineStyle(_COLORS[number % len(_COLORS)], _DASHES[number % len(_DASHES)], _MARKERS[number % len(_MARKERS)])


def style_numbers(names: Sequence[str]) -> list[int]:
    """Choose a different line style for each name, as its number, the same for a method in every figure.

    A name is that of a method, optionally with options, as in `feddure (threshold 0.9)`: the first row of a method has
    the style of the method. Other names get a number by their hash, which is the same in all figures. A number that is
    in use is replaced by a free one.
    """
    preferred = [_preferred_number(name) for name in names]
    numbers: list[int] = []
    for number in preferred:
        # Enough for all names, also if they are more than the styles that differ without color.
        candidates = range(DISTINCT_STYLES + len(names))
        free = (other for other in candidates if other not in numbers and other not in preferred)
        numbers.append(number if number not in numbers else next(free))
    return numbers


def line_styles(names: Sequence[str]) -> list[LineStyle]:
    """Choose the style of each name (`style_numbers`)."""
    return [line_style(slot) for slot in style_numbers(names)]


def style_to_json(style: LineStyle) -> dict[str, Any]:
    """Convert a style for JavaScript: color, dashes in pixels, marker."""
    dashes = " ".join(f"{2 * length:g}" for length in style.dashes[1])
    return {"color": style.color, "dashes": dashes, "marker": style.marker}


def _preferred_number(name: str) -> int:
    method = name.split(" (")[0]
    if method in _METHODS_IN_ORDER:
        return _METHODS_IN_ORDER.index(method)
    # Not hash(), which differs between processes.
    return len(_METHODS_IN_ORDER) + zlib.crc32(name.encode()) % (DISTINCT_STYLES - len(_METHODS_IN_ORDER))
