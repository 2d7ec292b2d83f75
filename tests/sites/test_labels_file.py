"""Check labels.csv: what remains, what is refused, and that concurrent writers lose no label."""

import csv
import multiprocessing
import threading
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from halfmoon.core.errors import UserError
from halfmoon.data.readers.label_table import read_label_table
from halfmoon.pages.label_store import LabelStore
from halfmoon.sites.folders import read_site
from halfmoon.sites.folders.labels import (
    LABELS_FILE,
    NOTES_FILE,
    UNDECIDED_FILE,
    LabelConflict,
    LabelEdit,
    read_labels,
    write_labels,
)
from halfmoon.storage import atomic_io


def folder(path: Path, count: int = 6, text: str | bytes = "path,label\n", classes: str = "cat\ndog\n") -> Path:
    path.mkdir(exist_ok=True)
    for n in range(count):
        Image.new("L", (4, 4), n).save(path / f"{n}.png")
    (path / "labels.csv").write_bytes(text if isinstance(text, bytes) else text.encode())
    (path / "classes.txt").write_text(classes)
    return path


def read_csv_text(path: Path) -> str:
    return (path / "labels.csv").read_bytes().decode()


def test_an_answer_is_a_line_and_is_read_back(tmp_path: Path):
    site = folder(tmp_path)
    write_labels(site, LabelEdit("2.png", "cat"))
    write_labels(site, LabelEdit("0.png", "dog"))
    assert read_csv_text(site) == "path,label\n2.png,cat\n0.png,dog\n"
    assert list(read_site(site).labels) == [1, -1, 0, -1, -1, -1]
    write_labels(site, LabelEdit("2.png", "", previous="cat"))
    assert read_csv_text(site) == "path,label\n0.png,dog\n"


def test_other_lines_stay_as_they_were_written(tmp_path: Path):
    """Other slashes, quotes, a byte order mark and semicolons are the writer's own."""
    text = b'\xef\xbb\xbfpath;label\r\n.\\1.png;"cat"\r\n2.png;dog\r\n'
    site = folder(tmp_path, text=text)
    write_labels(site, LabelEdit("1.png", "dog", previous="cat"), LabelEdit("3.png", "cat"))
    assert (site / "labels.csv").read_bytes() == "\ufeffpath;label\n.\\1.png;dog\n2.png;dog\n3.png;cat\n".encode()


def test_a_name_with_a_comma_or_a_quote_survives(tmp_path: Path):
    site = folder(tmp_path, classes='a "b", c\ncat\n')
    write_labels(site, LabelEdit("0.png", 'a "b", c'))
    assert read_labels(site) == {"0.png": 'a "b", c'}
    assert list(read_site(site).labels) == [0, -1, -1, -1, -1, -1]


def test_who_and_when_stand_beside_it(tmp_path: Path):
    site = folder(tmp_path, text="path,label\n5.png,dog\n")
    write_labels(site, LabelEdit("0.png", "cat", by="Ada"))
    header, old, new = read_csv_text(site).splitlines()
    assert (header, old) == ("path,label,by,at", "5.png,dog,,")
    assert new.startswith("0.png,cat,Ada,20")
    assert new.endswith("Z")
    assert list(read_site(site).labels) == [0, -1, -1, -1, -1, 1]
    write_labels(site, LabelEdit("1.png", "cat"))  # somebody who is not asked
    assert read_csv_text(site).splitlines()[-1] == "1.png,cat,,"


def test_an_answer_over_another_persons_is_refused(tmp_path: Path):
    site = folder(tmp_path)
    write_labels(site, LabelEdit("0.png", "cat"))
    before = read_csv_text(site)
    with pytest.raises(LabelConflict, match=r"0\.png has been labeled cat meanwhile") as refused:
        write_labels(site, LabelEdit("0.png", "dog"))
    assert (refused.value.current, read_csv_text(site)) == ("cat", before)
    write_labels(site, LabelEdit("0.png", "cat"))  # the same reply is no conflict
    write_labels(site, LabelEdit("0.png", "dog", previous="cat"))
    assert read_labels(site) == {"0.png": "dog"}


@pytest.mark.parametrize("text", [b"name,kind\n", b'path,label\n"a', b"\xff\xfe\n"])
def test_a_broken_file_is_left_alone(tmp_path: Path, text: bytes):
    site = folder(tmp_path, text=text)
    with pytest.raises(UserError, match=r"labels\.csv"):
        write_labels(site, LabelEdit("0.png", "cat"))
    assert (site / "labels.csv").read_bytes() == text


def test_a_kill_in_the_middle_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    site = folder(tmp_path, text="path,label\n1.png,cat\n")

    def dead(*_: object) -> None:
        raise OSError("no more")

    monkeypatch.setattr(atomic_io.os, "replace", dead)
    with pytest.raises(UserError, match="cannot be written"):
        write_labels(site, LabelEdit("0.png", "cat"))
    assert read_csv_text(site) == "path,label\n1.png,cat\n"


def _many(site: Path, first: int, last: int) -> None:
    for n in range(first, last):
        write_labels(site, LabelEdit(f"{n}.png", "cat" if n % 2 else "dog"))


