"""A configuration file that lists every option, as a start for a new one."""

from dataclasses import fields

from halfmoon.config import schema
from halfmoon.config.option_types import describe_type
from halfmoon.storage import toml


def config_template() -> str:
    """Write a commented TOML file with every option at its default."""
    lines: list[str] = []
    defaults = {option.name: option.default for option in fields(schema.Config)}
    for name, help_text in schema.option_helps().items():
        if name == "options":
            entry = "# [options]"
        elif defaults[name] is None:
            entry = f"# {name} = {describe_type(schema.option_types()[name])}"
        else:
            entry = f"{name} = {toml.format_value(defaults[name])}"
        lines += [f"# {help_text}", entry, ""]
    return "\n".join(lines)
