"""A site folder that takes part: joins a federation, does what it is asked, remembers, and writes down what happened.

Whatever comes, `SiteClient.answer` returns an answer; what it says of a failure names no path, file or image of the
site.
"""

from __future__ import annotations

import re
import time
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from halfmoon.api.uploads import Upload
from halfmoon.core import plugins, tree
from halfmoon.core.errors import UserError
from halfmoon.engine.driver import Diverged
from halfmoon.federation.protocol import limits
from halfmoon.federation.protocol.log import EventLog, size
from halfmoon.federation.protocol.messages import (
    FAILED,
    LONGEST,
    UNFIT,
    UNKNOWN,
    Delivered,
    Final,
    Joined,
    Malformed,
    Offer,
    Refusal,
    Reply,
    Request,
    UnparsedMessage,
    look,
    write,
)
from halfmoon.federation.protocol.terms import Terms
from halfmoon.federation.site import consent, delivery, joined, secure_sum, sum_notes
from halfmoon.federation.site.consent import ANY, Consent, offered
from halfmoon.federation.site.images import SiteImages
from halfmoon.federation.site.memory import Memory, settle, visit_of
from halfmoon.federation.site.runtime import Impossible, Refused, SiteRuntime, check_version
from halfmoon.federation.site.site_keys import KeyFiles, KnownSites
from halfmoon.runs.factory import computing, site_threads
from halfmoon.sites.folders.prepare import HOME
from halfmoon.sites.folders.site_folder import meant
from halfmoon.storage import atomic_io

LOG = "join.log"
OWN_LOG = "its own log says why"
NOT_AGREED = "this site's people have not agreed to these terms yet."


class _NotAgreed(Refused):
    """Terms that wait for a yes; the log has said so when they came first."""


