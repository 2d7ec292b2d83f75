"""Training images that nobody has labeled: no rule deals them, no method takes them as labeled, no pseudo-label is evaluated."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from image_files import assert_load_refused, make_noise_images, write_parquet

from halfmoon.config.schema import Config
from halfmoon.core.errors import UserError
from halfmoon.data import Split, hold_out, load, summarize
from halfmoon.runs.runner import start


@pytest.fixture
def data_folder(tmp_path: Path) -> Path:
    """Return the folder of six training images, of which two have no label, and two test images."""
    write_parquet(tmp_path / "train.parquet", make_noise_images(6, 8), [0, 1, None, 0, 1, None])
    write_parquet(tmp_path / "test.parquet", make_noise_images(2, 8), [0, 1])
    return tmp_path


def test_saved_split_assigns_unknown_labels_to_clients(data_folder: Path) -> None:
    source = load(str(data_folder))
    assert source.train.labels.tolist() == [0, 1, -1, 0, 1, -1]
    config = Config(
        data=str(data_folder), network="small", clients=1, cohort=1, rounds=1, steps=1, run_dir=data_folder / "run"
    )
    with pytest.raises(UserError, match=r"2 training images have no label, which no split rule can deal"):
        start(config)
    split = Split(np.zeros(6, np.int64), np.array([True, True, False, False, False, False]), 1)
    split.save(data_folder / "split.parquet")
    config = replace(config, split=data_folder / "split.parquet")
    with pytest.raises(UserError, match=r"method fedavg-sl needs all labels, but 2 training images have none"):
        start(replace(config, method="fedavg-sl"))
    assert summarize(split, source.train.labels, source.classes)["each"][0]["unlabeled_classes"] == [1, 1]
    outcome = start(replace(config, method="fedavg-fixmatch"))
    (row,) = (json.loads(line) for line in (outcome.folder / "metrics.jsonl").read_text().splitlines())
    assert row["pseudo"]["accuracy"] is not None  # of the two whose truth is known


def test_a_split_with_one_as_labeled_is_refused(data_folder: Path) -> None:
    Split(np.zeros(6, np.int64), np.array([True, True, True, False, False, False]), 1).save(
        data_folder / "split.parquet"
    )
    config = Config(
        data=str(data_folder), split=data_folder / "split.parquet", clients=1, cohort=1, run_dir=data_folder / "run"
    )
    with pytest.raises(UserError, match=r"the split has row 2 of .* as a labeled one, but it has no label"):
        start(config)


def test_they_are_not_set_aside_for_validation(data_folder: Path) -> None:
    held = hold_out(load(str(data_folder)), 0.5)
    assert sorted(held.validation.labels.tolist()) == [0, 1]


def test_a_test_image_needs_its_label(data_folder: Path) -> None:
    write_parquet(data_folder / "test.parquet", make_noise_images(2, 8), [0, None])
    assert_load_refused(r"row 1 of test has no label, but only training images can go without one", str(data_folder))
