"""A second reader of a site labels the same images without seeing the first reader's labels."""

from pathlib import Path

import pytest
from PIL import Image

from halfmoon import UserError
from halfmoon.pages.label import LabelOptions, LabelPage
from halfmoon.sites.folders import read_site
from halfmoon.sites.folders.labels import LabelEdit, find_disagreements, read_labels, write_labels


def test_a_second_reader_sees_no_label_and_writes_none_of_the_first(tmp_path: Path):
    """Only images that have a label are shown, without it; both tables stay apart, and the page lists what differs."""
    for n in range(6):
        Image.new("L", (4, 4), n).save(tmp_path / f"{n}.png")
    (tmp_path / "classes.txt").write_text("sound\nill\n")
    write_labels(tmp_path, *(LabelEdit(f"{n}.png", "sound") for n in range(3)))
    site = read_site(tmp_path)
    second = LabelPage(site, (), None, LabelOptions(reader="ada"))
    assert (second.store.labels == -1).all()
    assert sorted(second.order()) == [0, 1, 2]
    second.store.set_label(0, "ill", "", None)
    second.store.set_label(1, "sound", "", None)
    assert read_labels(tmp_path) == {f"{n}.png": "sound" for n in range(3)}
    assert find_disagreements(tmp_path) == ["0.png"]
    assert LabelPage(site, (), None, LabelOptions())._find_disagreements() == [0]
    for name in ("", "../x", "a b"):
        with pytest.raises(UserError, match="needs a name"):
            LabelPage(site, (), None, LabelOptions(reader=name))
