"""An event log for tests, which stores the sentences only."""

from typing import Any


class TextLog:
    """Append the sentence of each event to a list."""

    def __init__(self, texts: list[str]) -> None:
        self.texts = texts

    def record(self, name: str, text: str, /, **fields: Any) -> None:
        self.texts.append(text)
