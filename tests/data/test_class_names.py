"""One spelling of each class: accents and blanks, near-equal names, the order of numbers, missing labels."""

from pathlib import Path

import pytest
from PIL import Image
from support.image_files import encode_image, make_noise_images, write_parquet

from halfmoon import UserError
from halfmoon.data import load
from halfmoon.data.class_names import find_near_equal, normalize_class_name, sort_class_names
from halfmoon.sites.folders import read_site, scan_site
from halfmoon.sites.inference.image_folder import list_labeled_images
from halfmoon.studies.scan_folder import scan_folder
from halfmoon.studies.site_rehearsal import _merge_classes


def write_folders(folder: Path, *names: str, count: int = 4, seed: int = 0) -> Path:
    for number, name in enumerate(names):
        (folder / name).mkdir(parents=True)
        for row, pixels in enumerate(make_noise_images(count, 8, seed=100 * seed + number)):
            Image.fromarray(pixels).save(folder / name / f"{row}.png")
    return folder


def write_table(folder: Path, *labels: str) -> Path:
    folder.mkdir(parents=True)
    for row, pixels in enumerate(make_noise_images(len(labels), 8)):
        Image.fromarray(pixels).save(folder / f"{row}.png")
    lines = [f"{row}.png,{label}" for row, label in enumerate(labels)]
    (folder / "labels.csv").write_text("\n".join(["path,label", *lines]))
    return folder


def test_names_that_differ_only_in_spelling() -> None:
    names = ["Cat", "cat", "left-lung", "left lung", "Left_Lung", "1", "01", "1.0", "2", "+", "-", "grade 1", "dog"]
    assert find_near_equal(names) == [("Cat", "cat"), ("left-lung", "left lung", "Left_Lung"), ("1", "01", "1.0")]
    assert find_near_equal(["a", "b", "-1", "1", "10", "1e1"]) == []
    forms = ["cat", "\uff43\uff41\uff54", "class1", "class01", "stra\u00dfe", "STRASSE"]
    assert find_near_equal(forms) == [("cat", "\uff43\uff41\uff54"), ("class1", "class01"), ("stra\u00dfe", "STRASSE")]
    assert find_near_equal(["1-11", "11-1", "v1.10", "v1.1", "v1.01", "grade 1", "grade 2", "2020-1"]) == []
    assert normalize_class_name("\u200bcat\x1b[31m\u202e\x00 ") == "cat[31m"
    assert normalize_class_name("  cafe\u0301   noir ") == "caf\u00e9 noir"


def test_numbers_are_sorted_as_numbers() -> None:
    assert sort_class_names(["10", "9", "2", "0"]) == ["0", "2", "9", "10"]
    assert sort_class_names(["00", "01", "10", "09"]) == ["00", "01", "09", "10"]
    assert sort_class_names(["b", "10", "9"]) == ["10", "9", "b"]


def test_class_folders_with_nearly_equal_names_are_refused(tmp_path: Path) -> None:
    for layout in ("plain", "train"):
        data_folder = tmp_path / layout
        write_folders(data_folder if layout == "plain" else data_folder / "train", "Cat", "cat", "dog")
        if layout == "train":
            write_folders(data_folder / "test", "Cat", "cat", "dog", seed=1)
        for read in (lambda: load(str(data_folder)), lambda: scan_folder(data_folder)):  # noqa: B023
            with pytest.raises(UserError, match=r"'Cat' and 'cat' differ only in case.*classes\.txt"):
                read()
    for subset in ("train", "test"):
        (tmp_path / "train" / subset / "classes.txt").write_text("Cat\ncat\ndog\n")
    assert load(str(tmp_path / "train")).classes == ("Cat", "cat", "dog")


def test_train_and_test_are_compared_by_the_plan_too(tmp_path: Path) -> None:
    write_folders(tmp_path / "train", "cat", "dog")
    write_folders(tmp_path / "test", "Cat", "dog", seed=1)
    for read in (lambda: load(str(tmp_path)), lambda: scan_folder(tmp_path)):
        with pytest.raises(UserError, match=r"class folder Cat is in test but not in train \(there it is cat: rename"):
            read()


