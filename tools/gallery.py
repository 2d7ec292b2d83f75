"""Make pages of the scripts in examples/, with what they print and draw; they are executed when the site is built."""

import importlib.util
import os
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
CELL_TIMEOUT = 600
"""Seconds after which a cell that is still running fails."""

PARALLEL_SCRIPTS = 2
"""Number of scripts that are executed at the same time."""

QUICK_ROUNDS = 2
"""Rounds of each run in a quick build, which checks that every cell runs, and whose numbers mean nothing."""

ROUNDS = re.compile(r"""(rounds"? ?[=:] ?|\["round"\] == |map\(draw, range\()\d+""")
"""The numbers of rounds in a script, the comparisons with them, and the number of splits of examples/vectors.py."""

Pages = dict[str, str | bytes]


def cells(text: str) -> list[tuple[str, str]]:
    """Split a script in percent format into cells: pairs of a type, "markdown" or "code", and the source."""
    pieces = re.split(r"^# %%(.*)\n", text, flags=re.MULTILINE)
    pairs = []
    # The first piece is what stands above the first cell; after it markers and bodies alternate.
    for marker, body in zip(pieces[1::2], pieces[2::2], strict=True):
        kind = "markdown" if "[markdown]" in marker else "code"
        source = re.sub(r"^# ?", "", body, flags=re.MULTILINE) if kind == "markdown" else body
        pairs.append((kind, source.strip()))
    return pairs


def first_sentence(text: str) -> str:
    """Return the first line of a script, which says what a reader learns."""
    return text.partition("\n")[0].removeprefix("# ")


@cache
def pages() -> Pages:
    """Execute all scripts and return the content of every page and picture, by its path below examples/ on the site.

    If the environment variable HALFMOON_EXAMPLES is "quick", all runs have `QUICK_ROUNDS` rounds.
    """
    with ThreadPoolExecutor(PARALLEL_SCRIPTS) as pool:
        results = list(pool.map(execute_script, ORDER))
    content: Pages = {"index.md": index([seconds for _, seconds in results])}
    for script_pages, _ in results:
        content |= script_pages
    return content


def execute_script(name: str) -> tuple[Pages, float]:
    """Execute a script; return its page with its pictures, and the seconds that it took."""
    started = time.monotonic()
    text = (SCRIPTS / f"{name}.py").read_text(encoding="utf-8")
    if os.environ.get("HALFMOON_EXAMPLES") == "quick":
        text = ROUNDS.sub(rf"\g<1>{QUICK_ROUNDS}", text)
    script_pages = page(name, text)
    return script_pages, time.monotonic() - started


def index(seconds: list[float]) -> str:
    """Write the page that lists all scripts, what a reader learns from each, and the seconds that it took."""
    lines = [
        "# Examples",
        "",
        "Short scripts that run from top to bottom on embedded data, or cell by cell in a notebook.",
    ]
    lines += [f"The times are those of this site's build, {PARALLEL_SCRIPTS} at a time. In a clone they need:", ""]
    lines += ["```bash", "pip install -c constraints.txt -e '.[flower,pretrained,privacy]'", "```", ""]
    for name, duration in zip(ORDER, seconds, strict=True):
        text = (SCRIPTS / f"{name}.py").read_text(encoding="utf-8")
        title = cells(text)[0][1].partition("\n")[0].removeprefix("# ")
        lines.append(f"- **[{title}]({name}.md)**: {first_sentence(text).removeprefix('Learn ')} ({duration:.0f} s)")
    return "\n".join([*lines, ""])


def page(name: str, text: str) -> Pages:
    """Write a script's page and its pictures; without the package nbclient the page has no outputs."""
    notebook = execute(text) if importlib.util.find_spec("nbclient") else None
    pictures: Pages = {}
    blocks = []
    for number, (kind, source) in enumerate(cells(text)):
        if kind == "markdown":
            blocks += [source, ""]
            continue
        blocks += [f"```python\n{source}\n```", ""]
        for output in notebook.cells[number].outputs if notebook else ():
            blocks += [format_output(output, name, pictures), ""]
    first, *rest = blocks
    heading, _, introduction = first.partition("\n")
    origin = f"The script is `examples/{name}.py`."
    lines = [heading, "", first_sentence(text), "", introduction, *rest, origin, ""]
    return {f"{name}.md": "\n".join(lines), **pictures}


def execute(text: str) -> Any:
    """Execute a script as a notebook and return it; the error of a cell that fails is raised."""
    import nbformat
    from nbclient import NotebookClient

    new_cell = {"markdown": nbformat.v4.new_markdown_cell, "code": nbformat.v4.new_code_cell}
    notebook = nbformat.v4.new_notebook(cells=[new_cell[kind](source) for kind, source in cells(text)])
    with tempfile.TemporaryDirectory() as folder:
        client = NotebookClient(notebook, timeout=CELL_TIMEOUT, resources={"metadata": {"path": folder}})
        client.execute()
    return notebook


def format_output(output: Any, name: str, pictures: Pages) -> str:
    """Format the output of a cell as Markdown; a picture is added to `pictures`."""
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
    text = "".join(output.get("text") or data.get("text/plain", ""))
    if output.get("name") == "stderr":
        warnings = dict.fromkeys(re.findall(r"Warning: (.*)", text))
        return "\n\n".join(f'!!! warning ""\n    {warning}' for warning in warnings)
    return f"```text\n{text.rstrip()}\n```" if text.strip() else ""
