"""A site folder that takes part: what it refuses and in which words, what it remembers, and what a full disk does."""

import errno
import json
import shlex
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from fake_transport import make_message_bytes, make_terms
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from text_log import TextLog

from halfmoon.core import rng, tree
from halfmoon.engine.runtime import RuntimeSettings
from halfmoon.federation.protocol.messages import (
    FAILED,
    NOT_JOINED,
    OTHER_VERSION,
    UNFIT,
    Acceptance,
    Offer,
    Refusal,
    Reply,
    Request,
    read_message,
    write_message,
)
from halfmoon.federation.protocol.terms import Terms
from halfmoon.federation.server.calls import RunIdentity, SiteCalls
from halfmoon.federation.server.connection import SiteReply
from halfmoon.federation.server.runtime import RemoteRuntime
from halfmoon.federation.site import consent
from halfmoon.federation.site.client import SiteClient
from halfmoon.federation.site.runtime import SiteMemory, prune_memories
from halfmoon.methods import registry
from halfmoon.runs.factory import build_task, build_views
from halfmoon.storage import atomic_io
from halfmoon.storage.events import EventRecorder
from halfmoon.storage.state_store import TreeStore

WARD = "ward-7-b41"
PATIENT = "kim-1961"
DIAGNOSIS = "lupus"
"""The folder of the site, the beginning of its images' names, and a class that only it has."""

ROUNDS = 4
RUN = "5a" * 16


def made(method: str = "fedloke", **options: Any) -> Terms:
    """Return terms of one site that runs every round."""
    small = {
        "cohort": 1,
        "rounds": ROUNDS,
        "labeled_batch": 2,
        "unlabeled_batch": 2,
        "steps": 2,
        "labeled_view": "weak",
    }
    return make_terms(("north",), method=method, **{**small, **options})


TERMS = made()


def folder(path: Path, labels: Mapping[int, str], count: int = 8, classes: str = "sound\nill\n") -> Path:
    """Write a site folder: gray images of 8x8, some with labels."""
    path.mkdir(parents=True)
    pixels = np.random.default_rng(5).integers(0, 256, (count, 8, 8), dtype=np.uint8)
    for k in range(count):
        Image.fromarray(pixels[k]).save(path / f"{PATIENT}-{k}.png")
    lines = [f"{PATIENT}-{k}.png,{name}" for k, name in labels.items()]
    (path / "labels.csv").write_text("\n".join(["path,label", *lines]) + "\n")
    if classes:
        (path / "classes.txt").write_text(classes)
    return path


def offer(about: Terms = TERMS, version: str = "") -> bytes:
    return write_message(Offer(version or SiteClient.from_folder(Path(), "").version, about.text))


@dataclass
class Line:
    """A link to one member; what went over it, in pairs."""

    member: SiteClient
    pairs: list[tuple[bytes, bytes]] = field(default_factory=list)

    def exchange(self, requests: Mapping[str, bytes], what: str) -> Mapping[str, SiteReply]:
        """Have the member reply."""
        for data in requests.values():
            self.pairs.append((data, self.member.reply_to(data)))
        return dict.fromkeys(requests, SiteReply(self.pairs[-1][1]))


def run_rounds(member: SiteClient, about: Terms = TERMS, rounds: int = ROUNDS) -> list[tuple[bytes, bytes]]:
    """Run rounds with one site, and return each request with its reply."""
    assert isinstance(read_message(member.reply_to(offer(about)), Acceptance, Refusal), Acceptance)
    config = about.config
    shared = build_task(config, about.image_spec)
    line = Line(member)
    method = registry.make(config.method, dict(config.options))
    remote = RemoteRuntime(
        method, shared, build_views(config, about.image_spec),
        SiteCalls(line, about.sites, RunIdentity(about.hash, member.version, RUN)), RuntimeSettings(1, config.seed),
        store=TreeStore(),
    )  # fmt: skip
    server = method.start(shared, shared.network.init(rng.generator(config.seed, "model")))
    for number in range(rounds):
        remote.open(number)
        server = method.round(remote.task, server, remote)
        remote.record_server_bytes(0)
        remote.close()
    return line.pairs


