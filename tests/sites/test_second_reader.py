"""A second reader of a site labels the same images without seeing the first reader's labels."""

from pathlib import Path

import pytest
from PIL import Image

from halfmoon import UserError
from halfmoon.pages.label import Labeling, Options
from halfmoon.sites.folders import read
from halfmoon.sites.folders.labels import Answer, disagreements, labels, write


def test_a_second_reader_sees_no_label_and_writes_none_of_the_first(tmp_path: Path):
    """Only images that have a label are shown, without it; both tables stay apart, and the page lists what differs."""
    for n in range(6):
        Image.new("L", (4, 4), n).save(tmp_path / f"{n}.png")
    (tmp_path / "classes.txt").write_text("sound\nill\n")
    write(tmp_path, *(Answer(f"{n}.png", "sound") for n in range(3)))
    site = read(tmp_path)
    second = Labeling(site, (), None, Options(reader="ada"))
    assert (second.book.labels == -1).all()
    assert sorted(second.order()) == [0, 1, 2]
    second.book.answer(0, "ill", "", None)
    second.book.answer(1, "sound", "", None)
    assert labels(tmp_path) == {f"{n}.png": "sound" for n in range(3)}
    assert disagreements(tmp_path) == ["0.png"]
    assert Labeling(site, (), None, Options())._differing() == [0]
    for name in ("", "../x", "a b"):
        with pytest.raises(UserError, match="needs a name"):
            Labeling(site, (), None, Options(reader=name))
