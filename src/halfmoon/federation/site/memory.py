"""What a site remembers of a run: a file a client update, so that each starts from the memory of the last client update
that counted.

A site does not know which of its visits count: an answer may be lost or late, a round may be played again with others,
and a server that was killed plays its last round or two again. The server knows, and says with every request which
visit that was; older files go when it says that it will not go back so far.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError

from halfmoon.core import tree
from halfmoon.core.tree import Tree
from halfmoon.storage import atomic_io, serialization

_FILE = re.compile(r"memory-(\d{6,})-(\d{3,})-(\d{3,})-([0-9a-f]{16})\.safetensors")
RoundKey = tuple[int, int, int]
"""A round, the attempt at it, and a query, all from 0."""


@dataclass(frozen=True)
class Memory:
    """A `halfmoon.api.types.StateStore` of one client during the client update `at`, in `folder`, which belongs to one
    run.

    `known` is the client update whose memory counts, None before the first one. `warn` hears where that is damaged or
    missing; the one before it then counts.
    """

    folder: Path
    at: RoundKey
    known: RoundKey | None
    device: torch.device
    warn: Callable[[str], None]

    def get(self, key: str) -> Tree | None:
        """Return what is remembered of the last client update that counted, None where there is nothing; raises
        OSError."""
        if self.known is None:
            return None
        files = [(visit, path) for visit, path in _files(self.folder) if visit <= self.known]
        if not files or files[-1][0] != self.known:
            self.warn(f"the memory of round {self.known[0] + 1} is missing: {_INSTEAD}")
        for _, path in reversed(files):
            found = _read(path)
            if found is not None:
                return tree.map(lambda leaf: leaf.to(self.device, copy=True), found)
            self.warn(f"{path.name} is damaged: {_INSTEAD}")
        return None

    def put(self, key: str, tree: Tree) -> None:
        """Keep what is remembered after this client update, whole or not at all; raises OSError where the disk
        refuses."""
        data = serialization.pack_file(tree)
        round, attempt, query = self.at
        name = f"memory-{round:06d}-{attempt:03d}-{query:03d}-{atomic_io.digest(data)[:16]}.safetensors"
        self.folder.mkdir(parents=True, exist_ok=True)
        atomic_io.replace(self.folder / name, data)
        for visit, path in _files(self.folder):  # of the same visit, asked for before a server was killed
            if visit == self.at and path.name != name:
                path.unlink(missing_ok=True)

    def keys(self) -> list[str]:
        """Return nothing: a site has one client, whose memory is asked for by number."""
        return []


_INSTEAD = "what was remembered before it counts; put it back from a backup."


def settle(folder: Path, safe: RoundKey | None) -> None:
    """Remove what is older than `safe`, the oldest visit from which the server may still go on; raises OSError."""
    for visit, path in _files(folder):
        if safe is not None and visit < safe:
            path.unlink(missing_ok=True)


def visit_of(numbers: Sequence[int]) -> RoundKey | None:
    """Return the client update that three numbers name, None for no numbers; raises ValueError for others."""
    if not numbers:
        return None
    if len(numbers) != 3 or not all(type(each) is int and each >= 0 for each in numbers):
        raise ValueError("a visit is a round, an attempt and a trip, from 0")
    return (numbers[0], numbers[1], numbers[2])


def _read(path: Path) -> Tree | None:
    """Return the tree in a file, None where it is damaged."""
    match = _FILE.fullmatch(path.name)
    if match is None or not atomic_io.digest(path.read_bytes()).startswith(match[4]):
        return None
    try:
        return serialization.map_file(path)
    except SafetensorError:
        return None


def _files(folder: Path) -> list[tuple[RoundKey, Path]]:
    """Return the files by visit, the oldest first."""
    if not folder.is_dir():
        return []
    found = ((_FILE.fullmatch(path.name), path) for path in folder.iterdir())
    return sorted(((int(match[1]), int(match[2]), int(match[3])), path) for match, path in found if match)
