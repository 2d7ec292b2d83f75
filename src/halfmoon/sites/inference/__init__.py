"""Load a trained model, predict and measure with it, calibrate it, and export it to other programs."""

from halfmoon.runs.model_card import Card
from halfmoon.sites.inference.load import Model, load_model

__all__ = ["Card", "Model", "load_model"]
