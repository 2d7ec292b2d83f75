"""A site folder that takes part: joins a federation, answers requests, remembers, and logs.

Whatever comes, `SiteClient.reply_to` answers; its words about a failure name no path, file or image of the site.
"""

import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from halfmoon.api.uploads import Upload
from halfmoon.core import plugins, tree
from halfmoon.core.errors import UserError
from halfmoon.engine.driver import Diverged
from halfmoon.federation.protocol import limits, messages
from halfmoon.federation.protocol.log import EventLog, format_bytes
from halfmoon.federation.protocol.messages import (
    FAILED,
    NOT_JOINED,
    UNFIT,
    Acceptance,
    FinalModel,
    MalformedMessage,
    Offer,
    PermanentRefusal,
    Receipt,
    Refusal,
    RefusalError,
    Reply,
    Request,
    UnparsedMessage,
)
from halfmoon.federation.protocol.terms import Terms
from halfmoon.federation.protocol.tree_spec import make_tree_spec
from halfmoon.federation.site import consent, secure_sum
from halfmoon.federation.site.consent import ANY_TERMS, Consent
from halfmoon.federation.site.download_spec import DownloadSpecs
from halfmoon.federation.site.runtime import (
    SiteImages,
    SiteMemory,
    SiteRuntime,
    check_version,
    compute_download_specs,
    parse_round_key,
    prune_memories,
)
from halfmoon.federation.site.site_keys import KeyFiles, KnownKeys
from halfmoon.runs.factory import computing, site_threads
from halfmoon.runs.model_card import Card
from halfmoon.sites.folders.prepare import STATE_FOLDER
from halfmoon.sites.folders.site_folder import MODEL_FOLDER, suggest_class
from halfmoon.sites.inference import card_document
from halfmoon.sites.inference.load import load_model
from halfmoon.storage import atomic_io
from halfmoon.storage.run_folder import MODEL
from halfmoon.storage.serialization import pack, with_seal

LOG_FILE, FINAL_FOLDER = "join.log", "final"
"""In a site's home: its log, and the folder of the model that a federation ended with."""

FEDERATIONS_FOLDER, TERMS_FILE, DOWNLOADS_FILE = "federations", "terms.json", "downs.json"
"""In a site's home the folders of federations; in each the terms, and the shapes that their server may send."""

SEE_LOG = "its own log says why"
NOT_AGREED = "this site's people have not agreed to these terms yet."


class _NotAgreed(RefusalError):
    """Terms that wait for a yes; the log has said so when they came first."""


