"""Sites that are known by their keys: who may join under which name, and what is lost when a process starts again."""

from __future__ import annotations

import pytest
from federations import SITES, Node, Street, ask, joined, node

from halfmoon.net.roster import NO_KEY, Answer, Holder, Roster


@pytest.fixture
def street() -> Street:
    """Return a street on which all sites are there, each with its key."""
    made = Street({31: node("west"), 7: node("north"), 99: node("south")})
    made.keys = {31: Holder("west", "1"), 7: Holder("north", "1"), 99: Holder("south", "1")}
    return made


@pytest.fixture
def roster(street: Street) -> Roster:
    """Return the roster of the street, whose sites have joined."""
    made = street.roster()
    made.gather(3, 60.0)
    return made


def restart(street: Street, number: int, there: Node) -> None:
    """Let a site start again under the number that its key has; nobody tells of what its first process had got."""
    assert street.keys is not None
    street.nodes_[number] = there
    street.keys[number] = Holder(street.keys[number].name, "2")
    street._under_way.clear()


def test_a_site_that_starts_again_under_the_same_number_is_asked_again(street: Street, roster: Roster):
    """North starts again after 10 of 1000 s, in less time than a look takes: what it was asked is sent once more."""
    street.nodes_[7] = Node(lambda: [(0.3, joined("north"))], lambda data: [])
    street.at(street.time + 10, lambda: restart(street, 7, node("north", 5.0, b"new")))
    patient = street.roster(timeout=1000.0)
    patient.gather(3, 60.0)
    began = street.time
    assert ask(patient, "north")["north"] == Answer(b"new")
    assert street.time - began < 20
    offers = [time for time, number in street.offers if number == 7 and time > began]
    assert len(offers) == 1, "it may say something else now, so it is asked to join once more"


def test_a_site_whose_process_is_the_same_is_asked_once(street: Street, roster: Roster):
    street.nodes_[7] = node("north", 50.0)
    assert ask(roster)["north"].data
    assert len(street.requests) == 3


def test_a_name_is_bound_to_its_key(street: Street):
    """The node with north's key says that it is south: it has no part, under neither name, and the log says why."""
    street.nodes_[7] = node("south", said=b"stolen")
    del street.nodes_[99]
    roster = street.roster()
    roster.gather(1, 60.0, 5.0)
    assert roster.present == ["west"]
    assert "south" not in roster.joined
    words = "the site with the key of north calls itself 'south': it does not join under a name that is not its key's"
    assert street.said.count(words) == 1
    assert ask(roster, "south")["south"].data is None
    assert not [number for _, number, _ in street.requests if number == 7]


def test_the_owner_of_a_name_keeps_it(street: Street, roster: Roster):
    """Without keys who comes last under a name has it; with keys the one with the key has."""
    street.nodes_[8] = node("south", said=b"stolen")
    assert street.keys is not None
    street.keys[8] = Holder("east")
    street.sleep(10.0)
    assert ask(roster)["south"].data == b"south:do"
    assert street.heard("calls itself 'south'") == 1
    street.keys = None
    assert ask(street.roster(), "south")["south"].data is not None


def test_a_node_without_a_key_is_not_even_asked_to_join(street: Street, roster: Roster):
    street.nodes_[8] = node("south", said=b"stolen")
    street.sleep(10.0)
    assert ask(roster)["south"].data == b"south:do"
    assert 8 not in [number for _, number in street.offers]
    assert street.heard("node 8 has no key of a site that may come in: it is not asked to join") == 1


def test_what_a_removed_site_answers_does_not_count(street: Street, roster: Roster):
    """North's key is removed while it works, and in the same instant its answer comes: nobody waits for it any more."""
    keys = dict(street.keys or {})
    street.nodes_[7] = node("north", 5.0)
    street.nodes_[31] = node("west", 8.0)

    def remove() -> None:
        assert street.keys is not None
        del street.keys[7]

    street.at(street.time + 4.95, remove)
    began = street.time
    answers = ask(roster)
    assert answers["north"] == Answer(None, NO_KEY)
    assert answers["west"].data == b"west:do"
    assert street.time - began < 9, "absence is 20 s"
    began = street.time
    assert ask(roster)["north"] == Answer(None, NO_KEY)
    assert street.time - began < 9, "a site without a key is not waited for"
    assert roster.present == ["south", "west"]
    street.keys = keys
    street.sleep(40.0)
    assert ask(roster)["north"].data == b"north:do", "one that may come in again does"


def test_a_site_with_a_new_key_has_its_name(street: Street, roster: Roster):
    """North's key is replaced: its old node is forgotten, and the one with the new key is north."""
    assert street.keys is not None
    street.keys = {**{number: who for number, who in street.keys.items() if number != 7}, 8: Holder("north", "1")}
    street.nodes_[8] = node("north", said=b"new")
    street.nodes_[7] = node("north", said=b"old")
    assert ask(roster)["north"].data == b"new"
    assert list(roster.present) == list(SITES)
