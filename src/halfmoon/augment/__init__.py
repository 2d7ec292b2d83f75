"""Views of images: batched on uint8 tensors, with a different draw for every row."""

from halfmoon.augment.normalize import Normalize
from halfmoon.augment.views import Drawn, Labeled, Plain, Strong, View, Weak

__all__ = ["Drawn", "Labeled", "Normalize", "Plain", "Strong", "View", "Weak"]
