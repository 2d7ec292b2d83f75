"""Semi-supervised objectives: a loss is one function of a model and a minibatch; one file a loss."""

from halfmoon.objectives.base import Objective, Seen
from halfmoon.objectives.fixmatch import FixMatch
from halfmoon.objectives.supervised import Supervised
from halfmoon.objectives.uda import UDA

__all__ = ["UDA", "FixMatch", "Objective", "Seen", "Supervised"]
