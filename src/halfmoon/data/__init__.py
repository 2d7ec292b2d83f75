"""Data: sources of images, scenarios of who holds them, and what a split is like."""

from halfmoon.data.images import Images, Source, fit, pad_to, shrink, subset
from halfmoon.data.measure import summary
from halfmoon.data.scenario import Scenario
from halfmoon.data.sources import load, names
from halfmoon.data.split import SERVER, Split

__all__ = [
    "SERVER",
    "Images",
    "Scenario",
    "Source",
    "Split",
    "fit",
    "load",
    "names",
    "pad_to",
    "shrink",
    "subset",
    "summary",
]
