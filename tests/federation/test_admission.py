"""Sites that are known by their keys: who may join under which name, and what is lost when a process restarts."""

import subprocess
import sys
import time
import tomllib
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from fake_transport import SITES, FakeNode, FakeTransport, exchange_messages, make_acceptance, make_node
from text_log import TextLog

pytest.importorskip("flwr")

from halfmoon.cli import main as cli
from halfmoon.core.errors import UserError
from halfmoon.federation.server.connection import NodeIdentity, SiteReply
from halfmoon.federation.server.sessions import NO_KEY, ClientManager
from halfmoon.federation.site import consent
from halfmoon.federation.transport import admission, site_process
from halfmoon.federation.transport.admission import Admission
from halfmoon.federation.transport.contact import Address
from halfmoon.federation.transport.grid import read_key_owners
from halfmoon.federation.transport.internals import MESSAGE_RECEIVED, REPLY_SENT
from halfmoon.federation.transport.launch import ServerOptions, render_run_config, superlink_arguments
from halfmoon.federation.transport.processes import SUPERNODE, ProcessFolder
from halfmoon.sites.keys import Access, make
from halfmoon.storage.events import EventTail


@pytest.fixture
def transport() -> FakeTransport:
    made = FakeTransport({31: make_node("west"), 7: make_node("north"), 99: make_node("south")})
    made.identities = {31: NodeIdentity("west", "1"), 7: NodeIdentity("north", "1"), 99: NodeIdentity("south", "1")}
    return made


@pytest.fixture
def manager(transport: FakeTransport) -> ClientManager:
    made = transport.make_manager()
    made.wait_for_sites(3, 60.0)
    return made


def restart(transport: FakeTransport, number: int, there: FakeNode) -> None:
    """Let a site restart under the number that its key has; nobody tells of what its first process had got."""
    assert transport.identities is not None
    transport.fake_nodes[number] = there
    transport.identities[number] = NodeIdentity(transport.identities[number].name, "2")
    transport._pending.clear()


def test_restarted_site_with_the_same_node_id_is_queried_anew(transport: FakeTransport, manager: ClientManager):
    """North restarts after 10 of 1000 s, in less time than a look takes: what it was queried is sent once more."""
    transport.fake_nodes[7] = FakeNode(lambda: [(0.3, make_acceptance("north"))], lambda data: [])
    transport.schedule(transport.time + 10, lambda: restart(transport, 7, make_node("north", 5.0, b"new")))
    patient = transport.make_manager(timeout=1000.0)
    patient.wait_for_sites(3, 60.0)
    start_time = transport.time
    assert exchange_messages(patient, "north")["north"] == SiteReply(b"new")
    assert transport.time - start_time < 20
    offers = [time for time, number in transport.offers if number == 7 and time > start_time]
    assert len(offers) == 1, "it may say something else now, so it is asked to join once more"


def test_site_with_the_same_process_is_queried_once(transport: FakeTransport, manager: ClientManager):
    transport.fake_nodes[7] = make_node("north", 50.0)
    assert exchange_messages(manager)["north"].data
    assert len(transport.requests) == 3


def test_a_name_is_bound_to_its_key(transport: FakeTransport):
    """The node with north's key says that it is south: it has no part, under neither name, and the log states why."""
    transport.fake_nodes[7] = make_node("south", reply=b"stolen")
    del transport.fake_nodes[99]
    manager = transport.make_manager()
    manager.wait_for_sites(1, 60.0, 5.0)
    assert manager.connected_sites == ["west"]
    assert "south" not in manager.acceptances
    message = "the site with the key of north calls itself 'south': it does not join under a name that is not its key's"
    assert transport.log.count(message) == 1
    assert exchange_messages(manager, "south")["south"].data is None
    assert not [number for _, number, _ in transport.requests if number == 7]


