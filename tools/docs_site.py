"""What mkdocs does not know: pages outside docs/, links to them, the gallery and the API (mkdocs.yml names this file).

A link to README.md leads to docs/index.md; CHANGELOG.md, CONTRIBUTING.md and results/ keep their names. A link to a
file of the repository that is no page (a test, a script) becomes its name. The API has a page a package.
"""

import ast
import posixpath
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

sys.path.append(str(Path(__file__).parent))
import gallery

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "halfmoon"
OUTSIDE = {"README.md": "index.md", "CHANGELOG.md": "CHANGELOG.md", "CONTRIBUTING.md": "CONTRIBUTING.md",
           "requirements/dependencies.md": "dependencies.md"}  # fmt: skip
"""Pages outside docs/ and results/, and their addresses on the site."""
BOOSTS = {"options.md": 8, "methods/": 4, "results/": 0.2, "CHANGELOG.md": 0.2}
"""How much more pages count in the search: what an option or a method is comes before what was measured of it."""
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)


def places() -> dict[str, str]:
    """Return the address on the site of every page and picture, by its path in the repository."""
    found = {name: place for name, place in OUTSIDE.items() if (ROOT / name).exists()}
    for path in sorted((ROOT / "docs").rglob("*")):
        if path.suffix in (".md", ".png"):
            found[path.relative_to(ROOT).as_posix()] = path.relative_to(ROOT / "docs").as_posix()
    for path in sorted((ROOT / "results").glob("*")):  # what lies in results/sweeps is part of results/published.md
        if path.suffix in (".md", ".png", ".csv", ".gz", ".json", ".toml"):
            name = path.relative_to(ROOT).as_posix()
            found[name] = re.sub(r"README\.md$", "index.md", name)
    return found


def packages() -> list[str]:
    """Return the packages directly below halfmoon, sorted."""
    return sorted(path.parent.name for path in SOURCE.glob("*/__init__.py"))


def reference(package: str) -> str:
    """Return the page of a package: what lives there, and every module's public names."""
    opening = ast.get_docstring(ast.parse((SOURCE / package / "__init__.py").read_text(encoding="utf-8"))) or ""
    modules = [".".join(path.relative_to(SOURCE.parent).with_suffix("").parts) for path in modules_of(package)]
    return f"# halfmoon.{package}\n\n{opening}\n\n" + "\n\n".join(f"::: {name}" for name in modules) + "\n"


def public() -> str:
    """Return the page of the names that `import halfmoon` gives: what each is, and where it is described."""
    import halfmoon

    lines = ["# halfmoon", "", "What `import halfmoon` gives. The pages beside this one have all modules.", ""]
    for name in halfmoon.__all__:
        made = getattr(halfmoon, name)
        place = f"{made.__module__.split('.')[1]}.md#{made.__module__}.{made.__qualname__}"
        lines.append(f"- [`{name}`]({place}): {(made.__doc__ or '').partition(chr(10))[0]}")
    return "\n".join([*lines, ""])


def modules_of(package: str) -> list[Path]:
    """Return the files of a package's modules, its own `__init__` left out."""
    return [path for path in sorted((SOURCE / package).rglob("*.py")) if path.name != "__init__.py"]


def moved(text: str, name: str, known: dict[str, str]) -> str:
    """Return a page's text with its links, which hold in the repository, as they hold on the site."""

    def link(found: re.Match[str]) -> str:
        mark, words, target = found.groups()
        path, hash_, anchor = target.partition("#")
        if not path or re.match(r"\w+:", path):
            return found[0]
        there = posixpath.normpath(posixpath.join(posixpath.dirname(name), path))
        if there not in known:
            return words
        relative = posixpath.relpath(known[there], posixpath.dirname(known[name]) or ".")
        return f"{mark}[{words}]({relative}{hash_}{anchor})"

    parts, last = [], 0
    for fence in FENCE.finditer(text):
        parts += [LINK.sub(link, text[last : fence.start()]), fence[0]]
        last = fence.end()
    return "".join([*parts, LINK.sub(link, text[last:])])


def departures(text: str) -> str:
    """Return a method's page with the departures of its docstring in place of the link to the file."""

    def paragraphs(found: re.Match[str]) -> str:
        tree = ast.parse((ROOT / found[1]).read_text(encoding="utf-8"))
        if "/objectives/" not in found[1]:
            return re.split(r"(?:^|\n\n)server:.*?\n\n", ast.get_docstring(tree) or "", flags=re.DOTALL)[-1]
        words = [ast.get_docstring(each) or "" for each in tree.body if isinstance(each, ast.ClassDef)]
        several = [each for each in words if "Departure" in each] or [max(words, key=len)]
        return "\n\n".join(re.sub(r"\s*\bRaises\b.*", "", each, flags=re.DOTALL) for each in several)

    link = r"\[The file's docstring\]\(\.\./\.\./(\S+)\)\."
    return re.sub(link, lambda found: paragraphs(found).replace("<", "&lt;"), text)


def python_name(flag: re.Match[str]) -> str:
    """Return the beginning of an option's row with its name in Python, for the search alone."""
    return f"{flag[0]}<span hidden>{flag[1].replace('-', '_')}</span>"


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Fill the sections `results/`, `examples/` and `api/` of the navigation, the first in the order of its index."""
    results = [place for place in places().values() if place.startswith("results/") and place.endswith(".md")]
    named = re.findall(r"\]\((\w+\.md)\)", (ROOT / "results" / "README.md").read_text("utf-8"))
    order = ["results/index.md", *(f"results/{name}" for name in named)]
    results.sort(key=order.index)
    filled: dict[str, Any] = {
        "results/": results,
        "api/": ["api/index.md", *(f"api/{name}.md" for name in packages())],
        "examples/": ["examples/index.md", *(f"examples/{name}.md" for name in gallery.ORDER)],
    }
    config.nav = [{key: filled.get(value, value) if isinstance(value, str) else value}
                  for entry in config.nav or [] for key, value in entry.items()]  # fmt: skip
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages outside docs/ and those of the API."""
    for name, place in places().items():
        if not name.startswith("docs/") and name != "README.md":
            files.append(File.generated(config, place, abs_src_path=str(ROOT / name)))
    for name, content in gallery.pages().items():
        files.append(File.generated(config, f"examples/{name}", content=content))
    files.append(File.generated(config, "api/index.md", content=public()))
    for package in packages():
        files.append(File.generated(config, f"api/{package}.md", content=reference(package)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Return a page's text with links that hold on the site."""
    known = places()
    names = {place: name for name, place in known.items()}
    name = names.get(page.file.src_uri)
    page.meta["search"] = {"boost": next((n for start, n in BOOSTS.items() if page.file.src_uri.startswith(start)), 1)}
    if name == "docs/options.md":
        markdown = re.sub(r"^\| `--(\w+-[\w-]+)`", python_name, markdown, flags=re.MULTILINE)
    return markdown if name is None else moved(departures(markdown), name, known)
