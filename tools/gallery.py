"""The gallery: the scripts of examples/ as pages with what they print and draw, executed when the site is built."""

import importlib.util
import re
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = ROOT / "examples"
ORDER = (
    "main_job",
    "arrays",
    "own_images",
    "objective",
    "network",
    "paper_table",
    "vectors",
    "federation",
    "labeling",
    "privacy",
)
PATIENCE = 600
"""Seconds until a cell counts as stuck."""

TOGETHER = 2
"""Scripts executed at a time."""

Pages = dict[str, str | bytes]


def cells(text: str) -> list[tuple[str, str]]:
    """Return the kind ("markdown" or "code") and the source of every cell of a script in percent format."""
    parts = re.split(r"^# %%(.*)\n", text, flags=re.MULTILINE)
    pairs = []
    for mark, body in zip(parts[1::2], parts[2::2], strict=True):
        kind = "markdown" if "[markdown]" in mark else "code"
        source = re.sub(r"^# ?", "", body, flags=re.MULTILINE) if kind == "markdown" else body
        pairs.append((kind, source.strip()))
    return pairs


def lesson(text: str) -> str:
    """Return what a script's first line says that one learns."""
    return text.partition("\n")[0].removeprefix("# ")


@cache
def pages() -> Pages:
    """Return the content of every page and picture of the gallery, by its address below examples/."""
    with ThreadPoolExecutor(TOGETHER) as pool:
        played = list(pool.map(played_page, ORDER))
    return {"index.md": index([seconds for _, seconds in played])} | {
        k: v for made, _ in played for k, v in made.items()
    }


def played_page(name: str) -> tuple[Pages, float]:
    """Return a script's page with its pictures, and the seconds that it took."""
    began = time.monotonic()
    return page(name, (SCRIPTS / f"{name}.py").read_text(encoding="utf-8")), time.monotonic() - began


def index(seconds: list[float]) -> str:
    """Return the page that names all scripts, what one learns, and the seconds that each took for this site."""
    lines = [
        "# Examples",
        "",
        "Short scripts that run from top to bottom on embedded data, or cell by cell in a notebook.",
    ]
    lines += [f"The times are those of this site's build, {TOGETHER} at a time. In a clone they need:", ""]
    lines += ["```bash", "pip install -c constraints.txt -e '.[flower,pretrained,privacy]'", "```", ""]
    for name, took in zip(ORDER, seconds, strict=True):
        text = (SCRIPTS / f"{name}.py").read_text(encoding="utf-8")
        title = cells(text)[0][1].partition("\n")[0].removeprefix("# ")
        lines.append(f"- **[{title}]({name}.md)**: {lesson(text).removeprefix('Learn ')} ({took:.0f} s)")
    return "\n".join([*lines, ""])


def page(name: str, text: str) -> Pages:
    """Return a script's page and its pictures; without nbclient the page shows no outputs."""
    notebook = executed(text) if importlib.util.find_spec("nbclient") else None
    pictures: Pages = {}
    words = []
    for number, (kind, source) in enumerate(cells(text)):
        if kind == "markdown":
            words += [source, ""]
            continue
        words += [f"```python\n{source}\n```", ""]
        for output in notebook.cells[number].outputs if notebook else ():
            words += [shown(output, name, pictures), ""]
    first, *rest = words
    heading, _, opening = first.partition("\n")
    source = f"The script is `examples/{name}.py`."
    parts = [heading, "", lesson(text), "", opening, *rest, source, ""]
    return {f"{name}.md": "\n".join(parts), **pictures}


def executed(text: str) -> Any:
    """Return a script as an executed notebook; raise nbclient's error where a cell fails."""
    import nbformat
    from nbclient import NotebookClient

    make = {"markdown": nbformat.v4.new_markdown_cell, "code": nbformat.v4.new_code_cell}
    notebook = nbformat.v4.new_notebook(cells=[make[kind](source) for kind, source in cells(text)])
    with tempfile.TemporaryDirectory() as place:
        client = NotebookClient(notebook, timeout=PATIENCE, resources={"metadata": {"path": place}})
        client.execute()
    return notebook


def shown(output: Any, name: str, pictures: Pages) -> str:
    """Return an output as Markdown; a picture goes into `pictures`."""
    import base64

    data = output.get("data", {})
    if "image/png" in data:
        file = f"{name}-{len(pictures) + 1}.png"
        pictures[file] = base64.b64decode(data["image/png"])
        return f"![figure {len(pictures)} of this example, drawn by the cell above]({file})"
    if "text/html" in data:
        table = re.sub(
            r"<style.*?</style>|\n\s*| border=.1. class=.dataframe.", "", "".join(data["text/html"]), flags=re.DOTALL
        )
        return f'<div class="output" markdown="0">{table}</div>'
    words = "".join(output.get("text") or data.get("text/plain", ""))
    if output.get("name") == "stderr":
        warnings = dict.fromkeys(re.findall(r"Warning: (.*)", words))
        return "\n\n".join(f'!!! warning ""\n    {each}' for each in warnings)
    return f"```text\n{words.rstrip()}\n```" if words.strip() else ""
