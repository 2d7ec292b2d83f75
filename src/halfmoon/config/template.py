"""A configuration file that lists every option, as a start for a new one."""

from dataclasses import fields

from halfmoon.config import schema
from halfmoon.config.option_types import describe_type
from halfmoon.core import toml


def config_template() -> str:
    """Write a TOML file to start a configuration from: every option at its default, below a comment with its meaning.

    An option whose default is None has no value in TOML: its line is a comment with the type.
    """
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
