"""Who is there: names instead of nodes, restarts, late and lost replies, on a made-up transport with a made-up clock."""

import pytest
from fake_transport import (
    SITES,
    FakeNode,
    FakeTransport,
    exchange_messages,
    make_acceptance,
    make_node,
    make_refusal,
    make_silent_node,
    make_terms,
)

from halfmoon.core.errors import UserError
from halfmoon.federation.protocol.messages import (
    FAILED,
    NOT_JOINED,
    UNFIT,
    Offer,
    Refusal,
    RefusalError,
    read_message,
    write_message,
)
from halfmoon.federation.server.connection import SiteReply
from halfmoon.federation.server.sessions import MAX_RESENDS, RETRY_SECONDS, ClientManager
from halfmoon.federation.site.runtime import check_version


@pytest.fixture
def transport() -> FakeTransport:
    return FakeTransport({31: make_node("west"), 7: make_node("north"), 99: make_node("south")})


@pytest.fixture
def manager(transport: FakeTransport) -> ClientManager:
    made = transport.make_manager()
    made.wait_for_sites(3, 60.0)
    return made


def test_sites_are_known_by_name(transport: FakeTransport, manager: ClientManager) -> None:
    """Each site gets its request, and replies come in the order of the requests, not of the post."""
    assert manager.connected_sites == list(SITES)
    replies = manager.exchange({"west": b"w", "north": b"n"}, "round 1")
    assert replies == {"west": SiteReply(b"west:w"), "north": SiteReply(b"north:n")}
    assert list(replies) == ["west", "north"]
    assert sorted((number, data) for _, number, data in transport.requests) == [(7, b"n"), (31, b"w")]
    assert manager.acceptances["south"].labeled == 4
    assert set(transport.timeouts) == {100.0, 200.0}, "a request outlives its time: a late answer is named"


def test_restarted_site_is_queried_anew(transport: FakeTransport, manager: ClientManager) -> None:
    """North works for 50 s, restarts after 10 under another number and then works for 5 s; what its first process
    answers at last changes nothing, not in this exchange and not in the next."""
    transport.fake_nodes[7] = make_node("north", 50.0, b"old")
    transport.fake_nodes[99] = make_node("south", 70.0)
    transport.schedule(transport.time + 10, lambda: transport.restart_node(7, 8, make_node("north", 5.0, b"new")))
    start_time = transport.time
    replies = exchange_messages(manager)
    assert replies["north"].data == b"new"
    assert [number for _, number, _ in transport.requests].count(8) == 1
    assert transport.time - start_time > 70, "the first process has answered meanwhile"
    transport.fake_nodes[8] = make_node("north", 5.0, b"next")
    assert exchange_messages(manager)["north"].data == b"next"


def test_a_first_process_that_is_still_listed_does_not_come_back(
    transport: FakeTransport, manager: ClientManager
) -> None:
    """A dead node remains in the list for a minute. Its number is not asked again while its site is there as another."""
    transport.fake_nodes[7] = FakeNode(list, lambda data: [])
    transport.schedule(transport.time + 5, lambda: transport.fake_nodes.update({8: make_node("north", 70.0, b"new")}))
    before = len(transport.offers)
    assert exchange_messages(manager)["north"] == SiteReply(b"new")
    assert {number for _, number in transport.offers[before:]} == {8}
    assert [number for _, number, _ in transport.requests if number in (7, 8)] == [7, 8]


def test_two_live_nodes_with_one_name(transport: FakeTransport, manager: ClientManager) -> None:
    """The one that came last counts. The two do not take turns: work of several minutes would be started anew each time.
    Where the newer one goes, the older one is asked again, and is there."""
    transport.fake_nodes[7] = make_node("north", 80.0, b"first")
    transport.fake_nodes[8] = make_node("north", 80.0, b"second")
    replies = exchange_messages(manager, "north", "south", "west")
    assert replies["north"] == SiteReply(b"second")
    assert transport.count_logged("north is there again") == 1
    assert len([number for _, number, _ in transport.requests if number in (7, 8)]) <= 2
    del transport.fake_nodes[8]
    assert exchange_messages(manager, "north")["north"] == SiteReply(b"first")