@dataclass
class SiteClient:
    """The site `name`; its `consent` names its home, `trusted` are the parts from outside that it may load."""

    images: SiteImages
    name: str
    consent: Consent
    trusted: tuple[str, ...] = ()
    keys: KeyFiles = field(default_factory=KeyFiles)
    version: str = field(default_factory=lambda: metadata.version("halfmoon"))
    _sites: dict[str, tuple[Terms, SiteRuntime]] = field(default_factory=dict, repr=False)

    @classmethod
    def from_folder(
        cls,
        folder: Path,
        name: str,
        home: Path | None = None,
        device: str = "auto",
        tests: Path | None = None,
        terms: str = ANY_TERMS,
        methods: tuple[str, ...] = (),
        trusted: tuple[str, ...] = (),
        validations: Path | None = None,
        keys: KeyFiles = KeyFiles(),  # noqa: B008 (it is frozen)
    ) -> "SiteClient":
        home = home or folder / STATE_FOLDER
        images = SiteImages(folder, home, tests, device, validations)
        return cls(images, name, Consent(home, terms, methods), trusted, keys)

    @property
    def home(self) -> Path:
        return self.consent.home

    @property
    def log(self) -> EventLog:
        return EventLog(self.home / LOG_FILE)

    def reply_to(self, data: bytes) -> bytes:
        """Return the answer to a message; a failure becomes a `Refusal`, and a line in the log."""
        try:
            self.home.mkdir(parents=True, exist_ok=True)
            # A server's part from outside is imported only where the site's people have named it too.
            with plugins.only((*self.consent.methods, *self.trusted)):
                return messages.write_message(self._answer(messages.scan_message(data, Offer, Request, FinalModel)))
        except _NotAgreed as error:
            return messages.write_message(Refusal(self.version, error.kind, str(error)))
        except RefusalError as error:
            why = str(error.__cause__ or error)
            with suppress(OSError):
                if isinstance(error, PermanentRefusal):
                    consent.save_end(self.home, 1, why)
            return self._refuse(error.kind, str(error), why)
        except MalformedMessage as error:
            return self._refuse(UNFIT, str(error), f"what the server sent cannot be read: {error}")
        except Diverged as error:
            return self._refuse(FAILED, f"its training diverged; {SEE_LOG}.", str(error))
        except OSError as error:
            # The system's own word names no file; a library's may, where there is none.
            reason = f"its disk: {error.strerror}." if error.strerror else f"its disk failed; {SEE_LOG}."
            return self._refuse(FAILED, reason, f"{error.filename or self.home}: {atomic_io.reason(error)}.")
        except UserError as error:
            return self._refuse(FAILED, f"it cannot take part now; {SEE_LOG}.", str(error))
        except Exception as error:  # whatever it is, the server has to hear that no answer will come
            return self._refuse(FAILED, f"it failed ({type(error).__name__}); {SEE_LOG}.", repr(error))

    def _refuse(self, kind: str, reason: str, words: str) -> bytes:
        self._say(f"not done: {words}")
        # A server's words may be quoted, and come back to a log there.
        plain = "".join(letter if letter.isprintable() else "?" for letter in reason[: messages.MAX_TEXT_LENGTH])
        return messages.write_message(Refusal(self.version, kind, plain))

    def _say(self, words: str) -> None:
        with suppress(OSError):  # a full disk: what cannot be written down is still answered
            self.log.write(words)

    def _answer(self, unparsed: UnparsedMessage[Offer | Request | FinalModel]) -> Acceptance | Reply | Receipt:
        message = unparsed.message
        check_version(self.version, message.version)
        if isinstance(message, FinalModel):
            return self._finish(unparsed, message)
        return self._join(message) if isinstance(message, Offer) else self._update(unparsed, message)

    def _finish(self, unparsed: UnparsedMessage[Any], message: FinalModel) -> Receipt:
        place = self._place(message.federation)
        terms, site = self._membership(message.federation, place)
        words = save_final_model(self.home, unparsed, terms, site)
        words = copy_final_model(self.images.folder, self.home, words)
        secure_sum.erase_secrets(place)
        self._say(words)
        consent.save_end(self.home, 0, words)
        return Receipt(message.federation, self.version, self.name)

    def _place(self, federation: str) -> Path:
        if not re.fullmatch("[0-9a-f]{64}", federation):  # it becomes the name of a folder
            raise RefusalError("what the server calls its federation is no hash of any.", NOT_JOINED)
        return self.home / FEDERATIONS_FOLDER / federation[:16]

    def _membership(self, federation: str, place: Path) -> tuple[Terms, SiteRuntime]:
        cached = self._sites.get(federation)
        terms = cached[0] if cached else load_terms(place, self._say)
        if terms is None or terms.hash != federation:
            raise RefusalError(f"this site has not joined federation {federation[:8]} yet.", NOT_JOINED)
        self._agree_to(terms, NOT_JOINED)
        site = cached[1] if cached else add_download_specs(self._runtime(terms), terms, place)
        self._sites[federation] = terms, site
        return terms, site

    def _join(self, offer: Offer) -> Acceptance:
        with _possible():
            terms = Terms.parse(offer.terms)
        if self.name not in terms.sites:
            near = suggest_class(self.name, terms.sites)
            raise PermanentRefusal(f"federation {terms.name} has no site {self.name}{near}.")
        self._agree_to(terms, UNFIT)
        with _possible():
            terms.check()
        place = self._place(terms.hash)
        site = self._runtime(terms)
        place.mkdir(parents=True, exist_ok=True)
        site = add_download_specs(site, terms, place)
        self._sites[terms.hash] = terms, site
        atomic_io.replace(place / TERMS_FILE, terms.text.encode())
        labeled, unlabeled = site.counts()
        tests, validations = (0 if images is None else len(images.labels) for images in site.held_out)
        others = f"; it tests models on {tests:,} others" if tests else ""
        others += f"; {validations:,} others choose the round whose model is kept" if validations else ""
        self._say(
            f"{terms.sentence()}; this site gives {labeled:,} images with a label and {unlabeled:,} without{others}"
        )
        key = self.keys.public(self.home) if terms.config.secure_aggregation else ""
        shared = int((self.home / consent.SHARE_ACCURACY_FILE).exists())
        return Acceptance(terms.hash, self.version, self.name, labeled, unlabeled, tests, validations, key, shared)

    def _agree_to(self, terms: Terms, kind: str) -> None:
        """Raise `RefusalError` for terms without the consent of the site's people; write down those for them to see."""
        accepts, method = self.consent, terms.config.method
        if not accepts.accepts_method(method):
            raise PermanentRefusal(f"this site accepts the method {' or '.join(accepts.methods)}, but not {method}.")
        if accepts.agrees_to(terms.hash):
            return
        summary = terms.summary()
        if consent.load_offer(self.home) != summary:
            self._say(f"asked to take part in {terms.sentence()}")
            others = f"--terms {accepts.terms} is about others; " if accepts.terms else ""
            how = "" if accepts.terms else "answer yes where halfmoon site join asks, or "
            self._say(
                f"this site does not take part before its people agree: {others}{how}start it again with --terms "
                f"{terms.hash}"
            )
            consent.save_offer(self.home, summary)  # last: the log is read before the question
        raise _NotAgreed(NOT_AGREED, kind)

    def _runtime(self, terms: Terms) -> SiteRuntime:
        return self.images.runtime(terms, self.name, self.version, self._say)

    def _update(self, unparsed: UnparsedMessage[Any], request: Request) -> Reply:
        place = self._place(request.federation)
        terms, site = self._membership(request.federation, place)
        site.check_request(request, unparsed)
        secure_sum.check_masks(unparsed.tree_spec("masks"), terms)
        latest, oldest = parse_round_key(request.latest), parse_round_key(request.oldest)
        if not re.fullmatch("[0-9a-f]{32}", request.run):  # it becomes the name of a folder
            raise RefusalError("what the server calls its run is no number of any.")
        folder = place / request.run
        at = (request.round, request.attempt, request.query)
        memory = SiteMemory(folder, at, latest, site.local_clients.dataset.train.labels.device, self._say)
        limits.check_free_disk(self.home, 0)
        start = time.perf_counter()
        with computing(site_threads(terms.config)):
            reply = self._reply(unparsed.parse_trees(), terms, site, memory)
        prune_memories(folder, oldest)
        for line in describe_request(request, reply, len(unparsed.data), time.perf_counter() - start):
            self._say(line)
        return reply

    def _reply(self, request: Request, terms: Terms, site: SiteRuntime, memory: SiteMemory) -> Reply:
        if not terms.config.secure_aggregation:
            return site.reply(request, memory)
        even = terms.config.dp_clip is not None
        sites = KnownKeys(terms.sites, memory.folder.parent, self.keys.others, self._say)
        key = self.keys.load(self.home)
        part = secure_sum.SumParticipant(key, memory.folder, site.number, sites, even, terms.config.cohort)
        return part.reply_to(request, lambda plain: site.reply(plain, memory))