@pytest.fixture(scope="module")
def ward(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a site with 3 labeled and 5 unlabeled images; nothing is retained in it."""
    return folder(tmp_path_factory.mktemp("clinic") / WARD, {0: "sound", 3: "ill", 5: "sound"})


@pytest.fixture(scope="module")
def script(ward: Path, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[bytes, bytes]]:
    """Return what a server asked in four rounds of FedLoKe, whose sites remember, and what was replied."""
    return run_rounds(SiteClient.from_folder(ward, "north", tmp_path_factory.mktemp("first")))


@pytest.fixture
def member(ward: Path, tmp_path: Path) -> SiteClient:
    return SiteClient.from_folder(ward, "north", tmp_path / "home")


def read_refusal(data: bytes) -> Refusal:
    """Return the refusal in a reply, which must have no word that only the site knows."""
    text = read_message(data, Refusal)
    discreet(data)
    return text


def discreet(data: bytes) -> None:
    """Fail where bytes have a name of the site's folder, files or own classes."""
    for secret in (WARD, PATIENT, DIAGNOSIS, "clinic", "labels.csv", ".png", "/tmp", "home"):
        assert secret.encode() not in data, secret


def logged(member: SiteClient) -> str:
    return (member.state_folder / "join.log").read_text()


def memories(member: SiteClient, about: Terms = TERMS) -> list[Path]:
    return sorted((member.state_folder / "federations" / about.hash[:16]).glob(f"{RUN}/memory-*"))


def test_a_site_joins(member: SiteClient) -> None:
    text = read_message(member.reply_to(offer()), Acceptance)
    assert (text.federation, text.name, text.labeled, text.unlabeled, text.tests) == (TERMS.hash, "north", 3, 5, 0)
    discreet(write_message(text))
    assert "this site trains on 3 labeled and 5 unlabeled images" in logged(member)


@pytest.mark.parametrize(
    ("site_version", "expected", "message"),
    [
        ("0.9.0", "0.10.0", "this site runs halfmoon 0.9.0, the server 0.10.0: this site has to upgrade to 0.10.0."),
        ("0.10.0", "0.9.0", "this site runs halfmoon 0.10.0, the server 0.9.0: the server has to upgrade to 0.10.0."),
        ("1.0", "1.0rc1", "the server has to upgrade to 1.0."),
        ("1.0.0", "1.0.0.dev3", "the server has to upgrade to 1.0.0."),
        ("1.0.0.dev3", "1.0.0", "this site has to upgrade to 1.0.0."),
        ("1.0", "1.0.1", "this site has to upgrade to 1.0.1."),
    ],
)
def test_another_version_is_refused_with_who_has_to_upgrade(member, site_version, expected, message):
    member.version = site_version
    for data in (offer(version=expected), write_message(replace(REQUEST, version=expected))):
        refusal = read_refusal(member.reply_to(data))
        assert refusal.kind == OTHER_VERSION
        assert refusal.reason.endswith(message)
        assert refusal.version == site_version


def test_a_site_that_is_not_in_the_terms_does_not_join(ward: Path, tmp_path: Path) -> None:
    refusal = read_refusal(SiteClient.from_folder(ward, "east", tmp_path).reply_to(offer()))
    assert (refusal.kind, refusal.reason) == (UNFIT, "federation test has no site east.")


@pytest.mark.parametrize(
    ("labels", "classes", "kind", "message"),
    [
        ({0: DIAGNOSIS, 1: "ill"}, "", UNFIT, "it has labels of classes that the federation does not have"),
        (
            {},
            "sound\nill\n",
            UNFIT,
            "the federation has labels at every site, but this site has none: with some it joins.",
        ),
        (
            dict.fromkeys(range(8), "ill"),
            "ill\n",
            UNFIT,
            "needs images without a label, but this site has none: with some it joins.",
        ),
        ({99: "ill"}, "", FAILED, "it cannot take part now; its own log has the reason."),
        ({0: "ill"}, f"{DIAGNOSIS}\n", FAILED, "it cannot take part now; its own log has the reason."),
    ],
    ids=["class", "no label", "all labels", "no file", "no class"],
)
def test_unsuitable_folder_is_refused(tmp_path, labels, classes, kind, message):
    member = SiteClient.from_folder(folder(tmp_path / WARD, labels, classes=classes), "north", tmp_path / "home")
    refusal = read_refusal(member.reply_to(offer()))
    assert refusal.kind == kind
    assert refusal.reason.endswith(message) or message in refusal.reason
    assert "not done: " in logged(member)
    assert read_refusal(member.reply_to(write_message(replace(REQUEST, version=member.version)))).kind == NOT_JOINED


def test_a_class_that_no_label_has_is_no_hindrance(tmp_path: Path) -> None:
    """A site may know more classes than it has labels of, and in another order: names count, not numbers."""
    site = folder(tmp_path / WARD, {0: "ill", 1: "sound"}, classes=f"ill\n{DIAGNOSIS}\nsound\n")
    member = SiteClient.from_folder(site, "north", tmp_path / "home")
    assert isinstance(read_message(member.reply_to(offer()), Acceptance), Acceptance)
    _, opened = member._memberships[TERMS.hash]
    held = opened.local_clients.dataset
    assert held.train.labels[torch.from_numpy(held.split.labeled)].tolist() == [1, 0]


def test_labels_that_a_federation_does_not_want_are_not_used(ward: Path, tmp_path: Path) -> None:
    """With the labels at the server, all images of a site count as unlabeled ones."""
    member = SiteClient.from_folder(ward, "north", tmp_path)
    about = made("semifl", labels_at="server")
    text = read_message(member.reply_to(offer(about)), Acceptance)
    assert (text.labeled, text.unlabeled) == (0, 8)


REQUEST = Request(TERMS.hash, "", RUN, 0, 0, 0, "train")


@pytest.mark.parametrize(
    "name",
    ["../../x", "", ".", "/etc", "F" * 64, "f" * 63, "f" * 64 + " ", "f" * 65, "../" + "f" * 61, "f" * 64 + "/../x"],
)
def test_a_federation_that_is_no_hash_is_unknown_and_no_folder_is_made(member: SiteClient, name: str) -> None:
    """What a server calls its federation becomes the name of a folder."""
    refusal = read_refusal(member.reply_to(write_message(replace(REQUEST, version=member.version, federation=name))))
    assert refusal.kind == NOT_JOINED
    assert {path.name for path in member.state_folder.rglob("*")} == {"join.log", "events.jsonl"}


def test_a_request_before_joining_is_unknown(member: SiteClient) -> None:
    refusal = read_refusal(member.reply_to(write_message(replace(REQUEST, version=member.version))))
    assert (refusal.kind, refusal.reason) == (
        NOT_JOINED, f"this site has not joined federation {TERMS.hash[:8]} yet."
    )  # fmt: skip


@pytest.mark.parametrize(
    "damage", [b"", b"{", b"\xff\xfe\x00", b"null", TERMS.text.encode().replace(b'"rounds": 4', b'"rounds": 5')]
)
def test_damaged_terms_are_renewed(member, ward, script, damage):
    """A site whose disk lost the terms says that it does not know them: the server then offers them again."""
    member.reply_to(offer())
    (stored,) = member.state_folder.rglob("terms.json")
    stored.write_bytes(damage)
    repeated = SiteClient.from_folder(ward, "north", member.state_folder)
    request, reply = script[0]
    assert read_refusal(repeated.reply_to(request)).kind == NOT_JOINED
    repeated.reply_to(offer())
    assert repeated.reply_to(request) == reply


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"round": ROUNDS}, "requests round 5 of 4"), ({"round": -1}, "round"), ({"round": 10**30}, "round"),
        ({"client_update": "steal"}, "requests 'steal', which the method does not have"),
        ({"download": {}}, "is missing"), ({"download": {"params": {"x": torch.ones(2)}}}, "is missing"),
        ({"evaluation": {"x": torch.ones(2)}}, "not the network of the terms"),
        ({"run": "../../x"}, "id of its run is invalid"),
        ({"run": ""}, "id of its run is invalid"), ({"run": "A" * 32}, "id of its run is invalid"),
        ({"latest": [1]}, "a round, an attempt and a query"),
        ({"latest": [0, 0, -1]}, "latest is not made of non-negative"),
        ({"oldest": [0, 0, "x"]}, "oldest is not made of non-negative"),
    ],
)  # fmt: skip
def test_requests_that_cannot_be_done(member, script, changes, message):
    """Each has its reply, and the next honest request has the right one."""
    member.reply_to(offer())
    request = read_message(script[0][0], Request)
    refusal = read_refusal(member.reply_to(write_message(replace(request, **changes))))
    assert refusal.kind == UNFIT
    assert message in refusal.reason
    assert read_refusal(member.reply_to(write_message(replace(request, federation="a" * 64)))).kind == NOT_JOINED
    assert member.reply_to(script[0][0]) == script[0][1]


