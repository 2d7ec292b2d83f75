"""Two readers of a site: kappa by hand and by scikit-learn, and a second reader who sees nobody's labels."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from halfmoon import UserError
from halfmoon.pages.label import Labeling, Options
from halfmoon.sites.folders import read
from halfmoon.sites.folders.labels import Answer, agreements, compared, labels, write


def test_kappa_by_hand():
    """Cohen's example: 20 + 15 of 50 agree (0.7); by chance 0.5 * 0.6 + 0.5 * 0.4 = 0.5, so kappa is 0.4."""
    cells = [("yes", "yes", 20), ("yes", "no", 5), ("no", "yes", 10), ("no", "no", 15)]
    pairs = [(a, b) for a, b, count in cells for _ in range(count)]
    one = {f"{n}.png": a for n, (a, _) in enumerate(pairs)}
    other = {f"{n}.png": b for n, (_, b) in enumerate(pairs)} | {"x.png": "yes"}
    found = compared(("a", "b"), one, other)
    assert (found.images, found.agreement, len(found.differing)) == (50, 0.7, 15)
    assert found.kappa == pytest.approx(0.4)


def test_kappa_is_that_of_scikit_learn():
    metrics = pytest.importorskip("sklearn.metrics")
    one, other = np.random.default_rng(0).integers(0, 4, (2, 200)).astype(str)
    other[:120] = one[:120]
    found = compared(("a", "b"), dict(enumerate(one)), dict(enumerate(other)))
    assert found.kappa == pytest.approx(metrics.cohen_kappa_score(one, other))


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
    (found,) = agreements(tmp_path)
    assert (found.readers, found.images, found.differing) == (("labels.csv", "ada"), 2, (("0.png", "sound", "ill"),))
    assert Labeling(site, (), None, Options())._differing() == [0]
    for name in ("", "../x", "a b"):
        with pytest.raises(UserError, match="needs a name"):
            Labeling(site, (), None, Options(reader=name))
