"""`halfmoon site join`: the node of one site, kept alive until it is told to end; a log in plain words."""

import os
import subprocess
import time
from collections.abc import Callable
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
from halfmoon.federation.transport.node import NODE_FILE
from halfmoon.federation.transport.processes import SUPERNODE, ProcessFolder, exclusive, require_flower, stop_process
from halfmoon.storage import atomic_io
from halfmoon.storage.events import SITE_LOG, EventLog, EventTail, Tail

POLL_SECONDS = 0.2  # seconds between two looks at processes and logs
RECONNECT_SECONDS = 1.0  # seconds between two calls of a server that is not there
STEADY = 30.0  # seconds after which a node counts as one that works
ADMISSION_SECONDS = 10.0
"""Seconds in which a server that has just come up may still have to register its sites' keys."""
LONGEST_PAUSE = 60.0  # seconds of pause, at most, before a node that has died is started again

PARTING_SECONDS, LINGER_SECONDS = 3.0, 8.0
"""Seconds until a site whose part is over goes: after its last answer is sent, which its server has to see before it is
gone, and where its node does not say so."""

QUESTION = "Take part? [y/N] "


class Declined(UserError):
    """The people at a site said no."""


class SiteFinished(UserError):
    """A site's part that is over: `code` is 0 where the federation is finished, 1 where it can never take part."""

    def __init__(self, code: int, words: str) -> None:
        super().__init__(words)
        self.code = code


class Prompt(Protocol):
    """Somebody at a terminal."""

    def ask(self, question: str) -> None:
        """Show a question whose answer is waited for."""
        ...

    def answer(self) -> bool | None:
        """Return whether the answer is yes, None where there is none yet."""
        ...


@dataclass(frozen=True)
class SiteOptions:
    """How a site takes part: the server, its own name and folder, and the `home` of its images and its memory.

    `ca` signed the server's certificate; without it the connection is plain. `site_keys` is a file with the keys of all
    sites, for masked sums. `terms` and `methods` are those of `halfmoon.federation.site.consent.Consent`. Raise
    UserError where these do not fit.
    """

    server: Address
    name: str
    folder: Path
    images: int
    labeled: int
    home: Path
    ca: Path | None = None
    insecure: bool = False
    key: Path | None = None
    device: str = "auto"
    tests: Path | None = None
    apps: tuple[str, str] = APPS
    terms: str = ""
    methods: tuple[str, ...] = ()
    trusted: tuple[str, ...] = ()  # parts from outside halfmoon that may be loaded
    weights: tuple[Path, ...] = ()  # the site's copies of files of weights that a federation starts from
    validations: Path | None = None
    site_keys: Path | None = None
    all: bool = False  # whether every option of the terms is shown, not ten lines

    def __post_init__(self) -> None:
        if not SITE_NAME.fullmatch(self.name):
            raise UserError(
                f"--name is {self.name!r}: use up to 64 letters, digits, dots, dashes and underscores, of which the "
                "first is a letter or a digit."
            )
        if self.ca is not None and self.insecure:
            raise UserError("--insecure and --ca contradict each other; leave one of them out.")
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
            what = "this is a folder; give the file of the key" if self.key.is_dir() else "there is no such file"
            raise UserError(f"--key {self.key}: {what}.")
        if self.site_keys is not None:
            from halfmoon.federation.site.site_keys import read_keys  # slow to import: it brings torch

            read_keys(self.site_keys)
        if self.terms and not TERMS_CHOICE.fullmatch(self.terms):
            raise UserError(
                f"--terms is {self.terms!r}: it must be the hash of the terms (8 to 64 digits of 0-9 and a-f, see "
                "halfmoon site terms), or any."
            )

    @property
    def processes(self) -> ProcessFolder:
        return ProcessFolder(self.home / "flower")


def node_options(site: SiteOptions) -> dict[str, Any]:
    """Return all that the site's own processes are told; it stays on this machine."""
    texts = {"name": site.name, "device": site.device, "terms": site.terms}
    texts |= {"methods": " ".join(site.methods), "trusted": " ".join(site.trusted)}
    texts["weights"] = os.pathsep.join(str(path.absolute()) for path in site.weights)
    paths = {"tests": site.tests, "validations": site.validations, "key": site.key, "site-keys": site.site_keys}
    paths |= {"folder": site.folder, "home": site.home}
    config = {name: text for name, text in texts.items() if text}
    config |= {name: str(path.absolute()) for name, path in paths.items() if path is not None}
    ca, key = (None if path is None else str(path.absolute()) for path in (site.ca, site.key))
    return {"server": str(site.server), "ca": ca, "key": key, "apps": list(site.apps), "config": config}


def join_federation(site: SiteOptions, show: Callable[[str], None], person: Prompt | None = None) -> None:
    """Take part until interrupted, ask `person` about the terms, and leave no process.

    Raise `Declined` for a no, UserError where the server cannot be talked to or the site takes part already.
    """
    require_flower()
    if site.key is not None:
        load_private_key(site.key)
    folder = site.processes.folder
    with exclusive(
        folder / "join.lock", f"{site.home} is that of a site which takes part already; end that one first."
    ):
        site.processes.prepare()
        site.processes.kill_all()  # what a site left behind that was killed
        atomic_io.write_atomically(folder / NODE_FILE, atomic_io.json_line(node_options(site)))
        consent.remove_pending(site.home)  # what another server offered, or this one before it changed
        site.processes.log(SUPERNODE).write_bytes(b"")
        tail = EventTail(site.home)
        try:
            _SiteNode(site, tail, show, person).run_forever()
        finally:
            for event in tail.read_events():
                show(event.line)


