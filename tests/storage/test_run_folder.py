"""Run folders: what is written returns, and no kill, damage or full disk takes more than the last step."""

import errno
import json
import os
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from test_state_store import same

from halfmoon.core.errors import UserError
from halfmoon.core.tree import Tree, flatten
from halfmoon.storage import integrity
from halfmoon.storage.folder_writer import WriteError
from halfmoon.storage.run_folder import RunFolder
from halfmoon.storage.state_store import TreeStore

ONE = "a1" * 32
OTHER = "b2" * 32


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[RunFolder]:
    with RunFolder.create(tmp_path / "run", "rounds = 3\n", ONE) as made:
        yield made


def state_of(round: int) -> Tree:
    return {"server": {"w": torch.full((3, 2), float(round))}, "step": torch.tensor(round)}


def write_rounds(folder: RunFolder, rounds: range) -> None:
    for round in rounds:
        folder.log({"round": round})
        folder.save(round, state_of(round), {"next": round + 1})


def reopened(folder: RunFolder) -> RunFolder:
    folder.close()
    return RunFolder.open(folder.path)


def test_round_trip_keeps_every_bit_and_the_order(folder: RunFolder) -> None:
    images = torch.randn(4, 3, 5, 5).to(memory_format=torch.channels_last)
    shared = torch.arange(6.0)
    state = {
        "z": {"late": torch.tensor(7), "nan": torch.tensor([float("nan"), float("inf"), -0.0])},
        "a": {"images": images, "double": torch.tensor(0.1, dtype=torch.float64)},
        "shared": {"one": shared, "two": shared, "part": shared[2:4]},
        "sliced": torch.arange(12).reshape(3, 4).t()[::2].contiguous(),
        "bytes": torch.tensor([1, 255], dtype=torch.uint8),
        "none": torch.empty(0, 3),
        "mask": torch.tensor([True, False]),
        "memory": {},
    }
    meta = {"rng": 2**60 + 1, "rate": 0.1, "names": ["a", "ü"], "nothing": None}
    folder.save(0, state, meta)
    loaded = reopened(folder).load()
    assert loaded.round == 0
    assert loaded.meta == meta
    assert loaded.warnings == []
    assert same(loaded.state, state)
    assert loaded.state["memory"] == {}
    assert loaded.state["a"]["images"].stride() == (75, 1, 15, 3)


def test_views_without_contiguous_memory_keep_their_values(folder: RunFolder) -> None:
    wide = torch.arange(24.0).reshape(4, 6)
    state = {"strided": wide[:, ::2], "expanded": torch.tensor([[1.0], [2.0]]).expand(2, 3)}
    folder.save(0, state, {})
    loaded = reopened(folder).load()
    assert loaded.state["strided"].tolist() == [[0, 2, 4], [6, 8, 10], [12, 14, 16], [18, 20, 22]]
    assert loaded.state["expanded"].tolist() == [[1, 1, 1], [2, 2, 2]]


@settings(max_examples=15)
@given(
    st.recursive(
        st.tuples(st.sampled_from(["float32", "float64", "int64"]), st.lists(st.integers(0, 3), max_size=3)),
        lambda inner: st.dictionaries(st.text("abz01.", min_size=1, max_size=3), inner, max_size=4),
        max_leaves=8,
    ).filter(lambda tree: isinstance(tree, dict)),
    st.randoms(use_true_random=False),
)
def test_any_tree_round_trips(tmp_path_factory: pytest.TempPathFactory, drawn: Any, chance: random.Random) -> None:
    def grow(node: Any) -> Any:
        if isinstance(node, dict):
            return {key: grow(value) for key, value in node.items()}
        kind, shape = node
        count = 8 * torch.Size(shape).numel() if shape else 8
        raw = torch.frombuffer(bytearray(chance.randbytes(max(count, 8))), dtype=torch.uint8)
        leaf = raw.view(getattr(torch, kind))[: torch.Size(shape).numel()].reshape(shape).clone()
        order = list(range(leaf.dim()))
        chance.shuffle(order)
        return leaf.permute(order)

    state = grow(drawn)
    with RunFolder.create(tmp_path_factory.mktemp("any") / "run", "", ONE) as folder:
        folder.save(3, state, {})
        folder.close()
        loaded = folder.load()
    plain = {path: leaf.numpy().tobytes() for path, leaf in flatten(loaded.state).items()}
    assert plain == {path: leaf.numpy().tobytes() for path, leaf in flatten(state).items()}
    assert list(plain) == list(flatten(state))


