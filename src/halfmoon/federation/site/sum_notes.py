"""What a site puts down of masked sums: its secret of the sum that is under way, and what it has answered in each.

The secret of one sum lies in one file of a run's folder. It is overwritten and gone before the last answer of that sum
leaves the site, or when another sum begins; nothing else that a site keeps opens what it has sent.
"""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halfmoon.aggregation.secure.masking import KEY
from halfmoon.core.errors import UserError
from halfmoon.federation.protocol.messages import UNFIT, Request
from halfmoon.federation.site.runtime import Refused
from halfmoon.storage import atomic_io

SUMS, SECRET = "sums", "secret"
"""In a run's folder: notes of sums, and among them the secret of the one that is under way."""

SESSION = 32
"""Bytes by which a server tells a sum from one of the same query that it had to begin anew."""


@dataclass(frozen=True)
class Fresh:
    """The secret of a sum, 32 random bytes, and which sum that is."""

    path: Path
    sum: str

    def begin(self) -> bytes:
        """Return the secret, drawn where this sum has none yet; that of any other sum is erased."""
        held = self.held()
        if held is None:
            erase(self.path)
            held = secrets.token_bytes(KEY)
            self.path.parent.mkdir(parents=True, exist_ok=True)
            atomic_io.replace(self.path, held + self.sum.encode(), private=True)
        return held

    def held(self) -> bytes | None:
        """Return the secret; None where it was erased, or there is that of another sum."""
        data = atomic_io.read(self.path) or b""
        return data[:KEY] if data[KEY:] == self.sum.encode() else None


def erase(path: Path) -> None:
    """Overwrite a file with zeros and remove it; where it is not there, do nothing. Raises OSError.

    A disk may keep older copies of what was overwritten, as flash memory and copying file systems do.
    """
    try:
        with atomic_io.opened(path, os.O_WRONLY) as handle:
            atomic_io.write_all(handle, bytes(os.fstat(handle).st_size))
            os.fsync(handle)
    except FileNotFoundError:
        return
    path.unlink(missing_ok=True)
    atomic_io.sync_folder(path.parent)


def forget(folder: Path) -> None:
    """Erase the secrets of all sums of the federation in a folder: it is over."""
    for path in folder.glob(f"*/{SUMS}/{SECRET}"):
        erase(path)


class Answered:
    """What a site has answered in the sums of one client update: one answer a stage, on the disk before it is given."""

    def __init__(self, folder: Path, request: Request) -> None:
        name = f"{request.round:06d}-{request.attempt:03d}-{request.query:03d}.json"
        self.path = folder / name
        held = atomic_io.read_json(self.path)
        if held is None and atomic_io.read(self.path) is not None:
            raise UserError(f"{self.path} is damaged: put it back from a backup; the round goes on without this site.")
        self._held = held or {}

    def begin(self, session: str) -> None:
        """Forget what was answered in another session, but of which sites' sum shares were told."""
        if self._held.get("session") != session:
            told = self._held.get("told")
            self._held = {"session": session} | ({} if told is None else {"told": told})
            self._write()

    def has(self, stage: str) -> bool:
        """Say whether a stage was answered."""
        return stage in self._held

    def get(self, stage: str) -> Any:
        """Return what was put down of a stage."""
        return self._held[stage]

    def once(self, stage: str, facts: Any) -> None:
        """Put facts down, or raise `Refused` where there are others."""
        if stage not in self._held:
            self._held[stage] = facts
            self._write()
        if self._held[stage] != facts:
            raise Refused(UNFIT, "this site has answered for that round already, and this is another question.")

    def _write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        atomic_io.replace(self.path, atomic_io.render(self._held), private=True)
