"""A site folder that takes part: joins a federation, does what it is asked, remembers, and writes down what happened.

Whatever comes, `Member.answer` returns an answer; what it says of a failure names no path, file or image of the site.
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

from halfmoon import disk, tree
from halfmoon.client import Diverged
from halfmoon.data import Images
from halfmoon.errors import UserError
from halfmoon.net import bounds, masked
from halfmoon.net.consent import ANY, Consent, offered
from halfmoon.net.downs import Downs
from halfmoon.net.journal import Journal, size
from halfmoon.net.memory import Memory, settle, visit_of
from halfmoon.net.message import (
    FAILED,
    LONGEST,
    UNFIT,
    UNKNOWN,
    Joined,
    Malformed,
    Offer,
    Refusal,
    Reply,
    Request,
    Sealed,
    look,
    write,
)
from halfmoon.net.site import Refused, Site, agreed, check_version
from halfmoon.net.terms import Terms
from halfmoon.pieces import computing, examples
from halfmoon.site import Prepared, prepare
from halfmoon.site.folder import Site as Folder
from halfmoon.site.folder import read
from halfmoon.site.prepare import HOME, open_site

FEDERATIONS, TERMS, DOWNS, LOG = "federations", "terms.json", "downs.json", "join.log"
OWN_LOG = "its own log says why"
NOT_AGREED = "this site's people have not agreed to these terms yet."


class _NotAgreed(Refused):
    """Terms that wait for a yes; the log has said so when they came first."""


@dataclass
class Member:
    """A site named `name` with its images in `folder`; `home` keeps decoded images, memories and the log.

    `device` is where it computes: auto, cpu or cuda. `tests` is a folder of labeled images that are never trained on.
    `terms` and `methods` are what it takes part in (`halfmoon.net.consent.Consent`).
    """

    folder: Path
    name: str
    home: Path
    device: str = "auto"
    tests: Path | None = None
    terms: str = ANY
    methods: tuple[str, ...] = ()
    version: str = field(default_factory=lambda: metadata.version("halfmoon"))
    _sites: dict[str, tuple[Terms, Site]] = field(default_factory=dict, repr=False)

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
    ) -> Member:
        """Return the member with its home in the site folder, where no other is given."""
        return cls(folder, name, home or folder / HOME, device, tests, terms, methods)

    @property
    def journal(self) -> Journal:
        """Where the site writes down what happens."""
        return Journal(self.home / LOG)

    def answer(self, data: bytes) -> bytes:
        """Return the answer to a message; a failure becomes a `Refusal`, and a line in the log."""
        try:
            self.home.mkdir(parents=True, exist_ok=True)
            return write(self._answered(look(data, Offer, Request)))
        except _NotAgreed as refused:
            return write(Refusal(self.version, refused.kind, str(refused)))
        except Refused as refused:
            return self._refused(refused.kind, str(refused), str(refused))
        except Malformed as error:
            return self._refused(UNFIT, str(error), f"what the server sent cannot be read: {error}")
        except Diverged as error:
            return self._refused(FAILED, f"its training diverged; {OWN_LOG}.", str(error))
        except OSError as error:
            # The system's own word names no file; what a library says may, where there is none.
            reason = f"its disk: {error.strerror}." if error.strerror else f"its disk failed; {OWN_LOG}."
            return self._refused(FAILED, reason, f"{error.filename or self.home}: {disk.reason(error)}.")
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
            self.journal.say(words)

    def _answered(self, sealed: Sealed[Offer | Request]) -> Joined | Reply:
        message = sealed.message
        check_version(self.version, message.version)
        return self._join(message) if isinstance(message, Offer) else self._work(sealed, message)

    def _join(self, offer: Offer) -> Joined:
        try:
            terms = Terms.parse(offer.terms)
        except UserError as error:
            raise Refused(UNFIT, str(error)) from error
        if self.name not in terms.sites:
            raise Refused(UNFIT, f"federation {terms.name} has no site {self.name}.")
        self._consent(terms, UNFIT)
        place = self._place(terms.hash)
        site = self._opened(terms)
        place.mkdir(parents=True, exist_ok=True)
        site = self._agreed(terms, site, place)
        self._sites[terms.hash] = terms, site
        disk.replace(place / TERMS, terms.text.encode())
        labeled, unlabeled = site.counts()
        tests = 0 if site.tests is None else len(site.tests.labels)
        tested = f"; it tests models on {tests:,} others" if tests else ""
        self._say(f"{terms.said()}; this site gives {labeled:,} images with a label and {unlabeled:,} without{tested}")
        key = masked.shown(self.home, terms.hash) if terms.config.secure_aggregation else ""
        return Joined(terms.hash, self.version, self.name, labeled, unlabeled, tests, key)

    def _consent(self, terms: Terms, kind: str) -> None:
        """Raise `Refused` for terms that the site's people do not want, or have not said yes to; put those down."""
        consent, method = Consent(self.home, self.terms, self.methods), terms.config.method
        if not consent.takes(method):
            raise Refused(UNFIT, f"this site accepts the method {' or '.join(consent.methods)}, but not {method}.")
        if consent.given(terms.hash):
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
            consent.ask(words)  # last: what stands in the log is read before the question
        raise _NotAgreed(kind, NOT_AGREED)

    def _agreed(self, terms: Terms, site: Site, place: Path) -> Site:
        """Return the site with what its server may send, which is found out once and kept in `place`."""
        try:
            known = Downs.parse(json.loads(disk.read(place / DOWNS) or b""), len(terms.sites))
        except (ValueError, LookupError, TypeError, AttributeError):
            known = agreed(terms.text)
            disk.replace(place / DOWNS, json.dumps(known.facts()).encode())
        return replace(site, downs=known)

    def _work(self, sealed: Sealed[Any], request: Request) -> Reply:
        place = self._place(request.federation)
        held = self._sites.get(request.federation)
        terms = held[0] if held else self._joined(place)
        if terms is None or terms.hash != request.federation:
            raise Refused(UNKNOWN, f"this site has not joined federation {request.federation[:8]} yet.")
        self._consent(terms, UNKNOWN)
        site = held[1] if held else self._agreed(terms, self._opened(terms), place)
        self._sites[request.federation] = terms, site
        site.look(request, sealed)
        masked.look(sealed.pattern("masks"), terms)
        try:
            known, safe = visit_of(request.known), visit_of(request.safe)
        except ValueError as error:
            raise Refused(UNFIT, f"what the server asks to go on from is no visit: {error}.") from error
        if not re.fullmatch("[0-9a-f]{32}", request.run):  # it becomes the name of a folder
            raise Refused(UNFIT, "what the server calls its run is no number of any.")
        folder = place / request.run
        at = (request.round, request.attempt, request.trip)
        memory = Memory(folder, at, known, site.ground.holdings.train.labels.device, self._say)
        bounds.check_room(self.home, 0)
        began = time.perf_counter()
        with computing(terms.config):
            reply = self._done(sealed.open(), terms, site, memory)
        settle(folder, safe)
        self._tell(request, reply, len(sealed.data), time.perf_counter() - began)
        return reply

    def _done(self, request: Request, terms: Terms, site: Site, memory: Memory) -> Reply:
        """Return the answer to a request: what the site did, or its part in a sum that hides it."""
        if not terms.config.secure_aggregation:
            return site.do(request, memory)
        even = terms.config.dp_clip is not None
        part = masked.Part(masked.secret(self.home), memory.folder, site.number, len(terms.sites), even)
        return part.answer(request, lambda plain: site.do(plain, memory))

    def _joined(self, place: Path) -> Terms | None:
        """Return the terms that the site has joined; None where there are none, or they are damaged: it joins again."""
        text = disk.read(place / TERMS)
        try:
            return None if text is None else Terms.parse(text.decode())
        except ValueError as error:
            self._say(f"{place / TERMS} is damaged, so this site has to join again: {error}")
            return None

    def _tell(self, request: Request, reply: Reply, received: int, seconds: float) -> None:
        if reply.exam:
            cells = reply.exam["confusion"]
            share = int(cells.diagonal().sum()) / max(1, int(cells.sum()))
            which = f"the model before round {request.round + 1}" if request.work else "the last model"
            self._say(f"{which} is right on {share:.2%} of the test images here")
        if not request.work:
            if "shares" in reply.up:
                self._say(f"round {request.round + 1}: received {size(received)} and answered, for a sum under masks")
            return
        steps, labeled, unlabeled, _ = reply.amount
        trained = f"trained {steps} steps of {labeled} labeled and {unlabeled} unlabeled images" if steps else "no step"
        loss = reply.samples.get("loss")
        said = f", mean loss {float(loss['total']) / float(loss['count']):.4f}" if loss else ""
        sent = ", ".join(f"{name} {size(tree.nbytes({'': part}))}" for name, part in reply.up.items())
        again = f" (attempt {request.attempt + 1})" if request.attempt else ""
        self._say(
            f"round {request.round + 1}{again}, {request.work}: received {size(received)}; {trained} in {seconds:.1f} s"
            f"{said}; sends {sent}"
        )

    def _place(self, federation: str) -> Path:
        if not re.fullmatch("[0-9a-f]{64}", federation):  # it becomes the name of a folder
            raise Refused(UNKNOWN, "what the server calls its federation is no hash of any.")
        return self.home / FEDERATIONS / federation[:16]

    def _opened(self, terms: Terms) -> Site:
        """Return the site with its images in the terms' form; they are decoded where that was not done before."""
        folder = self._prepared(terms)
        assert folder.images is not None, "it was just prepared"
        number = terms.sites.index(self.name)
        site = Site.of(terms, number, folder.images, numbered(folder, terms), self.version, self.device)
        if self.tests is None:
            return site
        held = labeled_images(self.tests, terms, self.home / f"tests-{self._form(terms)}")
        return replace(site, tests=examples(held, site.ground.holdings.train.labels.device))

    def _prepared(self, terms: Terms) -> Folder:
        """Return the folder, decoded at home, or beside that where another form is at home already."""
        channels, height, width = terms.form.image
        try:
            kept = open_site(self.folder, self.home)
        except UserError:
            kept = None
        if kept is not None and kept.images is not None:
            if kept.images.shape[1:] == (height, width, channels):
                return kept
            return self._decoded(terms, self.home / self._form(terms))
        return self._decoded(terms, self.home)

    @staticmethod
    def _form(terms: Terms) -> str:
        channels, height, width = terms.form.image
        return f"{height}x{width}x{channels}"

    def _decoded(self, terms: Terms, out: Path) -> Folder:
        channels, height, width = terms.form.image
        bounds.check_images(out, len(read(self.folder)), terms.form.image)
        done: Prepared = prepare(self.folder, (height, width), channels, out)
        if done.decoded:
            self._say(f"decoded {done.decoded:,} images; {len(done.left_out):,} cannot be read and are left out")
        return done.site


def labeled_images(folder: Path, terms: Terms, out: Path) -> Images:
    """Return a folder's labeled images in the terms' form, decoded into `out`; raise UserError where there are none."""
    channels, height, width = terms.form.image
    try:
        found = open_site(folder, out)
    except UserError:
        found = None
    if found is None or found.images is None or found.images.shape[1:] != (height, width, channels):
        bounds.check_images(out, len(read(folder)), terms.form.image)
        found = prepare(folder, (height, width), channels, out).site
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
        raise Refused(UNFIT, "it has labels of classes that the federation does not have; see its classes and labels.")
    return labels
