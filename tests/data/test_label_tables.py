"""Tables of labels in the forms that people have: other titles and further columns, and metadata.csv of Hugging Face."""

import csv
from collections.abc import Sequence
from pathlib import Path

import pytest
from PIL import Image
from support.image_files import make_noise_images

import halfmoon
from halfmoon import UserError
from halfmoon.cli.main import main
from halfmoon.data import load
from halfmoon.data.readers.label_table import find_labels_file, read_label_table, read_paths_by_class
from halfmoon.sites.folders import read_site
from halfmoon.sites.folders.labels import LabelEdit, read_labels, write_labels
from halfmoon.studies.scan_folder import scan_folder


def write_table(folder: Path, header: str, line: str, count: int = 8, name: str = "labels.csv", sep: str = ",") -> Path:
    """Write `count` images, and for each a line with its {path}, {label} and {number}."""
    (folder / "im").mkdir(parents=True)
    lines = [header]
    for number, pixels in enumerate(make_noise_images(count, 8)):
        Image.fromarray(pixels).save(folder / "im" / f"{number}.png")
        lines.append(line.format(path=f"im/{number}.png", label="dog" if number % 2 else "cat", number=number))
    (folder / name).write_text("\n".join(lines).replace(",", sep) + "\n")
    return folder


@pytest.mark.parametrize(
    ("header", "line", "name", "sep"),
    [
        ("path,label", "{path},{label}", "labels.csv", ","),
        ("label,path", "{label},{path}", "labels.csv", ","),
        ("File_Name,Class", "{path},{label}", "labels.csv", ";"),
        ("image,target", "{path},{label}", "labels.csv", "\t"),
        ("path,label,age,Sex", "{path},{label},51,M", "labels.csv", ","),
        ("id,filename,category,group", "{number},{path},{label},p{number}", "labels.csv", ","),
        ("file_name,label", "{path},{label}", "metadata.csv", ","),
        ("file_name,text,label", "{path},a picture,{label}", "metadata.csv", ";"),
        ("path,label", "{path},{label}", "Labels.TSV", "\t"),
        ("path,label", "{path},{label}", "labels.txt", "\t"),
        ("path,label,,", "{path},{label},,", "labels.csv", ","),  # empty columns of a spreadsheet
        ("sep=;\npath;label", "{path};{label}", "labels.csv", ","),  # Excel's line about the separator
    ],
)
def test_a_table_with_other_titles_is_read(header: str, line: str, name: str, sep: str, tmp_path: Path) -> None:
    folder = write_table(tmp_path / "in", header, line, name=name, sep=sep)
    site = read_site(folder)
    assert (site.classes, site.labels.tolist()) == (("cat", "dog"), [0, 1] * 4)
    assert site.groups == ({f"im/{n}.png": f"p{n}" for n in range(8)} if "group" in header else {})
    contents = scan_folder(folder)
    assert contents is not None
    assert (contents.site, contents.labeled) == (True, 8)
    assert main(["site", "check", str(folder)]) == 0


@pytest.mark.parametrize(
    ("header", "line", "fault"),
    [
        ("path,age", "{path},51", "line 1 is 'path,age', not path,label"),
        ("path,label,path", "{path},{label},{path}", "not path,label"),
        ("path,label,age", "{path},{label}", "line 2 is not one path and one label"),
        ("path,label,by", "{path},{label},me", "not path,label"),
    ],
)
def test_a_table_without_path_and_label_is_refused(header: str, line: str, fault: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"labels.csv cannot be read: {fault}|{fault}"):
        read_site(write_table(tmp_path / "in", header, line))


