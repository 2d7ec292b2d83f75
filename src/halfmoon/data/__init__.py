"""Data: sources of images, scenarios of who holds them, and what a split is like."""

from halfmoon.data.images import Images, Source, fit, hold_out, pad_to, shrink, subset
from halfmoon.data.partition.heterogeneity import summary
from halfmoon.data.partition.scenario import Scenario
from halfmoon.data.partition.split import SERVER, Split
from halfmoon.data.sources import load, names, save

__all__ = [
    "SERVER",
    "Images",
    "Scenario",
    "Source",
    "Split",
    "fit",
    "hold_out",
    "load",
    "names",
    "pad_to",
    "save",
    "shrink",
    "subset",
    "summary",
]