def test_a_vanished_site_is_waited_for_and_given_up(transport: FakeTransport, manager: ClientManager) -> None:
    """`absence` is 20 s; a reply that would take a minute is not waited for, nor is the timeout of 100 s.
    It comes after 60 s all the same, 30 s after the site was given up."""
    transport.fake_nodes[7] = make_node("north", 60.0)
    start_time = transport.time
    transport.schedule(start_time + 10, lambda: transport.fake_nodes.pop(7))
    replies = exchange_messages(manager)
    assert replies["north"].data is None
    assert "not connected for 20 s" in replies["north"].problem
    assert 30 < transport.time - start_time < 35
    assert replies["south"].data == b"south:do"
    assert transport.count_logged("north is no longer connected") == 1
    assert manager.connected_sites == ["south", "west"]
    transport.sleep(40.0)
    exchange_messages(manager, "south")
    assert next(text for text in transport.log if "too late" in text) in {
        f"north answered round 1 {seconds} s too late: discarded" for seconds in (39, 40, 41)
    }


def test_site_reported_as_disconnected_by_the_transport(transport: FakeTransport, manager: ClientManager) -> None:
    """Where the post says that no reply will come, the site is waited for as long; then its absence is the reason."""
    transport.fake_nodes[7] = FakeNode(list, lambda data: [(10.0, None)])
    start_time = transport.time
    transport.schedule(start_time + 9, lambda: transport.fake_nodes.pop(7))
    replies = exchange_messages(manager)
    assert replies["north"] == SiteReply(None, "it was not connected for 20 s")
    assert 30 < transport.time - start_time < 32


def test_short_disconnection_loses_no_reply(transport: FakeTransport, manager: ClientManager) -> None:
    """A node that is out of the list for 10 s and back under its number continues: it is not asked a second time."""
    there = transport.fake_nodes[7] = make_node("north", 40.0)
    transport.schedule(transport.time + 10, lambda: transport.fake_nodes.pop(7))
    transport.schedule(transport.time + 20, lambda: transport.fake_nodes.update({7: there}))
    assert exchange_messages(manager)["north"] == SiteReply(b"north:do")
    assert [number for _, number, _ in transport.requests].count(7) == 1


def test_site_returning_within_its_absence_is_queried(transport: FakeTransport, manager: ClientManager) -> None:
    del transport.fake_nodes[7]
    transport.schedule(transport.time + 15, lambda: transport.fake_nodes.update({70: make_node("north")}))
    assert exchange_messages(manager)["north"] == SiteReply(b"north:do")


def test_late_reply_is_logged_and_discarded(transport: FakeTransport, manager: ClientManager) -> None:
    """North takes 130 s of 100; its reply comes in the third exchange and is no reply to anything there."""
    transport.fake_nodes[7] = make_node("north", 130.0, b"late")
    start_time = transport.time
    replies = exchange_messages(manager)
    assert replies["north"] == SiteReply(None, "it did not answer within 100 s")
    assert 100 < transport.time - start_time < 101
    assert transport.count_logged("waiting for north: ") == 1
    transport.fake_nodes[7] = make_node("north", 20.0, b"on time")
    assert exchange_messages(manager, "north", purpose="round 2")["north"].data == b"on time"
    assert transport.count_logged("too late") == 0
    assert exchange_messages(manager, "north", purpose="round 3")["north"].data == b"on time"
    assert [text for text in transport.log if "too late" in text] == ["north answered round 1 30 s too late: discarded"]


def test_how_late_is_counted_from_the_end_of_the_time(transport: FakeTransport, manager: ClientManager) -> None:
    """North's first process dies after 60 s, the second one is queried then and needs 50: it is 10 s too late, for the
    time of an exchange is one, however often a site is asked."""
    transport.fake_nodes[7] = make_node("north", 300.0)
    transport.schedule(transport.time + 59, lambda: transport.restart_node(7, 8, make_node("north", 50.0)))
    replies = exchange_messages(manager, purpose="round 1")
    assert replies["north"].data is None
    transport.fake_nodes[8] = make_node("north", 30.0)
    exchange_messages(manager, "north", purpose="round 2")
    (late,) = (text for text in transport.log if "too late" in text)
    assert late in {f"north answered round 1 {seconds} s too late: discarded" for seconds in (9, 10, 11, 12)}


def test_duplicate_reply_counts_once(transport: FakeTransport, manager: ClientManager) -> None:
    """Twice at once, and once more much later: there is one reply, and the next exchange gets its own."""
    transport.fake_nodes[7] = FakeNode(
        list, lambda data: [(1.0, b"a " + data), (1.0, b"b " + data), (9.0, b"c " + data)]
    )
    first = exchange_messages(manager, data=b"1")["north"].data
    assert first in (b"a 1", b"b 1")
    transport.sleep(20.0)
    assert exchange_messages(manager, data=b"2")["north"].data in (b"a 2", b"b 2")
    assert manager.connected_sites == list(SITES)


