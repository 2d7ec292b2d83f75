"""Semi-supervised objectives: a loss is one function of a model and a minibatch; one file a loss."""

from halfmoon.objectives.base import Objective, Seen
from halfmoon.objectives.fixmatch import FixMatch
from halfmoon.objectives.icpl import ICPL
from halfmoon.objectives.mean_teacher import MeanTeacher
from halfmoon.objectives.mixmatch import MixMatch
from halfmoon.objectives.pi import PiModel
from halfmoon.objectives.pseudo import PseudoLabel
from halfmoon.objectives.remixmatch import ReMixMatch
from halfmoon.objectives.sage import SAGE
from halfmoon.objectives.supervised import Supervised
from halfmoon.objectives.uda import UDA

__all__ = [
    "ICPL",
    "SAGE",
    "UDA",
    "FixMatch",
    "MeanTeacher",
    "MixMatch",
    "Objective",
    "PiModel",
    "PseudoLabel",
    "ReMixMatch",
    "Seen",
    "Supervised",
]
