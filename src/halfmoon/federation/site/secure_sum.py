"""A site's side of a secure sum, of which the server sees no single term (`halfmoon.aggregation.secure.masking`).

The server requests, in four stages, keys for this sum (`ANNOUNCE_KEYS`), encrypted shares (`DEAL_SHARES`), the masked
update (`MASK_UPDATE`), and the shares that remove the masks (`REVEAL_SHARES`). Each site checks that the keys are
signed with the long-term keys of the other sites, so the server cannot substitute its own.

A reply follows from the secret of the sum and from a log of replies on the disk: a repeated request gets the same
reply, and a different request for the same stage is refused. So no two vectors are sent under the same masks, and no
shares for two sets of sites. The secret is in one file, which is overwritten before the last reply of its sum is sent,
or when another sum begins.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from halfmoon.aggregation import AggregationContext, compute_update
from halfmoon.aggregation.secure import masking, signing
from halfmoon.aggregation.secure.fixed_point import check_summable, encode_contribution
from halfmoon.api.uploads import Upload
from halfmoon.core.tree import Tree
from halfmoon.federation.protocol.messages import (
    ANNOUNCE_KEYS,
    DEAL_SHARES,
    MASK_UPDATE,
    REVEAL_SHARES,
    SESSION_BYTES,
    SITE_TENSORS,
    STAGE_TENSORS,
    RefusalError,
    Reply,
    Request,
    make_sum_id,
    split_rows,
    stack_rows,
)
from halfmoon.federation.protocol.terms import Terms
from halfmoon.federation.protocol.tree_spec import TreeSpec
from halfmoon.federation.site.site_keys import KnownKeys, read_private_json
from halfmoon.storage import atomic_io

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric import ec

SUMS_FOLDER = "sums"  # in a run's folder
SECRET_FILE = "secret"  # in `SUMS_FOLDER`: the secret of the sum that is in progress

# Names in the files of `ReplyLog`, besides those of the stages.
_SESSION = "session"  # the session of the sum
_VECTOR = "vector"  # hash of the update that was sent under masks
_SURVIVORS = "told"  # the sites whose sum this site helped to reveal, in this or an earlier session


def check_masks(masks: TreeSpec, terms: Terms) -> None:
    """Check the field `masks` of a request by the names, shapes and dtypes of its tensors, before they are parsed.

    It has the tensors of one stage of the protocol of secure aggregation, such as keys or encrypted shares.

    Raises:
        RefusalError: they are invalid, or the terms have no secure sums.
    """
    if masks and not terms.config.secure_aggregation:
        raise RefusalError("the server requests a secure sum, but the terms have no secure aggregation.")
    fault = next(_find_mask_faults(masks, len(terms.sites)), None)
    if fault is not None:
        raise RefusalError(f"what the server sends for a secure sum is invalid: {fault}.")


def _find_mask_faults(masks: TreeSpec, site_count: int) -> Iterator[str]:
    """Yield the faults in the tensors that the server sends for one stage of a secure sum.

    The stages are to announce keys (with a random session id), to deal shares, to mask the update, and to reveal
    shares. The tensors in `SITE_TENSORS` (numbers, keys and signatures of sites) have one row for each of these sites.

    Args:
        masks: (shape, dtype) of each tensor, by "stage/name".
        site_count: the number of sites of the federation.
    """
    if not masks:
        return
    stage = next(iter(masks)).split("/")[0]  # of "stage/name"
    # For each tensor of the stage its shape after the first dimension, and its dtype.
    expected = STAGE_TENSORS.get(stage, {})
    if set(masks) != {f"{stage}/{name}" for name in expected}:
        yield "it belongs to no stage of a sum"
        return
    row_counts = set()  # the first dimensions of the tensors with one row for each site
    for path, leaf_spec in masks.items():
        name = path.removeprefix(f"{stage}/")
        if leaf_spec is None:
            yield f"its {path} is no tensor"
            continue
        shape, dtype = leaf_spec
        if name in SITE_TENSORS:
            row_counts.add(shape[0] if shape else None)
        if not shape or (shape[1:], dtype) != expected[name]:
            yield f"its {path} has the wrong shape or type"
        elif stage == ANNOUNCE_KEYS and shape[0] != SESSION_BYTES:
            yield f"its {path} has {shape[0]} bytes, not {SESSION_BYTES}"
        elif stage != ANNOUNCE_KEYS and shape[0] > site_count:
            yield f"its {path} has {shape[0]} sites, and the federation has {site_count}"
    if len(row_counts) > 1:
        yield "its keys are of other sites than it names"


@dataclass(frozen=True)
class SumParticipant:
    """One site as a participant of the secure sums of a run.

    Attributes:
        key: the site's long-term key.
        folder: the run's folder; the files of its sums are in `SUMS_FOLDER`.
        number: number of the site.
        sites: the names and long-term keys of all sites.
        equal_weights: whether the site weighs 1, instead of its number of images.
        min_sites: fewest sites of a sum. With fewer, the server could combine an honest site with its own ones only.
    """

    key: ec.EllipticCurvePrivateKey
    folder: Path
    number: int
    sites: KnownKeys
    equal_weights: bool
    min_sites: int = masking.MIN_PARTIES

    @cached_property
    def public_key(self) -> bytes:
        """The site's long-term public key."""
        return signing.encode_public_key(self.key.public_key())

    def reply_to(self, request: Request, reply_without_masks: Callable[[Request], Reply]) -> Reply:
        """Reply to a request of a federation with secure aggregation.

        Args:
            request: a request, whose masks were checked by `check_masks`. They name the stage: announce keys, deal
                shares, mask the update, or reveal shares. Without masks it requests an evaluation.
            reply_without_masks: runs the local update or evaluation of a request and makes the reply in plain.

        Returns:
            The reply. Its upload is a masked vector, or tensors of another stage of the sum.

        Raises:
            RefusalError: the request does not follow the protocol, or differs from an earlier one of the same stage.
        """
        if not request.masks:
            if request.client_update:
                raise RefusalError("the server requests an upload without masks, but the terms allow secure sums only.")
            return reply_without_masks(request)
        ((stage, masks),) = request.masks.items()
        # Only in the stage of the masked update does the server request a client update, and always then.
        if (stage == MASK_UPDATE) != bool(request.client_update):
            raise RefusalError("the server requests a client update together with another stage of a secure sum.")
        log = ReplyLog(self.folder / SUMS_FOLDER, request)
        if stage == MASK_UPDATE:
            return self._mask_update(request, log, masks, reply_without_masks)
        if stage == ANNOUNCE_KEYS:
            upload = self._announce_keys(request, log, masks)
        elif stage == DEAL_SHARES:
            upload = self._deal_shares(request, log, masks)
        else:
            upload = self._reveal_shares(request, log, masks)
        # Without a client update nothing is trained: this is a reply without an upload.
        empty_reply = reply_without_masks(request)
        return replace(empty_reply, upload=upload)

    def _announce_keys(self, request: Request, log: ReplyLog, masks: Tree) -> Tree:
        """Generate this site's key pairs for one secure sum, and sign the public keys with its long-term key.

        Args:
            request: the request.
            log: this site's earlier replies in the sum.
            masks: {"session": random bytes that identify the sum}.

        Returns:
            {"keys", "signature"}, both uint8.
        """
        session = masks["session"].numpy().tobytes().hex()
        # A sum is identified by its round, attempt, query and session: the server may repeat it in another session.
        sum_id = make_sum_id(request, session)
        secret_file = self._secret_file(sum_id)
        # The secret is erased at the end of its sum. Generating another one would give other keys for the same sum, so
        # a sum whose keys have been used to deal shares is not continued without it.
        shares_are_dealt = log.has(DEAL_SHARES) and log.get(_SESSION) == session
        if shares_are_dealt and secret_file.read() is None:
            raise RefusalError("the server requests keys of a sum that is over for this site.")
        keys = masking.compute_public_keys(secret_file.read_or_generate())
        log.begin(session)
        signature = signing.sign(self.key, masking.announcement(sum_id, self.number, keys))
        return {"keys": stack_rows([keys])[0], "signature": stack_rows([signature])[0]}

    def _deal_shares(self, request: Request, log: ReplyLog, masks: Tree) -> Tree:
        """Check the keys of all sites, and encrypt a share of this site's secrets for each of them.

        Args:
            request: the request.
            log: this site's earlier replies in the sum.
            masks: "asked", the numbers of the sites of the sum; "sites", those of the n sites with keys; and for each
                of these a row of "keys" (of this sum), "lasting" (long-term public key) and "signatures".

        Returns:
            {"shares": uint8, (n, bytes)}: one encrypted share for each site with keys.
        """
        secret, sum_id = self._current_sum(request, log)  # of the keys that this site has announced
        cohort = self._parse_numbers(masks["asked"])
        numbers = self._parse_numbers(masks["sites"])
        self._check_cohort(cohort, numbers)
        keys = split_rows(masks["keys"])
        # Long-term keys of different lengths are padded with zeros on the left.
        long_term_keys = [row.lstrip(b"\0") for row in split_rows(masks["lasting"])]
        index = numbers.index(self.number)
        if keys[index] != masking.compute_public_keys(secret) or long_term_keys[index] != self.public_key:
            raise RefusalError("the server sends other keys of this site than its own.")
        # A server that substitutes its keys for those of a site could read the shares meant for that site.
        signatures = split_rows(masks["signatures"])
        for number, long_term_key, key, signature in zip(numbers, long_term_keys, keys, signatures, strict=True):
            if not signing.verify(long_term_key, masking.announcement(sum_id, number, key), signature):
                name = self.sites.names[number]
                raise RefusalError(f"the server sends keys of {name} for this sum that {name} has not signed.")
        self.sites.check(dict(zip(numbers, long_term_keys, strict=True)))
        hex_keys = [key.hex() for key in keys]
        # The later stages read the keys from this record. It refuses a second request of this stage with other keys.
        log.record_once(DEAL_SHARES, {"asked": list(cohort), "numbers": list(numbers), "keys": hex_keys})
        return {"shares": stack_rows(self._party(request, log).deal())}

    def _check_cohort(self, cohort: tuple[int, ...], with_keys: tuple[int, ...]) -> None:
        """Check that enough sites are in a secure sum, because the sum of few updates reveals much about each.

        Args:
            cohort: numbers of the sites that the server asks to take part.
            with_keys: numbers of those that have announced keys.

        Raises:
            RefusalError: there are too few.
        """
        subject = f"the server requests a sum of {len(cohort)} sites"
        if len(cohort) < masking.MIN_PARTIES:
            raise RefusalError(f"{subject}: a sum of fewer than {masking.MIN_PARTIES} hides nothing.")
        if len(cohort) < self.min_sites:
            raise RefusalError(f"{subject}, but the terms have cohorts of {self.min_sites}: a smaller sum hides less.")
        if not set(with_keys) <= set(cohort):
            raise RefusalError("the server sends keys of sites that are not in the sum.")
        needed = masking.threshold(len(cohort))
        if len(with_keys) < needed:
            raise RefusalError(f"{len(with_keys)} sites of {len(cohort)} have keys, and {needed} are needed.")

    def _mask_update(
        self, request: Request, log: ReplyLog, masks: Tree, reply_without_masks: Callable[[Request], Reply]
    ) -> Reply:
        """Run the local update and mask its upload, so that the server can read it only as a term of the sum.

        Args:
            request: the request of the local update.
            log: this site's earlier replies in the sum.
            masks: {"sites": numbers of the sites that have dealt shares}.
            reply_without_masks: runs the local update and makes the reply in plain.

        Returns:
            The reply with the upload {"sum": int64, (number of parameters + 1,)}.
        """
        party = self._party(request, log)
        numbers = self._parse_numbers(masks["sites"])
        if not set(numbers) <= set(party.cohort.numbers):
            raise RefusalError("the server includes sites that it did not ask for shares.")
        if len(numbers) < party.cohort.threshold:
            raise RefusalError(f"{len(numbers)} sites have dealt shares, and {party.cohort.threshold} are needed.")
        log.record_once(MASK_UPDATE, list(numbers))
        reply = reply_without_masks(request)
        vector = self._make_vector(request, reply.upload, len(party.cohort.members))
        # Two vectors under the same masks would reveal their difference, so the log has a hash of the only valid one.
        log.record_once(_VECTOR, atomic_io.sha256(vector.tobytes()))
        masked = party.mask(vector, masking.Masking(party.cohort, numbers))
        # torch has no uint64 arithmetic, so the sum is sent as int64 with the same bits.
        return replace(reply, upload={"sum": torch.from_numpy(masked.view(np.int64))})

    def _make_vector(self, request: Request, upload_tree: Tree, clients: int) -> np.ndarray:
        """Convert an upload to the vector that is masked and summed.

        The change of the parameters is computed by the same function as at the server of a simulation. Its context has
        this site as the only client that has replied, so the leading dimension of clients has length 1.

        Args:
            request: the request of the local update, with the parameters before it.
            upload_tree: the upload in plain.
            clients: the number of sites of the sum. The more there are, the smaller the values must be, so that the sum
                fits into int64.

        Returns:
            The weighted changes of the n parameters and the weight in fixed point, int64 (n + 1,).
        """
        context = AggregationContext(
            round=request.round,
            attempt=request.attempt,
            query=request.query,
            client_update=request.client_update,
            broadcast=request.download,
            per_client={},  # the download contains the values for this site too
            clients=(self.number,),
            cohort=clients,
            random_cohort=True,  # required, but read only by differential privacy, not here
        )
        upload = Upload.from_tree(upload_tree)
        stacked = upload.map(lambda leaf: leaf.unsqueeze(0))
        changes = compute_update(stacked, context)
        check_summable(stacked, changes)  # an upload with further values cannot be sent as a sum
        weight = 1.0 if self.equal_weights else float(upload.weight)
        change = {path: leaf[0] for path, leaf in changes.items()}
        return encode_contribution(change, weight, clients).cpu().numpy()

    def _reveal_shares(self, request: Request, log: ReplyLog, masks: Tree) -> Tree:
        """Decrypt the shares that remove the masks, for one set of sites only; erase the secret of the sum.

        The sums of two different sets would reveal their difference. So what was requested is stored with
        `log.record_once`, which raises `RefusalError` if another value is stored already; and a repeated request gets
        the stored reply.

        Args:
            request: the request.
            log: this site's earlier replies in the sum.
            masks: "survived", the numbers of the sites whose masked updates arrived, and "shares", uint8 (n, bytes),
                the encrypted shares for this site, one of each site that has dealt shares.

        Returns:
            {"shares": uint8, (n, bytes)}: the decrypted shares.
        """
        if not log.has(_VECTOR):  # the hash of the masked update, once it is sent
            raise RefusalError("the server requests shares before this site has sent anything under masks.")
        dealers = log.get(MASK_UPDATE)
        survivors = sorted(masks["survived"].tolist())
        self._check_survivors(survivors, dealers, cohort_size=len(log.get(DEAL_SHARES)["asked"]))
        if len(masks["shares"]) != len(dealers):
            raise RefusalError("the server sends shares of other sites than those that have dealt them.")
        shares = dict(zip(dealers, split_rows(masks["shares"]), strict=True))
        request_summary = [survivors, atomic_io.sha256(b"".join(shares.values()))]
        if not log.has(REVEAL_SHARES):
            if log.has(_SURVIVORS):
                # The server has begun this sum a second time, with new keys (another session), after an earlier session
                # revealed it. It must be of the same sites; this is checked before anything is decrypted.
                log.record_once(_SURVIVORS, survivors)
            decrypted = self._party(request, log).reveal(shares, frozenset(survivors))
            log.record_once(_SURVIVORS, survivors)  # only after `reveal` has accepted the shares
            hex_shares = [decrypted[number].to_bytes(masking.ELEMENT_BYTES, "big").hex() for number in dealers]
            log.record_once(REVEAL_SHARES, {"asked": request_summary, "answer": hex_shares})
        recorded = log.get(REVEAL_SHARES)
        # This refuses a second request that differs from the first: its summary differs from the stored one.
        log.record_once(REVEAL_SHARES, {**recorded, "asked": request_summary})
        # The reply to a repeated request is read from the log. The shares in it are sent to the server, so they are no
        # secret; all secrets are erased before they are sent.
        erase_file(self.folder / SUMS_FOLDER / SECRET_FILE)
        return {"shares": stack_rows([bytes.fromhex(share) for share in recorded["answer"]])}

    def _check_survivors(self, survivors: list[int], dealers: list[int], cohort_size: int) -> None:
        """Check the sites whose sum the server wants to unmask; raise `RefusalError` if they are not valid.

        Args:
            survivors: numbers of these sites, ascending.
            dealers: numbers of the sites that have dealt shares.
            cohort_size: the number of sites that were in the sum at its beginning.
        """
        has_duplicates = len(set(survivors)) < len(survivors)
        if self.number not in survivors or not set(survivors) <= set(dealers) or has_duplicates:
            raise RefusalError("the server names sites whose updates it cannot have, or leaves out this one's.")
        # With fewer sites the server could split a cohort in two and learn both sums.
        needed = masking.threshold(cohort_size)
        if len(survivors) < needed:
            raise RefusalError(
                f"the server requests the sum of {len(survivors)} sites of {cohort_size}, and {needed} are needed."
            )

    def _secret_file(self, sum_id: masking.SumId) -> SecretFile:
        name = f"{sum_id.round}/{sum_id.attempt}/{sum_id.query}/{sum_id.session}"
        return SecretFile(self.folder / SUMS_FOLDER / SECRET_FILE, name)

    def _current_sum(self, request: Request, log: ReplyLog) -> tuple[bytes, masking.SumId]:
        """Return the secret and the id of the sum that is in progress; raise `RefusalError` if there is none."""
        if not log.has(_SESSION):
            raise RefusalError("the server continues a sum that this site has not begun.")
        sum_id = make_sum_id(request, log.get(_SESSION))
        secret = self._secret_file(sum_id).read()
        if secret is None:
            raise RefusalError("the server continues a sum that is over for this site: its keys are erased.")
        return secret, sum_id

    def _party(self, request: Request, log: ReplyLog) -> masking.Party:
        """Restore this site's keys and the cohort of the sum from the files, once it has dealt shares."""
        secret, sum_id = self._current_sum(request, log)
        if not log.has(DEAL_SHARES):
            raise RefusalError("the server continues a sum for which this site has dealt no shares.")
        record = log.get(DEAL_SHARES)
        keys = tuple(bytes.fromhex(key) for key in record["keys"])
        cohort = masking.Cohort(sum_id, tuple(record["asked"]), tuple(record["numbers"]), keys)
        return masking.Party(secret, self.number, cohort)

    def _parse_numbers(self, leaf: Tensor) -> tuple[int, ...]:
        """Parse the numbers of the sites of a secure sum, from a server that may be hostile.

        Args:
            leaf: int64, (sites,).

        Raises:
            RefusalError: they are not ascending, not those of sites, or do not contain the number of this site.
        """
        numbers = tuple(leaf.tolist())
        count = len(self.sites.names)
        unknown = [number for number in numbers if not 0 <= number < count]
        if unknown:
            raise RefusalError(f"the server names site number {unknown[0]}, and the federation has {count} sites.")
        if len(set(numbers)) < len(numbers):
            raise RefusalError("the server names a site twice.")
        if list(numbers) != sorted(numbers):
            raise RefusalError("the server does not name sites in the order of their numbers.")
        if self.number not in numbers:
            raise RefusalError("the server requests a sum from this site that does not include it.")
        return numbers