def test_site_name_belongs_to_its_first_key(transport: FakeTransport, manager: ClientManager):
    """Without keys who comes last under a name has it; with keys the one with the key has."""
    transport.fake_nodes[8] = make_node("south", reply=b"stolen")
    transport.identities[8] = NodeIdentity("east")
    transport.sleep(10.0)
    assert exchange_messages(manager)["south"].data == b"south:do"
    assert transport.count_logged("calls itself 'south'") == 1
    transport.identities = None
    assert exchange_messages(transport.make_manager(), "south")["south"].data is not None


def test_node_without_a_key_gets_no_offer(transport: FakeTransport, manager: ClientManager):
    transport.fake_nodes[8] = make_node("south", reply=b"stolen")
    transport.sleep(10.0)
    assert exchange_messages(manager)["south"].data == b"south:do"
    assert 8 not in [number for _, number in transport.offers]
    assert transport.count_logged("node 8 has no key of a site that may come in: it is not asked to join") == 1


def test_reply_of_a_removed_site_is_ignored(transport: FakeTransport, manager: ClientManager):
    """North's key is removed while it works, and in the same instant its reply comes: nobody waits for it any more."""
    keys = dict(transport.identities or {})
    transport.fake_nodes[7] = make_node("north", 5.0)
    transport.fake_nodes[31] = make_node("west", 8.0)

    def remove() -> None:
        del transport.identities[7]

    transport.schedule(transport.time + 4.95, remove)
    start_time = transport.time
    replies = exchange_messages(manager)
    assert replies["north"] == SiteReply(None, NO_KEY)
    assert replies["west"].data == b"west:do"
    assert transport.time - start_time < 9, "absence is 20 s"
    start_time = transport.time
    assert exchange_messages(manager)["north"] == SiteReply(None, NO_KEY)
    assert transport.time - start_time < 9, "a site without a key is not waited for"
    assert manager.connected_sites == ["south", "west"]
    transport.identities = keys
    transport.sleep(40.0)
    assert exchange_messages(manager)["north"].data == b"north:do", "one that may come in again does"


def test_a_site_with_a_new_key_has_its_name(transport: FakeTransport, manager: ClientManager):
    """North's key is replaced: its old node is forgotten, and the one with the new key is north."""
    transport.identities = {
        **{number: who for number, who in transport.identities.items() if number != 7},
        8: NodeIdentity("north", "1"),
    }
    transport.fake_nodes[8] = make_node("north", reply=b"new")
    transport.fake_nodes[7] = make_node("north", reply=b"old")
    assert exchange_messages(manager)["north"].data == b"new"
    assert list(manager.connected_sites) == list(SITES)


class FakeRegistry:
    """A registry as Flower has one: a key that was taken out never comes in again."""

    def __init__(self) -> None:
        self.held: dict[int, admission.Node] = {}
        self.gone: set[bytes] = set()
        self.calls: list[str] = []
        self.away = False

    def nodes(self) -> list[admission.Node]:
        if self.away:
            raise ConnectionError("nobody there")
        return list(self.held.values())

    def register(self, key: bytes, name: str) -> int:
        if key in self.gone or key in {each.key for each in self.held.values()}:
            raise ValueError("HTTP 409: in use")
        number = 2**63 + len(self.calls)
        self.calls.append(f"+{name}")
        self.held[number] = admission.Node(number, key, "")
        return number

    def unregister(self, number: int) -> None:
        self.calls.append(f"-{number}")
        self.gone.add(self.held.pop(number).key)


@dataclass
class Door:
    """An access folder for north and south, the admission that looks at it, and all that was reported."""

    folder: Path
    file: Path
    registry: FakeRegistry = field(default_factory=FakeRegistry)
    messages: list[str] = field(default_factory=list)
    time: float = 0.0

    def open(self, names: Sequence[str] = ("north", "south")) -> Admission:
        made = Admission(
            Access.open(self.folder), self.registry, self.file, names, TextLog(self.messages), lambda: self.time
        )
        made.open()
        return made

    def look(self, made: Admission, after: float = admission.POLL_SECONDS) -> None:
        self.time += after
        made.poll()

    def key_owners(self) -> dict[str, int]:
        return {holder.name: number for number, holder in read_key_owners(self.file).items()}

    def key(self, name: str) -> bytes:
        """Return a site's public key as Flower holds it, converted by OpenSSH's own program."""
        line = self.folder / "sites" / name / f"{name}.pub"
        return subprocess.run(["ssh-keygen", "-e", "-m", "PKCS8", "-f", line], capture_output=True, check=True).stdout


