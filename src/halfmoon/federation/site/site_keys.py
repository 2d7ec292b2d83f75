"""Long-term keys: the one with which a site signs its keys of a secure sum, and those of the other sites.

The server's people may distribute a file with the public keys of all sites, one OpenSSH line each (`halfmoon
federation`). Without that file a site trusts the first key that it sees of each other site, and refuses a different one
later.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halfmoon.aggregation.secure import signing
from halfmoon.core.errors import UserError
from halfmoon.federation.protocol.messages import RefusalError
from halfmoon.storage import atomic_io
from halfmoon.storage.events import EventRecorder, NullRecorder

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric import ec

SITE_KEY_FILE = "site.key"  # in a site's state folder: the key that it generates for itself
KNOWN_KEYS_FILE = "site_keys.json"  # in a federation's folder: the keys of the other sites


@dataclass(frozen=True)
class KeyFiles:
    """Files with keys that the site's people provide.

    Attributes:
        private_key: this site's long-term key; None to generate one.
        public_keys: the public keys of all sites; None to trust the first key of each.
    """

    private_key: Path | None = None
    public_keys: Path | None = None

    def load(self, state_folder: Path) -> ec.EllipticCurvePrivateKey:
        """Load this site's long-term private key, with which it signs its keys of each secure sum.

        If the site's people provide no file, a key is generated and stored in the state folder at the first call.

        Raises:
            UserError: the provided file is missing, or a file has no valid key.
        """
        path = self.private_key or state_folder / SITE_KEY_FILE
        data = atomic_io.read(path)
        if data is None:
            if self.private_key is not None:
                raise UserError(f"{path} does not exist: it is the key by which the other sites identify this site.")
            data = signing.generate_private_key()
            atomic_io.write_atomically(path, data, private=True)
        try:
            return signing.load_private_key(data)
        except ValueError as error:
            raise UserError(f"{path} is no private key (elliptic curve, in OpenSSH's format): {error}.") from error

    def public(self, state_folder: Path) -> str:
        """Return this site's public key in hexadecimal."""
        return signing.encode_public_key(self.load(state_folder).public_key()).hex()


def read_private_json(path: Path) -> dict[str, Any] | None:
    """Read a JSON file that the site wrote for itself; None if it is missing. Raises UserError for a damaged file."""
    record = atomic_io.read_json(path)
    if record is None and atomic_io.read(path) is not None:
        raise UserError(f"{path} is damaged: restore it from a backup; the round goes on without this site.")
    return record


def read_keys(path: Path) -> dict[str, bytes]:
    """Read the public keys of sites.

    Args:
        path: a file with one OpenSSH line for each site; the line's comment is the name of the site.

    Returns:
        The key of each site by its name, as a point on its elliptic curve (`signing.parse_public_key`).

    Raises:
        UserError: the file is missing or invalid.
    """
    data = atomic_io.read(path)
    if data is None:
        raise UserError(f"{path} does not exist: get the file with the keys of all sites from the server's people.")
    keys: dict[str, bytes] = {}
    for number, line in enumerate(data.splitlines(), start=1):
        columns = line.split()
        if not columns or line.startswith(b"#"):
            continue
        try:
            name = columns[2].decode()  # the columns are the type of the key, the key in Base64, and the comment
            key = signing.parse_public_key(b" ".join(columns[:2]))
        except (ValueError, LookupError) as error:
            raise UserError(f"{path}, line {number}: it must be a public key and a site's name.") from error
        if keys.setdefault(name, key) != key:
            raise UserError(f"{path}, line {number}: {name} has two keys.")
    return keys


@dataclass(frozen=True)
class KnownKeys:
    """The long-term public keys of a federation's sites.

    Attributes:
        names: names of the sites, by number.
        folder: the federation's folder, in which the first key of each site is stored.
        file: a file with all keys that the server's people distribute; None to trust the first key of each site.
        log: the site's log.
    """

    names: Sequence[str]
    folder: Path
    file: Path | None = None
    log: EventRecorder = field(default_factory=NullRecorder)

    def check(self, keys: Mapping[int, bytes]) -> None:
        """Check long-term keys of other sites that the server sent, as SSH checks the keys of hosts.

        With a file of keys they must be those in the file. Without it the first key of each site is trusted and
        stored, and a different one is refused later.

        Args:
            keys: the public key of each site, by number.

        Raises:
            RefusalError: a site has a different key than before or than in the file.
        """
        if self.file is not None:
            self._check_with_file(read_keys(self.file), keys)
            return
        path = self.folder / KNOWN_KEYS_FILE
        stored_keys = read_private_json(path)
        record = dict(stored_keys or {})
        for number, key in keys.items():
            name = self.names[number]
            if record.setdefault(name, key.hex()) != key.hex():
                raise RefusalError(
                    f"the server sends a different key of {name} ({fingerprint(key)}) than before. If the people of "
                    f"{name} confirm the new key, remove {KNOWN_KEYS_FILE} at this site."
                )
        if record == stored_keys:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        atomic_io.write_atomically(path, atomic_io.json_line(record), private=True)
        for number, key in keys.items():
            name = self.names[number]
            if name not in (stored_keys or {}):
                text = f"from now on the key of {name} is {fingerprint(key)}; its people can confirm that"
                self.log.record("key_trusted", text, site=name, fingerprint=fingerprint(key))

    def _check_with_file(self, file_keys: Mapping[str, bytes], keys: Mapping[int, bytes]) -> None:
        """Compare the keys that the server sent with those in the file that its people distribute.

        Args:
            file_keys: the keys in the file, by the name of the site.
            keys: the keys from the server, by the number of the site.

        Raises:
            RefusalError: the file has another key or no key of a site.
        """
        for number, key in keys.items():
            name = self.names[number]
            if file_keys.get(name) == key:
                continue
            if name in file_keys:
                fault = f"the server sends a different key of {name} ({fingerprint(key)}) than the file of keys has"
            else:
                fault = f"the server sends a key of {name} ({fingerprint(key)}), but the file of keys has none"
            raise RefusalError(
                f"{fault}. If the people of {name} confirm the key, the server's people distribute a new file."
            )


def fingerprint(key: bytes) -> str:
    """Format a public key's fingerprint for a log."""
    try:
        return signing.fingerprint(key)
    except ValueError:
        return "an invalid key"
