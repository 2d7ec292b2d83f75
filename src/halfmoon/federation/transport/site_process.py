"""`halfmoon site join`: run the node of a site, restart it until the federation ends, and show the site's events."""

import os
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from halfmoon.config.schema import SITE_NAME
from halfmoon.core.errors import UserError
from halfmoon.federation.protocol.bundle import APPS
from halfmoon.federation.protocol.log import TermsSummary
from halfmoon.federation.site import consent
from halfmoon.federation.site.consent import TERMS_CHOICE
from halfmoon.federation.transport.contact import Address, ServerUnreachable, check_server, tls_context
from halfmoon.federation.transport.internals import (
    MESSAGE_RECEIVED,
    REASONS,
    REPLY_SENT,
    SERVER_LOST,
    SERVER_REACHED,
    UNKNOWN_KEY,
    load_private_key,
)
from halfmoon.federation.transport.processes import (
    NODE_FILE,
    SUPERNODE,
    ProcessFolder,
    exclusive,
    require_flower,
    stop_process,
)
from halfmoon.storage import atomic_io
from halfmoon.storage.events import SITE_LOG, EventLog, EventRecorder, EventTail, Tail

POLL_SECONDS = 0.2
"""Time between two polls of processes and events."""

RECONNECT_SECONDS = 1.0
"""Time between two calls of a server that does not reply."""

STABLE_SECONDS = 30.0
"""Time after which a node counts as working, so that the next restart is fast."""

ADMISSION_SECONDS = 10.0
"""Time in which a server that has just started may still have to register its sites' keys."""

MAX_PAUSE_SECONDS = 60.0
"""Longest pause before a node that has died is restarted."""

COMPLETE_SECONDS = 3.0
"""Time from a site's last reply to its end, in which the server fetches the reply."""

INCOMPLETE_SECONDS = 8.0
"""Time to the end of a site whose node has not logged that the last reply was sent."""

MAX_LOG_LINES = 200
"""Number of lines at the end of a node's log in which the reason of its end is searched."""

QUESTION = "Take part? [y/N] "


class Declined(UserError):
    """The people of a site do not consent."""


class SiteFinished(UserError):
    """The end of a site's participation: `code` is 0 if the federation is finished, 1 if the site can never join it."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code = code


class Prompt(Protocol):
    """A person at a terminal, who is asked a question and may reply later."""

    def ask(self, question: str) -> None:
        """Show a question."""
        ...

    def answer(self) -> bool | None:
        """Return True for yes, False for no, and None before the person has replied."""
        ...


@dataclass(frozen=True)
class SiteOptions:
    """Options of a site that joins a federation.

    Attributes:
        server: the server.
        name: name of the site.
        folder: its images.
        images: the number of images.
        labeled: the number of labeled ones.
        state_folder: the folder for files that the site writes.
        ca: certificate of the authority that signed the server's; None for a plain connection.
        insecure: whether a plain connection to another machine is allowed.
        key: the site's private key.
        device: where to compute.
        tests: folder of test images.
        apps: the ServerApp and the ClientApp of the bundle.
        terms: accepted terms, as in `halfmoon.federation.site.consent.Consent`.
        methods: accepted methods, as in `Consent`.
        trusted: plugins that may be imported.
        weights: the site's copies of pretrained weights that a federation starts from.
        validations: folder of images by which the server chooses the best round.
        site_keys: file with the keys of all sites, for secure sums.
        all: whether to show every option of the terms, not ten lines.
        skip_unreadable: whether to leave out any number of images that cannot be read.

    Raises:
        UserError: the options contradict each other, or a file is missing.
    """

    server: Address
    name: str
    folder: Path
    images: int
    labeled: int
    state_folder: Path
    ca: Path | None = None
    insecure: bool = False
    key: Path | None = None
    device: str = "auto"
    tests: Path | None = None
    apps: tuple[str, str] = APPS
    terms: str = ""
    methods: tuple[str, ...] = ()
    trusted: tuple[str, ...] = ()
    weights: tuple[Path, ...] = ()
    validations: Path | None = None
    site_keys: Path | None = None
    all: bool = False
    skip_unreadable: bool = False

    def __post_init__(self) -> None:
        """Check the options of a site before anything is started; raise UserError for the first mistake."""
        if not SITE_NAME.fullmatch(self.name):
            raise UserError(
                f"--name is {self.name!r}: use up to 64 letters, digits, dots, dashes and underscores, of which the "
                "first is a letter or a digit."
            )
        self._check_encryption()
        if self.site_keys is not None:
            from halfmoon.federation.site.site_keys import read_keys  # imports torch, which is slow

            read_keys(self.site_keys)
        if self.terms and not TERMS_CHOICE.fullmatch(self.terms):
            raise UserError(
                f"--terms is {self.terms!r}: it must be the hash of the terms (8 to 64 digits of 0-9 and a-f, see "
                "halfmoon site terms), or any."
            )

    def _check_encryption(self) -> None:
        """Check that the connection is encrypted, unless it is allowed not to be, and that the site's key is a file."""
        if self.ca is not None and self.insecure:
            raise UserError("--insecure and --ca contradict each other; leave one of them out.")
        if self.insecure and self.server.is_loopback:
            raise UserError(f"--insecure is for a server on another machine, not for {self.server}: leave it out.")
        if self.ca is not None:
            tls_context(self.ca)
        elif not self.insecure and not self.server.is_loopback:
            raise UserError(
                f"nothing on the way to {self.server} would be encrypted: give --ca FILE, which the server's people "
                "have, or --insecure where the network itself is safe."
            )
        if self.key is not None and self.ca is None:
            raise UserError("--key needs --ca: a server knows sites by their keys over TLS only.")
        if self.key is not None and not self.key.is_file():
            reason = "this is a folder; give the file of the key" if self.key.is_dir() else "there is no such file"
            raise UserError(f"--key {self.key}: {reason}.")

    @property
    def processes(self) -> ProcessFolder:
        """The folder of the site's processes."""
        return ProcessFolder(self.state_folder / "flower")


