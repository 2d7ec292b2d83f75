"""Faults of a user's images: unreadable files, copies, images in subfolders."""

import csv
import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from support.image_files import encode_image, make_noise_images, write_parquet

import halfmoon
from halfmoon import UserError
from halfmoon.cli.main import main
from halfmoon.data import load
from halfmoon.data.groups import hash_pixels, merge_equal_images
from halfmoon.data.images import hold_out
from halfmoon.data.preparation import Preparation
from halfmoon.data.readers import class_folders
from halfmoon.data.sources import refuse_without_data
from halfmoon.sites.folders import read_site, scan_site, site_folder
from halfmoon.sites.inference import image_folder
from halfmoon.sites.inference.image_folder import list_images
from halfmoon.studies.scan_folder import count_equal_files, scan_folder

SKIP = Preparation(skip_unreadable=True)


def write_classes(folder: Path, count: int, subfolder: str = "", seed: int = 0, copies: int = 1) -> None:
    """Write `count` different images of noise for each of the classes cat and dog, each `copies` times."""
    for number, name in enumerate(("cat", "dog")):
        target_folder = folder / name / subfolder
        target_folder.mkdir(parents=True, exist_ok=True)
        for row, pixels in enumerate(make_noise_images(count, 8, seed=2 * seed + number)):
            for copy in range(copies):
                Image.fromarray(pixels).save(target_folder / f"{row}-{copy}.png")


def test_few_unreadable_images_are_left_out_and_named(tmp_path: Path) -> None:
    write_classes(tmp_path, 20)
    for number in range(2):
        (tmp_path / "cat" / f"bad{number}.png").write_bytes(b"")
    source = load(str(tmp_path))
    assert len(source.train) + len(source.test) == 40
    assert sorted(Path(image.path).name for image in source.skipped) == ["bad0.png", "bad1.png"]
    assert all("not a readable image" in image.reason for image in source.skipped)
    assert len([note for note in source.notes if note.startswith("2 of 42 images cannot be read")]) == 1


def write_float_images(folder: Path, name: str, count: int) -> None:
    """Write TIFFs of floats, whose black and white no file states."""
    (folder / name).mkdir(parents=True, exist_ok=True)
    for number in range(count):
        values = np.random.default_rng(number).random((8, 8), np.float32)
        Image.fromarray(values).save(folder / name / f"float{number}.tif")


def test_few_images_of_unknown_range_are_left_out_and_named(tmp_path: Path) -> None:
    """One TIFF of floats stopped the whole run, while a damaged file is left out."""
    write_classes(tmp_path, 20)
    write_float_images(tmp_path, "cat", 2)
    source = load(str(tmp_path))
    assert len(source.train) + len(source.test) == 40
    assert sorted(Path(image.path).name for image in source.skipped) == ["float0.tif", "float1.tif"]
    assert all("32 bits and no known range" in image.reason for image in source.skipped)
    assert [note for note in source.notes if note.startswith("2 of 42 images cannot be read")] != []


def test_many_images_of_unknown_range_need_the_option(tmp_path: Path) -> None:
    write_classes(tmp_path, 20)
    write_float_images(tmp_path, "dog", 6)
    with pytest.raises(UserError, match=r"6 of 46 images cannot be read") as caught:
        load(str(tmp_path))
    assert "skip_unreadable" in caught.value.options
    assert "--window LOW HIGH" in str(caught.value)
    assert len(load(str(tmp_path), preparation=SKIP).skipped) == 6


def test_only_images_of_unknown_range_need_a_window(tmp_path: Path) -> None:
    for name in ("cat", "dog"):
        write_float_images(tmp_path, name, 10)
    with pytest.raises(UserError, match="no known range") as caught:
        load(str(tmp_path))
    assert caught.value.options == ("window",)
    source = load(str(tmp_path), preparation=Preparation(window=(0.0, 1.0)))
    assert not source.skipped


def test_labels_of_the_other_images_remain(tmp_path: Path) -> None:
    """Classes of one shade each: a shifted label would be seen. The same with the cache, at both reads."""
    for name, shade in (("a", 10), ("b", 200)):
        (tmp_path / "in" / name).mkdir(parents=True)
        for row in range(12):
            pixels = np.full((4, 4), shade, np.uint8)
            pixels[0, 0] = row
            Image.fromarray(pixels).save(tmp_path / "in" / name / f"{row:02}.png")
    (tmp_path / "in" / "a" / "05.png").write_bytes(b"?")
    for cache in (None, tmp_path / "cache", tmp_path / "cache"):
        source = load(str(tmp_path / "in"), cache=cache)
        for subset in (source.train, source.test):
            assert (subset.images[:, 2, 2, 0] == np.where(subset.labels == 0, 10, 200)).all()
        assert [Path(image.path).name for image in source.skipped] == ["05.png"]
        assert len(source.train) + len(source.test) == 23


