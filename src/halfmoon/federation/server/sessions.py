"""The exchange with the sites of a federation: time limits, late answers, sites that come back.

Nothing here reads requests; `halfmoon.federation.server.membership` knows who is connected.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from halfmoon.core.errors import UserError
from halfmoon.federation.protocol.messages import UNKNOWN, Acceptance, Malformed, Refusal, read
from halfmoon.federation.protocol.terms import Terms
from halfmoon.federation.server.membership import AGAIN, Membership
from halfmoon.federation.server.spool import Spool, Spooled
from halfmoon.federation.server.transport import Clock, Connection, Transport

PAUSE, LONGEST, SHARE = 0.1, 0.5, 0.1
"""Seconds between two polls for replies, at least and at most, and the share of the time waited that lies between.

A poll costs Flower, and the processes that share its machine, a hundredth of a second. An answer that takes a minute
may come in half a second later.
"""

LATE = 2.0
"""Time limits that a request lives: an answer within the second one is too late, but it comes and is named."""

NO_KEY = "its key was removed, or it never had one"
"""Why a site is not waited for, and why its answer does not count."""

RESENDS = 3
"""How often a request is sent again in one exchange to a site whose process died over it."""

AWAY = "it was not connected for"


class Answer(NamedTuple):
    """A site's answer to a request: its bytes, wherever they lie, or None and why there are none.

    Bytes that carry a reason do not count.
    """

    data: bytes | Spooled | None
    reason: str = ""


@dataclass
class _Pending:
    """A request under way."""

    name: str
    node: int
    since: str  # when the node's process connected, where that is known
    what: str
    end: float  # until when its answer is waited for
    last_contact: float  # when its node was last connected


def _unknown(data: bytes) -> bool:
    """Say whether a site answers that it has not joined, or not any more."""
    try:
        return read(data, Refusal).kind == UNKNOWN
    except Malformed:
        return False


class ClientManager:
    """Asks the sites of `terms` that are connected (a `halfmoon.federation.server.calls.Link`).

    `timeout` is how long a site may take for an answer, `absence` how long one that is not connected is waited for,
    both in seconds. `say` hears what people should know. Answers wait in the `spool`, in memory without one.
    """

    def __init__(
        self, post: Transport, terms: Terms, version: str, timeout: float, absence: float, say: Callable[[str], None],
        clock: Clock | None = None, spool: Spool | None = None,
    ) -> None:  # fmt: skip
        self.terms, self.timeout, self.absence, self.say = terms, timeout, absence, say
        self.clock, self.spool = clock or Clock(), spool
        self.connection = Connection(post, say)
        self.members = Membership(self.connection, terms, version, timeout, say, self.clock)
        self._late: dict[str, _Pending] = {}  # requests that are no longer waited for
        self._gone: set[str] = set()  # sites that were waited for in vain, until they appear again

    @property
    def acceptances(self) -> Mapping[str, Acceptance]:
        return self.members.acceptances

    @property
    def present(self) -> list[str]:
        return [name for name in self.terms.sites if name in self.members.nodes]

    def poll(self) -> list[str]:
        """Let new sites join, and return the names of those that are connected."""
        self.members.poll()
        self._receive({})
        return self.present

    def gather(self, needed: int, patience: float, grace: float | None = None) -> None:
        """Wait until as many sites have joined; `grace` seconds (None: `absence`) are left to the others.

        Raise UserError where they have not after `patience` seconds.
        """
        start, last_line = self.clock.now(), -1e9
        while "nodes" in self.connection.cut or not self.members.complete:
            self.poll()
            now = self.clock.now()
            here = 0 if "nodes" in self.connection.cut else len(self.members.nodes)
            if here >= needed and now - start > (self.absence if grace is None else grace):
                break
            if now - start > patience and here < needed:
                faults = sorted({words for _, words in self.members.warnings})
                why = f" ({'; '.join(faults)})" if faults else ""
                raise UserError(f"{here} of {needed} sites that are needed have joined{why}.")
            if now - last_line > AGAIN and here < needed:
                self.say(f"waiting for sites: {here} of {len(self.terms.sites)} are there, {needed} needed")
                last_line = now
            self._pause(start, now)

    def exchange(self, requests: Mapping[str, bytes], what: str) -> dict[str, Answer]:
        """Send each named site its request, and return its answer, or why there is none; `what` names the exchange.

        A site that is cut off and comes back in time is asked again.
        """
        start = self.clock.now()
        late = {name for name in requests if name in self._gone and name not in self.members.nodes}
        waiting = {name: -math.inf if name in late else start for name in requests}  # since when
        pending, answers = dict[str, _Pending](), dict[str, Answer]()
        sends: dict[str, int] = dict.fromkeys(requests, 0)
        while len(answers) < len(requests):
            self.members.poll()
            now = self.clock.now()
            self._come_back(waiting, pending, now)
            answers |= self._give_up(waiting, pending, now, start)
            names = {self.members.nodes[name]: name for name in waiting if name in self.members.nodes}
            mail = {node: requests[name] for node, name in names.items()}
            message_ids = self.connection.send(mail, LATE * self.timeout, False)
            for node, message_id in message_ids.items():
                name = names[node]
                del waiting[name]
                sends[name] += 1
                pending[message_id] = _Pending(name, node, self.members.process(node), what, start + self.timeout, now)
            for name, answer in self._receive(pending).items():
                if answer.data is None and sends[name] <= RESENDS:
                    waiting[name] = self.clock.now()  # to receive may have taken minutes
                else:
                    answers[name] = answer
            if len(answers) < len(requests):
                self._pause(start, now)
        missing = {name for name in requests if answers[name].reason.startswith(AWAY)}
        self._gone = (self._gone - set(requests)) | (missing - self.members.nodes.keys())
        return {name: answers[name] for name in requests}

    def _pause(self, start: float, poll: float) -> None:
        """Sleep until the next poll, where the last one began at `poll` and the waiting at `start`.

        As long as that poll took, for it kept the sites' processes busy, too.
        """
        now = self.clock.now()
        self.clock.sleep(max(PAUSE, min(LONGEST, max(SHARE * (now - start), now - poll))))

    def _come_back(self, waiting: dict[str, float], pending: dict[str, _Pending], now: float) -> None:
        """Let sites that have started again since they were asked be asked again: their request is lost.

        With a key a site has the same node when it comes back, and Flower does not always tell of the loss.
        """
        for message_id, request in list(pending.items()):
            name = request.name
            moved = self.members.nodes.get(name, request.node) != request.node
            if (moved or self.members.process(request.node) != request.since) and self.members.has_key(name):
                del pending[message_id]
                waiting[name] = now

    def _give_up(
        self, waiting: dict[str, float], pending: dict[str, _Pending], now: float, start: float
    ) -> dict[str, Answer]:
        """Give up sites that are away for too long, have had all their time, or may not come in any more."""
        answers: dict[str, Answer] = {}
        for name, since in list(waiting.items()):
            if not self.members.has_key(name):
                del waiting[name]
                answers[name] = Answer(None, NO_KEY)
                continue
            if "nodes" in self.connection.cut:  # it is the server that is not connected
                waiting[name] = since = now
            if now - since > self.absence or now - start > self.timeout:
                del waiting[name]
                answers[name] = Answer(None, f"{AWAY} {min(now - since, self.absence):.0f} s")
        for message_id, request in list(pending.items()):
            if request.node in self.members.connected:
                request.last_contact = now
            reason = f"it did not answer within {self.timeout:g} s" if now > request.end else ""
            if now - request.last_contact > self.absence:
                reason = f"{AWAY} {now - request.last_contact:.0f} s"
            if not self.members.has_key(request.name):
                reason = NO_KEY
            if reason:
                request.end = now
                self._late[message_id] = pending.pop(message_id)
                answers[request.name] = Answer(None, reason)
        return answers

    def _receive(self, pending: dict[str, _Pending]) -> dict[str, Answer]:
        """Take in what has come, and return the answers to requests; one that is late is named and let go."""
        self.members.check_keys()
        answers: dict[str, Answer] = {}
        for message_id, data, problem in self.connection.collect([*pending, *self.members.offers, *self._late]):
            self.members.check_keys()  # to fetch the ones before may have taken minutes
            if message_id in self.members.offers:
                self.members.join(self.members.offers.pop(message_id), data)
            elif message_id in self._late:
                request = self._late.pop(message_id)
                if data is not None:
                    late = self.clock.now() - request.end
                    self.say(f"{request.name} answered {request.what} {late:.0f} s too late: discarded")
            elif message_id in pending:
                request = pending.pop(message_id)
                if not self.members.speaks_for(request.node, request.name):
                    self._forget(request, "")
                    data, problem = None, NO_KEY
                elif data is None:
                    self._forget(request, problem)
                elif _unknown(data):
                    self._forget(request, "")
                    data, problem = None, "it had to join again"
                place = data if data is None or self.spool is None else self.spool.store(data)
                answers[request.name] = Answer(place, problem)
        return answers

    def _forget(self, request: _Pending, problem: str) -> None:
        self.members.forget(request.name, request.node)
        if problem:
            self.say(f"{request.name} did not answer {request.what}: {problem}")
