"""`halfmoon site join`: Flower's SuperNode of one site, kept alive until it is told to end; a log in plain words."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from halfmoon.config.schema import NAME
from halfmoon.core.errors import UserError
from halfmoon.federation.flower import pinned
from halfmoon.federation.flower.contact import Absent, Address, reach, trust
from halfmoon.federation.flower.processes import (
    SUPEREXEC,
    SUPERNODE,
    WARM,
    Home,
    alone,
    free_port,
    require_flower,
    stop,
)
from halfmoon.federation.protocol.bundle import APPS
from halfmoon.federation.protocol.log import EventLog, Tail
from halfmoon.federation.site import consent
from halfmoon.federation.site.consent import PINNED, Offered
from halfmoon.storage import atomic_io, toml

LOG = "join.log"

EVERY = 0.2
"""Seconds between two looks at processes and logs."""
CALLING = 1.0
"""Seconds between two calls of a server that is not there."""
STEADY = 30.0
"""Seconds after which a SuperNode counts as one that works."""
LONGEST_PAUSE = 60.0
"""Seconds of pause, at most, before a SuperNode that has died is started again."""

REASONS = {
    "CERTIFICATE_VERIFY_FAILED": "the server's certificate is not to be trusted",
    "WRONG_VERSION_NUMBER": "the server does not speak TLS",
    "2001]": "the server wants sites with a key: give --key FILE",
    "2004]": "the server does not let this site's key in: it does not know it, or not any more, or another process "
    "uses it (one that was killed counts for a minute)",
    "401 Unauthorized": "the server does not accept this site's key, or the clocks of the two machines differ",
    "Exit Code: 302": "--key is no private key (elliptic curve, in OpenSSH's format)",
    "Exit Code: 606": "the server has another version of Flower",
    "a site cannot be protected": "this version of Flower is not one that halfmoon can use; see constraints.txt",
    "address already in use": "its port on this machine is taken",
    "500 Internal Server Error": "the server's Flower failed over a call, as where its disk is busy or full",
    "Heartbeat failed": "the server does not know this site any more",
    "terminated gracefully": "the server does not accept this site's key any more, or its process was told to end",
}
"""What a SuperNode's log says where it dies, and what that means."""

BROKEN = re.compile(r"(Client|Server) error '\d{3} ")
"""What a SuperNode says last that has given up: its process stays, and neither asks for work nor says that it lives."""


MAIL = re.compile(r"(Receiving|Sending): \w+ message|Sent successfully")
"""What a SuperNode says of a message and of its answer; one at a time."""

PARTING, LINGER = 3.0, 8.0
"""Seconds until a site whose part is over goes: after its last answer is sent, which its server has to see before it is
gone, and where its SuperNode does not say so."""

QUESTION = "Take part? [y/N] "


class Declined(UserError):
    """The people at a site said no."""


class Ended(UserError):
    """A site's part that is over: `code` is 0 where the federation is finished, 1 where it can never take part."""

    def __init__(self, code: int, words: str) -> None:
        """Say the words, and how the process ends."""
        super().__init__(words)
        self.code = code


class Person(Protocol):
    """Somebody at a terminal."""

    def ask(self, question: str) -> None:
        """Show a question whose answer is waited for."""
        ...

    def answer(self) -> bool | None:
        """Return whether the answer is yes, None where there is none yet."""
        ...


@dataclass(frozen=True)
class Joining:
    """How a site takes part: the server, its own name and folder, and where it keeps its images and its memory.

    `images` and `labeled` count what is in the folder. `ca` has the authority that signed the server's certificate;
    without it the connection is plain, which away from this machine needs `insecure`. `key` is the site's own, where
    the server wants one, and `site_keys` a file with those of all sites, for masked sums. `port` is one of this
    machine's for Flower's own use, a free one if None. `tests` is a folder of labeled images to test models on,
    `validations` one of those that choose the round whose model is kept. `terms` and `methods` are what it takes part
    in, as in `halfmoon.federation.site.consent.Consent`; without `terms` its people are asked. Raise UserError where
    these do not fit.
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
    port: int | None = None
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
        """Refuse what does not fit."""
        if not NAME.fullmatch(self.name):
            raise UserError(
                f"--name is {self.name!r}: use up to 64 letters, digits, dots, dashes and underscores, of which the "
                "first is a letter or a digit."
            )
        if self.ca is not None and self.insecure:
            raise UserError("--insecure and --ca contradict each other; leave one of them out.")
        if self.ca is not None:
            trust(self.ca)
        elif not self.insecure and not self.server.loopback:
            raise UserError(
                f"nothing on the way to {self.server} would be encrypted: give --ca FILE, which the server's people "
                "have, or --insecure where the network itself is safe."
            )
        if self.key is not None and self.ca is None:
            raise UserError("--key needs --ca: a server knows sites by their keys over TLS only.")
        if self.key is not None and not self.key.is_file():
            raise UserError(f"--key {self.key}: there is no such file.")
        if self.site_keys is not None:
            from halfmoon.federation.site.site_keys import listed  # slow to import: it brings torch

            listed(self.site_keys)
        if self.terms and not PINNED.fullmatch(self.terms):
            raise UserError(
                f"--terms is {self.terms!r}: it must be the hash of the terms (8 to 64 digits of 0-9 and a-f, see "
                "halfmoon site terms), or any."
            )

    @property
    def processes(self) -> Home:
        """Return the folder of Flower's processes."""
        return Home(self.home / "flower")


