"""One process a folder, also where the file system has no locks: said, replaced, and taken over from the dead."""

import errno
import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from halfmoon.core.errors import UserError
from halfmoon.storage import atomic_io, locks
from halfmoon.storage.folder_writer import FolderInUse
from halfmoon.storage.locks import LockConflict
from halfmoon.storage.run_folder import RunFolder


@pytest.fixture
def lockless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the file system have no locks, as some network ones do (ENOLCK)."""
    import fcntl

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)


def test_a_lock_of_the_system_needs_no_file_and_no_remark(tmp_path: Path):
    one = locks.acquire(tmp_path / "l")
    with pytest.raises(LockConflict):
        locks.acquire(tmp_path / "l")
    one.free()
    repeated = locks.acquire(tmp_path / "l")
    assert repeated.warning == ""
    repeated.free()
    assert [path.name for path in tmp_path.iterdir()] == ["l"]


@pytest.mark.usefixtures("lockless")
def test_without_locks_a_file_keeps_the_second_one_out_and_it_is_said(tmp_path: Path):
    """The sentence names the process that is there, and what to do where it is not; afterwards nothing is left."""
    one = locks.acquire(tmp_path / "l")
    assert "has no locks" in one.warning
    with pytest.raises(LockConflict, match=r"is at work.*remove the file"):
        locks.acquire(tmp_path / "l")
    one.free()
    locks.acquire(tmp_path / "l").free()
    assert [path.name for path in tmp_path.iterdir()] == ["l"]


@pytest.mark.usefixtures("lockless")
@pytest.mark.parametrize("change", [{"process": 2**22 + 1}, {"began": "1"}, {"boot": "another"}])
def test_the_file_of_a_dead_process_is_replaced(tmp_path: Path, change: dict[str, object]):
    """Its number is nobody's, or by now another process', or the machine has started anew."""
    one = locks.acquire(tmp_path / "l")
    metadata = json.loads(one.owner.read_bytes())
    one.owner.write_text(json.dumps({**metadata, **change}))
    two = locks.acquire(tmp_path / "l")
    assert json.loads(one.owner.read_bytes()) == metadata
    two.free()


@pytest.mark.usefixtures("lockless")
def test_the_file_of_another_machine_and_a_damaged_one_are_left_to_people(tmp_path: Path):
    """Nobody here can say whether that process lives."""
    owner = tmp_path / "l.owner"
    owner.write_text('{"host": "elsewhere", "process": 7, "boot": "", "began": ""}')
    with pytest.raises(LockConflict, match="process 7 on elsewhere"):
        locks.acquire(tmp_path / "l")
    host = socket.gethostname()
    for text in ("{", f'{{"host": "{host}", "process": 1e999}}', f'{{"host": "{host}", "process": {10**30}}}'):
        owner.write_text(text)
        with pytest.raises(LockConflict, match="cannot be read"):
            locks.acquire(tmp_path / "l")


@pytest.mark.usefixtures("lockless")
def test_two_runs_never_share_a_folder_without_locks(tmp_path: Path):
    """What the review found: both ended with 0, and rounds stood twice in metrics.jsonl."""
    with RunFolder.create(tmp_path / "run", "", "a" * 64) as folder:
        assert "has no locks" in folder.lock_warning
        with pytest.raises(FolderInUse, match="another process is running"):
            RunFolder.open(tmp_path / "run").log({"round": 1})
    with RunFolder.open(tmp_path / "run") as repeated:
        repeated.log({"round": 1})


@pytest.mark.usefixtures("lockless")
def test_a_killed_process_leaves_a_file_that_the_next_one_takes_over(tmp_path: Path):
    code = (
        "import fcntl, os, sys\n"
        "def refuse(*_): raise OSError(37, 'No locks available')\n"
        "fcntl.flock = refuse\n"
        "from pathlib import Path; from halfmoon.storage import locks\n"
        "locks.acquire(Path(sys.argv[1])); os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", code, tmp_path / "l"], check=False).returncode == -9
    assert (tmp_path / "l.owner").exists()
    lock = locks.acquire(tmp_path / "l")
    assert atomic_io.parse_json((tmp_path / "l.owner").read_bytes())["process"] != 0
    lock.free()


@pytest.mark.usefixtures("lockless")
def test_folders_of_keys_and_of_images_are_one_processs_without_locks_too(tmp_path: Path):
    """A change, a preparation or an export beside another one is refused with who is at work; afterwards all continue."""
    from halfmoon.sites.folders.prepare import _lock_state_folder
    from halfmoon.sites.keys import make
    from halfmoon.sites.keys.key_folder import LOCK_FILE

    keys = tmp_path / "keys"
    make.create_keys(keys, ["north"])
    assert not list(keys.rglob("*.owner"))
    make.add_site(keys, "south")
    other = locks.acquire(keys / LOCK_FILE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("halfmoon.sites.keys.key_folder.LOCK_TIMEOUT_SECONDS", 0.0)
        with pytest.raises(UserError, match=r"being changed by another process.*is at work according to"):
            make.add_site(keys, "east")
    other.free()
    make.add_site(keys, "east")
    state_folder = tmp_path / "home"
    for _ in range(2):
        with (
            _lock_state_folder(state_folder),
            pytest.raises(UserError, match=r"being prepared.*is at work according to"),
            _lock_state_folder(state_folder),
        ):
            pass
    assert not list(tmp_path.rglob("*.owner"))
