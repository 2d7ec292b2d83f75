"""What a method declares of itself: what it needs of uploads, and where labels may lie."""

from dataclasses import dataclass
from typing import Literal

Place = Literal["clients", "some", "server"]
"""Where labels lie: at every client, at some of them, or at the server alone."""

PLACES: dict[Place, str] = {"clients": "every client", "some": "some clients", "server": "the server"}
ANYWHERE: tuple[Place, ...] = ("clients", "some", "server")


@dataclass(frozen=True)
class Requirements:
    """What a method needs of uploads, and where labels may lie; what is not declared is refused.

    aggregation: "sum" if the weighted sum of uploads is enough for the server, so that secure aggregation and
        client-level privacy can stand before the method; "individual" if it needs every single upload.
    reason: why it needs every single upload, as the end of a sentence.
    places: where labels may lie; the first one is where the method expects them.
    personal: whether clients are sent something that is made of single uploads, which would mean nothing any more if a
        robust rule put one aggregate in the place of all.
    counts_statistics: the options with which clients would not count statistics in a query of its own, where no robust
        rule looks; empty if they count none.
    period: after how many rounds clients are asked for, or sent, something else: 1 if every round is like the one
        before. A site learns by it which rounds of a method it has to look at to know what a server may send.
    """

    aggregation: Literal["sum", "individual"] = "individual"
    reason: str = "it does not declare that the sum of uploads is enough for it"
    places: tuple[Place, ...] = ("clients", "some")
    personal: bool = False
    counts_statistics: str = ""
    period: int = 1


SUM = Requirements("sum", "")
"""What a method requires that averages uploads and expects labels at clients."""


def requirements_of(method: object, norm: str = "batch") -> Requirements:
    """Return what a method's `requirements(norm)` says, with a network of this norm ("batch", "group" or "none").

    A method that declares nothing needs every single upload.
    """
    declared = getattr(method, "requirements", None)
    return Requirements() if declared is None else declared(norm)
