"""Images that a program passes as objects: arrays, PIL images, and data sets of torch and Hugging Face."""

import io
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image

import halfmoon
from halfmoon.core import hubs
from halfmoon.core.errors import UserError
from halfmoon.data.conversion import convert_images, make_memory_data
from halfmoon.data.memory import load_memory, register
from halfmoon.data.readers.parquet import encode_png
from halfmoon.storage.atomic_io import read_rows

SMALL = {"rounds": 1, "clients": 3, "cohort": 2, "steps": 1, "network": "small", "threads": 1, "progress": False}


def some_digits(count: int = 8) -> tuple[np.ndarray, np.ndarray]:
    """Select `count` digits of each class, one class after the other: uint8 (N, 8, 8), int64 (N,)."""
    train = halfmoon.load_data("digits").train
    rows = np.concatenate([np.flatnonzero(train.labels == label)[:count] for label in range(10)])
    return train.images[rows, :, :, 0], train.labels[rows]


X, Y = some_digits()


class Pairs(torch.utils.data.Dataset):
    """A torch data set of (image, label)."""

    def __init__(self, images: Any, labels: Any) -> None:
        self.images = images
        self.labels = labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, row: int) -> tuple[Any, Any]:
        return self.images[row], self.labels[row]


class Column:
    """As much of `datasets.ClassLabel` as is used."""

    def __init__(self, names: list[str] | None = None) -> None:
        if names is not None:
            self.names = names


class Rows:
    """As much of `datasets.Dataset` as is used: it needs no library."""

    def __init__(self, images: Any, labels: Any, names: list[str] | None = None, image: str = "image") -> None:
        self.columns = {image: list(images), "label": list(labels)}
        self.column_names = list(self.columns)
        self.features = {image: Column(), "label": Column(names)}

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, key: int | str) -> Any:
        if isinstance(key, str):
            return self.columns[key]
        return {name: values[key] for name, values in self.columns.items()}


def as_pil(images: np.ndarray) -> list[Image.Image]:
    return [Image.fromarray(image) for image in images]


def hugging_face(images: np.ndarray, labels: np.ndarray) -> Any:
    """A data set of the library, if it is installed."""
    datasets = pytest.importorskip("datasets", reason="the extra `hub` is not installed")
    return datasets.Dataset.from_dict(
        {"image": as_pil(images), "label": labels.tolist()},
        features=datasets.Features(
            {"image": datasets.Image(), "label": datasets.ClassLabel(names=[str(label) for label in range(10)])}
        ),
    )


def arrays_in_lists(images: np.ndarray, labels: np.ndarray) -> Any:
    """A column like `List(List(Value("uint8")))`: each image is a list of lists of Python's numbers."""
    rows = Rows(images.tolist(), labels.tolist())
    rows.features["image"] = SimpleNamespace(feature=SimpleNamespace(feature=SimpleNamespace(dtype="uint8")))
    return rows


def to_tensor(images: np.ndarray) -> torch.Tensor:
    """Convert images as torchvision's ToTensor does: float32 (N, 1, H, W), 0 to 1."""
    return torch.from_numpy(images)[:, None].float() / 255


TYPES: dict[str, Callable[[np.ndarray, np.ndarray], Any]] = {
    "arrays": lambda x, y: (x, y),
    "channels last": lambda x, y: (x[..., None], y.tolist()),
    "channels first": lambda x, y: (x[:, None], y.astype(np.int32)),
    "floats": lambda x, y: (x / 255, y.astype(float)),
    "torch tensors": lambda x, y: (to_tensor(x), torch.from_numpy(y)),
    "strings": lambda x, y: (x, y.astype(str)),
    "PIL images": lambda x, y: (as_pil(x), y),
    "torch Dataset": lambda x, y: Pairs(to_tensor(x), torch.from_numpy(y)),
    "torch Dataset of PIL images": lambda x, y: Pairs(as_pil(x), y.tolist()),
    "list of pairs": lambda x, y: list(zip(as_pil(x), y.tolist(), strict=True)),
    "like Hugging Face": lambda x, y: Rows(as_pil(x), y.tolist()),
    "Hugging Face": hugging_face,
    "arrays of Hugging Face": lambda x, y: arrays_in_lists(x, y),
    "DatasetDict": lambda x, y: {"train": Rows(as_pil(x), y.tolist(), image="img")},
    "Images": lambda x, y: halfmoon.Images(x[..., None], y),
}


