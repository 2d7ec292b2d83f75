"""What a site's people have said yes to: a site takes part on terms that they know, and on no others."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError
from typing_extensions import TypedDict

from halfmoon.federation.protocol.offered import Offered
from halfmoon.storage import atomic_io

ENDED = "ended.json"
"""The file in a site's home that says that its part is over, and why."""

OFFERED, AGREED = "offered.json", "agreed.json"
"""Files in a site's home: the terms that are offered and wait for a yes, and the hashes of those that have had one."""

ANY = "any"
PINNED = re.compile(r"any|[0-9a-f]{8,64}")
"""What `--terms` may say: `ANY`, or a hash or its beginning."""


class _Ended(TypedDict):
    code: int
    said: str


class _Agreed(TypedDict):
    terms: list[str]


@dataclass(frozen=True)
class Consent:
    """What a site with this `home` takes part in.

    `terms` are the first digits of the hash of the only terms that will do, `ANY` for all, or "" for those that its
    people have agreed to (`agree`). `methods` are those that it accepts, all where none is named.
    """

    home: Path
    terms: str = ANY
    methods: tuple[str, ...] = ()

    def given(self, hash: str) -> bool:
        """Say whether these terms will do."""
        if self.terms:
            return self.terms == ANY or hash.startswith(self.terms)
        return hash in agreed(self.home)

    def takes(self, method: str) -> bool:
        """Say whether a federation with this method will do."""
        return not self.methods or method in self.methods

    def ask(self, terms: Offered) -> None:
        """Put down what is offered for people to see; raises OSError."""
        atomic_io.replace(self.home / OFFERED, json.dumps(asdict(terms)).encode())


def offered(home: Path) -> Offered | None:
    """Return what is offered to a site and not agreed to, None where there is nothing."""
    try:
        return TypeAdapter(Offered).validate_json(atomic_io.read(home / OFFERED) or b"", strict=True)
    except ValidationError:
        return None


def end(home: Path, code: int, words: str) -> None:
    """Put down that this site's part is over, for the process that waits for it; raises OSError."""
    atomic_io.replace(home / ENDED, json.dumps({"code": code, "said": words}).encode())


def ended(home: Path) -> tuple[int, str] | None:
    """Return with which exit code this site's part is over, and why; None where it is not."""
    try:
        held = TypeAdapter(_Ended).validate_json(atomic_io.read(home / ENDED) or b"", strict=True)
    except ValidationError:
        return None
    return held["code"], held["said"]


def withdraw(home: Path) -> None:
    """Forget what was offered, and how an earlier part ended."""
    (home / ENDED).unlink(missing_ok=True)
    (home / OFFERED).unlink(missing_ok=True)


def agreed(home: Path) -> list[str]:
    """Return the hashes of the terms that a site's people have agreed to."""
    try:
        return TypeAdapter(_Agreed).validate_json(atomic_io.read(home / AGREED) or b"", strict=True)["terms"]
    except ValidationError:
        return []


def agree(home: Path, hash: str) -> None:
    """Remember a yes to these terms; raises OSError."""
    atomic_io.replace(home / AGREED, json.dumps({"terms": sorted({*agreed(home), hash})}).encode())
    withdraw(home)