def test_two_processes_and_three_threads_lose_no_answer(tmp_path: Path):
    site = folder(tmp_path, count=1)
    other = multiprocessing.get_context("fork").Process(target=_many, args=(site, 0, 25))
    other.start()
    threads = [threading.Thread(target=_many, args=(site, 25 + 15 * n, 40 + 15 * n)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    other.join()
    assert read_labels(site) == {f"{n}.png": "cat" if n % 2 else "dog" for n in range(70)}


def test_two_books_see_each_other(tmp_path: Path):
    site = folder(tmp_path)
    one, two = (LabelStore(read_site(site), ()) for _ in range(2))
    start = two.version
    one.set_label(3, "dog", "", None)
    assert two.describe(start)["changes"] == [[3, 1, 0]]
    with pytest.raises(LabelConflict) as refused:
        two.set_label(3, "cat", "", None)
    assert refused.value.current == "dog"
    assert (one.written_count, two.written_count) == (1, 0)
    assert two.count_labels() == [0, 1]


def test_not_sure_is_kept_until_there_is_an_answer(tmp_path: Path):
    store = LabelStore(read_site(folder(tmp_path)), ())
    store.set_undecided(2, True, "Ada")
    assert read_labels(tmp_path, UNDECIDED_FILE) == {"2.png": "not sure"}
    assert list(np.flatnonzero(LabelStore(read_site(tmp_path), ()).undecided)) == [2]
    store.set_label(2, "cat", "", None)
    assert read_labels(tmp_path, UNDECIDED_FILE) == {}
    assert not store.undecided.any()


def test_a_class_far_behind_the_others_is_starved(tmp_path: Path):
    lines = "".join(f"{n}.png,{'dog' if n else 'cat'}\n" for n in range(6))
    store = LabelStore(read_site(folder(tmp_path, text=f"path,label\n{lines}")), ())
    assert store.count_labels() == [1, 5]
    assert store.find_rare_classes() == []  # 1 of 3 on average: a third, not less
    (tmp_path / "labels.csv").write_text("path,label\n" + lines.replace("0.png,cat", "0.png,dog "))
    store.refresh()
    assert store.find_rare_classes() == [0]


def test_a_class_that_nobody_has_is_refused(tmp_path: Path):
    store = LabelStore(read_site(folder(tmp_path)), ())
    with pytest.raises(UserError, match="no class 'cow'"):
        store.set_label(0, "cow", "", None)
    with pytest.raises(UserError, match="no image 6"):
        store.set_label(6, "cat", "", None)


def test_a_file_in_other_cases_is_added_to(tmp_path: Path):
    """A second file would count in its place, and its labels would be lost."""
    site = folder(tmp_path, text="path,label\n1.png,cat\n")
    (site / "labels.csv").rename(site / "LABELS.CSV")
    write_labels(site, LabelEdit("0.png", "dog"))
    assert not (site / "labels.csv").exists()
    assert list(read_site(site).labels) == [1, 0, -1, -1, -1, -1]


@pytest.mark.parametrize(("encoding", "separator"), [("utf-16", "\t"), ("utf-8-sig", ";")])
def test_what_spreadsheets_write_stays_theirs(tmp_path: Path, encoding: str, separator: str):
    text = f"Path{separator}Label\r\n1.png{separator}cat\r\n".encode(encoding)
    site = folder(tmp_path, text=text)
    write_labels(site, LabelEdit("0.png", "dog"))
    now = (site / "labels.csv").read_bytes()
    assert now.decode(encoding).splitlines()[1:] == [f"1.png{separator}cat", f"0.png{separator}dog"]
    assert now[:2] == text[:2]  # the byte order mark
    assert list(read_site(site).labels) == [1, 0, -1, -1, -1, -1]


FORMULAS = ("=1+1", "+cmd|'/C calc'!A0", "-2+3", "@sum", "'=1", "''=1")
HARMLESS = ("-", "+", "-1", "+2.5", "cat", "'tis", "a=b")


@pytest.mark.parametrize("text", [*FORMULAS, *HARMLESS])
@pytest.mark.parametrize("name", [LABELS_FILE, NOTES_FILE])
def test_a_spreadsheet_computes_nothing_of_a_note_a_label_or_a_path(text: str, name: str, tmp_path: Path):
    """A note and a path come from other people. The file has an apostrophe before a formula; here it is read back."""
    path = f"{text}.png".replace("/", "_")
    write_labels(tmp_path, LabelEdit(path, text), LabelEdit("b.png", "plain"), name=name)
    assert read_labels(tmp_path, name) == {path: text, "b.png": "plain"}
    write_labels(tmp_path, LabelEdit("b.png", "other", "plain"), name=name)
    assert read_labels(tmp_path, name) == {path: text, "b.png": "other"}
    written = list(csv.reader((tmp_path / name).read_text().splitlines()))
    assert written[1][1] == (f"'{text}" if text in FORMULAS else text)
    assert not [cell for row in written for cell in row if cell.startswith(("=", "@"))]
    if name == LABELS_FILE:
        assert read_label_table(tmp_path).rows == [(path, text, ""), ("b.png", "other", "")]
