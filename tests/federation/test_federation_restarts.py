"""Federations that are stopped anywhere and served again: the bits of those that were not."""

import shutil
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from in_process_federation import (
    LocalFederation,
    call_before_each_message,
    export_small_sites,
    read_model_bytes,
    record_exchanges,
    select_eager_options,
    speed_up_rehearsals,
    stop_server_at,
)
from safetensors.numpy import load_file

from halfmoon.core.errors import UserError
from halfmoon.federation.protocol.messages import Request
from halfmoon.federation.transport import client_app

METHODS = {
    "fedloke": "clients",
    "feddure": "clients",
    "semifl": "server",
    "fedmatch": "clients",
    "feddb": "clients",
    "semifed": "clients",
}
"""Methods that remember, and where labels lie: sites a local model (FedLoKe), a regulator with its optimizer (FedDure),
an optimizer (SemiFL, FedDB), parts (FedMatch), labels (SemiFed); the server a momentum and its own optimizer (SemiFL),
and what it keeps of each site on its shelf (FedMatch, SemiFed)."""

EACH_KIND = [
    name if name in ("fedloke", "semifl", "fedmatch") else pytest.param(name, marks=pytest.mark.nightly)
    for name in METHODS
]
"""By default one method that remembers at the sites, one at the server, and one on the server's shelf; all at night."""

ROUNDS = 5
MEMORY = Path(".halfmoon", "federations")
"""Where a site remembers federations, below its folder."""


@pytest.fixture(scope="module", autouse=True)
def no_waiting() -> Iterator[None]:
    with speed_up_rehearsals():
        yield


@pytest.fixture(scope="module")
def federations(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], LocalFederation]:
    folder = tmp_path_factory.mktemp("federations")
    return cache(lambda labels_at: export_small_sites(labels_at, folder))


class Straight:
    """A federation that was never stopped: its run, what its sites then remember, and the trips of each round."""

    def __init__(self, federation: LocalFederation, file: Path) -> None:
        self.federation = federation
        self.file = file
        federation.delete_client_memory()
        with record_exchanges() as exchanges:
            self.run = federation.run(file)
        self.memories = memories(federation)
        requests = [exchange.request for exchange in exchanges]
        updates = {(a.round, a.query) for a in requests if isinstance(a, Request)}
        self.queries = [[query for at, query in sorted(updates) if at == round] for round in range(ROUNDS)]


def memories(federation: LocalFederation) -> dict[str, tuple[str, dict[str, bytes]]]:
    """Return the newest thing that each site remembers: its file's name, and its tensors' bytes."""
    newest = {}
    for name in federation.names:
        files = sorted((federation.folder / name / ".halfmoon" / "federations").glob("*/*/memory-*.safetensors"))
        if files:
            newest[name] = files[-1].name, {key: leaf.tobytes() for key, leaf in load_file(files[-1]).items()}
    return newest


@pytest.fixture(scope="module")
def straight(federations: Callable[[str], LocalFederation]) -> Callable[[str], Straight]:
    @cache
    def played(method: str) -> Straight:
        federation = federations(METHODS[method])
        return Straight(
            federation,
            federation.write_plan(
                method, rounds=ROUNDS, steps=2, checkpoint_every=2, options=select_eager_options(method)
            ),
        )

    return played


@pytest.fixture(scope="module")
def stopped(straight: Callable[[str], Straight], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], str]:
    """Give a federation as it is on all disks after it was stopped in rounds 1, 2, 4 and 5, in their first or last
    trips, before its sites know or after they have answered, and all processes have ended."""

    @cache
    def kept(method: str) -> Path:
        there = straight(method)
        there.federation.delete_client_memory()
        queries = there.queries
        stops = [
            ((0, queries[0][0]), True),
            ((1, queries[1][-1]), False),
            ((3, queries[3][0]), False),
            ((4, queries[4][-1]), True),
        ]
        for update_index, after in stops:
            with stop_server_at(update_index, after):
                there.federation.run(there.file, f"{method}-stopped")
            client_app._open_cached_client.cache_clear()
        folder = tmp_path_factory.mktemp(method)
        for name in there.federation.names:
            shutil.copytree(there.federation.folder / name / MEMORY, folder / name)
        return folder

    def back(method: str, name: str) -> str:
        federation = straight(method).federation
        folder = kept(method)
        federation.delete_client_memory()
        for site in federation.names:
            shutil.copytree(folder / site, federation.folder / site / MEMORY)
        shutil.copytree(federation.runs / f"{method}-stopped", federation.runs / name)
        return name

    return back