@pytest.fixture
def door(tmp_path: Path) -> Door:
    make.create_keys(tmp_path / "access", ["north", "south"], port=7001, listen=7002)
    return Door(tmp_path / "access", tmp_path / "keys.json")


def test_every_site_of_the_folder_is_registered_once_and_its_number_written_down(door: Door):
    """Another start, of the server or of everything, registers nothing anew; numbers of 64 bits come through."""
    door.open()
    assert sorted(door.registry.calls) == ["+north", "+south"]
    assert {number: who.name for number, who in read_key_owners(door.file).items()} == {
        number: next(name for name in ("north", "south") if door.key(name) == node.key)
        for number, node in door.registry.held.items()
    }
    door.open()
    door.file.unlink()
    door.open()
    assert len(door.registry.calls) == 2
    assert sorted(door.key_owners()) == ["north", "south"]
    assert door.messages == [f"{name} may come in: its key is registered" for name in ("north", "south")]


def test_removed_site_leaves_the_file_before_flower_is_notified(door: Door, monkeypatch: pytest.MonkeyPatch):
    """Its replies count no more from the moment at which the file is written, whatever Flower does then."""
    made = door.open()
    number = door.key_owners()["north"]
    honest = door.registry.unregister
    seen: list[list[str]] = []
    monkeypatch.setattr(
        door.registry, "unregister", lambda which: (seen.append(sorted(door.key_owners())), honest(which))
    )
    make.remove_site(door.folder, "north")
    door.look(made)
    assert seen == [["south"]]
    assert door.registry.calls[-1] == f"-{number}"
    assert door.messages[-1] == "north may not come in any more: its key is removed"
    calls = len(door.registry.calls)
    door.look(made)
    assert len(door.registry.calls) == calls, "once"


def test_new_and_replaced_keys_come_in_while_the_server_runs(door: Door):
    made = door.open()
    door.look(made)
    before = door.key_owners()
    make.add_site(door.folder, "west")
    make.replace_site_key(door.folder, "north")
    door.look(made, 0.1)
    assert door.key_owners() == before, "it is not time yet"
    door.look(made)
    assert sorted(door.key_owners()) == ["north", "south", "west"]
    assert door.key_owners()["north"] != before["north"]
    assert door.key_owners()["south"] == before["south"]
    assert door.key("north") in {node.key for node in door.registry.held.values()}
    assert before["north"] not in door.registry.held
    assert door.messages[-3] == "the old key of north is removed"


def test_node_registered_by_another_party_is_removed(door: Door):
    """Whoever has an account on the server's machine reaches Flower's Control API; it is seen within seconds."""
    made = door.open()
    door.registry.held[5] = admission.Node(5, b"stranger", "")
    door.look(made)
    assert 5 not in door.registry.held
    assert door.messages[-1] == "node 5 was registered by others: its key is removed"


def test_when_a_process_connected_is_written_down(door: Door):
    made = door.open()
    number = door.key_owners()["north"]
    door.registry.held[number] = door.registry.held[number]._replace(since="2026-11-21T20:28:38+00:00")
    door.look(made)
    assert read_key_owners(door.file)[number] == NodeIdentity("north", "2026-11-21T20:28:38+00:00")


def test_failure_is_logged_once_and_retried(door: Door):
    """A SuperLink that is away, and a folder that cannot be read, change nothing and end nothing."""
    made = door.open()
    before = door.key_owners()
    door.registry.away = True
    door.look(made)
    door.registry.away = False
    record = door.folder / "access.json"
    text = record.read_bytes()
    record.write_bytes(b"{")
    door.look(made)
    door.look(made)
    assert door.key_owners() == before
    assert sum("the admitted sites are not changed" in message for message in door.messages) == 1
    record.write_bytes(text)
    make.remove_site(door.folder, "south")
    door.look(made)
    assert list(door.key_owners()) == ["north"]


