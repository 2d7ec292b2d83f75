"""Lasting keys: a site's own, by which it signs its keys of a sum, and those of the other sites.

The server's people may hand out a file with a line of OpenSSH's for each site (`halfmoon federation`). Without one the
first key of a site counts, and any other one later is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halfmoon.aggregation.secure import signing
from halfmoon.core.errors import UserError
from halfmoon.federation.protocol.messages import RefusalError
from halfmoon.storage import atomic_io

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric import ec

SITE_KEY_FILE, KNOWN_KEYS_FILE = "site.key", "site_keys.json"
"""In a site's home the key that it generates for itself; in a federation's folder the keys of the others."""


@dataclass(frozen=True)
class KeyFiles:
    """The files of a site's own lasting key, and of the keys of all sites, where there are such files."""

    own: Path | None = None
    others: Path | None = None

    def load(self, home: Path) -> ec.EllipticCurvePrivateKey:
        """Return the site's lasting key, generated in its home where it has none; raise UserError."""
        path = self.own or home / SITE_KEY_FILE
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

    def public(self, home: Path) -> str:
        return signing.public(self.load(home).public_key()).hex()


def read_private_json(path: Path) -> dict[str, Any] | None:
    """Return what a site has put down for itself, None where it has not; raise UserError for a damaged file."""
    facts = atomic_io.read_json(path)
    if facts is None and atomic_io.read(path) is not None:
        raise UserError(f"{path} is damaged: put it back from a backup; the round goes on without this site.")
    return facts


def read_keys(path: Path) -> dict[str, bytes]:
    """Return each site's public key in a file of OpenSSH's lines, whose comments are the names; raise UserError."""
    data = atomic_io.read(path)
    if data is None:
        raise UserError(f"{path} is not there: it has the keys of all sites, and comes from the server's people.")
    keys: dict[str, bytes] = {}
    for number, line in enumerate(data.splitlines(), start=1):
        words = line.split()
        if not words or line.startswith(b"#"):
            continue
        try:
            name, key = words[2].decode(), signing.point(b" ".join(words[:2]))
        except (ValueError, LookupError) as error:
            raise UserError(f"{path}, line {number}: it must be a public key and a site's name.") from error
        if keys.setdefault(name, key) != key:
            raise UserError(f"{path}, line {number}: {name} has two keys.")
    return keys


@dataclass(frozen=True)
class KnownKeys:
    """The keys of a federation's sites: from a `file` that people handed out, else those that came first."""

    names: Sequence[str]
    folder: Path
    file: Path | None = None
    say: Callable[[str], None] = lambda _: None

    def check(self, keys: Mapping[int, bytes]) -> None:
        """Raise `RefusalError` unless these are the sites' keys, by number; remember new ones."""
        if self.file is not None:
            self._compare(read_keys(self.file), keys)
            return
        path = self.folder / KNOWN_KEYS_FILE
        before = read_private_json(path)
        record = dict(before or {})
        for number, key in keys.items():
            name = self.names[number]
            if record.setdefault(name, key.hex()) != key.hex():
                raise RefusalError(
                    f"the server says that {name} has another key ({fingerprint(key)}) than before. Where its people confirm "
                    f"that, {KNOWN_KEYS_FILE} is removed here."
                )
        if record == before:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        atomic_io.replace(path, atomic_io.render(record), private=True)
        for number, key in keys.items():
            if self.names[number] not in (before or {}):
                self.say(
                    f"from now on the key of {self.names[number]} is {fingerprint(key)}; its people can confirm that"
                )

    def _compare(self, listed: Mapping[str, bytes], keys: Mapping[int, bytes]) -> None:
        for number, key in keys.items():
            name = self.names[number]
            if listed.get(name) != key:
                which = "another key" if name in listed else "a key"
                where = "than the file of keys says" if name in listed else "but the file of keys has none"
                raise RefusalError(
                    f"the server says that {name} has {which} ({fingerprint(key)}) {where}. Where its people confirm it, the "
                    "server's people hand out a new file."
                )


def fingerprint(key: bytes) -> str:
    """Return a key's fingerprint."""
    try:
        return signing.fingerprint(key)
    except ValueError:
        return "none that can be read"
