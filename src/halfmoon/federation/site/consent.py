"""The consent of a site's people: a site takes part on terms that they have seen, and on no others.

The process that talks to the server and the one that talks to the people share the files of this module in the site's
state folder.
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
"""If a site's state folder has this file, its people allow its own accuracy to be shown next to the mean."""

END_FILE = "ended.json"
"""In a site's state folder: its participation is over, and why."""

OFFERED_FILE = "offered.json"
AGREED_FILE = "agreed.json"
"""In a site's state folder: the terms that wait for an agreement, and the hashes of the terms that were agreed to."""

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
        state_folder: the site's state folder.
        terms: the beginning of the hash of the only terms that are accepted; `ANY_TERMS`; or "" for those to which the
            site's people agree.
        methods: the accepted methods; empty for all.
    """

    state_folder: Path
    terms: str = ANY_TERMS
    methods: tuple[str, ...] = ()

    def agrees_to(self, hash: str) -> bool:
        """Check that the site takes part on the terms with this hash."""
        if self.terms:
            return self.terms == ANY_TERMS or hash.startswith(self.terms)
        return hash in load_agreed_hashes(self.state_folder)

    def accepts_method(self, method: str) -> bool:
        """Check that the site accepts this method."""
        return not self.methods or method in self.methods


def save_offer(state_folder: Path, terms: TermsSummary) -> None:
    """Save terms that wait for an agreement."""
    atomic_io.write_atomically(state_folder / OFFERED_FILE, json.dumps(asdict(terms)).encode())


def load_offer(state_folder: Path) -> TermsSummary | None:
    """Load the terms that wait for an agreement; None if there are none."""
    return _load_json(state_folder / OFFERED_FILE, TypeAdapter(TermsSummary))


def save_end(state_folder: Path, code: int, reason: str) -> None:
    """Save the end of the site's participation."""
    atomic_io.write_atomically(state_folder / END_FILE, json.dumps(asdict(ParticipationEnd(code, reason))).encode())


def load_end(state_folder: Path) -> ParticipationEnd | None:
    """Load the end of the site's participation; None if it goes on."""
    return _load_json(state_folder / END_FILE, TypeAdapter(ParticipationEnd))


def remove_pending(state_folder: Path) -> None:
    """Remove the terms that wait for an agreement, and the end of an earlier participation."""
    (state_folder / END_FILE).unlink(missing_ok=True)
    (state_folder / OFFERED_FILE).unlink(missing_ok=True)


def load_agreed_hashes(state_folder: Path) -> list[str]:
    """Load the hashes of the terms to which the site's people have agreed."""
    return (_load_json(state_folder / AGREED_FILE, TypeAdapter(dict[str, list[str]])) or {}).get("terms", [])


def save_agreement(state_folder: Path, hash: str) -> None:
    """Save that the site's people agree to the terms with this hash."""
    hashes = sorted({*load_agreed_hashes(state_folder), hash})
    atomic_io.write_atomically(state_folder / AGREED_FILE, json.dumps({"terms": hashes}).encode())
    # Removed only now: if the process ends in between, the people are asked once more, and no answer is lost.
    remove_pending(state_folder)


def set_accuracy_sharing(state_folder: Path, allowed: bool) -> None:
    """Save whether the accuracy of this site may be shown next to the mean of all."""
    if allowed:
        state_folder.mkdir(parents=True, exist_ok=True)
        (state_folder / SHARE_ACCURACY_FILE).touch()
    else:
        (state_folder / SHARE_ACCURACY_FILE).unlink(missing_ok=True)


def _load_json(path: Path, adapter: TypeAdapter[T]) -> T | None:
    """Load a JSON file; None if it is missing or damaged. A damaged agreement counts as none."""
    try:
        # A missing file counts as an empty one, which is no valid JSON.
        return adapter.validate_json(atomic_io.read(path) or b"", strict=True)
    except ValidationError:
        return None
