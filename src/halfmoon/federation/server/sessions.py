"""Exchanges with the sites of a federation: timeouts, late replies, reconnecting sites.

This module does not read requests. `Membership` tracks which sites are connected.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

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
from halfmoon.federation.server.connection import Clock, Connection, NodeIdentity, SiteReply, Spool, Transport
from halfmoon.storage.events import EventRecorder

MIN_PAUSE_SECONDS = 0.1
"""Shortest pause between two polls for replies."""

MAX_PAUSE_SECONDS = 0.5
"""Longest pause between two polls for replies.

A poll costs Flower, and the processes on its machine, a hundredth of a second. A reply that takes a minute may be noticed
half a second late.
"""

PAUSE_SHARE = 0.1
"""Pause between two polls, as a share of the time spent waiting so far."""

TIMEOUTS_ALIVE = 2.0
"""How many timeouts a request stays valid. A reply within the second one is too late, but it is received and logged."""

NO_KEY = "its key was removed, or it never had one"
"""Reason why the server does not wait for a site, and does not use its reply."""

MAX_RESENDS = 3
"""How often a request is sent again in one exchange to a site whose process died."""

NOT_CONNECTED = "it was not connected for"
"""Beginning of the reason of a site that was not connected."""


@dataclass
class _Pending:
    """A request that was sent.

    Attributes:
        name: the site.
        node: its node.
        since: when the node's process connected, or "" if that is not known.
        description: description of the exchange for the log.
        end: when its timeout ends.
        last_contact: when the node was last seen connected.
    """

    name: str
    node: int
    since: str
    description: str
    end: float
    last_contact: float


def _has_not_joined(data: bytes) -> bool:
    """Check whether a reply is a refusal because the site has to join first, as after a restart."""
    try:
        return read_message(data, Refusal).kind == NOT_JOINED
    except MalformedMessage:
        return False


class ClientManager:
    """Sends requests to the connected sites of a federation and collects their replies, over an unreliable transport.

    Sites may connect late, disconnect, restart or reply too late.
    """

    def __init__(
        self,
        transport: Transport,
        terms: Terms,
        version: str,
        timeout: float,
        absence: float,
        log: EventRecorder,
        clock: Clock | None = None,
        spool: Spool | None = None,
    ) -> None:
        """Create a manager of the messages between the server and its sites, none of which has joined yet.

        Args:
            transport: carries the messages.
            terms: the configuration of the federation, which sites agree to.
            version: the server's version of halfmoon.
            timeout: seconds that a site may take for one reply.
            absence: seconds that a site may be disconnected during an exchange.
            log: receives events.
            clock: tells the time and sleeps; None for the real one.
            spool: stores replies on the disk until they are read; None keeps them in memory.
        """
        self.terms = terms
        self.timeout = timeout
        self.absence = absence
        self.log = log
        self.clock = clock or Clock()
        self.spool = spool
        self.connection = Connection(transport, log)
        self.members = Membership(self.connection, terms, version, timeout, log, self.clock)
        self._late: dict[str, _Pending] = {}  # requests whose timeout is over
        self._absent: set[str] = set()  # sites that were absent for a whole exchange and have not reconnected

    @property
    def acceptances(self) -> Mapping[str, Acceptance]:
        """The acceptances with which sites joined, by site."""
        return self.members.acceptances

    @property
    def connected_sites(self) -> list[str]:
        """The connected sites that have joined, in the order of the terms."""
        return [name for name in self.terms.sites if name in self.members.nodes]

    def poll(self) -> list[str]:
        """Update which sites are connected, receive messages, and return the connected sites."""
        self.members.poll()
        self._receive(pending={})
        return self.connected_sites

    @property
    def _transport_fails(self) -> bool:
        """True while Flower cannot be asked which nodes (sites' processes) are connected."""
        return "nodes" in self.connection.failing

    def wait_for_sites(self, needed: int, patience: float, grace: float | None = None) -> None:
        """Wait until enough sites have joined, and a little longer for the others.

        Args:
            needed: the number of sites.
            patience: seconds to wait.
            grace: seconds to wait for further sites even if enough have joined, from the start of this call; None for
                `absence`.

        Raises:
            UserError: if too few sites have joined after `patience` seconds.
        """
        if grace is None:
            grace = self.absence
        start = self.clock.now()
        last_log = -math.inf
        last_missing = ""
        total = len(self.terms.sites)
        while self._transport_fails or not self.members.complete:
            self.poll()
            now = self.clock.now()
            # While the transport fails, no site can be reached, although the list of members is not empty.
            joined_count = 0 if self._transport_fails else len(self.members.nodes)
            enough = joined_count >= needed
            if enough and now - start > grace:
                break
            if not enough and now - start > patience:
                faults = sorted({text for _, text in self.members.warnings})
                why = f" ({'; '.join(faults)})" if faults else ""
                raise UserError(f"{joined_count} of {needed} sites that are needed have joined{why}.")
            missing = ", ".join(name for name in self.terms.sites if name not in self.members.nodes)
            if not enough and (now - last_log > RETRY_SECONDS or missing != last_missing):
                detail = f"{joined_count} of {total} are there, {needed} needed; missing: {missing}"
                self.log.record("waiting_for_sites", f"waiting for sites: {detail}", whom="sites", detail=detail)
                last_log = now
                last_missing = missing
            self._pause(start, now)
        if last_missing:
            joined_count = len(self.members.nodes)
            text = f"{joined_count} of {total} sites are there"
            self.log.record("sites_ready", text, joined=joined_count, total=total)

    def exchange(self, requests: Mapping[str, bytes], description: str) -> dict[str, SiteReply]:
        """Send each site its request and wait for all responses.

        A site that disconnects and returns within its timeout gets the same request once more.

        Args:
            requests: serialized requests by site.
            description: description of the exchange for the log.

        Returns:
            The responses, in the order of the requests.
        """
        start = self.clock.now()
        logged_names = ""
        # Sites whose request is not sent yet, and since when the server waits for them to connect. For a site that was
        # absent during the whole last exchange, this is minus infinity: it gets its request if it is connected at once,
        # and is given up otherwise. One absent site would else delay every round.
        waiting: dict[str, float] = {}
        for name in requests:
            is_still_absent = name in self._absent and name not in self.members.nodes
            waiting[name] = -math.inf if is_still_absent else start
        pending: dict[str, _Pending] = {}
        responses: dict[str, SiteReply] = {}
        send_count: dict[str, int] = dict.fromkeys(requests, 0)
        while len(responses) < len(requests):
            self.members.poll()
            now = self.clock.now()
            self._requeue_restarted(waiting, pending, now)
            responses |= self._expire(waiting, pending, now, start)
            self._send_waiting(requests, description, start, now, waiting, pending, send_count)
            for name, response in self._receive(pending).items():
                if not response.has_arrived and send_count[name] <= MAX_RESENDS:
                    # The request was lost: resend it. The time is not `now`, because receiving may take minutes.
                    waiting[name] = self.clock.now()
                else:
                    responses[name] = response
            if len(responses) < len(requests):
                open_names = ", ".join(name for name in requests if name not in responses)
                if responses and now - start > RETRY_SECONDS and open_names != logged_names:
                    logged_names = open_names
                    text = f"waiting for {open_names}: {description}"
                    self.log.record("waiting_for_replies", text, whom=open_names, detail=description)
                self._pause(start, now)
        # Sites that did not get a request in this exchange remain marked as absent or not.
        absent = {name for name in requests if responses[name].problem.startswith(NOT_CONNECTED)}
        self._absent = (self._absent - set(requests)) | (absent - self.members.nodes.keys())
        return {name: responses[name] for name in requests}

    def _send_waiting(
        self,
        requests: Mapping[str, bytes],
        description: str,
        start: float,
        now: float,
        waiting: dict[str, float],
        pending: dict[str, _Pending],
        send_count: dict[str, int],
    ) -> None:
        """Send the requests of waiting sites that are connected, and move them from `waiting` to `pending`.

        Args:
            requests: serialized requests by site.
            description: description of the exchange for the log.
            start: when the exchange began, in seconds of the clock.
            now: the time.
            waiting: sites whose request is not sent, with the time since when the server waits for them to connect.
            pending: requests that were sent, by message id.
            send_count: how often each site was sent its request.
        """
        # The transport addresses nodes (Flower's ids of connected processes), not the names of sites.
        names_by_node = {self.members.nodes[name]: name for name in waiting if name in self.members.nodes}
        messages_by_node = {node: requests[name] for node, name in names_by_node.items()}
        # A reply after the timeout is still received, so that the log shows that the site is only slow.
        valid_seconds = TIMEOUTS_ALIVE * self.timeout
        message_ids = self.connection.send(messages_by_node, valid_seconds, is_offer=False)
        for node, message_id in message_ids.items():
            name = names_by_node[node]
            del waiting[name]
            send_count[name] += 1
            pending[message_id] = _Pending(
                name=name,
                node=node,
                since=self.members.process(node),  # by this time a restarted process of the node is recognized
                description=description,
                end=start + self.timeout,
                last_contact=now,
            )

    def _pause(self, start: float, poll_start: float) -> None:
        """Sleep until the next poll for replies: longer, the longer the server has waited already.

        Args:
            start: when the waiting began, in seconds of the clock.
            poll_start: when the last poll began.
        """
        now = self.clock.now()
        # A poll also costs the sites time, so the pause is at least as long as the poll, up to the limit.
        seconds = max(PAUSE_SHARE * (now - start), now - poll_start)
        self.clock.sleep(max(MIN_PAUSE_SECONDS, min(MAX_PAUSE_SECONDS, seconds)))

    def _requeue_restarted(self, waiting: dict[str, float], pending: dict[str, _Pending], now: float) -> None:
        """Find sites that restarted after they were sent a request, which is lost, and queue the request for them.

        A process of a node is identified by the time when it connected (`since`). The request of a site whose key was
        removed is not queued: `_expire` gives it up. Without access control the time is not known (""), and every site
        counts as having a key.

        Args:
            waiting: receives these sites, with the time since when they wait.
            pending: requests that were sent, by message id; lost ones are removed.
            now: the time.
        """
        for message_id, request in list(pending.items()):
            name = request.name
            # A site without a key joins as a new node after a restart. One with a key is the same node, but another
            # process of it is connected.
            moved = self.members.nodes.get(name, request.node) != request.node
            restarted = self.members.process(request.node) != request.since
            if (moved or restarted) and self.members.has_key(name):
                del pending[message_id]
                waiting[name] = now

    def _expire(
        self, waiting: dict[str, float], pending: dict[str, _Pending], now: float, start: float
    ) -> dict[str, SiteReply]:
        """Give up on sites that were disconnected for too long, exceeded the timeout, or lost their key.

        `absence` limits the seconds for which a site may be disconnected, `timeout` those until its reply, even if it
        is connected. A site loses its key, with which it may connect, if the server's operator removes it.

        Args:
            waiting: sites whose request is not sent, with the time since when the server waits for them to connect.
            pending: requests that were sent, by message id.
            now: the time.
            start: when the exchange began.

        Returns:
            Responses without data, with the reason, of the sites that were removed from `waiting` or `pending`.
        """
        responses: dict[str, SiteReply] = {}
        for name, since in list(waiting.items()):
            if not self.members.has_key(name):
                del waiting[name]
                responses[name] = SiteReply(None, NO_KEY)
                continue
            if self._transport_fails:
                # The server itself is disconnected, so absence does not count.
                waiting[name] = since = now
            if now - since > self.absence or now - start > self.timeout:
                del waiting[name]
                seconds = min(now - since, self.absence)
                responses[name] = SiteReply(None, f"{NOT_CONNECTED} {seconds:.0f} s")
        for message_id, request in list(pending.items()):
            if request.node in self.members.connected:
                request.last_contact = now
            absent_seconds = now - request.last_contact
            if not self.members.has_key(request.name):
                reason = NO_KEY
            elif absent_seconds > self.absence:
                reason = f"{NOT_CONNECTED} {absent_seconds:.0f} s"
            elif now > request.end:
                reason = f"it did not answer within {self.timeout:g} s"
            else:
                continue
            request.end = now
            # Its reply may still arrive. It is then received, so that it does not fill the transport, and discarded.
            self._late[message_id] = pending.pop(message_id)
            responses[request.name] = SiteReply(None, reason)
        return responses

    def _receive(self, pending: dict[str, _Pending]) -> dict[str, SiteReply]:
        """Receive the messages that have arrived: replies, acceptances of offers to join, and late replies.

        Sites that accept an offer join the federation, and late replies are discarded.

        Args:
            pending: requests that were sent, by message id; those with a reply are removed.

        Returns:
            The responses to pending requests, by site.
        """
        self.members.check_keys()  # removes sites whose key was withdrawn, so that none of their messages count
        responses: dict[str, SiteReply] = {}
        expected_ids = [*pending, *self.members.offers, *self._late]
        for reply in self.connection.collect(expected_ids):
            message_id = reply.message_id
            # Fetching the messages before this one may have taken minutes, in which a key may have been removed.
            self.members.check_keys()
            if message_id in self.members.offers:
                node = self.members.offers.pop(message_id)
                self.members.join(node, reply.data)
            elif message_id in self._late:
                self._discard_late(self._late.pop(message_id), reply.data)
            elif message_id in pending:
                request = pending.pop(message_id)
                responses[request.name] = self._accept_reply(request, reply)
        return responses

    def _discard_late(self, request: _Pending, data: bytes | None) -> None:
        """Log a reply that arrived after its timeout; without `data` there is no reply to log."""
        if data is not None:
            late_seconds = self.clock.now() - request.end
            text = f"{request.name} answered {request.description} {late_seconds:.0f} s too late: discarded"
            self.log.record("reply_late", text, site=request.name)

    def _accept_reply(self, request: _Pending, reply: SiteReply) -> SiteReply:
        """Check whether the reply of a site is to be read, and move it to the spool.

        A site whose reply cannot be used has to join a second time before it gets another request.

        Args:
            request: the request.
            reply: what the transport has received. A reply that is too large has empty data and a problem: the site is
                connected and need not join again, but its reply does not count.

        Returns:
            The reply, or one without data.
        """
        if not self.members.may_act_as(request.node, request.name):  # its key was removed or replaced
            self._forget_node(request, "")
            return SiteReply(None, NO_KEY)
        if reply.data is None:
            self._forget_node(request, reply.problem)
            return reply
        if _has_not_joined(reply.data):  # a refusal: after a restart the site does not know the federation any more
            self._forget_node(request, "")
            return SiteReply(None, "it had to join again")
        if self.spool is not None:
            self.spool.store(reply)
        return reply

    def _forget_node(self, request: _Pending, problem: str) -> None:
        """Remove the node of a site that did not reply to a request; a problem that is not "" is logged."""
        self.members.forget(request.name, request.node)
        if problem:
            text = f"{request.name} did not answer {request.description}: {problem}"
            self.log.record("reply_failed", text, site=request.name)


POLL_SECONDS = 2.0
"""Seconds between two polls for nodes when all sites are connected."""

JOIN_POLL_SECONDS = 0.5
"""Seconds between two polls for nodes when sites are missing."""

RETRY_SECONDS = 30.0
"""Seconds after which a node that did not join, or did not reply, gets another offer."""

MAX_REASON_LENGTH = 500
"""Characters of a site's refusal that are logged."""

MAX_NAME_LENGTH = 64
"""Characters of an unknown site name that are logged."""


class Membership:
    """Tracks the sites of a federation that have joined and are connected."""

    def __init__(
        self,
        connection: Connection,
        terms: Terms,
        version: str,
        timeout: float,
        log: EventRecorder,
        clock: Clock,
    ) -> None:
        """Prepare to offer the federation to all nodes that connect; no site has joined yet.

        Args:
            connection: carries the offers.
            terms: the configuration of the federation, which is offered.
            version: the server's version of halfmoon.
            timeout: seconds that an offer stays valid.
            log: receives events.
            clock: the time.
        """
        self.connection = connection
        self.terms = terms
        self.timeout = timeout
        self.log = log
        self.clock = clock
        self.acceptances: dict[str, Acceptance] = {}  # by site, also of sites that disconnected
        self.nodes: dict[str, int] = {}  # the node of each connected site that has joined
        self.connected: set[int] = set()  # all nodes at the last poll
        self.offers: dict[str, int] = {}  # nodes with an unanswered offer, by message id
        self.warnings: set[tuple[int, str]] = set()  # faults of nodes that were logged
        self._offer = write_message(Offer(version, terms.text))
        self._key_owners: Mapping[int, NodeIdentity] | None = None  # the site of each node; None: no access control
        self._since: dict[str, str] = {}  # when the process that joined had connected, by site
        self._offer_times: dict[int, float] = {}  # when a node last got an offer
        self._replaced_nodes: dict[int, str] = {}  # connected nodes of sites that have joined with a newer node
        self._last_poll = -math.inf

    @property
    def complete(self) -> bool:
        """True if all sites are connected."""
        return len(self.nodes) == len(self.terms.sites)

    def poll(self) -> None:
        """Ask the transport which nodes are connected, remove disconnected sites, and send offers to join to new nodes.

        Returns at once if the last poll is too recent.
        """
        now = self.clock.now()
        poll_interval = POLL_SECONDS if self.complete else JOIN_POLL_SECONDS
        if now - self._last_poll < poll_interval:
            return
        self._last_poll = now
        nodes = self.connection.nodes()
        if nodes is None:  # the transport fails at the moment
            return
        self.check_keys()
        nodes = self._with_keys(nodes)  # the others may not join
        self.connected = nodes
        for name, node in list(self.nodes.items()):
            if node not in nodes:
                del self.nodes[name]
                self.log.record("site_disconnected", f"{name} is no longer connected", site=name)
        self._offer_times = {node: when for node, when in self._offer_times.items() if node in nodes}
        self._replaced_nodes = {node: name for node, name in self._replaced_nodes.items() if node in nodes}
        self._send_offers(nodes, now)

    def _send_offers(self, nodes: set[int], now: float) -> None:
        """Send an offer to join to each connected node that has not joined, at most every `RETRY_SECONDS`.

        Args:
            nodes: the connected nodes that may join.
            now: the time.
        """
        without_offer = set(self.nodes.values())  # the nodes that have joined
        # A site that joined with a newer node has replaced its older one. The older one gets no offer while the newer
        # one is there: it would join and replace the newer one, which would join again, and so on.
        without_offer |= {node for node, name in self._replaced_nodes.items() if name in self.nodes}
        recipients = []
        for node in sorted(nodes - without_offer):
            if now - self._offer_times.get(node, -math.inf) > RETRY_SECONDS:
                recipients.append(node)
        message_ids = self.connection.send(dict.fromkeys(recipients, self._offer), self.timeout, is_offer=True)
        for node, message_id in message_ids.items():
            self.offers[message_id] = node
            self._offer_times[node] = now

    def check_keys(self) -> None:
        """Load which node uses the key of which site, and remove the sites that have to join once more.

        These are sites whose key was removed, and sites whose process restarted, possibly with other images. A restart
        is recognized by the time at which the node connected.
        """
        self._key_owners = self.connection.transport.key_owners()
        for name, node in list(self.nodes.items()):
            if not self.may_act_as(node, name):
                del self.nodes[name]
                text = f"{name} is not listened to any more: its key was removed"
                self.log.record("site_key_removed", text, site=name)
            elif self.process(node) != self._since[name]:
                del self.nodes[name]
                # The new process gets an offer at once.
                self._offer_times.pop(node, None)

    def _with_keys(self, nodes: set[int]) -> set[int]:
        """Select the nodes that use the key of a site; all nodes if sites have no keys. Other nodes are logged once."""
        if self._key_owners is None:
            return nodes
        for node in sorted(nodes - self._key_owners.keys()):
            self._warn(node, f"node {node} has no key of a site that may come in: it is not asked to join")
        return nodes & self._key_owners.keys()

    def may_act_as(self, node: int, name: str) -> bool:
        """Check whether a node uses the key of a site."""
        return self._key_owners is None or (node in self._key_owners and self._key_owners[node].name == name)

    def has_key(self, name: str) -> bool:
        """Check whether any node may act as a site."""
        return self._key_owners is None or any(owner.name == name for owner in self._key_owners.values())

    def process(self, node: int) -> str:
        """Return when the process of a node connected, or "" if that is not known."""
        if self._key_owners is None or node not in self._key_owners:
            return ""
        return self._key_owners[node].since

    def forget(self, name: str, node: int) -> None:
        """Remove the node of a site that did not answer: it gets an offer before any other message."""
        if self.nodes.get(name) == node:
            del self.nodes[name]
        self._offer_times.pop(node, None)

    def join(self, node: int, data: bytes | None) -> None:
        """Process a node's reply to an offer: it becomes a member, unless it refuses or must not use the site's name.

        Args:
            node: the node, which is Flower's id of a connected process.
            data: the serialized reply; None if there is none.
        """
        if data is None:
            return
        try:
            message = read_message(data, Acceptance, Refusal)
        except MalformedMessage as error:
            self._warn(node, f"a site sent a reply that cannot be read: {error}")
            return
        if isinstance(message, Refusal):
            owner = (self._key_owners or {}).get(node)
            self._warn(node, f"{owner.name if owner else 'a site'} does not join: {message.reason[:MAX_REASON_LENGTH]}")
            return
        name = message.name
        if message.federation != self.terms.hash or name not in self.terms.sites:
            self._warn(node, f"a site that calls itself {name[:MAX_NAME_LENGTH]!r} is none of this federation")
            return
        if not self.may_act_as(node, name):
            owner = (self._key_owners or {}).get(node)
            whose = f"the site with the key of {owner.name}" if owner else "a site without a key"
            self._warn(node, f"{whose} calls itself {name!r}: it does not join under a name that is not its key's")
            return
        self._add_member(node, message)

    def _add_member(self, node: int, acceptance: Acceptance) -> None:
        """Record the node and the image counts of a site that joins, and log it, unless the same is recorded already.

        Args:
            node: the site's node, which is Flower's id of its connected process.
            acceptance: its reply to the offer, with its name and image counts.
        """
        name = acceptance.name
        old_node = self.nodes.get(name)
        old_acceptance = self.acceptances.get(name)
        self.nodes[name] = node
        self._since[name] = self.process(node)
        self.acceptances[name] = acceptance
        if old_node == node and old_acceptance == acceptance:
            # It got several offers before it could reply to the first one.
            return
        # A site that joins from another node replaces the earlier one, which may still be connected. This node may
        # itself have been replaced before; now it is the newest.
        self._replaced_nodes.pop(node, None)
        again = ""
        if old_node is not None and old_node != node:
            self._replaced_nodes[old_node] = name
            again = " again"
        text = f"{name} is there{again}: {acceptance.labeled:,} images with a label, {acceptance.unlabeled:,} without"
        self.log.record("site_joined", text, site=name, labeled=acceptance.labeled, unlabeled=acceptance.unlabeled)

    def _warn(self, node: int, text: str) -> None:
        """Log a fault of a node once."""
        if (node, text) not in self.warnings:
            self.warnings.add((node, text))
            self.log.record("node_refused", text, node=node)
