"""Hooks of mkdocs that add pages from outside docs/, translate links to them, and add the examples and the API.

mkdocs.yml names this file.

A link to README.md leads to docs/index.md; CHANGELOG.md, CONTRIBUTING.md and results/ keep their names. A link to a
file of the repository that is no page (a test, a script) becomes its name. The API has a page a package.
"""

import ast
import doctest
import inspect
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
"""Pages outside docs/ and results/, and their paths on the site."""
BOOSTS = {"options.md": 8, "methods/": 4, "results/": 0.2, "CHANGELOG.md": 0.2}
"""Weights of pages in the search: the description of an option or a method comes before its measurements."""
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)


def site_paths() -> dict[str, str]:
    """Map the path of every page and picture in the repository to its path on the site."""
    paths = {name: site_path for name, site_path in OUTSIDE.items() if (ROOT / name).exists()}
    for path in sorted((ROOT / "docs").rglob("*")):
        if path.suffix in (".md", ".png"):
            paths[path.relative_to(ROOT).as_posix()] = path.relative_to(ROOT / "docs").as_posix()
    for path in sorted((ROOT / "results").glob("*")):  # results/published.md contains what is in results/sweeps
        if path.suffix in (".md", ".png", ".csv", ".gz", ".json", ".toml"):
            name = path.relative_to(ROOT).as_posix()
            paths[name] = re.sub(r"README\.md$", "index.md", name)
    return paths


def packages() -> list[str]:
    """List the packages directly below halfmoon, sorted."""
    return sorted(path.parent.name for path in SOURCE.glob("*/__init__.py"))


def reference(package: str) -> str:
    """Write the API page of a package: its docstring, and the public names of its modules."""
    introduction = ast.get_docstring(ast.parse((SOURCE / package / "__init__.py").read_text(encoding="utf-8"))) or ""
    modules = [".".join(path.relative_to(SOURCE.parent).with_suffix("").parts) for path in modules_of(package)]
    return f"# halfmoon.{package}\n\n{introduction}\n\n" + "\n\n".join(f"::: {name}" for name in modules) + "\n"


def public() -> str:
    """Write the API page of the names that `import halfmoon` offers: first line and example of each, with a link."""
    import halfmoon

    lines = ["# halfmoon", "", "What `import halfmoon` gives. The pages beside this one have all modules.", ""]
    # What is called comes before the types of custom methods and callbacks.
    names = sorted(halfmoon.__all__, key=lambda name: getattr(halfmoon, name).__module__ in TYPE_MODULES)
    for name in names:
        value = getattr(halfmoon, name)
        lines += describe(name, value)
        if isinstance(value, type):
            for part in vars(value).values():
                if example(part) and part.__name__ in USED_METHODS:
                    lines += describe(f"{name}.{part.__name__}", part)
    return "\n".join([*lines, ""])


TYPE_MODULES = ("halfmoon.api.types", "halfmoon.runs.callbacks")
"""Modules of the types that custom methods and callbacks use."""

USED_METHODS = ("to_frame", "plot", "to_latex", "predict", "predict_proba", "evaluate", "calibrate", "export")
"""Methods of public classes that have an entry of their own."""


def describe(name: str, value: Any) -> list[str]:
    """Describe a public name in a line with a link, and by its example."""
    link = f"{value.__module__.split('.')[1]}.md#{value.__module__}.{value.__qualname__}"
    lines = [f"- [`{name}`]({link}): {(value.__doc__ or '').partition(chr(10))[0]}"]
    if examples := read_examples(value):
        lines += ["", "    ```python"]
        for each in examples:
            code = each.source.splitlines()
            # A blank line around a class or a block.
            around = [""] if len(code) > 1 and each is not examples[0] else []
            lines += [*around, *(f"    {line}".rstrip() for line in code), *around[: each is not examples[-1]]]
            lines += [f"    # {line}" for line in each.want.splitlines()]
        lines += ["    ```", ""]
    return lines


def read_examples(value: Any) -> list[doctest.Example]:
    """Parse the section Examples of a docstring: statements, with what they print if the docstring has it."""
    _, heading, section = (getattr(value, "__doc__", None) or "").partition("Examples:\n")
    return doctest.DocTestParser().get_examples(inspect.cleandoc(section)) if heading else []


def example(value: Any) -> list[str]:
    """Return the lines of code of the section Examples of a docstring."""
    return [line for each in read_examples(value) for line in each.source.splitlines()]


