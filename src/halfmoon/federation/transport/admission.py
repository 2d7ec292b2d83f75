"""Admission while a federation is served: sites' keys, registered with the SuperLink and bound to their names.

Flower knows nodes by keys and calls them by numbers. A file says which number each site's key has; the server's program
believes no node another name than that (`halfmoon.federation.server.sessions`).
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from halfmoon.core.errors import UserError
from halfmoon.federation.transport.internals import ControlApi, Node
from halfmoon.sites.keys import Access
from halfmoon.storage import atomic_io

KEYS_FILE = "keys.json"  # the file with whose key each node has, among those of Flower's processes
POLL_SECONDS = 3.0  # seconds between two polls of the keys and of the nodes
HOUR = 3600.0  # seconds between two warnings of what runs out
TIMEOUT_SECONDS = 10.0  # seconds that the SuperLink has for an answer


def to_pem(line: bytes) -> bytes:
    """Return a public key's line of OpenSSH as Flower compares keys; raise ValueError where it is none."""
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_ssh_public_key

    return load_ssh_public_key(line).public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


class Admission:
    """Registers the keys of an access folder, and writes into the file `path` which node has whose key."""

    def __init__(
        self, access: Access, registry: ControlApi, path: Path, names: Sequence[str], say: Callable[[str], None],
        now: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self.folder, self.registry, self.path, self.names, self.say, self.now = (
            access.folder, registry, path, names, say, now,
        )  # fmt: skip
        self._access = access
        self._keys: dict[bytes, str] = {}
        self._stamp: object = None
        self._last_poll, self._last_warning = -1e9, -1e9
        self._lines: set[str] = set()

    def open(self) -> None:
        """Register the keys with a SuperLink that has just started; raise UserError where that fails."""
        self._read()
        try:
            self._agree()
        except (ConnectionError, ValueError) as error:
            raise UserError(f"the keys of {self.folder} cannot be registered with the SuperLink: {error}.") from error
        missing = [name for name in self.names if name not in self._access.sites]
        if missing:
            self._once(f"{', '.join(missing)} of this federation cannot come in: {self.folder} has no key of theirs")
        self._warn()

    def poll(self) -> None:
        """Take in what has changed, if it is time; what fails is said once, and tried again at the next poll."""
        if self.now() - self._last_poll < POLL_SECONDS:
            return
        try:
            self._read()
        except UserError as error:
            self._once(f"who may come in stays as it was: {error}")
        try:
            self._agree()
        except ValueError as error:
            self._once(f"Flower does not say who is registered: {error}")
        except ConnectionError:
            pass  # a SuperLink that does not answer is noticed by whoever watches its process
        self._warn()
        self._last_poll = self.now()

    def _read(self) -> None:
        stamp = self._access.stamp()
        if stamp == self._stamp:
            return
        access = Access.open(self.folder)
        keys = {}
        for name, path in access.sites.items():
            try:
                keys[to_pem(path.read_bytes())] = name
            except (OSError, ValueError) as error:
                raise UserError(f"{path} is no public key ({error}).") from error
        self._access, self._keys, self._stamp = access, keys, stamp

    def _agree(self) -> None:
        """Bring the registered keys to those of the folder: first who may not come in, then who may."""
        nodes = self.registry.nodes()
        may = {node.key: node for node in nodes if node.key in self._keys}
        before = _written(self.path)
        self._write(may)  # before Flower is told: what a removed site answers counts no more from here on
        for node in nodes:
            if node.key not in self._keys:
                self.registry.unregister(node.number)
                self.say(self._left(node.number, before.get(str(node.number), {}).get("name")))
        new = [key for key in self._keys if key not in may]
        for key in new:
            name = self._keys[key]
            try:
                may[key] = Node(self.registry.register(key, name), key, "")
            except ValueError as error:
                self._once(
                    f"{name} cannot come in: its key was removed from this run earlier, or Flower does not take it "
                    f"({error}); give it a new one: halfmoon federation rotate {self.folder} --site {name}"
                )
                continue
            self._write(may)
            self.say(f"{name} may come in: its key is registered")

    def _left(self, number: int, name: str | None) -> str:
        if name is None:
            return f"node {number} was registered by others: its key is removed"
        if name in self._keys.values():
            return f"the old key of {name} is removed"
        return f"{name} may not come in any more: its key is removed"

    def _write(self, may: Mapping[bytes, Node]) -> None:
        nodes = {str(node.number): {"name": self._keys[key], "since": node.since} for key, node in sorted(may.items())}
        if _written(self.path) == nodes and self.path.exists():
            return
        try:
            atomic_io.write_atomically(self.path, (json.dumps({"nodes": nodes}, indent=1) + "\n").encode())
        except OSError as error:  # Flower is told all the same
            self._once(f"{self.path} cannot be written: {atomic_io.error_reason(error)}")

    def _warn(self) -> None:
        """Say what runs out soon; a sentence counts the days, so it comes once a day."""
        if self.now() - self._last_warning < HOUR:
            return
        self._last_warning = self.now()
        try:
            warnings = self._access.warnings()
        except (OSError, ValueError):  # of a folder that cannot be read `poll` has told
            return
        for words in warnings:
            self._once(words)

    def _once(self, words: str) -> None:
        if words not in self._lines:
            self._lines.add(words)
            self.say(words)


def _written(path: Path) -> dict[str, dict[str, str]]:
    return (atomic_io.read_json(path) or {}).get("nodes", {})