def test_a_table_in_a_format_that_is_not_read_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It was ignored without a word, and all its images were unlabeled."""
    folder = write_table(tmp_path / "in", "path,label", "{path},{label}", name="labels.xlsx")
    (folder / "im" / "0.png").rename(folder / "0.png")  # images at the top as well: no class folders
    for command in (["site", "check"], ["run", "--plan", "--data"], ["data"]):
        assert main([*command, str(folder)]) in (1, 2)
        assert "save it as CSV UTF-8 under the name labels.csv" in " ".join("".join(capsys.readouterr()).split())
    (folder / "labels.csv").write_text("path,label\n0.png,cat\nim/1.png,dog\n")
    assert read_site(folder).classes == ("cat", "dog")
    (folder / "labels.tsv").write_text("path\tlabel\n0.png\tcat\n")
    with pytest.raises(UserError, match=r"there are labels\.csv and labels\.tsv; keep one of them"):
        read_site(folder)


def test_json_lines_with_labels_are_refused_and_captions_are_not(tmp_path: Path) -> None:
    folder = write_table(tmp_path / "in", "path,text", "{path},x", name="notes.csv")
    (folder / "metadata.jsonl").write_text('{"file_name": "im/0.png", "text": "a picture"}\n')
    assert read_label_table(folder).file is None
    (folder / "metadata.jsonl").write_text('{"file_name": "im/0.png", "label": "cat"}\n')
    assert read_label_table(folder).is_unread


def test_class_folders_next_to_a_spreadsheet_give_the_labels(tmp_path: Path) -> None:
    for name in ("cat", "dog"):
        write_table(tmp_path / "in" / name, "path,text", "{path},x", name="notes.csv")
    (tmp_path / "in" / "labels.xlsx").write_bytes(b"PK")
    source = load(str(tmp_path / "in"))
    assert source.classes == ("cat", "dog")
    assert any("labels.xlsx, whose format is not read" in note for note in source.notes)


def test_labels_are_added_to_a_table_with_tabs(tmp_path: Path) -> None:
    folder = write_table(tmp_path / "in", "path,label", "{path},{label}", 2, "labels.tsv", "\t")
    write_labels(folder, LabelEdit("im/1.png", "cat", "dog"))
    assert (folder / "labels.tsv").read_text() == "path\tlabel\nim/0.png\tcat\nim/1.png\tcat\n"
    assert not (folder / "labels.csv").exists()


def test_a_path_in_another_case_or_without_suffix_is_suggested(tmp_path: Path) -> None:
    folder = write_table(tmp_path / "in", "path,label", "{path},{label}", 3)
    (folder / "labels.csv").write_text("path,label\nIM/0.PNG,cat\nim/1,dog\nim/9.png,dog\n")
    with pytest.raises(
        UserError, match=r"IM/0\.PNG \(did you mean im/0\.png\?\), im/1 \(did you mean im/1\.png\?\), im/9"
    ):
        read_site(folder)


def test_nearly_equal_names_in_a_table_of_training_images_are_refused(tmp_path: Path) -> None:
    for subset in ("train", "test"):
        folder = write_table(tmp_path / "in" / subset, "path,label", "{path},{label}", 6)
        text = (folder / "labels.csv").read_text()
        (folder / "labels.csv").write_text(text.replace("im/0.png,cat", "im/0.png,Cat"))
    with pytest.raises(UserError, match=r"train/labels\.csv: the class names 'Cat' and 'cat' differ only in"):
        load(str(tmp_path / "in"))
    for subset in ("train", "test"):
        (tmp_path / "in" / subset / "classes.txt").write_text("Cat\ncat\ndog\n")
    assert load(str(tmp_path / "in")).classes == ("Cat", "cat", "dog")


def test_captions_are_no_labels(tmp_path: Path) -> None:
    """Hugging Face's metadata.csv may have any columns: without labels it is ignored, and labels.csv goes before it."""
    folder = write_table(tmp_path / "in", "file_name,text", "{path},a picture", name="metadata.csv")
    assert find_labels_file(folder).name == "labels.csv"
    assert read_label_table(folder).file is None
    with pytest.raises(UserError, match="its only class folder"):
        load(str(folder))
    (folder / "metadata.csv").write_text("file_name,label\nim/0.png,eel\n")
    (folder / "labels.csv").write_text("path,label\nim/0.png,cat\nim/1.png,dog\n")
    assert read_site(folder).classes == ("cat", "dog")


def test_an_edit_preserves_titles_and_further_columns(tmp_path: Path) -> None:
    folder = write_table(tmp_path / "in", "id,file_name,Label,Sex", "{number},{path},{label},M", 3, "metadata.csv")
    write_labels(folder, LabelEdit("im/0.png", "dog", "cat"), LabelEdit("im/1.png", "", "dog"))
    assert (folder / "metadata.csv").read_text() == (
        "id,file_name,label,Sex\n0,im/0.png,dog,M\n1,im/1.png,,M\n2,im/2.png,cat,M\n"
    )
    assert not (folder / "labels.csv").exists()
    write_labels(folder, LabelEdit("im/2.png", "dog", "cat", by="Ann"))
    assert read_labels(folder) == {"im/0.png": "dog", "im/2.png": "dog"}
    with (folder / "metadata.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["id"], row["file_name"], row["by"]) for row in rows] == [
        ("0", "im/0.png", ""),
        ("1", "im/1.png", ""),
        ("2", "im/2.png", "Ann"),
    ]


