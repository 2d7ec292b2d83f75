"""What a site keeps of each federation that it has joined: the terms, and what their server may send."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from halfmoon.federation.protocol.messages import UNKNOWN
from halfmoon.federation.protocol.terms import Terms
from halfmoon.federation.site.downlink_spec import DownlinkSpec
from halfmoon.federation.site.runtime import Refused, SiteRuntime, agreed
from halfmoon.storage import atomic_io

FEDERATIONS, TERMS, DOWNS = "federations", "terms.json", "downs.json"


def place(home: Path, federation: str) -> Path:
    """Return the folder of a federation in a site's home; raise `Refused` for what is no hash of terms."""
    if not re.fullmatch("[0-9a-f]{64}", federation):  # it becomes the name of a folder
        raise Refused(UNKNOWN, "what the server calls its federation is no hash of any.")
    return home / FEDERATIONS / federation[:16]


def terms_in(place: Path, say: Callable[[str], None]) -> Terms | None:
    """Return the terms that the site has joined; None where there are none, or they are damaged: it joins again."""
    text = atomic_io.read(place / TERMS)
    try:
        return None if text is None else Terms.parse(text.decode())
    except ValueError as error:
        say(f"{place / TERMS} is damaged, so this site has to join again: {error}")
        return None


def with_downlinks(site: SiteRuntime, terms: Terms, place: Path) -> SiteRuntime:
    """Return the site with what its server may send, which is worked out once and kept in `place`."""
    try:
        kept = json.loads(atomic_io.read(place / DOWNS) or b"")
        facts = kept["downs"].encode()
        if atomic_io.digest(facts) != kept["sha256"]:
            raise ValueError
        known = DownlinkSpec.parse(json.loads(facts), len(terms.sites))
    except (ValueError, LookupError, TypeError, AttributeError):  # damaged, or not there yet
        known = agreed(terms.text)
        downs = json.dumps(known.facts())
        kept = {"downs": downs, "sha256": atomic_io.digest(downs.encode())}
        atomic_io.replace(place / DOWNS, json.dumps(kept).encode())
    return replace(site, downlinks=known)
