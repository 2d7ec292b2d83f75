"""A patient or group is on one side of every split: by names, by labels.csv, with and without labels."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from halfmoon import Config, UserError
from halfmoon.data.groups import find_groups
from halfmoon.runs import factory
from halfmoon.sites.folders import read_site
from halfmoon.sites.folders.labels import LabelEdit, write_labels
from halfmoon.studies.plan import plan_if_folder
from halfmoon.studies.scan_folder import scan_folder

PATTERN = "(p[0-9]+)_"


def written(folder: Path) -> None:
    """Write two classes of ten patients, each with three images of either class."""
    for label in ("cat", "dog"):
        (folder / label).mkdir(parents=True)
        for number in range(30):
            pixels = np.full((8, 8), 8 * number, np.uint8)
            pixels[7, 7] = len(label) + (label == "cat")  # no two images are equal
            Image.fromarray(pixels).save(folder / label / f"p{number // 3}_{number}.png")


def test_a_pattern_finds_the_group_in_folder_and_name() -> None:
    paths = [Path("x9/a/p1_3.png"), Path("x9/p22_/4.png")]
    assert find_groups(paths, PATTERN) == ["p1", "p22"]
    with pytest.raises(UserError, match=r"b\.png: its folder and name do not fit"):
        find_groups([*paths, Path("p3_/a/b.png")], PATTERN)
    for wrong, text in (("p[0-9", "no regular expression"), ("p[0-9]+", "needs one group")):
        with pytest.raises(UserError, match=text):
            find_groups(paths, wrong)


def test_no_group_of_class_folders_is_on_two_sides(tmp_path: Path) -> None:
    """Neither of test, nor of validation, nor of training; without the pattern some group is."""
    written(tmp_path / "pets")
    sides = {}
    for pattern in (PATTERN, None):
        found = factory.load_images(Config(data=str(tmp_path / "pets"), validation_share=0.25, group_pattern=pattern))
        assert sum(map(len, found.parts.values())) == 60 or pattern
        shades = [part.images[:, 0, 0, 0].astype(int) // 8 // 3 for part in found.parts.values()]
        sides[pattern] = [set(each.tolist()) for each in shades]
        assert ("no patient or group is on both sides" in found.selection_note) == bool(pattern)
    assert sum(map(len, sides[PATTERN])) == len(set.union(*sides[PATTERN]))
    assert sum(map(len, sides[None])) > len(set.union(*sides[None]))


def test_column_of_labels_csv_assigns_images_to_clients(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With a group a label may be left out; replies keep the column."""
    ward = tmp_path / "ward"
    written(ward)
    rows = ["path,label,group", "cat/p0_0.png,cat,anna", "dog/p0_1.png,dog,anna", "cat/p1_3.png,,bert"]
    (ward / "labels.csv").write_text("\n".join([*rows, "dog/p1_4.png,dog,carl", "cat/p1_5.png,cat,dora"]))
    site = read_site(ward)
    owners = site.image_groups()
    assert owners is not None
    assert [owners[site.paths.index(path)] for path in ("cat/p0_0.png", "cat/p1_3.png", "cat/p2_6.png")] == [
        "anna", "bert", "",
    ]  # fmt: skip
    assert site.classes == ("cat", "dog")
    write_labels(ward, LabelEdit("cat/p1_3.png", "cat", by="eve"), LabelEdit("cat/p0_0.png", "", previous="cat"))
    lines = (ward / "labels.csv").read_text().splitlines()
    assert lines[0] == "path,label,group,by,at"
    assert lines[1] == "cat/p0_0.png,,anna,,"
    assert [line for line in lines if line.startswith("cat/p1_3.png,cat,bert,eve,")]
    contents = scan_folder(ward)
    assert contents is not None
    assert "of 4 patients or groups" in contents.sentence
    plan = plan_if_folder({"data": str(ward), "network": "small"})
    assert plan is not None
    assert (
        "labels",
        "all 4; judged by 1 x 5-fold cross-validation; no patient or group is on both sides",
    ) in plan.reasons