def test_many_unreadable_images_are_all_named_and_need_the_option(tmp_path: Path) -> None:
    write_classes(tmp_path, 10)
    for name in ("cat", "dog"):
        (tmp_path / name / "bad.png").write_bytes(b"")
    # A cache that was written with the option does not skip the question.
    assert len(load(str(tmp_path), preparation=SKIP, cache=tmp_path / ".cache").skipped) == 2
    with pytest.raises(
        UserError, match=r"cat/bad\.png: .*dog/bad\.png: .*2 of 22 images .*--skip-unreadable"
    ) as caught:
        load(str(tmp_path), cache=tmp_path / ".cache")
    assert "skip_unreadable" in caught.value.in_python()
    assert "--skip" not in caught.value.in_python()


def test_a_class_without_a_readable_image_is_refused(tmp_path: Path) -> None:
    write_classes(tmp_path, 30)
    (tmp_path / "eel").mkdir()
    for number in range(2):
        (tmp_path / "eel" / f"{number}.png").write_bytes(b"")
    with pytest.raises(UserError, match=r"eel/0\.png: .*No image of class eel can be read"):
        load(str(tmp_path))


def test_unreadable_rows_of_parquet_are_left_out(tmp_path: Path) -> None:
    files = [encode_image(image) for image in make_noise_images(30)]
    files[3] = b"nothing"
    write_parquet(tmp_path / "train.parquet", files, [row % 2 for row in range(30)])
    write_parquet(
        tmp_path / "test.parquet", [encode_image(image) for image in make_noise_images(4, seed=1)], [0, 1, 0, 1]
    )
    source = load(str(tmp_path))
    assert source.train.labels.tolist() == [row % 2 for row in range(30) if row != 3]
    assert [image.path for image in source.skipped] == [f"{tmp_path / 'train.parquet'}, row 3"]