def test_a_diverged_model_is_not_described(member: SiteClient, script: list[tuple[bytes, bytes]]) -> None:
    """Weights that are no numbers: the server hears that training diverged, the site's log at which step."""
    member.reply_to(offer())
    request = read_message(script[0][0], Request)
    spoiled = tree.map(lambda leaf: leaf * float("nan") if leaf.is_floating_point() else leaf, request.download)
    refusal = read_refusal(member.reply_to(write_message(replace(request, download=spoiled))))
    assert (refusal.kind, refusal.reason) == (FAILED, "its training diverged; its own log has the reason.")
    assert memories(member) == []


def test_replies_of_a_site_are_equal_in_every_process(ward, member, script):
    """The same requests twice, each time by a member that has just been started: the same bytes."""
    member.reply_to(offer())
    for request, reply in script:
        for _ in range(2):
            assert SiteClient.from_folder(ward, "north", member.state_folder).reply_to(request) == reply
    assert len({reply for _, reply in script}) == ROUNDS


def test_site_stores_its_memory(member: SiteClient, script: list[tuple[bytes, bytes]]) -> None:
    """The scene shows it: FedLoKe's second round without the memory of the first is another one."""
    member.reply_to(offer())
    assert member.reply_to(script[1][0]) != script[1][1]


