"""The vision transformer beside PyTorch's encoder with the same weights; ViT-Tiny's size by hand."""

import math

import pytest
import torch
from torch import Tensor, nn

from halfmoon.core import rng, tree
from halfmoon.core.autodiff import grad_and_value, vmap_clients
from halfmoon.core.errors import UserError
from halfmoon.core.tree import Tree
from halfmoon.models import registry
from halfmoon.models.vit import VisionTransformer, patches, positions

SMALL = VisionTransformer(2, 5, 12, depth=2)


def make_inputs(network: VisionTransformer = SMALL, seed: int = 0) -> tuple[Tree, Tensor, Tensor]:
    """Return parameters that are nowhere fresh, images and labels, in double precision."""
    g = rng.generator(seed, "vit")
    params = tree.to(network.init(g)["params"], dtype=torch.float64)
    params = tree.map(lambda leaf: leaf + 0.2 * torch.rand(leaf.shape, generator=g, dtype=leaf.dtype), params)
    x = torch.randn(3, network.channels, 8, 12, generator=g, dtype=torch.float64)
    return params, x, torch.arange(3) % network.classes


def encoder(params: Tree, network: VisionTransformer) -> list[nn.TransformerEncoderLayer]:
    """Return PyTorch's blocks with a model's weights."""
    made: list[nn.TransformerEncoderLayer] = []
    for number in range(network.depth):
        layer = nn.TransformerEncoderLayer(
            network.width, 3, 4 * network.width, 0.0, "gelu", batch_first=True, norm_first=True, dtype=torch.float64
        )
        expected = {
            "norm1": layer.norm1, "out": layer.self_attn.out_proj, "norm2": layer.norm2, "up": layer.linear1,
            "down": layer.linear2,
        }  # fmt: skip
        for name, module in expected.items():
            module.load_state_dict(params[f"block{number + 1}{name}"])
        given = params[f"block{number + 1}qkv"]
        layer.self_attn.load_state_dict(
            {"in_proj_weight": given["weight"], "in_proj_bias": given["bias"]}, strict=False
        )
        made.append(layer.train())
    return made


def test_it_is_pytorchs_encoder_with_the_same_weights():
    params, x, _ = make_inputs()
    w = params["patch"]["weight"].unflatten(-1, (2, 4, 4))
    z = nn.functional.conv2d(x, w, params["patch"]["bias"], stride=4).flatten(2).mT
    z = z + positions(2, 3, 12, z)
    for layer in encoder(params, SMALL):
        z = layer(z)
    features = nn.functional.layer_norm(z, (12,), params["norm"]["weight"], params["norm"]["bias"]).mean(1)
    logits, seen, moments = SMALL.embed(params, x)
    torch.testing.assert_close(seen, features)
    torch.testing.assert_close(logits, nn.functional.linear(features, *params["head"].values()))
    assert moments == {}
    torch.testing.assert_close(SMALL.predict(params, {}, x), logits)


def test_vit_tiny_has_the_size_that_is_counted_by_hand():
    """Patches 48 * 192 + 192; a block: two norms of 384, 192 * 576 + 576, 192 * 192 + 192, 192 * 768 + 768 and
    768 * 192 + 192; a norm of 384; a head of 1930."""
    block = 2 * 384 + (192 * 576 + 576) + (192 * 192 + 192) + (192 * 768 + 768) + (768 * 192 + 192)
    assert block == 444_864
    model = VisionTransformer(3, 10).init(torch.Generator())
    assert tree.numel(model["params"]) == 48 * 192 + 192 + 12 * block + 384 + 1930 == 5_350_090
    assert model["stats"] == {}
    # 64 patches: each weight once a patch, 64 * 64 products of 192 for q k^T and for its product with v; the head once.
    products = 64 * (48 * 192 + 12 * 12 * 192**2) + 12 * 2 * 64**2 * 192 + 1920
    assert VisionTransformer(3, 10).count_products((3, 32, 32)) == products


def test_patches_are_row_major_with_distinct_position_encodings():
    x = torch.arange(2 * 8 * 12.0).reshape(1, 2, 8, 12)
    assert torch.equal(patches(x)[0, 4], x[0, :, 4:8, 4:8].flatten())
    encodings = positions(8, 8, 192, x)
    assert encodings.shape == (64, 192)
    distance = torch.cdist(encodings, encodings) + torch.eye(64)
    assert float(distance.min()) > 0.5
    # The slowest sine of the second column is sin(1e-4), the quickest sin(1).
    assert float(encodings[1, 0]) == pytest.approx(math.sin(1))
    assert float(encodings[1, 47]) == pytest.approx(math.sin(1e-4))


def test_clients_lift_and_tangents_are_those_of_forward_mode():
    scenes = [make_inputs(seed=seed) for seed in range(3)]

    def loss(params: Tree, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        logits, _ = SMALL.train(params, x)
        return -logits.log_softmax(-1).gather(-1, y[:, None]).mean(), logits

    single = [grad_and_value(loss, *each) for each in scenes]
    stacked = tree.stack([{"params": params, "x": x, "y": y} for params, x, y in scenes])
    together = vmap_clients(lambda each: grad_and_value(loss, *each.values()))(stacked)
    for k, (gradient, value, logits) in enumerate(single):
        torch.testing.assert_close(together[1][k], value)
        torch.testing.assert_close(together[2][k], logits)
        for one, other in zip(tree.leaves(tree.index(together[0], k)), tree.leaves(gradient), strict=True):
            torch.testing.assert_close(one, other)
    params, x, _ = scenes[0]
    along = tree.map(torch.randn_like, params)
    moved = SMALL.tangent(params, x, SMALL.linearize(params, x)[1], along)
    ahead, behind = (tree.map(lambda p, d, s=s: p + s * 1e-6 * d, params, along) for s in (1, -1))
    difference = (SMALL.train(ahead, x)[0] - SMALL.train(behind, x)[0]) / 2e-6
    torch.testing.assert_close(moved, difference, rtol=1e-5, atol=1e-6)


def test_what_it_does_not_take_is_one_sentence():
    made = registry.make("vit", 1, 10, (8, 8), "batch", 24)  # batch is what stands there where nobody says
    assert made == VisionTransformer(1, 10, 24)
    assert registry.from_description(registry.describe(made)) == made
    with pytest.raises(UserError, match="network vit brings its own normalization: leave norm out"):
        registry.make("vit", 1, 10, (8, 8), "group", 24)
    with pytest.raises(UserError, match="width is 16: that of a vision transformer is a multiple of 12"):
        registry.make("vit", 1, 10, (8, 8), "batch", 16)
    with pytest.raises(UserError, match="do not tile 30x32; set image_size to multiples of 4"):
        made.check((1, 30, 32))
    made.check((1, 28, 28))
