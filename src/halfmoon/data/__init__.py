"""Data: load images, partition them among clients, and describe the partition."""

from halfmoon.data.images import Images, Source, hide_last_classes, hold_out, pad_source, pad_to, shrink, take_share
from halfmoon.data.partition.heterogeneity import summarize
from halfmoon.data.partition.scenario import Scenario
from halfmoon.data.partition.split import SERVER, Split
from halfmoon.data.sources import list_datasets, load, save

__all__ = [
    "SERVER",
    "Images",
    "Scenario",
    "Source",
    "Split",
    "hide_last_classes",
    "hold_out",
    "list_datasets",
    "load",
    "pad_source",
    "pad_to",
    "save",
    "shrink",
    "summarize",
    "take_share",
]