def modules_of(package: str) -> list[Path]:
    """List the files of a package's modules without `__init__.py`."""
    return [path for path in sorted((SOURCE / package).rglob("*.py")) if path.name != "__init__.py"]


def translate_links(text: str, name: str, paths: dict[str, str]) -> str:
    """Replace links that hold in the repository by links that hold on the site; code blocks are not changed.

    Args:
        text: the page.
        name: its path in the repository.
        paths: the path on the site of every page and picture, by its path in the repository.
    """

    def translate(match: re.Match[str]) -> str:
        exclamation_mark, label, target = match.groups()
        path, hash_sign, anchor = target.partition("#")
        if not path or re.match(r"\w+:", path):
            return match[0]
        target_name = posixpath.normpath(posixpath.join(posixpath.dirname(name), path))
        if target_name not in paths:
            return label
        relative = posixpath.relpath(paths[target_name], posixpath.dirname(paths[name]) or ".")
        return f"{exclamation_mark}[{label}]({relative}{hash_sign}{anchor})"

    pieces = []
    end = 0
    for fence in FENCE.finditer(text):
        pieces += [LINK.sub(translate, text[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*pieces, LINK.sub(translate, text[end:])])


def departures(text: str) -> str:
    """Replace the link to a file's docstring on a method's page by the departures that the docstring lists."""

    def read_departures(match: re.Match[str]) -> str:
        tree = ast.parse((ROOT / match[1]).read_text(encoding="utf-8"))
        if "/objectives/" not in match[1]:
            return re.split(r"(?:^|\n\n)server:.*?\n\n", ast.get_docstring(tree) or "", flags=re.DOTALL)[-1]
        docstrings = [ast.get_docstring(node) or "" for node in tree.body if isinstance(node, ast.ClassDef)]
        relevant = [docstring for docstring in docstrings if "Departure" in docstring] or [max(docstrings, key=len)]
        return "\n\n".join(re.sub(r"\s*\bRaises\b.*", "", docstring, flags=re.DOTALL) for docstring in relevant)

    link = r"\[The file's docstring\]\(\.\./\.\./(\S+)\)\."
    return re.sub(link, lambda match: read_departures(match).replace("<", "&lt;"), text)


def python_name(flag: re.Match[str]) -> str:
    """Add the name of an option in Python to the beginning of its row, hidden, so that the search finds it."""
    return f"{flag[0]}<span hidden>{flag[1].replace('-', '_')}</span>"


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Fill the sections `results/`, `examples/` and `api/` of the navigation, the first in the order of its index."""
    results = [path for path in site_paths().values() if path.startswith("results/") and path.endswith(".md")]
    listed = re.findall(r"\]\((\w+\.md)\)", (ROOT / "results" / "README.md").read_text("utf-8"))
    order = ["results/index.md", *(f"results/{name}" for name in listed)]
    results.sort(key=order.index)
    sections: dict[str, Any] = {
        "results/": results,
        "api/": ["api/index.md", *(f"api/{name}.md" for name in packages())],
        "examples/": ["examples/index.md", *(f"examples/{name}.md" for name in gallery.ORDER)],
    }
    navigation = []
    for entry in config.nav or []:
        for title, value in entry.items():
            navigation.append({title: sections.get(value, value) if isinstance(value, str) else value})
    config.nav = navigation
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages outside docs/ and those of the API."""
    for name, path in site_paths().items():
        if not name.startswith("docs/") and name != "README.md":
            files.append(File.generated(config, path, abs_src_path=str(ROOT / name)))
    for name, content in gallery.pages().items():
        files.append(File.generated(config, f"examples/{name}", content=content))
    files.append(File.generated(config, "api/index.md", content=public()))
    for package in packages():
        files.append(File.generated(config, f"api/{package}.md", content=reference(package)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Translate the links of a page, insert departures from papers, and set its weight in the search."""
    paths = site_paths()
    names = {path: name for name, path in paths.items()}
    name = names.get(page.file.src_uri)
    weights = [weight for start, weight in BOOSTS.items() if page.file.src_uri.startswith(start)]
    page.meta["search"] = {"boost": weights[0] if weights else 1}
    if name == "docs/options.md":
        markdown = re.sub(r"^\| `--(\w+-[\w-]+)`", python_name, markdown, flags=re.MULTILINE)
    return markdown if name is None else translate_links(departures(markdown), name, paths)
