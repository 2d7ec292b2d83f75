"""The user's cache is bounded, and what was used last stays."""

import os
from pathlib import Path

from halfmoon.core.user_cache import trim


def test_the_least_recently_used_go_first(tmp_path: Path) -> None:
    """Three pairs of 10 + 1 bytes under a limit of 25: the oldest goes, the one that is kept counts, too."""
    for age, name in enumerate(("new", "kept", "old")):
        for suffix, size in ((".npy", 10), (".json", 1)):
            path = tmp_path / f"{name}{suffix}"
            path.write_bytes(bytes(size))
            os.utime(path, (1000 - age, 1000 - age))
    os.utime(tmp_path / "new.json", (1, 1))  # files of one name go together, by the one that was used last
    trim(tmp_path, "kept", cap=25)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kept.json", "kept.npy", "new.json", "new.npy"]
    trim(tmp_path, "kept", cap=0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kept.json", "kept.npy"]