def test_a_folder_that_vanishes_does_not_end_the_server(door: Door):
    made = door.open()
    door.folder.rename(door.folder.with_name("moved"))
    door.look(made, 4000.0)
    assert sorted(door.key_owners()) == ["north", "south"]
    assert [message for message in door.messages if "the admitted sites are not changed" in message]


def test_a_key_that_this_run_has_put_out_needs_a_new_one(door: Door):
    door.registry.gone.add(door.key("north"))
    door.open()
    assert list(door.key_owners()) == ["south"]
    (message,) = (message for message in door.messages if "north" in message)
    assert message.startswith("north cannot come in: its key was removed from this run earlier")
    assert message.endswith(f"halfmoon federation rotate {door.folder} --site north")


def test_sites_of_the_federation_without_a_key_are_named(door: Door):
    door.open(("north", "south", "west", "east"))
    assert f"west, east of this federation cannot come in: {door.folder} has no key of theirs" in door.messages


def test_expiring_certificate_is_logged_at_the_start_and_daily(tmp_path: Path):
    long_ago = datetime.now(UTC) - timedelta(days=340)
    make.create_keys(tmp_path / "access", ["north"], days=365, now=long_ago)
    door = Door(tmp_path / "access", tmp_path / "keys.json")
    made = door.open(["north"])
    (message,) = (message for message in door.messages if "runs out" in message)
    assert message.startswith("the server's certificate runs out in 2")
    door.look(made, 4000.0)
    assert sum("runs out" in message for message in door.messages) == 1


def test_unreachable_superlink_at_the_start_stops_the_server(door: Door):
    door.registry.away = True
    with pytest.raises(UserError, match="cannot be registered with the SuperLink: nobody there"):
        door.open()


def test_damaged_access_file_admits_no_site(tmp_path: Path):
    assert read_key_owners(tmp_path / "keys.json") == {}
    (tmp_path / "keys.json").write_text('{"nodes": {"1": ')
    assert read_key_owners(tmp_path / "keys.json") == {}


def test_guarded_server_listens_on_loopback_and_requires_keys(door: Door, tmp_path: Path):
    server = ServerOptions.with_access(tmp_path / "f.toml", tmp_path / "run", Access.open(door.folder), ["north"], 5)
    message = superlink_arguments(server)
    assert message[:4] == ["--host", "127.0.0.1", "--port", "7001"]
    assert message[-1] == "--enable-supernode-auth"
    assert message[message.index("--ssl-certfile") + 1] == str(door.folder / "server" / "server.crt")
    config = tomllib.loads(render_run_config(server))
    assert config["keys"] == str(tmp_path / "run" / "flower" / "keys.json")
    plain = ServerOptions(tmp_path / "f.toml", tmp_path / "run")
    assert "keys" not in render_run_config(plain)
    assert "--enable-supernode-auth" not in superlink_arguments(plain)


@pytest.mark.parametrize(
    ("extra_arguments", "messages"),
    [
        (["--host", "0.0.0.0"], "--access and --host contradict each other"),
        (["--ca", "ca.crt"], "--access and --ca contradict each other"),
        (["--certificate", "a"], "--access and --certificate contradict each other"),
        (["--key", "a"], "--access and --key contradict each other"),
        (["--insecure"], "--access and --insecure contradict each other"),
        (["--port", "9099"], "--port is 9099, but the proxy of"),
        (["--access", "nowhere"], "nowhere"),
    ],
)
def test_contradictions_are_refused_in_a_sentence(door, tmp_path, capsys, extra_arguments, messages):
    site_options = 'name = "w"\nsites = ["north"]\nclasses = ["a", "b"]\nimage = [1, 8, 8]\n'
    (tmp_path / "f.toml").write_text(f'method = "fedavg"\nnetwork = "small"\n[federation]\n{site_options}')
    command = ["serve", str(tmp_path / "f.toml"), "--run-dir", str(tmp_path / "run"), "--access", str(door.folder)]
    assert cli.main([*command, *extra_arguments]) == 2
    message = capsys.readouterr().err
    assert messages in message
    assert len(message.splitlines()) == 1
    assert not (tmp_path / "run").exists()


