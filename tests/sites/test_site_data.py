"""Site folders: what is read, found, decoded and written; oracles: Pillow, numpy and the simulator's holdings."""

import json
import os
import shutil
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from halfmoon.cli import main as cli
from halfmoon.config import schema as config
from halfmoon.core.errors import UserError
from halfmoon.data import SERVER, Split
from halfmoon.data.readers.decode import read_header
from halfmoon.engine.local_clients import FederatedDataset
from halfmoon.methods import registry
from halfmoon.runs import factory
from halfmoon.sites.folders import check_site, open_prepared_site, prepare_site, read_site, scan_site
from halfmoon.storage import atomic_io

draw = np.random.default_rng(0)


def write_png(
    path: Path, size: tuple[int, ...] = (6, 5), value: np.ndarray | None = None, **options: Any
) -> np.ndarray:
    """Write a random image, (H, W) or (H, W, 3), and return its pixels."""
    pixels = draw.integers(0, 256, size, np.uint8) if value is None else value
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path, **options)
    return pixels


def site(folder: Path, labels: str = "", classes: str | None = None, names: tuple[str, ...] = ("a", "b", "c")) -> Path:
    for name in names:
        write_png(folder / f"{name}.png")
    (folder / "labels.csv").write_text(f"path,label\n{labels}", encoding="utf-8")
    if classes is not None:
        (folder / "classes.txt").write_text(classes, encoding="utf-8")
    return folder


def kinds(folder: Path) -> dict[str, tuple[Any, ...]]:
    return {each.kind: each.names for each in check_site(folder).findings}


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def killed(task: Callable[[], object]) -> None:
    """Run a task in a process that must be killed by SIGKILL."""
    child = os.fork()
    if not child:
        try:
            task()
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


def test_a_folder_is_read_as_people_write_it(tmp_path: Path) -> None:
    """Nested folders, hidden files, a byte order mark, quotes, backslashes, ./ and accents in two characters."""
    for name in (
        "z.png",
        "in/a, b.jpg",
        "in/deep/c.TIF",
        "caf\u0065\u0301.png",
        ".hidden.png",
        ".cache/x.png",
        "d.bmp",
    ):
        write_png(tmp_path / name)
    lines = '"in/a, b.jpg",dog\r\nin\\deep\\c.TIF,cat\r\n\r\n./z.png, dog \r\ncaf\u00e9.png,cat\r\n'
    (tmp_path / "labels.csv").write_bytes(f"\ufeffPath,Label\r\n{lines}".encode())
    found = read_site(tmp_path)
    assert found.paths == ("caf\u0065\u0301.png", "d.bmp", "in/a, b.jpg", "in/deep/c.TIF", "z.png")
    assert found.classes == ("cat", "dog")
    assert found.labels.dtype == np.int64
    assert found.labels.tolist() == [0, -1, 1, 0, 1]
    (tmp_path / "classes.txt").write_bytes("\ufeffzebra\r\ndog\r\n\r\ncat\r\n".encode())
    found = read_site(tmp_path)
    assert found.classes == ("zebra", "dog", "cat")
    assert found.labels.tolist() == [2, -1, 1, 2, 1]


def test_a_folder_without_labels_is_a_site(tmp_path: Path) -> None:
    write_png(tmp_path / "a.png")
    assert read_site(tmp_path).labels.tolist() == [-1]
    assert read_site(tmp_path).classes == ()


@pytest.mark.parametrize(
    ("labels", "classes", "message"),
    [
        (b"path,label\na.png,x\na.png,y\n", None, "files with two labels: a.png: x, y; leave one line"),
        (b"path,label\nd.png,x\n", None, "labels without a file: d.png; correct labels.csv"),
        (b"path,label\n../s/a.png,x\n", None, "labels without a file: ../s/a.png (did you mean a.png?);"),
        (b"path,label\na.png,x\nb.png,z\n", b"x\ny\n", "labels that classes.txt does not have: b.png: z; correct"),
        (b"a.png,x\n", None, "labels.csv cannot be read: line 1 is 'a.png,x', not path,label; repair it"),
        (b"path|label\na.png|x\n", None, "labels.csv cannot be read: line 1 is 'path|label', not path,label"),
        (b"path;label\na.png,x\n", None, "labels.csv cannot be read: line 2 is not one path and one label"),
        (b"", None, "labels.csv cannot be read: it has no header path,label"),
        (b"path,label\na.png\n", None, "labels.csv cannot be read: line 2 is not one path and one label"),
        (b'path,label\n"a.png,x\n', None, "labels.csv cannot be read: line 2: unexpected end of data"),
        (b"path,label\n\xff.png,x\n", None, "labels.csv cannot be read: byte 11 is not UTF-8"),
        (b"path,label\n", b"x\ny\nx\n", "classes.txt cannot be read: class x is listed twice; repair it"),
        (b"path,label\na.png,x\n", b"\n", "classes.txt cannot be read: it names no class"),
    ],
)
def test_a_fault_is_a_sentence_and_blocks(tmp_path: Path, labels: bytes, classes: bytes | None, message: str) -> None:
    site(tmp_path)
    (tmp_path / "labels.csv").write_bytes(labels)
    if classes is not None:
        (tmp_path / "classes.txt").write_bytes(classes)
    with pytest.raises(UserError) as caught:
        read_site(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path}: {message}")
    assert not check_site(tmp_path).can_take_part