def node(site: Joining) -> str:
    """Return what the site's own program is told, as TOML; it stays on this machine."""
    folder, home = site.folder.absolute(), site.home.absolute()
    facts = {"name": site.name, "folder": folder, "home": home, "device": site.device}
    facts |= {} if site.tests is None else {"tests": site.tests.absolute()}
    facts |= {} if site.validations is None else {"validations": site.validations.absolute()}
    facts |= {"terms": site.terms} if site.terms else {}
    facts |= {"methods": " ".join(site.methods)} if site.methods else {}
    facts |= {"trusted": " ".join(site.trusted)} if site.trusted else {}
    facts |= {"weights": os.pathsep.join(str(each.absolute()) for each in site.weights)} if site.weights else {}
    facts |= {"key": site.key.absolute()} if site.key is not None else {}
    facts |= {"site-keys": site.site_keys.absolute()} if site.site_keys is not None else {}
    return "".join(f"{key} = {toml.value(value)}\n" for key, value in facts.items())


def supernode(site: Joining) -> list[str]:
    """Return the arguments of `flower-supernode`."""
    safety = ["--insecure"] if site.ca is None else ["--root-certificates", str(site.ca.absolute())]
    key = [] if site.key is None else ["--auth-supernode-private-key", str(site.key.absolute())]
    return [
        *("--superlink", str(site.server), *safety, *key),
        *("--host", "127.0.0.1", "--port", str(free_port() if site.port is None else site.port)),
        *("--node-config", str(site.processes.folder / "node.toml")),
    ]


def join(site: Joining, show: Callable[[str], None], person: Person | None = None) -> None:
    """Take part until interrupted; `show` gets every line of the site's log as it comes.

    Terms that wait for a yes are shown, and `person`, where there is somebody, is asked. Raise UserError where the
    server cannot be talked to like this, or the site takes part already, and `Declined` where the answer is no.
    Whatever ends this, no process is left.
    """
    require_flower()
    folder = site.processes.folder
    with alone(folder / "join.lock", f"{site.home} is that of a site which takes part already; end that one first."):
        site.processes.prepare()
        site.processes.kill()  # what a site left behind that was killed
        atomic_io.replace(folder / "node.toml", node(site).encode())
        pinned.write(folder, site.apps)
        consent.withdraw(site.home)  # what another server offered, or this one before it changed
        site.processes.log(SUPERNODE).write_bytes(b"")
        tail = Tail(site.home / LOG)
        try:
            _Member(site, tail, show, person).stay()
        finally:
            for line in tail.lines():
                show(line)


