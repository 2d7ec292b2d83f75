"""The consent of a site's people: a site takes part on terms that they know, and on no others."""

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

from pydantic import TypeAdapter, ValidationError

from halfmoon.federation.protocol.log import TermsSummary
from halfmoon.storage import atomic_io

T = TypeVar("T")

SHARED = "share-accuracy"
"""The file in a site's home by which its people let its own accuracy stand beside the mean."""

ENDED = "ended.json"  # the file in a site's home that says that its part is over, and why

OFFERED, AGREED = "offered.json", "agreed.json"
"""Files in a site's home: the terms that wait for a yes, and the hashes of those that have had one."""

ANY = "any"
PINNED = re.compile(r"any|[0-9a-f]{8,64}")  # values of `--terms`: `ANY`, or a hash or its beginning


@dataclass(frozen=True)
class End:
    """The end of a site's part: the exit code of its process, and why it is over."""

    code: int
    reason: str


@dataclass(frozen=True)
class Consent:
    """The federations in which a site takes part.

    `terms` begins the hash of the only terms that will do, or is `ANY`, or "": those agreed to. No `methods` means all.
    """

    home: Path
    terms: str = ANY
    methods: tuple[str, ...] = ()

    def covers(self, hash: str) -> bool:
        if self.terms:
            return self.terms == ANY or hash.startswith(self.terms)
        return hash in agreements(self.home)

    def accepts(self, method: str) -> bool:
        return not self.methods or method in self.methods


def ask(home: Path, terms: TermsSummary) -> None:
    atomic_io.replace(home / OFFERED, json.dumps(asdict(terms)).encode())


def offer(home: Path) -> TermsSummary | None:
    return _read(home / OFFERED, TypeAdapter(TermsSummary))


def end(home: Path, code: int, reason: str) -> None:
    atomic_io.replace(home / ENDED, json.dumps(asdict(End(code, reason))).encode())


def ending(home: Path) -> End | None:
    return _read(home / ENDED, TypeAdapter(End))


def withdraw(home: Path) -> None:
    (home / ENDED).unlink(missing_ok=True)
    (home / OFFERED).unlink(missing_ok=True)


def agreements(home: Path) -> list[str]:
    return (_read(home / AGREED, TypeAdapter(dict[str, list[str]])) or {}).get("terms", [])


def agree(home: Path, hash: str) -> None:
    atomic_io.replace(home / AGREED, json.dumps({"terms": sorted({*agreements(home), hash})}).encode())
    withdraw(home)


def share_accuracy(home: Path, on: bool) -> None:
    """Write down whether the accuracy of a site may stand beside the mean of all."""
    if on:
        home.mkdir(parents=True, exist_ok=True)
        (home / SHARED).touch()
    else:
        (home / SHARED).unlink(missing_ok=True)


def _read(path: Path, kind: TypeAdapter[T]) -> T | None:
    try:
        return kind.validate_json(atomic_io.read(path) or b"", strict=True)
    except ValidationError:
        return None
