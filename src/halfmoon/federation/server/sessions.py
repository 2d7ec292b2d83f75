"""Who is there, and the exchange with them: names instead of nodes, time limits, late answers, sites that come back.

A `Transport` carries bytes to nodes, whose numbers are random and change when a site starts again. The roster asks
every new node to join, and knows it by the name that it answers with. Nothing here knows what a request asks.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from halfmoon.core.errors import UserError
from halfmoon.federation.protocol.messages import UNKNOWN, Joined, Malformed, Offer, Refusal, read, write
from halfmoon.federation.protocol.terms import Terms

PAUSE, LONGEST, SHARE = 0.1, 0.5, 0.1
"""Seconds between two looks for replies, at least and at most, and the share of the time waited that lies between.

A look is a hundredth of a second's work for Flower, and for the processes that share the machine with it. What takes a
minute may be seen half a second later.
"""

LOOK, HASTE = 2.0, 0.5
"""Seconds between two looks for new sites, and where some are missing."""

AGAIN = 30.0
"""Seconds after which a node that would not join, or did not answer, is asked once more."""

LATE = 2.0
"""Time limits that a request lives: an answer within the second one is too late, but it comes and is named."""

NO_KEY = "its key was removed, or it never had one"
"""Why a site is not waited for, and why what it answers does not count."""

RESENDS = 3
"""How often a request is sent again in one exchange to a site whose process died over it."""


class TransportReply(NamedTuple):
    """What came for a ticket: the answer, or None and why there will be none.

    An answer with a problem is one that must not count: who sends such ones is set aside.
    """

    message_id: str
    data: bytes | None
    problem: str = ""


class NodeIdentity(NamedTuple):
    """Whose key a node has, and when its process connected, in any words: others mean that it is another process."""

    name: str
    since: str = ""


class Transport(Protocol):
    """What carries bytes; every method but `holders` may raise ConnectionError, which is waited out."""

    def nodes(self) -> Sequence[int]:
        """Return the nodes that are connected."""
        ...

    def holders(self) -> Mapping[int, NodeIdentity] | None:
        """Return whose key each node has, as far as sites may come in; None where sites have no keys."""
        ...

    def send(self, mail: Mapping[int, bytes], seconds: float, asks: bool) -> Mapping[int, str]:
        """Send each node its bytes, which it may take so many seconds for; return a ticket for each that was taken.

        `asks` says that this is a question who is there, not work.
        """
        ...

    def collect(self, message_ids: Sequence[str]) -> Sequence[TransportReply]:
        """Return what has come for these tickets."""
        ...


@dataclass(frozen=True)
class Clock:
    """Time that a test can replace."""

    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep


class Answer(NamedTuple):
    """What a site answered to a request: its bytes, or None and why there are none. Bytes with a reason count not."""

    data: bytes | None
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
    """The sites of `terms`, as far as they are connected (a `halfmoon.federation.server.runtime.Link`).

    `timeout` is how long a site may take for an answer, `absence` how long one that is not connected is waited for,
    both in seconds. `say` hears what people should know.
    """

    def __init__(
        self, post: Transport, terms: Terms, version: str, timeout: float, absence: float, say: Callable[[str], None],
        clock: Clock | None = None,
    ) -> None:  # fmt: skip
        self.post, self.terms, self.timeout, self.absence, self.say = post, terms, timeout, absence, say
        self.clock = clock or Clock()
        self.joined: dict[str, Joined] = {}
        """What the sites said when they joined, also those that are gone."""
        self._offer = write(Offer(version, terms.text))
        self._nodes: dict[str, int] = {}  # the node of each site that is connected
        self._holders: Mapping[int, NodeIdentity] | None = None  # whose key each node has, where sites have keys
        self._since: dict[str, str] = {}  # when the process that joined had connected
        self._connected: set[int] = set()  # the nodes at the last look
        self._asked: dict[int, float] = {}  # when a node was last asked to join
        self._older: dict[int, str] = {}  # nodes of sites that came again as another one
        self._offers: dict[str, int] = {}  # tickets of offers
        self._late: dict[str, _Sent] = {}  # requests that are no longer waited for
        self._told: set[tuple[int, str]] = set()  # refusals that were said
        self._gone: set[str] = set()  # sites that were waited for in vain, until they appear again
        self._looked = -1e9
        self._cut: set[str] = set()  # which ways to the post failed when they were last tried

    @property
    def present(self) -> list[str]:
        """The names of the sites that are connected, in the order of their numbers."""
        return [name for name in self.terms.sites if name in self._nodes]

    def gather(self, wanted: int, patience: float, grace: float | None = None) -> None:
        """Wait until as many sites have joined; `grace` seconds (None: `absence`) are left to the others.

        Raise UserError where they have not after `patience` seconds.
        """
        began, said = self.clock.now(), -1e9
        while "nodes" in self._cut or len(self._nodes) < len(self.terms.sites):
            self._look()
            self._receive({})
            now = self.clock.now()
            here = 0 if "nodes" in self._cut else len(self._nodes)
            if here >= wanted and now - began > (self.absence if grace is None else grace):
                break
            if now - began > patience and here < wanted:
                why = f" ({'; '.join(sorted({words for _, words in self._told}))})" if self._told else ""
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
        late = {name for name in requests if name in self._gone and name not in self._nodes}
        waiting = {name: -math.inf if name in late else began for name in requests}  # since when
        sent, answers = dict[str, _Sent](), dict[str, Answer]()
        sends: dict[str, int] = dict.fromkeys(requests, 0)
        while len(answers) < len(requests):
            self._look()
            now = self.clock.now()
            self._come_back(waiting, sent, now)
            answers |= self._give_up(waiting, sent, now, began)
            names = {self._nodes[name]: name for name in waiting if name in self._nodes}
            message_ids = self._send({node: requests[name] for node, name in names.items()}, LATE * self.timeout, False)
            for node, message_id in message_ids.items():
                name = names[node]
                del waiting[name]
                sends[name] += 1
                sent[message_id] = _Sent(name, node, self._process(node), what, began + self.timeout, now)
            for name, answer in self._receive(sent).items():
                if answer.data is None and sends[name] <= RESENDS:
                    waiting[name] = self.clock.now()  # to receive may have taken minutes
                else:
                    answers[name] = answer
            if len(answers) < len(requests):
                self._pause(began, now)
        missing = {name for name in requests if answers[name].reason.startswith(AWAY) and name not in self._nodes}
        self._gone = (self._gone - set(requests)) | missing
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
            other = self._nodes.get(each.name, each.node) != each.node or self._process(each.node) != each.since
            if other and self._invited(each.name):
                del sent[message_id]
                waiting[each.name] = now

    def _give_up(
        self, waiting: dict[str, float], sent: dict[str, _Sent], now: float, began: float
    ) -> dict[str, Answer]:
        """Give up sites that are away for too long, have had all their time, or may not come in any more."""
        given: dict[str, Answer] = {}
        for name in [each for each in waiting if not self._invited(each)]:
            del waiting[name]
            given[name] = Answer(None, NO_KEY)
        for name, since in list(waiting.items()):
            if "nodes" in self._cut:  # it is the server that is not connected
                waiting[name] = since = now
            if now - since > self.absence or now - began > self.timeout:
                del waiting[name]
                given[name] = Answer(None, f"{AWAY} {min(now - since, self.absence):.0f} s")
        for message_id, each in list(sent.items()):
            each.seen = now if each.node in self._connected else each.seen
            reason = f"it did not answer within {self.timeout:g} s" if now > each.end else ""
            if now - each.seen > self.absence:
                reason = f"{AWAY} {now - each.seen:.0f} s"
            if not self._invited(each.name):
                reason = NO_KEY
            if reason:
                each.end = now
                self._late[message_id] = sent.pop(message_id)
                given[each.name] = Answer(None, reason)
        return given

    def _look(self) -> None:
        """Ask new nodes to join, and forget those that are gone."""
        now = self.clock.now()
        if now - self._looked < (LOOK if len(self._nodes) == len(self.terms.sites) else HASTE):
            return
        self._looked = now
        try:
            nodes = set(self.post.nodes())
        except ConnectionError as error:
            self._lost("nodes", error)
            return
        self._found("nodes")
        self._check_keys()
        nodes = self._connected = self._known(nodes)
        for name, node in list(self._nodes.items()):
            if node not in nodes:
                del self._nodes[name]
                self.say(f"{name} is no longer connected")
        known = set(self._nodes.values())
        self._asked = {node: when for node, when in self._asked.items() if node in nodes}
        self._older = {node: name for node, name in self._older.items() if node in nodes}
        # Two nodes of one name, asked in turn, would take the site from each other for ever.
        known |= {node for node, name in self._older.items() if name in self._nodes}
        new = [node for node in sorted(nodes - known) if now - self._asked.get(node, -1e9) > AGAIN]
        for node, message_id in self._send(dict.fromkeys(new, self._offer), self.timeout, True).items():
            self._offers[message_id] = node
            self._asked[node] = now

    def _check_keys(self) -> None:
        """Forget sites whose keys were removed, and have those that have started again join again."""
        self._holders = self.post.holders()
        for name, node in list(self._nodes.items()):
            if not self._may(node, name):
                del self._nodes[name]
                self.say(f"{name} is not listened to any more: its key was removed")
            elif self._process(node) != self._since[name]:  # it may have other images now
                del self._nodes[name]
                self._asked.pop(node, None)

    def _known(self, nodes: set[int]) -> set[int]:
        """Return the nodes that have the key of a site, all where sites have no keys; the others are named once."""
        if self._holders is None:
            return nodes
        for node in sorted(nodes - self._holders.keys()):
            self._tell(node, f"node {node} has no key of a site that may come in: it is not asked to join")
        return nodes & self._holders.keys()

    def _may(self, node: int, name: str) -> bool:
        """Say whether a node may speak for a site."""
        return self._holders is None or (node in self._holders and self._holders[node].name == name)

    def _invited(self, name: str) -> bool:
        """Say whether any node may speak for a site."""
        return self._holders is None or any(holder.name == name for holder in self._holders.values())

    def _process(self, node: int) -> str:
        """Return when the process that is behind a node connected, nothing where that is not known."""
        return self._holders[node].since if self._holders is not None and node in self._holders else ""

    def _send(self, mail: Mapping[int, bytes], seconds: float, asks: bool) -> Mapping[int, str]:
        if not mail:
            return {}
        try:
            message_ids = self.post.send(mail, seconds, asks)
        except ConnectionError as error:
            self._lost("send", error)
            return {}
        self._found("send")
        return message_ids

    def _receive(self, sent: dict[str, _Sent]) -> dict[str, Answer]:
        """Take in what has come, and return the answers to requests; one that is late is named and let go."""
        try:
            replies = self.post.collect([*sent, *self._offers, *self._late])
        except ConnectionError as error:
            self._lost("collect", error)
            return {}
        self._found("collect")
        self._check_keys()
        found: dict[str, Answer] = {}
        for message_id, data, problem in replies:
            if message_id in self._offers:
                self._join(self._offers.pop(message_id), data)
            elif message_id in self._late:
                self._let_go(self._late.pop(message_id), data)
            elif message_id in sent:
                each = sent.pop(message_id)
                if not self._may(each.node, each.name):
                    self._forget(each, "")
                    data, problem = None, NO_KEY
                elif data is None:
                    self._forget(each, problem)
                elif _unknown(data):
                    self._forget(each, "")
                    data, problem = None, "it had to join again"
                found[each.name] = Answer(data, problem)
        return found

    def _join(self, node: int, data: bytes | None) -> None:
        """Take in what a node answered to an offer."""
        if data is None:
            return
        try:
            said = read(data, Joined, Refusal)
        except Malformed as error:
            self._tell(node, f"a site answered what cannot be read: {error}")
            return
        if isinstance(said, Refusal):
            self._tell(node, f"a site does not join: {said.reason[:500]}")
            return
        if said.federation != self.terms.hash or said.name not in self.terms.sites:
            self._tell(node, f"a site that calls itself {said.name[:64]!r} is none of this federation")
            return
        if not self._may(node, said.name):
            holder = (self._holders or {}).get(node)
            whose = f"the site with the key of {holder.name}" if holder else "a site without a key"
            self._tell(node, f"{whose} calls itself {said.name!r}: it does not join under a name that is not its key's")
            return
        other, before = self._nodes.get(said.name), self.joined.get(said.name)
        self._nodes[said.name], self._since[said.name] = node, self._process(node)
        self.joined[said.name] = said
        if other == node and before == said:  # it was asked more than once before it could answer
            return
        self._older.pop(node, None)
        if other is not None and other != node:
            self._older[other] = said.name
        back = " again" if other is not None and other != node else ""
        self.say(f"{said.name} is there{back}: {said.labeled:,} images with a label, {said.unlabeled:,} without")

    def _tell(self, node: int, words: str) -> None:
        if (node, words) not in self._told:
            self._told.add((node, words))
            self.say(words)

    def _let_go(self, each: _Sent, data: bytes | None) -> None:
        if data is not None:
            late = self.clock.now() - each.end
            self.say(f"{each.name} answered {each.what} {late:.0f} s too late: discarded")

    def _forget(self, each: _Sent, problem: str) -> None:
        """Forget the node of a site that did not answer: it is asked to join before it is asked anything else."""
        if self._nodes.get(each.name) == each.node:
            del self._nodes[each.name]
        self._asked.pop(each.node, None)
        if problem:
            self.say(f"{each.name} did not answer {each.what}: {problem}")

    def _lost(self, way: str, error: ConnectionError) -> None:
        if not self._cut:
            self.say(f"the connection to the sites is lost ({error}); waiting for it")
        self._cut.add(way)

    def _found(self, way: str) -> None:
        if self._cut == {way}:
            self.say("the connection to the sites is there again")
        self._cut.discard(way)
