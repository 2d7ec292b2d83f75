"""A site's part in a sum of which the server sees no single term (`halfmoon.secure.masking`).

The server asks three times: for a key and shares (`BEGIN`), for the work (`MASK`), and for what takes the masks off the
sum (`REVEAL`). All of them are about one client update: a round, an attempt and a query. What a site answers follows
from its secret and from what it has put down of that client update: the same question gets the same answer, also from a
new process, and no other question gets any. So nobody gets its vector twice under the same masks with other values, and
nobody gets shares for two sets of sites, whose sums would differ by a single one.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from halfmoon.aggregation import AggregationContext, update
from halfmoon.api.uploads import Upload
from halfmoon.core.errors import UserError
from halfmoon.core.tree import Tree
from halfmoon.federation.protocol.messages import UNFIT, Reply, Request
from halfmoon.federation.protocol.terms import Terms
from halfmoon.federation.protocol.tree_spec import TreeSpec
from halfmoon.federation.site.runtime import Refused
from halfmoon.secure.fixed_point import check_upload, contribution
from halfmoon.secure.masking import KEY, LEAST, SEALED, WIDE, Cohort, Masking, Party, Scene, lasting, public
from halfmoon.storage import atomic_io

BEGIN, MASK, REVEAL = "begin", "mask", "reveal"
"""What a request's masks are for: each is the one name at the top of them."""

SECRET, SUMS, KNOWN = "secret", "sums", "sum_keys.json"
"""In a site's home its secret; in a run's folder what was answered; in a federation's the keys that sites have had."""


def secret(home: Path) -> bytes:
    """Return the secret of the site whose home this is, made where there is none: only its owner can read it."""
    path = home / SECRET
    held = atomic_io.read(path)
    if held is None:
        held = secrets.token_bytes(KEY)
        atomic_io.replace(path, held, private=True)
    if len(held) != KEY:
        raise UserError(f"{path} is damaged: put it back from a backup, or remove it to have a new one made.")
    return held


def shown(home: Path, federation: str) -> str:
    """Return the public key, in hexadecimal, under which others deal shares to the site in all sums of a federation."""
    return public(lasting(secret(home), federation)).hex()


def look(masks: TreeSpec, terms: Terms) -> None:
    """Raise `Refused` for what came for a sum, by its names, shapes and types: nothing else was read."""
    if masks and not terms.config.secure_aggregation:
        raise Refused(UNFIT, "the server asks for a part in a masked sum, but nobody agreed on such sums.")
    fault = next(_faults(masks, len(terms.sites)), None)
    if fault is not None:
        raise Refused(UNFIT, f"what the server sends for a masked sum cannot be used: {fault}.")


_LEAVES: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
    "sites": ((), torch.int64),
    "keys": ((KEY,), torch.uint8),
    "shares": ((SEALED,), torch.uint8),
    "survived": ((), torch.int64),
}
"""What is told of each site, by name: its shape without the sites, and its type."""

_STAGES = {BEGIN: ("sites", "keys"), MASK: ("sites", "keys"), REVEAL: ("survived", "shares")}


def _faults(masks: TreeSpec, sites: int) -> Iterator[str]:
    if not masks:
        return
    stage = next(iter(masks)).split("/")[0]
    if set(masks) != {f"{stage}/{name}" for name in _STAGES.get(stage, ())}:
        yield "it is about no stage of a sum"
        return
    for path, kind in masks.items():
        rest, dtype = _LEAVES[path.removeprefix(f"{stage}/")]
        if kind is None or not kind[0] or kind[0][1:] != rest or kind[1] != dtype:
            yield f"its {path} are none"
        elif not kind[0][0] <= sites:
            yield f"its {path} are of {kind[0][0]} sites, and the federation has {sites}"
    counts = {kind[0][0] for path, kind in masks.items() if kind is not None and path != f"{REVEAL}/survived"}
    if len(counts) > 1:
        yield "its keys are of other sites than it names"