def test_repeated_round_starts_from_the_previous_memory(member, script):
    """A server that goes back a round, or two: the site's replies are as they were, in whatever order it asks."""
    member.reply_to(offer())
    for step in (0, 1, 2, 1, 2, 3, 2, 3, 0, 1, 2, 3):
        assert member.reply_to(script[step][0]) == script[step][1], step


def test_an_attempt_that_did_not_count_is_not_remembered(member: SiteClient, script: list[tuple[bytes, bytes]]) -> None:
    """The first round is run twice, at first with another model, and once more in vain: what the server says that
    it goes on from counts, whatever came before or after it."""
    member.reply_to(offer())
    first, second = (read_message(script[step][0], Request) for step in (0, 1))
    other = tree.map(lambda leaf: leaf * 1.01 if leaf.is_floating_point() else leaf, first.download)
    assert member.reply_to(write_message(replace(first, download=other))) != script[0][1]
    reply = read_message(member.reply_to(write_message(replace(first, attempt=1))), Reply)
    assert write_message(replace(reply, attempt=0)) == script[0][1]
    assert member.reply_to(write_message(replace(first, attempt=2, download=other))) != script[0][1]
    assert second.latest == [0, 0, 0]
    assert member.reply_to(write_message(replace(second, latest=[0, 1, 0]))) == script[1][1]
    assert member.reply_to(write_message(replace(second, latest=[0, 0, 0]))) != script[1][1]


def test_committed_memory_is_retained_and_older_ones_are_removed(
    member: SiteClient, script: list[tuple[bytes, bytes]]
) -> None:
    """Once the server will not go back behind the second round, the first one's memory goes; from there all continues."""
    member.reply_to(offer())
    for request, _ in script[:2]:
        member.reply_to(request)
    assert len(memories(member)) == 2
    last = write_message(replace(read_message(script[2][0], Request), oldest=[1, 0, 0]))
    assert member.reply_to(last) == script[2][1]
    assert [path.name[7:21] for path in memories(member)] == ["000001-000-000", "000002-000-000"]
    for step in (3, 2, 3):
        assert member.reply_to(script[step][0]) == script[step][1]


def test_a_damaged_memory_is_named_and_the_one_before_counts(ward, member, script, tmp_path):
    member.reply_to(offer())
    for request, _ in script[:2]:
        member.reply_to(request)
    shutil.copytree(member.state_folder, tmp_path / "without")
    newest = memories(member)[-1]
    without = SiteClient.from_folder(ward, "north", tmp_path / "without")
    memories(without)[-1].unlink()
    data = bytearray(newest.read_bytes())
    data[-1] ^= 1
    newest.write_bytes(data)
    reply = member.reply_to(script[2][0])
    assert reply == without.reply_to(script[2][0]) != script[2][1]
    assert f"{newest.name} is damaged" in logged(member)
    discreet(reply)


