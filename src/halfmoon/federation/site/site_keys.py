"""Lasting keys: a site's own, by which it signs its keys of a sum, and those of the others, known or remembered.

Known are those in the file that the server's people hand out (`halfmoon federation`): a line of OpenSSH's for each
site. Of a site that stands in no file the first key counts, and any other one later is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from halfmoon.aggregation.secure import signing
from halfmoon.core.errors import UserError
from halfmoon.federation.protocol.messages import UNFIT
from halfmoon.federation.site.runtime import Refused
from halfmoon.storage import atomic_io

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric import ec

OWN, KNOWN = "site.key", "site_keys.json"
"""In a site's home the key that it makes where it was given none; in a federation's folder the keys of the others."""


@dataclass(frozen=True)
class KeyFiles:
    """A site's own lasting key, where it was given one, and the file with those of all sites, where there is one."""

    own: Path | None = None
    others: Path | None = None

    def loaded(self, home: Path) -> ec.EllipticCurvePrivateKey:
        """Return the site's lasting key: the one it was given, else that of its home, made where there is none.

        Raise UserError where it cannot be read.
        """
        path = self.own or home / OWN
        data = atomic_io.read(path)
        if data is None:
            if self.own is not None:
                raise UserError(f"{path} is not there: it is the key by which others know this site.")
            data = signing.generate()
            atomic_io.replace(path, data, private=True)
        try:
            return signing.loaded(data)
        except ValueError as error:
            raise UserError(f"{path} is no private key (elliptic curve, in OpenSSH's format): {error}.") from error

    def shown(self, home: Path) -> str:
        """Return the public half of the site's lasting key, in hexadecimal; raise UserError."""
        return signing.public(self.loaded(home).public_key()).hex()


def listed(path: Path) -> dict[str, bytes]:
    """Return the public key of each site in a file of lines of OpenSSH's, whose comments are the sites' names.

    Raise UserError where it cannot be read as such a file.
    """
    data = atomic_io.read(path)
    if data is None:
        raise UserError(f"{path} is not there: it has the keys of all sites, and comes from the server's people.")
    found: dict[str, bytes] = {}
    for number, line in enumerate(data.splitlines(), start=1):
        words = line.split()
        if not words or line.startswith(b"#"):
            continue
        try:
            name, key = words[2].decode(), signing.point(b" ".join(words[:2]))
        except (ValueError, LookupError) as error:
            raise UserError(f"{path}, line {number}: it must be a public key and a site's name.") from error
        if found.setdefault(name, key) != key:
            raise UserError(f"{path}, line {number}: {name} has two keys.")
    return found


@dataclass(frozen=True)
class KnownSites:
    """The keys of a federation's sites as one of them knows them: `names` by number, `folder` is the federation's.

    `file` has the keys that people have handed out, where there is one; `say` hears of keys that are remembered.
    """

    names: Sequence[str]
    folder: Path
    file: Path | None = None
    say: Callable[[str], None] = lambda _: None

    def check(self, keys: Mapping[int, bytes]) -> None:
        """Raise `Refused` unless these are the sites' keys, by number; remember those that were not known."""
        if self.file is not None:
            self._listed(listed(self.file), keys)
            return
        path = self.folder / KNOWN
        held = atomic_io.read_json(path)
        if held is None and atomic_io.read(path) is not None:
            raise UserError(f"{path} is damaged: put it back from a backup; the round goes on without this site.")
        known = dict(held or {})
        for number, key in keys.items():
            name = self.names[number]
            if known.setdefault(name, key.hex()) != key.hex():
                raise Refused(
                    UNFIT,
                    f"the server says that {name} has another key ({mark(key)}) than before. Where its people confirm "
                    f"that, {KNOWN} is removed here.",
                )
        if known == held:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        atomic_io.replace(path, atomic_io.render(known), private=True)
        for number, key in keys.items():
            if self.names[number] not in (held or {}):
                self.say(f"from now on the key of {self.names[number]} is {mark(key)}; its people can confirm that")

    def _listed(self, known: Mapping[str, bytes], keys: Mapping[int, bytes]) -> None:
        for number, key in keys.items():
            name = self.names[number]
            if known.get(name) != key:
                what = "another key" if name in known else "a key"
                where = "than the file of keys says" if name in known else "but the file of keys has none"
                raise Refused(
                    UNFIT,
                    f"the server says that {name} has {what} ({mark(key)}) {where}. Where its people confirm it, the "
                    "server's people hand out a new file.",
                )


def mark(key: bytes) -> str:
    """Return a key's fingerprint."""
    try:
        return signing.fingerprint(key)
    except ValueError:
        return "none that can be read"