OTHER = make_terms(lr=0.5)


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (
            make_acceptance("north", federation=OTHER.hash),
            "a site that calls itself 'north' is none of this federation",
        ),
        (make_acceptance("east"), "a site that calls itself 'east' is none of this federation"),
        (make_acceptance("e" * 1000), f"a site that calls itself '{'e' * 64}' is none of this federation"),
        (b"", "a site sent a reply that cannot be read: a message is truncated"),
        (b"\x08" + b"\0" * 7 + b"no json!", "a site sent a reply that cannot be read: a message cannot be read"),
        (
            write_message(Offer("1", "2")),
            "a site sent a reply that cannot be read: an acceptance or refusal was expected, not an offer",
        ),
        (make_refusal(UNFIT, "it has no label."), "a site does not join: it has no label."),
        (make_refusal(UNFIT, "x" * 10_000), "a site does not join: " + "x" * 500),
    ],
)
def test_who_does_not_belong_is_named_once_and_not_used(reply: bytes, message: str) -> None:
    """Such a node is queried anew every half a minute; it is named once."""
    transport = FakeTransport({1: make_silent_node(reply), 2: make_node("south")})
    manager = transport.make_manager()
    manager.wait_for_sites(1, 60.0)
    transport.sleep(100.0)
    exchange_messages(manager, "south")
    transport.sleep(100.0)
    replies = exchange_messages(manager, "north", "south")
    assert len([number for _, number in transport.offers if number == 1]) >= 3
    assert manager.connected_sites == ["south"]
    assert replies["north"].data is None
    assert {number for _, number, _ in transport.requests} == {2}
    assert transport.count_logged(message) == 1
    assert len(transport.log) <= 4
    assert max(map(len, transport.log)) < 600


def test_different_version_is_logged_once_and_joins_after_an_upgrade() -> None:
    with pytest.raises(RefusalError) as refused:
        check_version("0.0.9", "0.1.0")
    transport = FakeTransport(
        {7: make_silent_node(make_refusal(refused.value.kind, str(refused.value))), 9: make_node("south")}
    )
    manager = transport.make_manager()
    manager.wait_for_sites(1, 300.0)
    transport.schedule(transport.time + 200, lambda: transport.restart_node(7, 8, make_node("north")))
    while transport.time < 250:
        exchange_messages(manager, "south")
        transport.sleep(5.0)
    sentence = "this site runs halfmoon 0.0.9, the server 0.1.0: this site has to upgrade to 0.1.0."
    assert [text for text in transport.log if "halfmoon" in text] == [f"a site does not join: {sentence}"]
    assert manager.connected_sites == ["north", "south"]


def test_refused_site_is_queried_anew_with_the_same_node_id() -> None:
    transport = FakeTransport({7: make_silent_node(make_refusal(FAILED, "its disk: No space left on device."))})
    manager = transport.make_manager()
    transport.schedule(10.0, lambda: transport.fake_nodes.update({7: make_node("north")}))
    manager.wait_for_sites(1, 300.0)
    assert manager.connected_sites == ["north"]
    assert RETRY_SECONDS < transport.time < RETRY_SECONDS + 25


def test_site_without_its_state_rejoins_and_is_queried(transport: FakeTransport, manager: ClientManager) -> None:
    known = []
    transport.fake_nodes[7] = FakeNode(
        lambda: [(0.3, known.append(1) or make_acceptance("north"))],
        lambda data: [(1.0, b"yes " + data if known else make_refusal(NOT_JOINED))],
    )
    offers = len(transport.offers)
    start_time = transport.time
    assert exchange_messages(manager)["north"] == SiteReply(b"yes do")
    assert [number for _, number in transport.offers[offers:]] == [7]
    assert len([number for _, number, _ in transport.requests if number == 7]) == 2
    assert transport.time - start_time < 6, "nobody waits half a minute for it"


@pytest.mark.parametrize(
    ("comes", "reason"),
    [(make_refusal(NOT_JOINED), "it had to join again"), (None, "it fell over")],
    ids=["unknown", "died"],
)
def test_retries_are_limited(
    transport: FakeTransport, manager: ClientManager, comes: bytes | None, reason: str
) -> None:
    """A site that never knows the federation, or dies of each request, gets it once and `RESENDS` times more."""
    transport.fake_nodes[7] = FakeNode(lambda: [(0.3, make_acceptance("north"))], lambda data: [(1.0, comes)])
    replies = exchange_messages(manager)
    assert replies["north"] == SiteReply(None, reason)
    assert len([number for _, number, _ in transport.requests if number == 7]) == 1 + MAX_RESENDS
    assert replies["south"] == SiteReply(b"south:do")
    transport.fake_nodes[7] = make_node("north")
    assert exchange_messages(manager)["north"] == SiteReply(b"north:do"), "the count is of one exchange"


