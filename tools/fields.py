"""For the API reference: the comment behind a field of a class is its description, with shape and unit."""

from typing import Any

import griffe


class Comments(griffe.Extension):
    """Give every attribute without a docstring the comment that stands behind it."""

    def on_attribute_instance(self, *, attr: griffe.Attribute, **_: Any) -> None:
        """Look at one attribute, where its source is known."""
        words = attr.source.rpartition("  # ")[2] if "  # " in attr.source else ""
        if words and attr.docstring is None and not words.startswith(("pyright", "fmt", "type:")):
            attr.docstring = griffe.Docstring(words[:1].upper() + words[1:] + ".", parent=attr)