def test_the_folder_holds_what_it_says(folder: RunFolder) -> None:
    write_rounds(folder, range(5))
    folder.log_timing({"round": 4, "seconds": 1.5})
    checkpoints = {f"checkpoint-00000{round}.{kind}" for round in (3, 4) for kind in ("safetensors", "json")}
    others = {".lock", "run.json", "config.toml", "metrics.jsonl", "timings.jsonl"}
    assert {entry.name for entry in folder.path.iterdir()} == checkpoints | others
    assert folder.config == "rounds = 3\n"
    assert folder.identity == ONE
    assert RunFolder.open(folder.path).config == "rounds = 3\n"


def test_rows_are_json_with_null_for_what_is_not_finite(folder: RunFolder) -> None:
    row = {"round": 1, "b": 0.1, "a": [float("nan"), {"x": float("-inf")}], "flag": True, "none": None}
    folder.log(row)
    text = (folder.path / "metrics.jsonl").read_text()
    assert text == '{"round": 1, "b": 0.1, "a": [null, {"x": null}], "flag": true, "none": null}\n'
    assert folder.rows() == [{"round": 1, "b": 0.1, "a": [None, {"x": None}], "flag": True, "none": None}]


def test_load_before_any_save_is_none_and_forgets_the_rows(folder: RunFolder) -> None:
    folder.log({"round": 0})
    repeated = reopened(folder)
    assert repeated.load() is None
    assert repeated.rows() == []


def test_load_cuts_the_rows_back_to_the_checkpoint(folder: RunFolder) -> None:
    write_rounds(folder, range(2))
    folder.log({"round": 2})
    folder.log_timing({"seconds": 1.0})
    for name in ("metrics.jsonl", "timings.jsonl"):
        with (folder.path / name).open("a") as file:
            file.write('{"round": 3, "tr')  # the line that a kill cut off
    assert [row["round"] for row in folder.rows()] == [0, 1, 2]
    repeated = reopened(folder)
    assert repeated.load() is not None
    assert (folder.path / "metrics.jsonl").read_text() == '{"round": 0}\n{"round": 1}\n'
    repeated.log_timing({"seconds": 2.0})
    assert (folder.path / "timings.jsonl").read_text() == '{"seconds": 1.0}\n{"seconds": 2.0}\n'


def test_a_kill_before_the_oldest_checkpoint_goes_leaves_no_third(folder: RunFolder) -> None:
    """A save writes the new checkpoint before it removes the oldest: a run that has no round left saves no more."""
    write_rounds(folder, range(1, 3))
    stored = {path: path.read_bytes() for path in folder.path.glob("checkpoint-000001.*")}
    write_rounds(folder, range(3, 4))
    for path, data in stored.items():
        assert not path.exists()
        path.write_bytes(data)
    repeated = reopened(folder)
    loaded = repeated.load()
    assert loaded.round == 3
    assert {path.stem for path in folder.path.glob("checkpoint-*")} == {"checkpoint-000002", "checkpoint-000003"}


def test_lost_rows_are_said(folder: RunFolder) -> None:
    write_rounds(folder, range(3))
    with (folder.path / "metrics.jsonl").open("r+b") as file:
        file.truncate(5)
    with pytest.raises(UserError, match="has 5 bytes, but the checkpoint was written at 39"):
        reopened(folder).load()


def test_a_changed_row_is_named(folder: RunFolder) -> None:
    (folder.path / "metrics.jsonl").write_text('{"round": 0}\n{"round"\n{"round": 2}\n')
    with pytest.raises(UserError, match="line 2"):
        folder.rows()


def test_saving_an_old_round_is_refused(folder: RunFolder) -> None:
    write_rounds(folder, range(3))
    before = (folder.path / "checkpoint-000002.json").stat().st_mtime_ns
    folder.save(2, state_of(2), {"next": 3})
    assert (folder.path / "checkpoint-000002.json").stat().st_mtime_ns == before
    with pytest.raises(ValueError, match="round 2 is on disk already"):
        folder.save(2, state_of(5), {"next": 3})
    with pytest.raises(ValueError, match="round 1 cannot be saved"):
        folder.save(1, state_of(1), {})
    with pytest.raises(ValueError, match="load the newest"):
        reopened(folder).save(3, state_of(3), {})


def flips(data: bytes) -> Iterator[bytes]:
    """Yield the file with one byte changed, at every 97th place and at both ends, in three ways."""
    for position in {*range(0, len(data), 97), len(data) - 1}:
        for mask in (0x01, 0x20, 0xFF):
            changed = bytearray(data)
            changed[position] ^= mask
            yield bytes(changed)


