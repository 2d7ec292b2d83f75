"""The exchange with the sites of a federation: time limits, late answers, sites that come back.

Nothing here knows what a request asks; who is there is known by `halfmoon.federation.server.membership`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from halfmoon.core.errors import UserError
from halfmoon.federation.protocol.messages import UNKNOWN, Joined, Malformed, Refusal, read
from halfmoon.federation.protocol.terms import Terms
from halfmoon.federation.server.membership import AGAIN, Membership
from halfmoon.federation.server.spool import Spool, Spooled
from halfmoon.federation.server.transport import Clock, Connection, Transport

PAUSE, LONGEST, SHARE = 0.1, 0.5, 0.1
"""Seconds between two looks for replies, at least and at most, and the share of the time waited that lies between.

A look is a hundredth of a second's work for Flower, and for the processes that share the machine with it. What takes a
minute may be seen half a second later.
"""

LATE = 2.0
"""Time limits that a request lives: an answer within the second one is too late, but it comes and is named."""

NO_KEY = "its key was removed, or it never had one"
"""Why a site is not waited for, and why what it answers does not count."""

RESENDS = 3
"""How often a request is sent again in one exchange to a site whose process died over it."""


class Answer(NamedTuple):
    """What a site answered to a request: its bytes, wherever they lie, or None and why there are none.

    Bytes that carry a reason are not counted.
    """

    data: bytes | Spooled | None
    reason: str = ""


@dataclass
class _Sent:
    """A request under way."""

    name: str
    node: int
    since: str  # when the node's process connected, where that is known
    what: str
    end: float  # until when its answer is waited for
    seen: float  # when its node was last connected


AWAY = "it was not connected for"


def _unknown(data: bytes) -> bool:
    """Say whether a site answers that it has not joined, or not any more."""
    try:
        said = read(data, Refusal)
    except Malformed:
        return False
    return said.kind == UNKNOWN


class ClientManager:
    """Asks the sites of `terms` that are connected (a `halfmoon.federation.server.runtime.Link`).

    `timeout` is how long a site may take for an answer, `absence` how long one that is not connected is waited for,
    both in seconds. `say` hears what people should know. Answers wait in the `spool`, in memory without one.
    """

    def __init__(
        self, post: Transport, terms: Terms, version: str, timeout: float, absence: float, say: Callable[[str], None],
        clock: Clock | None = None, spool: Spool | None = None,
    ) -> None:  # fmt: skip
        self.timeout, self.absence, self.say, self.clock = timeout, absence, say, clock or Clock()
        self.spool = spool
        self.connection = Connection(post, say)
        self.members = Membership(self.connection, terms, version, timeout, say, self.clock)
        self._late: dict[str, _Sent] = {}  # requests that are no longer waited for
        self._gone: set[str] = set()  # sites that were waited for in vain, until they appear again

    @property
    def terms(self) -> Terms:
        """What the sites have agreed to."""
        return self.members.terms

    @property
    def joined(self) -> Mapping[str, Joined]:
        """What the sites said when they joined, also those that are gone."""
        return self.members.joined

    @property
    def present(self) -> list[str]:
        """The names of the sites that are connected, in the order of their numbers."""
        return [name for name in self.terms.sites if name in self.members.nodes]

    def arrived(self) -> list[str]:
        """Look once who has come, let them join, and return the names of the sites that are connected."""
        self.members.look()
        self._receive({})
        return self.present

    def gather(self, wanted: int, patience: float, grace: float | None = None) -> None:
        """Wait until as many sites have joined; `grace` seconds (None: `absence`) are left to the others.

        Raise UserError where they have not after `patience` seconds.
        """
        began, said = self.clock.now(), -1e9
        while "nodes" in self.connection.cut or not self.members.complete:
            self.members.look()
            self._receive({})
            now = self.clock.now()
            here = 0 if "nodes" in self.connection.cut else len(self.members.nodes)
            if here >= wanted and now - began > (self.absence if grace is None else grace):
                break
            if now - began > patience and here < wanted:
                why = f" ({'; '.join(sorted({words for _, words in self.members.told}))})" if self.members.told else ""
                raise UserError(f"{here} of {wanted} sites that are needed have joined{why}.")
            if now - said > AGAIN and here < wanted:
                self.say(f"waiting for sites: {here} of {len(self.terms.sites)} are there, {wanted} needed")
                said = now
            self._pause(began, now)

    def exchange(self, requests: Mapping[str, bytes], what: str) -> dict[str, Answer]:
        """Send each named site its request, and return what each answered, or why it did not; `what` is said of it.

        A site that is cut off and comes back in time is asked again.
        """
        began = self.clock.now()
        late = {name for name in requests if name in self._gone and name not in self.members.nodes}
        waiting = {name: -math.inf if name in late else began for name in requests}  # since when
        sent, answers = dict[str, _Sent](), dict[str, Answer]()
        sends: dict[str, int] = dict.fromkeys(requests, 0)
        while len(answers) < len(requests):
            self.members.look()
            now = self.clock.now()
            self._come_back(waiting, sent, now)
            answers |= self._give_up(waiting, sent, now, began)
            names = {self.members.nodes[name]: name for name in waiting if name in self.members.nodes}
            mail = {node: requests[name] for node, name in names.items()}
            message_ids = self.connection.send(mail, LATE * self.timeout, False)
            for node, message_id in message_ids.items():
                name = names[node]
                del waiting[name]
                sends[name] += 1
                sent[message_id] = _Sent(name, node, self.members.process(node), what, began + self.timeout, now)
            for name, answer in self._receive(sent).items():
                if answer.data is None and sends[name] <= RESENDS:
                    waiting[name] = self.clock.now()  # to receive may have taken minutes
                else:
                    answers[name] = answer
            if len(answers) < len(requests):
                self._pause(began, now)
        missing = {name for name in requests if answers[name].reason.startswith(AWAY)}
        self._gone = (self._gone - set(requests)) | (missing - self.members.nodes.keys())
        return {name: answers[name] for name in requests}

    def _pause(self, began: float, looked: float) -> None:
        """Sleep until the next look, where the last one began at `looked` and the waiting at `began`.

        As long as that look took, for it was work for who answers, too.
        """
        now = self.clock.now()
        self.clock.sleep(max(PAUSE, min(LONGEST, max(SHARE * (now - began), now - looked))))

    def _come_back(self, waiting: dict[str, float], sent: dict[str, _Sent], now: float) -> None:
        """Let sites that have started again since they were asked be asked again: what they had got is lost.

        With a key a site has the same node when it comes back, and Flower does not always tell of the loss.
        """
        for message_id, each in list(sent.items()):
            moved = self.members.nodes.get(each.name, each.node) != each.node
            if (moved or self.members.process(each.node) != each.since) and self.members.invited(each.name):
                del sent[message_id]
                waiting[each.name] = now

    def _give_up(
        self, waiting: dict[str, float], sent: dict[str, _Sent], now: float, began: float
    ) -> dict[str, Answer]:
        """Give up sites that are away for too long, have had all their time, or may not come in any more."""
        given: dict[str, Answer] = {}
        for name in [each for each in waiting if not self.members.invited(each)]:
            del waiting[name]
            given[name] = Answer(None, NO_KEY)
        for name, since in list(waiting.items()):
            if "nodes" in self.connection.cut:  # it is the server that is not connected
                waiting[name] = since = now
            if now - since > self.absence or now - began > self.timeout:
                del waiting[name]
                given[name] = Answer(None, f"{AWAY} {min(now - since, self.absence):.0f} s")
        for message_id, each in list(sent.items()):
            each.seen = now if each.node in self.members.connected else each.seen
            reason = f"it did not answer within {self.timeout:g} s" if now > each.end else ""
            if now - each.seen > self.absence:
                reason = f"{AWAY} {now - each.seen:.0f} s"
            if not self.members.invited(each.name):
                reason = NO_KEY
            if reason:
                each.end = now
                self._late[message_id] = sent.pop(message_id)
                given[each.name] = Answer(None, reason)
        return given

    def _receive(self, sent: dict[str, _Sent]) -> dict[str, Answer]:
        """Take in what has come, and return the answers to requests; one that is late is named and let go."""
        self.members.check_keys()
        found: dict[str, Answer] = {}
        for message_id, data, problem in self.connection.collect([*sent, *self.members.offers, *self._late]):
            self.members.check_keys()  # to fetch the ones before may have taken minutes
            if message_id in self.members.offers:
                self.members.join(self.members.offers.pop(message_id), data)
            elif message_id in self._late:
                self._let_go(self._late.pop(message_id), data)
            elif message_id in sent:
                each = sent.pop(message_id)
                if not self.members.may(each.node, each.name):
                    self._forget(each, "")
                    data, problem = None, NO_KEY
                elif data is None:
                    self._forget(each, problem)
                elif _unknown(data):
                    self._forget(each, "")
                    data, problem = None, "it had to join again"
                kept = data if data is None or self.spool is None else self.spool.keep(data)
                found[each.name] = Answer(kept, problem)
        return found

    def _let_go(self, each: _Sent, data: bytes | None) -> None:
        if data is not None:
            late = self.clock.now() - each.end
            self.say(f"{each.name} answered {each.what} {late:.0f} s too late: discarded")

    def _forget(self, each: _Sent, problem: str) -> None:
        self.members.forget(each.name, each.node)
        if problem:
            self.say(f"{each.name} did not answer {each.what}: {problem}")
