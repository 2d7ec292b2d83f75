"""Uploads lie on the disk until their cohort is complete: a server's memory does not grow, and no bit changes."""

import os
import tracemalloc
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from fake_transport import VERSION, make_acceptance, make_terms
from torch import Tensor

from halfmoon.aggregation.weights import WeightCap
from halfmoon.api.types import WeightedMetric
from halfmoon.api.uploads import Upload
from halfmoon.core import rng, tree
from halfmoon.core.tree import Tree
from halfmoon.engine.driver import ClientResult
from halfmoon.engine.runtime import RuntimeSettings
from halfmoon.engine.sampling import Amount, Views
from halfmoon.federation.protocol import messages
from halfmoon.federation.protocol.messages import Reply, Request, read_message, write_message
from halfmoon.federation.protocol.tree_spec import UploadProbe
from halfmoon.federation.server import calls as site_calls
from halfmoon.federation.server.calls import Inspection, RunIdentity, SiteCalls
from halfmoon.federation.server.connection import Clock, NodeIdentity, SiteReply, Spool
from halfmoon.federation.server.plan import Rules
from halfmoon.federation.server.runtime import RemoteRuntime
from halfmoon.federation.server.sessions import ClientManager
from halfmoon.methods import registry
from halfmoon.runs.factory import build_task
from halfmoon.storage.events import EventList

SITES = 12
ABOUT = make_terms([f"ward-{k:02}" for k in range(SITES)], cohort=SITES, width=32, norm="none")
MODEL = build_task(ABOUT.config, ABOUT.image_spec)


@dataclass
class Desk:
    """A post whose sites have all replied, last first; a reply is made when it is fetched, and kept by nobody."""

    upload: dict[str, float] = field(default_factory=dict)  # weights, where they are others than 4 and more
    waiting: dict[str, tuple[int, bytes, bool]] = field(default_factory=dict)

    def nodes(self) -> Sequence[int]:
        return range(SITES)

    def key_owners(self) -> Mapping[int, NodeIdentity] | None:
        return None

    def send(self, mail: Mapping[int, bytes], seconds: float, asks: bool) -> Mapping[int, str]:
        ids = {number: f"ticket {number} {asks}" for number in mail}
        self.waiting |= {ids[number]: (number, data, asks) for number, data in mail.items()}
        return ids

    def collect(self, message_ids: Sequence[str]) -> Iterator[SiteReply]:
        for ticket in reversed([each for each in message_ids if each in self.waiting]):
            number, data, asks = self.waiting.pop(ticket)
            name = ABOUT.sites[number]
            accepts = make_acceptance(name, federation=ABOUT.hash, labeled=20, unlabeled=20)
            yield SiteReply(accepts if asks else self.answer(number, data), message_id=ticket)

    def answer(self, number: int, data: bytes) -> bytes:
        requested = read_message(data, Request)
        g = rng.generator(number, "site")
        moved = tree.map(lambda leaf: leaf + 0.01 * torch.randn(leaf.shape, generator=g), requested.download["params"])
        weight = torch.tensor(self.upload.get(ABOUT.sites[number], 4.0 + number), dtype=torch.float64)
        upload = Upload({"params": moved, "stats": {}}, weight)
        one = torch.tensor(1.0)
        samples = {"loss": WeightedMetric(one, one, one)}
        return write_message(
            Reply.from_result(requested, VERSION, ClientResult(upload, {}, samples, Amount(1, 1, 0), (0, 0)))
        )


def server(post: Desk, spool: Spool | None, factor: float = 2.0) -> tuple[RemoteRuntime, Tree]:
    """Return a server that evaluates replies as a real one does, in its first round, and its model."""
    manager = ClientManager(post, ABOUT, VERSION, 100.0, 20.0, EventList(), Clock(sleep=lambda s: None), spool)
    manager.wait_for_sites(SITES, 10.0)
    method = registry.make("fedavg")
    seen = UploadProbe(MODEL, Views(), ABOUT.image_spec.image, 0)
    inspection = Inspection(
        seen, lambda client_update, site: (Amount(9, 9, 9, 9), 40), lambda site: 0, cap=WeightCap(factor)
    )
    run = RunIdentity(ABOUT.hash, VERSION, "a" * 32)
    calls = SiteCalls(manager, ABOUT.sites, run, Rules(), inspection=inspection)
    runtime = RemoteRuntime(method, MODEL, Views(), calls, RuntimeSettings(SITES))
    runtime.open(0)
    return runtime, method.start(runtime.task, MODEL.network.init(rng.generator(0, "model")))


