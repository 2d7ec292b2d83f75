"""Who is there: names instead of nodes, restarts, late and lost answers, on a made-up street with a made-up clock."""

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
from halfmoon.federation.server.sessions import MAX_RESENDS, RETRY_SECONDS, ClientManager, SiteResponse
from halfmoon.federation.site.runtime import check_version


@pytest.fixture
def street() -> FakeTransport:
    return FakeTransport({31: make_node("west"), 7: make_node("north"), 99: make_node("south")})


@pytest.fixture
def manager(street: FakeTransport) -> ClientManager:
    made = street.manager()
    made.wait_for_sites(3, 60.0)
    return made


def test_sites_are_known_by_name(street: FakeTransport, manager: ClientManager) -> None:
    """Each site gets its own request, and answers come in the order of the requests, not of the post."""
    assert manager.connected_sites == list(SITES)
    answers = manager.exchange({"west": b"w", "north": b"n"}, "round 1")
    assert answers == {"west": SiteResponse(b"west:w"), "north": SiteResponse(b"north:n")}
    assert list(answers) == ["west", "north"]
    assert sorted((number, data) for _, number, data in street.requests) == [(7, b"n"), (31, b"w")]
    assert manager.acceptances["south"].labeled == 4
    assert set(street.seconds) == {100.0, 200.0}, "a request outlives its time: a late answer is named"


def test_a_site_that_starts_again_is_asked_again(street: FakeTransport, manager: ClientManager) -> None:
    """North works for 50 s, starts again after 10 under another number and then works for 5 s; what its first process
    answers at last changes nothing, not in this exchange and not in the next."""
    street.nodes_[7] = make_node("north", 50.0, b"old")
    street.nodes_[99] = make_node("south", 70.0)
    street.at(street.time + 10, lambda: street.move(7, 8, make_node("north", 5.0, b"new")))
    began = street.time
    answers = exchange_messages(manager)
    assert answers["north"].data == b"new"
    assert [number for _, number, _ in street.requests].count(8) == 1
    assert street.time - began > 70, "the first process has answered meanwhile"
    street.nodes_[8] = make_node("north", 5.0, b"next")
    assert exchange_messages(manager)["north"].data == b"next"


def test_a_first_process_that_is_still_listed_does_not_come_back(street: FakeTransport, manager: ClientManager) -> None:
    """A dead node stays in the list for a minute. Its number is not asked again while its site is there as another."""
    street.nodes_[7] = FakeNode(list, lambda data: [])
    street.at(street.time + 5, lambda: street.nodes_.update({8: make_node("north", 70.0, b"new")}))
    before = len(street.offers)
    assert exchange_messages(manager)["north"] == SiteResponse(b"new")
    assert {number for _, number in street.offers[before:]} == {8}
    assert [number for _, number, _ in street.requests if number in (7, 8)] == [7, 8]


def test_two_live_nodes_with_one_name(street: FakeTransport, manager: ClientManager) -> None:
    """The one that came last counts. The two do not take turns: work of several minutes would be begun anew each time.
    Where the newer one goes, the older one is asked again, and is there."""
    street.nodes_[7] = make_node("north", 80.0, b"first")
    street.nodes_[8] = make_node("north", 80.0, b"second")
    answers = exchange_messages(manager, "north", "south", "west")
    assert answers["north"] == SiteResponse(b"second")
    assert street.heard("north is there again") == 1
    assert len([number for _, number, _ in street.requests if number in (7, 8)]) <= 2
    del street.nodes_[8]
    assert exchange_messages(manager, "north")["north"] == SiteResponse(b"first")


def test_a_vanished_site_is_waited_for_and_given_up(street: FakeTransport, manager: ClientManager) -> None:
    """`absence` is 20 s; an answer that would take a minute is not waited for, nor is the timeout of 100 s.
    It comes after 60 s all the same, 30 s after the site was given up."""
    street.nodes_[7] = make_node("north", 60.0)
    began = street.time
    street.at(began + 10, lambda: street.nodes_.pop(7))
    answers = exchange_messages(manager)
    assert answers["north"].data is None
    assert "not connected for 20 s" in answers["north"].reason
    assert 30 < street.time - began < 35
    assert answers["south"].data == b"south:do"
    assert street.heard("north is no longer connected") == 1
    assert manager.connected_sites == ["south", "west"]
    street.sleep(40.0)
    exchange_messages(manager, "south")
    assert next(said for said in street.said if "too late" in said) in {
        f"north answered round 1 {seconds} s too late: discarded" for seconds in (39, 40, 41)
    }


