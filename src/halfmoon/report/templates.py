"""Render HTML by jinja2; all values are escaped except `Markup`."""

from functools import cache, partial
from importlib import resources
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup


def read_web_file(package: str, name: str) -> str:
    """Read a file in the folder `web` of a package."""
    return (resources.files(package) / "web" / name).read_text(encoding="utf-8")


@cache
def _environment(package: str) -> Environment:
    """Create jinja2's environment of the templates in the folder `web` of a package."""
    environment = Environment(
        loader=FunctionLoader(lambda name: read_web_file(package, name)),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    # For data in a script element: `tojson` escapes `<`, `>`, `&` and quotes; NaN, which is not JSON, is an error.
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    return environment


def _read_markup(package: str, name: str) -> Markup:
    return Markup(read_web_file(package, name))


def render(package: str, name: str, **values: Any) -> str:
    """Render a template with these values.

    Args:
        package: the package whose folder `web` has the template.
        name: the template's file name.
        values: its variables; the function `file` inserts another file of that folder.
    """
    return _environment(package).get_template(name).render(file=partial(_read_markup, package), **values)