@pytest.fixture(scope="module")
def in_arrays(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The model files of a run on fully and on partly labeled arrays."""
    folder = tmp_path_factory.mktemp("arrays")
    return {name: train(folder / name, (X, labels)) for name, labels in (("full", Y), ("partly", hide(Y)))}


def hide(labels: np.ndarray) -> np.ndarray:
    """Hide the labels of two of three images."""
    return np.where(np.arange(len(labels)) % 3 == 0, labels, -1)


def train(run_dir: Path, data: Any, **options: Any) -> bytes:
    result = halfmoon.run(data=data, method="fedavg-fixmatch", run_dir=run_dir, **{**SMALL, **options})
    return (result.runs[0] / "model.safetensors").read_bytes()


def tensors(file: Path) -> dict[str, bytes]:
    from safetensors.torch import load_file

    return {name: tensor.numpy().tobytes() for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("kind", TYPES)
def test_each_type_has_the_same_images_and_labels(kind: str) -> None:
    for labels in (Y, hide(Y)):
        if kind == "Hugging Face" and (labels < 0).any():
            continue  # its ClassLabel refuses nothing, but writes -1 as another class
        found = convert_images(TYPES[kind](X, labels))
        assert np.array_equal(found.images, X[..., None])
        assert np.array_equal(found.labels, labels)
        assert found.classes == tuple("0123456789")


@pytest.mark.parametrize(
    "kind", ["PIL images", "torch Dataset", "like Hugging Face", "floats", "strings", "DatasetDict"]
)
def test_each_type_gives_the_same_model_bytes(kind: str, in_arrays: dict[str, bytes], tmp_path: Path) -> None:
    assert train(tmp_path / "full", TYPES[kind](X, Y)) == in_arrays["full"]
    if kind in ("PIL images", "strings"):
        assert train(tmp_path / "partly", TYPES[kind](X, hide(Y))) == in_arrays["partly"]


def test_arrays_and_the_same_images_in_class_folders_give_the_same_model(
    in_arrays: dict[str, bytes], tmp_path: Path
) -> None:
    for row, (image, label) in enumerate(zip(X, Y, strict=True)):
        path = tmp_path / "digits folder" / str(label) / f"{row:03}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(path)
    train(tmp_path / "folder run", str(tmp_path / "digits folder"))
    (tmp_path / "arrays.safetensors").write_bytes(in_arrays["full"])
    assert tensors(tmp_path / "folder run" / "model.safetensors") == tensors(tmp_path / "arrays.safetensors")


def test_a_test_is_used_and_no_row_is_held_out(tmp_path: Path) -> None:
    tests = halfmoon.load_data("digits").test
    names = np.array([f"digit {label}" for label in range(10)])
    problem = halfmoon.problem(data=(X, names[Y]), test=Pairs(tests.images, names[tests.labels]), **without_progress())
    assert (len(problem.source.train), len(problem.source.test)) == (len(X), len(tests))
    assert problem.source.classes == tuple(names)
    assert np.array_equal(problem.source.test.labels, tests.labels)
    parts = {"train": Rows(as_pil(X), Y), "test": Rows(as_pil(tests.images[:30, :, :, 0]), tests.labels[:30])}
    assert len(halfmoon.problem(data=parts, **without_progress()).source.test) == 30
    held_out = halfmoon.problem(data=(X, Y), **without_progress()).source
    assert (len(held_out.train), len(held_out.test)) == (60, 20)
    assert "20% of the labeled images of every class, 20 in all, are held out" in held_out.selection_note


def without_progress(**options: Any) -> dict[str, Any]:
    values = {**SMALL, **options}
    return {name: value for name, value in values.items() if name != "progress"}


def test_unlabeled_images_are_trained_on_and_never_tested() -> None:
    problem = halfmoon.problem(data=(X, hide(Y)), **without_progress())
    labels = problem.source.train.labels
    assert np.array_equal(problem.split.labeled, labels >= 0)
    assert (problem.split.client >= 0).all()
    assert (problem.source.test.labels >= 0).all()
    assert (labels < 0).sum() == (hide(Y) < 0).sum()  # only labeled images are held out
    unlabeled = np.bincount(problem.split.client[labels < 0])
    assert unlabeled.max() - unlabeled.min() <= 1
    on_server = halfmoon.problem(data=(X, hide(Y)), labels_at="server", method="semifl", **without_progress()).split
    assert set(on_server.client[on_server.labeled]) == {-2}


def test_ids_of_clients_assign_the_images(tmp_path: Path) -> None:
    ids = np.array(["north", "south"])[np.arange(len(X)) % 2]
    tests = halfmoon.load_data("digits").test
    options = without_progress(clients=ids, labels_per_class=2)
    problem = halfmoon.problem(data=(X, Y), test=tests, **options)
    assert (problem.split.clients, problem.split.labeled.sum()) == (2, 2 * 2 * 10)
    assert np.array_equal(problem.split.client, np.arange(len(X)) % 2)
    # A held-out image is missing at its client: the others keep theirs.
    del options["labels_per_class"]
    held_out = halfmoon.problem(data=(X, hide(Y)), **options)
    rows = [np.flatnonzero((image[..., 0] == X).all((1, 2)))[0] for image in held_out.source.train.images]
    assert np.array_equal(held_out.split.client, np.array(rows) % 2)
    train(tmp_path / "run", (X, hide(Y)), clients=ids, test=tests)
    assert halfmoon.load_run(tmp_path / "run").summaries[0]["accuracy"]["last"] > 0


class Stop(halfmoon.NullCallback):
    """Stop after the first round, as Ctrl-C does."""

    def round(self, run: halfmoon.RunInfo, row: dict) -> None:
        raise KeyboardInterrupt


def test_a_run_resumes_with_the_same_images_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {**SMALL, "rounds": 2, "method": "fedavg", "checkpoint_every": 1}
    expected = halfmoon.run(data=(X, hide(Y)), run_dir=tmp_path / "whole", **options)
    with pytest.raises(KeyboardInterrupt):
        halfmoon.run(data=(X, hide(Y)), run_dir=tmp_path / "run", watch=Stop(), **options)
    # A new process has not registered the images.
    monkeypatch.setattr("halfmoon.data.memory._registered", {})
    sentence = r"halfmoon does not store: pass the same data \(and test, clients\) again"
    with pytest.raises(halfmoon.UserError, match=sentence):
        halfmoon.resume(tmp_path / "run", progress=False)
    with pytest.raises(halfmoon.UserError, match=sentence):
        halfmoon.resume(tmp_path / "run", data=(X[::-1], hide(Y)), progress=False)
    result = halfmoon.resume(tmp_path / "run", data=(as_pil(X), hide(Y)), progress=False)
    assert (result.folder / "metrics.jsonl").read_bytes() == (expected.folder / "metrics.jsonl").read_bytes()
    assert len(read_rows(result.folder / "metrics.jsonl")) == 2
    assert halfmoon.load_run(tmp_path / "run").to_frame().shape == expected.to_frame().shape


def test_without_a_method_labels_only_are_compared_by_cross_validation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As for a folder with labels.csv, whose numbers are the same."""
    monkeypatch.setattr(hubs, "is_installed", lambda name: False)
    x = X[:48]
    y = Y[:48]  # six classes
    labels = np.where(np.arange(48) % 8 < 6, y, -1)
    options = {"minutes": 0.01, "network": "small", "width": 4, "steps": 1, "rounds": 2}
    result = halfmoon.run(data=(x, labels), run_dir=tmp_path / "arrays", **options)
    text = capsys.readouterr().err
    assert "halfmoon: data: 48 images" in text
    assert "36 with a label; 6 classes; 8x8, gray;" in text
    assert "5-fold cross-validation" in text
    assert result.decision is not None
    assert result.decision["splits"] == 5
    folder = tmp_path / "site"
    folder.mkdir()
    lines = ["path,label"]
    for row, (image, label) in enumerate(zip(x, labels, strict=True)):
        Image.fromarray(image).save(folder / f"{row:03}.png")
        if label >= 0:
            lines.append(f"{row:03}.png,{label}")
    (folder / "labels.csv").write_text("\n".join(lines) + "\n")
    expected = halfmoon.run(data=str(folder), run_dir=tmp_path / "folder", progress=False, **options)
    assert expected.decision == result.decision
    files = [each.folder / "model.safetensors" for each in (expected, result)]
    assert tensors(files[0]) == tensors(files[1])
    repeated = halfmoon.run(data=(x, labels), run_dir=tmp_path / "arrays", progress=False, **options)
    assert repeated.decision == result.decision


def test_compare_takes_arrays(tmp_path: Path) -> None:
    result = halfmoon.compare(["fedavg", "fedavg-fixmatch"], data=(X, Y), run_dir=tmp_path / "both", **SMALL)
    assert len(result.summaries) == 2


WRONG: dict[str, tuple[Any, str]] = {
    "an array alone": (X, "data is numpy.ndarray: it must be a name, a folder, "),
    "a number": (3, "data is int: it must be a name"),
    "three elements": ((X, Y, Y), "data: item 0 is numpy.ndarray, not a pair"),
    "flat": ((X.reshape(80, -1), Y), r"data has the shape \(80, 64\), a row of numbers for each image"),
    "four channels": ((np.zeros((3, 8, 8, 4)), [0, 1, 2]), "with 1 or 3 channels"),
    "ambiguous": ((np.zeros((3, 3, 8, 3)), [0, 1, 2]), r"may be \(N, H, W, C\) or \(N, C, H, W\)"),
    "range": ((X / 16, Y), "data has pixels from 0 to 15.9375: floats must be from 0 to 1"),
    "nan": ((np.where(X > 250, np.nan, X / 255), Y), "data has pixels that are nan"),
    "type": ((X.astype(np.int64), Y), r"pixels of type int64 from 0 to 255: they must be uint8"),
    "length": ((X, Y[:5]), "data has 80 images, but 5 labels"),
    "no images": ((X[:0], Y[:0]), "data has no images"),
    "one-hot": ((X, np.eye(10)[Y]), r"the labels have the shape \(80, 10\)"),
    "negative label": ((X, Y - 3), "image 0 has the label -3: labels are whole numbers from 0 or strings"),
    "two kinds": ((X, ["cat", *Y[1:].tolist()]), "some labels are numbers and some are strings"),
    "empty label": ((X, ["", *map(str, Y[1:])]), "image 0 has an empty label"),
    "one class": ((X[:8], Y[:8]), "data has labels of one class only, '0'"),
    "no label": ((X, np.full(80, -1)), "data has no labeled image"),
    "too few of a class": ((X[:17], Y[:17]), "class '2' has 1 labeled image, too few to train and test on"),
    "sizes": (([Image.new("L", (8, 8)), Image.new("L", (9, 8))] * 4, [0, 1] * 4), "image 1 is 9x8 with 1 channel"),
    "no image": ((["a", "b"], [0, 1]), "a: the file cannot be read"),
    "element": (([3, 4], [0, 1]), "image 0 is int: it must be a PIL image"),
    "bytes of another type": (([{"bytes": 3}, {"bytes": 4}], [0, 1]), "image 0 is dict: it must be a PIL image"),
    "no train part": ({"test": Rows(X, Y)}, "data has test, but no part 'train'"),
    "columns": (Rows(X, Y, image="picture"), "there is no column image or img; it has picture, label"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_mistake_is_one_sentence(case: str, tmp_path: Path) -> None:
    data, sentence = WRONG[case]
    with pytest.raises(ValueError, match=sentence) as error:
        halfmoon.run(data=data, method="fedavg", run_dir=tmp_path / "run", **SMALL)
    assert isinstance(error.value, halfmoon.UserError)
    assert len(str(error.value).splitlines()) == 1
    assert "--" not in str(error.value)
    assert not (tmp_path / "run").exists()


def test_images_in_place_of_the_configuration_are_one_sentence() -> None:
    """`run(X, y)` raised a bare ValueError of NumPy."""
    for call in (halfmoon.run, halfmoon.problem, lambda x, y: halfmoon.compare(["fedavg"], x)):
        with pytest.raises(halfmoon.UserError, match=r"config is numpy.ndarray: .*as data=\(X, y\)"):
            call(X, Y)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"data": (X, Y), "test": (X, np.full(80, -1))}, "test: image 0 has no label"),
        ({"data": (X, Y), "test": (X, Y + 1)}, "test: image 72 has the label 10, but the classes are 0, 1, "),
        ({"data": (X, Y), "test": (X[:, :7], Y)}, "train images are 8x8 with 1 channel, test images 8x7"),
        ({"data": (X, Y), "clients": Y[:3]}, r"clients has the shape \(3,\), but data has 80 images"),
        ({"data": (X, Y), "clients": Y, "setting": "iid-iid"}, "setting assigns images to clients, but clients has an"),
        ({"data": (X, hide(Y)), "labels": 20}, "labels hides labels, but data has unlabeled images"),
        ({"data": (X, hide(Y)), "setting": "fedloke"}, "setting fedloke needs the labels of all images"),
        ({"data": (X, Y), "window": (0.0, 1.0)}, "window is for files, but data is in memory"),
        ({"data": "digits", "test": (X, Y)}, "test is only for data in memory"),
        ({"data": "digits", "clients": Y}, "ids of clients are only for data in memory"),
    ],
)
def test_an_option_without_effect_is_refused(options: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(halfmoon.UserError, match=sentence):
        halfmoon.run(method="fedavg", run_dir=tmp_path / "run", **{**SMALL, **options})
    assert not (tmp_path / "run").exists()


def test_images_of_different_sizes_are_resized(tmp_path: Path) -> None:
    images = [Image.fromarray(image).resize((8 + row % 3, 8)) for row, image in enumerate(X)]
    found = convert_images((images, Y), preparation=halfmoon_preparation(8))
    assert found.images.shape == (80, 8, 8, 1)
    problem = halfmoon.problem(data=(images, Y), resize=8, channels=3, **without_progress())
    assert problem.source.train.images.shape == (60, 8, 8, 3)


def halfmoon_preparation(size: int) -> Any:
    from halfmoon.data.preparation import Preparation

    return Preparation(size=(size, size))


def test_class_names_of_a_data_set_are_used() -> None:
    names = ["ant", "bee", *"cdefghij"]
    assert convert_images(Rows(as_pil(X), Y.tolist(), names)).classes == tuple(names)
    pairs = Pairs(as_pil(X), Y.tolist())
    pairs.classes = names
    found = convert_images(pairs)
    assert found.classes == tuple(names)
    assert np.array_equal(found.labels, Y)
    assert np.array_equal(convert_images((X, Y), classes=names).labels, Y)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> halfmoon.Model:
    """A model of six classes that was trained on half of their images, as a pair (X, y)."""
    run_dir = tmp_path_factory.mktemp("model") / "run"
    names = np.array([f"digit {label}" for label in range(10)])
    options = {**SMALL, "rounds": 10, "steps": 5, "labels_per_class": 1}
    result = halfmoon.run(data=(X[:48:2], names[Y[:48:2]]), method="fedavg", run_dir=run_dir, **options)
    return result.model


IMAGES: dict[str, Callable[[np.ndarray], Any]] = {
    "gray batch": lambda x: x,
    "channels first": lambda x: x[:, None],
    "tensor": to_tensor,
    "floats": lambda x: x / 255,
    "PIL images": as_pil,
    "list of arrays": list,
    "pair": lambda x: (x, np.zeros(len(x), int)),
    "torch Dataset": lambda x: Pairs(to_tensor(x), torch.zeros(len(x), dtype=torch.int64)),
    "like Hugging Face": lambda x: Rows(as_pil(x), [0] * len(x)),
    "Images": lambda x: halfmoon.Images(x[..., None], np.zeros(len(x), np.int64)),
}


@pytest.mark.parametrize("kind", IMAGES)
def test_a_model_predicts_each_type(kind: str, model: halfmoon.Model) -> None:
    expected = model.probabilities(X[:3, :, :, None].copy())
    assert np.array_equal(model.predict_proba(IMAGES[kind](X[:3])), expected)
    table = model.predict(IMAGES[kind](X[:3]))
    assert list(table["label"]) == [model.classes[k] for k in expected.argmax(1)]
    assert list(table["probability"]) == list(expected.max(1))


@pytest.mark.parametrize(
    "image",
    [X[5], X[5, :, :, None], X[5, None], to_tensor(X)[5], Image.fromarray(X[5]), Image.fromarray(X[5]).convert("RGB")],
    ids=["gray", "channels last", "channels first", "tensor", "PIL image", "RGB"],
)
def test_one_image_is_one_row(image: Any, model: halfmoon.Model) -> None:
    expected = model.probabilities(X[5:6, :, :, None].copy())
    assert np.array_equal(model.predict_proba(image), expected)
    assert len(model.predict(image)) == 1
    assert list(model.predict(image)) == ["label", "probability", "sure", "runner_up", "runner_up_probability"]


def test_paths_and_folders_are_predicted(model: halfmoon.Model, tmp_path: Path) -> None:
    for row in range(3):
        Image.fromarray(X[row]).save(tmp_path / f"{row}.png")
    expected = model.predict_proba(X[:3])
    assert np.array_equal(model.predict_proba(tmp_path), expected)
    assert np.array_equal(model.predict_proba([tmp_path / f"{row}.png" for row in range(3)]), expected)
    # Another batch size may round differently.
    assert model.predict_proba(str(tmp_path / "1.png")) == pytest.approx(expected[1:2], abs=1e-6)
    assert list(model.predict(tmp_path)["path"]) == ["0.png", "1.png", "2.png"]
    assert list(model.predict(tmp_path / "1.png")) == list(model.predict(X[1]))


def test_a_model_is_measured_on_each_type(model: halfmoon.Model, recwarn: pytest.WarningsRecorder) -> None:
    x = X[1:48:2]
    y = Y[1:48:2]
    names = np.array(model.classes)[y]
    expected = model.evaluate(halfmoon.Images(x[..., None], y))
    assert expected["accuracy"] == (model.predict_proba(x).argmax(1) == y).mean()
    parts = {"train": Rows(as_pil(X), Y.tolist()), "test": Rows(as_pil(x), names.tolist())}
    for data in ((x, y), (x / 255, names), Pairs(to_tensor(x), torch.from_numpy(y)), (as_pil(x), names), parts):
        assert model.evaluate(data) == expected
    few = model.evaluate((x, np.where(np.arange(24) < 12, y, -1)))
    assert (few["images"], few["accuracy"]) == (12, (model.predict_proba(x[:12]).argmax(1) == y[:12]).mean())
    assert not recwarn
    assert model.calibrate((x, names)).card.temperature != 1


def test_training_images_in_memory_are_recognized(model: halfmoon.Model) -> None:
    data = (as_pil(X[:48:2]), np.array(model.classes)[Y[:48:2]])
    with pytest.warns(RuntimeWarning, match="images has the images that the model was trained on"):
        model.evaluate(data)
    with pytest.raises(halfmoon.UserError, match="images: the model was trained on these"):
        model.calibrate(data)


@pytest.mark.parametrize(
    ("images", "sentence"),
    [
        (3, "images is int: it must be"),
        ([], "images is empty"),
        ("nowhere", "nowhere: there is no such file or folder"),
        (X / 16, "images has pixels from 0 to"),
        ([Image.new("L", (8, 8)), 3], "image 1 is int"),
    ],
)
def test_images_that_cannot_be_predicted_are_one_sentence(images: Any, sentence: str, model: halfmoon.Model) -> None:
    with pytest.raises(halfmoon.UserError, match=sentence):
        model.predict(images)


@pytest.mark.parametrize(
    ("images", "sentence"),
    [
        (X, "images is numpy.ndarray: it must be"),
        ((X, Y), "image 48 has the label 6, but the classes are digit 0, "),
        ((X, np.full(80, -1)), "images has no labeled image"),
        ({"train": Rows(X, Y)}, "images has no part 'test' or 'validation'"),
    ],
)
def test_images_that_cannot_be_measured_are_one_sentence(images: Any, sentence: str, model: halfmoon.Model) -> None:
    with pytest.raises(halfmoon.UserError, match=sentence):
        model.evaluate(images)


def test_sweep_refuses_data_in_memory_by_name() -> None:
    """A recipe names its data; the sentence names the call that takes arrays."""
    images = np.zeros((4, 8, 8), np.uint8)
    with pytest.raises(UserError, match=r"a recipe names its data sets.*compare\(methods, data=\.\.\., seeds=\.\.\.\)"):
        halfmoon.sweep("feddure-table1", data=(images, np.zeros(4, int)))


MISSING = [*Y[:40].tolist(), *[None] * 40]


@pytest.mark.parametrize(
    "labels",
    [
        pd.Series(MISSING, dtype="Int64"),
        pd.Series(MISSING, dtype="float"),
        pd.Series([None if value is None else str(value) for value in MISSING], dtype="string"),
        pd.Series([float("nan") if value is None else str(value) for value in MISSING], dtype=object),
        np.ma.array(Y, mask=np.arange(80) >= 40),
        np.array(MISSING, object)[:, None],
        pd.DataFrame({"y": MISSING}, dtype="Int64"),
    ],
)
def test_a_missing_label_of_any_library_is_unlabeled(labels: Any) -> None:
    found = convert_images((X, labels))
    assert found.labels.tolist() == [*Y[:40].tolist(), *[-1] * 40]


@pytest.mark.parametrize(
    "images",
    [
        X > 7,
        pd.Series(as_pil(X)),
        np.array([*as_pil(X), None], object)[:-1],
        [encode_png(image[..., None]) for image in X],
        to_tensor(X).to(torch.float64) + 1e-7,
    ],
    ids=["mask", "Series", "objects", "encoded", "rounding"],
)
def test_images_of_other_containers_are_read(images: Any) -> None:
    expected = np.where(X > 7, 255, 0) if isinstance(images, np.ndarray) and images.dtype == bool else X
    assert np.array_equal(convert_images((images, Y)).images[..., 0], expected)


def test_bfloat16_is_read() -> None:
    # Eight bits of precision: the values differ by less than two steps of 255.
    found = convert_images((to_tensor(X).bfloat16(), Y)).images[..., 0].astype(int)
    assert abs(found - X).max() <= 1


def test_tables_and_dictionaries_are_read() -> None:
    table = pd.DataFrame({"label": Y, "image": list(X)}, index=np.arange(len(Y))[::-1])
    items = [{"label": int(label), "image": image, "id": 7} for image, label in zip(X, Y, strict=True)]
    for data in (table, items):
        found = convert_images(data)
        assert np.array_equal(found.images[..., 0], X)
        assert np.array_equal(found.labels, Y)


class Stream:
    """As much of `datasets.IterableDataset` as is used: it has no length."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows
        self.column_names = rows.column_names
        self.features = rows.features

    def __iter__(self) -> Iterator[Any]:
        return (self.rows[row] for row in range(len(self.rows)))


def test_streams_and_columns_of_hugging_face_are_read() -> None:
    """A stream was refused with advice that lost its class names, and `dataset[:]` was taken for parts."""
    names = [f"digit {label}" for label in range(10)]
    stream = Stream(Rows(as_pil(X), Y.tolist(), names))
    for data in (stream, {"train": stream}):
        found = convert_images(data)
        assert np.array_equal(found.images[..., 0], X)
        assert np.array_equal(found.labels, Y)
        assert found.classes == tuple(names)
    assert np.array_equal(convert_images({"image": as_pil(X), "label": Y.tolist()}).images[..., 0], X)


def test_images_that_are_not_decoded_are_read_from_their_files(tmp_path: Path) -> None:
    """`Image(decode=False)` gives {"bytes": None, "path": ...} for a column of paths."""
    items = []
    for row, image in enumerate(as_pil(X[:20])):
        image.save(tmp_path / f"{row}.png")
        items.append({"bytes": None, "path": str(tmp_path / f"{row}.png")})
    assert np.array_equal(convert_images((items, Y[:20])).images[..., 0], X[:20])


class DamagedPairs(Pairs):
    """A data set that decodes its images when they are taken, as torchvision's and Hugging Face's do."""

    def __getitem__(self, row: int) -> tuple[Any, Any]:
        if row in (1, 3):
            Image.open(io.BytesIO(b"no image"))
        return super().__getitem__(row)


class DamagedRows(Rows):
    def __getitem__(self, key: int | str) -> Any:
        if key in (1, 3):
            Image.open(io.BytesIO(b"no image"))
        return super().__getitem__(key)


@pytest.mark.parametrize("kind", [DamagedPairs, DamagedRows])
def test_a_data_set_that_cannot_decode_an_image_is_one_sentence(kind: type[Any]) -> None:
    with pytest.raises(
        UserError, match=r"image 1.*no known format.*image 3.*2 of 80 images of data cannot be read"
    ) as e:
        convert_images(kind(as_pil(X), Y.tolist()))
    assert "0x" not in str(e.value)  # the address of an object


def test_parts_that_are_not_used_are_named() -> None:
    data = make_memory_data({"train": (X, Y), "test": (X[:10], Y[:10]), "extra": (X, Y)})
    notes = load_memory(register(data)).notes
    assert "left out: parts of data that are neither training nor test images (extra)" in notes


def test_parts_have_the_names_that_folders_may_have() -> None:
    parts = {"Training": (X, Y), "VAL": (X[:10], Y[:10])}
    found = make_memory_data(parts)
    assert len(found.train) == len(X)
    assert found.test is not None
    assert len(found.test) == 10


def test_class_names_of_arrays_are_normalized_and_compared() -> None:
    """Names that a program wrote as labels are asked about; names that it declared are only reported."""
    images = np.random.default_rng(0).integers(0, 256, (12, 8, 8), np.uint8)
    assert convert_images((images, ["a ", "a", "b\u00e9", "be\u0301"] * 3)).classes == ("a", "b\u00e9")
    cases: list[tuple[Any, str]] = [
        (["Cat", "cat", "dog"] * 4, "'Cat' and 'cat'"),
        (np.array(["1", "1.0", "2"] * 4), "'1' and '1.0'"),
        (pd.Series(["left lung", "left_lung", "b"] * 4), "'left lung' and 'left_lung'"),
    ]
    for labels, names in cases:
        tables = ({"image": list(images), "label": labels}, pd.DataFrame({"image": list(images), "label": labels}))
        for data in ((images, labels), *tables, [*zip(images, labels, strict=True)]):
            with pytest.raises(
                UserError, match=rf"data, labels: the class names {names} differ only in .*astype\('category'"
            ):
                convert_images(data)
    declared = make_memory_data((images, pd.Series(["Cat", "cat", "dog"] * 4).astype("category")))
    assert any("'Cat' and 'cat' are nearly the same" in note for note in load_memory(register(declared)).notes)
    pairs = Pairs(images, ["Cat", "cat", "dog"] * 4)
    pairs.classes = ["Cat", "cat", "dog"]  # pyright: ignore[reportAttributeAccessIssue]
    assert convert_images(pairs).classes == ("Cat", "cat", "dog")
    # A class of the model that may be meant is named.
    with pytest.raises(
        UserError, match=r"label 'Cat', but the classes are cat, dog; rename it to 'cat', if it is that"
    ):
        convert_images((images, ["Cat", "dog"] * 6), classes=("cat", "dog"))


def test_labels_that_are_numbers_are_sorted_as_numbers() -> None:
    images = np.zeros((6, 8, 8), np.uint8)
    for labels in (["10", "9", "2"] * 2, np.array(["10", "9", "2"] * 2), [10, 9, 2] * 2, [10.0, 9.0, 2.0] * 2):
        result = convert_images((images, labels))
        assert result.classes == ("2", "9", "10")
        assert result.labels.tolist() == [2, 1, 0] * 2
    rows = pd.DataFrame({"image": list(images), "label": ["10", "9", "2"] * 2})
    assert convert_images(rows).classes == ("2", "9", "10")


def test_copies_in_arrays_are_not_divided_and_are_reported() -> None:
    images = np.concatenate([X[:20]] * 4)
    labels = np.concatenate([np.arange(20) % 2] * 4)
    source = load_memory(register(make_memory_data((images, labels))))
    train = {image.tobytes() for image in source.train.images}
    assert not train & {image.tobytes() for image in source.test.images}
    assert source.train.groups is not None
    assert source.notes[0].startswith("60 of 80 images are copies")
    # An unlabeled copy of a test image would be trained on.
    partly = np.where(np.arange(80) < 40, labels, -1)
    source = load_memory(register(make_memory_data((images, partly))))
    train = {image.tobytes() for image in source.train.images}
    assert not train & {image.tobytes() for image in source.test.images}
    assert any("unlabeled images are copies of test images" in note for note in source.notes)
    given = load_memory(register(make_memory_data((X, Y), test=(X[:10], Y[:10]))))
    assert any("10 of 10 test images are training images" in note for note in given.notes)


def test_all_unreadable_images_are_named_at_once(tmp_path: Path) -> None:
    paths = [tmp_path / f"{row}.png" for row in range(len(X))]
    for path, image in zip(paths, as_pil(X), strict=True):
        image.save(path)
    paths[3].write_bytes(b"")
    paths[5].unlink()
    with pytest.raises(UserError, match=r"3\.png.*; .*5\.png.*2 of 80 images of data cannot be read"):
        convert_images((paths, Y))


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        ((X, set(range(80))), "the labels are set"),
        ((X, dict(enumerate(Y))), "the labels are dict"),
        ((X, np.where(Y == 0, "nan", Y.astype(str))), "which tables write for a missing one"),
        ((np.ma.array(X, mask=X > 3), Y), "has masked pixels"),
        ((X.astype(np.uint16) * 256, Y), "scale them"),
        ((np.where(X > 3, np.nan, 0.5), Y), "are nan"),
        (([Image.fromarray(image.astype(np.float32)) for image in X], Y), "give an array of uint8 or of floats"),
        ([(X[0], torch.eye(3)[0])], "one-hot"),
        ([X, Y], "as a tuple"),
    ],
)
def test_unusual_arrays_are_one_sentence(data: Any, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        convert_images(data)


@pytest.mark.parametrize(
    "clients", [[None] * 80, [float("nan"), *["a"] * 79], ["a", ""] * 40, np.ma.masked_equal(Y, 1)]
)
def test_a_missing_client_is_refused(clients: Any) -> None:
    with pytest.raises(UserError, match="clients"):
        make_memory_data((X, Y), clients=clients)


def test_ids_of_clients_are_normalized() -> None:
    found = make_memory_data((X, Y), clients=["A", "A ", "e\u0301", "\u00e9"] * 20).clients
    assert found is not None
    assert found[:4].tolist() == [0, 0, 1, 1]


def test_equal_training_images_are_refused_and_a_constant_channel_is_not() -> None:
    """Both ended in "Normalize has the standard deviations (0.0,)"."""
    blank = make_memory_data((X * 0, Y), test=(X, Y))
    with pytest.raises(UserError, match="all 80 training images have equal pixels"):
        load_memory(register(blank))
    colors = np.stack([X, X[::-1], X * 0], axis=-1)
    assert load_memory(register(make_memory_data((colors, Y)))).std[2] == 1


@pytest.mark.parametrize("container", [pd.Series, lambda images: np.array([*images, None], object)[:-1]])
def test_a_model_predicts_images_of_tables(container: Callable[[Any], Any], model: halfmoon.Model) -> None:
    expected = model.predict_proba(X)
    assert np.array_equal(model.predict_proba(container(as_pil(X))), expected)
    np.testing.assert_allclose(model.predict_proba(encode_png(X[0][..., None])), expected[:1], rtol=1e-5)


@pytest.mark.parametrize(
    ("images", "sentence"),
    [(X.reshape(len(X), -1), "a row of numbers"), (np.ma.array(X, mask=X > 3), "masked pixels")],
)
def test_vectors_and_masks_are_no_images(images: Any, sentence: str, model: halfmoon.Model) -> None:
    with pytest.raises(UserError, match=sentence):
        model.predict(images)


def test_tables_without_labels_are_predicted(model: halfmoon.Model) -> None:
    """The error was that there is no column of labels, which a prediction does not need."""
    expected = model.predict(X[:4])
    rows = Rows(as_pil(X[:4]), Y[:4])
    del rows.columns["label"]
    rows.column_names = ["image"]
    for images in (
        pd.DataFrame({"image": as_pil(X[:4])}),
        pd.DataFrame({"image": as_pil(X[:4]), "age": range(4)}),
        rows,
    ):
        assert model.predict(images).equals(expected)