class Counted:
    """Counts the uploads that are alive whenever one more is opened."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.alive: weakref.WeakSet[Tensor] = weakref.WeakSet()
        self.most = self.opened = 0
        for module, name in ((messages, "unpack"), (site_calls, "unpack"), (site_calls, "map_tree")):
            patch.setattr(module, name, self.counting(getattr(module, name)))

    def counting(self, opens):
        def counted(*given: object) -> Tree:
            made = opens(*given)
            if "up" in made:
                self.alive.add(next(tree.leaves(made["up"])))
                self.opened += 1
                self.most = max(self.most, len(self.alive))
            return made

        return counted


def test_one_upload_is_open_at_a_time_and_the_bits_are_those_of_all_at_once(tmp_path, monkeypatch):
    """Of twelve: with the mean two models are in memory, whether they are evaluated or added, and no wire bytes beside.
    One weight is over twice the median, and is capped as it was where all uploads were there at once."""
    post = Desk({"ward-03": 60.0})
    runtime, broadcast = server(post, Spool(tmp_path / "spool"))
    counted = Counted(monkeypatch)
    size = tree.nbytes(broadcast)
    tracemalloc.start()
    try:
        mean = runtime.average("train", broadcast)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert counted.opened == 2 * SITES  # to be evaluated, and to be added
    assert counted.most == 1
    # Of bytes: one request for all, and what a site and the server make of one reply, in this one process.
    assert peak < 9 * size, peak / size
    assert not list((tmp_path / "spool").iterdir())
    row = runtime.close().aggregator
    assert row["capped"] == [3]
    held_all, _ = server(Desk({"ward-03": 60.0}), None, factor=0.0)
    held_all.aggregators = (WeightCap(2.0),)
    whole = held_all.average("train", broadcast)
    for path, leaf in tree.flatten(whole.tree).items():
        assert leaf.numpy().tobytes() == tree.flatten(mean.tree)[path].numpy().tobytes(), path
    assert held_all.close().aggregator == row


def test_equal_requests_are_written_once(monkeypatch: pytest.MonkeyPatch):
    """Twelve sites get the same bytes, and one that has a memory to continue from gets others."""
    post = Desk()
    runtime, broadcast = server(post, None)
    sent: list[bytes] = []
    monkeypatch.setattr(post, "answer", lambda number, data: (sent.append(data), Desk.answer(post, number, data))[1])
    runtime.sites.versions.add(ABOUT.sites[2], (0, 0, 0))
    runtime.sites.versions.saved()
    runtime.average("train", broadcast)
    assert len({id(data) for data in sent}) <= 2
    assert {read_message(data, Request).download.keys() == broadcast.keys() for data in sent} == {True}


def test_an_upload_that_cannot_be_is_refused_before_any_is_added(tmp_path: Path):
    """A weight beyond all images of a site: eleven are added."""
    runtime, broadcast = server(Desk({"ward-05": 1e9}), Spool(tmp_path / "spool"))
    runtime.calls.rules = replace(runtime.calls.rules, min_replies=2)
    runtime.average("train", broadcast)
    assert runtime.responders.tolist() == [k for k in range(SITES) if k != 5]


def test_spooled_file_is_private_and_removed_after_its_last_reader(tmp_path: Path):
    """What a killed server left behind goes when the next begins."""
    spool = Spool(tmp_path / "run" / "spool")
    spool.folder.parent.mkdir()
    first, second, third = (SiteReply(data) for data in (b"one", b"two", b"three"))
    spool.store(first)
    spool.store(second)
    assert first.path is not None
    assert first.has_arrived
    assert (first.data, third.path) == (None, None)
    assert (first.read(), second.read(), third.read()) == (b"one", b"two", b"three")
    assert first.path.stat().st_mode & 0o777 == 0o600
    assert spool.folder.stat().st_mode & 0o777 == 0o700
    path = first.path
    del first
    assert not path.exists()
    Spool(spool.folder).clear()
    assert not spool.folder.exists()


def test_full_disk_leaves_replies_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    spool = Spool(tmp_path / "spool")

    def full(handle: int, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    reply = SiteReply(b"one")
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        spool.store(reply)
    assert (reply.path, reply.read()) == (None, b"one")
    assert not list(spool.folder.iterdir())
