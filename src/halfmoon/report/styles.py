"""Colors, dashes and markers that anybody can tell apart, for pictures and pages; a method keeps its own."""

import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

# Okabe and Ito (2008), told apart under every color blindness; without their yellow, too pale for a line on white, and
# with a violet and a gray in place of black, which can be seen on a dark page as well.
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#6A51A3", "#737373")
_DASHES = ((0, ()), (0, (5, 1.5)), (0, (1.5, 1.2)), (0, (6, 1.5, 1.5, 1.5)), (0, (3, 1.2, 1.2, 1.2, 1.2, 1.2)))
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "*", "p", "H")

DISTINCT_STYLES = 60
"""Styles that differ in marker or dashes, whatever their color: color-blind people can tell so many apart."""

_METHODS_IN_ORDER = (
    *("feddure", "fedavg", "fedavg-fixmatch", "fedavg-sl", "feddb", "semifl", "fedmatch"),
    *("fedavg-control", "fedloke", "fedrgd"),
    *("fedavg-uda", "semifed", "fedprox-fixmatch", "fedprox-uda", "fedprox-sl", "fml", "heterofl"),
    *("feddure-without-creg", "feddure-without-freg", "fixmatch-feddpl", "semifl-feddpl", "fedmatch-feddpl"),
    *("fedmatch-semifl", "fedrgd-feddpl", "supervised", "partially-supervised", "fixmatch", "uda", "mixmatch"),
    *("remixmatch", "mean-teacher", "pseudo-label", "pi-model"),
    *("fedavg-fixmatch-global", "fixmatch-proxy-tuning", "sage", "proxyfl", "protofssl", "cbafed", "fl2"),
    *("fedavg-soft-labels",),
)
"""The methods whose styles are fixed, those that are compared most first: they differ in everything."""


class LineStyle(NamedTuple):
    """The style of one line: color, dashes (offset, lengths) and marker each tell it from its neighbors."""

    color: str
    dashes: tuple[int, tuple[float, ...]]
    marker: str


def line_style(number: int) -> LineStyle:
    """Return the style of the line `number`; neighbors differ in all three, and 60 in marker or dashes alone."""
    return LineStyle(_COLORS[number % len(_COLORS)], _DASHES[number % len(_DASHES)], _MARKERS[number % len(_MARKERS)])


def style_numbers(names: Sequence[str]) -> list[int]:
    """Return the number of a style for each name, all different; a method keeps its own in every picture.

    A name is that of a method, or one with words behind it, as in `feddure (threshold 0.9)`: the first of a method has
    its style. Names that are no method's have one by their letters. A second claim goes to the next free number.
    """
    homes = [_preferred_number(name) for name in names]
    numbers: list[int] = []
    for home in homes:
        free = (n for n in range(DISTINCT_STYLES + len(names)) if n not in numbers and n not in homes)
        numbers.append(home if home not in numbers else next(free))
    return numbers


def line_styles(names: Sequence[str]) -> list[LineStyle]:
    return [line_style(slot) for slot in style_numbers(names)]


def style_to_json(style: LineStyle) -> dict[str, Any]:
    """Return a style for a script: color, dashes in pixels, marker."""
    dashes = " ".join(f"{2 * length:g}" for length in style.dashes[1])
    return {"color": style.color, "dashes": dashes, "marker": style.marker}


def _preferred_number(name: str) -> int:
    method = name.split(" (")[0]
    if method in _METHODS_IN_ORDER:
        return _METHODS_IN_ORDER.index(method)
    # Not hash(), which is another one in each process.
    return len(_METHODS_IN_ORDER) + zlib.crc32(name.encode()) % (DISTINCT_STYLES - len(_METHODS_IN_ORDER))