@contextmanager
def _possible() -> Iterator[None]:
    """Turn a UserError about the terms into the end of this site's part: they stay as they are."""
    try:
        yield
    except UserError as error:
        raise PermanentRefusal(str(error)) from error


def load_terms(place: Path, say: Callable[[str], None]) -> Terms | None:
    """Return the terms of a federation's folder; None where they are missing or damaged: the site joins again."""
    text = atomic_io.read(place / TERMS_FILE)
    try:
        return None if text is None else Terms.parse(text.decode())
    except ValueError as error:
        say(f"{place / TERMS_FILE} is damaged, so this site has to join again: {error}")
        return None


def add_download_specs(site: SiteRuntime, terms: Terms, place: Path) -> SiteRuntime:
    """Return the site with the shapes of its downlinks, which are computed once and stored in `place`."""
    try:
        record = json.loads(atomic_io.read(place / DOWNLOADS_FILE) or b"")
        facts = record["downs"].encode()
        if atomic_io.digest(facts) != record["sha256"]:
            raise ValueError
        downlinks = DownloadSpecs.from_json(json.loads(facts), len(terms.sites))
    except (ValueError, LookupError, TypeError, AttributeError):  # damaged, or not there yet
        downlinks = compute_download_specs(terms.text)
        text = json.dumps(downlinks.to_json())
        record = {"downs": text, "sha256": atomic_io.digest(text.encode())}
        atomic_io.replace(place / DOWNLOADS_FILE, json.dumps(record).encode())
    return replace(site, downlinks=downlinks)