class _SiteNode:
    """A site that takes part: its node's process, the node's log, and whether the server is lost."""

    def __init__(self, site: SiteOptions, tail: EventTail, show: Callable[[str], None], person: Prompt | None) -> None:
        self.site, self.tail, self.show, self.person = site, tail, show, person
        self.home, self.log = site.processes, EventLog(site.home / SITE_LOG)
        self.node: subprocess.Popen[bytes] | None = None
        self.pause = RECONNECT_SECONDS
        self.lost = False
        self.admission = 0.0  # until when a server that has come up may not know the site's key yet
        self.over: tuple[bool, float] | None = None  # the part is over: whether the last answer is sent, since when
        self.offer: TermsSummary | None = None  # on the screen, waiting for a yes

    def run_forever(self) -> None:
        """Join, and join again."""
        site = self.site
        self._say(f"{site.name} ({site.images:,} images, {site.labeled:,} labeled) joins {site.server}")
        first = True
        try:
            while True:
                self._call(first)
                first = False
                self._run_node()
        finally:
            stop_process(self.node)
            self.home.kill_all()

    def _call(self, strict: bool) -> None:
        """Wait until the server answers; where it cannot be talked to, raise UserError at first, and wait later."""
        while True:
            try:
                check_server(self.site.server, self.site.ca)
                break
            except ServerUnreachable as error:
                words = f"{error}: waiting for it (Ctrl-C ends this)"
            except UserError as error:
                if strict:
                    raise
                words = f"{error} Trying again."
            if not self.lost:
                self._say(words)
            self.lost = True
            self._show()
            time.sleep(RECONNECT_SECONDS)
        self._connected()

    def _run_node(self) -> None:
        log = Tail(self.home.log(SUPERNODE))
        words: list[str] = []
        start = time.monotonic()
        self.node = self.home.start(SUPERNODE, [])
        while self.node.poll() is None:
            self._show()
            self._consider()
            end = consent.load_end(self.site.home)
            words = [*words, *self._read(log)][-200:]  # so it has the message that is the end
            if end is not None:
                self._leave(
                    end, [word for word in words if word in (MESSAGE_RECEIVED, REPLY_SENT)][-1:] == [REPLY_SENT]
                )
            time.sleep(POLL_SECONDS)
        text = "\n".join([*words, *log.read_lines()])
        if UNKNOWN_KEY in text and time.monotonic() < self.admission:
            time.sleep(RECONNECT_SECONDS)
            return
        self.pause = RECONNECT_SECONDS if time.monotonic() - start > STEADY else min(2 * self.pause, LONGEST_PAUSE)
        reason = next((meaning for sign, meaning in REASONS.items() if sign in text), f"see {log.path}")
        self._say(f"the connection ended: {reason}; trying again in {self.pause:.0f} s")
        self._show()
        time.sleep(self.pause)

    def _leave(self, end: consent.ParticipationEnd, complete: bool) -> None:
        """Raise `Ended` once the last answer is sent and the server has had time to see it."""
        if self.over is None or self.over[0] != complete:
            self.over = complete, time.monotonic()
        if time.monotonic() - self.over[1] > (PARTING_SECONDS if complete else LINGER_SECONDS):
            self._show()
            raise SiteFinished(end.code, end.reason)

    def _read(self, log: Tail) -> list[str]:
        """Return new lines of the node's log, and say when it loses its server and reaches it again."""
        lines = log.read_lines()
        for line in lines:
            if SERVER_LOST in line and not self.lost:
                self.lost = True
                self._say(f"{self.site.server} does not answer any more: waiting for it (Ctrl-C ends this)")
            elif SERVER_REACHED in line:
                self._connected()
        return lines

    def _connected(self) -> None:
        if self.lost:
            self.lost, self.admission = False, time.monotonic() + ADMISSION_SECONDS
            self._say(f"{self.site.server} answers")

    def _say(self, words: str) -> None:
        """Write a line of the log; where the disk is full it is shown at least, and the site goes on."""
        try:
            self.log.record("connection", words)
        except OSError:
            self.show(words)

    def _show(self) -> None:
        events = self.tail.read_events()
        for event in events:
            self.show(event.line)
        if events:
            self._ask()  # the lines stand behind the question

    def _consider(self) -> None:
        """Show terms that wait for a yes, have a person asked, and write down the answer."""
        offer = consent.load_offer(self.site.home)
        if offer != self.offer:
            self.offer = offer
            if offer is not None:
                self._show()
                for line in offer.format_lines() if self.site.all or not offer.brief else offer.brief:
                    self.show(line)
                self._ask()
        person = self._responder()
        answer = None if person is None else person.answer()
        if answer is None or self.offer is None:
            return
        if not answer:
            raise Declined(f"{self.site.name} does not take part on the terms {self.offer.hash[:8]}.")
        consent.save_agreement(self.site.home, self.offer.hash)
        self._say(f"agreed to the terms {self.offer.hash}; the server asks again within half a minute")
        self.offer = None

    def _responder(self) -> Prompt | None:
        return None if self.offer is None or self.site.terms else self.person

    def _ask(self) -> None:
        if person := self._responder():
            person.ask(QUESTION)