@dataclass
class SiteClient:
    """The site `name` with its `images`; the home of its `consent` keeps decoded images, memories and the log.

    `trusted` are the names of parts from outside halfmoon that it may load, `keys` its own key and those of all sites.
    """

    images: SiteImages
    name: str
    consent: Consent
    trusted: tuple[str, ...] = ()
    keys: KeyFiles = field(default_factory=KeyFiles)
    version: str = field(default_factory=lambda: metadata.version("halfmoon"))
    _sites: dict[str, tuple[Terms, SiteRuntime]] = field(default_factory=dict, repr=False)

    @classmethod
    def at(
        cls,
        folder: Path,
        name: str,
        home: Path | None = None,
        device: str = "auto",
        tests: Path | None = None,
        terms: str = ANY,
        methods: tuple[str, ...] = (),
        trusted: tuple[str, ...] = (),
        validations: Path | None = None,
        keys: KeyFiles = KeyFiles(),  # noqa: B008 (it is frozen)
    ) -> SiteClient:
        """Return the client of a site folder, with its home in that folder where no other is given.

        `device` is where it computes. `tests` and `validations` are folders of labeled images that are never trained
        on: models are tested on the one, and the round whose model is kept is chosen by the other. `terms` and
        `methods` are what it takes part in (`halfmoon.federation.site.consent.Consent`).
        """
        home = home or folder / HOME
        images, wanted = SiteImages(folder, home, tests, device, validations), Consent(home, terms, methods)
        return cls(images, name, wanted, trusted, keys)

    @property
    def home(self) -> Path:
        """Where the site keeps what it decoded, remembers and logs."""
        return self.consent.home

    @property
    def log(self) -> EventLog:
        """Where the site writes down what happens."""
        return EventLog(self.home / LOG)

    def answer(self, data: bytes) -> bytes:
        """Return the answer to a message; a failure becomes a `Refusal`, and a line in the log."""
        try:
            self.home.mkdir(parents=True, exist_ok=True)
            # What a server names is imported only where the site's people have named it too.
            with plugins.only((*self.consent.methods, *self.trusted)):
                return write(self._answered(look(data, Offer, Request, Final)))
        except _NotAgreed as refused:
            return write(Refusal(self.version, refused.kind, str(refused)))
        except Refused as refused:
            why = str(refused.__cause__ or refused)
            with suppress(OSError):
                if isinstance(refused, Impossible):
                    consent.end(self.home, 1, why)
            return self._refused(refused.kind, str(refused), why)
        except Malformed as error:
            return self._refused(UNFIT, str(error), f"what the server sent cannot be read: {error}")
        except Diverged as error:
            return self._refused(FAILED, f"its training diverged; {OWN_LOG}.", str(error))
        except OSError as error:
            # The system's own word names no file; what a library says may, where there is none.
            reason = f"its disk: {error.strerror}." if error.strerror else f"its disk failed; {OWN_LOG}."
            return self._refused(FAILED, reason, f"{error.filename or self.home}: {atomic_io.reason(error)}.")
        except UserError as error:
            return self._refused(FAILED, f"it cannot take part now; {OWN_LOG}.", str(error))
        except Exception as error:  # whatever it is, the server has to hear that no answer will come
            return self._refused(FAILED, f"it failed ({type(error).__name__}); {OWN_LOG}.", repr(error))

    def _refused(self, kind: str, reason: str, words: str) -> bytes:
        self._say(f"not done: {words}")
        # What a server wrote may be quoted, and comes back to a log there.
        plain = "".join(letter if letter.isprintable() else "?" for letter in reason[:LONGEST])
        return write(Refusal(self.version, kind, plain))

    def _say(self, words: str) -> None:
        with suppress(OSError):  # a full disk: what cannot be written down is still answered
            self.log.say(words)

    def _answered(self, unparsed: UnparsedMessage[Offer | Request | Final]) -> Joined | Reply | Delivered:
        message = unparsed.message
        check_version(self.version, message.version)
        if isinstance(message, Final):
            return self._finished(unparsed, message)
        return self._join(message) if isinstance(message, Offer) else self._work(unparsed, message)

    def _finished(self, unparsed: UnparsedMessage[Any], message: Final) -> Delivered:
        """Keep the final model, test it on the site's own test images, and tell whoever waits that all is over."""
        terms, site = self._known(message.federation, joined.place(self.home, message.federation))
        words = delivery.kept(self.home, unparsed, terms, site)
        sum_notes.forget(joined.place(self.home, message.federation))
        self._say(words)
        consent.end(self.home, 0, words)
        return Delivered(message.federation, self.version, self.name)

    def _known(self, federation: str, place: Path) -> tuple[Terms, SiteRuntime]:
        """Return the terms that this site has joined, and what computes; raise `Refused` where it has not."""
        held = self._sites.get(federation)
        terms = held[0] if held else joined.terms_in(place, self._say)
        if terms is None or terms.hash != federation:
            raise Refused(UNKNOWN, f"this site has not joined federation {federation[:8]} yet.")
        self._agree_to(terms, UNKNOWN)
        site = held[1] if held else joined.with_downlinks(self._opened(terms), terms, place)
        self._sites[federation] = terms, site
        return terms, site

    def _join(self, offer: Offer) -> Joined:
        try:
            terms = Terms.parse(offer.terms)
        except UserError as error:
            raise Impossible(UNFIT, str(error)) from error
        if self.name not in terms.sites:
            near = meant(self.name, terms.sites)
            raise Impossible(UNFIT, f"federation {terms.name} has no site {self.name}{near}.")
        self._agree_to(terms, UNFIT)
        place = joined.place(self.home, terms.hash)
        site = self._opened(terms)
        place.mkdir(parents=True, exist_ok=True)
        site = joined.with_downlinks(site, terms, place)
        self._sites[terms.hash] = terms, site
        atomic_io.replace(place / joined.TERMS, terms.text.encode())
        labeled, unlabeled = site.counts()
        tests, validations, others = _others(site)
        self._say(f"{terms.said()}; this site gives {labeled:,} images with a label and {unlabeled:,} without{others}")
        key = self.keys.shown(self.home) if terms.config.secure_aggregation else ""
        return Joined(terms.hash, self.version, self.name, labeled, unlabeled, tests, validations, key)

    def _agree_to(self, terms: Terms, kind: str) -> None:
        """Raise `Refused` for terms that the site's people do not want, or have not said yes to; put those down."""
        wanted, method = self.consent, terms.config.method
        if not wanted.takes(method):
            raise Impossible(UNFIT, f"this site accepts the method {' or '.join(wanted.methods)}, but not {method}.")
        if wanted.given(terms.hash):
            return
        words = terms.offered()
        if offered(self.home) != words:
            self._say(f"asked to take part in {terms.said()}")
            others = f"--terms {wanted.terms} is about others; " if wanted.terms else ""
            how = "" if wanted.terms else "answer yes where halfmoon site join asks, or "
            self._say(
                f"this site does not take part before its people agree: {others}{how}start it again with --terms "
                f"{terms.hash}"
            )
            wanted.ask(words)  # last: what stands in the log is read before the question
        raise _NotAgreed(kind, NOT_AGREED)

    def _opened(self, terms: Terms) -> SiteRuntime:
        return self.images.opened(terms, self.name, self.version, self._say)

    def _work(self, unparsed: UnparsedMessage[Any], request: Request) -> Reply:
        place = joined.place(self.home, request.federation)
        terms, site = self._known(request.federation, place)
        site.look(request, unparsed)
        secure_sum.look(unparsed.pattern("masks"), terms)
        try:
            known, safe = visit_of(request.known), visit_of(request.safe)
        except ValueError as error:
            raise Refused(UNFIT, f"what the server asks to go on from is no visit: {error}.") from error
        if not re.fullmatch("[0-9a-f]{32}", request.run):  # it becomes the name of a folder
            raise Refused(UNFIT, "what the server calls its run is no number of any.")
        folder = place / request.run
        at = (request.round, request.attempt, request.query)
        memory = Memory(folder, at, known, site.local_clients.dataset.train.labels.device, self._say)
        limits.check_room(self.home, 0)
        began = time.perf_counter()
        with computing(site_threads(terms.config)):
            reply = self._done(unparsed.open(), terms, site, memory)
        settle(folder, safe)
        for line in told(request, reply, len(unparsed.data), time.perf_counter() - began):
            self._say(line)
        return reply

    def _done(self, request: Request, terms: Terms, site: SiteRuntime, memory: Memory) -> Reply:
        """Return the answer to a request: what the site did, or its part in a sum that hides it."""
        if not terms.config.secure_aggregation:
            return site.do(request, memory)
        even = terms.config.dp_clip is not None
        known = KnownSites(terms.sites, memory.folder.parent, self.keys.others, self._say)
        key, least = self.keys.loaded(self.home), terms.config.cohort
        part = secure_sum.Part(key, memory.folder, site.number, known, even, least)
        return part.answer(request, lambda plain: site.do(plain, memory))


