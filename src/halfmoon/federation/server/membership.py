"""Who is there: names instead of nodes, keys, and sites that come back.

Nodes have random numbers, which change when a site starts again. A new node is asked to join, and known by the name
that it answers with.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from halfmoon.federation.protocol.messages import Joined, Malformed, Offer, Refusal, read, write
from halfmoon.federation.protocol.terms import Terms
from halfmoon.federation.server.transport import Clock, Connection, NodeIdentity

LOOK, HASTE = 2.0, 0.5
"""Seconds between two looks for new sites, and where some are missing."""

AGAIN = 30.0
"""Seconds after which a node that would not join, or did not answer, is asked once more."""


class Membership:
    """The sites of `terms` that have joined, as far as they are connected.

    `timeout` is how many seconds a node may take to answer an offer. `say` hears what people should know.
    """

    def __init__(
        self, connection: Connection, terms: Terms, version: str, timeout: float, say: Callable[[str], None],
        clock: Clock,
    ) -> None:  # fmt: skip
        self.connection, self.terms, self.timeout, self.say, self.clock = connection, terms, timeout, say, clock
        self.joined: dict[str, Joined] = {}
        """What the sites said when they joined, also those that are gone."""
        self.nodes: dict[str, int] = {}
        """The node of each site that is connected."""
        self.connected: set[int] = set()
        """The nodes at the last look, joined or not."""
        self.offers: dict[str, int] = {}
        """The nodes that were asked to join and have not answered, by ticket."""
        self.told: set[tuple[int, str]] = set()
        """Refusals that were said, with their nodes."""
        self._offer = write(Offer(version, terms.text))
        self._holders: Mapping[int, NodeIdentity] | None = None  # whose key each node has, where sites have keys
        self._since: dict[str, str] = {}  # when the process that joined had connected
        self._asked: dict[int, float] = {}  # when a node was last asked to join
        self._older: dict[int, str] = {}  # nodes of sites that came again as another one
        self._looked = -1e9

    @property
    def complete(self) -> bool:
        """Whether every site is connected."""
        return len(self.nodes) == len(self.terms.sites)

    def look(self) -> None:
        """Ask new nodes to join, and forget those that are gone."""
        now = self.clock.now()
        if now - self._looked < (LOOK if self.complete else HASTE):
            return
        self._looked = now
        nodes = self.connection.nodes()
        if nodes is None:
            return
        self.check_keys()
        nodes = self.connected = self._known(nodes)
        for name, node in list(self.nodes.items()):
            if node not in nodes:
                del self.nodes[name]
                self.say(f"{name} is no longer connected")
        known = set(self.nodes.values())
        self._asked = {node: when for node, when in self._asked.items() if node in nodes}
        self._older = {node: name for node, name in self._older.items() if node in nodes}
        # Two nodes of one name, asked in turn, would take the site from each other for ever.
        known |= {node for node, name in self._older.items() if name in self.nodes}
        new = [node for node in sorted(nodes - known) if now - self._asked.get(node, -1e9) > AGAIN]
        for node, message_id in self.connection.send(dict.fromkeys(new, self._offer), self.timeout, True).items():
            self.offers[message_id] = node
            self._asked[node] = now

    def check_keys(self) -> None:
        """Forget sites whose keys were removed, and have those that have started again join again."""
        self._holders = self.connection.post.holders()
        for name, node in list(self.nodes.items()):
            if not self.may(node, name):
                del self.nodes[name]
                self.say(f"{name} is not listened to any more: its key was removed")
            elif self.process(node) != self._since[name]:  # it may have other images now
                del self.nodes[name]
                self._asked.pop(node, None)

    def _known(self, nodes: set[int]) -> set[int]:
        """Return the nodes that have the key of a site, all where sites have no keys; the others are named once."""
        if self._holders is None:
            return nodes
        for node in sorted(nodes - self._holders.keys()):
            self._tell(node, f"node {node} has no key of a site that may come in: it is not asked to join")
        return nodes & self._holders.keys()

    def may(self, node: int, name: str) -> bool:
        """Say whether a node may speak for a site."""
        return self._holders is None or (node in self._holders and self._holders[node].name == name)

    def invited(self, name: str) -> bool:
        """Say whether any node may speak for a site."""
        return self._holders is None or any(holder.name == name for holder in self._holders.values())

    def process(self, node: int) -> str:
        """Return when the process that is behind a node connected, nothing where that is not known."""
        return self._holders[node].since if self._holders is not None and node in self._holders else ""

    def forget(self, name: str, node: int) -> None:
        """Forget the node of a site that did not answer: it is asked to join before it is asked anything else."""
        if self.nodes.get(name) == node:
            del self.nodes[name]
        self._asked.pop(node, None)

    def join(self, node: int, data: bytes | None) -> None:
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
        if not self.may(node, said.name):
            holder = (self._holders or {}).get(node)
            whose = f"the site with the key of {holder.name}" if holder else "a site without a key"
            self._tell(node, f"{whose} calls itself {said.name!r}: it does not join under a name that is not its key's")
            return
        other, before = self.nodes.get(said.name), self.joined.get(said.name)
        self.nodes[said.name], self._since[said.name] = node, self.process(node)
        self.joined[said.name] = said
        if other == node and before == said:  # it was asked more than once before it could answer
            return
        self._older.pop(node, None)
        if other is not None and other != node:
            self._older[other] = said.name
        back = " again" if other is not None and other != node else ""
        self.say(f"{said.name} is there{back}: {said.labeled:,} images with a label, {said.unlabeled:,} without")

    def _tell(self, node: int, words: str) -> None:
        if (node, words) not in self.told:
            self.told.add((node, words))
            self.say(words)
