"""What a site remembers of a federation, by round: a file a visit, so that a server that goes back finds it as it was.

A server that was killed plays its round again, one that finds its newest checkpoint damaged plays two. So a visit
starts from what was remembered before that round and trip, not from the newest; older files go when the server says
that a round is settled.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError

from halfmoon import disk, packing, tree
from halfmoon.tree import Tree

_FILE = re.compile(r"memory-(\d{6,})-(\d{3,})-([0-9a-f]{16})\.safetensors")
Visit = tuple[int, int]
"""A round and a trip, both from 0."""


@dataclass(frozen=True)
class Memory:
    """A `halfmoon.types.Shelf` of one client: what it remembered before the visit `at`, kept in `folder`.

    `warn` hears of a file that is damaged; the one before it then counts.
    """

    folder: Path
    at: Visit
    device: torch.device
    warn: Callable[[str], None]

    def get(self, key: str) -> Tree | None:
        """Return what was remembered before this visit, None where there is nothing; raises OSError."""
        for visit, path in reversed(_files(self.folder)):
            if visit >= self.at:
                continue
            data = path.read_bytes()
            match = _FILE.fullmatch(path.name)
            if match and disk.digest(data).startswith(match[3]):
                try:
                    found = packing.map_file(path)
                    return tree.map(lambda leaf: leaf.to(self.device, copy=True), found)
                except SafetensorError:
                    pass
            self.warn(f"{path.name} is damaged: what was remembered before it counts; put it back from a backup.")
        return None

    def put(self, key: str, tree: Tree) -> None:
        """Keep what is remembered after this visit, whole or not at all; raises OSError where the disk refuses."""
        data = packing.pack_file(tree)
        round, trip = self.at
        name = f"memory-{round:06d}-{trip:03d}-{disk.digest(data)[:16]}.safetensors"
        self.folder.mkdir(parents=True, exist_ok=True)
        disk.replace(self.folder / name, data)
        for visit, path in _files(self.folder):  # of the same visit in an attempt before
            if visit == self.at and path.name != name:
                path.unlink(missing_ok=True)

    def keys(self) -> list[str]:
        """Return nothing: a site has one client, whose memory is asked for by number."""
        return []


def settle(folder: Path, settled: int) -> None:
    """Remove what no round from `settled` on can start from; raises OSError."""
    before = [path for (round, _), path in _files(folder) if round < settled]
    for path in before[:-1]:
        path.unlink(missing_ok=True)


def _files(folder: Path) -> list[tuple[Visit, Path]]:
    """Return the files by visit, the oldest first."""
    if not folder.is_dir():
        return []
    found = ((_FILE.fullmatch(path.name), path) for path in folder.iterdir())
    return sorted(((int(match[1]), int(match[2])), path) for match, path in found if match)