def test_no_folder_and_no_image(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no such folder; give the folder of a site"):
        scan_site(tmp_path / "not")
    (tmp_path / "notes.txt").write_text("none")
    with pytest.raises(UserError, match="there is no image in it"):
        read_site(tmp_path)


def test_a_folder_that_cannot_be_opened_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise PermissionError(13, "Permission denied", str(tmp_path))

    monkeypatch.setattr(os, "listdir", refuse)
    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(UserError, match=r"folders that cannot be opened: \.; make them readable"):
        read_site(tmp_path)
    assert not check_site(tmp_path).can_take_part


def test_what_is_no_image_is_never_opened(tmp_path: Path) -> None:
    """A pipe, a dead link, a linked folder, a name that is not UTF-8: reading the first would wait for ever."""
    site(tmp_path / "s")
    write_png(tmp_path / "far" / "x.png")
    os.mkfifo(tmp_path / "s" / "pipe.png")
    (tmp_path / "s" / "dead.png").symlink_to("nowhere.png")
    (tmp_path / "s" / "far").symlink_to(tmp_path / "far")
    shutil.copy(tmp_path / "s" / "a.png", os.fsdecode(os.fsencode(tmp_path / "s") + b"/\xff.png"))
    found, findings = scan_site(tmp_path / "s")
    assert found.paths == ("a.png", "b.png", "c.png")
    assert [finding.names for finding in findings] == [("\\udcff.png",), ("dead.png", "far"), ("pipe.png",)]
    assert not any(finding.blocks for finding in findings)
    assert prepare_site(tmp_path / "s").decoded == 3


def messy(folder: Path) -> Path:
    """Make a folder with one of everything that does not block."""
    same = write_png(folder / "a.png")
    write_png(folder / "copy.tif", value=same)
    write_png(folder / "rgb.png", value=np.repeat(same[:, :, None], 3, 2))
    write_png(folder / "b.png", (4, 4))
    shutil.copy(folder / "b.png", folder / "b2.png")
    write_png(folder / "c.png")
    shutil.copy(folder / "c.png", folder / "c2.png")
    write_png(folder / "d.png")
    shutil.copy(folder / "d.png", folder / "d2.png")
    (folder / "cut.png").write_bytes((folder / "a.png").read_bytes()[:50])
    (folder / "notes.txt").write_text("of no use")
    lines = "a.png,x\nc.png,x\nc2.png,y\nd.png,x\nd2.png,x\ncut.png,y\n"
    (folder / "labels.csv").write_text(f"path,label\n{lines}")
    (folder / "classes.txt").write_text("x\ny\nz\n")
    return folder


def test_everything_odd_is_found(tmp_path: Path) -> None:
    """Ten files: one is cut off (its label goes with it), so nine are readable and five of them labeled, four x."""
    found = check_site(messy(tmp_path))
    assert (found.images, found.readable, found.labeled) == (10, 9, 5)
    assert found.class_counts == {"x": 4, "y": 1, "z": 0}
    assert found.sizes == {(6, 5, "L"): 6, (4, 4, "L"): 2, (6, 5, "RGB"): 1}
    assert list(found.sizes.values()) == [6, 2, 1]
    assert kinds(tmp_path) == {
        "files that are no images": ("notes.txt",),
        "files that cannot be read": ("cut.png",),
        "equal images with different labels": (("c.png", "c2.png"),),
        "equal images, labeled and unlabeled": (("a.png", "copy.tif", "rgb.png"),),
        "equal images among the labeled": (("d.png", "d2.png"),),
        "equal images among the unlabeled": (("b.png", "b2.png"),),
        "classes without a label": ("z",),
    }
    (broken,) = [each for each in found.findings if each.reasons]
    assert broken.describe_images()[0].startswith("cut.png: not a readable image (")
    assert found.can_take_part


def test_what_a_folder_can_serve(tmp_path: Path) -> None:
    """Labels at clients and at some where it has labels; some and server where it has none; nothing without images."""
    with_labels = check_site(site(tmp_path / "a", "a.png,x\n"))
    assert with_labels.methods == {labels_at: tuple(registry.names_at(labels_at)) for labels_at in ("clients", "some")}
    assert "feddure" in with_labels.methods["clients"]
    without = check_site(site(tmp_path / "b"))
    assert without.methods == {labels_at: tuple(registry.names_at(labels_at)) for labels_at in ("some", "server")}
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "a.png").write_bytes(b"none")
    assert not check_site(tmp_path / "c").can_take_part


