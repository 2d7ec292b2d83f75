"""A trained model at work: load it, label images, measure it on labeled ones, hand it to other programs."""

from halfmoon.runs.model_card import Card
from halfmoon.sites.inference.load import Model, load_model

__all__ = ["Card", "Model", "load_model"]