def _others(site: SiteRuntime) -> tuple[int, int, str]:
    """Return how many test and validation images a site has, and the words for that."""
    tests, validations = (0 if held is None else len(held.labels) for held in site.held)
    tested = f"; it tests models on {tests:,} others" if tests else ""
    chosen = f"; {validations:,} others choose the round whose model is kept" if validations else ""
    return tests, validations, tested + chosen


def told(request: Request, reply: Reply, received: int, seconds: float) -> list[str]:
    """Return what the log says of a request that was done."""
    lines = []
    which = f"the model before round {request.round + 1}" if request.client_update else "the last model"
    for kind, said in {"test": reply.evaluation, "validation": reply.evaluation.get("validation", {})}.items():
        if "confusion" in said:
            share = int(said["confusion"].diagonal().sum()) / max(1, int(said["confusion"].sum()))
            lines.append(f"{which} is right on {share:.2%} of the {kind} images here")
    if not request.client_update:
        if "shares" in reply.up:
            lines.append(f"round {request.round + 1}: received {size(received)} and answered, for a sum under masks")
        return lines
    steps, labeled, unlabeled, _ = reply.amount
    trained = f"trained {steps} steps of {labeled} labeled and {unlabeled} unlabeled images" if steps else "no step"
    loss = reply.samples.get("loss")
    said = f", mean loss {float(loss['total']) / float(loss['count']):.4f}" if loss else ""
    parts = Upload.of(reply.up).parts if "weight" in reply.up else {name: {"": leaf} for name, leaf in reply.up.items()}
    sent = ", ".join(f"{name} {size(tree.nbytes(part))}" for name, part in parts.items())
    again = f" (attempt {request.attempt + 1})" if request.attempt else ""
    took = f"received {size(received)}; {trained} in {seconds:.1f} s{said}; sends {sent}"
    return [*lines, f"round {request.round + 1}{again}, {request.client_update}: {took}"]