def test_decomposed_accents_are_the_same_class(tmp_path: Path) -> None:
    write_folders(tmp_path / "train", "caf\u00e9", "tea")
    write_folders(tmp_path / "test", "cafe\u0301", "tea", seed=1)
    assert load(str(tmp_path)).classes == ("caf\u00e9", "tea")


def test_numbered_class_folders_have_the_order_of_numbers(tmp_path: Path) -> None:
    write_folders(tmp_path, *map(str, range(12)), count=2)
    assert load(str(tmp_path)).classes == tuple(map(str, range(12)))


def test_table_with_nearly_equal_names_prompts_for_any_counts(tmp_path: Path) -> None:
    labels = ["dog" if row % 2 else "Cat" if row % 4 else "cat" for row in range(24)]
    data_folder = write_table(tmp_path / "in", *labels)
    with pytest.raises(
        UserError, match=r"nearly the same: cat \(6 labels\): did you mean Cat \(6\)\?; correct labels.csv"
    ):
        read_site(data_folder)
    (data_folder / "classes.txt").write_text("cat\nCat\ndog\n")
    assert read_site(data_folder).classes == ("cat", "Cat", "dog")
    with pytest.raises(UserError, match=r"1\.0 \(1 labels\): did you mean 1 \(2\)\?"):
        read_site(write_table(tmp_path / "numbers", "1", "1.0", "2", "1", "2"))


def test_missing_labels_of_a_table_are_unlabeled(tmp_path: Path) -> None:
    data_folder = write_table(tmp_path / "in", "a", "", "nan", "NA", "b", "NaN", "none")
    site, findings = scan_site(data_folder)
    assert site.classes == ("a", "b", "none")
    assert site.labels.tolist() == [0, -1, -1, -1, 1, -1, 2]
    assert [finding.kind for finding in findings if finding.blocks] == []
    assert any("1 nan" in text for finding in findings for text in finding.names)
    (data_folder / "classes.txt").write_text("a\nb\nNA\nnone\n")
    assert read_site(data_folder).labels.tolist() == [0, -1, -1, 2, 1, -1, 3]


def test_numbers_of_a_table_are_sorted(tmp_path: Path) -> None:
    assert read_site(write_table(tmp_path / "in", "10", "9", "2")).classes == ("2", "9", "10")


def test_sites_with_other_spellings_are_named(tmp_path: Path) -> None:
    sites = [
        read_site(write_table(tmp_path / name, label, "dog")) for name, label in (("east", "Cat"), ("west", "cat"))
    ]
    with pytest.raises(UserError, match="'Cat' in east and 'cat' in west differ only"):
        _merge_classes(sites)


def test_evaluation_names_the_class_that_may_be_meant(tmp_path: Path) -> None:
    write_folders(tmp_path / "in", "Cat", "dog")
    with pytest.raises(UserError, match=r"does not know the class 'Cat' of 4 images; rename it to 'cat'"):
        list_labeled_images(tmp_path / "in", ("cat", "dog"))
    write_folders(tmp_path / "blank", "big  cat", "dog")
    assert len(list_labeled_images(tmp_path / "blank", ("big cat", "dog"))[0]) == 8


def test_class_names_of_parquet_are_normalized(tmp_path: Path) -> None:
    files = [encode_image(image) for image in make_noise_images(8)]
    for subset, rows in (("train", files[:4]), ("test", files[4:])):
        write_parquet(tmp_path / f"{subset}.parquet", rows, [0, 1, 0, 1], classes=["cafe\u0301 ", "Caf\u00e9-"])
    source = load(str(tmp_path))
    assert source.classes == ("caf\u00e9", "Caf\u00e9-")
    assert any("nearly the same" in note for note in source.notes)
