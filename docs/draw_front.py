"""Draw docs/images/front.png and front-dark.png, the figure of the front page, from a run folder of the main job.

`halfmoon run --run-dir RUN && python docs/draw_front.py RUN`. The letters can be read where the figure is 360 pixels wide.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from matplotlib.colors import to_hex, to_rgb
from PIL import Image

from halfmoon.report.figures import new_figure, save_figure
from halfmoon.report.run_reader import StoredRun, read_runs
from halfmoon.report.styles import line_styles

IMAGES = Path(__file__).resolve().parent / "images"

THEMES = {
    "front.png": {"page": "#ffffff", "text": "#1d1f23", "grid": "#e3e3e3", "brightness": 1.0},
    "front-dark.png": {"page": "#1e2129", "text": "#e8eaed", "grid": "#3b414a", "brightness": 1.25},
}
"""Colors of each file, and the brightness of its lines, as on pages."""


def draw(runs: Sequence[StoredRun], path: Path) -> None:
    """Draw test accuracy by round, with the name and the last value of each method."""
    theme = THEMES[path.name]
    figure = new_figure(4.4, 3.4)
    figure.set_facecolor(theme["page"])
    axes = figure.add_subplot(facecolor=theme["page"])
    styles = line_styles([str(run.options["method"]) for run in runs])
    for number, (run, style) in enumerate(zip(runs, styles, strict=True)):
        curve = {round: 100 * share for round, share in run.series("test", "accuracy").items()}
        color = to_hex([min(1.0, theme["brightness"] * part) for part in to_rgb(style.color)])
        interval = max(1, len(curve) // 7)
        axes.plot(
            list(curve),
            list(curve.values()),
            color=color,
            linestyle=style.dashes,
            linewidth=1.3,
            marker=style.marker,
            markersize=4.5,
            markevery=(number * interval // len(runs), interval),
            label=f"{run.title}: {list(curve.values())[-1]:.1f} %",
        )
    axes.set_title("test accuracy (%)", fontsize=10.5, loc="left", color=theme["text"])
    axes.set_xlabel("round", fontsize=10.5, color=theme["text"])
    axes.set_ylim(top=100)
    axes.grid(axis="y", color=theme["grid"], linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(theme["text"])
    axes.tick_params(labelsize=10, colors=theme["text"])
    axes.legend(loc="lower right", frameon=False, fontsize=9.5, labelcolor=theme["text"], handlelength=2.8)
    save_figure(figure, path)
    with Image.open(path) as picture:
        picture.convert("RGB").quantize(256).save(path, optimize=True)  # a third of the bytes


if __name__ == "__main__":
    order = ("fedavg-sl", "feddure", "fedavg-fixmatch", "fedavg-control", "fedavg")
    found = {run.options["method"]: run for run in read_runs(Path(sys.argv[1]))}
    for name in THEMES:
        draw([found[method] for method in order], IMAGES / name)
