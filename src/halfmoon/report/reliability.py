"""Whether a model is as often right as it says: its accuracy by how sure it was, and how many images that were."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from halfmoon.report.figures import GRAY, figure, style, tidy, write

_LABEL = 8.5  # points


def reliability(scores: Mapping[str, Any], path: Path) -> None:
    """Draw a PNG of a model's calibration: bars of accuracy over probability, and below them the images of each bin.

    `found` is the dict of `halfmoon.sites.inference.measure.scores`. A bar below the diagonal says that the model is
    right less often than it says. Raise UserError if the picture cannot be written.
    """
    rows = [row for row in scores["reliability"] if row["images"]]
    left, width = [row["above"] for row in rows], [row["to"] - row["above"] for row in rows]
    picture = figure(4.2, 4.6)
    above, below = picture.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    above.plot([0, 1], [0, 1], color=GRAY, linewidth=1, dashes=(4, 2), label="as often right as it says")
    bars = {"align": "edge", "edgecolor": "white", "linewidth": 0.5}
    above.bar(left, [row["accuracy"] for row in rows], width, color=style(0).color, label="accuracy", **bars)
    means = [row["confidence"] for row in rows]
    above.plot(means, [row["accuracy"] for row in rows], "o", color=style(1).color, markersize=3.5, label="at the mean")
    above.set_ylabel("accuracy", fontsize=_LABEL)
    above.set_ylim(0, 1)
    error = f"expected calibration error {100 * scores['calibration_error']:.2f} %, {scores['images']:,} images"
    above.set_title(error, fontsize=_LABEL, loc="left", fontweight="bold")
    above.legend(fontsize=7.5, frameon=False, loc="upper left")
    below.bar(left, [row["images"] for row in rows], width, color=GRAY, **bars)
    below.set_ylabel("images", fontsize=_LABEL)
    below.set_xlabel("probability of the label", fontsize=_LABEL)
    below.set_xlim(0, 1)
    for axes in (above, below):
        tidy(axes)
    write(picture, path)