@dataclass(frozen=True)
class SecretFile:
    """The file with the secret of a sum, 32 random bytes.

    Attributes:
        path: the file.
        sum_name: the sum that the secret must belong to.
    """

    path: Path
    sum_name: str

    def read_or_generate(self) -> bytes:
        """Read the secret of this sum, or generate it if there is none yet. The secret of any other sum is erased."""
        secret = self.read()
        if secret is None:
            erase_file(self.path)
            secret = secrets.token_bytes(masking.KEY_BYTES)
            self.path.parent.mkdir(parents=True, exist_ok=True)
            atomic_io.write_atomically(self.path, secret + self.sum_name.encode(), private=True)
        return secret

    def read(self) -> bytes | None:
        """Read the secret; None if it was erased, or the file has the secret of another sum."""
        data = atomic_io.read(self.path) or b""
        return data[: masking.KEY_BYTES] if data[masking.KEY_BYTES :] == self.sum_name.encode() else None


def erase_file(path: Path) -> None:
    """Overwrite a file with zeros and remove it, if it exists. Raises OSError.

    On flash memory this is not enough: a copy of the old content may remain in blocks that are not in use.
    """
    try:
        with atomic_io.open_file(path, os.O_WRONLY) as handle:
            atomic_io.write_all(handle, bytes(os.fstat(handle).st_size))
            os.fsync(handle)
    except FileNotFoundError:
        return
    path.unlink(missing_ok=True)
    atomic_io.sync_folder(path.parent)


