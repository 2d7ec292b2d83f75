"""An extension of the API reference: the comment behind a field of a class becomes its description."""

from typing import Any

import griffe


class Comments(griffe.Extension):
    """Use the comment at the end of an attribute's line as its docstring, if it has none."""

    def on_attribute_instance(self, *, attr: griffe.Attribute, **_: Any) -> None:
        """Set the docstring of one attribute; griffe calls this for each."""
        comment = attr.source.rpartition("  # ")[2] if "  # " in attr.source else ""
        if comment and attr.docstring is None and not comment.startswith(("pyright", "fmt", "type:")):
            attr.docstring = griffe.Docstring(comment[:1].upper() + comment[1:] + ".", parent=attr)