def node_options(site: SiteOptions) -> dict[str, Any]:
    """Collect the options of the site's node process as JSON values; they are never sent to the server.

    Returns:
        {"server", "ca", "key", "apps"} for the connection, and "config", the options of the app that replies to messages.
        Options that are not set are left out of "config".
    """
    # Flower's configuration of a node has no lists, so these are joined.
    texts = {
        "name": site.name,
        "device": site.device,
        "terms": site.terms,
        "methods": " ".join(site.methods),
        "trusted": " ".join(site.trusted),
        "skip-unreadable": "yes" if site.skip_unreadable else "",
        "weights": os.pathsep.join(str(path.absolute()) for path in site.weights),
    }
    paths = {
        "tests": site.tests,
        "validations": site.validations,
        "key": site.key,
        "site-keys": site.site_keys,
        "folder": site.folder,
        "home": site.state_folder,
    }
    config = {name: text for name, text in texts.items() if text}
    config |= {name: str(path.absolute()) for name, path in paths.items() if path is not None}
    return {
        "server": str(site.server),
        "ca": None if site.ca is None else str(site.ca.absolute()),
        "key": None if site.key is None else str(site.key.absolute()),
        "apps": list(site.apps),
        "config": config,
    }


def join_federation(site: SiteOptions, display: EventRecorder, person: Prompt | None = None) -> None:
    """Take part in a federation as a site, until its end or an interrupt, and end all processes that were started.

    Args:
        site: the options.
        display: shows the events of the site's log on the terminal.
        person: decides about the terms; None if there is no terminal.

    Raises:
        Declined: the person does not consent.
        SiteFinished: the participation is over.
        UserError: no connection to the server is possible, or the site has joined in another process.
    """
    require_flower()
    if site.key is not None:
        load_private_key(site.key)
    folder = site.processes.folder
    conflict = f"{site.state_folder} is that of a site which takes part already; end that one first."
    with exclusive(folder / "join.lock", conflict):
        site.processes.prepare()
        site.processes.kill_all()  # processes of an earlier command that was killed
        atomic_io.write_atomically(folder / NODE_FILE, atomic_io.json_line(node_options(site)))
        consent.remove_pending(site.state_folder)  # offers of another server, or of earlier terms
        site.processes.log(SUPERNODE).write_bytes(b"")
        tail = EventTail(site.state_folder)
        try:
            _SiteNode(site, tail, display, person).run_forever()
        finally:
            for event in tail.read_events():
                display.record(event.name, event.line, **event.fields)


