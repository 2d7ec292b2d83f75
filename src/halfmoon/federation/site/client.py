"""The client of a site: it joins federations, replies to the server's requests, and writes a log.

`SiteClient.reply_to` replies to every message. What it sends about a failure names no path, file or image of the site.
"""

import hashlib
import json
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from halfmoon.api.uploads import Upload
from halfmoon.config import schema as settings
from halfmoon.core import plugins, tree
from halfmoon.core.errors import Diverged, UserError
from halfmoon.core.versions import installed_version
from halfmoon.federation.protocol import limits, messages
from halfmoon.federation.protocol.log import format_bytes
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
from halfmoon.federation.site.inspection import TermsOffer, describe_offer, inspect_terms
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
from halfmoon.methods import registry
from halfmoon.models.model_card import Card
from halfmoon.runs.factory import apply_compute_settings, count_site_threads
from halfmoon.sites.folders.prepare import STATE_FOLDER
from halfmoon.sites.folders.site_folder import MODEL_FOLDER, suggest_class
from halfmoon.sites.inference import card_document
from halfmoon.sites.inference.load import load_model
from halfmoon.storage import atomic_io
from halfmoon.storage.events import SITE_LOG, Event, EventLog, EventRecorder
from halfmoon.storage.image_digests import DIGESTS
from halfmoon.storage.run_folder import MODEL
from halfmoon.storage.serialization import pack, with_checksum

FINAL_FOLDER = "final"  # in a site's state folder: the final model of a federation

FEDERATIONS_FOLDER = "federations"  # in a site's state folder: one folder for each federation
TERMS_FILE = "terms.json"  # in a federation's folder
DOWNLOADS_FILE = "downs.json"  # in a federation's folder: the specs of the downloads that its server may send

SEE_LOG = "its own log has the reason"
NOT_AGREED = "this site's people have not agreed to these terms yet."


class _NotAgreed(RefusalError):
    """The terms wait for an agreement. That was logged when they arrived first, so it is not logged again."""


