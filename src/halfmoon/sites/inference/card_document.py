"""Write a model's card for people, as Markdown and HTML, next to the model's file.

The sections are those of Mitchell et al., Model Cards for Model Reporting (2019), as far as a site knows them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

import numpy as np

from halfmoon.models.model_card import Card
from halfmoon.models.registry import describe
from halfmoon.storage import atomic_io

CARD_FILES = ("model-card.md", "model-card.html")

NORMAL_QUANTILE = 1.96
"""97.5 % quantile of the normal distribution, for two-sided intervals of 95 %."""

_STYLE = (
    ":root{color-scheme:light dark}body{font:16px/1.5 system-ui,sans-serif;max-width:46em;margin:2em auto;"
    "padding:0 1em;color:CanvasText;background:Canvas}h2{margin:1.6em 0 .4em}li{overflow-wrap:anywhere}"
)

_LIMITS = (
    "It was tested only on the images named above; its accuracy for other devices, people or locations is unknown.",
    "It always names one of its classes, for an image of anything else too.",
    "It is no medical device, and is not approved for decisions about a person.",
    "Its errors are not the same for all classes, and the accuracy of a class with few test images is uncertain.",
)


@dataclass(frozen=True)
class ModelProvenance:
    """The federation and the images that a model was trained with.

    Attributes:
        name: the federation's name.
        terms: the hash of the federation's terms.
        sites: the names of its sites.
        rounds: the number of rounds.
        labeled: the number of this site's labeled images.
        unlabeled: the number of this site's unlabeled images.
        version: the version of halfmoon.
    """

    name: str
    terms: str
    sites: Sequence[str]
    rounds: int
    labeled: int
    unlabeled: int
    version: str


def build_sections(
    card: Card, origin: ModelProvenance, sha256: str, confusion: np.ndarray | None
) -> dict[str, list[str]]:
    """Build the text of a model card (Mitchell et al. 2019) for the people at a site of a federation.

    Args:
        card: the metadata of the model's file.
        origin: the federation and the images that the model was trained with.
        sha256: the hash of the model's file.
        confusion: counts of this site's test images, (true class, predicted class); None without test images.

    Returns:
        Lines of text by the title of the section.
    """
    height, width, channels = card.shape
    image_spec = f"{width}x{height}, {'gray' if channels == 1 else 'RGB'}"
    window = "" if card.window is None else f"; black and white are {card.window[0]:g} and {card.window[1]:g}"
    calibration = "Its probabilities are not calibrated."
    if card.temperature != 1:
        calibration = f"Probabilities are of logits divided by {card.temperature:g}, fitted on held-out images."
    return {
        "Model": [
            f"Network: {describe(card.network)['name']}, images of {image_spec}{window}",
            f"Classes: {', '.join(card.classes)}",
            f"Trained with halfmoon {origin.version}, method {card.method}",
        ],
        "Use": ["halfmoon predict, evaluate and review read its file. It names the class of one image at a time."],
        "Data": [
            f"Federation {origin.name}: {origin.rounds:,} rounds, sites {', '.join(origin.sites)}",
            f"This site: {origin.labeled:,} images with a label and {origin.unlabeled:,} without. No image left it.",
        ],
        "Evaluation": _describe_accuracy(card.classes, confusion),
        "Calibration": [calibration],
        "Limits": list(_LIMITS),
        "License": ["The terms contain no license: ask the federation's organizers before you pass the model on."],
        "Hashes": [f"Model file: SHA-256 {sha256}", f"Terms of the federation: {origin.terms}"],
    }


def _describe_accuracy(classes: Sequence[str], confusion: np.ndarray | None) -> list[str]:
    """Describe the accuracy on this site's test images, with Wilson's 95 % interval, and that of each class.

    Args:
        classes: the class names.
        confusion: counts, (true class, predicted class); None without test images.

    Returns:
        A sentence, and a line for each class.
    """
    if confusion is None or not confusion.sum():
        return ["This site gave no test images, so its accuracy here is unknown (site join --test FOLDER)."]
    correct = confusion.diagonal()
    totals = confusion.sum(1)
    count = int(totals.sum())
    accuracy = correct.sum() / totals.sum()
    # Wilson's score interval, which is also valid for few images and for accuracies near 0 or 1.
    z_squared_share = NORMAL_QUANTILE**2 / count
    center = accuracy + z_squared_share / 2
    half_width = NORMAL_QUANTILE * (accuracy * (1 - accuracy) / count + z_squared_share / count / 4) ** 0.5
    low = (center - half_width) / (1 + z_squared_share)
    high = (center + half_width) / (1 + z_squared_share)
    lines = [f"Right on {accuracy:.1%} of {count:,} test images of this site (95 %: {low:.1%} to {high:.1%})."]
    for name, hits, total in zip(classes, correct.tolist(), totals.tolist(), strict=True):
        lines.append(f"{name}: {hits:,} of {total:,} right")
    return lines


def write_card(folder: Path, title: str, sections: dict[str, list[str]]) -> None:
    """Write a model card as Markdown and as HTML into a folder, each file atomically.

    Args:
        folder: the folder.
        title: the heading.
        sections: lines of text by the title of the section.
    """
    markdown_lines = [f"# {title}", ""]
    for name, lines in sections.items():
        markdown_lines += [f"## {name}", "", *(f"- {_escape_markdown(line)}" for line in lines), ""]
    body = ""
    for name, lines in sections.items():
        items = "".join(f"<li>{escape(line)}</li>" for line in lines)
        body += f"<h2>{escape(name)}</h2><ul>{items}</ul>\n"
    html = (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style><h1>{escape(title)}</h1>\n{body}</html>\n"
    )
    for name, text in zip(CARD_FILES, ("\n".join(markdown_lines), html), strict=True):
        atomic_io.write_atomically(folder / name, text.encode())


def _escape_markdown(line: str) -> str:
    """Escape Markdown's special characters: names of classes and sites are chosen by other people."""
    return "".join(f"\\{letter}" if letter in r"\`*_[]<>#|!" else letter for letter in line)