@dataclass(frozen=True)
class Part:
    """The part of site `number` of `sites` in the sums of one run, whose `folder` remembers them.

    With `even` it weighs 1, whatever it has (client-level privacy). No sum is of fewer than `least` sites, the cohort
    that all agreed on: a server that asks for less could leave honest sites out until one is alone with invented ones.
    """

    secret: bytes
    folder: Path
    number: int
    sites: int
    even: bool
    least: int = LEAST

    def answer(self, request: Request, do: Callable[[Request], Reply]) -> Reply:
        """Return the answer to a request; `do` does what is asked of a site whose uploads are seen.

        Raise `Refused` for what would tell more than a sum, `UserError` for an update that does not fit into one, and
        OSError.
        """
        if not request.masks:
            if request.work:
                raise Refused(
                    UNFIT, "the server asks for an upload of its own, but all agreed that it sees sums alone."
                )
            return do(request)
        ((stage, told),) = request.masks.items()
        if (stage == MASK) != bool(request.work):
            raise Refused(UNFIT, "the server asks for a work and for the rest of a sum at once.")
        visit = _Visit(self.folder / SUMS, request)
        if stage == BEGIN:
            up = self._begin(request, visit, told)
        elif stage == MASK:
            return self._mask(request, visit, told, do)
        else:
            up = self._reveal(visit, self._party(request, visit), told)
        return replace(do(request), up=up)

    def _begin(self, request: Request, visit: _Visit, told: Tree) -> Tree:
        """Return this site's key of the sum, and its shares for each of the cohort."""
        numbers = _numbers(told["sites"], self.sites, self.number)
        what = f"the server asks for a sum of {len(numbers)} sites"
        if len(numbers) < LEAST:
            raise Refused(UNFIT, f"{what}: of fewer than {LEAST} it hides nothing.")
        if len(numbers) < self.least:
            raise Refused(UNFIT, f"{what}, but all agreed on cohorts of {self.least}: of fewer it hides less.")
        cohort = Cohort(_scene(request), numbers, _rows(told["keys"]))
        mine = public(lasting(self.secret, request.federation))
        if cohort.keys[numbers.index(self.number)] != mine:
            raise Refused(UNFIT, "the server has another key of this site than its own.")
        self._remember(numbers, cohort.keys)
        visit.once(BEGIN, {"numbers": list(numbers), "keys": [key.hex() for key in cohort.keys]})
        party = Party(self.secret, self.number, cohort)
        return {"key": _bytes([public(party.private)])[0], "shares": _bytes(party.deal())}

    def _remember(self, numbers: tuple[int, ...], keys: tuple[bytes, ...]) -> None:
        """Keep the first key that each site was said to have in this federation; raise `Refused` for another one."""
        path = self.folder.parent / KNOWN
        held = atomic_io.read_json(path)
        if held is None and atomic_io.read(path) is not None:
            raise UserError(f"{path} is damaged: put it back from a backup; the round goes on without this site.")
        known = dict(held or {})
        for number, key in zip(numbers, keys, strict=True):
            if known.setdefault(str(number), key.hex()) != key.hex():
                raise Refused(
                    UNFIT,
                    f"the server says that site number {number} has another key than in sums before. Where that site "
                    f"lost its own, its people say so, and {KNOWN} is removed here.",
                )
        if known != held:
            path.parent.mkdir(parents=True, exist_ok=True)
            atomic_io.replace(path, atomic_io.render(known), private=True)

    def _mask(self, request: Request, visit: _Visit, told: Tree, do: Callable[[Request], Reply]) -> Reply:
        """Return what came of the work, with the masked update in place of the upload."""
        party = self._party(request, visit)
        numbers, keys = _numbers(told["sites"], self.sites, self.number), _rows(told["keys"])
        masking = Masking(party.cohort, numbers, keys)
        if not set(numbers) <= set(party.cohort.numbers) or keys[numbers.index(self.number)] != public(party.private):
            raise Refused(
                UNFIT, "the server counts sites in that were not asked for shares, or has another key of this one."
            )
        if len(numbers) < party.cohort.threshold:
            raise Refused(UNFIT, f"{len(numbers)} sites have dealt shares, and {party.cohort.threshold} are needed.")
        visit.once(MASK, {"numbers": list(numbers), "keys": [key.hex() for key in keys]})
        reply = do(request)
        vector = self._vector(request, reply.up, len(party.cohort.numbers))
        # Other values under the same masks would show by how much they differ.
        visit.once("vector", atomic_io.digest(vector.tobytes()))
        hidden = torch.from_numpy(party.mask(vector, masking).view(np.int64))
        return replace(reply, up={"sum": hidden})

    def _vector(self, request: Request, up: Tree, asked: int) -> np.ndarray:
        question = AggregationContext(
            request.round, request.attempt, request.query, request.work, request.down, {}, (self.number,), asked, True
        )
        sent = Upload.of(up)
        stacked = sent.map(lambda leaf: leaf.unsqueeze(0))
        changes = update(stacked, question)
        check_upload(stacked, changes)
        weight = 1.0 if self.even else float(sent.weight)
        return contribution({path: leaf[0] for path, leaf in changes.items()}, weight, asked).cpu().numpy()

    def _reveal(self, visit: _Visit, party: Party, told: Tree) -> Tree:
        """Return the shares that take the masks off: of one set of sites, once and for all."""
        if not visit.has("vector"):
            raise Refused(UNFIT, "the server asks what takes masks off before this site has sent anything under one.")
        numbers = visit.get(MASK)["numbers"]
        survived = sorted(told["survived"].tolist())
        if self.number not in survived or not set(survived) <= set(numbers) or len(set(survived)) < len(survived):
            raise Refused(UNFIT, "the server names sites whose updates it cannot have, or leaves out this one's.")
        if len(survived) < party.cohort.threshold:
            raise Refused(
                UNFIT,
                f"the server asks for the sum of {len(survived)} sites of {len(party.cohort.numbers)}, and "
                f"{party.cohort.threshold} are needed.",
            )
        if len(told["shares"]) != len(numbers):
            raise Refused(UNFIT, "the server sends shares of other sites than those that have dealt them.")
        visit.once(REVEAL, survived)
        dealt = dict(zip(numbers, _rows(told["shares"]), strict=True))
        shares = party.reveal(dealt, frozenset(survived))
        return {"shares": _bytes([shares[number].to_bytes(WIDE, "big") for number in numbers])}

    def _party(self, request: Request, visit: _Visit) -> Party:
        if not visit.has(BEGIN):
            raise Refused(UNFIT, "the server goes on with a sum that this site has not begun.")
        held = visit.get(BEGIN)
        keys = tuple(bytes.fromhex(key) for key in held["keys"])
        return Party(self.secret, self.number, Cohort(_scene(request), tuple(held["numbers"]), keys))