def test_refusal_of_a_request_is_a_reply(transport: FakeTransport, manager: ClientManager) -> None:
    text = make_refusal(FAILED, "its disk is full")
    transport.fake_nodes[7] = make_node("north", reply=text)
    assert exchange_messages(manager)["north"] == SiteReply(text)
    assert read_message(text, Refusal).kind == FAILED
    assert len([number for _, number, _ in transport.requests if number == 7]) == 1


@pytest.mark.parametrize("what", [{"nodes"}, {"collect"}, {"nodes", "collect"}, {"nodes", "send", "collect"}])
def test_lost_connection_is_logged_and_its_end_too(transport, manager, what):
    """15 s without any way to the sites, in the middle of work that takes 5: said once, over once, and no site lost."""
    for number, name in ((7, "north"), (99, "south"), (31, "west")):
        transport.fake_nodes[number] = make_node(name, 5.0)
    message = len(transport.log)
    transport.schedule(transport.time + 1, lambda: transport.broken_calls.update(what))
    transport.schedule(transport.time + 16, lambda: transport.broken_calls.clear())
    start_time = transport.time
    replies = exchange_messages(manager)
    assert {name: reply.data for name, reply in replies.items()} == {name: f"{name}:do".encode() for name in SITES}
    if "collect" in what:
        assert 15 < transport.time - start_time < 20
    transport.sleep(5.0)
    exchange_messages(manager)
    assert transport.log[message:][:1] in ([], ["the connection to the sites is lost (no way); waiting for it"])
    if "nodes" in what and "collect" in what:
        assert len(transport.log) == message + 2
    assert transport.log[message + 1 : message + 2] in ([], ["the connection to the sites works again"])
    assert len(transport.requests) == 6


@pytest.mark.parametrize("what", [{"nodes", "send"}, {"nodes", "send", "collect"}])
def test_a_server_without_a_network_does_not_take_its_sites_for_absent(what: set[str]) -> None:
    """For 300 s nothing can be sent, and who is there cannot be seen: nobody is given up after the `absence` of 20."""
    transport = FakeTransport({31: make_node("west"), 7: make_node("north"), 99: make_node("south")})
    manager = transport.make_manager(timeout=1000.0)
    manager.wait_for_sites(3, 60.0)
    message = len(transport.log)
    transport.broken_calls.update(what)
    transport.schedule(transport.time + 300, lambda: transport.broken_calls.clear())
    assert [reply.data for reply in exchange_messages(manager).values()] == [f"{name}:do".encode() for name in SITES]
    assert transport.time > 300
    transport.sleep(3.0)
    exchange_messages(manager)
    lost, found = transport.log[message:]
    assert lost == "the connection to the sites is lost (no way); waiting for it"
    assert found == "the connection to the sites works again"


def test_blocked_transport_is_not_waited_for_forever(transport: FakeTransport, manager: ClientManager) -> None:
    """Who is there can be seen, but nothing can be sent: that is reported once, and over once."""
    message = len(transport.log)
    transport.broken_calls.add("send")
    replies = exchange_messages(manager)
    assert {reply.problem for reply in replies.values()} == {"it was not connected for 20 s"}
    transport.broken_calls.clear()
    assert exchange_messages(manager)["north"].data == b"north:do"
    assert len(transport.log) == message + 2


def test_gather_ignores_disconnected_sites(transport: FakeTransport, manager: ClientManager) -> None:
    """A round is repeated when its sites can be queried, not while the server has no network."""
    transport.broken_calls.update({"nodes", "send", "collect"})
    transport.schedule(transport.time + 200, lambda: transport.broken_calls.clear())
    transport.sleep(3.0)
    ask_anyway = manager.exchange({"north": b"do"}, "round 1")
    assert ask_anyway["north"].data is None
    manager.wait_for_sites(2, float("inf"), 0.0)
    assert 200 < transport.time < 205
    transport.broken_calls.update({"nodes"})
    transport.sleep(3.0)
    exchange_messages(manager)
    with pytest.raises(UserError, match=r"^0 of 2 sites that are needed"):
        manager.wait_for_sites(2, 10.0, 0.0)


def test_a_request_that_cannot_be_sent_is_sent_later(transport: FakeTransport, manager: ClientManager) -> None:
    transport.broken_calls.add("send")
    transport.full_nodes.add(7)
    transport.schedule(transport.time + 5, lambda: transport.broken_calls.clear())
    transport.schedule(transport.time + 10, lambda: transport.full_nodes.clear())
    assert exchange_messages(manager)["north"] == SiteReply(b"north:do")
    assert len(transport.requests) == 3


