"""The exchange with the sites of a federation: time limits, late answers, sites that come back.

Nothing here reads requests; `Membership` knows who is connected.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from halfmoon.core.errors import UserError
from halfmoon.federation.protocol.messages import (
    NOT_JOINED,
    Acceptance,
    MalformedMessage,
    Offer,
    Refusal,
    read_message,
    write_message,
)
from halfmoon.federation.protocol.terms import Terms
from halfmoon.federation.server.connection import Clock, Connection, NodeIdentity, Spool, SpooledFile, Transport

PAUSE, LONGEST, SHARE = 0.1, 0.5, 0.1
"""Seconds between two polls for replies, at least and at most, and the share of the time waited that lies between.

A poll costs Flower, and the processes that share its machine, a hundredth of a second. An answer that takes a minute
may come in half a second later.
"""

LATE = 2.0
"""Time limits that a request lives: an answer within the second one is too late, but it comes and is named."""

NO_KEY = "its key was removed, or it never had one"
"""Why a site is not waited for, and why its answer does not count."""

MAX_RESENDS = 3
"""How often a request is sent again in one exchange to a site whose process died over it."""

AWAY = "it was not connected for"


class SiteResponse(NamedTuple):
    """A site's answer, or None, and a reason; bytes that come with a reason do not count."""

    data: bytes | SpooledFile | None
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
    try:
        return read_message(data, Refusal).kind == NOT_JOINED
    except MalformedMessage:
        return False