@pytest.mark.parametrize("suffix", ["safetensors", "json"])
def test_a_changed_byte_is_found(folder: RunFolder, suffix: str) -> None:
    state = {"w": torch.randn(300), "n": torch.tensor(3)}
    folder.save(0, state, {})
    folder.save(1, state, {"list": list(range(200))})
    pair = {path.name: path.read_bytes() for path in folder.path.glob("checkpoint-000001.*")}
    target = f"checkpoint-000001.{suffix}"
    tried = 0
    for changed in flips(pair[target]):
        for name, data in {**pair, target: changed}.items():
            (folder.path / name).write_bytes(data)
        loaded = folder.load()
        assert loaded.round == 0
        assert len(loaded.warnings) == 1
        assert loaded.warnings[0].startswith("checkpoint-000001 is damaged (")
        assert loaded.warnings[0].endswith("continuing from checkpoint-000000.")
        assert not (folder.path / target).exists()
        tried += 1
    assert tried >= 30
    for name, data in pair.items():
        (folder.path / name).write_bytes(data)
    whole = folder.load()
    assert whole.round == 1


@pytest.mark.parametrize("suffix", ["safetensors", "json"])
@pytest.mark.parametrize("length", [0, 1, 9, -1, None])
def test_a_cut_or_missing_half_is_found(folder: RunFolder, suffix: str, length: int | None) -> None:
    write_rounds(folder, range(2))
    target = folder.path / f"checkpoint-000001.{suffix}"
    if length is None:
        target.unlink()
    else:
        target.write_bytes(target.read_bytes()[:length])
    loaded = reopened(folder).load()
    assert loaded.round == 0
    assert same(loaded.state, state_of(0))
    assert "checkpoint-000001 is damaged" in loaded.warnings[0]
    assert [row["round"] for row in folder.rows()] == [0]


def test_all_checkpoints_damaged_is_an_error_that_removes_nothing(folder: RunFolder) -> None:
    write_rounds(folder, range(3))
    for round in (1, 2):
        (folder.path / f"checkpoint-{round:06d}.safetensors").write_bytes(b"no")
    before = {entry.name for entry in folder.path.iterdir()}
    with pytest.raises(UserError, match=r"every checkpoint is damaged \(checkpoint-000002: checksum differs"):
        reopened(folder).load()
    assert {entry.name for entry in folder.path.iterdir()} == before