def at(
    folder: Path, *update_index: int, latest: tuple[int, int, int] | None = None, log: TextLog | None = None
) -> SiteMemory:
    """Return a site's memory; without `log` a test fails at an event."""
    round, attempt, query = update_index
    return SiteMemory(folder, (round, attempt, query), latest, torch.device("cpu"), cast(EventRecorder, log))


def test_a_memory_that_is_cut_off_counts_as_damaged(tmp_path: Path) -> None:
    """Of any length; and a partial file of a kill in the middle of writing is nothing."""
    messages: list[str] = []
    at(tmp_path, 0, 0, 0).put("0", {"a": torch.arange(3.0)})
    at(tmp_path, 1, 0, 0).put("0", {"a": torch.zeros(3)})
    (whole,) = tmp_path.glob("memory-000001-*")
    data = whole.read_bytes()
    (tmp_path / f".{whole.name}.partial").write_bytes(data[:9])
    (tmp_path / "memory-000001-000-000-00.safetensors").write_bytes(b"")
    for length in (0, 7, 8, len(data) - 1):
        whole.write_bytes(data[:length])
        found = at(tmp_path, 2, 0, 0, latest=(1, 0, 0), log=TextLog(messages)).get("0")
        assert found["a"].tolist() == [0, 1, 2]
    assert len(messages) == 4
    assert at(tmp_path, 2, 0, 0).get("0") is None, "the server says that nothing counted"


def test_a_memory_that_is_missing_is_named(tmp_path: Path) -> None:
    """Somebody put back an old backup of the site: what is there counts, or nothing."""
    messages: list[str] = []
    memory = at(tmp_path, 6, 0, 0, latest=(5, 1, 0), log=TextLog(messages))
    assert memory.get("0") is None
    at(tmp_path, 3, 0, 0).put("0", {"a": torch.ones(1)})
    at(tmp_path, 5, 2, 0).put("0", {"a": torch.zeros(1)})
    found = memory.get("0")
    assert found["a"].tolist() == [1]
    assert [text.split(":")[0] for text in messages] == ["the memory of round 6 is missing"] * 2


def test_pruning_retains_committed_and_newer_memories(tmp_path: Path) -> None:
    for update_index in ((0, 0, 0), (2, 0, 0), (2, 0, 1), (2, 1, 0), (5, 0, 0)):
        at(tmp_path, *update_index).put("0", {"a": torch.tensor(update_index)})
    prune_memories(tmp_path, None)
    assert len(list(tmp_path.iterdir())) == 5
    prune_memories(tmp_path, (2, 0, 1))
    assert [path.name[7:21] for path in sorted(tmp_path.iterdir())] == [
        "000002-000-001", "000002-001-000", "000005-000-000"
    ]  # fmt: skip
    prune_memories(tmp_path / "nowhere", (3, 0, 0))


Fail = Callable[..., Any]
ERRORS = [
    OSError(errno.ENOSPC, "No space left on device", f"/{WARD}/x"),
    OSError(f"cannot write /{WARD}/{PATIENT}.png"),
]