def erase_secrets(folder: Path) -> None:
    """Erase the secrets in all runs of a federation's folder."""
    for path in folder.glob(f"*/{SUMS_FOLDER}/{SECRET_FILE}"):
        erase_file(path)


class ReplyLog:
    """A site's replies in the secure sums of one client update: one for each stage, on the disk before it is sent."""

    def __init__(self, folder: Path, request: Request) -> None:
        """Open the log of the request's round, attempt and query in a folder."""
        self.path = folder / f"{request.round:06d}-{request.attempt:03d}-{request.query:03d}.json"
        self._records = read_private_json(self.path) or {}

    def begin(self, session: str) -> None:
        """Begin a session of a secure sum: forget this site's replies in an earlier one, unless it has begun already.

        A server that restarts during a sum begins another session of it, with new keys. The set of sites whose
        sum was revealed remains, because the sums of two different sets would reveal their difference.
        """
        if self._records.get(_SESSION) != session:
            survivors = self._records.get(_SURVIVORS)
            self._records = {_SESSION: session}
            if survivors is not None:
                self._records[_SURVIVORS] = survivors
            self._write()

    def has(self, stage: str) -> bool:
        """Check that there is a record of this stage."""
        return stage in self._records

    def get(self, stage: str) -> Any:
        """Return the record of a stage."""
        return self._records[stage]

    def record_once(self, stage: str, record: Any) -> None:
        """Store the record of a stage; raise `RefusalError` if a different one is stored already."""
        if stage not in self._records:
            self._records[stage] = record
            self._write()
        if self._records[stage] != record:
            raise RefusalError("this site has already replied for that round, to a different request.")

    def _write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        atomic_io.write_atomically(self.path, atomic_io.json_line(self._records), private=True)
