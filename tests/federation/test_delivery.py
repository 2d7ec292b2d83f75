"""The end of a federation: the final model is at every site, verified, with its card; who never came cost one wait."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from fake_transport import VERSION, FakeTransport, exchange_messages, make_node, make_refusal, make_terms
from safetensors.torch import save_file
from test_site_client import folder as folder_of

from halfmoon.core import rng, tree, weight_files
from halfmoon.federation.contract.small_federation import trees_equal
from halfmoon.federation.protocol.messages import (
    Acceptance,
    FinalModel,
    Offer,
    Receipt,
    Refusal,
    read_message,
    write_message,
)
from halfmoon.federation.server.connection import SiteReply
from halfmoon.federation.server.plan import load_plan
from halfmoon.federation.server.server import FederationServer, deliver_model, send_model
from halfmoon.federation.site import consent
from halfmoon.federation.site.client import SiteClient
from halfmoon.federation.transport import launch
from halfmoon.models import SmallCNN
from halfmoon.models.model_card import Card
from halfmoon.runs.factory import build_task
from halfmoon.sites import folders
from halfmoon.sites.inference import card_document
from halfmoon.sites.inference.load import load_model
from halfmoon.storage.image_digests import load_digests

TERMS = make_terms(("north", "south"), method="fedavg-fixmatch", cohort=2, rounds=2, labeled_batch=2, unlabeled_batch=2)


def ward(path: Path) -> Path:
    """Write a folder of eight images of 8x8, four of them with labels."""
    return folder_of(path, {0: "sound", 1: "ill", 2: "sound", 3: "ill"})


def final(version: str, **changes: str) -> FinalModel:
    """Return what the server sends at the end: an untrained network with its card."""
    form = TERMS.image_spec
    shared = build_task(TERMS.config, TERMS.image_spec)
    model = shared.network.init(rng.generator(0, "model"))
    card = Card(form.classes, form.image, form.image[1:], 1, form.mean, form.std, shared.network, "fedavg-fixmatch", "")
    output = {"federation": TERMS.hash, "version": version, "card": json.dumps(card.render()), **changes}
    return FinalModel(**output, model=model)


def test_site_stores_and_tests_the_final_model_and_is_notified_of_the_end(tmp_path: Path) -> None:
    """The file is one that predict takes; the words name it and how right it is; who waits ends with 0."""
    folder = ward(tmp_path / "s")
    member = SiteClient.from_folder(folder, "north", tmp_path / "home", tests=ward(tmp_path / "t"))
    read_message(member.reply_to(write_message(Offer(member.version, TERMS.text))), Acceptance)
    assert read_message(member.reply_to(write_message(final(member.version))), Receipt).name == "north"
    path = tmp_path / "home/final/model.safetensors"
    model = load_model(path)
    assert model.classes == TERMS.image_spec.classes
    over = consent.load_end(tmp_path / "home")
    assert over.code == 0
    assert over.reason.startswith(f"finished: the model is in {path}, it is right on ")
    assert over.reason.endswith("% of your test images")
    consent.remove_pending(tmp_path / "home")
    assert consent.load_end(tmp_path / "home") is None


def test_site_finds_its_model_and_card_in_a_visible_folder(tmp_path: Path) -> None:
    """Counts, hash and accuracy of the card are those of the site; a class name cannot become markup."""
    folder = ward(tmp_path / "s")
    member = SiteClient.from_folder(folder, "north", tests=ward(tmp_path / "t"))
    read_message(member.reply_to(write_message(Offer(member.version, TERMS.text))), Acceptance)
    site = folders.read_site(folder)
    before = folders.scan_site(folder)[1]
    read_message(member.reply_to(write_message(final(member.version))), Receipt)
    shown = folder / "halfmoon-model"
    known = load_digests(shown / "model.safetensors")
    prepared = folders.open_prepared_site(folder).images
    assert known is not None
    assert prepared is not None
    assert known.count(prepared) == len(prepared) > 0, "calibrate can recognize the site's training images"
    text, page = ((shown / name).read_text() for name in ("model-card.md", "model-card.html"))
    labeled = int((site.labels >= 0).sum())
    assert f"{labeled:,} images with a label and {len(site) - labeled:,} without" in text
    sha256 = hashlib.sha256((shown / "model.safetensors").read_bytes()).hexdigest()
    for name in ("Data", "Evaluation", "Calibration", "Limits", "License"):
        assert f"## {name}" in text
        assert f"<h2>{name}</h2>" in page
    assert sha256 in text
    assert sha256 in page
    over = consent.load_end(folder / ".halfmoon")
    assert over is not None
    assert str(shown) in over.reason
    assert folders.scan_site(folder)[1] == before, "the folder of the model is none of images"
    parts = {"<b>a</b>": ["<i>*x*</i>"]}
    card_document.write_card(tmp_path, "<u>", parts)
    assert "<i>" not in (tmp_path / "model-card.html").read_text()
    assert "\\<i\\>\\*x\\*" in (tmp_path / "model-card.md").read_text()


def test_a_final_model_that_was_not_agreed_on_is_refused(tmp_path: Path) -> None:
    """Another network, another federation, a card of other classes, or one that is none: nothing is retained."""
    member = SiteClient.from_folder(ward(tmp_path / "s"), "north", tmp_path / "home")
    read_message(member.reply_to(write_message(Offer(member.version, TERMS.text))), Acceptance)
    good = final(member.version)
    card = json.loads(good.card)
    other = {**card, "classes": json.dumps(["a", "b"])}
    for bad in (
        final(member.version, card="{"),
        final(member.version, card=json.dumps(other)),
        final(member.version, federation="f" * 64),
        FinalModel(TERMS.hash, member.version, good.card, {"params": good.model["params"], "stats": {}}),
    ):
        read_message(member.reply_to(write_message(bad)), Refusal)
    assert not (tmp_path / "home/final").exists()
    assert consent.load_end(tmp_path / "home") is None


def test_who_does_not_have_it_is_named() -> None:
    """One has it, one refuses, one is away: the log states who, and why."""
    there = write_message(Receipt("f", VERSION, "north"))
    transport = FakeTransport(
        {1: make_node("north", reply=there), 2: make_node("south", reply=make_refusal("failed", "its disk"))}
    )
    manager = transport.make_manager()
    manager.wait_for_sites(2, 100.0, 0.0)
    assert send_model(manager, ["north", "south", "west"], b"all", Path("m")) == ["north"]
    assert "the final model is at 1 of 3 sites" in transport.log
    assert "south does not have the final model (its disk): send it m, or serve the federation again" in transport.log
    assert (
        "west does not have the final model (it was not connected for 20 s): send it m, or serve the federation again"
        in transport.log
    )


def test_server_waits_to_deliver_to_absent_sites(tmp_path: Path) -> None:
    """A site that returns within `linger` has the model then; who does not come is written down."""
    there = {name: write_message(Receipt("f", VERSION, name)) for name in ("north", "west")}
    transport = FakeTransport({1: make_node("north", reply=there["north"])})
    manager = transport.make_manager()
    manager.wait_for_sites(1, 100.0, 0.0)
    transport.schedule(
        transport.time + 60, lambda: transport.fake_nodes.update({3: make_node("west", reply=there["west"])})
    )
    start_time = transport.time
    deliver_model(manager, ["north", "south", "west"], b"all", tmp_path, 200.0)
    assert 200 <= transport.time - start_time < 250
    assert json.loads((tmp_path / "delivery.json").read_text()) == {"has": ["north", "west"], "lacks": ["south"]}
    assert "the server stays for south, west: who comes back gets the model" in transport.log
    transport.fake_nodes[2] = make_node("south", reply=write_message(Receipt("f", VERSION, "south")))
    deliver_model(manager, ["south"], b"all", tmp_path, 30.0)
    assert json.loads((tmp_path / "delivery.json").read_text()) == {"has": ["north", "south", "west"], "lacks": []}


class Post:
    """Sites of this process, by node; what they reply comes at once."""

    def __init__(self, **there: SiteClient) -> None:
        self.there = dict(enumerate(there.values()))
        self.come: dict[str, bytes] = {}
        self.carried: list[bytes] = []

    def nodes(self) -> list[int]:
        return list(self.there)

    def key_owners(self) -> None:
        return None

    def send(self, mail: Mapping[int, bytes], seconds: float, asks: bool) -> dict[str, str]:
        ids = {number: f"{len(self.carried)}-{number}" for number in mail if number in self.there}
        for number, id in ids.items():
            self.come[id] = self.there[number].reply_to(mail[number])
        self.carried += [*mail.values(), *self.come.values()]
        return ids

    def collect(self, message_ids: Sequence[str]) -> list[SiteReply]:
        return [SiteReply(self.come.pop(id), message_id=id) for id in message_ids if id in self.come]


def test_a_method_from_outside_trains_a_head_and_who_was_away_gets_the_whole_model(tmp_path, monkeypatch):
    """A federation in one process, from given weights with a frozen backbone and a method of somebody's own.
    No frozen tensor is in any message, yet both sites' files hold the whole network: they have the same weights. A site
    without that file, or that does not trust the method, is told so. South comes when all is over, and gets it."""
    given = SmallCNN(1, 2, 2).init(rng.generator(5, "given"))
    save_file(tree.flatten(given), tmp_path / "start.safetensors")
    (tmp_path / "wards.toml").write_text(
        'method = "custom_models:CustomFedAvg"\nnetwork = "small"\nwidth = 2\nweights = "start.safetensors"\n'
        'freeze = ["backbone"]\nrounds = 1\nlabeled_batch = 2\nunlabeled_batch = 2\n[federation]\n'
        'sites = ["north", "south"]\nclasses = ["sound", "ill"]\nimage = [1, 8, 8]\nmin_replies = 1\nabsence = 0.1\n'
    )
    plan = load_plan(tmp_path / "wards.toml")
    sites = {
        name: SiteClient.from_folder(
            ward(tmp_path / name), name, tmp_path / f"home-{name}", trusted=("custom_models:CustomFedAvg",)
        )
        for name in ("north", "south")
    }
    offer = write_message(Offer(VERSION, plan.terms.text))
    careful = replace(sites["north"], trusted=())
    assert "--method custom_models:CustomFedAvg" in read_message(careful.reply_to(offer), Refusal).reason
    with monkeypatch.context() as patch:
        patch.setattr(weight_files, "_REGISTERED", {})
        assert (
            "get it from the people who run the server" in read_message(sites["north"].reply_to(offer), Refusal).reason
        )
    host = FederationServer(plan, tmp_path / "run")
    post = Post(north=sites["north"])
    host.serve(post, 20.0)
    assert launch.is_finished(tmp_path / "run")
    assert launch.sites_without_model(tmp_path / "run") == ["south"]
    later = Post(south=sites["south"])
    host.serve(later, 20.0)
    assert launch.sites_without_model(tmp_path / "run") == ["south"]  # finished: only read
    server = launch.ServerOptions(tmp_path / "wards.toml", tmp_path / "run", redeliver=True)
    server.processes.prepare()
    launch._write_files(server)
    host.serve(later, 20.0)
    assert launch.sites_without_model(tmp_path / "run") == []
    carried = b"".join([*post.carried, *later.carried])
    assert b"head" in carried
    assert b"conv1" not in carried.replace(b"conv1*", b"")
    files = [tmp_path / f"home-{name}/final/model.safetensors" for name in sites]
    whole = [load_model(path) for path in (tmp_path / "run", *files)]
    for model in whole:
        assert trees_equal(model.params["conv1"], given["params"]["conv1"])
        assert trees_equal(model.params["head"], whole[0].params["head"])
    assert not trees_equal(whole[0].params["head"], given["params"]["head"])
    assert consent.load_end(tmp_path / "home-south").code == 0


def test_site_that_never_returns_costs_one_timeout() -> None:
    """The first exchange waits for it, the later ones do not; when it appears it is queried like all others."""
    transport = FakeTransport({1: make_node("north"), 2: make_node("south")})
    manager = transport.make_manager()
    manager.wait_for_sites(2, 60.0, 0.0)
    took = []
    for _ in range(3):
        start_time = transport.time
        replies = exchange_messages(manager, "north", "west")
        took.append(transport.time - start_time)
        assert replies["north"].data == b"north:do"
        assert replies["west"].problem == "it was not connected for 20 s"
    assert took[0] > 20
    assert max(took[1:]) < 5
    transport.fake_nodes[3] = make_node("west")
    manager.wait_for_sites(3, 60.0)
    assert exchange_messages(manager, "west")["west"].data == b"west:do"