@dataclass
class SiteClient:
    """A site folder that takes part in federations.

    Attributes:
        images: the site's folders of images.
        name: name of the site.
        consent: the state folder, and on which terms the site takes part.
        trusted: plugins that the site may import (`module:Class`).
        keys: files of long-term keys.
        version: version of halfmoon.
        inspect: reads terms that are not agreed to, given their text and the plugins that may be imported.
    """

    images: SiteImages
    name: str
    consent: Consent
    trusted: tuple[str, ...] = ()
    keys: KeyFiles = field(default_factory=KeyFiles)
    version: str = field(default_factory=lambda: installed_version("halfmoon"))
    inspect: Callable[[str, tuple[str, ...]], TermsOffer] = field(default=inspect_terms, repr=False)
    _memberships: dict[str, tuple[Terms, SiteRuntime]] = field(default_factory=dict, repr=False)

    @classmethod
    def from_folder(
        cls,
        folder: Path,
        name: str,
        state_folder: Path | None = None,
        device: str = "auto",
        tests: Path | None = None,
        terms: str = ANY_TERMS,
        methods: tuple[str, ...] = (),
        trusted: tuple[str, ...] = (),
        validations: Path | None = None,
        keys: KeyFiles = KeyFiles(),  # noqa: B008 (it is frozen)
        skip_unreadable: bool = False,
    ) -> "SiteClient":
        """Set up the client of a folder of images.

        Args:
            folder: training images.
            name: name of the site.
            state_folder: where the site stores its files; None for a hidden folder in `folder`.
            device: where to compute: "auto", or a device of PyTorch such as "cpu".
            tests: folder of images to test models on; None for none.
            terms: the accepted terms: the beginning of their hash, or any (see `Consent`).
            methods: names of the accepted methods; () for all of them.
            trusted: plugins (Python modules of the user) that the site may import.
            validations: folder of images by which the server chooses the best round; None for none.
            keys: files of the long-term keys by which sites know each other with secure aggregation.
            skip_unreadable: whether to leave out any number of images that cannot be read.
        """
        if state_folder is None:
            state_folder = folder / STATE_FOLDER
        images = SiteImages(folder, state_folder, tests, device, validations, skip_unreadable)
        consent_rules = Consent(state_folder, terms=terms, methods=methods)
        return cls(images, name, consent_rules, trusted=trusted, keys=keys)

    @property
    def state_folder(self) -> Path:
        """The folder with the files that the site writes."""
        return self.consent.state_folder

    @property
    def log(self) -> EventLog:
        """The site's log. A full disk must not prevent a reply, so errors are ignored."""
        return EventLog(self.state_folder / SITE_LOG, ignore_errors=True)

    def reply_to(self, data: bytes) -> bytes:
        """Reply to a message of the server. No exception leaves this function.

        Args:
            data: the serialized message. It may be hostile.

        Returns:
            The serialized reply. A failure becomes a `Refusal` whose text has no paths, file names or numbers of this
            site, and a line in the site's log that has them.
        """
        try:
            self.state_folder.mkdir(parents=True, exist_ok=True)
            # A plugin in the server's terms is imported only if the site's people have named it as well.
            with plugins.allow_only((*self.consent.methods, *self.trusted)):
                # Tensors are parsed only after the checks of their shapes.
                unparsed = messages.scan_message(data, Offer, Request, FinalModel)
                message = unparsed.message
                check_version(self.version, message.version)
                if isinstance(message, Offer):
                    reply: Acceptance | Reply | Receipt = self._join(message)
                elif isinstance(message, Request):
                    reply = self._run_request(unparsed, message)
                else:
                    reply = self._store_final_model(unparsed, message)
                return messages.write_message(reply)
        except _NotAgreed as error:  # not logged: the server repeats its offer every few seconds
            return messages.write_message(Refusal(self.version, error.kind, str(error)))
        except RefusalError as error:
            details = str(error.__cause__ or error)
            if isinstance(error, PermanentRefusal):
                with suppress(OSError):
                    consent.save_end(self.state_folder, 1, details)
            return self._refuse(error.kind, str(error), details)
        except MalformedMessage as error:
            return self._refuse(UNFIT, str(error), f"what the server sent cannot be read: {error}")
        except Diverged as error:
            return self._refuse(FAILED, f"its training diverged; {SEE_LOG}.", str(error))
        except OSError as error:
            # The operating system's text contains no path. Without it, the error comes from a library, whose text may.
            reason = f"its disk: {error.strerror}." if error.strerror else f"its disk failed; {SEE_LOG}."
            details = f"{error.filename or self.state_folder}: {atomic_io.error_reason(error)}."
            return self._refuse(FAILED, reason, details)
        except UserError as error:
            return self._refuse(FAILED, f"it cannot take part now; {SEE_LOG}.", str(error))
        except Exception as error:  # without a reply of any kind the server would wait until its timeout
            return self._refuse(FAILED, f"it failed ({type(error).__name__}); {SEE_LOG}.", repr(error))

    def _refuse(self, kind: str, reason: str, details: str) -> bytes:
        """Write the details to the log and make a refusal with the reason, which contains nothing private."""
        self.log.record("request_failed", f"not done: {details}")
        # The reason may quote the server's message, so it may be long or contain control characters.
        printable = "".join(char if char.isprintable() else "?" for char in reason[: messages.MAX_TEXT_LENGTH])
        return messages.write_message(Refusal(self.version, kind, printable))

    def _store_final_model(self, unparsed: UnparsedMessage[Any], message: FinalModel) -> Receipt:
        """Save the final model of a federation, test it, and record that this site's participation is over.

        Args:
            unparsed: the message with its tensors, which are not parsed yet.
            message: its fields.

        Returns:
            The reply that confirms that the model is stored.
        """
        folder = self._federation_folder(message.federation)
        terms, site = self._load_membership(message.federation, folder)
        text, accuracy = save_final_model(self.state_folder, unparsed, terms, site)
        with suppress(OSError):  # a failure only disables the warning below
            # Hashes of the training images, by which later commands warn if they evaluate the model on such an image.
            self.images.write_training_digests(terms, self.log)
        text = copy_final_model(self.images.folder, self.state_folder, text)
        secure_sum.erase_secrets(folder)
        self.log.record("finished", text, accuracy=accuracy)
        # Written last: the process that shows the site's state ends when it finds this record, with this exit code.
        consent.save_end(self.state_folder, code=0, reason=text)
        return Receipt(message.federation, self.version, self.name)

    def _federation_folder(self, federation: str) -> Path:
        """Return the folder of a federation at this site, given the hash of its terms."""
        # The hash becomes the name of a folder, so anything else is refused.
        if not re.fullmatch("[0-9a-f]{64}", federation):
            raise RefusalError("the server's id of its federation is not a hash.", NOT_JOINED)
        return self.state_folder / FEDERATIONS_FOLDER / federation[:16]

    def _load_membership(self, federation: str, folder: Path) -> tuple[Terms, SiteRuntime]:
        """Load a federation that this site has joined, and check that the site's people still agree to it.

        Args:
            federation: the hash of its terms.
            folder: the federation's folder at this site.

        Returns:
            The terms, and the runtime that trains on this site's images. Both are cached until the process ends.

        Raises:
            RefusalError: this site has not joined, or its people do not agree to the terms or to the method.
        """
        cached = self._memberships.get(federation)
        terms = cached[0] if cached else load_terms(folder, self.log)
        if terms is None or terms.hash != federation:
            raise RefusalError(f"this site has not joined federation {federation[:8]} yet.", NOT_JOINED)
        self._require_method(terms.config.method)
        if not self.consent.agrees_to(terms.hash):
            self._require_agreement(describe_offer(terms), NOT_JOINED)
        if cached:
            return cached
        site = add_download_specs(self._make_runtime(terms), terms, folder)
        self._memberships[federation] = terms, site
        return terms, site

    def _join(self, offer: Offer) -> Acceptance:
        """Join a federation, if the site's people agree to its terms and the images suit them.

        `_refuse_permanently` turns a user error into a `PermanentRefusal`.

        Returns:
            The reply, which declares how many images this site has.

        Raises:
            RefusalError: the site does not join; a `PermanentRefusal` if it never will on these terms.
        """
        # Terms may be hostile. Until people have agreed to them, which is known by their hash, they are parsed only in
        # a process with limits on memory and time (`inspect`).
        if not self.consent.agrees_to(hashlib.sha256(offer.terms.encode()).hexdigest()):
            with _refuse_permanently():
                terms_offer = self.inspect(offer.terms, (*self.consent.methods, *self.trusted))
            self._require_site(terms_offer.name, terms_offer.sites)
            self._require_agreement(terms_offer, UNFIT)
        with _refuse_permanently():
            terms = Terms.parse(offer.terms)
        # Checked again, because terms that were agreed to before are not inspected.
        self._require_site(terms.name, terms.sites)
        self._require_method(terms.config.method)
        with _refuse_permanently():
            terms.check()
        folder = self._federation_folder(terms.hash)
        site = self._make_runtime(terms)
        folder.mkdir(parents=True, exist_ok=True)
        site = add_download_specs(site, terms, folder)
        self._memberships[terms.hash] = terms, site
        # Written last: this file means that the site has joined.
        atomic_io.write_atomically(folder / TERMS_FILE, terms.text.encode())
        return self._make_acceptance(terms, site)

    def _make_acceptance(self, terms: Terms, site: SiteRuntime) -> Acceptance:
        """Log that this site has joined a federation, and build the reply with its numbers of images and its key."""
        labeled, unlabeled = site.count_images()
        test_count = 0 if site.held_out.tests is None else len(site.held_out.tests.labels)
        validation_count = 0 if site.held_out.validations is None else len(site.held_out.validations.labels)
        text = f"{terms.sentence()}; this site trains on {labeled:,} labeled and {unlabeled:,} unlabeled images"
        if test_count:
            text += f"; it tests models on {test_count:,} other images"
        if validation_count:
            text += f"; {validation_count:,} other images choose the best round"
        self.log.record("joined", text, labeled=labeled, unlabeled=unlabeled, **_terms_fields(terms))
        return Acceptance(
            federation=terms.hash,
            version=self.version,
            name=self.name,
            labeled=labeled,
            unlabeled=unlabeled,
            tests=test_count,
            validations=validation_count,
            key=self.keys.public(self.state_folder) if terms.config.secure_aggregation else "",
            # 1 if the people allow this site's accuracy to be shown, by a file that a command of theirs writes.
            shared=int((self.state_folder / consent.SHARE_ACCURACY_FILE).exists()),
        )

    def _require_site(self, federation: str, sites: Sequence[str]) -> None:
        """Check that a federation has this site; raise `PermanentRefusal` if not."""
        if self.name not in sites:
            hint = suggest_class(self.name, sites)
            raise PermanentRefusal(f"federation {federation} has no site {self.name}{hint}.")

    def _require_method(self, method: str) -> None:
        """Check that the site's people accept a method; raise `PermanentRefusal` if not."""
        if not self.consent.accepts_method(method):
            accepted = " or ".join(self.consent.methods)
            raise PermanentRefusal(f"this site accepts the method {accepted}, but not {method}.")

    def _require_agreement(self, offer: TermsOffer, kind: str) -> None:
        """Check that the site's people agree to the terms of a federation.

        If not, the terms are logged and saved, so that another process can show them to the people. Terms that are
        saved already are not logged a second time, because the server repeats its offer every few seconds.

        Args:
            offer: the terms.
            kind: the kind of the refusal that is raised, such as `NOT_JOINED`.

        Raises:
            RefusalError: the people have not agreed.
        """
        self._require_method(offer.method)
        summary = offer.summary
        if self.consent.agrees_to(summary.hash):
            return
        if consent.load_offer(self.state_folder) != summary:
            fields = {"federation": offer.name, "method": offer.title, "rounds": offer.rounds}
            self.log.record("terms_offered", f"asked to take part in {summary.sentence}", **fields)
            if self.consent.terms:
                advice = f"--terms {self.consent.terms} is for other terms; start it again with --terms {summary.hash}"
            else:
                advice = f"answer yes where halfmoon site join asks, or start it again with --terms {summary.hash}"
            self.log.record("consent_missing", f"this site does not take part before its people agree: {advice}")
            # Written last: a process that finds the saved terms shows the log up to here before it asks for consent.
            consent.save_offer(self.state_folder, summary)
        raise _NotAgreed(NOT_AGREED, kind)

    def _make_runtime(self, terms: Terms) -> SiteRuntime:
        return self.images.make_runtime(terms, self.name, self.version, self.log)

    def _run_request(self, unparsed: UnparsedMessage[Any], request: Request) -> Reply:
        """Check a request for a local update, an evaluation or a step of a secure sum, and run it.

        The site's state between rounds is stored by round, attempt and query. The update continues from the state
        `request.latest`; states from before `request.oldest` are deleted, as the server never resumes from them.

        Args:
            unparsed: the message with its tensors, which are parsed only after the checks of their shapes.
            request: its fields.

        Raises:
            RefusalError: the request is invalid, or not covered by the terms.
        """
        folder = self._federation_folder(request.federation)
        terms, site = self._load_membership(request.federation, folder)
        site.check_request(request, unparsed)
        secure_sum.check_masks(unparsed.tree_spec("masks"), terms)
        latest = parse_round_key(request.latest)
        oldest = parse_round_key(request.oldest)
        # The id becomes the name of a folder, so anything else is refused.
        if not re.fullmatch("[0-9a-f]{32}", request.run):
            raise RefusalError("the server's id of its run is invalid.")
        run_folder = folder / request.run
        memory = SiteMemory(
            folder=run_folder,
            current=(request.round, request.attempt, request.query),
            latest=latest,
            device=site.local_clients.dataset.train.labels.device,
            log=self.log,
        )
        limits.check_free_disk(self.state_folder, 0)  # the minimum of free disk space, and 0 bytes of this request
        start = time.perf_counter()
        with apply_compute_settings(terms.config, count_site_threads(terms.config)):
            complete_request = unparsed.parse_trees()
            if terms.config.secure_aggregation:
                participant = self._make_participant(terms, site, memory)
                # Each stage of a sum has a request; with the last one but one the site trains, and masks its upload.
                reply = participant.reply_to(complete_request, partial(site.run_request, memories=memory))
            else:
                reply = site.run_request(complete_request, memory)
        seconds = time.perf_counter() - start
        prune_memories(run_folder, oldest)
        for event in describe_request(request, reply, received_bytes=len(unparsed.data), seconds=seconds):
            self.log.record(event.name, event.text, **event.fields)
        return reply

    def _make_participant(self, terms: Terms, site: SiteRuntime, memory: SiteMemory) -> secure_sum.SumParticipant:
        """Make this site a participant of a secure sum, which masks its upload.

        Args:
            terms: the configuration that the server and all sites of a federation share.
            site: the site's number and training.
            memory: the client's state between rounds, in whose folder the participant stores its secrets.
        """
        return secure_sum.SumParticipant(
            key=self.keys.load(self.state_folder),
            folder=memory.folder,
            number=site.number,
            sites=KnownKeys(terms.sites, memory.folder.parent, self.keys.public_keys, self.log),
            # With differential privacy all sites weigh the same: their numbers of images are not revealed.
            equal_weights=terms.config.dp_clip is not None,
            min_sites=terms.config.cohort,
        )