def test_a_run_lists_what_it_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_classes(tmp_path / "in", 12)
    for number in range(3):
        (tmp_path / "in" / "cat" / f"bad{number}.png").write_bytes(b"")
    options = ["--data", str(tmp_path / "in"), "--method", "fedavg", "--rounds", "1", "--clients", "2", "--labels", "8"]
    options += ["--setting", "iid-iid", "--network", "small"]
    assert main(["run", *options, "--run-dir", str(tmp_path / "out")]) == 2
    assert "3 of 27 images cannot be read" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert main(["run", *options, "--run-dir", str(tmp_path / "out"), "--skip-unreadable"]) == 0
    assert "3 of 27 images cannot be read and are left out" in capsys.readouterr().err
    with (tmp_path / "out" / "skipped.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [Path(row["path"]).name for row in rows] == ["bad0.png", "bad1.png", "bad2.png"]
    assert all("not a readable image" in row["reason"] for row in rows)


def test_a_plan_of_a_site_lists_them_too(tmp_path: Path) -> None:
    write_classes(tmp_path / "in", 20)
    (tmp_path / "in" / "unlabeled").mkdir()
    for row, pixels in enumerate(make_noise_images(6, 8, seed=9)):
        Image.fromarray(pixels).save(tmp_path / "in" / "unlabeled" / f"{row}.png")
    (tmp_path / "in" / "cat" / "bad.png").write_bytes(b"")
    halfmoon.run(data=str(tmp_path / "in"), rounds=1, network="small", run_dir=tmp_path / "out", minutes=0.01)
    assert "cat/bad.png" in (tmp_path / "out" / "skipped.csv").read_text()


def test_a_plan_of_a_site_names_what_it_leaves_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Images with a name that is not UTF-8, links, and an unreadable image were left out without a word."""
    folder = tmp_path / "in"
    write_classes(folder, 12)
    (folder / "unlabeled").mkdir()
    (folder / "unlabeled" / "bad.png").write_bytes(b"")
    Path(os.fsdecode(os.fsencode(folder / "unlabeled") + b"/\xff.png")).write_bytes(b"")
    (folder / "link").symlink_to("cat")
    assert main(["run", "--data", str(folder), "--network", "small", "--plan"]) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert "left out: images whose names are not UTF-8 (1): rename them" in output
    assert "left out: links to folders and missing files (1), which are not followed" in output
    assert "1 of 25 images cannot be read and is left out" in output
    for path in [*folder.rglob("*.png")]:
        path.write_bytes(encode_image(np.full((8, 8, 3), 7, np.uint8)))
    assert main(["run", "--data", str(folder), "--network", "small", "--plan"]) == 2
    assert "images have equal pixels, so no class can be learned" in capsys.readouterr().err


def test_options_without_effect_on_any_image_are_refused(tmp_path: Path) -> None:
    """Square images cannot be cropped to a square, and a window is for gray values of more than 8 bits."""
    write_classes(tmp_path / "in", 6)
    command = ["data", str(tmp_path / "in"), "--clients", "1", "--labels", "2", "--setting", "iid-iid"]
    assert main([*command, "--crop", "--resize", "4"]) == 2
    assert main([*command, "--window", "0", "99"]) == 2
    site = ["site", "prepare", str(tmp_path / "in"), "--size", "4x4"]
    assert main([*site, "--crop"]) == main([*site, "--window", "0", "99"]) == 2
    with pytest.raises(UserError, match=r"crop has no effect: all images have the proportions of the result"):
        halfmoon.run(data=(make_noise_images(9, 8), [0, 1, 2] * 3), method="fedavg", crop=True, resize=4)
    Image.fromarray(make_noise_images(1, 8)[0][:6]).save(tmp_path / "in" / "cat" / "0.png")
    assert main([*command, "--crop", "--resize", "4"]) == main([*site, "--crop"]) == 0
    deep = Image.fromarray(np.arange(64, dtype=np.uint16).reshape(8, 8))
    deep.save(tmp_path / "in" / "cat" / "0.png")
    options = ["--window", "0", "99", "--channels", "1", "--resize", "4"]
    assert main([*command, *options]) == main([*site, "--window", "0", "99"]) == 0


def test_command_prompts_at_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import io
    import sys

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    write_classes(tmp_path / "in", 8)
    (tmp_path / "in" / "cat" / "bad.png").write_bytes(b"")
    command = ["data", str(tmp_path / "in"), "--clients", "2", "--labels", "4", "--setting", "iid-iid"]
    for reply, code in (("n\n", 2), ("y\n", 0)):
        requested = Terminal()
        monkeypatch.setattr(sys, "stdin", Terminal(reply))
        monkeypatch.setattr(sys, "stderr", requested)
        assert main(command) == code
        assert requested.getvalue().count("Leave them out and continue? [y/N]") == 1


def test_images_in_subfolders_of_a_class_are_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_classes(tmp_path / "in", 10)
    write_classes(tmp_path / "in", 5, "2024/spring", seed=1)
    (tmp_path / "in" / "cat" / ".thumbnails").mkdir()
    Image.fromarray(make_noise_images(1, 8)[0]).save(tmp_path / "in" / "cat" / ".thumbnails" / "0.png")
    source = load(str(tmp_path / "in"))
    assert source.classes == ("cat", "dog")
    assert len(source.train) + len(source.test) == 30
    assert "10 images are in subfolders of class folders; the class is the first level" in source.notes
    contents = scan_folder(tmp_path / "in")
    assert contents is not None
    assert contents.sentence.startswith("in: 30 images, each in the folder of its class, 10 of them in its subfolders")
    # The same below train and test, and without images at the top.
    write_classes(tmp_path / "parts" / "train", 4, "deep", seed=2)
    write_classes(tmp_path / "parts" / "test", 3, "deep", seed=3)
    parts = load(str(tmp_path / "parts"))
    assert (len(parts.train), len(parts.test)) == (8, 6)
    write_classes(tmp_path / "deep", 6, "2023", seed=4)
    write_classes(tmp_path / "deep", 6, "2024", seed=5)
    assert len(load(str(tmp_path / "deep")).classes) == 2


def test_folders_of_class_folders_are_still_no_classes(tmp_path: Path) -> None:
    for seed, name in enumerate(("east", "west")):
        write_classes(tmp_path / name, 3, seed=seed)
    with pytest.raises(UserError, match=r"class folders lie in east and west.*move them into a folder train"):
        load(str(tmp_path))


def test_equal_images_are_on_one_side(tmp_path: Path) -> None:
    """Of 40 different images, each five times, no one is in two of train, test and validation."""
    write_classes(tmp_path, 20, copies=5)
    source = hold_out(load(str(tmp_path)), 0.2)
    sides = [set(hash_pixels(subset.images)) for subset in source.parts.values()]
    assert sum(map(len, sides)) == len(set.union(*sides)) == 40
    assert sum(len(subset) for subset in source.parts.values()) == 200
    assert 30 <= len(source.test) <= 50
    assert any(note.startswith("160 of 200 images are copies of others") for note in source.notes)


def test_images_without_copies_are_divided_as_before(tmp_path: Path) -> None:
    write_classes(tmp_path, 20)
    source = load(str(tmp_path))
    assert source.train.groups is None
    assert source.notes == ()
    assert (len(source.train), len(source.test)) == (32, 8)


def test_copies_in_a_folder_of_test_images_are_counted(tmp_path: Path) -> None:
    write_classes(tmp_path / "train", 6)
    write_classes(tmp_path / "test", 4)
    notes = load(str(tmp_path)).notes
    assert any(note.startswith("8 of 8 test images are training images as well") for note in notes)
    assert not any("one side" in note for note in notes)


def test_copies_with_different_labels_are_counted(tmp_path: Path) -> None:
    write_classes(tmp_path, 10)
    (tmp_path / "dog" / "copy.png").write_bytes((tmp_path / "cat" / "3-0.png").read_bytes())
    source = load(str(tmp_path))
    assert any(note.startswith("1 image has copies with another label") for note in source.notes)


def test_copies_of_parquet_files_are_one_group_in_validation(tmp_path: Path) -> None:
    files = [encode_image(image) for image in make_noise_images(10)] * 3
    write_parquet(tmp_path / "train.parquet", files, [row % 2 for row in range(30)])
    write_parquet(
        tmp_path / "test.parquet", [encode_image(image) for image in make_noise_images(4, seed=1)], [0, 1, 0, 1]
    )
    source = hold_out(load(str(tmp_path)), 0.3)
    assert source.validation is not None
    assert not set(hash_pixels(source.train.images)) & set(hash_pixels(source.validation.images))


def test_groups_of_equal_images_are_joined() -> None:
    """Image 0 of anna equals image 3 of bert: all images of both are one group; equal images without one are another."""
    hashes = [b"x", b"a", b"b", b"x", b"c", b"c", b"d"]
    merged = merge_equal_images(["anna", "anna", "bert", "bert", "", "", ""], hashes)
    assert merged is not None
    assert len(set(merged[:4])) == 1
    assert merged[0] in ("anna", "bert")
    assert merged[4] == merged[5] not in ("", merged[0])
    assert merged[6] == ""
    assert merge_equal_images(None, [b"a", b"b"]) is None


def test_only_different_images_can_be_divided(tmp_path: Path) -> None:
    for name, shade in (("a", 0), ("b", 9)):
        (tmp_path / name).mkdir()
        for row in range(6):
            Image.fromarray(np.full((4, 4), shade, np.uint8)).save(tmp_path / name / f"{row}.png")
    with pytest.raises(UserError, match=r"too few of its 6 images are different"):
        load(str(tmp_path))


def test_a_plan_counts_equal_files(tmp_path: Path) -> None:
    write_classes(tmp_path, 4, copies=3)
    assert count_equal_files(sorted(tmp_path.rglob("*.png"))) == 16
    contents = scan_folder(tmp_path)
    assert contents is not None
    assert "16 files are copies of others" in contents.sentence


def test_a_link_to_a_parent_folder_is_not_followed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """40 levels were read, and 984 images found instead of 24. Links to other folders are followed everywhere."""
    write_classes(tmp_path / "in", 12)
    (tmp_path / "in" / "cat" / "self").symlink_to(tmp_path / "in" / "cat")
    (tmp_path / "in" / "dog" / "up").symlink_to("..")
    (tmp_path / "in" / "dog" / "ring").symlink_to(tmp_path / "ring")
    (tmp_path / "ring").mkdir()
    (tmp_path / "ring" / "back").symlink_to(tmp_path / "in" / "dog")
    source = load(str(tmp_path / "in"))
    assert len(source.train) + len(source.test) == 24
    assert main(["run", "--data", str(tmp_path / "in"), "--plan", "--network", "small"]) == 0
    assert "in: 24 images" in capsys.readouterr().out
    (tmp_path / "links").mkdir()
    for name in ("cat", "dog"):
        (tmp_path / "links" / name).symlink_to(tmp_path / "in" / name)
    assert len(load(str(tmp_path / "links")).train) == len(source.train)
    assert len(list_images(tmp_path / "links")) == len(list_images(tmp_path / "in")) == 24


def test_folders_of_operating_systems_are_no_classes(tmp_path: Path) -> None:
    write_classes(tmp_path / "train", 6)
    write_classes(tmp_path / "test", 4, seed=1)
    for subset in ("train", "test"):
        for name in ("__MACOSX", "@eaDir", "$RECYCLE.BIN", "System Volume Information"):
            (tmp_path / subset / name).mkdir()
            (tmp_path / subset / name / "0.png").write_bytes(b"no image")
        (tmp_path / subset / "cat" / "@eaDir").mkdir()
        (tmp_path / subset / "cat" / "@eaDir" / "1.png").write_bytes(b"no image")
        (tmp_path / subset / "cat" / "Thumbs.db").write_bytes(b"x")
        (tmp_path / subset / ".DS_Store").write_bytes(b"x")
    source = load(str(tmp_path))
    assert source.classes == ("cat", "dog")
    assert (len(source.train), len(source.test), source.skipped) == (12, 8, ())
    assert len(list_images(tmp_path)) == 20
    (tmp_path / "train" / "labels.csv").write_text("path,label\n")
    assert len(scan_site(tmp_path / "train")[0]) == 12


def test_a_dead_link_is_left_out_and_named(tmp_path: Path) -> None:
    write_classes(tmp_path, 20)
    (tmp_path / "cat" / "gone.png").symlink_to("nowhere.png")
    source = load(str(tmp_path))
    assert [(Path(image.path).name, image.reason) for image in source.skipped] == [
        ("gone.png", "the file cannot be read (No such file or directory).")
    ]


@pytest.mark.parametrize(
    ("suffix", "advice"),
    [
        (".heic", r"10 \.heic\): convert them to PNG or JPEG, or read HEIC by pip install 'halfmoon\[heif\]'\.$"),
        (".svg", r"10 \.svg\): convert them to PNG or JPEG\.$"),
        (".npy", r"10 \.npy\): convert them to PNG or JPEG\.$"),
        (".zip", r"10 \.zip\): convert them to PNG or JPEG, and unpack archives\.$"),
    ],
)
@pytest.mark.parametrize("nested", [False, True])
def test_folder_of_unsupported_formats_names_them(
    suffix: str, advice: str, nested: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without = tuple(each for each in class_folders.SUFFIXES if each not in (".heic", ".heif"))
    monkeypatch.setattr(class_folders, "SUFFIXES", without)  # as if pillow-heif were not installed
    monkeypatch.setattr(image_folder, "SUFFIXES", without)
    monkeypatch.setattr(site_folder, "SUFFIXES", without)
    for number in range(10):
        path = tmp_path / ("ab"[number % 2] if nested else "") / f"{number}{suffix}"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"content")
    for read in (load, scan_or_refuse, list_images, read_site):
        with pytest.raises(UserError, match=advice):
            read(Path(tmp_path) if read is not load else str(tmp_path))


def scan_or_refuse(folder: Path) -> None:
    refuse_without_data(folder)


def test_evaluation_of_a_folder_with_train_and_test_requires_one(tmp_path: Path) -> None:
    write_classes(tmp_path / "Train", 4)
    write_classes(tmp_path / "Test", 4)
    with pytest.raises(UserError, match=r"has the folders Test, Train: give one of them, such as .*Test\.$"):
        image_folder.list_labeled_images(tmp_path, ("cat", "dog"))
    assert len(image_folder.list_labeled_images(tmp_path / "Test", ("cat", "dog"))[0]) == 8


def test_a_site_whose_labels_are_all_one_class_is_not_planned(tmp_path: Path) -> None:
    for row, pixels in enumerate(make_noise_images(8, 8)):
        Image.fromarray(pixels).save(tmp_path / f"{row}.png")
    (tmp_path / "labels.csv").write_text("path,label\n" + "".join(f"{row}.png,cat\n" for row in range(5)))
    with pytest.raises(UserError, match=r"all its labels are 'cat'.*label images of another class"):
        scan_folder(tmp_path)


def test_data_shows_a_folder_that_is_too_small_for_the_usual_clients(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """20 clients are the default; 24 images do not suffice for them. A number of the user remains an error."""
    write_classes(tmp_path, 12, copies=1)
    assert main(["data", str(tmp_path)]) == 0
    assert "clients, " in capsys.readouterr().out
    assert main(["data", str(tmp_path), "--clients", "20"]) == 2


def test_a_class_folder_whose_name_is_not_utf8_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It ended in a traceback, as did any accent where the locale is plain ASCII."""
    write_classes(tmp_path, 6)
    os.rename(os.fsencode(tmp_path / "cat"), os.fsencode(tmp_path) + b"/caf\xe9")
    assert main(["run", "--data", str(tmp_path), "--plan", "--network", "small"]) == 2
    assert "the class folder b'caf\\xe9' has a name that is not UTF-8; rename it" in capsys.readouterr().err


@pytest.mark.parametrize("cached", [False, True])
def test_files_whose_names_are_not_utf8_are_read(cached: bool, tmp_path: Path) -> None:
    """The names are hashed where images are copies of others, and for the cache."""
    write_classes(tmp_path / "in", 12, copies=2)
    os.rename(os.fsencode(tmp_path / "in" / "cat" / "0-0.png"), os.fsencode(tmp_path / "in" / "cat") + b"/\xff.png")
    source = load(str(tmp_path / "in"), cache=tmp_path / "cache" if cached else None)
    assert len(source.train) + len(source.test) == 48


@pytest.mark.parametrize("layout", ["plain", "train"])
def test_files_that_are_not_used_are_named_by_every_reader(layout: str, tmp_path: Path) -> None:
    """Only the plan named them; `run --method` and `load_data` were silent."""
    parts = [tmp_path] if layout == "plain" else [tmp_path / "train", tmp_path / "test"]
    for seed, subset in enumerate(parts):
        write_classes(subset, 10, seed=seed)
        Image.fromarray(make_noise_images(1, 8, seed=9 + seed)[0]).save(subset / "loose.png")
    Image.new("RGB", (8, 8)).save(parts[0] / "cat" / "photo.jp2")
    notes = load(str(tmp_path)).notes
    assert [note for note in notes if note.startswith(f"left out: images in no class folder ({len(parts)})")] != []
    assert [note for note in notes if "1 .jp2" in note] != []


def test_images_that_a_table_does_not_list_are_named(tmp_path: Path) -> None:
    for seed, subset in enumerate(("train", "test")):
        write_classes(tmp_path / subset, 4, seed=seed)
    (tmp_path / "train" / "labels.csv").write_text("path,label\ncat/0-0.png,cat\ncat/1-0.png,cat\ndog/0-0.png,dog\n")
    source = load(str(tmp_path))
    assert len(source.train) == 3
    assert [note for note in source.notes if "labels.csv does not list (5)" in note] != []


@pytest.mark.parametrize("layout", ["train", "parquet", "table"])
def test_training_images_of_one_class_are_refused_before_training(layout: str, tmp_path: Path) -> None:
    for seed, part in enumerate(("train", "test")):
        images = make_noise_images(6, 8, seed=seed)
        if layout == "parquet":
            write_parquet(tmp_path / f"{part}.parquet", list(images), [0] * 6)
            continue
        (tmp_path / part / "cat").mkdir(parents=True)
        for row, image in enumerate(images):
            Image.fromarray(image).save(tmp_path / part / "cat" / f"{row}.png")
        if layout == "table":
            lines = [f"cat/{row}.png,cat" for row in range(6)]
            (tmp_path / part / "labels.csv").write_text("\n".join(["path,label", *lines]))
    with pytest.raises(UserError, match=r"all training images are of one class, '(cat|0)'"):
        load(str(tmp_path))


def test_names_of_files_do_not_reach_the_terminal_raw(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An escape sequence in a name changed the terminal, and a line break split the message."""
    write_classes(tmp_path / "in", 20)
    (tmp_path / "in" / "cat" / "a\x1b[31m\nb\u202e.png").write_bytes(b"")
    assert main(["data", str(tmp_path / "in")]) == 0
    assert main(["site", "check", str(tmp_path / "in")]) == 0
    captured = capsys.readouterr()
    printed = captured.out + captured.err
    assert "\x1b" not in printed
    assert "\u202e" not in printed
    assert printed.count(r"a\x1b[31m\nb\u202e.png") >= 2
