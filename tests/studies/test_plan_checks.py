"""The plan of a folder makes the checks of the run, and chooses as many clients as there are images for."""

import json
from pathlib import Path

import pytest
from PIL import Image
from support.image_files import make_noise_images, write_parquet

from halfmoon.cli.main import main
from halfmoon.studies import plan as planning


def write_classes(folder: Path, **counts: int) -> Path:
    for number, (name, count) in enumerate(counts.items()):
        (folder / name).mkdir(parents=True)
        for row, pixels in enumerate(make_noise_images(count, 8, seed=number)):
            Image.fromarray(pixels).save(folder / name / f"{row}.png")
    return folder


@pytest.mark.parametrize(
    "extra",
    [
        ["--network", "small", "--width", "4", "--steps", "1", "--resize", "8"],
        pytest.param([], marks=pytest.mark.nightly),  # the pretrained network's heads
    ],
)
def test_a_plan_chooses_clients_that_the_run_can_have(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, extra: list[str]
) -> None:
    """20 labels of 24 training images leave 4 unlabeled ones, for fewer than the 6 clients of the default."""
    monkeypatch.setattr(planning, "MAX_ROUNDS", 10)
    monkeypatch.setattr(planning, "SCRATCH_SPLITS", 1)
    data = str(write_classes(tmp_path / "in", cat=15, dog=15))
    command = ["run", "--data", data, "--labels", "20", "--minutes", "0.01", *extra]
    assert main([*command, "--plan", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert "simulated client" in plan["chosen"]["labels"]
    assert "6 simulated clients" not in plan["chosen"]["labels"]
    assert main([*command, "--run-dir", str(tmp_path / "out")]) == 0, capsys.readouterr().err


def test_a_plan_refuses_what_the_run_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    few = str(write_classes(tmp_path / "few", cat=15, dog=15))
    one = str(write_classes(tmp_path / "one", cat=15, zebra=1))
    all_labeled = str(write_classes(tmp_path / "two", cat=2, dog=2))
    for options, text in (
        (["--data", few, "--labels", "20", "--clients", "6"], "6 clients with at least 1 unlabeled images each need 6"),
        (["--data", all_labeled], "client 0 (1 of 1 in all) has no unlabeled image"),
        (["--data", one], "zebra: a class of one image has none to test on"),
    ):
        messages = []
        for flags in (["--plan"], ["--run-dir", str(tmp_path / "out")]):
            assert main(["run", *options, "--network", "small", *flags]) == 2
            messages.append(capsys.readouterr().err)
        assert messages[0] == messages[1]
        assert text in messages[0]


def test_a_plan_reads_the_images_of_a_small_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Truncated and equal images were found by the run only. What the plan refuses, the run refuses in the same words."""
    folder = write_classes(tmp_path / "truncated", cat=12, dog=12)
    for row in range(4):
        path = folder / "cat" / f"{row}.png"
        path.write_bytes(path.read_bytes()[:100])
    equal = write_classes(tmp_path / "equal", cat=12, dog=12)
    for path in sorted((equal / "dog").iterdir()):
        path.write_bytes((equal / "dog" / "0.png").read_bytes())
    for data, text in ((folder, "4 of 24 images cannot be read"), (equal, "too few of its 12 images are different")):
        messages = []
        for flags in (["--plan"], ["--run-dir", str(tmp_path / "out")]):
            assert main(["run", "--data", str(data), "--network", "small", "--minutes", "0.01", *flags]) == 2
            messages.append(capsys.readouterr().err.splitlines()[-1])
            assert not (tmp_path / "out").exists()
        assert messages[0] == messages[1]
        assert text in messages[0]


def test_a_plan_names_copies_in_train_and_test(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for subset in ("train", "test"):
        write_classes(tmp_path / "in" / subset, cat=12, dog=12)
    assert main(["run", "--data", str(tmp_path / "in"), "--network", "small", "--plan"]) == 0
    assert "24 of 24 test images are training images" in " ".join(capsys.readouterr().out.split())


def test_a_plan_of_parquet_files_names_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for subset in ("train", "test"):
        write_parquet(tmp_path / f"{subset}.parquet", list(make_noise_images(4)), [0, 1, 0, 1])
    (tmp_path / "train").mkdir()  # as of a data set whose images were unpacked, too
    assert main(["run", "--data", str(tmp_path), "--plan"]) == 2
    assert "to train on parquet or official files, name a --method" in capsys.readouterr().err


def test_a_refused_run_of_a_large_folder_leaves_no_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The images of a large folder are read by the run: its plan.json remained in the run folder."""
    folder = write_classes(tmp_path / "in", cat=12, dog=12)
    for row in range(4):
        path = folder / "cat" / f"{row}.png"
        path.write_bytes(path.read_bytes()[:100])
    monkeypatch.setattr(planning, "MAX_CHECK_SECONDS", 0.0)
    command = ["run", "--data", str(folder), "--network", "small", "--minutes", "0.01"]
    assert main([*command, "--run-dir", str(tmp_path / "out")]) == 2
    assert "4 of 24 images cannot be read" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_plan_of_a_missing_folder_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The error explained which folders go with --plan."""
    assert main(["run", "--data", str(tmp_path / "lost"), "--plan"]) == 2
    assert f"no data set or folder is called '{tmp_path / 'lost'}'" in capsys.readouterr().err
    assert main(["run", "--data", "digits", "--plan"]) == 2
    assert "go with --data FOLDER" in capsys.readouterr().err