@contextmanager
def _refuse_permanently() -> Iterator[None]:
    """Turn a UserError about the terms into a `PermanentRefusal`: the terms of a federation never change."""
    try:
        yield
    except UserError as error:
        raise PermanentRefusal(str(error)) from error


def load_terms(folder: Path, log: EventRecorder) -> Terms | None:
    """Load the terms in a federation's folder; None if they are missing or damaged, so that the site has to rejoin."""
    text = atomic_io.read(folder / TERMS_FILE)
    try:
        return None if text is None else Terms.parse(text.decode())
    except ValueError as error:
        text = f"{folder / TERMS_FILE} is damaged, so this site has to join again: {error}"
        log.record("terms_damaged", text)
        return None


def add_download_specs(site: SiteRuntime, terms: Terms, folder: Path) -> SiteRuntime:
    """Give a site the names, shapes and dtypes of the tensors that its server may send.

    They are computed by simulating rounds of the method, which takes seconds, so they are stored in the federation's
    folder. A file that is missing or damaged is written anew.

    Args:
        site: the site.
        terms: the configuration that the server and all sites of a federation share.
        folder: the federation's folder.
    """
    path = folder / DOWNLOADS_FILE
    try:
        record = json.loads(atomic_io.read(path) or b"")
        specs_text = record["downs"].encode()
        if atomic_io.sha256(specs_text) != record["sha256"]:
            raise ValueError("the checksum is wrong")
        downloads = DownloadSpecs.from_json(json.loads(specs_text), len(terms.sites))
    except (ValueError, LookupError, TypeError, AttributeError):  # missing or damaged
        downloads = compute_download_specs(terms.text)
        specs_text = json.dumps(downloads.to_json())
        record = {"downs": specs_text, "sha256": atomic_io.sha256(specs_text.encode())}
        atomic_io.write_atomically(path, json.dumps(record).encode())
    return replace(site, downloads=downloads)


