"""Admission of sites by their keys, which are registered with the SuperLink while a federation is served.

Flower identifies nodes by keys and numbers them. A file has the number of each site's key, so that the server's program
accepts no node under another name (`halfmoon.federation.server.sessions`).
"""

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from halfmoon.core.errors import UserError
from halfmoon.federation.transport.internals import ControlApi, Node
from halfmoon.sites.keys import Access
from halfmoon.storage import atomic_io
from halfmoon.storage.events import EventRecorder

KEYS_FILE = "keys.json"
"""File in the folder of Flower's processes with the owner of each node's key."""

POLL_SECONDS = 3.0
"""Time between two polls of keys and nodes."""

WARNING_SECONDS = 3600.0
"""Time between two checks for keys and certificates that expire soon."""

TIMEOUT_SECONDS = 10.0
"""Time limit of a reply of the SuperLink."""


def to_pem(line: bytes) -> bytes:
    """Convert a public key from OpenSSH's format to PEM, by which Flower compares keys; raises ValueError."""
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_ssh_public_key

    return load_ssh_public_key(line).public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


class Admission:
    """Register the keys of an access folder with the SuperLink, and store the owner of each node's key in a file."""

    def __init__(
        self,
        access: Access,
        registry: ControlApi,
        path: Path,
        names: Sequence[str],
        log: EventRecorder,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepare the admission of sites by their keys.

        Args:
            access: the folder with the public keys of the sites that may connect.
            registry: the register of keys of the SuperLink, the process of Flower that sites connect to.
            path: the file that names the site of each node, for the ServerApp: Flower tells it only a message's node.
            names: the sites of the federation.
            log: receives events.
            now: a clock, in seconds.
        """
        self.folder = access.folder
        self.registry = registry
        self.path = path
        self.names = names
        self.log = log
        self.now = now
        self._access = access
        self._keys: dict[bytes, str] = {}  # the site of each key in PEM
        self._stamp: object = None  # `access.stamp()` when the keys were read; another one means that files changed
        self._last_poll = -math.inf
        self._last_warning = -math.inf
        self._logged: set[str] = set()

    def open(self) -> None:
        """Register the keys of the sites with a SuperLink that has just started, and log the sites without a key.

        Raises:
            UserError: the keys cannot be read or registered.
        """
        self._read_keys()
        try:
            self._synchronize()
        except (ConnectionError, ValueError) as error:
            raise UserError(f"the keys of {self.folder} cannot be registered with the SuperLink: {error}.") from error
        missing = [name for name in self.names if name not in self._access.sites]
        if missing:
            text = f"{', '.join(missing)} of this federation cannot come in: {self.folder} has no key of theirs"
            self._log_once("site_keys_missing", text, sites=missing)
        self._warn_of_expiry()

    def poll(self) -> None:
        """Register new keys in the folder and remove deleted ones; does nothing if the last poll is too recent.

        A failure is logged once and retried at the next poll.
        """
        if self.now() - self._last_poll < POLL_SECONDS:
            return
        try:
            self._read_keys()
        except UserError as error:
            self._log_once("site_keys_unreadable", f"the admitted sites are not changed: {error}")
        try:
            self._synchronize()
        except ValueError as error:
            self._log_once("site_keys_unknown", f"Flower does not list the registered keys: {error}")
        except ConnectionError:
            pass  # the session notices a SuperLink that does not reply
        self._warn_of_expiry()
        self._last_poll = self.now()

    def _read_keys(self) -> None:
        """Read the sites' public keys, if the folder has changed since the last time.

        Raises:
            UserError: the folder or a key is damaged. The keys that were read before remain valid.
        """
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
        self._access = access
        self._keys = keys
        self._stamp = stamp

    def _synchronize(self) -> None:
        """Make the keys that are registered with the SuperLink those of the folder: remove keys, then add new ones.

        Raises:
            ConnectionError: the SuperLink cannot be reached.
            ValueError: it refuses to list or to remove nodes.
        """
        nodes = self.registry.nodes()
        admitted = {node.key: node for node in nodes if node.key in self._keys}
        earlier_owners = _read_owners(self.path)
        # Written before Flower removes a key, so that no later reply of a removed site counts: the ServerApp reads it.
        self._write_owners(admitted)
        for node in nodes:
            if node.key not in self._keys:
                self.registry.unregister(node.number)
                owner = earlier_owners.get(str(node.number), {}).get("name")
                self.log.record("key_removed", self._describe_removal(node.number, owner), node=node.number, site=owner)
        new_keys = [key for key in self._keys if key not in admitted]
        for key in new_keys:
            name = self._keys[key]
            try:
                number = self.registry.register(key, name)
                admitted[key] = Node(number, key, since="")  # it has not connected yet
            except ValueError as error:
                text = (
                    f"{name} cannot come in: its key was removed from this run earlier, or Flower does not take it "
                    f"({error}); give it a new one: halfmoon federation rotate {self.folder} --site {name}"
                )
                self._log_once("key_refused", text, site=name)
                continue
            self._write_owners(admitted)
            self.log.record("key_registered", f"{name} may come in: its key is registered", site=name)

    def _describe_removal(self, number: int, name: str | None) -> str:
        if name is None:
            return f"node {number} was registered by others: its key is removed"
        if name in self._keys.values():
            return f"the old key of {name} is removed"
        return f"{name} may not come in any more: its key is removed"

    def _write_owners(self, admitted: Mapping[bytes, Node]) -> None:
        """Write which site each node belongs to, for the server's program, which trusts no name that a node reports.

        Args:
            admitted: the nodes by their public keys.
        """
        owners = {}
        for key, node in sorted(admitted.items()):
            owners[str(node.number)] = {"name": self._keys[key], "since": node.since}
        if _read_owners(self.path) == owners and self.path.exists():
            return
        try:
            atomic_io.write_atomically(self.path, (json.dumps({"nodes": owners}, indent=1) + "\n").encode())
        except OSError as error:  # the keys are registered all the same
            self._log_once("warning", f"{self.path} cannot be written: {atomic_io.error_reason(error)}")

    def _warn_of_expiry(self) -> None:
        """Log keys and certificates that expire soon; the check is repeated every `WARNING_SECONDS`.

        A warning has the number of days that are left. Equal ones are logged once, so it appears once a day.
        """
        if self.now() - self._last_warning < WARNING_SECONDS:
            return
        self._last_warning = self.now()
        try:
            warnings = self._access.warnings()
        except (OSError, ValueError):  # `poll` has logged that the folder cannot be read
            return
        for text in warnings:
            self._log_once("expiry_warning", text)

    def _log_once(self, name: str, text: str, **fields: Any) -> None:
        """Log an event unless one with this text was logged before, because polls repeat every few seconds."""
        if text not in self._logged:
            self._logged.add(text)
            self.log.record(name, text, **fields)


def _read_owners(path: Path) -> dict[str, dict[str, str]]:
    return (atomic_io.read_json(path) or {}).get("nodes", {})
