"""A site's folder, forgiving and exact: what people write is read and said, and slips of the pen are named."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from halfmoon.cli.main import main
from halfmoon.core.errors import UserError
from halfmoon.sites.folders import check_site, open_prepared_site, prepare_site, read_site, scan_site

CLASSES = ["glioma", "meningioma", "none"]


def folder(
    site_folder: Path, labels: dict[str, str], name: str = "labels.csv", separator: str = ",", mark: str = ""
) -> Path:
    """Write a folder of images of 6x8 pixels with these labels."""
    draw = np.random.default_rng(len(labels))
    site_folder.mkdir(parents=True, exist_ok=True)
    for path in labels:
        (site_folder / path).parent.mkdir(exist_ok=True)
        Image.fromarray(draw.integers(0, 256, (6, 8), np.uint8)).save(site_folder / path)
    lines = [f"{path}{separator}{label}" for path, label in labels.items()]
    (site_folder / name).write_bytes("\r\n".join([f"path{separator}label", *lines]).encode(mark or "utf-8"))
    return site_folder


def kinds(site_folder: Path, **options) -> dict[str, tuple]:
    return {each.kind: each.names for each in check_site(site_folder, **options).findings}


@pytest.mark.parametrize(
    ("name", "separator", "mark", "message"),
    [
        ("Labels.csv", ",", "", ("it is called Labels.csv",)),
        ("labels.csv", ";", "", ("semicolons between its cells",)),
        ("labels.csv", "\t", "utf-8-sig", ("tabs between its cells", "a byte order mark")),
        ("LABELS.CSV", ";", "utf-16", ("it is called LABELS.CSV", "semicolons between its cells",
                                       "a byte order mark of UTF-16")),
    ],
)  # fmt: skip
def test_what_a_spreadsheet_writes_is_read_and_said(tmp_path, name, separator, mark, message):
    labels = {"a.png": "glioma", "b.png": "none", "sub/c.png": "glioma"}
    site_folder = folder(tmp_path / "s", labels, name, separator, mark)
    plain = read_site(folder(tmp_path / "plain", labels))
    site = read_site(site_folder)
    assert (site.paths, site.labels.tolist(), site.classes) == (plain.paths, plain.labels.tolist(), plain.classes)
    assert kinds(site_folder)["how labels.csv was read"] == message


def test_a_misspelled_class_is_named_and_blocks(tmp_path: Path, capsys) -> None:
    """One letter less, another case, a space: each names the class that was meant; the command returns 1."""
    labels = {f"{k}.png": "glioma" for k in range(12)} | {f"m{k}.png": "grade 1" for k in range(12)}
    site_folder = folder(tmp_path / "s", labels | {"x.png": "gliome", "y.png": "Glioma ", "z.png": "grade 2"})
    near = kinds(site_folder)["class names that are nearly the same"]
    assert near == ("Glioma (1 labels): did you mean glioma (12)?", "gliome (1 labels): did you mean glioma (12)?")
    assert main(["site", "check", str(site_folder)]) == 1
    assert "did you mean glioma" in capsys.readouterr().out
    with pytest.raises(UserError, match="class names that are nearly the same: Glioma"):
        read_site(site_folder)
    (site_folder / "classes.txt").write_text("glioma\ngliome\nGlioma\ngrade 1\ngrade 2\n")  # all are meant
    assert read_site(site_folder).classes == ("glioma", "gliome", "Glioma", "grade 1", "grade 2")


def test_names_that_are_different_are_left_alone(tmp_path: Path) -> None:
    """Short names, two letters' difference, and classes that are both frequent are no slips."""
    many = {f"{name}{k}.png": name for name in ("normal", "cat", "benign") for k in range(12)}
    few = {"a.png": "abnormal", "b.png": "bat"} | {f"c{k}.png": "benigne" for k in range(6)}
    assert "class names that are nearly the same" not in kinds(folder(tmp_path / "s", many | few))


def test_a_label_that_classes_txt_does_not_have_says_which_was_meant(tmp_path: Path) -> None:
    site_folder = folder(tmp_path / "s", {"a.png": "gliome", "b.png": "none"})
    (site_folder / "classes.txt").write_text("\n".join(CLASSES))
    with pytest.raises(UserError, match=r"a.png: gliome \(did you mean glioma\?\)"):
        read_site(site_folder)


