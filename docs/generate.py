"""Write into the pages what the code knows: `python docs/generate.py` renews README.md and docs/*.md.

A page holds a block between `<!-- generated: NAME -->` and `<!-- /generated -->`, which is written anew as a whole, or
between `<!-- defaults: METHOD -->` and `<!-- /defaults -->`: a table written by hand, of whose rows (name, default,
values, meaning) only the default and the values are renewed. A test demands that nothing is left to renew.
"""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import fields
from pathlib import Path
from typing import Any

from halfmoon import catalog, cli
from halfmoon import config as settings
from halfmoon.augment import Normalize
from halfmoon.models import SmallCNN
from halfmoon.optim import Adam
from halfmoon.types import Task

ROOT = Path(__file__).resolve().parents[1]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
COMMANDS = ("run", "compare", "methods", "data", "resume")

_GENERATED = re.compile(r"(<!-- generated: ([\w-]+) -->\n).*?(<!-- /generated -->)", re.DOTALL)
_DEFAULTS = re.compile(r"(<!-- defaults: ([\w-]+) -->\n)(.*?)(<!-- /defaults -->)", re.DOTALL)
_FLAG = re.compile(r"^  (?:-\w, )?(--[a-z][\w-]*)", re.MULTILINE)


def flags(command: str) -> list[str]:
    """Return the flags that `halfmoon COMMAND --help` shows, in its order."""
    shown = io.StringIO()
    with redirect_stdout(shown):
        cli.main([command, "--help"])
    return _FLAG.findall(shown.getvalue())


def options() -> str:
    """Return a table of all options for each section of `halfmoon run --help`."""
    takers = {command: set(flags(command)) for command in COMMANDS}
    defaults = {each.name: each.default for each in fields(settings.Config)}
    parts = []
    for title, names in cli.SECTIONS.items():
        rows = []
        for name in names:
            flag = f"--{name.replace('_', '-')}"
            kind = settings.kinds()[name]
            no = f", `--no-{flag[2:]}`" if kind == bool | None else ""
            where = ", ".join(command for command in COMMANDS if flag in takers[command])
            cells = [f"`{flag}`{no}", settings.expected(kind), _default(defaults[name]), where, settings.helps()[name]]
            rows.append(cells)
        parts.append(
            f"**{title[0].upper()}{title[1:]}**\n\n{table(['flag', 'value', 'default', 'commands', 'meaning'], rows)}"
        )
    return "\n".join(parts)


def methods() -> str:
    """Return a table of the catalog."""
    entries = [catalog.entry(name) for name in catalog.names()]
    rows = [[f"`{each.name}`", each.title, each.labels, each.about, each.paper] for each in entries]
    return table(["name", "method", "labels needed", "in a sentence", "paper"], rows)


def method_options() -> str:
    """Return the options of every method, with their defaults."""
    rows = []
    for name in catalog.names():
        own = ", ".join(f"`{key} = {_shown(option.default)}`" for key, option in catalog.options(name).items())
        rows.append([f"`{name}`", own])
    return table(["method", "options and defaults"], rows)


def passes() -> str:
    """Return what a step of each method on B labeled and b unlabeled images sends through the classifier."""
    shared = Task(SmallCNN(), Adam(), Normalize((0.5,) * 3, (0.5,) * 3))
    rows: dict[tuple[str, ...], list[str]] = {}
    for name in catalog.names():
        work = catalog.make(name).works(shared)["train"]
        terms = [f"{_terms(*each)}" for each in zip(work.passes(1, 0), work.passes(0, 1), strict=True)]
        costs = [f"{one.forward}, {one.backward}" for one in (work.passes(10, 10), work.passes(10, 90))]
        rows.setdefault((*terms, *costs), []).append(f"`{name}`")
    header = ["method", "forward", "backward", "both at 10 + 10", "both at 10 + 90"]
    return table(header, [[", ".join(names), *cells] for cells, names in rows.items()])


def _terms(labeled: int, unlabeled: int) -> str:
    factors = ((labeled, "B"), (unlabeled, "b"))
    return " + ".join(f"{'' if factor == 1 else factor}{letter}" for factor, letter in factors if factor)


BLOCKS: dict[str, Callable[[], str]] = {
    "options": options,
    "methods": methods,
    "method-options": method_options,
    "passes": passes,
}


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    escaped = [[cell.replace("|", "\\|").replace("<", "&lt;") for cell in row] for row in rows]
    lines = [header, ["---"] * len(header), *escaped]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def renew(text: str) -> str:
    """Return a page with its blocks as the code has them; raise ValueError where a table's rows are not its options."""
    text = _GENERATED.sub(lambda found: f"{found[1]}{BLOCKS[found[2]]()}{found[3]}", text)
    return _DEFAULTS.sub(lambda found: f"{found[1]}{_with_defaults(found[2], found[3])}{found[4]}", text)


def _with_defaults(method: str, block: str) -> str:
    known = catalog.options(method)
    lines, seen = block.splitlines(), []
    for number, line in enumerate(lines):
        if not re.match(r"\| *`", line):
            continue
        name, *cells = (cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1])
        option = known.get(name.strip("`"))
        if option is None:
            raise ValueError(f"{method} has no option {name}")
        if len(cells) != 3 or not cells[2]:
            raise ValueError(f"the row of {name} in the table of {method} needs a default, values and a meaning")
        lines[number] = f"| {name} | {_default(option.default)} | {_values(option)} | {cells[2]} |"
        seen.append(name.strip("`"))
    missing = [name for name in known if name not in seen]
    if missing:
        raise ValueError(f"the table of {method} has no row for {', '.join(missing)}")
    return "".join(f"{line}\n" for line in lines)


def _values(option: catalog.Option) -> str:
    return settings.expected(option.type).replace("|", "\\|")


def _shown(value: Any) -> str:
    """Return a value as TOML and JSON write it."""
    return "none" if value is None else json.dumps(value)


def _default(value: Any) -> str:
    return "none" if value in (None, ()) else f"`{_shown(value).strip(chr(34))}`"


def main() -> int:
    """Renew every page and say which ones changed."""
    for page in PAGES:
        before = page.read_text(encoding="utf-8")
        after = renew(before)
        if after != before:
            page.write_text(after, encoding="utf-8")
            sys.stdout.write(f"renewed {page.relative_to(ROOT)}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