class _SiteNode:
    """The node of a site that takes part, and the state of its connection."""

    def __init__(self, site: SiteOptions, tail: EventTail, display: EventRecorder, person: Prompt | None) -> None:
        """Prepare to run and watch the node, the process of a site that exchanges messages with the server.

        Args:
            site: the options.
            tail: reads the events that the node adds to the site's log.
            display: shows events on the terminal.
            person: decides about the terms; None if there is no terminal.
        """
        self.site = site
        self.tail = tail
        self.display = display
        self.person = person
        self.processes = site.processes
        self.log = EventLog(site.state_folder / SITE_LOG)
        self.node: subprocess.Popen[bytes] | None = None
        self.pause = RECONNECT_SECONDS
        self.lost = False  # whether the server does not reply
        # Set when the server replies after a loss: until then a server that has just started may not know the site's key yet.
        self.admission_deadline = 0.0
        # Set by `_finish` at the end of the participation: whether the last reply is sent, and since when.
        self.over: tuple[bool, float] | None = None
        self.offer: TermsSummary | None = None  # shown terms, which wait for consent

    def run_forever(self) -> None:
        """Run the node of the site, and restart it whenever it ends, until an exception ends the participation."""
        site = self.site
        self._record(f"{site.name} ({site.images:,} images, {site.labeled:,} labeled) joins {site.server}")
        is_first_connection = True
        try:
            while True:
                self._wait_for_server(strict=is_first_connection)
                is_first_connection = False
                self._run_node()
        finally:
            stop_process(self.node)
            self.processes.kill_all()

    def _wait_for_server(self, strict: bool) -> None:
        """Wait until the server accepts connections.

        Args:
            strict: whether to raise the UserError of a server with which no connection is possible, as at the start,
                where it is a mistake in the options. Later it may be a server that is being restarted.
        """
        while True:
            try:
                check_server(self.site.server, self.site.ca)
                break
            except ServerUnreachable as error:
                text = f"{error}: waiting for it (Ctrl-C ends this)"
            except UserError as error:
                if strict:
                    raise
                text = f"{error} Trying again."
            # Log it once, not every second.
            if not self.lost:
                self._record(text)
            self.lost = True
            self._show()
            time.sleep(RECONNECT_SECONDS)
        self._connected()

    def _run_node(self) -> None:
        """Run the node process, which polls the server for messages, until it ends; then pause before a restart.

        While it runs, print its events, ask the person about new terms, and watch for the end of the participation.

        Raises:
            SiteFinished: the participation is over.
            Declined: the person does not consent.
        """
        log = Tail(self.processes.log(SUPERNODE))
        last_lines: list[str] = []
        start = time.monotonic()
        self.node = self.processes.start(SUPERNODE, [])
        while self.node.poll() is None:
            self._show()
            self._handle_offer()
            # The end is read before the log, so that the log contains the message that caused the end. The node logs a
            # line for each message that it receives and for each reply that it sends.
            end = consent.load_end(self.site.state_folder)
            last_lines = [*last_lines, *self._read_node_log(log)][-MAX_LOG_LINES:]
            if end is not None:
                transfers = [line for line in last_lines if line in (MESSAGE_RECEIVED, REPLY_SENT)]
                reply_is_sent = bool(transfers) and transfers[-1] == REPLY_SENT
                self._finish(end, reply_is_sent)
            time.sleep(POLL_SECONDS)
        text = "\n".join([*last_lines, *log.read_lines()])
        # A server that has just restarted registers the sites' keys after a while. Until then it refuses them.
        if UNKNOWN_KEY in text and time.monotonic() < self.admission_deadline:
            time.sleep(RECONNECT_SECONDS)
            return
        self._pause_before_restart(text, log.path, run_seconds=time.monotonic() - start)

    def _pause_before_restart(self, log_text: str, log_path: Path, run_seconds: float) -> None:
        """Log why the node ended, and sleep: longer after each node that ended soon after its start.

        Args:
            log_text: the end of the node's log, in which Flower writes the reason.
            log_path: the file of the log.
            run_seconds: how long the node ran.
        """
        if run_seconds > STABLE_SECONDS:
            self.pause = RECONNECT_SECONDS
        else:
            self.pause = min(2 * self.pause, MAX_PAUSE_SECONDS)
        reason = next((meaning for text, meaning in REASONS.items() if text in log_text), f"see {log_path}")
        self._record(f"the connection ended: {reason}; trying again in {self.pause:.0f} s")
        self._show()
        time.sleep(self.pause)

    def _finish(self, end: consent.ParticipationEnd, reply_is_sent: bool) -> None:
        """Raise `SiteFinished` once the last reply is sent and the server has had time to fetch it.

        It is called repeatedly from the end on. It waits longer for a reply that the node has not logged as sent, and
        starts over once that changes.

        Args:
            end: the exit code, and the reason for people.
            reply_is_sent: whether the node has logged that it sent the last reply.
        """
        if self.over is None or self.over[0] != reply_is_sent:
            self.over = (reply_is_sent, time.monotonic())
        _, since = self.over
        wait_seconds = COMPLETE_SECONDS if reply_is_sent else INCOMPLETE_SECONDS
        if time.monotonic() - since > wait_seconds:
            self._show()
            raise SiteFinished(end.code, end.reason)

    def _read_node_log(self, log: Tail) -> list[str]:
        """Read new lines of the node's log, and record when it loses its server and when it reconnects."""
        lines = log.read_lines()
        for line in lines:
            if SERVER_LOST in line and not self.lost:
                self.lost = True
                self._record(f"{self.site.server} does not answer any more: waiting for it (Ctrl-C ends this)")
            elif SERVER_REACHED in line:
                self._connected()
        return lines

    def _connected(self) -> None:
        if self.lost:
            self.lost = False
            self.admission_deadline = time.monotonic() + ADMISSION_SECONDS
            self._record(f"{self.site.server} answers")

    def _record(self, text: str) -> None:
        """Record an event of the connection. If the disk is full it is only shown, and the site continues."""
        try:
            self.log.record("connection", text)
        except OSError:
            self.display.record("connection", text)

    def _show(self) -> None:
        events = self.tail.read_events()
        for event in events:
            self.display.record(event.name, event.line, **event.fields)
        if events:
            self._ask()  # the lines hide the question, so it is repeated

    def _handle_offer(self) -> None:
        """Show terms that a server has offered, ask the person for consent, and store it, without waiting for a reply.

        It is called in a loop: one call shows the terms, and the person may reply before any later one. The node's
        process stores the offered terms in a file, which `save_agreement` deletes.

        Raises:
            Declined: the person does not consent.
        """
        offer = consent.load_offer(self.site.state_folder)
        if offer != self.offer:  # a new offer, or none any more
            self.offer = offer
            if offer is not None:
                self._show_offer(offer)
        if self.offer is None:
            return
        person = self._responder()
        reply = None if person is None else person.answer()  # None until the person has replied
        if reply is False:
            raise Declined(f"{self.site.name} does not take part on the terms {self.offer.hash[:8]}.")
        if reply is True:
            consent.save_agreement(self.site.state_folder, self.offer.hash)
            self._record(f"agreed to the terms {self.offer.hash}; the server asks again within half a minute")
            self.offer = None

    def _show_offer(self, offer: TermsSummary) -> None:
        """Show terms and ask for consent; the short version of the terms, unless all of them are to be shown."""
        self._show()
        show_all = self.site.all or not offer.brief
        for line in offer.format_lines() if show_all else offer.brief:
            self.display.record("terms", line)
        self._ask()

    def _responder(self) -> Prompt | None:
        """Return the person to ask; None without an offer, or if the terms were given on the command line."""
        return None if self.offer is None or self.site.terms else self.person

    def _ask(self) -> None:
        if person := self._responder():
            person.ask(QUESTION)