@contextmanager
def supernode_saying(messages, folder, monkeypatch, shown, seconds=600.0):
    """Give a site whose node says something and ends after some seconds, and the processes that it starts."""
    started: list[subprocess.Popen[bytes]] = []

    def start(self: ProcessFolder, script: str, arguments: Sequence[str]) -> subprocess.Popen[bytes]:
        assert script == SUPERNODE
        code = f"import time; print({messages!r}, flush=True); time.sleep({seconds})"
        with self.log(script).open("ab") as log:
            started.append(subprocess.Popen([sys.executable, "-c", code], stdout=log))
        return started[-1]

    monkeypatch.setattr(ProcessFolder, "start", start)
    monkeypatch.setattr(site_process, "RECONNECT_SECONDS", 0.01)
    site = site_process.SiteOptions(Address("127.0.0.1", 9092), "site-00", folder, 3, 2, folder / "home", terms="any")
    site.processes.prepare()
    try:
        yield site_process._SiteNode(site, EventTail(site.state_folder), TextLog(shown), None), started
    finally:
        for process in started:
            process.kill()
            process.wait()


def test_stopped_supernode_is_restarted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A reply 500 of the server ends a node, and the site joins again.
    Seen where a site with a key sent 300 MB to a server whose disk was busy: the other sites never came back."""
    output = "ERROR :     Server error '500 Internal Server Error' for url 'https://localhost/v1/fleet/pull-messages'"
    shown: list[str] = []
    with supernode_saying(output, tmp_path, monkeypatch, shown, seconds=0.1) as (member, _):
        member._run_node()
        assert "the connection ended: the server's Flower failed over a call" in shown[-1]


def test_a_site_that_waited_gives_its_server_time_to_know_its_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """It asked before its key was registered, and told its people that the server does not let it in."""
    shown: list[str] = []
    with supernode_saying("ERROR: [2004] unknown key", tmp_path, monkeypatch, shown, seconds=0.1) as (member, _):
        member.lost = True
        member._connected()
        member._run_node()
        member._show()
        assert "answers" in shown[-1]
        monkeypatch.setattr(site_process, "ADMISSION_SECONDS", -1.0)
        member.lost = True
        member._connected()
        member._run_node()
        assert "the connection ended: the server does not let this site's key in" in shown[-1]


@pytest.mark.parametrize(
    ("lines", "lingers"),
    [
        ([MESSAGE_RECEIVED, REPLY_SENT], False),
        ([MESSAGE_RECEIVED, REPLY_SENT, MESSAGE_RECEIVED], True),
        ([MESSAGE_RECEIVED], True),
    ],
)
def test_site_exits_after_its_last_reply_is_sent(tmp_path, monkeypatch, lines, lingers):
    """A site whose part is over waits for its node to send what it replies, longer where it does not report it."""
    monkeypatch.setattr(site_process, "COMPLETE_SECONDS", 600.0 if lingers else 0.2)
    monkeypatch.setattr(site_process, "INCOMPLETE_SECONDS", 0.2 if lingers else 600.0)
    monkeypatch.setattr(site_process, "POLL_SECONDS", 0.02)
    with supernode_saying("\n".join(lines), tmp_path, monkeypatch, []) as (member, _):
        consent.save_end(member.site.state_folder, 0, "finished: the model is here")
        start_time = time.monotonic()
        with pytest.raises(site_process.SiteFinished, match="finished: the model is here"):
            member._run_node()
        assert 0.2 < time.monotonic() - start_time < 300
