"""A site's part in a sum of which the server sees no single term (`halfmoon.aggregation.secure.masking`).

The server asks for keys of this sum (`KEYS`), shares (`DEAL`), the masked update (`MASK`), and what takes the masks off
(`REVEAL`). Each site checks that the keys are signed with the lasting keys of the others, so that a server cannot put
its own in. An answer follows from the secret of the sum and from notes on the disk: the same question gets the same
answer, and no other question gets any. So no vector leaves twice under the same masks, and no shares for two sets of
sites. The secret lies in one file. It is overwritten before the last answer of its sum leaves, or when another sum
begins.
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

from halfmoon.aggregation import AggregationContext, update
from halfmoon.aggregation.secure import masking, signing
from halfmoon.aggregation.secure.fixed_point import check_upload, contribution
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

SUMS_FOLDER, SECRET_FILE = "sums", "secret"
"""In a run's folder: notes of sums, and among them the secret of the one that is under way."""


def check_masks(masks: TreeSpec, terms: Terms) -> None:
    """Raise `RefusalError` for the masks of a request, by their names, shapes and types: nothing else was read."""
    if masks and not terms.config.secure_aggregation:
        raise RefusalError("the server asks for a part in a masked sum, but nobody agreed on such sums.")
    fault = next(_faults(masks, len(terms.sites)), None)
    if fault is not None:
        raise RefusalError(f"what the server sends for a masked sum cannot be used: {fault}.")


def _faults(masks: TreeSpec, sites: int) -> Iterator[str]:
    if not masks:
        return
    stage = next(iter(masks)).split("/")[0]
    leaves = STAGE_TENSORS.get(stage, {})
    if set(masks) != {f"{stage}/{name}" for name in leaves}:
        yield "it is about no stage of a sum"
        return
    for path, kind in masks.items():
        name = path.removeprefix(f"{stage}/")
        if kind is None or not kind[0] or (kind[0][1:], kind[1]) != leaves[name]:
            yield f"its {path} are none"
        elif stage == ANNOUNCE_KEYS and kind[0][0] != SESSION_BYTES:
            yield f"its {path} has {kind[0][0]} bytes, not {SESSION_BYTES}"
        elif stage != ANNOUNCE_KEYS and not kind[0][0] <= sites:
            yield f"its {path} are of {kind[0][0]} sites, and the federation has {sites}"
    if len({kind[0][0] for path, kind in masks.items() if kind is not None and path.split("/")[1] in SITE_TENSORS}) > 1:
        yield "its keys are of other sites than it names"