def test_parts_with_metadata_are_read_as_hugging_face_does(tmp_path: Path) -> None:
    for subset, count in (("train", 12), ("test", 6)):
        write_table(tmp_path / "in" / subset, "file_name,label", "{path},{label}", count, "metadata.csv")
    source = load(str(tmp_path / "in"))
    assert (source.classes, len(source.train), len(source.test)) == (("cat", "dog"), 12, 6)
    assert source.train.labels.tolist() == [0] * 6 + [1] * 6
    assert (
        source.train.images == make_noise_images(12, 8)[[0, 10, 2, 4, 6, 8, 1, 11, 3, 5, 7, 9]]
    ).all()  # sorted by name
    contents = scan_folder(tmp_path / "in")
    assert contents is not None
    assert (len(contents.paths), contents.tests, contents.nested) == (12, 6, 0)


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("im/0.png,", "im/0.png has no label"),
        ("im/0.png,dog", "im/0.png has the labels cat and dog"),
        ("im/9.png,cat", "there is no file im/9.png"),
    ],
)
def test_fault_in_a_subset_is_named(line: str, fault: str, tmp_path: Path) -> None:
    for subset in ("train", "test"):
        folder = write_table(tmp_path / "in" / subset, "file_name,label", "{path},{label}", 4, "metadata.csv")
    with (folder / "metadata.csv").open("a") as file:
        file.write(line + "\n")
    with pytest.raises(UserError, match=rf"test/metadata\.csv: {fault}"):
        load(str(tmp_path / "in"))


def test_predictions_keep_further_columns(tmp_path: Path) -> None:
    """Cells follow the predictions of their image; an image without a line has empty ones."""
    folder = write_table(tmp_path / "in", "path,label,age,sure", "{path},{label},{number},=1+1")
    Image.fromarray(make_noise_images(1, 8, seed=5)[0]).save(folder / "im" / "new.png")
    options = {"clients": 2, "setting": "iid-iid", "rounds": 1, "executor": "loop", "width": 4}
    halfmoon.run(method="fedavg", run_dir=tmp_path / "run", **options)
    assert main(["predict", str(tmp_path / "run"), str(folder), "--out", str(tmp_path / "out.csv")]) == 0
    with (tmp_path / "out.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["path"], row["age"], row["given_sure"]) for row in rows] == [
        *((f"im/{n}.png", str(n), "'=1+1") for n in range(8)),  # a spreadsheet program would run the formula
        ("im/new.png", "", ""),
    ]
    assert {row["sure"] for row in rows} <= {"yes", "no"}


def write_numbered(folder: Path, lines: Sequence[str], name: str = "labels.csv") -> Path:
    folder.mkdir(parents=True)
    for row, pixels in enumerate(make_noise_images(4, 8)):
        Image.fromarray(pixels).save(folder / f"{row}.png")
    (folder / name).write_text("\n".join(["path,label", *lines]) + "\n")
    return folder


@pytest.mark.parametrize(
    ("lines", "sentence"),
    [
        (
            ["0.png,a", "8.png,b", "1.png,", "9.png,b"],
            r"no file 8\.png.*; 1\.png has no label.*; there is no file 9\.png",
        ),
        (["0.png,a", "./0.png,b"], r"\./0\.png has the labels a and b"),
        (["0.png,a", "../other/0.png,b"], r"\.\./other/0\.png is not in its folder"),
        ([], "lists no image"),
        (["0.png,a", "1.png,#N/A"], r"1\.png has no label"),
    ],
)
def test_all_faults_of_a_table_are_named(lines: list[str], sentence: str, tmp_path: Path) -> None:
    write_numbered(tmp_path / "other", ["0.png,a"])
    with pytest.raises(UserError, match=sentence):
        read_paths_by_class(write_numbered(tmp_path / "train", lines))


def test_absolute_paths_in_the_folder_and_a_table_in_other_case_are_read(tmp_path: Path) -> None:
    folder = tmp_path / "train"
    write_numbered(folder, [f"{folder / '0.png'},a", "1.png,b"], "Metadata.csv")
    assert read_paths_by_class(folder) == {"a": [folder / "0.png"], "b": [folder / "1.png"]}
