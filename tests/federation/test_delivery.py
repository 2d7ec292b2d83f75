"""The end of a federation: the final model is at every site, verified, with its card; who never came cost one wait."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from federations import VERSION, Street, ask, node, refusal, terms
from PIL import Image

from halfmoon.core import rng
from halfmoon.federation.protocol.messages import Delivered, Final, Joined, Offer, Refusal, read, write
from halfmoon.federation.server.delivery import deliver
from halfmoon.federation.site import consent
from halfmoon.federation.site.client import SiteClient
from halfmoon.inference.load import load_model
from halfmoon.runs.factory import task
from halfmoon.runs.model_card import Card

TERMS = terms(("north", "south"), method="fedavg-fixmatch", cohort=2, rounds=2, labeled_batch=2, unlabeled_batch=2)


def ward(path: Path, labels: int = 4) -> Path:
    """Write a folder of eight images of 8x8, some with labels."""
    path.mkdir(parents=True)
    draw = np.random.default_rng(0)
    for k in range(8):
        Image.fromarray(draw.integers(0, 256, (8, 8), np.uint8)).save(path / f"{k}.png")
    names = TERMS.form.classes
    rows = [f"{k}.png,{names[k % len(names)]}" for k in range(labels)]
    (path / "labels.csv").write_text("\n".join(["path,label", *rows]))
    (path / "classes.txt").write_text("\n".join(names))
    return path


def final(version: str, **changes: str) -> Final:
    """Return what the server sends at the end: an untrained network with its card."""
    form, shared = TERMS.form, task(TERMS.config, TERMS.form)
    model = shared.network.init(rng.generator(0, "model"))
    card = Card(form.classes, form.image, form.image[1:], 1, form.mean, form.std, shared.network, "fedavg-fixmatch", "")
    said = {"federation": TERMS.hash, "version": version, "card": json.dumps(card.render()), **changes}
    return Final(**said, model=model)


def test_a_site_keeps_the_final_model_tests_it_and_is_told_that_all_is_over(tmp_path: Path) -> None:
    """The file is one that predict takes; the words name it and how right it is; who waits ends with 0."""
    folder = ward(tmp_path / "s")
    member = SiteClient.at(folder, "north", tmp_path / "home", tests=ward(tmp_path / "t"))
    read(member.answer(write(Offer(member.version, TERMS.text))), Joined)
    assert read(member.answer(write(final(member.version))), Delivered).name == "north"
    path = tmp_path / "home/final/model.safetensors"
    model = load_model(path)
    assert model.classes == TERMS.form.classes
    over = consent.ended(tmp_path / "home")
    assert over is not None
    assert over[0] == 0
    assert over[1].startswith(f"finished: the model lies in {path}, it is right on ")
    assert over[1].endswith("% of your test images")
    consent.withdraw(tmp_path / "home")
    assert consent.ended(tmp_path / "home") is None


def test_a_final_model_that_was_not_agreed_on_is_refused(tmp_path: Path) -> None:
    """Another network, another federation, a card of other classes, or one that is none: nothing is kept."""
    member = SiteClient.at(ward(tmp_path / "s"), "north", tmp_path / "home")
    read(member.answer(write(Offer(member.version, TERMS.text))), Joined)
    good = final(member.version)
    card = json.loads(good.card)
    other = {**card, "classes": json.dumps(["a", "b"])}
    for bad in (
        final(member.version, card="{"),
        final(member.version, card=json.dumps(other)),
        final(member.version, federation="f" * 64),
        Final(TERMS.hash, member.version, good.card, {"params": good.model["params"], "stats": {}}),
    ):
        read(member.answer(write(bad)), Refusal)
    assert not (tmp_path / "home/final").exists()
    assert consent.ended(tmp_path / "home") is None


def test_who_does_not_have_it_is_named() -> None:
    """One has it, one refuses, one is away: the log says who, and why."""
    there = write(Delivered("f", VERSION, "north"))
    street = Street({1: node("north", said=there), 2: node("south", said=refusal("failed", "its disk"))})
    manager = street.manager()
    manager.gather(2, 100.0, 0.0)
    assert deliver(manager, ["north", "south", "west"], b"all", Path("m"), street.said.append) == ["north"]
    assert "the final model is at 1 of 3 sites" in street.said
    assert "south does not have the final model (its disk): send it m" in street.said
    assert "west does not have the final model (it was not connected for 20 s): send it m" in street.said


def test_one_site_that_never_comes_costs_one_waiting_time() -> None:
    """The first exchange waits for it, the later ones do not; when it appears it is asked like all others."""
    street = Street({1: node("north"), 2: node("south")})
    manager = street.manager()
    manager.gather(2, 60.0, 0.0)
    took = []
    for _ in range(3):
        began = street.time
        answers = ask(manager, "north", "west")
        took.append(street.time - began)
        assert answers["north"].data == b"north:do"
        assert answers["west"].reason == "it was not connected for 20 s"
    assert took[0] > 20
    assert max(took[1:]) < 5
    street.nodes_[3] = node("west")
    manager.gather(3, 60.0)
    assert ask(manager, "west")["west"].data == b"west:do"
