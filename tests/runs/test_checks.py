"""Runs that cannot start are refused before the first of them trains."""

import errno
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from support.image_files import make_noise_images
from torch import Tensor, nn

from halfmoon.config.schema import Config
from halfmoon.core import plugins, tree
from halfmoon.core.errors import UserError
from halfmoon.models.modules import from_factory
from halfmoon.runs import checks, runner
from halfmoon.runs.callbacks import NullCallback, RunInfo


def build_flat(channels: int, classes: int, size: tuple[int, int]) -> nn.Module:
    """Return a linear classifier, whose layer is not called "head"."""
    return nn.Sequential(nn.Flatten(), nn.Linear(channels * size[0] * size[1], classes))


def build_pooled(channels: int, classes: int, size: tuple[int, int]) -> nn.Module:
    """Return a network that does not end in a linear layer."""
    return nn.Sequential(nn.Conv2d(channels, classes, 3, padding=1), nn.AdaptiveAvgPool2d(1), nn.Flatten())


class Started(NullCallback):
    """Records which runs have begun."""

    def __init__(self) -> None:
        self.titles: list[str] = []

    def begin(self, run: RunInfo) -> None:
        self.titles.append(run.title)


TINY = {"rounds": 1, "steps": 1, "clients": 4, "cohort": 2, "data_share": 0.3, "labels_per_class": 2}


@pytest.fixture
def networks() -> None:
    for name, factory in (("flat", build_flat), ("pooled", build_pooled)):
        plugins.register("network", name, factory)


@pytest.mark.usefixtures("networks")
@pytest.mark.parametrize(
    ("method", "network", "expected"),
    [
        ("proxyfl", "flat", "ProxyFL needs one of halfmoon's networks"),
        ("fixmatch-proxy-tuning", "flat", "ProxyFL needs one of halfmoon's networks"),
        ("protofssl", "flat", "ProtoFSSL needs one of halfmoon's networks"),
        ("fedcon", "pooled", "fedcon needs a network that ends in a linear layer"),
        ("heterofl", "flat", "heterofl cuts networks to their leading channels"),
        ("ridge-head", "small", "the head is solved on the features of a frozen backbone"),
    ],
)
def test_a_comparison_refuses_a_method_before_the_others_train(
    tmp_path: Path, method: str, network: str, expected: str
) -> None:
    """These errors were raised, or were a KeyError, after the methods before had trained."""
    config = Config(network=network, run_dir=tmp_path / "r", **{**TINY, "cohort": 4})
    with pytest.raises(UserError, match=expected):
        runner.compare(config, ["fedavg", method], watch=(started := Started()))
    assert started.titles == []
    assert not (tmp_path / "r").exists()


def test_static_batch_normalization_at_a_server_without_images_is_refused(tmp_path: Path) -> None:
    config = Config(network="small", width=4, options={"semifl": {"sbn": "server"}}, run_dir=tmp_path / "r", **TINY)
    with pytest.raises(UserError, match="sbn of semifl is 'server', but the server has no image"):
        runner.compare(config, ["fedavg", "semifl"], watch=(started := Started()))
    assert started.titles == []


@pytest.mark.usefixtures("networks")
def test_cbafed_trains_a_network_with_any_last_layer(tmp_path: Path) -> None:
    config = Config(
        method="cbafed", network="flat", labels_at="some", labeled_clients=2, run_dir=tmp_path / "r", **TINY
    )
    assert runner.start(config).summaries[0]["accuracy"]["last"] > 0


def test_errors_of_several_runs_are_found_without_training(tmp_path: Path) -> None:
    base = Config(network="small", width=4, **TINY)
    configs = [
        base,
        Config(network="small", **{**TINY, "labels_per_class": 1000}),
        Config(network="small", data=str(tmp_path / "lost"), **TINY),
    ]
    errors = checks.find_errors(configs)
    assert sorted(errors) == [1, 2]
    assert "needs 4000 labeled images" in str(errors[1])
    assert "lost" in str(errors[2])


def test_a_full_disk_at_the_digests_of_training_images_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message was "a file: No space left on device.", without how to go on."""
    for name in ("a", "b"):
        (tmp_path / "in" / name).mkdir(parents=True)
        for number, pixels in enumerate(make_noise_images(20, 8, seed=ord(name))):
            Image.fromarray(pixels).save(tmp_path / "in" / name / f"{number}.png")

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    config = Config(
        method="fedavg", data=str(tmp_path / "in"), network="small", width=4, run_dir=tmp_path / "r", cache=tmp_path / "c",
        rounds=1, steps=1, clients=2, cohort=2, labels_per_class=2,
    )  # fmt: skip
    with monkeypatch.context() as patch:
        patch.setattr(runner.image_digests, "write_digests", fail)
        with pytest.raises(UserError, match=r"training-images.digests cannot be written \(No space .* go on with"):
            runner.start(config)
    assert runner.resume(tmp_path / "r").summaries[0]["finished"]


class WarpedImages(nn.Module):
    """A linear classifier of warped images; PyTorch has no forward derivative of `grid_sample`."""

    def __init__(self, channels: int, classes: int, size: tuple[int, int]) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(*size, 2))
        self.head = nn.Linear(channels * size[0] * size[1], classes)

    def forward(self, x: Tensor) -> Tensor:
        grid = self.shift.tanh().expand(len(x), *self.shift.shape)
        return self.head(F.grid_sample(x, grid, align_corners=False).flatten(1))


def test_a_layer_without_a_forward_derivative_is_refused_before_the_start(tmp_path: Path) -> None:
    """FedDure needs the derivative; the error was raised in the first step, after the methods before had trained."""
    plugins.register("network", "warped", WarpedImages)
    config = Config(network="warped", run_dir=tmp_path / "r", **TINY)
    with pytest.raises(UserError, match="has a layer that PyTorch cannot differentiate forward"):
        runner.compare(config, ["fedavg", "feddure"], watch=(started := Started()))
    assert started.titles == []


class Attention(nn.Module):
    """A classifier with PyTorch's attention over the rows of images."""

    def __init__(self, channels: int, classes: int, size: tuple[int, int]) -> None:
        super().__init__()
        self.embedding = nn.Linear(channels * size[1], 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, classes)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.embedding(x.transpose(1, 2).flatten(2))
        return self.head((rows + self.attention(rows, rows, rows, need_weights=False)[0]).mean(1))


def test_attention_has_the_tangent_that_differences_have() -> None:
    """FedDure refused PyTorch's attention in its first step: its fast kernels have no forward derivative."""
    plugins.register("network", "attention", Attention)
    network = from_factory("attention", 1, 4, (8, 8))
    draw = torch.Generator().manual_seed(0)
    params = network.init(draw)["params"]
    direction = tree.map(lambda leaf: torch.randn(leaf.shape, generator=draw), params)
    images = torch.randn(3, 1, 8, 8, generator=draw)
    tangent = network.tangent(params, images, [], direction)

    def move(step: float) -> Tensor:
        moved = tree.map(lambda leaf, each: leaf + step * each, params, direction)
        return network.train(moved, images)[0]

    torch.testing.assert_close(tangent, (move(1e-3) - move(-1e-3)) / 2e-3, rtol=1e-2, atol=1e-2)
