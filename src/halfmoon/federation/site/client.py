"""A site folder that takes part: joins a federation, does what it is asked, remembers, and writes down what happened.

Whatever comes, `SiteClient.answer` returns an answer; what it says of a failure names no path, file or image of the
site.
"""

from __future__ import annotations

import json
import re
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from halfmoon.core import plugins, tree
from halfmoon.core.errors import UserError
from halfmoon.data import Images
from halfmoon.engine.client_update import Diverged
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
from halfmoon.federation.site import consent, delivery, secure_sum
from halfmoon.federation.site.consent import ANY, Consent, offered
from halfmoon.federation.site.downlink_spec import DownlinkSpec
from halfmoon.federation.site.memory import Memory, settle, visit_of
from halfmoon.federation.site.runtime import Refused, SiteRuntime, agreed, check_version
from halfmoon.federation.site_data import Prepared, prepare
from halfmoon.federation.site_data.prepare import HOME, open_site
from halfmoon.federation.site_data.site_folder import SiteFolder as Folder
from halfmoon.federation.site_data.site_folder import meant, read
from halfmoon.runs.factory import computing, examples, preparation
from halfmoon.storage import atomic_io

FEDERATIONS, TERMS, DOWNS, LOG = "federations", "terms.json", "downs.json", "join.log"
OWN_LOG = "its own log says why"
NOT_AGREED = "this site's people have not agreed to these terms yet."


class Impossible(Refused):
    """A join that the same site can never make: whoever waits for it is told at once."""


class _NotAgreed(Refused):
    """Terms that wait for a yes; the log has said so when they came first."""