class _Visit:
    """What a site has put down of one client update: one answer a stage, on the disk before it is given."""

    def __init__(self, folder: Path, request: Request) -> None:
        name = f"{request.round:06d}-{request.attempt:03d}-{request.query:03d}.json"
        self.path = folder / name
        held = atomic_io.read(self.path)
        if held is not None and atomic_io.read_json(self.path) is None:
            raise UserError(f"{self.path} is damaged: put it back from a backup; the round goes on without this site.")
        self._held = atomic_io.read_json(self.path) or {}

    def has(self, stage: str) -> bool:
        return stage in self._held

    def get(self, stage: str) -> Any:
        return self._held[stage]

    def once(self, stage: str, facts: Any) -> None:
        """Put facts down, or raise `Refused` where there are others."""
        if stage not in self._held:
            self._held[stage] = facts
            self.path.parent.mkdir(parents=True, exist_ok=True)
            atomic_io.replace(self.path, atomic_io.render(self._held), private=True)
        if self._held[stage] != facts:
            raise Refused(UNFIT, "this site has answered for that round already, and this is another question.")


def _scene(request: Request) -> Scene:
    return Scene(request.federation, request.run, request.round, request.attempt, request.query)


def _numbers(leaf: Tensor, sites: int, mine: int) -> tuple[int, ...]:
    """Return the numbers of sites in a message; raise `Refused` where they are none of this federation's."""
    numbers = tuple(leaf.tolist())
    strange = [number for number in numbers if not 0 <= number < sites]
    if strange:
        raise Refused(UNFIT, f"the server names site number {strange[0]}, and the federation has {sites} sites.")
    if len(set(numbers)) < len(numbers):
        raise Refused(UNFIT, "the server names a site twice.")
    if list(numbers) != sorted(numbers):
        raise Refused(UNFIT, "the server does not name sites in the order of their numbers.")
    if mine not in numbers:
        raise Refused(UNFIT, "the server asks for a part in a sum without this site.")
    return numbers


def _rows(leaf: Tensor) -> tuple[bytes, ...]:
    return tuple(row.numpy().tobytes() for row in leaf)


def _bytes(rows: Sequence[bytes]) -> Tensor:
    return torch.from_numpy(np.frombuffer(b"".join(rows), np.uint8).reshape(len(rows), -1).copy())