def test_images_in_class_folders_have_these_labels(tmp_path: Path) -> None:
    """Where a classes.txt names the folders; others stay unlabeled. Without one, the check asks for it."""
    site_folder = folder(tmp_path / "s", {"glioma/a.png": "x", "none/b.png": "x", "later/c.png": "x"})
    (site_folder / "labels.csv").unlink()
    found = scan_site(site_folder)[0]
    assert found.labels.tolist() == [-1, -1, -1]
    assert kinds(site_folder)["folders that look like classes"] == (
        "glioma (1 images)",
        "later (1 images)",
        "none (1 images)",
    )
    (site_folder / "classes.txt").write_text("\n".join(CLASSES))
    site = read_site(site_folder)
    assert {path: int(label) for path, label in zip(site.paths, site.labels, strict=True)} == {
        "glioma/a.png": 0, "later/c.png": -1, "none/b.png": 2,
    }  # fmt: skip
    assert kinds(site_folder)["classes without a label"] == ("meningioma",)


def test_the_federations_classes_and_its_tests_are_compared(tmp_path: Path) -> None:
    """A class that it does not have blocks, and says which was meant; images of the test folder are named."""
    site_folder = folder(tmp_path / "s", {"a.png": "gliome", "b.png": "none"})
    tests = folder(tmp_path / "t", {"c.png": "none"})
    (tests / "d.png").write_bytes((site_folder / "a.png").read_bytes())
    found = check_site(site_folder, classes=CLASSES, tests=tests)
    named = {each.kind: each.names for each in found.findings}
    assert named["classes that the federation does not have"] == ("gliome (did you mean glioma?)",)
    assert named["classes of the federation without a label here"] == ("glioma", "meningioma")
    assert named["images that are test images as well"] == (("a.png", "t/d.png"),)
    assert not found.can_take_part


def test_images_that_use_little_of_16_bits_are_listed(tmp_path: Path) -> None:
    """A 12-bit image in 16 bits uses 6 % of them."""
    site_folder = folder(tmp_path / "s", {"a.png": "none"})
    deep = (np.arange(48).reshape(6, 8) * 80).astype(np.uint16)
    Image.fromarray(deep).save(site_folder / "deep.png")
    assert kinds(site_folder)["images that use little of their range"] == ("deep.png",)


def test_a_folder_is_prepared_anew_for_another_window(tmp_path: Path) -> None:
    """Crop and window are a part of what was prepared: another one decodes all again, the same one nothing."""
    site_folder = folder(tmp_path / "s", {"a.png": "none"})
    Image.fromarray((np.arange(48).reshape(6, 8) * 80).astype(np.uint16)).save(site_folder / "deep.png")
    one = prepare_site(site_folder, (6, 8), 1)
    assert (one.decoded, prepare_site(site_folder, (6, 8), 1).decoded) == (2, 0)
    two = prepare_site(site_folder, (6, 8), 1, window=(0, 40000))
    assert two.decoded == 2
    assert two.site.images[1].max() == round(47 * 80 / 40000 * 255)
    with pytest.raises(UserError, match="is prepared in another way"):
        open_prepared_site(site_folder, preparation="")


@pytest.mark.parametrize("start", ["/home/me/photos/", "C:\\Users\\me\\", "~/", "../in/", "file:///data/"])
def test_a_path_of_another_machine_names_the_image_that_may_be_meant(tmp_path: Path, start: str) -> None:
    """Tables that another program wrote have full paths; each image is named by its place in the folder."""
    (tmp_path / "day1").mkdir()
    for name in ("day1/one.png", "two.png"):
        Image.fromarray(np.zeros((8, 8), np.uint8)).save(tmp_path / name)
    (tmp_path / "labels.csv").write_text(f"path,label\n{start}one.png,a\n{start}Two.png,b\n")
    with pytest.raises(
        UserError, match=r"one\.png \(did you mean day1/one\.png\?\), .*Two\.png \(did you mean two\.png\?\)"
    ):
        read_site(tmp_path)