def save_final_model(
    state_folder: Path, unparsed: UnparsedMessage[FinalModel], terms: Terms, site: SiteRuntime
) -> tuple[str, float | None]:
    """Write the final model of a federation and its card into the site's state folder, and test the model.

    Args:
        state_folder: the site's state folder.
        unparsed: the server's message.
        terms: the configuration that the server and all sites of a federation share.
        site: the site.

    Returns:
        A sentence for the log about the model's file and accuracy; and the accuracy on the site's test images, from 0 to
        1, None if it has none.

    Raises:
        RefusalError: the model or its card is not that of the federation.
    """
    task = site.task
    # The shapes are checked before any tensor is allocated.
    if unparsed.tree_spec("model") != make_tree_spec(limits.make_meta_model(task.network)):
        raise RefusalError("the server sends a final model that is not the network of the terms.")
    message = unparsed.parse_trees()
    path = state_folder / FINAL_FOLDER / MODEL
    card = _parse_card(message.card, path)
    image_spec = terms.image_spec
    # The frozen weights, if any, are not sent: they are added here.
    network, model = task.network.full_model(message.model)
    if (card.network, card.classes, card.image) != (network, image_spec.classes, image_spec.image):
        raise RefusalError("the card of the final model is not that of the federation.")
    path.parent.mkdir(parents=True, exist_ok=True)
    data = with_checksum(pack(model)[0], card.render())
    atomic_io.write_atomically(path, data)
    load_model(path, network=terms.config.network)  # fails if the file cannot be used
    evaluation = site.evaluate(message.model)
    image_counts = site.local_clients.dataset.split_size(site.number)
    provenance = card_document.ModelProvenance(
        name=terms.name,
        terms=terms.hash,
        sites=terms.sites,
        rounds=task.rounds,
        labeled=image_counts.labeled,
        unlabeled=image_counts.unlabeled,
        version=site.version,
    )
    confusion = evaluation["confusion"].numpy() if "confusion" in evaluation else None
    sections = card_document.build_sections(card, provenance, atomic_io.sha256(data), confusion)
    card_document.write_card(path.parent, f"The model of federation {terms.name}", sections)
    text = f"finished: the model is in {path}"
    if "confusion" not in evaluation:
        return text, None
    accuracy = _accuracy(evaluation)
    return f"{text}, it is right on {accuracy:.2%} of your test images", accuracy


