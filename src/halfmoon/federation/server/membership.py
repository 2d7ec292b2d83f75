"""The sites that take part: names instead of nodes, keys, and sites that come back.

Nodes have random numbers, which change when a site starts again. A new node is asked to join, and names its site.
"""

from collections.abc import Callable, Mapping

from halfmoon.federation.protocol.messages import Acceptance, Malformed, Offer, Refusal, read, write
from halfmoon.federation.protocol.terms import Terms
from halfmoon.federation.server.transport import Clock, Connection, NodeIdentity

PERIOD, HASTE = 2.0, 0.5
"""Seconds between two polls for new sites, and where some are missing."""

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
        self.acceptances: dict[str, Acceptance] = {}
        """The messages by which sites joined, also of those that are gone."""
        self.nodes: dict[str, int] = {}
        """The node of each site that is connected."""
        self.connected: set[int] = set()
        """The nodes at the last poll, whether they have joined or not."""
        self.offers: dict[str, int] = {}
        """The nodes that were asked to join and have not answered, by ticket."""
        self.warnings: set[tuple[int, str]] = set()
        """Faults of nodes that the log has."""
        self._offer = write(Offer(version, terms.text))
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
        new = [node for node in sorted(nodes - members) if now - self._offer_times.get(node, -1e9) > AGAIN]
        for node, message_id in self.connection.send(dict.fromkeys(new, self._offer), self.timeout, True).items():
            self.offers[message_id] = node
            self._offer_times[node] = now

    def check_keys(self) -> None:
        """Forget sites whose keys were removed, and have those that have started again join again."""
        self._holders = self.connection.post.holders()
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
            answer = read(data, Acceptance, Refusal)
        except Malformed as error:
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
