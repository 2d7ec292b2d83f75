"""What faults of real federations have shown (benchmarks/federation_faults.py), each in its smallest form."""

import errno
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import pytest
from fake_transport import FakeNode, FakeTransport, exchange_messages, make_acceptance, make_node
from text_log import TextLog

pytest.importorskip("flwr")

from flwr.common.constant import ErrorCode

from halfmoon.federation.protocol.messages import Offer, Refusal, read_message, write_message
from halfmoon.federation.server.connection import SiteReply
from halfmoon.federation.site.client import SiteClient
from halfmoon.federation.transport import processes, site_process
from halfmoon.federation.transport.contact import Address
from halfmoon.federation.transport.grid import PROBLEMS, describe_error
from halfmoon.federation.transport.site_process import SiteOptions
from halfmoon.storage.events import EventLog


def test_a_full_disk_does_not_keep_a_process_from_its_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """On a disk without a free block a file keeps those it has and gets no other one, so it is never emptied first.

    Each process writes its number into the lock: a site's that failed there could not even say that its disk is full.
    """
    lock = tmp_path / "worker.lock"
    processes.lock_until_exit(lock)
    honest = os.write

    def write(handle: int, data: bytes) -> int:
        if os.lseek(handle, 0, os.SEEK_CUR) + len(data) > os.fstat(handle).st_size:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return honest(handle, data)

    monkeypatch.setattr(os, "write", write)
    monkeypatch.setattr(os, "getpid", lambda: 7)
    monkeypatch.setattr(
        processes.atomic_io, "flock", lambda handle: None
    )  # the first one is still held, by this process
    processes.lock_until_exit(lock)
    assert int(lock.read_bytes()) == 7
    assert lock.read_bytes().isdigit()


class Brief(FakeTransport):
    """A transport on which a message lives as long as it was sent for, as in Flower: later replies are thrown away."""

    def send(self, mail: Mapping[int, bytes], seconds: float, asks: bool) -> Mapping[int, str]:
        message_ids = super().send(mail, seconds, asks)
        end = self.time + seconds
        self._pending = [
            each if each[0] <= end or each[1] not in message_ids.values() else (end, each[1], None)
            for each in self._pending
        ]
        return message_ids


def test_request_outlives_its_timeout_so_a_late_reply_is_logged():
    """North takes 130 s of 100. Where the request dies with its time, nobody hears that the site did reply, and that
    it only needs more time."""
    transport = Brief({7: make_node("north", 130.0), 31: make_node("west"), 99: make_node("south")})
    manager = transport.make_manager(timeout=100.0)
    manager.wait_for_sites(3, 60.0)
    assert exchange_messages(manager)["north"].data is None
    transport.fake_nodes[7] = make_node("north", 50.0)
    assert exchange_messages(manager, "north", purpose="round 2")["north"].data
    assert [text for text in transport.log if "too late" in text] == ["north answered round 1 30 s too late: discarded"]


def test_a_full_disk_is_named_in_the_log_where_the_system_names_no_file(tmp_path, monkeypatch):
    """What fails is the writing of an open file, of which the system knows no name; the server hears of no folder."""

    def full(self: SiteClient, offer: Offer) -> NoReturn:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(SiteClient, "_join", full)
    member = SiteClient.from_folder(tmp_path, "site-00", tmp_path / "home")
    text = read_message(member.reply_to(write_message(Offer(member.version, "{}"))), Refusal)
    assert text.reason == "its disk: No space left on device."
    assert f"not done: {tmp_path / 'home'}: No space left on device." in member.log.path.read_text()


def test_errors_of_flower_are_translated():
    """Every code that this Flower knows has words, but "unknown" and that of Flower's mods, which there are none
    of; whoever reads the log has the number to look for."""
    codes = {code for name, code in vars(ErrorCode).items() if name.isupper()}
    assert set(PROBLEMS) == codes - {ErrorCode.UNKNOWN, ErrorCode.MOD_FAILED_PRECONDITION}
    assert describe_error(ErrorCode.CLIENT_APP_CRASHED) == "its process was ended (error 8 of Flower)"
    assert describe_error(99) == "nobody knows why (error 99 of Flower)"


def test_site_with_an_unwritable_log_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(self: EventLog, name: str, text: str, **fields: Any) -> NoReturn:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def reach(address: Address, ca: Path | None) -> NoReturn:
        raise KeyboardInterrupt

    monkeypatch.setattr(EventLog, "record", full)
    monkeypatch.setattr(site_process, "check_server", reach)
    site = SiteOptions(
        Address("127.0.0.1", 9092), "site-00", tmp_path, images=3, labeled=2, state_folder=tmp_path / "home"
    )
    shown: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        site_process.join_federation(site, TextLog(shown))
    assert shown == ["site-00 (3 images, 2 labeled) joins 127.0.0.1:9092"]


class Patient(FakeTransport):
    """A transport whose post waits three minutes for what a node has announced and does not send, as in Flower."""

    def collect(self, message_ids: Sequence[str]) -> Sequence[SiteReply]:
        replies = super().collect(message_ids)
        if any(reply.data is None for reply in replies):
            self.sleep(180.0)
        return replies


def test_the_time_that_the_post_waits_is_no_absence_of_a_site():
    """North dies over sending its reply and is there again after 10 s. `absence` is 20 s; the post tells of the loss
    after 180, and from then on north is waited for, and asked again."""
    transport = Patient(
        {7: FakeNode(lambda: [(0.3, make_acceptance("north"))], lambda data: [(5.0, None)]), 31: make_node("west")}
    )
    transport.fake_nodes[99] = make_node("south")
    manager = transport.make_manager(timeout=1000.0)
    manager.wait_for_sites(3, 60.0)
    transport.schedule(transport.time + 15, lambda: transport.restart_node(7, 8, make_node("north", reply=b"again")))
    assert exchange_messages(manager, "north", "south")["north"].data == b"again"