def _parse_card(text: str, path: Path) -> Card:
    """Parse the model card that a server sent, which may be hostile; `path` is the model's file, for errors.

    Raises:
        RefusalError: the card is invalid.
    """
    try:
        fields = json.loads(text)
        if not isinstance(fields, dict) or not all(isinstance(value, str) for value in fields.values()):
            raise ValueError("it is no table of texts")
        return Card.parse(fields, path)
    except ValueError as error:
        raise RefusalError("the card of the final model cannot be read.") from error


def copy_final_model(folder: Path, state_folder: Path, text: str) -> str:
    """Copy the final model and its card from a hidden state folder to the folder of images, where people see them.

    Args:
        folder: the folder of images.
        state_folder: the site's state folder. There is no copy if people have chosen it.
        text: a sentence for the log about the model.

    Returns:
        `text`, extended by where the copy is or why there is none.
    """
    if state_folder != folder / STATE_FOLDER:
        return text
    copy_folder = folder / MODEL_FOLDER
    try:
        copy_folder.mkdir(exist_ok=True)
        for file in (MODEL, *card_document.CARD_FILES):
            atomic_io.write_atomically(copy_folder / file, (state_folder / FINAL_FOLDER / file).read_bytes())
        # Hashes of the training images, by which commands warn if they evaluate the model on one of them.
        if (digests := atomic_io.read(state_folder / DIGESTS)) is not None:
            atomic_io.write_atomically(copy_folder / DIGESTS, digests)
    except OSError as error:
        return f"{text}; it could not be copied to {copy_folder} ({atomic_io.error_reason(error)})"
    return f"{text}; a copy and its card ({card_document.CARD_FILES[1]}) are in {copy_folder}"