def test_a_vanished_site_of_which_the_post_tells(street: FakeTransport, manager: ClientManager) -> None:
    """Where the post says that no answer will come, the site is waited for as long; then its absence is the reason."""
    street.nodes_[7] = FakeNode(list, lambda data: [(10.0, None)])
    began = street.time
    street.at(began + 9, lambda: street.nodes_.pop(7))
    answers = exchange_messages(manager)
    assert answers["north"] == SiteResponse(None, "it was not connected for 20 s")
    assert 30 < street.time - began < 32


def test_a_short_break_costs_nothing(street: FakeTransport, manager: ClientManager) -> None:
    """A node that is out of the list for 10 s and back under its number goes on: it is not asked a second time."""
    there = street.nodes_[7] = make_node("north", 40.0)
    street.at(street.time + 10, lambda: street.nodes_.pop(7))
    street.at(street.time + 20, lambda: street.nodes_.update({7: there}))
    assert exchange_messages(manager)["north"] == SiteResponse(b"north:do")
    assert [number for _, number, _ in street.requests].count(7) == 1


def test_a_site_that_comes_back_within_its_absence_is_asked(street: FakeTransport, manager: ClientManager) -> None:
    del street.nodes_[7]
    street.at(street.time + 15, lambda: street.nodes_.update({70: make_node("north")}))
    assert exchange_messages(manager)["north"] == SiteResponse(b"north:do")


def test_a_late_answer_is_named_and_discarded(street: FakeTransport, manager: ClientManager) -> None:
    """North takes 130 s of 100; its answer comes in the third exchange and is no answer to anything there."""
    street.nodes_[7] = make_node("north", 130.0, b"late")
    began = street.time
    answers = exchange_messages(manager)
    assert answers["north"] == SiteResponse(None, "it did not answer within 100 s")
    assert 100 < street.time - began < 101
    assert street.heard("waiting for north: ") == 1
    street.nodes_[7] = make_node("north", 20.0, b"on time")
    assert exchange_messages(manager, "north", what="round 2")["north"].data == b"on time"
    assert street.heard("too late") == 0
    assert exchange_messages(manager, "north", what="round 3")["north"].data == b"on time"
    assert [said for said in street.said if "too late" in said] == ["north answered round 1 30 s too late: discarded"]


def test_how_late_is_counted_from_the_end_of_the_time(street: FakeTransport, manager: ClientManager) -> None:
    """North's first process dies after 60 s, the second one is asked then and needs 50: it is 10 s too late, for the
    time of an exchange is one, however often a site is asked."""
    street.nodes_[7] = make_node("north", 300.0)
    street.at(street.time + 59, lambda: street.move(7, 8, make_node("north", 50.0)))
    answers = exchange_messages(manager, what="round 1")
    assert answers["north"].data is None
    street.nodes_[8] = make_node("north", 30.0)
    exchange_messages(manager, "north", what="round 2")
    (late,) = (said for said in street.said if "too late" in said)
    assert late in {f"north answered round 1 {seconds} s too late: discarded" for seconds in (9, 10, 11, 12)}


def test_an_answer_that_comes_twice_counts_once(street: FakeTransport, manager: ClientManager) -> None:
    """Twice at once, and once more much later: there is one answer, and the next exchange gets its own."""
    street.nodes_[7] = FakeNode(list, lambda data: [(1.0, b"a " + data), (1.0, b"b " + data), (9.0, b"c " + data)])
    first = exchange_messages(manager, words=b"1")["north"].data
    assert first in (b"a 1", b"b 1")
    street.sleep(20.0)
    assert exchange_messages(manager, words=b"2")["north"].data in (b"a 2", b"b 2")
    assert manager.connected_sites == list(SITES)


OTHER = make_terms(lr=0.5)


