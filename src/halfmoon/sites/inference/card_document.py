"""A model's card for people, beside its file: Markdown and a page, with the sections of the usual model card.

They are those of Mitchell et al. (Model Cards for Model Reporting, 2019), as far as a site knows them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

import numpy as np

from halfmoon.models.registry import described
from halfmoon.runs.model_card import Card
from halfmoon.storage import atomic_io

CARD_FILES = ("model-card.md", "model-card.html")

STYLE = (
    ":root{color-scheme:light dark}body{font:16px/1.5 system-ui,sans-serif;max-width:46em;margin:2em auto;"
    "padding:0 1em;color:CanvasText;background:Canvas}h2{margin:1.6em 0 .4em}li{overflow-wrap:anywhere}"
)

LIMITS = (
    "It was judged on no images but those named above; of other devices, people or places nothing is known.",
    "It always names one of its classes, for an image of anything else too.",
    "It is no medical device, and nobody has approved it for decisions about a person.",
    "Its errors are not the same for all classes, and a class with few test images says little.",
)


@dataclass(frozen=True)
class ModelProvenance:
    """How a model came about: the federation, its sites and rounds, and this site's labeled and unlabeled images."""

    name: str
    terms: str  # their hash
    sites: Sequence[str]
    rounds: int
    labeled: int
    unlabeled: int
    version: str


def build_sections(
    card: Card, origin: ModelProvenance, sha256: str, confusion: np.ndarray | None
) -> dict[str, list[str]]:
    """Return the card, a few lines a section; `confusion` counts this site's test images, (true, predicted)."""
    height, width, channels = card.shape
    form = f"{width}x{height}, {'gray' if channels == 1 else 'RGB'}"
    window = "" if card.window is None else f"; black and white are {card.window[0]:g} and {card.window[1]:g}"
    accuracy = ["This site gave no test images, so nothing is known of it here (site join --test FOLDER)."]
    if confusion is not None and confusion.sum():
        right, totals = confusion.diagonal(), confusion.sum(1)
        share, count = right.sum() / totals.sum(), int(totals.sum())
        z = 1.96**2 / count  # Wilson's interval
        middle, half = share + z / 2, 1.96 * (share * (1 - share) / count + z / count / 4) ** 0.5
        low, high = (middle - half) / (1 + z), (middle + half) / (1 + z)
        accuracy = [f"Right on {share:.1%} of {count:,} test images of this site (95 %: {low:.1%} to {high:.1%})."]
        parts = zip(card.classes, right.tolist(), totals.tolist(), strict=True)
        accuracy += [f"{name}: {hits:,} of {total:,} right" for name, hits, total in parts]
    calibrated = f"Probabilities are of logits divided by {card.temperature:g}, fitted on images held out for that."
    return {
        "Model": [
            f"Network: {described(card.network)['name']}, images of {form}{window}",
            f"Classes: {', '.join(card.classes)}",
            f"Trained with halfmoon {origin.version}, method {card.method}",
        ],
        "Use": ["halfmoon predict, evaluate and review take its file. It names the class of one image at a time."],
        "Data": [
            f"Federation {origin.name}: {origin.rounds:,} rounds, sites {', '.join(origin.sites)}",
            f"This site: {origin.labeled:,} images with a label and {origin.unlabeled:,} without. None left it.",
        ],
        "How it was judged": accuracy,
        "Calibration": [calibrated if card.temperature != 1 else "Its probabilities are not calibrated."],
        "Limits": list(LIMITS),
        "License": ["None was agreed on in the terms: ask who runs the federation before you pass the model on."],
        "Hashes": [f"Model file: SHA-256 {sha256}", f"Terms of the federation: {origin.terms}"],
    }


def write_card(folder: Path, title: str, parts: dict[str, list[str]]) -> None:
    """Write both files of a card, each whole or not at all."""
    lines = [f"# {title}", ""]
    for name, points in parts.items():
        lines += [f"## {name}", "", *(f"- {_plain(line)}" for line in points), ""]
    body = "".join(
        f"<h2>{escape(name)}</h2><ul>{''.join(f'<li>{escape(line)}</li>' for line in points)}</ul>\n"
        for name, points in parts.items()
    )
    page = (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{escape(title)}</title><style>{STYLE}</style><h1>{escape(title)}</h1>\n{body}</html>\n"
    )
    for name, text in zip(CARD_FILES, ("\n".join(lines), page), strict=True):
        atomic_io.replace(folder / name, text.encode())


def _plain(line: str) -> str:
    """Return words that Markdown shows as they are: names of classes and sites come from others."""
    return "".join(f"\\{letter}" if letter in r"\`*_[]<>#|!" else letter for letter in line)