def _accuracy(evaluation: tree.Tree) -> float:
    confusion = evaluation["confusion"]
    return int(confusion.diagonal().sum()) / max(1, int(confusion.sum()))


def _terms_fields(terms: Terms) -> dict[str, Any]:
    """Collect the fields of an event about terms."""
    method = registry.entry(terms.config.method).title
    return {"federation": terms.name, "method": method, "rounds": settings.count_rounds(terms.config)}


def describe_request(request: Request, reply: Reply, received_bytes: int, seconds: float) -> list[Event]:
    """Describe a request and its reply for the site's log.

    Args:
        request: the request.
        reply: its reply.
        received_bytes: size of the request's message.
        seconds: how long it took to compute the reply.

    Returns:
        Events: an "evaluated" for each set of images, then "trained" with what is sent, or "masks_replied" for a stage
        of a secure sum in which the site sends shares. The stage in which it only announces public keys is not logged.
    """
    events = _describe_evaluations(request, reply)
    if request.client_update:
        events.append(_describe_training(request, reply, received_bytes, seconds))
    elif "shares" in reply.upload:
        text = f"round {request.round + 1}: received {format_bytes(received_bytes)} and replied, for a secure sum"
        events.append(Event("masks_replied", text, {"round": request.round + 1}))
    return events