class ClientManager:
    """Asks the connected sites of `terms`; answers wait in the `spool`.

    A site may take `timeout` seconds for an answer, and be away for `absence` seconds.
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
    def connected_sites(self) -> list[str]:
        return [name for name in self.terms.sites if name in self.members.nodes]

    def poll(self) -> list[str]:
        self.members.poll()
        self._receive({})
        return self.connected_sites

    def wait_for_sites(self, needed: int, patience: float, grace: float | None = None) -> None:
        """Wait until as many sites have joined; `grace` seconds (None: `absence`) are left to the others.

        Raise UserError where they have not after `patience` seconds.
        """
        start, last_line, last_missing = self.clock.now(), -1e9, ""
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
            missing = ", ".join(name for name in self.terms.sites if name not in self.members.nodes)
            if here < needed and (now - last_line > RETRY_SECONDS or missing != last_missing):
                total = len(self.terms.sites)
                self.say(f"waiting for sites: {here} of {total} are there, {needed} needed; missing: {missing}")
                last_line, last_missing = now, missing
            self._pause(start, now)
        if last_missing:
            self.say(f"{len(self.members.nodes)} of {len(self.terms.sites)} sites are there")

    def exchange(self, requests: Mapping[str, bytes], what: str) -> dict[str, SiteResponse]:
        """Send each named site its request, and return its answer, or why there is none; `what` names the exchange.

        A site that is cut off and comes back in time is asked again.
        """
        start, named = self.clock.now(), ""
        late = {name for name in requests if name in self._gone and name not in self.members.nodes}
        waiting = {name: -math.inf if name in late else start for name in requests}  # since when
        pending, answers = dict[str, _Pending](), dict[str, SiteResponse]()
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
                if answer.data is None and sends[name] <= MAX_RESENDS:
                    waiting[name] = self.clock.now()  # to receive may have taken minutes
                else:
                    answers[name] = answer
            if len(answers) < len(requests):
                names_left = ", ".join(name for name in requests if name not in answers)
                if answers and now - start > RETRY_SECONDS and names_left != named:
                    named = names_left
                    self.say(f"waiting for {named}: {what}")
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
        """Ask sites again that have started since: their request is lost, and with a key they have the same node."""
        for message_id, request in list(pending.items()):
            name = request.name
            moved = self.members.nodes.get(name, request.node) != request.node
            if (moved or self.members.process(request.node) != request.since) and self.members.has_key(name):
                del pending[message_id]
                waiting[name] = now

    def _give_up(
        self, waiting: dict[str, float], pending: dict[str, _Pending], now: float, start: float
    ) -> dict[str, SiteResponse]:
        """Give up sites that are away for too long, have had all their time, or may not come in any more."""
        answers: dict[str, SiteResponse] = {}
        for name, since in list(waiting.items()):
            if not self.members.has_key(name):
                del waiting[name]
                answers[name] = SiteResponse(None, NO_KEY)
                continue
            if "nodes" in self.connection.cut:  # it is the server that is not connected
                waiting[name] = since = now
            if now - since > self.absence or now - start > self.timeout:
                del waiting[name]
                answers[name] = SiteResponse(None, f"{AWAY} {min(now - since, self.absence):.0f} s")
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
                answers[request.name] = SiteResponse(None, reason)
        return answers

    def _receive(self, pending: dict[str, _Pending]) -> dict[str, SiteResponse]:
        """Take in what has come, and return the answers to requests; one that is late is named and let go."""
        self.members.check_keys()
        answers: dict[str, SiteResponse] = {}
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
                answers[request.name] = SiteResponse(place, problem)
        return answers

    def _forget(self, request: _Pending, problem: str) -> None:
        self.members.forget(request.name, request.node)
        if problem:
            self.say(f"{request.name} did not answer {request.what}: {problem}")


PERIOD, HASTE = 2.0, 0.5  # seconds between two polls for new sites, and where some are missing

RETRY_SECONDS = 30.0
"""Seconds after which a node that would not join, or did not answer, is asked once more."""


class Membership:
    """The sites of `terms` that have joined, as far as they are connected; an offer may take `timeout` seconds."""

    def __init__(
        self, connection: Connection, terms: Terms, version: str, timeout: float, say: Callable[[str], None],
        clock: Clock,
    ) -> None:  # fmt: skip
        self.connection, self.terms, self.timeout, self.say, self.clock = connection, terms, timeout, say, clock
        self.acceptances: dict[str, Acceptance] = {}  # by which sites joined, also of those that are gone
        self.nodes: dict[str, int] = {}  # the node of each site that is connected
        self.connected: set[int] = set()  # the nodes at the last poll, whether they have joined or not
        self.offers: dict[str, int] = {}  # by ticket the nodes that were asked to join and have not answered
        self.warnings: set[tuple[int, str]] = set()  # faults of nodes that the log has
        self._offer = write_message(Offer(version, terms.text))
        self._holders: Mapping[int, NodeIdentity] | None = None  # whose key each node has, where sites have keys
        self._since: dict[str, str] = {}  # when the process that joined had connected
        self._offer_times: dict[int, float] = {}  # when a node was last asked to join
        self._older: dict[int, str] = {}  # nodes of sites that came again as another one
        self._last_poll = -1e9

    @property
    def complete(self) -> bool:
        return len(self.nodes) == len(self.terms.sites)

    def poll(self) -> None:
        """Ask new nodes to join, and forget those that are gone."""
        now = self.clock.now()
        if now - self._last_poll < (PERIOD if self.complete else HASTE):
            return
        self._last_poll = now
        nodes = self.connection.nodes()
        if nodes is None:
            return
        self.check_keys()
        nodes = self.connected = self._with_keys(nodes)
        for name, node in list(self.nodes.items()):
            if node not in nodes:
                del self.nodes[name]
                self.say(f"{name} is no longer connected")
        members = set(self.nodes.values())
        self._offer_times = {node: when for node, when in self._offer_times.items() if node in nodes}
        self._older = {node: name for node, name in self._older.items() if node in nodes}
        # Two nodes of one name, asked in turn, would take the site from each other for ever.
        members |= {node for node, name in self._older.items() if name in self.nodes}
        new = [node for node in sorted(nodes - members) if now - self._offer_times.get(node, -1e9) > RETRY_SECONDS]
        for node, message_id in self.connection.send(dict.fromkeys(new, self._offer), self.timeout, True).items():
            self.offers[message_id] = node
            self._offer_times[node] = now

    def check_keys(self) -> None:
        """Forget sites whose keys were removed, and have those that have started again join again."""
        self._holders = self.connection.post.key_owners()
        for name, node in list(self.nodes.items()):
            if not self.speaks_for(node, name):
                del self.nodes[name]
                self.say(f"{name} is not listened to any more: its key was removed")
            elif self.process(node) != self._since[name]:  # it may have other images now
                del self.nodes[name]
                self._offer_times.pop(node, None)

    def _with_keys(self, nodes: set[int]) -> set[int]:
        """Return the nodes that have the key of a site, all where sites have no keys; the others are named once."""
        if self._holders is None:
            return nodes
        for node in sorted(nodes - self._holders.keys()):
            self._warn(node, f"node {node} has no key of a site that may come in: it is not asked to join")
        return nodes & self._holders.keys()

    def speaks_for(self, node: int, name: str) -> bool:
        return self._holders is None or (node in self._holders and self._holders[node].name == name)

    def has_key(self, name: str) -> bool:
        """Say whether any node may speak for a site."""
        return self._holders is None or any(holder.name == name for holder in self._holders.values())

    def process(self, node: int) -> str:
        """Return when the process behind a node connected, nothing where that is not known."""
        return self._holders[node].since if self._holders is not None and node in self._holders else ""

    def forget(self, name: str, node: int) -> None:
        """Forget the node of a site that did not answer: it is asked to join before it is asked anything else."""
        if self.nodes.get(name) == node:
            del self.nodes[name]
        self._offer_times.pop(node, None)

    def join(self, node: int, data: bytes | None) -> None:
        """Take in a node's answer to an offer."""
        if data is None:
            return
        try:
            answer = read_message(data, Acceptance, Refusal)
        except MalformedMessage as error:
            self._warn(node, f"a site answered what cannot be read: {error}")
            return
        if isinstance(answer, Refusal):
            self._warn(node, f"a site does not join: {answer.reason[:500]}")
            return
        name = answer.name
        if answer.federation != self.terms.hash or name not in self.terms.sites:
            self._warn(node, f"a site that calls itself {name[:64]!r} is none of this federation")
            return
        if not self.speaks_for(node, name):
            holder = (self._holders or {}).get(node)
            whose = f"the site with the key of {holder.name}" if holder else "a site without a key"
            self._warn(node, f"{whose} calls itself {name!r}: it does not join under a name that is not its key's")
            return
        other, before = self.nodes.get(name), self.acceptances.get(name)
        self.nodes[name], self._since[name] = node, self.process(node)
        self.acceptances[name] = answer
        if other == node and before == answer:  # it was asked more than once before it could answer
            return
        self._older.pop(node, None)
        moved = other is not None and other != node
        if other is not None and moved:
            self._older[other] = name
        back = " again" if moved else ""
        self.say(f"{name} is there{back}: {answer.labeled:,} images with a label, {answer.unlabeled:,} without")

    def _warn(self, node: int, words: str) -> None:
        if (node, words) not in self.warnings:
            self.warnings.add((node, words))
            self.say(words)