@dataclass
class SiteClient:
    """A site named `name` with its images in `folder`; `home` keeps decoded images, memories and the log.

    `device` is where it computes: auto, cpu or cuda. `tests` is a folder of labeled images that are never trained on.
    `terms` and `methods` are what it takes part in (`halfmoon.federation.site.consent.Consent`), `trusted` the names of
    parts from outside halfmoon that it may load.
    """

    folder: Path
    name: str
    home: Path
    device: str = "auto"
    tests: Path | None = None
    terms: str = ANY
    methods: tuple[str, ...] = ()
    trusted: tuple[str, ...] = ()
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
    ) -> SiteClient:
        """Return the member with its home in the site folder, where no other is given."""
        return cls(folder, name, home or folder / HOME, device, tests, terms, methods, trusted)

    @property
    def log(self) -> EventLog:
        """Where the site writes down what happens."""
        return EventLog(self.home / LOG)

    def answer(self, data: bytes) -> bytes:
        """Return the answer to a message; a failure becomes a `Refusal`, and a line in the log."""
        try:
            self.home.mkdir(parents=True, exist_ok=True)
            # What a server names is imported only where the site's people have named it too.
            with plugins.only((*self.methods, *self.trusted)):
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
        terms, site = self._known(message.federation, self._place(message.federation))
        words = delivery.kept(self.home, unparsed, terms, site)
        self._say(words)
        consent.end(self.home, 0, words)
        return Delivered(message.federation, self.version, self.name)

    def _known(self, federation: str, place: Path) -> tuple[Terms, SiteRuntime]:
        """Return the terms that this site has joined, and what computes; raise `Refused` where it has not."""
        held = self._sites.get(federation)
        terms = held[0] if held else self._joined(place)
        if terms is None or terms.hash != federation:
            raise Refused(UNKNOWN, f"this site has not joined federation {federation[:8]} yet.")
        self._consent(terms, UNKNOWN)
        site = held[1] if held else self._agreed(terms, self._opened(terms), place)
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
        self._consent(terms, UNFIT)
        place = self._place(terms.hash)
        site = self._opened(terms)
        place.mkdir(parents=True, exist_ok=True)
        site = self._agreed(terms, site, place)
        self._sites[terms.hash] = terms, site
        atomic_io.replace(place / TERMS, terms.text.encode())
        labeled, unlabeled = site.counts()
        tests = 0 if site.tests is None else len(site.tests.labels)
        tested = f"; it tests models on {tests:,} others" if tests else ""
        self._say(f"{terms.said()}; this site gives {labeled:,} images with a label and {unlabeled:,} without{tested}")
        key = secure_sum.shown(self.home, terms.hash) if terms.config.secure_aggregation else ""
        return Joined(terms.hash, self.version, self.name, labeled, unlabeled, tests, key)

    def _consent(self, terms: Terms, kind: str) -> None:
        """Raise `Refused` for terms that the site's people do not want, or have not said yes to; put those down."""
        wanted, method = Consent(self.home, self.terms, self.methods), terms.config.method
        if not wanted.takes(method):
            raise Impossible(UNFIT, f"this site accepts the method {' or '.join(wanted.methods)}, but not {method}.")
        if wanted.given(terms.hash):
            return
        words = terms.offered()
        if offered(self.home) != words:
            self._say(f"asked to take part in {terms.said()}")
            others = f"--terms {self.terms} is about others; " if self.terms else ""
            how = "" if self.terms else "answer yes where halfmoon site join asks, or "
            self._say(
                f"this site does not take part before its people agree: {others}{how}start it again with --terms "
                f"{terms.hash}"
            )
            wanted.ask(words)  # last: what stands in the log is read before the question
        raise _NotAgreed(kind, NOT_AGREED)

    def _agreed(self, terms: Terms, site: SiteRuntime, place: Path) -> SiteRuntime:
        """Return the site with what its server may send, which is found out once and kept in `place`."""
        try:
            known = DownlinkSpec.parse(json.loads(atomic_io.read(place / DOWNS) or b""), len(terms.sites))
        except (ValueError, LookupError, TypeError, AttributeError):
            known = agreed(terms.text)
            atomic_io.replace(place / DOWNS, json.dumps(known.facts()).encode())
        return replace(site, downlinks=known)

    def _work(self, unparsed: UnparsedMessage[Any], request: Request) -> Reply:
        place = self._place(request.federation)
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
        with computing(terms.config):
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
        own, many = secure_sum.secret(self.home), len(terms.sites)
        part = secure_sum.Part(own, memory.folder, site.number, many, even, terms.config.cohort)
        return part.answer(request, lambda plain: site.do(plain, memory))

    def _joined(self, place: Path) -> Terms | None:
        """Return the terms that the site has joined; None where there are none, or they are damaged: it joins again."""
        text = atomic_io.read(place / TERMS)
        try:
            return None if text is None else Terms.parse(text.decode())
        except ValueError as error:
            self._say(f"{place / TERMS} is damaged, so this site has to join again: {error}")
            return None

    def _place(self, federation: str) -> Path:
        if not re.fullmatch("[0-9a-f]{64}", federation):  # it becomes the name of a folder
            raise Refused(UNKNOWN, "what the server calls its federation is no hash of any.")
        return self.home / FEDERATIONS / federation[:16]

    def _opened(self, terms: Terms) -> SiteRuntime:
        """Return the site with its images in the terms' form; they are decoded where that was not done before."""
        folder = self._prepared(terms)
        assert folder.images is not None, "it was just prepared"
        number = terms.sites.index(self.name)
        site = SiteRuntime.of(terms, number, folder.images, numbered(folder, terms), self.version, self.device)
        if self.tests is None:
            return site
        held = labeled_images(self.tests, terms, self.home / f"tests-{_form(terms)}")
        return replace(site, tests=examples(held, site.local_clients.dataset.train.labels.device))

    def _prepared(self, terms: Terms) -> Folder:
        """Return the folder, decoded at home, or beside that where another form is at home already."""
        channels, height, width = terms.form.image
        kept = _opened(self.folder, self.home)
        if kept is not None and kept.images is not None:
            same = kept.images.shape[1:] == (height, width, channels)
            if same and _opened(self.folder, self.home, preparation(terms.config).form) is not None:
                return kept
            return self._decoded(terms, self.home / _form(terms))
        return self._decoded(terms, self.home)

    def _decoded(self, terms: Terms, out: Path) -> Folder:
        channels, height, width = terms.form.image
        limits.check_images(out, len(read(self.folder)), terms.form.image)
        how = preparation(terms.config)
        done: Prepared = prepare(self.folder, (height, width), channels, out, crop=how.crop, window=how.window)
        if done.decoded:
            self._say(f"decoded {done.decoded:,} images; {len(done.left_out):,} cannot be read and are left out")
        return done.site