def _describe_evaluations(request: Request, reply: Reply) -> list[Event]:
    """Describe the accuracy of the received model on a site's test and validation images, for the site's log.

    Returns:
        An event for each set of images that the reply has an evaluation on.
    """
    if request.client_update:
        # The model was received for training in this round, so it is that after `request.round` finished rounds.
        model = f"the model before round {request.round + 1}"
        finished_rounds = request.round
    else:
        # A request without training comes after the last round; its model may be that of an earlier one.
        model = "the last model"
        finished_rounds = None
    events = []
    evaluations = {"test": reply.evaluation, "validation": reply.evaluation.get("validation", {})}
    for kind, evaluation in evaluations.items():
        if "confusion" in evaluation:
            accuracy = _accuracy(evaluation)
            text = f"{model} is right on {accuracy:.2%} of the {kind} images here"
            events.append(Event("evaluated", text, {"images": kind, "rounds": finished_rounds, "accuracy": accuracy}))
    return events


def _describe_training(request: Request, reply: Reply, received_bytes: int, seconds: float) -> Event:
    """Describe a local update for the site's log: its steps, time and loss, and the size of each section of the upload.

    Args:
        request: the request of the update.
        reply: the reply with the upload.
        received_bytes: size of the request's message.
        seconds: how long the update took.
    """
    steps, labeled, unlabeled, _ = reply.amount  # images are those of one step; the last one are epochs
    training = f"trained {steps} steps of {labeled} labeled and {unlabeled} unlabeled images" if steps else "no step"
    loss = reply.samples.get("loss")
    mean_loss = float(loss["total"]) / float(loss["count"]) if loss else None
    loss_text = "" if mean_loss is None else f", mean loss {mean_loss:.4f}"
    if "weight" in reply.upload:
        sections = Upload.from_tree(reply.upload).parts
    else:  # the masked vector of a secure sum, as a section with one tensor
        sections = {name: {"": leaf} for name, leaf in reply.upload.items()}
    sizes = ", ".join(f"{name} {format_bytes(tree.nbytes(section))}" for name, section in sections.items())
    attempt = f" (attempt {request.attempt + 1})" if request.attempt else ""
    work_text = f"{training} in {seconds:.1f} s{loss_text}"
    text = (
        f"round {request.round + 1}{attempt}, {request.client_update}: received {format_bytes(received_bytes)}; "
        f"{work_text}; sends {sizes}"
    )
    fields = {
        "round": request.round + 1,
        "received": format_bytes(received_bytes),
        "work": work_text,
        "sent": sizes,
        "loss": mean_loss,
    }
    return Event("trained", text, fields)