def test_a_post_that_takes_no_mail_is_not_waited_for_without_end(
    transport: FakeTransport, manager: ClientManager
) -> None:
    transport.full_nodes.add(7)
    replies = exchange_messages(manager)
    assert replies["north"].data is None
    assert replies["south"].data == b"south:do"


def test_gather_returns_when_all_are_there(transport: FakeTransport) -> None:
    transport.make_manager().wait_for_sites(1, 60.0)
    assert transport.time < 1.0


def test_gather_waits_for_those_who_come_soon() -> None:
    """With enough sites, the others have `absence` seconds: 20."""
    transport = FakeTransport({1: make_node("north"), 2: make_node("south")})
    transport.schedule(15.0, lambda: transport.fake_nodes.update({3: make_node("west")}))
    manager = transport.make_manager()
    manager.wait_for_sites(1, 600.0)
    assert manager.connected_sites == list(SITES)
    assert 15 < transport.time < 17
    other = FakeTransport({1: make_node("north")})
    manager = other.make_manager()
    manager.wait_for_sites(1, 600.0)
    assert manager.connected_sites == ["north"]
    assert 20 < other.time < 21


def test_gather_reports_waiting_and_fails_with_the_reasons() -> None:
    """In 100 s it reports it at 0, 30, 60 and 90 s, and when one comes.

    The sentence at the end has what the refused ones said."""
    transport = FakeTransport({1: make_node("north"), 2: make_silent_node(make_refusal(UNFIT, "it has no label."))})
    with pytest.raises(UserError, match=r"^1 of 3 sites that are needed have joined \(a site does not join: it has no"):
        transport.make_manager().wait_for_sites(3, 100.0)
    assert 100 < transport.time < 101
    waits = [text for text in transport.log if text.startswith("waiting for sites")]
    assert len(waits) == 5
    assert waits[-1] == "waiting for sites: 1 of 3 are there, 3 needed; missing: south, west"


def test_gather_waits_for_a_post_that_is_not_there_yet() -> None:
    transport = FakeTransport(
        {1: make_node("north"), 2: make_node("south"), 3: make_node("west")}, broken_calls={"nodes", "collect"}
    )
    transport.schedule(50.0, lambda: transport.broken_calls.clear())
    transport.make_manager().wait_for_sites(3, 100.0)
    assert 50 < transport.time < 55
    assert transport.count_logged("is lost") == transport.count_logged("works again") == 1


def test_a_site_that_takes_long_to_join_is_there_once() -> None:
    """It decodes its images for 200 s before it replies; every offer that it got meanwhile gets its reply then."""
    transport = FakeTransport()

    def slowly() -> list[tuple[float, bytes]]:
        return [(max(0.3, 200.0 - transport.time), make_acceptance("north"))]

    transport.fake_nodes[1] = FakeNode(slowly, lambda data: [(1.0, b"done")])
    manager = transport.make_manager()
    manager.wait_for_sites(1, 600.0)
    for _ in range(20):
        assert exchange_messages(manager, "north")["north"].data == b"done"
        transport.sleep(5.0)
    assert transport.count_logged("north is there") == 1


def test_new_counts_of_a_site_are_taken_in(transport: FakeTransport, manager: ClientManager) -> None:
    there = FakeNode(lambda: [(0.3, make_acceptance("north", labeled=40))], lambda data: [(1.0, b"more")])
    transport.restart_node(7, 8, there)
    transport.sleep(3.0)
    exchange_messages(manager)
    assert manager.acceptances["north"].labeled == 40
    assert transport.count_logged("40 images with a label") == 1


def test_disconnected_site_remains_registered(transport: FakeTransport, manager: ClientManager) -> None:
    """What a site said when it joined is what its replies are evaluated by, and one may come after it is gone."""
    del transport.fake_nodes[7]
    transport.sleep(3.0)
    exchange_messages(manager, "south")
    assert manager.connected_sites == ["south", "west"]
    assert manager.acceptances["north"].labeled == 4


@pytest.mark.parametrize(
    "spoiled", [b"", make_acceptance("north")[:40], b"\xff" * 5_000], ids=["empty", "cut", "noise"]
)
def test_what_is_no_message_is_handed_on(transport: FakeTransport, manager: ClientManager, spoiled: bytes) -> None:
    """The roster does not judge replies: who asked does, and counts them."""
    transport.fake_nodes[7] = make_node("north", reply=spoiled)
    assert exchange_messages(manager)["north"] == SiteReply(spoiled)