def told(request: Request, reply: Reply, received: int, seconds: float) -> list[str]:
    """Return what the log says of a request that was done."""
    lines = []
    if reply.evaluation:
        cells = reply.evaluation["confusion"]
        share = int(cells.diagonal().sum()) / max(1, int(cells.sum()))
        which = f"the model before round {request.round + 1}" if request.work else "the last model"
        lines.append(f"{which} is right on {share:.2%} of the test images here")
    if not request.work:
        if "shares" in reply.up:
            lines.append(f"round {request.round + 1}: received {size(received)} and answered, for a sum under masks")
        return lines
    steps, labeled, unlabeled, _ = reply.amount
    trained = f"trained {steps} steps of {labeled} labeled and {unlabeled} unlabeled images" if steps else "no step"
    loss = reply.samples.get("loss")
    said = f", mean loss {float(loss['total']) / float(loss['count']):.4f}" if loss else ""
    sent = ", ".join(f"{name} {size(tree.nbytes({'': part}))}" for name, part in reply.up.items())
    again = f" (attempt {request.attempt + 1})" if request.attempt else ""
    took = f"received {size(received)}; {trained} in {seconds:.1f} s{said}; sends {sent}"
    return [*lines, f"round {request.round + 1}{again}, {request.work}: {took}"]


def _form(terms: Terms) -> str:
    channels, height, width = terms.form.image
    return f"{height}x{width}x{channels}"


def _opened(folder: Path, home: Path, form: str | None = None) -> Folder | None:
    """Return a prepared folder, None where it is not prepared, or not in this form."""
    try:
        return open_site(folder, home, form)
    except UserError:
        return None


def labeled_images(folder: Path, terms: Terms, out: Path) -> Images:
    """Return a folder's labeled images in the terms' form, decoded into `out`; raise UserError where there are none."""
    channels, height, width = terms.form.image
    how = preparation(terms.config)
    found = _opened(folder, out, how.form)
    if found is None or found.images is None or found.images.shape[1:] != (height, width, channels):
        limits.check_images(out, len(read(folder)), terms.form.image)
        found = prepare(folder, (height, width), channels, out, crop=how.crop, window=how.window).site
    assert found.images is not None, "it was just prepared"
    rows = np.flatnonzero(found.labels >= 0)
    if not len(rows):
        raise UserError(f"{folder} has no labeled image: name some in its labels.csv.")
    return Images(np.array(found.images[rows]), numbered(found, terms)[rows])


def numbered(folder: Folder, terms: Terms) -> np.ndarray:
    """Return the labels, int64 (N,), numbered as the federation numbers its classes; -1 where there is none."""
    numbers = np.array(
        [terms.form.classes.index(name) if name in terms.form.classes else -2 for name in folder.classes]
    )
    used = folder.labels >= 0
    labels = folder.labels.copy()
    if used.any():
        labels[used] = numbers[folder.labels[used]]
    if (labels == -2).any():
        strange = [
            name
            for number, name in enumerate(folder.classes)
            if numbers[number] == -2 and (folder.labels == number).any()
        ]
        told = ", ".join(f"{name}{meant(name, terms.form.classes)}" for name in strange)
        words = (
            f"{folder.folder} has labels of classes that federation {terms.name} does not have: {told}. Its classes "
            f"are {', '.join(terms.form.classes)}: correct the labels, or agree on the classes."
        )
        # The server hears no name of this site's classes.
        told = "it has labels of classes that the federation does not have; its own log names them."
        raise Impossible(UNFIT, told) from UserError(words)
    return labels
