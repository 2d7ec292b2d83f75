"""`halfmoon watch` on folders that are damaged, foreign, unreadable, or removed while it watches: never an exception."""

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from halfmoon import UserError
from halfmoon.pages import follow
from halfmoon.pages.watch import WatchPage
from halfmoon.storage.events import EVENTS_FILE, SERVER_LOG, SITE_LOG

REQUEST: Any = SimpleNamespace(query_params={})


def write_lines(path: Path, *rows: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def write_run(folder: Path, method: str = "fedavg") -> None:
    write_lines(folder / "run.json", {"identity": "a", "title": method})
    (folder / "config.toml").write_text(f'method = "{method}"\nrounds = 4\nseed = 0\n')
    rows = [{"round": n, "test": {"accuracy": 0.1 * n}, "train": {"loss": 2.0 / n}} for n in range(1, 5)]
    write_lines(folder / "metrics.jsonl", *rows)
    write_lines(folder / "timings.jsonl", *({"round": n, "seconds": 1.5} for n in range(1, 5)))


def event(name: str, **fields: object) -> dict[str, object]:
    return {"time": "2026-11-28 10:00:00", "event": name, "fields": fields, "text": "x"}


def write_folder(folder: Path, kind: str) -> None:
    if kind == "run":
        write_run(folder)
        write_lines(folder / "summary.json", {"rounds": 4, "accuracy": {"last": 0.4}})
    elif kind == "comparison":
        write_run(folder / "fedavg-seed0")
        write_lines(folder / "comparison.json", {"jobs": [{"folder": "fedavg-seed0"}]})
    elif kind == "sweep":
        write_run(folder / "runs" / "abc")
        write_lines(folder / "sweep.json", {"cells": [{"at": {"m": "a"}, "runs": [{"folder": "runs/abc", "seed": 0}]}]})
    elif kind == "server":
        write_run(folder)
        joined = event("site_joined", site="a", labeled=3, unlabeled=4)
        write_lines(folder / EVENTS_FILE, joined, event("round_finished", round=1, cohort=["a"], left_out={}))
        (folder / SERVER_LOG).write_text("x\n")
    else:
        joined = event("joined", federation="f", method="fedavg", rounds=4)
        trained = event("trained", round=1, received="a", work="b", sent="c", loss=1.0)
        write_lines(folder / ".halfmoon" / EVENTS_FILE, joined, trained, event("finished", accuracy=0.5))
        (folder / ".halfmoon" / SITE_LOG).write_text("x\n")


ROWS = (
    b'{"round": 3, "test": 5, "train": [], "pseudo": "x", "cost": 3}\n'
    b'{"round": 4, "test": {"accuracy": "high"}, "train": {"loss": "x"}, "cohort": "a", "cost": {"bytes_up": "x"}}\n'
    b'{"round": 5, "test": {"accuracy": NaN}, "train": {"loss": Infinity}}\n{"round": 6, "test": {"accuracy": true}}\n'
)
CELLS = b'{"cells": [3, {"at": 3}, {"at": {"a": 1}, "runs": [{"folder": 5}]}, {"at": {"a": 1}, "runs": 7}], "jobs": {"a": 1}}\n'
EVENTS = "".join(
    f"{json.dumps(row)}\n"
    for row in (
        event("round_finished", round="x", cohort=5, left_out=[1]),
        event("site_joined", site=["a"], labeled="x"),
        event("joined", federation="f"),
        event("trained", round="x"),
        event("evaluated", images="test", accuracy="x", rounds=1),
        event("finished"),
        {**event("site_joined"), "fields": 3},
    )
).encode()
CONTENTS = (b"", b"\x00\xff\xfe", b"{", b"null\n", b"[]\n", b"3\n", b'{"accuracy": 3, "rounds": "x"}\n')
CONTENTS += (b"method = 3\nrounds = 'x'\nseed = []\n", ROWS, CELLS, EVENTS)


def write_content(content: bytes) -> Callable[[Path], None]:
    return lambda path: path.write_bytes(content) and None


def replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def replace_by_loop(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.name)


def close_file(path: Path) -> None:
    path.chmod(0)


CHANGES = [*map(write_content, CONTENTS), replace_by_folder, replace_by_loop, Path.unlink, close_file]


def get_data(page: WatchPage) -> dict[str, Any]:
    data = page.get_data(REQUEST)
    json.dumps(data, allow_nan=False)
    return data


@pytest.fixture
def open_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder that another user can read: pytest closes its folders to others, also those of other sessions."""
    monkeypatch.setattr(follow, "SCAN_SECONDS", 0.0)  # look for runs at each update
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


def as_user(read: Callable[[], object]) -> object:
    """Call a function as a user without special rights."""
    if os.geteuid():
        return read()
    os.seteuid(65534)
    try:
        return read()
    finally:
        os.seteuid(0)


@pytest.mark.parametrize("kind", ["run", "comparison", "sweep", "server", "site"])
def test_a_damaged_file_is_skipped(kind: str, open_folder: Path) -> None:
    """Each file is replaced by each wrong content before the page is opened, and while it is open."""
    write_folder(open_folder / "original", kind)
    files = [
        path.relative_to(open_folder / "original") for path in (open_folder / "original").rglob("*") if path.is_file()
    ]
    opened = 0
    for file in files:
        for change in CHANGES:
            for is_open in (False, True):
                root = open_folder / "watched"
                shutil.rmtree(root, ignore_errors=True)
                shutil.copytree(open_folder / "original", root)
                if not is_open:
                    change(root / file)
                try:
                    page: Any = as_user(lambda: WatchPage(root))  # noqa: B023
                except UserError:
                    continue  # counted below
                if is_open:
                    as_user(lambda: get_data(page))  # noqa: B023
                    change(root / file)
                as_user(lambda: get_data(page))  # noqa: B023
                opened += 1
    assert opened > 1.5 * len(files) * len(CHANGES)


@pytest.mark.parametrize("kind", ["run", "comparison", "sweep", "server", "site"])
@pytest.mark.parametrize("change", ["removed", "replaced", "closed", "subfolders closed"])
def test_a_folder_may_vanish_while_it_is_watched(kind: str, change: str, open_folder: Path) -> None:
    root = open_folder / "watched"
    write_folder(root, kind)
    page: Any = as_user(lambda: WatchPage(root))
    before: Any = as_user(lambda: get_data(page))
    folders = [path for path in root.rglob("*") if path.is_dir()]
    if change == "closed":
        root.chmod(0)
    elif change == "subfolders closed":
        for folder in folders:
            folder.chmod(0)
    else:
        shutil.rmtree(root)
        if change == "replaced":
            root.write_text("x")
    after: Any = as_user(lambda: get_data(page))
    assert len(after["runs"]) == len(before["runs"])  # what was read remains on the page
    if change == "closed":
        with pytest.raises(UserError, match="cannot be read"):
            as_user(lambda: WatchPage(root))
    if root.is_dir():
        root.chmod(0o755)
        for folder in folders:
            folder.chmod(0o755)


def test_other_folders(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert get_data(WatchPage(tmp_path / "empty"))["runs"] == []  # a run may start there
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "notes.txt").write_text("x")
    for name, sentence in (("foreign", "has no run"), ("nowhere", "there is no such folder")):
        with pytest.raises(UserError, match=sentence):
            WatchPage(tmp_path / name)
    write_run(tmp_path / "many" / os.fsdecode(b"\xff"))
    for number in range(follow.MAX_RUNS + 3):
        write_run(tmp_path / "many" / f"{number:03}")
    data = get_data(WatchPage(tmp_path / "many"))
    assert (len(data["runs"]), data["left_out"]) == (follow.MAX_RUNS, 4)
