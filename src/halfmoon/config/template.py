"""A configuration file that has every option, to begin one's own with."""

from dataclasses import fields

from halfmoon.config import schema
from halfmoon.config.option_types import expected
from halfmoon.storage import toml


def template() -> str:
    """Return a commented TOML file with every option at its default."""
    lines: list[str] = []
    defaults = {each.name: each.default for each in fields(schema.Config)}
    for name, about in schema.helps().items():
        if name == "options":
            entry = "# [options]"
        elif defaults[name] is None:
            entry = f"# {name} = {expected(schema.kinds()[name])}"
        else:
            entry = f"{name} = {toml.value(defaults[name])}"
        lines += [f"# {about}", entry, ""]
    return "\n".join(lines)
