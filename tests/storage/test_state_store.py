"""The store: what is put returns with every bit, from memory, from a spilled file and from a commit."""

import gc
import os
import random
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from halfmoon.core.errors import UserError
from halfmoon.core.tree import Tree, flatten
from halfmoon.storage import manifest
from halfmoon.storage.manifest import START, Commit, DamagedFile, StoreContents, remove_unreferenced, verify
from halfmoon.storage.state_store import StateView, TreeStore

CPU = torch.device("cpu")


def same(a: Tree | None, b: Tree | None) -> bool:
    """Compare the nesting, the order of names, types, shapes, memory order and every bit (of a NaN too)."""
    if a is None or b is None:
        return a is b

    def describe(tree: Tree) -> list:
        return [
            (key, describe(value))
            if isinstance(value, dict)
            else (key, value.dtype, value.shape, value.stride(), value.contiguous().view(-1).view(torch.uint8).tolist())
            for key, value in tree.items()
        ]

    return describe(a) == describe(b)


def ten(number: float) -> Tree:
    """Return a tree of 40 bytes."""
    return {"w": torch.full((10,), float(number))}


def named(store: TreeStore, suffix: str) -> list[str]:
    return sorted(path.name for path in store.disk.folder.glob(f"*{suffix}"))


def reread(store: TreeStore, mark: Commit, version: int = 0, cap: int = 0) -> TreeStore:
    assert store.disk.folder is not None
    repeated = TreeStore(store.disk.folder, cap)
    repeated.restore(remove_unreferenced(verify(store.disk.folder, mark), version))
    return repeated


ODD = torch.tensor([0x7FC00001, 0x7F800001, -0x400000], dtype=torch.int32).view(torch.float32)
"""NaNs that differ in bits."""

TREES: dict[str, Tree] = {
    "float32": {"w": torch.randn(3, 4), "odd": ODD, "zero": torch.tensor([-0.0, 1e-45, float("inf")])},
    "float64": {"w": torch.randn(5, dtype=torch.float64)},
    "int64": {"n": torch.tensor([2**63 - 1, -(2**63), 0])},
    "bool": {"mask": torch.tensor([[True], [False]])},
    "small types": {"h": torch.randn(3).half(), "b": torch.randn(3).bfloat16(), "u": torch.tensor([0, 255]).byte()},
    "mixed": {"z": {"b": torch.tensor([True]), "a": torch.tensor(1.5, dtype=torch.float64)}, "a": torch.arange(3)},
    "scalars": {"f": torch.tensor(0.1), "n": torch.tensor(7), "t": torch.tensor(True)},
    "no rows": {"w": torch.empty(0, 3), "n": torch.empty(0, dtype=torch.int64)},
    "empty": {},
    "empty inside": {"memory": {}, "deep": {"er": {}}},
    "channels last": {"w": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last), "t": torch.randn(2, 3).t()},
}


@pytest.mark.parametrize("name", TREES)
@pytest.mark.parametrize("where", ["memory", "spill", "commit", "spilled commit"])
def test_every_bit_comes_back(tmp_path: Path, name: str, where: str) -> None:
    store = TreeStore(tmp_path / "clients", 0 if "spill" in where else 10**6)
    store.put("17", TREES[name])
    if "commit" in where:
        store = reread(store, store.commit(0))
    assert same(store.get("17"), TREES[name])
    assert store.total_bytes() == sum(leaf.numel() * leaf.element_size() for leaf in flatten(TREES[name]).values())


def test_what_was_never_put_is_none(tmp_path: Path) -> None:
    store = TreeStore(tmp_path / "clients")
    assert store.get("17") is None
    store.discard("17")
    assert (store.keys(), store.total_bytes(), store.resident, store.changed) == ([], 0, 0, False)
    assert store.commit(0) == START
    assert not (tmp_path / "clients").exists()