def test_another_version_of_torch_is_said(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.save(0, state_of(0), {})
    monkeypatch.setattr(torch, "__version__", "9.9.9")
    loaded = reopened(folder).load()
    assert "(now 9.9.9)" in loaded.warnings[0]


def test_save_flushes_before_it_renames_and_removes_last(folder: RunFolder) -> None:
    """Metrics first; then each file: make, write, flush, rename, flush the folder; then the oldest pair goes."""
    write_rounds(folder, range(2))
    folder.log({"round": 2})
    with dying(1000, "never") as calls:
        folder.save(2, state_of(2), {})
    whole = ["open", "write", "fsync", "replace", "open", "fsync"]
    assert calls == ["open", "fsync", *whole, *whole, "unlink", "unlink"]


class Killed(BaseException):
    """Stands for SIGKILL: nothing after it runs, and no handler of OSError sees it."""


CALLS = ("open", "write", "fsync", "replace")
OTHERS = (*CALLS, "unlink", "ftruncate", "remove", "rename")
WHEN = pytest.mark.parametrize("when", ["amid", pytest.param("after", marks=pytest.mark.nightly)])
"""Before a call is after the one before it."""


@contextmanager
def replaced(act: Callable[..., Any], names: Sequence[str]) -> Iterator[None]:
    """Have act(name, real, *args) stand for functions of `os`."""
    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            patch.setattr(os, name, partial(act, name, getattr(os, name)))
        yield


@contextmanager
def dying(at: int, when: str, names: Sequence[str] = OTHERS) -> Iterator[list[str]]:
    """Let the process die after its `at`-th call of these of `os`, or amid it, of which a write does half."""
    calls: list[str] = []

    def act(name: str, real: Callable[..., Any], *args: Any, **rest: Any) -> Any:
        if len(calls) > at:
            raise Killed  # a dead process makes no call
        calls.append(name)
        if len(calls) - 1 != at:
            return real(*args, **rest)
        calls.append("dead")
        if when == "after":
            real(*args, **rest)
        elif name == "write":
            real(args[0], bytes(args[1])[: len(args[1]) // 2])
        raise Killed

    with replaced(act, names):
        yield calls


def killed(at: int, when: str, act: Callable[[], Any], names: Sequence[str] = OTHERS) -> bool:
    """Say whether a process that dies at this call came to it."""
    with dying(at, when, names):
        try:
            act()
        except Killed:
            return True
    return False


@WHEN
def test_a_kill_at_any_call_of_create_can_be_started_again(tmp_path: Path, when: str) -> None:
    for at in count():
        path = tmp_path / f"{at}"
        dead = killed(at, when, lambda path=path: RunFolder.create(path, "x = 1\n", ONE).close())
        if (path / "config.toml").exists():
            with pytest.raises(UserError, match="unfinished run of this configuration"):
                RunFolder.create(path, "x = 1\n", ONE)
        else:
            RunFolder.create(path, "x = 1\n", ONE).close()
        assert RunFolder.open(path).load() is None
        if not dead:
            break


@WHEN
def test_a_kill_at_any_call_of_finish_leaves_an_unfinished_or_a_finished_run(tmp_path: Path, when: str) -> None:
    for at in count():
        folder = RunFolder.create(tmp_path / f"{at}", "", ONE)
        write_rounds(folder, range(2))
        dead = killed(at, when, partial(folder.finish, state_of(1), {}, {"accuracy": 0.5}))
        repeated = reopened(folder)
        if repeated.finished:
            assert (repeated.path / "model.safetensors").exists()
        else:
            assert repeated.load().round == 1
        if not dead:
            break


def memory_of(client: str, round: int) -> Tree:
    return {"w": torch.full((10,), float(round)), "of": torch.tensor(ord(client))}


def kept_at(round: int) -> dict[str, Tree]:
    """Return what there is after a round: b changes in each, a in every other, c is there once, d comes and goes."""
    stored = {"a": memory_of("a", round - round % 2), "b": memory_of("b", round), "c": memory_of("c", 0)}
    return {**stored, "d": memory_of("d", round)} if round % 3 == 1 else stored


def update_clients(folder: RunFolder, store: TreeStore, rounds: range) -> None:
    """Run rounds and save each with what its clients keep."""
    for round in rounds:
        folder.log({"round": round})
        before = kept_at(round - 1) if round else {}
        now = kept_at(round)
        for key in before.keys() - now.keys():
            store.discard(key)
        for key, value in now.items():
            if key not in before or not same(before[key], value):
                store.put(key, value)
        folder.save(round, state_of(round), {"next": round + 1}, store)


def assert_stored(store: TreeStore, round: int) -> None:
    wanted = kept_at(round) if round >= 0 else {}
    assert store.keys() == sorted(wanted)
    for key, value in wanted.items():
        found = store.get(key)
        assert found is not None
        assert same(found, value)


def resume_run(folder: RunFolder, cap: int) -> tuple[TreeStore, int, list[str]]:
    """Return what a new process continues with: the clients' store, the last round, and what was reported."""
    loaded = folder.load()
    store = TreeStore(None, cap)
    if loaded is None:
        return store, -1, []
    store.restore(loaded.clients)
    assert same(loaded.state, state_of(loaded.round))
    return store, loaded.round, loaded.warnings


def files_of(path: Path) -> dict[str, bytes]:
    return {
        e.relative_to(path).as_posix(): e.read_bytes() for e in path.rglob("*") if e.is_file() and e.name != ".lock"
    }


def straight_clients(path: Path, rounds: int) -> dict[str, bytes]:
    with RunFolder.create(path, "", ONE) as folder:
        update_clients(folder, TreeStore(), range(rounds))
    return files_of(path)


def test_the_clients_lie_beside_the_checkpoints(folder: RunFolder) -> None:
    """After round 4 (kept: 3 and 4): a of 2 and 4, b of 3 and 4, d of 4; a method without memory has no folder."""
    write_rounds(folder, range(2))
    assert not (folder.path / "clients").exists()
    update_clients(folder, TreeStore(), range(2, 5))
    trees = ("a-000002", "a-000004", "b-000003", "b-000004", "d-000004")
    files = {f"{name}.{kind}" for name in trees for kind in ("copy", "safetensors")}
    found = {e.name for e in (folder.path / "clients").iterdir()}
    assert found == files | {"manifest.jsonl", "manifest.second"}
    note = json.loads((folder.path / "checkpoint-000004.json").read_text())
    assert note["clients"]["length"] == (folder.path / "clients" / "manifest.jsonl").stat().st_size


@pytest.mark.parametrize("cap", [0, 10**6])
def test_the_clients_of_a_checkpoint_come_back(tmp_path: Path, cap: int) -> None:
    wanted = straight_clients(tmp_path / "straight", 6)
    folder = RunFolder.create(tmp_path / "run", "", ONE)
    store = TreeStore(None, cap)
    update_clients(folder, store, range(4))
    store.put("b", memory_of("b", 99))  # of a round that was not saved
    store.put("x", memory_of("x", 99))
    folder = reopened(folder)
    store, last, output = resume_run(folder, cap)
    assert (last, output) == (3, [])
    assert_stored(store, 3)
    update_clients(folder, store, range(4, 6))
    assert_stored(store, 5)
    assert files_of(folder.path) == wanted


@pytest.mark.parametrize("clients", [10, 200])
def test_the_bytes_of_a_checkpoint_depend_on_its_round_alone(folder, monkeypatch, clients):
    """Five clients of a round keep 4 kB each: with 10 or 200 registered it writes 21 to 25 kB."""
    store = TreeStore()
    written = 0
    for client in range(clients):
        store.put(str(client), {"w": torch.full((1000,), float(client))})
    folder.save(0, state_of(0), {}, store)
    real = os.write

    def count(handle: int, data: bytes) -> int:
        nonlocal written
        written += len(data)
        return real(handle, data)

    monkeypatch.setattr(os, "write", count)
    for round in range(1, 4):
        for client in range(5):
            store.put(str(client + 5 * (round % 2)), {"w": torch.full((1000,), float(round))})
        before = written
        folder.save(round, state_of(round), {}, store)
        assert 21_000 < written - before < 25_000


@WHEN
@pytest.mark.parametrize(("first", "cap"), [(0, 60), (2, 0), (4, 10**6)])
def test_a_kill_at_any_call_loses_no_client(tmp_path: Path, when: str, first: int, cap: int) -> None:
    """Of a round with spills and of its save: the old or the new round returns, and ends as if nothing had been."""
    wanted = straight_clients(tmp_path / "straight", first + 3)
    seen: set[int] = set()
    for at in count():
        folder = RunFolder.create(tmp_path / f"{at}", "", ONE)
        store = TreeStore(None, cap)
        update_clients(folder, store, range(first))
        dead = killed(at, when, partial(update_clients, folder, store, range(first, first + 1)))
        repeated = reopened(folder)
        store, last, output = resume_run(repeated, cap)
        assert last in (first - 1, first)
        assert all("was not completed: the .json is missing" in each for each in output)
        assert_stored(store, last)
        assert not [path for path in repeated.path.rglob("*") if path.name.endswith((".spill", ".partial"))]
        update_clients(repeated, store, range(last + 1, first + 3))
        repeated.close()
        assert files_of(repeated.path) == wanted
        seen.add(last)
        if not dead:
            break
    assert at >= 15
    assert seen == {first - 1, first}


def test_the_clients_are_on_disk_before_the_checkpoint_names_them(folder: RunFolder) -> None:
    """Metrics; a changed client: write, flush, rename; manifest: write, flush; its folder; then the checkpoint as ever.
    At the end the oldest checkpoint goes, then what only it named. A save of 5 (kept: 3 and 5) in which no client
    has changed writes nothing for them, and removes b of 2, which round 3 replaced. A save of 6 (kept: 5 and 6) in
    which b has removes no client's file: what it replaces is named by 5."""
    store = TreeStore()
    update_clients(folder, store, range(4))
    before = {e.name for e in (folder.path / "clients").iterdir()}
    with dying(1000, "never") as calls:
        folder.save(5, state_of(5), {}, store)
    whole = ["open", "write", "fsync", "replace", "open", "fsync"]
    assert calls == ["open", "fsync", *whole, *whole, *["unlink"] * 4]
    gone = before - {e.name for e in (folder.path / "clients").iterdir()}
    assert gone == {"b-000002.safetensors", "b-000002.copy"}
    store.put("b", memory_of("b", 6))
    with dying(1000, "never") as calls:
        folder.save(6, state_of(6), {}, store)
    client = ["open", "write", "open", "fsync", "replace"]
    manifest = ["open", "write", "open", "fsync", "open", "write", "open", "fsync", "open", "fsync"]
    assert calls == ["open", "fsync", *client, *manifest, *whole, *whole, *["unlink"] * 2]


def test_a_damaged_client_falls_back_and_is_said(tmp_path: Path) -> None:
    """A file, or a line of the manifest, that only the newest checkpoint (of round 3) names; nothing else is lost."""
    wanted = straight_clients(tmp_path / "straight", 6)
    damage = {
        "b-000003.safetensors": "checksum of clients/b-000003.safetensors differs",
        "manifest.jsonl": "clients/manifest.jsonl was changed or cut",
    }
    for name, why in damage.items():
        for act in ("flip", "remove"):
            folder = RunFolder.create(tmp_path / f"{name}-{act}", "", ONE)
            update_clients(folder, TreeStore(), range(4))
            path = folder.path / "clients" / name
            for copy in (path.with_suffix(".copy"), path.with_name("manifest.second")):
                copy.unlink(missing_ok=True)
            if act == "flip":
                data = bytearray(path.read_bytes())
                data[-20] ^= 0x04
                path.write_bytes(data)
            elif name == "manifest.jsonl":
                path.write_bytes(path.read_bytes()[:-1])
            else:
                path.unlink()
                why = "clients/b-000003.safetensors cannot be read: No such file or directory"
            repeated = reopened(folder)
            store, last, output = resume_run(repeated, 0)
            assert last == 2
            assert output == [f"checkpoint-000003 is damaged ({why}); continuing from checkpoint-000002."]
            assert_stored(store, 2)
            update_clients(repeated, store, range(3, 6))
            repeated.close()
            assert files_of(repeated.path) == wanted


def test_going_on_leaves_the_checkpoint_to_fall_back_on_whole(folder: RunFolder) -> None:
    """Loaded once and damaged then: the older of the two still has all its clients."""
    update_clients(folder, TreeStore(), range(4))
    repeated = reopened(folder)
    assert resume_run(repeated, 0)[1] == 3
    (folder.path / "checkpoint-000003.safetensors").write_bytes(b"")
    store, last, _ = resume_run(reopened(repeated), 0)
    assert last == 2
    assert_stored(store, 2)


@pytest.mark.parametrize("name", ["c-000000.safetensors", "manifest.jsonl", "c-000000.copy", "manifest.second"])
@pytest.mark.parametrize("act", ["flip", "cut", "remove"])
def test_a_damaged_file_of_both_checkpoints_is_whole_again_from_its_copy(folder: RunFolder, name: str, act: str):
    """An idle client's file, and the manifest of all, are there twice; what was done is reported, and nothing is lost."""
    update_clients(folder, TreeStore(), range(4))
    path = folder.path / "clients" / name
    before = path.read_bytes()
    path.write_bytes(bytes([before[0] ^ 1]) + before[1:] if act == "flip" else before[: len(before) // 2])
    if act == "remove":
        path.unlink()
    _, last, output = resume_run(reopened(folder), 0)
    assert last == 3
    second = path.suffix in (".copy", ".second")
    assert output == ([] if second else [f"clients/{name} was damaged and has been restored from its copy."])
    assert second or path.read_bytes() == before


def test_a_client_damaged_twice_in_both_checkpoints_is_an_error_that_removes_nothing(folder: RunFolder) -> None:
    update_clients(folder, TreeStore(), range(4))
    (folder.path / "clients" / "c-000000.copy").write_bytes(b"")
    shared = folder.path / "clients" / "c-000000.safetensors"
    shared.write_bytes(shared.read_bytes()[:-1])
    before = files_of(folder.path)
    why = "clients/c-000000.safetensors was cut"
    message = f"every checkpoint is damaged \\(checkpoint-000003: {why}; checkpoint-000002: {why}"
    with pytest.raises(UserError, match=message):
        reopened(folder).load()
    assert files_of(folder.path) == before


def test_a_round_is_saved_again_only_with_the_same_clients(folder: RunFolder) -> None:
    store = TreeStore()
    update_clients(folder, store, range(2))
    before = files_of(folder.path)
    folder.save(1, state_of(1), {"next": 2}, store)
    store.put("a", memory_of("a", 7))
    with pytest.raises(ValueError, match="round 1 is on disk already"):
        folder.save(1, state_of(1), {"next": 2}, store)
    assert files_of(folder.path) == before


def test_clients_of_a_first_save_that_was_killed_are_forgotten(folder: RunFolder) -> None:
    store = TreeStore(None, 0)
    with dying(12, "before"), pytest.raises(Killed):
        update_clients(folder, store, range(1))
    assert list((folder.path / "clients").iterdir())
    assert reopened(folder).load() is None
    assert [path for path in (folder.path / "clients").iterdir() if path.suffix != ".jsonl"] == []


def test_a_finished_run_keeps_nothing_to_go_on_with(folder: RunFolder) -> None:
    update_clients(folder, TreeStore(), range(2))
    before = set(files_of(folder.path))
    folder.finish({}, {}, {})
    gone = before - set(files_of(folder.path))
    assert gone == {name for name in before if name.startswith(("checkpoint-", "clients/"))}
    assert len(gone) > 4


def test_a_checkpoint_of_an_older_halfmoon_is_not_taken_for_one_without_clients(folder: RunFolder) -> None:
    folder.save(0, state_of(0), {})
    path = folder.path / "checkpoint-000000.json"
    note = json.loads(path.read_text())
    del note["clients"], note["sha256"]
    path.write_bytes(integrity.format_checked(note))
    with pytest.raises(UserError, match="an older halfmoon wrote it"):
        reopened(folder).load()


@contextmanager
def refusing(at: int, code: int) -> Iterator[list[str]]:
    """Let the `at`-th writing call, and all after it, fail with an OSError; a write puts half of its bytes down."""
    calls: list[str] = []

    def act(name: str, real: Callable[..., Any], *args: Any, **rest: Any) -> Any:
        if name == "open" and not args[1] & os.O_CREAT:
            return real(*args, **rest)
        calls.append(name)
        if len(calls) <= at:
            return real(*args, **rest)
        if name == "write":
            real(args[0], bytes(args[1])[: len(args[1]) // 2])
        raise OSError(code, os.strerror(code))

    with replaced(act, CALLS):
        yield calls


@pytest.mark.parametrize(("cap", "code"), [(0, errno.ENOSPC), (10**6, errno.EACCES)])
def test_a_disk_that_refuses_leaves_the_checkpoints_before(tmp_path: Path, cap: int, code: int) -> None:
    """At whichever call: one sentence, and the run continues to the bytes of one whose disk was never full."""
    wanted = straight_clients(tmp_path / "straight", 6)
    for at in count():
        folder = RunFolder.create(tmp_path / f"{at}", "", ONE)
        store = TreeStore(None, cap)
        update_clients(folder, store, range(4))
        failed = cause = None
        with refusing(at, code):
            try:
                update_clients(folder, store, range(4, 5))
            except UserError as error:
                failed = str(error)
                cause = error.__cause__
                if isinstance(error, WriteError):
                    assert "the checkpoint of round 3 is intact" in failed
                    assert f"halfmoon resume {folder.path}" in failed
        if failed is None:
            break
        assert isinstance(cause, OSError)
        assert os.strerror(code) in failed
        assert ("free some space" in failed) == (code == errno.ENOSPC)
        assert not [path for path in folder.path.rglob("*") if path.name.endswith(".partial")]
        repeated = reopened(folder)
        store, last, output = resume_run(repeated, cap)
        assert last in (3, 4)
        assert output == []
        assert_stored(store, last)
        update_clients(repeated, store, range(last + 1, 6))
        repeated.close()
        assert files_of(repeated.path) == wanted
    assert at >= 15


def test_a_first_save_that_fails_says_that_nothing_was_saved(folder: RunFolder) -> None:
    with refusing(1, errno.ENOSPC), pytest.raises(WriteError, match="no checkpoint was written yet"):
        folder.save(0, state_of(0), {})
    repeated = reopened(folder)
    assert repeated.load() is None
    repeated.save(0, state_of(0), {})


def test_create_refuses_what_is_taken(tmp_path: Path) -> None:
    path = tmp_path / "run"
    RunFolder.create(path, "x = 1\n", ONE).close()
    with pytest.raises(UserError, match=r"unfinished run of this configuration; `halfmoon resume \S+/run`"):
        RunFolder.create(path, "x = 1\n", ONE)
    with pytest.raises(UserError, match=r"another configuration \(a1a1a1a1, this one is b2b2b2b2\)"):
        RunFolder.create(path, "x = 2\n", OTHER)
    with RunFolder.open(path) as folder:
        folder.finish({}, {}, {"accuracy": 0.5})
    with pytest.raises(UserError, match="a finished run of this configuration"):
        RunFolder.create(path, "x = 1\n", ONE)
    assert (path / "config.toml").read_text() == "x = 1\n"


def test_create_refuses_a_folder_with_other_things_and_leaves_it_alone(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("mine")
    with pytest.raises(UserError, match="is not empty and holds no run; choose another --run-dir"):
        RunFolder.create(tmp_path, "x = 1\n", ONE)
    assert [(e.name, e.read_text()) for e in tmp_path.iterdir()] == [("config.toml", "mine")]
    with pytest.raises(UserError, match="is a file, not a folder"):
        RunFolder.create(tmp_path / "config.toml", "", ONE)
    with pytest.raises(WriteError, match="cannot be made"):
        RunFolder.create(tmp_path / "config.toml" / "run", "", ONE)


def test_create_takes_a_folder_whose_baselines_were_faster(tmp_path: Path) -> None:
    """Runs that are run side by side begin in any order: those beside a run are in its folder."""
    RunFolder.create(tmp_path / "run" / "baselines" / "fedavg", "x = 2\n", OTHER).close()
    assert not RunFolder.exists(tmp_path / "run")
    RunFolder.create(tmp_path / "run", "x = 1\n", ONE).close()
    assert RunFolder.exists(tmp_path / "run")


def test_create_takes_an_empty_folder_and_makes_parents(tmp_path: Path) -> None:
    RunFolder.create(tmp_path / "a" / "b", "", ONE).close()
    (tmp_path / "empty").mkdir()
    RunFolder.create(tmp_path / "empty", "", ONE).close()
    assert RunFolder.open(tmp_path / "empty").identity == ONE


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="root may write everywhere")
def test_create_under_a_folder_without_rights(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(WriteError, match="Permission denied"):
        RunFolder.create(tmp_path / "run", "", ONE)


def test_open_refuses_what_is_no_run(tmp_path: Path, folder: RunFolder) -> None:
    with pytest.raises(UserError, match="is not a run folder"):
        RunFolder.open(tmp_path / "nowhere")
    with pytest.raises(UserError, match="is not a run folder"):
        RunFolder.open(tmp_path)
    config = folder.path / "config.toml"
    config.write_text("rounds = 4\n")
    with pytest.raises(UserError, match=r"config\.toml was changed.*another configuration.*a1a1a1a1"):
        RunFolder.open(folder.path)
    config.unlink()
    with pytest.raises(UserError, match=r"was stopped before its config\.toml was written; start it again"):
        RunFolder.open(folder.path)
    folder.log({"round": 1})
    with pytest.raises(UserError, match=r"config\.toml cannot be read"):
        RunFolder.open(folder.path)


def test_close_frees_the_folder(folder: RunFolder) -> None:
    folder.log({})
    other = RunFolder.open(folder.path)
    assert other.rows() == [{}]  # reading is free
    for write in (lambda: other.load(), lambda: other.log({}), lambda: other.save(0, {}, {})):
        with pytest.raises(UserError, match=f"another process is running in {folder.path}"):
            write()
    folder.close()
    folder.close()
    other.log({})


def test_finish_writes_the_model_and_its_metadata(folder: RunFolder) -> None:
    model = {"params": {"w": torch.randn(2, 3).t()}, "stats": {"n": torch.tensor(5)}}
    meta = {"classes": '["a", "ü"]', "config": folder.config, "size": "8"}
    assert not folder.finished
    assert folder.summary() is None
    folder.finish(model, meta, {"accuracy": {"last": 0.5, "best": float("nan")}})
    assert folder.finished
    assert folder.summary() == {"accuracy": {"last": 0.5, "best": None}}
    with safe_open(folder.path / "model.safetensors", "pt") as file:
        output = file.metadata()
        assert len(output.pop("sha256")) == 64
        assert output == meta
        assert sorted(file.keys()) == ["params/w", "stats/n"]
        assert torch.equal(file.get_tensor("params/w"), model["params"]["w"])
        assert file.get_tensor("stats/n").item() == 5
    with pytest.raises(UserError, match="is finished"):
        reopened(folder).load()


def test_the_model_file_has_the_same_bytes_in_every_process(folder: RunFolder) -> None:
    """Metadata stand in their order: safetensors alone orders eight keys differently in (nearly) every process."""
    folder.finish({"w": torch.ones(3)}, {k: k for k in "abcdefgh"}, {})
    data = (folder.path / "model.safetensors").read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    assert [*header, *header["__metadata__"]] == ["__metadata__", "w", *"abcdefgh", "sha256"]


def test_the_lock_survives_json_of_any_shape(folder: RunFolder) -> None:
    for text in ("[]", "{", "3", json.dumps({"identity": 3})):
        (folder.path / "run.json").write_text(text)
        with pytest.raises(UserError, match="is not a run folder"):
            RunFolder.open(folder.path)