@dataclass(frozen=True)
class SumParticipant:
    """The part of site `number` in the sums of one run; `folder` has their notes, `key` is its lasting key.

    With `even` it weighs 1. No sum has fewer than `least` sites: a server could leave an honest one alone with its own.
    """

    key: ec.EllipticCurvePrivateKey
    folder: Path
    number: int
    sites: KnownKeys
    even: bool
    least: int = masking.LEAST

    @cached_property
    def lasting(self) -> bytes:
        return signing.public(self.key.public_key())

    def reply_to(self, request: Request, plain: Callable[[Request], Reply]) -> Reply:
        """Return the answer to a request, of which `plain` makes the visible part; raise `RefusalError`."""
        if not request.masks:
            if request.client_update:
                raise RefusalError("the server asks for an upload of its own, but all agreed that it sees sums alone.")
            return plain(request)
        ((stage, masks),) = request.masks.items()
        if (stage == MASK_UPDATE) != bool(request.client_update):
            raise RefusalError("the server asks for a client update and for the rest of a sum at once.")
        notes = ReplyLog(self.folder / SUMS_FOLDER, request)
        if stage == MASK_UPDATE:
            return self._mask(request, notes, masks, plain)
        answers = {ANNOUNCE_KEYS: self._announce, DEAL_SHARES: self._deal, REVEAL_SHARES: self._reveal}
        return replace(plain(request), upload=answers[stage](request, notes, masks))

    def _announce(self, request: Request, notes: ReplyLog, masks: Tree) -> Tree:
        session = masks["session"].numpy().tobytes().hex()
        sum_id = make_sum_id(request, session)
        secret = self._secret(sum_id)
        if notes.has(DEAL_SHARES) and notes.get("session") == session and secret.read() is None:
            raise RefusalError("the server asks for keys of a sum that is over for this site.")
        keys = masking.announced(secret.begin())
        notes.begin(session)
        signature = signing.sign(self.key, masking.announcement(sum_id, self.number, keys))
        return {"keys": stack_rows([keys])[0], "signature": stack_rows([signature])[0]}

    def _deal(self, request: Request, notes: ReplyLog, masks: Tree) -> Tree:
        """Return this site's shares for each of those whose keys are theirs."""
        secret, sum_id = self._current(request, notes)
        cohort, numbers = self._numbers(masks["asked"]), self._numbers(masks["sites"])
        subject = f"the server asks for a sum of {len(cohort)} sites"
        if len(cohort) < masking.LEAST:
            raise RefusalError(f"{subject}: of fewer than {masking.LEAST} it hides nothing.")
        if len(cohort) < self.least:
            raise RefusalError(f"{subject}, but all agreed on cohorts of {self.least}: of fewer it hides less.")
        if not set(numbers) <= set(cohort):
            raise RefusalError("the server has keys of sites that are not in the sum.")
        if len(numbers) < (needed := masking.threshold(len(cohort))):
            raise RefusalError(f"{len(numbers)} sites of {len(cohort)} have keys, and {needed} are needed.")
        keys, lasting = split_rows(masks["keys"]), [row.lstrip(b"\0") for row in split_rows(masks["lasting"])]
        here = numbers.index(self.number)
        if keys[here] != masking.announced(secret) or lasting[here] != self.lasting:
            raise RefusalError("the server has other keys of this site than its own.")
        for number, own, key, signature in zip(numbers, lasting, keys, split_rows(masks["signatures"]), strict=True):
            if not signing.signed(own, masking.announcement(sum_id, number, key), signature):
                name = self.sites.names[number]
                raise RefusalError(f"the server has keys of {name} for this sum that {name} has not signed.")
        self.sites.check(dict(zip(numbers, lasting, strict=True)))
        notes.record_once(
            DEAL_SHARES, {"asked": list(cohort), "numbers": list(numbers), "keys": [key.hex() for key in keys]}
        )
        return {"shares": stack_rows(self._party(request, notes).deal())}

    def _mask(self, request: Request, notes: ReplyLog, masks: Tree, plain: Callable[[Request], Reply]) -> Reply:
        party = self._party(request, notes)
        numbers = self._numbers(masks["sites"])
        if not set(numbers) <= set(party.cohort.numbers):
            raise RefusalError("the server counts sites in that were not asked for shares.")
        if len(numbers) < party.cohort.threshold:
            raise RefusalError(f"{len(numbers)} sites have dealt shares, and {party.cohort.threshold} are needed.")
        notes.record_once(MASK_UPDATE, list(numbers))
        reply = plain(request)
        vector = self._vector(request, reply.upload, len(party.cohort.members))
        # Other values under the same masks would show by how much they differ.
        notes.record_once("vector", atomic_io.digest(vector.tobytes()))
        hidden = torch.from_numpy(party.mask(vector, masking.Masking(party.cohort, numbers)).view(np.int64))
        return replace(reply, upload={"sum": hidden})

    def _vector(self, request: Request, upload: Tree, clients: int) -> np.ndarray:
        at = (request.round, request.attempt, request.query)
        context = AggregationContext(*at, request.client_update, request.download, {}, (self.number,), clients, True)
        plain = Upload.from_tree(upload)
        stacked = plain.map(lambda leaf: leaf.unsqueeze(0))
        changes = update(stacked, context)
        check_upload(stacked, changes)
        weight = 1.0 if self.even else float(plain.weight)
        return contribution({path: leaf[0] for path, leaf in changes.items()}, weight, clients).cpu().numpy()

    def _reveal(self, request: Request, notes: ReplyLog, masks: Tree) -> Tree:
        """Return the shares that take the masks off: of one set of sites, once and for all. Then the sum is over."""
        if not notes.has("vector"):
            raise RefusalError("the server asks what takes masks off before this site has sent anything under one.")
        numbers, survived = notes.get(MASK_UPDATE), sorted(masks["survived"].tolist())
        count = len(notes.get(DEAL_SHARES)["asked"])
        needed = masking.threshold(count)
        if self.number not in survived or not set(survived) <= set(numbers) or len(set(survived)) < len(survived):
            raise RefusalError("the server names sites whose updates it cannot have, or leaves out this one's.")
        if len(survived) < needed:
            raise RefusalError(
                f"the server asks for the sum of {len(survived)} sites of {count}, and {needed} are needed."
            )
        if len(masks["shares"]) != len(numbers):
            raise RefusalError("the server sends shares of other sites than those that have dealt them.")
        shares = dict(zip(numbers, split_rows(masks["shares"]), strict=True))
        question = [survived, atomic_io.digest(b"".join(shares.values()))]
        if not notes.has(REVEAL_SHARES):
            if notes.has("told"):  # in a sum of this client update that was begun before
                notes.record_once("told", survived)
            plain = self._party(request, notes).reveal(shares, frozenset(survived))
            notes.record_once("told", survived)
            answer = [plain[number].to_bytes(masking.WIDE, "big").hex() for number in numbers]
            notes.record_once(REVEAL_SHARES, {"asked": question, "answer": answer})
        note = notes.get(REVEAL_SHARES)
        notes.record_once(REVEAL_SHARES, {**note, "asked": question})
        # The server gets the shares, so that they are no secret; all else is gone before they are.
        erase_file(self.folder / SUMS_FOLDER / SECRET_FILE)
        return {"shares": stack_rows([bytes.fromhex(share) for share in note["answer"]])}

    def _secret(self, sum_id: masking.SumId) -> SumSecret:
        name = f"{sum_id.round}/{sum_id.attempt}/{sum_id.query}/{sum_id.session}"
        return SumSecret(self.folder / SUMS_FOLDER / SECRET_FILE, name)

    def _current(self, request: Request, notes: ReplyLog) -> tuple[bytes, masking.SumId]:
        """Return the secret of the sum that is under way, and which one it is."""
        if not notes.has("session"):
            raise RefusalError("the server goes on with a sum that this site has not begun.")
        sum_id = make_sum_id(request, notes.get("session"))
        secret = self._secret(sum_id).read()
        if secret is None:
            raise RefusalError("the server goes on with a sum that is over for this site: its keys are erased.")
        return secret, sum_id

    def _party(self, request: Request, notes: ReplyLog) -> masking.Party:
        secret, sum_id = self._current(request, notes)
        if not notes.has(DEAL_SHARES):
            raise RefusalError("the server goes on with a sum for which this site has dealt no shares.")
        note = notes.get(DEAL_SHARES)
        keys = tuple(bytes.fromhex(key) for key in note["keys"])
        return masking.Party(
            secret, self.number, masking.Cohort(sum_id, tuple(note["asked"]), tuple(note["numbers"]), keys)
        )

    def _numbers(self, leaf: Tensor) -> tuple[int, ...]:
        numbers, count = tuple(leaf.tolist()), len(self.sites.names)
        strange = [number for number in numbers if not 0 <= number < count]
        fault = None
        if strange:
            fault = f"the server names site number {strange[0]}, and the federation has {count} sites."
        elif len(set(numbers)) < len(numbers):
            fault = "the server names a site twice."
        elif list(numbers) != sorted(numbers):
            fault = "the server does not name sites in the order of their numbers."
        elif self.number not in numbers:
            fault = "the server asks for a part in a sum without this site."
        if fault is not None:
            raise RefusalError(fault)
        return numbers


