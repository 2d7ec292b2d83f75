"""Views of images: batched on uint8 tensors, with a different draw for every row."""

from halfmoon.augment.normalize import Normalize
from halfmoon.augment.views import (
    Drawn,
    Labeled,
    Plain,
    Shared,
    Strong,
    StrongFedLoKe,
    StrongSemiFL,
    View,
    Weak,
)

__all__ = [
    "Drawn",
    "Labeled",
    "Normalize",
    "Plain",
    "Shared",
    "Strong",
    "StrongFedLoKe",
    "StrongSemiFL",
    "View",
    "Weak",
]
