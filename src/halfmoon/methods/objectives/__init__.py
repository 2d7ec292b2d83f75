"""Semi-supervised objectives: a loss is one function of a model and a minibatch; one file a loss."""

from halfmoon.methods.objectives.base import Objective, StepResult
from halfmoon.methods.objectives.fedlabel import FedLabel
from halfmoon.methods.objectives.fixmatch import FixMatch
from halfmoon.methods.objectives.icpl import ICPL
from halfmoon.methods.objectives.mean_teacher import MeanTeacher
from halfmoon.methods.objectives.mixmatch import MixMatch
from halfmoon.methods.objectives.pi import PiModel
from halfmoon.methods.objectives.pseudo import PseudoLabel
from halfmoon.methods.objectives.remixmatch import ReMixMatch
from halfmoon.methods.objectives.sage import SAGE
from halfmoon.methods.objectives.supervised import Supervised
from halfmoon.methods.objectives.uda import UDA

__all__ = [
    "ICPL",
    "SAGE",
    "UDA",
    "FedLabel",
    "FixMatch",
    "MeanTeacher",
    "MixMatch",
    "Objective",
    "PiModel",
    "PseudoLabel",
    "ReMixMatch",
    "StepResult",
    "Supervised",
]