def save_final_model(home: Path, unparsed: UnparsedMessage[FinalModel], terms: Terms, site: SiteRuntime) -> str:
    """Write the final model, read it back, and say where it is and how it tests; raise `RefusalError`."""
    task = site.task
    if unparsed.tree_spec("model") != make_tree_spec(limits.make_meta_model(task.network)):
        raise RefusalError("the final model that the server sends is not the one that was agreed on.")
    message = unparsed.parse_trees()
    path = home / FINAL_FOLDER / MODEL
    try:
        texts = json.loads(message.card)
        if not isinstance(texts, dict) or not all(isinstance(value, str) for value in texts.values()):
            raise ValueError("it is no table of texts")
        card = Card.parse(texts, path)
    except ValueError as error:
        raise RefusalError("the card of the final model cannot be read.") from error
    form = terms.image_spec
    network, model = task.network.whole(message.model)
    if (card.network, card.classes, card.image) != (network, form.classes, form.image):
        raise RefusalError("the card of the final model is not that of the federation.")
    path.parent.mkdir(parents=True, exist_ok=True)
    data = with_seal(pack(model)[0], card.render())
    atomic_io.replace(path, data)
    load_model(path, network=terms.config.network)
    test = site.evaluate(message.model)
    rows = site.local_clients.dataset.split_size(site.number)
    counts = (site.task.rounds, rows.labeled, rows.unlabeled)
    origin = card_document.ModelProvenance(terms.name, terms.hash, terms.sites, *counts, site.version)
    confusion = test["confusion"].numpy() if "confusion" in test else None
    parts = card_document.build_sections(card, origin, atomic_io.digest(data), confusion)
    card_document.write_card(path.parent, f"The model of federation {terms.name}", parts)
    share = f", it is right on {_accuracy(test):.2%} of your test images" if "confusion" in test else ""
    return f"finished: the model lies in {path}{share}"


def copy_final_model(folder: Path, home: Path, words: str) -> str:
    """Copy the final model and its card from a hidden home to where people see them; return where all lies."""
    if home != folder / STATE_FOLDER:
        return words
    try:
        (folder / MODEL_FOLDER).mkdir(exist_ok=True)
        for file in (MODEL, *card_document.CARD_FILES):
            atomic_io.replace(folder / MODEL_FOLDER / file, (home / FINAL_FOLDER / file).read_bytes())
    except OSError as error:
        return f"{words}; it could not be copied to {folder / MODEL_FOLDER} ({atomic_io.reason(error)})"
    return f"{words}; a copy and its card ({card_document.CARD_FILES[1]}) lie in {folder / MODEL_FOLDER}"


def _accuracy(test: tree.Tree) -> float:
    cells = test["confusion"]
    return int(cells.diagonal().sum()) / max(1, int(cells.sum()))


def describe_request(request: Request, reply: Reply, received: int, seconds: float) -> list[str]:
    """Return the log's lines about a request that was answered."""
    lines = []
    which = f"the model before round {request.round + 1}" if request.client_update else "the last model"
    for kind, test in {"test": reply.evaluation, "validation": reply.evaluation.get("validation", {})}.items():
        if "confusion" in test:
            lines.append(f"{which} is right on {_accuracy(test):.2%} of the {kind} images here")
    if not request.client_update:
        if "shares" in reply.upload:
            lines.append(
                f"round {request.round + 1}: received {format_bytes(received)} and answered, for a sum under masks"
            )
        return lines
    steps, labeled, unlabeled, _ = reply.amount
    trained = f"trained {steps} steps of {labeled} labeled and {unlabeled} unlabeled images" if steps else "no step"
    loss = reply.samples.get("loss")
    mean = f", mean loss {float(loss['total']) / float(loss['count']):.4f}" if loss else ""
    parts = (
        Upload.from_tree(reply.upload).parts
        if "weight" in reply.upload
        else {name: {"": leaf} for name, leaf in reply.upload.items()}
    )
    sizes = ", ".join(f"{name} {format_bytes(tree.nbytes(part))}" for name, part in parts.items())
    again = f" (attempt {request.attempt + 1})" if request.attempt else ""
    facts = f"received {format_bytes(received)}; {trained} in {seconds:.1f} s{mean}; sends {sizes}"
    return [*lines, f"round {request.round + 1}{again}, {request.client_update}: {facts}"]