def equal(there: Straight, run: Path) -> None:
    """Fail where a run, or what its sites remember, is another than that of the federation that was not stopped."""
    assert (run / "model.safetensors").read_bytes() == (there.run / "model.safetensors").read_bytes()
    assert (run / "metrics.jsonl").read_bytes() == (there.run / "metrics.jsonl").read_bytes()
    assert memories(there.federation) == there.memories


@pytest.mark.parametrize("method", EACH_KIND)
def test_what_is_remembered_matters(method: str, straight: Callable[[str], Straight]) -> None:
    """Sites that lose their memory end elsewhere: the tests below could fail."""
    there = straight(method)
    assert len(there.memories) == 3
    there.federation.delete_client_memory()

    def lose() -> None:
        for path in there.federation.folder.glob("site-*/.halfmoon/federations/*/*/memory-*"):
            path.unlink()

    with call_before_each_message(lose):
        run = there.federation.run(there.file, f"{method}-forgetful")
    assert read_model_bytes(run) != read_model_bytes(there.run)


@pytest.mark.parametrize("method", EACH_KIND)
def test_stopped_server_resumes(method, straight, stopped):
    """Every second round has a checkpoint. So it continues from the beginning twice, from round 2 and from round 4; sites
    have done some of these rounds already."""
    there = straight(method)
    equal(there, there.federation.run(there.file, stopped(method, f"{method}-again")))


@pytest.mark.parametrize(
    ("method", "name"),
    [("fedloke", "safetensors"), ("fedloke", "json"), ("semifl", "safetensors"), ("fedmatch", "safetensors")],
)
def test_a_damaged_checkpoint_is_done_without(method, name, straight, stopped):
    """One flipped bit in the newest checkpoint, round 4's: it continues from round 2, and sites still know that round.
    One method of each kind: it remembers at the sites, at the server, on the server's shelf."""
    there = straight(method)
    run = stopped(method, f"{method}-damaged-{name}")
    folder = there.federation.runs / run
    assert sorted(path.stem for path in folder.glob("checkpoint-*.json")) == ["checkpoint-000002", "checkpoint-000004"]
    file = folder / f"checkpoint-000004.{name}"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    before = (folder / "serve.log").read_text()
    equal(there, there.federation.run(there.file, run))
    message = (folder / "serve.log").read_text().removeprefix(before)
    assert "checkpoint-000004 is damaged" in message
    assert "going on after round 2" in message
    assert "going on after round 4" not in message


def test_what_names_the_run_is_refused_where_it_is_damaged_or_missing(stopped, straight):
    """With another number sites would take it for another run, and start without their memories."""
    there = straight("fedloke")
    run = stopped("fedloke", "fedloke-number")
    path = there.federation.runs / run / "number"
    held = path.read_bytes()
    flipped = bytes([held[0] ^ 1]) + held[1:]
    for data, text in ((flipped, "is damaged"), (held[:7], "is damaged"), (b"", "is damaged"), (None, "is missing")):
        path.unlink()
        if data is not None:
            path.write_bytes(data)
        with pytest.raises(UserError, match=rf"number {text}.*put it back from a backup"):
            there.federation.run(there.file, run)
        assert f"stopped: {path} {text}" in (path.parent / "serve.log").read_text()
        path.write_bytes(held)
    for downs in there.federation.folder.rglob("downs.json"):
        data = downs.read_bytes()
        downs.write_bytes(data.replace(b"params", b"paramz", 1))
        assert downs.read_bytes() != data
    client_app._open_cached_client.cache_clear()  # sites start anew
    equal(there, there.federation.run(there.file, run))


def test_missing_folder_at_a_restart_of_the_server_is_a_named_error(stopped, straight):
    """Without a word in the log `halfmoon serve` would start its program again and again."""
    there = straight("fedloke")
    run = stopped("fedloke", "fedloke-folder")
    tests = there.federation.folder / "test"
    tests.rename(tests.with_name("gone"))
    try:
        with pytest.raises(UserError, match="there is no such folder"):
            there.federation.run(there.file, run)
    finally:
        tests.with_name("gone").rename(tests)
    (line,) = (there.federation.runs / run / "serve.log").read_text().splitlines()[-1:]
    assert f"stopped: {tests}: there is no such folder" in line


@pytest.mark.parametrize(
    "method", ["fedloke", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("feddure", "semifed"))]
)
def test_restarting_a_site_for_each_message_does_not_change_the_result(method, straight):
    there = straight(method)
    there.federation.delete_client_memory()
    with call_before_each_message(client_app._open_cached_client.cache_clear):
        equal(there, there.federation.run(there.file, f"{method}-anew"))
