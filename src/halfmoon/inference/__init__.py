"""A trained model at work: load it, label images, measure it on labeled ones, hand it to other programs."""

from halfmoon.inference.load import Model, load_model
from halfmoon.runs.model_card import Card

__all__ = ["Card", "Model", "load_model"]
