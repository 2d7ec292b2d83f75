"""What a folder of keys holds, for people and programs to read: fingerprints and dates, nothing secret."""

from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from halfmoon.sites.keys import paths
from halfmoon.sites.keys.key_folder import Access, left, reading

SERVER, AUTHORITY = "server", "authority"


def listing(folder: Path, now: datetime | None = None) -> dict[str, Any]:
    """Return a folder's certificates with their ends, its sites with their keys, refused keys, and warnings.

    A site's `private_key` says whether that still lies here. Raise UserError where the folder is none, or damaged.
    """
    now = now or datetime.now(UTC)
    access = Access.open(folder)
    with reading(access.folder) as record:
        sites = [
            {"name": name, **asdict(site), "private_key": (access.folder / paths.private(name)).exists()}
            for name, site in record.sites.items()
        ]
    terms = {
        name: {"fingerprint": term.fingerprint, "until": f"{term.end:%Y-%m-%d}", "left": left(term.end, now)}
        for name, term in zip((AUTHORITY, SERVER), access.terms(), strict=True)
    }
    about = {"hosts": list(record.hosts), "port": record.port, "listen": record.listen}
    refused = [asdict(each) for each in record.refused]
    warnings = access.warnings(now)
    return {"folder": str(access.folder), **about, **terms, "sites": sites, "refused": refused, "warnings": warnings}
