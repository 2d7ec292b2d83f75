"""Print the release notes of a version's tag, the tag's section of CHANGELOG.md: `python .ci/notes.py v0.1.0`."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def notes(tag: str, version: str, changes: str) -> str:
    """Return the section of `changes` about the version of a tag; raise ValueError if the tag or section is wrong."""
    if tag != f"v{version}":
        raise ValueError(f"the tag is {tag}, but pyproject.toml has version {version}: it should be v{version}")
    sections = re.split(r"^## (\S+).*\n", changes, flags=re.MULTILINE)[1:]
    found = dict(zip(sections[::2], sections[1::2], strict=True)).get(version, "").strip()
    if not found:
        raise ValueError(f"CHANGELOG.md has no changes below '## {version}'")
    return found + "\n"


def main(words: list[str]) -> int:
    """Print the notes, or say on stderr why there are none."""
    if len(words) != 1:
        print("usage: python .ci/notes.py TAG", file=sys.stderr)
        return 2
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    try:
        print(notes(words[0], version, (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")), end="")
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
