"""Which clients train as one program: padding all to the size of one that is far larger can cost more than the loop.

It is decided by sizes alone, what a client has and looks at, so that the bytes of a run do not depend on a machine.
"""

from collections.abc import Sequence
from dataclasses import astuple
from fractions import Fraction
from typing import NamedTuple

from halfmoon.api.types import ClientUpdate
from halfmoon.engine.budget import ClientSize, images_per_step
from halfmoon.engine.sampling import Amount

MAX_PADDING = Fraction(1, 3)
"""The share of a program's images that may be padding, or come after a client's last step.

Measured in `results/unequal_clients.md`.
"""


class Extent(NamedTuple):
    """How much a client looks at: in its steps, and of its rows where a work sweeps them."""

    amount: Amount
    rows: ClientSize

    def images(self, client_update: ClientUpdate) -> int:
        """Return the images that go through the classifier; one that comes back counts two more."""
        steps = self.amount.steps * images_per_step(client_update, self.amount) if self.amount.steps else 0
        return client_update.images_outside_steps(*astuple(self.rows)) + steps

    def maximum(self, other: "Extent") -> "Extent":
        rows = (max(each) for each in zip(astuple(self.rows), astuple(other.rows), strict=True))
        return Extent(Amount(*map(max, self.amount, other.amount)), ClientSize(*rows))


def grouped(client_update: ClientUpdate, extents: Sequence[Extent], padded: Fraction = MAX_PADDING) -> list[list[int]]:
    """Return the places of the clients of each program, of which a share `padded` is padding at most.

    From the largest client on, the next one joins while that holds. Within a program they stand in order.
    """
    if len(extents) < 2:  # nothing to compare, for which a client update would have to know its passes
        return [[place] for place in range(len(extents))]
    images = [each.images(client_update) for each in extents]
    programs: list[list[int]] = []
    widest, own = None, 0  # what the last program is padded to, and the images that are its clients'
    for place in sorted(range(len(extents)), key=lambda place: (-images[place], place)):
        wider = extents[place] if widest is None else widest.maximum(extents[place])
        whole = (len(programs[-1]) + 1) * wider.images(client_update) if programs else 0
        if programs and whole - own - images[place] <= padded * whole:
            programs[-1].append(place)
            widest, own = wider, own + images[place]
        else:
            programs.append([place])
            widest, own = extents[place], images[place]
    return [sorted(places) for places in programs]
