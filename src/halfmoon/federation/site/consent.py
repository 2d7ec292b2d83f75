"""The consent of a site's people: a site takes part on terms that they have seen, and on no others.

The process that talks to the server and the one that talks to the people share the files of this module in the site's
home folder.
"""

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
"""If a site's home has this file, its people allow its own accuracy to be shown next to the mean."""

END_FILE = "ended.json"
"""In a site's home: its participation is over, and why."""

OFFERED_FILE = "offered.json"
AGREED_FILE = "agreed.json"
"""In a site's home: the terms that wait for an agreement, and the hashes of the terms that were agreed to."""

ANY_TERMS = "any"
TERMS_CHOICE = re.compile(r"any|[0-9a-f]{8,64}")  # valid values of `--terms`: `ANY_TERMS`, or a hash or its beginning


@dataclass(frozen=True)
class ParticipationEnd:
    """The end of a site's participation.

    Attributes:
        code: exit code of the site's process.
        reason: why it is over.
    """

    code: int
    reason: str


@dataclass(frozen=True)
class Consent:
    """The federations in which a site takes part.

    Attributes:
        home: the site's home folder.
        terms: the beginning of the hash of the only terms that are accepted; `ANY_TERMS`; or "" for those to which the
            site's people agree.
        methods: the accepted methods; empty for all.
    """

    home: Path
    terms: str = ANY_TERMS
    methods: tuple[str, ...] = ()

    def agrees_to(self, hash: str) -> bool:
        """Check that the site takes part on the terms with this hash."""
        if self.terms:
            return self.terms == ANY_TERMS or hash.startswith(self.terms)
        return hash in load_agreed_hashes(self.home)

    def accepts_method(self, method: str) -> bool:
        """Check that the site accepts this method."""
        return not self.methods or method in self.methods


def save_offer(home: Path, terms: TermsSummary) -> None:
    """Save terms that wait for an agreement."""
    atomic_io.write_atomically(home / OFFERED_FILE, json.dumps(asdict(terms)).encode())


def load_offer(home: Path) -> TermsSummary | None:
    """Load the terms that wait for an agreement; None if there are none."""
    return _load_json(home / OFFERED_FILE, TypeAdapter(TermsSummary))


def save_end(home: Path, code: int, reason: str) -> None:
    """Save the end of the site's participation."""
    atomic_io.write_atomically(home / END_FILE, json.dumps(asdict(ParticipationEnd(code, reason))).encode())


def load_end(home: Path) -> ParticipationEnd | None:
    """Load the end of the site's participation; None if it goes on."""
    return _load_json(home / END_FILE, TypeAdapter(ParticipationEnd))


def remove_pending(home: Path) -> None:
    """Remove the terms that wait for an agreement, and the end of an earlier participation."""
    (home / END_FILE).unlink(missing_ok=True)
    (home / OFFERED_FILE).unlink(missing_ok=True)


def load_agreed_hashes(home: Path) -> list[str]:
    """Load the hashes of the terms to which the site's people have agreed."""
    return (_load_json(home / AGREED_FILE, TypeAdapter(dict[str, list[str]])) or {}).get("terms", [])


def save_agreement(home: Path, hash: str) -> None:
    """Save that the site's people agree to the terms with this hash."""
    hashes = sorted({*load_agreed_hashes(home), hash})
    atomic_io.write_atomically(home / AGREED_FILE, json.dumps({"terms": hashes}).encode())
    remove_pending(home)


def set_accuracy_sharing(home: Path, allowed: bool) -> None:
    """Save whether the accuracy of this site may be shown next to the mean of all."""
    if allowed:
        home.mkdir(parents=True, exist_ok=True)
        (home / SHARE_ACCURACY_FILE).touch()
    else:
        (home / SHARE_ACCURACY_FILE).unlink(missing_ok=True)


def _load_json(path: Path, adapter: TypeAdapter[T]) -> T | None:
    """Load a JSON file; None if it is missing or damaged. A damaged agreement counts as none."""
    try:
        return adapter.validate_json(atomic_io.read(path) or b"", strict=True)
    except ValidationError:
        return None