@dataclass(frozen=True)
class SumSecret:
    """The secret of a sum, 32 random bytes in the file `path`, and which sum that is."""

    path: Path
    sum: str

    def begin(self) -> bytes:
        """Return the secret, generated where this sum has none yet; that of any other sum is erased."""
        secret = self.read()
        if secret is None:
            erase_file(self.path)
            secret = secrets.token_bytes(masking.KEY)
            self.path.parent.mkdir(parents=True, exist_ok=True)
            atomic_io.replace(self.path, secret + self.sum.encode(), private=True)
        return secret

    def read(self) -> bytes | None:
        """Return the secret; None where it was erased, or the file has that of another sum."""
        data = atomic_io.read(self.path) or b""
        return data[: masking.KEY] if data[masking.KEY :] == self.sum.encode() else None


def erase_file(path: Path) -> None:
    """Overwrite a file with zeros and remove it; flash memory may keep older copies. Raises OSError."""
    try:
        with atomic_io.opened(path, os.O_WRONLY) as handle:
            atomic_io.write_all(handle, bytes(os.fstat(handle).st_size))
            os.fsync(handle)
    except FileNotFoundError:
        return
    path.unlink(missing_ok=True)
    atomic_io.sync_folder(path.parent)


def erase_secrets(folder: Path) -> None:
    for path in folder.glob(f"*/{SUMS_FOLDER}/{SECRET_FILE}"):
        erase_file(path)


class ReplyLog:
    """A site's answers in the sums of one client update: one answer a stage, on the disk before it leaves."""

    def __init__(self, folder: Path, request: Request) -> None:
        self.path = folder / f"{request.round:06d}-{request.attempt:03d}-{request.query:03d}.json"
        self._facts = read_private_json(self.path) or {}

    def begin(self, session: str) -> None:
        """Forget the answers of another session, but not of which sites' sum shares were told."""
        if self._facts.get("session") != session:
            survivors = self._facts.get("told")
            self._facts = {"session": session} | ({} if survivors is None else {"told": survivors})
            self._write()

    def has(self, stage: str) -> bool:
        return stage in self._facts

    def get(self, stage: str) -> Any:
        return self._facts[stage]

    def record_once(self, stage: str, facts: Any) -> None:
        """Write facts down, or raise `RefusalError` where there are others."""
        if stage not in self._facts:
            self._facts[stage] = facts
            self._write()
        if self._facts[stage] != facts:
            raise RefusalError("this site has answered for that round already, and this is another question.")

    def _write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        atomic_io.replace(self.path, atomic_io.render(self._facts), private=True)