@pytest.mark.parametrize(
    ("answer", "said"),
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
def test_who_does_not_belong_is_named_once_and_not_used(answer: bytes, said: str) -> None:
    """Such a node is asked again every half a minute; it is named once."""
    street = FakeTransport({1: make_silent_node(answer), 2: make_node("south")})
    manager = street.manager()
    manager.wait_for_sites(1, 60.0)
    street.sleep(100.0)
    exchange_messages(manager, "south")
    street.sleep(100.0)
    answers = exchange_messages(manager, "north", "south")
    assert len([number for _, number in street.offers if number == 1]) >= 3
    assert manager.connected_sites == ["south"]
    assert answers["north"].data is None
    assert {number for _, number, _ in street.requests} == {2}
    assert street.heard(said) == 1
    assert len(street.said) <= 4
    assert max(map(len, street.said)) < 600


def test_another_version_is_said_once_with_its_sentence_and_joins_when_it_has_upgraded() -> None:
    with pytest.raises(RefusalError) as refused:
        check_version("0.0.9", "0.1.0")
    street = FakeTransport(
        {7: make_silent_node(make_refusal(refused.value.kind, str(refused.value))), 9: make_node("south")}
    )
    manager = street.manager()
    manager.wait_for_sites(1, 300.0)
    street.at(street.time + 200, lambda: street.move(7, 8, make_node("north")))
    while street.time < 250:
        exchange_messages(manager, "south")
        street.sleep(5.0)
    sentence = "this site runs halfmoon 0.0.9, the server 0.1.0: this site has to upgrade to 0.1.0."
    assert [said for said in street.said if "halfmoon" in said] == [f"a site does not join: {sentence}"]
    assert manager.connected_sites == ["north", "south"]


def test_who_was_refused_is_asked_again_under_the_same_number() -> None:
    street = FakeTransport({7: make_silent_node(make_refusal(FAILED, "its disk: No space left on device."))})
    manager = street.manager()
    street.at(10.0, lambda: street.nodes_.update({7: make_node("north")}))
    manager.wait_for_sites(1, 300.0)
    assert manager.connected_sites == ["north"]
    assert RETRY_SECONDS < street.time < RETRY_SECONDS + 25


def test_a_site_that_has_forgotten_joins_again_and_is_asked_again(
    street: FakeTransport, manager: ClientManager
) -> None:
    known = []
    street.nodes_[7] = FakeNode(
        lambda: [(0.3, known.append(1) or make_acceptance("north"))],
        lambda data: [(1.0, b"yes " + data if known else make_refusal(NOT_JOINED))],
    )
    offers = len(street.offers)
    began = street.time
    assert exchange_messages(manager)["north"] == SiteResponse(b"yes do")
    assert [number for _, number in street.offers[offers:]] == [7]
    assert len([number for _, number, _ in street.requests if number == 7]) == 2
    assert street.time - began < 6, "nobody waits half a minute for it"


@pytest.mark.parametrize(
    ("comes", "reason"),
    [(make_refusal(NOT_JOINED), "it had to join again"), (None, "it fell over")],
    ids=["unknown", "died"],
)
def test_sending_again_has_an_end(
    street: FakeTransport, manager: ClientManager, comes: bytes | None, reason: str
) -> None:
    """A site that never knows the federation, or dies of each request, gets it once and `RESENDS` times more."""
    street.nodes_[7] = FakeNode(lambda: [(0.3, make_acceptance("north"))], lambda data: [(1.0, comes)])
    answers = exchange_messages(manager)
    assert answers["north"] == SiteResponse(None, reason)
    assert len([number for _, number, _ in street.requests if number == 7]) == 1 + MAX_RESENDS
    assert answers["south"] == SiteResponse(b"south:do")
    street.nodes_[7] = make_node("north")
    assert exchange_messages(manager)["north"] == SiteResponse(b"north:do"), "the count is of one exchange"


def test_a_refusal_of_work_is_an_answer(street: FakeTransport, manager: ClientManager) -> None:
    said = make_refusal(FAILED, "its disk is full")
    street.nodes_[7] = make_node("north", said=said)
    assert exchange_messages(manager)["north"] == SiteResponse(said)
    assert read_message(said, Refusal).kind == FAILED
    assert len([number for _, number, _ in street.requests if number == 7]) == 1


@pytest.mark.parametrize("what", [{"nodes"}, {"collect"}, {"nodes", "collect"}, {"nodes", "send", "collect"}])
def test_a_lost_connection_is_said_waited_out_and_said_to_be_over(street, manager, what):
    """15 s without any way to the sites, in the middle of work that takes 5: said once, over once, and no site lost."""
    for number, name in ((7, "north"), (99, "south"), (31, "west")):
        street.nodes_[number] = make_node(name, 5.0)
    heard = len(street.said)
    street.at(street.time + 1, lambda: street.cut.update(what))
    street.at(street.time + 16, lambda: street.cut.clear())
    began = street.time
    answers = exchange_messages(manager)
    assert {name: answer.data for name, answer in answers.items()} == {name: f"{name}:do".encode() for name in SITES}
    if "collect" in what:
        assert 15 < street.time - began < 20
    street.sleep(5.0)
    exchange_messages(manager)
    assert street.said[heard:][:1] in ([], ["the connection to the sites is lost (no way); waiting for it"])
    if "nodes" in what and "collect" in what:
        assert len(street.said) == heard + 2
    assert street.said[heard + 1 : heard + 2] in ([], ["the connection to the sites works again"])
    assert len(street.requests) == 6


@pytest.mark.parametrize("what", [{"nodes", "send"}, {"nodes", "send", "collect"}])
def test_a_server_without_a_network_does_not_take_its_sites_for_absent(what: set[str]) -> None:
    """For 300 s nothing can be sent, and who is there cannot be seen: nobody is given up after the `absence` of 20."""
    street = FakeTransport({31: make_node("west"), 7: make_node("north"), 99: make_node("south")})
    manager = street.manager(timeout=1000.0)
    manager.wait_for_sites(3, 60.0)
    heard = len(street.said)
    street.cut.update(what)
    street.at(street.time + 300, lambda: street.cut.clear())
    assert [answer.data for answer in exchange_messages(manager).values()] == [f"{name}:do".encode() for name in SITES]
    assert street.time > 300
    street.sleep(3.0)
    exchange_messages(manager)
    lost, found = street.said[heard:]
    assert lost == "the connection to the sites is lost (no way); waiting for it"
    assert found == "the connection to the sites works again"


def test_a_post_that_takes_nothing_is_not_waited_for_without_end(street: FakeTransport, manager: ClientManager) -> None:
    """Who is there can be seen, but nothing can be sent: that is said once, and over once."""
    heard = len(street.said)
    street.cut.add("send")
    answers = exchange_messages(manager)
    assert {answer.reason for answer in answers.values()} == {"it was not connected for 20 s"}
    street.cut.clear()
    assert exchange_messages(manager)["north"].data == b"north:do"
    assert len(street.said) == heard + 2


def test_gather_does_not_count_sites_that_nobody_can_see(street: FakeTransport, manager: ClientManager) -> None:
    """A round is played again when its sites can be asked, not while the server has no network."""
    street.cut.update({"nodes", "send", "collect"})
    street.at(street.time + 200, lambda: street.cut.clear())
    street.sleep(3.0)
    ask_anyway = manager.exchange({"north": b"do"}, "round 1")
    assert ask_anyway["north"].data is None
    manager.wait_for_sites(2, float("inf"), 0.0)
    assert 200 < street.time < 205
    street.cut.update({"nodes"})
    street.sleep(3.0)
    exchange_messages(manager)
    with pytest.raises(UserError, match=r"^0 of 2 sites that are needed"):
        manager.wait_for_sites(2, 10.0, 0.0)


def test_a_request_that_cannot_be_sent_is_sent_later(street: FakeTransport, manager: ClientManager) -> None:
    street.cut.add("send")
    street.full.add(7)
    street.at(street.time + 5, lambda: street.cut.clear())
    street.at(street.time + 10, lambda: street.full.clear())
    assert exchange_messages(manager)["north"] == SiteResponse(b"north:do")
    assert len(street.requests) == 3


def test_a_post_that_takes_no_mail_is_not_waited_for_without_end(street: FakeTransport, manager: ClientManager) -> None:
    street.full.add(7)
    answers = exchange_messages(manager)
    assert answers["north"].data is None
    assert answers["south"].data == b"south:do"


def test_gather_returns_when_all_are_there(street: FakeTransport) -> None:
    street.manager().wait_for_sites(1, 60.0)
    assert street.time < 1.0


def test_gather_waits_for_those_who_come_soon() -> None:
    """With enough sites, the others have `absence` seconds: 20."""
    street = FakeTransport({1: make_node("north"), 2: make_node("south")})
    street.at(15.0, lambda: street.nodes_.update({3: make_node("west")}))
    manager = street.manager()
    manager.wait_for_sites(1, 600.0)
    assert manager.connected_sites == list(SITES)
    assert 15 < street.time < 17
    other = FakeTransport({1: make_node("north")})
    manager = other.manager()
    manager.wait_for_sites(1, 600.0)
    assert manager.connected_sites == ["north"]
    assert 20 < other.time < 21


def test_gather_says_that_it_waits_and_gives_up_with_the_reasons() -> None:
    """In 100 s it says so at 0, 30, 60 and 90 s, and when one comes.

    The sentence at the end has what the refused ones said."""
    street = FakeTransport({1: make_node("north"), 2: make_silent_node(make_refusal(UNFIT, "it has no label."))})
    with pytest.raises(UserError, match=r"^1 of 3 sites that are needed have joined \(a site does not join: it has no"):
        street.manager().wait_for_sites(3, 100.0)
    assert 100 < street.time < 101
    waits = [said for said in street.said if said.startswith("waiting for sites")]
    assert len(waits) == 5
    assert waits[-1] == "waiting for sites: 1 of 3 are there, 3 needed; missing: south, west"


def test_gather_waits_for_a_post_that_is_not_there_yet() -> None:
    street = FakeTransport(
        {1: make_node("north"), 2: make_node("south"), 3: make_node("west")}, cut={"nodes", "collect"}
    )
    street.at(50.0, lambda: street.cut.clear())
    street.manager().wait_for_sites(3, 100.0)
    assert 50 < street.time < 55
    assert street.heard("is lost") == street.heard("works again") == 1


def test_a_site_that_takes_long_to_join_is_there_once() -> None:
    """It decodes its images for 200 s before it answers; every offer that it got meanwhile is answered then."""
    street = FakeTransport()

    def slowly() -> list[tuple[float, bytes]]:
        return [(max(0.3, 200.0 - street.time), make_acceptance("north"))]

    street.nodes_[1] = FakeNode(slowly, lambda data: [(1.0, b"done")])
    manager = street.manager()
    manager.wait_for_sites(1, 600.0)
    for _ in range(20):
        assert exchange_messages(manager, "north")["north"].data == b"done"
        street.sleep(5.0)
    assert street.heard("north is there") == 1


def test_new_counts_of_a_site_are_taken_in(street: FakeTransport, manager: ClientManager) -> None:
    there = FakeNode(lambda: [(0.3, make_acceptance("north", labeled=40))], lambda data: [(1.0, b"more")])
    street.move(7, 8, there)
    street.sleep(3.0)
    exchange_messages(manager)
    assert manager.acceptances["north"].labeled == 40
    assert street.heard("40 images with a label") == 1


def test_who_is_gone_stays_known(street: FakeTransport, manager: ClientManager) -> None:
    """What a site said when it joined is what its answers are judged by, and one may come after it is gone."""
    del street.nodes_[7]
    street.sleep(3.0)
    exchange_messages(manager, "south")
    assert manager.connected_sites == ["south", "west"]
    assert manager.acceptances["north"].labeled == 4


@pytest.mark.parametrize(
    "spoiled", [b"", make_acceptance("north")[:40], b"\xff" * 5_000], ids=["empty", "cut", "noise"]
)
def test_what_is_no_message_is_handed_on(street: FakeTransport, manager: ClientManager, spoiled: bytes) -> None:
    """The roster does not judge answers: who asked does, and counts them."""
    street.nodes_[7] = make_node("north", said=spoiled)
    assert exchange_messages(manager)["north"] == SiteResponse(spoiled)
