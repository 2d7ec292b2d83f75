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

SHARE_ACCURACY_FILE = "share-accuracy"
"""The file in a site's home by which its people let its own accuracy stand beside the mean."""

END_FILE = "ended.json"  # the file in a site's home that says that its part is over, and why

OFFERED_FILE, AGREED_FILE = "offered.json", "agreed.json"
"""Files in a site's home: the terms that wait for a yes, and the hashes of those that have had one."""

ANY_TERMS = "any"
TERMS_CHOICE = re.compile(r"any|[0-9a-f]{8,64}")  # values of `--terms`: `ANY`, or a hash or its beginning


@dataclass(frozen=True)
class ParticipationEnd:
    """The end of a site's part: the exit code of its process, and why it is over."""

    code: int
    reason: str


@dataclass(frozen=True)
class Consent:
    """The federations in which a site takes part.

    `terms` begins the hash of the only terms that will do, or is `ANY`, or "": those agreed to. No `methods` means all.
    """

    home: Path
    terms: str = ANY_TERMS
    methods: tuple[str, ...] = ()

    def agrees_to(self, hash: str) -> bool:
        if self.terms:
            return self.terms == ANY_TERMS or hash.startswith(self.terms)
        return hash in load_agreed_hashes(self.home)

    def accepts_method(self, method: str) -> bool:
        return not self.methods or method in self.methods


def save_offer(home: Path, terms: TermsSummary) -> None:
    atomic_io.replace(home / OFFERED_FILE, json.dumps(asdict(terms)).encode())


def load_offer(home: Path) -> TermsSummary | None:
    return _read(home / OFFERED_FILE, TypeAdapter(TermsSummary))


def save_end(home: Path, code: int, reason: str) -> None:
    atomic_io.replace(home / END_FILE, json.dumps(asdict(ParticipationEnd(code, reason))).encode())


def load_end(home: Path) -> ParticipationEnd | None:
    return _read(home / END_FILE, TypeAdapter(ParticipationEnd))


def remove_pending(home: Path) -> None:
    (home / END_FILE).unlink(missing_ok=True)
    (home / OFFERED_FILE).unlink(missing_ok=True)


def load_agreed_hashes(home: Path) -> list[str]:
    return (_read(home / AGREED_FILE, TypeAdapter(dict[str, list[str]])) or {}).get("terms", [])


def save_agreement(home: Path, hash: str) -> None:
    atomic_io.replace(home / AGREED_FILE, json.dumps({"terms": sorted({*load_agreed_hashes(home), hash})}).encode())
    remove_pending(home)


def set_accuracy_sharing(home: Path, on: bool) -> None:
    """Write down whether the accuracy of a site may stand beside the mean of all."""
    if on:
        home.mkdir(parents=True, exist_ok=True)
        (home / SHARE_ACCURACY_FILE).touch()
    else:
        (home / SHARE_ACCURACY_FILE).unlink(missing_ok=True)


def _read(path: Path, kind: TypeAdapter[T]) -> T | None:
    try:
        return kind.validate_json(atomic_io.read(path) or b"", strict=True)
    except ValidationError:
        return None
