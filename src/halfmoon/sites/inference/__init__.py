"""Load a trained model, predict and measure with it, calibrate it, and export it to other programs."""

from halfmoon.models.model_card import Card
from halfmoon.sites.inference.load import InferenceModel, load_model

__all__ = ["Card", "InferenceModel", "load_model"]
