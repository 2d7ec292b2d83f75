"""Views of images: batched on uint8 tensors, with a different draw for every row."""

from halfmoon.data.views.policies import (
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
    "Plain",
    "Shared",
    "Strong",
    "StrongFedLoKe",
    "StrongSemiFL",
    "View",
    "Weak",
]