def test_a_put_is_a_copy_of_its_own() -> None:
    """Neither a later change of the caller's tensor nor the rest of the memory it is a slice of is retained."""
    store = TreeStore()
    whole = torch.zeros(1000, 10)
    store.put("a", {"w": whole[3]})
    whole += 1
    found = store.get("a")
    assert found["w"].tolist() == [0.0] * 10
    assert found["w"].untyped_storage().nbytes() == 40


def test_the_least_recently_used_leave_memory_first(tmp_path: Path) -> None:
    """Entries of 40 bytes under a cap of 80: two fit. a, b, read a, put c: b goes; put d: a goes; read b: nothing."""
    store = TreeStore(tmp_path / "clients", 80)
    store.put("a", ten(1))
    store.put("b", ten(2))
    assert not (tmp_path / "clients").exists()
    assert store.get("a") is not None
    store.put("c", ten(3))
    assert (named(store, ".spill"), store.resident, store.total_bytes()) == (["b.1.spill"], 80, 120)
    store.put("d", ten(4))
    assert (named(store, ".spill"), store.resident, store.total_bytes()) == (["a.2.spill", "b.1.spill"], 80, 160)
    assert same(store.get("b"), ten(2))
    assert (named(store, ".spill"), store.resident) == (["a.2.spill", "b.1.spill"], 80)
    assert store.keys() == ["a", "b", "c", "d"]


def test_an_entry_larger_than_the_cap_goes_to_disk_alone(tmp_path: Path) -> None:
    store = TreeStore(tmp_path / "clients", 100)
    store.put("a", ten(1))
    large = {"w": torch.arange(50.0)}
    store.put("b", large)
    assert (store.resident, store.total_bytes(), named(store, ".spill")) == (40, 240, ["b.1.spill"])
    assert same(store.get("b"), large)


def test_a_new_tree_takes_the_place_of_the_old_one(tmp_path: Path) -> None:
    store = TreeStore(tmp_path / "clients", 0)
    store.put("a", ten(1))
    before = store.get("a")
    store.put("a", {"v": torch.zeros(3)})
    assert same(before, ten(1))
    assert same(store.get("a"), {"v": torch.zeros(3)})
    assert (named(store, ".spill"), store.total_bytes()) == (["a.2.spill"], 12)
    store.discard("a")
    assert (named(store, ""), store.total_bytes(), store.get("a")) == ([], 0, None)
    resident = TreeStore(tmp_path / "other", 100)
    for number in range(5):
        resident.put("a", ten(number))
    assert (resident.resident, resident.total_bytes()) == (40, 40)
    assert same(resident.get("a"), ten(4))


def test_keys_of_any_letters_have_files_of_their_own(tmp_path: Path) -> None:
    keys = ["17", "helpers/17", "helpers", "../up", "a b", "ü%", "a-000001", "a"]
    store = TreeStore(tmp_path / "clients", 0)
    for number, key in enumerate(keys):
        store.put(key, ten(number))
    repeated = reread(store, store.commit(1))
    for number, key in enumerate(keys):
        assert same(repeated.get(key), ten(number))
    assert repeated.keys() == sorted(keys)
    assert [path.name for path in tmp_path.iterdir()] == ["clients"]