def test_check_on_the_command_line_opens_no_connection(tmp_path, monkeypatch, capsys):
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a connection was opened")

    monkeypatch.setattr(socket, "socket", refuse)
    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    before = contents(messy(tmp_path))
    assert cli.main(["site", "check", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert f"{tmp_path}: 10 images, 9 readable, 5 labeled (55.6%), 3 classes" in out
    assert "\nequal images, labeled and unlabeled (1): keep one of each group\n  a.png = copy.tif = rgb.png\n" in out
    assert "This folder can take part" in out
    assert contents(tmp_path) == before
    (tmp_path / "labels.csv").write_text("path,label\na.png,q\nno.png,x\n")
    assert cli.main(["site", "check", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "cannot take part: repair this first: labels that classes.txt does not have; labels without a file." in out


def test_long_lists_are_cut_but_not_in_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = "".join(f"no{k:02}.png,x\n" for k in range(13))
    assert cli.main(["site", "check", str(site(tmp_path, f"a.png,x\n{lines}"))]) == 1
    out = capsys.readouterr().out
    assert "  no09.png\n  ... and 3 more (--json lists all)\n" in out
    assert "no10.png" not in out
    assert cli.main(["site", "check", str(tmp_path), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    (missing,) = [each for each in found["findings"] if each["kind"] == "labels without a file"]
    assert missing["names"] == [f"no{k:02}.png" for k in range(13)]
    assert (found["can_take_part"], found["methods"], found["labeled"]) == (False, {}, 1)
    assert found["sizes"] == [{"height": 6, "width": 5, "mode": "L", "images": 3}]


def test_prepared_images_are_those_of_pillow(tmp_path: Path) -> None:
    site(tmp_path, "b.png,x\n")
    done = prepare_site(tmp_path)
    opened = open_prepared_site(tmp_path)
    assert (done.written, done.decoded, done.left_out) == (True, 3, {})
    assert opened.paths == ("a.png", "b.png", "c.png")
    assert opened.labels.tolist() == [-1, 0, -1]
    assert isinstance(opened.images, np.memmap)
    assert not opened.images.flags.writeable
    wanted = np.stack([np.asarray(Image.open(tmp_path / path)) for path in opened.paths])[..., None]
    assert opened.images.shape == (3, 6, 5, 1)
    assert np.array_equal(opened.images, wanted)
    small = prepare_site(tmp_path, (4, 3), 3).site.images
    assert small.shape == (3, 4, 3, 3)
    assert np.array_equal(small[0, ..., 0], np.asarray(Image.open(tmp_path / "a.png").resize((3, 4), 2)))
    assert len(list((tmp_path / ".halfmoon").glob("*.npy"))) == 1


def test_only_what_changed_is_decoded_again(tmp_path: Path) -> None:
    site(tmp_path, "b.png,x\n")
    prepare_site(tmp_path)
    index = tmp_path / ".halfmoon" / "index.json"
    stamp = index.stat().st_mtime_ns
    repeated = prepare_site(tmp_path)
    assert (repeated.written, repeated.decoded, index.stat().st_mtime_ns) == (False, 0, stamp)
    changed = write_png(tmp_path / "b.png")
    os.utime(tmp_path / "b.png", ns=(1, 1))
    added = write_png(tmp_path / "in" / "d.png")
    (tmp_path / "c.png").unlink()
    with pytest.raises(UserError, match=r"has changed since it was prepared \(b.png, c.png, in/d.png\): run halfmoon"):
        open_prepared_site(tmp_path)
    done = prepare_site(tmp_path)
    assert done.decoded == 2
    assert done.site.paths == ("a.png", "b.png", "in/d.png")
    images = open_prepared_site(tmp_path).images
    assert np.array_equal(images[1:, ..., 0], np.stack([changed, added]))
    assert np.array_equal(images[0, ..., 0], np.asarray(Image.open(tmp_path / "a.png")))
    (tmp_path / "labels.csv").write_text("path,label\na.png,x\n")
    with pytest.raises(UserError, match="labels or classes have changed since it was prepared: run halfmoon site prep"):
        open_prepared_site(tmp_path)
    done = prepare_site(tmp_path)
    assert (done.written, done.decoded) == (True, 0)
    assert open_prepared_site(tmp_path).labels.tolist() == [0, -1, -1]


def test_unreadable_images_are_left_out_and_remembered(tmp_path: Path) -> None:
    site(tmp_path, "b.png,x\nc.png,y\n")
    (tmp_path / "b.png").write_bytes(b"none")
    done = prepare_site(tmp_path)
    assert list(done.left_out) == ["b.png"]
    opened = open_prepared_site(tmp_path)
    assert (opened.paths, opened.labels.tolist()) == (("a.png", "c.png"), [-1, 1])
    assert opened.images is not None
    assert len(opened.images) == 2
    assert not prepare_site(tmp_path).written
    write_png(tmp_path / "b.png")
    assert prepare_site(tmp_path).site.paths == ("a.png", "b.png", "c.png")
    for name in "abc":
        (tmp_path / f"{name}.png").write_bytes(b"none")
    with pytest.raises(UserError, match="none of its 3 images can be read"):
        prepare_site(tmp_path)


def test_a_killed_prepare_leaves_the_old_state(tmp_path: Path) -> None:
    def die(done: int, of: int) -> None:
        if done == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    site(tmp_path, "b.png,x\n")
    killed(lambda: prepare_site(tmp_path, progress=die))
    with pytest.raises(UserError, match=r"is not prepared: run halfmoon site prepare"):
        open_prepared_site(tmp_path)
    prepare_site(tmp_path)
    before = np.array(open_prepared_site(tmp_path).images)
    killed(lambda: prepare_site(tmp_path, (3, 3), progress=die))
    assert np.array_equal(open_prepared_site(tmp_path).images, before)  # pyright: ignore[reportArgumentType]
    assert list((tmp_path / ".halfmoon").glob(".images-*"))
    prepare_site(tmp_path, (3, 3))
    state_files = sorted(path.name for path in (tmp_path / ".halfmoon").iterdir())
    assert [name.split("-")[0] for name in state_files] == ["images", "index.json", "lock"]


@pytest.mark.parametrize("damage", ["cut", "gone", "index"])
def test_damage_is_noticed_and_mended(tmp_path: Path, damage: str) -> None:
    prepare_site(site(tmp_path))
    state_files = tmp_path / ".halfmoon"
    (array,) = state_files.glob("*.npy")
    if damage == "cut":
        array.write_bytes(array.read_bytes()[:-1])
    elif damage == "gone":
        array.unlink()
    else:
        (state_files / "index.json").write_text('{"version": 1, "shape": [')
    with pytest.raises(UserError, match=r"run halfmoon site prepare .*\.$"):
        open_prepared_site(tmp_path)
    assert prepare_site(tmp_path).decoded == 3
    assert len(open_prepared_site(tmp_path)) == 3


def test_a_folder_that_cannot_be_written_takes_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = site(tmp_path / "site")
    out = tmp_path / "out"
    (folder / ".halfmoon").write_text("in the way")
    assert cli.main(["site", "prepare", str(folder)]) == 2
    assert "cannot be written" in (text := capsys.readouterr().err)
    assert text.endswith("give another folder by --out.\n")
    out.mkdir()
    (out / "images-of-mine.npy").write_text("kept")
    assert cli.main(["site", "prepare", str(folder), "--out", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["shape"] == [3, 6, 5, 1]
    assert len(open_prepared_site(folder, out)) == 3
    assert (out / "images-of-mine.npy").exists()


def test_prepare_needs_a_size_for_images_of_several(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    site(tmp_path)
    write_png(tmp_path / "d.png", (9, 9, 3))
    with pytest.raises(UserError, match=r"its images have 2 sizes, most of them \(3\) 6x5; give one by --size HxW\."):
        prepare_site(tmp_path)
    assert not (tmp_path / ".halfmoon").exists()
    assert cli.main(["site", "prepare", str(tmp_path), "--size", "4x8"]) == 0
    out = capsys.readouterr().out
    assert out == f"{tmp_path}/.halfmoon: 4 images as 4x8 with 3 channel(s), 0 labeled; 4 decoded now\n"


def test_a_full_disk_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(100, 11, 89))  # pyright: ignore
    with pytest.raises(UserError, match="has room for 89 bytes, but the decoded images need 90; give another folder"):
        prepare_site(site(tmp_path))


def test_a_busy_folder_is_a_sentence(tmp_path: Path) -> None:
    prepare_site(site(tmp_path))
    with atomic_io.open_file(tmp_path / ".halfmoon" / "lock", os.O_RDWR) as handle:
        atomic_io.flock(handle)
        with pytest.raises(UserError, match="is being prepared by another process; wait for it"):
            prepare_site(tmp_path, (2, 2))


def test_a_header_tells_what_decoding_would(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    for form in ("png", "jpg", "tif"):
        write_png(tmp_path / f"a.{form}", (8, 4), exif=exif)
        assert read_header(tmp_path / f"a.{form}") == (4, 8, True)
    write_png(tmp_path / "b.png", (8, 4, 3))
    assert read_header(tmp_path / "b.png") == (8, 4, False)
    Image.fromarray(np.ones((3, 2), np.uint16)).save(tmp_path / "c.png")
    assert read_header(tmp_path / "c.png") == (3, 2, True)
    (tmp_path / "d.png").write_bytes(b"none")
    assert read_header(tmp_path / "d.png") is None


def exported(out: Path, *text: str) -> None:
    some = ["--sites", "3", "--data-share", "0.3"] if "--split" not in text else ["--sites", "3"]
    assert cli.main(["site", "export", "digits", *some, "--out", str(out), *text]) == 0


DIR = ("--labels-per-class", "2")
CASES = {
    "dir-dir": DIR,
    "server": ("--setting", "semifl-iid", "--labels", "40", "--labels-at", "server", "--split-seed", "3"),
    "some": ("--setting", "iid-iid", "--labels-at", "some", "--labeled-clients", "2", *DIR, "--shrink", "2"),
    "padded": (*DIR, "--image-size", "10"),
}


@pytest.mark.parametrize("case", CASES)
def test_the_simulator_holds_the_same_rows(tmp_path: Path, case: str) -> None:
    """Pixels and labels of every site, in order, are those that federation.toml gives each client of the simulator."""
    exported(tmp_path / "f", *CASES[case])
    wanted = factory.build_problem(config.resolve(config.load_file(tmp_path / "f" / "federation.toml"), {}))
    dataset = FederatedDataset(wanted.train, wanted.split)
    held = {f"site-{k:02}": k for k in range(3)} | ({"server": SERVER} if case == "server" else {})
    assert sorted(path.name for path in (tmp_path / "f").iterdir() if path.is_dir()) == sorted([*held, "test"])
    for name, k in held.items():
        got = prepare_site(tmp_path / "f" / name).site
        local, _ = dataset.client_data(k)
        pixels = got.images.transpose(0, 3, 1, 2)
        labeled = got.labels >= 0
        assert np.array_equal(pixels[labeled], local.x.numpy())
        assert np.array_equal(got.labels[labeled], local.y.numpy())
        assert np.array_equal(pixels[~labeled], local.u.numpy())
        assert got.classes == wanted.source.classes
        rows = np.sort(np.concatenate([dataset.rows(k, True), dataset.rows(k, False)]))
        assert [int(Path(path).stem) for path in got.paths] == rows.tolist()
    test = prepare_site(tmp_path / "f" / "test").site
    assert np.array_equal(test.images.transpose(0, 3, 1, 2), wanted.test.images.numpy())
    assert np.array_equal(test.labels, wanted.test.labels.numpy())
    assert sum(len(wanted.split.rows(k, True)) for k in held.values()) > 0


def test_a_saved_split_is_exported_with_it(tmp_path: Path) -> None:
    saved = str(tmp_path / "s.parquet")
    assert cli.main(["data", "digits", "--clients", "3", "--split-seed", "5", "--save", saved]) == 0
    exported(tmp_path / "f", "--split", saved)
    repeated = config.resolve(config.load_file(tmp_path / "f" / "federation.toml"), {})
    assert repeated.split is not None
    assert repeated.split == tmp_path / "f" / "split.parquet"
    assert np.array_equal(Split.load(repeated.split).client, Split.load(Path(saved)).client)


def test_nothing_is_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    exported(tmp_path / "f", *DIR)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "f").rglob("*")}
    exported(tmp_path / "f", *DIR)
    assert "has the same sites already; no file was written." in capsys.readouterr().out
    for folder, text in (
        (tmp_path / "f", "contains an export with other options"),
        (tmp_path, "is not empty, and nothing"),
    ):
        assert cli.main(["site", "export", "digits", "--sites", "4", "--out", str(folder)]) == 2
        assert capsys.readouterr().err.startswith(f"halfmoon: {folder} {text}")
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "f").rglob("*")} == before


def test_a_killed_export_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed in the middle of the second folder: the first remains as it is, the others come, the leftover goes."""
    save = Image.Image.save
    saved = []

    def dying(image: Image.Image, path: Any, *text: Any) -> None:
        saved.append(path)
        if "site-01" in str(path) and len([each for each in saved if "site-01" in str(each)]) == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        save(image, path, *text)

    with monkeypatch.context() as patch:
        patch.setattr(Image.Image, "save", dying)
        killed(lambda: exported(tmp_path / "f", *DIR))
    assert sorted(path.name for path in (tmp_path / "f").iterdir()) == [
        ".halfmoon-export",
        ".site-01.partial",
        "site-00",
    ]
    first = (tmp_path / "f" / "site-00" / "labels.csv").stat().st_mtime_ns
    exported(tmp_path / "f", *DIR)
    assert (tmp_path / "f" / "site-00" / "labels.csv").stat().st_mtime_ns == first
    exported(tmp_path / "whole", *DIR)
    files = {path.relative_to(tmp_path / "f"): path for path in (tmp_path / "f").rglob("*")}
    assert files.keys() == {path.relative_to(tmp_path / "whole") for path in (tmp_path / "whole").rglob("*")}
    assert all(
        path.is_dir() or path.read_bytes() == (tmp_path / "whole" / name).read_bytes() for name, path in files.items()
    )


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (
            "",
            "site needs an action: choose one of: check, export, join, label, prepare, terms.",
        ),
        ("check nowhere", "nowhere: there is no such folder; give the folder of a site."),
        ("prepare nowhere", "nowhere: there is no such folder; give the folder of a site."),
        ("prepare s --size 3", "--size is '3': it must be height x width in pixels, such as 32x32."),
        ("prepare s --size 0x3", "the size is 0x3; each side must be from 1 to 4096 pixels."),
        ("prepare s --channels 2", "--channels is '2': it must be 1 (gray) or 3 (RGB)."),
        ("export digits --sites 0 --out f", "--sites is '0': it must be a whole number from 1."),
        ("export digits --sites 2 --out f --dirichlet-alpha x", '--dirichlet-alpha is "x": it must be a number.'),
        ("export digit --sites 2 --out f", "no data set or folder is called 'digit'; did you mean 'digits'?"),
        ("export digits --sites 2 --out f --stages 2", "the split has 2 stages, but a folder of images has no time; "),
        ("export digits --sites 2 --out s/a.png", "s/a.png is a file, not a folder; choose another --out."),
        ("export digits --sites 2 --out s/a.png/f", "s/a.png is a file, not a folder; choose another --out."),
        ("export digits --sites 9999 --out f", "9999 clients cannot share 1437 images; ask for fewer clients."),
    ],
)
def test_bad_input_is_one_sentence(tmp_path, monkeypatch, capsys, command, message):
    monkeypatch.chdir(tmp_path)
    site(tmp_path / "s")
    before = sorted(tmp_path.rglob("*"))
    assert cli.main(["site", *command.split()]) == 2
    complaint = capsys.readouterr().err
    assert complaint.startswith(f"halfmoon: {message}")
    assert complaint.count("\n") == 1
    assert sorted(tmp_path.rglob("*")) == before


def test_images_of_formats_that_are_not_read_are_no_other_files(tmp_path: Path) -> None:
    """They were among files that are no images, so that a site of a phone's HEIC files had them left out unnoticed."""
    for name in ("a.png", "b.psd", "c.dng", "notes.txt"):
        (tmp_path / name).write_bytes(b"")
    (tmp_path / "labels.csv").write_text("path,label\na.png,cat\n")
    _, findings = scan_site(tmp_path)
    names_by_kind = {finding.kind: finding.names for finding in findings}
    assert names_by_kind["images of formats that are not read"] == ("b.psd", "c.dng")
    assert names_by_kind["files that are no images"] == ("notes.txt",)