@pytest.mark.parametrize("error", ERRORS, ids=["full", "without a number"])
@pytest.mark.parametrize("call", [0, 1, 2, 3])
@pytest.mark.parametrize("what", ["write_atomically", "append"])
def test_full_disk_is_reported_without_a_path(
    member: SiteClient, script: list[tuple[bytes, bytes]], monkeypatch: pytest.MonkeyPatch,
    what: str, call: int, error: OSError,
) -> None:  # fmt: skip
    """Whichever write it is that fails (index, what may come down, terms, memory; a line of the log).
    With space again the same messages have the answers that they always had."""
    real: Fail = getattr(atomic_io, what)
    calls: list[int] = []

    def full(*text: Any) -> None:
        calls.append(1)
        if len(calls) - 1 == call:
            raise error
        real(*text)

    with monkeypatch.context() as patch:
        patch.setattr(atomic_io, what, full)
        replies = [member.reply_to(data) for data in (offer(), script[0][0])]
    kinds = [type(read_message(data, Acceptance, Reply, Refusal)) for data in replies]
    if what == "append":
        assert kinds == [Acceptance, Reply], "what cannot be written down is still done"
    else:
        assert len(calls) > call, "0 is the index, 1 what may come down, 2 the terms, 3 the memory"
        assert read_refusal(replies[call // 3]).kind == FAILED
    assert isinstance(read_message(member.reply_to(offer()), Acceptance), Acceptance)
    for request, reply in script[:2]:
        assert member.reply_to(request) == reply
    for data in replies:
        discreet(data)


def test_full_disk_does_not_block_replies(member, script, monkeypatch):
    """Round 1's memory cannot be retained, so the reply is a refusal; round 1 again, with space, is as if it never was."""
    member.reply_to(offer())
    assert member.reply_to(script[0][0]) == script[0][1]

    def full(*text: Any) -> None:
        raise ERRORS[0]

    with monkeypatch.context() as patch:
        patch.setattr(atomic_io, "write_atomically", full)
        patch.setattr(atomic_io, "append", full)
        refusal = read_refusal(member.reply_to(script[1][0]))
    assert (refusal.kind, refusal.reason) == (FAILED, "its disk: No space left on device.")
    for step in (1, 2):
        assert member.reply_to(script[step][0]) == script[step][1]


@pytest.mark.parametrize("remains", ["nothing", "no labels", "a broken image"])
def test_folder_removed_during_a_federation_is_reported(tmp_path, script, remains):
    """Each message may find another folder than the one before: the reply names none of it."""
    ward = folder(tmp_path / WARD, {0: "sound", 3: "ill", 5: "sound"})
    site_home_folder = tmp_path / "home"
    SiteClient.from_folder(ward, "north", site_home_folder).reply_to(offer())
    if remains == "nothing":
        shutil.rmtree(ward)
    elif remains == "no labels":
        (ward / "labels.csv").write_text("path,label\n")
    else:
        (ward / f"{PATIENT}-0.png").write_bytes(b"no image")
    data = SiteClient.from_folder(ward, "north", site_home_folder).reply_to(script[0][0])
    discreet(data)
    assert isinstance(read_message(data, Reply, Refusal), Refusal)
    skipping = SiteClient.from_folder(ward, "north", site_home_folder, skip_unreadable=True)
    data = skipping.reply_to(script[0][0])
    discreet(data)
    # One image of seven cannot be read, which is more than 5 %: the site goes on only with the option.
    assert isinstance(read_message(data, Reply, Refusal), Reply) == (remains == "a broken image")


def test_two_forms_have_two_homes(ward: Path, member: SiteClient, script: list[tuple[bytes, bytes]]) -> None:
    """A federation of larger images beside: both continue."""
    wide = replace(TERMS, image_spec=replace(TERMS.image_spec, image=(1, 16, 16)))
    pairs = run_rounds(member, wide, 1)
    member.reply_to(offer())
    assert member.reply_to(script[0][0]) == script[0][1]
    repeated = SiteClient.from_folder(ward, "north", member.state_folder)
    assert [repeated.reply_to(request) for request, _ in pairs] == [reply for _, reply in pairs]
    assert (member.state_folder / "8x8x1").is_dir() or (member.state_folder / "16x16x1").is_dir()


def test_a_site_tests_a_model_on_images_that_it_never_trains_on(ward, tmp_path, script):
    """Four labeled test images: a table of counts with the sum 4, and a loss; the work beside gives the same bits."""
    tests = folder(tmp_path / "test" / WARD, {0: "ill", 1: "ill", 2: "sound", 6: "ill"})
    member = SiteClient.from_folder(ward, "north", tmp_path / "home", tests=tests)
    assert read_message(member.reply_to(offer()), Acceptance).tests == 4
    request = read_message(script[0][0], Request)
    model = {"params": request.download["params"], "stats": request.download["stats"]}
    both = read_message(member.reply_to(write_message(replace(request, evaluation=model))), Reply)
    assert both.evaluation["confusion"].sum() == 4
    assert both.evaluation["confusion"].sum(1).tolist() == [1, 3]
    assert write_message(replace(both, evaluation={})) == script[0][1]
    single = read_message(
        member.reply_to(write_message(replace(request, evaluation=model, client_update="", download={}))), Reply
    )
    assert torch.equal(single.evaluation["confusion"], both.evaluation["confusion"])
    assert single.upload == {}


@pytest.fixture(scope="module")
def steady(ward: Path, tmp_path_factory: pytest.TempPathFactory) -> SiteClient:
    member = SiteClient.from_folder(ward, "north", tmp_path_factory.mktemp("steady"))
    member.reply_to(offer())
    return member


Anything = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 2**70) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
ENDLESS = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@ENDLESS
@given(changes=st.dictionaries(st.sampled_from([*Request.__dataclass_fields__, "message"]), Anything, max_size=3))
def test_any_request_gets_a_reply_without_private_details(steady: SiteClient, changes: dict[str, Any]) -> None:
    head = {"message": "request", **REQUEST.__dict__, "version": steady.version, **changes}
    plain = {name: value for name, value in head.items() if name not in ("down", "evaluation")}
    data = steady.reply_to(
        make_message_bytes(json.dumps({"__metadata__": {"halfmoon": json.dumps(plain), "shape": "{}"}}))
    )
    discreet(data)
    assert isinstance(read_message(data, Refusal, Reply), Refusal) or not changes["client_update"]


@ENDLESS
@given(step=st.sampled_from(["form", "config", "options"]), name=st.data(), value=Anything)
def test_any_offer_gets_a_reply_without_private_details(
    steady: SiteClient, step: str, name: st.DataObject, value: Any
) -> None:
    metadata = json.loads(TERMS.text)
    metadata[step][name.draw(st.sampled_from(sorted(metadata[step])))] = value
    data = steady.reply_to(write_message(Offer(steady.version, json.dumps(metadata))))
    discreet(data)
    text = read_message(data, Acceptance, Refusal)
    assert isinstance(text, Acceptance) or text.kind in (UNFIT, FAILED)


@ENDLESS
@given(st.binary(max_size=200))
def test_any_bytes_get_a_reply(steady: SiteClient, data: bytes) -> None:
    assert read_refusal(steady.reply_to(data)).kind == UNFIT


@ENDLESS
@given(st.data())
def test_malformed_request_gets_a_reply(
    steady: SiteClient, script: list[tuple[bytes, bytes]], drawn: st.DataObject
) -> None:
    data = bytearray(script[0][0])
    end = 8 + int.from_bytes(data[:8], "little")
    data[drawn.draw(st.integers(0, end - 1))] = drawn.draw(st.integers(0, 255))
    cut = drawn.draw(st.sampled_from([len(data), end, end + 5]))
    response = steady.reply_to(bytes(data[:cut]))
    read_message(response, Refusal, Reply)
    discreet(response)


def test_unreadable_images_are_counted_with_the_command_that_lists_them(tmp_path: Path) -> None:
    site = folder(tmp_path / WARD, {0: "ill", 1: "sound"})
    broken = sorted(path for path in site.rglob("*.png"))[-1]
    broken.write_bytes(b"")
    member = SiteClient.from_folder(site, "north", tmp_path / "home", skip_unreadable=True)
    assert isinstance(read_message(member.reply_to(offer()), Acceptance), Acceptance)
    count = len(list(site.rglob("*.png")))
    text = f"1 cannot be read and are left out ({1 / count:.0%}): `halfmoon site check {shlex.quote(str(site))}` lists them"
    assert text in logged(member)


def test_a_site_does_not_join_with_many_unreadable_images(tmp_path: Path) -> None:
    """Above 5 % only an option leaves them out; the server gets no name, the people get the numbers and a list."""
    site = folder(tmp_path / WARD, {0: "ill", 1: "sound"})
    images = sorted(site.rglob("*.png"))
    for path in images[2:4]:
        path.write_bytes(b"")
    for _ in range(2):  # decoded now, and decoded earlier
        member = SiteClient.from_folder(site, "north", tmp_path / "home")
        refusal = read_message(member.reply_to(offer()), Refusal, Acceptance)
        assert isinstance(refusal, Refusal)
        assert refusal.reason == "too many of its images cannot be read; its log names them."
        end = consent.load_end(tmp_path / "home")
        assert end is not None
        assert end.code == 1
        assert f"2 of {len(images)} images in {site} cannot be read" in end.reason
        assert end.reason.endswith("replace or remove them, or leave them out with --skip-unreadable.")
    rows = (tmp_path / "home" / "skipped.csv").read_text().splitlines()
    assert [row.partition(",")[0] for row in rows] == [
        "path",
        *(path.relative_to(site).as_posix() for path in images[2:4]),
    ]
    member = SiteClient.from_folder(site, "north", tmp_path / "home", skip_unreadable=True)
    assert isinstance(read_message(member.reply_to(offer()), Acceptance), Acceptance)