def test_a_folder_of_its_own_comes_with_the_first_spill_and_goes_with_the_store(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    store = TreeStore(None, 50)
    store.put("a", ten(1))
    assert list(tmp_path.iterdir()) == []
    store.put("b", ten(2))
    assert same(store.get("a"), ten(1))
    (made,) = tmp_path.iterdir()
    assert [path.name for path in made.iterdir()] == ["a.1.spill"]
    del store
    gc.collect()
    assert list(tmp_path.iterdir()) == []


def test_settling_moves_what_was_spilled(tmp_path: Path) -> None:
    store = TreeStore(None, 50)
    store.put("a", ten(1))
    store.put("b", ten(2))
    with pytest.raises(ValueError, match="call `use_folder` first"):
        store.commit(0)
    store.use_folder(tmp_path / "clients")
    store.use_folder(tmp_path / "clients")
    assert same(store.get("a"), ten(1))
    repeated = reread(store, store.commit(0))
    assert same(repeated.get("a"), ten(1))
    assert same(repeated.get("b"), ten(2))
    with pytest.raises(ValueError, match="has its files in"):
        store.use_folder(tmp_path / "elsewhere")


def memory() -> tuple[int, int]:
    """Return the process' bytes in memory: its own, and those of mapped files."""
    lines = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines["RssAnon"].split()[0]) * 1024, int(lines["RssFile"].split()[0]) * 1024


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_what_is_on_disk_is_mapped_and_never_read_twice(tmp_path: Path) -> None:
    """Of 40 MB, `get` takes no memory, a touch of all of it only the file's own pages, and letting go gives them back.
    A mapped leaf is changed in place for its holder alone."""
    size = 40_000_000
    store = TreeStore(tmp_path / "clients", 0)
    store.put("a", {"w": torch.ones(size // 4), "b": torch.zeros(3)})
    gc.collect()
    anonymous, files = memory()
    found = store.get("a")
    assert found is not None
    assert "a.1.spill" in Path("/proc/self/maps").read_text()
    got = memory()
    assert got[0] - anonymous < size / 20
    assert got[1] - files < size / 4  # the system may map some pages around the first
    assert int(found["w"].view(torch.int32).bitwise_and(1).sum(dtype=torch.int64)) == 0
    touched = memory()
    assert touched[1] - files > size * 0.9
    assert touched[0] - anonymous < size * 1.5  # the sum's own rows, no second copy that remains
    found["w"][:10] = 5
    assert store.resident == 0
    del found
    gc.collect()
    assert "a.1.spill" not in Path("/proc/self/maps").read_text()
    assert memory()[1] - files < size / 4
    repeated = store.get("a")
    assert repeated["w"][:10].tolist() == [1.0] * 10


def test_a_commit_names_the_files_after_key_and_version(tmp_path: Path) -> None:
    """One immutable file a changed tree, which any reader of safetensors opens; the manifest is only appended to."""
    store = TreeStore(tmp_path / "clients")
    store.put("17", ten(1))
    store.put("3", ten(2))
    first = store.commit(0)
    text = (tmp_path / "clients" / "manifest.jsonl").read_bytes()
    store.put("3", ten(3))
    second = store.commit(4)
    files = ["17-000000", "3-000000", "3-000004"]
    assert named(store, "") == [
        *(f"{file}.{kind}" for file in files for kind in ("copy", "safetensors")),
        "manifest.jsonl",
        "manifest.second",
    ]
    assert (tmp_path / "clients" / "manifest.jsonl").read_bytes()[: first.length] == text
    assert first.length == len(text)
    assert second.length == (tmp_path / "clients" / "manifest.jsonl").stat().st_size > first.length
    with safe_open(tmp_path / "clients" / "3-000004.safetensors", "pt") as file:
        assert file.get_tensor("w").tolist() == [3.0] * 10
    assert store.commit(5) == second  # nothing has changed
    assert not store.changed


def test_both_kept_commits_are_whole_until_the_older_is_pruned(tmp_path: Path) -> None:
    """Versions 1, 2, 3 of a; b is put once. Pruned to 2: version 1 of a is gone, the later commits are whole."""
    store = TreeStore(tmp_path / "clients")
    store.put("b", ten(9))
    commits = {}
    for version in (1, 2, 3):
        store.put("a", ten(version))
        commits[version] = store.commit(version)
    store.prune(2)
    assert named(store, "safetensors") == ["a-000002.safetensors", "a-000003.safetensors", "b-000001.safetensors"]
    for version in (2, 3):
        contents = verify(tmp_path / "clients", commits[version])
        assert contents.entries["a"].file == f"a-{version:06d}.safetensors"
        assert contents.entries["b"].file == "b-000001.safetensors"
    with pytest.raises(DamagedFile, match="a-000001"):
        verify(tmp_path / "clients", commits[1])
    store.prune(3)
    assert named(store, "safetensors") == ["a-000003.safetensors", "b-000001.safetensors"]


def test_a_discarded_tree_is_there_in_the_commit_before(tmp_path: Path) -> None:
    store = TreeStore(tmp_path / "clients", 0)
    store.put("a", ten(1))
    store.put("b", ten(2))
    first = store.commit(1)
    store.discard("a")
    assert store.changed
    second = store.commit(2)
    assert list(verify(tmp_path / "clients", first).entries) == ["a", "b"]
    repeated = reread(store, second, version=1)
    assert repeated.keys() == ["b"]
    assert named(repeated, "safetensors") == ["a-000001.safetensors", "b-000001.safetensors"]
    repeated.prune(2)
    assert named(repeated, "safetensors") == ["b-000001.safetensors"]
    repeated.put("a", ten(3))
    assert same(reread(repeated, repeated.commit(3)).get("a"), ten(3))


def test_what_is_committed_needs_no_second_file(tmp_path: Path) -> None:
    """A spilled tree becomes the commit's file, and a committed one leaves memory without a write."""
    store = TreeStore(tmp_path / "clients", 50)
    store.put("a", ten(1))
    store.put("b", ten(2))  # pushes a out
    spilled = (tmp_path / "clients" / "a.1.spill").stat()
    store.commit(0)
    stored = (tmp_path / "clients" / "a-000000.safetensors").stat()
    assert (stored.st_ino, stored.st_mtime_ns) == (spilled.st_ino, spilled.st_mtime_ns)
    before = named(store, "")
    store.put("c", ten(3))  # pushes b out
    assert store.resident == 40
    assert named(store, "") == before
    for key, number in (("a", 1), ("b", 2), ("c", 3)):
        assert same(store.get(key), ten(number))


def test_versions_go_up(tmp_path: Path) -> None:
    store = TreeStore(tmp_path / "clients")
    store.put("a", ten(1))
    mark = store.commit(3)
    for each in (store, reread(store, mark)):
        each.put("a", ten(2))
        with pytest.raises(ValueError, match="version 3 cannot be committed after version 3"):
            each.commit(3)


def test_a_run_of_any_length_against_a_dict(tmp_path: Path) -> None:
    """Puts, reads, discards, commits, prunes and crashes in random order: at every instant the store is the dict.
    After a crash the newest commit returns, or the one before it, and the folder holds exactly the files that the
    two name."""
    for seed in range(6):
        chance = random.Random(seed)
        folder = tmp_path / str(seed)
        cap = chance.choice([0, 60, 200, 10**6])
        store = TreeStore(folder, cap)
        now: dict[str, Tree] = {}
        saved: list[tuple[int, Commit, dict[str, Tree]]] = [(0, START, {})]
        for _ in range(120):
            act = chance.choice(["put"] * 4 + ["get", "discard", "commit", "crash"])
            key = chance.choice("abcdef")
            if act == "put":
                now[key] = {"w": torch.tensor([chance.random()] * chance.randrange(0, 25))}
                store.put(key, now[key])
            elif act == "discard":
                now.pop(key, None)
                store.discard(key)
            elif act == "commit":
                version = saved[-1][0] + 1
                saved = [*saved[-1:], (version, store.commit(version), dict(now))]
                if chance.random() < 0.7:  # else it dies before it comes to that
                    store.prune(saved[0][0])
            elif act == "crash":
                if len(saved) > 1 and chance.random() < 0.3:
                    saved.pop()  # the newest checkpoint was damaged
                version, mark, stored = saved[-1]
                now = dict(stored)
                store = TreeStore(folder, cap)
                store.restore(remove_unreferenced(verify(folder, mark), saved[0][0]))
                names = {e.file for _, m, _ in saved for e in verify(folder, m).entries.values()}
                copies = {name.replace(".safetensors", ".copy") for name in names}
                assert set(named(store, "")) - {"manifest.jsonl", "manifest.second"} == names | copies
            assert store.keys() == sorted(now)
            assert same(store.get(key), now.get(key))
            assert store.total_bytes() == sum(4 * len(each["w"]) for each in now.values())
            assert store.resident <= min(cap, store.total_bytes())
        assert all(same(store.get(each), now[each]) for each in now)


def test_any_changed_byte_is_found(tmp_path: Path) -> None:
    store = TreeStore(tmp_path / "clients")
    store.put("a", ten(1))
    first = store.commit(0)
    store.put("b", ten(2))
    second = store.commit(1)
    for path in sorted((tmp_path / "clients").iterdir()):
        if path.suffix in (".copy", ".second"):
            path.unlink()  # without a second copy
            path.mkdir()
    for path in sorted((tmp_path / "clients").glob("*s*.*s*")):
        if path.is_dir():
            continue
        whole = path.read_bytes()
        for position in {*range(0, len(whole), 41), len(whole) - 1}:
            changed = bytearray(whole)
            changed[position] ^= 0x20
            path.write_bytes(changed)
            with pytest.raises(DamagedFile, match=f"clients/{path.name}"):
                verify(tmp_path / "clients", second)
        for cut in (whole[:-1], b""):
            path.write_bytes(cut)
            with pytest.raises(DamagedFile, match="cut"):
                verify(tmp_path / "clients", second)
        path.unlink()
        with pytest.raises(DamagedFile, match=f"clients/{path.name}"):
            verify(tmp_path / "clients", second)
        if path.name == "b-000001.safetensors":  # the first commit knows nothing of it
            assert list(verify(tmp_path / "clients", first).entries) == ["a"]
        path.write_bytes(whole)
    assert list(verify(tmp_path / "clients", second).entries) == ["a", "b"]


def test_sweeping_takes_only_what_a_store_has_written(tmp_path: Path) -> None:
    """Orphans of a killed process go, and the manifest's last lines; what somebody else put there remains."""
    folder = tmp_path / "clients"
    store = TreeStore(folder, 0)
    store.put("a", ten(1))
    mark = store.commit(0)
    store.put("a", ten(2))
    store.commit(1)
    store.put("a", ten(3))
    (folder / ".a-000002.safetensors.partial").write_bytes(b"ha")
    for name in ("thesis.txt", "model.safetensors"):
        (folder / name).write_text("mine")
    (folder / "more").mkdir()
    remove_unreferenced(verify(folder, mark), 0)
    actual = ["a-000000.copy", "a-000000.safetensors", "manifest.jsonl", "manifest.second"]
    assert named(store, "") == sorted([*actual, "model.safetensors", "more", "thesis.txt"])
    assert (folder / "manifest.jsonl").stat().st_size == mark.length
    remove_unreferenced(StoreContents(folder, START, -1, {}, []), 0)
    assert named(store, "safetensors") == ["model.safetensors"]
    remove_unreferenced(StoreContents(tmp_path / "nowhere", START, -1, {}, []), 0)
    assert not (tmp_path / "nowhere").exists()


def test_what_cannot_be_written_or_read_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "taken").write_text("a file")
    message = r"the state of '17' \(\d+ bytes\) cannot be written .*free some space"
    with pytest.raises(UserError, match=message) as raised:
        TreeStore(tmp_path / "taken", 0).put("17", ten(1))
    assert isinstance(raised.value.__cause__, OSError)
    store = TreeStore(tmp_path / "clients", 0)
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda handle, data: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        with pytest.raises(UserError, match="No space left"):
            store.put("17", ten(1))
    assert named(store, "") == []
    store.put("17", ten(1))
    shutil.rmtree(tmp_path / "clients")
    with pytest.raises(UserError, match="the state of '17' cannot be read"):
        store.get("17")
    with pytest.raises(UserError, match="cannot hold -1 bytes"):
        TreeStore(None, -1)


def test_shelves_share_a_store(tmp_path: Path) -> None:
    store = TreeStore(tmp_path / "clients", 60)
    client_view = StateView(store, "client/", CPU)
    helpers = StateView(store, "helpers/", CPU)
    client_view.put("17", ten(1))
    helpers.put("17", ten(2))
    helpers.put("3", ten(3))
    assert (client_view.keys(), helpers.keys()) == (["17"], ["17", "3"])
    assert (store.total_bytes("client/"), store.total_bytes("helpers/"), store.total_bytes()) == (40, 80, 120)
    assert same(client_view.get("17"), ten(1))
    assert same(helpers.get("17"), ten(2))
    assert client_view.get("3") is None


def test_a_shelf_gives_copies(tmp_path: Path) -> None:
    """In memory or mapped: a change in place remains with its holder, and every leaf starts where PyTorch starts one."""
    for cap in (0, 1000):
        state_store = StateView(TreeStore(tmp_path / str(cap), cap), "", CPU)
        state_store.put("a", {"b": torch.zeros(3), "w": torch.ones(10)})
        found = state_store.get("a")
        assert found is not None
        assert [leaf.data_ptr() % 64 for leaf in flatten(found).values()] == [0, 0]
        found["w"] += 1
        assert same(state_store.get("a"), {"b": torch.zeros(3), "w": torch.ones(10)})


def test_a_shelf_gives_its_trees_on_its_device() -> None:
    """The device without memory stands for a GPU: the leaves arrive there, of the same type and shape."""
    store = TreeStore()
    store.put("a", {"w": torch.ones(2, dtype=torch.float64)})
    found = StateView(store, "", torch.device("meta")).get("a")
    assert (found["w"].device.type, found["w"].dtype, found["w"].shape) == ("meta", torch.float64, (2,))


def test_the_manifest_says_what_it_says(tmp_path: Path) -> None:
    """The line of a tree, by hand: 40 bytes of numbers; and of one that was discarded."""
    store = TreeStore(tmp_path / "clients")
    store.put("17", ten(1))
    store.commit(2)
    store.discard("17")
    store.commit(3)
    data = (tmp_path / "clients" / "17-000002.safetensors").read_bytes()
    one, two = (tmp_path / "clients" / manifest.MANIFEST).read_text().splitlines()
    assert one == (
        '{"version": 2, "key": "17", "file": "17-000002.safetensors", '
        f'"sha256": "{manifest.atomic_io.sha256(data)}", "size": {len(data)}, "nbytes": 40}}'
    )
    assert two == '{"version": 3, "key": "17", "file": null}'


LINES = [
    b'{"version": 1, "key": "client/0", "file": "../run.json", "sha256": "a", "size": 1, "nbytes": 1}',
    b'{"version": 1, "key": [], "file": "a", "sha256": "a", "size": 1, "nbytes": 1}',
    b'{"version": 1, "key": "client/0", "file": "a", "sha256": "a", "nbytes": 1}',
    b"7",
    b'{"vers',
]


@pytest.mark.parametrize("line", LINES)
def test_a_manifest_that_names_what_it_must_not_is_damaged(tmp_path: Path, line: bytes) -> None:
    """A file outside the folder, a key that is none, a size that is missing: refused even if the checksum of the line is correct."""
    (tmp_path / "run.json").write_bytes(b"7")
    clients = tmp_path / "clients"
    clients.mkdir()
    (clients / "manifest.jsonl").write_bytes(line + b"\n")
    with pytest.raises(DamagedFile, match=r"an invalid line|no store writes"):
        verify(clients, START.after([line + b"\n"]))
