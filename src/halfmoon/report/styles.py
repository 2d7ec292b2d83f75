"""Colors, dashes and marks that anybody can tell apart, for pictures and pages alike; a method keeps its own."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

# Okabe and Ito (2008), told apart under every color blindness; without their yellow, too pale for a line on white, and
# with a violet and a gray in place of black, which can be seen on a dark page as well.
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#6A51A3", "#737373")
_DASHES = (
    (0, ()),
    (0, (5, 1.5)),
    (0, (1.5, 1.2)),
    (0, (6, 1.5, 1.5, 1.5)),
    (0, (3, 1.2, 1.2, 1.2, 1.2, 1.2)),
)
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "*", "p", "H")

SLOTS = 60
"""Looks that differ in marker or dashes, whatever their color: people who see none can tell so many apart."""

_HOMES = (
    *("feddure", "fedavg", "fedavg-fixmatch", "fedavg-sl", "feddb", "semifl", "fedmatch", "fedloke", "fedrgd"),
    *("fedavg-uda", "semifed", "fedprox-fixmatch", "fedprox-uda", "fedprox-sl", "fml", "heterofl"),
    *("feddure-without-creg", "feddure-without-freg", "fixmatch-feddpl", "semifl-feddpl", "fedmatch-feddpl"),
    *("fedmatch-semifl", "fedrgd-feddpl", "supervised", "partially-supervised", "fixmatch", "uda", "mixmatch"),
    *("remixmatch", "mean-teacher", "pseudo-label", "pi-model"),
    *("fedavg-fixmatch-global", "fixmatch-proxy-tuning", "sage", "proxyfl", "protofssl", "cbafed", "fl2"),
    *("fedavg-soft-labels",),
)
"""The methods whose looks are fixed, those that are compared most first: they differ in everything."""


class Look(NamedTuple):
    """How one line is drawn: color, dashes (offset, lengths) and marker each tell it from its neighbors."""

    color: str
    dashes: tuple[int, tuple[float, ...]]
    marker: str


def look(number: int) -> Look:
    """Return the look of the line `number`; neighbors differ in all three, and 60 in marker or dashes alone."""
    return Look(_COLORS[number % len(_COLORS)], _DASHES[number % len(_DASHES)], _MARKERS[number % len(_MARKERS)])


def slots(names: Sequence[str]) -> list[int]:
    """Return a number of a look for each name, all different; a method keeps its own in every picture.

    A name is that of a method, or one with words behind it, as in `feddure (tau 0.9)`: the first of a method has its
    look. Names that are no method's have one by their letters. What is taken goes to the next that nobody claims.
    """
    wanted = [_home(name) for name in names]
    claimed = set(wanted)
    taken: set[int] = set()
    found = []
    for want in wanted:
        free = (n for n in range(SLOTS + len(names)) if n not in taken and n not in claimed)
        slot = want if want not in taken else next(free)
        taken.add(slot)
        found.append(slot)
    return found


def looks(names: Sequence[str]) -> list[Look]:
    """Return a look for each name, as `slots` numbers them."""
    return [look(slot) for slot in slots(names)]


def drawn(made: Look) -> dict[str, Any]:
    """Return a look as a script draws it: color, dashes in pixels, marker."""
    dashes = " ".join(f"{2 * length:g}" for length in made.dashes[1])
    return {"color": made.color, "dashes": dashes, "marker": made.marker}


def _home(name: str) -> int:
    method = name.split(" (")[0]
    if method in _HOMES:
        return _HOMES.index(method)
    # Not hash(), which is another one in each process.
    return len(_HOMES) + zlib.crc32(name.encode()) % (SLOTS - len(_HOMES))
