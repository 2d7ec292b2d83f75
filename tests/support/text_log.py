"""Define an event log for tests that stores only the texts."""

from typing import Any


class TextLog:
    """Appends the text of each event to a list."""

    def __init__(self, texts: list[str]) -> None:
        self.texts = texts

    def record(self, name: str, text: str, /, **fields: Any) -> None:
        self.texts.append(text)
