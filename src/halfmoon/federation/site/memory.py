"""The memory of a site in a run: one file a client update; each update starts from the last one that counted.

A site does not know which of its updates count: an answer may be lost or late, a round may be played again with others,
and a server that was killed plays its last rounds again. The server says with every request which update counted last,
and how far back it may still go; older files are removed.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError

from halfmoon.core import tree
from halfmoon.core.tree import Tree
from halfmoon.federation.protocol.messages import RoundKey
from halfmoon.storage import atomic_io, serialization

_FILE = re.compile(r"memory-(\d{6,})-(\d{3,})-(\d{3,})-([0-9a-f]{16})\.safetensors")
_INSTEAD = "what was remembered before it counts; put it back from a backup."


@dataclass(frozen=True)
class Memory:
    """A `StateStore` of one client in the client update `at`, which goes on from `latest`; `warn` hears of damage."""

    folder: Path
    at: RoundKey
    latest: RoundKey | None
    device: torch.device
    warn: Callable[[str], None]

    def get(self, key: str) -> Tree | None:
        """Return the memory of the last client update that counted, None where there is none; raises OSError."""
        if self.latest is None:
            return None
        files = [(at, path) for at, path in _files(self.folder) if at <= self.latest]
        if not files or files[-1][0] != self.latest:
            self.warn(f"the memory of round {self.latest[0] + 1} is missing: {_INSTEAD}")
        for _, path in reversed(files):
            memory = _read(path)
            if memory is not None:
                return tree.map(lambda leaf: leaf.to(self.device, copy=True), memory)
            self.warn(f"{path.name} is damaged: {_INSTEAD}")
        return None

    def put(self, key: str, tree: Tree) -> None:
        """Write the memory of this client update, whole or not at all; raises OSError where the disk refuses."""
        data = serialization.pack_file(tree)
        round, attempt, query = self.at
        name = f"memory-{round:06d}-{attempt:03d}-{query:03d}-{atomic_io.digest(data)[:16]}.safetensors"
        self.folder.mkdir(parents=True, exist_ok=True)
        atomic_io.replace(self.folder / name, data)
        for at, path in _files(self.folder):  # of the same update, requested before a server was killed
            if at == self.at and path.name != name:
                path.unlink(missing_ok=True)

    def keys(self) -> list[str]:
        """Return nothing: a site has one client, whose memory is read by number."""
        return []


def settle(folder: Path, oldest: RoundKey | None) -> None:
    """Remove what is older than `oldest`, from which the server may still go on; raises OSError."""
    for at, path in _files(folder):
        if oldest is not None and at < oldest:
            path.unlink(missing_ok=True)


def round_key(numbers: Sequence[int]) -> RoundKey | None:
    """Return the client update that three numbers name, None for no numbers; raises ValueError for others."""
    if not numbers:
        return None
    if len(numbers) != 3 or not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError("it must be a round, an attempt and a query, from 0")
    return (numbers[0], numbers[1], numbers[2])


def _read(path: Path) -> Tree | None:
    match = _FILE.fullmatch(path.name)
    if match is None or not atomic_io.digest(path.read_bytes()).startswith(match[4]):
        return None
    try:
        return serialization.map_file(path)
    except SafetensorError:
        return None


def _files(folder: Path) -> list[tuple[RoundKey, Path]]:
    if not folder.is_dir():
        return []
    matches = ((_FILE.fullmatch(path.name), path) for path in folder.iterdir())
    return sorted(((int(match[1]), int(match[2]), int(match[3])), path) for match, path in matches if match)