class _Member:
    """What lives while a site takes part: the SuperNode's process, what its log has said, and whether it is lost."""

    def __init__(self, site: Joining, tail: Tail, show: Callable[[str], None], person: Person | None) -> None:
        self.site, self.tail, self.show, self.person = site, tail, show, person
        self.home, self.log = site.processes, EventLog(site.home / LOG)
        self.node: subprocess.Popen[bytes] | None = None
        self.warm: subprocess.Popen[bytes] | None = None
        self.pause = CALLING
        self.lost = False
        self.over: tuple[bool, float] | None = None  # all is over: whether the last answer is sent, and since when
        self.shown: Offered | None = None

    def stay(self) -> None:
        """Join, and join again."""
        site = self.site
        self._say(f"{site.name} ({site.images:,} images, {site.labeled:,} labeled) joins {site.server}")
        first = True
        try:
            while True:
                self._call(first)
                first = False
                self._live()
        finally:
            stop(self.node)
            self.home.kill()

    def _call(self, strict: bool) -> None:
        """Wait until the server answers; where it cannot be talked to, raise UserError at first, and wait later."""
        while True:
            try:
                reach(self.site.server, self.site.ca)
                break
            except Absent as error:
                words = f"{error}: waiting for it (Ctrl-C ends this)"
            except UserError as error:
                if strict:
                    raise
                words = f"{error} Trying again."
            if not self.lost:
                self._say(words)
            self.lost = True
            self._show()
            time.sleep(CALLING)
        self._found()

    def _live(self) -> None:
        """Start a SuperNode and watch it until it dies."""
        for script in (SUPEREXEC, SUPERNODE):
            self.home.forget(script)
        log = Tail(self.home.log(SUPERNODE))
        words: list[str] = []
        begin = time.monotonic()
        if self.warm is None or self.warm.poll() is not None:
            # In the meantime it warms up; without it everything works, slower.
            self.warm = self.home.start(WARM, [self.site.apps[1]])
        self.node = self.home.start(SUPERNODE, supernode(self.site))
        while self._lives(self.node, words):
            self._show()
            self._consider()
            over = consent.ended(self.site.home)
            words = [*words, *self._read(log)][-200:]  # so it has the message that is the end
            if over is not None:
                sent = _answered(words)
                if self.over is None or self.over[0] != sent:
                    self.over = sent, time.monotonic()
                if time.monotonic() - self.over[1] > (PARTING if sent else LINGER):
                    self._show()
                    raise Ended(*over)
            time.sleep(EVERY)
        stop(self.node)
        words += log.lines()
        self.pause = CALLING if time.monotonic() - begin > STEADY else min(2 * self.pause, LONGEST_PAUSE)
        why = "\n".join(words)
        reason = next((meaning for sign, meaning in REASONS.items() if sign in why), f"see {log.path}")
        self._say(f"the connection ended: {reason}; trying again in {self.pause:.0f} s")
        self._show()
        time.sleep(self.pause)

    def _lives(self, node: subprocess.Popen[bytes], words: list[str]) -> bool:
        """Say whether a SuperNode that has said these words still works."""
        executing = self.home.running(SUPEREXEC) or not self.home.begun(SUPEREXEC)
        return node.poll() is None and executing and not any(BROKEN.search(line) for line in words)

    def _read(self, log: Tail) -> list[str]:
        """Return what the SuperNode has said, and say when it loses its server and finds it again."""
        lines = log.lines()
        for line in lines:
            if "Connection attempt failed" in line and not self.lost:
                self.lost = True
                self._say(f"{self.site.server} does not answer any more: waiting for it (Ctrl-C ends this)")
            elif "Connection successful" in line:
                self._found()
        return lines

    def _found(self) -> None:
        if self.lost:
            self.lost = False
            self._say(f"{self.site.server} answers")

    def _say(self, words: str) -> None:
        """Write a line of the log; where the disk is full it is shown at least, and the site goes on."""
        try:
            self.log.say(words)
        except OSError:
            self.show(words)

    def _show(self) -> None:
        lines = self.tail.lines()
        for line in lines:
            self.show(line)
        if lines and self._asking():
            self._ask()  # the lines stand behind the question

    def _consider(self) -> None:
        """Show terms that wait for a yes, have a person asked, and write down the answer."""
        offered = consent.offered(self.site.home)
        if offered != self.shown:
            self.shown = offered
            if offered is not None:
                self._show()
                for line in offered.lines() if self.site.all or not offered.brief else offered.brief:
                    self.show(line)
                self._ask()
        said = self.person.answer() if self.person is not None and self._asking() else None
        if said is None or self.shown is None:
            return
        if not said:
            raise Declined(f"{self.site.name} does not take part on the terms {self.shown.hash[:8]}.")
        consent.agree(self.site.home, self.shown.hash)
        self._say(f"agreed to the terms {self.shown.hash}; the server asks again within half a minute")
        self.shown = None

    def _asking(self) -> bool:
        return self.person is not None and self.shown is not None and not self.site.terms

    def _ask(self) -> None:
        if self.person is not None and self._asking():
            self.person.ask(QUESTION)


def _answered(words: list[str]) -> bool:
    """Say whether a SuperNode that has said these words has sent an answer to all that came."""
    mail = [match[0] for line in words if (match := MAIL.search(line))]
    return bool(mail) and mail[-1] == "Sent successfully"
